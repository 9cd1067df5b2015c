"""The model of transformers that equals a `Transformer`: its `config.json`.

DeepSpeed trains it, and splits its matrices by tensor parallelism.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import isclose
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.model.arithmetic import Arithmetic
    from hpgo.model.transformer import Transformer


def hugging_face(model: Transformer) -> dict[str, object] | None:
    """Return the `config.json` of a model that transformers has as Llama, Mistral, Qwen2 or Qwen3; None for others.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [(hugging_face(TRANSFORMERS[name]) or {}).get("model_type") for name in ("llama-3-8b", "mistral-7b", "gpt-2")]
    ['llama', 'mistral', None]
    """
    kind, arithmetic = model_type(model), model.arithmetic
    if kind is None:
        return None
    found: dict[str, object] = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
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
        if (scaling := arithmetic.rope_scaling) is not None:
            found["rope_scaling"] = {name: value for name, value in asdict(scaling).items() if value is not None}
    return found


def model_type(model: Transformer) -> str | None:
    """Return the model type of transformers that has this shape and arithmetic, if one of the four has.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> model_type(TRANSFORMERS["llama-3-8b"]), model_type(TRANSFORMERS["gpt-2"])
    ('llama', None)
    """
    plain = (
        model.gated
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


def _is_plain(arithmetic: Arithmetic, head_dim: int) -> bool:
    """Return whether the arithmetic has nothing that these four models do not have."""
    named = ("activation", "norm_epsilon", "rope_theta", "rope_scaling", "attention_dropout", "init_std")
    usual = type(arithmetic)(**{name: getattr(arithmetic, name) for name in named})
    routed = {name: value for name, value in asdict(usual).items() if name.startswith("router_")}
    # Neighboring dimensions or halves are rotated together: only the order of the weights differs.
    stated = replace(arithmetic, rope_interleaved=False, **routed)
    # The usual scale is often stated, too.
    if (scale := arithmetic.attention_scale) is not None and isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        stated = replace(stated, attention_scale=None)
    return stated == usual and arithmetic.rope_theta is not None
