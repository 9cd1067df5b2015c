"""Reader of ONNX files: operations in execution order, with the shapes of all tensors at a batch size.

Values of weights are not read, so weights in separate files may be missing. Parsing and shape inference are done by the
`onnx` package (`pip install onnx`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from hpgo.base.files import as_path, read_bytes
from hpgo.base.memory_check import check_room
from hpgo.base.messages import did_you_mean, shorten
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.operations import Network, Operation, Tensor, check_kind

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAX_BYTES = 2**31
"""Largest file in bytes, which is the limit of protobuf messages."""
_KEPT_BYTES = 4096
"""Largest initializer in bytes whose values may determine shapes. Larger ones are weights."""
_MAX_VALUES = 10**18
_IN_MEMORY = 3
"""Memory needed to read a file, as a multiple of its size."""
_WIDTHS = {
    1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16, 16: 2,
    17: 1, 18: 1, 19: 1, 20: 1, 21: 0.5, 22: 0.5, 23: 0.5,
}  # fmt: skip
"""Bytes of an element by the number of its ONNX type."""
_FLOATS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
"""Types of trained weights by the number of the ONNX type."""
_DOMAINS = {"", "ai.onnx"}
_LEARNED = {
    "Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "BatchNormalization", "LayerNormalization",
    "InstanceNormalization", "Gather",
}  # fmt: skip
"""Operations whose constant inputs are weights."""
_SYMBOLS = "export it with fixed sizes, or set them: `dims={…}`, on the command line `--dim NAME=N`"
_OUTSIDE = "export it with its weights in separate files, which hpgo does not need"
_SIMPLIFY = "export it with fixed sizes, or fold the constants of shapes: `python -m onnxsim in.onnx out.onnx`"


_Kind: TypeAlias = tuple[int, tuple[int, ...]]
"""Number of the element type, and shape."""


class OnnxFile:
    """The network in a file, for any batch size."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        """Read a file.

        Raises ProfileError for a file that is not an ONNX model, or has operations whose work does not follow from
        shapes. Raises ArgumentError if `onnx` is not installed.
        """
        path = as_path(source, ProfileError)
        self._onnx = _package()
        self.file = str(path)
        self.name = path.stem
        self._model = self._read(path)
        graph = self._model.graph
        self._check_nodes(graph)
        self._initializers = {one.name: one for one in graph.initializer}
        self._inputs = [one for one in graph.input if one.name not in self._initializers]
        self._constants = self._made_of_constants(graph)
        self.batch_size = self._fixed()
        """Batch size that the inputs fix; None if the file leaves it open."""
        self._strip()

    def at(self, batch_size: int, dims: Mapping[str, int], width: float | None) -> Network:
        """Return the network for `batch_size` samples, with `dims` for other open sizes.

        `width` is the bytes per value of a trained type; None means the types in the file.

        Raises ProfileError for sizes that are open, and for shapes that depend on values.
        """
        # Each batch size needs a copy, because sizes are written into the inputs.
        model = type(self._model)()
        model.CopyFrom(self._model)
        self._set_sizes(model.graph, batch_size, dims)
        # A fixed batch size is replaced in the inputs. If the file repeats it in other places, such as a reshape,
        # shapes no longer fit or the outputs keep the old size.
        replaced = self.batch_size is not None and self.batch_size != batch_size
        try:
            inferred = self._inferred(model)
            shapes = self._shapes(inferred.graph)
        except ProfileError:
            if replaced:
                raise self._elsewhere(batch_size) from None
            raise
        if replaced and not all(shapes.get(one.name, (0, ()))[1][:1] == (batch_size,) for one in inferred.graph.output):
            raise self._elsewhere(batch_size)
        return self._network(inferred.graph, shapes, width)

    def _read(self, path: Path) -> Any:
        try:
            size = path.stat().st_size
        except (OSError, ValueError):
            size = 0  # the attempt to read it reports the reason
        if size > MAX_BYTES:
            raise ProfileError(f"{path} has more than {MAX_BYTES >> 20} MiB", _OUTSIDE, code="too_large")
        check_room(f"reading {path}", _IN_MEMORY * size, _OUTSIDE)
        data = read_bytes(path, ProfileError, maximum=MAX_BYTES, hint="name an ONNX file")
        from google.protobuf.message import DecodeError

        try:
            model = self._onnx.load_model_from_string(data)
        except (DecodeError, ValueError, RuntimeError):
            raise self._none() from None
        if not model.HasField("graph") or not model.graph.node:
            raise self._none()
        if model.functions:
            model = self._inlined(model)
        return model

    def _none(self) -> ProfileError:
        return ProfileError(
            f"{self.file} is not an ONNX file, or is incomplete",
            "export it again, for example with `torch.onnx.export`",
            code="damaged_file",
        )

    def _inlined(self, model: Any) -> Any:
        """Return the model with calls of its functions replaced by their operations."""
        from onnx import inliner

        try:
            return inliner.inline_local_functions(model)
        except Exception as failure:  # noqa: BLE001 -- native code raises undocumented types
            raise ProfileError(f"{self.file}: its functions don't fit: {_first_line(failure)}", _SIMPLIFY) from None

    def _check_nodes(self, graph: Any) -> None:
        """Raise ProfileError for an unknown operation, or for a node that reads a tensor before it is written."""
        if not all(isinstance(name, str) for name in _names(graph)):
            raise ProfileError(f"{self.file}: a name in it is not UTF-8", "export the model again", code="damaged_file")
        if graph.sparse_initializer:
            raise ProfileError(f"{self.file}: weights are sparse", "export dense ones")
        known = {one.name for one in (*graph.initializer, *graph.input)}
        for at, node in enumerate(graph.node, start=1):
            where = f"{self.file}, node {at} (`{shorten(node.name or node.op_type)}`)"
            if node.domain not in _DOMAINS:
                raise ProfileError(
                    f"{where}: `{shorten(node.domain)}.{shorten(node.op_type)}` is not an operation of ONNX",
                    "export the model without it, or measure it: `hpgo profile`",
                    code="unsupported",
                )
            for name in node.input:
                if name and name not in known:
                    raise ProfileError(
                        f"{where}: no node before it writes `{shorten(name)}`",
                        "export the model again, with its nodes in execution order",
                    )
            for name in node.output:
                if name and name in known:
                    raise ProfileError(
                        f"{where}: `{shorten(name)}` is written twice", "export the model again", code="duplicate"
                    )
                known.add(name)
            try:
                check_kind(Operation(node.op_type, shorten(node.name), (), (), {}))
            except ProfileError as error:
                raise error.as_kind(ProfileError, f"{self.file}: {error.message}") from None
            # Work around an endless loop in onnx's shape inference for such an equation.
            if node.op_type == "Einsum" and any(b"-" in one.s.replace(b"->", b"", 1) for one in node.attribute):
                raise ProfileError(f"{where}: its equation has a `-` outside of `->`", "export the model again")

    def _strip(self) -> None:
        """Delete data that shapes don't depend on: values of weights, and shapes of another batch size."""
        graph = self._model.graph
        for one in graph.initializer:
            if one.ByteSize() > _KEPT_BYTES:
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                    one.ClearField(field)
            one.ClearField("external_data")
            one.ClearField("data_location")
        del graph.value_info[:]
        for one in graph.output:
            if one.type.HasField("tensor_type"):
                one.type.tensor_type.ClearField("shape")

    def _made_of_constants(self, graph: Any) -> set[str]:
        """Return the names of tensors that do not depend on any input."""
        constants = set(self._initializers)
        for node in graph.node:
            if all(name in constants for name in node.input if name):
                constants |= {name for name in node.output if name}
        return constants

    def _fixed(self) -> int | None:
        firsts = [one.type.tensor_type.shape.dim[:1] for one in self._inputs]
        return next((size.dim_value for sizes in firsts for size in sizes if size.HasField("dim_value")), None)

    def _set_sizes(self, graph: Any, batch_size: int, dims: Mapping[str, int]) -> None:
        """Write sizes into the shapes of inputs. A fixed batch size is replaced in all inputs that have it first."""
        known = dict(dims)
        names = {one.name for one in self._inputs}
        inputs = [one for one in graph.input if one.name in names]
        for one in inputs:
            if not one.type.HasField("tensor_type") or not one.type.tensor_type.HasField("shape"):
                raise ProfileError(f"{self.file}: the shape of the input `{shorten(one.name)}` is open", _SYMBOLS)
            sizes = one.type.tensor_type.shape.dim
            if sizes and sizes[0].dim_param:
                known.setdefault(sizes[0].dim_param, batch_size)
        open_names = {size.dim_param for one in inputs for size in one.type.tensor_type.shape.dim if size.dim_param}
        for name in dims:
            if name not in open_names:
                raise ArgumentError(
                    f"{self.file}: no input has an open size called `{shorten(name)}`",
                    did_you_mean(name, open_names) if open_names else "leave it out: none is open",
                    code="unknown_name",
                )
        for one in inputs:
            for at, size in enumerate(one.type.tensor_type.shape.dim):
                if size.HasField("dim_value"):
                    if at == 0 and size.dim_value == self.batch_size:
                        size.dim_value = batch_size
                elif size.dim_param in known:
                    size.dim_value = known[size.dim_param]
                elif at == 0:
                    size.dim_value = batch_size
                else:
                    called = f", called `{shorten(size.dim_param)}`," if size.dim_param else ""
                    raise ProfileError(
                        f"{self.file}: size {at + 1}{called} of the input `{shorten(one.name)}` is open", _SYMBOLS
                    )

    def _inferred(self, model: Any) -> Any:
        from onnx import shape_inference

        # Exporters compute targets of reshapes from other shapes. Only propagated values (`data_prop`) resolve them.
        try:
            return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        except Exception as failure:  # noqa: BLE001 -- native code raises undocumented types
            raise ProfileError(f"{self.file}: shapes don't fit: {_first_line(failure)}", _SIMPLIFY) from None

    def _shapes(self, graph: Any) -> dict[str, _Kind]:
        """Return the type and shape of each tensor for which both are known."""
        found = {one.name: (one.data_type, tuple(one.dims)) for one in graph.initializer}
        for one in (*graph.input, *graph.value_info, *graph.output):
            kind = one.type.tensor_type
            if one.name in found or not one.type.HasField("tensor_type") or not kind.HasField("shape"):
                continue
            if all(size.HasField("dim_value") for size in kind.shape.dim):
                found[one.name] = (kind.elem_type, tuple(size.dim_value for size in kind.shape.dim))
        return found

    def _elsewhere(self, batch_size: int) -> ProfileError:
        """Return an error for a batch size that the file also fixes outside of its inputs."""
        return ProfileError(
            f"{self.file} fixes the batch size {self.batch_size or 0} in more places than its inputs, so it can't be"
            f" {batch_size}",
            "export it with an open first size (`dynamic_shapes`, `dynamic_axes`), or leave the batch size out",
        )

    def _network(self, graph: Any, shapes: Mapping[str, _Kind], width: float | None) -> Network:
        nodes = list(graph.node)
        roots = self._weights(nodes, shapes)
        tensors = {name: self._tensor(name, shapes, width, trained=True, is_weight=True) for name in roots}
        tensors |= {
            one.name: self._tensor(one.name, shapes, width)
            for one in (*graph.initializer, *self._inputs)
            if one.name not in tensors
        }
        read = {name for node in nodes for name in node.input} | {one.name for one in graph.output}
        operations = []
        for node in nodes:
            trained = any(tensors[name].trained for name in node.input if name)
            outputs = tuple(name if name in read else "" for name in node.output)
            for name in outputs:
                if name and name not in shapes:
                    raise ProfileError(
                        f"{self.file}: the shape of `{shorten(name)}`, which `{shorten(node.name or node.op_type)}`"
                        f" ({shorten(node.op_type)}) makes, is not known before it runs",
                        _SIMPLIFY,
                    )
                if name and name not in tensors:
                    tensors[name] = self._tensor(name, shapes, width, trained=trained)
            if not self._constants.issuperset(name for name in node.output if name):
                attributes = dict(_attributes(node))
                operations.append(Operation(node.op_type, _path(node), tuple(node.input), outputs, attributes))
        return Network(tuple(operations), tensors, roots, self._usual_dtype(roots, shapes))

    def _weights(self, nodes: Sequence[Any], shapes: Mapping[str, _Kind]) -> dict[str, str]:
        """Return the weights that operations read, each with the weight in the file from which it is derived.

        Files without weights create them with a single value right before they are read.
        """
        roots = {
            one.name: one.name
            for one in self._initializers.values()
            # A single number is a constant of the code, such as an epsilon.
            if one.data_type in _FLOATS and math.prod(one.dims) > 1
        }
        learned = {name for node in nodes if node.op_type in _LEARNED for name in node.input}
        for node in nodes:
            made_of = next((roots[name] for name in node.input if name in roots), None)
            for name in node.output:
                kind, shape = shapes.get(name, (0, ()))
                if name not in self._constants or kind not in _FLOATS or math.prod(shape) < 2:
                    continue
                if made_of is not None:
                    roots[name] = made_of
                elif node.op_type == "ConstantOfShape" and name in learned:
                    roots[name] = name
        if not roots:
            raise ProfileError(f"{self.file} has no weights", "export a model whose weights are initializers")
        return roots

    def _usual_dtype(self, roots: Mapping[str, str], shapes: Mapping[str, _Kind]) -> str:
        """Return the number format of most weight elements."""
        counts: Counter[str] = Counter()
        for name in set(roots.values()):
            kind, shape = shapes[name]
            counts[_FLOATS[kind]] += min(_MAX_VALUES, math.prod(shape))
        return max(sorted(counts), key=counts.__getitem__)

    def _tensor(
        self,
        name: str,
        shapes: Mapping[str, _Kind],
        width: float | None,
        *,
        trained: bool = False,
        is_weight: bool = False,
    ) -> Tensor:
        kind, shape = shapes[name]
        if min(shape, default=0) < 0 or math.prod(shape) > _MAX_VALUES:
            raise ProfileError(
                f"{self.file}: `{shorten(name)}` has the shape {shorten(str(shape))}", "export the model again"
            )
        if kind not in _WIDTHS:
            raise ProfileError(
                f"{self.file}: values of `{shorten(name)}` have type {kind}, which is not numeric",
                "export the part of the model that is trained",
            )
        is_float = kind in _FLOATS
        own = width if width is not None and is_float else _WIDTHS[kind]
        return Tensor(shape, own, trained and is_float, is_weight)


