"""Built-in models: networks by name and sizes, with examples of their data and their losses.

Models that `hpgo models` lists have the same layer ids here, so plans of their profiles run as they stand.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import near, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hpgo.runtime.modules import Network


@dataclass(frozen=True, slots=True)
class Made:
    """A built-in model with an example of its data and its loss."""

    network: Network
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Tensor] | None = None


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt": ("gpt", "gpt", {}),
    "mlp": ("mlp", "mlp", {}),
    "vgg-16": ("vgg", "vgg", {"depth": 16}),
    "vgg-19": ("vgg", "vgg", {"depth": 19}),
}
"""Name -> module of this folder, its function, and arguments that the name settles."""


def built_in(name: str, sizes: str = "") -> Made:
    """The model `name` with `sizes` such as `layers=12,hidden=768`; a word alone means that it is so.

    Raises ArgumentError for a size that the model does not have, or that is no number.

    >>> built_in("gpt", "layers=2,hidden=8,heads=2,vocabulary=16,length=4").network.layers
    ('embedding', 'block-1', 'block-2', 'head')
    """
    module, function, settled = MODELS[name]
    build = getattr(importlib.import_module(f"hpgo.runtime.models.{module}"), function)
    known = {
        key: parameter.default for key, parameter in inspect.signature(build).parameters.items() if key not in settled
    }
    given: dict[str, Any] = {}
    for item in filter(None, sizes.split(",")):
        key, equals, value = item.partition("=")
        if key not in known:
            raise ArgumentError(f"the model `{name}` has no size `{shorten(key)}`", near(key, known))
        given[key] = _value(name, key, value if equals else "true", known[key])
    made: Made = build(**settled, **given)
    return made


def _value(model: str, key: str, text: str, default: Any) -> Any:
    """`text` as what `default` is: a flag, a whole number from 1, or a share below 1."""
    if isinstance(default, bool):
        if text in {"true", "false"}:
            return text == "true"
        wanted = "write it alone, or `=true` or `=false`"
    elif isinstance(default, int):
        if text.isdecimal() and 0 < int(text) < 2**31:
            return int(text)
        wanted = "give a whole number from 1"
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
