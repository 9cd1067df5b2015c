"""Report of what fine-tuning fits on given GPUs, as text of at most 80 columns and as a document for JSON."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes
from hpgo.llm.memory import COLUMNS
from hpgo.llm.plan import facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.fit import FineTuning

WIDTH = 80
_SHORT = {"gradients": "grads", "framework_overhead": "overhead"}


def lines(
    ways: Sequence[FineTuning], wider: Sequence[FineTuning] = (), missing: Sequence[str] = (), width: int = WIDTH
) -> list[str]:
    """Return the lines of the report.

    `ways` are the rows of the tables, the fastest that fit first. `wider` are ways of methods that fit on more GPUs
    only, and `missing` are methods that fit on no number of GPUs that was tried.
    """
    first = ways[0].estimate
    found = [
        *textwrap.wrap(
            f"{printable(first.model)} on {printable(first.cluster)} ({pluralize(first.gpus, 'GPU')} of"
            f" {format_bytes(first.capacity_bytes)}), {first.seq_length:,} tokens per sequence, micro-batch"
            f" {first.parallelism.micro_batch_size}",
            width,
        ),
        "",
    ]
    fitting = [one for one in ways if one.estimate.fits]
    if fitting:
        found += ["What fits, the fastest first (estimated, not measured)", *plain(*_fitting(fitting), width)]
    else:
        found += ["Nothing fits."]
    others = [one for one in ways if not one.estimate.fits]
    if others:
        short = [(one.name, format_bytes(one.estimate.shortfall_bytes)) for one in others]
        found += [
            "",
            "What does not fit, the nearest first",
            *plain(["method and settings", "too little"], short, width),
        ]
    if wider:
        more = [(one.name, f"{one.estimate.gpus:,}") for one in wider]
        found += ["", "What fits on more of these GPUs", *plain(["method and settings", "GPUs"], more, width)]
    found += [f"{method} fits on no number of these GPUs that was tried" for method in missing]
    chosen = {one.method: one for one in reversed(ways)}
    found += ["", "Memory per GPU (GB) of the first row of each method"]
    found += plain(*_memory([one for one in ways if chosen[one.method] is one]), width)
    moved = [one for one in fitting if one.estimate.fullest.cpu_bytes]
    if moved:
        most = max(one.estimate.fullest.cpu_bytes * one.estimate.gpus for one in moved)
        text = f"State on the CPU or in pages takes up to {format_bytes(most)} of CPU memory, of all nodes together."
        found += ["", *textwrap.wrap(text, width)]
    return found


def largest_lines(ways: Sequence[FineTuning], width: int = WIDTH) -> list[str]:
    """Return the lines of the report of the largest model for each method."""
    if not ways:
        return ["No built-in transformer fits."]
    first = ways[0].estimate
    rows = [
        (
            one.name,
            one.estimate.model,
            f"{one.estimate.fullest.peak_bytes / 1e9:.1f}",
            f"{one.estimate.fullest.cpu_bytes * one.estimate.gpus / 1e9:,.0f}",
        )
        for one in ways
    ]
    return [
        *textwrap.wrap(
            f"{printable(first.cluster)} ({pluralize(first.gpus, 'GPU')} of {format_bytes(first.capacity_bytes)}),"
            f" {first.seq_length:,} tokens per sequence, micro-batch {first.parallelism.micro_batch_size}",
            width,
        ),
        "",
        "Largest built-in transformer that fits (estimated, not measured)",
        *plain(["method and settings", "model", "GB per GPU", "CPU memory (GB)"], rows, width),
    ]


def _fitting(ways: Sequence[FineTuning]) -> tuple[list[str], list[tuple[str, ...]]]:
    columns = ["method and settings", "tokens /s/GPU", "GB per GPU", "longest sequence", "most per pass"]
    rows = [
        (
            one.name,
            f"{one.estimate.tokens_per_s_per_gpu:,.0f}",
            f"{one.estimate.fullest.peak_bytes / 1e9:.1f}",
            f"{one.max_seq_length:,}",
            f"{one.max_micro_batch_size:,}",
        )
        for one in ways
    ]
    return columns, [*map(tuple, rows)]


def _memory(ways: Sequence[FineTuning]) -> tuple[list[str], list[tuple[str, ...]]]:
    memory = [dict(one.estimate.fullest.memory_bytes) for one in ways]
    columns = [name for name in memory[0] if any(held[name] for held in memory)]
    rows = [
        (
            one.method,
            *(f"{held[name] / 1e9:.1f}" for name in columns),
            f"{one.estimate.fullest.peak_bytes / 1e9:.1f}",
        )
        for one, held in zip(ways, memory, strict=True)
    ]
    return ["method", *(_SHORT.get(name, COLUMNS[name].label) for name in columns), "total"], [*map(tuple, rows)]


def document(ways: Sequence[FineTuning]) -> dict[str, Any]:
    """Return ways to fine-tune as a document for JSON."""
    return {
        "format": "hpgo.llm_fits",
        "version": 1,
        "ways": [
            {
                "method": one.method,
                "settings": list(one.settings),
                "fits": one.estimate.fits,
                "max_seq_length": one.max_seq_length,
                "max_micro_batch_size": one.max_micro_batch_size,
                "estimate": facts(one.estimate),
            }
            for one in ways
        ],
    }
