"""Job folders for torchtitan 0.3: a module with the configurations of the job, and a check by torchtitan's own parser.

Source: `torchtitan/config/manager.py`, `trainer.py` and `models/common` of torchtitan 0.3.0.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpgo.base.quoting import filled, in_python
from hpgo.export.llm_for_torchtitan import registered, replaced
from hpgo.export.targets import Place
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder, Variable
from hpgo.jobs.titan_models import new_model, of_transformers
from hpgo.llm.hugging_face_shape import hugging_face
from hpgo.llm.plan import LlmPlan
from hpgo.llm.titan_shape import needs_backend

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.planning.plans import Plan

STEP_LINE = "step:.*tps:"
"""Lines of torchtitan's log with the throughput of a step, with colors between the words."""
ALLOCATOR = Variable(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    why="less fragmentation of GPU memory; torchtitan's own start script sets it, too",
)
DATASET_CODE = """\
# A folder of parquet, JSON or text files, or a name on the hub, with a column named text.
DATASETS["text"] = DatasetConfig(
    path="",
    loader=lambda path: load_dataset(path, split="train", streaming=True),
    sample_processor=lambda sample: sample["text"],
)
"""
"""Registration of a data set of text, which both releases read alike."""
_COUNTING = """\
class Counting(IterableDataset):
    def __init__(self, vocab_size, seq_len, seed):
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed

    def __iter__(self):
        chance = torch.Generator().manual_seed(self.seed)
        while True:
            start = torch.randint(self.vocab_size, (1,), generator=chance)
            tokens = (start + torch.arange(self.seq_len + 1)) % self.vocab_size
            yield {"input": tokens[:-1]__BESIDE__}, tokens[1:]
"""
_JOB = '''\
"""Configurations of this job for torchtitan: `--config train`, or `--config smoke` for a run without data.

__NEW__
"""

__IMPORTS__

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1

__DATASET__

__BASE__


def train():
    """Return the configuration with the plan. The command line sets data, tokenizer and steps."""
    config = planned(base())
    config.optimizer = default_adamw(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    config.profiler.enable_profiling = False  # a profiler would change the step time
    return config


def smoke():
    """Return the same configuration with synthetic tokens, and without checkpoints."""
    config = train()
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = SyntheticTokens.Config(vocab_size=__WORDS__)
    config.checkpoint.enable = False
    config.metrics.log_freq = 1
    config.metrics.enable_tensorboard = False
    return config


class NoTokenizer(BaseTokenizer):
    """A tokenizer that is never used."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise RuntimeError("the smoke run has no tokenizer")

    decode = get_vocab_size = encode


class SyntheticTokens(ParallelAwareDataloader):
    """Sequences that count up from a random number, which a model learns soon."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        vocab_size: int = 2

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        sequences = Counting(config.vocab_size, seq_len, dp_rank)
        super().__init__(sequences, dp_rank, dp_world_size, batch_size=local_batch_size)


__COUNTING__'''
_IMPORTS = {
    "dataclasses": ["dataclass"],
    "datasets": ["load_dataset"],
    "planned": ["planned"],
    "torch.utils.data": ["IterableDataset"],
    "torchtitan.components.dataloader": ["ParallelAwareDataloader"],
    "torchtitan.components.optimizer": ["default_adamw"],
    "torchtitan.components.tokenizer": ["BaseTokenizer"],
    "torchtitan.hf_datasets": ["DatasetConfig"],
    "torchtitan.hf_datasets.text_datasets": ["DATASETS"],
}
# Models of the registry keep their own initialization, and new ones get the standard deviation of their configuration.
_REGISTERED = '''\
def base():
    """Return torchtitan's own configuration of this model."""
    config = __FUNCTION__()
__MODEL__    return config
'''
_NAMED = '''\
def base():
    """Return torchtitan's own configuration of your model, which MODEL_CONFIG in env.sh names."""
    module, _, function = os.environ["MODEL_CONFIG"].partition(":")
    return getattr(importlib.import_module(module), function)()
'''
# torchtitan accepts the names of its own data sets only, so job_config.py registers one more, named `text`.
_DATA = """\
# Tokenizer, data, checkpoints and steps. Change them here; env.sh sets the variables.
# job_config.py has the learning rate, the weight decay and the format of the data.
--config train
--hf_assets_path "$HF_ASSETS_PATH"
--dataloader.dataset text
--dataloader.dataset_path "$DATASET_PATH"
--dump_folder "$SAVE"
--checkpoint.enable
--checkpoint.interval 1000
# Start from the weights in HF_ASSETS_PATH:
# --checkpoint.initial_load_in_hf
--training.steps 10000
--lr_scheduler.warmup_steps 200
--metrics.log_freq 10
"""
_SMOKE = """\
# {steps} steps with synthetic tokens.
--config smoke
--training.steps {steps}
--lr_scheduler.warmup_steps 1
"""
# `update_from_config` refuses sequences longer than RoPE, degrees that do not divide heads, and tied weights in a
# pipeline.
_CHECK = '''\
"""Let torchtitan's own parser read a configuration and build the model, without a GPU: check_config.py RANKS WORDS…"""

import sys

import torch
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

PARAMETERS = __PARAMETERS__
ranks, *words = sys.argv[1:]
config = ConfigManager().parse_args(words)
ParallelDims.from_config(config.parallelism, int(ranks))
model = config.model_spec.model
model.update_from_config(config=config)
with torch.device("meta"):
    found = sum(parameter.numel() for parameter in model.build().parameters())
if PARAMETERS not in {None, found}:
    sys.exit(f"error: the model has {found:,} parameters, but the plan is for {PARAMETERS:,}")
'''
TOKENIZER = Placeholder(
    name="HF_ASSETS_PATH",
    meaning="folder with the model's tokenizer, from scripts/download_hf_assets.py of torchtitan",
    kind="folder",
    example="/models/Llama-3.1-8B",
)
DATASET = Placeholder(
    name="DATASET_PATH",
    meaning="folder of parquet, JSON or text files, or a data set on the Hugging Face hub, with a column named text",
    example="/data/my_text",
)
SAVE = Placeholder(name="SAVE", meaning="folder for checkpoints and logs", example="/checkpoints/run-1")


