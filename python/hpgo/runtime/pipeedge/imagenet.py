"""ImageNet's images of 2012 and their classes (Russakovsky et al., 2015), read from the published archives.

Images are read from the archives when they are requested. The class of an image is the index of its synset in the
sorted list of all 1,000.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpgo.base.extras import library
from hpgo.base.messages import shorten
from hpgo.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_KIT = "ILSVRC2012_devkit_t12.tar.gz"
_TRAIN, _VALIDATION = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_OTHERS = {"validation": "val"}
_CLASSES = 1000
_SIDE = 224


@dataclass(frozen=True, slots=True)
class Picture:
    """One image with its class."""

    read: Callable[[], bytes]
    """Function that reads the image file."""
    label: int
    """Class of the image, from 0."""


def pictures(root: Path, split: str) -> Iterator[Picture]:
    """Yield the images of `train` by class and name, or of `val` by name.

    `root` is the folder of the archives, or of their unpacked content with a folder for each synset. Raises FileError
    for files that are missing or damaged.
    """
    name = _OTHERS.get(split, split)
    if name not in {"train", "val"}:
        raise FileError(f"ImageNet has no split `{shorten(split)}` with classes", "choose train or val")
    try:
        if (root / name).is_dir():
            yield from _folder_images(root / name)
        elif name == "train":
            yield from _train_images(_archive(root, _TRAIN))
        else:
            yield from _validation_images(_archive(root, _VALIDATION), _archive(root, _KIT))
    except FileError:
        raise
    except (OSError, tarfile.TarError, EOFError, UnicodeDecodeError) as failure:
        raise FileError(
            f"ImageNet in `{root}` can't be read: {failure}", "download the archive again", code="damaged_file"
        ) from failure


def _archive(root: Path, archive: str) -> Path:
    if not (root / archive).is_file():
        raise FileError(
            f"there is no {archive} in `{root}`",
            "name the folder of ImageNet's archives with `--dataset-root`",
            code="unknown_name",
        )
    return root / archive


def _folder_images(folder: Path) -> Iterator[Picture]:
    # Folders have the names of synsets, so their sorted order gives the classes.
    for label, synset in enumerate(sorted(one for one in folder.iterdir() if one.is_dir())):
        for file in sorted(synset.iterdir()):
            yield Picture(file.read_bytes, label)


def _train_images(archive: Path) -> Iterator[Picture]:
    """Yield the images of an archive that contains an archive for each synset."""
    with tarfile.open(archive) as outer:
        for label, synset in enumerate(sorted(outer.getmembers(), key=lambda one: one.name)):
            with tarfile.open(fileobj=outer.extractfile(synset)) as inner:
                for member in sorted(inner.getmembers(), key=lambda one: one.name):
                    # The inner archives are not compressed, so an image is a contiguous range of the outer file. It can
                    # be read later without opening either archive.
                    begin = synset.offset_data + member.offset_data
                    yield Picture(partial(_read_range, archive, begin, member.size), label)


def _validation_images(archive: Path, kit: Path) -> Iterator[Picture]:
    labels = _labels(kit)
    with tarfile.open(archive) as held:
        members = sorted((one for one in held.getmembers() if one.isfile()), key=lambda one: one.name)
    if len(members) != len(labels):
        raise FileError(
            f"{archive} has {len(members)} images, but {kit} has {len(labels)} labels", "download both again"
        )
    for member, label in zip(members, labels, strict=True):
        yield Picture(partial(_read_range, archive, member.offset_data, member.size), label)


def _labels(kit: Path) -> list[int]:
    """Return the classes of the validation images in their order."""
    with tarfile.open(kit) as held:
        named = {one.name.rpartition("/data/")[2]: one for one in held.getmembers() if "/data/" in one.name}
        files = {}
        for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"):
            member = held.extractfile(named[name]) if name in named else None
            if member is None:
                raise FileError(f"{kit} has no data/{name}", "download the archive again")
            files[name] = member.read()
    leaves = synsets(files["meta.mat"])
    # The kit numbers classes differently. Models use the index in the sorted list of synsets, so convert.
    places = {
        synset: place
        for place, synset in enumerate(sorted(str(leaves.get(number)) for number in range(1, _CLASSES + 1)))
    }
    numbers = files["ILSVRC2012_validation_ground_truth.txt"].decode().split()
    try:
        return [places[leaves[int(number)]] for number in numbers]
    except (ValueError, KeyError) as failure:
        raise FileError(
            f"{kit} has a class that is not in its meta.mat: {failure}", "download the archive again"
        ) from None


def synsets(raw: bytes) -> dict[int, str]:
    """Return the WordNet id of each number in the `meta.mat` of ImageNet's development kit.

    Raises FileError for bytes that are not a MATLAB file, or one without the structures `synsets`.
    """
    scipy_io = library("scipy.io", extra="pipeedge", task="ImageNet's labels")
    try:
        held = scipy_io.loadmat(io.BytesIO(raw), squeeze_me=True, variable_names=["synsets"])["synsets"]
        return {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in np.atleast_1d(held)}
    except Exception as failure:  # scipy raises undocumented types for damaged bytes
        raise FileError(
            f"`meta.mat` has no readable structures `synsets`: {type(failure).__name__}: {shorten(str(failure), 200)}",
            "download the archive again",
        ) from failure


def _read_range(archive: Path, begin: int, size: int) -> bytes:
    with archive.open("rb") as file:
        file.seek(begin)
        return file.read(size)


def pixels(raw: bytes, *, crops: bool) -> torch.Tensor:
    """Return an image `(3, 224, 224)` with the preprocessing of ViT, or with `crops` that of DeiT.

    DeiT's cuts off 1/8 at the edges. Raises ArgumentError if Pillow is missing, and FileError for bytes that are not an
    image.
    """
    image_of = library("PIL.Image", extra="pipeedge", task="ImageNet's images")
    try:
        with image_of.open(io.BytesIO(raw)) as opened:
            image = opened.convert("RGB")
    except Exception as failure:  # Pillow's readers raise undocumented types
        raise FileError(
            f"an image can't be read: {shorten(str(failure), 200)}", "download the archive again", code="damaged_file"
        ) from failure
    # Resampling, crop and normalization follow the training of each model, since others reduce the accuracy.
    if crops:
        wide, edge = 256, (256 - _SIDE) // 2
        image = image.resize((wide, wide), image_of.Resampling.BICUBIC)
        image = image.crop((edge, edge, edge + _SIDE, edge + _SIDE))
        mean, spread = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    else:
        image = image.resize((_SIDE, _SIDE), image_of.Resampling.BILINEAR)
        mean, spread = (0.5,) * 3, (0.5,) * 3
    shares = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    return (shares - torch.tensor(mean)[:, None, None]) / torch.tensor(spread)[:, None, None]
