"""`pipeedge-run`: one rank of PipeEdge's runtime, with its options."""

from __future__ import annotations

import os
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hpgo.base.errors import ArgumentError
from hpgo.base.units import format_seconds
from hpgo.cli.compared import percent
from hpgo.cli.main import run
from hpgo.cli.questions import SECONDS
from hpgo.cli.ranks import take_part
from hpgo.cli.terminal import say

if TYPE_CHECKING:
    from hpgo.runtime.pipeedge.data import Wanted
    from hpgo.runtime.pipeedge.ranks import Came, Rank
    from hpgo.runtime.pipeedge.schedule import Asked

_MODES = ("w", "x", "a")
_LOOPBACKS = ("lo", "lo0")
"""As systems call theirs."""
_WINDOW = 10
_FILES = ("sched_models_file", "sched_dev_types_file", "sched_dev_file")


def _numbers(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers between commas. Raises BadParameter."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"`{text}` are no whole numbers with commas between them", context, option)
    return tuple(map(int, words))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("rank", type=click.IntRange(0))
@click.argument("worldsize", metavar="WORLD", type=click.IntRange(1))
@click.option("-d", "--device", metavar="NAME", help="cpu, cuda or cuda:1; a GPU if each rank has one.")
@click.option("-s", "--socket-ifname", metavar="NAME", help="Network interface; found by --addr if left out.")
@click.option("--addr", metavar="HOST", default="127.0.0.1", help="Where rank 0 is.")
@click.option("--port", type=click.IntRange(1, 65535), default=29500, help="Of rank 0, where all meet.")
@click.option("-c", "--comm", type=click.Choice(["p2p", "rpc"]), default="p2p", help="Both are the same here.")
@click.option("-w", "--worker-threads", type=int, default=16, help="Has no effect: it was for rpc.")
@click.option("-m", "--model-name", metavar="NAME", default="google/vit-base-patch16-224", help="Model to run.")
@click.option("-M", "--model-file", metavar="PATH", help="Weights: PipeEdge's file, or a Hugging Face folder.")
@click.option("-b", "--batch-size", type=click.IntRange(1), default=64, help="Samples in all.")
@click.option("-u", "--ubatch-size", type=click.IntRange(1), default=8, help="Samples of a micro-batch.")
@click.option("--dataset-name", type=click.Choice(["CoLA", "ImageNet"]), help="Random data if left out.")
@click.option("--dataset-root", metavar="FOLDER", help="Where its archives are; a folder of its name here.")
@click.option("--dataset-split", metavar="NAME", default="train", help="train, val or validation, or test.")
@click.option("--dataset-indices-file", metavar="FILE", help="Samples to take: whole numbers in .pt or .npy.")
@click.option(
    "--dataset-shuffle", type=bool, is_flag=False, flag_value=True, default=False, help="Mix them, as in each run."
)
@click.option("-pt", "--partition", callback=_numbers, metavar="1,24,25,48", help="First and last layer of stages.")
@click.option("-q", "--quant", callback=_numbers, metavar="8,0", help="Bits behind each stage; 0 is all.")
@click.option("-r", "--rank-order", callback=_numbers, metavar="1,0", help="The rank of each stage of -pt.")
@click.option("-D", "--data-rank", type=click.IntRange(0), help="Holds data, takes answers: 0, or the first stage's.")
@click.option("-H", "--hosts", metavar="A,B", help="Hosts of the ranks in order, as in -sd.")
@click.option("-sm", "--sched-models-file", metavar="FILE", help="Models, for `hpgo partition`.")
@click.option("-sdt", "--sched-dev-types-file", metavar="FILE", help="Types of devices, for the same.")
@click.option("-sd", "--sched-dev-file", metavar="FILE", help="Devices, for the same.")
@click.option("--hold-rate", type=float, metavar="X", help="As many bits as links carry at X samples/s.")
@click.option("--monitor", metavar="FOLDER", default=".", help="For shard.csv, send.csv and others.")
@click.option("--outputs", metavar="FILE", help="Keep the answers: .npy, by the rank with the data.")
@click.option("--timeout", "timeout_s", type=SECONDS, default="600s", help="End a run that stands still so long.")
def command(
    *,
    rank: int,
    worldsize: int,
    addr: str,
    port: int,
    socket_ifname: str | None,
    device: str | None,
    timeout_s: float,
    monitor: str,
    outputs: str | None,
    model_name: str,
    model_file: str | None,
    **given: Any,
) -> None:
    """Infer as RANK of WORLD ranks, with the options of PipeEdge's runtime.

    Start one on each host, or several on one. Rank 0 says who takes which layers, quarters of a transformer's blocks:
    those of -pt, or what `hpgo partition` finds best by -sm, -sdt and -sd. The rank of -D holds the data, is given the
    answers in order, and prints latency, throughput and, with labels, accuracy.

    Weights are those of -M, or of PipeEdge's file if it is here; else random.

    \b
    Examples:
      pipeedge-run 0 1
      pipeedge-run 0 2 -pt 1,24,25,48 & pipeedge-run 1 2
      pipeedge-run 0 2 -pt 1,24,25,48 -q 8,0 -r 1,0 -D 1
      pipeedge-run 0 2 -sm models.yml -sdt types.yml -sd devices.yml -H a,b
      pipeedge-run 0 1 --dataset-name ImageNet --dataset-root imagenet
    """
    if rank >= worldsize:
        raise click.UsageError(f"there is no rank {rank} among {worldsize}: ranks are counted from 0")
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.notice import Preempted
    from hpgo.runtime.pipeedge.ranks import Rank
    from hpgo.runtime.watch import Limits

    part = Rank(
        number=rank,
        asked=_asked(worldsize, model_name, given),
        data=_data(model_name, model_file, given),
        weights=_weights(model_name, model_file),
        monitor=Path(monitor),
        monitor_mode=_mode(),
        window=_window(),
        keep=None if outputs is None else Path(outputs),
        options={"device": device, "timeout_s": timeout_s},
    )
    interface = _interface(socket_ifname, addr)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(worldsize), "MASTER_ADDR": addr, "MASTER_PORT": str(port)}
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        take_part(Limits(timeout_s), lambda: _work(part))
    except Preempted:
        if rank == 0:
            say("preempted", "all micro-batches that had entered have left")
        raise


