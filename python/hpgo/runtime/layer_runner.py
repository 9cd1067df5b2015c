"""Timed passes of single layers, and of all layers as one graph, on a batch of example data."""

from __future__ import annotations

import copy
import hashlib
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError, HpgoError, RunError
from hpgo.runtime import split_backward
from hpgo.runtime.clocks import Stamps
from hpgo.runtime.cuts import ready
from hpgo.runtime.layer_memory import address_of
from hpgo.runtime.loader import Samples, length_of, repeated
from hpgo.runtime.memory import MemoryGrowth, lacks_memory
from hpgo.runtime.module_equality import described
from hpgo.runtime.pass_times import MeasuredLayer
from hpgo.runtime.passes import running
from hpgo.runtime.rendezvous import first_line
from hpgo.runtime.shape_passes import fill_module, fill_plausibly, run_for_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from hpgo.runtime.modules import NetworkLayer
    from hpgo.runtime.workload import Workload

_TRY = {
    "the loss": "make it a function of what the model returns, a tensor or a tuple of tensors, and of the targets",
    "the model as a whole": "call `.backward()` on the loss of the example without hpgo: it must run there, too",
}
"""Hints for failures of user code, by the part that failed."""
_TRY_LAYER = "call the model without hpgo on inputs of {rows} rows: all of it must run there, too"
MAX_BATCHES = 8
"""Maximum number of batches that passes take in turn. Not tuned. Twice this number needs twice the passes."""
_COPIES = 3
"""Copies of each trained weight: the weight, its gradient, and what a backward pass adds to the gradient."""


class LacksMemoryError(RunError):
    """Memory ran out in a pass."""


