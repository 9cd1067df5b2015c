"""What the planner is asked: a profile, a cluster, and settings, checked once for whoever answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypedDict

from hpgo.base.checks import check_flag, check_int, check_is, choice, number
from hpgo.base.divisors import divisors
from hpgo.base.messages import did_you_mean, pluralize, safe_repr
from hpgo.base.units import format_bytes, parse_bytes
from hpgo.errors import ArgumentError
from hpgo.machine.cluster import Cluster, cluster_of
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
"""What the search plans for, with a proof; `hpgo.planning.schedule_search` plans for other schedules.

`1f1b` warms up as little as keeps all stages busy; `eager_1f1b` runs stages ahead where memory allows, which hides
transfers; `gpipe` runs all forwards first."""

DEFAULT_SCHEDULE = "eager_1f1b"
NO_LIMIT = 2**31
_MOST_MICRO_BATCHES = 2**16  # of a step; simulations of more would take seconds each


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a device holds besides activations, in bytes for each byte of weights.

    The defaults are Adam in the precision of the weights: gradients once, two moments. `preset` knows others by name.
    """

    gradients_per_weight: float = 1.0
    optimizer_per_weight: float = 2.0
    shard_optimizer: bool = False
    """Replicas of a stage share its optimizer state evenly (ZeRO stage 1)."""
    reserved_bytes: float = 0.0
    """Of each device, for the framework's own use."""

    @classmethod
    def preset(
        cls, name: OptimizerName, *, shard_optimizer: bool = False, reserved_bytes: str | float = 0.0
    ) -> MemoryModel:
        """The model of one of `hpgo.programs.optimizers.OPTIMIZERS`; `reserved_bytes` takes a unit, as in "2 GB".

        Raises ArgumentError if there is none of that name, and for a size that makes no sense.

        >>> MemoryModel.preset("adam-bf16").optimizer_per_weight
        6.0
        """
        kept = OPTIMIZERS[choice("optimizer", name, OPTIMIZERS)]
        reserved = parse_bytes(reserved_bytes) if isinstance(reserved_bytes, str) else reserved_bytes
        return cls(kept.gradients / kept.weights, kept.state / kept.weights, shard_optimizer, reserved)

    @property
    def optimizer(self) -> OptimizerName | None:
        """The preset that keeps as many bytes; None if none does.

        >>> MemoryModel().optimizer
        'adam-fp32'
        """
        each = (self.gradients_per_weight, self.optimizer_per_weight)
        presets = ((name, MemoryModel.preset(name)) for name in OPTIMIZERS)
        return next(
            (name for name, one in presets if (one.gradients_per_weight, one.optimizer_per_weight) == each), None
        )


class PlanOptions(TypedDict, total=False):
    """The arguments that `plan`, `evaluate` and `exhaustive` share; `plan` explains them."""

    schedule: PlannedSchedule
    micro_batch_size: int | None
    min_micro_batch_size: int | None
    recompute: bool | Literal["auto"]
    even_split: bool
    """What `even_split` was: its opposite."""
    overlap: bool
    memory: MemoryModel | OptimizerName | None
    include_data_loading: bool


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A checked question, as the native planner reads it."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    min_samples_per_replica: int
    """Samples of a micro-batch that a device gets, at least."""
    recompute: tuple[bool, ...]
    schedule: str
    even_split: bool
    overlap: bool
    memory: MemoryModel
    loading_s: float
    """Of loading one batch of the profile, where the profile leaves it out."""
    measured: Profile
    """The profile as it was given; `profile` leaves out loading, unless `include_data_loading`, and its split backward passes
    are consistent."""
    include_data_loading: bool
    blocks: Blocks | None
    """The row of blocks that frameworks see in the profile; None if it is no such row."""
    max_stages: int = NO_LIMIT
    max_replicas: int = NO_LIMIT
    equal_replicas: bool = False
    """Whether all stages must have the same number of replicas."""
    parts: tuple[tuple[int, ...], ...] | None = None
    """Parts of the model in a row, as layers by their place in the profile, if stages hold whole ones only."""
    together: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that no cut may separate."""
    framework: Framework | None = None
    """Who is to run the plan; None if anybody may."""
    sessions: Sessions = field(default_factory=Sessions, compare=False, repr=False)
    """What the native planner knows of this question and of its variants."""

    @property
    def needs_full_ranks(self) -> bool:
        """Whether interleaved schedules need as many micro-batches as ranks, or more: a framework's own do."""
        return self.framework is not None and not self.framework.by_file

    @property
    def has_single_wave(self) -> bool:
        """Whether Hanayo has two stages on each device, a single V."""
        return self.framework is not None and self.framework.single_v

    @property
    def session(self) -> _core.Session:
        """The native planner's model, cuts and cluster, which variants with other settings share."""
        return self.sessions.of(self.profile, self.cluster, self.parts, self.together)

    @classmethod
    def of(
        cls,
        profile: Profile | str | os.PathLike[str],
        cluster: Cluster | str | os.PathLike[str],
        *,
        global_batch_size: int,
        schedule: str = DEFAULT_SCHEDULE,
        micro_batch_size: int | None = None,
        min_micro_batch_size: int | None = None,
        recompute: bool | str = False,
        even_split: bool = False,
        overlap: bool = True,
        memory: MemoryModel | OptimizerName | None = None,
        include_data_loading: bool = False,
        **unknown: object,
    ) -> PlanningProblem:
        """The question that the arguments of `hpgo.plan` ask.

        Raises ArgumentError for those that make no sense, TypeError for one that there isn't.
        """
        for name in unknown:
            raise TypeError(
                f"there is no argument {safe_repr(name)}: {did_you_mean(name, PlanOptions.__annotations__)}"
            )
        profile, cluster = profile_of(profile), cluster_of(cluster)
        check_gpus(profile, cluster)
        global_batch_size = check_int("global_batch_size", global_batch_size, most=NO_LIMIT - 1)
        smallest = profile.batch_sizes[0]
        if min_micro_batch_size is not None:
            smallest = check_int("min_micro_batch_size", min_micro_batch_size, most=NO_LIMIT - 1)
        sizes = _micro_batch_sizes(profile, global_batch_size, micro_batch_size, smallest)
        if not (isinstance(recompute, bool) or (isinstance(recompute, str) and recompute == "auto")):
            raise ArgumentError(f"recompute is {safe_repr(recompute)}", "choose True, False or 'auto'")
        if not isinstance(schedule, str):
            raise ArgumentError(
                f"schedule is {safe_repr(schedule)}", f"choose auto or one of {', '.join(SCHEDULES)}, say"
            )
        switches = {"even_split": even_split, "overlap": overlap, "include_data_loading": include_data_loading}
        for name, value in switches.items():
            check_flag(name, value)
        return cls(
            profile=(profile if include_data_loading else profile.without_loading()).with_consistent_split(),
            cluster=cluster,
            global_batch_size=global_batch_size,
            micro_batch_sizes=sizes,
            min_samples_per_replica=smallest,
            recompute=(recompute,) if isinstance(recompute, bool) else (False, True),
            schedule=schedule,
            even_split=even_split,
            overlap=overlap,
            memory=_checked(memory, cluster),
            loading_s=0.0
            if include_data_loading
            else max((layer.forward_s[0] for layer in profile.loading), default=0.0),
            measured=profile,
            include_data_loading=include_data_loading,
            blocks=_blocks(profile),
        )


