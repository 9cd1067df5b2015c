"""Reader of torch.profiler's traces (Kineto): JSON in Chrome's trace format, with an event per module, op and kernel.

    with torch.profiler.profile(record_shapes=True, with_stack=True) as traced:
        ...  # a few whole training steps
    traced.export_chrome_trace("steps.json")

Times are microseconds. Module events, which `with_stack` records, assign operations of the forward pass to layers.
Sequence numbers assign operations of the backward pass. Shapes give the bytes. The meaning of events follows torch's
`torch/csrc/profiler` and `torch/csrc/autograd`.

`forward_s` and `backward_s` are the times of a layer's outermost operations, or of the kernels and copies that they
launch on a device. Backward operations are found by the `Sequence number` of the operation that created them; gradient
accumulation right after counts, too. `activation_bytes` is the shape and type of the gradient at the start of a layer's
backward pass, `parameter_bytes` the bytes of accumulated gradients, so of trained weights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from hpgo.base.documents import Section
from hpgo.base.messages import as_float, shorten
from hpgo.errors import ProfileError
from hpgo.model.profile import LARGEST, Layer, Profile

WHAT = "a trace of torch.profiler"
_MODULE = "nn.Module: "
_BACKWARD = "autograd::engine::evaluate_function: "
_GRADIENT = "torch::autograd::AccumulateGrad"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
"""Bytes per element of the types of gradients."""
_HOW = "trace whole training steps with `record_shapes=True` and `with_stack=True`"


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    kind: str
    thread: Any
    start: float
    end: float
    args: dict[str, Any]


@dataclass(slots=True)
class _Call:
    """One call of a module."""

    event: _Event
    inside: list[_Call] = field(default_factory=list)
    repeats: bool = False
    """Whether it contains blocks at any depth: several modules of one class that have modules inside."""

    @property
    def name(self) -> str:
        return self.event.name.removeprefix(_MODULE)

    @property
    def kind(self) -> str:
        return self.name.rpartition("_")[0]


@dataclass(slots=True)
class _Step:
    """Measurements of one step, with an entry for each layer."""

    names: list[str]
    forward_s: list[float]
    backward_s: list[float]
    output_bytes: list[float]
    parameter_bytes: list[float]


def looks_like(document: object) -> bool:
    """Return whether a document is a trace in Chrome's format, from any program."""
    return isinstance(document, dict) and "traceEvents" in document


def parse(document: object, *, name: str, batch_size: int, file: str = "text") -> Profile:
    """Return the profile of the steps in a parsed trace: a chain of its blocks and of the largest modules beside them.

    Raises ProfileError naming `file` and the missing or wrong entry.
    """
    top = Section(document, file, ProfileError)
    events = _events(top)
    steps = [step for step in _steps(top, events) if any(step.backward_s)]
    if not steps:
        top.fail("the trace contains no backward pass of a model's modules", _HOW)
    # Steps may call different modules. Take the median over the steps with the most common list of layers.
    usual, _ = Counter(tuple(step.names) for step in steps).most_common(1)[0]
    alike = [step for step in steps if tuple(step.names) == usual]
    layers = []
    for at, layer_id in enumerate(usual):
        layer = top.build(
            Layer,
            layer_id,
            layer_id,
            (median(step.forward_s[at] for step in alike),),
            (median(step.backward_s[at] for step in alike),),
            (alike[-1].output_bytes[at],),
            alike[-1].parameter_bytes[at],
        )
        layers.append(layer)
    edges = tuple((before.id, behind.id) for before, behind in pairwise(layers))
    return top.build(Profile, name, (batch_size,), tuple(layers), edges, file)


def _events(top: Section) -> list[_Event]:
    """Return the events with a duration, sorted by start; of events that start together, the longest comes first."""
    events = []
    for at, entry in enumerate(top.items("traceEvents"), start=1):
        if not isinstance(entry, dict) or entry.get("ph") != "X":
            continue
        event = Section(entry, f"{top.where}, traceEvents entry {at}", ProfileError)
        start, took = event.finite("ts"), event.amount("dur")
        args, thread = event.get("args", {}), event.get("tid", 0)
        if abs(start) > LARGEST or took > LARGEST:
            event.fail("a time is out of range", "write times in microseconds")
        if not isinstance(args, dict) or isinstance(thread, (dict, list)):
            event.fail("`args` must be a mapping, and `tid` a number or text")
        events.append(_Event(event.text("name"), event.text("cat", ""), thread, start, start + took, args))
    return sorted(events, key=lambda event: (event.start, -event.end))


