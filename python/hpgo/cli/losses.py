"""Files of JSON lines about steps, to which resumed runs append."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hpgo.base.files import as_path, refused
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Add = Callable[[int, float, float], None]


@contextmanager
def losses_to(file: str, ranks: int) -> Iterator[Add]:
    """Yield a function of step, loss and seconds that appends a line of JSON to `file`. Raises like `lines_to`."""
    with lines_to(file) as add:
        yield lambda step, loss, step_s: add(
            {"step": step, "loss": loss, "step_s": step_s, "ranks": ranks, "ended_s": time.time()}
        )


@contextmanager
def lines_to(file: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that appends an object as a line of JSON to `file`.

    Raises ArgumentError if the file can't be opened. If writing fails later, for instance on a full disk, a warning is
    printed once and the run continues.
    """
    path = as_path(file, ArgumentError)
    hint = "use a file in an existing folder"
    try:
        out = path.open("a", encoding="utf-8")
    except (OSError, ValueError) as failure:
        raise refused("write", path, failure, ArgumentError, hint) from None
    is_open = True

    def add(row: dict[str, Any]) -> None:
        nonlocal is_open
        if not is_open:
            return
        try:
            out.write(json.dumps(row) + "\n")
            out.flush()  # A run that is killed must leave the losses of all its steps.
        except OSError as failure:
            is_open = False
            say("warning", f"{refused('write', path, failure, ArgumentError, hint).message}; the run continues")

    try:
        yield add
    finally:
        with suppress(OSError):  # The warning was printed already.
            out.close()
