"""Export to torch.distributed.pipelining: a Python module that builds the schedule, and its action lists as a file.

PyTorch's schedule classes build their own action lists. The module uses their common runtime class instead, which
runs any action lists from a CSV file, so a plan's schedule runs exactly as it was simulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python
from hpgo.export import precision
from hpgo.export.jobs import ExportJob

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target

_ORDER = "order.csv"

_HEAD = '''"""A plan for torch.distributed.pipelining. In each process, once its process group is there:

    mesh = planned_mesh("cuda")
    modules = {stage: build(LAYERS[stage]) for stage in my_stages(mesh)}
    optimizer = planned_optimizer(modules, torch.optim.AdamW, mesh, lr=1e-4)
    schedule = planned_schedule(modules, loss, mesh, device)
    ...
    rows = my_rows(mesh)
    schedule.step(*[inputs[rows]] * first(mesh), target=targets[rows] if last(mesh) else None)
    sum_gradients(modules, mesh)
    optimizer.step()

A module takes the tensors that PASSED_ON lists for the stage before it, as arguments in that order, and returns the
tensors that it lists for its own stage. `loss(output, target)` is the mean or the sum over the samples of a
micro-batch. The first micro-batch shows which of the two. Gradients are of the mean over the whole batch.
"""
'''

_CODE = '''

def planned_mesh(device_type):
    """Return the mesh of pipeline ranks and replicas: rank r is replica r % REPLICAS of pipeline rank r // REPLICAS."""
    return init_device_mesh(device_type, (max(RANK_OF_STAGE) + 1, REPLICAS), mesh_dim_names=("pipeline", "data"))


def my_stages(mesh):
    """Return the stages of this process."""
    rank = mesh["pipeline"].get_local_rank()
    return [stage for stage, holder in enumerate(RANK_OF_STAGE) if holder == rank]


def first(mesh):
    """Return whether this process reads inputs."""
    return 0 in my_stages(mesh)


def last(mesh):
    """Return whether this process computes the loss."""
    return len(LAYERS) - 1 in my_stages(mesh)


def my_rows(mesh):
    """Return this process's samples of a global batch, micro-batch by micro-batch."""
    begin = mesh["data"].get_local_rank() * SAMPLES_PER_REPLICA
    size = GLOBAL_BATCH_SIZE // MICRO_BATCHES
    return [m * size + begin + row for m in range(MICRO_BATCHES) for row in range(SAMPLES_PER_REPLICA)]


def planned_schedule(modules, loss, mesh, device):
    """Return a PyTorch schedule that runs the action lists in ORDER. `modules` are this process's modules by stage."""
    if sorted(modules) != my_stages(mesh):
        raise ValueError(f"this process runs stages {my_stages(mesh)}, but modules are given for {sorted(modules)}")
    modules = {stage: Recomputed(module) if RECOMPUTE[stage] else module for stage, module in modules.items()}
    group = mesh["pipeline"].get_group()
    stages = [PipelineStage(module, stage, len(LAYERS), device, group=group) for stage, module in modules.items()]
    schedule = _PipelineScheduleRuntime(
        stages,
        n_microbatches=MICRO_BATCHES,
        loss_fn=ShareOfMean(loss),
        scale_grads=False,
    )
    schedule._load_csv(str(ORDER))
    return schedule


class ShareOfMean:
    """Contribution of a micro-batch to the mean loss over the global batch, for a `loss` that is a mean or a sum."""

    def __init__(self, loss):
        self.loss = loss
        self.factor = 1 / GLOBAL_BATCH_SIZE  # with one sample, its mean is its sum
        # Two, because PyTorch first tries the loss on uninitialized memory.
        self.checks = 2 if SAMPLES_PER_REPLICA > 1 else 0

    def __call__(self, output, target):
        if self.checks:
            self.check(output, target)
        return self.loss(output, target) * self.factor

    def check(self, output, target):
        """Compare the loss of a micro-batch with the losses of its samples."""
        with torch.no_grad():
            whole = self.loss(output, target)
            each = [float(self.loss(*pair)) for pair in zip(samples(output), samples(target))]
        if not all(map(math.isfinite, [float(whole), *each])):
            return
        total, largest = sum(each), max(map(abs, each))
        near = (0.01 if whole.element_size() < 4 else 1e-4) * largest
        is_mean = abs(float(whole) - total / SAMPLES_PER_REPLICA) <= near
        is_sum = abs(float(whole) - total) <= near * SAMPLES_PER_REPLICA
        if not is_mean and not is_sum:
            raise ValueError(
                f"the loss of {SAMPLES_PER_REPLICA} samples is {float(whole):.6g}, but it must be the mean or the"
                f" sum of their single losses {each}, or gradients of the whole batch would be wrong"
            )
        if is_mean != is_sum:  # losses that add up to 0 show neither
            self.factor = SAMPLES_PER_REPLICA / GLOBAL_BATCH_SIZE if is_mean else 1 / GLOBAL_BATCH_SIZE
            self.checks -= 1


