"""Docstrings for the reference: what Markdown would run together, or take for a quotation, is set as what it is."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_OPTIONS = re.compile(r"^(Options.*:)\n((?: {4}.*\n)+)", re.MULTILINE)
_PAGE = re.compile(r"(?<![\w/`])docs/([\w-]+\.md)\b")
_OPTION = re.compile(r"^ {4}(\w+=\S+?): ", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around each example, links pages, and makes a list of options that have no argument of their own."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Whatever has a docstring."""
        if obj.docstring:
            text = _PAGE.sub(r"[docs/\1](../\1)", obj.docstring.value)
            obj.docstring.value = _OPTIONS.sub(_listed, _DOCTEST.sub(_fenced, text))


def _fenced(example: re.Match[str]) -> str:
    lines = example[0].splitlines()
    return "\n".join([f"{example['indent']}```pycon", *lines, f"{example['indent']}```"])


def _listed(options: re.Match[str]) -> str:
    return f"{options[1]}\n\n" + _OPTION.sub(r"- `\1`: ", options[2])
