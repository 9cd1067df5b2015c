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

The short format has a key for each field of `hpgo.Transformer`. In a `config.json`, each model type has its own key
names, and properties without a key, such as biases and norms: `hpgo.model.families` has a file of data for each. A
missing key has the default of its class in transformers, which `class_defaults.json` records. Types without a file are
described by the model that transformers builds, if it is installed, or refused. Unknown keys that may change what the
model computes are refused, too.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hpgo.base.documents import Section, hinted, parse, read_text, record
from hpgo.base.files import as_path, is_folder, may_be_file
from hpgo.base.messages import join_words, nearest_names, safe_repr, shorten, similar
from hpgo.errors import HpgoError, ProfileError
from hpgo.model.families import Family, family, family_names, tower_names
from hpgo.model.families.reading import (
    FIELDS_HINT,
    MISSING_KEY_HINT,
    OPTIONAL,
    REFUSED_HINT,
    VERSION_KEY,
    fields_of,
    keys_of_fields,
    names_of,
    shape_of,
    tower_of,
)
from hpgo.model.formats.built_transformers import built_transformer, can_build, class_keys
from hpgo.model.transformer import Tower, Transformer
from hpgo.model.transformer_presets import named_transformer, transformer_names

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

VERSION = 1
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "n_group")

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
_ENCODERS = {"clip", "siglip"}
"""Types that compare an image with a text, by two encoders that run beside each other."""
_LABELS = "num_labels"
_FRACTION = "partial_rotary_factor"
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
    with hinted(FIELDS_HINT):
        held = parse(read_text(path, ProfileError), str(path), ProfileError)
        # Each model of the hub has a file `config.json`, so that name says nothing about the model.
        kind = held.get("model_type") if isinstance(held, dict) and path.stem == "config" else None
        return of_document(held, name=kind if isinstance(kind, str) else path.stem, file=str(path))


def transformer_of(source: Transformer | str | os.PathLike[str]) -> Transformer:
    """Return a transformer as it is, by its name, or from a file that `read_transformer` accepts.

    A name is hpgo's own, such as `llama-3-8b`, or one of the Hugging Face hub. Raises ProfileError for an unknown name.

    >>> transformer_of("llama-3-8b").layers, transformer_of("Qwen/Qwen2.5-72B").layers
    (32, 80)
    >>> transformer_of("llama-3-9b")
    Traceback (most recent call last):
    hpgo.errors.ProfileError: there is no transformer `llama-3-9b`, and no such file
    """
    if isinstance(source, Transformer):
        return source
    if isinstance(source, str) and (known := named_transformer(source)) is not None:
        return known
    path = as_path(source, ProfileError)
    if not may_be_file(path) or _is_hub_like(path):
        raise ProfileError(
            f"there is no transformer `{shorten(str(path))}`, and no such file",
            _slip_of(str(path), transformer_names())
            or "give its config.json; `hpgo models transformers` lists the known names",
            code="unknown_name",
        )
    return read_transformer(path)


def _is_hub_like(path: Path) -> bool:
    """Return whether a path that does not exist has the form of a hub name: two parts, and no ending of a file."""
    # It is more often a mistyped hub name than a missing file, and then the nearest names help.
    return len(path.parts) == 2 and not path.exists() and path.suffix not in {".json", ".yaml", ".yml"}


def of_document(document: object, *, name: str = "transformer", file: str = "text") -> Transformer:
    """Return the transformer in a parsed file; `name` is its name if it has none.

    >>> of_document({
    ...     "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    ...     "num_attention_heads": 4, "vocab_size": 1000}).kv_heads
    4
    """
    top = Section(document, file, ProfileError, source=MISSING_KEY_HINT)
    if VERSION_KEY in top:
        version = top.get(VERSION_KEY)
        if isinstance(version, bool) or version != VERSION:
            top.fail(f"`{VERSION_KEY}` is {safe_repr(version)}", f"this hpgo reads version {VERSION}")
        top.source = FIELDS_HINT
        return record(Transformer, top, optional=OPTIONAL, known={} if "name" in top else {"name": name})
    if "peft_type" in top:
        base = top.get("base_model_name_or_path", None)
        named = f", such as `{shorten(base)}`" if isinstance(base, str) and base else ""
        top.fail("this is the configuration of an adapter", f"give the model that it adapts{named}, with --lora-rank")
    if "model_type" not in top:
        top.fail(
            f"the keys `model_type` (of a Hugging Face configuration) and `{VERSION_KEY}` are both missing",
            "name a config.json, or write one with a key for each field of hpgo.Transformer",
        )
    return _of_config(top, document, name)  # type: ignore[arg-type]  # a section is a mapping


