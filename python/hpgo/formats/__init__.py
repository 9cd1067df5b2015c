"""Profile files: one module a format; `read_profile` tells them apart by their content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.errors import ProfileError
from hpgo.formats import pipedream
from hpgo.profile import Profile, near

if TYPE_CHECKING:
    import os


def read_profile(source: str | os.PathLike[str], *, batch_size: int | None = None) -> Profile:
    """The profile in the file `source`.

    PipeDream text does not say how many samples its times are for. `batch_size` says it, or else the file name:
    `vgg-19-pbs-32.txt` was measured with 32.

    Raises ProfileError naming file and line; ArgumentError for a `batch_size` that the file contradicts.
    """
    path = Path(source)
    text = _text(path)
    if pipedream.looks_like(text):
        name, in_name = _split_name(path.stem)
        size = in_name if batch_size is None else batch_size
        if size is None:
            raise ProfileError(
                f"{path} is PipeDream text, which does not say how many samples its times are for",
                f"give the batch size, or put it into the file name: `{path.stem}-pbs-32{path.suffix}`",
            )
        return pipedream.parse(text, name=name, batch_size=size, file=str(path))
    raise ProfileError(f"{path} is no profile that hpgo knows", "docs/profiles.md shows the formats")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ProfileError(f"there is no file `{path}`", near(path.name, beside) if beside else "") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"can't read `{path}`: {reason}", "name a profile file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not UTF-8 text (byte {error.start})", "name a profile file") from None
    if "\0" in text:
        raise ProfileError(f"{path} is a binary file", "name a profile file")
    if not text.strip():
        raise ProfileError(f"{path} is empty", "docs/profiles.md shows the formats")
    return text


def _split_name(stem: str) -> tuple[str, int | None]:
    """Model name and batch size of `xlnet-36-pbs-1`."""
    found = re.fullmatch(r"(.+?)-pbs-([1-9][0-9]{0,8})(-.+)?", stem)
    return (found[1] + (found[3] or ""), int(found[2])) if found else (stem, None)
