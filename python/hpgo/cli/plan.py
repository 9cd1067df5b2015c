"""`hpgo plan`: the best plan for one question, or a table of them for several."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpgo.base.documents import json_text, write_text
from hpgo.base.messages import above, printable, shorten
from hpgo.base.tables import markdown
from hpgo.base.units import format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.misplaced_names import meant_as_transformer
from hpgo.cli.plan_options import SECTIONS, Counts, ProblemOptions, as_options, schedule_option, time_limit_option
from hpgo.cli.terminal import say, searching, table, width
from hpgo.cli.values import (
    AS_JSON,
    MODEL,
    PICTURES,
    PLAN_OUT,
    STILL,
    cluster_option,
    framework_option,
    written,
)
from hpgo.errors import ArgumentError, InfeasibleError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.machine.cluster import Cluster
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_STYLES: dict[str, dict[str, Any]] = {
    "headline": {"bold": True},
    "columns": {"fg": "cyan"},
    "fact": {"fg": "cyan"},
    "alarm": {"fg": "red", "bold": True},
}


class Alternative(click.ParamType):  # type: ignore[type-arg]
    """`data parallelism=file.json`."""

    name = "alternative"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Its name, and the file to write it into."""
        if isinstance(value, tuple):
            return value
        name, _, file = str(value).partition("=")
        if not (name.strip() and file.strip()):
            self.fail(f"`{shorten(str(value))}` is no NAME=FILE, like `data parallelism=dp.json`", param, ctx)
        return name.strip(), file


