"""Properties of one operation of an exported graph: its name, its module, and whether it draws or changes values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from hpgo.errors import ArgumentError
from hpgo.runtime import dropout


def operation_name(target: Any) -> str:
    """Return the name of an operation without its overload, such as `add_` for `aten.add_.Tensor`."""
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def layer_id(node: Any) -> str:
    """Return the path of an operation's module, followed by the operation's own name."""
    path = module_path(node)
    return f"{path}.{node.name}" if path else str(node.name)


def module_path(node: Any) -> str:
    """Return the path of the module that an operation is in; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("L['self']").removeprefix(".") if stack else ""


def is_value(node: Any) -> bool:
    """Return whether a node is a tensor, a tuple of tensors or a computed size, and not another size or nothing."""
    value = node.meta.get("val")
    return node.op == "get_attr" or isinstance(value, (torch.Tensor, list, tuple)) or is_computed_size(node)


def is_computed_size(node: Any) -> bool:
    """Return whether a node is a number that follows from values, such as the number of tokens that an expert gets."""
    value = node.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and bool(free_unbacked_symbols(value))


def mutates(node: Any) -> bool:
    """Return whether an operation changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


# The schemas of these declare no alias, but they return their argument or a view of it where they can.
_MAY_BE_VIEWS = {"contiguous", "flatten", "reshape", "to", "type_as", "unflatten", "getitem"}


def root_of(node: Any) -> Any:
    """Return the operation whose memory a view shares; the node itself if it is no view."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args:
        schema = getattr(node.target, "_schema", None)
        is_view = schema is not None and any(one.alias_info is not None for one in schema.returns)
        if not is_view and operation_name(node.target) not in _MAY_BE_VIEWS:
            break
        node = node.args[0]
    return node


def draws(node: Any) -> bool:
    """Return whether an operation draws random numbers."""
    # Torch tags each operation that uses a generator, so new ones are found without a list of names.
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_draws(node: Any) -> None:
    """Raise ArgumentError for an operation that draws and has no module that draws by sample."""
    name = operation_name(node.target)
    if name in {"lstm", "gru", "rnn_tanh", "rnn_relu"}:
        # Packed sequences have another signature, in which dropout is not at these positions. Only `.input` overloads
        # are checked.
        chance, is_training = node.args[5:7] if str(node.target).endswith(".input") else (0.0, False)
        if is_training and chance > 0:
            dropout.hidden(f"{layer_id(node)}{source_line(node)}", name)
    # Torch tags attention as random, but a call that drops nothing draws nothing. One that does has a module.
    elif draws(node) and name != "scaled_dot_product_attention":
        raise ArgumentError(
            f"`{layer_id(node)}` draws random numbers by `{name}`{source_line(node)}, which would depend on the plan",
            "draw by nn.Dropout, or pass the random numbers as an input",
            code="unsupported",
        )


def source_line(node: Any) -> str:
    """Return the user's source line of an operation, in parentheses; empty if it is unknown."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    return f" ({lines[-1]})" if lines else ""
