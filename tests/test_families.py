"""Families of transformers: parameters to the last one, as `transformers` builds them on the meta device."""

from __future__ import annotations

import contextlib
import csv
import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

import hpgo
from hpgo.llm.frameworks import framework_support
from hpgo.model.arithmetic import Arithmetic
from hpgo.model.families import family, family_names, tower_names
from hpgo.model.formats.transformers import of_document
from hpgo.model.formulas import Formula

# Sizes that are no defaults, by the names that keys have in most classes.
SIZES: dict[str, list[Any]] = {
    "hidden_size": [64, 96], "num_hidden_layers": [5, 6], "num_attention_heads": [4, 8], "num_key_value_heads": [2, 1],
    "head_dim": [24, 32], "intermediate_size": [80, 112], "vocab_size": [300, 317], "moe_intermediate_size": [40, 56],
    "num_experts_per_tok": [2, 3], "num_local_experts": [8, 6], "num_experts": [8, 6], "n_routed_experts": [8, 12],
    "n_shared_experts": [1, 2], "sliding_window": [32, None], "max_position_embeddings": [128, 64], "n_group": [1, 2],
    "topk_group": [1], "first_k_dense_replace": [1, 2], "q_lora_rank": [16, 24], "kv_lora_rank": [16, 40],
    "qk_nope_head_dim": [16, 24], "qk_rope_head_dim": [8, 16], "v_head_dim": [16, 24], "num_nextn_predict_layers": [0],
    "decoder_sparse_step": [1, 2], "mlp_only_layers": [[], [1]], "shared_expert_intermediate_size": [48, 64],
    "d_kv": [16, 24], "d_ff": [80, 96], "num_layers": [2, 3], "num_decoder_layers": [None, 4],
    "type_vocab_size": [2, 3],
    "relative_attention_num_buckets": [8, 16], "feed_forward_proj": ["relu", "gated-gelu"], "index_n_heads": [4, 6],
    "index_head_dim": [16, 24], "index_topk": [16], "o_groups": [2, 4], "o_lora_rank": [24, 32], "hc_mult": [2, 4],
    "hidden_size_per_layer_input": [0, 24], "vocab_size_per_layer_input": [320, 340], "num_kv_shared_layers": [0, 2],
    "linear_num_heads": [2, 4], "linear_head_dim": [16, 24], "linear_num_key_heads": [2, 4],
    "linear_num_value_heads": [4, 8], "linear_key_head_dim": [16, 24], "linear_value_head_dim": [16, 32],
    "top_k_experts": [2], "expert_layer_period": [2, 3], "attn_layer_period": [4, 3], "attn_layer_offset": [1, 2],
    "mamba_d_state": [8, 16], "mamba_d_conv": [4, 3], "mamba_expand": [2], "state_size": [8, 16], "n_groups": [2, 1],
    "ssm_state_size": [8, 16], "mamba_num_heads": [4, 8], "mamba_head_dim": [16, 24], "conv_kernel": [4, 3],
    "moe_latent_size": [None, 24], "moe_shared_expert_intermediate_size": [48, 64], "intermediate_size_mlp": [72, 96],
    "interleave_moe_layer_step": [1, 2], "no_rope_layer_interval": [4, 2], "moe_k": [2], "moe_num_experts": [8, 6],
    "moe_layer_interval": [1, 2], "moe_layer_start_index": [0, 1], "moe_layer_end_index": [-1, 3],
    "moe_num_shared_experts": [2, 0], "shared_intermediate_size": [48, 64], "index_topk_freq": [1, 3],
    "conv_L_cache": [3, 4], "block_ffn_dim_multiplier": [1.0, 1.5], "block_multiple_of": [16, 32],
    "full_attn_idxs": [None, [0, 2]], "moe_topk": [1, 2], "num_dense_layers": [1, 2], "num_shared_experts": [1, 2],
    "ffn_hidden_size": [None, 96], "num_kv_heads": [None, 2], "ffn_dim": [96, 112], "expansion_ratio": [4, 2],
    "encoder_layers": [2, 3], "decoder_layers": [3, 2], "encoder_attention_heads": [4],
    "decoder_attention_heads": [8, 4],
    "encoder_ffn_dim": [96], "decoder_ffn_dim": [80, 112], "d_model": [64, 96], "num_mel_bins": [16, 24],
    "max_source_positions": [40], "max_target_positions": [48, 64], "projection_dim": [48, 64],
    "n_inner": [None, 96], "n_positions": [64, 80], "rotary_dim": [8, 16], "max_window_layers": [2, 3],
}  # fmt: skip
IMAGES: dict[str, list[Any]] = {
    "patch_size": [4, 8], "image_size": [32, 64], "num_channels": [3, 1], "in_channels": [3, 1], "depth": [4, 5],
    "num_heads": [4, 8], "spatial_merge_size": [2, 1], "temporal_patch_size": [2, 1], "out_hidden_size": [64, 80],
    "embed_dim": [64, 96], "num_position_embeddings": [16, 64], "deepstack_visual_indexes": [[1], [0, 2]],
    "fullatt_block_indexes": [[1], [0, 2]], "projector_output_dim": [64, 48], "vision_output_dim": [48, 64],
    "projector_input_dim": [64], "pos_emb_height": [8], "pos_emb_width": [6, 8],
}  # fmt: skip
# Sizes that must fit each other in a type.
FITTING: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_hidden_layers": 13},
    "mamba2": {"hidden_size": 64, "num_heads": 4, "head_dim": 32},
    "granitemoehybrid": {"mamba_n_heads": 16},
    "bamba": {"mamba_n_heads": 16, "attn_layer_indices": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "falcon_h1": {"mamba_n_heads": 16, "mamba_d_ssm": 128},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 1], [["local"], 2]]},
    "internvl_vision": {"image_size": [32, 64], "patch_size": 8},
}
DRAWS = 3


