"""Estimates of layer times on a device that is not available, by the roofline model, from shapes and datasheets.

An operation takes the maximum of two times: that of its arithmetic at the device's peak, and that of its memory traffic
at the memory's peak (Williams, Waterman and Patterson, *Roofline*, CACM 2009). No layer reaches the peaks: `efficiency`
is the fraction that it does reach.

DAPPLE measured VGG-19 on a V100 at 32 samples in float32: 51 ms forward and 96 ms backward. The roofline itself
(`--efficiency 1`) gives 86 and 168 ms. Fast 3 × 3 convolutions (Lavin and Gray, *Fast Algorithms for Convolutional
Neural Networks*, CVPR 2016) take 0.38 to 0.87 of the roofline, but the first takes 2.4. The first linear layer takes
0.98. ResNet-50 at 128 samples took 201 ms forward, where the roofline gives about 102. So the default efficiency fits
ResNet-50, and overestimates VGG-19 by a factor of 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from hpgo.base.checks import check_int, check_list, choice, number
from hpgo.base.files import as_path, is_folder, may_be_file
from hpgo.base.messages import as_whole, safe_repr, similar
from hpgo.errors import ArgumentError, ProfileError
from hpgo.hardware.rates import RATES, WIDTHS, Rates
from hpgo.model.formats.onnx_files import OnnxFile
from hpgo.model.formats.transformers import read_transformer
from hpgo.model.operations import VIEWS, work
from hpgo.model.profile import Layer, Profile, TiedWeight
from hpgo.model.transformer import Transformer
from hpgo.model.transformer_network import TransformerShape
from hpgo.model.transformer_presets import named_transformer, transformer_names

if TYPE_CHECKING:
    import os
    from collections.abc import Container, Iterable, Mapping, Sequence

    from hpgo.hardware.rates import ComputeType, DeviceName
    from hpgo.model.operations import Network, Operation

Grain = Literal["block", "op"]
"""Granularity of layers: a block between single-tensor boundaries, or one operation with a weight matrix."""
EFFICIENCY = 0.5
"""Default fraction of a device's peaks that layers reach."""
ESTIMATED = "estimated for "
"""Beginning of the `source` of an estimated profile."""
_MAX = 2**20


def estimate(
    source: str | os.PathLike[str] | Transformer,
    *,
    device: DeviceName,
    dtype: ComputeType | None = None,
    batch_sizes: int | Sequence[int] | None = None,
    by: Grain = "block",
    dims: Mapping[str, int] | None = None,
    efficiency: float = EFFICIENCY,
) -> Profile:
    """Return a profile of a network that was never run, with the estimated times of its layers on `device`.

    Args:
        source: an ONNX file, with weights or with their shapes alone; or a transformer: its name, its `config.json`,
            a file with `hpgo_transformer`, or a `Transformer`.
        device: one of `v100`, `a100`, `a100-40`, `h100`, `h100-96`, `h200`, `b200`, `b300`, `gb200`, `gb300`,
            `h100-pcie`, `h100-nvl`, `h20`, `l40s`, `l4`, `a10g`, `rtx4090`, `rtx5090`, `mi300x`, `mi325x`, `mi355x`.
        dtype: number format of computation and storage, `float32`, `tf32`, `float16` or `bfloat16`. Default: the format
            of an ONNX file's weights, and `bfloat16` for a transformer.
        batch_sizes: samples in a batch. Default: the batch size that the file fixes, or else 1.
        by: granularity of layers: a `block` has one tensor as input and one as output; an `op` has one operation with a
            weight matrix. Both include the operations that follow, up to the next layer.
        dims: sizes of other open dimensions of the file, by name; for a transformer `tokens`, the sequence length.
        efficiency: fraction of the device's peaks that layers reach; 1 is the roofline itself.

    Raises ArgumentError for invalid arguments, or without the package `onnx`. Raises ProfileError for a file that is
    not a model, and for operations and shapes that are only known when the network runs.

    >>> estimate("llama-3-8b", device="h100", dims={"tokens": 4096}).layers[1].id
    'layers.0.attention.query'
    >>> estimate("model.onnx", device="a1000")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: there is no device `a1000`
    """
    rates = RATES[choice("device", device, RATES)]
    choice("grain", by, get_args(Grain))
    if dtype is not None:
        choice("dtype", dtype, WIDTHS)
    efficiency = number("efficiency", efficiency, above=0, maximum=1)
    sizes = _sizes(batch_sizes)
    given = _dims(dims)
    file = _network(source)
    width = None if dtype is None else WIDTHS[dtype]
    networks = {size: file.at(size, given, width) for size in sizes or (file.batch_size or 1,)}
    first = next(iter(networks.values()))
    computed = first.dtype if dtype is None else dtype
    if computed not in rates.flop_per_s:
        known = ", ".join(rates.flop_per_s)
        raise ArgumentError(f"the peak of {device} for {computed} is unknown", f"set dtype to one of: {known}")
    parts = _parts(first, by)
    if not parts:
        raise ProfileError(f"{file.file}: no operation uses a matrix of weights", "export the model that is trained")
    figures = [_figures(parts, network, rates, computed, efficiency) for network in networks.values()]
    layers = tuple(
        Layer(
            part.id,
            part.id,
            tuple(those[at].forward_s for those in figures),
            tuple(those[at].backward_s for those in figures),
            tuple(those[at].sent_bytes for those in figures),
            figures[0][at].parameter_bytes,
            tuple(those[at].saved_bytes for those in figures),
        )
        for at, part in enumerate(parts)
    )
    description = f"{ESTIMATED}{device} in {computed} at {100 * efficiency:g} % of its peaks, not measured: {file.file}"
    return Profile(
        file.name, tuple(networks), layers, _edges(parts), description,
        tied_weights=_tied_weights(parts, first), dtype=computed
    )  # fmt: skip


