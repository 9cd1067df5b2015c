"""Chain plans for people: a table, the reasons, and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.tables import plain
from hpgo.base.units import format_seconds
from hpgo.base.wording import above
from hpgo.model.formats.pipeedge import MEGA

if TYPE_CHECKING:
    from hpgo.planning.chain import ChainHop, ChainPlan, ChainStage


def table(plan: ChainPlan) -> str:
    """The plan as text, a line a stage, with what limits it."""
    widest = max(hop.bits for hop in plan.hops)
    columns = ["stage", "hosts", "type", "layers", "compute", "transfer", "memory", "of host", "busy", "slack"]
    rows = []
    for number, stage in enumerate(plan.stages, 1):
        hop = plan.hops[number]
        bits = f" {hop.bits} bit" if hop.bits != widest else ""
        rows.append(
            (
                number,
                ", ".join(stage.hosts),
                stage.device_type,
                f"{stage.first}-{stage.last}",
                format_seconds(stage.compute_s),
                format_seconds(hop.seconds) + bits if hop.seconds else "-",
                _memory(stage.memory_bytes, plan.units),
                _memory(stage.host_memory_bytes, plan.units),
                f"{100 * plan.utilisation(stage):.0f} %",
                format_seconds(plan.slack_s(stage)),
            )
        )
    return "\n".join([*plain(columns, rows), "", *summary(plan)])


def summary(plan: ChainPlan) -> list[str]:
    """The plan's figures, a line each."""
    proof = "proven optimal" if plan.gap == 0 else f"{above(plan.gap)} possible"
    meaning = {
        "throughput": "shortest interval",
        "latency": "shortest latency",
        "hosts": f"fewest hosts: {plan.value:.0f}",
        "bits": f"fewest bits lost: {plan.value:.0f} a value, summed over the edges",
    }
    mega = "MB = 2^20 bytes, as PipeEdge counts" if plan.units == "pipeedge" else "MB = 10^6 bytes (SI)"
    return [
        f"interval    {format_seconds(plan.interval_s)} between batches of {plan.batch_size}, set by {plan.bottleneck}",
        f"throughput  {plan.throughput:.6g} samples/s",
        f"latency     {format_seconds(plan.latency_s)} for one batch through the empty pipeline",
        f"objective   {meaning[plan.objective]}, {proof}",
        f"hosts       {sum(len(stage.hosts) for stage in plan.stages)} used, {len(plan.unused)} not",
        f"units       {mega}",
    ]


def _memory(size_bytes: float, units: str) -> str:
    return (
        f"{size_bytes / MEGA[units]:.4g} MB" if size_bytes < 100 * MEGA[units] else f"{size_bytes / MEGA[units]:.0f} MB"
    )


def explain(plan: ChainPlan) -> str:
    """Why the plan is as fast as it is: each stage with its compute, transfer, memory and room to spare."""
    pace = f"The plan passes on a batch every {format_seconds(plan.interval_s)}."
    lines = [f"{pace} {_sentence(plan.bottleneck)} takes that long."]
    for number, stage in enumerate(plan.stages, 1):
        lines += ["", f"Stage {number}: layers {stage.first} to {stage.last} on {_hosts(stage)}"]
        lines.append(f"  computes {format_seconds(stage.compute_s)} a batch{_spare(plan, stage)}")
        hop = plan.hops[number]
        to = f"to stage {number + 1}" if number < len(plan.stages) else "out of the pipeline"
        if hop.seconds:
            sent = f"{_memory(hop.bytes, plan.units)} {to} at {hop.bits} bits a value"
            lines.append(f"  sends {sent} in {format_seconds(hop.seconds)}{_spare(plan, hop)}")
        elif number < len(plan.stages):
            lines.append(f"  sends {_memory(hop.bytes, plan.units)} {to} in no time")
        need, has = stage.memory_bytes, stage.host_memory_bytes
        lines.append(
            f"  needs {_memory(need, plan.units)} of {_memory(has, plan.units)} memory: "
            f"{_memory(has - need, plan.units)} to spare"
        )
    if plan.unused:
        lines += ["", f"Not used, for no plan would be better with them: {', '.join(plan.unused)}."]
        if plan.gap:
            lines[-1] = f"Not used: {', '.join(plan.unused)}."
    return "\n".join([*lines, "", *summary(plan)])


