"""A job: which processes start on which machine, and what each of them runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from hpgo.base.checks import check_is, check_list, check_text
from hpgo.base.messages import as_whole, pluralize, safe_repr
from hpgo.base.quoting import in_comment
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.machine.cluster import Cluster
from hpgo.planning.files import known_source
from hpgo.planning.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HOST = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Node(Record):
    """A machine of the job."""

    ranks: int
    """Processes that start on it: one for each GPU of its devices."""
    kind: str
    """Its type of device, as the cluster names it."""
    name: str
    """Its name in the cluster; may be empty."""


@dataclass(frozen=True, slots=True)
class LaunchJob(Record):
    """What every target starts: one process a device of the cluster. Rank r runs on device r.

    Devices are numbered machine by machine, so the ranks of a machine follow each other, and the local rank is the
    device's number within its machine. Devices that the plan leaves idle start too: `for_rank` gives them a part
    without stages, and collectives want them counted. A device that stands for g GPUs gets g processes, whose ranks
    follow each other.
    """

    name: str
    """For queues: lower-case letters, digits and hyphens."""
    title: str
    """What runs, in words."""
    nodes: tuple[Node, ...]
    """In the order in which their devices are numbered."""
    idle: tuple[int, ...]
    """Ranks without a part in the plan."""
    command: tuple[str, ...]
    """What each process runs."""
    gpus_per_device: int = 1

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
    ) -> LaunchJob:
        """The job that runs `plan`.

        Args:
            plan: what shall run; it must fit the devices' memory.
            script: Python file that each process runs, as the machines name it.
            arguments: what the script is given.
            cluster: the plan's cluster, for plans that were saved without.
            python: the interpreter, as the machines name it.
            name: for queues; the profile's if left out.

        Raises ArgumentError for a plan that doesn't fit, without a cluster or with another one, for one made for a
        launcher that would number its ranks otherwise, and for words that can't be an argument of a command.

        >>> import hpgo
        >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
        >>> job = LaunchJob.of(plan, "train.py", ["--steps", "10"])
        >>> job.ranks, [node.ranks for node in job.nodes], job.command
        (16, [8, 8], ('python3', 'train.py', '--steps', '10'))
        """
        check_is("the plan", plan, Plan, "make one, with `hpgo.plan` or `hpgo.Plan.read` say")
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
                raise ArgumentError(f"{safe_repr(word)} can't be an argument of a command", "give text without NUL")
            check_text("an argument of a command", word)
        for what, word in (("script", script), ("interpreter", python)):
            if not word.strip() or word.startswith("-"):
                raise ArgumentError(
                    f"the {what} is {safe_repr(word)}, which is no file's name", "write `./-name` for such a file"
                )
        _check_grid(plan)
        found = _cluster_of(plan, cluster)
        gpus = found.gpus_per_device
        used = {device for stage in plan.stages for device in stage.devices}
        return cls(
            name=_queue_name(plan.profile if name is None else check_text("a job's name", name)),
            title=f"{plan.profile} on {plan.cluster}",
            nodes=tuple(Node(machine.count * gpus, machine.device.name, machine.name) for machine in found.nodes),
            idle=tuple(rank for rank in range(found.devices * gpus) if rank // gpus not in used),
            command=command,
            gpus_per_device=gpus,
        )

    @property
    def ranks(self) -> int:
        """Processes, idle ones included."""
        return sum(node.ranks for node in self.nodes)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """For each machine its first rank."""
        return tuple(accumulate((node.ranks for node in self.nodes[:-1]), initial=0))

    @property
    def equal(self) -> bool:
        """Whether all machines have as many devices of the same type."""
        return len({(node.ranks, node.kind) for node in self.nodes}) == 1

    def need_equal(self, target: str) -> Node:
        """What all machines are like. Raises ArgumentError if they differ, since `target` can't tell them apart."""
        check_text("the target", target)
        if not self.equal:
            kinds = dict.fromkeys(f"{node.ranks} × {node.kind}" for node in self.nodes)
            raise ArgumentError(
                f"{target} starts equal machines, but the cluster mixes {', '.join(kinds)}",
                "use `slurm`, which starts them as a heterogeneous job, or `ssh-hosts`, which names each machine",
            )
        return self.nodes[0]

    def hosts(self, given: Sequence[str] | None) -> tuple[str, ...]:
        """A host for each machine: `given`, or the machines' names in the cluster.

        Raises ArgumentError if there is not one for each, if two are the same, or if one can't be a host's name.
        """
        hint = "name one host for each machine, in the cluster's order: a line each in the file for `--hosts`"
        names = [node.name for node in self.nodes] if given is None else given
        hosts = tuple(check_list("the hosts", names, hint="give a list of names"))
        if given is None and not all(hosts):
            raise ArgumentError(
                f"the cluster does not name its {pluralize(len(hosts), 'machine')}", hint, code="missing"
            )
        if len(hosts) != len(self.nodes):
            raise ArgumentError(f"{pluralize(len(hosts), 'host')} for {pluralize(len(self.nodes), 'machine')}", hint)
        for at, host in enumerate(hosts):
            if not isinstance(host, str) or not _HOST.fullmatch(host):
                raise ArgumentError(
                    f"{safe_repr(host)} is no name of a host", "like `node-3`, `10.0.0.3` or `me@node-3`"
                )
            if host in hosts[:at]:
                raise ArgumentError(f"host `{host}` is named for two machines", hint, code="duplicate")
        return hosts

    def header(self, *more: str) -> list[str]:
        """Lines of comment for the top of a file: what starts, where each rank runs, and `more`."""
        machines = pluralize(len(self.nodes), "machine")
        gpus = self.gpus_per_device
        where = (
            "one a device; rank r runs on device r"
            if gpus == 1
            else f"{gpus} a device; rank r runs on GPU r mod {gpus} of device r div {gpus}"
        )
        lines = [
            f"{self.title}: {pluralize(self.ranks, 'rank')} on {machines}, {where}",
            *(
                [f"the plan leaves {_listed(self.idle)} idle: started all the same, without a part"]
                if self.idle
                else []
            ),
            *more,
        ]
        return [f"# {in_comment(check_text('a line of the header', line))}" for line in lines]


