"""Stages of a plan: layers on devices, what they take, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.base.checks import check_flag
from hpgo.base.validated import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """Bytes that one device of a stage holds at its peak."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Kept for the backward passes of all micro-batches in flight. Of a stage that shares its devices with others: when
    all of them hold most."""
    buffers_bytes: float
    """An activation and a gradient on the way, on each side."""
    saved_activation_bytes: float | None = None
    """The part of the activations that one micro-batch keeps from its forward on: of a stage that recomputes, its
    input. None in plans of older files, which had the sum alone."""
    recomputed_bytes: float = 0.0
    """The part that one micro-batch has besides while it runs backward, made again by recomputation."""

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True)
class Stage(Record):
    """Layers in a row on devices that split each micro-batch among them. Times are seconds.

    >>> import hpgo
    >>> stage = hpgo.plan("bert-48", "dapple-a", global_batch_size=64).stages[0]
    >>> len(stage.layers), stage.replicas, stage.memory.total_bytes
    (32, 8, 6567291904.0)
    """

    layers: tuple[str, ...]
    """Layer ids, in topological order."""
    devices: tuple[int, ...]
    """Device numbers, machine by machine from 0; one replica each."""
    samples_per_replica: int
    """Samples of a micro-batch on the device that gets most."""
    max_in_flight: int
    """Micro-batches whose activations it holds at once, at most; under 1F1B also the forwards before a backward."""
    forward_s: float
    """One micro-batch."""
    backward_s: float
    """One micro-batch, with the forward that recomputation repeats."""
    transfer_s: float
    """Sending one micro-batch's output to the next stage, or its gradient back."""
    transfer_busy_s: float
    """The part of it that occupies the fullest port; the rest is latency."""
    grad_reduce_s: float
    """Summing gradients over the replicas."""
    exposed_grad_reduce_s: float
    """The part of it that outlasts the last backward pass."""
    memory: Memory
    capacity_bytes: float
    """Memory of its smallest device, less what is reserved."""
    input_gradient_s: float | None = None
    """One micro-batch's gradients of inputs alone, where a schedule splits the backward, without the forward that
    recomputation repeats; None where the profile doesn't tell halves."""
    weight_gradient_s: float | None = None
    """Likewise the gradients of weights."""

    @property
    def replicas(self) -> int:
        """Devices that run copies of it."""
        return len(self.devices)

    @property
    def saved_activation_bytes(self) -> float:
        """What one micro-batch keeps from its forward on: activations, or the stage's input if they are recomputed."""
        saved_activation_bytes = self.memory.saved_activation_bytes
        return (
            self.memory.activations_bytes / max(1, self.max_in_flight)
            if saved_activation_bytes is None
            else saved_activation_bytes
        )

    def halves_s(self, *, recompute: bool) -> tuple[float, float]:
        """Seconds of I and W, where a schedule splits the backward: half of it each, where the profile doesn't say.

        The forward that recomputation repeats is part of I.
        """
        check_flag("recompute", recompute)
        repeated_s = self.forward_s if recompute else 0.0
        half_s = (self.backward_s - repeated_s) / 2
        inputs_s, weights_s = self.input_gradient_s, self.weight_gradient_s
        return repeated_s + (half_s if inputs_s is None else inputs_s), half_s if weights_s is None else weights_s

    @property
    def headroom_bytes(self) -> float:
        """Free memory, negative if the stage doesn't fit. `DeviceGroup` counts all stages of its devices."""
        return self.capacity_bytes - self.memory.total_bytes


@dataclass(frozen=True, slots=True)
class DeviceGroup(Record):
    """Devices that hold the same stages, one replica of each: what a schedule calls a rank."""

    devices: tuple[int, ...]
    stages: tuple[int, ...]
    """Numbers of its stages, ascending."""
    memory: Memory
    """Of all its stages on one device, when that holds most."""
    capacity_bytes: float
    """Memory of its smallest device, less what is reserved."""

    @property
    def headroom_bytes(self) -> float:
        """Memory that stays free; negative if its stages don't fit."""
        return self.capacity_bytes - self.memory.total_bytes


def groups_of(stages: Sequence[Stage]) -> tuple[DeviceGroup, ...]:
    """The groups of devices that run `stages`, in the order of their first ones."""
    return tuple(
        DeviceGroup(
            stages[own[0]].devices,
            tuple(own),
            _together([stages[at].memory for at in own]),
            stages[own[0]].capacity_bytes,
        )
        for own in grouped(stages)
    )


def grouped(stages: Sequence[Stage]) -> list[list[int]]:
    """Numbers of the stages that each group of devices runs, in the order of their first ones."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(stages):
        numbers.setdefault(stage.devices, []).append(number)
    return list(numbers.values())


def _together(parts: list[Memory]) -> Memory:
    if len(parts) == 1:
        return parts[0]
    return Memory(
        weights_bytes=sum(part.weights_bytes for part in parts),
        gradients_bytes=sum(part.gradients_bytes for part in parts),
        optimizer_bytes=sum(part.optimizer_bytes for part in parts),
        activations_bytes=sum(part.activations_bytes for part in parts),
        buffers_bytes=sum(part.buffers_bytes for part in parts),
    )


@dataclass(frozen=True, slots=True)
class BoundaryTensor(Record):
    """What one layer gives to later stages, where a cut lies between it and a layer that reads it.

    What a stage further on reads crosses every cut on its way: each stage between passes it on.

    >>> import hpgo
    >>> hpgo.plan("vgg-19", "dapple-c", global_batch_size=2048).boundary_tensors
    ((BoundaryTensor(layer='pool-5', bytes=48000000.0),),)
    """

    layer: str
    """Id of the layer whose output it is; its gradient takes the same way back."""
    bytes: float | None = None
    """Of a whole micro-batch, over all replicas; None where it is not known."""
