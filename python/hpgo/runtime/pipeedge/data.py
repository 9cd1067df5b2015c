"""Data for the pipeline: CoLA's sentences, ImageNet's images, or random samples, with their labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, FileError
from hpgo.runtime.pipeedge.cola import sentences
from hpgo.runtime.pipeedge.imagenet import Picture, pictures, pixels
from hpgo.runtime.pipeedge.wordpiece import WordPieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpgo.runtime.pipeedge.models import PipeEdgeRuntimeModel

Sample = TypeVar("Sample")
NAMES = ("CoLA", "ImageNet")
_MAX_LENGTH = 512
"""Maximum number of tokens that BERT accepts."""
_LENGTH = 64
"""Number of tokens in random texts."""
_VOCABULARY, _SIDE = 30522, 224
_VOCABULARY_FILE = "vocab.txt"


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options of the data."""

    name: str | None
    """Data set, one of `NAMES`. None: random data."""
    root: Path | None
    split: str
    indices: Path | None
    """File with the indices of the samples to use, in order."""
    shuffle: bool
    samples: int
    """Maximum number of samples."""
    beside: Path
    """Folder of the weights, which may contain the vocabulary."""


class Data(ABC):
    """Samples by index, with their labels."""

    length = 0
    """Number of tokens in each text; 0 for images."""
    labels: Sequence[int | None] = ()
    """Label of each sample; None if it is unknown."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return the inputs of the samples from `begin` to `end`, exclusive."""

    def right(self, begin: int, outputs: torch.Tensor) -> tuple[int, int] | None:
        """Return the number of correct outputs and the number of labels, or None if a label is unknown."""
        labels = self.labels[begin : begin + len(outputs)]
        # Only `(rows, classes)` are predictions. Other shapes come from models without a classifier.
        if outputs.dim() != 2 or None in labels:
            return None
        found = outputs.argmax(1).tolist()
        return sum(one == label for one, label in zip(found, labels, strict=True)), len(labels)


class Texts(Data):
    """Token sequences, padded with 0 to the longest one."""

    def __init__(self, tokens: Sequence[Sequence[int]], labels: Sequence[int | None]) -> None:
        self.length = max(map(len, tokens), default=2)
        self.labels = labels
        self._tokens = torch.tensor([[*one, *[0] * (self.length - len(one))] for one in tokens], dtype=torch.int64)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return tokens of the shape `(rows, length)`."""
        return self._tokens[begin:end]


class Pictures(Data):
    """Images, each of which is read when it is requested."""

    def __init__(self, found: Sequence[Picture], *, crops: bool) -> None:
        # The labels are small, but the images of a data set may not fit into memory.
        self.labels = [one.label for one in found]
        self._found, self._crops = found, crops

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return images of the shape `(rows, 3, 224, 224)`."""
        return torch.stack([pixels(one.read(), crops=self._crops) for one in self._found[begin:end]])


class Noise(Data):
    """Random samples, which are the same in every run."""

    def __init__(self, samples: int, *, texts: bool) -> None:
        self.length = _LENGTH if texts else 0
        self.labels = [None] * samples

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return tokens `(rows, length)`, or images `(rows, 3, 224, 224)`."""
        # Seed each sample with its index, so that it does not depend on the micro-batch size.
        return torch.stack([self._one(torch.Generator().manual_seed(at)) for at in range(begin, min(end, len(self)))])

    def _one(self, drawn: torch.Generator) -> torch.Tensor:
        if self.length:
            return torch.randint(1, _VOCABULARY, (self.length,), generator=drawn)
        return torch.randn(3, _SIDE, _SIDE, generator=drawn)


def read_data(wanted: DataOptions, model: PipeEdgeRuntimeModel) -> Data:
    """Return the requested data, with at least one sample.

    Raises ArgumentError for data that the model does not accept, and FileError for files that are missing or damaged.
    """
    if wanted.name is None:
        return Noise(wanted.samples, texts=model.reads_text)
    if (wanted.name == "CoLA") != model.reads_text:
        raise ArgumentError(
            f"`{model.name}` reads {'texts' if model.reads_text else 'images'}, but {wanted.name} has none",
            f"choose {NAMES[not model.reads_text]}, or leave out `--dataset-name`",
        )
    root = wanted.root or Path(wanted.name)
    if not root.is_dir():
        raise FileError(
            f"there is no folder `{root}` of {wanted.name}", "name the folder with `--dataset-root`", code="not_found"
        )
    found = _texts(wanted, root) if model.reads_text else _pictures(wanted, root, model)
    if not len(found):
        raise FileError(f"{wanted.name} in `{root}` has no samples of {wanted.split}", "choose another split")
    return found


def _texts(wanted: DataOptions, root: Path) -> Texts:
    chosen = _chosen(sentences(root, wanted.split), wanted)
    pieces = _vocabulary(wanted.beside, root)
    return Texts([pieces.tokens(text, maximum=_MAX_LENGTH) for text, _ in chosen], [label for _, label in chosen])


def _pictures(wanted: DataOptions, root: Path, model: PipeEdgeRuntimeModel) -> Pictures:
    # The preprocessing of DeiT crops the center of an image, that of ViT takes all of it.
    return Pictures(_chosen(pictures(root, wanted.split), wanted), crops=model.name.startswith("facebook/deit"))


def _chosen(samples: Iterable[Sample], wanted: DataOptions) -> list[Sample]:
    """Return the requested samples. If these are the first ones, the iteration stops after them."""
    # Listing all of ImageNet takes long, so avoid it if a prefix is enough.
    if wanted.indices is None and not wanted.shuffle:
        return list(islice(samples, wanted.samples))
    found = list(samples)
    order = list(range(len(found))) if wanted.indices is None else _numbers(wanted.indices)
    if wrong := [at for at in order if not 0 <= at < len(found)]:
        raise ArgumentError(
            f"`{wanted.indices}` names sample {wrong[0]}, but {wanted.name} has {len(found)}",
            "count them from 0",
            code="unknown_name",
        )
    if wanted.shuffle:
        # The fixed seed gives every run the same order, so that runs can be compared.
        drawn = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        order = [order[at] for at in drawn.tolist()]
    return [found[at] for at in order[: wanted.samples]]


def _numbers(file: Path) -> list[int]:
    try:
        held: Any = torch.load(file, weights_only=True) if file.suffix == ".pt" else np.load(file, allow_pickle=False)
        return [int(one) for one in held]
    except Exception as failure:  # numpy and torch raise undocumented types for foreign files
        raise FileError(
            f"the numbers of samples in `{file}` can't be read: {type(failure).__name__}: {shorten(str(failure), 200)}",
            "give a file of torch or numpy with whole numbers",
            code="damaged_file",
        ) from failure


def _vocabulary(*folders: Path) -> WordPieces:
    for folder in folders:
        file = folder / _VOCABULARY_FILE
        if file.is_file():
            return WordPieces(file.read_text(encoding="utf-8").splitlines())
    raise FileError(
        f"there is no {_VOCABULARY_FILE} in {' or '.join(f'`{one}`' for one in folders)}",
        "put the model's vocabulary into the folder of its weights",
        code="unknown_name",
    )
