"""`hpgo llm plan`: the configurations with the shortest estimated step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import shorten
from hpgo.cli.command import option, takes
from hpgo.cli.llm.options import TrainingOptions, draw, note_unmeasured, read_platform, shell_words
from hpgo.cli.plan_options import RESERVE, as_options
from hpgo.cli.terminal import width
from hpgo.cli.values import LLM_PLAN_OUT, STILL, STILL_ENDINGS, framework_option, written

_SECTIONS = {
    "Model and batch": "cluster devices global_batch_size tokens_per_batch seq_length precision",
    "Search": "framework fix exclude reserve_memory stack platform top",
    "Output": "choose outputs pareto as_json",
}


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
        return value if value == "fastest" else click.IntRange(min=1).convert(value, param, ctx)


class PlanOptions(TrainingOptions):
    """Options of the search space, and outputs for the best configuration."""

    framework: str | None = framework_option("megatron", "torchtitan", "deepspeed")
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
    outputs: tuple[str, ...] = written(LLM_PLAN_OUT, "Plan (.json) or picture (.svg .png .pdf .html).")
    pareto: str | None = option(
        "--pareto", type=STILL, metavar="FILE", help="Draw the Pareto front of step time and memory."
    )


@takes(PlanOptions, sections=_SECTIONS)
def command(options: PlanOptions) -> None:
    """Find the configurations with the shortest step that fit in memory.

    The search covers everything that the framework runs, on all GPUs or fewer, and proves the shortest estimated step.
    Of equally fast configurations, the list has the simplest first.

    \b
    Examples:
      hpgo llm plan llama-3-70b -c h100:8 -b 256 --seq-length 8192
      hpgo llm plan config.json -c a100:8 -b 64 --seq-length 4096 --fix tp=2 -o llm-plan.json
    """
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.frameworks import framework_support
    from hpgo.llm.search import plan_llm
    from hpgo.show.llm_report import document, lines, listed, next_commands, used_gpus

    cluster = Cluster.read(options.cluster)
    problem: dict[str, Any] = {
        "global_batch_size": options.sequences(),
        "seq_length": options.seq_length,
        "precision": options.precision,
        "devices": options.devices,
        "framework": options.framework or "megatron",
        "fix": _fixed([word for words in options.fix for word in words]),
        "exclude": [word for words in options.exclude for word in words],
        "headroom_bytes": options.reserve_memory,
        "stack": options.stack,
        "platform": read_platform(options.platform),
    }
    with as_options():
        found = plan_llm(options.model, cluster, top=options.top, **problem)
        fastest = found.estimates.index(found.fastest) + 1
        plan = found.plan(fastest if options.choose == "fastest" else int(options.choose))
    try:
        for output in options.outputs:
            if Path(output).suffix.lower() not in STILL_ENDINGS:
                plan.save(output)
        draw(plan.estimate, plan.cluster, options.outputs)
        if options.pareto is not None:
            from hpgo.llm.pareto_front import llm_pareto_front
            from hpgo.show.pareto_figure import draw_pareto_front

            draw_pareto_front(llm_pareto_front(options.model, cluster, **problem), options.pareto)
    finally:
        # Print the result even if a file can't be written, because the search is the expensive part.
        if options.as_json:
            facts = {"configurations": found.configurations, "simulated": found.simulated, "framework": found.framework}
            facts |= {"alike": len(found.alike), "best": 1, "fastest": fastest}
            facts |= {"gpus": found.cluster.devices, "available_gpus": found.available}
            facts |= {"on_all_gpus": None if found.on_all is None else document(found.on_all)}
            click.echo(json_text(facts | {"estimates": [document(one) for one in found.estimates]}))
        else:
            place = found.estimates.index(plan.estimate) + 1
            title = "Recommended configuration" if place == 1 else f"Configuration {place} of the list below"
            title += f" for {framework_support(found.framework)[0].label}"
            report = lines(plan.estimate, width(), title=title, notes=used_gpus(found, width()))
            saved = [output for output in options.outputs if Path(output).suffix.lower() == ".json"]
            file = shell_words(saved[0] if saved else "llm-plan.json")
            commands = [f"hpgo llm explain {file}", f"hpgo export {file} --to {found.framework.partition('@')[0]}"]
            then = "Next:" if saved else "Save the plan with `-o llm-plan.json`, then:"
            click.echo("\n".join([*report, "", *listed(found, width()), *next_commands(commands, then)]))
        note_unmeasured(cluster, problem["platform"])


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
