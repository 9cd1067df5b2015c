"""The losses of a run in a file, to which runs that go on add theirs."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hpgo.base.files import as_path, refused
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Add = Callable[[int, float, float], None]


@contextmanager
def losses_to(file: str, ranks: int) -> Iterator[Add]:
    """Gives a function of step, loss and seconds, which adds them to `file` as a line of JSON.

    Raises ArgumentError for a file that can't be written to; one that no longer can be, on a full disk say, is told
    once, and the run goes on.
    """
    path = as_path(file, ArgumentError)
    hint = "name a file in a folder that exists"
    try:
        out = path.open("a", encoding="utf-8")
    except (OSError, ValueError) as failure:
        raise refused("write", path, failure, ArgumentError, hint) from None
    is_open = True

    def add(step: int, loss: float, step_s: float) -> None:
        nonlocal is_open
        if not is_open:
            return
        row = {"step": step, "loss": loss, "step_s": step_s, "ranks": ranks, "ended_s": time.time()}
        try:
            out.write(json.dumps(row) + "\n")
            out.flush()  # whoever is killed has said what it did
        except OSError as failure:
            is_open = False
            say("warning", f"{refused('write', path, failure, ArgumentError, hint).message}; the run goes on")

    try:
        yield add
    finally:
        with suppress(OSError):  # of what was told already
            out.close()