def _asked(world: int, model_name: str, given: dict[str, Any]) -> Asked:
    """How the ranks share the layers. Raises UsageError and ArgumentError."""
    from hpgo.runtime.pipeedge.models import model_named
    from hpgo.runtime.pipeedge.schedule import Asked

    files = tuple(given[name] for name in _FILES if given[name] is not None)
    if files and len(files) < len(_FILES):
        raise click.UsageError("`-sm`, `-sdt` and `-sd` go together")
    hosts = given["hosts"]
    return Asked(
        world=world,
        model=model_name,
        layers=model_named(model_name).layers,
        micro_batch_size=min(given["ubatch_size"], given["batch_size"]),
        partition=given["partition"],
        quantize=given["quant"],
        rank_order=given["rank_order"],
        hosts=None if hosts is None else tuple(host.strip() for host in hosts.split(",")),
        files=(files[0], files[1], files[2]) if files else None,
        data_rank=given["data_rank"],
        hold_samples_per_s=_rate(given["hold_rate"]),
    )


def _weights(model_name: str, model_file: str | None) -> Path | None:
    """A file or folder of weights, or None where there is none. Raises ArgumentError for one that isn't there."""
    from hpgo.runtime.pipeedge.models import model_named

    path = Path(model_named(model_name).file if model_file is None else model_file)
    if path.exists():
        return path
    if model_file is not None:
        raise ArgumentError(
            f"there are no weights `{model_file}`", "name a file or folder, or leave `-M` out", code="not_found"
        )
    return None


