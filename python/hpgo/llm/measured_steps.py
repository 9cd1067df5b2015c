"""From measured steps to a platform's factors: `hpgo.fit_platform`.

A step is off its prediction by what its platform has in common, and by what it has for itself. Published steps tell
how much that is of each (docs/accuracy.md): of one step's ratio about a half is the platform's, of many steps' mean
nearly all. So a platform follows what was measured by a power between 0 and 1, and knows the error that is left.
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
"""Standard deviation of platforms' logarithms of measured over predicted steps: docs/accuracy.md, *one step known*."""
STEP_SPREAD = 0.11
"""The same of steps around their platform's."""
_KNOWN_BEFORE = 4
"""Steps that published platforms count for in a platform's own spread, which few steps of its own hardly tell."""
_FARTHEST = 10.0
"""Times as long, or as short, as predicted: beyond is no platform, but another step than was described."""
_BOTH_FROM = 3
"""Steps, of which two factors go through two whatever they are."""
_BETTER = 0.75
"""Share of the error of one factor that is left in steps not fitted, for two to be worth it."""
_NOTHING_LEFT = 1e-3
"""Share by which one factor may miss steps that are left out, and nothing is to be bettered."""
_LEAST_APART = 0.02
"""Of a step: shares of exchange that differ by less tell nothing."""
_CLOSE = 1e-12
"""Of a factor's logarithm: closer is rounding."""
_VERSION_KEY, _VERSION = "hpgo_steps", 1
_FLAGS = ("sequence_parallel", *FLAGS)
_COUNTS = (*COUNTS, "devices")
_FROM_NONE = ("zero_stage", "cpu_offload_num_layers")
_WORDS = ("pp_schedule", "recompute", "precision")
_KEYS = " ".join(
    ("model", "cluster", "seconds", "global_batch_size", "seq_length", "adapter_gbit_s", *_FLAGS, *_COUNTS, *_FROM_NONE,
     *_WORDS)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredStep(Record):
    """One step that somebody measured, and what the terms say of it."""

    model: Transformer
    cluster: Cluster
    predicted: LlmEstimate
    """Without any platform's factors."""
    measured_s: float

    def __post_init__(self) -> None:
        check_fields(self)
        number("a measured step", self.measured_s, above=0, hint="give its seconds")
        ratio = self.measured_s / self.predicted.step_s
        if not 1 / _FARTHEST < ratio < _FARTHEST:
            raise ArgumentError(
                f"a measured step of {self.measured_s:.4g} s is {ratio:.3g} times the {self.predicted.step_s:.4g} s"
                f" that {self.predicted.parallelism.named()} takes by terms",
                "look at its unit, its batch and its degrees",
            )

    @classmethod
    def of(
        cls,
        transformer: Transformer | str | PathLike[str],
        cluster: Cluster,
        predicted: LlmEstimate,
        measured_s: float,
    ) -> MeasuredStep:
        """What `hpgo.estimate_llm` gave for a transformer on a cluster, and what it took. Raises what these two do.

        >>> import hpgo
        >>> cluster = hpgo.Cluster.preset("h100:1")
        >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=8192, tp=2)
        >>> MeasuredStep.of("llama-3-8b", cluster, one, measured_s=4.41).measured_s
        4.41
        """
        check_is("the price", predicted, LlmEstimate, "make one, with `hpgo.estimate_llm`")
        check_is("the cluster", cluster, Cluster, "give the one that the step was priced on")
        return cls(transformer_of(transformer), cluster.first(predicted.gpus), predicted, measured_s)


@dataclass(frozen=True, slots=True)
class PlatformFit(Record):
    """A platform, and what it was made of.

    >>> import hpgo
    >>> price = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2)
    >>> step = hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), price, 1.1 * price.step_s)
    >>> hpgo.fit_platform([step]).note
    'one factor: 3 steps at least tell computing and exchange apart'
    """

    platform: Platform
    steps: tuple[MeasuredStep, ...]
    foretold_s: tuple[float, ...]
    """Each step with the platform's factors."""
    note: str
    """Why computing and exchange have one factor, or that they have two."""


def read_steps(path: str | PathLike[str]) -> tuple[MeasuredStep, ...]:
    """The steps in a file: YAML or JSON with a list `steps`, or CSV with a row for each.

    Keys, or columns, are `model`, `cluster`, `seconds` and the arguments of `hpgo.estimate_llm`; docs/llm.md has an
    example.
    Raises ArgumentError naming file, row and key.
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
    """Factors of a platform from steps that were measured on it, with the error that is left.

    One factor of computing and exchange alike, unless three steps or more tell them apart: steps that are left out are
    to be foretold clearly better by two.

    Raises ArgumentError for no steps, and for steps on devices that differ.

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
            f"steps were measured on {' and '.join(f'`{shorten(device)}`' for device in devices)}",
            "fit a platform to those of each",
        )
    alike, apart = _one_factor(held), None
    note = f"one factor: {_BOTH_FROM} steps at least tell computing and exchange apart"
    if len(held) >= _BOTH_FROM and alike.left_out < _NOTHING_LEFT:
        note = "one factor: it foretells steps that are left out as they are"
    elif len(held) >= _BOTH_FROM:
        low, high = min(shares := [_exchange_share(one) for one in held]), max(shares)
        note = f"one factor: exchange is {100 * low:.0f} to {100 * high:.0f} % of the steps, which tells little of it"
        if high - low > _LEAST_APART:
            apart = _two_factors(held, alike)
            if apart is None or apart.left_out > _BETTER * alike.left_out:
                apart = None
                note = "one factor: with two, steps that are left out would not be foretold clearly better"
            else:
                note = "two factors: steps that are left out are foretold better than with one"
    chosen = apart or alike
    spread = sqrt(
        (_KNOWN_BEFORE * STEP_SPREAD**2 + sum(one * one for one in chosen.residuals))
        / (_KNOWN_BEFORE + len(held) - chosen.free)
    )
    trust = trusted(len(held), spread)
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
    """How much of the mean of so many steps' logarithms is their platform's: variances of both, one over their sum.

    >>> 0 < trusted(1) < trusted(2) < trusted(100) < 1
    True
    """
    return PLATFORM_SPREAD**2 / (PLATFORM_SPREAD**2 + spread**2 / steps)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Logarithms of factors, and of measured over foretold steps."""

    computing: float
    exchange: float
    residuals: tuple[float, ...]
    weights: tuple[float, ...]
    """How far each step draws the fit to itself: the diagonal of the matrix that makes foretold of measured ones."""
    free: int

    @property
    def left_out(self) -> float:
        """Mean distance of a step from what the others foretell."""
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
    """The factor whose logarithms of measured over foretold steps have mean 0."""
    factor = 0.0
    for _ in range(50):
        residuals = _residuals(steps, factor, factor)
        mean = sum(residuals) / len(steps)
        factor += mean  # latencies of links stay as they are, so that once is not enough
        if abs(mean) < _CLOSE:
            break
    return _Fit(factor, factor, tuple(residuals), (1 / len(steps),) * len(steps), 1)


def _exchange_share(one: MeasuredStep) -> float:
    """By how much a step grows with its exchange."""
    return _slope(one, 0.0, 0.0, lambda at: (0.0, at))


def _slope(
    one: MeasuredStep, computing: float, exchange: float, moved: Callable[[float], tuple[float, float]]
) -> float:
    far = 1e-4
    ends = []
    for at in (far, -far):
        more, beside = moved(at)
        ends.append(log(_foretold_s(one, exp(computing + more), exp(exchange + beside))))
    return (ends[0] - ends[1]) / (2 * far)


def _two_factors(steps: Sequence[MeasuredStep], start: _Fit) -> _Fit | None:
    """Least squares of the logarithms, by Gauss and Newton; None if it leads beyond all platforms."""
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
        for _ in range(8):
            more, beside = moved.tolist()
            if max(abs(computing + more), abs(exchange + beside)) < log(_FARTHEST):
                tried = np.array(_residuals(steps, computing + more, exchange + beside))
                if tried @ tried <= residuals @ residuals:
                    break
            moved = moved / 2
        else:
            break
        computing, exchange, residuals = computing + more, exchange + beside, tried
        if np.abs(moved).max() < _CLOSE:
            break
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
    """A cell that is left empty is not given; words are numbers or truth values as in YAML."""
    from hpgo.base.documents import parse_yaml

    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as failure:
        raise ArgumentError(f"{file}: not valid CSV: {failure}", "quotes must match", code="damaged_file") from None
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names):
        raise ArgumentError(f"{file}: a column is there twice", "keep one of them", code="duplicate")
    found = []
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"{file}, line {line}"
        if len(row) != len(names):
            raise ArgumentError(f"{where} has {len(row)} cells, and the first line {len(names)}", "give each a column")
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
