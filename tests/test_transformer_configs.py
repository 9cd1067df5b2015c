"""Hugging Face configurations with keys left out, and the values in them that change what a model computes.

The oracle is `transformers` itself: its configuration classes, and the modules that it builds.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.model.formats.transformers import of_document, transformer_of
from hpgo.model.transformer_presets import TRANSFORMERS

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

CLASSES = json.loads((Path(hpgo.__file__).parent / "model/formats/class_defaults.json").read_text())["types"]
KINDS = (
    "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mixtral",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip


def built(transformers: Any, held: dict[str, Any], device: str = "meta") -> Any:
    """Build the model of a configuration as `AutoModelForCausalLM` does."""
    import torch

    given = {key: value for key, value in held.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(held["model_type"], **given)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


def count(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


# Sizes that are no defaults. All divide, whichever of them are left out.
SIZES: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 32,
    "intermediate_size": 640, "vocab_size": 1000, "head_dim": 96, "tie_word_embeddings": True, "attention_bias": True,
    "mlp_bias": True, "sliding_window": 128, "max_position_embeddings": 512, "moe_intermediate_size": 96,
    "num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8, "decoder_sparse_step": 2,
    "mlp_only_layers": [0], "shared_expert_intermediate_size": 80, "qkv_bias": False, "n_routed_experts": 16,
    "n_shared_experts": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
    "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 40, "use_sliding_window": True,
    "max_window_layers": 1, "n_embd": 2048, "n_layer": 3, "n_head": 64, "n_inner": 320, "n_positions": 256,
}  # fmt: skip
# Latent attention with biases is refused, and its `head_dim` follows from other keys.
NOT_OF = {"deepseek_v2": {"attention_bias", "mlp_bias", "head_dim"}, "deepseek_v3": {"attention_bias", "head_dim"}}


def sizes_of(transformers: Any, kind: str) -> dict[str, Any]:
    """Return the sizes that a type has a key for."""
    config = transformers.CONFIG_MAPPING[kind]()
    own = {config.attribute_map.get(key, key) for key in config.to_dict()} - NOT_OF.get(kind, set())
    return {"model_type": kind} | {key: size for key, size in SIZES.items() if key in own}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_with_keys_left_out_is_the_model_that_transformers_builds(transformers, kind) -> None:
    every, chance = sizes_of(transformers, kind), random.Random(kind)
    other_names = {own: name for name, own in transformers.CONFIG_MAPPING[kind].attribute_map.items()}
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    needed = {"model_type", layers} | ({"num_experts_per_tok"} if kind == "deepseek_v2" else set())
    counted = 0
    for _ in range(8):
        share = chance.random()
        kept = [key for key in every if key in needed or chance.random() < share]
        held = {other_names.get(key, key) if chance.random() < 0.3 else key: every[key] for key in kept}
        model = built(transformers, held)
        heads = model.config.num_attention_heads
        # transformers builds heads that don't part among those with keys, and fails when it computes with them.
        if heads % getattr(model.config, "num_key_value_heads", heads) and "deepseek" not in kind:
            with refused(hpgo.errors.ProfileError, "invalid_profile", "transformer", "32", "num_attention_heads"):
                of_document(held)
            continue
        assert of_document(held).parameters == count(model), held
        counted += 1
    assert counted


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "deepseek_v2"])
def test_a_model_type_alone_is_the_model_that_its_class_describes(transformers, kind) -> None:
    assert of_document({"model_type": kind}).parameters == count(built(transformers, {"model_type": kind}))


@pytest.mark.parametrize(
    ("held", "parameters", "windows"),
    [
        (
            {
                "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
                "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            11_766_034_176,
            40,
        ),
        (
            {
                "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                "num_key_value_heads": 8, "tie_word_embeddings": True,
            },
            4_022_468_096,
            0,
        ),
        ({"model_type": "mistral", "num_hidden_layers": 32}, 7_241_732_096, 32),
        ({"model_type": "deepseek_v3"}, 671_026_404_352, 0),
    ],
)  # fmt: skip
def test_shortened_configs_of_public_models_have_the_published_size_and_window(held, parameters, windows) -> None:
    shape = of_document(held)
    assert (shape.parameters, len(shape.window_layers)) == (parameters, windows)


def test_configs_of_public_models_count_to_the_last_parameter(reference) -> None:
    counts = json.loads((reference / "configs" / "parameters.json").read_text())
    compared = 0
    for name, parameters in counts.items():
        file = reference / "configs" / f"{name}.json"
        if json.loads(file.read_text())["model_type"] in KINDS:
            assert hpgo.Transformer.read(file).parameters == parameters, name
            compared += 1
    assert compared >= 10


def test_a_file_config_json_is_named_by_its_type(tmp_path: Path) -> None:
    text = json.dumps({"model_type": "qwen3", "num_hidden_layers": 2})
    for name, known in (("config.json", "qwen3"), ("mine.json", "mine")):
        (tmp_path / name).write_text(text)
        assert hpgo.Transformer.read(tmp_path / name).name == known
    assert hpgo.Transformer.read(tmp_path).name == "qwen3"


def test_the_table_of_defaults_is_that_of_the_pinned_transformers(transformers) -> None:
    import class_defaults

    assert set(class_defaults.TYPES) >= set(KINDS)
    held = json.loads(class_defaults.TABLE.read_text(encoding="utf-8"))
    if transformers.__version__ != held["transformers"]:
        pytest.skip(f"the table is from transformers {held['transformers']}, and {transformers.__version__} is here")
    assert class_defaults.table() == held


def test_the_table_of_defaults_agrees_with_the_recorded_one(reference) -> None:
    recorded = json.loads((reference / "transformers" / "class_defaults.json").read_text())
    # Made by the class after the defaults, from other keys.
    made = {"layer_types", "qk_head_dim", "head_dim", "num_key_value_heads", "sliding_window", "mlp_only_layers"}
    for kind in KINDS:
        stated = recorded[kind]["defaults"]
        mine = CLASSES[kind]["defaults"]
        for key in stated.keys() & mine.keys():
            assert mine[key] == stated[key] or (key in made and mine[key] is None) or key == "sliding_window", key
        assert stated.keys() - mine.keys() <= made, kind
        assert CLASSES[kind]["names"] == recorded[kind]["names"]


# --- which layers have a window ---


@pytest.mark.parametrize(
    "kind", ["mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"]
)
@pytest.mark.parametrize("in_use", [True, False])
@pytest.mark.parametrize("first", [0, 2, 28])
def test_layers_with_a_window_are_those_of_transformers(transformers, kind, in_use, first) -> None:
    held = {
        "model_type": kind, "num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 50, "sliding_window": 16,
        "moe_intermediate_size": 8, "use_sliding_window": in_use, "max_window_layers": first,
    }  # fmt: skip
    own = set(transformers.CONFIG_MAPPING[kind]().to_dict()) | {"model_type"}
    held = {key: value for key, value in held.items() if key in own}
    model = built(transformers, held)
    with_window = tuple(at for at, layer in enumerate(model.model.layers) if window_of(layer, model.config, at))
    shape = of_document(held)
    assert shape.window_layers == with_window
    assert not with_window or shape.window == model.config.sliding_window


def window_of(layer: Any, config: Any, at: int) -> int | None:
    """Return the window of a layer: its attention's own, or the one that all layers have."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[at] != "sliding_attention":
        return None
    return config.sliding_window


