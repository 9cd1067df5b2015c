"""Parts of a model: the layers of one stage as a module, which takes and gives the tensors that cross its two cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hpgo.base.checks import check_is
from hpgo.base.messages import did_you_mean, pluralize, shorten
from hpgo.errors import ArgumentError
from hpgo.runtime import batch_norm
from hpgo.runtime.nan_check import Finder
from hpgo.runtime.passes import begin_layers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from hpgo.runtime.split_backward import Queue


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a cut, or comes from outside.

    >>> import torch
    >>> Value("block-1", by_row=True, has_gradient=True, shape=(8,), dtype=torch.float32).shape_of(3)
    (3, 8)
    """

    name: str
    """`<layer id>`, with `:<number>` behind it if the layer makes several; or `input:<number>`."""
    by_row: bool
    """Whether dimension 0 counts samples, so that rows travel by themselves; if not, it travels whole."""
    has_gradient: bool
    shape: tuple[int, ...]
    """Of one sample if `by_row`, else of the whole."""
    dtype: torch.dtype

    @property
    def is_input(self) -> bool:
        """Whether it comes from outside of the model."""
        return self.name.startswith("input:")

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """Its whole shape where a pass has so many rows."""
        return (rows, *self.shape) if self.by_row else self.shape


@dataclass(frozen=True, slots=True)
class Call:
    """One layer as a part calls it; values are numbered from 0, those that the part takes first."""

    module: int
    reads: tuple[int | tuple[int, ...], ...]
    """Its arguments; some are tuples of values."""
    makes: tuple[int, ...]
    """Of what it returns, in order; -1 where nobody reads it."""
    keeps_leaves: tuple[int, ...]
    """Which of `reads`, by position, it would change in place: received ones are copied before."""
    drops: tuple[int, ...]
    """Values that nobody reads any more."""


