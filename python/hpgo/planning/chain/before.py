"""Deprecated calls of `partition`, which warn. The next version removes this module."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hpgo.base.deprecated import renamed
from hpgo.errors import ArgumentError
from hpgo.machine.cluster import Cluster
from hpgo.model.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ARGUMENTS = {"time_limit_s": "deadline_s", "throughput": "samples_per_s"}
_FILES = ("models", "device_types", "devices")


def old_calls(of_files: Callable[..., Any] | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that accepts old names of arguments, and passes old calls with files to `of_files`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in _ARGUMENTS.items():
                if old in kwargs:
                    renamed(f"{old}=", f"{new}=")
                    kwargs[new] = kwargs.pop(old)
            if of_files is None or not _is_of_files(args, kwargs):
                return function(*args, **kwargs)
            given = dict(zip(_FILES, args, strict=False))
            given |= {name: kwargs.pop(name) for name in _FILES if name in kwargs}
            return _translated(given, kwargs, function, of_files)

        return call

    return decorate


def _is_of_files(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) > 2 or "model" in kwargs or any(name in kwargs for name in _FILES)


def _translated(
    given: dict[str, Any], kwargs: dict[str, Any], of_profile: Callable[..., Any], of_files: Callable[..., Any]
) -> Any:
    if isinstance(given.get("models"), Profile):
        renamed("partition(models=…, device_types=…)", "partition(profile, cluster)", stacklevel=4)
        if not isinstance(given.get("device_types"), Cluster) or "devices" in given or kwargs.pop("model", None):
            raise ArgumentError(
                "a `Profile` needs a `Cluster`, and no `devices` or `model`", "call `partition(profile, cluster)`"
            )
        for name in ("interpolate", "units", "ignore_unknown_types"):  # These options have no meaning for a profile.
            kwargs.pop(name, None)
        return of_profile(given["models"], given["device_types"], **kwargs)
    renamed("partition(models, device_types, devices, …)", "partition_files(…)", stacklevel=4)
    if len(given) < 3 or isinstance(given["device_types"], Cluster) or kwargs.get("model") is None:
        raise ArgumentError(
            "PipeEdge's files are models, device types and devices, with the name of a model",
            'call `partition_files("models.yml", "device_types.yml", "devices.yml", model="…")`',
        )
    return of_files(**given, **{key: value for key, value in kwargs.items() if (key, value) != ("batch_size", None)})
