"""Timelines of measured steps, assembled from what the ranks recorded."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hpgo.base.laws import difference, share_left
from hpgo.programs.schedule import KINDS
from hpgo.timing.laws import checked
from hpgo.timing.measures import CAUSES, TRANSFER_KINDS, Measures
from hpgo.timing.timeline import of_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hpgo.programs.program import Program
    from hpgo.programs.ranks import RankAction, RankProgram
    from hpgo.timing.timeline import Timeline

_BUSIER = 1.02
"""Ratio of busy times from which on a rank counts as busier than another. Smaller differences are noise. Not tuned."""
_NOTHING = 1e-12
"""Length of idle time, relative to the step, below which it is dropped as a rounding error."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's step, by the clock of rank 0 in nanoseconds."""

    actions_ns: NDArray[np.float64]
    """Shape (actions, 2): start and end of each of the rank's actions."""
    begin_ns: float
    summed_ns: float
    """End of the gradient reductions that include the rank."""
    end_ns: float
    """End of the optimizer step, after loss and norm were reduced over all ranks."""
    peak_bytes: int | None
    """Peak memory of the rank's device; None where it is not counted."""


def timeline_of(program: Program, records: Sequence[Record]) -> Timeline:
    """Return the timeline of a step from the records of all ranks. Its rows are ranks, idle ones included.

    Times count from the first start. The arrival of a message is known only if its receiver waited for it. Such a
    message lasts from the end of the sending action to the start of the receiving action. Any other message lasts as
    long as the median of those at the same cut that were waited for, but at most until its receiver starts.
    """
    return _Step(program, records).timeline()


@dataclass(frozen=True, slots=True)
class _Taken:
    """A message from another rank, with the indices of its sending and receiving action."""

    receiver: int
    sender: int
    from_stage: int
    micro_batch: int
    is_gradient: bool

    @property
    def cut(self) -> int:
        """The stage before the cut that the message crosses."""
        return self.from_stage - self.is_gradient