# --- what changes results, not costs ---

TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "intermediate_size": 96, "vocab_size": 60, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    "num_local_experts": 8, "n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "max_position_embeddings": 64,
    "shared_expert_intermediate_size": 16, "num_experts": 8, "n_shared_experts": 1, "num_shared_experts": 1,
    "pad_token_id": 0,
}  # fmt: skip
SWITCHED: dict[str, list[dict[str, Any]]] = {
    "deepseek_v2": [{}, {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}],
    "deepseek_v3": [{}, {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "rope_interleave": False}],
    "gemma": [{}, {"hidden_act": "gelu"}],
    "gemma2": [{}, {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None, "final_logit_softcapping": None}],
    "gemma3_text": [{}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5000.0}],
    "gpt2": [{}, {"scale_attn_weights": False, "resid_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True}],
    "gpt_neox": [
        {},
        {"rotary_pct": 0.5, "use_parallel_residual": False, "rotary_emb_base": 500, "hidden_dropout": 0.1},
    ],
    "llama": [{}, {"rms_norm_eps": 1e-4, "rope_theta": 5e5, "hidden_act": "relu", "attention_dropout": 0.1}],
    "mistral": [{}, {"rope_theta": 1e6}],
    "mixtral": [{}, {"router_jitter_noise": 0.1, "rope_theta": 1e4}],
    "qwen2": [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}],
    "qwen2_moe": [{}, {"norm_topk_prob": True}],
    "qwen3": [{}, {"rms_norm_eps": 1e-5}],
    "qwen3_moe": [{}, {"norm_topk_prob": True}],
} | {
    kind: [{}]
    for kind in (
        "arcee", "deepseek_v32", "dots1", "ernie4_5", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "glm4_moe",
        "glm4_moe_lite", "glm_moe_dsa", "granite", "granitemoe", "jais2", "nemotron", "olmo2", "olmoe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    )
}  # fmt: skip
CASES = [(kind, change) for kind, changes in SWITCHED.items() for change in changes]


def tiny(transformers: Any, kind: str, change: dict[str, Any]) -> dict[str, Any]:
    config = transformers.CONFIG_MAPPING[kind]()
    own = {config.attribute_map.get(key, key) for key in config.to_dict()} - NOT_OF.get(kind, set())
    return {"model_type": kind} | {key: size for key, size in TINY.items() if key in own} | change


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_values_that_change_results_are_those_of_modules_of_transformers(transformers, kind, change) -> None:
    import torch

    held = tiny(transformers, kind, change)
    shape = of_document(held)
    said = shape.arithmetic
    assert said is not None
    model = built(transformers, held, "cpu").eval()
    modules, config = list(model.modules()), model.config
    # Activation: by what it gives.
    at = torch.linspace(-3, 3, 50)
    functions = [module for module in modules if hasattr(module, "act_fn") or hasattr(module, "act")]
    acts = [getattr(module, "act_fn", None) or module.act for module in functions]
    assert acts
    for act in acts:
        assert torch.equal(act(at), transformers.activations.ACT2FN[said.activation](at))
    # Norms of whole tokens: their epsilon, and what a weight of 0 gives.
    norms = [
        module for module in modules
        if "Norm" in type(module).__name__ and module.weight.numel() == shape.hidden
    ]  # fmt: skip
    assert norms
    for norm in norms:
        epsilon = next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))
        assert epsilon == said.norm_epsilon
        with torch.no_grad():
            norm.weight.zero_()
            assert bool(norm(torch.randn(1, 2, shape.hidden)).abs().sum() > 0) is said.norm_adds_one
    # Embeddings.
    table = model.get_input_embeddings()
    words = torch.tensor([[1, 2]])
    assert torch.allclose(table(words), table.weight[words] * said.embedding_scale, rtol=1e-6)
    # Scores.
    usual = shape.head_dim**-0.5
    if kind == "gpt2":
        assert (said.attention_scale == 1.0) is not config.scale_attn_weights
        assert said.attention_scale_by_layer is config.scale_attn_by_inverse_layer_idx
    else:
        scales = {module.scaling for module in modules if hasattr(module, "scaling")}
        assert list(scales) == [pytest.approx(said.attention_scale or usual)]
    assert said.attention_logit_softcap == getattr(config, "attn_logit_softcapping", None)
    assert said.final_logit_softcap == getattr(config, "final_logit_softcapping", None)
    # Dropout and residual.
    dropouts = [getattr(module, "attention_dropout", None) for module in modules]
    dropouts += [module.attn_dropout.p for module in modules if hasattr(module, "attn_dropout")]
    assert {p for p in dropouts if p is not None} <= {said.attention_dropout}
    of_hidden = ("resid_dropout", "mlp.dropout", "post_attention_dropout", "post_mlp_dropout")
    hidden = [module.p for name, module in model.named_modules() if name.endswith(of_hidden)]
    assert set(hidden) <= {said.hidden_dropout}
    embedding = [module.p for name, module in model.named_modules() if name.endswith((".drop", "emb_dropout"))]
    assert set(embedding) <= {said.embedding_dropout}
    parallel = {module.use_parallel_residual for module in modules if hasattr(module, "use_parallel_residual")}
    assert said.parallel_residual is (parallel == {True})
    assert said.init_std == config.initializer_range


