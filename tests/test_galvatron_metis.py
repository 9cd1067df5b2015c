"""Profiles of Galvatron and Metis, of several files each: what they mean together, and what is wrong with them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.cli.main import group

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def changed(document: object, keys: tuple[Any, ...], value: object) -> Any:
    """`document` with `value` at the end of the path of keys; without the key where the value is `...`."""
    new = copy.deepcopy(document)
    *path, last = keys
    inside: Any = new
    for key in path:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return new


def beside(states: float, kept: float) -> Any:
    return {"64": {"model_states": {"1": states, "2": states / 2}, "activation": {"1": kept, "2": kept / 2}}}


# --- Galvatron --------------------------------------------------------------------------------------------------------

TIMES: Any = {
    "layernum[2]_bsz1_seq64": 15.0,
    "layernum[4]_bsz1_seq64": 24.0,
    "layertype_0_bsz1_seq64": 4.5,
    "layertype_other_bsz1_seq64": 6.0,
    "layertype_0_bsz4_seq64": 4.0,
    "layertype_other_bsz4_seq64": 3.0,
}
MEMORY: Any = {
    "1_1_8_sp": {"layernum[1]_bsz8_seq64_rank0_ms": 904.3},
    "layertype_0_sp": {
        "64": {"parameter_size": 768.0, "tp_activation_per_bsz_dict": {"1": 512.0, "2": 256.0, "checkpoint": 32.0}}
    },
    "other_memory_pp_off_sp": beside(4000.0, 900.0),
    "other_memory_pp_on_first_sp": beside(2000.0, 200.0),
    "other_memory_pp_on_last_sp": beside(2400.0, 700.0),
}


def galvatron(folder: Path, times: object = TIMES, memory: object = MEMORY) -> Path:
    (folder / "memory_profiling_tiny.json").write_text(json.dumps(memory), encoding="utf-8")
    path = folder / "computation_profiling_tiny.json"
    path.write_text(json.dumps(times), encoding="utf-8")
    return path


def test_galvatron_s_two_files_are_a_chain_of_as_many_layers_as_one_says(tmp_path: Path) -> None:
    profile = hpgo.read_profile(galvatron(tmp_path), layer_counts=3)
    assert (profile.name, profile.batch_sizes, profile.gpus_per_device) == ("tiny", (1, 4), 1)
    assert [layer.id for layer in profile.layers] == ["embedding", "layer0", "layer1", "layer2", "head"]
    first, block, *_, last = profile.layers
    # Times are for one sample of the batch; the backward pass takes twice as long.
    assert block.forward_s == pytest.approx((4.5e-3, 16e-3))
    assert block.backward_s == pytest.approx((9e-3, 32e-3))
    assert first.forward_s == last.forward_s == pytest.approx((3e-3, 6e-3))
    # What is there for each parameter is four times the weights.
    assert [layer.parameter_bytes / MIB for layer in profile.layers] == [500, 768, 768, 768, 600]
    assert [layer.saved_bytes for layer in (first, block, last)] == [
        (200 * MIB, 800 * MIB),
        (512 * MIB, 2048 * MIB),
        (700 * MIB, 2800 * MIB),
    ]
    # A layer that runs again keeps what goes into it.
    assert [layer.activation_bytes[0] / MIB for layer in profile.layers] == [32, 32, 32, 32, 0]


def test_either_of_galvatron_s_files_may_be_named(tmp_path: Path) -> None:
    times = galvatron(tmp_path)
    named = hpgo.read_profile(tmp_path / "memory_profiling_tiny.json", layer_counts=2)
    assert named == hpgo.read_profile(times, layer_counts=2)
    assert all(str(tmp_path / f"{kind}_profiling_tiny.json") in named.source for kind in ("computation", "memory"))


def test_types_of_galvatron_s_layers_follow_each_other_and_send_what_the_next_takes(tmp_path: Path) -> None:
    times = {
        "layertype_0_bsz2_seq64": 1.0,
        "layertype_1_bsz2_seq16": 2.0,
        "layertype_other_bsz2_seq[64,16]": 1.0,
    }
    kept = {"tp_activation_per_bsz_dict": {"1": 8.0, "checkpoint": 1.0}, "parameter_size": 1.0}
    memory = {
        "layertype_0": {"64": kept},
        "layertype_1": {"16": changed(kept, ("tp_activation_per_bsz_dict", "checkpoint"), 4.0)},
        "other_memory_pp_on_first": {"[64,16]": beside(4, 1)["64"]},
        "other_memory_pp_on_last": {"[64,16]": beside(4, 1)["64"]},
    }
    profile = hpgo.read_profile(galvatron(tmp_path, times, memory), layer_counts=[2, 1])
    assert [layer.forward_s[0] for layer in profile.layers] == pytest.approx([1e-3, 2e-3, 2e-3, 4e-3, 1e-3])
    assert [layer.activation_bytes[0] / MIB for layer in profile.layers] == [2, 2, 8, 8, 0]
    with refused(hpgo.errors.ProfileError, "invalid_profile", "layer_counts", "2", "1"):
        hpgo.read_profile(tmp_path / "computation_profiling_tiny.json", layer_counts=2)


def test_what_galvatron_s_layers_send_can_be_said(tmp_path: Path) -> None:
    path = galvatron(tmp_path)
    profile = hpgo.read_profile(path, layer_counts=1, boundary_bytes=100)
    assert [layer.activation_bytes for layer in profile.layers] == [(100, 400), (100, 400), (0, 0)]
    galvatron(
        tmp_path, memory=changed(MEMORY, ("layertype_0_sp", "64", "tp_activation_per_bsz_dict", "checkpoint"), ...)
    )
    assert hpgo.read_profile(path, layer_counts=1, boundary_bytes=100) == profile
    with refused(hpgo.errors.ProfileError, "invalid_profile", "checkpoint") as caught:
        hpgo.read_profile(path, layer_counts=1)
    assert "`boundary_bytes`" in caught.value.hint


def test_a_plan_for_one_device_takes_what_galvatron_s_layers_take(tmp_path: Path) -> None:
    cluster = tmp_path / "one.yaml"
    one = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=200, inter_gbit_s=200, memory="80 GB")
    cluster.write_text(one.yaml(), encoding="utf-8")
    words = [
        "plan",
        str(galvatron(tmp_path)),
        "-c",
        str(cluster),
        "-b",
        "8",
        "--json",
        "--pipeline-micro-batch-size",
        "4",
    ]
    done = CliRunner().invoke(group, [*words, "--profile-layer-counts", "3"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step_s"] == pytest.approx(2 * 3 * (3 * 16e-3 + 12e-3))
    asked = CliRunner().invoke(group, words).exception
    assert isinstance(asked, hpgo.errors.ProfileError)
    assert "does not contain the number of layers" in asked.message
    assert "--profile-layer-counts 32" in asked.hint


WRONG: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("times", ("layertype_0_bsz4_seq64",), "x", "computation_profiling_tiny.json: `layertype_0_bsz4_seq64` must be"),
    ("times", ("layertype_0_bsz4_seq64",), -1, "must be a finite number from 0"),
    ("times", ("layertype_0_bsz4_seq64",), 1e300, "forward_s is 4e+297"),
    ("times", ("layertype_other_bsz1_seq64",), ..., "`layertype_other_bsz1_seq64` is missing"),
    ("times", ("layertype_1_bsz1_seq64",), 1.0, "the file has 2 types of layers, but `layer_counts` has 1"),
    ("times", ("layertype_0_bsz1_seq128",), 1.0, "layers of type 0 were measured at sequences of 64, 128"),
    ("memory", ("layertype_0_sp",), ..., "memory_profiling_tiny.json: `layertype_0` is missing"),
    ("memory", ("layertype_0_sp",), {"128": {}}, "layertype_0_sp: there is no entry for sequence length 64"),
    ("memory", ("layertype_0_sp", "64"), [], "must be a mapping of keys"),
    ("memory", ("layertype_0_sp", "64", "parameter_size"), math.nan, "`parameter_size` must be a finite number"),
    ("memory", ("layertype_0_sp", "64", "tp_activation_per_bsz_dict", "1"), ..., "`1` is missing"),
    ("memory", ("other_memory_pp_on_first_sp",), ..., "`other_memory_pp_on_first` is missing"),
    ("memory", ("other_memory_pp_on_last_sp", "64", "model_states"), 4.0, "must be a mapping of keys"),
]


@pytest.mark.parametrize(("file", "keys", "value", "said"), WRONG)
def test_what_is_wrong_in_galvatron_s_files_is_named_with_the_file_and_the_key(
    tmp_path: Path, file: str, keys: tuple[Any, ...], value: Any, said: str
) -> None:
    documents = {"times": TIMES, "memory": MEMORY}
    documents[file] = changed(documents[file], keys, value)
    path = galvatron(tmp_path, **documents)
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.read_profile(path, layer_counts=1)
    assert str(tmp_path) in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.hint


def test_measurements_of_whole_models_and_single_files_of_galvatron_are_told_apart(tmp_path: Path) -> None:
    raw = {key: value for key, value in TIMES.items() if key.startswith("layernum")}
    with refused(hpgo.errors.ProfileError, "invalid_profile", "layertype_0_bsz1_seq…"):
        hpgo.read_profile(galvatron(tmp_path, raw), layer_counts=1)
    (tmp_path / "memory_profiling_tiny.json").unlink()
    with refused(hpgo.errors.ProfileError, "not_found"):
        hpgo.read_profile(tmp_path / "computation_profiling_tiny.json", layer_counts=1)
    other = tmp_path / "times.json"
    other.write_text(json.dumps(TIMES), encoding="utf-8")
    with refused(hpgo.errors.ProfileError, "invalid_profile", "Galvatron") as caught:
        hpgo.read_profile(other, layer_counts=1)
    assert "computation_profiling_NAME.json" in caught.value.hint


# --- Metis ------------------------------------------------------------------------------------------------------------


def metis(batch_size: int, **parameters: Any) -> Any:
    """Four layers of which each sample keeps 2, 7, 7 and 4 MiB, beside 100 that are there for none."""
    return {
        "model": {
            "model_name": "GPT3",
            "num_layers": 4,
            "parameters": {
                "total_parameters_bytes": 3000,
                "parameters_per_layer_bytes": [1000, 500, 500, 1000],
                **parameters,
            },
        },
        "execution_time": {
            "total_time_ms": 60.0 * batch_size,
            "optimizer_time_ms": 9.0,
            "layer_compute_total_ms": [0.3 * batch_size, 30.0 * batch_size, 30.0 * batch_size, 0.6 * batch_size],
        },
        "execution_memory": {
            "total_memory": 53120,
            "layer_memory_total_mb": [100 + kept * batch_size for kept in (2, 7, 7, 4)],
        },
    }


def written(folder: Path, *sizes: int, degree: int = 1, **parameters: Any) -> Path:
    for size in sizes:
        path = folder / f"DeviceType.A100_tp{degree}_bs{size}.json"
        path.write_text(json.dumps(metis(size, **parameters)), encoding="utf-8")
    return path


def test_metis_files_that_differ_in_batch_size_alone_are_one_profile(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 4, degree=2)
    written(tmp_path, 8, degree=4)
    (tmp_path / "DeviceType.T4_tp2_bs16.json").write_text("another", encoding="utf-8")
    profile = hpgo.read_profile(tmp_path / "DeviceType.A100_tp2_bs2.json", boundary_bytes=1000)
    assert (profile.name, profile.batch_sizes, profile.gpus_per_device) == ("GPT3", (1, 2, 4), 2)
    assert [layer.id for layer in profile.layers] == ["layer0", "layer1", "layer2", "layer3"]
    block = profile.layers[1]
    assert block.forward_s == pytest.approx((0.01, 0.02, 0.04))
    assert block.backward_s == pytest.approx((0.02, 0.04, 0.08))
    assert [layer.parameter_bytes for layer in profile.layers] == [500, 250, 250, 500]  # bytes there are of the model
    assert block.saved_bytes == pytest.approx((7 * MIB, 14 * MIB, 28 * MIB))  # as memory grows with the batch
    assert [layer.activation_bytes for layer in profile.layers] == [(1000, 2000, 4000)] * 3 + [(0, 0, 0)]


def test_of_one_metis_file_all_memory_that_weights_and_states_leave_is_kept(tmp_path: Path) -> None:
    profile = hpgo.read_profile(written(tmp_path, 2), boundary_bytes=8)
    assert profile.layers[1].saved_bytes == (114 * MIB - 4 * 500,)
    elsewhere = tmp_path / "mine-pbs-2.json"
    elsewhere.write_text(json.dumps(metis(2)), encoding="utf-8")
    assert hpgo.read_profile(elsewhere, boundary_bytes=8).layers == profile.layers


def test_metis_files_say_what_layers_send_or_are_asked_for_it(tmp_path: Path) -> None:
    with refused(hpgo.errors.ProfileError, "invalid_profile", "activation_parameters_bytes") as caught:
        hpgo.read_profile(written(tmp_path, 1))
    assert "`boundary_bytes`" in caught.value.hint
    profile = hpgo.read_profile(written(tmp_path, 1, activation_parameters_bytes=[7, 8, 9, 10]))
    assert [layer.activation_bytes for layer in profile.layers] == [(7,), (8,), (9,), (10,)]


def test_a_metis_file_is_read_for_no_other_batch_size_and_degree_than_its_name_says(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    with refused(hpgo.errors.ArgumentError, "mismatch", "2", "4"):
        hpgo.read_profile(path, boundary_bytes=8, batch_size=4)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "1", "GPU", "2"):
        hpgo.read_profile(path, boundary_bytes=8, gpus_per_device=2)
    with refused(hpgo.errors.ArgumentError, "conflict", "layer_counts"):
        hpgo.read_profile(path, boundary_bytes=8, layer_counts=2)
    with refused(hpgo.errors.ArgumentError, "conflict", "boundary_bytes"):
        hpgo.read_profile("bert-48", boundary_bytes=8)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("execution_time", "layer_compute_total_ms", 1), "x", "`layer_compute_total_ms 1` must be a number"),
        (("execution_time", "layer_compute_total_ms", 1), math.inf, "must be a finite number"),
        (("execution_time", "layer_compute_total_ms"), [], "has 4 entries, but times have 0 layers"),
        (("execution_memory",), ..., "`execution_memory` is missing"),
        (("execution_memory", "layer_memory_total_mb"), [1], "has 1 entries, but times have 4 layers"),
        (("model", "parameters", "parameters_per_layer_bytes", 0), -1, "must be a finite number from 0"),
        (("model", "parameters", "parameters_per_layer_bytes", 0), 1e300, "parameter_bytes is 1e+300"),
        (("model", "model_name"), 7, "`model_name` must be text"),
        (("model",), [], "must be a mapping of keys"),
    ],
)
def test_what_is_wrong_in_a_metis_file_is_named_with_the_file_and_the_key(
    tmp_path: Path, keys: tuple[Any, ...], value: Any, said: str
) -> None:
    path = written(tmp_path, 1)
    path.write_text(json.dumps(changed(metis(1), keys, value)), encoding="utf-8")
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.read_profile(path, boundary_bytes=8)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.hint


def test_metis_files_of_unlike_models_do_not_go_together(tmp_path: Path) -> None:
    path = written(tmp_path, 1, 2)
    short = changed(metis(2), ("execution_time", "layer_compute_total_ms"), [1.0])
    short["execution_memory"]["layer_memory_total_mb"] = [1.0]
    path.write_text(json.dumps(short), encoding="utf-8")
    with refused(hpgo.errors.ProfileError, "invalid_profile", "layer_memory_total_mb", "1", "4"):
        hpgo.read_profile(path, boundary_bytes=8)


# --- Published files --------------------------------------------------------------------------------------------------


def published(reference: Path, name: str) -> Path:
    path = reference / name
    if not path.is_file():
        pytest.skip(f"{name.partition('/')[0]}'s published files are not in the folder that HPGO_REFERENCE names")
    return path


def test_galvatron_s_published_llama_has_the_sums_that_its_files_have(reference: Path) -> None:
    path = published(reference, "galvatron/computation_profiling_bf16_llama2-7b_all.json")
    profile = hpgo.read_profile(path, layer_counts=32)
    assert profile.batch_sizes == tuple(range(1, 13))
    # 32 layers of 4.396252679824831 ms and 6.286115455627439 ms beside them.
    assert math.fsum(layer.forward_s[0] for layer in profile.layers) == pytest.approx(146.966201e-3, rel=1e-8)
    # 32 × 778.2236328125 MiB, and a quarter of 2021.0048828125 and of 2021.0673828125.
    assert profile.parameter_bytes / MIB == pytest.approx(25913.674316, rel=1e-9)
    assert profile.layers[1].activation_bytes[0] == 4096 * 4096 * 2  # 4,096 tokens of 4,096 values in bf16


def test_metis_published_gpt_has_the_sums_that_its_files_have(reference: Path) -> None:
    path = published(reference, "metis/DeviceType.A100_tp2_bs4.json")
    profile = hpgo.read_profile(path, boundary_bytes=1024 * 4096 * 2)
    assert (profile.batch_sizes, profile.gpus_per_device) == ((1, 2, 4), 2)
    both_s = [math.fsum(layer.forward_s[at] + layer.backward_s[at] for layer in profile.layers) for at in range(3)]
    assert both_s[2] == pytest.approx((2.507448196411133 + 8 * 63.25173377990723 + 0.6699562072753906) / 1e3)
    assert profile.parameter_bytes == 2405502976 / 2


# --- Any file ---------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of keys to everything inside."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inside in items for found in [(*path, key), *places(inside, (*path, key))]]


ODD = st.sampled_from([..., None, True, 0, -1, 1e400, math.nan, 10**400, "", "-1", "é" * 5000, [], {}, [[]], {"": 0}])


def mutated(document: Any) -> st.SearchStrategy[Any]:
    changes = st.lists(st.tuples(st.sampled_from(places(document)), ODD), min_size=1, max_size=3)

    def apply(pairs: list[tuple[tuple[Any, ...], Any]]) -> Any:
        new = document
        for keys, value in pairs:
            with contextlib.suppress(KeyError, IndexError, TypeError):  # what was there is gone
                new = changed(new, keys, value)
        return new

    return changes.map(apply)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    times=mutated(TIMES), memory=st.just(MEMORY) | mutated(MEMORY), one=mutated(metis(1)), kept=st.none() | st.just(8)
)
def test_reading_any_files_of_galvatron_or_metis_gives_a_profile_or_a_named_error(
    tmp_path: Path, times: Any, memory: Any, one: Any, kept: int | None
) -> None:
    written(tmp_path, 2, 4)
    single = tmp_path / "DeviceType.A100_tp1_bs1.json"
    single.write_text(json.dumps(one), encoding="utf-8")
    for path, counts in ((galvatron(tmp_path, times, memory), 2), (single, None)):
        told: list[hpgo.errors.HpgoError] = []
        try:
            assert hpgo.read_profile(path, layer_counts=counts, boundary_bytes=kept).layers
        except hpgo.errors.HpgoError as error:
            told.append(error)
        for error in told:
            assert error.message.isprintable()
            assert error.hint.isprintable()
