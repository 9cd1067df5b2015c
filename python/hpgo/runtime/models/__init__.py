"""Built-in models: networks by name and sizes, with examples of their data and their losses.

Models in `hpgo models` have the same layer ids here, so plans of their profiles run without changes.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hpgo.runtime.modules import Network


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A built-in model with an example of its data and its loss."""

    network: Network
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Tensor] | None = None


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "amoebanet": ("amoebanet", "amoebanet", {}),
    "amoebanet-18": ("amoebanet", "amoebanet", {"cells": 18}),
    "amoebanet-36": ("amoebanet", "amoebanet", {"cells": 36}),
    "bert": ("bert", "bert", {}),
    "bert-24": ("bert", "bert", {"layers": 24, "hidden": 1024, "heads": 16}),
    "bert-48": ("bert", "bert", {"layers": 48, "hidden": 1024, "heads": 16}),
    "deit-tiny": ("vit", "vit", {"layers": 12, "hidden": 192, "heads": 3, "distilled": True}),
    "deit-small": ("vit", "vit", {"layers": 12, "hidden": 384, "heads": 6, "distilled": True}),
    "deit-base": ("vit", "vit", {"layers": 12, "distilled": True}),
    "gnmt": ("gnmt", "gnmt", {}),
    "gnmt-16": ("gnmt", "gnmt", {"layers": 16}),
    "gnmt-32": ("gnmt", "gnmt", {"layers": 32}),
    "gpt": ("gpt", "gpt", {}),
    "mlp": ("mlp", "mlp", {}),
    "resnet-50": ("resnet", "resnet_50", {}),
    "vgg-16": ("vgg", "vgg", {"depth": 16}),
    "vgg-19": ("vgg", "vgg", {"depth": 19}),
    "vit": ("vit", "vit", {}),
    "vit-base": ("vit", "vit", {"layers": 12}),
    "vit-large": ("vit", "vit", {"layers": 24, "hidden": 1024, "heads": 16}),
    "xlnet": ("xlnet", "xlnet", {}),
    "xlnet-24": ("xlnet", "xlnet", {"layers": 24}),
    "xlnet-36": ("xlnet", "xlnet", {"layers": 36}),
}
"""Module of this package, its function and fixed sizes, by the name of the model."""
_NAMED_SIZES = {"cells", "depth", "layers"}
"""Sizes that a name with a number contains, such as the 48 layers of `bert-48`. They can't be changed."""
_MAX, _MAX_LAYERS = 2**31 - 1, 2**14
"""Maximum size and maximum number of layers, which are created one by one."""


def built_in(name: str, sizes: str = "") -> BuiltModel:
    """Return the model `name` with `sizes` such as `layers=12,hidden=768`. A name without a value sets a flag.

    Raises ArgumentError for a size that the model does not have, or a value of the wrong type.

    >>> built_in("gpt", "layers=2,hidden=8,heads=2,vocabulary=16,length=4").network.layers
    ('embedding', 'block-1', 'block-2', 'head')
    """
    sized, build = MODELS[name][2], _builder(name)
    # The parameters of the builder are the sizes that can be set, and their defaults determine the types.
    known = {
        key: sized.get(key, parameter.default)
        for key, parameter in inspect.signature(build).parameters.items()
        if key not in sized.keys() & _NAMED_SIZES
    }
    given: dict[str, Any] = {}
    for item in filter(None, sizes.split(",")):
        key, equals, value = item.partition("=")
        if key not in known:
            raise ArgumentError(
                f"the model `{name}` has no size `{shorten(key)}`", did_you_mean(key, known), code="unknown_name"
            )
        given[key] = _value(name, key, value if equals else "true", known[key])
    return build(**sized | given)


def has_quarters(name: str) -> bool:
    """Return whether the blocks of the model `name` can be split into four layers each."""
    return "quarters" in inspect.signature(_builder(name)).parameters


def _builder(name: str) -> Callable[..., BuiltModel]:
    module, function, _ = MODELS[name]
    # Import only the requested model, since the modules import torch.
    build: Callable[..., BuiltModel] = getattr(importlib.import_module(f"hpgo.runtime.models.{module}"), function)
    return build


def _value(model: str, key: str, text: str, default: Any) -> Any:
    """Return `text` as a value of the type of `default`: a flag, a whole number from 1, or a fraction below 1."""
    if isinstance(default, bool):
        if text in {"true", "false"}:
            return text == "true"
        wanted = "write it alone, or `=true` or `=false`"
    elif isinstance(default, int):
        # Check the length first, since `int` refuses numbers of thousands of digits with another error.
        maximum = _MAX_LAYERS if key == "layers" else _MAX
        if text.isdecimal() and len(text) < 20 and 0 < int(text) <= maximum:
            return int(text)
        wanted = f"give a whole number from 1{f' to {maximum}' if text.isdecimal() else ''}"
    else:
        try:
            if 0 <= float(text) < 1:
                return float(text)
        except ValueError:
            pass
        wanted = "give a number from 0 to below 1"
    raise ArgumentError(f"the model `{model}`: `{key}` is `{shorten(text)}`", f"{wanted}; its default is {default}")


def seeded(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return random examples that are the same in every process."""
    import torch

    # Restore the generator's state, so that examples don't change the random numbers of the run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()
