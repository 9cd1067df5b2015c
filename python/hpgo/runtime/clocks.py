"""Clocks of ranks: when actions of a GPU ran, and how far each machine's clock is ahead of rank 0's.

`time.perf_counter_ns` is one clock for all processes of a machine. Another machine's is elsewhere and runs at another
speed. Rank 0 tells it its time; half of the shortest round trips is what the telling took. Twice told, at the start of
a run and at its end, it knows what to add at each moment between.
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
"""Of the round trips, those that took least: nothing held them up on either way."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a clock was ahead of rank 0's."""

    at_ns: float
    """When, by this clock."""
    ahead_ns: float


class RankClock:
    """A rank's clock beside that of rank 0. All ranks `compare` together, as often as they like."""

    def __init__(
        self, device: torch.device, now_ns: Callable[[], int] = perf_counter_ns, machine: str | None = None
    ) -> None:
        """`machine` is the name of who shares the clock; None is this machine as it has started."""
        self._device, self._now_ns = device, now_ns
        self._machine = machine_name() if machine is None else machine
        self._readings: list[Reading] = []

    def compare(self) -> None:
        """Reads how far the clock is ahead; the first reading and the last one count."""
        with HERE.meets("the comparison of clocks"):
            self._compare()

    def _compare(self) -> None:
        rank = dist.get_rank()
        machines = _everyones(self._machine)
        mine = Reading(self._now_ns(), 0.0)
        for other in sorted({machines.index(name) for name in machines} - {0}):
            if rank == 0:
                self._answer(other)
            elif rank == other:
                mine = self._ask()
        reading: Reading = _everyones(mine)[machines.index(self._machine)]
        self._readings = [*self._readings[:1], reading]

    def by_rank_0(self, ns: float) -> float:
        """What rank 0's clock showed when this one showed `ns`."""
        first, last = self._readings[0], self._readings[-1]
        ahead_ns = first.ahead_ns
        if last.at_ns > first.at_ns:
            ahead_ns += (last.ahead_ns - first.ahead_ns) * (ns - first.at_ns) / (last.at_ns - first.at_ns)
        return ns - ahead_ns

    def _ask(self) -> Reading:
        told = torch.zeros(1, dtype=torch.int64, device=self._device)
        trips = []
        for _ in range(_TRIPS):
            begin_ns = self._now_ns()
            dist.send(told, 0)
            dist.recv(told, 0)
            theirs_ns = int(told.item())
            end_ns = self._now_ns()
            middle_ns = (begin_ns + end_ns) / 2
            trips.append((end_ns - begin_ns, middle_ns, middle_ns - theirs_ns))
        best = sorted(trips)[:_BEST]
        return Reading(sum(trip[1] for trip in best) / _BEST, sum(trip[2] for trip in best) / _BEST)

    def _answer(self, other: int) -> None:
        told = torch.zeros(1, dtype=torch.int64, device=self._device)
        for _ in range(_TRIPS):
            dist.recv(told, other)
            told.item()  # what a GPU receives is there only now
            dist.send(told.fill_(self._now_ns()), other)


def machine_name() -> str:
    """Of this machine as it has started: who shares it shares a clock."""
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
    """Takes the time at places of a program. A GPU runs behind it, and takes the time itself when it comes there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.take: Callable[[], Any] = self._event if device.type == "cuda" else perf_counter_ns
        """Returns a stamp of this moment."""

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def in_ns(self, stamps: Sequence[Any]) -> list[int]:
        """The stamps by `time.perf_counter_ns`; waits until a GPU has passed all of them."""
        if self._device.type != "cuda":
            return list(stamps)
        now = self._event()
        now.synchronize()
        now_ns = perf_counter_ns()
        return [now_ns - round(1e6 * stamp.elapsed_time(now)) for stamp in stamps]
