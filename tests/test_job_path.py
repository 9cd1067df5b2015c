"""The whole path of a user: a configuration, a plan for 64 GPUs, a job folder, its smoke run, and a better list."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group

RECORDED = Path(__file__).parent / "golden" / "megatron-smoke.log"
"""Log of Megatron-LM 0.19.1, which trained the reduced model of this plan on eight processes of a CPU.

`tests/frameworks/record_smoke.py` records it.
"""
CONFIG = RECORDED.with_suffix(".json").read_text(encoding="utf-8")
"""The config.json of the model."""
ASK = (
    "llm", "plan", "config.json", "-c", "h100:8", "-b", "64", "--seq-length", "128", "--framework", "megatron",
    "--exclude", "cuda_graph_impl",
)  # fmt: skip
FIX = ("--fix", "tp=2,pp=2,vpp=1,micro_batch_size=1,zero_stage=1,recompute=none")
SLOWER = 1.4
"""Measured step times, relative to the estimated ones."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job folder of the plan, as the command writes it."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(CONFIG, encoding="utf-8")
    printed = called(*ASK, *FIX, "-o", "job/")
    assert "bash job/smoke.sh" in printed
    return tmp_path / "job"


def called(*words: str) -> str:
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    return done.output


def with_times(log: str, seconds: float) -> str:
    """The log of a machine that takes `seconds` for each step. The recorded ones are a CPU's."""
    line = r"(elapsed time per iteration \(ms\): )[\d.]+"
    text, count = re.subn(line, lambda found: f"{found[1]}{1e3 * seconds:.4f}", log)
    assert count == 5
    return text


def test_the_folder_of_64_gpus_has_the_arguments_that_the_recorded_run_printed(job: Path) -> None:
    assert hpgo.LlmPlan.read(job / "llm-plan.json").estimate.gpus == 64
    printed = dict(re.findall(r"^  (\w+) \.+ (.*)$", RECORDED.read_text(encoding="utf-8"), re.MULTILINE))
    assert printed["world_size"] == "8"
    words = shlex.split((job / "small" / "arguments.txt").read_text(encoding="utf-8"), comments=True)
    options = [at for at, word in enumerate(words) if word.startswith("--")]
    compared = 0
    for at, end in zip(options, [*options[1:], len(words)], strict=True):
        # A CPU has no sequence parallelism, NullTokenizer adds a word, and the layout is printed as an object.
        name = words[at].removeprefix("--").replace("-", "_")
        if end == at + 2 and name in printed and name not in {"vocab_size", "pipeline_model_parallel_layout"}:
            assert same(printed[name], words[at + 1]), name
            compared += 1
    assert compared > 15


def same(printed: str, given: str) -> bool:
    try:
        return float(printed) == float(given)
    except ValueError:
        return printed.rpartition(".")[2] == given  # enumerations are printed with their type


def test_a_smoke_run_moves_the_list_of_64_gpus(job: Path) -> None:
    small = hpgo.LlmPlan.read(job / "small" / "llm-plan.json").estimate
    log = with_times(RECORDED.read_text(encoding="utf-8"), SLOWER * small.step_s)
    (job / "small" / "smoke.log").write_text(log, encoding="utf-8")
    called("llm", "calibrate", "job/small/", "-o", "platform.yaml")
    before = hpgo.plan_llm("config.json", hpgo.Cluster.preset("h100:8"), global_batch_size=64, seq_length=128,
                           framework="megatron", exclude=["cuda_graph_impl"]).best  # fmt: skip
    after = json.loads(called(*ASK, "--platform", "platform.yaml", "--json"))
    assert "What the measured steps change" in called(*ASK, "--platform", "platform.yaml")
    moves: list[dict[str, Any]] = after["moves"]
    assert [move["rank_after"] for move in moves if move["rank_after"]] == list(range(1, 11))
    assert moves[0]["step_after_s"] > moves[0]["step_before_s"]
    first = next(move for move in moves if move["rank_before"] == 1)
    assert first["step_before_s"] == pytest.approx(before.step_s)


def test_a_log_of_the_reduced_model_is_not_one_of_the_plan(job: Path) -> None:
    (job / "smoke.log").write_text(RECORDED.read_text(encoding="utf-8"), encoding="utf-8")
    with refused(hpgo.errors.ArgumentError, "mismatch", "8", "64"):
        hpgo.MeasuredStep.from_job(job)


def test_the_smoke_script_reads_the_recorded_log(job: Path) -> None:
    (job / "small" / "smoke.log").write_text(RECORDED.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        ["bash", "job/smoke.sh", "--small", "--read"], cwd=job.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the job starts and fits: 5 steps" in done.stdout
    assert "lm loss: 5.967028E+00" in done.stdout
    (command,) = re.findall(r"hpgo (llm calibrate .*)", done.stdout)
    small = hpgo.LlmPlan.read(job / "small" / "llm-plan.json").estimate
    slow = with_times(RECORDED.read_text(encoding="utf-8"), SLOWER * small.step_s)
    (job / "small" / "smoke.log").write_text(slow, encoding="utf-8")
    called(*shlex.split(command))
    assert Path("platform.yaml").exists()
