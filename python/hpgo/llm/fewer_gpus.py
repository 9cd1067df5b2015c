"""Fewer GPUs than a cluster has. More GPUs can be slower, for instance if a batch does not divide among all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import gcd
from typing import TYPE_CHECKING

from hpgo.llm.parallelism import tensor_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.hardware.cluster import Cluster
    from hpgo.model.transformer import Transformer


def smaller_parts(cluster: Cluster, model: Transformer, global_batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield nodes and GPUs of each node for the parts of a cluster with fewer GPUs, the one with the most GPUs first.

    A part has whole nodes, or on each of its nodes the same number of GPUs, among which the heads, the batch and powers
    of 2 divide. Of equal numbers of GPUs, the part with fewer nodes comes first. Parts are left out if no pipeline
    divides their GPUs.

    >>> from hpgo.hardware.cluster import Cluster
    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [*smaller_parts(Cluster.preset("gb200:2"), TRANSFORMERS["llama-3-8b"], 256)][:3]
    [(2, 64), (1, 72), (1, 64)]
    """
    each = cluster.nodes[0].count
    divided = global_batch_size * gcd(*(count for _, count in tensor_sizes(model))) << each.bit_length()
    gpus = [count for count in range(1, each + 1) if count == each or divided % count == 0]
    counts = product(range(1, len(cluster.nodes) + 1), gpus)
    # Only the last node may have fewer GPUs than the others.
    for nodes, count in sorted(counts, key=lambda one: (-one[0] * one[1], one[0])):
        if nodes * count >= cluster.devices or cluster.nodes[nodes - 1].count < count:
            continue
        # A stage's GPUs are tp × cp × dp: tp divides those of a node, cp is a power of 2, and dp divides the batch. An
        # even pipeline may count the embedding and the LM head as a layer each.
        divided = count * global_batch_size << (nodes * count).bit_length()
        stages = (nodes * count // pp for pp in range(1, model.layers + 3) if nodes * count % pp == 0)
        if any(divided % gpus == 0 for gpus in stages):
            yield nodes, count


def part_of(cluster: Cluster, nodes: int, count: int) -> Cluster:
    """Return the first `nodes` nodes of a cluster with `count` GPUs each. GPUs keep their own NICs.

    >>> from hpgo.hardware.cluster import Cluster
    >>> part = part_of(Cluster.preset("gb200:2"), 2, 64)
    >>> part.name, part.devices, len(part.nodes)
    ('128 of gb200:2', 128, 2)
    """
    # The network of a node is that of all its GPUs together. A part has its GPUs' share of it.
    inter, each = cluster.inter, cluster.nodes[0].count
    if nodes > 1 and count < each:
        inter = replace(inter, collective_bytes_per_s=inter.collective_bytes_per_s * count / each)
    return replace(
        cluster,
        name=f"{nodes * count} of {cluster.name}",
        nodes=tuple(replace(node, count=count) for node in cluster.nodes[:nodes]),
        inter=inter,
    )
