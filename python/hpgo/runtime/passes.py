"""Context of the forward pass that is running: its step and its samples, for layers that draw or keep statistics.

An engine sets it around each forward pass. A module that needs it outside of one raises ArgumentError.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_SEED = 2**63 - 1
"""Largest seed, for initial weights, for random numbers of layers and for the order of a data set."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of some rows through some layers."""

    step: int
    samples: range
    """Numbers of the rows in the global batch of the step."""
    again: bool = False
    """Whether it repeats a pass to recompute activations for the backward pass."""
    calls: Counter[object] = field(default_factory=Counter)
    """Number of draws of each module in this pass."""


# Per thread, because other threads, such as loaders, may run modules at the same time.
_running = threading.local()


@contextmanager
def running(*, step: int, samples: range, again: bool = False) -> Iterator[Pass]:
    """Set the pass within this context: `samples` of `step`, possibly `again` for recomputation.

    >>> with running(step=3, samples=range(8, 11)) as one:
    ...     print(current() is one, len(current().samples))
    True 3
    """
    # Restore the outer pass: a recomputation may run within another pass.
    before = getattr(_running, "one", None)
    _running.one = Pass(step, samples, again)
    try:
        yield _running.one
    finally:
        _running.one = before


def current() -> Pass:
    """Return the pass that is running in this thread. Raise ArgumentError if none is."""
    one: Pass | None = getattr(_running, "one", None)
    if one is None:
        raise ArgumentError(
            "a layer that draws random numbers for each sample runs outside of a pass, so its samples are unknown",
            "call it within `hpgo.runtime.passes.running(step=…, samples=…)`, or set it to `eval()`",
        )
    return one


def begin_layers() -> None:
    """Count draws from 0 again, because the layers that run now have not run in this pass before."""
    one: Pass | None = getattr(_running, "one", None)
    if one is not None:
        one.calls.clear()


def is_again() -> bool:
    """Return whether the running pass repeats one, for recomputation."""
    one: Pass | None = getattr(_running, "one", None)
    return one is not None and one.again
