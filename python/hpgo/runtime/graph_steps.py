"""Modules that run operations of an exported graph one after the other, for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpgo.runtime import split_backward
from hpgo.runtime.drawn_attention import DrawnAttention
from hpgo.runtime.graph_nodes import check_draws, is_value, layer_id, mutates, operation_name
from hpgo.runtime.random_numbers import DrawnNumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from hpgo.runtime.graph import Graph
    from hpgo.runtime.random_numbers import Distribution


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a layer. Its arguments name values."""

    call: Callable[..., Any] | str
    """A function, or the name of a submodule of the layer."""
    arguments: Any
    options: Any
    makes: str


@dataclass(frozen=True, slots=True)
class _Name:
    """Placeholder in arguments for the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """Placeholder in arguments for `factor * rows + offset`."""

    factor: int
    offset: int


class _Device:
    """Placeholder in arguments for the device that the layer is on."""


class Steps(nn.Module):
    """A layer that runs operations of a graph one after the other."""

    wants_rows = True

    def __init__(self, steps: Sequence[Step], takes: Sequence[str], gives: Sequence[str]) -> None:
        super().__init__()
        self.steps, self.takes, self.gives = list(steps), tuple(takes), tuple(gives)
        # Drop each value after its last reader, so that the layer holds no more memory than the user's own code would.
        last: dict[str, int] = {}
        for at, step in enumerate(self.steps):
            last |= dict.fromkeys(_names((step.arguments, step.options)), at)
        self._drops = [
            tuple(name for name, read in last.items() if read == at and name not in self.gives)
            for at in range(len(self.steps))
        ]

    def settings(self) -> list[Any]:
        """Return a description without value names, equal for layers that compute the same."""
        # Names of values differ between equal layers, so number the values by their first use.
        numbers: dict[str, int] = {}

        def numbered(value: Any) -> Any:
            if isinstance(value, _Name):
                return "value", numbers.setdefault(value.name, len(numbers))
            if isinstance(value, _Device):
                return type(value).__name__
            if isinstance(value, torch.Tensor):
                return "tensor", tuple(value.shape), str(value.dtype)
            if isinstance(value, (list, tuple)):
                return [numbered(one) for one in value]
            return str(value)

        found: list[Any] = [[numbered(_Name(name)) for name in self.takes]]
        for step in self.steps:
            call = "module" if isinstance(step.call, str) else str(step.call)
            options = [(key, numbered(value)) for key, value in sorted(step.options.items())]
            found.append((call, numbered(step.arguments), options, numbered(_Name(step.makes))))
        return [*found, [numbered(_Name(name)) for name in self.gives]]

    def forward(self, *given: Tensor, rows: int) -> Tensor | tuple[Tensor, ...]:
        """Run the operations. Return the values that the layer gives, as a tensor or a tuple."""
        held: dict[str, Any] = dict(zip(self.takes, given, strict=True))
        held |= dict(self.named_parameters(recurse=False)) | dict(self.named_buffers(recurse=False))
        filled = partial(_filled, held, rows, self.place.device)
        for step, drops in zip(self.steps, self._drops, strict=True):
            call = getattr(self, step.call) if isinstance(step.call, str) else step.call
            held[step.makes] = call(
                *filled(step.arguments), **{name: filled(value) for name, value in step.options.items()}
            )
            for name in drops:
                held.pop(name, None)
        outputs = tuple(held[name] for name in self.gives)
        return outputs[0] if len(outputs) == 1 else outputs


def _filled(held: Mapping[str, Any], rows: int, device: torch.device, value: Any) -> Any:
    """Return `value` with its placeholders replaced. `held` has the values by name."""
    if isinstance(value, _Name):
        return held[value.name]
    if isinstance(value, Size):
        return value.factor * rows + value.offset
    if isinstance(value, _Device):
        return device
    if type(value) in {list, tuple}:
        # A function within `forward` that called itself would hold all of `held` until Python looks for cycles.
        return type(value)(_filled(held, rows, device, one) for one in value)
    return value


def _names(value: Any) -> Iterable[str]:
    if isinstance(value, _Name):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _names(one)
    elif isinstance(value, dict):
        yield from _names(list(value.values()))


class StepBuilder:
    """Builder of a layer's steps, which collects the tensors that the layer holds and takes."""

    def __init__(self, graph: Graph, inside: set[Any]) -> None:
        self.graph, self.inside = graph, inside
        self.held: dict[str, Any] = {}
        self.takes: dict[Any, None] = {}
        self._named: dict[Any, str] = {}

    def step(self, node: Any) -> Step:
        """Return the step of one operation. Operations with weights, dropout and normalization become submodules."""
        name = operation_name(node.target)
        if str(node.target) in _DRAWS:
            return self._drawing(node)
        attention = self._attention(node) if name == "scaled_dot_product_attention" else None
        if attention is not None:
            return attention
        make = _MODULES.get(str(node.target))
        module = make(self, node) if make is not None else None
        if module is not None:
            self.held[node.name] = module
            given = node.args[1] if name == "addmm" else node.args[0]
            return Step(node.name, (self.filled(given),), {}, node.name)
        if make is None:
            check_draws(node)
        options = {key: self.filled(value) for key, value in node.kwargs.items()}
        return Step(node.target, self.filled(node.args), options, node.name)

    def _drawing(self, node: Any) -> Step:
        """Return the step of an operation that draws random numbers."""
        distribution, first, usual = _DRAWS[str(node.target)]
        value, options = node.meta["val"], dict(node.kwargs)
        # Trailing arguments that have their default are missing.
        given = [*node.args[first : first + len(usual)], *usual[len(node.args) - first :]]
        given = [options.get(name, one) for name, one in zip(_GIVEN[distribution], given, strict=True)]
        self.held[node.name] = DrawnNumbers(
            layer_id(node), distribution, value.dtype, row_dimension=self._row_dimension(value)
        )
        # The operation's own argument may be a tensor of that shape, which the random numbers do not need.
        sizes = [self.graph.size_of(size, node) for size in value.shape]
        into = self.filled(node.args[0]) if mutates(node) else None
        return Step(node.name, (sizes, into, self.filled(given)), {}, node.name)

    def _attention(self, node: Any) -> Step | None:
        """Return the step of attention that drops weights; None if it drops none."""
        # A call may pass its options by position or by name.
        given = dict(zip(_ATTENTION, node.args, strict=False)) | node.kwargs
        p = given.pop("dropout_p", 0.0)
        if not p:
            return None
        tensors = [self.filled(given.pop(name, None)) for name in _ATTENTION[:4]]
        row = self._row_dimension(node.meta["val"])
        self.held[node.name] = DrawnAttention(layer_id(node), p, row_dimension=row)
        return Step(node.name, tuple(tensors), {key: self.filled(value) for key, value in given.items()}, node.name)

    @staticmethod
    def _row_dimension(value: Tensor) -> int | None:
        """Return the first dimension that grows with the batch; None without one."""
        return next((at for at, size in enumerate(value.shape) if isinstance(size, torch.SymInt)), None)

    def tensor(self, node: Any, kind: str) -> Any:
        """Return the parameter or buffer that a node stands for; None if it is none of this kind."""
        found, tensor = self.graph.sources.get(node, ("", None)) if isinstance(node, torch.fx.Node) else ("", None)
        return tensor if found == kind else None

    def filled(self, value: Any) -> Any:
        """Return an argument with placeholders instead of nodes."""
        if isinstance(value, torch.fx.Node):
            return self._of(value)
        if isinstance(value, torch.device):
            # The graph has the device of the export, but the layer may run on another one.
            return _Device()
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.filled, value)) if type(value) in {list, tuple} else [*map(self.filled, value)]
        return value

    def _of(self, node: Any) -> Any:
        if node.op == "get_attr":
            return getattr(self.graph.program.graph_module, node.target)
        if not is_value(node):
            # Sizes follow from the number of rows, so that one exported graph runs batches of any size.
            return self.graph.size(node)
        if node in self.inside:
            return _Name(node.name)
        kind, tensor = self.graph.sources.get(node, ("", None))
        if kind in {"parameter", "buffer"}:
            if node not in self._named:
                self._named[node] = node.name
                self.held[node.name] = tensor
            return _Name(self._named[node])
        self.takes[node] = None
        return _Name(node.name)


