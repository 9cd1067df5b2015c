"""Megatron-LM: a way of training a transformer as arguments of its command line, the model's shape included."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.base.units import format_bytes
from hpgo.export.for_megatron import CLIPPING, layout
from hpgo.export.ways import WayJob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.export.targets import Place, Target
    from hpgo.planning.way_plans import WayPlan

_PADDED = 128
"""To a multiple of so many, times those that share a matrix, the vocabulary is padded."""
_NATIVE_LOSS_BYTES = 2
"""Bytes per logit that the native loss fusion holds beyond the price: fp32 softmax and bf16 gradient (6) instead of 4.

Source: Megatron-LM 0.19, `megatron/core/fusions/fused_cross_entropy.py`.
"""
_UNFUSED = ("masked-softmax", "bias-gelu", "bias-swiglu", "bias-dropout", "rope")


def arguments(plan: WayPlan, target: Target, place: Place) -> dict[str, str]:
    """One argument a line, each quoted for a shell, under comments."""
    job = WayJob.of(plan, target, place)
    job.check_shape(plain=False, told=True)
    sections = (
        _model(job),
        _attention(job),
        _experts(job),
        _parallel(job),
        _batch(job),
        _memory(job),
        _precision(job),
        _overlap(job),
    )
    words = [
        f"--{key}{'' if value is True else f' {in_shell(str(value))}'}"
        for section in sections
        for key, value in section.items()
        if value is not False
    ]
    comments = job.header("pass them on: grep -v '^#' FILE | xargs torchrun ... pretrain_gpt.py ...", *_notes(job))
    return {place.main or "arguments.txt": "\n".join([*(f"# {line}" for line in comments), *words]) + "\n"}


def _model(job: WayJob) -> dict[str, int | str | bool]:
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
        "max-position-embeddings": model.positions or job.plan.price.seq,
        "vocab-size": model.vocab,
        "untie-embeddings-and-output-weights": not model.tied,
        "mtp-num-layers": model.further_tokens or False,
    }


def _attention(job: WayJob) -> dict[str, int | str | bool]:
    model, latent = job.model, job.model.latent
    shares_keys = model.kv_heads != model.heads
    told: dict[str, int | str | bool] = {}
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


def _experts(job: WayJob) -> dict[str, int | str | bool]:
    model, way = job.model, job.way
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
        "expert-model-parallel-size": way.expert,
        "expert-tensor-parallel-size": 1,
    }


def _pattern(layers: Iterable[bool]) -> str:
    """Which layers are of a kind, in Megatron's words.

    >>> _pattern([False] * 3 + [True] * 58)
    '[0]*3+[1]*58'
    """
    return "+".join(f"[{int(one)}]*{len(list(held))}" for one, held in groupby(layers))


def _parallel(job: WayJob) -> dict[str, int | str | bool]:
    way = job.way
    told: dict[str, int | str | bool] = {
        "tensor-model-parallel-size": way.tensor,
        "sequence-parallel": way.sequence,
        "context-parallel-size": way.context,
        "pipeline-model-parallel-size": way.pipeline,
    }
    if way.context > 1:
        told["cp-comm-type"] = "p2p"
    if way.pipeline > 1:
        told["pipeline-model-parallel-layout"] = layout(job.counts, job.model.further_tokens)
    return told


def _batch(job: WayJob) -> dict[str, int | str | bool]:
    price = job.plan.price
    return {
        "micro-batch-size": price.way.micro_batch_size,
        "global-batch-size": price.global_batch_size,
        "seq-length": price.seq,
    }


def _memory(job: WayJob) -> dict[str, int | str | bool]:
    way = job.way
    told: dict[str, int | str | bool] = {"use-distributed-optimizer": way.zero == 1}
    if way.recompute == "selective":
        told["recompute-granularity"] = "selective"
    elif way.recompute == "full":
        # Groups of one layer keep the input of each, as priced; `block` recomputes so many of each stage.
        some = way.recompute_layers
        told |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if some is None else "block",
            "recompute-num-layers": some or 1,
        }
    return told | {"cpu-offloading": way.offload_layers > 0, "cpu-offloading-num-layers": way.offload_layers or False}


def _precision(job: WayJob) -> dict[str, int | str | bool]:
    way = job.way
    told: dict[str, int | str | bool] = {
        "bf16": way.precision != "fp16",
        "fp16": way.precision == "fp16",
        "accumulate-allreduce-grads-in-fp32": way.precision != "fp16" and not way.narrow_gradients,
        "grad-reduce-in-bf16": way.narrow_gradients and way.precision != "fp16",
        "cross-entropy-loss-fusion": way.fused_loss,
        # Megatron-LM 0.18 and later refuse Transformer Engine's kernel.
        "cross-entropy-fusion-impl": "native" if way.fused_loss else False,
        "attention-backend": "auto" if way.flash else "unfused",
    }
    if way.precision == "fp8":
        # Weights stay in 8 bits, in two orders, which is as much as they take in 16.
        told |= {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "fp8-param-gather": way.zero == 1}
    elif way.precision == "fp4":
        told["fp4-format"] = "e2m1"
    if way.flash:  # whose price has no dropout, which older stacks have
        told |= {"attention-dropout": "0.0", "hidden-dropout": "0.0"}
    return told | ({} if way.fused else {f"no-{name}-fusion": True for name in _UNFUSED})


def _overlap(job: WayJob) -> dict[str, int | str | bool]:
    way = job.way
    summed = way.overlap and way.shards > 1
    return {"overlap-grad-reduce": summed, "overlap-param-gather": summed and way.zero == 1}


def _notes(job: WayJob) -> list[str]:
    way, model, seq = job.way, job.model, job.plan.price.seq
    notes = [CLIPPING.format("--clip-grad")]
    if way.flash:
        notes.append("attention is priced as one kernel, flash's or cuDNN's: --attention-backend picks one")
    if way.fused_loss:
        more_bytes = _NATIVE_LOSS_BYTES * (1 + model.further_tokens) * way.micro_batch_size * seq * model.vocab
        more = format_bytes(more_bytes / way.context / way.tensor)
        notes.append(f"the native loss keeps the softmax in fp32: the last stage needs about {more} more than priced")
    padded = -(-model.vocab // (_PADDED * way.tensor)) * _PADDED * way.tensor
    if padded != model.vocab:
        notes.append(f"the vocabulary is padded to {padded} words, and priced as {model.vocab}")
    if not model.positions:
        notes.append("positions turn queries and keys: --rotary-base and the like are for you to say")
    elif model.positions < seq:
        notes.append(f"there are {model.positions} learned positions, and sequences of {seq} tokens")
    if (model.attention_bias == "all") != model.ffn_bias:
        notes.append("matrices add vectors in attention or in feed-forward networks alone, which no argument says")
    if model.further_tokens:
        notes.append("how much losses of further tokens count is for you to say: --mtp-loss-scaling-factor")
    if model.experts:
        notes += [
            "experts are priced as having equally many tokens: how a router scores and balances is for you to say",
            "between machines each token is priced to go once to each: --moe-token-dispatcher-type flex does so",
        ]
    if way.precision in {"fp8", "fp4"} and not (way.precision == "fp8" and way.zero == 1):
        notes.append("copies of weights in fewer bits, which Transformer Engine keeps beside them, are not priced")
    if way.tensor > 1 or way.context > 1:
        notes.append("before Blackwell, it asks for CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")
    if way.tensor > 1:
        notes.append("exchange of tensor parallelism is priced as not hidden: --tp-comm-overlap may hide some of it")
    return notes
