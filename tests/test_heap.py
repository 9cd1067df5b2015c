"""Runs on CPUs keep the memory that they free, so that passes don't wait for the system to clear it again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs torch: pip install torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")

FAULTS = """
import resource, statistics, torch
torch.set_num_threads(1)
import hpgo, hpgo.runtime
schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
layers = [f"linear-{number}" for number in range(1, 5)]
program = hpgo.program(schedule, [(layers, [0])], pipeline_micro_batch_size=64, global_batch_size=256)
with hpgo.runtime.Pipeline(program, "mlp:layers=4,width=512", device="cpu") as pipeline:
    faults = []
    for step in range(12):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        pipeline.step(*pipeline.example())
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
print(statistics.median_high(faults[6:]))
"""


def faults(**said: str) -> int:
    """Pages that a step waits for, the median of six after as many; a weight and its gradient have 256 each.

    One step alone proves little: now and then the heap grows by one more tensor.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=os.environ | said, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_after_some_steps_a_step_waits_for_hardly_a_page() -> None:
    assert faults() < 256


def test_what_users_say_about_the_heap_stays() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > 16 * 256
