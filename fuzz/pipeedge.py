"""PipeEdge's files, three and the one of links, with a separator between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided import fuzz
from mutations import PARTS, documents

import hpgo

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("models", "device_types", "devices", "links")
_TYPES = (
    '{"t": {"bw_Mbps": 9, "mem_MB": 3, "model_profiles": {"m": ['
    '{"batch_size": 4, "dtype": "torch.float32", "time_s": [1, 2, 1, 0]},'
    ' {"batch_size": 16, "dtype": "torch.float32", "time_s": [2, 4, 2, 0.5]}]}},'
    ' "u": {"bw_Mbps": 1000, "mem_MB": 99, "model_profiles": {"m": ['
    '{"batch_size": 8, "dtype": "torch.float32", "time_s": [3, 3, 3, 3]}]}}}'
)
_LINKS = (
    '{"latency": "1 ms", "links": [{"between": ["a", "u"], "bandwidth": "10 Mbit/s", "latency": "2 ms"},'
    ' {"from": "b", "to": "a", "bandwidth": 1000000}], "input": {"host": "a"},'
    ' "output": {"bandwidth": "1 Gbit/s", "latency": "1 s"}}'
)
_FILES = {
    "yaml": (
        "m: {layers: 2, mem_MB: [1, 1], parameters_in: 4, parameters_out: [4, 4]}",
        "t: {bw_Mbps: 9, mem_MB: 99, model_profiles: {m: [{batch_size: 8, dtype: torch.float32, time_s: [1, 2]}]}}",
        "t: [a, b]",
        "links: []",
    ),
    "json": (
        '{"m": {"layers": 4, "mem_MB": [1, 2, 1, 2.5], "parameters_in": 4, "parameters_out": [4, 8]}}',
        _TYPES,
        '{"t": ["a", "b"], "u": ["c", 4]}',
        _LINKS,
    ),
}


def seeds() -> dict[str, bytes]:
    """The same as one input each."""
    return {name: PARTS.join(text.encode() for text in texts) for name, texts in _FILES.items()}


def read(data: bytes, folder: Path) -> None:
    """Reads the files and asks their question, which is one of a few layers and hosts."""
    parts = data.split(PARTS, maxsplit=3)
    paths = {}
    for name, part in zip(_NAMES, [*parts, *[b""] * 4], strict=False):
        paths[name] = folder / f"{name}.yml"
        paths[name].write_bytes(part)
    hpgo.partition_files(**paths, model="m", interpolate=True, time_limit_s=0.2).to_json()


if __name__ == "__main__":
    fuzz(seeds, documents, read)
