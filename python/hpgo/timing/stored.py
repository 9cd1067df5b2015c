"""Timelines as files: JSON with every column, or npz with arrays of the actions and JSON for the rest.

Files may come from anywhere, so everything is checked before it is used. Sizes are checked before memory is allocated,
and each column for its type, its length and its range.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zipfile
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from hpgo.base.documents import Section, hinted, parse, read_text
from hpgo.base.files import MAX_BYTES_OF_RUNS, as_path, refused
from hpgo.base.messages import as_float, safe_repr
from hpgo.errors import ArgumentError
from hpgo.programs.schedule import KINDS
from hpgo.timing.laws import check_file
from hpgo.timing.measures import CAUSES, TRANSFER_KINDS, Measures

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from numpy.typing import NDArray

FIELDS = (
    "schedule", "ranks", "stages", "virtual_stages_per_rank", "micro_batches", "iterations", "communication",
    "memory_cap_bytes", "row", "devices", "title", "row_names", "notes",
)  # fmt: skip
"""Fields of a timeline that are stored beside its columns. The makespan is one of the measures."""

_FORMAT = "hpgo-timeline-1"
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})|\((\d{1,9})F(\d{1,9});(\d{1,9})B(\d{1,9})\)OVERLAP_F_B")
_COLUMNS = (
    "rank", "stage", "micro_batch", "kind", "backward_stage", "backward_micro_batch", "start_s", "end_s",
)  # fmt: skip
_MAX_BYTES = 2**31  # limit on the unpacked size, because a small zip file can unpack to terabytes
_MAX_RANKS = 2**24
_HINT = "write it again with `Timeline.save`, as .npz or .timeline.json"


def document(facts: Mapping[str, Any], parts: Any, texts: Sequence[str] | None) -> dict[str, Any]:
    """Return a timeline as a JSON document.

    `texts` are its actions in PyTorch's notation, or None if columns hold them.
    """
    measures = {field.name: getattr(parts["measures"], field.name) for field in fields(Measures)}
    measures["idle_by_cause_s"] = dict(zip(CAUSES, measures["idle_by_cause_s"], strict=True))
    written = {"format": _FORMAT} | dict(facts) | measures
    if texts is not None:
        lines: list[list[dict[str, Any]]] = [[] for _ in range(facts["ranks"])]
        times = parts["times"]
        rows = zip(
            parts["actions"]["rank"].tolist(), texts, times["start_s"].tolist(), times["end_s"].tolist(), strict=True
        )
        for rank, action, start_s, end_s in rows:
            lines[rank].append({"action": action, "start_s": start_s, "end_s": end_s})
        written["actions"] = lines
    for part in ("transfers", "syncs", "idle"):
        written[part] = {name: column.tolist() for name, column in parts[part].items()}
    written["slack_s"] = parts["slack"]["slack_s"].tolist()
    written["memory"] = parts["memory"] and [
        {"time_s": time_s.tolist(), "bytes": held.tolist()} for time_s, held in parts["memory"]
    ]
    return written


def write_npz(file: BinaryIO, written: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> None:
    """Write the columns of actions as arrays, and the document with everything else as text."""
    import numpy as np

    np.savez(file, document=np.array(json.dumps(written)), **{name: columns[name] for name in _COLUMNS})  # type: ignore[arg-type]  # `allow_pickle` is none of them


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and parts of the timeline in a file.

    Raise ArgumentError with the name of the file and the fault.
    """
    path = as_path(path, ArgumentError)
    if path.suffix.lower() != ".npz":
        return of_text(read_text(path, ArgumentError, maximum=MAX_BYTES_OF_RUNS), str(path))
    try:
        # An npz file is read from its end. A pipe has none, and reading a device may never stop.
        if path.exists() and not (path.is_file() or path.is_dir()):
            _fail(path, "is a device or a pipe, but npz is read from its end")
        with path.open("rb") as file:
            text, columns = _unpacked(file, str(path))
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        if isinstance(failure, ArgumentError):
            raise
        raise refused("read", path, failure, ArgumentError, "name a timeline file") from None
    return of_text(text, str(path), columns)


