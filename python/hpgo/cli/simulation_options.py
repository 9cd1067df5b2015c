"""What `hpgo simulate` is asked, from options and from a configuration file that has them as keys."""

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
    """Prints its help without arguments, and reads `-f 1 2 3` as `-f 1,2,3`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Joins what stands behind a flag that takes a list."""
        if not args:
            click.echo(ctx.get_help())
            ctx.exit()
        joined: list[str] = []
        for arg in args:
            if _is_time(arg) and len(joined) > 1 and (joined[-2] in {"-f", "-bw"} or joined[-2].endswith("-times")):
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        ctx.allow_extra_args = True
        super().parse_args(ctx, joined)
        if ctx.args and not ctx.resilient_parsing:
            check_kind(ctx.args[0], "plan", ctx)
            ctx.fail(f"got `{shorten(ctx.args[0])}`: name a plan with --plan, a schedule with --schedule")
        return ctx.args


SECTIONS = {
    "Schedule": "schedule compare plan_file config num_stages num_batches chunks group_size cap iterations sweep",
    "Times": "forward_times backward_times input_gradient_times weight_gradient_times overlapped_times p2p_time"
    " transfer_time comm gradient_sync_times optimizer_times",
    "Memory": "weight_bytes activation_bytes memory_cap",
    "Output": "outputs no_visualization as_json",
}


def _is_time(text: str) -> bool:
    """Whether it is a number of seconds, or has a unit of time."""
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
    """A field for each one of `SimulationConfig`."""

    num_stages: int | None = option("-s", "--num-stages", type=int, help="Ranks.  [4, or as many as times are given]")
    num_batches: int | None = option("-b", "--num-batches", type=int, help="Micro-batches.  [8]")
    forward_times: str | None = option(
        "-f",
        "--forward-times",
        metavar="S...",
        help="Forward of a micro-batch: one for all ranks, or one each, like `4ms`.  [1]",
    )
    backward_times: str | None = option("-bw", "--backward-times", metavar="S...", help="Backward, likewise.  [2]")
    input_gradient_times: str | None = option(
        "--input-gradient-times", metavar="S...", help="Its first half, I.  [B - W, or half of B]"
    )
    weight_gradient_times: str | None = option(
        "--weight-gradient-times", metavar="S...", help="Its second half, W.  [B - I, or half of B]"
    )
    overlapped_times: str | None = option(
        "--overlapped-times", metavar="S...", help="A forward and a backward run as one.  [their sum]"
    )
    p2p_time: str | None = option("--p2p-time", metavar="S", help="Delay of a message between ranks: `20us`.  [0]")
    transfer_time: str | None = option(
        "--transfer-time", metavar="S", help="Time that a message occupies its link.  [0]"
    )
    gradient_sync_times: str | None = option(
        "--gradient-sync-times", metavar="S...", help="Gradient synchronisation behind the last backward.  [0]"
    )
    optimizer_times: str | None = option("--optimizer-times", metavar="S...", help="Optimizer step behind it.  [0]")
    schedule: str | None = option(
        "--schedule",
        type=SCHEDULE,
        metavar="NAME|FILE",
        help="A schedule of `hpgo schedules`, or a CSV of orders.  [1f1b]",
    )
    chunks: int | None = option(
        "--chunks", type=int, help="Stages a rank, for schedules that have several; they share the rank's times."
    )
    group_size: int | None = option("--group-size", type=int, help="Micro-batches before the next chunk's turn.")
    cap: int | None = option("--cap", type=int, help="Most activations that a rank may hold.")
    comm: str | None = option(
        "--comm", help="How messages travel: link, latency, stream, stream_deferred or rendezvous.  [link]"
    )
    iterations: int | None = option("--iterations", type=int, help="Steps back to back.  [1]")
    weight_bytes: str | None = option(
        "--weight-bytes", metavar="SIZE...", help="Weights, gradients and optimizer of a rank: `12GB`, or one each."
    )
    activation_bytes: str | None = option(
        "--activation-bytes", metavar="SIZE...", help="What a rank keeps of a micro-batch until its backward."
    )
    memory_cap: str | None = option("--memory-cap", metavar="SIZE...", help="What a rank may hold.")


def read(config: str | None, given: dict[str, Any]) -> tuple[SimulationConfig, dict[str, Any]]:
    """The setup that the file `config` and the options `given` make, and what they hold beside it.

    Raises ArgumentError naming the option, or file and key.
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
    """A field's name on the command line."""
    return f"--{key.replace('_', '-')}"


def _read_file(path: str) -> dict[str, Any]:
    from hpgo.timing.config import FIELDS, checked

    section = Section(parse(read_text(path, ArgumentError), path, ArgumentError), path, ArgumentError)
    if any(key in section for key in _ITS_OWN):
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


_ITS_OWN = ("num_devices", "op_times", "strategy", "p2p_latency")
"""Keys that only configurations of PP-Schedule-Visualization have."""
_STRATEGIES = {
    "1f1b": "1f1b", "interleave": "interleaved", "1f1b_interleave": "interleaved", "1f1b_overlap": "1f1b_overlap",
    "1f1b_interleave_overlap": "interleaved_overlap", "zb1p": "zb_h1", "dualpipe": "dualpipe",
    "dualpipe_v": "dualpipe_v",
}  # fmt: skip
"""Its strategies, and the schedules that run the same orders."""
_OPERATIONS = {
    "forward": ("forward_times", 1.0),
    "backward": ("backward_times", 2.0),
    "backward_D": ("input_gradient_times", 1.0),
    "backward_W": ("weight_gradient_times", 1.0),
    "overlapped_forward_backward": ("overlapped_times", None),
}
"""Its operations: our fields, and the seconds where nothing is said."""


def _of_visualization(section: Section) -> dict[str, Any]:
    """Values of a configuration of PP-Schedule-Visualization.

    There, `num_stages` counts the stages of all devices, and a time is that of one stage.
    """
    from hpgo.timing.config import checked

    given = section.text("strategy", "1f1b")
    if given not in _STRATEGIES:
        section.fail(f"there is no strategy `{shorten(given)}`", did_you_mean(given, _STRATEGIES))
    stages = section.whole("num_stages", section.whole("num_devices", 4, least=1), least=1)
    devices = section.whole("num_devices", stages, least=1)
    if stages % devices:
        section.fail(
            f"`num_stages` is {stages}, but it must be a multiple of the {devices} devices",
            f"write `num_stages: {-(-stages // devices) * devices}`",
        )
    values: dict[str, Any] = {"schedule": _STRATEGIES[given], "num_stages": devices, "chunks": stages // devices}
    if "num_batches" in section:
        values["num_batches"] = section.whole("num_batches", least=1)
    if "p2p_latency" in section:
        values["p2p_time"] = section.build(checked, "p2p_time", section.get("p2p_latency"), "p2p_latency")
    is_split = given == "zb1p"
    times = section.within("op_times") if "op_times" in section else Section({}, section.where, ArgumentError)
    for name, (field, usual) in _OPERATIONS.items():
        one = times.get(name, None)
        if one is None and (usual is None or (name != "forward" and (name == "backward") == is_split)):
            continue
        each = [usual if one is None or isinstance(one, dict) else one] * stages
        if isinstance(one, dict):
            named = times.within(name)
            each = [named.get(str(stage), usual) for stage in range(stages)]
            named.done()
        values[field] = times.build(checked, field, each, name)
    times.done()
    section.get("visualization_port", None)
    section.done()
    return values
