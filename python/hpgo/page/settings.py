"""Settings of the page: what an address asks for, checked, and the timelines that it means."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.base.wording import near, shorten
from hpgo.timing.runs import order_of, run, run_program
from hpgo.timing.setup import FIELDS, Setup, from_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName
    from hpgo.timing.timeline import Timeline


TRANSFERS = ("none", "arrows", "lanes")
_MOST_SCHEDULES = 12


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is to simulate and to draw, over all schedules and steps."""

    actions: int
    ranks: int

    def within(self, most: Size) -> bool:
        """Whether neither number is larger than that of `most`."""
        return self.actions <= most.actions and self.ranks <= most.ranks


MOST = Size(actions=2_000_000, ranks=10_000)
"""What the page takes. A rank costs more than an action: it has a row, a label and a line of measures."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one address asks for: a run, in the fields of `Setup`, and how it is drawn."""

    setup: Setup = field(default_factory=Setup)
    schedule: tuple[ScheduleName, ...] = ()
    """None is the plan's own, or 1f1b."""
    plan: str = ""
    transfers: str = "none"
    memory: bool = False
    critical_path: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The choices that concern the picture."""
        return {"transfers": self.transfers, "memory": self.memory, "critical_path": self.critical_path}


RENAMED = {"link_time": "transfer_time", "fused_times": "overlapped_times"}
"""Fields in addresses that were kept or sent before, and what they are called now."""


def settings_of(items: Iterable[tuple[str, str]]) -> Settings:
    """Reads the pairs of an address.

    Raises ArgumentError that names the field and what it takes.
    """
    asked: dict[str, list[str]] = {}
    for typed, text in items:
        name = RENAMED.get(typed, typed)
        if name not in FIELDS and name not in _READERS:
            raise ArgumentError(f"unknown field `{shorten(name)}`", near(name, [*FIELDS, *_READERS]))
        asked.setdefault(name, []).append(text.strip())
    asks: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for name, texts in asked.items():
        filled = [text for text in texts if text]
        if name == "schedule":
            drawn[name] = tuple(dict.fromkeys(filled))
        elif filled and name in FIELDS:
            asks[name] = from_text(name, filled[-1], name)
        elif filled:
            drawn[name] = _READERS[name](name, filled[-1])
    settings = Settings(Setup(**asks), **drawn)
    if len(settings.schedule) > _MOST_SCHEDULES:
        raise ArgumentError(f"{len(settings.schedule)} schedules are asked for", f"choose at most {_MOST_SCHEDULES}")
    if not settings.plan:
        size_of(settings)
    return settings


def size_of(settings: Settings, planned: Size | None = None) -> Size:
    """How much `settings` ask for; `planned` is one step of their plan. Raises ArgumentError if it is beyond `MOST`."""
    setup = settings.setup
    if planned is None:
        planned = Size(2 * setup.ranks * setup.micro_batches * (setup.chunks or 1), setup.ranks)
    schedules = max(1, len(settings.schedule))
    size = Size(planned.actions * schedules * setup.iterations, planned.ranks * schedules)
    for asked, most, what in (
        (size.actions, MOST.actions, "about {:,} actions"),
        (size.ranks, MOST.ranks, "{:,} ranks"),
    ):
        if asked > most:
            raise ArgumentError(
                f"that would be {what.format(asked)}; the page takes {most:,}",
                "`hpgo simulate` and `hpgo view` take more",
            )
    return size


def _choice(choices: tuple[str, ...], name: str, text: str) -> str:
    if text not in choices:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", near(text, choices))
    return text


def _flag(name: str, text: str) -> bool:
    return _choice(("1", "0"), name, text) == "1"


_READERS: dict[str, Any] = {
    "schedule": None,
    "plan": lambda _, text: text,
    "transfers": functools.partial(_choice, TRANSFERS),
    "memory": _flag,
    "critical_path": _flag,
}


def timelines(settings: Settings, plans: Plans) -> list[Timeline]:
    """What `settings` mean, one timeline a schedule; raises HpgoError where a schedule can't be had or run."""
    if settings.plan:
        plan = plans.get(settings.plan)
        size_of(settings, one_step(plan))
        return [run_program(settings.setup, plan.program(name)) for name in settings.schedule or (None,)]
    return [run(settings.setup, order_of(settings.setup, name)) for name in settings.schedule or ("1f1b",)]


def one_step(plan: Plan) -> Size:
    """How much one step of `plan` is."""
    return Size(2 * len(plan.stages) * plan.micro_batches, len(plan.stages))


@dataclass
class Plans:
    """Plans by a name that follows from the file's content."""

    held: dict[str, Plan] = field(default_factory=dict)
    """name in the address -> plan"""

    def add(self, body: bytes, title: str) -> str:
        """Takes a plan's JSON and returns its name in addresses; raises HpgoError if it is none, or beyond `MOST`."""
        from hpgo.planning.plans import Plan

        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise HpgoError(f"`{shorten(title)}` is not text", "choose a plan written by `hpgo plan`") from None
        plan = Plan.from_json(text, source=f"`{shorten(title)}`")
        size_of(Settings(), one_step(plan))
        name = hashlib.sha256(body).hexdigest()[:12]
        self.held[name] = plan
        return name

    def get(self, name: str) -> Plan:
        """The plan of that name; raises ArgumentError if it isn't held."""
        if name not in self.held:
            raise unknown_plan(name)
        return self.held[name]


def unknown_plan(name: str) -> ArgumentError:
    """Says that there is no plan of that name."""
    return ArgumentError(f"this server holds no plan `{shorten(name)}`", "load the plan's file again")
