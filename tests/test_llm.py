"""What a way of sharing a transformer costs: laws of time and memory, and formulas of the papers they are from."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.hardware.cluster import Link
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import (
    estimate_config,
    in_flight,
    max_memory_bytes,
    model_flop,
    profile_of,
    schedule_of,
    stages_of,
)  # fmt: skip
from hpgo.llm.experts import PassTime
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.layer_time import EMBEDDING, HEAD, LAYER, Term, end_times, layer_times, layer_weights
from hpgo.llm.memory import (
    COLUMNS,
    MOVING,
    STATE,
    Column,
    PipelineRankLayers,
    allocator_cached_bytes,
    parameters,
    saved_activation_bytes,
    stage_memory,
)
from hpgo.llm.parallelism import ParallelismConfig, StateDtype, check_batch, check_degrees, stage_layers
from hpgo.llm.step_time import LABELS, LayerCosts, PipelineStages, transfer
from hpgo.model.transformer import PLAIN
from hpgo.show.llm_report import lines

GPT = hpgo.Transformer(
    layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, gated=False, vocab=51200, tied=True,
    centred_norms=True, attention_bias="all", ffn_bias=True, positions=2048,
)  # fmt: skip
LLAMA = hpgo.Transformer(
    layers=24, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=5632, vocab=32000, name="small-llama"
)
IDEAL = replace(
    CONSTANTS, gemm_efficiency=1.0, gemm_tile=1, gemm_overhead_s=0.0, unfused_attention_efficiency=1.0,
    attention_efficiency=1.0, layer_launch_s=0.0, collective_launch_s=0.0,
    collective_overhead_s=0.0, nvlink_efficiency=1.0, nic_efficiency=1.0, optimizer_bytes=0.0,
)  # fmt: skip
FAST = Gpus(1e12, 1e12, 1e12, 1e12, inf, 80e9, 64, 8, Link(1e18, 1e18), 1e18, 0.0)
"""A trillion operations a second, and all else at once."""


def context(model: hpgo.Transformer, config: ParallelismConfig, gpus: Gpus = FAST, seq: int = 2048) -> LayerContext:
    return LayerContext(model, config, gpus, IDEAL, seq)


# --- Against papers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [1, 4])
def test_operations_of_a_gpt_are_those_of_narayanan_et_al(b: int) -> None:
    """96·B·s·L·h²·(1 + s/6h + V/16Lh) with layers computed anew (arXiv 2104.04473, section 5.1)."""
    h, s, layers, words = GPT.hidden, 2048, GPT.layers, GPT.vocab
    config = ParallelismConfig(micro_batch_size=b, recompute="full", flash_attention=False, precision="fp16")
    only = PipelineStages(context(GPT, config), 1).stages[0]
    theirs = 96 * b * s * layers * h * h * (1 + s / (6 * h) + words / (16 * layers * h))
    assert (only.forward_s + only.backward_s) * 1e12 == pytest.approx(theirs)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_of_a_gpt_are_those_of_korthikanti_et_al(t: int) -> None:
    """Table 2 of arXiv 2205.05198."""
    s, b, h, a = 2048, 4, GPT.hidden, GPT.heads
    config = ParallelismConfig(tp=t, micro_batch_size=b, flash_attention=False, precision="fp16")
    assert saved_activation_bytes(context(GPT, config), recomputed=False) == s * b * h * (
        10 + 24 / t + 5 * a * s / (h * t)
    )
    assert saved_activation_bytes(context(GPT, config), recomputed=True) == 2 * s * b * h
    if t > 1:
        config = replace(config, sequence_parallel=True)
        assert saved_activation_bytes(context(GPT, config), recomputed=False) == s * b * h / t * (34 + 5 * a * s / h)
        assert (
            saved_activation_bytes(context(GPT, replace(config, recompute="selective")), recomputed=False)
            == 34 * s * b * h / t
        )


@pytest.mark.parametrize(
    ("precision", "zero", "each"),
    [
        ("bf16", 0, lambda d: 18), ("fp16", 0, lambda d: 16), ("bf16", 1, lambda d: 6 + 12 / d),
        ("fp16", 1, lambda d: 4 + 12 / d), ("bf16", 2, lambda d: 2 + 16 / d),
    ],
)  # fmt: skip
@pytest.mark.parametrize("d", [1, 8])
def test_state_of_a_parameter_is_that_of_zero(precision, zero, each, d: int) -> None:
    one = context(LLAMA, ParallelismConfig(dp=d, zero_stage=zero, precision=precision))
    part = PipelineStages(one, 1).rank_layers(0, 1)
    held = stage_memory(one, part)
    assert held["weights"] + held["gradients"] + held["optimizer"] == pytest.approx(parameters(one, part) * each(d))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_moments_in_bf16_take_four_bytes_of_a_parameter_less(zero: int, precision) -> None:
    def optimizer(moments: StateDtype) -> float:
        config = ParallelismConfig(
            zero_stage=zero, precision=precision, exp_avg_dtype=moments, exp_avg_sq_dtype=moments
        )
        one = estimate_config(LLAMA, hpgo.Cluster.preset("h100:1"), config, global_batch_size=8, seq_length=2048)
        return dict(one.stages[0].memory_bytes)["optimizer"]

    assert optimizer("fp32") - optimizer("bf16") == pytest.approx(4 * LLAMA.parameters / (8 if zero else 1))


def test_zero_3_keeps_16_bytes_of_a_share_and_gathers_two_layers() -> None:
    one = context(LLAMA, ParallelismConfig(dp=64, zero_stage=3))
    part = PipelineStages(one, 1).rank_layers(0, 1)
    held = stage_memory(one, part)
    state = held["weights"] + held["gradients"] + held["optimizer"]
    words = 2 * LLAMA.vocab * LLAMA.hidden * 2  # a layer of this model has fewer parameters
    assert state == pytest.approx(LLAMA.parameters * 16 / 64 + words)


def test_gradients_that_add_up_in_16_bits_are_widened_when_passes_are_done() -> None:
    """20 bytes a parameter, or 4 + 16/d (Megatron-LM, user guide, distributed optimizer), beside no activations."""
    for zero, d, each in ((0, 1, 20), (1, 8, 4 + 16 / 8)):
        one = context(LLAMA, ParallelismConfig(dp=d, zero_stage=zero, grad_reduce_in_bf16=True))
        busy, idle = (stage_memory(one, PipelineStages(one, 1).rank_layers(0, count)) for count in (64, 0))
        assert busy["optimizer_workspace"] == 0
        held = sum(size for name, size in idle.items() if name != "framework_overhead")
        assert held == pytest.approx(parameters(one, PipelineStages(one, 1).rank_layers(0, 0)) * each)


@pytest.mark.parametrize(("zero", "d"), [(0, 1), (1, 1), (1, 8)])
def test_a_flat_update_copies_gradients_together_and_what_passes_left_is_too_small_for_it(zero: int, d: int) -> None:
    """8 bytes a parameter for 4: DeepSpeed's fused_optimizer.py, and stage_1_and_2.py with a bucket of 1 GB."""
    one = context(LLAMA, ParallelismConfig(dp=d, zero_stage=zero, precision="fp16", flatten_gradients=True))
    mine = parameters(one, PipelineStages(one, 1).rank_layers(0, 1)) / d
    made = 8 * mine + (1e9 if zero else 0)
    for count in (0, 1, 64):
        part = PipelineStages(one, 1).rank_layers(0, count)
        held = stage_memory(one, part)
        left = held["activations"] + held["logits"]
        assert held["optimizer_workspace"] == pytest.approx(max(0, made - left))
        assert allocator_cached_bytes(one, part) == pytest.approx(min(made, left))


