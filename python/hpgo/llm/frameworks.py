"""Configurations of a transformer that each framework runs: the rules of the search and of the exports.

`hpgo.llm.parallelism` checks that degrees divide the model, which holds for all frameworks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpgo.base.messages import join_words, pluralize, shorten
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.llm.arithmetic import TABLES, ArithmeticSettings, stated
from hpgo.llm.hugging_face_shape import DIVIDED, model_type
from hpgo.llm.megatron_shape import NoShapeError, broken_degrees, megatron_shape
from hpgo.llm.parallelism import (
    MAX_ZERO,
    BaseWeightsDtype,
    CudaGraphImpl,
    Optimizer,
    ParallelismConfig,
    PipelineSchedule,
    Precision,
    Recompute,
    check_degrees,
)
from hpgo.llm.pipeline_layout import parse_layout
from hpgo.llm.titan_shape import needs_backend, titan_package
from hpgo.programs.frameworks import NAMES, TABLE, Framework, row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.model.transformer import Transformer

BY_HAND = "copy the degrees of an estimate without `--framework` into a recipe for that model"
"""The hint for a model that the settings of no framework describe, or the last part of the hint for other models."""
FEWER_TOKENS = "set further_tokens (num_nextn_predict_layers in a config.json) to 0"
"""The hint for a model with multi-token prediction that a framework does not support, or its first part."""


class Unsupported(NamedTuple):
    """The reason why a framework runs no configuration of a model, and a hint."""

    why: str
    """Reason, in words that follow the framework's name."""
    hint: str
    """Action that the user can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSupport(Record):
    """The configurations that a framework runs."""

    zero_stages: tuple[int, ...]
    """ZeRO stages without a pipeline."""
    zero_stages_with_pp: tuple[int, ...]
    """ZeRO stages beside a pipeline."""
    precisions: tuple[Precision, ...]
    fsdp_stages: tuple[int, ...] = ()
    """Further ZeRO stages without a pipeline. A search uses them only if they are fixed."""
    hybrid_stages: tuple[int, ...] = ()
    """ZeRO stages that may shard inside groups of replicas (hybrid sharding)."""
    tp_comm_overlap: bool = True
    """Whether GEMMs may overlap the communication of tensor parallelism."""
    overlap_needs_compiler: bool = False
    """Whether that needs compiled layers."""
    cp: bool = True
    """Whether context parallelism is supported."""
    ep: bool = False
    """Whether expert parallelism is supported."""
    tp_divides_experts: bool = False
    """Whether tensor parallelism without expert parallelism divides each expert, which the cost model leaves out."""
    expert_settings: bool = False
    """Whether experts may be divided by tensor parallelism, the exchange of their tokens chosen, and hidden."""
    micro_batch_groups: bool = False
    """Whether interleaving may run groups of more micro-batches than ranks."""
    vpp: bool = True
    """Whether virtual stages (interleaving) are supported."""
    uneven_ends: bool = False
    """Whether the first and the last pipeline rank may have other numbers of layers than the ranks in the middle."""
    empty_stages: bool = False
    """Whether a layout may have stages without layers."""
    pp_schedules: tuple[PipelineSchedule, ...] = ("1f1b",)
    """Pipeline schedules that are supported."""
    recompute: tuple[Recompute, ...] = ("none", "full")
    """Kinds of recomputation that are supported."""
    recompute_num_layers: bool = False
    """Whether only some layers of each stage may be recomputed."""
    recompute_modules: bool = False
    """Whether parts of layers may be recomputed."""
    narrow_state: Literal["none", "moments", "copy", "all"] = "none"
    """Optimizer state that may be in fewer than 32 bits: none; moments and an fp16 copy of the weights, each with ZeRO;
    moments with a bf16 copy and bf16 gradients, with ZeRO; or moments only without a copy, in bf16."""
    grad_reduce_in_bf16: bool = False
    """Whether gradients may be accumulated in 16 bits."""
    flatten_gradients: bool = False
    """Whether the framework's optimizers copy 16-bit gradients into one flat tensor."""
    dtensor: bool = False
    """Whether the framework shards matrices with DTensor and replicas with FSDP2."""
    shape: Literal["any", "titan", "megatron"] = "any"
    """Models that the framework's settings describe: any model, because the user brings the code; torchtitan's
    packages; or Megatron-LM's GPT. `hpgo.llm.arithmetic.TABLES` has the settings of the latter two."""
    hybrid: bool = True
    """Whether models with a pattern of scans, attention and feed-forward layers are supported. Only for the shape
    `megatron`."""
    ties: bool = True
    """Whether embeddings may be tied. Always True for models that the user brings."""
    ties_piped: bool = True
    """Whether embeddings may be tied if there is a pipeline."""
    bf16_by_fsdp: bool = False
    """Whether tensor and pipeline parallelism compute in fp32 unless FSDP shards weights, over dp or cp."""
    sequence_parallel: Literal["chosen", "always", "never"] = "chosen"
    """Whether tensor parallelism includes sequence parallelism."""
    tp_alone: bool = False
    """Whether tensor parallelism excludes pipelines, adapters and groups of replicas, and needs KV heads for each rank
    of a model that `hpgo.llm.hugging_face_shape` knows, and keeps embeddings whole that are not tied."""
    widens_by_zero: bool = False
    """Whether gradients of 16-bit weights accumulate in 32 bits only with ZeRO, or with a single replica."""
    context_needs_flash: bool = False
    """Whether context parallelism needs flash attention."""
    further_tokens: bool = False
    """Whether multi-token prediction is supported."""
    cpu_offload: bool = False
    """Whether activations may wait in CPU memory, of whole layers or of modules."""
    cuda_graphs: tuple[CudaGraphImpl, ...] = ("none",)
    """Kinds of CUDA graphs that are supported."""
    cuda_graphs_piped: bool = False
    """Whether CUDA graphs are supported with a pipeline."""
    adapters: bool = False
    """Whether adapters may be trained beside frozen weights."""
    base_weights: tuple[BaseWeightsDtype, ...] = ("bf16",)
    """Number formats of frozen weights that are supported."""
    optimizers: tuple[Optimizer, ...] = ("adam",)
    """Optimizers that are supported."""
    optimizer_offload: Literal["none", "states", "fsdp", "zero"] = "none"
    """State that may be in CPU memory: none; any share of the optimizer's with ZeRO; all, with the weights, of ZeRO
    stage 3; or the optimizer's with ZeRO, a share of it with stage 3, and with stage 3 the weights."""
    packed: Literal["none", "single", "any"] = "none"
    """Whether attention may keep packed documents apart: no, in micro-batches of one sequence, or always."""
    overlaps_piped: bool = True
    """Whether gradients are reduced during backward passes of a pipeline."""
    sums_each_pass: bool = False
    """Whether each pass reduces gradients if there is no pipeline. Only ZeRO stage 3 has a term for this."""

    def stated(self, model: Transformer) -> ArithmeticSettings:
        """Return the settings for the model's arithmetic and the values without one; empty if the user brings code."""
        return stated(TABLES.get(self.shape, {}), model)

    def lacking(self, model: Transformer) -> Unsupported | None:
        """Return the reason why the framework runs no configuration of `model`; None if it runs some.

        The search and the exports both call this, so every plan for a framework can be exported for it.
        """
        if (why := self._why_lacking(model)) is None:
            return None
        able = _named(lambda rules: rules._why_lacking(model) is None)
        others = [f"use {able}"] if able else []
        further = self._lacking_further(model) is not None
        return Unsupported(why, ", or ".join([FEWER_TOKENS, *others] if further else [*others, BY_HAND]))

    def _why_lacking(self, model: Transformer) -> str | None:
        return (
            self._lacking_further(model)
            or self._lacking_shape(model)
            or self._lacking_fused(model)
            or self._lacking_arithmetic(model)
        )

    def _lacking_fused(self, model: Transformer) -> str | None:
        # Users bring the model's code, but estimates count fused attention. In transformers that is PyTorch's
        # scaled_dot_product_attention, which has no softcap and no sinks.
        if self.shape != "any":
            return None
        cap = None if model.arithmetic is None else model.arithmetic.attention_logit_softcap
        if any(one.sinks for block in model.blocks for one in block.attention):
            return f"runs fused attention without attention sinks, but `{shorten(model.name)}` has them"
        if cap is None:
            return None
        return (
            "runs fused attention, which has no softcap of attention scores, but"
            f" `{shorten(model.name)}` has one ({cap:g})"
        )

    def _lacking_arithmetic(self, model: Transformer) -> str | None:
        # transformers reads all values of these models in their config.json.
        missing = () if self.by_backend(model) else self.stated(model).missing
        return (
            f"has no setting for {join_words(missing, 'or')}, which `{shorten(model.name)}` needs" if missing else None
        )

    def _lacking_shape(self, model: Transformer) -> str | None:
        if self.shape == "any":
            return None
        # Options describe whole families of models. The error names the first property that has none.
        what = None
        if self.shape == "megatron":
            try:
                what = "a pattern of scans" if megatron_shape(model).hybrid and not self.hybrid else None
            except NoShapeError as error:
                what = str(error)
        else:
            try:
                titan_package(model, sparse=self.ep)
            except NoShapeError as error:
                what = str(error)
        if what is None and model.tied and not self.ties:
            what = "tied embeddings"
        return f"has no settings for {what}, which `{shorten(model.name)}` has" if what else None

    def _lacking_further(self, model: Transformer) -> str | None:
        if not model.further_tokens:
            return None
        if not self.further_tokens:
            layers = pluralize(model.further_tokens, "layer")
            return f"does not support multi-token prediction, but `{model.name}` has {layers} for it"
        if model.positions:
            return f"does not support multi-token prediction with learned positions, but `{model.name}` has both"
        return None

    def broken(self, config: ParallelismConfig, *, micro_batches: int, model: Transformer | None = None) -> str | None:
        """Return the reason why the framework does not run `config`, to follow the framework's name; None if it does.

        Without a `model`, only the rules that hold for all models are checked.

        >>> MEGATRON.broken(ParallelismConfig(dp=8, zero_stage=2), micro_batches=1)
        'supports ZeRO stage 0, 1 or 3, not 2'
        """
        if why := self.broken_degrees(config, model=model):
            return why
        experts = model is not None and bool(model.experts)
        if self._loses_bf16(config):
            return (
                f"computes in fp32 with tp or pp unless FSDP shards weights, but tp is {config.tp}, pp is {config.pp}"
                " and dp × cp is 1"
            )
        if experts and config.expert_dp_size % config.dp_replicate:
            return (
                f"shards experts in as many groups as other weights, but {config.expert_dp_size} replicas of an expert"
                f" are no {config.dp_replicate} equal groups"
            )
        if config.zero_stage in self.zero_stages_of(config, micro_batches=micro_batches, experts=experts):
            return None
        if config.zero_stage in self.fsdp_stages and config.pp == 1:
            return None
        # The stage would be accepted with a single micro-batch, so the repeated reduction is the reason.
        if config.zero_stage in (known := self.zero_stages_of(config, micro_batches=1, experts=experts)):
            return (
                f"reduces gradients in each of {micro_batches} backward passes without a pipeline, which the cost model"
                f" does not cover for ZeRO stage {config.zero_stage}"
            )
        beside = " with a pipeline" if config.pp > 1 and self.zero_stages != self.zero_stages_with_pp else ""
        known = known if config.pp > 1 else (*known, *self.fsdp_stages)
        return f"supports ZeRO stage {join_words(known, 'or')}{beside}, not {config.zero_stage}"

    def broken_degrees(self, config: ParallelismConfig, *, model: Transformer | None = None) -> str | None:
        """Return the first rule that `config` breaks, like `broken`, but without the rules for ZeRO stages."""
        if model is not None and self.shape == "megatron" and (why := broken_degrees(model, config)):
            return why
        tied = model is not None and model.tied
        # The order matters: an error names the first rule that is broken.
        schedule, pipeline = config.pp_schedule, config.named_pipeline()
        offloaded = f"{config.cpu_offload_num_layers} layers"
        rules = (
            (config.pp > 1 and tied and not self.ties_piped,
             f"does not support a pipeline for models with tied embeddings, but pp is {config.pp}"),
            *self._backend_rules(config, model),
            *self._tensor_rules(config, model),
            (config.tp_comm_overlap and not self.tp_comm_overlap,
             "does not overlap the communication of tensor parallelism here, but tp_comm_overlap is on"),
            (config.tp_comm_overlap and self.overlap_needs_compiler and not config.fused_elementwise,
             "overlaps the communication of tensor parallelism in compiled layers only, but fused_elementwise is off"),
            (config.cp > 1 and not self.cp, f"does not support context parallelism here, but cp is {config.cp}"),
            (config.cp > 1 and not config.flash_attention and self.context_needs_flash,
             f"supports context parallelism only with flash attention, but cp is {config.cp} without it"),
            (config.ep > 1 and not self.ep, f"does not support expert parallelism here, but ep is {config.ep}"),
            *self._expert_rules(config, sparse=model is not None and bool(model.experts)),
            (config.micro_batch_group_size and config.vpp > 1 and not self.micro_batch_groups,
             f"interleaves groups of pp micro-batches, but micro_batch_group_size is {config.micro_batch_group_size}"),
            (config.dp_replicate > 1 and config.zero_stage not in self.hybrid_stages,
             (f"shards in groups of replicas with ZeRO stage {join_words(self.hybrid_stages, 'or') or 'none'}, but"
              f" dp_replicate is {config.dp_replicate} with ZeRO stage {config.zero_stage}")),
            (config.vpp > 1 and not self.vpp, f"supports one stage per pipeline rank, but vpp is {config.vpp}"),
            (schedule not in self.pp_schedules,
             f"supports pipeline schedule {join_words(self.pp_schedules, 'or')}, not {schedule}"),
            (config.splits_backward and config.fused_elementwise,
             (f"can't compile layers with split backward passes ({schedule}), but the configuration has"
              " fused_elementwise")),
            (config.splits_backward and config.recompute == "full",
             (f"recomputes a layer once for each of its weights with split backward passes ({schedule}), which the cost"
              " model does not cover")),
            (config.ends != (None, None) and not self.uneven_ends,
             f"needs the same number of layers on each rank, not {pipeline}"),
            (config.pipeline_layout and not self.empty_stages and 0 in parse_layout(config.pipeline_layout).counts,
             f"needs a layer on each stage, not {pipeline}"),
            (config.recompute not in self.recompute,
             f"supports recompute {join_words(self.recompute, 'or')}, not {config.recompute}"),
            (config.recompute_num_layers is not None and not self.recompute_num_layers,
             f"recomputes all layers or none, not {config.recompute_num_layers} of each stage"),
            (config.recompute_modules and not self.recompute_modules,
             f"does not recompute parts of layers, but recompute_modules is {', '.join(config.recompute_modules)}"),
            (config.has_narrow_state and not self._runs_state(config), self._known_state(config)),
            (config.grad_reduce_in_bf16 and not self.grad_reduce_in_bf16,
             "accumulates gradients in 32 bits here, not in 16"),
            (config.cpu_offload_num_layers and not self.cpu_offload,
             f"does not support offloading here, but the activations of {offloaded} are to be in CPU memory"),
            (config.offload_modules and not self.cpu_offload,
             f"does not support offloading here, but offload_modules is {', '.join(config.offload_modules)}"),
            (config.cuda_graph_impl not in self.cuda_graphs,
             f"supports CUDA graphs {join_words(self.cuda_graphs, 'or')} here, not {config.cuda_graph_impl}"),
            (config.cuda_graph_impl != "none" and config.pp > 1 and not self.cuda_graphs_piped,
             f"does not support CUDA graphs with a pipeline, but pp is {config.pp}"),
            (config.lora_rank and not self.adapters,
             (f"has no adapters here, as torchtitan 0.3, DeepSpeed and Megatron-Bridge have, but lora_rank is"
              f" {config.lora_rank}")),
            (config.base_weights_dtype not in self.base_weights,
             f"does not store frozen weights in {config.base_weights_dtype} here"),
            (config.optimizer not in self.optimizers,
             f"supports optimizer {join_words(self.optimizers, 'or')} here, not {config.optimizer}"),
            (config.optimizer == "muon" and config.zero_stage in self.fsdp_stages,
             f"runs ZeRO stage {config.zero_stage} with optimizer adam or sgd, not muon"),
            (config.optimizer_offload_fraction > 0 and not self._offloads(config), self._known_offload(config)),
            (config.packed_length is not None and self.packed == "none",
             f"does not keep packed documents apart here, but packed_length is {config.packed_length}"),
            (config.packed_length is not None and self.packed == "single" and config.micro_batch_size > 1,
             (f"packs documents into micro-batches of one sequence, but micro_batch_size is {config.micro_batch_size}"
              f" with packed_length {config.packed_length}")),
            (config.precision not in self.precisions,
             f"supports precision {join_words(self.precisions, 'or')} here, not {config.precision}"),
        )  # fmt: skip
        return next((why for is_broken, why in rules if is_broken), None)

    def with_fsdp(self) -> FrameworkSupport:
        """Return the configurations that a search has if one of the `fsdp_stages` is fixed.

        >>> MEGATRON.with_fsdp().zero_stages
        (0, 1, 3)
        """
        return replace(self, zero_stages=(*self.zero_stages, *self.fsdp_stages))

    def _expert_rules(self, config: ParallelismConfig, *, sparse: bool) -> tuple[tuple[bool, str], ...]:
        """Return the rules on experts, like those of `broken_degrees`."""
        named = self.expert_settings
        divides = sparse and self.tp_divides_experts
        return (
            (divides and config.tp > 1 and config.ep == 1,
             f"divides each expert if tp has no ep beside it, but tp is {config.tp} and ep is 1"),
            (divides and config.cuda_graph_impl != "none",
             f"captures no exchange of tokens, but cuda_graph_impl is {config.cuda_graph_impl}"),
            (divides and config.lora_rank > 0,
             f"adapts no matrices of experts here, but lora_rank is {config.lora_rank}"),
            (config.etp > 1 and not named, f"does not divide single experts here, but etp is {config.etp}"),
            (config.moe_token_dispatcher is not None and not named,
             f"has no choice of dispatchers here, but moe_token_dispatcher is {config.moe_token_dispatcher}"),
            (config.overlap_ep_comm and not named,
             "does not hide the exchange of experts here, but overlap_ep_comm is on"),
            (config.overlap_ep_comm and config.ep == 1,
             "hides the exchange of experts only with expert parallelism, but overlap_ep_comm is on and ep is 1"),
            (config.overlap_ep_comm and config.pp > 1 and config.vpp == 1,
             "hides the exchange of experts only with virtual stages, but overlap_ep_comm is on and vpp is 1"),
        )  # fmt: skip

    def by_backend(self, model: Transformer) -> bool:
        """Return whether torchtitan trains a model by its backend for models of transformers, within further rules.

        >>> from hpgo.model.transformer_presets import TRANSFORMERS
        >>> TORCHTITAN.by_backend(TRANSFORMERS["qwen2.5-72b"]), DEEPSPEED.by_backend(TRANSFORMERS["qwen2.5-72b"])
        (True, False)
        """
        return self.shape == "titan" and needs_backend(model)

    def _backend_rules(self, config: ParallelismConfig, model: Transformer | None) -> tuple[tuple[bool, str], ...]:
        """Return the rules on models that torchtitan trains by its backend for models of transformers."""
        if model is None or not self.by_backend(model):
            return ()
        whose, name = "for models of transformers, such as", shorten(model.name)
        return (
            # Five steps of a small Qwen2 with tp 2 did not lower the loss, but with a pipeline they did. OLMo 2 does
            # not start with tp.
            (config.tp > 1, f"does not support tensor parallelism here {whose} `{name}`, but tp is {config.tp}"),
            (config.cp > 1, f"does not support context parallelism here {whose} `{name}`, but cp is {config.cp}"),
            (config.splits_backward,
             (f"does not split backward passes here {whose} `{name}`, but the pipeline schedule is"
              f" {config.pp_schedule}")),
            (config.cuda_graph_impl != "none",
             f"captures no CUDA graphs here {whose} `{name}`, but cuda_graph_impl is {config.cuda_graph_impl}"),
            (config.lora_rank > 0, f"has no adapters {whose} `{name}`, but lora_rank is {config.lora_rank}"),
            (config.packed_length is not None,
             (f"does not keep packed documents apart here {whose} `{name}`, but packed_length is"
              f" {config.packed_length}")),
        )  # fmt: skip

    def _tensor_rules(self, config: ParallelismConfig, model: Transformer | None) -> tuple[tuple[bool, str], ...]:
        tp, sp = config.tp, config.sequence_parallel
        if tp == 1:
            return ()
        alone, name = self.tp_alone, "" if model is None else shorten(model.name)
        heads = 0 if model is None else model.kv_heads
        return (
            (sp and self.sequence_parallel == "never", f"has no sequence parallelism, but tp is {tp} with it"),
            (not sp and self.sequence_parallel == "always",
             f"always uses sequence parallelism with tp, but tp is {tp} without it"),
            (alone and model is not None and model_type(model) not in DIVIDED,
             f"divides matrices of Llama, Mistral, Qwen2 and Qwen3 here, but tp is {tp} for `{name}`"),
            (alone and heads % tp > 0, f"gives each rank KV heads, but tp is {tp} for {pluralize(heads, 'KV head')}"),
            (alone and config.pp > 1, f"runs no pipeline beside tp, but tp is {tp} and pp is {config.pp}"),
            (alone and config.lora_rank > 0,
             f"divides no matrices with adapters, but tp is {tp} and lora_rank is {config.lora_rank}"),
            (alone and config.dp_replicate > 1,
             f"has no groups of replicas beside tp, but tp is {tp} and dp_replicate is {config.dp_replicate}"),
        )  # fmt: skip

    def _loses_bf16(self, config: ParallelismConfig) -> bool:
        return self.bf16_by_fsdp and config.dp_cp_size == 1 and max(config.tp, config.pp) > 1

    def _runs_state(self, config: ParallelismConfig) -> bool:
        """Return whether the framework can store the optimizer state in the formats of `config`."""
        copy = config.main_params_dtype
        if self.narrow_state == "moments":
            return copy in {"fp32", "fp16"} and config.zero_stage > 0
        if self.narrow_state == "copy":
            return (
                copy == "bf16" and config.adam_moments_in_bf16 and config.grad_reduce_in_bf16 and config.zero_stage > 0
            )
        return self.narrow_state == "all" and copy == "none" and config.adam_moments_in_bf16

    def _offloads(self, config: ParallelismConfig) -> bool:
        """Return whether the framework updates the share of the weights of `config` on the CPU."""
        stage = config.zero_stage if config.dp_cp_size > 1 or config.zero_stage == MAX_ZERO else MAX_ZERO - 1
        if self.optimizer_offload == "states":
            return not (config.offload_params or config.has_narrow_state) and stage > 0 and config.precision == "bf16"
        if self.optimizer_offload == "fsdp":
            return config.offload_params and config.zero_stage == MAX_ZERO and config.pp == 1
        needs_3 = config.offload_params or config.optimizer_offload_fraction < 1
        return (
            self.optimizer_offload == "zero"
            and config.optimizer == "adam"
            and (config.zero_stage == MAX_ZERO if needs_3 else stage > 0)
            and not (config.offload_params and config.pp > 1)
        )

    def _known_offload(self, config: ParallelismConfig) -> str:
        known = {
            "none": "does not update weights on the CPU here",
            "states": "updates weights on the CPU with ZeRO, state in 32 bits and precision bf16, and keeps weights on"
            " the GPU",
            "fsdp": "updates weights on the CPU with offload_params, ZeRO stage 3 and no pipeline",
            "zero": "updates weights on the CPU with adam and ZeRO, and a share of them, or with offload_params, with"
            " stage 3 and no pipeline",
        }[self.optimizer_offload]
        return (
            f"{known}, but optimizer_offload_fraction is {config.optimizer_offload_fraction:g} with ZeRO stage"
            f" {config.zero_stage}"
        )

    def open_stage(self, config: ParallelismConfig) -> int:
        """Return the ZeRO stage with which to check a configuration whose stage is open: 1, or 3 to offload state.

        >>> moved = ParallelismConfig(optimizer_offload_fraction=0.5)
        >>> DEEPSPEED.open_stage(moved), DEEPSPEED.open_stage(ParallelismConfig()), MEGATRON.open_stage(moved)
        (3, 1, 1)
        """
        # Stage 3 can offload all that others can. Searches then leave out the stages that can't.
        offloads = config.optimizer_offload_fraction > 0 and config.pp == 1
        return MAX_ZERO if offloads and MAX_ZERO in self.zero_stages else 1

    @property
    def offload_choices(self) -> tuple[dict[str, Any], ...]:
        """Settings that store optimizer state in CPU memory, from a quarter of it to all; empty if there are none.

        The last ones store weights, too, where the framework does.
        """
        shares = [{"optimizer_offload_fraction": share} for share in (0.25, 0.5, 0.75, 1.0)]
        weights = {"optimizer_offload_fraction": 1.0, "offload_params": True}
        return tuple(
            {"none": [], "states": shares, "fsdp": [weights], "zero": [*shares, weights]}[self.optimizer_offload]
        )

    def _known_state(self, config: ParallelismConfig) -> str:
        state = f"exp_avg_dtype {config.exp_avg_dtype}, exp_avg_sq_dtype {config.exp_avg_sq_dtype} and"
        known = {
            "none": "in 32 bits",
            "moments": "with ZeRO and main_params_dtype fp32 or fp16",
            "copy": "in 32 bits, or with ZeRO all in bf16 with grad_reduce_in_bf16",
            "all": "in 32 bits, or all in bf16 with main_params_dtype none",
        }[self.narrow_state]
        return f"stores the optimizer state {known}, not {state} main_params_dtype {config.main_params_dtype}" + (
            "" if config.zero_stage else " without ZeRO"
        )

    def known_stages(self, pp: int) -> tuple[int, ...]:
        """Return all ZeRO stages of the framework with `pp` pipeline ranks, and 0, which is none.

        >>> MEGATRON.known_stages(1), TORCHTITAN.known_stages(2)
        ((0, 1, 3), (0, 2))
        """
        alone = () if pp > 1 else (*self.zero_stages, *self.fsdp_stages)
        return tuple(sorted({0, *alone, *self.zero_stages_with_pp}))

    def zero_stages_of(
        self, config: ParallelismConfig, *, micro_batches: int, experts: bool = False
    ) -> tuple[int, ...]:
        """Return the ZeRO stages of a configuration that the cost model covers; only 0 if no weight has replicas.

        Empty if the framework does not run the configuration at all.

        `experts` selects models with experts, which may have replicas even if other weights have none.

        >>> [TORCHTITAN.zero_stages_of(ParallelismConfig(dp=2), micro_batches=count) for count in (1, 4)]
        [(2, 3), (3,)]
        """
        if self._loses_bf16(config):
            return ()
        # Without replicas nothing can be sharded, and listing equal configurations once is enough. Optimizers that need
        # ZeRO for narrow state run it with a single replica, too.
        if max(config.dp_cp_size, config.expert_dp_size if experts else 1) == 1:
            # Weights in CPU memory are fetched like shards, even if they are whole.
            if config.offload_params and MAX_ZERO in self.zero_stages:
                return (MAX_ZERO,)
            return (1,) if config.has_narrow_state and self.narrow_state in {"moments", "copy"} else (0,)
        widens = self.widens_by_zero and config.precision == "bf16" and not config.grad_reduce_in_bf16
        once = config.pp > 1 or micro_batches == 1 or not self.sums_each_pass
        stages = self.zero_stages_with_pp if config.pp > 1 else self.zero_stages
        return tuple(stage for stage in stages if (stage or not widens) and (once or stage == MAX_ZERO))

    def as_run(self, config: ParallelismConfig) -> ParallelismConfig:
        """Return `config` with the overlap and the fused operations that the framework can run.

        >>> [TORCHTITAN.as_run(config).overlap_dp_comm for config in (ParallelismConfig(pp=2), ParallelismConfig(dp=2))]
        [False, True]
        """
        # Estimates must not assume an overlap or a fused kernel that the framework never runs.
        overlap = config.overlap_dp_comm and (self.overlaps_piped or config.pp == 1)
        # Megatron-LM's Muon needs whole gradients (`validate_args` of arguments.py, 0.16 to 0.19).
        overlap = overlap and config.optimizer != "muon"
        fused = config.fused_elementwise and not config.splits_backward
        if (overlap, fused) == (config.overlap_dp_comm, config.fused_elementwise):
            return config
        return replace(config, overlap_dp_comm=overlap, fused_elementwise=fused)


MEGATRON = FrameworkSupport(
    zero_stages=(0, 1),
    zero_stages_with_pp=(0, 1),
    precisions=("bf16", "fp16", "fp8", "fp4"),
    fsdp_stages=(3,),
    hybrid_stages=(1,),
    ep=True,
    expert_settings=True,
    micro_batch_groups=True,
    uneven_ends=True,
    empty_stages=True,
    recompute=("none", "selective", "full"),
    recompute_num_layers=True,
    recompute_modules=True,
    narrow_state="moments",
    grad_reduce_in_bf16=True,
    further_tokens=True,
    cpu_offload=True,
    cuda_graphs=("none", "local", "transformer_engine", "full_iteration"),
    cuda_graphs_piped=True,
    optimizers=("adam", "sgd", "muon"),
    optimizer_offload="states",
    packed="single",
    shape="megatron",
    context_needs_flash=True,
)
"""Megatron-LM. Its FSDP shards more, but excludes many other features, so a search uses it only if `zero_stage` is
fixed to 3. Beside a pipeline, the cost model does not cover it.

Its attention is Transformer Engine's, whose `UnfusedDotProductAttention` has no context parallelism
(`transformer_engine/pytorch/attention/dot_product_attention/utils.py`, 2.9 to 2.18).
"""
MEGATRON_BRIDGE = replace(
    MEGATRON, fsdp_stages=(), precisions=("bf16", "fp16", "fp8"), optimizers=("adam", "sgd"), adapters=True,
    cuda_graphs=("none", "transformer_engine", "full_iteration"), further_tokens=False, hybrid=False,
)  # fmt: skip
"""Megatron-Bridge, which trains models of Megatron Core that it builds from a configuration of Hugging Face.

It captures graphs of layers by Transformer Engine only (`validate_cuda_graph_configuration` in `utils/cuda_graph.py`,
0.6.0). Its Megatron-FSDP, Muon, multi-token prediction and models with scans are not exported.
"""
TORCHTITAN = FrameworkSupport(
    zero_stages=(2, 3),
    zero_stages_with_pp=(2,),
    precisions=("bf16",),
    hybrid_stages=(2, 3),
    overlap_needs_compiler=True,
    pp_schedules=("1f1b", "interleaved_zb", "zb_v"),
    dtensor=True,
    overlaps_piped=False,
    sums_each_pass=True,
    shape="titan",
    ep=True,
    tp_divides_experts=True,
    ties_piped=False,
    narrow_state="all",
    cuda_graphs=("none", "full_iteration"),
    adapters=True,
    optimizer_offload="fsdp",
    packed="any",
)
"""torchtitan 0.3. Replicas use FSDP: weights stay gathered from the forward to the backward pass (ZeRO stage 2), or are
gathered in each pass (3); with a pipeline they stay gathered for the step. It refuses to compile layers with split
backward passes. DualPipeV is left out: torchtitan runs the two passes of its pairs one after the other, so its
additional memory gains nothing. Llama and Qwen3 tie embeddings only without a pipeline
(`Decoder.Config.update_from_config`, 0.3.0)."""
TORCHTITAN_02 = replace(
    TORCHTITAN, ties=False, cuda_graphs=("none",), ep=False, tp_divides_experts=False,
    bf16_by_fsdp=True, sequence_parallel="always", adapters=False, packed="none",
)  # fmt: skip
"""torchtitan 0.2, which ties the embeddings of Qwen3 only. With tp or pp, only FSDP computes in bf16
(`maybe_enable_amp` in `distributed/utils.py`, 0.2.2)."""
DEEPSPEED = FrameworkSupport(
    zero_stages=(0, 1, 2, 3),
    zero_stages_with_pp=(0, 1),
    precisions=("bf16", "fp16"),
    hybrid_stages=(3,),
    sequence_parallel="never",
    tp_alone=True,
    tp_comm_overlap=False,
    cp=False,
    vpp=False,
    flatten_gradients=True,
    grad_reduce_in_bf16=True,
    narrow_state="copy",
    widens_by_zero=True,
    overlaps_piped=False,
    adapters=True,
    base_weights=("bf16", "nf4"),
    optimizers=("adam", "adam8bit", "paged_adam", "paged_adam8bit", "sgd"),
    optimizer_offload="zero",
    packed="any",
)
"""Tensor parallelism is AutoTP, which has a style for each matrix of some models of transformers
(`DeepSpeedEngine._apply_autotp_partitioning`, 0.19.8). Ranks beyond the KV heads would get no attention at all, and the
matrices inside adapters are not found. Engines refuse 32-bit sums of gradients of 16-bit weights without ZeRO
(`DeepSpeedEngine._do_optimizer_sanity_check`, 0.19.8)."""

