"""Scripts of a job folder: what starts it on each launcher, what each rank runs, the checks, and the smoke run.

`hpgo.launch` writes how ranks start. The scripts here add the folder: they check it before any node is asked for, read
`env.sh`, and let each rank run `rank.sh`, so that the command of a rank is written once for all launchers.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpgo import launch
from hpgo.base.checks import choice
from hpgo.base.quoting import in_shell
from hpgo.base.validated import Record
from hpgo.jobs.parts import Placeholder
from hpgo.launch.job import LaunchJob, job_nodes, queue_name
from hpgo.planning.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.llm.plan import LlmPlan

LauncherName = Literal["slurm", "torchrun", "kubernetes", "ray"]
"""Launchers of job folders."""
LAUNCHERS = get_args(LauncherName)
MEMORY_LINE = r"max allocated|max_allocated|memory: |MemAllocated|peak memory"
"""Lines of logs with memory: `report_memory` of Megatron-LM, metrics of torchtitan, `see_memory_usage` of DeepSpeed."""
_RANK_COMMAND = ("bash", "rank.sh")
TITLES = {"slurm": "SLURM", "torchrun": "torchrun", "kubernetes": "Kubernetes", "ray": "Ray"}
"""Names of the launchers for README.md."""
_TIMES = {"train": "1-00:00:00", "smoke": "00:30:00"}
"""Time limits of SLURM jobs. Options of job.sh replace them."""
_GRACE_S = 300
"""Seconds between SLURM's signal and the end of a job. Not tuned: checkpoints of large models take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Record):
    """The scripts of one launcher."""

    start: str
    """Command that starts the job, in the folder."""
    files: tuple[tuple[str, str, str], ...]
    """Name, text and description of each file."""
    smoke: tuple[str, ...]
    """Lines of bash that start the script `$script` as a smoke run and write its output to `$log`."""
    logs: tuple[str, ...] = ()
    """Lines of bash that set `judged` to 0, and another `$log`, on nodes whose output has no lines of steps."""
    placeholders: tuple[Placeholder, ...] = ()
    elsewhere: str = "false"
    """Command of bash that succeeds if ranks see other files than this machine, so that paths can't be checked here."""
    log_of: str = ""
    """Where the log of the training is, for README.md."""


def job_of(plan: LlmPlan | Plan, framework: str) -> LaunchJob:
    """Return the processes of a plan: one for each GPU, node by node, each running `rank.sh`."""
    if isinstance(plan, Plan):
        # The interpreter stays python3, which runs torchrun. It does not run rank.sh.
        job = LaunchJob.of(plan, _RANK_COMMAND[-1])
        return replace(job, title=f"{job.title}, {framework}", command=_RANK_COMMAND)
    cluster = plan.cluster
    return LaunchJob(
        name=queue_name(plan.transformer.name),
        title=f"{plan.transformer.name} on {cluster.name}, {framework}",
        nodes=job_nodes(cluster),
        idle=(),
        command=_RANK_COMMAND,
    )


def launcher(
    name: LauncherName,
    job: LaunchJob,
    small: LaunchJob | None,
    files: Sequence[str],
    names: Sequence[str],
    *,
    step_rank: int | None,
) -> Launcher:
    """Return the scripts that start `job` with a launcher, and `small`, the reduced job on one node, if there is one.

    `files` are the names of the folder's other files, and `names` its variables. Launchers on other machines have to
    copy both. `step_rank` is the rank that prints the lines of steps, or None for the last one.
    """
    name = choice("launcher", name, LAUNCHERS)
    make: dict[str, Callable[..., Launcher]] = {
        "slurm": _slurm,
        "torchrun": partial(_torchrun, step_rank=step_rank),
        "kubernetes": _kubernetes,
        "ray": _ray,
    }
    return make[name](job, small, files, names)


def _scripts(texts: dict[str, str]) -> tuple[tuple[str, str, str], ...]:
    holds = {"job.sh": "starts the job", "small.sh": "starts the reduced model on one node"}
    return tuple((name, text, holds[name]) for name, text in texts.items())


def _jobs(job: LaunchJob, small: LaunchJob | None) -> dict[str, LaunchJob]:
    return {"job.sh": job} | ({} if small is None else {"small.sh": replace(small, name=f"{job.name}-small")})


# sbatch runs a copy of the script from another folder, so the folder of the script is not always the job's.
_FOLDER = (
    'folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
    '[ -f "$folder/rank.sh" ] || folder=${SLURM_SUBMIT_DIR:-$PWD}',
    'cd "$folder"',
)
_HERE = ('cd "$(dirname "${BASH_SOURCE[0]}")"',)
_ENV = (". ./env.sh",)


