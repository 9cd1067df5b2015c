"""Layer splits among the ranks of a pipeline, with counts and memory of all splits at once as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.llm.estimate import in_flight
from hpgo.llm.memory import STATE, PipelineRankLayers, stage_memory
from hpgo.llm.parallelism import ParallelismConfig, ends_of, split_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import PipelineSchedule
    from hpgo.model.transformer import Kind

    Array = npt.NDArray[np.float64]
    Whole = npt.NDArray[np.int_]


class LayerSplit(NamedTuple):
    """One split of the layers among ranks and their virtual stages."""

    vpp: int
    first_rank_layers: int | None
    last_rank_layers: int | None
    counts: tuple[int, ...]
    """Layers of each stage, round by round through the ranks."""

    @property
    def maximum(self) -> int:
        """Layers of the largest stage."""
        return max(self.counts)

    @property
    def fullest(self) -> int:
        """Layers of the rank with the most layers."""
        ranks = len(self.counts) // self.vpp
        return max(sum(self.counts[rank::ranks]) for rank in range(ranks))


@dataclass(frozen=True)
class LayerSplits:
    """Layer splits of a group of configurations, as arrays over all of them."""

    pp: int
    found: tuple[LayerSplit, ...]
    """Sorted by the layers of the fullest rank, fewest first."""
    kinds: tuple[Kind, ...]
    """Kind of every layer, and of the layers for multi-token prediction, which are on the last stage."""
    schedule: PipelineSchedule = "1f1b"

    @classmethod
    def from_kinds(
        cls, kinds: tuple[Kind, ...], pp: int, vpp: Iterable[int], schedule: PipelineSchedule = "1f1b", *,
        uneven: bool = True, laid_out: bool = False,
    ) -> LayerSplits:  # fmt: skip
        """Return the splits for each number of virtual stages in `vpp`.

        `uneven` adds splits with fewer layers on the end ranks. `laid_out` is explained at `stage_layers`.
        """
        # Layers for multi-token prediction are not split: they always follow the last layer, on the last stage.
        layers = sum(not kind.further for kind in kinds)
        found = [one for each in vpp for one in splits_of(layers, pp, each, uneven=uneven, laid_out=laid_out)]
        return cls(pp, tuple(sorted(found, key=lambda one: one.fullest)), kinds, schedule)

    @cached_property
    def some(self) -> int:
        """Number of configurations that recompute some layers of each stage, but not all."""
        return sum(one.maximum - 1 for one in self.found)

    @cached_property
    def maximum(self) -> Array:
        """Layers of the largest stage, by split."""
        return np.array([one.maximum for one in self.found], dtype=float)

    @cached_property
    def different(self) -> tuple[Kind, ...]:
        """Kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.kinds))

    @cached_property
    def _stages(self) -> Array:
        """Counts by split, virtual stage of a rank, and rank: layers of each kind, then embeddings, then LM heads."""
        # With prefix sums over layers, the counts of any stage are one subtraction.
        before = np.zeros((len(self.kinds) + 1, len(self.different)))
        before[1:] = np.cumsum([[kind == one for one in self.different] for kind in self.kinds], axis=0)
        vpp = max(one.vpp for one in self.found)
        found = np.zeros((len(self.found), vpp * self.pp, len(self.different) + 2))
        # Splits with fewer virtual stages than `vpp` leave the rest of their row at 0.
        for each in {one.vpp for one in self.found}:
            alike = [at for at, one in enumerate(self.found) if one.vpp == each]
            starts = np.zeros((len(alike), each * self.pp + 1), dtype=int)
            np.cumsum([self.found[at].counts for at in alike], axis=1, out=starts[:, 1:])
            starts[:, -1] = len(self.kinds)
            found[alike, : each * self.pp, :-2] = np.diff(before[starts], axis=1)
            found[alike, each * self.pp - 1, -1] = 1
        found[:, 0, -2] = 1
        by_rank: Array = found.reshape(len(self.found), vpp, self.pp, len(self.different) + 2)
        # In a V the second stages are placed from the last rank to the first.
        if self.schedule == "zb_v":
            by_rank[:, 1] = by_rank[:, 1, ::-1].copy()
        return by_rank

    @cached_property
    def layers(self) -> Array:
        """Counts by layer kind, embeddings and LM heads; then by split and rank."""
        return _kinds_first(self._stages.sum(axis=1))

    @cached_property
    def first(self) -> Array:
        """Counts of each rank's first stage alone, like `layers`."""
        return _kinds_first(self._stages[:, 0])

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[Array, Array]]:
        return {}

    def in_flight(self, micro_batches: int) -> tuple[Array, Array]:
        """Return the micro-batches in flight when a rank has the most: summed over its stages, and over its layers."""
        # More are never in flight. The cap lets all larger batches share one entry of the cache.
        micro_batches = min(micro_batches, 2 * self.pp)
        if (micro_batches,) not in self._known:
            found = np.zeros(self._stages.shape[:3])
            for at, one in enumerate(self.found):
                found[at, : one.vpp] = _in_flight(self.schedule, self.pp, one.vpp, micro_batches)
            self._known[micro_batches,] = (
                found.sum(axis=1),
                _kinds_first((self._stages * found[..., None]).sum(axis=1)),
            )
        return self._known[micro_batches,]

    def rank_layers(self, micro_batches: int, *, recomputed: bool) -> PipelineRankLayers:
        """Return the layers of all GPUs, by split and rank, with all layers recomputed or none."""
        flying = self.in_flight(micro_batches)[1]
        layers, in_flight = (
            dict(zip(((kind, recomputed) for kind in self.different), counts, strict=False))
            for counts in (self.layers, flying)
        )
        return PipelineRankLayers(
            layers, in_flight, embedding=self.layers[-2], head=self.layers[-1], embedded_in_flight=flying[-2]
        )

    def state_bytes(self, context: LayerContext, held: PipelineRankLayers) -> Array:
        """Return the bytes of parameters, gradients and optimizer state of the layers in `held`, by split and rank."""
        degrees = _degrees(context)
        if degrees not in self._states:
            self._states[degrees] = np.sum(list(stage_memory(context, held, STATE).values()), axis=0)
        return self._states[degrees]

    @cached_property
    def _states(self) -> dict[tuple[int, ...], Array]:
        # All micro-batch sizes share these bytes, and they take longer to compute than all other columns together.
        return {}

    def mean_state_bytes(self, context: LayerContext) -> float:
        """Return the bytes of parameters, gradients and optimizer state of a rank, on average over the ranks.

        It is the same for all splits, or a little lower where several ranks gather the same weights.
        """
        degrees = _degrees(context)
        if degrees not in self._mean_states:
            layers = {(kind, False): self.kinds.count(kind) for kind in self.different}
            whole = PipelineRankLayers(layers, {}, embedding=1, head=1)
            self._mean_states[degrees] = sum(stage_memory(context, whole, STATE).values()) / self.pp
        return self._mean_states[degrees]

    @cached_property
    def _mean_states(self) -> dict[tuple[int, ...], float]:
        return {}


