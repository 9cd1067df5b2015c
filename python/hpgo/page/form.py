"""HTML of the page that compares schedules: the form with the values of the address, and the result or an error."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from hpgo.base.quoting import filled
from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw import ENDINGS
from hpgo.errors import HpgoError
from hpgo.page.settings import LABELS, RENAMED, TRANSFERS, settings_of
from hpgo.programs.schedule import schedules
from hpgo.timing.config import SettingError
from hpgo.timing.simulation import COMMUNICATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.timing.timeline import Timeline

_DEFAULTS = {"num_stages": "4", "num_batches": "8", "forward_times": "1.0", "p2p_time": "0.0"}
_PLANS = (
    '<p class="hint">A plan brings its own numbers; no profile tells fused pairs, and few tell input and weight '
    "gradients apart.</p>"
)
_OWN = "Dashed fields show its own numbers; choose none to type them."
_EXPORTS = {".json": "Perfetto trace", ".txt": "plain text", ".tex": "TikZ"}
"""Names of export formats that are not known by their ending."""
_MAX_RANK_ROWS = 64
"""Ranks, over all schedules, up to which the page lists each one. Longer lists are harder to read than the picture."""


def page(
    items: Sequence[tuple[str, str]],
    titles: Mapping[str, str],
    outcome: Sequence[Timeline] | HpgoError,
    planned: Mapping[str, str],
) -> str:
    """Return the page for the fields `items` of an address, with values as typed, so that they can be corrected.

    `titles` are the titles of plans by their names in addresses. `planned` are the values of the selected plan
    (`hpgo.page.settings.numbers_of`), empty without one.
    """
    form = _Form(items, titles, outcome if isinstance(outcome, HpgoError) else None, planned)
    result = _mistake(outcome) if isinstance(outcome, HpgoError) else _result(items, outcome)
    return filled(_template(), {"FORM": form.html()} | result)


@cache
def _template() -> str:
    here = resources.files("hpgo.page")
    html, style, script = (here.joinpath(f"page.{part}").read_text(encoding="utf-8") for part in ("html", "css", "js"))
    return filled(html, {"STYLE": style, "SCRIPT": script})


@cache
def _about() -> str:
    return "".join(f"<li><b>{family.name}</b>: {escape(family.summary)}</li>" for family in schedules())


def _mistake(error: HpgoError) -> dict[str, str]:
    field = _blamed(error)
    way = f' <a class="to" href="#{field}">Go to {escape(LABELS[field])}</a>' if field else ""
    words = f'<p class="error" role="alert"><b>{escape(error.message)}</b><br>{escape(error.hint)}{way}</p>'
    return {"TITLE": "hpgo", "WORDS": words, "ROWS": "0", "PANELS": "0", "PICTURE": "", "MORE": "", "SAID": ""}


def _result(items: Sequence[tuple[str, str]], drawn: Sequence[Timeline]) -> dict[str, str]:
    from hpgo.draw.facts import comparison, definitions, names, summary  # numpy, which a mistake has no use for

    query = escape(urlencode([(name, text) for name, text in items if text]))
    (_, *heading), *rows = comparison(drawn, ())
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in ("schedule", *heading))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>'
        for name, *row in rows
    )
    title = " against ".join(names(drawn, ()))
    said = "; ".join(f"{timeline.schedule}: {summary(timeline)}" for timeline in drawn)
    picture = f"/picture.html?{query}"
    exports = "".join(
        f'<a href="/export{ending}?{query}" title="{escape(what)}" download>'
        f"{_EXPORTS.get(ending, ending[1:].upper())}</a>"
        for ending, what in ENDINGS.items()
    )
    words = (
        f'<div class="wide" tabindex="0" role="group" aria-label="Figures"><table><tr>{head}</tr>{body}</table></div>'
        f'<p class="hint">{escape(definitions(drawn, with_table=True))}</p>{_notes(drawn)}'
    )
    frame = (
        f'<iframe id="picture" src="{picture}" title="Picture: {escape(title)}"></iframe>'
        f'<noscript><img src="/picture.svg?{query}" alt="{escape(said)}"></noscript>'
    )
    more = (
        '<p><span id="export">Export as</span> <span class="exports" role="group" aria-labelledby="export">'
        f'{exports}</span></p><p><button type="button" id="copy">Copy address</button> '
        f'<a href="{picture}" target="_blank" rel="noopener">Open the picture in a tab of its own</a></p>'
        f"{_ranks_tables(drawn)}"
    )
    return {
        "TITLE": f"{escape(title)} – hpgo",
        "WORDS": words,
        "ROWS": str(sum(timeline.ranks + 2 for timeline in drawn)),
        "PANELS": str(len(drawn)),
        "PICTURE": frame,
        "MORE": more,
        "SAID": escape(said),
    }


def _ranks_tables(drawn: Sequence[Timeline]) -> str:
    """Return a table for each schedule, with the figures of each of its ranks."""
    from hpgo.draw.facts import names, rank_name

    if sum(timeline.ranks for timeline in drawn) > _MAX_RANK_ROWS:
        return ""
    tables = []
    for label, timeline in zip(names(drawn, ()), drawn, strict=True):
        measures, memory = timeline.measures, timeline.measures.peak_memory_bytes
        heading = [timeline.row, "busy", "bubble", "activations held", *(["peak memory"] if memory else [])]
        rows = ""
        for rank, busy_s in enumerate(measures.busy_s):
            idle = 1 - busy_s / timeline.makespan_s if timeline.makespan_s else 0.0
            held = measures.peak_in_flight[rank] / timeline.virtual_stages_per_rank
            cells = [format_seconds(busy_s), f"{100 * idle:.1f} %", f"{held:g}"]
            cells += [format_bytes(memory[rank])] if memory else []
            body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            rows += f'<tr><th scope="row">{escape(rank_name(timeline, rank))}</th>{body}</tr>'
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)
        tables.append(f"<table><caption>{escape(label)}</caption><tr>{head}</tr>{rows}</table>")
    opening = '<div class="wide" id="ranks" tabindex="0" role="group" aria-label="Figures of each row">'
    return f"{opening}{''.join(tables)}</div>"


def _notes(drawn: Sequence[Timeline]) -> str:
    notes = dict.fromkeys(note for timeline in drawn for note in timeline.notes)
    return "".join(f'<p class="hint">Note: {escape(note)}.</p>' for note in notes)


def _blamed(error: HpgoError | None) -> str:
    """Return the field that an error is about; empty if it is about none or several."""
    return error.field if isinstance(error, SettingError) and error.field in LABELS else ""


class _Form:
    """The form with the values of the address, and an error next to its field."""

    def __init__(
        self,
        items: Sequence[tuple[str, str]],
        titles: Mapping[str, str],
        error: HpgoError | None,
        planned: Mapping[str, str],
    ) -> None:
        # Old addresses use old names of fields.
        self._typed = {RENAMED.get(name, name): text for name, text in items}
        self._chosen = [text for name, text in items if name == "schedule" and text]
        # An empty form shows 1F1B. A plan has a schedule of its own.
        if "schedule" not in self._typed and not self._typed.get("plan"):
            self._chosen = ["1f1b"]
        self._titles = titles
        self._error = error
        self._planned = planned
        self._defaults = _DEFAULTS | {"num_stages": _ranks(items)}

    def html(self) -> str:
        return "".join(
            [
                self._schedules(),
                "<fieldset><legend>Pipeline</legend>",
                self._select("plan", [("", "none"), *self._titles.items()], *self._of_plan()),
                self._field("file", 'type="file" accept=".json,application/json"', named=False),
                _PLANS,
                self._count("num_stages"),
                self._count("num_batches"),
                self._count("virtual_stages_per_rank", "schedule's"),
                self._count("group_size", "schedule's"),
                self._count("activation_limit", "schedule's"),
                "</fieldset><fieldset><legend>Seconds a micro-batch</legend>",
                '<p class="hint">On a rank: one number for all, or one each, with commas. Virtual stages share it.</p>',
                self._text("forward_times"),
                self._text("backward_times", "2, or its halves"),
                self._text("input_gradient_times", "B - W, or half"),
                self._text("weight_gradient_times", "B - I, or half"),
                self._text("overlapped_times", "their sum"),
                self._text("p2p_time"),
                self._text("transfer_time", "0.0"),
                self._text("gradient_sync_times", "0.0"),
                self._text("optimizer_times", "0.0"),
                self._count("iterations", "1"),
                self._select("comm", [(name, name) for name in COMMUNICATION], self._mode()),
                "</fieldset><fieldset><legend>Memory of a rank</legend>",
                self._text("weight_bytes", "e.g. 8 GB"),
                self._text("activation_bytes", "e.g. 1 GB"),
                self._text("memory_cap", "e.g. 16 GB"),
                "</fieldset><fieldset><legend>Picture</legend>",
                self._select("transfers", [(name, name) for name in TRANSFERS]),
                self._check("memory"),
                self._check("critical_path"),
                "</fieldset>",
            ]
        )

    def _of_plan(self) -> tuple[str, str]:
        """Return the hint next to a selected plan, and a link to its page."""
        if not self._planned:
            return "", ""
        where = urlencode({"plan": self._value("plan")})
        return _OWN, f' <a href="/plan?{escape(where)}">See and change it on the plan\'s page</a>'

    def _mode(self) -> str:
        return COMMUNICATION.get(self._value("comm"), "")

    def _value(self, name: str) -> str:
        usual = {"comm": "link", "transfers": "none"} | self._defaults
        return self._planned.get(name, self._typed.get(name, usual.get(name, "")))

    def _schedules(self) -> str:
        boxes = "".join(
            f'<label class="check" title="{escape(family.summary)}"><input type="checkbox" name="schedule" '
            f'id="schedule-{family.name}" value="{family.name}"{" checked" if family.name in self._chosen else ""}'
            f"{self._wrong('schedule')}>{family.name}</label>"
            for family in schedules()
        )
        own = self._planned.get("schedule")
        note = self._note("schedule", f"None chosen is the plan's own, {own}." if own else "")
        return (
            f'<fieldset id="schedule" tabindex="-1"><legend>{LABELS["schedule"]}</legend>'
            f'<div id="schedules">{boxes}</div>{note}<details class="about"><summary>What they are</summary>'
            f"<ul>{_about()}</ul></details></fieldset>"
        )

    def _text(self, name: str, placeholder: str = "") -> str:
        return self._field(name, f'type="text" value="{escape(self._value(name))}" placeholder="{escape(placeholder)}"')

    def _count(self, name: str, placeholder: str = "") -> str:
        value = escape(self._value(name))
        return self._field(name, f'type="number" min="1" step="1" value="{value}" placeholder="{escape(placeholder)}"')

    def _field(self, name: str, attributes: str, *, named: bool = True) -> str:
        says = f' name="{name}"' if named else ""
        if name in self._planned:
            says += f' disabled title="{escape(self._planned[name]) or "the plan has none"}"'
        return (
            f'<div class="field"><label for="{name}">{LABELS[name]}</label><input id="{name}" {attributes}{says}'
            f"{self._wrong(name)}>{self._note(name)}</div>"
        )

    def _select(self, name: str, choices: Sequence[tuple[str, str]], hint: str = "", link: str = "") -> str:
        now = self._value(name)
        options = "".join(
            f'<option value="{escape(value)}"{" selected" if value == now else ""}>{escape(text)}</option>'
            for value, text in choices
        )
        return (
            f'<div class="field"><label for="{name}">{LABELS[name]}</label><select id="{name}" name="{name}"'
            f"{self._wrong(name)}>{options}</select>{self._note(name, hint, link)}</div>"
        )

    def _check(self, name: str) -> str:
        on = " checked" if self._typed.get(name) == "1" else ""
        return (
            f'<div class="field"><label class="check"><input type="checkbox" id="{name}" name="{name}" value="1"{on}'
            f"{self._wrong(name)}>{LABELS[name]}</label>{self._note(name)}</div>"
        )

    def _wrong(self, name: str) -> str:
        invalid = ' aria-invalid="true"' if _blamed(self._error) == name else ""
        return f'{invalid} aria-describedby="{name}-note"'

    def _note(self, name: str, hint: str = "", link: str = "") -> str:
        """Return the note below a field: its error, or else a hint, with a link in HTML."""
        if self._error is None or _blamed(self._error) != name:
            return f'<p class="note" id="{name}-note">{escape(hint)}{link}</p>'
        text = f"{self._error.message}; {self._error.hint}" if self._error.hint else self._error.message
        return f'<p class="note wrong" id="{name}-note">{escape(text)}</p>'


def _ranks(items: Sequence[tuple[str, str]]) -> str:
    """Return the number of ranks for an address, which may follow from the number of its times."""
    try:
        return str(settings_of(items).setup.ranks)
    except HpgoError:
        return _DEFAULTS["num_stages"]
