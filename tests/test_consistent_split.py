"""Profiles whose input- and weight-gradient passes can't be: rescaled with a remark, or refused, and never believed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.model.formats import native
from hpgo.show import report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

SCHEDULES = ("auto", "1f1b", "zb_h1", "zb_h2", "zb", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")
SECONDS = st.floats(1e-4, 10.0)
ODD_SECONDS = st.sampled_from([0.0, 1e-320, 1e-9, 1.0, 1e9])  # of which many are refused
REMARK = "both were rescaled so that their sum is backward_s"


def nodes(devices: int = 2) -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=1, devices_per_node=devices, intra_gbit_s=80, inter_gbit_s=10, memory="64 GB")


def split_by(inputs: float, weights: float, layers: int = 4) -> hpgo.Profile:
    """Layers of 1 s forward and 2 s backward, which takes these parts of that when it is split."""
    plain = chain([1.0] * layers, 1e3, 1e6)
    told = {"input_gradient_s": (2.0 * inputs,), "weight_gradient_s": (2.0 * weights,)}
    return replace(plain, layers=tuple(replace(layer, **told) for layer in plain.layers))


def work_s(profile: hpgo.Profile, samples: int) -> float:
    """What one device computes for so many samples, each layer at the batch size where that takes it least.

    On the line between two sizes, time a sample is least at one of its ends.
    """
    return samples * sum(
        min(passes_s[at] / size for at, size in enumerate(profile.batch_sizes))
        for layer in profile.layers
        for passes_s in (layer.forward_s, layer.backward_s)
    )


@st.composite
def profiles(draw: st.DrawFn) -> hpgo.Profile:
    """Chains whose halves are anything; raises ProfileError for those that are refused."""
    sizes = draw(st.sampled_from([(1,), (1, 2), (2, 4, 8)]))
    column = st.tuples(*[ODD_SECONDS if draw(st.integers(0, 9)) == 0 else SECONDS] * len(sizes))
    layers = [
        hpgo.Layer(
            f"layer{number}", "Linear", draw(column), draw(column), tuple(1e3 for _ in sizes), 1e6,
            input_gradient_s=draw(column) if (has_halves := draw(st.booleans())) else None,
            weight_gradient_s=draw(column) if has_halves else None,
        )
        for number in range(draw(st.integers(2, 6)))
    ]  # fmt: skip
    ids = [layer.id for layer in layers]
    return hpgo.Profile("any", sizes, tuple(layers), tuple(pairwise(ids)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), devices=st.integers(1, 3), schedule=st.sampled_from(SCHEDULES))
def test_no_schedule_beats_the_work_whatever_the_halves_are(data: st.DataObject, devices: int, schedule: Any) -> None:
    try:
        profile = data.draw(profiles())
    except hpgo.errors.ProfileError as refused:
        assert "input_gradient_s + weight_gradient_s is" in refused.message  # noqa: PT017 -- or there is no error
        return
    try:
        plan = hpgo.plan(profile, nodes(devices), global_batch_size=8, schedule=schedule)
    except hpgo.errors.HpgoError:
        return  # no cut for this schedule
    steps_s = [plan.step_s, *(choice.step_s for choice in plan.schedules if choice.step_s is not None)]
    assert min(steps_s) >= work_s(profile, 8) / devices * (1 - 1e-9)
    assert -1e-9 <= plan.bubble <= 1
    wrong = any(layer.has_wrong_split for layer in profile.layers)
    assert any(REMARK in note for note in plan.notes) == wrong


@given(inputs=st.floats(0, 1e18), weights=st.floats(0, 1e18), backward=st.floats(0, 1e18), again=st.booleans())
def test_halves_add_up_to_the_backward_pass_or_to_twice_it_at_most(
    inputs: float, weights: float, backward: float, *, again: bool
) -> None:
    def made() -> hpgo.Layer:
        return hpgo.Layer(
            "a", "a", (1.0,), (backward,), (1.0,), 1.0, input_gradient_s=(inputs,), weight_gradient_s=(weights,)
        )

    if (inputs + weights > 0) != (backward > 0):
        with refused(hpgo.errors.ProfileError, "invalid_profile", "input_gradient_s", "weight_gradient_s"):
            made()
        return
    layer = made().with_consistent_split()
    assert layer.input_gradient_s is not None
    assert layer.weight_gradient_s is not None
    [one], [other] = layer.input_gradient_s, layer.weight_gradient_s
    assert backward * (1 - 1e-9) <= one + other <= 2 * backward * (1 + 1e-9)
    assert not layer.has_wrong_split
    if again:
        assert layer.with_consistent_split() == layer
    if inputs + weights > 1e-290:  # where proportions have digits
        assert one / (one + other or 1) == pytest.approx(inputs / (inputs + weights), abs=1e-9) or backward < 1e-290


@pytest.mark.parametrize(
    ("parts", "remarked", "costs"),
    [
        ((0.1, 0.1), True, 1.0), ((0.49, 0.48), True, 1.0), ((0.49, 0.495), False, 1.0), ((0.5, 0.5), False, 1.0),
        ((0.7, 0.6), False, 1.3), ((1.0, 1.0), False, 2.0), ((1.2, 1.0), True, 1.0), ((4e-4, 1e-4), True, 1.0),
    ],
)  # fmt: skip
def test_halves_are_rescaled_with_a_remark_where_they_are_not_98_to_200_percent(
    parts: tuple[float, float], remarked: bool, costs: float
) -> None:
    profile = split_by(*parts)
    question = {"global_batch_size": 3, "pipeline_micro_batch_size": 1, "schedule": "zb_h1"}
    plan = hpgo.evaluate(profile, nodes(1), [(4, [0])], **question)  # type: ignore[arg-type]
    assert plan.step_s == pytest.approx(3 * 4 * (1 + 2 * costs))
    inputs_s, weights_s = plan.stages[0].halves_s
    assert inputs_s / weights_s == pytest.approx(parts[0] / parts[1])
    said = " ".join(str(plan).split())
    assert (REMARK in said) == (REMARK in plan.to_json()) == (REMARK in report.markdown(plan)) == remarked


def test_twice_the_backward_pass_is_kept_however_it_is_rounded() -> None:
    for number in range(1, 200):
        first = number / 200
        profile = split_by(2.0 * first, 2.0 * (1 - first))
        scaled = replace(profile, layers=tuple(
            replace(layer, **{key: tuple(one * 1.1 for one in getattr(layer, key)) for key in (
                "backward_s", "input_gradient_s", "weight_gradient_s")}) for layer in profile.layers))  # fmt: skip
        assert not any(layer.has_wrong_split for layer in scaled.layers)
        assert scaled.with_consistent_split() == scaled


def test_each_batch_size_is_rescaled_by_itself_and_so_are_sizes_between() -> None:
    layer = hpgo.Layer(
        "a", "a", (1.0, 2.0), (2.0, 3.0), (1e3, 2e3), 1e6, input_gradient_s=(0.1, 2.0), weight_gradient_s=(0.3, 1.6)
    )
    profile = hpgo.Profile("two", (2, 4), (layer,), ())
    for samples, whole_s, inputs_s in ((2, 2.0, 0.5), (4, 3.6, 2.0), (3, 2.8, 1.25)):
        plan = hpgo.evaluate(profile, nodes(1), [(1, [0])], global_batch_size=samples, schedule="zb_h1")
        halves_s = plan.stages[0].halves_s
        assert (sum(halves_s), halves_s[0]) == pytest.approx((whole_s, inputs_s))


def test_saved_plans_keep_the_given_halves_and_the_remark(tmp_path: Path) -> None:
    profile = split_by(0.1, 0.3)
    plan = hpgo.plan(profile, nodes(), global_batch_size=4, schedule="zb_h1")
    plan.save(tmp_path / "plan.json")
    read = hpgo.Plan.read(tmp_path / "plan.json")
    assert read.assumed.profile == profile
    anew = read.reevaluate()
    assert (anew.step_s, anew.notes) == (plan.step_s, plan.notes)
    found = hpgo.calibrate(plan, plan.timeline())
    assert not any(layer.has_wrong_split for layer in found.profile.layers)


@pytest.mark.parametrize(("backward_s", "half_s"), [(2.0, 0.0), (0.0, 1.0)])
def test_a_pass_that_takes_time_in_halves_only_or_as_a_whole_only_is_refused(
    backward_s: float, half_s: float, tmp_path: Path
) -> None:
    plain = chain([1.0], 1e3, 1e6)
    keys = native.document(plain)
    keys["layers"][0] |= {"backward_s": backward_s, "input_gradient_s": half_s, "weight_gradient_s": half_s}
    (tmp_path / "one.json").write_text(json.dumps(keys))
    with refused(
        hpgo.errors.ProfileError, "invalid_profile", "layer0", "input_gradient_s", "weight_gradient_s"
    ) as raised:
        hpgo.read_profile(tmp_path / "one.json")
    assert "leave out input_gradient_s and weight_gradient_s" in raised.value.hint


def test_every_command_that_prices_the_profile_says_that_it_was_rescaled(
    run: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    hpgo.write_profile(split_by(0.1, 0.3), tmp_path / "p.yaml")
    (tmp_path / "c.yaml").write_text(nodes().yaml())
    for words in (["plan"], ["plan", "--schedule", "auto"], ["evaluate", "--stages", "4@0"]):
        asked = [words[0], "p.yaml", "-c", "c.yaml", "-b", 4, *words[1:]]
        assert any(REMARK in note for note in json.loads(run(*asked, "--json").stdout)["notes"])
        assert REMARK in " ".join(run(*asked).stdout.split())
    assert REMARK in " ".join(run("plan", "p.yaml", "-c", "c.yaml", "-b", "4,8").stderr.split())


def test_the_least_and_the_largest_numbers_are_rescaled_too() -> None:
    for split_s, whole_s in ((1e9, 5e-324), (5e-324, 1e9)):
        layer = hpgo.Layer(
            "a", "a", (1.0,), (whole_s,), (1.0,), 1.0, input_gradient_s=(split_s,), weight_gradient_s=(0.0,)
        )
        [made_s] = layer.with_consistent_split().input_gradient_s or (math.nan,)
        assert made_s == whole_s
        profile = hpgo.Profile("far", (1,), (layer,), ())
        assert any(
            REMARK in note
            for note in hpgo.evaluate(profile, nodes(1), [(1, [0])], global_batch_size=1, schedule="zb_h1").notes
        )
