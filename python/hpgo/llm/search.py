"""Search for the fastest configurations of a transformer on GPUs: `hpgo.plan_llm`.

The search is best-first. It bounds groups of configurations together, then the configurations of a group that may fit
one by one, and simulates them in the order of their bounds. It stops when the next bound is no better than the last
result. So it returns the same configurations as a simulation of every configuration that the framework runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, get_args

from hpgo.base.checks import check_int, choice, number
from hpgo.base.messages import shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate
from hpgo.llm.config_groups import ConfigGroup, config_groups, leanest, min_recomputed
from hpgo.llm.estimate import (
    LlmEstimate,
    constants_of,
    estimate_stages,
    max_memory_bytes,
    on_platform,
    simulated_step_s,
    stack_on,
    with_range,
)
from hpgo.llm.frameworks import framework_support
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.parallelism import DegreeError, ParallelismConfig, Precision
from hpgo.llm.platform import Platform
from hpgo.llm.search_space import SearchSpace
from hpgo.llm.step_range import RELATIVE_ERROR
from hpgo.llm.validated_features import unvalidated_features
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.stack import Stack
    from hpgo.llm.step_time import PipelineStages
    from hpgo.programs.names import LlmFramework

MOST_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class LlmPlanSearch(Record):
    """The fastest configurations that fit, and the size of the search.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, framework="torchtitan")
    >>> found.best.unvalidated_features, found.best.step_s <= found.estimates[0].step_s * 1.07
    ((), True)
    """

    estimates: tuple[LlmEstimate, ...]
    """Estimates, the fastest first: `top` of them, and `best` after these if it is not among them."""
    configurations: int
    """Number of all configurations of the search space."""
    bounded: int
    """Number of configurations that were bounded one by one. The bounds of groups sufficed for the others."""
    simulated: int
    """Number of configurations that were simulated. By their bounds, no others are faster than `estimates`."""
    transformer: Transformer
    cluster: Cluster
    """Cluster, reduced to the GPUs that were asked for."""
    framework: str
    """Framework and version that run all configurations: `megatron@0.16`."""
    said: str
    """Description of the search space: the framework, and what was fixed and excluded."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.estimates:
            raise ArgumentError("a search of configurations has none", "make it again")

    @property
    def alike(self) -> tuple[LlmEstimate, ...]:
        """Estimates that differ from the fastest one, which is the first of them, by less than `RELATIVE_ERROR`."""
        fastest = self.estimates[0]
        return tuple(one for one in self.estimates if one.step_s <= fastest.step_s * (1 + RELATIVE_ERROR))

    @property
    def best(self) -> LlmEstimate:
        """Estimate with the fewest unvalidated features among those within the error of the fastest.

        Among equal ones it is the fastest. No configuration of the search space is better in that sense.
        """
        return min(self.alike, key=lambda one: (len(one.unvalidated_features), one.step_s))

    def plan(self, place: int | None = None) -> LlmPlan:
        """Return the plan of the best configuration, or of the one at a place of the list, which starts with 1.

        Raises ArgumentError if the list is shorter.

        >>> import hpgo
        >>> found = hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)
        >>> found.plan(2).estimate == found.estimates[1]
        True
        """
        from hpgo.llm.plan import LlmPlan

        chosen = self.best
        if place is not None:
            hint = f"the list has {len(self.estimates)} configurations"
            chosen = self.estimates[check_int("place", place, most=len(self.estimates), hint=hint) - 1]
        return LlmPlan(estimate=chosen, transformer=self.transformer, cluster=self.cluster, framework=self.framework)


