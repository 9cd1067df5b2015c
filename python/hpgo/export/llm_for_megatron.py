"""Export of plans of transformers to Megatron-LM: arguments of its command line, including the model's shape."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from hpgo.base.messages import join_words
from hpgo.base.quoting import in_shell
from hpgo.export.for_megatron import CLIPPING
from hpgo.export.llm_jobs import LlmExportJob
from hpgo.export.targets import Place
from hpgo.hardware.rates import key_of
from hpgo.llm.arithmetic import layers_text
from hpgo.llm.megatron_shape import letters, megatron_shape
from hpgo.llm.parallelism import MAX_ZERO
from hpgo.llm.pipeline_layout import layout_text
from hpgo.llm.stack import stacks

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.arithmetic import Arithmetic
    from hpgo.model.blocks import Block
    from hpgo.model.transformer import Transformer

Value = int | float | str | bool | tuple[str, ...]

_PADDED = 128
"""Megatron-LM's default of `--make-vocab-size-divisible-by`: it pads the vocabulary to a multiple of this × tp."""
_MIN_DIVISOR = 8
"""Smallest divisor of the vocabulary per GPU that is left without padding, since GEMMs of other sizes are slow.

Source: NVIDIA, Matrix Multiplication Background, on tensor cores and 16-byte alignment.
"""
_MTP_LOSS = 0.1
"""Weight of multi-token prediction losses, which no configuration states: Megatron-LM's default, and the last one of
DeepSeek-V3 (arXiv 2412.19437, 4.2)."""
_FLEX_BACKENDS = {
    "h100": "deepep", "h100-96": "deepep", "h200": "deepep", "h20": "deepep", "b200": "deepep", "b300": "deepep",
    "gb200": "hybridep", "gb300": "hybridep",
}  # fmt: skip
"""Backend of the flexible dispatcher, by key of `hpgo.hardware.rates`. DeepEP sends between nodes from Hopper on.

Only HybridEP runs on NVLink between hosts (Megatron-LM, `moe_flex_dispatcher_backend` in `transformer_config.py`).
"""
_BLACKWELL = ("b200", "b300", "gb200", "gb300", "rtx5090")
"""Keys of `hpgo.hardware.rates` for GPUs of the architecture Blackwell."""
_MAMBA_SPEC = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")
"""Module and name of the layers that `pretrain_mamba.py` builds, which 0.16 to 0.19 have."""
RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Minor releases that read the arguments."""
_SINCE = {
    "hybrid-layer-pattern": "0.17", "yarn-original-max-position-embeddings": "0.19",
}  # fmt: skip
"""First minor release with an option, where that is not the oldest of `RELEASES`."""
_UNFUSED = ("masked-softmax", "bias-gelu", "bias-swiglu", "bias-dropout", "rope")


def arguments(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """Return the arguments of the command line, one per line and quoted for a shell, after comments."""
    job = LlmExportJob.of(plan, target, place)
    words = [
        f"--{key}{'' if value is True else f' {_words(value)}'}"
        for key, value in settings_of(job).items()
        if value is not False
    ]
    script = script_of(plan)
    comments = job.header(f"pass them on: grep -v '^#' FILE | xargs torchrun ... {script} ...", *_notes(job))
    return {place.main or "arguments.txt": "\n".join([*(f"# {line}" for line in comments), *words]) + "\n"}


def settings_of(job: LlmExportJob) -> dict[str, Value]:
    """Return all options by name; False for those that are left out."""
    sections = (
        _model(job),
        _attention(job),
        _experts(job),
        _parallel(job),
        _batch(job),
        _memory(job),
        _precision(job),
        _overlap(job),
        _cuda_graphs(job),
        _arithmetic(job),
    )
    return {name: value for section in sections for name, value in section.items()}


def script_of(plan: LlmPlan) -> str:
    """Return the name of Megatron-LM's script that trains the model of a plan."""
    return "pretrain_mamba.py" if is_hybrid(plan.transformer) else "pretrain_gpt.py"