def _network(source: str | os.PathLike[str] | Transformer) -> OnnxFile | TransformerShape:
    """Return the reader that builds the network for a batch size."""
    if isinstance(source, Transformer):
        return TransformerShape(source, f"transformer `{source.name}`")
    if isinstance(source, str) and (known := named_transformer(source)) is not None:
        return TransformerShape(known, f"`{source}`")
    path = as_path(source, ProfileError)
    if path.suffix in {".json", ".yaml", ".yml"} or is_folder(path):
        return TransformerShape(read_transformer(path), str(path))
    if not may_be_file(path) and (hint := similar(str(path), transformer_names())):
        raise ProfileError(
            f"`{path}` is not a known transformer, and an ONNX file ends in .onnx", hint, code="unknown_name"
        )
    return OnnxFile(path)


def is_estimate(profile: Profile) -> bool:
    """Return whether the times of `profile` were estimated, not measured.

    >>> is_estimate(Profile.chain("toy", batch_size=1, forward_s=[1], backward_s=[2], activation_bytes=[8],
    ...     parameter_bytes=[4], source="estimated for a100 in float16"))
    True
    """
    return profile.source.startswith(ESTIMATED)


@dataclass(slots=True)
class _EstimatedLayer:
    """A layer with its operations and the tensors that it sends."""

    id: str = ""
    operations: list[int] = field(default_factory=list)
    weights: set[str] = field(default_factory=set)
    """Weights that no earlier layer reads. They count in this layer's parameters."""
    sent: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    """Ids of the layers that read the sent tensors."""


def _tied_weights(parts: Sequence[_EstimatedLayer], network: Network) -> tuple[TiedWeight, ...]:
    """Return the weights that several layers read."""
    readers: dict[str, list[str]] = {}
    for part in parts:
        read = (name for at in part.operations for name in network.operations[at].inputs if name in network.roots)
        for root in dict.fromkeys(network.roots[name] for name in read):
            readers.setdefault(root, []).append(part.id)
    return tuple(TiedWeight(tuple(ids), network.tensors[root].bytes) for root, ids in readers.items() if len(ids) > 1)


@dataclass(frozen=True, slots=True)
class _Figures:
    forward_s: float
    backward_s: float
    sent_bytes: float
    parameter_bytes: float
    saved_bytes: float


