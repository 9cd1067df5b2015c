"""Cutting a network between layers: the values that cross each cut, and the module of each stage.

Every layer runs with batches of two sizes, on meta tensors unless it needs values. This shows which dimensions count
samples, which values have gradients and which are changed in place. Of layers that are sure to compute the same, only
one runs. A value that is read behind several cuts passes through each stage between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError, HpgoError
from hpgo.runtime import batch_norm, dropout
from hpgo.runtime.module_equality import equivalence_key
from hpgo.runtime.passes import running
from hpgo.runtime.shape_passes import ShapePass, fresh_on_meta, run_for_shapes
from hpgo.runtime.split_backward import Queue, install
from hpgo.runtime.stage_module import Call, StageModule, Value, check_stages
from hpgo.runtime.trees import Tree, tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor

    from hpgo.runtime.modules import Network

_TRIED = (2, 3)
"""Batch sizes at which shapes are compared. A dimension that grows from the first to the second counts samples."""


@dataclass(frozen=True, slots=True)
class LayerRecording:
    """Observed behavior of one layer."""

    values: tuple[Value, ...]
    row_dimensions: tuple[int, ...]
    """Dimension of each value that counts samples; 0 where none does."""
    uncuttable: tuple[str, ...]
    """Reason why each value can't cross a cut; empty where it can."""
    mutates: tuple[int, ...]
    """Positions of the feeds that the layer changes in place."""
    tree: Tree
    """Structure of what the layer returns, with a place for each of `values`."""
    dropouts: dict[str, int | None]
    """Dimension that counts samples in the input of each of its dropouts, by name; None where none does."""
    needs_values: bool
    """Whether its operations depend on values, as in sparse routing, or have no meta version."""

    @property
    def kind(self) -> Any:
        """All of it but the sizes of its values."""
        values = tuple(replace(one, shape=()) for one in self.values)
        return replace(self, values=values), *(len(one.shape) for one in self.values)


def look(network: Network, inputs: Sequence[Tensor], dtype: torch.dtype | None) -> dict[str, LayerRecording]:
    """Return what each layer returns for inputs like these, with weights of `dtype`.

    Layers compute no values unless they need them, see `shape_passes`. Raises ArgumentError for a layer that can't run,
    returns other objects than tensors and constants in containers, or draws random numbers that can't be seeded by
    sample.
    """
    modules: dict[str, nn.Module] = {}
    for layer in network.nodes:
        module = network.make_on_meta(layer)
        dropout.install(layer, module, seed=0)
        batch_norm.install(module)
        modules[layer] = (module if dtype is None else module.to(dtype)).train()
    alike = {layer: equivalence_key(module) for layer, module in modules.items()}
    runs = [_run(network, modules, inputs, dtype, rows, alike=alike) for rows in _TRIED]
    return {layer: _made(layer, runs[0][layer], runs[1][layer]) for layer in network.nodes}


@dataclass(frozen=True, slots=True)
class _Seen:
    output: Any
    tree: Tree
    mutates: tuple[int, ...]
    dropouts: dict[str, tuple[int, ...]]
    needs_values: bool


