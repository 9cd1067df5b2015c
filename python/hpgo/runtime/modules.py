"""Models as layers by id, each with the names of the values that feed it.

Every workload becomes a `Network`: built-in models are written as one, a list of modules is a chain, and an exported
graph is converted. Layers are created one at a time, each from its own seed. So a process holds only the layers of its
stages, and the initial weights are the same under every plan.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpgo.base.checks import check_flag, check_is, check_list
from hpgo.base.messages import did_you_mean, safe_repr
from hpgo.errors import ArgumentError
from hpgo.runtime.trees import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from hpgo.runtime.trees import Tree


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """One layer of a network."""

    id: str
    make: Callable[[], nn.Module]
    feeds: tuple[str, ...]
    """Names of values: `input:<number>`, a layer's id, or `<id>:<number>` for one of several tensors that it returns.
    """
    everywhere: bool = False
    """Whether each stage that needs the layer computes it again, from inputs alone."""
    has_weights: bool = False
    """Whether `make` returns a module with its weights; otherwise it initializes new ones."""
    is_hidden: bool = False
    """Whether the layer is computed everywhere and no stage names it."""


class Network:
    """Layers in the order in which they run, and the values that feed each.

    >>> toy = Network().add("tokens", nn.Identity, "input:0", everywhere=True)
    >>> _ = toy.add("first", lambda: nn.Embedding(9, 4), "tokens").add("second", lambda: nn.Linear(4, 9), "first")
    >>> toy.tie(("first", "weight"), ("second", "weight")).layers
    ('tokens', 'first', 'second')
    >>> toy.edges
    (('tokens', 'first'), ('first', 'second'))
    """

    def __init__(self) -> None:
        self.nodes: dict[str, NetworkLayer] = {}
        self.tied_weights: list[tuple[tuple[str, str], ...]] = []
        """Groups of parameters `(layer id, name)` that are one tensor."""
        self._outputs: tuple[str, ...] = ()

    @classmethod
    def chain(
        cls, modules: nn.Sequential | Mapping[str, nn.Module] | Iterable[nn.Module], inputs: Tree | None = None
    ) -> Network:
        """Return a network of modules that feed each other in order, with names as ids, or numbers from 0.

        The first one gets `inputs`: a tuple as positional arguments, a dict as keyword arguments; None is one tensor.
        Shared parameters stay shared. Raises ArgumentError for anything but modules.

        >>> Network.chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).edges
        (('0', '1'),)
        """
        if isinstance(modules, (nn.Sequential, nn.ModuleList)):
            # `named_children` would skip a module that appears a second time.
            named: dict[str, Any] = dict(modules._modules)
        else:
            hint = "give a list of torch.nn modules"
            listing = () if isinstance(modules, dict) else check_list("the modules", modules, hint=hint)
            named = dict(modules) if isinstance(modules, dict) else {str(at): one for at, one in enumerate(listing)}
        network, feeds = cls(), tuple(f"input:{at}" for at in range(1 if inputs is None else inputs.count))
        for layer, module in named.items():
            if not isinstance(module, nn.Module):
                raise ArgumentError(f"layer `{layer}` is {safe_repr(module)}", "give a list of torch.nn modules")
            # Only the first module reads inputs. A tensor or a tuple of tensors are its arguments already.
            given = module if inputs is None or inputs.is_flat or network.nodes else _taking(inputs, module)
            network.put(NetworkLayer(layer, Given(given), feeds, has_weights=True))
            feeds = (layer,)
        holders: dict[int, list[tuple[str, str]]] = {}
        for layer, module in named.items():
            for name, parameter in module.named_parameters():
                holders.setdefault(id(parameter), []).append((layer, name))
        network.tied_weights = [tuple(where) for where in holders.values() if len(where) > 1]
        return network

    def add(self, layer: str, make: Callable[[], nn.Module], *feeds: str, everywhere: bool = False) -> Network:
        """Add the layer `layer`, and return the network.

        `make()` returns its module, which is called with the values `feeds`.

        A feed is `input:<number>`, the id of a layer before it, or `<id>:<number>` for one of several tensors that it
        returns. An id alone stands for the whole result. A layer that is computed `everywhere` has no parameters and
        reads only inputs and other such layers: each stage that needs it runs it, and nothing is sent.
        """
        return self.put(NetworkLayer(layer, make, feeds, everywhere))

    def put(self, node: NetworkLayer) -> Network:
        """Add a layer by its description, and return the network. Raise ArgumentError if it does not fit the others."""
        if not isinstance(node.id, str) or not node.id or node.id.startswith("input:"):
            raise ArgumentError(
                f"a layer's id is {safe_repr(node.id)}, but must be a name without `input:` in front",
                "give another name",
            )
        if node.id in self.nodes:
            raise ArgumentError(
                f"two layers have the id `{node.id}`, but feeds name layers by their id",
                "give each layer another id",
                code="duplicate",
            )
        if not callable(node.make):
            raise ArgumentError(
                f"layer `{node.id}` has {safe_repr(node.make)} as `make`",
                "give a function or a class",
                code="user_code",
            )
        check_flag("everywhere", node.everywhere)
        for feed in node.feeds:
            check_is(f"what layer `{node.id}` reads", feed, str, "name layers by their id, and inputs `input:0`")
            maker = self.maker(feed)
            if maker is None and not feed.startswith("input:"):
                raise ArgumentError(
                    f"layer `{node.id}` reads `{feed}`, but no layer before it has this id",
                    did_you_mean(feed, self.nodes),
                )
            if node.everywhere and maker is not None and not self.nodes[maker].everywhere:
                raise ArgumentError(
                    f"layer `{node.id}` is computed everywhere, but reads `{feed}`, which is not",
                    "let it read only inputs and other layers that are computed everywhere",
                )
        self.nodes[node.id] = node
        return self

    def tie(self, *holders: tuple[str, str]) -> Network:
        """Make parameters `(layer id, name)` one tensor, with the initial values of the first. Return the network."""
        for holder in holders:
            pair = check_list("what is tied", holder, hint="give pairs of layer id and name of the parameter")
            if len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise ArgumentError(
                    f"tied is {safe_repr(holder)}, but ties are pairs of text",
                    "give pairs of layer id and parameter name",
                )
            layer = pair[0]
            if layer not in self.nodes:
                raise ArgumentError(
                    f"there is no layer `{layer}` to tie", did_you_mean(layer, self.nodes), code="unknown_name"
                )
        self.tied_weights.append(tuple(holders))
        return self

    def end(self, *outputs: str) -> Network:
        """Set the values that the model returns; the default is the last layer's result. Return the network."""
        for value in outputs:
            check_is("what the model returns", value, str, "name layers by their id")
            if self.maker(value) is None:
                raise ArgumentError(
                    f"the model returns `{value}`, but no layer makes it", did_you_mean(value, self.nodes)
                )
        self._outputs = outputs
        return self

    @property
    def layers(self) -> tuple[str, ...]:
        """Ids of the layers in the order in which they run, without hidden ones."""
        return tuple(layer for layer, node in self.nodes.items() if not node.is_hidden)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that the model returns."""
        return self._outputs or self.layers[-1:]

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs `(from, to)` of ids, each once."""
        # A dict keeps the order of layers and drops repeated edges.
        found = {(self.maker(feed), node.id): None for node in self.nodes.values() for feed in node.feeds}
        return tuple((start, end) for start, end in found if start is not None and not self.nodes[start].is_hidden)

    def maker(self, value: str) -> str | None:
        """Return the layer that makes this value; None for inputs and unknown names."""
        check_is("the value", value, str, "name layers by their id")
        if value in self.nodes:
            return value
        layer, _, number = value.rpartition(":")
        return layer if layer in self.nodes and number.isdecimal() else None

    def make(self, layer: str, *, seed: int) -> nn.Module:
        """Return the module of a layer with its initial weights, which depend on `seed` unless they were given."""
        node = self.nodes[layer]
        # One seed per layer, not one for the model: the weights must not depend on which layers a process creates.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, layer))
            module = node.make()
            if node.has_weights:
                # A copy, so that a run does not train the user's own modules.
                module = _filled(layer, _copied(layer, module))
        return module

    def make_on_meta(self, layer: str) -> nn.Module:
        """Return the module of a layer on the meta device, without memory for its weights."""
        node = self.nodes[layer]
        with torch.device("meta"):
            module = node.make()
        if not node.has_weights:
            return module
        # Given modules have their weights already. Copy everything else, and put meta tensors in their place.
        tensors = chain(module.parameters(), module.buffers())
        return _copied(layer, module, {id(tensor): _on_meta(tensor) for tensor in tensors})


