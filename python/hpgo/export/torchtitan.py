"""torchtitan: the part of a job's TOML file that says how to parallelise."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.export.grid import block_counts, grid, notes
from hpgo.programs.launchers import launcher

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan

_SCHEDULES = {"1f1b": "1F1B", "eager_1f1b": "1F1B", "gpipe": "GPipe"}


def torchtitan(plan: Plan) -> str:
    """Sections `training`, `parallelism` and `activation_checkpoint`, to merge into the model's own.

    Modules are named as in torchtitan's Llama: `tok_embeddings`, `layers.0` and so on, `norm`, `output`.

    Raises ArgumentError if the plan is not a grid of equal replicas, or the model not a row of blocks.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> [line for line in torchtitan(plan).splitlines() if "degree" in line]
    ['pipeline_parallel_degree = 2', 'data_parallel_replicate_degree = 8', 'data_parallel_shard_degree = 1']
    """
    target = launcher("torchtitan@0.2")
    stages, replicas, share = grid(plan, target)
    comments = notes(plan, target)
    if plan.schedule not in _SCHEDULES:
        raise ArgumentError(f"no order file is written for `{plan.schedule}`", "plan with `--schedule 1f1b`")
    lines = [
        *(f"# {line}" for line in comments),
        "[training]",
        f"global_batch_size = {plan.global_batch_size}",
        f"local_batch_size = {plan.global_batch_size // replicas}",
        "",
        "[parallelism]",
        f"pipeline_parallel_degree = {stages}",
        f"data_parallel_replicate_degree = {replicas}",
        "data_parallel_shard_degree = 1",
    ]
    if stages > 1:
        lines += [
            f'pipeline_parallel_schedule = "{_SCHEDULES[plan.schedule]}"',
            f"pipeline_parallel_microbatch_size = {share}",
            "module_fqns_per_model_part = [",
            *(f"  {json.dumps(part)}," for part in _parts(plan)),
            "]",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{"full" if plan.recompute else "none"}"']
    return "\n".join(lines) + "\n"


def _parts(plan: Plan) -> list[list[str]]:
    counts = block_counts(plan, launcher("torchtitan@0.2"))
    parts = [
        [f"layers.{index}" for index in range(sum(counts[:at]), sum(counts[: at + 1]))] for at in range(len(counts))
    ]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts
