"""Fit of a platform's factors to measured steps: `hpgo.fit_platform`.

The error of a step has two parts: one that all steps of its platform share, and one of its own. Published steps give
the variance of both (docs/accuracy.md, *By platform*): about half of a single step's deviation belongs to its platform,
and nearly all of the mean deviation of many steps. So the measured factors are applied with an exponent between 0 and
1, and the platform records the error that remains.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from math import exp, log, pi, sqrt
from os import PathLike
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is, check_list, number
from hpgo.base.documents import Section, hinted, parse, read_text
from hpgo.base.files import as_path
from hpgo.base.messages import printable, shorten
from hpgo.base.units import parse_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, HpgoError
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import COUNTS, FLAGS, LlmEstimate, estimate_config, estimate_llm
from hpgo.llm.platform import Platform
from hpgo.llm.validated_features import features_of
from hpgo.machine.cluster import Cluster
from hpgo.machine.rates import same_card
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLATFORM_SPREAD = 0.11
"""Standard deviation over platforms of the mean logarithm of measured over predicted step times
(docs/accuracy.md, *By platform*)."""
STEP_SPREAD = 0.11
"""Standard deviation of that logarithm over the steps of one platform."""
_PRIOR_STEPS = 4
"""Weight of `STEP_SPREAD` in a platform's own spread, as a number of steps. Few steps alone would give a poor estimate.
Not tuned."""
_MAX_RATIO = 10.0
"""Largest ratio of measured to predicted step time, or of predicted to measured, that can be a platform. A larger one
means that the step was described wrongly. Not tuned."""
_MIN_STEPS_FOR_TWO = 3
"""Minimum number of steps to fit two factors. Two factors match any two steps exactly, so these test nothing."""
_MAX_ERROR_SHARE = 0.75
"""Two factors are used if their error on left-out steps is at most this share of the error of one factor. Not tuned."""
_EXACT = 1e-3
"""Relative error on left-out steps below which one factor is exact enough not to try two. Not tuned."""
_MIN_SHARE_RANGE = 0.02
"""Minimum range of the communication share over the steps. A smaller range can't separate two factors. Not tuned."""
_CLOSE = 1e-12
"""Change of a factor's logarithm below which iterations stop, because it is a rounding error."""
_VERSION_KEY, _VERSION = "hpgo_steps", 1
_FLAGS = ("sequence_parallel", *FLAGS)
_COUNTS = (*COUNTS, "devices")
_FROM_NONE = ("zero_stage", "cpu_offload_num_layers")
_WORDS = ("pp_schedule", "recompute", "precision")
_LISTS = ("recompute_modules",)
_KEYS = " ".join(
    ("model", "cluster", "seconds", "global_batch_size", "seq_length", "adapter_gbit_s", *_FLAGS, *_COUNTS, *_FROM_NONE,
     *_WORDS, *_LISTS)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredStep(Record):
    """A measured step time and the estimate of the same step."""

    model: Transformer
    cluster: Cluster
    predicted: LlmEstimate
    """Estimate without the factors of a platform."""
    measured_s: float
    """Measured step time in seconds."""

    def __post_init__(self) -> None:
        check_fields(self)
        number("a measured step", self.measured_s, above=0, hint="give its seconds")
        ratio = self.measured_s / self.predicted.step_s
        if not 1 / _MAX_RATIO < ratio < _MAX_RATIO:
            raise ArgumentError(
                f"a measured step is {self.measured_s:.4g} s, but that is {ratio:.3g} times the estimate of"
                f" {self.predicted.step_s:.4g} s for {self.predicted.parallelism.named()}",
                "check its unit, its batch and its degrees",
            )

    @classmethod
    def of(
        cls,
        transformer: Transformer | str | PathLike[str],
        cluster: Cluster,
        predicted: LlmEstimate,
        measured_s: float,
    ) -> MeasuredStep:
        """Return the step of an estimate that took `measured_s`.

        Raises ArgumentError if the estimate and the measurement differ more than tenfold.

        >>> import hpgo
        >>> cluster = hpgo.Cluster.preset("h100:1")
        >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=8192, tp=2)
        >>> MeasuredStep.of("llama-3-8b", cluster, one, measured_s=4.41).measured_s
        4.41
        """
        check_is("the estimate", predicted, LlmEstimate, "make one with `hpgo.estimate_llm`")
        check_is("the cluster", cluster, Cluster, "give the cluster of the estimate")
        return cls(transformer_of(transformer), cluster.first(predicted.gpus), predicted, measured_s)


@dataclass(frozen=True, slots=True)
class PlatformFit(Record):
    """A platform with the steps that it was fitted to.

    >>> import hpgo
    >>> one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2)
    >>> step = hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), one, 1.1 * one.step_s)
    >>> hpgo.fit_platform([step]).note
    'one factor: separate factors for computation and communication need at least 3 steps'
    """

    platform: Platform
    steps: tuple[MeasuredStep, ...]
    foretold_s: tuple[float, ...]
    """Predicted time of each step with the platform's factors."""
    note: str
    """Number of factors, and the reason if computation and communication share one."""


def read_steps(path: str | PathLike[str]) -> tuple[MeasuredStep, ...]:
    """Return the steps in a file: YAML or JSON with a list `steps`, or CSV with a row for each step.

    Keys, or columns, are `model`, `cluster`, `seconds` and the arguments of `hpgo.estimate_llm`; docs/llm.md has an
    example. Raises ArgumentError naming file, row and key.
    """
    path = as_path(path, ArgumentError)
    file = printable(str(path))
    with hinted("each step has `model`, `cluster`, `seconds` and the arguments of `hpgo.estimate_llm`"):
        text = read_text(path, ArgumentError)
        rows = _of_csv(text, file) if file.lower().endswith(".csv") else _of_document(text, file)
        if not rows:
            raise ArgumentError(f"{file} has no steps", "give one at least")
        return tuple(_step(row) for row in rows)


def fit_platform(steps: Sequence[MeasuredStep] | str | PathLike[str]) -> PlatformFit:
    """Return the platform that fits measured steps, with the error that remains.

    Computation and communication share one factor, unless there are at least 3 steps and two factors predict left-out
    steps clearly better.

    Raises ArgumentError for no steps, and for steps on different devices.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=8192, tp=2)
    >>> found = fit_platform([MeasuredStep.of("llama-3-8b", cluster, one, 1.2 * one.step_s)])
    >>> round(found.platform.computing, 2), 0 < found.platform.trust < 1
    (1.2, True)
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
    devices = list(dict.fromkeys(one.cluster.nodes[0].device.name for one in held))
    if not all(same_card(device, devices[0]) for device in devices):
        raise ArgumentError(
            f"steps were measured on {' and '.join(f'`{shorten(device)}`' for device in devices)}, but a platform has"
            " one device",
            "make one file of steps per device",
        )
    # More factors always fit better. So two are used only if they also predict left-out steps clearly better, which
    # needs enough steps that differ in their share of communication.
    alike, apart = _one_factor(held), None
    note = f"one factor: separate factors for computation and communication need at least {_MIN_STEPS_FOR_TWO} steps"
    if len(held) >= _MIN_STEPS_FOR_TWO and alike.left_out < _EXACT:
        note = "one factor: it predicts left-out steps exactly"
    elif len(held) >= _MIN_STEPS_FOR_TWO:
        low, high = min(shares := [_exchange_share(one) for one in held]), max(shares)
        note = (
            f"one factor: communication is {100 * low:.0f} to {100 * high:.0f} % of the steps, too similar to separate"
            " it from computation"
        )
        if high - low > _MIN_SHARE_RANGE:
            apart = _two_factors(held, alike)
            if apart is None or apart.left_out > _MAX_ERROR_SHARE * alike.left_out:
                apart = None
                note = "one factor: two would not predict left-out steps clearly better"
            else:
                note = "two factors: they predict left-out steps better than one"
    chosen = apart or alike
    # Pool the residuals with a prior of `_PRIOR_STEPS` steps, so that a single step does not give a spread of 0.
    spread = sqrt(
        (_PRIOR_STEPS * STEP_SPREAD**2 + sum(one * one for one in chosen.residuals))
        / (_PRIOR_STEPS + len(held) - chosen.free)
    )
    trust = trusted(len(held), spread)
    # Variance of a new step plus the variance of the shrunken mean. The mean absolute value of a normal deviation is
    # √(2/π) of its standard deviation.
    left = sqrt(spread**2 + trust * spread**2 / len(held))
    platform = Platform(
        device=devices[0],
        steps=len(held),
        computing=exp(chosen.computing),
        exchange=exp(chosen.exchange),
        spread=spread,
        trust=trust,
        error=sqrt(2 / pi) * left,
        mechanisms=tuple(dict.fromkeys(name for one in held for name in features_of(one.predicted.parallelism))),
    )
    return PlatformFit(platform, tuple(held), tuple(_foretold_s(one, *platform.factors) for one in held), note)


def trusted(steps: int, spread: float = STEP_SPREAD) -> float:
    """Return the share of the mean deviation of `steps` steps that belongs to their platform.

    It is the platforms' variance over the sum of that and the variance of the mean.

    >>> 0 < trusted(1) < trusted(2) < trusted(100) < 1
    True
    """
    return PLATFORM_SPREAD**2 / (PLATFORM_SPREAD**2 + spread**2 / steps)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Fitted logarithms of factors, with the logarithms of measured over predicted step times."""

    computing: float
    exchange: float
    residuals: tuple[float, ...]
    weights: tuple[float, ...]
    """Leverage of each step: the diagonal of the matrix that maps measured to predicted logarithms."""
    free: int
    """Number of free factors."""

    @property
    def left_out(self) -> float:
        """Mean deviation of a step from the prediction of a fit to the other steps."""
        # Dividing a residual by 1 − leverage gives the leave-one-out residual of a linear fit without another fit.
        far = [abs(one) / max(1 - weight, 1e-9) for one, weight in zip(self.residuals, self.weights, strict=True)]
        return sum(far) / len(far)


def _foretold_s(one: MeasuredStep, computing: float, exchange: float) -> float:
    config, known = one.predicted.parallelism, one.predicted
    return estimate_config(
        one.model, one.cluster, config, global_batch_size=known.global_batch_size, seq_length=known.seq_length,
        constants=CONSTANTS.slower(computing, exchange),
    ).step_s  # fmt: skip


def _residuals(steps: Sequence[MeasuredStep], computing: float, exchange: float) -> list[float]:
    return [log(one.measured_s / _foretold_s(one, exp(computing), exp(exchange))) for one in steps]


def _one_factor(steps: Sequence[MeasuredStep]) -> _Fit:
    """Return the fit of one factor, for which the logarithms of measured over predicted times have mean 0."""
    factor = 0.0
    # A factor does not scale the latencies of links, so the step is not proportional to it and one update is not
    # enough.
    for _ in range(50):
        residuals = _residuals(steps, factor, factor)
        mean = sum(residuals) / len(steps)
        factor += mean
        if abs(mean) < _CLOSE:
            break
    return _Fit(factor, factor, tuple(residuals), (1 / len(steps),) * len(steps), 1)


def _exchange_share(one: MeasuredStep) -> float:
    """Return the share of a step that grows with the factor of communication."""
    return _slope(one, 0.0, 0.0, lambda at: (0.0, at))


def _slope(
    one: MeasuredStep, computing: float, exchange: float, moved: Callable[[float], tuple[float, float]]
) -> float:
    # Central differences: 1e-4 is small enough for a constant slope, and large enough against rounding errors.
    far = 1e-4
    ends = []
    for at in (far, -far):
        more, beside = moved(at)
        ends.append(log(_foretold_s(one, exp(computing + more), exp(exchange + beside))))
    return (ends[0] - ends[1]) / (2 * far)


def _two_factors(steps: Sequence[MeasuredStep], start: _Fit) -> _Fit | None:
    """Return the least-squares fit of two factors by Gauss-Newton; None if it is not determined by the steps."""
    import numpy as np

    computing, exchange = start.computing, start.exchange
    residuals = np.array(_residuals(steps, computing, exchange))
    for _ in range(50):
        slopes = np.array(
            [
                [
                    _slope(one, computing, exchange, lambda far: (far, 0.0)),
                    _slope(one, computing, exchange, lambda far: (0.0, far)),
                ]
                for one in steps
            ]
        )
        moved = np.linalg.lstsq(slopes, residuals, rcond=None)[0]
        # Halve the step while it leaves the allowed range or makes the residuals larger.
        for _ in range(8):
            more, beside = moved.tolist()
            if max(abs(computing + more), abs(exchange + beside)) < log(_MAX_RATIO):
                tried = np.array(_residuals(steps, computing + more, exchange + beside))
                if tried @ tried <= residuals @ residuals:
                    break
            moved = moved / 2
        else:
            break
        computing, exchange, residuals = computing + more, exchange + beside, tried
        if np.abs(moved).max() < _CLOSE:
            break
    # If all steps have the same mix of computation and communication, many pairs of factors fit equally well.
    if np.linalg.matrix_rank(slopes) < len(moved):
        return None
    weights = np.einsum("ij,ji->i", slopes, np.linalg.pinv(slopes))
    return _Fit(computing, exchange, tuple(residuals.tolist()), tuple(weights.tolist()), 2)


def _of_document(text: str, file: str) -> list[Section]:
    held = parse(text, file, ArgumentError)
    whence = f"begin a file of steps with `{_VERSION_KEY}: {_VERSION}`"
    top = Section(held, file, ArgumentError, keys=f"{_VERSION_KEY} steps", whence=whence)
    version = top.get(_VERSION_KEY)
    top.whence = ""
    if version != _VERSION:
        top.fail(f"`{_VERSION_KEY}` must be {_VERSION}")
    rows = [
        Section(row, f"{file}, step {place}", ArgumentError, keys=_KEYS)
        for place, row in enumerate(top.items("steps"), start=1)
    ]
    top.done()
    return rows


def _of_csv(text: str, file: str) -> list[Section]:
    """Return a section for each row of a CSV file. Empty cells count as missing; values are read as in YAML."""
    from hpgo.base.documents import parse_yaml

    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as failure:
        raise ArgumentError(f"{file}: not valid CSV: {failure}", "quotes must match", code="damaged_file") from None
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names):
        raise ArgumentError(f"{file}: a column appears twice", "keep one of them", code="duplicate")
    found = []
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"{file}, line {line}"
        if len(row) != len(names):
            raise ArgumentError(
                f"{where} has {len(row)} cells, but the first line has {len(names)}", "give each cell a column"
            )
        # Names of models and clusters may look like numbers or dates in YAML, so they stay text.
        cells = {name: cell.strip() for name, cell in zip(names, row, strict=True) if cell.strip()}
        held = {
            name: cell if name in {"model", "cluster"} else parse_yaml(cell, where, ArgumentError)
            for name, cell in cells.items()
        }
        found.append(Section(held, where, ArgumentError, keys=_KEYS))
    return found


def _step(row: Section) -> MeasuredStep:
    given: dict[str, Any] = {"global_batch_size": row.whole("global_batch_size", least=1)}
    given["seq_length"] = row.whole("seq_length", least=1)
    given |= {name: row.whole(name, least=1) for name in _COUNTS if name in row}
    given |= {name: row.whole(name) for name in _FROM_NONE if name in row}
    given |= {name: row.flag(name) for name in _FLAGS if name in row}
    given |= {name: row.text(name) for name in _WORDS if name in row}
    given |= {name: row.items(name) for name in _LISTS if name in row}
    model, name = row.text("model"), row.text("cluster")
    rate = row.number("adapter_gbit_s") if "adapter_gbit_s" in row else None
    seconds: Any = row.get("seconds")
    row.done()
    try:
        transformer = transformer_of(model)
        cluster = Cluster.read(name) if rate is None else Cluster.preset(name, adapter_gbit_s=rate)
        predicted = estimate_llm(transformer, cluster, **given)
        return MeasuredStep.of(transformer, cluster, predicted, parse_seconds(seconds))
    except HpgoError as error:
        row.reraise(error)
