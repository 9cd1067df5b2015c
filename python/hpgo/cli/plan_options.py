"""What `hpgo plan` and `hpgo evaluate` are asked: options, their units, and their names in messages."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.units import parse_bytes, parse_bytes_per_s, parse_seconds
from hpgo.cli.command import Options, option
from hpgo.cli.command import as_options as as_options  # noqa: PLC0414 -- for those who ask questions
from hpgo.cli.values import Known
from hpgo.errors import HpgoError
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.programs.optimizers import OptimizerName

# arguments of `hpgo.read_profile` -> options
_OF_PROFILES = {
    "batch_size": "profile_batch_size",
    "layer_counts": "profile_layer_counts",
    "boundary_bytes": "profile_boundary",
}
# SCHEDULES, RUN_ON_PLANS and CHUNKED of hpgo.planning, which `--help` need not load
_SCHEDULES = (
    "1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential", "interleaved",
    "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip
_RECOMPUTE = {"no": False, "yes": True, "auto": "auto"}


SECTIONS = {
    "Problem": "cluster global_batch_size {}schedule micro_batch_size min_micro_batch_size even_split"
    " no_overlap include_data_loading",
    "Memory": "recompute optimizer gradients_per_weight optimizer_per_weight shard_optimizer reserve_memory",
    "Input file options": "profile_batch_size profile_layer_counts profile_boundary",
}
"""Titles of the help, and the options of `ProblemOptions` below each; a command's own take the place of {}."""


