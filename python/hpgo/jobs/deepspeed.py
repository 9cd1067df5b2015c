"""Job folders for DeepSpeed: a training script for the planned model, and a check by DeepSpeed's own parser.

Source: `deepspeed/runtime/config.py`, `engine.py` and `pipe/module.py` of DeepSpeed 0.19.8, and transformers 5.23.0.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from math import isclose
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import shorten
from hpgo.base.quoting import filled, in_python
from hpgo.errors import ArgumentError
from hpgo.export.targets import Place
from hpgo.hardware.cluster import Cluster
from hpgo.jobs import deepspeed_texts as texts
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder
from hpgo.jobs.torchtitan import ALLOCATOR, DATASET, SAVE, holds_of
from hpgo.launch.job import job_nodes
from hpgo.llm.plan import LlmPlan

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.model.arithmetic import Arithmetic
    from hpgo.model.transformer import Transformer
    from hpgo.planning.plans import Plan

_HOST = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_ADAM: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
}
"""PyTorch's AdamW. DeepSpeed's own compiles a kernel at the start, for which each node needs the CUDA toolkit."""
_ON_CPU: dict[str, Any] = {
    **_ADAM, "params": {name: value for name, value in _ADAM["params"].items() if name != "torch_adam"},
}  # fmt: skip
"""DeepSpeed's AdamW for the CPU. PyTorch's would take several times as long there."""
_SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 1e-2}}
_DATA = """\
# Data, checkpoints and steps. Change them here; env.sh sets the variables. train.py has the learning rate.
--dataset "$DATASET_PATH"
{tokenizer}--save "$SAVE"
--save-interval 1000
--steps 10000
"""
_SMOKE = """\
# {steps} steps with synthetic data.
--smoke
--steps {steps}
"""
_TOKENIZER = Placeholder(
    name="TOKENIZER", meaning="folder of a Hugging Face tokenizer, or its name on the hub", example="/models/llama-3-8b"
)
_HOSTS = "DeepSpeed's own launcher: `deepspeed --hostfile hostfile --no_python --no_local_rank bash rank.sh`"


def parts(plan: LlmPlan | Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for DeepSpeed.

    Raises the errors of the export, and ArgumentError for a transformer that is more than a language model.
    """
    (main, text), *others = target.write(plan, Place()).items()
    libraries: tuple[str, ...]
    if isinstance(plan, LlmPlan):
        made, placeholders = _of_model(plan)
        tokenizer, libraries = '--tokenizer "$TOKENIZER"\n', ("transformers==5.23.0", "datasets==4.7.0")
        notes = (f"train.py makes sequences of {plan.estimate.seq_length} tokens.", _HOSTS)
    else:
        made, placeholders = _of_layers(plan)
        tokenizer, libraries = "", ()
        notes = ("train.py has three functions to write: `layer`, `mean_loss` and `batches_of`.", _HOSTS)
    return JobParts(
        title=f"{target.title} 0.19.8",
        command=("python3", "train.py"),
        data=_DATA.format(tokenizer=tokenizer),
        smoke=_SMOKE.format(steps=SMOKE_STEPS),
        files=(
            JobFile(name=main, text=text, holds="the plan: DeepSpeed's configuration and the cuts of a pipeline"),
            *(JobFile(name=name, text=other, holds=holds_of(name)) for name, other in others),
            *made,
        ),
        placeholders=(*placeholders, SAVE),
        environment=(ALLOCATOR,),
        check=('python3 check_config.py "$RANKS" "${arguments[@]}" > /dev/null',),
        needs="deepspeed",
        rate_in="train.py",
        step_line="step [0-9]+ of",
        step_rank=0,
        requirements=("deepspeed==0.19.8", "torch==2.15.0", *libraries),
        notes=notes,
    )


def check_language_model(model: Transformer) -> None:
    """Raise ArgumentError for a model that `AutoModelForCausalLM` does not build, or that needs more than text."""
    if more := _beside_language(model):
        raise ArgumentError(
            f"the job of DeepSpeed trains a language model on text, but `{shorten(model.name)}` has {more}",
            "write the plan with `-o llm-plan.json`: `hpgo export llm-plan.json --to deepspeed` has the settings for"
            " a script of your own",
            code="conflict",
        )


