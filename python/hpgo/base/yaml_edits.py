"""Changes of single values in a YAML text that keep all other text, comments and order."""

from __future__ import annotations

import copy
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.documents import parse_yaml
from hpgo.base.quoting import in_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.errors import HpgoError

_WIDTH = 100
"""Width of lines of numbers, in characters."""


@dataclass(slots=True)
class _Node:
    """A value and its position in the text."""

    start: int
    end: int
    """End offset in the text. For a block collection, this is the end of its last value."""
    column: int
    is_flow: bool
    """Whether the value is a scalar or in flow style, with brackets. Block collections have one item per line."""
    items: dict[str, _Node] | list[_Node] | None
    """Children of a collection, None for scalars."""


def put(text: str, path: Sequence[str | int], value: object, file: str, error: type[HpgoError]) -> str:
    r"""Return `text` with `value` at `path`, a sequence of keys and item numbers. Missing parents are added.

    Values are mappings, lists, text and numbers. To append to a list, use the number after its last item. Raises
    `error` naming `file` if the text is not YAML that hpgo reads, or contains aliases, since the value of an alias is
    defined elsewhere in the text.

    >>> from hpgo.errors import HpgoError
    >>> print(put("a: 1 # one\nb:\n  c: [2]\n\n# end\n", ["b", "d"], {"e": [3, 4.5]}, "x.yml", HpgoError), end="")
    a: 1 # one
    b:
      c: [2]
      d:
        e: [3, 4.5]
    <BLANKLINE>
    # end
    """
    before = parse_yaml(text, file, error)
    root = _tree(text, file, error)
    if root is None or root.items is None:
        lines = _block(_nested(path, value), 0)
        changed = "\n".join([text.rstrip("\n"), *lines, ""] if text else [*lines, ""])
    else:
        changed = _changed(text, root, path, value)
    # Parse the result and compare it with the intended document, so that an edit never corrupts a file silently.
    if parse_yaml(changed, file, error) != _with(before, path, value):
        where = " → ".join(f"`{step}`" for step in path)
        raise error(f"{file}: can't tell where {where} belongs in this text", "write it as YAML without brackets")
    return changed


def _tree(text: str, file: str, error: type[HpgoError]) -> _Node | None:
    """Return the tree of the document in `text`, which was parsed without errors before."""
    import yaml

    root: _Node | None = None
    open_: list[_Node] = []
    keys: list[str | None] = []
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        begin: Any = event.start_mark
        end: Any = event.end_mark
        if isinstance(event, yaml.AliasEvent):
            raise error(
                f"{file}, line {begin.line + 1}: the alias `*{event.anchor}` stands for text elsewhere",
                "write the value out: what is added to one place would be added to both",
            )
        if isinstance(event, yaml.CollectionEndEvent):
            closed = open_.pop()
            keys.pop()
            if closed.is_flow:
                closed.end = end.index
            _stretch(open_, closed.end)
            continue
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            continue
        is_scalar = isinstance(event, yaml.ScalarEvent)
        if isinstance(event, yaml.ScalarEvent):
            _stretch(open_, end.index)
            if open_ and isinstance(open_[-1].items, dict) and keys[-1] is None:
                keys[-1] = event.value
                continue
        node = _Node(
            begin.index,
            end.index,
            begin.column,
            is_scalar or bool(getattr(event, "flow_style", False)),
            None if is_scalar else {} if isinstance(event, yaml.MappingStartEvent) else [],
        )
        if not open_:
            root = node
        elif isinstance(held := open_[-1].items, dict):
            held[keys[-1] or ""] = node
            keys[-1] = None
        elif held is not None:
            held.append(node)
        if not is_scalar:
            open_.append(node)
            keys.append(None)
    return root


def _stretch(blocks: list[_Node], end: int) -> None:
    for one in blocks:
        one.end = max(one.end, end)


def _changed(text: str, node: _Node, path: Sequence[str | int], value: object) -> str:
    """Return `text` with `value` at `path` below the collection `node`."""
    child = _child(node, path[0])
    if child is None:
        return _added(text, node, path[0], _nested(path[1:], value))
    if len(path) > 1 and child.items is not None:
        return _changed(text, child, path[1:], value)
    return _replaced(text, node, child, _nested(path[1:], value))


def _child(node: _Node, step: str | int) -> _Node | None:
    if isinstance(node.items, dict):
        return node.items.get(str(step))
    return node.items[step] if isinstance(step, int) and node.items is not None and step < len(node.items) else None


