"""Jobs without a scheduler, as bash scripts: all ranks here, on hosts over ssh, or by torchrun on each machine."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.base.wording import counted
from hpgo.launch.job import check_job, checked_port, master_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.launch.job import Job

# No text below has a single quote, so that it can stand between two. Children are process groups of their own (-m):
# what a rank started ends with it, and Ctrl-C reaches the script alone, which ends them in order. A child that fails
# says so by a signal, since `wait -n` overlooks one that has ended before.
_ENDING = r"""folder=$(mktemp -d) && mkfifo "$folder/codes" || exit 1
exec 3<> "$folder/codes"
rm -r "$folder"
groups=()
finish() {
  trap "" INT TERM HUP USR1
  for group in "${groups[@]}" ${watcher-}; do kill -TERM -- "-$group"; done
  local until_s=$((SECONDS + 10))
  while ((SECONDS < until_s)); do
    left=0
    for group in "${groups[@]}"; do kill -0 -- "-$group" && left=1; done
    ((left)) || exit "$1"
    sleep 0.1
  done
  for group in "${groups[@]}"; do kill -KILL -- "-$group"; done
  exit "$1"
} 2> /dev/null
failed() { echo "$1" >&3; kill -USR1 $$; }
trap "finish 130" INT; trap "finish 143" TERM HUP
trap "read -r code <&3; echo \"exit code \$code: the other ranks end\" >&2; finish \$code" USR1
set -m
"""
_WAITING = r"""set +m
wait "${groups[@]}"
"""
# What waits for a rank lives until that has ended, even if it is told to end: where nobody clears away what has lost
# its parent, as in many containers, the group would seem to be there for ever. Its "Terminated" is not for users.
# `bash -c '…' ranks "DEVICES OF EACH MACHINE" FIRST-MACHINE LAST-MACHINE COMMAND…` starts the ranks of these machines.
_RANKS = r"""read -ra devices <<< "$1"; first=$2; last=$3; shift 3
export WORLD_SIZE=0 GROUP_WORLD_SIZE=${#devices[@]} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for count in "${devices[@]}"; do WORLD_SIZE=$((WORLD_SIZE + count)); done
export RANK=0 GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE
for GROUP_RANK in "${!devices[@]}"; do
  LOCAL_WORLD_SIZE=${devices[GROUP_RANK]}
  for ((LOCAL_RANK = 0; LOCAL_RANK < LOCAL_WORLD_SIZE; LOCAL_RANK++, RANK++)); do
    if ((first <= GROUP_RANK && GROUP_RANK <= last)); then
      { trap : TERM; "$@" < /dev/null 2>&4 3<&- 4>&- || failed $?; } 4>&2 2> /dev/null &
      groups+=($!)
    fi
  done
done
"""
# When the connection ends, so does the input, and with it the ranks: bash may lose a signal that comes right before it
# waits, so there are more. The signal is TERM, since bash cannot trap what was ignored when it started, and HUP is
# ignored under `nohup`.
_WATCHER = r"""{ cat > /dev/null 3<&-; while kill -TERM $$; do sleep 1; done; } & watcher=$!
"""
_UNWATCHED = r"""trap "" TERM; kill -TERM -- "-$watcher"
"""
# Every ssh reads from a pipe that nobody writes to, and that this script alone holds open until it ends.
_SSH = r"""folder=$(mktemp -d) && mkfifo "$folder/open" || exit 1
exec 4<> "$folder/open" 5< "$folder/open"
rm -r "$folder"
for machine in "${!hosts[@]}"; do
  { exec 4<&-
    ssh -o BatchMode=yes -T "${hosts[machine]}" "cd $(printf %q "$PWD") && export MASTER_ADDR=$address" \
      "MASTER_PORT=$port && exec bash -c '$ranks' ranks '${devices[*]}' $machine $machine $command" \
      <&5 3<&- 5<&- || failed $?; } &
  groups+=($!)
done
"""


def local(job: Job, *, port: int | None = None) -> str:
    """A bash script that starts all ranks on this machine, whatever machines the plan has.

    For a plan of one machine this is the job; for others it tries the training script where it was written, and local
    ranks are those of the plan's machines. When a rank fails the others end, and the script exits with its code; so
    they do on Ctrl-C (130) and on SIGTERM (143). Rank 0 listens at `port`; None is a free one, found at the start.

    Raises ArgumentError for a port that is none.

    >>> import hpgo
    >>> from hpgo.launch import Job
    >>> cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100)
    >>> plan = hpgo.plan(hpgo.read_profile("vgg-19"), cluster, global_batch_size=64)
    >>> print(local(Job.of(plan, "train.py")).splitlines()[-1])
    ' ranks 2 0 0 python3 train.py
    """
    check_job(job)
    machines = len(job.nodes)
    here = [f"all ranks of {counted(machines, 'machine')} start on this one"] if machines > 1 else []
    devices = in_shell(" ".join(str(node.ranks) for node in job.nodes))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(*here),
            "export MASTER_ADDR=127.0.0.1",
            *master_port(port, "$$"),
            f"exec bash -c '{_ENDING}{_RANKS}{_WAITING}' ranks {devices} 0 {machines - 1} {_words(job.command)}",
            "",
        ]
    )


def ssh_hosts(job: Job, *, hosts: Sequence[str] | None = None, port: int = 29500) -> str:
    """A bash script that starts each machine's ranks over ssh, in the folder of the same name on every host.

    `hosts` are `name` or `user@name`, one for each machine; the cluster's names of its machines if left out. Hosts
    need bash and a login without a password. When a rank fails, or the script is interrupted or loses
    a connection, the ranks of all hosts end.

    Raises ArgumentError for hosts that don't match the machines, and for a port that is none.

    >>> import hpgo
    >>> from hpgo.launch import Job
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = ssh_hosts(Job.of(plan, "train.py"), hosts=["node-0", "node-1"])
    >>> [line for line in text.splitlines() if line.startswith("hosts")]
    ['hosts=(node-0 node-1)']
    """
    check_job(job)
    names = job.hosts(hosts)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(),
            f"hosts=({_words(names)})",
            f"devices=({' '.join(str(node.ranks) for node in job.nodes)})",
            f"address={_address(names[0])} port={checked_port(port)}",
            f"command={in_shell(shlex.join(job.command))}",
            "",
            "# On each host, where it ends its ranks when one fails or when the connection ends.",
            f"ranks='{_ENDING}{_RANKS}{_WATCHER}{_WAITING}{_UNWATCHED}'",
            "",
            f"{_ENDING}{_SSH}{_WAITING}",
        ]
    )


def torchrun(job: Job, *, hosts: Sequence[str] | None = None, port: int | None = None) -> str:
    """A bash script that takes the number of the machine where it is started, and calls torchrun there.

    The ranks of a machine follow each other because the rendezvous is static; machines may have different numbers of
    devices. `hosts` as for `ssh_hosts`, but only the first is named; a plan of one machine needs none. `port` None is
    a free one on one machine, and 29500 on several, which have to agree.

    Raises ArgumentError for hosts that don't match the machines, and for a port that is none.

    >>> import hpgo
    >>> from hpgo.launch import Job
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> text = torchrun(Job.of(plan, "train.py"), hosts=["node-0", "node-1"])
    >>> print(text.splitlines()[-4].strip())
    1) set -- --node-rank=1 --nproc-per-node=8 ;; # node-1
    """
    check_job(job)
    machines = len(job.nodes)
    names = ("127.0.0.1",) if machines == 1 and hosts is None else job.hosts(hosts)
    rows = [
        f"  {machine}) set -- --node-rank={machine} --nproc-per-node={node.ranks} ;;"
        + (f" # {names[machine]}" if machines > 1 else "")
        for machine, node in enumerate(job.nodes)
    ]
    python, *words = job.command
    chosen = master_port(None, "$$") if machines == 1 and port is None else []
    told = '"$MASTER_PORT"' if chosen else checked_port(29500 if port is None else port)
    where = f"--nnodes={machines} --master-addr={_address(names[0])} --master-port={told}"
    how = ["start it on every machine, with the machine's number: `bash FILE 0` on the first"] if machines > 1 else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *job.header(*how),
            f"case ${{1-{0 if machines == 1 else ''}}} in",
            *rows,
            f'  *) echo "which machine is this? give a number from 0 to {machines - 1}" >&2; exit 2 ;;',
            "esac",
            *chosen,
            f'exec {in_shell(python)} -m torch.distributed.run {where} "$@" {_words(words)}',
            "",
        ]
    )


def _words(words: Sequence[str]) -> str:
    return " ".join(map(in_shell, words))


def _address(host: str) -> str:
    return host.rpartition("@")[2]
