"""A scene as PNG or PDF, painted by matplotlib: the same layout as the SVG, two pixels to one for sharp screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.errors import HpgoError
from hpgo.base.files import writing
from hpgo.base.signals import uninterrupted
from hpgo.draw import palette
from hpgo.draw.scene import Boxes, Line, Scene, Steps, Words

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from hpgo.draw.options import Options

_PX_PER_INCH = 96
_POINTS_PER_PX = 72 / _PX_PER_INCH
_HATCHES = {"/": "////", "\\": "\\\\\\\\", ".": "...", "": None}


def write(scene: Scene, options: Options, path: Path) -> None:
    """Writes `scene` to `path`, a `.png` or `.pdf`.

    Raises HpgoError where matplotlib is not installed.
    """
    try:
        with uninterrupted():
            from matplotlib import rc_context
            from matplotlib.backends import backend_agg, backend_pdf  # noqa: F401 -- what writes either
            from matplotlib.figure import Figure
    except ImportError as error:
        raise HpgoError(
            f"{path.suffix} pictures need matplotlib, which is not installed",
            "`pip install 'hpgo[plot]'`, or write .svg or .html, which need nothing",
        ) from error
    theme = 1 if options.theme == "dark" else 0
    figure = Figure(figsize=(scene.width_px / _PX_PER_INCH, scene.height_px / _PX_PER_INCH))
    figure.set_facecolor(palette.PAPER[theme])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width_px), ylim=(scene.height_px, 0))
    axes.set_axis_off()
    for order, item in enumerate(scene.items):
        if isinstance(item, Words):
            _words(axes, item, theme, order)
        elif isinstance(item, Line):
            _line(axes, item, theme, order)
        else:
            _shape(axes, item, palette.look(item.style, scene.chunks), theme, order, hatch=options.hatch)
    # Text stays text in the PDF, and no date makes the same scene give the same file.
    with rc_context({"pdf.fonttype": 42, "font.family": ["DejaVu Sans"]}):
        metadata = {"Title": scene.title} | ({"CreationDate": None} if path.suffix == ".pdf" else {"Software": None})
        with writing(path, HpgoError) as file:
            figure.savefig(
                file,
                format=path.suffix[1:].lower(),
                dpi=2 * _PX_PER_INCH,
                facecolor=palette.PAPER[theme],
                metadata=metadata,
            )


def _line(axes: Axes, item: Line, theme: int, order: int) -> None:
    look = palette.look(item.style)
    stroke = look.stroke[theme] if look.stroke else "none"
    width = look.stroke_px * _POINTS_PER_PX
    if item.arrow:
        head = {"arrowstyle": "-|>,head_length=0.25,head_width=0.12", "color": stroke, "lw": width}
        props = head | {"shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=item.points[-1], xytext=item.points[0], arrowprops=props, zorder=order)
        return
    xs, ys = zip(*item.points, strict=True)
    style = (0, look.dash_px) if look.dash_px else "-"
    axes.plot(xs, ys, color=stroke, linewidth=width, linestyle=style, zorder=order, solid_capstyle="butt")


def _shape(axes: Axes, item: Boxes | Steps, look: palette.Look, theme: int, order: int, *, hatch: bool) -> None:
    from matplotlib.collections import PolyCollection

    if isinstance(item, Boxes):
        left, top, right, bottom = item.x, item.y, item.x + item.width, item.y + item.height
        corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    else:
        tops = np.concatenate(([item.base], np.repeat(item.tops, 2), [item.base]))
        corners = np.column_stack((np.repeat(item.edges, 2), tops))[None]
    collection = PolyCollection(
        list(corners),
        facecolors=look.fill[theme] if look.fill else "none",
        edgecolors=look.stroke[theme] if look.stroke else "none",
        linewidths=look.stroke_px * _POINTS_PER_PX,
        linestyles=[(0, look.dash_px)] if look.dash_px else "solid",
        zorder=order,
        antialiaseds=isinstance(item, Boxes),
        hatch=_HATCHES[look.hatch] if hatch else None,
    )
    axes.add_collection(collection, autolim=False)


def _words(axes: Axes, words: Words, theme: int, order: int) -> None:
    font = palette.FONTS[words.font]
    align = {"start": "left", "middle": "center", "end": "right"}[font.anchor]
    size_px = words.size_px or font.size_px
    # DejaVu Sans is wider than the fonts that browsers choose; a little smaller, it takes the same room.
    for x, y, text in zip(words.x, words.y, words.texts, strict=True):
        axes.text(
            x, y, text, ha=align, va="baseline", color=words.colour or font.colour[theme],
            fontsize=size_px * _POINTS_PER_PX * 0.92, fontweight="bold" if font.bold else "normal", zorder=order,
            parse_math=False,  # a `$` is one
        )  # fmt: skip
