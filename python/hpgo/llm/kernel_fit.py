"""Best rates, and constants of the cost model, from times of kernels."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from hpgo.llm.constants import CONSTANTS
from hpgo.llm.layer_context import wave_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.device_record import AttentionTime, CollectiveTime, ElementwiseTime, GemmTime

HOP_S = 3.4e-6
"""Seconds of one hop of a ring inside a node, which the cost model counts apart: NCCL's cost model, NVLink."""


_MAX_SHARE = 10.0
"""Share of the best rate above which a fitted line does not describe GEMMs. Not tuned."""


def fit_gemms(gemms: Sequence[GemmTime], best: float, processors: int) -> tuple[float, float]:
    """Return the share of the `best` rate that GEMMs reach tile by tile, and the seconds that each adds to that.

    The line `seconds = work / (best rate · share) + overhead` is fitted by least squares of relative errors, so
    small GEMMs weigh as much as large ones. The work counts whole tiles and idle processors as the cost model does.

    >>> from hpgo.llm.device_record import GemmTime
    >>> shapes = [(4096, 4096, 4096), (8192, 8192, 8192), (2048, 1024, 4096)]
    >>> times = [2 * m * n * k / 500e12 + 4e-6 for m, n, k in shapes]
    >>> gemms = [GemmTime("bf16", *shape, seconds) for shape, seconds in zip(shapes, times)]
    >>> share, overhead_s = fit_gemms(gemms, 500e12, processors=1)
    >>> round(share, 2), round(1e6 * overhead_s, 1)
    (1.0, 4.0)
    """
    short = CONSTANTS.gemm_tile
    rows = []
    for one in gemms:
        tiles = wave_tiles(one.m, one.n, 1, CONSTANTS, processors)
        rows.append((2.0 * tiles * short * 2 * short * one.k / best / one.seconds, 1 / one.seconds))
    work, each = (tuple(column) for column in zip(*rows, strict=True))
    slope, overhead_s = _line(work, each)
    # Beside other load, larger GEMMs may take hardly longer than smaller ones. Their times then tell no overhead.
    if overhead_s < 0 or slope < 1 / _MAX_SHARE:
        overhead_s, slope = 0.0, sum(work) / sum(one * one for one in work)
    return 1 / slope, overhead_s


def _line(work: Sequence[float], each: Sequence[float]) -> tuple[float, float]:
    """Return `a` and `b` that minimize the squares of `a · work + b · each - 1`."""
    ww, we, ee = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((work, work), (work, each), (each, each)))
    determinant = ww * ee - we * we
    if determinant <= 1e-12 * ww * ee:  # all GEMMs are alike, so nothing tells an overhead
        return sum(work) / ww, 0.0
    w, e = sum(work), sum(each)
    return (w * ee - e * we) / determinant, (e * ww - w * we) / determinant


def fit_attention(times: Sequence[AttentionTime]) -> tuple[float, float, float]:
    """Return the best rate of the forward pass, the mean share of it, and backward seconds per forward second.

    Only times of the backend that PyTorch chooses count: frameworks without their own kernels get this one.
    """
    usual = [one for one in times if one.backend == "default"]
    best = max(one.flop_per_s for one in usual)
    # The mean of seconds per operation: the share of a step with the same number of operations for each length.
    share = 1 / fmean(best / one.flop_per_s for one in usual)
    return best, share, median(one.backward_s / one.forward_s for one in usual)


def fit_elementwise(times: Sequence[ElementwiseTime]) -> float:
    """Return the bytes per second that copies and additions reach.

    Norms do not count: frameworks have faster kernels for them than PyTorch's own.
    """
    return 1 / fmean(1 / one.bytes_per_s for one in times if one.kernel != "norm")


def fit_collectives(times: Sequence[CollectiveTime], *, across: bool) -> tuple[float, float, float] | None:
    """Return a port's rate in ring collectives and in the all-to-all, and the overhead of a collective.

    The rates hold for the largest messages. The overhead is the time of the smallest ones without the hops of the
    ring; an all-reduce counts as two collectives, as in the cost model. None if nothing was measured.
    """
    held = [one for one in times if one.across == across]
    if not held:
        return None
    by_size: dict[str, list[CollectiveTime]] = {}
    for one in sorted(held, key=lambda one: one.whole_bytes):
        by_size.setdefault(one.operation, []).append(one)
    rings = [rows for name, rows in by_size.items() if name != "all_to_all"] or list(by_size.values())
    rate = 1 / fmean(1 / rows[-1].bytes_per_s for rows in rings)
    exchanged = by_size.get("all_to_all", rings[0])[-1].bytes_per_s
    alone = [rows[0].seconds / (2 if rows[0].operation == "all_reduce" else 1) for rows in rings]
    return rate, exchanged, max(0.0, median(alone) - HOP_S * (held[0].gpus - 1))
