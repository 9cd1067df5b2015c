"""Prices a plan anew, from its stages, orders and assumptions: that a saved price is still the price."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hpgo.base.errors import ArgumentError
from hpgo.planning.files import digest_of
from hpgo.planning.planner import rows_of
from hpgo.planning.plans import Digest
from hpgo.planning.question import SCHEDULES, Question
from hpgo.planning.search import price

if TYPE_CHECKING:
    from hpgo.machine.cluster import Cluster
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

    _Source = TypeVar("_Source", Profile, Cluster)


def reprice(plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None) -> Plan:
    """`plan` priced anew, as `Plan.reprice` describes it: nothing is chosen again, nothing is searched."""
    assumed = plan.assumed
    profile = _known("profile", plan.profile, assumed.profile, profile)
    cluster = _known("cluster", plan.cluster, assumed.cluster, cluster)
    question = Question.of(
        profile,
        cluster,
        global_batch_size=plan.global_batch_size,
        schedule=plan.schedule,
        micro_batch_size=plan.micro_batch_size,
        min_micro_batch_size=assumed.smallest_share,
        recompute=plan.recompute,
        equal_shares=assumed.equal_shares,
        overlap=assumed.overlap,
        memory=assumed.memory,
        count_loading=assumed.count_loading,
    )
    stages = rows_of(question.profile, [(stage.layers, stage.devices) for stage in plan.stages])
    if plan.schedule in SCHEDULES:
        return price(question, stages, [stage.in_flight for stage in plan.stages])
    from hpgo.planning import choose  # loads what simulates, which pricing does without

    # With one micro-batch in flight, activations are those of one.
    base = price(replace(question, schedule="1f1b"), stages, [1] * len(stages))
    return choose.run_as(base, plan.orders())


def _known(kind: str, name: str, saved: _Source | Digest, given: _Source | None) -> _Source:
    """The profile or cluster that the plan was made with. Raises ArgumentError if it isn't at hand."""
    if given is None:
        if isinstance(saved, Digest):
            raise ArgumentError(
                f"the plan was saved without its {kind} `{name}`",
                f"give the {kind} that it was made with: `--{kind} FILE`, or `reprice({kind}=…)`",
            )
        return saved
    expected = saved if isinstance(saved, Digest) else digest_of(saved)
    if digest_of(given) != expected:
        raise ArgumentError(
            f"the plan was made with another {kind}: `{given.name}` has SHA-256 {digest_of(given).sha256[:12]}…, and"
            f" `{name}` has {expected.sha256[:12]}…",
            f"give the {kind} that it was made with, or price its stages on this one with `hpgo evaluate PROFILE"
            " --stages …`",
        )
    return given
