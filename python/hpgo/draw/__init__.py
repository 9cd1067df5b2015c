"""Pictures of timelines: SVG, PNG, PDF, interactive HTML, Chrome/Perfetto traces, plain text and TikZ.

`save` chooses the format by the file's ending. matplotlib is loaded for PNG and PDF only.
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
"""Endings of pictures that `render` can make: the ones in `ENDINGS` that need no matplotlib."""
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
    """Draw one timeline, or several on one time axis, into a file. Return its path.

    The ending chooses the format (`hpgo.draw.ENDINGS`); the keywords are the fields of `hpgo.draw.options.DrawOptions`.

    Raises ArgumentError for an unknown ending or option, and HpgoError if matplotlib is missing or the file can't be
    written.
    """
    # These imports load numpy and the layout code, which would slow down `import hpgo`.
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
    # `Path.suffix` can't be trusted with a NUL in the name, and no file can have one.
    if ending not in ENDINGS or "\0" in str(path):
        known = ", ".join(ENDINGS)
        raise ArgumentError(
            f"no picture format has the ending `{shorten(ending or path.name)}`",
            f"choose one of {known}",
            code="unknown_name",
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
    """Return the picture that `save` would write, as bytes. PNG and PDF are not supported.

    Raises ArgumentError for another ending, and the errors of `save`.

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
    # Import one format at a time, because no call needs more than one.
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
        return ArgumentError(
            f"ending is `{ending}`, but `render` makes text formats only", "write .png and .pdf with `hpgo.draw.save`"
        )
    known = list(get_args(TextEnding))
    dotted = f".{ending.lower().lstrip('.')}" if isinstance(ending, str) else ""
    hint = f"write it with a dot: `{dotted}`" if dotted in known else f"choose one of {', '.join(known)}"
    return ArgumentError(f"ending is {safe_repr(ending)}, but must be a known one", hint)


def _several(timelines: Timeline | Sequence[Timeline]) -> list[Timeline]:
    from hpgo.timing.timeline import Timeline

    hint = "pass a timeline of `hpgo.simulate`, or a list of timelines"
    several = [timelines] if isinstance(timelines, Timeline) else check_list("the timelines", timelines, hint=hint)
    if not several:
        raise ArgumentError("no timeline to draw", "pass at least one timeline", code="missing")
    for timeline in several:
        check_is("a timeline", timeline, Timeline, hint)
    return several


__all__ = ["ENDINGS", "render", "save"]
