"""Reader of Galvatron's profiles: two JSON files with related names, one of times and one of memory.

    computation_profiling_bf16_llama2-7b_all.json
    {"layertype_0_bsz1_seq2048": 4.4, "layertype_other_bsz1_seq2048": 6.3, "layertype_0_bsz2_seq2048": 4.3, …}

    memory_profiling_bf16_llama2-7b_all.json
    {"layertype_0_sp": {"2048": {"parameter_size": 778, "tp_activation_per_bsz_dict": {"1": 515, "checkpoint": 32}}},
     "other_memory_pp_on_first_sp": {"2048": {"model_states": {"1": 2021.0}, "activation": {"1": 198.7}}},
     "other_memory_pp_on_last_sp": {"2048": {"model_states": {"1": 2021.1}, "activation": {"1": 717.6}}}, …}

Times are ms of the forward pass, sizes are MiB. Both are per sample in a batch of `bsz` samples. Neither file contains
the number of layers of each type. The meaning of the numbers follows Galvatron's cost model (Miao et al., VLDB 2023):
the backward pass takes twice the time of the forward pass, and the time outside the layers is split evenly between both
ends of the model.

Values of the files in the profile:

- `layertype_K_bszB_seqS`, milliseconds of the forward pass per sample in a batch of B: B times that is `forward_s`, and
  twice `forward_s` is `backward_s`, as in Galvatron's cost model.
- `layertype_other_bszB_seqS`, the same, outside the layers: half each for the layers `embedding` and `head`, as in
  Galvatron.
- `parameter_size`, MiB: `parameter_bytes`.
- `model_states` of the first and last stage, MiB of weights, gradients and two moments: 1/4 is `parameter_bytes` of
  `embedding` and `head`.
- `activation`, and `"1"` of `tp_activation_per_bsz_dict`, MiB of one sample: `saved_bytes`.
- `checkpoint`, MiB of one sample: the layer's input, which is all that recomputation saves: `activation_bytes` of the
  layer before.
- `layernum[…]`, and keys like `1_2_4_sp`: ignored, since the other keys were computed from them.

Weights have four bytes per parameter, even if the model computes in bf16. Times and memory are for one GPU, and
`gpus_per_device` does not apply. The published files of LLaMA-2 7B state sequences of 2,048 tokens, but their sizes
match 4,096.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from hpgo.base.documents import Section
from hpgo.base.messages import pluralize, shorten
from hpgo.errors import ProfileError
from hpgo.model.profile import Layer, Profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WHAT = "a file of Galvatron's profiler"
_TIMES, _MEMORY = "computation_profiling_", "memory_profiling_"
_TIME = re.compile(r"layertype_([0-9]{1,4})_bsz([1-9][0-9]{0,8})_seq([0-9]{1,9})")
_BACKWARD = 2.0
"""Time of the backward pass as a multiple of the forward pass; Galvatron's `bct_fct_coe`."""
_STATES = 4.0
"""Model states per weight: the weight, its gradient and two Adam moments, all of equal size."""
_MIB = 2.0**20
_DEVICES = "1"
"""Key of measurements on one GPU."""


def looks_like(document: object) -> bool:
    """Return whether the first key is one that Galvatron's profiler writes into either file."""
    first = next(iter(document), "") if isinstance(document, dict) else ""
    return bool(re.match(r"layertype_\w+|layernum\[|[0-9]+_[0-9]+_[0-9]+(_\w+)?$", str(first)))


def both(path: Path) -> tuple[Path, Path]:
    """Return the files of times and of memory, of which `path` is one.

    Raises ProfileError if the name of `path` does not determine the name of the other file.
    """
    for own in (_TIMES, _MEMORY):
        if path.name.startswith(own):
            rest = path.name.removeprefix(own)
            return path.with_name(_TIMES + rest), path.with_name(_MEMORY + rest)
    raise ProfileError(
        f"{path} is {WHAT}, and there are two for a model",
        f"put both into one folder, as `{_TIMES}NAME.json` and `{_MEMORY}NAME.json`",
    )


