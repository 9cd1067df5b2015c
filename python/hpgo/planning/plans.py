"""Plans: which device runs which layers, in how many micro-batches, how long a step takes, and how sure that is.

A `Plan` is plain numbers, without native or framework objects, so it can be pickled, compared and saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_flag, number
from hpgo.base.documents import read_text, write_text
from hpgo.base.laws import share_left
from hpgo.base.messages import brief, percent, pluralize, safe_repr, shorten
from hpgo.base.presentation import present
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.machine.cluster import Cluster
from hpgo.model.profile import Profile, TiedWeight
from hpgo.planning import bottleneck
from hpgo.planning.problem import MemoryModel
from hpgo.programs.blocks import Blocks
from hpgo.programs.stages import BoundaryTensor, DeviceGroup, Stage, groups_of

if TYPE_CHECKING:
    import os

    from hpgo.programs.names import ScheduleName
    from hpgo.programs.program import Program
    from hpgo.programs.ranks import RankProgram
    from hpgo.programs.schedule import Durations, Schedule
    from hpgo.timing.timeline import Timeline

STOP_REASONS = ("time_limit", "interrupt", "work_limit")
"""Why a search may end before its proof."""
_AGAIN = "make it again"


@dataclass(frozen=True, slots=True)
class Digest(Record):
    """What a plan's file keeps of a profile or a cluster that it was saved without."""

    sha256: str
    """Of what prices depend on: everything but its name and where it is from. docs/plan.md says it exactly."""


@dataclass(frozen=True, slots=True)
class Assumptions(Record):
    """What the price of a plan stands on, besides its stages and their orders."""

    profile: Profile | Digest
    cluster: Cluster | Digest
    memory: MemoryModel
    even_split: bool
    """Whether replicas of a stage had to get the same number of samples."""
    overlap: bool
    """Whether gradient synchronisation starts before the backward pass has ended."""
    min_samples_per_replica: int
    """Samples of a micro-batch that a replica gets, at least."""
    include_data_loading: bool
    """Whether the time of layers that load data counts."""
    blocks: Blocks | None
    """The row of blocks that frameworks see in the profile; None if it is no such row."""
    gpus_per_device: int
    """How many GPUs each device stands for."""


