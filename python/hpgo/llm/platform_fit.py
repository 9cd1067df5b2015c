"""Fit of a platform's factors to measured steps: `hpgo.fit_platform`.

The factors have the highest probability (maximum a posteriori): each term's logarithm has a normal prior around 0
(`TERMS`), and each step deviates by itself. So a few steps move only the terms that they tell something of.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from os import PathLike
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is, check_list
from hpgo.base.messages import join_words, shorten
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import same_card
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import simulated_step_s, stages_of
from hpgo.llm.measured_steps import MeasuredStep, read_steps
from hpgo.llm.platform import OwnRates, Platform, TermFactor
from hpgo.llm.term_factors import OF_A_MODEL, STEP_SD, STEP_SD_WITH_EXPERTS, TERMS, scaled
from hpgo.llm.validated_features import features_of, features_of_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.stack import Stack
    from hpgo.model.transformer import Transformer

TermKey = tuple[str, str]
"""A term, and the model whose term it is; empty for all models."""
ENOUGH_STEPS = 3
"""Number of steps from which on published platforms are predicted clearly better (docs/llm.md)."""
_LESS_ERROR = 0.9
"""Largest ratio of the error with a platform to the error without one that counts as an improvement. Not tuned."""
_PRIOR_STEPS = 4
"""Weight of the usual deviation of single steps in a platform's own, as a number of steps. Few steps alone would give a
poor estimate. Not tuned."""
_HUBER = 1.345
"""Number of standard deviations beyond which a step counts less (Huber, 1964). This usual value costs 5 % of the
information if all deviations are normal. Single published steps deviate by more than normal ones."""
_ROUNDS = 30
_CLOSE = 1e-9
"""Change of a factor's logarithm below which iterations stop, because it changes no printed digit."""
_APART = 1e-4
"""Change of a logarithm for a slope: small enough for a constant slope, and large enough against rounding errors."""


@dataclass(frozen=True, slots=True)
class PlatformFit(Record):
    """A platform with the steps that it was fitted to.

    >>> import hpgo
    >>> one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2)
    >>> step = hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), one, 1.1 * one.step_s)
    >>> hpgo.fit_platform([step]).note.partition(":")[0]
    'one step is not enough'
    """

    platform: Platform
    steps: tuple[MeasuredStep, ...]
    fitted_s: tuple[float, ...]
    """Time of each step with the platform's factors."""
    error_before: float
    """Mean relative error of the steps' estimates without a platform."""
    error_fitted: float
    """Mean relative error of the steps with the platform's factors."""
    error_left_out: float
    """Mean relative error of each step, predicted with factors fitted to the other steps."""
    note: str
    """What this number of steps is good for."""


def fit_platform(steps: Sequence[MeasuredStep] | str | PathLike[str]) -> PlatformFit:
    """Return the platform that fits measured steps, with the error that remains.

    Steps that repeat a configuration count as one step, with their geometric mean: a configuration deviates by the same
    amount in each run.

    Raises ArgumentError for no steps, and for steps on different devices or with different stacks.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=8192, tp=2)
    >>> found = fit_platform([MeasuredStep.of("llama-3-8b", cluster, one, 1.2 * one.step_s)])
    >>> 1 < found.platform.factors()["linear"] < 1.2
    True
    """
    held: list[MeasuredStep]
    if isinstance(steps, str | PathLike):
        held = list(read_steps(steps))
    else:
        held = check_list("the steps", steps, hint="give a list of measured steps, or a file of them")
    for one in held:
        check_is("a step", one, MeasuredStep, "make it with `hpgo.MeasuredStep`, or read a file of them")
    if not held:
        raise ArgumentError("no steps to fit a platform to", "give one at least")
    device, stack = _shared(held)
    runs: dict[MeasuredConfig, list[float]] = {}
    for one in held:
        runs.setdefault(MeasuredConfig.of(one), []).append(log(one.measured_s))
    found = posterior(list(runs), [sum(logs) / len(logs) for logs in runs.values()])
    factors = {key: exp(value) for key, value in found.logs.items()}
    platform = Platform(
        device=device,
        stack=stack.name,
        custom_stack=None if stack.is_known else stack,
        rates=OwnRates.of(held[0].cluster),
        steps=len(runs),
        residual_sd=found.residual_sd,
        log_sd=found.log_sd,
        terms=tuple(
            TermFactor(term=key[0], model=key[1], factor=factor, sd=found.sds[key]) for key, factor in factors.items()
        ),
        mechanisms=tuple(
            dict.fromkeys(
                name
                for one in held
                for name in (*features_of(one.predicted.parallelism), *features_of_model(one.model))
            )
        ),
    )
    before, left_out = _mean_error(found.before), _mean_error(found.left_out)
    fitted_s = tuple(MeasuredConfig.of(one).step_s(factors) for one in held)
    has_experts = bool(held[0].model.experts)
    return PlatformFit(
        platform,
        tuple(held),
        fitted_s,
        before,
        sum(abs(fit_s / one.measured_s - 1) for fit_s, one in zip(fitted_s, held, strict=True)) / len(held),
        left_out,
        _note(len(runs), before, left_out, repeats=len(held) > len(runs), has_experts=has_experts),
    )


