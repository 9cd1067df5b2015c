"""Lower bound on the step of every plan of a mixed cluster: the work of its layers, divided among all GPUs.

The bound is the optimum of a linear program over samples, layers and kinds of GPUs, which is solved exactly
(docs/proofs.md, "Work on several kinds of GPUs").
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import inf
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.llm.activation_offload import KEY as OFFLOAD
from hpgo.llm.layer_time import LAUNCH
from hpgo.llm.mixed.problem import GpuKind, MixedProblem, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.llm.layer_time import LayerTime

_AVOIDABLE = frozenset((LAUNCH, OFFLOAD, "ep_all_to_all"))
"""Terms that a plan may avoid: by CUDA graphs, by memory, or by passes of another micro-batch."""
_ALIGNED = 256
"""Rows of a GEMM that fill whole tiles."""
_SLACK = 1e-9


def work_bound_s(problem: MixedProblem) -> float:
    """Return a lower bound on the step of every plan: any degrees, layers, batch shares and places of stages.

    It counts the time of layers, of the embedding and of the LM head alone, each with the degrees and the micro-batch
    size that need the fewest GPU-seconds. Pipeline bubbles, gradient reductions and the optimizer come on top. The
    bound is infinite if no GPU has memory for a layer.

    >>> from hpgo.llm.mixed.plan import mixed_problem
    >>> clusters, asked = ("h100:1+a100:1", "h100:1+a100:2"), {"global_batch_size": 64, "seq_length": 8192}
    >>> one, two = (work_bound_s(mixed_problem("llama-3-8b", cluster, **asked)) for cluster in clusters)
    >>> two < one
    True
    """
    found = [(gpu_seconds(problem, at), kind.gpus.count) for at, kind in enumerate(problem.kinds)]
    # A kind without memory for a single layer does no work.
    rows, gpus = [row for row, _ in found if row], [count for row, count in found if row]
    if not rows:
        return inf
    counts = item_counts(problem)
    work = [[count * row[at] for row in rows] for at, count in enumerate(counts) if count]
    return problem.global_batch_size * divided_s(work, gpus) * (1 - _SLACK)


def item_counts(problem: MixedProblem) -> list[float]:
    """Return how often a sample passes each item of `gpu_seconds`."""
    return [1.0, 1.0, *(float(count) for count in problem.layers_before[-1] + problem.further)]


def divided_s(work: Sequence[Sequence[float]], gpus: Sequence[int]) -> float:
    """Return the shortest time in which all items are done, if any share of an item may be done by any kind of GPU.

    `work` has the GPU-seconds of each item on each kind: all above 0. `gpus` is the number of GPUs of each kind.

    >>> divided_s([[1.0, 4.0], [1.0, 2.0]], [1, 1])
    1.3333333333333333
    """
    kinds = range(len(gpus))
    best_s = 0.0
    # By duality the optimum is the maximum of Σ min λ·work over prices λ of a GPU-second, one for each kind, with
    # Σ λ·gpus = 1. It is concave and linear between prices at which an item costs the same on two kinds, so it has its
    # maximum where such items connect all kinds.
    for tree in _trees(len(gpus)):
        for items in product(work, repeat=len(tree)):
            prices = {0: 1.0}
            while len(prices) < len(gpus):
                for (one, other), item in zip(tree, items, strict=True):
                    for near, far in ((one, other), (other, one)):
                        if near in prices and far not in prices:
                            prices[far] = prices[near] * item[near] / item[far]
            whole = sum(prices[kind] * gpus[kind] for kind in kinds)
            best_s = max(best_s, sum(min(prices[kind] * item[kind] for kind in kinds) for item in work) / whole)
    return best_s


def _trees(nodes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield all trees that connect some nodes, as pairs."""
    for pairs in combinations(combinations(range(nodes), 2), nodes - 1):
        reached = {0}
        for _ in range(nodes):
            reached |= {node for pair in pairs if reached & set(pair) for node in pair}
        if len(reached) == nodes:
            yield pairs


def gpu_seconds(problem: MixedProblem, kind: int) -> list[float]:
    """Return the least GPU-seconds per sample on a kind: of the embedding, of the LM head, of each kind of layer.

    The list is empty if the kind has no memory for a layer.
    """
    # In the last wave of tiles, processors may be idle. Without that loss, a larger micro-batch never takes more time
    # for each of its samples, so the largest one that fits in memory decides.
    one = problem.kinds[kind]
    full = GpuKind(one.cluster, replace(one.gpus, processors=1), one.stack, one.constants)
    ideal = replace(problem, kinds=(*problem.kinds[:kind], full, *problem.kinds[kind + 1 :]))
    found: list[list[float]] = []
    for tp, cp, ep in _degrees(problem, kind):
        config = problem.config(tp, cp, ep, one.gpus.count, 1)
        largest = _largest(problem, Setting(kind, config))
        if not largest:
            continue
        # A power of 2 fills whole tiles, which other sizes may not.
        size = 1 << max(largest - 1, _ALIGNED * (problem.model.experts > 0)).bit_length()
        while size * problem.seq_length // cp % _ALIGNED:
            size *= 2
        costs = ideal.costs(Setting(kind, problem.config(tp, cp, ep, one.gpus.count, size)))
        times = [costs.embedding, costs.head, *(costs.layer[layer, False] for layer in problem.different)]
        found.append([_needed_s(time) * tp * cp / size for time in times])
    return [min(column) for column in zip(*found, strict=True)]


def _needed_s(time: LayerTime) -> float:
    passes = (time.forward_s, time.backward_s)
    return sum(each_s for held in passes for key, each_s in held.items() if key not in _AVOIDABLE)


def _degrees(problem: MixedProblem, kind: int) -> Iterator[tuple[int, int, int]]:
    gpus = problem.kinds[kind].gpus
    powers = [1 << power for power in range(gpus.count.bit_length())]
    experts = divisors(problem.model.experts) if problem.model.experts else (1,)
    for tp, cp, ep in product(divisors(gpus.gpus_per_node), powers, experts):
        if tp * cp <= gpus.count and ep <= gpus.count and problem.divides(tp, cp, ep):
            yield tp, cp, ep


def _largest(problem: MixedProblem, setting: Setting) -> int:
    """Return the largest micro-batch of which a layer fits in memory with recomputation; 0 if none does."""
    low, high = 0, problem.global_batch_size
    # A larger micro-batch never needs less memory, so halving the interval finds the largest.
    while low < high:
        middle = (low + high + 1) // 2
        # A plan of one kind may store the optimizer state in CPU memory.
        fits = problem.fits_alone(setting, micro_batch_size=middle, recompute="full", optimizer_offload_fraction=1.0)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
