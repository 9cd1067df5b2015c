"""Stream of micro-batches from the first stage of a plan through all others; outputs leave the last stage in order.

Each rank receives a packet from the stage before, runs its layers, and sends a packet to the next stage, as long as
micro-batches arrive. Between two stages, there is a place for one packet in transfer and one for a waiting packet. A
rank without a free place waits. This back-pressure reaches the first rank, which then takes no more from its source.
The last rank reports each micro-batch that has left to the first one, with the outputs if that is requested. A rank
that only holds the data is placed before the first stage, and has no layers.

If several hosts share a stage, they take micro-batches in turn. One host of the first stage reads the source and
distributes micro-batches. One host of the last stage collects the outputs of the others, and yields all in order.

Each rank receives a packet from the stage before, runs its layers, and fills the packet for the next stage. The number
of places for packets is fixed: two before each stage, one in use and one to receive into, and one after it for the
packet in transfer. The latter is free again when the receiver has posted its receive, as it starts on the packet
before. So

- a rank whose next host is slow finds no free place, and waits;
- the wait reaches the first stage, which reads the next micro-batch only when it can start on it: a slow stage stalls
  the source, and no queue grows;
- with *S* stages of one host each, at most 3 *S* − 2 micro-batches are in flight: one per stage, and one sent and one
  waiting at each of the *S* − 1 cuts.

So memory depends on the plan alone. A packet holds all tensors of a micro-batch that cross the cut, with the inputs
that later stages read. All packets keep their order, so outputs leave in the order of the inputs.

No deadlock. The rank that holds the first remaining micro-batch has finished all before it, and so has every later
rank. So the next rank has a free place, and the micro-batch moves on. The last rank never waits for its messages to the
first.

Hosts that take turns:

- Places are as above: two before each computing host, and one on each connection between two hosts.

There is no deadlock, for the same reason. The output rank waits for its own micro-batch only after the earlier ones
that `--in-flight` requires have left.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from hpgo.base.messages import pluralize, safe_repr
from hpgo.errors import ArgumentError, HpgoError, RunError
from hpgo.programs.ranks import RankAction
from hpgo.runtime import guards
from hpgo.runtime.channels import Incoming, Outgoing
from hpgo.runtime.infer.edges import BoundaryChannel, Receiver, Sender
from hpgo.runtime.packets import PacketHeader, PacketLayout
from hpgo.runtime.progress import HERE
from hpgo.runtime.rendezvous import first_line
from hpgo.runtime.stream_events import Moment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from hpgo.runtime.clocks import Stamps
    from hpgo.runtime.session import NeighbourGroups
    from hpgo.runtime.stage_module import StageModule
    from hpgo.runtime.stream_events import Watch

REMEMBERED = 10_000
"""Number of the last micro-batches whose times are kept. Not tuned."""
_NO_MORE = object()


@dataclass(frozen=True, slots=True)
class PipelinePosition:
    """The position of one rank in the chain of stages."""

    routes: Sequence[tuple[int, ...]]
    """Routes of ranks through the stages. Micro-batch i takes route i modulo the number of routes."""
    rank: int
    stage: int
    """Index of this rank's stage in the routes."""
    before_stages: int
    """Number of route entries before the first stage: 1 with a rank that only holds the data, otherwise 0."""
    part: StageModule | None
    """Layers of this rank, or None if it only holds the data."""
    cuts: Sequence[PacketLayout]
    """Layouts of the tensors that enter a route, cross each cut, and leave the last stage."""
    is_returned: bool
    """Whether outputs are sent back to the source."""
    inputs: Sequence[torch.Tensor]
    """Example of the model's inputs."""
    casts: bool
    """Whether floating-point inputs are converted to the number format of the weights."""
    rows: int
    """Maximum number of rows in a micro-batch."""
    lock_step: bool
    groups: NeighbourGroups
    """Process groups for messages to other ranks."""
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]

    def host(self, stage: int, number: int) -> int:
        """Return the rank that runs a micro-batch through a stage."""
        return self.routes[number % len(self.routes)][stage]

    def hosts(self, stage: int) -> list[int]:
        """Return the ranks that share a stage."""
        return sorted({route[stage] for route in self.routes})

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == len(self.routes[0]) - 1

    @property
    def source(self) -> int:
        """Rank that reads micro-batches: the last host in turn, so that it distributes other hosts' before its own."""
        return source_of(self.routes)

    @property
    def sink(self) -> int:
        """Rank at which outputs leave."""
        return sink_of(self.routes)

    def before(self, number: int) -> int:
        """Return the rank from which this rank receives a micro-batch."""
        return self.host(self.stage - 1, number) if self.stage else self.source

    def behind(self, number: int) -> int:
        """Return the rank to which this rank sends a micro-batch."""
        return self.sink if self.is_last else self.host(self.stage + 1, number)


