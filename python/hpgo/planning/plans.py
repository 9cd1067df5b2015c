"""Plans: which device runs which layers, in how many micro-batches, how long a step takes, and how sure that is.

A `Plan` is plain numbers, without native or framework objects, so it can be pickled, compared and saved.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shown
from hpgo.planning import limits
from hpgo.programs.costs import Costs
from hpgo.programs.orders import Durations
from hpgo.programs.orders import schedule as build
from hpgo.programs.program import Program, program
from hpgo.programs.stages import Crossing, Stage  # noqa: TC001 -- `record` looks them up
from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    import os

    from hpgo.programs.orders import Schedule
    from hpgo.programs.ranks import RankProgram
    from hpgo.timing.timeline import Timeline

_VERSION = 1

STOPPED = ("deadline", "interrupt", "effort")
"""Why a search may end before its proof."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that people try first, and what it would give."""

    name: str
    step_s: float | None
    """None if it can't run."""
    stages: int
    micro_batch_size: int
    missing_bytes: float
    """Memory that a device lacks for it; 0 if it fits."""
    why: str
    """Why it is worse, in words."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """What a schedule would give for a question."""

    name: str
    step_s: float | None
    """Of the best plan that fits; None if none does."""
    peak_bytes: float | None
    """On the fullest device; None if no plan was found."""
    missing_bytes: float
    """Memory that a device lacks for it; 0 if it fits."""
    stages: int
    chunks: int
    """Stages on each device."""
    micro_batch_size: int
    planned: bool
    """Whether `hpgo.plan(schedule=name)` makes the plan; else the step is only there to compare."""
    why: str
    """What keeps its step from being shorter, or why there is none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to train: stages on devices, micro-batches, and the step that it is predicted to take.

    Times are seconds. `step_s` is the simulated step of `schedule`; no plan of the search space takes less than
    `lower_bound_s`, and `gap` is the share by which the plan may miss it.
    """

    profile: str
    cluster: str
    schedule: str
    global_batch_size: int
    micro_batch_size: int
    recompute: bool
    stages: tuple[Stage, ...]
    step_s: float
    one_device_step_s: float
    """The same step on one device that has memory enough."""
    cluster_devices: int
    """Devices of the cluster, idle ones included."""
    lower_bound_s: float | None = None
    """None for a plan that was priced, not searched for."""
    alternatives: tuple[Alternative, ...] = ()
    schedules: tuple[ScheduleChoice, ...] = ()
    """What each schedule would give, best first; empty unless `auto` compared them."""
    cuts: str = "all"
    """Which cut points were tried: all, or why only those of one order of the layers."""
    placements: str = "all"
    """Which placements were tried: all, or compact ones."""
    stopped: str | None = None
    """Why the search ended with better plans possible: `deadline`, `interrupt` (Ctrl-C), or `effort`, a limit of its
    own on how much it looks at; None if it ran to its end."""
    labels: int = 0
    """Partial plans that the search looked at."""
    loading_s: float = 0.0
    """Seconds in which the profile's slowest input layer loads one batch of the profile; not part of the step."""
    simulated: int = 0
    """Plans that it simulated."""
    machines: tuple[int, ...] = ()
    """Devices of each machine of the cluster; empty in files that don't say."""
    crossings: tuple[tuple[Crossing, ...], ...] = ()
    """For each stage but the last, what it gives to later ones; empty in files that don't say."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def gap(self) -> float | None:
        """How much longer than the lower bound the step may be: 0.02 is two percent; 0 proves the plan optimal."""
        if self.lower_bound_s is None:
            return None
        return max(0.0, _ratio(self.step_s, self.lower_bound_s) - 1)

    @property
    def samples_per_s(self) -> float:
        """Throughput; infinite if nothing takes time."""
        return _ratio(self.global_batch_size, self.step_s)

    @property
    def speed_up(self) -> float:
        """Over one device with memory enough."""
        return _ratio(self.one_device_step_s, self.step_s)

    @property
    def bubble(self) -> float:
        """Share of the step in which the plan's devices don't compute."""
        busy_s = sum(s.replicas * (s.forward_s + s.backward_s) for s in self.stages) * self.micro_batches
        return 1 - _ratio(busy_s, self.devices * self.step_s)

    @property
    def finished(self) -> bool:
        """Whether neither a deadline nor Ctrl-C stopped the search; `stopped` says more."""
        return self.stopped not in {"deadline", "interrupt"}

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return not self.missing_bytes

    @property
    def missing_bytes(self) -> float:
        """Memory that a device lacks; 0 if the plan fits."""
        return max(0.0, -min(stage.headroom_bytes for stage in self.stages))

    @property
    def limit(self) -> str:
        """What keeps the step from being shorter, in words."""
        return limits.describe(self.stages, self.micro_batches, self.step_s)

    def orders(self, schedule: str | None = None) -> Schedule:
        """Who does what in which order, one rank a stage: as it was planned, or by the family named `schedule`.

        Raises ArgumentError for a family that runs several stages on a rank.
        """
        name = schedule or self.schedule
        ranks, micro_batches = len(self.stages), self.micro_batches
        planned = name == self.schedule
        in_flight = [stage.in_flight for stage in self.stages]
        if planned and name in {"1f1b", "eager_1f1b"}:
            return build(name, ranks=ranks, micro_batches=micro_batches, windows=in_flight)
        if not planned and (built := build(name, ranks=ranks, micro_batches=micro_batches)).stages != ranks:
            raise ArgumentError(
                f"`{name}` runs {built.stages} stages on {built.ranks} ranks, but the plan has one stage a rank",
                "choose a schedule with one stage a rank",
            )
        # Schedules that look at durations may now be fitted to the plan's; the others come out as before.
        halves = tuple(stage.backward_s / 2 for stage in self.stages)
        transfer_s = max((stage.transfer_s for stage in self.stages[:-1]), default=0.0)
        durations = Durations(tuple(stage.forward_s for stage in self.stages), halves, halves, transfer_s)
        cap = max(in_flight) if planned and name == "zb" else None
        return build(name, ranks=ranks, micro_batches=micro_batches, cap=cap, durations=durations)

    def program(self, schedule: str | None = None) -> Program:
        """What runs: the plan's stages on their devices, by its own schedule or by the family named `schedule`.

        Raises ArgumentError for a family that runs several stages on a rank.

        >>> import hpgo
        >>> best = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
        >>> runs = best.program()
        >>> [len(stage.devices) for stage in runs.stages], runs.stages[0].crossings[0].layer
        ([15, 1], 'pool-5')
        """
        return program(
            self.orders(schedule),
            [(stage.layers, stage.devices) for stage in self.stages],
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            machines=self.machines or (self.cluster_devices,),
            crossings=self.crossings or None,
            recompute=self.recompute,
            costs=Costs.of_stages(self.stages),
        )

    def timeline(self) -> Timeline:
        """The simulated step: `hpgo.simulate` of this plan."""
        return simulate(self)

    def for_rank(self, rank: int) -> RankProgram:
        """What the process with this rank does, if rank r runs on device r; idle ranks get a part without actions.

        Raises ArgumentError for a rank beyond the cluster's devices.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
        >>> mine = plan.for_rank(3)
        >>> mine.stages[0].stage, mine.stages[0].replica, mine.stages[0].rows
        (0, 3, range(104, 138))
        """
        return self.program().for_rank(rank)

    def to_json(self) -> str:
        """The plan as versioned JSON, described in `docs/plan.md`; `Plan.from_json` reads it back."""
        facts = {"format": "hpgo.plan", "version": _VERSION} | asdict(self) | {"finished": self.finished}
        return json.dumps(facts, indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> Plan:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it."""
        with hinted("make it again"):
            return cls._of_text(text, source)

    @classmethod
    def _of_text(cls, text: str, source: str) -> Plan:
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            raise ArgumentError(f"{source} is not a plan", "save plans with `-o plan.json`")
        top = Section(parse(text, source, ArgumentError), source, ArgumentError)
        if top.get("format", None) != "hpgo.plan":
            raise ArgumentError(f"{source} is not a plan", "save plans with `-o plan.json`")
        version = top.get("version", None)
        if version != _VERSION:
            raise ArgumentError(f"{source} is a plan of version {shown(version)}, not {_VERSION}")
        finished = top.flag("finished")
        plan = record(cls, top, optional={"schedules", "stopped", "machines", "crossings"})  # added within version 1
        if plan.stopped not in {None, *STOPPED}:
            raise ArgumentError(
                f"{source}: `stopped` is {shown(plan.stopped)}, not null or one of {', '.join(STOPPED)}"
            )
        if plan.finished != finished:
            if plan.stopped is not None:
                raise ArgumentError(f"{source}: `finished` and `stopped` contradict each other")
            plan = replace(plan, stopped="deadline")  # Ctrl-C, perhaps: older files don't tell them apart
        for index, stage in enumerate(plan.stages):
            if not (stage.layers and stage.devices and stage.share):
                raise ArgumentError(f"{source}: stage {index} has no layers, devices or samples")
        if not plan.stages or plan.step_s < 0:
            raise ArgumentError(f"{source} has no stages, or a step of negative time")
        if not plan.micro_batch_size or plan.global_batch_size % plan.micro_batch_size:
            raise ArgumentError(
                f"{source}: micro-batches of {plan.micro_batch_size} don't make a batch of {plan.global_batch_size}"
            )
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises ArgumentError naming the file."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))

    def __str__(self) -> str:
        from hpgo.show.report import table  # it reads plans

        return table(self)


def _ratio(value: float, base: float) -> float:
    """`value / base`, for times that may be zero: one if both are."""
    if base:
        return value / base
    return math.inf if value else 1.0
