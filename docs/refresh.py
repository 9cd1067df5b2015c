"""Brings the commands shown in README.md and docs/ up to date: each line `$ …` of a `console` block is run.

    python docs/refresh.py              # writes what they print now; read the diff
    python docs/refresh.py --check      # names the pages that are out of date, and exits with 1
    python docs/refresh.py tutorial.md  # this page alone, whether or not it is out of date
    python docs/refresh.py hpgo.data    # the manual that the wheel carries for `man`; the first two do so, too

Blocks run in order, each in one shell, in an empty folder for each page, which sees the repository's `examples` and
`profiling_results`; a block of Python whose first line is the name of a file is written there. Numbers that a faster
search changes without changing the plan may differ, and so may all figures of a page that measures. A line `…` stands
there for any lines.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from hpgo.cli.main import group
from hpgo.cli.manual import pages

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("plan.md", "export.md", "llm.md", "shell.md")),
]
WITH_TORCH = ROOT / "docs/launch.md"
"""A page whose commands start ranks by torchrun."""
MANUAL = ROOT / "hpgo.data/data/share/man/man1"
MEASURED = ROOT / "docs/tutorial.md"
"""It needs torch, and prints other times whenever it runs."""
PICTURES = {"plan.svg": "tutorial.svg", "both.svg": "tutorial-measured.svg"}
"""What the commands of that page draw, and what it is called in docs/images."""
_SCRIPTS = {"python": "", "hpgo": "-m hpgo", "torchrun": "-m torch.distributed.run"}
_BLOCK = re.compile(r"```(console|python)\n(.*?)\n```", re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")
_EFFORT = re.compile(r"[0-9,]+\s+partial\s+and\s+[0-9,]+\s+complete\s+plans\s+evaluated")
_FIGURE = re.compile(r"(?<!\w)[-+]?\d[\d.,]*(e[-+]?\d+)?( ([num]?s|min|[kMG]?B(/s)?|[%×])(?!\w))?")
_VARY = re.compile(r"Measured times vary between passes .*? or for longer *|; times differ by .*? may be as fast")
"""What a plan says of measured times, which depends on how busy the machine is that measures them."""
_LEFT_OUT = "…"
_END = "\x1f"
"""Between what commands of a block print: they run in one shell."""


def refreshed(page: Path, folder: Path | None = None) -> str:
    """The page with what its commands print now; they run in `folder`, if there is one to keep."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        for name in ("examples", "profiling_results"):
            (place / name).symlink_to(ROOT / name)
        show = partial(_shown, place=place, environment=environment(place), page=page)
        return _BLOCK.sub(show, page.read_text(encoding="utf-8"))


def environment(folder: Path) -> dict[str, str]:
    """In which the commands of a page are those of this Python, by way of `folder`."""
    scripts = folder / "bin"
    scripts.mkdir()
    for name, words in _SCRIPTS.items():
        (scripts / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        (scripts / name).chmod(0o755)
    path = os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONIOENCODING": "utf-8"}


def _shown(block: re.Match[str], place: Path, environment: dict[str, str], page: Path) -> str:
    """A block as it should be; what it writes is written, and what it runs has run."""
    language, text = block.groups()
    if language == "python":
        if name := _FILE.match(text):
            (place / name[1]).write_text(f"{text}\n", encoding="utf-8")
        return block[0]
    commands = _COMMAND.findall(text)
    script = "".join(f"{command}\nprintf '{_END}%d{_END}' $?\n" for command, _ in commands)
    done = subprocess.run(
        script, shell=True, capture_output=True, text=True, cwd=place, env=environment, timeout=300, check=False
    )
    told = done.stdout.split(_END)
    lines = []
    for (command, before), printed, code in zip(commands, told[::2], told[1::2], strict=False):
        if code != "0":
            raise SystemExit(f"{page}: {command}: exit code {code}\n{printed}{done.stderr}")
        lines += [f"$ {command}", *_without(before.rstrip().split("\n"), printed.rstrip().splitlines())]
    return "\n".join(["```console", *lines, "```"])


def _without(shown: list[str], printed: list[str]) -> list[str]:
    """What was printed, without what a page leaves out; all of it where that is not to be found."""
    if _LEFT_OUT not in shown:
        return printed
    ends = [at for at, line in enumerate([*shown, _LEFT_OUT]) if line == _LEFT_OUT]
    found: list[str] = []
    begin, at = 0, 0
    for end in ends:
        part = _words("\n".join(shown[begin:end]))
        spans = [
            (first, last)
            for first in (range(at, len(printed)) if begin else [0])
            for last in (range(first + 1, len(printed) + 1) if end < len(shown) else [len(printed)])
            if _words("\n".join(printed[first:last])) == part
        ]
        if part and not spans:
            return printed
        if part:
            first, at = spans[0]
            found += printed[first:at]
        found += [_LEFT_OUT] * (end < len(shown))
        begin = end + 1
    return found


def _words(text: str) -> str:
    """Return the text without figures, spaces, and what depends on how busy the machine is."""
    return _FIGURE.sub("0", _VARY.sub("", " ".join(text.split())))


def same(one: str, other: str) -> bool:
    """Whether two pages differ in nothing but the search's effort."""
    return _EFFORT.sub("", one).split() == _EFFORT.sub("", other).split()


def alike(one: str, other: str) -> bool:
    """Whether two pages differ in nothing but figures."""
    return _words(one) == _words(other)


def manual() -> dict[Path, str]:
    """Files of the manual, and what they should hold; nothing where one should not be."""
    return dict.fromkeys(MANUAL.glob("*"), "") | {MANUAL / name: text for name, text in pages(group).items()}


def stale_manual(*, checks: bool) -> list[str]:
    """The files of the manual that are not what they should be, which are written unless this only checks."""
    stale = []
    for path, text in manual().items():
        if text == (path.read_text(encoding="utf-8") if path.exists() else ""):
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not checks and text:
            MANUAL.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not checks:
            path.unlink()
    return stale


def main() -> None:
    """Writes or checks all pages, or those that are named."""
    named, checks = [one for one in sys.argv[1:] if not one.startswith("-")], "--check" in sys.argv
    pages = [*PAGES, *([WITH_TORCH, MEASURED] if importlib.util.find_spec("torch") else [])]
    stale = stale_manual(checks=checks) if not named or "hpgo.data" in named else []
    for page in pages:
        if named and page.name not in named:
            continue
        with tempfile.TemporaryDirectory() as folder:
            before, now = page.read_text(encoding="utf-8"), refreshed(page, Path(folder))
            is_stale = not (alike if page == MEASURED else same)(before, now)
            if is_stale:
                stale.append(str(page.relative_to(ROOT)))
            if checks or now == before or (page == MEASURED and not (named or is_stale)):
                continue
            page.write_text(now, encoding="utf-8")
            if page == MEASURED:
                for drawn, name in PICTURES.items():
                    shutil.copy(Path(folder) / drawn, ROOT / "docs/images" / name)
    for name in stale:
        print(f"{'out of date' if checks else 'renewed'}: {name}")
    sys.exit(bool(stale) and checks)


if __name__ == "__main__":
    main()
