"""The error if no configuration fits memory: the shortfall, and the smallest change that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes
from hpgo.errors import ClusterError, InfeasibleError
from hpgo.llm.config_families import config_groups, min_state_bytes
from hpgo.llm.config_groups import any_fits
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.gpus import Gpus
from hpgo.llm.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.search_space import SearchSpace
    from hpgo.llm.step_time import PipelineStages

_MAX_MULTIPLE = 64
"""Largest multiple of the cluster's nodes that is tried. A user who needs more has another problem. Not tuned."""


def nothing_fits(
    minimum: PipelineStages, cluster: Cluster, space: SearchSpace, global_batch_size: int, *, reserved_bytes: float
) -> InfeasibleError:
    """Return the error for a search whose smallest configuration, `minimum`, needs more memory than a GPU has.

    The hint is the first change that helps: less reserved memory, one fixed or excluded name left open, or more nodes.
    """
    needed_bytes, capacity_bytes = max_memory_bytes(minimum), minimum.context.gpus.memory_bytes
    limit_bytes = capacity_bytes - reserved_bytes
    reserved = f", {format_bytes(reserved_bytes)} of them reserved" if reserved_bytes else ""
    message = (
        f"no configuration fits in memory: the smallest ({minimum.context.config.named()}) needs"
        f" {format_bytes(needed_bytes)} per GPU, but a GPU has {format_bytes(capacity_bytes)}{reserved}:"
        f" {format_bytes(needed_bytes - limit_bytes)} too little"
    )

    def fits(within: SearchSpace, on: Cluster | None) -> bool:
        rules, precision = within.rules, minimum.context.config.precision
        config = ParallelismConfig(
            precision=precision, flatten_gradients=rules.flatten_gradients, whole_embedding=rules.tp_alone,
            dtensor=rules.dtensor,
        )  # fmt: skip
        gpus = minimum.context.gpus if on is None else Gpus.of(on, precision)
        context = replace(minimum.context, gpus=gpus, config=config)
        if min_state_bytes(context, within) > gpus.count * limit_bytes:
            return False
        # Larger micro-batches never need less memory, so trying the smallest ones decides.
        return any_fits(config_groups(context, global_batch_size, smallest_batches(within), graphs=False), limit_bytes)

    if needed_bytes <= capacity_bytes:
        return InfeasibleError(message, f"reserve at most {format_bytes(capacity_bytes - needed_bytes)} per GPU")
    for name in (*space.excluded, *space.fixed):
        if fits(space.without(name), None):
            option = "--fix" if name in space.fixed else "--exclude"
            return InfeasibleError(message, f"remove `{option}` of {name.replace('_', '-')}: then a configuration fits")
    # Start at 1: if only some GPUs of the last node are in use, whole nodes may be enough.
    times = 1
    while times <= _MAX_MULTIPLE:
        larger = _repeated(cluster, times)
        if larger is not None and larger.devices > cluster.devices and fits(space, larger):
            return InfeasibleError(message, f"use at least {larger.devices} of these GPUs, or GPUs with more memory")
        times *= 2
    return InfeasibleError(message, "use GPUs with more memory, or shorter sequences: more of these GPUs do not help")


def smallest_batches(space: SearchSpace) -> SearchSpace:
    """Return the part of `space` with the smallest micro-batches, which need the least memory.

    It is the whole space if their size is fixed or excluded, or if the ZeRO stages depend on their number.
    """
    if "micro_batch_size" in {*space.fixed, *space.excluded} or space.rules.sums_each_pass:
        return space
    return replace(space, fixed={**space.fixed, "micro_batch_size": 1})


def _repeated(cluster: Cluster, times: int) -> Cluster | None:
    """Return the cluster with `times` the nodes, all of them whole; None if a cluster can't have that many."""
    try:
        return replace(cluster, nodes=cluster.nodes[:1] * (len(cluster.nodes) * times))
    except ClusterError:
        return None
