"""The plans that the page can draw."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.page.cache import Store
from hpgo.page.planned.jobs import File
from hpgo.page.settings import Plans, Size, numbers_of, one_step, unknown_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOADED_BYTES = 64 * 2**20
_KINDS = {"model": "profile", "cluster": "cluster"}
"""What the fields of an address may name."""
_LEAST_BYTES = 2**20
"""What a small plan counts as: each also is a line of every page."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The file of a plan."""

    title: str
    body: bytes
    size: Size
    """Of one of its steps."""
    numbers: tuple[tuple[str, str], ...]
    """What it says in place of the page's fields."""


@dataclass
class PlanStore:
    """Plans by their names in addresses: those of the command line, and the last that people loaded in the page."""

    given: dict[str, Loaded] = field(default_factory=dict)
    loaded: Store[str, Loaded] = field(default_factory=lambda: Store(_LOADED_BYTES))
    files: Store[str, File] = field(default_factory=lambda: Store(_LOADED_BYTES))
    """Profiles and clusters that people loaded."""

    def give(self, body: bytes, title: str) -> None:
        """Takes a plan that stays; raises HpgoError if it is none, or more than the page takes."""
        plans = Plans()
        name = plans.add(body, title)
        plan = plans.get(name)
        self.given[name] = Loaded(shorten(title), body, one_step(plan), tuple(numbers_of(plan).items()))

    def load(self, name: str, plan: Loaded) -> None:
        """Takes a plan that stays until others need its place."""
        self.loaded.put(name, plan, max(len(plan.body), _LEAST_BYTES))

    def get(self, name: str) -> Loaded:
        """The plan of that name; raises ArgumentError if it isn't held."""
        found = self.given.get(name) or self.loaded.get(name)
        if found is None:
            raise unknown_plan(name)
        return found

    def add(self, file: File) -> str:
        """Takes a profile or a cluster that was looked at, until others need its place; returns its name."""
        name = hashlib.sha256(f"{file.kind} {file.title} ".encode() + file.body).hexdigest()[:12]
        self.files.put(name, file, max(len(file.body), _LEAST_BYTES))
        return name

    def named(self, items: Iterable[tuple[str, str]]) -> tuple[tuple[str, File], ...]:
        """The files that an address of the plan's page names, each once."""
        found: dict[str, File] = {}
        for field_name, name in items:
            if field_name == "plan" and name:
                plan = self.get(name)
                found[name] = File("plan", plan.title, plan.body)
            elif field_name in _KINDS and (file := self.files.get(name)) and file.kind == _KINDS[field_name]:
                found[name] = file
        return tuple(found.items())

    def titles(self) -> dict[str, str]:
        """What people call the plans, by name."""
        loaded = sorted(self.loaded.items(), key=lambda item: (item[1].title, item[0]))
        return {name: plan.title for name, plan in [*self.given.items(), *loaded]}
