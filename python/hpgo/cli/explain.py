"""`hpgo explain`: why a transformer's plan is as it is, and why not another way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.cli.command import Command
from hpgo.cli.terminal import say, width
from hpgo.cli.values import FILE, PLAN, STILL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.plan import LlmPlan


class _Changes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """`tp=8,pp=2`."""

    name = "degrees"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        """Degrees by name."""
        if isinstance(value, dict):
            return value
        from hpgo.llm.comparison import read_changes

        try:
            return read_changes(str(value))
        except ArgumentError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


@click.command(cls=Command)
@click.argument("plan", type=PLAN, metavar="PLAN.json")
@click.option(
    "--against", type=_Changes(), metavar="NAME=N[,…]",
    help="Another way: what differs, like `tp=8,pp=2`, `zero_stage=0` or `recompute=full`.",
)  # fmt: skip
@click.option("--platform", type=FILE, metavar="FILE", help="What steps measured there say: `hpgo calibrate --steps`.")
@click.option("--picture", type=STILL, metavar="FILE", help="The plan on its cluster: .svg, .png, .pdf or .html.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    *, plan: str, against: dict[str, object] | None, platform: str | None, picture: str | None, as_json: bool
) -> None:
    """Say where time and memory of a transformer's plan go, and why not another.

    PLAN.json is what `hpgo plan MODEL --seq … -o` wrote. Without --against, the report says what each step from there
    would change; with it, every term of both ways stands beside the other: what does not fit and by how much, how much
    longer a step takes and by what, or why nobody runs it.

    \b
    Examples:
      hpgo explain plan.json
      hpgo explain plan.json --picture plan.svg
      hpgo explain plan.json --against tp=8,pp=2
      hpgo explain plan.json --against recompute=full --json
    """
    from hpgo.llm.comparison import changed, compare
    from hpgo.llm.estimate import estimate_on
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.platform import Platform
    from hpgo.show import comparison_report, llm_report

    held = LlmPlan.read(plan)
    measured = None if platform is None else Platform.read(platform)

    def priced(changes: Mapping[str, object]) -> LlmEstimate:
        known = held.estimate
        config = changed(known.parallelism, changes)
        return estimate_on(
            held.transformer,
            held.cluster,
            config,
            measured,
            global_batch_size=known.global_batch_size,
            seq_length=known.seq_length,
        )

    if held.estimate.measured_steps and measured is None:
        say("note", "the plan was made on a platform that was measured: name it with --platform")
    chosen = priced({})
    if picture is not None:
        from hpgo.show.llm_figure import draw_llm_plan

        draw_llm_plan(chosen, held.cluster, picture)
    if against is None:
        tried = _around(held, priced)
        if as_json:
            kept = [{"change": name, **(_kept(one))} for name, one in tried]
            click.echo(json_text({"chosen": llm_report.document(chosen), "next": kept}))
        else:
            click.echo(
                "\n".join([*llm_report.lines(chosen, width()), "", *comparison_report.around(chosen, tried, width())])
            )
        return
    try:
        other = priced(against)
    except HpgoError as error:
        error = _with_remedy(error, held, against)
        said = f"{error.message}: {error.hint}" if error.hint else error.message
        click.echo(json_text({"refused": said}) if as_json else f"nobody runs it: {said}")
        return
    found, forbidden = compare(chosen, other), _forbidden(held, other)
    if as_json:
        click.echo(json_text(comparison_report.document(found, forbidden)))
    else:
        click.echo("\n".join(comparison_report.lines(found, forbidden, width())))


def _with_remedy(error: HpgoError, held: LlmPlan, against: Mapping[str, object]) -> HpgoError:
    """The error of a way that nobody runs, with a hint at changes that --against accepts."""
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
        # Two stages on each of several ranks are of every schedule, so degrees can be tried from there.
        base = changed(known.parallelism, {**others, "pp": max(2, asked["pp"]), "vpp": 2})
        if "pp" in against:
            base = replace(base, first_rank_layers=None, last_rank_layers=None)
    except ArgumentError:
        return error
    return with_accepted(
        error, held.transformer, base, asked, gpus=known.gpus, most_gpus=known.gpus,
        global_batch_size=known.global_batch_size, seq_length=known.seq_length,
        kept=("devices", "global_batch_size", "first_rank_layers"),
    )  # fmt: skip


def _around(
    held: LlmPlan, priced: Callable[[Mapping[str, object]], LlmEstimate]
) -> list[tuple[str, LlmEstimate | str]]:
    """The ways next to a plan's, or why there is none."""
    from hpgo.llm.comparison import neighbours

    tried: list[tuple[str, LlmEstimate | str]] = []
    for changes in neighbours(held.estimate.parallelism):
        if "ep" in changes and not held.transformer.experts:
            continue
        name = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changes.items())
        try:
            one = priced(changes)
            why = _forbidden(held, one)
            tried.append((name, why or one))
        except HpgoError as error:
            tried.append((name, error.message))
    return tried


def _forbidden(held: LlmPlan, other: LlmEstimate) -> str:
    """Which rule of the plan's launcher another way breaks; empty if it runs it."""
    from hpgo.llm.frameworks import framework_support

    rules, model = framework_support(held.framework)[1], held.transformer
    why = rules.broken(
        other.parallelism, micro_batches=other.micro_batches, experts=bool(model.experts), tied=model.tied
    )
    return f"{held.row.title} {why}" if why else ""


def _kept(one: LlmEstimate | str) -> dict[str, object]:
    if isinstance(one, str):
        return {"refused": one}
    return {"step_s": one.step_s, "fits": one.fits, "shortfall_bytes": one.shortfall_bytes}
