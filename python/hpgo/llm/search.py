"""The best ways of training a transformer on GPUs: `hpgo.plan_llm` looks at every one that a launcher runs.

Families of ways are bounded together, and those of their ways that may fit one by one, by what no order of passes can
beat. In the order of these bounds they are simulated, until the next bound is no better than what was found: the answer
is that of trying everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, get_args

from hpgo.base.checks import choice, number, whole
from hpgo.base.errors import ArgumentError
from hpgo.base.records import Record, check_fields
from hpgo.base.wording import shorten
from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate
from hpgo.llm.config_groups import ConfigGroup, config_groups, fewest_anew, leanest
from hpgo.llm.estimate import LlmEstimate, constants_of, estimate_of, max_memory_bytes, simulated_step_s, with_error
from hpgo.llm.frameworks import framework_support
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.parallelism import DegreeError, ParallelismConfig, Precision
from hpgo.llm.search_space import SearchSpace
from hpgo.llm.validated_features import unvalidated_features
from hpgo.machine.cluster import Cluster, cluster_of
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.platform import Platform
    from hpgo.llm.step_time import PipelineStages
    from hpgo.programs.names import LlmFramework

MOST_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class LlmPlanSearch(Record):
    """The quickest ways of a grid that fit, and how many there were.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, framework="torchtitan")
    >>> found.best.unvalidated_features, found.best.step_s <= found.estimates[0].step_s * (1 + found.best.error)
    ((), True)
    """

    estimates: tuple[LlmEstimate, ...]
    """The quickest first; and behind as many as were asked for `best`, if it is none of them."""
    configurations: int
    """Of the grid: all whose degrees divide."""
    bounded: int
    """How many of them were bounded one by one; what is known of a family's ways together was enough for the others."""
    simulated: int
    """How many of these were simulated; no other is quicker than these, by its bound."""
    transformer: Transformer
    cluster: Cluster
    """With the GPUs that were to be used."""
    framework: str
    """Which one runs all of them, as `--for` has it: `megatron@0.16`."""
    said: str
    """What the grid is, in words: who runs it, and what was fixed and excluded."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.estimates:
            raise ArgumentError("a choice of ways has none", "make it again")

    @property
    def alike(self) -> tuple[LlmEstimate, ...]:
        """Those that are within the error of the quickest, which is the first of them."""
        quickest = self.estimates[0]
        return tuple(one for one in self.estimates if one.step_s <= _alike_s(quickest.step_s, quickest.error))

    @property
    def best(self) -> LlmEstimate:
        """Of those within the error of the quickest the one that relies on the fewest mechanisms that nobody measured.

        Of equal ones it is the quickest. No way of the grid is better in that sense.
        """
        return min(self.alike, key=lambda one: (len(one.unvalidated_features), one.step_s))

    def plan(self, place: int | None = None) -> LlmPlan:
        """The best way, or that in a place, the quickest in the first, with all that running it asks for.

        Raises ArgumentError if fewer were found.

        >>> import hpgo
        >>> found = hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)
        >>> found.plan(2).price == found.estimates[1]
        True
        """
        from hpgo.llm.plan import LlmPlan  # which others do without

        chosen = self.best
        if place is not None:
            hint = f"{len(self.estimates)} were asked for or found"
            chosen = self.estimates[whole("place", place, most=len(self.estimates), hint=hint) - 1]
        return LlmPlan(estimate=chosen, transformer=self.transformer, cluster=self.cluster, framework=self.framework)


def _alike_s(quickest_s: float, error: float) -> float:
    """The longest step that terms don't tell from the quickest."""
    return quickest_s * (1 + error)


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
    platform: Platform | None = None,
    top: int = 10,
) -> LlmPlanSearch:
    """The quickest ways of training a transformer that fit, of those that a launcher runs.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        devices: GPUs to use, the first of the cluster; None is all.
        framework: `megatron`, `torchtitan` or `deepspeed`, perhaps with a version: `megatron@0.16`.
        fix: degrees that are given: `{"tp": 4, "zero_stage": 1}`; also `cp`, `ep`, `pp`, `vpp`, `pp_schedule`, `dp`,
            `micro_batch_size` and `recompute`.
        exclude: what to do without: `["cp"]`, or certain values: `["zero_stage=0", "micro_batch_size=1"]`.
        headroom_bytes: memory of each GPU to leave alone, beside what the terms count.
        platform: factors from steps that were measured there (`hpgo.Platform.read`); None is none.
        top: how many ways to give.

    The grid: tensor parallelism inside a machine, with sequence parallelism; context parallelism by powers of two; all
    pipelines, interleaved or not, whose ranks have as many layers, or those at the ends one less, or nearly as many for
    models with experts, and with Megatron-LM any fewer at the ends; 1F1B, and where the launcher can, split backward
    passes; experts among as many GPUs of a stage as divide both; every micro-batch that divides; all that the launcher
    lets replicas share; no layers computed anew, all, or, where the launcher can, as few of each stage as fit. All GPUs
    are used. Of ways that differ in how many layers the first and the last rank have, the list has the quickest.

    Where the quickest relies on what no published step on such devices has measured, and a way that relies on less of
    that is within the error, the latter is the best (`LlmPlanSearch.best`).

    Raises InfeasibleError if none fits, with what is short and what would help; ArgumentError for what is fixed and
    does not divide, or is nothing that the launcher runs; and what `hpgo.estimate_llm` raises.

    >>> import hpgo
    >>> found = hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)
    >>> found.best.fits, found.best.gpus, found.configurations > found.simulated
    (True, 8, True)
    """
    model = transformer_of(transformer)
    cluster = cluster_of(cluster)
    global_batch_size, seq_length = whole("global_batch_size", global_batch_size), whole("seq_length", seq_length)
    choice("precision", precision, get_args(Precision))
    row, rules = framework_support(framework)
    space = SearchSpace.of(rules, row.title, fix=fix, exclude=exclude)
    headroom_bytes = number("headroom_bytes", headroom_bytes)
    top = whole("top", top, most=MOST_SHOWN)
    if devices is not None:
        cluster = cluster.first(devices)
    gpus = Gpus.of(cluster, precision)
    config = ParallelismConfig(precision=precision, flatten_gradients=rules.flatten_gradients, dtensor=rules.dtensor)
    context = LayerContext(model, config, gpus, constants_of(cluster, platform), seq_length)

    def ways_of(space: SearchSpace) -> Iterator[ConfigGroup]:
        space.check(model, gpus, global_batch_size=global_batch_size, seq_length=seq_length, precision=precision)
        yield from config_groups(context, global_batch_size, space)

    def all_of(space: SearchSpace) -> list[ConfigGroup]:
        found = [*ways_of(space)]
        if not found:
            held = space.said
            raise DegreeError(
                f"no way parts `{shorten(model.name)}` and a global batch of {global_batch_size} among"
                f" {gpus.count} GPUs{held}",
                "take a number of GPUs, and a batch, with more divisors"
                + (", or fix and exclude less" if held else ""),
                tuple(space.fixed),
            )
        return found

    try:
        search = _Search(all_of(space), gpus.memory_bytes - headroom_bytes, top)
    except DegreeError as error:
        from hpgo.llm.suggestions import with_open

        def has_ways(other: SearchSpace) -> bool:
            try:
                return any(True for _ in ways_of(other))
            except ArgumentError:
                return False

        raise with_open(
            error, space, model=model, gpus=gpus.count, global_batch_size=global_batch_size, has_ways=has_ways
        ) from None
    search.run()
    if not search.best:
        from hpgo.llm.infeasibility import nothing_fits

        found = leanest(search.families)
        assert found is not None, "there was a way"  # noqa: S101
        raise nothing_fits(found, cluster, space, global_batch_size, headroom_bytes=headroom_bytes)

    def priced(step_s: float, one: PipelineStages) -> LlmEstimate:
        found = estimate_of(one, cluster.name, step_s, global_batch_size=global_batch_size)
        return with_error(found, cluster, platform)

    def left(config: ParallelismConfig) -> int:
        return len(
            unvalidated_features(
                config, cluster.machines[0].device.name, () if platform is None else platform.mechanisms
            )
        )

    prices = [priced(*one) for one in search.quickest]
    prices += [priced(*one) for one in search.known(_alike_s(prices[0].step_s, prices[0].error), left)]
    return LlmPlanSearch(
        estimates=tuple(prices),
        configurations=sum(family.count for family in search.families),
        bounded=search.bounded,
        simulated=search.simulated,
        transformer=model,
        cluster=cluster,
        framework=f"{row.name}@{row.version}",
        said=f"{row.label} runs{space.said}",
    )


