"""Native sessions that answer otherwise than they do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hpgo import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def replace_method(monkeypatch: pytest.MonkeyPatch, name: str, answer: Callable[..., Any]) -> None:
    """Let sessions made from now on answer their method `name` by `answer(own_method, *arguments)`."""
    before = _core.Session

    class Changed:
        def __init__(self, *given: Any) -> None:
            self._own = before(*given)

        def __getattr__(self, attribute: str) -> Any:
            own = getattr(self._own, attribute)
            return partial(answer, own) if attribute == name else own

    monkeypatch.setattr(_core, "Session", Changed)
