"""Everything that the page shows of a configuration, of a search and of sized clusters, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.messages import join_words, pluralize
from hpgo.base.units import format_bytes, format_count, format_seconds
from hpgo.llm.memory import COLUMNS
from hpgo.llm.step_time import COMMUNICATION, LABELS
from hpgo.page.transformers.address import items_of
from hpgo.show.llm_figure import place
from hpgo.show.llm_report import UNCERTIFIED, document, unvalidated

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.search import LlmPlanSearch
    from hpgo.llm.size import LlmSizes, SizePoint
    from hpgo.model.transformer import Transformer

_MAX_PLACED = 1024
"""Largest number of GPUs that the page draws, each as an element that can be pointed at. Not tuned."""


def estimate_facts(
    found: LlmEstimate, cluster: Cluster, model: Transformer, *, gpus_per_node: int | None = None
) -> dict[str, Any]:
    """Return the facts of one configuration on the GPUs of `cluster` that it uses, whole nodes or a part of each."""
    nodes = [node.count for node in cluster.first(found.gpus).nodes]
    gpus = range(min(found.gpus, _MAX_PLACED))
    places = [place(found.parallelism, gpu) for gpu in gpus]
    return {
        "estimate": document(found),
        "items": items_of(found, gpus_per_node=gpus_per_node),
        "words": _words(found),
        "why": shortage(found),
        "caveats": _caveats(found),
        "terms": [
            {
                "key": key,
                "label": LABELS.get(key, key),
                "text": format_seconds(spent_s),
                "share": spent_s / found.step_s,
                "kind": "waits" if key == "bubble" else "sync" if key in COMMUNICATION else "F",
            }
            for key, spent_s in sorted(found.time_by_term_s, key=lambda term: -term[1])
            if spent_s
        ],
        "ranks": _ranks(found),
        "capacity": format_bytes(found.capacity_bytes),
        "nodes": nodes,
        "places": [[one.tensor, one.context, one.data, one.rank, one.expert] for one in places],
        "shape": {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "experts": model.experts},
    }


def search_facts(found: LlmPlanSearch, cluster: Cluster) -> dict[str, Any]:
    """Return the list of a search on `cluster`, the recommended configuration first, and the size of the search."""
    used = found.cluster.nodes
    each = used[0].count if len(used) > 1 and used[0].count < cluster.nodes[0].count else None
    fewer = found.available - found.cluster.devices
    notes = [f"{found.configurations:,} configurations searched, {found.simulated:,} of them simulated"]
    notes += [f"{pluralize(len(found.alike), 'configuration')} as fast as the fastest within the error of differences"]
    notes += [f"{fewer} of {found.available} GPUs stay idle: no configuration on more GPUs is faster"] if fewer else []
    return {
        "rows": [
            {
                "items": items_of(one, gpus_per_node=each),
                "name": one.parallelism.named(),
                "words": _words(one),
                "step_s": one.step_s,
                "low_s": one.low_s,
                "high_s": one.high_s,
                "peak_bytes": one.fullest.peak_bytes,
                "utilization": one.utilization,
                "idle_share": one.idle_share,
                "is_alike": one in found.alike,
                "is_unvalidated": bool(one.unvalidated_features),
            }
            for one in found.estimates
        ],
        "fastest": found.estimates.index(found.fastest),
        "framework": found.framework,
        "notes": notes,
    }


def size_facts(found: LlmSizes) -> dict[str, Any]:
    """Return all clusters of a search for sizes, and which of them answer it."""
    shown = found.answers if found.days is not None or found.budget is not None else found.front
    return {
        "kinds": list(found.kinds),
        "priced": bool(found.hour_prices),
        "points": [
            {
                "kind": one.kind,
                "nodes": one.nodes,
                "gpus": one.gpus,
                "days": one.days,
                "cost": found.cost(one),
                "words": {
                    "days": f"{one.days:.3g}",
                    "range": "–".join(f"{end:.3g}" for end in one.range_days),
                    "cost": format_count(float(f"{found.cost(one):.3g}")),
                    "name": one.estimate.parallelism.named(),
                },
                "items": {
                    "cluster": f"{one.kind}:{one.nodes}",
                    "batch": str(one.estimate.global_batch_size),
                    "seq_length": str(found.seq_length),
                    **items_of(one.estimate, gpus_per_node=_gpus_per_node(one)),
                },
                "is_answer": one in shown,
            }
            for one in found.points
        ],
    }


def shortage(found: LlmEstimate) -> str:
    """Return why a configuration does not fit in memory, or no text if it does."""
    if found.fits:
        return ""
    rank = found.stages.index(found.fullest)
    largest = sorted(found.fullest.memory_bytes, key=lambda column: -column[1])[:2]
    columns = join_words([f"{COLUMNS[key].label} ({format_bytes(size)})" for key, size in largest])
    return (
        f"Does not fit: pipeline rank {rank} needs {format_bytes(found.fullest.peak_bytes)} of"
        f" {format_bytes(found.capacity_bytes)}, {format_bytes(found.shortfall_bytes)} too much. The largest columns"
        f" are {columns}."
    )


def _gpus_per_node(point: SizePoint) -> int | None:
    """Return the number of GPUs that a point uses of each of its nodes, or None if it uses whole nodes."""
    each, rest = divmod(point.estimate.gpus, point.nodes)
    return each if point.estimate.gpus < point.gpus and not rest else None


def _words(found: LlmEstimate) -> dict[str, str]:
    config, peak_bytes = found.parallelism, found.fullest.peak_bytes
    return {
        "name": config.named(),
        "step": format_seconds(found.step_s),
        "range": f"{format_seconds(found.low_s)} to {format_seconds(found.high_s)}",
        "throughput": f"{found.tokens_per_s_per_gpu:,.0f}",
        "utilization": f"{100 * found.utilization:.1f} %",
        "idle": f"{100 * found.idle_share:.1f} %",
        "memory": format_bytes(peak_bytes),
        "free": format_bytes(max(0.0, found.capacity_bytes - peak_bytes)),
        "micro_batches": pluralize(found.micro_batches, "micro-batch"),
        "stack": found.stack,
    }


def _caveats(found: LlmEstimate) -> list[str]:
    texts = [f"{unvalidated(found)}."] if found.unvalidated_features else []
    return [*texts, *([UNCERTIFIED] if found.has_experts else [])]


def _ranks(found: LlmEstimate) -> list[dict[str, Any]]:
    """Return the layers and the memory of each pipeline rank."""
    return [
        {
            "layers": join_words([f"{start}–{stop - 1}" for start, stop in stage.layers if stop > start]),
            "total": format_bytes(stage.peak_bytes),
            "share": stage.peak_bytes / found.capacity_bytes,
            "columns": [
                {
                    "key": key,
                    "label": COLUMNS[key].label,
                    "text": format_bytes(size),
                    "share": size / found.capacity_bytes,
                }
                for key, size in stage.memory_bytes
                if size
            ],
        }
        for stage in found.stages
    ]
