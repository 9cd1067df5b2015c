"""Timelines as one interactive HTML file that needs no server and no network.

Times are stored as whole ticks of a power of ten seconds, and columns as differences. Differences compress well,
because schedules repeat: a million actions take a few megabytes. The scripts in `view/` unpack and draw them.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from hpgo.base.messages import printable
from hpgo.base.quoting import filled
from hpgo.draw import palette
from hpgo.draw.axis import SHORTEST_S, drawn_span_s
from hpgo.draw.facts import (
    barred,
    comparison,
    counted,
    definitions,
    drawn_caps,
    far_cap,
    memory_top_bytes,
    names,
    summary,
    sync_rows,
    title,
    virtual_stage_of_stage,
)
from hpgo.draw.scene import staircase
from hpgo.programs.schedule import KINDS
from hpgo.timing.measures import CAUSES, TRANSFER_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpgo.draw.options import DrawOptions
    from hpgo.timing.timeline import Timeline

_SCRIPTS = ("state", "patterns", "data", "geometry", "paint", "pointing", "input")
"""Parts of the page's script, in order of dependency."""
_CRITICAL = 8
"""Bit in the column of kinds that marks an action on the critical path."""
# Limits that keep the page at tens of megabytes and let it open in seconds. Not tuned.
_MAX_TRANSFERS = 2_000_000
_MAX_MEMORY_POINTS = 1_000_000


def html(timelines: Sequence[Timeline], options: DrawOptions) -> bytes:
    """Return the page as UTF-8."""
    labels = names(timelines, options.labels)
    heading = options.title or title(timelines, labels)
    notes: list[str] = []
    columns: list[bytes] = []
    described = []
    top_bytes = memory_top_bytes(timelines)
    for number, (timeline, label) in enumerate(zip(timelines, labels, strict=True)):
        meta, packed = _packed(timeline, label, notes, top_bytes)
        described.append(meta)
        columns += [
            b'<script type="text/plain" id="c%d-%s">%s</script>\n' % (number, name.encode(), _pack(values))
            for name, values in packed.items()
        ]
    with_table = options.table and len(timelines) > 1
    meta = {
        "title": heading,
        "timelines": described,
        "end_s": drawn_span_s(timelines),
        "table": comparison(timelines, labels) if with_table else [],
        "notes": [*notes, definitions(timelines, with_table=with_table)],
        "theme": options.theme,
        "kinds": KINDS,
        "causes": CAUSES,
        "kindNames": palette.KIND_NAMES,
        "causeNames": palette.CAUSE_NAMES,
        "marks": _marks(),
        "hatches": {
            "paths": palette.HATCHES,
            "side_px": palette.HATCH_PX,
            "line_px": palette.HATCH_LINE_PX,
            "print_opacity": palette.PRINT_OPACITY,
            "opacity": palette.PRINT_OPACITY if options.hatch else palette.HATCH_OPACITY,
        },
        "lines": _lines(),
        "present": _present(timelines),
        "show": {
            "bubbles": options.bubbles,
            "transfers": options.transfers,
            "memory": options.memory and any(timeline.memory for timeline in timelines),
            "critical": options.critical_path,
        },
    }
    here = resources.files("hpgo.draw").joinpath("view")
    parts = {
        "TITLE": escape(heading),
        "SCHEME": {"auto": "light dark"}.get(options.theme, options.theme),
        # `<` could end the script element that holds the JSON.
        "META": json.dumps(meta, ensure_ascii=False).replace("<", "\\u003c"),
        "SCRIPT": "\n".join((here / f"{part}.js").read_text(encoding="utf-8") for part in _SCRIPTS),
    }
    # The columns stay bytes: they may be tens of megabytes, and decoding them would only copy them.
    before, after = (here / "page.html").read_text(encoding="utf-8").split("__COLUMNS__")
    return b"".join([filled(before, parts).encode(), *columns, filled(after, parts).encode()])


