"""Measurements in PipeEdge's files: what they mean, what the schedulers make of them, and that nothing else changes."""

from __future__ import annotations

import copy
import difflib
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from conftest import NO_REFERENCE, REFERENCE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.base.yaml_edits import put
from hpgo.model.formats.pipeedge import PipeEdgeModel, Timing, read_results
from hpgo.model.formats.pipeedge_merge import Device, merged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODELS = """\
# measured in spring
DummyModel:
  layers: 0
  mem_MB: []
  parameters_in: 0
  parameters_out: []
net:    # ours
  layers: 2
  mem_MB: [1.5,   2]   # of weights
  parameters_in: 4
  parameters_out: [8,
    2]
  note: |
    a line
    and another
# the end
"""
TYPES = """\
zeta: {bw_Mbps: 10, mem_MB: 9e1, model_profiles: {other: [{batch_size: 8, dtype: torch.float32, time_s: [1]}]}}
none:
  bw_Mbps: 0
  mem_MB: 0
  model_profiles:   # not yet
mb:
  mem_MB:   512
  bw_Mbps: 100
  owner: "me"
  model_profiles:
    other:
    - {batch_size: 8, dtype: torch.float32, time_s: [1]}

    net:
      - batch_size: 8
        dtype: torch.float32
        time_s: [1.0,
          2.50]   # slow
      - batch_size: 8
        dtype: torch.bfloat16
        time_s:
          - 1
          - 2
    # and nothing more
rcc:
  bw_Mbps: 1000
  mem_MB: 8192
"""
NET = PipeEdgeModel("net", (1.5, 2.0), 4, (8, 2))
RESULTS: dict[str, Any] = {
    "batch_size": 8, "dtype": "torch.int64", "layers": 2, "model_name": "net",
    "profile_data": [
        {"layer": 1, "memory": 1.5, "shape_in": [[2, 2]], "shape_out": [[4], [2, 2]], "time": 0.5},
        {"layer": 2, "memory": 2.0, "shape_in": [[4], [2, 2]], "shape_out": [[2]], "time": 0.25},
    ],
}  # fmt: skip


