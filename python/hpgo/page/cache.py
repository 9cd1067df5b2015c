"""Cache of the server with a budget of bytes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Kept = TypeVar("_Kept")


class Store(Generic[_Key, _Kept]):
    """Values by key. If they exceed the budget, the least recently used values are dropped.

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
        self._values: dict[_Key, tuple[_Kept, int]] = {}  # In the order of their last use.

    def put(self, key: _Key, value: _Kept, size_bytes: int) -> None:
        """Keep `value`, which takes `size_bytes`, unless it alone exceeds the budget."""
        self.drop(key)
        if size_bytes > self.budget_bytes:
            return
        while self.held_bytes + size_bytes > self.budget_bytes:
            self.drop(next(iter(self._values)))
        self._values[key] = value, size_bytes
        self.held_bytes += size_bytes

    def get(self, key: _Key) -> _Kept | None:
        """Return the value of `key`, or None if it was dropped."""
        if key not in self._values:
            return None
        self._values[key] = self._values.pop(key)
        return self._values[key][0]

    def drop(self, key: _Key) -> None:
        """Drop the value of `key`, if there is one."""
        if key in self._values:
            self.held_bytes -= self._values.pop(key)[1]

    def items(self) -> list[tuple[_Key, _Kept]]:
        """Return all keys and values, with the least recently used first."""
        return [(key, value) for key, (value, _) in self._values.items()]
