"""`hpgo run --elastic`: under which plan the ranks go on that are there, and how they leave when others come."""

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
_LOOK_S = 0.1


def check(*, checkpoint: str | None, every: int | None, launched: bool) -> None:
    """Raises UsageError for options that don't go together, and without a launcher."""
    if checkpoint is None or every is None:
        raise click.UsageError(
            "`--elastic` needs `--checkpoint FOLDER --every N`: what a lost machine had not saved is done again"
        )
    if not launched:
        raise click.UsageError(
            "`--elastic` needs torchrun, which starts ranks again:"
            " `torchrun --nnodes 3:4 --max-restarts 20 … -m hpgo run …`"
        )


@contextmanager
def asked_by_its_own() -> Iterator[None]:
    """A rank that ends because others were asked to waits until its own launcher asks it, for some seconds at most.

    Each agent of torchrun looks once a second whether a machine waits to join. It counts a rank that has ended before
    that as a failure, and there may be no more than `--max-restarts` of these.
    """
    from hpgo.runtime import guards
    from hpgo.runtime.preemption import Preempted

    try:
        yield
    except Preempted:
        notice, until_s = guards.notice(), time.monotonic() + _LINGER_S
        while notice is not None and not notice.is_given and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        raise


def told(file: str, settled: ElasticPlan) -> str:
    """Which plan is run, in one line."""
    ranks = pluralize(settled.ranks, "rank")
    if settled.planned_s is None:
        return f"{ranks}: the plan of {file}"
    stages = settled.plan.stages
    replicas = ", ".join(str(stage.replicas) for stage in stages)
    return (
        f"{ranks}: planned again in {format_seconds(settled.planned_s)}, {pluralize(len(stages), 'stage')} of"
        f" {replicas} devices"
    )


def document(settled: ElasticPlan) -> dict[str, Any]:
    """The same, as JSON has it."""
    return {"ranks": settled.ranks, "planned_s": settled.planned_s}