def parse(
    times: object,
    memory: object,
    *,
    files: tuple[Path, Path],
    layer_counts: Sequence[int],
    boundary_bytes: float | None,
) -> Profile:
    """Return the profile in two parsed files of a model with `layer_counts` layers of each type.

    `boundary_bytes` are the bytes that one sample sends from layer to layer, if the file of memory does not contain
    them.

    Raises ProfileError naming file and key.

    >>> from pathlib import Path
    >>> times = {"layertype_0_bsz2_seq8": 3.0, "layertype_other_bsz2_seq8": 1.0}
    >>> beside = {"8": {"model_states": {"1": 4}, "activation": {"1": 1}}}
    >>> memory = {
    ...     "layertype_0": {"8": {"parameter_size": 2, "tp_activation_per_bsz_dict": {"1": 8, "checkpoint": 1}}},
    ...     "other_memory_pp_on_first": beside, "other_memory_pp_on_last": beside,
    ... }
    >>> files = Path("computation_profiling_tiny.json"), Path("memory_profiling_tiny.json")
    >>> profile = parse(times, memory, files=files, layer_counts=[2], boundary_bytes=None)
    >>> [(layer.id, layer.forward_s[0], layer.parameter_bytes / 2**20) for layer in profile.layers]
    [('embedding', 0.001, 1.0), ('layer0', 0.006, 2.0), ('layer1', 0.006, 2.0), ('head', 0.001, 1.0)]
    """
    time, held = Section(times, str(files[0]), ProfileError), Section(memory, str(files[1]), ProfileError)
    sizes, lengths = _measured(time, len(layer_counts))
    per_sample = [
        {size: time.amount(f"layertype_{kind}_bsz{size}_seq{length}") for size in sizes}
        for kind, length in enumerate(lengths)
    ]
    # Each type of layer has a sequence length. The key of the time outside the layers lists the lengths of all types.
    together = str(lengths[0]) if len(lengths) == 1 else f"[{','.join(map(str, lengths))}]"
    beside = {size: time.amount(f"layertype_other_bsz{size}_seq{together}") for size in sizes}
    kinds = [_entry(held, f"layertype_{kind}", str(length)) for kind, length in enumerate(lengths)]
    inputs = [_input_bytes(kind, boundary_bytes) for kind in kinds]
    order = [kind for kind, count in enumerate(layer_counts) for _ in range(count)]
    # As in Galvatron's cost model, embedding and head take half of the time outside the layers each.
    halves = {size: taken / 2 for size, taken in beside.items()}
    first, last = (_entry(held, f"other_memory_pp_on_{end}", together) for end in ("first", "last"))
    layers = [_layer("embedding", halves, inputs[order[0]], _of_end(first))]
    for at, kind in enumerate(order):
        sent = inputs[order[at + 1]] if at + 1 < len(order) else inputs[kind]
        layers.append(_layer(f"layer{at}", per_sample[kind], sent, _of_kind(kinds[kind])))
    layers.append(_layer("head", halves, 0.0, _of_end(last)))
    edges = tuple((before.id, behind.id) for before, behind in pairwise(layers))
    name = files[0].stem.removeprefix(_TIMES)
    return time.build(Profile, name, tuple(sizes), tuple(layers), edges, f"Galvatron: {files[0]}, {files[1]}")


def _measured(time: Section, kinds: int) -> tuple[list[int], list[int]]:
    """Return the batch sizes at which all types of layers were measured, and the sequence length of each type."""
    found: dict[int, dict[int, set[int]]] = {}
    for key in time:
        if match := _TIME.fullmatch(key):
            kind, size, length = map(int, match.groups())
            found.setdefault(kind, {}).setdefault(length, set()).add(size)
    if not found:
        time.fail(
            "`layertype_0_bsz1_seq…` is missing: these are measurements of whole models",
            "compute them with Galvatron's profiler (`process_profiled_data`)",
        )
    if sorted(found) != list(range(kinds)):
        time.fail(
            f"the file has {pluralize(len(found), 'type')} of layers, but `layer_counts` has {kinds}",
            "give a number for each type in order, such as 24,24",
        )
    lengths: list[int] = []
    sizes = set.intersection(*(set.union(*those.values()) for those in found.values()))
    for kind, those in sorted(found.items()):
        if len(those) > 1:
            listed = ", ".join(map(str, sorted(those)[:12]))
            time.fail(
                f"layers of type {kind} were measured at sequences of {listed}",
                "copy the file, and keep the keys of one length",
            )
        lengths += those
    if not sizes:
        time.fail("no batch size was measured for all types of layers", "measure each at the same ones")
    return sorted(sizes), lengths


def _entry(held: Section, key: str, length: str) -> Section:
    """Return the file of memory's entry for `key` at a sequence length. Sequence-parallel entries take precedence."""
    there = [held.within(name) for name in (f"{key}_sp", key) if name in held]
    for found in there:
        if length in found:
            return found.within(length)
    if not there:
        held.fail(
            f"`{key}` is missing", "compute it with Galvatron's profiler (`process_profiled_data`)", code="missing"
        )
    lengths = shorten(", ".join(list(there[0])[:12])) or "none"
    return there[0].fail(
        f"there is no entry for sequence length {length}, which the file of times has",
        f"measure it; known lengths: {lengths}",
    )


def _input_bytes(kind: Section, boundary_bytes: float | None) -> float:
    """Return the bytes of one sample that enter a layer.

    Full recomputation saves only the layer's input, so the entry `checkpoint` is its size.
    """
    if boundary_bytes is not None:
        return boundary_bytes
    kept = kind.within("tp_activation_per_bsz_dict")
    if "checkpoint" not in kept:
        kept.fail(
            "`checkpoint` is missing, which is the size of the tensors between layers",
            "give `boundary_bytes`: sequence length × hidden size × bytes of a value",
        )
    return kept.amount("checkpoint") * _MIB


def _of_kind(entry: Section) -> tuple[Section, float, float]:
    """Return a layer's entry, and its MiB of weights and of saved activations per sample."""
    return entry, entry.amount("parameter_size"), entry.within("tp_activation_per_bsz_dict").amount(_DEVICES)


def _of_end(entry: Section) -> tuple[Section, float, float]:
    """Return the entry of a first or last stage, and its MiB of weights and saved activations outside the layers."""
    return entry, entry.within("model_states").amount(_DEVICES) / _STATES, entry.within("activation").amount(_DEVICES)


def _layer(layer_id: str, milliseconds: dict[int, float], sent: float, held: tuple[Section, float, float]) -> Layer:
    """Build a layer from ms per sample by batch size, bytes that a sample sends, and its entry with MiB."""
    where, parameters, saved = held
    forward_s = tuple(milliseconds[size] * size / 1e3 for size in milliseconds)
    return where.build(
        Layer,
        layer_id,
        layer_id,
        forward_s,
        tuple(_BACKWARD * seconds for seconds in forward_s),
        tuple(sent * size for size in milliseconds),
        parameters * _MIB,
        tuple(saved * _MIB * size for size in milliseconds),
    )
