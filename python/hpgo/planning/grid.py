"""The best ways of training a transformer on GPUs: `hpgo.choose_way` looks at every one that a launcher runs.

Families of ways are bounded together, and their ways one by one, by what no order of passes can beat. In the order of
these bounds they are simulated, until the next bound is no better than what was found: the answer is that of trying
everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING

from hpgo.base.checks import check_is, choice, number, whole
from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.base.records import Record, check_fields
from hpgo.base.wording import shorten
from hpgo.machine.cluster import Cluster
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer
from hpgo.planning.configured import PRECISIONS, Price, constants_of, fullest_bytes, price_of, simulated_s, with_error
from hpgo.programs.launchers import of_ways
from hpgo.ways.gpus import Gpus
from hpgo.ways.site import Site
from hpgo.ways.space import Space
from hpgo.ways.steps import Rows, Stages
from hpgo.ways.way import MOST_ZERO, Precision, Recompute, Way, check_degrees, stage_layers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from hpgo.planning.platform import Platform
    from hpgo.planning.way_plans import WayPlan

MOST_SHOWN = 1000


@dataclass(frozen=True, slots=True)
class WayChoice(Record):
    """The quickest ways of a grid that fit, and how many there were."""

    prices: tuple[Price, ...]
    """The quickest first."""
    ways: int
    """Of the grid: all whose degrees divide."""
    bounded: int
    """How many of them were bounded one by one; the bound of a family was enough for the others."""
    simulated: int
    """How many of these were simulated; no other is quicker than these, by its bound."""
    transformer: Transformer
    cluster: Cluster
    """With the GPUs that were to be used."""
    launcher: str
    """Which one runs all of them, as `--for` has it: `megatron@0.16`."""
    said: str
    """What the grid is, in words: who runs it, and what was fixed and excluded."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prices:
            raise ArgumentError("a choice of ways has none", "make it again")

    @property
    def alike(self) -> tuple[Price, ...]:
        """Those that are within the error of the quickest, which is the first of them."""
        return tuple(one for one in self.prices if one.step_s <= self.best.step_s * (1 + self.best.error))

    @property
    def best(self) -> Price:
        """The quickest."""
        return self.prices[0]

    def plan(self, place: int = 1) -> WayPlan:
        """The way in this place, the quickest in the first, with all that running it asks for.

        Raises ArgumentError if fewer were found.

        >>> import hpgo
        >>> found = hpgo.choose_way("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192)
        >>> found.plan(2).price == found.prices[1]
        True
        """
        from hpgo.planning.way_plans import WayPlan  # which others do without

        place = whole("place", place, most=len(self.prices), hint=f"{len(self.prices)} were asked for or found")
        return WayPlan(
            price=self.prices[place - 1], transformer=self.transformer, cluster=self.cluster, launcher=self.launcher
        )


