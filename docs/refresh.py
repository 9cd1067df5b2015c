"""Bring the commands shown in README.md and docs/ up to date by running each line `$ …` of a `console` block.

    python docs/refresh.py              # writes the new output; read the diff
    python docs/refresh.py --check      # names the pages that are out of date, and exits with 1
    python docs/refresh.py tutorial.md  # writes this page only, even if it is not out of date
    python docs/refresh.py hpgo.data    # writes the manual in the wheel (for `man`); the first two also do

Each page has an empty folder with links to the repository's `examples` and `profiling_results`. Its blocks run there in
order, each in one shell. A Python or YAML block whose first line is the name of a file is written to that file. The
search effort may differ between two runs, and so may all figures of a page that measures. A line `…` stands for any
lines. A command whose shown output begins with `error:` may fail, and both of its streams are shown.
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
_NAMES = (
    "plan export job llm llm-mixed cost fit recipes shell "
    "tutorial-cost tutorial-edge tutorial-hpgo tutorial-job tutorial-schedules"
)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _NAMES.split())]
WITH_TORCH = ROOT / "docs/launch.md"
"""A page whose commands start ranks with torchrun, so it is refreshed only if torch is installed."""
MANUAL = ROOT / "hpgo.data/data/share/man/man1"
MEASURED = ROOT / "docs/tutorial.md"
"""A page that needs torch and prints other times in each run."""
PICTURES = {"plan.svg": "tutorial.svg", "both.svg": "tutorial-measured.svg"}
"""Pictures that the commands of `MEASURED` draw, with their names in docs/images."""
_SCRIPTS = {"python": "", "hpgo": "-m hpgo", "torchrun": "-m torch.distributed.run"}
_BLOCK = re.compile(r"```(console|python|yaml)\n(.*?)\n```", re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
_FILE = re.compile(r"# ([\w.-]+\.(?:py|ya?ml))\n")
_ERROR = "error:"
_EFFORT = re.compile(r"[0-9,]+\s+partial\s+and\s+[0-9,]+\s+complete\s+plans\s+evaluated")
_FIGURE = re.compile(r"(?<!\w)[-+]?\d[\d.,]*(e[-+]?\d+)?( ([num]?s|min|[kMG]?B(/s)?|[%×])(?!\w))?")
_VARY = re.compile(r"Measured times vary between passes .*? or for longer *|; times differ by .*? may be as fast")
"""Warnings on measured times, which a plan has only if the machine was busy during the measurement."""
_LEFT_OUT = "…"
_END = "\x1f"
"""Separator between the outputs of the commands of a block, which share one shell and so one stdout."""


def refreshed(page: Path, folder: Path | None = None) -> str:
    """Return the page with the current output of its commands. They run in `folder`, or in a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        for name in ("examples", "profiling_results"):
            (place / name).symlink_to(ROOT / name)
        show = partial(_shown, place=place, environment=environment(place), page=page)
        return _BLOCK.sub(show, page.read_text(encoding="utf-8"))


def environment(folder: Path) -> dict[str, str]:
    """Return an environment whose `python`, `hpgo` and `torchrun` are scripts in `folder` that run this interpreter."""
    scripts = folder / "bin"
    scripts.mkdir()
    for name, words in _SCRIPTS.items():
        (scripts / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        (scripts / name).chmod(0o755)
    path = os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONIOENCODING": "utf-8"}


def _shown(block: re.Match[str], place: Path, environment: dict[str, str], page: Path) -> str:
    """Return a block with current output, after running its commands or writing its file to `place`."""
    language, text = block.groups()
    if language != "console":
        if name := _FILE.match(text):
            (place / name[1]).write_text(f"{text}\n", encoding="utf-8")
        return block[0]
    commands = _COMMAND.findall(text)
    script = "".join(
        f"{command}{' 2>&1' * shown.startswith(_ERROR)}\nprintf '{_END}%d{_END}' $?\n" for command, shown in commands
    )
    done = subprocess.run(
        script, shell=True, capture_output=True, text=True, cwd=place, env=environment, timeout=300, check=False
    )
    # Outputs and exit codes take turns, as the script prints `_END`, the code and `_END` after each command.
    outputs = done.stdout.split(_END)
    lines = []
    for (command, before), printed, code in zip(commands, outputs[::2], outputs[1::2], strict=False):
        if code != "0" and not before.startswith(_ERROR):
            raise SystemExit(f"{page}: {command}: exit code {code}\n{printed}{done.stderr}")
        lines += [f"$ {command}", *_without(before.rstrip().split("\n"), printed.rstrip().splitlines())]
    return "\n".join(["```console", *lines, "```"])


def _without(shown: list[str], printed: list[str]) -> list[str]:
    """Return the printed lines without the lines that the page leaves out, or all lines if they do not match the page.

    `shown` has a line `…` for each omission. The lines between two omissions must occur in `printed`, up to figures.
    """
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
            # Blank lines have no words, so without this a part would begin with the blank line before it.
            if (printed[first : first + 1] == [""]) == (shown[begin : begin + 1] == [""])
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
    """Return whether two pages are equal except for the numbers of plans that the search evaluated."""
    return _EFFORT.sub("", one).split() == _EFFORT.sub("", other).split()


def alike(one: str, other: str) -> bool:
    """Return whether two pages are equal except for figures."""
    return _words(one) == _words(other)


def manual() -> dict[Path, str]:
    """Return the expected text of each file of the manual, with an empty text for files that should not exist."""
    return dict.fromkeys(MANUAL.glob("*"), "") | {MANUAL / name: text for name, text in pages(group).items()}


def stale_manual(*, checks: bool) -> list[str]:
    """Return the names of manual files that are out of date. Writes or removes them unless `checks` is set."""
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
    """Write or check the pages named on the command line, or all pages."""
    named, checks = [one for one in sys.argv[1:] if not one.startswith("-")], "--check" in sys.argv
    pages = [*PAGES, *([WITH_TORCH, MEASURED] if importlib.util.find_spec("torch") else [])]
    stale = stale_manual(checks=checks) if not named or "hpgo.data" in named else []
    for page in pages:
        if named and page.name not in named:
            continue
        with tempfile.TemporaryDirectory() as folder:
            before, now = page.read_text(encoding="utf-8"), refreshed(page, Path(folder))
            # Measured times differ in each run, so only a change of the text makes the tutorial out of date.
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
