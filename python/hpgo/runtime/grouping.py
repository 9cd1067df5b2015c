"""What a layer of an exported model is: an operation, the operations of a module, or those of a repeated block.

Modules are known by their paths, such as `encoder.layer.3.attention`. Blocks are the numbered modules of a list:
`encoder.layer.3` is one, with all that it holds. Where there are few of them and they hold lists of modules that are
made of others, as the stages of a ResNet do, those are the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Grain = Literal["block", "module", "op", "quarter"]
"""What a layer is; `quarter`, of a block, in built-in transformers alone."""
GRAINS = ("block", "module", "op")
"""What a layer may be."""
QUARTER = "quarter"
"""Likewise, in built-in models of transformers' blocks."""
_FEW = 8
"""Blocks; with fewer, smaller ones are looked for within them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation is."""

    path: str
    """Of the innermost module that runs it; empty for the model itself."""
    has_weights: bool
    """Whether it reads parameters."""


def grouped(
    layers: Sequence[list[Any]], places: Sequence[Sequence[Place]], by: str
) -> tuple[list[str], list[list[Any]]]:
    """Ids and operations of layers by `module` or by `block`; each of `layers` stays whole.

    Operations outside of such modules belong to the layer before them, and so do blocks and modules beside them that
    hold no weights, where layers are blocks; the first ones belong to the layer behind them.

    >>> places = [[Place(path, True)] for path in ("embed", "layer.0.up", "layer.0.down", "layer.1.up", "head")]
    >>> grouped([["a"], ["b"], ["c"], ["d"], ["e"]], places, "block")
    (['embed', 'layer.0', 'layer.1', 'head'], [['a'], ['b', 'c'], ['d'], ['e']])
    """
    paths = {place.path for those in places for place in those}
    blocks = _blocks(paths) if by == "block" else set()
    ids: list[str] = []
    made: list[list[Any]] = []
    last, waiting = None, []
    weighty = {_key(place.path, blocks, by) for those in places for place in those if place.has_weights}
    for operations, those in zip(layers, places, strict=True):
        keys = [key for key in (_key(place.path, blocks, by) for place in those) if key]
        own = [key for key in keys if by == "module" or key in weighty]
        if not own and not made:
            waiting += operations
        elif not own or own[0] == last:
            made[-1] += operations
        else:
            ids.append(own[0])
            made.append([*waiting, *operations])
            waiting = []
        last = own[-1] if own else last
    if waiting:
        ids, made = [""], [waiting]
    return _unlike(ids), made


def _key(path: str, blocks: set[str], by: str) -> str:
    """The layer that a module belongs to; empty where its operations are between others."""
    if by == "module" or not blocks:
        return path
    steps = path.split(".")
    for count in range(1, len(steps) + 1):
        if (found := ".".join(steps[:count])) in blocks:
            return found
    # Beside the blocks: the largest module that holds none of them.
    for count in range(1, len(steps) + 1):
        found = ".".join(steps[:count])
        if not any(block.startswith(f"{found}.") for block in blocks):
            return found
    return ""


def _blocks(paths: set[str]) -> set[str]:
    """Paths of the blocks; none where no module is numbered."""
    level, blocks = 0, _numbered(paths, 1)
    while blocks and len(blocks) < _FEW:
        level += 1
        within = {one for one in _numbered(paths, level + 1) if any(path.startswith(f"{one}.") for path in paths)}
        if not within:
            break
        blocks = {one for one in blocks if not any(path.startswith(f"{one}.") for path in within)} | within
    return blocks


def _numbered(paths: set[str], level: int) -> set[str]:
    """Modules whose paths end in the number that is the `level`th on the way to them, of lists of at least two."""
    found = set()
    for path in paths:
        steps = path.split(".")
        numbers = [at for at, step in enumerate(steps) if step.isdecimal()]
        if len(numbers) >= level:
            found.add(".".join(steps[: numbers[level - 1] + 1]))
    lists = [one.rpartition(".")[0] for one in found]
    return {one for one in found if lists.count(one.rpartition(".")[0]) > 1}


def _unlike(ids: list[str]) -> list[str]:
    """Ids of which each is there once: a module that runs again has a number behind it."""
    counts: dict[str, int] = {}
    unlike = []
    for one in ids:
        counts[one] = counts.get(one, 0) + 1
        name = one or "model"
        unlike.append(name if counts[one] == 1 else f"{name}#{counts[one]}")
    return unlike
