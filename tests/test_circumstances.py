"""Profiles keep where and how they were measured, which changes no price, and reports say it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from refusals import refused
from toys import chain

import hpgo
from hpgo.model.formats import native, pipedream
from hpgo.show import report

if TYPE_CHECKING:
    from pathlib import Path

KEYS: dict[str, Any] = {
    "device": "NVIDIA H100",
    "machine": "node: 7",
    "dtype": "bfloat16",
    "date": "2026-05-03",
    "versions": (("hpgo", "0.2"), ("torch", "2.15.0")),
}


def measured(spread: float = 0.04) -> hpgo.Profile:
    plain = chain([1.0, 2.0, 1.0], 1e6, 1e6)
    return replace(plain, layers=tuple(replace(layer, spread=spread) for layer in plain.layers), **KEYS)


def nodes() -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=80, inter_gbit_s=10, memory="16 GB")


def test_files_keep_all_of_it_and_pipedream_text_nothing(tmp_path: Path) -> None:
    profile = measured()
    for ending in ("yaml", "json"):
        hpgo.write_profile(profile, tmp_path / f"one.{ending}")
        assert hpgo.read_profile(tmp_path / f"one.{ending}") == profile
    text = pipedream.write(profile, None)
    assert text == pipedream.write(chain([1.0, 2.0, 1.0], 1e6, 1e6), None)


def test_profiles_without_such_keys_are_written_without_them() -> None:
    text = native.write_yaml(chain([1.0], 1e6, 1e6))
    assert not any(f"{key}:" in text for key in (*KEYS, "spread"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"date": "3 May"}, ("invalid_profile", "3 May")),
        ({"date": "20260503"}, ("invalid_profile", "20260503")),
        ({"versions": {"torch": "2"}}, ("invalid_profile", "toy")),
        ({"versions": (("torch", 2.15),)}, ("invalid_profile", "toy")),
        ({"versions": (("torch", "1"), ("torch", "2"))}, ("duplicate", "toy")),
        ({"device": 5}, ("invalid_profile", "5")),
    ],
)
def test_what_makes_no_sense_is_told(keys: dict[str, Any], said: tuple[str, ...]) -> None:
    with refused(hpgo.errors.ProfileError, *said):
        replace(measured(), **keys)
    with refused(hpgo.errors.ProfileError, "invalid_profile", "layer0"):
        measured(-0.1)
    with refused(hpgo.errors.ProfileError, "invalid_profile", name="torch"):
        native.parse(native.write_yaml(measured()).replace('"2.15.0"', "2").replace("2.15.0", "2"), name="")


def test_prices_and_digests_do_not_heed_it(tmp_path: Path) -> None:
    plain, profile = chain([1.0, 2.0, 1.0], 1e6, 1e6), measured()
    plan = hpgo.plan(plain, nodes(), global_batch_size=4)
    assert hpgo.plan(profile, nodes(), global_batch_size=4).step_s == plan.step_s
    plan.save(tmp_path / "plan.json", embed=False)
    read = hpgo.Plan.read(tmp_path / "plan.json")
    assert read.reevaluate(profile=profile, cluster=nodes()).step_s == plan.step_s


def test_reports_say_where_times_are_from_and_when_they_differ_more_than_the_gap() -> None:
    plan = hpgo.plan(measured(), nodes(), global_batch_size=4)
    said = " ".join(str(plan).split())
    assert (
        "measured in bfloat16 on NVIDIA H100, node: 7, hpgo 0.2, torch 2.15.0, 2026-05-03; times differ by 4 %" in said
    )
    assert hpgo.Plan.from_json(plan.to_json()).assumptions == plan.assumptions
    sure = str(hpgo.plan(measured(0.001), nodes(), global_batch_size=4))
    assert "2026-05-03" in sure
    assert "times differ" not in sure
    wide = replace(plan, lower_bound_s=plan.step_s / 1.2)
    assert "times differ" not in str(wide)
    assert "Profile" not in str(hpgo.plan(chain([1.0], 1e6, 1e6), nodes(), global_batch_size=4))


@pytest.mark.parametrize(
    ("spread", "said"), [(0.04, None), (0.249, None), (0.25, "25 %"), (0.99, "99 %"), (3.42, "3.4 ×"), (179.4, "179 ×")]
)
def test_plans_on_times_that_vary_much_say_so_before_anything_else(spread: float, said: str | None) -> None:
    plan = hpgo.plan(measured(spread), nodes(), global_batch_size=4)
    lines = str(plan).splitlines()
    told = " ".join(str(plan).split())
    assert "e+" not in told
    if said is None:
        assert not lines[1]
        assert plan.notes == ()
        assert "times differ by" in told
        return
    assert lines[1].startswith("Measured times vary between passes")
    warning = f"easured times vary between passes by {said} on average, and times of `layer0` by {said}: plans whose"
    assert told.count(warning) == 1
    assert told.index(warning) < told.index("Optimality") < told.index("stage layers")
    assert report.markdown(plan).splitlines()[2].startswith(f"**M{warning}")
    assert report.summary(plan)[0][0] == "caution"
    assert json.loads(plan.to_json())["notes"][0].startswith(f"m{warning}")
    assert hpgo.Plan.from_json(plan.to_json()).reevaluate().notes == plan.notes
    chained = hpgo.partition(measured(spread), nodes())
    assert chained.remarks[0] == plan.notes[0]


def test_spread_is_that_of_the_layers_by_the_time_that_they_take() -> None:
    first, second, third = chain([1.0, 3.0, 5.0]).layers
    told = replace(chain([1.0, 3.0, 5.0]), layers=(replace(first, spread=0.1), replace(second, spread=0.02), third))
    assert told.spread == pytest.approx((0.1 * 1 + 0.02 * 3) / 4)
    assert chain([1.0]).spread is None