def _sizes(given: int | Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    hint = "samples in a batch, or several numbers of them"
    values = [given] if as_whole(given) is not None else check_list("batch_sizes", given, hint=hint)
    found = [check_int("batch_sizes", value, maximum=_MAX, hint=hint) for value in values]
    if not found:
        raise ArgumentError("batch_sizes is empty", hint)
    return tuple(sorted(set(found)))


def _dims(given: Mapping[str, int] | None) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ArgumentError(f"dims is {safe_repr(given)}", "give a dict from names to sizes, like {'sequence': 512}")
    return {name: check_int(f"dims, `{name}`,", size, maximum=2**40) for name, size in given.items()}


def _parts(network: Network, by: str) -> list[_EstimatedLayer]:
    """Return the layers in topological order.

    Operations are in execution order, and each layer is a run of them. Operations that depend on no weight, such as
    masks, belong to the first layer that reads their result.
    """
    tensors = network.tensors
    trained = [
        at
        for at, operation in enumerate(network.operations)
        if any(tensors[name].trained for name in operation.outputs if name)
    ]
    parts: list[_EstimatedLayer] = []
    seen: set[str] = set()
    for run in _runs(network, trained, by):
        read = dict.fromkeys(name for at in run for name in network.operations[at].inputs if name)
        own = [name for name in read if tensors[name].is_weight]
        matrices = [name for name in own if len(tensors[name].shape) > 1]
        # Operations before the first weight matrix join the first layer, and each later matrix starts a new one.
        if not parts or (matrices and parts[-1].id):
            parts.append(_EstimatedLayer())
        part = parts[-1]
        part.operations += run
        if matrices and not part.id:
            part.id = _id(network, run, matrices[0], seen)
        part.weights |= {network.roots[name] for name in own} - seen
        seen |= part.weights
    parts = [part for part in parts if part.id]
    _number_alike(parts)
    _connect(network, parts)
    return parts


def _runs(network: Network, trained: Sequence[int], by: str) -> Iterable[list[int]]:
    """Return the operations one by one, or as runs between points where a single tensor is live."""
    if by == "op":
        return [[at] for at in trained]
    last = {name: at for at in trained for name in network.operations[at].inputs if name}
    runs: list[list[int]] = [[]]
    crossing: set[str] = set()
    for at in trained:
        runs[-1].append(at)
        # Only trained tensors count: a mask that every block reads would otherwise prevent all cuts.
        crossing = {name for name in crossing if last[name] > at}
        crossing |= {
            name for name in network.operations[at].outputs if last.get(name, -1) > at and network.tensors[name].trained
        }
        if len(crossing) == 1:
            runs.append([])
    return [run for run in runs if run]


def _id(network: Network, run: Sequence[int], matrix: str, seen: Container[str]) -> str:
    """Return a layer id: the name of its weight without `.weight`.

    The operation's name is used instead if the exporter made the weight's name up, or if an earlier layer has the
    weight.
    """
    root = network.roots[matrix]
    # Exporters of PyTorch name unnamed constants `onnx::…` or `val_…`.
    made_up = root.startswith(("onnx::", "val_"))
    if made_up or root in seen:
        reader = next(network.operations[at] for at in run if matrix in network.operations[at].inputs)
        if reader.name or made_up:
            return reader.name or reader.kind
    return root.removesuffix(".weight") or root


def _number_alike(parts: Sequence[_EstimatedLayer]) -> None:
    """Append a number to ids that occurred before."""
    taken: set[str] = set()
    for part in parts:
        name, count = part.id, 1
        while part.id in taken:
            count += 1
            part.id = f"{name}#{count}"
        taken.add(part.id)


def _connect(network: Network, parts: Sequence[_EstimatedLayer]) -> None:
    """Assign operations without weights to the first layer that reads them, and record what layers send."""
    home = {at: part for part in parts for at in part.operations}
    maker = {name: at for at, operation in enumerate(network.operations) for name in operation.outputs if name}
    place = {part.id: number for number, part in enumerate(parts)}
    wanted: dict[int, _EstimatedLayer] = {}
    # Walk backwards, so that all readers of an operation are assigned before the operation itself.
    for at in range(len(network.operations) - 1, -1, -1):
        reader = home.get(at) or wanted.get(at)
        if reader is None:
            continue  # no trained operation reads it
        for name in network.operations[at].inputs:
            if not name or name not in maker:
                continue
            source = maker[name]
            if source not in home:
                there = wanted.get(source)
                if there is None or place[reader.id] < place[there.id]:
                    wanted[source] = reader
            elif home[source] is not reader and at in home:
                home[source].sent.add(name)
                home[source].readers.add(reader.id)
    for at, part in wanted.items():
        part.operations.append(at)


def _edges(parts: Sequence[_EstimatedLayer]) -> tuple[tuple[str, str], ...]:
    place = {part.id: number for number, part in enumerate(parts)}
    return tuple(
        (part.id, reader) for part in parts for reader in sorted(part.readers, key=lambda reader: place[reader])
    )


def _figures(
    parts: Sequence[_EstimatedLayer], network: Network, rates: Rates, dtype: str, efficiency: float
) -> list[_Figures]:
    flop_per_s, bytes_per_s = efficiency * rates.flop_per_s[dtype], efficiency * rates.bytes_per_s
    base = _bases(network)
    found = []
    for part in parts:
        forward_s = backward_s = 0.0
        saved: set[str] = set()
        for at in part.operations:
            done = work(network.operations[at], network.tensors)
            forward_s += max(done.forward_flop / flop_per_s, done.forward_bytes / bytes_per_s)
            backward_s += max(done.backward_flop / flop_per_s, done.backward_bytes / bytes_per_s)
            # A view and its base share memory, so count a tensor once if both are saved.
            saved |= {base.get(name, name) for name in done.saved}
        found.append(
            _Figures(
                forward_s,
                backward_s,
                sum(network.tensors[name].bytes for name in sorted(part.sent)),
                sum(network.tensors[name].bytes for name in sorted(part.weights)),
                sum(network.tensors[name].bytes for name in sorted(saved)),
            )
        )
    return found


def _bases(network: Network) -> dict[str, str]:
    """Return for each view the tensor whose memory it shows."""
    base: dict[str, str] = {}

    def look(operation: Operation) -> None:
        if operation.kind in VIEWS and operation.inputs and operation.inputs[0]:
            base[operation.outputs[0]] = base.get(operation.inputs[0], operation.inputs[0])

    for operation in network.operations:
        look(operation)
    return base
