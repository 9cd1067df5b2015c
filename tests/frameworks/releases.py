"""Sources of Megatron-LM's latest releases, whose parser and script are in no wheel, and of Megatron-Bridge."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from environments import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

LATEST = 3
"""Number of minor releases that are run. Not tuned."""
_FILES = ("megatron", ":(glob)*.py")
"""What is extracted: the training scripts, and the files that they import."""
_SCRIPT = "pretrain_mamba.py"
"""A file that is there if the sources were extracted."""
BRIDGE = "v0.6.0"
"""Tag of the release of Megatron-Bridge that is run."""
_CORE = "3rdparty/Megatron-LM"
"""Place of the Megatron-LM that a release of Megatron-Bridge contains, as a submodule."""
_TAG = re.compile(r"core_v(\d+)\.(\d+)\.(\d+)")


def megatron_releases() -> list[str]:
    """Return the folders with the sources of releases, older ones first.

    `$MEGATRON_LM` names folders, with a colon between them. A git repository with release tags, bare or not, stands for
    the last patch of its latest minor releases, which are extracted below `.frameworks`. Any other folder is taken as
    it is.
    """
    folders: list[str] = []
    for named in filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep)):
        tags = _latest(_git(named, "tag").stdout.decode().split())
        folders += [str(_extracted(named, tag, FOLDER / "megatron-lm" / tag, _SCRIPT)) for tag in tags] or [named]
    return folders


def bridge_sources() -> str:
    """Return the folders with the sources of Megatron-Bridge and of its Megatron-LM, with a colon between them.

    `$MEGATRON_BRIDGE` names a clone of Megatron-Bridge, bare or not. The commit of Megatron-LM that its release has
    comes from the first repository of `$MEGATRON_LM` with this commit. Empty if either is not there.
    """
    clone = os.environ.get("MEGATRON_BRIDGE", "")
    if not clone:
        return ""
    commit = _git(clone, "rev-parse", f"{BRIDGE}:{_CORE}").stdout.decode().strip()
    clones = filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep))
    core = next((one for one in clones if _git(one, "cat-file", "-t", commit, check=False).returncode == 0), None)
    if core is None:
        return ""
    folder = FOLDER / "megatron-bridge-sources"
    bridge = _extracted(clone, BRIDGE, folder / BRIDGE, "src/megatron/bridge", files=("src",))
    return (
        f"{bridge / 'src'}{os.pathsep}{_extracted(core, commit, folder / commit, 'megatron/core', files=('megatron',))}"
    )


def _latest(tags: list[str]) -> list[str]:
    """Return the tag of the last patch of each of the latest minor releases.

    >>> _latest(["core_v0.9.0", "core_v0.16.0", "core_v0.16.1", "core_v0.17.0rc0", "core_v0.17.0", "core_v0.18.2"])
    ['core_v0.16.1', 'core_v0.17.0', 'core_v0.18.2']
    """
    found = sorted(tuple(map(int, match.groups())) for match in map(_TAG.fullmatch, tags) if match)
    last = {version[:2]: version for version in found}
    return ["core_v" + ".".join(map(str, version)) for version in list(last.values())[-LATEST:]]


def _extracted(repository: str, version: str, folder: Path, held: str, *, files: tuple[str, ...] = _FILES) -> Path:
    """Extract files of a version, unless the folder has `held` already, and return the folder."""
    if not (folder / held).exists():
        shutil.rmtree(folder, ignore_errors=True)
        sources = _git(repository, "archive", version, *files).stdout
        part = folder.with_name(f"{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "--extract", "--directory", part], input=sources, check=True)
        part.rename(folder)
    return folder


def _git(repository: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    # A folder that is no repository has no tags.
    is_needed = check and words[0] != "tag"
    return subprocess.run(["git", "-C", repository, *words], capture_output=True, check=is_needed)
