"""Search for the fastest pipeline through all kinds of GPUs.

The search is best-first over partial splits of the layers. A pipeline with given degrees has a lower bound from linear
programming (docs/proofs.md, "Pipelines through several kinds of GPUs"). The search opens pipelines in the order of
their bounds, places layers stage by stage, and simulates whole splits. It stops when no bound is below the best step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import permutations, product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.base.divisors import divisors
from hpgo.llm.mixed.pipeline import Block, MixedPipeline, PlacedPipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hpgo.llm.mixed.problem import MixedProblem, Setting

    Array = npt.NDArray[np.float64]

MAX_SIMULATED = 2000
"""Largest number of splits that are simulated. Not tuned: 2,000 simulations take about 5 s."""
MAX_OPENED = 100_000
"""Largest number of partial splits that are extended. Not tuned: they take about 10 s."""
_SLACK = 1e-9
"""Relative error of sums of floating-point numbers, by which bounds are lowered."""


class PipelineFound(NamedTuple):
    """Result of a search for a pipeline."""

    best: PlacedPipeline | None
    """Fastest pipeline that was found; None if none fits in memory."""
    bound_s: float
    """No pipeline of the search space has a shorter step. The step of `best` itself if the search is complete."""
    pipelines: int
    """Number of combinations of degrees."""
    simulated: int
    """Number of splits of layers that were simulated."""

    @property
    def is_proven(self) -> bool:
        """Whether no pipeline of the search space is faster than `best`."""
        return self.best is not None and self.bound_s >= self.best.step_s * (1 - 2 * _SLACK)


@dataclass(frozen=True)
class _Combinations:
    """All combinations of degrees for one order of the kinds, one cp and one number of samples: arrays of bounds."""

    problem: MixedProblem
    order: tuple[int, ...]
    options: tuple[tuple[Block, ...], ...]
    """Choices of each kind, in the order of the pipeline."""
    micro_batches: int
    is_uniform: bool
    """Whether only combinations with the same degrees on all kinds are valid."""

    @cached_property
    def bounds_s(self) -> Array:
        """Lower bound on the step of each combination, with one axis for each kind; infinite for invalid ones."""
        kinds, model, many = len(self.order), self.problem.model, self.micro_batches

        def along(axis: int, values: list[float]) -> Array:
            shape = [1] * kinds
            shape[axis] = len(values)
            return np.array(values).reshape(shape)

        layers_s = [[self.problem.layer_s(one.setting) for one in held] for held in self.options]
        # The unit of work is the mean time of a layer over all options. An option takes at least `unit` seconds of
        # its own for each second of this work, whichever kind the layer has.
        means_s = np.mean([each for held in layers_s for each in held], axis=0)
        work = np.full((1,) * kinds, float(self.problem.layers_before[-1] @ means_s))
        used = self.problem.layers_before[-1] > 0
        ends = [[self.problem.ends_s(one.setting) for one in held] for held in self.options]
        # The weight of the stages behind, by weight of a unit of work.
        behind = stages = held = np.zeros((1,) * kinds)
        # From the last stage on, since the weight of a stage depends on the weights behind it.
        for at in reversed(range(kinds)):
            unit = along(at, [float((each[used] / means_s[used]).min()) for each in layers_s[at]])
            count = along(at, [float(one.stages) for one in self.options[at]])
            if at == kinds - 1:
                work = work + along(at, [head_s for _, head_s in ends[at]]) / unit
            if at == 0:
                work = work + along(at, [first_s for first_s, _ in ends[at]]) * np.maximum(1 / unit, behind)
            reached = 1 / unit - (1 / unit - behind) * (1 - 1 / many) ** count
            behind, stages = np.where(1 / unit > behind, reached, behind), stages + count
            held = held + along(at, [self._max_layers(one) for one in self.options[at]])
        found = work / behind * (1 - _SLACK)
        layers = len(self.problem.layer_kinds)
        found = np.where((stages > layers) | (held < layers), inf, found)
        if model.tied or model.further_tokens:
            # Both ends hold the embedding, whose gradients FlagScale sums between GPUs of equal tp.
            first, last = (along(at, [float(one.setting.config.tp) for one in self.options[at]]) for at in (0, -1))
            found = np.where(first != last, inf, found)
        if self.is_uniform:
            # The sequences of a micro-batch are the same, so equal dp means equal micro-batch sizes.
            configs = [[one.setting.config for one in options] for options in self.options]
            shapes = [[(one.tp, one.ep, one.dp, one.recompute) for one in row] for row in configs]
            # Numbers stand for the shapes, since arrays compare numbers.
            known = list(dict.fromkeys(shape for row in shapes for shape in row))
            rows = [along(at, [float(known.index(shape)) for shape in row]) for at, row in enumerate(shapes)]
            for row in rows[1:]:
                found = np.where(row != rows[0], inf, found)
        return np.broadcast_to(found, tuple(map(len, self.options)))

    def _max_layers(self, block: Block) -> float:
        """Return an upper bound on the layers of a block: of one with no stages behind it, and without ends."""
        # Layers of different kinds need different memory, so nothing is known before they are placed.
        if not self.problem.is_uniform:
            return inf
        used_bytes = block.memory_bytes(self.problem, 0, self.micro_batches, embedding=False, head=False)
        fits = used_bytes <= self.problem.limit_bytes(block.setting.kind)
        return float((fits.sum(axis=1) - 1).sum())

    def pipeline(self, place: int) -> MixedPipeline:
        """Return the combination at a place of the flattened bounds."""
        places = np.unravel_index(place, tuple(map(len, self.options)))
        return MixedPipeline(self.problem, tuple(held[int(at)] for held, at in zip(self.options, places, strict=True)))


@dataclass
class Suffix:
    """Lower bounds on what the stages of a pipeline from each one on still need."""

    pipeline: MixedPipeline

    @cached_property
    def weights(self) -> Array:
        """Weight of each stage's time, times the micro-batches, plus the weights of all stages behind.

        Divided by `totals` of a stage, the weights are a convex combination of the paths that end in it or
        behind it. Shape (stages,).
        """
        return self._weights[0]

    @cached_property
    def totals(self) -> Array:
        """Sum of the weights of each stage and of those behind it. Shape (stages + 1,)."""
        return self._weights[1]

    @cached_property
    def _weights(self) -> tuple[Array, Array]:
        pipeline, many = self.pipeline, self.pipeline.micro_batches
        used = pipeline.problem.layers_before[-1] > 0
        rows = [pipeline.problem.layer_s(setting)[used] for setting in pipeline.settings]
        means_s = np.mean(rows, axis=0)
        units = [float((row / means_s).min()) for row in rows]
        totals, found = np.zeros(len(units) + 1), np.zeros(len(units))
        for at in reversed(range(len(units))):
            own = max(0.0, (1 / units[at] - totals[at + 1]) / many)
            # The stage's own path counts it `many` times, and each path that ends behind it once.
            found[at], totals[at] = many * own + totals[at + 1], totals[at + 1] + own
        return found, totals

    @cached_property
    def layers_s(self) -> Array:
        """Lower bound on the weighted time of the layers from each one on, from each stage on: (stages, layers + 1)."""
        problem = self.pipeline.problem
        each = np.array([problem.layer_s(setting) for setting in self.pipeline.settings]) * self.weights[:, None]
        # Each layer is on some stage from this one on, so it takes at least the least weighted time of these.
        least = np.minimum.accumulate(each[::-1], axis=0)[::-1]
        left = problem.layers_before[-1] - problem.layers_before
        found: Array = least @ left.T
        return found

    @cached_property
    def fixed_s(self) -> Array:
        """Weighted time of the LM head, and of the transfers, from each stage on. Shape (stages + 1,)."""
        last, edges = self.pipeline.num_stages - 1, self.pipeline.edges
        found = np.zeros(last + 2)
        # All paths that end behind a stage use the link to the next one, there and back.
        for at in reversed(range(last + 1)):
            behind = 2 * sum(edges[at]) * self.totals[at + 1] if at < last else 0.0
            found[at] = found[at + 1] + behind + (self.pipeline.end_s(at) * self.weights[at] if at == last else 0.0)
        return found

    @cached_property
    def max_layers(self) -> list[int]:
        """Largest number of layers of all stages from each one on, by their memory. Length stages + 1."""
        pipeline, layers = self.pipeline, len(self.pipeline.problem.layer_kinds)
        found = [0] * (pipeline.num_stages + 1)
        for at in reversed(range(pipeline.num_stages)):
            # Layers of different kinds need different memory, so nothing is known before they are placed.
            found[at] = found[at + 1] + (pipeline.max_layers(at, 0) if pipeline.problem.is_uniform else layers)
        return found

    def bound_s(self, stage: int, start: int, before_s: float) -> float:
        """Return a lower bound on the step, if a stage begins with layer `start`.

        `before_s` is the time of forward, backward and both transfers of one micro-batch in all stages in front.
        """
        if stage == self.pipeline.num_stages:
            return 0.0
        # The weights of these stages alone add up to `totals`, so dividing by it makes their average.
        behind_s = (self.layers_s[stage, start] + self.fixed_s[stage]) / self.totals[stage]
        return before_s + float(behind_s)


class _Partial(NamedTuple):
    """A split of the first layers of a pipeline. Partial splits are sorted by bound, those with more stages first."""

    bound_s: float
    """Lower bound on the step of all whole splits that begin like this."""
    minus_stages: int
    pipeline: int
    """Place of the pipeline in the search."""
    start: int
    """First layer that is not placed."""
    counts: tuple[int, ...]
    before_s: float
    """Seconds of forward, backward and transfers of one micro-batch in all placed stages."""
    ended_s: float
    """Lower bound on the step from the placed stages alone."""


@dataclass
class PipelineSearch:
    """State of a search: the partial splits by their bound, and the best whole split."""

    problem: MixedProblem
    is_uniform: bool = False
    """Whether all kinds have the same degrees, micro-batch size and recomputation, as Megatron-LM requires."""
    best: PlacedPipeline | None = None
    simulated: int = 0
    opened: int = 0
    _heap: list[_Partial] = field(default_factory=list)
    _suffixes: list[Suffix] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Step time of the best split; infinite without one."""
        return inf if self.best is None else self.best.step_s

    def run(self, max_simulated: int = MAX_SIMULATED, max_opened: int = MAX_OPENED) -> PipelineFound:
        """Return the fastest pipeline."""
        groups = list(_combinations(self.problem, is_uniform=self.is_uniform))
        bounds_s = [group.bounds_s.ravel() for group in groups]
        if not groups:
            return PipelineFound(self.best, self.best_s, 0, 0)
        sizes = np.cumsum([0, *map(len, bounds_s)])
        every = np.concatenate(bounds_s)
        # A stable order makes the answer the same on all machines if several pipelines have equal bounds.
        order, finite = np.argsort(every, kind="stable"), int(np.isfinite(every).sum())
        following = 0
        while True:
            next_s = every[order[following]] if following < finite else inf
            least_s = min(next_s, self._heap[0].bound_s if self._heap else inf)
            if least_s >= self.best_s or least_s == inf:
                return PipelineFound(self.best, self.best_s, finite, self.simulated)
            if self.simulated >= max_simulated or self.opened >= max_opened:
                return PipelineFound(self.best, float(least_s), finite, self.simulated)
            self.opened += 1
            if next_s == least_s:
                place = int(order[following])
                group = int(np.searchsorted(sizes, place, side="right")) - 1
                self._open(groups[group].pipeline(place - int(sizes[group])))
                following += 1
            else:
                self._extend()

    def _open(self, pipeline: MixedPipeline) -> None:
        suffix = Suffix(pipeline)
        first_s = pipeline.end_s(0) * suffix.weights[0] / suffix.totals[0]
        bound_s = (suffix.bound_s(0, 0, 0.0) + first_s) * (1 - _SLACK)
        if bound_s < self.best_s:
            self._suffixes.append(suffix)
            heappush(self._heap, _Partial(bound_s, 0, len(self._suffixes) - 1, 0, (), 0.0, 0.0))

    def _extend(self) -> None:
        """Place the layers of one more stage of the partial split with the lowest bound."""
        partial = heappop(self._heap)
        if len(partial.counts) == self._suffixes[partial.pipeline].pipeline.num_stages:
            self._simulate(partial)
            return
        if not partial.counts:
            self._dive(partial)
        for one in self._longer(partial):
            heappush(self._heap, one)

    def _dive(self, partial: _Partial) -> None:
        """Simulate the split that has the lowest bound stage by stage, so that the search has a step to beat."""
        while longer := self._longer(partial):
            partial = min(longer)
        if len(partial.counts) == self._suffixes[partial.pipeline].pipeline.num_stages:
            self._simulate(partial)

    def _longer(self, partial: _Partial) -> list[_Partial]:
        """Return the partial splits with one more stage that may still be faster than the best split."""
        suffix, start, found = self._suffixes[partial.pipeline], partial.start, []
        pipeline, stage, layers = suffix.pipeline, len(partial.counts), len(self.problem.layer_kinds)
        if stage == pipeline.num_stages:
            return []
        rest = pipeline.num_stages - 1 - stage
        passes_s, edge_s = pipeline.passes_s(stage), 2 * sum(pipeline.edges[stage]) if rest else 0.0
        fixed_s, many = pipeline.end_s(stage), pipeline.micro_batches
        # Each stage behind has a layer, and no more than fit in its memory.
        least = max(1, layers - start - suffix.max_layers[stage + 1])
        most = min(pipeline.max_layers(stage, start), layers - start - rest)
        for count in range(least, most + 1):
            stop = start + count
            one_s = float(passes_s[stop] - passes_s[start]) + fixed_s
            until_s = max(partial.ended_s, partial.before_s + many * one_s)
            # More layers on this stage only make it longer.
            if until_s * (1 - _SLACK) >= self.best_s:
                break
            after_s = partial.before_s + one_s + edge_s
            bound_s = max(until_s, suffix.bound_s(stage + 1, stop, after_s)) * (1 - _SLACK)
            if bound_s < self.best_s:
                counts = (*partial.counts, count)
                bound_s = max(partial.bound_s, bound_s)
                found.append(_Partial(bound_s, -stage - 1, partial.pipeline, stop, counts, after_s, until_s))
        return found

    def _simulate(self, partial: _Partial) -> None:
        placed = self._suffixes[partial.pipeline].pipeline.with_layers(partial.counts)
        self.simulated += 1
        # The memory of the whole split is checked once more, with the columns of a single stage.
        if placed.step_s < self.best_s and placed.fits:
            self.best = placed


def _combinations(problem: MixedProblem, *, is_uniform: bool) -> Iterator[_Combinations]:
    """Yield the combinations of degrees for each cp, each number of samples per micro-batch and each order."""
    kinds = range(len(problem.kinds))
    powers = [1 << power for power in range(max(kind.gpus.count for kind in problem.kinds).bit_length())]
    for cp, samples in product(powers, divisors(problem.global_batch_size)):
        blocks = [tuple(_block(problem, one) for one in problem.settings(kind, cp, samples)) for kind in kinds]
        if all(blocks):
            for order in permutations(kinds):
                many = problem.global_batch_size // samples
                yield _Combinations(problem, order, tuple(blocks[kind] for kind in order), many, is_uniform)


def _block(problem: MixedProblem, setting: Setting) -> Block:
    """Return the stages of a setting on all GPUs of its kind."""
    config = setting.config
    return Block(setting, problem.kinds[setting.kind].gpus.count // (config.tp * config.cp * config.dp))
