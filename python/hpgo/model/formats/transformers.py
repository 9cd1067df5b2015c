"""Reader of transformer configurations: Hugging Face's `config.json`, or hpgo's own short format.

    hpgo_transformer: 1
    name: mine
    layers: 32
    hidden: 4096
    heads: 32
    kv_heads: 8
    head_dim: 128
    ffn: 14336
    vocab: 32000

The short format has a key for each field of `hpgo.Transformer`. In a `config.json`, each supported model type has its
own key names, and properties without a key, such as biases and norms. A missing key has the default of its class in
transformers, which `class_defaults.json` records. Unknown model types are refused, and so are unknown keys that may
change what the model computes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import MISSING
from functools import cache
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpgo.base.checks import check_int
from hpgo.base.documents import Section, hinted, parse, read_text, record
from hpgo.base.files import as_path, is_folder, may_be_file
from hpgo.base.messages import did_you_mean, join_words, nearest_names, safe_repr, shorten, similar
from hpgo.errors import HpgoError, ProfileError
from hpgo.model.arithmetic import Arithmetic, RopeScaling
from hpgo.model.blocks import Attention, Block, Conv, Experts, Latent, Linear, Mlp, Scan, Vector
from hpgo.model.transformer import MAX_LAYERS, Tower, Transformer
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

VERSION = 1
VERSION_KEY = "hpgo_transformer"

_OPTIONAL = {
    name
    for kind in (
        Transformer,
        Arithmetic,
        RopeScaling,
        Block,
        Attention,
        Scan,
        Linear,
        Conv,
        Vector,
        Mlp,
        Experts,
        Tower,
    )
    for name, field in kind.__dataclass_fields__.items()
    if field.default is not MISSING
} | {"q_rank"}
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "n_group")

_MISSING_KEY_HINT = f"take all of the config.json that the model came with, or describe it with `{VERSION_KEY}: 1`"
_FIELDS_HINT = "`python -m pydoc hpgo.Transformer` lists the keys"
_REFUSED_HINT = f"describe the model with `{VERSION_KEY}: 1`: {_FIELDS_HINT}"
_WHOLE_HEADS = frozenset({"deepseek_v2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama"})
"""Types whose `hidden_size` must be a multiple of the number of heads, even if `head_dim` is stated."""
_KEYS_OF_FIELDS = {
    "kv_heads": ("num_key_value_heads",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "expert_groups": ("n_group",),
    "groups_per_token": ("topk_group",),
    "ffn": ("intermediate_size", "n_inner"),
    "head_dim": ("qk_rope_head_dim", "head_dim", "num_attention_heads", "n_head"),
}
"""Keys of configurations by the field of `Transformer` that they set. The first key that a type has applies."""

# These keys do not change what a language model computes in training.
_BOOKKEEPING = """
architectures auto_map cache_implementation dtype finetuning_task gradient_accumulation_steps gradient_checkpointing
is_llama_config keys_to_ignore_at_inference model_name model_type name_or_path quantization_config return_dict
return_legacy_cache save_step torch_dtype torchscript transformers_version unsloth_fixed unsloth_version
use_return_dict
"""
_IMPLEMENTATION = """
attn_implementation chunk_size_feed_forward ep_size is_decoder output_attentions output_hidden_states output_past
output_router_logits pretraining_tp reorder_and_upcast_attn use_cache use_flash_attention use_flash_attention_2
use_flash_attn
"""
_OTHER_HEADS = """
classifier_dropout id2label label2id num_labels problem_type summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj task_specific_params
"""
_TOKENIZER = "bos_token eos_token model_max_length pad_token padding_side prefix sep_token tokenizer_class unk_token"
_LENGTHS = "max_sequence_length max_seq_len max_seq_length n_ctx seq_length"
# All other keys of generation are in the table of defaults, because transformers itself ignores them.
_GENERATION = "bad_words_ids num_beam_groups diversity_penalty forced_bos_token_id forced_eos_token_id tf_legacy_loss"
_HARMLESS = frozenset(
    " ".join((_BOOKKEEPING, _IMPLEMENTATION, _OTHER_HEADS, _TOKENIZER, _LENGTHS, _GENERATION)).split()
)
_CAUSAL_ENDS = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead")
"""Endings of the names of causal language model classes."""
_TOKEN_IDS = ("_token_id", "_token_ids", "_token_index")


@cache
def _class_defaults() -> dict[str, Any]:
    """Return the table that `research/class_defaults.py` wrote: the defaults of transformers by model type."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("class_defaults.json").read_text(encoding="utf-8"))
    return table


