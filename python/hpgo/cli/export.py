"""`hpgo export`: a plan for a framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.values import FILE, PLAN, Known
from hpgo.export.targets import NAMES, TARGETS, find

if TYPE_CHECKING:
    from hpgo.export.targets import TargetName

_TRIED = ", ".join(f"{target.name}@{target.version}" if target.version else target.name for target in TARGETS)


class ExportOptions(Options):
    """Options of `hpgo export`."""

    plan: str = argument(type=PLAN, metavar="PLAN.json")
    target: TargetName = option(
        "--to",
        type=Known("framework", lambda: NAMES),
        metavar="NAME[@VERSION]",
        required=True,
        callback=lambda _context, _option, name: _known(name),
        help=f"Who shall run it: {', '.join(NAMES)}.",
    )
    output: str | None = option(
        "-o", "--output", type=FILE, metavar="FILE|FOLDER/", help="Write it there instead of printing it."
    )


@takes(ExportOptions, epilog=f"Tried with: {_TRIED}.")
def command(options: ExportOptions) -> None:
    """Write PLAN.json, from `hpgo plan -o`, as configuration of a framework.

    Plans of transformers, from `hpgo llm plan -o`, go to megatron, torchtitan and deepspeed.

    Plans of inference, from `hpgo partition --framework NAME --json`, go to vllm, sglang, llama.cpp,
    tensorrt-llm and accelerate.

    Frameworks run grids: as many replicas of each stage; `hpgo plan --framework NAME` plans for one. Plans with other
    counts are for frameworks of your own, which ask a plan what each rank does: `Plan.for_rank`.

    With `-o FILE` the main file is FILE, and others that it needs lie beside it; with a folder, or a name that ends in
    a slash, all go into it. Without, the main file is printed.

    \b
    Examples:
      hpgo export plan.json --to megatron -o arguments.txt
      hpgo export plan.json --to torchtitan@0.2 -o job.toml
      hpgo export plan.json --to torch -o job/
      hpgo export chain.json --to vllm -o serve.sh
    """
    from hpgo import export
    from hpgo.planning.plan_files import read_with_llm_plans

    read = read_with_llm_plans(options.plan)
    if options.output is not None:
        main, *others = export.save(read, options.target, options.output)
        if others:
            click.echo(f"wrote {main}, and beside it {', '.join(other.name for other in others)}", err=True)
        return
    (_, text), *rest = export.files(read, options.target).items()
    click.echo(text, nl=False)
    if rest:
        names = ", ".join(name for name, _ in rest)
        click.echo(f"it needs {names} too: `-o FOLDER/` writes all", err=True)


def _known(target: TargetName) -> str:
    from hpgo.errors import ArgumentError

    try:
        find(target)
    except ArgumentError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from None
    return target
