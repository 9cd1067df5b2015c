"""Files with the weights of a model under its own names.

Weights are read from a file of safetensors, from a folder of them with an index as Hugging Face writes it, from a
checkpoint of `torch.distributed.checkpoint`, or from a checkpoint of a run. They are written in the first three forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from hpgo.base.checks import check_is, number
from hpgo.base.documents import make_folder, parse, read_text, write_text
from hpgo.base.files import as_path, exists, is_folder, refused
from hpgo.base.messages import join_words, pluralize, safe_repr, shorten, similar
from hpgo.errors import FileError, RunError
from hpgo.runtime.checkpoint import INDEX, Checkpoint, read_checkpoint, whole_ones
from hpgo.runtime.dcp import METADATA, DcpFolder
from hpgo.runtime.tensor_files import TensorFile, write

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from hpgo.runtime.stage_module import StageModule
    from hpgo.runtime.weight_names import WeightNames

_SINGLE, _SHARDED = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""Default size of a file from which on weights are split, as `save_pretrained` of transformers had it for years."""
_WRAPPERS = ("_orig_mod.", "module.", "model.", "app.")
"""Prefixes that wrappers put before all names: `torch.compile`, data parallelism, and states of `{"model": …}`, which
tutorials of torch nest in `{"app": …}`."""
OPTIMIZER_ENTRY = re.compile(r"(app\.)?(optimizers?|optim)\.")
"""Prefix of the keys of an optimizer's state in a checkpoint of torch, as torchtitan and tutorials of torch have it."""
_OTHER_ENTRY = re.compile(r"(lr_scheduler|dataloader|train_state)\.")
"""Prefix of the keys of other state of a torchtitan run."""


