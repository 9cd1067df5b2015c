"""Bytes per parameter of an optimizer's state: moments, the optimizer's copy of the weights, and gradients.

Megatron-LM names the formats in `--exp-avg-dtype`, `--exp-avg-sq-dtype` and `--main-params-dtype`. DeepSpeed has
`bf16_master_weights_and_grads` and `bf16_optimizer_states`, torchtitan `training.dtype`. Optimizers with 8-bit or paged
state are bitsandbytes'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.llm.layer_context import VALUE
from hpgo.llm.parallelism import MAX_ZERO

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import ParallelismConfig

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_WIDE = 4
ADAM_MOMENTS = 2 * _WIDE
"""Bytes per parameter of both of Adam's moments in 32 bits."""
_BLOCK = 256
"""Values of an 8-bit moment that share a 32-bit scale (bitsandbytes 0.50, `blocksize` in `optim/optimizer.py`)."""


def moment_bytes(config: ParallelismConfig) -> float:
    """Return the bytes per parameter of the moments: both of Adam's, or the momentum of SGD and of Muon's matrices.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> [moment_bytes(ParallelismConfig(exp_avg_dtype=first)) for first in ("fp32", "bf16", "fp8")]
    [8, 6, 5]
    >>> [moment_bytes(ParallelismConfig(optimizer=name)) for name in ("adam8bit", "paged_adam", "sgd")]
    [2.03125, 8, 4]
    """
    if config.optimizer in {"sgd", "muon"}:
        return _WIDE
    if config.optimizer.endswith("8bit"):
        return 2 * (1 + _WIDE / _BLOCK)
    return _BYTES[config.exp_avg_dtype] + _BYTES[config.exp_avg_sq_dtype]


def is_unfused(config: ParallelismConfig) -> bool:
    """Return whether the optimizer step is many kernels. Other optimizers than Adam are always fused."""
    return config.optimizer == "adam" and not config.fused_adam


def offloaded_weight_bytes(config: ParallelismConfig) -> int:
    """Return the bytes per parameter of the weights that the CPU updates."""
    return VALUE if config.main_params_dtype == "none" else _BYTES[config.main_params_dtype]


def main_weight_bytes(config: ParallelismConfig) -> int:
    """Return the bytes per parameter of the optimizer's copy of the weights that the column of weights does not count.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> [main_weight_bytes(ParallelismConfig(main_params_dtype=kind)) for kind in ("fp32", "fp16", "none")]
    [4, 2, 0]
    """
    if config.main_params_dtype == "none":
        # FSDP's shard is a tensor beside the gathered weights. With ZeRO stage 3 the column of weights counts it.
        return VALUE if config.dtensor and 0 < config.zero_stage < MAX_ZERO else 0
    # With ZeRO stage 3 the shard of the weights itself is in 32 bits, unless gradients are in 16 bits.
    if config.main_params_dtype == "fp32" and config.zero_stage == MAX_ZERO and not config.grad_reduce_in_bf16:
        return 0
    return _BYTES[config.main_params_dtype]


def shard_bytes(config: ParallelismConfig) -> int:
    """Return the bytes per parameter of the shard of the weights with ZeRO stage 3."""
    return VALUE if config.grad_reduce_in_bf16 or config.main_params_dtype != "fp32" else _WIDE


def widened_bytes(context: LayerContext) -> int:
    """Return the bytes per parameter in 32 bits that the optimizer step allocates for gradients and narrow state.

    Gradients in 16 bits are copied unless the optimizer works in bf16. Transformer Engine's FusedAdam also copies each
    moment in fewer than 32 bits, unless both are in bf16, and an fp16 copy of the weights (`get_unscaled_state`).
    """
    config = context.config
    if config.main_params_dtype in {"bf16", "none"}:
        return 0
    moments = [] if config.adam_moments_in_bf16 else [config.exp_avg_dtype, config.exp_avg_sq_dtype]
    narrow = sum(kind != "fp32" for kind in (*moments, config.main_params_dtype))
    return _WIDE * (narrow + context.reduces_in_16_bits)


def saved_traffic_bytes(config: ParallelismConfig) -> float:
    """Return the bytes of memory traffic per parameter that an optimizer step saves on one with 32-bit state.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    >>> states = ({}, moments, moments | {"main_params_dtype": "none"})
    >>> [saved_traffic_bytes(ParallelismConfig(**one)) for one in states]
    [0, 8, 16]
    """
    # 30 bytes with 32-bit state: read a gradient, read and write both moments and the weight, write the 16-bit weight.
    saved = 2 * (ADAM_MOMENTS - moment_bytes(config))
    if config.main_params_dtype == "none":
        # The gradient is read in 16 bits, and the 16-bit weight is read instead of a copy in 32.
        return saved + 2 * _WIDE + (_WIDE - VALUE) - VALUE
    saved += 2 * (_WIDE - _BYTES[config.main_params_dtype])
    return saved + (_WIDE - VALUE if config.main_params_dtype == "bf16" else 0)
