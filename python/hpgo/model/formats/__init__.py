"""Profile files: one module a format; `read_profile` tells them apart by their content."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpgo.base.checks import MOST_GPUS, whole
from hpgo.base.documents import hinted, read_text, write_text
from hpgo.base.documents import parse as parse_document
from hpgo.base.errors import ArgumentError, ProfileError
from hpgo.base.files import as_path
from hpgo.base.wording import counted, near, shorten, shown
from hpgo.model.builtin import MODELS, built_in
from hpgo.model.profile import Profile

if TYPE_CHECKING:
    import os
    from pathlib import Path


def read_profile(
    source: str | os.PathLike[str], *, batch_size: int | None = None, gpus_per_device: int | None = None
) -> Profile:
    """The profile in the file `source`, or the built-in model of that name.

    A name wins; write `./vgg-19` or `Path("vgg-19")` for a file of that name. PipeDream text, and files of some other
    tools, do not say how many samples their times are for. `batch_size` says it, or else the file name:
    `vgg-19-pbs-32.txt` was measured with 32. Where a file has measurements of several tensor-parallel degrees,
    `gpus_per_device` picks one; it is 1 otherwise. docs/profiles.md lists the formats.

    Raises ProfileError naming file and line, or entry and key; ArgumentError for a `batch_size` or `gpus_per_device`
    that the profile contradicts.

    >>> read_profile("xlnet-36").batch_sizes
    (1,)
    """
    if batch_size is not None:
        batch_size = whole("the batch size", batch_size, error=ProfileError, hint="count samples")
    if gpus_per_device is not None:
        gpus_per_device = whole("`gpus_per_device`", gpus_per_device, most=MOST_GPUS)
    if isinstance(source, str) and source in MODELS:
        return _at(built_in(source), batch_size, gpus_per_device)
    path = as_path(source, ProfileError)
    with hinted("docs/profiles.md shows the formats"):
        text = _text(path) if _may_be_file(path) else _no_such(str(source))
        return _parse(text, path, batch_size, gpus_per_device)


def _parse(text: str, path: Path, batch_size: int | None, gpus: int | None) -> Profile:
    from hpgo.model.formats import dnn_partitioning, kineto, native, pipedream, piper

    file = str(path)
    if pipedream.looks_like(text):
        name, size = _named(path, "PipeDream text", batch_size)
        return _at(pipedream.parse(text, name=name, batch_size=size, file=file), size, gpus)
    if text.lstrip().startswith("{"):
        document = parse_document(text, file, ProfileError)
        if piper.looks_like(document):
            name, size = _named(path, piper.WHAT, batch_size)
            return piper.parse(document, name=name, batch_size=size, gpus_per_device=gpus or 1, file=file)
        if dnn_partitioning.looks_like(document):
            name, size = _named(path, dnn_partitioning.WHAT, batch_size)
            return _at(dnn_partitioning.parse(document, name=name, batch_size=size, file=file), size, gpus)
        if kineto.looks_like(document):
            name, size = _named(path, kineto.WHAT, batch_size)
            return _at(kineto.parse(document, name=name, batch_size=size, file=file), size, gpus)
        if isinstance(document, dict) and native.VERSION_KEY in document:
            return _at(native.of_document(document, name=path.stem, file=file), batch_size, gpus)
    elif native.VERSION_KEY in text:
        return _at(native.parse(text, name=path.stem, file=file), batch_size, gpus)
    raise ProfileError(
        f"{path} is neither PipeDream text nor a file with `{native.VERSION_KEY}: {native.VERSION}`,"
        " nor one of another tool that hpgo reads"
    )


def _named(path: Path, what: str, batch_size: int | None) -> tuple[str, int]:
    """The profile's name, and its batch size as the caller or the file's name says it."""
    name, in_name = _split_name(path.stem)
    size = in_name if batch_size is None else batch_size
    if size is None:
        raise ProfileError(
            f"{path} is {what}, which does not say how many samples its times are for", _batch_size_hint(path)
        )
    return name, size


def write_profile(profile: Profile, path: str | os.PathLike[str], *, batch_size: int | None = None) -> None:
    """Writes `profile` as the file's ending says: `.json`, `.yaml` or `.yml` (native), `.txt` (PipeDream).

    PipeDream text holds one batch size: `batch_size`, which may be left out if the profile has only one.

    Raises ArgumentError for another ending, or a batch size that the profile does not have; ProfileError if the file
    can't be written.
    """
    from hpgo.model.formats import native, pipedream

    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile is {shown(profile)}", "make one, with `hpgo.read_profile` say")
    path = as_path(path, ProfileError)
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size)
    if path.suffix == ".txt":
        text = pipedream.write(profile, batch_size)
    elif batch_size is not None:
        raise ArgumentError(f"`{path.suffix}` files hold every batch size", "leave `batch_size` out, or write `.txt`")
    elif path.suffix == ".json":
        text = native.write_json(profile)
    elif path.suffix in {".yaml", ".yml"}:
        text = native.write_yaml(profile)
    else:
        raise ArgumentError(f"can't tell the format of `{path}`", "end it in .json, .yaml, .yml or .txt")
    write_text(path, text, ProfileError)


def _at(profile: Profile, batch_size: int | None, gpus: int | None) -> Profile:
    """`profile`, unless the caller says that it is of another batch size, or other devices."""
    if batch_size is not None and profile.batch_sizes != (batch_size,):
        sizes = ", ".join(map(str, profile.batch_sizes))
        raise ArgumentError(
            f"profile `{profile.name}` was measured at batch size {sizes}, not {batch_size}",
            "leave the batch size out: it is for files that don't say theirs",
        )
    if gpus is not None and profile.gpus_per_device != gpus:
        raise ArgumentError(
            f"profile `{profile.name}` has layers on {counted(profile.gpus_per_device, 'GPU')} each, not {gpus}",
            "leave `gpus_per_device` out: it picks one of several that a file has",
        )
    return profile


def _may_be_file(path: Path) -> bool:
    """Whether `path` is meant as one: it exists, or is written as one."""
    try:
        return path.exists() or bool(path.suffix) or len(path.parts) > 1
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return True  # reading it gives the reason


def _text(path: Path) -> str:
    try:
        return read_text(path, ProfileError)
    except ProfileError as error:
        for name, model in MODELS.items():
            if model.file == path.name:
                raise ProfileError(error.message, f"its figures are built in: give the name `{name}`") from None
        raise


def _no_such(name: str) -> str:
    raise ProfileError(f"`{shorten(name)}` is no built-in model and no file", near(name, MODELS))


def _batch_size_hint(path: Path) -> str:
    hint = f"give it as batch_size=32, say, or put it into the file name: `{path.stem}-pbs-32{path.suffix}`"
    for name, model in MODELS.items():
        if model.file == path.name:
            return f"{hint}; the built-in model `{name}` was measured at {built_in(name).batch_sizes[0]}"
    return hint


def _split_name(stem: str) -> tuple[str, int | None]:
    """Model name and batch size of `xlnet-36-pbs-1`."""
    found = re.fullmatch(r"(.+?)-pbs-([1-9][0-9]{0,8})(-.+)?", stem)
    return (found[1] + (found[3] or ""), int(found[2])) if found else (stem, None)
