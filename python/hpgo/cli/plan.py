"""Command `hpgo plan`: the best plan for one problem, or a table of plans for several."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
    ON_LAUNCHER,
    PICTURES,
    PLAN_OR_JOB_OUT,
    PLAN_OUT,
    STILL,
    cluster_option,
    framework_option,
    is_folder_name,
    written,
)
from hpgo.errors import ArgumentError, InfeasibleError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.export.targets import TargetName
    from hpgo.hardware.cluster import Cluster
    from hpgo.jobs.scripts import LauncherName
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_STYLES: dict[str, dict[str, Any]] = {
    "headline": {"bold": True},
    "title": {"bold": True},
    "columns": {"fg": "cyan"},
    "fact": {"fg": "cyan"},
    "alarm": {"fg": "red", "bold": True},
}


class Alternative(click.ParamType):  # type: ignore[type-arg]
    """A name and a file, such as `data parallelism=file.json`."""

    name = "alternative"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the name of the alternative and the file to write."""
        if isinstance(value, tuple):
            return value
        # Names of alternatives contain spaces but no `=`, so the first one separates the file.
        name, _, file = str(value).partition("=")
        if not (name.strip() and file.strip()):
            self.fail(f"`{shorten(str(value))}` is not NAME=FILE; write `data parallelism=dp.json`", param, ctx)
        return name.strip(), file