def test_replicas_that_share_16_bit_weights_keep_16_bytes_of_their_part_as_those_in_32() -> None:
    for narrow in (False, True):
        one = context(LLAMA, ParallelismConfig(dp=64, zero_stage=3, grad_reduce_in_bf16=narrow))
        held = stage_memory(one, PipelineStages(one, 1).rank_layers(0, 1))
        gathered = 2 * LLAMA.vocab * LLAMA.hidden * 2
        state = held["weights"] + held["gradients"] + held["optimizer"] - gathered
        assert state == pytest.approx(16 * LLAMA.parameters / 64)


def test_dtensor_keeps_inputs_gathered_and_fsdp2_lays_out_a_layers_gradient_once_more() -> None:
    """As autograd saved them of a layer under torchtitan's plan, compiled or not: not gathered anew as by Megatron."""
    tokens, h, t = 2048, LLAMA.hidden, 8
    for sequence in (True, False):
        config = ParallelismConfig(
            tp=t, sequence_parallel=sequence, dp=4, zero_stage=2, cross_entropy_fusion_impl="compiled"
        )
        usual, theirs = (context(LLAMA, replace(config, dtensor=dtensor)) for dtensor in (False, True))
        more = saved_activation_bytes(theirs, recomputed=False) - saved_activation_bytes(usual, recomputed=False)
        assert more == pytest.approx(4 * tokens * h * (1 - 1 / t) if sequence else 0)
        assert saved_activation_bytes(theirs, recomputed=True) == saved_activation_bytes(usual, recomputed=True)
        held, before = (stage_memory(one, PipelineStages(one, 1).rank_layers(0, 1)) for one in (theirs, usual))
        assert held["logits"] - before["logits"] == pytest.approx(more / 2)
        assert held["grad_reduce_buffer"] == 4 * layer_weights(theirs)
        assert before["grad_reduce_buffer"] == stage_memory(context(LLAMA, ParallelismConfig(dp=4, zero_stage=1,
        dtensor=True)), PipelineRankLayers.from_layers(
            (PLAIN,), embedding=False, head=False, in_flight=(1,), recomputed=(False,)
        ))["grad_reduce_buffer"] == 0  # fmt: skip


def test_a_loss_over_parts_of_the_vocabulary_ends_with_four_values_a_logit() -> None:
    """x, its exponential, the gradient, their sum: `_nll_loss_and_log_softmax_backward` of PyTorch's loss.py."""
    for t, each in ((1, 14), (2, 16)):
        one = context(LLAMA, ParallelismConfig(tp=t, fused_cross_entropy=False, dtensor=True))
        assert stage_memory(one, PipelineStages(one, 1).rank_layers(0, 1))["logits"] == each * 2048 * LLAMA.vocab / t


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        ({}, 6),
        ({"cross_entropy_fusion_impl": "native"}, 6),
        ({"cross_entropy_fusion_impl": "te"}, 2),
        ({"dtensor": True}, 4),
        ({"flatten_gradients": True}, 4),
        ({"dtensor": True, "cross_entropy_fusion_impl": "native"}, 6),
        ({"fused_cross_entropy": False}, 14),
        ({"fused_cross_entropy": False, "cross_entropy_fusion_impl": "te"}, 14),
    ],
)
def test_logits_take_what_the_implementation_of_the_loss_keeps(asked: dict[str, Any], each: int) -> None:
    one = context(LLAMA, ParallelismConfig(**asked))
    part = PipelineStages(one, 1).rank_layers(0, 1)
    assert stage_memory(one, part)["logits"] == each * 2048 * LLAMA.vocab


