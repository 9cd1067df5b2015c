"""Saving a scene as SVG, PNG, PDF, or an HTML page with the SVG, chosen by the file's ending."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from hpgo.base.files import as_path, writing
from hpgo.base.messages import shorten
from hpgo.draw import palette
from hpgo.draw.options import options_of
from hpgo.draw.svg import svg
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from hpgo.draw.options import DrawOptions, Theme
    from hpgo.draw.scene import Scene

ENDINGS = (".svg", ".png", ".pdf", ".html")


def check(path: str | os.PathLike[str]) -> Path:
    """Return `path` if its ending is one of `ENDINGS`. Raise ArgumentError otherwise."""
    found = as_path(path, ArgumentError)
    if found.suffix.lower() not in ENDINGS:
        raise ArgumentError(
            f"no picture format has the ending `{shorten(found.suffix or found.name)}`",
            f"choose one of {', '.join(ENDINGS)}",
            code="unknown_name",
        )
    return found


def save(scene: Scene, path: str | os.PathLike[str], *, theme: Theme = "auto") -> Path:
    """Write the scene. Return its path.

    Raises ArgumentError for an unknown ending or theme, and HpgoError if matplotlib is missing or the file can't be
    written.
    """
    found, options = check(path), options_of({"theme": theme}, 1)
    ending = found.suffix.lower()
    if ending in {".png", ".pdf"}:
        from hpgo.draw import raster

        raster.write(scene, options, found)
        return found
    text = svg(scene, options) if ending == ".svg" else _page(scene, options)
    with writing(found, HpgoError) as file:
        file.write(text.encode())
    return found


def _page(scene: Scene, options: DrawOptions) -> str:
    light = 1 if options.theme == "dark" else 0
    paper = palette.PAPER[light]
    layout = f"body{{margin:0;background:{paper}}}svg{{display:block;max-width:100%;height:auto;margin:auto}}"
    dark = f"@media (prefers-color-scheme:dark){{body{{background:{palette.PAPER[1]}}}}}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(scene.title)}</title>',
            '<meta name="viewport" content="width=device-width">',
            f"<style>{layout}{dark if options.theme == 'auto' else ''}</style></head>",
            f"<body>\n{svg(scene, options)}</body></html>",
            "",
        ]
    )
