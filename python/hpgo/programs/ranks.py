"""The part of a program that one process runs: its layers, its rows, and each action with its messages."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import accumulate
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
    """Layers, the devices that hold them, and the rows of each micro-batch that each device processes."""

    layers: tuple[str, ...]
    """Layer ids, in an order in which the layers can run."""
    devices: tuple[int, ...]
    """Devices, one replica each. The rank of a process is the number of its device."""
    rows: tuple[range, ...]
    """Samples of a micro-batch that each replica processes, counted from 0. Together they contain every sample once."""
    boundary_tensors: tuple[BoundaryTensor, ...] = ()
    """Tensors that it sends to the next stage of its chain. Empty for the last stage of a chain."""
    recompute: bool = False
    """Whether its backward passes recompute its activations."""


@dataclass(frozen=True, slots=True)
class Message:
    """Rows that one rank sends to another: outputs in forward passes, their gradients in backward passes."""

    peer: int
    """Rank at the other end. It is the rank itself if it holds both stages, and then nothing is sent."""
    rows: range
    """Samples of the micro-batch that are sent."""
    layers: tuple[str, ...]
    """Layers whose outputs these are, in sending order."""
    from_stage: int
    to_stage: int


@dataclass(frozen=True, slots=True)
class RankAction:
    """One action of a rank, with the messages that it waits for and the messages that it sends."""

    kind: str
    """Kind of the action: F (forward), B (backward), I (input gradient) or W (weight gradient)."""
    stage: int
    micro_batch: int
    receives: tuple[Message, ...]
    """Messages that must arrive before it starts: outputs of the stage before for F, gradients of the stage after for B
    and I."""
    sends: tuple[Message, ...]
    """Messages that are sent when it has ended."""
    overlaps_next: bool = False
    """Whether the schedule fuses it with the next action. Running both one after the other gives the same numbers."""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Layers whose gradients are reduced over ranks after their last backward pass of a step."""

    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks in ascending order. A rank with two copies of the layers first adds up their gradients, or keeps only one
    copy."""


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage that a rank holds."""

    stage: int
    chain: int
    """Copy of the model that the stage belongs to. It is 0 unless the schedule has several chains."""
    layers: tuple[str, ...]
    replica: int
    rows: range
    """Samples of each micro-batch that the rank processes."""
    peers: tuple[int, ...]
    """Ranks that run the same stage, including this one."""
    is_first: bool
    """Whether it is the first stage of its chain, which reads the inputs."""
    is_last: bool
    """Whether it is the last stage of its chain, which reads the targets and computes the loss."""
    receives: tuple[Message, ...]
    """Messages before each forward pass. Backward passes send the gradients of these rows."""
    sends: tuple[Message, ...]
    """Messages after each forward pass. Backward passes receive the gradients of these rows."""
    recompute: bool
    """Whether its backward passes recompute its activations."""


# Until a rank could hold several stages, these were attributes of the rank.
_OLD = {"stage", "replica", "layers", "rows", "peers", "receives", "sends"}


