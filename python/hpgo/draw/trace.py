"""Timelines as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A rank is a process with a thread for computation and threads for messages that it sends and receives. Overlapping
messages use further threads, because slices of one thread must nest. A flow arrow leads from each send to its receive,
and a counter shows the memory. Times are in microseconds, as the format requires.
"""

from __future__ import annotations

import heapq
import json
from typing import TYPE_CHECKING

import numpy as np

from hpgo.draw.facts import names, rank_name, sync_rows, title
from hpgo.programs.schedule import KINDS
from hpgo.timing.measures import CAUSES, TRANSFER_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.draw.options import DrawOptions
    from hpgo.timing.timeline import Timeline

_COMPUTE, _IDLE, _SYNC = 0, 1, 2
_SEND, _RECEIVE = 10, 1000
"""Number of the first thread for sends and for receives. Overlapping messages use the following numbers."""
_COLOURS = ("thread_state_running", "thread_state_iowait", "rail_response", "good", "thread_state_running")


def trace(timelines: Sequence[Timeline], options: DrawOptions) -> bytes:
    """Return the trace as UTF-8 JSON. Each of several timelines has a separate range of process numbers."""
    events: list[str] = []
    labels = names(timelines, options.labels)
    about = []
    first_pid = 0
    for timeline, label in zip(timelines, labels, strict=True):
        prefix = f"{label}: " if len(timelines) > 1 else ""
        events += _events(timeline, first_pid, prefix)
        about.append(
            {
                "label": label,
                "title": options.title or title(timelines, labels),
                "first_pid": first_pid,
                "schedule": timeline.schedule,
                "ranks": timeline.ranks,
                "stages": timeline.stages,
                "virtual_stages_per_rank": timeline.virtual_stages_per_rank,
                "micro_batches": timeline.micro_batches,
                "makespan_s": timeline.makespan_s,
                "memory_cap_bytes": timeline.memory_cap_bytes,
            }
        )
        first_pid += timeline.ranks
    head = f'{{"displayTimeUnit":"ms","otherData":{{"hpgo":{json.dumps(about)}}},"traceEvents":[\n'
    return (head + ",\n".join(events) + "\n]}\n").encode()


def _events(timeline: Timeline, first_pid: int, prefix: str) -> Iterator[str]:
    for rank in range(timeline.ranks):
        pid = first_pid + rank
        yield _named(pid, "process_name", f"{prefix}{rank_name(timeline, rank)}")
        yield f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{pid}}}}}'
        yield _named(pid, "thread_name", "compute", _COMPUTE)
    columns = zip(
        timeline.rank.tolist(), timeline.kind.tolist(), timeline.stage.tolist(), timeline.micro_batch.tolist(),
        timeline.backward_stage.tolist(), timeline.backward_micro_batch.tolist(), (timeline.start_s * 1e6).tolist(),
        ((timeline.end_s - timeline.start_s) * 1e6).tolist(), timeline.critical.tolist(),
        (timeline.slack_s * 1e6).tolist(), strict=True,
    )  # fmt: skip
    for rank, code, stage, batch, backward_stage, backward_batch, ts, dur, critical, slack in columns:
        kind = KINDS[code]
        name = f"F{batch} B{backward_batch}" if kind == "F‖B" else f"{kind}{batch if kind == 'F' else backward_batch}"
        yield (
            # Format by hand, because `json.dumps` is slower and there may be millions of events.
            f'{{"ph":"X","cat":"compute","name":"{name}","pid":{first_pid + rank},"tid":{_COMPUTE},"ts":{ts!r},'
            f'"dur":{dur!r},"cname":"{_COLOURS[code]}","args":{{"kind":"{kind}","stage":{stage},"micro_batch":{batch},'
            f'"backward_stage":{backward_stage},"backward_micro_batch":{backward_batch},'
            f'"critical":{"true" if critical else "false"},"slack":{slack!r}}}}}'
        )
    yield from _idle_events(timeline, first_pid)
    yield from _transfer_events(timeline, first_pid)
    yield from _sync_events(timeline, first_pid)
    for rank, (times_s, sizes) in enumerate(timeline.memory or ()):
        for ts, size in zip((times_s * 1e6).tolist(), sizes.tolist(), strict=True):
            yield (
                f'{{"ph":"C","name":"memory","pid":{first_pid + rank},"ts":{ts!r},"args":{{"bytes":{float(size)!r}}}}}'
            )


