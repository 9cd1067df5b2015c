"""Transformers by their configuration: Hugging Face's `config.json`, or hpgo's own few lines.

    hpgo_transformer: 1
    name: mine
    layers: 32
    hidden: 4096
    heads: 32
    kv_heads: 8
    head_dim: 128
    ffn: 14336
    vocab: 32000

The second has a key for each field of `hpgo.Transformer`. Of the first, each model type that is known here has its own
names, and its own habits that no key tells: where it adds vectors, what it normalises. So a type, or a key of one, that
nobody here has heard of is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.checks import whole
from hpgo.base.documents import Section, hinted, parse, read_text, record
from hpgo.base.errors import ProfileError
from hpgo.base.files import as_path, is_folder, may_be_file
from hpgo.base.wording import near, shorten, shown
from hpgo.model.transformer import MOST_LAYERS, Latent, Transformer
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

VERSION = 1
VERSION_KEY = "hpgo_transformer"

_REQUIRED = {"layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"}
_OPTIONAL = {name for name in Transformer.__dataclass_fields__ if name not in _REQUIRED} | {"q_rank"}

_READ_OR_ASKED = """
activation_function architectures attention_dropout attn_bias_type attn_logit_softcapping attn_pdrop auto_map
aux_loss_alpha bad_words_ids bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout dtype
embd_pdrop eos_token_id ep_size final_logit_softcapping gradient_accumulation_steps gradient_checkpointing hidden_act
hidden_activation hidden_dropout id2label initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference
label2id layer_norm_eps layer_norm_epsilon max_window_layers model_type n_ctx name_or_path norm_topk_prob
output_attentions output_hidden_states output_router_logits pad_token_id partial_rotary_factor pretraining_tp
problem_type qk_head_dim quantization_config query_pre_attn_scalar reorder_and_upcast_attn resid_pdrop return_dict
rms_norm_eps rope_interleave rope_local_base_freq rope_parameters rope_scaling rope_theta rope_type rotary_emb_base
rotary_pct routed_scaling_factor router_aux_loss_coef router_jitter_noise scale_attn_by_inverse_layer_idx
scale_attn_weights scoring_func seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj task_specific_params torch_dtype transformers_version unsloth_fixed use_bidirectional_attention
use_cache use_mrope use_parallel_residual use_return_dict
"""
_NO_SHAPE = frozenset(_READ_OR_ASKED.split())
"""Keys of a `config.json` that do not say how large anything is."""


def read_transformer(source: str | os.PathLike[str]) -> Transformer:
    """The transformer in a file: a Hugging Face `config.json`, a folder with one, or hpgo's own YAML or JSON.

    Raises ProfileError for what can't be read, naming the file and the key, and for a type of model, or a key of one,
    that is not known.
    """
    path = as_path(source, ProfileError)
    if is_folder(path):
        path = path / "config.json"
    with hinted("`help(hpgo.Transformer)` says what a transformer's file holds"):
        held = parse(read_text(path, ProfileError), str(path), ProfileError)
        return of_document(held, name=path.stem, file=str(path))


def transformer_of(source: Transformer | str | os.PathLike[str]) -> Transformer:
    """A transformer, as it is, by its name, or in a file that `read_transformer` takes.

    Raises ProfileError for a name that is none.

    >>> transformer_of("llama-3-8b").layers
    32
    >>> transformer_of("llama-3-9b")
    Traceback (most recent call last):
    hpgo.ProfileError: there is no transformer `llama-3-9b`, and no such file
    """
    if isinstance(source, Transformer):
        return source
    if isinstance(source, str) and source in TRANSFORMERS:
        return TRANSFORMERS[source]
    path = as_path(source, ProfileError)
    if not may_be_file(path):
        raise ProfileError(
            f"there is no transformer `{shorten(str(path))}`, and no such file", near(str(path), TRANSFORMERS)
        )
    return read_transformer(path)


def of_document(document: object, *, name: str = "transformer", file: str = "text") -> Transformer:
    """The transformer that a parsed file holds; `name` is its name if it says none.

    >>> of_document({
    ...     "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    ...     "num_attention_heads": 4, "vocab_size": 1000}).kv_heads
    4
    """
    whence = f"take all of the config.json that the model came with, or describe it with `{VERSION_KEY}: 1`"
    top = Section(document, file, ProfileError, whence=whence)
    if VERSION_KEY in top:
        version = top.get(VERSION_KEY)
        if isinstance(version, bool) or version != VERSION:
            top.fail(f"`{VERSION_KEY}` is {shown(version)}", f"this hpgo reads version {VERSION}")
        return record(Transformer, top, optional=_OPTIONAL, known={} if "name" in top else {"name": name})
    if "model_type" not in top:
        top.fail(
            f"neither `model_type`, as a Hugging Face configuration has it, nor `{VERSION_KEY}` is there",
            "name a config.json, or write one with a key for each field of hpgo.Transformer",
        )
    kind = top.text("model_type")
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        top.fail(
            f"models of type `{kind}` are not known",
            f"known are {known}; of others a few lines of YAML with `{VERSION_KEY}: 1` say the shape",
        )
    fields = _KINDS[kind](top)
    held = top.get("_name_or_path", None)
    title = held.rstrip("/").rpartition("/")[2] if isinstance(held, str) else ""
    unknown = [
        key for key in top.unread()
        if key not in _NO_SHAPE and not str(key).startswith("_") and top.get(key) not in (None, False)
    ]  # fmt: skip
    if unknown:
        top.fail(
            f"`{shorten(unknown[0])}` of a model of type `{kind}` is not known",
            f"take it out if it does not change what layers cost, or describe the model with `{VERSION_KEY}: 1`",
        )
    return top.build(Transformer, name=title or name, **fields)


def _or(top: Section, key: str, default: int) -> int:
    """A whole number that may be left out, or null."""
    return default if top.get(key, None) is None else top.whole(key)


def _is_set(top: Section, key: str, default: bool = False) -> bool:
    """A flag that may be left out, or null."""
    return default if top.get(key, None) is None else top.flag(key)


def _common(top: Section, *, tied: bool = False) -> dict[str, Any]:
    """What nearly all types name alike; `tied` if nothing is said."""
    hidden, heads = top.whole("hidden_size", least=1), top.whole("num_attention_heads", least=1)
    return {
        "layers": top.build(whole, "num_hidden_layers", top.whole("num_hidden_layers", least=1), most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _or(top, "num_key_value_heads", heads),
        "head_dim": _or(top, "head_dim", hidden // heads),
        "ffn": top.whole("intermediate_size"),
        "vocab": top.whole("vocab_size", least=1),
        "tied": _is_set(top, "tie_word_embeddings", tied),
        "longest": _or(top, "max_position_embeddings", 0),
    }


def _attention_bias(top: Section) -> str:
    return "all" if _is_set(top, "attention_bias") else "none"


def _llama(top: Section) -> dict[str, Any]:
    bias = _is_set(top, "mlp_bias")
    return _common(top) | {"attention_bias": _attention_bias(top), "ffn_bias": bias}


def _mistral(top: Section) -> dict[str, Any]:
    fields = _common(top)
    window = _or(top, "sliding_window", 0)
    return fields | {"window": window, "window_layers": tuple(range(fields["layers"])) if window else ()}


def _mixtral(top: Section) -> dict[str, Any]:
    fields = _mistral(top)
    experts, each = top.whole("num_local_experts", least=1), top.whole("num_experts_per_tok", least=1)
    width = fields["ffn"]
    return fields | {"ffn": 0, "experts": experts, "experts_per_token": each, "expert_ffn": width}


def _windows(top: Section, layers: int, last: Callable[[int], bool]) -> dict[str, Any]:
    """Of a type whose layers have a window or not, as `layer_types` says, or else all that aren't `last`."""
    window = _or(top, "sliding_window", 0)
    kinds = top.items("layer_types", []) or ["full" if last(at) else "sliding_attention" for at in range(layers)]
    with_window = tuple(at for at, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"window": window, "window_layers": with_window} if window else {}


def _qwen2(top: Section) -> dict[str, Any]:
    fields = _common(top)
    first = _or(top, "max_window_layers", fields["layers"])
    windows = _windows(top, fields["layers"], lambda at: at < first)
    return fields | (windows if _is_set(top, "use_sliding_window") else {}) | {"attention_bias": "qkv"}


def _qwen3(top: Section) -> dict[str, Any]:
    return _qwen2(top) | {"attention_bias": _attention_bias(top), "head_norms": True}


def _qwen_experts(top: Section, layers: int, experts: str) -> dict[str, Any]:
    every, dense = _or(top, "decoder_sparse_step", 1) or 1, top.items("mlp_only_layers", [])
    return {
        "experts": top.whole(experts, least=1),
        "experts_per_token": top.whole("num_experts_per_tok", least=1),
        "expert_ffn": top.whole("moe_intermediate_size", least=1),
        "dense_layers": tuple(at for at in range(layers) if at in dense or (at + 1) % every),
    }


def _qwen2_moe(top: Section) -> dict[str, Any]:
    fields = _qwen2(top)
    bias = "qkv" if _is_set(top, "qkv_bias", True) else "none"
    fields |= _qwen_experts(top, fields["layers"], "num_experts")
    shared = top.whole("shared_expert_intermediate_size")
    return fields | {"attention_bias": bias, "shared_ffn": shared, "shared_gate": bool(shared)}


def _qwen3_moe(top: Section) -> dict[str, Any]:
    fields = _qwen3(top)
    return fields | _qwen_experts(
        top, fields["layers"], "num_local_experts" if "num_local_experts" in top else "num_experts"
    )


def _gemma(top: Section) -> dict[str, Any]:
    return _common(top, tied=True) | {"attention_bias": _attention_bias(top)}


def _gemma2(top: Section) -> dict[str, Any]:
    fields = _gemma(top)
    return fields | _windows(top, fields["layers"], lambda at: at % 2 == 1) | {"norms_per_layer": 4}


def _gemma3(top: Section) -> dict[str, Any]:
    fields = _gemma(top)
    every = _or(top, "sliding_window_pattern", 6) or 6
    windows = _windows(top, fields["layers"], lambda at: (at + 1) % every == 0)
    return fields | windows | {"norms_per_layer": 4, "head_norms": True}


_PLAIN = {"gated": False, "attention_bias": "all", "ffn_bias": True, "centred_norms": True}
"""As GPT-2 and its descendants have it."""


def _gpt2(top: Section) -> dict[str, Any]:
    hidden, heads = top.whole("n_embd", least=1), top.whole("n_head", least=1)
    positions = top.whole("n_positions")
    return _PLAIN | {
        "layers": top.whole("n_layer", least=1),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": _or(top, "n_inner", 4 * hidden),
        "vocab": top.whole("vocab_size", least=1),
        "tied": _is_set(top, "tie_word_embeddings", True),
        "positions": positions,
        "longest": positions,
    }


def _gpt_neox(top: Section) -> dict[str, Any]:
    bias = "all" if _is_set(top, "attention_bias", True) else "none"
    return _common(top) | _PLAIN | {"attention_bias": bias}


def _deepseek(top: Section) -> dict[str, Any]:
    # `head_dim` is the turned part's there.
    fields = _common(top) | {"head_dim": top.whole("qk_nope_head_dim") + top.whole("qk_rope_head_dim")}
    if _is_set(top, "attention_bias") or _is_set(top, "mlp_bias"):
        top.fail("`attention_bias` and `mlp_bias` are not known of models with latent attention", "they are false")
    fields["kv_heads"] = fields["heads"]
    latent = Latent(
        kv_rank=top.whole("kv_lora_rank", least=1),
        rope_dim=top.whole("qk_rope_head_dim"),
        value_dim=top.whole("v_head_dim", least=1),
        q_rank=_or(top, "q_lora_rank", 0) or None,
    )
    width, every = top.whole("moe_intermediate_size", least=1), _or(top, "moe_layer_freq", 1) or 1
    groups, anywhere = _or(top, "n_group", 1) or 1, top.get("topk_method", None) == "greedy"
    groups = 1 if anywhere else groups
    first = _or(top, "first_k_dense_replace", 0)
    return fields | {
        "latent": latent,
        "further_tokens": _or(top, "num_nextn_predict_layers", 0),
        "experts": top.whole("n_routed_experts", least=1),
        "experts_per_token": top.whole("num_experts_per_tok", least=1),
        "expert_ffn": width,
        "shared_ffn": width * _or(top, "n_shared_experts", 0),
        "expert_groups": groups,
        "groups_per_token": min(groups, _or(top, "topk_group", groups) or groups),
        "dense_layers": tuple(at for at in range(fields["layers"]) if at < first or at % every),
    }


_KINDS: dict[str, Callable[[Section], dict[str, Any]]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
