"""HTML of the plan page as one document, with all scripts and styles, because the page loads no other files."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

from hpgo.base.quoting import filled
from hpgo.draw import palette
from hpgo.hardware.presets import PRESETS
from hpgo.model.builtin import MODELS
from hpgo.programs.names import PlannedSchedule
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan

_SCRIPTS = (
    "make", "stream", "state", "light", "layers", "cuts", "cluster", "memory", "time", "timeline", "words",
    "alternatives", "controls", "ask", "search", "sweep", "start",
)  # fmt: skip
_FILLS = ("F", "B", "sync", "waits", "weights", "gradients", "optimizer", "activations", "buffers")
"""Styles of pictures that the page uses, besides the styles of stages."""


def alone(plan: Plan) -> bytes:
    """Return the page of one plan as a file that needs no server, with the pictures of its step."""
    from hpgo.draw import render
    from hpgo.page.planned.facts import facts
    from hpgo.page.planned.origin import question_of

    timeline = plan.timeline()
    held = {
        "facts": facts(plan, question_of(plan)),
        "timeline": render(timeline, ".svg", linked=True).decode(),
        "picture": render(timeline, ".html").decode(),
    }
    return page(held).encode()


def page(held: dict[str, Any] | None) -> str:
    """Return the page, which requests the plan of its address from the server, or contains everything in `held`."""
    return filled(_template(), {"HELD": in_script(held), "CHOICES": in_script(_choices())})


@cache
def _template() -> str:
    here = resources.files("hpgo.page.planned")
    view = here.joinpath("view")
    parts = {
        "STYLE": view.joinpath("style.css").read_text(encoding="utf-8") + fills(),
        "SCRIPT": "\n".join(
            [
                f"const STAGE_FILLS = {len(palette.STAGE_COLOURS)};",
                *(view.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in _SCRIPTS),
            ]
        ),
    }
    return filled(view.joinpath("page.html").read_text(encoding="utf-8"), parts)


def fills() -> str:
    """Return the CSS classes with colors and patterns of pictures: `is-F`, `is-stage-0`, `is-weights` and so on."""
    light: list[str] = []
    dark: list[str] = []
    strong: list[str] = []
    stages = [f"stage-{at}" for at in range(len(palette.STAGE_COLOURS))]
    for name in (*_FILLS, *stages):
        look = palette.look(name)
        assert look.fill is not None  # noqa: S101 -- all boxes are filled
        for rules, colour in zip((light, dark), look.fill, strict=True):
            rules.append(f".is-{name}{{--c:{colour};--hatch:{_tile(look.hatch, colour, palette.HATCH_OPACITY)}}}")
        strong.append(f".is-{name}{{--hatch:{_tile(look.hatch, look.fill[0], palette.PRINT_OPACITY)}}}")
    return "\n".join([*light, "@media (prefers-color-scheme: dark){", *dark, "}", "@media print{", *strong, "}"])


def _tile(hatch: str, colour: str, opacity: float) -> str:
    """Return one tile of a pattern as a CSS image, or `none` for no pattern."""
    if not hatch:
        return "none"
    side, ink = f"{palette.HATCH_PX:g}", palette.ink_on(colour)
    drawn = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{side}' height='{side}'><path d='{palette.HATCHES[hatch]}'"
        f" fill='none' stroke='{ink}' stroke-width='{palette.HATCH_LINE_PX:g}' opacity='{opacity:g}'/></svg>"
    )
    return f'url("data:image/svg+xml,{quote(drawn)}")'


def _choices() -> dict[str, list[str]]:
    """Return the names that the form offers."""
    return {
        "models": sorted(MODELS),
        "clusters": sorted(PRESETS),
        "optimizers": list(OPTIMIZERS),
        "schedules": list(get_args(PlannedSchedule)),
    }


def in_script(held: object) -> str:
    """Return JSON for a script element, without `<`, so that no text in it can end the script."""
    return json.dumps(held, ensure_ascii=False).replace("<", "\\u003c")