SUPPORT: Mapping[tuple[str, str], FrameworkSupport] = {
    ("megatron", "0.16"): MEGATRON,
    ("megatron-bridge", "0.6"): MEGATRON_BRIDGE,
    ("torchtitan", "0.2"): TORCHTITAN_02,
    ("torchtitan", "0.3"): TORCHTITAN,
    ("deepspeed", "0.19"): DEEPSPEED,
}
"""Supported configurations by the name and version of `hpgo.programs.frameworks`."""


def frameworks_for(
    model: Transformer, config: ParallelismConfig, *, zero_stage: int | None, seq_length: int
) -> str:  # fmt: skip
    """Return the options of the frameworks that run a configuration of `model`, joined by "or"; empty if none does.

    `zero_stage` replaces the stage of `config`; None stands for any. Layers may be divided among other pipeline ranks.

    >>> from hpgo.model.transformer_presets import named_transformer
    >>> paged = ParallelismConfig(optimizer="paged_adam")
    >>> frameworks_for(named_transformer("llama-3-8b"), paged, zero_stage=None, seq_length=4096)
    '`--framework deepspeed`'
    """
    try:
        check_degrees(model, replace(config, pp=1, vpp=1, pp_schedule="1f1b"), seq_length=seq_length)
    except ArgumentError:
        return ""  # the model is the obstacle, such as one without experts

    def runs(rules: FrameworkSupport) -> bool:
        stage = rules.open_stage(config) if zero_stage is None else zero_stage
        if rules.lacking(model) or (zero_stage is not None and stage not in rules.known_stages(config.pp)):
            return False
        return rules.broken_degrees(rules.as_run(replace(config, zero_stage=stage)), model=model) is None

    return _named(runs)


