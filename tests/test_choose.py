"""Plans for schedules beyond 1F1B and GPipe, and `auto`, which compares them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.planning.schedule_search import FRUGAL, ONE_STAGE, VIRTUAL_STAGES, check_schedule

NAMES = ("1f1b", "eager_1f1b", "gpipe", *ONE_STAGE)
ALL = (*NAMES, *VIRTUAL_STAGES)
GB = 1e9


def cluster(devices: int, memory: str = "16 GB", gbit_s: float = 100) -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=devices, devices_per_node=1, intra_gbit_s=gbit_s, inter_gbit_s=gbit_s, memory=memory)


@pytest.fixture(scope="module")
def auto() -> hpgo.Plan:
    return hpgo.plan(
        hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64, schedule="auto"
    )


def test_auto_lists_every_synchronous_schedule_best_first(auto: hpgo.Plan) -> None:
    steps = [choice.step_s for choice in auto.schedules if choice.step_s is not None]
    assert steps == sorted(steps)
    assert {choice.name for choice in auto.schedules} == set(ALL)


def test_auto_takes_the_shortest_step_that_can_be_planned(auto: hpgo.Plan) -> None:
    planned = {choice.name: choice.step_s for choice in auto.schedules if choice.planned and choice.step_s is not None}
    assert auto.step_s == min(planned.values()) == planned[auto.schedule]
    assert (
        auto.step_s
        <= hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64).step_s
    )


def test_a_plan_of_auto_survives_json_and_reads_plans_without_a_comparison(auto: hpgo.Plan) -> None:
    assert hpgo.Plan.from_json(auto.to_json()) == auto
    older = json.loads(auto.to_json())
    del older["schedules"]
    assert hpgo.Plan.from_json(json.dumps(older)) == replace(auto, schedules=())


def test_the_published_schema_describes_the_comparison(auto: hpgo.Plan) -> None:
    schema = json.loads((Path(__file__).parent.parent / "docs/plan.schema.json").read_text(encoding="utf-8"))
    document = json.loads(auto.to_json())
    jsonschema.validate(document, schema)
    assert set(schema["$defs"]["schedule_choice"]["properties"]) == set(document["schedules"][0])
    assert set(schema["properties"]["schedule"]["enum"]) == set(ALL)


def test_help_names_every_schedule_that_can_be_planned() -> None:
    from click.testing import CliRunner

    from hpgo.cli.plan import command

    words = CliRunner().invoke(command, ["--help"]).output.replace(",", " ").replace(";", " ").split()
    assert {*ALL, "auto"} <= set(words)


def test_the_report_shows_what_each_schedule_would_give(auto: hpgo.Plan) -> None:
    text = str(auto)
    assert all(choice.name in text for choice in auto.schedules)
    assert "2 per device" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_planned_step_and_memory_are_the_simulated_ones(name: str) -> None:
    plan = hpgo.plan(
        chain([1.0, 2.0, 1.5, 1.0, 0.5], activation_bytes=1e8, parameter_bytes=1e8),
        cluster(4, gbit_s=10),
        global_batch_size=16,
        schedule=name,
    )
    timeline = plan.timeline()
    assert plan.schedule == name
    assert timeline.makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    assert list(timeline.measures.peak_in_flight) == [stage.max_in_flight for stage in plan.stages]
    assert timeline.measures.peak_memory_bytes == pytest.approx([stage.memory.total_bytes for stage in plan.stages])


@settings(max_examples=15)
@given(
    forward_s=st.lists(st.floats(0.2, 2.0), min_size=2, max_size=6),
    batch=st.sampled_from([4, 8, 12]),
    devices=st.integers(2, 4),
    activation_gb=st.floats(0.0, 2.0),
)
def test_every_plan_fits_and_auto_is_never_worse(
    forward_s: list[float], batch: int, devices: int, activation_gb: float
) -> None:
    question = (chain(forward_s, activation_bytes=activation_gb * GB), cluster(devices, "16 GB"))
    default = hpgo.plan(*question, global_batch_size=batch)
    auto = hpgo.plan(*question, global_batch_size=batch, schedule="auto")
    assert auto.fits
    assert auto.step_s <= default.step_s
    for choice in auto.schedules:
        if choice.planned and choice.step_s is not None:
            assert auto.step_s <= choice.step_s
            assert choice.peak_bytes is not None
            assert choice.peak_bytes <= 16 * GB


def test_no_schedule_beats_the_work_of_its_devices(auto: hpgo.Plan) -> None:
    profile = chain([1.0] * 8)
    plan = hpgo.plan(profile, cluster(4), global_batch_size=8, pipeline_micro_batch_size=1, schedule="auto")
    work_s = 8 * 8 * 3.0 / 4
    assert all(choice.step_s >= work_s - 1e-9 for choice in plan.schedules if choice.step_s is not None)
    # F + I - W is a third of F + B: the bubble of ZB-H1 is a third of 1F1B's, interleaving halves it
    by_name = {
        choice.name: choice.step_s for choice in plan.schedules if choice.stages == 4 * choice.virtual_stages_per_rank
    }
    assert by_name["1f1b"] == pytest.approx(work_s + 3 * 6.0)
    assert by_name["zb_h1"] == pytest.approx(work_s + 3 * 2.0)
    assert by_name["interleaved"] == pytest.approx(work_s + 3 * 6.0 / 2)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_zb_h1_is_not_longer_than_1f1b_on_balanced_stages_with_free_transfers(depth: int) -> None:
    stages = [(1, [device]) for device in range(depth)]
    questions = {"global_batch_size": 12, "pipeline_micro_batch_size": 1}
    steps = [
        hpgo.evaluate(chain([1.0] * depth), cluster(depth), stages, schedule=name, **questions).step_s
        for name in ("zb_h1", "1f1b")
    ]
    assert steps[0] < steps[1]


def test_a_tight_memory_excludes_gpipe_and_says_so() -> None:
    question = (chain([1.0] * 4, activation_bytes=0.5 * GB), cluster(2, "6 GB"))
    plan = hpgo.plan(*question, global_batch_size=32, pipeline_micro_batch_size=1, schedule="auto")
    gpipe = next(choice for choice in plan.schedules if choice.name == "gpipe")
    assert plan.fits
    assert gpipe.step_s is None
    assert "short" in gpipe.reason
    assert plan.schedules.index(gpipe) > 0
    assert "gpipe: no plan fits" in " ".join(str(plan).split())


def test_zb_takes_a_cap_that_memory_allows() -> None:
    profile = chain([1.0] * 4, activation_bytes=GB)
    tight, roomy = (
        hpgo.evaluate(
            profile,
            cluster(4, memory),
            [(1, [device]) for device in range(4)],
            global_batch_size=16,
            pipeline_micro_batch_size=1,
            schedule="zb",
        )
        for memory in ("9 GB", "64 GB")
    )
    assert tight.fits
    assert max(stage.max_in_flight for stage in tight.stages) < max(s.max_in_flight for s in roomy.stages)
    assert roomy.step_s < tight.step_s


def test_gradients_have_only_the_last_w_to_hide_behind() -> None:
    profile, nodes = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    stages = [(26, range(8)), (27, range(8, 16))]
    whole, split = (
        hpgo.evaluate(profile, nodes, stages, global_batch_size=64, schedule=name) for name in ("1f1b", "zb_h1")
    )
    for before, after in zip(whole.stages, split.stages, strict=True):
        assert before.exposed_grad_reduce_s <= after.exposed_grad_reduce_s <= after.grad_reduce_s


def test_plans_of_other_schedules_have_a_bound() -> None:
    small = hpgo.plan(chain([1.0] * 4), cluster(4), global_batch_size=8, schedule="zb_h1")
    assert small.lower_bound_s == small.step_s
    assert "Optimality  proven" in str(small)
    # Too many plans to try them all: the bound for any order of the actions proves some of them optimal.
    large = (chain([1.0] * 20), cluster(4))
    whole = hpgo.plan(*large, global_batch_size=8, schedule="zb_h1")
    assert whole.lower_bound_s == whole.step_s
    plan = hpgo.plan(*large, global_batch_size=8, pipeline_micro_batch_size=1, schedule="1f1b_overlap")
    assert plan.lower_bound_s is not None
    assert 0 < plan.lower_bound_s <= plan.step_s
    assert plan.optimality_gap == pytest.approx(plan.step_s / plan.lower_bound_s - 1)
    assert "Optimality  at most " in str(plan)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zb_h3", "did you mean `zb_h"),
        ("autto", "did you mean `auto`"),
        ("pipedream", "no step of it ends"),
        ("pipedream_2bw", "no step of it ends"),
        ("pipemare", "no step of it ends"),
        ("forward_only", "no backward passes, and a plan is a training step"),
        ("forward_only", "`hpgo.partition` plans inference"),
        ("staggered", "no backward"),
        ("chimera", "two copies"),
        ("dualpipe", "two copies"),
    ],
)
def test_schedules_that_cannot_be_planned_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan(chain([1.0] * 4), cluster(2), global_batch_size=8, schedule=name)
    assert reason in f"{caught.value.message} {caught.value.hint}"


def test_every_family_is_planned_or_refused() -> None:
    others = set()
    for family in hpgo.schedules():
        if family.name in ALL:
            continue
        with refused(hpgo.errors.ArgumentError, "unsupported"):
            check_schedule(family.name)
        others.add(family.name)
    assert len(others) + len(ALL) == len(hpgo.schedules())


def test_pairs_run_as_one_last_as_long_as_both_and_the_report_says_so() -> None:
    plan = hpgo.plan(
        chain([1.0] * 4), cluster(4), global_batch_size=8, pipeline_micro_batch_size=1, schedule="1f1b_overlap"
    )
    assert [stage.max_in_flight for stage in plan.stages] == [
        2 * (len(plan.stages) - at) for at in range(len(plan.stages))
    ]
    assert plan.step_s >= 8 * max(stage.forward_s + stage.backward_s for stage in plan.stages)
    assert plan.lower_bound_s == plan.step_s
    assert "is assumed to take as long as both" in " ".join(str(plan).split())
    faster = hpgo.simulate(plan, overlapped_s=2.5)
    assert faster.makespan_s < plan.step_s
    assert "assumed to take" not in str(hpgo.plan(chain([1.0] * 4), cluster(4), global_batch_size=8, schedule="zb_h1"))


@pytest.fixture
def too_much_for_1f1b() -> tuple[hpgo.Profile, hpgo.Cluster]:
    """One activation a stage fits, two don't."""
    return chain([1.0] * 16, activation_bytes=GB), cluster(4, "9 GB")


