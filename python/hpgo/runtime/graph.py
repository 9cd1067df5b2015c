"""Any model as a network: its graph by `torch.export`, with a layer for each operation that can be cut off.

Operations run in the order of the graph. A cut may come between two of them unless a value that lives there can't be
sent row by row, is a tuple, or is changed in place behind it; what lies between two such cuts is one layer, or part of
one, where layers are asked for by module or by block. Operations that follow from inputs alone, as masks and positions
do, are no layers: each stage that needs them computes them. Sizes that grow with the batch are computed from the number
of rows.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import in_a_row, shorten
from hpgo.runtime import dropout, halves
from hpgo.runtime.grouping import Place, grouped
from hpgo.runtime.modules import Given, Network, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}
_HELPERS = "inputs' own"
"""Id of what follows from inputs alone."""


def exported(model: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    """What makes networks of `model`, for inputs with a batch of any size from 1 as their first dimension.

    Raises ArgumentError where torch can't export it, with the line of the user's that is to blame, and where it draws
    random numbers other than by dropout or changes a buffer.
    """
    program, batch = _export(model, inputs)
    return Graph(model, program, batch)


def _export(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
    if isinstance(original := getattr(model, "_orig_mod", None), nn.Module):
        raise ArgumentError(
            f"{type(original).__name__} was compiled by torch.compile, which hides the layers between which it is cut",
            "give the model as it was before, `model._orig_mod`; or compile it in place, by `model.compile()`",
        )
    rows = max(2, len(inputs[0]))  # a batch of one would be taken for a constant
    examples = tuple(one if len(one) == rows else one[:1].expand(rows, *one.shape[1:]) for one in inputs)
    weights = list(model.parameters())
    if weights and all(one.is_meta for one in weights):
        # Convolutions refuse to mix devices.
        examples = tuple(one.to("meta") if one.is_floating_point() else one for one in examples)
    batch = torch.export.Dim("batch", min=1, max=2**20)
    was_training = model.training
    model.train()
    try:
        with _told_once():
            program = torch.export.export(
                model, examples, dynamic_shapes=tuple({0: batch} for _ in examples), strict=False
            )
    except Exception as error:  # whatever torch or the user's own module raises
        _check_example(model, inputs)
        raise ArgumentError(
            f"torch can't export {type(model).__name__}{_blame(error)}: {type(error).__name__}: "
            f"{shorten(_first_line(error), 200)}",
            "change that line: forward passes branch on no values, and keep a row for each sample; or give the model "
            "as a list of modules or a hpgo.runtime.Network",
            code="unsupported",
        ) from error
    finally:
        model.train(was_training)
    user = [node for node in program.graph.nodes if node.op == "placeholder"][-len(examples) :]
    symbol = user[0].meta["val"].shape[0]
    return program, symbol.node.expr if isinstance(symbol, torch.SymInt) else None


@contextmanager
def _told_once() -> Iterator[None]:
    """Within it, torch writes nothing to stderr beside an exception, which would be its logs and its whole graph."""
    disabled, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(said):
            yield
        sys.stderr.write(said.getvalue())
    finally:
        logging.disable(disabled)


def _check_example(model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Raises ArgumentError for a model that does not even run on its example."""
    if any(one.is_meta for one in model.parameters()):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(*inputs)  # so that running statistics stay as they are
    except Exception as error:  # whatever the user's own module raises
        given = ", ".join(str(tuple(one.shape)) for one in inputs)
        raise ArgumentError(
            f"{type(model).__name__} can't run on its example inputs of {given}{_blame(error)}: "
            f"{type(error).__name__}: {shorten(_first_line(error), 200)}",
            "give as `example_inputs` the tensors that its `forward` takes, in their order, with a row for each sample",
            code="user_code",
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


def _blame(error: BaseException) -> str:
    """The last line of the traceback that is neither torch's nor ours."""
    theirs = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(traceback.__file__).parent))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *theirs)) or "site-packages/transformers" in frame.filename
    ]
    return f", for line {frames[-1].lineno} of {frames[-1].filename}, `{frames[-1].line}`" if frames else ""


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation of a layer; its arguments name values."""

    call: Callable[..., Any] | str
    """A function, or the name of a module of the layer."""
    arguments: Any
    options: Any
    makes: str


@dataclass(frozen=True, slots=True)
class _Name:
    """In arguments, the value of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Size:
    """In arguments, `factor * rows + offset`."""

    factor: int
    offset: int