def _named(is_able: Callable[[FrameworkSupport], bool]) -> str:
    """Return the options that choose one of the able frameworks, joined by "or"."""
    # A framework without a version is its latest release, so that one is named if several are able.
    able = {
        name: name if framework_support(name)[1] is rules else f"{name}@{version}"
        for (name, version), rules in SUPPORT.items()
        if is_able(rules)
    }
    return join_words([f"`--framework {name}`" for name in able.values()], "or")


def is_framework(name: str) -> bool:
    """Return whether `framework_support` knows a name. Others may still imply a software stack.

    >>> is_framework("torchtitan@0.3"), is_framework("nemo")
    (True, False)
    """
    return any(name.partition("@")[0] == known for known, _ in SUPPORT)


def framework_support(name: str) -> tuple[Framework, FrameworkSupport]:
    """Return the framework `NAME` or `NAME@VERSION`, and the configurations of a transformer that it runs.

    Raises the errors of `hpgo.programs.frameworks.framework`, and ArgumentError for a framework without such
    configurations.

    >>> framework_support("megatron")[1].zero_stages
    (0, 1)
    """
    # A framework without LLM plans gets a different error than an unknown one, so look up both tables.
    able = [one for one in TABLE if (one.name, one.version) in SUPPORT]
    is_known = isinstance(name, str) and name.partition("@")[0] in NAMES
    row = row_of(TABLE if is_known else able, name, "framework")
    if row not in able:
        known = dict.fromkeys(one.name for one in able)
        raise ArgumentError(
            f"LLM plans are not supported for {row.title}",
            f"use {join_words(list(known), 'or')}",
            code="unsupported",
        )
    return row, SUPPORT[row.name, row.version]
