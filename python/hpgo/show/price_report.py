"""A price of a way of training for people: text of at most 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_seconds
from hpgo.base.wording import counted, printable
from hpgo.planning.way_plans import facts

if TYPE_CHECKING:
    from hpgo.planning.configured import Price, StagePrice
    from hpgo.planning.grid import WayChoice

WIDTH = 80
UNCERTIFIED = (
    "Layers hold experts: this is no certificate. Prices of such models are further from published steps than their"
    " goal allows (docs/accuracy.md), and tokens are taken to be spread evenly."
)
_SMALL = 5e-4
"""Of a step: what takes less stands in no table."""


def lines(price: Price) -> list[str]:
    """The whole report.

    >>> import hpgo
    >>> one = hpgo.price("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192, tp=2, zero=1)
    >>> lines(one)[0]
    'llama-3-8b on h100:1, 8 GPUs'
    """
    way = price.way
    peak = max(stage.peak_bytes for stage in price.stages)
    fits = (
        f"{format_bytes(price.capacity_bytes - peak)} to spare"
        if price.fits
        else (f"{format_bytes(price.missing_bytes)} MORE THAN THERE IS")
    )
    who = f"{printable(price.model)} on {printable(price.cluster)}, {counted(price.gpus, 'GPU')}"
    runs = f"{counted(price.micro_batches, 'micro-batch')} on each of {counted(way.data, 'replica')}"
    share = f"MFU {100 * price.utilisation:.1f} % of {price.peak_flop_per_s / 1e12:g} TFLOP/s"
    return [
        who,
        *textwrap.wrap(way.named(), WIDTH),
        f"{runs}, {price.seq} tokens a sequence, {way.precision}",
        "",
        f"step    {format_seconds(price.step_s)}, by terms, not measured",
        f"tokens  {price.tokens_per_s_per_gpu:,.0f}/s/GPU; {share}",
        f"memory  {format_bytes(peak)} of {format_bytes(price.capacity_bytes)}: {fits}",
        "",
        *plain(
            ["where the step goes", "time", "share"],
            [
                (name, format_seconds(spent_s), f"{100 * spent_s / price.step_s:.1f} %")
                for name, spent_s in sorted(price.seconds, key=lambda row: -row[1])
                if spent_s > _SMALL * price.step_s
            ],
            WIDTH,
        ),
        "",
        *plain(
            ["rank", "layers", *(name for name, _ in price.stages[0].memory_bytes), "all"],
            [
                (where, _layers(stage), *(_size(size) for _, size in stage.memory_bytes), _size(stage.peak_bytes))
                for where, stage in _rows(price)
            ],
            WIDTH,
        ),
        "",
        "Memory is in GB, of each GPU. MFU counts what the model asks for: nothing",
        "that is computed anew, and no scores that are masked.",
        *(["", *textwrap.wrap(UNCERTIFIED, WIDTH)] if price.has_experts else []),
    ]


def listed(choice: WayChoice) -> list[str]:
    """The quickest ways, one a line, and how many there were."""
    rows = [
        (
            place,
            format_seconds(one.step_s),
            f"+{100 * (one.step_s / choice.best.step_s - 1):.1f} %",
            f"{max(stage.peak_bytes for stage in one.stages) / 1e9:.1f} GB",
            one.way.named(),
        )
        for place, one in enumerate(choice.prices, start=1)
    ]
    said = (
        f"{choice.ways:,} ways were bounded, {choice.simulated:,} simulated, of all that {choice.said}: none that fits"
        " is quicker by these terms. Which is quicker in fact, they tell of ways that lie further apart than their"
        " error: docs/accuracy.md has it by platform."
    )
    rests = ["", *textwrap.wrap(UNCERTIFIED, WIDTH)] if choice.best.has_experts else []
    return [*plain(["", "step", "longer", "memory", "way"], rows), "", *textwrap.wrap(said, WIDTH), *rests]


def document(price: Price) -> dict[str, object]:
    """All fields for JSON, and what follows from them."""
    held = facts(price)
    for kept, stage in zip(held["stages"], price.stages, strict=True):
        kept["peak_bytes"] = stage.peak_bytes
    follows = ("micro_batches", "tokens_per_s_per_gpu", "utilisation", "fits", "missing_bytes")
    return held | {name: getattr(price, name) for name in follows}


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"


def _layers(stage: StagePrice) -> str:
    """How many layers a rank has."""
    return str(sum(stop - start for start, stop in stage.layers))


def _rows(price: Price) -> list[tuple[str, StagePrice]]:
    """Ranks of the pipeline; of many the first, the last, the middle one and the fullest."""
    stages = price.stages
    if len(stages) <= 8:  # a screen
        return [(str(rank), stage) for rank, stage in enumerate(stages)]
    fullest = max(range(len(stages)), key=lambda rank: stages[rank].peak_bytes)
    shown = sorted({0, 1, fullest, len(stages) // 2, len(stages) - 2, len(stages) - 1})
    return [(str(rank), stages[rank]) for rank in shown]
