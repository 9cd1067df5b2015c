"""Plans as JSON: of `hpgo plan`, of `hpgo partition`, and the programs that they make."""

from __future__ import annotations

import json

from guided import fuzz, reader, toy
from mutations import documents

import hpgo


def seeds() -> dict[str, bytes]:
    """Small plans of each kind, on one line."""
    profile = toy(4)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, memory="1 GB")
    plan = hpgo.plan(profile, cluster, global_batch_size=4)
    compared = json.loads(hpgo.plan(profile, cluster, global_batch_size=4, schedule="auto").to_json(embed=False))
    compared["schedules"] = compared["schedules"][:2]  # of many, each with its plan
    texts = {
        "plan": plan.to_json(),
        "digests": plan.to_json(embed=False),
        "auto": json.dumps(compared),
        "chunked": hpgo.plan(profile, cluster, global_batch_size=4, schedule="zb_v").to_json(embed=False),
        "program": plan.program().to_json(),
        "chain": hpgo.partition(profile, cluster).to_json(),
    }
    return {name: json.dumps(json.loads(text)).encode() for name, text in texts.items()}


if __name__ == "__main__":
    fuzz(
        seeds,
        documents,
        reader("plan.json", lambda path: hpgo.Plan.read(path).to_json()),
        reader("plan.json", lambda path: hpgo.ChainPlan.read(path).to_json()),
        reader("plan.json", lambda path: hpgo.Program.read(path).to_json()),
    )