def read_transformer(source: str | os.PathLike[str]) -> Transformer:
    """Read the transformer in a Hugging Face `config.json`, a folder with one, or hpgo's own YAML or JSON.

    Raises ProfileError naming file and key if the file can't be read, and for a model type or key that is unknown.
    """
    path = as_path(source, ProfileError)
    if is_folder(path):
        path = path / "config.json"
    with hinted(_FIELDS_HINT):
        held = parse(read_text(path, ProfileError), str(path), ProfileError)
        return of_document(held, name=path.stem, file=str(path))


def transformer_of(source: Transformer | str | os.PathLike[str]) -> Transformer:
    """Return a transformer as it is, by its name, or from a file that `read_transformer` accepts.

    Raises ProfileError for an unknown name.

    >>> transformer_of("llama-3-8b").layers
    32
    >>> transformer_of("llama-3-9b")
    Traceback (most recent call last):
    hpgo.errors.ProfileError: there is no transformer `llama-3-9b`, and no such file
    """
    if isinstance(source, Transformer):
        return source
    if isinstance(source, str) and source in TRANSFORMERS:
        return TRANSFORMERS[source]
    path = as_path(source, ProfileError)
    if not may_be_file(path):
        raise ProfileError(
            f"there is no transformer `{shorten(str(path))}`, and no such file",
            did_you_mean(str(path), TRANSFORMERS),
            code="unknown_name",
        )
    return read_transformer(path)


def of_document(document: object, *, name: str = "transformer", file: str = "text") -> Transformer:
    """Return the transformer in a parsed file; `name` is its name if it has none.

    >>> of_document({
    ...     "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    ...     "num_attention_heads": 4, "vocab_size": 1000}).kv_heads
    4
    """
    top = Section(document, file, ProfileError, source=_MISSING_KEY_HINT)
    if VERSION_KEY in top:
        version = top.get(VERSION_KEY)
        if isinstance(version, bool) or version != VERSION:
            top.fail(f"`{VERSION_KEY}` is {safe_repr(version)}", f"this hpgo reads version {VERSION}")
        return record(Transformer, top, optional=_OPTIONAL, known={} if "name" in top else {"name": name})
    if "model_type" not in top:
        top.fail(
            f"the keys `model_type` (of a Hugging Face configuration) and `{VERSION_KEY}` are both missing",
            "name a config.json, or write one with a key for each field of hpgo.Transformer",
        )
    return _of_config(top, document, name)  # type: ignore[arg-type]  # a section is a mapping


