"""Timelines: simulated or measured runs, with start and end of every action and the results derived from them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_text
from hpgo.base.files import as_path, writing
from hpgo.base.laws import difference, share_left
from hpgo.base.memory_check import check_room
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import Presented, present
from hpgo.base.quoting import in_whole_letters
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, HpgoError
from hpgo.programs.schedule import KINDS
from hpgo.timing import stored
from hpgo.timing.laws import checked
from hpgo.timing.measures import CAUSES, Measures

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hpgo import _core
    from hpgo.programs.schedule import Schedule


# Bytes of memory for each action, as measured: of one part of a timeline, and of the work to write each kind of file.
_PART_BYTES, _JSON_BYTES, _NPZ_BYTES, _TRACE_BYTES, _PICTURE_BYTES = 80, 900, 650, 3500, 150


def check_picture(timelines: Sequence[Timeline], ending: str) -> None:
    """Raise HpgoError if a picture of `timelines` needs more memory than is free."""
    each = _TRACE_BYTES if ending == ".json" else _PICTURE_BYTES
    _check_room(sum(len(timeline.rank) for timeline in timelines), f"`{ending}`", each)


def _check_room(actions: int, what: str, action_bytes: float) -> None:
    hint = "ask for fewer micro-batches, or write `.svg` or `.npz`, which need the least memory"
    check_room(f"{what} of {actions:,} actions", actions * action_bytes, hint)


class _Parts:
    """Parts of a timeline that are computed on first access and then kept."""

    __slots__ = ("_compute", "_known")

    NAMES = ("actions", "times", "transfers", "syncs", "idle", "slack", "memory", "measures")

    def __init__(self, known: dict[str, Any], compute: Callable[[str], Any] | None) -> None:
        self._known = known
        self._compute = compute

    def __getitem__(self, name: str) -> Any:
        if name not in self._known and self._compute is not None:
            self._known[name] = self._compute(name)
        return self._known[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Parts):
            return NotImplemented
        return self is other or all(_is_equal(self[name], other[name]) for name in self.NAMES)

    __hash__ = None  # type: ignore[assignment]  # parts are arrays

    def __reduce__(self) -> tuple[Any, ...]:
        # The function that computes parts refers to the native simulation, which can't be pickled. So compute all parts
        # first.
        return _Parts, ({name: self[name] for name in self.NAMES}, None)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values of parts are equal, also within dicts and sequences, and NaN to NaN."""
    import numpy as np

    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == other.dtype.kind == "f")
    return bool(one == other)


class _Column:
    """An array that is a column of one of the parts."""

    def __init__(self, part: str, name: str) -> None:
        self._place = (part, name)

    def __get__(self, timeline: Timeline | None, owner: type) -> NDArray[Any]:
        if timeline is None:
            raise AttributeError(self._place[1])
        part, name = self._place
        column: NDArray[Any] = timeline._parts[part][name]
        return column