def parts(plan: LlmPlan | Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for torchtitan 0.3. Raises the errors of the export."""
    main, *others = target.write(plan, Place()).items()
    model = plan.transformer if isinstance(plan, LlmPlan) else None
    files = (
        JobFile(name=main[0], text=main[1], holds="the plan: `planned(config)` sets it and checks the model's shape"),
        *(JobFile(name=name, text=text, holds=holds_of(name)) for name, text in others),
        JobFile(name="job_config.py", text=_job_config(plan), holds="configurations `train` and `smoke` of the job"),
        JobFile(
            name="check_config.py",
            text=filled(_CHECK, {"PARAMETERS": in_python(model and model.parameters)}),
            holds="lets torchtitan's parser read a configuration and build the model",
        ),
    )
    backend = model is not None and needs_backend(model)
    if model is not None and backend:
        text = json.dumps(hugging_face(model), indent=2) + "\n"
        files = (*files, JobFile(name="config.json", text=text, holds="the model, as transformers reads it"))
    named = Placeholder(
        name="MODEL_CONFIG",
        meaning="module and function of torchtitan's configuration of your model",
        example="torchtitan.models.llama3.config_registry:llama3_8b",
        needed="always",
    )
    return JobParts(
        title=f"{target.title} 0.3.0",
        command=("python3", "-m", "torchtitan.train", "--module", "job_config"),
        data=_DATA,
        smoke=_SMOKE.format(steps=SMOKE_STEPS),
        files=files,
        placeholders=(*([] if model else [named]), TOKENIZER, DATASET, SAVE),
        environment=(ALLOCATOR,),
        check=('python3 check_config.py "$RANKS" --module job_config "${arguments[@]}" > /dev/null',),
        needs="torchtitan",
        rate_in="job_config.py",
        step_line=STEP_LINE,
        requirements=("torchtitan==0.3.0", "torch==2.15.0", *(["transformers==5.23.0"] if backend else [])),
        notes=notes_of(plan),
    )


def holds_of(name: str) -> str:
    """Return the description of a file that is exported beside the plan.

    >>> holds_of("order.csv")
    'actions of each pipeline rank, in order'
    """
    return {
        "order.csv": "actions of each pipeline rank, in order",
        "ranks.csv": "node and GPU of each rank",
    }[name]


def notes_of(plan: LlmPlan | Plan) -> tuple[str, ...]:
    """Return the sentences for README.md."""
    piped = plan.estimate.parallelism.pp > 1 if isinstance(plan, LlmPlan) else len(plan.stages) > 1
    return ("Only ranks of the last pipeline stage print the loss; the others print -1.",) if piped else ()


def _job_config(plan: LlmPlan | Plan) -> str:
    imports = {module: list(names) for module, names in _IMPORTS.items()}
    plain, words = ["torch"], "config.model_spec.model.vocab_size"
    if not isinstance(plan, LlmPlan):
        base, new = _NAMED, "Your model comes from torchtitan's registry: set MODEL_CONFIG in env.sh."
        plain += ["importlib", "os"]
    elif needs_backend(plan.transformer):
        base, more = of_transformers()
        imports |= {"planned": ["SHAPE", "planned"], **more}
        words = 'SHAPE["vocab_size"]'
        new = "transformers builds the model of config.json, and torchtitan's backend for such models trains it."
    elif (found := registered(plan.transformer)) is None:
        base, more = new_model(plan.transformer)
        for module, names in more.items():
            imports.setdefault(module, []).extend(names)
        new = "The model is new: torchtitan's registry has none of this shape, so `base` builds it."
    else:
        package, function, flavor = found
        imports[f"torchtitan.models.{package}.config_registry"] = [function]
        model = f"{line}\n" if (line := replaced(flavor)) else ""
        if model:
            imports[f"torchtitan.models.{package}"] = ["model_registry"]
        base = filled(_REGISTERED, {"FUNCTION": function, "MODEL": model})
        new = f"The model is {flavor} of torchtitan's `{package}`."
    parts = {"NEW": new, "IMPORTS": _import_lines(plain, imports), "BASE": base.rstrip(), "DATASET": DATASET_CODE}
    parts["WORDS"] = words
    parts["COUNTING"] = counting(', "positions": torch.arange(self.seq_len)')
    return filled(_JOB, parts)


def counting(beside: str = "") -> str:
    """Return the code of a data set of synthetic tokens. `beside` is code for more entries of its inputs."""
    return filled(_COUNTING, {"BESIDE": beside})


def _import_lines(plain: list[str], names: dict[str, list[str]]) -> str:
    standard = {"dataclasses", "functools", "importlib", "os", "pathlib"}
    lines = [(module, f"import {module}") for module in plain]
    lines += [(module, f"from {module} import {', '.join(sorted(found))}") for module, found in names.items()]

    def block(own: bool) -> str:
        chosen = [(module, line) for module, line in lines if (module in standard) == own]
        return "\n".join(line for _, line in sorted(chosen, key=lambda pair: (pair[1].startswith("from"), pair[0])))

    return "\n\n".join(part for part in (block(True), block(False)) if part)
