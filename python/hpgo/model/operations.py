"""Arithmetic and memory traffic of a network's operations, forward and backward, from the shapes of their tensors.

Operations have the names and the meaning of ONNX. A matrix multiplication takes two floating-point operations for each
result value and summand. All other operations count only the bytes that they move, since devices compute much faster
than they move values. Nothing is fused: each operation reads its inputs and writes its outputs once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that operations pass on."""

    shape: tuple[int, ...]
    width: float
    """Bytes of one element."""
    trained: bool = False
    """Whether it depends on weights and therefore needs a gradient. Weights are trained, too."""
    is_weight: bool = False

    @property
    def size(self) -> int:
        """Number of elements in the tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Size of all elements in bytes."""
        return self.size * self.width


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of a network."""

    kind: str
    """Operator name in ONNX."""
    name: str
    inputs: tuple[str, ...]
    """Names of tensors. An omitted optional input has an empty name."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Network:
    """Operations in execution order, and their tensors by name."""

    operations: tuple[Operation, ...]
    """Operations without those that only derive constants from constants, such as the transpose of a weight."""
    tensors: Mapping[str, Tensor]
    roots: Mapping[str, str]
    """Name in the file for each weight that operations read. It differs for derived weights, such as transposes."""
    dtype: str
    """Number format of most weights."""


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic of one operation in each pass."""

    forward_flop: float
    forward_bytes: float
    backward_flop: float
    backward_bytes: float
    saved: tuple[str, ...]
    """Names of the tensors saved from the forward to the backward pass."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix multiplication. A side is None if the operation computes it internally."""

    flop: float
    left: str | None
    right: str | None


VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Expand", "Shape", "Size", "Constant"})
"""Operations that move no data."""
_ROWS = frozenset({"Gather", "GatherND", "GatherElements", "Slice", "Split"})
"""Operations that read only as much as they write, not their whole input."""
_LINEAR = frozenset(
    {"Add", "Sub", "Neg", "Sum", "Mean", "Concat", "Transpose", "Pad", "Cast", "AveragePool", "GlobalAveragePool",
     "ReduceSum", "ReduceMean", "Tile", "Resize", "Upsample", "DepthToSpace", "SpaceToDepth", "ScatterND",
     "ScatterElements", "Trilu", "Where"}
) | _ROWS | VIEWS  # fmt: skip
"""Operations whose gradients need no values of the forward pass."""
_BY_RESULT = frozenset({"Relu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp", "Sqrt", "Reciprocal", "Dropout"})
"""Operations whose gradients need only the result."""
_BRANCHES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_UNKNOWN = frozenset(
    {"DeformConv", "DFT", "STFT", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "StringNormalizer",
     "TfIdfVectorizer", "LinearAttention", "CausalConvWithState"}
)  # fmt: skip


def work(operation: Operation, tensors: Mapping[str, Tensor]) -> Work:
    """Return the arithmetic and traffic of `operation` for tensors of these shapes.

    The gradient of either side of a matrix multiplication is a multiplication of the other side with the gradient of
    the result, which has the same number of operations. So the backward pass takes twice the operations of the forward
    pass if both sides need gradients (docs/profiles.md).

    Raises ProfileError for an operation whose work does not follow from shapes.

    >>> shapes = {"x": Tensor((8, 64), 4, True), "w": Tensor((64, 16), 4, True, True), "y": Tensor((8, 16), 4, True)}
    >>> done = work(Operation("MatMul", "fc", ("x", "w"), ("y",), {}), shapes)
    >>> done.forward_flop, done.backward_flop, done.forward_bytes, done.saved
    (16384, 32768.0, 6656.0, ('x',))
    """
    check_kind(operation)
    inputs = [name for name in operation.inputs if name]
    outputs = [name for name in operation.outputs if name]
    out_bytes = math.fsum(tensors[name].bytes for name in outputs)
    if operation.kind in VIEWS:
        return Work(0, 0.0, 0, 0.0, ())
    products = _products(operation, tensors)
    in_bytes = out_bytes if operation.kind in _ROWS else math.fsum(tensors[name].bytes for name in inputs)
    forward_flop = sum(product.flop for product in products)
    if not any(tensors[name].trained for name in outputs):
        return Work(forward_flop, in_bytes + out_bytes, 0, 0.0, ())
    if products:
        flop, moved, saved = _backward(products, inputs, out_bytes, tensors)
        return Work(forward_flop, in_bytes + out_bytes, flop, moved, saved)
    wanted = [name for name in inputs if tensors[name].trained]
    gradients = out_bytes if operation.kind in _ROWS else math.fsum(tensors[name].bytes for name in wanted)
    # Save what the gradient needs: nothing, the result, or all inputs except scalars.
    if operation.kind in _LINEAR:
        kept: list[str] = []
    elif operation.kind in _BY_RESULT:
        kept = outputs[:1]
    else:
        kept = [name for name in inputs if tensors[name].size > 1]
    read = math.fsum(tensors[name].bytes for name in kept)
    saved = tuple(name for name in kept if not tensors[name].is_weight)
    return Work(0, in_bytes + out_bytes, 0, out_bytes + read + gradients, saved)