def samples(value):
    """Return the samples of a micro-batch, each as a batch of one."""
    if isinstance(value, (tuple, list)):
        return list(zip(*map(samples, value)))
    parts = value.chunk(SAMPLES_PER_REPLICA)
    if len(parts) != SAMPLES_PER_REPLICA:
        raise ValueError(f"a micro-batch has {SAMPLES_PER_REPLICA} samples, but the loss got {len(value)} rows")
    return parts


def sum_gradients(modules, mesh):
    """Sum gradients over replicas. Call it after each step of the schedule."""
    if REPLICAS > 1:
        for module in modules.values():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad, group=mesh["data"].get_group())


def planned_optimizer(modules, kind, mesh, **options):
    """Return an optimizer of this kind for this process. Replicas shard its state if the plan does (ZeRO stage 1)."""
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    for parameter in parameters if WEIGHTS else ():
        if parameter.dtype != getattr(torch, WEIGHTS):
            raise ValueError(f"memory is planned for weights in {WEIGHTS}, but some are in {parameter.dtype}")
        parameter.grad_dtype = getattr(torch, GRADIENTS)
    is_theirs = getattr(kind, "__module__", "").startswith("torch.optim")
    if OPTIMIZER and is_theirs and (kind is torch.optim.SGD) != OPTIMIZER.startswith("sgd"):
        raise ValueError(f"memory is planned for {OPTIMIZER}, not for {kind.__name__}")
    if OPTIMIZER == "sgd" and options.get("momentum"):
        raise ValueError("memory is planned for SGD without a momentum")
    if WEIGHTS == "bfloat16" and is_theirs:
        raise ValueError(
            f"memory is planned for an optimizer that keeps its state and a copy of the weights in float32, and"
            f" {kind.__name__} does not: give one that does, or plan with `--optimizer adam-fp32`"
        )
    if SHARD_OPTIMIZER:
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=kind, process_group=mesh["data"].get_group(), **options
        )
    return kind(parameters, **options)


class Recomputed(torch.nn.Module):
    """A module that keeps its inputs only and recomputes the rest in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return checkpoint(self.module, *inputs, use_reentrant=False)
'''


def module(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a module with LAYERS, the sizes, and functions that build mesh, schedule and optimizer."""
    job = ExportJob.of(given, target, place)
    program = job.program
    passed_on = [[one.layer for one in stage.boundary_tensors] for stage in program.stages]
    # The module checks types and optimizer when it runs, because PyTorch has no configuration that could set them.
    weights, gradients = precision.widths(job) or (None, None)
    lines = [
        *(f"# {line}" for line in job.header()),
        "",
        "import math",
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
        f"SAMPLES_PER_REPLICA = {job.samples_per_replica}",
        f"MICRO_BATCHES = {program.micro_batches}",
        f"GLOBAL_BATCH_SIZE = {program.global_batch_size}",
        f"RECOMPUTE = {[stage.recompute for stage in program.stages]}",
        f"OPTIMIZER = {in_python(job.optimizer)}",
        f"WEIGHTS = {in_python(weights)}",
        f"GRADIENTS = {in_python(gradients)}",
        f"SHARD_OPTIMIZER = {program.shard_optimizer and job.replicas > 1}",
    ]
    text = f"{_HEAD}\n" + "\n".join(lines) + "\n" + _CODE
    order = {place.name(_ORDER): program.schedule.to_text()}
    return {place.main or "planned.py": text} | order | job.beside()
