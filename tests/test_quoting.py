"""Names are data: whatever one holds, each language reads back one literal, and a comment stays one."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import tomllib

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hpgo.base import quoting

NASTY = [
    "",
    "plain",
    "two\nlines",
    "\r\n[training]\nx = 1",
    "'''\nimport os; os._exit(3)\n'''",
    '"; exit 3; "',
    "$(exit 3) `exit 3` ${HOME} !! *",
    "\\n \\' \\",
    "-*- coding: utf-7 -*-",
    "\x1b]0;title\x07\x7f\x00\x85\u2028\u202e",
    "no",
    "1e9",
    "- a: b # c",
    "\N{ZERO WIDTH NO-BREAK SPACE}é中😀",
]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(NASTY)


@given(st.lists(st.text(max_size=20) | st.integers() | st.booleans() | st.none(), max_size=4))
@example(["\ud800", "a\nb"])
def test_python_reads_values_back_from_one_line_of_ascii(values: list[object]) -> None:
    literal = quoting.in_python(values)
    assert ast.literal_eval(literal) == values
    assert literal.isascii()
    assert literal.isprintable()


@given(names)
def test_toml_and_yaml_read_names_back(name: str) -> None:
    for written in (quoting.in_toml(name), quoting.in_yaml(name)):
        assert written.isprintable()
    assert tomllib.loads(f"name = {quoting.in_toml(name)}\nlast = 1") == {"name": name, "last": 1}
    assert yaml.safe_load(f"name: {quoting.in_yaml(name)}\nlast: 1") == {"name": name, "last": 1}


def test_bash_reads_names_back() -> None:
    dice = random.Random(0)
    letters = [*"ab1 '\"\\$`!*?[]{}()<>|&;#~=%", *map(chr, range(1, 32)), "\x7f", "\x85", "\u2028", "é", "😀"]
    drawn = ["".join(dice.choices(letters, k=dice.randrange(12))) for _ in range(500)]
    words = [quoting.in_shell(name) for name in NASTY + drawn]
    assert all(word.isprintable() for word in words)
    script = f"printf '%s\\0' {' '.join(words)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [name.replace("\0", "\ufffd") for name in NASTY + drawn]


@given(st.text())
@example("x" * 500)
@example("a\nb")
def test_a_comment_is_one_short_line_of_any_language(name: str) -> None:
    written = quoting.in_comment(name)
    assert written.isprintable()
    assert len(written) <= 120
    written.encode()


@given(st.text(max_size=30))
@example("^~\\end{document} & 5 % of $x_1$ #2")
def test_tex_gets_no_command_that_a_name_holds(name: str) -> None:
    letters = r"\\(text(backslash|asciitilde|asciicircum|less|greater|bar)|dots|ss|ae|AE|oe|OE|o|O|l|L)\{\}"
    harmless = letters + r"|\\ensuremath\{\\(mu|cdot|times)\}|\\[`'^~=u.\"rHvc]\{[A-Za-z]\}|\\[&%$#_{}]"
    left = re.sub(harmless, "", quoting.in_tex(name))
    assert left.isascii()
    assert not set(left) & set("\\^~&%$#_{}")
    assert left.isprintable()
