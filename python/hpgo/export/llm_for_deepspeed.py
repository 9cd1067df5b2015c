"""DeepSpeed: a way of training a transformer as CONFIG for `deepspeed.initialize`, and where a pipeline is cut.

The model is the user's: a list of layers for a pipeline, a module without one.
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
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.transformer import Transformer

_NAMES = {
    "activation": ("hidden_act",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rope_theta": ("rope_theta",),
    "attention_dropout": ("attention_dropout",),
    "init_std": ("initializer_range",),
}
"""Names of Hugging Face's configurations for fields of `Arithmetic`; a configuration has some of them."""
_CHECK = '''

def check_model(config):
    """Raise ValueError if a Hugging Face `config` is of another model than MODEL, by the names that it has."""
    found = {name: getattr(config, name) for name in MODEL if getattr(config, name, None) is not None}
    wrong = [f"{name} is {value}, not {MODEL[name]}" for name, value in found.items() if value != MODEL[name]]
    if wrong:
        raise ValueError(f"this is planned for another model: {', '.join(wrong)}")
'''
"""Behind MODEL."""
_CLIPPING = "gradients are clipped at norm 1, as DeepSpeed does unless told otherwise: 0 in CONFIG turns that off"


def module(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """CONFIG, and with a pipeline LAYERS, PARTS, REPLICAS and a module that obeys them."""
    job = LlmExportJob.of(plan, target, place)
    config, price, model = job.config, job.plan.estimate, job.model
    wide = config.precision == "bf16" and not config.grad_reduce_in_bf16
    # DeepSpeed has 32-bit sums of gradients of 16-bit weights with ZeRO alone, which shares nothing on one GPU.
    zero: dict[str, Any] = {"stage": config.zero_stage or int(wide)}
    if config.zero_stage >= 1:
        zero["overlap_comm"] = config.overlap_dp_comm
    engine: dict[str, Any] = {
        "train_batch_size": price.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": price.micro_batches,
        "gradient_clipping": 1.0,
        ("fp16" if config.precision == "fp16" else "bf16"): {"enabled": True},
        "zero_optimization": zero,
    }
    if config.precision == "bf16":
        engine["data_types"] = {"grad_accum_dtype": "fp32" if wide else "bf16"}
    notes = [
        _CLIPPING,
        (
            f"the model is yours, with sequences of {price.seq_length} tokens: check_model compares MODEL,"
            " and you ARITHMETIC"
        ),
    ]
    if model.arithmetic is None:
        notes.append("the planned model states no arithmetic: its activation, RoPE and epsilon are yours to choose")
    if config.recompute == "full":
        how = "with CHECKPOINT_INTERVAL" if config.pp > 1 else "in your model: torch.utils.checkpoint around each"
        notes.append(f"each layer is computed anew in backward passes, {how}")
    doc = "pass CONFIG to `deepspeed.initialize`"
    if config.pp > 1:
        doc += ", and a PlannedPipelineModule as its model"
    lines = [f'"""A way of training for DeepSpeed: {doc}."""', "", *(f"# {line}" for line in job.header(*notes)), ""]
    told, other = _model(model)
    checked = [f"MODEL = {in_python(told)}", f"ARITHMETIC = {in_python(other)}"]
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


def _model(model: Transformer) -> tuple[dict[str, object], dict[str, object]]:
    """Return what `config.json` of Hugging Face says of the model by its names, and the rest of its arithmetic."""
    told: dict[str, object] = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
    if not model.experts:  # else configurations mean experts by it, or what is beside them
        told["intermediate_size"] = model.ffn
    if (arithmetic := model.arithmetic) is None:
        return told, {}
    other = {
        name: value
        for name, value in asdict(arithmetic).items()
        if name not in _NAMES and (model.experts or not name.startswith("router_"))
    }
    named = {key: getattr(arithmetic, name) for name, keys in _NAMES.items() for key in keys}
    return told | {key: value for key, value in named.items() if value is not None}, other