@dataclass(frozen=True, eq=False)
class Timeline(Presented, Record):
    """A run of a schedule. Arrays have one entry per action, ordered by rank, then by start.

    Arrays, memory and measures are computed on first access. Timelines with equal fields, arrays and measures are
    equal, such as a copy.
    """

    schedule: str
    ranks: int
    stages: int
    """Number of stages over all chains."""
    virtual_stages_per_rank: int
    """Virtual stages per rank in one chain. The largest number if ranks differ."""
    micro_batches: int
    """Number of micro-batches in one iteration, over all chains."""
    iterations: int
    communication: str
    makespan_s: float
    memory_cap_bytes: tuple[float, ...] | None
    """Memory limit of each rank in bytes. None if there is none."""
    _parts: _Parts
    row: str = "rank"
    """Meaning of a rank: a `rank`, a `stage`, or a `group` of stages. Several devices may run a stage or a group."""
    devices: tuple[int, ...] = ()
    """Number of devices that each rank stands for. Empty if each stands for one."""
    title: str = ""
    """Model and cluster, for titles. Empty if unknown."""
    row_names: tuple[str, ...] = ()
    """Description of each rank. Empty if the number is enough."""
    notes: tuple[str, ...] = ()
    """Caveats for comparisons with other runs, for instance parts of backward passes that don't add up."""

    def __post_init__(self) -> None:
        if isinstance(
            self.schedule, str
        ):  # names are only displayed, so invalid characters are replaced instead of rejected
            object.__setattr__(self, "schedule", in_whole_letters(self.schedule))
        check_fields(self)
        if not (self.ranks and self.stages and self.virtual_stages_per_rank):
            raise ArgumentError("a timeline has no ranks or stages", "make one with `hpgo.simulate`")
        if len(self.row_names) not in {0, self.ranks}:
            raise ArgumentError(
                f"a timeline of {self.ranks} ranks has {len(self.row_names)} row names", "name each rank, or none"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        # Compare the arrays last, because they may have to be computed.
        names = sorted((field.name for field in fields(self)), key="_parts".__eq__)
        return self is other or all(getattr(self, name) == getattr(other, name) for name in names)

    def __hash__(self) -> int:
        return hash((self.schedule, self.ranks, self.stages, self.micro_batches, self.iterations, self.makespan_s))

    rank = _Column("actions", "rank")
    stage = _Column("actions", "stage")
    """Stage of the action. For a fused pair, the stage of the forward."""
    micro_batch = _Column("actions", "micro_batch")
    """Micro-batch of the action, numbered through all iterations."""
    kind = _Column("actions", "kind")
    """Index of the action's kind in `hpgo.programs.schedule.KINDS`."""
    backward_stage = _Column("actions", "backward_stage")
    """Stage of the backward in a fused pair. Equal to `stage` for other actions."""
    backward_micro_batch = _Column("actions", "backward_micro_batch")
    start_s = _Column("times", "start_s")
    end_s = _Column("times", "end_s")
    transfer_from_rank = _Column("transfers", "from_rank")
    transfer_to_rank = _Column("transfers", "to_rank")
    transfer_stage = _Column("transfers", "stage")
    """Stage that sends the message."""
    transfer_micro_batch = _Column("transfers", "micro_batch")
    transfer_kind = _Column("transfers", "kind")
    """Index of the tensor's kind in `TRANSFER_KINDS`."""
    transfer_start_s = _Column("transfers", "start_s")
    transfer_end_s = _Column("transfers", "end_s")
    sync_stage = _Column("syncs", "stage")
    """Stages whose gradients are reduced. The optimizer step follows."""
    sync_start_s = _Column("syncs", "start_s")
    sync_end_s = _Column("syncs", "end_s")
    optimizer_end_s = _Column("syncs", "optimizer_end_s")
    idle_rank = _Column("idle", "rank")
    idle_start_s = _Column("idle", "start_s")
    idle_end_s = _Column("idle", "end_s")
    idle_cause = _Column("idle", "cause")
    """Index of the cause in `CAUSES`."""
    slack_s = _Column("slack", "slack_s")
    """Seconds by which each action could end later with the same makespan, for fixed action lists and message
    durations."""

    @property
    def critical(self) -> NDArray[np.bool_]:
        """Whether each action is on a critical path, that is, has no slack."""
        # Slack is a difference of sums, so rounding leaves small positive values.
        on_path: NDArray[np.bool_] = self.slack_s <= 1e-9 * self.makespan_s
        return on_path

    @property
    def activations_held(self) -> float:
        """Largest number of activations that a rank holds at once, in units of its whole part of the model.

        `Measures.peak_in_flight` counts activations of single virtual stages, which are smaller if a rank has several.

        >>> import hpgo
        >>> hpgo.simulate(hpgo.schedule("interleaved", ranks=4, micro_batches=8)).activations_held
        5.5
        """
        return max(self.measures.peak_in_flight, default=0) / self.virtual_stages_per_rank

    @property
    def memory(self) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] | None:
        """Memory of each rank as a step function: times, and the bytes from each time on. None if memory is unknown."""
        curves: tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] | None = self._parts["memory"]
        return curves

    @property
    def measures(self) -> Measures:
        """Results of the run."""
        measures: Measures = self._parts["measures"]
        return measures

    def action_texts(self) -> list[str]:
        """Return each action in PyTorch's notation: `0F0`, or `(0F7;7B3)OVERLAP_F_B`."""
        # Convert whole columns with `tolist`: reading numpy arrays one number at a time is many times slower.
        columns = (self.kind, self.stage, self.micro_batch, self.backward_stage, self.backward_micro_batch)
        return [
            f"{stage}{KINDS[kind]}{micro_batch}"
            if kind < 4
            else f"({stage}F{micro_batch};{back_stage}B{back_micro_batch})OVERLAP_F_B"
            for kind, stage, micro_batch, back_stage, back_micro_batch in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]

    def to_json(self) -> str:
        """Return the whole timeline as a JSON document, which `Timeline.from_json` and `Timeline.read` accept."""
        _check_room(len(self.rank), "JSON", _JSON_BYTES)
        return json.dumps(self._document(), ensure_ascii=False)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write a picture or the data, as the file's ending states. Return the path.

        `.npz` and `.timeline.json` keep the data for `Timeline.read`. Every other ending is a picture, with the options
        of `hpgo.draw.save`. Raises ArgumentError for an unknown ending, HpgoError if the file can't be written.
        """
        # Pictures are drawn by a package that imports this one, so reach it by its registered name.
        path = as_path(path, HpgoError)
        ending = path.suffix.lower()
        if ending != ".npz" and not path.name.lower().endswith(".timeline.json"):
            drawn: Path = present("picture", self, path, **options)
            return drawn
        with writing(path, HpgoError) as file:
            if ending == ".npz":
                _check_room(len(self.rank), "npz", _NPZ_BYTES)
                stored.write_npz(
                    file, self._document(with_actions=False), self._parts["actions"] | self._parts["times"]
                )
            else:
                file.write(self.to_json().encode())
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a `.npz` or `.timeline.json` file that `save` wrote. Raise ArgumentError if it is invalid."""
        fields, parts = stored.read(path)
        return of_parts(parts, **fields)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the timeline") -> Timeline:
        """Read text that `to_json` wrote. Raise ArgumentError with the name `source` and the fault if it is invalid.

        >>> import hpgo
        >>> timeline = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4))
        >>> Timeline.from_json(timeline.to_json()).measures == timeline.measures
        True
        """
        check_text("a timeline", text)
        fields, parts = stored.of_text(text, check_text("the source of a timeline", source))
        return of_parts(parts, **fields)

    def __repr__(self) -> str:
        of = f"{pluralize(self.ranks, 'rank')}, {pluralize(self.micro_batches, 'micro-batch')}"
        return brief("Timeline", f"{shorten(self.schedule)}: {of}, {format_seconds(self.makespan_s)}")

    def _document(self, *, with_actions: bool = True) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in stored.FIELDS}
        return stored.document(facts, self._parts, self.action_texts() if with_actions else None)


