"""The estimate of a configuration as text of at most 80 columns."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from hpgo.base.messages import join_words, pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_seconds
from hpgo.llm.memory import COLUMNS, LATER
from hpgo.llm.plan import facts
from hpgo.llm.platform import MEMORY_ERROR
from hpgo.llm.step_time import LABELS
from hpgo.llm.validated_features import EVERYWHERE
from hpgo.show.folding import alike, numbers

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpgo.llm.estimate import LlmEstimate, StageEstimate
    from hpgo.llm.search import LlmPlanSearch

WIDTH = 80
_UNITS = (
    "Memory is in GB, of each GPU. MFU counts what the model asks for: nothing that is computed anew, and no scores"
    " that are masked."
)
_SHARED = "; of ranks in one row it is that of the fullest"
UNCERTIFIED = (
    "Layers hold experts: this is no certificate. Prices of such models are further from published steps than their"
    " goal allows, and tokens are taken to be spread evenly."
)
_VARYING = ("activations", *LATER)
"""Memory columns that also depend on the position of a rank in the pipeline."""
_SMALL = 5e-4
"""Share of a step below which a term is not listed."""
_SEEN_BYTES = 5e7
"""Bytes below which a size would be shown as 0.0 GB."""


def lines(estimate: LlmEstimate, width: int = WIDTH) -> list[str]:
    """Return the lines of the report.

    >>> import hpgo
    >>> one = hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192,
    ... tp=2, zero_stage=1)
    >>> lines(one)[0]
    'llama-3-8b on h100:1, 8 GPUs'
    """
    config = estimate.parallelism
    peak = estimate.fullest.peak_bytes
    fits = (
        f"{format_bytes(estimate.capacity_bytes - peak)} to spare"
        if estimate.fits
        else (f"{format_bytes(estimate.shortfall_bytes)} MORE THAN THERE IS")
    )
    who = f"{printable(estimate.model)} on {printable(estimate.cluster)}, {pluralize(estimate.gpus, 'GPU')}"
    runs = f"{pluralize(estimate.micro_batches, 'micro-batch')} on each of {pluralize(config.dp, 'replica')}"
    share = f"MFU {100 * estimate.utilization:.1f} % of {estimate.peak_flop_per_s / 1e12:g} TFLOP/s"
    memory = [dict(stage.memory_bytes) for stage in estimate.stages]
    columns = [name for name in memory[0] if any(held[name] for held in memory)]
    ranks = _rows(estimate)
    units = _UNITS.replace("GPU.", f"GPU{_SHARED}.", 1) if len(ranks) < len(estimate.stages) else _UNITS
    return [
        who,
        *textwrap.wrap(config.named(), width),
        f"{runs}, {estimate.seq_length} tokens a sequence, {config.precision}",
        "",
        f"step    {format_seconds(estimate.step_s)} ± {100 * estimate.error:.0f} %, {_worth(estimate)}",
        f"tokens  {estimate.tokens_per_s_per_gpu:,.0f}/s/GPU; {share}",
        f"memory  {format_bytes(peak)} ± {100 * MEMORY_ERROR:.0f} % of {format_bytes(estimate.capacity_bytes)}: {fits}",
        *_close(estimate, width),
        *_cached(estimate, width),
        "",
        *plain(
            ["where the step goes", "time", "share"],
            [
                (LABELS.get(name, name), format_seconds(spent_s), f"{100 * spent_s / estimate.step_s:.1f} %")
                for name, spent_s in sorted(estimate.time_by_term_s, key=lambda row: -row[1])
                if spent_s > _SMALL * estimate.step_s
            ],
            width,
        ),
        "",
        *plain(
            ["rank", "layers", *(COLUMNS[name].label.removeprefix("framework ") for name in columns), "all"],
            [
                (
                    where,
                    _layers(stage),
                    *(_size(dict(stage.memory_bytes)[name]) for name in columns),
                    _size(stage.peak_bytes),
                )
                for where, stage in ranks
            ],
            width,
        ),
        "",
        *textwrap.wrap(units, width),
        *(["", *textwrap.wrap(f"{untold(estimate)}.", width)] if estimate.unvalidated_features else []),
        *(["", *textwrap.wrap(UNCERTIFIED, width)] if estimate.has_experts else []),
    ]


def untold(estimate: LlmEstimate, names: Collection[str] | None = None) -> str:
    """Return the end of a sentence about unvalidated features: those of an estimate, or `names`."""
    names = estimate.unvalidated_features if names is None else names
    where = "" if EVERYWHERE.isdisjoint(names) else " on such a device"
    whose = ", nor one of the platform's," if estimate.measured_steps else ""
    return f"No published step{where}{whose} has measured {join_words(names)}: what that takes stands on terms alone"


def listed(choice: LlmPlanSearch, width: int = WIDTH) -> list[str]:
    """Return the list of the fastest configurations, with those within the error, and how many there were."""
    fastest, near = choice.estimates[0], choice.alike
    rows = [
        (
            place,
            format_seconds(one.step_s),
            f"+{100 * (one.step_s / fastest.step_s - 1):.1f} %",
            ("≈" if one in near else " ") + ("?" if one.unvalidated_features else ""),
            f"{one.fullest.peak_bytes / 1e9:.1f} GB",
            one.parallelism.named(),
        )
        for place, one in enumerate(choice.estimates, start=1)
    ]
    said = (
        f"{choice.configurations:,} ways were bounded, {choice.simulated:,} simulated, of all that {choice.said}:"
        f" none that fits"
        " is quicker by these terms."
    )
    rests = ["", *textwrap.wrap(UNCERTIFIED, width)] if choice.best.has_experts else []
    table = plain(["", "step", "longer", "", "memory", "way"], rows)
    return [*table, "", *_alike(choice, width), *_untold(choice, width), *textwrap.wrap(said, width), *rests]


def _alike(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return which configurations are within the error of the fastest, and in what they differ."""
    fastest, others = choice.estimates[0], choice.alike[1:]
    error = f"{100 * fastest.error:.0f} %, the error of such steps {_whence(fastest)}"
    if not others:
        return [*textwrap.wrap(f"No other of these is within {error}.", width), ""]
    ways = [one.parallelism for one in choice.alike]
    names = [name for name, fields in _DEGREES.items() if any(len({getattr(w, f) for w in ways}) > 1 for f in fields)]
    said = (
        f"≈: within {error}. Which of these {len(choice.alike)} is quicker, the terms don't tell; they differ in"
        f" {join_words(names)}. Take the one that you know how to run."
    )
    return [*textwrap.wrap(said, width), ""]


