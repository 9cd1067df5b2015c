"""Settings of the page: what an address asks for, checked, and the timelines that it means."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.base.units import parse_bytes
from hpgo.base.wording import near, shorten
from hpgo.programs.orders import Durations, schedule, schedules
from hpgo.timing.simulation import COMMUNICATION, StageBytes, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.timing.timeline import Timeline


TRANSFERS = ("none", "arrows", "lanes")
_MOST_SCHEDULES = 12
_MOST_ACTIONS = 2_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """What one address asks for. Field names are those of the address; the first five are the command line's too."""

    num_stages: int = 4
    """Ranks of the pipeline."""
    num_batches: int = 8
    """Micro-batches."""
    forward_times: tuple[float, ...] = (1.0,)
    """Seconds of one micro-batch on one rank: one number for all ranks, or one for each. Schedules with several chunks
    a rank divide it among them, so that all schedules do the same work."""
    backward_times: tuple[float, ...] = (2.0,)
    p2p_time: float = 0.0
    """Latency of a message."""
    link_time: float = 0.0
    """How long a message occupies its link."""
    input_gradient_times: tuple[float, ...] = ()
    """For schedules that split the backward; half of it if left out."""
    weight_gradient_times: tuple[float, ...] = ()
    fused_times: tuple[float, ...] = ()
    """A forward and a backward run as one; their sum if left out."""
    weight_bytes: float | None = None
    """Weights, gradients and optimizer state of one rank."""
    activation_bytes: float | None = None
    """What one micro-batch keeps on one rank until its backward."""
    memory_cap: float | None = None
    schedule: tuple[str, ...] = ()
    """None is the plan's own, or 1f1b."""
    chunks: int | None = None
    group_size: int | None = None
    cap: int | None = None
    comm: str = "link"
    plan: str = ""
    transfers: str = "none"
    memory: bool = False
    critical_path: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The choices that concern the picture."""
        return {"transfers": self.transfers, "memory": self.memory, "critical_path": self.critical_path}


def settings_of(items: Iterable[tuple[str, str]]) -> Settings:
    """Reads the pairs of an address.

    Raises ArgumentError that names the field and what it takes.
    """
    asked: dict[str, list[str]] = {}
    for name, text in items:
        if name not in Settings.__dataclass_fields__:
            raise ArgumentError(f"unknown field `{shorten(name)}`", near(name, Settings.__dataclass_fields__))
        asked.setdefault(name, []).append(text.strip())
    values: dict[str, Any] = {}
    for name, texts in asked.items():
        filled = [text for text in texts if text]
        if name == "schedule":
            values[name] = tuple(dict.fromkeys(filled))
        elif filled:
            values[name] = _READERS[name](name, filled[-1])
    settings = Settings(**values)
    if len(settings.schedule) > _MOST_SCHEDULES:
        raise ArgumentError(f"{len(settings.schedule)} schedules are asked for", f"choose at most {_MOST_SCHEDULES}")
    actions = 2 * settings.num_stages * settings.num_batches * (settings.chunks or 1) * max(1, len(settings.schedule))
    if actions > _MOST_ACTIONS and not settings.plan:
        raise ArgumentError(
            f"that would be about {actions:,} actions; the page takes {_MOST_ACTIONS:,}",
            "`hpgo simulate` and `hpgo view` take more",
        )
    return settings


def _count(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", "give a whole number from 1 on") from None
    if not 1 <= number <= 10**9:
        raise ArgumentError(f"`{name}` is {shorten(text)}", "give a whole number from 1 on")
    return number


def _times(name: str, text: str) -> tuple[float, ...]:
    times = tuple(_time(name, one) for one in text.replace(",", " ").split())
    if not times:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", "give seconds: one number, or one for each rank")
    return times


def _time(name: str, text: str) -> float:
    try:
        time_s = float(text)
    except ValueError:
        time_s = -1.0
    if not 0 <= time_s < float("inf"):
        raise ArgumentError(f"`{name}` holds `{shorten(text)}`", "give seconds: finite numbers from 0 on")
    return time_s


def _choice(choices: tuple[str, ...], name: str, text: str) -> str:
    if text not in choices:
        raise ArgumentError(f"`{name}` is `{shorten(text)}`", near(text, choices))
    return text


def _flag(name: str, text: str) -> bool:
    return _choice(("1", "0"), name, text) == "1"


_READERS: dict[str, Any] = {
    "num_stages": _count,
    "num_batches": _count,
    "chunks": _count,
    "group_size": _count,
    "cap": _count,
    "forward_times": _times,
    "backward_times": _times,
    "input_gradient_times": _times,
    "weight_gradient_times": _times,
    "fused_times": _times,
    "p2p_time": _time,
    "link_time": _time,
    "weight_bytes": lambda _, text: parse_bytes(text),
    "activation_bytes": lambda _, text: parse_bytes(text),
    "memory_cap": lambda _, text: parse_bytes(text),
    "comm": functools.partial(_choice, tuple(COMMUNICATION)),
    "transfers": functools.partial(_choice, TRANSFERS),
    "plan": lambda _, text: text,
    "memory": _flag,
    "critical_path": _flag,
}


def timelines(settings: Settings, plans: Plans) -> list[Timeline]:
    """What `settings` mean, one timeline a schedule; raises HpgoError where a schedule can't be had or run."""
    if settings.plan:
        plan = plans.get(settings.plan)
        return [simulate(plan, schedule=name, communication=settings.comm) for name in settings.schedule or (None,)]
    run = replace(settings, schedule=(), **Settings().options)  # what is drawn of a run doesn't change it
    return [_simulated(run, name) for name in settings.schedule or ("1f1b",)]


