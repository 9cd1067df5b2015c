"""HTML of the page that plans transformers, as one document, because the page loads no other files."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import get_args

from hpgo.base.quoting import filled
from hpgo.draw import palette
from hpgo.hardware.presets import PRESETS
from hpgo.llm.parallelism import Precision, Recompute
from hpgo.llm.size import KINDS
from hpgo.model.transformer_presets import transformer_names
from hpgo.page.planned.document import fills, in_script
from hpgo.page.transformers.address import CONFIGURATION, FRAMEWORKS, SHAPE

_SHARED_SCRIPTS = ("make", "stream")
_SCRIPTS = ("state", "form", "list", "settings", "placement", "bars", "size", "start")


@cache
def page() -> str:
    """Return the page, which requests everything that its address names from the server."""
    here = resources.files("hpgo.page")
    planned, view = here.joinpath("planned/view"), here.joinpath("transformers/view")
    scripts = [planned.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in _SHARED_SCRIPTS]
    scripts += [view.joinpath(f"{part}.js").read_text(encoding="utf-8") for part in _SCRIPTS]
    style = planned.joinpath("style.css").read_text(encoding="utf-8")
    parts = {
        "STYLE": style + view.joinpath("style.css").read_text(encoding="utf-8") + fills(),
        "SCRIPT": "\n".join([f"const STAGE_FILLS = {len(palette.STAGE_COLOURS)};", *scripts]),
        "CHOICES": in_script(_choices()),
    }
    return filled(view.joinpath("page.html").read_text(encoding="utf-8"), parts)


def _choices() -> dict[str, list[str]]:
    """Return the names that the form offers."""
    return {
        "models": list(transformer_names()),
        "clusters": sorted(PRESETS),
        "precisions": list(get_args(Precision)),
        "frameworks": list(FRAMEWORKS),
        "recomputations": list(get_args(Recompute)),
        "kinds": list(KINDS),
        "shape": list(SHAPE),
        "configuration": list(CONFIGURATION),
    }
