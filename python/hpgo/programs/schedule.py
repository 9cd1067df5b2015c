"""Pipeline schedules: an ordered list of actions for each rank, without times.

`hpgo.schedule(name, ranks=…, micro_batches=…)` builds a published schedule. `Schedule.read` reads any other from a
file. `hpgo.schedules()` is the table of schedule families.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.checks import check_flag, check_int, check_is, check_list, check_text
from hpgo.base.documents import hinted, read_text, write_text
from hpgo.base.files import MAX_BYTES_OF_RUNS, as_path
from hpgo.base.memory_check import check_room
from hpgo.base.messages import as_float, brief, did_you_mean, pluralize, printable, safe_repr
from hpgo.base.presentation import Presented
from hpgo.base.signals import uninterrupted
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, ScheduleError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from hpgo.programs.names import ScheduleName

    _Actions = npt.NDArray[np.uint32]
else:
    _Actions = object  # `Schedule` checks the array itself. Importing numpy here would slow down every start.

KINDS = ("F", "B", "I", "W", "F‖B")
"""Letters of the kinds in the first column of `Schedule.actions`, and in `Timeline.kind`: forward, backward, input
gradient, weight gradient, and a fused pair of forward and backward."""

MAX_ACTIONS = 200_000_000
"""Largest number of actions in a schedule or a simulation. Larger ones raise an error before memory is allocated."""
BUILT_BYTES = 50
"""Bytes of memory for each action while a schedule is built, as measured."""
_SQUEEZED_BYTES = 110  # V-Half and V-Min, which are squeezed from repeated blocks, as measured
_SQUEEZED = ("v_half", "v_min")
_TEXT_BYTES, _WORDS_BYTES = 30, 120  # for each action: its text, and the text as a Python string in a list
_READ_BYTES = 20  # for each character of text that is read

_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Schedule(Presented, Record):
    """The placement of stages on ranks, and the actions of each rank in order.

    Stages form one or more chains of equal length. A chain is a pipeline replica: one copy of the whole model. Data
    flows from each stage to the next inside its chain. Bidirectional schedules have two chains. Inference on
    alternating hosts has one for each combination of hosts. All other schedules have one.
    """

    name: str
    stages_per_pipeline: int
    """Number of stages in each chain."""
    micro_batches: tuple[tuple[int, int], ...]
    """Half-open range of the micro-batches that run through each chain, by chain."""
    rank_of_stage: tuple[int, ...]
    actions: _Actions
    """Array of shape (actions, 5), ordered by rank and then in execution order, not writable. Columns: kind (see
    `KINDS`), stage, micro-batch, and stage and micro-batch of the backward in a fused pair. For other actions, the last
    two repeat the two before."""
    rank_starts: tuple[int, ...]
    """First row of each rank in `actions`, and the end: rank `r` runs rows `rank_starts[r]` to `rank_starts[r + 1]`."""
    synchronization: str = "flush"
    """Synchronization of the ranks. `flush`: each iteration ends with a flush. `asynchronous`: there is no flush.
    `lock step`: all ranks start each step together, and a step takes as long as its slowest rank. Text has no such
    field, so a schedule that was read has `flush`."""
    weight_versions: tuple[int, ...] = ()
    """Number of weight versions that each rank keeps. Empty if every rank keeps one."""
    _checked: _core.CheckedSchedule | None = field(default=None, init=False, repr=False)
    """The validated schedule as a native object, if native code built it. A copy with other actions is validated
    again."""

    def __post_init__(self) -> None:
        import numpy as np

        check_fields(self, ScheduleError)
        rows = self.actions
        if not (isinstance(rows, np.ndarray) and rows.dtype == np.uint32 and rows.ndim == 2 and self.rank_starts):
            raise ScheduleError(
                f"the actions of schedule `{printable(self.name)}` are {safe_repr(rows)}",
                "build schedules with `hpgo.schedule` or `Schedule.from_text`",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # The native object can't be pickled. Without it, the copy is validated when it is used.
        return Schedule, (
            self.name, self.stages_per_pipeline, self.micro_batches, self.rank_of_stage, self.actions, self.rank_starts,
            self.synchronization, self.weight_versions,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rank_starts) - 1

    @property
    def stages(self) -> int:
        """Number of stages over all chains."""
        return len(self.rank_of_stage)

    @property
    def total_micro_batches(self) -> int:
        """Number of micro-batches over all chains."""
        return sum(end - start for start, end in self.micro_batches)

    @property
    def action_lists(self) -> list[list[str]]:
        """Actions of each rank as strings in PyTorch's notation, by rank.

        >>> import hpgo
        >>> hpgo.schedule("1f1b", ranks=2, micro_batches=2).action_lists[1]
        ['1F0', '1B0', '1F1', '1B1']
        """
        # A list of strings takes four times the memory of the text, so check before building it.
        self._check_text(_WORDS_BYTES)
        return [line.split(",") if line else [] for line in self.to_text().splitlines()]

    def _check_text(self, action_bytes: float) -> None:
        actions = len(self.actions)
        check_room(f"the text of {pluralize(actions, 'action')}", actions * action_bytes, "ask for fewer micro-batches")

    def with_transfers(self, *, deferred_receives: bool = False) -> list[list[str]]:
        """Return `action_lists` with sends and receives where PyTorch places them.

        The lists are for reading and comparing. PyTorch places these entries itself when it loads `to_text`, and
        PyTorch 2.15 can't run lists that contain them. A receive is posted when its send is posted or, if deferred,
        right before the action that needs it. Raises ScheduleError if deferral makes a rank receive in another order
        than its peer sends, as in V-shaped schedules: messages between two ranks have no names, so one would be taken
        for the other.

        >>> import hpgo
        >>> hpgo.schedule("gpipe", ranks=2, micro_batches=1).with_transfers()[0]
        ['0F0', '0SEND_F0', '0RECV_B0', '0B0']
        """
        check_flag("deferred_receives", deferred_receives)
        self._check_text(3 * _WORDS_BYTES)
        lists = _core.communication_lists(self, deferred_receives)
        if deferred_receives:
            self._check_pairs(lists)
        return lists

    def _check_pairs(self, lists: list[list[str]]) -> None:
        """Raise ScheduleError unless each rank receives from each other rank in the order in which that rank sends."""
        sent: dict[tuple[int, int], list[str]] = {}
        received: dict[tuple[int, int], list[str]] = {}
        for entry in (entry for line in lists for entry in line):
            if (match := _TRANSFER.fullmatch(entry)) is None:
                continue
            stage, forward, micro_batch = int(match[1]), match[3] == "F", match[4]
            sender = stage if match[2] == "SEND" else stage - 1 if forward else stage + 1
            pair = self.rank_of_stage[sender], self.rank_of_stage[sender + 1 if forward else sender - 1]
            (sent if match[2] == "SEND" else received).setdefault(pair, []).append(f"{sender}{match[3]}{micro_batch}")
        for (sender, receiver), messages in sent.items():
            for first, other in zip(messages, received[sender, receiver], strict=True):
                if first != other:
                    raise ScheduleError(
                        f"with deferred receives, rank {receiver} of `{self.name}` expects the output of `{other}`"
                        f" while rank {sender} sends the output of `{first}`",
                        "leave `deferred_receives` out",
                    )

    @property
    def peak_in_flight(self) -> list[int]:
        """Largest number of activations of virtual stages that each rank holds at once, by rank.

        They are held from F to B, or to W of a split backward.
        """
        return _core.peak_in_flight(self)

    def without_flush(self, iterations: int) -> Schedule:
        """Return several iterations of an asynchronous schedule joined into one. Return other schedules unchanged.

        Raises ArgumentError if `iterations` is below 1, or the result has over 200,000,000 actions.

        >>> import hpgo
        >>> print(hpgo.schedule("pipedream", ranks=2, micro_batches=4).without_flush(3))
        pipedream: 2 ranks, 2 stages, 12 micro-batches, 48 actions
        """
        iterations = check_int("`iterations`", iterations)
        _load_arrays()
        return built(_core.without_flush(self, iterations))

    @classmethod
    def from_text(cls, text: str, *, name: str = "custom") -> Schedule:
        r"""Read a schedule with one line per rank. Commas or blanks separate the entries; an empty cell is a bubble.

        Entries are in PyTorch's notation: `2F0`, `2B0`, `2I0`, `2W0`, `(0F7;7B3)OVERLAP_F_B`. Sends, receives, waits
        and operations on sharded parameters (`2SEND_F0`, `2WAIT_SEND_F0`, `0UNSHARD`, …) are ignored. Raises
        ScheduleError with the first invalid action, a missing action, or the cycle of actions in a deadlock.

        >>> Schedule.from_text("0F0 0B0\n1F0 1B0").action_lists
        [['0F0', '0B0'], ['1F0', '1B0']]
        """
        check_is("the schedule", text, str, "give text, or a file to `Schedule.read`")
        check_text("the schedule", text)
        check_room("reading the schedule", len(text) * _READ_BYTES, "read a shorter schedule")
        check_text("a schedule's name", name)
        _load_arrays()
        return built(_core.read_schedule(name, text))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a CSV file like `from_text`. The name of the file becomes the name of the schedule."""
        path = as_path(path, ScheduleError)
        with hinted("name a CSV file with one line a rank"):
            text = read_text(path, ScheduleError, maximum=MAX_BYTES_OF_RUNS)
        try:
            return cls.from_text(text, name=path.stem)
        except ScheduleError as error:
            raise error.as_kind(ScheduleError, f"{path}: {error.message}") from None

    def to_text(self, *, in_steps: bool = False) -> str:
        """Return the schedule as text, with one line per rank and commas between the entries.

        With `in_steps`, column t shows the actions of step t if every action takes one step. Empty cells are bubbles.

        >>> import hpgo
        >>> print(hpgo.schedule("1f1b", ranks=2, micro_batches=2).to_text(in_steps=True))
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1
        <BLANKLINE>
        """
        check_flag("in_steps", in_steps)
        self._check_text(_TEXT_BYTES)
        return _core.write_schedule(self, in_steps)

    def save(self, path: str | os.PathLike[str], *, in_steps: bool = False) -> None:
        """Write `to_text` to a CSV file that PyTorch's `_load_csv` reads.

        Raise ScheduleError if the file can't be written.
        """
        write_text(path, self.to_text(in_steps=in_steps), ScheduleError)

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal actions of equal stages. The name doesn't count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.stages_per_pipeline == other.stages_per_pipeline
            and self.micro_batches == other.micro_batches
            and self.rank_of_stage == other.rank_of_stage
            and self.rank_starts == other.rank_starts
            # Compare shapes first, because numpy can't compare arrays of different shapes element by element.
            and self.actions.shape == other.actions.shape
            and bool((self.actions == other.actions).all())
        )

    __hash__ = None  # type: ignore[assignment] # like the array it holds

    def __str__(self) -> str:
        return (
            f"{printable(self.name)}: {pluralize(self.ranks, 'rank')}, {pluralize(self.stages, 'stage')}, "
            f"{pluralize(self.total_micro_batches, 'micro-batch')}, {pluralize(len(self.actions), 'action')}"
        )

    def __repr__(self) -> str:
        return brief("Schedule", str(self))


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """One row of the table of schedule families.

    In the formulas, p is the number of ranks, v of virtual stages per rank, M of micro-batches, r the rank and
    g the group size. F, B, I and W are seconds of one action on one virtual stage.
    """

    name: ScheduleName
    summary: str
    source: str
    limits: str
    """Condition on the sizes. Empty if all are valid."""
    options: tuple[str, ...]
    """Options of `hpgo.schedule` that it accepts besides the sizes. Families without `durations` ignore durations."""
    virtual_stages_per_rank: str
    chains: int
    """Copies of the model: 2 for bidirectional schedules that keep two."""
    splits_backward: bool
    trains: bool
    """Whether the schedule has backward passes."""
    synchronization: str
    """Synchronization: `flush`, `asynchronous` or `lock step`."""
    weight_versions: str
    peak: str
    """Formula for the largest number of activations of virtual stages in flight on rank r."""
    bubble: str
    """Formula for the seconds in which a rank is idle, for equal stages and transfers that take no time."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of the passes of one micro-batch on each stage, for schedules that are fitted to them.

    >>> measured = Durations((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), transfer_s=0.1)
    >>> print(schedule("zb", ranks=2, micro_batches=4, durations=measured))
    zb: 2 ranks, 2 stages, 4 micro-batches, 24 actions
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    transfer_s: float = 0.0
    """Seconds of a transfer between neighboring stages, in either direction."""


@dataclass(frozen=True, slots=True)
class _Request:
    ranks: int
    micro_batches: int
    virtual_stages_per_rank: int | None
    group_size: int | None
    activation_limit: int | None
    max_in_flight: list[int] | None
    durations: Durations | None


def schedule(
    name: ScheduleName,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages_per_rank: int | None = None,
    group_size: int | None = None,
    activation_limit: int | None = None,
    max_in_flight: Sequence[int] | None = None,
    durations: Durations | None = None,
) -> Schedule:
    """Build the schedule family `name`. Parameters that are left out have the family's defaults.

    `virtual_stages_per_rank` is the number of virtual stages per rank. `group_size` is the number of micro-batches that
    pass through a virtual stage before the turn of the next (Megatron-LM's `microbatch_group_size_per_vp_stage`).
    `activation_limit` is the largest number of activations that a rank may hold. `max_in_flight` is the number of
    forwards of each rank before its first backward. `durations` are the times to which a searched schedule is fitted.
    Raises ScheduleError if there is no such family, and ArgumentError if the request violates its limits.
    >>> print(schedule("zb_v", ranks=4, micro_batches=8))
    zb_v: 4 ranks, 8 stages, 8 micro-batches, 192 actions
    """
    # Names outside ASCII can't match, and some can't be converted to the native side's strings.
    if not isinstance(name, str) or not name.isascii():
        raise ScheduleError(
            f"there is no schedule {safe_repr(name)}",
            did_you_mean("", [family.name for family in schedules()]),
            code="unknown_name",
        )
    request = _Request(
        ranks=check_int("`ranks`", ranks),
        micro_batches=check_int("`micro_batches`", micro_batches),
        virtual_stages_per_rank=None
        if virtual_stages_per_rank is None
        else check_int("`virtual_stages_per_rank`", virtual_stages_per_rank),
        group_size=None if group_size is None else check_int("`group_size`", group_size),
        activation_limit=None if activation_limit is None else check_int("`activation_limit`", activation_limit),
        max_in_flight=None
        if max_in_flight is None
        else [check_int("each of `max_in_flight`", one) for one in check_list("`max_in_flight`", max_in_flight)],
        durations=None if durations is None else _checked(durations),
    )
    _load_arrays()
    # A build that runs out of memory is killed by the system without a message, so compare with the free memory first.
    actions = actions_of(name, request.ranks, request.micro_batches, request.virtual_stages_per_rank)
    check_room(
        f"`{name}` with {actions:,} actions",
        actions * (_SQUEEZED_BYTES if name in _SQUEEZED else BUILT_BYTES),
        "ask for fewer ranks or micro-batches",
    )
    return built(_core.build_schedule(name, request))


def actions_of(name: str, ranks: int, micro_batches: int, virtual_stages_per_rank: int | None) -> int:
    """Return the number of actions of the family `name` in these sizes. 0 if it is unknown or has too many actions.

    >>> actions_of("zb_v", 4, 8, None), len(schedule("zb_v", ranks=4, micro_batches=8).actions)
    (192, 192)
    """
    family = next((family for family in schedules() if family.name == name), None)
    if family is None:
        return 0
    # One action for F, one more for B, or two more for I and W.
    each = family.trains + 1 + family.splits_backward
    # Families with a fixed number of virtual stages have 1 or 2. The others default to 2.
    actions = (
        ranks * micro_batches * each * (virtual_stages_per_rank or (1 if family.virtual_stages_per_rank == "1" else 2))
    )
    return actions if actions <= MAX_ACTIONS else 0


def schedules() -> tuple[ScheduleFamily, ...]:
    """Return the table of schedule families, from simple to complex.

    >>> [family.name for family in schedules() if family.chains == 2]
    ['dualpipe', 'chimera']
    """
    return _families()


@cache
def fitted() -> frozenset[str]:
    """Return the names of the families that use durations."""
    return frozenset(family.name for family in schedules() if "durations" in family.options)


@cache
def _families() -> tuple[ScheduleFamily, ...]:
    return tuple(
        ScheduleFamily(
            name=row["name"],
            summary=row["summary"],
            source=row["source"],
            limits=row["limits"],
            options=tuple(row["options"]),
            virtual_stages_per_rank=row["virtual_stages_per_rank"],
            chains=row["chains"],
            splits_backward=row["splits_backward"],
            trains=row["trains"],
            synchronization=row["synchronization"],
            weight_versions=row["weight_versions"],
            peak=row["peak"],
            bubble=row["bubble"],
        )
        for row in _core.schedule_families()
    )


def asynchronous_max_in_flight(devices: Sequence[int]) -> list[int]:
    """Return the warm-up forwards of stages with `devices[s]` replicas each, for `pipedream`.

    A stage holds the number of micro-batches that keeps all devices from it to the last stage busy: ⌈devices from s on
    / devices of s⌉. This generalizes PipeDream's NOAM, which is for the first stage (Narayanan et al., 2019).

    >>> asynchronous_max_in_flight([2, 1, 1])
    [2, 2, 1]
    """
    counts = [check_int("each of `devices`", count) for count in check_list("`devices`", devices)]
    if not counts:
        raise ArgumentError("`devices` is an empty list", "give each stage at least one device")
    return [-(-sum(counts[stage:]) // counts[stage]) for stage in range(len(counts))]


def _checked(durations: object) -> Durations:
    """Return `durations` with Python's own numbers.

    Raise ArgumentError for values that are no numbers. Native code checks their range.
    """
    if not isinstance(durations, Durations):
        raise ArgumentError(f"`durations` is {safe_repr(durations)}", "make a `hpgo.Durations`")

    def column(name: str) -> tuple[float, ...]:
        given = check_list(f"`{name}`", getattr(durations, name), hint="give seconds, one number for each stage")
        return tuple(_seconds(name, one) for one in given)

    return Durations(
        column("forward_s"),
        column("input_gradient_s"),
        column("weight_gradient_s"),
        _seconds("transfer_s", durations.transfer_s),
    )


def _seconds(name: str, value: object) -> float:
    # In Python, True is an integer. As a duration it is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"`{name}` is {safe_repr(value)}", "give a number of seconds")
    return as_float(value)


@cache
def _load_arrays() -> None:
    """Load numpy in Python and in the native module.

    Loading in native code can't report a Ctrl-C that arrives meanwhile.
    """
    with uninterrupted():
        import numpy  # noqa: F401

        _core.read_schedule("", "0F0")


def built(record: _core.ScheduleRecord) -> Schedule:
    """Return the Python object for a schedule that native code built."""
    # The native side keeps a validated copy of this array. A change here would not reach it.
    record["actions"].flags.writeable = False
    made = Schedule(
        name=record["name"],
        stages_per_pipeline=record["stages_per_pipeline"],
        micro_batches=tuple(record["micro_batches"]),
        rank_of_stage=tuple(record["rank_of_stage"]),
        actions=record["actions"],
        rank_starts=tuple(record["rank_starts"]),
        synchronization=record["synchronization"],
        weight_versions=tuple(record["weight_versions"]),
    )
    # The dataclass is frozen, and `_checked` is no parameter: only native code may state that a schedule is valid.
    object.__setattr__(made, "_checked", record["checked"])
    return made