def _check_grid(plan: Plan) -> None:
    """Raises ArgumentError for a plan made for a launcher whose own numbers of ranks would land on other devices.

    Such launchers number ranks stage by stage, and take every process that starts for one of theirs.
    """
    devices = [device for group in plan.groups for device in group.devices]
    if plan.restriction is None or devices == list(range(plan.cluster_devices)):
        return
    idle = plan.cluster_devices - len(devices)
    why = (
        f"leaves {pluralize(idle, 'device')} idle, whose processes {plan.restriction.label} would take for its ranks"
        if idle
        else f"is on devices in another order than that in which {plan.restriction.label} numbers ranks"
    )
    raise ArgumentError(
        f"the plan {why}",
        f"plan on fewer devices with `--devices {len(devices)}`"
        if idle
        else "start each rank where `ranks.csv`, which `hpgo export` writes, says",
    )


def check_job(job: object) -> None:
    """Raises ArgumentError for what is no job."""
    check_is("the job", job, LaunchJob, "make one, with `hpgo.launch.LaunchJob.of`")


def checked_port(port: object) -> int:
    """`port`, at which rank 0 listens; raises ArgumentError if it is none."""
    number = as_whole(port)
    if number is None or not 1 <= number < 2**16:
        raise ArgumentError(f"the port is {safe_repr(port)}", "give a free port of the first machine, like 29500")
    return number


def master_port(port: object, seed: str) -> list[str]:
    """Return lines of bash that set and export MASTER_PORT: `port`, or a free one if that is None.

    The search begins at a port that follows from `seed`, a variable of the shell with a number, so that 2 jobs which
    start at once on one machine try different ports. It stays below 32768, where Linux takes ports for connections.
    The lines must run on the machine of rank 0. Raises ArgumentError for a port that is none.
    """
    if port is not None:
        return [f"export MASTER_PORT={checked_port(port)}"]
    return [
        f"export MASTER_PORT=$((20000 + {seed} % 10000))",
        'while (: < "/dev/tcp/127.0.0.1/$MASTER_PORT") 2> /dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done',
    ]


def _cluster_of(plan: Plan, given: Cluster | None) -> Cluster:
    check_is("the cluster", given, Cluster, "make one, with `hpgo.Cluster.read` say", or_none=True)
    if plan.assumptions is not None:
        return known_source("cluster", plan.cluster, plan.assumptions.cluster, given)
    hint = "give the cluster that it was made for: `--cluster NAME`, or `cluster=` in Python"
    if given is None:
        raise ArgumentError(
            "the plan is from a file that does not say which machines its cluster has", hint, code="missing"
        )
    if given.devices != plan.cluster_devices:
        raise ArgumentError(
            f"cluster `{given.name}` has {given.devices} devices, but the plan is for {plan.cluster_devices}", hint
        )
    return given


def _queue_name(text: str) -> str:
    """`text` as Kubernetes and SLURM take names: a label that begins with a letter, short enough for endings."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}")[:40].rstrip("-")


def _listed(ranks: tuple[int, ...]) -> str:
    """Ranks in words: `rank 3`, `ranks 3, 5–8`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("–".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