class _Measure(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A number with a unit; with an `example`, one without it is refused, and nought where there is `some`."""

    def __init__(self, name: str, parser: Callable[[str], float], *, example: str = "", some: bool = False) -> None:
        self.name = name
        self._parser, self._example, self._some = parser, example, some

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Base units: seconds, bytes."""
        if not isinstance(value, str):
            return float(value)
        if self._example and not re.search("[A-Za-z]$", value):
            self.fail(f"`{value[:40]}` has no unit; write it like {self._example}", param, ctx)
        try:
            found = self._parser(value)
        except HpgoError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)
        if self._some and not found:
            self.fail(f"a {self.name} of 0 is none", param, ctx)
        return found


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from 1, with commas between them; each `once`, whatever is written."""

    name = "counts"

    def __init__(self, *, once: bool = True) -> None:
        self._once = once

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers in the order given."""
        if isinstance(value, tuple):
            return value
        counts = []
        for word in str(value).split(","):
            text = word.strip().replace("_", "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
                self.fail(
                    f"`{word[:40]}` is no whole number from 1 to 999,999,999; write it like 64 or 64,128,256",
                    param,
                    ctx,
                )
            counts.append(int(text))
        return tuple(dict.fromkeys(counts) if self._once else counts)


SECONDS = _Measure("time", parse_seconds)
SOME_SECONDS = _Measure("time", parse_seconds, some=True)
BYTES = _Measure("size", parse_bytes)
DEVICE_BYTES = _Measure("size", parse_bytes, example="512MiB")
RATE = _Measure("rate", parse_bytes_per_s, example="100Mbit/s")


TIMEOUT: Any = option(
    "--timeout",
    type=SECONDS,
    default="600s",
    show_default=True,
    metavar="TIME",
    help="Stop a run that hangs this long.",
)
RESERVE: Any = option(
    "--reserve-memory", type=BYTES, default=0.0, metavar="SIZE", help="Memory to leave free on each device: `1GB`."
)
COUNT_LOADING: Any = option(
    "--include-data-loading", is_flag=True,
    help="Count the time of layers that only load data; by default a loader works ahead of the step.",
)  # fmt: skip


class ProfileFileOptions(Options):
    """Facts that a profile's file may leave open."""

    profile_batch_size: int | None = option(
        "--profile-batch-size",
        type=int,
        metavar="N",
        help="Samples that the profile was measured with, if neither its file nor its name says it.",
    )
    profile_layer_counts: tuple[int, ...] | None = option(
        "--profile-layer-counts",
        type=Counts(once=False),
        metavar="N[,N…]",
        help="How many layers of each type the model has, for files of Galvatron.",
    )
    profile_boundary: float | None = option(
        "--profile-boundary", type=BYTES, metavar="SIZE",
        help="What one sample sends from layer to layer, for files of Metis and Galvatron that don't say it.",
    )  # fmt: skip

    def of_file(self) -> dict[str, Any]:
        """Return these options as arguments of `hpgo.read_profile`."""
        return {name: getattr(self, given) for name, given in _OF_PROFILES.items()}


class ProblemOptions(ProfileFileOptions):
    """Options that `hpgo plan` and `hpgo evaluate` share, beside model, cluster and batch size."""

    micro_batch_size: int | None = option(
        "--micro-batch-size",
        type=int,
        metavar="N",
        help="Samples that enter the pipeline at once, shared by a stage's replicas; by default the best."
        " (Megatron's option of this name counts the samples of one replica.)",
    )
    min_micro_batch_size: int | None = option(
        "--min-micro-batch-size",
        type=int,
        metavar="N",
        help="Fewest samples of a micro-batch on a device; by default the profile's smallest batch size.",
    )
    recompute: str = option(
        "--recompute",
        type=click.Choice(tuple(_RECOMPUTE)),
        default="no",
        show_default=True,
        help="Recompute activations in the backward pass, for less memory.",
    )
    optimizer: OptimizerName = option(
        "--optimizer",
        type=click.Choice(tuple(OPTIMIZERS)),
        default=next(iter(OPTIMIZERS)),
        show_default=True,
        help="What is kept for each parameter, in bytes of weights + gradients + optimizer state: "
        + "; ".join(f"{name} {kept.bytes_text}" for name, kept in OPTIMIZERS.items())
        + ". The profile's weights count as they are; the rest is in proportion.",
    )
    gradients_per_weight: float | None = option(
        "--gradients-per-weight",
        type=float,
        metavar="BYTES",
        help="Bytes of gradients for each byte of weights, instead of the optimizer's.",
    )
    optimizer_per_weight: float | None = option(
        "--optimizer-per-weight",
        type=float,
        metavar="BYTES",
        help="Bytes of optimizer state for each byte of weights, instead of the optimizer's.",
    )
    shard_optimizer: bool = option(
        "--shard-optimizer", is_flag=True, help="Replicas share the optimizer state (ZeRO stage 1)."
    )
    reserve_memory: float = RESERVE
    even_split: bool = option("--even-split", is_flag=True, help="Replicas of a stage get as many samples each.")
    no_overlap: bool = option("--no-overlap", is_flag=True, help="Gradients synchronise after the backward pass only.")
    include_data_loading: bool = COUNT_LOADING

    def of_problem(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `hpgo.plan` and `hpgo.evaluate`."""
        from hpgo.planning.problem import MemoryModel

        kept = MemoryModel.preset(
            self.optimizer, shard_optimizer=self.shard_optimizer, reserved_bytes=self.reserve_memory
        )
        given: dict[str, Any] = {
            "gradients_per_weight": self.gradients_per_weight,
            "optimizer_per_weight": self.optimizer_per_weight,
        }
        return {
            "micro_batch_size": self.micro_batch_size,
            "min_micro_batch_size": self.min_micro_batch_size,
            "recompute": _RECOMPUTE[self.recompute],
            "even_split": self.even_split,
            "overlap": not self.no_overlap,
            "include_data_loading": self.include_data_loading,
            "memory": replace(kept, **{name: value for name, value in given.items() if value is not None}),
        }


def time_limit_option(default: float | None = None) -> Any:
    """Declare the option that ends a search with the best plan so far."""
    return option(
        "--time-limit", type=SECONDS, default=default, metavar="TIME",
        help="Stop then, with the best plan so far: `10s`.",
    )  # fmt: skip


def schedule_option(usual: str, *others: str) -> Any:
    """Declare the option that names the schedule of a plan; `others` are words beside the schedules' names."""
    names = f"{', '.join(_SCHEDULES)}; or auto, for the best" if others else ", ".join(_SCHEDULES)
    return option(
        "--schedule", type=Known("schedule", lambda: (*_SCHEDULES, *others)), metavar="NAME",
        help=f"The order of forwards and backwards, {usual} by default: {names}.",
    )  # fmt: skip
