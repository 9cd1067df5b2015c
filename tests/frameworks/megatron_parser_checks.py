"""Plans exported for Megatron-LM, read by the parser and the validation of one of its releases.

The parser is in no wheel. `run.py` runs this file once per release, with the release's sources first on the path.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import shlex
import sys
import typing
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import typing_extensions

# Megatron-LM 0.18 and later are written for Python 3.12, and need nothing else of it to parse arguments.
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

from cases import Case, cases, outcome, tally
from megatron.core.package_info import __shortversion__ as release
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron_checks import SCHEDULES, compare, compare_way, reasons, some_model
from results import Result, done
from ways import GPUS, WayCase, files_of, ways
from ways import refused_by as refused_way
from ways import tally as tally_ways

import hpgo
from hpgo.model.transformer_presets import TRANSFORMERS

SMOKE = (
    "--lr", "1e-4", "--train-iters", "1", "--tokenizer-type", "NullTokenizer", "--transformer-impl", "local",
    "--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-rope-fusion",
)  # fmt: skip
"""Arguments that an export leaves to its user; and no fused kernels, which need a GPU."""


def parsed(case: Case) -> bool:
    """Whether Megatron-LM's own parser and checks understand the arguments as the case means them."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    files = outcome(case.given, "megatron", reasons(case))
    if files is None:
        return False
    os.environ.update(RANK="0", WORLD_SIZE=str(len(case.grid)), CUDA_DEVICE_MAX_CONNECTIONS="1")
    # What an export leaves to its user: a model, a length, a tokenizer; and no fused kernels, which need a GPU.
    sys.argv = ["pretrain_gpt.py", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8",
                "--max-position-embeddings", "8", "--lr", "1e-4", "--train-iters", "1", "--vocab-size", "32",
                "--tokenizer-type", "NullTokenizer", "--transformer-impl", "local", "--no-persist-layer-norm",
                "--no-gradient-accumulation-fusion", *shlex.split(files["arguments.txt"], comments=True)]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = validate_args(parse_args())
        compare(case, core_transformer_config_from_args(arguments))
    assert arguments.data_parallel_size == case.replicas[0]
    micro_batches = arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size)
    assert (arguments.micro_batch_size, micro_batches) == (case.share, case.micro_batches)
    assert bool(arguments.use_distributed_optimizer) == bool(case.zero_stage)
    if case.bits is not None:
        weights, sums = case.bits
        assert arguments.params_dtype == (torch.bfloat16 if weights == 16 else torch.float32)
        assert arguments.accumulate_allreduce_grads_in_fp32 == (case.bits == (16, 32))
        assert arguments.grad_reduce_in_bf16 == (sums == 16)
        assert arguments.optimizer == case.optimizer.partition("-")[0]
        assert case.optimizer != "sgd" or arguments.sgd_momentum == 0
    return True


def parsed_way(case: WayCase) -> bool:
    """Whether Megatron-LM's own parser and checks understand the arguments as the way means them."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    files = files_of(case, "megatron", refused_way("megatron", case))
    if files is None:
        return False
    os.environ.update(RANK="0", WORLD_SIZE=str(case.gpus), CUDA_DEVICE_MAX_CONNECTIONS="1")
    if case.shared_stage == 3:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]  # The arguments say that Megatron-FSDP refuses it.
    sys.argv = ["pretrain_gpt.py", *SMOKE, *shlex.split(files["arguments.txt"], comments=True)]
    # Experts in 8 bits ask which Transformer Engine there is, and there is none.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch("megatron.core.transformer.transformer_config.is_te_min_version", return_value=True),
    ):
        arguments = validate_args(parse_args())
        compare_way(case, core_transformer_config_from_args(arguments))
    assert arguments.data_parallel_size == case.dp
    micro_batches = arguments.global_batch_size // (arguments.micro_batch_size * arguments.data_parallel_size)
    assert (arguments.micro_batch_size, micro_batches) == (case.micro_batch_size, case.micro_batches)
    assert (arguments.seq_length, arguments.vocab_size) == (case.seq_length, case.model.vocab)
    assert arguments.untie_embeddings_and_output_weights != case.model.tied
    assert bool(arguments.use_distributed_optimizer) == (case.shared_stage > 0)
    assert bool(arguments.use_megatron_fsdp) == (case.shared_stage == 3)
    assert arguments.accumulate_allreduce_grads_in_fp32 == (case.precision != "fp16")
    return True


def parsed_model(name: str) -> bool:
    """Whether Megatron-LM builds the arithmetic of a built-in model, field by field; False if the export refuses it."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    whole = TRANSFORMERS[name]
    if (told := whole.arithmetic) is None:
        return False
    ends = {field: tuple(at for at in getattr(whole, field) if at < 2) for field in ("dense_layers", "window_layers")}
    small = {"ffn": min(whole.ffn, 1024), "expert_ffn": min(whole.expert_ffn, 64)}
    model = replace(whole, layers=2, vocab=1024, **small, **ends)  # one GPU has room for it
    price = hpgo.estimate_llm(model, GPUS, devices=1, zero_stage=0, global_batch_size=1, seq_length=128)
    plan = hpgo.LlmPlan.of(price, model, GPUS)
    try:
        files = hpgo.export.files(plan, "megatron")
    except hpgo.errors.ArgumentError:
        return False
    os.environ.update(RANK="0", WORLD_SIZE="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *SMOKE, *shlex.split(files["arguments.txt"], comments=True)]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch("megatron.core.transformer.transformer_config.is_te_min_version", return_value=True),
    ):
        arguments = validate_args(parse_args())
        config = core_transformer_config_from_args(arguments)
    assert config.layernorm_epsilon == told.norm_epsilon
    assert config.layernorm_zero_centered_gamma == told.norm_adds_one
    assert (config.attention_dropout, config.hidden_dropout) == (told.attention_dropout, told.hidden_dropout)
    assert config.init_method_std == told.init_std
    if model.gated:
        assert config.activation_func is torch.nn.functional.silu
    else:
        assert config.activation_func is torch.nn.functional.gelu
        # The fused kernel computes the approximation by tanh.
        assert config.bias_activation_fusion == (told.activation in {"gelu_new", "gelu_pytorch_tanh"})
    compare_positions(model, arguments, config)
    if model.experts:
        compare_router(model, config)
    return True