def max_connections(plan: LlmPlan) -> int | None:
    """Return the number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) that the plan's overlap needs; None for any.

    Several queues let the exchange of experts overlap with passes. Before Blackwell, Megatron Core needs a single one
    for tensor and context parallelism, which its FSDP refuses.
    """
    config = plan.estimate.parallelism
    if config.overlap_ep_comm:
        return 32
    is_before_blackwell = not (key_of(plan.cluster.nodes[0].device.name) or "").startswith(_BLACKWELL)
    needs_one = is_before_blackwell and (config.tp > 1 or config.cp > 1) and config.zero_stage < MAX_ZERO
    return 1 if needs_one else None


def releases_of(plan: LlmPlan, target: Target) -> tuple[str, ...]:
    """Return the minor releases of Megatron-LM that train the plan's model with the exported arguments."""
    return _releases(LlmExportJob.of(plan, target, Place()))


def _releases(job: LlmExportJob) -> tuple[str, ...]:
    settings, latent = settings_of(job), job.model.latent
    since = {release for name, release in _SINCE.items() if settings.get(name) not in {None, False}}
    if settings.get("experimental-attention-variant") and job.config.cp > 1:
        since.add("0.18")  # `TransformerConfig.__post_init__` refuses the two together before
    first = max((RELEASES.index(release) for release in since), default=0)
    # `QKNormConfigResolver` in `megatron/core/transformer/mla_qk_norm_config.py`, new in 0.19, adds a norm before the
    # queries of such models.
    last = RELEASES.index("0.18") if latent is not None and latent.q_rank is None else len(RELEASES) - 1
    return RELEASES[first : last + 1]


def _words(value: Value) -> str:
    return " ".join(in_shell(str(one)) for one in (value if isinstance(value, tuple) else (value,)))


def _arithmetic(job: LlmExportJob) -> dict[str, Value]:
    """Return the settings that change results but not the estimate. They replace earlier settings of the same name."""
    return {
        "make-vocab-size-divisible-by": _divisor(job),
        # Without it, Megatron-LM takes the size of the vocabulary from the tokenizer, which may have fewer words.
        "padded-vocab-size": _padded_vocab(job),
        **job.stated.settings,
    }


