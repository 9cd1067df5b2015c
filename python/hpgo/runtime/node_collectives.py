"""Collectives that the ranks of a launch are timed with: inside each node, and over all nodes."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.errors import RunError
from hpgo.llm.device_record import CollectiveTime
from hpgo.runtime.node_kernels import KernelTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = tuple(2**16 * 8**step for step in range(5))
"""Bytes of collectives among GPUs: 64 KiB to 256 MiB."""
SMALL_SIZES = (2**12, 2**16, 2**20)
"""Bytes of collectives among CPUs."""
_BATCHES, _MAX_CALLS = 5, 200
"""Batches of calls that a time is the median of, and calls of a batch at most. Not tuned."""


def time_collectives(
    device: torch.device, node_of_rank: Sequence[str], seconds: float, tell: Callable[[float, str], None], begun: float
) -> list[CollectiveTime]:
    """Time collectives inside the node of each rank, and over all ranks if there are several nodes."""
    nodes = {
        name: [rank for rank, one in enumerate(node_of_rank) if one == name] for name in dict.fromkeys(node_of_rank)
    }
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        raise RunError(
            "nodes have different numbers of ranks", "start the same number on each node, with --nproc-per-node"
        )
    groups = {False: None if len(nodes) == 1 else _own_group(nodes.values()), True: None}
    kinds = [across for across in (False, True) if (len(nodes) > 1 if across else len(node_of_rank) > len(nodes))]
    sizes = SIZES if device.type == "cuda" else SMALL_SIZES
    found = []
    cases = [(across, name, size) for across in kinds for name in _OPERATIONS for size in sizes]
    for at, (across, name, size) in enumerate(cases):
        tell(begun + (1 - begun) * at / len(cases), f"{name}, {size} bytes")
        group = groups[across]
        count = dist.get_world_size(group)
        call = _OPERATIONS[name](device, size // count, count, group)
        found.append(CollectiveTime(name, across, count, size, _collective_s(device, call, seconds / len(cases))))
    if groups[False] is not None:
        dist.destroy_process_group(groups[False])
    return found


def _own_group(nodes: Sequence[list[int]] | Any) -> Any:
    """Return the group of the ranks of this rank's node. All ranks make all groups, as PyTorch asks."""
    made = [(ranks, dist.new_group(ranks)) for ranks in nodes]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


def _collective_s(device: torch.device, call: Callable[[], object], share_s: float) -> float:
    """Return the median seconds of a collective on the slowest rank; all ranks call it equally often."""
    timer = KernelTimer(device, share_s)
    for _ in range(3):
        call()
    timer.synchronize()
    first_s = max(gather(_calls_s(timer, call, 1)))
    count = int(min(_MAX_CALLS, max(1, share_s / _BATCHES / first_s)))
    times = []
    for _ in range(_BATCHES):
        dist.barrier()
        times.append(_calls_s(timer, call, count))
    return float(max(gather(median(times))))


def _calls_s(timer: KernelTimer, call: Callable[[], object], count: int) -> float:
    timer.synchronize()
    begin_s = time.perf_counter()
    for _ in range(count):
        call()
    timer.synchronize()
    return (time.perf_counter() - begin_s) / count


def _all_reduce(device: torch.device, part: int, count: int, group: Any) -> Callable[[], object]:
    whole = torch.zeros(part * count // 2, dtype=torch.bfloat16, device=device)
    return lambda: dist.all_reduce(whole, group=group)


def _all_gather(device: torch.device, part: int, count: int, group: Any) -> Callable[[], object]:
    whole, own = (torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in (part * count, part))
    return lambda: dist.all_gather_into_tensor(whole[: own.numel() * count], own, group=group)


def _reduce_scatter(device: torch.device, part: int, count: int, group: Any) -> Callable[[], object]:
    whole, own = (torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in (part * count, part))
    return lambda: dist.reduce_scatter_tensor(own, whole[: own.numel() * count], group=group)


def _all_to_all(device: torch.device, part: int, count: int, group: Any) -> Callable[[], object]:
    sent, came = (torch.zeros(part // 2 * count, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: dist.all_to_all_single(came, sent, group=group)


_OPERATIONS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def gather(mine: Any) -> list[Any]:
    """Return what each rank gives, by rank."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
