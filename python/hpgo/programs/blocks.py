"""A model as a row of blocks, as frameworks know it: layers before the blocks, the blocks, and layers after them.

Frameworks build models themselves: an embedding, a number of transformer blocks, and a head. A profile shows the same
structure in its layer ids. Blocks are the layers whose ids are one word with consecutive numbers, `layers.0` and so on.
A block may also have several layers, `layers.0.attention` and `layers.0.mlp`. A model without this structure raises an
error, because the framework would train another model.
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
"""Pattern of `layers.12.mlp`: the word, the number of the block, and the part within the block."""
_WHOLE = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_ONE_OUTPUT = "frameworks send the output of each block to the next block, and nothing else"
_MIN_BLOCK_FRACTION = 0.3
"""Smallest fraction of the model's compute time that its blocks must take. Below it, most of the model would be in the
layers that frameworks treat as embedding or head. Not tuned."""


@dataclass(frozen=True, slots=True)
class Blocks(Record):
    """The layers of a model, split into blocks as frameworks do it."""

    stem: str
    """Common start of the blocks' ids, for instance `encoder-`."""
    before: tuple[str, ...]
    """Ids of the layers before the first block: embedding, masks, data loading."""
    blocks: tuple[tuple[str, ...], ...]
    """Ids of the layers of each block, by block."""
    after: tuple[str, ...]
    """Ids of the layers after the last block: the head."""

    def __post_init__(self) -> None:
        if not all(self.blocks):
            raise ArgumentError("a block of a model has no layers", "leave it out")

    @classmethod
    def of(cls, profile: Profile) -> Blocks:
        """Find the blocks of a profile.

        Raises ArgumentError, with the layer that prevents it, if the model is not a row of blocks.

        >>> import hpgo
        >>> found = Blocks.of(hpgo.read_profile("bert-48"))
        >>> found.stem, len(found.blocks), found.before[-1], found.after
        ('encoder-', 48, 'reshape', ('pooler',))
        """
        # Frameworks load data outside the model, so the time of loading layers must not count as lost compute time.
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
        """Find the blocks among the layer ids of a profile called `name`.

        Without `edges`, each layer feeds the next one. Without `seconds`, the share of compute time is not checked.
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
                    "number the blocks without gaps",
                )
        _check_parts(place_of, stem)
        before, after = _ends(ids, list(pairwise(ids)) if edges is None else list(edges), number_of, stem)
        if seconds is not None:
            _check_cost(seconds, number_of, stem, name)
        return cls(stem, before, tuple(tuple(members[number]) for number in numbers), after)

    def parts(self, *, min_blocks: int = 0) -> list[tuple[str, ...]]:
        """Return the parts of the model between which a pipeline may be cut, in order, as layer ids.

        The layers before the blocks may be a stage alone, and so may the layers after them. With `min_blocks` of 1,
        each stage needs a block, so these layers join the first and the last block.
        """
        parts = list(self.blocks)
        if min_blocks:
            parts[0] = self.before + parts[0]
            parts[-1] += self.after
            return parts
        return [*([self.before] if self.before else []), *parts, *([self.after] if self.after else [])]

    def cuts(self, *, min_blocks: int = 0) -> tuple[tuple[str, ...], ...]:
        """Return the layers before each possible cut, one entry for each cut between two of `parts`."""
        passed: list[str] = []
        states = []
        for part in self.parts(min_blocks=min_blocks)[:-1]:
            passed += part
            states.append(tuple(passed))
        return tuple(states)

    def counts(self, stages: Iterable[Sequence[str]], framework: str) -> tuple[int, ...]:
        """Return the number of blocks in each of `stages`, which are given as ids of their layers.

        Raises ArgumentError for a stage that ends inside a block, or splits layers that `framework` keeps together.
        """
        # A cut is valid if the layers before it are an entry of `cuts`, so only the set of layers passed so far
        # matters. The empty and the full set are the ends of the pipeline, which a stage without blocks may repeat.
        allowed = {frozenset(), *map(frozenset, self.cuts()), frozenset(self._all())}
        passed: set[str] = set()
        counts = []
        # A block counts for the stage that has its last layer.
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
    """Return the common word of the numbered layers, and for each of them the number of its block and its part.

    Raises ArgumentError if there is no numbered layer, or more than one word.
    """
    words: Counter[str] = Counter()
    places: dict[str, tuple[int, str]] = {}
    first_layer: dict[str, str] = {}  # by word
    for layer in ids:
        # Limit the length, because the patterns backtrack and the digits are converted to an integer.
        if len(layer) <= 1000 and (found := _PART.fullmatch(layer) or _WHOLE.fullmatch(layer)):
            word, number, *part = found.groups()
            words[word] += 1
            first_layer.setdefault(word, layer)
            places[layer] = int(number), part[0] if part else ""
    hint = "name the blocks `layers.0`, `layers.1` and so on"
    if not places:
        raise ArgumentError(
            f"profile `{shorten(name)}` has no numbered layers, but frameworks need a row of blocks", hint
        )
    (stem, _), *others = words.most_common()
    if others:
        raise ArgumentError(
            f"layer `{shorten(first_layer[others[0][0]])}` of profile `{shorten(name)}` has a number, but is not one of"
            f" the blocks `{shorten(stem)}…`",
            f"{hint}, and give layers that are no blocks ids without numbers",
        )
    return stem, places


def _check_parts(place_of: dict[str, tuple[int, str]], stem: str) -> None:
    """Check that all blocks have the same parts. Raise ArgumentError otherwise."""
    parts: dict[int, list[str]] = {}
    for number, part in place_of.values():
        parts.setdefault(number, []).append(part)
    first = min(parts)
    expected = sorted(parts[first])
    for number, these in parts.items():
        if sorted(these) != expected:
            raise ArgumentError(
                f"blocks `{shorten(stem)}{first}` and `{shorten(stem)}{number}` have different layers",
                "give each block the same layers, or make each block one layer",
            )


def _ends(
    ids: list[str], edges: list[tuple[str, str]], number_of: dict[str, int], stem: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the layers before and after the blocks. Raise ArgumentError if the blocks are not a row."""
    # Follow paths outside the blocks only. Any path from or to a block passes a last block, from which the rest of the
    # path lies outside. So this finds the same layers, and its time is linear in the edges.
    fed_by = _reached([(start, end) for start, end in edges if end not in number_of], number_of)
    feeding = _reached([(end, start) for start, end in edges if start not in number_of], number_of)
    outside = [layer for layer in ids if layer not in number_of]
    for layer in outside:
        if layer in fed_by and layer in feeding:
            raise ArgumentError(
                f"layer `{shorten(layer)}` is between the blocks `{shorten(stem)}…`",
                "make it part of a block: one layer in the profile, or `layers.0.norm` in each block",
            )
    last = max(number_of.values())
    output_layer: dict[int, str] = {}  # by block: the layer whose output leaves it
    for start, end in edges:
        number = number_of.get(start)
        if number is None or number_of.get(end) == number:
            continue
        # Edges to layers after the blocks must come from the last block, so count them as block number `last + 1`.
        if number_of.get(end, last + 1) != number + 1:
            raise ArgumentError(
                f"block `{shorten(start)}` feeds `{shorten(end)}`, past the blocks between them", _ONE_OUTPUT
            )
        if output_layer.setdefault(number, start) != start:
            raise ArgumentError(
                f"`{shorten(output_layer[number])}` and `{shorten(start)}` of one block both feed later layers",
                _ONE_OUTPUT,
            )
    # Layers without any path to or from a block belong to the head: targets, for instance.
    return (
        tuple(layer for layer in outside if layer in feeding),
        tuple(layer for layer in outside if layer not in feeding),
    )


def _reached(edges: list[tuple[str, str]], starts: Mapping[str, object]) -> set[str]:
    """Return the layers that are reachable from `starts` along `edges`. No edge may end in one of `starts`."""
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
    if inside_s < _MIN_BLOCK_FRACTION * total_s:
        longest = max((layer for layer in seconds if layer not in number_of), key=lambda layer: seconds[layer])
        raise ArgumentError(
            f"the blocks `{shorten(stem)}…` of profile `{shorten(name)}` take {100 * inside_s / total_s:.0f} % of its"
            f" compute time, but {100 * _MIN_BLOCK_FRACTION:.0f} % are needed: frameworks drop layers outside them,"
            f" like `{shorten(longest)}`",
            "run the plan rank by rank, with `Plan.for_rank`",
        )
