"""A program as one process of a launcher sees it: its layers, its rows, and each action with its messages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.programs.schedule import KINDS
from hpgo.programs.stages import BoundaryTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ProgramStage(Record):
    """Layers, the devices that hold them, and the rows of each micro-batch that each device works on."""

    layers: tuple[str, ...]
    """Layer ids, in an order in which they can run."""
    devices: tuple[int, ...]
    """One replica each; the rank of a process is its device's number."""
    rows: tuple[range, ...]
    """For each replica its samples of a micro-batch, counted from 0; together they are all of it, each once."""
    boundary_tensors: tuple[BoundaryTensor, ...] = ()
    """What it sends to the next stage of its chain; empty for a chain's last."""


@dataclass(frozen=True, slots=True)
class Message:
    """Rows that one rank sends to another: outputs on the way forward, their gradients on the way back."""

    peer: int
    """The rank at the other end; itself, if it holds both stages: then nothing travels."""
    rows: range
    """Samples of the micro-batch."""
    layers: tuple[str, ...]
    """Whose outputs these are, in the order in which they are sent."""
    from_stage: int
    to_stage: int


@dataclass(frozen=True, slots=True)
class RankAction:
    """One thing that a rank does, with what it waits for and what it passes on."""

    kind: str
    """F forward, B backward, I its half for inputs, W its half for weights."""
    stage: int
    micro_batch: int
    receives: tuple[Message, ...]
    """What must have come before it starts: outputs of the stage before for F, gradients of the next for B and I."""
    sends: tuple[Message, ...]
    """What leaves when it has ended."""
    overlaps_next: bool = False
    """Whether the schedule runs it and the next action as one; one after the other gives the same numbers."""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Layers whose gradients are summed over ranks when their last backward pass of a step has ended."""

    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    """In ascending order. One of them that holds two copies adds these up first, or keeps one."""


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage, or one of the stages, that a rank holds."""

    stage: int
    chain: int
    """Copy of the model that the stage belongs to; 0 unless the schedule is bidirectional."""
    layers: tuple[str, ...]
    replica: int
    rows: range
    """Its samples of each micro-batch."""
    peers: tuple[int, ...]
    """Ranks that run the same stage, this one included."""
    is_first: bool
    """Of its chain: it reads the inputs."""
    is_last: bool
    """Of its chain: it reads the targets and has the loss."""
    receives: tuple[Message, ...]
    """Of each forward pass; backward passes send these rows' gradients back."""
    sends: tuple[Message, ...]
    """After each forward pass; backward passes receive these rows' gradients."""


_OLD = {"stage", "replica", "layers", "rows", "peers", "receives", "sends"}


@dataclass(frozen=True, slots=True)
class RankProgram(Record):
    """What one process does in each step: all that it must know of a program.

    Any replication gives the gradient of one device if each rank adds up `loss_weight` × the loss of its rows, and
    gradients are summed as `sums` says: every sample then counts once, with one weight.

    >>> import hpgo
    >>> mine = hpgo.plan("bert-48", "dapple-a", global_batch_size=64).for_rank(9)
    >>> mine.machine, mine.local_rank, len(mine.actions)
    (1, 1, 8)
    """

    rank: int
    world_size: int
    machine: int
    local_rank: int
    """Its number on its machine."""
    schedule: str
    total_stages: int
    micro_batch_size: int
    micro_batches: int
    """Of a step, over all chains."""
    global_batch_size: int
    loss_weight: float
    """Of one sample in the mean over the global batch."""
    recompute: bool
    """Whether backward passes compute the activations of their stage anew."""
    shard_optimizer: bool
    """Whether the replicas of a stage share its optimizer state (ZeRO stage 1)."""
    gpus_per_device: int
    """How many GPUs the rank's device stands for."""
    stages: tuple[RankStage, ...]
    """Those that it holds, none if it is idle."""
    actions: tuple[RankAction, ...]
    max_in_flight: int
    """Activations of a stage that it holds at once, at most."""
    sums: tuple[GradientSum, ...]
    """Gradients that it takes part in summing."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of every gradient sum over several, the same on all ranks: libraries want all to create all groups."""
    loss_ranks: tuple[int, ...]
    """Ranks that hold a last stage."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do; it may still have to take part in starting up."""
        return not self.stages

    def __getattr__(self, name: str) -> Any:
        """Names of the version before, for a rank with one stage."""
        if name not in _OLD or len(self.stages) != 1:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"`for_rank(…).{name}` is now `for_rank(…).stages[0].{name}`", DeprecationWarning, stacklevel=2)
        value = getattr(self.stages[0], name)
        return tuple((message.peer, message.rows) for message in value) if name in {"receives", "sends"} else value


