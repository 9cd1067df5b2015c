"""Readers and writers of profile files, with one module per format. `read_profile` detects the format."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING

from hpgo.base.checks import MAX_GPUS, check_int, check_is, check_list, number
from hpgo.base.documents import hinted, kind_of_document, read_text, write_text
from hpgo.base.documents import parse as parse_document
from hpgo.base.files import as_path, may_be_file, stem
from hpgo.base.messages import as_whole, did_you_mean, pluralize, safe_repr, shorten
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.builtin import MODELS, built_in
from hpgo.model.profile import LARGEST, Profile

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

_MAX_LAYERS = 100_000
"""Maximum number of layers of one type, which is the longest chain that hpgo plans."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Values from the caller that a file may leave open."""

    batch_size: int | None
    gpus_per_device: int | None
    layer_counts: tuple[int, ...] | None
    boundary_bytes: float | None


def read_profile(
    source: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    gpus_per_device: int | None = None,
    layer_counts: int | Sequence[int] | None = None,
    boundary_bytes: float | None = None,
) -> Profile:
    """Return the profile in the file `source`, or the built-in model of that name.

    A built-in name takes precedence; write `./vgg-19` or `Path("vgg-19")` for a file of that name. docs/profiles.md
    lists the formats.

    Args:
        source: name of a built-in model, or a file.
        batch_size: samples of the measured batch, for PipeDream text and other formats without it. A file name can
            state it, too: `vgg-19-pbs-32.txt` was measured with 32.
        gpus_per_device: tensor-parallel degree to pick if a file has measurements of several; otherwise 1.
        layer_counts: number of layers of each type, for Galvatron's files.
        boundary_bytes: bytes that one sample sends from layer to layer, for Metis' and Galvatron's files.

    Raises ProfileError naming file and line, or entry and key. Raises ArgumentError for values that contradict the
    profile.

    >>> read_profile("xlnet-36").batch_sizes
    (1,)
    """
    if batch_size is not None:
        batch_size = check_int("the batch size", batch_size, error=ProfileError, hint="count samples")
    if gpus_per_device is not None:
        gpus_per_device = check_int("`gpus_per_device`", gpus_per_device, maximum=MAX_GPUS)
    given = _Given(batch_size, gpus_per_device, _counts(layer_counts), _bytes(boundary_bytes))
    if isinstance(source, str) and source in MODELS:
        return _at(built_in(source), given)
    path = as_path(source, ProfileError)
    with hinted("`hpgo models show vgg-16` prints such a file, `hpgo help plan` names the others that are read"):
        text = _text(path) if may_be_file(path) and not _is_transformer(source) else _no_such(str(source))
        return _parse(text, path, given)


def _parse(text: str, path: Path, given: _Given) -> Profile:
    from hpgo.model.formats import dnn_partitioning, galvatron, kineto, metis, native, pipedream, piper, table

    file = str(path)
    document: object = None
    # Text formats come first, since they are recognized by their first line. All others need a parsed document.
    if pipedream.looks_like(text):
        name, size = _named(path, "PipeDream text", given.batch_size)
        return _at(pipedream.parse(text, name=name, batch_size=size, file=file), replace(given, batch_size=size))
    if table.looks_like(text):
        name, size = _named(path, table.WHAT, given.batch_size)
        return _at(table.parse(text, name=name, batch_size=size, file=file), replace(given, batch_size=size))
    if text.lstrip().startswith("{"):
        document = parse_document(text, file, ProfileError)
        if piper.looks_like(document):
            name, size = _named(path, piper.WHAT, given.batch_size)
            gpus = given.gpus_per_device or 1
            found = piper.parse(document, name=name, batch_size=size, gpus_per_device=gpus, file=file)
            return _at(found, replace(given, batch_size=size))
        if dnn_partitioning.looks_like(document):
            name, size = _named(path, dnn_partitioning.WHAT, given.batch_size)
            found = dnn_partitioning.parse(document, name=name, batch_size=size, file=file)
            return _at(found, replace(given, batch_size=size))
        if kineto.looks_like(document):
            name, size = _named(path, kineto.WHAT, given.batch_size)
            return _at(kineto.parse(document, name=name, batch_size=size, file=file), replace(given, batch_size=size))
        if metis.looks_like(document):
            return _metis(document, path, given)
        if galvatron.looks_like(document):
            return _galvatron(document, path, given)
        if isinstance(document, dict) and native.VERSION_KEY in document:
            return _at(native.of_document(document, name=stem(path), file=file), given)
    elif native.VERSION_KEY in text:
        return _at(native.parse(text, name=stem(path), file=file), given)
    # The file is no profile. Parse it nevertheless, so that the error can name what it is.
    elif path.suffix.lower() in {".yaml", ".yml"}:
        document = parse_document(text, file, ProfileError)
    if kind := kind_of_document(document):
        raise ProfileError(f"{path} is {kind}, not a profile of layers", code="wrong_kind_of_file")
    raise ProfileError(
        f"{path} is neither PipeDream text nor a file with `{native.VERSION_KEY}: {native.VERSION}`,"
        " nor one of another tool that hpgo reads",
        code="wrong_kind_of_file",
    )