class Share(click.ParamType):  # type: ignore[type-arg]
    """A share as a percentage or a number, such as `0.5%` or `0.005`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the share as a number from 0 to 1."""
        if not isinstance(value, str):
            return float(value)
        # A bare number is a share, as in Python, so `0.5` and `0.5%` differ.
        text, percent = value.strip().removesuffix("%"), value.strip().endswith("%")
        try:
            share = float(text) / (100 if percent else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:  # NaN fails every comparison
            self.fail(f"`{shorten(value)}` is not a percentage from 0 to 100; write 0.5%", param, ctx)
        return share


class SavingOptions(Options):
    """Options for the output of a plan."""

    outputs: tuple[str, ...] = written(
        PLAN_OUT,
        "Also write the plan (.json), a picture of its step (.svg .png .pdf .html .tex), or its report (.md)."
        " Repeatable.",
    )
    no_embed: bool = option(
        "--no-embed",
        is_flag=True,
        help="Save plans without profile and cluster. `hpgo evaluate` then needs both files again.",
    )
    as_json: bool = AS_JSON
    as_markdown: bool = option("--markdown", is_flag=True, help="Print the report as Markdown.")

    def check_one_format(self) -> None:
        """Raise UsageError if the plan is to be printed both as JSON and as Markdown."""
        if self.as_json and self.as_markdown:
            raise click.UsageError("choose one of --json and --markdown")


_SECTIONS = {title: names.format("devices framework max_stages ") for title, names in SECTIONS.items()} | {
    "Search": "time_limit tolerance",
    "Output": "outputs on no_embed alternatives plot as_json as_markdown",
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
        help="Samples per training step, over all devices.",
    )
    schedule: str | None = schedule_option("eager_1f1b, or that of --framework", "auto")
    framework: str | None = framework_option("megatron", "megatron-bridge", "torchtitan", "deepspeed", "torch")
    outputs: tuple[str, ...] = written(
        PLAN_OR_JOB_OUT,
        "Also write the plan (.json), a picture of its step (.svg .png .pdf .html .tex), its report (.md), or with"
        " --framework torchtitan, deepspeed or torch a job that starts it (FOLDER/). Repeatable.",
    )
    on: LauncherName = ON_LAUNCHER
    devices: tuple[int, ...] | None = option(
        "--devices", type=Counts(), metavar="N[,N…]", help="Use only the first N devices of the cluster."
    )
    max_stages: int | None = option("--max-stages", type=int, metavar="N", help="Maximum number of stages.")
    tolerance: float | None = option(
        "--tolerance",
        type=Share(),
        metavar="PERCENT",
        help="Prefer less memory: take the plan with the smallest peak memory whose step is at most this much longer"
        " than the shortest: `0.5%`.",
    )
    time_limit: float | None = time_limit_option()
    alternatives: tuple[tuple[str, str], ...] = option(
        "--save-alternative",
        type=Alternative(),
        multiple=True,
        metavar="NAME=FILE",
        help="Also write an alternative of the report: `data parallelism`, `pipeline parallelism only`, or a"
        " schedule of `auto`. Repeatable.",
    )
    plot: str | None = option(
        "--plot", type=STILL, metavar="FILE", help="Plot the plans of several sizes: .svg, .png, .pdf or .html."
    )


@takes(PlanOptions, sections=_SECTIONS)
def command(options: PlanOptions) -> None:
    """Find the plan with the shortest training step, and prove how much faster another plan could be.

    PROFILE is a built-in model (`hpgo models`) or a file with layer times: from `hpgo profile`, PipeDream, Piper,
    dnn-partitioning, Galvatron, Metis or torch.profiler. The plan assigns layers to stages and stages to devices, and
    sets the replicas of each stage and the number of micro-batches.

    With several batch sizes or device counts, the command prints a table with one plan per row. Ctrl-C stops the search
    and returns the best plan so far.

    For a transformer without layer times, use `hpgo llm plan`.

    \b
    Examples:
      hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
      hpgo plan model.yaml -c h100:4 -b 1024 --recompute auto --reserve-memory 2GB
      hpgo plan bert-48 -c dapple-a -b 64 --schedule auto
      hpgo plan bert-48 -c dapple-a -b 64 --framework megatron -o plan.json
      hpgo plan vgg-19 -c dapple-c -b 2048 -o plan.json
      hpgo plan bert-48 -c dapple-a -b 64 --framework torch -o job/
      hpgo plan bert-48 -c h100:4 -b 1024 --tolerance 5%
      hpgo plan vgg-19 -c h100 -b 64 --save-alternative "data parallelism=dp.json"
      hpgo plan vgg-19 -c dapple-c -b 256,512,1024,2048 --plot vgg-19.svg
      hpgo plan xlnet-36 -c h100:8 -b 1024 --devices 8,16,32,64
      hpgo plan gnmt-16 -c dapple-a -b 1024 --time-limit 2s --json | jq .step_s
    """
    # Modules of the planner are imported here, so that `--help` and completion stay fast.
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.formats import read_profile

    options.check_one_format()
    several = len(options.global_batch_size) * len(options.devices or (0,)) > 1
    if options.plot is not None:
        if not several:
            raise click.UsageError("--plot needs several batch sizes or device counts, such as `-b 64,128`")
        from hpgo.draw.curves import check

        check(options.plot)  # A missing matplotlib must be reported now, not after minutes of search.
    jobs = [output for output in options.outputs if is_folder_name(output)]
    if several and (drawn := jobs + [output for output in options.outputs if Path(output).suffix not in {"", ".json"}]):
        raise click.UsageError(f"`{shorten(drawn[0])}` is for one plan; for several, use `-o FILE.json` or `--plot`")
    if options.alternatives and several:
        raise click.UsageError("--save-alternative needs one batch size and one device count")
    for output in jobs:
        from hpgo.cli.job_folders import check_job_folder

        if options.framework is None:
            raise click.UsageError(f"`{shorten(output)}` is a job, which needs --framework, such as --framework torch")
        check_job_folder(output, cast("TargetName", options.framework), "layers")
    keywords = options.of_problem() | {
        "framework": options.framework,
        "max_stages": options.max_stages,
        "tolerance": options.tolerance,
        "time_limit_s": options.time_limit,
    }
    if options.schedule is not None:
        # Without the option, the default depends on the framework, so the planner must not get one.
        keywords["schedule"] = options.schedule
    try:
        with as_options():
            read = read_profile(options.profile, **options.of_file())
    except ProfileError:
        batch = options.global_batch_size[0]
        if (error := meant_as_transformer(options.profile, options.cluster, batch)) is not None:
            raise error from None
        raise
    # Read the cluster once: a pipe can be read only once.
    whole = Cluster.read(options.cluster)
    clusters = [whole.first(count) for count in options.devices] if options.devices else [whole]
    questions = [(part, size) for part in clusters for size in options.global_batch_size]
    if several:
        _sweep(read, questions, keywords, options)
        return
    with as_options():
        best = _search(read, *questions[0], keywords)
    try:
        write(best, [one for one in options.outputs if one not in jobs], embed=not options.no_embed)
        for name, file in options.alternatives:
            best.alternative(name).save(file, embed=not options.no_embed)
        for output in jobs:
            from hpgo.cli.job_folders import save_job

            save_job(best, output, on=options.on)
    finally:  # Print a plan that took minutes to find even if its file can't be written.
        show(
            best,
            as_json=options.as_json,
            as_markdown=options.as_markdown,
            embed=not options.no_embed,
            saved=options.outputs,
        )


def write(plan: Plan, outputs: Sequence[str], *, embed: bool) -> None:
    """Write the plan, its report, or a picture of its step to each file, depending on the ending."""
    for output in outputs:
        # The option type has checked the endings. Names without one get JSON.
        ending = output.lower().rpartition(".")[2]
        if ending == "md":
            from hpgo.show import report

            write_text(output, report.markdown(plan) + "\n", ArgumentError)
        elif f".{ending}" in PICTURES:
            from hpgo.timing.simulation import simulate

            simulate(plan).save(output)
        else:
            plan.save(output, embed=embed)


def show(
    plan: Plan,
    *,
    as_json: bool,
    as_markdown: bool,
    embed: bool,
    saved: Sequence[str],
    stored_step_s: float | None = None,
) -> None:
    """Print a plan on stdout.

    `saved` are the files it is stored in, which the report suggests as input of the next commands. `stored_step_s` is
    the step time in the file that the plan was read from, if it was evaluated again.
    """
    if as_json:
        click.echo(plan.to_json(embed=embed))
        return
    from hpgo.show import report

    if as_markdown:
        click.echo(report.markdown(plan, stored_step_s=stored_step_s))
        return
    next_steps = _next_steps(saved) if plan.fits else ()
    if sys.stdout.isatty():
        styled = lambda role, text: click.style(text, **_STYLES[role])  # noqa: E731
        click.echo(report.table(plan, styled, stored_step_s=stored_step_s, width=width(), next_steps=next_steps))
    else:
        click.echo(report.table(plan, stored_step_s=stored_step_s, next_steps=next_steps))


def _next_steps(saved: Sequence[str]) -> tuple[str, ...]:
    """Return the commands to suggest below a report, with the first job folder or plan file in `saved`."""
    job = next((name for name in saved if is_folder_name(name)), None)
    if job is not None:
        words = ["bash", str(Path(job) / "smoke.sh")], ["hpgo", "launch", f"{Path(job)}/"]
        return tuple(printable(shlex.join(one)) for one in words)
    file = next((shlex.quote(printable(name)) for name in saved if name.lower().endswith(".json")), None)
    if file is None:
        return ("save the plan with -o plan.json, then: hpgo draw plan.json -o plan.svg",)
    return (f"hpgo draw {file} -o plan.svg", f"hpgo serve {file}")


def _sweep(
    profile: Profile, questions: list[tuple[Cluster, int]], keywords: dict[str, Any], options: PlanOptions
) -> None:
    """Plan each problem, print a table, and report problems without a plan on stderr.

    Raises InfeasibleError if no problem has a plan.
    """
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
        raise InfeasibleError("no plan was found for any of these sizes", "the notes above have the reasons")
    # All plans of a sweep usually have the same notes, so each is printed once.
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
    """Return the best plan, and report on stderr if the time limit or Ctrl-C stopped the search."""
    from hpgo.planning.planner import plan

    # The note reports the time that the user waited, not the limit.
    started_s = time.monotonic()
    with searching(f"batch {global_batch_size}", format_seconds) as tell:
        best = plan(profile, cluster, global_batch_size=global_batch_size, progress=tell, **keywords)
    if not best.finished:
        why = "interrupted" if best.stop_reason == "interrupt" else "time limit reached"
        # With `--schedule auto`, the bound is on plans of the chosen schedule only.
        whose = f" for `{best.schedule}`" if best.schedules else ""
        known = "follows" if best.optimality_gap is None else f"is {above(best.optimality_gap)}{whose}"
        taken_s = time.monotonic() - started_s
        say("note", f"{why} after {taken_s:.1f} s; the best plan so far {known}")
    return best
