"""Measured profiles: bytes are what a run holds and sends, times are what layers take, and plans of them run."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402 -- after torch, without which nothing here runs
from torch.nn import functional  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.loader import repeated  # noqa: E402
from hpgo.runtime.memory import LiveTensorCounter  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {
    "mlp": "mlp:layers=3,width=16",
    "gpt": "gpt:layers=2,hidden=32,heads=4,vocabulary=100,length=16",
    "bert": "bert:layers=2,hidden=32,heads=4,vocabulary=100,length=16",
    "vit": "vit:layers=2,hidden=32,heads=4,image=32,patch=8,classes=10",
    "resnet-50": "resnet-50:width=8,image=32,classes=10",
    "vgg-19": "vgg-19:flat,image=32,width=8,linear=16,classes=10",
}
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == "resnet-50" else name for name in SMALL]
"""The residual network has the most layers, and takes longer than all others together."""
PAUSE_S = 0.02


class Pausing(torch.autograd.Function):
    """Takes twice as long backward as forward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * PAUSE_S)
        return gradient


class Pause(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return Pausing.apply(given)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `hpgo` in a folder of its own, as the fixture of all tests does, but with torch loaded already."""

    def hpgo_(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = warm_ranks.hpgo(tmp_path, *words)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return hpgo_


def children() -> list[int]:
    """Processes that this one has started, and that have not ended."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def measured(workload: str | hpgo.runtime.Workload, **options: Any) -> hpgo.Profile:
    return hpgo.runtime.profile(workload, seconds=0, **options)


@pytest.mark.parametrize("name", EACH)
def test_layers_and_bytes_are_those_that_a_run_has(name: str) -> None:
    workload = hpgo.runtime.Workload.read(SMALL[name])
    profile = measured(SMALL[name], batch_sizes=[2, 4])
    assert tuple(layer.id for layer in profile.layers) == workload.layers
    assert profile.edges == workload.edges
    held = {
        layer: sum(4 * torch.Size(shape).numel() for shape in named.values())
        for layer, named in workload.parameters.items()
    }
    each = profile.without_tied_weights()
    assert {layer.id: layer.parameter_bytes for layer in each.layers if layer.parameter_bytes} == held
    (whole,) = workload.parts([workload.layers])
    assert profile.parameter_bytes == sum(one.numel() * one.element_size() for one in whole.parameters())
    where = {layer: at for at, layer in enumerate(workload.layers)}
    assert all(where[start] < where[end] for start, end in profile.edges)
    chance = random.Random(name)
    for cut in chance.sample(range(1, len(workload.layers)), 2):
        first, _ = workload.parts([workload.layers[:cut], workload.layers[cut:]])
        ends = {
            layer for layer, _ in ((start, end) for start, end in profile.edges if where[start] < cut <= where[end])
        }
        sent = [
            sum(one.dtype.itemsize * torch.Size(one.shape_of(rows)).numel() for one in first.gives) for rows in (2, 4)
        ]
        said = [sum(layer.activation_bytes[at] for layer in profile.layers if layer.id in ends) for at in range(2)]
        assert said == sent


@pytest.mark.parametrize("name", EACH)
def test_saved_bytes_are_what_stays_alive_until_the_backward_pass(name: str) -> None:
    workload = hpgo.runtime.Workload.read(SMALL[name])
    found = hpgo.runtime.measure(workload, batch_sizes=[4], seconds=0)
    (part,) = workload.parts([workload.layers])
    part.train()
    inputs = repeated(workload.example_inputs, (range(4),)).tensors
    alive = LiveTensorCounter([*part.parameters(), *part.buffers(), *inputs])
    before = alive.bytes
    with alive, running(step=0, samples=range(4)):
        outputs = part(*inputs, rows=4)
        kept = alive.bytes - before
    given, returned = (sum(one.untyped_storage().nbytes() for one in tensors) for tensors in (inputs, outputs))
    said = sum(layer.saved_bytes[0] for layer in found.profile.layers if layer.saved_bytes is not None)
    # Whether or not a layer saves them, what is given and what is returned is held by whoever runs it.
    assert (kept - returned) / 1.05 <= said <= 1.05 * (kept + given)
    checked = found.wholes[4]
    assert checked.saved_activation_bytes == pytest.approx((kept - returned, kept + given), rel=0.05)
    assert checked.peak_bytes is not None
    assert checked.peak_bytes >= kept
    assert not any("holds" in note for note in found.notes)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(given) + self.up(self.down(given)))