def _idle_events(timeline: Timeline, first_pid: int) -> Iterator[str]:
    """Yield the intervals of idle time, on a separate thread."""
    for rank in np.unique(timeline.idle_rank).tolist():
        yield _named(first_pid + rank, "thread_name", "idle, by cause", _IDLE)
    for rank, cause, ts, end in zip(
        timeline.idle_rank.tolist(), timeline.idle_cause.tolist(), (timeline.idle_start_s * 1e6).tolist(),
        (timeline.idle_end_s * 1e6).tolist(), strict=True,
    ):  # fmt: skip
        yield (
            f'{{"ph":"X","cat":"idle","name":"{CAUSES[cause]}","pid":{first_pid + rank},"tid":{_IDLE},"ts":{ts!r},'
            f'"dur":{end - ts!r},"cname":"grey"}}'
        )


def _transfer_events(timeline: Timeline, first_pid: int) -> Iterator[str]:
    """Yield two slices for each transfer, where it is sent and where it is received, and the arrow between them."""
    order = np.argsort(timeline.transfer_start_s, kind="stable")
    lanes: dict[tuple[int, int], _Lanes] = {}
    columns = zip(
        timeline.transfer_from_rank[order].tolist(), timeline.transfer_to_rank[order].tolist(),
        timeline.transfer_stage[order].tolist(), timeline.transfer_micro_batch[order].tolist(),
        timeline.transfer_kind[order].tolist(), (timeline.transfer_start_s[order] * 1e6).tolist(),
        (timeline.transfer_end_s[order] * 1e6).tolist(), strict=True,
    )  # fmt: skip
    for number, (sender, receiver, stage, batch, code, ts, end) in enumerate(columns):
        kind = TRANSFER_KINDS[code]
        name, dur = f"{kind} {batch}", end - ts
        args = f'{{"kind":"{kind}","stage":{stage},"micro_batch":{batch},"from":{sender},"to":{receiver}}}'
        for rank, base, lane_name in ((sender, _SEND, "send"), (receiver, _RECEIVE, "receive")):
            lane, is_new = lanes.setdefault((rank, base), _Lanes()).take(ts, end)
            pid, tid = first_pid + rank, base + lane
            if is_new:
                yield _named(pid, "thread_name", lane_name if lane == 0 else f"{lane_name} {lane + 1}", tid)
            yield (
                f'{{"ph":"X","cat":"{lane_name}","name":"{name}","pid":{pid},"tid":{tid},"ts":{ts!r},"dur":{dur!r},'
                f'"args":{args}}}'
            )
            arrow = '"ph":"s"' if base == _SEND else '"ph":"f","bp":"e"'
            at = ts if base == _SEND else end
            yield (
                f'{{{arrow},"cat":"transfer","name":"{kind}","id":{first_pid * 2**32 + number},"pid":{pid},"tid":{tid},'
                f'"ts":{at!r}}}'
            )


class _Lanes:
    """Threads for slices that may overlap. Each slice gets a thread that is free."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, int]] = []
        self.free: list[int] = []

    def take(self, start: float, end: float) -> tuple[int, bool]:
        """Return a thread that is free at `start`, and whether it is new. Mark it as busy until `end`."""
        while self.busy and self.busy[0][0] <= start:
            heapq.heappush(self.free, heapq.heappop(self.busy)[1])
        is_new = not self.free
        lane = len(self.busy) if is_new else heapq.heappop(self.free)
        heapq.heappush(self.busy, (end, lane))
        return lane, is_new


def _sync_events(timeline: Timeline, first_pid: int) -> Iterator[str]:
    if not len(timeline.sync_stage):
        return
    syncs, ranks = sync_rows(timeline)
    columns = (timeline.sync_stage[syncs], ranks, timeline.sync_start_s[syncs], timeline.sync_end_s[syncs])
    for stage, rank, start_s, end_s in zip(*(column.tolist() for column in columns), strict=True):
        pid = first_pid + rank
        yield _named(pid, "thread_name", "gradient reduction", _SYNC)
        ts, dur = start_s * 1e6, (end_s - start_s) * 1e6
        yield (
            f'{{"ph":"X","cat":"sync","name":"reduce gradients of stage {stage}","pid":{pid},"tid":{_SYNC},"ts":{ts!r},'
            f'"dur":{dur!r},"args":{{"stage":{stage}}}}}'
        )


def _named(pid: int, what: str, name: str, tid: int | None = None) -> str:
    thread = "" if tid is None else f'"tid":{tid},'
    return f'{{"ph":"M","pid":{pid},{thread}"name":"{what}","args":{{"name":{json.dumps(name)}}}}}'
