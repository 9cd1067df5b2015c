"""Checkpoints of `torch.distributed.checkpoint` (DCP), read and written by one process alone."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hpgo.base.documents import make_folder
from hpgo.base.files import as_path, refused
from hpgo.base.messages import shorten
from hpgo.errors import FileError, RunError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from pathlib import Path

METADATA = ".metadata"
"""File that makes a folder a checkpoint of DCP."""


class DcpFolder:
    """Entries of a checkpoint of DCP, by key. An entry is read when it is asked for.

    The file `.metadata` and all entries but tensors are pickles, so read only folders that you trust.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder. Raises FileError if its metadata can't be read."""
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.path = path
        self._reader = FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as failure:  # a damaged pickle raises errors of any type
            raise FileError(
                f"`{path / METADATA}` can't be read: {shorten(str(failure) or type(failure).__name__)}",
                "name a folder that `torch.distributed.checkpoint.save` has written",
                code="damaged_file",
            ) from failure
        # Torch would read the metadata again for each tensor: 80 ms in a folder of 2,000.
        self._reader.read_metadata = lambda *_, **__: metadata
        entries = metadata.state_dict_metadata
        self.tensors: dict[str, Any] = {
            key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)
        }
        """Shape and type of each tensor."""
        self.values = [key for key in entries if key not in self.tensors]
        """Keys of the entries that are no tensors."""

    def read(self, *keys: str) -> list[Any]:
        """Return entries: tensors on the CPU, whole even if they were saved in shards, and other objects."""
        from torch.distributed.checkpoint import load

        found: dict[str, Any] = dict.fromkeys(keys)
        for key in keys:
            if (entry := self.tensors.get(key)) is not None:
                found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        with _alone():
            load(found, storage_reader=self._reader, no_dist=True)
        return [found[key] for key in keys]


def write_folder(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> list[Path]:
    """Write a nested state as a checkpoint of DCP. Return the paths of the files.

    Raises FileError if the folder can't be written.
    """
    from torch.distributed.checkpoint import FileSystemWriter, save

    path = as_path(folder, RunError)
    make_folder(path)
    try:
        with _alone():
            save(dict(state), storage_writer=FileSystemWriter(path), no_dist=True)
    except (OSError, ValueError) as failure:
        raise refused("write", path, failure, RunError, "name an empty folder") from None
    return sorted(path.iterdir())


@contextmanager
def _alone() -> Iterator[None]:
    """Ignore torch's warning that this process alone reads or writes a checkpoint, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
