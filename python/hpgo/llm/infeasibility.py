"""The error if no configuration fits memory: the shortfall, and the smallest change that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes
from hpgo.errors import ClusterError, InfeasibleError
from hpgo.llm.config_groups import config_groups, leanest
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.gpus import Gpus
from hpgo.llm.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from hpgo.llm.search_space import SearchSpace
    from hpgo.llm.step_time import PipelineStages
    from hpgo.machine.cluster import Cluster

_MOST_MACHINES = 64
"""Largest multiple of the cluster's machines that is tried. A user who needs more has another problem. Not tuned."""


def nothing_fits(
    least: PipelineStages, cluster: Cluster, space: SearchSpace, global_batch_size: int, *, headroom_bytes: float
) -> InfeasibleError:
    """Return the error for a search whose leanest configuration, `least`, needs more memory than there is.

    The suggestion is the first that helps: less headroom, one fixed or excluded name left open, or more machines.
    """
    needed_bytes, capacity_bytes = max_memory_bytes(least), least.context.gpus.memory_bytes
    limit_bytes = capacity_bytes - headroom_bytes
    kept = f", {format_bytes(headroom_bytes)} of them left alone" if headroom_bytes else ""
    message = (
        f"no way fits: the leanest, {least.context.config.named()}, needs {format_bytes(needed_bytes)} of a GPU, which"
        f" has {format_bytes(capacity_bytes)}{kept}: {format_bytes(needed_bytes - limit_bytes)} too little"
    )

    def fits(within: SearchSpace, on: Cluster | None) -> bool:
        rules, precision = within.rules, least.context.config.precision
        config = ParallelismConfig(
            precision=precision, flatten_gradients=rules.flatten_gradients, dtensor=rules.dtensor
        )
        gpus = least.context.gpus if on is None else Gpus.of(on, precision)
        context = replace(least.context, gpus=gpus, config=config)
        # Larger micro-batches hold no less, so the smallest ones suffice.
        one = leanest(config_groups(context, global_batch_size, _smallest(within)))
        return one is not None and max_memory_bytes(one) <= limit_bytes

    if needed_bytes <= capacity_bytes:
        return InfeasibleError(message, f"leave {format_bytes(capacity_bytes - needed_bytes)} alone, or less")
    for name in (*space.excluded, *space.fixed):
        if fits(space.without(name), None):
            how = "without its `--fix`" if name in space.fixed else "without its `--exclude`"
            return InfeasibleError(message, f"ways fit {how}: leave {name.replace('_', '-')} open")
    times = 1  # as many whole machines, where only some GPUs of the last one are used
    while times <= _MOST_MACHINES:
        larger = _repeated(cluster, times)
        if larger is not None and larger.devices > cluster.devices and fits(space, larger):
            return InfeasibleError(message, f"{larger.devices} of these GPUs are enough; or name some with more memory")
        times *= 2
    return InfeasibleError(message, "name GPUs with more memory, or shorter sequences; more of these GPUs don't help")


def _smallest(space: SearchSpace) -> SearchSpace:
    """Return the part of `space` with the smallest micro-batches, unless their size is fixed or excluded."""
    if "micro_batch_size" in {*space.fixed, *space.excluded}:
        return space
    return replace(space, fixed={**space.fixed, "micro_batch_size": 1})


def _repeated(cluster: Cluster, times: int) -> Cluster | None:
    """Return `times` as many whole machines; None if that is no cluster."""
    try:
        return replace(cluster, nodes=cluster.nodes[:1] * (len(cluster.nodes) * times))
    except ClusterError:
        return None
