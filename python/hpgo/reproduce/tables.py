"""Markdown tables that compare the planners' results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.compat import Stage
    from hpgo.planning.plans import Plan
    from hpgo.reproduce.answers import Answers, PlannerComparison, Strategy, SweepPoint


def strategies(rows: Iterable[Strategy]) -> str:
    """Return a table of published plans and of both planners' plans, with step times in the current cost model."""
    header = (
        "model", "batch", "config", "DAPPLE (from memory)", "its step here", "compatible", "speed-up", "its step here",
        "modern", "micro-batches", "step", "speed-up", "gap", "memory",
    )  # fmt: skip
    return table(
        header,
        [
            (
                row.question.model,
                row.question.global_batch_size,
                row.config,
                row.published,
                _step(row.published_priced),
                _stages(row.compatible.stages) if row.compatible else "–",
                f"{row.compatible.speedup:.2f}" if row.compatible else "–",
                _step(row.compatible.priced) if row.compatible else "–",
                shape(row.modern),
                f"{row.modern.micro_batches} × {row.modern.pipeline_micro_batch_size}",
                format_seconds(row.modern.step_s),
                f"{row.modern.speed_up:.2f}",
                _gap(row.modern),
                format_bytes(float(f"{max(stage.memory.total_bytes for stage in row.modern.stages):.3g}")),
            )
            for row in rows
        ],
    )


def reasons(rows: Iterable[Strategy]) -> str:
    """Return a table of reasons for which the modern plan differs from the published and the compatible plan."""
    lines = []
    for row in rows:
        texts = [_reason("DAPPLE's", row.published_priced, row.modern)]
        if row.compatible:
            texts.append(_reason("the compatible", row.compatible.priced, row.modern))
        else:
            texts.append("the compatible planner has fixed links")
        lines.append((row.question.model, row.config, _sentence(texts), row.modern.limit))
    return table(("model", "config", "against the other plans", "what limits the modern plan"), lines)


def pipedream(rows: Iterable[PlannerComparison]) -> str:
    """Return a table that compares strategies of DAPPLE and PipeDream on configuration A."""
    header = (
        "model", "batch", "DAPPLE", "compatible", "same", "PipeDream", "DAPPLE's step", "PipeDream's step", "modern",
        "its step",
    )  # fmt: skip
    return table(
        header,
        [
            (
                row.rival.model,
                row.rival.global_batch_size,
                _strategy(*row.rival.dapple),
                _stages(row.compatible.stages),
                "yes" if _strategy(*row.rival.dapple) == _stages(row.compatible.stages) else "no",
                _strategy(*row.rival.pipedream),
                _step(row.dapple),
                _step(row.pipedream),
                shape(row.modern),
                format_seconds(row.modern.step_s),
            )
            for row in rows
        ],
    )


def batches(points: Iterable[SweepPoint]) -> str:
    """Return a table with the columns of the original guide over global batch sizes, and the modern plan."""
    header = (
        "model", "batch", "DP, no overlap", "DP + P3", "DP, normal overlap", "best hybrid", "its stages",
        "modern", "its stages", "gap",
    )  # fmt: skip
    return table(
        header,
        [
            (
                point.model,
                point.global_batch_size,
                f"{point.columns.no_overlap:.3f}",
                _speedup(point.columns.p3),
                _speedup(point.columns.overlap),
                f"{point.compatible.speedup:.3f}",
                _stages(point.compatible.stages),
                *_modern(point),
            )
            for point in points
        ],
    )


def devices(points: Iterable[SweepPoint]) -> str:
    """Return a table of speed-ups over device counts."""
    return table(
        ("model", "batch", "devices", "best hybrid", "its stages", "modern", "its stages", "gap"),
        [
            (
                point.model,
                point.global_batch_size,
                point.devices,
                f"{point.compatible.speedup:.3f}",
                _stages(point.compatible.stages),
                *_modern(point),
            )
            for point in points
        ],
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, in the layout of PLANNER_REPRODUCTION.md."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _stages(stages: Sequence[Stage]) -> str:
    """Return the replicas of stages, and the states before which they end."""
    return _strategy([len(devices) for *_, devices in stages], [end for _, end, *_ in stages[:-1]])


def _strategy(replicas: Sequence[int], cuts: Sequence[int]) -> str:
    if len(replicas) == 1:
        return "DP" if replicas[0] > 1 else "one device"
    # More than four stages would make the column too wide, so runs of replicas are counted.
    if len(replicas) > 4:
        return f"{len(replicas)} stages: {_runs(replicas)}"
    return f"{':'.join(map(str, replicas))} @{', '.join(map(str, cuts))}"


def shape(plan: Plan) -> str:
    """Return the replicas of the stages, and the layers in each where there are at most 4 stages."""
    replicas = [stage.replicas for stage in plan.stages]
    if len(replicas) == 1:
        return "DP" if replicas[0] == plan.devices and replicas[0] > 1 else "one device"
    if len(replicas) > 4:
        return f"{len(replicas)} stages: {_runs(replicas)}"
    return f"{':'.join(map(str, replicas))} ({':'.join(str(len(stage.layers)) for stage in plan.stages)})"


def _runs(numbers: Sequence[int]) -> str:
    """Return numbers with repeats counted, such as `1×8, 2, 1×4`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return ", ".join(f"{number}×{count}" if count > 1 else str(number) for number, count in runs)


def _modern(point: SweepPoint) -> tuple[str, str, str]:
    if point.modern is None:
        return ("–", "–", "–")
    return (f"{point.modern.speed_up:.3f}", shape(point.modern), _gap(point.modern))


def _speedup(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _step(plan: Plan | None) -> str:
    if plan is None:
        return "–"
    return format_seconds(plan.step_s) if plan.fits else f"lacks {_missing(plan)}"


def _missing(plan: Plan) -> str:
    return format_bytes(float(f"{plan.shortfall_bytes:.3g}"))


def _gap(plan: Plan) -> str:
    return "–" if plan.optimality_gap is None else f"{plan.optimality_gap:.1%}"


def _reason(whose: str, other: Plan | None, modern: Plan) -> str:
    if other is None:
        return f"{whose} plan has no estimate"
    if [(stage.layers, stage.devices) for stage in other.stages] == [
        (stage.layers, stage.devices) for stage in modern.stages
    ]:
        return f"{whose} plan is the same"
    if not other.fits:
        return f"{whose} plan lacks {_missing(other)} on a device"
    slower = other.step_s / modern.step_s - 1
    # Differences below 0.05 % would print as 0.0 %.
    if slower < 0.0005:
        return f"{whose} plan is as fast"
    return f"{whose} plan takes {slower:.1%} longer: {other.limit}"


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


TABLES: dict[str, Callable[[Answers], str]] = {
    "strategies": lambda made: strategies(made.strategies),
    "reasons": lambda made: reasons(made.strategies),
    "pipedream": lambda made: pipedream(made.duels),
    "batches": lambda made: batches(made.batches),
    "devices": lambda made: devices(made.devices),
}
"""Name of each table of PLANNER_REPRODUCTION.md and the function that makes it, in the order of that page."""