def count(transformers: Any, held: dict[str, Any]) -> int:
    """Count the parameters of the model that `AutoModelForCausalLM` builds on the meta device."""
    import torch

    given = {"pad_token_id": None} | {key: value for key, value in held.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(held["model_type"], **given)
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[held["model_type"]]["class"])(config)
    return sum(weight.numel() for weight in model.parameters())


def drawn(transformers: Any, kind: str, chance: random.Random, sizes: dict[str, list[Any]] = SIZES) -> dict[str, Any]:
    """Draw a small configuration of a type: sizes that are no defaults, and switches that a formula reads, flipped."""
    data = family(kind, "towers") if kind in tower_names() else family(kind)
    if data.text:
        tower, sizes = data.vision or data.audio, SIZES | IMAGES if data.vision else SIZES
        text, encoded = drawn(transformers, data.text, chance), drawn(transformers, tower, chance, sizes)
        named = {"text_config": {"model_type": data.text, "pad_token_id": None} | text}
        named[data.tower_key] = {"model_type": tower} | encoded
        return named | {"tie_word_embeddings": chance.random() < 0.5}
    config = transformers.CONFIG_MAPPING[kind]
    defaults = {field.name: field.default for field in fields(config)}
    held: dict[str, Any] = {}
    for key, choices in sizes.items():
        own = config.attribute_map.get(key, key)
        if own in defaults and not (own != key and own in sizes):
            held[own] = chance.choice(choices)
    for key in sorted(data.keys - set(data.must_be)):
        if isinstance(defaults.get(key), bool) and chance.random() < 0.4:
            held[key] = not defaults[key]
    return held | FITTING.get(kind, {})


# Language models inside others, such as `qwen3_vl_text`, have no class of their own.
CLASSES = json.loads((Path(hpgo.__file__).parent / "model/formats/class_defaults.json").read_text())["types"]
KINDS = [kind for kind in family_names() if kind in CLASSES and CLASSES[kind]["class"]]


