"""Count the exit codes of runs that succeed: every rank must exit with 0.

    python research/ends.py [--runs 500] [--beside 2] [--launcher torchrun] [--kind training]

A *training* run has three ranks, each of which trains three steps with a `Pipeline`. An *inference* run is
`pipeedge-run --hold-rate` with two ranks, of which rank 0 keeps the store. Python ends in each rank as in any script,
which is where a thread within torch aborts the process. Runs with an exit code other than 0 are listed with what they
printed.

By default, ranks fork from this process, which has loaded torch, because loading takes most of such a run. With
`--launcher torchrun`, torchrun and `pipeedge-run` start them as you would; a run then takes 20 s of a core. `--beside`
runs several at once, so that ranks wait for a core while they end.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch._dynamo  # each rank would load it at its first meta tensor
import torch.distributed as dist

import hpgo
import hpgo.cli.pipeedge_run
import hpgo.runtime.infer.pipeline
import hpgo.runtime.pipeedge.ranks
import hpgo.runtime.train.pipeline
from hpgo.cli import entry
from hpgo.runtime import Pipeline, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

TRAINING_RANKS, INFERENCE_RANKS = 3, 2
STEPS = 3
MAX_RUN_S = 200.0
"""A run that takes longer counts as one that does not end. A good one takes a few seconds, also on a busy machine."""
KINDS = ("training", "inference")
INFERENCE = "-m facebook/deit-tiny-distilled-patch16-224 -b 6 -u 2 -pt 1,24,25,48 --hold-rate 1000"
"""Options of `pipeedge-run`. Three micro-batches suffice, since the end of the run matters."""


def train() -> None:
    """Train as one rank of a launcher."""
    layers = [torch.nn.Linear(4, 4) for _ in range(TRAINING_RANKS)]
    workload = Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), torch.nn.functional.mse_loss)
    schedule = hpgo.schedule("1f1b", ranks=TRAINING_RANKS, micro_batches=2)
    stages = [([str(rank)], [rank]) for rank in range(TRAINING_RANKS)]
    program = hpgo.program(schedule, stages, pipeline_micro_batch_size=2, global_batch_size=4)
    with Pipeline(program, workload, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)) as pipeline:
        for _ in range(STEPS):
            pipeline.step(*pipeline.example())


@dataclass
class Run:
    """A run that was started."""

    kind: str
    pids: list[int]
    printed: Path
    begin_s: float
    store: int | None = None
    """Process id of the store, if it lives in none of the ranks."""

    def codes(self) -> list[int]:
        """Wait for all processes and return their exit codes, -N for signal N. Kill those that don't end."""
        found: dict[int, int] = {}
        while len(found) < len(self.pids):
            for pid in [one for one in self.pids if one not in found]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    found[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() - self.begin_s > MAX_RUN_S:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
        return [found[pid] for pid in self.pids]


def begin(kind: str, folder: Path, number: int, *, with_torchrun: bool) -> Run:
    """Start a run, whose output goes to a file of `folder`."""
    run = Run(kind, [], folder / f"{kind}-{number}.txt", time.monotonic())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    world = TRAINING_RANKS if kind == "training" else INFERENCE_RANKS
    commands = [
        ["pipeedge-run", str(rank), str(world), "--port", str(port), "--monitor", str(folder), *INFERENCE.split()]
        for rank in range(world)
    ]
    if kind == "inference" or with_torchrun:
        listener.close()  # rank 0 or torchrun opens it
    if with_torchrun:
        if kind == "training":
            launcher = ["torchrun", "--standalone", "--nproc-per-node", str(world), __file__, "--rank"]
            commands = [launcher]
        with run.printed.open("w") as out:
            run.pids = [subprocess.Popen(command, stdout=out, stderr=out).pid for command in commands]  # noqa: S603
        return run
    for rank in range(world):
        if kind == "training":
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
            run.pids.append(_fork(train, place, run.printed, listener))
        else:
            run.pids.append(_fork(entry.pipeedge_run, {}, run.printed, listener, commands[rank]))
    if kind == "training":
        # As torchrun does, keep the store in a process that outlives the ranks.
        run.store = _fork(lambda: _keep_store(listener), {}, run.printed)
    listener.close()
    return run


def _fork(
    work: Callable[[], None],
    variables: dict[str, object],
    printed: Path,
    listener: socket.socket | None = None,
    command: list[str] | None = None,
) -> int:
    """Run `work` in a new process, and then end it as Python ends. Return its process id."""
    pid = os.fork()
    if pid:
        return pid
    if listener is not None:
        listener.close()
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = command or sys.argv
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    work()
    sys.exit(0)


def _keep_store(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )  # fmt: skip
    while store is not None:
        time.sleep(MAX_RUN_S)


def main() -> int:
    """Run, print the counts, and return 1 if a rank has exited with another code than 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="of each kind")
    parser.add_argument("--beside", type=int, default=2, help="number of runs at once")
    parser.add_argument("--launcher", choices=["fork", "torchrun"], default="fork")
    parser.add_argument("--kind", choices=KINDS, action="append", help="both without it")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        train()
        return 0
    # At its end, each rank would search the objects of torch for garbage, which takes most of its time.
    gc.freeze()
    folder = Path(tempfile.mkdtemp())
    kinds = asked.kind or KINDS
    started = [kind for _ in range(asked.runs) for kind in kinds]
    ended: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for first in range(0, len(started), asked.beside):
        chosen = list(enumerate(started[first : first + asked.beside], start=first))
        runs = [begin(kind, folder, number, with_torchrun=asked.launcher == "torchrun") for number, kind in chosen]
        for run in runs:
            codes = run.codes()
            ended[run.kind] += 1
            if any(codes):
                bad[run.kind] += 1
                print(f"{run.printed.stem}: exit codes {codes}\n{run.printed.read_text()}", flush=True)
            else:
                run.printed.unlink()
        if first // asked.beside % 25 == 24:
            print(f"{dict(ended)}, other than 0: {dict(bad)}", flush=True)
    for kind in kinds:
        print(f"{kind}, {asked.launcher}: {ended[kind]} runs, {bad[kind]} with an exit code other than 0")
    return int(bad.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
