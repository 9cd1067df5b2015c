"""Links between ranks, measured as runs use them: messages between two ranks, and sums over many.

A message of n bytes takes a + n / B: the latency a and the rate B are fitted to half of what a message and its answer
take, for sizes from 8 bytes to some megabytes. Each time counts by its share, so that small messages weigh as much as
large ones. A message takes no longer than a larger one: one that did was held up, and counts as the larger one.
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
from hpgo.machine.cluster import Cluster, Device, Link, Node
from hpgo.runtime.clocks import machine_name
from hpgo.runtime.devices import device_of_rank
from hpgo.runtime.rendezvous import is_launched, leave, lost, meet, place, translate_errors
from hpgo.runtime.session import NeighbourGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIZES = tuple(8 * 8**step for step in range(8))
"""Bytes of messages: 8 to 16 Mi."""
_LARGE = _SIZES[-1]
_SUM_BYTES = 2**24
_LEAST, _MOST = 5, 500
"""How often each is measured, besides once to warm up."""
_PAIRS = 4
"""Of each kind, those whose latency is measured; of the others, the rate alone."""
_ALL_PAIRS = 120
"""As many pairs as sixteen ranks have: of more ranks, the first ones'."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through the times of messages."""

    latency_s: float
    bytes_per_s: float
    residual: float
    """The median distance of a time from the line, as a share of the time."""


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured, the same on every rank."""

    cluster: Cluster
    fits: dict[str, Fit]
    """Of messages `intra` a machine and `inter` machines, as far as there are such pairs."""
    messages: dict[str, tuple[tuple[int, float], ...]]
    """`(bytes, seconds)` of messages that the fits are of."""
    pairs: dict[tuple[int, int], float]
    """Bytes per second between two ranks, alone."""
    both_ways: dict[str, float]
    """What each way reaches if both are used at once, as a share of one way alone."""
    at_once: dict[str, float]
    """What all pairs together reach that share no rank, in bytes per second; between two machines for `inter`."""

    @property
    def machine_of(self) -> list[int]:
        """The number of each rank's machine."""
        return [number for number, machine in enumerate(self.cluster.nodes) for _ in range(machine.count)]


def measure_links(
    *,
    name: str = "",
    device: str | torch.device | None = None,
    seconds: float = 20.0,
    timeout_s: float = 600.0,
    machine: str | None = None,
) -> Links:
    """Measures the links between the ranks of this launch; every rank calls it, and gets the same.

    Args:
        name: of the cluster; None counts its machines and devices.
        device: `cpu` (gloo) or `cuda` (NCCL); None is `cuda` where each rank has a GPU.
        seconds: for all of it, about; each message is sent five times at least.
        timeout_s: how long a rank waits for another.
        machine: which machine this rank is on; None asks the system. Ranks of a machine follow each other.

    Raises RunError where ranks don't find each other, one is lost, or there is one alone.
    """
    seconds = number("seconds", seconds, above=0)
    where = device_of_rank(device)
    with _joined(where, timeout_s), lost(f"measuring links on {socket.gethostname()}"):
        ranks = [_Rank(*one) for one in _everyones((machine_name() if machine is None else machine, *_about(where)))]
        if len(ranks) < 2:
            raise RunError("one rank alone has no links", "start two at least, one for each device")
        with closing(NeighbourGroups(where, timeout_s)) as ways:
            return _Meter(ranks, ways, where, seconds).measure(name)


@dataclass(frozen=True, slots=True)
class _Rank:
    machine: str
    device: str
    memory_bytes: float