class _Device:
    """In arguments, the device that the layer is on."""


class _Kind:
    """In arguments, the type that the layer's weights have."""


class Steps(nn.Module):
    """Operations of a graph, one after the other."""

    wants_rows = True

    def __init__(self, steps: Sequence[_Step], takes: Sequence[str], gives: Sequence[str]) -> None:
        super().__init__()
        self.steps, self.takes, self.gives = list(steps), tuple(takes), tuple(gives)
        last: dict[str, int] = {}
        for at, step in enumerate(self.steps):
            last |= dict.fromkeys(_names((step.arguments, step.options)), at)
        self._drops = [
            tuple(name for name, read in last.items() if read == at and name not in self.gives)
            for at in range(len(self.steps))
        ]

    def settings(self) -> list[Any]:
        """What it computes, whatever its values are called: equal for layers that compute the same."""
        numbers: dict[str, int] = {}

        def numbered(value: Any) -> Any:
            if isinstance(value, _Name):
                return "value", numbers.setdefault(value.name, len(numbers))
            if isinstance(value, (_Device, _Kind)):
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
        """What the graph has for the values that the layer gives."""
        held: dict[str, Any] = dict(zip(self.takes, given, strict=True))
        held |= dict(self.named_parameters(recurse=False)) | dict(self.named_buffers(recurse=False))
        filled = partial(_filled, held, rows, self.kind)
        for step, drops in zip(self.steps, self._drops, strict=True):
            call = getattr(self, step.call) if isinstance(step.call, str) else step.call
            held[step.makes] = call(
                *filled(step.arguments), **{name: filled(value) for name, value in step.options.items()}
            )
            for name in drops:
                held.pop(name, None)
        made = tuple(held[name] for name in self.gives)
        return made[0] if len(made) == 1 else made


def _filled(held: Mapping[str, Any], rows: int, kind: Tensor, value: Any) -> Any:
    """`value` with what its placeholders stand for, the names of `held` among them."""
    if isinstance(value, _Name):
        return held[value.name]
    if isinstance(value, _Size):
        return value.factor * rows + value.offset
    if isinstance(value, _Device):
        return kind.device
    if isinstance(value, _Kind):
        return kind.dtype
    if type(value) in {list, tuple}:
        # A function within `forward` that called itself would hold all of `held` until Python looks for cycles.
        return type(value)(_filled(held, rows, kind, one) for one in value)
    return value


def _names(value: Any) -> Iterable[str]:
    if isinstance(value, _Name):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _names(one)
    elif isinstance(value, dict):
        yield from _names(list(value.values()))