@pytest.mark.parametrize("kind", KINDS)
def test_small_models_have_the_parameters_that_transformers_builds(transformers, kind) -> None:
    compared = 0
    chance = random.Random(kind)
    for _ in range(5 * DRAWS):
        held = {"model_type": kind} | drawn(transformers, kind, chance)
        try:
            shape = of_document(held)
        except hpgo.errors.ProfileError:
            continue  # sizes that do not fit each other
        assert shape.parameters == count(transformers, held), held
        if (compared := compared + 1) == DRAWS:
            break
    assert compared


def test_defaults_of_classes_have_the_recorded_parameters(reference) -> None:
    rows = csv.DictReader((reference / "transformers" / "types.csv").read_text().splitlines())
    wrong, compared = {}, 0
    for row in rows:
        if row["type"] in KINDS and (row["parameters"] or "").isdigit():
            compared += 1
            try:
                mine = of_document({"model_type": row["type"]}).parameters
            except hpgo.errors.ProfileError as error:
                mine = str(error)
            if mine != int(row["parameters"]):
                wrong[row["type"]] = (mine, row["parameters"])
    wrong.pop("deepseek_v2", None)  # its class has no default of `num_experts_per_tok`
    wrong.pop("qwen3_vl_moe", None)  # of which transformers 5.24 shares the matrix of the embedding
    assert not wrong
    assert compared > 10


def test_configs_of_public_models_have_the_recorded_parameters(reference) -> None:
    counts = json.loads((reference / "configs" / "parameters.json").read_text())
    for name, parameters in counts.items():
        held = json.loads((reference / "configs" / f"{name}.json").read_text())
        if held["model_type"] in family_names():
            assert of_document(held).parameters == parameters, name


@pytest.mark.parametrize("kind", ["olmo_hybrid", "nanochat", "xglm", "vaultgemma"])
def test_other_causal_types_have_the_parameters_of_the_model_that_transformers_builds(transformers, kind) -> None:
    assert kind not in family_names()
    shape = of_document({"model_type": kind})
    config = transformers.AutoConfig.for_model(kind)
    import torch

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.arithmetic.other, "no export can state it"
    with refused(hpgo.errors.ProfileError, "invalid_profile", "linear_attention_every"):
        of_document({"model_type": kind, "linear_attention_every": 4})


@pytest.mark.parametrize("kind", ["bart", "whisper", "t5"])
def test_an_encoder_counts_where_the_class_has_one(transformers, kind) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    import torch

    name = next(name for name in ("BartFor", "WhisperFor", "T5For") if name.lower().startswith(kind))
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ConditionalGeneration")(config)
    held = {"model_type": kind, "architectures": [f"{name}ConditionalGeneration"]}
    assert of_document(held).parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("kind", "extra", "other"),
    [
        ("gemma2", {"sliding_window": 4096, "sliding_window_size": 4096}, {"sliding_window_size": 512}),
        ("nemotron_h", {"rope_theta": 10000, "partial_rotary_factor": 1.0}, {}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1}, {"full_attn_mod": 2}),
        ("granitemoehybrid", {"init_method": "mup", "normalization_function": "rmsnorm"},
         {"normalization_function": "layernorm"}),
        ("falcon_h1", {"mamba_use_mlp": True, "mlp_expansion_factor": 8}, {"mamba_use_mlp": False}),
        ("llava", {"vocab_size": 32064}, {}),
        ("phimoe", {"original_max_position_embeddings": 4096}, {}),
    ],
)  # fmt: skip
def test_keys_of_published_files_that_transformers_does_not_read_are_accepted(
    kind: str, extra: dict[str, Any], other: dict[str, Any]
) -> None:
    held = {"model_type": kind}
    assert of_document(held | extra) == of_document(held)
    for key in other:
        with pytest.raises(hpgo.errors.ProfileError, match=f"`{key}` is "):
            of_document(held | extra | other)