@pytest.mark.parametrize("name", ["zb", "sequential", "auto"])
def test_schedules_that_hold_one_activation_are_planned_where_1f1b_fits_nowhere(
    name: str, too_much_for_1f1b: tuple[hpgo.Profile, hpgo.Cluster]
) -> None:
    for other in ("1f1b", "eager_1f1b", "gpipe", "zb_h1"):
        with pytest.raises(hpgo.errors.InfeasibleError, match="no plan fits") as caught:
            hpgo.plan(*too_much_for_1f1b, global_batch_size=16, pipeline_micro_batch_size=1, schedule=other)
        assert "choose schedule `zb`" in str(caught.value.hint)
    plan = hpgo.plan(*too_much_for_1f1b, global_batch_size=16, pipeline_micro_batch_size=1, schedule=name)
    assert plan.fits
    assert max(stage.max_in_flight for stage in plan.stages) == 1
    assert plan.global_batch_size == 16
    assert plan.one_device_step_s == pytest.approx(16 * 16 * 3.0)
    assert plan.timeline().makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    if name == "auto":
        assert {choice.name for choice in plan.schedules} == set(ALL)
        assert next(choice for choice in plan.schedules if choice.name == "1f1b").reason.startswith("no plan fits")


@pytest.mark.parametrize("name", NAMES[3:])
def test_what_fits_nowhere_is_refused_for_every_schedule(name: str) -> None:
    with refused(hpgo.errors.InfeasibleError, "insufficient_memory"):
        hpgo.plan(chain([1.0] * 4, parameter_bytes=10 * GB), cluster(4, "9 GB"), global_batch_size=16, schedule=name)