def _metis(document: object, path: Path, given: _Given) -> Profile:
    """Read a file of Metis. If its name states degree and batch size, read the files of other sizes beside it, too."""
    from hpgo.model.formats import metis

    if (named := metis.degree_and_batch_size(path)) is None:
        _, size = _named(path, metis.WHAT, given.batch_size)
        gpus, documents = given.gpus_per_device or 1, {size: (str(path), document)}
    else:
        gpus, own = named
        documents = {
            size: (str(other), document if size == own else parse_document(_text(other), str(other), ProfileError))
            for size, other in metis.beside(path).items()
        }
    found = metis.parse(documents, gpus_per_device=gpus, boundary_bytes=given.boundary_bytes)
    return _at(found, replace(given, batch_size=None if named is None else given.batch_size, boundary_bytes=None))


def _galvatron(document: object, path: Path, given: _Given) -> Profile:
    """Read a file of Galvatron with the file of the same model beside it."""
    from hpgo.model.formats import galvatron

    if given.layer_counts is None:
        raise ProfileError(
            f"{path} is {galvatron.WHAT}, which does not contain the number of layers",
            "give it, for example as layer_counts=32, or as 24,24 for two types",
            code="wrong_kind_of_file",
        )
    files = galvatron.both(path)
    times, memory = (
        document if other == path else parse_document(_text(other), str(other), ProfileError) for other in files
    )
    found = galvatron.parse(
        times, memory, files=files, layer_counts=given.layer_counts, boundary_bytes=given.boundary_bytes
    )
    return _at(found, replace(given, layer_counts=None, boundary_bytes=None))


