"""Size-limited reading of files, and atomic writing.

New content is written to a temporary file in the same folder, which is then renamed. Concurrent readers see either the
old or the new content, and an interrupted program leaves the old file intact. Pipes and devices can't be replaced by a
rename, so they are written to directly.
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

MAX_BYTES = 2**26
"""Largest size in bytes of a file that people write, or that holds one request or one response."""
MAX_BYTES_OF_RUNS = 2**29
"""Largest size in bytes of a file that has a line or an entry for each action of a run."""
GZIP = b"\x1f\x8b"
"""First two bytes of a gzip file."""
_PIECE = 2**20
_ENDING = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,9}")
"""A suffix that marks a file name: unlike `.5-72b` in the model name `qwen2.5-72b`, it starts with a letter."""


def as_path(path: str | os.PathLike[str], error: type[HpgoError]) -> Path:
    """Return `path` as a Path; raise `error` if it is not a valid path."""
    try:
        return Path(path)
    except Exception:  # noqa: BLE001 -- a TypeError, or any error of a foreign `__fspath__`
        raise error(f"{safe_repr(path)} is not a path", "give text or a `pathlib.Path`") from None


def may_be_file(path: Path) -> bool:
    """Return whether `path` is meant as a file or a folder: it exists, or it has a suffix or a separator.

    >>> may_be_file(Path("model.yaml")), may_be_file(Path("models/mine")), may_be_file(Path("qwen2.5-72b"))
    (True, True, False)
    """
    try:
        return path.exists() or _ENDING.fullmatch(path.suffix) is not None or len(path.parts) > 1
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return True  # the later attempt to read it reports the reason


def exists(name: str) -> bool:
    """Return whether a file or folder has this name, or the name is invalid, so that using it reports the reason.

    >>> exists("/dev/null"), exists("no/such/file")
    (True, False)
    """
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return True


def is_folder(path: Path) -> bool:
    """Return whether `path` is an existing folder.

    Return False for names that the operating system rejects. The attempt to read them reports the reason.
    """
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def read_bytes(path: str | os.PathLike[str], error: type[HpgoError], *, maximum: int = MAX_BYTES, hint: str) -> bytes:
    """Return the content of the file `path`.

    Raises `error` if the file can't be read or has more than `maximum` bytes. At most `maximum` + 1 bytes are read, so
    endless devices and pipes are safe, too. `hint` is the error's hint if the operating system refuses to read the
    file.
    """
    path = as_path(path, error)
    data = bytearray()
    try:
        with path.open("rb") as file:
            while len(data) <= maximum and (piece := file.read(min(_PIECE, maximum + 1 - len(data)))):
                data += piece
    except FileNotFoundError:
        raise file_error(error)(f"file not found: `{path}`", _beside(path), code="not_found") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        raise refused("read", path, failure, error, hint) from None
    if len(data) > maximum:
        raise error(f"{path} has more than {maximum >> 20} MiB", "name a smaller file", code="too_large")
    return bytes(data)


def unpacked(data: bytes, path: str | os.PathLike[str], error: type[HpgoError], *, maximum: int) -> bytes:
    """Return decompressed gzip data; raise `error` for the file `path` if it is damaged or above `maximum` bytes.

    >>> import gzip
    >>> from hpgo.errors import HpgoError
    >>> unpacked(gzip.compress(b"{}"), "x.json.gz", HpgoError, maximum=2)
    b'{}'
    """
    import gzip
    import io
    import zlib

    try:
        # A few bytes can expand to gigabytes, so decompression stops after `maximum` bytes.
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(maximum + 1)
    except (OSError, EOFError, zlib.error) as failure:
        raise error(f"{path} is a damaged gzip file: {failure}", "compress it again", code="damaged_file") from None
    if len(found) > maximum:
        raise error(
            f"{path} has more than {maximum >> 20} MiB after decompression", "name a smaller file", code="too_large"
        )
    return found


def stem(path: Path) -> str:
    """Return the name of a file without its ending, and without `.gz` behind that.

    >>> stem(Path("traces/steps-pbs-8.json.gz")), stem(Path("bert.yaml"))
    ('steps-pbs-8', 'bert')
    """
    return path.with_suffix("").stem if path.suffix.lower() == ".gz" else path.stem


def _beside(path: Path) -> str:
    """Return a hint that names a similar file in the folder of `path`, or that reports a missing folder."""
    try:
        if not path.parent.is_dir():
            return "check the path: its folder does not exist either"
        names = [other.name for other in path.parent.iterdir() if other.is_file()]
    except (OSError, ValueError):
        return ""
    return similar(path.name, names)


@contextmanager
def writing(path: str | os.PathLike[str], error: type[HpgoError]) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when the block ends without an exception.

    A symbolic link is kept, and its target is written. An existing file keeps its mode. Raises `error` if `path` can't
    be written.

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
        # A rename would replace a device or a pipe by a regular file, so write to it directly.
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        # A rename needs write permission on the folder only. Check the file itself, so that read-only files stay
        # protected.
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
        hint = "delete files there, or name a file on another disk" if full else "name a file in a folder that exists"
        raise refused("write", path, failure, error, hint) from None


def _led_to(path: Path) -> Path:
    """Return the final target of a symbolic link, or the path itself; raise OSError for a cyclic link."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:  # Python before 3.13 raises this for a cycle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def refused(
    to_do: str, path: str | os.PathLike[str], failure: OSError | ValueError, error: type[HpgoError], hint: str
) -> FileError:
    """Return an error that quotes the reason why the operating system can't `read` or `write` the file `path`."""
    reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
    return file_error(error)(f"can't {to_do} `{path}`: {reason}", hint, code="not_writable")