@pytest.mark.parametrize("name", ["zb", "interleaved", "auto"])
def test_ctrl_c_gives_the_best_so_far_once_there_is_one(name: str) -> None:
    question = (hpgo.read_profile("amoebanet-36"), hpgo.Cluster.preset("dapple-c"))

    def interrupted(best_s: float, _bound_s: float) -> None:
        if best_s < float("inf"):
            raise KeyboardInterrupt

    plan = hpgo.plan(*question, global_batch_size=64, schedule=name, progress=interrupted)
    assert plan.fits
    assert plan.stop_reason == "interrupt"
    assert plan.timeline().makespan_s == pytest.approx(plan.step_s, rel=1e-12)


def test_ctrl_c_after_the_first_schedule_is_said_of_the_plan() -> None:
    """The schedule that is taken was searched to its end, but others were not tried."""
    ticks: list[float] = []

    def interrupted(best_s: float, _bound_s: float) -> None:
        ticks.append(best_s)
        if len(ticks) > 1 and best_s < float("inf"):
            raise KeyboardInterrupt

    plan = hpgo.plan("bert-48", "dapple-a", global_batch_size=64, schedule="auto", progress=interrupted)
    assert plan.stop_reason == "interrupt"
    assert any(choice.reason.startswith("not tried") or choice.step_s for choice in plan.schedules)


def test_the_same_question_has_the_same_answer_twice(auto: hpgo.Plan) -> None:
    again = hpgo.plan(
        hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64, schedule="auto"
    )
    assert again == auto


