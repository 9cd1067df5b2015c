"""From a profile to a plan to a run: layers meet, and ranks send and hold what the plan says."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.loader import repeated  # noqa: E402
from hpgo.runtime.memory import LiveTensorCounter  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

ROOT = Path(__file__).parent.parent
SMALL = {
    "mlp": "mlp:layers=3,width=2048",
    "gpt": "gpt:layers=2,hidden=64,heads=4,vocabulary=100,length=32,tied=false",
    "bert": "bert:layers=2,hidden=64,heads=4,vocabulary=100,length=32,dropout=0",
    "vit": "vit:layers=2,hidden=128,heads=4,image=32,patch=8,classes=10",
    "resnet-50": "resnet-50:width=8,image=32,classes=10",
    "vgg-19": "vgg-19:image=32,width=8,linear=16,classes=10,dropout=0",
}
ROWS = 8
MESSAGES, MIN_BYTES = 16, 2**16
"""Each way in a step, and their least size: with fewer and smaller ones, what else ranks tell each other counts."""
DEEP = {
    "activations": "vit:layers=16,hidden=64,heads=4,image=64,patch=8,classes=10",
    "weights": "mlp:layers=32,width=512",
}


def planned(profile: hpgo.Profile, cut: int, micro_batches: int, schedule: str = "1f1b") -> hpgo.Plan:
    """Two stages on two devices."""
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=10, inter_gbit_s=10)
    stages = [(cut, [0]), (len(profile.layers) - cut, [1])]
    return hpgo.evaluate(
        profile, cluster, stages, global_batch_size=ROWS * micro_batches, pipeline_micro_batch_size=ROWS,
        schedule=schedule, memory=hpgo.MemoryModel.preset("adam-fp32"),
    )  # fmt: skip


def ran(folder: Path, cases: dict[str, tuple[str, hpgo.Plan]]) -> tuple[dict[str, Any], bool]:
    """What running each plan has shown, and whether the interface counted these runs alone."""
    for name, (_, plan) in cases.items():
        plan.save(folder / f"{name}.json")
    asked = [{"workload": workload, "plan": f"{name}.json"} for name, (workload, _) in cases.items()]
    (folder / "cases.json").write_text(json.dumps(asked))
    own = ["unshare", "--map-root-user", "--net"] if shutil.which("unshare") else []
    is_alone = bool(own) and subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0
    words = [*(own if is_alone else []), sys.executable, ROOT / "tests/closing_ranks.py", folder]
    done = subprocess.run(
        [*words, *(["alone"] if is_alone else [])], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads((folder / "found.json").read_text()), strict=True)), is_alone


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts of sockets")
@pytest.mark.parametrize("names", [pytest.param([*SMALL], marks=pytest.mark.slow), ["gpt", "vgg-19"]], ids=len)
def test_layers_meet_and_what_crosses_a_cut_is_what_the_plan_says(names: list[str], tmp_path: Path) -> None:
    """In every run, one model of attention and one of convolutions stand for all six."""
    cases: dict[str, tuple[str, hpgo.Plan]] = {}
    for name in names:
        workload = SMALL[name]
        profile = hpgo.runtime.profile(workload, batch_sizes=[ROWS], seconds=0)
        assert tuple(layer.id for layer in profile.layers) == hpgo.runtime.Workload.read(workload).layers
        plans = [planned(profile, cut, MESSAGES) for cut in range(1, len(profile.layers))]
        cases[name] = workload, random.Random(name).choice([plan for plan in plans if crossing(plan) >= MIN_BYTES])
    found, is_alone = ran(tmp_path, cases)
    for name, (_, plan) in cases.items():
        said = 2 * MESSAGES * crossing(plan)  # there, and back as a gradient
        assert found[name]["losses"][-1] < found[name]["losses"][0], name
        assert said <= found[name]["sockets"] <= 1.05 * said, name
        if is_alone:
            assert said <= found[name]["interface"] <= 1.05 * said, name


def crossing(plan: hpgo.Plan) -> float:
    """Bytes behind the first stage of two, as its memory has them: a buffer for what leaves, and one for what comes."""
    return plan.stages[0].memory.buffers_bytes / 2


def test_ranks_hold_what_the_plan_says(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, hpgo.Plan]] = {}
    for name, workload in DEEP.items():
        profile = hpgo.runtime.profile(workload, batch_sizes=[ROWS], seconds=0)
        for schedule in ("1f1b", "gpipe") if name == "activations" else ("1f1b",):
            plan = planned(profile, len(profile.layers) // 2, 4, schedule)
            cases[f"{name}, {schedule}"] = workload, plan
    found, _ = ran(tmp_path, cases)
    for name, (_, plan) in cases.items():
        for held, stage in zip(found[name]["peaks"], plan.stages, strict=True):
            assert stage.memory.total_bytes <= held <= 1.05 * stage.memory.total_bytes, name
    # The last stage has one micro-batch in flight under 1F1B, and four under GPipe.
    more, said = (
        other - one
        for one, other in (
            (found["activations, 1f1b"]["peaks"][1], found["activations, gpipe"]["peaks"][1]),
            [cases[f"activations, {schedule}"][1].stages[1].memory.total_bytes for schedule in ("1f1b", "gpipe")],
        )
    )
    assert more == pytest.approx(said, rel=0.02)


class Looks(torch.nn.Linear):
    """Notes in which steps somebody watches what it computes."""

    seen: tuple[list[bool], ...] = ([],)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not given.is_meta:
            self.seen[0].append(_get_current_dispatch_mode() is not None)
        return super().forward(given)


def test_memory_is_measured_in_the_first_step_alone() -> None:
    layers = [Looks(64, 64), Looks(64, 64)]
    workload = hpgo.runtime.Workload(layers, torch.ones(2, 64), torch.ones(2, 64), torch.nn.functional.mse_loss)
    schedule = hpgo.schedule("gpipe", ranks=1, micro_batches=3)
    program = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=512, global_batch_size=3 * 512)
    with hpgo.runtime.Pipeline(program, workload, optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9)) as pipeline:
        for _ in range(2):
            pipeline.step(*pipeline.example())
        peaks = [pipeline.timeline(step).measures.peak_memory_bytes for step in (0, 1)]
    assert Looks.seen[0] == [True] * 6 + [False] * 6
    assert peaks[0] == peaks[1]
    weights, rows = 4 * 2 * (64 * 64 + 64), 4 * 512 * 64
    # Weights, gradients and momentum; the batch; of each micro-batch what both layers make, the first backward pass
    # beside them: the gradient of the loss's input, and of what the last layer reads.
    minimum = 3 * weights + 2 * 3 * rows + 3 * 2 * rows
    assert peaks[0] is not None
    assert minimum < peaks[0][0] < minimum + 3 * rows


@pytest.mark.parametrize("name", SMALL)
def test_what_is_watched_computes_the_same(name: str) -> None:
    workload = hpgo.runtime.Workload.read(SMALL[name])

    def gradients(watched: AbstractContextManager[Any]) -> list[torch.Tensor]:
        (part,) = workload.parts([workload.layers])
        given = repeated(workload.example_inputs, (range(2),)).tensors
        targets = repeated(workload.example_targets, (range(2),)).tensors
        with watched, running(step=0, samples=range(2)):
            workload.loss_of(part(*given, rows=2), targets).backward()
        return [one.grad for one in part.parameters() if one.grad is not None]

    for one, other in zip(gradients(nullcontext()), gradients(LiveTensorCounter()), strict=True):
        assert torch.equal(one, other)
