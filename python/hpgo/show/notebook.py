"""Records in notebooks: the HTML of `_repr_html_`, and the columns of `to_frame`.

The HTML has a line, a picture and tables. Tables set no colors, so they follow the light or dark theme of the notebook.
Pictures are images with their own background, because the styles of an inline SVG would apply to the whole page.
"""

from __future__ import annotations

import importlib
import sys
from base64 import b64encode
from dataclasses import asdict
from functools import partial
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpgo.base.laws import share_left
from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import cells_of, numeric
from hpgo.base.units import format_bytes, format_bytes_per_s, format_seconds
from hpgo.errors import HpgoError
from hpgo.programs.schedule import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.hardware.cluster import Cluster
    from hpgo.model.profile import Profile
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plans import Plan
    from hpgo.programs.schedule import Schedule
    from hpgo.timing.timeline import Timeline

_FRAMES = ("polars", "pandas")
_MEASURES = ("_s", "_bytes", "speed")
"""Endings of column names whose values are floats."""
_WIDTH_PX = 960
_MAX_BOXES = 4_000
"""Limit on boxes in a picture. Notebooks store their output, and larger pictures would make them slow to open."""
_MAX_ACTIONS = 1_000_000
"""Number of actions from which on a picture takes seconds, so that it is left out."""
_HEAD, _TAIL = 30, 10
"""Numbers of first and last rows that are shown of a long table."""


# --- HTML -------------------------------------------------------------------------------------------------------------


def of_plan(plan: Plan) -> str:
    """Return the report of a plan with a picture of its step."""
    from hpgo.show import report

    return answer(
        report.headline(plan),
        facts([(report.CAUTION, text) for text in report.cautions(plan)] + report.answer(plan)),
        _drawn(plan.timeline, len(plan.stages) * plan.micro_batches, "plan.timeline()"),
        *(part for name, columns, rows in report.sections(plan) for part in (title(name), table(columns, rows))),
        facts([(f"Alternative: {name}", text) for name, text in report.alternatives(plan)] + report.details(plan)),
    )


def of_profile(profile: Profile) -> str:
    """Return a table with one row per layer and the times of the largest batch."""
    size = profile.batch_sizes[-1]
    headline = (
        f"{pluralize(len(profile.layers), 'layer')}, {format_bytes(profile.parameter_bytes)} of weights, "
        f"measured with {' and '.join(map(str, profile.batch_sizes))} samples a batch"
    )
    rows = [
        (
            layer.id, layer.name, format_seconds(layer.forward_s[-1]), format_seconds(layer.backward_s[-1]),
            format_bytes(layer.activation_bytes[-1]), format_bytes(layer.parameter_bytes),
        )
        for layer in profile.layers
    ]  # fmt: skip
    columns = ["layer", "name", f"forward of {size}", f"backward of {size}", f"output of {size}", "weights"]
    known = [("from", profile.source), ("device", profile.device), ("computed in", profile.dtype)]
    return answer(f"{profile.name}: {headline}", table(columns, rows), facts(pair for pair in known if pair[1]))


def of_cluster(cluster: Cluster) -> str:
    """Return tables of nodes, with equal neighbors in one row, and of links."""
    nodes = [
        (
            len(list(alike)), node.count, node.device.name, format_bytes(node.device.memory_bytes),
            f"{node.device.speed:g} ×", node.name or "-",
        )
        for node, alike in groupby(cluster.nodes)
    ]  # fmt: skip
    links = [
        (where, format_bytes_per_s(link.bytes_per_s), format_bytes_per_s(link.collective_bytes_per_s),
         format_seconds(link.latency_s))
        for where, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter))
    ]  # fmt: skip
    return answer(
        f"{cluster.name}: {pluralize(cluster.devices, 'device')} on {pluralize(len(cluster.nodes), 'node')}",
        table(["nodes", "devices each", "type", "memory", "speed", "name"], nodes),
        table(["link", "of one port", "in a ring", "latency"], links),
        facts([("from", cluster.source)] if cluster.source else []),
    )


