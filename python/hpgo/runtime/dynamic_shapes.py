"""Batches whose samples have other shapes than the workload's example, such as texts of another length.

The shapes of all values between layers follow from the shapes of the inputs. Ranks agree on these before a step,
because a rank without inputs can't see them. Each rank then runs all layers on the meta device once per new shape, and
makes an engine whose messages have the new sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.errors import ArgumentError
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpgo.runtime.loader import Share
    from hpgo.runtime.messages import PassedTensor
    from hpgo.runtime.stage_module import StageModule, Value
    from hpgo.runtime.workload import Workload

    Shapes = tuple[tuple[int, ...], ...]
    """Shape of one sample of each input."""

_MAX_ENGINES = 128
"""Maximum number of shapes whose engines are kept. A further one replaces the least recently used. Not tuned."""
_UNKNOWN = -(2**62)


@dataclass(frozen=True, slots=True)
class ShapedEngine:
    """Engine of a rank for batches of one shape."""

    engine: Any
    takes: Mapping[int, tuple[Value, ...]]
    """Values that each stage of this rank takes."""
    outputs: Sequence[Value]
    """Values that the model returns."""


class ShapedEngines:
    """Engines of one rank, for each shape of its batches."""

    def __init__(
        self,
        workload: Workload,
        dtype: torch.dtype | None,
        *,
        parts: Mapping[int, StageModule],
        cuts: Sequence[Sequence[PassedTensor]],
        make: Callable[[Sequence[Sequence[PassedTensor]]], Any],
        device: torch.device,
    ) -> None:
        """Make the engine for the shapes of the workload's example.

        `make` creates an engine for the tensors of each cut. `cuts` are those for the example.
        """
        self._workload, self._dtype, self._parts, self._cuts = workload, dtype, parts, cuts
        self._make, self._device = make, device
        example = tuple(tuple(one.shape[1:]) for one in workload.example_inputs)
        takes = {stage: part.takes for stage, part in parts.items()}
        self.first = ShapedEngine(make(cuts), takes, workload.outputs(dtype))
        """Engine for the shapes of the example."""
        self._known: OrderedDict[Shapes, ShapedEngine] = OrderedDict({example: self.first})

    def fit(self, inputs: Share) -> ShapedEngine:
        """Return the engine for a batch, and let the stages of this rank take its shapes. All ranks call this.

        Raises ArgumentError if ranks have inputs of different shapes, or if a layer returns other kinds of values for
        these shapes than for the example.
        """
        if not self._workload.dynamic_shapes:
            return self.first
        shapes = self._agreed(inputs)
        # All ranks see the same shapes in the same order, so they keep and replace the same engines.
        if shapes not in self._known:
            self._known[shapes] = self._made(shapes)
            if len(self._known) > _MAX_ENGINES:
                self._known.popitem(last=False)
        self._known.move_to_end(shapes)
        found = self._known[shapes]
        # Training and evaluation share the stages, so set the shapes for each batch.
        for stage, part in self._parts.items():
            part.takes = found.takes[stage]
        return found

    def _agreed(self, inputs: Share) -> Shapes:
        """Return the shape of a sample of each input, equal on all ranks, also on those that read no inputs."""
        counts = [one.dim() - 1 for one in self._workload.example_inputs]
        sizes = torch.full((2, sum(counts)), _UNKNOWN, dtype=torch.int64)
        if inputs.tensors:
            for at, (tensor, count) in enumerate(zip(inputs.tensors, counts, strict=True)):
                if tensor.dim() - 1 != count:
                    raise ArgumentError(
                        f"`input:{at}` has the shape {tuple(tensor.shape)}, but the example's has {count + 1}"
                        " dimensions",
                        "give inputs with the dimensions of the workload's example; only their sizes may change",
                    )
            own = [size for tensor in inputs.tensors for size in tensor.shape[1:]]
            # The maximum of sizes and of their negatives shows in one reduction whether all ranks have the same.
            sizes[0], sizes[1] = torch.tensor(own), -torch.tensor(own)
        sizes = sizes.to(self._device)
        with HERE.meets("the shapes of the batch"):
            dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        largest, smallest = sizes[0].tolist(), (-sizes[1]).tolist()
        found, begin = [], 0
        for count in counts:
            found.append(tuple(largest[begin : begin + count]))
            begin += count
        if largest != smallest:
            raise ArgumentError(
                f"ranks have inputs of different shapes in one batch: sizes up to {largest} and from {smallest}",
                "pad all samples of a global batch to one shape",
            )
        return tuple(found)

    def _made(self, shapes: Shapes) -> ShapedEngine:
        recordings = self._workload.look_at(self._dtype, shapes)
        values = {value.name: value for one in recordings.values() for value in one.values}
        takes = {
            stage: tuple(
                replace(one, shape=shapes[int(one.name.removeprefix("input:"))]) if one.is_input else values[one.name]
                for one in part.takes
            )
            for stage, part in self._parts.items()
        }
        cuts = [tuple(replace(one, value=values[one.value.name]) for one in cut) for cut in self._cuts]
        return ShapedEngine(self._make(cuts), takes, [values[one.name] for one in self.first.outputs])