def _names(graph: Any) -> Iterator[object]:
    """Yield all names in the graph. Names that are not valid UTF-8 are bytes."""
    for one in (*graph.initializer, *graph.input, *graph.output):
        yield one.name
    for one in (*graph.input, *graph.output):
        yield from (size.dim_param for size in one.type.tensor_type.shape.dim)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (one.name for one in node.attribute)
        yield from (text for one in node.metadata_props for text in (one.key, one.value))


def _path(node: Any) -> str:
    """Return the module of a node if the exporter recorded it, or else the node's name."""
    for one in node.metadata_props:
        if one.key == "pkg.torch.onnx.name_scopes":
            scopes = re.findall(r"'([^']*)'", one.value)
            if len(scopes) > 1 and scopes[-2]:
                return str(scopes[-2])
    return str(node.name).strip("/").replace("/", ".")


def _attributes(node: Any) -> Iterator[tuple[str, object]]:
    """Yield the attributes on which an operation's work depends."""
    for one in node.attribute:
        if one.name == "equation":
            yield one.name, one.s.decode(errors="replace")
        elif one.name == "transA":
            yield one.name, one.i


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return shorten(lines[0], maximum=200) if lines else type(failure).__name__


def _package() -> Any:
    try:
        import onnx
    except ImportError:
        raise ArgumentError(
            "reading ONNX files needs the package `onnx`, which is not installed",
            "install it: `pip install onnx`",
            code="missing_package",
        ) from None
    return onnx