def adapted(width: int, rank: int) -> hpgo.runtime.Workload:
    """A frozen layer, four with adapters, and a trained one."""
    layers = [nn.Linear(width, width).requires_grad_(requires_grad=False)]
    layers += [Adapted(width, rank) for _ in range(4)]
    example = torch.zeros(2, width)
    return hpgo.runtime.Workload([*layers, nn.Linear(width, 1)], example, torch.zeros(2, 1), functional.mse_loss)


def test_frozen_weights_take_memory_but_no_gradients_nor_state() -> None:
    width, rank = 64, 2
    workload = adapted(width, rank)
    found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=0)
    profile = found.profile
    assert any("of weights are frozen" in note for note in found.notes)
    frozen, trained = 4 * width * width, 2 * 4 * width * rank
    assert [layer.frozen_bytes for layer in profile.layers] == [frozen + 4 * width, *[frozen] * 4, 0]
    assert [layer.trained_bytes for layer in profile.layers] == [0, *[trained] * 4, 4 * (width + 1)]
    # Nothing in front of the first trained weight runs backward. Only the adapter behind it needs the output.
    assert profile.layers[0].backward_s == (0.0,)
    assert profile.layers[0].saved_bytes == profile.layers[0].activation_bytes == (2 * 4 * width,)
    # If all weights were trained, the devices would lack memory for any plan.
    memory_bytes = 1.5 * profile.parameter_bytes
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory=memory_bytes)
    plan = hpgo.plan(profile, cluster, global_batch_size=4, pipeline_micro_batch_size=2)
    (part,) = workload.parts([workload.layers])
    for stage in plan.stages:
        held = [part.layer(layer) for layer in stage.layers]
        weights = [one for module in held for one in module.parameters()]
        assert stage.memory.weights_bytes == sum(one.nbytes for one in weights)
        assert stage.memory.gradients_bytes == sum(one.nbytes for one in weights if one.requires_grad)
        assert stage.memory.optimizer_bytes == 2 * stage.memory.gradients_bytes
    all_trained = replace(profile, layers=tuple(replace(layer, frozen_bytes=0) for layer in profile.layers))
    with pytest.raises(hpgo.errors.InfeasibleError, match="fits"):
        hpgo.plan(all_trained, cluster, global_batch_size=4, pipeline_micro_batch_size=2)


def test_a_frozen_weight_of_two_layers_needs_no_sum() -> None:
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    for is_trained in (True, False):
        first.weight.requires_grad_(is_trained)
        layers = [first, nn.Linear(4, 4), last]
        workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
        profile = measured(workload, batch_sizes=[2])
        assert len(profile.tied_weights) == is_trained
        assert [layer.parameter_bytes for layer in profile.layers] == [64, 80, 0 if is_trained else 64]


def test_weights_need_room_in_the_type_that_they_will_have() -> None:
    layers = [nn.Linear(100, 100, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    given = torch.zeros(2, 100, dtype=torch.bfloat16)
    workload = hpgo.runtime.Workload(layers, given, given, nn.functional.mse_loss)
    for dtype, fits in ((torch.bfloat16, True), (torch.float32, False)):
        found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=0, dtype=dtype, memory_bytes=180_000)
        assert bool(found.wholes) is fits


def test_memory_that_autograd_does_not_tell_of_is_noticed() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            ctx.hidden = given.repeat(1, 1000)
            return given.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    class Holds(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return Hidden.apply(given)  # type: ignore[no-any-return, no-untyped-call]

    layers = [nn.Linear(4, 4), Holds(), nn.Linear(4, 4)]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), nn.functional.mse_loss)
    found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=0)
    saved_activation_bytes = found.wholes[2].saved_activation_bytes
    assert saved_activation_bytes is not None
    assert saved_activation_bytes[0] >= 2 * 4 * 1000 * 4
    assert any("batch of 2, the model as a whole holds 32" in note for note in found.notes)


def test_inference_has_no_halves() -> None:
    alone = measured("mlp:layers=2,width=8", batch_sizes=[2], inference=True)
    assert all(layer.input_gradient_s is layer.weight_gradient_s is None for layer in alone.layers)


