"""Estimates, searches and sizes of transformers as text, in notebooks, and as data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.messages import pluralize
from hpgo.base.units import format_bytes, format_seconds
from hpgo.errors import HpgoError
from hpgo.show import fit_report, llm_figure, llm_report, mixed_figure, mixed_report, size_report
from hpgo.show.notebook import answer, facts, frame, image, percent, table, title

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpgo.draw.scene import Scene
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.fit import LlmFits
    from hpgo.llm.mixed.plan import MixedPlanSearch
    from hpgo.llm.search import LlmPlanSearch
    from hpgo.llm.size import LlmSizes

_DEGREES = ("tp", "cp", "ep", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "recompute")


def estimate_text(estimate: LlmEstimate) -> str:
    """Return the report of `hpgo llm estimate`."""
    return "\n".join(llm_report.lines(estimate))


def search_text(found: LlmPlanSearch) -> str:
    """Return the report of the recommended configuration, and the list of the others."""
    return "\n".join([*llm_report.lines(found.best, title="Recommended"), "", *llm_report.listed(found)])


def sizes_text(sizes: LlmSizes) -> str:
    """Return the report of `hpgo llm size`."""
    return "\n".join(size_report.lines(sizes))


def mixed_text(found: MixedPlanSearch) -> str:
    """Return the report of `hpgo llm plan` for nodes that differ."""
    return "\n".join(mixed_report.lines(found))


def fits_text(fits: LlmFits) -> str:
    """Return the report of `hpgo llm fit`, without the numbers of GPUs on which other methods fit."""
    return "\n".join(fit_report.lines(fits.rows()))


def of_estimate(estimate: LlmEstimate) -> str:
    """Return tables of the step's terms and of the memory of each pipeline rank."""
    return answer(_headline(estimate), *_parts(estimate))


def of_search(found: LlmPlanSearch) -> str:
    """Return the recommended configuration with its picture, and a table of all configurations of the list."""
    return answer(
        _headline(found.best),
        _picture(lambda: llm_figure.scene(found.best, found.cluster), "GPUs by their ranks"),
        *_parts(found.best),
        title(f"{pluralize(len(found.estimates), 'configuration')} to choose from"),
        table(["step", "memory", "MFU", *_DEGREES], [_row(one) for one in found.estimates]),
    )


def of_sizes(sizes: LlmSizes) -> str:
    """Return a table of the answer for each kind of node, or of the Pareto front of days and cost."""
    rows = [
        (
            f"{point.nodes} x {point.kind}", point.gpus, f"{point.days:.1f}", f"{point.gpu_hours:,.0f}",
            f"{sizes.cost(point):,.0f}" if sizes.hour_prices else "-", *_row(point.estimate)[3:],
        )
        for point in sizes.answers or sizes.front
    ]  # fmt: skip
    return answer(repr(sizes)[1:-1], table(["nodes", "GPUs", "days", "GPU-hours", "cost", *_DEGREES], rows))


def of_mixed(found: MixedPlanSearch) -> str:
    """Return the picture of the answer, and a table of the ways to train on nodes that differ."""
    ways = [(way, format_seconds(step_s)) for way, step_s in sorted(found.steps_s.items(), key=lambda one: one[1])]
    picture = _picture(lambda: mixed_figure.scene(found), "step times, stages and the simulated step")
    return answer(repr(found)[1:-1], picture, table(["way", "step"], ways))


def of_fits(fits: LlmFits) -> str:
    """Return a table of the ways to fine-tune that the report has."""
    rows = [
        (
            one.name, f"{one.estimate.tokens_per_s_per_gpu:,.0f}", format_bytes(one.estimate.fullest.peak_bytes),
            format_bytes(one.estimate.shortfall_bytes) if one.estimate.shortfall_bytes else "-",
            f"{one.max_seq_length:,}", f"{one.max_micro_batch_size:,}",
        )
        for one in fits.rows()
    ]  # fmt: skip
    names = ["method and settings", "tokens/s per GPU", "memory", "too little", "longest sequence", "most per pass"]
    return answer(repr(fits)[1:-1], table(names, rows))


