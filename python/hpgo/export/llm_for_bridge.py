"""Export of plans of transformers to Megatron-Bridge: a Python module that builds its `ConfigContainer`.

Megatron-Bridge builds the model from a configuration of Hugging Face, so the module checks that it has the planned
shape and sets only what the plan decides. The settings are Megatron-LM's under other names, because both train
models of Megatron Core.

Source: `training/config.py`, `training/mixed_precision.py` and `peft/lora.py` of Megatron-Bridge 0.6.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.quoting import filled, in_python
from hpgo.export.for_megatron import CLIPPING
from hpgo.export.llm_for_megatron import max_connections, settings_of
from hpgo.export.llm_jobs import LlmExportJob
from hpgo.llm.megatron_shape import megatron_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.export.llm_for_megatron import Value
    from hpgo.export.targets import Place, Target
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.plan import LlmPlan

TESTED = "Megatron-Bridge 0.6.0: its configuration classes, without Transformer Engine"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
"""Names of PyTorch's data types. Megatron Core stores FP8 moments as bytes."""
_FIELDS: Mapping[str, tuple[tuple[str, ...], object]] = {
    "tensor-model-parallel-size": (("model.tensor_model_parallel_size",), 1),
    "sequence-parallel": (("model.sequence_parallel",), False),
    "tp-comm-overlap": (("model.tp_comm_overlap",), False),
    "tp-comm-bootstrap-backend": (("model.tp_comm_bootstrap_backend",), "nccl"),
    "context-parallel-size": (("model.context_parallel_size",), 1),
    "pipeline-model-parallel-size": (("model.pipeline_model_parallel_size",), 1),
    "pipeline-model-parallel-layout": (("model.pipeline_model_parallel_layout",), None),
    "microbatch-group-size-per-virtual-pipeline-stage": (("model.microbatch_group_size_per_vp_stage",), None),
    "expert-model-parallel-size": (("model.expert_model_parallel_size",), 1),
    "expert-tensor-parallel-size": (("model.expert_tensor_parallel_size",), None),
    "moe-token-dispatcher-type": (("model.moe_token_dispatcher_type",), "alltoall"),
    "overlap-moe-expert-parallel-comm": (("model.overlap_moe_expert_parallel_comm",), False),
    "delay-wgrad-compute": (("model.delay_wgrad_compute",), False),
    "recompute-granularity": (("model.recompute_granularity",), None),
    "recompute-method": (("model.recompute_method",), None),
    "recompute-num-layers": (("model.recompute_num_layers",), None),
    "cpu-offloading": (("model.cpu_offloading",), False),
    "fine-grained-activation-offloading": (("model.fine_grained_activation_offloading",), False),
    "cross-entropy-loss-fusion": (("model.cross_entropy_loss_fusion",), False),
    "cross-entropy-fusion-impl": (("model.cross_entropy_fusion_impl",), "native"),
    "attention-dropout": (("model.attention_dropout",), 0.0),
    "hidden-dropout": (("model.hidden_dropout",), 0.0),
    "padded-vocab-size": (("model.vocab_size",), None),
    "use-distributed-optimizer": (
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        False,
    ),
    "num-distributed-optimizer-instances": (("ddp.num_distributed_optimizer_instances",), 1),
    "overlap-grad-reduce": (("ddp.overlap_grad_reduce",), False),
    "overlap-param-gather": (("ddp.overlap_param_gather", "optimizer.overlap_param_gather"), False),
    "optimizer": (("optimizer.optimizer",), "adam"),
    "optimizer-cpu-offload": (("optimizer.optimizer_cpu_offload",), False),
    "use-precision-aware-optimizer": (("optimizer.use_precision_aware_optimizer",), False),
    "micro-batch-size": (("train.micro_batch_size",), 1),
    "global-batch-size": (("train.global_batch_size",), 1),
}
"""Fields of `ConfigContainer` by Megatron-LM's option, and their value if the option is not set.

Fields that the plan turns off are written, too: what AutoBridge sets for a model must not stay.
"""
_WHERE_SET = {
    "moe-flex-dispatcher-backend": "model.moe_flex_dispatcher_backend",
    "cpu-offloading-num-layers": "model.cpu_offloading_num_layers",
    "optimizer-offload-fraction": "optimizer.optimizer_offload_fraction",
}
"""Fields that are written only if their option is set."""
_LISTS = {
    "recompute-modules": "model.recompute_modules",
    "offload-modules": "model.offload_modules",
}
_UNFUSED = {
    "no-masked-softmax-fusion": "model.masked_softmax_fusion",
    "no-bias-swiglu-fusion": "model.bias_activation_fusion",
    "no-bias-dropout-fusion": "model.bias_dropout_fusion",
    "no-rope-fusion": "model.apply_rope_fusion",
}
"""Fields that turn a fused kernel off. AutoBridge turns those on that a model supports."""
_MODULE = '''\
"""A plan for Megatron-Bridge: `recipe` builds its ConfigContainer, and `planned` applies the plan to another one."""

__COMMENTS__

import torch
from megatron.bridge import AutoBridge
__PACKING_IMPORT____PEFT_IMPORT__from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
__DATA_IMPORT__    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.core.transformer.enums import AttnBackend

SEQ_LENGTH = __SEQ_LENGTH__
SHAPE = __SHAPE__


def model(hf_model, *, reduce_layers=False):
    """Return the provider of a model of Hugging Face, without its weights.

    With `reduce_layers`, the model has the first layers only, for runs that find errors before a long one starts.

    Raises ValueError for a model of another shape than the planned one.
    """
    provider = AutoBridge.from_hf_pretrained(hf_model).to_megatron_provider(load_weights=False)
    if reduce_layers:
        provider.num_layers = SHAPE["num_layers"]
        if isinstance(getattr(provider, "moe_layer_freq", 1), list):
            provider.moe_layer_freq = provider.moe_layer_freq[: provider.num_layers]
    for name, value in SHAPE.items():
        if (found := getattr(provider, name)) != value:
            raise ValueError(f"this is another model: {name} is {found}, but the plan is for {value}")
    return provider


def recipe(hf_model, *, data=None, tokenizer=None, pretrained=None, reduce_layers=False):
    """Return the ConfigContainer of the plan.

    Args:
        hf_model: folder or name of a model of Hugging Face. Only its configuration is read.
        data: __DATA__; None trains on random tokens.
        tokenizer: folder or name of a tokenizer of Hugging Face; None has the numbers of the vocabulary as words.
        pretrained: folder of a checkpoint of Megatron-Bridge__NEEDED__.
        reduce_layers: whether to take the first layers of the model only.
    """
    provider = model(hf_model, reduce_layers=reduce_layers)
    if data is None:
        dataset = MockGPTDatasetConfig(seq_length=SEQ_LENGTH, **GPT_DATASET)
    else:
        dataset = __DATASET__
    if tokenizer is None:
        words = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=SHAPE["vocab_size"] - 1)
    else:
        words = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tokenizer)
    config = ConfigContainer(
        model=provider,
        train=TrainingConfig(train_iters=__STEPS__),
        validation=ValidationConfig(eval_interval=1000, eval_iters=10),
        optimizer=OptimizerConfig(lr=__LR__, min_lr=__MIN_LR__, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=__WARMUP__),
        ddp=DistributedDataParallelConfig(),
        dataset=dataset,
        logger=LoggerConfig(log_interval=10, log_throughput=True),
        tokenizer=words,
        checkpoint=CheckpointConfig(save_interval=1000, pretrained_checkpoint=pretrained),
    )
    return planned(config)


GPT_DATASET = {
    "random_seed": 1234,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "split": "99,1,0",
    "dataloader_type": "single",
}


def planned(config):
    """Apply the plan to a ConfigContainer and return it."""
    # It would replace the settings of ddp.
    config.comm_overlap = None
    config.mixed_precision = MixedPrecisionConfig(
__PRECISION__
    )
__SETTINGS__
    config.model.seq_length = config.dataset.seq_length = SEQ_LENGTH
__PEFT__    return config
'''


