r"""A scene as TikZ. `\input` it in a document that loads `tikz`; it scales to the line width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.quoting import in_tex
from hpgo.draw import palette
from hpgo.draw.scene import Boxes, Line, Scene, Steps, Words

if TYPE_CHECKING:
    from hpgo.draw.options import DrawOptions

_ANCHORS = {"start": "base west", "middle": "base", "end": "base east"}
_POINTS_PER_PX = 0.75
_PATTERNS = {
    "/": "north east lines",
    "\\": "north west lines",
    ".": "dots",
    "-": "horizontal lines",
    "|": "vertical lines",
    "x": "crosshatch",
    "o": "crosshatch dots",
    "+": "grid",
}
"""Names of the patterns in TikZ's library `patterns`."""


def tikz(scene: Scene, options: DrawOptions) -> str:
    r"""Return the picture as a `tikzpicture` in a `\resizebox`, without a preamble."""
    theme = 1 if options.theme == "dark" else 0
    styles = dict.fromkeys(item.style for item in scene.items if not isinstance(item, Words))
    lines = [
        f"% {scene.title}",
        r"% needs \usepackage{tikz}" + (r" \usetikzlibrary{patterns}" if options.hatch else ""),
    ]
    for style in styles:
        look = palette.look(style)
        lines += [_colour(f"hpgo-{style}-fill", look.fill[theme])] if look.fill else []
        lines += [_colour(f"hpgo-{style}-line", look.stroke[theme])] if look.stroke else []
    lines += [
        r"\resizebox{\linewidth}{!}{%",
        r"\begin{tikzpicture}[x=0.75pt, y=-0.75pt, inner sep=0pt, font=\sffamily]",
        rf"\path[use as bounding box] (0, 0) rectangle ({_n(scene.width_px)}, {_n(scene.height_px)});",
    ]
    for item in scene.items:
        if isinstance(item, Words):
            lines += _words(item, theme)
        else:
            lines += _marks(item, options.hatch)
    return "\n".join([*lines, r"\end{tikzpicture}}", ""])


def _marks(item: Boxes | Steps | Line, hatch: bool) -> list[str]:
    look = palette.look(item.style)
    keys = [f"fill=hpgo-{item.style}-fill"] if look.fill else []
    if look.stroke:
        keys += [f"draw=hpgo-{item.style}-line", f"line width={_n(look.stroke_px * _POINTS_PER_PX)}pt"]
    if look.dash_px:
        lengths = zip(("on", "off") * len(look.dash_px), look.dash_px, strict=False)
        keys += [f"dash pattern={' '.join(f'{what} {_n(px)}pt' for what, px in lengths)}"]
    if isinstance(item, Line):
        if item.arrow:
            keys += ["->"]
        return [rf"\draw[{', '.join(keys)}] {' -- '.join(f'({_n(x)}, {_n(y)})' for x, y in item.points)};"]
    if isinstance(item, Steps):
        xs, ys = np.repeat(item.edges, 2), np.concatenate(([item.base], np.repeat(item.tops, 2), [item.base]))
        turns = np.append(True, (np.diff(xs) != 0) | (np.abs(np.diff(ys)) > 0.05))
        outline = " -- ".join(
            f"({_n(x)}, {_n(y)})" for x, y in zip(xs[turns].tolist(), ys[turns].tolist(), strict=True)
        )
        return [rf"\path[{', '.join(keys)}] {outline} -- cycle;"]
    rectangles = [
        f"({_n(x)}, {_n(y)}) rectangle +({_n(width)}, {_n(height)})"
        for x, y, width, height in zip(
            item.x.tolist(), item.y.tolist(), item.width.tolist(), item.height.tolist(), strict=True
        )
    ]
    # Papers are often printed in gray, so `hatch` draws the patterns over the fills.
    paths = [rf"\path[{', '.join(keys)}] {rectangle};" for rectangle in rectangles]
    if hatch and look.hatch:
        paths += [rf"\path[pattern={_PATTERNS[look.hatch]}] {rectangle};" for rectangle in rectangles]
    return paths


def _words(words: Words, theme: int) -> list[str]:
    font = palette.FONTS[words.font]
    red, green, blue = (int(palette.ink(words.font, words.on, theme)[i : i + 2], 16) for i in (1, 3, 5))
    size_pt = (words.size_px or font.size_px) * _POINTS_PER_PX
    look = rf"\fontsize{{{_n(size_pt)}}}{{{_n(size_pt)}}}\selectfont" + (r"\bfseries" if font.bold else "")
    keys = (
        f"anchor={_ANCHORS[font.anchor]}, text={{rgb,255:red,{red};green,{green};blue,{blue}}}, font=\\sffamily{look}"
    )
    return [
        rf"\node[{keys}] at ({_n(x)}, {_n(y)}) {{{in_tex(text)}}};"
        for x, y, text in zip(words.x, words.y, words.texts, strict=True)
    ]


def _colour(name: str, colour: str) -> str:
    return rf"\definecolor{{{name}}}{{HTML}}{{{colour[1:].upper()}}}"


def _n(value: float) -> str:
    return f"{round(float(value), 2):g}"
