"""Published weights: arrays of Google's ViT, of DeiT from the PyTorch hub, and of Hugging Face's models.

A file names its tensors by one of four schemes. Each scheme maps names of hpgo's modules to names in the file. Only the
tensors of a stage's layers are read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, FileError, HpgoError
from hpgo.runtime.tensor_files import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpgo.runtime.workload import Workload

    Tensors = Mapping[str, Callable[[], torch.Tensor]]

_FILES = ("*.safetensors", "pytorch_model*.bin", "*.npz")
"""Files of weights in a folder; the first pattern that matches any file is used."""
_WEIGHT = (".weight", ".gamma", "/kernel", "/scale")
_BIAS = (".bias", ".beta", "/bias")
_GIVEN = "give the file that PipeEdge reads, or a folder of a Hugging Face model"

_HUGGING_FACE_BLOCK = {
    "widen": ("intermediate.dense",),
    "narrow": ("output.dense",),
    "join": ("attention.output.dense",),
}
_SCHEMES: dict[str, tuple[str, dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]] = {
    "embedding/kernel": (
        "Transformer/encoderblock_{}/",
        {
            "norm_1": ("LayerNorm_0",),
            "attend": tuple(f"MultiHeadDotProductAttention_1/{name}" for name in ("query", "key", "value")),
            "join": ("MultiHeadDotProductAttention_1/out",),
            "norm_2": ("LayerNorm_2",),
            "widen": ("MlpBlock_3/Dense_0",),
            "narrow": ("MlpBlock_3/Dense_1",),
        },
        {
            "before.convolve": ("embedding",),
            "before.whole": ("cls",),
            "before.positions": ("Transformer/posembed_input/pos_embedding",),
            "behind.norm": ("Transformer/encoder_norm",),
            "behind.linear": ("head",),
        },
    ),
    "patch_embed.proj.weight": (
        "blocks.{}.",
        {
            "norm_1": ("norm1",),
            "attend": ("attn.qkv",),
            "join": ("attn.proj",),
            "norm_2": ("norm2",),
            "widen": ("mlp.fc1",),
            "narrow": ("mlp.fc2",),
        },
        {
            "before.convolve": ("patch_embed.proj",),
            "before.whole": ("cls_token", "dist_token"),
            "before.positions": ("pos_embed",),
            "behind.norm": ("norm",),
            "behind.linear": ("head",),
        },
    ),
    "embeddings.patch_embeddings.projection.weight": (
        "encoder.layer.{}.",
        {
            **_HUGGING_FACE_BLOCK,
            "norm_1": ("layernorm_before",),
            "attend": tuple(f"attention.attention.{name}" for name in ("query", "key", "value")),
            "norm_2": ("layernorm_after",),
        },
        {
            "before.convolve": ("embeddings.patch_embeddings.projection",),
            "before.whole": ("embeddings.cls_token", "embeddings.distillation_token"),
            "before.positions": ("embeddings.position_embeddings",),
            "behind.norm": ("layernorm",),
            "behind.linear": ("classifier",),
        },
    ),
    "embeddings.word_embeddings.weight": (
        "encoder.layer.{}.",
        {
            **_HUGGING_FACE_BLOCK,
            "norm_1": ("attention.output.LayerNorm",),
            "attend": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
            "norm_2": ("output.LayerNorm",),
        },
        {
            "before.tokens": ("embeddings.word_embeddings",),
            "before.positions": ("embeddings.position_embeddings",),
            "before.segments": ("embeddings.token_type_embeddings",),
            "before.norm": ("embeddings.LayerNorm",),
            "behind.linear": ("pooler.dense",),
            "behind.classify": ("classifier",),
        },
    ),
}
"""Naming schemes by a tensor name that identifies them: the prefix of blocks, names in blocks, and other names."""


def with_weights(workload: Workload, path: Path) -> Workload:
    """Return `workload`, whose layers are quarters of blocks, with the weights of a file or a folder.

    Weights are read when a layer is built. Raises FileError for a file that can't be read, and ArgumentError for one
    with an unknown naming scheme.
    """
    tensors = _open(path)
    for mark in _SCHEMES:
        # Models with a task head put a prefix such as `bert.` before all names. The shortest match has the model's own
        # prefix.
        marks = [name for name in tensors if name == mark or name.endswith(f".{mark}")]
        if marks:
            published = _Published(path, tensors, mark, min(marks, key=len).removesuffix(mark))
            break
    else:
        raise ArgumentError(
            f"the naming scheme of `{path}` is unknown: its first tensor is `{shorten(next(iter(tensors), ''))}`",
            _GIVEN,
        )
    nodes = workload.network.nodes
    # Replace the constructors instead of the modules, so that each rank reads only the weights of the layers that it
    # builds.
    for layer, node in nodes.items():
        nodes[layer] = replace(node, make=partial(published.fill, layer, node.make))
    return workload


class _Published:
    """Published tensors, accessed by the names of hpgo's modules."""

    def __init__(self, path: Path, tensors: Tensors, mark: str, prefix: str) -> None:
        self._path, self._tensors, self._prefix = path, tensors, prefix
        self._root, self._in_blocks, self._beside = _SCHEMES[mark]

    def fill(self, layer: str, make: Callable[[], nn.Module]) -> nn.Module:
        """Build the module of a layer, and fill in its published weights unless it is on the meta device."""
        module = make()
        block, _, _ = layer.partition(".")
        number = block.rpartition("-")[2]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                # Modules on the meta device serve only to find shapes.
                if not parameter.is_meta:
                    parameter.copy_(self._read(number, name, tuple(parameter.shape)))
        return module

    def _read(self, block: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the weight that a layer of a block calls `name`, in the layout of hpgo's modules."""
        if name in self._beside:  # a single tensor, such as an embedding of positions
            stems = self._beside[name][: shape[0]]  # only distilled models have the second token
            pieces = [self._tensors[self._resolve(stem, ("",))]() for stem in stems]
            return self._checked(name, torch.cat([piece.reshape(-1, shape[-1]) for piece in pieces]), shape)
        # Queries, keys and values are one matrix here, so concatenate the file's three.
        inner = name.removeprefix("block.")
        stem, _, kind = inner.rpartition(".")
        if inner == name:
            stems = self._beside.get(stem, ())
        else:
            root = self._root.format(int(block) - 1)
            stems = tuple(root + one for one in self._in_blocks.get(stem, ()))
        if not stems:
            raise ArgumentError(f"`{self._path}` has no `{stem}` as this model has it", _GIVEN)
        found = [self._resolve(one, _WEIGHT if kind == "weight" else _BIAS) for one in stems]
        return self._checked(name, torch.cat([self._to_torch_layout(one) for one in found]), shape)

    def _resolve(self, stem: str, endings: tuple[str, ...]) -> str:
        # Task heads have no prefix, even if all other names have one.
        names = [f"{start}{stem}{ending}" for start in (self._prefix, "") for ending in endings]
        for name in names:
            if name in self._tensors:
                return name
        raise ArgumentError(f"`{self._path}` lacks `{names[0]}`", _GIVEN, code="missing")

    def _to_torch_layout(self, name: str) -> torch.Tensor:
        """Return a tensor with its outputs first, and one row for all heads."""
        tensor = self._tensors[name]()
        if name.endswith("/kernel"):
            if tensor.dim() == 4:  # JAX: height, width, inputs, outputs
                return tensor.permute(3, 2, 0, 1)
            # JAX keeps heads as a separate dimension, which is on the input side of the output projection, and on the
            # output side of others.
            flat = tensor.reshape(-1, tensor.shape[-1]) if name.endswith("/out/kernel") else tensor.flatten(start_dim=1)
            return flat.t()
        return tensor.flatten() if name.endswith("/bias") else tensor

    def _checked(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(tensor.shape) != shape:
            raise ArgumentError(
                f"`{self._path}` has the shape {tuple(tensor.shape)} for `{name}`, but the model has {shape}",
                "choose the model of this file with `-m`",
            )
        return tensor


def _open(path: Path) -> Tensors:
    """Return functions that read tensors, by name."""
    if path.is_dir():
        found = next((files for kind in _FILES if (files := sorted(path.glob(kind)))), [])
        if not found:
            raise FileError(
                f"there are no weights in the folder `{path}`", f"add one of {', '.join(_FILES)}", code="not_found"
            )
        # A model may be split over several safetensors or bin files, but each npz file is a separate model.
        if found[0].suffix == ".npz" and len(found) > 1:
            raise FileError(f"the folder `{path}` has {len(found)} files of weights", "name one of them")
        return {name: read for file in found for name, read in _file(file).items()}
    return _file(path)


def _file(path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            with TensorFile(path) as file:
                return {name: partial(_tensor_of, path, name) for name in file}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: partial(_array_of, path, name) for name in arrays.files}
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: partial(held.__getitem__, name) for name in held}
    except HpgoError:
        raise
    except Exception as failure:  # numpy and torch raise undocumented types for foreign files
        raise FileError(
            f"the weights in `{path}` can't be read: {type(failure).__name__}: {shorten(str(failure), 200)}",
            _GIVEN,
            code="damaged_file",
        ) from failure


def _tensor_of(path: Path, name: str) -> torch.Tensor:
    with TensorFile(path) as file:
        return file.read(name)


def _array_of(path: Path, name: str) -> torch.Tensor:
    with np.load(path, allow_pickle=False) as arrays:
        return torch.from_numpy(np.ascontiguousarray(arrays[name]))
