"""Built-in models: published profiles, rebuilt from the architecture and the published per-layer numbers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ProfileError

if TYPE_CHECKING:
    from hpgo.model.profile import Profile


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """Function that builds a model, and the name of its file among the published profiles."""

    file: str
    module: str
    function: str
    arguments: dict[str, Any]


def _model(file: str, function: str, **arguments: Any) -> BuiltinModel:
    return BuiltinModel(f"{file}.txt", f"hpgo.model.builtin.{function.partition('_')[0]}", function, arguments)


MODELS: dict[str, BuiltinModel] = {
    "amoebanet-18": _model("amoeba-18-pbs-8", "amoebanet", cells=18, batch_size=8),
    "amoebanet-36": _model("amoeba-36-pbs-1", "amoebanet", cells=36, batch_size=1),
    "bert-24": _model("bert-24-pbs-6", "bert", layers=24, batch_size=6, layer_ms=(8.07, 13.4)),
    "bert-48": _model("bert-48-pbs-2", "bert", layers=48, batch_size=2, layer_ms=(2.69, 4.47)),
    "gnmt-16": _model("gnmt-16-pbs-64", "gnmt_16"),
    "gnmt-32": _model("gnmt-32-pbs-64", "gnmt_32"),
    "resnet-50": _model("resnet50-pbs-128", "resnet_50"),
    "vgg-16": _model("vgg16", "vgg_16"),
    "vgg-19": _model("vgg-19-pbs-32", "vgg_19"),
    "xlnet-24": _model("xlnet-24-pbs-1", "xlnet", layers=24),
    "xlnet-36": _model("xlnet-36-pbs-1", "xlnet", layers=36),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Hardware on which the numbers of a built-in model were measured."""

    type: str
    """Name of such a device in hpgo."""
    said: str
    """Description of the hardware for reports."""


_MEASURED = {
    "AlibabaPAI/DAPPLE": Measured("V100", "V100s"),
    "msr-fiddle/pipedream": Measured("V100", "a device that its publishers don't name, V100s perhaps"),
}
"""Hardware by the beginning of `Profile.source`."""


def measured_on(profile: Profile) -> Measured | None:
    """Return the hardware on which a built-in model was measured, or None for any other profile.

    >>> measured_on(built_in("bert-48")).said
    'V100s'
    """
    if profile.name not in MODELS or profile.source != _source(profile.name):
        return None
    return next(where for start, where in _MEASURED.items() if profile.source.startswith(start))


@cache  # called for every plan that is estimated
def _source(name: str) -> str:
    return built_in(name).source


def built_in(name: str) -> Profile:
    """Return the built-in model `name`; raise ProfileError, which suggests similar names, if there is none.

    >>> built_in("bert-48").batch_sizes
    (2,)
    """
    if name not in MODELS:
        raise ProfileError(
            f"there is no built-in model `{shorten(name)}`", did_you_mean(name, MODELS), code="unknown_name"
        )
    model = MODELS[name]
    profile: Profile = getattr(importlib.import_module(model.module), model.function)(**model.arguments)
    return profile
