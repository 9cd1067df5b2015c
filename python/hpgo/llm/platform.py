"""Platforms: constants of the cost model fitted to one GPU type, software stack and network, with their error."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import pi, sqrt
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.files import as_path
from hpgo.base.messages import printable, safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.device_record import KEY as DEVICE_KEY
from hpgo.llm.device_record import DeviceRecord

if TYPE_CHECKING:
    import os

    from hpgo.llm.constants import Constants
    from hpgo.machine.cluster import Cluster

MEMORY_ERROR = 0.05
"""Mean relative error of memory (docs/accuracy.md)."""
_VERSION = 1
_KEY = "hpgo_platform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform(Record):
    """Factors between measured and estimated time on one GPU type, software stack and network.

    `hpgo.fit_platform` computes them from measured steps. `save` and `Platform.read` store them in a file.

    >>> slow = Platform(device="H100-80GB", steps=1, computing=1.2, exchange=1.2, spread=0.1, trust=0.5, error=0.12)
    >>> round(slow.factors[0], 3)
    1.095
    """

    device: str
    """Device of the measured steps, by its name in clusters."""
    steps: int
    """Number of measured steps."""
    computing: float
    """Measured over estimated time of computation."""
    exchange: float
    """Measured over estimated time of communication; equal to `computing` if the steps do not separate the two."""
    spread: float
    """Standard deviation of single steps around these factors, as a share of the step."""
    trust: float
    """Exponent that is applied to the factors: the share of the deviation that belongs to the platform, not to single
    steps."""
    error: float
    """Expected mean relative error of a step time that is predicted with these factors."""
    mechanisms: tuple[str, ...] = ()
    """Features that the measured steps used, by the names of `LlmEstimate.unvalidated_features`."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("steps of a platform", self.steps)
        for name in ("computing", "exchange"):
            number(f"{name} of a platform", getattr(self, name), above=0)
        number("trust of a platform", self.trust, most=1)
        for name in ("spread", "error"):
            number(f"{name} of a platform", getattr(self, name))

    @property
    def log_sd(self) -> float:
        """Standard deviation of the logarithm of measured over estimated time of a new step."""
        return self.error / sqrt(2 / pi)

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of computation and of communication that estimates use: the measured ones to the power of `trust`."""
        # Shrinkage: a few steps determine their platform only in part, so their mean is pulled towards 1.
        return self.computing**self.trust, self.exchange**self.trust

    def on(self, cluster: Cluster) -> Cluster:
        """Return `cluster` as it is: a platform changes no rates of devices."""
        return cluster

    def constants_on(self, cluster: Cluster) -> Constants:
        """Return the constants of the cost model, slowed down by the platform's factors."""
        del cluster
        return CONSTANTS.slower(*self.factors)

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
                top.fail(f"`{_KEY}` is {safe_repr(version)}", f"this hpgo reads version {_VERSION}")
            # Files from before features were recorded lack `mechanisms`. Then no feature counts as validated there.
            return record(cls, top, optional={"mechanisms"})

    def yaml(self) -> str:
        """Return the platform as the text of a YAML file.

        >>> one = Platform(device="A100-80GB", steps=1, computing=1.1, exchange=1.1, spread=0.1, trust=0.5, error=0.12)
        >>> print(one.yaml().splitlines()[:2])
        ['hpgo_platform: 1', 'device: A100-80GB']
        """
        rows = [f"{field.name}: {in_yaml(getattr(self, field.name))}" for field in fields(self)]
        return "\n".join([f"{_KEY}: {_VERSION}", *rows, ""])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the platform to a file. Raise ArgumentError if the file can't be written."""
        write_text(path, self.yaml(), ArgumentError)


def read_platform(path: str | os.PathLike[str]) -> Platform | DeviceRecord:
    """Return the platform or the device record in a file. Raise ArgumentError naming file and key."""
    found = as_path(path, ArgumentError)
    document = parse(read_text(found, ArgumentError), printable(str(found)), ArgumentError)
    kind = DeviceRecord if isinstance(document, dict) and DEVICE_KEY in document else Platform
    return kind.read(found)
