"""Files of named tensors in the format of safetensors.

The library `safetensors` reads them. Checkpoints are written while training continues, and the library's writer needs
too much processor time for that: 512 MiB take 0.15 to 0.57 s of a core through the page cache, and 0.08 to 0.10 s
around it (ext4, one thread, the file synced in both cases). So `write` creates the header itself and bypasses the
cache.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import zlib
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
_DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag to bypass the page cache, where the system has one. Caching data that is not read soon takes more processor time
than the rest of the write, at the cost of the training steps."""
_BLOCK_BYTES = 2**23
_ANOTHER = "name another file or checkpoint"


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
    # Transformers reads only files that name the library whose tensors they hold.
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise RunError(
                f"`{name}` has the type {tensor.dtype}, which the safetensors format lacks", "use another type"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # The format pads the header with spaces, so that tensors start at a multiple of 8 bytes.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little") + text, dtype=np.uint8)
    pieces = [head, *map(_bytes_of, tensors.values())]
    try:
        try:
            _write(path, pieces, direct=_DIRECT)
        except OSError as failure:
            # File systems without direct writes, such as some versions of tmpfs, return EINVAL.
            if failure.errno != errno.EINVAL:
                raise
            _write(path, pieces, direct=0)
    except OSError as failure:
        raise refused("write", path, failure, RunError, "free disk space, or name another folder") from None
    return _LENGTH_BYTES + len(text) + end


def _write(path: Path, pieces: Sequence[Bytes], *, direct: int) -> None:
    """Write pieces one after the other, in whole pages from page-aligned memory, and truncate the rest."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o666)
    try:
        # Memory from mmap starts at a page, as direct writes require.
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
        # Direct writes must be whole pages. The truncation below removes what the last one adds.
        _write_all(file, block[: -(-filled // mmap.PAGESIZE) * mmap.PAGESIZE])
        os.ftruncate(file, sum(map(len, pieces)))
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, block: Bytes) -> None:
    rest = block.data
    # A signal or a full disk may cut a write short.
    while rest:
        rest = rest[os.write(file, rest) :]


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a CPU tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a contiguous CPU tensor, as zip files have it.

    It finds each change of up to 32 bits in a row, and misses others with a probability of 2⁻³². It takes 0.13 s of a
    core for 512 MiB. SHA-256 takes 0.30 s and BLAKE2b 0.58 s (one thread of an AMD EPYC).

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0000002]))
    False
    """
    return zlib.crc32(_bytes_of(tensor).data)


class TensorFile:
    """A file of tensors, open for reading. Iterating over it yields the names."""

    def __init__(self, path: Path) -> None:
        """Raise FileError if the file can't be read, and RunError if it holds no tensors or is damaged."""
        self._path = path
        safetensors = library("safetensors", extra="torch", task="checkpoints and weights")
        try:
            # Open it first, because the library's own errors for missing files have no clear message.
            path.open("rb").close()
            self._file = safetensors.safe_open(path, framework="pt")
            self._names = tuple(self._file.keys())
        except (OSError, ValueError) as failure:  # ValueError: a name that is no text of the operating system
            raise refused("read", path, failure, RunError, "put the folder on a disk that all ranks share") from None
        except safetensors.SafetensorError:
            raise RunError(f"`{path}` is no safetensors file, or is damaged", _ANOTHER, code="damaged_file") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor. Raise RunError if the file lacks it, or if torch has no such type."""
        kind = self._of(name).get_dtype()
        if kind not in _TYPES:
            raise RunError(
                f"`{self._path}` holds `{shorten(name)}` in {kind}, which can't be read", _ANOTHER, code="damaged_file"
            )
        return _TYPES[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor. Raise RunError if the file lacks it."""
        return tuple(self._of(name).get_shape())

    def read(self, name: str, *, expected: int | None = None) -> torch.Tensor:
        """Return a copy of one tensor on the CPU.

        Raise RunError like `dtype`, and if the `checksum` of the tensor is not the `expected` one, unless that is None.
        """
        self.dtype(name)
        # The library maps the file into memory. Without the copy, a tensor would change or vanish with its file.
        tensor: torch.Tensor = self._file.get_tensor(name).clone()
        if expected is not None and (found := checksum(tensor)) != expected:
            raise RunError(
                f"`{self._path}` is damaged: `{shorten(name)}` has the checksum {found:08x}, but was saved with"
                f" {expected:08x}",
                f"delete `{self._path.parent}`, so that an earlier checkpoint is used, and check the disk",
                code="damaged_file",
            )
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
