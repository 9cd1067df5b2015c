"""The ways of a grid, in families: those that part the model's matrices, the sequences and the batch alike.

Within a family, cuts of the layers are grouped by how many the fullest rank has. A family and a group know a bound that
holds for all of their ways, so that most are never looked at one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from heapq import heappop, heappush
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.planning.configured import fullest_bytes
from hpgo.ways.memory import Part, stage_memory
from hpgo.ways.steps import Rows, Stages
from hpgo.ways.way import MOST_ZERO, check_degrees, cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.ways.site import Site
    from hpgo.ways.space import Space
    from hpgo.ways.way import Way

SLACK = 1e-9
"""Sums in another order may differ by so much."""


class Cut(NamedTuple):
    """How the layers lie on ranks and their stages."""

    chunks: int
    first_layers: int | None
    last_layers: int | None
    most: int
    """Layers of the stage that has most."""


@dataclass(frozen=True)
class Family:
    """Ways that differ in how layers lie on ranks, in what replicas share, and in what is computed anew."""

    rows: Rows
    pipeline: int
    data: int
    micro_batches: int
    cuts: dict[int, tuple[Cut, ...]]
    """By layers of the rank that has most."""
    zeros: tuple[int, ...]
    recomputed: tuple[bool, ...]
    """Whether all layers are computed anew or none, or either."""
    some: bool
    """Whether it may be some of each stage."""

    @cached_property
    def bound_s(self) -> float:
        """None has a lower bound: some rank has at least its share of all that there is to compute."""
        return self.micro_batches * self.rows.kept_s / self.pipeline * (1 - SLACK)

    @cached_property
    def count(self) -> int:
        """How many they are."""
        found = [cut for group in self.cuts.values() for cut in group]
        between = sum(cut.most - 1 for cut in found if cut.most > 1) if self.some else 0
        return len(self.zeros) * (len(found) * len(self.recomputed) + between)

    def groups(self) -> Iterator[Group]:
        """Those whose fullest rank has as many layers, the fewest first, with nothing computed anew or everything."""
        for (most, cuts), anew in product(self.cuts.items(), self.recomputed):
            yield Group(self, most, cuts, anew)


@dataclass(frozen=True)
class Group:
    """Ways of a family whose fullest rank has as many layers."""

    family: Family
    most: int
    cuts: tuple[Cut, ...]
    anew: bool
    """Whether all layers are computed anew, or none."""

    @cached_property
    def bound_s(self) -> float:
        """None has a lower bound, nor if some of its layers were computed anew."""
        rows, one = self.family.rows, self.family
        all_s = rows.anew_s if self.anew else rows.kept_s
        layers_s = self.most * rows.least_layer_s(anew=self.anew)
        return one.micro_batches * max(all_s / one.pipeline, layers_s) * (1 - SLACK)

    @cached_property
    def least_bytes(self) -> float:
        """A GPU of the fullest rank holds no less: that of equal layers, all computed anew or none."""
        rows, alone = self.family.rows, self.family.pipeline == 1
        sites = [replace(rows.site, way=self._way(self.cuts[0], zero)) for zero in self.family.zeros]
        parts = [
            Part((kind,) * self.most, alone, alone, (1,) * self.most, (anew,) * self.most) for kind, anew in rows.layer
        ]
        return min(sum(stage_memory(site, part).values()) for site, part in product(sites, parts)) * (1 - SLACK)

    def ways(self) -> Iterator[Stages]:
        """Each, with nothing or everything computed anew."""
        for one, zero in product(self.cuts, self.family.zeros):
            site = replace(self.family.rows.site, way=self._way(one, zero))
            yield Stages(site, self.family.micro_batches, self.family.rows)

    def _way(self, one: Cut, zero: int) -> Way:
        return replace(
            self.family.rows.site.way,
            pipeline=self.family.pipeline,
            chunks=one.chunks,
            first_layers=one.first_layers,
            last_layers=one.last_layers,
            data=self.family.data,
            zero=zero,
            recompute="full" if self.anew else "none",
        )


def families(site: Site, global_batch_size: int, space: Space) -> Iterator[Family]:
    """The grid that `hpgo.choose_way` describes, for the model, the GPUs and the precision of a site."""
    model, gpus, rules, takes = site.model, site.gpus, space.rules, space.takes
    contexts = [1 << power for power in range(gpus.count.bit_length())]
    # Attention as one kernel keeps no scores, so that there is nothing selective about it.
    recomputed = [kind == "full" for kind in ("none", "full") if kind in rules.recompute and takes("recompute", kind)]
    some = rules.recompute_layers and len(recomputed) > 1
    for tensor, context in product(divisors(gpus.machine), contexts):
        if not (takes("tp", tensor) and takes("cp", context)):
            continue
        shape = replace(site.way, tensor=tensor, sequence=tensor > 1, context=context)
        if gpus.count % shape.group or not _divides(shape, site):
            continue
        rows: dict[tuple[int, int, bool], Rows] = {}
        for pipeline in divisors(gpus.count // shape.group):
            data = gpus.count // shape.group // pipeline
            if global_batch_size % data or not (takes("pp", pipeline) and takes("dp", data)):
                continue
            most_chunks = (model.layers + 2) // pipeline if pipeline > 1 else 1
            chunks = [count for count in range(1, most_chunks + 1) if takes("vpp", count)]
            experts = [each for each in divisors(model.experts or 1) if gpus.count // pipeline % each == 0]
            sizes = [size for size in divisors(global_batch_size // data) if takes("micro_batch_size", size)]
            for expert, size in product([each for each in experts if takes("ep", each)], sizes):
                micro_batches = global_batch_size // data // size
                # Interleaving takes its micro-batches in rounds of as many as there are ranks.
                fitting = tuple(count for count in chunks if count == 1 or micro_batches % pipeline == 0)
                # Models with experts have many more ways, and stages that are laid out one by one.
                uneven = rules.uneven and not model.experts
                found = cuts(model.layers, pipeline, fitting, uneven=uneven, laid_out=bool(model.experts))
                if not found:
                    continue
                placed = rules.as_run(
                    replace(shape, expert=expert, pipeline=pipeline, data=data, micro_batch_size=size)
                )
                known = rules.zeros_of(placed, micro_batches=micro_batches, experts=bool(model.experts))
                zeros = [zero for zero in known if takes("zero", zero)]
                parts = partial(Family, pipeline=pipeline, data=data, micro_batches=micro_batches, cuts=found)
                if alike := tuple(zero for zero in zeros if zero < MOST_ZERO):
                    same = expert, size, placed.overlap
                    if same not in rows:
                        rows[same] = Rows.of(replace(site, way=placed))
                    yield parts(rows[same], zeros=alike, recomputed=tuple(recomputed), some=some)
                # Where weights are gathered, a layer takes longer, and how much depends on more.
                for anew in recomputed if MOST_ZERO in zeros else ():
                    way = replace(placed, zero=MOST_ZERO, recompute="full" if anew else "none")
                    own = Rows.of(replace(site, way=way))
                    yield parts(own, zeros=(MOST_ZERO,), recomputed=(anew,), some=False)


def leanest(found: Iterable[Family]) -> Stages | None:
    """The way whose fullest GPU holds least; None where there is none."""
    waiting: list[tuple[float, int, Group, Iterator[Group]]] = []

    def wait(at: int, groups: Iterator[Group]) -> None:
        if (group := next(groups, None)) is not None:
            heappush(waiting, (group.least_bytes, at, group, groups))

    for at, family in enumerate(found):
        wait(at, family.groups())
    best: tuple[float, Stages] | None = None
    while waiting:
        least_bytes, at, group, groups = heappop(waiting)
        if best is not None and least_bytes >= best[0]:
            break
        for stages in group.ways():
            needed = fullest_bytes(stages)
            if best is None or needed < best[0]:
                best = needed, stages
        wait(at, groups)  # whose fullest ranks have no fewer layers
    return None if best is None else best[1]


def fewest_anew(none: Stages, room_bytes: float) -> Stages | None:
    """The way with as few layers of each stage computed anew as fit, but some; None if it takes all, or more."""
    site, most = none.site, max(none.counts)

    def anew(layers: int) -> Stages:
        way = replace(site.way, recompute="full", recompute_layers=layers)
        return Stages(replace(site, way=way), none.micro_batches, none.rows)

    assert site.way.zero < MOST_ZERO, "its rows would be others"  # noqa: S101

    def fits(layers: int) -> bool:
        return fullest_bytes(anew(layers)) <= room_bytes

    if most == 1:
        return None
    if len(set(none.rows.kinds)) > 1:
        # The largest of those that are computed anew has room of its own, so that one more may need more.
        few = next((layers for layers in range(1, most) if fits(layers)), None)
        return None if few is None else anew(few)
    if not fits(most - 1):
        return None
    few = 1 + bisect_left(range(1, most - 1), 1, key=fits)  # each layer more needs less
    return anew(few)


@lru_cache(maxsize=1024)
def cuts(
    layers: int, pipeline: int, chunks: tuple[int, ...], *, uneven: bool = True, laid_out: bool = False
) -> dict[int, tuple[Cut, ...]]:
    """Those with so many stages on each rank, by layers of the fullest rank, the fewest first.

    `uneven` ones have fewer layers on the first and the last rank than on each between.

    >>> {most: len(found) for most, found in cuts(6, 4, (1, 2)).items()}
    {2: 2}
    >>> [one.first_layers for one in cuts(6, 2, (1,))[5]], cuts(5, 2, (1,), uneven=False)
    ([1, 5], {})
    """
    found: dict[int, list[Cut]] = defaultdict(list)
    for count in chunks:
        even = cut(layers, pipeline, count, (None, None), laid_out=laid_out)
        for ends in [(None, None), *(_ends(layers, pipeline, count) if uneven else ())]:
            counts = cut(layers, pipeline, count, ends, laid_out=laid_out)
            if counts is not None and (counts != even or ends == (None, None)):
                most = max(sum(counts[rank::pipeline]) for rank in range(pipeline))
                found[most].append(Cut(count, ends[0], ends[1], max(counts)))
    return {most: tuple(found[most]) for most in sorted(found)}


def _ends(layers: int, pipeline: int, chunks: int) -> Iterator[tuple[int | None, int | None]]:
    """Layers of the first and the last rank where they are fewer than of each between, or differ if none is."""
    if pipeline == 2:
        yield from ((first, None) for first in range(chunks, layers, chunks))
    elif pipeline > 2:
        for each in range(chunks, layers // (pipeline - 2) + 1, chunks):
            ends = layers - each * (pipeline - 2)
            for first in range(max(chunks, ends - each), min(each, ends - chunks) + 1):
                if (first, ends - first) != (each, each):
                    yield None if first == each else first, None if ends - first == each else ends - first


def _divides(way: Way, site: Site) -> bool:
    try:
        check_degrees(site.model, way, seq=site.seq)
    except ArgumentError:
        return False
    return True
