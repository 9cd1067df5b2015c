"""Weights as they were published: arrays of Google's ViT, of the hub's DeiT, and of Hugging Face's models.

A file names its tensors in one of four ways; each says what our layers' weights are called there. Nothing is read but
what the layers of a stage need.
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
"""In a folder, those of the first kind that is there."""
_WEIGHT = (".weight", ".gamma", "/kernel", "/scale")
_BIAS = (".bias", ".beta", "/bias")
_GIVEN = "give the file that PipeEdge reads, or a folder of a Hugging Face model"

_HUGGING_FACE_BLOCK = {
    "widen": ("intermediate.dense",),
    "narrow": ("output.dense",),
    "join": ("attention.output.dense",),
}
_WAYS: dict[str, tuple[str, dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]] = {
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
"""The name that tells a way -> how it names blocks, what is in them, and what is not."""


def with_weights(workload: Workload, path: Path) -> Workload:
    """`workload`, whose layers are quarters of blocks, with the weights of a file or a folder.

    They are read when a layer is made. Raises FileError for a file that can't be read, and ArgumentError for one that
    names its tensors in no way that is known.
    """
    tensors = _opened(path)
    for told in _WAYS:
        marks = [name for name in tensors if name == told or name.endswith(f".{told}")]
        if marks:
            published = _Published(path, tensors, told, min(marks, key=len).removesuffix(told))
            break
    else:
        raise ArgumentError(
            f"nobody knows whose weights `{path}` has: its first tensor is `{shorten(next(iter(tensors), ''))}`", _GIVEN
        )
    nodes = workload.network.nodes
    for layer, node in nodes.items():
        nodes[layer] = replace(node, make=partial(published.fill, layer, node.make))
    return workload


class _Published:
    """Named tensors, by what our layers call them."""

    def __init__(self, path: Path, tensors: Tensors, told: str, prefix: str) -> None:
        self._path, self._tensors, self._prefix = path, tensors, prefix
        self._root, self._in_blocks, self._beside = _WAYS[told]

    def fill(self, layer: str, make: Callable[[], nn.Module]) -> nn.Module:
        """The module of a layer, with its published weights unless it is without memory."""
        module = make()
        block, _, _ = layer.partition(".")
        number = block.rpartition("-")[2]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(self._read(number, name, tuple(parameter.shape)))
        return module

    def _read(self, block: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The weight that a layer of a block calls `name`, in our layout."""
        if name in self._beside:  # a tensor of its own
            stems = self._beside[name][: shape[0]]  # the second one is for what is distilled
            pieces = [self._tensors[self._found(stem, ("",))]() for stem in stems]
            return self._checked(name, torch.cat([piece.reshape(-1, shape[-1]) for piece in pieces]), shape)
        inner = name.removeprefix("block.")
        stem, _, kind = inner.rpartition(".")
        if inner == name:
            stems = self._beside.get(stem, ())
        else:
            root = self._root.format(int(block) - 1)
            stems = tuple(root + one for one in self._in_blocks.get(stem, ()))
        if not stems:
            raise ArgumentError(f"`{self._path}` has no `{stem}` as this model has it", _GIVEN)
        found = [self._found(one, _WEIGHT if kind == "weight" else _BIAS) for one in stems]
        return self._checked(name, torch.cat([self._turned(one) for one in found]), shape)

    def _found(self, stem: str, endings: tuple[str, ...]) -> str:
        names = [f"{start}{stem}{ending}" for start in (self._prefix, "") for ending in endings]
        for name in names:
            if name in self._tensors:
                return name
        raise ArgumentError(f"`{self._path}` lacks `{names[0]}`", _GIVEN, code="missing")

    def _turned(self, name: str) -> torch.Tensor:
        """A tensor with outputs first, and one row for all heads."""
        tensor = self._tensors[name]()
        if name.endswith("/kernel"):
            if tensor.dim() == 4:  # height, width, inputs, outputs
                return tensor.permute(3, 2, 0, 1)
            flat = tensor.reshape(-1, tensor.shape[-1]) if name.endswith("/out/kernel") else tensor.flatten(start_dim=1)
            return flat.t()
        return tensor.flatten() if name.endswith("/bias") else tensor

    def _checked(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(tensor.shape) != shape:
            raise ArgumentError(
                f"`{self._path}` has the shape {tuple(tensor.shape)} for `{name}`, and the model {shape}",
                "name the model that the file is of",
            )
        return tensor


def _opened(path: Path) -> Tensors:
    """Tensors by name, each read when it is called for."""
    if path.is_dir():
        found = next((files for kind in _FILES if (files := sorted(path.glob(kind)))), [])
        if not found:
            raise FileError(
                f"there are no weights in the folder `{path}`", f"it has none of {', '.join(_FILES)}", code="not_found"
            )
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
    except Exception as failure:  # of files that are none of theirs, numpy and torch raise whatever they like
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