def _packed(
    timeline: Timeline, label: str, notes: list[str], top_bytes: float
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the facts about one timeline that the page needs, and its columns by name."""
    tick_s = _tick_s(timeline.makespan_s)

    def ticks(times_s: NDArray[Any]) -> NDArray[np.int64]:
        return np.asarray(np.rint(times_s / tick_s), np.int64)

    fused = bool((timeline.kind == KINDS.index("F‖B")).any())
    is_backward = (timeline.kind != KINDS.index("F")) & (timeline.kind != KINDS.index("F‖B"))
    start = ticks(timeline.start_s)
    columns: dict[str, NDArray[Any]] = {
        "bounds": np.searchsorted(timeline.rank, np.arange(timeline.ranks + 1)),
        "kind": timeline.kind + _CRITICAL * timeline.critical.astype(np.uint8),
        "stage": np.where(is_backward, timeline.backward_stage, timeline.stage),
        "micro_batch": np.where(is_backward, timeline.backward_micro_batch, timeline.micro_batch),
        "start": start,
        "duration": ticks(timeline.end_s) - start,
        # Limit the slack to 31 bits, the range that the packing can hold.
        "slack": np.minimum(ticks(np.maximum(timeline.slack_s, 0)), 2**31 - 1),
        "virtual_stage_of_stage": virtual_stage_of_stage(timeline),
    }
    if fused:
        columns["backward_stage"] = timeline.backward_stage
        columns["backward_micro_batch"] = timeline.backward_micro_batch
    idle_start = ticks(timeline.idle_start_s)
    columns |= {
        "idle_bounds": np.searchsorted(timeline.idle_rank, np.arange(timeline.ranks + 1)),
        "idle_start": idle_start,
        "idle_duration": ticks(timeline.idle_end_s) - idle_start,
        "idle_cause": timeline.idle_cause,
    }
    if len(timeline.transfer_from_rank) > _MAX_TRANSFERS:
        notes.append(
            f"{label}: {counted(len(timeline.transfer_from_rank), 'transfer')} left out to keep the page small."
        )
    else:
        columns |= _transfer_columns(timeline, ticks)
    if len(timeline.sync_stage):
        syncs, sync_rank = sync_rows(timeline)
        sync_start = ticks(timeline.sync_start_s[syncs])
        columns |= {
            "sync_rank": sync_rank,
            "sync_start": sync_start,
            "sync_duration": ticks(timeline.sync_end_s[syncs]) - sync_start,
        }
    meta: dict[str, Any] = {
        "label": label,
        "summary": summary(timeline),
        "ranks": timeline.ranks,
        "row": timeline.row,
        "names": [printable(name) for name in timeline.row_names],
        "stages": timeline.stages,
        "virtual_stages_per_rank": timeline.virtual_stages_per_rank,
        "makespan_s": timeline.makespan_s,
        "tick_s": tick_s,
        "actions": len(timeline.rank),
        "fused": fused,
        "caps": drawn_caps(timeline),
    }
    if timeline.memory is not None:
        facts, curves = _memory_columns(timeline, ticks, label, notes, top_bytes)
        if timeline.memory_cap_bytes and not meta["caps"]:
            notes.append(far_cap(timeline, label))
        meta |= facts
        columns |= curves
    return meta, columns


def _transfer_columns(timeline: Timeline, ticks: Any) -> dict[str, NDArray[Any]]:
    order = np.argsort(timeline.transfer_start_s, kind="stable")
    start = ticks(timeline.transfer_start_s[order])
    return {
        "transfer_from": timeline.transfer_from_rank[order],
        "transfer_to": timeline.transfer_to_rank[order],
        "transfer_start": start,
        "transfer_duration": ticks(timeline.transfer_end_s[order]) - start,
        "transfer_kind": timeline.transfer_kind[order],
        "transfer_micro_batch": timeline.transfer_micro_batch[order],
    }


def _memory_columns(
    timeline: Timeline, ticks: Any, label: str, notes: list[str], max_bytes: float
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the step curves of all ranks, joined.

    Curves with too many points are reduced to the maximum of each column.
    """
    assert timeline.memory is not None  # noqa: S101 -- the caller asked
    at_most = max(64, _MAX_MEMORY_POINTS // timeline.ranks)
    curves = []
    for times_s, sizes in timeline.memory:
        edges_s, thinned = staircase(times_s, sizes, timeline.makespan_s, at_most)
        curves.append((edges_s[:-1], thinned))
    if any(len(times_s) > at_most for times_s, _ in timeline.memory):
        notes.append(f"{label}: memory curves show the maximum of each of {at_most:,} columns.")
    # Choose the unit so that sizes fit into 31 bits, as a power of two, so that the division is exact.
    unit_bytes = 2.0 ** max(0, math.ceil(math.log2(max(max_bytes, 1) / 2**31)))
    sizes = np.concatenate([sizes for _, sizes in curves])
    return (
        {"memory_unit": unit_bytes, "memory_top": max(max_bytes / unit_bytes, 1e-9)},
        {
            "memory_bounds": np.cumsum([0] + [len(times_s) for times_s, _ in curves]),
            "memory_time": ticks(np.concatenate([times_s for times_s, _ in curves])),
            "memory_size": np.rint(sizes / unit_bytes).astype(np.int64),
        },
    )


def _tick_s(makespan_s: float) -> float:
    """Return the smallest power of ten in seconds of which `makespan_s` has less than 2^31.

    A decimal tick holds decimal costs exactly, so that equal actions stay equal and pack well.
    """
    if makespan_s <= SHORTEST_S:
        return 1.0
    return float(f"1e{math.ceil(math.log10(makespan_s / 2**31))}")


def _pack(values: NDArray[Any]) -> bytes:
    """Return the differences modulo 2^32, zigzag-encoded and compressed, as base64 text.

    Zigzag encoding keeps small negative numbers small.

    All lowest bytes come first, then all second bytes, and so on. Three quarters of the bytes of small numbers are then
    one long run of zeros, which compresses to almost nothing.
    """
    differences = np.diff(np.asarray(values).astype("<u4"), prepend=np.uint32(0)).view("<i4")
    folded = (differences << 1) ^ (differences >> 31)
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 4).T)
    return base64.b64encode(zlib.compress(planes.tobytes(), 1))