def test_formulas_run_no_code() -> None:
    for text in ("().__class__", "open('x')", "[x for x in (1).__dir__()]", "lambda: 1", "__import__('os')", "f'{x}'"):
        with refused(hpgo.errors.ArgumentError, "invalid_argument"):
            Formula(text)
    for text in ("[0 for i in range(10 ** 8)]", "10 ** 9", "[1] * 9", "1 / 0", "[1][3]"):
        with refused(hpgo.errors.ArgumentError, "invalid_argument"):
            Formula(text).value({}.__getitem__)


@pytest.mark.parametrize("kind", family_names())
def test_formulas_read_keys_of_the_class_or_names_of_the_file(kind) -> None:
    data = family(kind)
    row = CLASSES[data.configuration]
    # Models read `head_dim` even where their class has no such field.
    known = {*row["defaults"], *row["names"], *data.defaults, *data.extra, "head_dim"}
    if data.text:  # a projector reads keys of the tower, too
        tower = data.vision or data.audio
        known |= {*CLASSES[tower]["defaults"], *CLASSES[tower]["names"], *family(tower, "towers").defaults}
        known |= {"text_hidden", "text_tied"}
    assert {name for one in data.formulas() for name in one.names} <= known
    assert set(data.arithmetic) <= {field.name for field in fields(Arithmetic)}
    assert set(data.shape) <= {field.name for field in fields(hpgo.Transformer)}


def test_a_tower_and_its_language_model_are_checked_like_any_configuration() -> None:
    held = {"model_type": "gemma3", "text_config": {"hidden_size": 64, "num_attention_heads": 4}, "vision_config": {}}
    shape = of_document(held)
    assert shape.tower is not None
    assert (shape.hidden, shape.tower.hidden) == (64, 768)
    for part, key in (("text_config", "hiden_size"), ("vision_config", "patch_sise"), (None, "novelty")):
        wrong = held | ({key: 5} if part is None else {part: held[part] | {key: 5}})
        with refused(hpgo.errors.ProfileError, "invalid_profile", key):
            of_document(wrong)


JUNK: list[Any] = [
    None, True, False, -2, 0, 1, 3, 10**6, 10**12, 0.5, -0.5, float("nan"), float("inf"), "", "x", "auto", [], {}, [1],
    [-1, 3], ["full_attention"], {"x": 1}, {"rope_type": "yarn"}, {"factor": 2, "rope_type": "linear"}, [[1]],
]  # fmt: skip


@pytest.mark.parametrize("kind", family_names())
def test_any_value_of_any_key_gives_a_model_or_an_error_that_names_the_file(kind) -> None:
    chance, data = random.Random(kind), family(kind)
    keys = sorted({*CLASSES[data.configuration]["defaults"], *data.keys, "rope_scaling", "rope_parameters"})
    for _ in range(15):
        held = {"model_type": kind} | {chance.choice(keys): chance.choice(JUNK) for _ in range(chance.randint(1, 3))}
        with contextlib.suppress(hpgo.errors.ProfileError):
            of_document(held)


@pytest.mark.parametrize(
    ("framework", "kind", "words"),
    [
        ("torchtitan@0.2", "gpt_oss", "attention sinks"),
        ("deepspeed", "gpt_oss", "attention sinks"),
        ("torchtitan", "qwen3_next", "state-space scans or linear attention"),
        ("megatron", "gemma3", "a tower in front of the decoder"),
        ("megatron", "granite", "attention scale 1"),
        ("torchtitan", "smollm3", "layers without positions"),
    ],
)
def test_frameworks_refuse_what_they_have_no_setting_for(framework, kind, words) -> None:
    model = of_document({"model_type": kind})
    lacking = framework_support(framework)[1].lacking(model)
    assert lacking is not None
    assert words in lacking.why
