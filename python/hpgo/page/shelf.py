"""The plans that the page can draw."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpgo.base.wording import shorten
from hpgo.page.settings import Plans, Size, one_step, unknown_plan
from hpgo.page.store import Store

_LOADED_BYTES = 64 * 2**20
_LEAST_BYTES = 2**20
"""What a small plan counts as: each also is a line of every page."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The file of a plan."""

    title: str
    body: bytes
    size: Size
    """Of one of its steps."""


@dataclass
class Shelf:
    """Plans by their names in addresses: those of the command line, and the last that people loaded in the page."""

    given: dict[str, Loaded] = field(default_factory=dict)
    loaded: Store[str, Loaded] = field(default_factory=lambda: Store(_LOADED_BYTES))

    def give(self, body: bytes, title: str) -> None:
        """Takes a plan that stays; raises HpgoError if it is none, or more than the page takes."""
        plans = Plans()
        name = plans.add(body, title)
        self.given[name] = Loaded(shorten(title), body, one_step(plans.get(name)))

    def load(self, name: str, plan: Loaded) -> None:
        """Takes a plan that stays until others need its place."""
        self.loaded.put(name, plan, max(len(plan.body), _LEAST_BYTES))

    def get(self, name: str) -> Loaded:
        """The plan of that name; raises ArgumentError if it isn't held."""
        found = self.given.get(name) or self.loaded.get(name)
        if found is None:
            raise unknown_plan(name)
        return found

    def titles(self) -> dict[str, str]:
        """What people call the plans, by name."""
        loaded = sorted(self.loaded.items(), key=lambda item: (item[1].title, item[0]))
        return {name: plan.title for name, plan in [*self.given.items(), *loaded]}
