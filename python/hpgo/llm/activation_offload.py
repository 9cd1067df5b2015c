"""Activations that wait in CPU memory for the backward pass: bytes by module, and exposed transfers.

Megatron-LM names the modules in `--offload-modules` (`offload_modules` of transformer_config.py, and its guide
`fine_grained_activation_offloading.md`). Each module's input is offloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.llm.experts import expert_width, routed_rows, token_width
from hpgo.llm.layer_context import NARROW, VALUE

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext

KEY = "cpu_offload"
"""Key of the term with exposed transfers."""
RESIDENT = 2
"""Layers whose offloaded activations are in GPU memory all the same: the layer that is computed, and the next one,
which is transferred in the meantime."""


def offloaded_bytes(context: LayerContext) -> float:
    """Return the bytes of one micro-batch that a layer keeps in CPU memory because of `offload_modules`."""
    config, tokens, block = context.config, context.tokens, context.block
    if not config.offload_modules:
        return 0.0
    each, again = NARROW.get(config.precision, VALUE), config.recompute_modules
    width = tokens * context.model.hidden / context.between
    heads = tokens * (block.queries + block.keys + block.values) / config.tp
    mixed = tokens * sum(one.mixed for one in block.attention) / config.tp
    # What selective recomputation drops is not saved, so it can't be offloaded either.
    is_latent = block.latent is not None
    inputs = {
        "attn_norm": VALUE * width,
        "qkv_linear": 0.0 if is_latent and "layernorm" in again else each * width * context.saves_input("linear_qkv"),
        "core_attn": 0.0 if "mla_up_proj" in again else VALUE * heads,
        # The GEMM after attention saves a second copy in a narrow format.
        "attn_proj": (VALUE + (each if each < VALUE and "core_attn" not in again else 0)) * mixed,
        "mlp_norm": VALUE * width,
    }
    if (sparse := block.experts) is not None:
        rows = routed_rows(context, sparse)
        inputs["expert_fc1"] = each * rows * token_width(context, sparse) * context.saves_input("linear_fc1")
        inputs["moe_act"] = VALUE * rows * sparse.inner * expert_width(context, sparse)
    return sum(inputs.get(name, 0.0) for name in config.offload_modules)


def exposed_s(context: LayerContext, moved_bytes: float, pass_s: float) -> float:
    """Return the seconds by which a transfer between a GPU and its CPU takes longer than what a pass hides."""
    rate = context.gpus.host_bytes_per_s * context.constants.nvlink_efficiency
    return max(0.0, moved_bytes / rate - context.constants.comm_overlap_fraction * pass_s)