def _slurm(job: LaunchJob, small: LaunchJob | None, *_: Sequence[str]) -> Launcher:
    options = (
        "exclusive", "mem=0", f"time={_TIMES['train']}", "output=%x-%j.log", f"signal=TERM@{_GRACE_S}",
    )  # fmt: skip
    texts = {}
    for name, one in _jobs(job, small).items():
        # Outside of a job the script checks the folder and calls sbatch on itself, so that one command starts it.
        setup = [
            *_FOLDER,
            'if [ -z "${SLURM_JOB_ID:-}" ]; then',
            "  bash check.sh",
            f'  exec sbatch --export=ALL "$@" {name}',
            "fi",
            *_ENV,
            'if [ -n "${CONTAINER_IMAGE:-}" ]; then',
            "  mounts=$folder:$folder${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}",
            '  srun_options+=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts")',
            # Containers start in the folder of their image, but rank.sh is in the job's.
            '  srun_options+=("--container-workdir=$folder")',
            "fi",
            'eval "srun_options+=(${SRUN_OPTIONS:-})"',
        ]
        texts[name] = launch.slurm(one, sbatch=options, setup=setup)
    return Launcher(
        start="bash job.sh",
        files=_scripts(texts),
        smoke=(
            'if [ -n "${SLURM_JOB_ID:-}" ]; then',
            '  bash "$script" 2>&1 | tee "$log" || code=$?',
            "else",
            f'  bash "$script" --wait --time={_TIMES["smoke"]} --output="$log" "$@" || code=$?',
            "fi",
        ),
        placeholders=(
            Placeholder(
                name="CONTAINER_IMAGE",
                meaning="container image of the ranks (Pyxis); without one they run on the node itself",
                example="nvcr.io#nvidia/pytorch:25.09-py3",
                needed="never",
            ),
            Placeholder(
                name="CONTAINER_MOUNTS",
                meaning="folders that the container sees; the folder of this job is added",
                example="/data:/data,/checkpoints:/checkpoints",
                needed="never",
            ),
            Placeholder(
                name="SRUN_OPTIONS",
                meaning="more options of srun, quoted as in a shell; options of sbatch follow job.sh",
                example="--mpi=none --cpu-bind=none",
                needed="never",
            ),
        ),
        elsewhere='[ -n "${CONTAINER_IMAGE:-}" ]',
        log_of="`NAME-JOBID.log`, which SLURM writes into the folder",
    )


def _torchrun(job: LaunchJob, small: LaunchJob | None, *_: Sequence[str], step_rank: int | None) -> Launcher:
    nodes = len(job.nodes)
    shown = bisect(job.first_ranks, job.ranks - 1 if step_rank is None else step_rank) - 1
    texts = {
        name: launch.torchrun(one, setup=["set -euo pipefail", *_HERE, "bash check.sh", *_ENV])
        for name, one in _jobs(job, small).items()
    }
    placeholders = (
        Placeholder(name="MASTER_ADDR", meaning="address of the first node", example="10.0.0.1", needed="full"),
        Placeholder(name="MASTER_PORT", meaning="free port of the first node", default="29500", needed="full"),
    )
    return Launcher(
        start="bash job.sh" if nodes == 1 else "bash job.sh NODE",
        files=_scripts(texts),
        smoke=('bash "$script" "$@" 2>&1 | tee "$log" || code=$?',),
        placeholders=placeholders if nodes > 1 else (),
        logs=(
            f"# Only the output of node {shown} has lines of steps. Nodes may share this folder, so each has its log.",
            "node=${1-}",
            f'if [ "$JOB_RUN" = smoke ] && [[ $node =~ ^[0-9]+$ ]] && [ "$node" != {shown} ]; then',
            "  log=${log%.log}-$node.log judged=0",
            "fi",
        )
        if nodes > 1
        else (),
        log_of="the output of job.sh" + (f" on node {shown}" if nodes > 1 else ""),
    )


# Machines of other schedulers do not get the variables of this shell, so a file takes them along.
_VALUES = (
    "for name in {names} JOB_RUN ${{JOB_ENV:-}}; do",
    '  [ -z "${{!name:-}}" ] || printf "export %s=%q\\n" "$name" "${{!name}}"',
    "done > values.sh",
)


def _values(names: Sequence[str]) -> list[str]:
    return [line.format(names=" ".join(names)) for line in _VALUES]


_COMMENTS = {
    "CONTAINER_IMAGE": "for secrets, add: envFrom: [{secretRef: {name: NAME}}]",
    "RDMA_RESOURCE": "an empty variable deletes this line",
}
"""Comments in job.yaml for the lines with these variables."""
_IN_PODS = (
    Placeholder(
        name="CONTAINER_IMAGE",
        meaning="container image with the framework",
        example="nvcr.io/nvidia/pytorch:25.09-py3",
        needed="always",
    ),
    Placeholder(
        name="DATA_CLAIM",
        meaning="claim of the volume with data, checkpoints and sources, which pods see as /data",
        example="training-data",
        needed="always",
    ),
    Placeholder(
        name="RDMA_RESOURCE",
        meaning="resource of the RDMA network; leave it empty without RDMA",
        example="rdma/hca_shared_devices_a",
        needed="never",
    ),
)
"""Variables of env.sh that job.yaml names as `$NAME`. job.sh writes their values into a copy. The last one is for jobs
on several nodes."""