class _Step:
    """All actions of all ranks in one list: rank by rank, each in its own order."""

    def __init__(self, program: Program, records: Sequence[Record]) -> None:
        self._program, self._records = program, records
        self._ranks: list[RankProgram] = [program.for_rank(rank) for rank in range(program.world_size)]
        self._origin_ns = min(record.begin_ns for record in records)
        self._starts = np.cumsum([0, *(len(rank.actions) for rank in self._ranks)]).tolist()
        times = np.concatenate([record.actions_ns for record in records])
        self._start_s, self._end_s = self._seconds(times[:, 0]), self._seconds(times[:, 1])
        self._begin = self._start_s.tolist()
        self._end = self._end_s.tolist()
        self._makespan_s = float(self._seconds(max(record.end_ns for record in records)))
        self._busy_s = [float((self._end_s[a:b] - self._start_s[a:b]).sum()) for a, b in self._spans]
        self._taken = self._messages()

    def _seconds(self, ns: Any) -> Any:
        return (ns - self._origin_ns) / 1e9

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._starts[1:], strict=False))

    def _actions(self) -> Iterator[tuple[int, int, RankAction]]:
        """Yield the index, the rank and the action of each."""
        for rank, (mine, begin) in enumerate(zip(self._ranks, self._starts, strict=False)):
            for at, action in enumerate(mine.actions):
                yield begin + at, rank, action

    def _messages(self) -> list[list[_Taken]]:
        """Return the messages that each action takes from other ranks."""
        # W passes send nothing, so the backward pass of a stage identifies the sender of a gradient.
        action_of = {
            (rank, action.kind == "F", action.stage, action.micro_batch): place
            for place, rank, action in self._actions()
            if action.kind != "W"
        }
        return [
            [
                _Taken(
                    receiver=place,
                    sender=action_of[message.peer, action.kind == "F", message.from_stage, action.micro_batch],
                    from_stage=message.from_stage,
                    micro_batch=action.micro_batch,
                    is_gradient=action.kind != "F",
                )
                for message in action.receives
                if message.peer != rank
            ]
            for place, rank, action in self._actions()
        ]

    def timeline(self) -> Timeline:
        """Return the timeline with all its parts."""
        program, schedule = self._program, self._program.schedule
        actions = list(self._actions())
        stages = np.array([action.stage for _, _, action in actions], np.int32)
        micro_batches = np.array([action.micro_batch for _, _, action in actions], np.int32)
        transfers, idle = self._transfers(), self._idle()
        parts = {
            "actions": {
                "rank": np.array([rank for _, rank, _ in actions], np.int32),
                "stage": stages,
                "micro_batch": micro_batches,
                "kind": np.array([KINDS.index(action.kind) for _, _, action in actions], np.uint8),
                "backward_stage": stages,
                "backward_micro_batch": micro_batches,
            },
            "times": {"start_s": self._start_s, "end_s": self._end_s},
            "transfers": transfers,
            "syncs": self._syncs(),
            "idle": idle,
            "slack": {"slack_s": self._slack_s()},
            "memory": None,
            "measures": self._measures(idle, len(transfers["stage"])),
        }
        return of_parts(
            parts,
            schedule=schedule.name,
            ranks=program.world_size,
            stages=schedule.stages,
            virtual_stages_per_rank=max(np.bincount(schedule.rank_of_stage[: schedule.stages_per_pipeline]).tolist()),
            micro_batches=schedule.total_micro_batches,
            iterations=1,
            communication="measured",
            makespan_s=self._makespan_s,
            memory_cap_bytes=None,
        )

    def _free_s(self, place: int, rank: int) -> float:
        """Return the end of the rank's previous action, from which on it could have started this one."""
        return self._end[place - 1] if place > self._starts[rank] else 0.0

    def _transfers(self) -> dict[str, NDArray[Any]]:
        rank_of = [rank for _, rank, _ in self._actions()]
        taken = [one for each in self._taken for one in each]
        took_s = [max(0.0, self._begin[one.receiver] - self._end[one.sender]) for one in taken]
        waited: dict[int, list[float]] = {}
        was_waited_for = []
        for one, span_s in zip(taken, took_s, strict=True):
            latest_s = max(self._end[each.sender] for each in self._taken[one.receiver])
            # The receiver waited for this message if it ended after all other inputs and after the rank's previous
            # action.
            known = self._end[one.sender] >= max(latest_s, self._free_s(one.receiver, rank_of[one.receiver]))
            was_waited_for.append(known)
            if known:
                waited.setdefault(one.cut, []).append(span_s)
        usual_s = {cut: median(spans_s) for cut, spans_s in waited.items()}
        start_s = np.array([self._end[one.sender] for one in taken], np.float64)
        lasting_s = [
            span_s if known else min(span_s, usual_s.get(one.cut, span_s))
            for one, span_s, known in zip(taken, took_s, was_waited_for, strict=True)
        ]
        end_s = start_s + np.array(lasting_s, np.float64)
        begun_s = np.array([self._begin[one.receiver] for one in taken], np.float64)
        return {
            "from_rank": np.array([rank_of[one.sender] for one in taken], np.uint32),
            "to_rank": np.array([rank_of[one.receiver] for one in taken], np.uint32),
            "stage": np.array([one.from_stage for one in taken], np.uint32),
            "micro_batch": np.array([one.micro_batch for one in taken], np.uint32),
            "kind": np.array([TRANSFER_KINDS.index(_KIND[one.is_gradient]) for one in taken], np.uint8),
            "start_s": start_s,
            "end_s": np.maximum(start_s, np.minimum(end_s, begun_s)),  # start plus duration may round past it
        }

    def _last_end_s(self, ranks: Sequence[int], stage: int) -> float:
        """Return the end of the last action of a stage on any of `ranks`."""
        ends = [
            self._end[self._starts[rank] + at]
            for rank in ranks
            for at, action in enumerate(self._ranks[rank].actions)
            if action.stage == stage
        ]
        return max(ends)

    def _syncs(self) -> dict[str, NDArray[Any]]:
        """Return gradient reduction and optimizer step of each stage with weights that several ranks hold."""
        shared = {layer for one in self._program.sums if len(one.ranks) > 1 for layer in one.layers}
        rows = []
        for number, stage in enumerate(self._program.stages):
            # Only stages with shared weights have a reduction to show.
            if shared.isdisjoint(stage.layers):
                continue
            records = [self._records[rank] for rank in stage.devices]
            begin_s = self._last_end_s(stage.devices, number)
            summed_s = max(begin_s, *(self._seconds(record.summed_ns) for record in records))
            rows.append((number, begin_s, summed_s, max(self._seconds(record.end_ns) for record in records)))
        table = np.array(rows, np.float64).reshape(-1, 4)
        return {
            "stage": table[:, 0].astype(np.uint32),
            "start_s": table[:, 1],
            "end_s": table[:, 2],
            "optimizer_end_s": table[:, 3],
        }

    def _idle(self) -> dict[str, NDArray[Any]]:
        """Return all intervals in which a rank was idle, with their cause by the rules of the simulator."""
        rows: list[tuple[int, float, float, str]] = []

        def add(rank: int, start_s: float, end_s: float, cause: str) -> None:
            if end_s - start_s > _NOTHING * self._makespan_s:
                rows.append((rank, start_s, end_s, cause))

        rank_of = [rank for _, rank, _ in self._actions()]
        for rank, (begin, end) in enumerate(self._spans):
            for place in range(begin, end):
                start_s, free_s = self._begin[place], self._free_s(place, rank)
                if place == begin:
                    add(rank, 0.0, start_s, "fill")
                    continue
                latest = max((one.sender for one in self._taken[place]), key=self._end.__getitem__, default=None)
                if latest is None:
                    add(rank, free_s, start_s, "communication")
                    continue
                begun_s = min(max(self._begin[latest], free_s), start_s)
                computed_s = min(max(self._end[latest], free_s), start_s)
                # Waiting for a busier rank is imbalance. Waiting for an equally busy rank comes from the schedule.
                if self._busy_s[rank_of[latest]] <= _BUSIER * self._busy_s[rank]:
                    begun_s = computed_s
                add(rank, free_s, begun_s, "dependency")
                add(rank, begun_s, computed_s, "imbalance")
                add(rank, computed_s, start_s, "communication")
            add(rank, self._end[end - 1] if begin < end else 0.0, self._makespan_s, "drain")
        return {
            "rank": np.array([row[0] for row in rows], np.uint32),
            "start_s": np.array([row[1] for row in rows], np.float64),
            "end_s": np.array([row[2] for row in rows], np.float64),
            "cause": np.array([CAUSES.index(row[3]) for row in rows], np.uint8),
        }

    def _slack_s(self) -> NDArray[np.float64]:
        """Return how much later each action could have ended with the same makespan.

        An action started at a known time after the latest of its predecessors. This delay is kept for that predecessor.
        Earlier predecessors could end up to the start. A rank's last action leaves time for its gradient reductions,
        and all reductions end before the loss is reduced over all ranks.
        """
        summed_s = max(self._seconds(record.summed_ns) for record in self._records)
        latest_s = [self._makespan_s] * len(self._end)
        for rank, (begin, end) in enumerate(self._spans):
            if begin < end:
                # A reduction begins when the last of its ranks has ended its actions.
                together = {rank}.union(*(one.ranks for one in self._ranks[rank].sums))
                last_s = max(self._end[self._starts[peer + 1] - 1] for peer in together)
                latest_s[end - 1] = summed_s - max(0.0, self._seconds(self._records[rank].summed_ns) - last_s)
        rank_of = [rank for _, rank, _ in self._actions()]
        # In order of their ends, each action comes after all its predecessors, up to errors of the clocks. So a walk
        # from the last end to the first sees all successors of an action before the action itself.
        for place in sorted(range(len(self._end)), key=self._end.__getitem__, reverse=True):
            before = [one.sender for one in self._taken[place]]
            if place > self._starts[rank_of[place]]:
                before.append(place - 1)
            if not before:
                continue
            latest_start_s = latest_s[place] - (self._end[place] - self._begin[place])
            known_s = max(self._end[one] for one in before)
            for one in before:
                delay_s = self._begin[place] - known_s if self._end[one] == known_s else 0.0
                latest_s[one] = min(latest_s[one], latest_start_s - delay_s)
        # Errors of the clocks can make the difference slightly negative.
        return np.maximum(0.0, np.array(latest_s) - self._end_s)

    def _measures(self, idle: dict[str, NDArray[Any]], messages: int) -> Measures:
        busy_s, makespan_s = self._busy_s, self._makespan_s
        total_s, all_busy_s = len(busy_s) * makespan_s, sum(busy_s)
        peaks = [record.peak_bytes for record in self._records]
        measures = Measures(
            makespan_s=makespan_s,
            max_rank_span_s=max(self._end[b - 1] - self._begin[a] for a, b in self._spans if a < b),
            busy_s=tuple(busy_s),
            idle_over_total=share_left(all_busy_s, total_s),
            idle_over_busy=difference(total_s, all_busy_s) / all_busy_s,
            idle_over_busiest=share_left(max(busy_s), makespan_s),
            idle_by_cause_s=tuple(
                np.bincount(idle["cause"], idle["end_s"] - idle["start_s"], minlength=len(CAUSES)).tolist()
            ),
            peak_in_flight=tuple(_max_in_flight(rank, "BW") for rank in self._ranks),
            peak_in_flight_freed_at_input_gradient=tuple(_max_in_flight(rank, "BI") for rank in self._ranks),
            messages=messages,
            peak_memory_bytes=None if None in peaks else tuple(float(peak or 0) for peak in peaks),
        )
        return checked(self._program.schedule.name, measures, measured=True)


_KIND = {False: "activation", True: "gradient"}


def _max_in_flight(mine: RankProgram, frees: str) -> int:
    """Return the maximum number of activations that a rank holds. `frees` has the kinds of actions that free one."""
    held = largest = 0
    for action in mine.actions:
        held += (action.kind == "F") - (action.kind in frees)
        largest = max(largest, held)
    return largest