def test_the_loss_of_an_estimate_is_the_one_that_is_exported() -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    for asked, word in ((None, "native"), ("native", "native"), ("te", "te")):
        one = hpgo.estimate_llm(
            "llama-3-8b", cluster, global_batch_size=8, seq_length=4096, tp=2, cross_entropy_fusion_impl=asked
        )
        text = hpgo.export.files(hpgo.LlmPlan.of(one, "llama-3-8b", cluster), "megatron")["arguments.txt"]
        assert f"--cross-entropy-fusion-impl {word}\n" in text
        assert ("refuse the loss of Transformer Engine" in text) == (word == "te")


def test_values_that_wait_in_the_hosts_memory_take_none_of_a_gpu_and_time_that_passes_do_not_hide() -> None:
    asked = {"global_batch_size": 16, "seq_length": 8192, "zero_stage": 3}
    here, there = (
        hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), **asked, cpu_offload_num_layers=layers)
        for layers in (0, 20)
    )
    saved = dict(here.stages[0].memory_bytes)["activations"] - dict(there.stages[0].memory_bytes)["activations"]
    assert saved == pytest.approx(18 / 32 * dict(here.stages[0].memory_bytes)["activations"])  # two are at hand
    assert there.step_s > here.step_s
    assert "offload 20 layers" in there.parallelism.named()
    for other in ({"pp": 2, "zero_stage": 1}, {"recompute": "full"}):
        with pytest.raises(hpgo.errors.ArgumentError, match="cpu_offload_num_layers is 20"):
            hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("h100:1"), **asked | other, cpu_offload_num_layers=20)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_sum_over_two_machines_sends_everything_once_where_a_ring_sends_it_almost_twice(nodes: int) -> None:
    one = replace(
        context(LLAMA, ParallelismConfig()), gpus=Gpus.of(hpgo.Cluster.preset("a100:4", adapter_gbit_s=100), "bf16")
    )
    ring = one.gpus.ring(8 * nodes, 1)
    around_s = 2 * one.all_gather_s(ring, 1e9)
    spared_s = (2 * 15 / 16 - 1) * 1e9 / (8 * one.gpus.adapter_bytes_per_s * one.constants.nic_efficiency)
    assert one.all_reduce_s(ring, 1e9) == pytest.approx(around_s - (spared_s if nodes == 2 else 0.0))


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_each_step_of_a_context_parallel_ring_hides_its_message_behind_its_own_kernel(ranks: int) -> None:
    """Forward: one message less than kernels. Backward: one for each kernel, with gradients in all but the first."""
    gpus, config = Gpus.of(hpgo.Cluster.preset("h100:4"), "bf16"), ParallelismConfig(cp=ranks)
    one = LayerContext(LLAMA, config, gpus, replace(CONSTANTS, comm_overlap_fraction=0.01), 32768)
    link, latency_s = (gpus.adapter_bytes_per_s, 9.6e-6) if ranks > 8 else (gpus.inside.bytes_per_s, 3.4e-6)
    share = one.constants.nic_efficiency if ranks > 8 else one.constants.nvlink_efficiency
    sent_s = 2 * (32768 / ranks) * 2 * LLAMA.kv_heads * LLAMA.head_dim / (link * share)
    start_s = latency_s + one.constants.collective_overhead_s
    hidden = LAYER["attention"].time(one)
    forward_s, backward_s = (0.01 * each / ranks for each in hidden[:2])
    passes = LAYER["cp_comm"].time(one)
    assert passes.forward_s == pytest.approx((ranks - 1) * (sent_s + start_s - forward_s))
    ends_s, between_s = (count * sent_s + start_s - backward_s for count in (1, 2))
    assert passes.backward_s == pytest.approx(2 * ends_s + (ranks - 2) * between_s)


@pytest.mark.parametrize("flash", [True, False])
def test_attention_of_a_context_parallel_ring_starts_a_kernel_for_each_block(flash: bool) -> None:
    def attention_s(ranks: int, start_s: float) -> float:
        config = ParallelismConfig(cp=ranks, flash_attention=flash)
        constants = replace(IDEAL, gemm_overhead_s=start_s)
        return LAYER["attention"].time(LayerContext(LLAMA, config, FAST, constants, 2048)).forward_s

    kernels = 1 if flash else 2
    for ranks in (1, 2, 8):
        started_s = attention_s(ranks, 1e-3) - attention_s(ranks, 0.0)
        assert started_s == pytest.approx(1e-3 * ranks * kernels)
        assert attention_s(ranks, 0.0) == pytest.approx(attention_s(1, 0.0) / ranks)


@given(ranks=st.sampled_from([1, 2, 4, 8, 16]), window=st.sampled_from([0, 512]), late_s=st.floats(0, 1e-3))
def test_a_later_message_never_makes_context_parallelism_quicker(ranks: int, window: int, late_s: float) -> None:
    gpus = Gpus.of(hpgo.Cluster.preset("h100:4"), "bf16")
    config, kind = ParallelismConfig(cp=ranks), PLAIN._replace(window=window)
    late = replace(gpus, inside=replace(gpus.inside, latency_s=late_s), adapter_latency_s=late_s)
    at_once = replace(gpus, inside=replace(gpus.inside, latency_s=0.0), adapter_latency_s=0.0)
    slow, quick = (
        LAYER["cp_comm"].time(LayerContext(LLAMA, config, one, CONSTANTS, 4096, kind)) for one in (late, at_once)
    )
    assert slow.forward_s >= quick.forward_s >= 0.0
    assert slow.backward_s >= quick.backward_s >= 0.0
    assert ranks > 1 or slow == PassTime(0.0, 0.0)


