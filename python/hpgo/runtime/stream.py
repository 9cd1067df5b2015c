"""Inference: micro-batches enter at the first stage of a plan, pass all others, and leave the last one in order.

Each rank takes a packet from the one before, runs its layers, and hands a packet to the one behind, as long as
micro-batches come. Between two stages there is a place for one packet that is sent and one for what waits: a rank that
finds no place waits for it, and so does in the end the first one, which takes no more from its source. The last rank
tells the first one of each micro-batch that has left.

Where several hosts share a stage, micro-batches go to one after the other. One host of the first stage takes all from
the source, and hands the others theirs; one of the last stage gets what the others make, and gives all in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hpgo.base.errors import ArgumentError, HpgoError, RunError
from hpgo.base.wording import counted, shown
from hpgo.programs.ranks import RankAction
from hpgo.runtime import guards
from hpgo.runtime.meeting import first_line
from hpgo.runtime.packets import Head
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from hpgo.runtime.clocks import Stamps
    from hpgo.runtime.meeting import Ways
    from hpgo.runtime.packets import Layout
    from hpgo.runtime.parts import Part

REMEMBERED = 10_000
"""Micro-batches whose times are kept, the last ones."""
_NO_MORE = object()


class _Outgoing:
    """What one rank sends to another, from places that are filled again once it is taken."""

    def __init__(self, ways: Ways, peer: int, places: Sequence[torch.Tensor]) -> None:
        self._peer, self._way = peer, ways.to(peer)
        self._free = deque(places)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def place(self) -> torch.Tensor:
        """One to fill, as soon as there is one."""
        if not self._free:
            self._take_back()
        return self._free.popleft()

    def send(self, filled: torch.Tensor) -> None:
        """Sends what was filled, and does not wait."""
        self._sent.append((self._way.send([filled], self._peer, 0), filled))

    def settle(self) -> None:
        """Waits until all that was sent is taken."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        wait, place = self._sent.popleft()
        with HERE.waiting(self._peer):
            wait.wait()
        self._free.append(place)


class _Incoming:
    """What one rank receives from another, in turn into each of its places."""

    def __init__(self, ways: Ways, peer: int, places: deque[torch.Tensor]) -> None:
        """Ranks that send to this one in turn may share `places`."""
        self._peer, self._way = peer, ways.of(peer)
        self._places = places
        self._wait: Any = None

    def post(self) -> None:
        """Makes ready for the next one, if that is not done yet; then the place of the one before the last is lost."""
        if self._wait is None:
            self._places.rotate(1)
            self._wait = self._way.recv([self._places[0]], self._peer, 0)

    def take(self) -> torch.Tensor:
        """The next one, as soon as it is there."""
        self.post()
        with HERE.waiting(self._peer):
            self._wait.wait()
        self._wait = None
        return self._places[0]