def _marks() -> dict[str, Any]:
    """Return fill, ink and pattern of each kind of box, for light and dark mode."""
    boxes = [*palette.KIND_COLOURS, *(f"idle-{cause}" for cause in CAUSES), "virtual_stage", "sync", "memory", "free"]
    boxes += [f"lane-{name}" for name in TRANSFER_KINDS]
    return {
        name: {"fill": look.fill, "ink": [palette.ink_on(fill) for fill in look.fill], "hatch": look.hatch}
        for name in boxes
        if (look := palette.look(name)).fill
    }


def _lines() -> dict[str, Any]:
    looks = {name: palette.look(name) for name in ("cap", "critical", *TRANSFER_KINDS)}
    return {name: {"colour": look.stroke, "dash": look.dash_px or ()} for name, look in looks.items()}


def _present(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the kinds that occur in the timelines. Legend and switches contain only these."""
    used = {KINDS[code] for timeline in timelines for code in np.unique(timeline.kind).tolist()}
    if "F‖B" in used:
        # A fused pair is drawn as a forward above a backward, so both need a legend.
        used |= {"F", "B"}
    causes = {CAUSES[code] for timeline in timelines for code in np.unique(timeline.idle_cause).tolist()}
    sent = {
        TRANSFER_KINDS[code]
        for timeline in timelines
        if len(timeline.transfer_kind) <= _MAX_TRANSFERS
        for code in np.unique(timeline.transfer_kind).tolist()
    }
    return {
        "kinds": [kind for kind in ("F", "B", "I", "W") if kind in used],
        "causes": [cause for cause in CAUSES if cause in causes],
        "transfers": [name for name in TRANSFER_KINDS if name in sent],
        "bar": barred(timelines),
        "memory": any(timeline.memory is not None for timeline in timelines),
        "caps": any(drawn_caps(timeline) for timeline in timelines),
        "critical": any(bool(timeline.critical.any()) for timeline in timelines),
        "sync": any(len(timeline.sync_stage) for timeline in timelines),
    }
