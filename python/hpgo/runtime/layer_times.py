"""Times and bytes of each layer of a workload, for batches of one size.

Layers run one after the other on the outputs of the previous ones, forward and then backward. As many as fit into
memory run in one sweep, so that caches are filled as in a run. A layer that equals one that was measured before is not
measured again.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from hpgo.runtime.layer_memory import activation_bytes, record_saved, saved_bytes
from hpgo.runtime.layer_runner import LacksMemoryError, LayerRunner
from hpgo.runtime.pass_times import (
    MIN_PASSES,
    Figures,
    MeasuredLayer,
    WholeModelTiming,
    median_error,
    scale_to_whole,
    split_ratios,
    timing_of_whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from hpgo.errors import RunError
    from hpgo.runtime.modules import NetworkLayer
    from hpgo.runtime.workload import Workload

_MAX_PASSES = 200
"""Maximum number of passes of a layer, besides one to warm up. Not tuned."""
_MIN_LATE_PASSES = 2
"""Minimum number of passes of a layer once the time limit has passed. Quartiles need two."""
_MAX_EXTRA_PASSES = 20
"""Maximum number of passes of the whole model, and of split backward passes, in a segment. Not tuned."""
SURE = 0.02
"""Default of `sure`: measuring ends when half of the uncertainty of the median time is below 2 % of it."""


class LayerProfiler:
    """Profiler of the layers of `workload`, for batches of `rows` samples."""

    def __init__(
        self,
        workload: Workload,
        rows: int,
        *,
        dtype: torch.dtype | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        inference: bool = False,
        device: torch.device,
        memory_bytes: float,
        seconds: float,
        sure: float = SURE,
        found: dict[str, Figures],
        tell: Callable[[int, str], None],
        measured: Callable[[], None],
        data: Any = None,
    ) -> None:
        """Prepare to measure. The time limit starts now.

        Args:
            workload: model, example and loss to measure.
            rows: number of samples in a batch.
            dtype: type of weights and inputs. None is the workload's own.
            autocast: returns the context in which layers compute.
            inference: whether layers run forward only, without the loss and in evaluation mode.
            device: where layers run.
            memory_bytes: memory that layers may fill at once.
            seconds: time limit.
            sure: uncertainty of the median of all layers' times, relative to it, at which measuring ends. Half of the
                confidence interval counts.
            found: figures by equivalence key of layers, from an earlier measurement. New ones are added.
            tell: called with the number of finished layers, and what runs.
            measured: called after `found` has new figures.
            data: data set whose batches passes take in turn. None is the workload's example.
        """
        self._until_s, self._sure = time.monotonic() + seconds, sure
        self._found, self._tell, self._measured = found, tell, measured
        self._runner = LayerRunner(
            workload,
            rows,
            dtype=dtype,
            autocast=autocast,
            inference=inference,
            device=device,
            memory_bytes=memory_bytes,
            data=data,
        )
        self._network = workload.network_in(dtype)
        # Check the loss before the first pass, because this takes time that no pass should include.
        self.reduction = None if inference else workload.reduction(workload.outputs(dtype), device)
        """How the loss combines samples; None for inference."""
        self.figures: dict[str, Figures] = {}
        """Figures of each layer, hidden ones included, once `run` has ended."""
        self.whole: WholeModelTiming | None = None
        """Timing of the whole model; None if its layers were too large to run at once."""
        self.lacked: str | None = None
        """Error message of the first pass that ran out of memory; None if none did."""

    def run(self) -> None:
        """Measure all layers. Raise RunError if one can't run."""
        for _ in self.sweeps():
            pass

    def sweeps(self) -> Iterator[None]:
        """Measure all layers like `run`, but yield after each sweep, so that other code can run between sweeps."""
        keys: dict[str, str] = {}
        segment: list[MeasuredLayer] = []
        held_bytes, was_found = 0.0, set(self._found)
        for done, node in enumerate(self._network.nodes.values()):
            key = keys[node.id] = self._runner.equivalence_key(node)
            if key in was_found:
                self._runner.skip(node)
                continue
            weights_bytes = self._runner.weights_bytes(self._network.make_on_meta(node.id))
            # Weights are known before the layer exists. What it keeps besides is only known, and added, after its first
            # run.
            fits = not segment or held_bytes + weights_bytes <= self._runner.memory_bytes
            saved_activation_bytes = self._add(segment, node, key, done) if fits else None
            if saved_activation_bytes is None:
                yield from self._measure(segment, done)
                # The segment may have measured an equal layer. Equal layers within a segment all run, as in the model.
                held_bytes, was_found = 0.0, set(self._found)
                if key in was_found:
                    self._runner.skip(node)
                    continue
                saved_activation_bytes = self._add(segment, node, key, done)
            held_bytes += weights_bytes + (saved_activation_bytes or 0)
        if segment:
            yield from self._measure(segment, len(keys))
        self.figures = {layer: self._found[key] for layer, key in keys.items()}

    def activation_bytes(self) -> dict[str, int]:
        """Return the bytes of each layer's outputs that other layers read, or that the model returns."""
        return activation_bytes(self._network, self.figures, self._runner.names)

    def saved_bytes(self) -> dict[str, int]:
        """Return the bytes that each layer makes and that its own backward pass, or that of a reader, needs.

        Inputs of the model belong to the first layer that keeps them.
        """
        return saved_bytes(self._network, self.figures, self._runner.names, self._runner.input_bytes())

    def _add(self, segment: list[MeasuredLayer], node: NetworkLayer, key: str, done: int) -> int | None:
        """Create a layer and run it once. Return the bytes that it keeps, or None if the segment leaves no memory."""
        self._tell(done, node.id)
        try:
            one = self._runner.create(node, key)
            saved_activation_bytes = record_saved(one, partial(self._runner.run_alone, one))
        except LacksMemoryError as error:
            if not segment:
                raise
            self._lack(error)
            return None
        segment.append(one)
        return saved_activation_bytes

    def _measure(self, segment: list[MeasuredLayer], done: int) -> Iterator[None]:
        """Measure the layers of a segment together, or one by one if memory does not suffice for that."""
        try:
            yield from self._repeat(segment, done)
        except LacksMemoryError as error:
            if len(segment) == 1:
                raise
            self._lack(error)
        # `_repeat` empties the segment, so layers are left here only after an error.
        nodes = [(one.node, one.key) for one in segment]
        self._runner.let_go(segment)
        for node, key in nodes:
            if key in self._found:
                self._runner.skip(node)
            else:
                self._add(segment, node, key, done)
                yield from self._repeat(segment, done)

    def _lack(self, error: RunError) -> None:
        """Measure layers one by one from now on, because memory ran out."""
        self.lacked = self.lacked or error.message
        # No sum of bytes fits into -1, so each further segment has a single layer.
        self._runner.memory_bytes = -1.0

    def _repeat(self, segment: list[MeasuredLayer], done: int) -> Iterator[None]:
        """Run the layers of a segment until their times are sure, store their figures, and drop the layers."""
        runner, is_inference = self._runner, self._runner.is_inference
        ends = segment[-1].node.id == runner.last_layer
        is_all = len(segment) == len(self._network.nodes)
        # Other segments read what the one before returned for its last batch.
        batches = runner.batches if is_all else 1
        for one in segment:
            one.batches = batches
        wholes_ns: list[int] = []
        whole_bytes: tuple[tuple[int, int], int] | tuple[None, None] = None, None
        while True:
            # The first pass warms up and does not count, so it takes the last batch, and batch 0 begins behind it.
            if is_all:
                runner.take_batch(len(segment[0].spans_ns) - 1)
            stamps = runner.forward(segment)
            for one, begin_ns, end_ns in zip(segment, *runner.in_ns(stamps, each=2), strict=True):
                one.spans_ns.append((end_ns - begin_ns, 0))
            if not is_inference:
                runner.backward(segment, ends=ends)
            count = len(segment[0].spans_ns) - 1
            # Whole and split passes alternate with the others, so that a change of the machine's speed affects all.
            if count < _MAX_EXTRA_PASSES:
                if is_all:
                    if count == 0 and not is_inference:
                        whole_bytes = runner.whole_bytes(segment)
                    wholes_ns.append(runner.run_whole(segment))
                if not is_inference:
                    runner.forward(segment, mode="split")
                    runner.backward(segment, ends=ends, is_split=True)
            self._tell(done, f"{segment[-1].node.id}, {count} times" if count > 0 else segment[-1].node.id)
            is_late = time.monotonic() > self._until_s
            # A mean over some of the batches would depend on their order.
            if count >= (max(_MIN_LATE_PASSES, batches) if is_late else MIN_PASSES * batches) and (
                is_late or count >= _MAX_PASSES or median_error(segment) < self._sure
            ):
                break
            yield
        scale = 1.0
        if is_all:
            scale = scale_to_whole(segment, wholes_ns)
            self.whole = timing_of_whole(segment, wholes_ns, scale, *whole_bytes)
        for key in dict.fromkeys(one.key for one in segment):
            self._found[key] = _figures([one for one in segment if one.key == key], scale)
        self._measured()
        runner.let_go(segment)


def _figures(equal: Sequence[MeasuredLayer], scale: float) -> Figures:
    """Return the mean figures of equal layers, with times multiplied by `scale`."""
    one = equal[0]
    forward_s = scale * fmean(each.forward_ns for each in equal) / 1e9
    backward_s = scale * fmean(each.backward_ns for each in equal) / 1e9
    ratio, inputs = split_ratios(equal)
    # Split passes were measured less often than whole ones. So take only their ratio to whole ones from them.
    return Figures(
        forward_s=forward_s,
        backward_s=backward_s,
        input_gradient_s=ratio * inputs * backward_s if one.halves_ns else None,
        weight_gradient_s=ratio * (1 - inputs) * backward_s if one.halves_ns else None,
        spread=median(each.spread for each in equal),
        parameter_bytes=sum(tensor.nbytes for tensor in one.module.parameters()),
        frozen_bytes=sum(tensor.nbytes for tensor in one.module.parameters() if not tensor.requires_grad),
        saved_bytes=one.saved_bytes,
        reads=one.reads,
        returns=one.returns,
    )
