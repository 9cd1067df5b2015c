"""Launch jobs: the processes that start on each node, and the command of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpgo.base.checks import check_is, check_list, check_text
from hpgo.base.messages import as_whole, pluralize, safe_repr
from hpgo.base.quoting import in_comment, in_shell
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.hardware.rates import gpus_per_host
from hpgo.planning.files import known_source
from hpgo.planning.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Each rank gets its own values of these from the launcher.
_SET_BY_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                     "MASTER_ADDR", "MASTER_PORT"}  # fmt: skip
_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobNode(Record):
    """A host of the job: a node of the cluster, or a part of one that has several hosts."""

    ranks: int
    """Number of processes that start on it: one for each GPU of its devices."""
    kind: str
    """Type of its devices, as the cluster names it."""
    name: str
    """Name of the node in the cluster; may be empty."""
    domain: int | None = None
    """Number of the cluster's node, whose GPUs NVLink connects, if it has several hosts."""


def job_nodes(cluster: Cluster) -> tuple[JobNode, ...]:
    """Return the hosts of a cluster, in the order of their GPUs. A rack of GB200 has hosts of four GPUs.

    >>> [node.ranks for node in job_nodes(Cluster.preset("gb200:1").first(64))] == 16 * [4]
    True
    """
    found: list[JobNode] = []
    for at, node in enumerate(cluster.nodes):
        gpus, kind = node.count * cluster.gpus_per_device, node.device.name
        each = gpus_per_host(kind, gpus)
        if each == gpus:
            found.append(JobNode(gpus, kind, node.name))
        else:
            # The name is the rack's, so its hosts have none.
            found += [JobNode(min(each, gpus - first), kind, "", at) for first in range(0, gpus, each)]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LaunchJob(Record):
    """Description of the processes that every target starts: one per device of the cluster. Rank r runs on device r.

    Devices are numbered node by node. So the ranks of a node have consecutive numbers, and the local rank is the
    device's number within its node. Devices that the plan leaves idle start, too: `for_rank` gives them a part without
    stages, and collectives count them. A device that stands for g GPUs gets g processes, with consecutive ranks.
    """

    name: str
    """Name for queues: lower-case letters, digits and hyphens."""
    title: str
    """Description of the plan and its cluster."""
    nodes: tuple[JobNode, ...]
    """Nodes, in the order in which their devices are numbered."""
    idle: tuple[int, ...]
    """Ranks without stages in the plan."""
    command: tuple[str, ...]
    """Command of each process."""
    gpus_per_device: int = 1
    python: str = "python3"
    """Interpreter that runs torchrun on the nodes."""
    environment: tuple[tuple[str, str], ...] = ()
    """Names and values of further environment variables of each process."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        script: str,
        arguments: Iterable[str] = (),
        *,
        cluster: Cluster | None = None,
        python: str = "python3",
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LaunchJob:
        """Return the job that runs `plan`.

        Args:
            plan: the plan to run. It must fit the devices' memory.
            script: path of the Python file that each process runs, on the nodes.
            arguments: arguments of the script.
            cluster: the plan's cluster, for plans that were saved without it.
            python: the interpreter on the nodes.
            name: name for queues. None is the profile's.
            environment: further environment variables of each process, by name.

        Raises ArgumentError for a plan that does not fit, that has no cluster or another one, or that was made for a
        framework whose ranks would run on other devices. Raises it also for words that can't be arguments of a command.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> job = LaunchJob.of(plan, "train.py", ["--steps", "10"])
        >>> job.ranks, [node.ranks for node in job.nodes], job.command
        (16, [8, 8], ('python3', 'train.py', '--steps', '10'))
        """
        check_is("the plan", plan, Plan, "create one with `hpgo.plan` or `hpgo.Plan.read`")
        if not plan.fits:
            raise ArgumentError(
                f"the plan does not fit: a device lacks {plan.shortfall_bytes / 1e9:.3g} GB",
                "plan with less memory (`--recompute auto`, smaller micro-batches), or on larger devices",
                code="insufficient_memory",
            )
        words = check_list("the script's arguments", arguments, hint="give a list of words")
        command = (python, script, *words)
        for word in command:
            if not isinstance(word, str) or "\0" in word:
                raise ArgumentError(
                    f"{safe_repr(word)} can't be an argument of a command", "give text without NUL characters"
                )
            check_text("an argument of a command", word)
        for what, word in (("script", script), ("interpreter", python)):
            if not word.strip() or word.startswith("-"):
                raise ArgumentError(
                    f"the {what} is {safe_repr(word)}, but a file name can't be empty or begin with `-`",
                    "write `./-name` for a file whose name begins with `-`",
                )
        _check_grid(plan)
        found = _cluster_of(plan, cluster)
        # Frameworks and collectives count processes per GPU, even if the plan treats several GPUs as one device.
        gpus = found.gpus_per_device
        used = {device for stage in plan.stages for device in stage.devices}
        return cls(
            name=queue_name(plan.profile if name is None else check_text("a job's name", name)),
            title=f"{plan.profile} on {plan.cluster}",
            nodes=job_nodes(found),
            idle=tuple(rank for rank in range(found.devices * gpus) if rank // gpus not in used),
            command=command,
            gpus_per_device=gpus,
            python=python,
            environment=checked_environment({} if environment is None else environment),
        )

    @property
    def ranks(self) -> int:
        """Number of processes, idle ones included."""
        return sum(node.ranks for node in self.nodes)

    @property
    def torchrun(self) -> tuple[str, ...]:
        """Words that start torchrun on a node, without the options for nodes and address."""
        return (self.python, "-m", "torch.distributed.run")

    @property
    def torchrun_script(self) -> tuple[str, ...]:
        """Words for the end of torchrun's command: what each process runs.

        >>> job = LaunchJob("toy", "toy", (JobNode(2, "GPU", ""),), (), ("bash", "rank.sh"))
        >>> job.torchrun_script
        ('--no-python', 'bash', 'rank.sh')
        """
        # torchrun starts its own interpreter unless it is asked for none.
        return self.command[1:] if self.command[:1] == (self.python,) else ("--no-python", *self.command)

    @property
    def exports(self) -> list[str]:
        """Lines of bash that export `environment`."""
        return [f"export {name}={in_shell(value)}" for name, value in self.environment]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of each node."""
        return tuple(accumulate((node.ranks for node in self.nodes[:-1]), initial=0))

    @property
    def equal(self) -> bool:
        """Whether all nodes have the same number of devices of the same type."""
        return len({(node.ranks, node.kind) for node in self.nodes}) == 1

    def need_equal(self, target: str) -> JobNode:
        """Return the node that represents all.

        Raise ArgumentError if they differ, because `target` can't distinguish them.
        """
        check_text("the target", target)
        if not self.equal:
            kinds = dict.fromkeys(f"{node.ranks} × {node.kind}" for node in self.nodes)
            raise ArgumentError(
                f"{target} starts equal nodes, but the cluster mixes {', '.join(kinds)}",
                "use `slurm`, which starts them as a heterogeneous job, or `ssh-hosts`, which names each node",
            )
        return self.nodes[0]

    def hosts(self, given: Sequence[str] | None) -> tuple[str, ...]:
        """Return a host for each node: `given`, or the nodes' names in the cluster.

        Raises ArgumentError if their number differs from the nodes', if two are equal, or if one can't be a host's
        name.
        """
        hint = "name one host for each node in the cluster's order, each on a line of the file for `--hosts`"
        names = [node.name for node in self.nodes] if given is None else given
        hosts = tuple(check_list("the hosts", names, hint="give a list of names"))
        if given is None and not all(hosts):
            raise ArgumentError(f"the cluster does not name its {pluralize(len(hosts), 'node')}", hint, code="missing")
        if len(hosts) != len(self.nodes):
            raise ArgumentError(f"{pluralize(len(hosts), 'host')} given for {pluralize(len(self.nodes), 'node')}", hint)
        for at, host in enumerate(hosts):
            if not isinstance(host, str) or not _HOST.fullmatch(host):
                raise ArgumentError(
                    f"{safe_repr(host)} is no host name", "give names like `node-3`, `10.0.0.3` or `me@node-3`"
                )
            if host in hosts[:at]:
                raise ArgumentError(f"host `{host}` is named for two nodes", hint, code="duplicate")
        return hosts

    def header(self, *more: str) -> list[str]:
        """Return comment lines for the top of a file: what starts, where each rank runs, and `more`."""
        nodes = pluralize(len(self.nodes), "node")
        gpus = self.gpus_per_device
        where = (
            "one per device; rank r runs on device r"
            if gpus == 1
            else f"{gpus} per device; rank r runs on GPU r mod {gpus} of device r div {gpus}"
        )
        lines = [
            f"{self.title}: {pluralize(self.ranks, 'rank')} on {nodes}, {where}",
            *([f"the plan leaves {_listed(self.idle)} idle: started too, but without stages"] if self.idle else []),
            *more,
        ]
        return [f"# {in_comment(check_text('a line of the header', line))}" for line in lines]