def choose_way(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster,
    *,
    global_batch_size: int,
    seq: int,
    precision: Precision = "bf16",
    devices: int | None = None,
    launcher: str = "megatron",
    fix: dict[str, int | str] | None = None,
    exclude: Iterable[str] = (),
    headroom_bytes: float = 0.0,
    platform: Platform | None = None,
    top: int = 10,
) -> WayChoice:
    """The quickest ways of training a transformer that fit, of all that a launcher runs with even stages.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        devices: GPUs to use, the first of the cluster; None is all.
        launcher: `megatron`, `torchtitan` or `deepspeed`, perhaps with a version: `megatron@0.16`.
        fix: degrees that are given: `{"tp": 4, "zero": 1}`; also `cp`, `ep`, `pp`, `vpp`, `dp`, `micro_batch_size` and
            `recompute`.
        exclude: what to do without: `["cp"]`, or certain values: `["zero=0", "micro_batch_size=1"]`.
        headroom_bytes: memory of each GPU to leave alone, beside what the terms count.
        platform: factors from steps that were measured there (`hpgo.Platform.read`); None is none.
        top: how many ways to give.

    The grid: tensor parallelism inside a machine, with sequence parallelism; context parallelism by powers of two; all
    pipelines whose stages are even, interleaved or not, or for models with experts nearly so; experts among as many
    GPUs of a stage as divide both; every micro-batch that divides; all that the launcher lets replicas share; layers
    computed anew or not. All GPUs are used.

    Raises InfeasibleError if none fits, with what is short and what would help; ArgumentError for what is fixed and
    does not divide, or is nothing that the launcher runs; and what `hpgo.price` raises.

    >>> import hpgo
    >>> found = hpgo.choose_way("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192)
    >>> found.best.fits, found.best.gpus, found.ways > found.simulated
    (True, 8, True)
    """
    model = transformer_of(transformer)
    check_is("cluster", cluster, Cluster, "make one, with `hpgo.Cluster.read` say")
    global_batch_size, seq = whole("global_batch_size", global_batch_size), whole("seq", seq)
    choice("precision", precision, PRECISIONS)
    row, rules = of_ways(launcher)
    space = Space.of(rules, row.title, fix=fix, exclude=exclude)
    headroom_bytes = number("headroom_bytes", headroom_bytes)
    top = whole("top", top, most=MOST_SHOWN)
    if devices is not None:
        cluster = cluster.first(devices)
    gpus = Gpus.of(cluster, precision)
    space.check(model, gpus, global_batch_size=global_batch_size, seq=seq, precision=precision)
    site = Site(model, Way(precision=precision), gpus, constants_of(cluster, platform), seq)
    grid = list(families(site, global_batch_size, space))
    if not grid:
        held = space.said
        raise ArgumentError(
            f"no way parts `{shorten(model.name)}` and a global batch of {global_batch_size} among {gpus.count} GPUs"
            f"{held}",
            "take a number of GPUs, and a batch, with more divisors" + (", or fix and exclude less" if held else ""),
        )
    room = gpus.memory_bytes - headroom_bytes
    best: list[tuple[float, Stages]] = []
    least: tuple[float, Stages] | None = None
    bounded = simulated = 0
    # Families first, then their ways, each in the order of the bounds; of equal ones in that of the grid.
    waiting: list[tuple[float, int, _Family | Stages]] = []
    ways = 0
    for family in grid:
        waiting.append((family.bound_s, ways, family))
        ways += family.count
    heapify(waiting)
    while waiting:
        bound_s, at, one = heappop(waiting)
        if len(best) == top and bound_s >= best[-1][0]:
            break
        if isinstance(one, _Family):
            bounded += one.count
            for place, stages in enumerate(one.ways(), start=at):
                heappush(waiting, (stages.bound_s, place, stages))
            continue
        needed = fullest_bytes(one)
        if needed > room:
            if least is None or needed < least[0]:
                least = needed, one
            continue
        simulated += 1
        best = sorted([*best, (simulated_s(one), one)], key=itemgetter(0))[:top]
    if not best:
        assert least is not None, "there was a way"  # noqa: S101
        from hpgo.planning.shortage import nothing_fits

        raise nothing_fits(least[1], cluster, space, global_batch_size, headroom_bytes=headroom_bytes)
    prices = (price_of(one, cluster.name, step_s, global_batch_size=global_batch_size) for step_s, one in best)
    return WayChoice(
        prices=tuple(with_error(one, cluster, platform) for one in prices),
        ways=ways,
        bounded=bounded,
        simulated=simulated,
        transformer=model,
        cluster=cluster,
        launcher=f"{row.name}@{row.version}",
        said=f"{row.label} runs{space.said}",
    )


