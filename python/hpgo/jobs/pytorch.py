"""Job folders for torch.distributed.pipelining: a training script whose stages, loss and data the user writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.quoting import filled, in_python
from hpgo.export.targets import Place
from hpgo.jobs.parts import SMOKE_STEPS, JobFile, JobParts
from hpgo.jobs.torchtitan import ALLOCATOR, DATASET, SAVE, holds_of
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from hpgo.export.targets import Target
    from hpgo.planning.plans import Plan

_TRAIN = '''\
"""Train the planned model with torch.distributed.pipelining: write `build`, `loss` and `batches`.

Each rank runs this with the environment variables of torchrun.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from planned import (
    GLOBAL_BATCH_SIZE,
    LAYERS,
    first,
    last,
    my_rows,
    my_stages,
    planned_mesh,
    planned_optimizer,
    planned_schedule,
    sum_gradients,
)

OPTIONS = __OPTIONS__


def build(names):
    """Return the module of a stage with these layers. PASSED_ON in planned.py lists the tensors between stages."""
    raise NotImplementedError(f"write build(names) in train.py: the module of the layers {names[0]!r} to {names[-1]!r}")


def loss(output, target):
    """Return the mean or the sum of the loss over the samples of a micro-batch."""
    raise NotImplementedError("write loss(output, target) in train.py")


def batches(options):
    """Yield pairs of inputs and targets, with GLOBAL_BATCH_SIZE samples each; synthetic ones with `options.smoke`."""
    raise NotImplementedError(f"write batches(options) in train.py: {GLOBAL_BATCH_SIZE} samples each")


def optimizer():
    """Return the class of the optimizer, which OPTIONS are for."""
    __OPTIMIZER__


def words():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--smoke", action="store_true", help="train on synthetic data, and save nothing")
    parser.add_argument("--dataset", help="data that `batches` reads")
    parser.add_argument("--save", type=Path, help="folder for the weights of each stage")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between two checkpoints")
    return parser.parse_args()


def main():
    """Train, and print the time of each step."""
    options = words()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    torch.distributed.init_process_group()
    mesh = planned_mesh(device.type)
    # Replicas of a stage begin with the same weights.
    torch.manual_seed(mesh["pipeline"].get_local_rank())
    modules = {stage: build(LAYERS[stage]).to(device) for stage in my_stages(mesh)}
    adapts = planned_optimizer(modules, optimizer(), mesh, **OPTIONS)
    schedule = planned_schedule(modules, loss, mesh, device)
    data, rows = iter(batches(options)), my_rows(mesh)
    for step in range(1, options.steps + 1):
        began_s = time.perf_counter()
        inputs, targets = (tensor[rows].to(device) for tensor in next(data))
        losses = []
        schedule.step(*[inputs] * first(mesh), target=targets if last(mesh) else None, losses=losses)
        sum_gradients(modules, mesh)
        adapts.step()
        adapts.zero_grad()
        if last(mesh) and mesh["data"].get_local_rank() == 0:
            # Losses of micro-batches are shares of the mean over the global batch.
            part = float(sum(losses)) * mesh["data"].size()
            print(f"step {step} of {options.steps}: loss {part:.4f}, {time.perf_counter() - began_s:.4f} s", flush=True)
        if options.save and not options.smoke and step % options.save_interval == 0:
            save(options.save, step, modules, mesh)
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
        print(f"rank {torch.distributed.get_rank()}: peak memory {peak_bytes / 1e9:.2f} GB", flush=True)
    torch.distributed.destroy_process_group()


def save(folder, step, modules, mesh):
    """Save the weights of the stages of this rank; the first replica does."""
    if mesh["data"].get_local_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for stage, module in modules.items():
            torch.save(module.state_dict(), folder / f"stage-{stage}-step-{step}.pt")


if __name__ == "__main__":
    main()
'''
# On the meta device stages have no memory, so the largest model is built on a login node, too.
_CHECK = '''\
"""Build each stage on the meta device, and a batch, without a GPU: check_config.py RANKS WORDS…"""

import sys

ranks = int(sys.argv.pop(1))

import torch
import train
from planned import GLOBAL_BATCH_SIZE, LAYERS, RANK_OF_STAGE, REPLICAS

if ranks != (max(RANK_OF_STAGE) + 1) * REPLICAS:
    sys.exit(f"error: the plan has {max(RANK_OF_STAGE) + 1} pipeline ranks x {REPLICAS} replicas, not {ranks} ranks")
try:
    with torch.device("meta"):
        for names in LAYERS:
            made = train.build(names)
            if not isinstance(made, torch.nn.Module):
                sys.exit(f"error: build({names!r}) in train.py is {made!r}, but it must be a torch.nn.Module")
    train.optimizer()
    for tensor in next(iter(train.batches(train.words()))):
        if len(tensor) != GLOBAL_BATCH_SIZE:
            sys.exit(f"error: batches in train.py has {len(tensor)} samples, but the plan is for {GLOBAL_BATCH_SIZE}")
except NotImplementedError as error:
    sys.exit(f"error: {error}")
'''
_DATA = """\
# Data, weights and steps. Change them here; env.sh sets the variables. train.py has the options of the optimizer.
--dataset "$DATASET_PATH"
--save "$SAVE"
--save-interval 1000
--steps 10000
"""
_SMOKE = """\
# {steps} steps with synthetic data.
--smoke
--steps {steps}
"""
_OWN = 'raise NotImplementedError("name an optimizer in train.py that keeps its state and the weights in float32")'


def parts(plan: Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for torch.distributed.pipelining. Raises the errors of the export."""
    (main, text), *others = target.write(plan, Place()).items()
    name = plan.assumed.memory.optimizer
    options: dict[str, float] = {"lr": 3e-4, "weight_decay": 0.1}
    chosen = "return torch.optim.AdamW"
    if name is not None and name.startswith("sgd"):
        options = {"lr": 1e-2} | ({"momentum": 0.9} if name == "sgd-momentum" else {})
        chosen = "return torch.optim.SGD"
    elif name is not None and OPTIMIZERS[name].weights < OPTIMIZERS["adam-fp32"].weights:
        # Optimizers of torch.optim keep no 32-bit copy of 16-bit weights, so planned.py refuses them.
        chosen = _OWN
    train = filled(_TRAIN, {"OPTIONS": in_python(options), "OPTIMIZER": chosen})
    return JobParts(
        title=f"PyTorch {target.version}",
        command=("python3", "train.py"),
        data=_DATA,
        smoke=_SMOKE.format(steps=SMOKE_STEPS),
        files=(
            JobFile(name=main, text=text, holds="the plan: layers of each stage, mesh, schedule and optimizer"),
            *(JobFile(name=other, text=more, holds=holds_of(other)) for other, more in others),
            JobFile(name="train.py", text=train, holds="trains the plan's stages, once its functions are written"),
            JobFile(name="check_config.py", text=_CHECK, holds="builds the stages and a batch without GPUs"),
        ),
        placeholders=(replace(DATASET, meaning="data that batches() in train.py reads"), SAVE),
        environment=(ALLOCATOR,),
        check=('python3 check_config.py "$RANKS" "${arguments[@]}" > /dev/null',),
        needs="torch",
        rate_in="train.py",
        step_line="step [0-9]+ of",
        # Devices are in the order of ranks.
        step_rank=min(plan.stages[-1].devices),
        requirements=("torch==2.15.0",),
        notes=(
            "train.py has functions to write: `build`, `loss` and `batches`. check.sh builds all stages with them.",
        ),
    )
