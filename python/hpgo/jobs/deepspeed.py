"""Job folders for DeepSpeed: a training script for the planned model, and a check by DeepSpeed's own parser.

Source: `deepspeed/runtime/config.py`, `engine.py` and `pipe/module.py` of DeepSpeed 0.19.8, and transformers 5.23.0.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
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
from hpgo.llm.hugging_face_shape import hugging_face
from hpgo.llm.plan import LlmPlan

if TYPE_CHECKING:
    from hpgo.export.targets import Target
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
    if not model.embeds:
        return "patches of images in place of words"
    if model.tower is not None:
        return "a tower in front of the decoder"
    passes = {frozenset(one.causal for one in block.attention) for block in model.blocks if block.attention}
    # A decoder alone may attend to the result of an encoder, too, but an encoder never attends to earlier tokens only.
    return "an encoder before the decoder" if frozenset({False}) in passes and len(passes) > 1 else ""


def _of_model(plan: LlmPlan) -> tuple[list[JobFile], list[Placeholder]]:
    """Return the files of a transformer's plan beside the exported ones, and its placeholders."""
    config, model = plan.estimate.parallelism, plan.transformer
    check_language_model(model)
    piped, sharded, recompute = config.pp > 1, config.tp > 1, config.recompute == "full"
    dtype = "torch.float16" if config.precision == "fp16" else "torch.bfloat16"
    # A pipeline recomputes by the interval in planned.py.
    checkpointing = texts.CHECKPOINTING if recompute and not piped else ""
    tokens = plan.estimate.global_batch_size * plan.estimate.seq_length
    replica, step, loss = (
        (texts.PIPED_REPLICA, texts.PIPED_STEP, texts.LOSS) if piped
        else (texts.SHARDED_REPLICA, texts.SHARDED_STEP, texts.SHARDED_LOSS) if sharded
        else (texts.REPLICA, texts.STEP, texts.LOSS)
    )  # fmt: skip
    train = filled(
        texts.TRAIN,
        {
            "IMPORTS": texts.PIPED_IMPORTS
            if piped
            else filled(texts.MODEL_IMPORTS, {"GROUPS": texts.GROUPS if sharded else ""}),
            "OPTIMIZER": in_python(_ON_CPU if config.optimizer_offload_fraction else _ADAM),
            "CONSTANTS": f"SEQ_LENGTH = {plan.estimate.seq_length}\nDTYPE = {dtype}\n{texts.CHUNK}"
            + (f"TP = {config.tp}\n" if sharded else ""),
            "DATA": "data set with a column named text: a folder, or a name on the hub",
            "OPTIONS": '    parser.add_argument("--tokenizer", help="folder of a tokenizer, or a name on the hub")\n',
            "REPLICA": replica,
            "BATCHES": texts.TEXT_BATCHES,
            # In a pipeline, DeepSpeed 0.19.8 starts a timer of the breakdown twice and fails. It also prints the step
            # time as train.py does, so that readers of the log would count each step twice.
            "BREAKDOWN": in_python(not piped),
            "PRINTED": "1000" if piped else "1",
            "RATE": f", {{{tokens} / took_s:,.0f}} tokens/s",
            "STEP": step.rstrip(),
            "MODEL": filled(
                (texts.PIPED_MODEL if piped else texts.MODEL) + texts.CONFIG + loss, {"CHECKPOINTING": checkpointing}
            ).rstrip(),
            "DATASET": texts.TEXT.rstrip(),
        },
    )
    written = hugging_face(model)
    files = [
        JobFile(name="train.py", text=train, holds="trains the model of MODEL_CONFIG by the plan"),
        _check(
            *((config.tp, "tensor parallelism") if sharded else (config.pp, "pipeline parallelism")),
            texts.CHECK_PARAMETERS,
            PARAMETERS=in_python(model.parameters),
            SHOWN=f"{model.parameters:,}",
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
        _check(len(plan.stages), "pipeline parallelism", texts.CHECK_LAYERS),
    ]
    # Old plans have only a digest of their cluster.
    if isinstance(cluster := plan.assumed.cluster, Cluster):
        files.append(JobFile(name="hostfile", text=_hostfile(cluster), holds="nodes for DeepSpeed's own launcher"))
    return files, [replace(DATASET, meaning="data that batches_of() in train.py reads")]


def _check(ranks: int, named: str, model: str, **values: str) -> JobFile:
    """Return the check of a job whose replicas have some ranks of a kind of parallelism."""
    text = filled(texts.CHECK, {"RANKS": in_python(ranks), "NAMED": named, "MODEL": filled(model, values).rstrip()})
    return JobFile(name="check_config.py", text=text, holds="lets DeepSpeed's parser read the configuration")


def _hostfile(cluster: Cluster) -> str:
    """Return the nodes with their GPUs; `node-N` stands for a node without a name."""
    lines = ["# Write the names of the nodes, by which ssh reaches them."]
    for number, node in enumerate(job_nodes(cluster)):
        name = node.name if _HOST.fullmatch(node.name) else f"node-{number}"
        lines.append(f"{name} slots={node.ranks}")
    return "\n".join(lines) + "\n"
