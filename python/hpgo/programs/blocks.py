"""A row of blocks: what frameworks know of a model, namely what comes before its blocks, the blocks, what comes after.

Frameworks build models themselves: so many transformer blocks, what embeds in front of them, what predicts behind. A
profile says the same with its ids: blocks are the layers whose ids are one word with consecutive numbers, `layers.0`
and so on, or several layers a block, `layers.0.attention` and `layers.0.mlp`. A model that isn't such a row is refused,
since a framework would train another one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpgo.model.profile import Profile

_PART = re.compile(r"(.*?)([0-9]+)\.([^0-9].*)", re.DOTALL)
"""`layers.12.mlp`: the word, the number, and which part of the block it is."""
_WHOLE = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_ONE_OUTPUT = "frameworks pass on the output of each block to the next one, and nothing else"
_LEAST_SHARE = 0.3
"""Of the computing that blocks must do: below that, what frameworks call a head or an embedding would be the model."""


@dataclass(frozen=True, slots=True)
class Blocks(Record):
    """The layers of a model as frameworks count them."""

    stem: str
    """What the blocks' ids begin with: `encoder-`."""
    before: tuple[str, ...]
    """Ids of the layers in front of the first block: what embeds, masks, what loads data."""
    blocks: tuple[tuple[str, ...], ...]
    """Ids of the layers of each block."""
    after: tuple[str, ...]
    """Ids of the layers behind the last block: what predicts."""

    def __post_init__(self) -> None:
        if not all(self.blocks):
            raise ArgumentError("a block of a model has no layers", "leave it out")

    @classmethod
    def of(cls, profile: Profile) -> Blocks:
        """Finds them in a profile.

        Raises ArgumentError, with the layer that is in the way, for a model that isn't a row of blocks.

        >>> import hpgo
        >>> found = Blocks.of(hpgo.read_profile("bert-48"))
        >>> found.stem, len(found.blocks), found.before[-1], found.after
        ('encoder-', 48, 'reshape', ('pooler',))
        """
        computing = profile.without_loading()
        seconds = {layer.id: layer.forward_s[-1] + layer.backward_s[-1] for layer in computing.layers}
        return cls.among(seconds, profile.edges, name=profile.name, seconds=seconds)

    @classmethod
    def among(
        cls,
        layers: Iterable[str],
        edges: Iterable[tuple[str, str]] | None = None,
        *,
        name: str,
        seconds: dict[str, float] | None = None,
    ) -> Blocks:
        """Finds them among ids of layers of a profile called `name`.

        Without `edges` each layer feeds the next one; without `seconds` nothing is said of what layers cost.
        """
        ids = list(layers)
        stem, place_of = _places(ids, name)
        number_of = {layer: number for layer, (number, _) in place_of.items()}
        members: dict[int, list[str]] = {}
        for layer, number in number_of.items():
            members.setdefault(number, []).append(layer)
        numbers = sorted(members)
        for lower, higher in pairwise(numbers):
            if higher != lower + 1:
                raise ArgumentError(
                    f"profile `{shorten(name)}` has blocks `{shorten(stem)}{lower}` and `{shorten(stem)}{higher}`, but"
                    " none between them",
                    "give blocks consecutive numbers",
                )
        _check_parts(place_of, stem)
        before, after = _ends(ids, list(pairwise(ids)) if edges is None else list(edges), number_of, stem)
        if seconds is not None:
            _check_cost(seconds, number_of, stem, name)
        return cls(stem, before, tuple(tuple(members[number]) for number in numbers), after)

    def parts(self, *, min_blocks: int = 0) -> list[tuple[str, ...]]:
        """Layers between which a pipeline may be cut, in a row.

        What embeds may be a stage of its own, and so may what predicts, unless each stage has `min_blocks` of 1.
        """
        parts = list(self.blocks)
        if min_blocks:
            parts[0] = self.before + parts[0]
            parts[-1] += self.after
            return parts
        return [*([self.before] if self.before else []), *parts, *([self.after] if self.after else [])]

    def cuts(self, *, min_blocks: int = 0) -> tuple[tuple[str, ...], ...]:
        """For each place between two of `parts`, the layers before it."""
        passed: list[str] = []
        states = []
        for part in self.parts(min_blocks=min_blocks)[:-1]:
            passed += part
            states.append(tuple(passed))
        return tuple(states)

    def counts(self, stages: Iterable[Sequence[str]], framework: str) -> tuple[int, ...]:
        """How many blocks each of `stages` has, given as ids of its layers.

        Raises ArgumentError for a stage that ends inside a block, or apart from what `framework` keeps together.
        """
        allowed = {frozenset(), *map(frozenset, self.cuts()), frozenset(self._all())}
        passed: set[str] = set()
        counts = []
        last_of = {block[-1] for block in self.blocks}
        for number, layers in enumerate(stages):
            passed |= set(layers)
            if frozenset(passed) not in allowed:
                raise ArgumentError(
                    f"stage {number} of the plan ends with layer `{shorten(layers[-1])}`, but {framework} cuts only"
                    f" between blocks `{shorten(self.stem)}…`",
                    "plan for it, with `hpgo plan --framework`, or make layers that belong together one in the profile",
                )
            counts.append(len(last_of & set(layers)))
        return tuple(counts)

    def _all(self) -> list[str]:
        return [*self.before, *(layer for block in self.blocks for layer in block), *self.after]


