"""Measurement of the links between ranks, as runs use them: messages between two ranks, and all-reduces over many.

A message of n bytes takes a + n / B. The latency a and the bandwidth B are fitted to half of the round-trip times of
messages from 8 bytes to 16 MiB. The fit minimizes relative errors, so that small messages weigh as much as large ones.
A message can't take longer than a larger one. If it was measured so, it was delayed, and gets the time of the larger
one.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hpgo._core import __version__
from hpgo.base.checks import number
from hpgo.base.messages import percent
from hpgo.base.units import format_bytes_per_s
from hpgo.errors import RunError
from hpgo.hardware.cluster import Cluster, Device, Link, Node
from hpgo.runtime.clocks import node_name
from hpgo.runtime.devices import device_of_rank
from hpgo.runtime.rendezvous import is_launched, leave, lost, meet, place, translate_errors
from hpgo.runtime.session import NeighbourGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIZES = tuple(8 * 8**step for step in range(8))
"""Message sizes in bytes, from 8 to 16 Mi."""
_LARGE = _SIZES[-1]
_SUM_BYTES = 2**24
_MIN_REPEATS, _MAX_REPEATS = 5, 500
"""Numbers of repetitions of each measurement, besides one to warm up. Not tuned."""
_PAIRS = 4
"""Number of pairs of each kind whose latency is measured. For the others, only the bandwidth is."""
_ALL_PAIRS = 120
"""Maximum number of pairs, which 16 ranks have. Of more ranks, the first 16 are measured."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Fit:
    """A straight line through the times of messages."""

    latency_s: float
    bytes_per_s: float
    residual: float
    """Median distance of a time from the line, relative to the time."""


@dataclass(frozen=True, slots=True)
class Links:
    """Measured links, the same on every rank."""

    cluster: Cluster
    fits: dict[str, Fit]
    """Fits of messages within a node (`intra`) and between nodes (`inter`), where such pairs exist."""
    messages: dict[str, tuple[tuple[int, float], ...]]
    """`(bytes, seconds)` of the messages that were fitted."""
    pairs: dict[tuple[int, int], float]
    """Bandwidth between two ranks in bytes per second, while no other pair communicates."""
    both_ways: dict[str, float]
    """Bandwidth of each direction while both are used, relative to one direction alone."""
    at_once: dict[str, float]
    """Total bandwidth of all pairs that share no rank, at the same time, in bytes per second; for `inter`, between two
    nodes."""

    @property
    def node_of(self) -> list[int]:
        """The number of each rank's node."""
        return [number for number, node in enumerate(self.cluster.nodes) for _ in range(node.count)]


def measure_links(
    *,
    name: str = "",
    device: str | torch.device | None = None,
    seconds: float = 20.0,
    timeout_s: float = 600.0,
    node: str | None = None,
) -> Links:
    """Measure the links between the ranks of this launch. Every rank calls it and gets the same result.

    Args:
        name: name of the cluster. If empty, it counts its nodes and devices, such as `measured-2x8`.
        device: `cpu` (gloo) or `cuda` (NCCL). None is `cuda` if each rank has a GPU.
        seconds: approximate time for the whole measurement. Each message is sent at least five times.
        timeout_s: how long a rank waits for another.
        node: name of this rank's node. None asks the system. Ranks of a node must have consecutive numbers.

    Raises RunError if ranks don't find each other, if one is lost, or if there is only one.
    """
    seconds = number("seconds", seconds, above=0)
    where = device_of_rank(device)
    with _joined(where, timeout_s), lost(f"measuring links on {socket.gethostname()}"):
        ranks = [_Rank(*one) for one in _everyones((node_name() if node is None else node, *_about(where)))]
        if len(ranks) < 2:
            raise RunError("there is 1 rank, but links need at least 2", "start one rank for each device")
        with closing(NeighbourGroups(where, timeout_s)) as groups:
            return _Meter(ranks, groups, where, seconds).measure(name)


@dataclass(frozen=True, slots=True)
class _Rank:
    node: str
    device: str
    memory_bytes: float


