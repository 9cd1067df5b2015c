"""Profiles of tens of thousands of layers: deadlines, Ctrl-C and memory hold for them as for any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import hpgo
from hpgo.model.states import cut_points

PLANNED = """
import json, sys, time
import hpgo
count, time_limit_s = int(sys.argv[1]), float(sys.argv[2]) or None
profile = hpgo.Profile.chain(
    "long", batch_size=1,
    forward_s=[1e-3 * (1 + index % 7) for index in range(count)],
    backward_s=[2e-3 * (1 + index % 5) for index in range(count)],
    activation_bytes=[1e5 * (1 + index % 3) for index in range(count)],
    parameter_bytes=[1e5] * count,
)
print("asked", flush=True)
started_s = time.monotonic()
told = {}
try:
    plan = hpgo.plan(profile, hpgo.Cluster.preset("dapple-a"), global_batch_size=64, time_limit_s=time_limit_s)
    told = {"step_s": plan.step_s, "gap": plan.optimality_gap, "cuts": plan.cuts}
except hpgo.errors.HpgoError as error:
    told = {"error": str(error)}
except KeyboardInterrupt:
    told = {"interrupted": True}
told["took_s"] = time.monotonic() - started_s
# The most memory of this program alone: getrusage counts that of the process it was forked from, too.
with open("/proc/self/status") as status:
    told["bytes"] = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps(told))
"""


def planning(count: int, time_limit_s: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PLANNED, str(count), str(time_limit_s)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_ten_thousand_layers_keep_their_deadline_and_stay_small() -> None:
    with planning(10_000, 2.0) as process:
        out, _ = process.communicate(timeout=120)
    told = json.loads(out.splitlines()[-1])
    assert "error" in told or (told["gap"] < 0.05 and "of 10001 cut points" in told["cuts"])
    assert told["took_s"] < 2.5 + 5  # half a second on a machine with nothing else to do
    assert told["bytes"] < 1e9


def test_a_hundred_thousand_layers_end_on_ctrl_c_and_fit_memory() -> None:
    with planning(100_000, 0.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        time.sleep(1.5)
        sent_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        ended_s = time.monotonic() - sent_s
    told = json.loads(out.splitlines()[-1])
    assert told.get("interrupted") or "step_s" in told
    assert ended_s < 0.5 + 10  # half a second on a machine with nothing else to do
    assert told["bytes"] < 2e9


def test_all_cuts_of_a_chain_are_found_however_long_it_is() -> None:
    count = 2_500
    column = [1.0] * count
    profile = hpgo.Profile.chain(
        "long", batch_size=1, forward_s=column, backward_s=column, activation_bytes=column, parameter_bytes=column
    )
    found = cut_points(profile, bound=100)
    assert found.exact
    assert [len(state.layers) for state in found.states] == list(range(count + 1))


def test_a_long_chain_is_cut_where_little_is_sent() -> None:
    count = 6_000
    profile = hpgo.Profile.chain(
        "long",
        batch_size=1,
        forward_s=[1e-3] * count,
        backward_s=[2e-3] * count,
        activation_bytes=[1e3 if index % 3 == 1 else 1e9 for index in range(count)],
        parameter_bytes=[1e5] * count,
    )
    cluster = hpgo.Cluster.of(nodes=4, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10, memory="1000 TB")
    plan = hpgo.plan(profile, cluster, global_batch_size=16, pipeline_micro_batch_size=1, time_limit_s=4)
    assert "cut points" in plan.cuts
    assert len(plan.stages) == 4
    assert all(stage.transfer_busy_s < 1e-3 for stage in plan.stages)
    whole_s = 16 * 3e-3 * count / 4
    assert plan.step_s == pytest.approx(whole_s, rel=0.4)
