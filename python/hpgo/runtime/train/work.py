"""Work of a training step: its tokens and floating-point operations, for rates and utilization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hpgo.hardware.rates import key_of, rates_of
from hpgo.runtime.passes import running

if TYPE_CHECKING:
    from hpgo.runtime.workload import Workload

_PASSES = 3
"""Operations of a step in multiples of its forward passes: a backward pass multiplies twice as often as a forward pass.
"""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step over all ranks. None stands for what is unknown."""

    samples: int
    tokens: int | None
    """Tokens of the step; None for models whose first input is not a text of token ids."""
    flop: float | None
    """Floating-point operations of matrix products, convolutions and attention, without recomputation."""
    peak_flop_per_s: float | None
    """Peak of all devices together by their datasheet; None for CPUs and unknown cards."""

    def mfu(self, step_s: float) -> float | None:
        """Return the model FLOPs utilization of a step of `step_s` seconds (Chowdhery et al., arXiv 2204.02311).

        >>> StepWork(8, None, 6e12, 1e15).mfu(0.01)
        0.6
        """
        if self.flop is None or self.peak_flop_per_s is None:
            return None
        return self.flop / (step_s * self.peak_flop_per_s)


def step_work(
    workload: Workload,
    *,
    samples: int,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
) -> StepWork:
    """Return the work of a step of `samples` on `ranks` devices like `device`.

    >>> from hpgo.runtime.workload import Workload
    >>> gpt = Workload.read("gpt:layers=1,hidden=8,heads=2,vocabulary=16,length=4")
    >>> step_work(gpt, samples=2, ranks=1, device=torch.device("cpu"), dtype=None, autocast=None).tokens
    8
    """
    first = workload.example_inputs[0]
    tokens = None if first.is_floating_point() or first.dim() != 2 else samples * first.shape[1]
    return StepWork(samples, tokens, _flop(workload, dtype, samples), _peak(device, ranks, autocast or dtype))


def _flop(workload: Workload, dtype: torch.dtype | None, samples: int) -> float | None:
    """Count operations of the layers on the meta device, with the rows of the example."""
    from torch.utils.flop_counter import FlopCounterMode

    rows = len(workload.example_inputs[0])
    (part,) = workload.parts([workload.layers], dtype=dtype, only=())
    inputs = [
        torch.empty((rows, *value.shape), dtype=value.dtype, device="meta")
        for value in (workload.example_inputs[int(one.name.removeprefix("input:"))][0] for one in part.takes)
    ]
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad(), running(step=0, samples=range(rows)):
            part(*inputs, rows=rows)
    except Exception:  # noqa: BLE001 -- layers that need values, such as sparse routing, can't run on the meta device
        return None
    return _PASSES * counter.get_total_flops() * samples / rows


def _peak(device: torch.device, ranks: int, dtype: torch.dtype | None) -> float | None:
    if device.type != "cuda":
        return None
    key = key_of(torch.cuda.get_device_name(device))
    if key is None:
        return None
    kind = str(dtype or torch.float32).removeprefix("torch.")
    if kind == "float32" and torch.backends.cuda.matmul.allow_tf32:
        kind = "tf32"
    peak = rates_of(key).flop_per_s.get(kind)
    return None if peak is None else ranks * peak