def _linear(builder: StepBuilder, node: Any) -> nn.Module | None:
    # A module instead of a function, because split backward passes replace the linear layers and convolutions they
    # find.
    weight, bias = builder.tensor(node.args[1], "parameter"), None
    if len(node.args) > 2 and node.args[2] is not None:
        bias = builder.tensor(node.args[2], "parameter")
        weight = None if bias is None else weight
    if weight is None:
        return None
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    module.weight, module.bias = weight, bias
    return module


def _addmm(builder: StepBuilder, node: Any) -> nn.Module | None:
    bias, weight = (builder.tensor(node.args[at], "parameter") for at in (0, 2))
    return None if node.kwargs or bias is None or weight is None else split_backward.Addmm(bias, weight)


def _conv2d(builder: StepBuilder, node: Any) -> nn.Module | None:
    # The graph leaves out trailing arguments that have their default.
    given = [*node.args, *(None, [1, 1], [0, 0], [1, 1], 1)[len(node.args) - 2 :]]
    weight = builder.tensor(given[1], "parameter")
    bias = builder.tensor(given[2], "parameter")
    if weight is None or (bias is None and given[2] is not None):
        return None
    stride, padding, dilation, groups = (tuple(one) if isinstance(one, list) else one for one in given[3:])
    channels = weight.shape[1] * groups, weight.shape[0]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    module = nn.Conv2d(*channels, tuple(weight.shape[2:]), bias=bias is not None, device="meta", **options)
    module.weight, module.bias = weight, bias
    return module


