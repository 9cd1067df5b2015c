"""The model of transformers that equals a `Transformer`: its `config.json`.

DeepSpeed and torchtitan's backend for such models train it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isclose
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.model.arithmetic import Arithmetic
    from hpgo.model.transformer import Transformer


_OLMO = {
    frozenset({"norms without parameters"}): "olmo",
    frozenset({
        "norms after attention and feed-forward network", "norms over the queries and keys of all heads",
    }): "olmo2",
}  # fmt: skip
"""Model types by what `Arithmetic.other` has of them."""
_OLMO_EPSILON = 1e-5
DIVIDED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose matrices DeepSpeed divides by tensor parallelism."""


def hugging_face(model: Transformer) -> dict[str, object] | None:
    """Return the `config.json` of a model of one of the types of `model_type`; None for others.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [(hugging_face(TRANSFORMERS[name]) or {}).get("model_type") for name in ("llama-3-8b", "mistral-7b", "gpt-2")]
    ['llama', 'mistral', None]
    """
    kind, arithmetic = model_type(model), model.arithmetic
    if kind is None:
        return None
    found: dict[str, object] = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],  # such as Olmo2ForCausalLM
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        # transformers warns about longer sequences than this, but RoPE has no limit.
        "max_position_embeddings": model.longest or 1 << 17,
    }
    if kind.startswith("olmo"):
        found |= {"attention_bias": False}
        del found["head_dim"]  # it follows from the hidden size and the heads
    if kind == "llama":
        found |= {"attention_bias": model.attention_bias == "all", "mlp_bias": model.ffn_bias}
    if kind == "mistral":
        found["sliding_window"] = model.window
    if arithmetic is not None:
        found |= {
            "hidden_act": arithmetic.activation,
            "rms_norm_eps": arithmetic.norm_epsilon,
            "rope_theta": arithmetic.rope_theta,
            "attention_dropout": arithmetic.attention_dropout,
            "initializer_range": arithmetic.init_std,
        }
        if kind == "olmo":
            found |= {"clip_qkv": None}
            del found["rms_norm_eps"]
        if (scaling := arithmetic.rope_scaling) is not None:
            found["rope_scaling"] = {name: value for name, value in asdict(scaling).items() if value is not None}
    return found


def model_type(model: Transformer) -> str | None:
    """Return the model type of transformers that has this shape and arithmetic: one of six, or None.

    These are Llama, Mistral, Qwen2, Qwen3, OLMo and OLMo 2.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> model_type(TRANSFORMERS["llama-3-8b"]), model_type(TRANSFORMERS["gpt-2"])
    ('llama', None)
    """
    if model.arithmetic is not None and (kind := _olmo(model, model.arithmetic)) is not None:
        return kind
    plain = (
        model.gated
        and not model.blocks
        and not (model.experts or model.centred_norms or model.positions or model.further_tokens)
        and model.latent is None
        and model.norms_per_layer == 2
    )
    if not plain or (model.arithmetic is not None and not _is_plain(model.arithmetic, model.head_dim)):
        return None
    windows = len(model.window_layers)
    biased = model.attention_bias != "none" or model.ffn_bias
    if model.head_norms:
        return None if windows or biased else "qwen3"
    if windows:
        return "mistral" if windows == model.layers and not biased else None
    if model.attention_bias == "qkv":
        # Heads of Qwen2 have no width of their own.
        return None if model.ffn_bias or model.head_dim * model.heads != model.hidden else "qwen2"
    return "llama"


def _olmo(model: Transformer, arithmetic: Arithmetic) -> str | None:
    """Return `olmo` or `olmo2` for a model whose norms are those of one of them, and None for all others.

    The two differ from Llama in their norms only, which `Arithmetic.other` names.
    """
    kind = _OLMO.get(frozenset(arithmetic.other))
    if kind is None or not _is_plain(replace(arithmetic, other=()), model.head_dim):
        return None
    plain = not (model.experts or model.window_layers or model.ffn_bias or model.tower) and model.gated
    whole = model.head_dim * model.heads == model.hidden and model.attention_bias == "none"
    if kind == "olmo":
        # Its norms have no choice of an epsilon.
        shaped = not model.blocks and model.norms_per_layer == model.final_norms == 0
        return kind if plain and whole and shaped and arithmetic.norm_epsilon == _OLMO_EPSILON else None
    widths = [[one.size for one in block.vectors] for block in model.blocks]
    shaped = model.final_norms == 1 and model.before is None and model.after is None
    return kind if plain and whole and shaped and widths == [[model.hidden, model.head_dim * model.kv_heads]] else None


def _is_plain(arithmetic: Arithmetic, head_dim: int) -> bool:
    """Return whether the arithmetic has nothing that these models do not have."""
    named = ("activation", "norm_epsilon", "rope_theta", "rope_scaling", "attention_dropout", "init_std")
    usual = type(arithmetic)(**{name: getattr(arithmetic, name) for name in named})
    routed = {name: value for name, value in asdict(usual).items() if name.startswith("router_")}
    # Neighboring dimensions or halves are rotated together: only the order of the weights differs.
    stated = replace(arithmetic, rope_interleaved=False, **routed)
    # The usual scale is often stated, too.
    if (scale := arithmetic.attention_scale) is not None and isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        stated = replace(stated, attention_scale=None)
    return stated == usual and arithmetic.rope_theta is not None