def _check_grid(plan: Plan) -> None:
    """Raise ArgumentError for a plan made for a framework whose own rank numbers would mean other devices.

    Such frameworks number ranks stage by stage, and take every process that starts for one of their ranks.
    """
    devices = [device for group in plan.groups for device in group.devices]
    if plan.restriction is None or devices == list(range(plan.cluster_devices)):
        return
    idle = plan.cluster_devices - len(devices)
    why = (
        f"leaves {pluralize(idle, 'device')} idle, but {plan.restriction.label} would count their processes as ranks"
        if idle
        else f"uses devices in another order than {plan.restriction.label} numbers ranks"
    )
    raise ArgumentError(
        f"the plan {why}",
        f"plan on fewer devices with `--devices {len(devices)}`"
        if idle
        else "start each rank on the device that `ranks.csv` lists for it; `hpgo export` writes that file",
    )


def checked_environment(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return environment variables as pairs. Raise ArgumentError for names or values that a process can't have.

    >>> checked_environment({"NCCL_DEBUG": "INFO"})
    (('NCCL_DEBUG', 'INFO'),)
    """
    check_is("the environment", given, Mapping, "give a dict of names and values")
    for name, value in given.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ArgumentError(f"{safe_repr(name)} is no name of an environment variable", "write NAME=VALUE")
        if name in _SET_BY_LAUNCHERS:
            raise ArgumentError(f"`{name}` is set for each rank, and can't have one value for all", "leave it out")
        if "\0" in check_text(f"the value of {name}", value):
            raise ArgumentError(f"the value of {name} is {safe_repr(value)}, but it can't contain NUL")
    return tuple(given.items())


def setup_lines(setup: Iterable[str]) -> list[str]:
    """Return lines of bash that a script runs first. Raise ArgumentError unless they are a list of text."""
    return [check_text("a line of the setup", line) for line in check_list("the lines of the setup", setup)]


def check_job(job: object) -> None:
    """Raise ArgumentError unless `job` is a LaunchJob."""
    check_is("the job", job, LaunchJob, "create one with `hpgo.launch.LaunchJob.of`")


def checked_port(port: object) -> int:
    """Return `port`, at which rank 0 listens. Raise ArgumentError if it is none."""
    number = as_whole(port)
    if number is None or not 1 <= number < 2**16:
        raise ArgumentError(
            f"the port is {safe_repr(port)}, but must be from 1 to 65535",
            "give a free port of the first node, like 29500",
        )
    return number


def master_port(port: object, seed: str) -> list[str]:
    """Return lines of bash that set and export MASTER_PORT: `port`, or a free one if that is None.

    The search begins at a port derived from `seed`, a shell variable with a number, so that 2 jobs that start at once
    on one node try different ports. The lines must run on the node of rank 0. Raises ArgumentError for an invalid port.
    """
    if port is not None:
        return [f"export MASTER_PORT={checked_port(port)}"]
    return [
        # The range stays below 32768, from where on Linux assigns ports to outgoing connections.
        f"export MASTER_PORT=$((20000 + {seed} % 10000))",
        'while (: < "/dev/tcp/127.0.0.1/$MASTER_PORT") 2> /dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done',
    ]


def _cluster_of(plan: Plan, given: Cluster | None) -> Cluster:
    check_is("the cluster", given, Cluster, "create one, for instance with `hpgo.Cluster.read`", or_none=True)
    # A plan that embeds its cluster is checked against a given one. Without that, only the number of devices can be
    # compared.
    if plan.assumptions is not None:
        return known_source("cluster", plan.cluster, plan.assumptions.cluster, given)
    hint = "give the plan's cluster: `--cluster NAME`, or `cluster=` in Python"
    if given is None:
        raise ArgumentError("the plan is from a file that does not list the nodes of its cluster", hint, code="missing")
    if given.devices != plan.cluster_devices:
        raise ArgumentError(
            f"cluster `{given.name}` has {given.devices} devices, but the plan is for {plan.cluster_devices}", hint
        )
    return given


def queue_name(text: str) -> str:
    """Return `text` as a valid name for Kubernetes and SLURM: a label that begins with a letter.

    It is short enough for suffixes.
    """
    # Kubernetes allows 63 characters, and its controllers append suffixes for pods and hashes.
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}")[:40].rstrip("-")


def _listed(ranks: tuple[int, ...]) -> str:
    """Describe ranks in words: `rank 3`, `ranks 3, 5–8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("–".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
