"""`hpgo run`: trains by a plan, on processes that it starts or as one rank of a launcher's."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.errors import ArgumentError, HpgoError, RunError
from hpgo.base.units import format_seconds
from hpgo.cli.terminal import table

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program

_SILENCE_S = 1.0
"""Of ranks that another one speaks for: launchers end all ranks when the first of them ends."""
_DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, slots=True)
class _Run:
    """What is asked for."""

    file: str
    workload: str
    steps: int
    optimizer: str
    dtype: str | None
    as_json: bool
    options: dict[str, Any]
    """Of `Pipeline`."""


@click.command()
@click.argument("plan", metavar="PLAN.json")
@click.option(
    "--workload", required=True, metavar="NAME|MODULE:FUNCTION", help="The model: `gpt:layers=4`, or one of yours."
)
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="How many.")
@click.option(
    "--optimizer", default="sgd:lr=0.01", show_default=True, metavar="NAME[:OPTIONS]", help="`adamw:lr=1e-4`, say."
)
@click.option("--clip-norm", type=float, metavar="NORM", help="Scale gradients down to it where theirs is larger.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of first weights.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the weights; the workload's own if left out.")
@click.option("--autocast", type=click.Choice(["bfloat16"]), help="What to compute in, whatever the weights are.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="GPUs where each rank has one, if left out.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, metavar="SECONDS",
    help="How long ranks wait for each other.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Losses and times as one object, for machines.")
def command(
    *,
    plan: str,
    workload: str,
    steps: int,
    optimizer: str,
    dtype: str | None,
    autocast: str | None,
    timeout: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the layers of PLAN.json, from `hpgo plan -o` or `Program.save`.

    Alone it starts a process for each device of the plan here, and ends them all. Under torchrun, or whatever sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it is one rank. Data is the workload's example, repeated.

    \b
    Examples:
      hpgo run plan.json --workload vgg-19 --steps 20
      hpgo run plan.json --workload my_model:build --optimizer adamw:lr=1e-4
      hpgo run plan.json --workload gpt:layers=4 --dtype float64 --json
    """
    from hpgo import runtime

    runtime.check_torch()
    run = _Run(plan, workload, steps, optimizer, dtype, as_json, options | {"autocast": autocast, "timeout_s": timeout})
    from hpgo.runtime.meeting import is_first_to_tell, is_launched, meet

    if is_launched():
        try:
            meet(timeout)
            _work(run, _read(plan))
        except HpgoError:
            if is_first_to_tell():
                raise
            time.sleep(_SILENCE_S)
            sys.exit(1)
        return
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.optimizer import optimizer_of

    read = _read(plan)
    optimizer_of(optimizer)  # wrong ones are told before anything starts
    run_here(_program(read).world_size, lambda: _work(run, read))


def _read(path: str) -> Plan | Program:
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.reading import read_any

    plan = read_any(path)
    if isinstance(plan, ChainPlan):
        raise ArgumentError(f"{path} is a plan of inference, which has nothing to train", "give one of `hpgo plan`")
    return plan


def _program(plan: Plan | Program) -> Program:
    from hpgo.programs.program import Program

    return plan if isinstance(plan, Program) else plan.program()


def _work(run: _Run, plan: Plan | Program) -> None:
    """One rank's part; rank 0 prints."""
    import torch

    from hpgo.runtime import Pipeline
    from hpgo.runtime.optimizer import optimizer_of

    predicted_s = _predicted_s(plan)
    options = run.options | {"dtype": run.dtype and getattr(torch, run.dtype)}
    options["autocast"] = options["autocast"] and getattr(torch, options["autocast"])
    with Pipeline(plan, run.workload, optimizer=optimizer_of(run.optimizer), **options) as pipeline:
        talks = pipeline.rank == 0
        batch = pipeline.example()
        losses: list[float] = []
        steps_s: list[float] = []
        for step in range(1, run.steps + 1):
            begin_s = time.perf_counter()
            loss = pipeline.step(*batch)
            steps_s.append(time.perf_counter() - begin_s)
            losses.append(loss)
            if not math.isfinite(loss):
                raise RunError(
                    f"the loss of step {step} is {loss}",
                    "try a smaller learning rate, `--clip-norm`, or `--dtype float64` to see where it comes from",
                )
            if talks and not run.as_json:
                click.echo(_line(step, loss, steps_s[-1], plan.global_batch_size, predicted_s))
        measured = pipeline.stage_times()
    if talks:
        _conclude(run, losses, steps_s, predicted_s, _stages(plan, measured))


def _predicted_s(plan: Plan | Program) -> float | None:
    """Seconds of a step, if the plan says what things take."""
    from hpgo.programs.program import Program

    if not isinstance(plan, Program):
        return plan.step_s
    if plan.costs is None:
        return None
    from hpgo.timing.simulation import simulate

    return simulate(plan).makespan_s


def _line(step: int, loss: float, step_s: float, samples: int, predicted_s: float | None) -> str:
    ratio = f"  {step_s / predicted_s:.3g} × predicted" if predicted_s else ""
    return f"step {step}  loss {loss:.6g}  {format_seconds(step_s)}  {samples / step_s:.4g} samples/s{ratio}"


def _conclude(
    run: _Run,
    losses: list[float],
    steps_s: list[float],
    predicted_s: float | None,
    stages: list[dict[str, Any]],
) -> None:
    step_s: dict[str, Any] = {
        "predicted": predicted_s,
        "measured": median(steps_s[1:] or steps_s),
    }  # the first one warms up
    if run.as_json:
        document = {"format": "hpgo.run", "version": 1, "losses": losses, "step_s": step_s, "stages": stages, "exit": 0}
        click.echo(json_text(document))
        return
    rows = [("step", step_s)]
    for stage in stages:
        rows += [(f"stage {stage['stage']} {way}", stage[f"{way}_s"]) for way in ("forward", "backward")]
    click.echo()
    table(
        ("", "predicted", "measured", "difference"),
        [(name, *_compared(both["predicted"], both["measured"])) for name, both in rows],
    )


def _compared(predicted: float | None, measured: float) -> tuple[str, str, str]:
    if not predicted:
        return "", format_seconds(measured), ""
    return format_seconds(predicted), format_seconds(measured), f"{100 * (measured / predicted - 1):+.3g} %"


def _stages(plan: Plan | Program, measured: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Of each stage who runs it, and what one micro-batch takes forward and backward."""
    from hpgo.programs.program import Program

    found = []
    for number, (stage, (forward_s, backward_s)) in enumerate(zip(_program(plan).stages, measured, strict=True)):
        priced = None if isinstance(plan, Program) else plan.stages[number]
        found.append(
            {
                "stage": number,
                "layers": list(stage.layers),
                "devices": list(stage.devices),
                "forward_s": {"predicted": priced and priced.forward_s, "measured": forward_s},
                "backward_s": {"predicted": priced and priced.backward_s, "measured": backward_s},
            }
        )
    return found
