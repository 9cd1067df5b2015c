"""A workload in the format of PipeEdge: its chain of layers, their memory, and the values that cross each cut."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hpgo.model.formats.pipeedge import MEGA, PipeEdgeModel

if TYPE_CHECKING:
    from hpgo.runtime.workload import Workload


def described(workload: Workload, *, name: str, dtype: torch.dtype | None = None) -> tuple[PipeEdgeModel, str]:
    """Return the model `name` with the layers of `workload` as a chain, and the dtype of its weights. Computes nothing.

    Memory counts weights and buffers. Each tensor that a later layer reads counts once behind every layer that it
    passes, even if the layers between do not read it. Inputs of the model that later layers read count, too, because
    they enter at the first host. Raises ArgumentError if no cut is possible between two layers.

    >>> from hpgo.runtime import Workload
    >>> model, dtype = described(Workload.read("mlp:layers=2,width=8"), name="mlp")
    >>> [mb * 2**20 for mb in model.memory_mb], model.parameters_in, model.parameters_out, dtype
    ([288.0, 288.0], 8, (8, 8), 'torch.float32')
    """
    parts = workload.parts([[layer] for layer in workload.layers], dtype=dtype, only=())
    behind: set[str] = set()
    values_out = []
    counts = {value.name: math.prod(value.shape) for part in parts for value in (*part.takes, *part.gives)}
    # Walk from the last layer to the first: an input is carried from the first host to its last reader, so `behind`
    # grows by the inputs that each earlier layer reads.
    for part in reversed(parts):
        values_out.append(sum(counts[name] for name in behind.union(value.name for value in part.gives)))
        behind |= {value.name for value in part.takes if value.is_input}
    held = [[*part.parameters(), *part.buffers()] for part in parts]
    # A model without floating weights, such as a chain of activations, takes its dtype from what its layers return.
    kinds = [
        *(tensor.dtype for tensor in chain.from_iterable(held) if tensor.is_floating_point()),
        *(value.dtype for part in parts for value in part.gives if value.dtype.is_floating_point),
    ]
    model = PipeEdgeModel(
        name,
        tuple(sum(one.numel() * one.element_size() for one in tensors) / MEGA["pipeedge"] for tensors in held),
        sum(counts[name] for name in behind),
        tuple(reversed(values_out)),
    )
    return model, str(dtype or next(iter(kinds), torch.float32))
