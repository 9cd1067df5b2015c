"""Forward passes through stages whose hosts take turns: micro-batch after micro-batch, each on another host.

A route is the host of each stage that one micro-batch meets. With one host a stage there is one; with two and three
hosts there are six, and every sixth micro-batch takes the same. Each route is a chain of the schedule.
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
    """The hosts that so many micro-batches meet, or as many of them until hosts come again; each stage has so many.

    Hosts are counted stage by stage. Those of the first stage take turns from the second one on, so that the first,
    which hands the others their inputs, has handed out all of them before it begins with its own.

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
        for number in range(min(lcm(*hosts), micro_batches))
    ]


def routes_of(program: Program) -> list[tuple[int, ...]]:
    """The devices that micro-batches 0, 1 and so on of a program meet, until they come again.

    >>> import hpgo
    >>> routes = [(0, 1), (0, 2)]
    >>> stages = [([layer], [device]) for route in routes for layer, device in zip("ab", route)]
    >>> routes_of(hpgo.program(along(routes, 4), stages, micro_batch_size=1, global_batch_size=4))
    [(0, 1), (0, 2)]
    """
    length, stages = program.schedule.chain_length, program.stages
    return [
        tuple(stage.devices[0] for stage in stages[begin : begin + length]) for begin in range(0, len(stages), length)
    ]


def hosts_of(routes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each stage those that take turns at it, by number.

    >>> hosts_of([(0, 1), (0, 2)])
    [(0,), (1, 2)]
    """
    return [tuple(sorted(set(hosts))) for hosts in zip(*routes, strict=True)]


def are_regular(routes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the hosts of each stage are others than those of all other stages, and come one after the other.

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
    ) and all(len(routes) % len(known) == 0 for known in hosts)


def along(routes: Sequence[tuple[int, ...]], micro_batches: int) -> Schedule:
    """Orders of so many micro-batches along `routes`: ranks are the hosts that have any, by number.

    Micro-batches of a chain have numbers of their own, chain by chain.

    >>> along([(0, 1), (0, 2)], 3).orders
    [['0F0', '2F2', '0F1'], ['1F0', '1F1'], ['3F2']]
    """
    if len(routes) == 1:
        return schedule(_FORWARD_ONLY, ranks=len(routes[0]), micro_batches=micro_batches)
    chains = min(len(routes), micro_batches)
    counts = [len(range(chain, micro_batches, chains)) for chain in range(chains)]
    begins = list(accumulate(counts, initial=0))
    lines: dict[int, list[str]] = {host: [] for host in sorted({host for route in routes[:chains] for host in route})}
    for number in range(micro_batches):
        turn, chain = divmod(number, chains)
        for stage, host in enumerate(routes[chain]):
            lines[host].append(f"{chain * len(routes[chain]) + stage}F{begins[chain] + turn}")
    return Schedule.from_text("\n".join(map(",".join, lines.values())), name=_FORWARD_ONLY)
