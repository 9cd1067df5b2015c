"""Export of plans of transformers to DeepSpeed: CONFIG for `deepspeed.initialize`, and the cuts of a pipeline.

The user brings the model: a list of layers for a pipeline, or a module without one.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpgo.base.quoting import in_python
from hpgo.export.for_deepspeed import IMPORTS, MODULE
from hpgo.export.llm_jobs import LlmExportJob

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.transformer import Transformer

_NAMES = {
    "activation": ("hidden_act",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rope_theta": ("rope_theta",),
    "attention_dropout": ("attention_dropout",),
    "init_std": ("initializer_range",),
}
"""Keys of Hugging Face configurations for fields of `Arithmetic`. A configuration has some of them."""
_CHECK = '''

def check_model(config):
    """Raise ValueError if a key of a Hugging Face `config` has another value than in MODEL."""
    rope = getattr(config, "rope_parameters", None) or {}  # since transformers 5
    found = {name: getattr(config, name, rope.get(name)) for name in MODEL}
    found = {name: value for name, value in found.items() if value is not None}
    wrong = [f"{name} is {value}, not {MODEL[name]}" for name, value in found.items() if value != MODEL[name]]
    if wrong:
        raise ValueError(f"this plan is for another model: {', '.join(wrong)}")
'''
"""Code of the module, which follows MODEL."""
_CLIPPING = "gradients are clipped at norm 1, DeepSpeed's default: set it to 0 in CONFIG to turn that off"


def module(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """Return a module with CONFIG and, for a pipeline, LAYERS, PARTS, REPLICAS and a PipelineModule."""
    job = LlmExportJob.of(plan, target, place)
    config, estimate, model = job.config, job.plan.estimate, job.model
    wide = config.precision == "bf16" and not config.grad_reduce_in_bf16
    # DeepSpeed accumulates gradients of 16-bit weights in 32 bits only with ZeRO. On one GPU ZeRO 1 shards nothing, so
    # it costs nothing there either.
    zero: dict[str, Any] = {"stage": config.zero_stage or int(wide)}
    if config.zero_stage >= 1:
        zero["overlap_comm"] = config.overlap_dp_comm
    if config.dp_replicate > 1:
        zero["mics_shard_size"] = config.shard_size
    engine: dict[str, Any] = {
        "train_batch_size": estimate.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": estimate.micro_batches,
        "gradient_clipping": 1.0,
        ("fp16" if config.precision == "fp16" else "bf16"): {"enabled": True},
        "zero_optimization": zero,
    }
    if config.tp > 1:
        # DeepSpeed 0.19.8 takes each tensor-parallel rank for a replica where the configuration states the batch.
        del engine["train_batch_size"]
        # Logits stay divided by columns. A tied embedding then is, too.
        engine["tensor_parallel"] = {"autotp_size": config.tp, "vocab_parallel_lm_head": True}
    if config.optimizer_offload_fraction:
        zero["stage"] = max(1, zero["stage"])
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if config.optimizer_offload_fraction < 1:
            zero["offload_optimizer"]["ratio"] = config.optimizer_offload_fraction
    if config.offload_params:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if config.optimizer != "adam":
        engine["zero_allow_untested_optimizer"] = True
    if config.has_narrow_state:
        engine["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.precision == "bf16":
        engine["data_types"] = {"grad_accum_dtype": "fp32" if wide else "bf16"}
    notes = [
        _CLIPPING,
        (
            f"bring your own model, for sequences of {estimate.seq_length} tokens: check_model compares MODEL with it;"
            " compare ARITHMETIC yourself"
        ),
    ]
    if model.arithmetic is None:
        notes.append("the plan's model states no arithmetic: choose its activation, RoPE and epsilon yourself")
    if config.dp_replicate > 1:
        notes.append("construct the model inside `deepspeed.zero.MiCS_Init(config_dict_or_path=CONFIG)`")
    if config.recompute == "full":
        how = (
            "CHECKPOINT_INTERVAL does that" if config.pp > 1 else "put torch.utils.checkpoint around each in your model"
        )
        notes.append(f"each layer is recomputed in backward passes: {how}")
    if config.tp > 1:
        notes.append(
            f"{config.tp} consecutive ranks divide the matrices (AutoTP): give them the same micro-batches, and take"
            " DeepSpeed's loss, because each rank has some columns of the logits"
        )
    notes += _training(config)
    doc = "pass CONFIG to `deepspeed.initialize`"
    if config.pp > 1:
        doc += ", and a PlannedPipelineModule as its model"
    lines = [f'"""A plan for DeepSpeed: {doc}."""', "", *(f"# {line}" for line in job.header(*notes)), ""]
    named, other = _model(model)
    checked = [f"MODEL = {in_python(named)}", f"ARITHMETIC = {in_python(other)}"]
    if config.lora_rank:
        checked.append(f"ADAPTERS = {in_python(_adapters(config, model))}")
    if config.base_weights_dtype != "bf16":
        checked.append(f"BASE_WEIGHTS = {in_python(_NF4)}")
    if config.pp == 1:
        return {
            place.main or "planned.py": "\n".join([*lines, *checked, f"CONFIG = {in_python(engine)}"]) + "\n" + _CHECK
        }
    layers = ["embedding", *(f"layers.{at}" for at in range(model.layers)), "head"]
    ends = [*accumulate(job.counts)]
    lines += [
        *IMPORTS,
        "",
        "LAYERS = [",
        *(f"    {in_python(layer)}," for layer in layers),
        "]",
        f"PARTS = {in_python([0, *(1 + end for end in ends[:-1]), len(layers)])}",
        *checked,
        f"REPLICAS = {config.dp}",
        f"CHECKPOINT_INTERVAL = {int(config.recompute == 'full')}",
        f"CONFIG = {in_python(engine)}",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n" + MODULE + _CHECK}


_OPTIMIZERS = {
    "adam8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adam": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adam8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "sgd": "torch.optim.SGD with momentum",
}
_LINEARS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Names of GEMMs in Hugging Face's Llama and the models after it."""
_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "bfloat16",
}
"""Arguments of `transformers.BitsAndBytesConfig` for base weights in 4 bits. ZeRO stage 3 shards them in the format of
the storage, which must be the format of other weights (PEFT, DeepSpeed guide)."""


