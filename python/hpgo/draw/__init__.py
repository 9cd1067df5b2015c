"""Pictures of timelines: SVG, PNG, PDF, interactive HTML, Chrome/Perfetto traces, plain text and TikZ.

`save` chooses by the ending of the file. matplotlib loads for PNG and PDF only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Unpack, cast, get_args

from hpgo.base.checks import check_is, check_list
from hpgo.base.messages import safe_repr, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpgo.draw.options import Chosen
    from hpgo.timing.timeline import Timeline

TextEnding = Literal[".svg", ".html", ".json", ".txt", ".tex"]
"""Of pictures that `render` makes: those of `ENDINGS` that need no matplotlib."""
ENDINGS: dict[str, str] = {
    ".svg": "vector picture, text kept",
    ".png": "pixels (needs matplotlib)",
    ".pdf": "vector picture for print (needs matplotlib)",
    ".html": "interactive page in one file: zoom, pan, hover",
    ".json": "trace for Perfetto and chrome://tracing",
    ".txt": "plain text for logs",
    ".tex": "TikZ for papers",
}


def save(timelines: Timeline | Sequence[Timeline], path: str | Path, **options: Unpack[Chosen]) -> Path:
    """Draws one timeline, or several on one time axis, into a file and returns its path.

    The ending chooses the format (`hpgo.draw.ENDINGS`); the keywords are those of `hpgo.draw.options.DrawOptions`.

    Raises ArgumentError for an unknown ending or option, HpgoError where matplotlib is missing or the file can't be
    written.
    """
    from hpgo.base.files import as_path, writing
    from hpgo.draw import raster, scene
    from hpgo.draw.options import options_of
    from hpgo.errors import HpgoError
    from hpgo.timing.timeline import check_picture

    path = as_path(path, ArgumentError)
    drawn = _several(timelines)
    ending = path.suffix.lower()
    if path.name.lower().endswith(".timeline.json"):
        raise ArgumentError(
            f"`{path.name}` would hold the data of one timeline, not a picture",
            "write it with `Timeline.save`; give a trace another name, such as `trace.json`",
        )
    if ending not in ENDINGS or "\0" in str(path):
        known = ", ".join(ENDINGS)
        raise ArgumentError(
            f"no picture format ends in `{shorten(ending or path.name)}`", f"choose one of {known}", code="unknown_name"
        )
    if ending in {".png", ".pdf"}:
        check_picture(drawn, ending)
        chosen = options_of(options, len(drawn))
        raster.write(scene.scene(drawn, chosen), chosen, path)
    else:
        picture = render(drawn, cast("TextEnding", ending), **options)
        with writing(path, HpgoError) as file:
            file.write(picture)
    return path


def render(timelines: Timeline | Sequence[Timeline], ending: TextEnding, **options: Unpack[Chosen]) -> bytes:
    """The picture that `save` would write for one of `ENDINGS` but PNG and PDF, as bytes.

    Raises ArgumentError for another ending, and what `save` raises.

    >>> import hpgo
    >>> step = hpgo.simulate(hpgo.schedule("gpipe", ranks=2, micro_batches=2))
    >>> render(step, ".txt", columns=40).decode().splitlines()[1]
    'rank 0 |F0-F1-.........B0====B1====|'
    """
    from hpgo.draw.options import options_of
    from hpgo.timing.timeline import check_picture

    drawn = _several(timelines)
    chosen = options_of(options, len(drawn))
    if not isinstance(ending, str) or ending not in get_args(TextEnding):
        raise _no_text_ending(ending)
    check_picture(drawn, ending)
    if ending == ".html":
        from hpgo.draw.html import html

        return html(drawn, chosen)
    if ending == ".json":
        from hpgo.draw.trace import trace

        return trace(drawn, chosen)
    if ending == ".txt":
        from hpgo.draw.text import text

        return text(drawn, chosen).encode()
    from hpgo.draw.scene import scene

    if ending == ".svg":
        from hpgo.draw.svg import svg

        return svg(scene(drawn, chosen), chosen).encode()
    from hpgo.draw.tikz import tikz

    return tikz(scene(drawn, chosen), chosen).encode()


def _no_text_ending(ending: object) -> ArgumentError:
    if isinstance(ending, str) and ending in ENDINGS:
        return ArgumentError(f"`{ending}` is not text", "`hpgo.draw.save` writes .png and .pdf into a file")
    known = list(get_args(TextEnding))
    dotted = f".{ending.lower().lstrip('.')}" if isinstance(ending, str) else ""
    hint = f"with its dot: `{dotted}`" if dotted in known else f"choose one of {', '.join(known)}"
    return ArgumentError(f"the ending is {safe_repr(ending)}", hint)


def _several(timelines: Timeline | Sequence[Timeline]) -> list[Timeline]:
    from hpgo.timing.timeline import Timeline

    hint = "give one that `hpgo.simulate` made, or a list of them"
    several = [timelines] if isinstance(timelines, Timeline) else check_list("the timelines", timelines, hint=hint)
    if not several:
        raise ArgumentError("no timeline to draw", "give at least one", code="missing")
    for timeline in several:
        check_is("a timeline", timeline, Timeline, hint)
    return several


__all__ = ["ENDINGS", "render", "save"]
