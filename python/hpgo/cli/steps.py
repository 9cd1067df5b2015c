"""Output of `hpgo run` and `hpgo emulate`: a line for each step, and a table of predicted and measured times."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.compared import compared, percent
from hpgo.cli.terminal import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.programs.program import Program
    from hpgo.timing.timeline import Timeline


def predicted_step(program: Program) -> Timeline | None:
    """Return the simulated step; None if the program has no times."""
    from hpgo.timing.simulation import simulate

    return None if program.costs is None else simulate(program)


def line(step: int, loss: float | None, step_s: float, samples: int, predicted: Timeline | None) -> str:
    """Return the output line of one step."""
    progress = "" if loss is None else f"  loss {loss:.6g}"
    ratio = "" if predicted is None else f"  {step_s / predicted.makespan_s:.3g}× predicted"
    return f"step {step}{progress}  {format_seconds(step_s)}  {samples / step_s:.4g} samples/s{ratio}"


def validation_line(found: dict[str, float]) -> str:
    """Return the output line of an evaluation: its `step`, the loss and the metrics."""
    values = (f"{name} {value:.6g}" for name, value in found.items() if name != "step")
    return f"validation after step {found['step']}  " + "  ".join(values)


def compare(program: Program, predicted: Timeline | None, measured: Timeline | None) -> dict[str, Any]:
    """Return predicted and measured values of the run, by the keys of the JSON result."""
    from hpgo.timing.breakdown import breakdown

    timelines = {"predicted": predicted, "measured": measured}
    of = {which: None if one is None else breakdown(one) for which, one in timelines.items()}

    def both(name: str, stage: int | None = None) -> dict[str, Any]:
        values = {which: one and getattr(one, name) for which, one in of.items()}
        return values if stage is None else {which: value and value[stage] for which, value in values.items()}

    stages = [
        {"stage": number, "layers": list(stage.layers), "devices": list(stage.devices)}
        | {
            name: both(name, number)
            for name in ("forward_s", "backward_s", "transfer_s", "grad_reduce_s", "memory_bytes")
        }
        for number, stage in enumerate(program.stages)
    ]
    whole = {name: both(name) for name in ("step_s", "bubble", "peak_memory_bytes")}
    return {"step_s": whole.pop("step_s"), "stages": stages} | whole


def conclude(head: dict[str, Any], steps_s: list[float], found: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of `compare`, as a table or as JSON that starts with `head`."""
    if as_json:
        if steps_s:
            found["step_s"]["measured"] = median_low(steps_s[1:] or steps_s)  # The first step allocates and warms up.
        click.echo(json_text({"format": "hpgo.run", "version": 1} | head | found | {"exit": 0}))
        return
    rows: list[tuple[str, Callable[[float], str], dict[str, Any]]] = [("step time", format_seconds, found["step_s"])]
    for stage in found["stages"]:
        number = stage["stage"]
        rows += [
            (f"stage {number} forward", format_seconds, stage["forward_s"]),
            (f"stage {number} backward", format_seconds, stage["backward_s"]),
            (f"stage {number} to {number + 1}", format_seconds, stage["transfer_s"]),
            (f"stage {number} gradient reduction", format_seconds, stage["grad_reduce_s"]),
            (f"stage {number} memory", format_bytes, stage["memory_bytes"]),
        ]
    rows += [("bubble", percent, found["bubble"]), ("peak memory", format_bytes, found["peak_memory_bytes"])]
    click.echo()
    table(
        ("", "predicted", "measured", "difference"),
        [(name, *compared(shown, values)) for name, shown, values in rows if any(values.values())],
    )