class Graph:
    """An exported program on its way to a network."""

    def __init__(self, model: nn.Module, program: Any, batch: Any) -> None:
        self.model, self.program, self.batch = model, program, batch
        self.kind = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
        self.sources: dict[Any, tuple[str, Any]] = {}
        """Of placeholders, `input` and its number, `parameter` and its tensor, or `buffer`, and its tensor."""
        _inline(program)
        self._place()
        self.operations = [node for node in program.graph.nodes if node.op == "call_function" and not self._skips(node)]
        self.pure = self._pure()
        self.real = [node for node in self.operations if node not in self.pure and _is_value(node)]

    def network(self, by: str) -> Network:
        """A layer for what lies between two cuts, or for a module or block: `by` is one of `grouping.GRAINS`."""
        returned = self._returned()
        layers, network = self._layers(returned), Network()
        ids = [_id(nodes[-1]) for nodes in layers]
        if by != "op":
            ids, layers = grouped(layers, [[self._place_of(node) for node in nodes] for nodes in layers], by)
        where = {node: number for number, nodes in enumerate(layers) for node in nodes}
        gives: list[list[Any]] = [[] for _ in layers]
        helped: list[Any] = []
        for node in [*self.real, *self.pure]:
            readers = {where.get(user) for user in node.users if user in where}
            if node in where and (node in returned or readers - {where[node]}):
                gives[where[node]].append(node)
            elif node in self.pure and (node in returned or readers):
                helped.append(node)
        value_of = {node: f"{_HELPERS}:{at}" if len(helped) > 1 else _HELPERS for at, node in enumerate(helped)}
        for number, nodes in enumerate(gives):
            several = len(nodes) > 1
            value_of |= {node: f"{ids[number]}:{at}" if several else ids[number] for at, node in enumerate(nodes)}
        if helped:
            wanted = [node for node in self.operations if node in self.pure]
            self._add(network, _HELPERS, wanted, helped, value_of)
        held: dict[int, list[tuple[str, str]]] = {}
        for number, nodes in enumerate(layers):
            made = self._add(network, ids[number], nodes, gives[number], value_of)
            for name, tensor in made.named_parameters():
                held.setdefault(id(tensor), []).append((ids[number], name))
        for holders in held.values():
            if len(holders) > 1:
                network.tie(*holders)
        return network.end(*(self._value(node, value_of) for node in returned))

    def _place(self) -> None:
        number = 0
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind.name == "USER_INPUT":
                self.sources[node] = ("input", number)
                number += 1
            elif spec.kind.name == "PARAMETER":
                self.sources[node] = ("parameter", self.model.get_parameter(spec.target))
            else:
                held = self.program.state_dict.get(spec.target)
                self.sources[node] = ("buffer", self.program.constants[spec.target] if held is None else held)

    def _skips(self, node: Any) -> bool:
        """Checks of export's, and counts of batches, which normalisations keep themselves."""
        name = _name(node.target)
        return name in _CHECKS or (
            name == "add_" and node.args[0].op == "placeholder" and node.args[0].name.endswith("num_batches_tracked")
        )

    def _pure(self) -> dict[Any, None]:
        """Operations that follow from inputs and constants alone, and that nothing else changes."""
        barred: set[Any] = set()
        while True:
            pure: dict[Any, None] = {}
            changed = set()
            for node in self.operations:
                name = _name(node.target)
                if not _is_value(node):
                    continue
                follows = all(
                    one in pure
                    or not _is_value(one)
                    or one.op == "get_attr"
                    or self.sources.get(one, ("",))[0] in {"input", "buffer"}
                    for one in node.all_input_nodes
                )
                if follows and node not in barred and not _draws(node) and name not in {"dropout", "batch_norm"}:
                    pure[node] = None
                elif _mutates(node) and _root(node.args[0]) in pure:
                    changed.add(_root(node.args[0]))
            if not changed:
                return pure
            barred |= changed

    def _returned(self) -> list[Any]:
        (output,) = (node for node in self.program.graph.nodes if node.op == "output")
        self._check_returned(output)
        specs = self.program.graph_signature.output_specs
        found = [
            node
            for node, spec in zip(output.args[0], specs, strict=True)
            if spec.kind.name == "USER_OUTPUT" and isinstance(node, torch.fx.Node)
        ]
        if not found or any(node in self.sources for node in found):
            raise ArgumentError(
                f"{type(self.model).__name__} returns an input or a parameter as it is",
                "return tensors it computes",
                code="user_code",
            )
        return found

    def _check_returned(self, output: Any) -> None:
        """Raises ArgumentError where a model returns what no stage can send: a dict, or a number without rows."""
        called, spec = type(self.model).__name__, self.program.call_spec.out_spec
        if spec.type is dict:
            keys = [str(key) for key in spec.context]
            read = ", ".join(f'outputs["{key}"]' for key in keys[:4])
            raise ArgumentError(
                f"{called} returns a dict of {in_a_row([f'`{shorten(key)}`' for key in keys[:4]])}, and a loss is given"
                " a tensor or a tuple of them",
                f"return a tuple instead, ({read}), and read `outputs[0]` and so on in the loss",
                code="user_code",
            )
        signature = self.program.graph_signature.output_specs
        user = [node for node, one in zip(output.args[0], signature, strict=True) if one.kind.name == "USER_OUTPUT"]
        for at, node in enumerate(user):
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                raise ArgumentError(
                    f"{called} returns one number as output {at}, as a model does that computes its own loss, and not a"
                    " row for each sample",
                    "return what the loss is computed of, and give the loss as `loss`: a function of outputs and"
                    " targets",
                )

    def _layers(self, returned: list[Any]) -> list[list[Any]]:
        """The real operations, parted where a cut may come."""
        at = {node: number for number, node in enumerate(self.real)}
        closed: set[int] = set()  # positions before an operation
        for node, number in at.items():
            last = max([at[user] for user in node.users if user in at], default=number)
            last = len(at) if node in returned else last
            if not self._can_be_sent(node):
                closed |= set(range(number + 1, last + 1))
            if _mutates(node):
                root = _root(node.args[0])
                if root in self.sources or root not in at:
                    raise ArgumentError(
                        f"`{node.name}` changes what the model holds or is given{_line(node)}",
                        "keep what changes in the forward pass out of buffers, or make a copy of it first",
                    )
                closed |= set(range(at[root] + 1, number + 1))
        layers: list[list[Any]] = []
        for node, number in at.items():
            if number in closed and layers:
                layers[-1].append(node)
            else:
                layers.append([node])
        if not layers:
            raise ArgumentError(
                f"{type(self.model).__name__} computes nothing with weights", "give a model that learns"
            )
        return layers

    def _place_of(self, node: Any) -> Place:
        holds = any(self.sources.get(one, ("",))[0] == "parameter" for one in node.all_input_nodes)
        return Place(_path(node), has_weights=holds)

    def size(self, node: Any) -> int | _Size:
        """What a node that is a size comes to."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        offset = expression.subs(self.batch, 0)
        factor = expression.subs(self.batch, 1) - offset
        if expression - factor * self.batch - offset != 0 or not (factor.is_Integer and offset.is_Integer):
            raise ArgumentError(
                f"`{_id(node)}` is a size of {expression}{_line(node)}", "sizes grow in proportion to the batch, or not"
            )
        return _Size(int(factor), int(offset))

    def _can_be_sent(self, node: Any) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return False
        grown = [size for size in value.shape if isinstance(size, torch.SymInt)]
        return not grown or (len(grown) == 1 and grown[0].node.expr == self.batch)

    def _value(self, node: Any, value_of: dict[Any, str]) -> str:
        kind, number = self.sources.get(node, ("", 0))
        return f"input:{number}" if kind == "input" else value_of[node]

    def _add(
        self, network: Network, layer: str, operations: list[Any], gives: list[Any], value_of: dict[Any, str]
    ) -> nn.Module:
        """Adds a layer of these operations; returns its module."""
        builder = _Builder(self, set(operations))
        steps = [builder.step(one) for one in operations]
        takes = list(builder.takes)
        module = Steps(steps, [one.name for one in takes], [one.name for one in gives])
        module.register_buffer("kind", torch.zeros((), dtype=self.kind), persistent=False)
        for name, held in builder.held.items():
            if isinstance(held, nn.Module):
                module.add_module(name, held)
            elif isinstance(held, nn.Parameter):
                module.register_parameter(name, held)
            else:
                module.register_buffer(name, held, persistent=False)
        feeds = tuple(self._value(one, value_of) for one in takes)
        hidden = layer == _HELPERS
        network.put(Node(layer, Given(module), feeds, everywhere=hidden, has_weights=True, is_hidden=hidden))
        return module


def _inline(program: Any) -> None:
    """Puts what runs within `torch.no_grad()`, detached, and what runs without autocast where it is called."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        name = _name(node.target)
        if node.op != "call_function" or name not in {"wrap_with_set_grad_enabled", "wrap_with_autocast"}:
            continue
        inner = next(one for one in node.args if isinstance(one, torch.fx.Node) and one.op == "get_attr")
        given = node.args[node.args.index(inner) + 1 :]
        called = getattr(program.graph_module, inner.target)
        is_detached = name == "wrap_with_set_grad_enabled" and not node.args[0]
        copies: dict[Any, Any] = {}
        with graph.inserting_before(node):
            places = [one for one in called.graph.nodes if one.op == "placeholder"]
            copies |= dict(zip(places, given, strict=True))
            for one in called.graph.nodes:
                if one.op == "get_attr":
                    setattr(program.graph_module, f"{inner.target}_{one.target}", getattr(called, one.target))
                    copies[one] = graph.get_attr(f"{inner.target}_{one.target}")
                elif one.op == "call_function":
                    copies[one] = graph.node_copy(one, copies.__getitem__)
            (returned,) = (one.args[0] for one in called.graph.nodes if one.op == "output")
            outer = [copies[one] for one in returned]
            if is_detached:
                outer = [_detached(graph, one) for one in outer]
        for user in list(node.users):
            user.replace_all_uses_with(outer[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    if any(_name(node.target).startswith("wrap_with_") for node in graph.nodes):
        _inline(program)  # one within another


def _detached(graph: Any, node: Any) -> Any:
    made = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made


class _Builder:
    """Turns operations of a graph into steps of a layer, and collects what the layer holds and takes."""

    def __init__(self, graph: Graph, inside: set[Any]) -> None:
        self.graph, self.inside = graph, inside
        self.held: dict[str, Any] = {}
        self.takes: dict[Any, None] = {}
        self._named: dict[Any, str] = {}

    def step(self, node: Any) -> _Step:
        """The step of one operation; what has weights, draws or normalises becomes a module of its own."""
        name = _name(node.target)
        check_draws(node)
        make = _MODULES.get(str(node.target))
        module = make(self, node) if make is not None else None
        if module is not None:
            self.held[node.name] = module
            given = node.args[1] if name == "addmm" else node.args[0]
            return _Step(node.name, (self.filled(given),), {}, node.name)
        options = {key: self.filled(value) for key, value in node.kwargs.items()}
        value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == self.graph.kind
            and not any(_is_value(one) for one in node.all_input_nodes)
            and schema is not None
            and any(one.name == "dtype" for one in schema.arguments)
        ):
            options["dtype"] = _Kind()  # one of those that make tensors of nothing
        return _Step(node.target, self.filled(node.args), options, node.name)

    def tensor(self, node: Any, kind: str) -> Any:
        """The parameter or buffer that a node is, if it is one."""
        found, tensor = self.graph.sources.get(node, ("", None)) if isinstance(node, torch.fx.Node) else ("", None)
        return tensor if found == kind else None

    def filled(self, value: Any) -> Any:
        """An argument with names in place of values."""
        if isinstance(value, torch.fx.Node):
            return self._of(value)
        if isinstance(value, torch.device):
            return _Device()
        if isinstance(value, torch.dtype):
            return _Kind() if value == self.graph.kind else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.filled, value)) if type(value) in {list, tuple} else [*map(self.filled, value)]
        return value

    def _of(self, node: Any) -> Any:
        if node.op == "get_attr":
            return getattr(self.graph.program.graph_module, node.target)
        if not _is_value(node):
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