class LayerRunner:
    """Runner of the layers of `workload` on one batch. It holds the values that layers read and return."""

    def __init__(
        self,
        workload: Workload,
        rows: int,
        *,
        dtype: torch.dtype | None,
        autocast: Callable[[], AbstractContextManager[Any]],
        inference: bool,
        device: torch.device,
        memory_bytes: float,
        data: Any = None,
    ) -> None:
        """Prepare batches of `rows` samples. For `inference`, layers run forward only and in evaluation mode.

        Batches are of `data`, a data set, or else of the workload's example. Of the example, only models whose
        operations depend on values have several.
        """
        self._workload, self._rows, self._dtype, self._device = workload, rows, dtype, device
        self._autocast, self.is_inference = autocast, inference
        self.memory_bytes = memory_bytes
        """Memory that layers may fill at once."""
        self.network, self._recordings = workload.network_in(dtype), workload.look(dtype)
        self._has_gradient = {
            value.name for recording in self._recordings.values() for value in recording.values if value.has_gradient
        }
        self.last_layer = next(reversed(self.network.nodes))
        self._output_names = [name for output in self.network.outputs for name in self.names(output)]
        self._stamps = Stamps(device)
        self._batches = [
            ([self._cast(one).to(device) for one in inputs], tuple(one.to(device) for one in targets))
            for inputs, targets in self._read(data)
        ]
        inputs, self._targets = self._batches[0]
        self._held: dict[str, Tensor] = {f"input:{at}": tensor for at, tensor in enumerate(inputs)}
        self._last_reader = {
            name: node.id for node in self.network.nodes.values() for feed in node.feeds for name in self.names(feed)
        } | dict.fromkeys((*self._held, *self._output_names), "")
        """Last layer that reads each value; empty for the model's inputs and outputs, which are never dropped."""

    def _read(self, data: Any) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Return inputs and targets of the batches."""
        work, rows = self._workload, self._rows
        if data is None:
            varies = any(recording.needs_values for recording in self._recordings.values())
            count = len(work.example_inputs[0]) // rows if varies else 1
            samples = [range(at * rows, (at + 1) * rows) for at in range(min(MAX_BATCHES, max(1, count)))]
            return [
                (repeated(work.example_inputs, (of,)).tensors, repeated(work.example_targets, (of,)).tensors)
                for of in samples
            ]
        count = length_of(data) // rows
        if not count:
            raise ArgumentError(
                f"the data set has {pluralize(length_of(data), 'sample')}, but a batch takes {rows}",
                "give more data, or measure smaller batches",
            )
        begins = range(0, min(MAX_BATCHES, count) * rows, rows)
        read = Samples(data)
        return [work.collated([read[at] for at in range(begin, begin + rows)]) for begin in begins]

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self._batches)

    def take_batch(self, number: int) -> None:
        """Let the next passes read this batch, counted from 0 again after the last one."""
        inputs, self._targets = self._batches[number % self.batches]
        self._held |= {f"input:{at}": tensor for at, tensor in enumerate(inputs)}

    # Layers and values

    def names(self, feed: str) -> tuple[str, ...]:
        """Return the names of the values that a layer returns, or of the single value that `feed` is."""
        recording = self._recordings.get(feed)
        return (feed,) if recording is None else tuple(value.name for value in recording.values)

    def weights_bytes(self, module: nn.Module) -> int:
        """Return the bytes that a layer's weights take while it is measured, in their final type."""
        return sum(
            (_COPIES if one.requires_grad and not self.is_inference else 1)
            * one.numel()
            * (self._dtype or one.dtype if one.is_floating_point() else one.dtype).itemsize
            for one in module.parameters()
        )

    def equivalence_key(self, node: NetworkLayer) -> str:
        """Return a key that is equal for layers that compute the same on tensors of the same shapes."""
        shapes = [
            (tuple(self._held[name].shape), str(self._held[name].dtype))
            for feed in node.feeds
            for name in self.names(feed)
        ]
        # The last layer is never equal to another one, because its time includes the loss.
        described_layer = described(self.network.make_on_meta(node.id))
        text = repr((shapes, node.id == self.last_layer, node.everywhere, *described_layer))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def create(self, node: NetworkLayer, key: str) -> MeasuredLayer:
        """Return a layer with weights: its initial ones, or plausible ones for a model on the meta device."""
        with self._naming(f"layer `{node.id}`"):
            if self._workload.is_on_meta:
                module = fill_module(self.network.make_on_meta(node.id).to_empty(device=self._device))
            else:
                module = self.network.make(node.id, seed=0).to(self._device)
            module, queue = self._ready(node, module), split_backward.Queue()
            return MeasuredLayer(node, module, _split_copy(module, queue), queue, key)

    def skip(self, node: NetworkLayer) -> None:
        """Hold plausible tensors with the shapes that a layer would return, without running it."""
        module = self._ready(node, self.network.make_on_meta(node.id))
        with torch.no_grad(), self._running():
            values = {name: self._held[name].to("meta") for feed in node.feeds for name in self.names(feed)}
            with self._naming(f"layer `{node.id}`"), self._autocast():
                output = run_for_shapes(module, self._arguments(node, values), self._output).output
        tensors = self._recordings[node.id].tree.flatten(node.id, output)
        for name, tensor in zip(self.names(node.id), tensors, strict=True):
            self._held[name] = fill_plausibly(torch.empty_like(tensor, device=self._device))

    def let_go(self, segment: list[MeasuredLayer]) -> None:
        """Drop the layers of a segment with their weights. The values that they have returned stay."""
        segment.clear()
        # Values are nodes of autograd's graph, which references the weights.
        self._held = {name: tensor.detach() for name, tensor in self._held.items()}

    def input_bytes(self) -> dict[str, int]:
        """Return the bytes of each input of the model, by name."""
        return {name: storage.nbytes() for name, storage in self._input_storages()}

    # Passes

    def run_alone(self, one: MeasuredLayer) -> None:
        """Run a layer forward on leaves, without taking the time."""
        with self._running():
            self._keep(one, self._call(one.node, one.module, self._inputs_of(one, is_whole=False)))

    def forward(self, segment: Sequence[MeasuredLayer], *, mode: str = "alone") -> list[Any]:
        """Run layers forward: each on separate leaves (`alone`; `split` for split passes), or as one graph (`whole`).

        Returns stamps before and after the pass of each.
        """
        stamps: list[Any] = []
        with self._running():
            for one in segment:
                arguments = self._inputs_of(one, is_whole=mode == "whole")
                stamps.append(self._stamps.take())
                output = self._call(one.node, one.split if mode == "split" else one.module, arguments)
                stamps.append(self._stamps.take())
                self._keep(one, output)
                if mode == "whole":
                    self._drop(one)
        return stamps

    def in_ns(self, stamps: Sequence[Any], *, each: int) -> list[list[int]]:
        """Return the stamps in nanoseconds as `each` lists: the first stamp of every layer, the second, and so on.

        Call this once all layers were given to the device. A GPU that waited for the CPU before each layer would be
        timed with these waits, which runs don't have.
        """
        stamps_ns = self._stamps.in_ns(stamps)
        return [stamps_ns[at::each] for at in range(each)]

    def backward(self, segment: Sequence[MeasuredLayer], *, ends: bool, is_split: bool = False) -> None:
        """Run layers backward and record the times. The last one starts from the loss if `ends`, as it ends the model.

        `is_split` defers weight gradients, and times them separately.
        """
        gradients: dict[str, Tensor] = {}
        stamps = self._loss(gradients) if ends else [self._stamps.take()] * 3
        for one in reversed(segment):
            names = self.names(one.node.id)
            roots = [(name, output) for name, output in zip(names, one.outputs, strict=True) if output.requires_grad]
            received = [gradients.pop(name, None) for name, _ in roots]
            # A value that no layer of the segment reads gets a small gradient, so that the pass does its full work.
            received = [
                torch.full_like(output, 1e-3) if gradient is None else gradient.to(output.dtype)
                for (_, output), gradient in zip(roots, received, strict=True)
            ]
            if self.weights_bytes(one.module) > self.memory_bytes:
                one.module.zero_grad(set_to_none=True)  # there is no memory to accumulate into
            with self._naming(f"the backward pass of layer `{one.node.id}`"):
                stamps += self._backward_of(one, [output for _, output in roots], received, is_split=is_split)
            read = dict.fromkeys(name for feed in one.node.feeds for name in self.names(feed))
            for name, leaf in zip(read, one.inputs, strict=True):
                if leaf.grad is not None:
                    gradients[name] = leaf.grad if name not in gradients else gradients[name] + leaf.grad
        loss_ns, *passes_ns = (
            (middle_ns - begin_ns, end_ns - middle_ns)
            for begin_ns, middle_ns, end_ns in zip(*self.in_ns(stamps, each=3), strict=True)
        )
        # The loss counts as part of the layer that ends the model, as in a run.
        for one, (first_ns, second_ns) in zip(reversed(segment), passes_ns, strict=True):
            forward_ns, backward_ns = loss_ns if one is segment[-1] else (0, 0)
            if is_split:
                one.halves_ns.append((backward_ns + first_ns, second_ns))
            else:
                if ends and one is segment[-1]:
                    one.loss_ns.append(forward_ns)
                one.spans_ns[-1] = one.spans_ns[-1][0] + forward_ns, backward_ns + first_ns

    def run_whole(self, segment: Sequence[MeasuredLayer]) -> int:
        """Run the layers as one graph, forward and backward. Return the time of both in nanoseconds."""
        stamps = [self._stamps.take(), *self.forward(segment, mode="whole")]
        if not self.is_inference:
            self._whole_backward()
        begin_ns, *spans_ns, end_ns = self._stamps.in_ns([*stamps, self._stamps.take()])
        for one, from_ns, to_ns in zip(segment, spans_ns[::2], spans_ns[1::2], strict=True):
            one.in_whole_ns.append(to_ns - from_ns)
        return end_ns - begin_ns

    def whole_bytes(self, segment: Sequence[MeasuredLayer]) -> tuple[tuple[int, int], int]:
        """Run the layers as one graph, slowly. Return `saved_activation_bytes` and `peak_bytes` of the model."""
        for one in segment:
            one.outputs, one.inputs = [], []
        self._held = {name: tensor for name, tensor in self._held.items() if name.startswith("input:")}
        inputs_bytes = sum(storage.nbytes() for _, storage in self._input_storages())
        modules = [one.module for one in segment]
        weights = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
        gradients = [tensor.grad for tensor in weights if tensor.grad is not None]
        held = [*weights, *gradients, *self._held.values(), *self._targets]
        with MemoryGrowth(self._device, held) as growth:
            self.forward(segment, mode="whole")
            grown_bytes = growth.bytes
            self._whole_backward()
        # Outputs may share memory, which counts once.
        outputs = {address_of(self._held[name]): self._held[name] for name in self._output_names}
        outputs_bytes = sum(tensor.untyped_storage().nbytes() for tensor in outputs.values())
        return (grown_bytes - outputs_bytes, inputs_bytes + grown_bytes), inputs_bytes + growth.peak_bytes

    def _input_storages(self) -> list[tuple[str, torch.UntypedStorage]]:
        held = self._held.items()
        return [(name, tensor.untyped_storage()) for name, tensor in held if name.startswith("input:")]

    def _drop(self, one: MeasuredLayer) -> None:
        """Drop the values that no layer behind this one reads, as runs do."""
        one.outputs, one.inputs = [], []
        for feed in (one.node.id, *one.node.feeds):
            for name in self.names(feed):
                if self._last_reader.get(name, one.node.id) == one.node.id:
                    self._held.pop(name, None)

    def _inputs_of(self, one: MeasuredLayer, *, is_whole: bool) -> list[Any]:
        """Return the arguments of a layer: the held values if `is_whole`, else leaves with separate gradients."""
        values = {name: self._held[name] for feed in one.node.feeds for name in self.names(feed)}
        if not is_whole:
            values = {
                name: value.detach().requires_grad_(
                    name in self._has_gradient and value.is_floating_point() and not self.is_inference
                )
                for name, value in values.items()
            }
        one.inputs = list(values.values())
        return self._arguments(one.node, values)

    def _arguments(self, node: NetworkLayer, values: dict[str, Tensor]) -> list[Any]:
        """Return the arguments of a layer from the values that it reads, by name."""
        arguments = []
        for at, feed in enumerate(node.feeds):
            # Copy what the layer changes in place: the same values are read again in the next pass.
            tensors = tuple(
                values[name].clone() if at in self._recordings[node.id].mutates else values[name]
                for name in self.names(feed)
            )
            arguments.append(self._recordings[feed].tree.build(tensors) if feed in self._recordings else tensors[0])
        return arguments

    def _backward_of(
        self, one: MeasuredLayer, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, is_split: bool
    ) -> tuple[Any, Any, Any]:
        """Run a layer backward. Return stamps before the pass, after it, and after the deferred weight gradients."""
        begin = self._stamps.take()
        if not roots:
            return begin, begin, begin
        with one.queue.filling(0) if is_split else nullcontext():
            torch.autograd.backward(roots, gradients)
        middle = self._stamps.take()
        if is_split:
            one.queue.run(0)
        return begin, middle, self._stamps.take()

    def _loss(self, gradients: dict[str, Tensor]) -> list[Any]:
        """Run the loss and put its gradients into `gradients`. Return stamps before, between and after its passes."""
        names = self._output_names
        outputs = [self._held[name].detach().requires_grad_(self._held[name].is_floating_point()) for name in names]
        with self._naming("the loss"), self._running():
            begin = self._stamps.take()
            loss = self._workload.loss_of(tuple(outputs), self._targets) / self._rows
            middle = self._stamps.take()
            loss.backward()
            end = self._stamps.take()
        gradients |= {name: one.grad for name, one in zip(names, outputs, strict=True) if one.grad is not None}
        return [begin, middle, end]

    def _whole_backward(self) -> None:
        with self._naming("the model as a whole"), self._running():
            outputs = tuple(self._held[name] for name in self._output_names)
            loss = self._workload.loss_of(outputs, self._targets) / self._rows
            loss.backward()

    def _call(self, node: NetworkLayer, module: nn.Module, arguments: list[Any]) -> Any:
        with self._naming(f"layer `{node.id}`"), self._autocast():
            return self._output(module, arguments)

    def _output(self, module: nn.Module, arguments: list[Any]) -> Any:
        if getattr(module, "wants_rows", False):
            return module(*arguments, rows=self._rows)
        return module(*arguments)

    def _keep(self, one: MeasuredLayer, output: Any) -> None:
        one.outputs = list(self._recordings[one.node.id].tree.flatten(one.node.id, output))
        self._held |= dict(zip(self.names(one.node.id), one.outputs, strict=True))

    def _ready(self, node: NetworkLayer, module: nn.Module) -> nn.Module:
        recording = self._recordings[node.id]
        return ready(node.id, module, recording, dtype=self._dtype, seed=0).train(not self.is_inference)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Convert errors of user code and torch within this context to a RunError that names `what`."""
        try:
            yield
        except HpgoError:
            raise
        except Exception as failure:
            message = f"{what} can't run on a batch of {self._rows}: {type(failure).__name__}: {first_line(failure)}"
            if lacks_memory(failure):
                raise LacksMemoryError(message, "try a smaller `--batch-size`, or `--dtype bfloat16`") from failure
            raise RunError(message, _TRY.get(what, _TRY_LAYER.format(rows=self._rows))) from failure

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Set the pass of the batch within this context, and turn autograd off for inference."""
        context = torch.inference_mode() if self.is_inference else nullcontext()
        with running(step=0, samples=range(self._rows)), context:
            yield


def _split_copy(module: nn.Module, queue: split_backward.Queue) -> nn.Module:
    """Return a copy of `module` with the same weights, whose backward pass leaves their gradients to `queue`."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    split = copy.deepcopy(module, shared)
    split_backward.install(split, queue)
    return split
