"""Networks in ONNX files, estimated. They need the package `onnx`."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING

import onnx
from google.protobuf import json_format
from guided import fuzz, reader
from mutations import injured, tree
from onnx import TensorProto, helper

import hpgo

if TYPE_CHECKING:
    from pathlib import Path


def _model(nodes: list[onnx.NodeProto], shape: list[int | str | None], weights: dict[str, list[int]]) -> bytes:
    made = [
        helper.make_tensor(name, TensorProto.FLOAT, dims, [0.5] * math.prod(dims)) for name, dims in weights.items()
    ]
    shapes = helper.make_tensor("shape", TensorProto.INT64, [2], [0, -1])
    data = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [data], [result], [*made, shapes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return bytes(model.SerializeToString())


def seeds() -> dict[str, bytes]:
    """A convolution with what follows it, and a recurrent layer beside a sum of products."""
    node = helper.make_node
    convolution = [
        node("Conv", ["x", "kernel"], ["a"], name="conv"),
        node("Relu", ["a"], ["b"]),
        node("Reshape", ["b", "shape"], ["c"]),
        node("Gemm", ["c", "weight", "bias"], ["d"], transB=1),
        node("Softmax", ["d"], ["y"]),
    ]
    recurrent = [
        node("LSTM", ["x", "w", "r"], ["a", "", "h"], hidden_size=2),
        node("Squeeze", ["a"], ["b"]),
        node("Einsum", ["b", "v"], ["c"], equation="sbh,hk->sbk"),
        node("Add", ["c", "c"], ["y"]),
    ]
    return {
        "convolution": _model(convolution, ["batch", 1, 3, 3], {"kernel": [2, 1, 2, 2], "weight": [3, 8], "bias": [3]}),
        "recurrent": _model(recurrent, [4, 3, 2], {"w": [1, 8, 2], "r": [1, 8, 2], "v": [2, 2]}),
    }


def mutate(data: bytes, maximum: int, seed: int) -> bytes:
    """A file changed as a tree of messages, or at its bytes."""
    chance = random.Random(seed)
    if chance.random() < 0.8:
        model = onnx.ModelProto()
        try:
            model.ParseFromString(data)
            document = json.loads(json_format.MessageToJson(model))
            changed = json_format.ParseDict(tree(document, chance), onnx.ModelProto(), ignore_unknown_fields=True)
            return bytes(changed.SerializeToString())[:maximum]
        except Exception:  # noqa: BLE001 -- what protobuf raises where a tree is no such message
            return injured(data, maximum, chance)
    return injured(data, maximum, chance)


def estimate(path: Path) -> hpgo.Profile:
    """At two batch sizes, in a type of its own."""
    return hpgo.estimate(path, device="a100", dtype="bfloat16", batch_sizes=(3, 4))


def estimate_as_it_is(path: Path) -> hpgo.Profile:
    """At the file's own, operation by operation."""
    return hpgo.estimate(path, device="a100", by="op")


if __name__ == "__main__":
    fuzz(seeds, mutate, reader("x.onnx", estimate), reader("x.onnx", estimate_as_it_is))
