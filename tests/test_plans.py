"""`hpgo.plan` against everything that could beat it, and against everything that could break it."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import replace_method
from refusals import refused
from toys import toy

import hpgo
from hpgo.base.units import parse_bytes
from hpgo.compat import Conductor, devices_from_seps, model_of
from hpgo.hardware.cluster import Device, Node
from hpgo.model.builtin import MODELS
from hpgo.planning.problem import SCHEDULES, PlanningProblem, PlanOptions

ROUNDING = 1 + 1e-9
BATCHES = (32, 64, 256)
MODERN = ("a100", "h100", "h200", "b200")
SMALL = [
    ("bert-48", "dapple-a", 32),
    ("bert-48", "dapple-b", 32),
    ("bert-48", "h100", 64),
    ("vgg-19", "dapple-c", 64),
    ("amoebanet-36", "dapple-c", 64),
    ("gnmt-16", "dapple-b", 32),
    ("xlnet-36", "dapple-b", 64),
    ("resnet-50", "dapple-c", 256),
]
GRID = [
    (model, preset, batches)
    for model in MODELS
    for preset in ("dapple-a", "dapple-b", "dapple-c", *(MODERN if model in {"bert-48", "gnmt-16"} else ()))
    for batches in BATCHES
]


def model_of_size(name: str, preset: str, batches: int) -> tuple[hpgo.Profile, hpgo.Cluster, int]:
    profile = hpgo.read_profile(name)
    return profile, hpgo.Cluster.preset(preset), batches * profile.batch_sizes[0]


@pytest.fixture(scope="module")
def bert() -> hpgo.Profile:
    return hpgo.read_profile("bert-48")


@pytest.fixture(scope="module")
def dapple() -> hpgo.Cluster:
    return hpgo.Cluster.preset("dapple-a")


@pytest.fixture(scope="module")
def uneven() -> hpgo.Plan:
    """Several stages with unequal numbers of replicas."""
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-b"), global_batch_size=64)


def pair(memory: str = "16 GB") -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10, memory=memory)


def rivals(profile: hpgo.Profile, cluster: hpgo.Cluster, size: int) -> dict[str, hpgo.Plan]:
    """Data parallelism, and the compatible planner's best and straightest plans, in the planner's own simulation."""
    conductor = Conductor(
        model_of(profile, size), devices_from_seps(list(accumulate(node.count for node in cluster.nodes)))
    )
    _, compatible = conductor.py_orchestrate()
    straight = max((result.stages for result in conductor.res), key=len)
    stages: dict[str, list[tuple[Any, Any]]] = {"data parallel": [(len(profile.layers), range(cluster.devices))]}
    for name, rows in (("compatible", compatible), ("straight", straight)):
        devices = [row[3] if name == "compatible" else [index] for index, row in enumerate(rows)]
        stages[name] = list(zip(conductor.layers(rows), devices, strict=True))
    priced = {}
    for name, rows in stages.items():
        try:
            priced[name] = hpgo.evaluate(profile, cluster, rows, global_batch_size=size)
        except hpgo.errors.HpgoError as error:
            if "sample" not in error.message:  # no micro-batch has one for each replica
                raise
    return priced


def check_unbeaten(name: str, preset: str, batches: int) -> None:
    profile, cluster, size = model_of_size(name, preset, batches)
    best = hpgo.plan(profile, cluster, global_batch_size=size)
    others = rivals(profile, cluster, size)
    assert others, "nothing to compare with"
    for rival, other in others.items():
        if other.fits:
            assert best.step_s <= other.step_s * ROUNDING, rival
            assert best.lower_bound_s is not None
            assert best.lower_bound_s <= other.step_s * ROUNDING, rival
    assert best.fits
    assert best.lower_bound_s <= best.step_s
    assert best.optimality_gap == pytest.approx(best.step_s / best.lower_bound_s - 1, abs=1e-12)
    assert sorted(layer for stage in best.stages for layer in stage.layers) == sorted(
        layer.id for layer in profile.layers
    )
    used = [device for stage in best.stages for device in stage.devices]
    assert len(set(used)) == len(used) <= cluster.devices
    assert max(used) < cluster.devices
    assert hpgo.simulate(best).makespan_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.parametrize(("name", "preset", "batches"), SMALL)
def test_no_classic_plan_beats_the_plan_and_its_simulation_agrees(name: str, preset: str, batches: int) -> None:
    check_unbeaten(name, preset, batches)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset", "batches"), GRID)
def test_no_classic_plan_beats_the_plan_on_the_whole_grid(name: str, preset: str, batches: int) -> None:
    check_unbeaten(name, preset, batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_alternatives_are_what_evaluate_says_of_them(
    schedule: str, bert: hpgo.Profile, dapple: hpgo.Cluster
) -> None:
    best = hpgo.plan(bert, dapple, global_batch_size=64, schedule=schedule)
    data_parallel, straight = best.alternatives
    alone = hpgo.evaluate(bert, dapple, [(53, range(16))], global_batch_size=64, schedule=schedule)
    if alone.fits:
        assert data_parallel.step_s == pytest.approx(alone.step_s, rel=1e-9)
    else:
        assert data_parallel.shortfall_bytes == pytest.approx(-alone.stages[0].free_bytes)
    for other in (data_parallel, straight):
        assert other.step_s is None or other.step_s >= best.step_s / ROUNDING
        assert other.reason


def test_equal_shares_give_each_replica_of_a_stage_as_many_samples(bert: hpgo.Profile) -> None:
    question = (bert, hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=100, inter_gbit_s=10))
    equal = hpgo.plan(*question, global_batch_size=64, even_split=True)
    assert all(equal.pipeline_micro_batch_size % stage.replicas == 0 for stage in equal.stages)


def test_evaluating_a_found_plan_gives_its_step_and_its_memory(uneven: hpgo.Plan, bert: hpgo.Profile) -> None:
    again = hpgo.evaluate(
        bert,
        hpgo.Cluster.preset("dapple-b"),
        [(stage.layers, stage.devices) for stage in uneven.stages],
        global_batch_size=64,
    )
    assert again.step_s <= uneven.step_s * ROUNDING
    assert again.lower_bound_s is None
    assert again.optimality_gap is None
    assert (again.pipeline_micro_batch_size, again.recompute) == (uneven.pipeline_micro_batch_size, uneven.recompute)
    for mine, theirs in zip(again.stages, uneven.stages, strict=True):
        assert mine.devices == theirs.devices
        assert mine.memory.total_bytes == pytest.approx(theirs.memory.total_bytes)
        assert mine.capacity_bytes == theirs.capacity_bytes


THREADS = """
import hpgo
from hpgo import _core
questions = (("bert-48", "dapple-b", 64), ("amoebanet-36", "dapple-c", 64), ("gnmt-16", "dapple-c", 2048))
for name, preset, size in questions:
    print(hpgo.plan(hpgo.read_profile(name), hpgo.Cluster.preset(preset), global_batch_size=size).to_json())