def _of_config(whole_file: Section, given: dict[str, Any], name: str) -> Transformer:
    """Return the transformer of a Hugging Face configuration. Missing keys have the default of their class."""
    kind = whole_file.text("model_type")
    if kind not in _KINDS:
        text = given.get("text_config")
        within = isinstance(text, dict) and text.get("model_type") in _KINDS
        known = ", ".join(sorted(_KINDS))
        whole_file.fail(
            f"model type `{shorten(kind)}` is unknown",
            "write the content of `text_config` into a separate file, to read the language model alone"
            if within
            else similar(kind, _KINDS, minimum=0.8) or f"use one of {known}, or {_REFUSED_HINT}",
        )
    row = _class_defaults()["types"][kind]
    stated = _by_own_names(whole_file, given, row["names"])
    defaults = {key: value for key, value in row["defaults"].items() if value is not None}
    # A null that the class accepts has a meaning, so it is kept apart from a missing key.
    top = Section(defaults | stated, whole_file.where, ProfileError, source=_MISSING_KEY_HINT)
    # Check the spelling first: a misspelled key would otherwise lead to a confusing error about the default in its
    # place.
    _check_spelling(top, defaults, stated, kind)
    fields = _KINDS[kind](top)
    _check_keys(top, stated, kind)
    _check_class(top, given, kind)
    if kind in _WHOLE_HEADS and (over := fields["hidden"] % fields["heads"]):
        top.fail(
            f"the width is {fields['hidden']}, but it must be a multiple of {fields['heads']} heads in models of type"
            f" `{kind}`",
            f"set the width to {fields['hidden'] - over + fields['heads']}, or the heads to a number that divides it",
        )
    held = given.get("_name_or_path")
    title = held.rstrip("/").rpartition("/")[2] if isinstance(held, str) else ""
    try:
        return Transformer(name=title or name, **fields)
    except HpgoError as error:
        left_out = [f"{key} {defaults[key]}" for key in _SIZES if key in defaults and key not in stated]
        defaulted = f" (by default of its class: {', '.join(left_out)})" if left_out else ""
        top.reraise(error, _in_keys(error.message, row["defaults"]) + defaulted, _in_keys(error.hint, row["defaults"]))


def _in_keys(text: str, known: dict[str, Any]) -> str:
    """Return a message with the fields of `Transformer` replaced by the type's own keys."""
    for field, keys in _KEYS_OF_FIELDS.items():
        if own := next((key for key in keys if key in known), ""):
            text = text.replace(f"`{field}`", f"`{own}`")
    return text


def _check_class(top: Section, given: dict[str, Any], kind: str) -> None:
    """Refuse a configuration whose `architectures` names a class with another head than a language model's."""
    names = given.get("architectures")
    if names is None or (isinstance(names, list) and names and all(str(name).endswith(_CAUSAL_ENDS) for name in names)):
        return  # `model_type` takes precedence, as in transformers: public files may name a class of another type
    own = _class_defaults()["types"][kind]["class"]
    listed = _listed(names) if isinstance(names, list) and names else safe_repr(names)
    top.fail(
        f"`architectures` is {listed}, but only causal language models are supported",
        f'write `"architectures": ["{own}"]` into the file to read it as a language model',
        code="unknown_name",
    )


