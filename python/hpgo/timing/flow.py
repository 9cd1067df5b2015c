"""Throughput, latency and micro-batches in flight of an inference pipeline."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, check_is, number
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.programs.host_rotation import hosts_of, routes_of
from hpgo.programs.program import Program
from hpgo.timing.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Flow(Record):
    """Times at which each micro-batch enters the first stage and leaves the last one, in seconds of one clock.

    >>> flow = Flow(samples=(4, 4, 2), enter_s=(0.0, 1.0, 2.0), leave_s=(2.0, 3.5, 5.0))
    >>> flow.samples_per_s, flow.latency_s(50), flow.latency_s(99), flow.max_in_flight
    (2.0, 2.5, 3.0, 2)
    """

    samples: tuple[int, ...]
    """Number of samples in each micro-batch."""
    enter_s: tuple[float, ...]
    """Start of the first pass of each micro-batch, in seconds."""
    leave_s: tuple[float, ...]
    """End of the last pass of each micro-batch, in seconds."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not len(self.samples) == len(self.enter_s) == len(self.leave_s):
            raise ArgumentError(
                "samples, enter_s and leave_s of a flow have different lengths",
                "give each micro-batch one entry in all three",
            )
        if not self.samples or any(
            not math.isfinite(leave_s - enter_s) or leave_s < enter_s
            for enter_s, leave_s in zip(self.enter_s, self.leave_s, strict=True)
        ):
            raise ArgumentError(
                "a flow has no micro-batch, or one that leaves before it enters",
                "give each micro-batch leave_s ≥ enter_s",
            )

    @property
    def samples_per_s(self) -> float:
        """Samples per second from the first entry to the last exit.

        Includes the time in which the pipeline fills and drains.
        """
        span_s = max(self.leave_s) - min(self.enter_s)
        return sum(self.samples) / span_s if span_s else math.inf

    @property
    def max_in_flight(self) -> int:
        """Largest number of micro-batches that had entered and not yet left."""
        left = sorted(self.leave_s)
        gone = maximum = 0
        for entered, enter_s in enumerate(sorted(self.enter_s), start=1):
            # Micro-batches may overtake each other on routes over several hosts, so entries and exits are sorted
            # separately.
            while left[gone] <= enter_s:
                gone += 1
            maximum = max(maximum, entered - gone)
        return maximum or 1

    def latency_s(self, percent: float) -> float:
        """Return the latency in seconds that `percent` percent of the micro-batches do not exceed.

        Raise ArgumentError if it is not in (0, 100].
        """
        share = number("percent", percent, above=0, maximum=100) / 100
        taken_s = sorted(leave_s - enter_s for enter_s, leave_s in zip(self.enter_s, self.leave_s, strict=True))
        return taken_s[math.ceil(share * len(taken_s)) - 1]


