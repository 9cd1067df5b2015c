"""Kubeflow: jobs for its Trainer (TrainJob) and for its older Training Operator (PyTorchJob), as YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.messages import safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.errors import ArgumentError
from hpgo.launch.job import check_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.launch.job import LaunchJob


def kubeflow(
    job: LaunchJob,
    *,
    image: str | None = None,
    runtime: str = "torch-distributed",
    resource: str | None = "nvidia.com/gpu",
) -> str:
    """A TrainJob of Kubeflow Trainer, for `kubectl create -f`: a pod a machine, in which torchrun starts the ranks.

    Args:
        job: what shall run; all machines alike.
        image: the container; the runtime's if left out.
        runtime: the ClusterTrainingRuntime to use, one for torch.
        resource: Kubernetes' name for devices; None asks for none.

    Raises ArgumentError if machines differ.

    >>> import hpgo, yaml
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> trainer = yaml.safe_load(kubeflow(LaunchJob.of(plan, "train.py")))["spec"]["trainer"]
    >>> trainer["numNodes"], trainer["numProcPerNode"]
    (2, 8)
    """
    check_job(job)
    node = job.need_equal("Kubeflow")
    trainer: dict[str, Any] = {} if image is None else {"image": _text("image", image)}
    trainer |= {
        "command": _torchrun(job),
        "numNodes": len(job.nodes),
        "numProcPerNode": node.ranks,
        **_resources("resourcesPerNode", resource, node.ranks),
    }
    return _document(
        job,
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {"runtimeRef": {"name": _text("runtime", runtime)}, "trainer": trainer},
        },
    )


def pytorchjob(job: LaunchJob, *, image: str, resource: str | None = "nvidia.com/gpu") -> str:
    """A PyTorchJob of Kubeflow's Training Operator (version 1), for `kubectl create -f`.

    The master is machine 0, worker k is machine k + 1; in each pod torchrun starts the machine's ranks.

    Args:
        job: what shall run; all machines alike.
        image: the container.
        resource: Kubernetes' name for devices; None asks for none.

    Raises ArgumentError if machines differ.

    >>> import hpgo, yaml
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> written = yaml.safe_load(pytorchjob(LaunchJob.of(plan, "train.py"), image="me/train:1"))
    >>> written["spec"]["nprocPerNode"], written["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    ('8', 1)
    """
    check_job(job)
    node = job.need_equal("Kubeflow")
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": _text("image", image),
        "command": _torchrun(job),
        **_resources("resources", resource, node.ranks),
    }
    replica = {"restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if len(job.nodes) > 1:
        replicas["Worker"] = {"replicas": len(job.nodes) - 1, **replica}
    return _document(
        job,
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            "spec": {"nprocPerNode": str(node.ranks), "pytorchReplicaSpecs": replicas},
        },
    )


def _torchrun(job: LaunchJob) -> list[str]:
    """How many nodes and processes there are, and where, comes from the operator by environment variables."""
    # Kubernetes reads `$$` in a command as a dollar, and `$(NAME)` as a variable.
    python, *words = (word.replace("$", "$$") for word in job.command)
    return [python, "-m", "torch.distributed.run", *words]


def _resources(key: str, resource: str | None, devices: int) -> dict[str, Any]:
    return {} if resource is None else {key: {"limits": {_text("resource", resource): devices}}}


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise ArgumentError(f"the {what} is {safe_repr(value)}", "give it as Kubernetes knows it: text without blanks")
    return value


def _document(job: LaunchJob, value: dict[str, Any]) -> str:
    return "\n".join([*job.header("start it with `kubectl create -f`"), *_mapping(value, ""), ""])


def _mapping(value: dict[str, Any], indent: str) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield f"{indent}{in_yaml(key)}:"
            yield from _mapping(inner, indent + "  ")
        elif isinstance(inner, list):
            yield f"{indent}{in_yaml(key)}:"
            for item in inner:
                if isinstance(item, dict):
                    first, *rest = _mapping(item, f"{indent}  ")
                    yield f"{indent}- {first.strip()}"
                    yield from rest
                else:
                    yield f"{indent}- {in_yaml(item)}"
        else:
            yield f"{indent}{in_yaml(key)}: {in_yaml(inner) if isinstance(inner, str) else inner}"
