"""Colours and line styles, once for all formats.

Forward is blue, backward orange, input gradient teal, weight gradient green, as the field's papers have it; the four
differ in lightness as well as hue, so that they stay apart for colour-blind readers and on grey prints. Later chunks of
a rank are lighter. Bubbles are pale and shaded by what the rank waits for.
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
KIND_COLOURS = {"F": "#3b75c4", "B": "#f5a040", "I": "#7fd6d0", "W": "#2b6a1f"}

CAUSE_NAMES = {
    "fill": "waits for the pipeline to fill",
    "drain": "done, the others drain",
    "dependency": "waits for a neighbour's result",
    "communication": "waits for a transfer",
    "imbalance": "waits for a slower stage",
}

INK = ("#1b1f24", "#e6e9ed")
"""Text and lines: in light, in dark."""
FAINT_INK = ("#5b6570", "#9aa4af")
PAPER = ("#ffffff", "#14181d")


@dataclass(frozen=True, slots=True)
class Look:
    """How one class of marks is painted; each colour is a pair (light, dark)."""

    fill: tuple[str, str] | None = None
    stroke: tuple[str, str] | None = None
    stroke_px: float = 0.0
    dash_px: tuple[float, float] | None = None
    hatch: str = ""
    """Lines over the fill in print: `/`, `\\`, `.` or nothing."""


@dataclass(frozen=True, slots=True)
class Font:
    """How one class of text is set."""

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

_HATCHES = {"F": "", "B": "/", "I": ".", "W": "\\"}

_LOOKS = {
    "idle-fill": Look(fill=("#f0f2f5", "#20262d")),
    "idle-drain": Look(fill=("#d3d9e0", "#39424c")),
    "idle-dependency": Look(fill=("#f8e9a1", "#57491a")),
    "idle-communication": Look(fill=("#efaeca", "#83305f")),
    "idle-imbalance": Look(fill=("#b7a1ea", "#4f3f9e")),
    "sync": Look(fill=("#8a4fbf", "#a878d6")),
    "grid": Look(stroke=("#c9d0d7", "#3a424b"), stroke_px=0.6),
    "axis": Look(stroke=INK, stroke_px=1.0),
    "end": Look(stroke=INK, stroke_px=1.2, dash_px=(3, 2)),
    "critical": Look(stroke=("#c4113c", "#ff6b88"), stroke_px=1.8),
    "activation": Look(stroke=("#3b75c4", "#7fb0f2"), stroke_px=0.9),
    "gradient": Look(stroke=("#b35c00", "#f5a040"), stroke_px=0.9),
    "lane-activation": Look(fill=("#3b75c4", "#7fb0f2")),
    "lane-gradient": Look(fill=("#b35c00", "#f5a040")),
    "memory": Look(fill=("#cfd6de", "#3d4650"), stroke=FAINT_INK, stroke_px=0.8),
    "cap": Look(stroke=("#c4113c", "#ff6b88"), stroke_px=1.0, dash_px=(5, 3)),
    "compute": Look(fill=("#3b75c4", "#3b75c4")),
    "send": Look(fill=("#7fd6d0", "#5aaea8")),
    "slowest": Look(fill=("#c4113c", "#ff6b88")),
    "free": Look(fill=("#e6eaee", "#2a323a")),
    "held": Look(fill=("#8d99a6", "#9aa4af")),
    "rule": Look(stroke=("#c9d0d7", "#3a424b"), stroke_px=0.8),
    "frame-tensor": Look(stroke=INK, stroke_px=1.8),
    "frame-context": Look(stroke=("#c4113c", "#ff6b88"), stroke_px=1.4, dash_px=(4, 2)),
    "frame-expert": Look(stroke=("#0b5e8a", "#9fd8ff"), stroke_px=1.4, dash_px=(1.5, 1.5)),
    "same-weights": Look(fill=INK),
    "row": Look(fill=PAPER),
    "unused": Look(fill=("#e6eaee", "#2a323a")),
    "near": Look(fill=("#e3ecf8", "#1d2d42")),
    "front": Look(stroke=("#3b75c4", "#7fb0f2"), stroke_px=1.4),
}
STAGE_COLOURS = ("#56b4e9", "#e69f00", "#35b88f", "#f0e442", "#d99bbd", "#7f9fd6", "#e8814b", "#b9c0c8")
"""Of groups of GPUs with different layers; a number in them tells those apart that share a colour."""
_LOOKS |= {
    f"stage-{at}": Look(fill=(colour, colour), stroke=PAPER, stroke_px=0.6) for at, colour in enumerate(STAGE_COLOURS)
}


def look(style: str, chunks: int = 1) -> Look:
    """How marks of class `style` are painted: an entry of the table, or kind and chunk such as `F0` or `W3`."""
    if style in _LOOKS:
        return _LOOKS[style]
    colour = shade(style[0], int(style[1:]), chunks)
    return Look(fill=(colour, colour), stroke=PAPER, stroke_px=0.6, hatch=_HATCHES[style[0]])


def shade(kind: str, chunk: int, chunks: int) -> str:
    """Colour of `kind` ("F", "B", "I" or "W") for one chunk of a rank: the later, the lighter, up to 45 % white."""
    white = 0.45 * chunk / max(chunks - 1, 1)
    mixed = [round(value + (255 - value) * white) for value in _rgb(KIND_COLOURS[kind])]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour` (by WCAG relative luminance)."""
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in _rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
