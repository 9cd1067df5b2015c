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
from hpgo.llm.simplicity import is_tight, simpler_by
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
UNEVEN = (
    "All sequences are assumed to have documents of the same lengths. Where they differ, replicas wait for the one with"
    " the longest documents."
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
    estimate: LlmEstimate, width: int = WIDTH, *, title: str = "Configuration", notes: Sequence[str] = (),
    stack: Stack | None = None,
) -> list[str]:  # fmt: skip
    r"""Return the lines of the report, with `title` above the configuration and `notes` above the title.

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
        *notes,
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
        *_busy(estimate, width),
    ]


def _busy(estimate: LlmEstimate, width: int) -> list[str]:
    """Return the table of what each pipeline rank does during a step; without a pipeline nothing waits."""
    stages = estimate.stages
    if len(stages) == 1:
        return []

    def shares(rank: int) -> tuple[float, float, float]:
        compute, sent = (
            round(100 * spent_s / estimate.step_s, 1)
            for spent_s in (stages[rank].compute_s, stages[rank].communication_s)
        )
        return compute, sent, max(0.0, 100 - compute - sent)

    runs = alike(range(len(stages)), lambda rank: (_layers(stages[rank]), *shares(rank)))
    return [
        "",
        "Time of each pipeline rank (share of the step)",
        *plain(
            ["rank", "layers", "computes", "communicates", "idle"],
            [(numbers(run), _layers(stages[run[0]]), *(f"{share:.1f} %" for share in shares(run[0]))) for run in runs],
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
    state_bytes = max(stage.cpu_bytes for stage in estimate.stages)
    activation_bytes = max(stage.cpu_activation_bytes for stage in estimate.stages)
    on_cpu = (("the optimizer's state", state_bytes), ("offloaded activations", activation_bytes))
    if used := [f"{format_bytes(size)} per GPU, for {what}" for what, size in on_cpu if size]:
        rows.append(("CPU memory", "; ".join(used)))
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
    found += [UNEVEN] if estimate.parallelism.packed_length is not None else []
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
    "CUDA graphs": lambda config: "-" if config.cuda_graph_impl == "none" else config.cuda_graph_impl,
    "shard groups": lambda config: config.dp_replicate,
}
"""Columns of the list of configurations, by their names."""
_NEUTRAL = {
    "schedule": "1f1b", "first rank": "-", "last rank": "-", "ZeRO": 0, "recompute": "none", "micro-batch": 0,
    "CUDA graphs": "-",
}  # fmt: skip
"""Values that the title of the list leaves out, because they switch a feature off; 1 for degrees."""


def listed(choice: LlmPlanSearch, width: int = WIDTH) -> list[str]:
    """Return the list of configurations to choose from, how reliable its order is, and how the search went."""
    fastest = choice.fastest
    configs = [one.parallelism for one in choice.estimates]
    # Degrees that all configurations share are in the title, so that the table stays narrow and shows the differences.
    varying = [name for name, of in _DEGREES.items() if len({of(config) for config in configs}) > 1]
    shared = [
        f"{name} {of(configs[0])}"
        for name, of in _DEGREES.items()
        if name not in varying and of(configs[0]) != _NEUTRAL.get(name, 1)
    ]
    # Columns of marks and of idle time appear only if something is in them.
    marks = any(one.unvalidated_features for one in choice.estimates)
    piped = any(config.pp > 1 for config in configs)
    rows = [
        (
            place,
            format_seconds(one.step_s),
            f"+{100 * (one.step_s / fastest.step_s - 1):.1f} %",
            *(["?" if one.unvalidated_features else ""] if marks else []),
            f"{one.fullest.peak_bytes / 1e9:.1f} GB",
            *([f"{100 * one.idle_share:.1f} %" if one.parallelism.pp > 1 else "-"] if piped else []),
            *(_DEGREES[name](one.parallelism) for name in varying),
        )
        for place, one in enumerate(choice.estimates, start=1)
    ]
    title = f"{pluralize(len(rows), 'configuration')} to choose from" if len(rows) > 1 else "The only configuration"
    title += f" ({'all: ' if len(rows) > 1 else ''}{', '.join(shared)})" if shared else ""
    header = ["", "step time", "", *([""] if marks else []), "memory", *(["idle"] if piped else []), *varying]
    return [
        *textwrap.wrap(title, width),
        *plain(header, rows, width),
        "",
        *_reliability(choice, width),
        *_unvalidated(choice, width),
        *_gains(choice, width),
        *textwrap.wrap(_proof(choice), width),
    ]


def _proof(choice: LlmPlanSearch) -> str:
    """Return what the search proves, and how much slower the recommended configuration is."""
    best, fastest = choice.best, choice.fastest
    used, available = choice.cluster.devices, choice.available
    within = f" on {used} GPUs" if used < available else ""
    where = f"{available}{' or fewer' if choice.any_count else ''} GPUs"
    found = (
        f"Search: {choice.configurations:,} configurations bounded, {choice.simulated:,} simulated, of all that"
        f" {choice.said}{within}. No other configuration that fits in memory, on {where}, has a shorter estimated step"
        " time"
    )
    if best is fastest:
        return f"{found}."
    longer = 100 * (best.step_s / fastest.step_s - 1)
    return (
        f"{found} than number {choice.estimates.index(fastest) + 1}, {format_seconds(fastest.step_s)}. Number 1 takes"
        f" {longer:.1f} % longer."
    )


def used_gpus(choice: LlmPlanSearch, width: int = WIDTH) -> list[str]:
    """Return why a search uses fewer GPUs than there are; nothing if it uses all."""
    used, available = choice.cluster.devices, choice.available
    if used >= available:
        return []
    if choice.on_all is None:
        why = f"no configuration fits on all {available}"
    else:
        longer = 100 * (choice.on_all.step_s / choice.fastest.step_s - 1)
        why = (
            f"on all {available}, the fastest configuration takes {longer:.1f} % longer"
            f" ({format_seconds(choice.on_all.step_s)}: {choice.on_all.parallelism.named()})"
        )
    each = choice.cluster.nodes[0].count
    nodes = len(choice.cluster.nodes)
    where = f", {each} on each of {nodes} nodes" if nodes > 1 else ""
    text = f"Uses {used} of {available} GPUs{where}: {why}."
    return [*textwrap.wrap(text, width), ""]


def _reliability(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return a paragraph on whether the order of the list is reliable, and on what the fastest one would gain."""
    alike_count, count = len(choice.alike), len(choice.estimates)
    error = f"the error of such differences ({100 * RELATIVE_ERROR:.0f} %)"
    best, fastest = choice.best, choice.fastest
    if count == 1:
        return []
    if alike_count == 1:
        text = f"Configuration 1 is faster than the others by more than {error}."
    else:
        span = f"1 {'and' if alike_count == 2 else 'to'} {alike_count}"
        who = ("Both" if count == 2 else "All") if alike_count == count else span
        text = (
            f"{who} are equally fast: their step times differ by less than {error}. So the simplest of them is first"
            f"{', and those that may not fit are last' if any(map(is_tight, choice.alike)) else ''}. If you already run"
            " one of them, keep it."
        )
    if best is not fastest:
        place, gained = choice.estimates.index(fastest) + 1, 100 * (1 - fastest.step_s / best.step_s)
        saved = simpler_by(best.parallelism, fastest.parallelism)
        text += f" The fastest is number {place}. It would gain {gained:.1f} %"
        if is_tight(fastest) and not is_tight(best):
            text += ", but leaves less memory free than the error of the estimate"
            text += f", and needs {saved}" if saved else ""
        elif saved:
            text += f", but needs {saved}"
        text += f": `--choose {place}` takes it."
    return [*textwrap.wrap(text, width), ""]


