"""Software stacks, hybrid shards, selected recomputation and the ranges of LLM estimates."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import exp, hypot, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpgo
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.stack import FACTORS, Stack, stack_of, stacks
from hpgo.llm.step_range import QUANTILE, STEP_SD, WIDE_FSDP_SD, step_range
from hpgo.model.transformer_presets import named_transformer

ASKED = {"global_batch_size": 512, "seq_length": 4096}


SANDWICHED = replace(named_transformer("llama-3-8b"), norms_per_layer=4)
"""A model of no type whose matrices DeepSpeed divides."""


def estimate(**changes) -> hpgo.LlmEstimate:
    asked = ASKED | {"transformer": "llama-3-8b", "cluster": "h100:16"} | changes
    return hpgo.estimate_llm(**asked)


def terms(one: hpgo.LlmEstimate) -> dict[str, float]:
    return dict(one.time_by_term_s)


# --- stacks


@pytest.mark.parametrize("name", list(stacks()))
def test_a_stack_changes_only_the_constants_that_it_names(name: str) -> None:
    stack = Stack.named(name)
    named = {
        constant
        for field, constant in FACTORS.items()
        if getattr(stack, field) != getattr(Stack.named("default"), field)
    }
    before, after = asdict(CONSTANTS), asdict(stack.constants(CONSTANTS))
    assert {key for key in before if before[key] != after[key]} == named


def test_a_factor_of_a_stack_moves_only_its_term() -> None:
    base = Stack.named("default")
    # Passes hide communication of gradients, so without overlap no other term can follow.
    plain = terms(estimate(tp=4, stack=base, overlap_dp_comm=False))
    for field, term in (("attention", "attention"), ("tp_exposed", "tp_comm")):
        found = terms(estimate(tp=4, stack=replace(base, **{field: 0.5}), overlap_dp_comm=False))
        assert {key for key in plain if found[key] != pytest.approx(plain[key])} == {term}
        assert found[term] == pytest.approx(0.5 * plain[term], rel=0.05)


@pytest.mark.parametrize(
    ("framework", "cluster", "name"),
    [
        ("megatron", "h100:1", "te-hopper"), ("nemo", "h200:1", "te-hopper"), ("megatron@0.16", "h100:1", "te-hopper"),
        ("megatron-bridge", "b200:1", "default"), ("megatron", "a100:1", "default"), (None, "h100:1", "default"),
        ("torchtitan", "h100:1", "torchtitan"), ("deepspeed", "a100:1", "deepspeed"),
        ("torchtitan@0.2", "h100:1", "torchtitan-cudnn"), ("torchtitan@0.2", "a100:1", "torchtitan"),
        ("torchtitan@0.3", "h200:1", "torchtitan"),
    ],
)  # fmt: skip
def test_framework_and_device_imply_the_stack(framework: str | None, cluster: str, name: str) -> None:
    assert stack_of(None, hpgo.Cluster.preset(cluster), framework).name == name


def test_a_search_takes_the_stack_of_its_framework() -> None:
    found = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192)
    assert found.best.stack == "te-hopper"
    other = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, stack="default")
    assert other.best.stack == "default"
    assert other.best.step_s > found.best.step_s


@pytest.mark.parametrize(("version", "name"), [("0.2", "torchtitan-cudnn"), ("0.3", "torchtitan")])
def test_a_search_takes_the_stack_of_its_version(version: str, name: str) -> None:
    framework: Any = f"torchtitan@{version}"
    found = hpgo.plan_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=8192, framework=framework)
    assert {one.stack for one in found.estimates} == {name}


@pytest.mark.parametrize(("batch", "size", "measured_s"), [(16, 4, 1.100), (8, 2, 0.593)])
def test_steps_of_torchtitan_with_cudnn_take_as_long_as_measured(batch: int, size: int, measured_s: float) -> None:
    """One H100 SXM with torchtitan 0.2.2 and PyTorch 2.11 (docs/job.md). No constant was fitted to these steps."""
    model = hpgo.Transformer(
        name="llama-1.5b", layers=16, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, vocab=128256,
        tied=False,
    )  # fmt: skip
    one = hpgo.estimate_llm(
        model, "h100:1", devices=1, global_batch_size=batch, seq_length=4096, micro_batch_size=size,
        framework="torchtitan@0.2",
    )  # fmt: skip
    assert one.step_s == pytest.approx(measured_s, rel=0.04)


def test_a_file_of_a_stack_is_read_and_unknown_keys_are_refused(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("hpgo_stack: 1\nname: mine\ntitle: FlashAttention-3\nattention: 0.6\n", encoding="utf-8")
    one = estimate(stack=str(file))
    assert one.stack == "mine"
    assert terms(one)["attention"] < terms(estimate())["attention"]
    file.write_text("hpgo_stack: 1\nname: mine\ntitle: x\natention: 0.6\n", encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError, match="atention"):
        Stack.read(file)


@pytest.mark.parametrize("bad", [{"stack": "te-hoper"}, {"framework": "jax"}, {"stack": 3}])
def test_unknown_stacks_and_frameworks_are_errors(bad: dict[str, object]) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as found:
        estimate(**bad)
    assert found.value.hint


# --- FSDP


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_exposed_transfers_are_between_the_hard_limit_and_all_of_them(moved_s: float, pass_s: float) -> None:
    from hpgo.llm.layer_time import _exposed_s

    exposed_s = _exposed_s(moved_s, pass_s)
    assert exposed_s == hypot(moved_s, pass_s) - pass_s
    assert max(0.0, moved_s - pass_s) <= exposed_s + 1e-12
    assert exposed_s <= moved_s + 1e-12


def test_ring_latency_grows_with_the_ranks() -> None:
    one = terms(estimate(zero_stage=3, devices=64, global_batch_size=64))["param_all_gather"]
    two = terms(estimate(zero_stage=3, devices=128, global_batch_size=128))["param_all_gather"]
    assert two > one


def test_hybrid_shards_gather_inside_a_node_and_need_more_memory() -> None:
    whole, hybrid = (estimate(zero_stage=3, dp_replicate=groups) for groups in (1, 16))
    assert hybrid.fullest.peak_bytes > whole.fullest.peak_bytes
    assert dict(hybrid.fullest.memory_bytes)["optimizer"] == pytest.approx(
        16 * dict(whole.fullest.memory_bytes)["optimizer"]
    )
    slow = hpgo.Cluster.preset("h100:16", adapter_gbit_s=25)
    whole, hybrid = (estimate(cluster=slow, zero_stage=3, dp_replicate=groups) for groups in (1, 16))
    assert hybrid.step_s < whole.step_s, "only shards of gradients cross the nodes"


def test_hybrid_shards_must_divide_the_replicas() -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="dp_replicate"):
        estimate(zero_stage=3, dp_replicate=3)
    with pytest.raises(hpgo.errors.ArgumentError, match="dp_replicate"):
        estimate(zero_stage=0, dp_replicate=2)


def test_frameworks_of_fsdp_agree_only_where_their_messages_do() -> None:
    titan = estimate(zero_stage=3, dtensor=True, stack="torchtitan")
    other = estimate(zero_stage=3, stack="deepspeed")
    assert terms(titan)["param_all_gather"] != terms(other)["param_all_gather"]
    alike = [estimate(zero_stage=1, dtensor=True, tp=8, stack=name) for name in ("torchtitan", "deepspeed")]
    assert alike[0].step_s == alike[1].step_s, "without gathers, their messages are equal"


# --- recomputation


def test_selected_operations_cost_less_time_and_more_memory_than_all() -> None:
    none, some, every = (estimate(recompute=kind) for kind in ("none", "selective_op", "full"))
    assert none.step_s < some.step_s < every.step_s
    assert none.fullest.peak_bytes > some.fullest.peak_bytes > every.fullest.peak_bytes


def test_every_nth_layer_is_that_share_of_full_recomputation() -> None:
    none, half, full = (
        estimate(recompute=kind, recompute_every=n) for kind, n in (("none", None), ("full", 2), ("full", None))
    )
    assert half.step_s == pytest.approx((none.step_s + full.step_s) / 2, rel=0.01)
    assert estimate(recompute="full", recompute_num_layers=16).step_s == half.step_s
    with pytest.raises(hpgo.errors.ArgumentError, match="recompute_every"):
        estimate(recompute="none", recompute_every=2)


@pytest.mark.parametrize("name", ["recompute_num_layers", "recompute_every", "cpu_offload_num_layers"])
def test_numbers_of_layers_that_no_stage_has_are_refused(name: str) -> None:
    kind = "none" if name == "cpu_offload_num_layers" else "full"
    estimate(recompute=kind, **{name: 32})
    with pytest.raises(hpgo.errors.ArgumentError, match=f"{name} is 33, but a stage has at most 32 layers"):
        estimate(recompute=kind, **{name: 33})


# --- ranges


def test_ranges_are_wider_for_unseen_devices_wide_fsdp_and_experts() -> None:
    def width(**changes) -> float:
        one = estimate(**changes)
        assert one.low_s <= one.step_s <= one.high_s
        return log(one.high_s / one.low_s) / 2

    dense = width(framework="megatron", tp=4)
    assert dense == pytest.approx(QUANTILE * hypot(STEP_SD["dense"], 0.05))
    assert width(framework="megatron", cluster="h200:16", tp=4) > dense
    assert width(zero_stage=3, devices=128) > width(tp=4)
    assert width(zero_stage=3, cluster="h100:32") == pytest.approx(QUANTILE * hypot(WIDE_FSDP_SD, 0.05))
    assert width(transformer="mixtral-8x7b", ep=8, framework="megatron") > width(zero_stage=3, cluster="h100:32")


@given(st.floats(0.01, 0.5), st.floats(-0.5, 0.5))
def test_a_known_bias_widens_one_end_only(sd: float, bias: float) -> None:
    (low, high), (plain_low, plain_high) = step_range(1.0, sd, bias), step_range(1.0, sd)
    assert low <= plain_low
    assert high >= plain_high
    # A measurement at the bias's place lies in the range.
    assert low <= exp(-bias) <= high


def test_every_known_bias_has_a_reason_and_widens_the_range() -> None:
    listed = [one for stack in stacks().values() for one in stack.known_biases]
    assert listed
    assert all(len(one.reason.split()) > 5 and one.log_ratio for one in listed)


# --- frameworks of an estimate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": "megatron", "zero_stage": 2}, "Megatron-LM supports ZeRO stage 0, 1 or 3, not 2"),
        ({"framework": "torchtitan", "zero_stage": 1}, "torchtitan supports ZeRO stage"),
        ({"framework": "torchtitan", "precision": "fp8"}, "torchtitan supports precision bf16 here, not fp8"),
        ({"framework": "deepspeed", "tp": 2, "pp": 2}, "DeepSpeed runs no pipeline beside tp, but tp is 2 and pp is 2"),
        ({"framework": "deepspeed", "tp": 2, "sequence_parallel": True}, "DeepSpeed has no sequence parallelism"),
        ({"framework": "deepspeed", "tp": 2, "lora_rank": 8}, "DeepSpeed divides no matrices with adapters"),
        (
            {"framework": "deepspeed", "tp": 2, "transformer": SANDWICHED},
            "DeepSpeed divides matrices of Llama, Mistral, Qwen2 and Qwen3 here, but tp is 2 for `llama-3-8b`",
        ),
        ({"framework": "torchtitan@0.2", "transformer": "mixtral-8x7b"}, "torchtitan has no settings for experts"),
        ({"framework": "torchtitan@0.3", "recompute": "selective"}, "torchtitan supports recompute none or full"),
    ],
)
def test_an_estimate_for_a_framework_is_refused_as_its_plans_are(changes: dict[str, object], message: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=message) as found:
        estimate(**changes)
    assert found.value.hint
    assert estimate(**changes | {"framework": None}).step_s > 0


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed"])
def test_the_best_configuration_of_a_search_has_the_same_estimate_for_its_framework(framework: str) -> None:
    asked = {"global_batch_size": 64, "seq_length": 8192, "cluster": "h100:2", "framework": framework}
    best = hpgo.plan_llm("llama-3-8b", top=1, **asked).best
    config = best.parallelism
    given = {name: getattr(config, name) for name in ("tp", "cp", "pp", "vpp", "micro_batch_size", "recompute")}
    ends = {"first_rank_layers": config.first_rank_layers, "last_rank_layers": config.last_rank_layers}
    again = estimate(**asked, **given, **ends, zero_stage=config.zero_stage, pp_schedule=config.pp_schedule)
    assert again == best


def test_the_zero_stage_of_an_estimate_is_one_that_the_framework_runs() -> None:
    stages = {name: estimate(framework=name).parallelism.zero_stage for name in (None, "megatron", "torchtitan")}
    assert stages == {None: 1, "megatron": 1, "torchtitan": 3}
    assert estimate(framework="torchtitan", tp=4, pp=2).parallelism.zero_stage == 2
    alone = estimate(framework="megatron", tp=8, devices=8, zero_stage=1).parallelism
    assert (alone.dp, alone.zero_stage) == (1, 0)
    assert estimate(framework="nemo", zero_stage=3).parallelism.zero_stage == 3, "it implies a stack only"
    assert estimate(framework="torchtitan", recompute="selective_op").parallelism.recompute == "selective_op"