def recipe(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """Return a module with the functions `model`, `recipe` and `planned`."""
    job = LlmExportJob.of(plan, replace(target, tested=TESTED), place)
    config, shape = job.config, megatron_shape(job.model)
    has_prompts = trains_on_prompts(plan)
    rates = RATES[config.lora_rank > 0, has_prompts]
    values = {
        "COMMENTS": "\n".join(f"# {line}" for line in job.header(*_notes(job))),
        "PEFT_IMPORT": "from megatron.bridge.peft.lora import LoRA\n" if config.lora_rank else "",
        "PACKING_IMPORT": _PACKING_IMPORT if config.packed_length else "",
        "DATA_IMPORT": f"    {'GPTSFTDatasetConfig' if has_prompts else 'GPTDatasetConfig'},\n",
        "SEQ_LENGTH": in_python(plan.estimate.seq_length),
        "SHAPE": in_python(_shape(job, experts=shape.experts.count if shape.experts is not None else None)),
        "DATA": "folder with training.jsonl of prompts and answers" if has_prompts else "prefix of tokens in .bin",
        "NEEDED": ", with the weights beside the adapters" if config.lora_rank else "; None starts from random weights",
        "DATASET": _prompts(config) if has_prompts else _TOKENS,
        "STEPS": rates.steps,
        "LR": rates.lr,
        "MIN_LR": rates.min_lr,
        "WARMUP": rates.warmup_steps,
        "PRECISION": "\n".join(f"        {name}={value}," for name, value in _precision(job).items()),
        "SETTINGS": "\n".join(f"    config.{name} = {value}" for name, value in _settings(job).items()),
        "PEFT": _peft(job),
    }
    return {place.main or "planned.py": filled(_MODULE, values)}


class Rates(NamedTuple):
    """Learning rate and number of steps to begin with, as Python code."""

    steps: str
    lr: str
    min_lr: str
    warmup_steps: str


RATES = {
    (False, False): Rates("100000", "3e-4", "3e-5", "2000"),
    (False, True): Rates("1000", "5e-6", "0.0", "50"),
    (True, False): Rates("1000", "1e-4", "0.0", "50"),
    (True, True): Rates("1000", "1e-4", "0.0", "50"),
}
"""Values by whether adapters are trained, and whether data are prompts. Source: `recipes/common.py`, 0.6.0."""
_TOKENS = "GPTDatasetConfig(seq_length=SEQ_LENGTH, data_path=[data], **GPT_DATASET)"
_PACKING_IMPORT = "from megatron.bridge.data.packing.config import PackedSequenceSpecs\n"


def trains_on_prompts(plan: LlmPlan) -> bool:
    """Return whether data are prompts with answers: for adapters and packed documents. Otherwise they are tokens."""
    config = plan.estimate.parallelism
    return config.lora_rank > 0 or config.packed_length is not None


def _prompts(config: ParallelismConfig) -> str:
    """Return the data set of prompts. Sequences are padded to their full length, which the estimate counts."""
    lines = ['seq_length=SEQ_LENGTH, dataset_root=data, do_test=False, dataset_kwargs={"pad_to_max_length": True},']
    if config.packed_length is not None:
        # Context parallelism divides each document into two parts for each rank.
        multiple = 2 * config.cp if config.cp > 1 else 1
        # Graphs with attention read the bounds of documents, whose number must then be the same in all sequences.
        modules = config.cuda_graph_modules
        fixed = config.cuda_graph_impl != "none" and (not modules or "attn" in modules)
        lines += [
            "enable_offline_packing=True,",
            "offline_packing_specs=PackedSequenceSpecs(",
            f"    packed_sequence_size=SEQ_LENGTH, pad_seq_to_mult={multiple}, pad_cu_seqlens={fixed}",
            "),",
        ]
    return "\n".join(["GPTSFTDatasetConfig(", *(f"            {line}" for line in lines), "        )"])


def _shape(job: LlmExportJob, *, experts: int | None) -> dict[str, object]:
    """Return the values that the provider of the planned model has, by field."""
    model = job.model
    found: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "share_embeddings_and_output_weights": model.tied,
    }
    attention = megatron_shape(model).attention
    found |= {"num_attention_heads": attention.heads} if attention is not None else {}
    if attention is not None and attention.latent is None:
        found |= {"num_query_groups": attention.kv_heads}
    found |= {"ffn_hidden_size": model.ffn} if experts is None else {"num_moe_experts": experts}
    return found


