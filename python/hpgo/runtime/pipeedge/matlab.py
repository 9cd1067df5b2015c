"""Structures in files of MATLAB, as ImageNet's development kit has one: numbers and texts of an array of them.

After 128 bytes of head, a file is a row of elements: a type, a length, and so many bytes, up to a multiple of eight.
Elements may be compressed, and short ones stand in the second half of their own head.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
_TEXTS = {2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le", 18: "utf-32-le"}
_STRUCTURE, _TEXT = 2, 4
"""Classes of matrices; most others hold numbers."""


def structures(raw: bytes, name: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Of each structure in the array `name`, those of its `fields` that are a number or a text.

    Raises FileError for bytes that are no such file.
    """
    try:
        for kind, data in _elements(raw[_HEAD_BYTES:]):
            found = _structures(data, name, fields) if kind == _MATRIX else None
            if found is not None:
                return found
    except (struct.error, zlib.error, UnicodeDecodeError, IndexError, ValueError) as failure:
        raise FileError(
            f"the MATLAB file is damaged: {failure}", "fetch the archive again", code="damaged_file"
        ) from failure
    raise FileError(f"the MATLAB file has no structures `{name}`", "fetch the archive again")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Types and bytes of the elements that stand behind each other."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # a short one
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        inner = data[at + 8 : at + 8 + size]
        if len(inner) < size:
            raise ValueError(f"an element of {size} bytes ends after {len(inner)}")
        if kind == _COMPRESSED:
            yield from _elements(zlib.decompress(inner))
            at += 8 + size
        else:
            yield kind, inner
            at += 8 + size + -size % 8


def _structures(data: bytes, name: str, fields: tuple[str, ...]) -> list[dict[str, Any]] | None:
    flags, _, called, *rest = _elements(data)
    if flags[1][0] != _STRUCTURE or called[1].decode("latin-1") != name:
        return None
    width = struct.unpack("<i", rest[0][1])[0]
    names = [rest[1][1][at : at + width].split(b"\0")[0].decode("latin-1") for at in range(0, len(rest[1][1]), width)]
    cells = [one for _, one in rest[2:]]
    return [
        {field: _value(cell) for field, cell in zip(names, cells[at : at + len(names)], strict=True) if field in fields}
        for at in range(0, len(cells), len(names))
    ]


def _value(data: bytes) -> Any:
    """A number, a text, or None for what is neither."""
    flags, _, _, *rest = _elements(data)
    if not rest:
        return None
    kind, held = rest[0]
    if flags[1][0] == _TEXT:
        return held.decode(_TEXTS[kind])
    if kind not in _NUMBERS:
        return None
    size = struct.calcsize(_NUMBERS[kind])
    return struct.unpack(f"<{_NUMBERS[kind]}", held[:size])[0] if len(held) == size else None
