"""Planning problems: profile, cluster and settings, with all checks of arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypedDict

from hpgo.base.checks import check_flag, check_int, check_is, choice, number
from hpgo.base.divisors import divisors
from hpgo.base.messages import did_you_mean, pluralize, safe_repr
from hpgo.base.units import format_bytes, parse_bytes
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.model.formats import profile_of
from hpgo.planning.sessions import Sessions
from hpgo.programs.blocks import Blocks
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    import os

    from hpgo import _core
    from hpgo.model.profile import Profile
    from hpgo.programs.frameworks import Framework
    from hpgo.programs.names import PlannedSchedule
    from hpgo.programs.optimizers import OptimizerName

SCHEDULES = ("1f1b", "eager_1f1b", "gpipe")
"""Schedules that the search plans for with a proof. `hpgo.planning.schedule_search` plans for the others.

`1f1b` has the smallest warm-up that keeps all stages busy. `eager_1f1b` runs more forward passes ahead where memory
allows, which hides transfers. `gpipe` runs all forward passes first."""

DEFAULT_SCHEDULE = "eager_1f1b"
ZeroStage = Literal[0, 1, 2, 3, "auto"]
"""ZeRO stage of the replicas of each stage of a pipeline, or its choice for each."""
NO_LIMIT = 2**31
"""Value for counts without a limit: the native planner keeps counts in 32 bits."""
_MAX_MICRO_BATCHES = 2**16
"""Largest number of micro-batches per step. Simulating more would take seconds per plan."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of a device besides activations, in bytes per byte of weights.

    The defaults are for Adam in the precision of the weights: gradients and two moments. `preset` has other optimizers.
    """

    gradients_per_weight: float = 1.0
    optimizer_per_weight: float = 2.0
    shard_optimizer: bool = False
    """Whether the optimizer state is sharded over the replicas of a stage (ZeRO stage 1 or more)."""
    reserved_bytes: float = 0.0
    """Memory of each device that stages can't use, in bytes, for instance for the framework."""
    zero_stage: ZeroStage = 0
    """What the replicas of a stage shard: nothing (0), the optimizer state (1, as with `shard_optimizer`), also the
    gradients (2), or also the weights (3). Stages 2 and 3 send further messages for each micro-batch. "auto" takes for
    each stage of the pipeline the lowest from 1 on that fits with the fewest micro-batches in flight."""

    def __post_init__(self) -> None:
        # Each field implies the other, so that all readers find what they look for in either of them. What is neither a
        # number nor a text is an error of the problem that gets it.
        is_stage = isinstance(self.zero_stage, (int, str))
        if is_stage and self.shard_optimizer is True and self.zero_stage == 0:
            object.__setattr__(self, "zero_stage", 1)
        elif is_stage and self.shard_optimizer is False and self.zero_stage != 0:
            object.__setattr__(self, "shard_optimizer", True)

    @property
    def min_zero_stage(self) -> int:
        """The lowest ZeRO stage that a stage of the pipeline may take."""
        return 1 if self.zero_stage == "auto" else self.zero_stage

    @property
    def max_zero_stage(self) -> int:
        """The highest ZeRO stage that a stage of the pipeline may take."""
        return 3 if self.zero_stage == "auto" else self.zero_stage

    @classmethod
    def preset(
        cls,
        name: OptimizerName,
        *,
        shard_optimizer: bool = False,
        reserved_bytes: str | float = 0.0,
        zero_stage: ZeroStage = 0,
    ) -> MemoryModel:
        """Return the memory model of an optimizer of `hpgo.programs.optimizers.OPTIMIZERS`.

        `reserved_bytes` may have a unit, such as "2 GB". Raises ArgumentError for unknown names and invalid sizes.

        >>> MemoryModel.preset("adam-bf16").optimizer_per_weight
        6.0
        """
        # Presets are in bytes per parameter, but profiles have bytes of weights, so convert to ratios.
        kept = OPTIMIZERS[choice("optimizer", name, OPTIMIZERS)]
        reserved = parse_bytes(reserved_bytes) if isinstance(reserved_bytes, str) else reserved_bytes
        return cls(kept.gradients / kept.weights, kept.state / kept.weights, shard_optimizer, reserved, zero_stage)

    @property
    def optimizer(self) -> OptimizerName | None:
        """The optimizer with these numbers of bytes; None if no preset has them.

        >>> MemoryModel().optimizer
        'adam-fp32'
        """
        each = (self.gradients_per_weight, self.optimizer_per_weight)
        presets = ((name, MemoryModel.preset(name)) for name in OPTIMIZERS)
        return next(
            (name for name, one in presets if (one.gradients_per_weight, one.optimizer_per_weight) == each), None
        )