def _run(
    network: Network,
    modules: dict[str, nn.Module],
    inputs: Sequence[Tensor],
    dtype: torch.dtype | None,
    rows: int,
    *,
    alike: dict[str, Any],
) -> dict[str, _Seen]:
    known: dict[Any, _Seen] = {}
    held: dict[str, Any] = {}
    for at, tensor in enumerate(inputs):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        held[f"input:{at}"] = torch.empty((rows, *tensor.shape[1:]), dtype=kind, device="meta")
    seen: dict[str, _Seen] = {}
    for layer, node in network.nodes.items():
        arguments = []
        for feed in node.feeds:
            if feed not in held:
                raise ArgumentError(
                    f"layer `{layer}` reads `{feed}`, but "
                    + (f"there are {len(inputs)} inputs" if feed.startswith("input:") else "that layer makes fewer"),
                    "give the workload an example of each input; inputs are counted from 0",
                )
            arguments.append(held[feed])
        # Deep models repeat one block many times. Running each distinct layer once keeps this step from growing with
        # the depth.
        like = None if alike[layer] is None else (alike[layer], _shapes(arguments))
        if like in known:
            one = known[like]
            # Layers that compute the same may name their modules differently, but have them in one order.
            shapes = dict(zip(_dropouts(modules[layer]), one.dropouts.values(), strict=True))
            output = tree_map_only(torch.Tensor, fresh_on_meta, one.output)
            seen[layer] = replace(one, output=output, dropouts=shapes)
            _hold(held, layer, seen[layer])
            continue
        shapes = dict.fromkeys(_dropouts(modules[layer]), ())
        hooks = [
            found.register_forward_pre_hook(_noting(shapes, name)) for name, found in _dropouts(modules[layer]).items()
        ]
        made = _call(layer, modules[layer], arguments, rows)
        for hook in hooks:
            hook.remove()
        tree, tensors = Tree.of(made.output, f"what layer `{layer}` returns")
        # Exported models have operations whose results nothing reads. They return an empty tuple.
        if not tensors and made.output != ():
            raise ArgumentError(
                f"layer `{layer}` returns {tree!r}, but no tensor", "return a tensor, or several", code="user_code"
            )
        seen[layer] = _Seen(made.output, tree, made.mutates, shapes, made.needs_values)
        _hold(held, layer, seen[layer])
        # A result that aliases an argument must not be imitated by fresh tensors: the layers behind it would miss
        # in-place changes.
        if like is not None and not _share(tensors_in(arguments), tensors):
            known[like] = seen[layer]
    return seen


def _hold(held: dict[str, Any], layer: str, seen: _Seen) -> None:
    """Keep the result of a layer under the names by which feeds refer to it."""
    held[layer] = seen.output
    if not seen.tree.is_single:
        tensors = seen.tree.flatten("results", seen.output)
        held |= {f"{layer}:{number}": tensor for number, tensor in enumerate(tensors)}


def _shapes(arguments: list[Any]) -> Any:
    """Return the properties of arguments that must be equal for layers to behave alike."""
    tree, tensors = Tree.of(arguments)
    return tree, *((tuple(one.shape), one.stride(), one.dtype, one.requires_grad) for one in tensors)


def _share(given: Iterable[Tensor], output: Sequence[Tensor]) -> bool:
    """Return whether a returned tensor shares memory with an argument or with another returned tensor."""
    places = [tensor.untyped_storage()._cdata for tensor in output]
    return len(set(places)) < len(places) or any(tensor.untyped_storage()._cdata in places for tensor in given)


