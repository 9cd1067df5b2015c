"""Plans in notebooks and scripts: names in place of records, and records that show themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

import hpgo
from hpgo.planning.optimizers import OPTIMIZERS, OptimizerName

if TYPE_CHECKING:
    from pathlib import Path

PLAN = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)

# --- Names ------------------------------------------------------------------------------------------------------------


def test_models_and_clusters_go_by_the_names_that_the_command_takes(tmp_path: Path) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    assert hpgo.plan(profile, cluster, global_batch_size=64) == PLAN
    hpgo.write_profile(profile, tmp_path / "mine.yaml")
    (tmp_path / "mine-too.yaml").write_text(cluster.yaml(), encoding="utf-8")
    files = hpgo.plan(tmp_path / "mine.yaml", str(tmp_path / "mine-too.yaml"), global_batch_size=64)
    assert files.step_s == PLAN.step_s
    given = [(stage.layers, stage.devices) for stage in PLAN.stages]
    assert hpgo.evaluate("bert-48", "dapple-a", given, global_batch_size=64).step_s == PLAN.step_s


def test_transformers_are_priced_on_clusters_by_name() -> None:
    by_name = hpgo.price("llama-3-8b", "h100:1", global_batch_size=8, seq=4096)
    assert by_name == hpgo.price("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=4096)


def test_memory_goes_by_the_name_of_an_optimizer_and_sizes_have_units() -> None:
    by_name = hpgo.plan("bert-48", "dapple-a", global_batch_size=64, memory="sgd")
    assert by_name.assumed.memory == hpgo.MemoryModel.preset("sgd")
    assert hpgo.MemoryModel.preset("sgd", reserved_bytes="2 GB").reserved_bytes == 2e9
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("profile", "cluster", "options", "kind", "said"),
    [
        ("bert-84", "dapple-a", {}, hpgo.ProfileError, "bert-48"),
        ("bert-48", "dapple-d", {}, hpgo.ClusterError, "dapple-"),
        (48, "dapple-a", {}, hpgo.ArgumentError, "name a model"),
        ("bert-48", None, {}, hpgo.ArgumentError, "name one"),
        ("bert-48", "dapple-a", {"memory": "adam-bf61"}, hpgo.ArgumentError, "adam-bf16"),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_the_nearest_that_does(
    profile: object, cluster: object, options: dict[str, object], kind: type[hpgo.HpgoError], said: str
) -> None:
    with pytest.raises(kind) as raised:
        hpgo.plan(profile, cluster, global_batch_size=64, **options)  # type: ignore[arg-type]
    assert said in raised.value.hint
