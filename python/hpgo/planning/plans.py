"""Plans: the stages of a model, their devices, the schedule, and the simulated step with its proof.

A `Plan` contains only plain values, no native or framework objects, so it can be pickled, compared and saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpgo.base.checks import check_flag, number
from hpgo.base.documents import read_text, write_text
from hpgo.base.laws import share_left
from hpgo.base.messages import brief, percent, pluralize, safe_repr, shorten
from hpgo.base.presentation import Reported
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
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
"""Reasons for which a search may stop before its proof is complete."""
_AGAIN = "make the plan again with `hpgo plan`"


@dataclass(frozen=True, slots=True)
class Digest(Record):
    """Digest of a profile or cluster, which a plan file has instead if it was saved without them."""

    sha256: str
    """SHA-256 of all values that the step time depends on, so without name and origin. docs/plan.md lists them."""


@dataclass(frozen=True, slots=True)
class Assumptions(Record):
    """The planning problem of a plan: everything except stages and schedule that its step time depends on."""

    profile: Profile | Digest
    cluster: Cluster | Digest
    memory: MemoryModel
    even_split: bool
    """Whether all replicas of a stage must get the same number of samples."""
    overlap: bool
    """Whether gradients are reduced during the backward pass."""
    min_samples_per_replica: int
    """Minimum samples per micro-batch and replica."""
    include_data_loading: bool
    """Whether the time of layers that load data is part of the step."""
    blocks: Blocks | None
    """Repeated blocks of the model, as frameworks need them; None if the model is no sequence of blocks."""
    gpus_per_device: int
    """Number of GPUs that each device stands for."""
    overlap_p2p_comm: bool = True
    """Whether a stage computes while its transfers are on the links. Otherwise each of its passes takes them as
    well."""
    shares_by_speed: bool = False
    """Whether replicas of different speed get samples by their speed."""


@dataclass(frozen=True, slots=True)
class Alternative(Record):
    """A simple plan, such as data parallelism, for comparison with the best plan."""

    name: str
    step_s: float | None
    """Step time in seconds; None if the plan can't run."""
    stages: int
    pipeline_micro_batch_size: int
    shortfall_bytes: float
    """Memory that a device lacks, in bytes; 0 if the plan fits."""
    reason: str
    """Reason for which it is worse, as a clause."""
    plan: Plan | None = None
    """The plan itself, even if it does not fit; None if none was found. `Plan.alternative` returns it by name."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice(Record):
    """The best plan of one schedule, for comparison with other schedules.

    >>> import hpgo
    >>> plan = hpgo.plan("bert-48", "dapple-a", global_batch_size=64, pipeline_micro_batch_size=16, schedule="auto")
    >>> plan.schedules[0].name == plan.schedule, plan.schedules[0].step_s == plan.step_s
    (True, True)
    """

    name: str
    step_s: float | None
    """Step time of the best plan that fits, in seconds; None if none fits."""
    peak_bytes: float | None
    """Memory of the fullest device, in bytes; None if no plan was found."""
    shortfall_bytes: float
    """Memory that a device lacks, in bytes; 0 if the plan fits."""
    stages: int
    virtual_stages_per_rank: int
    """Virtual stages per device."""
    pipeline_micro_batch_size: int
    planned: bool
    """Whether `hpgo.plan(schedule=name)` returns this plan. False only in old files, for virtual stages."""
    reason: str
    """Bottleneck of the plan, or the reason for which there is no plan."""
    plan: Plan | None = None
    """The plan itself; None if none was found. `Plan.alternative` returns it by name."""


@dataclass(frozen=True, slots=True)
class Restriction(Record):
    """The framework that a plan was searched for, and the best plan without this restriction.

    The lower bound of a restricted plan holds for all plans that the framework can run.
    """

    framework: str
    """Name of the framework, as in `hpgo.plan(framework="megatron")`."""
    version: str
    """Version of the framework; empty if all versions are equal in what they run."""
    label: str
    """Name and version for reports, such as `Megatron-LM 0.16`."""
    space: str
    """Plans that it can run, as a phrase."""
    unrestricted_step_s: float | None
    """Step time of the best unrestricted plan found, in seconds; None if none was searched."""
    unrestricted_lower_bound_s: float | None
    """Lower bound on the step of all unrestricted plans, in seconds."""
    unrestricted_stages: int | None
    """Number of stages of the best unrestricted plan."""

    def costs(self, step_s: float) -> tuple[float, float] | None:
        """Return the smallest and largest share by which `step_s` can exceed the best unrestricted step.

        Returns None if no unrestricted plan was searched.

        >>> Restriction("megatron", "0.16", "Megatron-LM 0.16", "", 1.0, 0.75, 3).costs(1.5)
        (0.5, 1.0)
        """
        step_s = number("step_s", step_s)
        if self.unrestricted_step_s is None or self.unrestricted_lower_bound_s is None:
            return None
        minimum, maximum = (
            _ratio(step_s, free_s) - 1 for free_s in (self.unrestricted_step_s, self.unrestricted_lower_bound_s)
        )
        return max(0.0, minimum), max(0.0, maximum)


@dataclass(frozen=True, slots=True)
class MemoryPreference(Record):
    """The plan with the shortest step, to which a plan with less memory was preferred."""

    tolerance: float
    """Largest allowed increase of the step time, as a share."""
    step_s: float
    """Shortest step time found, in seconds."""
    peak_bytes: float
    """Memory of the fullest device of the plan with the shortest step, in bytes."""


@dataclass(frozen=True, slots=True)
class Plan(Reported, Record):
    """A plan: stages on devices, micro-batches, and the predicted training step.

    Times are seconds. `step_s` is the simulated step under `schedule`. No plan of the problem takes less than
    `lower_bound_s`, regardless of its cuts and placement. `optimality_gap` is the share by which `step_s` exceeds this
    bound.
    """

    profile: str
    cluster: str
    schedule: str
    global_batch_size: int
    pipeline_micro_batch_size: int
    stages: tuple[Stage, ...]
    step_s: float
    one_device_step_s: float
    """Time of the step on one device with enough memory, in seconds."""
    cluster_devices: int
    """Number of devices of the cluster, including idle ones."""
    lower_bound_s: float | None = None
    """Lower bound on the step of all plans, regardless of cuts and placement; None if no search proved one, as for a
    plan that was only evaluated."""
    alternatives: tuple[Alternative, ...] = ()
    schedules: tuple[ScheduleChoice, ...] = ()
    """Best plan of each schedule, fastest first; empty unless schedule `auto` compared them."""
    cuts: str = "all"
    """Cut points that were searched: `all`, or the reason for which only some were."""
    placements: str = "all"
    """Placements that were searched: `all`, or `compact` for node-aligned ones, with others by pattern."""
    stop_reason: str | None = None
    """Reason for which the search stopped early: `time_limit`, `interrupt` (Ctrl-C), or `work_limit`, its built-in
    limit on work; None if it completed."""
    explored_labels: int = 0
    """Number of partial plans that the search explored."""
    loading_s: float = 0.0
    """Time of the slowest data-loading layer for one batch of the profile, which is not part of the step."""
    simulated: int = 0
    """Number of complete plans that the search simulated."""
    nodes: tuple[int, ...] = ()
    """Number of devices of each node of the cluster; empty in old files."""
    split_tied_weights: tuple[TiedWeight, ...] = ()
    """Tied weights whose layers are on several groups of devices. Each group holds a copy, and their gradients are
    reduced over the devices of all groups. `Stage.grad_reduce_s` and `Stage.exposed_grad_reduce_s` include this."""
    boundary_tensors: tuple[tuple[BoundaryTensor, ...], ...] = ()
    """Tensors that cross the boundary behind each stage but the last; empty in old files."""
    actions: tuple[str, ...] = ()
    """Action list of each group of devices, in the format of `Schedule.to_text`; empty if schedule name and
    micro-batches in flight determine it."""
    virtual_stages_per_rank: int = 1
    """Virtual stages per device. Stages with the same devices share them."""
    assumptions: Assumptions | None = None
    """The planning problem; None in files of version 1. See `assumed`."""
    made_with: str | None = None
    """Version of hpgo that made the plan; None in old files."""
    restriction: Restriction | None = None
    """Framework that the plan was searched for; None without a framework."""
    memory_preference: MemoryPreference | None = None
    """The plan with the shortest step, if one with less memory was preferred; None otherwise."""
    node_aligned_bound_s: float | None = None
    """Lower bound on the step of plans with the searched cuts and node-aligned placements; None if all placements were
    searched, or none."""
    searched_cuts_bound_s: float | None = None
    """Lower bound on the step of plans with the searched cuts; None if all cuts were searched, or none."""
    notes: tuple[str, ...] = ()
    """Notes on the accuracy of the inputs, such as a profile measured on other devices or with much smaller batches."""
    _groups: tuple[DeviceGroup, ...] = field(default=(), init=False, repr=False, compare=False)
    """Value of `groups`, computed once because reports, pictures and checks need it often."""

    def __post_init__(self) -> None:
        check_fields(self)
        # The record is frozen, so its cached field can only be set by `object.__setattr__`.
        object.__setattr__(self, "_groups", groups_of(self.stages))
        for index, stage in enumerate(self.stages):
            if not (stage.layers and stage.devices and stage.samples_per_replica and stage.max_in_flight):
                raise ArgumentError(
                    f"stage {index} of a plan has no layers, devices, samples, or micro-batches in flight", _AGAIN
                )
        if not self.stages or not 0 <= self.step_s < math.inf:
            raise ArgumentError("a plan has no stages, or its step time is negative or not finite", _AGAIN)
        if not self.pipeline_micro_batch_size or self.global_batch_size % self.pipeline_micro_batch_size:
            raise ArgumentError(
                f"pipeline_micro_batch_size is {self.pipeline_micro_batch_size}, but it must divide"
                f" {self.global_batch_size}",
                _AGAIN,
            )
        if self.boundary_tensors and len(self.boundary_tensors) != len(self.stages) - 1:
            raise ArgumentError(
                f"`boundary_tensors` has {len(self.boundary_tensors)} entries, but it must have one for each stage"
                " but the last",
                _AGAIN,
            )
        # Virtual stages are spread evenly: each group of devices runs `virtual_stages_per_rank` of them.
        groups = len(self.groups)
        if self.virtual_stages_per_rank < 1 or groups * self.virtual_stages_per_rank != len(self.stages):
            raise ArgumentError(
                f"`virtual_stages_per_rank` is {self.virtual_stages_per_rank}, but"
                f" {len(self.stages)} stages are on {groups} groups of devices",
                _AGAIN,
            )
        if self.actions and len(self.actions) != groups:
            raise ArgumentError(
                f"`actions` has {len(self.actions)} lines, but it must have one for each of {groups} groups of devices",
                _AGAIN,
            )
        if self.stop_reason not in {None, *STOP_REASONS}:
            raise ArgumentError(
                f"`stop_reason` is {safe_repr(self.stop_reason)}, but it must be None or one of"
                f" {', '.join(STOP_REASONS)}",
                _AGAIN,
            )

    @property
    def recompute(self) -> bool | Literal["auto"]:
        """Whether all stages recompute their activations in their backward passes (True), none (False), or some.

        Some are "auto": the value of the argument `recompute` with which the planner decides for each stage.
        """
        every = {stage.recompute for stage in self.stages}
        return "auto" if len(every) > 1 else every == {True}

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.global_batch_size // self.pipeline_micro_batch_size

    @property
    def devices(self) -> int:
        """Number of devices that run a stage."""
        return sum(len(group.devices) for group in self.groups)

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Groups of devices with the same stages, in the order of their first stages: the ranks of `to_schedule`.

        >>> import hpgo
        >>> profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
        >>> plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule="zb_v", max_stages=4)
        >>> [group.stages for group in plan.groups]
        [(0, 3), (1, 2)]
        """
        return self._groups

    @property
    def optimality_gap(self) -> float | None:
        """Share by which the step exceeds the lower bound: 0.02 is 2 %, and 0 proves the plan optimal."""
        if self.lower_bound_s is None:
            return None
        return max(0.0, _ratio(self.step_s, self.lower_bound_s) - 1)

    @property
    def samples_per_s(self) -> float:
        """Throughput in samples/s; infinite if the step takes no time."""
        return _ratio(self.global_batch_size, self.step_s)

    @property
    def speed_up(self) -> float:
        """Speed-up over one device with enough memory."""
        return _ratio(self.one_device_step_s, self.step_s)

    @property
    def bubble(self) -> float:
        """Share of the device time of a step in which the plan's devices do not compute."""
        # Replicas with fewer samples count like the largest, so the bubble is a lower bound.
        busy_s = sum(s.replicas * (s.forward_s + s.backward_s) for s in self.stages) * self.micro_batches
        return share_left(busy_s, self.devices * self.step_s)

    @property
    def finished(self) -> bool:
        """Whether neither a time limit nor Ctrl-C stopped the search. `stop_reason` has the reason."""
        return self.stop_reason not in {"time_limit", "interrupt"}

    @property
    def fits(self) -> bool:
        """Whether the stages of each device fit in its memory."""
        return not self.shortfall_bytes

    @property
    def shortfall_bytes(self) -> float:
        """Largest amount of memory that a device lacks, in bytes; 0 if the plan fits."""
        return max(0.0, -min(group.free_bytes for group in self.groups))

    @property
    def limit(self) -> str:
        """Bottleneck of the step, as a sentence."""
        return bottleneck.describe(self.stages, self.micro_batches, self.step_s)

    def to_schedule(self, schedule: ScheduleName | None = None) -> Schedule:
        """Return the schedule of the plan, with one rank for each of `groups`, or that of the family `schedule`.

        Raises ArgumentError for a family that does not place stages on ranks like the plan.
        """
        from hpgo.planning.plan_program import schedule_of  # Searches don't need it.

        return schedule_of(self, schedule)

    @property
    def durations(self) -> Durations:
        """Times of the stages, for schedules that are fitted to them."""
        from hpgo.planning.plan_program import durations_of

        return durations_of(self)

    def program(self, schedule: ScheduleName | None = None) -> Program:
        """Return the program of all ranks, under the plan's own schedule or the family `schedule`.

        Raises ArgumentError for a family that does not place stages on ranks like the plan.

        >>> import hpgo
        >>> best = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
        >>> runs = best.program()
        >>> [len(stage.devices) for stage in runs.stages], runs.stages[0].boundary_tensors[0].layer
        ([15, 1], 'pool-5')
        """
        from hpgo.planning.plan_program import program_of

        return program_of(self, schedule)

    def timeline(self) -> Timeline:
        """Return the simulated step, like `hpgo.simulate(plan)`."""
        from hpgo.timing.simulation import simulate

        return simulate(self)

    def for_rank(self, rank: int) -> RankProgram:
        """Return what a rank runs, where rank r uses device r. Idle ranks get a program without actions.

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
        """The planning problem. Raises ArgumentError for a plan from a file of version 1, which has none."""
        if self.assumptions is None:
            raise ArgumentError(
                "the plan is from a file of version 1, which has no profile, cluster, memory model and overlap",
                "make it again with `hpgo plan`, or evaluate its stages with `hpgo evaluate PROFILE --stages …`",
                code="missing",
            )
        return self.assumptions

    def reevaluate(self, *, profile: Profile | None = None, cluster: Cluster | None = None) -> Plan:
        """Return the plan with its step time computed again, equal to the saved one to the last digit.

        `profile` and `cluster` are needed only for a plan that was saved without them. Raises ArgumentError if they are
        missing, or differ from those that the plan was made with.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> hpgo.Plan.from_json(plan.to_json()).reevaluate().step_s == plan.step_s
        True
        """
        from hpgo.planning.reevaluate import reevaluate  # It imports this module.

        return reevaluate(self, profile, cluster)

    def replan(self, devices: int) -> Plan:
        """Return the best plan on the first `devices` devices of the cluster, for the same profile, batch and schedule.

        Micro-batch size and recomputation are chosen again. Raises ArgumentError for a plan that was saved without
        profile and cluster, ClusterError if the cluster has fewer devices, InfeasibleError if no plan fits on them.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> fewer = plan.replan(8)
        >>> fewer.cluster_devices, fewer.global_batch_size
        (8, 64)
        """
        from hpgo.planning.replan import replan  # It imports this module.

        return replan(self, devices)

    def alternative(self, name: str) -> Plan:
        """Return the plan of an alternative or of a compared schedule by its name.

        Raises ArgumentError if the plan has no such alternative, or no plan was found for it.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> plan.alternative("data parallelism").stages[0].replicas
        16
        """
        # Names of schedules and of alternatives never coincide.
        rows: list[Alternative | ScheduleChoice] = [*self.alternatives, *self.schedules]
        listed = {row.name: row for row in rows}
        plans = [known for known, row in listed.items() if row.plan is not None]
        hint = (
            f"choose one of: {', '.join(plans)}"
            if plans
            else "make the plan again: it was saved without its alternatives"
        )
        if not isinstance(name, str) or name not in listed:
            raise ArgumentError(f"the plan has no alternative {safe_repr(name)}", hint, code="unknown_name")
        found = listed[name].plan
        if found is None:
            raise ArgumentError(f"the alternative `{name}` has no plan: {listed[name].reason}", hint)
        return found

    def to_json(self, *, embed: bool = True) -> str:
        """Return the plan as versioned JSON, which `docs/plan.md` describes. `Plan.from_json` reads it back.

        With `embed`, the text contains profile and cluster, so that the plan can be evaluated again. Without it, the
        text contains only their SHA-256.
        """
        from hpgo.planning.files import written  # It imports this module.

        check_flag("embed", embed)
        return written(self, embed=embed)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> Plan:
        """Read the JSON of `to_json`. Raises ArgumentError with the name `source` for invalid text."""
        from hpgo.planning.files import read  # It imports this module.

        return read(text, source)

    def save(self, path: str | os.PathLike[str], *, embed: bool = True) -> None:
        """Write the JSON of `to_json` into a file. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json(embed=embed) + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file of `save`. Raises ArgumentError with the name of the file if it is missing or invalid."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))

    def __repr__(self) -> str:
        gap = "" if self.optimality_gap is None else f", gap {percent(self.optimality_gap)}"
        return brief(
            "Plan",
            f"{shorten(self.profile, 24)} on {shorten(self.cluster, 24)}: {pluralize(len(self.stages), 'stage')} on"
            f" {pluralize(self.devices, 'device')}, {self.schedule}, step {format_seconds(self.step_s)}{gap}",
        )


def _ratio(value: float, base: float) -> float:
    """Return `value / base`, with 0 / 0 = 1 and infinity for other divisions by 0."""
    if base:
        return value / base
    return math.inf if value else 1.0
