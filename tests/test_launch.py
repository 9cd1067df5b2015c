"""Jobs: every target starts each rank where the plan has it, and names never become code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusals import refused
from toys import chain

import hpgo
from hpgo import launch

ARGUMENTS = (
    "--steps",
    "10",
    "two words",
    "it's",
    'say "hi"',
    "$HOME $(touch pwned)",
    "line\ntouch pwned",
    "no",
    "-x\t",
)
SAYS = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
print(json.dumps([{name: os.environ[name] for name in names}, sys.argv[1:], os.getpid()]) + "\\n", end="", flush=True)
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "3":
    sys.exit(7)
if sys.argv[1:] in (["fail"], ["wait"]):
    time.sleep(300)
"""
HAS_TORCH, HAS_RAY = (importlib.util.find_spec(name) is not None for name in ("torch", "ray"))
NEEDS_TORCH = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed: pip install torch")


def nodes(*sizes: int, kinds: str = "") -> hpgo.Cluster:
    """A cluster of machines with so many devices, each of the type that its letter names."""
    alike = hpgo.Cluster.of(nodes=len(sizes), devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    kind = kinds or "V" * len(sizes)
    return replace(
        alike,
        nodes=tuple(
            replace(node, count=size, device=replace(node.device, name=kind[at]))
            for at, (node, size) in enumerate(zip(alike.nodes, sizes, strict=True))
        ),
    )


def job(
    cluster: hpgo.Cluster,
    *arguments: str,
    name: str = "toy",
    script: str = "says.py",
    elsewhere: Any = None,
    **options: Any,
) -> launch.LaunchJob:
    """Two stages on devices 0 and 2; the other devices are idle."""
    plan = hpgo.evaluate(chain([1, 1], 1, 1, name=name), cluster, [(1, [0]), (1, [2])], global_batch_size=4)
    return launch.LaunchJob.of(plan, script, arguments, cluster=elsewhere, **options)


def placed(*sizes: int) -> set[tuple[str, ...]]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK of every device, numbered machine by machine."""
    where = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    return {tuple(map(str, (rank, len(where), local, sizes[node], node))) for rank, (node, local) in enumerate(where)}


def said(text: str) -> tuple[set[tuple[str, ...]], list[list[str]], set[tuple[str, str]], list[int]]:
    """Where the ranks were, what arguments they got, whom they shall meet, and their process ids."""
    records = [json.loads(line[line.index("[") :]) for line in text.splitlines() if '"RANK"' in line]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return (
        {tuple(where[name] for name in names) for where, _, _ in records},
        [arguments for _, arguments, _ in records],
        {(where["MASTER_ADDR"], where["MASTER_PORT"]) for where, _, _ in records},
        [process for _, _, process in records],
    )


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def soon_dead(processes: list[int]) -> bool:
    until = time.monotonic() + 30
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, processes))


def ended(process: subprocess.Popen[str]) -> str:
    """What a script that is told to end still prints; names the processes that keep its output open if it doesn't."""
    assert process.stdout is not None
    try:
        return process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        pipe = Path(f"/proc/self/fd/{process.stdout.fileno()}").readlink()
        pytest.fail("\n".join(["it has not ended:", *holders(pipe)]))


def holders(pipe: Path) -> set[str]:
    """Number, name, state and parent of each process that has `pipe` open, this one aside."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        process = link.parent.parent
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if link.readlink() == pipe and process.name != str(os.getpid()):
                found.add(" ".join((process / "stat").read_text(encoding="utf-8").split()[:4]))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the training script and an `ssh` that runs its command here, as another shell would."""
    (tmp_path / "says.py").write_text(SAYS, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done\n'
        'echo "to $1" >&2; shift; cd /; exec sh -c "$*"\n',
        encoding="utf-8",
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(target: str, given: launch.LaunchJob) -> str:
    """What `target` gets, with the options that it can't do without."""
    hosts = [f"me@node-{at}" for at in range(len(given.nodes))]
    options: dict[str, dict[str, Any]] = {
        "torchrun": {"hosts": hosts},
        "ssh-hosts": {"hosts": hosts},
        "pytorchjob": {"image": "me/train:1"},
    }
    return launch.text(given, target, **options.get(target, {}))


NAMES = ["toy", "x\ntouch pwned", "'; touch pwned; '", "$(touch pwned)", "`touch pwned`", "\x1b[2J\r", "*", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_bash_reads_every_script_whatever_names_hold(name: str, place: Path) -> None:
    given = job(nodes(2, 2), *ARGUMENTS, name=name)
    for target in ("local", "torchrun", "slurm", "ssh-hosts"):
        text = written(target, given)
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
        assert all(line.startswith("#") for line in text.splitlines()[: 2 + bool(given.idle)])
    stubbed(place)
    for target in ("local", "ssh-hosts"):
        call = ["bash", "-c", written(target, job(nodes(2, 2), *ARGUMENTS, name=name, python="python-stub"))]
        done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
        for words in done.stdout.split("-m\0")[1:]:
            assert words.split("\0")[-len(ARGUMENTS) - 1 : -1] == list(ARGUMENTS)
    assert not list(place.rglob("pwned"))


def stubbed(place: Path) -> None:
    """Puts a `python-stub` into the path that prints what it is called with."""
    stub = place / "bin/python-stub"
    # In one write, since two hosts call it at the same time.
    stub.write_text('#!/bin/sh\nexec printf "%s\\0" "$@"\n', encoding="utf-8")
    stub.chmod(0o755)


@NEEDS_TORCH
@pytest.mark.parametrize("sizes", [(3,), (1, 2)])
def test_local_starts_every_device_as_a_rank_of_this_machine(sizes: tuple[int, ...], place: Path) -> None:
    text = launch.local(job(nodes(*sizes), *ARGUMENTS, python=sys.executable), port=29411)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    where, arguments, meets, _ = said(done.stdout)
    assert where == placed(3)
    assert arguments == [list(ARGUMENTS)] * 3
    assert meets == {("127.0.0.1", "29411")}
    assert not list(place.rglob("pwned"))


@NEEDS_TORCH
def test_ssh_starts_each_machines_ranks_in_the_same_folder_of_its_host(place: Path) -> None:
    given = job(nodes(2, 1), *ARGUMENTS, python=sys.executable)
    text = launch.ssh_hosts(given, hosts=["127.0.0.1", "me@node-b"], port=29412)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("to ")) == [
        "to 127.0.0.1",
        "to me@node-b",
    ]
    assert "hosts end their ranks" not in done.stderr
    where, arguments, meets, _ = said(done.stdout)
    assert where == placed(2, 1)
    assert arguments == [list(ARGUMENTS)] * 3
    assert meets == {("127.0.0.1", "29412")}
    assert not list(place.rglob("pwned"))


def started(target: str, *sizes: int, says: str) -> list[str]:
    """A call of bash that starts a job on machines of these sizes, all of which are this one."""
    given = job(nodes(*sizes), says, python=sys.executable)
    options = {"hosts": ["127.0.0.1", "localhost"][: len(sizes)], "port": 29413} if target == "ssh-hosts" else {}
    return ["bash", "-c", launch.text(given, target, **options)]


@NEEDS_TORCH
@pytest.mark.parametrize("target", ["local", "ssh-hosts"])
def test_a_rank_that_fails_ends_the_others_and_the_job_with_an_error(target: str, place: Path) -> None:
    call = started(target, 2, 2, says="fail")
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.search(r"exitcode\s*: 7", done.stderr), "torchrun says which rank failed, and how"
    assert ("localhost: exit code 1: the other hosts end their ranks" in done.stderr) == (target == "ssh-hosts")
    assert not any(map(alive, said(done.stdout)[3]))


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("target", "number", "code"),
    [
        ("local", signal.SIGINT, 1),
        pytest.param("local", signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param("ssh-hosts", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("ssh-hosts", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_all_ranks(target: str, number: int, code: int, place: Path) -> None:
    """In every run, each target gets one of both signals."""
    call = started(target, 2, 1, says="wait")
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(number)
    ended(process)
    assert process.returncode == code
    assert not any(map(alive, said("".join(lines))[3]))


@NEEDS_TORCH
@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["", "nohup"])
def test_ranks_on_other_hosts_end_when_the_connection_does(before: list[str], place: Path) -> None:
    """Also where SIGHUP is ignored."""
    call = [*before, *started("ssh-hosts", 2, 1, says="wait")]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ranks = said("".join(process.stdout.readline() for _ in range(3)))[3]
    process.kill()
    ended(process)
    assert soon_dead(ranks)


def test_torchrun_is_called_on_each_machine_with_its_number_and_devices(place: Path) -> None:
    stubbed(place)
    given = job(nodes(2, 3), *ARGUMENTS, python="python-stub")
    text = launch.torchrun(given, hosts=["me@node-a", "node-b"], port=1234)
    for node, devices in enumerate((2, 3)):
        call = ["bash", "-c", text, "job.sh", str(node)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=20, check=True)
        words = done.stdout.split("\0")[:-1]
        assert words[:2] == ["-m", "torch.distributed.run"]
        assert set(words[2:7]) == {
            "--nnodes=2",
            f"--node-rank={node}",
            f"--nproc-per-node={devices}",
            "--master-addr=node-a",
            "--master-port=1234",
        }
        assert words[7:] == ["says.py", *ARGUMENTS]
        if shutil.which("getent"):
            assert done.stderr == "warning: node-a, the host of rank 0, has no address on this host\n"
    for wrong in (["2"], []):
        call = ["bash", "-c", text, "job.sh", *wrong]
        done = subprocess.run(call, capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert "from 0 to 1" in done.stderr
    alone = ["bash", "-c", launch.torchrun(job(nodes(3), python="python-stub"))]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=20, check=True)
    assert "--nproc-per-node=3" in done.stdout.split("\0")


@NEEDS_TORCH
def test_torchrun_gives_machines_of_different_size_the_plans_ranks(place: Path) -> None:
    text = launch.torchrun(
        job(nodes(1, 2), *ARGUMENTS, python=sys.executable), hosts=["127.0.0.1", "localhost"], port=29437
    )
    agents = [
        subprocess.Popen(
            ["bash", "-c", text, "job.sh", str(node)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for node in (0, 1)
    ]
    texts = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    where, arguments, meets, _ = said("\n".join(texts))
    assert where == placed(1, 2)
    assert arguments == [list(ARGUMENTS)] * 3
    assert meets == {("127.0.0.1", "29437")}


SRUN = """
import itertools, os, subprocess, sys
at, components = 1, os.environ["COMPONENTS"].split()
while sys.argv[at].startswith("--"):
    at += 1
parts = [tuple(map(int, part.split("x"))) for part in components]
sizes = itertools.chain(*([size] * count for count, size in parts))
places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
for task, (node, local) in enumerate(places):
    where = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    subprocess.run(sys.argv[at:], env=os.environ | where, check=True)
print("srun", *sys.argv[1:at])
"""


@pytest.mark.parametrize(
    ("sizes", "kinds", "components"),
    [((2, 2), "VV", "2x2"), ((2, 2, 3), "VVT", "2x2 1x3"), ((2, 2, 2), "VTV", "1x2 1x2 1x2"), ((3,), "V", "1x3")],
)
def test_slurm_gets_a_component_for_machines_that_are_alike_and_numbers_ranks_as_the_plan(
    sizes: tuple[int, ...], kinds: str, components: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["partition=gpu", "time=1:00:00"]
    text = launch.slurm(job(nodes(*sizes, kinds=kinds), *ARGUMENTS), port=29500, sbatch=options)
    asked = [[]]  # type: list[list[str]]
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        if line == "hetjob":
            asked.append([])
        else:
            asked[-1].append(line)
    shapes = [dict(word.removeprefix("--").split("=", 1) for word in part) for part in asked]
    assert " ".join(f"{shape['nodes']}x{shape['ntasks-per-node']}" for shape in shapes) == components
    mixed = len(set(kinds)) > 1
    firsts = [kinds[sum(int(shape["nodes"]) for shape in shapes[:at])] for at in range(len(shapes))]
    assert [shape["gres"] for shape in shapes] == [
        f"gpu:{kind}:{shape['ntasks-per-node']}" if mixed else f"gpu:{shape['ntasks-per-node']}"
        for kind, shape in zip(firsts, shapes, strict=True)
    ]
    assert all((shape["partition"], shape["time"]) == ("gpu", "1:00:00") for shape in shapes)
    assert shapes[0]["job-name"] == "toy"

    (place / "srun.py").write_text(SRUN, encoding="utf-8")
    for name, does in (
        ("srun", f'exec {sys.executable} {place}/srun.py "$@"'),
        ("scontrol", "echo node-0; echo node-1"),
    ):
        (place / "bin" / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (place / "bin" / name).chmod(0o755)
    monkeypatch.setenv("COMPONENTS", components)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[0-1]")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    where, arguments, meets, _ = said(done.stdout)
    assert where == placed(*sizes)
    assert arguments == [list(ARGUMENTS)] * sum(sizes)
    assert meets == {("node-0", "29500")}
    assert ("--het-group=0-" in done.stdout) == (len(shapes) > 1)
    assert not list(place.rglob("pwned"))


@pytest.mark.parametrize("variable", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK_HET_GROUP_0"])
def test_srun_gets_the_processors_and_the_container_and_a_port_that_nobody_has(
    variable: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["cpus-per-task=12", "container-image=nvcr.io#nvidia/pytorch:26.01-py3", "container-mounts=/data:/data"]
    text = launch.slurm(job(nodes(2, 2)), sbatch=options)
    assert "#SBATCH --cpus-per-task=12" in text
    assert not re.search("^#SBATCH.*container", text, re.MULTILINE)
    for name, does in (
        ("srun", 'echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS $MASTER_PORT $*"'),
        ("scontrol", "echo node-0; echo node-1"),
    ):
        (place / "bin" / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (place / "bin" / name).chmod(0o755)
    for name, value in (("SLURM_JOB_NODELIST", "node-[0-1]"), (variable, "12"), ("SLURM_JOB_ID", "70007")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 20007))
        taken.listen()
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    processors, threads, port, *words = done.stdout.split()
    assert (processors, threads) == ("12", "12")
    assert 20007 < int(port) < 30000
    image, mounts = "--container-image=nvcr.io#nvidia/pytorch:26.01-py3", "--container-mounts=/data:/data"
    assert words.index(image) < words.index(mounts) < words.index("bash")


def test_jobs_of_one_machine_meet_at_a_free_port_unless_one_is_given() -> None:
    for write in (launch.local, launch.torchrun):
        assert "$((20000 + $$ % 10000))" in write(job(nodes(3)))
        assert "20000" not in write(job(nodes(3)), port=1234)
    several = launch.torchrun(job(nodes(2, 2)), hosts=["node-a", "node-b"])
    assert "--master-port=29500" in several


def _slurm_answers() -> bool:
    if not shutil.which("sinfo"):
        return False
    try:
        return bool(subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10, check=True).stdout)
    except subprocess.SubprocessError:
        return False


@pytest.mark.skipif(not _slurm_answers(), reason="no SLURM answers here")
@pytest.mark.parametrize("kinds", ["VV", "VT"])
def test_sbatch_accepts_the_scripts(kinds: str, place: Path) -> None:
    resource = (
        "gpu"
        if "gpu" in subprocess.run(["sinfo", "-ho%G"], capture_output=True, text=True, check=True).stdout
        else None
    )
    text = launch.slurm(job(nodes(1, 2, kinds=kinds)), resource=resource if kinds == "VV" else None)
    done = subprocess.run(
        ["sbatch", "--test-only"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# What Kubeflow's published definitions say of the fields in use: kind of value, and what must be there.
TRAINER = {"image": str, "command": list, "numNodes": int, "numProcPerNode": int, "resourcesPerNode": dict}
CONTAINER = {"name": str, "image": str, "command": list, "resources": dict, "volumeMounts": list}


def check(section: dict[str, Any], kinds: dict[str, type], *required: str) -> None:
    assert set(required) <= set(section) <= set(kinds)
    assert all(type(section[key]) is kinds[key] for key in section)


def expanded(words: list[str]) -> list[str]:
    """A container's command after Kubernetes has put in variables, of which there are none."""
    return [re.sub(r"\$\$", "$", word) for word in words]


@pytest.mark.parametrize("name", NAMES)
def test_kubeflow_gets_a_pod_a_machine_in_the_form_of_its_definitions(name: str) -> None:
    given = job(nodes(4, 4, 4), *ARGUMENTS, "$(HOME)", name=name)
    command = ["python3", "-m", "torch.distributed.run", "says.py", *ARGUMENTS, "$(HOME)"]
    train = yaml.safe_load(launch.kubeflow(given, image="me/train:1"))
    assert (train["apiVersion"], train["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", train["metadata"]["name"])
    check(train["spec"], {"runtimeRef": dict, "trainer": dict}, "runtimeRef", "trainer")
    assert train["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = train["spec"]["trainer"]
    check(trainer, TRAINER)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert expanded(trainer["command"]) == command

    older = yaml.safe_load(launch.pytorchjob(given, image="me/train:1", resource="amd.com/gpu"))
    assert (older["apiVersion"], older["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check(older["spec"], {"nprocPerNode": str, "pytorchReplicaSpecs": dict}, "nprocPerNode", "pytorchReplicaSpecs")
    assert older["spec"]["nprocPerNode"] == "4"
    replicas = older["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 2}
    for replica in replicas.values():
        check(replica, {"replicas": int, "restartPolicy": str, "template": dict}, "template")
        (container,) = replica["template"]["spec"]["containers"]
        check(container, CONTAINER, "name", "image")
        assert container["name"] == "pytorch"
        assert container["resources"] == {"limits": {"amd.com/gpu": 4}}
        assert expanded(container["command"]) == command
        assert container["volumeMounts"] == [{"name": "volume-0", "mountPath": "/dev/shm"}]
        assert replica["template"]["spec"]["volumes"] == [{"name": "volume-0", "emptyDir": {"medium": "Memory"}}]


@pytest.mark.parametrize("name", NAMES)
def test_ray_gets_a_worker_a_machine_and_the_command_as_data(name: str) -> None:
    text = launch.ray(job(nodes(2, 2), *ARGUMENTS, name=name))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values["JOB"] == {
        "nodes": 2,
        "devices": 2,
        "command": ["python3", "says.py", *ARGUMENTS],
        "environment": {},
    }
    assert (values["USE_GPU"], values["RESOURCES"]) == (True, {"CPU": 2, "GPU": 2})


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_starts_the_plans_ranks_on_as_many_nodes(place: Path) -> None:
    given = job(nodes(1, 1, 1), *ARGUMENTS, script=str(place / "says.py"), python=sys.executable)
    launch.save(given, "ray", place / "start.py", resource=None)
    cluster = (
        "import subprocess, sys, os, ray.cluster_utils\n"
        "cluster = ray.cluster_utils.Cluster()\n"
        "for _ in range(3): cluster.add_node(num_cpus=2)\n"
        "done = subprocess.run([sys.executable, 'start.py'], env=os.environ | {'RAY_ADDRESS': cluster.address})\n"
        "cluster.shutdown(); sys.exit(done.returncode)\n"
    )
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", cluster],
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    colours = re.compile(r"\x1b\[[0-9;]*m")
    lines = [line.partition(") ")[2] for line in colours.sub("", done.stdout + done.stderr).splitlines()]
    where, arguments, meets, _ = said("\n".join(lines))
    assert where == placed(1, 1, 1)
    assert arguments == [list(ARGUMENTS)] * 3
    assert len(meets) == 1


@pytest.mark.parametrize("target", ["kubeflow", "pytorchjob", "ray"])
def test_mixed_machines_are_refused_where_they_could_change_places(target: str) -> None:
    for cluster in (nodes(2, 3), nodes(2, 2, kinds="VT")):
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "2") as caught:
            written(target, job(cluster))
        assert "slurm" in caught.value.hint


def test_a_plan_that_does_not_fit_is_not_started() -> None:
    profile = hpgo.read_profile("bert-48")
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory="4 GB")
    plan = hpgo.evaluate(profile, cluster, [(26, [0]), (27, [1])], global_batch_size=64)
    assert not plan.fits
    with refused(hpgo.errors.ArgumentError, "insufficient_memory", "GB"):
        launch.LaunchJob.of(plan, "train.py")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: job(nodes(3), script="-c"), "script is `-c`"),
        (lambda: job(nodes(3), python=" "), "interpreter is ` `"),
        (lambda: job(nodes(3), "a\0b"), "argument of a command"),
        (lambda: launch.LaunchJob.of(3, "train.py"), "the plan is 3"),
        (lambda: launch.local(job(nodes(3)), port=0), "the port is 0"),
        (lambda: launch.ssh_hosts(job(nodes(2, 1))), "does not name its 2 nodes"),
        (lambda: launch.ssh_hosts(job(nodes(2, 1)), hosts=["a"]), "1 host given for 2 nodes"),
        (lambda: launch.ssh_hosts(job(nodes(2, 1)), hosts=["a", "a"]), "named for two nodes"),
        (lambda: launch.ssh_hosts(job(nodes(2, 1)), hosts=["a", "-oProxyCommand=x"]), "no host name"),
        (lambda: launch.torchrun(job(nodes(2, 1)), hosts=["a", "b;touch pwned"]), "no host name"),
        (
            lambda: launch.slurm(job(nodes(3)), sbatch=["nodes=3"]),
            "`nodes` would change the number or place of ranks",
        ),
        (lambda: launch.slurm(job(nodes(3)), sbatch=["partition=a\n#SBATCH --array=1-9"]), "no option of sbatch"),
        (lambda: launch.slurm(job(replace(nodes(3), name="x")), resource="g p u"), "no resource of SLURM"),
        (lambda: launch.kubeflow(job(nodes(3)), image="a b"), "the image is"),
        (lambda: launch.text(job(nodes(3)), "local", image="x"), "`local` has no option `image`"),
        (lambda: launch.text(job(nodes(3)), "pytorchjob"), "`pytorchjob` needs `image`"),
        (lambda: launch.text(job(nodes(3)), "lokal"), "no target `lokal`"),
    ],
)
def test_what_can_not_be_started_is_refused(make: Any, says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=re.escape(says)) as caught:
        make()
    assert caught.value.hint


def test_a_plan_for_a_launcher_is_refused_where_its_ranks_would_land_elsewhere() -> None:
    cluster, profile = nodes(2, 2), chain([1.0] * 4)
    plan = hpgo.plan(profile, cluster, global_batch_size=8, framework="deepspeed")
    assert launch.LaunchJob.of(plan, "train.py").ranks == 4
    idle = hpgo.evaluate(profile, cluster, [(2, [0]), (2, [1])], global_batch_size=8)
    swapped = hpgo.evaluate(profile, cluster, [(2, [2, 3]), (2, [0, 1])], global_batch_size=8)
    for given, words in ((idle, "leaves 2 devices idle"), (swapped, "in another order")):
        assert launch.LaunchJob.of(given, "train.py").ranks == 4, "fine for processes that ask the plan"
        with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
            launch.LaunchJob.of(replace(given, restriction=plan.restriction), "train.py")
        assert caught.value.hint


def test_another_cluster_than_the_plans_is_refused() -> None:
    for other in (nodes(2, 1), nodes(4)):
        with refused(hpgo.errors.ArgumentError, "mismatch"):
            job(nodes(3), elsewhere=other)


def test_a_device_of_several_gpus_gets_as_many_ranks_that_follow_each_other() -> None:
    profile = replace(hpgo.read_profile("vgg-19"), gpus_per_device=4)
    cluster = replace(nodes(2, 1), gpus_per_device=4)
    plan = hpgo.evaluate(profile, cluster, [(26, [0, 2])], global_batch_size=64)
    given = launch.LaunchJob.of(plan, "train.py")
    assert [node.ranks for node in given.nodes] == [8, 4]
    assert given.idle == (4, 5, 6, 7)
    assert "rank r runs on GPU r mod 4 of device r div 4" in launch.local(given)
    assert "ranks 4–7 idle" in launch.local(given)


def test_a_plan_saved_without_its_cluster_takes_the_one_it_was_made_for(place: Path) -> None:
    plan = saved_plan(place)
    hpgo.Plan.read(plan).save(plan, embed=False)
    with refused(hpgo.errors.ArgumentError, "mismatch"):
        launch.LaunchJob.of(hpgo.Plan.read(plan), "says.py")
    given = launch.LaunchJob.of(hpgo.Plan.read(plan), "says.py", cluster=nodes(2, 2))
    assert [node.ranks for node in given.nodes] == [2, 2]


def hpgo_launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpgo", "launch", *words], capture_output=True, text=True, timeout=60, check=False
    )


def saved_plan(place: Path) -> str:
    plan = hpgo.evaluate(chain([1, 1], 1, 1), nodes(2, 2), [(1, [0, 1]), (1, [2])], global_batch_size=4)
    plan.save(place / "plan.json")
    return "plan.json"


@NEEDS_TORCH
def test_the_command_runs_the_job_here_and_ends_as_it_does(place: Path) -> None:
    plan = saved_plan(place)
    here = [plan, "--on", "local", "--script", "says.py", "--python", sys.executable]
    done = hpgo_launch(*here, "--port", "29433", "--", *ARGUMENTS)
    assert done.returncode == 0
    where, arguments, meets, _ = said(done.stdout)
    assert where == placed(4)
    assert arguments == [list(ARGUMENTS)] * 4
    assert meets == {("127.0.0.1", "29433")}
    assert hpgo_launch(*here, "--", "fail").returncode == 1


@NEEDS_TORCH
def test_ctrl_c_ends_the_job_that_the_command_runs(place: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "hpgo",
        "launch",
        saved_plan(place),
        "--on",
        "local",
        "--script",
        "says.py",
        "--python",
        sys.executable,
        "--",
        "wait",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    ranks = said("".join(process.stdout.readline() for _ in range(4)))[3]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    ended(process)
    assert process.returncode == 1
    assert not any(map(alive, ranks))


def test_the_command_writes_what_the_functions_return(place: Path) -> None:
    plan = saved_plan(place)
    (place / "hosts").write_text("node-0  # the first\n\nme@node-1\n", encoding="utf-8")
    given = launch.LaunchJob.of(hpgo.Plan.read(plan), "says.py", ["a b"])
    cases = {
        "local": ([], {}),
        "torchrun": (["--hosts", "hosts"], {"hosts": ["node-0", "me@node-1"]}),
        "ssh-hosts": (["--hosts", "hosts", "--port", "7"], {"hosts": ["node-0", "me@node-1"], "port": 7}),
        "slurm": (
            ["--sbatch", "time=9", "--srun", "comment=a b", "--resource", "none"],
            {"sbatch": ["time=9"], "srun": ["comment=a b"], "resource": None},
        ),
        "kubeflow": (["--runtime", "mine"], {"runtime": "mine"}),
        "pytorchjob": (["--image", "me/x:1"], {"image": "me/x:1"}),
        "ray": ([], {}),
    }  # type: dict[str, tuple[list[str], dict[str, Any]]]
    assert set(cases) == set(launch.TARGETS)
    for target, (words, options) in cases.items():
        call = [plan, "--on", target, "--script", "says.py", *words]
        done = hpgo_launch(*call, "-o", "job", "--json", "--", "a b")
        assert (done.returncode, done.stderr) == (0, "")
        text = launch.text(given, target, **options)
        assert (place / "job").read_text(encoding="utf-8") == text
        told = json.loads(done.stdout)
        assert (told["format"], told["on"], told["text"], told["ranks"]) == ("hpgo.launch", target, text, 4)
        assert [node["first_rank"] for node in told["nodes"]] == [0, 2]
        assert told["idle"] == [3]
        if target != "local":
            assert hpgo_launch(*call, "--", "a b").stdout == text


@pytest.mark.parametrize("target", ["local", "torchrun", "slurm", "ssh-hosts", "kubeflow", "pytorchjob", "ray"])
def test_ranks_get_the_variables_of_the_job(target: str, place: Path) -> None:
    value = "a b $(touch pwned) $HOME 'c'\nd"
    given = job(nodes(2, 2), python="python-stub", environment={"NCCL_DEBUG": value})
    text = written(target, given)
    stub = '#!/bin/sh\nprintf "%s" "$NCCL_DEBUG" > "$RECORD"\n'
    for name in ("python-stub", "srun"):
        (place / "bin" / name).write_text(stub, encoding="utf-8")
        (place / "bin" / name).chmod(0o755)
    (place / "bin/scontrol").write_text("#!/bin/sh\necho node-0\n", encoding="utf-8")
    (place / "bin/scontrol").chmod(0o755)
    if target in {"kubeflow", "pytorchjob"}:
        # Kubernetes replaces `$(NAME)`, but reads `$$` as a dollar.
        assert [{"name": "NCCL_DEBUG", "value": value.replace("$", "$$")}] in list(variables_in(yaml.safe_load(text)))
        return
    if target == "ray":
        assert f"'environment': {{'NCCL_DEBUG': {value!r}}}" in text
        return
    environment = os.environ | {"RECORD": str(place / "record"), "SLURM_JOB_NODELIST": "node-0"}
    subprocess.run(["bash", "-c", text, "job.sh", "0"], env=environment, timeout=60, check=True)
    assert (place / "record").read_text(encoding="utf-8") == value
    assert not list(place.rglob("pwned"))


def variables_in(document: Any) -> list[Any]:
    """The lists under the key `env`, at any depth."""
    if isinstance(document, dict):
        own = [document["env"]] if "env" in document else []
        return [*own, *(found for value in document.values() for found in variables_in(value))]
    return [found for value in document for found in variables_in(value)] if isinstance(document, list) else []


def test_variables_that_launchers_set_are_refused() -> None:
    for name, why in (("RANK", "set for each rank"), ("A=B", "no name"), ("", "no name")):
        with pytest.raises(hpgo.errors.ArgumentError, match=why):
            job(nodes(2, 2), environment={name: "1"})


def test_a_script_named_like_ray_would_hide_it(place: Path) -> None:
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        launch.save(job(nodes(2, 2)), "ray", place / "ray.py")
