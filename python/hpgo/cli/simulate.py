"""`hpgo simulate`: run schedules on a clock, measure them, draw them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.orders import Schedule
    from hpgo.timing.timeline import Timeline

# Options that a configuration file may hold too, under the same names, and what kind of value each is.
_KEYS = {
    "num_stages": "whole",
    "num_batches": "whole",
    "forward_times": "times",
    "backward_times": "times",
    "input_gradient_times": "times",
    "weight_gradient_times": "times",
    "overlapped_times": "times",
    "p2p_time": "number",
    "transfer_time": "number",
    "gradient_sync_times": "numbers",
    "optimizer_times": "numbers",
    "schedule": "text",
    "chunks": "whole",
    "group_size": "whole",
    "cap": "whole",
    "comm": "text",
    "iterations": "whole",
    "weight_bytes": "sizes",
    "activation_bytes": "sizes",
    "memory_cap": "sizes",
    "output_file": "text",
}
_DEFAULTS: dict[str, Any] = {
    "forward_times": [1.0],
    "backward_times": [2.0],
    "p2p_time": 0.0,
    "transfer_time": 0.0,
    "gradient_sync_times": [0.0],
    "optimizer_times": [0.0],
    "schedule": "1f1b",
    "comm": "link",
    "iterations": 1,
}
_LIST_FLAGS = (
    "-f",
    "-bw",
    *(f"--{key.replace('_', '-')}" for key, kind in _KEYS.items() if kind in {"times", "numbers"}),
)
_BEYOND_A_PLAN = {
    "input_gradient_s": "input_gradient_times",
    "weight_gradient_s": "weight_gradient_times",
    "overlapped_s": "overlapped_times",
}  # what no profile tells, and with it no plan
_OF_SOME_SCHEDULES = ("chunks", "group_size", "cap")
_MOST_RANKS_IN_TABLE = 64


class _Command(click.Command):
    """Prints its help without arguments, and reads `-f 1 2 3` as `-f 1,2,3`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help())
            ctx.exit()
        joined: list[str] = []
        for arg in args:
            if _is_number(arg) and len(joined) > 1 and joined[-2] in _LIST_FLAGS:
                joined[-1] += f",{arg}"
            else:
                joined.append(arg)
        return super().parse_args(ctx, joined)


