"""The best ways of training a transformer on GPUs: `hpgo.choose_way` looks at every one that Megatron-LM runs.

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
from hpgo.base.errors import ArgumentError, InfeasibleError
from hpgo.base.records import Record, check_fields
from hpgo.base.units import format_bytes
from hpgo.base.wording import shorten
from hpgo.machine.cluster import Cluster
from hpgo.model.formats.transformers import transformer_of
from hpgo.planning.configured import PRECISIONS, Price, fullest_bytes, price_of, simulated_s
from hpgo.ways.constants import CONSTANTS
from hpgo.ways.gpus import Gpus
from hpgo.ways.site import Site
from hpgo.ways.steps import Rows, Stages
from hpgo.ways.way import Precision, Recompute, Way, check_degrees, stage_layers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from hpgo.model.transformer import Transformer

MOST_SHOWN = 1000
_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
"""Attention as one kernel keeps no scores, so that there is nothing selective about it."""


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

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prices:
            raise ArgumentError("a choice of ways has none", "make it again")

    @property
    def best(self) -> Price:
        """The quickest."""
        return self.prices[0]


def choose_way(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster,
    *,
    global_batch_size: int,
    seq: int,
    precision: Precision = "bf16",
    devices: int | None = None,
    reserved_bytes: float = 0.0,
    top: int = 10,
) -> WayChoice:
    """The quickest ways of training a transformer that fit, of all that Megatron-LM runs with even stages.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        devices: GPUs to use, the first of the cluster; None is all.
        reserved_bytes: memory of each GPU to leave alone, beside what the terms count.
        top: how many ways to give.

    The grid: tensor parallelism inside a machine, with sequence parallelism; context parallelism by powers of two; all
    pipelines whose stages are even, interleaved or not, or for models with experts nearly so; experts among as many
    GPUs of a stage as divide both; every micro-batch that divides; optimizer state whole or shared; layers computed
    anew or not. All GPUs are used.

    Raises InfeasibleError if none fits, with what is short; and what `hpgo.price` raises.

    >>> import hpgo
    >>> found = hpgo.choose_way("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192)
    >>> found.best.fits, found.best.gpus, found.ways > found.simulated
    (True, 8, True)
    """
    model = transformer_of(transformer)
    check_is("cluster", cluster, Cluster, "make one, with `hpgo.Cluster.read` say")
    global_batch_size, seq = whole("global_batch_size", global_batch_size), whole("seq", seq)
    choice("precision", precision, PRECISIONS)
    reserved_bytes = number("reserved_bytes", reserved_bytes)
    top = whole("top", top, most=MOST_SHOWN)
    if devices is not None:
        cluster = cluster.first(devices)
    gpus = Gpus.of(cluster, precision)
    site = Site(model, Way(precision=precision), gpus, CONSTANTS, seq)
    grid = list(families(site, global_batch_size))
    if not grid:
        raise ArgumentError(
            f"no way parts `{shorten(model.name)}` and a global batch of {global_batch_size} among {gpus.count} GPUs",
            "take a number of GPUs, and a batch, with more divisors",
        )
    room = gpus.memory_bytes - reserved_bytes
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
        raise InfeasibleError(
            f"no way fits: the leanest, {least[1].site.way.named()}, needs {format_bytes(least[0])} of a GPU, which has"
            f" {format_bytes(room)}",
            "name a cluster with more GPUs, or with more memory in each",
        )
    prices = (price_of(one, cluster.name, step_s, global_batch_size=global_batch_size) for step_s, one in best)
    return WayChoice(tuple(prices), ways, bounded, simulated)


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


def families(site: Site, global_batch_size: int) -> Iterator[_Family]:
    """The grid that `choose_way` describes, for the model, the GPUs and the precision of a site."""
    model, gpus = site.model, site.gpus
    for tensor in divisors(gpus.machine):
        for context in (1 << power for power in range(gpus.count.bit_length())):
            shape = replace(site.way, tensor=tensor, sequence=tensor > 1, context=context)
            if gpus.count % shape.group or not _divides(model, shape, site.seq):
                continue
            sized: dict[tuple[int, int], Rows] = {}
            for pipeline in divisors(gpus.count // shape.group):
                data = gpus.count // shape.group // pipeline
                chunks = _chunks(model, pipeline)
                if global_batch_size % data or not chunks:
                    continue
                experts = [each for each in divisors(model.experts or 1) if gpus.count // pipeline % each == 0]
                for expert, size in product(experts, divisors(global_batch_size // data)):
                    placed = replace(shape, expert=expert, data=data, micro_batch_size=size)
                    same = max(placed.shards, placed.expert_shards if model.experts else 1)
                    zeros = (0, 1) if same > 1 else (0,)
                    if (expert, size) not in sized:
                        sized[expert, size] = Rows.of(replace(site, way=placed))
                    micro_batches = global_batch_size // data // size
                    # Interleaving takes its micro-batches in rounds of as many as there are ranks.
                    fitting = chunks if micro_batches % pipeline == 0 else tuple(each for each in chunks if each == 1)
                    if not fitting:
                        continue
                    for recompute in _RECOMPUTE:
                        yield _Family(sized[expert, size], pipeline, data, micro_batches, recompute, fitting, zeros)


def _chunks(model: Transformer, pipeline: int) -> tuple[int, ...]:
    """How many stages a rank may have."""
    most = (model.layers + 2) // pipeline if pipeline > 1 else 1
    laid_out = bool(model.experts)
    return tuple(
        chunks for chunks in range(1, most + 1)
        if stage_layers(model.layers, pipeline * chunks, laid_out=laid_out) is not None
    )  # fmt: skip


def _divides(model: Transformer, way: Way, seq: int) -> bool:
    try:
        check_degrees(model, way, seq=seq)
    except ArgumentError:
        return False
    return True
