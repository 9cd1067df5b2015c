"""Experts and latent attention in exports to torchtitan 0.3: the shape, the router and the degrees.

Start checks build and train such models with torchtitan on several processes. They are in tests/frameworks.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo import export
from hpgo.cli.llm.options import note_model
from hpgo.errors import ArgumentError
from hpgo.export.targets import find
from hpgo.jobs.parts import parts_of
from hpgo.model.arithmetic import RopeScaling
from hpgo.model.formats.transformers import transformer_of

if TYPE_CHECKING:
    from hpgo.model.blocks import Block

H100 = hpgo.Cluster.preset("h100:8")
QWEN, KIMI = transformer_of("Qwen/Qwen3-30B-A3B"), transformer_of("moonshotai/Kimi-K2-Base")
DEEPSEEK = transformer_of("deepseek-ai/DeepSeek-V2-Lite")
GPT_OSS = transformer_of("openai/gpt-oss-20b")


def plan(model: hpgo.Transformer, **options: Any) -> hpgo.LlmPlan:
    asked = {"global_batch_size": 64, "seq_length": 1024, "framework": "torchtitan", "zero_stage": 3, **options}
    cluster = hpgo.Cluster.preset("h100:128") if model is KIMI else H100
    return hpgo.LlmPlan.of(hpgo.estimate_llm(model, cluster, **asked), model, cluster)


def constants(text: str) -> dict[str, Any]:
    """Return the constants of a module."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # an expression, such as the path of the schedule
    return found


def exported(model: hpgo.Transformer, **options: Any) -> str:
    return next(iter(export.files(plan(model, **options), "torchtitan").values()))


def test_the_shape_has_the_router_and_the_experts() -> None:
    text = exported(KIMI, ep=16, global_batch_size=1024)
    found = constants(text)
    assert found["SHAPE"]["experts"] == {
        "num_experts": 384, "hidden_dim": 2048, "shared": 2048, "top_k": 8, "score_func": "sigmoid",
        "route_norm": True, "route_scale": 2.827, "num_expert_groups": None, "num_limited_groups": None,
    }  # fmt: skip
    assert found["SHAPE"]["dense_layers"] == [0]
    assert found["SHAPE"]["attention"]["q_lora_rank"] == 1536
    assert found["BALANCE"] == 1e-3
    assert "parallelism.expert_parallel_degree = 16\n" in text


def test_a_router_without_biases_gets_none_and_a_lacking_loss_is_noted() -> None:
    text = exported(QWEN, ep=8, tp=2)
    assert constants(text)["BALANCE"] is None
    assert "# torchtitan adds no auxiliary loss of the router, whose coefficient in the model is 0.001" in text
    assert "from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b" in text


def test_latent_attention_gets_its_scale() -> None:
    text = exported(DEEPSEEK, ep=8)
    assert "        layer.attention.mscale = 0.707\n" in text
    assert constants(text)["ROPE"]["rope_factor"] == 40.0
    assert "mscale" not in constants(text)["ROPE"]


def test_a_new_model_is_built_from_its_shape() -> None:
    files = {
        file.name: file.text for file in parts_of(plan(KIMI, ep=16, global_batch_size=1024), find("torchtitan")).files
    }
    text = files["job_config.py"]
    compile(text, "job_config.py", "exec")
    assert "The model is new" in text
    assert "attention=attention(dim, weights)" in text
    assert "make_mla_attention_config(" in text
    grouped = replace(QWEN, layers=12)
    text = {file.name: file.text for file in parts_of(plan(grouped, ep=8), find("torchtitan")).files}["job_config.py"]
    compile(text, "job_config.py", "exec")
    assert "make_gqa_config(" in text
    assert "Qwen3TransformerBlock.Config(" in text


