"""Exports of models whose layers differ: attention sinks, gated delta nets, Mamba 2, layers without positions."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo import export, jobs
from hpgo.errors import ArgumentError
from hpgo.llm.frameworks import DEEPSPEED, MEGATRON
from hpgo.llm.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

H100 = hpgo.Cluster.preset("h100:1")
COMMON = {
    "hidden_act": "silu", "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.02, "attention_bias": False,
    "attention_dropout": 0.0,
}  # fmt: skip
GPT_OSS = COMMON | {
    "model_type": "gpt_oss", "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": 128, "attention_bias": True, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
QWEN = COMMON | {
    "model_type": "qwen3_5_text", "intermediate_size": 512, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "partial_rotary_factor": 0.25,
}  # fmt: skip
NEMOTRON = {
    "model_type": "nemotron_h", "mlp_hidden_act": "relu2", "hidden_size": 256, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 8192,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "intermediate_size": 512, "mamba_num_heads": 16,
    "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "conv_kernel": 4, "chunk_size": 64,
    "hybrid_override_pattern": "M-M*-M",
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., hpgo.Transformer]:
    def read(config: dict[str, Any], **changes: Any) -> hpgo.Transformer:
        path = tmp_path / f"{config['model_type']}.json"
        path.write_text(json.dumps(config | changes), encoding="utf-8")
        return hpgo.Transformer.read(path)

    return read


def planned(model: hpgo.Transformer, **given: Any) -> hpgo.LlmPlan:
    options = {"devices": 8, "zero_stage": 1, "global_batch_size": 32, "seq_length": 2048, **given}
    return hpgo.LlmPlan.of(hpgo.estimate_llm(model, H100, framework="megatron", **options), model, H100)


def options_of(plan: hpgo.LlmPlan) -> dict[str, list[str]]:
    """Return the words of each option that is exported."""
    (text,) = export.files(plan, "megatron").values()
    found: dict[str, list[str]] = {}
    for word in shlex.split(text, comments=True):
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_sinks_windows_and_clamped_networks_of_gpt_oss_are_options(read) -> None:
    found = options_of(planned(read(GPT_OSS), ep=2, cp=2))
    wanted = {
        "softmax-type": "learnable", "window-size": "127,0", "window-attn-skip-freq": "[1]*1+[0]*1+[1]*1+[0]*1",
        "activation-func-clamp-value": "7.0", "glu-linear-offset": "1.0", "cp-comm-type": "a2a",
        "position-embedding-type": "yarn", "yarn-beta-fast": "32.0", "mscale-all-dim": "0.0",
    }  # fmt: skip
    assert {name: " ".join(found[name]) for name in wanted} == wanted
    assert {"quick-geglu", "no-yarn-correction-range-round-to-int"} <= set(found)
    assert not {"swiglu", "disable-bias-linear"} & set(found)


def test_attention_sinks_need_key_heads_that_tp_times_cp_divides(read) -> None:
    model = read(GPT_OSS)
    with pytest.raises(ArgumentError, match="4 KV heads are no multiple of 2 × 4"):
        planned(model, tp=2, cp=4)
    found = hpgo.plan_llm(model, H100, framework="megatron", global_batch_size=64, seq_length=8192)
    assert all(4 % (one.parallelism.tp * one.parallelism.cp) == 0 or one.parallelism.cp == 1 for one in found.estimates)


def test_gated_delta_nets_are_an_attention_variant(read) -> None:
    found = options_of(planned(read(QWEN), tp=2))
    wanted = {
        "experimental-attention-variant": "gated_delta_net", "linear-attention-freq": "[1]*3+[0]*1",
        "linear-num-key-heads": "4", "linear-num-value-heads": "8", "linear-conv-kernel-dim": "4",
        "rotary-percent": "0.25",
    }  # fmt: skip
    assert {name: " ".join(found[name]) for name in wanted} == wanted
    assert {"attention-output-gate", "apply-layernorm-1p", "qk-layernorm"} <= set(found)


def test_megatron_bridge_exports_no_patterns_of_mamba_layers(read) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="Megatron-Bridge has no settings for a pattern of scans"):
        hpgo.export.files(planned(read(NEMOTRON), pp=2, tp=2), "megatron-bridge")


def test_patterns_of_mamba_layers_have_letters_and_stages(read) -> None:
    plan = planned(read(NEMOTRON), pp=2, tp=2)
    found = options_of(plan)
    assert found["hybrid-layer-pattern"] == ["M-M|*-M"]
    assert found["spec"] == ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    assert [found[f"mamba-{name}"] for name in ("state-dim", "head-dim", "num-heads", "num-groups")] == [
        ["64"], ["32"], ["16"], ["2"],
    ]  # fmt: skip
    assert not {"pipeline-model-parallel-layout", "num-layers"} & set(found)
    assert "squared-relu" in found
    assert found["position-embedding-type"] == ["none"]
    files = jobs.files(plan)
    assert '"$MEGATRON_LM/pretrain_mamba.py"' in files["rank.sh"]
    assert "mamba-ssm" in files["requirements.txt"]
    assert "NEEDED = ('0.16', '0.17', '0.18', '0.19'), ('0.17', '0.18', '0.19')" in files["check_arguments.py"]


def test_groups_of_scans_must_be_a_multiple_of_tp(read) -> None:
    with pytest.raises(ArgumentError, match="tp is 4, but it must divide the 2 groups of scans"):
        planned(read(NEMOTRON), tp=4)


@pytest.mark.parametrize(
    ("config", "tp", "cp", "runs"),
    [(QWEN, 2, 2, True), (QWEN, 1, 8, False), (NEMOTRON, 1, 4, True), (NEMOTRON, 2, 8, True), (NEMOTRON, 2, 16, False)],
)
def test_context_parallelism_divides_the_heads_of_scans(read, config: dict[str, Any], tp: int, cp: int, runs) -> None:
    asked = ParallelismConfig(tp=tp, cp=cp, sequence_parallel=tp > 1)
    assert (MEGATRON.broken_degrees(asked, model=read(config)) is None) == runs


def test_layers_without_positions_are_an_option(read) -> None:
    smollm = COMMON | {"model_type": "smollm3", "intermediate_size": 512, "no_rope_layers": [1, 1, 1, 0]}
    assert options_of(planned(read(smollm)))["no-rope-freq"] == ["[0]*3+[1]*1"]


@pytest.mark.parametrize(
    ("config", "releases"),
    [(GPT_OSS, "0.19"), (NEMOTRON, "0.17, 0.18 and 0.19"), (QWEN, "")],
    ids=["yarn", "pattern", "all"],
)
def test_comments_name_the_releases_that_train_a_model(read, config: dict[str, Any], releases: str) -> None:
    (text,) = export.files(planned(read(config)), "megatron").values()
    assert (f"only {releases} can train this model" in text) if releases else ("can train this model" not in text)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (COMMON | {"model_type": "olmoe", "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
                   "norm_topk_prob": False, "router_aux_loss_coef": 0.01, "clip_qkv": None},
         "norms over the queries and keys of all heads"),
        (NEMOTRON | {"layer_norm_epsilon": 1e-6}, "an epsilon 1e-06 of the norms of scans"),
        (NEMOTRON | {"use_bias": True}, "biases of the matrices around scans"),
        (NEMOTRON | {"conv_kernel": 3}, "scans with other matrices, convolutions or norms"),
    ],
)  # fmt: skip
def test_what_has_no_option_is_refused_by_name(read, config: dict[str, Any], words: str) -> None:
    # The configuration class of OLMoE has no `head_dim`.
    own = {key: value for key, value in config.items() if config["model_type"] != "olmoe" or key != "head_dim"}
    lack = MEGATRON.lacking(read(own))
    assert lack is not None
    assert words in lack.why


def test_the_reduced_model_keeps_the_pattern_of_its_layers(read) -> None:
    plan = planned(read(NEMOTRON, hybrid_override_pattern="M-M*-M-M-"), pp=1)
    small = jobs.files(plan)["small/arguments.txt"]
    assert "--hybrid-layer-pattern M-**" in small or "--hybrid-layer-pattern 'M-**'" in small


def test_windows_never_use_p2p_with_context_parallelism(read) -> None:
    config = {key: value for key, value in COMMON.items() if key != "attention_bias"}
    model = read(config | {"model_type": "mistral", "intermediate_size": 512, "sliding_window": 4096})
    assert options_of(planned(model, cp=4, seq_length=8192))["cp-comm-type"] == ["all_gather"]
    mixed = replace(model, window_layers=(0, 1))
    assert options_of(planned(mixed, cp=4))["cp-comm-type"] == ["all_gather", "all_gather", "p2p", "p2p"]


def test_fused_attention_of_transformers_has_no_sinks(read) -> None:
    lack = DEEPSPEED.lacking(read(GPT_OSS))
    assert lack is not None
    assert "without attention sinks" in lack.why
    assert "--framework megatron" in lack.hint
