"""Colors, patterns and line styles of all picture formats.

Forward is blue, backward orange, input gradient teal and weight gradient green, as in publications. Bubbles are paler,
and their color shows what the rank waits for. Any two colors that can touch are at least 10 apart by CIEDE2000, for
normal vision and for each kind of color blindness. No two marks share both pattern and edge, so gray prints distinguish
them too. A color has the same meaning in every picture.
"""

from __future__ import annotations

from dataclasses import dataclass

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "F‖B": "forward and backward, fused",
}
KIND_COLOURS = {"F": "#3b75c4", "B": "#f5a040", "I": "#5db69f", "W": "#2b6a1f"}

CAUSE_NAMES = {
    "fill": "waits for the pipeline to fill",
    "drain": "done, other ranks drain",
    "dependency": "waits for a neighbor's result",
    "communication": "waits for a transfer",
    "imbalance": "waits for a slower stage",
}

HATCH_PX, HATCH_LINE_PX = 6.0, 0.8
"""Side of the tile that a pattern repeats, and the width of its lines, in pixels."""
HATCHES = {
    "/": "M0 6L6 0M-1 1L1 -1M5 7L7 5",
    "\\": "M0 0L6 6M-1 5L1 7M5 -1L7 1",
    ".": "M1 1.5H2M4 4.5H5",
    "-": "M0 3H6",
    "|": "M3 0V6",
    "x": "M0 0L6 6M0 6L6 0",
    "o": "M4.5 3A1.5 1.5 0 1 1 1.5 3A1.5 1.5 0 1 1 4.5 3",
    "+": "M3 0V6M0 3H6",
}
"""Patterns as the path of one tile, in SVG syntax, which HTML canvases read too."""
HATCH_OPACITY, PRINT_OPACITY = 0.26, 0.75
"""Opacity of a pattern's lines over its fill: on a screen, and in print or with `hatch`."""

CLEAR_PX = 3.0
"""Twice the distance between strong pattern lines and numbers, in pixels. Numbers have an outline of this width in the
color of their box."""

INK = ("#1b1f24", "#e6e9ed")
"""Color of text and lines: in light mode, in dark mode."""
FAINT_INK = ("#5b6570", "#9aa4af")
PAPER = ("#ffffff", "#14181d")


@dataclass(frozen=True, slots=True)
class Look:
    """Style of one class of marks. Each color is a pair (light mode, dark mode)."""

    fill: tuple[str, str] | None = None
    stroke: tuple[str, str] | None = None
    stroke_px: float = 0.0
    dash_px: tuple[float, ...] | None = None
    hatch: str = ""
    """Pattern over the fill: a key of `HATCHES`, or empty."""


@dataclass(frozen=True, slots=True)
class Font:
    """Style of one class of text."""

    size_px: float
    colour: tuple[str, str] = INK
    bold: bool = False
    anchor: str = "start"


FONTS = {
    "title": Font(16, bold=True),
    "heading": Font(13, bold=True),
    "fact": Font(11.5, FAINT_INK),
    "rank": Font(11, anchor="end"),
    "tick": Font(11, anchor="middle"),
    "end": Font(11, anchor="start", bold=True),
    "legend": Font(11.5),
    "cell": Font(11.5, anchor="end"),
    "cellhead": Font(11.5, FAINT_INK, anchor="end"),
    "small": Font(9, FAINT_INK),
    "note": Font(11, FAINT_INK),
}

_RED = ("#de2351", "#ff5770")