@dataclass(frozen=True, slots=True)
class Post:
    """One rank's in the row of stages."""

    routes: Sequence[tuple[int, ...]]
    """The ranks that micro-batches 0, 1 and so on meet, stage by stage, until they come again."""
    rank: int
    stage: int
    part: Part
    cuts: Sequence[Layout]
    """What comes into the first stage, crosses behind each, and leaves the last."""
    inputs: Sequence[torch.Tensor]
    """An example of them."""
    casts: bool
    """Whether floating data becomes of the type of the weights."""
    rows: int
    """Of a micro-batch, at most."""
    lock_step: bool
    ways: Ways
    """What carries messages to other ranks."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]

    def host(self, stage: int, number: int) -> int:
        """The rank that takes a micro-batch through a stage."""
        return self.routes[number % len(self.routes)][stage]

    def hosts(self, stage: int) -> list[int]:
        """The ranks that take turns at a stage."""
        return sorted({route[stage] for route in self.routes})

    @property
    def is_last(self) -> bool:
        """Whether its stage is the last."""
        return self.stage == len(self.routes[0]) - 1

    @property
    def source(self) -> int:
        """The rank that micro-batches come to: the last in turn, so that it hands out others before its own."""
        return source_of(self.routes)

    @property
    def sink(self) -> int:
        """The rank that outputs leave from."""
        return sink_of(self.routes)

    def before(self, number: int) -> int:
        """Who hands it a micro-batch."""
        return self.host(self.stage - 1, number) if self.stage else self.source

    def behind(self, number: int) -> int:
        """Whom it hands a micro-batch."""
        return self.sink if self.is_last else self.host(self.stage + 1, number)


def source_of(routes: Sequence[tuple[int, ...]]) -> int:
    """The rank that reads the micro-batches."""
    return routes[-1][0]


def sink_of(routes: Sequence[tuple[int, ...]]) -> int:
    """The rank that gives the outputs."""
    return min(route[-1] for route in routes)


class Stream:
    """One rank's part of all micro-batches of one source."""

    def __init__(self, post: Post, stamps: Stamps, in_flight: int) -> None:
        """At most `in_flight` micro-batches have entered and not left."""
        self._post, self._stamps, self._in_flight = post, stamps, in_flight
        self._number, self._gone = -1, 0
        self._rows: deque[int] = deque(maxlen=REMEMBERED)
        self._taken: deque[Any] = deque(maxlen=2 * REMEMBERED)
        self.is_cut_short = False
        """Whether a rank was asked to end, so that no more micro-batches have entered."""
        self._own: dict[int, tuple[torch.Tensor, ...]] = {}
        """Outputs of this rank, the sink, that others come before."""
        rank, ways, device = post.rank, post.ways, post.device
        turns = [number for number, route in enumerate(post.routes) if route[post.stage] == rank]
        before, behind = post.cuts[post.stage], post.cuts[post.stage + 1]
        places = 0 if rank == post.source else 1 if post.lock_step else 2
        room = deque(before.empty(device) for _ in range(places))
        self._from = {peer: _Incoming(ways, peer, room) for peer in map(post.before, turns) if peer != rank}
        self._to = {
            peer: _Outgoing(ways, peer, [behind.empty(device)]) for peer in set(map(post.behind, turns)) - {rank}
        }
        self._dealt: dict[int, _Outgoing] = {}
        if rank == post.source:
            others = [peer for peer in post.hosts(0) if peer != rank]
            self._dealt = {peer: _Outgoing(ways, peer, [before.empty(device)]) for peer in others}
        self._results: dict[int, _Incoming] = {}
        if rank == post.sink:
            others = [peer for peer in post.hosts(post.stage) if peer != rank]
            self._results = {peer: _Incoming(ways, peer, deque([behind.empty(device)])) for peer in others}
            for one in self._results.values():
                one.post()
        self._ended: set[int] = set()
        """Ranks that share the last stage, and whose results are over."""
        self._gone_from = self._gone_to = None
        if post.source != post.sink and rank in {post.source, post.sink}:
            words = list(torch.zeros(in_flight, 1, dtype=torch.int64, device=device))
            if rank == post.source:
                self._gone_from = _Incoming(ways, post.sink, deque(words[:1]))
            else:
                self._gone_to = _Outgoing(ways, post.source, words)

    @property
    def last_action(self) -> RankAction | None:
        """The pass that runs, or ran last."""
        return RankAction("F", self._post.stage, self._number, (), ())

    @property
    def clock_ns(self) -> list[int]:
        """Begin and end of the last passes, one after the other, by `time.perf_counter_ns`."""
        return self._stamps.in_ns(list(self._taken))

    @property
    def rows(self) -> list[int]:
        """Of the last micro-batches, on the source: the first of them took the first route."""
        forgotten = max(0, self._number) - len(self._rows)
        return list(self._rows)[-forgotten % len(self._post.routes) :]

    def run(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Passes on all micro-batches, which the source takes from `batches`.

        On the sink, gives what the model returns for each of them.
        """
        post = self._post
        for number in count():
            host = post.host(post.stage, number)
            if post.rank not in {host, post.source}:
                continue
            self._number = number
            HERE.acts(self)
            if post.rank == post.sink:  # before these have left, this one can't enter
                yield from self._leave(number - self._in_flight + 1)
            head, held = self._enter(batches) if post.rank == post.source else self._receive(number)
            self.is_cut_short |= head.ends
            if not head.rows:
                break
            if host != post.rank:
                self._give(self._dealt[host], post.cuts[0], head.rows, held)
                continue
            outputs = self._compute(head.rows, held)
            self.is_cut_short |= _is_asked_to_end()
            if post.is_last and post.rank == post.sink:
                self._own[number] = tuple(self._kept(outputs, held))
                yield from self._leave(number + 1)
                continue
            named = {value.name: tensor for value, tensor in zip(post.part.gives, outputs, strict=True)}
            self._give(self._to[post.behind(number)], post.cuts[post.stage + 1], head.rows, held | named)
        yield from self._end()

    def _end(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Tells others that no more comes, and hears so from them; on the sink, gives what is left."""
        post = self._post
        for cut, channels in ((post.cuts[0], self._dealt), (post.cuts[post.stage + 1], self._to)):
            for one in channels.values():
                self._give(one, cut, 0, {})
                one.settle()
        ended = post.before(self._number)
        for peer, incoming in self._from.items():
            if peer != ended:
                incoming.take()
        if post.rank == post.sink:
            yield from self._leave(None)
        while self._gone_from is not None and self._gone < self._number:
            self._hear(self._gone_from)
        if self._gone_to is not None:
            self._gone_to.settle()

    def _leave(self, end: int | None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Gives outputs of the micro-batches before `end` that have not left, in order; without it, all there are."""
        post = self._post
        layout = post.cuts[-1]
        while end is None or self._gone < end:
            host = post.host(post.stage, self._gone)
            if host in self._ended:
                break
            if host != post.rank:
                packet = self._results[host].take()
                head = layout.head(packet)
                self.is_cut_short |= head.ends
                if not head.rows:
                    self._ended.add(host)
                    break
                held = layout.read(packet, head.rows)
                outputs = tuple(held[value.name].clone() for value in post.part.gives)
                self._results[host].post()
            elif self._gone in self._own:
                outputs = self._own.pop(self._gone)
            else:
                break
            self._gone += 1
            if self._gone_to is not None:
                self._gone_to.send(self._gone_to.place().fill_(int(self.is_cut_short)))
            HERE.does(f"the time behind micro-batch {self._gone - 1}")
            yield outputs
            HERE.acts(self)
        if end is None:
            for peer in self._results.keys() - self._ended:
                self._results[peer].take()

    def _kept(self, outputs: Sequence[torch.Tensor], held: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Outputs with memory of their own, and where other hosts share the stage, of the type that theirs come in."""
        for value, tensor in zip(self._post.part.gives, outputs, strict=True):
            yield _apart(tensor.to(value.dtype) if self._results else tensor, held)

    def _enter(self, batches: Iterator[Any]) -> tuple[Head, dict[str, torch.Tensor]]:
        """The next micro-batch of the source, once there is room for it."""
        while self._gone_from is not None and self._number - self._gone >= self._in_flight:
            self._hear(self._gone_from)
        if self._gone_from is not None and self._gone < self._number:
            self._gone_from.post()
        if self.is_cut_short or _is_asked_to_end():
            return Head(0, ends=True), {}
        HERE.does(f"the wait for micro-batch {self._number}")
        try:
            given = next(batches, _NO_MORE)
        except HpgoError:
            raise
        except Exception as failure:
            hint = "it is what the iterator of micro-batches raised"
            raise RunError(f"{type(failure).__name__}: {first_line(failure)}", hint) from failure
        if given is _NO_MORE:
            return Head(0, ends=False), {}
        held = self._checked(given)
        HERE.acts(self)
        self._rows.append(len(next(iter(held.values()))))
        return Head(self._rows[-1], ends=False), held

    def _checked(self, given: object) -> dict[str, torch.Tensor]:
        """A micro-batch as inputs of the model, by name."""
        post = self._post
        tensors = (given,) if isinstance(given, torch.Tensor) else given
        what = f"micro-batch {self._number}"
        if not isinstance(tensors, tuple | list) or not all(isinstance(one, torch.Tensor) for one in tensors):
            raise ArgumentError(f"{what} is {shown(given)}", "give a tensor, or a tuple of one for each input")
        if len(tensors) != len(post.inputs):
            raise ArgumentError(
                f"{what} has {counted(len(tensors), 'tensor')}, and the workload's example {len(post.inputs)}",
                "give a tuple of one tensor for each input",
            )
        held = {}
        for number, (one, example) in enumerate(zip(tensors, post.inputs, strict=True)):
            rows = len(one) if one.dim() else 0
            if one.shape[1:] != example.shape[1:] or not rows or rows != len(tensors[0]):
                raise ArgumentError(
                    f"input {number} of {what} has the shape {tuple(one.shape)}, and one sample of the workload's"
                    f" example {tuple(example.shape[1:])}",
                    "give each input a row for each sample, as the example has them",
                )
            if rows > post.rows:
                raise ArgumentError(
                    f"{what} has {counted(rows, 'row')}, and the plan is for {post.rows}",
                    "split it, or plan for a larger micro-batch; fewer rows are fine",
                )
            casts = post.casts and one.is_floating_point() and example.is_floating_point()
            if one.dtype != example.dtype and not casts:
                raise ArgumentError(
                    f"input {number} of {what} is of {one.dtype}, and the workload's example of {example.dtype}",
                    "convert it as the example is",
                )
            held[f"input:{number}"] = one.detach().to(post.device)
        return held

    def _receive(self, number: int) -> tuple[Head, dict[str, torch.Tensor]]:
        """A micro-batch from the stage before; room for the one behind it is made before this one runs."""
        post = self._post
        cut, packet = post.cuts[post.stage], self._from[post.before(number)].take()
        head = cut.head(packet)
        if head.rows and not post.lock_step:
            following = next(one for one in count(number + 1) if post.host(post.stage, one) == post.rank)
            self._from[post.before(following)].post()
        return head, cut.read(packet, head.rows) if head.rows else {}

    def _compute(self, rows: int, held: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the stage's layers make of a micro-batch."""
        part, stamp = self._post.part, self._stamps.take
        self._taken.append(stamp())
        with torch.no_grad(), self._post.autocast():
            made = part(*(held[value.name] for value in part.takes), rows=rows)
        self._taken.append(stamp())
        return list(made)

    def _give(self, to: _Outgoing, cut: Layout, rows: int, tensors: dict[str, torch.Tensor]) -> None:
        """Hands a micro-batch on, or the end; in lock step, waits until it is taken."""
        packet = to.place()
        cut.write(packet, Head(rows, self.is_cut_short), tensors)
        to.send(packet)
        if self._post.lock_step:
            to.settle()

    def _hear(self, last: _Incoming) -> None:
        """Waits until one more micro-batch has left."""
        self.is_cut_short |= bool(last.take().item())
        self._gone += 1


def _is_asked_to_end() -> bool:
    notice = guards.notice()
    return notice is not None and notice.is_given


def _apart(tensor: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor with memory of its own, where it lies in what was received, whose place is filled again."""
    begins = {one.untyped_storage().data_ptr() for one in held.values()}
    return tensor.clone() if tensor.untyped_storage().data_ptr() in begins else tensor
