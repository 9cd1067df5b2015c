"""Reader of Metis' profiles: one JSON file per device type, tensor-parallel degree and batch size.

    DeviceType.A100_tp1_bs2.json
    {"model": {"model_name": "GPT3", "parameters": {"parameters_per_layer_bytes": [393216000, 202383360, …]}, …},
     "execution_time": {"layer_compute_total_ms": [0.3, 29.5, …], …},
     "execution_memory": {"layer_memory_total_mb": [7820, 4146, …], …}}

Times are ms of forward and backward pass together, parameters are bytes of the whole layer, and memory is the MiB that
a device holds for it. The format is that of Metis' planner (Um et al., USENIX ATC 2024), whose README and
`data_loader.py` define the numbers.

Values of a file in the profile:

- the type, `tp` and `bs` in its name: `device`, `gpus_per_device` and the batch size.
- `layer_compute_total_ms`, milliseconds of forward and backward pass together: 1/3 is `forward_s`, the rest
  `backward_s`.
- `parameters_per_layer_bytes`, bytes of the whole layer: `parameter_bytes`, the shard of one GPU.
- `layer_memory_total_mb`, MiB on a GPU for the layer: `saved_bytes`, see below.
- `activation_parameters_bytes`, bytes: `activation_bytes`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING

from hpgo.base.documents import Section
from hpgo.errors import ProfileError
from hpgo.model.profile import Layer, Profile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WHAT = "a file of Metis"
_NAME = re.compile(r"(DeviceType\..+)_tp([1-9][0-9]{0,3})_bs([1-9][0-9]{0,8})\.json")
_FORWARD = 1 / 3  # fraction of both passes, which the file does not separate
_STATES = 4.0
"""Model states per weight: the weight, its gradient and two Adam moments, all of equal size."""
_MIB = 2.0**20


def looks_like(document: object) -> bool:
    """Return whether a document has layer times under this format's key."""
    times = document.get("execution_time") if isinstance(document, dict) else None
    return isinstance(times, dict) and "layer_compute_total_ms" in times


def degree_and_batch_size(path: Path) -> tuple[int, int] | None:
    """Return the tensor-parallel degree and the batch size in the name of a file, or None for other names."""
    found = _NAME.fullmatch(path.name)
    return (int(found[2]), int(found[3])) if found else None


def beside(path: Path) -> dict[int, Path]:
    """Return by batch size the file and the files beside it that differ in batch size only."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        return {}
    names = {path.name}
    with suppress(OSError):  # a folder may allow access to its files without being listable
        names |= {other.name for other in path.parent.iterdir()}
    alike = map(_NAME.fullmatch, names)
    sizes = {int(other[3]) for other in alike if other is not None and other.group(1, 2) == found.group(1, 2)}
    return {size: path.with_name(f"{found[1]}_tp{found[2]}_bs{size}.json") for size in sorted(sizes)}


def parse(
    documents: Mapping[int, tuple[str, object]], *, gpus_per_device: int, boundary_bytes: float | None
) -> Profile:
    """Return the profile in parsed files, given with their names by batch size, for layers on `gpus_per_device` GPUs.

    `boundary_bytes` are the bytes that one sample sends from layer to layer. Without it, the files must contain them.

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
                f"the file has {len(both_ms[size])} layers, but {tops[sizes[0]].where} has {count}",
                "keep only files of one model in the folder",
            )
    sent = {size: _sent(model.within("parameters"), size, count, boundary_bytes) for size, model in models.items()}
    weights = _numbers(models[sizes[0]].within("parameters"), "parameters_per_layer_bytes", count)
    top, ids = tops[sizes[0]], [f"layer{at}" for at in range(count)]
    layers = []
    for at, layer_id in enumerate(ids):
        both_s = [both_ms[size][at] / 1e3 for size in sizes]
        # Files have the bytes of a whole layer, while hpgo counts the shard on each GPU.
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
    found = _NAME.fullmatch(PurePath(documents[sizes[0]][0]).name)
    device = found[1].removeprefix("DeviceType.") if found else ""
    edges = tuple(pairwise(ids))
    return top.build(Profile, name, tuple(sizes), tuple(layers), edges, source, gpus_per_device, device=device)


def _numbers(section: Section, key: str, count: int | None = None) -> list[float]:
    """Return finite numbers of at least 0, one for each layer."""
    rows = section.rows(key)
    values = [rows.amount(row) for row in rows]
    if count is not None and len(values) != count:
        section.fail(f"`{key}` has {len(values)} entries, but times have {count} layers", "give one for each layer")
    return values


def _sent(parameters: Section, size: int, count: int, boundary_bytes: float | None) -> list[float]:
    """Return the bytes that leave each layer for a whole batch; the last layer sends nothing."""
    if boundary_bytes is not None:
        return [boundary_bytes * size] * (count - 1) + [0.0]
    if "activation_parameters_bytes" not in parameters:
        parameters.fail(
            "`activation_parameters_bytes` is missing, which is the size of the tensors between layers",
            "give `boundary_bytes`: sequence length × hidden size × bytes of a value",
        )
    return _numbers(parameters, "activation_parameters_bytes", count)


def _saved(held: Mapping[int, float], weights: float) -> tuple[float, ...]:
    """Return the bytes of saved activations by batch size.

    They are the growth of memory with the batch size. With one batch size, they are the memory beyond the model states.
    """
    minimum, maximum = min(held), max(held)
    # Memory at two batch sizes separates activations, which grow with the batch, from everything that does not.
    if minimum == maximum:
        return (max(0.0, held[minimum] - _STATES * weights),)
    each = max(0.0, (held[maximum] - held[minimum]) / (maximum - minimum))
    return tuple(each * size for size in sorted(held))