def _places(ids: list[str], name: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The one word that numbered layers have, and for each the number of its block, and which part of it it is.

    Raises ArgumentError if there are more words.
    """
    words: Counter[str] = Counter()
    places: dict[str, tuple[int, str]] = {}
    strangers: dict[str, str] = {}  # of each word, the first layer
    for layer in ids:
        if len(layer) <= 1000 and (found := _PART.fullmatch(layer) or _WHOLE.fullmatch(layer)):
            word, number, *part = found.groups()
            words[word] += 1
            strangers.setdefault(word, layer)
            places[layer] = int(number), part[0] if part else ""
    hint = "frameworks take one row of blocks, with ids like `layers.0`, between what embeds and what predicts"
    if not places:
        raise ArgumentError(f"profile `{shorten(name)}` has no numbered layers", hint)
    (stem, _), *others = words.most_common()
    if others:
        raise ArgumentError(
            f"layer `{shorten(strangers[others[0][0]])}` of profile `{shorten(name)}` stands beside or between the"
            f" blocks `{shorten(stem)}…`",
            f"{hint}; give a layer that is no block an id without a number",
        )
    return stem, places


def _check_parts(place_of: dict[str, tuple[int, str]], stem: str) -> None:
    """Blocks of several layers have the same ones."""
    parts: dict[int, list[str]] = {}
    for number, part in place_of.values():
        parts.setdefault(number, []).append(part)
    first = min(parts)
    expected = sorted(parts[first])
    for number, these in parts.items():
        if sorted(these) != expected:
            raise ArgumentError(
                f"blocks `{shorten(stem)}{first}` and `{shorten(stem)}{number}` have other layers",
                "frameworks take blocks that are alike: give each the same layers, or make each block one layer",
            )


def _ends(
    ids: list[str], edges: list[tuple[str, str]], number_of: dict[str, int], stem: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layers before and after the row; raises ArgumentError where it isn't one."""
    # Ways are followed outside the row alone: on any way from or to a block, one block is the last.
    fed_by = _reached([(start, end) for start, end in edges if end not in number_of], number_of)
    feeding = _reached([(end, start) for start, end in edges if start not in number_of], number_of)
    outside = [layer for layer in ids if layer not in number_of]
    for layer in outside:
        if layer in fed_by and layer in feeding:
            raise ArgumentError(
                f"layer `{shorten(layer)}` stands between the blocks `{shorten(stem)}…`",
                "make it part of a block: one layer in the profile, or `layers.0.norm` in each block",
            )
    last = max(number_of.values())
    way_out: dict[int, str] = {}  # of each block, the layer whose output leaves it
    for start, end in edges:
        number = number_of.get(start)
        if number is None or number_of.get(end) == number:
            continue
        if number_of.get(end, last + 1) != number + 1:
            raise ArgumentError(
                f"block `{shorten(start)}` feeds `{shorten(end)}`, past the blocks between them", _ONE_OUTPUT
            )
        if way_out.setdefault(number, start) != start:
            raise ArgumentError(
                f"`{shorten(way_out[number])}` and `{shorten(start)}` of one block both feed what comes next",
                _ONE_OUTPUT,
            )
    # What neither feeds blocks nor is fed by them, targets say, belongs to what predicts.
    return (
        tuple(layer for layer in outside if layer in feeding),
        tuple(layer for layer in outside if layer not in feeding),
    )


def _reached(edges: list[tuple[str, str]], starts: Mapping[str, object]) -> set[str]:
    """Where one comes to from `starts` along `edges`, which lead to none of them."""
    following: dict[str, list[str]] = {}
    for start, end in edges:
        following.setdefault(start, []).append(end)
    found: set[str] = set()
    waiting = [start for start in following if start in starts]
    while waiting:
        for end in following.get(waiting.pop(), ()):
            if end not in found:
                found.add(end)
                waiting.append(end)
    return found


def _check_cost(seconds: dict[str, float], number_of: dict[str, int], stem: str, name: str) -> None:
    inside_s = math.fsum(seconds[layer] for layer in number_of)
    total_s = math.fsum(seconds.values())
    if inside_s < _LEAST_SHARE * total_s:
        longest = max((layer for layer in seconds if layer not in number_of), key=lambda layer: seconds[layer])
        raise ArgumentError(
            f"the blocks `{shorten(stem)}…` of profile `{shorten(name)}` take {100 * inside_s / total_s:.0f} % of its"
            f" computing: layers outside them, like `{shorten(longest)}`, would be lost",
            "frameworks take models whose blocks do the work; run this one rank by rank, with `Plan.for_rank`",
        )
