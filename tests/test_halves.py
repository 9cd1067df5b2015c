"""Backward passes in halves give what whole ones give, in any order."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
from refusals import refused  # noqa: E402
from test_workloads import SMALL  # noqa: E402
from torch import nn  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402


def passes(workload: hpgo.runtime.Workload, part: hpgo.runtime.Part, micro_batches: int) -> list[torch.Tensor]:
    """Forward passes of two rows each, to the loss."""
    losses = []
    for number in range(micro_batches):
        rows = slice(2 * number, 2 * number + 2)
        with running(step=0, samples=range(rows.start, rows.stop)):
            made = part(*(workload.example_inputs[int(value.name[6:])][rows] for value in part.takes), rows=2)
        losses.append(workload.loss_of(made, tuple(one[rows] for one in workload.example_targets)))
    return losses


@pytest.mark.parametrize("name", ["gpt", "vit", "vgg-19", "resnet-50", "mlp"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_gradients_by_halves_are_those_of_whole_passes(name: str, order: list[int]) -> None:
    workload = hpgo.runtime.Workload.read(SMALL[name])
    (whole,) = workload.parts([workload.layers], dtype=torch.float64)
    (split,) = workload.parts([workload.layers], dtype=torch.float64, split_backward=True)
    torch.stack(passes(workload, whole, 4)).sum().backward()
    for number, loss in enumerate(passes(workload, split, 4)):
        with split.queueing(number):
            loss.backward()
    late = [one for one in split.modules() if isinstance(one, (nn.Linear, nn.Conv2d))]
    assert late
    tied = {id(tensor) for tensor in (split.by_layer().get("embedding") or {}).values()}
    assert all(one.weight.grad is None for one in late if id(one.weight) not in tied)
    for number in order:
        split.run_weight_gradients(number)
    cut_models.check_close(cut_models.summed(workload, [split]), cut_models.summed(workload, [whole]))


class Twice(nn.Module):
    """Uses its weights twice, once on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.linear(self.linear(given).transpose(0, 1)[1:])).transpose(0, 1)  # type: ignore[no-any-return]


def test_weights_that_are_used_twice_or_frozen_and_inputs_have_their_gradients() -> None:
    torch.manual_seed(0)
    workload = hpgo.runtime.Workload([Twice()], torch.randn(2, 3, 4), torch.randn(2, 2, 4), nn.functional.mse_loss)
    (whole,), (split,) = (workload.parts([["0"]], dtype=torch.float64, split_backward=late) for late in (False, True))
    given = [workload.example_inputs[0].double().requires_grad_() for _ in range(2)]
    for part, one in zip((whole, split), given, strict=True):
        loss = workload.loss_of(part(one, rows=2), workload.example_targets)
        with split.queueing(0) if part is split else nullcontext():
            loss.backward()
    assert float((given[0].grad - given[1].grad).abs().max()) <= 1e-15  # already there
    split.run_weight_gradients(0)
    cut_models.check_close(cut_models.summed(workload, [split]), cut_models.summed(workload, [whole]))
    assert split.by_layer()["0"]["frozen.weight"].grad is None


def test_autocast_gives_weights_gradients_of_their_own_type() -> None:
    workload = hpgo.runtime.Workload.read("mlp:layers=2,width=8")
    parts = [workload.parts([workload.layers], split_backward=late)[0] for late in (False, True)]
    for part in parts:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = part(*workload.example_inputs, rows=8)
        loss = workload.loss_of(made, workload.example_targets)
        if part is parts[1]:
            with part.queueing(0):
                loss.backward()
            part.run_weight_gradients(0)
        else:
            loss.backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in parts[1].parameters())
    cut_models.check_close(*(cut_models.summed(workload, [part]) for part in parts), within=0.02)


def test_halves_in_a_wrong_order_are_refused() -> None:
    workload = hpgo.runtime.Workload.read("mlp:layers=1,width=2")
    whole, split = (workload.parts([workload.layers], split_backward=late)[0] for late in (False, True))
    with refused(hpgo.errors.ArgumentError, "wrong_state", "3"):
        split.run_weight_gradients(3)
    with refused(hpgo.errors.ArgumentError, "wrong_state"), whole.queueing(0):
        pass
    with split.queueing(0):
        pass
    with refused(hpgo.errors.ArgumentError, "wrong_state", "0"), split.queueing(0):
        pass
    split.forget()
    with split.queueing(0):
        pass
