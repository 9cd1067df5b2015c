"""Reports of chain plans: a table of stages, key figures, and reasons for each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.messages import above, pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_seconds
from hpgo.model.formats.pipeedge import MEGA
from hpgo.show.folding import alike, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.planning.chain.plans import ChainHop, ChainPlan, ChainStage


_MAX_NAMED = 12
"""Number of layers that the report names per stage, so that a line has at most a few 100 characters. Not tuned."""


def table(plan: ChainPlan) -> str:
    """Return the report as text: one row per stage, then the key figures."""
    return "\n".join([*plain(*rows(plan)), "", *summary(plan)])


def rows(plan: ChainPlan) -> tuple[list[str], list[tuple[object, ...]]]:
    """Return columns and rows of the table, with one row per stage or per run of nearly equal stages."""
    columns = ["stage", "hosts", "type", "layers", "compute", "transfer", "memory", "of host", "busy", "slack"]
    return columns, [_row(plan, run) for run in _runs(plan)]


def _runs(plan: ChainPlan) -> list[range]:
    """Return ranges of adjacent stages with nearly equal figures."""
    # Rows are compared by numbers, so each device type gets one.
    kinds = {name: float(place) for place, name in enumerate(sorted({stage.device_type for stage in plan.stages}))}

    def figures(place: int) -> tuple[float | None, ...]:
        stage, hop = plan.stages[place], plan.hops[place + 1]
        layers = stage.last - stage.first + 1
        spent_s = stage.compute_s, stage.interval_s, hop.seconds or None
        sizes = stage.memory_bytes, stage.host_memory_bytes
        return (kinds[stage.device_type], len(stage.hosts), layers, hop.bits, *spent_s, *sizes)

    return alike(range(len(plan.stages)), figures)


def _folded(runs: Sequence[range]) -> str:
    stages = ", ".join(str(numbers(run, first=1)) for run in runs)
    return f"stages {stages} share a row: times are the longest, memory that of the fullest"


def _row(plan: ChainPlan, run: range) -> tuple[object, ...]:
    """Return one row: the longest times and the largest memory of its stages."""
    stages, hops = [plan.stages[place] for place in run], [plan.hops[place + 1] for place in run]
    hosts = [host for stage in stages for host in stage.hosts]
    first, transfer_s = stages[0], max(hop.seconds for hop in hops)
    # Bits are shown only if transfers differ in them.
    bits = f" {hops[0].bits} bit" if hops[0].bits != max(hop.bits for hop in plan.hops) else ""
    each = f", {first.last - first.first + 1} each" if len(run) > 1 else ""
    return (
        numbers(run, first=1),
        ", ".join(hosts) if len(run) == 1 else f"{hosts[0]} … {hosts[-1]}",
        first.device_type,
        f"{first.first}-{stages[-1].last}{each}",
        format_seconds(max(stage.compute_s for stage in stages)),
        format_seconds(transfer_s) + bits if transfer_s else "-",
        megabytes(max(stage.memory_bytes for stage in stages), plan.units),
        megabytes(first.host_memory_bytes, plan.units),
        f"{100 * max(plan.utilization(stage) for stage in stages):.0f} %",
        format_seconds(min(plan.slack_s(stage) for stage in stages)),
    )


def summary(plan: ChainPlan) -> list[str]:
    """Return the key figures, one line each, and the layers of each stage if the model branches."""
    meaning = {
        "throughput": "shortest interval",
        "latency": "shortest latency",
        "hosts": f"fewest hosts: {plan.value:.0f}",
        "bits": f"fewest bits lost: {plan.value:.0f} a value, summed over the edges",
    }
    loading = f"{format_seconds(plan.loading_s)} of loading data for a batch: loaders work ahead"
    mega = "MB = 2^20 bytes, as PipeEdge counts" if plan.units == "pipeedge" else "MB = 10^6 bytes (SI)"
    lines = [
        f"interval    {format_seconds(plan.interval_s)} between batches of {plan.batch_size}, set by {plan.limit}",
        f"throughput  {plan.samples_per_s:.6g} samples/s",
        f"latency     {format_seconds(plan.latency_s)} for one batch through the empty pipeline",
        f"objective   {meaning[plan.objective]}, {proof(plan)}",
        *([] if plan.cuts == "all" else [f"cuts        {plan.cuts}"]),
        *_kv_cache(plan),
        f"hosts       {sum(len(stage.hosts) for stage in plan.stages)} used, {len(plan.unused)} not",
        *([f"alike       {_folded(shared)}"] if (shared := [run for run in _runs(plan) if len(run) > 1]) else []),
        *([f"left out    {loading}"] if plan.loading_s else []),
        f"units       {mega}",
        *(f"{f'stage {at}':<11} {_named(stage.layers)}" for at, stage in enumerate(plan.stages, 1) if stage.layers),
    ]
    return [printable(line) for line in lines]


def _kv_cache(plan: ChainPlan) -> list[str]:
    """Return the line about the KV cache and the stage that limits it; nothing without a cache."""
    if not plan.kv_sequences:
        return []
    room = [plan.max_sequences(stage) for stage in plan.stages]
    fullest = min(range(len(room)), key=room.__getitem__)
    stage, most = plan.stages[fullest], room[fullest]
    asked = f"{pluralize(plan.kv_sequences, 'sequence')} of {plan.kv_context_length:,} tokens"
    limit = f"at most {most:,.0f}, set by stage {fullest + 1} ({', '.join(stage.hosts)})"
    return [f"KV cache    {asked}; {limit}"]


def proof(plan: ChainPlan) -> str:
    """Return how certain it is that no plan is better, regardless of its cuts."""
    if plan.optimality_gap == 0:
        return "proven optimal"
    known = f"{above(plan.optimality_gap)} possible"
    # A plan can be the best one for the searched cuts, while other cuts may be better.
    of_these = plan.searched_cuts_bound
    if of_these is not None and plan.value <= of_these * (1 + 1e-8):
        return f"{known}; none with the cuts that were searched is better"
    return known


def _named(layers: Sequence[str]) -> str:
    more = len(layers) - _MAX_NAMED
    return ", ".join(layers) if more <= 1 else f"{', '.join(layers[:_MAX_NAMED])} and {more} more (--explain)"


def megabytes(size_bytes: float, units: str) -> str:
    """Return a size in MB, of 2^20 or 10^6 bytes like in the plan's files."""
    return (
        f"{size_bytes / MEGA[units]:.4g} MB" if size_bytes < 100 * MEGA[units] else f"{size_bytes / MEGA[units]:.0f} MB"
    )


