"""Timelines as JSON, from `Timeline.to_json`."""

from __future__ import annotations

from guided import fuzz, reader, toy
from mutations import documents

import hpgo


def runs() -> dict[str, hpgo.Timeline]:
    """Small timelines with everything in them that timelines may hold, by name."""
    memory = hpgo.StageBytes(weights_bytes=3.0, activation_bytes=2.0, output_bytes=1.0)
    profile = toy(3)
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=10, inter_gbit_s=10, memory="1 GB")
    return {
        "v": hpgo.simulate(
            hpgo.schedule("zb_v", ranks=2, micro_batches=2),
            transfer_s=0.25, gradient_sync_s=0.5, memory=memory, memory_cap_bytes=64.0,
        ),
        "fused": hpgo.simulate(hpgo.schedule("1f1b_overlap", ranks=2, micro_batches=3), iterations=2),
        "plan": hpgo.plan(profile, cluster, global_batch_size=4).timeline(),
    }  # fmt: skip


def seeds() -> dict[str, bytes]:
    """The same as text."""
    return {name: timeline.to_json().encode() for name, timeline in runs().items()}


if __name__ == "__main__":
    fuzz(seeds, documents, reader("run.timeline.json", lambda path: hpgo.Timeline.read(path).to_json()))
