"""Names of weights in the user's model, for each tensor of a layer.

A checkpoint is keyed by layer, so that it does not depend on the plan. Layers of an exported model hold the model's own
tensors under names of its graph. So the identity of a tensor gives its names in the model's `state_dict`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpgo.runtime.modules import Network

_COUNT, _MEAN = "num_batches_tracked", "running_mean"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of the tensors of a workload in the model's `state_dict`."""

    of: dict[tuple[str, str], tuple[str, ...]]
    """Names in the model of each `(layer id, name in the layer)`. A tied weight has several."""
    others: dict[str, Tensor]
    """Tensors of the model that no layer trains or updates, by name: constant buffers, and weights without use."""

    @property
    def all(self) -> dict[str, None]:
        """All names of the model's `state_dict`."""
        return dict.fromkeys(chain(chain.from_iterable(self.of.values()), self.others))


def weight_names(network: Network, model: nn.Module | None) -> WeightNames:
    """Return the names of a network's tensors in `model`, or in the network itself if that is None.

    The layers of a list or of a network have the names that a `Sequential` or a `ModuleDict` of them would give.

    >>> import torch
    >>> from hpgo.runtime.modules import Network
    >>> weight_names(Network.chain(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())), None).of
    {('0', 'weight'): ('0.weight',), ('0', 'bias'): ('0.bias',)}
    """
    if model is None:
        return WeightNames(
            {
                (layer, name): (f"{layer}.{name}",)
                for layer in network.nodes
                for name in network.make_on_meta(layer).state_dict()
            },
            {},
        )
    entries = model.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in entries.items() if isinstance(tensor, torch.Tensor)}
    named: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        named.setdefault(id(tensor), []).append(name)
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    saved: set[str] = set()
    for layer, node in network.nodes.items():
        module = node.make()
        held = chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        found |= {(layer, name): tuple(named[id(tensor)]) for name, tensor in held if id(tensor) in named}
        for name in module.state_dict():
            # The graph has no operation that reads the number of batches, so layers count in a new buffer.
            if name.endswith(_COUNT) and (layer, name) not in found:
                means = found.get((layer, name.removesuffix(_COUNT) + _MEAN), ())
                counts = (mean.removesuffix(_MEAN) + _COUNT for mean in means)
                found[layer, name] = tuple(one for one in counts if one in tensors)
            saved.update(found.get((layer, name), ()))
    return WeightNames(found, {name: tensor for name, tensor in tensors.items() if name not in saved})


def configuration(model: object) -> dict[str, Any] | None:
    """Return the content of the `config.json` of a model of transformers; None for any other model."""
    config = getattr(model, "config", None)
    # A user's module around such a model may have its `config`, too, but has other names.
    if config is None or not hasattr(model, "save_pretrained"):
        return None
    found: dict[str, Any] = json.loads(config.to_json_string())
    # Only models that were saved before name their class, without which the file does not name a model.
    return {**found, "architectures": found.get("architectures") or [type(model).__name__]}