def _linear(builder: _Builder, node: Any) -> nn.Module | None:
    weight, bias = builder.tensor(node.args[1], "parameter"), None
    if len(node.args) > 2 and node.args[2] is not None:
        bias = builder.tensor(node.args[2], "parameter")
        weight = None if bias is None else weight
    if weight is None:
        return None
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight, made.bias = weight, bias
    return made


def _addmm(builder: _Builder, node: Any) -> nn.Module | None:
    bias, weight = (builder.tensor(node.args[at], "parameter") for at in (0, 2))
    return None if node.kwargs or bias is None or weight is None else halves.Addmm(bias, weight)


def _conv2d(builder: _Builder, node: Any) -> nn.Module | None:
    given = [*node.args, *(None, [1, 1], [0, 0], [1, 1], 1)[len(node.args) - 2 :]]
    weight = builder.tensor(given[1], "parameter")
    bias = builder.tensor(given[2], "parameter")
    if weight is None or (bias is None and given[2] is not None):
        return None
    stride, padding, dilation, groups = (tuple(one) if isinstance(one, list) else one for one in given[3:])
    channels = weight.shape[1] * groups, weight.shape[0]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    made = nn.Conv2d(*channels, tuple(weight.shape[2:]), bias=bias is not None, device="meta", **options)
    made.weight, made.bias = weight, bias
    return made


