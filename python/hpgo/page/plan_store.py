"""Plans, profiles and clusters that the server holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.page.cache import Store
from hpgo.page.planned.jobs import File
from hpgo.page.settings import Plans, Size, numbers_of, one_step, unknown_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LOADED_BYTES = 64 * 2**20
_KINDS = {"model": "profile", "cluster": "cluster"}
"""Kind of file for each field of an address that can name one."""
_MIN_BYTES = 2**20
"""Smallest size that a file counts with, because each plan is also listed on every page."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The file of a plan, with facts that every page needs."""

    title: str
    body: bytes
    size: Size
    """Size of one step of the plan."""
    numbers: tuple[tuple[str, str], ...]
    """Values of the plan, which the page shows in its fields."""


@dataclass
class PlanStore:
    """Plans by their names in addresses: from the command line, and the last ones loaded into the page."""

    given: dict[str, Loaded] = field(default_factory=dict)
    loaded: Store[str, Loaded] = field(default_factory=lambda: Store(_LOADED_BYTES))
    files: Store[str, File] = field(default_factory=lambda: Store(_LOADED_BYTES))
    """Profiles and clusters that were loaded into the page."""

    def give(self, body: bytes, title: str) -> None:
        """Add a plan that is never dropped. Raises HpgoError for other files, and for plans that are too large."""
        plans = Plans()
        name = plans.add(body, title)
        plan = plans.get(name)
        self.given[name] = Loaded(shorten(title), body, one_step(plan), tuple(numbers_of(plan).items()))

    def load(self, name: str, plan: Loaded) -> None:
        """Add a plan that is dropped when newer ones need its memory."""
        self.loaded.put(name, plan, max(len(plan.body), _MIN_BYTES))

    def get(self, name: str) -> Loaded:
        """Return the plan of that name. Raises ArgumentError if it is unknown or was dropped."""
        found = self.given.get(name) or self.loaded.get(name)
        if found is None:
            raise unknown_plan(name)
        return found

    def add(self, file: File) -> str:
        """Add a checked profile or cluster, and return its name. It is dropped when newer ones need its memory."""
        # The name depends on the content, so loading a file twice gives the same address.
        name = hashlib.sha256(f"{file.kind} {file.title} ".encode() + file.body).hexdigest()[:12]
        self.files.put(name, file, max(len(file.body), _MIN_BYTES))
        return name

    def named(
        self, items: Iterable[tuple[str, str]], kinds: Mapping[str, str] = _KINDS
    ) -> tuple[tuple[str, File], ...]:
        """Return the files that an address names, without duplicates. `kinds` has the kind of file of each field."""
        found: dict[str, File] = {}
        for field_name, name in items:
            if field_name == "plan" and name:
                plan = self.get(name)
                found[name] = File("plan", plan.title, plan.body)
            elif field_name in kinds and (file := self.files.get(name)) and file.kind == kinds[field_name]:
                found[name] = file
        return tuple(found.items())

    def titles(self) -> dict[str, str]:
        """Return the titles of all plans by name."""
        loaded = sorted(self.loaded.items(), key=lambda item: (item[1].title, item[0]))
        return {name: plan.title for name, plan in [*self.given.items(), *loaded]}