def _blocks(profile: Profile) -> Blocks | None:
    try:
        return Blocks.of(profile)
    except ArgumentError:
        return None


def _micro_batch_sizes(
    profile: Profile, global_batch_size: int, micro_batch_size: int | None, smallest: int
) -> tuple[int, ...]:
    """The sizes to try: the one given, or every divisor of the batch that is large enough."""
    parts = divisors(global_batch_size)
    if micro_batch_size is None:
        largest = global_batch_size
        sizes = [size for size in parts if size >= smallest and global_batch_size // size <= _MOST_MICRO_BATCHES]
    else:
        micro_batch_size = check_int("micro_batch_size", micro_batch_size, most=NO_LIMIT - 1)
        if global_batch_size % micro_batch_size:
            nearest = min(parts, key=lambda size: (abs(size - micro_batch_size), size))
            raise ArgumentError(
                f"micro_batch_size {micro_batch_size} does not divide global_batch_size {global_batch_size}",
                f"the nearest that does is {nearest}; leave it out to let the planner choose",
            )
        if global_batch_size // micro_batch_size > _MOST_MICRO_BATCHES:
            raise ArgumentError(
                f"global_batch_size {global_batch_size} in micro-batches of {micro_batch_size} are more than"
                f" {_MOST_MICRO_BATCHES} of them",
                "choose a larger micro_batch_size, or leave it out",
                code="too_large",
            )
        largest = micro_batch_size
        sizes = [micro_batch_size]
    if largest < smallest:
        measured = smallest == profile.batch_sizes[0]
        asked = f"the {smallest} that profile `{profile.name}` was measured with"
        raise ArgumentError(
            f"a micro-batch of {pluralize(largest, 'sample')} is smaller than"
            f" {asked if measured else f'min_micro_batch_size, {smallest}'}",
            f"raise the batch size, or {'trust the profile below that' if measured else 'allow that'}"
            f" with min_micro_batch_size={largest}",
        )
    return tuple(sizes)


def _checked(given: MemoryModel | OptimizerName | None, cluster: Cluster) -> MemoryModel:
    memory = MemoryModel.preset(given) if isinstance(given, str) else MemoryModel() if given is None else given
    check_is("memory", memory, MemoryModel, "name an optimizer, like `adam-bf16`, or make a `hpgo.MemoryModel`")
    check_flag("shard_optimizer", memory.shard_optimizer)
    if isinstance(memory.reserved_bytes, str):
        memory = replace(memory, reserved_bytes=parse_bytes(memory.reserved_bytes))
    memory = replace(
        memory,
        gradients_per_weight=number("gradients_per_weight", memory.gradients_per_weight),
        optimizer_per_weight=number("optimizer_per_weight", memory.optimizer_per_weight),
        reserved_bytes=number("reserved_bytes", memory.reserved_bytes),
    )
    largest = max((machine.device for machine in cluster.nodes), key=lambda device: device.memory_bytes)
    if memory.reserved_bytes >= largest.memory_bytes:
        raise ArgumentError(
            f"reserved_bytes is {format_bytes(memory.reserved_bytes)}, but `{largest.name}` has"
            f" {format_bytes(largest.memory_bytes)}",
            "reserve less, or name a cluster whose devices have more memory",
            code="insufficient_memory",
        )
    return memory


def check_gpus(profile: Profile, cluster: Cluster) -> None:
    """Raises ArgumentError if devices of `cluster` stand for other numbers of GPUs than `profile` was measured on."""
    measured, there = profile.gpus_per_device, cluster.gpus_per_device
    if measured != there:
        raise ArgumentError(
            f"profile `{profile.name}` was measured on {pluralize(measured, 'GPU')} a device, but a device of cluster"
            f" `{cluster.name}` is {pluralize(there, 'GPU')}",
            "give both the same `gpus_per_device`: how many GPUs share each layer",
            code="mismatch",
        )
