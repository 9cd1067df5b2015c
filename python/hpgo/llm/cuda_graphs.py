"""CUDA graphs: the kernel launches that they replay, and the buffers that they keep.

Megatron-LM names them in `--cuda-graph-impl` and `--cuda-graph-modules` (`--cuda-graph-scope` before 0.18).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.transformer import Kind

_ATTENTION = 7 / 12
"""Counted: share of a layer's kernels in attention. Norm, QKV GEMM, rotary embedding of Q and of K, attention, output
GEMM and residual addition are in attention; norm, two GEMMs, activation and residual addition in the network."""
_ROUTER, _PREPROCESS = 1 / 3, 1 / 6
"""Counted: shares of the additional kernels of a layer with experts. Of 18, GEMM, scores, top-k, map and two of the
auxiliary loss are the router's, and three that count tokens the preprocessing's. Dispatch, grouped GEMMs and combine
have the other nine, whose shapes change."""


def launched_s(context: LayerContext) -> float:
    """Return the seconds in which the CPU launches the forward pass of a layer, without launches that graphs replay."""
    config, constants, modules = context.config, context.constants, context.config.cuda_graph_modules
    halves_s = 2 * constants.collective_launch_s if config.tp > 1 else 0.0
    attention_s = _ATTENTION * constants.layer_launch_s + halves_s
    network_s = (1 - _ATTENTION) * constants.layer_launch_s + halves_s
    experts_s = constants.expert_launch_s if context.kind.experts else 0.0
    if not graphs_layer(context, context.kind):
        return attention_s + network_s + experts_s
    if config.cuda_graph_impl == "full_iteration":
        return 0.0
    left_s = constants.collective_launch_s  # to launch the graph itself, like a single kernel
    if modules:
        router = "moe_router" in modules
        left_s += attention_s if "attn" not in modules else 0.0
        left_s += network_s if not (router if context.kind.experts else "mlp" in modules) else 0.0
        left_s += experts_s * (1 - _ROUTER * router - _PREPROCESS * ("moe_preprocess" in modules))
    return left_s


def graphs_layer(context: LayerContext, kind: Kind) -> bool:
    """Return whether layers of a kind have a CUDA graph, or are in the graph of the step."""
    modules = context.config.cuda_graph_modules
    if context.config.cuda_graph_impl == "none":
        return False
    return not modules or "attn" in modules or ("moe_router" if kind.experts else "mlp") in modules
