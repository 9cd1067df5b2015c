"""Devices and number types of a run, as users name them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError, RunError
from hpgo.runtime.rendezvous import translate_errors

_UNUSABLE = "the device can't be used", "name a device as torch does: cpu, cuda, cuda:0"


def device_named(device: object) -> torch.device:
    """Return the device that `device` names. Raises RunError if torch does not know it, or if there is no GPU.

    >>> device_named("cpu")
    device(type='cpu')
    """
    what, hint = _UNUSABLE
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise RunError(f"{what}: torch does not know {safe_repr(device)}", hint, code="unknown_name") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RunError(
            f"{what}: torch finds no GPU here", "run on `cpu`, or install torch with CUDA and the GPU's driver"
        )
    return found


def device_of_rank(device: object) -> torch.device:
    """Return the device of this rank: the named one; with several GPUs, the GPU of its local rank.

    If `device` is None, it is a GPU if the node has one for each of its ranks, else the CPU. Raises RunError for a
    device that can't be used.
    """
    here, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    if device is None:
        # Use GPUs only if every rank of the node gets one. Ranks on different kinds of devices would not share a
        # communication library.
        device = "cuda" if max(here + 1, ranks) <= torch.cuda.device_count() and not _has_gloo_alone() else "cpu"
    found = device_named(device)
    if found.type != "cuda":
        return found
    if _has_gloo_alone():
        raise RunError(
            "the process group's backend is gloo, but ranks on GPUs send tensors by NCCL",
            'make the group with `backend="nccl"`, or run on `cpu`',
        )
    found = torch.device("cuda", here if found.index is None else found.index)
    if found.index >= torch.cuda.device_count():
        raise RunError(
            f"this node has {ranks} ranks, but {torch.cuda.device_count()} GPUs",
            "run with `--device cpu`, or start fewer ranks",
        )
    # NCCL and allocations without a device use the current one, so it must be set before the process group is created.
    with translate_errors(*_UNUSABLE):
        torch.cuda.set_device(found)
    return found


def _has_gloo_alone() -> bool:
    """Whether the caller has made a process group of several ranks that can't send tensors of GPUs."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo"


def check_types(dtype: object, autocast: object) -> None:
    """Raise ArgumentError unless `dtype` is a torch type or None, and `autocast` is torch.bfloat16 or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"dtype is {safe_repr(dtype)}, but must be a torch.dtype or None",
            "give a type such as torch.float64, or None",
        )
    if autocast is not None and autocast is not torch.bfloat16:
        raise ArgumentError(
            f"autocast is {autocast if isinstance(autocast, torch.dtype) else safe_repr(autocast)}, but must be"
            " torch.bfloat16 or None",
            "give torch.bfloat16; float16 needs loss scaling, which runs don't have",
        )