@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind, change in CASES if kind != "gpt2"])
def test_rotary_frequencies_follow_from_what_is_recorded(transformers, kind, change) -> None:
    held = tiny(transformers, kind, change)
    shape = of_document(held)
    said = shape.arithmetic
    assert said is not None
    assert said.rope_theta is not None
    model = built(transformers, held, "cpu")
    turned = shape.latent.rope_dim if shape.latent else int(shape.head_dim * said.rotary_fraction)
    rotary = next(module for module in model.modules() if "Rotary" in type(module).__name__)
    factor = said.rope_scaling.factor if said.rope_scaling else 1.0
    usual = [said.rope_theta ** (-2 * at / turned) / factor for at in range(turned // 2)]
    if said.rope_local_theta is None:
        assert rotary.inv_freq.tolist() == pytest.approx(usual)
    else:
        local = [said.rope_local_theta ** (-2 * at / turned) for at in range(turned // 2)]
        assert rotary.full_attention_inv_freq.tolist() == pytest.approx(usual)
        assert rotary.sliding_attention_inv_freq.tolist() == pytest.approx(local)


@pytest.mark.parametrize(
    ("kind", "change"), [case for case in CASES if case[0].endswith(("moe", "v2", "v3", "mixtral", "dsa", "olmoe"))]
)
def test_routers_choose_and_weigh_experts_as_recorded(transformers, kind, change) -> None:
    import torch

    held = tiny(transformers, kind, change)
    shape = of_document(held)
    said = shape.arithmetic
    assert said is not None
    torch.manual_seed(5)
    model = built(transformers, held, "cpu").eval()
    router = next(module for module in model.modules() if "Router" in type(module).__name__)
    with torch.no_grad():
        router.weight.normal_()
        bias = torch.randn(shape.experts) if said.router_bias else torch.zeros(shape.experts)
        if said.router_bias:
            router.e_score_correction_bias.copy_(bias)
        else:
            assert not hasattr(router, "e_score_correction_bias")
        tokens = torch.randn(20, shape.hidden)
        _, weights, chosen = router(tokens)
        logits = tokens @ router.weight.T
    scores = logits.sigmoid() if said.router_score == "sigmoid" else logits.softmax(-1)
    ranked = (scores + bias).view(20, shape.expert_groups, -1)
    best = ranked.topk(said.router_group_top, -1).values.sum(-1).topk(shape.groups_per_token, -1).indices
    allowed = torch.zeros(20, shape.expert_groups, dtype=torch.bool).scatter_(1, best, value=True)
    ranked = ranked.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view(20, -1)
    picked = ranked.topk(shape.experts_per_token, -1).indices
    wanted = scores.gather(1, picked)
    wanted = (wanted / wanted.sum(-1, keepdim=True) if said.router_normalizes else wanted) * said.router_scale
    mine, theirs = (torch.zeros_like(scores).scatter_(1, at, of) for at, of in ((picked, wanted), (chosen, weights)))
    assert torch.allclose(mine, theirs, atol=1e-5)
    config = model.config
    assert said.router_aux_loss == getattr(config, "router_aux_loss_coef", 0.0)
    assert said.router_jitter == getattr(config, "router_jitter_noise", 0.0)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("qwen2", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ("deepseek_v3", {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}),
        ("mistral", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}),
    ],
)
def test_rope_scaling_is_kept_whole(transformers, kind, keys) -> None:
    held = tiny(transformers, kind, {}) | {"rope_scaling": dict(keys)}
    scaling = of_document(held).arithmetic.rope_scaling
    theirs = transformers.AutoConfig.for_model(**held).rope_parameters
    for key, value in theirs.items():
        if key in {"type", "rope_theta"}:
            continue
        mine = getattr(scaling, key)
        assert (list(mine) if isinstance(mine, tuple) else mine) == value, key


def test_presets_state_what_changes_results_where_it_was_published() -> None:
    from hpgo.model.transformer_presets import TRANSFORMERS

    assert [name for name, shape in TRANSFORMERS.items() if shape.arithmetic is None] == ["gpt-3-175b"]
    assert TRANSFORMERS["llama-3-8b"].arithmetic.rope_theta == 500_000
    assert all((shape.positions == 0) == (shape.arithmetic.rope_theta is not None)
               for shape in TRANSFORMERS.values() if shape.arithmetic)  # fmt: skip


def test_hpgos_own_yaml_takes_the_arithmetic_as_a_mapping(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    shape = "hpgo_transformer: 1\nlayers: 2\nhidden: 64\nheads: 4\nkv_heads: 2\nhead_dim: 16\nffn: 256\nvocab: 1000\n"
    file.write_text(
        shape + "arithmetic:\n  activation: silu\n  norm_epsilon: 1e-5\n  rope_theta: 5e5\n"
        "  rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4}\n"
    )
    said = hpgo.Transformer.read(file).arithmetic
    assert (said.rope_theta, said.rope_scaling.factor, said.router_score) == (5e5, 8, "softmax")
    file.write_text(shape)
    assert hpgo.Transformer.read(file).arithmetic is None
    for line, wrong in (
        ("{activation: silu}", "`norm_epsilon` is missing"),
        ("{activation: silu, norm_epsilon: -1}", "norm_epsilon is -1"),
        ("{activation: silu, norm_epsilon: 1e-5, theta: 3}", "`theta` is unknown"),
    ):
        file.write_text(f"{shape}arithmetic: {line}\n")
        with pytest.raises(hpgo.errors.ProfileError, match=wrong):
            hpgo.Transformer.read(file)


# --- keys ---

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 1000}  # fmt: skip


def test_keys_that_cannot_change_the_arithmetic_are_read_over() -> None:
    harmless = {
        "is_llama_config": True, "unsloth_version": "2025.1", "output_past": True, "max_length": 50, "top_k": 3,
        "temperature": 0.7, "num_beams": 4, "do_sample": True, "image_token_id": 7, "eos_token_ids": [1],
        "tokenizer_class": "LlamaTokenizer", "pretraining_tp": 2, "use_cache": True, "no_such_thing": False,
        "layer_types": ["full_attention"] * 2,
        "gradient_checkpointing": True, "task_specific_params": {"text-generation": {"do_sample": True}},
    }  # fmt: skip
    assert of_document(LLAMA | harmless) == of_document(LLAMA)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**6), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "x"]), st.integers(-1, 9)),
)  # fmt: skip
KEYS = sorted({key for kind in CLASSES.values() for key in kind["defaults"]} | {"rope_scaling", "rope_parameters"})


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=3))
def test_any_value_of_any_key_gives_a_model_or_an_error_that_names_the_file(kind, change) -> None:
    with contextlib.suppress(hpgo.errors.ProfileError):
        of_document({"model_type": kind, "num_experts_per_tok": 2} | change)


