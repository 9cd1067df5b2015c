"""What a request of the plan's page asks for, as it is sent to the process that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.errors import HpgoError

PARTS = ("facts.json", "timeline.svg", "timeline.html", "plan.json")
"""What can be had of a plan."""


@dataclass(frozen=True, slots=True)
class File:
    """A file that someone loaded into the page."""

    kind: str
    """`plan`, `profile` or `cluster`."""
    title: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PlanJob:
    """What one request of the plan's page asks for."""

    wanted: str
    """One of `PARTS`; `search`; or `look`, whether a file is what it should be."""
    items: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, File], ...] = ()
    """Those that the address names, by their names in it."""
    time_limit_s: float = 10.0
    """For a search."""


def mistake(error: HpgoError) -> dict[str, str]:
    """An error in the library's words."""
    return {"message": error.message, "hint": error.hint or ""}
