"""Processes of tests that are the ranks of something, forked from one that has loaded torch."""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

FORK = multiprocessing.get_context("fork")


def run_ranks(world: int, run: Callable[..., None], *given: Any) -> NoReturn:
    """Calls `run` as each rank, with its number first, and ends with the worst of their exit codes.

    Torch is imported once so, with what it loads when something first runs on meta; nothing may have run yet.
    """
    import torch._dynamo  # noqa: F401

    ranks = [FORK.Process(target=run, args=(rank, *given)) for rank in range(world)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))
