"""Elastic runs: after ranks were lost or added, rank 0 plans for the present ranks and sends the plan to all."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace

import torch.distributed as dist

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError, InfeasibleError, RunError
from hpgo.hardware.cluster import Cluster
from hpgo.planning.plan_files import read_any
from hpgo.planning.plans import Plan
from hpgo.runtime.progress import HERE
from hpgo.runtime.rendezvous import LOST, meet, place, translate_errors

_KEY = "plan"
_FIRST = 0
"""Rank that plans for all ranks."""


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """The plan that all ranks of a launch run."""

    plan: Plan
    ranks: int
    planned_s: float | None
    """Time of the new planning in seconds. None: the plan in the file is for this number of ranks."""


def settle(file: str, timeout_s: float) -> ElasticPlan:
    """Return the same plan on all ranks: the one in `file`, or a new one for the first devices of its cluster.

    Raises ArgumentError for a file that holds no plan, or one that can't be planned again. Raises InfeasibleError if no
    plan fits the present ranks. Raises RunError if the ranks are not whole nodes of the cluster, if the launcher can't
    restart ranks, or if rank 0 is lost.
    """
    rank, size = place()
    # This variable means that torchrun's agent provides the store. If the node of the agent is lost, so is the store.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise RunError(
            "torchrun keeps the store of the run on one node, but this node may be lost",
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes",
        )
    store = dist.PrefixStore("hpgo/elastic", meet(timeout_s))
    # Only one rank plans, so that all ranks run the same plan.
    if rank == _FIRST:
        HERE.does("the planning")
        store.set(_KEY, _planned(file, size))
    with HERE.waiting(_FIRST), translate_errors("the plan of rank 0 doesn't come", LOST):
        text = store.get(_KEY)
    HERE.does("the start")
    planned_s, written = json.loads(text)
    return ElasticPlan(Plan.from_json(written, source="the plan of rank 0"), size, planned_s)


def _planned(file: str, size: int) -> str:
    """Return the planning time and the plan as JSON, without its profile, which may be large and is not needed."""
    plan = read_any(file)
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"{file} is not a plan of `hpgo plan`, but elastic runs have to plan again",
            "write one with `hpgo plan -o plan.json`",
            code="missing",
        )
    cluster = plan.assumed.cluster
    if not isinstance(cluster, Cluster):
        raise ArgumentError(
            f"{file} has no profile and cluster, but elastic runs have to plan again",
            "write it with `hpgo plan -o`, without `--no-embed`",
            code="mismatch",
        )
    _check_nodes(cluster, size)
    planned_s = None
    if size != cluster.devices:
        begin_s = time.perf_counter()
        try:
            plan = plan.replan(size)
        except InfeasibleError as error:
            raise error.as_kind(InfeasibleError, f"for {pluralize(size, 'rank')}, {error.message}") from None
        planned_s = time.perf_counter() - begin_s
    return json.dumps([planned_s, replace(plan, alternatives=(), schedules=()).to_json(embed=False)])


def _check_nodes(cluster: Cluster, size: int) -> None:
    """Raise an error unless `size` ranks are whole nodes of the cluster, no matter which."""
    # The launcher does not report which nodes are left, so all nodes must be equal.
    kinds = {(node.device, node.count) for node in cluster.nodes}
    if len(kinds) > 1:
        raise ArgumentError(
            f"the nodes of cluster `{cluster.name}` differ, but it is unknown which of them are left",
            "plan for equal nodes",
        )
    if size > cluster.devices:
        raise RunError(
            f"{size} ranks were started, but cluster `{cluster.name}` has {pluralize(cluster.devices, 'device')}",
            "plan for the maximum number of nodes: four for `--nnodes 3:4`",
            code="wrong_state",
        )
    count, local = cluster.nodes[0].count, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len(cluster.nodes) > 1 and local != count:
        raise RunError(
            f"torchrun has started {pluralize(local, 'rank')} on this node, but nodes of cluster `{cluster.name}` "
            f"have {pluralize(count, 'device')}",
            f"give torchrun `--nproc-per-node {count}`",
            code="wrong_state",
        )