def _filled(yaml: str) -> str:
    """Return the name of a YAML file with values in place of variables."""
    return yaml.replace(".yaml", ".filled.yaml")


def _kubernetes(job: LaunchJob, small: LaunchJob | None, files: Sequence[str], names: Sequence[str]) -> Launcher:
    # A ConfigMap takes the files into the pods, so that no volume has to be shared with this machine.
    texts, pods = {}, {}
    for name, one in _jobs(job, small).items():
        yaml = f"{name.removesuffix('.sh')}.yaml"
        # Keys of a ConfigMap have no slashes, so files of subfolders get another key and their path back in the pod.
        keys = {path.replace("/", "."): path for path in (*files, "values.sh") if not path.endswith(".json")}
        volumes: dict[str, dict[str, Any]] = {
            "/job": {
                "configMap": {
                    "name": f"{one.name}-files",
                    "items": [{"key": key, "path": path} for key, path in keys.items()],
                }
            },
            "/data": {"persistentVolumeClaim": {"claimName": "$DATA_CLAIM"}},
        }
        # Nodes with several adapters usually share them, and each pod takes one share.
        rdma = {"$RDMA_RESOURCE": 1} if len(one.nodes) > 1 else {}
        text = launch.pytorchjob(one, image="$CONTAINER_IMAGE", volumes=volumes, rdma=rdma, folder="/job")
        for variable, comment in _COMMENTS.items():
            text = "\n".join(f"{line}  # {comment}" if f"${variable}" in line else line for line in text.split("\n"))
        pods[yaml] = text
        sources = " ".join(in_shell(f"--from-file={key}={path}") for key, path in keys.items())
        texts[name] = "\n".join(
            [
                "#!/usr/bin/env bash",
                *one.header("needs kubectl, and the Training Operator of Kubeflow in the cluster"),
                "set -euo pipefail",
                *_HERE,
                "bash check.sh",
                *_ENV,
                *_values(names),
                f"kubectl create configmap {one.name}-files {sources} --dry-run=client -o yaml | kubectl apply -f -",
                f"text=$(<{yaml})",
                '[ -n "${RDMA_RESOURCE:-}" ] || text=$(grep -v RDMA_RESOURCE <<< "$text")',
                f"for name in {' '.join(one.name for one in _IN_PODS)}; do",
                '  text=${text//"\\$$name"/"${!name:-}"}',
                "done",
                f'printf "%s\\n" "$text" > {_filled(yaml)}',
                f"exec kubectl create -f {_filled(yaml)}",
                "",
            ]
        )
    return Launcher(
        start="bash job.sh",
        files=(
            *_scripts(texts),
            *((name, text, "pods of the job, with variables of env.sh") for name, text in pods.items()),
        ),
        smoke=(
            f"pods={_filled('${script%.sh}.yaml')}",
            'bash "$script"',
            'until kubectl wait -f "$pods" --for=condition=Succeeded --timeout=20s > /dev/null 2>&1; do',
            '  if kubectl wait -f "$pods" --for=condition=Failed --timeout=1s > /dev/null 2>&1; then code=1; break; fi',
            "done",
            'job=$(kubectl get -f "$pods" -o "jsonpath={.metadata.name}")',
            'kubectl logs --tail=-1 --selector="training.kubeflow.org/job-name=$job" > "$log"',
            'kubectl delete -f "$pods"',
        ),
        placeholders=_IN_PODS if len(job.nodes) > 1 else _IN_PODS[:-1],
        elsewhere="true",
        log_of=f"`kubectl logs --selector=training.kubeflow.org/job-name={job.name}`",
    )


def _ray(job: LaunchJob, small: LaunchJob | None, _: Sequence[str], names: Sequence[str]) -> Launcher:
    texts, starts = {}, {}
    for name, one in _jobs(job, small).items():
        python = "start.py" if name == "job.sh" else "start_small.py"
        # Workers that change their folder would not find rank.sh.
        starts[python] = launch.ray(replace(one, environment=(("RAY_CHDIR_TO_TRIAL_DIR", "0"),)))
        variables = in_shell('{"env_vars": {"RAY_DEDUP_LOGS": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"}}')
        texts[name] = "\n".join(
            [
                "#!/usr/bin/env bash",
                *one.header("needs RAY_ADDRESS, the address of the cluster's dashboard"),
                "set -euo pipefail",
                *_HERE,
                "bash check.sh",
                *_ENV,
                *_values(names),
                f"exec ray job submit --working-dir . --runtime-env-json {variables} -- python3 {python}",
                "",
            ]
        )
    return Launcher(
        start="bash job.sh",
        files=(*_scripts(texts), *((name, text, "the job for Ray Train") for name, text in starts.items())),
        smoke=('bash "$script" 2>&1 | tee "$log" || code=$?',),
        elsewhere="true",
        log_of="the output of `ray job submit`",
    )
