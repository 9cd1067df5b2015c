"""Files of named tensors in the format of safetensors.

The library `safetensors` reads them. A checkpoint is written beside training steps, and for that the library's writer
costs too much: 512 MiB take 0.15 to 0.57 s of a processor through the system's cache, and 0.08 to 0.10 s past it
(ext4, one thread, the file synced in both cases). So `write` lays out the header itself and goes past the cache.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hpgo.base.extras import library
from hpgo.base.files import refused
from hpgo.base.messages import shorten
from hpgo.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

Bytes = npt.NDArray[np.uint8]
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_LENGTH_BYTES = 8
_PAST_CACHE = getattr(os, "O_DIRECT", 0)
"""Files go past the system's cache where it lets them: keeping there what nobody reads soon takes more of a processor
than all else, beside steps that want it."""
_BLOCK_BYTES = 2**23
_ANOTHER = "resume from another one"


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write contiguous tensors of the CPU to a file, sync it to the disk, and return its size in bytes.

    Raises FileError if the file can't be written, and RunError for a type that the format has no name for.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "x.safetensors"
    ...     size_bytes = write(path, {"a": torch.ones(2, 3), "b": torch.tensor(7)})
    ...     with TensorFile(path) as file:
    ...         print(sorted(file), file.shape("a"), file.read("b"))
    ['a', 'b'] (2, 3) tensor(7)
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise RunError(f"`{name}` is of {tensor.dtype}, which files of tensors don't hold", "use another type")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little") + text, dtype=np.uint8)
    pieces = [head, *map(_bytes_of, tensors.values())]
    try:
        try:
            _write(path, pieces, past_cache=_PAST_CACHE)
        except OSError as failure:
            if failure.errno != errno.EINVAL:  # which is what a file system says that can't do without
                raise
            _write(path, pieces, past_cache=0)
    except OSError as failure:
        raise refused("write", path, failure, RunError, "make room, or name another folder") from None
    return _LENGTH_BYTES + len(text) + end


def _write(path: Path, pieces: Sequence[Bytes], *, past_cache: int) -> None:
    """Writes bytes one behind the other, in whole pages and from memory that begins with one, and cuts off the rest."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | past_cache, 0o666)
    try:
        block = np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), dtype=np.uint8)
        filled = 0
        for piece in pieces:
            begin = 0
            while begin < len(piece):
                count = min(len(piece) - begin, _BLOCK_BYTES - filled)
                block[filled : filled + count] = piece[begin : begin + count]
                begin, filled = begin + count, filled + count
                if filled == _BLOCK_BYTES:
                    _write_all(file, block)
                    filled = 0
        _write_all(file, block[: -(-filled // mmap.PAGESIZE) * mmap.PAGESIZE])
        os.ftruncate(file, sum(map(len, pieces)))
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, block: Bytes) -> None:
    rest = block.data
    while rest:
        rest = rest[os.write(file, rest) :]


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class TensorFile:
    """A file of tensors that is open for reading. Iterating over it gives the names."""

    def __init__(self, path: Path) -> None:
        """Raise FileError if the file can't be read, and RunError if it holds no tensors or is damaged."""
        self._path = path
        safetensors = library("safetensors", extra="torch", task="checkpoints and weights")
        try:
            path.open("rb").close()  # the library's own errors of the system have no message fit to show
            self._file = safetensors.safe_open(path, framework="pt")
            self._names = tuple(self._file.keys())
        except OSError as failure:
            raise refused("read", path, failure, RunError, "all ranks need the folder, on a disk they share") from None
        except safetensors.SafetensorError:
            raise RunError(f"`{path}` is no file of tensors, or a damaged one", _ANOTHER, code="damaged_file") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of one tensor. Raises RunError if the file lacks it, or if torch has no such type."""
        kind = self._of(name).get_dtype()
        if kind not in _TYPES:
            raise RunError(
                f"`{self._path}` holds `{shorten(name)}` in {kind}, which can't be read", _ANOTHER, code="damaged_file"
            )
        return _TYPES[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor. Raises RunError if the file lacks it."""
        return tuple(self._of(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, in memory of its own. Raises RunError like `dtype`."""
        self.dtype(name)
        # The library maps the file into memory. Without the copy, a tensor would change or vanish with its file.
        tensor: torch.Tensor = self._file.get_tensor(name).clone()
        return tensor

    def _of(self, name: str) -> Any:
        if name not in self._names:
            raise RunError(f"`{self._path}` lacks `{shorten(name)}`", _ANOTHER, code="missing")
        return self._file.get_slice(name)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, value, traceback)
