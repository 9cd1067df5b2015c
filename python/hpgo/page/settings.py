"""Settings of the page: what an address asks for, checked, and the timelines that it means."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, shorten
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError
from hpgo.timing.config import FIELDS, SettingError, SimulationConfig, from_text
from hpgo.timing.runs import BEYOND_A_PLAN, OPTIONS, order_of, run, run_program
from hpgo.timing.simulation import COMMUNICATION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.schedule import Schedule
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
    """What one address asks for: a run, in the fields of `SimulationConfig`, and how it is drawn."""

    setup: SimulationConfig = field(default_factory=SimulationConfig)
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


LABELS = {
    "schedule": "Schedules",
    "plan": "Plan",
    "file": "Load a plan",
    "num_stages": "Ranks",
    "num_batches": "Micro-batches",
    "chunks": "Chunks a rank",
    "group_size": "Group size",
    "cap": "Activations cap",
    "forward_times": "Forward",
    "backward_times": "Backward",
    "input_gradient_times": "Input gradient",
    "weight_gradient_times": "Weight gradient",
    "overlapped_times": "Fused F and B",
    "p2p_time": "Latency of a message",
    "transfer_time": "Time on the link",
    "gradient_sync_times": "Gradient sync",
    "optimizer_times": "Optimizer step",
    "iterations": "Steps",
    "comm": "Communication",
    "weight_bytes": "Weights and state",
    "activation_bytes": "A micro-batch keeps",
    "memory_cap": "Memory cap",
    "transfers": "Transfers",
    "memory": "Memory curves",
    "critical_path": "Critical path",
}
"""What the page calls its fields, in its errors too."""
RENAMED = {"link_time": "transfer_time", "fused_times": "overlapped_times"}
"""Fields in addresses that were kept or sent before, and what they are called now."""


def settings_of(items: Iterable[tuple[str, str]]) -> Settings:
    """Reads the pairs of an address.

    Raises SettingError that names the field as the page does, and what it takes; ArgumentError for an unknown field.
    """
    asked: dict[str, list[str]] = {}
    for typed, text in items:
        name = RENAMED.get(typed, typed)
        if name not in FIELDS and name not in _READERS:
            raise ArgumentError(
                f"unknown field `{shorten(name)}`", did_you_mean(name, [*FIELDS, *_READERS]), code="unknown_name"
            )
        asked.setdefault(name, []).append(text.strip())
    asks: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for name, texts in asked.items():
        filled = [text for text in texts if text]
        if name == "schedule":
            drawn[name] = tuple(dict.fromkeys(filled))
        elif filled and name in FIELDS:
            asks[name] = from_text(name, filled[-1], LABELS[name])
            if name == "comm":
                _choice(tuple(COMMUNICATION), name, filled[-1])
        elif filled:
            drawn[name] = _READERS[name](name, filled[-1])
    settings = Settings(SimulationConfig(**asks), **drawn)
    if len(settings.schedule) > _MOST_SCHEDULES:
        few = f"choose at most {_MOST_SCHEDULES}"
        raise SettingError(f"{len(settings.schedule)} schedules are asked for", few, "schedule")
    if "schedule" in asked and not settings.schedule and not settings.plan:
        raise SettingError("no schedule is chosen", "choose one, or several to compare them", "schedule")
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


def called(name: str) -> str:
    """The field `name`, as errors name it."""
    return f"`{LABELS[name]}`"


def _choice(choices: tuple[str, ...], name: str, text: str) -> str:
    if text not in choices:
        raise SettingError(f"{called(name)} is `{shorten(text)}`", did_you_mean(text, choices), name)
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
        return [_run_plan(settings.setup, plan, name) for name in settings.schedule or (None,)]
    return [run(settings.setup, _order(settings.setup, name), called=called) for name in settings.schedule or ("1f1b",)]


def _order(setup: SimulationConfig, name: ScheduleName) -> Schedule:
    try:
        return order_of(setup, name, called=called)
    except ArgumentError as error:
        raise _of_schedule(error) from None


def _run_plan(setup: SimulationConfig, plan: Plan, name: ScheduleName | None) -> Timeline:
    try:
        program = plan.program(name)
    except ArgumentError as error:
        raise _of_schedule(error) from None
    return run_program(setup, program, called=called)


def _of_schedule(error: ArgumentError) -> ArgumentError:
    """What is wrong with a schedule, or with an option of it, as the page calls both."""
    if isinstance(error, SettingError):
        return error
    message, hint = error.message, error.hint
    blamed = "schedule"
    for option in OPTIONS:
        if f"`{option}`" in message + hint:
            blamed = option
            message, hint = (text.replace(f"`{option}`", called(option)) for text in (message, hint))
    return SettingError(message, hint, blamed)


def one_step(plan: Plan) -> Size:
    """How much one step of `plan` is."""
    return Size(2 * len(plan.stages) * plan.micro_batches, len(plan.stages))


def numbers_of(plan: Plan) -> dict[str, str]:
    """What the fields say of which `plan` brings its own, by their names, and the schedule that it was made for."""
    program = plan.program()
    costs, memory = program.costs, program.costs.memory if program.costs else None
    texts = {
        "schedule": plan.schedule,
        "num_stages": str(program.schedule.ranks),
        "num_batches": str(plan.micro_batches),
        "chunks": str(plan.chunks),
    }
    if costs is not None:
        texts |= {
            "forward_times": _seconds(costs.forward_s),
            "backward_times": _seconds(costs.backward_s),
            "p2p_time": _seconds(costs.latency_s),
            "transfer_time": _seconds(costs.transfer_s),
            "gradient_sync_times": _seconds(costs.gradient_sync_s),
            "optimizer_times": _seconds(costs.optimizer_s),
            "memory_cap": _bytes(costs.memory_cap_bytes),
        }
    if memory is not None:
        import numpy as np

        held = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes)
        texts["weight_bytes"] = _bytes(sum((np.asarray(each, float) for each in held), np.zeros(1)))
        texts["activation_bytes"] = _bytes(memory.activation_bytes)
    return {name: texts.get(name, "") for name in ("schedule", *_OF_A_PLAN)}


_OF_A_PLAN = tuple(name for name in FIELDS if name not in {*BEYOND_A_PLAN.values(), "comm", "iterations"})
"""Fields for which a plan has numbers of its own."""


def _seconds(times_s: ArrayLike | None) -> str:
    return _each([f"{time_s:.4g}" for time_s in _numbers(times_s)])


def _bytes(sizes: ArrayLike | None) -> str:
    return _each([format_bytes(size) for size in _numbers(sizes)])


def _numbers(values: ArrayLike | None) -> list[float]:
    import numpy as np

    return [] if values is None else np.ravel(np.asarray(values, float)).tolist()


def _each(texts: list[str]) -> str:
    """One text for all, or each."""
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])


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
            raise SettingError(
                f"`{shorten(title)}` is not text", "choose a plan written by `hpgo plan`", "file"
            ) from None
        try:
            plan = Plan.from_json(text, source=f"`{shorten(title)}`")
            size_of(Settings(), one_step(plan))
        except ArgumentError as error:
            raise SettingError(error.message, error.hint, "file", code=error.code) from None
        name = hashlib.sha256(body).hexdigest()[:12]
        self.held[name] = plan
        return name

    def get(self, name: str) -> Plan:
        """The plan of that name; raises ArgumentError if it isn't held."""
        if name not in self.held:
            raise unknown_plan(name)
        return self.held[name]


def unknown_plan(name: str) -> SettingError:
    """Says that there is no plan of that name."""
    return SettingError(f"this server holds no plan `{shorten(name)}`", "load the plan's file again", "plan")
