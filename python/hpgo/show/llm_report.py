"""Report of an estimate and of a search as text of at most 80 columns.

The order is: the answer, how certain it is, where time and memory go, alternatives, and the next command.
"""

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
from hpgo.llm.stack import stacks
from hpgo.llm.step_range import RELATIVE_ERROR
from hpgo.llm.step_time import LABELS
from hpgo.llm.validated_features import EVERYWHERE
from hpgo.show.folding import alike, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hpgo.llm.estimate import LlmEstimate, StageEstimate
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.search import LlmPlanSearch
    from hpgo.llm.stack import Stack

WIDTH = 80
UNCERTIFIED = (
    "The layers of this model have experts. Estimates of such models do not meet their accuracy goal yet, and they"
    " assume that tokens are spread evenly over experts. Measure a step before you rely on one."
)
_VARYING = ("activations", *LATER)
"""Memory columns that also depend on the position of a rank in the pipeline."""
_SHORT = {"gradients": "grads", "framework_overhead": "overhead", "cuda_graph_buffers": "graphs"}
"""Shorter labels of memory columns, so that the table fits into 80 columns."""
_MIN_SHARE = 5e-4
"""Share of a step below which a term is not listed: it would be shown as 0.0 %."""
_MIN_SHOWN_BYTES = 5e7
"""Size below which a cache is not reported: it would be shown as 0.0 GB."""
_INDENT = " " * 13
"""Width of the labels `Step time`, `Throughput` and `Memory`, with the gap after them."""


