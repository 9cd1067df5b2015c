"""Two ways of training beside each other, and what is next to one, for people: text of at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpgo.base.laws import difference
from hpgo.base.messages import join_words
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_seconds
from hpgo.llm.comparison import differences
from hpgo.llm.memory import COLUMNS
from hpgo.llm.step_time import LABELS
from hpgo.show.llm_report import untold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.llm.comparison import Comparison
    from hpgo.llm.estimate import LlmEstimate

WIDTH = 80


def lines(found: Comparison, forbidden: str = "", width: int = WIDTH) -> list[str]:
    """The whole report; `forbidden` is the rule of a framework that the other way breaks, if it does."""
    chosen, other = found.chosen, found.other
    seconds = [
        (
            LABELS.get(name, name),
            format_seconds(here),
            format_seconds(there),
            _signed(difference(there, here), format_seconds),
        )
        for name, here, there in sorted(found.time_by_term_s, key=lambda row: -abs(row[2] - row[1]))
        if max(here, there) > 0
    ]
    memory = [
        (COLUMNS[name].label, format_bytes(here), format_bytes(there), _signed(difference(there, here), format_bytes))
        for name, here, there in sorted(found.memory_bytes, key=lambda row: -abs(row[2] - row[1]))
        if max(here, there) > 0
    ]
    here, there = chosen.fullest.peak_bytes, other.fullest.peak_bytes
    return [
        *textwrap.wrap(f"chosen: {chosen.parallelism.named()}", width, subsequent_indent="        "),
        *textwrap.wrap(f"other:  {other.parallelism.named()}", width, subsequent_indent="        "),
        "",
        *textwrap.wrap(verdict(found, forbidden), width),
        "",
        *plain(
            ["step", "chosen", "other", "difference"],
            [
                *seconds,
                ("total", format_seconds(chosen.step_s), format_seconds(other.step_s),
                 _signed(found.longer_s, format_seconds)),
            ],
            width,
        ),
        "",
        *plain(
            ["fullest GPU", "chosen", "other", "difference"],
            [*memory, ("total", format_bytes(here), format_bytes(there), _signed(difference(there, here),
            format_bytes))],
            width,
        ),
    ]  # fmt: skip


def verdict(found: Comparison, forbidden: str = "") -> str:
    """Why not the other, in a sentence or two."""
    chosen, other = found.chosen, found.other
    said = []
    if forbidden:
        said.append(f"It is not run: {forbidden}.")
    if not other.fits:
        more = min(found.memory_bytes, key=lambda row: row[1] - row[2])
        said.append(
            f"It does not fit: the fullest GPU needs {format_bytes(other.fullest.peak_bytes)} of"
            f" {format_bytes(other.capacity_bytes)}, {format_bytes(other.shortfall_bytes)} too much;"
            f" most of the difference is {COLUMNS[more[0]].label}"
            f" ({_signed(difference(more[2], more[1]), format_bytes)})."
        )
    share = abs(other.step_s / chosen.step_s - 1)
    if found.longer_s == 0:
        said.append("Its step is as long by the terms.")
    else:
        sign = 1 if found.longer_s > 0 else -1
        name, here, there = max(found.time_by_term_s, key=lambda row: sign * (row[2] - row[1]))
        said.append(
            f"Its step is {100 * share:.1f} % {'longer' if sign > 0 else 'shorter'}, most by {LABELS.get(name, name)}"
            f" ({_signed(difference(there, here), format_seconds)})."
        )
    if not found.apart:
        said.append(f"That is within {100 * chosen.error:.0f} %, the error of such steps: the terms don't tell.")
    if other.unvalidated_features:
        said.append(f"{untold(other)}.")
    return " ".join(said)


def around(chosen: LlmEstimate, tried: Sequence[tuple[str, LlmEstimate | str]], width: int = WIDTH) -> list[str]:
    """What is next to a way: for each change its price, or why there is none."""
    rows, refused = [], []
    for change, one in tried:
        if isinstance(one, str):
            refused.append((change, one))
            continue
        peak = one.fullest.peak_bytes
        fits = "fits" if one.fits else f"{format_bytes(one.shortfall_bytes)} too much"
        if untried := [name for name in one.unvalidated_features if name not in chosen.unvalidated_features]:
            fits += f"; {join_words(untried)} unmeasured"
        share = f"{100 * difference(one.step_s, chosen.step_s) / chosen.step_s:+.1f} %"
        rows.append(
            (
                differences(chosen.parallelism, one.parallelism),
                format_seconds(one.step_s),
                share,
                format_bytes(peak),
                fits,
            )
        )
    found = plain(["what is next to it", "step", "longer", "memory", ""], rows, width)
    for change, why in refused:
        found += textwrap.wrap(f"no {change}: {why}", width, subsequent_indent="  ")
    return found


def document(found: Comparison, forbidden: str = "") -> dict[str, object]:
    """All of it for JSON."""
    return {
        "chosen": asdict(found.chosen.parallelism),
        "other": asdict(found.other.parallelism),
        "longer_s": found.longer_s,
        "apart": found.apart,
        "fits": found.other.fits,
        "shortfall_bytes": found.other.shortfall_bytes,
        "unvalidated_features": list(found.other.unvalidated_features),
        "forbidden": forbidden,
        "time_by_term_s": {name: {"chosen": here, "other": there} for name, here, there in found.time_by_term_s},
        "memory_bytes": {name: {"chosen": here, "other": there} for name, here, there in found.memory_bytes},
    }


def _signed(value: float, shown: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{shown(abs(value))}"
