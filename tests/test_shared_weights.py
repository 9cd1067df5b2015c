"""Weights that layers share: counted once, copied and summed where stages part them, in every price alike."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import chance
import pytest
import twin
import twin_steps
from refusals import refused
from test_brute_force import ways_to_cut, ways_to_place
from toys import chain

import hpgo
from hpgo import export
from hpgo.model.formats import native

if TYPE_CHECKING:
    from pathlib import Path

GB = 1e9
TIMES = ("grad_reduce_s", "exposed_grad_reduce_s", "forward_s", "backward_s", "transfer_s")
MEMORY = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "saved_activation_bytes")


def tied(profile: hpgo.Profile, *ties: tuple[tuple[str, ...], float]) -> hpgo.Profile:
    return replace(profile, tied_weights=tuple(hpgo.TiedWeight(layers, size) for layers, size in ties))


def nodes(*counts: int, gbit_s: float = 8.0, memory: str = "64 GB") -> hpgo.Cluster:
    rows = [{"devices": count, "memory": memory} for count in counts]
    link = {"bandwidth": gbit_s / 8 * 1e9, "latency": 1e-3}
    document = {"hpgo_cluster": 1, "name": "few", "nodes": rows, "intra": link, "inter": link}
    return hpgo.Cluster.from_document(document, file="few")


def test_random_plans_with_ties_cost_what_a_model_written_from_the_pages_says() -> None:
    wrong: list[object] = []
    parted = 0
    for seed in range(600):
        random = Random(seed)
        case = chance.case(random, counts=(2, 7), batch_sizes=[(1,), (1, 2, 4)], ties=random.randint(1, 3))
        assumed = twin.Assumed(
            micro_batches=random.randint(1, 6),
            micro_batch=case.minimum(random.choice([4, 5, 8])),
            schedule=random.choice(["1f1b", "eager_1f1b", "gpipe"]),
            overlap=random.random() < 0.6,
            shard_optimizer=random.random() < 0.4,
        )
        plan = case.evaluate(assumed)
        ours = case.price(assumed, plan)
        step_s = twin_steps.step_s(assumed.micro_batches, ours, [stage.max_in_flight for stage in plan.stages])
        terms = [(plan.step_s, step_s), (plan.timeline().makespan_s, step_s)]
        for stage, mine in zip(plan.stages, ours, strict=True):
            terms += ((getattr(stage, name), getattr(mine, name)) for name in TIMES)
            terms += ((getattr(stage.memory, name), getattr(mine, name)) for name in MEMORY)
        wrong += [(seed, *both) for both in terms if not math.isclose(*both, rel_tol=1e-9)]
        parted += any(tie.parameter_bytes for tie in plan.split_tied_weights)
    assert wrong == []
    assert parted > 150


def best_step_s(question: chance.Question) -> float:
    """The shortest step of all plans that fit, each priced by the twin; infinite if none does."""
    counts = [node.count for node in question.cluster.nodes]
    best_s = math.inf
    for cuts in ways_to_cut(question.order(), question.profile.edges):
        for placed in ways_to_place(question.cluster.nodes, counts, len(cuts)):
            stages = [(ids, devices) for (_, ids), devices in zip(cuts, placed, strict=True)]
            for size in (size for size in range(1, question.global_batch + 1) if question.global_batch % size == 0):
                if size < max(map(len, placed)):
                    continue
                for assumed in question.assumed(size):
                    priced = twin.price(asdict(question.profile), asdict(question.cluster), assumed, stages)
                    for windows in twin_steps.windows(assumed, priced):
                        best_s = min(best_s, twin_steps.step_s(assumed.micro_batches, priced, windows))
    return best_s


def test_bounds_hold_and_plans_are_nearly_the_best_of_all_where_layers_share_weights() -> None:
    below, found, exact = [], 0, 0
    for seed in range(60):
        random = Random(seed)
        ids = [f"layer{at}" for at in range(3)]
        plain = chain(
            [random.uniform(0.1, 1.0) for _ in ids],
            [chance.between(random, 1e6, 1e8) for _ in ids],
            [chance.between(random, 1e6, 1e9) for _ in ids],
        )
        holders = tuple(random.sample(ids, random.choice([2, 2, 3])))
        share = random.choice([0.3, 1.0]) * next(
            layer.parameter_bytes for layer in plain.layers if layer.id == holders[0]
        )
        question = chance.Question(
            tied(plain, (holders, share)),
            nodes(*random.choice([(2,), (1, 1), (2, 1)]), memory=random.choice(["64 GB", "6 GB"])),
            global_batch=random.choice([2, 4]),
            schedule=random.choice(["1f1b", "eager_1f1b", "gpipe"]),
            recompute=False,
            overlap=random.random() < 0.5,
            shard_optimizer=False,
            even_split=False,
        )
        best_s, plan = best_step_s(question), question.plan()
        assert (plan is None) == math.isinf(best_s), seed
        if plan is None:
            continue
        found += 1
        assert plan.lower_bound_s is not None
        if plan.lower_bound_s > best_s * (1 + 1e-9) or plan.step_s < best_s * (1 - 1e-9):
            below.append((seed, plan.lower_bound_s, best_s, plan.step_s))
        exact += plan.step_s <= best_s * (1 + 1e-9)
    assert below == []
    assert found > 40
    assert exact >= 0.95 * found


@pytest.mark.parametrize("schedule", ["eager_1f1b", "gpipe", "zb_h1", "zb_v", "interleaved"])
def test_a_tie_of_no_bytes_changes_nothing(schedule: str) -> None:
    plain = chain([0.3, 0.5, 0.2, 0.7, 0.4, 0.6], 1e7, 1e8)
    question: dict[str, Any] = {"global_batch_size": 4, "schedule": schedule}
    one = hpgo.plan(plain, nodes(2), **question)
    other = hpgo.plan(tied(plain, (("layer0", "layer5"), 0.0)), nodes(2), **question)
    assert other.step_s == one.step_s
    assert other.stages == one.stages
    assert other.lower_bound_s == one.lower_bound_s


def test_whoever_holds_a_weight_keeps_its_bytes_and_all_their_devices_sum_it() -> None:
    profile = tied(chain([1.0] * 3, 0.0, [4e8, 1e8, 0.0]), (("layer0", "layer2"), 4e8))
    question: dict[str, Any] = {"global_batch_size": 4, "pipeline_micro_batch_size": 4, "overlap": False}
    whole = hpgo.evaluate(profile, nodes(4), [(3, [0, 1, 2, 3])], **question)
    assert whole.split_tied_weights == ()
    assert whole.stages[0].memory.weights_bytes == 5e8
    first, second = hpgo.evaluate(profile, nodes(4), [(1, [0]), (2, [1, 2])], **question).stages
    assert first.memory.weights_bytes == 4e8
    assert second.memory.weights_bytes == 5e8
    three = 2 * 2 * (4e8 / 3 / 1e9 + 1e-3)  # a ring over three devices
    assert first.exposed_grad_reduce_s == pytest.approx(three)
    assert second.exposed_grad_reduce_s == pytest.approx(2 * 1 * (1e8 / 2 / 1e9 + 1e-3) + three)


def test_devices_that_hold_both_ends_hold_a_shared_weight_once() -> None:
    profile = tied(chain([1.0] * 4, 0.0, [4e8, 1e8, 1e8, 0.0]), (("layer0", "layer3"), 4e8))
    question: dict[str, Any] = {"global_batch_size": 4, "pipeline_micro_batch_size": 1}
    folded = [(1, [0]), (1, [1]), (1, [1]), (1, [0])]
    plan = hpgo.evaluate(profile, nodes(2), folded, schedule="zb_v", **question)
    plain = hpgo.evaluate(replace(profile, tied_weights=()), nodes(2), folded, schedule="zb_v", **question)
    assert plan.split_tied_weights == ()
    assert plan.step_s == plain.step_s
    assert [group.memory.weights_bytes for group in plan.groups] == [4e8, 2e8]
    inner = hpgo.evaluate(profile, nodes(2), [(1, [0]), (1, [1])] * 2, schedule="interleaved", **question)
    assert [group.memory.weights_bytes for group in inner.groups] == [5e8, 5e8]
    assert (
        inner.step_s
        > hpgo.evaluate(
            replace(profile, tied_weights=()), nodes(2), [(1, [0]), (1, [1])] * 2, schedule="interleaved", **question
        ).step_s
    )
    assert inner.timeline().makespan_s == pytest.approx(inner.step_s)


def test_no_cut_is_better_than_the_plan_where_several_stages_are_on_a_device() -> None:
    random = Random(3)
    profile = tied(
        chain([random.uniform(0.1, 1.0) for _ in range(6)], 1e6, [2 * GB, 1e8, 1e8, 1e8, 1e8, 1e8]),
        (("layer0", "layer4"), 2 * GB),
    )
    for schedule in ("zb_v", "interleaved"):
        question: dict[str, Any] = {"global_batch_size": 4, "pipeline_micro_batch_size": 1, "schedule": schedule}
        groups = ([0], [1], [1], [0]) if schedule == "zb_v" else ([0], [1], [0], [1])
        steps_s = []
        for inner in combinations(range(1, 6), 3):
            counts = [end - begin for begin, end in pairwise((0, *inner, 6))]
            steps_s.append(hpgo.evaluate(profile, nodes(2), list(zip(counts, groups, strict=True)), **question).step_s)
        plan = hpgo.plan(profile, nodes(2), **question)
        assert plan.lower_bound_s is not None
        assert plan.lower_bound_s <= min(steps_s) * (1 + 1e-9)
        assert plan.step_s <= min(steps_s) * (1 + 1e-9)


def test_files_of_profiles_and_plans_keep_ties(tmp_path: Path) -> None:
    profile = tied(chain([1.0] * 3, 1e6, [4e8, 1e8, 0.0]), (("layer0", "layer2"), 4e8))
    for text in (native.write_yaml(profile), native.write_json(profile)):
        assert native.parse(text, name="") == profile
    plan = hpgo.evaluate(profile, nodes(2), [(1, [0]), (2, [1])], global_batch_size=4)
    assert plan.split_tied_weights == profile.tied_weights
    plan.save(tmp_path / "plan.json")
    read = hpgo.Plan.read(tmp_path / "plan.json")
    assert read.split_tied_weights == plan.split_tied_weights
    assert read.reevaluate().step_s == plan.step_s
    assert "`layer0` and `layer2` share 400 MB of weights: stages 0, 1 hold a copy" in " ".join(str(plan).split())
    assert "share" not in native.write_yaml(chain([1.0], 1e6, 1e6))


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ([(("layer0",), 1.0)], ("duplicate", "layer0")),
        ([(("layer0", "layer0"), 1.0)], ("duplicate", "layer0")),
        ([(("layer0", "layer9"), 1.0)], ("unknown_name", "layer9")),
        ([(("layer0", "layer1"), 5e8)], ("invalid_profile", "layer0", "parameter_bytes")),
        ([(("layer0", "layer1"), 3e8), (("layer0", "layer2"), 3e8)], ("invalid_profile", "layer0", "parameter_bytes")),
        ([(("layer0", "layer1"), -1.0)], ("invalid_profile", "parameter_bytes")),
    ],
)
def test_ties_that_make_no_sense_are_told(ties: list[tuple[tuple[str, ...], float]], said: tuple[str, ...]) -> None:
    with refused(hpgo.errors.ProfileError, *said):
        tied(chain([1.0] * 3, 1e6, [4e8, 1e8, 0.0]), *ties)


def test_hosts_are_counted_on_to_hold_a_copy_for_each_layer_that_shares() -> None:
    profile = tied(chain([1.0] * 2, 1e6, [4e8, 1e8]), (("layer0", "layer1"), 4e8))
    assert [layer.parameter_bytes for layer in profile.without_tied_weights().layers] == [4e8, 5e8]
    assert profile.parameter_bytes == 5e8
    tight = nodes(1, 1, memory="0.45 GB")
    hpgo.partition(replace(profile, tied_weights=()), tight)
    with pytest.raises(hpgo.errors.InfeasibleError):
        hpgo.partition(profile, tight)


def test_launchers_that_sum_no_shared_weights_refuse_to_part_them() -> None:
    ids = ["embedding", *(f"layers.{at}" for at in range(4)), "head"]
    blocks = chain([0.1, *[1.0] * 4, 0.1], 1e6, [4e8, *[1e8] * 4, 1e6])
    named = tuple(replace(layer, id=name, name=name) for layer, name in zip(blocks.layers, ids, strict=True))
    ends = replace(blocks, layers=named, edges=tuple(pairwise(ids)))
    ends = replace(ends, tied_weights=(hpgo.TiedWeight(("embedding", "head"), 4e8),))
    inner = replace(ends, tied_weights=(hpgo.TiedWeight(("layers.0", "layers.3"), 1e8),))
    question: dict[str, Any] = {"global_batch_size": 4, "schedule": "1f1b"}
    stages = [(3, [0]), (3, [1])]
    for target in ("megatron", "deepspeed"):
        assert export.files(hpgo.evaluate(ends, nodes(2), stages, **question), target)
    assert export.files(hpgo.evaluate(inner, nodes(2), stages, **question), "deepspeed")
    for profile, targets in ((ends, ("torch", "torchtitan")), (inner, ("torch", "torchtitan", "megatron"))):
        plan = hpgo.evaluate(profile, nodes(2), stages, **question)
        for target in targets:
            with refused(hpgo.errors.ArgumentError, "unsupported"):
                export.files(plan, target)
    assert export.files(hpgo.evaluate(inner, nodes(2), [(6, [0, 1])], **question), "torch")


def test_plans_for_launchers_part_only_weights_that_these_sum() -> None:
    ids = ["embedding", *(f"layers.{at}" for at in range(4)), "head"]
    blocks = chain([0.1, *[1.0] * 4, 0.1], 1e6, [4e8, *[1e8] * 4, 1e6])
    named = tuple(replace(layer, id=name, name=name) for layer, name in zip(blocks.layers, ids, strict=True))
    model = replace(blocks, layers=named, edges=tuple(pairwise(ids)))
    question: dict[str, Any] = {"global_batch_size": 8, "max_stages": 2, "pipeline_micro_batch_size": 1}
    ends = replace(model, tied_weights=(hpgo.TiedWeight(("embedding", "head"), 4e8),))
    assert len(hpgo.plan(ends, nodes(1, 1), framework="megatron", **question).stages) == 2
    for name in ("torch", "torchtitan"):
        assert len(hpgo.plan(ends, nodes(1, 1), framework=name, **question).stages) == 1
    inner = replace(model, tied_weights=(hpgo.TiedWeight(("layers.0", "layers.1"), 1e8),))
    for name in ("torch", "torchtitan", "megatron"):
        plan = hpgo.plan(inner, nodes(1, 1), framework=name, **question)
        assert len(plan.stages) == 2
        assert plan.split_tied_weights == ()
        assert export.files(plan, name)
