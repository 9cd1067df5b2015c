"""Table cells with predicted and measured values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_FACTOR = 10.0
"""Ratio to the prediction from which on the table has a factor instead of a percentage."""


def percent(share: float) -> str:
    """Return a share as a percentage with three digits."""
    return f"{100 * share:.3g} %"


def compared(shown: Callable[[float], str], values: dict[str, Any]) -> tuple[str, str, str]:
    """Return predicted value, measured value and difference.

    Percentages differ by points, all other values by a share of the prediction.
    """
    predicted, measured = values["predicted"], values["measured"]
    first, second = ("" if value is None else shown(value) for value in (predicted, measured))
    if not predicted or measured is None:
        return first, second, ""
    if shown is percent:
        return first, second, f"{100 * (measured - predicted):+.3g} points"
    ratio = measured / predicted
    return first, second, f"{100 * (ratio - 1):+.3g} %" if ratio < _FACTOR else f"{ratio:.3g} ×"