class StageModule(nn.Module):
    """Layers of one stage, nothing else of the model; made by `Workload.parts`.

    `part(*values, rows=…)` takes what `takes` says, in that order, and returns a tuple as `gives` says. Values that
    only pass through are returned as they came.
    """

    def __init__(
        self,
        *,
        layers: tuple[str, ...],
        modules: dict[str, nn.Module],
        takes: tuple[Value, ...],
        gives: tuple[Value, ...],
        calls: tuple[Call, ...],
        given: tuple[int, ...],
        row_dimensions: dict[int, int],
        dtype: torch.dtype | None,
        queue: Queue | None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.takes, self.gives = takes, gives
        self._names = tuple(modules)
        self._modules_in_order = nn.ModuleList(modules.values())
        # Found once: looking a module up, or what it lacks, takes as long as a small layer.
        self._calls = tuple(
            (module, getattr(module, "wants_rows", False), call)
            for call, module in ((call, self._modules_in_order[call.module]) for call in calls)
        )
        self._given, self._row_dimensions, self._dtype = given, row_dimensions, dtype
        self._queue = queue
        self.finder: Finder | None = None
        """Looks at all that layers make, once `find_nan` was called."""

    def forward(self, *values: Tensor, rows: int) -> tuple[Tensor, ...]:
        """Runs the layers on `rows` samples."""
        if len(values) != len(self.takes):
            raise ArgumentError(
                f"the part from `{self.layers[0] if self.layers else ''}` got {pluralize(len(values), 'tensor')}, "
                f"but it takes {len(self.takes)}",
                "see its `takes`",
            )
        begin_layers()  # those computed everywhere have run in other parts, and draw the same again
        held: dict[int, Tensor] = {}
        finder = self.finder
        for at, (value, tensor) in enumerate(zip(self.takes, values, strict=True)):
            if tensor.shape != value.shape_of(rows):
                raise ArgumentError(
                    f"`{value.name}` has the shape {tuple(tensor.shape)}, not {value.shape_of(rows)}",
                    "inputs have the shapes of the workload's example, with a row for each sample",
                )
            if value.is_input and self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)  # noqa: PLW2901 -- data is cast as weights are
            held[at] = tensor.movedim(0, self._row_dimensions[at]) if self._row_dimensions.get(at) else tensor
            if finder is not None:
                finder.takes(value.name, at, held[at], is_input=value.is_input)
        for module, wants_rows, call in self._calls:
            arguments: list[Any] = [
                tuple(held[one] for one in at) if isinstance(at, tuple) else held[at] for at in call.reads
            ]
            for position in call.keeps_leaves:
                arguments[position] = arguments[position].clone()
            made = module(*arguments, rows=rows) if wants_rows else module(*arguments)
            made = made if isinstance(made, (tuple, list)) else (made,)
            if finder is not None:
                finder.makes(self._names[call.module], module, zip(call.makes, made, strict=True))
            held |= {at: tensor for at, tensor in zip(call.makes, made, strict=True) if at >= 0}
            for at in call.drops:
                del held[at]
        return tuple(
            held[at].movedim(self._row_dimensions[at], 0) if self._row_dimensions.get(at) else held[at]
            for at in self._given
        )

    def by_layer(self) -> dict[str, dict[str, Tensor]]:
        """Parameters and kept buffers of each layer that has any, by name: `{layer id: {name: tensor}}`."""
        found = {
            layer: dict(module.state_dict(keep_vars=True))
            for layer, module in zip(self._names, self._modules_in_order, strict=True)
        }
        return {layer: tensors for layer, tensors in found.items() if tensors}

    @property
    def joins(self) -> bool:
        """Whether it has layers that exchange sums with the other replicas of the stage, once they have been joined."""
        return any(batch_norm.joinable(self))

    def join(self, group: Any) -> None:
        """Lets batch normalisations count the rows of all ranks in `group`, the replicas of this stage.

        Forward and backward passes then exchange their sums in it, so it must be used for nothing else meanwhile, and
        all of its ranks must run the same passes. Without, each replica normalises its own rows.
        """
        for one in batch_norm.joinable(self):
            one.group = group

    def queueing(self, micro_batch: int) -> AbstractContextManager[None]:
        """Within it, backward passes leave the gradients of linear layers and convolutions for later.

        Raises ArgumentError unless the part was made with `split_backward`.
        """
        return self._queued().filling(micro_batch)

    def run_weight_gradients(self, micro_batch: int) -> None:
        """Computes what `queueing(micro_batch)` left, and adds it to the `grad` of parameters."""
        self._queued().run(micro_batch)

    def forget(self) -> None:
        """Drops what is left of a step that failed."""
        if self._queue is not None:
            self._queue.clear()

    def _queued(self) -> Queue:
        if self._queue is None:
            raise ArgumentError(
                "this part makes whole backward passes",
                "ask `Workload.parts` for one with `split_backward=True`",
                code="wrong_state",
            )
        return self._queue

    def find_nan(self) -> None:
        """From now on all that layers make is looked at, and what is no number raises RunError with the layer."""
        readers: dict[int, tuple[str, ...]] = {}
        for _, _, call in self._calls:
            for one in call.reads:
                for at in one if isinstance(one, tuple) else (one,):
                    readers[at] = (*readers.get(at, ()), self._names[call.module])
        self.finder = Finder(readers)

    def layer(self, name: str) -> nn.Module:
        """The module of one layer. Raises ArgumentError if it has none of this name."""
        check_is("the layer", name, str, "give its id")
        if name not in self._names:
            raise ArgumentError(
                f"the part has no layer `{shorten(name)}`", did_you_mean(name, self._names), code="unknown_name"
            )
        return self._modules_in_order[self._names.index(name)]


def check_stages(stages: Sequence[Sequence[str]], layers: Sequence[str]) -> None:
    """Raises ArgumentError unless `stages` hold `layers`, each once; names what differs first."""
    asked = [layer for stage in stages for layer in stage]
    known = set(layers)
    for at, layer in enumerate(asked):
        if layer not in known:
            here = layers[at] if at < len(layers) else None
            raise ArgumentError(
                f"the plan's layer {at + 1} is `{layer}`, which the workload lacks; "
                + (f"its layer {at + 1} is `{here}`" if here is not None else f"it has {len(layers)} layers"),
                "plan with a profile of this workload, or name the workload that the plan was made for",
            )
    if missing := [layer for layer in layers if layer not in set(asked)]:
        raise ArgumentError(
            f"the workload's layer `{missing[0]}` is in no stage of the plan"
            + (f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""),
            "plan with a profile of this workload, or name the workload that the plan was made for",
        )
    if len(asked) != len(known):
        twice = next(layer for at, layer in enumerate(asked) if layer in asked[:at])
        raise ArgumentError(f"the layer `{twice}` is in two stages", "give each layer to one stage", code="duplicate")