"""


def test_the_answer_does_not_depend_on_the_number_of_threads() -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", THREADS],
            env=os.environ | {"RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for threads in ("1", "2", "5")
    ]
    assert answers[0].count('"format": "hpgo.plan"') == 3
    assert answers[0] == answers[1] == answers[2]


# --- Stopping ---------------------------------------------------------------------------------------------------------


def long_question() -> tuple[hpgo.Profile, hpgo.Cluster, int]:
    """Many seconds of search, but a first plan at once."""
    cluster = hpgo.Cluster.preset("dapple-a:8")
    node = cluster.nodes[0]
    kinds = [replace(node, device=replace(node.device, speed=speed)) for speed in (1.0, 0.75, 0.6)]
    mixed = replace(cluster, nodes=tuple(kinds[number * 3 // 8] for number in range(8)))
    return hpgo.read_profile("amoebanet-36"), mixed, 128


def test_a_stage_of_few_devices_is_scattered_over_machines_where_their_links_are_slow() -> None:
    # Weights of the last layers are too many to sum over all devices, and one machine's port too slow to feed them.
    profile = replace(hpgo.read_profile("vgg-16"), batch_sizes=(64,))
    cluster = hpgo.Cluster.preset("dapple-a:8")
    plan = hpgo.plan(profile, cluster, global_batch_size=4_096)
    last = plan.stages[-1]
    assert plan.step_s < 1.09
    assert len({device // 8 for device in last.devices}) == last.replicas == 3
    whole = [(len(plan.stages[0].layers), range(61)), (len(last.layers), range(61, 64))]
    assert plan.step_s < 0.8 * hpgo.evaluate(profile, cluster, whole, global_batch_size=4_096).step_s


def test_a_deadline_returns_early_with_an_honest_gap_and_progress_until_then() -> None:
    profile, cluster, size = long_question()
    heard: list[tuple[float, float]] = []
    early = hpgo.plan(profile, cluster, global_batch_size=size, time_limit_s=2, progress=lambda *now: heard.append(now))
    assert (early.stop_reason, early.finished) == ("time_limit", False)
    assert early.fits
    assert early.lower_bound_s is not None
    assert 0 < early.lower_bound_s < early.step_s
    assert early.optimality_gap == pytest.approx(early.step_s / early.lower_bound_s - 1)
    assert hpgo.simulate(early).makespan_s == pytest.approx(early.step_s, rel=1e-9)
    steps, bounds = zip(*heard, strict=True)
    assert list(steps) == sorted(steps, reverse=True), "only better plans"
    assert list(bounds) == sorted(bounds), "only higher bounds"
    assert all(0 <= bound <= step * ROUNDING for step, bound in heard)
    assert early.step_s <= steps[-1] * ROUNDING
    assert early.lower_bound_s >= bounds[-1] / ROUNDING


def test_progress_goes_on_through_all_that_is_tried() -> None:
    heard: list[tuple[float, float]] = []
    question: dict[str, Any] = {"global_batch_size": 64, "recompute": "auto", "schedule": "auto"}
    best = hpgo.plan("amoebanet-36", "dapple-c:4", progress=lambda *now: heard.append(now), **question)
    steps, bounds = zip(*heard, strict=True)
    assert list(steps) == sorted(steps, reverse=True), "only better plans"
    assert steps[-1] >= best.step_s * (1 - 1e-9)
    assert set(bounds) == {0.0}, "what bounds one schedule bounds no other"

    def interrupt(best_s: float, bound_s: float) -> None:
        if len(heard) == len(steps) // 2:
            raise KeyboardInterrupt
        heard.append((best_s, bound_s))

    heard.clear()
    early = hpgo.plan("amoebanet-36", "dapple-c:4", progress=interrupt, **question)
    assert (early.stop_reason, early.fits) == ("interrupt", True)


def test_no_later_plan_undercuts_an_earlier_bound() -> None:
    profile, cluster = hpgo.read_profile("vgg-16"), hpgo.Cluster.preset("dapple-a")
    whole = hpgo.plan(profile, cluster, global_batch_size=4096)
    early = hpgo.plan(profile, cluster, global_batch_size=4096, time_limit_s=0.3)
    assert early.lower_bound_s is not None
    assert early.lower_bound_s <= whole.step_s * ROUNDING
    assert whole.step_s <= early.step_s * ROUNDING


def test_a_deadline_before_any_plan_says_so() -> None:
    # No plan fits, so that none can come before the deadline. That none fits may be known before it, too.
    small = hpgo.Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=100, inter_gbit_s=25, memory="1500 MB")
    with pytest.raises((hpgo.errors.TimeLimitError, hpgo.errors.InfeasibleError)) as caught:
        hpgo.plan(hpgo.read_profile("amoebanet-36"), small, global_batch_size=64, time_limit_s=1e-9)
    if isinstance(caught.value, hpgo.errors.TimeLimitError):
        assert "passed before there was any plan" in caught.value.message
        assert "more time" in caught.value.hint
    else:
        assert caught.value.message.startswith("no plan fits: ")


@pytest.mark.parametrize(
    ("model", "cluster", "size"),
    [("vgg-16", "dapple-a:16", 2**15), ("amoebanet-36", "dapple-a:8", 128), ("bert-48", "h100:32", 4_096)],
)
def test_a_short_deadline_leaves_a_plan_that_fits(model: str, cluster: str, size: int) -> None:
    early = hpgo.plan(hpgo.read_profile(model), hpgo.Cluster.preset(cluster), global_batch_size=size, time_limit_s=1)
    assert early.fits
    assert early.optimality_gap is not None
    assert hpgo.simulate(early).makespan_s == pytest.approx(early.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "nodes", "size", "maximum", "maximum_anywhere"),
    [
        ("vgg-16", 8, 2**14, 0.001, 0.001),
        ("vgg-16", 16, 2**15, 0.001, 0.001),
        pytest.param("amoebanet-36", 4, 128, 0.001, 0.05, marks=pytest.mark.slow),
        pytest.param("amoebanet-36", 8, 128, 0.001, 0.12, marks=pytest.mark.slow),
    ],
)
def test_little_memory_and_slow_links_on_many_machines_leave_a_small_gap(
    model: str, nodes: int, size: int, maximum: float, maximum_anywhere: float
) -> None:
    best = hpgo.plan(hpgo.read_profile(model), hpgo.Cluster.preset(f"dapple-a:{nodes}"), global_batch_size=size)
    assert best.finished
    assert best.optimality_gap is not None
    assert best.optimality_gap < maximum_anywhere
    assert best.node_aligned_bound_s is not None
    assert best.step_s / best.node_aligned_bound_s - 1 < maximum


def test_what_the_bound_takes_to_be_possible_on_many_machines_is_tried() -> None:
    cluster = hpgo.Cluster.of(nodes=128, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="40 GB")
    best = hpgo.plan(hpgo.read_profile("xlnet-36"), cluster, global_batch_size=4_096)
    assert best.optimality_gap is not None
    assert best.optimality_gap < 0.01


def test_hundreds_of_machines_give_a_device_each_to_layers_with_most_of_the_weights() -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-a:128"), global_batch_size=32_768)
    assert plan.step_s < 0.3435
    last = plan.stages[-1]
    assert len({device // 8 for device in last.devices}) == last.replicas
    assert 64 < last.replicas < 128


def test_an_exception_in_progress_stops_the_search_and_arrives() -> None:
    profile, cluster, size = long_question()

    class EnoughError(Exception):
        pass

    def progress(best_s: float, bound_s: float) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        hpgo.plan(profile, cluster, global_batch_size=size, progress=progress)


def test_ctrl_c_while_the_alternatives_are_looked_for_leaves_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    question = (hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"))
    whole = hpgo.plan(*question, global_batch_size=64)
    replace_method(monkeypatch, "classics", interrupted)
    stopped = hpgo.plan(*question, global_batch_size=64)
    assert all(other.reason.startswith("not searched") for other in stopped.alternatives)
    assert replace(stopped, alternatives=()) == replace(whole, alternatives=())


def test_alternatives_are_there_within_a_moment_and_the_same_each_time() -> None:
    question = (hpgo.read_profile("xlnet-36"), hpgo.Cluster.read("h100:32"))
    plans = [hpgo.plan(*question, global_batch_size=512) for _ in range(2)]
    assert plans[0] == plans[1]
    assert all(other.step_s is not None for other in plans[0].alternatives)


INTERRUPTED = """
import sys
sys.path.insert(0, {folder!r})
import hpgo
from hpgo import _core
from test_plans import long_question
profile, cluster, size = long_question()
def progress(best_s, bound_s):
    if best_s < float("inf"):
        print("searching", flush=True)