def test_those_that_share_matrices_send_a_part_each_to_the_next_stage() -> None:
    busy = {t: transfer(context(LLAMA, ParallelismConfig(tp=t, pp=2)), dp=1) for t in (1, 8)}
    assert busy[8][0] == pytest.approx(busy[1][0] / 8)
    shared = transfer(context(LLAMA, ParallelismConfig(tp=8, sequence_parallel=True, pp=2)), dp=1)
    assert shared[0] == busy[8][0]
    assert shared[1] < busy[8][1]  # which gather what they sent in parts


# --- Laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(("pipeline", "vpp"), [(1, 1), (2, 1), (4, 3), (13, 1), (13, 2)])
def test_parameters_of_all_gpus_are_the_models(model, tensor: int, pipeline: int, vpp: int) -> None:
    config = ParallelismConfig(tp=tensor, pp=pipeline, vpp=vpp)
    stages = PipelineStages(context(model, config), pipeline)
    everywhere = tensor * sum(parameters(stages.context, stages.rank_layers(at, 1)) for at in range(config.num_stages))
    norms = model.parameters_by_part()["norms"]
    copies = (tensor - 1) * (norms + model.positions * model.hidden)
    copies += model.vocab * model.hidden if model.tied and pipeline > 1 else 0
    assert everywhere - copies == pytest.approx(model.parameters, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_v_has_a_matrix_once_that_is_embedding_and_head(zero: int) -> None:
    """One GPU has both ends, so that nothing is held twice, and nothing summed between them."""
    ask: dict[str, Any] = {"global_batch_size": 16, "seq_length": 2048, "pp": 4, "vpp": 2, "zero_stage": zero}
    on = hpgo.Cluster.preset("h100:1")
    tied, apart = (
        hpgo.estimate_llm(replace(LLAMA, tied=tied), on, pp_schedule="zb_v", fused_elementwise=False, **ask)
        for tied in (True, False)
    )
    words = LLAMA.vocab * LLAMA.hidden
    held = [sum(dict(one.stages[0].memory_bytes)[name] for name in STATE) for one in (tied, apart)]
    each = 18 if zero == 0 else 6 + 12 / 2
    assert held[1] - held[0] == pytest.approx(words * each)
    assert tied.stages[1:] == apart.stages[1:]
    assert tied.step_s <= apart.step_s
    looped = hpgo.estimate_llm(replace(LLAMA, tied=True), on, **ask)
    whole = hpgo.estimate_llm(LLAMA, on, **ask)
    # 1F1B has an end on each of two ranks, so both hold the matrix, tied or not. Only tied ends reduce its gradients.
    assert [one.memory_bytes for one in looped.stages] == [one.memory_bytes for one in whole.stages]
    assert looped.stages[0].communication_s > whole.stages[0].communication_s
    assert looped.step_s > whole.step_s


def test_memory_falls_as_degrees_rise() -> None:
    def held(config: ParallelismConfig) -> dict[str, float]:
        one = context(LLAMA, config)
        stages = PipelineStages(one, 64)
        return stage_memory(one, stages.rank_layers(0, in_flight(config, 0, 64)[0]))

    alone = held(ParallelismConfig())
    for t in (2, 4, 8):
        shared = held(ParallelismConfig(tp=t, sequence_parallel=True))
        assert shared["activations"] == pytest.approx(alone["activations"] / t)
        assert alone["weights"] / t < shared["weights"] < 1.01 * alone["weights"] / t
    for c in (2, 4, 8):
        shared = held(ParallelismConfig(cp=c))
        assert shared["activations"] == pytest.approx(alone["activations"] / c)
        assert shared["logits"] == pytest.approx(alone["logits"] / c)
        assert shared["weights"] == alone["weights"]
    for p in (2, 4, 8):
        shared = held(ParallelismConfig(pp=p))
        # As many layers fewer as micro-batches more.
        assert shared["activations"] == pytest.approx(alone["activations"])
        assert shared["weights"] < alone["weights"]
    for zero, column in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        assert (
            held(ParallelismConfig(dp=8, zero_stage=zero))[column]
            < held(ParallelismConfig(dp=8, zero_stage=zero - 1))[column]
        )
    each, recomputed = (
        saved_activation_bytes(context(LLAMA, ParallelismConfig()), recomputed=recomputed)
        for recomputed in (False, True)
    )
    for n in (6, 12, 24):
        partly = held(ParallelismConfig(recompute="full", recompute_num_layers=n))
        assert partly["activations"] == pytest.approx((24 - n) * each + n * recomputed + each)


def test_layers_given_as_a_profile_take_the_same_step() -> None:
    """Without degrees that share a layer, a way is nothing but a pipeline of its layers."""
    cluster = hpgo.Cluster.preset("h100:1")
    for pipeline, recomputed in ((2, "none"), (4, "full"), (8, "none")):
        config = ParallelismConfig(pp=pipeline, recompute=recomputed)
        one = estimate_config(
            LLAMA, cluster.first(pipeline), config, global_batch_size=16, seq_length=4096, constants=IDEAL
        )
        profile = profile_of(one, LLAMA, cluster, constants=IDEAL)
        counts = [24 // pipeline] * pipeline
        counts[0] += 1
        counts[-1] += 1
        plan = hpgo.evaluate(
            profile, cluster.first(pipeline), [(count, [at]) for at, count in enumerate(counts)],
            global_batch_size=16, pipeline_micro_batch_size=1, schedule="1f1b",
        )  # fmt: skip
        assert one.step_s == pytest.approx(plan.step_s, rel=1e-9)


def test_groups_of_gpus_are_a_profiles_devices() -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    one = hpgo.estimate_llm(LLAMA, cluster, global_batch_size=16, seq_length=4096, tp=4, pp=2)
    profile = profile_of(one, LLAMA, cluster)
    assert profile.gpus_per_device == 4
    held = sum(layer.parameter_bytes for layer in profile.layers) * 4
    assert LLAMA.parameters * 2 < held < 1.01 * LLAMA.parameters * 2


ways = st.builds(
    lambda tensor, sequence, context, pipeline, vpp, data, size, recomputed, zero, precision,
    split: ParallelismConfig(
        tp=tensor, sequence_parallel=sequence and tensor > 1, cp=context, pp=pipeline,
        vpp=vpp if pipeline > 1 else 1, dp=data, micro_batch_size=size, recompute=recomputed, zero_stage=zero,
        precision=precision,
    ) if split is None or pipeline == 1 else ParallelismConfig(
        tp=tensor, sequence_parallel=sequence and tensor > 1, cp=context, pp=pipeline, pp_schedule=split,
        vpp=2 if split == "zb_v" else max(2, vpp), dp=data, micro_batch_size=size, recompute=recomputed,
        zero_stage=zero,
        precision=precision,
    ),
    st.sampled_from([1, 2, 4, 8]), st.booleans(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 13]),
    st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
    st.sampled_from(["none", "selective", "full"]), st.integers(0, 3), st.sampled_from(["bf16", "fp8"]),
    st.sampled_from([None, None, "interleaved_zb", "zb_v"]),
)  # fmt: skip


@given(config=ways, rounds=st.integers(1, 4))
@settings(max_examples=120)
def test_no_step_is_quicker_than_its_bound_and_shares_add_up(config: ParallelismConfig, rounds: int) -> None:
    assume(stage_layers(LLAMA.layers, config.num_stages) is not None)
    cluster = hpgo.Cluster.preset(f"h100:{-(-config.world_size // 8)}").first(config.world_size)
    # Interleaving takes whole rounds; all else any number of micro-batches, one alone as well.
    batch = config.dp * config.micro_batch_size * rounds * (config.pp if config.vpp > 1 else 1)
    one = estimate_config(LLAMA, cluster, config, global_batch_size=batch, seq_length=4096)
    assert one.parallelism == config
    assert one.bound_s <= one.step_s * (1 + 1e-9)
    assert sum(seconds for _, seconds in one.time_by_term_s) == pytest.approx(one.step_s)
    assert sum(stop - start for stage in one.stages for start, stop in stage.layers) == LLAMA.layers
    assert 0 < one.utilization < 1


@given(config=ways, flags=st.tuples(st.booleans(), st.booleans(), st.booleans()), gpt=st.booleans())
def test_a_shape_has_all_that_a_layer_takes(
    config: ParallelismConfig, flags: tuple[bool, bool, bool], gpt: bool
) -> None:
    """A search times the layers of a shape once, for all ways that have it."""
    config = replace(config, flash_attention=flags[0], fused_elementwise=flags[1], overlap_dp_comm=flags[2])
    one = LayerContext(
        GPT if gpt else LLAMA, config, Gpus.of(hpgo.Cluster.preset("h100:32"), config.precision), CONSTANTS, 4096
    )
    costs = LayerCosts.from_context(one)
    for recomputed in (False, True):
        assert costs.layer[PLAIN, recomputed] == layer_times(one)[recomputed]
        assert saved_activation_bytes(costs.context, recomputed=recomputed) == saved_activation_bytes(
            one, recomputed=recomputed
        )
    assert (costs.head, costs.embedding) == (end_times(one, HEAD), end_times(one, EMBEDDING))
    assert LayerCosts.from_context(replace(one, config=config.shape)).context == costs.context


@given(config=ways, rounds=st.integers(1, 4))
@settings(max_examples=60)
def test_the_fullest_gpu_is_that_of_all(config: ParallelismConfig, rounds: int) -> None:
    assume(stage_layers(LLAMA.layers, config.num_stages) is not None)
    cluster = hpgo.Cluster.preset(f"h100:{-(-config.world_size // 8)}").first(config.world_size)
    asked = {"global_batch_size": config.dp * config.micro_batch_size * config.pp * rounds, "seq_length": 4096}
    stages = stages_of(LLAMA, cluster, config, **asked, constants=CONSTANTS)
    one = estimate_config(LLAMA, cluster, config, **asked)
    assert max_memory_bytes(stages) == max(stage.peak_bytes for stage in one.stages)


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_micro_batches_in_flight_are_those_of_the_orders(pipeline: int, vpp: int, rounds: int) -> None:
    built = hpgo.schedule(
        "1f1b" if vpp == 1 else "interleaved", ranks=pipeline, micro_batches=pipeline * rounds,
        virtual_stages_per_rank=None if vpp == 1 else vpp,
    )  # fmt: skip
    config = ParallelismConfig(pp=pipeline, vpp=vpp)
    ours = [sum(in_flight(config, rank, pipeline * rounds)) for rank in range(pipeline)]
    assert ours == built.peak_in_flight


@pytest.mark.parametrize(("schedule", "vpp"), [("interleaved_zb", 2), ("interleaved_zb", 3), ("zb_v", 2)])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_with_split_backward_passes_as_many_are_in_flight_as_in_the_orders(
    schedule: str, vpp: int, pipeline: int, rounds: int
) -> None:
    """Two rounds tell of any number of them, stage by stage."""
    config = ParallelismConfig(pp=pipeline, vpp=vpp, pp_schedule=schedule)
    built = schedule_of(config, pipeline * rounds)
    ours = [in_flight(config, rank, pipeline * rounds) for rank in range(pipeline)]
    assert list(map(sum, ours)) == built.peak_in_flight
    for rank, maximum in enumerate(ours):
        held = dict.fromkeys(config.stages_of(rank), 0)
        assert all(built.rank_of_stage[at] == rank for at in held)
        seen = set()
        for stage, kind in (re.match(r"(\d+)([FIW])", word).groups() for word in built.action_lists[rank]):
            held[int(stage)] += (kind == "F") - (kind == "W")
            seen.add(tuple(held.values()))
        assert maximum in seen


@pytest.mark.parametrize(("schedule", "vpp"), [("interleaved_zb", 2), ("zb_v", 2)])
@pytest.mark.parametrize("layers", [None, 1, 3])
def test_what_is_computed_anew_waits_for_gradients_of_weights(schedule: str, vpp: int, layers: int | None) -> None:
    """As the simulator holds it: of each micro-batch a stage's inputs from F on, all else from I to the end of W."""
    cluster = hpgo.Cluster.preset("h100:4")
    ask = {"global_batch_size": 12, "seq_length": 4096, "tp": 8, "pp": 4, "vpp": vpp, "pp_schedule": schedule}
    one = hpgo.estimate_llm(LLAMA, cluster, recompute="full", recompute_num_layers=layers, **ask)
    kept = hpgo.estimate_llm(LLAMA, cluster, **ask)
    each = LLAMA.layers // one.parallelism.num_stages
    recomputed = each if layers is None else layers
    all_of = LayerContext(LLAMA, one.parallelism, Gpus.of(cluster, "bf16"), CONSTANTS, 4096)
    inputs, everything = (
        saved_activation_bytes(all_of, recomputed=True),
        saved_activation_bytes(all_of, recomputed=False),
    )
    timeline = hpgo.simulate(
        schedule_of(one.parallelism, 12),
        memory=hpgo.StageBytes(
            activation_bytes=recomputed * inputs + (each - recomputed) * everything,
            recomputed_bytes=recomputed * (everything - inputs),
        ),
    )
    assert [dict(rank.memory_bytes)["activations"] for rank in one.stages] == pytest.approx(
        timeline.measures.peak_memory_bytes
    )
    # The repeated forward is part of gradients of inputs, which others wait for, and those of weights take no longer.
    whole, split = (
        LayerCosts.from_context(all_of).layer[PLAIN, True],
        LayerCosts.from_context(all_of).layer[PLAIN, False],
    )
    assert whole.weight_grad_s == split.weight_grad_s
    recompute_s = sum(rank.backward_s for rank in one.stages) - sum(rank.backward_s for rank in kept.stages)
    assert recompute_s == pytest.approx(
        recomputed * one.parallelism.num_stages * (whole.total_backward_s - split.total_backward_s)
    )
    assert one.step_s > kept.step_s


def test_split_backward_passes_fill_the_bubble_and_take_as_much() -> None:
    ask = {
        "global_batch_size": 16,
        "seq_length": 8192,
        "tp": 8,
        "pp": 8,
        "vpp": 2,
        "zero_stage": 2,
        "overlap_dp_comm": False,
    }
    cluster = hpgo.Cluster.preset("h100:8")
    whole, looped, folded = (
        hpgo.estimate_llm("llama-3-70b", cluster, pp_schedule=name, **ask)
        for name in ("1f1b", "interleaved_zb", "zb_v")
    )
    assert folded.step_s < looped.step_s < whole.step_s
    spent = [dict(one.time_by_term_s) for one in (whole, looped, folded)]
    assert spent[0]["bubble"] > spent[1]["bubble"] > spent[2]["bubble"]
    # The V has the embedding and the head on one rank, which has fewer layers for it; all of them are there once.
    assert folded.stages[0].layers == ((0, 5), (75, 80))
    every = sum(one.forward_s + one.backward_s for one in whole.stages)
    assert sum(one.forward_s + one.backward_s for one in folded.stages) == pytest.approx(every)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"pp_schedule": "zb_v"}, "vpp is 1, but zb_v needs 2 virtual stages per rank"),
        ({"pp_schedule": "interleaved_zb"}, "vpp is 1, but interleaved_zb needs 2 or more"),
        ({"pp_schedule": "zb_v", "vpp": 3}, "vpp is 3, but zb_v needs 2"),
        (
            {"pp_schedule": "zb_v", "vpp": 2, "last_rank_layers": 2},
            "zb_v places the first and the last stage on one rank",
        ),
        ({"pp_schedule": "gpipe"}, "pp_schedule of a ParallelismConfig is"),
    ],
)
def test_schedules_that_nobody_runs_are_refused(asked: dict[str, object], says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=says):
        ParallelismConfig(pp=4, **asked)


