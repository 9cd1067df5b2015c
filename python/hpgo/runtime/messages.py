"""Messages between ranks: a sequence of tensors for each pair and direction, known before the first step.

Sender and receiver derive the same sequence from the program, so messages need no tags. NCCL has none: it pairs the
n-th send with the n-th receive. Receives are posted in the sender's order, before they are needed. Sends never wait.
Their tensors are kept until something proves that they have arrived.

Between two ranks, each direction has a sequence of tensors that both know before the first step. It follows the
sender's actions, with the rows that both ranks share, of every tensor at the cut. The receiver posts its receives in
that order: at least one ahead of what it waits for, and at most 16 or 4 MiB together. So messages need no tags. With
NCCL, each direction has a communicator, because one communicator runs messages between two ranks one after the other.

- Rows go directly from producer to consumer.
- A tensor without rows, such as a table that all samples share, comes whole from the replica that sends the first of
  the receiver's rows. Its gradient returns there, and the parts add up to the whole gradient.
- A tensor that skips stages passes through each stage between, and so does its gradient.

Sends are kept until they have certainly arrived, without acknowledgments. A receiver that returns something computed
after a message has received that message. So the schedule shows, for each receive, how many earlier sends have arrived,
and these are released. The end of the step waits for the rest.

Ranks can't deadlock. A rank waits in three places.

1. For the inputs of an action. They were made by actions that come earlier in every order in which one device per stage
   could run all actions (docs/program.md). Take the first waiting action in such an order. Its producers come earlier,
   so they have run, and have sent without waiting. Its receive is posted, with all receives before it in the sequence,
   each into a separate buffer. So nothing must be taken before it, and it arrives.
2. For a send that has arrived, which takes no time, and for the others after all actions. Then their receivers, which
   complete by (1), have posted all receives.
3. For reductions. Reductions of a group start in one order on all ranks, that of its buckets. Each starts without
   waiting, once the rank's last backward passes have filled it. All are waited for after the last action, which every
   rank reaches by (1).

Layers that communicate with their replicas, such as batch normalization, use a separate group.
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
"""Maximum number, and maximum bytes, of receives from one peer that are posted together.

