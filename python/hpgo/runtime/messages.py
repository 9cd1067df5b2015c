"""What travels between ranks: a sequence of tensors for each pair and direction, known before the first step.

Sender and receiver work out the same sequence from the program, so that messages need no names: a library that has none
(NCCL) pairs the n-th send with the n-th receive. Receives are posted in the sender's order, ahead of need; sends never
wait, and their tensors are kept until something shows that they have arrived.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.programs.program import Program
    from hpgo.programs.ranks import Message, RankAction
    from hpgo.runtime.session import NeighbourGroups
    from hpgo.runtime.stage_module import StageModule, Value

AHEAD, AHEAD_BYTES = 16, 4 << 20
"""At most so many receives from one peer are posted together: gloo tells the sender of each, which holds up its work,
but many at once hardly more than one. At least one is ahead of what an action waits for, whatever its size."""
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class PassedTensor:
    """A tensor that one stage gives to the next of its chain."""

    given: int
    """Its place in what the stage gives."""
    taken: int
    """Its place in what the next stage takes."""
    value: Value


def boundary_tensors(parts: Sequence[StageModule], chain_length: int) -> list[tuple[PassedTensor, ...]]:
    """For each stage what crosses the cut behind it; nothing behind the last of a chain."""
    found: list[tuple[PassedTensor, ...]] = []
    for number, part in enumerate(parts):
        if number % chain_length == chain_length - 1:
            found.append(())
            continue
        taken = {value.name: at for at, value in enumerate(parts[number + 1].takes)}
        found.append(
            tuple(
                PassedTensor(at, taken[value.name], value) for at, value in enumerate(part.gives) if value.name in taken
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or some rows of it, that one rank gives to another."""

    peer: int
    tensor: int
    """Its place in `Tensors`."""
    rows: slice
    """Counted from the first row of the replica."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """What an action takes from other stages, or gives to them."""

    crossing: tuple[int, ...]
    """For each tensor which of the cut's boundary_tensors it is, or whose gradient. The gradient of a tensor without rows has
    a place for each replica that it comes from; they are to be added."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    pieces: tuple[Piece, ...]

    def size_bytes(self, tensor: int) -> int:
        """Of one of them."""
        return math.prod(self.shapes[tensor]) * self.dtypes[tensor].itemsize


_NOTHING = Tensors((), (), (), ())


