"""`sched-pipeline` as PipeEdge's runtime calls it, against all possible plans, and recorded cases of known optima."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from conftest import NO_REFERENCE, REFERENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpgo.cli.main import run
from hpgo.cli.sched_pipeline import command

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = REFERENCE / "pipeedge" / "cases.jsonl"

# Mistakes that the original swallows and that have to be named instead.
NAMED_MISTAKES = {
    "004-readme": "RCC-VE-C2558",  # type in one file only; the recorded plan does without its hosts
    "001-readme": "RCC-VE-C2558",
    "113-dup-host": "same",  # a host listed twice
}


@dataclass
class Run:
    code: int
    out: str
    err: str


@pytest.fixture
def sched_pipeline(capsys, monkeypatch):
    """Runs the command in a folder, in this process."""

    def call(folder: Path, *args: str) -> Run:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as exit_info:
            run(command, list(args), prog_name="sched-pipeline")
        captured = capsys.readouterr()
        return Run(int(exit_info.value.code or 0), captured.out, captured.err)

    return call


def cases() -> list[dict]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text().splitlines()]


def named(wanted) -> list:
    found = [pytest.param(case, id=case["id"]) for case in cases() if wanted(case)]
    return found or [pytest.param(None, id="recorded", marks=pytest.mark.skip(reason=NO_REFERENCE))]


class Files:
    """A case's inputs read by plain PyYAML, priced by the cost that PipeEdge documents."""

    def __init__(self, folder: Path, args: list[str]) -> None:
        option = dict(zip(args[::2], args[1::2], strict=True))
        self.batch = int(option.get("-b", 8))
        self.buffers_in, self.buffers_out = int(option.get("-i", 2)), int(option.get("-o", 2))
        name = option.get("-m", "google/vit-base-patch16-224")
        self.model = yaml.safe_load((folder / "models.yml").read_text())[name]
        types = yaml.safe_load((folder / "device_types.yml").read_text())
        devices = yaml.safe_load((folder / "devices.yml").read_text())
        self.type_of = {host: types[kind] for kind, hosts in devices.items() if kind in types for host in hosts}
        self.name = name

    def times(self, host: str) -> list[float]:
        rows = self.type_of[host]["model_profiles"][self.name]
        return [row for row in rows if row["batch_size"] == self.batch and row["dtype"] == "torch.float32"][-1][
            "time_s"
        ]

    def bytes_at(self, position: int) -> float:
        out = self.model["parameters_out"]
        values = self.model["parameters_in"] if position == 0 else out[(position - 1) % len(out)]
        return 4 * self.batch * values

    def bottleneck_s(self, schedule: list[tuple[str, int, int]]) -> float:
        largest = 0.0
        for (host, first, last), following in zip(schedule, [*schedule[1:], None], strict=True):
            largest = max(largest, sum(self.times(host)[first - 1 : last]))
            if following is not None:
                mbps = min(self.type_of[host]["bw_Mbps"], self.type_of[following[0]]["bw_Mbps"])
                largest = max(largest, self.bytes_at(last) / (mbps * 2**20 / 8))
        return largest

    def fits(self, host: str, first: int, last: int) -> bool:
        received, sent = self.bytes_at(first - 1), self.bytes_at(last)
        need = sum(self.model["mem_MB"][first - 1 : last]) * 2**20 + received + sent + sent * self.buffers_out
        need += received * self.buffers_in if first > 1 else 0
        return self.type_of[host]["mem_MB"] * 2**20 > need


def assert_good(files: Files, out: str, optimum_s: float) -> None:
    document = yaml.safe_load(out)
    schedule = [(host, first, last) for stage in document for host, (first, last) in stage.items()]
    assert [first for _, first, _ in schedule] == [1, *(last + 1 for _, _, last in schedule[:-1])]
    assert schedule[-1][2] == files.model["layers"]
    assert len({host for host, _, _ in schedule}) == len(schedule)
    assert all(files.fits(*stage) for stage in schedule)
    assert files.bottleneck_s(schedule) <= optimum_s * (1 + 1e-9)


# A vision transformer's blocks by their formulas: attention, projection, and the two halves of the feed-forward part.
LAYERS, WORDS, WIDTH = 6, 197, 768


