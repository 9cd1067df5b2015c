"""Terms of a step that measured steps can make slower or faster, with the constants of the cost model that scale them.

Factors of most terms scale one term only. `overall` scales every rate and every time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.llm.constants import Constants


class FittedTerm(NamedTuple):
    """A term whose time `hpgo.fit_platform` fits."""

    label: str
    """Name of the term in reports."""
    prior_sd: float
    """Standard deviation of the factor's logarithm over platforms, before any step of the platform is known."""
    shares: tuple[str, ...]
    """Constants that the factor divides: efficiencies."""
    times: tuple[str, ...]
    """Constants that the factor multiplies: seconds and time factors."""


# The standard deviations come from the residuals of published steps. That of layers with experts follows from two
# numbers: steps of models with experts deviate by 19 % on average, and by 14 % once one step of the same model, GPU and
# release is known. With a normal distribution, these split into a shared part of 0.20 and a part of each step of 0.135.
TERMS: dict[str, FittedTerm] = {
    "overall": FittedTerm(
        "whole step",
        0.05,
        (
            "gemm_efficiency", "attention_efficiency", "unfused_attention_efficiency", "hbm_efficiency",
            "nvlink_efficiency", "nic_efficiency", "gather_nic_efficiency", "all_to_all_nic_efficiency",
            "cpu_optimizer_bytes_per_s",
        ),
        ("gemm_overhead_s", "layer_launch_s", "collective_launch_s", "expert_launch_s", "collective_overhead_s"),
    ),
    "linear": FittedTerm("linear layers", 0.06, ("gemm_efficiency",), ("gemm_overhead_s",)),
    "attention": FittedTerm("attention", 0.15, ("unfused_attention_efficiency",), ("attention_time_factor",)),
    "memory": FittedTerm("memory accesses", 0.10, ("hbm_efficiency",), ()),
    "launch_overhead": FittedTerm(
        "kernel launches", 0.15, (), ("layer_launch_s", "collective_launch_s", "expert_launch_s")
    ),
    "tp_comm": FittedTerm("TP communication", 0.25, (), ("tp_time_factor",)),
    "param_all_gather": FittedTerm("parameter all-gather", 0.25, (), ("gather_time_factor",)),
    "grad_reduce": FittedTerm("DP gradient reduction", 0.30, (), ("grad_reduce_time_factor",)),
    "grad_accumulation": FittedTerm("gradient accumulation", 0.20, (), ("accumulation_time_factor",)),
    "experts": FittedTerm("layers with experts", 0.20, (), ("expert_time_factor",)),
}  # fmt: skip
"""Fitted terms by key. A term of estimates has the same key as there."""
OF_A_MODEL = ("experts",)
"""Terms whose factor holds for one model only. The factor of one model with experts makes published steps of others
worse: their mean error grows from 16 to 22 %."""
STEP_SD = 0.08
"""Standard deviation of the logarithm of measured over estimated time that single steps keep on their platform."""
STEP_SD_WITH_EXPERTS = 0.135
"""`STEP_SD` of models with experts."""


def scaled(constants: Constants, factors: Mapping[str, float]) -> Constants:
    """Return constants with the times of terms multiplied by factors.

    >>> from hpgo.llm.constants import CONSTANTS
    >>> scaled(CONSTANTS, {"memory": 2.0}).hbm_efficiency == CONSTANTS.hbm_efficiency / 2
    True
    """
    changed: dict[str, float] = {}
    for key, factor in factors.items():
        term = TERMS[key]
        changed |= {name: changed.get(name, getattr(constants, name)) / factor for name in term.shares}
        changed |= {name: changed.get(name, getattr(constants, name)) * factor for name in term.times}
    return replace(constants, **changed)  # type: ignore[arg-type]  # all of these are floats
