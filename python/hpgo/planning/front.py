"""Time against memory: for each memory that a GPU may fill, the quickest way of training that needs no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.checks import listed, number, whole
from hpgo.base.errors import InfeasibleError
from hpgo.machine.cluster import Cluster, cluster_of
from hpgo.planning.grid import choose_way

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from hpgo.model.transformer import Transformer
    from hpgo.planning.configured import Price
    from hpgo.planning.platform import Platform
    from hpgo.programs.names import WayLauncher
    from hpgo.ways.way import Precision

_LESS = 0.01
"""Ways whose memory differs by a smaller share are one point."""
MOST_POINTS = 100


def way_front(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq: int,
    precision: Precision = "bf16",
    devices: int | None = None,
    launcher: WayLauncher = "megatron",
    fix: dict[str, int | str] | None = None,
    exclude: Iterable[str] = (),
    headroom_bytes: float = 0.0,
    platform: Platform | None = None,
    points: int = 12,
) -> tuple[Price, ...]:
    """Ways of which none is quicker with less memory, the quickest first: no way that `choose_way` looks at is.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        devices: GPUs to use, the first of the cluster; None is all.
        launcher: `megatron`, `torchtitan` or `deepspeed`, as for `choose_way`.
        fix: degrees that are given.
        exclude: what to do without.
        headroom_bytes: memory of each GPU to leave alone.
        platform: factors from steps that were measured there.
        points: how many to give at most; each after the first needs a hundredth less memory than the one before.

    Raises what `choose_way` does.

    >>> import hpgo
    >>> found = hpgo.way_front("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=4096, points=3)
    >>> [later.step_s > earlier.step_s for earlier, later in zip(found, found[1:])]
    [True, True]
    """
    cluster = cluster_of(cluster)
    points = whole("points", points, most=MOST_POINTS)
    headroom_bytes = number("headroom_bytes", headroom_bytes)
    exclude = listed("exclude", exclude, hint="give a list: ['cp', 'zero=3']")
    capacity = cluster.machines[0].device.memory_bytes
    found: list[Price] = []
    while len(found) < points:
        try:
            quickest = choose_way(
                transformer, cluster, global_batch_size=global_batch_size, seq=seq, precision=precision,
                devices=devices, launcher=launcher, fix=fix, exclude=exclude, headroom_bytes=headroom_bytes,
                platform=platform, top=1,
            ).prices[0]  # fmt: skip
        except InfeasibleError:
            if found:
                break
            raise
        if found and quickest.step_s <= found[-1].step_s:
            found.pop()  # as quick, with less
        found.append(quickest)
        headroom_bytes = capacity - quickest.fullest.peak_bytes * (1 - _LESS)
    return tuple(found)