def test_less_to_do_never_takes_longer() -> None:
    cluster = hpgo.Cluster.preset("h100:1")

    def step_s(**how: object) -> float:
        return hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=16, seq_length=8192, tp=2, pp=2, **how).step_s

    usual = step_s()
    assert step_s(precision="fp8") < usual
    assert step_s(recompute="full") > step_s(recompute="full", recompute_num_layers=4) > usual
    assert step_s(overlap_dp_comm=False) > usual
    assert step_s(flash_attention=False) > usual
    assert step_s(fused_elementwise=False) > usual
    assert step_s(vpp=4) < usual
    slow = hpgo.Cluster.preset("h100:2", adapter_gbit_s=10)
    fast = hpgo.Cluster.preset("h100:2", adapter_gbit_s=400)
    many = {"global_batch_size": 16, "seq_length": 8192, "tp": 2}
    assert hpgo.estimate_llm("llama-3-8b", slow, **many).step_s > hpgo.estimate_llm("llama-3-8b", fast, **many).step_s


def test_utilization_counts_what_the_model_asks_for() -> None:
    """6 for each parameter and token, but the embedding's, and half of attention's scores."""
    model = hpgo.Transformer(**{field.name: getattr(LLAMA, field.name) for field in fields(LLAMA)})
    assert model_flop(model, 4096, 2) == pytest.approx(
        2 * 4096 * (6 * (model.parameters - model.vocab * model.hidden) + 6 * model.layers * 4096 * 2048)
    )