def test_profiles_say_where_and_how_surely_they_were_measured() -> None:
    made = measured("mlp:layers=2,width=8", batch_sizes=[2], dtype=torch.float64)
    assert made.dtype == "float64"
    assert made.device
    assert dict(made.versions)["torch"] == str(torch.__version__)
    assert all(layer.spread is not None for layer in made.layers)


GROWS = """
import json, sys
from pathlib import Path
import torch
from hpgo.runtime import Workload
from hpgo.runtime.passes import running

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.set_num_threads(1)
name, begin, end, rows = json.loads(sys.argv[1])
workload = Workload.read(name)
layers = workload.layers
stages = [one for one in (layers[:begin], layers[begin:end], layers[end:]) if one]
part = workload.parts(stages, only={1})[1]
told = []
for size in (1, rows):  # the first finds out what to use
    inputs = [torch.rand(one.shape_of(size)).requires_grad_() for one in part.takes]
    with running(step=0, samples=range(size)):
        before = resident()
        made = part(*inputs, rows=size)
        told.append(resident() - before)
    given = sum(one.untyped_storage().nbytes() for one in made)
print(json.dumps([told[-1], given]))
"""
"""How much a process grows by the forward pass of a stage, and what of it is its output."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux counts of memory")
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        pytest.param("vit:layers=6,hidden=128,heads=4,image=64,patch=8,classes=10", 1, 6, marks=pytest.mark.slow),
        ("vgg-19:image=32,width=8,linear=16,classes=10", 1, 20),
    ],
)
def test_a_process_grows_by_what_a_large_stage_saves(name: str, begin: int, end: int) -> None:
    profile = measured(name, batch_sizes=[2])
    of_one = sum(layer.saved_bytes[0] for layer in profile.layers[begin:end] if layer.saved_bytes) / 2
    rows = math.ceil(2.2e8 / of_one)
    said = rows * of_one
    done = subprocess.run(
        [sys.executable, "-c", GROWS, json.dumps([name, begin, end, rows])], capture_output=True, text=True,
        timeout=100, check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    grown, given = json.loads(done.stdout)
    assert (grown - given) / 1.05 <= said <= 1.05 * grown  # its output is held, whether or not it is saved


def test_times_are_those_of_passes_and_the_loss_belongs_to_the_last_layer() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return nn.functional.mse_loss(Pausing.apply(outputs), targets)

    layers = [nn.Linear(4, 4), nn.Sequential(Pause(), nn.Linear(4, 4)), nn.Linear(4, 4)]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), loss)
    # On a busy machine other processes take the processor in the middle of the short half, whose share of the pass then
    # counts against the long one. So take the calmest of three profiles.
    profiles = [hpgo.runtime.profile(workload, batch_sizes=[2], seconds=0.5).layers for _ in range(3)]
    first, second, third = min(profiles, key=lambda layers: sum(layer.weight_gradient_s[0] for layer in layers[1:]))
    assert max(first.forward_s[0], first.backward_s[0]) < PAUSE_S / 4
    assert PAUSE_S <= second.forward_s[0] < 1.5 * PAUSE_S
    assert 2 * PAUSE_S <= second.backward_s[0] < 3 * PAUSE_S
    assert 2 * PAUSE_S <= third.forward_s[0] < 3 * PAUSE_S
    assert 2 * PAUSE_S <= third.backward_s[0] < 3 * PAUSE_S
    for layer in (second, third):  # what is no gradient of a weight belongs to the first half
        inputs_s, weights_s = layer.input_gradient_s, layer.weight_gradient_s
        assert inputs_s is not None
        assert weights_s is not None
        assert 2 * PAUSE_S <= inputs_s[0] < 3 * PAUSE_S
        assert 0 < weights_s[0] < PAUSE_S / 4


class Disturbed(nn.Module):
    """Is held up in 3 of 5 forward passes, as by another process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), 0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        time.sleep([0, PAUSE_S / 4, PAUSE_S / 2, 0, PAUSE_S][self.passes % 5])
        return self.linear(given)  # type: ignore[no-any-return]


