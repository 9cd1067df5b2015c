"""How much memory the tensors of a process hold at their peak.

A GPU's allocator counts that. On the CPU operations are watched as torch dispatches them: memory that tensors share
counts once, from the operation that made it until nobody holds it any more. What an operation takes and gives back by
itself is not seen there.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from torch import Tensor


class LiveTensorCounter(TorchDispatchMode):
    """Counts bytes of tensors that are alive, within it; what is computed stays as it is, only slower.

    >>> here = torch.zeros(100)
    >>> with LiveTensorCounter([here]) as alive:
    ...     both = torch.cat([here, here])
    ...     large = both.repeat(10)
    ...     del large
    >>> alive.peak_bytes, alive.bytes
    (9200, 1200)
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        """`held` are tensors that are there already, and count, too."""
        super().__init__()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._gone: list[int] = []  # by whatever thread lets go, so that only one counts
        self._bytes = self.peak_bytes = 0
        for tensor in held:
            self._count(tensor)

    @property
    def bytes(self) -> int:
        """Now."""
        while self._gone:
            self._bytes -= self._gone.pop()
        return self._bytes

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        at = storage._cdata
        if at not in self._references and not tensor.is_meta:
            size_bytes = storage.nbytes()
            self._references[at] = weakref.ref(storage, partial(self._lose, at, size_bytes))
            self._bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _lose(self, at: int, size_bytes: int, _: weakref.ref[Any]) -> None:
        del self._references[at]
        self._gone.append(size_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts what it has made."""
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return made


class Peak:
    """The most that a rank holds in a step: on the CPU found in its first step, since that makes it slower."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        """Once a step has ended."""
        self._alive: LiveTensorCounter | None = None
        self._of_passes = 0

    @contextmanager
    def step(self, held: Callable[[], Iterable[Tensor]], state: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Within it a step runs. `held` are tensors that outlive it, `state` those of the optimizer among them."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        elif self.bytes is None:
            before_bytes = _bytes(state())
            with LiveTensorCounter(held()) as self._alive:
                yield
            # What the optimizer makes at the end of its first step, all later ones hold from their begin.
            self.bytes = max(self._alive.peak_bytes, self._of_passes + _bytes(state()) - before_bytes)
            self._alive = None
        else:
            yield

    def passes_end(self) -> None:
        """In a step: the optimizer comes next."""
        if self._alive is not None:
            self._of_passes = self._alive.peak_bytes


class MemoryGrowth:
    """How much more memory the tensors of a process hold than before.

    >>> here = torch.zeros(100)
    >>> with MemoryGrowth(torch.device("cpu"), [here]) as growth:
    ...     large = here.view(10, 10).repeat(2, 1)
    ...     now_bytes = growth.bytes
    ...     both = torch.cat([large, large])
    >>> now_bytes, growth.peak_bytes
    (800, 2400)
    """

    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        """`held` are the tensors that are there before and stay; a GPU's allocator knows them by itself."""
        self._device = device
        self._alive = LiveTensorCounter(held)
        self._before_bytes = self._alive.bytes
        self.peak_bytes = 0
        """At most, once it has ended."""

    @property
    def bytes(self) -> int:
        """Now."""
        now_bytes = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else self._alive.bytes
        return now_bytes - self._before_bytes

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before_bytes = torch.cuda.memory_allocated(self._device)
        else:
            self._alive.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self._alive.__exit__(*raised)
            peak_bytes = self._alive.peak_bytes
        self.peak_bytes = peak_bytes - self._before_bytes


def lacks_memory(failure: Exception) -> bool:
    """Whether Python or torch raises it because there is none left."""
    return isinstance(failure, MemoryError) or (isinstance(failure, RuntimeError) and "memory" in str(failure).lower())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