def toy_files(folder: Path, hosts: dict[str, int], **changes: dict) -> list[str]:
    """Writes a small question and returns its options: hosts of types that differ in speed, memory and bandwidth."""
    weights = [4 * WIDTH**2, WIDTH**2, 4 * WIDTH**2]
    model = {
        "layers": LAYERS,
        "mem_MB": [4 * weights[layer % 3] / 2**20 for layer in range(LAYERS)],
        "parameters_in": 3 * 224 * 224,
        "parameters_out": [WORDS * WIDTH * (4 if layer % 3 == 1 else 1) for layer in range(LAYERS - 1)] + [1000],
    }
    types = {
        name: {
            "bw_Mbps": mbps,
            "mem_MB": mb,
            "model_profiles": {
                "toy": [
                    {
                        "batch_size": 8,
                        "dtype": "torch.float32",
                        "time_s": [8 * WORDS * 2 * weights[layer % 3] / flops for layer in range(LAYERS)],
                    }
                ]
            },
        }
        for name, (mbps, mb, flops) in {
            "slow": (100, 512, 4e9),
            "fast": (1000, 96, 24e9),
            "wide": (40, 4096, 8e9),
        }.items()
    }
    devices = {name: [f"{name}-{index}" for index in range(count)] for name, count in hosts.items()}
    for name, document in (("models", {"toy": model}), ("device_types", types), ("devices", devices)):
        changed = changes.get(name, lambda document: document)(document)
        (folder / f"{name}.yml").write_text(changed if isinstance(changed, str) else yaml.safe_dump(changed))
    return ["-m", "toy"]


