"""Strict reading of the YAML and JSON files that people write, conversion to records, and writing.

Duplicate keys, recursive aliases, tags and deep nesting are errors that name file and line. Plain scalars follow YAML
1.2: `1e9` is a number, while `no` and dates are text.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from hpgo.base.checks import check_int
from hpgo.base.files import GZIP, MAX_BYTES, read_bytes, refused, unpacked, writing
from hpgo.base.messages import as_float, did_you_mean, nearest_names, safe_repr, shorten, similar
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from pathlib import Path

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DEEPEST = 32
_WIDEST = 200  # longest line of JSON in characters, except for lists of numbers
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None, "~": None, "": None} | {
    ".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")
}  # fmt: skip
_JSON = re.compile(r'\s*\{\s*(["}]|\Z)')
"""Start of a JSON object. Text that ends right after the brace counts as damaged JSON."""
_INT = re.compile(r"[-+]?[0-9]{1,400}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@contextmanager
def hinted(hint: str) -> Iterator[None]:
    """Add this hint to errors of the block that have none."""
    try:
        yield
    except HpgoError as error:
        raise error.reworded(error.message, error.hint or hint) from None


@contextmanager
def as_kind(kind: type[HpgoError]) -> Iterator[None]:
    """Convert errors of the block to `kind`, since an error in a part of a document is an error of the document."""
    try:
        yield
    except HpgoError as error:
        raise error.as_kind(kind) from None


def read_text(path: str | os.PathLike[str], error: type[HpgoError], *, maximum: int = MAX_BYTES) -> str:
    """Return the text of the file `path`, decompressed if it is a gzip file, regardless of its name.

    Raises `error` naming the file if it can't be read, is not UTF-8 text, is empty, or has more than `maximum` bytes,
    before or after decompression.
    """
    data = read_bytes(path, error, maximum=maximum, hint="name a text file")
    if data.startswith(GZIP):
        data = unpacked(data, path, error, maximum=maximum)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(
            f"{path} is not UTF-8 text (byte {failure.start})", "name a text file", code="damaged_file"
        ) from None
    if "\0" in text:
        raise error(f"{path} is a binary file", "name a text file", code="damaged_file")
    if not text.strip():
        raise error(f"{path} is empty", "name another file", code="damaged_file")
    return text


def write_text(path: str | os.PathLike[str], text: str, error: type[HpgoError]) -> None:
    """Write `text` to the file `path`; raise `error` naming the file if that fails."""
    with writing(path, error) as file:
        file.write(text.encode())


def make_folder(path: Path) -> None:
    """Create the folder `path` and its parents; raise ArgumentError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as failure:
        raise refused("make the folder", path, failure, ArgumentError, "name another") from None


_KINDS = {
    "hpgo_profile": "a profile of layers",
    "hpgo_cluster": "a cluster",
    "hpgo_transformer": "a transformer",
    "model_type": "a transformer's config.json",
    "hpgo_steps": "a list of measured steps",
    "hpgo_platform": "a platform",
    "hpgo_device": "a device record",
}
_FORMATS = {
    "hpgo.plan": "a plan",
    "hpgo.llm_plan": "a plan of a transformer",
    "hpgo.mixed_llm_plan": "a plan of a transformer for nodes that differ",
    "hpgo.chain": "a plan of a chain",
    "hpgo.program": "a program",
    "hpgo-timeline-1": "a timeline",
}


def kind_of_document(document: object) -> str:
    """Return a description of a parsed file, or an empty text for a document that no part of hpgo reads.

    >>> kind_of_document({"hpgo_cluster": 1}), kind_of_document({"format": "hpgo.plan"}), kind_of_document([])
    ('a cluster', 'a plan', '')
    """
    if not isinstance(document, dict):
        return ""
    form = document.get("format")
    found = _FORMATS.get(form, "") if isinstance(form, str) else ""
    return found or next((description for key, description in _KINDS.items() if key in document), "")


