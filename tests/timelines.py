"""Timelines for the tests of pictures."""

from __future__ import annotations

import hpgo


def timeline(
    name: str = "1f1b",
    *,
    ranks: int = 4,
    micro_batches: int = 8,
    latency_s: float = 0.0,
    unit_s: float = 1.0,
    memory: bool = False,
) -> hpgo.Timeline:
    """Schedule `name` with forwards of 1 and backwards of 2 units of time; memory in GB, capped at 16."""
    return hpgo.simulate(
        hpgo.schedule(name, ranks=ranks, micro_batches=micro_batches),
        forward_s=unit_s,
        backward_s=2 * unit_s,
        latency_s=latency_s * unit_s,
        memory=hpgo.StageBytes(weights_bytes=4e9, activation_bytes=1e9, output_bytes=1e6) if memory else None,
        memory_cap_bytes=16e9 if memory else None,
    )
