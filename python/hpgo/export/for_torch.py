"""torch.distributed.pipelining: a Python module that builds the schedule from the orders, and the orders as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python
from hpgo.export.jobs import Job

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target

_ORDER = "order.csv"

_HEAD = '''"""A plan for torch.distributed.pipelining. In each process, once its process group is there:

    mesh = planned_mesh("cuda")
    modules = {stage: build(LAYERS[stage]) for stage in my_stages(mesh)}
    optimizer = planned_optimizer(modules, torch.optim.AdamW, mesh, lr=1e-4)
    schedule = planned_schedule(modules, summed_loss, mesh, device)
    ...
    rows = my_rows(mesh)
    schedule.step(*[inputs[rows]] * first(mesh), target=targets[rows] if last(mesh) else None)
    sum_gradients(modules, mesh)
    optimizer.step()

A module takes what PASSED_ON names of the stage before it, as arguments in that order, and returns what it names of its
own stage. `summed_loss(output, target)` is the sum over samples: it is divided by the global batch here, so gradients
are those of the mean over the whole batch.
"""
'''

_CODE = '''

def planned_mesh(device_type):
    """Ranks of the pipeline by replicas: rank r is replica r % REPLICAS of pipeline rank r // REPLICAS."""
    return init_device_mesh(device_type, (max(RANK_OF_STAGE) + 1, REPLICAS), mesh_dim_names=("pipeline", "data"))


def my_stages(mesh):
    """Stages of this process."""
    rank = mesh["pipeline"].get_local_rank()
    return [stage for stage, holder in enumerate(RANK_OF_STAGE) if holder == rank]


def first(mesh):
    """Whether this process reads inputs."""
    return 0 in my_stages(mesh)


def last(mesh):
    """Whether this process computes the loss."""
    return len(LAYERS) - 1 in my_stages(mesh)


def my_rows(mesh):
    """Its samples of a global batch, micro-batch by micro-batch."""
    begin = mesh["data"].get_local_rank() * SHARE
    size = GLOBAL_BATCH_SIZE // MICRO_BATCHES
    return [m * size + begin + row for m in range(MICRO_BATCHES) for row in range(SHARE)]


def planned_schedule(modules, summed_loss, mesh, device):
    """A schedule of PyTorch's that runs the orders in ORDER. `modules` are those of this process, by stage."""
    if sorted(modules) != my_stages(mesh):
        raise ValueError(f"this process runs stages {my_stages(mesh)}, but modules are given for {sorted(modules)}")
    if RECOMPUTE:
        modules = {stage: Recomputed(module) for stage, module in modules.items()}
    group = mesh["pipeline"].get_group()
    stages = [PipelineStage(module, stage, len(LAYERS), device, group=group) for stage, module in modules.items()]
    schedule = _PipelineScheduleRuntime(
        stages,
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda output, target: summed_loss(output, target) / GLOBAL_BATCH_SIZE,
        scale_grads=False,
    )
    schedule._load_csv(str(ORDER))
    return schedule


def sum_gradients(modules, mesh):
    """Adds up gradients over replicas, after each step of the schedule."""
    if REPLICAS > 1:
        for module in modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad, group=mesh["data"].get_group())


def planned_optimizer(modules, kind, mesh, **options):
    """An optimizer of this kind for this process; replicas share its state if the plan says so (ZeRO stage 1)."""
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    if SHARD_OPTIMIZER:
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=kind, process_group=mesh["data"].get_group(), **options
        )
    return kind(parameters, **options)


class Recomputed(torch.nn.Module):
    """Keeps its inputs only, and computes the rest again in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return checkpoint(self.module, *inputs, use_reentrant=False)
'''


def module(given: object, target: Target, place: Place) -> dict[str, str]:
    """LAYERS, the sizes, and functions that build mesh, schedule and optimizer."""
    job = Job.of(given, target, place)
    program = job.program
    passed_on = [[one.layer for one in stage.crossings] for stage in program.stages]
    lines = [
        *(f"# {line}" for line in job.header()),
        "",
        "from pathlib import Path",
        "",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.optim import ZeroRedundancyOptimizer",
        "from torch.distributed.pipelining import PipelineStage",
        "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime",
        "from torch.utils.checkpoint import checkpoint",
        "",
        f"ORDER = Path(__file__).resolve().with_name({in_python(place.name(_ORDER))})",
        "LAYERS = [",
        *(f"    {in_python(list(layers))}," for layers in job.layers),
        "]",
        "PASSED_ON = [",
        *(f"    {in_python(names)}," for names in passed_on),
        "]",
        f"RANK_OF_STAGE = {in_python(list(program.schedule.rank_of_stage))}",
        f"REPLICAS = {job.replicas}",
        f"SHARE = {job.share}",
        f"MICRO_BATCHES = {program.micro_batches}",
        f"GLOBAL_BATCH_SIZE = {program.global_batch_size}",
        f"RECOMPUTE = {program.recompute}",
        f"SHARD_OPTIMIZER = {program.shard_optimizer and job.replicas > 1}",
    ]
    text = f"{_HEAD}\n" + "\n".join(lines) + "\n" + _CODE
    order = {place.name(_ORDER): program.schedule.to_text()}
    return {place.main or "planned.py": text} | order | job.beside()
