"""Network of any model, from its graph by `torch.export`, with a layer for each operation that can be cut off.

Operations run in the order of the graph. A cut is possible between two operations unless a value that is still needed
can't be sent row by row, is a tuple, or is changed in place later. The operations between two possible cuts form one
layer, or part of one if layers are modules or blocks. Operations that depend only on inputs, such as masks and
positions, are no layers: each stage that needs them computes them. Sizes that grow with the batch are computed from the
number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hpgo.errors import ArgumentError
from hpgo.runtime.graph_nodes import (
    draws,
    is_computed_size,
    is_value,
    layer_id,
    module_path,
    mutates,
    operation_name,
    root_of,
    source_line,
)
from hpgo.runtime.graph_steps import Size, StepBuilder, Steps
from hpgo.runtime.grouping import Place, grouped
from hpgo.runtime.modules import Given, Network, NetworkLayer
from hpgo.runtime.tracing import inline, trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hpgo.runtime.trees import Tree

_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}
_HELPERS = "inputs' own"
"""Id of the hidden layer with all operations that depend only on inputs."""


def exported(model: nn.Module, tree: Tree, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> Graph:
    """Export `model`, for inputs of the structure `tree`, whose first dimension is a batch of any size from 1.

    With `dtype`, the operations are those of `model.to(dtype)`, but weights stay as they are. So what the model's code
    computes in float32 regardless of its weights, such as positions and norms, stays float32.

    Return the graph to build networks from.

    Raises ArgumentError if torch can't export the model, naming the user's line to blame, and if the model draws random
    numbers other than by dropout or changes a buffer.
    """
    program, batch, returned = trace(model, tree, inputs, dtype)
    return Graph(model, program, batch, inputs, returned)


class Graph:
    """An exported program, as the source of networks."""

    def __init__(self, model: nn.Module, program: Any, batch: Any, inputs: Sequence[Tensor], outputs: Tree) -> None:
        self.model, self.program, self.batch = model, program, batch
        self.outputs = outputs
        """Structure of what the model returns."""
        self.dtypes = {one.dtype for one in (*model.parameters(), *model.buffers(), *inputs) if one.is_floating_point()}
        """Floating types of weights, buffers and inputs."""
        self.sources: dict[Any, tuple[str, Any]] = {}
        """For each placeholder: `input` and its number, `parameter` and its tensor, or `buffer` and its tensor."""
        inline(program)
        self._place()
        self.operations = [node for node in program.graph.nodes if node.op == "call_function" and not self._skips(node)]
        self.pure = self._pure()
        self.real = [node for node in self.operations if node not in self.pure and is_value(node)]
        self._mixed = self._single_numbers()

    def network(self, by: str) -> Network:
        """Return a network with a layer for the operations between two cuts, or for each module or block.

        `by` is one of `grouping.GRAINS`.
        """
        returned = self._returned()
        layers, network = self._layers(returned), Network()
        ids = [layer_id(nodes[-1]) for nodes in layers]
        if by != "op":
            ids, layers = grouped(layers, [[self._place_of(node) for node in nodes] for nodes in layers], by)
        where = {node: number for number, nodes in enumerate(layers) for node in nodes}
        gives: list[list[Any]] = [[] for _ in layers]
        helped: list[Any] = []
        for node in [*self.real, *self.pure]:
            readers = {where.get(user) for user in node.users if user in where}
            # A layer returns only what other layers or the caller read, because returned tensors may have to be sent.
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
            module = self._add(network, ids[number], nodes, gives[number], value_of)
            for name, tensor in module.named_parameters():
                held.setdefault(id(tensor), []).append((ids[number], name))
        # A parameter that several layers use is one tensor under several names: a tied weight.
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
                self.sources[node] = ("buffer", self._buffer(spec.target))

    def _buffer(self, name: str) -> Any:
        # The program holds stand-ins of buffers on the meta device, so ask the model first.
        try:
            return self.model.get_buffer(name)
        except AttributeError:
            held = self.program.state_dict.get(name)
            return self.program.constants[name] if held is None else held

    def _skips(self, node: Any) -> bool:
        """Return whether to skip an operation: a check by `torch.export`, or a batch count.

        `batch_norm` keeps batch counts itself.
        """
        name = operation_name(node.target)
        return name in _CHECKS or (
            name == "add_" and node.args[0].op == "placeholder" and node.args[0].name.endswith("num_batches_tracked")
        )

    def _pure(self) -> dict[Any, None]:
        """Return the operations that depend only on inputs and constants, and whose results stay unchanged."""
        barred: set[Any] = set()
        # An operation may look pure until a later one changes its result in place. Repeat without such results until
        # none is left.
        while True:
            pure: dict[Any, None] = {}
            changed = set()
            for node in self.operations:
                name = operation_name(node.target)
                # Layers pass on tensors only. So each layer computes the sizes that it needs.
                if not is_value(node) or is_computed_size(node):
                    continue
                follows = all(
                    one in pure
                    or not is_value(one)
                    or one.op == "get_attr"
                    or self.sources.get(one, ("",))[0] in {"input", "buffer"}
                    for one in node.all_input_nodes
                )
                if follows and node not in barred and not draws(node) and name not in {"dropout", "batch_norm"}:
                    pure[node] = None
                elif mutates(node) and root_of(node.args[0]) in pure:
                    changed.add(root_of(node.args[0]))
            if not changed:
                return pure
            barred |= changed

    def _single_numbers(self) -> set[Any]:
        """Return the operations that combine samples to a single number, such as a model's own loss.

        Each replica has the number of its own samples, so no stage can send it to the replicas of the next.
        """
        inputs = {node for node, (kind, _) in self.sources.items() if kind == "input"}
        rows, numbers = set(), set()
        for node in self.real:
            values = [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
            if any(isinstance(size, torch.SymInt) for one in values for size in one.shape):
                rows.add(node)
            elif all(one.ndim == 0 for one in values) and (
                any(one in rows or one in numbers or one in inputs for one in node.all_input_nodes)
            ):
                numbers.add(node)
        return numbers

    def _returned(self) -> list[Any]:
        (output,) = (node for node in self.program.graph.nodes if node.op == "output")
        specs = self.program.graph_signature.output_specs
        found = [
            node
            for node, spec in zip(output.args[0], specs, strict=True)
            if spec.kind.name == "USER_OUTPUT" and isinstance(node, torch.fx.Node)
        ]
        if not found or any(node in self.sources for node in found):
            raise ArgumentError(
                f"{type(self.model).__name__} returns an input or a parameter unchanged",
                "return tensors that the model computes",
                code="user_code",
            )
        return found

    def _layers(self, returned: list[Any]) -> list[list[Any]]:
        """Return the operations with weights or data of the batch, split wherever a cut is possible."""
        at = {node: number for number, node in enumerate(self.real)}
        # A value that can't be sent closes all positions from its operation to its last reader.
        closed: set[int] = set()  # positions before an operation
        for node, number in at.items():
            last = max([at[user] for user in node.users if user in at], default=number)
            last = len(at) if node in returned else last
            if not self._can_be_sent(node):
                closed |= set(range(number + 1, last + 1))
            if mutates(node):
                root = root_of(node.args[0])
                if root in self.sources or root not in at:
                    raise ArgumentError(
                        f"`{node.name}` changes a buffer, parameter or input of the model in place{source_line(node)}",
                        "copy the tensor before you change it, and keep what changes out of buffers",
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
                f"{type(self.model).__name__} has no operation with weights", "give a model with parameters"
            )
        return layers

    def _place_of(self, node: Any) -> Place:
        holds = any(self.sources.get(one, ("",))[0] == "parameter" for one in node.all_input_nodes)
        return Place(module_path(node), has_weights=holds)

    def size(self, node: Any) -> int | Size:
        """Return the value of a node that is a size. Raise ArgumentError unless it is linear in the batch size."""
        return self.size_of(node.meta.get("val"), node)

    def size_of(self, value: Any, node: Any) -> int | Size:
        """Return a size at a node. Raise ArgumentError unless it is linear in the batch size."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        offset = expression.subs(self.batch, 0)
        # Evaluate the symbolic size at 0 and 1 to get the offset and the factor, then check that it is linear indeed.
        factor = expression.subs(self.batch, 1) - offset
        if expression - factor * self.batch - offset != 0 or not (factor.is_Integer and offset.is_Integer):
            raise ArgumentError(
                f"`{layer_id(node)}` has the size {expression}{source_line(node)}, but sizes must be linear in the"
                " batch",
                "compute the size from the batch by a constant factor and offset",
            )
        return Size(int(factor), int(offset))

    def _can_be_sent(self, node: Any) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or node in self._mixed:
            return False
        grown = [size for size in value.shape if isinstance(size, torch.SymInt)]
        return not grown or (len(grown) == 1 and grown[0].node.expr == self.batch)

    def _value(self, node: Any, value_of: dict[Any, str]) -> str:
        kind, number = self.sources.get(node, ("", 0))
        return f"input:{number}" if kind == "input" else value_of[node]

    def _add(
        self, network: Network, layer: str, operations: list[Any], gives: list[Any], value_of: dict[Any, str]
    ) -> nn.Module:
        """Add a layer with these operations to `network`. Return its module."""
        builder = StepBuilder(self, set(operations))
        steps = [builder.step(one) for one in operations]
        takes = list(builder.takes)
        module = Steps(steps, [one.name for one in takes], [one.name for one in gives])
        # An empty buffer that follows `.to()`. It tells the layer its current device, even if it has no weights.
        module.register_buffer("place", torch.zeros(()), persistent=False)
        for name, held in builder.held.items():
            if isinstance(held, nn.Module):
                module.add_module(name, held)
            elif isinstance(held, nn.Parameter):
                module.register_parameter(name, held)
            else:
                module.register_buffer(name, held, persistent=False)
        feeds = tuple(self._value(one, value_of) for one in takes)
        hidden = layer == _HELPERS
        network.put(NetworkLayer(layer, Given(module), feeds, everywhere=hidden, has_weights=True, is_hidden=hidden))
        return module