_SLACK = 1e-9
"""Sums in another order may differ by so much."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Ways that part the model and the batch alike; they differ in interleaving, and in what replicas share."""

    rows: Rows
    pipeline: int
    data: int
    micro_batches: int
    recompute: Recompute
    chunks: tuple[int, ...]
    zeros: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.chunks) * len(self.zeros)

    @property
    def bound_s(self) -> float:
        """None has a lower bound: some rank has at least its share of all that there is to compute."""
        all_s = self.rows.anew_s if self.recompute == "full" else self.rows.kept_s
        return self.micro_batches * all_s / self.pipeline * (1 - _SLACK)

    def ways(self) -> Iterator[Stages]:
        """Each of them."""
        for chunks, zero in product(self.chunks, self.zeros):
            way = replace(
                self.rows.site.way, pipeline=self.pipeline, chunks=chunks, data=self.data, zero=zero,
                recompute=self.recompute,
            )  # fmt: skip
            yield Stages(replace(self.rows.site, way=way), self.micro_batches, self.rows)


def families(site: Site, global_batch_size: int, space: Space) -> Iterator[_Family]:
    """The grid that `choose_way` describes, for the model, the GPUs and the precision of a site."""
    model, gpus, rules, takes = site.model, site.gpus, space.rules, space.takes
    contexts = [1 << power for power in range(gpus.count.bit_length())]
    # Attention as one kernel keeps no scores, so that there is nothing selective about it.
    kinds = [kind for kind in rules.recompute if kind != "selective" or not site.way.flash]
    recomputed = [kind for kind in kinds if takes("recompute", kind)]
    for tensor, context in product(divisors(gpus.machine), contexts):
        if not (takes("tp", tensor) and takes("cp", context)):
            continue
        shape = replace(site.way, tensor=tensor, sequence=tensor > 1, context=context)
        if gpus.count % shape.group or not _divides(model, shape, site.seq):
            continue
        sized: dict[tuple[object, ...], Rows] = {}
        for pipeline in divisors(gpus.count // shape.group):
            data = gpus.count // shape.group // pipeline
            chunks = _chunks(model, pipeline, space)
            if global_batch_size % data or not chunks or not (takes("pp", pipeline) and takes("dp", data)):
                continue
            experts = [each for each in divisors(model.experts or 1) if gpus.count // pipeline % each == 0]
            sizes = [size for size in divisors(global_batch_size // data) if takes("micro_batch_size", size)]
            for expert, size in product([each for each in experts if takes("ep", each)], sizes):
                micro_batches = global_batch_size // data // size
                # Interleaving takes its micro-batches in rounds of as many as there are ranks.
                fitting = chunks if micro_batches % pipeline == 0 else tuple(each for each in chunks if each == 1)
                if not fitting:
                    continue
                placed = rules.as_run(
                    replace(shape, expert=expert, pipeline=pipeline, data=data, micro_batch_size=size)
                )
                known = rules.zeros_of(placed, micro_batches=micro_batches, experts=bool(model.experts))
                found = [zero for zero in known if takes("zero", zero)]
                # Where weights are gathered, a layer takes longer, and how much depends on more.
                apart = [zero for zero in found if zero < MOST_ZERO], [zero for zero in found if zero == MOST_ZERO]
                for recompute, zeros in product(recomputed, filter(None, apart)):
                    same: tuple[object, ...] = (expert, size, placed.overlap)
                    same += (pipeline, recompute) if zeros[0] == MOST_ZERO else ()
                    if same not in sized:
                        sized[same] = Rows.of(replace(site, way=replace(placed, zero=zeros[0], recompute=recompute)))
                    yield _Family(sized[same], pipeline, data, micro_batches, recompute, fitting, tuple(zeros))


def _chunks(model: Transformer, pipeline: int, space: Space) -> tuple[int, ...]:
    """How many stages a rank may have."""
    most = (model.layers + 2) // pipeline if pipeline > 1 else 1
    laid_out = bool(model.experts)
    return tuple(
        chunks for chunks in range(1, most + 1)
        if space.takes("vpp", chunks) and stage_layers(model.layers, pipeline * chunks, laid_out=laid_out) is not None
    )  # fmt: skip


def _divides(model: Transformer, way: Way, seq: int) -> bool:
    try:
        check_degrees(model, way, seq=seq)
    except ArgumentError:
        return False
    return True