@dataclass(slots=True)
class _Way:
    """One way that fits."""

    stages: PipelineStages
    kind: tuple[object, ...]
    """What it has in common with ways of which the list has one."""


@dataclass(slots=True)
class _Few:
    """What is left of a family's ways, those with the least bounds first."""

    family: ConfigGroup
    found: list[Candidate]
    next: int = 0


@dataclass(slots=True)
class _Search:
    """Looks at families and ways in the order of their bounds; of equal ones in that of the grid."""

    families: list[ConfigGroup]
    room_bytes: float
    top: int
    best: dict[tuple[object, ...], tuple[float, PipelineStages]] = field(default_factory=dict)
    """The quickest way of each kind; those of a kind differ in cuts alone."""
    bounded: int = 0
    simulated: int = 0
    _enough_s: float = inf
    """What the last one to be listed takes."""
    _waiting: list[tuple[float, tuple[int, ...], ConfigGroup | _Few | _Way]] = field(default_factory=list)

    def run(self) -> None:
        """Until no bound is below the last one that is listed."""
        self._waiting = [(family.bound_s, (at,), family) for at, family in enumerate(self.families)]
        heapify(self._waiting)
        while self._waiting and self._waiting[0][0] < self._enough_s:
            self._next()

    def known(self, most_s: float, unknown: Callable[[ParallelismConfig], int]) -> list[tuple[float, PipelineStages]]:
        """The way with the least that is `unknown` of those that take no more than `most_s`, if it is not listed.

        Of equal ones it is the quickest. What a family's ways have in common is unknown of each of them.
        """
        listed = self.quickest
        best = min((unknown(one.context.config), step_s) for step_s, one in self.best.values() if step_s <= most_s)
        if best[0]:
            common = {at: unknown(family.common) for at, family in enumerate(self.families)}
            least = min(common.values())
            while self._waiting and (bound_s := self._waiting[0][0]) <= most_s and best > (least, bound_s):
                _, at, one = self._waiting[0]
                has = unknown(one.stages.context.config) if isinstance(one, _Way) else common[at[0]]
                if (has, bound_s) >= best:
                    heappop(self._waiting)
                elif (found := self._next()) is not None and found[0] <= most_s:
                    best = min(best, (unknown(found[1].context.config), found[0]))
        chosen = min(self.best.values(), key=lambda one: (one[0] > most_s, unknown(one[1].context.config), one[0]))
        return [] if any(chosen is one for one in listed) else [chosen]

    def _next(self) -> tuple[float, PipelineStages] | None:
        """Looks at what has the least bound; the way and its step, if it was one."""
        bound_s, at, one = heappop(self._waiting)
        if isinstance(one, ConfigGroup) and bound_s < one.least_s:
            heappush(self._waiting, (one.least_s, at, one))
        elif isinstance(one, ConfigGroup):
            self._wait(_Few(one, one.candidates(self.room_bytes)), at[0])
        elif isinstance(one, _Few):
            found = one.found[one.next]
            one.next += 1
            self._wait(one, at[0])
            self._bound(one.family, found, at[0])
        else:
            return self._look(one, bound_s)
        return None

    def _wait(self, few: _Few, family: int) -> None:
        if few.next < len(few.found):
            heappush(self._waiting, (few.found[few.next].bound_s, (family, few.next), few))

    def _bound(self, family: ConfigGroup, one: Candidate, at: int) -> None:
        """Whether a way fits, and what it takes at least."""
        cut = family.cuts.found[one.cut]
        kind = at, cut.chunks, one.zero, ("none", "some", "full")[(one.recomputed > 0) + 2 * (one.recomputed == ALL)]
        if kind in self.best and one.bound_s >= self.best[kind][0]:
            return
        found: PipelineStages | None = family.stages(one)
        assert found is not None  # noqa: S101
        if one.recomputed > 0:
            found = fewest_anew(found, self.room_bytes, one.recomputed)
        elif max_memory_bytes(found) > self.room_bytes:
            found = None
            if one.recomputed == NONE and family.some:
                self._bound(family, one._replace(recomputed=1), at)
        if found is not None:
            self.bounded += 1
            place = at, cut.fullest, int(one.recomputed == ALL), one.cut, one.zero, int(one.recomputed > 0)
            heappush(self._waiting, (found.bound_s * (1 - SLACK), place, _Way(found, kind)))

    def _look(self, one: _Way, bound_s: float) -> tuple[float, PipelineStages] | None:
        if one.kind in self.best and bound_s >= self.best[one.kind][0]:
            return None
        self.simulated += 1
        found = simulated_step_s(one.stages), one.stages
        if one.kind not in self.best or found[0] < self.best[one.kind][0]:
            self.best[one.kind] = found
            if len(self.best) >= self.top:
                self._enough_s = self.quickest[-1][0]
        return found

    @property
    def quickest(self) -> list[tuple[float, PipelineStages]]:
        """Those to be listed."""
        return nsmallest(self.top, self.best.values(), key=itemgetter(0))
