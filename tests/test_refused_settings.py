"""Settings and models that are refused, and hints that lead to what runs."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo.cli.job_folders import check_llm_job_folder
from hpgo.errors import ArgumentError, HpgoError, ProfileError
from hpgo.llm.measured_steps import read_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEMOTRON = {
    "model_type": "nemotron_h", "hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1024, "intermediate_size": 512, "mamba_num_heads": 16, "mamba_head_dim": 32, "n_groups": 3,
    "hybrid_override_pattern": "M-M*-M",
}  # fmt: skip
BAMBA = {"model_type": "bamba", "mamba_n_heads": 128, "mamba_n_groups": 3}
ERNIE = {"model_type": "ernie4_5_moe", "num_nextn_predict_layers": 1}


def searched(framework: str, **fix: Any) -> hpgo.LlmSearch:
    return hpgo.plan_llm(
        "llama-3-8b", "h100:1", framework=framework, fix=fix, global_batch_size=64, seq_length=4096
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["zero_hpz_partition_size", "zero-quantized-weights", "zero_quantized_gradients"]
)  # fmt: skip
def test_settings_of_zero_plus_plus_are_refused_by_name(tmp_path: Path, name: str) -> None:
    plain = name.replace("-", "_")
    with pytest.raises(ArgumentError, match=f"{plain} is not supported: ") as refused:
        searched("deepspeed", **{name: 1})
    assert "leave it out" in refused.value.hint
    step = {"model": "llama-3-8b", "cluster": "h100:1", "seconds": 5, "global_batch_size": 32, "seq_length": 4096}
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"hpgo_steps": 1, "steps": [step | {plain: 1}]}), encoding="utf-8")
    with pytest.raises(ArgumentError, match=f"step 1: {plain} is not supported: "):
        read_steps(file)


@pytest.mark.parametrize(
    ("config", "message", "hint"),
    [
        (ERNIE, "`num_nextn_predict_layers` is 1, but models of this type have dense layers", "give 0"),
        (NEMOTRON, "16 heads, which can't be divided evenly among groups 3", "set `n_groups` to 2"),
        (BAMBA, "128 heads, which can't be divided evenly among groups 3", "set `mamba_n_groups` to 2"),
    ],
)
def test_refusals_of_config_files_name_their_keys(
    tmp_path: Path, config: dict[str, Any], message: str, hint: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ProfileError, match=re.escape(message)) as refused:
        hpgo.Transformer.read(path)
    assert refused.value.hint.startswith(hint)


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torchtitan@0.2", "deepspeed"])
@pytest.mark.parametrize(
    "fix",
    [
        {"optimizer": "muon"}, {"optimizer": "muon", "zero_stage": 3}, {"optimizer": "muon", "zero_stage": 1},
        {"optimizer": "paged_adam"}, {"lora_rank": 16}, {"tp": 2}, {"cp": 2}, {"pp_schedule": "zb_v"},
        {"base_weights_dtype": "nf4", "lora_rank": 16}, {"optimizer_offload_fraction": 0.5},
        {"offload_params": True, "optimizer_offload_fraction": 1}, {"packed_length": 512}, {"dp_replicate": 2},
        {"moe_token_dispatcher": "deepep"}, {"cuda_graph_impl": "local"}, {"exp_avg_dtype": "fp16"},
    ],
    ids=str,
)  # fmt: skip
def test_hints_name_only_frameworks_that_run_the_settings(framework: str, fix: dict[str, Any]) -> None:
    try:
        searched(framework, **fix)
    except HpgoError as refused:
        for name in re.findall(r"--framework ([^`]+)", refused.hint):
            assert name != framework
            assert searched(name, **fix).best.fits


def test_words_that_are_no_value_are_refused_before_a_job_folder_is_planned(tmp_path: Path) -> None:
    check: Callable[..., None] = check_llm_job_folder
    with pytest.raises(ArgumentError, match="packed_length is `none`") as refused:
        check(str(tmp_path / "job"), "megatron", "llama-3-8b", {"packed-length": "none"})
    assert refused.value.hint == "give a whole number from 1 on"
    with pytest.raises(ArgumentError, match="packed_length is 512, but job folders for Megatron-LM train on whole"):
        check(str(tmp_path / "job"), "megatron", "llama-3-8b", {"packed-length": "512"})
    check(str(tmp_path / "job"), "torchtitan", "llama-3-8b", {"packed-length": "512"})
