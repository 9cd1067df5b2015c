"""The precision and the optimizer that a plan's memory was priced with, as settings of each framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.planning.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.export.jobs import Job
    from hpgo.planning.optimizers import OptimizerName

MEGATRON: Mapping[OptimizerName, Mapping[str, bool | float | str]] = {
    "adam-fp32": {},
    "adam-bf16": {"bf16": True, "grad_reduce_in_bf16": True},
    "adam-bf16-fp32-gradients": {"bf16": True, "accumulate_allreduce_grads_in_fp32": True},
    # Its momentum is 0.9 unless told otherwise.
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "sgd-momentum": {"optimizer": "sgd"},
}
"""Names of its configuration. Source: `megatron/training/arguments.py`, 0.16.1 to 0.19."""
TORCHTITAN: Mapping[OptimizerName, str] = {"adam-fp32": "float32", "adam-bf16-fp32-gradients": "bfloat16"}
"""Values of `training.mixed_precision_param`. Its optimizers are Adam's, and FSDP sums gradients in fp32."""
DEEPSPEED: Mapping[OptimizerName, Mapping[str, object]] = {
    "adam-fp32": {},
    "adam-bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "adam-bf16-fp32-gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "sgd": {},
    "sgd-momentum": {},
}
"""Blocks of its configuration; the optimizer itself is the user's argument of `deepspeed.initialize`."""


def megatron(job: Job) -> dict[str, bool | float | str]:
    """Return the settings for a plan's precision and optimizer; nothing if no optimizer was priced.

    Raises ArgumentError for SGD whose state replicas share, which Megatron-LM does not run.
    """
    if (name := job.optimizer) is None:
        return {}
    if name.startswith("sgd") and job.replicas > 1 and job.program.shard_optimizer:
        raise ArgumentError(
            f"{job.launcher.title} shares the state of Adam alone between replicas, and the plan was priced for {name}",
            "plan without `--shard-optimizer`, or with `--optimizer adam-bf16-fp32-gradients`",
        )
    return dict(MEGATRON[name])


def torchtitan(job: Job) -> str | None:
    """Return the value of `training.mixed_precision_param`; None if no optimizer was priced.

    Raises ArgumentError for an optimizer, or sums of gradients, that torchtitan does not have.
    """
    if (name := job.optimizer) is None:
        return None
    if name not in TORCHTITAN:
        why = "sums gradients in fp32" if name.startswith("adam") else "has no SGD"
        raise ArgumentError(
            f"{job.launcher.title} {why}, and the plan was priced for {name}",
            f"plan with `--optimizer {' or '.join(TORCHTITAN)}`",
        )
    return TORCHTITAN[name]


def deepspeed(job: Job) -> dict[str, object]:
    """Return the blocks of the configuration for a plan's precision; nothing if no optimizer was priced."""
    return {} if job.optimizer is None else dict(DEEPSPEED[job.optimizer])


def note(job: Job) -> str | None:
    """Return a comment on what memory was priced for; None for a program, which has no price of memory."""
    if job.plan is None:
        return None
    if (name := job.optimizer) is None:
        memory = job.plan.assumed.memory
        return (
            f"memory is priced with gradients of {memory.gradients_per_weight:g} and optimizer state of"
            f" {memory.optimizer_per_weight:g} times the weights: choose precision and optimizer to match"
        )
    each = OPTIMIZERS[name].bytes_text
    return f"memory is priced for {name}: {each} bytes per parameter (weights, gradients, optimizer state)"
