"""Plans with several stages a device: cut well, within memory, honestly bounded, and carried by all else."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import warm_ranks
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.planning.schedule_search import VIRTUAL_STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
GB = 1e9


def cluster(devices: int, memory: str = "16 GB", gbit_s: float = 100, *, each: int = 1) -> hpgo.Cluster:
    return hpgo.Cluster.of(
        nodes=devices // each, devices_per_node=each, intra_gbit_s=8 * gbit_s, inter_gbit_s=gbit_s, memory=memory
    )


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, in every way."""
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, layers)))


def put(name: str, counts: tuple[int, ...], groups: list[list[int]], micro_batches: int) -> list[tuple[int, list[int]]]:
    """Stages of so many layers on the groups that the schedule has for them."""
    schedule = hpgo.schedule(
        name, ranks=len(groups), micro_batches=micro_batches, virtual_stages_per_rank=len(counts) // len(groups)
    )
    return [(count, groups[rank]) for count, rank in zip(counts, schedule.rank_of_stage, strict=True)]


@st.composite
def questions(draw: st.DrawFn, maximum: int = 8) -> tuple[hpgo.Profile, float, float]:
    """Layers that differ, a bandwidth, and the memory of a device."""
    layers = draw(st.integers(5, maximum))
    each = st.lists(st.floats(0.1, 2.0), min_size=layers, max_size=layers)
    sizes = st.lists(st.floats(0.0, 0.5 * GB), min_size=layers, max_size=layers)
    return chain(draw(each), draw(sizes), draw(sizes)), draw(st.sampled_from([1.0, 10.0, 100.0])), draw(
        st.sampled_from([6.0, 9.0, 64.0])
    )  # fmt: skip


# --- How good they are ------------------------------------------------------------------------------------------------


