"""Emulates a cluster on one machine: the engine runs a plan's orders, but a pass sleeps for as long as it is priced.

Nothing replays what was simulated. A rank starts an action when it has ended the one before and has received what the
action takes. What it sends, at the end of an action, says from when on it may be used: it occupies its link first, and
then is late by a latency. Whatever ranks, messages and sums really wait for shows in the time that a step took.
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
from hpgo.runtime.clocks import RankClock, Stamps, machine_name
from hpgo.runtime.engine import Engine
from hpgo.runtime.failure_detection import Limits
from hpgo.runtime.messages import Messages, PassedTensor
from hpgo.runtime.progress import HERE
from hpgo.runtime.recorder import Recorder
from hpgo.runtime.rendezvous import agree, check_place, lost
from hpgo.runtime.runnable import Runnable, check_orders
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
"""What crosses every cut: for each row the moment before which its reader must not use it."""
_AWAKE_NS = 60_000
"""The end of each sleep is waited for awake, since sleepers are woken late."""
_LEAST_SCALE, _MOST_SCALE, _LONGEST_S = 1e-3, 1e6, 1e6
_LEAD_NS = 20_000_000
"""So long before its begin ranks agree on when a step begins."""
_TAG = 1
"""Of moments that ranks tell each other; messages have 0."""
_PR_SET_TIMERSLACK = 29
_LEAST_SLACK_NS = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000
"""Who asks for short turns comes sooner."""


class Emulation:
    """One rank's part of a plan on a cluster that isn't there. Every rank makes one, and all step together.

    >>> import hpgo
    >>> orders = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
    >>> costs = hpgo.Costs(forward_s=0.002, backward_s=0.003)
    >>> program = hpgo.program(orders, [(["a"], [0])], micro_batch_size=2, global_batch_size=8, costs=costs)
    >>> with Emulation(program, scale=2) as emulation:
    ...     step_s = emulation.step()
    >>> step_s >= 4 * (0.002 + 0.003)
    True
    """

    def __init__(
        self, plan: Plan | Program | Runnable | str | os.PathLike[str], *, scale: float = 1.0, timeout_s: float = 600.0
    ) -> None:
        """Joins the other ranks, which are processes of the same machine.

        Args:
            plan: a plan, or a program with costs, or the file of one.
            scale: how many times as long as on the cluster everything takes here; what is measured is divided by it.
            timeout_s: for how long the run may stand still while ranks wait: longer than any pass here.

        Raises ArgumentError for a plan that says no times or can't be run, and RunError if the ranks don't find each
        other, or differ in plan, options or versions.
        """
        self.program = Runnable.from_plan(plan).program
        prices = check(self.program, scale)
        self.scale = float(scale)
        limits = Limits(timeout_s)
        self._patience_s = limits.patience_s
        _wake_in_time()
        check_place(self.program)
        self._session = RankSession(limits)
        try:
            self._session.join(self.program, _CPU)
            self._build(prices)
        except BaseException:
            self.close()
            raise

    def _build(self, prices: Prices) -> None:
        program = self.program
        facts = {"plan": hashlib.sha256(program.to_json().encode()).hexdigest()[:12], "scale": str(self.scale)}
        agree(facts | {"machine": machine_name()})  # whose processes share a clock
        self.mine = program.for_rank(dist.get_rank())
        chain = prices.chain
        cuts = [
            () if stage % chain == chain - 1 else (PassedTensor(0, 0, _FROM),) for stage in range(len(program.stages))
        ]
        ways = NeighbourGroups(_CPU, self._patience_s)
        self._session.hold(ways)
        links = _Links(self.mine, prices, cuts, ways)
        self._sums = _Sums(self.mine, prices)
        stages = {stage.stage: _SleepingStage(stage, prices) for stage in self.mine.stages}
        self.engine = Engine(self.mine, stages, links, self._sums, Stamps(_CPU))
        self._recorder = Recorder(program, RankClock(_CPU), scale=self.scale)
        self.steps = 0
        """Steps that have been done."""

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.mine.rank

    def step(self) -> float:
        """Runs one step; returns how many seconds it would have taken, the same on every rank.

        Raises RunError if another rank is lost.
        """
        HERE.step = self.steps
        with lost(str(HERE)):
            begin_ns = _latest(perf_counter_ns() + _LEAD_NS)
            _sleep_until(begin_ns)
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
        """The last step as the ranks ran it, or one of the last 100, counted from 0. Every rank must ask, and gets all.

        Rows are ranks; times are those of the cluster. Raises ArgumentError for a step that is not known, RunError if
        another rank is lost.
        """
        return self._recorder.timeline(self.steps - 1 if step is None else step)

    def usual_step(self) -> int:
        """The step of median length, by rank 0, of the last 100 without the first of them. Every rank must ask.

        Raises ArgumentError before the first step, RunError if another rank is lost.
        """
        return self._recorder.usual_step()

    def close(self) -> None:
        """Leaves the other ranks."""
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
class Prices:
    """How long everything takes here, in nanoseconds."""

    program: Program
    columns: Columns
    scale: float

    def _ns(self, time_s: float) -> int:
        return round(1e9 * self.scale * time_s)

    def passes(self, stage: RankStage) -> list[list[int]]:
        """F, B, I and W of a replica: one row for all micro-batches, or one for each."""
        # The price is that of the replica that has most rows; another one has less to do.
        share = len(stage.rows) / max(len(rows) for rows in self.program.stages[stage.stage].rows)
        rows = self.columns.compute_s[stage.stage :: len(self.program.stages), :4] * share
        return [[self._ns(time_s) for time_s in row] for row in rows.tolist()]

    def message(self, action: RankAction) -> tuple[int, int]:
        """For how long what an action gives occupies its link, and its latency."""
        rank_of = self.program.schedule.rank_of_stage
        for one in action.sends:
            if rank_of[one.from_stage] == rank_of[one.to_stage]:
                break
            forward = action.kind == "F"
            costs_s = self.columns.activation_s[one.from_stage] if forward else self.columns.gradient_s[one.to_stage]
            return self._ns(float(costs_s[0])), self._ns(float(costs_s[1]))
        return 0, 0

    def sums(self, stage: int) -> tuple[int, int]:
        """Of a stage's gradients, beyond its last backward pass, and the optimizer's step."""
        return self._ns(self.columns.gradient_sync_s[stage]), self._ns(self.columns.optimizer_s[stage])

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage, or its copy in another chain."""
        copies = self.program.stages[stage % self.chain :: self.chain]
        return tuple(sorted({device for copy in copies for device in copy.devices}))

    @property
    def chain(self) -> int:
        """Stages of a chain."""
        return self.program.schedule.chain_length


