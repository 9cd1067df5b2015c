"""Brings the commands shown in README.md and docs/ up to date: each line `$ …` of a `console` block is run.

    python docs/refresh.py          # writes what they print now; read the diff
    python docs/refresh.py --check  # names the blocks that are out of date, and exits with 1

Blocks run in order in an empty folder for each page, which sees the repository's `examples` and `profiling_results`.
Numbers that a faster search changes without changing the plan, and times that depend on the machine, may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("plan.md", "export.md", "launch.md"))]
_BLOCK = re.compile(r"```console\n(.*?)\n```", re.DOTALL)
_EFFORT = re.compile(r"[0-9,]+ partial\s+plans,\s+[0-9,]+\s+whole\s+ones\s+simulated")


def refreshed(page: Path) -> str:
    """The page with what its commands print now."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "profiling_results"):
            (Path(folder) / name).symlink_to(ROOT / name)

        def run(block: re.Match[str]) -> str:
            lines = []
            for command in re.findall(r"^\$ (.*)$", block[1], re.MULTILINE):
                done = subprocess.run(
                    command,
                    shell=True,
                    capture_output=True,
                    text=True,
                    cwd=folder,
                    env=environment,
                    timeout=300,
                    check=False,
                )
                if done.returncode:
                    raise SystemExit(f"{page}: {command}: exit code {done.returncode}\n{done.stderr}")
                lines += [f"$ {command}", *done.stdout.rstrip().splitlines()]
            return "\n".join(["```console", *lines, "```"])

        return _BLOCK.sub(run, page.read_text(encoding="utf-8"))


def same(one: str, other: str) -> bool:
    """Whether two pages differ in nothing but the search's effort."""
    return _EFFORT.sub("", one).split() == _EFFORT.sub("", other).split()


def main() -> None:
    """Writes or checks all pages."""
    stale = []
    for page in PAGES:
        before, now = page.read_text(encoding="utf-8"), refreshed(page)
        if not same(before, now):
            stale.append(str(page.relative_to(ROOT)))
        if now != before and "--check" not in sys.argv:
            page.write_text(now, encoding="utf-8")
    for name in stale:
        print(f"{'out of date' if '--check' in sys.argv else 'renewed'}: {name}")
    sys.exit(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    main()
