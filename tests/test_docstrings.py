"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import hpgo

SKIPPED = {"hpgo.__main__", "hpgo.runtime"}  # the first runs the command, the second needs torch
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(hpgo.__path__, "hpgo.")
    if not any(found.name == name or found.name.startswith(f"{name}.") for name in SKIPPED)
)


@pytest.mark.parametrize("name", [*MODULES, "HPGO"])
def test_examples_in_docstrings_hold(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_every_public_class_has_an_example() -> None:
    classes = [kind for name in hpgo.__all__ if inspect.isclass(kind := getattr(hpgo, name))]
    texts = {kind: [kind.__doc__, *(getattr(kept, "__doc__", "") for kept in vars(kind).values())] for kind in classes}
    assert [kind.__name__ for kind, said in texts.items() if not any(">>>" in (text or "") for text in said)] == []