@click.command(cls=_Command)
@click.option("-c", "--config", metavar="FILE", help="JSON or YAML with these options as keys; the command line wins.")
@click.option("-s", "--num-stages", type=int, help="Ranks.  [4, or as many as times are given]")
@click.option("-b", "--num-batches", type=int, help="Micro-batches.  [8]")
@click.option(
    "-f", "--forward-times", metavar="S...", help="Forward of a micro-batch: one for all ranks, or one each.  [1]"
)
@click.option("-bw", "--backward-times", metavar="S...", help="Backward, likewise.  [2]")
@click.option("--input-gradient-times", metavar="S...", help="Its first half, I.  [half of it]")
@click.option("--weight-gradient-times", metavar="S...", help="Its second half, W.  [half of it]")
@click.option("--overlapped-times", metavar="S...", help="A forward and a backward run as one.  [their sum]")
@click.option("--p2p-time", type=float, metavar="S", help="Delay of a message between ranks.  [0]")
@click.option("--transfer-time", type=float, metavar="S", help="Time that a message occupies its link.  [0]")
@click.option("--gradient-sync-times", metavar="S...", help="Gradient synchronisation behind the last backward.  [0]")
@click.option("--optimizer-times", metavar="S...", help="Optimizer step behind it.  [0]")
@click.option("--schedule", metavar="NAME|FILE", help="A schedule of `hpgo schedules`, or a CSV of orders.  [1f1b]")
@click.option("--chunks", type=int, help="Stages a rank, for schedules that have several; they share the rank's times.")
@click.option("--group-size", type=int, help="Micro-batches before the next chunk's turn.")
@click.option("--cap", type=int, help="Most activations that a rank may hold.")
@click.option("--comm", help="How messages travel: link, latency, stream, stream_deferred or rendezvous.  [link]")
@click.option("--iterations", type=int, help="Steps back to back.  [1]")
@click.option(
    "--weight-bytes", metavar="SIZE...", help="Weights, gradients and optimizer of a rank: `12GB`, or one each."
)
@click.option("--activation-bytes", metavar="SIZE...", help="What a rank keeps of a micro-batch until its backward.")
@click.option("--memory-cap", metavar="SIZE...", help="What a rank may hold.")
@click.option("--plan", "plan_file", metavar="FILE", help="A plan that `hpgo plan` saved, with its times and memory.")
@click.option("--compare", metavar="A,B,...", help="Several schedules: a table, and one picture.")
@click.option(
    "--sweep", type=click.Choice(["micro-batches"]), help="Step time and memory against micro-batches, up to -b."
)
@click.option(
    "-o",
    "--output",
    "output_file",
    metavar="FILE",
    help="Picture (.png .svg .pdf .html .json .txt .tex) or data (.npz .timeline.json).",
)
@click.option("--no-visualization", is_flag=True, help="No picture.")
@click.option("--json", "as_json", is_flag=True, help="Everything for machines, and a picture only with -o.")
def command(
    *,
    config: str | None,
    plan_file: str | None,
    compare: str | None,
    sweep: str | None,
    no_visualization: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Run a pipeline schedule on a clock: step time, bubbles, memory, and a picture.

    \b
    Examples:
      hpgo simulate -s 4 -b 8
      hpgo simulate -s 4 -b 8 -f 1 1.2 1 0.9 --schedule zb_h1 --p2p-time 0.05
      hpgo simulate -s 8 -b 32 --compare gpipe,1f1b,interleaved,zb_v -o all.png
      hpgo simulate -s 8 -b 64 --compare 1f1b,eager_1f1b --sweep micro-batches
      hpgo simulate --config config.yaml --no-visualization --json
      hpgo simulate --plan vgg19.plan.json -o vgg19.html
    """
    given = {key: _parsed(key, value) for key, value in given.items() if value is not None}
    settings = _DEFAULTS | ({} if config is None else _read_config(config)) | given
    names = [name.strip() for name in compare.split(",")] if compare is not None else [settings["schedule"]]
    if not all(names):
        option = "--schedule" if compare is None else "--compare"
        raise ArgumentError(f"`{option}` names an empty schedule", "write it like `--compare gpipe,1f1b`")
    if plan_file is not None:
        if sweep:
            raise ArgumentError("`--sweep` can't vary a plan", "a plan has its number of micro-batches")
        _check_alone(given)
    else:
        _check_known(names, settings)
    output = None if no_visualization else settings.get("output_file")
    if sweep:
        _sweep(names, settings, output, as_json=as_json)
        return
    if plan_file is not None:
        timelines = _of_plan(plan_file, names if compare or "schedule" in given else [None], settings)
    else:
        timelines = [_simulate(name, settings) for name in names]
    if as_json:
        documents = [timeline.to_json() for timeline in timelines]
        click.echo(documents[0] if compare is None else f"[{', '.join(documents)}]")
    elif compare is None:
        _print_measures(timelines[0])
    else:
        _print_comparison(timelines)
    if output is None and not as_json and not no_visualization:
        name = "compare" if compare is not None else Path(timelines[0].schedule).name
        output = f"pipeline_{name}.{'png' if find_spec('matplotlib') else 'svg'}"
    if output is not None:
        _save(timelines, output)


def _check_alone(given: dict[str, Any]) -> None:
    allowed = {"schedule", "comm", "iterations", "output_file", *_BEYOND_A_PLAN.values()}
    if extra := [key for key in given if key not in allowed]:
        options = ", ".join(f"--{key.replace('_', '-')}" for key in extra)
        raise ArgumentError(f"a plan brings its own numbers, but {options} is given too", "leave out one of the two")


def _check_known(names: Sequence[str], settings: dict[str, Any]) -> None:
    """Raises ArgumentError for an option that is given to schedules of which none has it."""
    from hpgo.programs.orders import schedules

    families = [family for family in schedules() if family.name in names]
    read = any(_is_file(name) for name in names)
    if len(families) + read == 0:
        return  # misspelt, as will be said
    for key in _OF_SOME_SCHEDULES:
        fixed = [family for family in families if key == "chunks" and family.chunks == str(settings.get(key))]
        if key in settings and not fixed and not any(key in family.options for family in families):
            whose = f"`{names[0]}` has no" if len(names) == 1 else f"none of {', '.join(names)} has an"
            raise ArgumentError(f"{whose} option `--{key.replace('_', '-')}`", "leave it out")


def _save(timelines: list[Timeline], output: str) -> None:
    if len(timelines) == 1:
        written = timelines[0].save(output)
    else:
        from hpgo import draw

        written = draw.save(timelines, output)
    click.echo(f"wrote {written}", err=True)


# Numbers


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parsed(key: str, value: Any) -> Any:
    """A value from the command line, lists split at commas."""
    if _KEYS[key] not in {"times", "numbers", "sizes"}:
        return _checked(key, value, f"--{key.replace('_', '-')}")
    parts = [part.strip() for part in value.split(",")]
    name = f"--{key.replace('_', '-')}"
    if _KEYS[key] == "sizes":
        return _checked(key, parts, name)
    for part in parts:
        if not _is_number(part):
            raise ArgumentError(f"`{name}` holds `{part}`, which is no number", "give seconds: `1` or `1,1.5,2`")
    return _checked(key, [float(part) for part in parts], name)


def _checked(key: str, value: Any, name: str) -> Any:
    """`value` as the kind that `key` wants; `name` is what the user calls it."""
    from hpgo.base.units import parse_bytes
    from hpgo.base.wording import shown

    kind = _KEYS[key]
    if kind == "text":
        if not isinstance(value, str):
            raise ArgumentError(f"`{name}` must be text, got {shown(value)}", "")
        return value
    if kind == "whole":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**32:
            raise ArgumentError(f"`{name}` must be a whole number from 1, got {shown(value)}", "write it like 4")
        return value
    if kind == "sizes":
        try:
            return [parse_bytes(part) for part in (value if isinstance(value, list) else [value])]
        except ArgumentError as error:
            raise ArgumentError(f"`{name}`: {error.message}", error.hint) from None
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ArgumentError(f"`{name}` must be numbers, got {shown(value)}", "give seconds")
        if kind == "times" and not 0 < number < float("inf"):
            raise ArgumentError(f"`{name}` holds {number}", "times of work are numbers of seconds above zero")
        if not 0 <= number < float("inf"):
            raise ArgumentError(f"`{name}` holds {number}", "give numbers of seconds, zero or more")
    if not numbers:
        raise ArgumentError(f"`{name}` is an empty list", "give one number, or one for each rank")
    return float(numbers[0]) if kind == "number" and len(numbers) == 1 else [float(number) for number in numbers]


def _read_config(path: str) -> dict[str, Any]:
    from hpgo.base.documents import Section, parse, read_text

    section = Section(parse(read_text(path, ArgumentError), path, ArgumentError), path, ArgumentError)
    values = {}
    for key in _KEYS:
        if (value := section.get(key, None)) is not None:
            values[key] = section.build(_checked, key, value, key)
    section.done()
    return values


# Simulations


def _simulate(name: str, settings: dict[str, Any]) -> Timeline:
    """Times and bytes are those of a rank's part of the model: its chunks share them evenly."""
    from hpgo.timing.simulation import StageBytes, simulate

    schedule = _schedule(name, settings)
    times = {"forward_s": "forward_times", "backward_s": "backward_times"} | _BEYOND_A_PLAN
    costs: dict[str, Any] = {
        argument: _per_stage(schedule, key, settings[key]) for argument, key in times.items() if key in settings
    }
    if "input_gradient_s" in costs and "weight_gradient_s" in costs and settings["backward_times"] == [2.0]:
        del costs["backward_s"]
    memory = None
    if "weight_bytes" in settings or "activation_bytes" in settings:
        memory = StageBytes(
            weights_bytes=_per_stage(schedule, "weight_bytes", settings.get("weight_bytes", [0.0])),
            activation_bytes=_per_stage(schedule, "activation_bytes", settings.get("activation_bytes", [0.0])),
        )
    cap = settings.get("memory_cap")
    for key, count in (("memory_cap", schedule.ranks), ("p2p_time", schedule.chain_length - 1)):
        numbers = settings.get(key)
        if isinstance(numbers, list) and len(numbers) not in {1, count}:
            what = "ranks" if key == "memory_cap" else "edges between stages"
            raise ArgumentError(
                f"`{key}` has {len(numbers)} numbers, but `{schedule.name}` has {count} {what}", f"give 1 or {count}"
            )
    return simulate(
        schedule,
        **costs,
        latency_s=settings["p2p_time"],
        transfer_s=settings["transfer_time"],
        gradient_sync_s=_per_stage(schedule, "gradient_sync_times", settings["gradient_sync_times"], shared=False),
        optimizer_s=_per_stage(schedule, "optimizer_times", settings["optimizer_times"], shared=False),
        communication=settings["comm"],
        iterations=settings["iterations"],
        memory=memory,
        memory_cap_bytes=cap[0] if cap is not None and len(cap) == 1 else cap,
    )


def _schedule(name: str, settings: dict[str, Any]) -> Schedule:
    from hpgo.programs.orders import Durations, Schedule, schedule, schedules

    if _is_file(name):
        return _as_asked(Schedule.read(name), name, settings)
    family = next((family for family in schedules() if family.name == name), None)
    given = settings.get("num_stages")
    ranks = given if given is not None else max(len(settings["forward_times"]), len(settings["backward_times"]))
    sizes = {"ranks": ranks if given is not None or ranks > 1 else 4, "micro_batches": settings.get("num_batches", 8)}
    # In a comparison, an option is for those schedules that know it.
    known = () if family is None else family.options
    options = {key: settings[key] for key in _OF_SOME_SCHEDULES if key in settings and key in known}
    built = schedule(name, **sizes, **options)
    if family is None or not family.splits_backward:
        return built
    backward = _per_stage(built, "backward_times", settings["backward_times"])
    halves = [
        _per_stage(built, key, settings[key]) if key in settings else [time_s / 2 for time_s in backward]
        for key in ("input_gradient_times", "weight_gradient_times")
    ]
    forward = _per_stage(built, "forward_times", settings["forward_times"])
    chain = built.chain_length
    transfer_s = settings["p2p_time"] + settings["transfer_time"]
    durations = Durations(tuple(forward[:chain]), tuple(halves[0][:chain]), tuple(halves[1][:chain]), transfer_s)
    return schedule(name, **sizes, **options, durations=durations)


def _is_file(name: str) -> bool:
    return name.lower().endswith((".csv", ".txt"))


def _as_asked(read: Schedule, name: str, settings: dict[str, Any]) -> Schedule:
    """An order from a file, which has its sizes."""
    sizes = {"num_stages": read.ranks, "num_batches": read.total_micro_batches}
    for key, size in sizes.items():
        if settings.get(key, size) != size:
            option = f"--{key.replace('_', '-')}"
            raise ArgumentError(
                f"`{option}` is {settings[key]}, but the orders in {name} are for {size}", "leave it out"
            )
    return read


def _per_stage(schedule: Schedule, key: str, numbers: Sequence[float], *, shared: bool = True) -> list[float]:
    """One number for each stage, from one for all ranks, one a rank, or one a stage."""
    ranks, chain = schedule.ranks, schedule.chain_length
    chunks = max(1, chain // ranks)
    if len(numbers) == 1:
        each = [numbers[0] / (chunks if shared else 1)] * chain
    elif len(numbers) == chain:
        each = list(numbers)
    elif len(numbers) == ranks:
        each = [numbers[rank] / (chunks if shared else 1) for rank in schedule.rank_of_stage[:chain]]
    else:
        counts = " or ".join(str(count) for count in dict.fromkeys((1, ranks, chain)))
        raise ArgumentError(
            f"`{key}` has {len(numbers)} numbers, but `{schedule.name}` has {ranks} ranks"
            + (f" and {chain} stages" if ranks != chain else ""),
            f"give {counts}",
        )
    return each * (schedule.stages // chain)


def _of_plan(path: str, names: Sequence[str | None], settings: dict[str, Any]) -> list[Timeline]:
    from hpgo.planning.plans import Plan
    from hpgo.timing.simulation import simulate

    plan = Plan.read(path)
    times: dict[str, Any] = {}
    for argument, key in _BEYOND_A_PLAN.items():
        if (numbers := settings.get(key)) is None:
            continue
        if len(numbers) not in {1, len(plan.stages)}:
            raise ArgumentError(
                f"`--{key.replace('_', '-')}` has {len(numbers)} numbers, but the plan has {len(plan.stages)} stages",
                f"give 1 or {len(plan.stages)}",
            )
        times[argument] = numbers[0] if len(numbers) == 1 else numbers
    return [
        simulate(plan, schedule=name, communication=settings["comm"], iterations=settings["iterations"], **times)
        for name in names
    ]


# Reports


def _print_measures(timeline: Timeline) -> None:
    from hpgo.base.units import format_bytes, format_seconds
    from hpgo.cli.terminal import table
    from hpgo.timing.timeline import CAUSES

    measures = timeline.measures
    click.echo(_heading(timeline))
    rows = [
        ("step", format_seconds(measures.makespan_s), "to the end of the last optimizer step"),
        ("longest rank span", format_seconds(measures.max_rank_span_s), "from a rank's first start to its last end"),
        ("idle / total", _percent(measures.idle_over_total), "of all ranks' time"),
        ("idle / busy", _percent(measures.idle_over_busy), "also called bubble rate"),
        ("idle of the busiest", _percent(measures.idle_over_busiest), "what balancing alone can't win back"),
    ]
    total_s = timeline.ranks * timeline.makespan_s
    rows += [
        (f"  idle: {cause}", _percent(idle_s / total_s), "of all ranks' time")
        for cause, idle_s in zip(CAUSES, measures.idle_by_cause_s, strict=True)
        if idle_s > 1e-9 * total_s
    ]
    if measures.peak_memory_bytes is not None:
        rows.append(("peak memory", format_bytes(max(measures.peak_memory_bytes)), _over_cap(timeline)))
    table(("measure", "value", "meaning"), rows)
    if timeline.ranks <= _MOST_RANKS_IN_TABLE:
        click.echo()
        columns = ["rank", "busy", "idle / total", "in flight" if timeline.chunks == 1 else "chunks in flight"]
        columns += [] if measures.peak_memory_bytes is None else ["peak memory"]
        lines = []
        for rank, busy_s in enumerate(measures.busy_s):
            idle = _percent(1 - busy_s / timeline.makespan_s)
            line = [str(rank), format_seconds(busy_s), idle, str(measures.peak_in_flight[rank])]
            line += [] if measures.peak_memory_bytes is None else [format_bytes(measures.peak_memory_bytes[rank])]
            lines.append(line)
        table(columns, lines)


def _print_comparison(timelines: Sequence[Timeline]) -> None:
    from hpgo.base.units import format_bytes, format_seconds
    from hpgo.cli.terminal import table

    with_memory = all(timeline.measures.peak_memory_bytes is not None for timeline in timelines)
    columns = ["schedule", "step", "against first", "idle / total", "idle / busy", "activations held"]
    columns += ["peak memory"] if with_memory else []
    first_s = timelines[0].makespan_s
    rows = []
    for timeline in timelines:
        measures = timeline.measures
        row = [
            timeline.schedule,
            format_seconds(measures.makespan_s),
            "–" if timeline is timelines[0] else f"{100 * (measures.makespan_s / first_s - 1):+.1f} %",
            _percent(measures.idle_over_total),
            _percent(measures.idle_over_busy),
            f"{timeline.activations_held:g}",
        ]
        row += [format_bytes(max(measures.peak_memory_bytes))] if with_memory and measures.peak_memory_bytes else []
        rows.append(row)
    table(columns, rows)


def _heading(timeline: Timeline) -> str:
    parts = [f"{timeline.schedule}: {timeline.ranks} ranks"]
    parts += [f"{timeline.chunks} stages a rank"] if timeline.chunks > 1 else []
    parts += [f"{timeline.micro_batches} micro-batches"]
    parts += [f"{timeline.iterations} steps"] if timeline.iterations > 1 else []
    return f"{', '.join(parts)}, communication `{timeline.communication}`\n"


def _over_cap(timeline: Timeline) -> str:
    peaks, caps = timeline.measures.peak_memory_bytes, timeline.memory_cap_bytes
    if peaks is None or caps is None:
        return "of the fullest rank"
    over = [rank for rank, (peak, cap) in enumerate(zip(peaks, caps, strict=True)) if peak > cap]
    return f"over the cap on {len(over)} of {timeline.ranks} ranks" if over else "of the fullest rank, within the cap"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Sweeps


def _sweep(names: Sequence[str], settings: dict[str, Any], output: str | None, *, as_json: bool) -> None:
    """Each schedule at growing numbers of micro-batches; those outside a schedule's limits are left out."""
    import json

    from hpgo.base.units import format_bytes, format_seconds
    from hpgo.cli.terminal import progress, table

    if output is not None and not output.lower().endswith((".png", ".svg", ".pdf")):
        raise ArgumentError(f"a sweep can't be written as `{output}`", "choose .png, .svg or .pdf")
    most = settings.get("num_batches", 64)
    counts = sorted({most, *(step << shift for shift in range(32) for step in (2, 3) if step << shift < most), 1})
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    with progress("simulating") as report:
        for at, name in enumerate(names):
            for place, count in enumerate(counts):
                report((at + place / len(counts)) / len(names), f"{name}, {count} micro-batches")
                try:
                    timeline = _simulate(name, settings | {"num_batches": count})
                except ArgumentError as error:
                    refused[name] = error.message
                    continue
                measures = timeline.measures
                peaks = measures.peak_memory_bytes
                rows.append(
                    {
                        "schedule": name,
                        "micro_batches": count,
                        "makespan_s": measures.makespan_s,
                        "idle_over_total": measures.idle_over_total,
                        "peak_in_flight": max(measures.peak_in_flight),
                        "stages_a_rank": timeline.chunks,
                        "activations_held": timeline.activations_held,
                        "peak_memory_bytes": None if peaks is None else max(peaks),
                    }
                )
    for name in names:
        if name in refused and not any(row["schedule"] == name for row in rows):
            raise ArgumentError(f"`{name}` runs with none of these micro-batches: {refused[name]}", "raise `-b`")
    if as_json:
        click.echo(json.dumps(rows))
    else:
        with_memory = rows[0]["peak_memory_bytes"] is not None
        columns = ["schedule", "micro-batches", "step", "each", "idle / total", "activations held"]
        table(
            columns + (["peak memory"] if with_memory else []),
            [
                [
                    row["schedule"],
                    row["micro_batches"],
                    format_seconds(row["makespan_s"]),
                    format_seconds(row["makespan_s"] / row["micro_batches"]),
                    _percent(row["idle_over_total"]),
                    f"{row['activations_held']:g}",
                    *([format_bytes(row["peak_memory_bytes"])] if with_memory else []),
                ]
                for row in rows
            ],
        )
    if output is not None:
        from hpgo.draw.sweep import save_sweep

        click.echo(f"wrote {save_sweep(rows, output)}", err=True)
