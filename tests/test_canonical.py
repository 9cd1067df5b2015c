"""The canonical form of a configuration: what it leaves out changes neither an estimate nor an export."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.errors import HpgoError
from hpgo.export import files
from hpgo.llm.canonical import canonical
from hpgo.llm.estimate import estimate_on, stack_on
from hpgo.llm.parallelism import ParallelismConfig
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from hpgo.llm.estimate import LlmEstimate

H100 = hpgo.Cluster.preset("h100:1")
STACK = stack_on("default", H100, None, None)
ASKED = {"global_batch_size": 8, "seq_length": 1024}
DENSE = hpgo.Transformer(layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=64, ffn=3072, vocab=32000)
MODELS = (
    DENSE,
    replace(DENSE, further_tokens=1),
    replace(DENSE, experts=4, experts_per_token=2, expert_ffn=512),
)
ends = st.sampled_from([None, None, 1, 2, 3, 4, 6])
configs = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 1, 2]),
        "cp": st.sampled_from([1, 1, 2]),
        "ep": st.sampled_from([1, 1, 2]),
        "pp": st.sampled_from([1, 2, 4]),
        "vpp": st.sampled_from([1, 1, 2]),
        "first_rank_layers": ends,
        "last_rank_layers": ends,
        "pp_schedule": st.sampled_from(["1f1b", "1f1b", "interleaved_zb", "zb_v"]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "full", "full", "selective"]),
        "recompute_num_layers": st.sampled_from([None, None, 1, 2, 4]),
        "recompute_every": st.sampled_from([None, None, 1, 2, 4]),
        "recompute_modules": st.sampled_from([(), (), ("mlp", "layernorm"), ("layernorm", "mlp"), ("core_attn",)]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "overlap_dp_comm": st.booleans(),
        "flatten_gradients": st.booleans(),
        "exp_avg_dtype": st.sampled_from(["fp32", "bf16"]),
        "grad_reduce_in_bf16": st.booleans(),
        "optimizer_offload_fraction": st.sampled_from([0.0, 0.0, 1.0]),
        "lora_rank": st.sampled_from([0, 0, 8]),
        "packed_length": st.sampled_from([None, None, 64]),
    }
)


def made(asked: dict[str, Any]) -> ParallelismConfig:
    """A configuration, without the settings that its others exclude."""
    asked = asked | {"sequence_parallel": asked["tp"] > 1}
    if asked["pp"] == 1:
        asked |= {"vpp": 1, "first_rank_layers": None, "last_rank_layers": None}
    if asked["vpp"] == 1:
        asked |= {"pp_schedule": "1f1b"}
    if asked["recompute"] != "full":
        asked |= {"recompute_num_layers": None, "recompute_every": None}
    if asked["recompute"] != "selective":
        asked |= {"recompute_modules": ()}
    if asked["pp_schedule"] != "1f1b":
        asked |= {"lora_rank": 0}
    return ParallelismConfig(**asked)


def estimated(model: hpgo.Transformer, config: ParallelismConfig, gpus: int) -> LlmEstimate:
    return estimate_on(model, H100.first(gpus), config, STACK, None, **ASKED)


def exported(one: LlmEstimate, model: hpgo.Transformer) -> dict[str, object]:
    """The files of a configuration for each framework, or the error."""
    found: dict[str, object] = {}
    for framework in ("megatron", "torchtitan", "deepspeed"):
        try:
            found[framework] = files(hpgo.LlmPlan.of(one, model, H100, framework=framework), framework)
        except HpgoError as error:
            found[framework] = str(error)
    return found


@given(model=st.sampled_from(MODELS), asked=configs, gpus=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=examples(150))
def test_the_canonical_form_has_the_estimate_and_the_exports_of_the_configuration(model, asked, gpus: int) -> None:
    try:
        config = made(asked)
        one = estimated(model, config, gpus)
    except hpgo.errors.ArgumentError:
        assume(False)
        raise
    plain = canonical(one.parallelism, model)
    other = estimated(model, plain, gpus)
    assert replace(other, parallelism=one.parallelism) == one
    assert canonical(plain, model) == plain
    assert exported(other, model) == exported(one, model)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"zero_stage": 1, "tp": 2, "sequence_parallel": True}, {"zero_stage": 0, "tp": 2, "sequence_parallel": True}),
        ({"pp": 2, "overlap_dp_comm": True}, {"pp": 2, "overlap_dp_comm": False}),
        ({"pp": 4, "first_rank_layers": 2}, {"pp": 4}),
        ({"pp": 2, "first_rank_layers": 3}, {"pp": 2, "first_rank_layers": 3, "last_rank_layers": 5}),
        ({"pp": 2, "last_rank_layers": 5}, {"pp": 2, "first_rank_layers": 3}),
        ({"recompute": "full", "recompute_num_layers": 8}, {"recompute": "full"}),
        ({"recompute": "full", "recompute_every": 1}, {"recompute": "full", "recompute_num_layers": 8}),
        ({"recompute": "full", "recompute_every": 4}, {"recompute": "full", "recompute_num_layers": 2}),
    ],
)
def test_settings_without_effect_have_one_canonical_form(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(ParallelismConfig(**one), DENSE) == canonical(ParallelismConfig(**other), DENSE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"zero_stage": 1, "dp": 2}, {"dp": 2}),
        ({"zero_stage": 3}, {}),
        ({"pp": 4, "vpp": 2}, {"pp": 4}),
        ({"pp": 4, "first_rank_layers": 1, "last_rank_layers": 1}, {"pp": 4}),
        ({"recompute": "full", "recompute_num_layers": 7}, {"recompute": "full"}),
        ({"cp": 2, "micro_batch_size": 2}, {"dp": 2}),
    ],
)
def test_settings_with_an_effect_keep_configurations_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical(ParallelismConfig(**one), DENSE) != canonical(ParallelismConfig(**other), DENSE)


def test_a_plan_with_as_many_recomputed_layers_as_there_are_exports_all_of_them() -> None:
    ask = {"global_batch_size": 32, "seq_length": 8192, "pp": 2, "recompute": "full"}
    texts = []
    for some in ({}, {"recompute_num_layers": 16}, {"recompute_every": 1}):
        one = hpgo.estimate_llm("llama-3-8b", H100, **ask, **some)
        texts.append(files(hpgo.LlmPlan.of(one, TRANSFORMERS["llama-3-8b"], H100), "megatron"))
    assert texts[0] == texts[1] == texts[2]
    assert "--recompute-method uniform" in "".join(texts[0].values())
