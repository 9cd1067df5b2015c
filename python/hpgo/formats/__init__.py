"""Profile files: one module a format; `read_profile` tells them apart by their content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.documents import read_text
from hpgo.errors import ProfileError
from hpgo.formats import pipedream

if TYPE_CHECKING:
    import os

    from hpgo.profile import Profile


def read_profile(source: str | os.PathLike[str], *, batch_size: int | None = None) -> Profile:
    """The profile in the file `source`.

    PipeDream text does not say how many samples its times are for. `batch_size` says it, or else the file name:
    `vgg-19-pbs-32.txt` was measured with 32.

    Raises ProfileError naming file and line; ArgumentError for a `batch_size` that the file contradicts.
    """
    path = Path(source)
    text = read_text(path, ProfileError)
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


def _split_name(stem: str) -> tuple[str, int | None]:
    """Model name and batch size of `xlnet-36-pbs-1`."""
    found = re.fullmatch(r"(.+?)-pbs-([1-9][0-9]{0,8})(-.+)?", stem)
    return (found[1] + (found[3] or ""), int(found[2])) if found else (stem, None)
