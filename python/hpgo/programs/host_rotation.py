"""Inference through stages with several hosts that take turns: each micro-batch runs on the next host of a stage.

A route is the host of each stage that one micro-batch passes. With one host per stage there is one route. With 2 and 3
hosts there are 6, and every sixth micro-batch takes the same route. Each route is a chain of the schedule.
"""

from __future__ import annotations

from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

from hpgo.programs.schedule import Schedule, schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.names import ScheduleName
    from hpgo.programs.program import Program

_FORWARD_ONLY: ScheduleName = "forward_only"


def routes_through(hosts: Sequence[int], micro_batches: int) -> list[tuple[int, ...]]:
    """Return the routes of `micro_batches` micro-batches until they repeat. `hosts` is the number of hosts per stage.

    Hosts are numbered stage by stage. On the first stage, the turn starts with the second host. The first host sends
    the inputs to the others, so it should have sent all of them before it starts to compute.

    >>> routes_through([1, 2], 8)
    [(0, 1), (0, 2)]
    >>> routes_through([2, 1], 8)
    [(1, 2), (0, 2)]
    >>> len(routes_through([23, 29, 31], 3))
    3
    """
    begins = list(accumulate(hosts, initial=0))
    return [
        tuple(begins[stage] + (number + (stage == 0)) % count for stage, count in enumerate(hosts))
        # The least common multiple can be far larger than the number of micro-batches.
        for number in range(min(lcm(*hosts), micro_batches))
    ]


def routes_of(program: Program) -> list[tuple[int, ...]]:
    """Return the devices that micro-batches 0, 1, … of a program pass, until the routes repeat.

    >>> import hpgo
    >>> routes = [(0, 1), (0, 2)]
    >>> stages = [([layer], [device]) for route in routes for layer, device in zip("ab", route)]
    >>> routes_of(hpgo.program(along(routes, 4), stages, pipeline_micro_batch_size=1, global_batch_size=4))
    [(0, 1), (0, 2)]
    """
    length, stages = program.schedule.stages_per_pipeline, program.stages
    return [
        tuple(stage.devices[0] for stage in stages[begin : begin + length]) for begin in range(0, len(stages), length)
    ]


def hosts_of(routes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the hosts of each stage, in ascending order.

    >>> hosts_of([(0, 1), (0, 2)])
    [(0,), (1, 2)]
    """
    return [tuple(sorted(set(hosts))) for hosts in zip(*routes, strict=True)]


def are_regular(routes: Sequence[tuple[int, ...]]) -> bool:
    """Whether no host serves two stages, and the hosts of each stage take turns in a fixed order.

    >>> are_regular([(0, 1), (0, 2)]), are_regular([(0, 1), (1, 0)]), are_regular([(0, 1), (0, 1), (0, 2)])
    (True, False, False)
    """
    hosts = hosts_of(routes)
    if sum(map(len, hosts)) != len({host for route in routes for host in route}):
        return False
    return all(
        route[stage] == routes[number % len(known)][stage]
        for stage, known in enumerate(hosts)
        for number, route in enumerate(routes)
        # Each host of a stage must also appear the same number of times.
    ) and all(len(routes) % len(known) == 0 for known in hosts)


def along(routes: Sequence[tuple[int, ...]], micro_batches: int) -> Schedule:
    """Return the schedule of `micro_batches` micro-batches along `routes`. Its ranks are the hosts that have work.

    Micro-batches are numbered chain by chain, so that each chain has a contiguous range.

    >>> along([(0, 1), (0, 2)], 3).action_lists
    [['0F0', '2F2', '0F1'], ['1F0', '1F1'], ['3F2']]
    """
    # A single route is an ordinary pipeline. Use the standard family, so that reports and pictures call it by its name.
    if len(routes) == 1:
        return schedule(_FORWARD_ONLY, ranks=len(routes[0]), micro_batches=micro_batches)
    chains = min(len(routes), micro_batches)
    counts = [len(range(chain, micro_batches, chains)) for chain in range(chains)]
    begins = list(accumulate(counts, initial=0))
    lines: dict[int, list[str]] = {host: [] for host in sorted({host for route in routes[:chains] for host in route})}
    # Build the lines in the order in which micro-batches enter, so that a host serves them in this order.
    for number in range(micro_batches):
        turn, chain = divmod(number, chains)
        for stage, host in enumerate(routes[chain]):
            lines[host].append(f"{chain * len(routes[chain]) + stage}F{begins[chain] + turn}")
    return Schedule.from_text("\n".join(map(",".join, lines.values())), name=_FORWARD_ONLY)
