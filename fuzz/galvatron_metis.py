"""Profiles that are several files: Galvatron's two, then two of Metis, with a separator between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from guided import fuzz
from mutations import PARTS, documents

import hpgo

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = (
    "computation_profiling_x.json",
    "memory_profiling_x.json",
    "DeviceType.T4_tp2_bs1.json",
    "DeviceType.T4_tp2_bs4.json",
)
_KEPT = {"parameter_size": 768, "tp_activation_per_bsz_dict": {"1": 512, "checkpoint": 32}}
_BESIDE = {"model_states": {"1": 2000}, "activation": {"1": 200}}
_GALVATRON = (
    {f"layertype_{kind}_bsz{size}_seq8": 4.5 for kind in (0, 1) for size in (1, 4)}
    | {f"layertype_other_bsz{size}_seq[8,8]": 6.0 for size in (1, 4)},
    {"layertype_0_sp": {"8": _KEPT}, "layertype_1": {"8": _KEPT}}
    | {f"other_memory_pp_on_{end}": {"[8,8]": _BESIDE} for end in ("first", "last")},
)
_METIS = tuple(
    {
        "model": {
            "model_name": "m",
            "parameters": {"parameters_per_layer_bytes": [9, 5, 9], "activation_parameters_bytes": [1, 1, 1]},
        },
        "execution_time": {"layer_compute_total_ms": [0.5, 30 * size, 0.5]},
        "execution_memory": {"layer_memory_total_mb": [9, 8 + size, 9]},
    }
    for size in (1, 4)
)


def seeds() -> dict[str, bytes]:
    """The four files as one input."""
    return {"four": PARTS.join(json.dumps(document).encode() for document in (*_GALVATRON, *_METIS))}


def _put(data: bytes, folder: Path) -> list[Path]:
    parts = data.split(PARTS, maxsplit=len(_NAMES) - 1)
    paths = [folder / name for name in _NAMES]
    for path, part in zip(paths, [*parts, *[b""] * len(_NAMES)], strict=False):
        path.write_bytes(part)
    return paths


def read_galvatron(data: bytes, folder: Path) -> hpgo.Profile:
    """By the file of times; what layers send is in that of memory."""
    return hpgo.read_profile(_put(data, folder)[0], layer_counts=(2, 1))


def read_metis(data: bytes, folder: Path) -> hpgo.Profile:
    """By the second, which the first stands beside."""
    return hpgo.read_profile(_put(data, folder)[3])


if __name__ == "__main__":
    fuzz(seeds, documents, read_galvatron, read_metis)
