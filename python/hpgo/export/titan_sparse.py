"""Models of torchtitan 0.3 with experts or latent attention: their shape, and code that reads it in a configuration.

Source: `torchtitan/models/common/moe.py`, and `model.py` of `models/qwen3`, `models/deepseek_v3` and `models/gpt_oss`
of 0.3.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.quoting import filled, in_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.model.transformer import Transformer

_READER = '''

def shapes_of(model):
    """Yield the shape of the model."""
    layers = model.layers
    yield {
        "layers": len(layers),
        "dim": model.dim,
        "vocab_size": model.vocab_size,
        "tied": model.enable_weight_tying,
        "dense_layers": [at for at, layer in enumerate(layers) if layer.moe is None],
        "attention": only(attention_of(layer.attention) for layer in layers),
        "ffn": only(layer.feed_forward.w1.out_features for layer in layers if layer.moe is None),
        "experts": only(experts_of(layer.moe) for layer in layers if layer.moe is not None),__LAYERS__
    }


def only(values):
    """Return the value that all layers have, None without any, or a list of different ones."""
    found = []
    for value in values:
        if value not in found:
            found.append(value)
    return found[0] if len(found) == 1 else found or None


__ATTENTION__


def experts_of(moe):
    """Return the shape of the experts of a layer, and what their router computes."""
    router = moe.router
    return {
        "num_experts": moe.num_experts,
        "hidden_dim": moe.routed_experts.inner_experts.hidden_dim,
        "shared": 0 if moe.shared_experts is None else moe.shared_experts.w1.out_features,
        "top_k": router.top_k,
        "score_func": router.score_func,
        "route_norm": router.route_norm,
        "route_scale": router.route_scale,
        "num_expert_groups": router.num_expert_groups,
        "num_limited_groups": router.num_limited_groups,__EXPERTS__
    }


def norms_of(model):
    """Yield all norms of the model."""
    yield model.norm
    for layer in model.layers:
        yield from (layer.attention_norm, layer.ffn_norm)
        norms = (getattr(layer.attention, name, None) for name in ("qk_norm", "q_norm", "kv_norm"))
        yield from (norm for norm in norms if norm is not None)
'''
"""Functions that read a model of torchtitan 0.3 with experts or latent attention."""
_GROUPED = '''
def attention_of(attention):
    """Return the shape of an attention."""
    heads = attention.n_heads
    return {
        "n_heads": heads,
        "n_kv_heads": attention.n_kv_heads or heads,
        "head_dim": attention.head_dim or attention.dim // heads,
        "qk_norm": attention.qk_norm is not None,
    }
'''
_LATENT = '''
def attention_of(attention):
    """Return the shape of an attention whose keys and values come from a latent vector."""
    names = ("n_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(attention, name) for name in names}
'''
_SINKS = '''
def attention_of(attention):
    """Return the shape of an attention with sinks."""
    return {name: getattr(attention, name) for name in ("n_heads", "n_kv_heads", "head_dim")}
'''

_LIMIT = 7.0
"""Clamp of the networks of experts in `GptOssGroupedExperts.Config`, for models whose arithmetic is not known."""
ROUTER = {"score_func": "sigmoid", "route_norm": False, "route_scale": 1.0}
"""Settings of a router that shape its scores, with torchtitan's defaults."""
_APART = {*ROUTER, "balances", "mscale", "swiglu_limit"}


def of_rope(stated: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of norms and RoPE: those that belong neither to experts nor to latent attention.

    >>> of_rope({"theta": 1e4, "route_norm": True})
    {'theta': 10000.0}
    """
    return {name: value for name, value in stated.items() if name not in _APART}


def is_sparse(model: Transformer) -> bool:
    """Return whether a model needs these texts: whether it has experts or latent attention."""
    return bool(model.experts) or model.latent is not None


def shape_of(model: Transformer, stated: Mapping[str, object]) -> dict[str, object]:
    """Return what `shapes_of` of the text finds in torchtitan's configuration of a model.

    `stated` has the settings of its router, by the names in `ROUTER`, if they are known.
    """
    dense = list(model.dense_layers) if model.experts else list(range(model.layers))
    return {
        "layers": model.layers,
        "dim": model.hidden,
        "vocab_size": model.vocab,
        "tied": model.tied,
        "dense_layers": dense,
        "attention": _attention(model),
        "ffn": model.ffn if dense else None,
        "experts": _experts(model, stated) if model.experts else None,
        **({"windows": windows_of(model)} if model.blocks else {}),
    }


def windows_of(model: Transformer) -> list[int | None]:
    """Return the window of each layer of a model with attention sinks; None for layers that see all tokens.

    >>> from hpgo.model.formats.transformers import transformer_of
    >>> windows_of(transformer_of("openai/gpt-oss-20b"))[:3]
    [128, None, 128]
    """
    return [model.block(model.kind(layer)).attention[0].window or None for layer in range(model.layers)]


def _attention(model: Transformer) -> dict[str, object]:
    if (latent := model.latent) is None:
        plain: dict[str, object] = {
            "n_heads": model.heads,
            "n_kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
        }
        return plain if model.blocks else plain | {"qk_norm": model.head_norms}
    return {
        "n_heads": model.heads,
        "q_lora_rank": latent.q_rank or 0,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": model.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _experts(model: Transformer, stated: Mapping[str, object]) -> dict[str, object]:
    groups = model.expert_groups
    return {
        "num_experts": model.experts,
        "hidden_dim": model.expert_ffn,
        "shared": model.shared_ffn,
        "top_k": model.experts_per_token,
        **{name: stated.get(name, default) for name, default in ROUTER.items()},
        "num_expert_groups": groups if groups > 1 else None,
        "num_limited_groups": model.groups_per_token if groups > 1 else None,
        **({"swiglu_limit": stated.get("swiglu_limit", _LIMIT)} if model.blocks else {}),
    }


def texts(model: Transformer, stated: Mapping[str, object]) -> dict[str, Any]:
    """Return the texts of `for_torchtitan.module` that a model needs in place of a dense one's."""
    lines, constants = ["    for layer in model.layers:"], []
    if model.experts:
        # The rate is torchtitan's default. It also stands for a router of which nothing is known.
        constants = [f"BALANCE = {in_python(1e-3 if stated.get('balances', True) else None)}"]
        lines += ["        if layer.moe is not None:", "            layer.moe.load_balance_coeff = BALANCE"]
    if "mscale" in stated:
        lines.append(f"        layer.attention.mscale = {in_python(stated['mscale'])}")
    return {"reader": _reader(model), "constants": constants, "changes": lines if len(lines) > 1 else []}


def _reader(model: Transformer) -> list[str]:
    """Return the lines of the functions that read a model of the same package as `model`."""
    sinks = bool(model.blocks)
    attention = _SINKS if sinks else _LATENT if model.latent is not None else _GROUPED
    layer = '\n        "windows": [layer.attention.sliding_window_size for layer in layers],' if sinks else ""
    limit = '\n        "swiglu_limit": moe.routed_experts.inner_experts.swiglu_limit,' if sinks else ""
    return filled(_READER, {"ATTENTION": attention.strip(), "LAYERS": layer, "EXPERTS": limit}).splitlines()