class _Meter:
    """Timer of messages between ranks. All ranks go through the same calls."""

    def __init__(self, ranks: Sequence[_Rank], groups: NeighbourGroups, device: torch.device, seconds: float) -> None:
        self._ranks, self._groups, self._device, self._rank = ranks, groups, device, dist.get_rank()
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._nodes = list(dict.fromkeys(one.node for one in ranks))
        self._of = {name: [at for at, one in enumerate(ranks) if one.node == name] for name in self._nodes}
        count = min(len(ranks), 16)
        self._pairs = [(a, b) for a in range(count) for b in range(a + 1, count)][:_ALL_PAIRS]
        self._share_s = seconds / (2 * _PAIRS * len(_SIZES) + len(self._pairs) + 8)
        if any(self._of[name] != list(range(self._of[name][0], self._of[name][-1] + 1)) for name in self._nodes):
            raise RunError(
                "the ranks of a node don't have consecutive numbers, but devices are numbered node by node",
                "start the ranks node by node",
            )

    def measure(self, name: str) -> Links:
        """Measure all links one after the other, and return them as a cluster called `name`."""
        kinds = {kind: pairs for kind, pairs in (("intra", self._within()), ("inter", self._between())) if pairs}
        messages = {kind: self._messages(pairs[:_PAIRS]) for kind, pairs in kinds.items()}
        fits = {kind: fitted(times) for kind, times in messages.items()}
        rates = {pair: _LARGE / self._there_and_back([pair], _LARGE) for pair in self._pairs}
        both = {
            kind: self._there_and_back(pairs[:1], _LARGE) / self._both_ways(pairs[0], _LARGE)
            for kind, pairs in kinds.items()
        }
        apart = {kind: _apart(pairs, self._ranks if kind == "inter" else None) for kind, pairs in kinds.items()}
        at_once = {kind: len(pairs) * _LARGE / self._there_and_back(pairs, _LARGE) for kind, pairs in apart.items()}
        links = {kind: self._link(kind, fit, at_once[kind]) for kind, fit in fits.items()}
        intra = links.get("intra") or links["inter"]
        inter = links.get("inter") or intra
        nodes = tuple(
            Node(Device(self._ranks[of[0]].device, self._ranks[of[0]].memory_bytes), len(of))
            for of in self._of.values()
        )
        text = "; ".join(
            f"{kind} to {percent(fit.residual)}, {format_bytes_per_s(at_once[kind])} in all pairs at once"
            for kind, fit in fits.items()
        )
        by = "NCCL" if self._device.type == "cuda" else "shared memory and gloo"
        source = f"measured with {by}, {time.strftime('%Y-%m-%d')}: {text}; hpgo {__version__}"
        sizes = "x".join(map(str, (len(nodes), nodes[0].count)))
        cluster = Cluster(name or f"measured-{sizes}", nodes, intra, inter, source)
        return Links(cluster, fits, messages, rates, both, at_once)

    def _within(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._pairs if self._ranks[a].node == self._ranks[b].node]

    def _between(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._pairs if self._ranks[a].node != self._ranks[b].node]

    def _messages(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, float], ...]:
        return tuple((size, self._there_and_back([pair], size)) for pair in pairs for size in _SIZES)

    def _link(self, kind: str, fit: Fit, at_once: float) -> Link:
        """Return the link of a device within a node, or that of a node, which its devices share."""
        # Inside nodes, measure every node with several ranks. Between nodes, one rank of each, as the others share its
        # port.
        rings = (
            [of for of in self._of.values() if len(of) > 1]
            if kind == "intra"
            else [[of[0] for of in self._of.values()]]
        )
        bus_bandwidth = median(self._sum(group) for group in rings)
        # One pair may not use a node's full bandwidth, because one process or stream limits it. All pairs together come
        # closer.
        rate = max(fit.bytes_per_s, at_once) if kind == "inter" else fit.bytes_per_s
        return Link(*(float(f"{one:.4g}") for one in (rate, bus_bandwidth, fit.latency_s)))

    def _there_and_back(self, pairs: Sequence[tuple[int, int]], size: int) -> float:
        """Return half of the round-trip time of a message in seconds, on the slowest of `pairs`, all at once."""
        mine = next((pair for pair in pairs if self._rank in pair), None)

        def once() -> None:
            if mine is None:
                return
            other = mine[self._rank == mine[0]]
            there, here = self._buffer(size)
            # The receive is posted before the send, as in runs, so that no message waits for its memory.
            coming = self._groups.of(other).recv([here], other, 0)
            if self._rank == mine[1]:
                coming.wait()
            self._groups.to(other).send([there], other, 0).wait()
            if self._rank == mine[0]:
                coming.wait()

        return self._median(once) / 2

    def _both_ways(self, pair: tuple[int, int], size: int) -> float:
        """Return the time of a message while one of the same size travels in the other direction."""

        def once() -> None:
            if self._rank not in pair:
                return
            other = pair[self._rank == pair[0]]
            there, here = self._buffer(size)
            coming = self._groups.of(other).recv([here], other, 0)
            self._groups.to(other).send([there], other, 0).wait()
            coming.wait()

        return self._median(once)

    def _sum(self, group: Sequence[int]) -> float:
        """Return the bandwidth per port of a ring all-reduce over some ranks, in bytes/s (NCCL's bus bandwidth)."""
        over = dist.new_group(list(group))
        tensor = torch.zeros(_SUM_BYTES // 4, device=self._device)

        def once() -> None:
            if self._rank in group:
                dist.all_reduce(tensor, group=over)

        seconds = self._median(once)
        if self._rank in group:
            dist.destroy_process_group(over)
        # A ring sends each byte (n - 1) / n times in the reduce-scatter, and as often in the all-gather.
        return 2 * (len(group) - 1) / len(group) * _SUM_BYTES / seconds

    def _median(self, once: Callable[[], None]) -> float:
        """Return the median time of `once` on the slowest rank. All ranks repeat it equally often."""
        self._timed(once)
        first_s = max(_everyones(self._timed(once)))
        # One measurement decides the number of repetitions, from the slowest rank, so that all ranks agree on it.
        count = int(min(_MAX_REPEATS, max(_MIN_REPEATS, self._share_s / max(first_s, 1e-9))))
        # All ranks must start each measurement together, or the first one would include waiting for the slowest.
        dist.barrier()
        return float(max(_everyones(median(self._timed(once) for _ in range(count)))))

    def _timed(self, once: Callable[[], None]) -> float:
        begin_s = time.perf_counter()
        once()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s

    def _buffer(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if size not in self._buffers:
            self._buffers[size] = tuple(torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        return self._buffers[size]


def fitted(messages: Sequence[tuple[int, float]]) -> Fit:
    """Fit a line `latency + bytes / bandwidth` to times of messages, minimizing relative errors.

    >>> fit = fitted([(size, 2e-5 + size / 1e9) for size in (8, 4096, 2**20)])
    >>> round(fit.latency_s * 1e6), round(fit.bytes_per_s / 1e6), fit.residual < 1e-6
    (20, 1000, True)
    """
    sizes, measured = (np.array(column, dtype=float) for column in zip(*sorted(messages), strict=True))
    # A delay only adds time, so a later, larger message that was faster is a better measurement of this size.
    times = np.minimum.accumulate(measured[::-1])[::-1]
    # Divide both sides by the time. Least squares then minimizes relative instead of absolute errors.
    rows = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if latency_s < 0:
        latency_s, per_byte = 0.0, float(np.median(times / sizes))
    elif per_byte <= 0:  # large messages took no longer than small ones: take the bandwidth that was reached at least
        per_byte = float(np.min(times / sizes))
    residual = float(np.median(np.abs(latency_s + sizes * per_byte - measured) / measured))
    return Fit(float(latency_s), float(1 / per_byte), residual)


def _apart(pairs: Sequence[tuple[int, int]], ranks: Sequence[_Rank] | None) -> list[tuple[int, int]]:
    """Return pairs that share no rank. With `ranks`, all are between the same two nodes."""
    taken: set[int] = set()
    found: list[tuple[int, int]] = []
    for a, b in pairs:
        same = ranks is None or (ranks[a].node, ranks[b].node) == (
            ranks[pairs[0][0]].node,
            ranks[pairs[0][1]].node,
        )
        if same and not taken & {a, b}:
            taken |= {a, b}
            found.append((a, b))
    return found


def _everyones(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _about(device: torch.device) -> tuple[str, float]:
    """Return the type of a rank's device and its memory; without a GPU, its share of the node's memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, float(properties.total_memory)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        kib = float(_MEMINFO.read_text(encoding="ascii").split("MemTotal:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        kib = 16 * 2**20
    # Round down to MB, so that nodes of the same type get the same number.
    return "cpu", float(kib * 1024 // (ranks * 10**6) * 10**6)


@contextmanager
def _joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Make all ranks of the launch one process group within this context, and leave it afterwards."""
    if not is_launched():
        raise RunError(
            "this process has no rank", "start it with torchrun, or as `hpgo measure-links --ranks 2` on this machine"
        )
    rank, size = place()
    store = dist.PrefixStore("hpgo/links", meet(timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    with translate_errors(
        "the ranks don't find each other", "check that all started, and that their nodes reach each other"
    ):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        leave()
