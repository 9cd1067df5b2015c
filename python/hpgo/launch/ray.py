"""Launch jobs for Ray: a script for Ray Train, with one worker per node that starts the node's ranks."""

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
    """Start the ranks of this node, and end them all when one fails."""
    node = get_context().get_world_rank()
    with socket.socket() as probe:
        probe.bind(("", 0))
        here = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(probe.getsockname()[1])}
    environment = os.environ | broadcast_from_rank_zero(here) | {
        "WORLD_SIZE": str(config["nodes"] * config["devices"]),
        "LOCAL_WORLD_SIZE": str(config["devices"]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(config["nodes"]),
    } | config["environment"]
    environment.setdefault("OMP_NUM_THREADS", "1")
    ranks = []
    try:
        for device in range(config["devices"]):
            rank = {"RANK": str(node * config["devices"] + device), "LOCAL_RANK": str(device)}
            ranks.append(subprocess.Popen(config["command"], env=environment | rank, stdin=subprocess.DEVNULL))
        codes = [None]
        while None in codes:
            time.sleep(0.1)
            codes = [process.poll() for process in ranks]
            for device, code in enumerate(codes):
                if code:
                    raise RuntimeError(f"rank {node * config['devices'] + device} failed with exit code {code}")
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
            num_workers=JOB["nodes"],
            use_gpu=USE_GPU,
            resources_per_worker=RESOURCES,
            placement_strategy="STRICT_SPREAD",
        ),
    ).fit()
'''


def ray(job: LaunchJob, *, resource: str | None = "GPU") -> str:
    """Return a Python script that runs the job with Ray Train, version 2 (Ray 2.51 or later).

    Each worker occupies a whole node, and starts the node's ranks with torchrun's environment variables. So the same
    training script runs on all targets.

    Args:
        job: the job to run. All nodes must be equal.
        resource: Ray's name for devices: `GPU`, or one that the cluster defines. None requests only CPUs.

    Raises ArgumentError if nodes differ.

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
        raise ArgumentError(
            f"the resource is {safe_repr(resource)}, but it must be text", "give its name in Ray, like `GPU`"
        )
    # Ray schedules by these numbers. One CPU per rank keeps other tasks of the cluster off these cores.
    resources = {"CPU": node.ranks} | ({} if resource in {None, "CPU"} else {resource: node.ranks})
    settings = {"nodes": len(job.nodes), "devices": node.ranks, "command": list(job.command)}
    variables = {"environment": dict(job.environment)}
    return "\n".join(
        [
            *job.header(
                "start it with `ray job submit -- python FILE`, or with `python FILE` on a node of the cluster"
            ),
            f"JOB = {in_python(settings | variables)}",
            f"USE_GPU = {resource == 'GPU'}",
            f"RESOURCES = {in_python(resources)}",
            _SCRIPT,
        ]
    )