class _Meter:
    """Sends messages between ranks, all of which go through the same calls."""

    def __init__(self, ranks: Sequence[_Rank], ways: NeighbourGroups, device: torch.device, seconds: float) -> None:
        self._ranks, self._ways, self._device, self._rank = ranks, ways, device, dist.get_rank()
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._machines = list(dict.fromkeys(one.machine for one in ranks))
        self._of = {name: [at for at, one in enumerate(ranks) if one.machine == name] for name in self._machines}
        count = min(len(ranks), 16)
        self._pairs = [(a, b) for a in range(count) for b in range(a + 1, count)][:_ALL_PAIRS]
        self._share_s = seconds / (2 * _PAIRS * len(_SIZES) + len(self._pairs) + 8)
        if any(self._of[name] != list(range(self._of[name][0], self._of[name][-1] + 1)) for name in self._machines):
            raise RunError(
                "the ranks of a machine don't follow each other",
                "devices are numbered machine by machine: start ranks so",
            )

    def measure(self, name: str) -> Links:
        """Everything, one after the other."""
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
        machines = tuple(
            Node(Device(self._ranks[of[0]].device, self._ranks[of[0]].memory_bytes), len(of))
            for of in self._of.values()
        )
        text = "; ".join(
            f"{kind} to {percent(fit.residual)}, {format_bytes_per_s(at_once[kind])} in all pairs at once"
            for kind, fit in fits.items()
        )
        by = "NCCL" if self._device.type == "cuda" else "shared memory and gloo"
        source = f"measured with {by}, {time.strftime('%Y-%m-%d')}: {text}; hpgo {__version__}"
        sizes = "x".join(map(str, (len(machines), machines[0].count)))
        made = Cluster(name or f"measured-{sizes}", machines, intra, inter, source)
        return Links(made, fits, messages, rates, both, at_once)

    def _within(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._pairs if self._ranks[a].machine == self._ranks[b].machine]

    def _between(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self._pairs if self._ranks[a].machine != self._ranks[b].machine]

    def _messages(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, float], ...]:
        return tuple((size, self._there_and_back([pair], size)) for pair in pairs for size in _SIZES)

    def _link(self, kind: str, fit: Fit, at_once: float) -> Link:
        """A port of a device inside a machine; between machines, a port of a machine, which its devices share."""
        groups = (
            [of for of in self._of.values() if len(of) > 1]
            if kind == "intra"
            else [[of[0] for of in self._of.values()]]
        )
        summed = median(self._sum(group) for group in groups)
        rate = max(fit.bytes_per_s, at_once) if kind == "inter" else fit.bytes_per_s
        return Link(*(float(f"{one:.4g}") for one in (rate, summed, fit.latency_s)))

    def _there_and_back(self, pairs: Sequence[tuple[int, int]], size: int) -> float:
        """Half of what a message and its answer take, in seconds; the slowest of `pairs`, which do so at once."""
        mine = next((pair for pair in pairs if self._rank in pair), None)

        def once() -> None:
            if mine is None:
                return
            other = mine[self._rank == mine[0]]
            there, here = self._buffer(size)
            coming = self._ways.of(other).recv([here], other, 0)
            if self._rank == mine[1]:
                coming.wait()
            self._ways.to(other).send([there], other, 0).wait()
            if self._rank == mine[0]:
                coming.wait()

        return self._median(once) / 2

    def _both_ways(self, pair: tuple[int, int], size: int) -> float:
        """What a message takes while one of the same size travels the other way."""

        def once() -> None:
            if self._rank not in pair:
                return
            other = pair[self._rank == pair[0]]
            there, here = self._buffer(size)
            coming = self._ways.of(other).recv([here], other, 0)
            self._ways.to(other).send([there], other, 0).wait()
            coming.wait()

        return self._median(once)

    def _sum(self, group: Sequence[int]) -> float:
        """What a ring all-reduce over some ranks reaches on each port, in bytes per second (NCCL's bus bandwidth)."""
        over = dist.new_group(list(group))
        tensor = torch.zeros(_SUM_BYTES // 4, device=self._device)

        def once() -> None:
            if self._rank in group:
                dist.all_reduce(tensor, group=over)

        seconds = self._median(once)
        if self._rank in group:
            dist.destroy_process_group(over)
        return 2 * (len(group) - 1) / len(group) * _SUM_BYTES / seconds

    def _median(self, once: Callable[[], None]) -> float:
        """The median of what `once` takes on the slowest rank; all ranks run it as often."""
        self._timed(once)
        first_s = max(_everyones(self._timed(once)))
        count = int(min(_MOST, max(_LEAST, self._share_s / max(first_s, 1e-9))))
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
    """The line `latency + bytes / rate` that is closest to times of messages, each by its share.

    >>> fit = fitted([(size, 2e-5 + size / 1e9) for size in (8, 4096, 2**20)])
    >>> round(fit.latency_s * 1e6), round(fit.bytes_per_s / 1e6), fit.residual < 1e-6
    (20, 1000, True)
    """
    sizes, measured = (np.array(column, dtype=float) for column in zip(*sorted(messages), strict=True))
    times = np.minimum.accumulate(measured[::-1])[::-1]
    rows = np.stack([1 / times, sizes / times], axis=1)
    (latency_s, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if latency_s < 0:
        latency_s, per_byte = 0.0, float(np.median(times / sizes))
    elif per_byte <= 0:  # as slow for one byte as for many: the largest tell at least what is reached
        per_byte = float(np.min(times / sizes))
    residual = float(np.median(np.abs(latency_s + sizes * per_byte - measured) / measured))
    return Fit(float(latency_s), float(1 / per_byte), residual)


def _apart(pairs: Sequence[tuple[int, int]], ranks: Sequence[_Rank] | None) -> list[tuple[int, int]]:
    """Pairs that share no rank; with `ranks`, all between the same two machines."""
    taken: set[int] = set()
    found: list[tuple[int, int]] = []
    for a, b in pairs:
        same = ranks is None or (ranks[a].machine, ranks[b].machine) == (
            ranks[pairs[0][0]].machine,
            ranks[pairs[0][1]].machine,
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
    """The kind of a rank's device, and its memory; a rank without a GPU has its share of the machine's."""
    if device.type == "cuda":
        made = torch.cuda.get_device_properties(device)
        return made.name, float(made.total_memory)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        kib = float(_MEMINFO.read_text(encoding="ascii").split("MemTotal:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        kib = 16 * 2**20
    return "cpu", float(kib * 1024 // (ranks * 10**6) * 10**6)


@contextmanager
def _joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """All ranks of the launch are one group; it is left behind."""
    if not is_launched():
        raise RunError(
            "this process has no rank", "start it with torchrun, or as `hpgo measure-links --ranks 2` on this machine"
        )
    rank, size = place()
    store = dist.PrefixStore("hpgo/links", meet(timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    with translate_errors("the ranks don't find each other", "did all start, and do their machines reach each other?"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        leave()