def _shared(steps: Sequence[MeasuredStep]) -> tuple[str, Stack]:
    """Return the device and the stack of all steps."""
    devices = list(dict.fromkeys(one.cluster.nodes[0].device.name for one in steps))
    if not all(same_card(device, devices[0]) for device in devices):
        raise ArgumentError(
            f"steps were measured on {join_words([f'`{shorten(device)}`' for device in devices], 'and')}, but a"
            " platform has one device",
            "make one file of steps per device",
        )
    rates = list(dict.fromkeys(OwnRates.of(one.cluster) for one in steps))
    if len(rates) > 1:
        named = [one.named() if one else "the rates of the known card" for one in rates]
        raise ArgumentError(
            f"steps were measured on `{shorten(devices[0])}` with {join_words(named, 'and')}, but a platform has one"
            " device",
            "make one file of steps per cluster",
        )
    stacks = list(dict.fromkeys(one.software_stack for one in steps))
    if len(stacks) > 1:
        names = dict.fromkeys(f"`{stack.name}`" for stack in stacks)
        raise ArgumentError(
            f"steps ran with stacks {join_words(list(names), 'and')}, but a platform has one"
            if len(names) > 1
            else f"steps ran with two stacks {next(iter(names))} of different values, but a platform has one",
            "fit one platform per stack",
        )
    return devices[0], stacks[0]


def _note(steps: int, before: float, left_out: float, *, repeats: bool, has_experts: bool) -> str:
    counted = " (repeated configurations count once)" if repeats else ""
    wanted = f"measure {ENOUGH_STEPS} that differ in micro-batch size, degrees or sequence length"
    if steps == 1 and has_experts:
        return f"one step helps for this model with experts only{counted}; {wanted}"
    if steps == 1:
        return f"one step is not enough{counted}: most of its deviation may be its own, so it changes little; {wanted}"
    if steps < ENOUGH_STEPS:
        return f"{steps} steps are weak{counted}: they hardly tell terms apart; {wanted}"
    change = f"from {100 * before:.1f} % to {100 * left_out:.1f} % if each step is predicted from the others"
    if left_out < _LESS_ERROR * before:
        return f"{steps} steps are worth it{counted}: the mean error of the estimates falls {change}"
    return (
        f"{steps} steps do not improve the estimates{counted}: their mean error goes {change}, so only the range of the"
        " platform gains from them"
    )


@dataclass(frozen=True)
class MeasuredConfig:
    """What determines the estimate of a measured step. Steps with equal values repeat a configuration."""

    model: Transformer
    cluster: Cluster
    parallelism: ParallelismConfig
    global_batch_size: int
    seq_length: int
    stack: Stack

    @classmethod
    def of(cls, one: MeasuredStep) -> MeasuredConfig:
        """Return the configuration of a measured step."""
        known, stack = one.predicted, one.software_stack
        return cls(one.model, one.cluster, known.parallelism, known.global_batch_size, known.seq_length, stack)

    def step_s(self, factors: Mapping[TermKey, float]) -> float:
        """Return the estimated step time with factors on terms."""
        mine = {term: factor for (term, model), factor in factors.items() if model in {"", self.model.name}}
        stages = stages_of(
            self.model, self.cluster, self.parallelism, global_batch_size=self.global_batch_size,
            seq_length=self.seq_length, constants=scaled(self.stack.constants(CONSTANTS), mine),
        )  # fmt: skip
        return simulated_step_s(stages)