class WeightFiles(Mapping[str, "Tensor"]):
    """Weights in files, by name. A tensor is read when it is asked for. Close it, or use it as a context manager.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "model.safetensors"
    ...     _ = write_weights(path, {"up.weight": torch.ones(2, 3)})
    ...     with WeightFiles(path) as weights:
    ...         print(weights.shape("up.weight"), dict(weights))
    (2, 3) {'up.weight': tensor([[1., 1., 1.],
            [1., 1., 1.]])}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the weights at `path`, a file or a folder.

        Of a folder with checkpoints of a run, the newest complete one is opened. Raises FileError or RunError if there
        are no weights, or if files are damaged.
        """
        self.path = as_path(path, RunError)
        if not exists(str(self.path)):
            raise FileError(
                f"file not found: `{self.path}`",
                "name a file of safetensors, a folder of Hugging Face, or a checkpoint",
                code="not_found",
            )
        self.config: dict[str, Any] | None = None
        """Content of the model's `config.json`, if the files have one."""
        self._opened = ExitStack()
        self._files: dict[Path, TensorFile] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        """File of each tensor and its name there."""
        self._checksums: dict[str, int] = {}
        """Checksum with which each tensor of a run's checkpoint was saved, by its name there."""
        self._dcp: DcpFolder | None = None
        self._dcp_names: list[str] = []
        """Keys of the weights in a checkpoint of torch."""
        if not is_folder(self.path):
            self._take_file(self.path)
        elif (self.path / INDEX).is_file():
            self._take_checkpoint(read_checkpoint(self.path))
        elif (self.path / METADATA).is_file():
            self._take_dcp()
        elif (index := self.path / _SHARDED).is_file():
            self._take_index(index)
        elif (self.path / _SINGLE).is_file():
            self._take_file(self.path / _SINGLE)
        elif found := whole_ones(self.path)[0]:
            self._take_checkpoint(found[-1])
        else:
            raise FileError(
                f"`{self.path}` has no weights: neither `{_SINGLE}`, `{_SHARDED}`, `{METADATA}`, nor a complete"
                " checkpoint",
                "name a file of safetensors, a folder of Hugging Face, or a checkpoint",
                code="not_found",
            )
        if self.config is None and is_folder(self.path) and (file := self.path / "config.json").is_file():
            self.config = _json_of(file)

    def _take_file(self, path: Path) -> None:
        if path.name.endswith(".index.json"):
            self._take_index(path)
            return
        self._places |= {name: (path, name) for name in self._file(path)}

    def _take_index(self, path: Path) -> None:
        places = _json_of(path).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
            raise FileError(
                f"`weight_map` of `{path}` is {safe_repr(places)}, but must map names to files",
                "name a folder that `save_pretrained` or `hpgo weights` has written",
                code="damaged_file",
            )
        self._places = {name: (path.parent / file, name) for name, file in places.items()}

    def _take_checkpoint(self, source: Checkpoint) -> None:
        facts = source.facts
        if not isinstance(facts.get("names"), dict):
            raise RunError(
                f"`{source.path}` has no names of the model, because an earlier version of hpgo wrote it",
                "resume the run and save again",
                code="missing",
            )
        self.config, self._checksums = facts.get("config"), facts.get("checksums", {})
        for key, names in facts["names"].items():
            # A layer may also read a statistic that another layer updates and saves.
            for name in names if key in facts["tensors"] else ():
                self._places.setdefault(name, (source.path / facts["tensors"][key], key))

    def _take_dcp(self) -> None:
        self._dcp = DcpFolder(self.path)
        self._dcp_names = [
            key for key in self._dcp.tensors if not OPTIMIZER_ENTRY.match(key) and not _OTHER_ENTRY.match(key)
        ]

    def _file(self, path: Path) -> TensorFile:
        if path not in self._files:
            self._files[path] = self._opened.enter_context(TensorFile(path))
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dcp_names or self._places)

    def __len__(self) -> int:
        return len(self._dcp_names or self._places)

    def __getitem__(self, name: str) -> Tensor:
        if self._dcp is not None:
            tensor: Tensor = self._dcp.read(name)[0]
            return tensor
        path, key = self._places[name]
        return self._file(path).read(key, expected=self._checksums.get(key))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        if self._dcp is not None:
            return tuple(self._dcp.tensors[name].size)
        path, key = self._places[name]
        return self._file(path).shape(key)

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in bytes without reading it."""
        if self._dcp is not None:
            kind = self._dcp.tensors[name].properties.dtype
        else:
            path, key = self._places[name]
            kind = self._file(path).dtype(key)
        return torch.Size(self.shape(name)).numel() * kind.itemsize

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the `state_dict` of a model, of tensors on the CPU, from a checkpoint of a run or another file of weights.

    `model.load_state_dict(read_weights(path))` loads it into the model that the run's workload was given. Tied weights
    have all of their names. Raises FileError or RunError if there are no weights, or if files are damaged.
    """
    with WeightFiles(path) as weights:
        return dict(weights)


