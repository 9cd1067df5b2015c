"""The plan's page as one document: its script and its style are joined from parts, as nothing is fetched for them."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, get_args

from hpgo.base.quoting import filled
from hpgo.machine.presets import PRESETS
from hpgo.model.builtin import MODELS
from hpgo.planning.optimizers import OPTIMIZERS
from hpgo.programs.names import PlannedSchedule

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan

_SCRIPTS = (
    "make", "state", "light", "layers", "cuts", "cluster", "memory", "time", "timeline", "words", "alternatives",
    "controls", "ask", "search", "sweep", "start",
)  # fmt: skip


def alone(plan: Plan) -> bytes:
    """The page of one plan as a file of its own, with the step's pictures in it: to look at, without a server."""
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
    """The page: of a server, which it asks for the plan of its address, or with all it shows in itself (`held`)."""
    return filled(_template(), {"HELD": _in_script(held), "CHOICES": _in_script(_choices())})


@cache
def _template() -> str:
    here = resources.files("hpgo.page.planned")
    view = here.joinpath("view")
    parts = {
        "STYLE": view.joinpath("style.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join(view.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in _SCRIPTS),
    }
    return filled(view.joinpath("page.html").read_text(encoding="utf-8"), parts)


def _choices() -> dict[str, list[str]]:
    """What the form offers."""
    return {
        "models": sorted(MODELS),
        "clusters": sorted(PRESETS),
        "optimizers": list(OPTIMIZERS),
        "schedules": list(get_args(PlannedSchedule)),
    }


def _in_script(held: dict[str, Any] | None) -> str:
    """JSON that no browser takes for the end of a script."""
    return json.dumps(held, ensure_ascii=False).replace("<", "\\u003c")