def parse(text: str, file: str, error: type[HpgoError]) -> object:
    r"""Parse `text` as JSON or YAML. Raises `error` naming `file` and line.

    Text that begins with a brace and a quoted key is JSON, except in a file with a YAML suffix.

    >>> parse("rate: 1e9\nnames: [no, 'off']", "x.yaml", HpgoError)
    {'rate': 1000000000.0, 'names': ['no', 'off']}
    >>> parse("{rate: 1e9, 'names': [no]}", "x.yaml", HpgoError)
    {'rate': 1000000000.0, 'names': ['no']}
    """
    if not _JSON.match(text):
        return parse_yaml(text, file, error)
    try:
        return _json(text, file, error)
    except _NotJson as failure:
        # YAML flow mappings can look like JSON, so a file with a YAML suffix gets a second attempt.
        if file.lower().endswith((".yaml", ".yml")):
            with suppress(error):
                return parse_yaml(text, file, error)
        raise error(failure.message) from None


class _NotJson(Exception):
    """Text that is not valid JSON, with a message that names file and line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Section:
    """One mapping of a document, which returns checked values by key and refuses keys that were never requested."""

    def __init__(self, value: object, where: str, error: type[HpgoError], *, keys: str = "", source: str = "") -> None:
        """Read the mapping `value`.

        `where` names the mapping in messages: the file, then the path of keys. `source` is the hint for missing
        keys. `keys` are the allowed keys, separated by blanks. They distinguish a misspelled key from a missing one.
        """
        self.where = where
        self._keys = set(keys.split())
        self._error = error
        self.source = source
        if not isinstance(value, dict):
            self.fail(f"must be a mapping of keys, got {safe_repr(value)}")
        self._values: dict[str, Any] = value
        self._requested: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: object = ...) -> object:
        """Return the unchecked value of a key. Without a default, a missing key is an error."""
        self._requested.append(key)
        if key in self._values:
            return self._values[key]
        if default is ...:
            self._missing(key)
        return default

    def expect(self, keys: Iterable[str]) -> None:
        """Add `keys` to the allowed keys."""
        self._keys.update(keys)

    def _missing(self, key: str) -> NoReturn:
        """Raise an error for a key that is missing or misspelled."""
        self.check_spelling()
        if self._keys:
            self.fail(f"`{key}` is missing", self.source, code="missing", name=key)
        # The allowed keys are unknown here, so only a very similar unread key counts as a misspelling.
        alike = [str(other) for other in self.unread() if nearest_names(key, [str(other)], minimum=0.8)]
        self.fail(
            f"`{key}` is missing",
            f"rename `{shorten(alike[0])}` to `{key}`, if that is meant" if len(alike) == 1 else self.source,
            code="missing",
            name=key,
        )

    def check_spelling(self) -> None:
        """Raise an error if an unknown key resembles an allowed key that is absent."""
        absent = sorted(self._keys - {*self._values})
        for other in [str(other) for other in self.unread() if other not in self._keys]:
            if hint := similar(other, absent):
                self.fail(f"`{shorten(other)}` is unknown", hint, code="unknown_name", name=other)

    def text(self, key: str, default: str = ...) -> str:  # type: ignore[assignment]
        """Return the value of a key, which must be text."""
        value = self.get(key, default)
        if not isinstance(value, str):
            self.wrong(key, "text", value)
        return value

    def whole(self, key: str, default: int = ..., *, minimum: int = 0) -> int:  # type: ignore[assignment]
        """Return the value of a key, which must be a whole number of at least `minimum`."""
        value = self.get(key, default)
        try:
            return check_int(key, value, minimum=minimum)
        except ArgumentError:
            # A short description of 8.0 would read like the whole number that the error asks for.
            self.wrong(key, f"a whole number from {minimum}", str(value) if isinstance(value, float) else value)

    def number(self, key: str, default: float = ...) -> float:  # type: ignore[assignment]
        """Return the value of a key, which must be a number; infinity and NaN are allowed."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.wrong(key, "a number", value)
        return as_float(value)

    def finite(self, key: str) -> float:
        """Return the value of a key, which must be a number other than infinity and NaN."""
        number = self.number(key)
        return number if math.isfinite(number) else self.wrong(key, "a finite number", number)

    def amount(self, key: str) -> float:
        """Return the value of a key, which must be a finite number of at least 0."""
        number = self.number(key)
        return number if 0 <= number < math.inf else self.wrong(key, "a finite number from 0", number)

    def flag(self, key: str) -> bool:
        """Return the value of a key, which must be true or false."""
        value = self.get(key)
        return value if isinstance(value, bool) else self.wrong(key, "true or false", value)

    def items(self, key: str, default: list[object] = ...) -> list[object]:  # type: ignore[assignment]
        """Return the value of a key, which must be a list."""
        value = self.get(key, default)
        return value if isinstance(value, list) else self.wrong(key, "a list", value)

    def within(self, key: str) -> Section:
        """Return the mapping under a key as a section."""
        return Section(self.get(key), f"{self.where}, {key}", self._error)

    def rows(self, key: str) -> Section:
        """Return the list under a key as a section, whose keys are `key` with the number of the item."""
        rows = {f"{key} {at}": row for at, row in enumerate(self.items(key))}
        return Section(rows, self.where, self._error)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def unread(self) -> list[str]:
        """Return the keys that were never requested."""
        requested = set(self._requested)
        return [key for key in self._values if key not in requested]

    def done(self) -> None:
        """Raise an error if the mapping has a key that was never requested."""
        for key in self.unread():
            known = dict.fromkeys([*self._requested, *sorted(self._keys)])
            hint = did_you_mean(str(key), [one for one in known if one not in self])
            self.fail(f"`{shorten(str(key))}` is unknown", hint, code="unknown_name", name=str(key))

    def build(self, record: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return `record(*args, **kwargs)`, and add the name of this section to errors that it raises."""
        try:
            return record(*args, **kwargs)
        except HpgoError as error:
            self.reraise(error)

    def wrong(self, key: str, wanted: str, value: object) -> NoReturn:
        """Raise an error for a value of the wrong type."""
        self.fail(f"`{key}` must be {wanted}, got {safe_repr(value)}", name=key)

    def reraise(self, error: HpgoError, message: str | None = None, hint: str | None = None) -> NoReturn:
        """Raise `error` as the document's, with the name of this section before its message or `message`."""
        raise error.as_kind(
            self._error, f"{self.where}: {error.message if message is None else message}", hint
        ) from None

    def fail(self, message: str, hint: str = "", *, code: str = "", **fields: object) -> NoReturn:
        """Raise the document's error, with the name of this section before the message."""
        raise self._error(f"{self.where}: {message}", hint, code=code, **fields)


def record(
    kind: type[_R], section: Section, *, optional: Container[str] = (), known: Mapping[str, object] | None = None
) -> _R:
    """Build the dataclass `kind` from a section with one key per field. Numbers must be finite.

    Field types are text, literals, numbers, flags, such dataclasses, tuples of these, or None. Fields named in
    `optional` may be absent, in nested dataclasses, too. Fields in `known` are not read: the caller derived them from
    keys of the section, which it has requested itself.
    """
    known = known or {}
    section.expect(_types(kind))
    values = {
        name: _value(field, section, name, optional)
        for name, field in _types(kind).items()
        if name not in known and (name in section or name not in optional)
    }
    section.done()
    return section.build(kind, **known, **values)


def _declared(kind: type) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind) if field.init}