def _adapters(config: ParallelismConfig, model: Transformer) -> dict[str, object]:
    """Return the arguments of `peft.LoraConfig`."""
    named = [name for target in config.lora_targets for name in _LINEARS[target]]
    named = named if model.gated else [name for name in named if name != "gate_proj"]
    return {
        "r": config.lora_rank,
        "lora_alpha": 2 * config.lora_rank,
        "target_modules": named,
        "task_type": "CAUSAL_LM",
    }


def _training(config: ParallelismConfig) -> list[str]:
    """Return notes on the optimizer, on adapters and on packed documents, which the user's code has to make."""
    notes = []
    if config.optimizer_offload_fraction:
        notes.append("pass a deepspeed.ops.adam.DeepSpeedCPUAdam to deepspeed.initialize: the CPU updates the weights")
    if config.optimizer != "adam":
        notes.append(f"pass a {_OPTIMIZERS[config.optimizer]} to deepspeed.initialize")
    if config.lora_rank:
        notes.append("wrap your model: peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS))")
    if config.base_weights_dtype != "bf16":
        notes.append("load it with quantization_config=transformers.BitsAndBytesConfig(**BASE_WEIGHTS)")
    if config.packed_length is not None:
        notes.append(
            f"estimated with packed documents of {config.packed_length} tokens: your attention must keep them apart"
        )
    return notes


def _model(model: Transformer) -> tuple[dict[str, object], dict[str, object]]:
    """Return the model by the keys of Hugging Face's `config.json`, and the values of its arithmetic without a key."""
    found: dict[str, object] = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
    # With experts, this key is the size of an expert in some configurations and of shared experts in others. Models of
    # several blocks may compute the size from it, as LFM2 does.
    if not model.experts and not model.blocks:
        found["intermediate_size"] = model.ffn
    if (arithmetic := model.arithmetic) is None:
        return found, {}
    # The code of networks with a clamp ignores the key of the activation.
    keys = {name: each for name, each in _NAMES.items() if name != "activation" or arithmetic.glu_clamp is None}
    other = {
        name: value
        for name, value in asdict(arithmetic).items()
        if name not in keys and (model.experts or not name.startswith("router_"))
    }
    named = {key: getattr(arithmetic, name) for name, each in keys.items() for key in each}
    return found | {key: value for key, value in named.items() if value is not None}, other
