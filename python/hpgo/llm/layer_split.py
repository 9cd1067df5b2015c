"""Layer splits among the ranks of a pipeline, with counts and memory of all splits at once as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.llm.estimate import in_flight
from hpgo.llm.memory import STATE, PipelineRankLayers, gradients, stage_memory
from hpgo.llm.parallelism import ParallelismConfig, ends_of, split_layers
from hpgo.llm.pipeline_layout import layout_text, parse_layout

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
    layout: str | None = None
    """Pipeline layout with these layers. None if the split needs none."""

    @property
    def further_stage(self) -> int:
        """The stage with the layers for multi-token prediction."""
        further = () if self.layout is None else parse_layout(self.layout).further
        return next((at for at, count in enumerate(further) if count), len(self.counts) - 1)

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
    """Kind of every layer, and then of the layers for multi-token prediction."""
    schedule: PipelineSchedule = "1f1b"

    @classmethod
    def from_kinds(
        cls, kinds: tuple[Kind, ...], pp: int, vpp: Iterable[int], schedule: PipelineSchedule = "1f1b", *,
        uneven: bool = True, laid_out: bool = False, layouts: bool = False,
    ) -> LayerSplits:  # fmt: skip
        """Return the splits for each number of virtual stages in `vpp`.

        `uneven` adds splits with fewer layers on the end ranks. `laid_out` is explained at `stage_layers`. `layouts`
        adds the layouts of `further_layouts` for models with multi-token prediction.
        """
        further = sum(kind.further for kind in kinds)
        layers, vpp = len(kinds) - further, tuple(vpp)
        found = [one for each in vpp for one in splits_of(layers, pp, each, uneven=uneven, laid_out=laid_out)]
        if further and layouts and schedule == "1f1b":
            # Without a layout, the layers for multi-token prediction are on the last stage.
            known = {one.counts for one in found}
            found += [
                one
                for each in vpp
                for one in further_layouts(layers, pp, each, further)
                if one.further_stage < pp * each - 1 or one.counts not in known
            ]
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
        is_kind = np.array([[kind == one for one in self.different] for kind in self.kinds], dtype=float)
        layers = sum(not kind.further for kind in self.kinds)
        before = np.zeros((layers + 1, len(self.different)))
        before[1:] = np.cumsum(is_kind[:layers], axis=0)
        further = is_kind[layers:].sum(axis=0)
        vpp = max(one.vpp for one in self.found)
        found = np.zeros((len(self.found), vpp * self.pp, len(self.different) + 2))
        # Splits with fewer virtual stages than `vpp` leave the rest of their row at 0.
        for each in {one.vpp for one in self.found}:
            alike = [at for at, one in enumerate(self.found) if one.vpp == each]
            starts = np.zeros((len(alike), each * self.pp + 1), dtype=int)
            np.cumsum([self.found[at].counts for at in alike], axis=1, out=starts[:, 1:])
            found[alike, : each * self.pp, :-2] = np.diff(before[starts], axis=1)
            found[alike, [self.found[at].further_stage for at in alike], :-2] += further
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
    def _known(self) -> dict[tuple[int, int | None], tuple[Array, Array]]:
        return {}

    def in_flight(self, micro_batches: int, group_size: int | None = None) -> tuple[Array, Array]:
        """Return the micro-batches in flight when a rank has the most: summed over its stages, and over its layers.

        `group_size` micro-batches pass through a virtual stage before the turn of the next one; None means pp.
        """
        # More are never in flight. The cap lets all larger batches share one entry of the cache.
        micro_batches = min(micro_batches, 2 * (group_size or self.pp))
        key = micro_batches, group_size
        if key not in self._known:
            found = np.zeros(self._stages.shape[:3])
            for at, one in enumerate(self.found):
                found[at, : one.vpp] = _in_flight(self.schedule, self.pp, one.vpp, group_size, micro_batches)
            self._known[key] = (
                found.sum(axis=1),
                _kinds_first((self._stages * found[..., None]).sum(axis=1)),
            )
        return self._known[key]

    def rank_layers(self, micro_batches: int, group_size: int | None = None, *, recomputed: bool) -> PipelineRankLayers:
        """Return the layers of all GPUs, by split and rank, with all layers recomputed or none."""
        flying = self.in_flight(micro_batches, group_size)[1]
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
    def _states(self) -> dict[tuple[float, ...], Array]:
        # All micro-batch sizes share these bytes, and they take longer to compute than all other columns together.
        return {}

    def reduced_bytes(self, context: LayerContext, held: PipelineRankLayers) -> Array:
        """Return an upper bound on the bytes of gradients that other stages of a rank have reduced, by split and rank.

        It holds if each stage reduces its gradients before the next one makes any. The largest stage of a rank has at
        least as many as its stages on average.
        """
        vpps = np.array([[one.vpp] for one in self.found], dtype=float)
        found: Array = gradients(context, held) * (1 - 1 / vpps)
        return found

    def mean_reduced_bytes(self, context: LayerContext) -> float:
        """Return an upper bound on `reduced_bytes` of all splits, on average over the ranks."""
        return float(gradients(context, self._whole)) / self.pp * (1 - 1 / max(one.vpp for one in self.found))

    @cached_property
    def _whole(self) -> PipelineRankLayers:
        """All layers on one rank."""
        layers = {(kind, False): self.kinds.count(kind) for kind in self.different}
        return PipelineRankLayers(layers, {}, embedding=1, head=1)

    def mean_state_bytes(self, context: LayerContext) -> float:
        """Return the bytes of parameters, gradients and optimizer state of a rank, on average over the ranks.

        It is the same for all splits, or a little lower where several ranks gather the same weights.
        """
        degrees = _degrees(context)
        if degrees not in self._mean_states:
            self._mean_states[degrees] = sum(stage_memory(context, self._whole, STATE).values()) / self.pp
        return self._mean_states[degrees]

    @cached_property
    def _mean_states(self) -> dict[tuple[float, ...], float]:
        return {}


def _degrees(context: LayerContext) -> tuple[float, ...]:
    """Return what the bytes of parameters, gradients and optimizer state depend on, of all that a search varies."""
    config = context.config
    return (
        config.tp, config.cp, config.dp, config.ep, config.etp, config.zero_stage, config.dp_replicate,
        config.optimizer_offload_fraction, config.offload_params,
    )  # fmt: skip


def _kinds_first(counts: Array) -> Array:
    # A contiguous array for each kind makes all later operations about twice as fast.
    return np.ascontiguousarray(np.moveaxis(counts, -1, 0))


@lru_cache(maxsize=4096)
def _in_flight(schedule: PipelineSchedule, pp: int, vpp: int, group_size: int | None, micro_batches: int) -> Array:
    """Return the micro-batches in flight, by virtual stage of a rank, and rank."""
    config = ParallelismConfig(pp=pp, vpp=vpp, pp_schedule=schedule, micro_batch_group_size=group_size)
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


@lru_cache(maxsize=4096)
def further_layouts(layers: int, pp: int, vpp: int, further: int) -> tuple[LayerSplit, ...]:
    """Return layouts for models with multi-token prediction: its layers on the last stage or on the one before.

    The LM head and the prediction of further tokens take as long as some layers, so their stages have up to six fewer
    than the even share. The first stage has at most two fewer, or one more, since the first layers are often cheaper.
    The stages between are as equal as possible, and the later ones of them have one layer more.

    Megatron-LM runs the prediction on no first rank, and in the last virtual stage of a rank.

    >>> [one.layout for one in further_layouts(6, 3, 1, 1)][:2], len(further_layouts(61, 16, 2, 1))
    (['Et|t*3|t*2mL', 'Et*2|t*3|tmL'], 24)
    """
    stages = pp * vpp
    found = []
    # With two ranks and one stage each, the splits of `ends_of` have all layouts.
    for at in (stages - 1, stages - 2) if pp > 2 else (stages - 1,) if pp * vpp > pp > 1 else ():
        even, between = -(-layers // (at + 1)), at - 1
        for first, last in product(range(max(0, even - 2), even + 2), range(max(0, even - 6), even + 1)):
            rest = layers - first - last
            each, more = divmod(rest, between) if between else (0, rest)
            counts = (first, *(each,) * (between - more), *(each + 1,) * more, last, *(0,) * (stages - 1 - at))
            if (between or not rest) and min(counts) >= 0 and max(counts) <= even + 1:
                found.append(LayerSplit(vpp, None, None, counts, layout_text(counts, further, at)))
    return tuple(found)
