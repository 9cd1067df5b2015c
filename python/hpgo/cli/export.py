"""`hpgo export`: a plan for a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpgo.cli.command import Command
from hpgo.cli.values import FILE, PLAN, Known
from hpgo.export.targets import NAMES, TARGETS, find

if TYPE_CHECKING:
    from hpgo.export.targets import TargetName

_TRIED = ", ".join(f"{target.name}@{target.version}" if target.version else target.name for target in TARGETS)


@click.command(cls=Command, epilog=f"Tried with: {_TRIED}.")
@click.argument("plan", type=PLAN, metavar="PLAN.json")
@click.option(
    "--to",
    "target",
    type=Known("launcher", lambda: NAMES),
    metavar="NAME[@VERSION]",
    required=True,
    callback=lambda _context, _option, name: _known(name),
    help=f"Who shall run it: {', '.join(NAMES)}.",
)
@click.option("-o", "--output", type=FILE, metavar="FILE|FOLDER/", help="Write it there instead of printing it.")
def command(plan: str, target: TargetName, output: str | None) -> None:
    """Write PLAN.json, from `hpgo plan -o`, as configuration of a launcher.

    Ways of training a transformer, from `hpgo plan MODEL --seq … -o`, go to megatron, torchtitan and deepspeed.

    Plans of inference, from `hpgo partition --for NAME --json`, go to vllm, sglang, llama.cpp and accelerate.

    Launchers run grids: as many replicas of each stage; `hpgo plan --for NAME` plans for one. Plans with other counts
    are for launchers of your own, which ask a plan what each rank does: `Plan.for_rank`.

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
    from hpgo.planning.reading import read_with_llm_plans

    read = read_with_llm_plans(plan)
    if output is not None:
        main, *others = export.save(read, target, output)
        if others:
            click.echo(f"wrote {main}, and beside it {', '.join(other.name for other in others)}", err=True)
        return
    (_, text), *rest = export.files(read, target).items()
    click.echo(text, nl=False)
    if rest:
        names = ", ".join(name for name, _ in rest)
        click.echo(f"it needs {names} too: `-o FOLDER/` writes all", err=True)


def _known(target: TargetName) -> str:
    from hpgo.base.errors import ArgumentError

    try:
        find(target)
    except ArgumentError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from None
    return target
