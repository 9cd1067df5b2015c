"""Costs of stages for the simulator: seconds, transfers and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.base.checks import check_is, check_list
from hpgo.programs.stages import Stage, groups_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory and messages of each stage, in bytes. Each field is one number for all stages, or one per stage.

    Activation, stash and output are bytes of one micro-batch.

    >>> import hpgo
    >>> held = hpgo.Costs(memory=hpgo.StageBytes(weights_bytes=4e9, activation_bytes=1e9))
    >>> hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4), costs=held).measures.peak_memory_bytes
    (6000000000.0, 5000000000.0)
    """

    weights_bytes: ArrayLike = 0.0
    """Bytes of one version of the weights. A rank keeps the number of versions in the schedule's `weight_versions`."""
    gradients_bytes: ArrayLike = 0.0
    optimizer_bytes: ArrayLike = 0.0
    buffers_bytes: ArrayLike = 0.0
    activation_bytes: ArrayLike = 0.0
    """Bytes that are held from the start of F to the end of B, or of I where the backward is split. A stage that
    recomputes its activations holds only its input."""
    weight_gradient_stash_bytes: ArrayLike | None = None
    """Bytes that are held from the end of I to the end of W. None means all of the activation and of the recomputed
    bytes, as if W freed them."""
    output_bytes: ArrayLike = 0.0
    """Bytes that are sent to the next stage, and back as a gradient."""
    recomputed_bytes: ArrayLike = 0.0
    """Bytes that recomputation restores. They are held beside the activation from the start of B or I to the end of B,
    or of I where the backward is split."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of the stages of a program. `hpgo.simulate` documents the shape of each field.

    >>> import hpgo
    >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    >>> hpgo.simulate(schedule, costs=hpgo.Costs(forward_s=1.0, backward_s=2.0, transfer_s=0.5)).makespan_s
    17.0
    """

    forward_s: ArrayLike = 1.0
    backward_s: ArrayLike | None = None
    input_gradient_s: ArrayLike | None = None
    weight_gradient_s: ArrayLike | None = None
    overlapped_s: ArrayLike | None = None
    transfer_s: ArrayLike = 0.0
    latency_s: ArrayLike = 0.0
    gradient_transfer_s: ArrayLike | None = None
    gradient_latency_s: ArrayLike | None = None
    gradient_sync_s: ArrayLike = 0.0
    optimizer_s: ArrayLike = 0.0
    memory: StageBytes | None = None
    memory_cap_bytes: ArrayLike | None = None
    """Memory limit of each rank of the schedule, in bytes."""

    @classmethod
    def of_stages(cls, stages: Sequence[Stage]) -> Costs:
        """Return the costs of a plan's stages. Each group of devices with the same stages is a rank of the schedule."""
        hint = "pass the stages of a plan"
        stages = check_list("the stages", stages, hint=hint)
        for stage in stages:
            check_is("a stage", stage, Stage, hint)
        edges = stages[:-1]
        # Without recomputation and without measured gradients, each gradient takes half of the backward. The simulator
        # assumes this too, so leave the fields out.
        splits = any(
            stage.recompute
            or stage.weight_gradient_s is not None
            or stage.exposed_transfer_s
            or stage.exposed_backward_comm_s
            for stage in stages
        )
        halves_s = [stage.halves_s for stage in stages]
        return cls(
            forward_s=tuple(stage.occupied_s[0] for stage in stages),
            backward_s=tuple(stage.occupied_s[1] for stage in stages),
            input_gradient_s=tuple(half_s for half_s, _ in halves_s) if splits else None,
            weight_gradient_s=tuple(half_s for _, half_s in halves_s) if splits else None,
            transfer_s=tuple(stage.link_busy_s for stage in edges),
            # Both times may be rounded, so their difference may be slightly negative, which the simulator rejects.
            latency_s=tuple(max(0.0, stage.transfer_s - stage.transfer_busy_s) for stage in edges),
            gradient_sync_s=tuple(stage.exposed_grad_reduce_s for stage in stages),
            memory=StageBytes(
                weights_bytes=tuple(stage.memory.weights_bytes for stage in stages),
                gradients_bytes=tuple(stage.memory.gradients_bytes for stage in stages),
                optimizer_bytes=tuple(stage.memory.optimizer_bytes for stage in stages),
                buffers_bytes=tuple(stage.memory.buffers_bytes for stage in stages),
                activation_bytes=tuple(stage.saved_activation_bytes for stage in stages),
                recomputed_bytes=tuple(stage.memory.recomputed_bytes for stage in stages),
            ),
            memory_cap_bytes=tuple(group.capacity_bytes for group in groups_of(stages)),
        )
