"""Bytes per parameter that common optimizers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adam-fp32", "adam-bf16", "adam-bf16-fp32-gradients", "sgd", "sgd-momentum"]
"""Names of the optimizers in `OPTIMIZERS`."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Bytes of one parameter."""

    weights: int
    """Bytes of a weight as in the profile: a layer's `parameter_bytes` is this number times its parameters."""
    gradients: int
    state: int
    what: str

    @property
    def bytes_text(self) -> str:
        """Bytes of weights, gradients and state, as text.

        >>> OPTIMIZERS["adam-bf16"].bytes_text
        '2 + 2 + 12'
        """
        return f"{self.weights} + {self.gradients} + {self.state}"


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adam-fp32": Optimizer(4, 4, 8, "Adam in 32 bits: two moments"),
    "adam-bf16": Optimizer(
        2,
        2,
        12,
        "16-bit weights and gradients, 32-bit moments and copy of the weights (ZeRO, Rajbhandari et al., 2020)",
    ),
    "adam-bf16-fp32-gradients": Optimizer(
        2, 4, 12, "like adam-bf16, with gradients summed in 32 bits (Megatron-LM for bfloat16)"
    ),
    "sgd": Optimizer(4, 4, 0, "plain SGD"),
    "sgd-momentum": Optimizer(4, 4, 4, "SGD with a momentum"),
}
"""Optimizers by name. The first is the default of `hpgo.MemoryModel`."""
