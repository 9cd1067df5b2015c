"""Warnings for public names of the previous version, which still work."""

from __future__ import annotations

import warnings


def renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that `old` is now called `new`. With the default `stacklevel`, the warning points at the caller's caller.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     renamed("Plan.speed", "Plan.speed_up")
    >>> print(caught[0].message)
    `Plan.speed` is now `Plan.speed_up`; the old name goes with the next version
    """
    message = f"`{old}` is now `{new}`; the old name goes with the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
