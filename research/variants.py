"""Train VGG-19 in the four ways of the Pipeline Execution Engine, and as a plan has it; research/variants.md.

python research/variants.py
python research/variants.py --search --alone --write research/variants.md   # ten minutes
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pages import fill

from hpgo.base.documents import json_text, read_text, write_text
from hpgo.base.units import format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.main import run
from hpgo.cli.plan_options import SECONDS, TIMEOUT
from hpgo.cli.terminal import table
from hpgo.cli.values import AS_JSON, FILE, SEED, optimizer_option, steps_option
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from engine_variants import Trained

    from hpgo.programs.program import Program
    from hpgo.runtime.workload import Workload

_NAMES = ("sequential", "async", "staggered", "staggered-8")
_SEARCHED, _ALONE = "searched", "one process"
_COLUMNS = ("", "stages", "micro-batches", "order", "step", "ratio", "loss", "weights moved")
_STAGES_SHOWN = 8


class VariantsOptions(Options):
    """Options of this script."""

    names: tuple[str, ...] = argument(metavar="[VARIANT]...", type=click.Choice(_NAMES), nargs=-1)
    search: bool = option("--search", is_flag=True, help="Then measure, plan and run: cuts, micro-batch, schedule.")
    alone: bool = option("--alone", is_flag=True, help="Also run the whole model in one process.")
    steps: int = steps_option(3)
    workload: str = option(
        "--workload",
        default="vgg-19:flat,squared,image=128,batch=64",
        show_default=True,
        metavar="NAME",
        help="VGG-19 by operations, in other sizes.",
    )
    optimizer: str = optimizer_option("sgd:lr=0.05")
    seed: int = SEED
    dtype: str | None = option(
        "--dtype", type=click.Choice(["float32", "float64"]), help="Of the weights; float32 if left out."
    )
    time_limit: float = option(
        "--time-limit",
        type=SECONDS,
        default="20s",
        show_default=True,
        metavar="TIME",
        help="To measure each batch size.",
    )
    timeout: float = TIMEOUT
    page: str | None = option(
        "--write", type=FILE, metavar="PAGE", help="Put the table between the marks of this page."
    )
    as_json: bool = AS_JSON


@takes(VariantsOptions)
def command(options: VariantsOptions) -> None:
    """Train VGG-19 in the four ways of the Pipeline Execution Engine, one after the other.

    All split 64 images over four processes here: `sequential` as one micro-batch, `async` as 64 of one image,
    `staggered` as 16 of four, in waves, and `staggered-8` in the same waves through eight stages, two per process.
    Without names all four run. Losses are the same. The table has how long a step took, and by how much the weights
    have moved.

    With `--search`, layers and links are measured here, and the plan with the shortest step runs as well.

    \b
    Examples:
      python research/variants.py
      python research/variants.py staggered staggered-8 --steps 5
      python research/variants.py --search --alone
      python research/variants.py --workload vgg-19:flat,squared,width=8,image=32,batch=64
    """
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.rendezvous import is_launched
    from hpgo.runtime.train.optimizer import optimizer_of

    if is_launched():
        raise ArgumentError(
            "this script starts its own processes, and a framework has started this one",
            "start it alone, without RANK and WORLD_SIZE set",
            code="wrong_state",
        )
    text = None if options.page is None else _page(options.page)
    optimizer_of(options.optimizer)
    kept = {"steps": options.steps, "optimizer": options.optimizer, "seed": options.seed, "dtype": options.dtype}
    race = _Race(
        options.workload, kept, time_limit_s=options.time_limit, timeout_s=options.timeout, as_json=options.as_json
    )
    found = race.run(options.names or _NAMES, search=options.search, alone=options.alone)
    if options.as_json:
        click.echo(json_text({"format": "hpgo.variants", "version": 1, "runs": found, "exit": 0}))
    else:
        click.echo()
        table(_COLUMNS, [_row(one, found[0]) for one in found])
    if options.page is not None and text is not None:
        write_text(options.page, fill(text, {"variants": _markdown(found)}), ArgumentError)


def _page(page: str) -> str:
    """Return the text of a page. Raises ArgumentError before any run if the page has no place for the table."""
    text = read_text(Path(page), ArgumentError)
    fill(text, {"variants": ""})
    return text


class _Race:
    """Runs that share workload and options."""

    def __init__(
        self, workload: str, options: dict[str, Any], *, time_limit_s: float, timeout_s: float, as_json: bool
    ) -> None:
        """`options` are as in `train`."""
        import torch

        from hpgo.runtime import Workload
        from hpgo.runtime.failure_detection import Limits

        dtype = options["dtype"]
        self._name, self._time_limit_s, self._as_json = workload, time_limit_s, as_json
        self._workload: Workload = Workload.read(workload, seed=options["seed"])
        self._options = options | {"dtype": dtype and getattr(torch, dtype), "limits": Limits(timeout_s)}
        self._batch_size = len(self._workload.example_inputs[0])

    def run(self, names: tuple[str, ...], *, search: bool, alone: bool) -> list[dict[str, Any]]:
        """Run the variants, the search and the single process, one after the other, and return their facts."""
        from engine_variants import program_of_variant

        import hpgo

        layers = self._workload.layers
        programs = {name: program_of_variant(name, layers, self._batch_size) for name in dict.fromkeys(names)}
        if alone:
            programs[_ALONE] = hpgo.program(
                hpgo.schedule("sequential", ranks=1, micro_batches=1),
                [(layers, [0])],
                pipeline_micro_batch_size=self._batch_size,
                global_batch_size=self._batch_size,
            )
        found = [self._facts(name, one, self._trained(name, one)) for name, one in programs.items()]
        if search:
            from engine_variants import searched

            self._say(f"{_SEARCHED}: measures layers and links")
            options = {name: self._options[name] for name in ("dtype", "limits")}
            plan = searched(self._name, self._batch_size, seconds=self._time_limit_s, **options)
            facts = self._facts(_SEARCHED, plan.program(), self._trained(_SEARCHED, plan))
            found.append(facts | {"predicted_s": plan.step_s})
        return found

    def _say(self, line: str) -> None:
        if not self._as_json:
            click.echo(line)

    def _trained(self, name: str, what: Any) -> Trained:
        from engine_variants import train

        return train(what, self._workload, tell=lambda line: self._say(f"{name}: {line}"), **self._options)

    def _facts(self, name: str, program: Program, trained: Trained) -> dict[str, Any]:
        return {
            "name": name,
            "stages": [len(stage.layers) for stage in program.stages],
            "devices": [list(stage.devices) for stage in program.stages],
            "micro_batches": program.micro_batches,
            "pipeline_micro_batch_size": program.pipeline_micro_batch_size,
            "schedule": program.schedule.name,
            "losses": list(trained.losses),
            "steps_s": list(trained.steps_s),
            "step_s": trained.step_s,
            "moved": trained.moved,
            "predicted_s": None,
        }


def _row(one: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    predicted = "" if one["predicted_s"] is None else f", predicted {format_seconds(one['predicted_s'])}"
    return (
        one["name"],
        _stages(one),
        f"{one['micro_batches']} x {one['pipeline_micro_batch_size']}",
        one["schedule"],
        format_seconds(one["step_s"]) + predicted,
        f"{one['step_s'] / first['step_s']:.2f}",
        f"{one['losses'][0]:.6g} to {one['losses'][-1]:.6g}",
        f"{100 * one['moved']:.3g} %",
    )


def _stages(one: dict[str, Any]) -> str:
    """Return the number of layers of each stage as text, with the number of devices if it is not 1."""
    shown = [
        f"{layers}" + (f" on {len(devices)}" if len(devices) > 1 else "")
        for layers, devices in zip(one["stages"], one["devices"], strict=True)
    ]
    return ":".join(shown) if len(shown) <= _STAGES_SHOWN else f"{len(shown)} stages"


def _markdown(found: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(_row(one, found[0]))} |" for one in found]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        run(command)
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing is written")
