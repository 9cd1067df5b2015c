"""Job folders for Megatron-Bridge: the recipe, a training script, data, smoke run, and a check by its own classes.

Source: `training/config.py`, `training/pretrain.py` and `training/finetune.py` of Megatron-Bridge 0.6.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.export.llm_for_bridge import RATES, recipe, trains_on_prompts
from hpgo.export.targets import Place
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts, Placeholder, Variable

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.llm.plan import LlmPlan

_TRAIN = '''\
"""Train the plan of planned.py with Megatron-Bridge: train.py WORDS, which are in data.txt or smoke.txt.

With --check, the configuration is built and validated, without a GPU, and nothing is trained.
"""

import argparse
import os

import planned
import torch
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides


def options():
    """Return the words of the command line as values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model of Hugging Face")
    parser.add_argument("--data", help="training data; random tokens without it")
    parser.add_argument("--tokenizer", help="tokenizer of Hugging Face; numbers as words without it")
    parser.add_argument("--pretrained", help="weights to start from")
    parser.add_argument("--save", help="folder for checkpoints, from which a later run goes on; none without it")
    parser.add_argument("--check", action="store_true", help="validate the configuration only")
    parser.add_argument("overrides", nargs="*", help="fields of ConfigContainer: train.train_iters=5")
    return parser.parse_args()


def config_of(given):
    """Return the ConfigContainer of the plan with the values of the command line."""
    config = planned.recipe(
        given.model,
        data=given.data,
        tokenizer=given.tokenizer,
        pretrained=given.pretrained or None,
        reduce_layers=os.environ.get("JOB_RUN") == "small",
    )
    config.checkpoint.save = config.checkpoint.load = given.save
    return process_config_with_overrides(config, cli_overrides=given.overrides)


def check(config):
    """Let Megatron-Bridge validate a configuration."""
    if not torch.cuda.is_available():
        # The ranks have GPUs. Here, any kind serves that no rule refuses.
        device = argparse.Namespace(name="GPU", major=9, minor=0)
        torch.cuda.get_device_properties = lambda *_: device
        torch.cuda.get_device_capability = lambda *_: (device.major, device.minor)
    runtime_config_update(config)


def train(config):
    """Train, from the weights that the configuration names or from random ones."""
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    start = pretrain if config.checkpoint.pretrained_checkpoint is None else finetune
    start(config, forward_step)


if __name__ == "__main__":
    given = options()
    (check if given.check else train)(config_of(given))
'''
_DATA = """\
# Data, checkpoints and learning rate. Change them here; env.sh sets the variables. Words like NAME.FIELD=VALUE set
# fields of Megatron-Bridge's ConfigContainer.
--model "$HF_MODEL"
--data "$DATA_PATH"
--tokenizer "$TOKENIZER"
--pretrained "$PRETRAINED"
--save "$SAVE"
train.train_iters={steps}
train.exit_signal_handler=true
optimizer.lr={lr}
optimizer.min_lr={min_lr}
scheduler.lr_warmup_iters={warmup_steps}
validation.eval_interval=1000
validation.eval_iters=10
checkpoint.save_interval=1000
logger.log_interval=10
"""
_SMOKE = """\
# {steps} steps with random tokens.
--model "$HF_MODEL"
{pretrained}train.train_iters={steps}
scheduler.lr_warmup_iters=1
validation.eval_iters=0
logger.log_interval=1
"""


def parts(plan: LlmPlan, target: Target) -> JobParts:
    """Return the parts of a job folder for Megatron-Bridge. Raises the errors of the export."""
    (text,) = recipe(plan, target, Place()).values()
    has_adapters = plan.estimate.parallelism.lora_rank > 0
    has_prompts = trains_on_prompts(plan)
    rates = RATES[has_adapters, has_prompts]
    data = (
        Placeholder(
            name="DATA_PATH",
            meaning="folder with training.jsonl and validation.jsonl, whose lines have an input and an output",
            kind="folder",
            example="/data/my_prompts",
        )
        if has_prompts
        else Placeholder(
            name="DATA_PATH",
            meaning="prefix of the .bin and .idx files of Megatron-LM's tools/preprocess_data.py",
            kind="prefix",
            example="/data/my_text_document",
        )
    )
    pretrained = (
        Placeholder(
            name="PRETRAINED",
            meaning="folder of the frozen weights, as Hugging Face or Megatron-Bridge writes them",
            kind="folder",
            default="$HF_MODEL",
            needed="full",
        )
        if has_adapters
        else Placeholder(
            name="PRETRAINED",
            meaning="folder of weights to start from, like HF_MODEL; random weights if empty",
            kind="folder",
            needed="never",
        )
    )
    return JobParts(
        title=f"{target.title} 0.6.0",
        command=("python3", "train.py"),
        data=_DATA.format(**rates._asdict()),
        smoke=_SMOKE.format(steps=SMOKE_STEPS, pretrained='--pretrained "$PRETRAINED"\n' if has_adapters else ""),
        files=(
            JobFile(name="planned.py", text=text, holds="the plan: `recipe` builds the ConfigContainer"),
            JobFile(name="train.py", text=_TRAIN, holds="trains, or lets Megatron-Bridge check the configuration"),
        ),
        placeholders=(
            Placeholder(
                name="HF_MODEL",
                meaning="folder of the model in Hugging Face's format, with config.json",
                kind="folder",
                example="/models/llama-3-8b",
                needed="always",
            ),
            data,
            Placeholder(
                name="TOKENIZER",
                meaning="folder of a Hugging Face tokenizer, or its name on the hub",
                default="$HF_MODEL",
            ),
            pretrained,
            Placeholder(name="SAVE", meaning="folder for checkpoints", example="/checkpoints/run-1"),
        ),
        environment=(
            Variable(
                name="PYTORCH_ALLOC_CONF",
                value="expandable_segments:True",
                why="less fragmentation of GPU memory; with CUDA graphs it needs NCCL_GRAPH_REGISTER=0, too",
                # NCCL registers the buffers of graphs, whose memory such segments may move (Megatron Core,
                # `transformer/cuda_graphs.py`).
                active=plan.estimate.parallelism.cuda_graph_impl == "none",
            ),
        ),
        check=('WORLD_SIZE="$RANKS" RANK=0 LOCAL_RANK=0 python3 train.py --check "${arguments[@]}" > /dev/null',),
        needs="megatron.bridge",
        step_line="elapsed time per iteration",
        requirements=(
            "# Megatron-Bridge 0.6.0 comes from its sources, for Python 3.12, with the Megatron-LM that they contain:",
            "# git clone --recurse-submodules --branch v0.6.0 https://github.com/NVIDIA-NeMo/Megatron-Bridge",
            "# It needs a GPU and Transformer Engine, so only its configuration was tested with these files.",
        ),
        not_reduced=(
            "Megatron-Bridge loads the frozen weights of the whole model before it adds adapters."
            if has_adapters
            else ""
        ),
        notes=(
            "Megatron-Bridge prints step times on the last rank, and memory after the first step.",
            "With `train.exit_signal_handler` in `data.txt`, the job saves a checkpoint when its time is almost over.",
            "`PRETRAINED` names weights as Hugging Face writes them, such as `HF_MODEL`, or as Megatron-Bridge does.",
            "Comments at the top of `planned.py` list what the estimate leaves out.",
        ),
    )