class Given:
    """Function that returns the module it was created with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> nn.Module:
        """Return the module of this layer."""
        return self._module


def _taking(tree: Tree, module: nn.Module) -> nn.Module:
    """Return a module with the same weights that takes the flat tensors of inputs of the structure `tree`."""
    # A shallow copy shares all weights, and leaves the class of the user's module as it is.
    kind, flat = type(module), copy.copy(module)

    def forward(self: nn.Module, *tensors: Tensor) -> Any:
        given, named = arguments(tree.build(tensors))
        return kind.forward(self, *given, **named)

    # Another class instead of a module around it, so that weights keep their names.
    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    flat.__class__ = type(kind.__name__, (kind,), names)
    return flat


def _on_meta(tensor: Tensor) -> Tensor:
    there = tensor.detach().to("meta")
    return nn.Parameter(there, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _copied(layer: str, module: nn.Module, known: dict[int, Any] | None = None) -> nn.Module:
    try:
        return copy.deepcopy(module, known or {})
    except Exception as error:
        raise ArgumentError(
            f"layer `{layer}` can't be copied: {error}",
            "give modules that `copy.deepcopy` takes, or a Network",
            code="user_code",
        ) from error


def _filled(layer: str, module: nn.Module) -> nn.Module:
    """Return `module`, with parameters on the meta device replaced by their own initialization.

    Raises ArgumentError if such a module has no `reset_parameters`.
    """
    for name, found in module.named_modules():
        own = [*found.parameters(recurse=False), *found.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(found, "reset_parameters", None)
        if reset is None:
            raise ArgumentError(
                f"layer `{layer}`: `{name or type(found).__name__}` is on the meta device, but has no"
                " `reset_parameters`",
                "give it a method `reset_parameters()`, or create it on the CPU",
            )
        # Children initialize themselves when their turn comes.
        found.to_empty(device="cpu", recurse=False)
        reset()
    return module


def _seed(seed: int, layer: str) -> int:
    """Return 63 bits derived from both arguments, the same on every node."""
    # `hash()` differs between processes, so it can't seed ranks that must start from equal weights.
    return int.from_bytes(hashlib.blake2b(f"{seed} {layer}".encode(), digest_size=8).digest()) >> 1
