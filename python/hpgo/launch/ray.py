"""Ray: a script for Ray Train, with one worker a machine that starts the machine's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.messages import safe_repr
from hpgo.base.quoting import in_python
from hpgo.errors import ArgumentError
from hpgo.launch.job import check_job

if TYPE_CHECKING:
    from hpgo.launch.job import LaunchJob

_SCRIPT = '''
import os
import socket
import subprocess
import time

import ray
from ray.train import ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def start_ranks(config):
    """Runs on each machine: starts its ranks, and ends them all when one fails."""
    machine = get_context().get_world_rank()
    with socket.socket() as probe:
        probe.bind(("", 0))
        here = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(probe.getsockname()[1])}
    environment = os.environ | broadcast_from_rank_zero(here) | {
        "WORLD_SIZE": str(config["machines"] * config["devices"]),
        "LOCAL_WORLD_SIZE": str(config["devices"]),
        "GROUP_RANK": str(machine),
        "GROUP_WORLD_SIZE": str(config["machines"]),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    ranks = []
    try:
        for device in range(config["devices"]):
            rank = {"RANK": str(machine * config["devices"] + device), "LOCAL_RANK": str(device)}
            ranks.append(subprocess.Popen(config["command"], env=environment | rank, stdin=subprocess.DEVNULL))
        codes = [None]
        while None in codes:
            time.sleep(0.1)
            codes = [process.poll() for process in ranks]
            for device, code in enumerate(codes):
                if code:
                    raise RuntimeError(f"rank {machine * config['devices'] + device} failed with exit code {code}")
    finally:
        for process in ranks:
            process.terminate()
        for process in ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    DataParallelTrainer(
        start_ranks,
        train_loop_config=JOB,
        scaling_config=ScalingConfig(
            num_workers=JOB["machines"],
            use_gpu=USE_GPU,
            resources_per_worker=RESOURCES,
            placement_strategy="STRICT_SPREAD",
        ),
    ).fit()
'''


def ray(job: LaunchJob, *, resource: str | None = "GPU") -> str:
    """A Python script that hands the job to Ray Train, version 2 (Ray 2.51 or later).

    A worker has a whole machine, each on another one, and starts the machine's ranks with torchrun's environment
    variables, so that the same training script runs under all targets.

    Args:
        job: what shall run; all machines alike.
        resource: Ray's name for devices: `GPU`, or one that the cluster defines; None asks for CPUs alone.

    Raises ArgumentError if machines differ.

    >>> import hpgo
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = ray(LaunchJob.of(plan, "train.py"))
    >>> [line for line in text.splitlines() if line.startswith("RESOURCES")]
    ["RESOURCES = {'CPU': 8, 'GPU': 8}"]
    """
    check_job(job)
    node = job.need_equal("Ray Train")
    if resource is not None and (not isinstance(resource, str) or not resource):
        raise ArgumentError(f"the resource is {safe_repr(resource)}", "give it as Ray knows it, like `GPU`")
    resources = {"CPU": node.ranks} | ({} if resource in {None, "CPU"} else {resource: node.ranks})
    settings = {"machines": len(job.nodes), "devices": node.ranks, "command": list(job.command)}
    return "\n".join(
        [
            *job.header(
                "start it with `ray job submit -- python FILE`, or with `python FILE` on a machine of the cluster"
            ),
            f"JOB = {in_python(settings)}",
            f"USE_GPU = {resource == 'GPU'}",
            f"RESOURCES = {in_python(resources)}",
            _SCRIPT,
        ]
    )