class PlanOptions(TypedDict, total=False):
    """Arguments that `plan`, `evaluate` and `exhaustive` share. `plan` documents them."""

    schedule: PlannedSchedule
    pipeline_micro_batch_size: int | None
    min_samples_per_replica: int | None
    recompute: bool | Literal["auto"]
    even_split: bool
    shares_by_speed: bool
    overlap: bool
    overlap_p2p_comm: bool
    memory: MemoryModel | OptimizerName | None
    include_data_loading: bool


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A checked planning problem, which the native planner reads."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    pipeline_micro_batch_sizes: tuple[int, ...]
    min_samples_per_replica: int
    """Minimum samples per micro-batch and replica."""
    recompute: tuple[bool, ...]
    """Allowed values of activation recomputation."""
    schedule: str
    even_split: bool
    overlap: bool
    memory: MemoryModel
    loading_s: float
    """Time to load one batch of the profile, in seconds, if `profile` does not include it."""
    measured: Profile
    """The profile as given. `profile` differs: it has no loading times, unless `include_data_loading` is set, and
    consistent input- and weight-gradient times."""
    include_data_loading: bool
    blocks: Blocks | None
    """Repeated blocks of the model, as frameworks need them; None if the model is no sequence of blocks."""
    max_stages: int = NO_LIMIT
    max_replicas: int = NO_LIMIT
    recompute_by_stage: bool = True
    """Whether each stage may have another value of recomputation."""
    overlap_p2p_comm: bool = True
    """Whether a stage computes while its transfers are on the links. Otherwise each of its passes takes them as
    well."""
    shares_by_speed: bool = False
    """Whether replicas of different speed may get samples by their speed."""
    equal_replicas: bool = False
    """Whether all stages must have the same number of replicas."""
    parts: tuple[tuple[int, ...], ...] | None = None
    """Consecutive parts of the model that no cut may split, as indices of layers; None if any cut is allowed."""
    together: tuple[tuple[int, ...], ...] = ()
    """Groups of layers, by index, that must be on the same stage."""
    framework: Framework | None = None
    """Framework that must be able to run the plan; None for no restriction."""
    sessions: Sessions = field(default_factory=Sessions, compare=False, repr=False)
    """Native sessions of this problem and its variants."""

    @property
    def needs_full_ranks(self) -> bool:
        """Whether interleaved schedules need at least one micro-batch per rank, like built-in ones of frameworks."""
        return self.framework is not None and not self.framework.by_file

    @property
    def has_single_wave(self) -> bool:
        """Whether Hanayo is limited to two stages per device, a single wave."""
        return self.framework is not None and self.framework.single_v

    @property
    def session(self) -> _core.Session:
        """The native session, which variants with other settings share."""
        return self.sessions.of(self.profile, self.cluster, self.parts, self.together)

    @classmethod
    def of(
        cls,
        profile: Profile | str | os.PathLike[str],
        cluster: Cluster | str | os.PathLike[str],
        *,
        global_batch_size: int,
        schedule: str = DEFAULT_SCHEDULE,
        pipeline_micro_batch_size: int | None = None,
        min_samples_per_replica: int | None = None,
        recompute: bool | str = False,
        even_split: bool = False,
        shares_by_speed: bool = False,
        overlap: bool = True,
        overlap_p2p_comm: bool = True,
        memory: MemoryModel | OptimizerName | None = None,
        include_data_loading: bool = False,
        **unknown: object,
    ) -> PlanningProblem:
        """Return the planning problem for arguments of `hpgo.plan`.

        Raises ArgumentError for invalid values, and TypeError for unknown arguments.
        """
        for name in unknown:
            raise TypeError(
                f"there is no argument {safe_repr(name)}: {did_you_mean(name, PlanOptions.__annotations__)}"
            )
        profile, cluster = profile_of(profile), cluster_of(cluster)
        check_gpus(profile, cluster)
        global_batch_size = check_int("global_batch_size", global_batch_size, maximum=NO_LIMIT - 1)
        # Times below the smallest measured batch size are extrapolated, so they need the consent of the caller.
        smallest = profile.batch_sizes[0]
        if min_samples_per_replica is not None:
            smallest = check_int("min_samples_per_replica", min_samples_per_replica, maximum=NO_LIMIT - 1)
        sizes = _pipeline_micro_batch_sizes(profile, global_batch_size, pipeline_micro_batch_size, smallest)
        if not (isinstance(recompute, bool) or (isinstance(recompute, str) and recompute == "auto")):
            raise ArgumentError(f"recompute is {safe_repr(recompute)}", "choose True, False or 'auto'")
        if not isinstance(schedule, str):
            raise ArgumentError(
                f"schedule is {safe_repr(schedule)}", f"choose auto, or for example one of {', '.join(SCHEDULES)}"
            )
        # Accept only bools: other values, such as the text "no", would count as true.
        switches = {
            "even_split": even_split, "shares_by_speed": shares_by_speed, "overlap": overlap,
            "overlap_p2p_comm": overlap_p2p_comm, "include_data_loading": include_data_loading,
        }  # fmt: skip
        for name, value in switches.items():
            check_flag(name, value)
        check_transfers(schedule, overlap_p2p_comm=overlap_p2p_comm)
        memory = _checked(memory, cluster)
        check_sharding(schedule, memory)
        if shares_by_speed:
            _check_shares_by_speed(schedule, memory, even_split=even_split)
        return cls(
            profile=(profile if include_data_loading else profile.without_loading()).with_consistent_split(),
            cluster=cluster,
            global_batch_size=global_batch_size,
            pipeline_micro_batch_sizes=sizes,
            min_samples_per_replica=smallest,
            recompute=(recompute,) if isinstance(recompute, bool) else (False, True),
            schedule=schedule,
            even_split=even_split,
            overlap=overlap,
            overlap_p2p_comm=overlap_p2p_comm,
            shares_by_speed=shares_by_speed,
            memory=memory,
            # Neither of recomputation and a higher ZeRO stage is always faster, so only one of them is left to a stage.
            # And the decision by stage is proven for one memory per stage, which shares by speed do not have.
            recompute_by_stage=memory.zero_stage != "auto" and not shares_by_speed,
            loading_s=0.0
            if include_data_loading
            else max((layer.forward_s[0] for layer in profile.loading), default=0.0),
            measured=profile,
            include_data_loading=include_data_loading,
            blocks=_blocks(profile),
        )