class Routed(nn.Module):
    """Takes as long as a batch has rows that begin with a positive number, like an expert to which these are sent."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(given[:, 0] > 0)[0]
        time.sleep(PAUSE_S * len(chosen))
        return given.index_add(0, chosen, given[chosen])


def rows_of(*counts: int) -> torch.Tensor:
    """Batches of two rows, of which so many are chosen."""
    return torch.tensor([[1.0 if at < count else -1.0] for count in counts for at in range(2)])


def test_what_depends_on_data_is_measured_over_several_batches() -> None:
    rows = rows_of(0, 1, 2, 1)
    workload = hpgo.runtime.Workload([Routed(), nn.Linear(1, 1)], rows, rows, functional.mse_loss)
    found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=0.5)
    # The first batch alone takes no time. Sleeping may take longer, and the layer is scaled to the model's time.
    assert found.profile.layers[0].forward_s[0] >= 0.8 * PAUSE_S
    assert found.spreads["0"] > 0.3
    data = [(row, row) for row in rows_of(2, 2, 2, 0)]
    assert measured(workload, batch_sizes=[2], data=data).layers[0].forward_s[0] >= 0.8 * 1.5 * PAUSE_S
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "8 samples", "16"):
        measured(workload, batch_sizes=[16], data=data)


def test_disturbed_passes_do_not_count_but_their_spread_is_told() -> None:
    layers = [nn.Linear(4, 4), Disturbed(), nn.Linear(4, 4)]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), nn.functional.mse_loss)
    found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=3)
    _, second, _ = found.profile.layers
    assert second.forward_s[0] < PAUSE_S / 4
    assert second.spread is not None
    assert second.spread > 1
    assert found.spreads["1"] == second.spread
    assert found.notes[0].startswith("measured times vary between passes by ")
    assert not any("e+" in note for note in found.notes)


def test_halves_fit_the_backward_pass_of_the_same_sweep() -> None:
    class Slower(torch.autograd.Function):
        """Each backward pass takes longer than the one before, as on a machine that gets busy."""

        passes = 0

        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            Slower.passes += 1
            time.sleep(1e-4 * Slower.passes)
            return gradient

    class Slows(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return Slower.apply(given)  # type: ignore[no-any-return, no-untyped-call]

    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Slows(), nn.Linear(4, 4)), nn.Linear(4, 4)]
    for seconds in (0, 1):
        workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), nn.functional.mse_loss)
        profile = hpgo.runtime.profile(workload, batch_sizes=[2], seconds=seconds)
        assert profile.with_consistent_split() == profile
        assert all(1 - 1e-9 <= ratio <= 2 + 1e-9 for layer in profile.layers for ratio in layer.split_ratios)


def test_layers_that_take_longer_one_by_one_add_up_to_the_model_as_a_whole() -> None:
    class Slow(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if given.is_leaf:  # as it is where the layer runs by itself
                time.sleep(PAUSE_S / 2)
            return given

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S / 2)
        return nn.functional.mse_loss(outputs, targets)

    layers = [nn.Linear(4, 4), nn.Sequential(Slow(), nn.Linear(4, 4))]
    workload = hpgo.runtime.Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), loss)
    found = hpgo.runtime.measure(workload, batch_sizes=[2], seconds=20)
    whole = found.wholes[2]
    assert whole.sum_s > 1.5 * whole.whole_s
    assert any("more one by one" in note and "most of all `1` (" in note for note in found.notes)
    added_s = sum(layer.forward_s[0] + layer.backward_s[0] for layer in found.profile.layers)
    assert added_s == pytest.approx(whole.whole_s, rel=0.25)


def test_layers_that_do_not_fit_at_once_are_measured_one_by_one_and_equal_ones_once() -> None:
    whole = hpgo.runtime.measure(SMALL["gpt"].replace("layers=2", "layers=9"), batch_sizes=[2], seconds=0)
    remarks: list[str] = []
    parted = hpgo.runtime.measure(
        SMALL["gpt"].replace("layers=2", "layers=9"), batch_sizes=[2], seconds=0, memory_bytes=1,
        progress=lambda _, remark: remarks.append(remark),
    )  # fmt: skip
    assert whole.wholes.keys() == {2}
    assert not parted.wholes

    def sizes(found: hpgo.runtime.Measurement) -> list[Any]:
        return [(one.activation_bytes, one.saved_bytes, one.parameter_bytes) for one in found.profile.layers]

    assert sizes(parted) == sizes(whole)
    times = {one.id: one.forward_s for one in parted.profile.layers}
    assert len({times[f"block-{number}"] for number in range(1, 10)}) == 1
    assert not any("block-2" in remark for remark in remarks)


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    keep = tmp_path / "kept"

    def stop_at(size: int) -> Callable[[float, str], None]:
        def stop(_: float, remark: str) -> None:
            if remark.startswith(f"batch of {size}"):
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        measured(SMALL["mlp"], batch_sizes=[2, 3], keep=keep, progress=stop_at(3))
    found = json.loads(keep.read_text())["batches"]
    forward_s = next(iter(found["2"].values()))[0]
    went_on = measured(SMALL["mlp"], batch_sizes=[2, 3], keep=keep, progress=stop_at(2))  # nothing of size 2 runs again
    assert any(layer.forward_s[0] == forward_s for layer in went_on.layers)
    assert not keep.exists()
    keep.write_text(json.dumps({"setting": {}, "batches": 7}))
    measured(SMALL["mlp"], batch_sizes=[2], keep=keep)  # another's: measured anew
    assert not keep.exists()


def test_as_many_processes_measure_at_once_as_will_run(tmp_path: Path) -> None:
    maximum, before = 0, set(children())

    def count(_: float, __: str) -> None:
        nonlocal maximum
        maximum = max(maximum, len(set(children()) - before))

    profile = measured(SMALL["mlp"], batch_sizes=[2], ranks=2, progress=count)
    assert maximum == 1
    assert set(children()) == before
    assert "2 at once" in profile.source


def test_types_of_weights_are_those_that_are_asked_for() -> None:
    wide, narrow = (measured(SMALL["gpt"], dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    for one, other in zip(wide.layers, narrow.layers, strict=True):
        assert one.parameter_bytes == 4 * other.parameter_bytes
        assert one.activation_bytes[0] == 4 * other.activation_bytes[0]


@pytest.mark.slow
def test_profile_then_plan_then_run_needs_no_number(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run("profile", SMALL["gpt"], "--batch-size", "1,2", "--time-limit", "1s", "-o", tmp_path / "gpt.yaml")
    assert "block-1 … block-2" in done.stdout
    assert "are one weight" in done.stderr
    assert not list(tmp_path.glob("*.part"))
    run("plan", tmp_path / "gpt.yaml", "--cluster", "dapple-c", "--devices", 2, "--global-batch-size", 4, "-o",
        tmp_path / "plan.json")  # fmt: skip
    ran = run("run", tmp_path / "plan.json", "--workload", SMALL["gpt"], "--steps", 3, "--json")
    assert len(json.loads(ran.stdout)["losses"]) == 3
    told = json.loads(run("profile", SMALL["mlp"], "--time-limit", "0s", "--json").stdout)
    assert set(told) == {"profile", "spread", "whole", "notes"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing"], 1, "there is no workload `nothing`"),
        (["mlp", "-o", "profile.csv"], 1, "unknown output format: `profile.csv`"),
        (["mlp", "-o", "nowhere/profile.yaml"], 1, "folder not found: `nowhere`"),
        (["mlp", "--batch-size", "1,2", "-o", "profile.txt"], 1, "can hold one batch size only"),
        (["mlp", "--batch-size", "0"], 2, "is not an integer"),
        (["mlp", "--by", "op"], 1, "can't be by op"),
        (["mlp:layers=1", "--ranks", "0"], 2, "--ranks"),
    ],
)
def test_what_cannot_be_measured_is_told_once(
    arguments: list[str], code: int, said: str, run: Callable[..., Any]
) -> None:
    done = run("profile", *arguments, code=code)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_layer_that_cannot_run_is_named() -> None:
    class Fails(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if not given.is_meta:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")
            return given

    workload = hpgo.runtime.Workload(
        [nn.Linear(2, 2), Fails()], torch.zeros(2, 2), torch.zeros(2, 2), nn.functional.mse_loss
    )
    with refused(hpgo.errors.HpgoError, "run_failed", "1", "3") as caught:
        measured(workload, batch_sizes=[3])
    assert "smaller" in caught.value.hint


class Backward(torch.autograd.Function):
    """Can't be run backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