def brute_force(name: str, profile: hpgo.Profile, nodes: hpgo.Cluster, batch: int) -> hpgo.Plan | None:
    """The best of all cuts into four stages on two devices, for every micro-batch size."""
    best = None
    for size in (size for size in range(1, batch + 1) if batch % size == 0):
        for counts in cuts(len(profile.layers), 4):
            stages = put(name, counts, [[0], [1]], batch // size)
            plan = hpgo.evaluate(
                profile, nodes, stages, global_batch_size=batch, pipeline_micro_batch_size=size, schedule=name
            )
            if plan.fits and (best is None or plan.step_s < best.step_s):
                best = plan
    return best


@settings(max_examples=12)
@given(questions(maximum=7), st.sampled_from([name for name in VIRTUAL_STAGES if name != "dualpipe_v"]))
def test_the_plan_is_the_best_of_all_cuts_and_none_goes_below_the_bound(
    question: tuple[hpgo.Profile, float, float], name: str
) -> None:
    profile, gbit_s, memory = question
    nodes = cluster(2, f"{memory} GB", gbit_s)
    best = brute_force(name, profile, nodes, 4)
    try:
        plan = hpgo.plan(profile, nodes, global_batch_size=4, schedule=name, max_stages=4)
    except hpgo.errors.InfeasibleError:
        assert best is None
        return
    assert best is not None
    assert plan.step_s <= best.step_s * (1 + 1e-9)
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= min(plan.step_s, best.step_s) * (1 + 1e-12)


def balanced(seconds: list[float], stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the longest stage is as short as it can be; the first stages take what they can."""
    before = [0.0, *accumulate(seconds)]

    def longest(counts: tuple[int, ...]) -> tuple[float, list[int]]:
        ends = (0, *accumulate(counts))
        return round(max(before[end] - before[begin] for begin, end in pairwise(ends)), 9), [-end for end in ends]

    return min(cuts(len(seconds), stages), key=longest)


@settings(max_examples=15)
@given(questions(), st.sampled_from(list(VIRTUAL_STAGES)), st.booleans())
def test_a_plan_is_never_worse_than_balanced_cuts_on_equal_groups(
    question: tuple[hpgo.Profile, float, float], name: str, recompute: bool
) -> None:
    profile, gbit_s, memory = question
    nodes = cluster(4, f"{memory} GB", gbit_s, each=2)
    options: dict[str, Any] = {"global_batch_size": 8, "schedule": name, "recompute": recompute}
    try:
        step_s = hpgo.plan(profile, nodes, **options).step_s
    except hpgo.errors.InfeasibleError:
        step_s = math.inf
    seconds = [layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers]
    compared = 0
    for ranks, virtual_stages_per_rank, size in ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 2), (4, 2, 1), (4, 2, 2)):
        replicas = 4 // ranks
        if (
            size < replicas
            or ranks * virtual_stages_per_rank > len(seconds)
            or virtual_stages_per_rank not in VIRTUAL_STAGES[name]
        ):
            continue
        groups = [list(range(rank * replicas, (rank + 1) * replicas)) for rank in range(ranks)]
        try:
            stages = put(name, balanced(seconds, ranks * virtual_stages_per_rank), groups, 8 // size)
        except hpgo.errors.ArgumentError:  # not for so few micro-batches
            continue
        plan = hpgo.evaluate(profile, nodes, stages, pipeline_micro_batch_size=size, **options)
        if plan.fits:
            compared += 1
            assert step_s <= plan.step_s * (1 + 1e-12), (ranks, virtual_stages_per_rank, size)
    assume(compared)


def test_uneven_cuts_are_shorter_than_balanced_ones() -> None:
    profile, nodes = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, nodes, global_batch_size=64, schedule="zb_v", max_stages=4)
    assert plan.step_s < 0.99 * min(
        hpgo.evaluate(
            profile,
            nodes,
            put("zb_v", (14, 13, 13, 13), [[*range(8)], [*range(8, 16)]], 64 // size),
            global_batch_size=64,
            pipeline_micro_batch_size=size,
            schedule="zb_v",
        ).step_s
        for size in (16, 32)
    )


def test_groups_get_as_many_devices_as_they_need() -> None:
    """Three quarters of the work can't be cut."""
    profile = chain([1.0, 1.0, 9.0, 1.0], 1e6, 1e6)
    plan = hpgo.plan(profile, cluster(4, each=4), global_batch_size=64, schedule="zb_v")
    assert sorted(len(group.devices) for group in plan.groups) == [1, 3]
    with refused(hpgo.errors.InfeasibleError, "infeasible", "zb_v"):
        hpgo.plan(profile, cluster(1), global_batch_size=8, schedule="zb_v")


@pytest.mark.parametrize("name", ["interleaved", "hanayo", "zb_v"])
def test_devices_stay_idle_where_that_is_faster(name: str) -> None:
    """Replicas would sum a gigabyte of gradients for each layer over a slow link."""
    profile, nodes = chain([1.0] * 4, 1e6, 1e9), cluster(4, "64 GB", 0.0125, each=4)
    by_hand = hpgo.evaluate(
        profile,
        nodes,
        put(name, (1, 1, 1, 1), [[0], [1]], 4),
        global_batch_size=8,
        pipeline_micro_batch_size=2,
        schedule=name,
    )
    plan = hpgo.plan(profile, nodes, global_batch_size=8, pipeline_micro_batch_size=2, schedule=name)
    assert plan.step_s <= by_hand.step_s
    assert sum(len(group.devices) for group in plan.groups) < 4


def test_neighbours_are_on_different_machines_where_links_between_these_are_faster() -> None:
    profile = chain([1.0] * 4, 1e9, 1e9)
    nodes = hpgo.Cluster.of(nodes=2, devices_per_node=2, intra_gbit_s=1, inter_gbit_s=100, memory="64 GB")
    asked: dict[str, Any] = {"global_batch_size": 4, "pipeline_micro_batch_size": 1, "schedule": "interleaved"}
    by_hand = hpgo.evaluate(profile, nodes, put("interleaved", (1, 1, 1, 1), [[0], [2]], 4), **asked)
    assert hpgo.plan(profile, nodes, **asked).step_s <= by_hand.step_s


@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
@pytest.mark.parametrize("odd", [{"speed": 0.05}, {"memory_bytes": 1e9}])
def test_the_order_of_machines_is_no_matter(name: str, odd: dict[str, float]) -> None:
    profile, nodes = chain([1.0] * 6, 1e6, 1e9), cluster(3, "64 GB", each=1)
    one = replace(nodes.nodes[0], device=replace(nodes.nodes[0].device, name="odd", **odd))
    usual = nodes.nodes[1:]
    steps_s = [
        hpgo.plan(profile, replace(nodes, nodes=those), global_batch_size=8, schedule=name).step_s
        for those in ((one, *usual), (*usual, one), (usual[0], one, usual[1]))
    ]
    assert len(set(steps_s)) == 1


def test_sizes_that_fit_are_found_where_those_that_come_first_do_not() -> None:
    """Eager 1F1B's size comes first, then the five next to it; `zb_v` fits none of these."""
    profile, nodes = chain([1.0] * 8, 1e9, 1e6), cluster(2, "20 GB")
    batch = {"global_batch_size": 2**9 * 2, "min_samples_per_replica": 1}
    eager = hpgo.plan(profile, nodes, **batch).pipeline_micro_batch_size
    found = hpgo.plan(profile, nodes, **batch, schedule="zb_v").pipeline_micro_batch_size
    assert found < eager


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
def test_a_plan_takes_as_long_as_its_stages_do_under_orders_that_are_fitted_to_them(name: str) -> None:
    """Much would be sent where a V turns around, if its ends were on different groups."""
    nodes, chance = cluster(4, "64 GB", 1, each=2), random.Random(0)
    for layers in (4, 5, 6) * 4:
        sizes = [3e9 if at in {layers // 2 - 1, layers // 2} else 1e6 for at in range(layers)]
        profile = chain([chance.uniform(0.1, 2) for _ in range(layers)], sizes, 1e6)
        plan = hpgo.plan(profile, nodes, global_batch_size=8, schedule=name)
        stages = [(stage.layers, stage.devices) for stage in plan.stages]
        again = hpgo.evaluate(
            profile,
            nodes,
            stages,
            global_batch_size=8,
            pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
            schedule=name,
        )
        assert plan.step_s == pytest.approx(again.step_s, rel=1e-9)


def test_steps_of_too_many_actions_say_which_way_out_leads_somewhere() -> None:
    profile, nodes = chain([1.0] * 8, 1e6, 1e6), cluster(2)
    with refused(hpgo.errors.InfeasibleError, "infeasible", "1", "60", "000") as caught:
        hpgo.plan(profile, nodes, global_batch_size=5000, pipeline_micro_batch_size=1, schedule="zb_v")
    assert "larger micro-batches" in caught.value.hint
    assert hpgo.plan(profile, nodes, global_batch_size=5000, pipeline_micro_batch_size=2, schedule="zb_v").fits


def test_a_deadline_before_anything_fits_is_no_statement_about_memory() -> None:
    profile = chain([1.0] * 64, 1e9, 1e9)
    with refused(hpgo.errors.TimeLimitError, "time_limit", "1e-06"):
        hpgo.plan(profile, cluster(16, "64 GB", each=4), global_batch_size=64, schedule="zb_v", time_limit_s=1e-6)


def test_a_launcher_with_equal_replicas_gets_equal_groups() -> None:
    profile = chain([1.0, 1.0, 9.0, 1.0], 1e6, 1e6)
    plan = hpgo.plan(profile, cluster(4, each=4), global_batch_size=64, schedule="zb_v", framework="torch")
    assert len({len(group.devices) for group in plan.groups}) == 1
    assert plan.restriction is not None
    assert "not all plans of its schedule were tried" in " ".join(str(plan).split())


# --- Memory -----------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(questions(), st.sampled_from(list(VIRTUAL_STAGES)), st.booleans())
def test_groups_hold_what_the_simulation_says_and_no_more_than_they_have(
    question: tuple[hpgo.Profile, float, float], name: str, recompute: bool
) -> None:
    profile, gbit_s, memory = question
    nodes = cluster(4, f"{memory} GB", gbit_s)
    try:
        plan = hpgo.plan(profile, nodes, global_batch_size=8, schedule=name, recompute=recompute)
    except hpgo.errors.InfeasibleError:
        return
    timeline = plan.timeline()
    assert timeline.makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    held = [group.memory.total_bytes for group in plan.groups]
    assert timeline.measures.peak_memory_bytes == pytest.approx(held)
    assert max(held) <= memory * GB
    assert plan.fits
    for rank, group in enumerate(plan.groups):
        assert max(plan.stages[at].max_in_flight for at in group.stages) <= timeline.measures.peak_in_flight[rank]


def test_borders_move_until_every_group_fits() -> None:
    """Balanced cuts put the two large layers on one device."""
    large = [4 * GB if at in {0, 4} else 0.0 for at in range(8)]
    profile, nodes = chain([1.0] * 8, 1e6, large), cluster(2, "17 GB")
    with_balanced = hpgo.evaluate(
        profile,
        nodes,
        put("interleaved", (2, 2, 2, 2), [[0], [1]], 4),
        global_batch_size=4,
        pipeline_micro_batch_size=1,
        schedule="interleaved",
    )
    assert with_balanced.shortfall_bytes > 10 * GB
    assert "over by" in str(with_balanced)
    plan = hpgo.plan(profile, nodes, global_batch_size=4, schedule="interleaved")
    assert plan.fits


def test_recomputation_holds_inputs_and_the_activations_of_one_backward() -> None:
    profile = chain([1.0] * 8, activation_bytes=1e8)
    wide = replace(profile, layers=tuple(replace(layer, saved_bytes=(2e9,)) for layer in profile.layers))
    nodes = cluster(4, gbit_s=1e6)
    kept, again = (
        hpgo.evaluate(
            wide,
            nodes,
            put("interleaved", (1,) * 8, [[0], [1], [2], [3]], 16),
            global_batch_size=16,
            pipeline_micro_batch_size=1,
            schedule="interleaved",
            recompute=recompute,
        )
        for recompute in (False, True)
    )
    in_flight = hpgo.schedule("interleaved", ranks=4, micro_batches=16, virtual_stages_per_rank=2).peak_in_flight
    buffers = 2 * 2 * 2e8  # an input and an output, each way, of both chunks
    assert kept.shortfall_bytes == pytest.approx(in_flight[0] * 2e9 + buffers - 2e8 - 16e9)
    assert again.fits
    # The first chunk of rank 0 has no input to keep; the largest is a rank behind it.
    assert max(group.memory.total_bytes for group in again.groups) == pytest.approx(in_flight[1] * 1e8 + 2e9 + buffers)
    either = hpgo.plan(wide, nodes, global_batch_size=16, schedule="interleaved", recompute="auto", max_stages=8)
    assert either.fits


def test_gradients_of_one_groups_stages_are_summed_one_after_the_other() -> None:
    """Free computing, so that nothing but the sums of the two stages of each group is left."""
    profile = chain([1e-9] * 4, 0.0, 1e9)
    plan = hpgo.evaluate(
        profile,
        cluster(4, "64 GB", each=2),
        put("interleaved", (1, 1, 1, 1), [[0, 1], [2, 3]], 2),
        global_batch_size=4,
        pipeline_micro_batch_size=2,
        schedule="interleaved",
    )
    assert plan.step_s == pytest.approx(2 * plan.stages[0].grad_reduce_s, rel=1e-6)
    assert plan.timeline().makespan_s == plan.step_s


# --- Files, orders, programs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("bert-48"), cluster(4, each=2), global_batch_size=64, schedule="interleaved")


@pytest.mark.parametrize("name", VIRTUAL_STAGES)
def test_plans_survive_files_and_are_priced_anew_to_the_last_digit(name: str) -> None:
    profile, nodes = chain([1.0, 2.0, 0.5, 1.0, 1.5, 0.7], 1e8, 1e8), cluster(4, each=2)
    plan = hpgo.plan(profile, nodes, global_batch_size=16, schedule=name, recompute="auto")
    assert plan.schedule == name
    assert plan.virtual_stages_per_rank > 1
    document = json.loads(plan.to_json())
    jsonschema.validate(document, json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8")))
    assert document["virtual_stages_per_rank"] == plan.virtual_stages_per_rank
    read = hpgo.Plan.from_json(plan.to_json())
    assert read == plan
    priced = read.reevaluate()
    assert (priced.step_s, priced.stages, priced.actions) == (plan.step_s, plan.stages, plan.actions)
    assert hpgo.Plan.from_json(plan.to_json(embed=False)).reevaluate(profile=profile, cluster=nodes) == priced
    assert hpgo.simulate(hpgo.Program.from_json(plan.program().to_json())).makespan_s == plan.step_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"virtual_stages_per_rank": 3}, "`virtual_stages_per_rank` is 3"),
        ({"virtual_stages_per_rank": 0}, "`virtual_stages_per_rank`"),
        ({"actions": ["0F0"]}, "it must have one for each of"),
    ],
)
def test_files_that_contradict_themselves_are_refused(uneven: hpgo.Plan, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.from_json(json.dumps(json.loads(uneven.to_json()) | change))
    assert reason in caught.value.message


def test_a_plan_of_one_stage_a_device_from_before_is_read(uneven: hpgo.Plan) -> None:
    flat = hpgo.plan(hpgo.read_profile("bert-48"), cluster(4, each=2), global_batch_size=64)
    older = json.loads(flat.to_json())
    del older["virtual_stages_per_rank"]
    assert hpgo.Plan.from_json(json.dumps(older)) == flat
    assert [group.stages for group in flat.groups] == [(at,) for at in range(len(flat.stages))]
    assert uneven.devices == sum(len(group.devices) for group in uneven.groups) <= 4


def test_a_plan_runs_by_other_schedules_that_place_its_stages_alike(uneven: hpgo.Plan) -> None:
    assert uneven.to_schedule().rank_of_stage == uneven.to_schedule("looped_bfs").rank_of_stage
    looped = hpgo.simulate(uneven, schedule="looped_bfs")
    assert looped.makespan_s > 0
    for name in ("1f1b", "hanayo", "zb_v"):
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "2", "6"):
            uneven.to_schedule(name)
    flat = hpgo.plan(hpgo.read_profile("bert-48"), cluster(4, each=2), global_batch_size=64)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "interleaved", "2", "1"):
        flat.to_schedule("interleaved")


