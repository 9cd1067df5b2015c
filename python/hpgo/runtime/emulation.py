"""Emulation of a cluster on one node: the engine runs a plan's schedule, but passes sleep for their estimated times.

Nothing replays the simulation. A rank starts an action once the previous one has ended and the action's inputs have
arrived. Each message carries the time from which it may be used: it first occupies its link, and then arrives after the
latency. So the step time shows how ranks, messages and gradient reductions really wait for each other.

- A pass starts when its inputs have arrived and the previous pass has ended, and sleeps for its estimated time.
- A message carries, for each row, the time from which it may be used. Its link is occupied from the end of the sending
  action, or of the previous message to the same rank if that is later. Then the latency passes. The receiver sleeps
  until the latest of these times.
- A gradient reduction begins when the last rank that holds the stage, in either pipeline replica, has ended its last
  backward pass. The ranks sleep for the estimated times of the reduction and the optimizer.
- A step begins at a time that the ranks agree on, and ends with the last of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import sys
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from hpgo.base.checks import number
from hpgo.errors import ArgumentError
from hpgo.programs.schedule import KINDS
from hpgo.runtime import guards
from hpgo.runtime.clocks import RankClock, Stamps, node_name
from hpgo.runtime.engine import Engine
from hpgo.runtime.failure_detection import Limits
from hpgo.runtime.messages import Messages, PassedTensor
from hpgo.runtime.progress import HERE
from hpgo.runtime.recorder import Recorder
from hpgo.runtime.rendezvous import agree, check_place, lost
from hpgo.runtime.runnable import Runnable, check_trainable
from hpgo.runtime.session import NeighbourGroups, RankSession
from hpgo.runtime.stage_module import Value
from hpgo.timing.simulation import columns_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.programs.ranks import RankAction, RankProgram, RankStage
    from hpgo.runtime.messages import Exchange
    from hpgo.timing.simulation import Columns
    from hpgo.timing.timeline import Timeline

_CPU = torch.device("cpu")
_FROM = Value("from when on", by_row=True, has_gradient=True, shape=(), dtype=torch.int64)
"""The tensor that crosses every cut: for each row, the time before which its reader must not use it."""
_AWAKE_NS = 60_000
"""Last part of each sleep, in ns, that is spent polling the clock, because the system wakes sleepers late. Not tuned.
"""
_MIN_SCALE, _MAX_SCALE, _MAX_S = 1e-3, 1e6, 1e6
_LEAD_NS = 20_000_000
"""Time in ns between agreeing on the start of a step and the start, so that the agreement reaches all ranks before. Not
tuned."""
_TAG = 1
"""Tag of times that ranks exchange. Messages have tag 0."""
_PR_SET_TIMERSLACK = 29
_MIN_SLACK_NS = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000
"""Requested scheduler slice, in ns. Linux runs a thread earlier if it asks for shorter slices."""


class Emulation:
    """One rank's part of a plan on an emulated cluster. Every rank creates one, and all step together.

    >>> import hpgo
    >>> schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
    >>> costs = hpgo.Costs(forward_s=0.002, backward_s=0.003)
    >>> program = hpgo.program(schedule, [(["a"], [0])], pipeline_micro_batch_size=2, global_batch_size=8, costs=costs)
    >>> with Emulation(program, scale=2) as emulation:
    ...     step_s = emulation.step()
    >>> step_s >= 4 * (0.002 + 0.003)
    True
    """

    def __init__(
        self, plan: Plan | Program | Runnable | str | os.PathLike[str], *, scale: float = 1.0, timeout_s: float = 600.0
    ) -> None:
        """Join the other ranks, which are processes of the same node.

        Args:
            plan: a plan, or a program with costs, or the file of one.
            scale: factor by which everything takes longer here than on the cluster. Measured times are divided by it.
            timeout_s: how long the run may stand still while ranks wait. It must exceed the longest pass here.

        Raises ArgumentError for a plan without times or one that can't be run. Raises RunError if the ranks don't find
        each other, or differ in plan, options or versions.
        """
        self.program = Runnable.from_plan(plan).program
        durations = check(self.program, scale)
        self.scale = float(scale)
        limits = Limits(timeout_s)
        self._patience_s = limits.patience_s
        _wake_in_time()
        check_place(self.program)
        self._session = RankSession(limits)
        try:
            self._session.join(self.program, _CPU)
            self._build(durations)
        except BaseException:
            self.close()
            raise

    def _build(self, durations: Durations) -> None:
        program = self.program
        facts = {"plan": hashlib.sha256(program.to_json().encode()).hexdigest()[:12], "scale": str(self.scale)}
        # All times are compared on one clock, so ranks on several nodes can't take part.
        agree(facts | {"node": node_name()})
        self.mine = program.for_rank(dist.get_rank())
        chain = durations.chain
        cuts = [
            () if stage % chain == chain - 1 else (PassedTensor(0, 0, _FROM),) for stage in range(len(program.stages))
        ]
        groups = NeighbourGroups(_CPU, self._patience_s)
        self._session.hold(groups)
        links = _Links(self.mine, durations, cuts, groups)
        self._sums = _Sums(self.mine, durations)
        stages = {stage.stage: _SleepingStage(stage, durations) for stage in self.mine.stages}
        self.engine = Engine(self.mine, stages, links, self._sums, Stamps(_CPU))
        self._recorder = Recorder(program, RankClock(_CPU), scale=self.scale)
        self.steps = 0
        """Number of steps done."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.mine.rank

    def step(self) -> float:
        """Run one step. Return its time on the cluster in seconds, the same on every rank.

        Raises RunError if another rank is lost.
        """
        HERE.step = self.steps
        with lost(str(HERE)):
            # A common start, because ranks leave the all-reduce at different times and the differences would count as
            # step time.
            begin_ns = _latest(perf_counter_ns() + _LEAD_NS)
            _sleep_until(begin_ns)
            # A real run has the same engine, messages and waits. Only the work within a pass is replaced.
            self.engine.step(None)
            summed_ns = self._sums.finish()
            _sleep_until(self._sums.stepped_ns)
            end_ns = perf_counter_ns()
            last_ns = _latest(end_ns)
        HERE.step = None
        HERE.does(f"the time after step {self.steps}")
        self._recorder.add(self.steps, [*self.engine.clock_ns, begin_ns, summed_ns, end_ns], None)
        self.steps += 1
        return (last_ns - begin_ns) / 1e9 / self.scale

    def timeline(self, step: int | None = None) -> Timeline:
        """Return the last step as the ranks ran it, or one of the last 100 by its number from 0.

        All ranks must call it, and each gets the timeline of all. Rows are ranks; times are cluster times. Raises
        ArgumentError for a step that is not recorded, and RunError if another rank is lost.
        """
        return self._recorder.timeline(self.steps - 1 if step is None else step)

    def usual_step(self) -> int:
        """Return the step of median length on rank 0, of the last 100 without the first of them.

        All ranks must call it. Raises ArgumentError before the first step, and RunError if another rank is lost.
        """
        return self._recorder.usual_step()

    def close(self) -> None:
        """Leave the other ranks."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is not None:
            guards.charge(value)
        self.close()


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of all actions and messages in the emulation, in nanoseconds."""

    program: Program
    columns: Columns
    scale: float

    def _ns(self, time_s: float) -> int:
        return round(1e9 * self.scale * time_s)

    def passes(self, stage: RankStage) -> list[list[int]]:
        """Return the durations of F, B, I and W of a replica: one row for all micro-batches, or one for each."""
        # The cost model estimates the replica with the most rows. Another replica has less to do.
        counts = [len(rows) for rows in self.program.stages[stage.stage].rows]
        # Numbers that differ by more than one sample are by speed, so that all replicas take about as long.
        share = len(stage.rows) / max(counts) if max(counts) - min(counts) <= 1 else 1.0
        # Costs of a stage may be equal for all micro-batches, or differ: the table has one row per stage, or one per
        # stage and micro-batch.
        rows = self.columns.compute_s[stage.stage :: len(self.program.stages), :4] * share
        return [[self._ns(time_s) for time_s in row] for row in rows.tolist()]

    def message(self, action: RankAction) -> tuple[int, int]:
        """Return how long the output of an action occupies its link, and its latency."""
        rank_of = self.program.schedule.rank_of_stage
        for one in action.sends:
            # A message within the rank takes no time. All messages of an action cross the same cut, so the first one
            # decides.
            if rank_of[one.from_stage] == rank_of[one.to_stage]:
                break
            forward = action.kind == "F"
            costs_s = self.columns.activation_s[one.from_stage] if forward else self.columns.gradient_s[one.to_stage]
            return self._ns(float(costs_s[0])), self._ns(float(costs_s[1]))
        return 0, 0

    def sums(self, stage: int) -> tuple[int, int]:
        """Return the exposed gradient reduction of a stage, and its optimizer step."""
        return self._ns(self.columns.gradient_sync_s[stage]), self._ns(self.columns.optimizer_s[stage])

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage or its copy in another pipeline replica."""
        copies = self.program.stages[stage % self.chain :: self.chain]
        return tuple(sorted({device for copy in copies for device in copy.devices}))

    @property
    def chain(self) -> int:
        """Number of stages of one pipeline replica."""
        return self.program.schedule.stages_per_pipeline


def check(program: Program, scale: float) -> Durations:
    """Return the durations. Raise ArgumentError for a program or a scale that can't be emulated."""
    check_trainable(program)
    hint = f"give a number from {_MIN_SCALE:g} to {_MAX_SCALE:,.0f}"
    if number("scale", scale, above=0, maximum=_MAX_SCALE, hint=hint) < _MIN_SCALE:
        raise ArgumentError(f"scale is {scale:g}, but must be at least {_MIN_SCALE:g}", hint)
    if program.costs is None:
        raise ArgumentError(
            "the program has no times, so there is nothing to emulate",
            "emulate a plan, or make the program with `costs=hpgo.Costs(…)`",
        )
    columns = columns_of(program.schedule, program.costs)
    # The column of fused pairs is NaN where a pair takes the sum of its two passes.
    max_s = scale * float(np.nanmax(columns.compute_s))
    if max_s > _MAX_S:
        raise ArgumentError(
            f"one pass would take {max_s:.3g} s here, but the limit is {_MAX_S:g} s",
            f"set `scale` to at most {scale * _MAX_S / max_s:.3g}",
            code="too_large",
        )
    return Durations(program, columns, float(scale))


