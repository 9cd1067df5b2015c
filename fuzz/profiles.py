"""Profiles in each format, and clusters: every input is read as either."""

from __future__ import annotations

import json
from pathlib import Path

from guided import fuzz, reader, toy
from mutations import documents

import hpgo
from hpgo.model.formats import native

_MEASURED = Path(__file__).parent.parent / "profiling_results"


def seeds() -> dict[str, bytes]:
    """The first layers of a file of measurements, and small files of each other kind."""
    profile = toy(3)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, memory="1 GB")
    measured = min(_MEASURED.glob("*.txt")).read_text(encoding="utf-8").splitlines()
    texts = {
        "pipedream": "\n".join(measured[:6]),
        "json": native.write_json(profile),
        "yaml": native.write_yaml(profile),
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
