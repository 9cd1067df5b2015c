"""Options that `hpgo plan` and `hpgo evaluate` share, and option values with a unit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from hpgo.base.units import parse_bytes, parse_bytes_per_s, parse_seconds
from hpgo.cli.command import Options, option
from hpgo.cli.command import as_options as as_options  # noqa: PLC0414 -- commands import it from here
from hpgo.cli.values import Known
from hpgo.errors import HpgoError
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.programs.optimizers import OptimizerName

_OF_PROFILES = {
    "batch_size": "profile_batch_size",
    "layer_counts": "profile_layer_counts",
    "boundary_bytes": "profile_boundary",
}
"""Option for each argument of `hpgo.read_profile`."""
# A copy of SCHEDULES, RUN_ON_PLANS and CHUNKED of hpgo.planning: importing them would slow down `--help`.
_SCHEDULES = (
    "1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential", "interleaved",
    "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip
_RECOMPUTE = {"no": False, "yes": True, "auto": "auto"}
_ZERO_STAGES: dict[str, Literal[0, 1, 2, 3, "auto"]] = {"0": 0, "1": 1, "2": 2, "3": 3, "auto": "auto"}


SECTIONS = {
    "Problem": "cluster global_batch_size {}schedule pipeline_micro_batch_size min_samples_per_replica even_split"
    " shares_by_speed no_overlap no_overlap_p2p_comm include_data_loading",
    "Memory": "recompute optimizer gradients_per_weight optimizer_per_weight shard_optimizer zero_stage reserve_memory",
    "Input file options": "profile_batch_size profile_layer_counts profile_boundary",
}
"""Titles of help sections with the options of `ProblemOptions` in each. A command puts its own options at `{}`."""


class _Measure(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A number with a unit.

    With an `example`, a value without a unit is an error, which shows the example. With `some`, zero is an error.
    """

    def __init__(self, name: str, parser: Callable[[str], float], *, example: str = "", some: bool = False) -> None:
        self.name = name
        self._parser, self._example, self._some = parser, example, some

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value in seconds, bytes, or bytes per second."""
        # Click also converts defaults, which are numbers already.
        if not isinstance(value, str):
            return float(value)
        if self._example and not re.search("[A-Za-z]$", value):
            self.fail(f"`{value[:40]}` has no unit; write a value like {self._example}", param, ctx)
        try:
            found = self._parser(value)
        except HpgoError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        if self._some and not found:
            self.fail(f"the {self.name} is 0, but it must be positive", param, ctx)
        return found


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Positive integers with commas between them; with `once`, repeated numbers count once."""

    name = "counts"

    def __init__(self, *, once: bool = True) -> None:
        self._once = once

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers in the order given."""
        if isinstance(value, tuple):
            return value
        counts = []
        for word in str(value).split(","):
            # Python users write large numbers with underscores.
            text = word.strip().replace("_", "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
                self.fail(
                    f"`{word[:40]}` is not an integer from 1 to 999,999,999; write one or several: 64 or 64,128,256",
                    param,
                    ctx,
                )
            counts.append(int(text))
        # Equal sizes would be planned twice, but equal numbers of layers are meaningful.
        return tuple(dict.fromkeys(counts) if self._once else counts)


SECONDS = _Measure("time", parse_seconds)
SOME_SECONDS = _Measure("time", parse_seconds, some=True)
BYTES = _Measure("size", parse_bytes)
DEVICE_BYTES = _Measure("size", parse_bytes, example="512MiB")
RATE = _Measure("rate", parse_bytes_per_s, example="100Mbit/s")


def measurement_time_limit(default: str) -> Any:
    """Declare --time-limit of a command that measures this machine."""
    return option(
        "--time-limit",
        type=SECONDS,
        default=default,
        show_default=True,
        metavar="TIME",
        help="Approximate time of the whole measurement.",
    )


MEASUREMENT_TIMEOUT: Any = option(
    "--timeout",
    type=SOME_SECONDS,
    default="600s",
    show_default=True,
    metavar="TIME",
    help="Stop if ranks wait for each other this long.",
)
TIMEOUT: Any = option(
    "--timeout",
    type=SECONDS,
    default="600s",
    show_default=True,
    metavar="TIME",
    help="Stop a run that makes no progress for this long.",
)
RESERVE: Any = option(
    "--reserve-memory",
    type=BYTES,
    default=0.0,
    metavar="SIZE",
    help="Memory to keep free on each device: `1GB`.  [default: 0]",
)
COUNT_LOADING: Any = option(
    "--include-data-loading", is_flag=True,
    help="Include the time of layers that only load data. By default, data loaders work ahead of the step.",
)  # fmt: skip


class ProfileFileOptions(Options):
    """Properties of a profile that its file may not contain."""

    profile_batch_size: int | None = option(
        "--profile-batch-size",
        type=int,
        metavar="N",
        help="Samples per batch of the measurement, if neither the file nor its name contains it.",
    )
    profile_layer_counts: tuple[int, ...] | None = option(
        "--profile-layer-counts",
        type=Counts(once=False),
        metavar="N[,N…]",
        help="Number of layers of each type in the model, for Galvatron files.",
    )
    profile_boundary: float | None = option(
        "--profile-boundary", type=BYTES, metavar="SIZE",
        help="Bytes that one sample sends between two layers, for Metis and Galvatron files without them.",
    )  # fmt: skip

    def of_file(self) -> dict[str, Any]:
        """Return these options as arguments of `hpgo.read_profile`."""
        return {name: getattr(self, given) for name, given in _OF_PROFILES.items()}


class ProblemOptions(ProfileFileOptions):
    """Options of a planning problem, except model, cluster and batch size."""

    pipeline_micro_batch_size: int | None = option(
        "--pipeline-micro-batch-size",
        type=int,
        metavar="N",
        help="Samples per micro-batch over all replicas of a stage.  [default: the best] (Megatron-LM's"
        " --micro-batch-size counts the samples of one replica.)",
    )
    min_samples_per_replica: int | None = option(
        "--min-samples-per-replica",
        type=int,
        metavar="N",
        help="Minimum samples per micro-batch and replica.  [default: the profile's smallest batch size]",
    )
    recompute: str = option(
        "--recompute",
        type=click.Choice(tuple(_RECOMPUTE)),
        default="no",
        show_default=True,
        help="Recompute activations in the backward pass to save memory: in no stage, in all, or where it is better.",
    )
    optimizer: OptimizerName = option(
        "--optimizer",
        type=click.Choice(tuple(OPTIMIZERS)),
        default=next(iter(OPTIMIZERS)),
        show_default=True,
        help="Bytes per parameter for weights + gradients + optimizer state: "
        + "; ".join(f"{name} {kept.bytes_text}" for name, kept in OPTIMIZERS.items())
        + ". Weights have the size in the profile; gradients and state are in proportion to it.",
    )
    gradients_per_weight: float | None = option(
        "--gradients-per-weight",
        type=float,
        metavar="BYTES",
        help="Bytes of gradients per byte of weights. Overrides --optimizer.",
    )
    optimizer_per_weight: float | None = option(
        "--optimizer-per-weight",
        type=float,
        metavar="BYTES",
        help="Bytes of optimizer state per byte of weights. Overrides --optimizer.",
    )
    shard_optimizer: bool = option(
        "--shard-optimizer", is_flag=True, help="Shard the optimizer state over replicas (ZeRO stage 1)."
    )
    zero_stage: str = option(
        "--zero-stage",
        type=click.Choice(tuple(_ZERO_STAGES)),
        default="0",
        metavar="NAME",
        help="Shard over replicas: the optimizer state (1), also gradients (2), also weights (3), or what each stage"
        " needs to fit (auto).  [0]",
    )
    reserve_memory: float = RESERVE
    even_split: bool = option(
        "--even-split", is_flag=True, help="Give all replicas of a stage the same number of samples."
    )
    shares_by_speed: bool = option(
        "--shares-by-speed",
        is_flag=True,
        help="Also try plans whose replicas of different speed get samples by their speed.",
    )
    no_overlap: bool = option(
        "--no-overlap", is_flag=True, help="Reduce gradients after the last backward pass, not during it."
    )
    no_overlap_p2p_comm: bool = option(
        "--no-overlap-p2p-comm",
        is_flag=True,
        help="Occupy the devices of both stages during a transfer, so that they do not compute.",
    )
    include_data_loading: bool = COUNT_LOADING

    def of_problem(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `hpgo.plan` and `hpgo.evaluate`."""
        from hpgo.planning.problem import MemoryModel

        # Single ratios override the preset, so that both options can be combined.
        kept = MemoryModel.preset(
            self.optimizer,
            shard_optimizer=self.shard_optimizer,
            reserved_bytes=self.reserve_memory,
            zero_stage=_ZERO_STAGES[self.zero_stage],
        )
        given: dict[str, Any] = {
            "gradients_per_weight": self.gradients_per_weight,
            "optimizer_per_weight": self.optimizer_per_weight,
        }
        return {
            "pipeline_micro_batch_size": self.pipeline_micro_batch_size,
            "min_samples_per_replica": self.min_samples_per_replica,
            "recompute": _RECOMPUTE[self.recompute],
            "even_split": self.even_split,
            "shares_by_speed": self.shares_by_speed,
            "overlap": not self.no_overlap,
            "overlap_p2p_comm": not self.no_overlap_p2p_comm,
            "include_data_loading": self.include_data_loading,
            "memory": replace(kept, **{name: value for name, value in given.items() if value is not None}),
        }


def time_limit_option(default: float | None = None) -> Any:
    """Declare the option that ends a search with the best plan so far."""
    return option(
        "--time-limit", type=SECONDS, default=default, metavar="TIME",
        help="Stop the search after this time and return the best plan so far: `10s`.",
    )  # fmt: skip


def schedule_option(usual: str, *others: str) -> Any:
    """Declare the option that names the schedule of a plan; `others` are words beside the schedules' names."""
    names = f"{', '.join(_SCHEDULES)}; or auto, which compares all" if others else ", ".join(_SCHEDULES)
    return option(
        "--schedule", type=Known("schedule", lambda: (*_SCHEDULES, *others)), metavar="NAME",
        help=f"Pipeline schedule: {names}.  [default: {usual}]",
    )  # fmt: skip
