"""Stages of a plan: their layers, devices, times and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.validated import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """Peak memory of one device of a stage, in bytes."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Bytes that are kept for the backward passes of all micro-batches in flight. If several stages share the devices,
    the bytes at the moment when all stages together hold most."""
    buffers_bytes: float
    """Bytes of transfer buffers: an activation and a gradient in transit, on each side of the stage."""
    saved_activation_bytes: float | None = None
    """Activation bytes that one micro-batch keeps from its forward pass. With recomputation, the bytes of the stage's
    input. None in plans of older files, which have only the sum."""
    recomputed_bytes: float = 0.0
    """Further bytes of one micro-batch while its backward pass runs, restored by recomputation."""

    @property
    def total_bytes(self) -> float:
        """Sum of all bytes."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True)
class Stage(Record):
    """Consecutive layers on devices that split each micro-batch among them. Times are in seconds.

    >>> import hpgo
    >>> stage = hpgo.plan("bert-48", "dapple-a", global_batch_size=64).stages[0]
    >>> len(stage.layers), stage.replicas, stage.memory.total_bytes
    (32, 8, 6567291904.0)
    """

    layers: tuple[str, ...]
    """Layer ids, in topological order."""
    devices: tuple[int, ...]
    """Device numbers, one replica each. Devices are numbered node by node from 0."""
    samples_per_replica: int
    """Samples of a micro-batch on the device with the most."""
    max_in_flight: int
    """Largest number of micro-batches whose activations it holds at once. Under 1F1B, also the number of forwards
    before the first backward."""
    forward_s: float
    """Seconds of the forward pass of one micro-batch."""
    backward_s: float
    """Seconds of the backward pass of one micro-batch, including the forward pass that recomputation repeats."""
    transfer_s: float
    """Seconds to send one micro-batch's output to the next stage, or its gradient back."""
    transfer_busy_s: float
    """Seconds of the transfer that occupy the most loaded port. The rest is latency."""
    grad_reduce_s: float
    """Seconds of the gradient reduction over the replicas."""
    exposed_grad_reduce_s: float
    """Exposed gradient reduction: its seconds after the last backward pass."""
    memory: Memory
    capacity_bytes: float
    """Memory of its smallest device in bytes, minus what is reserved. If samples are by speed, `memory` and this are of
    the device with the least free memory."""
    input_gradient_s: float | None = None
    """Seconds of the input-gradient pass of one micro-batch, without the forward pass that recomputation repeats. None
    if the profile does not split backward passes."""
    weight_gradient_s: float | None = None
    """Seconds of the weight-gradient pass of one micro-batch. None if the profile does not split backward passes."""
    recompute: bool = False
    """Whether its backward passes recompute its activations."""
    exposed_transfer_s: float = 0.0
    """Exposed transfers: seconds of each pass in which the devices receive and send instead of computing. They are not
    in `forward_s` and `backward_s`. 0 if transfers overlap with computation."""
    samples_by_replica: tuple[int, ...] = ()
    """Samples of a micro-batch on each of `devices`, if replicas of different speed get samples by their speed. Empty
    if all get the same number, or the first ones one more."""
    zero_stage: int = 0
    """ZeRO stage of its replicas: what they shard (`hpgo.planning.problem.MemoryModel`). 0 in older files."""
    exposed_forward_comm_s: float = 0.0
    """Seconds by which each forward pass waits for weights that replicas gather (ZeRO stage 3). They are not in
    `forward_s`."""
    exposed_backward_comm_s: float = 0.0
    """Seconds by which each backward pass waits for weights that replicas gather and for gradients that they scatter
    (ZeRO stages 2 and 3). They are not in `backward_s`."""

    @property
    def occupied_s(self) -> tuple[float, float]:
        """Seconds for which the devices are occupied by the forward and by the backward pass of one micro-batch."""
        return (
            self.forward_s + self.exposed_forward_comm_s + self.exposed_transfer_s,
            self.backward_s + self.exposed_backward_comm_s + self.exposed_transfer_s,
        )

    @property
    def link_busy_s(self) -> float:
        """Seconds for which a transfer is on the link to the next stage beside the passes of both stages."""
        return 0.0 if self.exposed_transfer_s else self.transfer_busy_s

    @property
    def link_s(self) -> float:
        """Seconds from the end of a pass to the arrival of its output at the other stage, on an idle link."""
        return self.transfer_s - (self.transfer_busy_s - self.link_busy_s)

    @property
    def replicas(self) -> int:
        """Number of devices, each of which runs a copy of the stage."""
        return len(self.devices)

    @property
    def saved_activation_bytes(self) -> float:
        """Bytes that one micro-batch keeps from its forward pass: activations, or with recomputation the input."""
        # Older files hold only the sum over all micro-batches in flight.
        saved_activation_bytes = self.memory.saved_activation_bytes
        return (
            self.memory.activations_bytes / max(1, self.max_in_flight)
            if saved_activation_bytes is None
            else saved_activation_bytes
        )

    @property
    def halves_s(self) -> tuple[float, float]:
        """Seconds of I and W for schedules that split the backward.

        Each is half of it if the profile has no split. The forward pass that recomputation repeats is part of I, and
        so are exposed transfers: W sends nothing to other stages. Gradients are scattered after W.
        """
        # `backward_s` contains the repeated forward, but the measured gradients do not.
        repeated_s = self.forward_s if self.recompute else 0.0
        half_s = (self.backward_s - repeated_s) / 2
        inputs_s = half_s if self.input_gradient_s is None else self.input_gradient_s
        weights_s = half_s if self.weight_gradient_s is None else self.weight_gradient_s
        return repeated_s + inputs_s + self.exposed_transfer_s, weights_s + self.exposed_backward_comm_s

    @property
    def free_bytes(self) -> float:
        """Free memory in bytes. Negative if the stage doesn't fit. `DeviceGroup` counts all stages of its devices."""
        return self.capacity_bytes - self.memory.total_bytes