class _Type(NamedTuple):
    """A model type: the data of its family, and the row of its configuration class in the table of defaults."""

    kind: str
    family: Family
    row: dict[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of all keys, without keys whose default is null."""
        known = {**self.family.extra, **self.row["defaults"]}
        return {key: value for key, value in known.items() if value is not None}

    @property
    def known(self) -> set[str]:
        """All keys with a meaning, under the names that the class uses."""
        return {self.row["names"].get(key, key) for key in self.family.keys}


def _type_of(top: Section, given: dict[str, Any]) -> _Type:
    """Return the type of a configuration. Raises ProfileError for a type that has no family."""
    kind, names = top.text("model_type"), family_names()
    if kind in _ENCODERS:
        top.fail(
            f"model type `{kind}` has two encoders beside each other, but only one after the other are supported",
            "give a model that has it as its tower, or measure it with `hpgo profile`",
        )
    if kind not in names:
        text = given.get("text_config")
        within = isinstance(text, dict) and text.get("model_type") in names
        top.fail(
            f"model type `{shorten(kind)}` is unknown",
            "write the content of `text_config` into a separate file, to read the language model alone"
            if within
            else _slip_of(kind, names) or f"install torch and transformers, or {REFUSED_HINT}",
        )
    data = family(kind)
    return _Type(kind, data, _class_defaults()["types"][data.configuration])


def _of_config(whole_file: Section, given: dict[str, Any], name: str) -> Transformer:
    """Return the transformer of a Hugging Face configuration. Missing keys have the default of their class."""
    kind = whole_file.text("model_type")
    if kind not in family_names() and can_build(kind):
        return _built(whole_file, given, kind, name)
    model = _type_of(whole_file, given)
    if model.family.text:
        model, top, stated, fields = _combined(whole_file, given, model)
    else:
        top, stated, fields = _fields(whole_file, given, model)
    held = given.get("_name_or_path")
    title = held.rstrip("/").rpartition("/")[2] if isinstance(held, str) else ""
    try:
        make = Transformer.from_blocks if "blocks" in fields else Transformer
        return make(name=title or name, **fields)
    except HpgoError as error:
        left_out = [f"{key} {model.defaults[key]}" for key in _SIZES if key in model.defaults and key not in stated]
        defaulted = f" (by default of its class: {', '.join(left_out)})" if left_out else ""
        message, hint = error.message, error.hint
        for field, key in keys_of_fields(model.family, model.row).items():
            message, hint = (text.replace(f"`{field}`", f"`{key}`") for text in (message, hint))
        top.reraise(error, message + defaulted, hint)


def _built(whole_file: Section, given: dict[str, Any], kind: str, name: str) -> Transformer:
    """Return the transformer of a type without a family, which transformers builds."""
    # Classes of transformers accept any key without a word, so unknown keys are refused here.
    row = {"class": "", "defaults": class_keys(kind), "names": {}, "nullable": []}
    model = _Type(kind, Family(name=kind, configuration=kind), row)
    known = {"rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", *row["defaults"]}
    strange = [key for key in _unknown(given, model) if key not in known]
    if strange:
        _refuse_keys(whole_file, strange, _slips(strange, given, model), kind)
    _check_class(whole_file, given, model)
    return whole_file.build(built_transformer, given, name)


def _fields(whole_file: Section, given: dict[str, Any], model: _Type) -> tuple[Section, dict[str, Any], dict[str, Any]]:
    """Return the keys of a configuration with all defaults, the stated ones, and the fields of `Transformer`."""
    top, stated = _keys(whole_file, given, model)
    # Check the spelling first: a misspelled key would otherwise lead to a confusing error about the default in its
    # place.
    _check_spelling(top, stated, model)
    fields = fields_of(model.family, top, model.row)
    _check_keys(top, stated, model)
    _check_class(top, given, model)
    return top, stated, fields


def _keys(whole_file: Section, given: dict[str, Any], model: _Type) -> tuple[Section, dict[str, Any]]:
    """Return the keys of a configuration under the names of its class: with all defaults, and the stated ones."""
    stated = _by_own_names(whole_file, given, model.row["names"])
    # transformers counts the labels in their list.
    if _LABELS in model.family.extra and isinstance(labels := given.get("id2label"), dict):
        stated[_LABELS] = len(labels)
    # transformers takes a null for a missing key here, and rotates all dimensions.
    if stated.get(_FRACTION, 0) is None and model.defaults.get(_FRACTION) == 1:
        del stated[_FRACTION]
    # A null that the class accepts has a meaning, so it is kept apart from a missing key.
    return Section(model.defaults | stated, whole_file.where, ProfileError, source=MISSING_KEY_HINT), stated


def _combined(
    whole_file: Section, given: dict[str, Any], whole: _Type
) -> tuple[_Type, Section, dict[str, Any], dict[str, Any]]:
    """Return the type, the keys and the fields of a language model with a tower in front of it."""
    data, defaults = whole.family, whole.row["parts"]
    outer = dict(given)
    if data.flat and given.get("text_config") is None:
        known = {*_class_defaults()["types"][data.text]["defaults"], "rope_scaling", "rope_parameters"}
        outer = {key: value for key, value in given.items() if key not in known or key in whole.row["defaults"]}
        texts: Any = {key: value for key, value in given.items() if key not in outer or key == "tie_word_embeddings"}
    else:
        texts = defaults["text_config"] if given.get("text_config") is None else given["text_config"]
    outside = data.tower_key
    encoded = defaults[outside] if given.get(outside) is None else given[outside]
    parts = {}
    for key, part, kind in (("text_config", texts, data.text), (outside, encoded, data.vision or data.audio)):
        if part is None:
            continue  # a model that may do without a tower
        parts[key] = Section(part, f"{whole_file.where}, {key}", ProfileError)
        # Older files give the type of the whole model to its parts.
        own = part.get("model_type") in (None, whole.kind)  # a list has no hash for a set
        parts[key] = Section(part | ({"model_type": kind} if own else {}), parts[key].where, ProfileError)
    text = _type_of(parts["text_config"], texts)
    inner = {key: parts["text_config"].get(key) for key in parts["text_config"]}
    inner.pop("architectures", None)
    top, stated, fields = _fields(parts["text_config"], inner, text)
    keys, outer = _keys(whole_file, outer, whole)
    _check_keys(keys, outer, whole)
    more = names_of(data, keys, whole.row) | {"text_hidden": fields["hidden"], "text_tied": fields["tied"]}
    fields |= shape_of(data, keys, whole.row, more)
    if outside in parts:
        fields["tower"] = _tower(parts[outside], data, more)
    return text, top, stated, fields


def _tower(part: Section, data: Family, more: dict[str, Any]) -> Tower:
    """Return the tower in `vision_config` or `audio_config`. Raises ProfileError for an unknown type or key."""
    kind = part.text("model_type")
    if kind not in tower_names():
        part.fail(f"tower of type `{shorten(kind)}` is unknown", f"use one of {', '.join(tower_names())}")
    tower = family(kind, "towers")
    model = _Type(kind, tower, _class_defaults()["types"][tower.configuration])
    top, stated = _keys(part, {key: part.get(key) for key in part}, model)
    # No value of a tower's arithmetic is kept, so only keys that its class lacks are refused.
    strange = [key for key in _unknown(stated, model) if key not in model.row["defaults"]]
    if strange:
        _refuse_keys(top, strange, _slips(strange, stated, model), kind)
    return tower_of(tower, top, model.row, data.projector, more, name="audio" if data.audio else "vision")


def _slip_of(kind: str, known: Sequence[str]) -> str:
    """Return a hint for a misspelled model type or name, or an empty text for one that is not known.

    >>> _slip_of("lama", ["llama"]), _slip_of("llama4", ["llama"])
    ('did you mean `llama`?', '')
    """
    digits = re.findall(r"\d+", kind)
    # Another number is another architecture or size: `llama4` as `llama` would plan a model without its experts.
    return similar(kind, [one for one in known if re.findall(r"\d+", one) == digits], minimum=0.8)


def _check_class(top: Section, given: dict[str, Any], model: _Type) -> None:
    """Refuse a configuration whose `architectures` names a class with another head than a language model's."""
    names = given.get("architectures")
    ends = (*_CAUSAL_ENDS, *model.family.classes)
    if names is None or (isinstance(names, list) and names and all(str(name).endswith(ends) for name in names)):
        return  # `model_type` takes precedence, as in transformers: public files may name a class of another type
    listed = _listed(names) if isinstance(names, list) and names else safe_repr(names)
    top.fail(
        f"`architectures` is {listed}, but only a {_named_class(model)} is supported",
        f'write `"architectures": ["{model.row["class"]}"]` into the file to read it as a {_named_class(model)}',
        code="unknown_name",
    )


def _named_class(model: _Type) -> str:
    """Return what a model is that can be read, in words."""
    return "classifier of images" if model.family.shape.get("embeds") is False else "causal language model"


def _by_own_names(top: Section, given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the keys of a configuration under the names that its class uses."""
    for key, own in names.items():
        if key in given and own in given and given[key] != given[own]:
            top.fail(f"`{own}` and its other name `{key}` have different values", "keep one of them")
    return {names.get(key, key): value for key, value in given.items()}


def _check_keys(top: Section, stated: dict[str, Any], model: _Type) -> None:
    """Refuse unknown keys that may change what the model computes, all at once, and nulls without a meaning."""
    defaults, nullable = model.row["defaults"], model.row["nullable"]
    nulls = [
        key for key, value in stated.items()
        if value is None and defaults.get(key) is not None and key not in nullable and key not in _HARMLESS
    ]  # fmt: skip
    if nulls:
        top.fail(
            f"{_listed(nulls)} must not be null in a model of type `{model.kind}`", "leave it out, or give a value"
        )
    if unknown := _unknown(stated, model):
        _refuse_keys(top, unknown, _slips(unknown, stated, model), model.kind)


def _check_spelling(top: Section, stated: dict[str, Any], model: _Type) -> None:
    """Refuse misspelled keys before the defaults in their place lead to another error."""
    strange = [key for key in stated if key not in model.row["defaults"] and not _changes_nothing(key, stated[key])]
    if slips := _slips([key for key in strange if key not in model.known], stated, model):
        # Look for other unknown keys among the corrected ones, so that one error lists all.
        others = _unknown({slips.get(key, key): value for key, value in stated.items()}, model)
        _refuse_keys(top, [key for key in stated if key in slips or key in others], slips, model.kind)


def _slips(keys: list[str], stated: dict[str, Any], model: _Type) -> dict[str, str]:
    """Return the intended key for each of the unknown `keys` that resembles exactly one key of the type."""
    absent = sorted({*model.row["defaults"], "rope_scaling", "rope_parameters"} - stated.keys())
    nearest = {key: nearest_names(str(key), absent, minimum=0.85) for key in keys}
    return {key: names[0] for key, names in nearest.items() if len(names) == 1}


def _unknown(stated: dict[str, Any], model: _Type) -> list[str]:
    """Return the stated keys that no formula reads and that may change what the model computes."""
    known, kinds = model.known, stated.get("layer_types")
    if isinstance(kinds, list) and all(one == "full_attention" for one in kinds):
        known = known | {"layer_types"}  # has no effect in types without windows
    return [
        key for key, value in stated.items()
        if key not in known and not _changes_nothing(key, value) and value != model.row["defaults"].get(key)
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
        join_words(meant)
        or f"remove {'it' if len(unknown) == 1 else 'them'} if the model computes the same without, or {REFUSED_HINT}",
    )


def _listed(keys: list[str]) -> str:
    return join_words([f"`{shorten(str(key))}`" for key in keys])