def _dropout(_: _Builder, node: Any) -> nn.Module | None:
    return _placed(nn.Dropout, node) if node.args[2] else None


def _feature_dropout(_: _Builder, node: Any) -> nn.Module | None:
    kinds = {3: nn.Dropout1d, 4: nn.Dropout2d, 5: nn.Dropout3d}
    return _placed(kinds[node.meta["val"].dim()], node) if node.args[2] else None


def _placed(kind: Callable[[float], nn.Module], node: Any) -> nn.Module:
    made = kind(node.args[1])
    made.place = _id(node)
    return made


def _batch_norm(builder: _Builder, node: Any) -> nn.Module | None:
    _, weight, bias, mean, variance, training, momentum, epsilon, _ = node.args
    if not training:
        return None
    given = [builder.tensor(one, "parameter") for one in (weight, bias)]
    kept = [builder.tensor(one, "buffer") for one in (mean, variance)]
    channels = node.args[0].meta["val"].shape[1]
    made = nn.BatchNorm2d(
        channels, epsilon, momentum, affine=weight is not None, track_running_stats=mean is not None, device="meta"
    )
    made.weight, made.bias = given
    if mean is not None:
        made.running_mean, made.running_var = kept
        made.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return made


_MODULES: dict[str, Callable[[_Builder, Any], nn.Module | None]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.conv2d.default": _conv2d,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.batch_norm.default": _batch_norm,
}


