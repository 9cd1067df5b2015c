"""Plans as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hpgo.plans import Plan


def table(plan: Plan) -> str:
    """A plan as plain text: one line a stage, then what the whole takes."""
    lines = [
        f"{index}  {stage.layers[0]}–{stage.layers[-1]}  ×{stage.replicas}"
        f"  F {format_seconds(stage.forward_s)}  B {format_seconds(stage.backward_s)}"
        f"  {format_bytes(stage.memory.total_bytes)} of {format_bytes(stage.capacity_bytes)}"
        for index, stage in enumerate(plan.stages)
    ]
    gap = "" if plan.gap is None else f", at most {plan.gap:.1%} above the best possible"
    return "\n".join([*lines, f"step {format_seconds(plan.step_s)}{gap}; {plan.limit}"])
