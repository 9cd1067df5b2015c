"""Bounds for all ways of a family at once: what they take, and what their fullest GPU holds, no less.

Layers of one kind take and hold as much each, so that those of all ranks of all cuts are products of matrices: how many
there are of each kind, times what one has. Nothing here knows a term or a column: what one layer has is asked of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpgo.ways.memory import COLUMNS, LATER, STATE, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.model.transformer import Kind
    from hpgo.planning.way_cuts import Array, Cuts, Whole
    from hpgo.ways.site import Site
    from hpgo.ways.steps import Rows
    from hpgo.ways.times import Times

SLACK = 1e-9
"""Sums in another order may differ by so much."""


class Candidate(NamedTuple):
    """A way that may be worth a look."""

    bound_s: float
    cut: int
    """Which of the family's."""
    zero: int
    anew: int
    """Layers of each stage that are computed anew, and perhaps more; or `NONE` or `ALL`."""


NONE, ALL = 0, -1


def _bytes(names: Iterable[str], site: Site, part: Part) -> float:
    return sum(COLUMNS[name](site, part) for name in names)


def _halves(times: Times) -> tuple[float, float, float]:
    return times.total_forward_s, times.total_backward_s - times.weights_s, times.weights_s


def _part(kind: Kind | None = None, *, embedding: bool = False, head: bool = False, flying: int = 0, anew: bool = False
) -> Part:  # fmt: skip
    layers = () if kind is None else (kind,)
    return Part(layers, embedding, head, (flying,) * len(layers), (anew,) * len(layers))


@dataclass(frozen=True)
class Lines:
    """A shape's layers in numbers: rows are kinds, columns whether none of them is computed anew, or all."""

    rows: Rows

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """In the order that they appear in."""
        return tuple(dict.fromkeys(self.rows.kinds))

    @cached_property
    def seconds(self) -> Array:
        """Of a micro-batch in a layer."""
        return np.array([[self.rows.layer[kind, anew].total_s for anew in (False, True)] for kind in self.kinds])

    @cached_property
    def halves_s(self) -> Array:
        """Of a micro-batch in a layer, nothing computed anew: forward, and gradients of inputs and of weights."""
        return np.array([_halves(self.rows.layer[kind, False]) for kind in self.kinds])

    @cached_property
    def kept_bytes(self) -> Array:
        """That a layer keeps of a micro-batch in flight."""
        return np.array(
            [
                [self._moving(_part(kind, flying=1, anew=anew)) - self._moving(_part(kind, anew=anew))
                for anew in (False, True)] for kind in self.kinds
            ]
        )  # fmt: skip

    @cached_property
    def again_bytes(self) -> float:
        """Of the layer that is computed anew just now, the least."""
        return min(self._moving(_part(kind, anew=True)) for kind in self.kinds) - self.always_bytes

    @cached_property
    def always_bytes(self) -> float:
        """That each GPU has."""
        return self._moving(_part())

    @cached_property
    def head_bytes(self) -> float:
        """Of the head, beside its parameters."""
        return self._moving(_part(head=True)) - self.always_bytes

    def _moving(self, part: Part) -> float:
        return _bytes((name for name in COLUMNS if name not in (*STATE, *LATER)), self.rows.site, part)


class States(NamedTuple):
    """Bytes of parameters, their gradients and their optimizer."""

    layers: Array
    """Of one layer of each kind."""
    embedding: float
    head: float

    @classmethod
    def of(cls, site: Site, kinds: tuple[Kind, ...]) -> States:
        """Those of a site under a pipeline, where they are as many times as much for as many layers."""

        def held(part: Part) -> float:
            return _bytes(STATE, site, part)

        return cls(np.array([held(_part(kind)) for kind in kinds]), held(_part(embedding=True)), held(_part(head=True)))