def _unvalidated(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return the unvalidated features of the list, and how they changed the choice."""
    names = list(dict.fromkeys(name for one in choice.estimates for name in one.unvalidated_features))
    if not names:
        return []
    best, fastest = choice.best, choice.fastest
    text = f"?: {unvalidated(best, names)}."
    if len(best.unvalidated_features) < len(fastest.unvalidated_features):
        text += (
            f" Number 1 uses {'fewer' if best.unvalidated_features else 'none'} of these features. To choose otherwise,"
            " use `--choose`, `--fix` or `--exclude`."
        )
    return [*textwrap.wrap(text, width), ""]


def _gains(choice: LlmPlanSearch, width: int) -> list[str]:
    """Return what CUDA graphs, hybrid sharding and layouts save in the list; nothing if no configuration has them."""
    rows, configs = [], []
    for place, (one, plain_s) in enumerate(zip(choice.estimates, choice.plain_s, strict=False), start=1):
        if one.step_s < plain_s:
            rows.append(f"{100 * (1 - one.step_s / plain_s):.1f} % of the step time of number {place}")
            configs.append(one.parallelism)
    if not rows:
        return []
    has = {
        "CUDA graphs": any(config.cuda_graph_impl != "none" for config in configs),
        "hybrid sharding": any(config.dp_replicate > 1 for config in configs),
        "pipeline layouts": any(config.pipeline_layout is not None for config in configs),
    }
    names = [name for name, is_used in has.items() if is_used]
    text = f"{join_words(names)} save{'s' if names == ['hybrid sharding'] else ''} {join_words(rows)}, as estimated."
    return [*textwrap.wrap(text[0].upper() + text[1:], width), ""]


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
    follows = ("micro_batches", "tokens_per_s_per_gpu", "utilization", "idle_share", "fits", "shortfall_bytes")
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