def test_all_keys_that_may_change_the_arithmetic_are_refused_at_once() -> None:
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        of_document(LLAMA | {"top_k": 5, "residual_multiplier": 0.2, "linear_attention_every": 4, "num_experts": 8})
    for key in ("residual_multiplier", "linear_attention_every", "num_experts"):
        assert f"`{key}`" in caught.value.message
    assert "top_k" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True, "model_type": "gemma"}, "`use_bidirectional_attention`"),
        ({"model_type": "gemma", "attention_bias": None}, "`attention_bias` must not be null"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "`spiral` is unknown"),
        ({"rope_scaling": {"rope_type": "linear"}}, "`factor` is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "twist": 1}}, "`twist` is unknown"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is not 1"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 entries, but there are 2 layers"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, "`chunked_attention`"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "`scoring_func` is `softmax`"),
        ({"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}, "have different values"),
        ({"model_type": "qwen3", "num_attention_heads": 8}, "num_key_value_heads 32"),
    ],
)
def test_what_would_be_another_model_is_refused_with_the_key(change, message) -> None:
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        of_document(LLAMA | change)
    assert message in caught.value.message
    assert caught.value.hint


# --- a configuration is read as it is written, or refused ---

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def refusal_of(held: dict[str, Any]) -> hpgo.errors.HpgoError:
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        of_document(held)
    return caught.value


@pytest.mark.parametrize("key", [key for key in SMALL if key != "model_type"])
def test_a_misspelt_key_is_named_with_the_one_that_is_meant_and_never_read_as_left_out(key) -> None:
    wrong = key[:2] + key[3:]
    error = refusal_of({wrong if name == key else name: value for name, value in SMALL.items()})
    assert f"`{wrong}` of a model of type `llama` is unknown" in error.message
    assert error.hint == f"rename `{wrong}` to `{key}`"


def test_all_keys_that_are_not_known_are_named_at_once_with_those_that_are_misspelt() -> None:
    held = {"logit_scale" if key == "vocab_size" else key.replace("hidden_size", "hiden_size"): value
            for key, value in SMALL.items()}  # fmt: skip
    error = refusal_of(held)
    assert "`hiden_size` and `logit_scale`" in error.message
    assert error.hint == "rename `hiden_size` to `hidden_size`"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"hidden_act": "sliu"}, "did you mean `silu`?"),
        (
            {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "layer_types": ["sliding_atention"] * 3},
            "did you mean `sliding_attention`?",
        ),
        ({"model_type": "lama"}, "did you mean `llama`?"),
        ({"rope_scaling": {"rope_type": "lineer", "factor": 2.0}}, "did you mean `linear`?"),
        ({"num_key_value_heads": 3}, "set `num_key_value_heads` to 2"),
        ({"intermediate_size": 0}, "set `intermediate_size`, such as 256"),
        ({"head_dim": 7}, "set `head_dim` to an even number, such as 8"),
        ({"num_attention_heads": 6}, "set the width to 66, or the heads to a number that divides it"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            'write `"architectures": ["LlamaForCausalLM"]` into the file to read it as a causal language model',
        ),
        ({"rope_scaling": {"rope_theta": None}}, ""),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "keep one of them",
        ),
    ],
)
def test_values_that_make_another_model_are_refused_with_the_files_own_keys(changes, hint) -> None:
    of_document(SMALL)
    assert refusal_of(SMALL | changes).hint == hint