_LOOKS = {
    "F": Look(fill=(KIND_COLOURS["F"],) * 2),
    "B": Look(fill=(KIND_COLOURS["B"],) * 2, hatch="/"),
    "I": Look(fill=(KIND_COLOURS["I"],) * 2, hatch="."),
    "W": Look(fill=(KIND_COLOURS["W"],) * 2, hatch="\\"),
    "virtual_stage": Look(fill=INK),
    "idle-fill": Look(fill=("#cacccf", "#383c42"), hatch="-"),
    "idle-drain": Look(fill=("#8895a7", "#5a5d61"), hatch="o"),
    "idle-dependency": Look(fill=("#f4e29a", "#443d1d"), hatch="|"),
    "idle-communication": Look(fill=("#ffa7ec", "#9c408b"), hatch="x"),
    "idle-imbalance": Look(fill=("#b688ed", "#462571"), hatch="+"),
    "sync": Look(fill=("#6c21b5", "#ca8df4"), stroke=INK, stroke_px=0.6),
    "grid": Look(stroke=("#c9d0d7", "#3a424b"), stroke_px=0.6),
    "axis": Look(stroke=INK, stroke_px=1.0),
    "end": Look(stroke=INK, stroke_px=1.2, dash_px=(3, 2)),
    "critical": Look(stroke=_RED, stroke_px=1.8),
    "activation": Look(stroke=("#29305f", "#b4ccf0"), stroke_px=1.0),
    "gradient": Look(stroke=("#593227", "#e3cf9e"), stroke_px=1.0, dash_px=(4, 2)),
    "lane-activation": Look(fill=("#29305f", "#b4ccf0")),
    "lane-gradient": Look(fill=("#593227", "#e3cf9e"), hatch="/"),
    "weights": Look(fill=("#46618c", "#8fb0e6")),
    "gradients": Look(fill=("#7d9ac6", "#5f80b5"), hatch="/"),
    "optimizer": Look(fill=("#b5c6e0", "#3b5278"), hatch="."),
    "activations": Look(fill=("#b35c00", "#f5a040"), hatch="\\"),
    "buffers": Look(fill=("#f2c48d", "#8a5a22"), hatch="x"),
    "waits": Look(fill=("#cbd3dc", "#343d47"), hatch="-"),
    "memory": Look(fill=("#636a71", "#7e868f"), stroke=INK, stroke_px=0.5),
    "cap": Look(stroke=INK, stroke_px=1.0, dash_px=(5, 3)),
    "free": Look(fill=("#e6eaee", "#2a323a")),
    "rule": Look(stroke=("#c9d0d7", "#3a424b"), stroke_px=0.8),
    # These lie over cells, which have the same light colors in dark mode. So both modes use the dark ink.
    "frame-tensor": Look(stroke=(INK[0],) * 2, stroke_px=1.8),
    "frame-context": Look(stroke=(_RED[0],) * 2, stroke_px=1.4, dash_px=(4, 2)),
    "frame-expert": Look(stroke=("#004c73",) * 2, stroke_px=1.4, dash_px=(1.5, 1.5)),
    "same-weights": Look(fill=(INK[0],) * 2),
    "row": Look(fill=PAPER),
    "near": Look(fill=("#e3ecf8", "#1d2d42")),
    "rate": Look(fill=("#29305f", "#b4ccf0")),
}
STAGE_COLOURS = ("#4eb4f9", "#cf7b25", "#55a67c", "#d5da79", "#d381bd", "#c2d4ff", "#f1c0ae", "#c0c4c6")
"""Colors of groups of GPUs with different layers. Groups beyond the last color repeat it and are distinguished by a
number."""
_STAGE_HATCHES = ("", "/", ".", "\\", "-", "|", "o", "x")
_LOOKS |= {
    f"stage-{at}": Look(fill=(colour, colour), stroke=PAPER, stroke_px=0.6, hatch=hatch)
    for at, (colour, hatch) in enumerate(zip(STAGE_COLOURS, _STAGE_HATCHES, strict=True))
}

_CURVES = ("#0e3f9d", "#41a767", "#86531f", "#56cbf1", "#692c57", "#8d7c0d", "#8071c0")
# Dashes distinguish curves in gray prints.
_DASHES = (None, (8.0, 3.0), (2.0, 2.0), (8.0, 2.0, 2.0, 2.0), (5.0, 5.0), (12.0, 3.0), (1.5, 4.0))
CURVES = len(_CURVES)
"""Largest number of curves that one set of axes distinguishes, by color and dashes."""
_LOOKS |= {
    f"curve-{at}": Look(stroke=(colour, STAGE_COLOURS[at]), stroke_px=1.8, dash_px=_DASHES[at])
    for at, colour in enumerate(_CURVES)
}
_LOOKS |= {f"mark-{at}": Look(fill=(colour, STAGE_COLOURS[at])) for at, colour in enumerate(_CURVES)}


def look(style: str) -> Look:
    """Return the style of marks of class `style`."""
    return _LOOKS[style]


def ink(font: str, on: str, theme: int) -> str:
    """Return the color of text in `font`, or of text on boxes of style `on`, in light (0) or dark (1) mode."""
    fill = _LOOKS[on].fill if on else None
    return ink_on(fill[theme]) if fill else FONTS[font].colour[theme]


def ink_on(colour: str) -> str:
    """Return black or white, the one with more contrast on `colour` by WCAG relative luminance."""
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in _rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
