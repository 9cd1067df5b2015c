"""Job folders for torchtitan 0.2: a job's TOML, a module that registers the model, and a check by torchtitan's parser.

Source: `torchtitan/train.py`, `protocols/train_spec.py` and the models `llama3` and `qwen3` of torchtitan 0.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.base.quoting import filled, in_python
from hpgo.errors import ArgumentError
from hpgo.export.jobs import ExportJob
from hpgo.export.targets import Place
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder
from hpgo.jobs.torchtitan import (
    ALLOCATOR,
    DATASET,
    DATASET_CODE,
    SAVE,
    STEP_LINE,
    TOKENIZER,
    counting,
    holds_of,
    notes_of,
)
from hpgo.llm.frameworks import TORCHTITAN_02
from hpgo.llm.plan import LlmPlan

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.llm.arithmetic import Setting
    from hpgo.model.transformer import Transformer
    from hpgo.planning.plans import Plan

_JOB = '''\
"""The model of this job for torchtitan 0.2, which imports this module: `--experimental.custom_import job_model`.

It registers `planned`, and `planned_smoke`: the same model with synthetic tokens.
"""

__IMPORTS__

__DATASET__SPEC = get_train_spec(__PACKAGE__)
MODELS = __MODELS__


def synthetic_tokens(dp_world_size, dp_rank, tokenizer, job_config):
    """Return sequences that count up from a random number, which a model learns soon."""
    sequences = Counting(MODELS[job_config.model.flavor].vocab_size, job_config.training.seq_len, dp_rank)
    return ParallelAwareDataloader(
        sequences, dp_rank, dp_world_size, batch_size=job_config.training.local_batch_size
    )


__COUNTING__


register_train_spec("planned", replace(SPEC, model_args=MODELS))
register_train_spec(
    "planned_smoke",
    replace(SPEC, model_args=MODELS, build_tokenizer_fn=None, build_dataloader_fn=synthetic_tokens),
)
'''
_IMPORTS = """\
__MORE__from dataclasses import replace

import torch
from datasets import load_dataset
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
__MODEL__from torchtitan.protocols.train_spec import get_train_spec, register_train_spec"""
_DATA = """\
# Tokenizer, data, checkpoints, steps and learning rate. Change them here; env.sh sets the variables.
--model.name planned
--model.hf_assets_path "$HF_ASSETS_PATH"
--training.dataset text
--training.dataset_path "$DATASET_PATH"
--job.dump_folder "$SAVE"
--checkpoint.enable
--checkpoint.interval 1000
# Start from the weights in HF_ASSETS_PATH:
# --checkpoint.initial_load_in_hf
--training.steps 10000
--optimizer.lr 3e-4
--lr_scheduler.warmup_steps 200
--metrics.log_freq 10
"""
_SMOKE = """\
# {steps} steps with synthetic tokens.
--model.name planned_smoke
--training.steps {steps}
--lr_scheduler.warmup_steps 1
--metrics.log_freq 1
"""
# torchtitan leaves out modules that no stage names, so the number of blocks is compared, too.
_CHECK = '''\
"""Let torchtitan's own parser read the job and build the model, without a GPU: check_config.py RANKS WORDS…"""

import importlib
import sys

import torch
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

PARAMETERS, BLOCKS = __PARAMETERS__, __BLOCKS__
ranks, *words = sys.argv[1:]
config = ConfigManager().parse_args(words)
degrees = config.parallelism
ParallelDims(
    dp_replicate=degrees.data_parallel_replicate_degree,
    dp_shard=degrees.data_parallel_shard_degree,
    cp=degrees.context_parallel_degree,
    tp=degrees.tensor_parallel_degree,
    pp=degrees.pipeline_parallel_degree,
    ep=degrees.expert_parallel_degree,
    etp=degrees.expert_tensor_parallel_degree,
    world_size=int(ranks),
)
importlib.import_module(config.experimental.custom_import)
spec = get_train_spec(config.model.name)
args = spec.model_args[config.model.flavor]
args.update_from_config(config)
with torch.device("meta"):
    model = spec.model_cls(args)
found = sum(parameter.numel() for parameter in model.parameters())
if PARAMETERS not in {None, found}:
    sys.exit(f"error: the model has {found:,} parameters, but the plan is for {PARAMETERS:,}")
if len(model.layers) != BLOCKS:
    sys.exit(f"error: the model has {len(model.layers)} blocks, but the plan is for {BLOCKS}")
