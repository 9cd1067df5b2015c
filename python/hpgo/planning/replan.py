"""Plan again for fewer devices: solve the problem of a plan on the first devices of its cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.planning import planner
from hpgo.planning.files import known_source

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan


def replan(plan: Plan, devices: int) -> Plan:
    """Return the best plan on the first `devices` devices. `Plan.replan` documents it."""
    assumed = plan.assumed
    profile = known_source("profile", plan.profile, assumed.profile, None)
    cluster = known_source("cluster", plan.cluster, assumed.cluster, None)
    options: dict[str, Any] = {"schedule": "auto" if plan.schedules else plan.schedule}
    # With a framework, its default schedule is taken again: the old one may not fit on fewer devices.
    if plan.restriction is not None:
        version = plan.restriction.version
        options = {"framework": plan.restriction.framework + (f"@{version}" if version else "")}
    return planner.plan(
        profile,
        cluster.first(devices),
        global_batch_size=plan.global_batch_size,
        min_samples_per_replica=assumed.min_samples_per_replica,
        recompute="auto",  # Fewer devices have less memory in total.
        even_split=assumed.even_split,
        overlap=assumed.overlap,
        overlap_p2p_comm=assumed.overlap_p2p_comm,
        shares_by_speed=assumed.shares_by_speed,
        memory=assumed.memory,
        include_data_loading=assumed.include_data_loading,
        tolerance=None if plan.memory_preference is None else plan.memory_preference.tolerance,
        **options,
    )
