"""Transformers by their configuration: parameters as published, and as Hugging Face's own models have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.model.formats.transformers import of_document
from hpgo.model.transformer_presets import TRANSFORMERS, transformer_names

MEASURED = Path(__file__).parents[2] / "shared" / "reference" / "llm" / "measured.jsonl"

# In units of 10^9, as the publishers' model cards and papers give them.
PUBLISHED = {
    "gpt-2": 0.1244, "gpt-2-xl": 1.5576, "gpt-3-175b": 174.6, "gpt-neox-20b": 20.55, "llama-2-7b": 6.738,
    "llama-2-13b": 13.016, "llama-2-70b": 68.977, "llama-3-8b": 8.030, "llama-3-70b": 70.554, "llama-3.1-405b": 405.85,
    "mistral-7b": 7.242, "mixtral-8x7b": 46.70, "mixtral-8x22b": 140.63, "qwen2-7b": 7.616, "qwen2.5-72b": 72.706,
    "qwen3-8b": 8.191, "qwen3-32b": 32.762, "qwen3-30b-a3b": 30.532, "qwen3-235b-a22b": 235.09, "gemma-7b": 8.538,
    "gemma-2-9b": 9.242, "gemma-2-27b": 27.227, "gemma-3-1b": 0.99989, "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.74, "deepseek-v3": 671.03,
}  # fmt: skip

# Each type with something of its own switched on.
SMALL: dict[str, dict[str, object]] = {
    "deepseek_v2": {"n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": {"n_routed_experts": 8, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gpt2": {"n_inner": 96},
    "gpt_neox": {"attention_bias": False},
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 24},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {"num_experts": 6, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 80},
    "qwen3": {"head_dim": 48},
    "qwen3_moe": {"num_experts": 6, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_presets_have_as_many_parameters_as_published(name) -> None:
    assert TRANSFORMERS[name].parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=1e-3)
    assert TRANSFORMERS[name].active_parameters <= TRANSFORMERS[name].parameters


def test_experts_that_a_token_meets_are_those_that_names_tell() -> None:
    active = {name: shape.active_parameters / 1e9 for name, shape in TRANSFORMERS.items() if shape.experts}
    told = {"qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "mixtral-8x7b": 12.9, "deepseek-v2": 21, "deepseek-v3": 37}
    assert {name: active[name] for name in told} == pytest.approx(told, rel=0.05)


@pytest.mark.parametrize("kind", SMALL)
def test_parameters_are_those_of_the_model_that_transformers_builds(kind) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    sizes: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    }
    sizes |= {"intermediate_size": 160, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    named = transformers.AutoConfig.for_model(kind)
    sizes = {key: size for key, size in sizes.items() if key in named.to_dict() or key in named.attribute_map}
    config = transformers.AutoConfig.for_model(kind, **sizes | SMALL[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    held = json.loads(config.to_json_string(use_diff=False))
    shape = of_document(held)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    parts = shape.parameters_by_part()
    if not shape.tied:
        assert parts["head"] == model.get_output_embeddings().weight.numel()
    assert sum(map(shape.layer_parameters, range(4))) == sum(
        weight.numel() for name, weight in model.named_parameters() if ".layers." in name or ".h." in name
    )


def test_models_of_published_measurements_have_the_size_in_their_names() -> None:
    if not MEASURED.is_file():
        pytest.skip(f"{MEASURED} is not here")
    seen = {}
    for line in MEASURED.read_text().splitlines():
        model = json.loads(line)["model"]
        seen[model["name"]] = model
    compared = 0
    for name, one in seen.items():
        size = name.rpartition("-")[2]
        if not name.startswith("gpt-") or not size.endswith("B") or one["experts"] or one["vocab"] is None:
            continue
        fields = {key: one[key] for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
        shape = hpgo.Transformer(**fields, gated=one["gated"], tied=one["tied"], positions=one["seq"])
        assert shape.parameters / 1e9 == pytest.approx(float(size[:-1]), rel=0.06), name
        compared += 1
    assert compared >= 5


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "`hidden_size` must be a whole number from 1"),
        ({"model_type": "deepseek_v2"}, "`num_experts_per_tok` is missing"),
        ({"num_key_value_heads": 3}, "4 heads, which can't be divided evenly among 3"),
        ({"model_type": "mambo"}, "model type `mambo` is unknown"),
        ({"model_type": ...}, "the keys `model_type`"),
        ({"linear_attention_every": 4}, "`linear_attention_every` of a model of type `llama` is unknown"),
        ({"num_hidden_layers": 4_000_000_000}, "num_hidden_layers is 4000000000"),
        ({"num_hidden_layers": "many"}, "`num_hidden_layers` must be a whole number from 1, got `many`"),
    ],
)
def test_configurations_that_say_too_little_or_something_new_are_refused(tmp_path, change, message) -> None:
    held = {key: value for key, value in (LLAMA | change).items() if value is not ...}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(held))
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.Transformer.read(file)
    assert message in caught.value.message
    assert str(file) in caught.value.message
    assert caught.value.hint
    assert "did you mean" not in caught.value.hint or "model_type" in change, "what else is there is right"


def test_a_plan_of_a_bare_shape_says_how_to_get_its_times() -> None:
    with refused(hpgo.errors.ProfileError, "invalid_profile", "llama-3-8b") as caught:
        hpgo.read_profile("llama-3-8b")
    assert "hpgo estimate llama-3-8b" in caught.value.hint
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "4000000000"):
        replace(TRANSFORMERS["llama-3-8b"], layers=4_000_000_000)


def test_what_is_switched_off_or_has_no_size_changes_nothing(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"rope_scaling": {"factor": 8}, "torch_dtype": "bfloat16", "novelty": False}))
    assert hpgo.Transformer.read(tmp_path).parameters == of_document(LLAMA).parameters


def test_a_few_lines_describe_a_model_of_ones_own(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "hpgo_transformer: 1\nlayers: 4\nhidden: 64\nheads: 4\nkv_heads: 2\nhead_dim: 16\nffn: 256\nvocab: 1000\n"
        "experts: 8\nexperts_per_token: 2\nexpert_ffn: 64\ndense_layers: [0]\n"
        "latent: {kv_rank: 32, rope_dim: 8, value_dim: 16}\n"
    )
    shape = hpgo.Transformer.read(file)
    assert (shape.name, shape.expert_layers, shape.latent and shape.latent.q_rank) == ("mine", 3, None)
    needed = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"), 1)
    with refused(hpgo.errors.ProfileError, "unknown_name", name="haeds"):
        of_document({"hpgo_transformer": 1, "haeds": 4} | needed)
    with refused(hpgo.errors.ProfileError, "missing") as caught:
        of_document({"hpgo_transformer": 1, "layers": 4})
    assert "pydoc hpgo.Transformer" in caught.value.hint


def flop(shape: hpgo.Transformer, tokens: int) -> float:
    """Of a pass forward over one sequence, written down without its operations: two for each weight of a matrix and
    token that meet, and four for each pair of a query and a key that it sees, value and head."""
    matrices = shape.active_parameters
    matrices -= (1 if not shape.tied else 0) * shape.vocab * shape.hidden + shape.positions * shape.hidden  # looked up
    matrices -= (shape.layers * shape.norms_per_layer + 1) * shape.norm_parameters
    pairs = tokens * (tokens + 1) / 2
    return 2 * tokens * matrices + shape.layers * shape.heads * 4 * shape.head_dim * pairs


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-13b", "mixtral-8x7b", "gpt-neox-20b"])
def test_estimates_add_up_to_the_arithmetic_of_the_model(name) -> None:
    shape, tokens = TRANSFORMERS[name], 4096
    profile = hpgo.estimate(name, device="h100", dims={"tokens": tokens}, efficiency=1)
    arithmetic_s = flop(shape, tokens) / 989.5e12
    forward_s = sum(layer.forward_s[0] for layer in profile.layers)
    # The rest is norms, activations and sums, which read and write all tokens.
    assert arithmetic_s < forward_s < 1.5 * arithmetic_s
    assert 1.9 < sum(layer.backward_s[0] for layer in profile.layers) / forward_s < 2.1
    assert profile.parameter_bytes == 2 * shape.parameters
    assert all(layer.activation_bytes[0] == 2 * tokens * shape.hidden for layer in profile.layers[:-1])


def test_a_window_and_fewer_tokens_make_attention_shorter() -> None:
    def attention_s(tokens: int, **changes: object) -> float:
        shape = replace(TRANSFORMERS["llama-3-8b"], layers=1, **changes)
        found = hpgo.estimate(shape, device="h100", dims={"tokens": tokens}, by="op", efficiency=1)
        return next(layer.forward_s[0] for layer in found.layers if layer.id == "layers.0.attention.value")

    full, windowed = attention_s(32768), attention_s(32768, window=4096, window_layers=(0,))
    assert windowed < full / 3
    assert attention_s(4096, window=8192, window_layers=(0,)) == attention_s(4096)


def test_a_tied_head_counts_once_and_is_priced_where_it_is_parted() -> None:
    profile = hpgo.estimate("gpt-2", device="a100", dims={"tokens": 1024})
    (tie,) = profile.tied_weights
    assert tie.layers == ("embedding", "head")
    assert tie.parameter_bytes == 2 * 50257 * 768
    assert profile.parameter_bytes == 2 * TRANSFORMERS["gpt-2"].parameters


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gemma-2-9b", "qwen3-30b-a3b", "gpt-3-175b"])
def test_every_kind_of_transformer_makes_a_chain_that_is_planned(name) -> None:
    profile = hpgo.estimate(name, device="h200", dims={"tokens": 2048})
    assert len(profile.edges) == len(profile.layers) - 1
    cluster = hpgo.Cluster.preset("h200:8")
    plan = hpgo.plan(
        profile, cluster, global_batch_size=64, memory=hpgo.MemoryModel.preset("adam-bf16"), time_limit_s=2
    )
    assert len(plan.stages) > 1
    assert any("not measured" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("source", "dims", "message"),
    [
        ("llama-3-8b", {}, "the sequence length of `llama-3-8b` is not given"),
        ("llama-3-8b", {"length": 8}, "`length` is not a dimension of `llama-3-8b`"),
        ("gpt-2", {"tokens": 4096}, "`gpt-2` has positions for 1,024 tokens, but `tokens` is 4,096"),
        ("lama-3-8b", {"tokens": 8}, "`lama-3-8b` is not a known transformer"),
    ],
)
def test_estimates_say_what_they_lack(source, dims, message) -> None:
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        hpgo.estimate(source, device="h100", dims=dims)
    assert message in caught.value.message
    assert caught.value.hint


def test_the_commands_list_and_estimate(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    listed = run(group, ["models", "transformers"]).output.splitlines()
    assert [line.split()[0] for line in listed[: listed.index("")]] == ["transformer", *TRANSFORMERS]
    assert max(map(len, listed)) <= 80
    assert any(line.startswith("Qwen/: ") for line in listed)
    entries = json.loads(run(group, ["models", "transformers", "--json"]).output)
    assert [entry["name"] for entry in entries] == transformer_names()
    assert all(entry["parameters"] == sum(entry["parameters_by_part"].values()) for entry in entries)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    wrote = run(group, ["estimate", "config.json", "--device", "a100", "--dim", "tokens=128", "-o", "tiny.yaml"])
    assert wrote.exit_code == 0, wrote.output
    assert hpgo.read_profile("tiny.yaml").parameter_bytes == 2 * of_document(LLAMA).parameters