def _dropout(_: StepBuilder, node: Any) -> nn.Module | None:
    # Only a module can hold the place by which masks are drawn.
    return _placed(nn.Dropout, node) if node.args[2] else None


def _feature_dropout(_: StepBuilder, node: Any) -> nn.Module | None:
    kinds = {3: nn.Dropout1d, 4: nn.Dropout2d, 5: nn.Dropout3d}
    return _placed(kinds[node.meta["val"].dim()], node) if node.args[2] else None


def _placed(kind: Callable[[float], nn.Module], node: Any) -> nn.Module:
    module = kind(node.args[1])
    module.place = layer_id(node)
    return module


def _batch_norm(builder: StepBuilder, node: Any) -> nn.Module | None:
    _, weight, bias, mean, variance, training, momentum, epsilon, _ = node.args
    if not training:
        return None
    # A module, because `batch_norm.install` joins modules over replicas, and finds no function calls.
    given = [builder.tensor(one, "parameter") for one in (weight, bias)]
    kept = [builder.tensor(one, "buffer") for one in (mean, variance)]
    channels = node.args[0].meta["val"].shape[1]
    module = nn.BatchNorm2d(
        channels, epsilon, momentum, affine=weight is not None, track_running_stats=mean is not None, device="meta"
    )
    module.weight, module.bias = given
    if mean is not None:
        module.running_mean, module.running_var = kept
        module.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return module


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_GIVEN = {"uniform": ("from", "to"), "normal": ("mean", "std"), "bernoulli": ("p",)}
"""Names of the parameters of each distribution."""
_DRAWS: dict[str, tuple[Distribution, int, tuple[float, ...]]] = {
    "aten.rand.default": ("uniform", 1, (0.0, 1.0)),
    "aten.rand_like.default": ("uniform", 1, (0.0, 1.0)),
    "aten.uniform_.default": ("uniform", 1, (0.0, 1.0)),
    "aten.randn.default": ("normal", 1, (0.0, 1.0)),
    "aten.randn_like.default": ("normal", 1, (0.0, 1.0)),
    "aten.normal_.default": ("normal", 1, (0.0, 1.0)),
    "aten.normal.float_float": ("normal", 0, (0.0, 1.0)),
    "aten.bernoulli.default": ("bernoulli", 0, (0.5,)),
    "aten.bernoulli.p": ("bernoulli", 1, (0.5,)),
    "aten.bernoulli_.float": ("bernoulli", 1, (0.5,)),
    "aten.bernoulli_.Tensor": ("bernoulli", 1, (0.5,)),
}
"""Distribution of each operation that draws, the position of its first parameter, and the parameters' defaults."""
_MODULES: dict[str, Callable[[StepBuilder, Any], nn.Module | None]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.conv2d.default": _conv2d,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.batch_norm.default": _batch_norm,
}