class Calls(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.function(given)


def no_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("loss", "layer", "said"),
    [
        (lambda outputs, targets: outputs - targets, nn.Tanh(), ("user_code", "loss", "3", "4")),
        (lambda outputs, targets: 3.0, nn.Tanh(), ("user_code", "loss", "3")),
        (no_loss, nn.Tanh(), ("run_failed", "3", "ValueError")),
        (nn.functional.mse_loss, Calls(Backward.apply), ("run_failed", "1", "3")),
    ],
)
def test_losses_and_backward_passes_that_fail_are_told(loss: Any, layer: nn.Module, said: tuple[str, ...]) -> None:
    workload = hpgo.runtime.Workload([nn.Linear(4, 4), layer], torch.zeros(2, 4), torch.zeros(2, 4), loss)
    with refused(hpgo.errors.HpgoError, *said) as caught:
        measured(workload, batch_sizes=[3])
    assert caught.value.hint


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.linear(given) + other


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((torch.zeros(2, 5), torch.zeros(2, 4)), r"of \(2, 5\), \(2, 4\), for line \d+ of .*, `return self.linear"),
        ((torch.zeros(2, 4),), r"of \(2, 4\): TypeError.*missing 1 required positional argument: 'other'"),
        ((torch.zeros(2, 4),) * 3, "takes 3 positional arguments but 4 were given"),
    ],
)
def test_examples_that_the_model_does_not_take_are_told_with_the_line(inputs: Any, said: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=f"Adds can't run on its example inputs.*{said}") as caught:
        hpgo.runtime.Workload(Adds(), inputs, torch.zeros(2, 4), nn.functional.mse_loss)
    assert "`example_inputs`" in caught.value.hint