def estimate_frame(estimate: LlmEstimate) -> Any:
    """Return a data frame with one row per pipeline rank: its seconds of the step and its memory."""
    return frame(
        {
            "rank": rank, "compute_s": stage.compute_s, "communication_s": stage.communication_s,
            **{f"{name}_bytes": size for name, size in stage.memory_bytes}, "peak_bytes": stage.peak_bytes,
        }
        for rank, stage in enumerate(estimate.stages)
    )  # fmt: skip


def search_frame(found: LlmPlanSearch) -> Any:
    """Return a data frame with one row per configuration of the list."""
    return frame(_numbers(one) for one in found.estimates)


def sizes_frame(sizes: LlmSizes) -> Any:
    """Return a data frame with one row per cluster that was evaluated."""
    return frame(
        {
            "kind": point.kind, "nodes": point.nodes, "gpus": point.gpus, "days": point.days,
            "gpu_hours": point.gpu_hours, "cost": sizes.cost(point), "goodput": point.goodput,
            **_numbers(point.estimate),
        }
        for point in sizes.points
    )  # fmt: skip


def fits_frame(fits: LlmFits) -> Any:
    """Return a data frame with one row per way to fine-tune, those that do not fit included."""
    return frame(
        {
            "method": one.method, "settings": ", ".join(one.settings), "fits": one.estimate.fits,
            "shortfall_bytes": one.estimate.shortfall_bytes, "max_seq_length": one.max_seq_length,
            "max_micro_batch_size": one.max_micro_batch_size,
            "tokens_per_s_per_gpu": one.estimate.tokens_per_s_per_gpu, **_numbers(one.estimate),
        }
        for one in fits.ways
    )  # fmt: skip


def mixed_frame(found: MixedPlanSearch) -> Any:
    """Return a data frame with one row per way to train on nodes that differ."""
    return frame({"way": way, "step_s": step_s} for way, step_s in found.steps_s.items())


def _headline(estimate: LlmEstimate) -> str:
    gpus = pluralize(estimate.gpus, "GPU")
    return f"{estimate.model} on {estimate.cluster}: {gpus}, {format_seconds(estimate.step_s)}"


def _parts(estimate: LlmEstimate) -> Iterable[str]:
    terms = sorted(estimate.time_by_term_s, key=lambda term: -term[1])
    rows = [(name, format_seconds(spent_s), percent(spent_s / estimate.step_s)) for name, spent_s in terms if spent_s]
    names = [name for name, _ in estimate.stages[0].memory_bytes]
    memory = [
        (rank, *(format_bytes(dict(stage.memory_bytes)[name]) for name in names), format_bytes(stage.peak_bytes))
        for rank, stage in enumerate(estimate.stages)
    ]
    yield facts(
        [
            ("Configuration", estimate.parallelism.named()),
            ("Range", f"{format_seconds(estimate.low_s)} to {format_seconds(estimate.high_s)} (90 %, not measured)"),
            ("MFU", percent(estimate.utilization)),
        ]
    )
    yield table(["term", "time", "share"], rows)
    yield title(f"Memory of a GPU, of {format_bytes(estimate.capacity_bytes)}, by pipeline rank")
    yield table(["rank", *names, "total"], memory)


def _picture(scene: Callable[[], Scene], described: str) -> str:
    """Return a picture, or nothing if it is too large to draw."""
    from hpgo.draw.options import options_of
    from hpgo.draw.svg import svg

    try:
        return image(svg(scene(), options_of({}, 1)), described)
    except HpgoError:
        return ""


def _row(estimate: LlmEstimate) -> list[object]:
    config = estimate.parallelism
    return [
        format_seconds(estimate.step_s), format_bytes(estimate.fullest.peak_bytes), percent(estimate.utilization),
        *(getattr(config, name) for name in _DEGREES),
    ]  # fmt: skip


def _numbers(estimate: LlmEstimate) -> dict[str, object]:
    config = estimate.parallelism
    return {
        **{name: getattr(config, name) for name in _DEGREES}, "step_s": estimate.step_s, "low_s": estimate.low_s,
        "high_s": estimate.high_s, "mfu": float(estimate.utilization), "peak_bytes": estimate.fullest.peak_bytes,
    }  # fmt: skip