def test_a_group_that_leaves_its_machine_shares_adapters() -> None:
    gpus = Gpus.of(hpgo.Cluster.preset("h100:4"), "bf16")
    inside, across = gpus.ring(8, 1), gpus.ring(16, 1)
    assert not inside.across
    assert inside.bytes_per_s == 450e9
    assert across.across
    assert across.bytes_per_s == 8 * 50e9
    assert gpus.ring(4, 8).bytes_per_s == 50e9  # one of each machine
    rack = Gpus.of(hpgo.Cluster.preset("gb200:1"), "fp4")
    assert not rack.ring(72, 1).across


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says", "hint"),
    [
        ({"tp": 3}, "tp is 3, but it must divide the 32", "use `tp=2` or `tp=4`"),
        ({"tp": 16}, "tp is 16, but it must divide the 8 KV heads", "use `tp=8`"),
        (
            {"tp": 8, "devices": 12},
            "tp 8 x cp 1 x pp 1 is 8 GPUs, which does not divide 12",
            "use `devices=8` or `devices=16`",
        ),
        ({"tp": 4, "pp": 4, "devices": 8}, "tp 4 x cp 1 x pp 4 is 16 GPUs", "use `pp=2`"),
        (
            {"recompute": "full", "recompute_num_layers": 33, "devices": 8},
            "recompute_num_layers is 33, but a stage has at most 32 layers",
            "leave recompute_num_layers out",
        ),
        ({"pp": 5, "devices": 15}, "pp 5 does not divide the 32 layers", "use `pp=4` and `devices=16`"),
        ({"pp": 4, "vpp": 3}, "pp 4 with vpp 3 does not divide", "use `vpp=2` or `vpp=4`"),
        ({"micro_batch_size": 3}, "it must be a multiple of dp × micro-batch size = 16 × 3",
         "use `micro_batch_size=2` or `micro_batch_size=4`"),
        ({"global_batch_size": 2**32 - 1}, "global_batch_size is 4294967295, but it must be", "use `devices=15`"),
        ({"cp": 3, "devices": 3}, "cp 3 with tp 1 does not divide sequences of 8192", "use `cp=2` and `devices=2`"),
        ({"pp": 8, "vpp": 2, "micro_batch_size": 8},
         "the number of micro-batches is 4, but interleaving needs a multiple of pp 8", "vpp"),
        ({"vpp": 2}, "vpp is 2, but virtual stages need pp above 1", "`vpp=1`"),
        ({"first_rank_layers": 3}, "first_rank_layers is 3, but pp is 1",
        "leave first_rank_layers out"),
        ({"pp": 2, "first_rank_layers": 0}, "first_rank_layers is 0", "whole number"),
        ({"pp": 4, "last_rank_layers": 3}, "pp 4 (last rank: 3 layers) does not split the 32 layers",
        "leave first_rank_layers"),
        ({"sequence_parallel": True}, "sequence_parallel is on, but it needs tp above 1", "leave sequence_"),
        ({"recompute_num_layers": 2}, "recompute_num_layers is 2, but recompute is none",
        "use recompute='full'"),
        ({"precision": "fp4"}, "does not compute GEMMs in fp4", "bf16"),
        ({"precision": "int8"}, "there is no precision `int8`", "fp8"),
        ({"devices": 17}, "has 16 devices, not 17", "larger"),
        ({"seq_length": 0}, "seq_length is 0", "whole number"),
        ({"zero_stage": 4}, "zero_stage is 4", "0 to 3"),
    ],
)  # fmt: skip
def test_a_way_that_nobody_runs_is_refused_with_the_nearest_that_somebody_does(config, says: str, hint: str) -> None:
    asked = {"global_batch_size": 64, "seq_length": 8192} | config
    with pytest.raises(hpgo.errors.HpgoError) as caught:
        hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("h100"), **asked)
    assert says in caught.value.message
    assert hint in caught.value.message + caught.value.hint


