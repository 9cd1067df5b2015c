"""Requests of the plan page, in the form that is sent to the worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpgo.errors import HpgoError

PARTS = ("facts.json", "timeline.svg", "timeline.html", "plan.json")
"""Parts of a plan that the page can request."""


@dataclass(frozen=True, slots=True)
class File:
    """A file that was loaded into the page."""

    kind: str
    """`plan`, `profile`, `cluster`, or `config` for a transformer."""
    title: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PlanJob:
    """One request of the plan page."""

    wanted: str
    """One of `PARTS`, `search`, or `look`, which checks that a file is of its kind."""
    items: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, File], ...] = ()
    """Files that the address names, by their names in it."""
    time_limit_s: float = 10.0
    """Time limit of a search in seconds."""


def mistake(error: HpgoError) -> dict[str, str]:
    """Return message and hint of an error for the page."""
    return {"message": error.message, "hint": error.hint or ""}
