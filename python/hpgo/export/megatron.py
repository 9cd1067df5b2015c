"""Megatron-LM: arguments for the command line, with `--pipeline-model-parallel-layout` for uneven stages.

Source: Megatron Core's user guide, "Custom Pipeline Model Parallel Layout": E embeds, t is a transformer layer, L
computes the loss, and | ends a stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.export.grid import block_counts, grid, notes
from hpgo.programs.launchers import launcher

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan


def megatron(plan: Plan) -> str:
    """The arguments, one a line, under comments; `$(grep -v '^#' FILE)` passes them on.

    Raises ArgumentError if the plan is not a grid of equal replicas, or the model not a row of blocks.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> print(megatron(plan).splitlines()[-1])
    --pipeline-model-parallel-layout Et*28|t*20L
    """
    target = launcher("megatron")
    stages, _, share = grid(plan, target)
    comments = notes(plan, target)
    counts = block_counts(plan, target)
    arguments = [
        f"--num-layers {sum(counts)}",
        f"--global-batch-size {plan.global_batch_size}",
        f"--micro-batch-size {share}",
        "--tensor-model-parallel-size 1",
        f"--pipeline-model-parallel-size {stages}",
    ]
    if plan.recompute:
        arguments += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if stages > 1:
        # No quotes: nothing here is special to a shell that substitutes a command.
        layout = "|".join(f"t*{count}" if count else "" for count in counts)
        arguments.append(f"--pipeline-model-parallel-layout E{layout}L")
    return "\n".join([*(f"# {line}" for line in comments), *arguments]) + "\n"