def _steps(top: Section, events: list[_Event]) -> list[_Step]:
    roots = _calls([event for event in events if event.kind == "python_function" and event.name.startswith(_MODULE)])
    if not roots:
        top.fail("the trace contains no modules", f"{_HOW}, without compiling the model")
    took: dict[str, float] = defaultdict(float)
    for root in roots:
        took[root.name] += root.event.end - root.event.start
    # The module with the largest total time is the model, and each of its calls starts a step.
    model = max(took, key=lambda called: took[called])
    starts = sorted({root.event.start for root in roots if root.name == model})
    in_step: dict[int, list[_Call]] = defaultdict(list)
    for root in roots:
        in_step[bisect_right(starts, root.event.start)].append(root)
    parts: dict[int, list[_Event]] = defaultdict(list)
    for event in events:
        parts[bisect_right(starts, event.start)].append(event)
    # A kernel runs after its launch, perhaps in the next step. So kernels are looked up by launch, not by time.
    kernels = _launches(events)
    return [_step(top, in_step[number], parts[number], kernels) for number in range(1, len(starts) + 1)]


def _calls(events: list[_Event]) -> list[_Call]:
    """Return the outermost calls, each with its nested calls."""
    roots: list[_Call] = []
    every: list[_Call] = []
    open_calls: dict[Any, list[_Call]] = defaultdict(list)
    for event in events:
        stack = open_calls[event.thread]
        while stack and event.start >= stack[-1].event.end:
            stack.pop()
        call = _Call(event)
        (stack[-1].inside if stack else roots).append(call)
        stack.append(call)
        every.append(call)
    for call in reversed(every):  # nested calls come before the calls that contain them
        kinds = Counter(inner.kind for inner in call.inside if inner.inside)
        call.repeats = any(inner.repeats for inner in call.inside) or max(kinds.values(), default=0) > 1
    return roots


def _layers(roots: list[_Call]) -> list[_Call]:
    """Return the calls that are layers, in execution order.

    Models, wrappers, modules that contain blocks, and `Sequential` modules are replaced by the calls inside them.
    """
    found = []
    # The stack holds calls in reverse, so that they are popped in execution order.
    waiting = [(call, True) for call in reversed(roots)]
    while waiting:
        call, is_root = waiting.pop()
        if call.inside and (is_root or call.repeats or call.kind == "Sequential"):
            waiting += [(inner, is_root and len(call.inside) == 1) for inner in reversed(call.inside)]
        else:
            found.append(call)
    return sorted(found, key=lambda call: call.event.start)


def _launches(events: list[_Event]) -> dict[Any, float] | None:
    """Return the seconds of device work by the `correlation` of the launching call, or None without a device."""
    seconds: dict[Any, float] = defaultdict(float)
    on_device = [event for event in events if event.kind in _ON_DEVICE]
    for event in on_device:
        seconds[_correlation(event)] += (event.end - event.start) / 1e6
    seconds.pop(None, None)
    return seconds if on_device else None


def _correlation(event: _Event) -> Any:
    found = event.args.get("correlation")
    return found if isinstance(found, (int, str)) else None


def _step(top: Section, roots: list[_Call], events: list[_Event], kernels: dict[Any, float] | None) -> _Step:
    work = [event for event in events if event.kind != "python_function" and event.kind not in _ON_DEVICE]
    backward = [event for event in work if event.kind == "cpu_op" and event.name.startswith(_BACKWARD)]
    # The first backward event ends the forward pass of the step.
    turn = min((event.start for event in backward), default=math.inf)
    layers = _layers([root for root in roots if root.event.start <= turn])
    thread = roots[0].event.thread
    starts = [call.event.start for call in layers]
    ends = max((root.event.end for root in roots), default=0.0) if turn == math.inf else turn
    step = _Step(_names(layers), *([0.0] * len(layers) for _ in range(4)))

    # Forward: an operation belongs to the layer that started last. An autograd node is created by the last operation
    # with its sequence number, so later operations overwrite earlier ones.
    layer_of: dict[Any, int] = {}
    forward = [event for event in work if event.thread == thread and event.start < ends]
    for event in forward:
        number = event.args.get("Sequence number")
        if isinstance(number, int) and event.kind == "cpu_op":
            layer_of[number] = _at(starts, event)
    for event, seconds in _timed(forward, kernels):
        step.forward_s[_at(starts, event)] += seconds

    # Backward: gradients are accumulated right after they are computed. So events without a known sequence number
    # belong to the layer of the event before.
    current = len(layers) - 1
    spans: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    first: dict[int, float] = {}
    for event in backward:
        number = event.args.get("Sequence number")
        known = layer_of.get(number) if isinstance(number, int) else None
        current = current if known is None else known
        spans[event.thread].append((event.start, current))
        if known is not None:
            first.setdefault(known, event.start)
    within = _within(backward, [event for event in work if event.start >= turn])
    for event, seconds in _timed(within, kernels):
        step.backward_s[_span(spans, event)] += seconds
    _sizes(top, step, within, spans, first)
    return step


def _names(layers: list[_Call]) -> list[str]:
    """Return the names of modules. Repeated calls get a number."""
    seen: Counter[str] = Counter()
    names = []
    for call in layers:
        seen[call.name] += 1
        names.append(call.name if seen[call.name] == 1 else f"{call.name} ({seen[call.name]})")
    return names


def _at(starts: list[float], event: _Event) -> int:
    return max(0, bisect_right(starts, event.start) - 1)


def _span(spans: dict[Any, list[tuple[float, int]]], event: _Event) -> int:
    marks = spans[event.thread]
    return marks[max(0, bisect_right(marks, (event.start, math.inf)) - 1)][1]


def _within(backward: list[_Event], events: list[_Event]) -> list[_Event]:
    """Return the backward events and the events inside them, which excludes operations of the optimizer."""
    ends: dict[Any, float] = {}
    held = []
    at = 0
    for event in events:
        while at < len(backward) and backward[at].start <= event.start:
            ends[backward[at].thread] = max(ends.get(backward[at].thread, -math.inf), backward[at].end)
            at += 1
        if event.end <= ends.get(event.thread, -math.inf):
            held.append(event)
    return held


def _timed(events: list[_Event], kernels: dict[Any, float] | None) -> list[tuple[_Event, float]]:
    """Return events with their seconds: launching calls with their kernels' times, or else the outermost operations."""
    if kernels is not None:
        return [(event, kernels[_correlation(event)]) for event in events if _correlation(event) in kernels]
    ends: dict[Any, float] = {}
    found = []
    for event in events:
        if event.kind == "cpu_op" and event.start >= ends.get(event.thread, -math.inf):
            ends[event.thread] = event.end
            found.append((event, (event.end - event.start) / 1e6))
    return found


def _sizes(
    top: Section,
    step: _Step,
    events: list[_Event],
    spans: dict[Any, list[tuple[float, int]]],
    first: dict[int, float],
) -> None:
    """Fill in parameter and output sizes of `step`.

    A layer's output has the shape of the gradient with which its backward pass begins.
    """
    shaped = False
    for event in events:
        if event.kind != "cpu_op" or event.name.startswith(_BACKWARD) or "Input Dims" not in event.args:
            continue
        shaped = True
        layer = _span(spans, event)
        if event.name == _GRADIENT:
            step.parameter_bytes[layer] += _tensor_bytes(top, event)
        elif layer in first and event.start >= first[layer]:
            del first[layer]
            step.output_bytes[layer] = _tensor_bytes(top, event)
    if events and not shaped:
        top.fail("the trace contains no shapes", _HOW)
    # Without a recorded gradient, assume that the layer keeps the size of the output before it.
    for layer in range(1, len(step.names)):
        step.output_bytes[layer] = step.output_bytes[layer] or step.output_bytes[layer - 1]


def _tensor_bytes(top: Section, event: _Event) -> float:
    """Return the bytes of all input tensors of an operation."""
    shapes, types = event.args.get("Input Dims"), event.args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or len(shapes) != len(types):
        top.fail(f"`{shorten(event.name)}` has different numbers of shapes and types", _HOW)
    total = 0.0
    for shape, kind in zip(shapes, types, strict=True):
        if isinstance(shape, list) and isinstance(kind, str) and all(type(size) is int for size in shape):
            total += math.prod(map(as_float, shape)) * _BYTES.get(kind, 0)
    return total
