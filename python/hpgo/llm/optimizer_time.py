"""Time of the optimizer step: on the GPU, on the CPU, and of the transfers between both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.llm.layer_context import VALUE
from hpgo.llm.memory import cpu_bytes, sharded_parameters, updated_parameters
from hpgo.llm.optimizer_state import is_unfused, saved_traffic_bytes, shard_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.layer_time import StagePasses
    from hpgo.llm.memory import PipelineRankLayers

_UNFUSED_BYTES = 48
"""Additional bytes of memory traffic per parameter without fused Adam: for two moments, three times each, the root and
the quotient."""
_ITERATIONS = 5
"""Newton-Schulz iterations of Muon (Megatron-LM's `--muon-num-ns-steps`)."""


def gpu_step_s(context: LayerContext, held: PipelineRankLayers) -> float:
    """Return the seconds in which a GPU updates the parameters of a stage that are not updated on the CPU."""
    config, updated = context.config, updated_parameters(context, held)
    each = _traffic_bytes(context) + (_UNFUSED_BYTES if is_unfused(config) else 0.0)
    found = float(context.moved_s((1 - config.optimizer_offload_fraction) * each * updated))
    return found + _orthogonalize_s(context, held) if config.optimizer == "muon" else found


def _traffic_bytes(context: LayerContext) -> float:
    # Bytes of memory traffic per parameter, with a gradient in 32 bits and a 16-bit weight to write.
    return context.constants.optimizer_bytes - saved_traffic_bytes(context.config)


def cpu_step_s(context: LayerContext, held: PipelineRankLayers, passes: StagePasses, micro_batches: int) -> float:
    """Return the exposed seconds of a step in which state is moved between GPU and CPU, and updated on the CPU.

    Passes hide the transfers that run beside them like the transfers of offloaded activations. The transfers after them
    and the update follow each other: Megatron-LM overlaps these only with `--overlap-cpu-optimizer-d2h-h2d`.
    """
    config, constants = context.config, context.constants
    rate = context.gpus.host_bytes_per_s * constants.nvlink_efficiency
    if config.is_paged:
        # The step needs all state, which passes have evicted. A page is read and written back.
        return float(2 * cpu_bytes(context, held) / rate)
    share = float(config.optimizer_offload_fraction * updated_parameters(context, held))
    if not share:
        return 0.0
    hidden_s = constants.comm_overlap_fraction * micro_batches
    # Sharded gradients move after the backward pass of each micro-batch. FSDP adds them up on the CPU, DeepSpeed on the
    # GPU, which fetches the sum (`async_accumulate_grad_in_cpu_via_gpu`). Whole gradients move once.
    found: float
    if config.zero_stage >= 2:
        moves = micro_batches if config.dtensor else 2 * micro_batches - 1
        found = max(0.0, moves * context.gradient_bytes * share / rate - hidden_s * passes.backward_s)
    else:
        found = (VALUE if context.accumulates_in_16_bits else 2 * VALUE) * share / rate
    if config.offload_params:
        # Each pass fetches the shards of its weights before it gathers them.
        each = shard_bytes(config) if config.dtensor else VALUE
        moved_s = float(2 * micro_batches * each * sharded_parameters(context, held) / rate)
        found += max(0.0, moved_s - hidden_s * (passes.forward_s + passes.backward_s))
    else:
        found += VALUE * share / rate
    return found + _cpu_update_s(context, share)


def min_cpu_step_s(context: LayerContext, whole: PipelineRankLayers) -> float:
    """Return a lower bound on `cpu_step_s` of the slowest GPU, given all layers of the model and degrees of 1.

    No GPU is faster than with an equal part of the parameters.
    """
    fraction = context.config.optimizer_offload_fraction
    if not fraction or context.config.is_paged:
        return 0.0
    return _cpu_update_s(context, fraction * float(updated_parameters(context, whole)) / context.gpus.count)


def _cpu_update_s(context: LayerContext, parameters: float) -> float:
    # All GPUs of a host share its CPUs.
    moved_bytes = float(_traffic_bytes(context)) * parameters * context.gpus.gpus_per_host
    return moved_bytes / context.constants.cpu_optimizer_bytes_per_s


def _orthogonalize_s(context: LayerContext, held: PipelineRankLayers) -> float:
    """Return the seconds of Muon's Newton-Schulz iterations over the matrices of a GPU's layers.

    An iteration X ← aX + (bA + cA²)X with A = XXᵀ takes 4n²m + 2n³ operations for n × m values, n ≤ m (Jordan et al.,
    2024). Megatron-LM's `dist_muon` gives each replica a part of the matrices, and treats the part of a tensor-parallel
    GPU as a matrix (`--muon-tp-mode blockwise`).
    """
    config = context.config
    found = 0.0
    for (kind, _), count in held.layers.items():
        one = context.of(kind)
        for rows, columns, number, replicas in _matrices(one):
            small, large = sorted((rows, columns))
            flop = _ITERATIONS * (4 * small * small * large + 2 * small**3)
            found += float(count) * number * flop / (replicas if config.zero_stage else 1)
    return found / (context.gpus.wide_flop_per_s * context.constants.gemm_efficiency)


def _matrices(context: LayerContext) -> Iterator[tuple[float, float, float, int]]:
    """Yield rows, columns, number and replicas of the matrices of a layer on one GPU."""
    config, block, h = context.config, context.block, context.model.hidden
    tp, replicas = config.tp, config.dp_cp_size
    for one in block.attention:
        for width in (one.queries, one.keys, one.values, one.mixed):
            yield h, width / tp, 1, replicas
    for matrix in block.linears:
        columns, rows = (tp if matrix.split == split else 1 for split in ("column", "row"))
        yield matrix.inputs / rows, matrix.outputs / columns, matrix.times, replicas
    if block.mlp is not None:
        yield h, block.mlp.width / tp, block.mlp.inner + 1, replicas
    if (sparse := block.experts) is not None:
        width, number = sparse.hidden or h, (sparse.inner + 1) * sparse.count / config.ep
        yield width, sparse.width, number, config.expert_dp_size