def lines(
    estimate: LlmEstimate, width: int = WIDTH, *, title: str = "Configuration", stack: Stack | None = None
) -> list[str]:
    r"""Return the lines of the report, with `title` above the configuration.

    `stack` is the stack of the estimate. Without it, the report has the name alone of a stack that is not built in.

    >>> import hpgo
    >>> one = hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192,
    ... tp=2, zero_stage=1)
    >>> print("\n".join(lines(one)[:4]))
    llama-3-8b on h100:1 (8 GPUs), 8192 tokens per sequence, global batch 8
    <BLANKLINE>
    Configuration:
      tp 2 + sp, dp 4, zero 1
    """
    header = (
        f"{printable(estimate.model)} on {printable(estimate.cluster)} ({pluralize(estimate.gpus, 'GPU')}),"
        f" {estimate.seq_length} tokens per sequence, global batch {estimate.global_batch_size}"
    )
    memory = [dict(stage.memory_bytes) for stage in estimate.stages]
    columns = [name for name in memory[0] if any(held[name] for held in memory)]
    ranks = _rows(estimate)
    merged = "; of the fullest rank in each row" if len(ranks) < len(estimate.stages) else ""
    return [
        *textwrap.wrap(header, width),
        "",
        f"{title}:",
        *_configuration(estimate, width),
        "",
        *_answer(estimate, width, stack),
        *_caveats(estimate, width),
        "",
        *plain(
            ["Step time", "time", "share"],
            [
                (LABELS.get(name, name), format_seconds(spent_s), f"{100 * spent_s / estimate.step_s:.1f} %")
                for name, spent_s in sorted(estimate.time_by_term_s, key=lambda row: -row[1])
                if spent_s > _MIN_SHARE * estimate.step_s
            ],
            width,
        ),
        "",
        f"Memory per GPU (GB), by pipeline rank{merged}",
        *plain(
            ["rank", "layers", *(_SHORT.get(name, COLUMNS[name].label) for name in columns), "total"],
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
    ]


def _configuration(estimate: LlmEstimate, width: int) -> list[str]:
    config = estimate.parallelism
    degrees, _, size = config.named().rpartition("micro-batch ")
    runs = f"micro-batch {size} ({pluralize(estimate.micro_batches, 'micro-batch')} per replica), {config.precision}"
    runs += ", no recomputation" if config.recompute == "none" else ""
    found = [degrees.rstrip(", "), runs] if degrees else [runs]
    return [line for one in found for line in textwrap.wrap(one, width, initial_indent="  ", subsequent_indent="  ")]


def _answer(estimate: LlmEstimate, width: int, stack: Stack | None) -> list[str]:
    """Return the rows on step time, throughput and memory."""
    steps = estimate.measured_steps
    fitted = f"estimated, fitted to {pluralize(steps, 'measured step')}"
    basis = fitted if steps else "estimated by the cost model, not measured"
    peak_bytes = estimate.fullest.peak_bytes
    fits = (
        f", {format_bytes(estimate.capacity_bytes - peak_bytes)} free"
        if estimate.fits
        else f": does not fit, over by {format_bytes(estimate.shortfall_bytes)}"
    )
    ends = " to ".join(map(format_seconds, (estimate.low_s, estimate.high_s)))
    step = f"{format_seconds(estimate.step_s)} (90 % range {ends}; {basis})"
    throughput = (
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {100 * estimate.utilization:.1f} % MFU"
        f" (peak {estimate.peak_flop_per_s / 1e12:g} TFLOP/s)"
    )
    memory = (
        f"{format_bytes(peak_bytes)} ± {100 * MEMORY_ERROR:.0f} % of {format_bytes(estimate.capacity_bytes)} on the"
        f" fullest GPU{fits}"
    )
    rows = [("Step time", step), ("Throughput", throughput), ("Memory", memory)]
    rows += [("", note) for note in (*_close(estimate), *_cached(estimate))]
    known = stack or stacks().get(estimate.stack)
    rows.append(("Stack", printable(estimate.stack) + (f": {printable(known.title)}" if known else "")))
    return [
        line
        for label, value in rows
        for line in textwrap.wrap(value, width, initial_indent=label.ljust(13), subsequent_indent=_INDENT)
    ]


def _caveats(estimate: LlmEstimate, width: int) -> list[str]:
    """Return the reasons to trust an estimate less than its error suggests."""
    found = [f"{unvalidated(estimate)}."] if estimate.unvalidated_features else []
    found += [UNCERTIFIED] if estimate.has_experts else []
    return [line for one in found for line in ["", *textwrap.wrap(one, width)]]


def unvalidated(estimate: LlmEstimate, names: Collection[str] | None = None) -> str:
    """Return a sentence, without its full stop, about the unvalidated features of an estimate, or about `names`."""
    names = estimate.unvalidated_features if names is None else names
    where = "" if EVERYWHERE.isdisjoint(names) else " on this device type"
    whose = ", nor one of the platform," if estimate.measured_steps else ""
    return (
        f"No published step{where}{whose} has validated {join_words(names)}: this part of the estimate was never"
        " compared with a measurement"
    )


_DEGREES: dict[str, Callable[[ParallelismConfig], object]] = {
    "tp": lambda config: config.tp,
    "cp": lambda config: config.cp,
    "ep": lambda config: config.ep,
    "pp": lambda config: config.pp,
    "vpp": lambda config: config.vpp,
    "schedule": lambda config: config.pp_schedule,
    "first rank": lambda config: config.first_rank_layers or "-",
    "last rank": lambda config: config.last_rank_layers or "-",
    "dp": lambda config: config.dp,
    "ZeRO": lambda config: config.zero_stage,
    "recompute": lambda config: (
        " ".join([config.recompute, *config.recompute_modules])
        + ("" if config.recompute_num_layers is None else f" {config.recompute_num_layers}")
    ),
    "micro-batch": lambda config: config.micro_batch_size,
}
"""Columns of the list of configurations, by their names."""
_NEUTRAL = {"schedule": "1f1b", "first rank": "-", "last rank": "-", "ZeRO": 0, "recompute": "none", "micro-batch": 0}
"""Values that the title of the list leaves out, because they switch a feature off; 1 for degrees."""


def listed(choice: LlmPlanSearch, width: int = WIDTH) -> list[str]:
    """Return the list of the fastest configurations, how reliable its order is, and how the search went."""
    fastest = choice.estimates[0]
    configs = [one.parallelism for one in choice.estimates]
    # Degrees that all configurations share are in the title, so that the table stays narrow and shows the differences.
    varying = [name for name, of in _DEGREES.items() if len({of(config) for config in configs}) > 1]
    shared = [
        f"{name} {of(configs[0])}"
        for name, of in _DEGREES.items()
        if name not in varying and of(configs[0]) != _NEUTRAL.get(name, 1)
    ]
    # The column of marks appears only if a mark is in it. Most lists have none.
    marks = any(one.unvalidated_features for one in choice.estimates)
    rows = [
        (
            place,
            format_seconds(one.step_s),
            f"+{100 * (one.step_s / fastest.step_s - 1):.1f} %",
            *(["?" if one.unvalidated_features else ""] if marks else []),
            f"{one.fullest.peak_bytes / 1e9:.1f} GB",
            *(_DEGREES[name](one.parallelism) for name in varying),
        )
        for place, one in enumerate(choice.estimates, start=1)
    ]
    title = f"Top {pluralize(len(rows), 'configuration')}"
    title += f" ({'all: ' if len(rows) > 1 else ''}{', '.join(shared)})" if shared else ""
    space = (
        f"Search: {choice.configurations:,} configurations bounded, {choice.simulated:,} simulated, of all that"
        f" {choice.said}. No other configuration that fits in memory has a shorter estimated step time."
    )
    table = plain(["", "step time", "", *([""] if marks else []), "memory", *varying], rows, width)
    return [
        *textwrap.wrap(title, width),
        *table,
        "",
        *_reliability(choice, width),
        *_unvalidated(choice, width),
        *textwrap.wrap(space, width),
    ]


def _reliability(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return a paragraph on whether the order of the list is reliable."""
    alike_count, count = len(choice.alike), len(choice.estimates)
    error = f"the error of such differences ({100 * RELATIVE_ERROR:.0f} %)"
    if count == 1:
        return []
    if alike_count == 1:
        text = f"Configuration 1 is faster than the others by more than {error}."
    else:
        who, whose = (
            ("The step times", f"the order of these {count}")
            if alike_count == count
            else (f"The step times of 1 to {alike_count}", "their order")
        )
        text = (
            f"{who} differ by less than {error}, so {whose} is not reliable. If you already run one of them, keep it."
        )
    return [*textwrap.wrap(text, width), ""]


def _unvalidated(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return the unvalidated features of the list, and how they changed the choice."""
    names = list(dict.fromkeys(name for one in choice.estimates for name in one.unvalidated_features))
    if not names:
        return []
    best, fastest = choice.best, choice.estimates[0]
    text = f"?: {unvalidated(best, names)}."
    if best is not fastest:
        text += (
            f" So the best configuration is number {choice.estimates.index(best) + 1}: it uses"
            f" {'fewer' if best.unvalidated_features else 'none'} of these features, and its step time is within the"
            " error of number 1. To choose otherwise, use `--fix` or `--exclude`."
        )
    return [*textwrap.wrap(text, width), ""]


def next_commands(commands: Sequence[str], title: str = "Next:") -> list[str]:
    """Return the last block of a report: commands that the user can run next.

    >>> next_commands(["hpgo llm explain llm-plan.json"])
    ['', 'Next:', '  hpgo llm explain llm-plan.json']
    """
    # Commands are not wrapped, so that they can be copied.
    return ["", title, *(f"  {command}" for command in commands)]


def _close(estimate: LlmEstimate) -> list[str]:
    """Return a warning if less memory is free than the mean error, and how to keep more free."""
    # A configuration that does not fit has a clearer message already.
    error_bytes = MEMORY_ERROR * estimate.fullest.peak_bytes
    if not 0 <= estimate.capacity_bytes - estimate.fullest.peak_bytes < error_bytes:
        return []
    size = f"{math.ceil(error_bytes / 1e9)}GB"
    return [f"less is free than the error of the estimate: `hpgo llm plan --reserve-memory {size}` keeps more free"]


def _cached(estimate: LlmEstimate) -> list[str]:
    """Return a note on what `nvidia-smi` shows in addition to the memory that is needed."""
    cached_bytes = estimate.fullest.allocator_cached_bytes
    if cached_bytes < _MIN_SHOWN_BYTES:
        return []
    return [f"`nvidia-smi` may show {format_bytes(cached_bytes)} more, which PyTorch's allocator caches"]


def document(estimate: LlmEstimate) -> dict[str, object]:
    """Return all fields for JSON, and the values that are computed from them."""
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

    # Activations shrink from one rank to the next, so comparing them would put every rank in a separate row.
    def kept(rank: int) -> tuple[float, ...]:
        return (_layers(stages[rank]), *(size for name, size in stages[rank].memory_bytes if name not in _VARYING))

    runs = alike(range(len(stages)), kept)
    return [(numbers(run), max((stages[rank] for rank in run), key=lambda one: one.peak_bytes)) for run in runs]