def held_bytes(order: hpgo.Schedule, rank: int, saved_activation_bytes: float, again_bytes: float) -> float:
    """Most activations of a rank: its stage's input from F on, what I or B makes again until W or B has ended."""
    held, maximum = 0.0, 0.0
    for action in order.action_lists[rank]:
        if "F" in action:
            held += saved_activation_bytes
        elif "W" not in action:
            held += again_bytes
        maximum = max(maximum, held)
        if "B" in action or "W" in action:
            held -= saved_activation_bytes + again_bytes
    assert held == pytest.approx(0)
    return maximum


@pytest.mark.parametrize("name", NAMES)
def test_recomputation_is_priced_as_it_is_simulated(name: str) -> None:
    """I repeats the forward, so that I and W take 2 and 1 for a forward of 1 and a backward of 2."""
    question = (chain([1.0] * 4, activation_bytes=1e8, parameter_bytes=1e8), cluster(4, gbit_s=1e6))
    plan = hpgo.plan(*question, global_batch_size=8, pipeline_micro_batch_size=1, schedule=name, recompute=True)
    assert plan.recompute
    order, timeline = plan.to_schedule(), plan.timeline()
    free = hpgo.simulate(order, forward_s=1, backward_s=3, input_gradient_s=2, weight_gradient_s=1)
    if len(plan.stages) == 4:
        assert plan.step_s == pytest.approx(free.makespan_s, rel=1e-3)
    assert timeline.makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    for rank, stage in enumerate(plan.stages):
        kept, again = (0.0 if rank == 0 else 1e8), 1e8 * len(stage.layers)
        if name != "1f1b_overlap":  # pairs hold both halves at once
            assert stage.memory.activations_bytes == pytest.approx(held_bytes(order, rank, kept, again))
        assert timeline.measures.peak_memory_bytes is not None
        assert timeline.measures.peak_memory_bytes[rank] == pytest.approx(stage.memory.total_bytes)


def test_recompute_auto_compares_activations_kept_and_recomputed() -> None:
    question = (chain([1.0] * 8, activation_bytes=1e9), cluster(4, "12 GB", gbit_s=1e6))
    again, either = (
        hpgo.plan(*question, global_batch_size=16, schedule="zb_h1", recompute=recompute)
        for recompute in (True, "auto")
    )
    assert again.fits
    assert either.fits
    assert either.step_s < again.step_s


def test_a_deadline_ends_the_comparison(auto: hpgo.Plan) -> None:
    plan = hpgo.plan(
        hpgo.read_profile("bert-48"),
        hpgo.Cluster.preset("dapple-a"),
        global_batch_size=64,
        schedule="auto",
        time_limit_s=0.3,
    )
    assert plan.fits
    assert len(plan.schedules) == len(auto.schedules)


@pytest.mark.parametrize("name", [name for name in ONE_STAGE if name not in FRUGAL])
def test_schedules_that_are_refused_where_1f1b_fits_nowhere_hold_as_much_as_1f1b(name: str) -> None:
    for ranks, micro_batches in product(range(1, 7), range(1, 14)):
        held, minimum = (
            hpgo.schedule(family, ranks=ranks, micro_batches=micro_batches).peak_in_flight for family in (name, "1f1b")
        )
        assert all(more >= few for more, few in zip(held, minimum, strict=True))


def test_what_zb_h2_has_a_plan_for_is_not_said_to_fit_nowhere() -> None:
    """A stage of each cut fits three devices, and none of the plans that are tried does."""
    profile = hpgo.Profile(
        "t",
        (2,),
        tuple(
            hpgo.Layer(f"l{at}", "Linear", (length_s,), (2 * length_s,), (activation,), weights)
            for at, (length_s, activation, weights) in enumerate(
                [(0.002, 2e6, 1e7), (0.002, 4e6, 0.0), (0.004, 0.0, 1e7), (0.002, 0.0, 1e7)]
            )
        ),
        (("l0", "l1"), ("l1", "l2"), ("l2", "l3")),
    )
    few = cluster(3, "53425213 B")
    options = {"global_batch_size": 8, "schedule": "zb_h2", "min_samples_per_replica": 1}
    stages = [(1, [0]), (2, [1]), (1, [2])]
    assert hpgo.evaluate(profile, few, stages, pipeline_micro_batch_size=1, **options).fits
    try:
        assert hpgo.plan(profile, few, **options).fits
    except hpgo.errors.InfeasibleError as error:
        assert error.message.startswith("no plan was found that fits `zb_h2`")  # noqa: PT017
