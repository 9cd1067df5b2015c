"""Plans: which device runs which layers, in how many micro-batches, how long a step takes, and how sure that is.

`plan` searches, `evaluate` prices a plan that you give, `exhaustive` tries everything on small questions. All three
answer with a `Plan`: plain numbers, without native or framework objects, so it can be pickled, compared and saved.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.cluster import Cluster
from hpgo.documents import Section, parse
from hpgo.errors import ArgumentError, HpgoError, InfeasibleError
from hpgo.profile import Profile
from hpgo.units import format_bytes, parse_bytes
from hpgo.wording import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.timeline import Timeline

SCHEDULES = ("1f1b", "eager_1f1b", "gpipe")
"""What the search plans for, with a proof; `hpgo.choose` runs other schedules on what it finds.

`1f1b` warms up as little as keeps all stages busy; `eager_1f1b` runs stages ahead where memory allows, which hides
transfers; `gpipe` runs all forwards first."""

_VERSION = 1
_NO_LIMIT = 2**31
_MOST_MICRO_BATCHES = 2**16  # of a step; simulations of more would take seconds each


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a device holds besides activations, in bytes for each byte of weights.

    The defaults are Adam in the precision of the weights: gradients once, two moments.
    """

    gradients_per_weight: float = 1.0
    optimizer_per_weight: float = 2.0
    shard_optimizer: bool = False
    """Replicas of a stage share its optimizer state evenly (ZeRO stage 1)."""
    reserved_bytes: float = 0.0
    """Of each device, for the framework's own use."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one device of a stage holds at its peak."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Kept for the backward passes of all micro-batches in flight."""
    buffers_bytes: float
    """An activation and a gradient on the way, on each side."""

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers in a row on devices that split each micro-batch among them. Times are seconds."""

    layers: tuple[str, ...]
    """Layer ids, in topological order."""
    devices: tuple[int, ...]
    """Device numbers, machine by machine from 0; one replica each."""
    share: int
    """Samples of a micro-batch on the device that gets most."""
    in_flight: int
    """Micro-batches whose activations it holds at once, at most; under 1F1B also the forwards before a backward."""
    forward_s: float
    """One micro-batch."""
    backward_s: float
    """One micro-batch, with the forward that recomputation repeats."""
    transfer_s: float
    """Sending one micro-batch's output to the next stage, or its gradient back."""
    transfer_busy_s: float
    """The part of it that occupies the fullest port; the rest is latency."""
    sync_s: float
    """Summing gradients over the replicas."""
    sync_tail_s: float
    """The part of it that outlasts the last backward pass."""
    memory: Memory
    capacity_bytes: float
    """Memory of its smallest device, less what is reserved."""

    @property
    def replicas(self) -> int:
        """Devices that run copies of it."""
        return len(self.devices)

    @property
    def headroom_bytes(self) -> float:
        """Memory that stays free; negative if the stage doesn't fit."""
        return self.capacity_bytes - self.memory.total_bytes


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
class RankPlan:
    """What one process of a launcher does."""

    rank: int
    stage: int
    replica: int
    layers: tuple[str, ...]
    rows: range
    """Its samples of each micro-batch."""
    micro_batches: int
    in_flight: int
    peers: tuple[int, ...]
    """Ranks that run the same stage, this one included: the data-parallel group."""
    receives: tuple[tuple[int, range], ...]
    """Ranks of the stage before, with the rows of a micro-batch that come from each."""
    sends: tuple[tuple[int, range], ...]
    """Ranks of the next stage, with the rows of a micro-batch that go to each."""


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
    finished: bool = True
    """Whether the search ran to its end; else a deadline or Ctrl-C stopped it."""
    labels: int = 0
    """Partial plans that the search looked at."""
    loading_s: float = 0.0
    """Seconds in which the profile's slowest input layer loads one batch of the profile; not part of the step."""
    simulated: int = 0
    """Plans that it simulated."""

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
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return all(stage.headroom_bytes >= 0 for stage in self.stages)

    @property
    def limit(self) -> str:
        """What keeps the step from being shorter, in words."""
        from hpgo.limits import describe  # it reads plans

        return describe(self)

    def timeline(self) -> Timeline:
        """The simulated step: `hpgo.simulate` of this plan."""
        from hpgo.simulation import simulate  # it runs plans

        return simulate(self)

    def for_rank(self, rank: int) -> RankPlan:
        """What the process with this rank does, if rank r runs on device r.

        Raises ArgumentError for a rank that the plan leaves idle.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
        >>> mine = plan.for_rank(3)
        >>> mine.stage, mine.replica, mine.rows
        (0, 3, range(104, 138))
        """
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ArgumentError(f"rank is {rank!r}", "give a whole number, as the launcher's RANK")
        for index, stage in enumerate(self.stages):
            if rank in stage.devices:
                replica = stage.devices.index(rank)
                rows = self._rows(stage)[replica]
                before = self.stages[index - 1] if index else None
                after = self.stages[index + 1] if index + 1 < len(self.stages) else None
                return RankPlan(
                    rank=rank,
                    stage=index,
                    replica=replica,
                    layers=stage.layers,
                    rows=rows,
                    micro_batches=self.micro_batches,
                    in_flight=stage.in_flight,
                    peers=stage.devices,
                    receives=self._overlaps(rows, before),
                    sends=self._overlaps(rows, after),
                )
        raise ArgumentError(
            f"the plan leaves rank {rank} idle: it uses {self.devices} devices",
            "start only the ranks that `plan.stages` names, or let idle ones wait",
        )

    def _rows(self, stage: Stage) -> list[range]:
        base, longer = divmod(self.micro_batch_size, stage.replicas)
        ends = [replica * base + min(replica, longer) for replica in range(stage.replicas + 1)]
        return [range(begin, end) for begin, end in pairwise(ends)]

    def _overlaps(self, rows: range, other: Stage | None) -> tuple[tuple[int, range], ...]:
        if other is None:
            return ()
        shared = (
            (device, range(max(rows.start, theirs.start), min(rows.stop, theirs.stop)))
            for device, theirs in zip(other.devices, self._rows(other), strict=True)
        )
        return tuple((device, common) for device, common in shared if common)

    def to_json(self) -> str:
        """The plan as versioned JSON, described in `docs/plan.md`; `Plan.from_json` reads it back."""
        return json.dumps({"format": "hpgo.plan", "version": _VERSION} | asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> Plan:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it."""
        try:
            return cls._of_text(text, source)
        except ArgumentError as error:
            raise ArgumentError(error.message, error.hint or "make it again") from None

    @classmethod
    def _of_text(cls, text: str, source: str) -> Plan:
        if not text.lstrip().startswith("{"):
            raise ArgumentError(f"{source} is not a plan", "save plans with `-o plan.json`")
        top = Section(parse(text, source, ArgumentError), source, ArgumentError)
        if top.get("format", None) != "hpgo.plan":
            raise ArgumentError(f"{source} is not a plan", "save plans with `-o plan.json`")
        version = top.get("version", None)
        if version != _VERSION:
            raise ArgumentError(f"{source} is a plan of version {shown(version)}, not {_VERSION}")
        plan: Plan = _read(cls, top)
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
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ArgumentError(f"can't write `{path}`: {reason}", "name a file in a folder that exists") from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Raises ArgumentError naming the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"can't read plan {path}: {error.strerror}", "make one with `hpgo plan -o`") from None
        except UnicodeDecodeError:
            raise ArgumentError(f"{path} is not text", "make a plan with `hpgo plan -o`") from None
        return cls.from_json(text, source=str(path))

    def __str__(self) -> str:
        from hpgo.report import table  # it reads plans

        return table(self)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the native planner reads, checked: the arguments of `plan`."""

    global_batch_size: int
    micro_batch_sizes: tuple[int, ...]
    smallest_share: int
    uneven_shares: bool
    overlap_sync: bool
    recompute: tuple[bool, ...]
    schedule: str
    gradients_per_weight: float
    optimizer_per_weight: float
    shard_optimizer: bool
    reserved_bytes: float
    most_stages: int = _NO_LIMIT
    most_replicas: int = _NO_LIMIT
    loading_s: float = 0.0

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        *,
        global_batch_size: int,
        schedule: str,
        micro_batch_size: int | None,
        min_micro_batch_size: int | None,
        recompute: bool | str,
        uneven: bool,
        overlap: bool,
        memory: MemoryModel | None,
        max_stages: int | None,
        count_loading: bool,
    ) -> Settings:
        """Raises ArgumentError for arguments that make no sense."""
        if not isinstance(profile, Profile):
            raise ArgumentError(f"profile is {shown(profile)}", "make one, with `hpgo.read_profile` say")
        if not isinstance(cluster, Cluster):
            raise ArgumentError(f"cluster is {shown(cluster)}", "make one, with `hpgo.Cluster.parse` say")
        _check_count("global_batch_size", global_batch_size)
        if schedule not in SCHEDULES:
            raise ArgumentError(f"can't plan for schedule {schedule!r}", f"choose one of {', '.join(SCHEDULES)}")
        smallest = profile.batch_sizes[0] if min_micro_batch_size is None else min_micro_batch_size
        _check_count("min_micro_batch_size", smallest)
        if micro_batch_size is None:
            sizes = tuple(
                size
                for size in _divisors(global_batch_size)
                if size >= smallest and global_batch_size // size <= _MOST_MICRO_BATCHES
            )
        else:
            _check_count("micro_batch_size", micro_batch_size)
            if global_batch_size % micro_batch_size:
                near = min(_divisors(global_batch_size), key=lambda size: (abs(size - micro_batch_size), size))
                raise ArgumentError(
                    f"micro_batch_size {micro_batch_size} does not divide global_batch_size {global_batch_size}",
                    f"the nearest that does is {near}; leave it out to let the planner choose",
                )
            if global_batch_size // micro_batch_size > _MOST_MICRO_BATCHES:
                raise ArgumentError(
                    f"global_batch_size {global_batch_size} in micro-batches of {micro_batch_size} are more than"
                    f" {_MOST_MICRO_BATCHES} of them",
                    "choose a larger micro_batch_size, or leave it out",
                )
            sizes = (micro_batch_size,)
        if not sizes or sizes[-1] < smallest:
            raise ArgumentError(
                f"a micro-batch of {sizes[-1] if sizes else global_batch_size} samples is smaller than the"
                f" {smallest} that profile `{profile.name}` was measured with",
                f"raise the batch size, or trust the profile below that with min_micro_batch_size="
                f"{sizes[-1] if sizes else global_batch_size}",
            )
        if not isinstance(recompute, bool) and recompute != "auto":
            raise ArgumentError(f"recompute is {recompute!r}", "choose True, False or 'auto'")
        if max_stages is not None:
            _check_count("max_stages", max_stages)
        _check_bool("uneven", uneven)
        _check_bool("overlap", overlap)
        memory = MemoryModel() if memory is None else memory
        if not isinstance(memory, MemoryModel):
            raise ArgumentError(f"memory is {shown(memory)}", "make a `hpgo.MemoryModel`")
        _check_bool("shard_optimizer", memory.shard_optimizer)
        reserved_bytes = memory.reserved_bytes
        if isinstance(reserved_bytes, str):
            reserved_bytes = parse_bytes(reserved_bytes)
        for name, value in (
            ("gradients_per_weight", memory.gradients_per_weight),
            ("optimizer_per_weight", memory.optimizer_per_weight),
            ("reserved_bytes", reserved_bytes),
        ):
            if not _is_number(value):
                raise ArgumentError(f"{name} is {value!r}", "it must be a number, zero or more")
        return cls(
            global_batch_size=global_batch_size,
            micro_batch_sizes=sizes,
            smallest_share=smallest,
            uneven_shares=uneven,
            overlap_sync=overlap,
            recompute=(recompute,) if isinstance(recompute, bool) else (False, True),
            schedule=schedule,
            gradients_per_weight=float(memory.gradients_per_weight),
            optimizer_per_weight=float(memory.optimizer_per_weight),
            shard_optimizer=memory.shard_optimizer,
            reserved_bytes=float(reserved_bytes),
            most_stages=max_stages or _NO_LIMIT,
            loading_s=0.0 if count_loading else max((layer.forward_s[0] for layer in profile.loading), default=0.0),
        )


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    schedule: str = "eager_1f1b",
    micro_batch_size: int | None = None,
    min_micro_batch_size: int | None = None,
    recompute: bool | str = False,
    uneven: bool = True,
    overlap: bool = True,
    memory: MemoryModel | None = None,
    count_loading: bool = False,
    max_stages: int | None = None,
    deadline_s: float | None = None,
    progress: Callable[[float, float], object] | None = None,
) -> Plan:
    """The plan with the shortest simulated step, with a proven bound on how much shorter any other could be.

    Args:
        profile: what each layer costs.
        cluster: what is connected to what.
        global_batch_size: samples in a step, over all devices and micro-batches.
        schedule: one of `SCHEDULES`; `zb_h1`, `zb_h2`, `zb` or `sequential`, which are simulated on cuts that the
            search finds, without a bound; or `auto`, which takes the one with the shortest step, and says in
            `Plan.schedules` what each would give.
        micro_batch_size: samples that enter the pipeline at once; by default every divisor of the batch is tried
            that makes at most 65,536 micro-batches.
        min_micro_batch_size: the smallest share of a micro-batch that a device may get, in samples; by default the
            smallest batch size that the profile was measured with, below which it can't be trusted.
        recompute: keep activations (False), recompute them in the backward pass (True), or whichever is better
            ("auto").
        uneven: let replicas of a stage get shares that differ by one sample; the largest share counts.
        overlap: let gradient synchronisation start before the backward pass has ended, layer by layer.
        memory: what a device holds besides activations.
        count_loading: count the time of layers that load data (`Profile.loading`) as part of the step; by default a
            loader is taken to work ahead.
        max_stages: stages at most.
        deadline_s: return the best plan found so far after this many seconds, with its gap. Ctrl-C does the same.
        progress: called about ten times a second with the best step so far, infinite before there is one, and
            the lower bound.

    Raises ArgumentError or ClusterError for input that makes no sense; InfeasibleError if no plan fits the devices'
    memory, with the stage and device that lack it, how much, and what would help; HpgoError if the deadline, and
    KeyboardInterrupt if Ctrl-C, came before there was any plan.

    Method: docs/planner.md; after DAPPLE (Fan et al., PPoPP 2021) for stages, warm-up windows and uneven replication.

    >>> import hpgo
    >>> best = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> [(len(stage.layers), stage.replicas) for stage in best.stages], round(best.gap, 9)
    ([(32, 8), (21, 8)], 0.0)
    """
    if schedule not in SCHEDULES:
        from hpgo import choose  # loads what simulates, which the search does without

        choose.check(schedule)
    settings = Settings.of(
        profile,
        cluster,
        global_batch_size=global_batch_size,
        schedule=schedule if schedule in SCHEDULES else "1f1b",
        micro_batch_size=micro_batch_size,
        min_micro_batch_size=min_micro_batch_size,
        recompute=recompute,
        uneven=uneven,
        overlap=overlap,
        memory=memory,
        max_stages=max_stages,
        count_loading=count_loading,
    )
    profile = _timed(profile, count_loading)
    if deadline_s is not None and not (_is_number(deadline_s) and deadline_s > 0):
        raise ArgumentError(f"deadline_s is {deadline_s!r}", "give a positive number of seconds")
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress is {progress!r}", "give a function of the best step and the lower bound")
    if schedule in SCHEDULES:
        return search(profile, cluster, settings, deadline_s, progress)
    if schedule == "auto":
        return choose.best_of_all(profile, cluster, settings, deadline_s=deadline_s, progress=progress)
    return choose.best(profile, cluster, settings, schedule, deadline_s=deadline_s, progress=progress)