def row(size: int, *times: float, dtype: str = "torch.float32") -> Timing:
    return Timing(size, dtype, times)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The two files."""
    paths = tmp_path / "models.yml", tmp_path / "device_types.yml"
    for path, text in zip(paths, (MODELS, TYPES), strict=True):
        path.write_text(text)
    return paths


def lines_lost(before: str, after: str) -> list[str]:
    return [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("- ")]


def test_what_is_added_leaves_all_other_lines_as_they_are(files: tuple[Path, Path]) -> None:
    both = [row(1, 0.25, 1e-5), row(8, 1.0, 2.0, dtype="torch.float64")]
    for name in ("zeta", "none", "mb", "rcc", "a new one: 1"):
        new = merged(*files, model=NET, device=Device(name, None, None) if name in TYPES else Device(name, 99.5, 10),
                     timings=both)  # fmt: skip
        assert new.models is None, "it says the same of the model already"
        assert new.device_types is not None
        if name != "zeta":  # which stands on one line
            assert lines_lost(TYPES, new.device_types) == []
        expected = yaml.safe_load(TYPES)
        kind = expected.setdefault(name, {"mem_MB": 99.5, "bw_Mbps": 10})
        kind["model_profiles"] = kind.get("model_profiles") or {}
        kind["model_profiles"].setdefault("net", []).extend(
            {"batch_size": one.batch_size, "dtype": one.dtype, "time_s": list(one.time_s)} for one in both
        )
        assert yaml.safe_load(new.device_types) == expected
    other = merged(*files, model=PipeEdgeModel("net-2", (1.0,), 4, (9,)), device=Device("mb"), timings=[row(8, 3.0)])
    assert other.models is not None
    assert other.models.startswith(MODELS.removesuffix("# the end\n"))
    assert yaml.safe_load(other.models)["net-2"] == {
        "layers": 1, "mem_MB": [1], "parameters_in": 4, "parameters_out": [9],
    }  # fmt: skip


@pytest.mark.skipif(not REFERENCE.is_dir(), reason=NO_REFERENCE)
def test_published_files_are_added_to_and_nothing_of_them_changes() -> None:
    paths = REFERENCE / "pipeedge/models.yml", REFERENCE / "pipeedge/device_types.yml"
    texts = [path.read_text() for path in paths]
    types = yaml.safe_load(texts[1])
    for name in types:
        new = merged(*paths, model=NET, device=Device(name), timings=[row(8, 1.0, 2.0)])
        for before, after in zip(texts, (new.models, new.device_types), strict=True):
            assert after is not None
            assert lines_lost(before, after) == []
        expected = copy.deepcopy(types)
        rows = [{"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2]}]
        expected[name]["model_profiles"] = {**(types[name]["model_profiles"] or {}), "net": rows}
        assert yaml.safe_load(new.device_types or "") == expected


def test_overwriting_changes_the_figures_alone(files: tuple[Path, Path]) -> None:
    changed = PipeEdgeModel("net", (1.5, 3.0), 4, (8, 2))
    for rows in ([row(8, 3.0, 4.0)], [row(8, 3.0, 4.0, dtype="torch.bfloat16")]):
        new = merged(*files, model=changed, device=Device("mb", 512, 100), timings=rows, overwrite=True)
        assert new.models == MODELS.replace("[1.5,   2]", "[1.5, 3]")
        assert new.device_types is not None
        is_first = rows[0].dtype == "torch.float32"
        old = "[1.0,\n          2.50]" if is_first else "\n          - 1\n          - 2"
        assert new.device_types == TYPES.replace(old, "[3, 4]" if is_first else "\n          [3, 4]")


def test_windows_line_ends_files_without_a_last_one_and_empty_ones_are_merged_into(tmp_path: Path) -> None:
    paths = tmp_path / "models.yml", tmp_path / "device_types.yml"
    paths[0].write_bytes(b"# nothing yet")
    paths[1].write_bytes(TYPES.replace("\n", "\r\n").removesuffix("\r\n").encode())
    new = merged(*paths, model=NET, device=Device("rcc"), timings=[row(8, 1.0, 2.0)])
    assert new.models is not None
    assert new.models.startswith("# nothing yet\nnet:\n")
    assert new.device_types is not None
    assert new.device_types.replace("\r\n", "").count("\n") == 0
    new.write(*paths)
    assert hpgo.partition_files(*paths, _devices(tmp_path, "rcc: [a]"), model="net").samples_per_s > 0


def _devices(folder: Path, text: str) -> Path:
    path = folder / "devices.yml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("model", "device", "size", "said", "hint"),
    [
        (NET, Device("mb", 511.0), 1, "`mem_MB: 512`, not 511", "leave out the option"),
        (NET, Device("mb", None, 10.0), 1, "`bw_Mbps: 100`, not 10", "leave out the option"),
        (NET, Device("new", 512.0), 1, "type `new` is new", "--device-bandwidth"),
        (NET, Device("mb"), 8, "at batch size 8 in torch.float32 already", "--overwrite"),
        (
            PipeEdgeModel("net", (1.0,), 4, (2,)),
            Device("mb"),
            1,
            "2 layers with 4 input and 10 output values",
            "--model-name",
        ),
        (
            PipeEdgeModel("other", (1.0, 1.0), 4, (2, 2)),
            Device("mb"),
            1,
            "1 entries, but the model has 2 layers",
            "each",
        ),
    ],
)
def test_what_contradicts_the_files_is_refused(
    files: tuple[Path, Path], model: PipeEdgeModel, device: Device, size: int, said: str, hint: str
) -> None:
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        merged(*files, model=model, device=device, timings=[row(size, *[1.0] * len(model.memory_mb))])
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_text_that_stands_for_two_places_is_refused(files: tuple[Path, Path]) -> None:
    files[1].write_text("mb: &a {bw_Mbps: 1, mem_MB: 9}\nrcc: *a\n")
    with refused(hpgo.errors.HpgoError, "invalid_cluster", "*a", "2"):
        merged(*files, model=NET, device=Device("mb"), timings=[row(8, 1.0, 2.0)])


names = st.text("ab 1:#-,{é", min_size=1, max_size=4)
scalars = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), names, st.none())
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3))
)
figures = st.one_of(st.integers(), st.floats(0, 1e9), st.lists(st.floats(0, 1), min_size=1, max_size=30))


@given(
    st.dictionaries(names, values, min_size=1, max_size=3),
    st.lists(names, min_size=1, max_size=3),
    st.one_of(figures, st.dictionaries(names, figures, min_size=1, max_size=2)),
    st.sampled_from([None, True, False]),
)
@example({"1": [[]]}, ["1"], 0, False)  # a list that begins below its key's first letter
@example({"a": {"b": [0.5, 1]}}, ["a", "b"], [0.25] * 30, False)
@example({"1": {}, "11": None}, ["1", "1"], 0, True)
@settings(max_examples=150)
def test_a_value_is_put_where_it_belongs_into_any_document(
    document: dict[str, Any], path: list[str], value: Any, flow: bool | None
) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True)
    try:
        held = yaml.safe_load(text.replace("&id", "&no"))
    except yaml.YAMLError:
        return
    expected = below = copy.deepcopy(held)
    for at, step in enumerate(path[:-1]):
        if not isinstance(below.get(step), dict):
            if step in below and below[step] is not None:
                return  # there is something else on the way
            below[step] = {path[-1]: value} if at == len(path) - 2 else {}
        below = below[step]
    is_new = path[-1] not in below
    below[path[-1]] = value
    changed = put(text, path, value, "x.yml", hpgo.errors.HpgoError)
    assert yaml.safe_load(changed) == expected
    if is_new:  # all that was there is, in its order, around what came in
        assert len(changed) > len(text)
        assert any(changed.startswith(text[:at]) and changed.endswith(text[at:]) for at in range(len(text) + 1))


@pytest.mark.parametrize("sizes", [[8], [8, 1]])
def test_results_of_pipeedges_profiler_are_read_and_merged(
    sizes: list[int], tmp_path: Path, run: Callable[..., Any]
) -> None:
    words = []
    for size in sizes:
        (tmp_path / f"{size}.yml").write_text(yaml.safe_dump({**RESULTS, "batch_size": size}, default_flow_style=None))
        words += ["--from", f"{size}.yml"]
    assert read_results(tmp_path / "8.yml") == (
        PipeEdgeModel("net", (1.5, 2.0), 4, (8, 2)), row(8, 0.5, 0.25, dtype="torch.int64")
    )  # fmt: skip
    run("profile", *words, "--format", "pipeedge", "--device-type", "mb", "--device-memory", "1MiB",
        "--device-bandwidth", "1Mibit/s", "--dtype", "float32")  # fmt: skip
    assert yaml.safe_load((tmp_path / "models.yml").read_text()) == {
        "net": {"layers": 2, "mem_MB": [1.5, 2], "parameters_in": 4, "parameters_out": [8, 2]}
    }
    rows = [{"batch_size": size, "dtype": "torch.float32", "time_s": [0.5, 0.25]} for size in sizes]
    assert yaml.safe_load((tmp_path / "device_types.yml").read_text()) == {
        "mb": {"bw_Mbps": 1, "mem_MB": 1, "model_profiles": {"net": rows}}
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 3}, "layer 3 was not"),
        ({"layers": 1}, "layer 2 of 1"),
        ({"profile_data": [RESULTS["profile_data"][0]] * 2}, "layer 1 of 2 is there twice"),
        ({"profile_data": [{**RESULTS["profile_data"][0], "memory": -0.1}], "layers": 1}, "`memory` is -0.1"),
        ({"profile_data": [{**RESULTS["profile_data"][0], "shape_out": [4]}], "layers": 1}, "a list of shapes"),
        ({"profile_data": [{**RESULTS["profile_data"][0], "time": None}], "layers": 1}, "`time` must be a number"),
        ({"model_name": 3}, "`model_name` must be text"),
        ({"batch_size": 0}, "`batch_size` must be a whole number from 1"),
    ],
)
def test_results_that_make_no_sense_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "profiler_results.yml"
    path.write_text(yaml.safe_dump({**RESULTS, **change}))
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        read_results(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "give a workload to measure, or results with --from"),
        (["mlp", "--from", "x.yml", "--format", "pipeedge", "--device-type", "a"], 2, "but not both"),
        (["mlp", "--device-type", "a", "--overwrite"], 2, "--overwrite can only be used with --format pipeedge"),
        (["mlp", "--format", "pipeedge"], 2, "needs --device-type"),
        (["mlp", "--format", "pipeedge", "--device-type", "a", "-o", "x.yaml"], 2, "--output can't be used with"),
        (["mlp", "--format", "pipeedge", "--device-type", "a", "--device-memory", "512"], 2, "has no unit"),
        (["--from", "x.yml", "--format", "pipeedge", "--device-type", "a", "--ranks", "2"], 2, "--ranks can't be used"),
        (["--from", "x.yml", "--format", "pipeedge", "--device-type", "a"], 1, "file not found: `x.yml`"),
    ],
)
def test_words_that_do_not_go_together_are_told(words: list[str], code: int, said: str, run: Any) -> None:
    assert said in run("profile", *words, code=code).stderr


VIT = "vit:layers=2,hidden=32,heads=4,image=32,patch=8,classes=10"
MINE = """
import torch
from torch import nn
from hpgo.runtime import Network, Workload