class Share(click.ParamType):  # type: ignore[type-arg]
    """`0.5%`, or `0.005`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share as a number from 0 to 1."""
        if not isinstance(value, str):
            return float(value)
        text, percent = value.strip().removesuffix("%"), value.strip().endswith("%")
        try:
            share = float(text) / (100 if percent else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:  # NaN fails every comparison
            self.fail(f"`{shorten(value)}` is no share from 0 to 100 %; write it like 0.5%", param, ctx)
        return share


class SavingOptions(Options):
    """Output of a plan: what is printed, and what is saved."""

    outputs: tuple[str, ...] = written(
        PLAN_OUT,
        "Also write the plan (.json), its step as a picture (.svg .png .pdf .html .tex), or its report (.md)."
        " Repeatable.",
    )
    no_embed: bool = option(
        "--no-embed",
        is_flag=True,
        help="Write plans without profile and cluster: `hpgo evaluate` needs their files again.",
    )
    as_json: bool = AS_JSON
    as_markdown: bool = option("--markdown", is_flag=True, help="To paste into a document.")

    def check_one_format(self) -> None:
        """Raise UsageError if the plan is to be printed both as JSON and as Markdown."""
        if self.as_json and self.as_markdown:
            raise click.UsageError("choose one of --json and --markdown")


_SECTIONS = {title: names.format("devices framework max_stages ") for title, names in SECTIONS.items()} | {
    "Search": "time_limit tolerance",
    "Output": "outputs no_embed alternatives plot as_json as_markdown",
}


class PlanOptions(ProblemOptions, SavingOptions):
    """Options of `hpgo plan`."""

    profile: str = argument(type=MODEL)
    cluster: str = cluster_option(required=True)
    global_batch_size: tuple[int, ...] = option(
        "-b",
        "--global-batch-size",
        type=Counts(),
        required=True,
        metavar="N[,N…]",
        help="Samples in a step, over all devices.",
    )
    schedule: str | None = schedule_option("eager_1f1b, or what --framework runs", "auto")
    framework: str | None = framework_option("megatron", "torchtitan", "deepspeed", "torch")
    devices: tuple[int, ...] | None = option(
        "--devices", type=Counts(), metavar="N[,N…]", help="Use only the first N devices of the cluster."
    )
    max_stages: int | None = option("--max-stages", type=int, metavar="N", help="Stages at most.")
    tolerance: float | None = option(
        "--tolerance",
        type=Share(),
        metavar="SHARE",
        help="Take the plan with the least memory whose step is at most so much longer than the shortest: `0.5%`.",
    )
    time_limit: float | None = time_limit_option()
    alternatives: tuple[tuple[str, str], ...] = option(
        "--save-alternative",
        type=Alternative(),
        multiple=True,
        metavar="NAME=FILE",
        help="Also write a plan that the report compares: `data parallelism`, or a schedule of `auto`. Repeatable.",
    )
    plot: str | None = option(
        "--plot", type=STILL, metavar="FILE", help="Draw several plans: .svg, .png, .pdf or .html."
    )


@takes(PlanOptions, sections=_SECTIONS)
def command(options: PlanOptions) -> None:
    """Find the plan with the shortest training step, and how sure that is.

    PROFILE is a built-in model (`hpgo models`) or a file: one of `hpgo profile`, PipeDream, Piper, dnn-partitioning,
    Galvatron or Metis, or a trace of torch.profiler. The plan says which layers run on which devices, how often each
    stage is replicated, and in how many micro-batches a step is cut.

    Several batch sizes or device counts give a table with one plan a line. Ctrl-C ends the search with the best plan
    so far.

    A transformer without a profile is planned by `hpgo llm plan`.

    \b
    Examples:
      hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
      hpgo plan model.yaml -c h100:4 -b 1024 --recompute auto --reserve-memory 2GB
      hpgo plan bert-48 -c dapple-a -b 64 --schedule auto
      hpgo plan bert-48 -c dapple-a -b 64 --framework megatron -o plan.json
      hpgo plan vgg-19 -c dapple-c -b 2048 -o plan.json
      hpgo plan bert-48 -c h100:4 -b 1024 --tolerance 5%
      hpgo plan vgg-19 -c h100 -b 64 --save-alternative "data parallelism=dp.json"
      hpgo plan vgg-19 -c dapple-c -b 256,512,1024,2048 --plot vgg-19.svg
      hpgo plan xlnet-36 -c h100:8 -b 1024 --devices 8,16,32,64
      hpgo plan gnmt-16 -c dapple-a -b 1024 --time-limit 2s --json | jq .step_s
    """
    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats import read_profile

    options.check_one_format()
    several = len(options.global_batch_size) * len(options.devices or (0,)) > 1
    if options.plot is not None:
        if not several:
            raise click.UsageError("--plot draws several plans: give several batch sizes or device counts")
        from hpgo.draw.curves import check

        check(options.plot)  # before the search, which may take minutes
    if several and (drawn := [output for output in options.outputs if Path(output).suffix not in {"", ".json"}]):
        raise click.UsageError(f"`{shorten(drawn[0])}` is for one plan; of several, -o writes .json, and --plot draws")
    if options.alternatives and several:
        raise click.UsageError("--save-alternative is for one plan: give one batch size and one device count")
    keywords = options.of_problem() | {
        "framework": options.framework,
        "max_stages": options.max_stages,
        "tolerance": options.tolerance,
        "time_limit_s": options.time_limit,
    }
    if options.schedule is not None:
        keywords["schedule"] = options.schedule
    try:
        with as_options():
            read = read_profile(options.profile, **options.of_file())
    except ProfileError:
        batch = options.global_batch_size[0]
        if (error := meant_as_transformer(options.profile, options.cluster, batch)) is not None:
            raise error from None
        raise
    whole = Cluster.read(options.cluster)
    clusters = [whole.first(count) for count in options.devices] if options.devices else [whole]
    questions = [(part, size) for part in clusters for size in options.global_batch_size]
    if several:
        _sweep(read, questions, keywords, options)
        return
    with as_options():
        best = _search(read, *questions[0], keywords)
    try:
        write(best, options.outputs, embed=not options.no_embed)
        for name, file in options.alternatives:
            best.alternative(name).save(file, embed=not options.no_embed)
    finally:  # a plan that took minutes is shown, even if it can't be saved
        show(best, as_json=options.as_json, as_markdown=options.as_markdown, embed=not options.no_embed)


def write(plan: Plan, outputs: Sequence[str], *, embed: bool) -> None:
    """Writes the plan into files as their endings say: itself, its report, or a picture of its step."""
    for output in outputs:
        ending = output.lower().rpartition(".")[2]
        if ending == "md":
            from hpgo.show import report

            write_text(output, report.markdown(plan) + "\n", ArgumentError)
        elif f".{ending}" in PICTURES:
            from hpgo.timing.simulation import simulate

            simulate(plan).save(output)
        else:
            plan.save(output, embed=embed)


def show(plan: Plan, *, as_json: bool, as_markdown: bool, embed: bool, stored_step_s: float | None = None) -> None:
    """Prints one plan on stdout; `stored_step_s` is the step that its file names, where it was priced anew."""
    if as_json:
        click.echo(plan.to_json(embed=embed))
        return
    from hpgo.show import report

    if as_markdown:
        click.echo(report.markdown(plan, stored_step_s=stored_step_s))
        return
    if sys.stdout.isatty():
        styled = lambda role, text: click.style(text, **_STYLES[role])  # noqa: E731
        click.echo(report.table(plan, styled, stored_step_s=stored_step_s, width=width()))
    else:
        click.echo(report.table(plan, stored_step_s=stored_step_s))


def _sweep(
    profile: Profile, questions: list[tuple[Cluster, int]], keywords: dict[str, Any], options: PlanOptions
) -> None:
    """Answers the questions that have an answer, and says on stderr why others have none."""
    from hpgo.show import report

    plans: list[Plan] = []
    failures: list[dict[str, object]] = []
    for cluster, size in questions:
        try:
            with as_options():
                best = _search(profile, cluster, size, keywords)
        except (InfeasibleError, ArgumentError) as error:
            failures.append(
                {"cluster": cluster.name, "global_batch_size": size, "error": error.message, "hint": error.hint}
            )
            say("note", f"batch {size} on {cluster.name}: {error.message}")
            if error.hint:
                say("hint", error.hint)
            continue
        plans.append(best)
        if best.stop_reason == "interrupt":
            break
    if not plans:
        raise InfeasibleError("none of these questions has an answer", "see the notes above")
    for note in dict.fromkeys(note for best in plans for note in best.notes):
        say("note", note)
    document = json_text(
        {
            "format": "hpgo.sweep",
            "version": 1,
            "plans": [json.loads(plan.to_json(embed=not options.no_embed)) for plan in plans],
            "failures": failures,
        }
    )
    try:
        for output in options.outputs:
            write_text(output, document + "\n", ArgumentError)
        if options.plot is not None:
            from hpgo.show.figures import draw_plans

            draw_plans(plans, options.plot)
    finally:
        title, columns, rows = report.sweep(plans)
        if options.as_json:
            click.echo(document)
        elif options.as_markdown:
            click.echo("\n".join([f"## {printable(title)}", "", *markdown(columns, rows)]))
        else:
            table(columns, rows, printable(title))


def _search(profile: Profile, cluster: Cluster, global_batch_size: int, keywords: dict[str, Any]) -> Plan:
    """The best plan; says so if the time limit or Ctrl-C ended the search for it."""
    from hpgo.planning.planner import plan

    started_s = time.monotonic()
    with searching(f"batch {global_batch_size}", format_seconds) as tell:
        best = plan(profile, cluster, global_batch_size=global_batch_size, progress=tell, **keywords)
    if not best.finished:
        why = "interrupted" if best.stop_reason == "interrupt" else "time limit reached"
        whose = f" for `{best.schedule}`" if best.schedules else ""  # a bound on one schedule bounds no other
        known = "follows" if best.gap is None else f"is {above(best.gap)}{whose}"
        taken_s = time.monotonic() - started_s
        say("note", f"{why} after {taken_s:.1f} s; the best plan so far {known}")
    return best
