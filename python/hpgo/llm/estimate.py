"""The estimate of one configuration of a transformer: `hpgo.estimate_llm`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.checks import check_flag, check_int, check_is, check_list, choice, number
from hpgo.base.messages import brief, pluralize, shorten
from hpgo.base.presentation import Reported
from hpgo.base.units import format_bytes, format_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.hardware.rates import same_card
from hpgo.llm.adapters import base_weight_bytes
from hpgo.llm.canonical import canonical
from hpgo.llm.constants import CONSTANTS, Constants
from hpgo.llm.device_record import DeviceRecord
from hpgo.llm.frameworks import framework_support, is_framework
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import VALUE, LayerContext
from hpgo.llm.memory import (
    SAVED,
    PipelineRankLayers,
    activations,
    allocator_cached_bytes,
    cpu_activation_bytes,
    cpu_bytes,
    parameters,
    saved_tower_bytes,
    stage_memory,
    trained_parameters,
)
from hpgo.llm.parallelism import (
    DEGREES,
    MAX_ZERO,
    BaseWeightsDtype,
    CrossEntropyImpl,
    CudaGraphImpl,
    CudaGraphModule,
    DegreeError,
    LoraModule,
    MainParamsDtype,
    OffloadedModule,
    Optimizer,
    ParallelismConfig,
    PipelineSchedule,
    Precision,
    Recompute,
    RecomputedModule,
    StateDtype,
    TokenDispatcher,
    check_batch,
    check_degrees,
    check_offload,
    check_positions,
    data_degree,
)
from hpgo.llm.pipeline_layout import layout_of, parse_layout
from hpgo.llm.platform import Platform, check_rates
from hpgo.llm.stack import Stack, StackFramework, stack_of
from hpgo.llm.step_range import kind_of, log_sd, step_range
from hpgo.llm.step_time import COMMUNICATION, CPU_STEP, PipelineStages, kinds_of
from hpgo.llm.validated_features import features_of_model, unvalidated_features
from hpgo.model.estimate import ESTIMATED
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.profile import Layer, Profile
from hpgo.planning.laws import checked_estimate
from hpgo.programs.schedule import KINDS, Schedule
from hpgo.programs.schedule import schedule as build

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from hpgo.llm.layer_time import LayerTime
    from hpgo.model.transformer import Transformer
    from hpgo.programs.names import ScheduleName
    from hpgo.timing.timeline import Timeline

_BUBBLE = "bubble"
_ROUNDING = 1e-12
"""Share of a step time below which a bubble is a rounding error and is not reported."""
_JOINED = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
}  # fmt: skip
"""The GEMM with each matrix of models of transformers, by which PEFT names adapted modules."""
FLAGS = (
    "flash_attention", "fused_elementwise", "overlap_dp_comm", "fused_cross_entropy", "fused_adam", "flatten_gradients",
    "dtensor", "grad_reduce_in_bf16", "adam_moments_in_bf16", "overlap_ep_comm", "delay_wgrad_compute",
    "offload_params",
)  # fmt: skip
COUNTS = (
    *DEGREES, "etp", "dp_replicate", "first_rank_layers", "last_rank_layers", "recompute_num_layers", "recompute_every",
    "micro_batch_group_size", "packed_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageEstimate(Record):
    """Estimate of one pipeline rank. All its GPUs are equal."""

    layers: tuple[tuple[int, int], ...]
    """First layer, and the layer after the last, of each stage of the rank. Both are equal if a stage has no layer."""
    memory_bytes: tuple[tuple[str, float], ...]
    """Bytes of one GPU by column key."""
    forward_s: float
    """Seconds of one micro-batch, all stages of the rank together."""
    backward_s: float
    allocator_cached_bytes: float = 0.0
    """Bytes that PyTorch's allocator caches in addition. It releases them before memory runs out, but `nvidia-smi`
    counts them."""

    compute_s: float = 0.0
    """Seconds of the step in which the rank's GPUs compute."""
    communication_s: float = 0.0
    """Seconds of the step in which they communicate inside the rank and do not compute. In the rest they are idle: they
    wait for other ranks."""
    cpu_bytes: float = 0.0
    """Bytes of CPU memory that one GPU's optimizer state and weights take."""
    cpu_activation_bytes: float = 0.0
    """Bytes of CPU memory that one GPU's offloaded activations take, of all micro-batches in flight."""

    @property
    def peak_bytes(self) -> float:
        """Bytes of one GPU: the sum of all columns, without `allocator_cached_bytes`."""
        return sum(size for _, size in self.memory_bytes)


