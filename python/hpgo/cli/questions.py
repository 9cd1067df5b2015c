"""What `hpgo plan` and `hpgo evaluate` are asked: options, their units, and their names in messages."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpgo.base.errors import HpgoError
from hpgo.base.units import parse_bytes, parse_bytes_per_s, parse_seconds
from hpgo.cli.command import as_options as as_options  # noqa: PLC0414 -- for those who ask questions
from hpgo.cli.terminal import say
from hpgo.cli.values import CLUSTER, MODEL, PROFILE, Known
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Callable

_Command = TypeVar("_Command", bound="Callable[..., Any]")

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
    "What is planned": "cluster global_batch_size {}schedule micro_batch_size min_micro_batch_size equal_shares"
    " no_overlap count_loading",
    "Memory": "recompute optimizer gradients_per_weight optimizer_per_weight shard_optimizer reserve",
    "Files that leave something open": "profile_batch_size profile_layer_counts profile_boundary",
}
"""Titles of the help, and the options of `question` below each; where there are others, they take the place of {}."""


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


def question(*, several: bool) -> Callable[[_Command], _Command]:
    """Adds the argument PROFILE and the options that say what is asked; `settings` reads them.

    `several` batch sizes may be asked for at once, and schedule `auto`, where plans are searched for. Otherwise a saved
    plan may stand in PROFILE's place, so that the cluster is not required. The batch size may follow from others.
    """
    names = f"{', '.join(_SCHEDULES)}; or auto, for the best" if several else ", ".join(_SCHEDULES)
    usual = "eager_1f1b, or what --for runs" if several else "eager_1f1b"

    options = (
        click.argument("profile", type=MODEL if several else PROFILE),
        click.option(
            "-c", "--cluster", type=CLUSTER, required=several, metavar="NAME|FILE", help="See `hpgo clusters`.",
        ),
        click.option(
            "-b", "--global-batch-size", type=Counts() if several else int,
            metavar="N[,N…]" if several else "N",
            help="Samples in a step, over all devices.",
        ),
        click.option(
            "--profile-batch-size", type=int, metavar="N",
            help="Samples that the profile was measured with, if neither its file nor its name says it.",
        ),
        click.option(
            "--profile-layer-counts", type=Counts(once=False), metavar="N[,N…]",
            help="How many layers of each type the model has, for files of Galvatron.",
        ),
        click.option(
            "--profile-boundary", type=BYTES, metavar="SIZE",
            help="What one sample sends from layer to layer, for files of Metis and Galvatron that don't say it.",
        ),
        click.option(
            "--schedule", type=Known("schedule", lambda: (*_SCHEDULES, *(("auto",) if several else ()))),
            metavar="NAME",
            help=f"The order of forwards and backwards, {usual} by default: {names}.",
        ),
        click.option(
            "--micro-batch-size", type=int, metavar="N",
            help="Samples that enter the pipeline at once, shared by a stage's replicas; by default the best."
            " (Megatron's option of this name counts the samples of one replica.)",
        ),
        click.option(
            "--min-micro-batch-size", type=int, metavar="N",
            help="Fewest samples of a micro-batch on a device; by default the profile's smallest batch size.",
        ),
        click.option(
            "--recompute", type=click.Choice(tuple(_RECOMPUTE)), default="no", show_default=True,
            help="Recompute activations in the backward pass, for less memory.",
        ),
        click.option(
            "--optimizer", type=click.Choice(tuple(OPTIMIZERS)), default=next(iter(OPTIMIZERS)), show_default=True,
            help="What is kept for each parameter, in bytes of weights + gradients + optimizer state: "
            + "; ".join(f"{name} {kept.bytes_text}" for name, kept in OPTIMIZERS.items())
            + ". The profile's weights count as they are; the rest is in proportion.",
        ),
        click.option(
            "--gradients-per-weight", type=float, metavar="BYTES",
            help="Bytes of gradients for each byte of weights, instead of the optimizer's.",
        ),
        click.option(
            "--optimizer-per-weight", type=float, metavar="BYTES",
            help="Bytes of optimizer state for each byte of weights, instead of the optimizer's.",
        ),
        click.option("--shard-optimizer", is_flag=True, help="Replicas share the optimizer state (ZeRO stage 1)."),
        click.option(
            "--reserve", "--headroom", "reserve", type=BYTES, default=0.0, metavar="SIZE",
            help="Memory of each device to leave alone, like `1 GB`.",
        ),
        click.option("--equal-shares", is_flag=True, help="Replicas of a stage get as many samples each."),
        click.option("--no-uneven", is_flag=True, hidden=True),  # what it was called
        click.option("--no-overlap", is_flag=True, help="Gradients synchronise after the backward pass only."),
        click.option(
            "--count-loading", is_flag=True,
            help="Count the time of layers that only load data; by default a loader works ahead of the step.",
        ),
    )  # fmt: skip

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def settings(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `question` out of `options`, as keyword arguments of `hpgo.plan` without the batch size."""
    from hpgo.planning.question import MemoryModel

    kept = MemoryModel.preset(
        options.pop("optimizer"), shard_optimizer=options.pop("shard_optimizer"), reserved_bytes=options.pop("reserve")
    )
    instead = {name: options.pop(name) for name in ("gradients_per_weight", "optimizer_per_weight")}
    equal_shares = options.pop("equal_shares")
    if options.pop("no_uneven"):
        say("warning", "`--no-uneven` is now `--equal-shares`; the old name goes with the next version")
        equal_shares = True
    schedule = options.pop("schedule")
    return ({} if schedule is None else {"schedule": schedule}) | {
        "micro_batch_size": options.pop("micro_batch_size"),
        "min_micro_batch_size": options.pop("min_micro_batch_size"),
        "recompute": _RECOMPUTE[options.pop("recompute")],
        "equal_shares": equal_shares,
        "overlap": not options.pop("no_overlap"),
        "count_loading": options.pop("count_loading"),
        "memory": replace(kept, **{name: given for name, given in instead.items() if given is not None}),
    }


def of_profile(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the options that are about the profile's file out of `options`, as arguments of `hpgo.read_profile`."""
    return {name: options.pop(option) for name, option in _OF_PROFILES.items()}