@dataclass(frozen=True, slots=True)
class DeviceGroup(Record):
    """Devices that hold the same stages, one replica of each. They correspond to a rank of the schedule."""

    devices: tuple[int, ...]
    stages: tuple[int, ...]
    """Numbers of its stages, in ascending order."""
    memory: Memory
    """Memory of all its stages on one device, at the moment when they hold most."""
    capacity_bytes: float
    """Memory of its smallest device in bytes, minus what is reserved."""

    @property
    def free_bytes(self) -> float:
        """Free memory in bytes. Negative if the stages don't fit."""
        return self.capacity_bytes - self.memory.total_bytes


def recompute_by_stage(document: Any) -> Any:
    """Return a plan or program whose stages have the key `recompute`, which older ones have once for all."""
    stages = document.get("stages") if isinstance(document, dict) else None
    if not isinstance(stages, list) or not isinstance(document.get("recompute"), bool):
        return document
    every = {"recompute": document["recompute"]}
    kept = {key: item for key, item in document.items() if key not in {"recompute", "stages"}}
    return kept | {"stages": [every | stage if isinstance(stage, dict) else stage for stage in stages]}


def groups_of(stages: Sequence[Stage]) -> tuple[DeviceGroup, ...]:
    """Return the groups of devices that run `stages`, ordered by their first stages."""
    return tuple(
        DeviceGroup(
            stages[own[0]].devices,
            tuple(own),
            _together([stages[at].memory for at in own]),
            # A group's stages have the same devices, and so the same capacity.
            stages[own[0]].capacity_bytes,
        )
        for own in grouped(stages)
    )


def grouped(stages: Sequence[Stage]) -> list[list[int]]:
    """Return the numbers of the stages that each group of devices runs, ordered by their first stages."""
    # A dict keeps insertion order, so groups are ordered by their first stages.
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(stages):
        numbers.setdefault(stage.devices, []).append(number)
    return list(numbers.values())


def _together(parts: list[Memory]) -> Memory:
    if len(parts) == 1:
        return parts[0]
    # Each stage's activations are already counted at the moment when the whole group holds most, so they can be added.
    return Memory(
        weights_bytes=sum(part.weights_bytes for part in parts),
        gradients_bytes=sum(part.gradients_bytes for part in parts),
        optimizer_bytes=sum(part.optimizer_bytes for part in parts),
        activations_bytes=sum(part.activations_bytes for part in parts),
        buffers_bytes=sum(part.buffers_bytes for part in parts),
    )


@dataclass(frozen=True, slots=True)
class BoundaryTensor(Record):
    """The output of one layer that crosses a cut, because a layer in a later stage reads it.

    A tensor for a stage further on crosses every cut in between: each stage on its path sends it on.

    >>> import hpgo
    >>> hpgo.plan("vgg-19", "dapple-c", global_batch_size=2048).boundary_tensors
    ((BoundaryTensor(layer='pool-5', bytes=48000000.0),),)
    """

    layer: str
    """Id of the layer whose output it is. The gradient crosses the same cuts in reverse."""
    bytes: float | None = None
    """Bytes for a whole micro-batch, over all replicas. None if unknown."""
