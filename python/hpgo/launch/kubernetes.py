"""Launch jobs for Kubeflow, as YAML: TrainJob for its Trainer, and PyTorchJob for its older Training Operator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_int, check_is, check_text
from hpgo.base.messages import safe_repr
from hpgo.base.quoting import in_yaml
from hpgo.errors import ArgumentError
from hpgo.launch.job import check_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.launch.job import LaunchJob

_NONE: Mapping[str, Any] = MappingProxyType({})


def kubeflow(
    job: LaunchJob,
    *,
    image: str | None = None,
    runtime: str = "torch-distributed",
    resource: str | None = "nvidia.com/gpu",
) -> str:
    """Return a TrainJob of Kubeflow Trainer, for `kubectl create -f`, with a pod per node.

    torchrun starts the ranks of each pod.

    Args:
        job: the job to run. All nodes must be equal.
        image: the container image. None is the runtime's.
        runtime: the ClusterTrainingRuntime to use, one for torch.
        resource: Kubernetes' name for devices. None requests none.

    Raises ArgumentError if nodes differ.

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
        **_environment(job),
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


def pytorchjob(
    job: LaunchJob,
    *,
    image: str,
    resource: str | None = "nvidia.com/gpu",
    rdma: Mapping[str, int] = _NONE,
    volumes: Mapping[str, Mapping[str, Any]] = _NONE,
    folder: str = "",
) -> str:
    """Return a PyTorchJob of Kubeflow's Training Operator (version 1), for `kubectl create -f`.

    The master is node 0, and worker k is node k + 1. In each pod, torchrun starts the node's ranks. Pods share memory
    at /dev/shm without Kubernetes' limit of 64 MB, since NCCL and data loaders need more.

    Args:
        job: the job to run. All nodes must be equal.
        image: the container image.
        resource: Kubernetes' name for devices. None requests none.
        rdma: number of network adapters of a pod, by Kubernetes' names. Pods may then lock memory, as RDMA needs.
        volumes: sources of volumes, as Kubernetes describes them, by the path where a pod has the volume.
        folder: working folder of the processes; empty for the image's.

    Raises ArgumentError if nodes differ.

    >>> import hpgo, yaml
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> written = yaml.safe_load(pytorchjob(LaunchJob.of(plan, "train.py"), image="me/train:1"))
    >>> written["spec"]["nprocPerNode"], written["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    ('8', 1)
    """
    check_job(job)
    node = job.need_equal("Kubeflow")
    check_is("the volumes", volumes, Mapping, "give a dict of sources by path")
    for path, source in volumes.items():
        check_is(f"the source of {check_text('the path of a volume', path)}", source, dict, "give a dict")
    container = {
        "name": "pytorch",  # the operator sets its variables in the container of this name
        "image": _text("image", image),
        "command": _torchrun(job),
        **({"workingDir": folder} if check_text("the folder", folder) else {}),
        **_environment(job),
        **_resources("resources", resource, node.ranks, rdma),
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if rdma else {}),
    }
    sources: dict[str, Mapping[str, Any]] = {"/dev/shm": {"emptyDir": {"medium": "Memory"}}, **volumes}  # noqa: S108
    container["volumeMounts"] = [{"name": f"volume-{at}", "mountPath": path} for at, path in enumerate(sources)]
    pod = {
        "containers": [container],
        "volumes": [{"name": f"volume-{at}", **source} for at, source in enumerate(sources.values())],
    }
    # As on every target, a rank that fails ends the job.
    replica = {"restartPolicy": "Never", "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if len(job.nodes) > 1:
        replicas["Worker"] = {"replicas": len(job.nodes) - 1, **replica}
    return _document(
        job,
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            # The operator's schema has text here, because it also accepts words such as `auto`.
            "spec": {"nprocPerNode": str(node.ranks), "pytorchReplicaSpecs": replicas},
        },
    )


def _torchrun(job: LaunchJob) -> list[str]:
    """Return the command of a pod.

    The operator sets the numbers of nodes and processes, and the address, as variables.
    """
    # Kubernetes expands `$(NAME)` in a command and reads `$$` as a dollar. Arguments must reach the script unchanged.
    return [word.replace("$", "$$") for word in (*job.torchrun, *job.torchrun_script)]


def _environment(job: LaunchJob) -> dict[str, Any]:
    # Kubernetes expands `$(NAME)` in values, too.
    rows = [{"name": name, "value": value.replace("$", "$$")} for name, value in job.environment]
    return {"env": rows} if rows else {}


def _resources(key: str, resource: str | None, devices: int, more: Mapping[str, int] = _NONE) -> dict[str, Any]:
    check_is("the network adapters", more, Mapping, "give a dict of numbers by name")
    adapters = {_text("resource", name): check_int(name, count) for name, count in more.items()}
    limits = ({} if resource is None else {_text("resource", resource): devices}) | adapters
    return {key: {"limits": limits}} if limits else {}


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise ArgumentError(
            f"the {what} is {safe_repr(value)}, but it must be text without spaces", "give its name in Kubernetes"
        )
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
