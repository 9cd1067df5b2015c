"""No thread of a run is within torch while Python ends: it would abort the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="needs torch: pip install torch")

from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
    import contextlib
    import os
    import time
    from pathlib import Path
    import torch
    import hpgo
    from hpgo.runtime import InferencePipeline, Pipeline, Workload

    def gloo():
        names = []
        for one in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended since it was listed
                names.append((one / "comm").read_text().strip())
        return [name for name in names if "gloo" in name]

    def ended():
        # A thread that was told to end needs a processor to do so, which takes a while on a busy machine.
        for _ in range(200):
            if not gloo():
                return True
            time.sleep(0.1)
        return False

    def program(name, stages, **how):
        schedule = hpgo.schedule(name, ranks=len(stages), micro_batches=2)
        return hpgo.program(schedule, stages, pipeline_micro_batch_size=4, global_batch_size=8, **how)

    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)]
    workload = Workload(layers, torch.randn(4, 4), torch.randn(4, 4), torch.nn.functional.mse_loss)
    both, apart = [(["0", "1", "2"], [0, 1])], [(["0", "1"], [0]), (["2"], [1])]
    kept = []  # what a script still refers to when it ends
    for stages, how in (
        (apart, {}), (apart, {"shared_memory": False}), (apart, {"backend": "torch"}), (both, {}),
        (both, {"backend": "torch"}),
    ):
        plan = program("1f1b", stages, shard_optimizer=stages is both)
        with Pipeline(plan, workload, optimizer=lambda given: torch.optim.SGD(given, lr=0.1), **how) as pipeline:
            pipeline.step(*pipeline.example())
            assert gloo()
        kept.append(pipeline)
        assert ended(), (stages, how)
    for how in ({}, {"shared_memory": False}):
        with InferencePipeline(program("forward_only", apart), workload, **how) as pipeline:
            given = workload.example_inputs[0]
            for outputs in pipeline.infer([given] * 6, hold_samples_per_s=1e6):
                pass
            assert gloo()
        kept.append(pipeline)
        assert ended(), how
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_no_thread_of_gloo_outlives_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(textwrap.dedent(SCRIPT))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "ends.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **place, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


SERVER = """
    import sys, time
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    print("ready", flush=True)
    time.sleep(1000)
"""
SLOW = """
    import os, signal, sys, threading, time
    from torch.distributed import TCPStore
    from hpgo.runtime.failure_detection import Limits, Watch

    class Late:
        def __del__(self, sleep=time.sleep):
            sleep(2)  # while Python ends

    late = Late()
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
    watch = Watch(store, 0, 1, Limits(silence_s=0.2))
    watch.begin(print)
    time.sleep(1)
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    if os.fork() == 0:  # the store answers again once the other process ends
        time.sleep(3)
        os.kill(int(sys.argv[2]), signal.SIGCONT)
        os._exit(0)
    if sys.argv[3] == "end":
        watch.end()
"""


SILENT = """
    import sys, time
    from dataclasses import replace
    from torch.distributed import TCPStore
    from hpgo.runtime.failure_detection import Limits, Watch, key
    from hpgo.runtime.progress import HERE, born

    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
    first = int(sys.argv[2])
    store.set(key(0), replace(HERE.report(), pid=first, born=born(first), does="its work").written(0))
    HERE.begin(1)
    watch = Watch(store, 1, 2, Limits(silence_s=1.0))
    watch.begin(lambda error: print(error, flush=True) if watch.is_first_to_tell() else None)
    time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ends the process whose start time /proc has")
def test_a_silent_rank_that_keeps_the_store_is_named_after_it_was_ended() -> None:
    """Its store answers on, so that the ranks agree on the reason in it."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), port], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            command = [sys.executable, "-c", textwrap.dedent(SILENT), port, str(server.pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            assert server.wait(timeout=100) == -signal.SIGKILL
        finally:
            server.kill()
    assert done.returncode == 1
    assert done.stdout.startswith("rank 0 on ")
    assert done.stdout.endswith("last seen in its work: no sign of life for 1 s\n")


@pytest.mark.skipif(sys.platform == "win32", reason="stops a process")
@pytest.mark.parametrize("how", ["end", "leave"])
def test_a_process_ends_well_though_its_store_answers_late(how: str) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), port], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            command = [sys.executable, "-c", textwrap.dedent(SLOW), port, str(server.pid), how]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        finally:
            server.kill()
    assert (done.returncode, done.stderr) == (0, "")