def test_a_model_that_export_refuses_is_told_once_with_the_line_and_the_way_out(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom hpgo.runtime import Workload\n\n"
        "class Branches(torch.nn.Linear):\n    def forward(self, given):\n        made = super().forward(given)\n"
        "        if made.sum() > 0:\n            return made\n        return -made\n\n"
        "def whole():\n    return make(Branches(4, 4))\n\ndef listed():\n    return make([torch.nn.Linear(4, 4)])\n\n"
        "def make(model):\n"
        "    return Workload(model, torch.zeros(2, 4), torch.zeros(2, 4), torch.nn.functional.mse_loss)\n"
    )
    told = run("profile", "mine:whole", "--time-limit", "0s", code=1).stderr
    assert "mine.py, `if made.sum() > 0:`" in told
    assert "line 7 of" in told
    assert "as a list of modules" in told
    assert [line.partition(":")[0] for line in told.splitlines()] == ["error", "hint"]
    run("profile", "mine:listed", "--time-limit", "0s")


LACKS = """
import json, resource, sys
import hpgo, hpgo.runtime, torch
layers, room = json.loads(sys.argv[1])
inner = [torch.nn.Sequential(torch.nn.Linear(4096, 4096, device="meta"), torch.nn.ReLU()) for _ in range(layers)]
work = hpgo.runtime.Workload(inner, torch.zeros(2, 4096), torch.zeros(2, 4096), torch.nn.functional.mse_loss)
hpgo.runtime.profile("mlp:layers=2,width=8", seconds=0)  # loads all that there is to load
held = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (held + room * 2**20, -1))
try:
    found = hpgo.runtime.measure(work, batch_sizes=[2], seconds=0, memory_bytes=1e12)
    print(json.dumps([len(found.profile.layers), len(found.wholes), [one for one in found.notes if "memory" in one]]))
except hpgo.errors.HpgoError as error:
    print(json.dumps([0, 0, [error.message, error.hint]]))
"""
"""Measures layers of 64 MiB with so many MiB of address space."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_where_memory_is_short_layers_are_measured_one_by_one_and_named() -> None:
    def told(layers: int, room_mib: int) -> Any:
        variables = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(
            [sys.executable, "-c", LACKS, json.dumps([layers, room_mib])], capture_output=True, text=True, timeout=100,
            check=True, env={**os.environ, **variables},
        )  # fmt: skip
        return json.loads(done.stdout)

    layers, wholes, notes = told(6, 500)
    assert (layers, wholes) == (6, 0)
    assert "one by one: " in notes[0]
    assert "layer `" in notes[0]
    assert told(2, 100)[2][0].startswith(("layer `0` can't run on a batch of 2", "the backward pass of layer `0`"))
