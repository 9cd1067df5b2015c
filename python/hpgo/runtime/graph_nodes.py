"""Questions about one operation of an exported graph: its name, its module, whether it draws or changes values."""

from __future__ import annotations

from typing import Any

import torch

from hpgo.errors import ArgumentError
from hpgo.runtime import dropout


def operation_name(target: Any) -> str:
    """`add_` of `aten.add_.Tensor`."""
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def layer_id(node: Any) -> str:
    """Path of the module that an operation is in, and its own name."""
    path = module_path(node)
    return f"{path}.{node.name}" if path else str(node.name)


def module_path(node: Any) -> str:
    """Return the path of the module that an operation is in; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("L['self']").removeprefix(".") if stack else ""


def is_value(node: Any) -> bool:
    """Whether it is a tensor, or a tuple of them; else it is a size, or nothing."""
    value = node.meta.get("val")
    return node.op == "get_attr" or isinstance(value, (torch.Tensor, list, tuple))


def mutates(node: Any) -> bool:
    """Whether an operation changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


_MAY_BE_VIEWS = {"contiguous", "flatten", "reshape", "to", "type_as", "unflatten", "getitem"}


def root_of(node: Any) -> Any:
    """The operation whose memory a view shows."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and node.args:
        schema = getattr(node.target, "_schema", None)
        is_view = schema is not None and any(one.alias_info is not None for one in schema.returns)
        if not is_view and operation_name(node.target) not in _MAY_BE_VIEWS:
            break
        node = node.args[0]
    return node


def draws(node: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_draws(node: Any) -> None:
    """Raises ArgumentError for an operation of a graph whose draws would follow from the plan."""
    name = operation_name(node.target)
    if name == "scaled_dot_product_attention":
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), node.args, strict=False)) | node.kwargs
        if given.get("dropout_p", 0.0) > 0:
            dropout.hidden(f"{layer_id(node)}{source_line(node)}", "attention")
    elif name in {"lstm", "gru", "rnn_tanh", "rnn_relu"}:
        chance, is_training = node.args[5:7] if str(node.target).endswith(".input") else (0.0, False)
        if is_training and chance > 0:
            dropout.hidden(f"{layer_id(node)}{source_line(node)}", name)
    elif draws(node) and str(node.target) not in {"aten.dropout.default", "aten.feature_dropout.default"}:
        raise ArgumentError(
            f"`{layer_id(node)}` draws random numbers by `{name}`{source_line(node)}, and they would follow from the"
            " plan",
            "draw by nn.Dropout, or give the numbers as an input",
            code="unsupported",
        )


def source_line(node: Any) -> str:
    """Where the user has written an operation."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    return f" ({lines[-1]})" if lines else ""
