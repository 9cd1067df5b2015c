"""Times and bytes of each layer of a workload, for batches of one size.

Layers run one after the other on what the one before has made, forward and then backward, as many as fit into memory at
once: caches hold then what they hold in a run. A layer that equals one that was measured before is not measured again.
"""

from __future__ import annotations

import copy
import hashlib
import time
from contextlib import contextmanager, nullcontext
from itertools import chain
from math import sqrt
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpgo.errors import HpgoError, RunError
from hpgo.runtime import split_backward
from hpgo.runtime.clocks import Stamps
from hpgo.runtime.cuts import ready
from hpgo.runtime.layer_memory import activation_bytes, saved_bytes
from hpgo.runtime.loader import repeated
from hpgo.runtime.memory import MemoryGrowth, lacks_memory
from hpgo.runtime.module_equality import described
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
from hpgo.runtime.passes import running
from hpgo.runtime.rendezvous import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from hpgo.runtime.modules import NetworkLayer
    from hpgo.runtime.workload import Workload


_TRY = {
    "the loss": "make it a function of what the model returns, a tensor or a tuple of them, and of the targets",
    "the model as a whole": "call `.backward()` on the loss of the example without hpgo: it must run there, too",
}
_TRY_LAYER = "call the model without hpgo on inputs of {rows} rows: all of it must run there, too"
"""What to try where something of the user's fails, by what it is."""
_MOST = 200
"""How often a layer runs at most, besides once to warm up."""
_FEWEST = 2
"""How often it runs at least where the time is up."""
_BESIDES = 20
"""How often, at most, the model runs as a whole, and layers with split backward passes, between runs of the layers."""
_COPIES = 3
"""Of weights in training: they, their gradients, and what a backward pass adds to these."""
SURE = 0.02
"""Of the time that all layers take: half of what its median may be off by where it is known well enough."""


class _LacksMemoryError(RunError):
    """There is not enough for what is being measured."""


class LayerProfiler:
    """Measures layers of `workload` for batches of `rows` samples; `found` may hold what was measured before."""

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
    ) -> None:
        """`memory_bytes` and `seconds` are what may be used; `tell` hears how many layers are done, and what runs.

        Layers run until half of what the median of all their times may be off by is less than `sure` of it.
        For `inference`, layers run forward alone, without the loss, and as models that are not training do.
        `found` has figures by likeness of layers; it gets those that are measured, and `measured` is called then.
        """
        self._workload, self._rows, self._dtype, self._device = workload, rows, dtype, device
        self._autocast, self._memory_bytes, self._until_s = autocast, memory_bytes, time.monotonic() + seconds
        self._sure = sure
        self._found, self._tell, self._measured = found, tell, measured
        self._is_inference, self._copies = inference, 1 if inference else _COPIES
        self._network, self._looks = workload.network, workload.look(dtype)
        self._has_gradient = {
            value.name for made in self._looks.values() for value in made.values if value.has_gradient
        }
        self._last = next(reversed(self._network.nodes))
        self._output_names = [name for output in self._network.outputs for name in self._names(output)]
        self._stamps = Stamps(device)
        self._held: dict[str, Tensor] = {
            f"input:{at}": self._cast(tensor).to(device)
            for at, tensor in enumerate(repeated(workload.example_inputs, (range(rows),)).tensors)
        }
        self._last_reader = {
            name: node.id for node in self._network.nodes.values() for feed in node.feeds for name in self._names(feed)
        } | dict.fromkeys((*self._held, *self._output_names), "")
        """Of each value; none of what the model is given or returns."""
        self._targets = tuple(one.to(device) for one in repeated(workload.example_targets, (range(rows),)).tensors)
        # Now, so that no pass is measured with it.
        self.reduction = None if inference else workload.reduction(workload.outputs(dtype), device)
        """How the loss adds up samples."""
        self.figures: dict[str, Figures] = {}
        """Of each layer, the hidden ones too, once `run` has ended."""
        self.whole: WholeModelTiming | None = None
        """Unless the layers were too large to run at once."""
        self.lacked: str | None = None
        """What said first that there is no memory for as many layers at once as there should be."""

    def run(self) -> None:
        """Measures all layers. Raises RunError where one can't run."""
        for _ in self.sweeps():
            pass

    def sweeps(self) -> Iterator[None]:
        """The same, for what is to run in turns with it: comes back after each sweep of passes."""
        likeness: dict[str, str] = {}
        segment: list[MeasuredLayer] = []
        held_bytes, was_found = 0.0, set(self._found)
        for done, node in enumerate(self._network.nodes.values()):
            alike = likeness[node.id] = self._likeness(node)
            if alike in was_found:
                self._skip(node)
                continue
            weights_bytes = self._weights_bytes(self._network.make_on_meta(node.id))
            has_room = not segment or held_bytes + weights_bytes <= self._memory_bytes
            saved_activation_bytes = self._add(segment, node, alike, done) if has_room else None
            if saved_activation_bytes is None:
                yield from self._measure(segment, done)
                held_bytes, was_found = 0.0, set(self._found)
                if alike in was_found:
                    self._skip(node)
                    continue
                saved_activation_bytes = self._add(segment, node, alike, done)
            held_bytes += weights_bytes + (saved_activation_bytes or 0)
        if segment:
            yield from self._measure(segment, len(likeness))
        self.figures = {layer: self._found[alike] for layer, alike in likeness.items()}

    def _weights_bytes(self, module: nn.Module) -> int:
        """What a layer's weights take while it is measured, in the type that they will have."""
        return self._copies * sum(
            one.numel() * (self._dtype or one.dtype if one.is_floating_point() else one.dtype).itemsize
            for one in module.parameters()
        )

    def _add(self, segment: list[MeasuredLayer], node: NetworkLayer, alike: str, done: int) -> int | None:
        """Makes a layer and runs it once; returns the bytes that it keeps, or None if others leave it no memory."""
        self._tell(done, node.id)
        try:
            with self._naming(f"layer `{node.id}`"):
                module, queue = self._module(node), split_backward.Queue()
                one = MeasuredLayer(node, module, _split(module, queue), queue, alike)
            saved_activation_bytes = self._look_at(one)
        except _LacksMemoryError as error:
            if not segment:
                raise
            self._lack(error)
            return None
        segment.append(one)
        return saved_activation_bytes

    def _measure(self, segment: list[MeasuredLayer], done: int) -> Iterator[None]:
        """Measures the layers of a segment together, or one by one where there is no memory for that."""
        try:
            yield from self._repeat(segment, done)
        except _LacksMemoryError as error:
            if len(segment) == 1:
                raise
            self._lack(error)
        nodes = [(one.node, one.likeness) for one in segment]  # none, if all went well
        self._let_go(segment)
        for node, alike in nodes:
            if alike in self._found:
                self._skip(node)
            else:
                self._add(segment, node, alike, done)
                yield from self._repeat(segment, done)

    def _lack(self, error: RunError) -> None:
        """From now on layers run one by one."""
        self.lacked = self.lacked or error.message
        self._memory_bytes = -1.0

    def _let_go(self, segment: list[MeasuredLayer]) -> None:
        segment.clear()
        self._held = {name: tensor.detach() for name, tensor in self._held.items()}  # graphs hold weights

    def _repeat(self, segment: list[MeasuredLayer], done: int) -> Iterator[None]:
        """Runs the layers of a segment until their times are sure, and lets them go."""
        ends, is_all = segment[-1].node.id == self._last, len(segment) == len(self._network.nodes)
        wholes_ns: list[int] = []
        held: tuple[tuple[int, int], int] | tuple[None, None] = None, None
        while True:
            taken = self._forward(segment)
            for one, begin_ns, end_ns in zip(segment, *self._in_ns(taken, each=2), strict=True):
                one.spans_ns.append((end_ns - begin_ns, 0))
            if not self._is_inference:
                self._backward(segment, ends=ends)
            count = len(segment[0].spans_ns) - 1
            if count < _BESIDES:
                if is_all:
                    if count == 0 and not self._is_inference:
                        held = self._hold(segment)
                    wholes_ns.append(self._run_whole(segment))
                if not self._is_inference:
                    self._forward(segment, way="split")
                    self._backward(segment, ends=ends, is_split=True)
            self._tell(done, f"{segment[-1].node.id}, {count} times" if count > 0 else segment[-1].node.id)
            is_late = time.monotonic() > self._until_s
            if count >= (_FEWEST if is_late else MIN_PASSES) and (
                is_late or count >= _MOST or median_error(segment) < self._sure
            ):
                break
            yield
        scale = 1.0
        if is_all:
            scale = scale_to_whole(segment, wholes_ns)
            self.whole = timing_of_whole(segment, wholes_ns, scale, *held)
        for alike in dict.fromkeys(one.likeness for one in segment):
            self._found[alike] = self._figures([one for one in segment if one.likeness == alike], scale)
        self._measured()
        self._let_go(segment)

    def _figures(self, alike: Sequence[MeasuredLayer], scale: float) -> Figures:
        """Of layers that are alike, on average, times `scale`."""
        one = alike[0]
        forward_s = scale * fmean(each.forward_ns for each in alike) / 1e9
        backward_s = scale * fmean(each.backward_ns for each in alike) / 1e9
        ratio, inputs = split_ratios(alike)
        return Figures(
            forward_s=forward_s,
            backward_s=backward_s,
            input_gradient_s=ratio * inputs * backward_s if one.halves_ns else None,
            weight_gradient_s=ratio * (1 - inputs) * backward_s if one.halves_ns else None,
            spread=median(each.spread for each in alike),
            parameter_bytes=sum(map(_bytes, one.module.parameters())),
            saved_bytes=one.saved_bytes,
            reads=one.reads,
            returns=one.returns,
        )

    def _forward(self, segment: Sequence[MeasuredLayer], *, way: str = "alone") -> list[Any]:
        """Runs layers forward: each on leaves of its own, for whole passes or `split` ones, or all as one graph.

        Returns stamps around the pass of each.
        """
        taken: list[Any] = []
        with self._running():
            for one in segment:
                arguments = self._arguments(one, is_whole=way == "whole")
                taken.append(self._stamps.take())
                made = self._call(one.node, one.split if way == "split" else one.module, arguments)
                taken.append(self._stamps.take())
                self._keep(one, made)
                if way == "whole":
                    self._drop(one)
        return taken

    def _drop(self, one: MeasuredLayer) -> None:
        """Lets go of what no layer behind this one reads, as runs do."""
        one.made, one.taken = [], []
        for feed in (one.node.id, *one.node.feeds):
            for name in self._names(feed):
                if self._last_reader.get(name, one.node.id) == one.node.id:
                    self._held.pop(name, None)

    def _in_ns(self, taken: Sequence[Any], *, each: int) -> list[list[int]]:
        """The first of each so many stamps in nanoseconds, then the second of each, and so on.

        They are asked for when all layers have been given to the device: a GPU that waited for the processor before
        each of them would be timed with the waiting, which runs don't have.
        """
        stamps_ns = self._stamps.in_ns(taken)
        return [stamps_ns[at::each] for at in range(each)]

    def _arguments(self, one: MeasuredLayer, *, is_whole: bool) -> list[Any]:
        """What a layer reads; what it changes in place is copied first."""
        values = {name: self._held[name] for feed in one.node.feeds for name in self._names(feed)}
        if not is_whole:
            values = {
                name: value.detach().requires_grad_(
                    name in self._has_gradient and value.is_floating_point() and not self._is_inference
                )
                for name, value in values.items()
            }
        one.taken = list(values.values())
        return self._given(one.node, values)

    def _backward(self, segment: Sequence[MeasuredLayer], *, ends: bool, is_split: bool = False) -> None:
        """Runs layers backward, perhaps in halves, the last one from the loss if it ends the model."""
        gradients: dict[str, Tensor] = {}
        taken = self._loss(gradients) if ends else [self._stamps.take()] * 3
        for one in reversed(segment):
            names = self._names(one.node.id)
            roots = [(name, made) for name, made in zip(names, one.made, strict=True) if made.requires_grad]
            given = [gradients.pop(name, None) for name, _ in roots]
            given = [
                torch.full_like(made, 1e-3) if gradient is None else gradient.to(made.dtype)
                for (_, made), gradient in zip(roots, given, strict=True)
            ]
            if self._weights_bytes(one.module) > self._memory_bytes:
                one.module.zero_grad(set_to_none=True)  # there is no room to add to them
            with self._naming(f"the backward pass of layer `{one.node.id}`"):
                taken += self._pass(one, [made for _, made in roots], given, is_split=is_split)
            read = dict.fromkeys(name for feed in one.node.feeds for name in self._names(feed))
            for name, leaf in zip(read, one.taken, strict=True):
                if leaf.grad is not None:
                    gradients[name] = leaf.grad if name not in gradients else gradients[name] + leaf.grad
        loss_ns, *passes_ns = (
            (middle_ns - begin_ns, end_ns - middle_ns)
            for begin_ns, middle_ns, end_ns in zip(*self._in_ns(taken, each=3), strict=True)
        )
        for one, (first_ns, second_ns) in zip(reversed(segment), passes_ns, strict=True):
            forward_ns, backward_ns = loss_ns if one is segment[-1] else (0, 0)
            if is_split:
                one.halves_ns.append((backward_ns + first_ns, second_ns))
            else:
                if ends and one is segment[-1]:
                    one.loss_ns.append(forward_ns)
                one.spans_ns[-1] = one.spans_ns[-1][0] + forward_ns, backward_ns + first_ns

    def _pass(
        self, one: MeasuredLayer, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, is_split: bool
    ) -> tuple[Any, Any, Any]:
        """Runs a layer backward; returns stamps around the pass, and behind what it left to the queue."""
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
        """Puts the loss's gradients into `gradients`; returns stamps around its pass forward, and behind the other."""
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

    def _run_whole(self, segment: Sequence[MeasuredLayer]) -> int:
        """Runs the layers as one graph; returns the nanoseconds of its pass forward and backward."""
        taken = [self._stamps.take(), *self._forward(segment, way="whole")]
        if not self._is_inference:
            self._whole_backward()
        begin_ns, *spans_ns, end_ns = self._stamps.in_ns([*taken, self._stamps.take()])
        for one, from_ns, to_ns in zip(segment, spans_ns[::2], spans_ns[1::2], strict=True):
            one.in_whole_ns.append(to_ns - from_ns)
        return end_ns - begin_ns

    def _whole_backward(self) -> None:
        with self._naming("the model as a whole"), self._running():
            outputs = tuple(self._held[name] for name in self._output_names)
            loss = self._workload.loss_of(outputs, self._targets) / self._rows
            loss.backward()

    def _hold(self, segment: Sequence[MeasuredLayer]) -> tuple[tuple[int, int], int]:
        """Runs the layers as one graph, slowly; returns `saved_activation_bytes` and `peak_bytes` of it."""
        for one in segment:
            one.made, one.taken = [], []
        self._held = {name: tensor for name, tensor in self._held.items() if name.startswith("input:")}
        given_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())
        modules = [one.module for one in segment]
        weights = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
        gradients = [tensor.grad for tensor in weights if tensor.grad is not None]
        held = [*weights, *gradients, *self._held.values(), *self._targets]
        with MemoryGrowth(self._device, held) as growth:
            self._forward(segment, way="whole")
            grown_bytes = growth.bytes
            self._whole_backward()
        returned = {_address(self._held[name]): self._held[name] for name in self._output_names}
        returned_bytes = sum(tensor.untyped_storage().nbytes() for tensor in returned.values())
        return (grown_bytes - returned_bytes, given_bytes + grown_bytes), given_bytes + growth.peak_bytes

    def _look_at(self, one: MeasuredLayer) -> int:
        """Runs a layer once to see what its backward pass needs; returns the bytes of it."""
        own = {_address(tensor) for tensor in chain(one.module.parameters(), one.module.buffers())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _address(tensor) not in own:
                kept[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # a graph that is given its own output to keep is never freed

        with self._running(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            taken = self._arguments(one, is_whole=False)
            self._keep(one, self._call(one.node, one.module, taken))
        read = {_address(tensor): at for at, tensor in reversed(list(enumerate(one.taken)))}
        mine = {address: -1 - at for at, address in enumerate(dict.fromkeys(map(_address, one.made)))}
        one.reads = tuple(_address(tensor) in kept for tensor in one.taken)
        one.returns = tuple(
            (
                _bytes(tensor),
                tensor.untyped_storage().nbytes(),
                read.get(_address(tensor), mine[_address(tensor)]),
                _address(tensor) in kept,
            )
            for tensor in one.made
        )
        one.saved_bytes = sum(size for address, size in kept.items() if address not in read and address not in mine)
        return sum(kept.values())

    def _call(self, node: NetworkLayer, module: nn.Module, arguments: list[Any]) -> Any:
        with self._naming(f"layer `{node.id}`"), self._autocast():
            if getattr(module, "wants_rows", False):
                return module(*arguments, rows=self._rows)
            return module(*arguments)

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Makes an error that says of what it is of whatever the user's layers and torch raise."""
        try:
            yield
        except HpgoError:
            raise
        except Exception as failure:
            said = f"{what} can't run on a batch of {self._rows}: {type(failure).__name__}: {first_line(failure)}"
            if lacks_memory(failure):
                raise _LacksMemoryError(said, "try a smaller `--batch-size`, or `--dtype bfloat16`") from failure
            raise RunError(said, _TRY.get(what, _TRY_LAYER.format(rows=self._rows))) from failure

    def _keep(self, one: MeasuredLayer, made: Any) -> None:
        one.made = [made] if isinstance(made, torch.Tensor) else list(made)
        self._held |= dict(zip(self._names(one.node.id), one.made, strict=True))

    def _skip(self, node: NetworkLayer) -> None:
        """Holds tensors of the shapes that a layer would make."""
        module = self._ready(node, self._network.make_on_meta(node.id))
        with torch.no_grad(), self._running():
            values = {name: self._held[name].to("meta") for feed in node.feeds for name in self._names(feed)}
            made = self._call(node, module, self._given(node, values))
        tensors = [made] if isinstance(made, torch.Tensor) else made
        for name, tensor in zip(self._names(node.id), tensors, strict=True):
            self._held[name] = plausible(torch.empty_like(tensor, device=self._device))

    def _given(self, node: NetworkLayer, values: dict[str, Tensor]) -> list[Any]:
        """The arguments of a layer, of the values that it reads."""
        arguments = []
        for at, feed in enumerate(node.feeds):
            names = self._names(feed)
            tensors = tuple(
                values[name].clone() if at in self._looks[node.id].mutates else values[name] for name in names
            )
            is_tuple = feed in self._looks and not self._looks[feed].is_single
            arguments.append(tensors if is_tuple else tensors[0])
        return arguments

    def _module(self, node: NetworkLayer) -> nn.Module:
        """A layer's module with weights: its first ones, or plausible ones for a model that takes no memory."""
        if self._workload.is_on_meta:
            module = self._network.make_on_meta(node.id).to_empty(device=self._device)
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                plausible(tensor, name)
        else:
            module = self._network.make(node.id, seed=0).to(self._device)
        return self._ready(node, module)

    def _ready(self, node: NetworkLayer, module: nn.Module) -> nn.Module:
        return ready(node.id, module, self._looks[node.id], dtype=self._dtype, seed=0).train(not self._is_inference)

    def _names(self, feed: str) -> tuple[str, ...]:
        return (feed,) if feed not in self._looks else tuple(value.name for value in self._looks[feed].values)

    def activation_bytes(self) -> dict[str, int]:
        """Of each layer, the bytes that others read of it, or that the model returns."""
        return activation_bytes(self._network, self.figures, self._names)

    def saved_bytes(self) -> dict[str, int]:
        """Of each layer, the bytes of what it makes that its own backward pass needs, or that of one that reads it.

        Inputs of the model belong to the layer that is the first to keep them.
        """
        inputs = {
            name: tensor.untyped_storage().nbytes() for name, tensor in self._held.items() if name.startswith("input:")
        }
        return saved_bytes(self._network, self.figures, self._names, inputs)

    def _likeness(self, node: NetworkLayer) -> str:
        """Equal for layers that compute the same on tensors of the same shapes."""
        given = [
            (tuple(self._held[name].shape), str(self._held[name].dtype))
            for feed in node.feeds
            for name in self._names(feed)
        ]
        text = repr((given, node.id == self._last, node.everywhere, *described(self._network.make_on_meta(node.id))))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Within it, a pass of the batch runs."""
        alone = torch.inference_mode() if self._is_inference else nullcontext()
        with running(step=0, samples=range(self._rows)), alone:
            yield


def _split(module: nn.Module, queue: split_backward.Queue) -> nn.Module:
    """`module` with the same weights, whose backward pass leaves their gradients to `queue`."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    split = copy.deepcopy(module, shared)
    split_backward.install(split, queue)
    return split


def plausible(tensor: Tensor, name: str = "") -> Tensor:
    """Fills a tensor as weights and activations often are, without overflow; returns it."""
    with torch.no_grad():
        if not tensor.is_floating_point():
            return tensor.zero_()
        if tensor.dim() < 2 and name:
            return tensor.fill_(1.0 if name.endswith(("weight", "var")) else 0.01)
        few = torch.randn(min(tensor.numel(), 2**20), device=tensor.device)
        few = (few / sqrt(max(1, tensor.numel() // len(tensor))) if name else few).to(tensor.dtype)
        for at in range(0, tensor.numel(), len(few) or 1):
            part = tensor.view(-1)[at : at + len(few)]
            part.copy_(few[: len(part)])
        return tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
