"""Profiles in each format, and clusters: every input is read as either."""

from __future__ import annotations

import json
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


def seeds() -> dict[str, bytes]:
    """The first layers of a file of measurements, and small files of each other kind."""
    profile = toy(3)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, memory="1 GB")
    measured = min(_MEASURED.glob("*.txt")).read_text(encoding="utf-8").splitlines()
    texts = {
        "pipedream": "\n".join(measured[:6]),
        "json": native.write_json(profile),
        "yaml": native.write_yaml(profile),
        "piper": json.dumps(_PIPER),
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
