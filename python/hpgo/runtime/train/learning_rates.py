"""Learning rates that depend on the step alone, so that any plan can resume a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_KINDS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}
"""Factor between the end of the warm-up, at 0, and the last step, at 1."""


def schedule_of(text: str, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step, for a schedule such as `cosine:warmup=100,min=0.1`.

    The factor rises in equal parts over the first `warmup` steps. Then it falls from 1 to `min` at the end of the run's
    `steps`, along a line or along half a cosine. Raises ArgumentError for any other text.

    >>> factor = schedule_of("linear:warmup=2,min=0.5", 6)
    >>> [factor(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    name, _, rest = text.partition(":")
    if name not in _KINDS:
        raise ArgumentError(
            f"there is no learning-rate schedule `{shorten(name)}`", did_you_mean(name, _KINDS), code="unknown_name"
        )
    values = {"warmup": 0.0, "min": 0.0}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            known, values[key] = key in values, float(value)
        except ValueError:
            known = False
        if not known:
            raise ArgumentError(
                f"`{shorten(item)}` is no option of the learning-rate schedule `{name}`",
                "write it like `cosine:warmup=100,min=0.1`",
                code="unknown_name",
            )
    warmup, least = values["warmup"], values["min"]
    if not (warmup >= 0 and warmup.is_integer() and 0 <= least <= 1):
        raise ArgumentError(
            f"`{shorten(text)}` has the warm-up {warmup:g} and the minimum {least:g}",
            "give a whole number of steps, and a fraction of the learning rate from 0 to 1",
        )

    def factor(step: int) -> float:
        # The first step has a part of the rate, too, because a step at the rate 0 would change nothing.
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return least + (1 - least) * _KINDS[name](done)

    return factor


class LearningRates:
    """Learning rates of one optimizer, as multiples of the rates that it was created with."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, factor: Callable[[int], Any]) -> None:
        self._factor = factor
        self._groups = [] if optimizer is None else optimizer.param_groups
        # Checkpoints store the rates under torch's name for them.
        for group in self._groups:
            group["initial_lr"] = group["lr"]
        self._rates = [group["initial_lr"] for group in self._groups]

    def set(self, step: int) -> float:
        """Set the rates of a step, counted from 0, and return the factor.

        Raises ArgumentError if the factor is no finite number from 0.
        """
        found = self._factor(step)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            raise ArgumentError(
                f"the factor of the learning rate is {safe_repr(found)} in step {step}",
                "return a finite number from 0",
                code="user_code",
            )
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * found
        return float(found)
