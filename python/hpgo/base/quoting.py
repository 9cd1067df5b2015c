"""Names and values as text of another language: names of profiles, clusters and layers are data, never code.

One function a language. Whatever a name holds (quotes, newlines, control characters, half a character), what comes out
is one literal, or one line of a comment, and reads back as the name wherever the language can hold it.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from hpgo.base.wording import shorten

_PLAIN = re.compile(r"[A-Za-z]([\w./+() -]*[\w)])?", re.ASCII)
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # the last six in YAML 1.1
_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
        "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "µ": r"\ensuremath{\mu}",
        "·": r"\ensuremath{\cdot}", "×": r"\ensuremath{\times}", "–": "--", "′": "'"}  # fmt: skip
_ANSI_C = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}


def in_python(value: Any) -> str:
    r"""Text, numbers, flags, None, and lists, tuples and dicts of them as a literal of ASCII.

    >>> print(in_python(["head\nimport os", 2]))
    ['head\nimport os', 2]
    """
    return ascii(value)


def in_toml(text: str) -> str:
    r"""A basic string.

    >>> print(in_toml('a "b"\n[training]'))
    "a \"b\"\n[training]"
    """
    return _escaped(json.dumps(_whole(text), ensure_ascii=False))


def in_yaml(text: str) -> str:
    """Bare where that can be read as nothing else, otherwise in double quotes.

    >>> in_yaml("V100-16GB"), in_yaml("1e9"), in_yaml("a: b")
    ('V100-16GB', '"1e9"', '"a: b"')
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return _escaped(json.dumps(_whole(text), ensure_ascii=False))


def in_shell(text: str) -> str:
    r"""One word of bash, on one line. NUL, which no argument can hold, becomes U+FFFD.

    >>> print(in_shell("Et*3|tL"), in_shell("two\nlines"), in_shell("--num-layers"))
    'Et*3|tL' $'two\nlines' --num-layers
    """
    whole = _whole(text).replace("\0", "\ufffd")
    if whole.isprintable():
        return shlex.quote(whole)
    # `$'…'` takes bytes in octal; three digits, so that a digit behind them stays one.
    letters = (
        letter if letter.isprintable() and letter not in "\\'" else _ANSI_C.get(letter) or _octal(letter)
        for letter in whole
    )
    return f"$'{''.join(letters)}'"


def in_tex(text: str) -> str:
    r"""Words of a paragraph, with TeX's special characters made harmless and others left out as blanks.

    >>> print(in_tex("27.3 % of zb_h1\n\\end{document}"))
    27.3 \% of zb\_h1 \textbackslash{}end\{document\}
    """
    return "".join(_TEX.get(letter, letter if letter.isprintable() else " ") for letter in text)


def in_comment(text: str) -> str:
    r"""One line of at most 120 characters that cannot leave a comment; what does not print is escaped.

    >>> print("#", in_comment("toy\nimport os"))
    # toy\nimport os
    """
    letters = (
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text[:120]
    )
    return shorten("".join(letters), 120)


def _octal(letter: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in letter.encode())


def _whole(text: str) -> str:
    """`text` with half characters, which no file of UTF-8 can hold, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(quoted: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)
