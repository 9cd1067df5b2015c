"""Command `hpgo launch`: start the processes of a plan, or write a job file that starts them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NoReturn

import click

from hpgo.base.messages import shorten
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.job_folders import run_bash
from hpgo.cli.values import AS_JSON, CLUSTER_OF_PLAN, FILE, PLAN, is_folder_name

if TYPE_CHECKING:
    from hpgo.launch import LaunchJob, TargetName

# A copy of hpgo.launch.TARGETS: importing it would slow down `--help`.
_TARGETS = ("local", "torchrun", "slurm", "kubeflow", "pytorchjob", "ray", "ssh-hosts")


_SECTIONS = {
    "Processes": "target script env python cluster name",
    "Hosts": "hosts_file port image runtime resource sbatch srun",
    "Output": "output as_json",
}


class TargetOptions(Options):
    """Options of some targets, which are keyword arguments of `hpgo.launch.text`."""

    hosts_file: str | None = option(
        "--hosts", type=FILE, metavar="FILE", help="torchrun, ssh-hosts: file with one node per line, in order."
    )
    port: int | None = option(
        "--port",
        type=int,
        metavar="N",
        help="local, torchrun, slurm, ssh-hosts: port of rank 0.  [default: a free port; 29500 on several nodes]",
    )
    image: str | None = option("--image", help="pytorchjob, kubeflow: container image.")
    runtime: str | None = option(
        "--runtime", metavar="NAME", help="kubeflow: training runtime.  [default: torch-distributed]"
    )
    resource: str | None = option(
        "--resource",
        metavar="NAME",
        help="slurm, kubeflow, pytorchjob, ray: resource name of a device, or `none`.  [default: gpu, nvidia.com/gpu,"
        " nvidia.com/gpu, GPU]",
    )
    sbatch: tuple[str, ...] = option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="slurm: option of sbatch, such as `partition=gpu`. Repeatable.",
    )
    srun: tuple[str, ...] = option(
        "--srun", multiple=True, metavar="OPTION", help="slurm: option of srun, such as `mpi=none`. Repeatable."
    )


class LaunchOptions(TargetOptions):
    """Options of `hpgo launch`."""

    plan: str = argument(type=PLAN, metavar="PLAN.json|FOLDER/")
    arguments: tuple[str, ...] = argument(nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS…]")
    target: TargetName | None = option("--on", type=click.Choice(_TARGETS), help="Launcher of the processes.")
    script: str | None = option(
        "--script",
        type=FILE,
        metavar="FILE.py",
        help="Script that each process runs, by its path on the nodes.",
    )
    env: tuple[str, ...] = option(
        "--env", multiple=True, metavar="NAME=VALUE", help="Environment variable of each process. Repeatable."
    )
    output: str | None = option(
        "-o",
        "--output",
        type=FILE,
        metavar="FILE",
        help="Write the job file instead of printing or running it.",
    )
    as_json: bool = AS_JSON
    cluster: str | None = CLUSTER_OF_PLAN
    python: str = option(
        "--python",
        default="python3",
        show_default=True,
        type=FILE,
        metavar="FILE",
        help="Python interpreter on the nodes.",
    )
    name: str | None = option("--name", help="Name of the job.  [default: the name of the profile]")


@takes(LaunchOptions, sections=_SECTIONS)
def command(options: LaunchOptions) -> None:
    """Start the processes of PLAN.json, or write the file that starts them; or start a job FOLDER.

    One process starts for each device of the cluster, including idle ones: rank r on device r, node by node. All
    launchers set the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
    MASTER_PORT. The script gets its part of the plan from `Plan.for_rank`. ARGUMENTS after `--` are passed to it.

    `--on local` without -o runs the job on this machine, with torchrun, and exits with 1 if a rank fails. The other
    launchers print a file: a bash script (torchrun, slurm, ssh-hosts), YAML (kubeflow, pytorchjob) or Python (ray).

    FOLDER is a job folder of `hpgo llm plan -o FOLDER/`. Its job.sh checks the job and starts it. Options of --sbatch,
    then ARGUMENTS, are passed to job.sh, and --env and --srun to the ranks.

    \b
    Examples:
      hpgo launch plan.json --on local --script train.py -- --steps 10
      hpgo launch plan.json --on slurm --script train.py -o job.sh
      hpgo launch plan.json --on slurm --script train.py --sbatch partition=gpu
      hpgo launch plan.json --on torchrun --script train.py --hosts hosts.txt
      hpgo launch plan.json --on ssh-hosts --script train.py --hosts hosts.txt
      hpgo launch plan.json --on kubeflow --script train.py --image me/train:1
      hpgo launch plan.json --on ray --script train.py -o start.py
      hpgo launch job/ --sbatch partition=gpu --env NCCL_DEBUG=INFO
    """
    environment = _environment(options.env)
    # Both forms are natural: `--sbatch partition=gpu` and `--sbatch --partition=gpu`.
    sbatch, srun = (tuple(word.removeprefix("--") for word in words) for words in (options.sbatch, options.srun))
    options = replace(options, sbatch=sbatch, srun=srun)
    if is_folder_name(options.plan):
        _start(options, environment)
    if options.target is None or options.script is None:
        raise click.UsageError(f"Missing option '{'--on' if options.target is None else '--script'}'.")
    from hpgo import launch
    from hpgo.hardware.cluster import Cluster
    from hpgo.planning.plans import Plan

    given = {name: value for name, value in options.group(TargetOptions).items() if value not in {None, ()}}
    if "hosts_file" in given:
        # The option names a file, but the function takes the lines.
        given["hosts"] = _hosts(given.pop("hosts_file"))
    if given.get("resource") == "none":
        # The command line has no None, so a word stands for it.
        given["resource"] = None
    job = launch.LaunchJob.of(
        Plan.read(options.plan),
        options.script,
        options.arguments,
        cluster=None if options.cluster is None else Cluster.read(options.cluster),
        python=options.python,
        name=options.name,
        environment=environment,
    )
    # Create the text first, also with -o: it checks all options.
    text = launch.text(job, options.target, **given)
    if options.output is not None:
        launch.save(job, options.target, options.output, **given)
    if options.as_json:
        click.echo(_document(job, options.target, text))
    elif options.output is None and options.target == "local":
        run_bash(["-c", text], {})
    elif options.output is None:
        click.echo(text, nl=False)


def _environment(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise click.UsageError(f"--env takes NAME=VALUE, not `{shorten(word)}`")
        found[name] = value
    return found


def _start(options: LaunchOptions, environment: dict[str, str]) -> NoReturn:
    """Start a job folder. Raise UsageError for options that only plan files have."""
    from hpgo.cli.job_folders import job_script, start_job

    # First, since options of another folder are not what is wrong with it.
    job_script(options.plan)
    known = {"plan", "arguments", "env", "sbatch", "srun", "python"}
    for field in fields(options):
        if field.name not in known and getattr(options, field.name) not in {None, (), False}:
            name = {"target": "on", "hosts_file": "hosts", "as_json": "json"}.get(field.name, field.name)
            raise click.UsageError(f"--{name} is for plan files: the scripts of a job folder state it")
    words = [*(f"--{option}" for option in options.sbatch), *options.arguments]
    start_job(options.plan, words, environment, options.srun)


def _hosts(path: str) -> list[str]:
    from hpgo.base.documents import read_text
    from hpgo.errors import ArgumentError

    # Host files of MPI and others allow comments and empty lines.
    lines = (line.partition("#")[0].strip() for line in read_text(path, ArgumentError).splitlines())
    return [line for line in lines if line]


def _document(job: LaunchJob, target: TargetName, text: str) -> str:
    nodes = [
        {"ranks": node.ranks, "type": node.kind, "name": node.name, "first_rank": first}
        for node, first in zip(job.nodes, job.first_ranks, strict=True)
    ]
    return json.dumps(
        {
            "format": "hpgo.launch",
            "version": 1,
            "on": target,
            "name": job.name,
            "title": job.title,
            "ranks": job.ranks,
            "nodes": nodes,
            "idle": job.idle,
            "command": job.command,
            "text": text,
        },
        indent=2,
    )