_types: Callable[[type], dict[str, Any]] = cache(_declared)


def _value(kind: Any, section: Section, key: str, optional: Container[str]) -> object:
    if kind in _CHECKED:
        return _CHECKED[kind](section, key)
    if is_dataclass(kind):
        return record(kind, section.within(key), optional=optional)  # type: ignore[arg-type]  # it is a type
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        # The record checks itself which words and numbers it knows.
        is_number = not isinstance(section.get(key), str) and any(isinstance(one, int) for one in inner)
        return section.whole(key) if is_number else section.text(key)
    if get_origin(kind) is tuple:
        rows = section.rows(key)
        return tuple(_value(inner[0], rows, row, optional) for row in rows)
    return None if section.get(key) is None else _value(inner[0], section, key, optional)  # `float | None`


_CHECKED: dict[type, Callable[[Section, str], object]] = {
    str: Section.text,
    int: Section.whole,
    float: Section.finite,
    bool: Section.flag,
}


def json_text(value: object, margin: str = "") -> str:
    """Return `value` as JSON. Lists of numbers and items that fit are written on one line, all else on a line per item.

    >>> print(json_text({"devices": list(range(4)), "layers": ["encoder"] * 2}))
    {"devices": [0, 1, 2, 3], "layers": ["encoder", "encoder"]}
    >>> len(json_text({"devices": list(range(4)), "layers": ["encoder"] * 20}).splitlines())
    25
    """
    import json

    inner = margin + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {json_text(item, inner)}" for key, item in value.items()]
        start, end = "{", "}"
    elif isinstance(value, list | tuple):
        if all(isinstance(item, int | float) for item in value):
            return json.dumps(value)
        items = [json_text(item, inner) for item in value]
        start, end = "[", "]"
    else:
        return json.dumps(value)
    line = ", ".join(items)
    if len(line) <= _WIDEST and "\n" not in line:
        return start + line + end
    lines = f",\n{inner}".join(items)
    return f"{start}\n{inner}{lines}\n{margin}{end}"


