"""Runs name the layer that makes the first number which is none, if asked."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from torch import nn  # noqa: E402 -- it may be missing

from hpgo.runtime import Network, Pipeline, Workload  # noqa: E402
from hpgo.runtime.passes import current  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

INFINITE = float("inf")


class Steep(torch.autograd.Function):
    """Passes numbers on as they are, and gradients back times a factor."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Layer(nn.Module):
    """A linear layer, and what follows it from the second step on."""

    def __init__(self, then: Callable[[Layer, torch.Tensor], torch.Tensor] = lambda _, made: made) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4), then

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(sum(given))
        return made if made.is_meta or current().step == 0 else self.then(self, made)


def spoilt(layer: Layer, made: torch.Tensor) -> torch.Tensor:
    """A weight is none, of which two numbers in each row are."""
    with torch.no_grad():
        layer.linear.weight[1:3] = float("nan")
    return layer.linear(made)  # type: ignore[no-any-return]


def masked(_: Layer, made: torch.Tensor) -> torch.Tensor:
    """As attention masks what is not to be seen."""
    return made.masked_fill(torch.tensor([False, False, True, True]), -INFINITE)


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean() + 0 * targets.mean()


def root(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A number whose slope is none."""
    return ((outputs - outputs.detach()) ** 2).sum().sqrt() + 0 * targets.mean()


def run(layers: Any, order: str = "interleaved", **options: Any) -> None:
    """Two steps of two micro-batches of three samples, on one device that holds two stages."""
    loss, data, recompute = (options.pop(name, None) for name in ("loss", "data", "recompute"))
    workload = Workload(layers, torch.ones(3, 4), torch.zeros(3, 4), loss or nn.functional.mse_loss)
    schedule = hpgo.schedule(
        order, ranks=1, micro_batches=2, virtual_stages_per_rank=2 if order == "interleaved" else None
    )
    half = len(workload.layers) // 2
    stages = [workload.layers] if schedule.stages == 1 else [workload.layers[:half], workload.layers[half:]]
    program = hpgo.program(
        schedule, [(stage, [0]) for stage in stages],
        pipeline_micro_batch_size=3, global_batch_size=6, recompute=bool(recompute),
    )  # fmt: skip
    given = {"dtype": torch.float64, "find_nan": True} | options
    with Pipeline(program, workload, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), **given) as pipeline:
        for _ in range(2):
            pipeline.step(torch.ones(6, 4) if data is None else data, torch.zeros(6, 4))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("then", "words", "hint"),
    [
        (
            lambda _, made: made.abs() * INFINITE,
            "forward pass of micro-batch 0 through stage 1: 12 of 12 numbers that layer `2` makes are",
            "look for a division by 0",
        ),
        (
            spoilt,
            "forward pass of micro-batch 0 through stage 1: 6 of 12 numbers that layer `2` makes are nan or infinite,",
            "the last optimizer step did this",
        ),
        (
            lambda _, made: Steep.apply(made, INFINITE),
            "backward pass of micro-batch 0 through stage 1: 12 of 12 numbers of the gradient that layer `2` passes",
            "look for an infinite slope",
        ),
        (
            lambda layer, made: made + Steep.apply(layer.linear.bias, INFINITE),
            "backward pass of micro-batch 0 through stage 1: 4 of 4 numbers of the gradient of `linear.bias` of",
            "look for an infinite slope",
        ),
    ],
    ids=["forward", "weights", "backward", "gradient of a weight"],
)
def test_the_layer_of_the_first_nan_is_told(then: Any, words: str, hint: str, *, recompute: bool) -> None:
    for backend in ("hpgo", "torch"):
        with pytest.raises(hpgo.errors.RunError) as caught:
            run([Layer(), Layer(), Layer(then), Layer()], recompute=recompute, backend=backend)
        assert f"rank 0 of stages 0, 1 on {socket.gethostname()}, step 1, the {words}" in str(caught.value)
        assert hint in str(caught.value.hint)


@pytest.mark.filterwarnings("ignore:whether the loss is a mean:RuntimeWarning")
def test_the_half_for_weights_the_loss_and_the_data_are_told() -> None:
    big, steep = Layer(lambda _, made: made + 1e200), Layer(lambda _, made: Steep.apply(made, 1e200))
    holed = torch.ones(6, 4)
    holed[4, 1] = float("nan")

    def branching(steep: str) -> Network:
        network = Network()
        for name, feeds in {"0": ["input:0"], "1": ["0"], "2": ["1", "0"], "3": ["2"]}.items():
            then = (lambda _, made: Steep.apply(made, INFINITE)) if name == steep else (lambda _, made: made)
            network.add(name, partial(Layer, then), *feeds)
        return network

    for layers, options, words in (
        (
            [big, Layer(), steep],
            {"order": "zb_h1", "loss": mean},
            "numbers of the gradient of `linear.weight` of layer",
        ),
        ([Layer(), Layer()], {"loss": root}, "numbers of the gradient that the loss passes back"),
        (
            [Layer(), Layer()],
            {"loss": lambda outputs, _: outputs.sum() * INFINITE},
            "the loss is -?inf, but its outputs",
        ),
        ([Layer(), Layer()], {"data": holed}, "micro-batch 1 through stage 0: 1 of 12 numbers of `input:0`"),
        (branching("2"), {}, "numbers of the gradient that layer `2` passes back"),
        (branching("1"), {"order": "1f1b"}, "numbers of the gradient that layers `1`, `2` pass back"),
    ):
        with pytest.raises(hpgo.errors.RunError, match=words):
            run(layers, **options)


def test_masks_are_let_pass_and_nobody_is_told_who_does_not_ask() -> None:
    class Soft(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return given.softmax(1)

    run([Layer(), Layer(masked), Soft(), Layer()])
    run([Layer(), Layer(lambda _, made: made * float("nan"))], find_nan=False)
