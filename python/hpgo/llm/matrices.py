"""Seconds of the GEMMs with weights that all tokens of a layer use: around attention and scans, and of its network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.llm.experts import gemm_pass

if TYPE_CHECKING:
    from hpgo.llm.experts import PassTime
    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.blocks import Attention, Latent, Linear, Mlp


def linear(context: LayerContext) -> PassTime:
    """Return the time of GEMMs with weights, without those of experts; twice in the backward pass."""
    block = context.block
    forward_s = sum(projections_s(context, one) for one in block.attention)
    forward_s += sum(one.times * _matrix_s(context, one) for one in block.linears)
    if block.mlp is not None:
        forward_s += network_s(context, block.mlp)
    return gemm_pass(context, forward_s)


def projections_s(context: LayerContext, one: Attention) -> float:
    """Return the seconds of the GEMMs around attention: of queries, keys, values and gate, and of the output."""
    if not one.projected:
        return 0.0
    tp, tokens, h, latent = context.config.tp, context.tokens, context.model.hidden, one.latent
    output_s = context.gemm_s(tokens, h, one.mixed / tp)
    if latent is None:
        return context.gemm_s(tokens, (one.queries + one.keys + one.values + one.gates) / tp, h) + output_s
    # Tensor parallelism does not shard the matrices that compress. With sequence parallelism each GPU compresses its
    # own tokens; without it, every tensor-parallel GPU compresses all of them.
    made_s = context.gemm_s(tokens / context.between, one.narrow, h) + expanded_s(context, one, latent)
    return made_s + output_s


def expanded_s(context: LayerContext, one: Attention, latent: Latent) -> float:
    """Return the seconds of the GEMMs that compute queries, keys and values from latent vectors."""
    tp, tokens = context.config.tp, context.tokens
    plain = one.heads * (one.head_dim - latent.rope_dim)
    made_s = context.gemm_s(tokens, (plain + one.values) / tp, latent.kv_rank)
    return made_s + context.gemm_s(tokens, one.queries / tp, latent.q_rank or context.model.hidden)


def network_s(context: LayerContext, mlp: Mlp) -> float:
    """Return the seconds of the GEMMs of a feed-forward network."""
    tp, tokens, h = context.config.tp, context.tokens, context.model.hidden
    return context.gemm_s(tokens, mlp.inner * mlp.width / tp, h) + context.gemm_s(tokens, h, mlp.width / tp)


def _matrix_s(context: LayerContext, one: Linear) -> float:
    tp, tokens = context.config.tp, context.tokens
    if one.split == "whole":
        return context.gemm_s(tokens / context.between, one.outputs, one.inputs)
    columns, rows = (tp, 1) if one.split == "column" else (1, tp)
    return context.gemm_s(tokens, one.outputs / columns, one.inputs / rows)
