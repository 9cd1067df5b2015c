"""Sizes of clusters for a training run: `hpgo.size_llm`.

For each kind of node, a search over the number of nodes asks the planner for the fastest configuration on them, and
adds what failures cost. More nodes are never slower, since nodes may stay idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.checks import check_flag, check_int, check_is, check_list, check_progress, choice, number
from hpgo.base.messages import brief, did_you_mean, join_words, pluralize, safe_repr, shorten
from hpgo.base.presentation import Reported
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.hardware.cluster import Cluster
from hpgo.llm.estimate import LlmEstimate, model_flop
from hpgo.llm.fewer_gpus import part_of
from hpgo.llm.goodput import HOUR_S, Failures
from hpgo.llm.gpus import Gpus
from hpgo.llm.parallelism import Precision
from hpgo.llm.search import plan_llm
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hpgo.llm.search_space import Value
    from hpgo.programs.names import LlmFramework

DAY_S = 24 * HOUR_S
MAX_GPUS = 16384
KINDS = ("h100", "h200", "b200", "mi300x")
"""Kinds of nodes that are compared unless others are named: those with published steps of large runs."""
BATCH_TOLERANCE = 0.15
"""Largest relative difference between a batch that is tried and the asked one. Not tuned: a wider one helps few
counts, and changes the training."""
SMALL_BATCH_TOKENS, LARGE_BATCH_TOKENS = 2**22, 2**24
"""Tokens per step unless a batch is given, below and from `_LARGE` parameters on. LLaMA 1 and 2 used 4 M tokens (arXiv
2302.13971, 2307.09288), and Llama 3 405B up to 16 M (arXiv 2407.21783)."""
_LARGE = 30e9
DEFAULT_SEQ_LENGTH = 8192
_SIGNIFICANT_BITS = 5
"""Binary digits of the numbers of nodes that are tried, so that neighbors differ by 3 to 6 % above 32 nodes. Batches
within `BATCH_TOLERANCE` divide among such numbers."""
_USUAL_MFU = 0.4
"""Share of the peak rate from which the search starts. Another one costs questions and changes no answer."""
PUBLISHED_RUNS = (31, 1.16, 1.46, 1.89)
"""Number of published runs, and the lower quartile, median and upper quartile of their GPU-hours over predicted ones,
from `research/published_runs.py`. It leaves out runs of which only the time of steps is published."""
_NARROW = 12
"""Number of sizes up to which an overview evaluates all of them: as many as powers of 2 up to 16,384 GPUs."""
_GUESSES = 6
"""Number of questions that start from the last answer, before the search halves the interval. Not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint(Record):
    """A cluster for a training run, with the fastest configuration on it."""

    kind: str
    """Kind of node: the name of a built-in cluster."""
    nodes: int
    gpus: int
    """Number of all GPUs of the nodes. The configuration may leave some idle: `estimate.gpus` are used."""
    estimate: LlmEstimate
    steps: int
    """Number of steps for all tokens."""
    goodput: float
    """Share of the run's time in which steps run that are not lost (`hpgo.llm.goodput`)."""
    save_interval_s: float
    """Seconds of training between two checkpoints."""
    mtbf_s: float
    """Mean seconds between two failures of the run."""
    allowance: float = 1.0
    """Factor on the time of the run for what the estimate leaves out."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def days(self) -> float:
        """Days of the whole run."""
        return self._days(self.estimate.step_s)

    @property
    def range_days(self) -> tuple[float, float]:
        """Days of the whole run at the ends of the step time's 90 % range."""
        return self._days(self.estimate.low_s), self._days(self.estimate.high_s)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the whole run, idle GPUs included."""
        return self.days * 24 * self.gpus

    def _days(self, step_s: float) -> float:
        return self.allowance * self.steps * step_s / self.goodput / DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSizes(Reported, Record):
    """Clusters for a training run: the answer for each kind of node, and all clusters that were evaluated."""

    transformer: Transformer
    tokens: float
    seq_length: int
    global_batch_size: int
    """Sequences per step that were asked for. Each point has those that its step has."""
    precision: str
    framework: str
    kinds: tuple[str, ...]
    days: float | None
    """Longest run that was allowed; None allows all."""
    budget: float | None = None
    """Largest cost that was allowed; None allows all."""
    hour_prices: tuple[tuple[str, float], ...] = ()
    """Price of a GPU-hour of each kind; empty without prices."""
    failures: Failures
    points: tuple[SizePoint, ...]
    """All clusters on which a configuration fits, by kind and number of nodes."""
    tried: tuple[tuple[str, int], ...]
    """Largest number of GPUs that was allowed, for each kind."""
    searches: int
    """Number of searches for a configuration."""
    is_complete: bool = True
    """Whether the search ended by itself. An interrupted one has fewer points."""

    def __repr__(self) -> str:
        return brief(
            "LlmSizes",
            f"{shorten(self.transformer.name, 24)}: {pluralize(len(self.points), 'cluster')} of"
            f" {join_words(self.kinds, 'and')}",
        )

    def of_kind(self, kind: str) -> tuple[SizePoint, ...]:
        """Return the points of a kind of node, the one with the fewest nodes first."""
        return tuple(point for point in self.points if point.kind == kind)

    def cost(self, point: SizePoint) -> float:
        """Return the price of all GPU-hours of a run, or the GPU-hours themselves without prices."""
        return point.gpu_hours * dict(self.hour_prices).get(point.kind, 1.0)

    def answer(self, kind: str) -> SizePoint | None:
        """Return the smallest cluster of a kind that takes at most `days`, or without `days` the fastest in `budget`.

        None if none was found, and without both limits.
        """
        found = [point for point in self.of_kind(kind) if self.budget is None or self.cost(point) <= self.budget]
        if self.days is not None:
            return next((point for point in found if point.days <= self.days), None)
        return None if self.budget is None else min(found, key=lambda point: point.days, default=None)

    @property
    def answers(self) -> tuple[SizePoint, ...]:
        """The answer of each kind, the cheapest first, or the fastest first if only the budget is limited."""
        found = [one for one in map(self.answer, self.kinds) if one is not None]
        return tuple(sorted(found, key=self.cost if self.days is not None else lambda one: one.days))

    @property
    def front(self) -> tuple[SizePoint, ...]:
        """The Pareto front of days and cost over all kinds, the fastest cluster first."""
        return pareto_front(self.points, self.cost)


def pareto_front(points: Iterable[SizePoint], cost: Callable[[SizePoint], float]) -> tuple[SizePoint, ...]:
    """Return the points that no other one beats in days and in cost, the fastest first."""
    found: list[SizePoint] = []
    for point in sorted(points, key=lambda one: (one.days, cost(one))):
        if not found or cost(point) < cost(found[-1]):
            found.append(point)
    return tuple(found)


def node_counts(fewest: int, most: int) -> list[int]:
    """Return the numbers of nodes to try: those between two limits with at most 5 significant binary digits.

    >>> node_counts(30, 40), node_counts(1000, 1100)
    ([30, 31, 32, 34, 36, 38, 40], [1024, 1088])
    """
    found = []
    shift = 0
    while 1 << shift <= most:
        # Numbers with fewer digits have a smaller shift already.
        first = 1 if shift == 0 else 1 << (_SIGNIFICANT_BITS - 1)
        found += [count << shift for count in range(first, 1 << _SIGNIFICANT_BITS)]
        shift += 1
    return [count for count in found if fewest <= count <= most]


def batch_sizes(asked: int, gpus: int, *, is_exact: bool = False) -> list[int]:
    """Return the batches to try on some GPUs: the asked one, and the one near it that divides among most of the GPUs.

    >>> batch_sizes(2048, 1024), batch_sizes(2048, 3072), batch_sizes(2048, 3072, is_exact=True)
    ([2048], [2048, 2304], [2048])
    """
    if is_exact:
        return [asked]
    # The smaller the unit, the nearer a multiple of it, but the fewer degrees of data parallelism divide it.
    unit, odd = gpus, gpus // (gpus & -gpus)
    while unit >= odd:
        nearest = max(1, round(asked / unit)) * unit
        if abs(nearest - asked) <= BATCH_TOLERANCE * asked:
            return list(dict.fromkeys((asked, nearest)))
        # Below an odd unit there are no halves.
        if unit % 2:
            break
        unit //= 2
    return [asked]


def default_seq_length(transformer: Transformer | str | os.PathLike[str]) -> int:
    """Return the tokens per sequence unless some are given: the model's own limit, and at most 8192.

    >>> default_seq_length("llama-2-7b"), default_seq_length("llama-3-8b")
    (4096, 8192)
    """
    return min(transformer_of(transformer).longest or DEFAULT_SEQ_LENGTH, DEFAULT_SEQ_LENGTH)


def size_llm(
    transformer: Transformer | str | os.PathLike[str],
    *,
    tokens: float,
    days: float | None = None,
    budget: float | None = None,
    hour_prices: Mapping[str, float] | None = None,
    on: Iterable[str] = KINDS,
    quota: Mapping[str, int] | None = None,
    gpus: tuple[int, int] = (1, MAX_GPUS),
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    is_exact_batch: bool = False,
    precision: Precision = "bf16",
    framework: LlmFramework = "megatron",
    fix: dict[str, Value] | None = None,
    exclude: Sequence[str] = (),
    failures: Failures | None = None,
    allowance: float = 1.0,
    progress: Callable[[float, str], None] | None = None,
) -> LlmSizes:
    """Find for each kind of node the smallest cluster that trains a model in time, or points between all sizes.

    Args:
        transformer: a shape, its name, or a file with one.
        tokens: tokens of the whole run.
        days: longest time of the run. Without it and `budget`, clusters of all sizes are evaluated, for
            `LlmSizes.front`.
        budget: largest cost of the run, in the currency of `hour_prices`.
        hour_prices: price of a GPU-hour of each kind in `on`. None compares GPU-hours instead of costs.
        on: kinds of nodes: names of built-in clusters with GPUs whose rates are known.
        quota: largest number of GPUs of some kinds.
        gpus: smallest and largest number of GPUs.
        seq_length: tokens per sequence; None means the model's own limit, and at most 8192.
        global_batch_size: sequences per step; None means 4 M tokens, or 16 M from 30 billion parameters on.
        is_exact_batch: whether batches within 15 % of `global_batch_size` are left out.
        precision: number format of matrix multiplications.
        framework: `megatron`, `torchtitan` or `deepspeed`, as for `plan_llm`.
        fix: values that all configurations must have, as for `plan_llm`.
        exclude: features or values to leave out, as for `plan_llm`.
        failures: how often GPUs fail, and what saving and restarting take.
        allowance: factor on the time of each run: `PUBLISHED_RUNS` has what published runs took over predictions.
        progress: called with the share of the search that is done, and a remark.

    Ctrl-C ends the search with the points that it has. Raises ArgumentError for unknown kinds and for numbers out of
    range, such as tokens for less than one step, and what `plan_llm` raises for fixed values that never divide.

    >>> found = size_llm("llama-3-8b", tokens=1e12, days=14, on=["h100"], gpus=(8, 512))
    >>> point = found.answer("h100")
    >>> point.days <= 14, point.gpus == point.nodes * 8
    (True, True)
    """
    model = transformer_of(transformer)
    tokens = number("tokens", tokens, above=0)
    days = None if days is None else number("days", days, above=0)
    budget = None if budget is None else number("budget", budget, above=0)
    if budget is not None and hour_prices is None:
        raise ArgumentError(
            "there is a budget, but no prices", "give a price of a GPU-hour for each kind: --prices FILE"
        )
    mapping = "give a mapping by the kind of node: {'h100': 512}"
    check_is("hour_prices", hour_prices, Mapping, mapping, or_none=True)
    check_is("quota", quota, Mapping, mapping, or_none=True)
    check_is("failures", failures, Failures, "make them with `hpgo.llm.goodput.Failures`", or_none=True)
    check_flag("is_exact_batch", is_exact_batch)
    seq_length = default_seq_length(model) if seq_length is None else check_int("seq_length", seq_length)
    if global_batch_size is None:
        batch_tokens = LARGE_BATCH_TOKENS if model.parameters >= _LARGE else SMALL_BATCH_TOKENS
        global_batch_size = max(1, batch_tokens // seq_length)
    step_tokens = check_int("global_batch_size", global_batch_size) * seq_length
    if tokens < step_tokens:
        raise ArgumentError(
            f"tokens is {tokens:g}, but one step has {step_tokens:,} tokens: {global_batch_size} sequences of"
            f" {seq_length}",
            "give the tokens of the whole run, such as 15T, or a smaller batch",
        )
    if progress is not None:
        check_progress(progress)
    # All options are checked before the first search, which may take seconds.
    kinds = tuple(_checked_kind(kind) for kind in check_list("on", on, hint="give a list: ['h100', 'b200']"))
    limits_hint = "give the smallest and the largest number: (8, 512)"
    ends = [check_int("gpus", limit) for limit in check_list("gpus", gpus, hint=limits_hint)]
    if len(ends) != 2:
        raise ArgumentError(f"gpus has {pluralize(len(ends), 'number')}", limits_hint)
    fewest, most = ends
    if hour_prices is not None:
        missing = [kind for kind in kinds if kind not in hour_prices]
        if missing:
            raise ArgumentError(f"{missing[0]} has no price", f"add it, or leave {missing[0]} out")
        hour_prices = {kind: number(f"price of {kind}", hour_prices[kind], above=0) for kind in kinds}
    limits = {kind: min(most, check_int(f"quota of {kind}", (quota or {}).get(kind, most))) for kind in kinds}
    for kind in quota or {}:
        if kind not in kinds:
            raise ArgumentError(
                f"a quota names {safe_repr(kind)}, which is not compared", "add it to the kinds: --on, or leave it out"
            )
    choice("precision", precision, get_args(Precision))
    problem: dict[str, Any] = {
        "seq_length": check_int("seq_length", seq_length), "precision": precision, "framework": framework, "fix": fix,
        "exclude": check_list("`exclude`", exclude, hint="give a list: ['cp']"),
    }  # fmt: skip
    failures, allowance = failures or Failures(), number("allowance", allowance, above=0)
    searches = [
        _KindSearch(
            kind=kind,
            model=model,
            tokens=tokens,
            problem=problem,
            failures=failures,
            allowance=allowance,
            global_batch_size=check_int("global_batch_size", global_batch_size),
            is_exact_batch=is_exact_batch,
            fewest=fewest,
            most=limits[kind],
        )
        for kind in kinds
    ]
    is_complete = True
    try:
        for place, search in enumerate(searches):
            if days is not None:
                steps = search.within(days)
            elif budget is not None and hour_prices is not None:
                steps = search.affordable(budget / hour_prices[search.kind])
            else:
                steps = search.overview()
            for done, remark in steps:
                if progress is not None:
                    progress((place + done) / len(searches), f"{search.kind}: {remark}")
            search.check()
    except KeyboardInterrupt:
        # What was found is worth seconds of work. Without any, the interruption is the result.
        is_complete = False
        if not any(search.points for search in searches):
            raise
    return LlmSizes(
        transformer=model,
        tokens=tokens,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        precision=precision,
        framework=framework,
        kinds=kinds,
        days=days,
        budget=budget,
        hour_prices=tuple((hour_prices or {}).items()),
        failures=failures,
        points=tuple(point for search in searches for point in search.points),
        tried=tuple((search.kind, search.counts[-1] * search.gpus_per_node) for search in searches),
        searches=sum(search.searches for search in searches),
        is_complete=is_complete,
    )


def _checked_kind(kind: object) -> str:
    from hpgo.hardware.presets import PRESETS

    if not isinstance(kind, str) or kind not in PRESETS:
        raise ArgumentError(
            f"unknown kind of node: {safe_repr(kind)}",
            did_you_mean(kind, PRESETS) if isinstance(kind, str) else "give a name of `hpgo clusters`",
            code="unknown_name",
        )
    return kind


class _KindSearch:
    """The search over the number of nodes of one kind. It keeps all points that it evaluated."""

    def __init__(
        self,
        *,
        kind: str,
        model: Transformer,
        tokens: float,
        global_batch_size: int,
        problem: dict[str, Any],
        failures: Failures,
        allowance: float,
        is_exact_batch: bool,
        fewest: int,
        most: int,
    ) -> None:
        self.kind, self._model, self._tokens, self._batch = kind, model, tokens, global_batch_size
        self._problem, self._failures, self._is_exact = problem, failures, is_exact_batch
        self._allowance = allowance
        node = Cluster.preset(f"{kind}:1")
        self.gpus_per_node = node.devices
        self._peak_flop_per_s = Gpus.of(node, problem["precision"]).peak_flop_per_s
        self.counts = node_counts(ceil(fewest / node.devices), most // node.devices)
        if not self.counts:
            raise ArgumentError(
                f"{kind} has {node.devices} GPUs per node, but at most {most} GPUs are allowed",
                f"allow at least {node.devices}, or leave {kind} out",
            )
        self.searches = 0
        self._refusal: ArgumentError | None = None
        self._is_accepted = False
        self._found: dict[int, SizePoint | None] = {}

    def check(self) -> None:
        """Raise the last error if all searches were refused, such as for a precision that the framework lacks."""
        if self._refusal is not None and not self._is_accepted:
            raise self._refusal

    @property
    def points(self) -> list[SizePoint]:
        """Points on which a configuration fits, by number of nodes."""
        return [point for _, point in sorted(self._found.items()) if point is not None]

    def within(self, days: float) -> Iterator[tuple[float, str]]:
        """Evaluate clusters until the smallest one that takes at most `days` is found. Yield progress after each.

        The next smaller number of nodes has been evaluated, too, and takes longer.
        """
        # Efficiency changes little with the number of nodes, so a few guesses come close. Halving alone takes longer.
        flop = model_flop(self._model, self._problem["seq_length"], 1) / self._problem["seq_length"] * self._tokens
        guess = flop / (_USUAL_MFU * self._peak_flop_per_s * days * DAY_S) / self.gpus_per_node
        # counts[low] are too few nodes and counts[high] are enough, where these exist.
        low, high, asked = -1, len(self.counts), 0
        while high - low > 1:
            at = (low + high) // 2 if asked >= _GUESSES else bisect_left(self.counts, guess)
            at = min(max(at, low + 1), high - 1)
            point = self.point(self.counts[at])
            asked += 1
            # The same GPU-hours in the allowed days need about this number of nodes.
            if point is not None:
                guess = point.nodes * point.days / days
            low, high = (at, high) if point is None or point.days > days else (low, at)
            yield min(0.95, asked / 8), self._remark(point, self.counts[at])
        yield 1.0, "done"

    def affordable(self, gpu_hours: float) -> Iterator[tuple[float, str]]:
        """Evaluate clusters until the largest one that takes at most `gpu_hours` is found. Yield progress.

        Larger clusters need more GPU-hours, because they are less efficient and fail more often.
        """
        low, high, asked = -1, len(self.counts), 0
        while high - low > 1:
            at = (low + high) // 2
            point = self.point(self.counts[at])
            asked += 1
            # Where nothing fits in memory, more nodes are needed, even if they cost more.
            low, high = (low, at) if point is not None and point.gpu_hours > gpu_hours else (at, high)
            yield asked / len(self.counts).bit_length(), self._remark(point, self.counts[at])
        yield 1.0, "done"

    def overview(self) -> Iterator[tuple[float, str]]:
        """Evaluate clusters whose numbers of nodes are powers of 2, or all in a narrow range. Yield progress."""
        powers = [count for count in self.counts if count & (count - 1) == 0]
        # Each size costs a search, and the curve is smooth, so powers of 2 show it.
        order = self.counts if len(self.counts) <= _NARROW else powers
        for place, count in enumerate(order, start=1):
            yield place / len(order), self._remark(self.point(count), count)

    def _remark(self, point: SizePoint | None, nodes: int) -> str:
        gpus = f"{nodes * self.gpus_per_node:,} GPUs"
        return f"{gpus} are too few" if point is None else f"{gpus} take {point.days:.3g} days"

    def point(self, nodes: int) -> SizePoint | None:
        """Return the fastest run on some nodes, for any batch and number of GPUs that is tried; None if none fits."""
        if nodes not in self._found:
            runs = [run for part in self._parts(nodes) if (run := self._run(nodes, part)) is not None]
            self._found[nodes] = min(runs, key=lambda run: run.days, default=None)
        return self._found[nodes]

    def _parts(self, nodes: int) -> list[Cluster]:
        """Return the GPUs to try on some nodes: all of them, and a power of 2 of each, such as 64 of 72."""
        cluster = Cluster.preset(f"{self.kind}:{nodes}")
        # Batches and heads divide among powers of 2 more often than among 72.
        power = 1 << (self.gpus_per_node.bit_length() - 1)
        return [cluster] if power == self.gpus_per_node else [cluster, part_of(cluster, nodes, power)]

    def _run(self, nodes: int, part: Cluster) -> SizePoint | None:
        best, best_s = None, inf
        for batch in batch_sizes(self._batch, part.devices, is_exact=self._is_exact):
            self.searches += 1
            try:
                found = plan_llm(
                    self._model, part, global_batch_size=batch, devices=part.devices, top=1, **self._problem
                ).fastest
            except InfeasibleError:
                self._is_accepted = True
                continue
            except ArgumentError as error:
                # Some numbers of GPUs have no divisors for a batch, or for fixed degrees. Others may have some.
                self._refusal = error
                continue
            self._is_accepted = True
            steps = ceil(self._tokens / (batch * found.seq_length))
            # Batches differ, so their whole runs are compared, not their steps.
            if steps * found.step_s < best_s:
                best, best_s = (found, steps), steps * found.step_s
        if best is None:
            return None
        found, steps = best
        goodput = self._failures.goodput(found.gpus)
        # A run that fails more often than it saves never ends.
        if not (goodput > 0 and isfinite(best_s / goodput)):
            return None
        return SizePoint(
            kind=self.kind,
            nodes=nodes,
            gpus=nodes * self.gpus_per_node,
            estimate=replace(found, cluster=f"{self.kind}:{nodes}"),
            steps=steps,
            goodput=goodput,
            save_interval_s=self._failures.save_interval_s(found.gpus),
            mtbf_s=self._failures.mtbf_s(found.gpus),
            allowance=self._allowance,
        )