# The page asks for the same picture as a table, as SVG and as exports, one after the other.
@functools.lru_cache(maxsize=16)
def _simulated(settings: Settings, name: str) -> Timeline:
    import numpy as np

    for field_name in (name for name in _READERS if name.endswith("_times")):
        given = len(getattr(settings, field_name))
        if given not in {0, 1, settings.num_stages}:
            raise ArgumentError(
                f"`{field_name}` has {given} numbers, but there are {settings.num_stages} ranks",
                f"give 1 or {settings.num_stages}",
            )
    taken = {option for family in schedules() if family.name == name for option in family.options}
    options: dict[str, Any] = {
        option: getattr(settings, option)
        for option in ("chunks", "group_size", "cap")
        if option in taken and getattr(settings, option) is not None
    }
    backward = settings.backward_times
    input_gradient = settings.input_gradient_times or tuple(time_s / 2 for time_s in backward)
    weight_gradient = settings.weight_gradient_times or tuple(time_s / 2 for time_s in backward)
    order = schedule(name, ranks=settings.num_stages, micro_batches=settings.num_batches, **options)
    parts = order.chain_length // order.ranks

    def of_stages(times: tuple[float, ...]) -> Any:
        return np.broadcast_to(times, order.ranks)[np.array(order.rank_of_stage)] / parts

    if "durations" in taken:
        forward, inputs, weights = (
            tuple(map(float, of_stages(times))) for times in (settings.forward_times, input_gradient, weight_gradient)
        )
        durations = Durations(forward, inputs, weights, settings.p2p_time + settings.link_time)
        order = schedule(
            name, ranks=settings.num_stages, micro_batches=settings.num_batches, durations=durations, **options
        )

    def shared(size_bytes: float | None) -> float:
        return (size_bytes or 0.0) / parts

    known = settings.weight_bytes is not None or settings.activation_bytes is not None
    return simulate(
        order,
        forward_s=of_stages(settings.forward_times),
        backward_s=of_stages(backward),
        input_gradient_s=of_stages(input_gradient),
        weight_gradient_s=of_stages(weight_gradient),
        overlapped_s=of_stages(settings.fused_times) if settings.fused_times else None,
        transfer_s=settings.link_time,
        latency_s=settings.p2p_time,
        communication=settings.comm,
        memory=StageBytes(
            weights_bytes=shared(settings.weight_bytes), activation_bytes=shared(settings.activation_bytes)
        )
        if known
        else None,
        memory_cap_bytes=settings.memory_cap if known else None,
    )


@dataclass
class Plans:
    """Plans from the command line or loaded in the page, by a name that follows from the file's content."""

    held: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """name in the address -> (what people call it, plan)"""

    def add(self, body: bytes, title: str) -> str:
        """Takes a plan's JSON and returns its name in addresses; raises HpgoError if it is none."""
        from hpgo.planning.plans import Plan

        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise HpgoError(f"`{shorten(title)}` is not text", "choose a plan written by `hpgo plan`") from None
        name = hashlib.sha256(body).hexdigest()[:12]
        self.held[name] = (shorten(title), Plan.from_json(text, source=f"`{shorten(title)}`"))
        return name

    def get(self, name: str) -> Any:
        """The plan of that name; raises ArgumentError if this server doesn't hold it."""
        if name not in self.held:
            raise ArgumentError(f"this server holds no plan `{shorten(name)}`", "load the plan's file again")
        return self.held[name][1]
