"""Results of PipeEdge's profiler, merged into two of its files, with a separator between the three."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided import fuzz
from mutations import PARTS, documents

from hpgo.model.formats.pipeedge import read_results
from hpgo.model.formats.pipeedge_merge import Device, merged

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("results", "models", "device_types")
_RESULTS = (
    '{"model_name": "m", "layers": 2, "batch_size": 4, "dtype": "torch.float32", "profile_data": ['
    '{"layer": 1, "memory": 1.5, "shape_in": [[4]], "shape_out": [[4], [2, 2]], "time": 0.5},'
    ' {"layer": 2, "memory": 1, "shape_in": [[4], [2, 2]], "shape_out": [[]], "time": 1}]}'
)
_MODEL = "layers: 2, mem_MB: [1, 1], parameters_in: 4, parameters_out: [8, 1]"
_TYPES = """\
t:
  bw_Mbps: 9 # port
  mem_MB: 99
  model_profiles:
    m:
    - batch_size: 4
      dtype: torch.float32
      time_s: [1,
        2]
"""
_FILES = {
    "flow": (
        _RESULTS,
        f"m: {{{_MODEL}}}",
        "t: {bw_Mbps: 9, mem_MB: 99, model_profiles: {m: [{batch_size: 8, dtype: torch.float32, time_s: [1, 2]}]}}",
    ),
    "block": (
        _RESULTS,
        "# models\nother:\n  layers: 0\n",
        _TYPES,
    ),
}


def seeds() -> dict[str, bytes]:
    """The same as one input each."""
    return {name: PARTS.join(text.encode() for text in texts) for name, texts in _FILES.items()}


def read(data: bytes, folder: Path) -> None:
    """Merges the first file into the others; nothing is written."""
    parts = data.split(PARTS, maxsplit=2)
    paths = {}
    for name, part in zip(_NAMES, [*parts, *[b""] * 3], strict=False):
        paths[name] = folder / f"{name}.yml"
        paths[name].write_bytes(part)
    model, timing = read_results(paths["results"])
    device = Device("t", 99, 9)
    merged(paths["models"], paths["device_types"], model=model, device=device, timings=[timing], overwrite=True)


if __name__ == "__main__":
    fuzz(seeds, documents, read)
