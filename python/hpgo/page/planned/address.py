"""Addresses of the plan's page: a question, and what a reader changed. Undoing and sharing is going to an address.

A question is a plan's file (`plan`), or a model, a cluster and a batch. What is changed stands beside it: the stages by
the places of their layers in the profile and by their devices, `0-31@0-7,32-52@8-15`, and how they run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, shorten
from hpgo.base.units import parse_bytes
from hpgo.errors import ArgumentError
from hpgo.page.settings import MOST, Size
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpgo.planning.plans import Plan

RECOMPUTE: dict[str, bool | str] = {"no": False, "yes": True, "auto": "auto"}
_MOST_LENGTH = 64 * 1024
_MOST_NUMBERS = 2**17
_RUN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", re.ASCII)
_STAGES = "write each stage as places of layers and devices, like `0-25@0-7,26-52@8-15`"

Rows = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Layers of each stage, by their place in the profile, and its devices."""


@dataclass(frozen=True, slots=True)
class PlanAddress:
    """What an address asks for; None where it leaves a choice open."""

    plan: str = ""
    """Name on the shelf of the plan whose question it is; then model, cluster and settings are its own."""
    model: str = ""
    """A built-in one, or the name on the shelf of a profile."""
    cluster: str = ""
    """A preset, or the name on the shelf of a cluster."""
    batch: int | None = None
    devices: int | None = None
    """Only the first so many of the cluster."""
    optimizer: str = ""
    shard: bool = False
    reserve_bytes: float = 0.0
    stages: Rows = ()
    micro_batch: int | None = None
    schedule: str = ""
    recompute: bool | str | None = None
    regroup: bool = False
    """Whether stages are cut anew where the schedule runs others on each group of devices."""
    width_px: int = 1200
    """Of the timeline's picture."""

    @property
    def question(self) -> tuple[object, ...]:
        """What stays the same while a plan is changed."""
        return (
            self.plan, self.model, self.cluster, self.batch, self.devices, self.optimizer, self.shard,
            self.reserve_bytes,
        )  # fmt: skip

    @property
    def is_changed(self) -> bool:
        """Whether it is more than a plan's file as it is."""
        return bool(
            self.stages
            or self.micro_batch
            or self.schedule
            or self.recompute is not None
            or self.batch is not None
            or self.devices is not None
        )


def asked_of(items: Iterable[tuple[str, str]]) -> PlanAddress:
    """Reads the pairs of an address. Raises ArgumentError that names the field and what it takes."""
    read: dict[str, Any] = {}
    for name, text in items:
        if name not in _READERS:
            raise ArgumentError(f"unknown field `{shorten(name)}`", did_you_mean(name, _READERS), code="unknown_name")
        if len(text) > _MOST_LENGTH:
            raise ArgumentError(f"`{name}` has {len(text):,} letters", f"give at most {_MOST_LENGTH:,}")
        if text.strip():
            field, reader = _READERS[name]
            read[field] = reader(name, text.strip())
    asked = PlanAddress(**read)
    if not asked.plan:
        for name, given in (("model", asked.model), ("cluster", asked.cluster), ("batch", asked.batch)):
            if not given:
                raise ArgumentError(f"the address names no {name}", "give a model, a cluster and a batch, or a plan")
    return asked


def drawn_size(items: Iterable[tuple[str, str]], planned: Size | None) -> Size:
    """How much of a step an address has to draw; `planned` is that of the plan it names. Raises as `asked_of`."""
    asked = asked_of(items)
    stages = len(asked.stages) or (planned.ranks if planned else 1)
    if asked.micro_batch is None or asked.batch is None:
        # As many micro-batches as its plan, or as many as there may be.
        each = (
            planned.actions // planned.ranks if planned and not asked.micro_batch else 2 * (asked.batch or MOST.actions)
        )
    else:
        each = 2 * (asked.batch // asked.micro_batch)
    return Size(stages * each, stages)


def changes_of(plan: Plan, places: dict[str, int]) -> dict[str, str]:
    """The fields of an address that make `plan` of its question; `places` says where layers stand in the profile."""
    rows = [([places[layer] for layer in stage.layers], list(stage.devices)) for stage in plan.stages]
    return {
        "stages": stages_text(rows),
        "micro_batch": str(plan.micro_batch_size),
        "schedule": plan.schedule,
        "recompute": "yes" if plan.recompute else "no",
    }


def stages_text(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Stages as an address has them.

    >>> stages_text([([0, 1, 2], [0, 1]), ([3, 5], [2, 4])])
    '0-2@0-1,3+5@2+4'
    """
    return ",".join(f"{_runs_text(layers)}@{_runs_text(devices)}" for layers, devices in rows)


def _runs_text(numbers: Sequence[int]) -> str:
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _stages(name: str, text: str) -> Rows:
    rows = []
    named = 0
    for at, word in enumerate(text.split(",")):
        layers, between, devices = word.partition("@")
        if not between:
            raise ArgumentError(f"stage {at} is `{shorten(word)}`", _STAGES)
        row = _numbers(at, layers), _numbers(at, devices)
        named += sum(map(len, row))
        if named > _MOST_NUMBERS:
            raise ArgumentError(
                f"`{name}` names more than {_MOST_NUMBERS:,} layers and devices",
                "`hpgo plan` takes more",
                code="too_large",
            )
        rows.append(row)
    return tuple(rows)


def _numbers(stage: int, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in text.split("+"):
        run = _RUN.fullmatch(word)
        first, last = (int(run[1]), int(run[2] or run[1])) if run else (1, 0)
        if not first <= last <= first + _MOST_NUMBERS:
            raise ArgumentError(f"stage {stage} has `{shorten(word)}`, which is no range of numbers", _STAGES)
        numbers += range(first, last + 1)
        if len(numbers) > _MOST_NUMBERS:
            break  # whoever asked for these is told so
    return tuple(numbers)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", "give a whole number from 1 to 999,999,999")
    return int(text)


def _recompute(name: str, text: str) -> bool | str:
    return RECOMPUTE[_choice(name, text, RECOMPUTE)]


def _flag(name: str, text: str) -> bool:
    return _choice(name, text, ("0", "1")) == "1"


def _optimizer(name: str, text: str) -> str:
    return _choice(name, text, OPTIMIZERS)


def _choice(name: str, text: str, known: Iterable[str]) -> str:
    if text not in known:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", did_you_mean(text, known))
    return text


def _width(name: str, text: str) -> int:
    return min(4000, max(320, _count(name, text)))


def _size(_: str, text: str) -> float:
    return parse_bytes(text)


def _text(_: str, text: str) -> str:
    return text


_READERS: dict[str, tuple[str, Any]] = {
    "plan": ("plan", _text),
    "model": ("model", _text),
    "cluster": ("cluster", _text),
    "batch": ("batch", _count),
    "devices": ("devices", _count),
    "optimizer": ("optimizer", _optimizer),
    "shard": ("shard", _flag),
    "reserve": ("reserve_bytes", _size),
    "stages": ("stages", _stages),
    "micro_batch": ("micro_batch", _count),
    "schedule": ("schedule", _text),
    "recompute": ("recompute", _recompute),
    "regroup": ("regroup", _flag),
    "width": ("width_px", _width),
}