Gloo notifies the sender of each, which delays its computation, but many notifications at once cost little more than
one. At least one receive is posted beyond the one that an action waits for, regardless of its size. Not tuned."""
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class PassedTensor:
    """A tensor that one stage sends to the next of its pipeline replica."""

    given: int
    """Index in what the stage gives."""
    taken: int
    """Index in what the next stage takes."""
    value: Value


def boundary_tensors(parts: Sequence[StageModule], stages_per_pipeline: int) -> list[tuple[PassedTensor, ...]]:
    """Return the tensors that cross the cut behind each stage; none behind the last stage of a pipeline replica."""
    found: list[tuple[PassedTensor, ...]] = []
    for number, part in enumerate(parts):
        if number % stages_per_pipeline == stages_per_pipeline - 1:
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
    """A tensor, or some rows of it, that one rank sends to another."""

    peer: int
    tensor: int
    """Index of the tensor in `Tensors`."""
    rows: slice
    """Rows, counted from the first row of the replica."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors that an action takes from other stages, or gives to them."""

    crossing: tuple[int, ...]
    """Index among the tensors of the cut, of each tensor or of the tensor whose gradient it is. The gradient of a
    tensor without rows appears once for each replica that it comes from. These are added up."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    pieces: tuple[Piece, ...]

    def size_bytes(self, tensor: int) -> int:
        """Return the size of one tensor in bytes."""
        return math.prod(self.shapes[tensor]) * self.dtypes[tensor].itemsize


_NOTHING = Tensors((), (), (), ())


def _taken_or_given(
    program: Program, cut: Sequence[PassedTensor], rows: range, messages: Sequence[Message], *, forward: bool
) -> Tensors:
    """Return the tensors of `messages`, which all cross one cut to or from a replica with these `rows`."""
    crossing: list[int] = []
    shapes: list[tuple[int, ...]] = []
    pieces: list[Piece] = []
    for at, one in enumerate(cut):
        value = one.value
        if not (forward or value.has_gradient):
            continue
        for message in messages:
            # A tensor without rows is equal on all replicas. Its reader gets it from the replica that sends its first
            # row, and returns the gradient there.
            reader = program.stages[max(message.from_stage, message.to_stage)]
            if not value.by_row and all(message.rows.start != theirs.start for theirs in reader.rows):
                continue
            # Rows from several senders share one tensor. Gradients of a tensor without rows are added, so each gets its
            # own.
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
    """Tensors that one action of a rank takes from other stages, and tensors that it gives to them."""

    takes: Tensors
    gives: Tensors


class Orders:
    """Actions of one rank, with the tensors that each takes and gives."""

    def __init__(self, program: Program, rank: int, cuts: Sequence[Sequence[PassedTensor]]) -> None:
        mine = program.for_rank(rank)
        self.rank, self.actions = rank, mine.actions
        rows_of = {stage.stage: stage.rows for stage in mine.stages}
        by_kind_and_stage: dict[tuple[str, int], Exchange] = {}

        def exchange(action: RankAction) -> Exchange:
            def tensors(messages: Sequence[Message]) -> Tensors:
                if not messages:
                    return _NOTHING
                cut = cuts[min(messages[0].from_stage, messages[0].to_stage)]
                return _taken_or_given(program, cut, rows_of[action.stage], messages, forward=action.kind == "F")

            return Exchange(tensors(action.receives), tensors(action.sends))

        for action in self.actions:
            if (action.kind, action.stage) not in by_kind_and_stage:
                by_kind_and_stage[action.kind, action.stage] = exchange(action)
        self.exchanges = [by_kind_and_stage[action.kind, action.stage] for action in self.actions]
        self._place = {
            (one.kind == "F", one.stage, one.micro_batch): at for at, one in enumerate(self.actions) if one.kind != "W"
        }
        self.peers = sorted(
            {piece.peer for one in by_kind_and_stage.values() for piece in (*one.takes.pieces, *one.gives.pieces)}
        )

    def sent_to(self, other: Orders) -> Iterator[tuple[int, Piece, int, Piece]]:
        """Yield everything that this rank sends to another, in order.

        Each item has the action here, the piece here, the action there and the piece there.
        """
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
    """Memory for the tensors that one action takes, filled as they arrive."""

    __slots__ = ("tensors", "waits", "wanted")

    def __init__(self, wanted: Tensors) -> None:
        self.wanted = wanted
        self.tensors: list[torch.Tensor | None] = [None] * len(wanted.shapes)
        self.waits: list[tuple[int, Any]] = []
        """Posted receives, each with its sender."""

    def room(self, piece: Piece, device: torch.device) -> torch.Tensor:
        """Return the memory into which a piece is received, allocated at its first piece."""
        at = piece.tensor
        tensor = self.tensors[at]
        if tensor is None:
            tensor = torch.empty(self.wanted.shapes[at], dtype=self.wanted.dtypes[at], device=device)
            self.tensors[at] = tensor
        return tensor if piece.rows is _ALL else tensor[piece.rows]


@dataclass(slots=True)
class _Incoming:
    """All pieces that one peer sends in a step, in its order."""

    peer: int
    group: Any
    expected: list[tuple[_Inbox, Piece]] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    """Numbers of pieces at which posting pauses, ascending. The last one is the number of all pieces."""
    posted: int = 0

    def plan_posts(self) -> None:
        """Compute `stops` from the limits on count and bytes."""
        begin, size_bytes = 0, 0
        for at, (box, piece) in enumerate(self.expected, start=1):
            size_bytes += box.wanted.size_bytes(piece.tensor)
            if size_bytes >= AHEAD_BYTES or at in {begin + AHEAD, len(self.expected)}:
                self.stops.append(at)
                begin, size_bytes = at, 0

    def ahead(self, needed: int) -> int:
        """Return the number of receives to post before an action waits for the first `needed`."""
        return self.stops[min(bisect_right(self.stops, needed), len(self.stops) - 1)]


@dataclass(slots=True)
class _Outgoing:
    """Sends to one peer that may not have arrived yet."""

    peer: int
    group: Any
    kept: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)
    arrived: int = 0
    """Number of this step's sends that have certainly arrived."""

    def settle(self, arrived: int) -> None:
        """Release the tensors of the first `arrived` sends of this step."""
        for _ in range(arrived - self.arrived):
            self.kept.popleft()[0].wait()
        self.arrived = arrived


