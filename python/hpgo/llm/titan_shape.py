"""The package of torchtitan 0.3 with the blocks of a transformer, or the reason why none has them.

Source: `torchtitan/models/llama3`, `qwen3`, `deepseek_v3` and `gpt_oss`, `models/common/moe.py`, and
`experiments/transformers_modeling_backend` of torchtitan 0.3.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hpgo.base.messages import pluralize
from hpgo.llm.hugging_face_shape import model_type
from hpgo.llm.megatron_shape import NoShapeError
from hpgo.model.blocks import Attention, Block, Experts

if TYPE_CHECKING:
    from hpgo.model.transformer import Transformer

Package = Literal["llama3", "qwen3", "deepseek_v3", "gpt_oss", "transformers_modeling_backend"]
BACKEND: Package = "transformers_modeling_backend"
"""Package that trains a model of the library transformers, by its `config.json`."""
_BACKEND_TYPES = ("qwen2", "olmo", "olmo2")
"""Model types that the backend trains as transformers computes them. Of others, its `hf_sharding.py` does not find a
matrix (Phi-3, GLM-4, StarCoder2) or an argument (Gemma, StableLM), its `update_from_config` turns off the biases of the
`config.json` (Llama with biases), or its `get_attention_masks` leaves out sliding windows."""
_LAYER_NORMS = 2


def titan_package(model: Transformer, *, sparse: bool) -> Package:
    """Return the package whose blocks a model has. `sparse` allows the packages that 0.2 lacks here.

    These are the packages with experts and latent attention, and the one for models of transformers.

    Raises NoShapeError with the first property that no package has.

    >>> from hpgo.model.formats.transformers import transformer_of
    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [titan_package(TRANSFORMERS[name], sparse=True) for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3")]
    ['llama3', 'qwen3', 'deepseek_v3']
    >>> titan_package(transformer_of("openai/gpt-oss-20b"), sparse=True)
    'gpt_oss'
    >>> titan_package(TRANSFORMERS["qwen2.5-72b"], sparse=True)
    'transformers_modeling_backend'
    """
    if what := _obstacle(model, sparse=sparse):
        if not (sparse and _is_of_backend(model)):
            raise NoShapeError(what)
        # The backend copies a tied matrix when it shards the model, and ties both again when it sets the weights.
        if model.tied:
            raise NoShapeError(f"{what} beside tied embeddings")
        return BACKEND
    if model.blocks:
        return "gpt_oss"
    if model.latent is not None:
        return "deepseek_v3"
    return "qwen3" if model.experts or model.head_norms else "llama3"


def needs_backend(model: Transformer) -> bool:
    """Return whether torchtitan 0.3 trains a model by its backend for models of transformers.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> needs_backend(TRANSFORMERS["qwen2.5-72b"]), needs_backend(TRANSFORMERS["llama-3-8b"])
    (True, False)
    """
    return bool(_obstacle(model, sparse=True)) and _is_of_backend(model)


def _is_of_backend(model: Transformer) -> bool:
    return model.tower is None and model_type(model) in _BACKEND_TYPES


def _obstacle(model: Transformer, *, sparse: bool) -> str:
    """Return the first property that no package has, or an empty text."""
    if model.tower is not None:
        return "a tower in front of the decoder"
    if model.blocks and not (sparse and _is_gpt_oss(model)):
        return _unusual(model)
    if model.before is not None or model.after is not None or model.final_norms != 1:
        return "operators beside the embedding or the LM head"
    if model.blocks:
        return "tied embeddings beside attention sinks" if model.tied else ""
    if not sparse and (model.experts or model.latent is not None):
        return "experts" if model.experts else "latent attention"
    if model.norms_per_layer != _LAYER_NORMS:
        return f"{pluralize(model.norms_per_layer, 'norm')} per layer"
    if model.centred_norms or model.positions:
        return "norms that subtract the mean" if model.centred_norms else "learned positions"
    if not model.gated:
        return "feed-forward networks without a gate"
    if model.attention_bias != "none" or model.ffn_bias:
        return "biases"
    if model.window_layers:
        return "sliding windows"
    if model.shared_gate:
        return "a gate of the shared experts"
    return "norms of the heads of latent attention" if model.latent is not None and model.head_norms else ""


def _is_gpt_oss(model: Transformer) -> bool:
    """Return whether the blocks are GPT-OSS's: attention with sinks, experts, and biases in all of their matrices.

    Only the window may differ between blocks: there may be one, and blocks without it.
    """
    if not model.experts:
        return False
    attention = Attention(heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, sinks=True, bias="all")
    experts = Experts(
        count=model.experts,
        per_token=model.experts_per_token,
        width=model.expert_ffn,
        gated=True,
        bias=True,
        router_bias=True,
    )
    usual, windows = Block(attention=(attention,), experts=experts), set()
    for block in model.blocks:
        windows |= {one.window for one in block.attention}
        if replace(block, name="", attention=tuple(replace(one, window=0) for one in block.attention)) != usual:
            return False
    return len(windows - {0}) <= 1  # `GptOssModel.get_attention_masks` makes one mask with a window


def _unusual(model: Transformer) -> str:
    """Return what a model of other blocks than a plain decoder's has, in a few words."""
    blocks = [model.block(kind) for kind in model.kinds]
    held = [one for block in blocks for one in block.attention]
    found = (
        (any(not one.causal for one in held), "attention to later tokens"),
        (any(block.scans for block in blocks), "state-space scans or linear attention"),
        (any(one.sinks for one in held), "attention sinks"),
        (any(one.chunk for one in held), "attention in chunks of tokens"),
        (any(one.selected for one in held), "an index that selects tokens"),
        (any(one.gate for one in held), "gated attention"),
        (any(block.convs for block in blocks), "convolutions"),
        (any(block.norms != _LAYER_NORMS for block in blocks), "another number of norms per layer than 2"),
        (
            any(block.vectors for block in blocks),
            "norms over the queries and keys of all heads, or further weights in a layer",
        ),
        (any(one.window for one in held), "sliding windows"),
    )
    return next((what for has, what in found if has), "layers that differ, or further weights in a layer")
