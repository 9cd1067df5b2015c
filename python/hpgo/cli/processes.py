"""Options, start and end of ranks that `hpgo run`, `hpgo emulate` and `hpgo infer` share."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.cli.command import Options, argument, option
from hpgo.cli.plan_options import SECONDS, TIMEOUT
from hpgo.cli.ranks import take_part
from hpgo.cli.terminal import clear_line, say
from hpgo.cli.values import AS_JSON, AUTOCAST, DEVICE, DTYPE, PLAN, SEED, TIMELINE_OUT, WORKLOAD
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.runnable import Runnable


def heartbeat_timeout(default: str) -> Any:
    """Declare the option for the longest time without a heartbeat of a rank."""
    return option(
        "--heartbeat-timeout",
        type=SECONDS,
        default=default,
        show_default=True,
        metavar="TIME",
        help="Stop the run if a rank sends no heartbeat for this long.",
    )


class ProcessOptions(Options):
    """Options of the plan and its processes."""

    plan: str = argument(type=PLAN, metavar="PLAN.json")
    timeout_s: float = TIMEOUT
    heartbeat_timeout_s: float = heartbeat_timeout("5s")
    grace_s: float = option(
        "--grace",
        type=SECONDS,
        default="30s",
        show_default=True,
        metavar="TIME",
        help="Time to save and exit after SIGTERM.",
    )
    timeline: str | None = option(
        "--timeline",
        type=TIMELINE_OUT,
        metavar="FILE",
        help="Write the measured timeline for `hpgo draw`: .timeline.json or .npz.",
    )
    as_json: bool = AS_JSON

    def limits(self) -> Limits:
        """Return the limits of time. Raises ArgumentError if the timeline's folder is missing."""
        from hpgo import runtime

        runtime.check_torch()
        from hpgo.runtime.failure_detection import Limits

        if self.timeline is not None and not (folder := Path(self.timeline).parent).is_dir():
            raise ArgumentError(
                f"folder not found: `{folder}`, for `{self.timeline}`",
                f"make the folder: `mkdir -p {folder}`",
                code="not_found",
            )
        return Limits(self.timeout_s, self.heartbeat_timeout_s, self.grace_s, "--timeout", "--heartbeat-timeout")


class ModelOptions(ProcessOptions):
    """Options of the model and its data."""

    workload: str = option(
        "--workload",
        type=WORKLOAD,
        required=True,
        metavar="NAME|MODULE:FUNCTION",
        help="Model: a built-in workload such as `gpt:layers=4`, or your function.",
    )
    data: str | None = option(
        "--data", metavar="MODULE:FUNCTION", help="Your data set.  [default: the workload's example batch]"
    )
    seed: int = SEED
    dtype: str | None = DTYPE
    autocast: str | None = AUTOCAST
    device: str | None = DEVICE
    shared_memory: bool = option(
        "--shared-memory/--no-shared-memory",
        default=True,
        show_default=True,
        help="Pass tensors between ranks of a node in shared memory instead of gloo.",
    )
    find_nan: bool = option(
        "--find-nan", is_flag=True, help="Name the layer that computes the first NaN or infinity. Slow."
    )

    def of_pipeline(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `Pipeline` and `InferencePipeline`, with types of torch."""
        import torch

        types = {"dtype": self.dtype, "autocast": self.autocast}
        return {name: kind and getattr(torch, kind) for name, kind in types.items()} | {
            "seed": self.seed,
            "device": self.device,
            "shared_memory": self.shared_memory,
            "find_nan": self.find_nan,
            "timeout_s": self.timeout_s,
            "silence_s": self.heartbeat_timeout_s,
            "grace_s": self.grace_s,
        }


def run_ranks(
    options: ProcessOptions,
    work: Callable[[Runnable], None],
    *,
    read: Callable[[], Runnable],
    prepare: Callable[[Runnable], None],
    kept: str,
) -> None:
    """Run `work` as this rank of a launcher, or as all ranks of the plan in new processes on this machine.

    Args:
        options: plan file and limits of time.
        work: runs one rank.
        read: returns the program. It is called once, before new processes are forked, or once per rank of a launcher.
        prepare: raises the errors that each rank would raise, before new processes start.
        kept: what a run has saved if SIGTERM ends it, for the message.
    """
    limits = options.limits()
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.progress import stages_of
    from hpgo.runtime.rendezvous import is_launched

    with preempted(kept):
        if is_launched():
            take_part(limits, lambda: work(read()))
            return
        runnable = read()
        prepare(runnable)
        try:
            run_here(runnable.program.world_size, lambda: work(runnable), limits, partial(stages_of, runnable.program))
        except BaseException:
            if not options.as_json:
                clear_line()  # Rank 0 may have left its progress there.
            raise


@contextmanager
def preempted(kept: str) -> Iterator[None]:
    """Print `kept` on rank 0, the state that was saved, if SIGTERM ends the run inside this context."""
    from hpgo.runtime.preemption import Preempted

    try:
        yield
    except Preempted as end:
        if os.environ.get("RANK", "0") == "0":
            say("preempted", end.why or kept)
        raise


def read_training(file: str) -> Runnable:
    """Read a plan or program that trains. Raises ArgumentError for a plan of `hpgo partition`."""
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plan_files import read_any
    from hpgo.runtime.runnable import Runnable

    plan = read_any(file)
    if isinstance(plan, ChainPlan):
        raise ArgumentError(
            f"`{file}` is an inference plan, which can't be trained",
            f"run `hpgo infer {file}`, or use a plan of `hpgo plan -o`",
        )
    return Runnable.from_plan(plan)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    click.echo(f"warning: {text}", err=True)