def _dropouts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the dropouts of a module by name, in their order."""
    return {name: found for name, found in module.named_modules() if isinstance(found, dropout.DrawnDropout)}


def _noting(shapes: dict[str, tuple[int, ...]], name: str) -> Any:
    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        shapes[name] = tuple(given[0].shape)

    return note


def _call(layer: str, module: nn.Module, arguments: list[Any], rows: int) -> ShapePass:
    def call(called: nn.Module, given: list[Any]) -> Any:
        with dropout.watching(layer), running(step=0, samples=range(rows)):
            return called(*given, rows=rows) if getattr(called, "wants_rows", False) else called(*given)

    try:
        return run_for_shapes(module, arguments, call)
    except HpgoError:
        raise
    except Exception as error:
        text = shorten(str(error).strip().splitlines()[0] if str(error).strip() else "", 200)
        raise ArgumentError(
            f"layer `{layer}` can't run on a batch of {rows}: {type(error).__name__}: {text}",
            "let each layer take what the one before returns, keep a row for each sample, and branch on no number "
            "that it computed",
            code="user_code",
        ) from error


def _made(layer: str, few: _Seen, more: _Seen) -> LayerRecording:
    if few.tree != more.tree:
        raise ArgumentError(
            f"layer `{layer}` returns {few.tree!r} for {_TRIED[0]} samples, but {more.tree!r} for {_TRIED[1]}",
            "return the same containers, with a tensor for what depends on the batch",
            code="user_code",
        )
    pairs = zip(few.tree.flatten("results", few.output), more.tree.flatten("results", more.output), strict=True)
    values, dimensions, reasons = [], [], []
    for number, (one, other) in enumerate(pairs):
        name = layer if few.tree.is_single else f"{layer}:{number}"
        dimension, reason = _row_dimension(one.shape, other.shape)
        by_row = dimension is not None and not reason
        rest = [size for at, size in enumerate(one.shape) if not by_row or at != dimension]
        values.append(Value(name, by_row, one.requires_grad, tuple(rest), one.dtype))
        dimensions.append(dimension or 0)
        reasons.append(reason)
    drops = {name: _growing(shape, more.dropouts[name]) for name, shape in few.dropouts.items()}
    return LayerRecording(
        tuple(values), tuple(dimensions), tuple(reasons), few.mutates, few.tree, drops, few.needs_values
    )


def _row_dimension(few: Sequence[int], more: Sequence[int]) -> tuple[int | None, str]:
    """Return the dimension that counts samples, or None, and the reason why the tensor can't be split by samples."""
    if len(few) != len(more):
        return None, "the number of its dimensions follows from the batch size"
    grown = [at for at, sizes in enumerate(zip(few, more, strict=True)) if sizes[0] != sizes[1]]
    if not grown:
        return None, ""
    if len(grown) > 1:
        return None, "several of its dimensions grow with the batch"
    if (few[grown[0]], more[grown[0]]) != _TRIED:
        return None, "its dimension that grows with the batch counts more than samples"
    return grown[0], ""


def _growing(few: Sequence[int], more: Sequence[int]) -> int | None:
    """Return the first dimension of a dropout's input that grows with the samples; None without one."""
    return next((at for at, (one, other) in enumerate(zip(few, more, strict=False)) if one != other), None)


def cut(
    network: Network,
    recordings: dict[str, LayerRecording],
    inputs: Sequence[Tensor],
    stages: Sequence[Sequence[str]],
    *,
    dtype: torch.dtype | None,
    seed: int,
    only: Collection[int] | None = None,
    split_backward: bool = False,
) -> list[StageModule]:
    """Return the modules of `network` for `stages`, in order. Stages that are not in `only` stay on the meta device.

    Raises ArgumentError if the stages don't hold each layer exactly once, if a value would travel backwards, or if a
    value that can't be split by samples crosses a cut.
    """
    check_stages(stages, network.layers)
    # Each process asks for its own stages only. The others are needed for the shapes of what they take and give, which
    # meta modules have.
    crossing = _CrossingValue(network, recordings, inputs, stages)
    return [
        crossing.part(
            at,
            dtype,
            seed,
            on_meta=only is not None and at not in only,
            queue=Queue() if split_backward else None,
        )
        for at in range(len(stages))
    ]


