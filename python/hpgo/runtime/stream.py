"""Inference: micro-batches enter at the first stage of a plan, pass all others, and leave the last one in order.

Each rank takes a packet from the one before, runs its layers, and hands a packet to the one behind, as long as
micro-batches come. Between two stages there is a place for one packet that is sent and one for what waits: a rank that
finds no place waits for it, and so does in the end the first one, which takes no more from its source. The last rank
tells the first one of each micro-batch that has left.
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

    def __init__(self, ways: Ways, peer: int, places: Sequence[torch.Tensor]) -> None:
        self._peer, self._way = peer, ways.of(peer)
        self._places = deque(places)
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

    ranks: tuple[int, ...]
    """Of all stages, in order."""
    stage: int
    part: Part
    cuts: Sequence[Layout]
    """What crosses behind each stage but the last."""
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

    @property
    def is_first(self) -> bool:
        """Whether micro-batches enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether they leave here."""
        return self.stage == len(self.ranks) - 1


class Stream:
    """One rank's part of all micro-batches of one source."""

    def __init__(self, post: Post, stamps: Stamps, in_flight: int) -> None:
        """At most `in_flight` micro-batches have entered and not left."""
        self._post, self._stamps, self._in_flight = post, stamps, in_flight
        self._number, self._gone = -1, 0
        self.rows: deque[int] = deque(maxlen=REMEMBERED)
        """Of the last micro-batches."""
        self._taken: deque[Any] = deque(maxlen=2 * REMEMBERED)
        self.is_cut_short = False
        """Whether a rank was asked to end, so that no more micro-batches have entered."""
        ranks, stage, ways, device = post.ranks, post.stage, post.ways, post.device
        self._from = self._gone_from = None
        self._to = self._gone_to = None
        if not post.is_first:
            waiting = [post.cuts[stage - 1].empty(device) for _ in range(1 if post.lock_step else 2)]
            self._from = _Incoming(ways, ranks[stage - 1], waiting)
        if not post.is_last:
            self._to = _Outgoing(ways, ranks[stage + 1], [post.cuts[stage].empty(device)])
        if len(ranks) > 1 and (post.is_first or post.is_last):
            words = list(torch.zeros(in_flight, 1, dtype=torch.int64, device=device))
            if post.is_first:
                self._gone_from = _Incoming(ways, ranks[-1], words[:1])
            else:
                self._gone_to = _Outgoing(ways, ranks[0], words)

    @property
    def last_action(self) -> RankAction | None:
        """The pass that runs, or ran last."""
        return RankAction("F", self._post.stage, self._number, (), ())

    @property
    def clock_ns(self) -> list[int]:
        """Begin and end of the last passes, one after the other, by `time.perf_counter_ns`."""
        return self._stamps.in_ns(list(self._taken))

    def run(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Passes on all micro-batches, which the first rank takes from `batches`.

        On the last rank, gives what the model returns for each of them.
        """
        post = self._post
        for self._number in count():
            HERE.acts(self)
            head, held = self._enter(batches) if self._from is None else self._receive(self._from)
            self.is_cut_short |= head.ends
            if not head.rows:
                break
            outputs = self._compute(head.rows, held)
            self.is_cut_short |= _is_asked_to_end()
            if self._to is not None:
                named = {value.name: tensor for value, tensor in zip(post.part.gives, outputs, strict=True)}
                self._give(self._to, head.rows, held | named)
                continue
            if self._gone_to is not None:
                self._gone_to.send(self._gone_to.place().fill_(int(self.is_cut_short)))
            outputs = [_apart(tensor, held) for tensor in outputs]
            HERE.does(f"the time behind micro-batch {self._number}")
            yield tuple(outputs)
        if self._to is not None:
            self._give(self._to, 0, {})
            self._to.settle()
        while self._gone_from is not None and self._gone < self._number:
            self._hear(self._gone_from)
        if self._gone_to is not None:
            self._gone_to.settle()

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
        return Head(len(next(iter(held.values()))), ends=False), held

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

    def _receive(self, source: _Incoming) -> tuple[Head, dict[str, torch.Tensor]]:
        """The next micro-batch from the stage before; room for the one behind it is made before this one runs."""
        cut, packet = self._post.cuts[self._post.stage - 1], source.take()
        head = cut.head(packet)
        if head.rows and not self._post.lock_step:
            source.post()
        return head, cut.read(packet, head.rows) if head.rows else {}

    def _compute(self, rows: int, held: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the stage's layers make of a micro-batch."""
        part, stamp = self._post.part, self._stamps.take
        self.rows.append(rows)
        self._taken.append(stamp())
        with torch.no_grad(), self._post.autocast():
            made = part(*(held[value.name] for value in part.takes), rows=rows)
        self._taken.append(stamp())
        return list(made)

    def _give(self, to: _Outgoing, rows: int, tensors: dict[str, torch.Tensor]) -> None:
        """Hands a micro-batch on, or the end; in lock step, waits until it is taken."""
        packet = to.place()
        self._post.cuts[self._post.stage].write(packet, Head(rows, self.is_cut_short), tensors)
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
