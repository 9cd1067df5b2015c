"""How far terms are from a platform: its own factors, from steps measured there, and the error that is left."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int, number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.files import as_path
from hpgo.base.messages import printable, safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.llm.validated_features import family

if TYPE_CHECKING:
    import os

    from hpgo.machine.cluster import Cluster

ERRORS = {"A100": 0.14, "H100": 0.15}
"""Mean share by which steps on a device were off what was measured, by constants that were fitted without the platform:
docs/accuracy.md, *by device*. Those that two platforms at least were measured on."""
USUAL_ERROR = 0.12
"""The same of all platforms there, for other devices."""
ERROR_WITH_EXPERTS = 0.17
"""The same of models with experts, left out one by one: docs/accuracy.md, *models with experts*."""
MEMORY_ERROR = 0.05
"""Mean share by which memory was off what was measured: docs/accuracy.md, *goals*."""
_VERSION = 1
_KEY = "hpgo_platform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform(Record):
    """A platform's factors: how many times as long as by terms it takes.

    `hpgo.fit_platform` makes one of measured steps, `save` and `Platform.read` keep it in a file.

    >>> slow = Platform(device="H100-80GB", steps=1, computing=1.2, exchange=1.2, spread=0.1, trust=0.5, error=0.12)
    >>> round(slow.factors[0], 3)
    1.095
    """

    device: str
    """What it was measured on, by its name in clusters."""
    steps: int
    """How many were measured."""
    computing: float
    """How many times as long the measured steps computed."""
    exchange: float
    """How many times as long they exchanged; as `computing`, where steps don't tell them apart."""
    spread: float
    """By which share a step is off these factors, as a standard deviation."""
    trust: float
    """How far the factors are followed, as their exponent: so much of them is the platform's, not of single steps."""
    error: float
    """Mean share by which a step is expected to be off what is foretold with all this."""
    mechanisms: tuple[str, ...] = ()
    """What these steps relied on, as `LlmEstimate.unmeasured` calls it."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("steps of a platform", self.steps)
        for name in ("computing", "exchange"):
            number(f"{name} of a platform", getattr(self, name), above=0)
        number("trust of a platform", self.trust, most=1)
        for name in ("spread", "error"):
            number(f"{name} of a platform", getattr(self, name))

    @property
    def factors(self) -> tuple[float, float]:
        """How many times as long computing and exchange are taken to be."""
        return self.computing**self.trust, self.exchange**self.trust

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Platform:
        """The platform in a file that `save` wrote. Raises ArgumentError naming file and key."""
        with hinted("`hpgo llm calibrate FILE -o platform.yaml` writes such a file"):
            found = as_path(path, ArgumentError)
            file = printable(str(found))
            top = Section(parse(read_text(found, ArgumentError), file, ArgumentError), file, ArgumentError)
            version = top.get(_KEY, None)
            if version is None:
                top.fail(f"`{_KEY}` is missing, so it is no platform", code="wrong_kind_of_file")
            if version != _VERSION:
                top.fail(f"`{_KEY}` is {safe_repr(version)}", f"this hpgo reads version {_VERSION}")
            return record(cls, top, optional={"mechanisms"})

    def yaml(self) -> str:
        """The platform as a file.

        >>> one = Platform(device="A100-80GB", steps=1, computing=1.1, exchange=1.1, spread=0.1, trust=0.5, error=0.12)
        >>> print(one.yaml().splitlines()[:2])
        ['hpgo_platform: 1', 'device: A100-80GB']
        """
        rows = [f"{field.name}: {in_yaml(getattr(self, field.name))}" for field in fields(self)]
        return "\n".join([f"{_KEY}: {_VERSION}", *rows, ""])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it into a file. Raises ArgumentError if that can't be done."""
        write_text(path, self.yaml(), ArgumentError)


def usual_error(cluster: Cluster, *, has_experts: bool = False) -> float:
    """Of steps on a cluster that nobody has measured; of models with experts no less than theirs.

    >>> from hpgo.machine.cluster import Cluster
    >>> usual_error(Cluster.preset("a100:1")) == ERRORS["A100"], usual_error(Cluster.preset("v100:1")) == USUAL_ERROR
    (True, True)
    """
    found = ERRORS.get(family(cluster.nodes[0].device.name), USUAL_ERROR)
    return max(found, ERROR_WITH_EXPERTS) if has_experts else found
