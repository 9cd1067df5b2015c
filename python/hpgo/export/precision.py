"""The precision and the optimizer that a plan's memory was priced with, as settings of each framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.errors import ArgumentError
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.export.jobs import ExportJob
    from hpgo.programs.optimizers import OptimizerName

MEGATRON: Mapping[OptimizerName, Mapping[str, bool | float | str]] = {
    "adam-fp32": {},
    "adam-bf16": {"bf16": True, "grad_reduce_in_bf16": True},
    "adam-bf16-fp32-gradients": {"bf16": True, "accumulate_allreduce_grads_in_fp32": True},
    # Its momentum is 0.9 unless told otherwise.
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "sgd-momentum": {"optimizer": "sgd"},
}
"""Names of its configuration. Source: `megatron/training/arguments.py`, 0.16.1 to 0.19."""
DEEPSPEED: Mapping[OptimizerName, Mapping[str, object]] = {
    "adam-fp32": {},
    "adam-bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "adam-bf16-fp32-gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "sgd": {"zero_allow_untested_optimizer": True},
    "sgd-momentum": {"zero_allow_untested_optimizer": True},
}
"""Blocks of its configuration; the optimizer itself is the user's argument of `deepspeed.initialize`."""


def widths(job: ExportJob) -> tuple[str, str] | None:
    """Return PyTorch's names for the types of weights and gradients; None if no optimizer was priced."""
    if (name := job.optimizer) is None:
        return None
    names = {2: "bfloat16", 4: "float32"}
    return names[OPTIMIZERS[name].weights], names[OPTIMIZERS[name].gradients]


def megatron(job: ExportJob) -> dict[str, bool | float | str]:
    """Return the settings for a plan's precision and optimizer; nothing if no optimizer was priced."""
    return {} if job.optimizer is None else dict(MEGATRON[job.optimizer])


def optimizer(job: ExportJob) -> dict[str, Any]:
    """Return the name of Megatron Core's optimizer and its momentum; nothing if no optimizer was priced."""
    if job.optimizer is None:
        return {}
    chosen = megatron(job)
    named = {"optimizer": chosen.get("optimizer", "adam")}
    return named | {key: value for key, value in chosen.items() if key == "sgd_momentum"}


def verl(job: ExportJob) -> dict[str, str | bool]:
    """Return `dtype`, and `grad_reduce_in_fp32`; nothing if no optimizer was priced.

    Raises ArgumentError for weights in 32 bits, which verl's Megatron engine refuses
    (`McoreEngineConfig.__post_init__` in `verl/workers/config/engine.py`, 0.9.1).
    """
    if (kept := widths(job)) is None:
        return {}
    weights, gradients = kept
    if weights == "float32":
        raise ArgumentError(
            f"{job.target.title} keeps weights in 16 bits, and the plan was priced for {job.optimizer}",
            "plan with `--optimizer adam-bf16-fp32-gradients`, or `adam-bf16`",
            code="unsupported",
        )
    return {"dtype": weights, "grad_reduce_in_fp32": gradients == "float32"}


def swift(job: ExportJob) -> dict[str, str | bool]:
    """Return ms-swift's arguments for the precision; nothing if no optimizer was priced.

    It sums gradients in fp32 unless `main_grads_dtype` is bf16, which Megatron Core takes with its precision-aware
    optimizer alone, and that one needs the distributed optimizer (`_map_dtype` in
    `swift/megatron/arguments/megatron_args.py`, 4.5.2; `megatron/core/optimizer/optimizer_config.py`, 0.16.1).

    Raises ArgumentError for 16-bit gradients without a shared optimizer state.
    """
    if (kept := widths(job)) is None:
        return {}
    weights, gradients = kept
    told: dict[str, str | bool] = {"torch_dtype": weights, "bf16": weights == "bfloat16", "fp16": False}
    if gradients == "bfloat16":
        if not job.program.shard_optimizer:
            raise ArgumentError(
                f"{job.target.title} sums gradients in 16 bits with a shared optimizer state alone, and the plan was"
                f" priced for {job.optimizer} without",
                "plan with `--shard-optimizer`, or with `--optimizer adam-bf16-fp32-gradients`",
                code="unsupported",
            )
        told |= {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
    return told


def torchtitan(job: ExportJob) -> str | None:
    """Return the value of `training.mixed_precision_param`; None if no optimizer was priced."""
    return None if (kept := widths(job)) is None else kept[0]


def deepspeed(job: ExportJob) -> dict[str, object]:
    """Return the blocks of the configuration for a plan's precision; nothing if no optimizer was priced.

    Source: `DeepSpeedEngine._do_optimizer_sanity_check` of 0.19.8, which takes 32-bit gradients of 16-bit weights with
    ZeRO alone, and optimizers that it does not know, such as SGD, only if it is told to.
    """
    if (name := job.optimizer) is None:
        return {}
    blocks = dict(DEEPSPEED[name])
    if name == "adam-bf16-fp32-gradients":
        blocks["zero_optimization"] = {"stage": 1}
    return blocks


def note(job: ExportJob) -> str | None:
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
