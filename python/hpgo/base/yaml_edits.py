"""Changes single values of a YAML text; every other letter of it stays as it is, comments and order too."""

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
"""Of lines of numbers."""


@dataclass(slots=True)
class _Node:
    """A value, and where it stands in the text."""

    start: int
    end: int
    """Of a block: the end of its last value."""
    column: int
    is_flow: bool
    """Whether it has brackets; a block has its items on lines of their own."""
    items: dict[str, _Node] | list[_Node] | None
    """None for scalars."""


def put(text: str, path: Sequence[str | int], value: object, file: str, error: type[HpgoError]) -> str:
    r"""`text` with `value` at `path`: names of keys and numbers of items; whatever is missing on the way is added.

    Values are mappings, lists, text and numbers; a list is added to by the number behind its last item. Raises `error`
    naming `file` if the text is no YAML that is read here, or holds aliases: what is behind them stands elsewhere.

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
    if parse_yaml(changed, file, error) != _with(before, path, value):
        where = " → ".join(f"`{step}`" for step in path)
        raise error(f"{file}: can't tell where {where} belongs in this text", "write it as YAML without brackets")
    return changed


def _tree(text: str, file: str, error: type[HpgoError]) -> _Node | None:
    """The document in `text`, which has been parsed before."""
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
    """`text` with `value` at `path` below the collection `node`."""
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
    """`text` with one item more in the collection `node`, behind the last."""
    is_mapping = isinstance(node.items, dict)
    if node.is_flow:
        item = f"{in_yaml(step)}: {in_yaml(value)}" if is_mapping else in_yaml(value)
        last = max((one.end for one in _values(node)), default=None)
        return _spliced(text, node.start + 1, item) if last is None else _spliced(text, last, f", {item}")
    lines = _block({str(step): value} if is_mapping else [value], node.column)
    return _behind(text, node.end, lines)


def _replaced(text: str, parent: _Node, child: _Node, value: object) -> str:
    """`text` with `value` in the place of `child`."""
    is_empty = child.start == child.end
    if is_empty and not parent.is_flow and isinstance(value, dict):
        return _behind(text, child.end, _block(value, parent.column + 2))
    # A list on lines of its own may begin as far to the left as its key; what takes its place may not.
    margin = " " * (1 if is_empty else 0 if child.is_flow else max(0, parent.column + 2 - child.column))
    first = child.column + len(margin)
    flow = in_yaml(value) if parent.is_flow else "\n".join(_wrapped(value, parent.column + 2, first=first))
    return _spliced(text, child.start, margin + flow, until=child.end)


def _behind(text: str, at: int, lines: list[str]) -> str:
    """`text` with `lines` below the one in which `at` stands."""
    if at and text[at - 1] == "\n":  # what ends there has taken its line with it
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
    """What has nothing but `value`, at `path`."""
    for step in reversed(path):
        value = {step: value} if isinstance(step, str) else [value]
    return value


def _with(document: object, path: Sequence[str | int], value: object) -> object:
    """`document` with `value` at `path`."""
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
    """Lines of a mapping, or of a list of items; lists without mappings stand in brackets."""
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
    """`value` with brackets, a list of many numbers on several lines; `first` is the column of its first letter."""
    text = in_yaml(value)
    if not isinstance(value, list) or not all(isinstance(one, int | float) for one in value):
        return [text]
    first = column if first is None else first
    lines = textwrap.wrap(text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * column)
    return [lines[0].lstrip(), *lines[1:]]
