"""Profiles in each format, and clusters: every input is read as either."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from guided import fuzz, reader, toy
from mutations import documents

import hpgo
from hpgo.model.formats import native

_MEASURED = Path(__file__).parent.parent / "profiling_results"


_COSTS = {"parameterSize": 400, "memoryUsageA": 8, "memoryUsageB": 800, "syncTimeFw": {"0": 0}, "syncTimeBw": {"1": 0}}
_PIPER = {
    "nodes": [
        {
            "id": at,
            "name": "block",
            "TMPCs": {
                "1": [
                    _COSTS | {"id": "vanilla", "timePerSample": 0.3},
                    _COSTS | {"id": "activation recomp", "timePerSample": 0.4},
                ]
            },
        }
        for at in range(2)
    ],
    "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 8}],
}
_PASS = {"fpgaLatency": 1.5, "size": 404, "supportedOnFpga": 1}
_DNN_PARTITIONING = {
    "nodes": [_PASS | {"id": at, "isBackwardNode": at % 2, "colorClass": at // 2} for at in range(4)],
    "edges": [{"sourceId": at, "destId": at + 2, "cost": 0.1, "size": 4} for at in range(2)],
}
_NODE = "autograd::engine::evaluate_function: "
_GRADIENT = "torch::autograd::AccumulateGrad"
_TRACE = {
    "traceEvents": [
        {"ph": "X", "tid": 1, "cat": kind, "name": name, "ts": start, "dur": took, "args": args}
        for kind, name, start, took, args in (
            ("python_function", "nn.Module: Model_0", 0, 20, {}),
            ("python_function", "nn.Module: Linear_0", 1, 8, {}),
            ("cpu_op", "aten::linear", 2, 4, {"Sequence number": 0}),
            ("cuda_runtime", "cudaLaunchKernel", 3, 1, {"correlation": 7}),
            ("python_function", "nn.Module: Linear_1", 10, 8, {}),
            ("cpu_op", "aten::linear", 11, 4, {"Sequence number": 1}),
            ("cpu_op", f"{_NODE}AddmmBackward0", 30, 8, {"Sequence number": 1}),
            ("cpu_op", "AddmmBackward0", 31, 6, {"Input Dims": [[4, 8]], "Input type": ["float"]}),
            ("cuda_runtime", "cudaLaunchKernel", 32, 1, {"correlation": 8}),
            ("cpu_op", f"{_NODE}{_GRADIENT}", 40, 4, {}),
            ("cpu_op", _GRADIENT, 41, 2, {"Input Dims": [[8, 8]], "Input type": ["float"]}),
            ("cpu_op", f"{_NODE}AddmmBackward0", 50, 8, {"Sequence number": 0}),
            ("kernel", "gemm", 60, 8, {"correlation": 7}),
            ("kernel", "gemm", 70, 8, {"correlation": 8}),
        )
    ]
}


def _told(profile: hpgo.Profile) -> hpgo.Profile:
    """`profile` with every key that may be left out."""
    layers = (
        replace(layer, input_gradient_s=(1.0,), weight_gradient_s=(1.5,), spread=0.02) for layer in profile.layers
    )
    return replace(
        profile,
        layers=tuple(layers),
        device="H100",
        machine="node-7",
        dtype="float32",
        date="2026-05-03",
        versions=(("torch", "2.15.0"),),
        tied_weights=(hpgo.TiedWeight((profile.layers[0].id, profile.layers[-1].id), 4),),
    )


def seeds() -> dict[str, bytes]:
    """The first layers of a file of measurements, and small files of each other kind."""
    profile = toy(3)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, memory="1 GB")
    measured = min(_MEASURED.glob("*.txt")).read_text(encoding="utf-8").splitlines()
    texts = {
        "pipedream": "\n".join(measured[:6]),
        "table": "id,forward_s,backward_s,activation_bytes,parameter_bytes\na,1 ms,2e-3,8,1 kB\n",
        "json": native.write_json(profile),
        "yaml": native.write_yaml(profile),
        "measured": native.write_yaml(_told(profile)),
        "piper": json.dumps(_PIPER),
        "torch": json.dumps(_TRACE),
        "dnn-partitioning": json.dumps(_DNN_PARTITIONING),
        "cluster": cluster.yaml(),
        "cluster-json": json.dumps(cluster.document()),
    }
    return {name: text.encode() for name, text in texts.items()}


if __name__ == "__main__":
    fuzz(
        seeds,
        documents,
        reader("input-pbs-4.txt", hpgo.read_profile),
        reader("input-pbs-4.txt", hpgo.Cluster.read),
    )