def _name(target: Any) -> str:
    """`add_` of `aten.add_.Tensor`."""
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def _id(node: Any) -> str:
    """Path of the module that an operation is in, and its own name."""
    path = _path(node)
    return f"{path}.{node.name}" if path else str(node.name)


def _path(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("L['self']").removeprefix(".") if stack else ""


def _is_value(node: Any) -> bool:
    """Whether it is a tensor, or a tuple of them; else it is a size, or nothing."""
    value = node.meta.get("val")
    return node.op == "get_attr" or isinstance(value, (torch.Tensor, list, tuple))


def _mutates(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


_MAY_BE_VIEWS = {"contiguous", "flatten", "reshape", "to", "type_as", "unflatten", "getitem"}


def _root(node: Any) -> Any:
    """The operation whose memory a view shows."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args:
        schema = getattr(node.target, "_schema", None)
        is_view = schema is not None and any(one.alias_info is not None for one in schema.returns)
        if not is_view and _name(node.target) not in _MAY_BE_VIEWS:
            break
        node = node.args[0]
    return node


def _draws(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_draws(node: Any) -> None:
    """Raises ArgumentError for an operation of a graph whose draws would follow from the plan."""
    name = _name(node.target)
    if name == "scaled_dot_product_attention":
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False)) | node.kwargs
        if given.get("dropout_p", 0.0) > 0:
            dropout.hidden(f"{_id(node)}{_line(node)}", "attention")
    elif name in {"lstm", "gru", "rnn_tanh", "rnn_relu"}:
        chance, is_training = node.args[5:7] if str(node.target).endswith(".input") else (0.0, False)
        if is_training and chance > 0:
            dropout.hidden(f"{_id(node)}{_line(node)}", name)
    elif _draws(node) and str(node.target) not in {"aten.dropout.default", "aten.feature_dropout.default"}:
        raise ArgumentError(
            f"`{_id(node)}` draws random numbers by `{name}`{_line(node)}, and they would follow from the plan",
            "draw by nn.Dropout, or give the numbers as an input",
            code="unsupported",
        )


def _line(node: Any) -> str:
    """Where the user has written an operation."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    return f" ({lines[-1]})" if lines else ""