@dataclass(frozen=True, slots=True)
class RankProgram(Record):
    """Everything that one process needs to know of a program to run its part of a step.

    With any replication, the result is the gradient of a single device if two rules hold. Each rank accumulates
    `loss_weight` × the loss of its rows, and gradients are reduced as in `sums`. Every sample then counts once, with
    the same weight. >>> import hpgo >>> mine = hpgo.plan("bert-48", "dapple-a", global_batch_size=64).for_rank(9) >>>
    mine.node, mine.local_rank, len(mine.actions) (1, 1, 8)
    """

    rank: int
    world_size: int
    node: int
    local_rank: int
    """Index of the rank on its node."""
    schedule: str
    total_stages: int
    pipeline_micro_batch_size: int
    micro_batches: int
    """Number of micro-batches in a step, over all chains."""
    global_batch_size: int
    loss_weight: float
    """Weight of one sample's loss in the mean over the global batch."""
    shard_optimizer: bool
    """Whether the replicas of a stage shard its optimizer state (ZeRO stage 1)."""
    gpus_per_device: int
    """Number of GPUs that the rank's device stands for."""
    stages: tuple[RankStage, ...]
    """Stages that the rank holds. Empty if it is idle."""
    actions: tuple[RankAction, ...]
    max_in_flight: int
    """Largest number of activations of a stage that it holds at once."""
    sums: tuple[GradientSum, ...]
    """Gradient reductions that the rank takes part in."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of every gradient reduction over several ranks. It is equal on all ranks, because communication libraries
    require every rank to create all groups in the same order."""
    loss_ranks: tuple[int, ...]
    """Ranks that hold the last stage of a chain."""

    @property
    def recompute(self) -> bool:
        """Whether a stage of the rank recomputes its activations in its backward passes."""
        return any(stage.recompute for stage in self.stages)

    @property
    def is_idle(self) -> bool:
        """Whether the rank has no work. An idle rank may still have to take part in the rendezvous."""
        return not self.stages

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name from the previous version, for a rank with one stage. Deprecated."""
        # Such a name can't be translated for a rank with several stages, so it is an unknown attribute there.
        if name not in _OLD or len(self.stages) != 1:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"`for_rank(…).{name}` is now `for_rank(…).stages[0].{name}`", DeprecationWarning, stacklevel=2)
        value = getattr(self.stages[0], name)
        return tuple((message.peer, message.rows) for message in value) if name in {"receives", "sends"} else value


def even_rows(pipeline_micro_batch_size: int, replicas: int) -> tuple[range, ...]:
    """Return the samples of a micro-batch for each replica, in order.

    The first replicas get one more if there is a rest.

    Raises ArgumentError if a replica would get none.

    >>> even_rows(5, 2)
    (range(0, 3), range(3, 5))
    """
    if pipeline_micro_batch_size < replicas:
        raise ArgumentError(
            f"a micro-batch has {pipeline_micro_batch_size} samples, but there are {replicas} replicas",
            f"choose a micro-batch size of at least {replicas}, or fewer replicas",
        )
    # Give each replica consecutive rows. Replicas of neighboring stages then share few ranges, so there are few
    # messages.
    base, longer = divmod(pipeline_micro_batch_size, replicas)
    return rows_of([base + (replica < longer) for replica in range(replicas)])


def rows_of(samples: Sequence[int]) -> tuple[range, ...]:
    """Return the consecutive samples of a micro-batch for replicas that get these numbers of samples.

    >>> rows_of([3, 1])
    (range(0, 3), range(3, 4))
    """
    ends = list(accumulate(samples, initial=0))
    return tuple(map(range, ends, ends[1:]))


def rank_stages(rank: int, stages: Sequence[ProgramStage], stages_per_pipeline: int) -> tuple[RankStage, ...]:
    """Return the stages that `rank` holds."""
    found = []
    for number, stage in enumerate(stages):
        if rank not in stage.devices:
            continue
        replica = stage.devices.index(rank)
        rows = stage.rows[replica]
        chain, place = divmod(number, stages_per_pipeline)
        is_first, is_last = place == 0, place == stages_per_pipeline - 1
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
                recompute=stage.recompute,
            )
        )
    return tuple(found)


def _messages(
    rows: range, stages: Sequence[ProgramStage], sender: int, receiver: int, other: int
) -> tuple[Message, ...]:
    """Return the messages for the rows that replicas of the stage `other` (sender or receiver) share with `rows`."""
    # Replicas of neighboring stages may divide a micro-batch differently, so a replica may have several peers.
    layers = tuple(crossing.layer for crossing in stages[sender].boundary_tensors)
    shared = (
        (device, range(max(rows.start, theirs.start), min(rows.stop, theirs.stop)))
        for device, theirs in zip(stages[other].devices, stages[other].rows, strict=True)
    )
    return tuple(Message(device, common, layers, sender, receiver) for device, common in shared if common)


def rank_actions(stages: Sequence[RankStage], schedule: Schedule) -> tuple[RankAction, ...]:
    """Return the actions of a rank that holds `stages`, in order.

    All stages must belong to one rank of the schedule.
    """
    if not stages:
        return ()
    held = {stage.stage: stage for stage in stages}
    begin = schedule.rank_of_stage[stages[0].stage]
    rows = schedule.actions[schedule.rank_starts[begin] : schedule.rank_starts[begin + 1]].tolist()
    # A backward pass mirrors its forward: it receives the gradients of what was sent, and sends the gradients of
    # what was received.
    backward = {number: (_reversed(stage.sends), _reversed(stage.receives)) for number, stage in held.items()}
    forward = {number: (stage.receives, stage.sends) for number, stage in held.items()}
    actions = []

    def add(letter: str, stage: int, micro_batch: int, *, overlaps_next: bool = False) -> None:
        # The schedule's rank may run stages on several sets of devices. A device only runs the stages that it holds.
        if stage in held:
            # A weight gradient stays on its device until the reduction.
            messages = ((), ()) if letter == "W" else (forward if letter == "F" else backward)[stage]
            actions.append(RankAction(letter, stage, micro_batch, *messages, overlaps_next))

    for kind, stage, micro_batch, backward_stage, backward_micro_batch in rows:
        letter = KINDS[kind]
        if len(letter) == 1:
            add(letter, stage, micro_batch)
        else:
            # No process can start two passes at once from one thread, so a fused pair is two actions with a mark.
            add("F", stage, micro_batch, overlaps_next=backward_stage in held)
            add("B", backward_stage, backward_micro_batch)
    return tuple(actions)


def _reversed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages for the gradients of the tensors in `messages`."""
    return tuple(Message(one.peer, one.rows, one.layers, one.to_stage, one.from_stage) for one in messages)
