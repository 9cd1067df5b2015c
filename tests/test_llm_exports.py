"""Ways for frameworks: what the files say is what was priced, and what a framework does not run is refused.

The frameworks' own code reads such files in tests/frameworks.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from test_export import assigned, main

import hpgo
from hpgo import export
from hpgo.llm.arithmetic import TABLES
from hpgo.llm.fewer_gpus import part_of
from hpgo.llm.frameworks import DEEPSPEED, MEGATRON, TORCHTITAN, framework_support
from hpgo.llm.pipeline_layout import parse_layout
from hpgo.model.arithmetic import Arithmetic, RopeScaling
from hpgo.model.transformer_presets import TRANSFORMERS

H100 = hpgo.Cluster.preset("h100:8")


def made(name: str = "llama-3-70b", **asked: Any) -> hpgo.LlmPlan:
    asked = {"global_batch_size": 128, "seq_length": 8192, **asked}
    return hpgo.LlmPlan.of(hpgo.estimate_llm(name, H100, **asked), name, H100)


def test_megatron_is_told_the_model_and_the_way() -> None:
    text = main(made(tp=4, pp=8, vpp=5, precision="fp8"), "megatron")
    words = [line for line in text.splitlines() if not line.startswith("#")]
    for said in (
        "--num-layers 80", "--hidden-size 8192", "--num-query-groups 8", "--ffn-hidden-size 28672", "--swiglu",
        "--normalization RMSNorm", "--position-embedding-type rope", "--vocab-size 128256",
        "--untie-embeddings-and-output-weights", "--tensor-model-parallel-size 4", "--sequence-parallel",
        "--pipeline-model-parallel-size 8", "--micro-batch-size 1", "--global-batch-size 128", "--seq-length 8192",
        "--use-distributed-optimizer", "--bf16", "--fp8-format hybrid", "--overlap-grad-reduce",
    ):  # fmt: skip
        assert said in words
    (layout,) = (word for word in words if "layout" in word)
    assert parse_layout(layout.split("'")[1]).counts.count(2) == 40
    assert not any("recompute" in word for word in words)
    # No words are padded, and the price counts 128,256 of them.
    assert "--make-vocab-size-divisible-by 64" in words
    assert "--padded-vocab-size 128256" in words
    assert "is padded" not in text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"recompute": "full"}, ["--recompute-method uniform", "--recompute-num-layers 1"]),
        ({"recompute": "full", "recompute_num_layers": 3}, ["--recompute-method block", "--recompute-num-layers 3"]),
        ({"recompute": "selective"}, ["--recompute-granularity selective"]),
        ({"flash_attention": False, "recompute": "full"}, ["--attention-backend unfused"]),
        ({"fused_elementwise": False}, ["--no-rope-fusion", "--no-bias-swiglu-fusion"]),
        ({"precision": "fp16"}, ["--fp16"]),
        ({"cp": 2}, ["--context-parallel-size 2", "--cp-comm-type p2p"]),
        ({}, ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl native"]),
        ({"grad_reduce_in_bf16": True}, ["--grad-reduce-in-bf16"]),
        ({"adam_moments_in_bf16": True}, ["--use-precision-aware-optimizer", "--exp-avg-dtype bf16"]),
        (
            {"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]},
            ["--recompute-granularity selective", "--recompute-modules layernorm mlp"],
        ),
    ],
)
def test_megatron_is_told_what_is_computed_how(config: dict[str, Any], says: list[str]) -> None:
    lines = main(made(tp=8, pp=4, **config), "megatron").splitlines()
    assert set(says) <= set(lines)


def test_values_that_wait_in_the_hosts_memory_are_said_or_refused() -> None:
    plan = made("llama-3-8b", tp=2, devices=16, cpu_offload_num_layers=9)
    assert {"--cpu-offloading", "--cpu-offloading-num-layers 9"} <= set(main(plan, "megatron").splitlines())
    with pytest.raises(hpgo.errors.ArgumentError, match="DeepSpeed does not support offloading here"):
        export.files(made("llama-3-8b", devices=16, zero_stage=3, cpu_offload_num_layers=9), "deepspeed")


def test_torchtitan_is_told_the_same_in_both_forms() -> None:
    plan = made("llama-3-8b", tp=2, pp=2, vpp=2, zero_stage=2, overlap_dp_comm=False, micro_batch_size=2, devices=16)
    old, new = tomllib.loads(main(plan, "torchtitan@0.2")), assigned(main(plan, "torchtitan@0.3"))
    assert (old["model"], old["training"]["seq_len"]) == ({"name": "llama3", "flavor": "8B"}, 8192)
    for key, value in old["parallelism"].items():
        if key not in {"pipeline_parallel_schedule_csv", "module_fqns_per_model_part"}:
            assert new[f"parallelism.{key}"] == value
    assert [[name for name in part if "." in name] for part in new["PARTS"]] == [
        [name for name in part if "." in name] for part in old["parallelism"]["module_fqns_per_model_part"]
    ]
    assert new["SHAPE"] == {
        "layers": 32, "dim": 4096, "vocab_size": 128256, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "ffn": 14336,
        "qk_norm": False, "biases": False, "tied": False,
    }  # fmt: skip
    assert (new["EPSILON"], new["ROPE"]) == (1e-5, {"theta": 5e5, "scaling": "none"})
    order = export.files(plan, "torchtitan")["order.csv"]
    assert len(order.splitlines()) == 2
    counted = made(
        "llama-3-8b",
        tp=2,
        pp=2,
        vpp=2,
        zero_stage=2,
        overlap_dp_comm=False,
        dtensor=True,
        micro_batch_size=2,
        devices=16,
    )
    for one, more in ((plan, True), (counted, False)):
        assert ("torchtitan needs more memory than estimated" in main(one, "torchtitan")) == more


@pytest.mark.parametrize(
    ("name", "vpp", "theirs"),
    [("interleaved_zb", 2, "InterleavedZeroBubble"), ("interleaved_zb", 4, "InterleavedZeroBubble"),
     ("zb_v", 2, "ZBVZeroBubble")],
)  # fmt: skip
def test_torchtitan_is_told_orders_with_split_backward_passes(name: str, vpp: int, theirs: str) -> None:
    plan = made(
        "llama-3-8b",
        pp=4,
        vpp=vpp,
        pp_schedule=name,
        zero_stage=2,
        overlap_dp_comm=False,
        fused_elementwise=False,
        devices=16,
    )
    old, new = tomllib.loads(main(plan, "torchtitan@0.2")), assigned(main(plan, "torchtitan@0.3"))
    assert old["parallelism"]["pipeline_parallel_schedule"] == theirs
    assert new["parallelism.pipeline_parallel_schedule"] == theirs
    assert old["compile"] == {"enable": True, "components": ["loss"]}
    assert len(new["PARTS"]) == len(old["parallelism"]["module_fqns_per_model_part"]) == 4 * vpp
    order = export.files(plan, "torchtitan")["order.csv"]
    pytest.importorskip("torch.distributed.pipelining", reason="PyTorch reads the order")
    from torch.distributed.pipelining import _utils, schedules

    ranks = _utils.generate_stage_to_rank_mapping(4, 4 * vpp, style="v" if name == "zb_v" else "loop")
    read = {
        rank: [schedules._Action.from_str(word) for word in line.split(",")]
        for rank, line in enumerate(order.splitlines())
    }
    assert all(ranks[action.stage_index] == rank for rank, line in read.items() for action in line)
    placed = {"stage_to_rank": ranks.__getitem__, "num_stages": 4 * vpp}
    sent = schedules._add_send_recv(read, **placed)
    # It runs to its end: nobody waits for what is never sent.
    schedules._simulate_comms_compute(sent, **placed)


def test_deepspeed_is_told_batches_and_what_replicas_share() -> None:
    alone = assigned(main(made("llama-3-8b", zero_stage=3, devices=16), "deepspeed"))["CONFIG"]
    assert alone["zero_optimization"]["stage"] == 3
    assert alone["train_batch_size"] == 128 == 16 * alone["gradient_accumulation_steps"]
    piped = assigned(main(made("llama-3-8b", pp=4, overlap_dp_comm=False, devices=16, recompute="full"), "deepspeed"))
    assert piped["PARTS"] == [0, 9, 17, 25, 34]
    assert (piped["REPLICAS"], piped["CHECKPOINT_INTERVAL"]) == (4, 1)


@pytest.mark.parametrize(
    ("target", "config", "says"),
    [
        ("torchtitan", {"tp": 8, "pp": 4}, "torchtitan supports ZeRO stage 2 with a pipeline, not 1"),
        ("torchtitan", {"tp": 8, "zero_stage": 2}, "reduces gradients in each of 16 backward passes"),
        ("megatron", {"tp": 8, "pp": 4, "vpp": 2, "pp_schedule": "zb_v"}, "supports pipeline schedule 1f1b, not zb_v"),
        (
            "torchtitan",
            {"tp": 8, "pp": 4, "vpp": 2, "pp_schedule": "zb_v"},
            "can't compile layers with split backward passes",
        ),
        (
            "torchtitan",
            {"tp": 8, "pp": 4, "vpp": 2, "pp_schedule": "zb_v", "fused_elementwise": False, "recompute": "full"},
            "recomputes a layer once for each of its weights with split backward passes (zb_v)",
        ),
        (
            "torchtitan",
            {"tp": 8, "zero_stage": 3, "grad_reduce_in_bf16": True},
            "torchtitan accumulates gradients in 32 bits here",
        ),
        ("deepspeed", {"tp": 8, "pp": 4}, "DeepSpeed has no sequence parallelism, but tp is 8 with it"),
        ("megatron", {"tp": 8, "zero_stage": 2}, "Megatron-LM supports ZeRO stage 0, 1 or 3, not 2"),
        ("vllm", {"tp": 8, "pp": 4}, "LLM plans are not supported for vLLM"),
        ("nemo", {"tp": 8, "pp": 4}, "LLM plans are not supported for NeMo"),
    ],
)
def test_what_a_launcher_does_not_run_is_refused(target: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        export.files(made(**config), target)
    assert says in caught.value.message
    assert caught.value.hint


def test_a_way_that_does_not_fit_is_refused() -> None:
    with refused(hpgo.errors.InfeasibleError, "insufficient_memory", "2", "GPU"):
        export.files(made(tp=2), "megatron")


def test_models_that_no_settings_describe_are_refused() -> None:
    plan = made("gemma-2-9b", devices=16, tp=8, pp=1)
    with refused(hpgo.errors.ArgumentError, "unsupported", "gemma-2-9b", "4"):
        export.files(plan, "megatron")
    shared = made("gpt-2", devices=4, zero_stage=3, global_batch_size=4, seq_length=1024)
    with pytest.raises(
        hpgo.errors.ArgumentError, match="no settings for norms that subtract the mean, which `gpt-2` has"
    ):
        export.files(shared, "torchtitan")


@pytest.mark.parametrize(
    ("name", "framework", "others"),
    [
        ("qwen3-30b-a3b", "torchtitan@0.2", ["megatron", "torchtitan", "deepspeed"]),
        ("mixtral-8x7b", "torchtitan@0.2", ["megatron", "torchtitan", "deepspeed"]),
        ("mistral-7b", "torchtitan@0.2", ["megatron", "deepspeed"]),
        ("gpt-neox-20b", "megatron", ["deepspeed"]),
        ("gemma-2-9b", "megatron", []),
        ("gemma-2-9b", "deepspeed", []),
    ],
)
def test_a_refusal_names_the_frameworks_that_run_the_model(name: str, framework: str, others: list[str]) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan_llm(name, H100, framework=framework, global_batch_size=64, seq_length=2048)
    assert caught.value.hint is not None
    named = [word for word in ("megatron", "torchtitan", "deepspeed") if f"`--framework {word}`" in caught.value.hint]
    assert named == others
    for other in others:
        assert framework_support(other)[1].lacking(TRANSFORMERS[name]) is None


def test_a_window_is_a_setting_or_a_comment() -> None:
    plan = made("mistral-7b", devices=64, pp=2, zero_stage=1, overlap_dp_comm=False)
    text = main(plan, "megatron")
    assert "--window-size 4095,0" in text
    assert "a window of" not in text
    assert "estimated with a window of 4096 tokens in 32 layers: the model must have it" in main(plan, "deepspeed")


def test_deepspeed_runs_no_softcap_of_attention_scores() -> None:
    model = TRANSFORMERS["gemma-2-9b"]
    lack = DEEPSPEED.lacking(model)
    assert lack is not None
    assert "fused attention, which has no softcap of attention scores, but `gemma-2-9b` has one (50)" in lack.why
    assert model.arithmetic is not None
    assert DEEPSPEED.lacking(replace(model, arithmetic=replace(model.arithmetic, attention_logit_softcap=None))) is None


def test_fewer_layers_at_the_ends_of_a_pipeline_are_laid_out_for_megatron_alone() -> None:
    plan = made(tp=8, pp=4, first_rank_layers=19, last_rank_layers=19)
    assert "--pipeline-model-parallel-layout 'Et*19|t*21|t*21|t*19L'" in main(plan, "megatron").splitlines()
    with refused(hpgo.errors.ArgumentError, "unsupported", "4", "19"):
        export.files(plan, "torchtitan")
    rounds = made(tp=8, pp=4, vpp=2, last_rank_layers=14)
    assert "'Et*11|t*11|t*11|t*7|(t*11|)*3t*7L'" in main(rounds, "megatron")


@pytest.mark.parametrize(
    ("asked", "overlaps"),
    [
        ({"tp": 8, "stack": "te-hopper"}, True),
        ({"tp": 8, "tp_comm_overlap": True}, True),
        ({"tp": 8}, False),
        ({"tp": 8, "stack": "te-hopper", "tp_comm_overlap": False}, False),
        ({"tp": 8, "stack": "te-hopper", "sequence_parallel": False, "recompute": "full"}, False),
    ],
)
def test_megatron_overlaps_tp_communication_where_the_estimate_does(asked: dict[str, Any], overlaps: bool) -> None:
    text = main(made("llama-3-8b", **asked), "megatron").splitlines()
    wanted = {"--tp-comm-overlap", "--tp-comm-bootstrap-backend nccl"}
    assert wanted & set(text) == (wanted if overlaps else set())


@pytest.mark.parametrize(
    ("cluster", "ep", "words"),
    [
        ("h100:4", 8, ["--moe-token-dispatcher-type alltoall"]),
        ("h100:4", 16, ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"]),
        ("a100:4", 16, ["--moe-token-dispatcher-type alltoall"]),
        ("gb200:1", 8, ["--moe-token-dispatcher-type alltoall"]),
        ("gb200:2", 128, ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"]),
    ],
)
def test_tokens_go_to_experts_on_other_nodes_as_estimated(cluster: str, ep: int, words: list[str]) -> None:
    whole = part_of(hpgo.Cluster.preset(cluster), 2, 64) if ep > 64 else hpgo.Cluster.preset(cluster)
    one = hpgo.estimate_llm(
        "qwen3-30b-a3b", whole, ep=ep, global_batch_size=1152 if cluster == "gb200:1" else 256, seq_length=4096
    )
    text = main(hpgo.LlmPlan.of(one, "qwen3-30b-a3b", whole), "megatron")
    assert [line for line in text.splitlines() if line.startswith(("--moe-token-d", "--moe-flex"))] == words
    assert ("alltoall once to each of its experts" in text) == (cluster == "a100:4")


def test_the_command_exports_a_way(run, tmp_path) -> None:
    made(tp=8, pp=4, vpp=5).save(tmp_path / "llm-plan.json")
    done = run("export", "llm-plan.json", "--to", "megatron")
    assert "--num-layers 80" in done.stdout
    assert "DeepSpeed has no sequence parallelism" in run("export", "llm-plan.json", "--to", "deepspeed", code=1).stderr


def test_every_field_of_a_models_arithmetic_is_a_setting_or_a_refusal_for_each_framework() -> None:
    assert set(TABLES) == {rules.shape for rules in (MEGATRON, TORCHTITAN, DEEPSPEED)} - {"any"}
    names = {field.name for field in fields(Arithmetic)}
    for framework, table in TABLES.items():
        assert set(table) == names, framework


CHANGES: dict[str, Any] = {
    "activation": "gelu_new", "norm_epsilon": 3e-5, "norm_adds_one": True, "rope_theta": 7e5, "rope_local_theta": 1e4,
    "rotary_fraction": 0.5, "rope_interleaved": True, "rope_scaling": RopeScaling(rope_type="dynamic", factor=2),
    "parallel_residual": True, "attention_scale": 0.5, "attention_scale_by_layer": True, "attention_logit_softcap": 9.0,
    "final_logit_softcap": 9.0, "embedding_scale": 3.0, "attention_dropout": 0.25, "hidden_dropout": 0.25,
    "embedding_dropout": 0.5, "router_score": "sigmoid", "router_normalizes": True, "router_scale": 3.0,
    "router_bias": True, "router_group_top": 2, "router_aux_loss": 0.5, "router_aux_loss_per_sequence": True,
    "router_jitter": 0.5, "init_std": 0.5, "glu_clamp": 7.0, "glu_offset": 1.0, "no_rope_layers": (0, 2),
    "other": ("ALiBi",),
}  # fmt: skip
"""Another value of each field than the model below has."""
UNSTATED = {
    "titan": {"rope_interleaved", "init_std", "router_aux_loss", "router_aux_loss_per_sequence"},
    "megatron": set[str](),
}
"""Fields that change nothing in a framework: another order of rows, its own initial weights, a loss that it lacks."""


@pytest.mark.parametrize("rules", [MEGATRON, TORCHTITAN], ids=["megatron", "torchtitan"])
@pytest.mark.parametrize("name", [field.name for field in fields(Arithmetic)])
def test_another_value_of_any_field_gives_other_settings_or_a_refusal(rules: Any, name: str) -> None:
    dense = TRANSFORMERS["llama-3-8b"]
    assert dense.arithmetic is not None
    model = replace(
        dense, experts=8, experts_per_token=4, expert_ffn=128, expert_groups=4, groups_per_token=4,
        arithmetic=replace(dense.arithmetic, router_aux_loss=0.25),
    ) if name.startswith("router_") else dense  # fmt: skip
    assert model.arithmetic is not None
    other = replace(model, arithmetic=replace(model.arithmetic, **{name: CHANGES[name]}))
    assert (rules.stated(model) == rules.stated(other)) == (name in UNSTATED[rules.shape])


TIED = replace(
    TRANSFORMERS["llama-3-8b"], name="llama-3.2-1b", layers=16, hidden=2048, head_dim=64, ffn=8192, tied=True
)


def test_torchtitan_0_3_ties_embeddings_without_a_pipeline() -> None:
    plan = hpgo.LlmPlan.of(
        hpgo.estimate_llm(TIED, H100, zero_stage=2, devices=8, global_batch_size=8, seq_length=8192), TIED, H100
    )
    text = main(plan, "torchtitan@0.3")
    assert assigned(text)["SHAPE"]["tied"] is True
    assert 'config.model_spec = model_registry("1B")' in text
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        export.files(plan, "torchtitan@0.2")
    piped = hpgo.estimate_llm(
        TIED, H100, zero_stage=2, pp=2, overlap_dp_comm=False, devices=8, global_batch_size=8, seq_length=8192
    )
    with pytest.raises(hpgo.errors.ArgumentError, match="a pipeline for models with tied embeddings, but pp is 2"):
        export.files(hpgo.LlmPlan.of(piped, TIED, H100), "torchtitan@0.3")
    with pytest.raises(hpgo.errors.ArgumentError, match="a pipeline for models with tied embeddings"):
        hpgo.plan_llm(TIED, H100, framework="torchtitan", global_batch_size=64, seq_length=8192, fix={"pp": 2})
    found = hpgo.plan_llm(TIED, H100, framework="torchtitan", global_batch_size=64, seq_length=8192)
    assert {one.parallelism.pp for one in found.estimates} == {1}


def test_deepspeed_adds_gradients_up_as_they_are_priced() -> None:
    one = assigned(main(made("llama-3-8b", zero_stage=2, devices=16), "deepspeed"))["CONFIG"]
    assert (one["data_types"], one["zero_optimization"]["stage"]) == ({"grad_accum_dtype": "fp32"}, 2)
    narrow = made(
        "llama-3-8b", zero_stage=0, devices=16, grad_reduce_in_bf16=True, recompute="full", pp=4, overlap_dp_comm=False
    )
    assert assigned(main(narrow, "deepspeed"))["CONFIG"]["data_types"] == {"grad_accum_dtype": "bf16"}
    wide = made("llama-3-8b", zero_stage=0, devices=16, recompute="full", pp=8, overlap_dp_comm=False)
    with pytest.raises(hpgo.errors.ArgumentError, match="supports ZeRO stage 1 with a pipeline, not 0"):
        export.files(wide, "deepspeed")


def test_deepspeed_compares_the_users_model_with_the_planned_one() -> None:
    space: dict[str, Any] = {}
    exec(main(made("llama-3-8b", zero_stage=3, devices=16), "deepspeed"), space)
    config = SimpleNamespace(**space["MODEL"])
    space["check_model"](config)
    for name, other in (("rope_theta", 1e4), ("hidden_act", "gelu"), ("tie_word_embeddings", True)):
        with pytest.raises(ValueError, match=f"another model: {name} is {other}"):
            space["check_model"](SimpleNamespace(**{**space["MODEL"], name: other}))
    arithmetic = TRANSFORMERS["llama-3-8b"].arithmetic
    assert arithmetic is not None
    named = {"activation", "norm_epsilon", "rope_theta", "attention_dropout", "init_std"}
    left = {field.name for field in fields(Arithmetic)} - named
    assert set(space["ARITHMETIC"]) == {name for name in left if not name.startswith("router_")}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed"])
def test_a_plan_for_a_framework_is_one_that_it_exports(framework: Any) -> None:
    planned = 0
    for name, model in TRANSFORMERS.items():
        ends = {end: tuple(at for at in getattr(model, end) if at < 4) for end in ("dense_layers", "window_layers")}
        small = {"ffn": min(model.ffn, 1024), "expert_ffn": min(model.expert_ffn, 64), "vocab": 2048}
        for further in (0, 1):
            tiny = replace(model, layers=4, further_tokens=further, **small, **ends)
            asked: dict[str, Any] = {"global_batch_size": 8, "seq_length": 512}
            refused = None
            try:
                found = hpgo.plan_llm(tiny, hpgo.Cluster.preset("h100:1"), framework=framework, **asked)
            except hpgo.errors.ArgumentError as error:
                refused = error
            if refused is None:
                best = hpgo.LlmPlan.of(found.best, tiny, hpgo.Cluster.preset("h100:1"))
                assert export.files(best, framework), name
                planned += 1
                continue
            plan = hpgo.LlmPlan.of(hpgo.estimate_llm(tiny, H100, devices=1, zero_stage=0, **asked), tiny, H100)
            with pytest.raises(hpgo.errors.ArgumentError) as caught:
                export.files(plan, framework)
            assert (caught.value.message, caught.value.hint) == (refused.message, refused.hint), name
    assert planned > 1


def test_layers_with_a_window_gather_keys_and_values_and_others_pass_them_round() -> None:
    def told(model: Any) -> str:
        price = hpgo.estimate_llm(model, H100, cp=2, tp=4, devices=8, global_batch_size=8, seq_length=8192)
        words = main(hpgo.LlmPlan.of(price, model, H100), "megatron").splitlines()
        return next(line for line in words if line.startswith("--cp-comm-type"))

    model = TRANSFORMERS["mistral-7b"]
    assert told(model) == "--cp-comm-type all_gather"
    assert told(replace(model, window=0, window_layers=())) == "--cp-comm-type p2p"
    some = replace(model, layers=4, window_layers=(0, 2))
    assert told(some) == "--cp-comm-type all_gather p2p all_gather p2p"


def test_sequences_are_not_shared_without_fused_attention() -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="context parallelism only with flash attention, but cp is 2"):
        export.files(made(tp=8, pp=4, cp=2, flash_attention=False, recompute="full"), "megatron")


def test_what_a_model_does_not_state_is_said_as_the_frameworks_default() -> None:
    model = replace(TRANSFORMERS["llama-3-8b"], arithmetic=None)
    plan = hpgo.LlmPlan.of(hpgo.estimate_llm(model, H100, tp=8, global_batch_size=8, seq_length=8192), model, H100)
    assert "# --rotary-base 10000, --rotary-percent 1.0, --norm-epsilon 1e-05" in main(plan, "megatron")