@dataclass(frozen=True)
class Posterior:
    """The most probable logarithms of factors, and the deviations that they leave."""

    logs: dict[TermKey, float]
    sds: dict[TermKey, float]
    """Standard deviations of `logs`."""
    residual_sd: float
    log_sd: float
    before: tuple[float, ...]
    """Logarithms of measured over estimated time of each step without factors."""
    left_out: tuple[float, ...]
    """The same with factors fitted to the other steps."""


def posterior(configs: Sequence[MeasuredConfig], measured: Sequence[float], own_sd: float | None = None) -> Posterior:
    """Return the most probable factors, given the logarithms of the configurations' measured seconds.

    `own_sd` is the standard deviation of each step's own deviation; None means that of published steps. The method is
    Gauss-Newton on the logarithms with numeric slopes. It halves a move that would make the fit worse.
    """
    import numpy as np

    keys: list[TermKey] = [(term, "") for term in TERMS if term not in OF_A_MODEL]
    keys += [
        (term, name)
        for term in OF_A_MODEL
        for name in dict.fromkeys(one.model.name for one in configs if one.model.experts)
    ]

    def estimated(logs: Any) -> Any:
        factors = dict(zip(keys, np.exp(logs).tolist(), strict=True))
        return np.array([log(one.step_s(factors)) for one in configs])

    def badness(residuals: Any, logs: Any) -> float:
        far = np.abs(residuals) / sds
        return float(np.where(far < _HUBER, far**2, _HUBER * (2 * far - _HUBER)).sum() + precision @ logs**2)

    target = np.array(measured)
    sds = np.array([own_sd or (STEP_SD_WITH_EXPERTS if one.model.experts else STEP_SD) for one in configs])
    precision = np.array([TERMS[term].prior_sd for term, _ in keys]) ** -2.0
    logs = np.zeros(len(keys))
    there = estimated(logs)
    before = target - there
    for _ in range(_ROUNDS):
        residuals = target - there
        slopes = np.stack([(estimated(logs + _APART * row) - there) / _APART for row in np.eye(len(keys))], axis=1)
        weights = np.minimum(1.0, _HUBER * sds / np.maximum(np.abs(residuals), _CLOSE)) / sds**2
        spread = np.linalg.inv((slopes.T * weights) @ slopes + np.diag(precision))
        move = spread @ ((slopes.T * weights) @ residuals - precision * logs)
        worst = badness(residuals, logs)
        while np.abs(move).max() > _CLOSE:
            tried = estimated(logs + move)
            if badness(target - tried, logs + move) <= worst:
                break
            move = move / 2
        else:
            break
        logs, there = logs + move, tried
    residuals = target - there
    variances = np.einsum("ij,jk,ik->i", slopes, spread, slopes)
    # A linear fit without a step would miss it by its residual over 1 − leverage.
    left_out = residuals / (1 - variances * weights)
    # How much these steps scatter, relative to published ones.
    ratio = (_PRIOR_STEPS + (residuals * left_out / sds**2).sum()) / (_PRIOR_STEPS + len(configs))
    residual_variance = float(ratio * np.mean(sds**2))
    return Posterior(
        dict(zip(keys, logs.tolist(), strict=True)),
        dict(zip(keys, np.sqrt(np.diag(spread)).tolist(), strict=True)),
        sqrt(residual_variance),
        sqrt(residual_variance + float(variances.mean())),
        tuple(before.tolist()),
        tuple(left_out.tolist()),
    )


def _mean_error(logs: Sequence[float]) -> float:
    return sum(abs(exp(-one) - 1) for one in logs) / len(logs)