@pytest.mark.parametrize("kind", ["llama5", "qwen9", "deepseek_v9", "gpt9"])
def test_a_newer_model_type_is_not_taken_for_a_misspelled_one(kind) -> None:
    hint = refusal_of(SMALL | {"model_type": kind}).hint
    assert "did you mean" not in hint
    assert "describe the model with `hpgo_transformer: 1`" in hint


@pytest.mark.parametrize("name", ["llama4", "grok"])
def test_an_unknown_name_leads_to_the_models_own_configuration(name) -> None:
    with pytest.raises(hpgo.errors.ProfileError) as found:
        transformer_of(name)
    assert "config.json" in found.value.hint
    assert "did you mean" not in found.value.hint


def test_dense_layers_among_those_with_experts_are_refused_where_transformers_has_none() -> None:
    held = {"model_type": "deepseek_v3", "moe_layer_freq": 1}
    assert of_document(held).dense_layers == (0, 1, 2)
    assert "`moe_layer_freq` is 2" in refusal_of(held | {"moe_layer_freq": 2}).message


def test_rope_by_kinds_of_layers_is_read_where_transformers_reads_it(transformers) -> None:
    flat = {"rope_type": "default", "rope_theta": 2e4}
    held = {"model_type": "gemma3_text", "rope_parameters": {"full_attention": flat}}
    assert of_document(held).arithmetic.rope_theta == 2e4
    assert transformers.Gemma3TextConfig(rope_parameters={"full_attention": dict(flat)}).rope_parameters[
        "full_attention"]["rope_theta"] == 2e4  # fmt: skip
    assert "has no kinds of layers" in refusal_of(held | {"rope_parameters": flat}).message
    older = {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert refusal_of(older).hint == "rename it `rope_type`"
    assert transformers.Gemma3TextConfig(rope_scaling={"type": "linear", "factor": 8.0}).rope_parameters[
        "full_attention"]["rope_type"] == "default"  # fmt: skip


def test_the_activation_functions_are_those_of_transformers(transformers) -> None:
    from transformers.activations import ACT2FN

    from hpgo.model.arithmetic import ACTIVATIONS

    # These two have parameters, which no shape here counts.
    assert set(ACT2FN) - {"prelu", "xielu"} <= set(ACTIVATIONS) <= set(ACT2FN)


def test_a_model_with_a_language_model_within_leads_to_that() -> None:
    error = refusal_of({"model_type": "gemma_of_images", "text_config": {"model_type": "gemma3_text"}})
    assert "`text_config`" in error.hint


def test_the_configuration_of_an_adapter_leads_to_its_model() -> None:
    error = refusal_of({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 16})
    assert "of an adapter" in error.message
    assert error.hint == "give the model that it adapts, such as `meta-llama/Llama-3.1-8B`, with --lora-rank"


def test_a_size_with_a_decimal_point_is_shown_as_it_is_written() -> None:
    message = refusal_of(SMALL | {"hidden_size": 64.0}).message
    assert message.endswith("`hidden_size` must be a whole number from 1, got `64.0`")


def test_the_first_name_of_longrope_is_read() -> None:
    held = SMALL | {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}
    longrope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    assert of_document(held) == of_document(held | {"rope_scaling": longrope})


def test_scales_of_rotary_positions_are_named_as_what_no_framework_states() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 64}
    plain = of_document(SMALL | {"model_type": "phimoe", "rope_scaling": scaling})
    scales = {"short_mscale": 1.24, "long_mscale": 1.24}
    scaled = of_document(SMALL | {"model_type": "phimoe", "rope_scaling": scaling | scales})
    assert scaled.parameters == plain.parameters
    assert scaled.arithmetic is not None
    assert plain.arithmetic is not None
    assert {*scaled.arithmetic.other} - {*plain.arithmetic.other} == {
        "rotary positions that also scale queries and keys"
    }


