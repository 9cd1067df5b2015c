"""Stage modules: the layers of one stage, with the tensors that cross the cuts before and behind it."""

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
    from hpgo.runtime.trees import Tree


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a cut, or an input of the model.

    >>> import torch
    >>> Value("block-1", by_row=True, has_gradient=True, shape=(8,), dtype=torch.float32).shape_of(3)
    (3, 8)
    """

    name: str
    """`<layer id>`, followed by `:<number>` if the layer returns several; or `input:<number>`."""
    by_row: bool
    """Whether dimension 0 counts samples, so that rows can be sent separately. If not, the whole tensor is sent."""
    has_gradient: bool
    shape: tuple[int, ...]
    """Shape of one sample if `by_row`, else of the whole tensor."""
    dtype: torch.dtype

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model."""
        return self.name.startswith("input:")

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """Return the whole shape in a pass of `rows` rows."""
        return (rows, *self.shape) if self.by_row else self.shape


@dataclass(frozen=True, slots=True)
class Call:
    """Call of one layer in a stage. Values are numbered from 0, those that the stage takes first."""

    module: int
    reads: tuple[int | tuple[Tree, tuple[int, ...]], ...]
    """Arguments of the layer. Some are structures of several values."""
    tree: Tree
    """Structure of what the layer returns."""
    makes: tuple[int, ...]
    """Numbers of the returned values, in order; -1 for a value that nothing reads."""
    keeps_leaves: tuple[int, ...]
    """Positions in `reads` that the layer changes in place. Received tensors are copied before."""
    drops: tuple[int, ...]
    """Values that no later layer reads."""


