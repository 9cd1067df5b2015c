"""Replicas of different kinds: each kind trains whole replicas on its own GPUs, and the batch is split by speed.

The configuration of each kind is the fastest one that `plan_llm` finds for its part of the batch. The gradients are
then summed over the kinds like over the groups of hybrid sharding: each kind holds all shards once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import comb, inf
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.divisors import divisors
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.llm.estimate import LlmEstimate, simulated_step_s
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.mixed.work_bound import gpu_seconds, item_counts
from hpgo.llm.parallelism import changed
from hpgo.llm.search import plan_llm
from hpgo.llm.step_time import PipelineStages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.llm.gpus import Ring
    from hpgo.llm.mixed.problem import MixedProblem

_ALL_SHARES = 24
"""Largest number of ways to split the batch of which all are tried. Not tuned: each takes a search for each kind."""
_SLACK = 1e-9
_ROUNDS = 3
"""Number of corrections of the shares by the speeds that were found for them. Not tuned."""


class KindShare(NamedTuple):
    """Part of the batch on the replicas of one kind."""

    kind: int
    """Place of the kind in `MixedProblem.kinds`."""
    samples: int
    estimate: LlmEstimate
    """Estimate of the kind alone with these samples, without the sum over the kinds."""


class ApartFound(NamedTuple):
    """Replicas of several kinds."""

    shares: tuple[KindShare, ...]
    step_s: float
    tried: int
    """Number of splits of the batch that were tried."""


class _KindContext(LayerContext):
    """Inputs of the terms where the groups of hybrid sharding are on different kinds of GPUs."""

    @property
    def group_ring(self) -> Ring:
        """GPUs that hold the same shard, one of each kind. They are never on the same node."""
        return self.gpus.ring(self.config.dp_replicate, self.gpus.count)

    @property
    def expert_group_ring(self) -> Ring:
        """GPUs that hold the same shard of an expert, one of each kind."""
        return self.group_ring


@dataclass
class KindsApart:
    """A search for the split of the batch among kinds, and its results so far."""

    problem: MixedProblem

    def __post_init__(self) -> None:
        self._found: dict[tuple[int, int], LlmEstimate | None] = {}
        # Lower bounds on the seconds of a sample. A kind without memory for a layer has no configuration anyway.
        counts = item_counts(self.problem)
        self._sample_s = [
            sum(map(mul, counts, gpu_seconds(self.problem, at))) / kind.gpus.count
            for at, kind in enumerate(self.problem.kinds)
        ]

    def alone(self, kind: int, samples: int) -> LlmEstimate | None:
        """Return the fastest configuration of a kind for some samples; None if none fits or divides them."""
        if (kind, samples) not in self._found:
            problem, one = self.problem, self.problem.kinds[kind]
            try:
                search = plan_llm(
                    problem.model, one.cluster, global_batch_size=samples, seq_length=problem.seq_length,
                    precision=problem.precision, reserved_bytes=problem.reserved_bytes, stack=one.stack, top=1,
                )  # fmt: skip
            except (ArgumentError, InfeasibleError):
                self._found[kind, samples] = None
            else:
                self._found[kind, samples] = search.fastest
        return self._found[kind, samples]

    def best(self) -> ApartFound | None:
        """Return the fastest split of the batch among two or more kinds; None if none fits in memory."""
        best, below_s, tried = None, inf, 0
        for count in range(len(self.problem.kinds), 1, -1):
            for kinds in combinations(range(len(self.problem.kinds)), count):
                # A good split early on saves the searches of many others.
                ideal = self._ideal(kinds)
                splits = sorted(self._splits(ideal), key=partial(_distance, ideal))
                tried += len(splits)
                for samples in splits:
                    if (found := self._step(kinds, samples, below_s)) is not None:
                        best, below_s = found, found.step_s
        return None if best is None else best._replace(tried=tried)

    def _step(self, kinds: tuple[int, ...], samples: tuple[int, ...], below_s: float) -> ApartFound | None:
        """Return the step of a split, if every kind fits in memory and the step is shorter than `below_s`."""
        shares: list[KindShare] = []
        for kind, count in zip(kinds, samples, strict=True):
            # A search takes far longer than this bound.
            if count * self._sample_s[kind] * (1 - _SLACK) >= below_s:
                return None
            estimate = self.alone(kind, count)
            if estimate is None or estimate.step_s >= below_s:
                return None
            shares.append(KindShare(kind, count, estimate))
        step_s = self.step_s(shares)
        return ApartFound(tuple(shares), step_s, 0) if step_s < below_s else None

    def step_s(self, shares: list[KindShare]) -> float:
        """Return the step time of replicas on several kinds.

        The sum over the kinds waits for the passes of the slowest kind. In each kind, the first stage ends its passes
        last.
        """
        passes_s, tails_s = [], []
        for share in shares:
            one, estimate = self.problem.kinds[share.kind], share.estimate
            config = estimate.parallelism
            shared = changed(
                config, dp=config.dp * len(shares), dp_replicate=len(shares), zero_stage=max(1, config.zero_stage)
            )
            model = self.problem.model
            context = _KindContext(model, shared, one.gpus, one.constants, self.problem.seq_length, model.kind(0))
            stages = PipelineStages(context, estimate.micro_batches)
            tails_s.append(stages.stages[0].grad_reduce_s + stages.rank_optimizer_s[0])
            passes_s.append(simulated_step_s(stages) - tails_s[-1])
        return max(passes_s) + max(tails_s)

    def _splits(self, ideal: list[float]) -> Iterator[tuple[int, ...]]:
        """Yield splits of the batch: all if there are few, else those near the speeds, by coarse and fine parts."""
        count, kinds = self.problem.global_batch_size, len(ideal)
        if comb(count - 1, kinds - 1) <= _ALL_SHARES:
            yield from _compositions(count, kinds)
            return
        seen = set()
        # Parts that are multiples of a large number divide among more replicas and larger micro-batches.
        for part in reversed(divisors(count)):
            for ups in product((0, 1), repeat=kinds - 1):
                first = [part * (int(share // part) + up) for share, up in zip(ideal, ups, strict=False)]
                split = (*first, count - sum(first))
                if min(split) > 0 and split not in seen:
                    seen.add(split)
                    yield split

    def _ideal(self, kinds: tuple[int, ...]) -> list[float]:
        """Return shares by which some kinds take about the same time."""
        count, gpus = self.problem.global_batch_size, [self.problem.kinds[kind].gpus for kind in kinds]
        speeds = [one.count * one.peak_flop_per_s for one in gpus]
        for _ in range(_ROUNDS):
            shares = [count * speed / sum(speeds) for speed in speeds]
            # A multiple of the GPUs divides evenly, so that the speed is not that of an unlucky number.
            sizes = [_near(share, one.count) for share, one in zip(shares, gpus, strict=True)]
            found = [self.alone(kind, size) for kind, size in zip(kinds, sizes, strict=True)]
            if not all(found):
                break
            speeds = [size / one.step_s for size, one in zip(sizes, found, strict=True) if one is not None]
        return [count * speed / sum(speeds) for speed in speeds]


def _distance(ideal: list[float], samples: tuple[int, ...]) -> float:
    """Return how far a split is from the ideal shares."""
    return sum(abs(one - other) for one, other in zip(ideal, samples, strict=True))


def _near(share: float, each: int) -> int:
    """Return the multiple of `each` next to a share, or a power of 2 if the share is smaller."""
    # Powers of 2 divide among most replicas and micro-batch sizes.
    if share >= each:
        return each * round(share / each)
    return 1 << max(0, int(share).bit_length() - 1)


def _compositions(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of positive numbers.

    >>> [*_compositions(4, 2)]
    [(1, 3), (2, 2), (3, 1)]
    """
    if parts == 1:
        yield (count,)
        return
    for first in range(1, count - parts + 2):
        for rest in _compositions(count - first, parts - 1):
            yield (first, *rest)