def compare_positions(model: Any, arguments: Any, config: Any) -> None:
    """RoPE: theta, share of each head, scaling."""
    told, scaling = model.arithmetic, model.arithmetic.rope_scaling
    if told.rope_theta is None:
        assert arguments.position_embedding_type == "learned_absolute"
        return
    assert (arguments.position_embedding_type, arguments.rotary_base) == ("rope", told.rope_theta)
    assert arguments.rotary_percent == told.rotary_fraction
    if model.latent is not None:
        assert (config.rope_type, config.rotary_base) == ("yarn" if scaling else "rope", told.rope_theta)
        found = (config.rotary_scaling_factor, config.mscale, config.mscale_all_dim, config.beta_fast, config.beta_slow)
        assert found == (scaling.factor, scaling.mscale, scaling.mscale_all_dim, scaling.beta_fast, scaling.beta_slow)
        assert config.original_max_position_embeddings == scaling.original_max_position_embeddings
        return
    assert arguments.use_rope_scaling == (scaling is not None)
    if scaling is not None:
        assert arguments.rope_scaling_factor == scaling.factor


def compare_router(model: Any, config: Any) -> None:
    """Scores, their sum and factor, biases, and the loss that balances experts."""
    told = model.arithmetic
    assert config.moe_router_score_function == told.router_score
    assert (config.moe_router_topk_scaling_factor or 1) == told.router_scale
    assert bool(config.moe_router_enable_expert_bias) == told.router_bias
    if told.router_score == "softmax":
        assert config.moe_router_pre_softmax != told.router_normalizes
    kind = "seq_aux_loss" if told.router_aux_loss_per_sequence else "aux_loss"
    assert config.moe_router_load_balancing_type == (kind if told.router_aux_loss else "none")
    assert config.moe_aux_loss_coeff == told.router_aux_loss
    logits = torch.randn(16, model.experts, dtype=torch.float64)
    probabilities, chosen = topk_routing_with_score_function(
        logits,
        model.experts_per_token,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
    )
    assert torch.equal(chosen, probabilities > 0)
    scores = logits.softmax(-1) if told.router_score == "softmax" else logits.sigmoid()
    weights = torch.where(chosen, scores, 0.0)
    weights = weights / weights.sum(-1, keepdim=True) if told.router_normalizes else weights
    assert torch.allclose(probabilities, told.router_scale * weights, rtol=1e-6)


if __name__ == "__main__":
    # From 0.18 on, each parser reads the docstrings of its fields from sources, which takes longer than all else here.
    inspect.getsource, ast.parse = functools.cache(inspect.getsource), functools.cache(ast.parse)
    built = [name for name in TRANSFORMERS if parsed_model(name)]
    assert len(built) > len(TRANSFORMERS) / 2, f"too few built-in models are taken: {built}"
    read = tally(cases(200, SCHEDULES), parsed)
    read_ways = tally_ways(ways(200, some_model, often=(0, 1)), parsed_way)
    done(Result("megatron", f"the parser of Megatron-LM {release}", read, ways=read_ways))
