"""Addresses of the plan page: a planning problem and the changes of the user. Undo and sharing use addresses.

The problem is a plan file (`plan`), or a model, a cluster and a batch. Changes are further fields: stages, by indices
of layers and numbers of devices (`0-31@0-7,32-52@8-15`), schedule, micro-batch size and recomputation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, shorten
from hpgo.base.units import parse_bytes
from hpgo.errors import ArgumentError
from hpgo.page.settings import MAX_SIZE, Size
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpgo.planning.plans import Plan

RECOMPUTE: dict[str, bool | str] = {"no": False, "yes": True, "auto": "auto"}
RECOMPUTE_NAMES = {value: name for name, value in RECOMPUTE.items()}
_MAX_LENGTH = 64 * 1024
"""Limit on the characters of a field."""
_MAX_NUMBERS = 2**17
"""Limit on the layers and devices in a field, against short texts for huge ranges."""
_RUN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", re.ASCII)
_STAGES = "write each stage as indices of layers and devices: `0-25@0-7,26-52@8-15`"

Rows = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Layers of each stage, by their index in the profile, and its devices."""


@dataclass(frozen=True, slots=True)
class PlanAddress:
    """Values of an address; None for those that it does not set."""

    plan: str = ""
    """Name of a plan on the server, which sets model, cluster and settings."""
    model: str = ""
    """A built-in model, or the name of a profile on the server."""
    cluster: str = ""
    """A built-in cluster, or the name of a cluster on the server."""
    batch: int | None = None
    devices: int | None = None
    """Number of the cluster's first devices to use."""
    optimizer: str = ""
    shard: bool = False
    reserve_bytes: float = 0.0
    stages: Rows = ()
    micro_batch: int | None = None
    schedule: str = ""
    recompute: bool | str | None = None
    regroup: bool = False
    """Whether stages are cut again if the schedule needs another number of them per group of devices."""
    width_px: int = 1200
    """Width of the picture of the step, in pixels."""

    @property
    def question(self) -> tuple[object, ...]:
        """The planning problem, which stays the same while a plan is changed."""
        return (
            self.plan, self.model, self.cluster, self.batch, self.devices, self.optimizer, self.shard,
            self.reserve_bytes,
        )  # fmt: skip

    @property
    def is_changed(self) -> bool:
        """Whether the address changes anything in a plan file."""
        return bool(
            self.stages
            or self.micro_batch
            or self.schedule
            or self.recompute is not None
            or self.batch is not None
            or self.devices is not None
        )


def asked_of(items: Iterable[tuple[str, str]]) -> PlanAddress:
    """Return the values of an address. Raises ArgumentError with the field and its allowed values."""
    read: dict[str, Any] = {}
    for name, text in items:
        if name not in _READERS:
            raise ArgumentError(f"unknown field `{shorten(name)}`", did_you_mean(name, _READERS), code="unknown_name")
        if len(text) > _MAX_LENGTH:
            raise ArgumentError(f"`{name}` has {len(text):,} characters, but at most {_MAX_LENGTH:,} are allowed", "")
        # Forms send empty fields, which mean that nothing is set.
        if text.strip():
            field, reader = _READERS[name]
            read[field] = reader(name, text.strip())
    asked = PlanAddress(**read)
    if not asked.plan:
        for name, given in (("model", asked.model), ("cluster", asked.cluster), ("batch", asked.batch)):
            if not given:
                raise ArgumentError(f"the address has no {name}", "give a model, a cluster and a batch, or a plan")
    return asked


def drawn_size(items: Iterable[tuple[str, str]], planned: Size | None) -> Size:
    """Return the size of the picture for an address, where `planned` is the size of its plan. Raises as `asked_of`."""
    asked = asked_of(items)
    stages = len(asked.stages) or (planned.ranks if planned else 1)
    if asked.micro_batch is None or asked.batch is None:
        # Without both numbers, assume the micro-batches of the plan, or the largest possible number.
        each = (
            planned.actions // planned.ranks
            if planned and not asked.micro_batch
            else 2 * (asked.batch or MAX_SIZE.actions)
        )
    else:
        each = 2 * (asked.batch // asked.micro_batch)
    return Size(stages * each, stages)


def changes_of(plan: Plan, places: dict[str, int]) -> dict[str, str]:
    """Return the fields of an address that lead to `plan`; `places` are indices of layers in the profile."""
    rows = [([places[layer] for layer in stage.layers], list(stage.devices)) for stage in plan.stages]
    return {
        "stages": stages_text(rows),
        "micro_batch": str(plan.pipeline_micro_batch_size),
        "schedule": plan.schedule,
        "recompute": RECOMPUTE_NAMES[plan.recompute],
    }


def stages_text(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Return stages in the format of addresses.

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
        if named > _MAX_NUMBERS:
            raise ArgumentError(
                f"`{name}` has more than {_MAX_NUMBERS:,} layers and devices",
                "use `hpgo plan`, which has no such limit",
                code="too_large",
            )
        rows.append(row)
    return tuple(rows)


def _numbers(stage: int, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for word in text.split("+"):
        run = _RUN.fullmatch(word)
        first, last = (int(run[1]), int(run[2] or run[1])) if run else (1, 0)
        if not first <= last <= first + _MAX_NUMBERS:
            raise ArgumentError(f"stage {stage} has `{shorten(word)}`, which is not a range of numbers", _STAGES)
        numbers += range(first, last + 1)
        if len(numbers) > _MAX_NUMBERS:
            break  # The caller raises the error.
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