@dataclass(slots=True)
class _Work:
    """Sends and receives of one action."""

    box: _Inbox
    needed: dict[int, tuple[_Incoming, int]] = field(default_factory=dict)
    """Number of each peer's pieces that must be posted before the action waits for its own."""
    proven: dict[int, tuple[_Outgoing, int]] = field(default_factory=dict)
    """Number of sends to each peer that have arrived once this action's inputs have."""
    sends: list[tuple[Piece, _Outgoing]] = field(default_factory=list)
    stays: list[tuple[Piece, _Inbox, Piece]] = field(default_factory=list)
    """Pieces for other actions of this rank: the piece, the inbox of that action, and the piece there."""


class Messages:
    """Sends and receives of one rank, action by action. `begin` starts a step and `finish` ends it."""

    def __init__(
        self,
        program: Program,
        rank: int,
        cuts: Sequence[Sequence[PassedTensor]],
        groups: NeighbourGroups,
        device: torch.device,
    ) -> None:
        """Derive all messages of the rank from the program. `groups` transport them."""
        self._device = device
        mine = Orders(program, rank, cuts)
        self._incoming: list[_Incoming] = []
        self._outgoing: list[_Outgoing] = []
        self.exchanges = mine.exchanges
        works = [_Work(_Inbox(one.takes)) for one in mine.exchanges]
        # The plan of both sides is derived here, once. In the step loop, only tensors and counts are left.
        for peer in mine.peers:
            if peer == rank:
                for at, piece, to, into in mine.sent_to(mine):
                    works[at].stays.append((piece, works[to].box, into))
                continue
            theirs = Orders(program, peer, cuts)
            incoming = _Incoming(peer, groups.of(peer))
            outgoing = _Outgoing(peer, groups.to(peer))
            self._incoming.append(incoming)
            self._outgoing.append(outgoing)
            # For each n, the peer's action at whose start it has received the first n of our pieces.
            taken: list[int] = []
            for at, piece, to, _ in mine.sent_to(theirs):
                works[at].sends.append((piece, outgoing))
                taken.append(max(to, taken[-1]) if taken else to)
            # For each action of ours, the number of the last piece that it takes from the peer.
            last: dict[int, int] = {}
            for at, _, to, into in theirs.sent_to(mine):
                incoming.expected.append((works[to].box, into))
                last[to] = len(incoming.expected)
                # The peer sent this piece after its action `at`, so everything that this action took has arrived there.
                # This proof makes explicit acknowledgments unnecessary.
                works[to].proven[peer] = (outgoing, bisect_right(taken, at))
            incoming.plan_posts()
            for to, needed in last.items():
                works[to].needed[peer] = (incoming, incoming.ahead(needed))
        self._works = [
            (one.box, tuple(one.needed.values()), tuple(one.proven.values()), one.sends, one.stays) for one in works
        ]

    def begin(self) -> None:
        """Post the first receives of a step."""
        for way in self._outgoing:
            way.arrived = 0
        for channel in self._incoming:
            channel.posted = 0
            if channel.stops:
                # Post before the first action, so that messages of fast peers find their memory ready.
                self._post(channel, channel.stops[0])

    def take(self, action: int) -> list[torch.Tensor]:
        """Return the inputs of an action, as soon as they have arrived."""
        box, needed, proven, _, _ = self._works[action]
        for channel, until in needed:
            if channel.posted < until:
                self._post(channel, until)
        if box.waits:
            # Set `HERE.waits` directly. A context manager per message would slow down every action.
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
        """Send the outputs of an action without waiting. The tensors must not change afterwards."""
        _, _, _, sends, stays = self._works[action]
        for piece, way in sends:
            tensor = tensors[piece.tensor]
            # Communication libraries send contiguous memory. Whole rows of a contiguous tensor are contiguous, so this
            # copies rarely.
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
        """Wait until everything that was sent has arrived."""
        for way in self._outgoing:
            with HERE.waiting(way.peer):
                way.settle(way.arrived + len(way.kept))

    def _post(self, channel: _Incoming, until: int) -> None:
        group, peer = channel.group, channel.peer
        for box, piece in channel.expected[channel.posted : until]:
            box.waits.append((peer, group.recv([box.room(piece, self._device)], peer, 0)))
        channel.posted = until
