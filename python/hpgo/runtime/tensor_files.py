"""Files of named tensors, in the layout of safetensors, which other tools read too.

Eight bytes with the length of a header in JSON, the header with each tensor's type, shape and place, then the tensors.
A tensor is read without the others.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hpgo.base.errors import RunError
from hpgo.base.files import refused
from hpgo.base.wording import shorten

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
_MOST_HEADER_BYTES = 100_000_000
"""As other readers of the layout have it."""
_PAST_CACHE = getattr(os, "O_DIRECT", 0)
"""Files go past the system's cache where it lets them: keeping there what nobody reads soon takes more of a processor
than all else, beside steps that want it."""
_BLOCK_BYTES = 2**23
_MOST_LENGTH = 2**62
"""Of a dimension, and of a file: torch counts in 64 bits with a sign."""


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Writes tensors that lie on the CPU without gaps, down to the disk; returns the bytes of the file.

    Raises FileError if the file can't be written, and RunError for a type that the layout has no name for.

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
    """A file of tensors that is open for reading; going through it gives the names."""

    def __init__(self, path: Path) -> None:
        """Raises FileError if the file can't be read, and RunError if it is none of tensors."""
        self._path = path
        try:
            self._file = path.open("rb")
            size_bytes = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            text = self._file.read(length) if length <= _MOST_HEADER_BYTES else b""
        except OSError as failure:
            raise refused("read", path, failure, RunError, "all ranks need the folder, on a disk they share") from None
        self._begin = _LENGTH_BYTES + length
        try:
            self._header: dict[str, Any] = json.loads(text)
            room_bytes = size_bytes - self._begin
            self._places = {
                name: _place(entry, room_bytes) for name, entry in self._header.items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._file.close()
            raise RunError(
                f"`{path}` is no file of tensors, or a damaged one", "resume from another one", code="damaged_file"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def dtype(self, name: str) -> torch.dtype:
        """Of one tensor."""
        return self._of(name)[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self._of(name)[1]

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU. Raises RunError if the file lacks it."""
        dtype, shape, begin = self._of(name)
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(self._begin + begin)
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes and self._file.readinto(_bytes_of(tensor).data) != size_bytes:
            raise RunError(f"`{self._path}` ends within `{shorten(name)}`", "resume from another one")
        return tensor

    def _of(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        if name not in self._places:
            raise RunError(f"`{self._path}` lacks `{shorten(name)}`", "resume from another one", code="missing")
        return self._places[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _place(entry: Any, room_bytes: int) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Type, shape and first byte of a tensor in a file with so much behind its header.

    Raises ValueError, KeyError or TypeError for what makes no sense.
    """
    dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if any(type(one) is not int or not 0 <= one < _MOST_LENGTH for one in (begin, end, *shape)):
        raise ValueError(entry)
    if end - begin != math.prod(shape, start=dtype.itemsize) or end > room_bytes:
        raise ValueError(entry)
    return dtype, shape, begin
