"""Addresses of the plan's page say what they mean, and nothing in one is more than a mistake."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.page.planned.address import PlanAddress, asked_of, changes_of, drawn_size, stages_text
from hpgo.page.planned.facts import facts
from hpgo.page.planned.origin import asked_plan, origin
from hpgo.page.planned.regroup import regrouped
from hpgo.programs.names import PlannedSchedule

FIELDS = list(PlanAddress.__slots__)
QUESTION = (("model", "bert-48"), ("cluster", "dapple-a"), ("batch", "64"))
numbers = st.lists(st.integers(0, 999), min_size=1, max_size=8)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
def test_stages_are_read_as_they_were_written(rows) -> None:
    asked = asked_of([*QUESTION, ("stages", stages_text(rows))])
    assert asked.stages == tuple((tuple(layers), tuple(devices)) for layers, devices in rows)


words = st.one_of(st.text(max_size=20), st.from_regex(r"[0-9@+,-]{0,20}", fullmatch=True))


@given(
    st.lists(
        st.tuples(st.sampled_from(["stages", "batch", "devices", "reserve", "shard", "recompute", *FIELDS]), words)
    )
)
def test_whatever_an_address_holds_it_is_read_or_refused(items) -> None:
    with suppress(hpgo.errors.HpgoError):  # anything else fails
        assert drawn_size([*QUESTION, *items], None).ranks >= 1


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (",".join(["0-99999@0-99999"] * 4_000), ("too_large", "131", "072")),
        ("0-9999999@0", ("invalid_argument", "0")),
        ("5-4@0", ("invalid_argument", "0")),
        ("0-5", ("invalid_argument", "0-5", "0")),
        ("0" * 70_000, ("invalid_argument", "70", "000")),
    ],
)
def test_stages_that_are_too_many_or_none_are_refused_before_they_take_memory(
    stages: str, said: tuple[str, ...]
) -> None:
    with refused(hpgo.errors.ArgumentError, *said):
        asked_of([*QUESTION, ("stages", stages)])


@pytest.mark.parametrize("schedule", ["eager_1f1b", "gpipe", "zb_h1", "zb_v"])
def test_the_address_of_a_plan_prices_it_again(schedule: str) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule=schedule, max_stages=4)
    found = origin(asked_of(QUESTION).question, ())
    changes = changes_of(plan, found.places)
    again = asked_plan(asked_of([*QUESTION, *changes.items()]), found)
    assert again.step_s == pytest.approx(plan.step_s, rel=1e-9)
    assert facts(again, found)["changes"] == changes


@pytest.mark.parametrize("name", [name for name in get_args(PlannedSchedule) if name != "auto"])
@pytest.mark.parametrize(
    ("stages", "micro_batch"), [("0-31@0-7,32-52@8-15", "16"), ("0-14@0-3,15-30@4-7,31-45@8-11,46-52@12-15", "8")]
)
def test_every_schedule_runs_the_stages_that_are_cut_for_it(name: str, stages: str, micro_batch: str) -> None:
    found = origin(asked_of(QUESTION).question, ())
    asked = [*QUESTION, ("stages", stages), ("micro_batch", micro_batch), ("schedule", name)]
    before = asked_of(asked).stages
    plan = asked_plan(asked_of([*asked, ("regroup", "1")]), found)
    assert [group.devices for group in plan.groups] == [devices for _, devices in before]
    assert [layer for stage in plan.stages for layer in stage.layers] == [one.id for one in found.profile.layers]
    times_s = [layer.forward_s[0] + layer.backward_s[0] for layer in found.profile.layers]
    for group, (layers, _) in zip(plan.groups, before, strict=True):
        now = [found.places[layer] for stage in group.stages for layer in plan.stages[stage].layers]
        off_s = sum(times_s[at] for at in now) - sum(times_s[at] for at in layers)
        assert abs(off_s) <= plan.virtual_stages_per_rank * max(times_s)


def test_a_schedule_that_runs_more_stages_than_there_are_layers_says_so() -> None:
    one_each = [([f"layer-{at}"], [at]) for at in range(16)]
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "interleaved", "32", "16"):
        regrouped(one_each, "interleaved", 64, {f"layer-{at}": 1.0 for at in range(16)})


def test_a_branching_models_layers_are_named_in_the_order_of_the_plan() -> None:
    items = (("model", "gnmt-16"), ("cluster", "dapple-a"), ("batch", "1024"))
    found = origin(asked_of(items).question, ())
    plan = hpgo.plan(found.profile, found.cluster, global_batch_size=1024)
    again = asked_plan(asked_of([*items, *changes_of(plan, found.places).items()]), found)
    assert [stage.layers for stage in again.stages] == [stage.layers for stage in plan.stages]


def test_the_layers_that_are_drawn_add_up_to_their_stages() -> None:
    found = origin(asked_of(QUESTION).question, ())
    plan = hpgo.plan(found.profile, found.cluster, global_batch_size=64)
    drawn = facts(plan, found)
    for stage in plan.stages:
        places = [found.places[layer] for layer in stage.layers]
        assert sum(drawn["layers"]["forward_s"][at] for at in places) == pytest.approx(stage.forward_s)
        assert sum(drawn["layers"]["backward_s"][at] for at in places) == pytest.approx(stage.backward_s)
        held_bytes = stage.memory.total_bytes - stage.memory.buffers_bytes
        assert sum(drawn["layers"]["held_bytes"][at] for at in places) == pytest.approx(held_bytes)
