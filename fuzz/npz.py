"""Timelines as arrays, from `Timeline.save` with `.npz`: zip files of a document and of columns."""

from __future__ import annotations

import io
import json
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import timelines
from guided import fuzz, reader
from mutations import injured, tree

import hpgo

_KINDS = ("<i8", ">i8", "<f8", "<f4", "<f2", "u1", "i1", "?", "<u8", "<c16", "<U3", "S3", "<M8[s]", "<m8", "V8", "<i4")
_NUMBERS = (-1, 0, 1, 2, 255, 2**31, 2**32, 2**62, 0.5, -0.5, 1e300, 5e-324, float("nan"), float("inf"))


def seeds() -> dict[str, bytes]:
    """The timelines of the other target."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: timeline.save(Path(folder, "run.npz")).read_bytes() for name, timeline in timelines.runs().items()
        }


def mutate(data: bytes, maximum: int, seed: int) -> bytes:
    """A file whose document is changed as a tree, or a column as numbers, or a member or all of it as bytes."""
    chance = random.Random(seed)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # noqa: BLE001 -- whatever zipfile says of what is no zip file any more
        members = {}
    if not members or chance.random() < 0.1:
        return injured(data, maximum, chance)
    name = "document.npy" if chance.random() < 0.4 and "document.npy" in members else chance.choice(list(members))
    match chance.randrange(10):
        case 0:
            del members[name]
        case 1:
            members[chance.choice((name.upper(), "document.npy", "rank.npy", "../rank.npy"))] = members.pop(name)
        case 2:
            members[name] = injured(members[name], maximum, chance)
        case _:
            members[name] = _array(members[name], maximum, chance)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", chance.choice((0, 0, 0, 0, 8, 12, 14))) as archive:
        for entry, content in members.items():
            archive.writestr(zipfile.ZipInfo(entry), content)
    return written.getvalue()[:maximum]


def _array(data: bytes, maximum: int, chance: random.Random) -> bytes:
    """A member with other values, or values of another kind or shape."""
    try:
        array: Any = np.load(io.BytesIO(data))
        if array.ndim == 0 and array.dtype.kind == "U" and chance.random() < 0.9:
            array = np.array(json.dumps(tree(json.loads(str(array)), chance)))
        elif array.size and array.dtype.kind in "iuf" and chance.random() < 0.7:
            with np.errstate(all="ignore"):
                array = array.astype(chance.choice((array.dtype, np.float64)))
                array[chance.randrange(len(array))] = chance.choice(_NUMBERS)
        else:
            array = chance.choice((
                lambda: array[:-1], lambda: array.reshape(1, -1), lambda: array.reshape(()), lambda: array[::2],
                lambda: np.resize(array, chance.choice((0, 1, 99))), lambda: array.astype(chance.choice(_KINDS)),
                lambda: np.asfortranarray(array.reshape(2, -1)), lambda: np.array([(1, 2)], "i4,f8"),
            ))()  # fmt: skip
    except Exception:  # noqa: BLE001 -- what numpy says where a step makes no sense
        return injured(data, maximum, chance)
    written = io.BytesIO()
    np.lib.format.write_array(written, array, chance.choice(((1, 0), (1, 0), (2, 0), (3, 0))), allow_pickle=False)
    return written.getvalue()


if __name__ == "__main__":
    fuzz(seeds, mutate, reader("run.npz", lambda path: hpgo.Timeline.read(path).to_json()))