def even_rows(micro_batch_size: int, replicas: int) -> tuple[range, ...]:
    """Samples of a micro-batch for each replica: in order, the first ones one more where they don't come out even.

    Raises ArgumentError if a replica would have none.

    >>> even_rows(5, 2)
    (range(0, 3), range(3, 5))
    """
    if micro_batch_size < replicas:
        raise ArgumentError(
            f"{replicas} replicas can't share a micro-batch of {micro_batch_size}",
            f"choose a micro-batch size of at least {replicas}, or fewer replicas",
        )
    base, longer = divmod(micro_batch_size, replicas)
    ends = [replica * base + min(replica, longer) for replica in range(replicas + 1)]
    return tuple(map(range, ends, ends[1:]))


def rank_stages(rank: int, stages: Sequence[ProgramStage], chain_length: int) -> tuple[RankStage, ...]:
    """Those of `stages` that `rank` holds."""
    found = []
    for number, stage in enumerate(stages):
        if rank not in stage.devices:
            continue
        replica = stage.devices.index(rank)
        rows = stage.rows[replica]
        chain, place = divmod(number, chain_length)
        is_first, is_last = place == 0, place == chain_length - 1
        found.append(
            RankStage(
                stage=number,
                chain=chain,
                layers=stage.layers,
                replica=replica,
                rows=rows,
                peers=stage.devices,
                is_first=is_first,
                is_last=is_last,
                receives=() if is_first else _messages(rows, stages, number - 1, number, number - 1),
                sends=() if is_last else _messages(rows, stages, number, number + 1, number + 1),
            )
        )
    return tuple(found)


def _messages(
    rows: range, stages: Sequence[ProgramStage], sender: int, receiver: int, other: int
) -> tuple[Message, ...]:
    """What replicas of the stage `other`, which is the sender or the receiver, have in common with `rows`."""
    layers = tuple(crossing.layer for crossing in stages[sender].boundary_tensors)
    shared = (
        (device, range(max(rows.start, theirs.start), min(rows.stop, theirs.stop)))
        for device, theirs in zip(stages[other].devices, stages[other].rows, strict=True)
    )
    return tuple(Message(device, common, layers, sender, receiver) for device, common in shared if common)


def rank_actions(stages: Sequence[RankStage], schedule: Schedule) -> tuple[RankAction, ...]:
    """What a rank that holds `stages` does, in order; they are stages of one rank of the schedule."""
    if not stages:
        return ()
    held = {stage.stage: stage for stage in stages}
    begin = schedule.rank_of_stage[stages[0].stage]
    rows = schedule.actions[schedule.rank_starts[begin] : schedule.rank_starts[begin + 1]].tolist()
    backward = {number: (_reversed(stage.sends), _reversed(stage.receives)) for number, stage in held.items()}
    forward = {number: (stage.receives, stage.sends) for number, stage in held.items()}
    actions = []

    def add(letter: str, stage: int, micro_batch: int, *, overlaps_next: bool = False) -> None:
        if stage in held:
            ways = ((), ()) if letter == "W" else (forward if letter == "F" else backward)[stage]
            actions.append(RankAction(letter, stage, micro_batch, *ways, overlaps_next))

    for kind, stage, micro_batch, backward_stage, backward_micro_batch in rows:
        letter = KINDS[kind]
        if len(letter) == 1:
            add(letter, stage, micro_batch)
        else:
            add("F", stage, micro_batch, overlaps_next=backward_stage in held)
            add("B", backward_stage, backward_micro_batch)
    return tuple(actions)


def _reversed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The gradients of what these messages bring."""
    return tuple(Message(one.peer, one.rows, one.layers, one.to_stage, one.from_stage) for one in messages)
