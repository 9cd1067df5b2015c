"""What is computed on, and in which types, as users name them."""

from __future__ import annotations

import torch

from hpgo.base.errors import ArgumentError, RunError
from hpgo.base.wording import shown

UNUSABLE = "the device can't be used", "name one as torch does: cpu, cuda, cuda:0"
"""What is told of devices, and the way out."""


def device_named(device: object) -> torch.device:
    """The device that `device` names. Raises RunError for one that there isn't here.

    >>> device_named("cpu")
    device(type='cpu')
    """
    what, hint = UNUSABLE
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise RunError(f"{what}: torch knows no {shown(device)}", hint) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RunError(
            f"{what}: torch finds no GPU here", "run on `cpu`, or install torch with CUDA and the GPU's driver"
        )
    return found


def check_types(dtype: object, autocast: object) -> None:
    """Raises ArgumentError unless these are a type of weights and what `torch.autocast` may compute in, or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {shown(dtype)}", "give one of torch's, such as torch.float64, or None")
    if autocast is not None and autocast is not torch.bfloat16:
        raise ArgumentError(
            f"autocast is {autocast if isinstance(autocast, torch.dtype) else shown(autocast)}",
            "give torch.bfloat16: float16 needs losses to be scaled, which this does not do",
        )
