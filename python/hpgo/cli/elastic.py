"""Option `hpgo run --elastic`: checks, messages, and the end of ranks before torchrun starts them again."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.messages import pluralize
from hpgo.base.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.runtime.train.elastic import ElasticPlan

_LINGER_S = 5.0
"""Longest time that a rank waits for its launcher. Not tuned: the agents of torchrun poll once per second."""
_POLL_S = 0.1


def check(*, checkpoint: str | None, every: int | None, launched: bool) -> None:
    """Raise UsageError if options are missing that `--elastic` needs, or if no launcher started this process."""
    if checkpoint is None or every is None:
        raise click.UsageError(
            "`--elastic` needs `--checkpoint FOLDER --every N`: steps after the last checkpoint are repeated"
        )
    if not launched:
        raise click.UsageError(
            "`--elastic` needs torchrun, which restarts ranks:"
            " `torchrun --nnodes 3:4 --max-restarts 20 … -m hpgo run …`"
        )


@contextmanager
def wait_for_launcher() -> Iterator[None]:
    """Before a rank ends because others were preempted, wait until its own launcher asks it to, for at most 5 s.

    Each agent of torchrun checks once per second whether a node waits to join. It counts a rank that ended before this
    check as a failure, and stops the job after `--max-restarts` failures.
    """
    from hpgo.runtime import guards
    from hpgo.runtime.preemption import Preempted

    try:
        yield
    except Preempted:
        notice, until_s = guards.notice(), time.monotonic() + _LINGER_S
        while notice is not None and not notice.is_given and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        raise


def describe(file: str, settled: ElasticPlan) -> str:
    """Return one line about the plan that runs."""
    ranks = pluralize(settled.ranks, "rank")
    if settled.planned_s is None:
        return f"{ranks}: running the plan of {file}"
    stages = settled.plan.stages
    replicas = ", ".join(str(stage.replicas) for stage in stages)
    return (
        f"{ranks}: planned again in {format_seconds(settled.planned_s)}, {pluralize(len(stages), 'stage')} of"
        f" {replicas} devices"
    )


def document(settled: ElasticPlan) -> dict[str, Any]:
    """Return the keys of an elastic run in the JSON result."""
    return {"ranks": settled.ranks, "planned_s": settled.planned_s}
