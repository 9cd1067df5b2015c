"""GroupBounds for all ways of a family at once: what they take, and what their fullest GPU holds, no less.

They are what one way takes and holds, by the same terms and columns, on arrays of all cuts and ranks. What is left out
is never negative: sums and updates behind the last pass, and columns of memory that outgrow others there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.llm.layer_time import PassTimes
from hpgo.llm.memory import CAST_BACK, COLUMNS, LATER, SAVED, STATE, ranks_bytes
from hpgo.llm.step_time import passes_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.layer_split import Array, LayerSplits, Whole
    from hpgo.llm.step_time import LayerCosts

SLACK = 1e-9
"""Sums in another order may differ by so much."""


class Candidate(NamedTuple):
    """A way that may be worth a look."""

    bound_s: float
    cut: int
    """Which of the family's."""
    zero: int
    recomputed: int
    """Layers of each stage that are computed anew, and perhaps more; or `NONE` or `ALL`."""


NONE, ALL = 0, -1
MOVING = tuple(name for name in COLUMNS if name not in (*STATE, *LATER))
"""Columns that all ways of a shape have in common."""


@dataclass(frozen=True)
class GroupBounds:
    """Of all ways that have a shape, a batch and replicas in common."""

    rows: LayerCosts
    cuts: LayerSplits
    micro_batches: int
    edge_s: float
    """Between stages."""
    sites: tuple[LayerContext, ...]
    """By ZeRO stage, of some cut."""

    @property
    def _splits(self) -> bool:
        return self.cuts.schedule != "1f1b"

    def _seconds(self, layers: Array) -> PassTimes:
        """By whether all is computed anew, cut and rank: a micro-batch in so many layers, embeddings and heads."""
        found = (layers @ self.rows.seconds).reshape(*layers.shape[:2], 2, 3)
        return PassTimes(*found.transpose(3, 2, 0, 1))

    @cached_property
    def _passes(self) -> tuple[PassTimes, PassTimes]:
        return self._seconds(self.cuts.first), self._seconds(self.cuts.layers)

    @cached_property
    def steps_s(self) -> Array:
        """By whether all is computed anew, and cut: no step takes less."""
        return self._least_s(*self._passes)

    def _least_s(self, first: PassTimes, ranks: PassTimes) -> Array:
        found: Array = passes_s(first, ranks, self.micro_batches, self.edge_s, splits=self._splits)
        return found * (1 - 2 * SLACK)

    @cached_property
    def _ranks_bytes(self) -> Array:
        """By ZeRO stage, whether all is computed anew, cut and rank."""
        none, every = (self.cuts.part(self.micro_batches, recomputed=recomputed) for recomputed in (False, True))
        moving = [ranks_bytes(MOVING, self.rows.context, part) for part in (none, every)]
        state = [self.cuts.once(context, lambda context: ranks_bytes(STATE, context, none)) for context in self.sites]
        return np.array([[kept + held for kept in moving] for held in state]) * (1 - SLACK)

    @cached_property
    def max_memory_bytes(self) -> Array:
        """By cut, ZeRO stage and whether all is computed anew: the fullest GPU holds no less."""
        found: Array = self._ranks_bytes.max(axis=-1)
        return found.transpose(2, 0, 1)

    def candidates(self, room_bytes: float, recomputed: Iterable[bool], *, some: bool) -> list[Candidate]:
        """Ways that may fit in so much, the least bound first; `some` says whether some layers may be computed anew."""
        fits = self.max_memory_bytes <= room_bytes
        found: list[tuple[Array, Whole, Whole, Whole]] = []
        for whether in recomputed:
            at, zero = np.nonzero(fits[:, :, int(whether)])
            found.append((self.steps_s[int(whether), at], at, zero, np.full(len(at), ALL if whether else NONE)))
        if some and (short := ~fits[:, :, 0] & fits[:, :, 1]).any():
            at, zero = np.nonzero(short)
            found.append(self._some(room_bytes, at, zero))
        steps_s, *others = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(steps_s, kind="stable")
        return list(map(Candidate, steps_s[order].tolist(), *(other[order].tolist() for other in others)))

    def _some(self, room_bytes: float, at: Whole, zero: Whole) -> tuple[Array, Whole, Whole, Whole]:
        """Ways that fit with some layers computed anew: bounds of steps, and how many layers of each stage at least."""
        cuts, context, kinds = self.cuts, self.rows.context, self.cuts.different
        has, most = cuts.layers[at, :, :-2] > 0, cuts.most[at]
        # A layer more of each stage spares no rank more than this, ...
        spared = np.where(
            has, [context.once(SAVED[False], kind) - context.once(SAVED[True], kind) for kind in kinds], 0.0
        )
        again = has.any(axis=2) * min(context.once(CAST_BACK, kind) for kind in kinds)
        short = self._ranks_bytes[zero, 0, at] + again - room_bytes
        each = np.maximum(spared.max(axis=2) * cuts.flying(self.micro_batches)[0][at], 1e-9)
        layers = np.where(short > 0, short / each, 0.0).max(axis=1)
        layers = np.maximum(np.ceil(layers * (1 - SLACK)), 1.0)
        few = layers < most
        at, zero, has, most, layers = at[few], zero[few], has[few], most[few], layers[few]
        # ... and takes no less than this of the time that all of them would.
        none_s, all_s = self.rows.seconds[:-2].reshape(-1, 2, 3)[:, :, :2].sum(axis=2).T
        share = (layers / most)[:, None] * np.where(has, all_s - none_s, np.inf).min(axis=2)
        share[~has.any(axis=2)] = 0.0
        # Those for further tokens are computed anew with all, or not at all.
        counted = [place for place, kind in enumerate(kinds) if not kind.further]
        first, ranks = (
            PassTimes(
                seconds.forward_s[0, at],
                seconds.backward_s[0, at] + share * held[at][:, :, counted].sum(axis=2),
                seconds.weight_grad_s[0, at],
            )
            for seconds, held in zip(self._passes, (cuts.first, cuts.layers), strict=True)
        )
        return self._least_s(first, ranks), at, zero, layers.astype(int)
