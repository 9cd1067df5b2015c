"""Clocks of ranks: times of actions on a device, and the offset of each node's clock to that of rank 0.

`time.perf_counter_ns` is one clock for all processes of a node. The clock of another node has another offset and runs
at another speed. Rank 0 sends its time to one rank of each node. The message takes about half of the shortest round
trips. The offset is measured at the start and at the end of a run, and interpolated for all times between them.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TRIPS = 100
_BEST = 5
"""Number of round trips, the shortest ones, that are averaged. Nothing delayed these in either direction. Not tuned."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Reading:
    """Offset of a clock to that of rank 0, at one time."""

    at_ns: float
    """Time of the reading, by this clock."""
    ahead_ns: float


class RankClock:
    """Clock of a rank, compared with the clock of rank 0. All ranks call `compare` together, as often as they like."""

    def __init__(
        self, device: torch.device, now_ns: Callable[[], int] = perf_counter_ns, node: str | None = None
    ) -> None:
        """Prepare the clock. `node` names the processes that share it. None means this node since its last boot."""
        self._device, self._now_ns = device, now_ns
        self._node = node_name() if node is None else node
        self._readings: list[Reading] = []

    def compare(self) -> None:
        """Measure the offset to rank 0's clock. The first and the latest reading are kept."""
        with HERE.meets("the comparison of clocks"):
            self._compare()

    def _compare(self) -> None:
        rank = dist.get_rank()
        nodes = _everyones(self._node)
        mine = Reading(self._now_ns(), 0.0)
        # All processes of a node share one clock, so the first rank of each node measures for all of them.
        for other in sorted({nodes.index(name) for name in nodes} - {0}):
            if rank == 0:
                self._answer(other)
            elif rank == other:
                mine = self._ask()
        reading: Reading = _everyones(mine)[nodes.index(self._node)]
        # The first and the last reading are farthest apart. Their difference gives the drift with the smallest relative
        # error.
        self._readings = [*self._readings[:1], reading]

    def by_rank_0(self, ns: float) -> float:
        """Return the time of rank 0's clock at the moment when this clock showed `ns`."""
        first, last = self._readings[0], self._readings[-1]
        ahead_ns = first.ahead_ns
        if last.at_ns > first.at_ns:
            ahead_ns += (last.ahead_ns - first.ahead_ns) * (ns - first.at_ns) / (last.at_ns - first.at_ns)
        return ns - ahead_ns

    def _ask(self) -> Reading:
        message = torch.zeros(1, dtype=torch.int64, device=self._device)
        trips = []
        for _ in range(_TRIPS):
            begin_ns = self._now_ns()
            dist.send(message, 0)
            dist.recv(message, 0)
            theirs_ns = int(message.item())
            end_ns = self._now_ns()
            middle_ns = (begin_ns + end_ns) / 2
            trips.append((end_ns - begin_ns, middle_ns, middle_ns - theirs_ns))
        # Delays only lengthen a round trip. The shortest ones are the most symmetric, so the error of their middle is
        # smallest.
        best = sorted(trips)[:_BEST]
        return Reading(sum(trip[1] for trip in best) / _BEST, sum(trip[2] for trip in best) / _BEST)

    def _answer(self, other: int) -> None:
        message = torch.zeros(1, dtype=torch.int64, device=self._device)
        for _ in range(_TRIPS):
            dist.recv(message, other)
            # A receive on a GPU is asynchronous. Reading the value waits for it, so that the time is taken after it.
            message.item()
            dist.send(message.fill_(self._now_ns()), other)


def node_name() -> str:
    """Return a name of this node since its last boot. Processes with the same name share a clock."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _everyones(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Stamps:
    """Time stamps within a sequence of operations.

    A GPU runs them later than the CPU, so its stamps are CUDA events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.take: Callable[[], Any] = self._event if device.type == "cuda" else perf_counter_ns
        """Return a stamp of this moment."""

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def in_ns(self, stamps: Sequence[Any]) -> list[int]:
        """Return the times of the stamps by `time.perf_counter_ns`. Waits until a GPU has reached all of them."""
        if self._device.type != "cuda":
            return list(stamps)
        # CUDA events have no absolute time. Record one now, and count back from it on the CPU's clock.
        now = self._event()
        now.synchronize()
        now_ns = perf_counter_ns()
        return [now_ns - round(1e6 * stamp.elapsed_time(now)) for stamp in stamps]
