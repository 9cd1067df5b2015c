"""Peak memory of the tensors of a process.

On a GPU, the allocator counts it. On the CPU, torch's dispatcher shows each operation. Memory that tensors share counts
once, from the operation that allocated it until no tensor uses it any more. Temporary memory inside an operation is not
counted there.
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
    """Counter of the bytes of all live tensors. Results within its context do not change, but take longer.

    >>> here = torch.zeros(100)
    >>> with LiveTensorCounter([here]) as alive:
    ...     both = torch.cat([here, here])
    ...     large = both.repeat(10)
    ...     del large
    >>> alive.peak_bytes, alive.bytes
    (9200, 1200)
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        """Start the count with `held`, tensors that exist already."""
        super().__init__()
        self._references: dict[int, weakref.ref[Any]] = {}
        # Any thread may free a tensor. They only append here, and one thread subtracts, so no lock is needed.
        self._gone: list[int] = []
        self._bytes = self.peak_bytes = 0
        for tensor in held:
            self._count(tensor)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are alive now."""
        while self._gone:
            self._bytes -= self._gone.pop()
        return self._bytes

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        at = storage._cdata
        # Meta tensors have sizes but no memory.
        if at not in self._references and not tensor.is_meta:
            size_bytes = storage.nbytes()
            # Count storages, not tensors: views share one. The weak reference reports when the last of them is gone.
            self._references[at] = weakref.ref(storage, partial(self._lose, at, size_bytes))
            self._bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _lose(self, at: int, size_bytes: int, _: weakref.ref[Any]) -> None:
        del self._references[at]
        self._gone.append(size_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the tensors that it returns."""
        output = func(*args, **(kwargs or {}))
        for one in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return output


class Peak:
    """Peak memory of a rank in a step. On the CPU it is counted in the first step only, because counting is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        """Peak of a step; None until the first step has ended."""
        self._alive: LiveTensorCounter | None = None
        self._of_passes = 0

    @contextmanager
    def step(self, held: Callable[[], Iterable[Tensor]], state: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """Count the memory of a step. `held` returns tensors that outlive it, `state` the optimizer's among them."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.bytes = torch.cuda.max_memory_allocated(self._device)
        elif self.bytes is None:
            before_bytes = _bytes(state())
            with LiveTensorCounter(held()) as self._alive:
                yield
            # The optimizer creates its state at the end of the first step. Later steps hold it during their passes.
            self.bytes = max(self._alive.peak_bytes, self._of_passes + _bytes(state()) - before_bytes)
            self._alive = None
        else:
            yield

    def passes_end(self) -> None:
        """Mark the end of the passes, before the optimizer step."""
        if self._alive is not None:
            self._of_passes = self._alive.peak_bytes


class MemoryGrowth:
    """Growth of the memory of a process's tensors within a context.

    >>> here = torch.zeros(100)
    >>> with MemoryGrowth(torch.device("cpu"), [here]) as growth:
    ...     large = here.view(10, 10).repeat(2, 1)
    ...     now_bytes = growth.bytes
    ...     both = torch.cat([large, large])
    >>> now_bytes, growth.peak_bytes
    (800, 2400)
    """

    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        """Prepare to count. `held` are existing tensors that stay; a GPU's allocator knows them already."""
        self._device = device
        self._alive = LiveTensorCounter(held)
        self._before_bytes = self._alive.bytes
        self.peak_bytes = 0
        """Largest growth; set at the end of the context."""

    @property
    def bytes(self) -> int:
        """Growth up to now, in bytes."""
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
    """Return whether Python or torch has raised `failure` because memory is exhausted."""
    # Torch has no common class for this: CUDA raises OutOfMemoryError, the CPU's allocator a plain RuntimeError.
    return isinstance(failure, MemoryError) or (isinstance(failure, RuntimeError) and "memory" in str(failure).lower())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