def check(program: Program, scale: float) -> Prices:
    """What takes how long. Raises ArgumentError for a program, or a scale, that can't be emulated."""
    check_orders(program)
    hint = f"give a number from {_LEAST_SCALE:g} to {_MOST_SCALE:,.0f}"
    if number("scale", scale, above=0, most=_MOST_SCALE, hint=hint) < _LEAST_SCALE:
        raise ArgumentError(f"scale is {scale:g}", hint)
    if program.costs is None:
        raise ArgumentError(
            "the program says no times, so there is nothing to emulate",
            "give one of a plan, or make it with `costs=hpgo.Costs(…)`",
        )
    columns = columns_of(program.schedule, program.costs)
    max_s = scale * float(np.nanmax(columns.compute_s))
    if max_s > _LONGEST_S:
        raise ArgumentError(f"one pass would last {max_s:.3g} s here", "lower `scale`", code="too_large")
    return Prices(program, columns, float(scale))


class _SleepingStage:
    """A stage whose passes sleep."""

    def __init__(self, stage: RankStage, prices: Prices) -> None:
        self.stage = stage
        self._times_ns = prices.passes(stage)

    def forward(
        self, micro_batch: int, _batch: None, exchange: Exchange, _received: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sleeps; returns what travels on, to be filled in when it is sent."""
        return self._pass("F", micro_batch, exchange)

    def backward(
        self, kind: str, micro_batch: int, _batch: None, exchange: Exchange, _received: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Sleeps; returns what travels back, to be filled in when it is sent."""
        return self._pass(kind, micro_batch, exchange)

    def finish_weights(self, micro_batch: int) -> None:
        """Sleeps."""
        self._sleep("W", micro_batch)

    def _pass(self, kind: str, micro_batch: int, exchange: Exchange) -> list[torch.Tensor]:
        self._sleep(kind, micro_batch)
        return [torch.empty(shape, dtype=_FROM.dtype) for shape in exchange.gives.shapes]

    def _sleep(self, kind: str, micro_batch: int) -> None:
        begin_ns = perf_counter_ns()
        times_ns = self._times_ns[micro_batch if len(self._times_ns) > 1 else 0]
        _sleep_until(begin_ns + times_ns[KINDS.index(kind)])


class _Links(Messages):
    """Messages that say from when on they may be used, and are waited for until then."""

    def __init__(
        self, mine: RankProgram, prices: Prices, cuts: Sequence[Sequence[PassedTensor]], ways: NeighbourGroups
    ) -> None:
        super().__init__(prices.program, mine.rank, cuts, ways, _CPU)
        self._costs_ns = [prices.message(action) for action in mine.actions]
        self._free_ns: dict[int, int] = {}
        """For each peer from when on the link to it is free."""

    def take(self, action: int) -> list[torch.Tensor]:
        """What an action of the rank takes, as soon as it may be used."""
        tensors = super().take(action)
        if tensors:
            _sleep_until(max(ns for tensor in tensors for ns in tensor.tolist()))
        return tensors

    def give(self, action: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends what an action made, on the link to each who takes rows of it."""
        now_ns = perf_counter_ns()
        busy_ns, latency_ns = self._costs_ns[action]
        for piece in self.exchanges[action].gives.pieces:
            sent_ns = max(now_ns, self._free_ns.get(piece.peer, 0)) + busy_ns
            self._free_ns[piece.peer] = sent_ns
            tensors[piece.tensor][piece.rows].fill_(sent_ns + latency_ns)
        super().give(action, tensors)


class _Sums:
    """Sums of gradients: they begin when the last replica has ended its last backward pass, and are slept for."""

    def __init__(self, mine: RankProgram, prices: Prices) -> None:
        self._rank, self._chain, self._stages = mine.rank, prices.chain, len(prices.program.stages)
        self._holders = {stage.stage: prices.holders(stage.stage) for stage in mine.stages}
        self._costs_ns = {stage.stage: prices.sums(stage.stage) for stage in mine.stages}
        self._ended: dict[tuple[int, ...], torch.Tensor] = {}
        """For each group of ranks when it ended the last backward passes of stages; 0 of those that it doesn't hold."""
        self.stepped_ns = 0
        """When the optimizer has stepped."""

    def begin(self) -> None:
        """A step begins."""
        self._ended = {ranks: torch.zeros(self._stages, dtype=_FROM.dtype) for ranks in self._holders.values()}

    def watch(self, stage: int) -> None:
        """Before the last backward pass of a stage; what is summed beside it is not in the price."""

    def passed(self, stage: int) -> None:
        """The last backward pass of a stage has ended."""
        self._ended[self._holders[stage]][stage] = perf_counter_ns()

    def finish(self) -> int:
        """Sleeps until all is summed that this rank has a part in; returns when it was."""
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
        """The latest of each moment in a group, by way of its first rank: others would be woken one after the other."""
        groups = sorted((ranks, ended) for ranks, ended in self._ended.items() if len(ranks) > 1)
        sent = [dist.isend(ended, ranks[0], tag=_TAG) for ranks, ended in groups if ranks[0] != self._rank]
        for ranks, ended in groups:
            if ranks[0] == self._rank:
                theirs = torch.zeros(len(ranks), self._stages, dtype=_FROM.dtype)
                waits = [dist.irecv(row, peer, tag=_TAG) for peer, row in zip(ranks[1:], theirs[1:], strict=True)]
                with HERE.waiting(ranks):
                    for wait in waits:
                        wait.wait()
                torch.maximum(ended, theirs.amax(0), out=ended)
                sent += [dist.isend(ended, peer, tag=_TAG) for peer in ranks[1:]]
        for ranks, ended in groups:
            if ranks[0] != self._rank:
                with HERE.waiting(ranks[0]):
                    dist.recv(ended, ranks[0], tag=_TAG)
        for one in sent:
            one.wait()


def _latest(ns: int) -> int:
    """The largest that any rank says."""
    said = torch.tensor([ns])
    with HERE.meets("the meeting between steps"):
        dist.all_reduce(said, dist.ReduceOp.MAX)
    return int(said)


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - perf_counter_ns()) > 0:
        if left_ns > _AWAKE_NS:
            sleep((left_ns - _AWAKE_NS) / 1e9)


def _wake_in_time() -> None:
    """Asks Linux to wake this thread, and those that it starts, at once and ahead of what computes.

    Both are free to all users. Elsewhere, and where it is refused, sleepers wake a little later.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, _LEAST_SLACK_NS)
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None:
        libc.syscall(call, 0, struct.pack("IIQiIQQQII", 56, 0, 0, 0, 0, _SLICE_NS, 0, 0, 0, 0), 0)
