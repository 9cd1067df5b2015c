"""The package of torchtitan 0.3 with the blocks of a transformer, or the reason why none has them.

Source: `torchtitan/models/llama3`, `qwen3` and `deepseek_v3`, and `models/common/moe.py`, of torchtitan 0.3.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpgo.base.messages import pluralize
from hpgo.llm.megatron_shape import NoShapeError

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

Package = Literal["llama3", "qwen3", "deepseek_v3"]
_LAYER_NORMS = 2


def titan_package(model: Transformer, *, sparse: bool) -> Package:
    """Return the package whose blocks a model has. `sparse` allows experts and latent attention, which 0.2 lacks here.

    Raises NoShapeError with the first property that no package has.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [titan_package(TRANSFORMERS[name], sparse=True) for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3")]
    ['llama3', 'qwen3', 'deepseek_v3']
    """
    if what := _obstacle(model, sparse=sparse):
        raise NoShapeError(what)
    if model.latent is not None:
        return "deepseek_v3"
    return "qwen3" if model.experts or model.head_norms else "llama3"


def _obstacle(model: Transformer, *, sparse: bool) -> str:
    """Return the first property that no package has, or an empty text."""
    if model.blocks:
        return _unusual(model)
    if model.tower is not None:
        return "a tower in front of the decoder"
    if model.before is not None or model.after is not None or model.final_norms != 1:
        return "operators beside the embedding or the LM head"
    if not sparse and (model.experts or model.latent is not None):
        return "experts" if model.experts else "latent attention"
    if model.norms_per_layer != _LAYER_NORMS:
        return f"{pluralize(model.norms_per_layer, 'norm')} per layer"
    if not model.gated or model.centred_norms or model.positions:
        return "layers other than Llama's"
    if model.attention_bias != "none" or model.ffn_bias:
        return "biases"
    if model.window_layers:
        return "sliding windows"
    if model.shared_gate:
        return "a gate of the shared experts"
    return "norms of the heads of latent attention" if model.latent is not None and model.head_norms else ""


def _unusual(model: Transformer) -> str:
    """Return what a model of other blocks than a plain decoder's has, in a few words."""
    held = [one for block in model.blocks for one in block.attention]
    if any(block.scans for block in model.blocks):
        return "state-space scans or linear attention"
    if any(one.sinks for one in held):
        return "attention sinks"
    if any(one.chunk for one in held):
        return "attention in chunks of tokens"
    return "gated attention" if any(one.gate for one in held) else "its pattern of blocks"