def _degrees(context: LayerContext) -> tuple[int, ...]:
    """Return the degrees on which the bytes of parameters, gradients and optimizer state depend."""
    config = context.config
    return config.tp, config.cp, config.dp, config.ep, config.zero_stage, config.dp_replicate


def _kinds_first(counts: Array) -> Array:
    # A contiguous array for each kind makes all later operations about twice as fast.
    return np.ascontiguousarray(np.moveaxis(counts, -1, 0))


@lru_cache(maxsize=4096)
def _in_flight(schedule: PipelineSchedule, pp: int, vpp: int, micro_batches: int) -> Array:
    """Return the micro-batches in flight, by virtual stage of a rank, and rank."""
    config = ParallelismConfig(pp=pp, vpp=vpp, pp_schedule=schedule)
    return np.array([in_flight(config, rank, micro_batches) for rank in range(pp)], dtype=float).T


# A search asks for the same split for every combination of tp, cp, dp and batch.
@lru_cache(maxsize=4096)
def splits_of(layers: int, pp: int, vpp: int, *, uneven: bool = True, laid_out: bool = False) -> tuple[LayerSplit, ...]:
    """Return the splits with `vpp` virtual stages per rank. `uneven` adds splits with fewer layers on the end ranks.

    >>> [one.counts for one in splits_of(6, 4, 1)], splits_of(5, 2, 1, uneven=False)
    ([(1, 2, 2, 1)], ())
    >>> [one.first_rank_layers for one in splits_of(6, 2, 1)]
    [None, 1, 2, 4, 5]
    """
    even = split_layers(layers, pp, vpp, (None, None), laid_out=laid_out)
    found = [] if even is None else [LayerSplit(vpp, None, None, even)]
    for ends in ends_of(layers, pp, vpp) if uneven else ():
        counts = split_layers(layers, pp, vpp, ends, laid_out=laid_out)
        if counts not in {None, even}:
            found.append(LayerSplit(vpp, *ends, counts))
    return tuple(found)