def _untold(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return the unvalidated features of the list, and how they changed the choice."""
    names = list(dict.fromkeys(name for one in choice.estimates for name in one.unvalidated_features))
    if not names:
        return []
    best, fastest = choice.best, choice.estimates[0]
    said = f"?: {untold(best, names)}."
    if best is not fastest:
        said += (
            f" The plan is {choice.estimates.index(best) + 1}, which relies on"
            f" {'less of that' if best.unvalidated_features else 'none of that'} and is within the error of 1."
            f" `--fix` takes what"
            " it is told, `--exclude` leaves out."
        )
    return [*textwrap.wrap(said, width), ""]


_DEGREES = {
    "tp": ("tp",), "cp": ("cp",), "ep": ("ep",), "pp": ("pp",),
    "layers at the ends": ("first_rank_layers", "last_rank_layers"), "interleaving": ("vpp",),
    "schedule": ("pp_schedule",), "dp": ("dp",), "zero": ("zero_stage",),
    "recomputation": ("recompute", "recompute_num_layers"), "micro-batch": ("micro_batch_size",),
}  # fmt: skip
"""Fields by the name that the list of differences has for them."""


def _whence(estimate: LlmEstimate) -> str:
    """Return the origin of the error."""
    known = estimate.measured_steps
    return f"where {known} {'was' if known == 1 else 'were'} measured" if known else "against published ones"


def _close(estimate: LlmEstimate, width: int) -> list[str]:
    """Return a warning if less memory is free than the mean error, and how to keep more free."""
    error_bytes = MEMORY_ERROR * estimate.fullest.peak_bytes
    if not 0 <= estimate.capacity_bytes - estimate.fullest.peak_bytes < error_bytes:
        return []
    size = f"{math.ceil(error_bytes / 1e9)}GB"
    return _below(
        f"which is less than such figures are off; `hpgo llm plan --reserve-memory {size}` keeps it free", width
    )


def _below(said: str, width: int) -> list[str]:
    """Return lines that continue the row on memory."""
    return textwrap.wrap(said, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _cached(estimate: LlmEstimate, width: int) -> list[str]:
    """Return what `nvidia-smi` shows beside the memory that is needed."""
    if estimate.fullest.allocator_cached_bytes < _SEEN_BYTES:
        return []
    return _below(
        f"{format_bytes(estimate.fullest.allocator_cached_bytes)} more as `nvidia-smi` counts: free, but not given"
        f" back",
        width,
    )


def _worth(estimate: LlmEstimate) -> str:
    """Return the basis of the step time."""
    if estimate.measured_steps:
        return f"by terms and {pluralize(estimate.measured_steps, 'measured step')}"
    return "by terms, not measured"


def document(estimate: LlmEstimate) -> dict[str, object]:
    """Return all fields for JSON, and the values that follow from them."""
    held = facts(estimate)
    for kept, stage in zip(held["stages"], estimate.stages, strict=True):
        kept["peak_bytes"] = stage.peak_bytes
    follows = ("micro_batches", "tokens_per_s_per_gpu", "utilization", "fits", "shortfall_bytes")
    return held | {name: getattr(estimate, name) for name in follows}


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"


def _layers(stage: StageEstimate) -> int:
    """Return the number of layers of a rank."""
    return sum(stop - start for start, stop in stage.layers)


def _rows(estimate: LlmEstimate) -> list[tuple[object, StageEstimate]]:
    """Return the pipeline ranks, equal ones in one row: of ranks that differ in activations only, the fullest."""
    stages = estimate.stages

    def kept(rank: int) -> tuple[float, ...]:
        return (_layers(stages[rank]), *(size for name, size in stages[rank].memory_bytes if name not in _VARYING))

    runs = alike(range(len(stages)), kept)
    return [(numbers(run), max((stages[rank] for rank in run), key=lambda one: one.peak_bytes)) for run in runs]
