"""Schedules: for each rank an ordered list of actions, without a clock.

`hpgo.schedule(name, ranks=…, micro_batches=…)` builds one of the known families, `Schedule.read` takes any other from a
file; `hpgo.schedules()` is the table of families.
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
from hpgo.base.files import MOST_BYTES_OF_RUNS, as_path
from hpgo.base.memory_check import check_room
from hpgo.base.messages import as_float, brief, did_you_mean, pluralize, printable, safe_repr
from hpgo.base.presentation import present
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
    _Actions = object  # looked at by `Schedule` itself: numpy takes long to load

KINDS = ("F", "B", "I", "W", "F‖B")
"""Letters of the numbers in the first column of `Schedule.actions`, and in `Timeline.kind`: forward, backward, input
gradient, weight gradient, and a forward and a backward run as one."""

MOST_ACTIONS = 200_000_000
"""Of a schedule, and of a run; larger ones are refused by number."""
BUILT_BYTES = 50
"""Of memory for each action, measured: what a schedule takes while it is built."""
_SQUEEZED_BYTES = 110  # the same for V shapes that are squeezed
_SQUEEZED = ("v_half", "v_min")
_TEXT_BYTES, _WORDS_BYTES = 30, 120  # of the text of an action, and of that text as words
_READ_BYTES = 20  # for each character of orders that are read

_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Schedule(Record):
    """Who does what in which order.

    Stages form one or more chains of equal length, each a copy of the whole model; data flows from each stage to the
    next inside its chain. Bidirectional schedules have two chains, inference on hosts that take turns one for each
    combination of hosts, all others one.
    """

    name: str
    chain_length: int
    """Stages in a chain."""
    micro_batches: tuple[tuple[int, int], ...]
    """For each chain, the half-open range of micro-batches that run through it."""
    rank_of_stage: tuple[int, ...]
    actions: _Actions
    """Shape (actions, 5): kind (see `KINDS`), stage, micro-batch, and stage and micro-batch of the backward half of a
    fused pair (elsewhere the same two again). Rank by rank, each in its order; not writable."""
    rank_starts: tuple[int, ...]
    """Rank `r` runs rows `rank_starts[r]` to `rank_starts[r + 1]` of `actions`."""
    pace: str = "flush"
    """`flush`: each iteration ends with one; `asynchronous`: none does; `lock step`: all ranks step together, and a
    step takes as long as its slowest rank. Text doesn't say it, so orders that were read have a flush."""
    weight_versions: tuple[int, ...] = ()
    """For each rank, how many versions of its weights it keeps; empty if one everywhere."""
    _checked: _core.CheckedSchedule | None = field(default=None, init=False, repr=False)
    """Itself as the native side keeps it, where that built it; a copy with other actions is checked anew."""

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
        return Schedule, (
            self.name, self.chain_length, self.micro_batches, self.rank_of_stage, self.actions, self.rank_starts,
            self.pace, self.weight_versions,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of ranks."""
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
    def orders(self) -> list[list[str]]:
        """For each rank its actions as PyTorch writes them.

        >>> import hpgo
        >>> hpgo.schedule("1f1b", ranks=2, micro_batches=2).orders[1]
        ['1F0', '1B0', '1F1', '1B1']
        """
        self._check_text(_WORDS_BYTES)
        return [line.split(",") if line else [] for line in self.to_text().splitlines()]

    def _check_text(self, action_bytes: float) -> None:
        actions = len(self.actions)
        check_room(f"the text of {pluralize(actions, 'action')}", actions * action_bytes, "ask for fewer micro-batches")

    def with_transfers(self, *, deferred_receives: bool = False) -> list[list[str]]:
        """As `orders`, with sends and receives where PyTorch places them.

        The lists are there to read and to compare: PyTorch places these entries itself when it loads `to_text`, and
        2.15 can't run lists that bring their own. A receive is posted when its send is, or, if deferred, right before
        the action that needs it. Raises ScheduleError if deferral makes a rank receive in another order than its peer
        sends: messages between two ranks carry no names, so one would be taken for the other (V shapes do so).

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
        """Raises ScheduleError unless each rank receives from each other one in the order in which that one sends."""
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
                        f"with deferred receives, rank {receiver} of `{self.name}` waits for what `{other}` makes while"
                        f" rank {sender} sends what `{first}` made, and takes one for the other",
                        "post receives early: leave `deferred_receives` out",
                    )

    @property
    def peak_in_flight(self) -> list[int]:
        """For each rank the most chunk activations that it holds at once: from F to B, or to W of a split backward."""
        return _core.peak_in_flight(self)

    def without_flush(self, iterations: int) -> Schedule:
        """Several iterations as one, if the schedule is asynchronous; itself otherwise.

        Raises ArgumentError for no iteration, or too many.

        >>> import hpgo
        >>> print(hpgo.schedule("pipedream", ranks=2, micro_batches=4).without_flush(3))
        pipedream: 2 ranks, 2 stages, 12 micro-batches, 48 actions
        """
        iterations = check_int("`iterations`", iterations)
        _load_arrays()
        return built(_core.without_flush(self, iterations))

    @classmethod
    def from_text(cls, text: str, *, name: str = "custom") -> Schedule:
        r"""Reads one line a rank, entries separated by commas or blanks; an empty cell is a bubble.

        Entries are PyTorch's: `2F0`, `2B0`, `2I0`, `2W0`, `(0F7;7B3)OVERLAP_F_B`. Sends, receives, waits and the
        handling of sharded parameters (`2SEND_F0`, `2WAIT_SEND_F0`, `0UNSHARD`, …) are read over. Raises ScheduleError
        that names the first wrong action, what is missing, or the cycle of actions that wait for each other.

        >>> Schedule.from_text("0F0 0B0\n1F0 1B0").orders
        [['0F0', '0B0'], ['1F0', '1B0']]
        """
        check_is("the orders", text, str, "give text, or a file to `Schedule.read`")
        check_text("the orders", text)
        check_room("reading the orders", len(text) * _READ_BYTES, "read shorter ones")
        check_text("a schedule's name", name)
        _load_arrays()
        return built(_core.read_schedule(name, text))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schedule:
        """Reads a CSV file as `from_text` does; its name is the file's."""
        path = as_path(path, ScheduleError)
        with hinted("name a CSV file with one line a rank"):
            text = read_text(path, ScheduleError, most=MOST_BYTES_OF_RUNS)
        try:
            return cls.from_text(text, name=path.stem)
        except ScheduleError as error:
            raise error.as_kind(ScheduleError, f"{path}: {error.message}") from None

    def to_text(self, *, in_steps: bool = False) -> str:
        """One line a rank, entries separated by commas.

        With `in_steps`, column t holds what runs in step t if every action takes one, and empty cells are bubbles.

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
        """Writes `to_text` to a CSV file that PyTorch's `_load_csv` reads; raises ScheduleError if it can't."""
        write_text(path, self.to_text(in_steps=in_steps), ScheduleError)

    def __eq__(self, other: object) -> bool:
        """Equal orders of equal stages; the name doesn't count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.chain_length == other.chain_length
            and self.micro_batches == other.micro_batches
            and self.rank_of_stage == other.rank_of_stage
            and self.rank_starts == other.rank_starts
            and self.actions.shape == other.actions.shape
            and bool((self.actions == other.actions).all())
        )

    __hash__ = None  # type: ignore[assignment] # like the array it holds

    def __str__(self) -> str:
        return (
            f"{printable(self.name)}: {pluralize(self.ranks, 'rank')}, {pluralize(self.stages, 'stage')}, "
            f"{pluralize(self.total_micro_batches, 'micro-batch')}, {pluralize(len(self.actions), 'action')}"
        )

    def to_frame(self) -> Any:
        """A row an action, as a frame of polars or pandas: rank by rank, each in its order.

        Of the library that is imported already, or else of the one that is installed; HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html

    def __repr__(self) -> str:
        return brief("Schedule", str(self))


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """One row of the table of families.

    In formulas p is ranks, v chunks a rank, M micro-batches, r the rank, g the group size; F, B, I and W are seconds of
    one action on one chunk.
    """

    name: ScheduleName
    summary: str
    source: str
    limits: str
    """What it asks of the sizes; empty if nothing."""
    options: tuple[str, ...]
    """Options of `hpgo.schedule` that it takes besides the sizes; only those with `durations` look at these."""
    chunks: str
    chains: int
    """Copies of the model."""
    splits_backward: bool
    trains: bool
    """Whether it has backwards."""
    pace: str
    """`flush`, `asynchronous` or `lock step`."""
    weight_versions: str
    peak: str
    """Most chunk activations in flight on rank r."""
    bubble: str
    """Seconds that a rank is not busy, for equal stages and free transfers."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of one micro-batch on each stage, for schedules that are fitted to them.

    >>> measured = Durations((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), transfer_s=0.1)
    >>> print(schedule("zb", ranks=2, micro_batches=4, durations=measured))
    zb: 2 ranks, 2 stages, 4 micro-batches, 24 actions
    """

    forward_s: tuple[float, ...]
    input_gradient_s: tuple[float, ...]
    weight_gradient_s: tuple[float, ...]
    transfer_s: float = 0.0
    """From a stage to the next, or back."""


@dataclass(frozen=True, slots=True)
class _Request:
    ranks: int
    micro_batches: int
    chunks: int | None
    group_size: int | None
    cap: int | None
    max_in_flight: list[int] | None
    durations: Durations | None


def schedule(
    name: ScheduleName,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    group_size: int | None = None,
    cap: int | None = None,
    max_in_flight: Sequence[int] | None = None,
    durations: Durations | None = None,
) -> Schedule:
    """Builds the family `name`; what is left out is as the family has it.

    `chunks` is stages a rank, `group_size` the micro-batches that pass through a chunk before the next one's turn
    (Megatron's `microbatch_group_size_per_vp_stage`), `cap` the most activations a rank may hold, `max_in_flight` the
    forwards of each rank before its first backward, `durations` what a greedy schedule is fitted to. Raises
    ScheduleError if there is no such family, ArgumentError if the request is outside its limits.

    >>> print(schedule("zb_v", ranks=4, micro_batches=8))
    zb_v: 4 ranks, 8 stages, 8 micro-batches, 192 actions
    """
    if not isinstance(name, str) or not name.isascii():
        raise ScheduleError(
            f"there is no schedule {safe_repr(name)}",
            did_you_mean("", [family.name for family in schedules()]),
            code="unknown_name",
        )
    request = _Request(
        ranks=check_int("`ranks`", ranks),
        micro_batches=check_int("`micro_batches`", micro_batches),
        chunks=None if chunks is None else check_int("`chunks`", chunks),
        group_size=None if group_size is None else check_int("`group_size`", group_size),
        cap=None if cap is None else check_int("`cap`", cap),
        max_in_flight=None
        if max_in_flight is None
        else [check_int("each of `max_in_flight`", one) for one in check_list("`max_in_flight`", max_in_flight)],
        durations=None if durations is None else _checked(durations),
    )
    _load_arrays()
    actions = actions_of(name, request.ranks, request.micro_batches, request.chunks)
    check_room(
        f"`{name}` with {actions:,} actions",
        actions * (_SQUEEZED_BYTES if name in _SQUEEZED else BUILT_BYTES),
        "ask for fewer ranks or micro-batches",
    )
    return built(_core.build_schedule(name, request))


def actions_of(name: str, ranks: int, micro_batches: int, chunks: int | None) -> int:
    """How many actions the family `name` has in these sizes; 0 if none, or if there are more than any may have.

    >>> actions_of("zb_v", 4, 8, None), len(schedule("zb_v", ranks=4, micro_batches=8).actions)
    (192, 192)
    """
    family = next((family for family in schedules() if family.name == name), None)
    if family is None:
        return 0
    each = family.trains + 1 + family.splits_backward
    actions = ranks * micro_batches * each * (chunks or (1 if family.chunks == "1" else 2))
    return actions if actions <= MOST_ACTIONS else 0


def schedules() -> tuple[ScheduleFamily, ...]:
    """The table of families, simplest first.

    >>> [family.name for family in schedules() if family.chains == 2]
    ['dualpipe', 'chimera']
    """
    return _families()


@cache
def fitted() -> frozenset[str]:
    """Families that look at durations."""
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
            chunks=row["chunks"],
            chains=row["chains"],
            splits_backward=row["splits_backward"],
            trains=row["trains"],
            pace=row["pace"],
            weight_versions=row["weight_versions"],
            peak=row["peak"],
            bubble=row["bubble"],
        )
        for row in _core.schedule_families()
    )


def asynchronous_max_in_flight(devices: Sequence[int]) -> list[int]:
    """Warm-up forwards of stages that are replicated on `devices[s]` devices each, for `pipedream`.

    A stage holds as many micro-batches as keep all devices behind it busy: ⌈devices from s on / devices of s⌉
    (PipeDream's NOAM for the first stage, Narayanan et al., 2019).

    >>> asynchronous_max_in_flight([2, 1, 1])
    [2, 2, 1]
    """
    counts = [check_int("each of `devices`", count) for count in check_list("`devices`", devices)]
    if not counts:
        raise ArgumentError("`devices` is an empty list", "give each stage at least one device")
    return [-(-sum(counts[stage:]) // counts[stage]) for stage in range(len(counts))]


def _checked(durations: object) -> Durations:
    """`durations` with numbers of Python's own; raises ArgumentError for what is none. The native side bounds them."""
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
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"`{name}` is {safe_repr(value)}", "give a number of seconds")
    return as_float(value)


@cache
def _load_arrays() -> None:
    """Loads numpy, here and on the native side, which could not pass on a Ctrl-C that comes meanwhile."""
    with uninterrupted():
        import numpy  # noqa: F401

        _core.read_schedule("", "0F0")


def built(record: _core.ScheduleRecord) -> Schedule:
    """What the native side built."""
    record["actions"].flags.writeable = False
    made = Schedule(
        name=record["name"],
        chain_length=record["chain_length"],
        micro_batches=tuple(record["micro_batches"]),
        rank_of_stage=tuple(record["rank_of_stage"]),
        actions=record["actions"],
        rank_starts=tuple(record["rank_starts"]),
        pace=record["pace"],
        weight_versions=tuple(record["weight_versions"]),
    )
    object.__setattr__(made, "_checked", record["checked"])
    return made