def plan_llm(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    precision: Precision = "bf16",
    devices: int | None = None,
    framework: LlmFramework = "megatron",
    fix: dict[str, int | str] | None = None,
    exclude: Iterable[str] = (),
    headroom_bytes: float = 0.0,
    stack: Stack | str | os.PathLike[str] | None = None,
    platform: Platform | DeviceRecord | None = None,
    top: int = 10,
) -> LlmPlanSearch:
    """Find the fastest configurations of a transformer that fit in memory, among all that a framework runs.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal nodes with devices whose rates are known; a device is a GPU.
        global_batch_size: sequences per step.
        seq_length: tokens per sequence.
        precision: number format of matrix multiplications: `bf16`, `fp16`, `fp8` or `fp4`.
        devices: number of GPUs to use, the first of the cluster; None means all.
        framework: `megatron`, `torchtitan` or `deepspeed`, perhaps with a version: `megatron@0.16`.
        fix: values that all configurations must have: `{"tp": 4, "zero_stage": 1}`; also `cp`, `ep`, `pp`, `vpp`,
            `pp_schedule`, `dp`, `micro_batch_size` and `recompute`.
        exclude: features to leave out: `["cp"]`, or single values: `["zero_stage=0", "micro_batch_size=1"]`.
        headroom_bytes: memory of each GPU to leave free, in addition to the columns of the estimate.
        stack: software stack, by its name or its file; None means the one that `framework` implies on the device.
        platform: constants fitted to steps on your cluster (`hpgo.Platform.read`), or the rates of a measured node
            (`hpgo.llm.platform.read_platform`). None uses the published ones.
        top: number of configurations to return.

    The search space has:

    - tensor parallelism inside a node, with sequence parallelism;
    - context parallelism by powers of 2;
    - every pipeline, interleaved or not, whose ranks have the same number of layers, or one layer less on the end
      ranks; for models with experts also stages with a remainder, and with Megatron-LM any smaller number of layers on
      the end ranks;
    - 1F1B, and schedules with split backward passes if the framework runs them;
    - expert parallelism by every divisor of the experts and of the GPUs of a stage;
    - every micro-batch size that divides the batch, and all ZeRO stages of the framework;
    - no recomputation, recomputation of all layers, or, if the framework supports it, of the fewest layers per stage
      that fit.

    All GPUs are used. If configurations differ only in the layers of the end ranks, the list has only the fastest.

    If the fastest configuration uses features that no published step on such devices has validated, the best one may
    be another within the error that uses fewer of them (`LlmPlanSearch.best`).

    Raises InfeasibleError if no configuration fits, with the shortfall and a suggestion; ArgumentError for fixed values
    that do not divide or that the framework does not run; and what `hpgo.estimate_llm` raises.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)
    >>> found.best.fits, found.best.gpus, found.configurations > found.simulated
    (True, 8, True)
    """
    model = transformer_of(transformer)
    cluster = cluster_of(cluster)
    global_batch_size, seq_length = (
        check_int("global_batch_size", global_batch_size),
        check_int("seq_length", seq_length),
    )
    choice("precision", precision, get_args(Precision))
    row, rules = framework_support(framework)
    space = SearchSpace.of(rules, row.title, fix=fix, exclude=exclude)
    headroom_bytes = number("headroom_bytes", headroom_bytes)
    top = check_int("top", top, most=MOST_SHOWN)
    if devices is not None:
        cluster = cluster.first(devices)
    found_stack = stack_on(stack, cluster, row.name, platform)
    constants = constants_of(cluster, found_stack, platform, model)
    cluster = on_platform(cluster, platform)
    gpus = Gpus.of(cluster, precision)
    # The framework decides the kernel options. The search varies degrees, ZeRO, schedule and recomputation only.
    config = ParallelismConfig(precision=precision, flatten_gradients=rules.flatten_gradients, dtensor=rules.dtensor)
    context = LayerContext(model, config, gpus, constants, seq_length)

    def groups_of(space: SearchSpace) -> Iterator[ConfigGroup]:
        space.check(model, gpus, global_batch_size=global_batch_size, seq_length=seq_length, precision=precision)
        yield from config_groups(context, global_batch_size, space)

    def has_some(space: SearchSpace) -> bool:
        try:
            return any(True for _ in groups_of(space))
        except ArgumentError:
            return False

    try:
        groups = _some(groups_of(space), model, gpus.count, global_batch_size, space)
    except DegreeError as error:
        from hpgo.llm.suggestions import with_open

        asked = {"gpus": gpus.count, "global_batch_size": global_batch_size}
        raise with_open(error, space, model=model, has_ways=has_some, **asked) from None
    search = _Search(groups, gpus.memory_bytes - headroom_bytes, top)
    search.run()
    if not search.best:
        from hpgo.llm.infeasibility import nothing_fits

        found = leanest(groups)
        assert found is not None, "there was a configuration"  # noqa: S101
        raise nothing_fits(found, cluster, space, global_batch_size, headroom_bytes=headroom_bytes)

    def estimated(step_s: float, one: PipelineStages) -> LlmEstimate:
        found = estimate_stages(one, cluster.name, step_s, global_batch_size=global_batch_size)
        return with_range(found, model, cluster, found_stack, platform)

    def unknown(config: ParallelismConfig) -> int:
        validated = platform.mechanisms if isinstance(platform, Platform) else ()
        return len(unvalidated_features(config, cluster.nodes[0].device.name, validated))

    # Full estimates are made only for the configurations that are returned. The search needs their step times alone.
    estimates = [estimated(*one) for one in search.fastest]
    max_s = estimates[0].step_s * (1 + RELATIVE_ERROR)
    estimates += [estimated(*one) for one in search.known(max_s, unknown)]
    return LlmPlanSearch(
        estimates=tuple(estimates),
        configurations=sum(group.count for group in groups),
        bounded=search.bounded,
        simulated=search.simulated,
        transformer=model,
        cluster=cluster,
        framework=f"{row.name}@{row.version}",
        said=f"{row.label} runs{space.said}",
    )


