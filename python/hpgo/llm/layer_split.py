"""How the layers of a transformer may lie on the ranks of a pipeline, counted for all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.llm.estimate import in_flight
from hpgo.llm.memory import PipelineRankLayers
from hpgo.llm.parallelism import ParallelismConfig, cut, ends_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import PipelineSchedule
    from hpgo.model.transformer import Kind

    Array = npt.NDArray[np.float64]
    Whole = npt.NDArray[np.int_]


class LayerSplit(NamedTuple):
    """How the layers lie on ranks and their stages."""

    chunks: int
    first_rank_layers: int | None
    last_rank_layers: int | None
    counts: tuple[int, ...]
    """Layers of each stage, round by round through the ranks."""

    @property
    def most(self) -> int:
        """Layers of the stage that has most."""
        return max(self.counts)

    @property
    def fullest(self) -> int:
        """Layers of the rank that has most."""
        ranks = len(self.counts) // self.chunks
        return max(sum(self.counts[rank::ranks]) for rank in range(ranks))


@dataclass(frozen=True)
class LayerSplits:
    """Those that a family of ways may have."""

    pipeline: int
    found: tuple[LayerSplit, ...]
    """By layers of the fullest rank, the fewest first."""
    kinds: tuple[Kind, ...]
    """Of every layer, and of those that predict further tokens, which are on the last stage."""
    schedule: PipelineSchedule = "1f1b"

    @classmethod
    def of(
        cls, kinds: tuple[Kind, ...], pipeline: int, chunks: Iterable[int], schedule: PipelineSchedule = "1f1b", *,
        uneven: bool = True, laid_out: bool = False,
    ) -> LayerSplits:  # fmt: skip
        """Those with so many stages on each rank; `uneven` ones have fewer layers on the first and the last rank."""
        layers = sum(not kind.further for kind in kinds)
        found = [one for count in chunks for one in cuts(layers, pipeline, count, uneven=uneven, laid_out=laid_out)]
        return cls(pipeline, tuple(sorted(found, key=lambda one: one.fullest)), kinds, schedule)

    @cached_property
    def some(self) -> int:
        """How many ways there are of computing some layers of each stage anew, and not all."""
        return sum(one.most - 1 for one in self.found)

    @cached_property
    def most(self) -> Array:
        """Of each cut, layers of the stage that has most."""
        return np.array([one.most for one in self.found], dtype=float)

    @cached_property
    def different(self) -> tuple[Kind, ...]:
        """Kinds of layers, in the order that they appear in."""
        return tuple(dict.fromkeys(self.kinds))

    @cached_property
    def _stages(self) -> Array:
        """By cut, stage of a rank, and rank: layers of each kind, embeddings and heads."""
        behind = np.zeros((len(self.kinds) + 1, len(self.different)))
        for at, kind in enumerate(self.kinds):
            behind[at + 1] = behind[at]
            behind[at + 1, self.different.index(kind)] += 1
        chunks = max(one.chunks for one in self.found)
        found = np.zeros((len(self.found), chunks * self.pipeline, len(self.different) + 2))
        for each in {one.chunks for one in self.found}:
            alike = [at for at, one in enumerate(self.found) if one.chunks == each]
            starts = np.zeros((len(alike), each * self.pipeline + 1), dtype=int)
            np.cumsum([self.found[at].counts for at in alike], axis=1, out=starts[:, 1:])
            starts[:, -1] = len(self.kinds)
            found[alike, : each * self.pipeline, :-2] = np.diff(behind[starts], axis=1)
            found[alike, each * self.pipeline - 1, -1] = 1
        found[:, 0, -2] = 1
        by_rank: Array = found.reshape(len(self.found), chunks, self.pipeline, len(self.different) + 2)
        if self.schedule == "zb_v":  # the last stage is on the first rank
            by_rank[:, 1] = by_rank[:, 1, ::-1].copy()
        return by_rank

    @cached_property
    def layers(self) -> Array:
        """By cut and rank: layers of each kind, embeddings and heads."""
        found: Array = self._stages.sum(axis=1)
        return found

    @cached_property
    def first(self) -> Array:
        """The same of each rank's first stage alone."""
        return self._stages[:, 0]

    @cached_property
    def _flying(self) -> dict[int, tuple[Array, Array]]:
        return {}

    def flying(self, micro_batches: int) -> tuple[Array, Array]:
        """Micro-batches in flight when a rank holds most: all through its stages, and, as `layers`, through layers."""
        key = min(micro_batches, 2 * self.pipeline)  # no more are ever in flight
        if key not in self._flying:
            found = np.zeros(self._stages.shape[:3])
            for at, one in enumerate(self.found):
                found[at, : one.chunks] = _in_flight(self.schedule, self.pipeline, one.chunks, key)
            self._flying[key] = found.sum(axis=1), (self._stages * found[..., None]).sum(axis=1)
        return self._flying[key]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], Array]:
        return {}

    def once(self, context: LayerContext, what: Callable[[LayerContext], Array]) -> Array:
        """`what` of a context, computed once for those that share parameters among GPUs alike."""
        config = context.config
        degrees = config.tp, config.cp, config.dp, config.ep, config.zero_stage
        if degrees not in self._known:
            self._known[degrees] = what(context)
        return self._known[degrees]

    def part(self, micro_batches: int, *, recomputed: bool) -> PipelineRankLayers:
        """What GPUs have, by cut and rank, all layers computed anew or none."""
        held, flying = (
            {(kind, recomputed): amounts[..., at] for at, kind in enumerate(self.different)}
            for amounts in (self.layers, self.flying(micro_batches)[1])
        )
        return PipelineRankLayers(held, flying, embedding=self.layers[..., -2], head=self.layers[..., -1])


@lru_cache(maxsize=4096)
def _in_flight(schedule: PipelineSchedule, pipeline: int, chunks: int, micro_batches: int) -> Array:
    """By stage of a rank, and rank."""
    config = ParallelismConfig(pp=pipeline, vpp=chunks, pp_schedule=schedule)
    return np.array([in_flight(config, rank, micro_batches) for rank in range(pipeline)], dtype=float).T


@lru_cache(maxsize=4096)
def cuts(
    layers: int, pipeline: int, chunks: int, *, uneven: bool = True, laid_out: bool = False
) -> tuple[LayerSplit, ...]:
    """Those with so many stages on each rank.

    `uneven` ones have fewer layers on the first and the last rank than on each between.

    >>> [one.counts for one in cuts(6, 4, 1)], cuts(5, 2, 1, uneven=False)
    ([(1, 2, 2, 1)], ())
    >>> [one.first_rank_layers for one in cuts(6, 2, 1)]
    [None, 1, 2, 4, 5]
    """
    found = []
    even = cut(layers, pipeline, chunks, (None, None), laid_out=laid_out)
    for ends in [(None, None), *(ends_of(layers, pipeline, chunks) if uneven else ())]:
        counts = cut(layers, pipeline, chunks, ends, laid_out=laid_out)
        if counts is not None and (counts != even or ends == (None, None)):
            found.append(LayerSplit(chunks, ends[0], ends[1], counts))
    return tuple(found)