def explain(plan: ChainPlan) -> str:
    """Return the reasons for the interval: compute, transfer, memory and slack of each stage."""
    pace = f"The plan passes on a batch every {format_seconds(plan.interval_s)}."
    lines = [f"{pace} {_sentence(plan.limit)} takes that long."]
    for number, stage in enumerate(plan.stages, 1):
        layers = ", ".join(stage.layers) or f"{stage.first} to {stage.last}"
        lines += ["", f"Stage {number}: layers {layers} on {_hosts(stage)}"]
        lines.append(f"  computes {format_seconds(stage.compute_s)} a batch{_spare(plan, stage)}")
        hop = plan.hops[number]
        to = f"to stage {number + 1}" if number < len(plan.stages) else "out of the pipeline"
        if hop.seconds:
            sent = f"{megabytes(hop.bytes, plan.units)} {to} at {hop.bits} bits a value"
            lines.append(f"  sends {sent} in {format_seconds(hop.seconds)}{_spare(plan, hop)}")
        elif number < len(plan.stages):
            lines.append(f"  sends {megabytes(hop.bytes, plan.units)} {to} in no time")
        need, has = stage.memory_bytes, stage.host_memory_bytes
        cache = f", {megabytes(stage.kv_cache_bytes, plan.units)} of it for the KV cache" if plan.kv_sequences else ""
        lines.append(
            f"  needs {megabytes(need, plan.units)} of {megabytes(has, plan.units)} memory{cache}: "
            f"{megabytes(has - need, plan.units)} to spare"
        )
    if plan.unused:
        lines += ["", f"Not used, for no plan would be better with them: {', '.join(plan.unused)}."]
        # Without a proof, an unused host could still improve the plan.
        if plan.optimality_gap:
            lines[-1] = f"Not used: {', '.join(plan.unused)}."
    return "\n".join([*map(printable, lines), "", *summary(plan)])


def _hosts(stage: ChainStage) -> str:
    turns = " in turns" if len(stage.hosts) > 1 else ""
    return f"{', '.join(stage.hosts)} ({stage.device_type}){turns}"


def _spare(plan: ChainPlan, part: ChainStage | ChainHop) -> str:
    if plan.slack_s(part) == 0:
        return ": this is the bottleneck"
    return f", {format_seconds(plan.slack_s(part))} less than the pace"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