def of_text(
    text: str, source: str, columns: dict[str, NDArray[Any]] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields and parts of a timeline in JSON text. Raise ArgumentError with the name `source` and the fault.

    The text also contains the actions, unless `columns` hold them.
    """
    if not text.lstrip().startswith("{"):
        _fail(source, "is not a timeline")
    with hinted(_HINT):
        top = Section(parse(text, source, ArgumentError), source, ArgumentError)
        if top.get("format", None) != _FORMAT:
            _fail(source, "is not a timeline")
        return _parts(top, columns)


def _fail(path: object, message: str) -> NoReturn:
    raise ArgumentError(f"`{path}` {message}", _HINT, code="damaged_file")


# --- npz --------------------------------------------------------------------------------------------------------------


def _unpacked(file: BinaryIO, path: str) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return the document and the columns of actions. Creates each array only when its bytes have been read."""
    import numpy as np

    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            # The archive's directory states the sizes, so this check needs no unpacking.
            if sum(sizes.values()) > _MAX_BYTES:
                _fail(path, f"holds more than {_MAX_BYTES >> 20} MiB")
            arrays = {}
            for name in ("document", *_COLUMNS):
                if f"{name}.npy" not in sizes:
                    _fail(path, f"holds no timeline: `{name}` is missing")
                with archive.open(f"{name}.npy") as member:
                    arrays[name] = _array(member.read(), name, path)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as failure:
        # An error number means that reading failed. Without one, zipfile reports a damaged archive.
        if isinstance(failure, OSError) and failure.errno is not None:
            raise
        _fail(path, f"holds no timeline: {failure}")
    # zlib and numpy raise many kinds of errors for damaged data, and none of them is a fault of hpgo.
    except Exception as failure:
        if isinstance(failure, ArgumentError):
            raise
        _fail(path, f"holds no timeline: {failure}")
    text = arrays.pop("document")
    if text.ndim != 0 or text.dtype.kind != "U":
        _fail(path, "holds no timeline: `document` is not text")
    # numpy reads the bytes as characters without checking that they are valid. Decoding checks it.
    codes = np.frombuffer(text.tobytes(), f"{text.dtype.str[0]}u4").astype("<u4")
    try:
        return codes.tobytes().decode("utf-32-le").rstrip("\0"), arrays
    except UnicodeDecodeError:
        _fail(path, "holds no timeline: `document` is not text")


def _array(data: bytes, name: str, path: str) -> NDArray[Any]:
    import io

    import numpy as np

    # `np.load` would allocate what the header claims. Parse the header here, and compare it with the bytes that exist.
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        _fail(path, f"holds no timeline: `{name}` has an unknown version")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns about headers of Python 2, whose meaning it guesses
        shape, _, kind = header(stream)
    begin = stream.tell()
    if kind.hasobject or kind.kind not in "iufU" or math.prod(shape) * kind.itemsize != len(data) - begin:
        _fail(path, f"holds no timeline: `{name}` is damaged")
    return np.frombuffer(data, kind, offset=begin).reshape(shape)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _parts(top: Section, columns: dict[str, NDArray[Any]] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    import numpy as np

    ranks = top.whole("ranks", minimum=1)
    if ranks > _MAX_RANKS:
        top.wrong("ranks", f"at most {_MAX_RANKS}", ranks)
    stages = top.whole("stages", minimum=1)
    makespan_s = top.finite("makespan_s")
    facts = {
        "schedule": top.text("schedule"),
        "ranks": ranks,
        "stages": stages,
        "virtual_stages_per_rank": top.whole("virtual_stages_per_rank", minimum=1),
        "micro_batches": top.whole("micro_batches"),
        "iterations": top.whole("iterations", minimum=1),
        "communication": top.text("communication"),
        "makespan_s": makespan_s,
        "memory_cap_bytes": _each_rank(top, "memory_cap_bytes", ranks, may_lack=True),
        "row": top.text("row", "rank"),  # older files have no such field
    }
    devices: tuple[int, ...] = ()
    if "devices" in top and top.items("devices"):
        devices = tuple(map(int, _each_rank(top, "devices", ranks) or ()))
        if min(devices) < 1:
            top.wrong("devices", "at least one for each rank", min(devices))
        facts["devices"] = devices
    facts["title"] = top.text("title", "")
    if "row_names" in top and (names := top.items("row_names")):
        if len(names) != ranks or not all(isinstance(name, str) for name in names):
            top.wrong("row_names", f"a name for each of {ranks} ranks, or none", names)
        facts["row_names"] = tuple(names)
    if "notes" in top:
        notes = top.items("notes")
        if not all(isinstance(note, str) for note in notes):
            top.wrong("notes", "texts", notes)
        facts["notes"] = tuple(notes)
    if facts["row"] not in {"rank", "stage", "group"}:
        top.wrong("row", "rank, stage or group", facts["row"])
    actions = _columns_of(top, ranks) if columns is None else columns
    count = len(actions["rank"]) if actions["rank"].ndim == 1 else 0
    limits = {"rank": ranks, "stage": stages, "backward_stage": stages, "kind": len(KINDS)}
    checked = {name: _checked(top, name, actions[name], count, limits.get(name, 2**31)) for name in _COLUMNS}
    # The readers use the rows of a rank as one range.
    if (np.diff(checked["rank"]) < 0).any():
        top.fail("`rank` is not in order", _HINT)
    parts: dict[str, Any] = {
        "times": {"start_s": checked.pop("start_s"), "end_s": checked.pop("end_s")},
        "actions": {name: column.astype(np.uint8 if name == "kind" else np.int32) for name, column in checked.items()},
        "transfers": _part(
            top, "transfers", ("from_rank", "to_rank", "stage", "micro_batch", "kind", "start_s", "end_s"),
            {"from_rank": ranks, "to_rank": ranks, "stage": stages, "micro_batch": 2**31, "kind": len(TRANSFER_KINDS)},
        ),
        "syncs": _part(top, "syncs", ("stage", "start_s", "end_s", "optimizer_end_s"), {"stage": stages}),
        "idle": _part(top, "idle", ("rank", "start_s", "end_s", "cause"), {"rank": ranks, "cause": len(CAUSES)}),
        "slack": {"slack_s": _checked(top, "slack_s", _column(top, "slack_s"), count, None)},
        "memory": _curves(top, ranks),
        "measures": _measures(top, ranks),
    }  # fmt: skip
    # Mark the key as read: with columns from npz, nothing else reads it.
    if "actions" in top:
        top.get("actions")
    top.done()
    check_file(top.where, parts["measures"], devices)
    for part in ("times", "transfers", "syncs", "idle"):
        where = f"{top.where}, {'actions' if part == 'times' else part}"
        _check_span(parts[part], makespan_s, where)
    return facts, parts


def _check_span(columns: Mapping[str, NDArray[Any]], makespan_s: float, where: str) -> None:
    """Raise ArgumentError unless all entries start before they end, and end before the run does."""
    # Allow for rounding of the numbers in the file.
    last_s = makespan_s * (1 + 1e-9)
    if (columns["end_s"] < columns["start_s"]).any():
        raise ArgumentError(f"{where}: `end_s` is before `start_s`")
    for name in ("end_s", "optimizer_end_s"):
        if name in columns and (columns[name] > last_s).any():
            raise ArgumentError(f"{where}: `{name}` goes beyond the makespan, {makespan_s:g} s")


def _part(top: Section, part: str, names: Sequence[str], limits: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    import numpy as np

    section = top.within(part)
    found = {name: _column(section, name) for name in names}
    section.done()
    count = len(found[names[0]])
    kinds = {"kind": np.uint8, "cause": np.uint8}
    checked = {name: _checked(section, name, column, count, limits.get(name)) for name, column in found.items()}
    return {
        name: column.astype(kinds.get(name, np.uint32)) if name in limits else column
        for name, column in checked.items()
    }


def _column(section: Section, key: str) -> NDArray[Any]:
    """Return the list under `key` as an array of numbers."""
    import numpy as np

    values = section.items(key)
    # Compare types exactly: True is an instance of int, but no number in a file.
    if not all(type(value) in {int, float} for value in values):
        section.fail(f"`{key}` must be a list of numbers")
    try:
        return np.array(values, np.float64)
    except OverflowError:
        section.fail(f"`{key}` holds a number that is too large", code="too_large")


def _checked(section: Section, key: str, column: NDArray[Any], count: int, limit: int | None) -> NDArray[Any]:
    """Return the column if it has `count` numbers.

    With a `limit`, they must be whole numbers below it. Without one, they are seconds from 0.
    """
    import numpy as np

    if column.ndim != 1 or column.dtype.kind not in "iuf" or len(column) != count:
        section.fail(f"`{key}` must have {count} numbers, like the other columns")
    if column.dtype.kind == "f":  # 16-bit floats can't represent the limits, and values beyond doubles become infinite
        with np.errstate(over="ignore"):
            column = column.astype(np.float64)
    if not np.isfinite(column).all() or (column < 0).any():
        section.fail(f"`{key}` must be finite numbers, zero or more")
    if limit is None or key in {"start_s", "end_s"}:
        return column.astype(np.float64)
    if (column >= limit).any() or (column != np.floor(column)).any():
        section.fail(f"`{key}` must be whole numbers below {limit}")
    return column


def _curves(top: Section, ranks: int) -> tuple[tuple[NDArray[Any], NDArray[Any]], ...] | None:
    if top.get("memory") is None:
        return None
    rows = top.rows("memory")
    curves = []
    for row in rows:
        curve = rows.within(row)
        time_s, held = _column(curve, "time_s"), _column(curve, "bytes")
        curve.done()
        curves.append((
            _checked(curve, "time_s", time_s, len(time_s), None), _checked(curve, "bytes", held, len(time_s), None)
        ))  # fmt: skip
    if len(curves) != ranks:
        top.fail(f"`memory` has {len(curves)} curves for {ranks} ranks")
    return tuple(curves)


def _measures(top: Section, ranks: int) -> Measures:
    causes = top.within("idle_by_cause_s")
    idle = tuple(_number(causes, cause) for cause in CAUSES)
    causes.done()
    return Measures(
        **{
            name: _number(top, name)
            for name in ("makespan_s", "max_rank_span_s", "idle_over_total", "idle_over_busy", "idle_over_busiest")
        },
        busy_s=_each_rank(top, "busy_s", ranks) or (),
        idle_by_cause_s=idle,
        peak_in_flight=tuple(map(int, _each_rank(top, "peak_in_flight", ranks) or ())),
        peak_in_flight_freed_at_input_gradient=tuple(
            map(int, _each_rank(top, "peak_in_flight_freed_at_input_gradient", ranks) or ())
        ),
        messages=top.whole("messages"),
        peak_memory_bytes=_each_rank(top, "peak_memory_bytes", ranks, may_lack=True),
        bytes_sent=_each_rank(top, "bytes_sent", ranks, may_lack=True),
    )


def _number(section: Section, key: str) -> float:
    """Return a number that is at least 0 and not NaN. It may be infinite: a rate of an action that takes no time."""
    number = section.number(key)
    # Without idle time, rounding can make a share slightly negative.
    return number if number >= -1e-6 else section.wrong(key, "a number, zero or more", number)


def _each_rank(top: Section, key: str, ranks: int, *, may_lack: bool = False) -> tuple[float, ...] | None:
    if may_lack and top.get(key) is None:
        return None
    column = _checked(top, key, _column(top, key), ranks, None)
    return tuple(column.tolist())


def _columns_of(top: Section, ranks: int) -> dict[str, NDArray[Any]]:
    """Return the columns of actions from lists of text, one list per rank."""
    import numpy as np

    lines = top.items("actions")
    if len(lines) != ranks:
        top.fail(f"`actions` has {len(lines)} lines for {ranks} ranks")
    rows, times = [], []
    for rank, line in enumerate(lines):
        if not isinstance(line, list):
            top.wrong("actions", "lists of actions", line)
        for entry in line:
            if not isinstance(entry, dict) or entry.keys() != {"action", "start_s", "end_s"}:
                top.fail(f"an entry of rank {rank} is not an action with start_s and end_s")
            text, seconds = entry["action"], (entry["start_s"], entry["end_s"])
            match = _ACTION.fullmatch(text) if isinstance(text, str) else None
            if match is None or not all(type(second) in {int, float} for second in seconds):
                top.fail(f"rank {rank} has {safe_repr(text)} from {safe_repr(seconds[0])} to {safe_repr(seconds[1])}")
            times.append(tuple(map(as_float, seconds)))
            stage, letter, micro_batch, *pair = match.groups()
            if letter is None:
                forward_stage, forward, backward_stage, backward = map(int, pair)
                rows.append((rank, forward_stage, forward, KINDS.index("F‖B"), backward_stage, backward))
            else:
                at = int(stage), int(micro_batch)
                rows.append((rank, *at, KINDS.index(letter), *at))
    table, ends = np.array(rows, np.int64).reshape(-1, 6), np.array(times, np.float64).reshape(-1, 2)
    columns: dict[str, NDArray[Any]] = {name: table[:, at].copy() for at, name in enumerate(_COLUMNS[:6])}
    return columns | {"start_s": ends[:, 0].copy(), "end_s": ends[:, 1].copy()}
