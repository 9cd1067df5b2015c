"""Bad input of every kind is answered in words: what is wrong, where, and the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from refusals import refused
from toys import toy

import hpgo
from hpgo.cli.main import group
from hpgo.hardware.cluster import Device, Link, Node
from hpgo.model.states import cut_points
from hpgo.programs.host_rotation import routes_through
from hpgo.show import report

COMMAND = [sys.executable, "-m", "hpgo"]
COLUMNS = {
    "forward_s": [1.0, 2.0],
    "backward_s": [2.0, 4.0],
    "activation_bytes": [8.0, 8.0],
    "parameter_bytes": [4.0, 4.0],
}
PROFILE = """\
hpgo_profile: 1
batch_sizes: 1
layers:
  - {id: "層", forward_s: 1, backward_s: 1, activation_bytes: 1, parameter_bytes: 1}
"""


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        encoding="latin-1",
        timeout=120,
        cwd=cwd,
        env=os.environ | environment,
        check=False,
    )


chain = partial(toy, batch_size=8, **COLUMNS)


def layer(**changes: object) -> hpgo.Layer:
    given = {"forward_s": (1.0,), "backward_s": (1.0,), "activation_bytes": (1.0,), "parameter_bytes": 1.0}
    return hpgo.Layer(**({"id": "a", "name": "a"} | given | changes))


def profile(**changes: object) -> hpgo.Profile:
    return hpgo.Profile(**({"name": "p", "batch_sizes": (1,), "layers": (layer(),), "edges": ()} | changes))


SMALL = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii"])
def test_a_terminal_that_lacks_letters_gets_them_escaped(tmp_path, encoding):
    (tmp_path / "one.yaml").write_text(PROFILE, encoding="utf-8")
    done = run("plan", "one.yaml", "-c", "dapple-c", "-b", "1", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "Step time   2 s for 1 sample" in done.stdout
    done = run("plan", "無.yaml", "-c", "dapple-c", "-b", "1", cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 1
    assert done.stderr.startswith("error: file not found")


def test_usage_errors_have_a_hint(tmp_path):
    done = run("plan", "vgg-19", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("hint: see `hpgo plan --help`\n") or "--help`" in done.stderr


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("a.yaml", "hpgo_profile: 1\nbatch_sizes: 1\nlayers:\n", "a.yaml: `layers` must be a list, got nothing"),
        ("a.json", '{"hpgo_profile": 1,}', "a.json, line 1"),
        ("a.yaml", "", "a.yaml is empty"),
        ("a.yaml", "[hpgo_profile]", "a.yaml: must be a mapping"),
    ],
)
def test_every_error_about_a_profile_has_a_hint(tmp_path, file, text, words):
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.read_profile(tmp_path / file)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("intra: 0 GB/s", "lab.yaml, intra: a link's bytes_per_s is 0"),
        ("intra: 25 GB", "lab.yaml, intra: `bandwidth`: `25 GB` is no rate"),
        ("intra: 25 GB/s\nfoo: 1", "lab.yaml: `foo` is unknown"),
        ("inter: 25 GB/s", "lab.yaml: `intra` is missing"),
    ],
)
def test_every_error_about_a_cluster_names_its_key_and_has_a_hint(tmp_path, text, words):
    path = tmp_path / "lab.yaml"
    path.write_text(f"hpgo_cluster: 1\nnodes: [{{devices: 2, memory: 1 GB}}]\n{text}\n", encoding="utf-8")
    with pytest.raises(hpgo.errors.ClusterError) as caught:
        hpgo.Cluster.read(path)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "net: 3", "net: {layers: 1, mem_MB: [}", "net: {layers: x}"])
def test_every_error_about_the_files_of_hosts_has_a_hint(tmp_path, text):
    files = [tmp_path / name for name in ("models.yml", "device_types.yml", "devices.yml")]
    for file in files:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        hpgo.partition_files(*files, model="net")
    assert "models.yml" in caught.value.message
    assert caught.value.hint


def test_a_missing_file_of_a_built_in_model_says_so():
    with refused(hpgo.errors.ProfileError, "not_found", "elsewhere/xlnet-36-pbs-1.txt") as caught:
        hpgo.read_profile("elsewhere/xlnet-36-pbs-1.txt")
    assert "`xlnet-36`" in caught.value.hint


@pytest.mark.parametrize("path", [None, 3, b"a.yaml", ["a.yaml"], object()])
@pytest.mark.parametrize("read", [hpgo.read_profile, hpgo.Cluster.read, hpgo.Plan.read])
def test_what_is_no_path_is_told(read, path):
    with pytest.raises(hpgo.errors.HpgoError, match="is not a path"):
        read(path)


def test_columns_may_be_anything_to_walk_through():
    expected = chain()
    assert chain(**{name: iter(values) for name, values in COLUMNS.items()}) == expected
    assert chain(**{name: np.array(values) for name, values in COLUMNS.items()}) == expected
    for wrong in (None, 3, "12"):
        with refused(hpgo.errors.ProfileError, "invalid_profile", "forward_s"):
            chain(forward_s=wrong)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, Fraction])
def test_numbers_of_other_libraries_become_plain_ones(tmp_path, kind):
    toy = chain(**{name: [kind(value) for value in values] for name, values in COLUMNS.items()})
    assert toy == chain()
    for ending in ("json", "yaml"):
        hpgo.write_profile(toy, tmp_path / f"toy.{ending}")
        assert hpgo.read_profile(tmp_path / f"toy.{ending}").layers == toy.layers
    plan = hpgo.plan(
        toy, SMALL, global_batch_size=np.int64(16), pipeline_micro_batch_size=np.int32(8), max_stages=np.int8(2)
    )
    assert plan == hpgo.plan(chain(), SMALL, global_batch_size=16, pipeline_micro_batch_size=8, max_stages=2)
    assert hpgo.Plan.from_json(plan.to_json()) == plan
    assert plan.for_rank(np.int64(0)) == plan.for_rank(0)
    assert hpgo.Cluster.from_seps([np.int64(8), np.int64(16)]) == hpgo.Cluster.from_seps([8, 16])
    stages = [(np.int64(2), np.array([0, 1]))]
    assert hpgo.evaluate(toy, SMALL, stages, global_batch_size=16) == hpgo.evaluate(
        toy, SMALL, [(2, [0, 1])], global_batch_size=16
    )


@pytest.mark.parametrize("size", [True, 64.0, "64", None, np.float64(64), np.bool_(True), 2**70, 0, -1])
def test_what_is_no_whole_number_is_told(size):
    with refused(hpgo.errors.ArgumentError, "invalid_argument", name="global_batch_size"):
        hpgo.plan(chain(), SMALL, global_batch_size=size)
    with refused(hpgo.errors.ProfileError, "invalid_profile", "toy"):
        chain(batch_size=size)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_sizes": 1},
        {"batch_sizes": [1]},
        {"layers": None},
        {"layers": [layer()]},
        {"layers": ("a",)},
        {"layers": layer()},
        {"edges": None},
        {"edges": "ab"},
        {"edges": ("ab",)},
        {"edges": (["a", "b"],)},
        {"edges": (("a",),)},
        {"edges": ((1, 2),)},
        {"name": None},
        {"source": 3},
    ],
)
def test_a_profile_that_exists_is_usable(changes):
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        profile(**changes)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["gradients_per_weight", "optimizer_per_weight", "reserved_bytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, "x", True, None])
def test_memory_options_are_named(name, value):
    with pytest.raises(hpgo.errors.ArgumentError, match="x" if value == "x" and name == "reserved_bytes" else name):
        hpgo.plan(chain(), SMALL, global_batch_size=8, memory=hpgo.MemoryModel(**{name: value}))


def test_reserving_all_of_a_device_is_told(tmp_path):
    with refused(hpgo.errors.ArgumentError, "insufficient_memory", "device", "reserved_bytes", "16", "GB"):
        hpgo.plan(chain(), SMALL, global_batch_size=8, memory=hpgo.MemoryModel(reserved_bytes="16 GB"))
    done = run("plan", "vgg-19", "-c", "dapple-a", "-b", "64", "--reserve-memory", "99TB", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --reserve-memory is 99 TB, but `V100-16GB` has 16 GB\nhint: ")


def test_a_micro_batch_below_what_was_allowed_is_not_blamed_on_the_profile():
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "min_samples_per_replica", "16"):
        hpgo.plan(chain(), SMALL, global_batch_size=8, min_samples_per_replica=16)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "toy", "8"):
        hpgo.plan(chain(), SMALL, global_batch_size=4)


def test_a_shortage_names_the_device_that_lacks_memory():
    nodes = (Node(Device("large", 13e9), 1), Node(Device("small", 10e9), 1))
    cluster = hpgo.Cluster("mixed", nodes, Link(1e9, 1e9), Link(1e9, 1e9))
    # 12 GB on each of two devices that share the optimizer's state; 16 GB on one alone.
    sharded = hpgo.MemoryModel(shard_optimizer=True)
    with refused(hpgo.errors.InfeasibleError, "infeasible", "small", "12", "GB", "10", "2"):
        hpgo.plan(chain(parameter_bytes=[4e9, 0]), cluster, global_batch_size=16, max_stages=1, memory=sharded)


def test_a_shortage_on_the_largest_of_clusters_is_still_a_shortage():
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=600_000, intra_gbit_s=1, memory="1 MB")
    with refused(hpgo.errors.InfeasibleError, "infeasible", "device", "0", "2"):
        hpgo.plan(chain(parameter_bytes=[1e9, 1e9]), cluster, global_batch_size=8)


def test_the_report_is_printed_even_if_the_plan_cannot_be_saved(tmp_path):
    for words in (["-b", "64"], ["-b", "64,128"]):  # one plan, a sweep
        done = run("plan", "vgg-19", "-c", "dapple-a", *words, "-o", "no/plan.json", cwd=tmp_path)
        assert done.returncode == 1
        assert "step" in done.stdout
        assert "can't write `no/plan.json`" in done.stderr


def test_a_figure_that_cannot_be_drawn_is_refused_before_the_search(tmp_path):
    words = ["plan", "bert-48", "-c", "dapple-a:2048", "-b", "65536,131072", "--plot", "x.gif"]
    assert "unknown output format: `x.gif`" in run(*words, cwd=tmp_path).stderr


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_figures_that_need_matplotlib_are_refused_at_once_without_it(tmp_path, monkeypatch, ending):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["plan", "bert-48", "-c", "dapple-a:2048", "-b", "65536,131072", "--plot", f"x{ending}"]
    result = CliRunner().invoke(group, words)
    assert isinstance(result.exception, hpgo.errors.ArgumentError)
    assert "matplotlib" in result.exception.message
    assert "pip install matplotlib" in result.exception.hint


def test_figures_as_svg_need_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["plan", "vgg-19", "-c", "dapple-a", "-b", "64,128", "--plot", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(group, words)
    assert result.exit_code == 0, result.output
    assert "samples per second" in (tmp_path / "x.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("schedule", ["auto", "eager_1f1b", "zb"])
def test_plans_of_models_that_take_no_time_are_shown_and_fit_the_schema(schedule):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent.parent / "docs/plan.schema.json").read_text(encoding="utf-8"))
    nothing = {name: [0.0, 0.0] for name in COLUMNS}
    plan = hpgo.plan(chain(**nothing), SMALL, global_batch_size=8, schedule=schedule)
    assert "Step time   0 s for" in str(plan)
    assert "**Step time**: 0 s for" in report.markdown(plan)
    jsonschema.validate(json.loads(plan.to_json()), schema)


def test_a_stage_of_billions_of_devices_takes_no_memory():
    with refused(hpgo.errors.ArgumentError, "too_large", "0", "1048576", name="the devices of stage 0"):
        hpgo.evaluate(chain(), SMALL, [(2, range(2**40))], global_batch_size=8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cut_points("vgg-19"), "profile is `vgg-19`"),
        (lambda: cut_points(chain(), bound="all"), "bound is `all`"),
        (lambda: hpgo.write_profile("vgg-19", "x.json"), "profile is `vgg-19`"),
        (lambda: hpgo.write_profile(chain(), None), "nothing is not a path"),
        (lambda: hpgo.export.megatron("plan.json"), "the plan is `plan.json`"),
        (lambda: hpgo.export.save(None, None, "x"), "there is no exporter nothing"),
        (lambda: hpgo.Plan.from_json(b"{}"), "the plan is not a plan"),
        (lambda: hpgo.Cluster.preset(None), "a cluster's name is nothing, but it must be text"),
        (lambda: hpgo.Layer("a\ud800", "a", (1,), (2,), (8,), 8), "id contains an unpaired surrogate"),
        (lambda: hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, name="\ud800"), "an unpaired surrogate"),
    ],
)
def test_what_is_of_another_kind_is_told(call, words):
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        call()
    assert words in caught.value.message
    assert caught.value.hint


def test_a_link_to_itself_is_no_place_to_write_to(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    with refused(hpgo.errors.FileError, "not_writable"):
        hpgo.plan("vgg-19", "dapple-a", global_batch_size=64).save(tmp_path / "loop.json")


@pytest.mark.parametrize("name", ["字" * 80, "a" * 240, "🙂" * 60])
def test_a_name_as_long_as_the_system_allows_is_written(tmp_path, name):
    hpgo.plan("vgg-19", "dapple-a", global_batch_size=64).save(tmp_path / f"{name}.json")
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


@pytest.mark.parametrize(
    ("words", "says"),
    [(("partition", "--profile", "vgg-19", "--cluster", "dapple-c", "--pin", f"node0=1-{'9' * 5000}"), "a range"),
     (("llm", "explain", "llm-plan.json", "--compare-with", f"tp={'9' * 5000}"), "give a whole number")],
)  # fmt: skip
def test_numbers_of_thousands_of_digits_are_told(tmp_path, words, says):
    price = hpgo.estimate_llm("llama-3-8b", "h100:1", tp=8, global_batch_size=8, seq_length=8192)
    hpgo.LlmPlan.of(price, "llama-3-8b", hpgo.Cluster.preset("h100:1")).save(tmp_path / "llm-plan.json")
    done = run(*words, cwd=tmp_path)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_ways_of_batches_are_no_more_than_batches():
    """Two hundred million before one comes again."""
    assert len(routes_through([2, 3, 5, 7, 11, 13, 17, 19, 23], 3)) == 3