def test_stages_of_a_plan_go_where_its_schedule_runs_them() -> None:
    profile, nodes = chain([1.0] * 8), cluster(2)
    wrong = [(2, [0]), (2, [1]), (2, [1]), (2, [0])]
    question = {"global_batch_size": 4, "pipeline_micro_batch_size": 1}
    assert hpgo.evaluate(profile, nodes, wrong, schedule="zb_v", **question).virtual_stages_per_rank == 2
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "1", "0"):
        hpgo.evaluate(profile, nodes, wrong, schedule="interleaved", **question)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "3", "2"):
        hpgo.evaluate(profile, nodes, [(2, [0]), (2, [1]), (4, [0])], schedule="interleaved", **question)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "0"):
        hpgo.evaluate(profile, nodes, [(2, [0]), (2, [1]), (4, [0])], schedule="1f1b", **question)


def test_the_report_has_a_row_for_each_stage_and_for_the_memory_of_each_group(uneven: hpgo.Plan) -> None:
    text = str(uneven)
    assert all(len(line) <= 80 for line in text.splitlines())
    head = next(line.split() for line in text.splitlines() if "count" in line)
    assert head[:5] == ["stage", "layers", "count", "group", "devices"]
    memory = text.split("group  weights")[1].split("\n\n", maxsplit=1)[0].splitlines()[1:]
    assert len(memory) == len(uneven.groups)
    words = " ".join(text.split())
    assert f"interleaved 1F1B, {uneven.virtual_stages_per_rank} virtual stages per device" in words
    assert "moving borders" in words
    assert "better plans may exist; the bound holds for all" in words


