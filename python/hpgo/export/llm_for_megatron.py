"""Megatron-LM: a way of training a transformer as arguments of its command line, the model's shape included."""

from __future__ import annotations

from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.base.units import format_bytes
from hpgo.export.for_megatron import CLIPPING, layout
from hpgo.export.llm_jobs import LlmExportJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.export.targets import Place, Target
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.arithmetic import Arithmetic
    from hpgo.model.transformer import Transformer

Value = int | float | str | bool | tuple[str, ...]

_PADDED = 128
"""To a multiple of so many, times those that share a matrix, the vocabulary is padded."""
_LEAST_DIVISOR = 8
"""Smallest multiple of words per GPU that is left without padding: matrix multiplications are slow for others.

Source: NVIDIA, Matrix Multiplication Background, on tensor cores and 16-byte alignment.
"""
_NATIVE_LOSS_BYTES = 2
"""Bytes per logit that the native loss fusion holds beyond the price: fp32 softmax and bf16 gradient (6) instead of 4.

Source: Megatron-LM 0.19, `megatron/core/fusions/fused_cross_entropy.py`.
"""
_UNFUSED = ("masked-softmax", "bias-gelu", "bias-swiglu", "bias-dropout", "rope")


def arguments(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """One argument a line, each quoted for a shell, under comments."""
    job = LlmExportJob.of(plan, target, place)
    sections = (
        _model(job),
        _attention(job),
        _experts(job),
        _parallel(job),
        _batch(job),
        _memory(job),
        _precision(job),
        _overlap(job),
        _arithmetic(job),
    )
    words = [
        f"--{key}{'' if value is True else f' {_words(value)}'}"
        for key, value in {name: value for section in sections for name, value in section.items()}.items()
        if value is not False
    ]
    comments = job.header("pass them on: grep -v '^#' FILE | xargs torchrun ... pretrain_gpt.py ...", *_notes(job))
    return {place.main or "arguments.txt": "\n".join([*(f"# {line}" for line in comments), *words]) + "\n"}


def _words(value: Value) -> str:
    return " ".join(in_shell(str(one)) for one in (value if isinstance(value, tuple) else (value,)))


def _arithmetic(job: LlmExportJob) -> dict[str, Value]:
    """Return the settings that change results and no price; those that a configuration states replace earlier ones."""
    return {"make-vocab-size-divisible-by": _divisor(job), **job.stated.settings}


def _divisor(job: LlmExportJob) -> int:
    """Return the largest divisor up to Megatron-LM's own that pads no vocabulary; its own if each pads."""
    divisor = gcd(job.model.vocab // job.config.tp, _PADDED) if job.model.vocab % job.config.tp == 0 else _PADDED
    return divisor if divisor >= _LEAST_DIVISOR else _PADDED


def _model(job: LlmExportJob) -> dict[str, Value]:
    model = job.model
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "ffn-hidden-size": model.ffn or model.expert_ffn,
        "swiglu": model.gated,
        "normalization": "LayerNorm" if model.centred_norms else "RMSNorm",
        "disable-bias-linear": model.attention_bias != "all" and not model.ffn_bias,
        "add-qkv-bias": model.attention_bias == "qkv" and not model.ffn_bias,
        "position-embedding-type": "learned_absolute" if model.positions else "rope",
        "max-position-embeddings": model.positions or job.plan.estimate.seq_length,
        "vocab-size": model.vocab,
        "untie-embeddings-and-output-weights": not model.tied,
        "mtp-num-layers": model.further_tokens or False,
    }


def _attention(job: LlmExportJob) -> dict[str, Value]:
    model, latent = job.model, job.model.latent
    shares_keys = model.kv_heads != model.heads
    told: dict[str, Value] = {}
    if latent is None:
        told |= {
            "kv-channels": model.head_dim,
            "group-query-attention": shares_keys,
            "num-query-groups": model.kv_heads if shares_keys else False,
            "qk-layernorm": model.head_norms,
        }
    else:
        told |= {
            "multi-latent-attention": True,
            "q-lora-rank": latent.q_rank or False,
            "kv-lora-rank": latent.kv_rank,
            "qk-head-dim": model.head_dim - latent.rope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
            "qk-layernorm": True,  # of the narrow vectors
        }
    if model.window_layers:
        # A token sees itself and those to its left.
        told |= {"window-size": f"{model.window - 1},0"}
        if len(model.window_layers) < model.layers:
            told["window-attn-skip-freq"] = _pattern(at in model.window_layers for at in range(model.layers))
    return told


def _experts(job: LlmExportJob) -> dict[str, Value]:
    model, config = job.model, job.config
    if not model.experts:
        return {}
    grouped = model.expert_groups > 1
    return {
        "num-experts": model.experts,
        "moe-layer-freq": _pattern(map(model.holds_experts, range(model.layers))) if model.dense_layers else False,
        "moe-ffn-hidden-size": model.expert_ffn,
        "moe-router-topk": model.experts_per_token,
        "moe-router-pre-softmax": model.experts_per_token == 1,  # over one expert it would be 1
        "moe-router-num-groups": model.expert_groups if grouped else False,
        "moe-router-group-topk": model.groups_per_token if grouped else False,
        "moe-shared-expert-intermediate-size": model.shared_ffn or False,
        "moe-shared-expert-gate": model.shared_gate,
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
        "expert-model-parallel-size": config.ep,
        "expert-tensor-parallel-size": 1,
    }


def _pattern(layers: Iterable[bool]) -> str:
    """Which layers are of a kind, in Megatron's words.

    >>> _pattern([False] * 3 + [True] * 58)
    '[0]*3+[1]*58'
    """
    return "+".join(f"[{int(one)}]*{len(list(held))}" for one, held in groupby(layers))


def _parallel(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    told: dict[str, Value] = {
        "tensor-model-parallel-size": config.tp,
        "sequence-parallel": config.sequence_parallel,
        "context-parallel-size": config.cp,
        "pipeline-model-parallel-size": config.pp,
    }
    if config.cp > 1:
        told["cp-comm-type"] = _exchange(job.model)
    if config.pp > 1:
        told["pipeline-model-parallel-layout"] = layout(job.counts, job.model.further_tokens)
    return told


def _exchange(model: Transformer) -> tuple[str, ...]:
    """Return how the layers exchange keys and values: one word for all, or one for each layer.

    Transformer Engine refuses p2p in layers with a window. Its a2a needs heads of keys that tp × cp divides, so
    all_gather is what all models have. Source: `attn_forward_func_with_cp` in
    `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py`, 2.9 to 2.18.
    """
    each = ["all_gather" if at in model.window_layers else "p2p" for at in range(model.layers)]
    return tuple(each) if len(set(each)) > 1 else (each[0],)


def _batch(job: LlmExportJob) -> dict[str, Value]:
    price = job.plan.estimate
    return {
        "micro-batch-size": price.parallelism.micro_batch_size,
        "global-batch-size": price.global_batch_size,
        "seq-length": price.seq_length,
    }


def _memory(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    told: dict[str, Value] = {"use-distributed-optimizer": config.zero_stage == 1}
    if config.recompute == "selective":
        told["recompute-granularity"] = "selective"
    elif config.recompute == "full":
        # Groups of one layer keep the input of each, as priced; `block` recomputes so many of each stage.
        some = config.recompute_num_layers
        told |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if some is None else "block",
            "recompute-num-layers": some or 1,
        }
    return told | {
        "cpu-offloading": config.cpu_offload_num_layers > 0,
        "cpu-offloading-num-layers": config.cpu_offload_num_layers or False,
    }


def _precision(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    told: dict[str, Value] = {
        "bf16": config.precision != "fp16",
        "fp16": config.precision == "fp16",
        "accumulate-allreduce-grads-in-fp32": config.precision != "fp16" and not config.grad_reduce_in_bf16,
        "grad-reduce-in-bf16": config.grad_reduce_in_bf16 and config.precision != "fp16",
        "cross-entropy-loss-fusion": config.fused_cross_entropy,
        # Megatron-LM 0.18 and later refuse Transformer Engine's kernel.
        "cross-entropy-fusion-impl": "native" if config.fused_cross_entropy else False,
        "attention-backend": "auto" if config.flash_attention else "unfused",
    }
    if config.precision == "fp8":
        # Weights stay in 8 bits, in two orders, which is as much as they take in 16.
        told |= {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "fp8-param-gather": config.zero_stage == 1}
    elif config.precision == "fp4":
        told["fp4-format"] = "e2m1"
    if config.flash_attention:  # whose price has no dropout, which older stacks have
        told |= {"attention-dropout": "0.0", "hidden-dropout": "0.0"}
    return told | ({} if config.fused_elementwise else {f"no-{name}-fusion": True for name in _UNFUSED})


def _overlap(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    summed = config.overlap_dp_comm and config.dp_cp_size > 1
    return {"overlap-grad-reduce": summed, "overlap-param-gather": summed and config.zero_stage == 1}


def _notes(job: LlmExportJob) -> list[str]:
    config, model, seq_length = job.config, job.model, job.plan.estimate.seq_length
    notes = [CLIPPING.format("--clip-grad")]
    if config.flash_attention:
        notes.append("attention is priced as one kernel, flash's or cuDNN's: --attention-backend picks one")
    if config.fused_cross_entropy:
        more_bytes = (
            _NATIVE_LOSS_BYTES * (1 + model.further_tokens) * config.micro_batch_size * seq_length * model.vocab
        )
        more = format_bytes(more_bytes / config.cp / config.tp)
        notes.append(f"the native loss keeps the softmax in fp32: the last stage needs about {more} more than priced")
    divisor = _divisor(job) * config.tp
    padded = -(-model.vocab // divisor) * divisor
    if padded != model.vocab:
        notes.append(f"the vocabulary is padded to {padded} words, and priced as {model.vocab}")
    notes += _defaults(model) if model.arithmetic is None else _priced_without(model.arithmetic)
    if model.positions and model.positions < seq_length:
        notes.append(f"there are {model.positions} learned positions, and sequences of {seq_length} tokens")
    if model.further_tokens:
        notes.append("how much losses of further tokens count is for you to say: --mtp-loss-scaling-factor")
    if model.experts:
        notes += [
            "experts are priced as having equally many tokens",
            "between machines each token is priced to go once to each: --moe-token-dispatcher-type flex does so",
        ]
    if config.precision in {"fp8", "fp4"} and not (config.precision == "fp8" and config.zero_stage == 1):
        notes.append("copies of weights in fewer bits, which Transformer Engine keeps beside them, are not priced")
    if config.tp > 1 or config.cp > 1:
        notes.append("before Blackwell, it asks for CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")
    if config.tp > 1:
        notes.append("exchange of tensor parallelism is priced as not hidden: --tp-comm-overlap may hide some of it")
    return notes


def _defaults(model: Transformer) -> list[str]:
    """Return the defaults that Megatron-LM trains where nobody stated the model's arithmetic."""
    rope = "" if model.positions else "--rotary-base 10000, --rotary-percent 1.0, "
    router = ", --moe-router-score-function softmax, --moe-aux-loss-coeff 0" if model.experts else ""
    activation = "SiLU (--swiglu)" if model.gated else "GELU"
    return [
        "the model states no values that change results alone, so these are Megatron-LM's defaults:",
        f"{rope}--norm-epsilon 1e-05, --init-method-std 0.02, {activation}{router}",
    ]


def _priced_without(arithmetic: Arithmetic) -> list[str]:
    """Return what the model's configuration states and the price leaves out."""
    shares = (arithmetic.attention_dropout, arithmetic.hidden_dropout, arithmetic.embedding_dropout)
    return ["dropout is not priced, and this model has some"] if any(shares) else []