def _taken_or_given(
    program: Program, cut: Sequence[PassedTensor], rows: range, messages: Sequence[Message], *, forward: bool
) -> Tensors:
    """The tensors of `messages`, which all cross one cut to or from a replica with these `rows`."""
    crossing: list[int] = []
    shapes: list[tuple[int, ...]] = []
    pieces: list[Piece] = []
    for at, one in enumerate(cut):
        value = one.value
        if not (forward or value.has_gradient):
            continue
        for message in messages:
            # A tensor without rows comes from whom its reader gets its first row, and its gradient returns there.
            reader = program.stages[max(message.from_stage, message.to_stage)]
            if not value.by_row and all(message.rows.start != theirs.start for theirs in reader.rows):
                continue
            if not (crossing and crossing[-1] == at) or not (value.by_row or forward):
                crossing.append(at)
                shapes.append(value.shape_of(len(rows)))
            whole = not value.by_row or len(message.rows) == len(rows)
            part = _ALL if whole else slice(message.rows.start - rows.start, message.rows.stop - rows.start)
            pieces.append(Piece(message.peer, len(crossing) - 1, part))
    dtypes = tuple(cut[at].value.dtype for at in crossing)
    return Tensors(tuple(crossing), tuple(shapes), dtypes, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one action of a rank takes from other stages and gives to them."""

    takes: Tensors
    gives: Tensors


class Orders:
    """One rank's actions, with what each of them takes and gives."""

    def __init__(self, program: Program, rank: int, cuts: Sequence[Sequence[PassedTensor]]) -> None:
        mine = program.for_rank(rank)
        self.rank, self.actions = rank, mine.actions
        rows_of = {stage.stage: stage.rows for stage in mine.stages}
        made: dict[tuple[str, int], Exchange] = {}

        def exchange(action: RankAction) -> Exchange:
            def tensors(messages: Sequence[Message]) -> Tensors:
                if not messages:
                    return _NOTHING
                cut = cuts[min(messages[0].from_stage, messages[0].to_stage)]
                return _taken_or_given(program, cut, rows_of[action.stage], messages, forward=action.kind == "F")

            return Exchange(tensors(action.receives), tensors(action.sends))

        for action in self.actions:
            if (action.kind, action.stage) not in made:
                made[action.kind, action.stage] = exchange(action)
        self.exchanges = [made[action.kind, action.stage] for action in self.actions]
        self._place = {
            (one.kind == "F", one.stage, one.micro_batch): at for at, one in enumerate(self.actions) if one.kind != "W"
        }
        self.peers = sorted({piece.peer for one in made.values() for piece in (*one.takes.pieces, *one.gives.pieces)})

    def sent_to(self, other: Orders) -> Iterator[tuple[int, Piece, int, Piece]]:
        """All that this rank gives to another, in order: its action, the piece, the other's action, the piece there."""
        for at, (action, exchange) in enumerate(zip(self.actions, self.exchanges, strict=True)):
            gives = exchange.gives
            for piece in gives.pieces:
                if piece.peer != other.rank:
                    continue
                forward = action.kind == "F"
                to = other._place[forward, action.stage + (1 if forward else -1), action.micro_batch]
                takes = other.exchanges[to].takes
                into = next(
                    one
                    for one in takes.pieces
                    if one.peer == self.rank and takes.crossing[one.tensor] == gives.crossing[piece.tensor]
                )
                yield at, piece, to, into


class _Inbox:
    """Where the tensors that one action takes gather."""

    __slots__ = ("tensors", "waits", "wanted")

    def __init__(self, wanted: Tensors) -> None:
        self.wanted = wanted
        self.tensors: list[torch.Tensor | None] = [None] * len(wanted.shapes)
        self.waits: list[tuple[int, Any]] = []
        """Receives that are posted, with whom they are from."""

    def room(self, piece: Piece, device: torch.device) -> torch.Tensor:
        """Where a piece shall go."""
        at = piece.tensor
        tensor = self.tensors[at]
        if tensor is None:
            tensor = torch.empty(self.wanted.shapes[at], dtype=self.wanted.dtypes[at], device=device)
            self.tensors[at] = tensor
        return tensor if piece.rows is _ALL else tensor[piece.rows]


@dataclass(slots=True)
class _Incoming:
    """Everything that one peer sends in a step, in its order."""

    peer: int
    group: Any
    expected: list[tuple[_Inbox, Piece]] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    """Numbers of pieces at which posting pauses, in order; the last is that of all."""
    posted: int = 0

    def plan_posts(self) -> None:
        """Finds the `stops`."""
        begin, size_bytes = 0, 0
        for at, (box, piece) in enumerate(self.expected, start=1):
            size_bytes += box.wanted.size_bytes(piece.tensor)
            if size_bytes >= AHEAD_BYTES or at in {begin + AHEAD, len(self.expected)}:
                self.stops.append(at)
                begin, size_bytes = at, 0

    def ahead(self, needed: int) -> int:
        """How many are posted before an action waits for the first `needed`."""
        return self.stops[min(bisect_right(self.stops, needed), len(self.stops) - 1)]


@dataclass(slots=True)
class _Outgoing:
    """What is on its way to one peer."""

    peer: int
    group: Any
    kept: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)
    arrived: int = 0
    """How many of this step's sends certainly have."""

    def settle(self, arrived: int) -> None:
        """Lets go of what has arrived."""
        for _ in range(arrived - self.arrived):
            self.kept.popleft()[0].wait()
        self.arrived = arrived


@dataclass(slots=True)
class _Work:
    """Sends and receives of one action."""

    box: _Inbox
    needed: dict[int, tuple[_Incoming, int]] = field(default_factory=dict)
    """For each peer how many of its pieces are posted before the action waits for its own."""
    proven: dict[int, tuple[_Outgoing, int]] = field(default_factory=dict)
    """For each peer how many sends to it have arrived once this has been received."""
    sends: list[tuple[Piece, _Outgoing]] = field(default_factory=list)
    stays: list[tuple[Piece, _Inbox, Piece]] = field(default_factory=list)
    """What another action of this rank takes: the piece, the box of that action, the piece there."""