# --- Searching --------------------------------------------------------------------------------------------------------


def test_auto_gives_each_schedule_the_plan_that_it_has_alone() -> None:
    question = (chain([1.0, 2.0, 0.5, 1.0, 1.5, 0.7], 1e8, 1e8), cluster(4))
    auto = hpgo.plan(*question, global_batch_size=16, schedule="auto")
    by_name = {choice.name: choice for choice in auto.schedules}
    for name in VIRTUAL_STAGES:
        alone = hpgo.plan(*question, global_batch_size=16, schedule=name)
        assert by_name[name].step_s == alone.step_s
        assert by_name[name].virtual_stages_per_rank == alone.virtual_stages_per_rank
        assert auto.alternative(name).reevaluate().step_s == alone.step_s


def test_auto_may_take_a_schedule_with_several_stages_a_device() -> None:
    plan = hpgo.plan(chain([1.0] * 8), cluster(4), global_batch_size=4, pipeline_micro_batch_size=1, schedule="auto")
    assert plan.virtual_stages_per_rank > 1
    assert plan.fits
    assert plan.optimality_gap is not None
    assert plan.timeline().makespan_s == plan.step_s
    assert "at most" in str(plan)


def test_ctrl_c_and_deadlines_leave_the_best_plan_so_far() -> None:
    question = (hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"))

    def interrupt(best_s: float, lower_bound_s: float) -> None:
        assert lower_bound_s >= 0
        if math.isfinite(best_s):
            raise KeyboardInterrupt

    whole = hpgo.plan(*question, global_batch_size=64, schedule="interleaved")
    plan = hpgo.plan(*question, global_batch_size=64, schedule="interleaved", progress=interrupt)
    assert whole.stop_reason is None
    assert plan.stop_reason in {"interrupt", None}  # None where it was over before anybody asked
    assert plan.step_s >= whole.step_s
    assert plan.fits
    hurried = hpgo.plan(*question, global_batch_size=64, schedule="interleaved", time_limit_s=0.25)
    assert hurried.step_s >= whole.step_s
    assert hurried.stop_reason in {"time_limit", None}
    assert hurried.fits


def test_the_same_question_has_the_same_answer_twice(uneven: hpgo.Plan) -> None:
    question = (hpgo.read_profile("bert-48"), cluster(4, each=2))
    assert hpgo.plan(*question, global_batch_size=64, schedule="interleaved") == uneven


def test_a_branching_model_is_cut_along_one_order_and_the_report_says_so() -> None:
    plan = hpgo.plan(hpgo.read_profile("gnmt-16"), cluster(4), global_batch_size=256, schedule="zb_v")
    assert plan.cuts != "all"
    assert "along one order of the layers" in " ".join(str(plan).split())
    assert plan.reevaluate().step_s == plan.step_s


# --- Running and exporting --------------------------------------------------------------------------------------------


def test_exports_carry_them_or_refuse_by_name(uneven: hpgo.Plan) -> None:
    schedule = hpgo.export.files(uneven, "torch")["order.csv"]
    assert hpgo.Schedule.from_text(schedule) == uneven.to_schedule()
    with refused(hpgo.errors.ArgumentError, "unsupported", "interleaved", "DeepSpeed"):
        hpgo.export.files(uneven, "deepspeed")
    profile, nodes = hpgo.read_profile("bert-48"), cluster(4, each=2)
    v_shaped = hpgo.plan(profile, nodes, global_batch_size=64, schedule="zb_v", framework="torchtitan")
    assert hpgo.export.files(v_shaped, "torchtitan")
    with refused(hpgo.errors.ArgumentError, "unsupported", "zb_v", "Megatron-LM"):
        hpgo.export.megatron(v_shaped)
    blocks = hpgo.plan(profile, nodes, global_batch_size=64, schedule="interleaved", framework="megatron")
    layout = hpgo.export.megatron(blocks).splitlines()[-1].split("'")[1]
    assert len(hpgo.PipelineLayout.from_text(layout).stages) == len(blocks.stages)
    assert (
        hpgo.PipelineLayout.from_text(layout).virtual_stages_per_rank(len(blocks.groups))
        == blocks.virtual_stages_per_rank
    )


def test_the_command_line_plans_and_prices_them(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from hpgo.cli.main import group

    run = CliRunner().invoke
    file = str(tmp_path / "plan.json")
    arguments = ["bert-48", "-c", "dapple-c", "-b", "64", "--schedule", "zb_v", "--devices", "4", "-o", file]
    done = run(group, ["plan", *arguments])
    assert done.exit_code == 0, done.output
    assert "ZB-V, 2 virtual stages per device" in " ".join(done.output.split())
    assert "unchanged by the new evaluation" in " ".join(run(group, ["evaluate", file]).output.split())
    stages = "14@0,13@1,13@1,13@0"
    priced = run(group, ["evaluate", "bert-48", "-c", "dapple-c", "-b", "64", "--schedule", "zb_v", "--stages", stages])
    assert priced.exit_code == 0, priced.output
    assert "2 virtual stages per device" in priced.output


def test_the_example_engine_trains_by_uneven_plans_to_one_processs_gradients(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    from test_program import LAYERS, one_process

    seconds = [1.0, 2.0, 0.5, 1.0, 3.0, 0.7, 1.0, 1.3, 0.4, 1.0, 2.0, 0.6]
    profile = chain(seconds, 1e6, 1e6)
    profile = replace(
        profile, layers=tuple(replace(layer, id=name) for layer, name in zip(profile.layers, LAYERS, strict=True)),
        edges=tuple(pairwise(LAYERS)),
    )  # fmt: skip
    paths = []
    for name in ("interleaved", "zb_v"):
        plan = hpgo.plan(profile, cluster(4, each=2), global_batch_size=12, schedule=name)
        assert len({len(stage.layers) for stage in plan.stages}) > 1
        paths.append(tmp_path / f"{name}.json")
        plan.program().save(paths[-1])
    done = warm_ranks.ran("engine_ranks.py", 4, tmp_path, *paths, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, expected_loss = one_process(torch, 12)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for path in paths:
        found, loss = set(), 0.0
        for rank in range(4):
            part, gradients = torch.load(f"{path}.{rank}.pt", weights_only=True)
            loss += float(part)
            found |= set(gradients)
            for layer, gradient in gradients.items():
                assert float((gradient - expected[layer]).abs().max()) <= 1e-12 * largest, (path.name, rank, layer)
        assert found == set(expected)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
