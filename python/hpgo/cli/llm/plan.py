"""`hpgo llm plan`: the configurations with the shortest estimated step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import shorten
from hpgo.cli.command import option, takes
from hpgo.cli.llm.options import (
    TrainingOptions,
    draw,
    note_model,
    note_unmeasured,
    read_platform,
    same_constants,
    shell_words,
)
from hpgo.cli.plan_options import RESERVE, as_options
from hpgo.cli.terminal import say, width
from hpgo.cli.values import LLM_PLAN_OUT, ON_LAUNCHER, STILL, STILL_ENDINGS, framework_option, is_folder_name, written

_SECTIONS = {
    "Model and batch": "cluster devices global_batch_size tokens_per_batch seq_length precision",
    "Search": "framework fix exclude reserve_memory stack platform top",
    "Output": "choose outputs on pareto as_json",
}

if TYPE_CHECKING:
    from hpgo.jobs.scripts import LauncherName


class _Words(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Type of options like `tp=4,pp=8`: words with commas between them."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Return the words of an option in their order."""
        del param, ctx
        return value if isinstance(value, tuple) else tuple(word.strip() for word in str(value).split(","))


class _Choice(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Type of the option --choose: a place of the list, or `fastest`."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the place as a number, or the word."""
        if isinstance(value, int):
            return value
        if value == "fastest":
            return "fastest"
        if not (str(value).isascii() and str(value).isdecimal() and int(value) > 0):
            self.fail(f"{shorten(str(value))!r} is neither a row of the list, from 1, nor `fastest`", param, ctx)
        return int(value)


class PlanOptions(TrainingOptions):
    """Options of the search space, and outputs for the best configuration."""

    framework: str | None = framework_option("megatron", "megatron-bridge", "torchtitan", "deepspeed")
    fix: tuple[tuple[str, ...], ...] = option(
        "--fix",
        type=_Words(),
        multiple=True,
        metavar="NAME=VALUE[,…]",
        help="Keep only configurations with it: `tp=4`.",
    )
    exclude: tuple[tuple[str, ...], ...] = option(
        "--exclude",
        type=_Words(),
        multiple=True,
        metavar="NAME[=VALUE][,…]",
        help="Leave out a feature (`cp`) or a value (`tp=8`).",
    )
    reserve_memory: float = RESERVE
    top: int = option(
        "--top", type=click.IntRange(1, 1000), default=10, metavar="N", help="Configurations to list.  [10]"
    )
    choose: int | str = option(
        "--choose",
        type=_Choice(),
        default=1,
        metavar="N|fastest",
        help="Row of the list to report and write.  [1]",
    )
    outputs: tuple[str, ...] = written(LLM_PLAN_OUT, "Plan (.json), picture (.svg …), job (FOLDER/).")
    on: LauncherName = ON_LAUNCHER
    pareto: str | None = option(
        "--pareto", type=STILL, metavar="FILE", help="Draw the Pareto front of step time and memory."
    )

    def again(self) -> str:
        """Return the command line of this search, without its outputs and without a platform."""
        lists = [(name, one) for name in ("fix", "exclude") for one in getattr(self, name)]
        words = [word for name, one in lists for word in (f"--{name}", ",".join(one))]
        words += [] if self.framework is None else ["--framework", self.framework]
        words += [] if not self.reserve_memory else ["--reserve-memory", f"{self.reserve_memory:.0f}B"]
        whole = replace(self, platform=None).problem()
        return " ".join(["hpgo llm plan", whole, *([shell_words(*words)] if words else [])])


@takes(PlanOptions, sections=_SECTIONS, brief="images_per_sample patches_per_image freeze_tower")
def command(options: PlanOptions) -> None:
    """Find the configurations with the shortest step that fit in memory.

    The search covers all that the framework runs, on all GPUs or fewer, which may differ (h100:4+a100:4). The simplest
    of equally fast ones comes first.

    \b
    Examples:
      hpgo llm plan llama-3-70b -c h100:8 -b 256 --seq-length 8192 --fix tp=8
      hpgo llm plan config.json -c a100:8 -b 64 --seq-length 4096 -o job/
    """
    from hpgo.hardware.mixed import MixedCluster
    from hpgo.llm.estimate import other_stack, stack_on
    from hpgo.llm.frameworks import framework_support
    from hpgo.llm.search import plan_llm
    from hpgo.show import moved_report
    from hpgo.show.llm_report import document, lines, listed, next_commands, used_gpus

    mixed = MixedCluster.read(options.cluster)
    if len(mixed.parts) > 1:
        from hpgo.cli.llm.mixed import run

        run(options, mixed)
        return
    cluster = mixed.parts[0]
    problem: dict[str, Any] = {
        "global_batch_size": options.sequences(),
        "seq_length": options.seq_length,
        "precision": options.precision,
        "devices": options.devices,
        "framework": options.framework or "megatron",
        "fix": _fixed([word for words in options.fix for word in words]),
        "exclude": [word for words in options.exclude for word in words],
        "reserved_bytes": options.reserve_memory,
        "stack": options.stack,
        "platform": read_platform(options.platform),
    }
    for output in filter(is_folder_name, options.outputs):
        from hpgo.cli.job_folders import check_llm_job_folder

        check_llm_job_folder(output, problem["framework"], options.model, problem["fix"])
    other = "" if options.stack else other_stack(cluster, problem["framework"], problem["platform"])
    with as_options():
        found = plan_llm(options.transformer(), cluster, top=options.top, **problem)
        fastest = found.estimates.index(found.fastest) + 1
        plan = found.plan(fastest if options.choose == "fastest" else int(options.choose))
        moves = None
        if problem["platform"] is not None:
            # Search again with the published constants, to show what the user's own steps change.
            before = plan_llm(
                options.transformer(),
                cluster,
                top=options.top,
                **problem | {"platform": None, "devices": found.cluster.devices},
            )
            moves = moved_report.moves(before, found, problem["platform"], options.stack)
    jobs: list[str] = []
    try:
        for output in options.outputs:
            if is_folder_name(output):
                from hpgo.cli.job_folders import save_job

                save_job(plan, output, on=options.on, command=options.again())
                jobs.append(output)
            elif Path(output).suffix.lower() not in STILL_ENDINGS:
                plan.save(output)
        draw(plan.estimate, plan.cluster, options.outputs)
        if options.pareto is not None:
            from hpgo.llm.pareto_front import llm_pareto_front
            from hpgo.show.pareto_figure import draw_pareto_front

            draw_pareto_front(llm_pareto_front(options.transformer(), cluster, **problem), options.pareto)
    finally:
        # Print the result even if a file can't be written, because the search is the expensive part.
        if options.as_json:
            facts = {"configurations": found.configurations, "simulated": found.simulated, "framework": found.framework}
            facts |= {"alike": len(found.alike), "best": 1, "fastest": fastest, "plain_s": found.plain_s}
            facts |= {"gpus": found.cluster.devices, "available_gpus": found.available}
            facts |= {"on_all_gpus": None if found.on_all is None else document(found.on_all)}
            if moves is not None:
                facts["moves"] = moved_report.document(moves)
            click.echo(json_text(facts | {"estimates": [document(one) for one in found.estimates]}))
        else:
            place = found.estimates.index(plan.estimate) + 1
            title = "Recommended configuration" if place == 1 else f"Configuration {place} of the list below"
            title += f" for {framework_support(found.framework)[0].label}"
            stack = stack_on(options.stack, cluster, found.framework, problem["platform"])
            notes = [*used_gpus(found, width()), *([*wrap(f"Note: {other}.", width()), ""] if other else [])]
            report = lines(plan.estimate, width(), title=title, notes=notes, stack=stack)
            pictures = [output for output in options.outputs if Path(output).suffix.lower() in STILL_ENDINGS]
            saved = [one for one in options.outputs if one not in pictures and not is_folder_name(one)]
            file = shell_words(saved[0] if saved else "llm-plan.json")
            # The plan file holds the name of its stack, which is enough unless the stack is a file.
            same = same_constants(None if stack.is_known else options.stack, options.platform)
            commands = [
                f"hpgo llm explain {file}{same}",
                f"hpgo export {file} --to {found.framework.partition('@')[0]} -o job/",
            ]
            if jobs:
                folder = Path(jobs[0])
                commands = [shell_words("bash", str(folder / "smoke.sh")), shell_words("hpgo", "launch", f"{folder}/")]
            then = "Next:" if saved or jobs else "Save the plan with `-o llm-plan.json`, then:"
            moved = [] if moves is None else ["", *moved_report.lines(moves, width())]
            click.echo("\n".join([*report, "", *listed(found, width()), *moved, *next_commands(commands, then)]))
        note_unmeasured(cluster, problem["platform"])
        note_model(options.transformer(), options.seq_length, problem["framework"])
        if other:
            say("note", f"{other}; measure steps of `{problem['framework']}`")


def _fixed(words: list[str]) -> dict[str, int | str]:
    """Return words like `tp=4` as a mapping. Raises UsageError for other words and for a name that appears twice."""
    fixed: dict[str, int | str] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise click.UsageError(f"--fix takes NAME=VALUE, like tp=4, not `{shorten(word)}`")
        if name in fixed:
            raise click.UsageError(f"--fix names {shorten(name)} twice")
        fixed[name] = value
    return fixed
