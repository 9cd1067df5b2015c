"""Quoting of names and values for other languages. Names of profiles, clusters and layers are data, never code.

There is one function per language. A name may hold quotes, newlines, control characters or unpaired surrogates. The
result is always one literal, or one line of a comment. It reads back as the name if the language can hold it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLAIN = re.compile(r"[A-Za-z]([\w./+() -]*[\w)])?", re.ASCII)
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # the last six in YAML 1.1
_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
        "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "µ": r"\ensuremath{\mu}",
        "·": r"\ensuremath{\cdot}", "×": r"\ensuremath{\times}", "–": "--", "…": r"\dots{}", "′": "'",
        "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "ß": r"\ss{}", "æ": r"\ae{}",
        "Æ": r"\AE{}", "œ": r"\oe{}", "Œ": r"\OE{}", "ø": r"\o{}", "Ø": r"\O{}", "ł": r"\l{}",
        "Ł": r"\L{}"}  # fmt: skip
# Unicode puts a combining accent after its letter, TeX puts the command before it.
_TEX_ACCENTS = {"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": ".",
                "\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0327": "c"}  # fmt: skip
_ANSI_C = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}


def in_python(value: Any) -> str:
    r"""Return text, numbers, flags, None, and lists, tuples and dicts of these as an ASCII literal.

    >>> print(in_python(["head\nimport os", 2]))
    ['head\nimport os', 2]
    """
    return ascii(value)


def in_toml(text: str) -> str:
    r"""Return a basic string of TOML.

    >>> print(in_toml('a "b"\n[training]'))
    "a \"b\"\n[training]"
    """
    return _escaped(json.dumps(in_whole_letters(text), ensure_ascii=False))


def in_yaml(value: Any) -> str:
    """Return a value in YAML flow style on one line. Text stays unquoted only where it can't be misread.

    Values are text, numbers, and lists, tuples and dicts of these.

    >>> in_yaml("V100-16GB"), in_yaml("1e9"), in_yaml("a: b")
    ('V100-16GB', '"1e9"', '"a: b"')
    >>> in_yaml({"time_s": [1, 1e-05]})
    '{time_s: [1, 1.0e-05]}'
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{in_yaml(key)}: {in_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_yaml, value))}]"
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        number = repr(float(value))
        return number if "." in number else number.replace("e", ".0e")  # parsers of YAML 1.1 read 1e-05 as text
    text = value
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return _escaped(json.dumps(in_whole_letters(text), ensure_ascii=False))


def in_shell(text: str) -> str:
    r"""Return one word of bash on one line. NUL, which no argument can hold, becomes U+FFFD.

    >>> print(in_shell("Et*3|tL"), in_shell("two\nlines"), in_shell("--num-layers"))
    'Et*3|tL' $'two\nlines' --num-layers
    """
    whole = in_whole_letters(text).replace("\0", "\ufffd")
    if whole.isprintable():
        import shlex

        return shlex.quote(whole)
    # `$'…'` accepts bytes in octal. Always write three digits, so that a digit that follows is not read as part of it.
    letters = (
        letter if letter.isprintable() and letter not in "\\'" else _ANSI_C.get(letter) or _octal(letter)
        for letter in whole
    )
    return f"$'{''.join(letters)}'"


def in_tex(text: str) -> str:
    r"""Return text of a TeX paragraph in ASCII. Letters that ASCII and accents can't express become their code point.

    >>> print(in_tex("27.3 % of zb_h1\n\\end{document}"))
    27.3 \% of zb\_h1 \textbackslash{}end\{document\}
    >>> print(in_tex("André 中"))
    Andr\'{e} U+4E2D
    """
    return "".join(map(_tex_letter, text))


def _tex_letter(letter: str) -> str:
    if letter in _TEX:
        return _TEX[letter]
    if letter.isascii() or not letter.isprintable():
        return letter if letter.isprintable() else " "
    import unicodedata

    plain, accent = unicodedata.normalize("NFD", letter)[0], unicodedata.normalize("NFD", letter)[1:]
    if accent in _TEX_ACCENTS and plain.isascii():
        return rf"\{_TEX_ACCENTS[accent]}{{{plain}}}"
    return f"U+{ord(letter):04X}"


def in_comment(text: str) -> str:
    r"""Return one line of at most 120 characters that can't end a comment. Unprintable characters are escaped.

    >>> print("#", in_comment("toy\nimport os"))
    # toy\nimport os
    """
    letters = (
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text[:120]
    )
    return shorten("".join(letters), 120)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Replace each `__NAME__` in `template` by its value in `parts`. Such marks within the values stay as they are.

    >>> filled("<h1>__TITLE__</h1> __BODY__", {"TITLE": "__BODY__", "BODY": "text"})
    '<h1>__BODY__</h1> text'
    """
    return re.sub(f"__({'|'.join(parts)})__", lambda mark: parts[mark[1]], template)


def _octal(letter: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in letter.encode())


def in_whole_letters(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 can't encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(quoted: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)
