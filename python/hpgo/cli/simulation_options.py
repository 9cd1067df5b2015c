"""Options of `hpgo simulate`, from the command line and from a configuration file with the same keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import Section, parse, read_text
from hpgo.base.messages import did_you_mean, shorten
from hpgo.cli.command import Command, Options, option
from hpgo.cli.misplaced_names import check_kind
from hpgo.cli.values import SCHEDULE
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.timing.config import SimulationConfig


class Listing(Command):
    """The command `hpgo simulate`: without arguments it prints its help, and `-f 1 2 3` means `-f 1,2,3`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments after joining the values of each option that takes a list."""
        # The command has useful defaults, but without arguments users expect help.
        if not args:
            click.echo(ctx.get_help())
            ctx.exit()
        joined: list[str] = []
        for arg in args:
            if _is_time(arg) and len(joined) > 1 and (joined[-2] in {"-f", "-bw"} or joined[-2].endswith("-times")):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        # Extra arguments are allowed here, so that the error below can suggest an option.
        ctx.allow_extra_args = True
        super().parse_args(ctx, joined)
        if ctx.args and not ctx.resilient_parsing:
            check_kind(ctx.args[0], "plan", ctx)
            ctx.fail(f"unexpected argument `{shorten(ctx.args[0])}`: use --plan for a plan, --schedule for a schedule")
        return ctx.args


SECTIONS = {
    "Schedule": "schedule compare plan_file config num_stages num_batches virtual_stages_per_rank group_size"
    " activation_limit iterations sweep",
    "Times": "forward_times backward_times input_gradient_times weight_gradient_times overlapped_times p2p_time"
    " transfer_time comm gradient_sync_times optimizer_times",
    "Memory": "weight_bytes activation_bytes memory_cap",
    "Output": "outputs no_visualization as_json",
}


def _is_time(text: str) -> bool:
    """Return whether `text` is a number of seconds, or a number with a unit of time."""
    from hpgo.base.units import parse_seconds

    try:
        float(text)
    except ValueError:
        try:
            parse_seconds(text)
        except ArgumentError:
            return False
    return True


class SetupOptions(Options):
    """Options with the names of the fields of `SimulationConfig`."""

    num_stages: int | None = option(
        "-s", "--num-stages", type=int, help="Number of pipeline ranks.  [default: 4, or the number of times given]"
    )
    num_batches: int | None = option("-b", "--num-batches", type=int, help="Number of micro-batches.  [default: 8]")
    forward_times: str | None = option(
        "-f",
        "--forward-times",
        metavar="S...",
        help="Forward time of a micro-batch, for all ranks or one value per rank, such as `4ms`.  [default: 1]",
    )
    backward_times: str | None = option(
        "-bw", "--backward-times", metavar="S...", help="Backward time of a micro-batch.  [default: 2]"
    )
    input_gradient_times: str | None = option(
        "--input-gradient-times", metavar="S...", help="Time of the input-gradient pass I.  [default: B - W, or B / 2]"
    )
    weight_gradient_times: str | None = option(
        "--weight-gradient-times",
        metavar="S...",
        help="Time of the weight-gradient pass W.  [default: B - I, or B / 2]",
    )
    overlapped_times: str | None = option(
        "--overlapped-times", metavar="S...", help="Time of a combined forward and backward pass.  [default: their sum]"
    )
    p2p_time: str | None = option(
        "--p2p-time", metavar="S", help="Latency of a message between ranks, such as `20us`.  [default: 0]"
    )
    transfer_time: str | None = option(
        "--transfer-time", metavar="S", help="Time that a message occupies its link.  [default: 0]"
    )
    gradient_sync_times: str | None = option(
        "--gradient-sync-times",
        metavar="S...",
        help="Time of the gradient reduction after the last backward pass.  [default: 0]",
    )
    optimizer_times: str | None = option(
        "--optimizer-times", metavar="S...", help="Time of the optimizer step after the reduction.  [default: 0]"
    )
    schedule: str | None = option(
        "--schedule",
        type=SCHEDULE,
        metavar="NAME|FILE",
        help="Schedule: a name of `hpgo schedules`, or a CSV file of action lists.  [default: 1f1b]",
    )
    virtual_stages_per_rank: int | None = option(
        "--virtual-stages-per-rank",
        type=int,
        help="Virtual stages per rank, for schedules that have them. They share the rank's times.",
    )
    group_size: int | None = option(
        "--group-size", type=int, help="Micro-batches that a rank runs before it changes to its next virtual stage."
    )
    activation_limit: int | None = option(
        "--activation-limit", type=int, help="Activation limit: micro-batches that a rank may hold."
    )
    comm: str | None = option(
        "--comm", help="Communication model: link, latency, stream, stream_deferred or rendezvous.  [default: link]"
    )
    iterations: int | None = option("--iterations", type=int, help="Number of consecutive steps.  [default: 1]")
    weight_bytes: str | None = option(
        "--weight-bytes",
        metavar="SIZE...",
        help="Weights, gradients and optimizer state of a rank: `12GB`, or one value per rank.",
    )
    activation_bytes: str | None = option(
        "--activation-bytes",
        metavar="SIZE...",
        help="Memory that a rank keeps per micro-batch until its backward pass.",
    )
    memory_cap: str | None = option("--memory-cap", metavar="SIZE...", help="Memory of a rank.")


def read(config: str | None, given: dict[str, Any]) -> tuple[SimulationConfig, dict[str, Any]]:
    """Return the configuration of a simulation, and the other values by their name.

    The options in `given` override the values of the file `config`. Raises ArgumentError with the name of the option,
    or of the file and key.
    """
    from hpgo.timing.config import FIELDS, SimulationConfig, checked, from_text

    values = {} if config is None else _read_file(config)
    for key, value in given.items():
        if key not in FIELDS:
            values[key] = value
        elif isinstance(value, str):
            values[key] = from_text(key, value, flag_of(key))
        else:
            values[key] = checked(key, value, flag_of(key))
    return SimulationConfig(**{key: value for key, value in values.items() if key in FIELDS}), {
        key: value for key, value in values.items() if key not in FIELDS
    }


def flag_of(key: str) -> str:
    """Return the option for a field of `SimulationConfig`."""
    return f"--{key.replace('_', '-')}"


def _read_file(path: str) -> dict[str, Any]:
    from hpgo.timing.config import FIELDS, checked

    section = Section(parse(read_text(path, ArgumentError), path, ArgumentError), path, ArgumentError)
    if any(key in section for key in _VISUALIZATION_KEYS):
        return _of_visualization(section)
    values: dict[str, Any] = {}
    for key in FIELDS:
        if (value := section.get(key, None)) is not None:
            values[key] = section.build(checked, key, value, key)
    for key in ("schedule", "output_file"):
        if section.get(key, None) is not None:
            values[key] = section.text(key)
    section.done()
    return values


_VISUALIZATION_KEYS = ("num_devices", "op_times", "strategy", "p2p_latency")
"""Keys that only configurations of PP-Schedule-Visualization have."""
_STRATEGIES = {
    "1f1b": "1f1b", "interleave": "interleaved", "1f1b_interleave": "interleaved", "1f1b_overlap": "1f1b_overlap",
    "1f1b_interleave_overlap": "interleaved_overlap", "zb1p": "zb_h1", "dualpipe": "dualpipe",
    "dualpipe_v": "dualpipe_v",
}  # fmt: skip
"""Schedule for each strategy of PP-Schedule-Visualization."""
_OPERATIONS = {
    "forward": ("forward_times", 1.0),
    "backward": ("backward_times", 2.0),
    "backward_D": ("input_gradient_times", 1.0),
    "backward_W": ("weight_gradient_times", 1.0),
    "overlapped_forward_backward": ("overlapped_times", None),
}
"""Field and default time in seconds for each operation of PP-Schedule-Visualization."""


def _of_visualization(section: Section) -> dict[str, Any]:
    """Return the values of a configuration of PP-Schedule-Visualization.

    In such a file, `num_stages` counts the stages of all devices, and a time is for one stage.
    """
    from hpgo.timing.config import checked

    # Names of strategies differ from names of schedules, so they are translated.
    given = section.text("strategy", "1f1b")
    if given not in _STRATEGIES:
        section.fail(f"unknown strategy `{shorten(given)}`", did_you_mean(given, _STRATEGIES))
    stages = section.whole("num_stages", section.whole("num_devices", 4, minimum=1), minimum=1)
    devices = section.whole("num_devices", stages, minimum=1)
    if stages % devices:
        section.fail(
            f"`num_stages` is {stages}, but it must be a multiple of the {devices} devices",
            f"write `num_stages: {-(-stages // devices) * devices}`",
        )
    values: dict[str, Any] = {
        "schedule": _STRATEGIES[given],
        "num_stages": devices,
        "virtual_stages_per_rank": stages // devices,
    }
    if "num_batches" in section:
        values["num_batches"] = section.whole("num_batches", minimum=1)
    if "p2p_latency" in section:
        values["p2p_time"] = section.build(checked, "p2p_time", section.get("p2p_latency"), "p2p_latency")
    # Only `zb1p` runs the two halves of a backward pass; all other strategies run it whole.
    is_split = given == "zb1p"
    times = section.within("op_times") if "op_times" in section else Section({}, section.where, ArgumentError)
    for name, (field, usual) in _OPERATIONS.items():
        one = times.get(name, None)
        # A missing time has a default only if the strategy uses the pass.
        if one is None and (usual is None or (name != "forward" and (name == "backward") == is_split)):
            continue
        each = [usual if one is None or isinstance(one, dict) else one] * stages
        if isinstance(one, dict):
            named = times.within(name)
            each = [named.get(str(stage), usual) for stage in range(stages)]
            named.done()
        values[field] = times.build(checked, field, each, name)
    times.done()
    # The port of the old server has no meaning here, but the key is valid.
    section.get("visualization_port", None)
    section.done()
    return values