class _SleepingStage:
    """A stage whose passes sleep instead of computing."""

    def __init__(self, stage: RankStage, durations: Durations) -> None:
        self.stage = stage
        self._times_ns = durations.passes(stage)

    def forward(
        self, micro_batch: int, _batch: None, exchange: Exchange, _received: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sleep for a forward pass. Return the tensors to send, which are filled in when they are sent."""
        return self._pass("F", micro_batch, exchange)

    def backward(
        self, kind: str, micro_batch: int, _batch: None, exchange: Exchange, _received: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Sleep for a backward pass. Return the tensors to send, which are filled in when they are sent."""
        return self._pass(kind, micro_batch, exchange)

    def finish_weights(self, micro_batch: int) -> None:
        """Sleep for a weight-gradient pass."""
        self._sleep("W", micro_batch)

    def _pass(self, kind: str, micro_batch: int, exchange: Exchange) -> list[torch.Tensor]:
        self._sleep(kind, micro_batch)
        return [torch.empty(shape, dtype=_FROM.dtype) for shape in exchange.gives.shapes]

    def _sleep(self, kind: str, micro_batch: int) -> None:
        begin_ns = perf_counter_ns()
        times_ns = self._times_ns[micro_batch if len(self._times_ns) > 1 else 0]
        _sleep_until(begin_ns + times_ns[KINDS.index(kind)])


class _Links(Messages):
    """Messages that carry the time from which they may be used. Their receiver waits until then."""

    def __init__(
        self, mine: RankProgram, durations: Durations, cuts: Sequence[Sequence[PassedTensor]], groups: NeighbourGroups
    ) -> None:
        super().__init__(durations.program, mine.rank, cuts, groups, _CPU)
        self._costs_ns = [durations.message(action) for action in mine.actions]
        self._free_ns: dict[int, int] = {}
        """Time from which the link to each peer is free."""

    def take(self, action: int) -> list[torch.Tensor]:
        """Return the inputs of an action, as soon as they may be used."""
        tensors = super().take(action)
        if tensors:
            _sleep_until(max(ns for tensor in tensors for ns in tensor.tolist()))
        return tensors

    def give(self, action: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send the output of an action on the link to each rank that takes rows of it."""
        now_ns = perf_counter_ns()
        busy_ns, latency_ns = self._costs_ns[action]
        for piece in self.exchanges[action].gives.pieces:
            # A link carries one message after the other. The latency does not occupy it.
            sent_ns = max(now_ns, self._free_ns.get(piece.peer, 0)) + busy_ns
            self._free_ns[piece.peer] = sent_ns
            tensors[piece.tensor][piece.rows].fill_(sent_ns + latency_ns)
        super().give(action, tensors)


class _Sums:
    """Gradient reductions, which sleep from the end of the last replica's last backward pass."""

    def __init__(self, mine: RankProgram, durations: Durations) -> None:
        self._rank, self._chain, self._stages = mine.rank, durations.chain, len(durations.program.stages)
        self._holders = {stage.stage: durations.holders(stage.stage) for stage in mine.stages}
        self._costs_ns = {stage.stage: durations.sums(stage.stage) for stage in mine.stages}
        self._ended: dict[tuple[int, ...], torch.Tensor] = {}
        """For each group of ranks, the end of the last backward pass of each stage; 0 for stages that it does not hold.
        """
        self.stepped_ns = 0
        """Time at which the optimizer has stepped."""

    def begin(self) -> None:
        """Begin a step: forget the times of the last one."""
        self._ended = {ranks: torch.zeros(self._stages, dtype=_FROM.dtype) for ranks in self._holders.values()}

    def watch(self, stage: int) -> None:
        """Ignore the start of the last backward pass.

        The estimated time of the reduction excludes what overlaps with it.
        """

    def passed(self, stage: int) -> None:
        """Record that the last backward pass of a stage has ended."""
        self._ended[self._holders[stage]][stage] = perf_counter_ns()

    def finish(self) -> int:
        """Sleep until all gradient reductions that include this rank are done. Return the time at which they were."""
        HERE.sums("the sums of gradients")
        self._exchange()
        summed_ns = self.stepped_ns = 0
        for stage, (sync_ns, optimizer_ns) in self._costs_ns.items():
            copies = self._ended[self._holders[stage]][stage % self._chain :: self._chain]
            last_ns = int(copies.max())
            summed_ns = max(summed_ns, last_ns + sync_ns)
            self.stepped_ns = max(self.stepped_ns, last_ns + sync_ns + optimizer_ns)
        _sleep_until(summed_ns)
        return perf_counter_ns()

    def _exchange(self) -> None:
        """Exchange the latest time of each stage within a group, through the group's first rank.

        A chain of messages would wake the ranks one after the other.
        """
        groups = sorted((ranks, ended) for ranks, ended in self._ended.items() if len(ranks) > 1)
        sent = [dist.isend(ended, ranks[0], tag=_TAG) for ranks, ended in groups if ranks[0] != self._rank]
        for ranks, ended in groups:
            if ranks[0] == self._rank:
                theirs = torch.zeros(len(ranks), self._stages, dtype=_FROM.dtype)
                waits = [dist.irecv(row, peer, tag=_TAG) for peer, row in zip(ranks[1:], theirs[1:], strict=True)]
                with HERE.waiting(ranks):
                    for wait in waits:
                        wait.wait()
                # The first rank collects all times and returns their maximum, so that every rank computes the same end.
                torch.maximum(ended, theirs.amax(0), out=ended)
                sent += [dist.isend(ended, peer, tag=_TAG) for peer in ranks[1:]]
        for ranks, ended in groups:
            if ranks[0] != self._rank:
                with HERE.waiting(ranks[0]):
                    dist.recv(ended, ranks[0], tag=_TAG)
        for one in sent:
            one.wait()


def _latest(ns: int) -> int:
    """Return the maximum of `ns` over all ranks."""
    latest = torch.tensor([ns])
    with HERE.meets("the agreement on the time of a step"):
        dist.all_reduce(latest, dist.ReduceOp.MAX)
    return int(latest)


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - perf_counter_ns()) > 0:
        # Poll the clock at the end instead of sleeping, so that a late wake-up does not lengthen the pass.
        if left_ns > _AWAKE_NS:
            sleep((left_ns - _AWAKE_NS) / 1e9)


def _wake_in_time() -> None:
    """Ask Linux to wake this thread, and the threads it starts, on time and ahead of threads that compute.

    Any user may set both options. On other systems, or where they are refused, sleepers wake a little later.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    # By default Linux may delay the end of a sleep by 50 µs, to wake several threads together.
    libc.prctl(_PR_SET_TIMERSLACK, _MIN_SLACK_NS)
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None:
        libc.syscall(call, 0, struct.pack("IIQiIQQQII", 56, 0, 0, 0, 0, _SLICE_NS, 0, 0, 0, 0), 0)