def _counts(given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    hint = "a whole number of layers, or one for each type: 24,24"
    values = [given] if as_whole(given) is not None else check_list("`layer_counts`", given, hint=hint)
    if not values:
        raise ArgumentError("`layer_counts` is empty", hint)
    return tuple(check_int("`layer_counts`", value, maximum=_MAX_LAYERS, hint=hint) for value in values)


def _bytes(given: float | None) -> float | None:
    hint = "bytes that one sample sends from layer to layer"
    return None if given is None else number("`boundary_bytes`", given, maximum=LARGEST, hint=hint)


def _named(path: Path, what: str, batch_size: int | None) -> tuple[str, int]:
    """Return the profile's name, and the batch size from the caller or else from the file name."""
    name, in_name = _split_name(stem(path))
    size = in_name if batch_size is None else batch_size
    if size is None:
        raise ProfileError(
            f"{path} is {what}, which does not contain the batch size of its times",
            _batch_size_hint(path),
            code="wrong_kind_of_file",
        )
    return name, size


def profile_of(given: Profile | str | os.PathLike[str]) -> Profile:
    """Return `given`, or the profile that `read_profile` finds under this name.

    Raises ProfileError for an unknown name or a file that is not a profile, ArgumentError for other types.

    >>> len(profile_of("bert-48").layers)
    53
    """
    if isinstance(given, str | PathLike):
        return read_profile(given)
    check_is("profile", given, Profile, "name a model, like `bert-48`, or a file, or make one with `hpgo.Profile`")
    return given


def write_profile(profile: Profile, path: str | os.PathLike[str], *, batch_size: int | None = None) -> None:
    """Write `profile` in the format of the file's suffix: `.json`, `.yaml` or `.yml` (native), `.txt` (PipeDream).

    PipeDream text holds one batch size: `batch_size`, which may be left out if the profile has only one.

    Raises ArgumentError for another suffix, or a batch size that the profile does not have. Raises ProfileError if the
    file can't be written.
    """
    from hpgo.model.formats import native, pipedream

    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile is {safe_repr(profile)}", "create one, for example with `hpgo.read_profile`")
    path = as_path(path, ProfileError)
    if batch_size is not None:
        batch_size = check_int("batch_size", batch_size)
    if path.suffix == ".txt":
        text = pipedream.write(profile, batch_size)
    elif batch_size is not None:
        raise ArgumentError(f"`{path.suffix}` files hold every batch size", "leave `batch_size` out, or write `.txt`")
    elif path.suffix == ".json":
        text = native.write_json(profile)
    elif path.suffix in {".yaml", ".yml"}:
        text = native.write_yaml(profile)
    else:
        raise ArgumentError(f"the format of `{path}` is unknown", "end it in .json, .yaml, .yml or .txt")
    write_text(path, text, ProfileError)


def _at(profile: Profile, given: _Given) -> Profile:
    """Return `profile`; raise ArgumentError if a value from the caller contradicts it or is not needed for its file."""
    if given.batch_size is not None and profile.batch_sizes != (given.batch_size,):
        sizes = ", ".join(map(str, profile.batch_sizes))
        raise ArgumentError(
            f"profile `{profile.name}` was measured at batch size {sizes}, not {given.batch_size}",
            "leave out the batch size, which is for files without one",
            code="mismatch",
        )
    if given.gpus_per_device is not None and profile.gpus_per_device != given.gpus_per_device:
        raise ArgumentError(
            f"profile `{profile.name}` has layers on {pluralize(profile.gpus_per_device, 'GPU')} each,"
            f" not {given.gpus_per_device}",
            "leave out `gpus_per_device`, which picks one of several degrees in a file",
        )
    for name, files in (("layer_counts", "Galvatron"), ("boundary_bytes", "Galvatron and Metis")):
        if getattr(given, name) is not None:
            raise ArgumentError(
                f"the file of profile `{profile.name}` already contains `{name}`",
                f"leave it out; only files of {files} need it",
                code="conflict",
            )
    return profile


def _text(path: Path) -> str:
    if path.suffix == ".onnx":
        raise ProfileError(
            f"{path} is a model, which has operations but no times",
            f"`hpgo estimate {path} --device a100 -o {stem(path)}.yaml` estimates it",
            code="wrong_kind_of_file",
        )
    try:
        return read_text(path, ProfileError)
    except ProfileError as error:
        # Published profiles are built in, so a missing file of such a name can be replaced by the model's name.
        for name, model in MODELS.items():
            if model.file == path.name:
                raise error.reworded(error.message, f"its figures are built in: give the name `{name}`") from None
        raise


def _is_transformer(source: str | os.PathLike[str]) -> bool:
    from hpgo.model.transformer_presets import is_transformer

    return isinstance(source, str) and is_transformer(source)


def _no_such(name: str) -> str:
    if _is_transformer(name):
        file = f"{name.rpartition('/')[2]}.yaml"
        raise ProfileError(
            f"`{name}` is a transformer with a known shape, but without times",
            f"make a profile of it: `hpgo estimate {name} --device h100 --dim tokens=4096 -o {file}`",
        )
    raise ProfileError(
        f"`{shorten(name)}` is no built-in model and no file", did_you_mean(name, MODELS), code="unknown_name"
    )


def _batch_size_hint(path: Path) -> str:
    name = stem(path)
    ending = path.name.removeprefix(name)
    hint = f"give it, for example as batch_size=32, or put it into the file name: `{name}-pbs-32{ending}`"
    for name, model in MODELS.items():
        if model.file == path.name:
            return f"{hint}; the built-in model `{name}` was measured at {built_in(name).batch_sizes[0]}"
    return hint


def _split_name(stem: str) -> tuple[str, int | None]:
    """Return model name and batch size of a file name such as `xlnet-36-pbs-1`."""
    found = re.fullmatch(r"(.+?)-pbs-([1-9][0-9]{0,8})(-.+)?", stem)
    return (found[1] + (found[3] or ""), int(found[2])) if found else (stem, None)