@dataclass(frozen=True, slots=True)
class Alternative(Record):
    """A plan that people try first, and what it would give."""

    name: str
    step_s: float | None
    """None if it can't run."""
    stages: int
    micro_batch_size: int
    shortfall_bytes: float
    """Memory that a device lacks for it; 0 if it fits."""
    reason: str
    """Why it is worse, in words."""
    plan: Plan | None = None
    """The plan itself, if there is one, whether or not it fits; `Plan.alternative` finds it by name."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice(Record):
    """What a schedule would give for a question.

    >>> import hpgo
    >>> plan = hpgo.plan("bert-48", "dapple-a", global_batch_size=64, micro_batch_size=16, schedule="auto")
    >>> plan.schedules[0].name == plan.schedule, plan.schedules[0].step_s == plan.step_s
    (True, True)
    """

    name: str
    step_s: float | None
    """Of the best plan that fits; None if none does."""
    peak_bytes: float | None
    """On the fullest device; None if no plan was found."""
    shortfall_bytes: float
    """Memory that a device lacks for it; 0 if it fits."""
    stages: int
    chunks: int
    """Stages on each device."""
    micro_batch_size: int
    planned: bool
    """Whether `hpgo.plan(schedule=name)` makes the plan; only files from before say no, of several stages a device."""
    reason: str
    """What keeps its step from being shorter, or why there is none."""
    plan: Plan | None = None
    """The plan itself, if there is one; `Plan.alternative` finds it by name."""


@dataclass(frozen=True, slots=True)
class Restriction(Record):
    """Which framework a plan was searched for, and the best plan of all that it is compared to.

    The bound of such a plan is one for all plans that the framework runs.
    """

    framework: str
    """What `hpgo.plan(framework=…)` calls it: `megatron`."""
    version: str
    """The version that was planned for; empty if all are alike."""
    label: str
    """What people call both."""
    space: str
    """What it runs, in words."""
    unrestricted_step_s: float | None
    """Of the best plan that was found with no framework in mind; None if none was looked for."""
    unrestricted_lower_bound_s: float | None
    """No plan at all takes less."""
    unrestricted_stages: int | None
    """Of the best plan."""

    def costs(self, step_s: float) -> tuple[float, float] | None:
        """Shares by which `step_s` is longer than the best step of all, at least and at most; None if nobody looked.

        >>> Restriction("megatron", "0.16", "Megatron-LM 0.16", "", 1.0, 0.75, 3).costs(1.5)
        (0.5, 1.0)
        """
        step_s = number("step_s", step_s)
        if self.unrestricted_step_s is None or self.unrestricted_lower_bound_s is None:
            return None
        least, most = (
            _ratio(step_s, free_s) - 1 for free_s in (self.unrestricted_step_s, self.unrestricted_lower_bound_s)
        )
        return max(0.0, least), max(0.0, most)


@dataclass(frozen=True, slots=True)
class MemoryPreference(Record):
    """What a plan was preferred to, for its memory."""

    tolerance: float
    """How much longer its step may be, as a share."""
    step_s: float
    """The shortest step that was found."""
    peak_bytes: float
    """On the fullest device of the plan with that step."""


@dataclass(frozen=True, slots=True)
class Plan(Record):
    """A way to train: stages on devices, micro-batches, and the step that it is predicted to take.

    Times are seconds. `step_s` is the simulated step of `schedule`; no plan of the question takes less than
    `lower_bound_s`, whatever its cuts and wherever its stages lie, and `gap` is the share by which the plan may miss
    it.
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
    """No plan takes less, whatever its cuts and however its stages are placed; None for a plan that was priced, not
    searched for."""
    alternatives: tuple[Alternative, ...] = ()
    schedules: tuple[ScheduleChoice, ...] = ()
    """What each schedule would give, best first; empty unless `auto` compared them."""
    cuts: str = "all"
    """Which cut points were tried: all, or why only those of one order of the layers."""
    placements: str = "all"
    """Which placements were looked through: all, or compact ones, with others by pattern."""
    stop_reason: str | None = None
    """Why the search ended with better plans possible: `time_limit`, `interrupt` (Ctrl-C), or `work_limit`, the search's
    limit on partial plans; None if it ran to its end."""
    explored_labels: int = 0
    """Partial plans that the search looked at."""
    loading_s: float = 0.0
    """Seconds in which the profile's slowest input layer loads one batch of the profile; not part of the step."""
    simulated: int = 0
    """Plans that it simulated."""
    nodes: tuple[int, ...] = ()
    """Devices of each machine of the cluster; empty in files that don't say."""
    split_tied_weights: tuple[TiedWeight, ...] = ()
    """Weights that layers on several groups of devices share: each group holds a copy, and their gradients are summed
    over the devices of all of them, which `Stage.grad_reduce_s` and `Stage.exposed_grad_reduce_s` include."""
    boundary_tensors: tuple[tuple[BoundaryTensor, ...], ...] = ()
    """For each stage but the last, what it gives to later ones; empty in files that don't say."""
    actions: tuple[str, ...] = ()
    """For each stage, or group of devices that run several, its actions in order, as `Schedule.to_text` writes them;
    empty where schedule and micro-batches in flight say it all."""
    chunks: int = 1
    """Stages on each device. Stages that name the same devices share them."""
    assumptions: Assumptions | None = None
    """None in files of version 1, which don't say; see `assumed`."""
    made_with: str | None = None
    """Version of hpgo; None in files that don't say."""
    restriction: Restriction | None = None
    """The framework that it was searched for; None if anybody may run it."""
    memory_preference: MemoryPreference | None = None
    """What it was preferred to, if the least memory was asked for; None if the shortest step was."""
    node_aligned_bound_s: float | None = None
    """No plan with the cuts that were searched and compact placements takes less; None where every placement was looked
    through, or none was."""
    searched_cuts_bound_s: float | None = None
    """No plan with the cuts that `cuts` names takes less; None where all cuts were searched, or none was."""
    notes: tuple[str, ...] = ()
    """What to know about the numbers that its price stands on: a profile measured on other devices, or with far smaller
    batches."""
    _groups: tuple[DeviceGroup, ...] = field(default=(), init=False, repr=False, compare=False)
    """Made once: reports, pictures and checks ask for them again and again."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "_groups", groups_of(self.stages))
        for index, stage in enumerate(self.stages):
            if not (stage.layers and stage.devices and stage.samples_per_replica and stage.max_in_flight):
                raise ArgumentError(
                    f"stage {index} of a plan has no layers, devices, samples, or micro-batches in flight", _AGAIN
                )
        if not self.stages or not 0 <= self.step_s < math.inf:
            raise ArgumentError("a plan has no stages, or a step that takes no finite time from 0 on", _AGAIN)
        if not self.micro_batch_size or self.global_batch_size % self.micro_batch_size:
            raise ArgumentError(
                f"micro-batches of {self.micro_batch_size} don't make a batch of {self.global_batch_size}", _AGAIN
            )
        if self.boundary_tensors and len(self.boundary_tensors) != len(self.stages) - 1:
            raise ArgumentError(
                f"{len(self.boundary_tensors)} boundary_tensors are not one for each stage but the last", _AGAIN
            )
        groups = len(self.groups)
        if self.chunks < 1 or groups * self.chunks != len(self.stages):
            raise ArgumentError(
                f"{len(self.stages)} stages are not `chunks`, {self.chunks}, on each of {groups} groups of devices",
                _AGAIN,
            )
        if self.actions and len(self.actions) != groups:
            raise ArgumentError(f"{len(self.actions)} lines of actions are not one for each group of devices", _AGAIN)
        if self.stop_reason not in {None, *STOP_REASONS}:
            raise ArgumentError(
                f"`stop_reason` is {safe_repr(self.stop_reason)}", f"it is None or one of {', '.join(STOP_REASONS)}"
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(len(group.devices) for group in self.groups)

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Devices that hold the same stages, in the order of their first ones: the ranks of `orders`.

        >>> import hpgo
        >>> profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
        >>> plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule="zb_v", max_stages=4)
        >>> [group.stages for group in plan.groups]
        [(0, 3), (1, 2)]
        """
        return self._groups

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
        return share_left(busy_s, self.devices * self.step_s)

    @property
    def finished(self) -> bool:
        """Whether neither a time limit nor Ctrl-C stopped the search. `stop_reason` tells which."""
        return self.stop_reason not in {"time_limit", "interrupt"}

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return not self.shortfall_bytes

    @property
    def shortfall_bytes(self) -> float:
        """Memory that a device lacks; 0 if the plan fits."""
        return max(0.0, -min(group.headroom_bytes for group in self.groups))

    @property
    def limit(self) -> str:
        """What keeps the step from being shorter, in words."""
        return bottleneck.describe(self.stages, self.micro_batches, self.step_s)

    def orders(self, schedule: ScheduleName | None = None) -> Schedule:
        """Who does what in which order, a rank for each of `groups`: as it was planned, or by the family `schedule`.

        Raises ArgumentError for a family that runs other stages on a rank than the plan has on a device.
        """
        from hpgo.planning.plan_program import orders_of  # it runs plans, which looking for them does not

        return orders_of(self, schedule)

    @property
    def durations(self) -> Durations:
        """What the plan's stages take, for schedules that are fitted to that."""
        from hpgo.planning.plan_program import durations_of

        return durations_of(self)

    def program(self, schedule: ScheduleName | None = None) -> Program:
        """What runs: the plan's stages on their devices, by its own schedule or by the family named `schedule`.

        Raises ArgumentError for a family that runs other stages on a rank than the plan has on a device.

        >>> import hpgo
        >>> best = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
        >>> runs = best.program()
        >>> [len(stage.devices) for stage in runs.stages], runs.stages[0].boundary_tensors[0].layer
        ([15, 1], 'pool-5')
        """
        from hpgo.planning.plan_program import program_of

        return program_of(self, schedule)

    def timeline(self) -> Timeline:
        """The simulated step: `hpgo.simulate` of this plan."""
        from hpgo.timing.simulation import simulate

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

    @property
    def assumed(self) -> Assumptions:
        """What its price stands on. Raises ArgumentError for a plan from a file of version 1, which doesn't say."""
        if self.assumptions is None:
            raise ArgumentError(
                "the plan is from a file of version 1, which does not say what its price assumed: profile, cluster,"
                " memory model, overlap",
                "make it again with `hpgo plan`, or price its stages with `hpgo evaluate PROFILE --stages …`",
                code="missing",
            )
        return self.assumptions

    def reprice(self, *, profile: Profile | None = None, cluster: Cluster | None = None) -> Plan:
        """The plan priced anew, from its stages, orders and assumptions: what it was saved with, to the last digit.

        A profile and a cluster are needed only for a plan that was saved without them. Raises ArgumentError if they are
        missing, or differ from what the plan was made with.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> hpgo.Plan.from_json(plan.to_json()).reprice().step_s == plan.step_s
        True
        """
        from hpgo.planning.reevaluate import reprice  # it makes plans

        return reprice(self, profile, cluster)

    def replan(self, devices: int) -> Plan:
        """The best plan on the first `devices` devices of the cluster, for the same profile, batch and schedule.

        The size of micro-batches is chosen anew, and whether to recompute. Raises ArgumentError for a plan that was
        saved without profile and cluster, ClusterError if the cluster has fewer devices, InfeasibleError if no plan
        fits them.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> fewer = plan.replan(8)
        >>> fewer.cluster_devices, fewer.global_batch_size
        (8, 64)
        """
        from hpgo.planning.replan import replan  # it makes plans

        return replan(self, devices)

    def alternative(self, name: str) -> Plan:
        """The plan of the alternative or the compared schedule of this name, as a plan of its own.

        Raises ArgumentError if there is none.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> plan.alternative("data parallelism").stages[0].replicas
        16
        """
        rows: list[Alternative | ScheduleChoice] = [*self.alternatives, *self.schedules]
        listed = {row.name: row for row in rows}
        plans = [known for known, row in listed.items() if row.plan is not None]
        hint = f"choose one of: {', '.join(plans)}" if plans else "it was saved without them, or none was looked for"
        if not isinstance(name, str) or name not in listed:
            raise ArgumentError(f"the plan has no alternative {safe_repr(name)}", hint, code="unknown_name")
        found = listed[name].plan
        if found is None:
            raise ArgumentError(f"there is no plan of the alternative `{name}`: {listed[name].reason}", hint)
        return found

    def to_json(self, *, embed: bool = True) -> str:
        """The plan as versioned JSON, described in `docs/plan.md`; `Plan.from_json` reads it back.

        Unless `embed` is false, profile and cluster go with it, so that it can be priced anew; else only their SHA-256.
        """
        from hpgo.planning.files import written  # it reads plans

        check_flag("embed", embed)
        return written(self, embed=embed)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> Plan:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it."""
        from hpgo.planning.files import read  # it makes plans

        return read(text, source)

    def save(self, path: str | os.PathLike[str], *, embed: bool = True) -> None:
        """Writes the plan as JSON, as `to_json` does. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json(embed=embed) + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises ArgumentError naming the file."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))

    def __str__(self) -> str:
        text: str = present("text", self)
        return text

    def to_frame(self) -> Any:
        """A row a stage, as a frame of polars or pandas: its fields, and those of its memory.

        Of the library that is imported already, or else of the one that is installed; HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html

    def __repr__(self) -> str:
        gap = "" if self.gap is None else f", gap {percent(self.gap)}"
        return brief(
            "Plan",
            f"{shorten(self.profile, 24)} on {shorten(self.cluster, 24)}: {pluralize(len(self.stages), 'stage')} on"
            f" {pluralize(self.devices, 'device')}, {self.schedule}, step {format_seconds(self.step_s)}{gap}",
        )


def _ratio(value: float, base: float) -> float:
    """`value / base`, for times that may be zero: one if both are."""
    if base:
        return value / base
    return math.inf if value else 1.0