def check_kind(operation: Operation) -> None:
    """Raise ProfileError for an operation whose work depends on values or is not known."""
    where = f"operation `{operation.name or operation.kind}`"
    if operation.kind in _BRANCHES:
        raise ProfileError(
            f"{where} is `{operation.kind}`: what runs in it depends on values",
            "export the model without control flow, or measure it: `hpgo profile`",
        )
    if operation.kind in _UNKNOWN:
        raise ProfileError(
            f"{where} is `{operation.kind}`, whose work does not follow from shapes",
            "export the model without it, or measure it: `hpgo profile`",
        )


def _products(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    if operation.kind not in _PRODUCTS:
        return []
    try:
        return _PRODUCTS[operation.kind](operation, tensors)
    except (KeyError, IndexError, ValueError):
        raise ProfileError(
            f"operation `{operation.name or operation.kind}` (`{operation.kind}`) lacks an input or its size",
            "export the model again",
        ) from None


def _backward(
    products: Sequence[_Product], inputs: Sequence[str], out_bytes: float, tensors: Mapping[str, Tensor]
) -> tuple[float, float, tuple[str, ...]]:
    """Return operations, bytes and saved tensors of the gradients of matrix multiplications."""
    flop, moved, saved = 0.0, 0.0, dict[str, None]()
    for product in products:
        for own, other in ((product.left, product.right), (product.right, product.left)):
            if own is not None and not tensors[own].trained:
                continue
            flop += product.flop
            moved += out_bytes + (0.0 if own is None else tensors[own].bytes)
            if other is not None:
                # Weights stay in memory anyway, so only activations count as saved.
                moved += tensors[other].bytes
                saved |= {} if tensors[other].is_weight else {other: None}
    sides = {side for product in products for side in (product.left, product.right)}
    # The gradient of a bias is a sum over the gradient of the result, whose read is counted above.
    moved += math.fsum(tensors[name].bytes for name in inputs if name not in sides and tensors[name].trained)
    return flop, moved, tuple(saved)


def _matmul(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    left, right = operation.inputs[:2]
    terms = tensors[left].shape[-1] if tensors[left].shape else 1
    return [_Product(2 * terms * tensors[operation.outputs[0]].size, left, right)]


def _gemm(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    left, right = operation.inputs[:2]
    terms = tensors[left].shape[0 if operation.attributes.get("transA") else 1]
    return [_Product(2 * terms * tensors[operation.outputs[0]].size, left, right)]


def _conv(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    data, kernel = operation.inputs[:2]
    terms = math.prod(tensors[kernel].shape[1:])
    return [_Product(2 * terms * tensors[operation.outputs[0]].size, data, kernel)]


def _conv_transpose(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    data, kernel = operation.inputs[:2]
    return [_Product(2 * math.prod(tensors[kernel].shape[1:]) * tensors[data].size, data, kernel)]


def _recurrent(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    data, weights, again = operation.inputs[:3]
    # The layout is steps × samples or samples × steps. Either gives the same number of rows.
    rows = math.prod(tensors[data].shape[:2])
    return [
        _Product(2 * rows * tensors[weights].size, data, weights),
        _Product(2 * rows * tensors[again].size, None, again),
    ]


def _attention(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    query, key, value = operation.inputs[:3]
    length: float = tensors[key].shape[-2]
    if len(operation.inputs) > 4 and (past := operation.inputs[4]):
        length += tensors[past].shape[-2]
    elif operation.attributes.get("is_causal"):
        # A query attends to the keys up to its own position, and to at most `window` of them. Take the average over
        # queries.
        window = min(int(str(operation.attributes.get("window") or length)), length)
        length = window - window * (window - 1) / (2 * length)
    return [
        _Product(2 * tensors[query].size * length, query, key),
        _Product(2 * tensors[operation.outputs[0]].size * length, None, value),
    ]


def _einsum(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    given = str(operation.attributes.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, name in zip(given, operation.inputs, strict=False):
        if "." in letters or len(letters) != len(tensors[name].shape):
            raise ProfileError(
                f"operation `{operation.name or 'Einsum'}` has dimensions without letters in its equation",
                "export it with a letter for every dimension, or measure it: `hpgo profile`",
            )
        for letter, size in zip(letters, tensors[name].shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    if len(operation.inputs) != 2:
        return []
    return [_Product(2 * math.prod(sizes.values()), *operation.inputs)]


_PRODUCTS: dict[str, Callable[[Operation, Mapping[str, Tensor]], list[_Product]]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
    "Einsum": _einsum,
}