def _hosts(stage: ChainStage) -> str:
    turns = " in turns" if len(stage.hosts) > 1 else ""
    return f"{', '.join(stage.hosts)} ({stage.device_type}){turns}"


def _spare(plan: ChainPlan, part: ChainStage | ChainHop) -> str:
    if plan.slack_s(part) == 0:
        return ": this sets the pace"
    return f", {format_seconds(plan.slack_s(part))} less than the pace"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


_BAR, _ROW, _LEFT, _WIDE, _MEMORY = 16, 44, 200, 460, 120
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.small{font-size:11px;fill:#666}.axis{stroke:#999}"
    ".compute{fill:#4878a8}.slowest{fill:#c05020}.send{fill:#8fb08c}.free{fill:#e4e4e4}.held{fill:#8a7aa8}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.small{fill:#aaa}.free{fill:#444}}"
)


def svg(plan: ChainPlan) -> str:
    """The stages as bars against the pace: computing above, sending below, memory at the right.

    The same plan gives the same bytes.
    """
    from xml.sax.saxutils import escape

    pace_s = plan.interval_s or 1.0
    height = 56 + _ROW * len(plan.stages) + 22
    width = _LEFT + _WIDE + 40 + _MEMORY + 60
    every = f"one batch of {plan.batch_size} every {plan.interval_s:.4g} s"
    title = f"{plan.model}: {every}, {plan.throughput:.4g} samples/s"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" ',
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<text x="12" y="20">{escape(title)}</text>',
        f'<text class="small" x="{_LEFT}" y="44">',
        '<tspan class="compute">■</tspan> computes <tspan class="send">■</tspan> sends ',
        '<tspan class="slowest">■</tspan> sets the pace</text>',
        f'<text class="small" x="{_LEFT + _WIDE + 40}" y="44">memory</text>',
    ]

    def bar(kind: str, x: float, y: int, *, long: float, high: int, tip: str) -> None:
        parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{long:.1f}" height="{high}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    for index, stage in enumerate(plan.stages):
        top = 56 + _ROW * index
        hop = plan.hops[index + 1]
        layers = f"layer {stage.first}" if stage.first == stage.last else f"layers {stage.first}–{stage.last}"
        shown = ", ".join(stage.hosts[:2]) + (f" +{len(stage.hosts) - 2}" if len(stage.hosts) > 2 else "")
        parts.append(f'<text x="12" y="{top + 12}">{escape(shown)}</text>')
        parts.append(f'<text class="small" x="12" y="{top + 27}">{layers} · {escape(stage.device_type)}</text>')
        kind = "slowest" if plan.slack_s(stage) == 0 else "compute"
        long = _WIDE * stage.interval_s / pace_s
        bar(kind, _LEFT, top, long=long, high=_BAR, tip=f"computes {stage.compute_s:.6g} s")
        parts.append(
            f'<text class="small" x="{_LEFT + _WIDE + 34}" y="{top + 12}" text-anchor="end">'
            f"{plan.utilisation(stage):.0%}</text>"
        )
        if hop.seconds:
            kind = "slowest" if plan.slack_s(hop) == 0 else "send"
            tip = f"sends {_memory(hop.bytes, plan.units)} in {hop.seconds:.6g} s"
            bar(kind, _LEFT, top + _BAR + 3, long=_WIDE * hop.interval_s / pace_s, high=8, tip=tip)
        at = _LEFT + _WIDE + 40
        held = stage.memory_bytes / stage.host_memory_bytes
        bar("free", at, top, long=_MEMORY, high=_BAR, tip=_memory(stage.host_memory_bytes, plan.units))
        bar("held", at, top, long=_MEMORY * held, high=_BAR, tip=_memory(stage.memory_bytes, plan.units))
        parts.append(f'<text class="small" x="{at + _MEMORY + 6}" y="{top + 12}">{held:.0%}</text>')
    bottom = 56 + _ROW * len(plan.stages)
    for share in (0.0, 0.5, 1.0):
        x = _LEFT + _WIDE * share
        parts.append(f'<line class="axis" x1="{x}" y1="50" x2="{x}" y2="{bottom}" stroke-dasharray="3 3"/>')
        mark = format_seconds(pace_s * share)
        parts.append(f'<text class="small" x="{x}" y="{bottom + 14}" text-anchor="middle">{mark}</text>')
    return "".join([*parts, "</svg>\n"])
