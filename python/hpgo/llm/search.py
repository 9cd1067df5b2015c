"""Search for the fastest configurations of a transformer on GPUs: `hpgo.plan_llm`.

The search is best-first. It bounds groups of configurations together, then the configurations of a group that may fit
one by one, and simulates them in the order of their bounds. It stops when the next bound is no better than the last
result. So it returns the same configurations as a simulation of every configuration that the framework runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, get_args

from hpgo.base.checks import check_int, check_progress, choice, number
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import Reported
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.llm.best_first import BestFirst
from hpgo.llm.canonical import canonical
from hpgo.llm.config_families import SharedCosts, config_grids, config_groups, min_state_bytes
from hpgo.llm.config_groups import any_fits, leanest, mesh_of
from hpgo.llm.estimate import (
    LlmEstimate,
    constants_of,
    estimate_stages,
    max_memory_bytes,
    model_flop,
    on_platform,
    simulated_step_s,
    stack_on,
    with_range,
)
from hpgo.llm.fewer_gpus import part_of, smaller_parts
from hpgo.llm.frameworks import framework_support
from hpgo.llm.gpus import Gpus
from hpgo.llm.infeasibility import nothing_fits, smallest_batches
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.parallelism import DegreeError, ParallelismConfig, Precision, changed, check_positions
from hpgo.llm.platform import Platform
from hpgo.llm.search_space import SearchSpace
from hpgo.llm.simplicity import complexity, preference, sure_bytes
from hpgo.llm.step_range import RELATIVE_ERROR
from hpgo.llm.step_time import PipelineStages
from hpgo.llm.validated_features import unvalidated_features
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from hpgo.llm.best_first import Found, Rank
    from hpgo.llm.config_families import ConfigGrid, Family
    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.search_space import Value
    from hpgo.llm.stack import Stack
    from hpgo.programs.names import LlmFramework

MAX_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class LlmPlanSearch(Reported, Record):
    """The configurations to choose from, the recommended one first, and the size of the search.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, framework="torchtitan")
    >>> found.best == found.estimates[0], found.best.step_s <= found.fastest.step_s * 1.07
    (True, True)
    """

    estimates: tuple[LlmEstimate, ...]
    """Estimates of the list. The first ones are as fast as the fastest, within the error of such differences, and
    sorted by `hpgo.llm.simplicity.preference`, the simplest first. The others follow, the fastest first.

    The list has the `top` fastest meshes (`hpgo.llm.config_groups.mesh_of`), each with the preferred of its equally
    fast configurations, and also the fastest and the preferred configuration of all. All use the same number of GPUs.
    """
    configurations: int
    """Number of all configurations of the search space on these GPUs."""
    bounded: int
    """Number of configurations that were bounded one by one. The bounds of groups sufficed for the others."""
    simulated: int
    """Number of configurations that were simulated. By their bounds, no others are faster than `fastest`."""
    transformer: Transformer
    cluster: Cluster
    """Cluster, reduced to the GPUs that the configurations use."""
    framework: str
    """Framework and version that run all configurations: `megatron@0.16`."""
    said: str
    """Description of the search space: the framework, and what was fixed and excluded."""
    available: int = 0
    """Number of GPUs that the search could use. `cluster` has fewer if no configuration on more of them is faster."""
    on_all: LlmEstimate | None = None
    """Fastest configuration on all available GPUs, if `cluster` has fewer. None if it has all, or if none fits."""
    any_count: bool = False
    """Whether fewer GPUs than `available` were searched, too."""
    plain_s: tuple[float, ...] = ()
    """Step time of each estimate of the list without CUDA graphs, hybrid sharding and an own pipeline layout: what
    these save. It is the time of the estimate itself if it has none of them, or if its pipeline needs a layout. Empty
    if these times are unknown."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.estimates:
            raise ArgumentError("a search of configurations has none", "make it again")
        if self.plain_s and len(self.plain_s) != len(self.estimates):
            raise ArgumentError(
                f"plain_s has {len(self.plain_s)} values for {pluralize(len(self.estimates), 'configuration')}",
                "give one for each configuration, or none",
            )

    def __repr__(self) -> str:
        return brief(
            "LlmPlanSearch",
            f"{shorten(self.best.model, 24)} on {shorten(self.cluster.name, 24)}:"
            f" {pluralize(len(self.estimates), 'configuration')} of {self.configurations:,}, step"
            f" {format_seconds(self.best.step_s)}",
        )

    @property
    def fastest(self) -> LlmEstimate:
        """The fastest configuration of the search space. No other that fits has a shorter estimated step."""
        return min(self.estimates, key=lambda one: one.step_s)

    @property
    def alike(self) -> tuple[LlmEstimate, ...]:
        """Estimates that differ from the fastest one by less than `RELATIVE_ERROR`: the first ones of the list."""
        return tuple(one for one in self.estimates if one.step_s <= self.fastest.step_s * (1 + RELATIVE_ERROR))

    @property
    def best(self) -> LlmEstimate:
        """The recommended configuration: the preferred one of those that are as fast as the fastest within the error.

        It surely fits in memory if one of them does, then it has the fewest unvalidated features, and then it is the
        simplest (`hpgo.llm.simplicity.preference`). No configuration of the search space is better in that sense.
        """
        return self.estimates[0]

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
            chosen = self.estimates[check_int("place", place, maximum=len(self.estimates), hint=hint) - 1]
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
    fix: dict[str, Value] | None = None,
    exclude: Iterable[str] = (),
    reserved_bytes: float = 0.0,
    stack: Stack | str | os.PathLike[str] | None = None,
    platform: Platform | DeviceRecord | None = None,
    top: int = 10,
    progress: Callable[[int, float], None] | None = None,
) -> LlmPlanSearch:
    """Find the configurations of a transformer to choose from, among all that a framework runs and that fit in memory.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal nodes with devices whose rates are known; a device is a GPU.
        global_batch_size: sequences per step.
        seq_length: tokens per sequence.
        precision: number format of matrix multiplications: `bf16`, `fp16`, `fp8` or `fp4`.
        devices: number of GPUs to use, the first of the cluster; None means all, or fewer where these are faster.
        framework: `megatron`, `torchtitan` or `deepspeed`, perhaps with a version: `megatron@0.16`.
        fix: values that all configurations must have: `{"tp": 4, "zero_stage": 1}`; also `cp`, `ep`, `pp`, `vpp`,
            `pp_schedule`, `dp`, `dp_replicate`, `micro_batch_size`, `etp`, `micro_batch_group_size`, `recompute` and
            `cuda_graph_impl`; or settings that the search does not vary, such as `recompute_modules` (docs/llm.md).
        exclude: features to leave out: `["cp"]`, or single values: `["zero_stage=0", "micro_batch_size=1"]`.
        reserved_bytes: memory of each GPU to leave free, in addition to the columns of the estimate.
        stack: software stack, by its name or its file; None means the one that `framework` implies on the device.
        platform: constants fitted to steps on your cluster (`hpgo.Platform.read`), or the rates of a measured node
            (`hpgo.llm.platform.read_platform`). None uses the published ones.
        top: number of meshes in the list.
        progress: called often during the search, with the number of configurations that were bounded one by one and the
            shortest step time so far in seconds (inf without one). What it raises ends the search.

    The search space has:

    - tensor parallelism inside a node, with sequence parallelism;
    - context parallelism by powers of 2;
    - every pipeline, interleaved or not, whose ranks have the same number of layers, or one layer less on the end
      ranks; for models with experts also stages with a remainder, and with Megatron-LM any smaller number of layers on
      the end ranks;
    - 1F1B, and schedules with split backward passes if the framework runs them;
    - for multi-token prediction with Megatron-LM, layouts with it on the last stage or the one before
      (`hpgo.llm.layer_split.further_layouts`);
    - expert parallelism by every divisor of the experts and of the GPUs of a stage; if the framework supports it, also
      expert tensor parallelism inside a node, where expert parallelism can't be higher;
    - groups of pp micro-batches for interleaving; if the framework supports it, the smallest larger ones where pp
      leaves a rest;
    - every micro-batch size that divides the batch, and all ZeRO stages of the framework;
    - no recomputation, recomputation of all layers, or, if the framework supports it, of the fewest layers per stage
      that fit;
    - for models with experts, if the framework supports it, also recomputation of the one, two or three modules that
      save the most memory for their time;
    - no CUDA graphs, or those that the framework runs: of whole layers or of the step for models without experts, and
      of all modules with fixed shapes for models with experts;
    - hybrid sharding in groups of whole nodes, if the framework runs it with ZeRO stage 3;
    - if nothing fits on all GPUs, optimizer state in CPU memory: the smallest share that surely fits of a quarter, a
      half, three quarters and all, or all with the weights where the framework stores them there.

    Without `devices`, the search also tries fewer GPUs: the same number on each of the first nodes. It uses them if no
    configuration on more GPUs is faster.

    The list has one configuration for each mesh (`hpgo.llm.config_groups.mesh_of`). `LlmPlanSearch.best` is the
    recommended one: the simplest of those as fast as `LlmPlanSearch.fastest`, within the error of such differences.

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
    check_progress(progress)
    check_positions(model, seq_length)
    choice("precision", precision, get_args(Precision))
    row, rules = framework_support(framework)
    space = SearchSpace.of(rules, row.title, fix=fix, exclude=exclude)
    reserved_bytes = number("free_bytes", reserved_bytes)
    top = check_int("top", top, maximum=MAX_SHOWN)
    if devices is not None:
        cluster = cluster.first(devices)
    found_stack = stack_on(stack, cluster, f"{row.name}@{row.version}", platform)
    constants = constants_of(cluster, found_stack, platform, model)
    cluster = on_platform(cluster, platform)
    # The framework decides the kernel options. The search varies degrees, ZeRO, schedule and recomputation only.
    config = ParallelismConfig(
        precision=precision, flatten_gradients=rules.flatten_gradients, whole_embedding=rules.tp_alone,
        dtensor=rules.dtensor,
    )  # fmt: skip
    question = _Question(
        LayerContext(model, config, Gpus.of(cluster, precision), constants, seq_length, model.kind(0)),
        cluster, space, space, global_batch_size, reserved_bytes, progress,
    )  # fmt: skip
    question, (part, search, on_all) = question.answered(top, fewer=devices is None)

    def estimated(step_s: float, one: PipelineStages) -> LlmEstimate:
        name = cluster.name if one.context.gpus.count == cluster.devices else part.name
        found = estimate_stages(one, name, step_s, global_batch_size=global_batch_size)
        return with_range(found, model, cluster, found_stack, platform)

    def rank(config: ParallelismConfig) -> tuple[object, ...]:
        validated = platform.mechanisms if isinstance(platform, Platform) else ()
        device = cluster.nodes[0].device.name
        return len(unvalidated_features(canonical(config, model), device, validated)), complexity(config)

    # Full estimates are made only for the configurations that are returned. The search needs step times alone.
    choices = question.choices(search, rank)
    plain_s = {one.context.config: _plain_s(step_s, one, question.limit_bytes) for step_s, one in choices}
    listed = _listed([estimated(*one) for one in choices])
    return LlmPlanSearch(
        estimates=listed,
        configurations=question.count(part),
        bounded=search.bounded,
        simulated=search.simulated,
        transformer=model,
        cluster=part,
        framework=f"{row.name}@{row.version}",
        said=f"{row.label} runs{space.said}{question.said}",
        available=cluster.devices,
        on_all=None if on_all is None else estimated(*on_all),
        any_count=devices is None,
        plain_s=tuple(plain_s[one.parallelism] for one in listed),
    )


def _plain_s(step_s: float, stages: PipelineStages, limit_bytes: float) -> float:
    """Return the step time of a configuration without what `LlmPlanSearch.plain_s` leaves out, given its own time."""
    config, model = stages.context.config, stages.context.model
    plain = changed(config, cuda_graph_impl="none", cuda_graph_modules=(), dp_replicate=1)
    found = PipelineStages(stages.context.of_config(plain), stages.micro_batches)
    even = changed(plain, pipeline_layout=None)
    # A layout saves time only where the pipeline also has a split without one, and memory for it.
    if plain.pipeline_layout is not None and even.stage_counts(model) is not None:
        without = PipelineStages(stages.context.of_config(even), stages.micro_batches)
        found = without if max_memory_bytes(without) <= limit_bytes else found
    return step_s if found.context.config == config else simulated_step_s(found)


def _listed(estimates: list[LlmEstimate]) -> tuple[LlmEstimate, ...]:
    """Return estimates in the order of the list: the equally fast by preference, then the others by step time."""
    max_s = min(one.step_s for one in estimates) * (1 + RELATIVE_ERROR)
    # The sort is stable, so equal ones keep the order of the search space.
    return tuple(sorted(estimates, key=lambda one: (0, preference(one)) if one.step_s <= max_s else (1, (one.step_s,))))


@dataclass(frozen=True)
class _Question:
    """A search: the inputs of all configurations, and the search space."""

    context: LayerContext
    """Model, all GPUs, and the options that the framework decides."""
    cluster: Cluster
    space: SearchSpace
    """Search space that the caller gave."""
    searched: SearchSpace
    """Search space that is searched: the given one, or that with optimizer state in CPU memory."""
    global_batch_size: int
    reserved_bytes: float
    progress: Callable[[int, float], None] | None

    @cached_property
    def costs(self) -> SharedCosts:
        """Costs that the searches on different numbers of GPUs share."""
        return SharedCosts(self.limit_bytes)

    @property
    def said(self) -> str:
        """What the search tried because nothing fits otherwise, to follow the description of the search space."""
        if self.searched == self.space:
            return ""
        return ", with optimizer state in CPU memory, since nothing fits without"

    @cached_property
    def state_bytes(self) -> float:
        """Lower bound on the bytes of parameters, gradients and optimizer state of all GPUs together."""
        return min_state_bytes(self.context, self.searched)

    @property
    def limit_bytes(self) -> float:
        """Memory of a GPU that configurations may use."""
        return self.context.gpus.memory_bytes - self.reserved_bytes

    @property
    def limits_bytes(self) -> list[float]:
        """Memory limits for the choice: with memory to spare first, for which more layers may have to be recomputed."""
        sure = sure_bytes(self.context.gpus.memory_bytes)
        return [sure, self.limit_bytes] if sure < self.limit_bytes else [self.limit_bytes]

    def answered(self, top: int, *, fewer: bool) -> tuple[_Question, tuple[Cluster, BestFirst, Found | None]]:
        """Return the question that has an answer, with it: this one, or the one with optimizer state in CPU memory.

        Raises what `plan_llm` raises if neither has one.
        """
        self._check_fixed()
        if (answer := self._solve(top, fewer=fewer)) is not None:
            return self, answer
        groups = config_groups(self.context, self.global_batch_size, smallest_batches(self.space), graphs=False)
        if (least := leanest(groups)) is None:
            raise self._undivided()
        if (moved := self._offloaded()) is not None and (answer := moved._solve(top, fewer=False)) is not None:
            return moved, answer
        raise nothing_fits(least, self.cluster, self.space, self.global_batch_size, reserved_bytes=self.reserved_bytes)

    def _offloaded(self) -> _Question | None:
        """Return the question with the smallest share of optimizer state in CPU memory that fits; None if none does."""
        # The CPU takes much longer to update weights than the GPUs, so the smallest share is the fastest. With one that
        # surely fits, memory is no longer in question.
        spaces = list(filter(self._accepts, self.space.offloaded))
        for limit_bytes in self.limits_bytes:
            for space in spaces:
                if self._fits(space, limit_bytes):
                    return replace(self, searched=space)
        return None

    def _solve(self, top: int, *, fewer: bool) -> tuple[Cluster, BestFirst, Found | None] | None:
        """Return the GPUs to use, the search on them, and the fastest configuration on all GPUs if these are fewer.

        `fewer` allows fewer GPUs than the cluster has. None if no configuration fits.
        """
        everything = self._search(self.context.gpus, top)
        on_all = everything.fastest[0] if everything.best else None
        part, search = self.cluster, everything
        if fewer and (found := self._fewer(on_all[0] if on_all else inf)) is not None:
            part = found
            search = self._search(Gpus.of(part, self.context.config.precision), top)
        return (part, search, None if part is self.cluster else on_all) if search.best else None

    def count(self, part: Cluster) -> int:
        """Return the number of configurations on a part of the cluster."""
        return sum(grid.count for grid in self._grids(Gpus.of(part, self.context.config.precision)))

    def choices(self, search: BestFirst, rank: Rank) -> list[Found]:
        """Return the configurations of the list: of each of the fastest meshes, the preferred one."""
        max_s = search.fastest[0][0] * (1 + RELATIVE_ERROR)
        limits_bytes = self.limits_bytes
        found = [search.preferred(max_s, limits_bytes, rank), search.fastest[0]]
        for step_s, stages in search.fastest:
            most_s = max_s if step_s <= max_s else step_s * (1 + RELATIVE_ERROR)
            found.append(search.preferred(most_s, limits_bytes, rank, mesh_of(stages.context.config)))
        return list({one.context.config: (step_s, one) for step_s, one in found}.values())

    def _check_fixed(self) -> None:
        """Raise ArgumentError for fixed values that no configuration has."""
        try:
            self._check(self.space)
        except DegreeError as error:
            raise self._with_hint(error) from None

    def _accepts(self, space: SearchSpace) -> bool:
        """Return whether the fixed values of a search space leave configurations."""
        try:
            self._check(space)
        except ArgumentError:
            return False
        return True

    def _fits(self, space: SearchSpace, limit_bytes: float) -> bool:
        """Return whether a configuration of a search space fits on all GPUs, within a limit."""
        # Larger micro-batches never need less memory, so trying the smallest ones decides.
        groups = config_groups(self.context, self.global_batch_size, smallest_batches(space), graphs=False)
        return any_fits(groups, limit_bytes)

    def _check(self, space: SearchSpace) -> None:
        precision, seq_length = self.context.config.precision, self.context.seq_length
        space.check(
            self.context.model, self.context.gpus, global_batch_size=self.global_batch_size, seq_length=seq_length,
            precision=precision,
        )  # fmt: skip

    def _undivided(self) -> ArgumentError:
        """Return the error if no configuration divides the model and the batch among the GPUs."""
        model, space = self.context.model, self.space
        error = DegreeError(
            f"no configuration divides `{shorten(model.name)}` and a global batch of {self.global_batch_size} among"
            f" {self.context.gpus.count} GPUs{space.said}",
            "use a number of GPUs, and a batch, with more divisors"
            + (", or fix and exclude less" if space.said else ""),
            tuple(space.fixed),
        )
        return self._with_hint(error)

    def _with_hint(self, error: DegreeError) -> ArgumentError:
        """Return an error about degrees with values that are accepted."""
        from hpgo.llm.suggestions import with_open

        def has_some(space: SearchSpace) -> bool:
            return self._accepts(space) and any(
                True for _ in config_groups(self.context, self.global_batch_size, space, graphs=False)
            )

        asked = {"gpus": self.context.gpus.count, "global_batch_size": self.global_batch_size}
        return with_open(error, self.space, model=self.context.model, has_ways=has_some, **asked)

    def _fewer(self, below_s: float) -> Cluster | None:
        """Return the smaller part of the cluster with the fastest configuration, if that is faster than `below_s`."""
        context, chosen = self.context, None
        config = replace(context.config, **self.searched.settings)
        needed_s = model_flop(context.model, context.seq_length, self.global_batch_size, config)
        needed_s /= context.gpus.peak_flop_per_s
        for nodes, count in smaller_parts(self.cluster, context.model, self.global_batch_size):
            # No GPU is faster than its peak, and none holds more than its share of the state. Parts come in falling
            # numbers of GPUs, so either rules out all later ones.
            if needed_s / (nodes * count) >= below_s or not self._holds_state(nodes * count):
                break
            gpus = replace(context.gpus, count=nodes * count, gpus_per_node=count)
            search = self._search(gpus, 1, below_s)
            if search.best and (step_s := search.fastest[0][0]) < below_s:
                chosen, below_s = (nodes, count), step_s
        return None if chosen is None else part_of(self.cluster, *chosen)

    def _search(self, gpus: Gpus, top: int, below_s: float = inf) -> BestFirst:
        """Return a finished search on some GPUs, for configurations that are faster than `below_s`."""
        grids = self._grids(gpus) if self._holds_state(gpus.count) else []
        families: list[Family] = []
        for grid in grids:
            if self.progress is not None:
                self.progress(0, below_s)
            families += grid.families(below_s)
        search = BestFirst(families, self.limit_bytes, top, below_s, self.progress)
        search.run()
        return search

    def _grids(self, gpus: Gpus) -> list[ConfigGrid]:
        context = replace(self.context, gpus=gpus)
        return config_grids(context, self.global_batch_size, self.searched, costs=self.costs)

    def _holds_state(self, gpus: int) -> bool:
        """Return whether some GPUs together have the memory for parameters, gradients and optimizer state."""
        each_bytes = self.limit_bytes - self.context.constants.framework_overhead_bytes
        return self.state_bytes <= gpus * each_bytes