'''
_ROPE_SCALING = ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def parts(plan: LlmPlan | Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for torchtitan 0.2.

    Raises the errors of the export, and ArgumentError for a model that neither of its models can be.
    """
    (main, text), *others = target.write(plan, Place()).items()
    model = plan.transformer if isinstance(plan, LlmPlan) else None
    checked = {"PARAMETERS": in_python(model and model.parameters), "BLOCKS": in_python(_blocks(plan, target))}
    files = (
        JobFile(name=main, text=text, holds="the plan: sections of torchtitan's configuration"),
        *(JobFile(name=name, text=other, holds=holds_of(name)) for name, other in others),
        JobFile(name="job_model.py", text=_job_model(model), holds="registers the model, and synthetic tokens"),
        JobFile(
            name="check_config.py",
            text=filled(_CHECK, checked),
            holds="lets torchtitan's parser read the job and build the model",
        ),
    )
    named = (
        Placeholder(
            name="MODEL_NAME", meaning="package of your model in torchtitan.models", example="llama3", needed="always"
        ),
        Placeholder(name="MODEL_FLAVOR", meaning="flavor of your model in that package", example="8B", needed="always"),
    )
    flavor = '"$MODEL_FLAVOR"' if model is None else "planned"
    words = (
        "--job.config_file", main, "--experimental.custom_import", "job_model", "--model.flavor", flavor,
    )  # fmt: skip
    return JobParts(
        title=f"{target.title} 0.2.2",
        command=("python3", "-m", "torchtitan.train", *words),
        data=_DATA,
        smoke=_SMOKE.format(steps=SMOKE_STEPS),
        files=files,
        placeholders=(*([] if model else named), TOKENIZER, DATASET, SAVE),
        environment=(ALLOCATOR,),
        check=(f'python3 check_config.py "$RANKS" {" ".join(words)} "${{arguments[@]}}" > /dev/null',),
        needs="torchtitan",
        step_line=STEP_LINE,
        requirements=("torchtitan==0.2.2", "torch==2.15.0"),
        notes=notes_of(plan),
    )


def _blocks(plan: LlmPlan | Plan, target: Target) -> int:
    if isinstance(plan, LlmPlan):
        return plan.transformer.layers
    return sum(ExportJob.of(plan, target, Place()).block_counts)


def _job_model(model: Transformer | None) -> str:
    if model is None:
        package, models, imports = 'os.environ["MODEL_NAME"]', "SPEC.model_args", ""
    else:
        package, models, imports = _args(model)
    more = "import os\n" if model is None else ""
    parts = {
        "IMPORTS": filled(_IMPORTS, {"MORE": more, "MODEL": imports}),
        "PACKAGE": package,
        "MODELS": models,
        "DATASET": DATASET_CODE,
        "COUNTING": counting().rstrip(),
    }
    return filled(_JOB, parts)


def _args(model: Transformer) -> tuple[str, str, str]:
    """Return the package of a model, its arguments as code, and the import of their classes.

    Raises ArgumentError for RoPE scaling with heads that only Qwen3 can have.
    """
    settings = dict(TORCHTITAN_02.stated(model).settings)
    fields: dict[str, Setting] = {
        "dim": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab,
    }
    if "eps" in settings:
        fields["norm_eps"] = settings["eps"]
    if "theta" in settings:
        fields["rope_theta"] = settings["theta"]
    scaled = settings.get("scaling") == "llama"
    # Heads of torchtitan 0.2's Llama are as wide as the model divided by their number, and have no norms.
    if model.head_norms or model.head_dim * model.heads != model.hidden:
        if scaled:
            raise ArgumentError(
                f"torchtitan 0.2 scales the RoPE of Llama only, but heads of `{shorten(model.name)}` are not Llama's",
                "use `--to torchtitan@0.3`",
                code="unsupported",
            )
        fields |= {"head_dim": model.head_dim, "hidden_dim": model.ffn, "qk_norm": model.head_norms}
        imports = "from torchtitan.models.qwen3 import Qwen3ModelArgs\n"
        return '"qwen3"', _models("Qwen3ModelArgs", fields), imports
    # The FFN size is a fraction of 8/3 of the hidden size, rounded up to a multiple of `multiple_of`.
    fields |= {"multiple_of": model.ffn, "ffn_dim_multiplier": min(1.0, model.ffn / (4 * model.hidden))}
    imports = "from torchtitan.models.llama3 import TransformerModelArgs\n"
    scaling = ""
    if "scaling" in settings:
        # torchtitan 0.2 always scales. A factor of 1 changes nothing.
        chosen = (
            {name: settings[name] for name in _ROPE_SCALING if name in settings} if scaled else {"scaling_factor": 1.0}
        )
        given = ", ".join(f"{name}={in_python(value)}" for name, value in chosen.items())
        scaling = f"rope_scaling_args=RoPEScalingArgs({given})"
        imports += "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n"
    return '"llama3"', _models("TransformerModelArgs", fields, scaling), imports


def _models(kind: str, fields: dict[str, Setting], more: str = "") -> str:
    lines = [*(f"{name}={in_python(value)}" for name, value in fields.items()), *([more] if more else [])]
    return "\n".join(["{", f'    "planned": {kind}(', *(f"        {line}," for line in lines), "    )", "}"])
