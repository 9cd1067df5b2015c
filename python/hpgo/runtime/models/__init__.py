"""Built-in models: networks by name and sizes, with examples of their data and their losses.

Models that `hpgo models` lists have the same layer ids here, so plans of their profiles run as they stand.
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
"""Name -> module of this folder, its function, and the sizes of that name; what the name tells can't be changed."""
_TOLD = {"cells", "depth", "layers"}
"""Sizes that a name with a number tells."""
_MOST, _MOST_LAYERS = 2**31 - 1, 2**14
"""Of sizes; layers are made one by one."""


def built_in(name: str, sizes: str = "") -> BuiltModel:
    """The model `name` with `sizes` such as `layers=12,hidden=768`; a word alone means that it is so.

    Raises ArgumentError for a size that the model does not have, or that is no number.

    >>> built_in("gpt", "layers=2,hidden=8,heads=2,vocabulary=16,length=4").network.layers
    ('embedding', 'block-1', 'block-2', 'head')
    """
    sized, build = MODELS[name][2], _builder(name)
    known = {
        key: sized.get(key, parameter.default)
        for key, parameter in inspect.signature(build).parameters.items()
        if key not in sized.keys() & _TOLD
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
    """Whether the blocks of the model `name` can be four layers each."""
    return "quarters" in inspect.signature(_builder(name)).parameters


def _builder(name: str) -> Callable[..., BuiltModel]:
    module, function, _ = MODELS[name]
    build: Callable[..., BuiltModel] = getattr(importlib.import_module(f"hpgo.runtime.models.{module}"), function)
    return build


def _value(model: str, key: str, text: str, default: Any) -> Any:
    """`text` as what `default` is: a flag, a whole number from 1, or a share below 1."""
    if isinstance(default, bool):
        if text in {"true", "false"}:
            return text == "true"
        wanted = "write it alone, or `=true` or `=false`"
    elif isinstance(default, int):
        most = _MOST_LAYERS if key == "layers" else _MOST
        if text.isdecimal() and len(text) < 20 and 0 < int(text) <= most:
            return int(text)
        wanted = f"give a whole number from 1{f' to {most}' if text.isdecimal() else ''}"
    else:
        try:
            if 0 <= float(text) < 1:
                return float(text)
        except ValueError:
            pass
        wanted = "give a number from 0 to below 1"
    raise ArgumentError(f"the model `{model}`: `{key}` is `{shorten(text)}`", f"{wanted}; {default} is what it is else")


def seeded(made: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Random examples that are the same in every process."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made()
