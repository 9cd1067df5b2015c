"""Options and values of Megatron-LM, DeepSpeed, torchtitan and PEFT that `hpgo llm` has under other names.

The names come from Megatron-LM 0.19 (`megatron/training/arguments.py`), torchtitan 0.3, and the trainers of
transformers and bitsandbytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

_OPTIONS = {
    "tensor_model_parallel_size": "--tp",
    "parallelism.tensor_parallel_degree": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "parallelism.pipeline_parallel_degree": "--pp",
    "context_parallel_size": "--cp",
    "parallelism.context_parallel_degree": "--cp",
    "expert_model_parallel_size": "--ep",
    "parallelism.expert_parallel_degree": "--ep",
    "expert_tensor_parallel_size": "--etp",
    "parallelism.expert_tensor_parallel_degree": "--etp",
    "num_virtual_stages_per_pipeline_rank": "--vpp",
    "num_layers_per_virtual_pipeline_stage": "--vpp",
    "parallelism.pipeline_parallel_schedule": "--pp-schedule",
    "microbatch_group_size_per_virtual_pipeline_stage": "--micro-batch-group-size",
    "decoder_first_pipeline_num_layers": "--first-rank-layers",
    "decoder_last_pipeline_num_layers": "--last-rank-layers",
    "pipeline_model_parallel_layout": "--pipeline-layout",
    "parallelism.data_parallel_replicate_degree": "--dp-replicate",
    "num_distributed_optimizer_instances": "--dp-replicate",
    "training.local_batch_size": "--micro-batch-size",
    "per_device_train_batch_size": "--micro-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "training.global_batch_size": "--global-batch-size",
    "training.seq_len": "--seq-length",
    "moe_token_dispatcher_type": "--moe-token-dispatcher",
    "moe_flex_dispatcher_backend": "--moe-token-dispatcher",
    "moe_enable_deepep": "--moe-token-dispatcher deepep",
    "overlap_moe_expert_parallel_comm": "--overlap-ep-comm",
    "recompute_granularity": "--recompute",
    "recompute_activations": "--recompute selective",
    "recompute_method": "--recompute full --recompute-num-layers",
    "activation_checkpoint.mode": "--recompute",
    "gradient_checkpointing": "--recompute full",
    "fine_grained_activation_offloading": "--offload-modules",
    "cpu_offloading_num_layers": "--cpu-offload-num-layers",
    "use_distributed_optimizer": "--zero-stage 1",
    "use_megatron_fsdp": "--zero-stage 3",
    "use_torch_fsdp2": "--zero-stage 3",
    "data_parallel_sharding_strategy": "--zero-stage",
    "optimizer_cpu_offload": "--optimizer-offload-fraction 1",
    "offload_optimizer": "--optimizer-offload-fraction 1",
    "offload_param": "--offload-params",
    "use_precision_aware_optimizer": "--main-params-dtype",
    "fp8_format": "--precision fp8",
    "fp8_recipe": "--precision fp8",
    "fp4_format": "--precision fp4",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "cuda_graph_scope": "--cuda-graph-modules",
    "enable_cuda_graph": "--cuda-graph-impl local",
    "external_cuda_graph": "--cuda-graph-impl transformer_engine",
    "lora_r": "--lora-rank",
    "target_modules": "--lora-target-modules",
    "load_in_4bit": "--base-weights-dtype nf4",
}
"""The option of `hpgo llm estimate` for each option of a framework, without its leading dashes."""
_VALUES = {
    "--optimizer": {
        "adamw": "adam",
        "fused_adam": "adam",
        "adamw_torch": "adam",
        "adamw_8bit": "adam8bit",
        "adamw_bnb_8bit": "adam8bit",
        "paged_adamw": "paged_adam",
        "paged_adamw_32bit": "paged_adam",
        "paged_adamw_8bit": "paged_adam8bit",
        "dist_muon": "muon",
    },
    "--pp-schedule": {
        "interleaved1f1b": "1f1b --vpp 2",
        "interleavedzerobubble": "interleaved_zb --vpp 2",
        "zbvzerobubble": "zb_v --vpp 2",
    },
    "--moe-token-dispatcher": {"flex": "deepep"},
    "--precision": {
        "bf16-mixed": "bf16", "16-mixed": "fp16", "mxfp8": "fp8", "hybrid": "fp8", "e4m3": "fp8", "nvfp4": "fp4",
        "mxfp4": "fp4",
    },
    "--base-weights-dtype": {"int4": "nf4", "4bit": "nf4"},
}  # fmt: skip
"""The value of an option for each value of a framework, perhaps with a further option."""


def own_option(name: str, options: Container[str]) -> str:
    """Return the option among `options` for an option of a framework, or an empty text.

    >>> own_option("--tensor-model-parallel-size", ["--tp"]), own_option("--fp8_recipe", ["--precision"])
    ('--tp', '--precision fp8')
    >>> own_option("--fp8-recipe", ["--tp"])
    ''
    """
    found = _OPTIONS.get(name.lstrip("-").replace("-", "_"), "")
    return found if found.partition(" ")[0] in options else ""


def own_value(option: str, value: str) -> str:
    """Return the option with the value that a framework's `value` has, or an empty text.

    >>> own_value("--optimizer", "AdamW"), own_value("--optimizer", "lion")
    ('--optimizer adam', '')
    """
    found = _VALUES.get(option, {}).get(value.lower(), "")
    return f"{option} {found}" if found else ""
