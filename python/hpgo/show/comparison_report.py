"""Reports on two configurations side by side, and on the neighbors of one, as text of at most 80 columns."""

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
from hpgo.llm.step_range import RELATIVE_ERROR
from hpgo.llm.step_time import LABELS
from hpgo.show.llm_report import unvalidated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.llm.comparison import Comparison
    from hpgo.llm.estimate import LlmEstimate

WIDTH = 80


def lines(found: Comparison, forbidden: str = "", width: int = WIDTH) -> list[str]:
    """Return the lines of the report. `forbidden` is the rule of a framework that the other configuration breaks."""
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
    # Rows are sorted by the size of the difference, so the reasons come first.
    return [
        *textwrap.wrap(f"chosen  {chosen.parallelism.named()}", width, subsequent_indent="        "),
        *textwrap.wrap(f"other   {other.parallelism.named()}", width, subsequent_indent="        "),
        "",
        *textwrap.wrap(verdict(found, forbidden), width),
        "",
        *plain(
            ["Step time (estimated)", "chosen", "other", "difference"],
            [
                *seconds,
                ("total", format_seconds(chosen.step_s), format_seconds(other.step_s),
                 _signed(found.longer_s, format_seconds)),
            ],
            width,
        ),
        "",
        *plain(
            ["Memory of the fullest GPU", "chosen", "other", "difference"],
            [*memory, ("total", format_bytes(here), format_bytes(there), _signed(difference(there, here),
            format_bytes))],
            width,
        ),
    ]  # fmt: skip


def verdict(found: Comparison, forbidden: str = "") -> str:
    """Return the difference between two configurations and its main reasons, as one paragraph."""
    chosen, other = found.chosen, found.other
    # Reasons that rule the other configuration out come before its step time.
    sentences = []
    if forbidden:
        sentences.append(f"The other configuration does not run: {forbidden}.")
    if not other.fits:
        more = min(found.memory_bytes, key=lambda row: row[1] - row[2])
        sentences.append(
            f"The other configuration does not fit: the fullest GPU needs {format_bytes(other.fullest.peak_bytes)}, but"
            f" it has {format_bytes(other.capacity_bytes)}, {format_bytes(other.shortfall_bytes)} too little. Most of"
            f" the difference is {COLUMNS[more[0]].label} ({_signed(difference(more[2], more[1]), format_bytes)})."
        )
    share = abs(other.step_s / chosen.step_s - 1)
    if found.longer_s == 0:
        sentences.append("Its estimated step time is the same.")
    else:
        sign = 1 if found.longer_s > 0 else -1
        name, here, there = max(found.time_by_term_s, key=lambda row: sign * (row[2] - row[1]))
        sentences.append(
            f"Its estimated step time is {100 * share:.1f} % {'longer' if sign > 0 else 'shorter'}, mostly because of"
            f" {LABELS.get(name, name)} ({_signed(difference(there, here), format_seconds)})."
        )
    if not found.apart:
        sentences.append(
            f"The step times differ by less than the error of such differences ({100 * RELATIVE_ERROR:.0f} %), so their"
            " order is not reliable."
        )
    if other.unvalidated_features:
        sentences.append(f"{unvalidated(other)}.")
    return " ".join(sentences)


def around(chosen: LlmEstimate, tried: Sequence[tuple[str, LlmEstimate | str]], width: int = WIDTH) -> list[str]:
    """Return a table of the neighbors of a configuration, given their estimates or the reason why there is none."""
    rows, refused = [], []
    for change, one in tried:
        if isinstance(one, str):
            refused.append((change, one))
            continue
        peak = one.fullest.peak_bytes
        fits = "fits" if one.fits else f"over by {format_bytes(one.shortfall_bytes)}"
        # Repeating what the chosen configuration also lacks would hide what the change adds.
        if untried := [name for name in one.unvalidated_features if name not in chosen.unvalidated_features]:
            fits += f"; {join_words(untried)} not validated"
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
    found = plain(["Change of one setting", "step time", "", "memory", ""], rows, width)
    found += ["", "Not possible"] if refused else []
    for change, why in refused:
        found += textwrap.wrap(f"{change}: {why}", width, initial_indent="  ", subsequent_indent="    ")
    return found


def document(found: Comparison, forbidden: str = "") -> dict[str, object]:
    """Return both configurations with all differences, for JSON."""
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