def write_weights(
    path: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write weights as safetensors, and return the paths of the files.

    `path` is a file, or a folder as Hugging Face's libraries read it, where `config` becomes `config.json`. Weights of
    more than `max_shard_bytes` are split into several files, and a file with the ending `.index.json` lists them.
    Raises FileError if files can't be written.
    """
    path, weights = as_path(path, RunError), checked_weights(weights)
    number("max_shard_bytes", max_shard_bytes, above=0)
    check_is("config", config, Mapping, "give the content of a config.json", or_none=True)
    if path.suffix != ".safetensors":
        make_folder(path)
        first = path / _SINGLE
    else:
        first = path
    shards: list[list[str]] = [[]]
    sizes_bytes = {name: _size_bytes(weights, name) for name in weights}
    filled = 0
    for name, size_bytes in sizes_bytes.items():
        if shards[-1] and filled + size_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_bytes
    written: list[Path] = []
    places: dict[str, str] = {}
    for at, names in enumerate(shards, 1):
        file = first if len(shards) == 1 else first.with_name(f"{first.stem}-{at:05}-of-{len(shards):05}.safetensors")
        # Only the tensors of one file are in memory at a time.
        _write_whole(file, {name: weights[name].detach().cpu().contiguous() for name in names})
        places |= dict.fromkeys(names, file.name)
        written.append(file)
    if len(shards) > 1:
        index = first.with_name(f"{first.name}.index.json")
        facts = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": places}
        write_text(index, json.dumps(facts, indent=2) + "\n", FileError)
        written.append(index)
    if config is not None and first is not path:
        write_text(path / "config.json", json.dumps(config, indent=2) + "\n", FileError)
        written.append(path / "config.json")
    return written


def checked_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights as they are. Raises ArgumentError unless names are text and values are tensors."""
    check_is("weights", weights, Mapping, "give a `state_dict`")
    # Tensors of `WeightFiles` are read one by one as they are written, so that it stays as it is.
    if isinstance(weights, WeightFiles):
        return weights
    for name, value in weights.items():
        check_is("a name of a weight", name, str, "give text")
        check_is(f"weight `{shorten(name)}`", value, torch.Tensor, "give a tensor")
    return weights


def load_weights(
    path: str | os.PathLike[str], parts: Mapping[int, StageModule], names: WeightNames
) -> dict[str, Tensor]:
    """Copy weights from files into the stages of a rank, of which only these weights are read.

    Like `load_state_dict`, it demands all weights of the model and no others, and converts types. One of the names of a
    tied weight is enough. If all names have the prefix of a wrapper, such as `module.`, it is removed. Returns the
    weights that no layer trains. Raises RunError, before any change, if the files don't fit the model.
    """
    with WeightFiles(path) as weights:
        prefix = _prefix(weights, names)

        def source_of(choices: tuple[str, ...], shape: tuple[int, ...]) -> str:
            name = next((prefix + one for one in choices if prefix + one in weights), None)
            if name is None:
                raise RunError(
                    f"`{weights.path}` lacks `{shorten(choices[0])}`",
                    similar(choices[0], weights) or "name the weights of this model",
                    code="missing",
                )
            if weights.shape(name) != shape:
                raise RunError(
                    f"`{weights.path}` holds `{shorten(choices[0])}` of shape {weights.shape(name)}, but the model has"
                    f" {shape}",
                    "name the weights of this model",
                    code="mismatch",
                )
            return name

        # A tensor without a place in the model shows that the files belong to another one, even if all others fit.
        if strange := [one for one in weights if one.startswith(prefix) and one[len(prefix) :] not in names.all]:
            raise RunError(
                f"`{weights.path}` holds {pluralize(len(strange), 'tensor')} that the model lacks:"
                f" {join_words([f'`{shorten(one)}`' for one in strange[:3]])}",
                "name the weights of this model",
                code="mismatch",
            )
        wanted = [
            (source_of(names.of[held], tuple(tensor.shape)), tensor)
            for part in parts.values()
            for held, tensor in part.tensors().items()
            if held in names.of
        ]
        tied = {one: choices for choices in names.of.values() for one in choices}
        others = {
            name: source_of(tied.get(name, (name,)), tuple(tensor.shape)) for name, tensor in names.others.items()
        }
        for name, tensor in wanted:
            tensor.detach().copy_(weights[name])
        return {name: weights[source] for name, source in others.items()}


def _prefix(weights: Mapping[str, Tensor], names: WeightNames) -> str:
    """Return the prefix of wrappers that the files have before the model's names; empty if there is none."""
    known = names.all
    found = ""
    while not any(one.startswith(found) and one[len(found) :] in known for one in weights):
        longer = next(
            (f"{found}{one}" for one in _WRAPPERS if any(name.startswith(found + one) for name in weights)), ""
        )
        if not longer:
            return ""
        found = longer
    return found


def _write_whole(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file that gets its name once it is complete."""
    beside = file.with_name(f".{file.name}.tmp")
    try:
        write(beside, tensors)
        beside.replace(file)
    except ValueError as failure:  # a name that is no text of the operating system
        raise refused("write", file, failure, RunError, "name another file") from None
    finally:
        beside.unlink(missing_ok=True)


def _size_bytes(weights: Mapping[str, Tensor], name: str) -> int:
    return weights.size_bytes(name) if isinstance(weights, WeightFiles) else weights[name].nbytes


def _json_of(path: Path) -> dict[str, Any]:
    found = parse(read_text(path, FileError), str(path), FileError)
    if not isinstance(found, dict):
        raise FileError(f"`{path}` is no JSON object", "name a folder with weights", code="damaged_file")
    return found
