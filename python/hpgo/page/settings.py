"""Settings of the page that compares schedules: parse and check an address, and simulate its timelines."""

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
_MAX_SCHEDULES = 12
"""Limit on the schedules of one page. Not tuned."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a simulation and its picture, over all schedules and steps."""

    actions: int
    ranks: int

    def within(self, maximum: Size) -> bool:
        """Return whether neither number exceeds that of `maximum`."""
        return self.actions <= maximum.actions and self.ranks <= maximum.ranks


MAX_SIZE = Size(actions=2_000_000, ranks=10_000)
"""Limit of the page. A rank takes more time than an action, because it has a row, a label and measures. Not tuned."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings in an address: the simulation, and options of its picture."""

    setup: SimulationConfig = field(default_factory=SimulationConfig)
    schedule: tuple[ScheduleName, ...] = ()
    """Names of schedules; empty means the schedule of the plan, or 1f1b without a plan."""
    plan: str = ""
    transfers: str = "none"
    memory: bool = False
    critical_path: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of the picture."""
        return {"transfers": self.transfers, "memory": self.memory, "critical_path": self.critical_path}


LABELS = {
    "schedule": "Schedules",
    "plan": "Plan",
    "file": "Load a plan",
    "num_stages": "Ranks",
    "num_batches": "Micro-batches",
    "virtual_stages_per_rank": "Virtual stages per rank",
    "group_size": "Group size",
    "activation_limit": "Activation limit",
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
"""Labels of fields, on the page and in its errors."""
RENAMED = {"link_time": "transfer_time", "fused_times": "overlapped_times"}
"""New names of fields in old addresses."""


def settings_of(items: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings in the fields of an address.

    Raises SettingError, with the label of the field and its allowed values, and ArgumentError for an unknown field.
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
            # A schedule that is chosen twice is drawn once.
            drawn[name] = tuple(dict.fromkeys(filled))
        elif filled and name in FIELDS:
            asks[name] = from_text(name, filled[-1], LABELS[name])
            if name == "comm":
                _choice(tuple(COMMUNICATION), name, filled[-1])
        elif filled:
            drawn[name] = _READERS[name](name, filled[-1])
    settings = Settings(SimulationConfig(**asks), **drawn)
    if len(settings.schedule) > _MAX_SCHEDULES:
        few = f"choose at most {_MAX_SCHEDULES}"
        raise SettingError(f"{len(settings.schedule)} schedules are chosen", few, "schedule")
    if "schedule" in asked and not settings.schedule and not settings.plan:
        raise SettingError("no schedule is chosen", "choose one, or several to compare them", "schedule")
    # The size of a plan is known only after it is read.
    if not settings.plan:
        size_of(settings)
    return settings


def size_of(settings: Settings, planned: Size | None = None) -> Size:
    """Return the size of `settings`, where `planned` is a step of their plan. ArgumentError beyond `MAX_SIZE`."""
    setup = settings.setup
    if planned is None:
        planned = Size(2 * setup.ranks * setup.micro_batches * (setup.virtual_stages_per_rank or 1), setup.ranks)
    schedules = max(1, len(settings.schedule))
    size = Size(planned.actions * schedules * setup.iterations, planned.ranks * schedules)
    for asked, maximum, what in (
        (size.actions, MAX_SIZE.actions, "about {:,} actions"),
        (size.ranks, MAX_SIZE.ranks, "{:,} ranks"),
    ):
        if asked > maximum:
            raise ArgumentError(
                f"the settings need {what.format(asked)}, but the limit of the page is {maximum:,}",
                "use `hpgo simulate` or `hpgo view`, which have no such limit",
            )
    return size


def called(name: str) -> str:
    """Return the label of a field, as errors show it."""
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
    """Return one timeline per schedule. Raises HpgoError for a schedule that is unknown or can't run."""
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
    """Return the error of a schedule or of one of its options, with the labels of the page."""
    if isinstance(error, SettingError):
        return error
    message, hint = error.message, error.hint
    blamed = "schedule"
    # Errors of the library name its options, but the page has labels.
    for option in OPTIONS:
        if f"`{option}`" in message + hint:
            blamed = option
            message, hint = (text.replace(f"`{option}`", called(option)) for text in (message, hint))
    return SettingError(message, hint, blamed)


def one_step(plan: Plan) -> Size:
    """Return the size of one step of `plan`."""
    return Size(2 * len(plan.stages) * plan.micro_batches, len(plan.stages))


def numbers_of(plan: Plan) -> dict[str, str]:
    """Return the values of `plan` for the fields that it sets, and its schedule."""
    program = plan.program()
    costs, memory = program.costs, program.costs.memory if program.costs else None
    texts = {
        "schedule": plan.schedule,
        "num_stages": str(program.schedule.ranks),
        "num_batches": str(plan.micro_batches),
        "virtual_stages_per_rank": str(plan.virtual_stages_per_rank),
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
"""Fields that a plan sets."""


def _seconds(times_s: ArrayLike | None) -> str:
    return _each([f"{time_s:.4g}" for time_s in _numbers(times_s)])


def _bytes(sizes: ArrayLike | None) -> str:
    return _each([format_bytes(size) for size in _numbers(sizes)])


def _numbers(values: ArrayLike | None) -> list[float]:
    import numpy as np

    return [] if values is None else np.ravel(np.asarray(values, float)).tolist()


def _each(texts: list[str]) -> str:
    """Return one text if all are equal, or else all texts."""
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])


@dataclass
class Plans:
    """Plans by a name that is a digest of the file's content."""

    held: dict[str, Plan] = field(default_factory=dict)
    """Plan for each name in addresses."""

    def add(self, body: bytes, title: str) -> str:
        """Add the JSON of a plan and return its name. Raises HpgoError for other text and plans beyond `MAX_SIZE`."""
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
        """Return the plan of that name. Raises ArgumentError if it is unknown."""
        if name not in self.held:
            raise unknown_plan(name)
        return self.held[name]


def unknown_plan(name: str) -> SettingError:
    """Return the error for an unknown name of a plan."""
    return SettingError(f"this server holds no plan `{shorten(name)}`", "load the plan's file again", "plan")
