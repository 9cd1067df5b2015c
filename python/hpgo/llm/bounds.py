"""Lower bounds for groups of configurations: their step times, and the memory of their fullest GPUs.

The bounds are the terms and columns of a single configuration, evaluated on arrays of all layer splits and ranks. They
leave out what is never negative: gradient reduction and optimizer step after the last pass, and columns of memory that
is allocated only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.llm.layer_time import StagePasses
from hpgo.llm.memory import MOVING, SAVED, UNCAST, stage_memory
from hpgo.llm.parallelism import changed
from hpgo.llm.step_time import passes_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.layer_split import Array, LayerSplits, Whole
    from hpgo.llm.step_time import LayerCosts

SLACK = 1e-9
"""Relative rounding error of sums in another order. Bounds are lower by this much, so rounding never makes them wrong.
Not tuned: errors of 1e-15 occur, and estimates are compared to 1e-12."""


class Candidate(NamedTuple):
    """A configuration that the search may have to estimate."""

    bound_s: float
    split: int
    """Index of its layer split in the group."""
    zero: int
    """Index of its ZeRO stage in the group."""
    recomputed: int
    """Lower bound on the recomputed layers of each stage; or `NONE` or `ALL`."""


NONE, ALL = 0, -1


@dataclass(frozen=True)
class GroupBounds:
    """Bounds of all configurations that share a shape, a batch and degrees; they differ in splits and ZeRO stages."""

    costs: LayerCosts
    splits: LayerSplits
    micro_batches: int
    edge_s: float
    """Seconds of a transfer between pipeline ranks."""
    contexts: Callable[[], list[LayerContext]]
    """Function that returns a context for each ZeRO stage. It is called late, since most groups are dropped by time."""
    group_size: int | None = None
    """Micro-batches that pass through a virtual stage before the turn of the next one; None means pp."""

    @cached_property
    def _passes(self) -> tuple[StagePasses, StagePasses]:
        """Passes of each rank's first stage and of all its stages, by recomputation of all layers, split and rank."""
        # One matrix multiplication evaluates all splits: times per layer kind, times the number of such layers.
        first, ranks = (
            (self.costs.passes.T @ counts.reshape(len(counts), -1)).reshape(2, 3, *counts.shape[1:]).swapaxes(0, 1)
            for counts in (self.splits.first, self.splits.layers)
        )
        return StagePasses(*first), StagePasses(*ranks)

    @cached_property
    def steps_s(self) -> Array:
        """Lower bounds on the step time, by recomputation of all layers and split."""
        return self._lower_bounds_s(*self._passes)

    def _lower_bounds_s(self, first: StagePasses, ranks: StagePasses) -> Array:
        splits_backward = self.splits.schedule != "1f1b"
        found: Array = passes_s(first, ranks, self.micro_batches, self.edge_s, splits=splits_backward)
        return found * (1 - 2 * SLACK)

    @cached_property
    def _ranks_bytes(self) -> Array:
        """Lower bounds on memory, by ZeRO stage, recomputation of all layers, split and rank."""
        held = [
            self.splits.rank_layers(self.micro_batches, self.group_size, recomputed=again) for again in (False, True)
        ]
        # Only `STATE` depends on the ZeRO stage and only `MOVING` on recomputation, so each is computed once and added.
        moving = [sum(stage_memory(self.costs.context, one, MOVING).values()) for one in held]
        states = []
        for context in self.contexts():
            state = self.splits.state_bytes(context, held[0])
            # The context has one split's number of virtual stages, which may be 1.
            several = changed(context.config, vpp=2, micro_batch_group_size=self.group_size)
            if several.reduces_by_stage(self.micro_batches):
                state = state - self.splits.reduced_bytes(context, held[0])
            states.append(state)
        return np.array([[kept + state for kept in moving] for state in states]) * (1 - SLACK)

    @cached_property
    def fullest_bytes(self) -> Array:
        """Lower bounds on the memory of the fullest GPU, by split, ZeRO stage and recomputation of all layers."""
        found: Array = self._ranks_bytes.max(axis=-1)
        return found.transpose(2, 0, 1)

    def candidates(self, limit_bytes: float, recomputed: Iterable[bool], *, some: bool) -> list[Candidate]:
        """Return the configurations that may fit, the lowest bound first. `some` allows partial recomputation."""
        # Consider partial recomputation only where a configuration without recomputation does not fit and one with full
        # recomputation does: it is slower than the former and needs no less memory than the latter.
        fits = self.fullest_bytes <= limit_bytes
        found: list[tuple[Array, Whole, Whole, Whole]] = []
        for again in recomputed:
            at, zero = np.nonzero(fits[:, :, int(again)])
            found.append((self.steps_s[int(again), at], at, zero, np.full(len(at), ALL if again else NONE)))
        if some and (short := ~fits[:, :, 0] & fits[:, :, 1]).any():
            found.append(self._some(limit_bytes, *np.nonzero(short)))
        steps_s, *others = map(np.concatenate, zip(*found, strict=True))
        # A stable sort keeps equal bounds in the order of the search space, so results do not depend on the sort.
        order = np.argsort(steps_s, kind="stable")
        return list(map(Candidate, steps_s[order].tolist(), *(other[order].tolist() for other in others)))

    def _some(self, limit_bytes: float, at: Whole, zero: Whole) -> tuple[Array, Whole, Whole, Whole]:
        """Return bounds of configurations that fit if some layers are recomputed, and how many layers at least."""
        splits, context, kinds = self.splits, self.costs.context, self.splits.different
        has, maximum = splits.layers[:-2, at] > 0, splits.maximum[at]
        # One more recomputed layer in each stage spares a rank at most this many bytes, ...
        spared = [context.once(SAVED[False], kind) - context.once(SAVED[True], kind) for kind in kinds]
        each = (
            np.where(has, np.reshape(spared, (-1, 1, 1)), 0.0).max(axis=0)
            * splits.in_flight(self.micro_batches, self.group_size)[0][at]
        )
        again_bytes = has.any(axis=0) * min(context.once(UNCAST, kind) for kind in kinds)
        short = self._ranks_bytes[zero, 0, at] + again_bytes - limit_bytes
        # Dividing by 1e-9 bytes instead of 0 asks for more layers than there are, so `few` drops the split below.
        layers = np.where(short > 0, short / np.maximum(each, 1e-9), 0.0).max(axis=1)
        layers = np.maximum(np.ceil(layers * (1 - SLACK)), 1.0)
        few = layers < maximum
        at, zero, has, maximum, layers = at[few], zero[few], has[:, few], maximum[few], layers[few]
        # ... and adds at least this share of the seconds that recomputation of all layers adds.
        none_s, all_s = self.costs.passes[:-2].reshape(-1, 2, 3)[:, :, :2].sum(axis=2).T
        share = (layers / maximum)[:, None] * np.where(has, np.reshape(all_s - none_s, (-1, 1, 1)), np.inf).min(axis=0)
        share[~has.any(axis=0)] = 0.0
        # Layers for multi-token prediction are recomputed only if all layers are.
        counted = [place for place, kind in enumerate(kinds) if not kind.further]
        first, ranks = (
            passes._replace(
                forward_s=passes.forward_s[0, at],
                backward_s=passes.backward_s[0, at] + share * counts[counted][:, at].sum(axis=0),
            )
            for passes, counts in zip(self._passes, (splits.first, splits.layers), strict=True)
        )
        return self._lower_bounds_s(first, ranks), at, zero, layers.astype(int)