def of_parts(parts: dict[str, Any], **facts: Any) -> Timeline:
    """Return the timeline with the fields `facts` and with `parts` that are all known."""
    return Timeline(**facts, _parts=_Parts(parts, None))


def of_simulation(
    simulated: _core.Simulation,
    schedule: Schedule,
    *,
    communication: str,
    iterations: int,
    stage_bytes: NDArray[np.float64] | None,
    memory_cap_bytes: tuple[float, ...] | None,
    row: str,
    devices: tuple[int, ...],
    title: str,
    row_names: tuple[str, ...],
    notes: tuple[str, ...],
) -> Timeline:
    """Return the timeline of a native simulation. `stage_bytes` has the columns of `hpgo.StageBytes`."""
    import numpy as np

    def compute(part: str) -> Any:
        # A part of a long run may need gigabytes, so compare with the free memory before computing it.
        _check_room(len(schedule.actions) * iterations, f"`{part}`", _PART_BYTES)
        if part == "slack":
            return {"slack_s": simulated.slack_s()}
        if part == "memory":
            return None if stage_bytes is None else tuple(simulated.memory(stage_bytes))
        if part == "measures":
            return measures()
        return getattr(simulated, part)()

    def measures() -> Measures:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in simulated.measures().items()
        }
        if devices:
            values |= weighed(values["busy_s"])
        if stage_bytes is not None:
            values["peak_memory_bytes"] = tuple(float(held.max()) for _, held in parts["memory"])
            transfers = parts["transfers"]
            # An activation is the output of its sender. A gradient has the size of the output of the stage before.
            sent = stage_bytes[transfers["stage"].astype(np.int64) - transfers["kind"], 5]
            by_rank = np.bincount(transfers["from_rank"], weights=sent, minlength=schedule.ranks)
            values["bytes_sent"] = tuple(by_rank.tolist())
        return checked(schedule.name, Measures(**values), devices)

    def weighed(busy_s: tuple[float, ...]) -> dict[str, Any]:
        """Return the idle time over all devices, if each rank stands for several."""
        counts, idle = np.array(devices), parts["idle"]
        total_s, all_busy_s = float(counts.sum()) * simulated.makespan_s, float(counts @ np.array(busy_s))
        lasting_s = (idle["end_s"] - idle["start_s"]) * counts[idle["rank"]]
        return {
            "idle_over_total": share_left(all_busy_s, total_s),
            "idle_over_busy": difference(total_s, all_busy_s) / all_busy_s if all_busy_s else 0.0,
            "idle_by_cause_s": tuple(np.bincount(idle["cause"], lasting_s, minlength=len(CAUSES)).tolist()),
        }

    parts = _Parts({}, compute)
    return Timeline(
        schedule=schedule.name,
        ranks=schedule.ranks,
        stages=schedule.stages,
        virtual_stages_per_rank=int(np.bincount(schedule.rank_of_stage[: schedule.stages_per_pipeline]).max()),
        micro_batches=schedule.total_micro_batches,
        iterations=iterations,
        communication=communication,
        makespan_s=simulated.makespan_s,
        memory_cap_bytes=memory_cap_bytes,
        _parts=parts,
        row=row,
        devices=devices,
        title=title,
        row_names=row_names,
        notes=notes,
    )
