"""Bytes that layers send and save: what each of them saves alone, and how this adds up in a network."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from hpgo.runtime.modules import Network
    from hpgo.runtime.pass_times import Figures, MeasuredLayer

    Names = Callable[[str], tuple[str, ...]]
    """Function that returns the names of the values that a layer returns, or of an input."""


def record_saved(one: MeasuredLayer, run: Callable[[], None]) -> int:
    """Record in `one` which tensors its backward pass needs. Return the bytes of all of them, without weights.

    `run` runs the layer forward once, and stores its inputs and outputs in `one`.
    """
    weights = {address_of(tensor) for tensor in chain(one.module.parameters(), one.module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if address_of(tensor) not in weights:
            kept[address_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an operation that saves its own output would form a cycle, and never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    # Compare memory, not tensors: operations save views, and layers return views of their inputs.
    read = {address_of(tensor): at for at, tensor in reversed(list(enumerate(one.inputs)))}
    own = {address: -1 - at for at, address in enumerate(dict.fromkeys(map(address_of, one.outputs)))}
    one.reads = tuple(address_of(tensor) in kept for tensor in one.inputs)
    one.returns = tuple(
        (
            tensor.numel() * tensor.element_size(),
            tensor.untyped_storage().nbytes(),
            read.get(address_of(tensor), own[address_of(tensor)]),
            address_of(tensor) in kept,
        )
        for tensor in one.outputs
    )
    one.saved_bytes = sum(size for address, size in kept.items() if address not in read and address not in own)
    return sum(kept.values())


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def activation_bytes(network: Network, figures: Mapping[str, Figures], names: Names) -> dict[str, int]:
    """Return the bytes of each layer that others read, or that the model returns."""
    nodes = network.nodes
    feeds = [*(feed for node in nodes.values() for feed in node.feeds), *network.outputs]
    read = {name for feed in feeds for name in names(feed)}
    return {
        layer: sum(
            one[0]
            for name, one in zip(names(layer), figures[layer].returns, strict=True)
            if name in read and not node.everywhere  # each stage computes such layers, so nothing is sent
        )
        for layer, node in nodes.items()
    }


def saved_bytes(
    network: Network, figures: Mapping[str, Figures], names: Names, inputs: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes that each layer makes and its own backward pass needs, or that of a layer that reads them.

    Inputs of the model, whose bytes `inputs` has by name, belong to the layer that is the first to keep them.
    """
    saved = {layer: one.saved_bytes for layer, one in figures.items()}
    # Values that share memory count once. The memory of a value has the key (layer that allocated it, number there).
    memory: dict[str, tuple[str, int]] = {}
    size: dict[tuple[str, int], int] = {}
    needed: set[tuple[str, int]] = set()
    for layer, node in network.nodes.items():
        seen = figures[layer]
        read = list(dict.fromkeys(name for feed in node.feeds for name in names(feed)))
        for name, is_needed in zip(read, seen.reads, strict=True):
            if name.startswith("input:"):
                memory.setdefault(name, (layer, read.index(name)))
                size[memory[name]] = inputs[name]
            if is_needed:
                needed.add(memory[name])
        for name, (_, storage_bytes, whose, is_needed) in zip(names(layer), seen.returns, strict=True):
            memory[name] = memory[read[whose]] if whose >= 0 else (layer, whose)
            size.setdefault(memory[name], storage_bytes)
            if is_needed:
                needed.add(memory[name])
    for one in needed:
        saved[one[0]] += size[one]
    return saved
