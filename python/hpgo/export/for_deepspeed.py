"""Export to DeepSpeed: a Python module with the cuts of the layer list, the batch sizes and a PipelineModule.

DeepSpeed balances stages itself, by parameters or by type. Only a subclass can set the cuts.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python
from hpgo.export import precision
from hpgo.export.jobs import ExportJob

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target

IMPORTS = (
    "from deepspeed.pipe import PipelineModule",
    "from deepspeed.runtime.activation_checkpointing import checkpointing",
    "from deepspeed.runtime.pipe.topology import PipeDataParallelTopology",
)
"""Import statements that MODULE needs."""
MODULE = '''

class PlannedPipelineModule(PipelineModule):
    """Give it the layers in the order of LAYERS: `PlannedPipelineModule(layers, loss_fn=mean_loss)`.

    `loss_fn(output, labels)` is the mean over the samples of a micro-batch, never their sum: DeepSpeed divides
    gradients by the number of micro-batches and of replicas.
    """

    def __init__(self, layers, *, topology=None, activation_checkpoint_interval=CHECKPOINT_INTERVAL,
                 activation_checkpoint_func=checkpointing.non_reentrant_checkpoint, **options):
        layers = list(layers)
        if len(layers) != PARTS[-1]:
            raise ValueError(f"the plan is for {PARTS[-1]} layers, but {len(layers)} are given")
        super().__init__(layers, topology=topology or planned_topology(),
                         activation_checkpoint_interval=activation_checkpoint_interval,
                         activation_checkpoint_func=activation_checkpoint_func, **options)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


def planned_topology():
    """Return the topology of the plan: ranks are ordered stage by stage."""
    return PipeDataParallelTopology(num_pp=len(PARTS) - 1, num_dp=REPLICAS)
'''
"""Code of the module, which follows PARTS, REPLICAS and CHECKPOINT_INTERVAL."""


def module(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a module with LAYERS, PARTS, REPLICAS, CONFIG (for `deepspeed.initialize`) and the pipeline module."""
    job = ExportJob.of(given, target, place)
    config = {
        "train_batch_size": job.program.global_batch_size,
        "train_micro_batch_size_per_gpu": job.samples_per_replica,
        "gradient_accumulation_steps": job.program.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1 if job.program.shard_optimizer and job.replicas > 1 else 0},
        **precision.deepspeed(job),
    }
    # The plan's memory counts the input of each stage only, so all layers of a stage are one checkpoint.
    interval = max(map(len, job.layers)) if job.program.recompute else 0
    notes = ["gradients are clipped at norm 1, DeepSpeed's default: set it to 0 in CONFIG to turn that off"]
    boundary_tensors = [[one.layer for one in stage.boundary_tensors] for stage in job.program.stages[:-1]]
    if any(len(names) > 1 for names in boundary_tensors):
        notes.append("several tensors cross a cut: layers pass on tuples of the tensors in PASSED_ON, in this order")
    lines = [
        '"""A plan for DeepSpeed: pass CONFIG to `deepspeed.initialize`, and a PlannedPipelineModule as its model."""',
        "",
        *(f"# {line}" for line in job.header(*notes)),
        "",
        *IMPORTS,
        "",
        "LAYERS = [",
        *(f"    {in_python(layer)}," for layers in job.layers for layer in layers),
        "]",
        f"PARTS = {in_python([0, *accumulate(map(len, job.layers))])}",
        "PASSED_ON = [",
        *(f"    {in_python(names)}," for names in boundary_tensors),
        "]",
        f"REPLICAS = {job.replicas}",
        f"CHECKPOINT_INTERVAL = {interval}",
        f"CONFIG = {in_python(config)}",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n" + MODULE} | job.beside()
