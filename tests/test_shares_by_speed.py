"""Shares by speed: prices against the twin, plans against every plan there is, files, programs and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import chance
import pytest
import twin
import twin_steps
from test_brute_force import asked, best_step_s
from test_twin import MEMORY, TIMES

import hpgo


def differences(seed: int) -> tuple[list[object], bool]:
    """Terms of a random plan on which package and twin differ, and whether any stage has shares by speed."""
    random = Random(seed)
    case = chance.case(random, counts=(1, 5), batch_sizes=[(1,), (2,), (1, 2, 4), (1, 3)])
    if random.random() < 0.4:
        options = dict.fromkeys(("schedule", "recompute", "overlap", "shard_optimizer", "even_split"))
        question = chance.Question(case.profile, case.cluster, 1, **options)
        case = replace(case, profile=chance.typed(random, question).profile)
    assumed = twin.Assumed(
        micro_batches=random.randint(1, 6),
        micro_batch=case.minimum(random.choice([4, 5, 6, 8, 12, 17])),
        schedule=random.choice(["1f1b", "eager_1f1b", "gpipe"]),
        recompute=random.random() < 0.3,
        overlap=random.random() < 0.6,
        overlap_p2p_comm=seed % 3 > 0,
        shard_optimizer=random.random() < 0.4,
        shares_by_speed=True,
    )
    plan = case.evaluate(assumed)
    ours = case.price(assumed, plan)
    in_flight = [stage.max_in_flight for stage in plan.stages]
    terms: list[tuple[object, float, float]] = [
        ("step_s", plan.step_s, twin_steps.step_s(assumed.micro_batches, ours, in_flight))
    ]
    wrong: list[object] = []
    for number, (stage, mine) in enumerate(zip(plan.stages, ours, strict=True)):
        if stage.samples_by_replica != mine.shares or stage.samples_per_replica != mine.share:
            wrong.append((seed, number, stage.samples_by_replica, mine.shares))
        terms += (((number, name), getattr(stage, name), getattr(mine, name)) for name in TIMES[:-1])
        tightest = mine.tightest(stage.max_in_flight)
        held = tightest.holds_bytes(stage.max_in_flight)
        terms.append(((number, "free"), stage.free_bytes + 1e12, tightest.capacity_bytes - held + 1e12))
        if not mine.by_device:
            terms += (((number, name), getattr(stage.memory, name), getattr(mine, name)) for name in MEMORY)
    wrong += [(seed, *term) for term in terms if not math.isclose(*term[1:], rel_tol=1e-9)]
    return wrong, any(stage.samples_by_replica for stage in plan.stages)


def test_random_plans_cost_what_the_twin_says() -> None:
    found = [differences(seed) for seed in range(150)]
    assert [term for wrong, _ in found for term in wrong] == []
    assert sum(has_shares for _, has_shares in found) > 40


def falsified(seed: int, *, typed: bool = False) -> tuple[list[object], bool]:
    """What is wrong with the plan or its bound, and whether it has shares by speed."""
    random = Random(seed)
    question = replace(asked(seed), even_split=False, global_batch=random.choice([4, 6, 8]))
    # Plans with replicas are rarely the best if the all-reduce of their gradients takes long.
    layers = (replace(layer, parameter_bytes=1e-3 * layer.parameter_bytes) for layer in question.profile.layers)
    nodes = tuple(
        replace(node, device=replace(node.device, speed=(1.0, 2.0)[number % 2], name=f"type{number % 2}"))
        for number, node in enumerate(question.cluster.nodes)
    )
    question = replace(
        question,
        profile=replace(question.profile, layers=tuple(layers)),
        cluster=replace(question.cluster, nodes=nodes),
    )
    if typed:
        question = chance.typed(random, question)
    if question.recompute == "auto":
        question = replace(question, recompute=random.random() < 0.5)
    by_speed = replace(question, shares_by_speed=True)
    even_s, by_speed_s = best_step_s(question), best_step_s(by_speed)
    best = min(even_s, by_speed_s)
    plan = by_speed.plan()
    if plan is None:
        return (["nothing is said to fit", best] if best < math.inf else []), False
    bound_s = plan.lower_bound_s
    assert bound_s is not None
    # The step is the best one of all plans if the bound proves that.
    assert plan.optimality_gap is not None
    most_s = math.inf if plan.optimality_gap > 1e-9 else best * (1 + 2e-9)
    holds = bound_s * (1 - 1e-9) <= best <= plan.step_s * (1 + 1e-9) <= most_s * (1 + 1e-9)
    wrong = [] if holds else [seed, bound_s, even_s, by_speed_s, plan.step_s]
    return wrong, plan.assumed.shares_by_speed


def test_no_plan_of_all_beats_a_bound_or_the_plan() -> None:
    found = [falsified(seed, typed=seed % 2 == 0) for seed in range(24)]
    assert [wrong for wrong, _ in found if wrong] == []
    assert sum(has_shares for _, has_shares in found) > 1


def mixed(memory_gb: float = 16.0) -> tuple[hpgo.Profile, hpgo.Cluster]:
    """Three layers, and two machines of which the second is twice as fast."""
    profile = hpgo.Profile.chain(
        "toy",
        batch_size=1,
        forward_s=[1.0, 2.0, 1.0],
        backward_s=[2.0, 4.0, 2.0],
        activation_bytes=[1e3] * 3,
        parameter_bytes=[1e3] * 3,
    )
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=2, intra_gbit_s=100, inter_gbit_s=10)
    slow, fast = (
        replace(node, device=replace(node.device, name=name, speed=speed, memory_bytes=memory_gb * 1e9))
        for node, name, speed in ((cluster.nodes[0], "slow", 1.0), (cluster.nodes[-1], "fast", 2.0))
    )
    return profile, replace(cluster, nodes=(replace(slow, count=2), replace(fast, count=2)))


def test_replicas_twice_as_fast_get_twice_as_many_samples() -> None:
    profile, cluster = mixed()
    even = hpgo.plan(profile, cluster, global_batch_size=24)
    plan = hpgo.plan(profile, cluster, global_batch_size=24, shares_by_speed=True)
    assert plan.step_s == pytest.approx(48.0, rel=1e-6)
    assert even.step_s == pytest.approx(54.0, rel=1e-6)
    assert plan.optimality_gap == 0
    assert [stage.samples_by_replica for stage in plan.stages] == [(1, 1, 2, 2)]
    assert hpgo.Plan.from_json(plan.to_json()) == plan
    assert plan.reevaluate().stages == plan.stages
    assert [rows for stage in plan.program().stages for rows in stage.rows] == [
        range(1), range(1, 2), range(2, 4), range(4, 6),
    ]  # fmt: skip


def test_the_order_of_devices_does_not_change_their_shares() -> None:
    profile, cluster = mixed()
    plan = hpgo.evaluate(profile, cluster, [(3, [3, 0, 2, 1])], global_batch_size=24, shares_by_speed=True)
    assert dict(zip(plan.stages[0].devices, plan.stages[0].samples_by_replica, strict=True)) == {0: 1, 1: 1, 2: 2, 3: 2}


def test_devices_of_one_speed_get_the_plan_without_the_option() -> None:
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=2, intra_gbit_s=100, inter_gbit_s=10)
    profile = mixed()[0]
    plans = [hpgo.plan(profile, cluster, global_batch_size=6, shares_by_speed=by_speed) for by_speed in (False, True)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"even_split": True}, "even_split"),
        ({"schedule": "zb_h1"}, "only plans under 1f1b"),
        ({"schedule": "auto"}, "only plans under 1f1b"),
        ({"tolerance": 0.01}, "tolerance"),
        ({"framework": "torch"}, "the same number of samples"),
    ],
)
def test_shares_by_speed_are_refused_where_they_cannot_be(options: dict[str, object], message: str) -> None:
    profile, cluster = mixed()
    with pytest.raises(hpgo.errors.ArgumentError, match=message):
        hpgo.plan(profile, cluster, global_batch_size=24, shares_by_speed=True, **options)


def test_exports_refuse_shares_by_speed() -> None:
    profile, cluster = mixed()
    sizes = {"global_batch_size": 24, "pipeline_micro_batch_size": 12}
    plan = hpgo.plan(profile, cluster, **sizes, shares_by_speed=True)
    with pytest.raises(hpgo.errors.ArgumentError, match="2 to 4 of each micro-batch"):
        hpgo.export.torchtitan(plan)