def _some(
    groups: Iterable[ConfigGroup], model: Transformer, gpus: int, global_batch_size: int, space: SearchSpace
) -> list[ConfigGroup]:
    """Return the groups as a list. Raise DegreeError if there are none."""
    if not (found := list(groups)):
        raise DegreeError(
            f"no configuration divides `{shorten(model.name)}` and a global batch of {global_batch_size} among {gpus}"
            f" GPUs{space.said}",
            "use a number of GPUs, and a batch, with more divisors"
            + (", or fix and exclude less" if space.said else ""),
            tuple(space.fixed),
        )
    return found


@dataclass(slots=True)
class _Bounded:
    """A configuration that fits in memory and has a bound."""

    stages: PipelineStages
    kind: tuple[object, ...]
    """Key of the configurations that differ only in layer splits, of which the list shows one."""


@dataclass(slots=True)
class _Waiting:
    """The candidates of a group that have no bound of their own yet, the lowest group bound first."""

    group: ConfigGroup
    found: list[Candidate]
    next: int = 0


@dataclass(slots=True)
class _Search:
    """Best-first search over groups and configurations. Equal bounds are taken in the order of the search space."""

    groups: list[ConfigGroup]
    limit_bytes: float
    top: int
    best: dict[tuple[object, ...], tuple[float, PipelineStages]] = field(default_factory=dict)
    """The fastest configuration of each kind. Configurations of a kind differ in layer splits only."""
    bounded: int = 0
    simulated: int = 0
    _enough_s: float = inf
    """Step time of the last configuration on the list: bounds from here on are useless. Infinite until it is full."""
    _heap: list[tuple[float, tuple[int, ...], ConfigGroup | _Waiting | _Bounded]] = field(default_factory=list)

    def run(self) -> None:
        """Search until no bound is below the step time of the last configuration on the list."""
        # The heap holds groups, candidates and configurations together, so always the lowest bound of any kind is
        # refined next. The tuple in the middle breaks ties by position, which makes results reproducible.
        self._heap = [(group.bound_s, (at,), group) for at, group in enumerate(self.groups)]
        heapify(self._heap)
        while self._heap and self._heap[0][0] < self._enough_s:
            self._next()

    def known(self, max_s: float, unknown: Callable[[ParallelismConfig], int]) -> list[tuple[float, PipelineStages]]:
        """Return the configuration up to `max_s` with the fewest `unknown` features, unless it is on the list.

        Among equal ones it is the fastest.
        """
        listed = self.fastest
        best = min((unknown(one.context.config), step_s) for step_s, one in self.best.values() if step_s <= max_s)
        # Continue the same search with a lexicographic goal: fewer unknown features first, then a shorter step. The
        # features that all configurations of a group use are a lower bound on the count, so groups are dropped whole.
        if best[0]:
            common = [unknown(group.common) for group in self.groups]
            least = min(common)
            while self._heap and (bound_s := self._heap[0][0]) <= max_s and best > (least, bound_s):
                _, at, one = self._heap[0]
                has = unknown(one.stages.context.config) if isinstance(one, _Bounded) else common[at[0]]
                if (has, bound_s) >= best:
                    heappop(self._heap)
                elif (found := self._next()) is not None and found[0] <= max_s:
                    best = min(best, (unknown(found[1].context.config), found[0]))
        chosen = min(self.best.values(), key=lambda one: (one[0] > max_s, unknown(one[1].context.config), one[0]))
        return [] if any(chosen is one for one in listed) else [chosen]

    def _next(self) -> tuple[float, PipelineStages] | None:
        """Refine the entry with the lowest bound. Return step time and stages if it was simulated."""
        bound_s, at, one = heappop(self._heap)
        # A group goes back once with its tighter bound. Many groups never come to the front again.
        if isinstance(one, ConfigGroup) and bound_s < one.min_s:
            heappush(self._heap, (one.min_s, at, one))
        elif isinstance(one, ConfigGroup):
            self._wait(_Waiting(one, one.candidates(self.limit_bytes)), at[0])
        elif isinstance(one, _Waiting):
            found = one.found[one.next]
            one.next += 1
            self._wait(one, at[0])
            self._bound(one.group, found, at[0])
        else:
            return self._simulate(one, bound_s)
        return None

    def _wait(self, waiting: _Waiting, group: int) -> None:
        if waiting.next < len(waiting.found):
            heappush(self._heap, (waiting.found[waiting.next].bound_s, (group, waiting.next), waiting))

    def _bound(self, group: ConfigGroup, one: Candidate, at: int) -> None:
        """Queue a candidate by its bound if it fits."""
        split = group.splits.found[one.split]
        kind = at, split.vpp, one.zero, ("none", "some", "full")[(one.recomputed > 0) + 2 * (one.recomputed == ALL)]
        # The list shows one configuration of each kind, so a candidate that can't beat its kind's best is done.
        if kind in self.best and one.bound_s >= self.best[kind][0]:
            return
        found: PipelineStages | None = group.stages(one)
        assert found is not None  # noqa: S101
        if one.recomputed > 0:
            found = min_recomputed(found, self.limit_bytes, one.recomputed)
        elif max_memory_bytes(found) > self.limit_bytes:
            found = None
            # The group's bound on memory was too low for it. Recomputing some layers may still make it fit.
            if one.recomputed == NONE and group.some:
                self._bound(group, one._replace(recomputed=1), at)
        if found is not None:
            self.bounded += 1
            place = at, split.fullest, int(one.recomputed == ALL), one.split, one.zero, int(one.recomputed > 0)
            heappush(self._heap, (found.bound_s * (1 - SLACK), place, _Bounded(found, kind)))

    def _simulate(self, one: _Bounded, bound_s: float) -> tuple[float, PipelineStages] | None:
        if one.kind in self.best and bound_s >= self.best[one.kind][0]:
            return None
        self.simulated += 1
        found = simulated_step_s(one.stages), one.stages
        if one.kind not in self.best or found[0] < self.best[one.kind][0]:
            self.best[one.kind] = found
            if len(self.best) >= self.top:
                self._enough_s = self.fastest[-1][0]
        return found

    @property
    def fastest(self) -> list[tuple[float, PipelineStages]]:
        """The fastest configurations of different kinds, at most `top`."""
        return nsmallest(self.top, self.best.values(), key=itemgetter(0))
