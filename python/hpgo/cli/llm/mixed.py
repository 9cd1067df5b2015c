"""`hpgo llm plan` on machines that differ: the report of `hpgo.plan_mixed_llm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text, write_text
from hpgo.base.messages import join_words, printable, shorten
from hpgo.cli.llm.options import note_model, note_unmeasured
from hpgo.cli.plan_options import as_options
from hpgo.cli.terminal import say, width
from hpgo.cli.values import STILL_ENDINGS, is_folder_name
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.cli.llm.plan import PlanOptions
    from hpgo.hardware.mixed import MixedCluster
    from hpgo.llm.mixed.plan import MixedFramework

_REFUSED = {
    "devices": "--devices", "fix": "--fix", "exclude": "--exclude", "platform": "--platform", "pareto": "--pareto",
}  # fmt: skip
"""Options that a search on one kind of nodes has alone."""


def run(options: PlanOptions, cluster: MixedCluster) -> None:
    """Print the ways to train on the kinds of a cluster, or raise ArgumentError for options that do not apply."""
    from hpgo.export.llm_for_flagscale import flagscale_arguments, megatron_arguments
    from hpgo.llm.mixed.plan import plan_mixed_llm
    from hpgo.show.mixed_report import document, lines

    framework = _framework(options, cluster)
    if folders := [output for output in options.outputs if is_folder_name(output)]:
        raise ArgumentError(
            f"-o {shorten(folders[0])} names a folder for a job, but the nodes of `{shorten(cluster.name)}` differ, and"
            " jobs need equal nodes",
            "write `-o plan.json` or `-o plan.svg`; the report has the arguments of the framework",
            code="unsupported",
        )
    with as_options():
        found = plan_mixed_llm(
            options.transformer(), cluster, global_batch_size=options.sequences(), seq_length=options.seq_length,
            precision=options.precision, reserved_bytes=options.reserve_memory, stack=options.stack,
            framework=framework,
        )  # fmt: skip
    title, written = "FlagScale", flagscale_arguments
    if framework == "megatron":
        title, written = "Megatron-LM", megatron_arguments
    arguments = [] if found.pipeline is None else written(found)
    try:
        for output in options.outputs:
            if Path(output).suffix.lower() in STILL_ENDINGS:
                # Drawing loads numpy's and matplotlib's parts that the report does not need.
                from hpgo.show.mixed_figure import draw_mixed_plan

                draw_mixed_plan(found, output)
            else:
                write_text(output, json_text(document(found, arguments)) + "\n", ArgumentError)
    finally:
        # Print the result even if a file can't be written, because the search is the expensive part.
        if options.as_json:
            click.echo(json_text(document(found, arguments)))
        else:
            click.echo("\n".join(lines(found, width(), title=title, arguments=arguments)))
    for part in cluster.parts:
        note_unmeasured(part, None)
        if (device := part.nodes[0].device).speed != 1:
            say(
                "note",
                f"`{printable(device.name)}` has speed {device.speed:g} in the cluster file, which multiplies the rates"
                " of that card; leave speed out for its own rates",
            )
    note_model(options.transformer(), options.seq_length)


def _framework(options: PlanOptions, cluster: MixedCluster) -> MixedFramework:
    given = [name for field, name in _REFUSED.items() if getattr(options, field)]
    given += ["--choose"] if options.choose != 1 else []
    if given:
        raise ArgumentError(
            f"the nodes of `{shorten(cluster.name)}` differ, and {join_words(given)} needs equal nodes",
            f"leave {join_words(given)} out; `--json` prints all results",
            code="unsupported",
        )
    if options.framework is None:
        return "flagscale"
    if options.framework.partition("@")[0] != "megatron":
        raise ArgumentError(
            f"the nodes of `{shorten(cluster.name)}` differ, and no support for that was found in {options.framework}",
            "use `--framework megatron`, or leave it out for FlagScale",
            code="unsupported",
        )
    return "megatron"
