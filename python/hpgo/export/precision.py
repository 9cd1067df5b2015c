"""Precision and optimizer of a plan's memory estimate, as settings of each framework."""

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
    # Megatron-LM's default momentum is 0.9, so plain SGD has to turn it off.
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "sgd-momentum": {"optimizer": "sgd"},
}
"""Settings of Megatron-LM by optimizer. Source: `megatron/training/arguments.py`, 0.16.1 to 0.19."""
DEEPSPEED: Mapping[OptimizerName, Mapping[str, object]] = {
    "adam-fp32": {},
    "adam-bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "adam-bf16-fp32-gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "sgd": {"zero_allow_untested_optimizer": True},
    "sgd-momentum": {"zero_allow_untested_optimizer": True},
}
"""Blocks of DeepSpeed's configuration by optimizer. The user passes the optimizer itself to `deepspeed.initialize`."""


def widths(job: ExportJob) -> tuple[str, str] | None:
    """Return PyTorch's names for the types of weights and gradients; None if the plan names no optimizer."""
    if (name := job.optimizer) is None:
        return None
    names = {2: "bfloat16", 4: "float32"}
    return names[OPTIMIZERS[name].weights], names[OPTIMIZERS[name].gradients]


def megatron(job: ExportJob) -> dict[str, bool | float | str]:
    """Return the settings for a plan's precision and optimizer; empty if the plan names no optimizer."""
    return {} if job.optimizer is None else dict(MEGATRON[job.optimizer])


def optimizer(job: ExportJob) -> dict[str, Any]:
    """Return the name of Megatron Core's optimizer and its momentum; empty if the plan names no optimizer."""
    if job.optimizer is None:
        return {}
    chosen = megatron(job)
    named = {"optimizer": chosen.get("optimizer", "adam")}
    return named | {key: value for key, value in chosen.items() if key == "sgd_momentum"}


def verl(job: ExportJob) -> dict[str, str | bool]:
    """Return verl's `dtype` and `grad_reduce_in_fp32`; empty if the plan names no optimizer.

    Raises ArgumentError for weights in 32 bits, which verl's Megatron engine refuses
    (`McoreEngineConfig.__post_init__` in `verl/workers/config/engine.py`, 0.9.1).
    """
    if (kept := widths(job)) is None:
        return {}
    weights, gradients = kept
    if weights == "float32":
        raise ArgumentError(
            f"{job.target.title} keeps weights in 16 bits, but the plan is for {job.optimizer}",
            "plan with `--optimizer adam-bf16-fp32-gradients`, or `adam-bf16`",
            code="unsupported",
        )
    return {"dtype": weights, "grad_reduce_in_fp32": gradients == "float32"}


def swift(job: ExportJob) -> dict[str, str | bool]:
    """Return ms-swift's arguments for the precision; empty if the plan names no optimizer.

    ms-swift accumulates gradients in fp32 unless `main_grads_dtype` is bf16. Megatron Core accepts that only with its
    precision-aware optimizer, which needs the distributed optimizer (`_map_dtype` in
    `swift/megatron/arguments/megatron_args.py`, 4.5.2; `megatron/core/optimizer/optimizer_config.py`, 0.16.1).

    Raises ArgumentError for 16-bit gradients without a sharded optimizer state.
    """
    if (kept := widths(job)) is None:
        return {}
    weights, gradients = kept
    settings: dict[str, str | bool] = {"torch_dtype": weights, "bf16": weights == "bfloat16", "fp16": False}
    if gradients == "bfloat16":
        if not job.program.shard_optimizer:
            raise ArgumentError(
                f"{job.target.title} accumulates gradients in 16 bits only with a sharded optimizer state, but the plan"
                f" has {job.optimizer} without it",
                "plan with `--shard-optimizer`, or with `--optimizer adam-bf16-fp32-gradients`",
                code="unsupported",
            )
        settings |= {
            "use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "main_grads_dtype": "bf16",
        }  # fmt: skip
    return settings


def torchtitan(job: ExportJob) -> str | None:
    """Return the value of `training.mixed_precision_param`; None if the plan names no optimizer."""
    return None if (kept := widths(job)) is None else kept[0]


def deepspeed(job: ExportJob) -> dict[str, object]:
    """Return the blocks of the configuration for a plan's precision; empty if the plan names no optimizer.

    Source: `DeepSpeedEngine._do_optimizer_sanity_check` of 0.19.8. It accepts 32-bit gradients of 16-bit weights only
    with ZeRO, and optimizers that it does not know, such as SGD, only with `zero_allow_untested_optimizer`.
    """
    if (name := job.optimizer) is None:
        return {}
    blocks = dict(DEEPSPEED[name])
    # DeepSpeed accumulates in 32 bits only with ZeRO, so stage 1 is on even if a single replica shards nothing.
    if name == "adam-bf16-fp32-gradients":
        blocks["zero_optimization"] = {"stage": 1}
    return blocks


def note(job: ExportJob) -> str | None:
    """Return a comment on the optimizer of the memory estimate; None for a program, which has no memory estimate."""
    if job.plan is None:
        return None
    if (name := job.optimizer) is None:
        memory = job.plan.assumed.memory
        return (
            f"memory is estimated with gradients of {memory.gradients_per_weight:g} and optimizer state of"
            f" {memory.optimizer_per_weight:g} times the weights: choose precision and optimizer to match"
        )
    each = OPTIMIZERS[name].bytes_text
    return f"memory is estimated for {name}: {each} bytes per parameter (weights, gradients, optimizer state)"
