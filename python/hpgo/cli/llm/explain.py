"""`hpgo llm explain`: the time and memory of a plan by term, and the reasons against other configurations."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import shorten
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.llm.options import PLATFORM, STACK, draw, read_platform, same_constants, shell_words
from hpgo.cli.terminal import say, width
from hpgo.cli.values import AS_JSON, PLAN, STILL, is_folder_name, written
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.platform import Platform
    from hpgo.llm.stack import Stack


class _Changes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Type of the option --compare-with: changes like `tp=8,pp=2`."""

    name = "degrees"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        """Return the changes by name. Values that are no changes fail with the option's name."""
        if isinstance(value, dict):
            return value
        from hpgo.llm.comparison import read_changes

        try:
            return read_changes(str(value))
        except ArgumentError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


class ExplainOptions(Options):
    """Options on the plan and on the configuration to compare it with."""

    plan: str = argument(type=PLAN, metavar="LLM-PLAN.json|JOB/")
    compare_with: dict[str, object] | None = option(
        "--compare-with",
        type=_Changes(),
        metavar="NAME=VALUE[,…]",
        help="Another configuration: `tp=8,pp=2`, `recompute=full` or `recompute_modules=mlp+layernorm`.",
    )
    why_not: dict[str, object] | None = option(
        "--why-not",
        type=_Changes(),
        metavar="NAME=VALUE[,…]",
        help="The fastest configuration with these values: `tp=8,pp=4`.",
    )
    stack: str | None = STACK
    platform: str | None = PLATFORM
    outputs: tuple[str, ...] = written(STILL, "Draw the plan on its cluster: .svg, .png, .pdf or .html. Repeatable.")
    as_json: bool = AS_JSON


@takes(ExplainOptions)
def command(options: ExplainOptions) -> None:
    """Explain where the time and memory of a plan go, and why no other configuration was chosen.

    LLM-PLAN.json is a file that `hpgo llm plan -o` wrote, and JOB/ is a job folder.

    Without --compare-with, the report lists what each change of one degree would cost: twice and half of each, another
    ZeRO stage, recomputation on or off.

    With --compare-with, it compares every term of the step time and of the memory. If the other configuration does not
    fit, the report states the shortfall. If the framework does not run it, the report names the rule.

    With --why-not, it searches for the fastest configuration with these values, and compares that one.

    \b
    Examples:
      hpgo llm explain llm-plan.json
      hpgo llm explain llm-plan.json -o llm-plan.svg
      hpgo llm explain llm-plan.json --compare-with tp=8,pp=2
      hpgo llm explain llm-plan.json --why-not tp=8,pp=4
      hpgo llm explain llm-plan.json --compare-with recompute=full --json
    """
    from hpgo.llm.comparison import changed, compare
    from hpgo.llm.estimate import estimate_on, stack_on
    from hpgo.llm.measured_steps import JOB_PLAN
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.platform import Platform
    from hpgo.llm.stack import stacks
    from hpgo.show import comparison_report, llm_report

    if options.compare_with is not None and options.why_not is not None:
        raise click.UsageError("give one of --compare-with and --why-not")
    if is_folder_name(options.plan):
        options = replace(options, plan=str(Path(options.plan) / JOB_PLAN))
    held = LlmPlan.read(options.plan)
    measured = read_platform(options.platform)
    own = None if isinstance(measured, Platform) else held.estimate.stack
    if options.stack is None and own is not None and own not in stacks():
        raise ArgumentError(
            f"the stack of the plan is `{shorten(own)}`, but no built-in stack has this name",
            "give its file: `--stack FILE`, or the platform of the plan: `--platform FILE`",
            code="unknown_name",
        )
    stack = stack_on(options.stack or own, held.cluster, None, measured)

    # The plan's own configuration is estimated again, so that both sides use the same constants: from --platform,
    # or of this version.
    def estimated(changes: Mapping[str, object]) -> LlmEstimate:
        known = held.estimate
        return estimate_on(
            held.transformer, held.cluster, changed(known.parallelism, changes), stack, measured,
            global_batch_size=known.global_batch_size, seq_length=known.seq_length,
        )  # fmt: skip

    if held.estimate.measured_steps and measured is None:
        say("note", "the plan was made with a platform file, but this report has none: add --platform FILE")
    chosen = estimated({})
    draw(chosen, held.cluster, options.outputs)
    if options.why_not is not None:
        _why_not(options, options.why_not, held=held, chosen=chosen, stack=stack, measured=measured)
        return
    if options.compare_with is None:
        tried = _around(held, estimated)
        named = [(_words(changes, " "), one) for changes, one in tried]
        if options.as_json:
            kept = [{"change": name, **(_kept(one))} for name, one in named]
            click.echo(json_text({"chosen": llm_report.document(chosen), "next": kept}))
        else:
            report = llm_report.lines(chosen, width(), stack=stack)
            report += ["", *comparison_report.around(chosen, named, width())]
            click.echo("\n".join([*report, *llm_report.next_commands(_next(options, held, tried))]))
        return
    try:
        other = estimated(options.compare_with)
    except HpgoError as error:
        error = _with_remedy(error, held, options.compare_with)
        why = f"{error.message}: {error.hint}" if error.hint else error.message
        click.echo(json_text({"refused": why}) if options.as_json else f"No framework runs this configuration: {why}")
        return
    found, forbidden = compare(chosen, other), _forbidden(held, other)
    if options.as_json:
        click.echo(json_text(comparison_report.document(found, forbidden)))
    else:
        report = comparison_report.lines(found, forbidden, width())
        click.echo("\n".join([*report, *llm_report.next_commands(_next(options, held, []))]))


