"""Sources of the latest releases of Megatron-LM, whose parser and training script are in no wheel."""

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
        folders += [str(_extracted(named, tag)) for tag in tags] or [named]
    return folders


def _latest(tags: list[str]) -> list[str]:
    """Return the tag of the last patch of each of the latest minor releases.

    >>> _latest(["core_v0.9.0", "core_v0.16.0", "core_v0.16.1", "core_v0.17.0rc0", "core_v0.17.0", "core_v0.18.2"])
    ['core_v0.16.1', 'core_v0.17.0', 'core_v0.18.2']
    """
    found = sorted(tuple(map(int, match.groups())) for match in map(_TAG.fullmatch, tags) if match)
    last = {version[:2]: version for version in found}
    return ["core_v" + ".".join(map(str, version)) for version in list(last.values())[-LATEST:]]


def _extracted(repository: str, tag: str) -> Path:
    folder = FOLDER / "megatron-lm" / tag
    if not (folder / _SCRIPT).exists():
        shutil.rmtree(folder, ignore_errors=True)
        sources = _git(repository, "archive", tag, *_FILES).stdout
        part = folder.with_name(f"{tag}.part")
        part.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "--extract", "--directory", part], input=sources, check=True)
        part.rename(folder)
    return folder


def _git(repository: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", repository, *words], capture_output=True, check=words[0] != "tag")