@dataclass(frozen=True, slots=True)
class LlmEstimate(Reported, Record):
    """Estimated step time and memory of one configuration (docs/cost-terms.md). Nothing in it is measured.

    >>> import hpgo
    >>> found = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2)
    >>> found.parallelism.dp, found.fits, max(found.time_by_term_s, key=lambda term: term[1])[0]
    (4, True, 'linear')
    """

    model: str
    cluster: str
    gpus: int
    parallelism: ParallelismConfig
    seq_length: int
    global_batch_size: int
    step_s: float
    bound_s: float
    """Lower bound on the step time for any order of passes."""
    time_by_term_s: tuple[tuple[str, float], ...]
    """Seconds of the step by term key, on the GPUs with the most to compute. They add up to `step_s`."""
    stages: tuple[StageEstimate, ...]
    """An estimate of each pipeline rank."""
    capacity_bytes: float
    """Memory of one GPU."""
    model_flop: float
    """Operations of the step that the model needs: 6 for each token and each parameter outside the embedding, and 6·s·q
    for each layer's attention, less with a sliding window or packed documents; 4 for frozen weights, without adapters.
    Recomputation and masked scores do not count."""
    peak_flop_per_s: float
    """Peak rate of one GPU in the precision of the configuration."""
    has_experts: bool = False
    """Whether layers hold experts. Ranges of such estimates are wide (docs/accuracy.md)."""
    low_s: float = 0.0
    """Lower end of the step time's 90 % range (docs/accuracy.md). The estimate itself without one."""
    high_s: float = 0.0
    """Upper end of the step time's 90 % range. The estimate itself without one."""
    stack: str = "default"
    """Software stack of the estimate, by name (`hpgo.llm.stack`)."""
    measured_steps: int = 0
    """Number of steps that the platform was fitted to; 0 without a platform."""
    unvalidated_features: tuple[str, ...] = ()
    """Features that neither a published step on such a device nor a step of the platform has validated."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("gpus", "seq_length", "global_batch_size"):
            check_int(f"{field} of an estimate", getattr(self, field))
        for field in ("step_s", "capacity_bytes", "model_flop", "peak_flop_per_s"):
            number(f"{field} of an estimate", getattr(self, field), above=0)
        for field, other in (("low_s", "high_s"), ("high_s", "low_s")):
            number(f"{field} of an estimate", getattr(self, field))
            if not getattr(self, field):
                object.__setattr__(self, field, getattr(self, other) or self.step_s)
        if not self.low_s <= self.step_s <= self.high_s:
            raise ArgumentError(
                f"the range of an estimate is {self.low_s:g} to {self.high_s:g} s, but must hold the step time,"
                f" {self.step_s:g} s",
                "make it again",
            )
        if not self.stages:
            raise ArgumentError("an estimate has no stages", "make it again")

    def __repr__(self) -> str:
        return brief(
            "LlmEstimate",
            f"{shorten(self.model, 24)} on {shorten(self.cluster, 24)}: {pluralize(self.gpus, 'GPU')}, step"
            f" {format_seconds(self.step_s)}, {format_bytes(self.fullest.peak_bytes)} of"
            f" {format_bytes(self.capacity_bytes)}",
        )

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step on each replica."""
        return self.parallelism.micro_batches(self.global_batch_size)

    @property
    def idle_share(self) -> float:
        """Share of the step in which the GPUs of a pipeline wait for other ranks, on average over the ranks.

        >>> import hpgo
        >>> ask = {"global_batch_size": 8, "seq_length": 4096, "tp": 2}
        >>> [round(hpgo.estimate_llm("llama-3-8b", "h100:1", pp=pp, **ask).idle_share, 2) for pp in (1, 4)]
        [0.0, 0.33]
        """
        busy_s = sum(stage.compute_s + stage.communication_s for stage in self.stages)
        return max(0.0, 1 - busy_s / len(self.stages) / self.step_s)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput in tokens per second and GPU."""
        return self.global_batch_size * self.seq_length / self.step_s / self.gpus

    @property
    def utilization(self) -> float:
        """Share of the GPUs' peak rate that the model's own operations use (MFU)."""
        return self.model_flop / self.peak_flop_per_s / self.step_s / self.gpus

    @property
    def fullest(self) -> StageEstimate:
        """The pipeline rank whose GPUs need the most memory; the first of equal ones."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def shortfall_bytes(self) -> float:
        """Bytes that the fullest GPU lacks; 0 if the configuration fits."""
        return max(0.0, self.fullest.peak_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has enough memory."""
        return self.shortfall_bytes == 0


def estimate_llm(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    first_rank_layers: int | None = None,
    last_rank_layers: int | None = None,
    pipeline_layout: str | Sequence[int] | None = None,
    pp_schedule: PipelineSchedule = "1f1b",
    micro_batch_group_size: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    moe_token_dispatcher: TokenDispatcher | None = None,
    overlap_ep_comm: bool = False,
    delay_wgrad_compute: bool = False,
    zero_stage: int | None = None,
    dp_replicate: int = 1,
    micro_batch_size: int = 1,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    recompute_every: int | None = None,
    recompute_modules: Iterable[str] = (),
    sequence_parallel: bool | None = None,
    tp_comm_overlap: bool | None = None,
    precision: Precision = "bf16",
    flash_attention: bool = True,
    fused_elementwise: bool = True,
    overlap_dp_comm: bool = True,
    fused_cross_entropy: bool = True,
    cross_entropy_fusion_impl: CrossEntropyImpl | None = None,
    fused_adam: bool = True,
    flatten_gradients: bool = False,
    dtensor: bool = False,
    grad_reduce_in_bf16: bool = False,
    adam_moments_in_bf16: bool = False,
    exp_avg_dtype: StateDtype = "fp32",
    exp_avg_sq_dtype: StateDtype = "fp32",
    main_params_dtype: MainParamsDtype = "fp32",
    cpu_offload_num_layers: int = 0,
    offload_modules: Iterable[str] = (),
    cuda_graph_impl: CudaGraphImpl = "none",
    cuda_graph_modules: Iterable[str] = (),
    lora_rank: int = 0,
    lora_target_modules: Iterable[str] = (),
    base_weights_dtype: BaseWeightsDtype = "bf16",
    optimizer: Optimizer = "adam",
    optimizer_offload_fraction: float = 0.0,
    offload_params: bool = False,
    packed_length: int | None = None,
    devices: int | None = None,
    framework: StackFramework | None = None,
    stack: Stack | str | os.PathLike[str] | None = None,
    platform: Platform | DeviceRecord | None = None,
) -> LlmEstimate:
    """Estimate the step time and the memory of one configuration, split into terms and columns.

    Args:
        transformer: a shape, its name, or a file with one (docs/profiles.md).
        cluster: equal nodes with devices whose rates are known; a device is a GPU.
        global_batch_size: sequences per step.
        seq_length: tokens per sequence.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        vpp: virtual stages per pipeline rank (interleaving).
        first_rank_layers: layers of the first pipeline rank; None means the number that ranks in the middle have.
        last_rank_layers: layers of the last pipeline rank, like `first_rank_layers`.
        pipeline_layout: layers of each stage, in the words of Megatron-LM's `--pipeline-model-parallel-layout`
            (`Et*3|(tt|)*29,m|L`), or as numbers (`[7, 8, 9, 8]`); `vpp` then follows from the number of stages.
        pp_schedule: `1f1b`, interleaved if `vpp` is above 1; or with split backward passes `interleaved_zb`, or `zb_v`
            with `vpp` 2.
        micro_batch_group_size: micro-batches that pass through a virtual stage before the turn of the next one; None
            means `pp`.
        cp: context-parallel degree.
        ep: expert-parallel degree.
        etp: expert-tensor-parallel degree: GPUs that divide the matrices of each expert.
        moe_token_dispatcher: kernels that exchange tokens with experts: `allgather`, `alltoall`, `deepep` or
            `hybridep`. None means that each node receives a token once, and each of its experts inside a node.
        overlap_ep_comm: whether passes of another micro-batch hide this exchange.
        delay_wgrad_compute: whether gradients of weights are computed later, to hide more of it.
        zero_stage: replicas shard the optimizer state from 1 on, gradients from 2 on, weights at 3. None means 1, or
            the highest stage of a `framework` that does not run 1.
        dp_replicate: number of groups of replicas that each hold all shards (hybrid sharding, HSDP).
        micro_batch_size: sequences of a micro-batch on one replica.
        recompute: activations that backward passes recompute: `none`, attention scores (`selective`), elementwise
            operations and every second GEMM (`selective_op`), or whole layers (`full`).
        recompute_num_layers: number of layers of each stage that `full` recomputes; None means all.
        recompute_every: distance between the layers that `full` recomputes, instead of their number.
        recompute_modules: parts of each layer that `selective` recomputes instead of attention scores: `core_attn`,
            `layernorm`, `mla_up_proj`, `mlp`, `moe`, `moe_act` or `shared_experts`.
        sequence_parallel: whether tensor-parallel GPUs also divide norms, dropout and residual additions; None means
            yes if `tp` is above 1 and the framework has it.
        tp_comm_overlap: whether GEMMs overlap the communication of sequence parallelism; None means as much as in the
            software stack.
        precision: number format of matrix multiplications: `bf16`, `fp16`, `fp8` or `fp4`.
        flash_attention: whether attention is one kernel, which saves no scores.
        fused_elementwise: whether elementwise operations are fused.
        overlap_dp_comm: whether gradients are reduced, and weights gathered, during passes.
        fused_cross_entropy: whether the loss is fused instead of several kernels with logits in 32 bits.
        cross_entropy_fusion_impl: implementation of the fused loss: Megatron-LM's (`native`), Transformer Engine's up
            to 2.17 (`te`), or one with logits and gradients in 16 bits (`compiled`). None means `compiled` with
            `dtensor` or `flatten_gradients`, and `native` otherwise.
        fused_adam: whether Adam is one kernel.
        flatten_gradients: whether the optimizer step copies 16-bit gradients into one flat tensor, as DeepSpeed does.
        dtensor: whether DTensor shards matrices and FSDP2 shards replicas, as in torchtitan.
        grad_reduce_in_bf16: whether gradients are accumulated and reduced in 16 bits.
        adam_moments_in_bf16: whether both of Adam's moments are stored in bf16, instead of `exp_avg_dtype` and
            `exp_avg_sq_dtype`.
        exp_avg_dtype: number format of Adam's first moment: `fp32`, `fp16`, `bf16` or `fp8`.
        exp_avg_sq_dtype: number format of Adam's second moment, like `exp_avg_dtype`.
        main_params_dtype: number format of the optimizer's copy of the weights: `fp32`, `fp16` or `bf16`; or `none` if
            it updates 16-bit weights themselves.
        cpu_offload_num_layers: number of layers whose activations wait in CPU memory for the backward pass.
        offload_modules: parts of each layer whose inputs wait in CPU memory: `attn_norm`, `qkv_linear`, `core_attn`,
            `attn_proj`, `mlp_norm`, `expert_fc1` or `moe_act`.
        cuda_graph_impl: CUDA graphs that replay kernel launches: `none`, of layers (`local`, `transformer_engine`), or
            of all passes of a step (`full_iteration`).
        cuda_graph_modules: parts of each layer in its graph: `attn`, `mlp`, `moe_router` or `moe_preprocess`; none of
            them means the whole layer.
        lora_rank: rank of adapters (LoRA), which are then all that is trained; 0 trains all weights.
        lora_target_modules: GEMMs of each layer with an adapter: `linear_qkv`, `linear_proj`, `linear_fc1` or
            `linear_fc2`; none of them means all.
        base_weights_dtype: number format of the frozen weights of layers: `bf16`, which stands for 16 bits; `fp8`,
            with `precision` `fp8`; or `nf4` (QLoRA).
        optimizer: `adam`, `adam8bit`, `paged_adam`, `paged_adam8bit`, `sgd` or `muon`. Pages of state leave the GPU.
        optimizer_offload_fraction: share of the optimizer state in CPU memory, where the CPU updates its weights.
        offload_params: whether the shards of weights with ZeRO stage 3 are in CPU memory, too.
        packed_length: tokens of each document, if several that do not attend to each other are packed into a sequence.
            Of documents that differ, Σ l² / Σ l.
        devices: number of GPUs to use, the first of the cluster; None means all. The data-parallel degree follows.
        framework: framework that trains the model, which implies a software stack on the cluster's device: `megatron`,
            `megatron-bridge`, `nemo`, `torchtitan` or `deepspeed`. Configurations that `megatron`, `torchtitan` or
            `deepspeed` do not run are refused, as in `hpgo.plan_llm`, and their fixed kernel options are used.
        stack: software stack, by its name or its file; None means the one that `framework` implies.
        platform: constants fitted to steps on your cluster (`hpgo.Platform.read`), or the rates of a measured node
            (`hpgo.llm.platform.read_platform`). None uses the published ones.

    A configuration that does not fit in memory is estimated, too: see `LlmEstimate.fits`.

    Raises ArgumentError for degrees that do not divide, with the nearest accepted values, and for what `framework` does
    not run; ClusterError for nodes that differ, and for devices of unknown rates.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:8")
    >>> one = hpgo.estimate_llm("llama-3-70b", cluster, global_batch_size=128, seq_length=8192, tp=8, pp=4, vpp=5)
    >>> one.parallelism.dp, one.fits, 0.3 < one.utilization < 0.6
    (2, True, True)
    """
    asked: dict[str, Any] = {
        "tp": tp, "pp": pp, "vpp": vpp, "first_rank_layers": first_rank_layers, "last_rank_layers": last_rank_layers,
        "pipeline_layout": pipeline_layout, "tp_comm_overlap": tp_comm_overlap,
        "pp_schedule": pp_schedule, "micro_batch_group_size": micro_batch_group_size, "cp": cp, "ep": ep, "etp": etp,
        "moe_token_dispatcher": None
        if moe_token_dispatcher is None
        else choice("moe_token_dispatcher", moe_token_dispatcher, get_args(TokenDispatcher)),
        "overlap_ep_comm": overlap_ep_comm, "delay_wgrad_compute": delay_wgrad_compute,
        "zero_stage": 1 if zero_stage is None else check_int("zero_stage", zero_stage, minimum=0, maximum=MAX_ZERO),
        "dp_replicate": dp_replicate, "micro_batch_size": micro_batch_size,
        "recompute": recompute, "recompute_num_layers": recompute_num_layers, "recompute_every": recompute_every,
        "precision": precision, "flash_attention": flash_attention, "fused_elementwise": fused_elementwise,
        "overlap_dp_comm": overlap_dp_comm, "fused_cross_entropy": fused_cross_entropy, "fused_adam": fused_adam,
        "cross_entropy_fusion_impl": None
        if cross_entropy_fusion_impl is None
        else choice("cross_entropy_fusion_impl", cross_entropy_fusion_impl, get_args(CrossEntropyImpl)),
        "flatten_gradients": flatten_gradients, "dtensor": dtensor, "grad_reduce_in_bf16": grad_reduce_in_bf16,
        "adam_moments_in_bf16": adam_moments_in_bf16,
        "exp_avg_dtype": choice("exp_avg_dtype", exp_avg_dtype, get_args(StateDtype)),
        "exp_avg_sq_dtype": choice("exp_avg_sq_dtype", exp_avg_sq_dtype, get_args(StateDtype)),
        "main_params_dtype": choice("main_params_dtype", main_params_dtype, get_args(MainParamsDtype)),
        "recompute_modules": tuple(
            choice("recomputed module", one, get_args(RecomputedModule))
            for one in check_list("recompute_modules", recompute_modules)
        ),
        "cpu_offload_num_layers": check_int("cpu_offload_num_layers", cpu_offload_num_layers, minimum=0),
        "offload_modules": tuple(
            choice("offloaded module", one, get_args(OffloadedModule))
            for one in check_list("offload_modules", offload_modules)
        ),
        "cuda_graph_impl": choice("cuda_graph_impl", cuda_graph_impl, get_args(CudaGraphImpl)),
        "cuda_graph_modules": tuple(
            choice("graphed module", one, get_args(CudaGraphModule))
            for one in check_list("cuda_graph_modules", cuda_graph_modules)
        ),
        "lora_rank": check_int("lora_rank", lora_rank, minimum=0),
        "lora_target_modules": tuple(
            _adapted(one)
            for one in check_list("lora_target_modules", lora_target_modules)
        ),
        "base_weights_dtype": choice("base_weights_dtype", base_weights_dtype, get_args(BaseWeightsDtype)),
        "optimizer": choice("optimizer", optimizer, get_args(Optimizer)),
        "optimizer_offload_fraction": number("optimizer_offload_fraction", optimizer_offload_fraction),
        "offload_params": offload_params, "packed_length": packed_length,
    }  # fmt: skip
    model = transformer_of(transformer)
    cluster = cluster_of(cluster)
    batch: dict[str, Any] = {
        "global_batch_size": check_int("global_batch_size", global_batch_size),
        "seq_length": check_int("seq_length", seq_length),
    }
    check_positions(model, batch["seq_length"])
    choice("recomputation", recompute, get_args(Recompute))
    choice("pp_schedule", pp_schedule, get_args(PipelineSchedule))
    choice("precision", precision, get_args(Precision))
    for name in FLAGS:
        check_flag(name, asked[name])
    if asked.pop("adam_moments_in_bf16"):
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            if asked[name] not in {"fp32", "bf16"}:
                raise ArgumentError(
                    f"adam_moments_in_bf16 is on, but {name} is {asked[name]}",
                    "leave adam_moments_in_bf16 out",
                    code="conflict",
                )
            asked[name] = "bf16"
    for name, flag in (("sequence_parallel", sequence_parallel), ("tp_comm_overlap", tp_comm_overlap)):
        if flag is not None:
            check_flag(name, flag)
    max_gpus = cluster.devices
    if devices is not None:
        cluster = cluster.first(devices)
    asked |= {name: check_int(name, asked[name]) for name in COUNTS if asked[name] is not None}
    if pipeline_layout is not None:
        asked["pipeline_layout"] = layout_of(pipeline_layout, model.further_tokens)
        stages = len(parse_layout(asked["pipeline_layout"]).counts)
        if asked["vpp"] == 1 and stages % asked["pp"] == 0:
            asked["vpp"] = stages // asked["pp"]
    check_is("framework", framework, str, "name one, such as `megatron`", or_none=True)
    if sequence_parallel is None:
        sequence_parallel = asked["tp"] > 1
        if framework is not None and is_framework(framework):
            sequence_parallel &= framework_support(framework)[1].sequence_parallel != "never"
    asked["sequence_parallel"] = sequence_parallel
    try:
        found, config = stack_on(stack, cluster, framework, platform), ParallelismConfig(**asked)
        if framework is not None and is_framework(framework):
            config = _run_by(framework, config, model, gpus=cluster.devices, is_zero_open=zero_stage is None, **batch)
        return estimate_on(model, cluster, config, found, platform, **batch)
    except DegreeError as error:
        # Finding degrees that are accepted means trying many configurations, so it is done only once this one failed.
        from hpgo.llm.suggestions import with_accepted

        try:
            # Every schedule runs with two stages on each of several ranks, so other degrees can be tried from there.
            base = ParallelismConfig(**asked | {"pp": max(2, asked["pp"]), "vpp": 2})
        except ArgumentError:
            raise error from None
        degrees = {name: asked[name] for name in DEGREES}
        raise with_accepted(error, model, base, degrees, gpus=cluster.devices, max_gpus=max_gpus, **batch) from None


def _adapted(name: object) -> LoraModule:
    """Return the name of a GEMM with adapters. Raise ArgumentError with the GEMM that has a matrix named by PEFT."""
    if isinstance(name, str) and name in _JOINED:
        raise ArgumentError(
            f"there is no adapted module `{name}`, because matrices that read the same input are one GEMM",
            f"use {_JOINED[name]}",
            code="unknown_name",
        )
    return choice("adapted module", name, get_args(LoraModule))


def _run_by(
    framework: str, config: ParallelismConfig, model: Transformer, *,
    gpus: int, global_batch_size: int, seq_length: int, is_zero_open: bool,
) -> ParallelismConfig:  # fmt: skip
    """Return a configuration with the kernel options of a framework. Raise ArgumentError if it does not run it."""
    row, rules = framework_support(framework)
    if lack := rules.lacking(model):
        raise ArgumentError(f"{row.title} {lack.why}", lack.hint, code="unsupported")
    check_degrees(model, config, seq_length=seq_length)
    found = replace(
        rules.as_run(replace(config, dp=data_degree(config, gpus))),
        dtensor=config.dtensor or rules.dtensor,
        flatten_gradients=config.flatten_gradients or rules.flatten_gradients,
        whole_embedding=rules.tp_alone,
    )
    check_batch(found, global_batch_size)
    experts = bool(model.experts)
    micro_batches = found.micro_batches(global_batch_size)
    stages = rules.zero_stages_of(found, micro_batches=micro_batches, experts=experts)
    # With a single replica nothing is sharded, so all stages are equal to 0.
    if (is_zero_open and config.zero_stage not in stages) or stages == (0,):
        found = replace(found, zero_stage=stages[-1])
    # torchtitan's default. The search and the exports leave it out, but the framework runs it.
    is_own = row.name == "torchtitan" and found.recompute == "selective_op"
    checked = replace(found, recompute="none") if is_own else found
    if why := rules.broken(checked, micro_batches=micro_batches, model=model):
        from hpgo.llm.suggestions import way_out

        hint = way_out(why, rules, checked, model, global_batch_size=global_batch_size, seq_length=seq_length)
        raise ArgumentError(
            f"{row.title} {why}",
            hint or "change the configuration, or estimate it without a framework",
            code="unsupported",
        )
    return replace(found, dp=config.dp)


def estimate_on(
    model: Transformer, cluster: Cluster, config: ParallelismConfig, stack: Stack,
    platform: Platform | DeviceRecord | None, *,
    global_batch_size: int, seq_length: int,
) -> LlmEstimate:  # fmt: skip
    """Return the estimate of a configuration with a stack, and with the constants of a platform, or without one."""
    constants = constants_of(cluster, stack, platform, model)
    found = estimate_config(
        model, on_platform(cluster, platform), config, global_batch_size=global_batch_size, seq_length=seq_length,
        constants=constants,
    )  # fmt: skip
    return with_range(found, model, cluster, stack, platform)


def stack_on(
    stack: Stack | str | os.PathLike[str] | None,
    cluster: Cluster,
    framework: str | None,
    platform: Platform | DeviceRecord | None,
) -> Stack:
    """Return the stack of an estimate: the one that was asked for, the platform's, or what the framework implies.

    Raises ArgumentError if another stack is asked for than the one of the platform's steps.
    """
    if not isinstance(platform, Platform):
        return stack_of(stack, cluster, framework)
    found = platform.software_stack if stack is None else stack_of(stack, cluster)
    if found != platform.software_stack:
        raise ArgumentError(
            f"the stack is {_described(found, platform)}, but the platform's steps ran on `{platform.stack}`",
            "leave the stack out, or calibrate with steps of that stack",
            code="mismatch",
        )
    return found


def other_stack(cluster: Cluster, framework: str, platform: Platform | DeviceRecord | None) -> str:
    """Return a sentence if the platform's steps ran on the stack of another framework, or no text."""
    if not isinstance(platform, Platform):
        return ""
    implied = stack_of(None, cluster, framework)
    # A stack that no framework implies may be a variant of this one's, such as without overlap of TP communication.
    others = platform.software_stack.frameworks
    if not others or {framework, framework.partition("@")[0]} & {*others}:
        return ""
    return f"the platform's steps ran on stack `{platform.stack}`, but `{framework}` implies `{implied.name}`"


def _described(stack: Stack, platform: Platform) -> str:
    return f"`{stack.name}`" + (" with other values" if stack.name == platform.stack else "")


def on_platform(cluster: Cluster, platform: Platform | DeviceRecord | None) -> Cluster:
    """Return the cluster with the rates of a device record, or as it is."""
    return cluster if platform is None else platform.on(cluster)


def constants_of(
    cluster: Cluster, stack: Stack, platform: Platform | DeviceRecord | None, model: Transformer | None = None
) -> Constants:
    """Return the constants of a stack on a platform, which has its own stack, or on a measured node.

    `model` selects the platform's factor of its experts. Raises ArgumentError for a platform of other devices.
    """
    check_is("platform", platform, Platform | DeviceRecord, "read one with `hpgo.Platform.read`", or_none=True)
    if platform is None:
        return stack.constants(CONSTANTS)
    # Factors are relative to the measured rates of one device, so they do not apply to another.
    if not same_card(found := cluster.nodes[0].device.name, platform.device):
        raise ArgumentError(
            f"the platform was measured on `{shorten(platform.device)}`, but cluster `{shorten(cluster.name)}` has"
            f" `{shorten(found)}`",
            "use a platform of that device, or none",
            code="mismatch",
        )
    if isinstance(platform, Platform):
        check_rates(platform, cluster)
        return platform.constants_on(cluster, "" if model is None else model.name)
    # The node's own attention was measured. A stack's factor, relative to a preset's rate, would count it twice.
    return replace(stack, attention=1.0).constants(platform.constants_on(cluster))


def with_range(
    found: LlmEstimate, model: Transformer, cluster: Cluster, stack: Stack, platform: Platform | DeviceRecord | None
) -> LlmEstimate:
    """Return an estimate with its stack, its range and its unvalidated features."""
    config, has_experts = found.parallelism, found.has_experts
    fitted = platform if isinstance(platform, Platform) else None  # a device record says nothing of steps
    sd, bias = log_sd(config, cluster, stack, has_experts=has_experts), 0.0
    if fitted is None:
        bias = stack.bias_on(cluster, kind_of(config, cluster, has_experts=has_experts))
    elif not has_experts:
        # Dense steps say nothing of experts, whose range stays that of published steps.
        sd = fitted.log_sd
    low_s, high_s = step_range(found.step_s, sd, bias)
    known = () if fitted is None else fitted.mechanisms
    return replace(
        found,
        low_s=low_s,
        high_s=high_s,
        stack=stack.name,
        measured_steps=0 if fitted is None else fitted.steps,
        # A setting without effect uses no feature.
        unvalidated_features=(
            *unvalidated_features(canonical(config, model), cluster.nodes[0].device.name, known),
            *(name for name in features_of_model(model) if name not in known),
        ),
    )


def estimate_config(
    model: Transformer, cluster: Cluster, config: ParallelismConfig, *, global_batch_size: int, seq_length: int,
    constants: Constants = CONSTANTS,
) -> LlmEstimate:  # fmt: skip
    """Return the estimate of a configuration whose degree of data parallelism follows from the cluster's GPUs."""
    stages = stages_of(
        model, cluster, config, global_batch_size=global_batch_size, seq_length=seq_length, constants=constants
    )
    return estimate_stages(stages, cluster.name, simulated_step_s(stages), global_batch_size=global_batch_size)


def estimate_stages(stages: PipelineStages, cluster: str, step_s: float, *, global_batch_size: int) -> LlmEstimate:
    """Return the estimate of stages, given their simulated step time."""
    context, pp = stages.context, stages.context.config.pp
    model, seq_length = context.model, context.seq_length
    spent = [_seconds(stages, rank, step_s) for rank in range(pp)]
    found = LlmEstimate(
        model=model.name,
        cluster=cluster,
        gpus=context.gpus.count,
        parallelism=context.config,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        step_s=step_s,
        bound_s=stages.bound_s,
        time_by_term_s=spent[stages.slowest],
        stages=tuple(
            StageEstimate(
                tuple((one.layers.start, one.layers.stop) for one in stages.of_rank(rank)),
                tuple(stage_memory(context, held).items()),
                sum(one.forward_s for one in stages.of_rank(rank)),
                sum(one.backward_s for one in stages.of_rank(rank)),
                allocator_cached_bytes(context, held),
                sum(seconds for key, seconds in spent[rank] if key not in COMMUNICATION and key != _BUBBLE),
                sum(seconds for key, seconds in spent[rank] if key in COMMUNICATION),
                cpu_bytes(context, held),
                cpu_activation_bytes(context, held, stages.held(0)[: context.config.cpu_offload_num_layers]),
            )
            for rank, held in enumerate(_rank_layers(stages, rank) for rank in range(pp))
        ),
        capacity_bytes=context.gpus.memory_bytes,
        model_flop=model_flop(model, seq_length, global_batch_size, context.config),
        peak_flop_per_s=context.gpus.peak_flop_per_s,
        has_experts=model.experts > 0,
    )
    # Every estimate passes invariants that do not depend on the terms, such as layers that add up to the model.
    return checked_estimate(found, layers=model.layers, weights_bytes=least_weight_bytes(model, context.config))


def stages_of(
    model: Transformer, cluster: Cluster, config: ParallelismConfig, *, global_batch_size: int, seq_length: int,
    constants: Constants,
) -> PipelineStages:  # fmt: skip
    """Check a configuration and return its stages. Raise what `estimate_llm` raises."""
    gpus = Gpus.of(cluster, config.precision)
    check_degrees(model, config, seq_length=seq_length)
    check_offload(config)
    config = replace(config, dp=data_degree(config, gpus.count))
    check_batch(config, global_batch_size)
    context = LayerContext(model, config, gpus, constants, seq_length, model.kind(0))
    return PipelineStages(context, config.micro_batches(global_batch_size))


def max_memory_bytes(stages: PipelineStages) -> float:
    """Return the bytes of the fullest GPU."""
    config = stages.context.config
    # Of ranks with equal layers, the first one has the most micro-batches in flight and so needs the most memory. Only
    # that one is evaluated. Split backward passes break this order, so each rank is evaluated there.
    firsts: dict[object, int] = {}
    for rank in range(config.pp):
        held = tuple(map(stages.held, config.stages_of(rank)))
        firsts.setdefault(rank if config.splits_backward else (held, rank == 0, rank == config.pp - 1), rank)
    ranks = (_rank_layers(stages, rank) for rank in firsts.values())
    return max(sum(stage_memory(stages.context, held).values()) for held in ranks)


def simulated_step_s(stages: PipelineStages) -> float:
    """Return the simulated step time."""
    rows = stages.stages
    # Without a pipeline nothing overlaps but what the terms account for, so the step is a sum. It is returned before
    # the simulation is imported: that loads numpy, which this case does not need.
    if stages.context.config.pp == 1:
        only = rows[0]
        return stages.micro_batches * (only.forward_s + only.backward_s) + only.grad_reduce_s + only.optimizer_s
    return step_timeline(stages).makespan_s


def step_timeline(stages: PipelineStages) -> Timeline:
    """Return the simulated timeline of one step of a pipeline, one row per pipeline rank."""
    from hpgo.timing.simulation import simulate

    config, rows = stages.context.config, stages.stages
    busy_s, latency_s = stages.transfer
    splits = config.splits_backward
    # Without split backward passes, the simulation must not see two halves that could run apart.
    return simulate(
        schedule_of(config, stages.micro_batches),
        forward_s=[one.forward_s for one in rows],
        backward_s=[one.backward_s for one in rows],
        input_gradient_s=[one.backward_s - one.weight_grad_s for one in rows] if splits else None,
        weight_gradient_s=[one.weight_grad_s for one in rows] if splits else None,
        transfer_s=busy_s,
        latency_s=latency_s,
        gradient_sync_s=[one.grad_reduce_s for one in rows],
        optimizer_s=stages.rank_optimizer_s,
    )


def schedule_of(config: ParallelismConfig, micro_batches: int) -> Schedule:
    """Return the schedule of a configuration's pipeline.

    >>> schedule_of(ParallelismConfig(pp=2, vpp=2, pp_schedule="zb_v"), 1).action_lists
    [['0F0', '3F0', '3I0', '3W0', '0I0', '0W0'], ['1F0', '2F0', '2I0', '2W0', '1I0', '1W0']]
    """
    if config.pp_schedule == "zb_v" or config.vpp == 1:
        return build(config.pp_schedule, ranks=config.pp, micro_batches=micro_batches)
    name: ScheduleName = "interleaved_zb" if config.splits_backward else "interleaved"
    return build(
        name, ranks=config.pp, micro_batches=micro_batches, virtual_stages_per_rank=config.vpp,
        group_size=config.micro_batch_group_size,
    )  # fmt: skip


def _seconds(stages: PipelineStages, rank: int, step_s: float) -> tuple[tuple[str, float], ...]:
    """Return the seconds of a step by term key, on one pipeline rank."""
    spent: dict[str, float] = {}
    for at in stages.context.config.stages_of(rank):
        for count, times in stages.parts_of(at):
            for key, each_s in (*times.forward_s.items(), *times.backward_s.items()):
                spent[key] = spent.get(key, 0.0) + count * each_s * stages.micro_batches
    mine = stages.of_rank(rank)
    # A stage that ends before the rank's other stages reduces its gradients during their passes. That time is in the
    # passes already, so these terms get at most what is left of the step.
    left_s = step_s - sum(spent.values())
    for key, needed_s in (
        ("grad_reduce", sum(one.grad_reduce_s for one in mine)),
        ("optimizer_step", sum(one.optimizer_s - one.cpu_optimizer_s for one in mine)),
        (CPU_STEP, sum(one.cpu_optimizer_s for one in mine)),
    ):
        spent[key] = min(needed_s, max(0.0, left_s))
        left_s -= spent[key]
    spent[_BUBBLE] = left_s if left_s > _ROUNDING * step_s else 0.0
    return tuple((key, seconds) for key, seconds in spent.items() if seconds)


def in_flight(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[int, ...]:
    """Return the micro-batches in flight in each stage of a rank when the rank holds most.

    1F1B starts as many as there are ranks from this one on. Interleaving starts rounds of `pp` micro-batches, or of
    `micro_batch_group_size`, for each virtual stage in turn (Narayanan et al., arXiv 2104.04473, section 2.2). If
    backward passes are split, they are counted in the schedule, up to the gradients of weights.

    Passes beside the exchange of experts (`overlap_ep_comm`) need no more: there, one more forward pass precedes the
    first backward pass, but then each forward pass saves a layer while a backward pass frees one.

    >>> in_flight(ParallelismConfig(pp=4), 1, 8), in_flight(ParallelismConfig(pp=4, vpp=2), 0, 8)
    ((3,), (7, 4))
    """
    pp, vpp, group = config.pp, config.vpp, config.micro_batch_group_size or config.pp
    if config.splits_backward:
        return max((held for held, _ in _moments(config, rank, micro_batches)), key=sum)
    if vpp == 1:
        return (min(pp - rank, micro_batches),)
    # Megatron-LM's number of warm-up micro-batches for interleaving, and one more for the first steady-state forward.
    started = min(2 * (pp - rank - 1) + (vpp - 1) * group + 1, vpp * micro_batches)
    rounds, rest = divmod(started, group * vpp)
    return tuple(rounds * group + min(group, max(0, rest - stage * group)) for stage in range(vpp))


Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Micro-batches in flight in each stage of a rank, and the number of those that wait for gradients of weights."""


def _moments(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[Moment, ...]:
    """Return all different moments of a rank that splits backward passes, in their order."""
    # In steady state the schedule repeats, so two rounds of pp micro-batches reach every number in flight. Schedules
    # of thousands of micro-batches need not be built.
    return _counted(config.pp_schedule, config.pp, config.vpp, min(micro_batches, 2 * config.pp))[rank]


# The search asks for the same few schedules for thousands of configurations.
@lru_cache(maxsize=4096)
def _counted(schedule: PipelineSchedule, pp: int, vpp: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    config = ParallelismConfig(pp=pp, vpp=vpp, pp_schedule=schedule)
    built = schedule_of(config, micro_batches)
    found = []
    for rank, (start, stop) in enumerate(pairwise(built.rank_starts)):
        held = dict.fromkeys(config.stages_of(rank), 0)
        waiting = dict(held)
        seen: dict[Moment, None] = {(tuple(held.values()), tuple(held.values())): None}
        for kind, stage, *_ in built.actions[start:stop].tolist():
            held[stage] += KINDS[kind] == "F"
            waiting[stage] += KINDS[kind] == "I"
            seen[tuple(held.values()), tuple(waiting.values())] = None
            # Release after recording: while a pass runs, its activations are still in memory.
            if KINDS[kind] == "W":
                held[stage] -= 1
                waiting[stage] -= 1
        found.append(tuple(seen))
    return tuple(found)


def _rank_layers(stages: PipelineStages, rank: int) -> PipelineRankLayers:
    """Return the layers and micro-batches of a rank at the moment when it needs the most memory."""
    config, context = stages.context.config, stages.context

    def at(held: tuple[int, ...], waiting: tuple[int, ...]) -> PipelineRankLayers:
        return PipelineRankLayers.from_stages(list(map(stages.rank_layers, config.stages_of(rank), held, waiting)))

    # A recomputed micro-batch that waits for its weight gradients needs more memory than one in flight. So the largest
    # number in flight does not decide, and the activations of each moment are compared.
    if config.splits_backward and config.recompute == "full":
        moments = (at(*moment) for moment in _moments(config, rank, stages.micro_batches))
        return max(moments, key=lambda held: activations(context, held))
    held = in_flight(config, rank, stages.micro_batches)
    found = at(held, (0,) * len(held))
    if not config.reduces_by_stage(stages.micro_batches):
        return found
    alone = (stages.rank_layers(stage, 0) for stage in config.stages_of(rank))
    return replace(found, accumulating=max(alone, key=lambda one: trained_parameters(context, one)))


def least_weight_bytes(model: Transformer, config: ParallelismConfig) -> float:
    """Return a lower bound on the bytes of the weights of all GPUs together."""
    if config.offload_params:
        return 0.0
    return base_weight_bytes(config) * model.parameters


def model_flop(
    model: Transformer, seq_length: int, global_batch_size: int, config: ParallelismConfig | None = None
) -> float:
    """Return the operations that a step needs, forward and backward, as `LlmEstimate.model_flop` counts them.

    `config` states which weights are trained, and whether documents are packed.
    """
    # Looking up an embedding takes no operations. A tied one counts once, for its use as the LM head.
    weights = model.active_parameters - (0 if model.tied else model.embedding_rows * model.hidden)
    weights -= model.positions * model.hidden + (0 if model.tower is None else model.tower.parameters)
    # Each layer for multi-token prediction runs the LM head again. The experts that a token does not use are idle.
    if model.further_tokens:
        idle = model.block(model.further_kind).idle_parameters(model.hidden)
        weights += model.further_parameters + model.further_tokens * (model.vocab * model.hidden - idle)
    attended = (config and config.packed_length) or seq_length
    seen_flop = sum(model.block(kind).seen_flop_per_token(attended) for kind in kinds_of(model))
    # Frozen weights have no gradients, and the few operations of adapters are left out.
    each = 4.0 if config and config.lora_rank else 6.0
    text_flop = (each * weights + 3 * seen_flop) * seq_length
    if (tower := model.tower) is not None:
        is_frozen = tower.frozen or bool(config and config.lora_rank)
        text_flop += (1 if is_frozen else 3) * tower.images * tower.flop_per_image
    return text_flop * global_batch_size


def profile_of(
    estimate: LlmEstimate, transformer: Transformer | str | os.PathLike[str], cluster: Cluster, *,
    constants: Constants = CONSTANTS,
) -> Profile:  # fmt: skip
    """Return the layers of an estimate as a profile. A device of the profile is the group of GPUs that divide a layer.

    The profile has no gradient reduction and no optimizer step, since the planner estimates them. If more GPUs divide
    a layer's experts than its other parts, all these GPUs are one device, which processes the micro-batches of all.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100")
    >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=64, seq_length=8192, tp=2, pp=2)
    >>> profile = profile_of(one, "llama-3-8b", cluster)
    >>> len(profile.layers), profile.gpus_per_device
    (34, 2)
    """
    check_is("estimate", estimate, LlmEstimate, "make one, with `hpgo.estimate_llm`")
    model = transformer_of(transformer)
    stages = stages_of(
        model, cluster.first(estimate.gpus), estimate.parallelism, global_batch_size=estimate.global_batch_size,
        seq_length=estimate.seq_length, constants=constants,
    )  # fmt: skip
    context, config = stages.context, stages.context.config
    # The smallest group whose GPUs divide both the dense parts (tp × cp) and the experts (ep) evenly.
    together = lcm(config.model_parallel_size, config.expert_model_parallel_size)
    sent = VALUE * context.tokens * model.hidden / context.between
    nothing = PipelineRankLayers({}, {}, embedding=False, head=False)

    def layer(name: str, times: LayerTime, held: PipelineRankLayers, saved: float, output: float) -> Layer:
        return Layer(
            name, name, (times.total_forward_s,), (times.total_backward_s,), (output,),
            parameters(context, held) * VALUE, (saved,),
        )  # fmt: skip

    saved = saved_tower_bytes(context)
    rows = [layer("embedding", stages.costs.embedding, replace(nothing, embedding=True), saved, sent)]
    for at, layers in enumerate(stages.ranges):
        recomputed = stages.recomputed(at)
        for place, kind in enumerate(stages.held(at)):
            again = place < recomputed
            name = f"further.{place - len(layers)}" if kind.further else f"layers.{layers.start + place}"
            one = replace(nothing, layers={(kind, again): 1})
            rows.append(layer(name, stages.costs.layer[kind, again], one, context.once(SAVED[again], kind), sent))
    rows.append(layer("head", stages.costs.head, replace(nothing, head=True), sent, 4.0))
    return Profile(
        model.name,
        (config.micro_batch_size * together // config.model_parallel_size,),
        tuple(rows),
        tuple(pairwise(row.id for row in rows)),
        f"{ESTIMATED}{cluster.name} with {config.named()}, not measured",
        gpus_per_device=together,
        dtype="bfloat16" if config.precision != "fp16" else "float16",
    )
