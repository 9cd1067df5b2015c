"""Evaluate a saved plan again, from its stages, schedule and assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.planning.files import known_source
from hpgo.planning.laws import checked
from hpgo.planning.planner import rows_of
from hpgo.planning.problem import SCHEDULES, PlanningProblem
from hpgo.planning.search import evaluated

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan


def reevaluate(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> Plan:
    """Return `plan` with its step time computed again. `Plan.reevaluate` documents it; nothing is searched."""
    assumed = plan.assumed
    profile = known_source("profile", plan.profile, assumed.profile, profile)
    cluster = known_source("cluster", plan.cluster, assumed.cluster, cluster)
    question = PlanningProblem.of(
        profile,
        cluster,
        global_batch_size=plan.global_batch_size,
        schedule=plan.schedule,
        # A fixed size leaves the problem with only one candidate, the saved plan.
        pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
        min_samples_per_replica=assumed.min_samples_per_replica,
        recompute=plan.recompute,
        even_split=assumed.even_split,
        overlap=assumed.overlap,
        overlap_p2p_comm=assumed.overlap_p2p_comm,
        shares_by_speed=assumed.shares_by_speed,
        memory=assumed.memory,
        include_data_loading=assumed.include_data_loading,
    )
    stages = rows_of(question.profile, [(stage.layers, stage.devices) for stage in plan.stages])
    # The planner derives the order of 1F1B, eager 1F1B and GPipe from the limits in flight. All other schedules need
    # the recorded order, because it may have been fitted to the times.
    recompute = [stage.recompute for stage in plan.stages]
    if plan.schedule in SCHEDULES:
        max_in_flight = [stage.max_in_flight for stage in plan.stages]
        return checked(evaluated(question, stages, max_in_flight=max_in_flight, recompute=recompute))
    return checked(evaluated(question, stages, schedule=plan.to_schedule(), recompute=recompute))