best = hpgo.plan(profile, cluster, global_batch_size=size, progress=progress, time_limit_s=90)
print("gap", best.optimality_gap, best.stop_reason, flush=True)
"""


def test_ctrl_c_returns_the_best_plan_so_far() -> None:
    script = INTERRUPTED.format(folder=os.path.dirname(__file__))  # noqa: PTH120
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    last = out.splitlines()[-1].split()
    assert last[0] == "gap"
    assert float(last[1]) >= 0
    assert last[2] == "interrupt"


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_with_stage_device_and_bytes(bert: hpgo.Profile) -> None:
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=25, memory="1 GB")
    with pytest.raises(hpgo.errors.InfeasibleError) as caught:
        hpgo.plan(bert, cluster, global_batch_size=64)
    message = caught.value.message
    assert re.search(r"stage \d of \d \(\d+ layers, micro-batch \d+\) needs [\d.]+ GB on each device", message)
    assert "`device` has 1 GB" in message
    assert re.search(r"[\d.]+ [GM]B short", message)
    assert caught.value.hint


def machines_of(*sizes: tuple[int, str]) -> hpgo.Cluster:
    """Machines with so many devices of so much memory each."""
    one = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1_200, inter_gbit_s=25)
    kinds = {memory: Device("device", parse_bytes(memory)) for _, memory in sizes}
    return replace(one, nodes=tuple(Node(kinds[memory], count) for count, memory in sizes))


NOWHERE = {
    "one device": ("bert-48", [(1, "1 GB")], {"global_batch_size": 64}),
    "no memory at all": ("bert-48", [(8, "1 B")] * 2, {"global_batch_size": 64}),
    "mixed nodes": ("bert-48", [(8, "200 MB"), (4, "100 MB"), (1, "300 MB")], {"global_batch_size": 64}),
    "a batch too small for the devices": ("vgg-16", [(8, "1 GB")] * 64, {"global_batch_size": 128}),
    "a branching model with few cuts": ("gnmt-16", [(8, "100 MB")] * 512, {"global_batch_size": 65_536}),
    "a branching model with one order": ("gnmt-32", [(8, "300 MB")] * 2, {"global_batch_size": 1_024}),
    "all forwards first": ("amoebanet-36", [(2, "2 GB")] * 2, {"global_batch_size": 128, "schedule": "gpipe"}),
    "few stages": ("bert-48", [(8, "2 GB")] * 2, {"global_batch_size": 64, "max_stages": 1}),
    "a large micro-batch": ("bert-48", [(8, "500 MB")] * 2, {"global_batch_size": 64, "pipeline_micro_batch_size": 64}),
    "reserved memory": (
        "bert-48",
        [(8, "16 GB")] * 2,
        {"global_batch_size": 64, "memory": hpgo.MemoryModel(reserved_bytes=15.9e9)},
    ),
    "many devices": ("bert-48", [(8, "300 MB")] * 2_048, {"global_batch_size": 65_536}),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_whatever_fits_nowhere_is_told_with_stage_device_and_bytes(name: str) -> None:
    model, sizes, options = NOWHERE[name]
    with pytest.raises(hpgo.errors.InfeasibleError) as caught:
        hpgo.plan(hpgo.read_profile(model), machines_of(*sizes), **options)
    assert re.search(
        r"stage \d+ of \d+ \(\d+ layers, micro-batch \d+\) needs [\d.]+ [KMG]B on each device,"
        r" but `device` has [\d.]+ [KMG]?B.*: [\d.]+ [KMGT]B short$",
        caught.value.message,
    )
    assert caught.value.hint


def test_one_huge_layer_lacks_about_what_it_holds() -> None:
    profile = toy(parameter_bytes=[1e8, 1e13, 1e8, 1e8])
    with refused(hpgo.errors.InfeasibleError, "infeasible", "TB"):
        hpgo.plan(profile, pair(), global_batch_size=64)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([2e7, 4e7, 8e7, 1e9]), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 7, 8]),
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["1 MB", "300 MB", "900 MB", "2 GB"])), min_size=1, max_size=4
    ),
    st.sampled_from(SCHEDULES),
)
def test_every_question_has_a_plan_that_fits_or_a_stage_that_does_not(
    activation_bytes: list[float], size: int, sizes: list[tuple[int, str]], schedule: str
) -> None:
    profile = toy(activation_bytes=activation_bytes)
    try:
        assert hpgo.plan(profile, machines_of(*sizes), global_batch_size=size, schedule=schedule).fits
    except hpgo.errors.InfeasibleError as error:
        why = error.message
    else:
        return
    assert re.search(r"stage \d+ of \d+ .* needs .* but `device` has .* short$", why)


def rows_of_layers(lengths: list[int]) -> hpgo.Profile:
    """Return layers without weights that save 1 GB each, in rows side by side, and one layer behind all of them."""

    def layer(name: str, saved_bytes: float) -> hpgo.Layer:
        return hpgo.Layer(name, "Linear", (1e-3,), (1e-3,), (1e3,), 0.0, saved_bytes=(saved_bytes,))

    rows = [[f"row{row}-{number}" for number in range(length)] for row, length in enumerate(lengths)]
    layers = [layer(name, 1e9) for row in rows for name in row]
    edges = [edge for row in rows for edge in [*pairwise(row), (row[-1], "last")]]
    return hpgo.Profile("rows", (1,), (*layers, layer("last", 0.0)), tuple(edges))


@pytest.mark.parametrize(
    ("lengths", "memory"),
    [
        # The stage that is k-th from the end has room for 20 / k layers, so all together have room for 66.
        ([80], "20.1 GB"),
        # 13 ** 4 cuts are too many to list. Stages have room for 14 layers.
        ([12] * 4, "6.1 GB"),
    ],
)
def test_what_many_stages_or_many_cuts_cannot_hold_is_certain_to_fit_nowhere(lengths: list[int], memory: str) -> None:
    cluster = hpgo.Cluster.of(nodes=64, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10, memory=memory)
    with refused(hpgo.errors.InfeasibleError, "infeasible", "device", "6", "4"):
        hpgo.plan(rows_of_layers(lengths), cluster, global_batch_size=64)


def test_what_a_large_and_a_small_device_cannot_hold_is_certain_to_fit_nowhere() -> None:
    # One large device and 63 small ones have the memory and the number, but each layer needs a large one.
    sizes = [(1, "64 GB"), (63, "900 MB")]
    for schedule in ("1f1b", "interleaved", "auto"):
        with pytest.raises(hpgo.errors.InfeasibleError, match=r"^no plan fits"):
            hpgo.plan(rows_of_layers([70]), machines_of(*sizes), global_batch_size=8, schedule=schedule)


def test_only_a_micro_batch_that_can_shrink_is_advised_to() -> None:
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, inter_gbit_s=10, memory="1 GB")
    for size, pipeline_micro_batch_size, can_shrink in ((7, 1, False), (7, 7, True), (8, 8, True), (8, None, False)):
        with pytest.raises(hpgo.errors.InfeasibleError) as caught:
            hpgo.plan(
                toy(activation_bytes=[9e9] * 4),
                cluster,
                global_batch_size=size,
                pipeline_micro_batch_size=pipeline_micro_batch_size,
            )
        assert caught.value.message.startswith("no plan fits: in the closest plan found, stage ")
        assert ("smaller micro-batch" in caught.value.hint) == can_shrink


HELPS = {
    "recompute activations": {"recompute": True},
    "shard the optimizer state": {"memory": hpgo.MemoryModel(shard_optimizer=True)},
    "recompute and shard": {"recompute": True, "memory": hpgo.MemoryModel(shard_optimizer=True)},
}


@pytest.mark.parametrize(
    ("memory", "activation_bytes", "parameter_bytes"),
    [
        ("1.35 GB", 1.2e8, [1e8] * 4),
        ("2 GB", 4e8, [1e8] * 4),
        ("1.5 GB", 1e6, [2e8] * 4),
        ("1.5 GB", 1e6, [4e8, 0, 0, 0]),
        ("1.4 GB", 8e7, [4e8, 0, 0, 0]),
        ("900 MB", 2e8, [2e8] * 4),
    ],
)
def test_advice_for_too_little_memory_works_when_followed(
    memory: str, activation_bytes: float, parameter_bytes: list[float]
) -> None:
    profile = toy(activation_bytes=[activation_bytes] * 4, parameter_bytes=parameter_bytes)
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory=memory)
    with pytest.raises(hpgo.errors.InfeasibleError) as caught:
        hpgo.plan(profile, cluster, global_batch_size=8)
    hint = caught.value.hint
    if "some plan fits" not in hint:
        assert hint == "use devices with more memory"
        for options in HELPS.values():
            with pytest.raises(hpgo.errors.InfeasibleError):
                hpgo.plan(profile, cluster, global_batch_size=8, **options)
        return
    followed = 0
    for words, options in HELPS.items():
        if words in hint:
            assert hpgo.plan(profile, cluster, global_batch_size=8, **options).fits
            followed += 1
    if devices := re.search(r"use (\d+) devices", hint):
        nodes = int(devices[1]) // cluster.devices
        more = replace(cluster, nodes=cluster.nodes * nodes)
        assert hpgo.plan(profile, more, global_batch_size=8).fits
        followed += 1
    assert followed


# --- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *(
            ({"global_batch_size": size}, "global_batch_size")
            for size in (0, -8, True, 8.0, math.nan, "8", None, 2**31)
        ),
        *(
            ({"pipeline_micro_batch_size": size}, "pipeline_micro_batch_size")
            for size in (0, -2, 3, True, 2.0, "2", 10**9)
        ),
        *(({"min_samples_per_replica": size}, "min_samples_per_replica") for size in (0, -2, True, 2.0, "2")),
        ({"min_samples_per_replica": 9}, "smaller than min_samples_per_replica, 9"),
        *(({"recompute": value}, "recompute") for value in ("yes", None, 2, math.nan, [])),
        *(({name: value}, name) for name in ("even_split", "overlap") for value in ("yes", None, 2)),
        *(({"schedule": name}, "schedule") for name in ("nope", "dualpipe", "", None, 3, [])),
        *(({"time_limit_s": value}, "time_limit_s") for value in (0, -1, math.nan, "1", True)),
        *(({"max_stages": value}, "max_stages") for value in (0, -1, True, 1.5, "2")),
        *(({"progress": value}, "progress") for value in (0, "bar")),
        ({"memory": 0}, "memory"),
        ({"memory": "16 GB"}, "there is no optimizer `16 GB`"),
        ({"memory": hpgo.MemoryModel(gradients_per_weight=math.nan)}, "gradients_per_weight"),
        ({"memory": hpgo.MemoryModel(optimizer_per_weight=-1)}, "optimizer_per_weight"),
        ({"memory": hpgo.MemoryModel(reserved_bytes=math.nan)}, "reserved_bytes"),
        ({"memory": hpgo.MemoryModel(reserved_bytes=-1)}, "reserved_bytes"),
        ({"memory": hpgo.MemoryModel(reserved_bytes="much")}, "`much` is no size"),
        ({"memory": hpgo.MemoryModel(gradients_per_weight="a")}, "gradients_per_weight"),
        ({"memory": hpgo.MemoryModel(shard_optimizer="yes")}, "shard_optimizer"),
        ({"profile": 48}, "profile"),
        ({"profile": None}, "profile"),
        ({"cluster": 2}, "cluster"),
        ({"cluster": None}, "cluster"),
    ],
    ids=repr,
)
def test_a_bad_argument_is_named_with_a_way_out(arguments: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {"profile": toy(), "cluster": pair(), "global_batch_size": 8}
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan(**good | arguments)
    assert named in caught.value.message
    assert caught.value.hint


def test_the_help_of_plan_tells_every_option_and_its_default() -> None:
    accepted = inspect.signature(PlanningProblem.of).parameters
    new = list(PlanOptions.__annotations__)
    options = {name: accepted[name].default for name in new}
    assert [*accepted] == ["profile", "cluster", "global_batch_size", *options, "unknown"]
    told = re.findall(r"^ {8}(\w+)=(\S+):", str(hpgo.plan.__doc__), re.MULTILINE)
    assert dict(told) == {name: repr(value).replace("'", '"') for name, value in options.items()}


def test_evaluating_holds_stages_back_where_running_ahead_is_slower() -> None:
    profile = hpgo.Profile.chain(
        "crossed",
        batch_size=1,
        forward_s=[1.3, 1.3, 3.4, 1.4, 0.5],
        backward_s=[7.5, 6.0, 6.0, 3.8, 5.4],
        activation_bytes=[3e9, 1e8, 3e9, 1e9, 1e9],
        parameter_bytes=[5e8, 5e8, 1e8, 1e6, 5e8],
    )
    cluster = hpgo.Cluster.of(nodes=3, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=5, memory="16 GB")
    best = hpgo.plan(profile, cluster, global_batch_size=16)
    windows = [stage.max_in_flight for stage in best.stages]
    assert windows == [3, 2, 1]  # stage 1 has memory for three
    stages = [(stage.layers, stage.devices) for stage in best.stages]
    again = hpgo.evaluate(profile, cluster, stages, global_batch_size=16)
    assert again.step_s == pytest.approx(best.step_s, rel=1e-12)
    assert [stage.max_in_flight for stage in again.stages] == windows


@pytest.mark.parametrize("function", [hpgo.plan, hpgo.exhaustive])
def test_an_option_that_is_none_is_named(function: Any) -> None:
    with pytest.raises(
        TypeError, match=r"no argument `pipeline_micro_batch`: did you mean `pipeline_micro_batch_size`\?"
    ):
        function(toy(), pair(), global_batch_size=8, pipeline_micro_batch=2)


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ([], "layer `layer0` is in no stage"),
        ([(4, [0, 1, 0])], "stage 0 names device 0 twice"),
        ([(["layer0", "layer0"], [0])], "stage 0 names layer `layer0` twice"),
        ([(3, [0])], "is in no stage"),
        ([(5, [0])], "5 layers"),
        ([(0, [0])], "layers of stage 0 is 0"),
        ([(True, [0]), (3, [1])], "layers of stage 0 are true"),
        ([(4.0, [0])], "layers of stage 0"),
        ([(4, [])], "no devices"),
        ([(4, 0)], "devices of stage 0"),
        ([(4, [2])], "device 2"),
        ([(4, [-1])], "device -1"),
        ([(4, [0.5])], "device 0.5"),
        ([(4, [2**40])], "device 1099511627776"),
        ([(4, ["a"])], "device 'a'"),
        ([(4, "0")], "devices of stage 0"),
        ([(4, [0, 0])], "device 0"),
        ([(2, [0]), (2, [0])], "device 0"),
        ([(["layer0", "layer9"], [0])], "`layer9`"),
        ([([["layer0"]], [0])], "a list"),
        ([(["layer0", "layer1"], [0]), (["layer1", "layer2", "layer3"], [1])], "layer1"),
        ([(["layer2", "layer3"], [0]), (["layer0", "layer1"], [1])], "layer"),
        ([(4,)], "stage 0"),
        (None, "stages"),
        (4, "stages"),
    ],
    ids=repr,
)
def test_stages_that_make_no_plan_are_named(stages: Any, named: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.evaluate(toy(), pair(), stages, global_batch_size=8)
    assert named in caught.value.message
    assert caught.value.hint


def test_one_device_needs_no_pipeline() -> None:
    best = hpgo.plan(toy(), hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=100), global_batch_size=8)
    assert [(stage.layers, stage.devices) for stage in best.stages] == [
        (("layer0", "layer1", "layer2", "layer3"), (0,))
    ]
    assert best.step_s == pytest.approx(best.one_device_step_s)
    assert best.optimality_gap == 0


def test_more_devices_than_layers_and_samples_leave_some_idle() -> None:
    cluster = hpgo.Cluster.of(nodes=8, devices_per_node=8, intra_gbit_s=100, inter_gbit_s=1)
    best = hpgo.plan(toy(), cluster, global_batch_size=2)
    assert best.devices < best.cluster_devices == 64
    assert best.fits
    assert str(best)


@pytest.mark.parametrize("sizes", [0.0, 1e6])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_takes_no_time_is_planned_and_reported(sizes: float, devices: int, tmp_path: Any) -> None:
    nothing = toy(forward_s=[0.0] * 3, backward_s=[0.0] * 3, activation_bytes=[sizes] * 3, parameter_bytes=[sizes] * 3)
    cluster = hpgo.Cluster.of(nodes=devices, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10, latency="1 ms")
    best = hpgo.plan(nothing, cluster, global_batch_size=8)
    assert (best.step_s, best.optimality_gap, best.speed_up, best.bubble) == (0, 0, 1, 0)
    assert best.samples_per_s == math.inf
    assert best.limit == "nothing takes time"
    assert "Step time   0 s for" in str(best)
    assert hpgo.Plan.from_json(best.to_json()) == best
    assert hpgo.simulate(best).makespan_s == 0
    assert hpgo.exhaustive(nothing, cluster, global_batch_size=8).step_s == 0


@pytest.mark.parametrize("stop_reason", [None, "time_limit", "interrupt", "work_limit"])
def test_why_a_search_ended_survives_json_also_of_older_files(stop_reason: str | None, bert: hpgo.Profile) -> None:
    plan = replace(hpgo.plan(bert, hpgo.Cluster.preset("dapple-a"), global_batch_size=64), stop_reason=stop_reason)
    assert hpgo.Plan.from_json(plan.to_json()) == plan
    older = json.loads(plan.to_json())
    del older["stop_reason"]
    assert hpgo.Plan.from_json(json.dumps(older)).finished == plan.finished


def test_reasons_that_there_are_not_or_that_contradict_each_other_are_refused(bert: hpgo.Profile) -> None:
    plan = json.loads(hpgo.plan(bert, hpgo.Cluster.preset("dapple-a"), global_batch_size=64).to_json())
    for wrong in ({"stop_reason": "tired"}, {"stop_reason": "work_limit", "finished": False}):
        with pytest.raises(hpgo.errors.ArgumentError, match="stop_reason"):
            hpgo.Plan.from_json(json.dumps(plan | wrong))


def test_layers_without_time_beside_others_do_no_harm() -> None:
    profile = toy(forward_s=[0.0, 0.01, 0.0, 0.02], backward_s=[0.0, 0.02, 0.0, 0.04])
    best = hpgo.plan(profile, pair(), global_batch_size=8)
    assert best.step_s == pytest.approx(hpgo.exhaustive(profile, pair(), global_batch_size=8).step_s)


# --- Ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "preset", "size"),
    [("bert-48", "dapple-b", 64), ("vgg-19", "dapple-c", 2048), ("bert-24", "dapple-c", 384)],
)
def test_every_rank_knows_its_part_and_neighbours_agree(name: str, preset: str, size: int) -> None:
    best = hpgo.plan(hpgo.read_profile(name), hpgo.Cluster.preset(preset), global_batch_size=size)
    ranks = {device: best.for_rank(device) for stage in best.stages for device in stage.devices}
    assert len(ranks) == best.devices
    for index, stage in enumerate(best.stages):
        rows = [row for device in stage.devices for row in ranks[device].stages[0].rows]
        assert rows == list(range(best.pipeline_micro_batch_size)), "the rows of a stage partition the micro-batch"
        assert max(len(ranks[device].stages[0].rows) for device in stage.devices) == stage.samples_per_replica
        for replica, device in enumerate(stage.devices):
            (mine,) = ranks[device].stages
            assert (ranks[device].rank, mine.stage, mine.replica) == (device, index, replica)
            assert (mine.layers, mine.peers, ranks[device].max_in_flight) == (
                stage.layers,
                stage.devices,
                stage.max_in_flight,
            )
            assert ranks[device].micro_batches * best.pipeline_micro_batch_size == size
            for way, is_end in ((mine.receives, index == 0), (mine.sends, index == len(best.stages) - 1)):
                moved = sorted(row for message in way for row in message.rows)
                assert moved == ([] if is_end else list(mine.rows))
            for message in mine.sends:
                assert replace(message, peer=device) in ranks[message.peer].stages[0].receives
            for message in mine.receives:
                assert replace(message, peer=device) in ranks[message.peer].stages[0].sends


def test_an_idle_rank_gets_a_part_without_work(uneven: hpgo.Plan) -> None:
    spare = replace(uneven, cluster_devices=18, nodes=(8, 8, 2)).for_rank(17)
    assert spare.is_idle
    assert (spare.stages, spare.actions, spare.sums) == ((), (), ())
    assert (spare.node, spare.local_rank, spare.world_size) == (2, 1, 18)
    assert spare.groups == uneven.for_rank(0).groups, "all ranks create all groups"


@pytest.mark.parametrize("rank", [-1, 16, 10**9])
def test_a_rank_beyond_the_cluster_is_refused(rank: int, uneven: hpgo.Plan) -> None:
    with refused(hpgo.errors.ArgumentError, "invalid_argument", rank, 16):
        uneven.for_rank(rank)


@pytest.mark.parametrize("name", ["stage", "replica", "layers", "rows", "peers", "receives", "sends"])
def test_names_of_the_version_before_still_work_with_a_warning(name: str, uneven: hpgo.Plan) -> None:
    mine = uneven.for_rank(3)
    with pytest.warns(DeprecationWarning, match=rf"stages\[0\]\.{name}"):
        old = getattr(mine, name)
    now = getattr(mine.stages[0], name)
    assert old == (tuple((m.peer, m.rows) for m in now) if name in {"receives", "sends"} else now)


@pytest.mark.parametrize("rank", [True, 1.0, "0", None])
def test_a_rank_that_is_no_number_is_refused(rank: Any, uneven: hpgo.Plan) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="rank is"):
        uneven.for_rank(rank)


# --- Against every plan -----------------------------------------------------------------------------------------------

_TIMES = st.one_of(st.just(0.0), st.floats(0.1, 10.0), st.sampled_from([1.0, 2.0]))
_BYTES = st.one_of(st.just(0.0), st.floats(1.0, 1_000.0))


@st.composite
def _questions(draw: st.DrawFn) -> tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]]:
    count = draw(st.integers(1, 5))

    def column(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=count, max_size=count))

    profile = hpgo.Profile.chain(
        "random",
        batch_size=1,
        forward_s=column(_TIMES),
        backward_s=column(_TIMES),
        activation_bytes=column(_BYTES),
        parameter_bytes=column(_BYTES),
    )
    if count > 2 and draw(st.booleans()):
        kept = draw(st.integers(0, count - 2))  # a branch: one layer feeds the last one instead of its successor
        edges = {edge for at, edge in enumerate(profile.edges) if at != kept}
        edges.add((f"layer{kept}", f"layer{count - 1}"))
        profile = replace(profile, edges=tuple(sorted(edges)))
    nodes, devices = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 4)]))
    cluster = hpgo.Cluster.of(
        nodes=nodes,
        devices_per_node=devices,
        intra_gbit_s=draw(st.floats(1e-7, 1e-3)),
        inter_gbit_s=draw(st.floats(1e-7, 1e-4)),
        memory=draw(st.sampled_from([1e9, 20_000.0, 8_000.0])),
        latency=draw(st.sampled_from([0.0, 0.1])),
    )
    options = {
        "global_batch_size": draw(st.sampled_from([1, 2, 4, 6, 8])),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "recompute": draw(st.sampled_from([False, True, "auto"])),
        "even_split": draw(st.booleans()),
        "overlap": draw(st.booleans()),
    }
    return profile, cluster, options


@settings(max_examples=150)
@given(_questions())
def test_no_plan_of_all_beats_the_bound_or_the_plan_by_more_than_its_gap(
    question: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]],
) -> None:
    profile, cluster, options = question
    try:
        truth = hpgo.exhaustive(profile, cluster, **options)
    except hpgo.errors.InfeasibleError:
        with pytest.raises(hpgo.errors.InfeasibleError):
            hpgo.plan(profile, cluster, **options)
        return
    best = hpgo.plan(profile, cluster, **options)
    assert best.fits
    assert best.optimality_gap is not None
    assert best.lower_bound_s is not None
    assert best.lower_bound_s <= truth.step_s * ROUNDING
    assert truth.step_s <= best.step_s * ROUNDING
    assert best.step_s <= truth.step_s * (1 + best.optimality_gap) * ROUNDING
    assert hpgo.simulate(best).makespan_s == pytest.approx(best.step_s, rel=1e-9)


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_plan_survives_its_file(uneven: hpgo.Plan, tmp_path: Any) -> None:
    uneven.save(tmp_path / "plan.json")
    again = hpgo.Plan.read(tmp_path / "plan.json")
    assert again == uneven
    assert str(again) == str(uneven)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(leaf for key, child in items for leaf in _leaves(child, (*path, key)))]


def _refusal(document: Any) -> hpgo.errors.ArgumentError | None:
    try:
        plan = hpgo.Plan.from_json(json.dumps(document), source="plan.json")
    except hpgo.errors.ArgumentError as error:
        return error
    assert str(plan)
    return None


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_break_of_a_plan_file_is_refused_or_harmless(share: int, uneven: hpgo.Plan) -> None:
    """In every run, each place gets one wrong value in four, and each value is tried in one place of four."""
    text = uneven.to_json()
    refused = 0
    values = (None, "x", -1, 0, 1.5, 1e400, math.nan, [], {}, True, "drop", [[]])
    for number, path in enumerate(_leaves(json.loads(text))[1:]):
        for wrong in values[number % share :: share]:
            document = json.loads(text)
            place = document
            for key in path[:-1]:
                place = place[key]
            if wrong == "drop":
                del place[path[-1]]
            else:
                place[path[-1]] = wrong
            if refusal := _refusal(document):
                assert "plan.json" in refusal.message, (path, wrong)
                assert refusal.hint, (path, wrong)
                refused += 1
    assert refused > 300 / share


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe\x00", b"{" * 100_000),
        b'{"format": "hpgo.plan"}',
        b'{"format": "hpgo.plan", "version": 1}',
        b'{"format": "hpgo.plan", "version": 99}',
    ],
    ids=lambda content: f"{content[:40]!r}",
)
def test_a_file_that_is_no_plan_is_named(content: bytes, tmp_path: Any) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.Plan.read(path)
    assert "broken.json" in caught.value.message
    assert caught.value.hint


def test_files_that_cannot_be_read_or_written_are_named(uneven: hpgo.Plan, tmp_path: Any) -> None:
    for attempt in (
        lambda: hpgo.Plan.read(tmp_path / "missing.json"),
        lambda: hpgo.Plan.read(tmp_path),
        lambda: uneven.save(tmp_path / "no" / "folder.json"),
        lambda: uneven.save(f"{tmp_path}/a\0b"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError) as caught:
            attempt()
        # There is nothing to type where no file nearby has a like name.
        assert caught.value.hint or "file not found" in caught.value.message


def test_a_bound_on_large_clusters_holds_for_scattered_stages() -> None:
    # As in VGG-16: a few heavy layers behind many light ones, and links that are slow beside both.
    profile = hpgo.Profile.chain(
        "heavy end",
        batch_size=32,
        forward_s=[0.02] * 12 + [0.002] * 3,
        backward_s=[0.04] * 12 + [0.004] * 3,
        activation_bytes=[5e7] * 6 + [1e7] * 6 + [5e5] * 3,
        parameter_bytes=[2e6] * 12 + [4e8, 7e7, 2e7],
    )
    cluster = hpgo.Cluster.of(nodes=8, devices_per_node=8, intra_gbit_s=800, inter_gbit_s=25)
    plan = hpgo.plan(profile, cluster, global_batch_size=2048)
    assert plan.placements == "compact"
    assert plan.lower_bound_s is not None
    assert plan.node_aligned_bound_s is not None
    assert 0 < plan.lower_bound_s <= plan.node_aligned_bound_s <= plan.step_s
    assert ("proven optimal" in str(plan)) == (plan.optimality_gap is not None and plan.optimality_gap < 5e-7)
    # The last layers on a device each of three machines, all others on what is left.
    scattered = [0, 8, 16]
    others = [device for device in range(64) if device not in scattered]
    rival = hpgo.evaluate(profile, cluster, [(12, others), (3, scattered)], global_batch_size=2048)
    assert plan.lower_bound_s <= rival.step_s


def test_windows_between_the_least_and_the_largest_are_found_where_they_are_best():
    """With 5, 5, 3 and 1 in flight, the most that memory allows, the step takes 20.15 s; with 5, 3, 2 and 1 18.03 s."""
    rows = [
        (0.26, 0.53, 10e6, 20e6, 123e6),
        (0.22, 0.30, 18e6, 7e6, 73e6),
        (0.40, 0.37, 28e6, 4e6, 132e6),
        (0.37, 0.59, 1e6, 21e6, 180e6),
    ]
    layers = tuple(
        hpgo.Layer(
            f"layer{at}",
            f"layer{at}",
            (forward_s,),
            (backward_s,),
            (activation_bytes,),
            parameter_bytes,
            (saved_bytes,),
        )
        for at, (forward_s, backward_s, activation_bytes, parameter_bytes, saved_bytes) in enumerate(rows)
    )
    edges = tuple((f"layer{at}", f"layer{at + 1}") for at in range(3))
    profile = hpgo.Profile("windows", (1,), layers, edges)
    cluster = hpgo.Cluster.of(
        nodes=4, devices_per_node=1, inter_gbit_s=1.44, intra_gbit_s=1, memory=728e6, latency=0.26
    )
    plan = hpgo.plan(profile, cluster, global_batch_size=11, pipeline_micro_batch_size=1)
    given = hpgo.evaluate(
        profile, cluster, [(1, [rank]) for rank in range(4)], global_batch_size=11, pipeline_micro_batch_size=1
    )
    assert [stage.max_in_flight for stage in given.stages] == [5, 4, 3, 1]
    assert given.step_s == pytest.approx(15.8856, rel=1e-5)
    assert plan.lower_bound_s <= plan.step_s <= given.step_s


def test_a_plan_recomputes_only_in_the_stages_that_need_it() -> None:
    small = replace(hpgo.Cluster.preset("dapple-b"), nodes=tuple(
        replace(node, device=replace(node.device, memory_bytes=2e9)) for node in hpgo.Cluster.preset("dapple-b").nodes
    ))  # fmt: skip
    asked: dict[str, Any] = {"global_batch_size": 1024, "schedule": "1f1b"}
    plan = hpgo.plan("vgg-19", small, recompute="auto", **asked)
    assert plan.recompute == "auto"
    assert plan.step_s < 0.9 * hpgo.plan("vgg-19", small, recompute=True, **asked).step_s
    with pytest.raises(hpgo.errors.InfeasibleError):
        hpgo.plan("vgg-19", small, **asked)
    for stage in plan.stages:
        kept_bytes = stage.memory.recomputed_bytes if stage.recompute else stage.saved_activation_bytes
        rest_bytes = stage.memory.total_bytes - stage.memory.activations_bytes
        assert (rest_bytes + stage.max_in_flight * kept_bytes > stage.capacity_bytes) == stage.recompute
    assert "activations recomputed in stage" in str(plan)
    assert hpgo.Plan.from_json(plan.to_json()).reevaluate().step_s == plan.step_s
    flags = [stage.recompute for stage in plan.stages]
    assert [stage.recompute for stage in plan.program().stages] == flags
    held = hpgo.simulate(plan.program()).measures
    assert held.makespan_s == pytest.approx(plan.step_s)
    rows = [(stage.layers, stage.devices) for stage in plan.stages]
    again = hpgo.evaluate("vgg-19", small, rows, recompute="auto", **asked)
    assert ([stage.recompute for stage in again.stages], again.step_s) == (flags, plan.step_s)


def test_a_file_with_one_value_of_recomputation_is_read_for_all_stages() -> None:
    plan = hpgo.plan("vgg-19", "dapple-b", global_batch_size=1024, recompute=True)
    document = json.loads(plan.to_json())
    for stage in document["stages"]:
        del stage["recompute"]
    document["recompute"] = True
    assert hpgo.Plan.from_json(json.dumps(document)).stages == plan.stages
    program = json.loads(plan.program().to_json())
    for stage in program["stages"]:
        del stage["recompute"]
    program["recompute"] = True
    assert hpgo.Program.from_json(json.dumps(program)) == plan.program()


def test_a_stage_that_fits_neither_way_is_reported_with_the_choice_that_lacks_less() -> None:
    # With one micro-batch in flight, recomputation needs the input of the stage in addition, so it never helps.
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=4, intra_gbit_s=100, inter_gbit_s=10, memory="1 GB")
    lacking = {}
    for recompute in (False, "auto"):
        with pytest.raises(hpgo.errors.InfeasibleError) as caught:
            hpgo.plan("vgg-19", cluster, global_batch_size=32, pipeline_micro_batch_size=32, recompute=recompute)
        lacking[recompute] = caught.value.message
    assert lacking[False] == lacking["auto"]