def _divisor(job: LlmExportJob) -> int:
    """Return the largest divisor up to Megatron-LM's default that needs no padding; the default if all need it."""
    # The estimate counts the vocabulary without padding, so avoid padding where it costs no speed.
    divisor = gcd(job.model.vocab // job.config.tp, _PADDED) if job.model.vocab % job.config.tp == 0 else _PADDED
    return divisor if divisor >= _MIN_DIVISOR else _PADDED


def _padded_vocab(job: LlmExportJob) -> int:
    divisor = _divisor(job) * job.config.tp
    return -(-job.model.vocab // divisor) * divisor


def _model(job: LlmExportJob) -> dict[str, Value]:
    model, shape = job.model, megatron_shape(job.model)
    attention, experts = shape.attention, shape.experts
    # A model without attention still needs a number of heads that tp divides.
    heads = attention.heads if attention is not None else shape.scan.heads if shape.scan is not None else model.heads
    return {
        "num-layers": model.layers if not shape.hybrid else False,
        **_pattern_of_letters(job),
        "hidden-size": model.hidden,
        "num-attention-heads": heads,
        "ffn-hidden-size": model.ffn or (experts.width if experts is not None else model.hidden),
        "swiglu": shape.gated,
        "normalization": "LayerNorm" if model.centred_norms else "RMSNorm",
        "disable-bias-linear": not shape.bias,
        "add-qkv-bias": attention is not None and attention.bias == "qkv",
        "position-embedding-type": _positions(model),
        "max-position-embeddings": model.positions or job.plan.estimate.seq_length,
        "vocab-size": model.vocab,
        "untie-embeddings-and-output-weights": not model.tied,
        "mtp-num-layers": model.further_tokens or False,
        "mtp-loss-scaling-factor": _MTP_LOSS if model.further_tokens else False,
    }


def _positions(model: Transformer) -> str:
    if model.positions:
        return "learned_absolute"
    return "none" if model.arithmetic is not None and model.arithmetic.rope_theta is None else "rope"


def _pattern_of_letters(job: LlmExportJob) -> dict[str, Value]:
    """Return the options of models that `pretrain_mamba.py` builds, whose pattern divides layers among stages, too."""
    shape, scan = megatron_shape(job.model), megatron_shape(job.model).scan
    if not shape.hybrid:
        return {}
    found: dict[str, Value] = {"hybrid-layer-pattern": letters(job.model, job.counts), "spec": _MAMBA_SPEC}
    if scan is not None:
        found |= {
            "mamba-state-dim": scan.key_dim,
            "mamba-head-dim": scan.value_dim,
            "mamba-num-heads": scan.heads,
            "mamba-num-groups": scan.groups,
        }
    return found


def is_hybrid(model: Transformer) -> bool:
    """Return whether `pretrain_mamba.py` builds the model, instead of `pretrain_gpt.py`.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> is_hybrid(TRANSFORMERS["llama-3-8b"])
    False
    """
    return megatron_shape(model).hybrid


def _attention(job: LlmExportJob) -> dict[str, Value]:
    model, shape = job.model, megatron_shape(job.model)
    attention, scan = shape.attention, shape.scan
    found: dict[str, Value] = {}
    if attention is None:
        return {"kv-channels": scan.value_dim} if scan is not None else found
    latent, shares_keys = attention.latent, attention.kv_heads != attention.heads
    if latent is None:
        found |= {
            "kv-channels": attention.head_dim,
            "group-query-attention": shares_keys,
            "num-query-groups": attention.kv_heads if shares_keys else False,
            "qk-layernorm": attention.head_norms,
        }
    else:
        found |= {
            "multi-latent-attention": True,
            "q-lora-rank": latent.q_rank or False,
            "kv-lora-rank": latent.kv_rank,
            "qk-head-dim": attention.head_dim - latent.rope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
            "qk-layernorm": True,  # for latent attention this norms the compressed vectors
        }
    found |= {"attention-output-gate": attention.gate, "softmax-type": "learnable" if attention.sinks else False}
    if scan is not None and not shape.hybrid:
        found |= {
            "experimental-attention-variant": "gated_delta_net",
            "linear-attention-freq": layers_text(bool(block.scans) for block in _blocks(model)),
            "linear-conv-kernel-dim": shape.conv.width if shape.conv is not None else False,
            "linear-key-head-dim": scan.key_dim,
            "linear-value-head-dim": scan.value_dim,
            "linear-num-key-heads": scan.groups,
            "linear-num-value-heads": scan.heads,
        }
    if shape.window:
        # Megatron-LM counts the tokens to the left and right of a token, without the token itself.
        found |= {"window-size": f"{shape.window - 1},0"}
        windows = [bool(block.window) for block in _blocks(model)]
        if not all(windows):
            found["window-attn-skip-freq"] = layers_text(windows)
    return found


def _blocks(model: Transformer) -> list[Block]:
    return [model.block(model.kind(layer)) for layer in range(model.layers)]


def _experts(job: LlmExportJob) -> dict[str, Value]:
    config, shape = job.config, megatron_shape(job.model)
    if (experts := shape.experts) is None:
        return {}
    grouped = experts.groups > 1
    sparse = [block.experts is not None for block in _blocks(job.model)]
    return {
        "num-experts": experts.count,
        "moe-layer-freq": layers_text(sparse) if not all(sparse) and not shape.hybrid else False,
        "moe-ffn-hidden-size": experts.width,
        "moe-latent-size": experts.hidden or False,
        "moe-router-topk": experts.per_token,
        # With one expert per token, a softmax over the chosen experts would always be 1 and train no router.
        "moe-router-pre-softmax": experts.per_token == 1,
        "moe-router-num-groups": experts.groups if grouped else False,
        "moe-router-group-topk": experts.groups_per_token if grouped else False,
        "moe-shared-expert-intermediate-size": shape.shared.width if shape.shared is not None else False,
        "moe-shared-expert-gate": shape.shared_gate,
        "moe-grouped-gemm": True,
        **_dispatcher(job),
        "expert-model-parallel-size": config.ep,
        "expert-tensor-parallel-size": config.etp,
        "overlap-moe-expert-parallel-comm": config.overlap_ep_comm,
        "delay-wgrad-compute": config.delay_wgrad_compute,
    }


def _dispatcher(job: LlmExportJob) -> dict[str, Value]:
    """Return how tokens reach their experts: between nodes as the estimate counts, where a kernel for it exists.

    DeepEP and HybridEP send a token to another node once. Inside a node, the estimate counts a transfer for each expert
    of a token, which `alltoall` does. Releases 0.16 to 0.19 read both names of the backend.
    """
    backend, kind = _flex_backend(job), job.config.moe_token_dispatcher
    if backend is None:
        return {"moe-token-dispatcher-type": kind or "alltoall"}
    return {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": backend}


def _flex_backend(job: LlmExportJob) -> str | None:
    node, kind = job.plan.cluster.nodes[0], job.config.moe_token_dispatcher
    if kind is not None:
        return kind if kind in _FLEX_BACKENDS.values() else None
    is_wide = job.config.expert_model_parallel_size > node.count
    return _FLEX_BACKENDS.get(key_of(node.device.name) or "") if is_wide else None


def _parallel(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    found: dict[str, Value] = {
        "tensor-model-parallel-size": config.tp,
        "sequence-parallel": config.sequence_parallel,
        "tp-comm-overlap": _overlaps_tp(job),
        "tp-comm-bootstrap-backend": "nccl" if _overlaps_tp(job) else False,
        "context-parallel-size": config.cp,
        "pipeline-model-parallel-size": config.pp,
    }
    if config.cp > 1:
        found["cp-comm-type"] = _cp_comm_type(job.model)
    if config.pp > 1 and not is_hybrid(job.model):
        planned = layout_text(job.counts, job.model.further_tokens)
        found["pipeline-model-parallel-layout"] = config.pipeline_layout or planned
    if config.vpp > 1 and config.micro_batch_group_size is not None:
        found["microbatch-group-size-per-virtual-pipeline-stage"] = config.micro_batch_group_size
    return found


def _overlaps_tp(job: LlmExportJob) -> bool:
    """Return whether the estimate counts that GEMMs hide TP communication: by the configuration, or by its stack."""
    config = job.config
    if config.tp == 1 or not config.sequence_parallel:
        return False
    if config.tp_comm_overlap is None:
        stack = stacks().get(job.plan.estimate.stack)
        return stack is not None and stack.tp_exposed < 1
    return config.tp_comm_overlap


def _cp_comm_type(model: Transformer) -> tuple[str, ...]:
    """Return the context-parallel communication of keys and values: one word for all layers, or one for each.

    Transformer Engine refuses p2p in layers with a window. Its a2a needs a number of KV heads that tp × cp divides, so
    only all_gather works for all models. Attention sinks work with a2a alone, and the rules of the search ask for such
    a number of KV heads. Source: `attn_forward_func_with_cp` in
    `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py`, 2.9 to 2.18.
    """
    each = [
        "a2a" if any(one.sinks for one in block.attention) else "all_gather" if block.window else "p2p"
        for block in _blocks(model)
    ]
    # In a pattern of letters, the parts of a layer count as layers.
    return tuple(each) if len(set(each)) > 1 and not is_hybrid(model) else (each[0],)


def _batch(job: LlmExportJob) -> dict[str, Value]:
    estimate = job.plan.estimate
    return {
        "micro-batch-size": estimate.parallelism.micro_batch_size,
        "global-batch-size": estimate.global_batch_size,
        "seq-length": estimate.seq_length,
        # Documents are kept apart by their lengths. `--reset-attention-mask` would need a mask for unfused attention.
        "sft": estimate.parallelism.packed_length is not None,
        # The kernels mask by themselves. A mask would take seq_length² bytes for each micro-batch.
        "no-create-attention-mask-in-dataloader": True,
    }


def _memory(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    moved, muon = config.optimizer_offload_fraction, config.optimizer == "muon"
    found: dict[str, Value] = {
        # On the CPU, weights are updated by the code of the distributed optimizer, even without replicas. Muon has its
        # own, which gives each replica whole matrices.
        "use-distributed-optimizer": (config.zero_stage > 0 or moved > 0) and not muon,
        "use-megatron-fsdp": config.zero_stage == MAX_ZERO,
        "data-parallel-sharding-strategy": "optim_grads_params" if config.zero_stage == MAX_ZERO else False,
        "ckpt-format": "fsdp_dtensor" if config.zero_stage == MAX_ZERO else False,
        "optimizer": ("dist_muon" if config.zero_stage else "muon") if muon else config.optimizer != "adam" and "sgd",
        "optimizer-cpu-offload": moved > 0,
        "optimizer-offload-fraction": moved or False,
        "num-distributed-optimizer-instances": config.dp_replicate if config.dp_replicate > 1 else False,
    }
    if config.recompute == "selective":
        found["recompute-granularity"] = "selective"
        if config.recompute_modules:
            found["recompute-modules"] = config.recompute_modules
    elif config.recompute == "full":
        # `uniform` with groups of one layer keeps the input of each layer, as the estimate assumes. `block` recomputes
        # the first layers of each stage.
        some = config.recompute_num_layers
        found |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if some is None else "block",
            "recompute-num-layers": some or 1,
        }
    if config.has_narrow_state or moved:
        found |= {
            "use-precision-aware-optimizer": True,
            "exp-avg-dtype": config.exp_avg_dtype,
            "exp-avg-sq-dtype": config.exp_avg_sq_dtype,
            "main-params-dtype": config.main_params_dtype,
            "main-grads-dtype": "bf16" if config.grad_reduce_in_bf16 and config.precision != "fp16" else "fp32",
        }
    return found | {
        "cpu-offloading": config.cpu_offload_num_layers > 0,
        "cpu-offloading-num-layers": config.cpu_offload_num_layers or False,
        "fine-grained-activation-offloading": bool(config.offload_modules),
        "offload-modules": config.offload_modules or False,
    }


def _precision(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    found: dict[str, Value] = {
        "bf16": config.precision != "fp16",
        "fp16": config.precision == "fp16",
        "accumulate-allreduce-grads-in-fp32": config.precision != "fp16" and not config.grad_reduce_in_bf16,
        "grad-reduce-in-bf16": config.grad_reduce_in_bf16 and config.precision != "fp16",
        "cross-entropy-loss-fusion": config.fused_cross_entropy,
        "cross-entropy-fusion-impl": _loss(config) if config.fused_cross_entropy else False,
        "attention-backend": "auto" if config.flash_attention else "unfused",
    }
    if config.precision == "fp8":
        # With fp8-param-gather, weights are stored in FP8 only, row-wise and column-wise. So they take the same memory
        # as in 16 bits, which the estimate assumes.
        found |= {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "fp8-param-gather": config.zero_stage > 0}
    elif config.precision == "fp4":
        found["fp4-format"] = "e2m1"
    # Megatron-LM's default dropout is 0.1. The estimate has dropout only for stacks without flash attention.
    if config.flash_attention:
        found |= {"attention-dropout": "0.0", "hidden-dropout": "0.0"}
    return found | ({} if config.fused_elementwise else {f"no-{name}-fusion": True for name in _UNFUSED})


def _overlap(job: LlmExportJob) -> dict[str, Value]:
    config = job.config
    summed = config.overlap_dp_comm and config.dp_cp_size > 1
    return {"overlap-grad-reduce": summed, "overlap-param-gather": summed and config.zero_stage > 0}


def _cuda_graphs(job: LlmExportJob) -> dict[str, Value]:
    impl, modules = job.config.cuda_graph_impl, job.config.cuda_graph_modules
    if impl == "none":
        return {}
    # These names are read by 0.16 to 0.19. From 0.18 on, `--cuda-graph-modules` is the new name of the scope.
    if impl == "full_iteration":
        # Checks for NaN wait for the GPU, which a graph can't capture.
        return {
            "cuda-graph-impl": "local",
            "cuda-graph-scope": "full_iteration",
            "no-check-for-nan-in-loss-and-grad": True,
        }
    return {"cuda-graph-impl": impl, "cuda-graph-scope": modules or False}


def _loss(config: ParallelismConfig) -> str:
    """Return the implementation of the fused loss. Megatron-LM has none with logits in 16 bits, so that is `native`."""
    return "te" if config.fused_loss == "te" else "native"


def _notes(job: LlmExportJob) -> list[str]:
    config, model, seq_length = job.config, job.model, job.plan.estimate.seq_length
    notes = [CLIPPING.format("--clip-grad")]
    if config.flash_attention:
        notes.append("attention is estimated as one kernel, flash's or cuDNN's: choose it with --attention-backend")
    if config.fused_cross_entropy and _loss(config) == "te":
        notes.append("Megatron-LM 0.18 and later refuse the loss of Transformer Engine: use 0.16 or 0.17 for this plan")
    if (padded := _padded_vocab(job)) != model.vocab:
        notes.append(f"the vocabulary is padded to {padded} words, but estimated as {model.vocab}")
    notes += _defaults(model) if model.arithmetic is None else _without_dropout(model.arithmetic)
    if model.positions and model.positions < seq_length:
        notes.append(f"the model has {model.positions} learned positions, but sequences have {seq_length} tokens")
    if (found := _releases(job)) != RELEASES:
        only = join_words(found, "and")
        notes.append(f"of Megatron-LM {RELEASES[0]} to {RELEASES[-1]}, only {only} can train this model")
    if model.experts:
        notes.append("the estimate assumes the same number of tokens for each expert")
        if (backend := _flex_backend(job)) is not None:
            notes.append(f"tokens go to each node once, as estimated: the package deep_ep with {backend} is needed")
        elif config.moe_token_dispatcher is None and config.ep > job.plan.cluster.nodes[0].count:
            notes.append("the estimate sends each token once to each node, but alltoall once to each of its experts")
    if config.precision in {"fp8", "fp4"} and not (config.precision == "fp8" and config.zero_stage > 0):
        notes.append("the estimate leaves out the FP8 or FP4 copies of weights that Transformer Engine keeps")
    notes += _training(job)
    if config.zero_stage == MAX_ZERO:
        notes.append("Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment: unset it")
    if config.offload_modules:
        notes.append("with Transformer Engine from 2.10 on, offloading needs NVTE_CPU_OFFLOAD_V1=1 in the environment")
    if config.overlap_ep_comm:
        notes.append("to hide the exchange of experts, set CUDA_DEVICE_MAX_CONNECTIONS=32 in the environment")
    elif (config.tp > 1 or config.cp > 1) and config.zero_stage < MAX_ZERO:
        notes.append("before Blackwell, Megatron-LM needs CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment")
    if config.tp > 1 and config.tp_comm_overlap is None and not _overlaps_tp(job):
        known = job.plan.estimate.stack in stacks()
        notes.append(
            "the estimate does not overlap TP communication: --tp-comm-overlap may hide some of it"
            if known
            else "your stack is in a file: if it overlaps TP communication, add --tp-comm-overlap"
        )
    return notes


def _training(job: LlmExportJob) -> list[str]:
    """Return notes on the optimizer and on packed documents."""
    config, notes = job.config, []
    if config.optimizer_offload_fraction:
        notes.append(
            "the estimate does not overlap transfers with the CPU's updates: --overlap-cpu-optimizer-d2h-h2d may hide"
            " some of them"
        )
    if config.optimizer == "muon":
        notes.append("Muon needs the package emerging_optimizers; compare --muon-momentum with your recipe")
    if config.packed_length is not None:
        notes.append(
            f"estimated with packed documents of {config.packed_length} tokens: --sft packs conversations, so give"
            " --tokenizer-type SFTTokenizer and data for it; Megatron-Bridge has offline_packing_specs"
        )
    return notes


def _defaults(model: Transformer) -> list[str]:
    """Return a note on the defaults that Megatron-LM uses for a model whose arithmetic is not known."""
    rope = "" if model.positions else "--rotary-base 10000, --rotary-percent 1.0, "
    router = ", --moe-router-score-function softmax, --moe-aux-loss-coeff 0" if model.experts else ""
    activation = "SiLU (--swiglu)" if model.gated else "GELU"
    return [
        "the model does not state values that change results only, so these are Megatron-LM's defaults:",
        f"{rope}--norm-epsilon 1e-05, --init-method-std 0.02, {activation}{router}",
    ]


def _without_dropout(arithmetic: Arithmetic) -> list[str]:
    """Return a note if the model has dropout, which the estimate leaves out."""
    shares = (arithmetic.attention_dropout, arithmetic.hidden_dropout, arithmetic.embedding_dropout)
    return ["the estimate leaves out this model's dropout"] if any(shares) else []
