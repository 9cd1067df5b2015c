"""What was predicted beside what was measured, as cells of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MANIFOLD = 10.0
"""From so many times what was predicted on, the table tells how many."""


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.3g} %"


def compared(shown: Callable[[float], str], values: dict[str, Any]) -> tuple[str, str, str]:
    """Cells of a row; shares differ by points, all else by a share of what was predicted."""
    predicted, measured = values["predicted"], values["measured"]
    first, second = ("" if value is None else shown(value) for value in (predicted, measured))
    if not predicted or measured is None:
        return first, second, ""
    if shown is percent:
        return first, second, f"{100 * (measured - predicted):+.3g} points"
    ratio = measured / predicted
    return first, second, f"{100 * (ratio - 1):+.3g} %" if ratio < _MANIFOLD else f"{ratio:.3g} ×"