def source_of(routes: Sequence[tuple[int, ...]]) -> int:
    """Return the rank that reads the micro-batches."""
    return routes[-1][0]


def sink_of(routes: Sequence[tuple[int, ...]]) -> int:
    """Return the rank that yields the outputs."""
    return min(route[-1] for route in routes)


class Stream:
    """One rank's part in the stream of all micro-batches of one source."""

    def __init__(
        self,
        position: PipelinePosition,
        stamps: Stamps,
        in_flight: int,
        *,
        hold_samples_per_s: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Prepare channels for at most `in_flight` micro-batches that have entered and not left.

        With `hold_samples_per_s`, each link uses the largest number of bits that it sustains at that rate.
        """
        self._position, self._stamps, self._in_flight, self._watch = position, stamps, in_flight, watch
        self._number, self._departed = -1, 0
        self._rows: deque[int] = deque(maxlen=REMEMBERED)
        self._pass_stamps: deque[Any] = deque(maxlen=2 * REMEMBERED)
        self.is_cut_short = False
        """Whether a rank was asked to end, so that no more micro-batches enter."""
        self._waiting_outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        """Outputs of this rank as the sink that wait for earlier micro-batches of other hosts."""
        rank, groups, device, note = position.rank, position.groups, position.device, self._note
        own_routes = [number for number, route in enumerate(position.routes) if route[position.stage] == rank]
        before, behind = position.cuts[position.stage], position.cuts[position.stage + 1]
        # The first stage receives from the source or from the data rank, which always send numbers unchanged.
        rate = hold_samples_per_s if position.stage > position.before_stages else None
        # Lock-step stages never receive while they compute, so one place is enough. The source receives nothing.
        places = 0 if rank == position.source else 1 if position.lock_step else 2
        receive_places = deque(BoundaryChannel(before, holds=rate is not None).empty(device) for _ in range(places))
        givers = Counter(peer for peer in map(position.before, own_routes) if peer != rank)
        self._receivers = {
            peer: Receiver(
                groups, peer, BoundaryChannel(before, holds=rate is not None), receive_places, note,
                # Each of several links that take turns carries only a part of the micro-batches, so each packet has
                # more time.
                within_s=None if rate is None else position.rows / rate * len(position.routes) / many,
            )
            for peer, many in givers.items()
        }  # fmt: skip
        holds = hold_samples_per_s is not None and position.stage >= position.before_stages and not position.is_last
        self._senders = {
            peer: Sender(groups, peer, behind, device, note, holds=holds)
            for peer in set(map(position.behind, own_routes)) - {rank}
        }
        self._distributed: dict[int, Sender] = {}
        if rank == position.source:
            others = [peer for peer in position.hosts(0) if peer != rank]
            self._distributed = {peer: Sender(groups, peer, before, device, note) for peer in others}
        # The sink posts these receives at once, so that other hosts of the last stage can send while it computes.
        self._results: dict[int, Receiver] = {}
        if rank == position.sink:
            others = [peer for peer in position.hosts(position.stage) if peer != rank]
            self._results = {
                peer: Receiver(groups, peer, BoundaryChannel(behind, holds=False), deque([behind.empty(device)]), note)
                for peer in others
            }
            for one in self._results.values():
                one.post()
        self._ended: set[int] = set()
        """Hosts of the last stage whose results are complete."""
        self._departure_layout = position.cuts[-1] if position.is_returned else PacketLayout((), position.rows)
        """Layout of the message from the sink to the source for each micro-batch that has left."""
        self._returned: deque[tuple[torch.Tensor, ...]] = deque()
        self._departures_in = self._departures_out = None
        if position.source != position.sink and rank in {position.source, position.sink}:
            if rank == position.source:
                self._departures_in = Incoming(groups, position.sink, deque([self._departure_layout.empty(device)]))
            else:
                # With a place for each micro-batch in flight, the sink never waits for the source. This rules out a
                # deadlock.
                self._departures_out = Outgoing(
                    groups, position.source, [self._departure_layout.empty(device) for _ in range(in_flight)]
                )
        self._handed_over_ns = perf_counter_ns()

    @property
    def last_action(self) -> RankAction | None:
        """Pass that runs or ran last, or None on a rank without layers."""
        stage = self._position.stage - self._position.before_stages
        return None if stage < 0 else RankAction("F", stage, self._number, (), ())

    @property
    def sent_bits(self) -> Counter[int]:
        """Number of micro-batches that this rank has sent, by bit width."""
        return sum((one.sent_bits for one in self._senders.values()), Counter())

    @property
    def clock_ns(self) -> list[int]:
        """Begin and end of the last passes in turn, on the clock of `time.perf_counter_ns`."""
        return self._stamps.in_ns(list(self._pass_stamps))

    @property
    def rows(self) -> list[int]:
        """Rows of the last micro-batches, on the source. The first entry is of a micro-batch of the first route."""
        forgotten = max(0, self._number) - len(self._rows)
        return list(self._rows)[-forgotten % len(self._position.routes) :]

    def run(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Stream all micro-batches, which the source takes from `batches`.

        On the sink, or on the source if outputs are returned to it, yield the model's outputs for each of them.
        """
        try:
            yield from self._run(batches)
        finally:
            for one in self._receivers.values():
                one.close()

    def _run(self, batches: Iterator[Any]) -> Iterator[tuple[torch.Tensor, ...]]:
        position = self._position
        # All ranks follow from a micro-batch's number which route it takes, so packets carry no numbers.
        for number in count():
            host = position.host(position.stage, number)
            if position.rank not in {host, position.source}:
                continue
            self._number = number
            HERE.acts(self)
            if position.rank == position.sink:  # frees the place in flight that this micro-batch needs
                yield from self._yield_outputs(number - self._in_flight + 1)
            head, held = self._enter(batches) if position.rank == position.source else self._receive(number)
            yield from self._returned_outputs()
            self.is_cut_short |= head.ends
            if not head.rows:
                break
            # The source has read a micro-batch of another host of the first stage, so hand it over.
            if host != position.rank:
                self._give(self._distributed[host], head.rows, held)
                continue
            named: dict[str, torch.Tensor] = {}
            if position.part is not None:
                HERE.acts(self)
                outputs = self._compute(position.part, head.rows, held)
                self.is_cut_short |= _is_asked_to_end()
                if position.is_last and position.rank == position.sink:
                    # The packet's memory is reused for the next micro-batch, so outputs that wait must not refer to it.
                    self._waiting_outputs[number] = tuple(self._owned_outputs(outputs, held))
                    yield from self._yield_outputs(number + 1)
                    continue
                named = {value.name: tensor for value, tensor in zip(position.part.gives, outputs, strict=True)}
            self._give(self._senders[position.behind(number)], head.rows, held | named)
        yield from self._end()

    def _end(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Send the end of the stream to others, and receive it from them; on the sink, yield the remaining outputs."""
        position = self._position
        for one in (*self._distributed.values(), *self._senders.values()):
            self._give(one, 0, {})
            one.finish()
        # The end came from the rank of the last number. The other senders send their own end, which must be received,
        # too.
        ended = position.before(self._number)
        for peer, incoming in self._receivers.items():
            if peer != ended:
                incoming.take()
        if position.rank == position.sink:
            yield from self._yield_outputs(None)
        while self._departures_in is not None and self._departed < self._number:
            self._await_departure(self._departures_in)
            yield from self._returned_outputs()
        if self._departures_out is not None:
            self._departures_out.settle()
        for incoming in self._receivers.values():
            incoming.finish()

    def _yield_outputs(self, end: int | None) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield outputs of micro-batches before `end` that have not left, in order; with None, all that there are."""
        position = self._position
        values = position.cuts[-1].values
        while end is None or self._departed < end:
            host = position.host(position.stage, self._departed)
            if host in self._ended:
                break
            if host != position.rank:
                head, held = self._results[host].take()
                self.is_cut_short |= head.ends
                if not head.rows:
                    self._ended.add(host)
                    break
                # Copy the outputs before the next receive into the same packet is posted.
                outputs = tuple(held[value.name].clone() for value in values)
                self._results[host].post()
            elif self._departed in self._waiting_outputs:
                outputs = self._waiting_outputs.pop(self._departed)
            else:
                break
            self._departed += 1
            if self._departures_out is not None:
                place = self._departures_out.place()
                named = {value.name: tensor for value, tensor in zip(values, outputs, strict=True)}
                self._departure_layout.write(place, PacketHeader(len(outputs[0]), self.is_cut_short), named)
                self._departures_out.send(place, (self._departure_layout.size_bytes,))
            if self._departures_out is None or not position.is_returned:
                yield self._hand_over(outputs, self._departed - 1)
                HERE.acts(self)
        if end is None:
            for peer in self._results.keys() - self._ended:
                self._results[peer].take()

    def _owned_outputs(self, outputs: Sequence[torch.Tensor], held: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield outputs that own their memory, in the number format of other hosts' outputs if the stage is shared."""
        for value, tensor in zip(self._position.cuts[-1].values, outputs, strict=True):
            yield _own_memory(tensor.to(value.dtype) if self._results else tensor, held)

    def _returned_outputs(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the outputs that were returned to the source."""
        while self._returned:
            yield self._hand_over(self._returned.popleft(), self._departed - len(self._returned) - 1)

    def _hand_over(self, outputs: tuple[torch.Tensor, ...], number: int) -> tuple[torch.Tensor, ...]:
        """Return outputs to the caller of `infer`, and record it, since the caller may take any amount of time."""
        HERE.does(f"the time behind micro-batch {number}")
        if self._watch is not None:
            begin_ns, self._handed_over_ns = self._handed_over_ns, perf_counter_ns()
            self._watch(Moment("output", number, begin_ns, self._handed_over_ns, len(outputs[0])))
        return outputs

    def _note(self, kind: str, begin_ns: int, samples: int, layout: PacketLayout | None = None) -> None:
        """Report an operation to the observer of the stream."""
        if self._watch is not None:
            size_bytes, bits = (0, 0) if layout is None else (layout.size_bytes, layout.bits)
            self._watch(Moment(kind, self._number, begin_ns, perf_counter_ns(), samples, size_bytes, bits))

    def _enter(self, batches: Iterator[Any]) -> tuple[PacketHeader, dict[str, torch.Tensor]]:
        """Return the next micro-batch of the source, once one more may be in flight."""
        while self._departures_in is not None and self._number - self._departed >= self._in_flight:
            self._await_departure(self._departures_in)
        # Post the receive early, so that the sink's next message is not delayed by this rank's pass.
        if self._departures_in is not None and self._departed < self._number:
            self._departures_in.post((self._departure_layout.size_bytes,))
        if self.is_cut_short or _is_asked_to_end():
            return PacketHeader(0, ends=True), {}
        HERE.does(f"the wait for micro-batch {self._number}")
        try:
            given = next(batches, _NO_MORE)
        except HpgoError:
            raise
        except Exception as failure:
            hint = "it is what the iterator of micro-batches raised"
            raise RunError(f"{type(failure).__name__}: {first_line(failure)}", hint) from failure
        if given is _NO_MORE:
            return PacketHeader(0, ends=False), {}
        held = self._checked(given)
        HERE.acts(self)
        self._rows.append(len(next(iter(held.values()))))
        return PacketHeader(self._rows[-1], ends=False), held

    def _checked(self, given: object) -> dict[str, torch.Tensor]:
        """Return a micro-batch as inputs of the model by name, on this device; raise ArgumentError if it is invalid."""
        position = self._position
        tensors = (given,) if isinstance(given, torch.Tensor) else given
        what = f"micro-batch {self._number}"
        if not isinstance(tensors, tuple | list) or not all(isinstance(one, torch.Tensor) for one in tensors):
            raise ArgumentError(f"{what} is {safe_repr(given)}", "give a tensor, or a tuple of one for each input")
        if len(tensors) != len(position.inputs):
            raise ArgumentError(
                f"{what} has {pluralize(len(tensors), 'tensor')}, but the workload has {len(position.inputs)} inputs",
                "give a tuple of one tensor for each input",
            )
        held = {}
        for number, (one, example) in enumerate(zip(tensors, position.inputs, strict=True)):
            rows = len(one) if one.dim() else 0
            if one.shape[1:] != example.shape[1:] or not rows or rows != len(tensors[0]):
                raise ArgumentError(
                    f"input {number} of {what} has the shape {tuple(one.shape)}, but a sample of the workload's"
                    f" example has {tuple(example.shape[1:])}",
                    "give each input one row per sample, with the shape of the example",
                )
            if rows > position.rows:
                raise ArgumentError(
                    f"{what} has {pluralize(rows, 'row')}, but the plan is for {position.rows}",
                    "split it, or plan for a larger micro-batch; fewer rows are fine",
                )
            casts = position.casts and one.is_floating_point() and example.is_floating_point()
            if one.dtype != example.dtype and not casts:
                raise ArgumentError(
                    f"input {number} of {what} has type {one.dtype}, but the workload's example has {example.dtype}",
                    "convert it with `.to({example.dtype})`",
                )
            held[f"input:{number}"] = one.detach().to(position.device)
        return held

    def _receive(self, number: int) -> tuple[PacketHeader, dict[str, torch.Tensor]]:
        """Receive a micro-batch from the stage before, and post the next receive before this one runs."""
        position = self._position
        head, held = self._receivers[position.before(number)].take()
        # In lock step there is a single place, which holds this micro-batch until it has been processed.
        if head.rows and not position.lock_step:
            following = next(one for one in count(number + 1) if position.host(position.stage, one) == position.rank)
            self._receivers[position.before(following)].post()
        return head, held

    def _compute(self, part: StageModule, rows: int, held: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Run the stage's layers on a micro-batch and return their outputs."""
        stamp, begin_ns = self._stamps.take, perf_counter_ns()
        self._pass_stamps.append(stamp())
        with torch.no_grad(), self._position.autocast():
            outputs = part(*(held[value.name] for value in part.takes), rows=rows)
        self._pass_stamps.append(stamp())
        self._note("pass", begin_ns, rows)
        return list(outputs)

    def _give(self, to: Sender, rows: int, tensors: dict[str, torch.Tensor]) -> None:
        """Send a micro-batch or the end; in lock step, wait until it is received."""
        to.give(PacketHeader(rows, self.is_cut_short), tensors)
        if self._position.lock_step:
            to.settle()

    def _await_departure(self, sink: Incoming) -> None:
        """Wait until one more micro-batch has left."""
        packet = sink.take((self._departure_layout.size_bytes,))
        head = self._departure_layout.head(packet)
        self.is_cut_short |= head.ends
        self._departed += 1
        if self._position.is_returned:
            read = self._departure_layout.read(packet, head.rows)
            self._returned.append(tuple(read[value.name].clone() for value in self._departure_layout.values))


def _is_asked_to_end() -> bool:
    notice = guards.notice()
    return notice is not None and notice.is_given


def _own_memory(tensor: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor that does not share memory with a received packet, whose memory is reused."""
    begins = {one.untyped_storage().data_ptr() for one in held.values()}
    return tensor.clone() if tensor.untyped_storage().data_ptr() in begins else tensor