def test_clusters_that_rates_are_not_known_of_are_refused() -> None:
    one = hpgo.Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=100, inter_gbit_s=10)
    with pytest.raises(
        hpgo.errors.ClusterError, match="not known how fast a device of type `device` computes"
    ) as caught:
        hpgo.estimate_llm("llama-3-8b", one, global_batch_size=64, seq_length=4096)
    assert "h100" in caught.value.hint
    mixed = replace(one, nodes=(one.nodes[0], replace(one.nodes[1], count=9)))
    with pytest.raises(hpgo.errors.ClusterError, match="differ"):
        hpgo.estimate_llm("llama-3-8b", mixed, global_batch_size=64, seq_length=4096)
    groups = replace(hpgo.Cluster.preset("h100"), gpus_per_device=4)
    with pytest.raises(hpgo.errors.ClusterError, match="is 4 GPUs"):
        hpgo.estimate_llm("llama-3-8b", groups, global_batch_size=64, seq_length=4096)
    with pytest.raises(hpgo.errors.ClusterError, match="does not compute in bf16"):
        hpgo.estimate_llm("llama-3-8b", hpgo.Cluster.preset("v100"), global_batch_size=64, seq_length=4096)


@given(layers=st.integers(1, 200), stages=st.integers(1, 200))
def test_stages_have_all_layers_and_differ_at_the_ends_alone(layers: int, stages: int) -> None:
    counts = stage_layers(layers, stages)
    if counts is None:
        assert layers % stages != 0
        assert stages == 1 or (layers + 2) % stages != 0
    else:
        assert sum(counts) == layers
        assert len(counts) == stages
        assert len(set(counts[1:-1])) <= 1
        assert min(counts) >= 0