def of_timeline(timeline: Timeline) -> str:
    """Return the picture of a timeline, and a table with one row per rank."""
    actions = timeline.stages * timeline.micro_batches * timeline.iterations
    what = timeline.title or timeline.schedule
    headline = f"{what}: {format_seconds(timeline.makespan_s)}"
    picture = _drawn(lambda: timeline, actions, "timeline")
    if actions > _MAX_ACTIONS:  # Computing the measures takes as long as the picture.
        return answer(headline, picture)
    measures = timeline.measures
    names = timeline.row_names or [f"{timeline.row} {rank}" for rank in range(timeline.ranks)]
    peaks = measures.peak_memory_bytes
    rows = [
        (
            name, format_seconds(busy_s), percent(share_left(busy_s, timeline.makespan_s)),
            in_flight, *([format_bytes(peaks[rank])] if peaks else []),
        )
        for rank, (name, busy_s, in_flight) in enumerate(
            zip(names, measures.busy_s, measures.peak_in_flight, strict=True)
        )
    ]  # fmt: skip
    columns = [timeline.row, "busy", "idle", "activations held", *(["peak memory"] if peaks else [])]
    notes = facts([("note", note) for note in timeline.notes]) if timeline.notes else ""
    return answer(f"{headline}, bubble {percent(measures.idle_over_total)}", picture, table(columns, rows), notes)


def of_chain(plan: ChainPlan) -> str:
    """Return the report of a chain plan with its picture."""
    from hpgo.show import chain_figure, chain_report

    return answer(
        f"{plan.model}: a batch of {plan.batch_size} every {format_seconds(plan.interval_s)}",
        image(chain_figure.svg(plan), "stages against the pace") if plan.stages else "",
        table(*chain_report.rows(plan)),
        facts((name, fact.strip()) for name, _, fact in (line.partition("  ") for line in chain_report.summary(plan))),
    )


def of_schedule(schedule: Schedule) -> str:
    """Return a picture of the schedule, with backward passes twice as long as forward passes."""
    from hpgo.timing.simulation import simulate

    return answer(str(schedule), _drawn(partial(simulate, schedule), len(schedule.actions), "hpgo.simulate(schedule)"))


def answer(headline: str, *parts: str) -> str:
    """Return the HTML of a record: a headline and its parts, without empty ones."""
    return "\n".join(["<div>", f"<p><b>{_text(headline)}</b></p>", *filter(None, parts), "</div>"])


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table with numbers aligned to the right, and without the middle rows of a long table."""
    # A single row is not worth a line that replaces it.
    left_out = len(rows) - _HEAD - _TAIL
    cells = cells_of(rows if left_out <= 1 else [*rows[:_HEAD], *rows[-_TAIL:]])
    sides = ["right" if right else "left" for right in numeric(cells, len(columns))]
    lines = [_row("td", row, sides) for row in cells]
    if left_out > 1:
        more = f'<tr><td colspan="{len(columns)}" style="text-align: left">… {left_out} more rows …</td></tr>'
        lines.insert(_HEAD, more)
    return "\n".join(
        ["<table>", f"<thead>{_row('th', columns, sides)}</thead>", "<tbody>", *lines, "</tbody>", "</table>"]
    )


def title(text: str) -> str:
    """Return the title of the next table."""
    return f"<p>{_text(text)}</p>"


def _row(cell: str, texts: Sequence[str], sides: Sequence[str]) -> str:
    pairs = zip(texts, sides, strict=True)
    cells = (f'<{cell} style="text-align: {side}">{_text(text)}</{cell}>' for text, side in pairs)
    return f"<tr>{''.join(cells)}</tr>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and facts, or nothing if there are none."""
    rows = [
        f'<tr><th scope="row" style="text-align: left">{_text(name)}</th>'
        f'<td style="text-align: left">{_text(fact)}</td></tr>'
        for name, fact in pairs
    ]
    return "\n".join(["<table>", "<tbody>", *rows, "</tbody>", "</table>"]) if rows else ""


def _drawn(timeline: Callable[[], Timeline], actions: int, how: str) -> str:
    """Return the picture of a timeline, or a text if it is too large or can't be drawn."""
    from hpgo import draw

    if actions > _MAX_ACTIONS:
        return f"<p>Too large for a notebook. Draw it with <code>{_text(how)}.save('step.html')</code>.</p>"
    try:
        made = timeline()
        picture = draw.render(made, ".svg", width_px=_WIDTH_PX, max_boxes=_MAX_BOXES).decode()
    except HpgoError as error:
        return f"<p>No picture: {_text(str(error))}</p>"
    return image(picture, f"{pluralize(made.ranks, made.row)} over time")


def image(svg: str, what: str) -> str:
    """Return a picture that is part of the page."""
    # A data URL keeps the picture in the notebook file, also after an export.
    source = b64encode(svg.encode()).decode()
    return f'<img alt="{_text(what)}" src="data:image/svg+xml;base64,{source}" style="max-width: 100%">'