def test_an_unknown_key_may_be_removed() -> None:
    hint = refusal_of(SMALL | {"tuned_by": "me"}).hint
    assert hint.startswith("remove it if the model computes the same without, or ")


@pytest.mark.parametrize(
    "name", ["google/gemma-4-31B-it", "deepseek-ai/DeepSeek-V3.2", "microsoft/Phi-4-mini-instruct"]
)
def test_a_hub_name_of_another_size_or_version_is_not_taken_for_a_misspelled_one(name: str) -> None:
    with pytest.raises(hpgo.errors.ProfileError) as found:
        transformer_of(name)
    assert found.value.hint.startswith("give its config.json; ")
    with pytest.raises(hpgo.errors.ProfileError) as found:
        transformer_of("meta-llama/Llama-3.1-8B-Instuct")
    assert found.value.hint == "did you mean `meta-llama/Llama-3.1-8B-Instruct`?"


# --- transformers by name ---


@pytest.mark.parametrize(
    ("name", "file", "other"),
    [
        ("deepseek-v2-lite", "deepseek-v2-lite", {"longest", "rope_scaling"}),
        ("deepseek-v3", "deepseek-v3", {"further_tokens", "rope_scaling"}),
        ("gpt-2-xl", "gpt2-xl", set()),
        ("mistral-7b", "mistral-7b-v0.1", set()),
        # A file of the first weights, before the publisher's own: with fewer tokens and another base.
        ("mixtral-8x22b", "mixtral-8x22b", {"vocab", "rope_theta"}),
        ("qwen3-30b-a3b", "qwen3-30b-a3b", set()),
        ("bigscience/bloom-7b1", "bloom-7b1", set()),
        ("EleutherAI/pythia-6.9b", "pythia-6.9b", set()),
        ("google/gemma-2-2b", "gemma-2-2b", set()),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b", {"rope_scaling"}),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b", {"rope_theta"}),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2-as-deepseek_v3", {"rope_theta", "rope_scaling"}),
        ("tiiuae/falcon-7b", "falcon-7b", set()),
    ],
)
def test_a_transformer_by_name_is_that_of_its_published_configuration(reference, name, file, other) -> None:
    known, read = transformer_of(name), hpgo.Transformer.read(reference / "configs" / f"{file}.json")
    values = [
        {field.name: getattr(each, field.name) for each in (one, one.arithmetic) for field in fields(each)}
        for one in (known, read)
    ]
    differ = {key for key in values[0] if values[0][key] != values[1][key]} - {"name", "arithmetic"}
    # The recorded files leave out the scaling of positions and what goes with it.
    assert differ == other