def _added(text: str, node: _Node, step: str | int, value: object) -> str:
    """Return `text` with an item added after the last one of the collection `node`."""
    is_mapping = isinstance(node.items, dict)
    if node.is_flow:
        item = f"{in_yaml(step)}: {in_yaml(value)}" if is_mapping else in_yaml(value)
        last = max((one.end for one in _values(node)), default=None)
        return _spliced(text, node.start + 1, item) if last is None else _spliced(text, last, f", {item}")
    lines = _block({str(step): value} if is_mapping else [value], node.column)
    return _behind(text, node.end, lines)


def _replaced(text: str, parent: _Node, child: _Node, value: object) -> str:
    """Return `text` with `child` replaced by `value`."""
    is_empty = child.start == child.end
    if is_empty and not parent.is_flow and isinstance(value, dict):
        return _behind(text, child.end, _block(value, parent.column + 2))
    # A block list may be indented as little as its key. The flow text that replaces it must be indented further.
    margin = " " * (1 if is_empty else 0 if child.is_flow else max(0, parent.column + 2 - child.column))
    first = child.column + len(margin)
    flow = in_yaml(value) if parent.is_flow else "\n".join(_wrapped(value, parent.column + 2, first=first))
    return _spliced(text, child.start, margin + flow, until=child.end)


def _behind(text: str, at: int, lines: list[str]) -> str:
    """Return `text` with `lines` inserted after the line that contains offset `at`."""
    if at and text[at - 1] == "\n":  # a block scalar ends after its newline
        at -= 1
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    if end and text[end - 1] == "\r":
        end -= 1
    return _spliced(text, end, "\n" + "\n".join(lines))


def _spliced(text: str, at: int, piece: str, *, until: int | None = None) -> str:
    newline = "\r\n" if "\r\n" in text else "\n"
    return text[:at] + piece.replace("\n", newline) + text[at if until is None else until :]


def _values(node: _Node) -> list[_Node]:
    return list(node.items.values()) if isinstance(node.items, dict) else list(node.items or ())


def _nested(path: Sequence[str | int], value: object) -> object:
    """Return `value` wrapped in one mapping or one-item list for each step of `path`."""
    for step in reversed(path):
        value = {step: value} if isinstance(step, str) else [value]
    return value


def _with(document: object, path: Sequence[str | int], value: object) -> object:
    """Return a copy of `document` with `value` at `path`."""
    if not path:
        return value
    changed: Any = copy.deepcopy(document)
    step, missing = path[0], object()
    if isinstance(changed, list) and isinstance(step, int):
        below = changed[step] if step < len(changed) else missing
        new = _nested(path[1:], value) if below is missing else _with(below, path[1:], value)
        return [*changed[:step], new, *changed[step + 1 :]]
    if isinstance(changed, dict) and isinstance(step, str):
        below = changed.get(step, missing)
        changed[step] = _nested(path[1:], value) if below is missing else _with(below, path[1:], value)
        return changed
    return _nested(path, value)


def _block(value: object, column: int) -> list[str]:
    """Return the lines of a collection in block style. Lists without mappings are written in flow style."""
    margin = " " * column
    lines: list[str] = []
    if isinstance(value, list):
        for item in value:
            first, *rest = _block(item, column + 2) if isinstance(item, dict) and item else _wrapped(item, column + 2)
            lines += [f"{margin}- {first.lstrip()}", *rest]
    elif isinstance(value, dict):
        for key, item in value.items():
            head = f"{margin}{in_yaml(key)}:"
            if isinstance(item, dict) and item:
                lines += [head, *_block(item, column + 2)]
            elif isinstance(item, list) and any(isinstance(one, dict) for one in item):
                lines += [head, *_block(item, column)]
            else:
                first, *rest = _wrapped(item, column + 2, first=len(head) + 1)
                lines += [f"{head} {first}", *rest]
    return lines


def _wrapped(value: object, column: int, *, first: int | None = None) -> list[str]:
    """Return the lines of `value` in flow style. Long lists of numbers are wrapped. `first` is the start column."""
    text = in_yaml(value)
    if not isinstance(value, list) or not all(isinstance(one, int | float) for one in value):
        return [text]
    first = column if first is None else first
    lines = textwrap.wrap(text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * column)
    return [lines[0].lstrip(), *lines[1:]]
