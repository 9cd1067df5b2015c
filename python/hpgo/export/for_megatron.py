"""Export to Megatron-LM: the layout of stages and the settings that all frameworks on Megatron Core share.

Source: Megatron Core's user guide, "Custom Pipeline Model Parallel Layout": E embeds, t is a transformer layer, L
computes the loss, and | ends a stage; stage s is on rank s mod p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.export import precision
from hpgo.export.jobs import ExportJob, group_size
from hpgo.llm.pipeline_layout import layout_text
from hpgo.programs.recomputation import group_of

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target


_NAMES = {"microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage"}
"""Options of the command line whose name differs from the setting."""


def arguments(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return the arguments of the command line, one per line and quoted for a shell, after comments."""
    job = ExportJob.of(given, target, place)
    items = (settings(job) | precision.megatron(job)).items()
    # Megatron-LM's flags default to off and have no negative form, so a false setting is left out.
    words = [f"--{_NAMES.get(key, key).replace('_', '-')}{_value(value)}" for key, value in items if value is not False]
    comments = job.header(
        "pass them on: grep -v '^#' FILE | xargs torchrun ... pretrain_gpt.py ...",
        CLIPPING.format("--clip-grad"),
    )
    text = "\n".join([*(f"# {line}" for line in comments), *words]) + "\n"
    return {place.main or "arguments.txt": text} | job.beside()


CLIPPING = "gradients are clipped at norm 1 unless {} changes that; the estimate leaves clipping out"


def settings(job: ExportJob) -> dict[str, int | str | bool]:
    """Return settings of Megatron Core by their names. Raise ArgumentError for a plan that it can't run."""
    counts = job.block_counts
    chosen: dict[str, int | str | bool] = {
        "num_layers": sum(counts),
        "global_batch_size": job.program.global_batch_size,
        "micro_batch_size": job.samples_per_replica,
        "tensor_model_parallel_size": job.gpus_per_device,
        "pipeline_model_parallel_size": job.ranks,
    }
    if job.program.recompute:
        job.check_recomputation()
        group = group_of(job.framework, counts) or counts[0]
        chosen |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": group}
    if job.replicas > 1:
        shared = job.program.shard_optimizer
        # Without overlap_param_gather, all weights are gathered before the next step begins, and nothing hides that.
        chosen |= {
            "use_distributed_optimizer": shared,
            "overlap_grad_reduce": job.overlap,
            "overlap_param_gather": shared and job.overlap,
        }
    if job.ranks > 1:
        chosen["pipeline_model_parallel_layout"] = layout_text(counts)
        if job.virtual_stages_per_rank > 1 and (group := group_size(job.program.schedule)) != job.ranks:
            chosen["microbatch_group_size_per_vp_stage"] = group
    return chosen


def _value(value: float | str | bool) -> str:
    return "" if value is True else f" {in_shell(str(value))}"