def _beside_language(model: Transformer) -> str:
    if model.tower is not None:
        return "a tower in front of the decoder"
    passes = {frozenset(one.causal for one in block.attention) for block in model.blocks if block.attention}
    # A decoder alone may attend to the result of an encoder, too, but an encoder never attends to earlier tokens only.
    return "an encoder before the decoder" if frozenset({False}) in passes and len(passes) > 1 else ""


def _of_model(plan: LlmPlan) -> tuple[list[JobFile], list[Placeholder]]:
    """Return the files of a transformer's plan beside the exported ones, and its placeholders."""
    config, model = plan.estimate.parallelism, plan.transformer
    check_language_model(model)
    piped, recompute = config.pp > 1, config.recompute == "full"
    dtype = "torch.float16" if config.precision == "fp16" else "torch.bfloat16"
    # A pipeline recomputes by the interval in planned.py.
    checkpointing = texts.CHECKPOINTING if recompute and not piped else ""
    tokens = plan.estimate.global_batch_size * plan.estimate.seq_length
    train = filled(
        texts.TRAIN,
        {
            "IMPORTS": texts.PIPED_IMPORTS if piped else texts.MODEL_IMPORTS,
            "OPTIMIZER": in_python(_ON_CPU if config.optimizer_offload_fraction else _ADAM),
            "CONSTANTS": f"SEQ_LENGTH = {plan.estimate.seq_length}\nDTYPE = {dtype}\n{texts.CHUNK}",
            "DATA": "data set with a column named text: a folder, or a name on the hub",
            "OPTIONS": '    parser.add_argument("--tokenizer", help="folder of a tokenizer, or a name on the hub")\n',
            "REPLICA": texts.PIPED_REPLICA if piped else texts.REPLICA,
            "BATCHES": texts.TEXT_BATCHES,
            # In a pipeline, DeepSpeed 0.19.8 starts a timer of the breakdown twice and fails. It also prints the step
            # time as train.py does, so that readers of the log would count each step twice.
            "BREAKDOWN": in_python(not piped),
            "PRINTED": "1000" if piped else "1",
            "RATE": f", {{{tokens} / took_s:,.0f}} tokens/s",
            "STEP": (texts.PIPED_STEP if piped else texts.STEP).rstrip(),
            "MODEL": filled(
                (texts.PIPED_MODEL if piped else texts.MODEL) + texts.CONFIG, {"CHECKPOINTING": checkpointing}
            ).rstrip(),
            "DATASET": texts.TEXT.rstrip(),
        },
    )
    written = hugging_face(model)
    files = [
        JobFile(name="train.py", text=train, holds="trains the model of MODEL_CONFIG by the plan"),
        _check(
            config.pp, texts.CHECK_PARAMETERS, PARAMETERS=in_python(model.parameters), SHOWN=f"{model.parameters:,}"
        ),
        JobFile(name="hostfile", text=_hostfile(plan.cluster), holds="nodes for DeepSpeed's own launcher"),
    ]
    if written is not None:
        text = json.dumps(written, indent=2) + "\n"
        files.append(JobFile(name="config.json", text=text, holds="the model, as transformers reads it"))
    named = Placeholder(
        name="MODEL_CONFIG",
        meaning="config.json of the planned model, its folder, or its name on the Hugging Face hub",
        example="/models/my-model",
        default="" if written is None else "config.json",
        needed="always",
    )
    return files, [named, _TOKENIZER, DATASET]


def _of_layers(plan: Plan) -> tuple[list[JobFile], list[Placeholder]]:
    """Return the files of a plan by layers beside the exported ones, and its placeholders."""
    optimizer = plan.assumed.memory.optimizer or ""
    chosen = _SGD if optimizer.startswith("sgd") else _ADAM
    if optimizer == "sgd-momentum":
        chosen = {**_SGD, "params": {**_SGD["params"], "momentum": 0.9}}
    train = filled(
        texts.TRAIN,
        {
            "IMPORTS": texts.LAYER_IMPORTS,
            "OPTIMIZER": in_python(chosen),
            "CONSTANTS": "",
            "DATA": "data that batches_of reads",
            "OPTIONS": "",
            "REPLICA": texts.PIPED_REPLICA,
            "BATCHES": "batches_of(options, replica, replicas)",
            "BREAKDOWN": "False",
            "PRINTED": "1000",
            "RATE": "",
            "STEP": texts.PIPED_STEP.rstrip(),
            "MODEL": texts.LAYERS.rstrip(),
            "DATASET": texts.OWN_DATA.rstrip(),
        },
    )
    files = [
        JobFile(name="train.py", text=train, holds="trains the plan's layers, once its three functions are written"),
        _check(len(plan.stages), texts.CHECK_LAYERS),
    ]
    # Old plans have only a digest of their cluster.
    if isinstance(cluster := plan.assumed.cluster, Cluster):
        files.append(JobFile(name="hostfile", text=_hostfile(cluster), holds="nodes for DeepSpeed's own launcher"))
    return files, [replace(DATASET, meaning="data that batches_of() in train.py reads")]


def _check(stages: int, model: str, **values: str) -> JobFile:
    text = filled(texts.CHECK, {"STAGES": in_python(stages), "MODEL": filled(model, values).rstrip()})
    return JobFile(name="check_config.py", text=text, holds="lets DeepSpeed's parser read the configuration")


def _hostfile(cluster: Cluster) -> str:
    """Return the nodes with their GPUs; `node-N` stands for a node without a name."""
    lines = ["# Write the names of the nodes, by which ssh reaches them."]
    for number, node in enumerate(job_nodes(cluster)):
        name = node.name if _HOST.fullmatch(node.name) else f"node-{number}"
        lines.append(f"{name} slots={node.ranks}")
    return "\n".join(lines) + "\n"


def hugging_face(model: Transformer) -> dict[str, object] | None:
    """Return the `config.json` of a model that transformers has as Llama, Mistral, Qwen2 or Qwen3; None for others.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> [(hugging_face(TRANSFORMERS[name]) or {}).get("model_type") for name in ("llama-3-8b", "mistral-7b", "gpt-2")]
    ['llama', 'mistral', None]
    """
    kind, arithmetic = _family(model), model.arithmetic
    if kind is None:
        return None
    found: dict[str, object] = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        # transformers warns about longer sequences than this, but RoPE has no limit.
        "max_position_embeddings": model.longest or 1 << 17,
    }
    if kind == "llama":
        found |= {"attention_bias": model.attention_bias == "all", "mlp_bias": model.ffn_bias}
    if kind == "mistral":
        found["sliding_window"] = model.window
    if arithmetic is not None:
        found |= {
            "hidden_act": arithmetic.activation,
            "rms_norm_eps": arithmetic.norm_epsilon,
            "rope_theta": arithmetic.rope_theta,
            "attention_dropout": arithmetic.attention_dropout,
            "initializer_range": arithmetic.init_std,
        }
        if (scaling := arithmetic.rope_scaling) is not None:
            found["rope_scaling"] = {name: value for name, value in asdict(scaling).items() if value is not None}
    return found


def _family(model: Transformer) -> str | None:
    """Return the model type of transformers that has this shape and arithmetic, if one of the four has."""
    plain = (
        model.gated
        and not (model.experts or model.centred_norms or model.positions or model.further_tokens)
        and model.latent is None
        and model.norms_per_layer == 2
    )
    if not plain or (model.arithmetic is not None and not _is_plain(model.arithmetic, model.head_dim)):
        return None
    windows = len(model.window_layers)
    biased = model.attention_bias != "none" or model.ffn_bias
    if model.head_norms:
        return None if windows or biased else "qwen3"
    if windows:
        return "mistral" if windows == model.layers and not biased else None
    if model.attention_bias == "qkv":
        # Heads of Qwen2 have no width of their own.
        return None if model.ffn_bias or model.head_dim * model.heads != model.hidden else "qwen2"
    return "llama"


def _is_plain(arithmetic: Arithmetic, head_dim: int) -> bool:
    """Return whether the arithmetic has nothing that these four models do not have."""
    named = ("activation", "norm_epsilon", "rope_theta", "rope_scaling", "attention_dropout", "init_std")
    usual = type(arithmetic)(**{name: getattr(arithmetic, name) for name in named})
    routed = {name: value for name, value in asdict(usual).items() if name.startswith("router_")}
    # Neighboring dimensions or halves are rotated together: only the order of the weights differs.
    stated = replace(arithmetic, rope_interleaved=False, **routed)
    # The usual scale is often stated, too.
    if (scale := arithmetic.attention_scale) is not None and isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        stated = replace(stated, attention_scale=None)
    return stated == usual and arithmetic.rope_theta is not None
