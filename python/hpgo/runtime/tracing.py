"""Tracing of a model with `torch.export`, with errors that name the line of the user's model."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, HpgoError
from hpgo.runtime.graph_nodes import operation_name
from hpgo.runtime.trees import Tree, arguments, plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


def trace(
    model: nn.Module, tree: Tree, inputs: Sequence[Tensor], dtype: torch.dtype | None = None
) -> tuple[Any, Any, Tree]:
    """Return the exported program of a model, the symbol of its batch size, and the structure of what it returns.

    The symbol is None if no size depends on the batch. `tree` is the structure of the inputs. The program takes and
    returns flat tensors. With `dtype`, it is that of the model after `model.to(dtype)`, on inputs cast like weights.

    Raises ArgumentError if torch can't export the model, or if it returns anything but tensors and constants.
    """
    # Torch takes a dimension of 1 for a constant, so the batch must have at least 2 rows to be symbolic.
    rows = max(2, len(inputs[0]))
    examples = tuple(one if len(one) == rows else one[:1].expand(rows, *one.shape[1:]) for one in inputs)
    if dtype is not None:
        examples = tuple(one.to(dtype) if one.is_floating_point() else one for one in examples)
    batch = torch.export.Dim("batch", min=1, max=2**20)
    was_training = model.training
    # Export in training mode, so that dropout and batch normalization are in the graph.
    model.train()
    try:
        with _silence_torch(), _stand_ins(model, dtype), _flat(model, tree) as returned:
            program = torch.export.export(
                model, examples, dynamic_shapes=(tuple({0: batch} for _ in examples),), strict=False
            )
    except HpgoError:
        raise
    except Exception as error:  # torch or the user's module may raise any error
        # If the model fails without export, too, its own error is the more helpful one.
        _check_example(model, tree, inputs)
        if "Constraints violated (batch)" in str(error):
            raise ArgumentError(
                f"torch can't export {type(model).__name__}: its code takes the number of samples for a constant",
                "write `x.shape[0]` for `len(x)` and for stored numbers of samples, or give the model as a list of"
                " modules or a hpgo.runtime.Network",
                code="unsupported",
            ) from error
        raise ArgumentError(
            f"torch can't export {type(model).__name__}{_blame(error)}: {type(error).__name__}: "
            f"{shorten(_first_line(error), 200)}",
            "change that line so that it branches on no values and keeps a row for each sample, or give the model "
            "as a list of modules or a hpgo.runtime.Network",
            code="unsupported",
        ) from error
    finally:
        model.train(was_training)
    user = [node for node in program.graph.nodes if node.op == "placeholder"][-len(examples) :]
    symbol = user[0].meta["val"].shape[0]
    return program, symbol.node.expr if isinstance(symbol, torch.SymInt) else None, returned[-1]


@contextmanager
def _flat(model: nn.Module, tree: Tree) -> Iterator[list[Tree]]:
    """Make the model take and return flat tensors. Yield a list that gets the structure of each result.

    Torch flattens nested inputs and outputs itself, but dataclasses only if they were registered before, and constants
    become part of its checks.
    """
    kind, own = type(model), vars(model).pop("forward", None)
    found: list[Tree] = []

    def forward(self: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, named = arguments(tree.build(tensors))
        result = kind.forward(self, *given, **named) if own is None else own(*given, **named)
        structure, flat = Tree.of(plain(result), f"what {kind.__name__} returns")
        found.append(structure)
        return flat

    # Replace the method of the class, not of the object: torch calls it on its own proxy of the model.
    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    try:
        yield found
    finally:
        model.__class__ = kind
        if own is not None:
            model.forward = own


@contextmanager
def _stand_ins(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Put tensors without memory in the place of weights and buffers that are on meta or not of `dtype`.

    Models ask for the device and the type of tensors. On meta they may take a branch whose operations the CPU lacks.
    """
    places = [
        (held, name, tensor)
        for one in model.modules()
        for held in (one._parameters, one._buffers)
        for name, tensor in held.items()
        if tensor is not None
        and (tensor.is_meta or (dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype))
    ]
    found: dict[int, Any] = {}  # by identity, so that tied weights stay one tensor
    if places:
        shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes):
            for _, _, tensor in places:
                if id(tensor) not in found:
                    found[id(tensor)] = _stand_in(tensor, dtype)
    try:
        for held, name, tensor in places:
            held[name] = found[id(tensor)]
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _stand_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Suppress what torch writes to stderr beside an exception: its logs and the whole graph."""
    disabled, captured = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(captured):
            yield
        sys.stderr.write(captured.getvalue())
    finally:
        logging.disable(disabled)


def _check_example(model: nn.Module, tree: Tree, inputs: Sequence[Tensor]) -> None:
    """Raise ArgumentError if the model can't even run on its example."""
    if any(one.is_meta for one in model.parameters()):
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given, named = arguments(tree.build(inputs))
            model.eval()(*given, **named)  # so that running statistics stay as they are
    except Exception as error:  # the user's module may raise any error
        shapes = ", ".join(str(tuple(one.shape)) for one in inputs)
        raise ArgumentError(
            f"{type(model).__name__} can't run on its example inputs of {shapes}{_blame(error)}: "
            f"{type(error).__name__}: {shorten(_first_line(error), 200)}",
            "give as `example_inputs` the tensors that its `forward` takes, in their order or as a dict by name, with a"
            " row for each sample",
            code="user_code",
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


def _blame(error: BaseException) -> str:
    """Describe the last line of the traceback that belongs neither to torch nor to hpgo; empty if there is none."""
    theirs = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(traceback.__file__).parent))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *theirs)) or "site-packages/transformers" in frame.filename
    ]
    return f", for line {frames[-1].lineno} of {frames[-1].filename}, `{frames[-1].line}`" if frames else ""


def inline(program: Any) -> None:
    """Replace calls of subgraphs by their operations.

    Those under `torch.no_grad()` are detached. Those without autocast are unchanged.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        name = operation_name(node.target)
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
    if any(operation_name(node.target).startswith("wrap_with_") for node in graph.nodes):
        inline(program)  # subgraphs can be nested


def _detached(graph: Any, node: Any) -> Any:
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached
