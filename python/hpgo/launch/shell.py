"""Launch jobs without a scheduler, as bash scripts around torchrun: here, over ssh, or one script for each node.

torchrun starts, supervises and ends the ranks of a node. Over ssh it lacks one thing, which the script adds: an agent
does not notice a lost connection, or a rank that fails on another host, because a static rendezvous has no heartbeat
between agents.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize
from hpgo.base.quoting import in_shell
from hpgo.launch.job import check_job, checked_port, master_port, setup_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.launch.job import LaunchJob

# Runs on each host, where `bash -c '...' host COMMAND` starts the host's agent and ends it when the connection ends.
# The end of its input is the only sign of that, because sshd sends no signal to processes without a terminal.
_HOST = r"""exec 3<&0
"$@" < /dev/null 3<&- & agent=$!
{ cat <&3; kill -TERM $agent; } > /dev/null 2>&1 & watcher=$!
exec 3<&-
wait $agent; code=$?
kill $watcher
exit $code
"""
# Every ssh reads from a pipe that this script alone holds open for writing. When the script closes it, or is killed,
# the hosts end their ranks.
_SSH = r"""folder=$(mktemp -d) && mkfifo "$folder/open" || exit 1
exec 4<> "$folder/open" 5< "$folder/open"
rm -r "$folder"
finish() { trap "" INT TERM HUP USR1; exec 4<&-; wait; exit "$1"; }
trap "finish 130" INT; trap "finish 143" TERM HUP; trap "finish 1" USR1
for node in "${!hosts[@]}"; do
  { exec 4<&-
    ssh -o BatchMode=yes -T "${hosts[node]}" "cd $(printf %q "$PWD") && exec bash -c '$host' host" \
      "$agent --node-rank=$node --nproc-per-node=${devices[node]} $command" <&5 5<&- ||
      { echo "${hosts[node]}: exit code $?: the other hosts end their ranks" >&2; kill -USR1 $$; }; } &
done
wait
"""


def local(job: LaunchJob, *, port: int | None = None) -> str:
    """Return a bash script in which one torchrun starts all ranks on this node, regardless of the plan's nodes.

    For a plan of one node, this is the job. For others, it tests the training script where it was written, and the
    local rank of each process is its rank. When a rank fails, or after Ctrl-C or SIGTERM, torchrun ends the others and
    exits with 1. Rank 0 listens at `port`; None is a free one, found at the start.

    Raises ArgumentError for an invalid port.

    >>> import hpgo
    >>> from hpgo.launch import LaunchJob
    >>> cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100)
    >>> plan = hpgo.plan(hpgo.read_profile("vgg-19"), cluster, global_batch_size=64)
    >>> print(local(LaunchJob.of(plan, "train.py"), port=29500).splitlines()[-1].partition(" --master-addr")[0])
    exec python3 -m torch.distributed.run --nnodes=1 --node-rank=0 --nproc-per-node=2
    """
    check_job(job)
    nodes = len(job.nodes)
    note = [f"all ranks of {pluralize(nodes, 'node')} start on this one"] if nodes > 1 else []
    where = f'--node-rank=0 --nproc-per-node={job.ranks} --master-addr=127.0.0.1 --master-port="$MASTER_PORT"'
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(*note),
            *job.exports,
            *master_port(port, "$$"),
            f"exec {_agent(job, 1)} {where} {_words(job.torchrun_script)}",
            "",
        ]
    )


def ssh_hosts(job: LaunchJob, *, hosts: Sequence[str] | None = None, port: int = 29500) -> str:
    """Return a bash script that starts torchrun on each node over ssh, in a folder of the same name on every host.

    `hosts` are `name` or `user@name`, one for each node; None takes the cluster's names of its nodes. Hosts need bash,
    PyTorch and a login without a password. When a rank fails, or when the script is interrupted or loses a connection,
    the ranks of all hosts end.

    Raises ArgumentError for hosts that do not match the nodes, and for an invalid port.

    >>> import hpgo
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = ssh_hosts(LaunchJob.of(plan, "train.py"), hosts=["node-0", "node-1"])
    >>> [line for line in text.splitlines() if line.startswith("hosts")]
    ['hosts=(node-0 node-1)']
    """
    check_job(job)
    names = job.hosts(hosts)
    where = f"--master-addr={_address(names[0])} --master-port={checked_port(port)}"
    # Hosts do not inherit the environment of this script, so `env` sets it there.
    variables = ["env", *(f"{name}={value}" for name, value in job.environment)] if job.environment else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(),
            f"hosts=({_words(names)})",
            f"devices=({' '.join(str(node.ranks) for node in job.nodes)})",
            f"agent={in_shell(f'{shlex.join(variables)} {_agent(job, len(job.nodes))} {where}'.lstrip())}",
            f"command={in_shell(shlex.join(job.torchrun_script))}",
            f"host='{_HOST}'",
            _SSH,
        ]
    )


def torchrun(
    job: LaunchJob,
    *,
    hosts: Sequence[str] | None = None,
    port: int | None = None,
    setup: Sequence[str] = (),
) -> str:
    """Return a bash script that takes the number of the node on which it is started, and calls torchrun there.

    The rendezvous is static, so the ranks of a node have consecutive numbers. Nodes may have different numbers of
    devices. `hosts` are as in `ssh_hosts`, but only the first is used; a plan of one node needs none. With `port` None,
    it is a free port on one node, and 29500 on several, which must agree.

    `setup` are lines of bash that run first. They may set MASTER_ADDR, the address of the first node, which replaces
    `hosts` then.

    Raises ArgumentError for hosts that do not match the nodes, and for an invalid port.

    >>> import hpgo
    >>> from hpgo.launch import LaunchJob
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = torchrun(LaunchJob.of(plan, "train.py"), hosts=["node-0", "node-1"])
    >>> print(text.splitlines()[-4].strip())
    1) set -- --node-rank=1 --nproc-per-node=8 ;; # node-1
    """
    check_job(job)
    nodes, setup = len(job.nodes), setup_lines(setup)
    from_setup = bool(setup) and hosts is None
    alone = nodes == 1 and hosts is None
    names = ("127.0.0.1",) if alone else ("",) * nodes if from_setup else job.hosts(hosts)
    rows = [
        f"  {number}) set -- --node-rank={number} --nproc-per-node={node.ranks} ;;"
        + (f" # {names[number]}" if names[number] and nodes > 1 else "")
        for number, node in enumerate(job.nodes)
    ]
    # On several nodes, each runs this script separately, so a free port found on one would be unknown on the others.
    port_lines = master_port(None, "$$") if nodes == 1 and port is None else []
    port_word = '"$MASTER_PORT"' if port_lines else checked_port(29500 if port is None else port)
    if from_setup and not port_lines and port is None:
        port_word = '"${MASTER_PORT:-29500}"'
    address = _address(names[0]) or '"${MASTER_ADDR:?}"'
    where = f"--master-addr={address} --master-port={port_word}"
    note = ["start it on every node, with the node's number: `bash FILE 0` on the first"] if nodes > 1 else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(*note),
            *setup,
            *job.exports,
            *([_address_check(_address(names[0]))] if nodes > 1 and names[0] else []),
            f"case ${{1-{0 if nodes == 1 else ''}}} in",
            *rows,
            f'  *) echo "give the number of this node, from 0 to {nodes - 1}" >&2; exit 2 ;;',
            "esac",
            *port_lines,
            f'exec {_agent(job, nodes)} {where} "$@" {_words(job.torchrun_script)}',
            "",
        ]
    )


def _agent(job: LaunchJob, nodes: int) -> str:
    """Return the words that start torchrun, the agent of one of `nodes` nodes, quoted for a shell."""
    return f"{_words(job.torchrun)} --nnodes={nodes}"


def _address_check(host: str) -> str:
    """Return a line that warns if the host of rank 0 has no address, because torchrun then tries for minutes."""
    # Not every system has getent, and names may appear later, so this is no error.
    warning = f'echo "warning: {host}, the host of rank 0, has no address on this host" >&2'
    return f"! command -v getent > /dev/null || getent ahosts {host} > /dev/null || {warning}"


def _words(words: Sequence[str]) -> str:
    return " ".join(map(in_shell, words))


def _address(host: str) -> str:
    return host.rpartition("@")[2]
