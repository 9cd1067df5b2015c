"""The log of a run has the values that its losses, the data and the operations of the model determine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402 -- it needs torch

from hpgo.cli.main import group  # noqa: E402
from hpgo.cli.run_log import RunLog  # noqa: E402
from hpgo.runtime import Workload  # noqa: E402
from hpgo.runtime.train import work  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

GPT = "gpt:layers=2,hidden=32,heads=4,vocabulary=100,length=16"
HOST: dict[str, Any] = {"ranks": 4, "device": torch.device("cpu"), "dtype": None, "autocast": None}


def test_operations_are_counted_as_by_hand() -> None:
    mlp = work.step_work(Workload.read("mlp:layers=3,width=8"), samples=10, **HOST)
    assert mlp.tokens is None
    # A product of (10, 8) and (8, 8) in each layer, forward and twice backward.
    assert mlp.flop == 3 * 3 * 2 * 10 * 8 * 8
    gpt = work.step_work(Workload.read(GPT), samples=10, **HOST)
    assert gpt.tokens == 160
    block = 2 * 160 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 2 * 160 * 16 * 32
    assert gpt.flop == 3 * (2 * block + 2 * 160 * 32 * 100)
    assert gpt.mfu(1.0) is None  # processors have no datasheet here


def test_utilization_is_of_the_datasheets_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    on = {**HOST, "device": SimpleNamespace(type="cuda")}
    found = work.step_work(Workload.read(GPT), samples=10, **{**on, "autocast": torch.bfloat16})
    assert found.peak_flop_per_s == pytest.approx(4 * 989e12, rel=0.001)
    assert found.mfu(0.5) == pytest.approx(found.flop / (0.5 * 4 * 989e12), rel=0.001)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card of tomorrow")
    assert work.step_work(Workload.read(GPT), samples=10, **on).mfu(0.5) is None


def test_layers_that_need_values_have_no_utilization() -> None:
    class Routed(torch.nn.Module):
        def forward(self, given: Any) -> Any:
            return given[torch.nonzero(given.sum(1) > -1e9).flatten()]

    workload = Workload([torch.nn.Linear(4, 4), Routed()], torch.zeros(2, 4), torch.zeros(2, 4), torch.nn.MSELoss())
    assert work.step_work(workload, samples=2, **HOST).flop is None


def test_a_run_logs_steps_validations_and_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logged.py").write_text(
        "import torch\n"
        "def data():\n"
        "    text = torch.arange(17 * 9).reshape(9, 17) % 100\n"
        "    return [(row[:-1], row[1:]) for row in text]\n"
    )
    layers = Workload.read(GPT).layers
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=2)
    hpgo.program(schedule, [(layers, [0])], pipeline_micro_batch_size=4, global_batch_size=8).save("plan.json")
    # As the rank of a launcher, the command runs in this process.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["--log", "run.jsonl", "--validation-data", "logged:data", "--validate-every", "2", "--json"]
    result = CliRunner().invoke(
        group, ["run", "plan.json", "--workload", GPT, "--steps", "3", "--lr-schedule", "linear", *words]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["step", "step", "validation", "step", "validation", "summary"]
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["loss"] for row in steps] == document["losses"]
    assert [row["learning_rate"] for row in steps] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    for row in steps:
        assert row["samples_per_s"] == pytest.approx(8 / row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(128 / row["step_s"])
        assert row["mfu"] is None
    validations = [{key: row[key] for key in ("step", "loss")} for row in rows if row["event"] == "validation"]
    assert validations == document["validation"]
    summary = rows[-1]
    assert summary["loss"] == document["losses"][-1]
    assert summary["step_s"] == document["step_s"]["measured"]
    assert summary["peak_memory_bytes"] == [int(document["peak_memory_bytes"]["measured"])]
    assert summary["validation"] == document["validation"][-1]


def test_tensorboard_gets_each_value_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path), 5)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            added.append((name, value, step))

        def close(self) -> None:
            added.append(("closed", 0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    one = work.StepWork(8, 128, 1e9, 1e12)
    with RunLog(None, str(tmp_path), work=one, ranks=2, done=4) as log:
        log.step(5, 2.5, 0.5, 0.1)
        log.validation({"step": 5, "loss": 2.25, "accuracy": 0.5})
        log.finish((10.0, 20.0))
        log.step(6, 2.5, 0.5, 0.1, batch_fraction=0.25)
    assert added.pop(-2) == ("train/mfu", 0.0005, 6)
    assert added.pop(-2) == ("train/tokens_per_s", 64.0, 6)
    assert added.pop(-2) == ("train/samples_per_s", 4.0, 6)
    del added[-4:-1]
    assert added == [
        ("train/loss", 2.5, 5),
        ("train/learning_rate", 0.1, 5),
        ("train/step_s", 0.5, 5),
        ("train/samples_per_s", 16.0, 5),
        ("train/tokens_per_s", 256.0, 5),
        ("train/mfu", 0.002, 5),
        ("validation/loss", 2.25, 5),
        ("validation/accuracy", 0.5, 5),
        ("peak_memory_bytes/rank-0", 10, 5),
        ("peak_memory_bytes/rank-1", 20, 5),
        ("closed", 0, 0),
    ]


def test_event_files_are_those_that_tensorboard_reads(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: pip install tensorboard"
    )
    with RunLog(None, str(tmp_path), work=work.StepWork(8, None, None, None), ranks=1, done=0) as log:
        log.step(1, 2.5, 0.5, None)
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"train/loss", "train/step_s", "train/samples_per_s"}
    assert [(row.step, row.value) for row in found.Scalars("train/loss")] == [(1, 2.5)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused(hpgo.errors.ArgumentError, "missing_package", "tensorboard"):
        RunLog(None, str(tmp_path), work=None, ranks=1, done=0)