def test_a_way_that_divides_is_accepted() -> None:
    config = ParallelismConfig(tp=8, sequence_parallel=True, cp=2, pp=4, vpp=3)
    check_degrees(LLAMA, config, seq_length=4096)
    check_batch(config, 8)


def test_the_page_on_terms_has_every_constant_as_it_is() -> None:
    page = (Path(__file__).parent.parent / "docs/cost-terms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\*\*)?`(\w+)`(?:\*\*)? \| ([^|]+) \|", page.split("## Constants")[1], re.MULTILINE)
    source = (Path(__file__).parent.parent / "python/hpgo/llm/constants.py").read_text(encoding="utf-8")
    fitted = set(re.findall(r'^    (\w+): float = .*\n    """Fitted\.', source, re.MULTILINE))
    assert [name for _, name, _ in rows] == [field.name for field in fields(CONSTANTS)]
    assert {name for mark, name, _ in rows if mark} == fitted
    for _, name, value in rows:
        assert float(value) == getattr(CONSTANTS, name)


def test_the_page_on_terms_has_every_key() -> None:
    page = (Path(__file__).parent.parent / "docs/cost-terms.md").read_text(encoding="utf-8")
    for key in LAYER:
        assert f"\n| `{key}`" in page
    for key in LABELS:
        assert f"`{key}`" in page
    for key in COLUMNS:
        assert f"\n| `{key}` |" in page


def test_a_term_is_written_once_and_is_in_estimates_bounds_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(context: LayerContext) -> PassTime:
        return PassTime(1e-3 * context.tokens / context.config.tp, 0.0)

    def large(context: LayerContext, held: PipelineRankLayers) -> float:
        return 1e9 * held.embedding

    cluster, ask = hpgo.Cluster.preset("h100:1"), {"global_batch_size": 8, "seq_length": 1024}
    before = hpgo.plan_llm(LLAMA, cluster, **ask, top=1).best
    monkeypatch.setitem(LAYER, "slow", Term("a slow term", slow))
    monkeypatch.setitem(COLUMNS, "large", Column("a large column", large))
    monkeypatch.setattr("hpgo.llm.bounds.MOVING", (*MOVING, "large"))
    monkeypatch.setitem(LABELS, "slow", "a slow term")
    found = hpgo.plan_llm(LLAMA, cluster, **ask, top=1).best
    assert found.step_s > before.step_s + 1e-3
    assert found.bound_s <= found.step_s
    assert dict(found.time_by_term_s)["slow"] > 0
    assert dict(found.stages[0].memory_bytes)["large"] == 1e9
    report = "\n".join(lines(found))
    assert "a slow term" in report
    assert "large" in report


def test_all_stages_of_a_way_stand_on_its_gpus() -> None:
    stages = stages_of(
        LLAMA, hpgo.Cluster.preset("h100"), ParallelismConfig(tp=2, pp=4), global_batch_size=16, seq_length=4096,
        constants=CONSTANTS,
    )  # fmt: skip
    assert stages.context.config.dp == 2
    assert [len(stage.layers) for stage in stages.stages] == [6, 6, 6, 6]


def test_progress_of_a_search_changes_nothing_and_can_end_it() -> None:
    ask = {"global_batch_size": 16, "seq_length": 4096}
    told: list[tuple[int, float]] = []
    found = hpgo.plan_llm(
        "llama-3-8b", "h100:1", progress=lambda bounded, step_s: told.append((bounded, step_s)), **ask
    )
    assert found == hpgo.plan_llm("llama-3-8b", "h100:1", **ask)
    assert min(step_s for _, step_s in told) == found.fastest.step_s
    assert max(bounded for bounded, _ in told) <= found.bounded

    def stop(bounded: int, step_s: float) -> None:
        if bounded > 3 and step_s < float("inf"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hpgo.plan_llm("llama-3-8b", "h100:1", progress=stop, **ask)
