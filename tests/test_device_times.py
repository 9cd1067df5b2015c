"""Times of layers by device type: in files, in plans, in merged profiles, and against speeds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from random import Random
from typing import TYPE_CHECKING, Any

import chance
import pytest
import twin
import twin_steps
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group

if TYPE_CHECKING:
    from pathlib import Path

LINKS = {"intra": "10 GB/s", "inter": "1 GB/s"}


def chain(forward_s: list[float], backward_s: list[float], **types: tuple[list[float], list[float]]) -> hpgo.Profile:
    """Return a chain of layers without weights, with times on these types."""
    zeros = [0.0] * len(forward_s)
    columns: dict[str, Any] = {"activation_bytes": zeros, "parameter_bytes": zeros, "batch_size": 1}
    profile = hpgo.Profile.chain("toy", forward_s=forward_s, backward_s=backward_s, **columns)
    layers = tuple(
        replace(
            layer,
            times_by_type=tuple(hpgo.TypeTimes(name, (f[at],), (b[at],)) for name, (f, b) in types.items()),
        )
        for at, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def cluster(*types: str, **speeds: float) -> hpgo.Cluster:
    """Return a cluster of one device of each type, each on its own node."""
    nodes = [{"devices": 1, "memory": "1 GB", "type": name, "speed": speeds.get(name, 1.0)} for name in types]
    return hpgo.Cluster.from_document({"hpgo_cluster": 1, "nodes": nodes, **LINKS}, file="types")


def stage_times(profile: hpgo.Profile, nodes: hpgo.Cluster, stages: list[tuple[list[str], list[int]]]) -> Any:
    plan = hpgo.evaluate(profile, nodes, stages, global_batch_size=2, min_samples_per_replica=1)
    return [(stage.forward_s, stage.backward_s) for stage in plan.stages], plan


def test_a_stage_takes_the_times_of_its_type() -> None:
    profile = chain([1, 1], [2, 2], fast=([0.1, 0.9], [0.2, 1.9]))
    whole = [layer.id for layer in profile.layers]
    for name, expected in (("fast", (1.0, 2.1)), ("other", (2.0, 4.0))):
        times_s, _ = stage_times(profile, cluster(name), [(whole, [0])])
        assert times_s == [pytest.approx(expected)]


def test_each_pass_of_a_stage_is_as_long_as_on_its_slowest_type() -> None:
    profile = chain([1, 1], [2, 2], a=([3, 1], [1, 1]), b=([1, 1], [1, 4]))
    whole = [layer.id for layer in profile.layers]
    times_s, _ = stage_times(profile, cluster("a", "b"), [(whole, [0, 1])])
    assert times_s == [pytest.approx((4, 5))]


def test_a_type_without_times_has_its_speed_and_a_note() -> None:
    profile = chain([1, 1], [2, 2], fast=([0.1, 0.9], [0.2, 1.9]))
    first, second = ([layer.id] for layer in profile.layers)
    times_s, plan = stage_times(profile, cluster("fast", "slow", slow=0.5), [(first, [0]), (second, [1])])
    assert times_s == [pytest.approx((0.1, 0.2)), pytest.approx((2, 4))]
    assert [note for note in plan.notes if "no times on `slow` (speed 0.5)" in note]
    _, plan = stage_times(replace(profile, device="slow"), cluster("fast", "slow"), [(first, [0]), (second, [1])])
    assert not [note for note in plan.notes if "no times on" in note]


def test_the_speed_of_a_type_with_times_is_not_used_and_a_note_states_it() -> None:
    profile = chain([1], [2], fast=([0.5], [0.7]))
    times_s, plan = stage_times(profile, cluster("fast", fast=4.0), [(["layer0"], [0])])
    assert times_s == [pytest.approx((0.5, 0.7))]
    assert [note for note in plan.notes if "the `speed` of `fast` is not used" in note]


def test_a_profile_of_other_types_plans_as_one_of_its_own_times() -> None:
    question = chance.question(Random(5), (2, 1), layers=4)
    layers = tuple(
        replace(layer, times_by_type=(hpgo.TypeTimes("unused", layer.forward_s, layer.backward_s),))
        for layer in question.profile.layers
    )
    typed = replace(question, profile=replace(question.profile, layers=layers))
    plans = [one.plan() for one in (question, typed)]
    assert plans[0] is not None
    assert plans[1] is not None
    assert (plans[0].step_s, plans[0].lower_bound_s, plans[0].stages) == (
        plans[1].step_s,
        plans[1].lower_bound_s,
        plans[1].stages,
    )


def test_a_memory_bound_layer_stays_on_the_slow_device() -> None:
    # The second layer does not gain from the fast type, so a scalar speed of 5 would move it there.
    profile = chain([1, 1], [2, 2], fast=([0.1, 1], [0.2, 2]))
    nodes = cluster("plain", "fast")
    plan = hpgo.plan(profile, nodes, global_batch_size=8, pipeline_micro_batch_size=1)
    assert [(stage.layers, stage.devices) for stage in plan.stages] == [(("layer0",), (1,)), (("layer1",), (0,))]
    assert plan.optimality_gap == 0


@pytest.mark.parametrize("seed", range(25))
def test_stages_on_several_types_cost_what_the_second_implementation_states(seed: int) -> None:
    random = Random(seed)
    question = chance.typed(random, chance.question(random, (2, 2, 1), layers=4))
    halved = chance.profile(random, batch_sizes=(1, 2), count=4, branching=True, free=0.1, halves=0.5)
    question = chance.typed(random, replace(question, profile=halved))
    for stages in (chance.stages(random, question.profile, question.cluster) for _ in range(4)):
        case = chance.Case(question.profile, question.cluster, stages)
        micro_batch = case.minimum(1)
        assumed = twin.Assumed(micro_batches=3, micro_batch=micro_batch, recompute=random.random() < 0.5)
        plan = case.evaluate(assumed)
        for stage, priced in zip(plan.stages, case.price(assumed, plan), strict=True):
            repeated_s = stage.forward_s * assumed.recompute
            pairs = [
                (stage.forward_s, priced.forward_s),
                (stage.backward_s, priced.backward_s),
                (stage.grad_reduce_s, priced.grad_reduce_s),
                (stage.exposed_grad_reduce_s, priced.exposed_grad_reduce_s),
            ]
            if stage.input_gradient_s is not None:
                pairs.append((stage.input_gradient_s + repeated_s, priced.input_gradient_s))
                pairs.append((stage.weight_gradient_s, priced.weight_gradient_s))
            for ours, theirs in pairs:
                assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
        step_s = twin_steps.step_s(3, case.price(assumed, plan), [stage.max_in_flight for stage in plan.stages])
        assert plan.step_s == pytest.approx(step_s, rel=1e-9)


def test_files_keep_times_by_type(tmp_path: Path) -> None:
    profile = chain([1, 1], [2, 2], b=([3, 1], [1, 1]), a=([1, 1], [1, 4]))
    profile = replace(
        profile,
        layers=(
            replace(
                profile.layers[0],
                times_by_type=(
                    hpgo.TypeTimes("b", (3,), (1,), (0.5,), (0.6,)),
                    *profile.layers[0].times_by_type[:1],
                ),
            ),
            profile.layers[1],
        ),
    )
    assert profile.device_types == ("a", "b")
    for name in ("types.yaml", "types.json"):
        hpgo.write_profile(profile, tmp_path / name)
        read = hpgo.read_profile(tmp_path / name)
        assert replace(read, source="") == profile
    plan = hpgo.plan(profile, cluster("a", "b"), global_batch_size=4)
    plan.save(tmp_path / "plan.json")
    again = hpgo.Plan.read(tmp_path / "plan.json")
    assert again.reevaluate().step_s == plan.step_s
    assert asdict(again) == asdict(plan)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("times_by_type: {a: {forward_s: -1, backward_s: 1}}", "on `a`: layer `one`: forward_s is -1"),
        ("times_by_type: {a: {forward_s: 1}}", "`backward_s` is missing"),
        ("times_by_type: {a: {forward_s: 1, backward_s: 1, saved_bytes: 1}}", "`saved_bytes` is unknown"),
        ("times_by_type: {a: {forward_s: [1, 2], backward_s: 1}}", "`forward_s` has 2 values"),
        ("times_by_type: {a: {forward_s: 1, backward_s: 1}}", "layer `two` has no times on `a`, but layer `one` has"),
    ],
)
def test_wrong_times_by_type_are_named(tmp_path: Path, types: str, message: str) -> None:
    sizes = "forward_s: 1, backward_s: 1, activation_bytes: 1, parameter_bytes: 0"
    path = tmp_path / "wrong.yaml"
    path.write_text(
        f"hpgo_profile: 1\nbatch_size: 1\nlayers:\n  - {{id: one, {sizes}, {types}}}\n  - {{id: two, {sizes}}}\n"
    )
    with pytest.raises(hpgo.errors.ProfileError) as error:
        hpgo.read_profile(path)
    assert message in str(error.value)


def test_profiles_of_several_types_merge(tmp_path: Path) -> None:
    slow, fast = chain([3, 1], [6, 2]), chain([1, 1], [2, 2])
    merged = hpgo.merge_profiles({"T4": slow, "A100": fast})
    assert (merged.device, merged.device_types) == ("T4", ("A100", "T4"))
    for name, one in (("T4", slow), ("A100", fast)):
        assert [layer.forward_s for layer in merged.on(name).layers] == [layer.forward_s for layer in one.layers]
    hpgo.write_profile(slow, tmp_path / "slow.yaml")
    hpgo.write_profile(replace(fast, device="A100"), tmp_path / "fast.yaml")
    given = ["--merge", f"T4={tmp_path / 'slow.yaml'}", "--merge", str(tmp_path / "fast.yaml")]
    result = CliRunner().invoke(group, ["profile", *given, "-o", str(tmp_path / "both.yaml")])
    assert result.exit_code == 0, result.output
    read = hpgo.read_profile(tmp_path / "both.yaml")
    assert read.layers == merged.layers


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--merge", "a=x.yaml", "--batch-size", "2"], "--batch-size can't be used with --merge"),
        (["--merge", "=x.yaml"], "is not TYPE=FILE"),
        (["mlp", "--profile-boundary", "1MB"], "--profile-boundary can only be used with --merge"),
        (["--merge", "a=x.yaml"], "x.yaml"),
    ],
)
def test_options_of_a_merge_are_checked(words: list[str], said: str) -> None:
    result = CliRunner().invoke(group, ["profile", *words])
    assert result.exit_code
    assert said in f"{result.output} {result.exception}"


def test_unlike_profiles_do_not_merge() -> None:
    one = chain([3, 1], [6, 2])
    others = {
        "no layer `layer1`": chain([1], [1]),
        "different edges": replace(one, edges=()),
        "no batch size in common": replace(one, batch_sizes=(2,)),
        "gpus_per_device is 1 on `T4`, but 2 on `A100`": replace(one, gpus_per_device=2),
        "has times on `x` already": chain([3, 1], [6, 2], x=([1, 1], [1, 1])),
    }
    for message, other in others.items():
        with pytest.raises(hpgo.errors.ProfileError) as error:
            hpgo.merge_profiles({"T4": one, "A100": other})
        assert message in str(error.value)


def test_merged_profiles_keep_the_batch_sizes_that_all_have() -> None:
    def at(sizes: tuple[int, ...]) -> hpgo.Profile:
        times = tuple(float(size) for size in sizes)
        return hpgo.Profile("toy", sizes, (hpgo.Layer("fc", "fc", times, times, times, 4),), ())

    merged = hpgo.merge_profiles({"T4": at((1, 2, 4)), "A100": at((2, 4, 8))})
    assert merged.batch_sizes == (2, 4)
    assert merged.on("A100").layers[0].forward_s == (2, 4)


def test_a_partition_uses_times_by_type() -> None:
    profile = chain([1, 1], [0, 0], fast=([0.1, 2], [0, 0]))
    nodes = cluster("plain", "fast")
    plan = hpgo.partition(profile, nodes, batch_size=1)
    assert {stage.hosts[0]: round(stage.compute_s, 9) for stage in plan.stages} == {"node1": 0.1, "node0": 1.0}


def test_json_of_a_profile_with_types_names_them() -> None:
    from hpgo.model.formats import native

    profile = chain([1], [2], fast=([0.5], [0.7]))
    document = json.loads(json.dumps(native.document(profile)))
    assert document["layers"][0]["times_by_type"] == {"fast": {"forward_s": 0.5, "backward_s": 0.7}}
