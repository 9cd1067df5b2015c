"""Launch jobs for SLURM: a batch script with one task per rank. Nodes that differ make a heterogeneous job."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.base.checks import check_list
from hpgo.base.messages import safe_repr
from hpgo.base.quoting import in_shell
from hpgo.errors import ArgumentError
from hpgo.launch.job import check_job, master_port, setup_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpgo.launch.job import JobNode, LaunchJob

# Options that place ranks. The plan decides that, so users may not set them.
_PLACED = {"nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "distribution",
           "overcommit", "job-name", "array", "het-group", "kill-on-bad-exit"}  # fmt: skip
_OPTION = re.compile(r"([a-z][a-z-]*)(=[\w./:,@%+\[\]=*#-]+)?", re.ASCII)
# Options of `srun` are quoted words, so any printable value is safe there. Directives of sbatch have no quotes.
_STEP_OPTION = re.compile(r"([a-z][a-z-]*)(=[^\x00-\x1f\x7f]+)?", re.ASCII)
# Options of Pyxis, and SLURM's own for OCI containers. They apply to tasks, not to the batch script.
_CONTAINER = re.compile(r"(no-)?container\b")
_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
# SLURM numbers tasks node by node, over all components of a heterogeneous job. So its numbers are the plan's ranks.
_TASK = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID"
_COUNT = r'read -ra devices <<< "$DEVICES"; export LOCAL_WORLD_SIZE=${devices[SLURM_NODEID]}; exec "$@"'


def slurm(
    job: LaunchJob,
    *,
    port: int | None = None,
    resource: str | None = "gpu",
    sbatch: Iterable[str] = (),
    srun: Iterable[str] = (),
    setup: Iterable[str] = (),
) -> str:
    """Return a script for `sbatch`, with a task for each rank.

    Consecutive equal nodes form one component of the job. With several components, it is a heterogeneous job, and
    devices are requested by type, as the cluster names it.

    Args:
        job: the job to run.
        port: port of rank 0 on the first node. None is a free one, found when the job starts.
        resource: SLURM's name for devices (`--gres`). None requests none.
        sbatch: more options, without leading hyphens: `partition=gpu`. Every component gets them. Options of a
            container go to `srun`, because the batch script itself needs the host's `srun` and `scontrol`.
        srun: more options of `srun`, without leading hyphens: `mpi=none`.
        setup: lines of bash that run first. They may add options to the array `srun_options`.

    Raises ArgumentError for options that would place ranks elsewhere, and for names that SLURM does not allow.

    >>> import hpgo
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = slurm(LaunchJob.of(plan, "train.py"), sbatch=["partition=gpu"])
    >>> [line for line in text.splitlines() if line.startswith("#SBATCH")][1:]
    ['#SBATCH --nodes=2', '#SBATCH --ntasks-per-node=8', '#SBATCH --gres=gpu:8', '#SBATCH --partition=gpu']
    """
    check_job(job)
    options = [_option(option, "sbatch", _OPTION) for option in check_list("the options of sbatch", sbatch)]
    more = [f"#SBATCH --{option}" for option in options if not _CONTAINER.match(option)]
    steps = [option for option in options if _CONTAINER.match(option)]
    steps += [_option(option, "srun", _STEP_OPTION) for option in check_list("the options of srun", srun)]
    parts = [list(alike) for _, alike in groupby(job.nodes, key=lambda node: (node.ranks, node.kind))]
    # With one type, the script needs no types, which may have other names in SLURM's configuration.
    typed = len({node.kind for node in job.nodes}) > 1
    directives: list[str] = [f"#SBATCH --job-name={job.name}"]
    for at, nodes in enumerate(parts):
        directives += [
            *(["#SBATCH hetjob"] if at else []),
            f"#SBATCH --nodes={len(nodes)}",
            f"#SBATCH --ntasks-per-node={nodes[0].ranks}",
            *([] if resource is None else [f"#SBATCH --gres={_devices(nodes[0], resource, typed=typed)}"]),
            *_segment(nodes),
            *more,
        ]
    groups = [f"het-group=0-{len(parts) - 1}"] if len(parts) > 1 else []
    # Without `--kill-on-bad-exit`, the other ranks would wait for a failed one until the job's time limit.
    words = _words([f"--{option}" for option in (*groups, "kill-on-bad-exit=1", "distribution=block", *steps)])
    # Arrays are used only where `setup` may add to them, so that the usual script stays short.
    lines = setup_lines(setup)
    start = 'srun "${srun_options[@]}"' if lines else f"srun {words}"
    devices = " ".join(str(node.ranks) for node in job.nodes)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header("start it with `bash FILE`, which calls sbatch" if lines else "start it with `sbatch`"),
            *directives,
            "set -euo pipefail",
            *([f"srun_options=({words})"] if lines else []),
            *lines,
            *job.exports,
            'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f"export MASTER_ADDR=${{hosts[0]}} WORLD_SIZE={job.ranks}",
            *master_port(port, "${SLURM_JOB_ID:-0}"),
            f'export DEVICES="{devices}" GROUP_WORLD_SIZE={len(job.nodes)}',
            "cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK_HET_GROUP_0:-}}",
            "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${cpus:-1}}",
            '[ -z "$cpus" ] || export SRUN_CPUS_PER_TASK=$cpus # srun does not take it from sbatch since SLURM 22.05',
            f"exec {start} bash -c '{_TASK}; {_COUNT}' rank {_words(job.command)}",
            "",
        ]
    )


def _devices(node: JobNode, resource: str, *, typed: bool) -> str:
    if not isinstance(resource, str) or not _NAME.fullmatch(resource):
        raise ArgumentError(
            f"{safe_repr(resource)} is no resource of SLURM", "give a name like `gpu`; `sinfo -o %G` lists them"
        )
    if not typed:
        return f"{resource}:{node.ranks}"
    if not _NAME.fullmatch(node.kind):
        raise ArgumentError(
            f"{safe_repr(node.kind)} is no device type of SLURM",
            "name types in the cluster file as SLURM does; `sinfo -o %G` lists them",
        )
    return f"{resource}:{node.kind}:{node.ranks}"


def _segment(nodes: Sequence[JobNode]) -> list[str]:
    """Return the directive that takes the hosts of a node of the cluster from one rack, or a comment that asks for it.

    A segment is a number of hosts in one block, which is a rack under SLURM's block topology.
    """
    sizes = {len(list(hosts)) for _, hosts in groupby(nodes, key=lambda node: node.domain)}
    if nodes[0].domain is None or len(nodes) == 1:
        return []
    if len(sizes) > 1:
        return ["# The plan uses unequal parts of racks. Choose hosts by --nodelist, so that each part is in one rack."]
    return [f"#SBATCH --segment={sizes.pop()}"]


def _option(option: str, command: str, form: re.Pattern[str]) -> str:
    found = form.fullmatch(option) if isinstance(option, str) else None
    if found is None:
        raise ArgumentError(
            f"{safe_repr(option)} is no option of {command}",
            "write `partition=gpu` for `--partition=gpu`",
            code="unknown_name",
        )
    if found[1] in _PLACED:
        raise ArgumentError(
            f"`{found[1]}` would change the number or place of ranks, but the plan sets both", "leave it out"
        )
    return option


def _words(words: Sequence[str]) -> str:
    return " ".join(map(in_shell, words))
