"""The ways of a grid, in families: those that part the model's matrices, the sequences and the batch alike.

A family knows a bound that holds for all of its ways, and bounds for each of them that cost little (`way_bounds`), so
that few are looked at one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heapify, heappop
from itertools import product
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.planning.configured import fullest_bytes
from hpgo.planning.way_bounds import ALL, NONE, SLACK, Bounds, Candidate
from hpgo.planning.way_cuts import Cuts
from hpgo.ways.steps import Rows, Stages, kinds_of, transfer
from hpgo.ways.way import MOST_ZERO, check_degrees

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.ways.site import Site
    from hpgo.ways.space import Space
    from hpgo.ways.way import Passes, Way


@dataclass(frozen=True)
class Family:
    """Ways that differ in how layers lie on ranks, in what replicas share, and in what is computed anew."""

    rows: Rows
    pipeline: int
    data: int
    micro_batches: int
    cuts: Cuts
    zeros: tuple[int, ...]
    recomputed: tuple[bool, ...]
    """Whether all layers are computed anew or none, or either."""
    some: bool
    """Whether it may be some of each stage."""

    @cached_property
    def bound_s(self) -> float:
        """None has a lower bound: some rank has at least its share of all that there is to compute."""
        all_s = self.rows.model_s[all(self.recomputed)]
        return self.micro_batches * all_s / self.pipeline * (1 - 3 * SLACK)

    @cached_property
    def least_s(self) -> float:
        """Nor lower than this, which costs a little more to know."""
        return self.bound_s if self.pipeline == 1 else float(self._bounds.steps_s.min())

    @property
    def common(self) -> Way:
        """What all of them have at least, as a way that nobody runs."""
        shape, passes = self.rows.site.way, self.cuts.schedule
        return shape if passes == "1f1b" else replace(shape, pipeline=self.pipeline, chunks=2, schedule=passes)

    @property
    def count(self) -> int:
        """How many they are."""
        cuts = self.cuts
        return len(self.zeros) * (len(cuts.found) * len(self.recomputed) + (cuts.some if self.some else 0))

    def candidates(self, room_bytes: float) -> list[Candidate]:
        """Ways that may fit in so much, the least bound first."""
        return self._bounds.candidates(room_bytes, self.recomputed, some=self.some)

    def leanest(self) -> list[tuple[float, Candidate]]:
        """Ways with nothing computed anew, or everything, and what their fullest GPU holds at least."""
        held = self._bounds.fullest_bytes
        return sorted(
            (float(held[cut, zero, int(anew)]), Candidate(0.0, cut, zero, ALL if anew else NONE))
            for cut, zero, anew in product(range(len(held)), range(len(self.zeros)), self.recomputed)
        )

    def stages(self, one: Candidate) -> Stages:
        """A way, none of whose layers are computed anew if it is not all."""
        cut = self.cuts.found[one.cut]
        way = replace(
            self._way(cut.chunks, self.zeros[one.zero]),
            first_layers=cut.first_layers,
            last_layers=cut.last_layers,
            recompute="full" if one.anew == ALL else "none",
        )
        return Stages(replace(self.rows.site, way=way), self.micro_batches, self.rows)

    def _way(self, chunks: int, zero: int) -> Way:
        return replace(
            self.rows.site.way, pipeline=self.pipeline, chunks=chunks, schedule=self.cuts.schedule,
            data=self.data, zero=zero, recompute="none",
        )  # fmt: skip

    @cached_property
    def _bounds(self) -> Bounds:
        site, chunks = self.rows.site, self.cuts.found[0].chunks
        edge_s = sum(transfer(site, data=self.data)) if self.pipeline > 1 else 0.0
        sites = tuple(replace(site, way=self._way(chunks, zero)) for zero in self.zeros)
        return Bounds(self.rows, self.cuts, self.micro_batches, edge_s, sites)


def families(site: Site, global_batch_size: int, space: Space) -> Iterator[Family]:
    """The grid that `hpgo.choose_way` describes, for the model, the GPUs and the precision of a site."""
    model, gpus, rules, takes = site.model, site.gpus, space.rules, space.takes
    contexts = [1 << power for power in range(gpus.count.bit_length())]
    # Attention as one kernel keeps no scores, so that there is nothing selective about it.
    recomputed = [kind == "full" for kind in ("none", "full") if kind in rules.recompute and takes("recompute", kind)]
    some = rules.recompute_layers and len(recomputed) > 1
    # Models with experts have stages that are laid out one by one.
    cuts_of = partial(Cuts.of, kinds_of(model), uneven=rules.uneven, laid_out=bool(model.experts))
    known_cuts: dict[tuple[int, Passes, tuple[int, ...]], Cuts] = {}
    for tensor, context in product(divisors(gpus.machine), contexts):
        if not (takes("tp", tensor) and takes("cp", context)):
            continue
        shape = replace(site.way, tensor=tensor, sequence=tensor > 1, context=context)
        if gpus.count % shape.group or not _divides(shape, site):
            continue
        rows: dict[tuple[int, int, bool, bool], Rows] = {}
        without: dict[tuple[int, bool, bool], Rows] = {}
        for pipeline in divisors(gpus.count // shape.group):
            data = gpus.count // shape.group // pipeline
            if global_batch_size % data or not (takes("pp", pipeline) and takes("dp", data)):
                continue
            if pipeline > 1 and model.tied and not rules.ties_piped:
                continue
            most_chunks = (model.layers + 2) // pipeline if pipeline > 1 else 1
            chunks = [count for count in range(1, most_chunks + 1) if takes("vpp", count)]
            experts = [each for each in divisors(model.experts or 1) if gpus.count // pipeline % each == 0]
            sizes = [size for size in divisors(global_batch_size // data) if takes("micro_batch_size", size)]
            runs = [name for name in rules.schedules if takes("schedule", name) and (pipeline > 1 or name == "1f1b")]
            for expert, schedule in product([each for each in experts if takes("ep", each)], runs):
                splits = schedule != "1f1b"
                chunked = 2 if splits else 1
                placed = rules.as_run(
                    replace(shape, expert=expert, pipeline=pipeline, data=data, chunks=chunked, schedule=schedule)
                )
                # No launcher computes layers anew once beside split backward passes.
                again = [anew for anew in recomputed if not (anew and splits)]
                for size in sizes:
                    micro_batches = global_batch_size // data // size
                    fitting = tuple(_fitting(chunks, schedule, whole_rounds=micro_batches % pipeline == 0))
                    if (pipeline, schedule, fitting) not in known_cuts:
                        known_cuts[pipeline, schedule, fitting] = cuts_of(pipeline, fitting, schedule)
                    found = known_cuts[pipeline, schedule, fitting]
                    if not (found.found and again):
                        continue
                    known = rules.zeros_of(placed, micro_batches=micro_batches, experts=bool(model.experts))
                    zeros = [zero for zero in known if takes("zero", zero)]
                    part = partial(Family, pipeline=pipeline, data=data, micro_batches=micro_batches, cuts=found)
                    if alike := tuple(zero for zero in zeros if zero < MOST_ZERO):
                        same = expert, size, placed.overlap, placed.fused
                        if same not in rows:
                            way = replace(
                                shape, expert=expert, micro_batch_size=size, overlap=placed.overlap, fused=placed.fused
                            )
                            rows[same] = Rows.of(replace(site, way=way), without.get(same[1:]))
                            without.setdefault(same[1:], rows[same])
                        yield part(rows[same], zeros=alike, recomputed=tuple(again), some=some and not splits)
                    # Where weights are gathered, a layer takes longer, and how much depends on more.
                    for anew in again if MOST_ZERO in zeros else ():
                        way = replace(
                            placed, micro_batch_size=size, zero=MOST_ZERO, recompute="full" if anew else "none"
                        )
                        own = Rows.of(replace(site, way=way))
                        yield part(own, zeros=(MOST_ZERO,), recomputed=(anew,), some=False)


def _fitting(chunks: Iterable[int], schedule: Passes, *, whole_rounds: bool) -> Iterator[int]:
    """How many stages a rank may have of `chunks`, where micro-batches make whole rounds of as many as ranks or not."""
    for count in chunks:
        if schedule == "zb_v":
            fits = count == 2
        elif schedule == "interleaved_zb":
            fits = count > 1 and whole_rounds
        else:
            fits = count == 1 or whole_rounds
        if fits:
            yield count


def leanest(found: Iterable[Family]) -> Stages | None:
    """The way whose fullest GPU holds least; None where there is none."""
    waiting = [(family.leanest()[0][0], at, family) for at, family in enumerate(found)]
    heapify(waiting)
    best: tuple[float, Stages] | None = None
    while waiting:
        least_bytes, _, family = heappop(waiting)
        if best is not None and least_bytes >= best[0]:
            break
        for held_bytes, one in family.leanest():
            if best is not None and held_bytes >= best[0]:
                break
            stages = family.stages(one)
            needed = fullest_bytes(stages)
            if best is None or needed < best[0]:
                best = needed, stages
    return None if best is None else best[1]


def fewest_anew(none: Stages, room_bytes: float, least: int) -> Stages | None:
    """The way with as few layers of each stage computed anew as fit, from `least` on; None if it takes all, or more."""
    site = none.site
    assert site.way.zero < MOST_ZERO, "its rows would be others"  # noqa: S101
    # One by one: the largest of those that are computed anew has room of its own, so that one more may need more.
    for layers in range(least, max(none.counts)):
        way = replace(site.way, recompute="full", recompute_layers=layers)
        stages = Stages(replace(site, way=way), none.micro_batches, none.rows)
        if fullest_bytes(stages) <= room_bytes:
            return stages
    return None


def _divides(way: Way, site: Site) -> bool:
    try:
        check_degrees(site.model, way, seq=site.seq)
    except ArgumentError:
        return False
    return True
