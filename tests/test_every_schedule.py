"""Plans for schedules other than 1F1B are the best of all plans of small problems, and their bound is their step.

The oracle lists every plan by itself, and lets `hpgo.evaluate` choose the micro-batch size of each.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE_STAGE = ("zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential")

seconds = st.floats(0.5, 4).map(lambda value: round(value, 2))


@st.composite
def problems(draw: st.DrawFn) -> tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]]:
    layers = draw(st.integers(2, 4))
    columns: dict[str, list[float]] = {
        "forward_s": draw(st.lists(seconds, min_size=layers, max_size=layers)),
        "backward_s": draw(st.lists(seconds, min_size=layers, max_size=layers)),
        "activation_bytes": draw(st.lists(st.sampled_from([1e6, 1e9, 4e9]), min_size=layers, max_size=layers)),
        "parameter_bytes": draw(st.lists(st.sampled_from([0.0, 1e8, 1e9]), min_size=layers, max_size=layers)),
    }
    profile = hpgo.Profile.chain("random", batch_size=1, **columns)
    nodes, each = draw(st.sampled_from([(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]))
    # No sum of the sizes above fills a device exactly, which rounding could decide either way.
    memory_gb = draw(st.sampled_from([1000, 41.3, 17.3]))
    cluster = hpgo.Cluster.of(
        nodes=nodes, devices_per_node=each, intra_gbit_s=100, inter_gbit_s=draw(st.sampled_from([10, 50])),
        memory=f"{memory_gb} GB",
    )  # fmt: skip
    asked = {"global_batch_size": draw(st.sampled_from([2, 4, 6])), "recompute": draw(st.sampled_from([False, "auto"]))}
    return profile, cluster, asked


def every_plan(layers: int, devices: int) -> Iterator[list[tuple[int, list[int]]]]:
    """All stages with their devices; devices may be idle, and the order of a stage's devices does not matter."""
    for stages in range(1, min(layers, devices) + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            counts = [end - start for start, end in zip((0, *cuts), (*cuts, layers), strict=True)]
            for owners in product(range(stages + 1), repeat=devices):
                held = [[device for device, owner in enumerate(owners) if owner == stage] for stage in range(stages)]
                if all(held):
                    yield list(zip(counts, held, strict=True))


@given(problem=problems(), schedule=st.sampled_from([*ONE_STAGE, "auto"]))
@settings(max_examples=examples(1000, 25))
def test_no_plan_of_a_small_problem_is_faster(
    problem: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]], schedule: Any
) -> None:
    profile, cluster, asked = problem
    steps_s = []
    for name in ONE_STAGE if schedule == "auto" else (schedule,):
        for stages in every_plan(len(profile.layers), cluster.devices):
            try:
                plan = hpgo.evaluate(profile, cluster, stages, schedule=name, **asked)
            except hpgo.errors.ArgumentError:  # these replicas can't share any micro-batch
                continue
            if plan.fits:
                steps_s.append(plan.step_s)
    if not steps_s and schedule != "auto":
        with pytest.raises(hpgo.errors.InfeasibleError):
            hpgo.plan(profile, cluster, schedule=schedule, **asked)
        return
    if not steps_s:
        return
    found = hpgo.plan(profile, cluster, schedule=schedule, **asked)
    if schedule == "auto":
        assert found.step_s <= min(steps_s) * (1 + 1e-9)
    else:
        assert found.step_s == pytest.approx(min(steps_s), rel=1e-9)
        assert found.lower_bound_s == pytest.approx(found.step_s, rel=1e-9)
    assert found.fits


@pytest.mark.parametrize(
    ("name", "batch", "schedule", "size", "stages"),
    [
        ("overlap76", 12, "1f1b_overlap", 2, [(3, [2, 3]), (2, [0, 1])]),
        ("zb168", 8, "zb", 1, [(2, [0]), (2, [1])]),
        ("zbh2_137_nothing_fits", 8, "zb_h2", 1, [(1, [0]), (2, [1]), (1, [2])]),
        ("auto93", 4, "zb", 1, [(2, [0]), (3, [1])]),
    ],
)
def test_cuts_that_do_not_suit_1f1b_are_found(
    reference: Any, name: str, batch: int, schedule: Any, size: int, stages: list[tuple[int, list[int]]]
) -> None:
    cases = reference.parent / "cases/planner"
    if not cases.is_dir():
        pytest.skip("the folder of planner cases is not beside the published files")
    question = (hpgo.read_profile(cases / f"{name}.yaml"), cases / f"{name}.cluster.yaml")
    asked = {"global_batch_size": batch, "min_samples_per_replica": 1}
    known = hpgo.evaluate(*question, stages, schedule=schedule, pipeline_micro_batch_size=size, **asked)
    assert known.fits
    found = hpgo.plan(*question, schedule="auto" if name == "auto93" else schedule, **asked)
    assert found.fits
    assert found.step_s <= known.step_s * (1 + 1e-9)


@given(
    times=st.lists(seconds, min_size=17, max_size=24),
    schedule=st.sampled_from(ONE_STAGE),
    shape=st.sampled_from([(4, 1), (2, 3), (3, 2)]),
    memory_gb=st.sampled_from([1000, 61.3]),
)
@settings(max_examples=examples(200, 8))
def test_plans_of_1f1b_are_never_better_under_another_schedule(
    times: list[float], schedule: Any, shape: tuple[int, int], memory_gb: float
) -> None:
    profile = hpgo.Profile.chain(
        "random", batch_size=1, forward_s=times, backward_s=[2 * second for second in times],
        activation_bytes=[1e9] * len(times), parameter_bytes=[1e8] * len(times),
    )  # fmt: skip
    cluster = hpgo.Cluster.of(
        nodes=shape[0], devices_per_node=shape[1], intra_gbit_s=100, inter_gbit_s=10, memory=f"{memory_gb} GB"
    )
    start = hpgo.plan(profile, cluster, global_batch_size=8, schedule="1f1b")
    stages = [(len(stage.layers), stage.devices) for stage in start.stages]
    size = start.pipeline_micro_batch_size
    given = hpgo.evaluate(
        profile, cluster, stages, global_batch_size=8, schedule=schedule, pipeline_micro_batch_size=size
    )
    found = hpgo.plan(profile, cluster, global_batch_size=8, schedule=schedule)
    assert found.fits
    assert found == hpgo.plan(profile, cluster, global_batch_size=8, schedule=schedule)
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= found.step_s
    if given.fits:
        assert found.step_s <= given.step_s * (1 + 1e-9)
        assert found.lower_bound_s <= given.step_s * (1 + 1e-9)