def _json(text: str, file: str, error: type[HpgoError]) -> object:
    import json

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in items:
            if key in mapping:
                raise error(f"{file}: the key `{shorten(key)}` is given twice", "keep one of them", code="duplicate")
            mapping[key] = value
        return mapping

    try:
        document = json.loads(text, object_pairs_hook=pairs)
        # Only an escape can produce an unpaired surrogate, so most documents skip the costly encoding.
        if re.search(r"\\u[dD]", text):
            json.dumps(document, ensure_ascii=False).encode()
    except json.JSONDecodeError as failure:
        message = failure.msg[0].lower() + failure.msg[1:]
        raise _NotJson(f"{file}, line {failure.lineno}: not valid JSON: {message}") from None
    except UnicodeEncodeError:
        raise error(
            f"{file}: text contains an unpaired surrogate",
            "write characters above U+FFFF as pairs of `\\u` escapes",
            code="damaged_file",
        ) from None
    except error:  # a duplicate key; `error` may be a subclass of ValueError
        raise
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise error(f"{file}: not valid JSON: nested too deep, or a number too long", "", code="damaged_file") from None
    return document


@dataclass(slots=True)
class _Open:
    """A collection that the parser has entered and not left yet."""

    into: list[object] | dict[str, object]
    anchor: str | None = None
    key: str | None = None
    """Key of a mapping that has no value yet."""


def parse_yaml(text: str, file: str, error: type[HpgoError]) -> object:
    """Parse YAML in block or flow style. Raises `error` naming `file` and line."""
    # Build the document from libyaml's events, because its own loader overflows the stack on deep nesting.
    import yaml

    document: list[object] = []
    stack = [_Open(document)]
    anchors: dict[str, object] = {}  # registered when complete, so that no value can contain itself

    def fail(event: Any, message: str, hint: str = "") -> NoReturn:
        raise error(f"{file}, line {event.start_mark.line + 1}: {message}", hint)

    def put(event: Any, value: object) -> None:
        top = stack[-1]
        if isinstance(top.into, list):
            top.into.append(value)
        elif top.key is not None:
            top.into[top.key] = value
            top.key = None
        elif not isinstance(event, yaml.ScalarEvent):
            fail(event, "a key must be a word", "quote text that begins with a bracket, brace or star")
        elif event.value in top.into:
            fail(event, f"the key `{shorten(event.value)}` is given twice", "keep one of them")
        else:
            top.key = event.value

    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.DocumentStartEvent) and document:
                fail(event, "a second document begins", "keep one document in a file")
            elif (tag := getattr(event, "tag", None)) not in {None, "!"}:
                fail(event, f"the tag `{shorten(str(tag))}` is not supported", "leave it out")
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    fail(
                        event,
                        f"the alias `*{shorten(str(event.anchor))}` has no complete anchor",
                        "write the value out",
                    )
                put(event, anchors[event.anchor])
            elif isinstance(event, yaml.ScalarEvent):
                value = _scalar(event.value) if event.implicit[0] else event.value
                put(event, value)
                if event.anchor:
                    anchors[event.anchor] = value
            elif isinstance(event, yaml.CollectionStartEvent):
                if len(stack) > _DEEPEST:
                    fail(event, "nested too deep")
                into: list[object] | dict[str, object] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
                put(event, into)
                stack.append(_Open(into, event.anchor))
            elif isinstance(event, yaml.CollectionEndEvent):
                closed = stack.pop()
                if closed.anchor:
                    anchors[closed.anchor] = closed.into
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(failure, "problem", None) or getattr(failure, "reason", None) or "unreadable"
        raise error(
            f"{file}{line}: not valid YAML: {problem}",
            "check that indentation, brackets and quotes match",
            code="damaged_file",
        ) from None
    return document[0] if document else None


def _scalar(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