def search(
    profile: Profile,
    cluster: Cluster,
    settings: Settings,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The native search for one of `SCHEDULES`, as `plan` describes it."""
    try:
        found, facts = _native(profile, cluster, settings, deadline_s, progress)
    except InfeasibleError as error:
        raise _explained(error, profile, cluster, settings) from None
    best = plan_of(profile, cluster, settings, found)
    return replace(
        best,
        lower_bound_s=min(facts["lower_bound_s"], best.step_s),
        alternatives=_alternatives(profile, cluster, settings, best, facts),
        cuts=facts["one_order"] or "all",
        placements="all" if facts["exact_placement"] else "compact",
        finished=facts["finished"],
        labels=facts["labels"],
        simulated=facts["simulated"],
    )


def evaluate(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[tuple[Iterable[str] | int, Sequence[int]]],
    *,
    global_batch_size: int,
    schedule: str = "eager_1f1b",
    micro_batch_size: int | None = None,
    min_micro_batch_size: int | None = None,
    recompute: bool | str = False,
    uneven: bool = True,
    overlap: bool = True,
    memory: MemoryModel | None = None,
    count_loading: bool = False,
) -> Plan:
    """Prices a plan that you give, as `plan` would: the same model, the same report, no search.

    Args:
        profile: what each layer costs.
        cluster: what is connected to what.
        stages: for each stage its layers and its devices. Layers are ids, or a number of layers: the next so many in
            the profile's order.
        global_batch_size: samples in a step.
        schedule: as for `plan`, and so are all further arguments. Without `micro_batch_size` the best one is taken.
        micro_batch_size: see `plan`.
        min_micro_batch_size: see `plan`.
        recompute: see `plan`.
        uneven: see `plan`.
        overlap: see `plan`.
        memory: see `plan`.
        count_loading: see `plan`.

    A plan that doesn't fit memory is priced all the same: see `Plan.fits` and `Stage.headroom_bytes`.

    Raises ArgumentError for layers or devices that are unknown, missing or used twice.

    >>> import hpgo
    >>> profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    >>> plan = hpgo.evaluate(profile, cluster, [(26, range(8)), (27, range(8, 16))], global_batch_size=64)
    >>> plan.gap is None, plan.step_s > hpgo.plan(profile, cluster, global_batch_size=64).step_s
    (True, True)
    """
    if schedule not in SCHEDULES:
        from hpgo import choose  # loads what simulates, which the search does without

        choose.check(schedule)
    if schedule == "auto":
        raise ArgumentError("can't price a plan for schedule 'auto'", "it chooses a schedule for `plan`")
    settings = Settings.of(
        profile,
        cluster,
        global_batch_size=global_batch_size,
        schedule=schedule if schedule in SCHEDULES else "1f1b",
        micro_batch_size=micro_batch_size,
        min_micro_batch_size=min_micro_batch_size,
        recompute=recompute,
        uneven=uneven,
        overlap=overlap,
        memory=memory,
        max_stages=None,
        count_loading=count_loading,
    )
    profile = _timed(profile, count_loading)
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    rows: list[tuple[list[int], list[int]]] = []
    taken = 0
    for number, stage in enumerate(_listed("stages", stages)):
        if not isinstance(stage, tuple | list) or len(stage) != 2:
            raise ArgumentError(f"stage {number} is {shown(stage)}", "give each stage its layers and its devices")
        layers, devices = stage[0], _listed(f"the devices of stage {number}", stage[1])
        if isinstance(layers, int):
            _check_count(f"the number of layers of stage {number}", layers)
            if taken + layers > len(profile.layers):
                raise ArgumentError(
                    f"stages name {taken + layers} layers, but profile `{profile.name}` has {len(profile.layers)}",
                    "give each stage a smaller number of layers",
                )
            indices = list(range(taken, taken + layers))
        else:
            indices = []
            for layer in _listed(f"the layers of stage {number}", layers):
                if not isinstance(layer, str) or layer not in index_of:
                    raise ArgumentError(
                        f"profile `{profile.name}` has no layer {shown(layer)}", "stages name layer ids"
                    )
                indices.append(index_of[layer])
        taken += len(indices)
        for device in devices:
            if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < _NO_LIMIT:
                raise ArgumentError(f"stage {number} names device {device!r}", "devices are numbered from 0")
        rows.append((indices, devices))
    found = _core.evaluate(profile, cluster, settings, rows)
    for record, (_, devices) in zip(found["stages"], rows, strict=True):
        record["devices"] = devices
    priced = plan_of(profile, cluster, settings, found)
    return priced if schedule in SCHEDULES else choose.run_on(priced, schedule)


def exhaustive(
    profile: Profile,
    cluster: Cluster,
    *,
    global_batch_size: int,
    schedule: str = "eager_1f1b",
    micro_batch_size: int | None = None,
    min_micro_batch_size: int | None = None,
    recompute: bool | str = False,
    uneven: bool = True,
    overlap: bool = True,
    memory: MemoryModel | None = None,
    count_loading: bool = False,
) -> Plan:
    """The best of all plans, each of them simulated: at most 12 layers in a row on 8 devices. Arguments as for `plan`.

    Raises ArgumentError if the question is larger than that; InfeasibleError if no plan fits.

    >>> import hpgo
    >>> profile = hpgo.Profile.chain("toy", batch_size=1, forward_s=[1.0, 2.0, 1.0], backward_s=[2.0, 4.0, 2.0],
    ...                              activation_bytes=[1e6] * 3, parameter_bytes=[1e6] * 3)
    >>> cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    >>> hpgo.exhaustive(profile, cluster, global_batch_size=4).step_s.__round__(2)
    24.0
    """
    settings = Settings.of(
        profile,
        cluster,
        global_batch_size=global_batch_size,
        schedule=schedule,
        micro_batch_size=micro_batch_size,
        min_micro_batch_size=min_micro_batch_size,
        recompute=recompute,
        uneven=uneven,
        overlap=overlap,
        memory=memory,
        max_stages=None,
        count_loading=count_loading,
    )
    profile = _timed(profile, count_loading)
    found, plans = _core.exhaustive(profile, cluster, settings)
    best = plan_of(profile, cluster, settings, found)
    return replace(best, lower_bound_s=best.step_s, simulated=plans)


def _ratio(value: float, base: float) -> float:
    """`value / base`, for times that may be zero: one if both are."""
    if base:
        return value / base
    return math.inf if value else 1.0


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _NO_LIMIT:
        raise ArgumentError(f"{name} is {value!r}", f"give a whole number, at least 1 and below {_NO_LIMIT}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {value!r}", "choose True or False")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str):
        raise ArgumentError(f"{name} are {shown(values)}", "give a list")
    try:
        return list(values)
    except TypeError:
        raise ArgumentError(f"{name} are {shown(values)}", "give a list") from None


_RECORDS = {
    f"tuple[{record.__name__}, ...]": record for record in (Stage, Alternative, ScheduleChoice)
}  # annotations of fields that hold records


def _read(record: Any, section: Section) -> Any:
    """A record of this module from a section of JSON, by its fields' annotations; numbers are finite."""
    values: dict[str, object] = {}
    for field in fields(record):
        name, kind = field.name, str(field.type)
        if name == "schedules" and name not in section:  # added within version 1
            continue
        value = section.get(name)
        if kind == "str":
            values[name] = section.text(name)
        elif kind == "int":
            values[name] = section.whole(name)
        elif kind == "bool":
            values[name] = value if isinstance(value, bool) else section.wrong(name, "true or false", value)
        elif kind == "float" or (kind == "float | None" and value is not None):
            values[name] = number = section.number(name)
            if not math.isfinite(number):
                section.wrong(name, "a finite number", value)
        elif kind == "float | None":
            values[name] = None
        elif kind == "Memory":
            values[name] = _read(Memory, Section(value, f"{section.where}, {name}", ArgumentError))
        elif kind in _RECORDS:
            values[name] = tuple(
                _read(_RECORDS[kind], Section(row, f"{section.where}, {name} {at}", ArgumentError))
                for at, row in enumerate(section.items(name))
            )
        else:
            item = str if kind == "tuple[str, ...]" else int
            entries = section.items(name)
            if not all(isinstance(entry, item) and entry is not True and entry is not False for entry in entries):
                section.fail(
                    f"`{name}` must be a list of {'text' if item is str else 'whole numbers'}", "make it again"
                )
            values[name] = tuple(entries)
    section.done()
    return record(**values)


def _native(
    profile: Profile,
    cluster: Cluster,
    settings: Settings,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The native planner's answer. HpgoError, and not Ctrl-C, tells a deadline that came before any plan."""
    started_s = time.monotonic()
    try:
        return _core.plan(profile, cluster, settings, deadline_s, progress)
    except KeyboardInterrupt:
        if deadline_s is None or time.monotonic() - started_s < deadline_s:
            raise
        raise HpgoError(f"{deadline_s:g} s passed before there was any plan", "give it more time") from None


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def plan_of(profile: Profile, cluster: Cluster, settings: Settings, found: dict[str, Any]) -> Plan:
    """What the native planner found or priced."""
    stages = []
    for record in found["stages"]:
        price = record["price"]
        stages.append(
            Stage(
                layers=tuple(profile.layers[index].id for index in record["layers"]),
                devices=tuple(record["devices"]),
                in_flight=record["window"],
                **price | {"memory": Memory(**price["memory"])},
            )
        )
    micro_batch_size = found["micro_batch_size"]
    one_device_s = settings.global_batch_size // micro_batch_size * profile_step_s(profile, micro_batch_size)
    return Plan(
        profile=profile.name,
        cluster=cluster.name,
        schedule=settings.schedule,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=micro_batch_size,
        recompute=found["recompute"],
        stages=tuple(stages),
        step_s=found["step_s"],
        one_device_step_s=one_device_s,
        loading_s=settings.loading_s,
        cluster_devices=cluster.devices,
    )


def profile_step_s(profile: Profile, batch_size: int) -> float:
    """Forward and backward seconds of all layers for so many samples, interpolated as the planner does."""
    sizes = profile.batch_sizes
    totals = [sum(layer.forward_s[at] + layer.backward_s[at] for layer in profile.layers) for at in range(len(sizes))]
    if batch_size <= sizes[0]:
        return totals[0] * batch_size / sizes[0]
    for (low, high), (low_s, high_s) in zip(pairwise(sizes), pairwise(totals), strict=True):
        if batch_size <= high:
            return low_s + (high_s - low_s) * (batch_size - low) / (high - low)
    return totals[-1] * batch_size / sizes[-1]


def _alternatives(
    profile: Profile, cluster: Cluster, settings: Settings, best: Plan, search: dict[str, Any]
) -> tuple[Alternative, ...]:
    alternatives = []
    for name, key in (("data parallelism", "data_parallel"), ("straight pipeline", "straight")):
        if search[key] is None:
            if key == "data_parallel":
                why = "no micro-batch can be shared by two devices"
            else:
                why = "no plan of this kind fits" if search["finished"] else "not searched, as the search was stopped"
            alternatives.append(Alternative(name, None, 0, 0, 0.0, why))
            continue
        other = plan_of(profile, cluster, settings, search[key])
        missing = max(0.0, -min(stage.headroom_bytes for stage in other.stages))
        slower = _ratio(other.step_s, best.step_s) - 1
        if missing:
            why = f"lacks {format_bytes(missing)} on each device"
        elif slower <= 1e-9:
            why = "is this plan"
        else:
            why = other.limit
        step_s = None if missing else other.step_s
        alternatives.append(Alternative(name, step_s, len(other.stages), other.micro_batch_size, missing, why))
    return tuple(alternatives)


def _timed(profile: Profile, count_loading: bool) -> Profile:
    return profile if count_loading else profile.without_loading()


# Seconds to look for the closest plan, and for whether a change would make some plan fit.
_EXPLAINED_S = 4.0
_HINT_S = 1.5


def _explained(error: InfeasibleError, profile: Profile, cluster: Cluster, settings: Settings) -> HpgoError:
    """Names the stage that lacks memory in the plan that comes closest, and what would make some plan fit."""
    until_s = time.monotonic() + _EXPLAINED_S
    try:
        closest = plan_of(profile, cluster, settings, _core.closest_plan(profile, cluster, settings, _EXPLAINED_S))
    except HpgoError:
        return error
    except KeyboardInterrupt:  # nothing found in time, or Ctrl-C
        if time.monotonic() < until_s:
            raise
        return error
    index, stage = min(enumerate(closest.stages), key=lambda row: row[1].headroom_bytes)
    device = _device_name(cluster, stage.devices[0])
    helps: list[str] = []
    for words, changed_settings, changed_cluster in (
        ("recompute activations", replace(settings, recompute=(True,)), cluster),
        ("shard the optimizer state", replace(settings, shard_optimizer=True), cluster),
        ("recompute and shard", replace(settings, recompute=(True,), shard_optimizer=True), cluster),
        (f"use {2 * cluster.devices} devices", settings, replace(cluster, machines=cluster.machines * 2)),
    ):
        if helps and words == "recompute and shard":
            continue
        try:
            if _core.fits(profile, changed_cluster, changed_settings, _HINT_S):
                helps.append(words)
        except HpgoError:  # twice as many devices may be more than there can be
            continue
    smaller = " or a smaller micro-batch" if len(settings.micro_batch_sizes) == 1 else ""
    hint = f"some plan fits if you {', or '.join(helps)}" if helps else f"use devices with more memory{smaller}"
    return InfeasibleError(
        f"no plan fits: in the one that comes closest, stage {index} of {len(closest.stages)}"
        f" ({len(stage.layers)} layers, micro-batch {closest.micro_batch_size}) needs"
        f" {format_bytes(stage.memory.total_bytes)} on each device, but `{device}` has"
        f" {format_bytes(stage.capacity_bytes)}: {format_bytes(-stage.headroom_bytes)} short",
        hint,
    )


def _device_name(cluster: Cluster, device: int) -> str:
    for machine in cluster.machines:
        if device < machine.count:
            return machine.device.name
        device -= machine.count
    return "device"
