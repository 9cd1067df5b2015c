"""Ranks that come back fewer, or more: the first of them plans for as many as there are, and tells the others."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace

import torch.distributed as dist

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError, InfeasibleError, RunError
from hpgo.machine.cluster import Cluster
from hpgo.planning.plan_files import read_any
from hpgo.planning.plans import Plan
from hpgo.runtime.progress import HERE
from hpgo.runtime.rendezvous import LOST, meet, place, translate_errors

_KEY = "plan"
_FIRST = 0
"""The rank that plans."""


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """What the ranks of a launch run."""

    plan: Plan
    ranks: int
    planned_s: float | None
    """For how long it was planned again; None if the file's own plan is for as many ranks."""


def settle(file: str, timeout_s: float) -> ElasticPlan:
    """The plan for as many ranks as there are, the same on all: that in `file`, or one for the first of its devices.

    Raises ArgumentError for a file that holds no plan, or one that can't be planned again; InfeasibleError if no plan
    fits the ranks that are there; RunError if these are not some of the cluster's machines, whole ones, if the launcher
    is one whose ranks can't come back, or if rank 0 is lost.
    """
    rank, size = place()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise RunError(
            "torchrun keeps one store for all that it starts, on a machine that may be the one which is lost",
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts, on all machines",
        )
    store = dist.PrefixStore("hpgo/elastic", meet(timeout_s))
    if rank == _FIRST:
        HERE.does("the planning")
        store.set(_KEY, _planned(file, size))
    with HERE.waiting(_FIRST), translate_errors("the plan of rank 0 doesn't come", LOST):
        text = store.get(_KEY)
    HERE.does("the start")
    planned_s, written = json.loads(text)
    return ElasticPlan(Plan.from_json(written, source="the plan of rank 0"), size, planned_s)


def _planned(file: str, size: int) -> str:
    """For how long it was planned, and the plan; without its profile, which may be large and nobody needs."""
    plan = read_any(file)
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"{file} doesn't say what it was planned from, and elastic runs plan again",
            "give a plan of `hpgo plan -o`",
            code="missing",
        )
    cluster = plan.assumed.cluster
    if not isinstance(cluster, Cluster):
        raise ArgumentError(
            f"{file} was saved without profile and cluster, and elastic runs plan again",
            "save it without `--no-embed`",
            code="mismatch",
        )
    _check_machines(cluster, size)
    planned_s = None
    if size != cluster.devices:
        begin_s = time.perf_counter()
        try:
            plan = plan.replan(size)
        except InfeasibleError as error:
            raise error.as_kind(InfeasibleError, f"for {pluralize(size, 'rank')}, {error.message}") from None
        planned_s = time.perf_counter() - begin_s
    return json.dumps([planned_s, replace(plan, alternatives=(), schedules=()).to_json(embed=False)])


def _check_machines(cluster: Cluster, size: int) -> None:
    """Raises an error unless `size` ranks are some machines of the cluster, whichever they are."""
    kinds = {(machine.device, machine.count) for machine in cluster.nodes}
    if len(kinds) > 1:
        raise ArgumentError(
            f"the machines of cluster `{cluster.name}` differ, and nobody tells which of them are left",
            "elastic runs are for machines that are alike",
        )
    if size > cluster.devices:
        raise RunError(
            f"{size} ranks were started, and cluster `{cluster.name}` has {pluralize(cluster.devices, 'device')}",
            "plan for as many as may come: four machines for `--nnodes 3:4`",
            code="wrong_state",
        )
    count, local = cluster.nodes[0].count, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len(cluster.nodes) > 1 and local != count:
        raise RunError(
            f"torchrun has started {pluralize(local, 'rank')} on this machine, and those of cluster `{cluster.name}` "
            f"have {pluralize(count, 'device')}",
            f"give torchrun `--nproc-per-node {count}`",
            code="wrong_state",
        )
