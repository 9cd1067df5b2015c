"""Launch jobs: files and commands that start the processes of a plan, each rank on its device, here or on a cluster.

job = hpgo.launch.LaunchJob.of(plan, "train.py", ["--steps", "100"])
hpgo.launch.slurm(job)  # text; hpgo.launch.save(job, "slurm", "job.sh") writes it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hpgo.base.checks import choice
from hpgo.base.documents import write_text
from hpgo.base.files import as_path
from hpgo.base.messages import did_you_mean
from hpgo.errors import ArgumentError
from hpgo.launch.job import JobNode, LaunchJob, check_job
from hpgo.launch.kubernetes import kubeflow, pytorchjob
from hpgo.launch.ray import ray
from hpgo.launch.shell import local, ssh_hosts, torchrun
from hpgo.launch.slurm import slurm

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = [
    "TARGETS",
    "JobNode",
    "LaunchJob",
    "kubeflow",
    "local",
    "pytorchjob",
    "ray",
    "save",
    "slurm",
    "ssh_hosts",
    "text",
    "torchrun",
]  # fmt: skip

TargetName = Literal["local", "torchrun", "slurm", "kubeflow", "pytorchjob", "ray", "ssh-hosts"]
"""Names of `TARGETS`, for type checkers and editors."""
TARGETS: dict[TargetName, Callable[..., str]] = {
    "local": local,
    "torchrun": torchrun,
    "slurm": slurm,
    "kubeflow": kubeflow,
    "pytorchjob": pytorchjob,
    "ray": ray,
    "ssh-hosts": ssh_hosts,
}
"""Functions that write a job for a target. Each takes the job and its own keywords."""


def text(job: LaunchJob, target: TargetName, **options: Any) -> str:
    """Return the text that starts `job` on one of `TARGETS`, with the target's own `options`.

    Raises ArgumentError for an unknown target, for unknown or missing options, and for a job that the target can't
    start.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text(LaunchJob.of(plan, "train.py"), "slurm", image="me/train:1")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: `slurm` has no option `image`
    """
    choice("target", target, TARGETS)
    check_job(job)
    import inspect

    known = list(inspect.signature(TARGETS[target]).parameters.values())[1:]
    for name in options:
        if name not in {option.name for option in known}:
            raise ArgumentError(
                f"`{target}` has no option `{name}`",
                did_you_mean(name, [option.name for option in known]),
                code="unknown_name",
            )
    for option in known:
        if option.default is option.empty and option.name not in options:
            raise ArgumentError(
                f"`{target}` needs `{option.name}`", f"give the keyword `{option.name}`", code="missing"
            )
    return TARGETS[target](job, **options)


def save(job: LaunchJob, target: TargetName, path: str | os.PathLike[str], **options: Any) -> None:
    """Write the result of `text` to a file. Raise ArgumentError, also if the file can't be written."""
    content = text(job, target, **options)
    if target == "ray" and as_path(path, ArgumentError).name == "ray.py":
        raise ArgumentError(
            "a script named `ray.py` would be imported instead of Ray",
            "give it another name, such as `start.py`",
            code="unsupported",
        )
    write_text(path, content, ArgumentError)