@dataclass(frozen=True)
class Bounds:
    """Of all ways of a pipeline that have a shape, a batch and replicas in common. Axes: cut, rank, ZeRO stage."""

    lines: Lines
    cuts: Cuts
    micro_batches: int
    edge_s: float
    """Between stages."""
    states: tuple[States, ...]
    """By ZeRO stage."""

    @cached_property
    def _first_s(self) -> Array:
        """By cut, rank and whether all is computed anew: a micro-batch in the rank's first stage, there and back."""
        cuts = self.cuts
        found: Array = cuts.first @ self.lines.seconds + 2 * self.edge_s
        found[:, 0] += self.lines.rows.embedding.total_s
        return found

    @cached_property
    def _ranks_s(self) -> Array:
        """By cut, rank and whether all is computed anew: a micro-batch in all stages of the rank."""
        found: Array = self.cuts.layers @ self.lines.seconds
        found[:, 0] += self.lines.rows.embedding.total_s
        found[:, self._last] += self.lines.rows.head.total_s
        return found

    @property
    def _last(self) -> int:
        """The rank with the last stage."""
        return 0 if self.cuts.folded else -1

    def _split_s(self) -> Array:
        """By cut, as `Stages.passes_s` where backward passes are split; nothing is computed anew then."""
        cuts, one = self.cuts, self.lines.rows
        first_s, ranks_s = cuts.first @ self.lines.halves_s, cuts.layers @ self.lines.halves_s
        for found in (first_s, ranks_s):
            found[:, 0] += _halves(one.embedding)
        ranks_s[:, self._last] += _halves(one.head)
        path_s = first_s[:, :, :2] + self.edge_s
        before_s = np.cumsum(path_s, axis=1) - path_s
        there_s, back_s = before_s[:, :, 0], before_s[:, :, 1]
        ended_s = there_s + self.micro_batches * ranks_s[:, :, :2].sum(axis=2) + back_s + first_s[:, :1, 2]
        found = np.maximum(ended_s, there_s + self.micro_batches * ranks_s.sum(axis=2))
        least: Array = found.max(axis=1) * (1 - 2 * SLACK)
        return least

    def _passes_s(self, first_s: Array, ranks_s: Array) -> Array:
        """As `Stages.passes_s`: a rank waits for the first micro-batch, computes all, and those before it end it."""
        before_s = np.cumsum(first_s, axis=1) - first_s
        found: Array = (before_s + self.micro_batches * ranks_s).max(axis=1) * (1 - 2 * SLACK)
        return found

    @cached_property
    def steps_s(self) -> Array:
        """By cut and whether all is computed anew: no step takes less."""
        if self.cuts.schedule != "1f1b":
            return self._split_s()[:, None]
        return self._passes_s(self._first_s, self._ranks_s)

    @cached_property
    def _again_bytes(self) -> Array:
        """By cut and rank, if some of its layers are computed anew."""
        found: Array = np.where(self.cuts.layers.any(axis=2), self.lines.again_bytes, 0.0)
        return found

    @cached_property
    def _ranks_bytes(self) -> Array:
        """By cut, rank, ZeRO stage and whether all is computed anew."""
        lines, cuts = self.lines, self.cuts
        kept = cuts.flying(self.micro_batches)[1] @ lines.kept_bytes + lines.always_bytes
        kept[:, :, 1] += self._again_bytes
        kept[:, self._last] += lines.head_bytes
        state = cuts.layers @ np.stack([one.layers for one in self.states], axis=1)
        state[:, 0] += [one.embedding for one in self.states]
        state[:, self._last] += [one.head for one in self.states]
        found: Array = (kept[:, :, None] + state[..., None]) * (1 - SLACK)
        return found

    @cached_property
    def fullest_bytes(self) -> Array:
        """By cut, ZeRO stage and whether all is computed anew: the fullest GPU holds no less."""
        found: Array = self._ranks_bytes.max(axis=1)
        return found

    def candidates(self, room_bytes: float, anew: Iterable[bool], *, some: bool) -> list[Candidate]:
        """Ways that may fit in so much, the least bound first; `some` says whether some layers may be computed anew."""
        fits = self.fullest_bytes <= room_bytes
        found: list[tuple[Array, Whole, Whole, Whole]] = []
        for whether in anew:
            at, zero = np.nonzero(fits[:, :, int(whether)])
            found.append((self.steps_s[at, int(whether)], at, zero, np.full(len(at), ALL if whether else NONE)))
        if some and (short := ~fits[:, :, 0] & fits[:, :, 1]).any():
            at, zero = np.nonzero(short)
            found.append(self._some(room_bytes, at, zero))
        steps_s, *others = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(steps_s, kind="stable")
        return list(map(Candidate, steps_s[order].tolist(), *(other[order].tolist() for other in others)))

    def _some(self, room_bytes: float, at: Whole, zero: Whole) -> tuple[Array, Whole, Whole, Whole]:
        """Ways that fit with some layers computed anew: bounds of steps, and how many layers of each stage at least."""
        lines, cuts = self.lines, self.cuts
        has, most = cuts.layers[at] > 0, cuts.most[at]
        # A layer more of each stage spares no rank more than this, ...
        spared = np.where(has, lines.kept_bytes[:, 0] - lines.kept_bytes[:, 1], 0.0).max(axis=2)
        spared *= cuts.flying(self.micro_batches)[0][at]
        short = self._ranks_bytes[at, :, zero, 0] + self._again_bytes[at] - room_bytes
        layers = np.where(short > 0, short / np.maximum(spared, 1e-9), 0.0).max(axis=1)
        layers = np.maximum(np.ceil(layers * (1 - SLACK)), 1.0)
        few = layers < most
        at, zero, has, most, layers = at[few], zero[few], has[few], most[few], layers[few]
        # ... and takes no less than this of the time that all of them would.
        share = (layers / most)[:, None] * np.where(has, lines.seconds[:, 1] - lines.seconds[:, 0], np.inf).min(axis=2)
        share[~has.any(axis=2)] = 0.0
        # Those for further tokens are computed anew with all, or not at all.
        counted = np.array([not kind.further for kind in lines.kinds])
        first_s = self._first_s[at, :, 0] + share * cuts.first[at][:, :, counted].sum(axis=2)
        ranks_s = self._ranks_s[at, :, 0] + share * cuts.layers[at][:, :, counted].sum(axis=2)
        return self._passes_s(first_s, ranks_s), at, zero, layers.astype(int)