def _by_own_names(top: Section, given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the keys of a configuration under the names that its class uses."""
    for key, own in names.items():
        if key in given and own in given and given[key] != given[own]:
            top.fail(f"`{own}` and its other name `{key}` have different values", "keep one of them")
    return {names.get(key, key): value for key, value in given.items()}


def _check_keys(top: Section, stated: dict[str, Any], kind: str) -> None:
    """Refuse unknown keys that may change what the model computes, all at once, and nulls without a meaning."""
    table = _class_defaults()
    row = table["types"][kind]
    nulls = [key for key in row["not_null"] if key in stated and stated[key] is None and key not in _HARMLESS]
    if nulls:
        top.fail(f"{_listed(nulls)} must not be null in a model of type `{kind}`", "leave it out, or give a value")
    if unknown := _unknown(top, stated, kind):
        _refuse_keys(top, unknown, _slips(unknown, stated, kind), kind)


def _check_spelling(top: Section, defaults: dict[str, Any], stated: dict[str, Any], kind: str) -> None:
    """Refuse misspelled keys before the defaults in their place lead to another error."""
    row = _class_defaults()["types"][kind]
    strange = [key for key in stated if key not in row["defaults"] and not _changes_nothing(key, stated[key])]
    if not (slips := _slips(strange, stated, kind)):
        return
    # Read the file with the corrected keys, so that one error can list all other unknown keys, too.
    renamed = {slips.get(key, key): value for key, value in stated.items()}
    whole_file = Section(defaults | renamed, top.where, ProfileError)
    others: list[str] = []
    with suppress(HpgoError):
        _KINDS[kind](whole_file)
        others = _unknown(whole_file, renamed, kind)
    _refuse_keys(top, [key for key in stated if key in slips or key in others], slips, kind)


def _slips(keys: list[str], stated: dict[str, Any], kind: str) -> dict[str, str]:
    """Return the intended key for each of the unknown `keys` that resembles exactly one key of the type."""
    absent = sorted({*_class_defaults()["types"][kind]["defaults"], "rope_scaling", "rope_parameters"} - stated.keys())
    nearest = {key: nearest_names(str(key), absent, minimum=0.85) for key in keys}
    return {key: names[0] for key, names in nearest.items() if len(names) == 1}


def _unknown(top: Section, stated: dict[str, Any], kind: str) -> list[str]:
    """Return the stated keys that were never read and that may change what the model computes."""
    row, kinds = _class_defaults()["types"][kind], stated.get("layer_types")
    if isinstance(kinds, list) and all(one == "full_attention" for one in kinds):
        top.get("layer_types")  # has no effect in types without windows
    return [
        key for key in top.unread()
        if key in stated and not _changes_nothing(key, stated[key]) and stated[key] != row["defaults"].get(key)
    ]  # fmt: skip


def _changes_nothing(key: object, value: object) -> bool:
    """Return whether this key with this value has no effect on the computation of any model."""
    return (
        key in _HARMLESS or key in _class_defaults()["generation"] or str(key).startswith("_")
        or str(key).endswith(_TOKEN_IDS) or value in (None, False, [], {})
    )  # fmt: skip


def _refuse_keys(top: Section, unknown: list[str], slips: dict[str, str], kind: str) -> NoReturn:
    verb = "is" if len(unknown) == 1 else "are"
    meant = [f"rename `{shorten(str(key))}` to `{slips[key]}`" for key in unknown if key in slips]
    top.fail(
        f"{_listed(unknown)} of a model of type `{kind}` {verb} unknown, but may change the results",
        join_words(meant) if meant else _REFUSED_HINT,
    )


def _listed(keys: list[str]) -> str:
    return join_words([f"`{shorten(str(key))}`" for key in keys])


def _or(top: Section, key: str, default: int) -> int:
    """Return a whole number, or `default` for a key that is null, or missing and without a default of its class."""
    return default if top.get(key, None) is None else top.whole(key)


def _is_set(top: Section, key: str, default: bool = False) -> bool:
    """Return a flag, or `default` for a key that is null, or missing and without a default of its class."""
    return default if top.get(key, None) is None else top.flag(key)


def _amount(top: Section, key: str) -> float:
    """Return a number of at least 0; null means 0."""
    return 0.0 if top.get(key, None) is None else top.amount(key)


def _perhaps(top: Section, key: str) -> float | None:
    """Return a number of at least 0, or None for a key that is null or missing."""
    return None if top.get(key, None) is None else top.amount(key)


def _must_be(top: Section, key: str, value: object, why: str) -> None:
    """Refuse a stated `key` with another value than `value`, since no code trains such a model."""
    if (held := top.get(key, None)) is not None and held != value:
        top.fail(
            f"`{key}` is {safe_repr(held)}, but {why}", f"give {value}, or describe the model with `{VERSION_KEY}: 1`"
        )


def _common(top: Section) -> dict[str, Any]:
    """Return the sizes that have the same key in nearly all types."""
    hidden, heads = top.whole("hidden_size", minimum=1), top.whole("num_attention_heads", minimum=1)
    return {
        "layers": top.build(
            check_int, "num_hidden_layers", top.whole("num_hidden_layers", minimum=1), maximum=MAX_LAYERS
        ),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _or(top, "num_key_value_heads", heads),
        "head_dim": _or(top, "head_dim", hidden // heads),
        "ffn": top.whole("intermediate_size"),
        "vocab": top.whole("vocab_size", minimum=1),
        "tied": top.flag("tie_word_embeddings"),
        "longest": _or(top, "max_position_embeddings", 0),
    }


_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Rules of RoPE scaling in transformers, with the keys that each needs."""


def _rope(top: Section, *, theta: str = "rope_theta", fraction: str = "partial_rotary_factor") -> dict[str, Any]:
    """Return the fields of rotary positions, from older keys or from `rope_parameters` of transformers 5."""
    older, newer = (top.get(key, None) for key in ("rope_scaling", "rope_parameters"))
    if older and newer and older != newer:
        top.fail("`rope_scaling` and `rope_parameters` are both given, but differ", "keep one of them")
    held = Section(older or newer or {}, f"{top.where}, RoPE", ProfileError, source=_MISSING_KEY_HINT)
    base, share = top.amount(theta), top.amount(fraction)
    local = top.amount("rope_local_base_freq") if "rope_local_base_freq" in top else None
    by_kind = any(kind in held for kind in ("full_attention", "sliding_attention"))
    if local is not None and newer and not by_kind:
        held.fail(
            "`rope_parameters` has no kinds of layers, but models of this type need them",
            'write them under `"full_attention"`',
        )
    if local is not None and "type" in held and "rope_type" not in held:
        held.fail("`type` is an older name, which transformers ignores in models of this type", "rename it `rope_type`")
    if by_kind:
        if local is None or older:
            held.fail(
                "RoPE by kinds of layers is given, but models of this type don't support it",
                "state it once, without kinds",
            )
        if held.get("sliding_attention", None):
            part = held.within("sliding_attention")
            local = part.amount("rope_theta") if "rope_theta" in part else local
            if _rope_scaling(part, 0) is not None:
                part.fail("RoPE of layers with a window is scaled, but that is not supported", _REFUSED_HINT)
        held = held.within("full_attention") if held.get("full_attention", None) else Section({}, "", ProfileError)
    return {
        "rope_theta": held.amount("rope_theta") if "rope_theta" in held else base,
        "rope_local_theta": local,
        "rotary_fraction": _perhaps(held, "partial_rotary_factor") or share,
        "rope_scaling": _rope_scaling(held, _or(top, "max_position_embeddings", 0)),
    }


def _rope_scaling(held: Section, longest: int) -> RopeScaling | None:
    kind = held.text("rope_type" if "rope_type" in held else "type", "default")
    if kind == "default":
        return None
    if kind not in _ROPE_KEYS:
        held.fail(
            f"RoPE scaling of type `{shorten(kind)}` is unknown",
            did_you_mean(kind, ["default", *_ROPE_KEYS]),
            code="unknown_name",
        )
    for key in _ROPE_KEYS[kind]:
        held.get(key)
    values = {key: held.get(key) for key in held if key in RopeScaling.__dataclass_fields__}
    if kind in {"yarn", "longrope", "llama3"} and longest:
        values.setdefault("original_max_position_embeddings", longest)
    for key in ("type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"):
        held.get(key, None)
    held.done()
    return record(RopeScaling, Section(values | {"rope_type": kind}, held.where, ProfileError), optional=_OPTIONAL)


def _plain(top: Section, *, activation: str = "hidden_act", epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """Return the fields of `Arithmetic` that have the same key in all types without experts."""
    return {
        "activation": top.text(activation),
        "norm_epsilon": top.amount(epsilon),
        "attention_dropout": _amount(top, "attention_dropout"),
        "init_std": top.amount("initializer_range"),
    }


def _turned(top: Section, **more: Any) -> dict[str, Any]:
    """Return the arithmetic of a type whose rotary positions rotate all dimensions of each head."""
    rope = _rope(top)
    if rope["rotary_fraction"] != 1:
        top.fail(
            "`partial_rotary_factor` is not 1, but models of this type rotate all dimensions of each head",
            _REFUSED_HINT,
        )
    return {"arithmetic": top.build(Arithmetic, **_plain(top) | rope | more)}


def _attention_bias(top: Section) -> str:
    return "all" if _is_set(top, "attention_bias") else "none"


def _llama(top: Section) -> dict[str, Any]:
    return _common(top) | {"attention_bias": _attention_bias(top), "ffn_bias": top.flag("mlp_bias")} | _turned(top)


def _everywhere(top: Section, layers: int) -> dict[str, Any]:
    """Return the window of a type that has it in all layers or in none."""
    window = _or(top, "sliding_window", 0)
    return {"window": window, "window_layers": tuple(range(layers)) if window else ()}


def _mistral(top: Section) -> dict[str, Any]:
    fields = _common(top)
    return fields | _everywhere(top, fields["layers"]) | _turned(top)


def _mixtral(top: Section) -> dict[str, Any]:
    # Mixtral normalizes the scores of the chosen experts without a key for it.
    fields = _common(top)
    router = {
        "router_normalizes": True,
        "router_aux_loss": top.amount("router_aux_loss_coef"),
        "router_jitter": top.amount("router_jitter_noise"),
    }
    experts = {
        "ffn": 0,
        "experts": top.whole("num_local_experts", minimum=1),
        "experts_per_token": top.whole("num_experts_per_tok", minimum=1),
        "expert_ffn": fields["ffn"],
    }
    return fields | _everywhere(top, fields["layers"]) | experts | _turned(top, **router)


def _windows(top: Section, layers: int, has_window: Callable[[int], bool]) -> dict[str, Any]:
    """Return the window of a type whose layers have it by `layer_types`, or else by `has_window`."""
    window = _or(top, "sliding_window", 0)
    kinds = [str(kind) for kind in (top.items("layer_types") if top.get("layer_types", None) else ())]
    kinds = kinds or ["sliding_attention" if has_window(at) else "full_attention" for at in range(layers)]
    if strange := set(kinds) - {"sliding_attention", "full_attention", "attention"}:
        top.fail(f"`layer_types` has `{shorten(min(strange))}`, which is unknown", _REFUSED_HINT)
    if len(kinds) != layers:
        top.fail(f"`layer_types` has {len(kinds)} entries, but there are {layers} layers", "give one for each layer")
    with_window = tuple(at for at, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"window": window, "window_layers": with_window} if window and with_window else {}


def _qwen(top: Section, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the window of Qwen 2 and 3, which applies from layer `max_window_layers` on if `use_sliding_window`."""
    first = top.whole("max_window_layers")
    windows = _windows(top, fields["layers"], lambda at: at >= first)
    return windows if top.flag("use_sliding_window") else {}


def _qwen2(top: Section) -> dict[str, Any]:
    fields = _common(top)
    return fields | _qwen(top, fields) | {"attention_bias": "qkv"} | _turned(top)


def _qwen3(top: Section) -> dict[str, Any]:
    fields = _common(top)
    return fields | _qwen(top, fields) | {"attention_bias": _attention_bias(top), "head_norms": True} | _turned(top)


def _qwen_experts(top: Section, layers: int, experts: str) -> dict[str, Any]:
    every = top.whole("decoder_sparse_step", minimum=1)
    dense = () if top.get("mlp_only_layers", None) is None else top.items("mlp_only_layers")
    router = {
        "router_normalizes": top.flag("norm_topk_prob"),
        "router_aux_loss": top.amount("router_aux_loss_coef"),
    }
    return {
        "experts": top.whole(experts, minimum=1),
        "experts_per_token": top.whole("num_experts_per_tok", minimum=1),
        "expert_ffn": top.whole("moe_intermediate_size", minimum=1),
        "dense_layers": tuple(at for at in range(layers) if at in dense or (at + 1) % every),
    } | _turned(top, **router)


def _qwen2_moe(top: Section) -> dict[str, Any]:
    fields = _common(top)
    first, in_use = top.whole("max_window_layers"), top.flag("use_sliding_window")
    # Every second layer below `max_window_layers` has a window, in contrast to Qwen 2 without experts.
    windows = _windows(top, fields["layers"], lambda at: at % 2 == 0 and at < first)
    bias = "qkv" if top.flag("qkv_bias") else "none"
    shared = top.whole("shared_expert_intermediate_size", minimum=1)
    fields |= (windows if in_use else {}) | _qwen_experts(top, fields["layers"], "num_experts")
    return fields | {"attention_bias": bias, "shared_ffn": shared, "shared_gate": True}


def _qwen3_moe(top: Section) -> dict[str, Any]:
    fields = _common(top)
    windows = _everywhere(top, fields["layers"])
    top.get("max_window_layers", None)  # has no effect, in contrast to Qwen 3 without experts
    fields |= (windows if top.flag("use_sliding_window") else {}) | {"head_norms": True}
    return fields | {"attention_bias": _attention_bias(top)} | _qwen_experts(top, fields["layers"], "num_local_experts")


def _gemma(top: Section) -> dict[str, Any]:
    fields = _common(top)
    _must_be(top, "hidden_activation", "gelu_pytorch_tanh", "models of this type have that activation")
    more: dict[str, Any] = {"norm_adds_one": True, "embedding_scale": sqrt(fields["hidden"])}
    # For years, files stated `gelu` although the tanh approximation was meant.
    if top.text("hidden_act") == "gelu":
        more["activation"] = "gelu_pytorch_tanh"
    return fields | {"attention_bias": _attention_bias(top)} | _turned(top, **more)


def _gemma_of_windows(top: Section, has_window: Callable[[int], bool]) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 have in common."""
    fields = _common(top)
    activation = top.text("hidden_activation")
    _must_be(top, "hidden_act", activation, f"`hidden_activation` is {activation}")
    by = top.whole("query_pre_attn_scalar", minimum=1)
    scores = {
        "activation": activation,
        "norm_adds_one": True,
        "embedding_scale": sqrt(fields["hidden"]),
        "attention_scale": None if by == fields["head_dim"] else by**-0.5,
        "attention_logit_softcap": _perhaps(top, "attn_logit_softcapping"),
        "final_logit_softcap": _perhaps(top, "final_logit_softcapping"),
    }
    windows = _windows(top, fields["layers"], has_window)
    rope = _rope(top)
    plain = _plain(top, activation="hidden_activation")
    return fields | windows | {
        "attention_bias": _attention_bias(top),
        "norms_per_layer": 4,
        "arithmetic": top.build(Arithmetic, **plain | rope | scores),
    }  # fmt: skip


def _gemma2(top: Section) -> dict[str, Any]:
    return _gemma_of_windows(top, lambda at: at % 2 == 0)


def _gemma3(top: Section) -> dict[str, Any]:
    every = _or(top, "sliding_window_pattern", 6) or 6
    return _gemma_of_windows(top, lambda at: (at + 1) % every != 0) | {"head_norms": True}


_PLAIN = {"gated": False, "attention_bias": "all", "ffn_bias": True, "centred_norms": True}
"""Properties of GPT-2 and its descendants that no key states."""


def _gpt2(top: Section) -> dict[str, Any]:
    hidden, heads = top.whole("n_embd", minimum=1), top.whole("n_head", minimum=1)
    positions = top.whole("n_positions")
    arithmetic = _plain(top, activation="activation_function", epsilon="layer_norm_epsilon") | {
        "attention_dropout": top.amount("attn_pdrop"),
        "hidden_dropout": top.amount("resid_pdrop"),
        "embedding_dropout": top.amount("embd_pdrop"),
        "attention_scale": None if top.flag("scale_attn_weights") else 1.0,
        "attention_scale_by_layer": top.flag("scale_attn_by_inverse_layer_idx"),
    }
    return _PLAIN | {
        "layers": top.build(check_int, "n_layer", top.whole("n_layer", minimum=1), maximum=MAX_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": _or(top, "n_inner", 4 * hidden),
        "vocab": top.whole("vocab_size", minimum=1),
        "tied": top.flag("tie_word_embeddings"),
        "positions": positions,
        "longest": positions,
        "arithmetic": top.build(Arithmetic, **arithmetic),
    }


def _gpt_neox(top: Section) -> dict[str, Any]:
    fields = _common(top)
    for key, size in (("num_key_value_heads", fields["heads"]), ("head_dim", fields["hidden"] // fields["heads"])):
        _must_be(top, key, size, "models of this type take it from `num_attention_heads`")
    theta = top.amount("rotary_emb_base")
    _must_be(top, "rope_theta", theta, f"`rotary_emb_base` is {theta:g}")
    dropout = top.amount("hidden_dropout")
    share = top.amount("rotary_pct")
    _must_be(top, "partial_rotary_factor", share, f"`rotary_pct` is {share:g}")
    arithmetic = _plain(top, epsilon="layer_norm_eps") | _rope(top, theta="rotary_emb_base", fraction="rotary_pct")
    arithmetic |= {
        "hidden_dropout": dropout,
        "embedding_dropout": dropout,
        "parallel_residual": top.flag("use_parallel_residual"),
    }
    bias = "all" if top.flag("attention_bias") else "none"
    return fields | _PLAIN | {"attention_bias": bias, "arithmetic": top.build(Arithmetic, **arithmetic)}


def _deepseek_v2(top: Section) -> dict[str, Any]:
    _must_be(top, "scoring_func", "softmax", "models of this type have that score")
    _must_be(top, "norm_topk_prob", False, "transformers and the model's own code disagree on its effect")
    how = top.text("topk_method")
    if how not in {"greedy", "group_limited_greedy"}:
        top.fail(f"`topk_method` is {safe_repr(how)}, but it must be greedy or group_limited_greedy", _REFUSED_HINT)
    return _deepseek(top, grouped=how != "greedy", interleaved=True, score={})


def _deepseek_v3(top: Section) -> dict[str, Any]:
    _must_be(top, "scoring_func", "sigmoid", "models of this type have that score")
    _must_be(top, "topk_method", "noaux_tc", "models of this type have that method")
    score = {"router_score": "sigmoid", "router_bias": True, "router_normalizes": _is_set(top, "norm_topk_prob")}
    grouped = (_or(top, "n_group", 1) or 1) > 1
    score |= {"router_group_top": 2} if grouped else {}
    return _deepseek(top, grouped=grouped, interleaved=_is_set(top, "rope_interleave"), score=score)


def _deepseek(top: Section, *, grouped: bool, interleaved: bool, score: dict[str, Any]) -> dict[str, Any]:
    # In these files, `head_dim` is the width of the rotated part. So the head's width is computed from both parts.
    turned = top.whole("qk_rope_head_dim")
    fields = _common(top) | {"head_dim": top.whole("qk_nope_head_dim") + turned}
    top.get("qk_head_dim", None)
    # `Transformer.attention_parameters` counts no biases of latent attention.
    if _is_set(top, "attention_bias") or _is_set(top, "mlp_bias"):
        top.fail(
            "`attention_bias` or `mlp_bias` is true, but models with latent attention have no biases",
            "set both to false",
        )
    fields["kv_heads"] = fields["heads"]
    latent = Latent(
        kv_rank=top.whole("kv_lora_rank", minimum=1),
        rope_dim=turned,
        value_dim=top.whole("v_head_dim", minimum=1),
        q_rank=_or(top, "q_lora_rank", 0) or None,
    )
    width = top.whole("moe_intermediate_size", minimum=1)
    _must_be(top, "moe_layer_freq", 1, "transformers and the model's own code disagree on its effect")
    groups, chosen = _or(top, "n_group", 1) or 1, _or(top, "topk_group", 0)
    groups = groups if grouped else 1
    first = top.whole("first_k_dense_replace")
    balance = _amount(top, "aux_loss_alpha")
    router = score | {
        "router_scale": top.amount("routed_scaling_factor"),
        "router_aux_loss": balance,
        "router_aux_loss_per_sequence": _is_set(top, "seq_aux", default=True) and balance > 0,
        "rope_interleaved": interleaved,
    }
    return (
        fields
        | {
            "latent": latent,
            "further_tokens": _or(top, "num_nextn_predict_layers", 0),
            "experts": top.whole("n_routed_experts", minimum=1),
            "experts_per_token": top.whole("num_experts_per_tok", minimum=1),
            "expert_ffn": width,
            "shared_ffn": width * _or(top, "n_shared_experts", 0),
            "expert_groups": groups,
            "groups_per_token": min(groups, chosen or groups),
            "dense_layers": tuple(range(min(first, fields["layers"]))),
        }
        | _turned(top, **router)
    )


_KINDS: dict[str, Callable[[Section], dict[str, Any]]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
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
