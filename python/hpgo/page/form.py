"""The page's HTML: the form as the address filled it, and the result or what is wrong."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from hpgo.base.errors import HpgoError
from hpgo.base.quoting import filled
from hpgo.draw import ENDINGS
from hpgo.page.settings import RENAMED, TRANSFERS
from hpgo.programs.orders import schedules
from hpgo.timing.simulation import COMMUNICATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.timing.timeline import Timeline

_DEFAULTS = {"num_stages": "4", "num_batches": "8", "forward_times": "1.0", "p2p_time": "0.0"}


def page(items: Sequence[tuple[str, str]], titles: Mapping[str, str], outcome: Sequence[Timeline] | HpgoError) -> str:
    """The whole page for an address's `items`: as typed, so that a mistake can be mended where it is.

    `titles` say what people call the plans that can be chosen, by their names in addresses.
    """
    template = resources.files("hpgo.page").joinpath("page.html").read_text(encoding="utf-8")
    result = _mistake(outcome) if isinstance(outcome, HpgoError) else _result(items, outcome)
    return filled(template, {"FORM": _form(items, titles), "RESULT": result})


def _mistake(error: HpgoError) -> str:
    hint = f"<br>{escape(error.hint)}" if error.hint else ""
    return f'<p class="error" role="alert"><b>{escape(error.message)}</b>{hint}</p>'


def _result(items: Sequence[tuple[str, str]], drawn: Sequence[Timeline]) -> str:
    from hpgo.draw.facts import comparison, definitions, summary  # numpy, which a page with a mistake has no use for

    query = escape(urlencode([(name, text) for name, text in items if text]))
    heading, *rows = comparison(drawn, ())
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    described = "; ".join(f"{timeline.schedule}: {summary(timeline)}" for timeline in drawn)
    exports = "".join(
        f'<a href="/export{ending}?{query}" title="{escape(what)}">{ending[1:]}</a>' for ending, what in ENDINGS.items()
    )
    return (
        f"<table><tr>{head}</tr>{body}</table>"
        f'<p class="hint">{escape(definitions(drawn, with_table=True))}</p>'
        f'<img id="picture" src="/picture.svg?{query}" alt="{escape(described)}">'
        f'<p class="exports">Export: {exports}</p>'
        f'<p><a href="/picture.html?{query}" target="_blank">Open as an interactive picture: zoom, pan, hover</a></p>'
    )


def _form(items: Sequence[tuple[str, str]], titles: Mapping[str, str]) -> str:
    typed = {RENAMED.get(name, name): text for name, text in items if name != "schedule"}
    chosen = [text for name, text in items if name == "schedule" and text]
    if not chosen and not typed.get("plan"):
        chosen = ["1f1b"]

    def field(name: str, label: str, kind: str = "text", extra: str = "") -> str:
        value = escape(typed.get(name, _DEFAULTS.get(name, "")))
        return f'<label>{label}<input name="{name}" type="{kind}" value="{value}" {extra}></label>'

    def count(name: str, label: str, placeholder: str = "") -> str:
        return field(name, label, "number", f'min="1" step="1" placeholder="{placeholder}"')

    def select(name: str, label: str, choices: Sequence[tuple[str, str]]) -> str:
        options = "".join(
            f'<option value="{escape(value)}"{" selected" if typed.get(name, choices[0][0]) == value else ""}>'
            f"{escape(text)}</option>"
            for value, text in choices
        )
        return f'<label>{label}<select name="{name}">{options}</select></label>'

    def check(name: str, value: str, label: str, *, on: bool) -> str:
        return (
            f'<label class="check"><input type="checkbox" name="{name}" value="{escape(value)}"'
            f"{' checked' if on else ''}>{label}</label>"
        )

    families = "".join(
        check(
            "schedule",
            family.name,
            f'<span title="{escape(family.summary)}">{escape(family.name)}</span>',
            on=family.name in chosen,
        )
        for family in schedules()
    )
    held = [("", "none"), *titles.items()]
    return "".join(
        [
            "<fieldset><legend>Schedules</legend>",
            f'<div id="schedules">{families}</div></fieldset>',
            "<fieldset><legend>Pipeline</legend>",
            select("plan", "Plan", held),
            '<label>Load a plan<input type="file" accept=".json,application/json"></label>',
            '<p class="hint">A plan brings its own numbers; no profile tells fused pairs, and few tell I and W.</p>',
            count("num_stages", "Ranks"),
            count("num_batches", "Micro-batches"),
            count("chunks", "Chunks a rank", "schedule's"),
            count("group_size", "Group size", "schedule's"),
            count("cap", "Activations cap", "schedule's"),
            "</fieldset><fieldset><legend>Seconds a micro-batch</legend>",
            '<p class="hint">On one rank: one number for all, or one for each, with commas. Chunks share it.</p>',
            field("forward_times", "Forward"),
            field("backward_times", "Backward", extra='placeholder="2, or its halves"'),
            field("input_gradient_times", "Input gradient", extra='placeholder="half of it"'),
            field("weight_gradient_times", "Weight gradient", extra='placeholder="half of it"'),
            field("overlapped_times", "Fused F and B", extra='placeholder="their sum"'),
            field("p2p_time", "Latency of a message"),
            field("transfer_time", "Time on the link", extra='placeholder="0.0"'),
            field("gradient_sync_times", "Gradient sync", extra='placeholder="0.0"'),
            field("optimizer_times", "Optimizer step", extra='placeholder="0.0"'),
            count("iterations", "Steps", "1"),
            select("comm", "Communication", [(name, name) for name in COMMUNICATION]),
            f'<p class="hint">{escape(COMMUNICATION.get(typed.get("comm", "link"), ""))}</p>',
            "</fieldset><fieldset><legend>Memory of a rank</legend>",
            field("weight_bytes", "Weights and state", extra='placeholder="e.g. 8 GB"'),
            field("activation_bytes", "A micro-batch keeps", extra='placeholder="e.g. 1 GB"'),
            field("memory_cap", "Cap", extra='placeholder="e.g. 16 GB"'),
            "</fieldset><fieldset><legend>Picture</legend>",
            select("transfers", "Transfers", [(name, name) for name in TRANSFERS]),
            check("memory", "1", "Memory", on=typed.get("memory") == "1"),
            check("critical_path", "1", "Critical path", on=typed.get("critical_path") == "1"),
            "</fieldset>",
        ]
    )
