"""Profiles of Metis: a JSON file for each type of device, tensor-parallel degree and batch size, as its name says.

    DeviceType.A100_tp1_bs2.json
    {"model": {"model_name": "GPT3", "parameters": {"parameters_per_layer_bytes": [393216000, 202383360, …]}, …},
     "execution_time": {"layer_compute_total_ms": [0.3, 29.5, …], …},
     "execution_memory": {"layer_memory_total_mb": [7820, 4146, …], …}}

Milliseconds of forward and backward in one, bytes of the whole layer, MiB of all that a device holds for it. Format:
Metis' planner (Um et al., USENIX ATC 2024), whose README and `data_loader.py` say what the numbers mean.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

from hpgo.base.documents import Section
from hpgo.errors import ProfileError
from hpgo.model.profile import Layer, Profile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WHAT = "a file of Metis"
_NAME = re.compile(r"(DeviceType\..+)_tp([1-9][0-9]{0,3})_bs([1-9][0-9]{0,8})\.json")
_FORWARD = 1 / 3  # of both passes, where nothing tells them apart
_STATES = 4.0
"""Weights, gradients and two moments: each as large as the weights."""
_MIB = 2.0**20


def looks_like(document: object) -> bool:
    """Whether it says what layers take, under the name that this has there."""
    times = document.get("execution_time") if isinstance(document, dict) else None
    return isinstance(times, dict) and "layer_compute_total_ms" in times


def said(path: Path) -> tuple[int, int] | None:
    """Tensor-parallel degree and batch size as the name of a file says them; None if it is another name."""
    found = _NAME.fullmatch(path.name)
    return (int(found[2]), int(found[3])) if found else None


def beside(path: Path) -> dict[int, Path]:
    """The file and those beside it that differ in batch size alone, by batch size."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return {}
    names = {path.name}
    with suppress(OSError):  # folders that may be passed, but not listed
        names |= {other.name for other in path.parent.iterdir()}
    alike = map(_NAME.fullmatch, names)
    sizes = {int(other[3]) for other in alike if other is not None and other.group(1, 2) == found.group(1, 2)}
    return {size: path.with_name(f"{found[1]}_tp{found[2]}_bs{size}.json") for size in sorted(sizes)}


def parse(
    documents: Mapping[int, tuple[str, object]], *, gpus_per_device: int, boundary_bytes: float | None
) -> Profile:
    """The profile in parsed files, each with its name, by batch size; layers are shared by so many GPUs.

    `boundary_bytes` is what one sample sends from layer to layer; without it the files must say so.

    Raises ProfileError naming file and key.

    >>> def file(both_ms, held_mb):
    ...     return {
    ...         "model": {"model_name": "tiny", "parameters": {"parameters_per_layer_bytes": [400]}},
    ...         "execution_time": {"layer_compute_total_ms": [both_ms]},
    ...         "execution_memory": {"layer_memory_total_mb": [held_mb]},
    ...     }
    >>> files = {1: ("DeviceType.T4_tp1_bs1.json", file(3, 5)), 2: ("DeviceType.T4_tp1_bs2.json", file(6, 7))}
    >>> layer = parse(files, gpus_per_device=1, boundary_bytes=8).layers[0]
    >>> layer.forward_s, [saved / 2**20 for saved in layer.saved_bytes]
    ((0.001, 0.002), [2.0, 4.0])
    """
    sizes = sorted(documents)
    tops = {size: Section(document, file, ProfileError) for size, (file, document) in documents.items()}
    both_ms = {size: _numbers(top.within("execution_time"), "layer_compute_total_ms") for size, top in tops.items()}
    count = len(both_ms[sizes[0]])
    held_mb = {
        size: _numbers(top.within("execution_memory"), "layer_memory_total_mb", count) for size, top in tops.items()
    }
    models = {size: top.within("model") for size, top in tops.items()}
    for size, top in tops.items():
        if len(both_ms[size]) != count:
            top.fail(
                f"{len(both_ms[size])} layers, where {tops[sizes[0]].where} has {count}",
                "files of one model go together",
            )
    sent = {size: _sent(model.within("parameters"), size, count, boundary_bytes) for size, model in models.items()}
    weights = _numbers(models[sizes[0]].within("parameters"), "parameters_per_layer_bytes", count)
    top, ids = tops[sizes[0]], [f"layer{at}" for at in range(count)]
    layers = []
    for at, layer_id in enumerate(ids):
        both_s = [both_ms[size][at] / 1e3 for size in sizes]
        own = weights[at] / gpus_per_device
        held = {size: held_mb[size][at] * _MIB for size in sizes}
        layer = top.build(
            Layer,
            layer_id,
            layer_id,
            tuple(_FORWARD * seconds for seconds in both_s),
            tuple((1 - _FORWARD) * seconds for seconds in both_s),
            tuple(sent[size][at] for size in sizes),
            own,
            _saved(held, own),
        )
        layers.append(layer)
    name = models[sizes[0]].text("model_name")
    source = "Metis: " + ", ".join(file for _, (file, _) in sorted(documents.items()))
    return top.build(Profile, name, tuple(sizes), tuple(layers), tuple(pairwise(ids)), source, gpus_per_device)


def _numbers(section: Section, key: str, count: int | None = None) -> list[float]:
    """Finite numbers from 0, one for each layer."""
    rows = section.rows(key)
    values = [rows.amount(row) for row in rows]
    if count is not None and len(values) != count:
        section.fail(f"`{key}` has {len(values)} entries where times are of {count} layers", "one for each layer")
    return values


def _sent(parameters: Section, size: int, count: int, boundary_bytes: float | None) -> list[float]:
    """Bytes that leave each layer, for a whole batch; behind the last there is nobody to send to."""
    if boundary_bytes is not None:
        return [boundary_bytes * size] * (count - 1) + [0.0]
    if "activation_parameters_bytes" not in parameters:
        parameters.fail(
            "`activation_parameters_bytes` is missing, which tells what layers send",
            "give `boundary_bytes`: sequence length × hidden size × bytes of a value",
        )
    return _numbers(parameters, "activation_parameters_bytes", count)


def _saved(held: Mapping[int, float], weights: float) -> tuple[float, ...]:
    """Bytes that a batch keeps, by batch size: as memory grows with it, or else all that weights and states leave."""
    least, most = min(held), max(held)
    if least == most:
        return (max(0.0, held[least] - _STATES * weights),)
    each = max(0.0, (held[most] - held[least]) / (most - least))
    return tuple(each * size for size in sorted(held))