def every_schedule(files: Files) -> Iterator[list[tuple[str, int, int]]]:
    """All ways to give consecutive layers to different hosts that have the memory."""
    layers = files.model["layers"]
    for count in range(1, min(layers, len(files.type_of)) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            parts = list(itertools.pairwise((0, *cuts, layers)))
            for hosts in itertools.permutations(files.type_of, count):
                schedule = [(host, first + 1, last) for host, (first, last) in zip(hosts, parts, strict=True)]
                if all(files.fits(*stage) for stage in schedule):
                    yield schedule


@given(
    st.fixed_dictionaries({name: st.integers(0, 2) for name in ("slow", "fast", "wide")}), st.sampled_from([0, 2, 9])
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_of_all_beats_the_one_printed(tmp_path, sched_pipeline, hosts, buffers):
    args = [*toy_files(tmp_path, hosts), "-i", str(buffers), "-o", str(buffers)]
    result = sched_pipeline(tmp_path, *args)
    files = Files(tmp_path, args)
    intervals_s = [files.bottleneck_s(schedule) for schedule in every_schedule(files)]
    if intervals_s:
        assert result.code == 0, result.err
        assert_good(files, result.out, min(intervals_s))
    else:
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert "short by" in result.err or "lists no host" in result.err


def edited(*path, to=None):
    """Changes one entry of a document, or takes it away."""

    def change(document):
        *outer, last = path
        place = document
        for key in outer:
            place = place[key]
        if to is None:
            del place[last]
        else:
            place[last] = to
        return document

    return change


PROFILE = ("slow", "model_profiles", "toy", 0, "time_s")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("models", lambda _: "toy: {layers: 6\n  mem_MB: [", ["line 2"]),
        ("models", lambda _: "- toy", ["must be a mapping"]),
        ("models", edited("toy"), ["there is no model `toy`"]),
        ("models", edited("toy", "layers"), ["layers"]),
        ("models", edited("toy", "mem_MB"), ["mem_MB"]),
        ("models", edited("toy", "mem_MB", to=[1.0]), ["mem_MB", "6 layers"]),
        ("models", edited("toy", "parameters_out", to=[1, 2, 3, 4]), ["parameters_out", "`layers` is 6"]),
        ("device_types", lambda _: "", ["is empty"]),
        ("device_types", edited("slow", "mem_MB"), ["slow", "mem_MB"]),
        ("device_types", edited("slow", "bw_Mbps"), ["slow", "bw_Mbps"]),
        ("device_types", edited("slow", "bw_Mbps", to=-5), ["bw_Mbps", "-5"]),
        ("device_types", edited(*PROFILE, 0, to=-1.0), ["time_s[0]", "-1"]),
        ("device_types", edited(*PROFILE, 0, to=float("nan")), ["time_s[0]", "nan"]),
        ("device_types", edited(*PROFILE, 0), ["time_s", "6 layers"]),
        ("device_types", edited("slow"), ["devices.yml", "slow"]),
        ("devices", lambda _: "[1, 2]", ["must be a mapping"]),
        ("devices", lambda _: "slow: one", ["slow", "list of hosts"]),
        ("devices", edited("fast", to=["slow-0"]), ["`slow-0` is listed twice"]),
        ("devices", edited("unknown", to=["one"]), ["unknown", "device_types.yml"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path, sched_pipeline, file, change, words):
    args = toy_files(tmp_path, {"slow": 1, "fast": 1}, **{file: change})
    result = sched_pipeline(tmp_path, *args)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert "\nhint: " in result.err
    assert ("devices.yml" if "devices.yml" in words else f"{file}.yml") in result.err
    for word in words:
        assert word in result.err


@pytest.mark.parametrize(("args", "word"), [(["-d", "float32"], "float32"), (["-b", "-1"], "-1"), (["extra"], "extra")])
def test_a_mistake_in_the_options_is_named(tmp_path, sched_pipeline, args, word):
    result = sched_pipeline(tmp_path, *toy_files(tmp_path, {"slow": 2}), *args)
    assert (result.code, result.out) == (1, "")
    assert word in result.err


def test_an_empty_model_an_endless_link_and_layers_without_time_are_planned(tmp_path, sched_pipeline):
    nothing = {"layers": 0, "mem_MB": [], "parameters_in": 0, "parameters_out": []}
    toy_files(tmp_path, {"slow": 1}, models=edited("none", to=nothing))
    result = sched_pipeline(tmp_path, "-m", "none", "--ignore-unknown-types")
    assert (result.code, result.out) == (0, "[]\n")
    for change in (edited("slow", "bw_Mbps", to=float("inf")), edited(*PROFILE, to=[0.0] * LAYERS)):
        result = sched_pipeline(tmp_path, *toy_files(tmp_path, {"slow": 2}, device_types=change))
        assert result.code == 0, result.err
        assert yaml.safe_load(result.out)[0].popitem()[1][0] == 1


def test_a_type_that_is_spelt_differently_is_named_or_left_out_on_demand(tmp_path, sched_pipeline):
    args = toy_files(tmp_path, {"slow": 1, "fats": 1})
    result = sched_pipeline(tmp_path, *args)
    assert (result.code, result.out) == (1, "")
    assert "type `fats` (fats-0) is not in device_types.yml" in result.err
    assert "did you mean `fast`?" in result.err
    result = sched_pipeline(tmp_path, *args, "--ignore-unknown-types")
    assert (result.code, result.out) == (0, f"- slow-0: [1, {LAYERS}]\n")
    assert "fats-0" in result.err


@pytest.mark.parametrize(
    "case", named(lambda case: (case["analysis"] or {}).get("feasible") and case["id"] not in NAMED_MISTAKES)
)
def test_feasible_case_gets_an_optimal_plan_within_memory(case, sched_pipeline):
    folder = CASES.parent / "cases" / case["id"]
    result = sched_pipeline(folder, *case["args"])
    assert result.code == 0, result.err
    assert_good(Files(folder, case["args"]), result.out, case["analysis"]["optimal_bottleneck_s"])


@pytest.mark.parametrize("case", named(lambda case: (case["analysis"] or {}).get("feasible") is False))
def test_infeasible_case_exits_1_and_says_what_is_short(case, sched_pipeline):
    result = sched_pipeline(CASES.parent / "cases" / case["id"], *case["args"])
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    if "memory" in case["category"]:
        assert "short" in result.err
        assert "MiB" in result.err


ILL_FORMED = {
    "112-dev-null": ("devices.yml", "Minnowboard-E3845"),
    "119-err-dtype": ("float32",),
    "121-err-arg": ("batch_size", "-1"),
    "124-err-arg": ("extra",),
    "131-err-yaml": ("models.yml", "line 2"),
    "134-err-yaml": ("device_types.yml",),
    "135-err-yaml": ("device_types.yml",),
    "136-err-yaml": ("devices.yml",),
    "137-err-yaml": ("devices.yml",),
    "144-err-model-shape": ("models.yml", "mem_MB"),
    "146-err-model-shape": ("models.yml", "layers"),
    "148-err-model-shape": ("models.yml", "mem_MB"),
    "151-err-types": ("device_types.yml", "time_s"),
    "152-err-types": ("device_types.yml", "time_s"),
    "153-err-types": ("device_types.yml", "mem_MB"),
    "154-err-types": ("device_types.yml", "bw_Mbps"),
    "155-err-types": ("device_types.yml", "bw_Mbps"),
    "156-err-types": ("device_types.yml", "time_s"),
    "160-err-types": ("devices.yml",),
    "161-err-types": ("devices.yml", "Unknown"),
    "162-err-dev": ("devices.yml", "Minnowboard-E3845"),
} | {name: ("devices.yml", word) for name, word in NAMED_MISTAKES.items()}


@pytest.mark.parametrize("case", named(lambda case: case["id"] in ILL_FORMED))
def test_ill_formed_case_names_file_and_key(case, sched_pipeline):
    result = sched_pipeline(CASES.parent / "cases" / case["id"], *case["args"])
    assert (result.code, result.out) == (1, "")
    for word in ILL_FORMED[case["id"]]:
        assert word in result.err


def test_every_recorded_case_is_tested(reference):
    tested = {
        case["id"]
        for case in cases()
        if case["id"] in ILL_FORMED or (case["analysis"] or {}).get("feasible") is not None
    }
    others = {"005-readme", "158-err-types", "159-err-types"}  # no layers; infinitely fast links; no time at all
    assert {case["id"] for case in cases()} == tested | others


def test_model_of_no_layers_has_an_empty_schedule(reference, sched_pipeline):
    result = sched_pipeline(reference / "pipeedge/cases/005-readme", "-m", "DummyModel", "--ignore-unknown-types")
    assert (result.code, result.out) == (0, "[]\n")


@pytest.mark.parametrize("name", ["158-err-types", "159-err-types"])
def test_infinite_bandwidth_and_zero_times_are_planned(name, reference, sched_pipeline):
    result = sched_pipeline(reference / "pipeedge/cases" / name)
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out)[0].popitem()[1][0] == 1


def test_copied_example_files_name_the_type_that_is_spelt_differently(reference, sched_pipeline, tmp_path):
    for name in ("models.yml", "device_types.yml", "devices.yml"):
        shutil.copy(reference / "pipeedge" / name, tmp_path)
    result = sched_pipeline(tmp_path)
    assert (result.code, result.out) == (1, "")
    assert "RCC-VE-C2558" in result.err
    assert "did you mean `RCC-VE-C2000`?" in result.err


def test_ignoring_unknown_types_plans_without_their_hosts(reference, sched_pipeline):
    result = sched_pipeline(reference / "pipeedge", "--ignore-unknown-types")
    assert result.code == 0
    assert result.out == "- mb-0: [1, 12]\n- mb-1: [13, 24]\n- mb-2: [25, 36]\n- mb-3: [37, 48]\n"
    assert "rcc-0" in result.err


def test_renamed_example_beats_the_published_schedule(reference, sched_pipeline):
    result = sched_pipeline(reference / "pipeedge", "-D", "devices_renamed.yml")
    published = yaml.safe_load((reference / "pipeedge/schedule_example.yml").read_text())
    files = Files(reference / "pipeedge/cases/002-readme", [])
    before = files.bottleneck_s([(host, *layers) for stage in published for host, layers in stage.items()])
    assert before == pytest.approx(1.726, abs=5e-4)
    assert_good(files, result.out, 1.549)


def test_installed_command_writes_only_the_schedule_to_stdout(tmp_path):
    (tmp_path / "models.yml").write_text("m: {layers: 2, mem_MB: [1, 1], parameters_in: 8, parameters_out: [8, 8]}")
    (tmp_path / "device_types.yml").write_text(
        "t: {bw_Mbps: 100, mem_MB: 64, model_profiles: {m: [{batch_size: 8, dtype: torch.float32, time_s: [1, 1]}]}}\n"
        "u: {bw_Mbps: 0, mem_MB: 0, model_profiles: null}"
    )
    (tmp_path / "devices.yml").write_text("t: [one, '2nd: host']\nu: [spare]")
    tool = Path(sys.executable).parent / "sched-pipeline"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [tool, "-m", "m"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == '- one: [1, 1]\n- "2nd: host": [2, 2]\n'
    assert result.returncode == 0
    assert result.stderr == "warning: type `u` has no profile of `m`: spare not used\n"


@pytest.mark.parametrize(
    ("option", "name"),
    [("--dtype", "-d"), ("--batch-size", "-b"), ("--buffers-in", "-i"), ("--buffers-out", "-o"),
     ("--model-name", "-m"), ("--models-file", "-M"), ("--dev-types-file", "-T"), ("--dev-file", "-D")],
)  # fmt: skip
def test_options_have_the_original_names(option, name):
    options = {tuple(parameter.opts) for parameter in command.params}
    assert (name, option) in options