def check_transfers(schedule: str, *, overlap_p2p_comm: bool) -> None:
    """Raise ArgumentError if transfers do not overlap with computation under a schedule that needs them to."""
    # The order of sends and receives between the passes is only defined for one stage per device with whole backwards.
    if not overlap_p2p_comm and schedule not in SCHEDULES:
        raise ArgumentError(
            f"the schedule is {safe_repr(schedule)}, but only plans under {', '.join(SCHEDULES)} have transfers without"
            " overlap",
            f"use schedule={DEFAULT_SCHEDULE!r}, or leave out `overlap_p2p_comm`",
            code="unsupported",
        )


def _check_shares_by_speed(schedule: str, memory: MemoryModel, *, even_split: bool) -> None:
    """Raise ArgumentError if replicas can't get samples by their speed under these options."""
    if even_split:
        raise ArgumentError(
            "`shares_by_speed` gives replicas different numbers of samples, but `even_split` forbids that",
            "leave out one of both",
            code="conflict",
        )
    if memory.max_zero_stage >= 2:
        raise ArgumentError(
            "replicas with shares by speed are planned with ZeRO stage 0 or 1, but"
            f" `zero_stage` is {safe_repr(memory.zero_stage)}",
            "use zero_stage=1, or leave out `shares_by_speed`",
            code="conflict",
        )
    if schedule not in SCHEDULES:
        raise ArgumentError(
            f"the schedule is {safe_repr(schedule)}, but only plans under {', '.join(SCHEDULES)} have shares by speed",
            f"use schedule={DEFAULT_SCHEDULE!r}, or leave out `shares_by_speed`",
            code="unsupported",
        )


def check_sharding(schedule: str, memory: MemoryModel) -> None:
    """Raise ArgumentError if replicas shard more than the optimizer state under a schedule without such messages."""
    # Their messages lengthen whole passes, and with several stages per device several layers would be gathered at once.
    if memory.max_zero_stage >= 2 and schedule not in SCHEDULES:
        raise ArgumentError(
            f"the schedule is {safe_repr(schedule)}, but only plans under {', '.join(SCHEDULES)} have ZeRO stage"
            f" {memory.zero_stage if memory.zero_stage != 'auto' else '2 or 3'}",
            f"use schedule={DEFAULT_SCHEDULE!r}, or zero_stage=1",
            code="unsupported",
        )


