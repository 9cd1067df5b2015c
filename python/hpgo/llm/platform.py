"""Platforms: constants of the cost model fitted to one GPU type, software stack and network, with their error."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import pi, sqrt
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, check_is, choice, number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.files import as_path
from hpgo.base.messages import printable, safe_repr, shorten
from hpgo.base.quoting import in_yaml
from hpgo.base.units import format_bytes_per_s, format_flop_per_s
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import rates_of
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.device_record import KEY as DEVICE_KEY
from hpgo.llm.device_record import DeviceRecord
from hpgo.llm.gpus import USUAL_ATTENTION, USUAL_REACHED
from hpgo.llm.stack import Stack, check_custom_stack
from hpgo.llm.term_factors import TERMS, scaled

if TYPE_CHECKING:
    import os

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.constants import Constants

MEMORY_ERROR = 0.06
"""Mean relative error of memory (docs/accuracy.md)."""
_VERSION = 2
_KEY = "hpgo_platform"
_MAX_SD = 2.0
"""Largest standard deviation of a platform: a range of ×/÷ 30. Not tuned."""
_MAX_FACTOR = 100.0
"""Largest factor of a term, and the inverse of the smallest. Not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFactor(Record):
    """Time of a term on a platform, as a factor on its time in the cost model."""

    term: str
    """Key in `hpgo.llm.term_factors.TERMS`."""
    factor: float
    """Most probable factor: between 1 and what the measured steps alone would give."""
    sd: float
    """Standard deviation of the factor's logarithm that the measured steps leave."""
    model: str = ""
    """Name of the model to which the factor is restricted; empty for all models."""

    def __post_init__(self) -> None:
        check_fields(self)
        choice("term of a platform", self.term, tuple(TERMS))
        number(f"the factor of {self.term}", self.factor, above=1 / _MAX_FACTOR, maximum=_MAX_FACTOR)
        number(f"the sd of {self.term}", self.sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRates(Record):
    """Rates of a device that differs from the known card of its name. Factors are relative to them.

    >>> import hpgo
    >>> OwnRates.of(hpgo.Cluster.preset("h100:1")) is None
    True
    """

    gemm_flop_per_s: float
    """Rate of large GEMMs in 16 bits."""
    attention_flop_per_s: float
    memory_bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster) -> OwnRates | None:
        """Return the rates that a cluster states of its device; None if they are the known card's."""
        device = cluster.nodes[0].device
        if device.rates is None and device.speed == 1:
            return None
        rates = device.rates or rates_of(device.name)
        peak = device.speed * max(rates.flop_per_s.get(name, 0.0) for name in ("bfloat16", "float16"))
        return cls(
            gemm_flop_per_s=peak * rates.reached.get("bf16", USUAL_REACHED),
            attention_flop_per_s=peak * rates.reached.get("attention", USUAL_ATTENTION),
            memory_bytes_per_s=device.speed * rates.bytes_per_s,
        )

    def named(self) -> str:
        """Return the rates for messages."""
        gemms, attention = map(format_flop_per_s, (self.gemm_flop_per_s, self.attention_flop_per_s))
        memory = format_bytes_per_s(self.memory_bytes_per_s)
        return f"rates of a cluster file (GEMMs {gemms}, attention {attention}, memory {memory})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform(Record):
    """Factors between measured and estimated times of terms on one GPU type, software stack and network.

    `hpgo.fit_platform` computes them from measured steps. `save` and `Platform.read` store them in a file.

    >>> slow = TermFactor(term="linear", factor=1.1, sd=0.05)
    >>> Platform(device="H100-80GB", steps=3, residual_sd=0.08, log_sd=0.1, terms=(slow,)).factors()
    {'linear': 1.1}
    """

    device: str
    """Device of the measured steps, by its name in clusters."""
    stack: str = "default"
    """Software stack whose constants the factors scale."""
    steps: int
    """Number of measured steps with different configurations."""
    residual_sd: float
    """Standard deviation of the logarithm of measured over estimated time of single steps around these factors."""
    log_sd: float
    """Standard deviation of that logarithm for a new step: of the step itself, and of the factors."""
    terms: tuple[TermFactor, ...]
    """Factors of all terms that were fitted."""
    mechanisms: tuple[str, ...] = ()
    """Features that the measured steps used, by the names of `LlmEstimate.unvalidated_features`."""
    custom_stack: Stack | None = None
    """The stack if it is a file of the user; None for a built-in stack."""
    rates: OwnRates | None = None
    """Rates of the device that the steps' cluster file states; None if it was the known card of this name."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("steps of a platform", self.steps)
        check_custom_stack(self.stack, self.custom_stack)
        for name in ("residual_sd", "log_sd"):
            number(f"{name} of a platform", getattr(self, name), maximum=_MAX_SD)
        if len({(one.term, one.model) for one in self.terms}) < len(self.terms):
            raise ArgumentError("a term of a platform appears twice", "keep one of them", code="duplicate")

    def factors(self, model: str = "") -> dict[str, float]:
        """Return the factors for a model by term, without the factors for other models."""
        check_is("the model", model, str, "give the name of a model")
        return {one.term: one.factor for one in self.terms if one.model in {"", model}}

    @property
    def software_stack(self) -> Stack:
        """The software stack whose constants the factors scale."""
        return self.custom_stack or Stack.named(self.stack)

    @property
    def error(self) -> float:
        """Expected mean relative error of a step time that is predicted with these factors."""
        # The mean absolute value of a normal deviation is √(2/π) of its standard deviation.
        return sqrt(2 / pi) * self.log_sd

    def on(self, cluster: Cluster) -> Cluster:
        """Return `cluster` as it is: a platform changes no rates of devices."""
        return cluster

    def constants_on(self, cluster: Cluster, model: str = "") -> Constants:
        """Return the constants of the cost model with the platform's stack and its factors for a model."""
        del cluster
        return scaled(self.software_stack.constants(CONSTANTS), self.factors(model))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Platform:
        """Return the platform in a file that `save` wrote. Raises ArgumentError naming file and key."""
        with hinted("`hpgo llm calibrate FILE -o platform.yaml` writes such a file"):
            found = as_path(path, ArgumentError)
            file = printable(str(found))
            top = Section(parse(read_text(found, ArgumentError), file, ArgumentError), file, ArgumentError)
            version = top.get(_KEY, None)
            if version is None:
                top.fail(f"`{_KEY}` is missing, so it is not a platform file", code="wrong_kind_of_file")
            if version != _VERSION:
                top.fail(f"`{_KEY}` is {safe_repr(version)}, but this hpgo reads version {_VERSION}")
            optional = {"model", "custom_stack", "rates"}
            known = {"custom_stack": Stack.from_section(top.within("custom_stack"))} if "custom_stack" in top else {}
            return record(cls, top, optional=optional, known=known)

    def yaml(self) -> str:
        """Return the platform as the text of a YAML file.

        >>> one = Platform(device="A100-80GB", steps=3, residual_sd=0.08, log_sd=0.1, terms=())
        >>> print(one.yaml().splitlines()[:2])
        ['hpgo_platform: 2', 'device: A100-80GB']
        """
        lines = [f"{_KEY}: {_VERSION}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "terms" and value:
                lines += [
                    "terms:",
                    *(
                        f"  - {in_yaml({key: held for key, held in asdict(one).items() if held != ''})}"
                        for one in value
                    ),
                ]
            elif value is not None:
                own = isinstance(value, OwnRates)
                held = value.document() if isinstance(value, Stack) else asdict(value) if own else value
                lines.append(f"{field.name}: {in_yaml(held)}")
        return "\n".join([*lines, ""])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the platform to a file. Raise ArgumentError if the file can't be written."""
        write_text(path, self.yaml(), ArgumentError)


def read_platform(path: str | os.PathLike[str]) -> Platform | DeviceRecord:
    """Return the platform or the device record in a file. Raise ArgumentError naming file and key."""
    found = as_path(path, ArgumentError)
    document = parse(read_text(found, ArgumentError), printable(str(found)), ArgumentError)
    kind = DeviceRecord if isinstance(document, dict) and DEVICE_KEY in document else Platform
    return kind.read(found)


def check_rates(platform: Platform, cluster: Cluster) -> None:
    """Check that a cluster's device has the rates that a platform's factors are relative to. Raises ArgumentError."""
    here, there = OwnRates.of(cluster), platform.rates
    if here != there:
        known = "the rates of the known card"
        raise ArgumentError(
            f"the platform's steps ran on `{shorten(platform.device)}` with {there.named() if there else known}, but"
            f" cluster `{shorten(cluster.name)}` has {here.named() if here else known}",
            "calibrate with steps of this cluster, or leave the platform out",
            code="mismatch",
        )
