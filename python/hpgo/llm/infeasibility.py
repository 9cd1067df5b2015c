"""When no way fits memory: what is short, by how much, and the least that would have to change."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from hpgo.base.errors import ClusterError, InfeasibleError
from hpgo.base.units import format_bytes
from hpgo.llm.config_groups import config_groups, leanest
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.gpus import Gpus
from hpgo.llm.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from hpgo.llm.search_space import SearchSpace
    from hpgo.llm.step_time import PipelineStages
    from hpgo.machine.cluster import Cluster

_MOST_MACHINES = 64
"""LayerTime as many as there are: who has too few by more is not helped by a number."""


def nothing_fits(
    least: PipelineStages, cluster: Cluster, space: SearchSpace, global_batch_size: int, *, headroom_bytes: float
) -> InfeasibleError:
    """The error for a grid whose `least` way needs more than there is.

    What would help is tried in the order of what it costs: less headroom, something that is left open, as many machines
    again.
    """
    needed_bytes, capacity_bytes = max_memory_bytes(least), least.context.gpus.memory_bytes
    room_bytes = capacity_bytes - headroom_bytes
    kept = f", {format_bytes(headroom_bytes)} of them left alone" if headroom_bytes else ""
    message = (
        f"no way fits: the leanest, {least.context.config.named()}, needs {format_bytes(needed_bytes)} of a GPU, which has"
        f" {format_bytes(capacity_bytes)}{kept}: {format_bytes(needed_bytes - room_bytes)} too little"
    )

    def least_bytes(within: SearchSpace, on: Cluster) -> float:
        rules = within.rules
        config = ParallelismConfig(
            precision=least.context.config.precision, flatten_gradients=rules.flatten_gradients, dtensor=rules.dtensor
        )
        context = replace(least.context, gpus=Gpus.of(on, config.precision), config=config)
        # Larger micro-batches hold no less, so that they need not be looked at.
        found = config_groups(context, global_batch_size, _smallest(within))
        one = leanest(found)
        return inf if one is None else max_memory_bytes(one)

    if needed_bytes <= capacity_bytes:
        return InfeasibleError(message, f"leave {format_bytes(capacity_bytes - needed_bytes)} alone, or less")
    for name in (*space.excluded, *space.fixed):
        if least_bytes(space.without(name), cluster) <= room_bytes:
            how = "without its `--fix`" if name in space.fixed else "without its `--exclude`"
            return InfeasibleError(message, f"ways fit {how}: leave {name.replace('_', '-')} open")
    times = 2
    while times <= _MOST_MACHINES:
        larger = _repeated(cluster, times)
        if larger is not None and least_bytes(space, larger) <= room_bytes:
            return InfeasibleError(message, f"{larger.devices} of these GPUs are enough; or name some with more memory")
        times *= 2
    return InfeasibleError(message, "name GPUs with more memory, or shorter sequences; more of these GPUs don't help")


def _smallest(space: SearchSpace) -> SearchSpace:
    """The part of `space` with the smallest micro-batches, unless it says which there may be."""
    if "micro_batch_size" in {*space.fixed, *space.excluded}:
        return space
    return replace(space, fixed={**space.fixed, "micro_batch_size": 1})


def _repeated(cluster: Cluster, times: int) -> Cluster | None:
    """So many times the machines, whole ones; None if that is no cluster."""
    try:
        return replace(cluster, machines=cluster.machines[:1] * (len(cluster.machines) * times))
    except ClusterError:
        return None
