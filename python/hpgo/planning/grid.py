"""The best ways of training a transformer on GPUs: `hpgo.choose_way` looks at every one that Megatron-LM runs.

All are priced by a bound that no order of passes can beat, and simulated in the order of their bounds until the next
bound is no better than what was found: the answer is that of trying everything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpgo.base.checks import check_is, choice, number, whole
from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError, InfeasibleError
from hpgo.base.records import Record, check_fields
from hpgo.base.units import format_bytes
from hpgo.base.wording import shorten
from hpgo.machine.cluster import Cluster
from hpgo.model.formats.transformers import transformer_of
from hpgo.planning.configured import PRECISIONS, Price, check_priced, fullest_bytes, price_way
from hpgo.ways.constants import CONSTANTS
from hpgo.ways.gpus import Gpus
from hpgo.ways.site import Site
from hpgo.ways.steps import Stages
from hpgo.ways.way import Precision, Recompute, Way, check_batch, check_degrees, stage_layers

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
    simulated: int
    """How many of them were; no other is quicker than these, by its bound."""

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
    """The quickest ways of training a dense transformer that fit, of all that Megatron-LM runs with even stages.

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
    pipelines whose stages are even, interleaved or not; every micro-batch that divides; optimizer state whole or
    shared; layers computed anew or not. All GPUs are used.

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
    check_priced(model)
    gpus = Gpus.of(cluster, precision)
    grid = [
        Stages(Site(model, way, gpus, CONSTANTS, seq), way.micro_batches(global_batch_size))
        for way in ways(model, gpus, global_batch_size=global_batch_size, seq=seq, precision=precision)
    ]
    if not grid:
        raise ArgumentError(
            f"no way parts `{shorten(model.name)}` and a global batch of {global_batch_size} among {gpus.count} GPUs",
            "take a number of GPUs, and a batch, with more divisors",
        )
    room = gpus.memory_bytes - reserved_bytes
    best: list[Price] = []
    least: tuple[float, Stages] | None = None
    simulated = 0
    for bound_s, at in sorted((one.bound_s, at) for at, one in enumerate(grid)):
        if len(best) == top and bound_s >= best[-1].step_s:
            break
        one = grid[at]
        needed = fullest_bytes(one)
        if needed > room:
            if least is None or needed < least[0]:
                least = needed, one
            continue
        simulated += 1
        best.append(price_way(model, cluster, one.site.way, global_batch_size=global_batch_size, seq=seq))
        best = sorted(best, key=lambda found: found.step_s)[:top]
    if not best:
        assert least is not None, "there was a way"  # noqa: S101
        raise InfeasibleError(
            f"no way fits: the leanest, {least[1].site.way.named()}, needs {format_bytes(least[0])} of a GPU, which has"
            f" {format_bytes(room)}",
            "name a cluster with more GPUs, or with more memory in each",
        )
    return WayChoice(tuple(best), len(grid), simulated)


def ways(model: Transformer, gpus: Gpus, *, global_batch_size: int, seq: int, precision: Precision) -> Iterator[Way]:
    """Every way of the grid that `choose_way` describes."""
    for tensor in divisors(gpus.machine):
        for context in (1 << power for power in range(gpus.count.bit_length())):
            shape = Way(tensor=tensor, sequence=tensor > 1, context=context, precision=precision)
            if gpus.count % shape.group or not _divides(model, shape, seq):
                continue
            for pipeline in divisors(gpus.count // shape.group):
                if pipeline > model.layers + 2:
                    break
                data = gpus.count // shape.group // pipeline
                if global_batch_size % data:
                    continue
                for chunks in range(1, (model.layers + 2) // pipeline + 1 if pipeline > 1 else 2):
                    if stage_layers(model.layers, pipeline * chunks) is None:
                        continue
                    placed = replace(shape, pipeline=pipeline, chunks=chunks, data=data)
                    yield from _rest(placed, global_batch_size)


def _divides(model: Transformer, way: Way, seq: int) -> bool:
    try:
        check_degrees(model, way, seq=seq)
    except ArgumentError:
        return False
    return True


def _rest(way: Way, global_batch_size: int) -> Iterator[Way]:
    """Micro-batches, sharing and recomputation of degrees that divide."""
    for size in divisors(global_batch_size // way.data):
        sized = replace(way, micro_batch_size=size)
        try:
            check_batch(sized, global_batch_size)
        except ArgumentError:
            continue
        for zero in (0, 1) if way.shards > 1 else (0,):
            for recompute in _RECOMPUTE:
                yield replace(sized, zero=zero, recompute=recompute)
