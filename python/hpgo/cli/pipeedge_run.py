"""`pipeedge-run`: one rank of PipeEdge's runtime, with its options."""

from __future__ import annotations

import os
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from hpgo.base.units import format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.compared import percent
from hpgo.cli.main import run
from hpgo.cli.plan_options import SECONDS
from hpgo.cli.ranks import take_part
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.runtime.pipeedge.data import DataOptions
    from hpgo.runtime.pipeedge.ranks import Rank, RankResult
    from hpgo.runtime.pipeedge.schedule import ScheduleOptions

_MODES = ("w", "x", "a")
_LOOPBACKS = ("lo", "lo0")
"""As systems call theirs."""
_WINDOW = 10


def _numbers(context: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers between commas. Raises BadParameter."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"`{text}` are no whole numbers with commas between them", context, param)
    return tuple(map(int, words))


class PipeEdgeRunOptions(Options):
    """Options of `pipeedge-run`."""

    rank: int = argument(type=click.IntRange(0))
    worldsize: int = argument(metavar="WORLD", type=click.IntRange(1))
    device: str | None = option(
        "-d", "--device", metavar="NAME", help="cpu, cuda or cuda:1; a GPU if each rank has one."
    )
    socket_ifname: str | None = option(
        "-s", "--socket-ifname", metavar="NAME", help="Network interface; found by --addr if left out."
    )
    addr: str = option("--addr", metavar="HOST", default="127.0.0.1", help="Where rank 0 is.")
    port: int = option("--port", type=click.IntRange(1, 65535), default=29500, help="Of rank 0, where all meet.")
    comm: str = option("-c", "--comm", type=click.Choice(["p2p", "rpc"]), default="p2p", help="Both are the same here.")
    worker_threads: int = option("-w", "--worker-threads", type=int, default=16, help="Has no effect: it was for rpc.")
    model_name: str = option(
        "-m", "--model-name", metavar="NAME", default="google/vit-base-patch16-224", help="Model to run."
    )
    model_file: str | None = option(
        "-M", "--model-file", metavar="PATH", help="Weights: PipeEdge's file, or a Hugging Face folder."
    )
    batch_size: int = option("-b", "--batch-size", type=click.IntRange(1), default=64, help="Samples in all.")
    ubatch_size: int = option(
        "-u", "--ubatch-size", type=click.IntRange(1), default=8, help="Samples of a micro-batch."
    )
    dataset_name: str | None = option(
        "--dataset-name", type=click.Choice(["CoLA", "ImageNet"]), help="Random data if left out."
    )
    dataset_root: str | None = option(
        "--dataset-root", metavar="FOLDER", help="Where its archives are; a folder of its name here."
    )
    dataset_split: str = option(
        "--dataset-split", metavar="NAME", default="train", help="train, val or validation, or test."
    )
    dataset_indices_file: str | None = option(
        "--dataset-indices-file", metavar="FILE", help="Samples to take: whole numbers in .pt or .npy."
    )
    dataset_shuffle: bool = option(
        "--dataset-shuffle", type=bool, is_flag=False, flag_value=True, default=False, help="Mix them, as in each run."
    )
    partition: tuple[int, ...] | None = option(
        "-pt", "--partition", callback=_numbers, metavar="1,24,25,48", help="First and last layer of stages."
    )
    quant: tuple[int, ...] | None = option(
        "-q", "--quant", callback=_numbers, metavar="8,0", help="Bits behind each stage; 0 is all."
    )
    rank_order: tuple[int, ...] | None = option(
        "-r", "--rank-order", callback=_numbers, metavar="1,0", help="The rank of each stage of -pt."
    )
    data_rank: int | None = option(
        "-D", "--data-rank", type=click.IntRange(0), help="Holds data, takes answers: 0, or the first stage's."
    )
    hosts: str | None = option("-H", "--hosts", metavar="A,B", help="Hosts of the ranks in order, as in -sd.")
    sched_models_file: str | None = option(
        "-sm", "--sched-models-file", metavar="FILE", help="Models, for `hpgo partition`."
    )
    sched_dev_types_file: str | None = option(
        "-sdt", "--sched-dev-types-file", metavar="FILE", help="Types of devices, for the same."
    )
    sched_dev_file: str | None = option("-sd", "--sched-dev-file", metavar="FILE", help="Devices, for the same.")
    hold_rate: float | None = option(
        "--hold-rate", type=float, metavar="X", help="As many bits as links carry at X samples/s."
    )
    monitor: str = option("--monitor", metavar="FOLDER", default=".", help="For shard.csv, send.csv and others.")
    outputs: str | None = option("--outputs", metavar="FILE", help="Keep the answers: .npy, by the rank with the data.")
    timeout_s: float = option("--timeout", type=SECONDS, default="600s", help="End a run that stands still so long.")


@takes(
    PipeEdgeRunOptions,
    cls=click.Command,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
def command(options: PipeEdgeRunOptions) -> None:
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
    if options.rank >= options.worldsize:
        raise click.UsageError(f"there is no rank {options.rank} among {options.worldsize}: ranks are counted from 0")
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.pipeedge.ranks import Rank
    from hpgo.runtime.preemption import Preempted

    part = Rank(
        number=options.rank,
        asked=_asked(options),
        data=_data(options),
        weights=_weights(options.model_name, options.model_file),
        monitor=Path(options.monitor),
        monitor_mode=_mode(),
        window=_window(),
        keep=None if options.outputs is None else Path(options.outputs),
        options={"device": options.device, "timeout_s": options.timeout_s},
    )
    interface = _interface(options.socket_ifname, options.addr)
    os.environ |= {
        "RANK": str(options.rank),
        "WORLD_SIZE": str(options.worldsize),
        "MASTER_ADDR": options.addr,
        "MASTER_PORT": str(options.port),
    }
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        take_part(Limits(options.timeout_s), lambda: _work(part))
    except Preempted:
        if options.rank == 0:
            say("preempted", "all micro-batches that had entered have left")
        raise


def _asked(options: PipeEdgeRunOptions) -> ScheduleOptions:
    """How the ranks share the layers. Raises UsageError and ArgumentError."""
    from hpgo.runtime.pipeedge.models import model_named
    from hpgo.runtime.pipeedge.schedule import ScheduleOptions

    named = (options.sched_models_file, options.sched_dev_types_file, options.sched_dev_file)
    files = tuple(name for name in named if name is not None)
    if files and len(files) < len(named):
        raise click.UsageError("`-sm`, `-sdt` and `-sd` go together")
    hosts = options.hosts
    return ScheduleOptions(
        world=options.worldsize,
        model=options.model_name,
        layers=model_named(options.model_name).layers,
        micro_batch_size=min(options.ubatch_size, options.batch_size),
        partition=options.partition,
        quantize=options.quant,
        rank_order=options.rank_order,
        hosts=None if hosts is None else tuple(host.strip() for host in hosts.split(",")),
        files=(files[0], files[1], files[2]) if files else None,
        data_rank=options.data_rank,
        hold_samples_per_s=_rate(options.hold_rate),
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


def _data(options: PipeEdgeRunOptions) -> DataOptions:
    """What shall go through."""
    from hpgo.runtime.pipeedge.data import DataOptions

    root, indices = options.dataset_root, options.dataset_indices_file
    weights = _weights(options.model_name, options.model_file) or Path()
    return DataOptions(
        name=options.dataset_name,
        root=None if root is None else Path(root),
        split=options.dataset_split,
        indices=None if indices is None else Path(indices),
        shuffle=options.dataset_shuffle,
        samples=options.batch_size,
        beside=weights if weights.is_dir() else weights.parent,
    )


def _work(rank: Rank) -> None:
    from hpgo.runtime.pipeedge.ranks import take_rank

    if rank.number == 0 and rank.weights is None:
        say("note", "the weights are random: `-M` names a file of some, or a folder")
    came = take_rank(rank, lambda line: say("note", line))
    if came is not None:
        _tell(came)


def _tell(came: RankResult) -> None:
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
