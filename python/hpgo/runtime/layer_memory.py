"""Bytes that layers send and save, from what was seen of each of them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.runtime.modules import Network
    from hpgo.runtime.pass_times import Figures

    Names = Callable[[str], tuple[str, ...]]
    """Names of the values that a layer makes, or that an input is."""


def activation_bytes(network: Network, figures: Mapping[str, Figures], names: Names) -> dict[str, int]:
    """Return the bytes of each layer that others read, or that the model returns."""
    nodes = network.nodes
    feeds = [*(feed for node in nodes.values() for feed in node.feeds), *network.outputs]
    read = {name for feed in feeds for name in names(feed)}
    return {
        layer: sum(
            one[0]
            for name, one in zip(names(layer), figures[layer].returns, strict=True)
            if name in read and not node.everywhere  # each stage computes these, and nothing is sent
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
    memory: dict[str, tuple[str, int]] = {}  # of a value: the layer that made it, and its number there
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