def test_positions_that_are_scaled_reach_the_longest_sequence() -> None:
    for shape in TRANSFORMERS.values():
        if shape.arithmetic is not None and (scaling := shape.arithmetic.rope_scaling) is not None:
            assert scaling.factor is not None
            assert scaling.original_max_position_embeddings is not None
            if scaling.rope_type == "yarn":
                assert shape.longest == scaling.factor * scaling.original_max_position_embeddings, shape.name


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX*"},
            "`hybrid_override_pattern` has `X`, which is none of M, *, - or E",
        ),
        ({"model_type": "qwen3_next", "layer_types": []}, "`layer_types` has too few entries"),
        # An empty list is no default.
        ({"model_type": "nemotron_h", "hybrid_override_pattern": ""}, "the number of layers is 0"),
        ({"model_type": "nemotron_h", "layers_block_type": []}, "the number of layers is 0"),
        ({"model_type": "gpt_neo", "attention_types": []}, "`attention_types` describes 0 layers, but there are 24"),
    ],
)
def test_values_that_a_formula_can_not_use_are_named_without_the_formula(held, says) -> None:
    assert refusal_of(held).message == f"text: {says}"


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"image_size": [224]}, "`image_size` must be a whole number from 1, or a list of height and width"),
        ({"patch_size": [16, 0]}, "`patch_size` must be a whole number from 1, or a list of height and width"),
        ({"image_size": True}, "`image_size` must be a whole number from 1, or a list of height and width, got true"),
        ({"image_size": None}, "`image_size` is missing"),
    ],
)
def test_sides_of_images_are_one_number_or_height_and_width(held, says) -> None:
    assert says in refusal_of({"model_type": "vit"} | held).message
    wide = of_document({"model_type": "vit", "image_size": [224, 448], "patch_size": [16, 32]})
    assert wide.longest == of_document({"model_type": "vit"}).longest == 197


