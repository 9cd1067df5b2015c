"""Megatron-LM and what builds on it: a layout of stages, and the arguments that say the same everywhere.

Source: Megatron Core's user guide, "Custom Pipeline Model Parallel Layout": E embeds, t is a transformer layer, L
computes the loss, and | ends a stage; stage s is on rank s mod p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.export import precision
from hpgo.export.jobs import ExportJob, group_size
from hpgo.programs.recomputation import group_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.export.targets import Place, Target


_NAMES = {"microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage"}
"""Settings that the command line calls otherwise."""


def arguments(given: object, target: Target, place: Place) -> dict[str, str]:
    """One argument a line, each quoted for a shell, under comments."""
    job = ExportJob.of(given, target, place)
    told = (settings(job) | precision.megatron(job)).items()
    words = [f"--{_NAMES.get(key, key).replace('_', '-')}{_value(value)}" for key, value in told if value is not False]
    comments = job.header(
        "pass them on: grep -v '^#' FILE | xargs torchrun ... pretrain_gpt.py ...",
        CLIPPING.format("--clip-grad"),
    )
    text = "\n".join([*(f"# {line}" for line in comments), *words]) + "\n"
    return {place.main or "arguments.txt": text} | job.beside()


CLIPPING = "gradients are clipped at norm 1 unless {} says otherwise; the plan's price leaves that out"


def settings(job: ExportJob) -> dict[str, int | str | bool]:
    """What Megatron is told, by the names of its configuration; raises ArgumentError for what it can't run."""
    counts = job.block_counts
    chosen: dict[str, int | str | bool] = {
        "num_layers": sum(counts),
        "global_batch_size": job.program.global_batch_size,
        "micro_batch_size": job.share,
        "tensor_model_parallel_size": job.gpus_per_device,
        "pipeline_model_parallel_size": job.ranks,
    }
    if job.program.recompute:
        job.check_recomputation()
        group = group_of(job.framework, counts) or counts[0]
        chosen |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": group}
    if job.replicas > 1:
        shared = job.program.shard_optimizer
        # Without the last one, weights would be gathered before the next step begins.
        chosen |= {
            "use_distributed_optimizer": shared,
            "overlap_grad_reduce": job.overlap,
            "overlap_param_gather": shared and job.overlap,
        }
    if job.ranks > 1:
        chosen["pipeline_model_parallel_layout"] = layout(counts)
        if job.chunks > 1 and (group := group_size(job.program.schedule)) != job.ranks:
            chosen["microbatch_group_size_per_vp_stage"] = group
    return chosen


def layout(counts: Sequence[int], further: int = 0) -> str:
    """Stages with so many blocks each, in Megatron's words; the last one has those that predict `further` tokens.

    >>> layout([3, 0, 4]), layout([3, 0], further=1)
    ('Et*3||t*4L', 'Et*3|mL')
    """
    return f"E{'|'.join(f't*{count}' if count else '' for count in counts)}{'m' * further}L"


def _value(value: float | str | bool) -> str:
    return "" if value is True else f" {in_shell(str(value))}"
