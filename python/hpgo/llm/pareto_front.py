"""The Pareto front of step time and memory: for each memory limit of a GPU, the fastest configuration within it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, check_list, number
from hpgo.errors import InfeasibleError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.llm.search import plan_llm

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.parallelism import Precision
    from hpgo.llm.platform import Platform
    from hpgo.llm.search_space import Value
    from hpgo.llm.stack import Stack
    from hpgo.model.transformer import Transformer
    from hpgo.programs.names import LlmFramework

_MIN_SAVING = 0.01
"""Relative difference of memory below which two configurations count as one point. Not tuned."""
MAX_POINTS = 100


def llm_pareto_front(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    precision: Precision = "bf16",
    devices: int | None = None,
    framework: LlmFramework = "megatron",
    fix: dict[str, Value] | None = None,
    exclude: Iterable[str] = (),
    reserved_bytes: float = 0.0,
    stack: Stack | str | os.PathLike[str] | None = None,
    platform: Platform | DeviceRecord | None = None,
    points: int = 12,
) -> tuple[LlmEstimate, ...]:
    """Return the Pareto front of step time and memory: no configuration of the search is faster with less memory.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal nodes with devices whose rates are known; a device is a GPU.
        global_batch_size: sequences per step.
        seq_length: tokens per sequence.
        precision: number format of matrix multiplications: `bf16`, `fp16`, `fp8` or `fp4`.
        devices: number of GPUs to use, the first of the cluster; None means all.
        framework: `megatron`, `torchtitan` or `deepspeed`, as for `plan_llm`.
        fix: values that all configurations must have, as for `plan_llm`.
        exclude: features or values to leave out, as for `plan_llm`.
        reserved_bytes: memory of each GPU to leave free.
        stack: software stack, by its name or its file; None means the one that `framework` implies on the device.
        platform: constants fitted to steps on your cluster, or the rates of a measured node.
        points: maximum number of points; each one after the first needs at least 1 % less memory than the one before.

    The fastest configuration comes first. Raises the errors of `plan_llm`.

    >>> import hpgo
    >>> ask = {"global_batch_size": 8, "seq_length": 4096}
    >>> found = hpgo.llm_pareto_front("llama-3-8b", hpgo.Cluster.preset("h100:1"), points=3, **ask)
    >>> [later.step_s > earlier.step_s for earlier, later in zip(found, found[1:])]
    [True, True]
    """
    cluster = cluster_of(cluster)
    points = check_int("points", points, maximum=MAX_POINTS)
    reserved_bytes = number("free_bytes", reserved_bytes)
    exclude = check_list("exclude", exclude, hint="give a list: ['cp', 'zero_stage=3']")
    capacity = cluster.nodes[0].device.memory_bytes
    found: list[LlmEstimate] = []
    # Each search is limited to less memory than the last point needs, so its answer is the next point of the front.
    while len(found) < points:
        try:
            fastest = plan_llm(
                transformer, cluster, global_batch_size=global_batch_size, seq_length=seq_length, precision=precision,
                devices=devices, framework=framework, fix=fix, exclude=exclude, reserved_bytes=reserved_bytes,
                stack=stack, platform=platform, top=1,
            ).fastest  # fmt: skip
        except InfeasibleError:
            if found:
                break
            raise
        # An equally fast configuration with less memory dominates the point before.
        if found and fastest.step_s <= found[-1].step_s:
            found.pop()
        found.append(fastest)
        reserved_bytes = capacity - fastest.fullest.peak_bytes * (1 - _MIN_SAVING)
    return tuple(found)