def _blocks(profile: Profile) -> Blocks | None:
    try:
        return Blocks.of(profile)
    except ArgumentError:
        return None


def _pipeline_micro_batch_sizes(
    profile: Profile, global_batch_size: int, pipeline_micro_batch_size: int | None, smallest: int
) -> tuple[int, ...]:
    """Return the micro-batch sizes to try: the given one, or all divisors of the batch from `smallest` on."""
    parts = divisors(global_batch_size)
    if pipeline_micro_batch_size is None:
        largest = global_batch_size
        sizes = [size for size in parts if size >= smallest and global_batch_size // size <= _MAX_MICRO_BATCHES]
    else:
        pipeline_micro_batch_size = check_int(
            "pipeline_micro_batch_size", pipeline_micro_batch_size, maximum=NO_LIMIT - 1
        )
        if global_batch_size % pipeline_micro_batch_size:
            # Of two divisors at the same distance, suggest the smaller one.
            nearest = min(parts, key=lambda size: (abs(size - pipeline_micro_batch_size), size))
            raise ArgumentError(
                f"pipeline_micro_batch_size is {pipeline_micro_batch_size}, but it must divide"
                f" global_batch_size={global_batch_size}",
                f"use pipeline_micro_batch_size={nearest}, or leave it out to let the planner choose",
            )
        if global_batch_size // pipeline_micro_batch_size > _MAX_MICRO_BATCHES:
            raise ArgumentError(
                f"pipeline_micro_batch_size is {pipeline_micro_batch_size}, but a step of {global_batch_size}"
                f" samples may have at most"
                f" {_MAX_MICRO_BATCHES} micro-batches",
                "use a larger pipeline_micro_batch_size, or leave it out",
                code="too_large",
            )
        largest = pipeline_micro_batch_size
        sizes = [pipeline_micro_batch_size]
    if largest < smallest:
        measured = smallest == profile.batch_sizes[0]
        asked = f"the {smallest} that profile `{profile.name}` was measured with"
        raise ArgumentError(
            f"a micro-batch of {pluralize(largest, 'sample')} is smaller than"
            f" {asked if measured else f'min_samples_per_replica, {smallest}'}",
            f"raise the batch size, or {'trust the profile below that' if measured else 'allow that'}"
            f" with min_samples_per_replica={largest}",
        )
    return tuple(sizes)


def _checked(given: MemoryModel | OptimizerName | None, cluster: Cluster) -> MemoryModel:
    memory = MemoryModel.preset(given) if isinstance(given, str) else MemoryModel() if given is None else given
    check_is("memory", memory, MemoryModel, "use the name of an optimizer, like `adam-bf16`, or a `hpgo.MemoryModel`")
    if not (isinstance(memory.zero_stage, str) and memory.zero_stage == "auto"):
        check_int("zero_stage", memory.zero_stage, minimum=0, maximum=3)
    check_flag("shard_optimizer", memory.shard_optimizer)
    if isinstance(memory.reserved_bytes, str):
        memory = replace(memory, reserved_bytes=parse_bytes(memory.reserved_bytes))
    memory = replace(
        memory,
        gradients_per_weight=number("gradients_per_weight", memory.gradients_per_weight),
        optimizer_per_weight=number("optimizer_per_weight", memory.optimizer_per_weight),
        reserved_bytes=number("reserved_bytes", memory.reserved_bytes),
    )
    # If the reserve exceeds every device, no plan can fit. This error is clearer than an infeasible search.
    largest = max((node.device for node in cluster.nodes), key=lambda device: device.memory_bytes)
    if memory.reserved_bytes >= largest.memory_bytes:
        raise ArgumentError(
            f"reserved_bytes is {format_bytes(memory.reserved_bytes)}, but `{largest.name}` has"
            f" {format_bytes(largest.memory_bytes)}",
            "reserve less memory, or use a cluster whose devices have more",
            code="insufficient_memory",
        )
    return memory


def check_gpus(profile: Profile, cluster: Cluster) -> None:
    """Raise ArgumentError if a device of `cluster` has another number of GPUs than the measurement of `profile`."""
    # A profile that was measured on several GPUs per device has times of the group, not of one GPU.
    measured, there = profile.gpus_per_device, cluster.gpus_per_device
    if measured != there:
        raise ArgumentError(
            f"profile `{profile.name}` was measured on {pluralize(measured, 'GPU')} per device, but a device of cluster"
            f" `{cluster.name}` is {pluralize(there, 'GPU')}",
            "set the same `gpus_per_device` in both files: the number of GPUs that share each layer",
            code="mismatch",
        )
