"""A simulated or measured run: who did what from when to when, and what it amounts to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_text
from hpgo.base.files import as_path, writing
from hpgo.base.laws import difference, share_left
from hpgo.base.memory_check import check_room
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import present
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


# Bytes of memory for each action, measured: of one part, and of what becomes a file.
_PART_BYTES, _JSON_BYTES, _NPZ_BYTES, _TRACE_BYTES, _PICTURE_BYTES = 80, 900, 650, 3500, 150


def check_picture(timelines: Sequence[Timeline], ending: str) -> None:
    """Raises HpgoError if a picture of `timelines` needs more memory than is free."""
    each = _TRACE_BYTES if ending == ".json" else _PICTURE_BYTES
    _check_room(sum(len(timeline.rank) for timeline in timelines), f"`{ending}`", each)


def _check_room(actions: int, what: str, action_bytes: float) -> None:
    hint = "ask for fewer micro-batches; `.svg` and `.npz` take least"
    check_room(f"{what} of {actions:,} actions", actions * action_bytes, hint)


class _Parts:
    """What a timeline computes only when it is asked for, and then keeps."""

    __slots__ = ("_compute", "_known")

    NAMES = ("actions", "times", "transfers", "syncs", "idle", "slack", "memory", "measures")

    def __init__(self, known: dict[str, Any], compute: Callable[[str], Any] | None) -> None:
        self._known = known
        self._compute = compute

    def __getitem__(self, name: str) -> Any:
        if name not in self._known and self._compute is not None:
            self._known[name] = self._compute(name)
        return self._known[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Parts, ({name: self[name] for name in self.NAMES}, None)


class _Column:
    """An array that belongs to one of the parts."""

    def __init__(self, part: str, name: str) -> None:
        self._place = (part, name)

    def __get__(self, timeline: Timeline | None, owner: type) -> NDArray[Any]:
        if timeline is None:
            raise AttributeError(self._place[1])
        part, name = self._place
        column: NDArray[Any] = timeline._parts[part][name]
        return column


@dataclass(frozen=True, eq=False)
class Timeline(Record):
    """A run of a schedule. Arrays have one entry for each action, sorted by rank, then by start.

    All arrays, memory and measures are computed when they are first asked for.
    """

    schedule: str
    ranks: int
    stages: int
    """Over all chains."""
    chunks: int
    """Stages a rank in one chain; the most, where ranks differ."""
    micro_batches: int
    """Of one iteration, over all chains."""
    iterations: int
    communication: str
    makespan_s: float
    memory_cap_bytes: tuple[float, ...] | None
    """What each rank may hold."""
    _parts: _Parts
    row: str = "rank"
    """What a rank stands for: a `rank`; a `stage`, or a `group` of stages, where several devices may run it."""
    devices: tuple[int, ...] = ()
    """How many devices each rank stands for; empty where it is one for all."""
    title: str = ""
    """What runs on what, where that is known."""
    row_names: tuple[str, ...] = ()
    """What each rank stands for, in words; empty where its number says it."""
    notes: tuple[str, ...] = ()
    """What to know before the run is compared with others: halves of backward passes that don't add up, say."""

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):  # names are only shown, whatever they hold
            object.__setattr__(self, "schedule", in_whole_letters(self.schedule))
        check_fields(self)
        if not (self.ranks and self.stages and self.chunks):
            raise ArgumentError("a timeline has no ranks, stages or chunks", "make one with `hpgo.simulate`")
        if len(self.row_names) not in {0, self.ranks}:
            raise ArgumentError(f"a timeline of {self.ranks} ranks names {len(self.row_names)}", "name each, or none")

    rank = _Column("actions", "rank")
    stage = _Column("actions", "stage")
    """The forward half's if a forward and a backward run as one."""
    micro_batch = _Column("actions", "micro_batch")
    """Counted on through iterations."""
    kind = _Column("actions", "kind")
    """Index into `hpgo.programs.schedule.KINDS`."""
    backward_stage = _Column("actions", "backward_stage")
    """The backward half's; equal to `stage` unless a forward and a backward run as one."""
    backward_micro_batch = _Column("actions", "backward_micro_batch")
    start_s = _Column("times", "start_s")
    end_s = _Column("times", "end_s")
    transfer_from_rank = _Column("transfers", "from_rank")
    transfer_to_rank = _Column("transfers", "to_rank")
    transfer_stage = _Column("transfers", "stage")
    """Stage that sends."""
    transfer_micro_batch = _Column("transfers", "micro_batch")
    transfer_kind = _Column("transfers", "kind")
    """Index into `TRANSFER_KINDS`."""
    transfer_start_s = _Column("transfers", "start_s")
    transfer_end_s = _Column("transfers", "end_s")
    sync_stage = _Column("syncs", "stage")
    """Stages whose gradients are synchronised; the optimizer step follows."""
    sync_start_s = _Column("syncs", "start_s")
    sync_end_s = _Column("syncs", "end_s")
    optimizer_end_s = _Column("syncs", "optimizer_end_s")
    idle_rank = _Column("idle", "rank")
    idle_start_s = _Column("idle", "start_s")
    idle_end_s = _Column("idle", "end_s")
    idle_cause = _Column("idle", "cause")
    """Index into `CAUSES`."""
    slack_s = _Column("slack", "slack_s")
    """How much later each action could end with the same makespan, if orders stay and messages take as long."""

    @property
    def critical(self) -> NDArray[np.bool_]:
        """Whether each action lies on a critical path: it has no slack."""
        on_path: NDArray[np.bool_] = self.slack_s <= 1e-9 * self.makespan_s
        return on_path

    @property
    def activations_held(self) -> float:
        """Most activations that a rank holds at once, as many of its whole part of the model.

        `Measures.peak_in_flight` counts those of single chunks, which are smaller where a rank has several.

        >>> import hpgo
        >>> hpgo.simulate(hpgo.schedule("interleaved", ranks=4, micro_batches=8)).activations_held
        5.5
        """
        return max(self.measures.peak_in_flight, default=0) / self.chunks

    @property
    def memory(self) -> tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] | None:
        """For each rank a step curve, times and bytes from each time on; None where memory is not known."""
        curves: tuple[tuple[NDArray[np.float64], NDArray[np.float64]], ...] | None = self._parts["memory"]
        return curves

    @property
    def measures(self) -> Measures:
        """What the run amounts to."""
        measures: Measures = self._parts["measures"]
        return measures

    def action_texts(self) -> list[str]:
        """Each action as PyTorch writes it: `0F0`, or `(0F7;7B3)OVERLAP_F_B`."""
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
        """Everything, as one JSON document that `Timeline.read` reads from a file."""
        _check_room(len(self.rank), "JSON", _JSON_BYTES)
        return json.dumps(self._document(), ensure_ascii=False)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Writes a picture or the data, chosen by the file's ending.

        `.npz` and `.timeline.json` keep the data for `Timeline.read`; every other ending is a picture, with the
        options of `hpgo.draw.save`. Raises ArgumentError for an unknown ending, HpgoError if the file can't be written.
        """
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
        """Reads what `save` wrote as `.npz` or `.timeline.json`; raises ArgumentError that says what is wrong."""
        fields, parts = stored.read(path)
        return of_parts(parts, **fields)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the timeline") -> Timeline:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it.

        >>> import hpgo
        >>> timeline = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4))
        >>> Timeline.from_json(timeline.to_json()).measures == timeline.measures
        True
        """
        check_text("a timeline", text)
        fields, parts = stored.of_text(text, check_text("the source of a timeline", source))
        return of_parts(parts, **fields)

    def to_frame(self) -> Any:
        """A row an action, as a frame of polars or pandas, sorted by rank, then by start.

        Of the library that is imported already, or else of the one that is installed; HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html

    def __repr__(self) -> str:
        of = f"{pluralize(self.ranks, 'rank')}, {pluralize(self.micro_batches, 'micro-batch')}"
        return brief("Timeline", f"{shorten(self.schedule)}: {of}, {format_seconds(self.makespan_s)}")

    def _document(self, *, with_actions: bool = True) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in stored.FIELDS}
        return stored.document(facts, self._parts, self.action_texts() if with_actions else None)


def of_parts(parts: dict[str, Any], **facts: Any) -> Timeline:
    """The timeline of `facts`, its fields, and of `parts` that are all known."""
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
    """The timeline of a native simulation; `stage_bytes` has the columns of `hpgo.StageBytes`."""
    import numpy as np

    def compute(part: str) -> Any:
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
            # An activation is its sender's output, a gradient the output of the stage before.
            sent = stage_bytes[transfers["stage"].astype(np.int64) - transfers["kind"], 5]
            by_rank = np.bincount(transfers["from_rank"], weights=sent, minlength=schedule.ranks)
            values["bytes_sent"] = tuple(by_rank.tolist())
        return checked(schedule.name, Measures(**values), devices)

    def weighed(busy_s: tuple[float, ...]) -> dict[str, Any]:
        """Idle time of all devices, where each rank stands for several."""
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
        chunks=int(np.bincount(schedule.rank_of_stage[: schedule.chain_length]).max()),
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
