"""Grouping of an exported model's operations into layers: by operation, by module, or by repeated block.

Modules are known by their paths, such as `encoder.layer.3.attention`. Blocks are the numbered modules of a list:
`encoder.layer.3` is one, with all that it holds. If there are few of them and they hold lists of modules with modules
inside, like the stages of a ResNet, then the inner modules are the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Grain = Literal["block", "module", "op", "quarter"]
"""Unit of a layer; `quarter` (of a block) only in built-in transformers."""
GRAINS = ("block", "module", "op")
"""Units of a layer that every exported model has."""
QUARTER = "quarter"
"""Unit of a layer that only built-in transformers have: a quarter of a block."""
_FEW = 8
"""Number of blocks below which smaller blocks are looked for inside them. Not tuned."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an operation in the model's modules."""

    path: str
    """Path of the innermost module that runs the operation; empty for the model itself."""
    has_weights: bool
    """Whether the operation reads parameters."""


def grouped(
    layers: Sequence[list[Any]], places: Sequence[Sequence[Place]], by: str
) -> tuple[list[str], list[list[Any]]]:
    """Return ids and operations of layers by `module` or by `block`. Each of `layers` stays whole.

    Operations outside of such modules belong to the layer before them, and the first ones to the layer behind them. If
    layers are blocks, the same holds for modules beside the blocks that have no weights.

    >>> places = [[Place(path, True)] for path in ("embed", "layer.0.up", "layer.0.down", "layer.1.up", "head")]
    >>> grouped([["a"], ["b"], ["c"], ["d"], ["e"]], places, "block")
    (['embed', 'layer.0', 'layer.1', 'head'], [['a'], ['b', 'c'], ['d'], ['e']])
    """
    paths = {place.path for those in places for place in those}
    blocks = _blocks(paths) if by == "block" else set()
    ids: list[str] = []
    groups: list[list[Any]] = []
    last, waiting = None, []
    weighty = {_key(place.path, blocks, by) for those in places for place in those if place.has_weights}
    for operations, those in zip(layers, places, strict=True):
        keys = [key for key in (_key(place.path, blocks, by) for place in those) if key]
        # Blocks are for pipeline cuts. A separate layer without weights, such as an activation between blocks, would be
        # of no use.
        own = [key for key in keys if by == "module" or key in weighty]
        if not own and not groups:
            waiting += operations
        elif not own or own[0] == last:
            groups[-1] += operations
        else:
            ids.append(own[0])
            groups.append([*waiting, *operations])
            waiting = []
        last = own[-1] if own else last
    if waiting:
        ids, groups = [""], [waiting]
    return _unlike(ids), groups


def _key(path: str, blocks: set[str], by: str) -> str:
    """Return the layer that a module belongs to; empty if its operations are outside of all layers."""
    if by == "module" or not blocks:
        return path
    steps = path.split(".")
    for count in range(1, len(steps) + 1):
        if (found := ".".join(steps[:count])) in blocks:
            return found
    # Outside of the blocks, such as embeddings and heads, take the largest module that contains none of them.
    for count in range(1, len(steps) + 1):
        found = ".".join(steps[:count])
        if not any(block.startswith(f"{found}.") for block in blocks):
            return found
    return ""


def _blocks(paths: set[str]) -> set[str]:
    """Return the paths of the blocks; none if no module is numbered."""
    level, blocks = 0, _numbered(paths, 1)
    while blocks and len(blocks) < _FEW:
        level += 1
        within = {one for one in _numbered(paths, level + 1) if any(path.startswith(f"{one}.") for path in paths)}
        if not within:
            break
        blocks = {one for one in blocks if not any(path.startswith(f"{one}.") for path in within)} | within
    return blocks


def _numbered(paths: set[str], level: int) -> set[str]:
    """Return modules whose path ends in its number `level`, counted from 1, if their list has at least two members."""
    found = set()
    for path in paths:
        steps = path.split(".")
        numbers = [at for at, step in enumerate(steps) if step.isdecimal()]
        if len(numbers) >= level:
            found.add(".".join(steps[: numbers[level - 1] + 1]))
    # A list of one module is no repetition, often just an `nn.Sequential` around it.
    lists = [one.rpartition(".")[0] for one in found]
    return {one for one in found if lists.count(one.rpartition(".")[0]) > 1}


def _unlike(ids: list[str]) -> list[str]:
    """Return unique ids: a module that runs again gets a number appended."""
    counts: dict[str, int] = {}
    unlike = []
    for one in ids:
        counts[one] = counts.get(one, 0) + 1
        name = one or "model"
        unlike.append(name if counts[one] == 1 else f"{name}#{counts[one]}")
    return unlike
