"""What an operation of a network has to do, forward and backward, from the shapes of its tensors.

Names and meaning of operations are those of ONNX. A matrix product costs two floating-point operations for each value
of its result and each term of the sum behind it; all others are told by the bytes that they move alone, since devices
do far more operations in a second than they move values. Nothing is fused: each operation reads what goes in and
writes what comes out, once.
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
    """What goes from operation to operation."""

    shape: tuple[int, ...]
    width: float
    """Bytes of a value."""
    trained: bool = False
    """Whether it depends on weights, so that a gradient of it is wanted; weights do."""
    is_weight: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """Of all of them."""
        return self.size * self.width


@dataclass(frozen=True, slots=True)
class Operation:
    """One node of a network."""

    kind: str
    """Its name in ONNX's operator sets."""
    name: str
    inputs: tuple[str, ...]
    """Tensors; an empty name where an optional one is left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Network:
    """Operations, and tensors by name."""

    operations: tuple[Operation, ...]
    """Without those that make constants of constants, such as a transposed weight."""
    tensors: Mapping[str, Tensor]
    roots: Mapping[str, str]
    """For each weight that operations read, the one in the file that it was made of; mostly itself."""
    dtype: str
    """What most weights are of."""


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation does in each pass."""

    forward_flop: float
    forward_bytes: float
    backward_flop: float
    backward_bytes: float
    saved: tuple[str, ...]
    """Tensors that it keeps from the forward to the backward pass."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of two tensors; None for one that is made on the way, of what goes in."""

    flop: float
    left: str | None
    right: str | None


VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Expand", "Shape", "Size", "Constant"})
"""Operations that move nothing."""
_ROWS = frozenset({"Gather", "GatherND", "GatherElements", "Slice", "Split"})
"""They read as much as they write, not all that goes in."""
_LINEAR = frozenset(
    {"Add", "Sub", "Neg", "Sum", "Mean", "Concat", "Transpose", "Pad", "Cast", "AveragePool", "GlobalAveragePool",
     "ReduceSum", "ReduceMean", "Tile", "Resize", "Upsample", "DepthToSpace", "SpaceToDepth", "ScatterND",
     "ScatterElements", "Trilu", "Where"}
) | _ROWS | VIEWS  # fmt: skip
"""Their gradients need no values of the forward pass."""
_BY_RESULT = frozenset({"Relu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp", "Sqrt", "Reciprocal", "Dropout"})
"""Their gradients are told from the result."""
_BRANCHES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_UNKNOWN = frozenset(
    {"DeformConv", "DFT", "STFT", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "StringNormalizer",
     "TfIdfVectorizer", "LinearAttention", "CausalConvWithState"}
)  # fmt: skip


def work(operation: Operation, tensors: Mapping[str, Tensor]) -> Work:
    """What `operation` does with tensors of these shapes.

    Of a product, the gradient of either side is a product of the other side and the gradient of the result, with as
    many operations: two for one, where both sides have a gradient (docs/profiles.md).

    Raises ProfileError for an operation that this can't be told of.

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
    """Raises ProfileError for an operation whose work depends on values, or is not known."""
    where = f"operation `{operation.name or operation.kind}`"
    if operation.kind in _BRANCHES:
        raise ProfileError(
            f"{where} is `{operation.kind}`: what runs in it depends on values",
            "export the model without control flow, or measure it: `hpgo profile`",
        )
    if operation.kind in _UNKNOWN:
        raise ProfileError(
            f"{where} is `{operation.kind}`, whose work can't be told from shapes",
            "export the model without it, or measure it: `hpgo profile`",
        )


def _products(operation: Operation, tensors: Mapping[str, Tensor]) -> list[_Product]:
    if operation.kind not in _PRODUCTS:
        return []
    try:
        return _PRODUCTS[operation.kind](operation, tensors)
    except (KeyError, IndexError, ValueError):
        raise ProfileError(
            f"operation `{operation.name or operation.kind}` (`{operation.kind}`) lacks an operand, or a size of one",
            "export the model again",
        ) from None


def _backward(
    products: Sequence[_Product], inputs: Sequence[str], out_bytes: float, tensors: Mapping[str, Tensor]
) -> tuple[float, float, tuple[str, ...]]:
    """Operations, bytes, and saved tensors of gradients of products."""
    flop, moved, saved = 0.0, 0.0, dict[str, None]()
    for product in products:
        for own, other in ((product.left, product.right), (product.right, product.left)):
            if own is not None and not tensors[own].trained:
                continue
            flop += product.flop
            moved += out_bytes + (0.0 if own is None else tensors[own].bytes)
            if other is not None:
                moved += tensors[other].bytes
                saved |= {} if tensors[other].is_weight else {other: None}
    sides = {side for product in products for side in (product.left, product.right)}
    # Biases and the like, whose gradient is a sum of the result's.
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
    rows = math.prod(tensors[data].shape[:2])  # steps × samples, in either layout
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
        # The keys up to a query's own place, but no more than `window`, on average.
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
                f"operation `{operation.name or 'Einsum'}` sums over dimensions that have no letters",
                "write all of them into its equation, or measure it: `hpgo profile`",
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
