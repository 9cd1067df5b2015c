"""Adapters of low rank (LoRA) beside frozen weights: their parameters, their GEMMs, and base weights in 4 bits.

A GEMM of `rows` × `columns` weights gets two more, of `rows` × rank and rank × `columns`. Only these are trained, so
frozen weights have no gradients, no GEMMs for them, and no optimizer state. Source: Hu et al., arXiv 2106.09685;
Megatron-Bridge 0.6, `peft/lora.py` and `ParallelLinearAdapter` in `peft/utils.py`; torchtitan 0.3,
`components/lora.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.experts import NOTHING, PassTime, routed_rows
from hpgo.llm.layer_context import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import LoraModule, ParallelismConfig

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in 4 bits, with an 8-bit scale for 64 weights and a 32-bit scale for 256 of these scales: double
quantization (Dettmers et al., arXiv 2305.14314, section 3)."""


def base_weight_bytes(config: ParallelismConfig) -> float:
    """Return the bytes of a GEMM weight of a layer, as it is stored for passes.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> [base_weight_bytes(ParallelismConfig(lora_rank=8, base_weights_dtype=kind)) for kind in ("bf16", "nf4")]
    [2, 0.515869140625]
    """
    return {"bf16": VALUE, "fp8": 1, "nf4": NF4_BYTES}[config.base_weights_dtype]


class _Adapted(NamedTuple):
    """A GEMM of a layer that may have an adapter, with its widths over all tensor-parallel GPUs."""

    name: LoraModule
    rows: float
    """Values of an input."""
    columns: float
    """Values of a result."""
    tokens: float
    """Inputs of a micro-batch on one GPU."""
    parts: int = 1
    """GEMMs that the framework does not join, each with an adapter. They read the same input."""
    is_expert: bool = False


def _adapted(context: LayerContext) -> Iterator[_Adapted]:
    """Yield the GEMMs of a layer that have an adapter.

    All experts of a GPU share one adapter, Megatron-Bridge's default (`share_expert_adapters`).
    """
    config, block, tokens, h = context.config, context.block, context.tokens, context.model.hidden
    # Megatron joins queries, keys and values, and both matrices of a gated network; torchtitan only the former; Hugging
    # Face's models, which run on DeepSpeed, neither.
    three = 3 if config.flatten_gradients else 1
    two = block.inner if config.flatten_gradients or config.dtensor else 1
    found = []
    for one in block.attention:
        # The adapter of latent attention is at the GEMM that compresses.
        made = one.narrow if one.latent is not None else one.queries + one.keys + one.values + one.gates
        found.append(_Adapted("linear_qkv", h, made, tokens, three))
        found.append(_Adapted("linear_proj", one.mixed, h, tokens))
    if (mlp := block.mlp) is not None:
        found.append(_Adapted("linear_fc1", h, mlp.inner * mlp.width, tokens, two))
        found.append(_Adapted("linear_fc2", mlp.width, h, tokens))
    if (sparse := block.experts) is not None:
        rows, width = routed_rows(context, sparse), sparse.hidden or h
        found.append(_Adapted("linear_fc1", width, sparse.inner * sparse.width, rows, two, is_expert=True))
        found.append(_Adapted("linear_fc2", sparse.width, width, rows, is_expert=True))
    return (one for one in found if one.name in config.lora_targets)


def unsaved_parts(context: LayerContext) -> int:
    """Return the number of parts of a layer whose first GEMM has no adapter, so that its input is not saved."""
    block = context.block
    mixes = bool(block.attention or block.scans or block.convs) and not context.saves_input("linear_qkv")
    return mixes + ((block.mlp or block.experts) is not None and not context.saves_input("linear_fc1"))


def _shards(context: LayerContext, one: _Adapted) -> tuple[int, int]:
    """Return the GPUs that divide the first and the second matrix of an adapter."""
    tp = 1 if one.is_expert else context.config.tp
    # Megatron-Bridge divides both. torchtitan replicates the one that has the undivided side of the base weights.
    if not context.config.dtensor:
        return tp, tp
    return (1, tp) if one.name in {"linear_qkv", "linear_fc1"} else (tp, 1)


def adapter_weights(context: LayerContext) -> float:
    """Return the parameters of a layer's adapters on one GPU; 0 without adapters."""
    found = 0.0
    if rank := context.config.lora_rank:
        for one in _adapted(context):
            first, second = _shards(context, one)
            found += rank * (one.parts * one.rows / first + one.columns / second)
    return found


def adapters(context: LayerContext) -> PassTime:
    """Return the time of the adapters' GEMMs, and of adding their results to the outputs of the frozen weights."""
    rank = context.config.lora_rank
    if not rank:
        return NOTHING
    gemms_s = added_s = 0.0
    for one in _adapted(context):
        tp = 1 if one.is_expert else context.config.tp
        # As large a share of the work is on each tensor-parallel GPU in both layouts: rank × rows, or rows / tp.
        gemms_s += context.gemm_s(one.tokens, one.parts * rank, one.rows / tp)
        gemms_s += context.gemm_s(one.tokens, one.columns / tp, rank)
        added_s += context.moved_s(3 * VALUE * one.tokens * one.columns / tp)
    return PassTime(gemms_s + added_s, 2 * gemms_s + added_s, weight_grad_s=gemms_s)


def saved_by_adapters(context: LayerContext) -> float:
    """Return the bytes of a micro-batch that adapters save: the results of their first GEMMs."""
    rank = context.config.lora_rank
    return VALUE * rank * sum(one.parts * one.tokens for one in _adapted(context)) if rank else 0.0


def expanded_s(context: LayerContext, weights: float) -> float:
    """Return the seconds in which a pass expands `weights` from 4 bits to 16, to the memory that GEMMs read."""
    return context.moved_s((NF4_BYTES + VALUE) * weights) if context.config.base_weights_dtype == "nf4" else 0.0