class StageModule(nn.Module):
    """Layers of one stage, without any other layer of the model. Created by `Workload.parts`.

    `part(*values, rows=…)` takes the values listed in `takes`, in that order, and returns a tuple as listed in `gives`.
    Values that only pass through are returned unchanged.
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
        # A list, because layer ids may contain dots, which names of submodules may not.
        self._modules_in_order = nn.ModuleList(modules.values())
        # Look these up once. Finding a submodule or a missing attribute takes as long as a small layer.
        self._calls = tuple(
            (module, getattr(module, "wants_rows", False), call)
            for call, module in ((call, self._modules_in_order[call.module]) for call in calls)
        )
        self._given, self._row_dimensions, self._dtype = given, row_dimensions, dtype
        self._queue = queue
        self.finder: Finder | None = None
        """Checker of all values that layers make, once `find_nan` was called; else None."""

    def forward(self, *values: Tensor, rows: int) -> tuple[Tensor, ...]:
        """Run the layers on `rows` samples. Raise ArgumentError for tensors of wrong number or shape."""
        if len(values) != len(self.takes):
            raise ArgumentError(
                f"the stage from `{self.layers[0] if self.layers else ''}` got {pluralize(len(values), 'tensor')}, "
                f"but it takes {len(self.takes)}",
                "give the tensors listed in its `takes`",
            )
        # Layers computed everywhere run in several stages of one pass, and must draw the same numbers in each.
        begin_layers()
        held: dict[int, Tensor] = {}
        finder = self.finder
        for at, (value, tensor) in enumerate(zip(self.takes, values, strict=True)):
            if tensor.shape != value.shape_of(rows):
                raise ArgumentError(
                    f"`{value.name}` has the shape {tuple(tensor.shape)}, but must have {value.shape_of(rows)}",
                    "give inputs with the shapes of the workload's example, with a row for each sample; for batches of"
                    " several shapes, give a list of modules and `Workload(…, dynamic_shapes=True)`",
                )
            if value.is_input and self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)  # noqa: PLW2901 -- inputs are cast like weights
            # Tensors travel with samples in dimension 0, so that rows are contiguous. Layers get them in their own
            # order.
            held[at] = tensor.movedim(0, self._row_dimensions[at]) if self._row_dimensions.get(at) else tensor
            if finder is not None:
                finder.takes(value.name, at, held[at], is_input=value.is_input)
        for module, wants_rows, call in self._calls:
            arguments: list[Any] = [
                at[0].build([held[one] for one in at[1]]) if isinstance(at, tuple) else held[at] for at in call.reads
            ]
            # In-place changes of leaves that require gradients raise in autograd.
            for position in call.keeps_leaves:
                arguments[position] = arguments[position].clone()
            result = module(*arguments, rows=rows) if wants_rows else module(*arguments)
            result = call.tree.flatten(self._names[call.module], result)
            if finder is not None:
                finder.makes(self._names[call.module], module, zip(call.makes, result, strict=True))
            held |= {at: tensor for at, tensor in zip(call.makes, result, strict=True) if at >= 0}
            # Without this, values would live until the end of the stage, and its peak memory would grow with its depth.
            for at in call.drops:
                del held[at]
        return tuple(
            held[at].movedim(self._row_dimensions[at], 0) if self._row_dimensions.get(at) else held[at]
            for at in self._given
        )

    def by_layer(self) -> dict[str, dict[str, Tensor]]:
        """Return parameters and persistent buffers of each layer that has any: `{layer id: {name: tensor}}`."""
        found = {
            layer: dict(module.state_dict(keep_vars=True))
            for layer, module in zip(self._names, self._modules_in_order, strict=True)
        }
        return {layer: tensors for layer, tensors in found.items() if tensors}

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """Return all parameters and buffers by `(layer id, name)`, also the buffers that a checkpoint leaves out."""
        return {
            (layer, name): tensor
            for layer, module in zip(self._names, self._modules_in_order, strict=True)
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
        }

    @property
    def joins(self) -> bool:
        """Whether the stage has layers that exchange sums with its other replicas, once they are joined."""
        return any(batch_norm.joinable(self))

    def join(self, group: Any) -> None:
        """Make batch normalizations count the rows of all ranks in `group`, the replicas of this stage.

        Forward and backward passes then communicate in the group. So nothing else may use it, and all its ranks must
        run the same passes. Without this call, each replica normalizes its own rows.
        """
        for one in batch_norm.joinable(self):
            one.group = group

    def queueing(self, micro_batch: int) -> AbstractContextManager[None]:
        """Make backward passes within this context defer weight gradients of linear layers and convolutions.

        Raises ArgumentError unless the module was created with `split_backward`.
        """
        return self._queued().filling(micro_batch)

    def run_weight_gradients(self, micro_batch: int) -> None:
        """Compute the gradients that `queueing(micro_batch)` deferred, and add them to the `grad` of parameters."""
        self._queued().run(micro_batch)

    def forget(self) -> None:
        """Drop the deferred gradients of a step that failed."""
        if self._queue is not None:
            self._queue.clear()

    def _queued(self) -> Queue:
        if self._queue is None:
            raise ArgumentError(
                "this stage can't split backward passes",
                "create it by `Workload.parts` with `split_backward=True`",
                code="wrong_state",
            )
        return self._queue

    def find_nan(self) -> None:
        """Check all values that layers make from now on. A NaN or infinite value raises RunError with the layer."""
        readers: dict[int, tuple[str, ...]] = {}
        for _, _, call in self._calls:
            for one in call.reads:
                for at in one[1] if isinstance(one, tuple) else (one,):
                    readers[at] = (*readers.get(at, ()), self._names[call.module])
        self.finder = Finder(readers)

    def layer(self, name: str) -> nn.Module:
        """Return the module of one layer. Raise ArgumentError if the stage has no layer of this name."""
        check_is("the layer", name, str, "give its id")
        if name not in self._names:
            raise ArgumentError(
                f"the stage has no layer `{shorten(name)}`", did_you_mean(name, self._names), code="unknown_name"
            )
        return self._modules_in_order[self._names.index(name)]


def check_stages(stages: Sequence[Sequence[str]], layers: Sequence[str]) -> None:
    """Raise ArgumentError unless `stages` hold each of `layers` once. The message names the first difference."""
    asked = [layer for stage in stages for layer in stage]
    known = set(layers)
    for at, layer in enumerate(asked):
        if layer not in known:
            here = layers[at] if at < len(layers) else None
            raise ArgumentError(
                f"the plan's layer {at + 1} is `{layer}`, but the workload has no such layer; "
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