def _why_not(
    options: ExplainOptions,
    fixed: dict[str, object],
    *,
    held: LlmPlan,
    chosen: LlmEstimate,
    stack: Stack,
    measured: Platform | DeviceRecord | None,
) -> None:
    """Print a comparison with the fastest configuration that has the `fixed` values, or why there is none."""
    from hpgo.llm.comparison import compare
    from hpgo.llm.search import plan_llm
    from hpgo.llm.simplicity import is_tight, simpler_by
    from hpgo.show import comparison_report, llm_report

    known, asked = held.estimate, _words(fixed, " ").replace(",", ", ")
    try:
        found = plan_llm(
            held.transformer, held.cluster, global_batch_size=known.global_batch_size, seq_length=known.seq_length,
            precision=known.parallelism.precision, devices=known.gpus, framework=held.framework,  # type: ignore[arg-type]  # a name with its version
            fix=fixed, stack=stack, platform=measured, top=1,  # type: ignore[arg-type]  # checked by the search
        )  # fmt: skip
    except HpgoError as error:
        why = f"{error.message}; {error.hint}" if error.hint else error.message
        text = f"No configuration has {asked}: {why}"
        click.echo(json_text({"refused": why}) if options.as_json else "\n".join(textwrap.wrap(text, width())))
        return
    compared = compare(chosen, found.fastest)
    if options.as_json:
        facts = {"fixed": fixed, "configurations": found.configurations}
        click.echo(json_text(facts | comparison_report.document(compared)))
        return
    text = f"Fastest of {found.configurations:,} configurations with {asked}, beside the plan's:"
    saved = simpler_by(chosen.parallelism, found.fastest.parallelism)
    if not compared.apart and saved:
        text = f"{text[:-1]}. Of equally fast configurations, the simplest is preferred: this one needs {saved}."
    elif is_tight(found.fastest) and not is_tight(chosen):
        text = f"{text[:-1]}. This one leaves less memory free than the error of the estimate."
    report = [*textwrap.wrap(text, width()), "", *comparison_report.lines(compared, "", width())]
    click.echo("\n".join([*report, *llm_report.next_commands(_next(options, held, []))]))


def _with_remedy(error: HpgoError, held: LlmPlan, against: Mapping[str, object]) -> HpgoError:
    """Return the error of a configuration that no framework runs, with a hint that --compare-with accepts."""
    from hpgo.llm.comparison import changed
    from hpgo.llm.parallelism import DEGREES, DegreeError
    from hpgo.llm.suggestions import with_accepted

    known = held.estimate
    if not isinstance(error, DegreeError):
        return error
    asked = {name: int(str(against.get(name, getattr(known.parallelism, name)))) for name in DEGREES}
    others = {name: value for name, value in against.items() if name not in DEGREES}
    if others.get("pp_schedule", "1f1b") != "1f1b" and "vpp" not in against:
        asked["vpp"] = 2
    try:
        # Every schedule accepts several ranks with two virtual stages, so degrees can be tried from there.
        base = changed(known.parallelism, {**others, "pp": max(2, asked["pp"]), "vpp": 2})
        if "pp" in against:
            base = replace(base, first_rank_layers=None, last_rank_layers=None)
    except ArgumentError:
        return error
    return with_accepted(
        error, held.transformer, base, asked, gpus=known.gpus, max_gpus=known.gpus,
        global_batch_size=known.global_batch_size, seq_length=known.seq_length,
        kept=("devices", "global_batch_size", "first_rank_layers"),
    )  # fmt: skip


_Tried = list[tuple[dict[str, object], "LlmEstimate | str"]]


def _around(held: LlmPlan, estimated: Callable[[Mapping[str, object]], LlmEstimate]) -> _Tried:
    """Return changes of one setting of a plan, each with its estimate or with the reason why it is impossible."""
    from hpgo.llm.comparison import neighbours

    tried: _Tried = []
    for changes in neighbours(held.estimate.parallelism):
        # Without experts every ep is impossible for the same obvious reason.
        if "ep" in changes and not held.transformer.experts:
            continue
        try:
            one = estimated(changes)
            tried.append((changes, _forbidden(held, one) or one))
        except HpgoError as error:
            tried.append((changes, error.message))
    return tried


def _next(options: ExplainOptions, held: LlmPlan, tried: _Tried) -> list[str]:
    """Return the command that compares a plan with its fastest neighbor that fits, if any, and the export."""
    fitting = [(one.step_s, _words(changes, "=")) for changes, one in tried if not isinstance(one, str) and one.fits]
    file, same = shell_words(options.plan), same_constants(options.stack, options.platform)
    compare = [f"hpgo llm explain {file} --compare-with {min(fitting)[1]}{same}"] if fitting else []
    return [*compare, f"hpgo export {file} --to {held.framework.partition('@')[0]} -o job/"]


def _words(changes: Mapping[str, object], between: str) -> str:
    """Return changes as words: `micro-batch-size 2`, or with `=` between name and value."""
    from hpgo.llm.search_space import shown

    return ",".join(f"{name.replace('_', '-')}{between}{shown(value)}" for name, value in changes.items())


def _forbidden(held: LlmPlan, other: LlmEstimate) -> str:
    """Return the rule of the plan's framework that a configuration breaks; an empty string if it breaks none."""
    from hpgo.llm.frameworks import framework_support

    rules, model = framework_support(held.framework)[1], held.transformer
    why = rules.broken(other.parallelism, micro_batches=other.micro_batches, model=model)
    return f"{held.row.title} {why}" if why else ""


def _kept(one: LlmEstimate | str) -> dict[str, object]:
    if isinstance(one, str):
        return {"refused": one}
    return {"step_s": one.step_s, "fits": one.fits, "shortfall_bytes": one.shortfall_bytes}
