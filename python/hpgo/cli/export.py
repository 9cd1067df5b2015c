"""Command `hpgo export`: write a plan as the configuration of a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import click

from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.values import FILE, ON_LAUNCHER, PLAN, Known, is_folder_name
from hpgo.export.targets import NAMES, TARGETS, find

if TYPE_CHECKING:
    from hpgo.export.targets import TargetName
    from hpgo.jobs.scripts import LauncherName
    from hpgo.llm.plan import LlmPlan

_TESTED = ", ".join(f"{target.name}@{target.version}" if target.version else target.name for target in TARGETS)


class ExportOptions(Options):
    """Options of `hpgo export`."""

    plan: str = argument(type=PLAN, metavar="PLAN.json")
    target: TargetName = option(
        "--to",
        type=Known("framework", lambda: NAMES),
        metavar="NAME[@VERSION]",
        required=True,
        callback=lambda _context, _option, name: _known(name),
        help=f"Framework that runs the plan: {', '.join(NAMES)}.",
    )
    output: str | None = option(
        "-o",
        "--output",
        type=FILE,
        metavar="FILE|FOLDER/",
        help="Write files instead of printing the main one.",
    )
    on: LauncherName = ON_LAUNCHER


@takes(ExportOptions, epilog=f"Tested with: {_TESTED}.")
def command(options: ExportOptions) -> None:
    """Write PLAN.json, from `hpgo plan -o`, as the configuration of a framework.

    LLM plans, from `hpgo llm plan -o`, can be exported to megatron, torchtitan and deepspeed.

    Inference plans, from `hpgo partition --framework NAME --json`, can be exported to vllm, sglang, llama.cpp,
    tensorrt-llm and accelerate.

    Frameworks need the same number of replicas for each stage: `hpgo plan --framework NAME` searches for such plans.
    You can run other plans in your own code with `Plan.for_rank`.

    With `-o FILE`, the main file is FILE, and the other files are written next to it. With a folder, or a name that
    ends in a slash, all files go into it. Without -o, the main file is printed. An LLM plan with a folder becomes a
    job folder with everything that starts it, which `hpgo launch FOLDER/` runs.

    \b
    Examples:
      hpgo export plan.json --to megatron -o arguments.txt
      hpgo export plan.json --to torchtitan@0.2 -o job.toml
      hpgo export plan.json --to torch -o job/
      hpgo export llm-plan.json --to megatron -o job/ --on torchrun
      hpgo export chain.json --to vllm -o serve.sh
    """
    from hpgo import export
    from hpgo.planning.plan_files import read_with_llm_plans

    read = read_with_llm_plans(options.plan)
    if options.output is not None and is_folder_name(options.output) and _makes_job(read, options.target):
        from hpgo.cli.job_folders import save_job

        save_job(read, options.output, on=options.on, to=options.target)
        return
    if options.output is not None:
        main, *others = export.save(read, options.target, options.output)
        if others:
            click.echo(f"wrote {main} and, next to it, {', '.join(other.name for other in others)}", err=True)
        return
    # The first file is the main one, by the order of the exporter.
    (_, text), *rest = export.files(read, options.target).items()
    click.echo(text, nl=False)
    if rest:
        names = ", ".join(name for name, _ in rest)
        click.echo(f"note: the framework also needs {names}; `-o FOLDER/` writes all files", err=True)


def _makes_job(read: object, target: TargetName) -> TypeGuard[LlmPlan]:
    """Return whether a folder for this plan and target is a job folder."""
    from hpgo.jobs.parts import FRAMEWORKS
    from hpgo.llm.plan import LlmPlan

    return isinstance(read, LlmPlan) and find(target).name in FRAMEWORKS


def _known(target: TargetName) -> str:
    from hpgo.errors import ArgumentError

    try:
        find(target)
    except ArgumentError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from None
    return target