def _data(model_name: str, model_file: str | None, given: dict[str, Any]) -> Wanted:
    """What shall go through."""
    from hpgo.runtime.pipeedge.data import Wanted

    root, indices = given["dataset_root"], given["dataset_indices_file"]
    weights = _weights(model_name, model_file) or Path()
    return Wanted(
        name=given["dataset_name"],
        root=None if root is None else Path(root),
        split=given["dataset_split"],
        indices=None if indices is None else Path(indices),
        shuffle=given["dataset_shuffle"],
        samples=given["batch_size"],
        beside=weights if weights.is_dir() else weights.parent,
    )


def _work(rank: Rank) -> None:
    from hpgo.runtime.pipeedge.ranks import take_rank

    if rank.number == 0 and rank.weights is None:
        say("note", "the weights are random: `-M` names a file of some, or a folder")
    came = take_rank(rank, lambda line: say("note", line))
    if came is not None:
        _tell(came)


def _tell(came: Came) -> None:
    """What scripts look for first, then the rest."""
    click.echo(f"Latency is {came.taken_s:.6f}, throughput is {came.samples / came.taken_s:.6f}")
    if came.right is not None:
        click.echo(f"Accuracy is {percent(came.right / came.samples)}: {came.right} of {came.samples} are right")
    ends = ", ".join(f"p{share} {format_seconds(came.flow.latency_s(share))}" for share in (50, 95, 99))
    click.echo(f"Micro-batches took {ends}")
    for at, sent in enumerate(came.sent_bits):
        said = ", ".join(f"{count} in {bits or 32} bit" for bits, count in sorted(sent.items()))
        click.echo(f"Stage {at} sent {said}")
    sys.stdout.flush()


def _rate(asked: float | None) -> float | None:
    """The rate to hold: that of the option, or of the variables that PipeEdge reads. Raises ArgumentError."""
    if asked is not None or not os.environ.get("ADAPTIVE_QUANT"):
        return asked
    text = os.environ.get("SEND_CONSTRAINT", "0")
    try:
        return float(text) or None
    except ValueError:
        raise ArgumentError(f"SEND_CONSTRAINT is `{text}`", "it is a rate to hold, in samples a second") from None


def _window() -> int:
    """Micro-batches of a window of monitoring. Raises ArgumentError."""
    text = os.environ.get("WINDOW_SIZE", str(_WINDOW))
    if not (text.isdecimal() and int(text)):
        raise ArgumentError(f"WINDOW_SIZE is `{text}`", "it is a number of micro-batches from 1")
    return int(text)


def _mode() -> str:
    """In which tables of monitoring are opened. Raises ArgumentError."""
    mode = os.environ.get("CSV_FILE_MODE", "w")
    if mode not in _MODES:
        raise ArgumentError(
            f"CSV_FILE_MODE is `{mode}`", "`w` writes over files that are there, `x` refuses, and `a` adds to them"
        )
    return mode


def _interface(asked: str | None, addr: str) -> str | None:
    """The network interface that is meant; None leaves it to the system. Raises ArgumentError."""
    there = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in _LOOPBACKS if name in there), None)
    if asked is None:
        return loopback if _is_here(addr) else None
    if asked in there:
        return asked
    if asked in _LOOPBACKS and loopback is not None:
        say("note", f"the loopback is called `{loopback}` here, not `{asked}`")
        return loopback
    raise ArgumentError(
        f"there is no network interface `{asked}`", f"there are {', '.join(there)}", code="unknown_name"
    )


def _is_here(addr: str) -> bool:
    try:
        return ip_address(addr).is_loopback
    except ValueError:
        return addr == "localhost"


def main() -> NoReturn:
    """Entry point of the command `pipeedge-run`."""
    run(command, prog_name="pipeedge-run")
