"""Models that torchtitan 0.3 trains by its backend for models of transformers: search, export and job folder."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo.errors import ArgumentError
from hpgo.export import files
from hpgo.export.targets import find
from hpgo.jobs.parts import parts_of
from hpgo.llm.hugging_face_shape import hugging_face
from hpgo.model.formats.transformers import of_document
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from pathlib import Path

OLMO, OLMO2 = (of_document({"model_type": kind, "num_hidden_layers": 8}) for kind in ("olmo", "olmo2"))
QWEN2 = replace(TRANSFORMERS["qwen2-7b"], layers=8)
H100 = hpgo.Cluster.preset("h100:1")


def plan(model: hpgo.Transformer = QWEN2, **options: Any) -> hpgo.LlmPlan:
    asked: dict[str, Any] = {"global_batch_size": 16, "seq_length": 1024, "devices": 8, "framework": "torchtitan"}
    return hpgo.LlmPlan.of(hpgo.estimate_llm(model, H100, **asked | options), model, H100)


def constants(text: str) -> dict[str, Any]:
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


@pytest.mark.parametrize("model", [QWEN2, OLMO, OLMO2], ids=["qwen2", "olmo", "olmo2"])
def test_a_search_stays_within_what_the_backend_runs(model: hpgo.Transformer) -> None:
    found = hpgo.plan_llm(model, H100, global_batch_size=16, seq_length=1024, framework="torchtitan", top=1000)
    configs = [one.parallelism for one in found.estimates]
    assert any(config.pp > 1 for config in configs)
    for config in configs:
        assert (config.tp, config.splits_backward) == (1, False)
        assert (config.cp, config.cuda_graph_impl, config.lora_rank, config.packed_length) == (1, "none", 0, None)


def test_every_stage_has_the_module_that_rotates_positions() -> None:
    text = files(plan(pp=4, zero_stage=2), "torchtitan@0.3")["planned.py"]
    held = constants(text)
    assert [part[-1] for part in held["PARTS"]] == ["rotary_emb"] * 4
    names = [name for part in held["PARTS"] for name in part if name != "rotary_emb"]
    assert names == ["tok_embeddings", *(f"layers.{at}" for at in range(8)), "norm", "lm_head"]
    assert held["SHAPE"]["num_hidden_layers"] == 8
    assert held["SHAPE"]["model_type"] == "qwen2"
    assert "EPSILON" not in held  # transformers reads it in the model's config.json
    assert "CUDA graphs" not in text
    assert "HFTransformerModel.init_states = with_rope(HFTransformerModel.init_states)" in text


@pytest.mark.parametrize("model", [QWEN2, OLMO, OLMO2], ids=["qwen2", "olmo", "olmo2"])
def test_the_written_config_is_read_as_the_same_model(model: hpgo.Transformer) -> None:
    written = hugging_face(model)
    assert written is not None
    assert replace(of_document(written), name=model.name) == replace(model, longest=model.longest or 1 << 17)


@pytest.mark.parametrize("model", [QWEN2, OLMO, OLMO2], ids=["qwen2", "olmo", "olmo2"])
def test_transformers_builds_the_planned_model_from_the_job(model: hpgo.Transformer, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    parts = parts_of(plan(model, zero_stage=3), find("torchtitan"))
    texts = {file.name: file.text for file in parts.files}
    (tmp_path / "config.json").write_text(texts["config.json"], encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(one.numel() for one in built.parameters()) == model.parameters
    # The exported module compares these values with those that transformers reads.
    shape = constants(texts["planned.py"])["SHAPE"]
    assert {name: getattr(config, name) for name in shape} == shape
    assert set(shape) <= set(json.loads(texts["config.json"]))
    compile(texts["job_config.py"], "job_config.py", "exec")
    assert 'vocab_size=SHAPE["vocab_size"]' in texts["job_config.py"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 2}, "does not support tensor parallelism here for models of transformers"),
        ({"cp": 2}, "does not support context parallelism here for models of transformers, such as"),
        ({"cuda_graph_impl": "full_iteration"}, "captures no CUDA graphs here for models of transformers"),
        (
            {"pp": 2, "vpp": 2, "pp_schedule": "interleaved_zb", "zero_stage": 2, "fused_elementwise": False},
            "does not split backward passes here for models of transformers",
        ),
        ({"lora_rank": 8}, "has no adapters for models of transformers"),
        ({"packed_length": 256}, "does not keep packed documents apart here for models of transformers"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    options = {"zero_stage": 3} | options
    with pytest.raises(ArgumentError, match=says):
        plan(**options)
    # Models of torchtitan's own packages have it.
    plan(replace(TRANSFORMERS["llama-3-8b"], layers=8), **options)


@pytest.mark.parametrize(
    ("framework", "model", "says"),
    [
        ("torchtitan", replace(QWEN2, tied=True), "biases beside tied embeddings"),
        ("torchtitan", replace(QWEN2, attention_bias="all"), "no settings for biases, which"),
        ("torchtitan", TRANSFORMERS["mistral-7b"], "sliding windows"),
        ("torchtitan", replace(OLMO, tied=True), "beside tied embeddings"),
        ("torchtitan", of_document({"model_type": "olmo", "clip_qkv": 8.0}), "operators beside the embedding"),
        ("torchtitan@0.2", OLMO2, "norms over the queries and keys of all heads"),
        ("torchtitan@0.2", QWEN2, "no settings for biases, which"),
    ],
)
def test_other_models_are_refused_before_the_search(framework: Any, model: hpgo.Transformer, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        hpgo.plan_llm(model, H100, global_batch_size=16, seq_length=1024, framework=framework)