class _CrossingValue:
    """Values that cross each cut of one network."""

    def __init__(
        self,
        network: Network,
        recordings: dict[str, LayerRecording],
        inputs: Sequence[Tensor],
        stages: Sequence[Sequence[str]],
    ) -> None:
        self.network, self.recordings, self.inputs, self.stages = network, recordings, inputs, stages
        self.stage_of = {layer: at for at, stage in enumerate(stages) for layer in stage}
        self.values = {value.name: value for one in recordings.values() for value in one.values}
        self.readers: dict[str, list[str]] = {name: [] for name in self.values}
        self.last: dict[str, int] = {}
        """Last stage that reads each value that travels."""
        for node in network.nodes.values():
            for name in (name for feed in node.feeds for name in self.names(feed)):
                if not name.startswith("input:"):
                    self.readers[name].append(node.id)
                if self._travels(name) and not node.is_hidden:
                    if self.stage_of[node.id] < self._made_in(name):
                        raise ArgumentError(
                            f"layer `{node.id}` of stage {self.stage_of[node.id]} reads `{name}` of stage "
                            f"{self._made_in(name)}, which runs later",
                            "give layers that feed others to the same or an earlier stage",
                        )
                    self.last[name] = max(self.last.get(name, 0), self.stage_of[node.id])
        for name in (name for output in network.outputs for name in self.names(output)):
            if self._travels(name):
                self.last[name] = len(stages) - 1
        self._check()

    def names(self, feed: str) -> tuple[str, ...]:
        """Return the names of the values that a feed stands for."""
        return (feed,) if feed not in self.recordings else tuple(value.name for value in self.recordings[feed].values)

    def _made_in(self, name: str) -> int:
        maker = self.network.maker(name)
        return -1 if maker is None else self.stage_of[maker]

    def _travels(self, name: str) -> bool:
        maker = self.network.maker(name)
        return maker is not None and not self.network.nodes[maker].everywhere

    def _check(self) -> None:
        for layer, one in self.recordings.items():
            for value, reason in zip(one.values, one.uncuttable, strict=True):
                if reason and self._travels(value.name) and self.last.get(value.name, -1) > self.stage_of[layer]:
                    raise ArgumentError(
                        f"no cut is possible behind `{layer}`, because `{value.name}` can't be sent row by row:"
                        f" {reason}",
                        "cut elsewhere, or let the layer return a tensor with one dimension for samples",
                        code="unsupported",
                    )
            for at in one.mutates:
                feed = self.network.nodes[layer].feeds[at]
                for name in self.names(feed):
                    others = [reader for reader in self.readers.get(name, ()) if reader != layer]
                    if others:
                        raise ArgumentError(
                            f"layer `{layer}` changes `{name}` in place, but `{others[0]}` reads it, too",
                            "use the operation that returns a new tensor (`inplace=False`)",
                        )

    def takes(self, stage: int) -> list[str]:
        """Return the values that cross the cut before a stage, in the order of layers."""
        return [name for name in self.values if name in self.last and self._made_in(name) < stage <= self.last[name]]

    def runs(self, stage: int) -> list[str]:
        """Return the layers that a stage computes, in order.

        These are its own layers, and the layers computed everywhere that it needs.
        """
        wanted = {layer for layer in self.stages[stage] if not self.network.nodes[layer].everywhere}
        feeds = list(self.network.outputs) if stage == len(self.stages) - 1 else []
        feeds += [feed for layer in wanted for feed in self.network.nodes[layer].feeds]
        while feeds:
            maker = self.network.maker(feeds.pop())
            if maker is not None and maker not in wanted and self.network.nodes[maker].everywhere:
                wanted.add(maker)
                feeds += self.network.nodes[maker].feeds
        return [layer for layer in self.network.nodes if layer in wanted]

    def part(
        self, stage: int, dtype: torch.dtype | None, seed: int, *, on_meta: bool, queue: Queue | None
    ) -> StageModule:
        """Build the module of a stage."""
        runs, nodes = self.runs(stage), self.network.nodes
        is_last = stage == len(self.stages) - 1
        read = {feed for layer in runs for feed in nodes[layer].feeds if feed.startswith("input:")}
        inputs = sorted(read, key=lambda name: int(name.removeprefix("input:")))
        takes = [*inputs, *self.takes(stage)]
        gives = (
            [name for output in self.network.outputs for name in self.names(output)]
            if is_last
            else self.takes(stage + 1)
        )
        number = {name: at for at, name in enumerate(takes)}
        for layer in runs:
            for value in self.recordings[layer].values:
                number.setdefault(value.name, len(number))
        # Keep only values that are read or given, and drop each one after its last reader, so that a stage holds no
        # tensor longer than needed.
        needed = {name for layer in runs for feed in nodes[layer].feeds for name in self.names(feed)} | set(gives)
        last_read = {name: layer for layer in runs for feed in nodes[layer].feeds for name in self.names(feed)}
        calls = []
        for at, layer in enumerate(runs):
            one, feeds = self.recordings[layer], nodes[layer].feeds
            reads = tuple(
                number[feed]
                if feed in number
                else (self.recordings[feed].tree, tuple(number[name] for name in self.names(feed)))
                for feed in feeds
            )
            makes = tuple(number[value.name] if value.name in needed else -1 for value in one.values)
            # Received tensors are leaves of autograd, which must not be changed in place. The stage copies them first.
            received = tuple(position for position in one.mutates if feeds[position] in takes)
            drops = tuple(number[name] for name, reader in last_read.items() if reader == layer and name not in gives)
            calls.append(Call(at, reads, one.tree, makes, received, drops))
        dimensions = {
            number[value.name]: dimension
            for one in self.recordings.values()
            for value, dimension in zip(one.values, one.row_dimensions, strict=True)
            if dimension and value.name in {*takes, *gives}
        }
        return StageModule(
            layers=tuple(self.stages[stage]),
            modules=self._modules(runs, dtype, seed, on_meta=on_meta, queue=queue),
            takes=tuple(self._input(name) if name.startswith("input:") else self.values[name] for name in takes),
            gives=tuple(self.values[name] for name in gives),
            calls=tuple(calls),
            given=tuple(number[name] for name in gives),
            row_dimensions=dimensions,
            dtype=dtype,
            queue=queue,
        )

    def _input(self, name: str) -> Value:
        example = self.inputs[int(name.removeprefix("input:"))]
        return Value(name, by_row=True, has_gradient=False, shape=tuple(example.shape[1:]), dtype=example.dtype)

    def _modules(
        self,
        runs: Sequence[str],
        dtype: torch.dtype | None,
        seed: int,
        *,
        on_meta: bool,
        queue: Queue | None,
    ) -> dict[str, nn.Module]:
        modules = {}
        for layer in runs:
            module = self.network.make_on_meta(layer) if on_meta else self.network.make(layer, seed=seed)
            if queue is not None:
                install(module, queue)
            modules[layer] = ready(layer, module, self.recordings[layer], dtype=dtype, seed=seed)
        for holders in self.network.tied_weights:
            here = [holder for holder in holders if holder[0] in modules]
            if not here:
                continue
            first = parameter_of(modules[here[0][0]], here[0])
            # All copies of a tied weight start with the values of its first holder, which another stage may hold.
            if here[0] != holders[0] and not on_meta:
                other = parameter_of(self.network.make(holders[0][0], seed=seed), holders[0])
                with torch.no_grad():
                    first.copy_(other)
            for layer, name in here[1:]:
                module, _, last = name.rpartition(".")
                setattr(modules[layer].get_submodule(module), last, first)
        return modules


def ready(
    layer: str, module: nn.Module, recording: LayerRecording, *, dtype: torch.dtype | None, seed: int
) -> nn.Module:
    """Return the module of a layer with weights of `dtype`. Its dropout and normalization do not depend on the plan."""
    dropout.install(layer, module, seed=seed, row_dimensions=recording.dropouts)
    batch_norm.install(module)
    return module if dtype is None else module.to(dtype)


def parameter_of(module: nn.Module, holder: tuple[str, str]) -> nn.Parameter:
    """Return the parameter of a layer's module that `(layer id, name)` refers to.

    Raise ArgumentError if it has none.
    """
    try:
        return module.get_parameter(holder[1])
    except AttributeError:
        raise ArgumentError(
            f"layer `{holder[0]}` has no parameter `{holder[1]}` to tie",
            did_you_mean(holder[1], [name for name, _ in module.named_parameters()]),
        ) from None
