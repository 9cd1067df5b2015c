"""Measure how well `hpgo.plan` keeps its time limit on clusters of nodes that differ.

    python research/deadlines.py                      # prints the table; half a minute
    python research/deadlines.py research/benchmark-tables.md   # fills it in between its markers

Machines have one to eight devices, and differ in speed and memory: six types of them, or each one of its own.
"""

from __future__ import annotations

import time
from random import Random

from pages import tell

import hpgo
from hpgo.base.tables import markdown
from hpgo.hardware.cluster import Device, Node

LINKS = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=80, inter_gbit_s=8)
SCHEDULES = ("eager_1f1b", "interleaved", "zb", "auto")
TYPES = 6


def uneven(nodes: int, types: int) -> hpgo.Cluster:
    """Return a cluster of machines of `types` types, the same in each run."""
    chance = Random(nodes)  # noqa: S311 -- machines, not secrets
    devices = [Device(f"t{at}", chance.uniform(4e9, 16e9), chance.uniform(0.3, 3.0)) for at in range(types)]
    made = tuple(Node(chance.choice(devices), chance.randint(1, 8)) for _ in range(nodes))
    return hpgo.Cluster(name=f"{nodes} nodes", nodes=made, intra=LINKS.intra, inter=LINKS.inter)


def chain(layers: int) -> hpgo.Profile:
    """Return a chain of layers with random times and sizes."""
    chance = Random(layers)  # noqa: S311 -- layers, not secrets
    each = [chance.uniform(0.5e-3, 1.5e-3) for _ in range(layers)]
    sizes = [chance.uniform(1e5, 1e7) for _ in range(layers)]
    return hpgo.Profile.chain(
        f"{layers} layers", batch_size=1, forward_s=each, backward_s=[2 * one for one in each], activation_bytes=sizes,
        parameter_bytes=sizes,
    )  # fmt: skip


def took_s(profile: hpgo.Profile, cluster: hpgo.Cluster, schedule: str, time_limit_s: float) -> str:
    """Return the seconds from the question to the answer, with a mark if there is no answer."""
    begin_s, found = time.monotonic(), ""
    try:
        hpgo.plan(profile, cluster, global_batch_size=1024, schedule=schedule, time_limit_s=time_limit_s)  # type: ignore[arg-type]
    except hpgo.errors.TimeLimitError:
        found = ", no plan"
    return f"{time.monotonic() - begin_s:.2f} s{found}"


def table() -> str:
    """Return a row for each question and a column for each schedule."""
    bert, rows = hpgo.read_profile("bert-48"), []
    for profile, nodes, types, time_limit_s in (
        (bert, 200, 200, 0.5), (bert, 800, 800, 0.5), (bert, 2_000, TYPES, 0.5), (bert, 20_000, TYPES, 1.0),
        (chain(500), 800, TYPES, 1.0), (chain(2_000), 2_000, TYPES, 2.0),
    ):  # fmt: skip
        cluster = uneven(nodes, types)
        asked = f"{profile.name}, {nodes:,} machines of {types} types, {cluster.devices:,} devices"
        taken = [took_s(profile, cluster, schedule, time_limit_s) for schedule in SCHEDULES]
        rows.append([asked, f"{time_limit_s} s", *taken])
    return "\n".join(markdown(["question", "deadline", *(f"`{name}`" for name in SCHEDULES)], rows))


if __name__ == "__main__":
    tell("deadlines", table, __doc__)
