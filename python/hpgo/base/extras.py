"""Import of libraries that only one task needs, and the extra of the package that installs each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hpgo.errors import ArgumentError

_DISTRIBUTIONS = {"PIL": "pillow"}
"""Names on the package index that differ from the name of the module."""


def library(module: str, *, extra: str, task: str) -> Any:
    """Import an optional module and return it.

    Args:
        module: name of the module.
        extra: extra of `hpgo` in pyproject.toml that installs it.
        task: the feature that needs it, as a plural subject of the error message.

    Raises ArgumentError, whose hint names the extra, if the module can't be imported.

    >>> library("json", extra="onnx", task="ONNX files").dumps([1])
    '[1]'
    >>> library("no_such_onnx", extra="onnx", task="ONNX files")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: ONNX files need `no_such_onnx`, which can't be imported: No module named 'no_such_onnx'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ArgumentError(
            f"{task} need `{package}`, which can't be imported: {error}",
            # The index has another project of the name `hpgo`, so no command that names the extra is right everywhere.
            f"install it: `pip install {_DISTRIBUTIONS.get(package, package)}`, or this package's extra `{extra}`",
            code="missing_package",
        ) from error
