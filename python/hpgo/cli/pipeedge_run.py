"""Command `pipeedge-run`: one rank of PipeEdge's runtime, with its options."""

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
from hpgo.cli.processes import heartbeat_timeout
from hpgo.cli.ranks import take_part
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.runtime.pipeedge.data import DataOptions
    from hpgo.runtime.pipeedge.ranks import Rank, RankResult
    from hpgo.runtime.pipeedge.schedule import ScheduleOptions

_MODES = ("w", "x", "a")
_LOOPBACKS = ("lo", "lo0")
"""Names of the loopback interface on Linux and macOS."""
_WINDOW = 10
"""Default number of micro-batches in a window of monitoring, as in PipeEdge."""


def _numbers(context: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Return integers from a list with commas. Raises BadParameter."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter(f"`{text}` is not a list of integers with commas", context, param)
    return tuple(map(int, words))


class PipeEdgeRunOptions(Options):
    """Options of `pipeedge-run`, with the names in PipeEdge's runtime."""

    rank: int = argument(type=click.IntRange(0))
    worldsize: int = argument(metavar="WORLD", type=click.IntRange(1))
    device: str | None = option(
        "-d", "--device", metavar="NAME", help="cpu, cuda or cuda:1.  [default: cuda if each rank has a GPU]"
    )
    socket_ifname: str | None = option(
        "-s", "--socket-ifname", metavar="NAME", help="Network interface.  [default: found by --addr]"
    )
    addr: str = option("--addr", metavar="HOST", default="127.0.0.1", help="Address of rank 0.")
    port: int = option("--port", type=click.IntRange(1, 65535), default=29500, help="Port of rank 0.")
    comm: str = option(
        "-c", "--comm", type=click.Choice(["p2p", "rpc"]), default="p2p", help="No effect: both are the same."
    )
    worker_threads: int = option("-w", "--worker-threads", type=int, default=16, help="No effect.")
    model_name: str = option(
        "-m", "--model-name", metavar="NAME", default="google/vit-base-patch16-224", help="Model to run."
    )
    model_file: str | None = option(
        "-M", "--model-file", metavar="PATH", help="Weights: a PipeEdge file or a Hugging Face folder."
    )
    batch_size: int = option("-b", "--batch-size", type=click.IntRange(1), default=64, help="Total number of samples.")
    ubatch_size: int = option("-u", "--ubatch-size", type=click.IntRange(1), default=8, help="Samples per micro-batch.")
    dataset_name: str | None = option(
        "--dataset-name", type=click.Choice(["CoLA", "ImageNet"]), help="Data set.  [default: random data]"
    )
    dataset_root: str | None = option(
        "--dataset-root", metavar="FOLDER", help="Folder with its archives.  [default: its name]"
    )
    dataset_split: str = option(
        "--dataset-split", metavar="NAME", default="train", help="Split: train, val, validation or test."
    )
    dataset_indices_file: str | None = option(
        "--dataset-indices-file", metavar="FILE", help="Indices of the samples to use, in a .pt or .npy file."
    )
    dataset_shuffle: bool = option(
        "--dataset-shuffle",
        type=bool,
        is_flag=False,
        flag_value=True,
        default=False,
        help="Shuffle samples, with the same seed in each run.",
    )
    partition: tuple[int, ...] | None = option(
        "-pt", "--partition", callback=_numbers, metavar="1,24,25,48", help="First and last layer of each stage."
    )
    quant: tuple[int, ...] | None = option(
        "-q",
        "--quant",
        callback=_numbers,
        metavar="8,0",
        help="Bits per value of each stage's output; 0: not quantized.",
    )
    rank_order: tuple[int, ...] | None = option(
        "-r", "--rank-order", callback=_numbers, metavar="1,0", help="Rank of each stage of -pt."
    )
    data_rank: int | None = option(
        "-D",
        "--data-rank",
        type=click.IntRange(0),
        help="Rank that reads data and gets results.  [default: 0, or that of the first stage]",
    )
    hosts: str | None = option("-H", "--hosts", metavar="A,B", help="Host of each rank, as in -sd.")
    sched_models_file: str | None = option(
        "-sm", "--sched-models-file", metavar="FILE", help="Models file, to partition."
    )
    sched_dev_types_file: str | None = option(
        "-sdt", "--sched-dev-types-file", metavar="FILE", help="Device types file, to partition."
    )
    sched_dev_file: str | None = option("-sd", "--sched-dev-file", metavar="FILE", help="Devices file, to partition.")
    hold_rate: float | None = option(
        "--hold-rate", type=float, metavar="X", help="Adapt the bits so that links carry X samples/s."
    )
    monitor: str = option("--monitor", metavar="FOLDER", default=".", help="Folder of shard.csv, send.csv and others.")
    outputs: str | None = option("--outputs", metavar="FILE", help="Save the results as .npy, on the rank of -D.")
    timeout_s: float = option(
        "--timeout", type=SECONDS, default="600s", help="Stop a run without progress for this long."
    )
    heartbeat_timeout_s: float = heartbeat_timeout("5s")


@takes(
    PipeEdgeRunOptions,
    cls=click.Command,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
def command(options: PipeEdgeRunOptions) -> None:
    """Run inference as rank RANK of WORLD ranks, with the options of PipeEdge's runtime.

    Start one process per rank, on one or several hosts. A layer is a quarter of a transformer block. Rank 0 assigns the
    layers by -pt, or by the best partition for the files -sm, -sdt and -sd. The rank of -D reads the data, receives
    the results in order, and prints latency, throughput and, if the data has labels, accuracy.

    The weights are from -M, or from PipeEdge's file in this folder. Without either, they are random.

    \b
    Examples:
      pipeedge-run 0 1
      pipeedge-run 0 2 -pt 1,24,25,48 & pipeedge-run 1 2
      pipeedge-run 0 2 -pt 1,24,25,48 -q 8,0 -r 1,0 -D 1
      pipeedge-run 0 2 -sm models.yml -sdt types.yml -sd devices.yml -H a,b
      pipeedge-run 0 1 --dataset-name ImageNet --dataset-root imagenet
    """
    if options.rank >= options.worldsize:
        raise click.UsageError(f"RANK is {options.rank}, but it must be less than WORLD, which is {options.worldsize}")
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.pipeedge.ranks import Rank
    from hpgo.runtime.preemption import Preempted
    from hpgo.runtime.rendezvous import AddressNames

    part = Rank(
        number=options.rank,
        asked=_schedule_options(options),
        data=_data(options),
        weights=_weights(options.model_name, options.model_file),
        monitor=Path(options.monitor),
        monitor_mode=_mode(),
        window=_window(),
        keep=None if options.outputs is None else Path(options.outputs),
        options={
            "device": options.device,
            "timeout_s": options.timeout_s,
            "silence_s": options.heartbeat_timeout_s,
        },
    )
    # Gloo reads the interface from the environment when the process group is created.
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
        limits = Limits(
            options.timeout_s, options.heartbeat_timeout_s, timeout_name="--timeout", silence_name="--heartbeat-timeout"
        )
        take_part(limits, lambda: _work(part), AddressNames("`--addr`", "`--port`"))
    except Preempted:
        if options.rank == 0:
            say("preempted", "all micro-batches that had entered the pipeline have left it")
        raise


def _schedule_options(options: PipeEdgeRunOptions) -> ScheduleOptions:
    """Return the options of the schedule. Raises UsageError and ArgumentError."""
    from hpgo.runtime.pipeedge.models import model_named
    from hpgo.runtime.pipeedge.schedule import ScheduleOptions

    named = (options.sched_models_file, options.sched_dev_types_file, options.sched_dev_file)
    files = tuple(name for name in named if name is not None)
    if files and len(files) < len(named):
        raise click.UsageError("`-sm`, `-sdt` and `-sd` must be given together")
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
    """Return the file or folder of weights, or None for random weights.

    Raises ArgumentError if `-M` names a file that does not exist.
    """
    from hpgo.runtime.pipeedge.models import model_named

    path = Path(model_named(model_name).file if model_file is None else model_file)
    if path.exists():
        return path
    if model_file is not None:
        raise ArgumentError(
            f"file of weights not found: `{model_file}`", "leave out `-M` for random weights", code="not_found"
        )
    return None


def _data(options: PipeEdgeRunOptions) -> DataOptions:
    """Return the options of the data."""
    from hpgo.runtime.pipeedge.data import DataOptions

    root, indices = options.dataset_root, options.dataset_indices_file
    # Data sets need the tokenizer or the image settings, which are stored next to the weights.
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
        say("note", "the weights are random; use `-M FILE` to load some")
    result = take_rank(rank, lambda line: say("note", line))
    if result is not None:
        _print(result)


def _print(result: RankResult) -> None:
    """Print the line that scripts of PipeEdge parse first, then the other results."""
    click.echo(f"Latency is {result.taken_s:.6f}, throughput is {result.samples / result.taken_s:.6f}")
    if result.right is not None:
        click.echo(
            f"Accuracy is {percent(result.right / result.samples)}: {result.right} of {result.samples} are right"
        )
    ends = ", ".join(f"p{share} {format_seconds(result.flow.latency_s(share))}" for share in (50, 95, 99))
    click.echo(f"Micro-batches took {ends}")
    for at, sent in enumerate(result.sent_bits):
        counts = ", ".join(f"{count} in {bits or 32} bit" for bits, count in sorted(sent.items()))
        click.echo(f"Stage {at} sent {counts}")
    sys.stdout.flush()


def _rate(asked: float | None) -> float | None:
    """Return the rate to hold, from the option or PipeEdge's environment variables. Raises ArgumentError."""
    if asked is not None or not os.environ.get("ADAPTIVE_QUANT"):
        return asked
    text = os.environ.get("SEND_CONSTRAINT", "0")
    try:
        return float(text) or None
    except ValueError:
        raise ArgumentError(
            f"SEND_CONSTRAINT is `{text}`, but it must be a rate in samples/s", "set SEND_CONSTRAINT=10"
        ) from None


def _window() -> int:
    """Return the number of micro-batches in a window of monitoring. Raises ArgumentError."""
    text = os.environ.get("WINDOW_SIZE", str(_WINDOW))
    if not (text.isdecimal() and int(text)):
        raise ArgumentError(f"WINDOW_SIZE is `{text}`, but it must be a positive integer", f"set WINDOW_SIZE={_WINDOW}")
    return int(text)


def _mode() -> str:
    """Return the mode in which CSV files are opened. Raises ArgumentError."""
    mode = os.environ.get("CSV_FILE_MODE", "w")
    if mode not in _MODES:
        raise ArgumentError(
            f"CSV_FILE_MODE is `{mode}`, but it must be w, x or a",
            "set CSV_FILE_MODE=w to overwrite existing files, x to fail, a to append",
        )
    return mode


def _interface(asked: str | None, addr: str) -> str | None:
    """Return the network interface, or None to let the system choose. Raises ArgumentError."""
    there = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in _LOOPBACKS if name in there), None)
    if asked is None:
        return loopback if _is_here(addr) else None
    if asked in there:
        return asked
    if asked in _LOOPBACKS and loopback is not None:
        say("note", f"the loopback interface is `{loopback}` on this system, not `{asked}`")
        return loopback
    raise ArgumentError(f"unknown network interface: `{asked}`", f"known: {', '.join(there)}", code="unknown_name")


def _is_here(addr: str) -> bool:
    try:
        return ip_address(addr).is_loopback
    except ValueError:
        return addr == "localhost"


def main() -> NoReturn:
    """Run the command `pipeedge-run`."""
    run(command, prog_name="pipeedge-run")
