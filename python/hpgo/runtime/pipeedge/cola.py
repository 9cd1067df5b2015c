"""CoLA (Warstadt et al., 2019): sentences with their acceptability, read from the published archives."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.errors import FileError

if TYPE_CHECKING:
    from pathlib import Path

_SPLITS = {
    "train": ("train.tsv", "in_domain_train.tsv"),
    "validation": ("dev.tsv", "in_domain_dev.tsv"),
    "test": ("test.tsv",),
}
"""Files of each split, in GLUE's archive and in that of the authors. The test split has no labels."""
_OTHERS = {"val": "validation", "dev": "validation"}
_ARCHIVES = ("CoLA.zip", "cola_public_1.1.zip")
_UNPACKED = ("CoLA", "cola_public/raw")
_COLUMNS = 4
"""Number of columns: source, label, the authors' mark, sentence."""


def sentences(root: Path, split: str) -> list[tuple[str, int | None]]:
    """Return the sentences of a split, with label 1 for acceptable, 0 for unacceptable, and None without a label.

    `root` is the folder of `CoLA.zip` or `cola_public_1.1.zip`, or of their unpacked content. Raises FileError if a
    file is missing, or has a line in another format.
    """
    name = _OTHERS.get(split, split)
    if name not in _SPLITS:
        raise FileError(f"CoLA has no split `{shorten(split)}`", f"choose one of {', '.join(_SPLITS)}")
    where, text = _text(root, _SPLITS[name])
    lines = [line for line in text.split("\n") if line]
    # The test file has a header and no labels, unlike the others.
    if name == "test":
        return [(line.split("\t")[-1], None) for line in lines[1:]]
    found: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, start=1):
        cells = line.split("\t")
        if len(cells) != _COLUMNS or cells[1] not in {"0", "1"}:
            raise FileError(
                f"{where}, line {number}: `{shorten(line)}` is not a line of CoLA", "use the file as it was published"
            )
        found.append((cells[3], int(cells[1])))
    return found


def _text(root: Path, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the text of a file."""
    try:
        for folder in (root, *(root / one for one in _UNPACKED)):
            for name in names:
                if (folder / name).is_file():
                    return str(folder / name), (folder / name).read_text(encoding="utf-8")
        for archive in (root / one for one in _ARCHIVES):
            if archive.is_file():
                with zipfile.ZipFile(archive) as held:
                    for member in held.namelist():
                        # The authors' archive also contains tokenized versions, which have other texts.
                        if member.rpartition("/")[2] in names and "/tokenized/" not in member:
                            return f"{archive}:{member}", held.read(member).decode("utf-8")
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile) as failure:
        raise FileError(
            f"CoLA in `{root}` can't be read: {failure}", "download the archive again", code="damaged_file"
        ) from failure
    raise FileError(
        f"there is no {' or '.join(names)} of CoLA in `{root}`",
        f"put {' or '.join(_ARCHIVES)} there, or leave out `--dataset-name`",
        code="unknown_name",
    )
