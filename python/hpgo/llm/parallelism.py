"""The parallelism configuration of a transformer: degrees, recomputation, sharding, precision and fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpgo.base.checks import check_int, check_is, number
from hpgo.base.divisors import divisors
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.base.validated import check_fields
from hpgo.errors import ArgumentError
from hpgo.llm.pipeline_layout import check_layout, parse_layout
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


Recompute = Literal["none", "selective", "selective_op", "full"]
"""Activations that backward passes recompute: none, attention scores, elementwise operations with every second matrix
multiplication (torchtitan's default, `selective_ac_option = "op"`), or whole layers."""
Precision = Literal["bf16", "fp16", "fp8", "fp4"]
"""Number format of matrix multiplications."""
RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Part of a layer that selective recomputation may repeat, by its name in Megatron-LM's `--recompute-modules`."""
StateDtype = Literal["fp32", "fp16", "bf16", "fp8"]
"""Number format of a moment of Adam."""
MainParamsDtype = Literal["fp32", "fp16", "bf16", "none"]
"""Number format of the weights that the optimizer updates: a copy of the 16-bit weights, or `none`, the weights
themselves."""
CudaGraphImpl = Literal["none", "local", "transformer_engine", "full_iteration"]
"""CUDA graphs that replay kernel launches: none, a graph for each layer by Megatron-LM or by Transformer Engine, or one
for all passes of a step."""
CrossEntropyImpl = Literal["native", "te", "compiled"]
"""Fused loss: Megatron-LM's own and Transformer Engine's, by their names in `--cross-entropy-fusion-impl`; or one of
other frameworks with logits and gradients in 16 bits, such as PyTorch's compiler makes and flash-attention has."""
CudaGraphModule = Literal["attn", "mlp", "moe_router", "moe_preprocess"]
"""Part of a layer in its CUDA graph, by its name in Megatron-LM's `--cuda-graph-modules`."""
OffloadedModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
"""Part of a layer whose input waits in CPU memory, by its name in Megatron-LM's `--offload-modules`."""
TokenDispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
"""Exchange of tokens with the GPUs of their experts: Megatron-LM's `--moe-token-dispatcher-type`, and the backends of
its type `flex`."""
LoraModule = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""GEMM of a layer that may have an adapter, by its name in Megatron-Bridge: queries, keys and values; the output of
attention; into the feed-forward network, and out of it."""
BaseWeightsDtype = Literal["bf16", "fp8", "nf4"]
"""Number format of frozen weights: 16 bits, 8 bits as GEMMs in FP8 read them, or 4 bits that each pass expands (QLoRA).
"""
Optimizer = Literal["adam", "adam8bit", "paged_adam", "paged_adam8bit", "sgd", "muon"]
"""Optimizer: Adam with 32-bit state or the formats of its own settings, with 8-bit state, with state in CPU memory that
pages move to the GPU (`paged_`); SGD with momentum; or Muon for matrices of layers and Adam for all others."""
PipelineSchedule = Literal["1f1b", "interleaved_zb", "zb_v"]
"""Pipeline schedule: 1F1B (interleaved if `vpp` > 1), interleaved zero-bubble, or ZB-V."""
_NEEDED_BY_MODULE = {
    "mla_up_proj": "latent attention",
    "moe": "experts",
    "moe_act": "experts",
    "shared_experts": "experts",
    "expert_fc1": "experts",
}
MAX_ZERO = 3
"""The highest ZeRO stage."""
DEGREES = ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size")
"""Fields that users choose and that must divide something. The degree of data parallelism follows from them."""


# No slots: the search copies configurations thousands of times, and copying a dictionary is six times as fast.
@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Distribution of a transformer over GPUs, with its memory and kernel options.

    The number of GPUs is tp × cp × pp × dp. Expert parallelism reuses the GPUs of a pipeline rank and adds none. Ranks
    are ordered tp, cp, dp, pp: ranks of one tensor-parallel group are adjacent.

    Raises ArgumentError for degrees below 1, and for combinations that no framework runs.

    >>> config = ParallelismConfig(tp=4, pp=8, vpp=5, dp=2, sequence_parallel=True)
    >>> config.world_size, config.model_parallel_size, config.num_stages
    (64, 4, 40)
    """

    tp: int = 1
    """Degree of tensor parallelism: GPUs that divide each matrix."""
    sequence_parallel: bool = False
    """Whether tensor-parallel GPUs also divide norms, dropout and residual additions by tokens (Korthikanti et al.,
    arXiv 2205.05198)."""
    tp_comm_overlap: bool | None = None
    """Whether GEMMs overlap the communication of sequence parallelism (Megatron-LM's `--tp-comm-overlap`, torchtitan's
    asynchronous tensor parallelism); None means as much as in the software stack."""
    cp: int = 1
    """Degree of context parallelism: GPUs that divide each sequence."""
    ep: int = 1
    """Degree of expert parallelism: GPUs that divide the experts of each layer, whole experts each. They are adjacent
    GPUs of a stage, regardless of tp and cp. An all-to-all sends every token to its experts and back."""
    etp: int = 1
    """Degree of expert tensor parallelism: adjacent GPUs that divide the matrices of each expert (Megatron-LM's
    `--expert-tensor-parallel-size`, whose default is tp)."""
    moe_token_dispatcher: TokenDispatcher | None = None
    """Kernels that exchange tokens with the GPUs of their experts. None means that each node receives a token once, and
    that each of its experts does inside a node."""
    overlap_ep_comm: bool = False
    """Whether passes of another micro-batch hide the exchange of tokens with experts (Megatron-LM's
    `--overlap-moe-expert-parallel-comm`, DualPipe of DeepSeek-V3)."""
    delay_wgrad_compute: bool = False
    """Whether gradients of weights are computed later, so that they hide more of that exchange (Megatron-LM's
    `--delay-wgrad-compute`)."""
    pp: int = 1
    """Degree of pipeline parallelism."""
    first_rank_layers: int | None = None
    """Layers of the first pipeline rank, over all its stages; None means as many as each rank in the middle has."""
    last_rank_layers: int | None = None
    """Layers of the last pipeline rank, like `first_rank_layers`."""
    dp: int = 1
    """Degree of data parallelism."""
    vpp: int = 1
    """Number of virtual stages per pipeline rank (interleaving)."""
    pp_schedule: PipelineSchedule = "1f1b"
    """Pipeline schedule: 1F1B, interleaved if `vpp` is above 1; or a schedule that splits backward passes, so that
    gradients of weights, for which no rank waits, fill the bubble (Qi et al., arXiv 2401.10241). `zb_v` has two virtual
    stages per rank in a V: the second ones run from the last rank to the first."""
    micro_batch_group_size: int | None = None
    """Micro-batches that pass through a virtual stage before the turn of the next one, if `vpp` is above 1
    (Megatron-LM's `--microbatch-group-size-per-virtual-pipeline-stage`); None means pp."""
    micro_batch_size: int = 1
    """Sequences of one micro-batch on one data-parallel replica."""
    recompute: Recompute = "none"
    """Activations that backward passes recompute: none, attention scores, selected operations, or whole layers."""
    recompute_num_layers: int | None = None
    """Number of layers of each stage that are recomputed if `recompute` is full; None means all."""
    recompute_every: int | None = None
    """Distance between recomputed layers if `recompute` is full: 2 recomputes every second layer; None means all."""
    zero_stage: int = 0
    """ZeRO stage: replicas shard the optimizer state from 1 on, gradients from 2 on, weights at 3."""
    dp_replicate: int = 1
    """Number of groups of replicas that each hold all shards (hybrid sharding). Shards are gathered inside a group, and
    gradients are summed over the groups."""
    precision: Precision = "bf16"
    """Number format of matrix multiplications."""
    flash_attention: bool = True
    """Whether attention is one kernel, which saves no scores (Dao et al., arXiv 2205.14135)."""
    fused_elementwise: bool = True
    """Whether elementwise operations are fused, by a compiler or by special kernels."""
    fused_cross_entropy: bool = True
    """Whether the loss is fused instead of several kernels with logits in 32 bits."""
    cross_entropy_fusion_impl: CrossEntropyImpl | None = None
    """Implementation of the fused loss. None means what frameworks run: `fused_loss`."""
    fused_adam: bool = True
    """Whether Adam is one kernel, which allocates no temporary tensors."""
    flatten_gradients: bool = False
    """Whether the optimizer step copies 16-bit gradients into one flat tensor, as DeepSpeed's optimizers do."""
    whole_embedding: bool = False
    """Whether tensor-parallel GPUs hold the whole embedding unless it is tied, as with DeepSpeed's AutoTP."""
    dtensor: bool = False
    """Whether DTensor shards matrices and FSDP2 shards replicas, as in torchtitan. GEMM inputs then stay gathered, and
    FSDP2 copies a layer's gradient into a buffer to reduce it."""
    overlap_dp_comm: bool = True
    """Whether gradients are reduced during backward passes, and weights gathered during passes of other layers."""
    grad_reduce_in_bf16: bool = False
    """Whether gradients are accumulated and reduced in bf16 instead of fp32 (Megatron-LM's `--grad-reduce-in-bf16`)."""
    recompute_modules: tuple[RecomputedModule, ...] = ()
    """Modules of each layer that are recomputed if `recompute` is selective; none of them means attention scores."""
    offload_modules: tuple[OffloadedModule, ...] = ()
    """Modules of each layer whose inputs wait in CPU memory from the forward to the backward pass (Megatron-LM's
    `--fine-grained-activation-offloading`)."""
    exp_avg_dtype: StateDtype = "fp32"
    """Number format of Adam's first moment (Megatron-LM's `--exp-avg-dtype`)."""
    exp_avg_sq_dtype: StateDtype = "fp32"
    """Number format of Adam's second moment (Megatron-LM's `--exp-avg-sq-dtype`)."""
    main_params_dtype: MainParamsDtype = "fp32"
    """Number format of the weights that the optimizer updates (Megatron-LM's `--main-params-dtype`)."""
    cpu_offload_num_layers: int = 0
    """Number of layers whose activations wait in CPU memory from the forward to the backward pass."""
    pipeline_layout: str | None = None
    """Layers of each stage, as in Megatron-LM's `--pipeline-model-parallel-layout` (`hpgo.llm.pipeline_layout`); None
    means an even split, or the one of `first_rank_layers` and `last_rank_layers`."""
    cuda_graph_impl: CudaGraphImpl = "none"
    """CUDA graphs that replay kernel launches (Megatron-LM's `--cuda-graph-impl`)."""
    cuda_graph_modules: tuple[CudaGraphModule, ...] = ()
    """Modules of each layer that its CUDA graph holds; none of them means the whole layer."""
    lora_rank: int = 0
    """Rank of the adapters, which are then all that is trained (LoRA, Hu et al., arXiv 2106.09685); 0 trains all
    weights."""
    lora_target_modules: tuple[LoraModule, ...] = ()
    """GEMMs of each layer that have an adapter; none of them means all."""
    base_weights_dtype: BaseWeightsDtype = "bf16"
    """Number format of the frozen GEMM weights of layers beside adapters (QLoRA, Dettmers et al., arXiv 2305.14314)."""
    optimizer: Optimizer = "adam"
    """Optimizer that updates the weights."""
    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer state that is stored in CPU memory, where the CPU updates its weights (Megatron-LM's
    `--optimizer-offload-fraction`, ZeRO-Offload, arXiv 2101.06840)."""
    offload_params: bool = False
    """Whether the shards of weights with ZeRO stage 3 are stored in CPU memory (ZeRO-Infinity, arXiv 2104.07857; FSDP's
    `CPUOffloadPolicy`)."""
    packed_length: int | None = None
    """Tokens of each of the documents that are packed into a sequence and do not attend to each other. Of documents
    that differ, the mean weighted by tokens, Σ l² / Σ l; None means one document."""

    def __post_init__(self) -> None:
        check_fields(self)
        # Searches create thousands of configurations. Compare first, so that `check_int` runs only for its message.
        for field in (*DEGREES, "etp", "dp"):
            if getattr(self, field) < 1:
                check_int(field, getattr(self, field))
        for field in ("recompute_num_layers", "recompute_every", "micro_batch_group_size"):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field))
        self._check_shards()
        self._check_modules()
        self._check_cuda_graphs()
        self._check_exchange()
        self._check_offloading()
        # The defaults break none of these rules, and their messages take longer than the rest of the checks.
        if self.lora_rank or self.lora_target_modules or self.base_weights_dtype != "bf16":
            self._check_adapters()
        if self.optimizer != "adam" or self.optimizer_offload_fraction or self.offload_params:
            self._check_optimizer()
        if self.packed_length is not None:
            self._check_packed()
        if self.main_params_dtype in {"bf16", "none"} and self.precision == "fp16":
            raise ArgumentError(
                f"main_params_dtype is {self.main_params_dtype}, but precision is fp16: only bf16 trains without a copy"
                " in fp32 or fp16",
                "use main_params_dtype='fp32', or precision='bf16'",
                code="conflict",
            )
        check_int("zero_stage", self.zero_stage, minimum=0, maximum=MAX_ZERO)
        check_int("cpu_offload_num_layers", self.cpu_offload_num_layers, minimum=0)
        if self.cpu_offload_num_layers and (self.pp > 1 or self.recompute == "full"):
            raise ArgumentError(
                f"cpu_offload_num_layers is {self.cpu_offload_num_layers}, but offloading excludes a pipeline and full"
                " recomputation",
                "use `cpu_offload_num_layers=0`, or pp 1 without full recomputation",
                code="conflict",
            )
        for end in ("first_rank_layers", "last_rank_layers"):
            if getattr(self, end) is not None:
                check_int(end, getattr(self, end))
                if self.pp == 1:
                    raise ArgumentError(
                        f"{end} is {getattr(self, end)}, but pp is 1, so there is no such rank", f"leave {end} out"
                    )
        if self.pipeline_layout is not None:
            self._check_layout(self.pipeline_layout)
        if self.sequence_parallel and self.tp == 1:
            raise ArgumentError(
                "sequence_parallel is on, but it needs tp above 1", "leave sequence_parallel out, or use tp 2"
            )
        if self.tp_comm_overlap and self.tp > 1 and not self.sequence_parallel:
            raise ArgumentError(
                "tp_comm_overlap is on, but it needs sequence parallelism, whose transfers come in pieces",
                "turn sequence parallelism on, or leave tp_comm_overlap out",
                code="conflict",
            )
        if self.vpp > 1 and self.pp == 1:
            raise DegreeError(f"vpp is {self.vpp}, but virtual stages need pp above 1", "use `vpp=1`", ("pp", "vpp"))
        if self.splits_backward:
            self._check_split()
        for field in ("recompute_num_layers", "recompute_every"):
            if getattr(self, field) is not None and self.recompute != "full":
                raise ArgumentError(
                    f"{field} is {getattr(self, field)}, but recompute is {self.recompute}: it selects fully recomputed"
                    " layers",
                    "use recompute='full'",
                )
        if self.recompute_num_layers is not None and self.recompute_every is not None:
            raise ArgumentError(
                f"recompute_num_layers is {self.recompute_num_layers} and recompute_every is {self.recompute_every},"
                " but only one of them can select the recomputed layers",
                "leave one of them out",
                code="conflict",
            )

    def _check_layout(self, text: str) -> None:
        for has, what, hint in (
            (self.pp == 1, "pp is 1", "use pp 2 or more"),
            (self.ends != (None, None), "first_rank_layers or last_rank_layers is given, too", "leave these out"),
            (self.splits_backward, f"pp_schedule is {self.pp_schedule}, which has its own", "use pp_schedule='1f1b'"),
        ):
            if has:
                raise ArgumentError(f"pipeline_layout is `{shorten(text)}`, but {what}", hint, code="conflict")
        check_layout(text, pp=self.pp, vpp=self.vpp)

    def _check_shards(self) -> None:
        if self.dp_replicate == 1:
            return
        check_int("dp_replicate", self.dp_replicate)
        if self.zero_stage == 0:
            raise ArgumentError(
                f"dp_replicate is {self.dp_replicate}, but ZeRO stage 0 shards nothing", "use zero_stage=3, or 1 or 2"
            )

    def _check_modules(self) -> None:
        if not self.recompute_modules:
            return
        named = ", ".join(self.recompute_modules)
        if self.recompute != "selective":
            raise ArgumentError(
                f"recompute_modules is {named}, but recompute is {self.recompute}: it selects what `selective`"
                " recomputes",
                "use recompute='selective'",
            )
        if len(set(self.recompute_modules)) < len(self.recompute_modules):
            raise ArgumentError(
                f"recompute_modules is {named}, but each module may be listed once", "remove the second"
            )
        if self.splits_backward:
            raise ArgumentError(
                f"recompute_modules is {named}, but no framework recomputes modules with split backward passes",
                "use pp_schedule='1f1b', or leave recompute_modules out",
                code="conflict",
            )

    def _check_cuda_graphs(self) -> None:
        impl, named = self.cuda_graph_impl, ", ".join(self.cuda_graph_modules)
        if named and impl not in {"local", "transformer_engine"}:
            raise ArgumentError(
                f"cuda_graph_modules is {named}, but cuda_graph_impl is {impl}: only graphs of layers have modules",
                "use cuda_graph_impl='transformer_engine', or leave cuda_graph_modules out",
            )
        if impl == "none":
            return
        if len(set(self.cuda_graph_modules)) < len(self.cuda_graph_modules):
            raise ArgumentError(
                f"cuda_graph_modules is {named}, but each module may be listed once", "remove the second"
            )
        if "moe_preprocess" in self.cuda_graph_modules and "moe_router" not in self.cuda_graph_modules:
            raise ArgumentError(
                f"cuda_graph_modules is {named}, but moe_preprocess needs moe_router, which precedes it",
                "add moe_router",
            )
        # The rules of `TransformerConfig.__post_init__` in Megatron-LM 0.16 to 0.19, and of torchtitan 0.3 on pipelines
        # with split passes.
        full = "use cuda_graph_impl='full_iteration', or recompute='selective' with recompute_modules"
        for has, what, hint in (
            (self.cpu_offload_num_layers, "offloading", "use cpu_offload_num_layers=0, or cuda_graph_impl='none'"),
            (self.splits_backward, "split backward passes", "use pp_schedule='1f1b', or cuda_graph_impl='none'"),
            (self.recompute == "full" and impl != "full_iteration", "full recomputation", full),
            (
                impl == "transformer_engine"
                and "moe" in self.recompute_modules
                and "moe_router" in self.cuda_graph_modules,
                "recomputation of moe around the module moe_router",
                "use cuda_graph_impl='local', or leave moe_router out",
            ),
        ):
            if has:
                raise ArgumentError(
                    f"cuda_graph_impl is {impl}, but these graphs exclude {what}", hint, code="conflict"
                )

    def _check_exchange(self) -> None:
        """Check the exchange of tokens with experts: the rules of `TransformerConfig.__post_init__` in Megatron-LM."""
        if self.delay_wgrad_compute and not self.overlap_ep_comm:
            raise ArgumentError(
                "delay_wgrad_compute is on, but overlap_ep_comm is off: gradients of weights hide nothing",
                "turn overlap_ep_comm on, or leave delay_wgrad_compute out",
                code="conflict",
            )
        if not self.overlap_ep_comm:
            return
        for has, what, hint in (
            (self.moe_token_dispatcher == "allgather", "dispatcher allgather", "use alltoall or deepep"),  # noqa: S105
            (self.recompute == "full", "full recomputation", "use recompute='selective' with recompute_modules"),
            ("moe" in self.recompute_modules, "recomputation of moe", "use moe_act instead of moe"),
            (self.splits_backward, "split backward passes", "use pp_schedule='1f1b'"),
            (
                self.cuda_graph_impl != "none" and (not self.cuda_graph_modules or "mlp" in self.cuda_graph_modules),
                "CUDA graphs around the exchange",
                "give cuda_graph_modules without mlp",
            ),
        ):
            if has:
                raise ArgumentError(f"overlap_ep_comm is on, but it excludes {what}", hint, code="conflict")

    def _check_offloading(self) -> None:
        modules, named = self.offload_modules, ", ".join(self.offload_modules)
        if not modules:
            return
        if len(set(modules)) < len(modules):
            raise ArgumentError(f"offload_modules is {named}, but each module may be listed once", "remove the second")
        if "attn_proj" in modules and "core_attn" not in modules:
            raise ArgumentError(
                f"offload_modules is {named}, but core_attn also needs the input of attn_proj, its result",
                "add core_attn",
            )
        # The rules of `TransformerConfig.__post_init__` in Megatron-LM, and of its user guide on CUDA graphs.
        experts, ends = {"expert_fc1", "moe_act"}.intersection(modules), {"attn_norm", "mlp_norm"}.intersection(modules)
        graphed = self.cuda_graph_impl in {"local", "transformer_engine"}
        for has, what, hint in (
            (self.cpu_offload_num_layers, "offloading of whole layers", "use cpu_offload_num_layers=0"),
            (self.recompute == "full", "full recomputation", "use recompute='selective' with recompute_modules"),
            (
                experts and "moe" in self.recompute_modules,
                "recomputation of moe",
                "use moe_act instead of moe",
            ),
            (self.splits_backward, "split backward passes", "use pp_schedule='1f1b'"),
            (graphed and not self.cuda_graph_modules, "CUDA graphs of whole layers", "give cuda_graph_modules"),
            (graphed and ends, "CUDA graphs that begin or end at norms", "leave attn_norm and mlp_norm out"),
        ):
            if has:
                raise ArgumentError(f"offload_modules is {named}, but this excludes {what}", hint, code="conflict")

    def _check_adapters(self) -> None:
        named = ", ".join(self.lora_target_modules)
        for has, what, hint in (
            (named and not self.lora_rank, f"lora_target_modules is {named}, but lora_rank is 0", "use lora_rank=16"),
            (len(set(self.lora_target_modules)) < len(self.lora_target_modules),
             f"lora_target_modules is {named}, but each module may be listed once", "remove the second"),
            (self.base_weights_dtype != "bf16" and not self.lora_rank,
             f"base_weights_dtype is {self.base_weights_dtype}, but only frozen weights need no other copy",
             "use lora_rank=16"),
            (self.base_weights_dtype == "nf4" and self.precision in {"fp8", "fp4"},
             (f"base_weights_dtype is nf4, but its kernels compute in 16 bits, not in {self.precision}"),
             "use precision='bf16'"),
            (self.base_weights_dtype == "fp8" and self.precision != "fp8",
             (f"base_weights_dtype is fp8, but precision is {self.precision}: only GEMMs in fp8 read such weights"),
             "use precision='fp8'"),
            (self.lora_rank and self.splits_backward,
             (f"lora_rank is {self.lora_rank}, but without gradients of weights nothing fills the bubble of"
             f" {self.pp_schedule}"), "use pp_schedule='1f1b'"),
        ):  # fmt: skip
            if has:
                raise ArgumentError(what, hint, code="conflict")

    def _check_optimizer(self) -> None:
        name, fraction = self.optimizer, self.optimizer_offload_fraction
        number("optimizer_offload_fraction", fraction, maximum=1.0, hint="give a share, from 0 to 1")
        moments = f"exp_avg_dtype {self.exp_avg_dtype} and exp_avg_sq_dtype {self.exp_avg_sq_dtype}"
        for has, what, hint in (
            (name != "adam" and (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("fp32", "fp32"),
             f"optimizer is {name}, but {moments} are formats of adam", "use optimizer='adam', or leave them out"),
            (fraction and name not in {"adam", "sgd"},
             f"optimizer_offload_fraction is {fraction:g}, but the CPU updates weights with adam or sgd, not {name}",
             "use optimizer='adam'"),
            (self.offload_params and fraction < 1,
             (f"offload_params is on, but optimizer_offload_fraction is {fraction:g}: weights in CPU memory are updated"
             " there"), "use optimizer_offload_fraction=1"),
        ):  # fmt: skip
            if has:
                raise ArgumentError(what, hint, code="conflict")

    def _check_packed(self) -> None:
        check_int("packed_length", self.packed_length)
        if not self.flash_attention:
            raise ArgumentError(
                f"packed_length is {self.packed_length}, but unfused attention computes the scores between documents,"
                " too",
                "use flash_attention=True, or leave packed_length out",
                code="conflict",
            )

    def _check_split(self) -> None:
        schedule = self.pp_schedule
        if self.micro_batch_group_size is not None:
            raise ArgumentError(
                f"micro_batch_group_size is {self.micro_batch_group_size}, but no framework has groups with {schedule}",
                "use pp_schedule='1f1b', or leave micro_batch_group_size out",
                code="conflict",
            )
        if self.vpp != 2 and (schedule == "zb_v" or self.vpp == 1):
            several = "2" if schedule == "zb_v" else "2 or more"
            raise DegreeError(
                f"vpp is {self.vpp}, but {schedule} needs {several} virtual stages per rank", "use `vpp=2`", ("vpp",)
            )
        # With embedding and LM head on one rank, neither end has more work to make up for.
        if schedule == "zb_v" and self.ends != (None, None):
            raise ArgumentError(
                "zb_v places the first and the last stage on one rank, so the end ranks can't have other layers",
                "leave first_rank_layers and last_rank_layers out",
            )

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last pipeline rank. None means the number that ranks in the middle have."""
        return self.first_rank_layers, self.last_rank_layers

    @property
    def adam_moments_in_bf16(self) -> bool:
        """Whether both of Adam's moments are stored in bf16."""
        return self.exp_avg_dtype == self.exp_avg_sq_dtype == "bf16"

    @property
    def has_narrow_state(self) -> bool:
        """Whether a moment, or the weights that the optimizer updates, are in fewer than 32 bits."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_params_dtype) != ("fp32", "fp32", "fp32")

    @property
    def lora_targets(self) -> tuple[LoraModule, ...]:
        """GEMMs of each layer that have an adapter.

        >>> ParallelismConfig(lora_rank=8).lora_targets
        ('linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2')
        """
        if not self.lora_rank:
            return ()
        return self.lora_target_modules or get_args(LoraModule)

    @property
    def is_paged(self) -> bool:
        """Whether pages move the optimizer state between CPU memory and the GPU."""
        return self.optimizer.startswith("paged_")

    def stage_counts(self, model: Transformer) -> tuple[int, ...] | None:
        """Return the number of layers of each stage, without multi-token prediction; None if they do not divide."""
        check_is("the model", model, Transformer, "give a `hpgo.Transformer`")
        if self.pipeline_layout is not None:
            return parse_layout(self.pipeline_layout).counts
        # Frameworks place the layers of models with experts stage by stage.
        return split_layers(model.layers, self.pp, self.vpp, self.ends, laid_out=bool(model.experts))

    @property
    def further_stage(self) -> int:
        """The stage with the layers for multi-token prediction: the last one, unless a layout has another."""
        further = () if self.pipeline_layout is None else parse_layout(self.pipeline_layout).further
        return next((at for at, count in enumerate(further) if count), self.num_stages - 1)

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes are split into gradients of inputs and of weights."""
        return self.pp_schedule != "1f1b"

    @property
    def is_v_schedule(self) -> bool:
        """Whether the first pipeline rank also has the last stage, and so both the embedding and the LM head."""
        return self.pp_schedule == "zb_v"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in their order. Raises ArgumentError if there is no such rank.

        >>> ParallelismConfig(pp=4, vpp=2).stages_of(1)
        (1, 5)
        >>> ParallelismConfig(pp=4, vpp=2, pp_schedule="zb_v").stages_of(1)
        (1, 6)
        """
        rank = check_int("the rank", rank, minimum=0, maximum=self.pp - 1)
        if self.is_v_schedule:
            return rank, 2 * self.pp - 1 - rank
        return tuple(range(rank, self.num_stages, self.pp))

    @property
    def model_parallel_size(self) -> int:
        """Number of GPUs that divide each layer: tp × cp."""
        return self.tp * self.cp

    @property
    def world_size(self) -> int:
        """Number of GPUs: tp × cp × pp × dp. Expert parallelism reuses these GPUs and adds none."""
        return self.model_parallel_size * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline, virtual stages included."""
        return self.pp * self.vpp

    @property
    def dp_cp_size(self) -> int:
        """Number of GPUs that hold the same weights and reduce their gradients together: dp × cp."""
        return self.dp * self.cp

    @property
    def expert_dp_size(self) -> int:
        """Number of GPUs that hold the same experts and reduce their gradients together: tp × cp × dp / (ep × etp)."""
        return self.tp * self.dp_cp_size // self.expert_model_parallel_size

    @property
    def expert_model_parallel_size(self) -> int:
        """Number of adjacent GPUs that divide the experts of a layer: ep × etp."""
        return self.ep * self.etp

    @property
    def shard_size(self) -> int:
        """Number of GPUs over which ZeRO shards a weight: all replicas, or one group of hybrid sharding."""
        return self.dp_cp_size // self.dp_replicate

    @property
    def expert_shard_size(self) -> int:
        """Number of GPUs over which ZeRO shards an expert.

        >>> ParallelismConfig(dp=8, ep=2, zero_stage=3, dp_replicate=2).expert_shard_size
        2
        """
        return self.expert_dp_size // gcd(self.expert_dp_size, self.dp_replicate)

    @property
    def gathers_weights(self) -> bool:
        """Whether each pass gathers the weights of its layers. With a pipeline they stay gathered for the step."""
        return self.zero_stage == MAX_ZERO and self.pp == 1 and self.shard_size > 1

    def reduces_by_stage(self, micro_batches: int) -> bool:
        """Return whether each virtual stage reduces its gradients before the next one of its rank makes any.

        With ZeRO stage 2, gradients are reduced after a stage's last backward pass. If all micro-batches are one group
        of interleaving, a stage's backward passes follow each other. Source: `_add_reduce_grad` of PyTorch 2.15
        (`torch/distributed/pipelining/schedules.py`).

        >>> one = ParallelismConfig(pp=4, vpp=2, zero_stage=2)
        >>> one.reduces_by_stage(4), one.reduces_by_stage(8)
        (True, False)
        """
        check_int("micro_batches", micro_batches)
        interleaves = self.pp > 1 and self.vpp > 1 and self.pp_schedule == "1f1b"
        return interleaves and self.zero_stage > 1 and micro_batches == (self.micro_batch_group_size or self.pp)

    @property
    def shape(self) -> ParallelismConfig:
        """The fields on which times of a layer, of the LM head and of the embedding depend; others have defaults.

        >>> ParallelismConfig(tp=2, pp=8, vpp=5, dp=4, zero_stage=1).shape == ParallelismConfig(tp=2)
        True
        """
        # With ZeRO stage 3 the time of a layer depends on whether there is a pipeline, and on the number of replicas.
        sharded = self.zero_stage == MAX_ZERO
        kept: dict[str, Any] = {
            "pp": min(self.pp, 2) if sharded else 1,
            "vpp": 1,
            "pp_schedule": "1f1b",
            "micro_batch_group_size": None,
            "first_rank_layers": None,
            "last_rank_layers": None,
            "pipeline_layout": None,
            "dp": self.dp if sharded else 1,
            "dp_replicate": self.dp_replicate if sharded else 1,
            "recompute": "none" if self.recompute == "full" else self.recompute,
            "recompute_num_layers": None,
            "recompute_every": None,
            "zero_stage": MAX_ZERO if sharded else 0,
            "cpu_offload_num_layers": 0,
        }
        # Most configurations of a search are shapes already. Return them unchanged to avoid thousands of copies.
        return self if all(getattr(self, name) == value for name, value in kept.items()) else changed(self, **kept)

    @property
    def fused_loss(self) -> CrossEntropyImpl:
        """Implementation of a fused loss: the one that is set, or `compiled` with DTensor and DeepSpeed's optimizers.

        Otherwise it is Megatron-LM's `native`.

        >>> ParallelismConfig().fused_loss, ParallelismConfig(dtensor=True).fused_loss
        ('native', 'compiled')
        """
        if self.cross_entropy_fusion_impl is not None:
            return self.cross_entropy_fusion_impl
        return "compiled" if self.dtensor or self.flatten_gradients else "native"

    def micro_batches(self, global_batch_size: int) -> int:
        """Return the number of micro-batches of a step on each replica.

        >>> ParallelismConfig(dp=4, micro_batch_size=2).micro_batches(64)
        8
        """
        return check_int("global_batch_size", global_batch_size) // (self.dp * self.micro_batch_size)

    def named(self) -> str:
        """Return the configuration as one line, without the degrees that are 1.

        >>> ParallelismConfig(tp=4, sequence_parallel=True, pp=8, vpp=5, dp=2, zero_stage=1).named()
        'tp 4 + sp, pp 8, vpp 5, dp 2, zero 1, micro-batch 1'
        """
        parts = [f"tp {self.tp}{' + sp' if self.sequence_parallel else ''}"] if self.tp > 1 else []
        if self.tp > 1 and self.tp_comm_overlap is not None:
            parts.append("TP overlap" if self.tp_comm_overlap else "no TP overlap")
        parts += [f"cp {self.cp}"] if self.cp > 1 else []
        parts += [f"ep {self.ep}"] if self.ep > 1 else []
        parts += [f"etp {self.etp}"] if self.etp > 1 else []
        parts += [] if self.moe_token_dispatcher is None else [f"dispatcher {self.moe_token_dispatcher}"]
        delayed = " with delayed weight gradients" if self.delay_wgrad_compute else ""
        parts += [f"EP overlap{delayed}"] if self.overlap_ep_comm else []
        parts += [self.named_pipeline()] if self.pp > 1 else []
        parts += [f"dp {self.dp}"] if self.dp > 1 else []
        parts += [f"zero {self.zero_stage}"] if self.zero_stage else []
        parts += [f"{self.dp_replicate} shard groups"] if self.dp_replicate > 1 else []
        if self.recompute != "none":
            count = self.recompute_num_layers
            layers = "" if count is None else f" ({pluralize(count, 'layer')} per stage)"
            layers += "" if self.recompute_every is None else f" (one layer in {self.recompute_every})"
            layers += f" ({', '.join(self.recompute_modules)})" if self.recompute_modules else ""
            parts.append(f"recompute {self.recompute}{layers}")
        parts += [f"offload {pluralize(self.cpu_offload_num_layers, 'layer')}"] if self.cpu_offload_num_layers else []
        parts += [f"offload {' and '.join(self.offload_modules)}"] if self.offload_modules else []
        if self.has_narrow_state:
            moments = dict.fromkeys((self.exp_avg_dtype, self.exp_avg_sq_dtype))
            copy = "" if self.main_params_dtype == "fp32" else f", optimizer weights {self.main_params_dtype}"
            parts.append(f"moments {' and '.join(moments)}{copy}")
        if self.cuda_graph_impl != "none":
            modules = f" ({', '.join(self.cuda_graph_modules)})" if self.cuda_graph_modules else ""
            parts.append(f"CUDA graphs {self.cuda_graph_impl}{modules}")
        parts += self._named_training()
        return ", ".join([*parts, f"micro-batch {self.micro_batch_size}"])

    def _named_training(self) -> list[str]:
        """Return the parts of `named` on adapters, the optimizer and packed documents."""
        parts = []
        if self.lora_rank:
            modules = f" ({', '.join(self.lora_target_modules)})" if self.lora_target_modules else ""
            base = "" if self.base_weights_dtype == "bf16" else f", base weights {self.base_weights_dtype}"
            parts.append(f"LoRA rank {self.lora_rank}{modules}{base}")
        parts += [self.optimizer] if self.optimizer != "adam" else []
        if fraction := self.optimizer_offload_fraction:
            share = "" if fraction == 1 else f"{100 * fraction:g} % of "
            parts.append(f"{share}optimizer{' and weights' if self.offload_params else ''} on the CPU")
        parts += [] if self.packed_length is None else [f"documents of {self.packed_length} tokens"]
        return parts

    def named_pipeline(self) -> str:
        """Return the part of `named` that describes the pipeline.

        >>> ParallelismConfig(pp=8, vpp=2, last_rank_layers=6).named_pipeline()
        'pp 8 (last rank: 6 layers), vpp 2'
        >>> ParallelismConfig(pp=8, vpp=2, pp_schedule="zb_v").named_pipeline()
        'pp 8, vpp 2, zb_v'
        """
        ends = zip(("first", "last"), self.ends, strict=True)
        uneven = ", ".join(f"{end} rank: {pluralize(layers, 'layer')}" for end, layers in ends if layers is not None)
        uneven = uneven if self.pipeline_layout is None else f"layout {self.pipeline_layout}"
        parts = [f"pp {self.pp}{f' ({uneven})' if uneven else ''}"]
        parts += [f"vpp {self.vpp}"] if self.vpp > 1 else []
        if self.micro_batch_group_size is not None and self.vpp > 1:
            parts.append(f"groups of {self.micro_batch_group_size} micro-batches")
        parts += [self.pp_schedule] if self.splits_backward else []
        return ", ".join(parts)


def stage_layers(layers: int, stages: int, *, laid_out: bool = False) -> tuple[int, ...] | None:
    """Return the number of layers of each stage of an even split; None if there is none.

    All stages have the same number of layers. Or the embedding and the LM head count as a layer each, and the first
    and the last stage have one layer less (Megatron-LM's `--account-for-embedding-in-pipeline-split` and
    `--account-for-loss-in-pipeline-split`). If stages are `laid_out` one by one (`--pipeline-model-parallel-layout`),
    the last stages may also have the remainder of equal stages, and one of them only the LM head, as in recipes for
    DeepSeek-V3.

    >>> stage_layers(80, 8), stage_layers(126, 4), stage_layers(80, 7)
    ((10, 10, 10, 10, 10, 10, 10, 10), (31, 32, 32, 31), None)
    >>> stage_layers(61, 8, laid_out=True)
    (8, 8, 8, 8, 8, 8, 8, 5)
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    # Count the embedding and the LM head as a layer each: the end stages then have fewer other layers.
    each, rest = divmod(layers + 2, stages)
    if rest == 0 and stages > 1:
        return (each - 1, *(each,) * (stages - 2), each - 1)
    each = -(-layers // stages)
    counts = tuple(max(0, min(each, layers - each * at)) for at in range(stages))
    return counts if laid_out and counts.count(0) <= 1 else None


def split_layers(
    layers: int, pp: int, vpp: int, ends: tuple[int | None, int | None], *, laid_out: bool = False
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, round by round through the ranks; None if there is no such split.

    `ends` are the layers of the first and of the last rank, which may differ from the ranks in the middle
    (Megatron-LM's `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`). All stages of one
    rank have the same number of layers. Without `ends`, the split is the one of `stage_layers`.

    >>> split_layers(21, 4, 1, (4, 5)), split_layers(20, 4, 2, (4, 4)), split_layers(20, 4, 2, (5, None))
    ((4, 6, 6, 5), (2, 3, 3, 2, 2, 3, 3, 2), None)
    """
    if ends == (None, None):
        return stage_layers(layers, pp * vpp, laid_out=laid_out)
    given = [count for count in ends if count is not None]
    between = pp - len(given)
    each, rest = divmod(layers - sum(given), between) if between else (1, layers - sum(given))
    first, last = (each if count is None else count for count in ends)
    ranks = (first, *(each,) * (pp - 2), last)
    if rest or any(count < 1 or count % vpp for count in ranks):
        return None
    return tuple(count // vpp for count in ranks) * vpp


def ends_of(layers: int, pp: int, vpp: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield uneven `ends` for `split_layers`: fewer layers than each rank in the middle, or unequal ends of two ranks.

    >>> [*ends_of(7, 2, 1)][:3], [*ends_of(6, 4, 1)]
    ([(1, None), (2, None), (3, None)], [(1, 1)])
    """
    # With two ranks nothing is in the middle, so one end determines the other. The last rank's layers stay None.
    if pp == 2:
        yield from ((first, None) for first in range(vpp, layers, vpp))
    elif pp > 2:
        for each in range(vpp, layers // (pp - 2) + 1, vpp):
            ends = layers - each * (pp - 2)
            for first in range(max(vpp, ends - each), min(each, ends - vpp) + 1):
                if (first, ends - first) != (each, each):
                    yield None if first == each else first, None if ends - first == each else ends - first


class DegreeError(ArgumentError):
    """Error about a degree that does not divide the heads, layers, tokens, GPUs or samples that it splits."""

    def __init__(self, message: str, hint: str = "", degrees: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(message, hint, **fields)
        self.degrees = degrees
        """Arguments of `hpgo.estimate_llm` for which another value may be accepted, the most likely cause first."""

    # Exceptions are pickled by their positional arguments alone, which would lose `degrees` between processes.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.degrees)


def check_positions(model: Transformer, seq_length: int) -> None:
    """Raise ArgumentError if sequences are longer than the learned positions of `model`, with their number.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> check_positions(TRANSFORMERS["gpt-2-xl"], 8192)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: seq_length is 8192, but `gpt-2-xl` has positions for 1024 tokens
    """
    # Learned positions are a table, so longer sequences are impossible. With RoPE they are only untrained.
    if model.positions and seq_length > model.positions:
        raise ArgumentError(
            f"seq_length is {seq_length}, but `{shorten(model.name)}` has positions for {model.positions} tokens",
            f"use `seq_length={model.positions}`",
        )
    if model.tower is not None and seq_length < model.tower.image_tokens:
        raise ArgumentError(
            f"seq_length is {seq_length}, but the {pluralize(model.tower.images, 'image')} of a sequence take"
            f" {model.tower.image_tokens} tokens of it",
            f"use `seq_length={model.tower.image_tokens}` or more, or fewer images",
        )


@lru_cache(maxsize=64)
def tensor_sizes(model: Transformer) -> tuple[tuple[str, int], ...]:
    """Return the sizes that the tensor-parallel degree must divide, each with what it counts.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> tensor_sizes(TRANSFORMERS["llama-3-8b"])
    (('attention heads', 32), ('KV heads', 8), ('FFN size', 14336))
    """
    held = [model.block(kind).tensor_sizes for kind in model.kinds]
    return tuple(dict.fromkeys((what, count) for sizes in held for what in sizes for count in sizes[what]))


def check_degrees(model: Transformer, config: ParallelismConfig, *, seq_length: int) -> None:
    """Raise ArgumentError unless `config` splits `model`, with the wrong degree and the nearest accepted ones.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> check_degrees(TRANSFORMERS["llama-3-8b"], ParallelismConfig(tp=3), seq_length=8192)
    Traceback (most recent call last):
    hpgo.llm.parallelism.DegreeError: tp is 3, but it must divide the 32 attention heads of `llama-3-8b`
    """
    of_model = f"of `{model.name}`"
    for what, count in tensor_sizes(model):
        if count % config.tp:
            # The hint names divisors of all sizes at once. A divisor of this one could fail at the next.
            fitting = divisors(gcd(*(count for _, count in tensor_sizes(model))))
            sizes = f"the {what} {count}" if "size" in what else f"the {count} {what}"
            raise DegreeError(
                f"tp is {config.tp}, but it must divide {sizes} {of_model}", nearest(config.tp, fitting), ("tp",)
            )
    if config.ep > 1 and not model.experts:
        raise DegreeError(f"ep is {config.ep}, but `{model.name}` has no experts", "use `ep=1`", ("ep",))
    if model.experts and model.experts % config.ep:
        raise DegreeError(
            f"ep is {config.ep}, but it must divide the {model.experts} experts {of_model}",
            nearest(config.ep, divisors(model.experts)),
            ("ep",),
        )
    if config.etp > 1 and not model.experts:
        raise DegreeError(f"etp is {config.etp}, but `{model.name}` has no experts", "use `etp=1`", ("etp",))
    for field, shown in (("moe_token_dispatcher", config.moe_token_dispatcher), ("overlap_ep_comm", "on")):
        if getattr(config, field) and not model.experts:
            raise ArgumentError(
                f"{field} is {shown}, but `{model.name}` has no experts", f"leave {field} out", code="conflict"
            )
    if model.experts and model.expert_ffn % config.etp:
        raise DegreeError(
            f"etp is {config.etp}, but it must divide the FFN size of experts {model.expert_ffn} {of_model}",
            nearest(config.etp, divisors(model.expert_ffn)),
            ("etp",),
        )
    # Without sequence parallelism all tensor-parallel GPUs hold the same tokens and would send each one several times.
    if model.experts and config.tp > 1 and not config.sequence_parallel:
        raise ArgumentError(
            f"tp {config.tp} with experts needs sequence parallelism, so that each GPU routes different tokens",
            "turn sequence parallelism on, or use tp 1",
        )
    for field in ("recompute_modules", "offload_modules"):
        for module in getattr(config, field):
            needed = _NEEDED_BY_MODULE.get(module)
            if needed and not (model.latent if needed == "latent attention" else model.experts):
                raise ArgumentError(
                    f"{field} is {', '.join(getattr(config, field))}, but {module} needs {needed}, which"
                    f" `{model.name}` does not have",
                    f"leave {module} out",
                )
    _check_graphed_modules(model, config)
    if config.packed_length is not None and config.packed_length > seq_length:
        raise ArgumentError(
            f"packed_length is {config.packed_length}, but a sequence has {seq_length} tokens",
            "leave packed_length out, or use longer sequences",
            code="too_large",
        )
    # Each GPU of a context-parallel group has a chunk from the front of the sequence and one from its end, because
    # causal attention gives later tokens more work.
    parts = 2 * config.cp if config.cp > 1 else 1
    if seq_length % parts or (config.sequence_parallel and seq_length // config.cp % config.tp):
        fitting = _contexts(seq_length, config.tp)
        raise DegreeError(
            f"cp {config.cp} with tp {config.tp} does not divide sequences of {seq_length} tokens into {parts}"
            f" equal parts of whole tokens per GPU",
            nearest(config.cp, fitting) if fitting else "use a sequence length that is a power of 2",
            ("cp", "tp") if config.tp > 1 else ("cp",),
        )
    if config.pipeline_layout is not None:
        check_layout(
            config.pipeline_layout, pp=config.pp, vpp=config.vpp, layers=model.layers, further=model.further_tokens,
            model=model.name,
        )  # fmt: skip
    laid_out, ends = bool(model.experts), config.ends
    counts = config.stage_counts(model)
    for field, hint in (
        ("recompute_num_layers", "leave recompute_num_layers out to recompute all layers"),
        ("recompute_every", "use recompute='none' to recompute no layer"),
        ("cpu_offload_num_layers", f"use {max(counts or (0,))} to offload all layers"),
    ):
        count = getattr(config, field)
        if counts is not None and count is not None and count > max(counts):
            raise ArgumentError(
                f"{field} is {count}, but a stage has at most {max(counts)} layers", hint, code="too_large"
            )
    if counts is None:
        if ends != (None, None):
            raise ArgumentError(
                f"{config.named_pipeline()} does not split the {model.layers} layers {of_model}: all ranks in the"
                " middle, and all stages of a rank, need the same number",
                "leave first_rank_layers and last_rank_layers out, or change pp",
            )
        fitting = _pipelines(model.layers, config.vpp, laid_out=laid_out)
        degree = f"pp {config.pp}" + (f" with vpp {config.vpp}" if config.vpp > 1 else "")
        raise DegreeError(
            f"{degree} does not divide the {model.layers} layers {of_model}, nor {model.layers + 2} with the embedding"
            " and the LM head as a layer each",
            nearest(config.pp, fitting) if fitting else "use a smaller vpp",
            ("pp", "vpp") if config.vpp > 1 else ("pp",),
        )


def _check_graphed_modules(model: Transformer, config: ParallelismConfig) -> None:
    """Raise ArgumentError unless the model's layers have the modules of CUDA graphs, and these have fixed shapes."""
    if config.cuda_graph_impl == "none":
        return
    modules = config.cuda_graph_modules
    if model.experts and not modules:
        # Megatron-LM captures experts only if it drops and pads tokens (`moe_pad_expert_input_to_capacity`).
        raise ArgumentError(
            f"cuda_graph_impl is {config.cuda_graph_impl} for all of a layer, but experts of `{model.name}` receive"
            " other numbers of tokens in each pass, which no graph can replay",
            "use cuda_graph_impl='transformer_engine' with cuda_graph_modules attn, moe_router and moe_preprocess",
        )
    dense = not model.experts or len(model.dense_layers) > 0
    for module in modules:
        if module.startswith("moe") and not model.experts:
            raise ArgumentError(
                f"cuda_graph_modules is {', '.join(modules)}, but {module} needs experts, which `{model.name}` does not"
                " have",
                f"leave {module} out",
            )
        if module == "mlp" and not dense:
            raise ArgumentError(
                f"cuda_graph_modules is {', '.join(modules)}, but mlp needs layers without experts, which"
                f" `{model.name}` does not have",
                "leave mlp out, or use moe_router",
            )


def changed(config: ParallelismConfig, **values: Any) -> ParallelismConfig:
    """Return a copy with other values, like `dataclasses.replace`, but without checks.

    >>> changed(ParallelismConfig(tp=2), pp=4) == ParallelismConfig(tp=2, pp=4)
    True
    """
    # The search chose the values itself. Checking them takes 40 times as long.
    found = object.__new__(ParallelismConfig)
    vars(found).update(vars(config), **values)
    return found


@lru_cache(maxsize=256)
def _pipelines(layers: int, vpp: int, *, laid_out: bool) -> list[int]:
    """Return the degrees of pipeline parallelism that split this number of layers evenly."""
    degrees = range(1, layers + 3)
    return [d for d in degrees if stage_layers(layers, d * vpp, laid_out=laid_out) is not None]


@lru_cache(maxsize=256)
def _contexts(seq_length: int, tp: int) -> list[int]:
    """Return the degrees of context parallelism up to 1,024 that split a sequence into equal chunks."""
    return [d for d in range(1, min(seq_length, 1024) + 1) if seq_length % (2 * d) == 0 and seq_length // d % tp == 0]


def check_offload(config: ParallelismConfig) -> None:
    """Raise ArgumentError if weights are in CPU memory, but are no shards that each pass gathers.

    >>> check_offload(ParallelismConfig(zero_stage=1, offload_params=True, optimizer_offload_fraction=1.0))
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: offload_params is on, but it needs ZeRO stage 3 without a pipeline, not stage 1 with pp 1
    """
    # Searches make configurations of all stages from one with the settings, so `ParallelismConfig` can't check this.
    if config.offload_params and (config.zero_stage < MAX_ZERO or config.pp > 1):
        raise ArgumentError(
            f"offload_params is on, but it needs ZeRO stage 3 without a pipeline, not stage {config.zero_stage} with pp"
            f" {config.pp}",
            "use zero_stage=3, or leave offload_params out",
            code="conflict",
        )


def check_batch(config: ParallelismConfig, global_batch_size: int) -> None:
    """Raise ArgumentError unless `config` splits a global batch into micro-batches that its schedule accepts.

    >>> check_batch(ParallelismConfig(dp=4, micro_batch_size=3), 64)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hpgo.llm.parallelism.DegreeError: global_batch_size is 64, but it must be a multiple of dp × micro-batch size ...
    """
    each = config.dp * config.micro_batch_size
    if global_batch_size % each:
        sizes = divisors(global_batch_size)
        fitting = [size // config.dp for size in sizes if size % config.dp == 0]
        raise DegreeError(
            f"global_batch_size is {global_batch_size}, but it must be a multiple of dp × micro-batch size ="
            f" {config.dp} × {config.micro_batch_size}",
            f"for the micro-batch, {nearest(config.micro_batch_size, fitting)}"
            if fitting
            else f"for dp, which follows from the other degrees, {nearest(config.dp, sizes)}",
            ("micro_batch_size", "global_batch_size", "devices"),
        )
    micro_batches = config.micro_batches(global_batch_size)
    # ZB-V has no rounds.
    if config.vpp == 1 or config.pp_schedule == "zb_v" or has_whole_rounds(config, micro_batches):
        return
    group = config.micro_batch_group_size
    if group is not None:
        raise DegreeError(
            f"micro_batch_group_size is {group}, but of {pluralize(micro_batches, 'micro-batch')} each"
            f" group needs at least pp {config.pp}, the last one too",
            f"use micro_batch_group_size={config.pp}, or another micro-batch",
            ("micro_batch_group_size", "micro_batch_size", "vpp", "global_batch_size"),
        )
    raise DegreeError(
        f"the number of micro-batches is {micro_batches}, but interleaving needs a multiple of pp {config.pp}",
        "use a smaller micro-batch or dp, or `vpp=1`",
        ("micro_batch_size", "vpp", "global_batch_size"),
    )


def has_whole_rounds(config: ParallelismConfig, micro_batches: int) -> bool:
    """Return whether interleaving can run a number of micro-batches: in groups of at least pp, the last one included.

    Megatron-LM refuses others (`forward_backward_pipelining_with_interleaving`), since ranks would wait in each group.

    >>> [has_whole_rounds(ParallelismConfig(pp=4, vpp=2, micro_batch_group_size=g), 10) for g in (None, 4, 5, 6, 12)]
    [False, False, True, True, False]
    """
    group = config.pp if config.micro_batch_group_size is None else config.micro_batch_group_size
    last = micro_batches % group
    return config.pp <= group <= micro_batches and (last == 0 or last >= config.pp)


def data_degree(config: ParallelismConfig, gpus: int) -> int:
    """Return the degree of data parallelism on `gpus` GPUs. Raise DegreeError with the nearest accepted numbers.

    >>> data_degree(ParallelismConfig(tp=4, pp=8), 64)
    2
    """
    each = config.model_parallel_size * config.pp
    if gpus % each:
        below, beyond = gpus // each * each, (gpus // each + 1) * each
        others = "other degrees"
        if gpus % config.model_parallel_size == 0:
            others = f"another pp: {nearest(config.pp, divisors(gpus // config.model_parallel_size))}"
        used = [name for name, degree in (("pp", config.pp), ("cp", config.cp), ("tp", config.tp)) if degree > 1]
        raise DegreeError(
            f"tp {config.tp} x cp {config.cp} x pp {config.pp} is {each} GPUs, which does not divide {gpus}",
            f"use {' or '.join(str(count) for count in (below, beyond) if count)} GPUs, or {others}",
            (*used, "devices"),
        )
    if (stage := gpus // config.pp) % config.ep:
        raise DegreeError(
            f"ep is {config.ep}, but it must divide the {pluralize(stage, 'GPU')} of a stage",
            nearest(config.ep, divisors(stage)),
            ("ep",),
        )
    if stage // config.ep % config.etp:
        raise DegreeError(
            f"etp is {config.etp}, but ep {config.ep} x etp must divide the {pluralize(stage, 'GPU')} of a stage",
            nearest(config.etp, divisors(stage // config.ep)),
            ("etp",),
        )
    if (dp := gpus // each) % config.dp_replicate:
        raise DegreeError(
            f"dp_replicate is {config.dp_replicate}, but it must divide the data-parallel degree {dp}",
            nearest(config.dp_replicate, divisors(dp)),
            ("devices",),
        )
    return dp


def nearest(wanted: int, fitting: Iterable[int]) -> str:
    """Return a hint with the nearest of `fitting` below and above `wanted`.

    >>> nearest(3, [1, 2, 4, 8]), nearest(9, [1, 2])
    ('use 2 or 4', 'use 2')
    """
    known = sorted(fitting)
    around = [*[d for d in known if d < wanted][-1:], *[d for d in known if d > wanted][:1]]
    if not around:
        return f"no value other than {safe_repr(wanted)} is accepted"
    return f"use {' or '.join(map(str, around))}"
