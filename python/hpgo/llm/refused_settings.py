"""Settings of frameworks that change time or memory in a way that the cost model does not cover."""

from __future__ import annotations

from hpgo.errors import ArgumentError

_REFUSED = {
    "zero_hpz_partition_size": (
        "hpZ keeps a second copy of the weights, sharded inside each node, whose memory and gathers are not estimated",
        "leave it out, or shard in groups of replicas with `dp_replicate`, which DeepSpeed runs as MiCS",
    ),
    "zero_quantized_weights": (
        "qwZ gathers weights in 8 bits, whose kernels are not estimated",
        "leave it out",
    ),
    "zero_quantized_gradients": (
        "qgZ reduces gradients in 4 bits by an all-to-all, and neither its time nor its kernels are estimated",
        "leave it out, or reduce gradients in 16 bits with `grad_reduce_in_bf16`",
    ),
}
"""Reason and hint of each of DeepSpeed's settings for ZeRO++ (Wang et al., arXiv 2306.10209; `DeepSpeedZeroConfig` in
deepspeed/runtime/zero/config.py, 0.19)."""


def check_setting(name: str) -> None:
    """Raise ArgumentError for a setting that is known, but not estimated. Dashes count as underscores.

    >>> check_setting("zero-stage")
    >>> check_setting("zero-quantized-weights")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: zero_quantized_weights is not supported: qwZ gathers weights in 8 bits, whose kernels ...
    """
    name = name.strip().replace("-", "_")
    if name in _REFUSED:
        why, hint = _REFUSED[name]
        raise ArgumentError(f"{name} is not supported: {why}", hint, code="unsupported")