def test_a_null_share_of_rotated_dimensions_is_all_of_them_where_the_class_rotates_all() -> None:
    whole = of_document({"model_type": "llama", "partial_rotary_factor": None})
    assert whole == of_document({"model_type": "llama"})
    assert "must be a number" in refusal_of({"model_type": "gpt_neox", "rotary_pct": None}).message
    assert "`bias` must be true or false" in refusal_of({"model_type": "falcon", "bias": None}).message


PYTHON = ("NoneType", "unsupported", "not supported", "object", "indices", "argument", "iterable", "<class", "operand")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-4b-it", "jamba", "qwen3-next-80b-a3b", "vit"])
def test_nulls_lists_and_mappings_are_read_or_refused_in_words_of_the_file(reference, name) -> None:
    """Each key of a public configuration, and of its parts, as something that it is not."""
    file = reference / "configs" / f"{name}.json"
    held = json.loads(file.read_text()) if file.exists() else {"model_type": name, "image_size": 32, "patch_size": 8}
    # An unknown type of the whole model would make transformers be imported.
    places = [(held, key) for key in held if key != "model_type"] + [
        (part, key) for part in held.values() if isinstance(part, dict) for key in part
    ]
    for part, key in places:
        kept = part[key]
        for value in (None, [kept, kept], [], {"a": 1}, "x"):
            part[key] = value
            try:
                of_document(held)
            except hpgo.errors.ProfileError as error:
                said = f"{error.message} {error.hint}"
                assert not [word for word in PYTHON if word in said.replace(str(kept), "")], (key, value, said)
        part[key] = kept