def _settings(job: LlmExportJob) -> dict[str, str]:
    """Return the fields of the configuration below `config`, as Python code."""
    options = settings_of(job)
    found: dict[str, str] = {}
    for option, (fields, off) in _FIELDS.items():
        value = options.get(option, False)
        found |= dict.fromkeys(fields, in_python(_number(off if value is False else value)))
    for option, field in _WHERE_SET.items():
        if (value := options.get(option, False)) is not False:
            found[field] = in_python(_number(value))
    for option, field in _LISTS.items():
        value = options.get(option, False)
        found[field] = in_python(list(value)) if isinstance(value, tuple) else "None"
    found |= {field: "False" for option, field in _UNFUSED.items() if options.get(option)}
    kinds = options.get("cp-comm-type")
    if isinstance(kinds, tuple):
        found["model.cp_comm_type"] = in_python(list(kinds) if len(kinds) > 1 else kinds[0])
    found["model.attention_backend"] = f"AttnBackend.{options['attention-backend']}"
    found |= _state(options) | _graphs(job)
    if trains_on_prompts(job.plan) and job.config.cp > 1:
        # Ranks whose tokens are all masked would have a loss of 0 / 0, so Megatron-Bridge asks for both.
        found |= {"model.calculate_per_token_loss": "True", "ddp.average_in_collective": "False"}
    if queues := _environment(job):
        found["env_vars"] = in_python(queues)
    return found


