"""Profiles of one model on several device types, merged into one profile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is, check_text
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.profile import Profile, timed_as

if TYPE_CHECKING:
    from hpgo.model.profile import Layer

_MEASURED = (
    "forward_s", "backward_s", "activation_bytes", "saved_bytes", "input_gradient_s", "weight_gradient_s",
)  # fmt: skip
"""Fields of a layer with one number for each batch size."""


def merge_profiles(profiles: dict[str, Profile]) -> Profile:
    """Return one profile with the times of several, each measured on the device type that is its key.

    The first profile supplies the sizes, and the times for all other types. Only batch sizes that all profiles have are
    kept.

    Raises ArgumentError for an empty mapping, and ProfileError for profiles with other layers, edges or
    `gpus_per_device` than the first, with times by type, or without a common batch size.

    >>> columns = {"batch_size": 1, "activation_bytes": [8], "parameter_bytes": [4]}
    >>> slow, fast = (Profile.chain("toy", forward_s=[t], backward_s=[2 * t], **columns) for t in (0.3, 0.1))
    >>> merged = merge_profiles({"T4": slow, "A100": fast})
    >>> merged.device, merged.device_types, merged.on("A100").layers[0].backward_s
    ('T4', ('A100', 'T4'), (0.2,))
    """
    check_is("the profiles to merge", profiles, dict, "give a dictionary from device types to profiles")
    if not profiles:
        raise ArgumentError("there are no profiles to merge", "give one for each device type")
    for name, profile in profiles.items():
        check_text("a device type", name, ArgumentError)
        if not isinstance(profile, Profile):
            raise ArgumentError(f"the profile of `{name}` is {safe_repr(profile)}", "read one with `hpgo.read_profile`")
        if profile.device_types:
            raise ProfileError(
                f"the profile of `{name}` has times on {', '.join(f'`{one}`' for one in profile.device_types)} already",
                "merge the profiles of single types",
            )
    first_name, first = next(iter(profiles.items()))
    for name, profile in profiles.items():
        _check_alike(first_name, first, name, profile)
    sizes = sorted(set.intersection(*(set(profile.batch_sizes) for profile in profiles.values())))
    if not sizes:
        listed = ", ".join(f"`{name}` has {sorted(profile.batch_sizes)}" for name, profile in profiles.items())
        raise ProfileError(
            f"the profiles have no batch size in common: {listed}", "measure one batch size on all device types"
        )
    each = {name: _at_sizes(profile, sizes) for name, profile in profiles.items()}
    layers_of = {name: {layer.id: layer for layer in profile.layers} for name, profile in each.items()}
    return replace(
        each[first_name],
        device=first_name,
        source="; ".join(f"{name}: {profile.source}" for name, profile in profiles.items()),
        layers=tuple(
            timed_as(layer, ((name, layers[layer.id]) for name, layers in layers_of.items()))
            for layer in each[first_name].layers
        ),
    )


def _check_alike(first_name: str, first: Profile, name: str, profile: Profile) -> None:
    """Raise ProfileError if two profiles are not of the same layers, edges and groups of GPUs."""
    ids, others = ({layer.id for layer in one.layers} for one in (first, profile))
    if ids != others:
        lacking, having = (name, first_name) if ids - others else (first_name, name)
        layer = min(ids - others or others - ids)
        raise ProfileError(
            f"the profile of `{lacking}` has no layer `{layer}`, but that of `{having}` has",
            "measure the same layers on all device types",
            code="mismatch",
        )
    if set(first.edges) != set(profile.edges):
        raise ProfileError(
            f"the profiles of `{first_name}` and `{name}` have different edges",
            "measure the same model on all device types",
            code="mismatch",
        )
    if first.gpus_per_device != profile.gpus_per_device:
        raise ProfileError(
            f"gpus_per_device is {first.gpus_per_device} on `{first_name}`, but {profile.gpus_per_device} on `{name}`",
            "measure layers on the same number of GPUs on all device types",
            code="mismatch",
        )


def _at_sizes(profile: Profile, sizes: list[int]) -> Profile:
    """Return the profile with the measurements at some of its batch sizes."""
    kept = [profile.batch_sizes.index(size) for size in sizes]

    def at_sizes(layer: Layer) -> Layer:
        measured: dict[str, Any] = {
            key: tuple(values[at] for at in kept) for key in _MEASURED if (values := getattr(layer, key)) is not None
        }
        return replace(layer, **measured)

    return replace(profile, batch_sizes=tuple(sizes), layers=tuple(map(at_sizes, profile.layers)))