def test_gpt_oss_is_that_of_the_registry_with_attention_that_context_parallelism_divides() -> None:
    text = exported(GPT_OSS, ep=4, cp=2, seq_length=8192)
    found = constants(text)
    assert found["SHAPE"]["windows"] == [128, None] * 12
    assert found["SHAPE"]["attention"] == {"n_heads": 64, "n_kv_heads": 8, "head_dim": 64}
    assert found["SHAPE"]["experts"]["swiglu_limit"] == 7.0
    assert (found["ROPE"]["rope_factor"], found["ROPE"]["truncate"], found["BALANCE"]) == (32.0, False, None)
    assert 'config.model_spec = model_registry("20b", attn_backend="flex")' in text
    assert "from torchtitan.models.gpt_oss.config_registry import gpt_oss_20b" in text


def test_gpt_oss_with_other_windows_is_a_new_model() -> None:
    model = replace(GPT_OSS, pattern=GPT_OSS.pattern[::-1])
    texts = {file.name: file.text for file in parts_of(plan(model, ep=4), find("torchtitan")).files}
    assert constants(texts["planned.py"])["SHAPE"]["windows"] == [None, 128] * 12
    text = texts["job_config.py"]
    compile(text, "job_config.py", "exec")
    assert 'sliding_window_size=SHAPE["windows"][at],' in text
    assert "GptOssGroupedExperts.Config(" in text
    assert "make_ffn_config" not in text


def unbiased(model: hpgo.Transformer) -> tuple[Block, ...]:
    """Return blocks whose attention has no biases."""
    return tuple(replace(one, attention=(replace(one.attention[0], bias="none"),)) for one in model.blocks)


def windowed(model: hpgo.Transformer) -> tuple[Block, ...]:
    """Return blocks of which each has another window."""
    widths = enumerate(model.blocks, start=128)
    return tuple(replace(one, attention=(replace(one.attention[0], window=width),)) for width, one in widths)


def changed(model: hpgo.Transformer, **values: Any) -> hpgo.Transformer:
    """Return the model with another arithmetic."""
    assert model.arithmetic is not None
    return replace(model, arithmetic=replace(model.arithmetic, **values))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (replace(QWEN, shared_ffn=768, shared_gate=True), "a gate of the shared experts"),
        (replace(QWEN, attention_bias="qkv"), "biases"),
        (replace(GPT_OSS, blocks=unbiased(GPT_OSS)), "attention sinks"),
        (replace(GPT_OSS, blocks=windowed(GPT_OSS)), "attention sinks"),
        (replace(GPT_OSS, tied=True), "tied embeddings beside attention sinks"),
        (changed(GPT_OSS, glu_clamp=None), "feed-forward networks without a clamp"),
        (changed(GPT_OSS, glu_offset=0.5), r"an offset \(0.5\) of SwiGLU \(it has 1\)"),
        (changed(GPT_OSS, activation="silu"), "the activation silu"),
        (
            changed(GPT_OSS, rope_scaling=RopeScaling(rope_type="llama3", factor=8.0)),
            "the RoPE scaling llama3 beside attention sinks",
        ),
        (
            changed(GPT_OSS, rope_scaling=RopeScaling(rope_type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0)),
            "YaRN with mscale 1.0 and mscale_all_dim 1.0 beside attention sinks",
        ),
        (replace(DEEPSEEK, expert_groups=4, groups_per_token=2), "groups of experts scored by their best 1"),
    ],
)
def test_what_no_package_has_is_refused_before_the_search(model: hpgo.Transformer, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        hpgo.plan_llm(model, H100, global_batch_size=64, seq_length=1024, framework="torchtitan")


def test_a_search_divides_no_experts_by_tensor_parallelism_alone() -> None:
    found = hpgo.plan_llm(QWEN, H100, global_batch_size=64, seq_length=1024, framework="torchtitan", top=1000)
    assert found.estimates
    for one in found.estimates:
        config = one.parallelism
        assert config.tp == 1 or config.ep > 1
        assert config.cuda_graph_impl == "none"


def test_estimates_note_sinks_unless_a_framework_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    note_model(GPT_OSS, 1024)
    assert "gpt-oss-20b has attention sinks" in capsys.readouterr().err
    note_model(GPT_OSS, 1024, "torchtitan")
    assert not capsys.readouterr().err
