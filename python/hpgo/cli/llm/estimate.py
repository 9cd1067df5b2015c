"""`hpgo llm estimate`: the step time and memory of one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import join_words
from hpgo.base.units import format_bytes
from hpgo.cli.command import option, takes
from hpgo.cli.llm.options import (
    COUNT,
    TrainingOptions,
    draw,
    note_model,
    note_unmeasured,
    read_platform,
    shell_words,
)
from hpgo.cli.plan_options import as_options
from hpgo.cli.terminal import say, width
from hpgo.cli.values import LLM_ESTIMATE_OUT, STILL_ENDINGS, written
from hpgo.llm.parallelism import (
    BaseWeightsDtype,
    CrossEntropyImpl,
    CudaGraphImpl,
    CudaGraphModule,
    LoraModule,
    MainParamsDtype,
    OffloadedModule,
    Optimizer,
    PipelineSchedule,
    Recompute,
    RecomputedModule,
    StateDtype,
    TokenDispatcher,
)
from hpgo.llm.stack import StackFramework

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.platform import Platform
    from hpgo.llm.stack import Stack

_SECTIONS = {
    "Model and batch": "cluster global_batch_size seq_length precision",
    "Parallelism and memory": "tp pp cp ep zero_stage recompute",
    "Output": "outputs as_json",
}
_BRIEF = (
    "micro_batch_size devices tokens_per_batch framework stack platform nic_gbit_s vpp pp_schedule dp_replicate"
    " micro_batch_group_size first_rank_layers last_rank_layers pipeline_layout recompute_every recompute_num_layers"
    " recompute_modules etp moe_token_dispatcher overlap_ep_comm delay_wgrad_compute"
    " cpu_offload_num_layers offload_modules dtensor tp_comm_overlap no_overlap_dp_comm no_sequence_parallel"
    " no_flash_attention no_fused_elementwise no_fused_adam no_fused_cross_entropy cross_entropy_fusion_impl"
    " flatten_gradients grad_reduce_in_bf16"
    " adam_moments_in_bf16 exp_avg_dtype exp_avg_sq_dtype main_params_dtype cuda_graph_impl cuda_graph_modules"
    " lora_rank lora_target_modules base_weights_dtype optimizer optimizer_offload_fraction offload_params"
    " packed_length images_per_sample patches_per_image freeze_tower"
)
"""Options that `--help` lists by name only, so that it fits on one screen. `hpgo help llm estimate` explains them."""
_CONFIGURATION = (
    "framework stack tp pp vpp pp_schedule first_rank_layers last_rank_layers pipeline_layout cp ep dp_replicate"
    " etp moe_token_dispatcher overlap_ep_comm delay_wgrad_compute micro_batch_group_size"
    " micro_batch_size recompute recompute_num_layers recompute_every cross_entropy_fusion_impl"
    " cpu_offload_num_layers precision flatten_gradients dtensor grad_reduce_in_bf16 adam_moments_in_bf16"
    " exp_avg_dtype exp_avg_sq_dtype main_params_dtype cuda_graph_impl tp_comm_overlap lora_rank base_weights_dtype"
    " optimizer optimizer_offload_fraction offload_params packed_length"
)
"""Options that `hpgo.estimate_llm` takes under the same name and with the same value."""


_SEARCHED = ("torchtitan", "deepspeed")
"""Frameworks that a search takes by name. The others are Megatron-LM, its default."""


class EstimateOptions(TrainingOptions):
    """Options of a configuration. The degree of data parallelism follows from the other degrees and the GPUs."""

    tp: int = option("--tp", type=COUNT, default=1, metavar="N", help="Tensor-parallel degree.  [1]")
    pp: int = option("--pp", type=COUNT, default=1, metavar="N", help="Pipeline-parallel degree.  [1]")
    vpp: int = option("--vpp", type=COUNT, default=1, metavar="N", help="Virtual stages per pipeline rank.  [1]")
    pp_schedule: PipelineSchedule = option(
        "--pp-schedule",
        type=click.Choice(get_args(PipelineSchedule)),
        default="1f1b",
        metavar="NAME",
        help="1f1b, or with --vpp interleaved_zb, zb_v.  [1f1b]",
    )
    first_rank_layers: int | None = option(
        "--first-rank-layers", type=COUNT, metavar="N", help="Layers of the first pipeline rank."
    )
    last_rank_layers: int | None = option(
        "--last-rank-layers", type=COUNT, metavar="N", help="Layers of the last pipeline rank."
    )
    pipeline_layout: str | None = option(
        "--pipeline-layout",
        metavar="LAYOUT",
        help="Layers of each stage: 7,8,9,8 or, as in Megatron-LM, Et*3|(tt|)*29,m|L.",
    )
    cp: int = option("--cp", type=COUNT, default=1, metavar="N", help="Context-parallel degree.  [1]")
    ep: int = option("--ep", type=COUNT, default=1, metavar="N", help="Expert-parallel degree.  [1]")
    etp: int = option("--etp", type=COUNT, default=1, metavar="N", help="Expert-tensor-parallel degree.  [1]")
    moe_token_dispatcher: TokenDispatcher | None = option(
        "--moe-token-dispatcher",
        type=click.Choice(get_args(TokenDispatcher)),
        metavar="NAME",
        help=f"Exchange of tokens with experts: {join_words(get_args(TokenDispatcher), 'or')}.  [each node once]",
    )
    overlap_ep_comm: bool = option(
        "--overlap-ep-comm", is_flag=True, help="Hide the exchange of experts behind passes of another micro-batch."
    )
    delay_wgrad_compute: bool = option(
        "--delay-wgrad-compute", is_flag=True, help="Compute gradients of weights later, to hide more of it."
    )
    micro_batch_group_size: int | None = option(
        "--micro-batch-group-size",
        type=COUNT,
        metavar="N",
        help="Micro-batches that pass a virtual stage before the next one's turn.  [pp]",
    )
    micro_batch_size: int = option(
        "--micro-batch-size", type=COUNT, default=1, metavar="N", help="Sequences per micro-batch.  [1]"
    )
    zero_stage: str | None = option(
        "--zero-stage",
        type=click.Choice(["0", "1", "2", "3"]),
        metavar="N",
        help="ZeRO stage, 0 to 3.  [1, or the framework's]",
    )
    recompute: Recompute = option(
        "--recompute",
        type=click.Choice(get_args(Recompute)),
        default="none",
        metavar="NAME",
        help="none, selective, selective_op, full.  [none]",
    )
    recompute_num_layers: int | None = option(
        "--recompute-num-layers", type=COUNT, metavar="N", help="Layers of each stage that `full` recomputes.  [all]"
    )
    recompute_every: int | None = option(
        "--recompute-every", type=COUNT, metavar="N", help="Distance between the layers that `full` recomputes."
    )
    dp_replicate: int = option(
        "--dp-replicate", type=COUNT, default=1, metavar="N", help="Groups of replicas that each hold all shards.  [1]"
    )
    framework: StackFramework | None = option(
        "--framework",
        type=click.Choice(get_args(StackFramework)),
        metavar="NAME",
        help="Framework that implies the stack, and must run the configuration:"
        f" {join_words(get_args(StackFramework), 'or')}.",
    )
    recompute_modules: str | None = option(
        "--recompute-modules",
        metavar="NAME[,…]",
        help=f"Parts of a layer that `selective` recomputes: {', '.join(get_args(RecomputedModule))}.  [scores]",
    )
    cpu_offload_num_layers: int = option(
        "--cpu-offload-num-layers",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Layers of each stage whose activations wait in CPU memory.  [0]",
    )
    offload_modules: str | None = option(
        "--offload-modules",
        metavar="NAME[,…]",
        help=f"Parts of a layer whose inputs wait in CPU memory: {', '.join(get_args(OffloadedModule))}.",
    )
    cuda_graph_impl: CudaGraphImpl = option(
        "--cuda-graph-impl",
        type=click.Choice(get_args(CudaGraphImpl)),
        default="none",
        metavar="NAME",
        help=f"CUDA graphs that replay launches: {', '.join(get_args(CudaGraphImpl))}.  [none]",
    )
    cuda_graph_modules: str | None = option(
        "--cuda-graph-modules",
        metavar="NAME[,…]",
        help=f"Parts of a layer in its CUDA graph: {', '.join(get_args(CudaGraphModule))}.  [all]",
    )
    lora_rank: int = option(
        "--lora-rank",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Rank of adapters (LoRA), which are then all that is trained.  [0]",
    )
    lora_target_modules: str | None = option(
        "--lora-target-modules",
        metavar="NAME[,…]",
        help=f"GEMMs of a layer with an adapter: {', '.join(get_args(LoraModule))}.  [all]",
    )
    base_weights_dtype: BaseWeightsDtype = option(
        "--base-weights-dtype",
        type=click.Choice(get_args(BaseWeightsDtype)),
        default="bf16",
        metavar="NAME",
        help="Frozen weights of layers: bf16 for 16 bits, fp8, or nf4 (QLoRA).  [bf16]",
    )
    optimizer: Optimizer = option(
        "--optimizer",
        type=click.Choice(get_args(Optimizer)),
        default="adam",
        metavar="NAME",
        help=f"{join_words(get_args(Optimizer), 'or')}.  [adam]",
    )
    optimizer_offload_fraction: float = option(
        "--optimizer-offload-fraction",
        type=click.FloatRange(0, 1),
        default=0.0,
        metavar="SHARE",
        help="Share of the optimizer state in CPU memory, where the CPU updates its weights.  [0]",
    )
    offload_params: bool = option(
        "--offload-params", is_flag=True, help="Store the shards of weights of ZeRO stage 3 in CPU memory, too."
    )
    packed_length: int | None = option(
        "--packed-length",
        type=COUNT,
        metavar="N",
        help="Tokens of each document, if sequences are packed with documents that do not attend to each other.",
    )
    tp_comm_overlap: bool | None = option(
        "--tp-comm-overlap/--no-tp-comm-overlap",
        default=None,
        help="Overlap the communication of sequence parallelism with GEMMs.  [as the stack]",
    )
    no_sequence_parallel: bool = option(
        "--no-sequence-parallel", is_flag=True, help="Replicate norms, dropout and residual additions over tp."
    )
    no_flash_attention: bool = option(
        "--no-flash-attention", is_flag=True, help="Run attention as several kernels, which store the scores."
    )
    no_fused_elementwise: bool = option(
        "--no-fused-elementwise", is_flag=True, help="Run each elementwise operation as a separate kernel."
    )
    no_fused_cross_entropy: bool = option(
        "--no-fused-cross-entropy", is_flag=True, help="Run the loss as several kernels, in 32 bits."
    )
    cross_entropy_fusion_impl: CrossEntropyImpl | None = option(
        "--cross-entropy-fusion-impl",
        type=click.Choice(get_args(CrossEntropyImpl)),
        help="Implementation of the fused loss, which decides its bytes per logit.  [of the framework]",
    )
    no_fused_adam: bool = option("--no-fused-adam", is_flag=True, help="Run Adam as several kernels.")
    flatten_gradients: bool = option(
        "--flatten-gradients", is_flag=True, help="Copy 16-bit gradients into one flat tensor, as DeepSpeed does."
    )
    dtensor: bool = option(
        "--dtensor", is_flag=True, help="Shard with PyTorch's DTensor and FSDP2, as torchtitan does."
    )
    grad_reduce_in_bf16: bool = option(
        "--grad-reduce-in-bf16", is_flag=True, help="Accumulate and reduce gradients in 16 bits."
    )
    adam_moments_in_bf16: bool = option(
        "--adam-moments-in-bf16", is_flag=True, help="Store both of Adam's moments in bf16."
    )
    exp_avg_dtype: StateDtype = option(
        "--exp-avg-dtype",
        type=click.Choice(get_args(StateDtype)),
        default="fp32",
        metavar="NAME",
        help=f"Adam's first moment: {join_words(get_args(StateDtype), 'or')}.  [fp32]",
    )
    exp_avg_sq_dtype: StateDtype = option(
        "--exp-avg-sq-dtype",
        type=click.Choice(get_args(StateDtype)),
        default="fp32",
        metavar="NAME",
        help=f"Adam's second moment: {join_words(get_args(StateDtype), 'or')}.  [fp32]",
    )
    main_params_dtype: MainParamsDtype = option(
        "--main-params-dtype",
        type=click.Choice(get_args(MainParamsDtype)),
        default="fp32",
        metavar="NAME",
        help="The optimizer's copy of the weights: fp32, fp16, bf16, or none.  [fp32]",
    )
    no_overlap_dp_comm: bool = option(
        "--no-overlap-dp-comm", is_flag=True, help="Reduce gradients after the last backward pass only."
    )
    nic_gbit_s: float | None = option("--nic", type=float, metavar="GBIT/S", help="Rate of each NIC of a preset.")
    outputs: tuple[str, ...] = written(LLM_ESTIMATE_OUT, "Picture (.svg .png .pdf .html) or .yaml profile.")


@takes(EstimateOptions, sections=_SECTIONS, brief=_BRIEF)
def command(options: EstimateOptions) -> None:
    """Estimate the step time and memory of one configuration.

    \b
    Examples:
      hpgo llm estimate llama-3-8b -c h100:1 -b 32 --seq-length 8192 --tp 2
    """
    from hpgo.hardware.cluster import Cluster
    from hpgo.hardware.rates import REPORTED_BYTES, key_of
    from hpgo.llm.estimate import constants_of, estimate_llm, on_platform, profile_of, stack_on
    from hpgo.llm.recompute import SAVES_NOTHING, recomputes_in_vain
    from hpgo.model.formats import write_profile
    from hpgo.model.formats.transformers import transformer_of
    from hpgo.show.llm_report import document, lines, next_commands

    rate = options.nic_gbit_s
    cluster = Cluster.read(options.cluster) if rate is None else Cluster.preset(options.cluster, adapter_gbit_s=rate)
    platform = read_platform(options.platform)
    # Errors of the library name arguments. `as_options` rewrites them into options of the command line.
    with as_options():
        found = estimate_llm(
            options.transformer(),
            cluster,
            global_batch_size=options.sequences(),
            seq_length=options.seq_length,
            devices=options.devices,
            platform=platform,
            **_configuration(options),
        )
        stack = stack_on(options.stack, cluster, options.framework, platform)
        layers = [output for output in options.outputs if Path(output).suffix.lower() not in STILL_ENDINGS]
        for output in layers:
            constants = constants_of(cluster, stack, platform, transformer_of(options.transformer()))
            rows = profile_of(found, options.transformer(), on_platform(cluster, platform), constants=constants)
            write_profile(rows, output)
        draw(found, cluster, options.outputs)
    if options.as_json:
        click.echo(json_text(document(found)))
    else:
        report = lines(found, width(), stack=stack)
        # A search takes no rate of NICs, so it would plan for other links.
        report += next_commands([_search(options, cluster, platform, stack)]) if rate is None else []
        click.echo("\n".join(report))
    note_unmeasured(cluster, platform)
    note_model(options.transformer(), options.seq_length, options.framework)
    if recomputes_in_vain(found.parallelism):
        say("warning", f"{SAVES_NOTHING}: leave core_attn and a plain `--recompute selective` out")
    # A configuration that does not fit is no error: its report shows which column of memory to reduce.
    if not found.fits:
        say("warning", f"it does not fit: {_ways_to_fit(found)}")
        device = cluster.nodes[0].device.name
        reported_bytes = REPORTED_BYTES.get(key_of(device) or "", 0.0)
        if found.fullest.peak_bytes <= reported_bytes:
            say(
                "note",
                f"it may still run: `{device}` reports {format_bytes(reported_bytes)}, of which plans leave"
                f" {format_bytes(reported_bytes - found.capacity_bytes)} unused for the error of estimates",
            )


def _ways_to_fit(found: LlmEstimate) -> str:
    """Return the changes that reduce memory and that a configuration does not have yet."""
    config = found.parallelism
    ways = (
        "raise a degree or --zero-stage" if found.gpus > 1 else "use more GPUs",
        "" if config.recompute == "full" else "recompute with --recompute full",
        "" if config.optimizer_offload_fraction or config.lora_rank else "use --optimizer-offload-fraction 1",
    )
    *before, last = filter(None, ways)
    # A comma before the last one, because the first has an "or" of its own.
    return ", ".join([*before, f"or {last}" if before else last])


def _search(options: EstimateOptions, cluster: Cluster, platform: Platform | DeviceRecord | None, stack: Stack) -> str:
    """Return the command that searches for a faster configuration with the constants of the estimate."""
    from hpgo.llm.estimate import stack_on

    runs = options.framework if options.framework in _SEARCHED else None
    words = [] if runs is None else ["--framework", runs]
    if options.stack is None and stack != stack_on(None, cluster, runs or "megatron", platform):
        words += ["--stack", stack.name]
    return f"hpgo llm plan {options.problem()} {shell_words(*words)}".rstrip()


def _configuration(options: EstimateOptions) -> dict[str, Any]:
    """Return the configuration as keyword arguments of `hpgo.estimate_llm`."""
    return {
        **{name: getattr(options, name) for name in _CONFIGURATION.split()},
        "zero_stage": None if options.zero_stage is None else int(options.zero_stage),
        "recompute_modules": options.recompute_modules.split(",") if options.recompute_modules else (),
        "cuda_graph_modules": options.cuda_graph_modules.split(",") if options.cuda_graph_modules else (),
        "offload_modules": options.offload_modules.split(",") if options.offload_modules else (),
        "lora_target_modules": options.lora_target_modules.split(",") if options.lora_target_modules else (),
        "sequence_parallel": False if options.no_sequence_parallel else None,
        "flash_attention": not options.no_flash_attention,
        "fused_elementwise": not options.no_fused_elementwise,
        "fused_cross_entropy": not options.no_fused_cross_entropy,
        "fused_adam": not options.no_fused_adam,
        "overlap_dp_comm": not options.no_overlap_dp_comm,
    }