class Add(nn.Module):
    def forward(self, one, other):
        return one + other

def build():
    network = Network()
    network.add("wide", lambda: nn.Linear(4, 8), "input:0")
    network.add("narrow", lambda: nn.Linear(8, 4), "wide")
    network.add("norm", lambda: nn.BatchNorm1d(4), "narrow")
    network.add("sum", Add, "norm", "input:0")
    return Workload(network, torch.zeros(2, 4), torch.zeros(2, 4), nn.functional.mse_loss)
"""


def test_one_command_makes_files_that_both_schedulers_answer_from(tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    words = ["--format", "pipeedge", "--time-limit", "0s", "-m", "vit"]
    new = ["--device-memory", "512MB", "--device-bandwidth", "100Mbit/s"]
    run("profile", VIT, *words, "--device-type", "mb", "--batch-size", "1,8", *new)
    before = {name: (tmp_path / name).read_text() for name in ("models.yml", "device_types.yml")}
    assert "type `rcc` is new" in run("profile", VIT, *words, "--device-type", "rcc", code=1).stderr
    run("profile", VIT, *words, "--device-type", "rcc", "--batch-size", "8", *new)
    assert (tmp_path / "models.yml").read_text() == before["models.yml"]
    types = (tmp_path / "device_types.yml").read_text()
    assert types.startswith(before["device_types.yml"])
    assert not list(tmp_path.glob("*.part"))
    model, kind = yaml.safe_load(before["models.yml"])["vit"], yaml.safe_load(types)["mb"]
    tokens = 32 * (1 + (32 // 8) ** 2)
    assert (model["parameters_in"], model["parameters_out"]) == (3 * 32 * 32, [tokens, tokens, tokens, 10])
    assert kind["mem_MB"] == 512e6 / 2**20
    assert kind["bw_Mbps"] == 100e6 / 2**20
    assert [(one["batch_size"], one["dtype"]) for one in kind["model_profiles"]["vit"]] == [
        (1, "torch.float32"), (8, "torch.float32"),
    ]  # fmt: skip
    assert all(time > 0 for one in kind["model_profiles"]["vit"] for time in one["time_s"])
    _devices(tmp_path, "mb: [mb-0, mb-1]\nrcc: [rcc-0]\n")
    plan = json.loads(run("partition", "-m", "vit", "--json").stdout)
    assert sum(stage["last"] - stage["first"] + 1 for stage in plan["stages"]) == 4
    done = subprocess.run(
        [sys.executable, "-c", "from hpgo.cli.sched_pipeline import main; main()", "-m", "vit"], cwd=tmp_path,
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    stages = [span for stage in yaml.safe_load(done.stdout) for span in stage.values()]
    assert stages[0][0] == 1
    assert stages[-1][1] == 4
    again = run("profile", VIT, *words, "--device-type", "mb", "--batch-size", "8,16", code=1)
    assert "at batch size 8 in torch.float32 already" in again.stderr
    assert (tmp_path / "device_types.yml").read_text() == types


def test_values_that_pass_by_and_inputs_that_are_read_late_cross_each_cut(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    run("profile", "mine:build", "--format", "pipeedge", "--time-limit", "0s", "--batch-size", "2", "--device-type",
        "a", "--device-memory", "1GiB", "--device-bandwidth", "1Gbit/s", "--dtype", "float64")  # fmt: skip
    model = yaml.safe_load((tmp_path / "models.yml").read_text())["mine:build"]
    assert model["parameters_in"] == 4
    assert model["parameters_out"] == [8 + 4, 4 + 4, 4 + 4, 4]
    wide, narrow, norm, add = (mb * 2**20 for mb in model["mem_MB"])
    assert (wide, narrow, norm, add) == (8 * (32 + 8), 8 * (32 + 4), 8 * (4 + 4 + 4 + 4) + 8, 0)
    (timed,) = yaml.safe_load((tmp_path / "device_types.yml").read_text())["a"]["model_profiles"]["mine:build"]
    assert (timed["batch_size"], timed["dtype"]) == (2, "torch.float64")


@pytest.mark.skipif(not REFERENCE.is_dir(), reason=NO_REFERENCE)
@pytest.mark.parametrize("name", ["base", "large"])
def test_quarters_of_blocks_are_pipeedges_layers(name: str) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    from hpgo.runtime import Workload
    from hpgo.runtime.chains import described

    published = yaml.safe_load((REFERENCE / "pipeedge/models.yml").read_text())[f"google/vit-{name}-patch16-224"]
    model, dtype = described(Workload.read(f"vit-{name}").by("quarter"), name=name)
    assert len(model.memory_mb) == published["layers"]
    assert model.parameters_in == published["parameters_in"]
    assert list(model.parameters_out) == published["parameters_out"]
    assert dtype == "torch.float32"


def test_quarters_are_measured_in_one_command(tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    run("profile", "deit-tiny:image=32", "--by", "quarter", "--format", "pipeedge", "--time-limit", "0s",
        "--device-type", "mb", "--device-memory", "512MB", "--device-bandwidth", "100Mbit/s")  # fmt: skip
    model = yaml.safe_load((tmp_path / "models.yml").read_text())["deit-tiny:image=32"]
    assert model["layers"] == 48
    values = 192 * (2 + (32 // 16) ** 2)  # two vectors for the whole
    assert model["parameters_out"][:4] == [2 * values, values, 5 * values, values]


def test_inference_runs_layers_forward_alone_as_a_model_that_is_not_training() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    import hpgo.runtime

    seen: set[tuple[bool, bool]] = set()

    class Looks(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, given: Any) -> Any:
            if not given.is_meta:
                seen.add((self.training, torch.is_inference_mode_enabled()))
            return given * 2

    def loss(outputs: Any, targets: Any) -> Any:
        raise AssertionError("nobody asks for the loss")

    layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), Looks()]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), loss)
    found = hpgo.runtime.measure(workload, batch_sizes=[3], seconds=0, inference=True)
    assert seen == {(False, True)}
    assert found.wholes.keys() == {3}
    assert "inference" in found.profile.source
    for layer in found.profile.layers:
        assert layer.forward_s[0] > 0
        assert (layer.backward_s, layer.saved_bytes) == ((0.0,), (0.0,))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", name="inference"):
        hpgo.runtime.measure(workload, inference=1)  # type: ignore[arg-type]