def _number(value: object) -> object:
    """Return the number that a word of the command line stands for; other values unchanged."""
    return float(value) if isinstance(value, str) and value.replace(".", "", 1).isdigit() else value


def _state(options: Mapping[str, Value]) -> dict[str, str]:
    """Return the formats of the optimizer state, where they are not Megatron Core's default, 32 bits."""
    names = ("exp-avg-dtype", "exp-avg-sq-dtype", "main-params-dtype", "main-grads-dtype")
    held = {name: options[name] for name in names if name in options}
    return {
        f"optimizer.{name.replace('-', '_')}": f"torch.{_DTYPES[str(value)]}" for name, value in held.items()
    }  # fmt: skip


def _graphs(job: LlmExportJob) -> dict[str, str]:
    config = job.config
    if config.cuda_graph_impl == "none":
        return {"model.cuda_graph_impl": in_python("none")}
    found = {
        "model.cuda_graph_impl": in_python(config.cuda_graph_impl),
        "model.cuda_graph_modules": in_python(list(config.cuda_graph_modules)),
        # Graphs need random numbers that they can capture.
        "model.use_te_rng_tracker": "True",
        "rng.te_rng_tracker": "True",
    }
    if config.cuda_graph_impl == "full_iteration":
        # Checks for NaN wait for the GPU, which a graph can't capture.
        found |= {"rerun_state_machine.check_for_nan_in_loss": "False", "ddp.check_for_nan_in_grad": "False"}
    return found


def _environment(job: LlmExportJob) -> dict[str, str]:
    """Return environment variables, which Megatron-Bridge sets unless they are set already."""
    found: dict[str, str] = {}
    if (connections := max_connections(job.plan)) is not None:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    if job.config.offload_modules:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    return found


def _precision(job: LlmExportJob) -> dict[str, str]:
    """Return the arguments of `MixedPrecisionConfig`, which sets the formats of the model, of ddp and the optimizer."""
    config = job.config
    is_half = config.precision == "fp16"
    dtype = f"torch.{'float16' if is_half else 'bfloat16'}"
    found = {
        "bf16": str(not is_half),
        "fp16": str(is_half),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Megatron-LM sums gradients of fp16 weights in 16 bits, and the estimate counts that.
        "grad_reduce_in_fp32": str(not is_half and not config.grad_reduce_in_bf16),
    }
    if config.precision == "fp8":
        gathers = str(config.zero_stage > 0)
        found |= {"fp8": in_python("hybrid"), "fp8_recipe": in_python("tensorwise"), "fp8_param_gather": gathers}
    return found


def _peft(job: LlmExportJob) -> str:
    """Return the line that sets the adapters, with Megatron-Bridge's default scale of 1."""
    config = job.config
    if not config.lora_rank:
        return ""
    targets = in_python(list(config.lora_targets))
    return f"    config.peft = LoRA(target_modules={targets}, dim={config.lora_rank}, alpha={config.lora_rank})\n"


def _notes(job: LlmExportJob) -> list[str]:
    config, model = job.config, job.model
    notes = [
        "start it: finetune(recipe(…), forward_step) or pretrain(recipe(…), forward_step) of megatron.bridge.training",
        CLIPPING.format("config.optimizer.clip_grad"),
    ]
    padded = settings_of(job)["padded-vocab-size"]
    if padded != model.vocab:
        notes.append(f"the vocabulary is padded to {padded} words, but estimated as {model.vocab}")
    if config.lora_rank:
        notes.append("the adapters have alpha = rank, Megatron-Bridge's default scale of 1")
        notes.append("DoRA of megatron.bridge.peft.dora takes the same arguments; the estimate leaves its norms out")
    if config.packed_length is not None:
        notes.append(
            f"estimated with packed documents of {config.packed_length} tokens; without data, sequences of random"
            " tokens are whole, so that their attention takes longer"
        )
    if model.experts:
        notes.append("the estimate assumes the same number of tokens for each expert")
    if config.precision == "fp8" and not config.zero_stage:
        notes.append("the estimate leaves out the FP8 copies of weights that Transformer Engine keeps")
    if config.optimizer_offload_fraction:
        notes.append("the estimate does not overlap transfers with the CPU's updates")
    return notes
