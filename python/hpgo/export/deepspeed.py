"""DeepSpeed: a Python file with the cuts of the layer list, the batch sizes, and a PipelineModule that obeys them.

DeepSpeed balances stages itself, by parameters or by type; only a subclass can say where to cut.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import TYPE_CHECKING

from hpgo.export.grid import grid, notes
from hpgo.programs.launchers import launcher

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan

_MODULE = '''

class PlannedPipelineModule(PipelineModule):
    """Give it the layers in the profile's order: `PlannedPipelineModule(layers, topology=topology(), ...)`."""

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = PARTS
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])


def topology():
    """Ranks stage by stage."""
    return PipeDataParallelTopology(num_pp=len(PARTS) - 1, num_dp=REPLICAS)
'''


def deepspeed(plan: Plan) -> str:
    """Text of a Python module: PARTS, REPLICAS, CONFIG (for `deepspeed.initialize`) and a pipeline module.

    Raises ArgumentError if the plan is not a grid of equal replicas.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> [line for line in deepspeed(plan).splitlines() if line.startswith("PARTS")]
    ['PARTS = [0, 32, 53]']
    """
    target = launcher("deepspeed")
    _, replicas, share = grid(plan, target)
    comments = notes(plan, target)
    parts = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    config = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if plan.recompute:
        comments.append("recompute: give PlannedPipelineModule activation_checkpoint_interval=1")
    return (
        "\n".join(
            [
                *(f"# {line}" for line in comments),
                "from deepspeed.pipe import PipelineModule",
                "from deepspeed.runtime.pipe.topology import PipeDataParallelTopology",
                "",
                f"PARTS = {parts}",
                f"REPLICAS = {replicas}",
                f"CONFIG = {json.dumps(config)}",
            ]
        )
        + "\n"
        + _MODULE
    )
