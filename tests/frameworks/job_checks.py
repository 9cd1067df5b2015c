"""Job folders, in the environment of their framework: its own parser takes them, and they train five steps on the CPU.

Two ranks run the folder's own `smoke.sh`, with gloo instead of NCCL.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import Result, done

import hpgo
from hpgo import jobs
from hpgo.model.arithmetic import Arithmetic

PAIR = hpgo.Cluster.preset("h100:1").first(2)
HERE = Path(__file__).parent
STEPS = 5
LLAMA = hpgo.Transformer(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=192, vocab=512,
    arithmetic=Arithmetic(activation="silu", norm_epsilon=1e-6, rope_theta=5e4),
)  # fmt: skip
QWEN = replace(LLAMA, name="headed", head_norms=True, head_dim=32)
WINDOW = replace(LLAMA, name="window", window=16, window_layers=(0, 1, 2, 3), tied=True)
PIPED: dict[str, Any] = {"pp": 2, "zero_stage": 0, "overlap_dp_comm": False}
EAGER: dict[str, Any] = {"fused_elementwise": False, "fused_cross_entropy": False}
"""Without torch.compile, whose kernels need a compiler."""
CASES: dict[str, list[tuple[hpgo.Transformer, dict[str, Any]]]] = {
    "torchtitan@0.3": [
        (LLAMA, PIPED | EAGER),
        (QWEN, {"tp": 2, "zero_stage": 0} | EAGER),
        (LLAMA, {"zero_stage": 3, "recompute": "full"} | EAGER),
    ],
    "torchtitan@0.2": [(LLAMA, {"zero_stage": 3} | EAGER), (QWEN, {"zero_stage": 2, "micro_batch_size": 4} | EAGER)],
    "deepspeed@0.19": [
        (LLAMA, PIPED | {"recompute": "full"}),
        (WINDOW, PIPED),
        (QWEN, {"zero_stage": 1}),
        (LLAMA, {"zero_stage": 3, "recompute": "full"}),
    ],
}
STAGES = """
class Stage(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.inner = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in names)

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x)) + x / 2
        return x


def build(names):
    return Stage(names)


def loss(output, target):
    return ((output - target) ** 2).mean()


def batches(options):
    torch.manual_seed(7)
    inputs = torch.randn(GLOBAL_BATCH_SIZE, 6)
    while True:
        yield inputs, torch.zeros(GLOBAL_BATCH_SIZE, 6)


if __name__ == "__main__":"""
"""What a user writes into train.py for PyTorch."""


STUB = """#!/usr/bin/env bash
case "$1 ${{2:-}}" in
  "-m torchtitan.train") shift 2; exec {python} {here}/titan_on_cpu.py "$@" ;;
  "train.py "*) [ {shim} = train.py ] || {{ shift; exec {python} {here}/{shim} "$@"; }} ;;
esac
exec {python} "$@"
"""
"""The python3 of a job, which starts the framework on the CPU."""


def smoked(folder: Path, shim: str = "train.py") -> list[float]:
    """Losses of a folder's own smoke run, with its check, its ranks and its reading of the log."""
    stubs = folder / "bin"
    stubs.mkdir()
    text = STUB.format(python=shlex.quote(sys.executable), here=shlex.quote(str(HERE)), shim=shim)
    (stubs / "python3").write_text(text, encoding="utf-8")
    (stubs / "python3").chmod(0o755)
    environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "smoke.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    log = folder / "smoke.log"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8")) if log.exists() else ""
    assert ended.returncode == 0, plain[-5000:] + ended.stdout[-1000:] + ended.stderr[-1000:]
    assert "the job starts and fits" in ended.stdout
    losses = [float(each) for each in re.findall(r"\bstep:? +\d+ .*?loss:? +(-?[\d.]+)", plain)]
    # Ranks without the loss print -1.
    return [each for each in losses if each >= 0]


def trained(target: str) -> str:
    """Each case of a target, as a folder."""
    for model, given in CASES[target]:
        one = hpgo.estimate_llm(model, PAIR, global_batch_size=8, seq_length=64, **given)
        plan = hpgo.LlmPlan.of(one, model, PAIR, framework=target)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as at:
            jobs.save(plan, at, on="torchrun")
            shim = "deepspeed_on_cpu.py" if target.startswith("deepspeed") else "train.py"
            check(smoked(Path(at), shim))
    return f"{len(CASES[target])} job folders, {STEPS} steps each"


def check(losses: list[float]) -> None:
    """Asserts that there are five steps, and that the loss falls."""
    assert len(losses) >= STEPS, losses
    assert losses[-1] < losses[0], losses


def trained_layers() -> str:
    """A plan of layers for PyTorch, whose stages are written."""
    layer = hpgo.Layer("a", "a", (1e-3,), (2e-3,), (1e6,), 4e6, (2e6,))
    ids = [f"layers.{at}" for at in range(6)]
    rows = tuple(replace(layer, id=name, name=name) for name in ids)
    profile = hpgo.Profile("toy", (1,), rows, tuple(pairwise(ids)))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100)
    plan = hpgo.plan(
        profile, cluster, global_batch_size=8, framework="torch", schedule="1f1b",
        memory=hpgo.MemoryModel.preset("adam-fp32"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as at:
        jobs.save(plan, at, on="torchrun")
        train = Path(at) / "train.py"
        train.write_text(train.read_text().replace('if __name__ == "__main__":', STAGES.lstrip()), encoding="utf-8")
        check(smoked(Path(at)))
    return f"1 job folder, {STEPS} steps"


if __name__ == "__main__":
    packages = {"torchtitan": "torchtitan", "deepspeed": "deepspeed"}
    found = next((name for name in packages if importlib.util.find_spec(name)), None)
    if found is None:
        done(Result("torch", f"torch {importlib.metadata.version('torch')}", "", trained=trained_layers()))
    else:
        version = importlib.metadata.version(found)
        name = f"{found}@{version.rpartition('.')[0]}"
        done(Result(name, f"{found} {version}", "", trained=trained(name)))
