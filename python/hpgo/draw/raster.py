"""A scene as PNG or PDF, drawn by matplotlib. It has the layout of the SVG, with 2 × 2 pixels per SVG pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from hpgo.base.files import writing
from hpgo.base.signals import uninterrupted
from hpgo.draw import palette
from hpgo.draw.scene import Boxes, Line, Scene, Steps, Words
from hpgo.errors import HpgoError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpgo.draw.options import DrawOptions

_PX_PER_INCH = 96
_POINTS_PER_PX = 72 / _PX_PER_INCH
_HATCH_REPEATS = {"/": 5, "\\": 5, ".": 4, "-": 4, "|": 4, "x": 4, "o": 3, "+": 4}
"""Number of times that a hatch letter is repeated to get the density of `palette.HATCHES` in matplotlib."""


def write(scene: Scene, options: DrawOptions, path: Path) -> None:
    """Write `scene` to `path`, a `.png` or `.pdf` file.

    Raises HpgoError if matplotlib is not installed.
    """
    try:
        # A Ctrl-C during the import could leave matplotlib half loaded.
        with uninterrupted():
            from matplotlib import rc_context
            from matplotlib.backends import backend_agg, backend_pdf  # noqa: F401 -- used by savefig
            from matplotlib.figure import Figure
    except ImportError as error:
        raise HpgoError(
            f"{path.suffix} pictures need matplotlib, which is not installed",
            "run `pip install matplotlib`, or write .svg or .html",
            code="missing_package",
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
            _shape(axes, item, theme, order, options)
    # Font type 42 keeps text as text in the PDF. Without a date, equal scenes give equal files.
    hatch_pt = palette.HATCH_LINE_PX * _POINTS_PER_PX
    settings: Any = {"pdf.fonttype": 42, "font.family": ["DejaVu Sans"], "hatch.linewidth": hatch_pt}
    figure.set_dpi(2 * _PX_PER_INCH)
    with rc_context(settings), writing(path, HpgoError) as file:
        if path.suffix.lower() == ".pdf":
            figure.savefig(file, format="pdf", metadata={"Title": scene.title, "CreationDate": None})
        else:
            _png(figure, file, scene.title)


def _png(figure: Figure, file: BinaryIO, title: str) -> None:
    """Write the pixels without an alpha channel, and with less compression than `savefig`.

    Compressing patterns takes half of the time. Level 3 halves this time, for a file that is 7 % larger.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    about = PngInfo()
    about.add_text("Title", title)
    dots = (2 * _PX_PER_INCH,) * 2
    pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
    Image.fromarray(pixels).save(file, format="png", pnginfo=about, dpi=dots, compress_level=3)


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


def _shape(axes: Axes, item: Boxes | Steps, theme: int, order: int, options: DrawOptions) -> None:
    """Draw all boxes as one path. matplotlib then draws a pattern once instead of once per box."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    look = palette.look(item.style)
    if isinstance(item, Boxes):
        left, top, right, bottom = item.x, item.y, item.x + item.width, item.y + item.height
        corners = np.stack([left, top, right, top, right, bottom, left, bottom, left, top], axis=1).reshape(-1, 5, 2)
    else:
        tops = np.concatenate(([item.base], np.repeat(item.tops, 2), [item.base]))
        outline = np.column_stack((np.repeat(item.edges, 2), tops))
        corners = np.concatenate((outline, outline[:1]))[None]
    codes = np.full(corners.shape[:2], Outline.LINETO, Outline.code_type)
    codes[:, 0], codes[:, -1] = Outline.MOVETO, Outline.CLOSEPOLY
    edge: Any = look.stroke[theme] if look.stroke else "none"
    width = look.stroke_px * _POINTS_PER_PX
    outline_of = Outline(corners.reshape(-1, 2), codes.ravel())
    if look.hatch and look.fill:
        # A hatched patch can't have an edge of another color, so draw the edge separately.
        if look.stroke:
            axes.add_artist(PathPatch(outline_of, fill=False, edgecolor=edge, linewidth=width, zorder=order + 0.5))
        # matplotlib draws hatches in the color of the edge.
        opacity = palette.PRINT_OPACITY if options.hatch else palette.HATCH_OPACITY
        edge, width = (palette.ink_on(look.fill[theme]), opacity), 0.0
    patch = PathPatch(
        outline_of,
        facecolor=look.fill[theme] if look.fill else "none",
        edgecolor=edge,
        linewidth=width,
        linestyle=(0, look.dash_px) if look.dash_px else "solid",
        zorder=order,
        # Edges of staircases are shared by neighboring areas. Antialiasing would show a seam between them.
        antialiased=isinstance(item, Boxes),
        hatch=look.hatch * _HATCH_REPEATS[look.hatch] if look.hatch else None,
    )
    axes.add_artist(patch)


def _words(axes: Axes, words: Words, theme: int, order: int) -> None:
    font = palette.FONTS[words.font]
    align = {"start": "left", "middle": "center", "end": "right"}[font.anchor]
    size_px = words.size_px or font.size_px
    for x, y, text in zip(words.x, words.y, words.texts, strict=True):
        axes.text(
            x, y, text, ha=align, va="baseline", color=palette.ink(words.font, words.on, theme),
            fontsize=size_px * _POINTS_PER_PX, fontweight="bold" if font.bold else "normal", zorder=order,
            parse_math=False,  # a `$` in a name is no formula
        )  # fmt: skip
