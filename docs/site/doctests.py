"""Docstrings for the reference: what Markdown would take for a quotation or for code is set as what it is."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Whatever has a docstring."""
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    lines = example[0].splitlines()
    return "\n".join([f"{example['indent']}```pycon", *lines, f"{example['indent']}```"])
