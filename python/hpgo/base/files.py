"""Reading files up to a size, and writing them whole or not at all.

What is written goes to a new file beside the old one, which then takes its name in one step: whoever reads meanwhile
sees the old content or the new, and an interrupted program leaves the old. A pipe or a device has no name to take, and
is written to as it stands.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.base.messages import safe_repr, similar
from hpgo.errors import file_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from hpgo.errors import FileError, HpgoError

MOST_BYTES = 2**26
"""Of a file that people write, or that one question or answer fills."""
MOST_BYTES_OF_RUNS = 2**29
"""Of a file with a line, or an entry, for each action of a run."""
GZIP = b"\x1f\x8b"
"""The first bytes of what gzip packed."""
_PIECE = 2**20
_ENDING = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,9}")
"""Of a file's name, unlike the end of a version in the name of a model."""


def as_path(path: str | os.PathLike[str], error: type[HpgoError]) -> Path:
    """`path`, whatever a caller may have given; raises `error` if it is none."""
    try:
        return Path(path)
    except Exception:  # noqa: BLE001 -- a TypeError, or what other people's paths raise
        raise error(f"{safe_repr(path)} is no path of a file", "give text or a `pathlib.Path`") from None


def may_be_file(path: Path) -> bool:
    """Whether `path` is meant as a file or a folder: it exists, or it is written as one.

    >>> may_be_file(Path("model.yaml")), may_be_file(Path("models/mine")), may_be_file(Path("qwen2.5-72b"))
    (True, True, False)
    """
    try:
        return path.exists() or _ENDING.fullmatch(path.suffix) is not None or len(path.parts) > 1
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return True  # reading it gives the reason


def is_folder(path: Path) -> bool:
    """Whether `path` names a folder; not if it can't be looked up, whose reason reading it gives."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def read_bytes(path: str | os.PathLike[str], error: type[HpgoError], *, most: int = MOST_BYTES, hint: str) -> bytes:
    """What the file `path` holds, read once; raises `error` naming it if there is none, or more than `most` bytes.

    That holds for a device or a pipe that never ends, too. `hint` says what file to name instead.
    """
    path = as_path(path, error)
    data = bytearray()
    try:
        with path.open("rb") as file:
            while len(data) <= most and (piece := file.read(min(_PIECE, most + 1 - len(data)))):
                data += piece
    except FileNotFoundError:
        raise file_error(error)(f"file not found: `{path}`", _beside(path), code="not_found") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise refused("read", path, failure, error, hint) from None
    if len(data) > most:
        raise error(f"{path} has more than {most >> 20} MiB", "name a smaller file", code="too_large")
    return bytes(data)


def unpacked(data: bytes, path: str | os.PathLike[str], error: type[HpgoError], *, most: int) -> bytes:
    """Return what gzip packed into `data`; raises `error` naming the file `path` if it is damaged or has more bytes.

    >>> import gzip
    >>> from hpgo.errors import HpgoError
    >>> unpacked(gzip.compress(b"{}"), "x.json.gz", HpgoError, most=2)
    b'{}'
    """
    import gzip
    import io
    import zlib

    try:
        # A few bytes may hold very many: no more than `most` are unpacked.
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as failure:
        raise error(f"{path} is packed by gzip, and damaged: {failure}", "pack it again", code="damaged_file") from None
    if len(found) > most:
        raise error(
            f"{path} has more than {most >> 20} MiB when it is unpacked", "name a smaller file", code="too_large"
        )
    return found


def stem(path: Path) -> str:
    """Return the name of a file without its ending, and without `.gz` behind that.

    >>> stem(Path("traces/steps-pbs-8.json.gz")), stem(Path("bert.yaml"))
    ('steps-pbs-8', 'bert')
    """
    return path.with_suffix("").stem if path.suffix.lower() == ".gz" else path.stem


def _beside(path: Path) -> str:
    """Return a hint at a file in the folder of `path` with a name like its own, or at a folder that is absent."""
    try:
        if not path.parent.is_dir():
            return f"check the folder: `{path.parent}` is not there either"
        names = [other.name for other in path.parent.iterdir() if other.is_file()]
    except (OSError, ValueError):
        return ""
    return similar(path.name, names)


@contextmanager
def writing(path: str | os.PathLike[str], error: type[HpgoError]) -> Iterator[BinaryIO]:
    """A file to write to, that is there as `path` when the block has ended well; raises `error` if it can't be.

    A link stays one, and what it leads to is written; a file that was there keeps its mode.

    >>> import tempfile
    >>> from hpgo.errors import HpgoError
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with writing(Path(folder) / "x.txt", HpgoError) as file:
    ...         size = file.write(b"whole")
    ...     print(*(one.name for one in Path(folder).iterdir()))
    x.txt
    """
    path = as_path(path, error)
    try:
        wrong = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        wrong = True
    if wrong:
        raise file_error(error)(
            f"can't write {safe_repr(str(path))}: a name holds no NUL, and no half characters",
            "name a file in a folder that exists",
            code="not_writable",
        )
    try:
        target = _led_to(path)
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(13, os.strerror(13))
        beside = target.with_name(f".{os.urandom(8).hex()}.tmp")
        try:
            with beside.open("xb") as file:
                yield file
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            beside.replace(target)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
    except OSError as failure:
        full = failure.errno in {errno.ENOSPC, errno.EDQUOT}
        hint = "make room there, or name a file elsewhere" if full else "name a file in a folder that exists"
        raise refused("write", path, failure, error, hint) from None


def _led_to(path: Path) -> Path:
    """What a link leads to in the end, or the path itself; raises OSError for a link that leads to itself."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:  # of Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def refused(
    to_do: str, path: str | os.PathLike[str], failure: OSError | ValueError, error: type[HpgoError], hint: str
) -> FileError:
    """The error that says why the operating system won't `read` or `write` the file `path`, in its words."""
    reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
    return file_error(error)(f"can't {to_do} `{path}`: {reason}", hint, code="not_writable")