def _text(text: str) -> str:
    return escape(printable(text))


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f} %"


# --- Frames -----------------------------------------------------------------------------------------------------------


def plan_frame(plan: Plan) -> Any:
    """Return a data frame with one row per stage."""
    return frame(
        {
            "stage": at, "layers": list(stage.layers), "devices": list(stage.devices), "replicas": stage.replicas,
            "samples_per_replica": stage.samples_per_replica, "max_in_flight": stage.max_in_flight,
            "forward_s": stage.forward_s, "backward_s": stage.backward_s,
            "transfer_s": stage.transfer_s, "grad_reduce_s": stage.grad_reduce_s,
            "exposed_grad_reduce_s": stage.exposed_grad_reduce_s, **asdict(stage.memory),
            "capacity_bytes": stage.capacity_bytes,
        }
        for at, stage in enumerate(plan.stages)
    )  # fmt: skip


def profile_frame(profile: Profile) -> Any:
    """Return a data frame with one row per layer and batch size."""
    return frame(
        {
            "layer": layer.id, "name": layer.name, "batch_size": size, "forward_s": layer.forward_s[at],
            "backward_s": layer.backward_s[at], "activation_bytes": layer.activation_bytes[at],
            "saved_bytes": None if layer.saved_bytes is None else layer.saved_bytes[at],
            "parameter_bytes": layer.parameter_bytes,
        }
        for layer in profile.layers
        for at, size in enumerate(profile.batch_sizes)
    )  # fmt: skip


def cluster_frame(cluster: Cluster) -> Any:
    """Return a data frame with one row per node."""
    return frame(
        {
            "node": at, "name": node.name, "devices": node.count, "device": node.device.name,
            "memory_bytes": node.device.memory_bytes, "speed": node.device.speed,
        }
        for at, node in enumerate(cluster.nodes)
    )  # fmt: skip


def chain_frame(plan: ChainPlan) -> Any:
    """Return a data frame with one row per stage, numbered from 1 like the layers."""
    rows = [
        {"stage": at, **asdict(stage), "hosts": list(stage.hosts), "sent_bytes": hop.bytes, "transfer_s": hop.seconds}
        for at, (stage, hop) in enumerate(zip(plan.stages, plan.hops[1:], strict=False), 1)
    ]
    for row in rows:
        if not row["layers"]:  # A chain has `first` and `last` instead.
            del row["layers"]
        else:
            row["layers"] = list(row["layers"])
    return frame(rows)


def timeline_frame(timeline: Timeline) -> Any:
    """Return a data frame with one row per action."""
    names = ("stage", "micro_batch", "backward_stage", "backward_micro_batch", "start_s", "end_s", "slack_s")
    return _frame_of(
        {"rank": timeline.rank, "kind": _letters(timeline.kind)} | {name: getattr(timeline, name) for name in names}
    )


def schedule_frame(schedule: Schedule) -> Any:
    """Return a data frame with one row per action, in the order of each rank."""
    import numpy as np

    names = ("stage", "micro_batch", "backward_stage", "backward_micro_batch")
    counts = np.diff(schedule.rank_starts)
    columns = {name: schedule.actions[:, at] for at, name in enumerate(names, 1)}
    rank = np.repeat(np.arange(schedule.ranks), counts)
    return _frame_of({"rank": rank, "kind": _letters(schedule.actions[:, 0])} | columns)


def _letters(kinds: Any) -> list[str]:
    return [KINDS[kind] for kind in kinds.tolist()]


def frame(rows: Iterable[dict[str, Any]]) -> Any:
    """Return a data frame of rows with equal keys."""
    listed = list(rows)
    columns = {name: [row[name] for row in listed] for name in (listed[0] if listed else ())}
    return _frame_of({name: _floats(kept) if name.endswith(_MEASURES) else kept for name, kept in columns.items()})


def _floats(column: list[Any]) -> list[float | None]:
    """Return a column of floats, because polars rejects columns that mix integers and floats."""
    return [None if value is None else float(value) for value in column]


def _frame_of(columns: dict[str, Any]) -> Any:
    """Return a data frame of polars or pandas: the imported library, or else the installed one."""
    # An imported library comes first: the notebook most likely uses it.
    for name in sorted(_FRAMES, key=lambda name: name not in sys.modules):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        return library.DataFrame(columns)
    raise HpgoError(
        "data frames need polars or pandas, but neither is installed",
        "`pip install polars`, or use the fields of the record",
        code="missing_package",
    )
