"""Small profiles that tests plan, price and break."""

from __future__ import annotations

from typing import Any

import hpgo


def chain(
    forward_s: list[float],
    activation_bytes: float | list[float] = 0.0,
    parameter_bytes: float | list[float] = 0.0,
    *,
    backward: float = 2.0,
    name: str = "toy",
    batch_size: int = 1,
) -> hpgo.Profile:
    """Layers whose backward takes `backward` times their forward; one number stands for all layers."""

    def each(given: float | list[float]) -> list[float]:
        return given if isinstance(given, list) else [given] * len(forward_s)

    return hpgo.Profile.chain(
        name,
        batch_size=batch_size,
        forward_s=forward_s,
        backward_s=[backward * seconds for seconds in forward_s],
        activation_bytes=each(activation_bytes),
        parameter_bytes=each(parameter_bytes),
    )


def computing(compute_s: list[float], *sizes: Any, batch_size: int = 1) -> hpgo.Profile:
    """Layers that take these times in all, a quarter of them forwards; `sizes` as in `chain`."""
    return chain([seconds / 4 for seconds in compute_s], *sizes, backward=3.0, batch_size=batch_size)


def toy(**columns: Any) -> hpgo.Profile:
    """Layers that differ: four of them, or as many as the columns have that are given in place of the usual ones."""
    count = next((len(column) for column in columns.values() if isinstance(column, list)), 4)
    usual = {
        "batch_size": 1,
        "forward_s": [0.01 * (1 + index % 3) for index in range(count)],
        "backward_s": [0.02 * (1 + index % 2) for index in range(count)],
        "activation_bytes": [2e6] * count,
        "parameter_bytes": [1e8] * count,
    }
    return hpgo.Profile.chain("toy", **usual | columns)