class Messages:
    """Sends and receives of one rank, action by action; `begin` starts a step, `finish` ends it."""

    def __init__(
        self,
        program: Program,
        rank: int,
        cuts: Sequence[Sequence[PassedTensor]],
        ways: NeighbourGroups,
        device: torch.device,
    ) -> None:
        """`ways` carry messages to other ranks."""
        self._device = device
        mine = Orders(program, rank, cuts)
        self._incoming: list[_Incoming] = []
        self._outgoing: list[_Outgoing] = []
        self.exchanges = mine.exchanges
        works = [_Work(_Inbox(one.takes)) for one in mine.exchanges]
        for peer in mine.peers:
            if peer == rank:
                for at, piece, to, into in mine.sent_to(mine):
                    works[at].stays.append((piece, works[to].box, into))
                continue
            theirs = Orders(program, peer, cuts)
            incoming = _Incoming(peer, ways.of(peer))
            outgoing = _Outgoing(peer, ways.to(peer))
            self._incoming.append(incoming)
            self._outgoing.append(outgoing)
            taken: list[int] = []  # of the peer's actions the one by which it has taken the first, the first two, …
            for at, piece, to, _ in mine.sent_to(theirs):
                works[at].sends.append((piece, outgoing))
                taken.append(max(to, taken[-1]) if taken else to)
            last: dict[int, int] = {}  # of the pieces of an action the number of the last
            for at, _, to, into in theirs.sent_to(mine):
                incoming.expected.append((works[to].box, into))
                last[to] = len(incoming.expected)
                works[to].proven[peer] = (outgoing, bisect_right(taken, at))
            incoming.plan_posts()
            for to, needed in last.items():
                works[to].needed[peer] = (incoming, incoming.ahead(needed))
        self._works = [
            (one.box, tuple(one.needed.values()), tuple(one.proven.values()), one.sends, one.stays) for one in works
        ]

    def begin(self) -> None:
        """Posts the first receives of a step."""
        for way in self._outgoing:
            way.arrived = 0
        for channel in self._incoming:
            channel.posted = 0
            if channel.stops:
                self._post(channel, channel.stops[0])

    def take(self, action: int) -> list[torch.Tensor]:
        """What an action of the rank takes, as soon as it is there."""
        box, needed, proven, _, _ = self._works[action]
        for channel, until in needed:
            if channel.posted < until:
                self._post(channel, until)
        if box.waits:
            for peer, wait in box.waits:
                HERE.waits = peer
                wait.wait()
            HERE.waits = None
        for way, arrived in proven:
            if way.arrived < arrived:
                way.settle(arrived)
        tensors = box.tensors
        if tensors:
            box.tensors, box.waits = [None] * len(tensors), []
        return tensors

    def give(self, action: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends what an action made, and does not wait; the tensors must not change afterwards."""
        _, _, _, sends, stays = self._works[action]
        for piece, way in sends:
            tensor = tensors[piece.tensor]
            part = (tensor if piece.rows is _ALL else tensor[piece.rows]).contiguous()
            way.kept.append((way.group.send([part], way.peer, 0), part))
        for piece, box, into in stays:
            tensor = tensors[piece.tensor]
            part = tensor if piece.rows is _ALL else tensor[piece.rows]
            if into.rows is _ALL:
                box.tensors[into.tensor] = part
            else:
                box.room(into, self._device).copy_(part)

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        for way in self._outgoing:
            with HERE.waiting(way.peer):
                way.settle(way.arrived + len(way.kept))

    def _post(self, channel: _Incoming, until: int) -> None:
        group, peer = channel.group, channel.peer
        for box, piece in channel.expected[channel.posted : until]:
            box.waits.append((peer, group.recv([box.room(piece, self._device)], peer, 0)))
        channel.posted = until
