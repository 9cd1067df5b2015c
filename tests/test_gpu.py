"""Runs on GPUs: the same losses as on the CPU, messages by NCCL, profiles by CUDA events, and the allocator's peak.

`make gpu` lists and runs these tests. Everywhere else they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from hpgo.runtime import Pipeline, Workload  # noqa: E402 -- what needs torch, where there is one

if TYPE_CHECKING:
    from pathlib import Path

WORKLOAD = "gpt:layers=2,hidden=64,heads=4,vocabulary=100,length=32,tied=false"
DEVICE = os.environ.get("HPGO_TEST_DEVICE", "cuda")
"""With `cpu`, these tests check themselves on a machine without GPUs."""


def asked(folder: Path, *words: str) -> str:
    """What `hpgo WORDS` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", *words], cwd=folder, text=True, capture_output=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(folder: Path, device: str, *words: str) -> dict[str, Any]:
    """What three steps of `plan.json` report."""
    how = ("--workload", WORKLOAD, "--dtype", "float64", "--steps", "3", "--device", device, "--json")
    document: dict[str, Any] = json.loads(asked(folder, "run", "plan.json", *how, *words))
    return document


def write_plan(folder: Path, ranks: int) -> None:
    layers = Workload.read(WORKLOAD).layers
    schedule = hpgo.schedule("1f1b", ranks=ranks, micro_batches=4)
    cut = [layers[len(layers) * at // ranks : len(layers) * (at + 1) // ranks] for at in range(ranks)]
    stages = [(part, [at]) for at, part in enumerate(cut)]
    hpgo.program(schedule, stages, pipeline_micro_batch_size=2, global_batch_size=8).save(folder / "plan.json")


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 2)])
def test_losses_on_gpus_are_those_on_the_cpu(ranks: int, tmp_path: Path) -> None:
    """With two ranks, tensors pass by NCCL."""
    write_plan(tmp_path, ranks)
    on_gpus, on_cpu = (trained(tmp_path, device) for device in (DEVICE, "cpu"))
    assert on_gpus["losses"] == pytest.approx(on_cpu["losses"], rel=1e-9)
    assert on_gpus["peak_memory_bytes"]["measured"] > 0


@pytest.mark.gpu(2)
def test_torchs_pipelining_on_gpus_has_the_losses_of_the_engine(tmp_path: Path) -> None:
    write_plan(tmp_path, 2)
    runs = [trained(tmp_path, DEVICE, "--backend", backend) for backend in ("hpgo", "torch")]
    assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-9)


@pytest.mark.gpu
def test_the_peak_of_a_step_is_the_allocators() -> None:
    layers = [torch.nn.Linear(256, 256) for _ in range(2)]
    workload = Workload(layers, torch.ones(2, 256), torch.ones(2, 256), torch.nn.functional.mse_loss)
    schedule = hpgo.schedule("gpipe", ranks=1, micro_batches=2)
    program = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=4, global_batch_size=8)
    with Pipeline(program, workload, optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9), device=DEVICE) as pipeline:
        for _ in range(2):
            pipeline.step(*pipeline.example())
        peaks = pipeline.timeline(1).measures.peak_memory_bytes
    assert peaks is not None
    weights_bytes = sum(one.numel() * 4 for layer in layers for one in layer.parameters())
    assert peaks[0] > 3 * weights_bytes, "weights, gradients and momentum"
    if DEVICE == "cuda":
        assert peaks[0] == torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_a_profile_of_a_gpu_has_times_and_memory_of_every_layer(tmp_path: Path) -> None:
    asked(tmp_path, "profile", WORKLOAD, "--batch-size", "2", "--device", DEVICE, "--time-limit", "2s", "-o", "p.yaml")
    profile = hpgo.read_profile(tmp_path / "p.yaml")
    assert [layer.id for layer in profile.layers] == list(Workload.read(WORKLOAD).layers)
    plan = hpgo.plan(profile, hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=100), global_batch_size=8)
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in plan.stages)
    if DEVICE == "cuda":
        assert torch.cuda.get_device_name() in (tmp_path / "p.yaml").read_text()


@pytest.mark.gpu
def test_a_node_measures_itself(tmp_path: Path) -> None:
    asked(tmp_path, "llm", "calibrate", "--node", "--time-limit", "20s", "--device", DEVICE, "-o", "node.yaml")
    assert (tmp_path / "node.yaml").stat().st_size > 0


@pytest.mark.gpu(2)
def test_links_between_gpus_are_measured(tmp_path: Path) -> None:
    words = ("measure-links", "--ranks", "2", "--device", DEVICE, "--time-limit", "5s", "--json")
    assert json.loads(asked(tmp_path, *words))["links"]["intra"]["bytes_per_s"] > 0
