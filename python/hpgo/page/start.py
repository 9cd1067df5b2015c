"""The page that leads to all others: what each is for, and what it needs."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib import resources

from hpgo.base.quoting import filled

_PAGES = (
    (
        "/plan",
        "Plan a model from a profile",
        "Cut the layers of a measured model into stages, place the stages on a cluster, and change the plan by hand.",
        "hpgo plan",
    ),
    (
        "/transformers",
        "Plan a transformer",
        "Find the fastest degrees of parallelism for a language model, see why others do not fit, and export the job.",
        "hpgo llm plan",
    ),
    (
        "/",
        "Compare schedules",
        "Draw pipeline schedules side by side with times that you set, and export the picture.",
        "hpgo simulate",
    ),
)
"""Address, title, purpose and command of each page."""


@cache
def start_page() -> str:
    """Return the start page as one document."""
    here = resources.files("hpgo.page")
    cards = "\n".join(
        f'<li><a href="{address}"><b>{escape(title)}</b></a><p>{escape(purpose)}</p><code>{command}</code></li>'
        for address, title, purpose, command in _PAGES
    )
    style = here.joinpath("planned/view/style.css").read_text(encoding="utf-8")
    return filled(here.joinpath("start.html").read_text(encoding="utf-8"), {"STYLE": style, "CARDS": cards})
