"""An environment for each version of each framework; all see the torch of the interpreter that runs this.

What each has is pinned in requirements/, where a file's name is the environment's. `libraries` is what several of them
need. pip follows no dependencies here: torch comes once, from outside, and what isn't listed isn't there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = Path(__file__).parent / "requirements"
# Resolved, because a copy of the repository may link to the folder of another one, whose environments have its paths.
FOLDER = (ROOT / ".frameworks").resolve()
_LIBRARIES = "libraries"


def python(name: str) -> Path:
    """The interpreter of an environment."""
    return FOLDER / name / "bin" / "python"


def build(name: str) -> None:
    """Makes an environment, or nothing where it is there and as it is pinned."""
    seen = [] if name == _LIBRARIES else [_packages(_LIBRARIES), _torch()]
    wanted = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8") + "".join(f"# sees {path}\n" for path in seen)
    stamp = FOLDER / name / "installed.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    venv.create(FOLDER / name, clear=True, with_pip=True)
    subprocess.run(
        [python(name), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--requirement", REQUIREMENTS / f"{name}.txt"],
        check=True,
    )  # fmt: skip
    # venv's own setuptools would hide the one that torch needs.
    subprocess.run([python(name), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    # A path file comes behind the environment's own packages.
    (_packages(name) / "seen.pth").write_text("".join(f"{path}\n" for path in seen), encoding="utf-8")
    stamp.write_text(wanted, encoding="utf-8")


def build_all() -> None:
    """Every environment, the shared libraries first."""
    names = sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))
    for name in sorted(names, key=lambda name: name != _LIBRARIES):
        build(name)


def torch_version() -> str:
    """Return the version of the torch that all environments see."""
    return importlib.metadata.version("torch")


def _packages(name: str) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return FOLDER / name / "lib" / version / "site-packages"


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("error: there is no torch\nhint: make torch")
    return Path(found.origin).parent.parent


if __name__ == "__main__":
    build_all()