def flow_of(timeline: Timeline, samples: Sequence[int], *, routes: int = 1) -> Flow:
    """Return the flow in a timeline of forward passes. `samples` are the samples of its micro-batches.

    With several `routes`, consecutive micro-batches take consecutive routes. Each route is a chain of the timeline.
    """
    check_is("the timeline", timeline, Timeline, "give one of forward passes alone")
    length = timeline.stages // routes
    first, last = timeline.stage % length == 0, timeline.stage % length == length - 1
    enter_s = dict(zip(timeline.micro_batch[first].tolist(), timeline.start_s[first].tolist(), strict=True))
    leave_s = dict(zip(timeline.micro_batch[last].tolist(), timeline.end_s[last].tolist(), strict=True))
    # The timeline numbers micro-batches chain by chain. Restore the order in which they enter the pipeline.
    begins = accumulate((len(range(route, len(enter_s), routes)) for route in range(routes)), initial=0)
    firsts = list(begins)
    order = [firsts[number % routes] + number // routes for number in range(len(enter_s))]
    return Flow(tuple(samples), tuple(enter_s[at] for at in order), tuple(leave_s[at] for at in order))


def steps_together(program: Program) -> bool:
    """Return whether the program runs in lock-step: each stage sends its micro-batch on before it starts the next."""
    check_is("the program", program, Program, "make one with `hpgo.program`")
    return program.schedule.synchronization == "lock step"


def room_of(program: Program, in_flight: int | None = None) -> int:
    """Return the largest number of micro-batches in flight: `in_flight`, or a smaller capacity of the pipeline.

    Micro-batches that have entered and not left are in flight. A pipeline holds one micro-batch on each host, and
    between two hosts one in transit and one that waits. In lock-step it holds one per stage. `sequential` holds one in
    all.

    >>> import hpgo
    >>> def of(name):
    ...     schedule = hpgo.schedule(name, ranks=3, micro_batches=1)
    ...     stages = [(["a"], [0]), (["b"], [1]), (["c"], [2])]
    ...     return hpgo.program(schedule, stages, pipeline_micro_batch_size=1, global_batch_size=1)
    >>> room_of(of("forward_only")), room_of(of("forward_only"), 5), room_of(of("staggered")), room_of(of("sequential"))
    (7, 5, 3, 1)
    """
    counts = [len(hosts) for hosts in hosts_of(routes_of(program))]
    if steps_together(program):
        room = len(counts)
    elif program.schedule.name == "sequential":
        room = 1
    else:
        cuts = sum(math.lcm(before, behind) + behind for before, behind in pairwise(counts))
        # The first host of the first stage forwards inputs to the other hosts of the stage. In the same way, the first
        # host of the last stage collects the outputs of the others.
        room = sum(counts) + cuts + 2 * (counts[0] - 1) + 2 * (counts[-1] - 1)
    return room if in_flight is None else min(room, check_int("in_flight", in_flight))


def predicted_flow(program: Program, samples: Sequence[int], *, in_flight: int | None = None) -> Flow | None:
    """Return the flow of micro-batches that are available from the start, predicted from the costs of `program`.

    Returns None if the program has no costs. A stage starts when it has its micro-batch and has sent the previous one.
    A message starts when its receiver has free space. Micro-batch n enters when micro-batch n - `in_flight` has left.
    Raises ArgumentError if `in_flight` is invalid.

    >>> import hpgo
    >>> schedule, costs = hpgo.schedule("forward_only", ranks=2, micro_batches=1), hpgo.Costs(forward_s=(1.0, 2.0))
    >>> stages = [(["a"], [0]), (["b"], [1])]
    >>> two = hpgo.program(schedule, stages, pipeline_micro_batch_size=1, global_batch_size=1, costs=costs)
    >>> flow = predicted_flow(two, [1] * 8)
    >>> flow.enter_s, flow.leave_s[:4], flow.max_in_flight
    ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0), (3.0, 5.0, 7.0, 9.0), 4)
    """
    check_is("the program", program, Program, "make one with `hpgo.program`")
    if program.costs is None:
        return None
    from hpgo.timing.simulation import columns_of

    columns, stages = columns_of(program.schedule, program.costs), len(program.stages)
    lock_step, maximum, routes = steps_together(program), room_of(program, in_flight), routes_of(program)
    passes_s = [columns.compute_s[stage::stages, 0].tolist() for stage in range(stages)]
    links_s = [tuple(columns.activation_s[stage].tolist()) for stage in range(stages)]
    free_s: defaultdict[int, float] = defaultdict(float)  # end of the last pass, by host
    posted_s: defaultdict[int, float] = defaultdict(float)
    sent_s: defaultdict[tuple[int, int], float] = defaultdict(
        float
    )  # end of the last message, by the two hosts of the link
    # The first host of the first stage reads the inputs and sends them on, so no micro-batch enters while it is busy.
    source = routes[-1][0]
    enter_s: list[float] = []
    leave_s: list[float] = []
    left_s: list[float] = []
    for micro_batch in range(len(samples)):
        chain = micro_batch % len(routes)
        there_s = max(free_s[source], left_s[micro_batch - maximum] if micro_batch >= maximum else 0.0)
        route = routes[chain]
        for at, (host, behind) in enumerate(zip(route, (*route[1:], None), strict=True)):
            begin_s = max(there_s, free_s[host])
            times_s = passes_s[chain * len(route) + at]
            end_s = begin_s + times_s[micro_batch % len(times_s)]
            if at == 0:
                enter_s.append(begin_s)
            posted_s[host] = begin_s  # the receive of the next one, into the buffer that this one has left
            free_s[host] = end_s
            if behind is None:
                leave_s.append(end_s)
                # Outputs leave in order, so a micro-batch that ends early waits for the ones before it.
                left_s.append(max(end_s, left_s[-1] if left_s else 0.0))
                continue
            busy_s, latency_s = links_s[chain * len(route) + at]
            # In lock-step, the receiver must be idle. Otherwise it needs only a free receive buffer.
            room_s = free_s[behind] if lock_step else posted_s[behind]
            given_s = max(end_s, sent_s[host, behind])
            sent_s[host, behind] = max(given_s, room_s) + busy_s
            there_s = sent_s[host, behind] + latency_s
            free_s[host] = sent_s[host, behind] if lock_step else given_s
    return Flow(tuple(samples), tuple(enter_s), tuple(leave_s))
