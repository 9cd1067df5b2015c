"""What becomes of an input: trees of JSON change at their nodes, lists of words at their words, and all at its bytes.

Bytes alone hardly ever get past the parser, and a parser's errors are not what is looked for.
"""

from __future__ import annotations

import copy
import json
import random
import re
from typing import TYPE_CHECKING, Any

import atheris

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = b"\x1e"
"""Stands between the files of an input that is several."""
_STRANGE = (
    *(None, True, False, 0, 1, -1, 2, 9, 255, 2**16, 10**6, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**400),
    *(-0.0, 0.5, -0.5, 1e-9, 5e-324, 1e10, 1.7e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "0", "\0", "\n", "é", "\ud800", "nan", "1e999", "9" * 400, "a" * 5000),
    *([], {}, [[]], [0], [None], {"a": 1}, [[[[[[[[]]]]]]]]),
)  # fmt: skip
_PIECES = (
    *(b"nan", b"-1", b"1e999", b"0x10", b"9" * 400, b" -- ", b"\n", b"\r\n", b"\t", b"\0", b"\xff", b"\xef\xbb\xbf"),
    *(b"{", b"[", b"}", b"]", b"&a ", b"*a", b"!!binary ", b"<<: ", b"? ", b"- ", b": ", b"#", b"'", b'"', b"|", b">"),
    *(b"\\ud800", b"---\n", b"[" * 1000, b'{"a":' * 1000),
)  # fmt: skip


def documents(data: bytes, maximum: int, seed: int) -> bytes:
    """One of the documents in `data`, as a tree if it is JSON, else as text."""
    chance = random.Random(seed)
    parts = data.split(PARTS)
    at = chance.randrange(len(parts))
    try:
        document = json.loads(parts[at]) if chance.random() < 0.9 else None
    except (ValueError, RecursionError):
        document = None
    parts[at] = injured(parts[at], maximum, chance) if document is None else json.dumps(tree(document, chance)).encode()
    return PARTS.join(parts)[:maximum]


def words(data: bytes, maximum: int, seed: int) -> bytes:
    """Lines of words that commas or blanks separate: words are moved, doubled, left out, and their numbers changed."""
    chance = random.Random(seed)
    if chance.random() < 0.1:
        return injured(data, maximum, chance)
    lines = [re.split(rb"([, ])", line) for line in data.split(b"\n")]
    for _ in range(chance.choice((1, 1, 2, 4))):
        line, other = chance.choice(lines), chance.choice(lines)
        at, to = chance.randrange(len(line) or 1), chance.randrange(len(other) or 1)
        match chance.randrange(8):
            case 0 if line and other:
                line[at], other[to] = other[to], line[at]
            case 1:
                other[to:to] = line[at : at + 2]
            case 2:
                del line[at : at + 2]
            case 3:
                lines.insert(chance.randrange(len(lines)), list(line))
            case 4 if len(lines) > 1:
                lines.remove(line)
            case 5 if line:
                line[at] = chance.choice((b"SEND_F", b"UNSHARD", b"(0F1;0B0)OVERLAP_F_B", b"4294967295F0", b"-1F0"))
            case 6 if line:
                line[at] = injured(line[at], maximum, chance)
            case _ if line:
                line[at] = re.sub(
                    rb"\d+",
                    lambda found: b"%d" % max(0, int(found[0][:18]) + chance.choice((-1, 1, 2, 9**8))),
                    line[at],
                )
    return b"\n".join(b"".join(line) for line in lines)[:maximum]


def tree(document: Any, chance: random.Random) -> Any:
    """`document`, changed in one to four places."""
    top = [document]
    for _ in range(chance.choice((1, 1, 2, 4))):
        full = [inside for inside in _collections(top) if inside]
        # Collections are chosen first, so that what long columns stand beside has its turn.
        inside = chance.choice(full)
        key = chance.choice(_keys(inside))
        match chance.randrange(8):
            case 0 | 1:
                inside[key] = copy.deepcopy(chance.choice(_STRANGE))
            case 2:
                other = chance.choice(full)
                inside[key] = copy.deepcopy(other[chance.choice(_keys(other))])
            case 3 if inside is not top:
                del inside[key]
            case 4 if isinstance(inside, list) and inside is not top:
                inside.insert(key, copy.deepcopy(inside[key]))
            case 4 | 5 if isinstance(inside, dict):
                inside[chance.choice(("", "a", "é" * 200, f"{key}_s", key.upper()))] = inside.pop(key)
            case _:
                inside[key] = _near(inside[key], chance)
    return top[0]


def _collections(top: list[Any]) -> Iterator[Any]:
    waiting = [top]
    while waiting:
        inside = waiting.pop()
        yield inside
        values = inside.values() if isinstance(inside, dict) else inside
        waiting += [value for value in values if isinstance(value, dict | list)]


def _keys(inside: Any) -> Any:
    return list(inside) if isinstance(inside, dict) else range(len(inside))


def _near(value: Any, chance: random.Random) -> Any:
    """Something of the kind that `value` is of."""
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((value + 1, value - 1, -value, 2 * value, float(value) if abs(value) < 2**99 else 0.5))
        case float():
            return chance.choice(
                (value * chance.random(), value * 2, -value, value * 1e12, value * 1e-12, 1e300 * value)
            )
        case str():
            return injured(value.encode(errors="replace"), 200, chance).decode(errors="replace")
        case list():
            return chance.choice((value[:-1], value[1:], value * 2, value[::-1], [*value, []], value[:1] * 100))
        case dict():
            return list(value.values()) if chance.random() < 0.3 else dict(reversed(value.items()))
        case _:
            return chance.choice((0, 1.0, "", [], {}))


def injured(data: bytes, maximum: int, chance: random.Random) -> bytes:
    """`data` as libFuzzer mutates it, or with a piece in it that formats find special."""
    if chance.random() < 0.5:
        at = chance.randrange(len(data) + 1)
        return (data[:at] + chance.choice(_PIECES) + data[at + chance.choice((0, 0, 1, 9)) :])[:maximum]
    return atheris.Mutate(data, max(maximum, len(data), 1))
