"""Which pass is running: of which step, over which samples. Layers that draw or keep statistics ask here.

An engine says it around each forward pass; a module that asks while nobody has said it raises.
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


MOST_SEED = 2**63 - 1
"""Of first weights, of what layers draw, and of the order of a data set."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of some rows through some layers."""

    step: int
    samples: range
    """Numbers of the rows in the step's global batch."""
    again: bool = False
    """Whether it repeats a pass, so that its backward pass has activations to work on."""
    calls: Counter[object] = field(default_factory=Counter)
    """How often each module has drawn in this pass."""


_running = threading.local()


@contextmanager
def running(*, step: int, samples: range, again: bool = False) -> Iterator[Pass]:
    """Within it, layers know that they run `samples` of `step`, possibly `again`, for recomputation.

    >>> with running(step=3, samples=range(8, 11)) as one:
    ...     print(current() is one, len(current().samples))
    True 3
    """
    before = getattr(_running, "one", None)
    _running.one = Pass(step, samples, again)
    try:
        yield _running.one
    finally:
        _running.one = before


def current() -> Pass:
    """The pass that is running in this thread; raises ArgumentError if none is."""
    one: Pass | None = getattr(_running, "one", None)
    if one is None:
        raise ArgumentError(
            "a layer that draws for each sample runs, but nobody said which samples",
            "call it within `hpgo.runtime.passes.running(step=…, samples=…)`, or set it to `eval()`",
        )
    return one


def begin_layers() -> None:
    """Counts draws from 0 again: the layers that run now have not run in this pass before."""
    one: Pass | None = getattr(_running, "one", None)
    if one is not None:
        one.calls.clear()


def is_again() -> bool:
    """Whether a pass is running that repeats one."""
    one: Pass | None = getattr(_running, "one", None)
    return one is not None and one.again
