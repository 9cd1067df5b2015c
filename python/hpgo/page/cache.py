"""What the server keeps for later, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Kept = TypeVar("_Kept")


class Store(Generic[_Key, _Kept]):
    """Values by key; where they would take more than the budget, those go that were not asked for the longest.

    >>> store = Store[str, str](budget_bytes=100)
    >>> for key in ("a", "b"):
    ...     store.put(key, key.upper(), 50)
    >>> store.get("a")
    'A'
    >>> store.put("c", "C", 50)
    >>> store.get("b"), store.items(), store.held_bytes
    (None, [('a', 'A'), ('c', 'C')], 100)
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self._values: dict[_Key, tuple[_Kept, int]] = {}  # the longest unused first

    def put(self, key: _Key, value: _Kept, size_bytes: int) -> None:
        """Keeps `value`, which takes `size_bytes`, unless it alone is beyond the budget."""
        self.drop(key)
        if size_bytes > self.budget_bytes:
            return
        while self.held_bytes + size_bytes > self.budget_bytes:
            self.drop(next(iter(self._values)))
        self._values[key] = value, size_bytes
        self.held_bytes += size_bytes

    def get(self, key: _Key) -> _Kept | None:
        """What was kept as `key`, if it still is."""
        if key not in self._values:
            return None
        self._values[key] = self._values.pop(key)
        return self._values[key][0]

    def drop(self, key: _Key) -> None:
        """Forgets `key`, if it is held."""
        if key in self._values:
            self.held_bytes -= self._values.pop(key)[1]

    def items(self) -> list[tuple[_Key, _Kept]]:
        """What is held, the longest unused first."""
        return [(key, value) for key, (value, _) in self._values.items()]
