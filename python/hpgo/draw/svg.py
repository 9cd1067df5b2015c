"""A scene as SVG: text stays text, the same scene gives the same bytes, and colours follow the reader's dark mode."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from hpgo.draw import palette
from hpgo.draw.scene import Boxes, Line, Scene, Steps, Words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.draw.options import Options

_FONT_FAMILY = "'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_HATCHES = {
    "/": '<path d="M0 6L6 0M-1 1L1 -1M5 7L7 5"/>',
    "\\": '<path d="M0 0L6 6M-1 5L1 7M5 -1L7 1"/>',
    ".": '<circle cx="2" cy="2" r="0.8"/><circle cx="5" cy="5" r="0.8"/>',
}


def svg(scene: Scene, options: Options) -> str:
    """The picture as one SVG document."""
    styles = list(dict.fromkeys(item.style for item in scene.items if not isinstance(item, Words)))
    fonts = list(dict.fromkeys(item.font for item in scene.items if isinstance(item, Words)))
    width, height = _n(scene.width_px), _n(scene.height_px)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        ' role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(scene.title)}</title>',
        f'<desc id="desc">{escape(scene.description)}</desc>',
        f"<style>\n{_stylesheet(styles, fonts, scene.chunks, options)}\n</style>",
        f"<defs>{_definitions(styles)}</defs>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    # Neighbours of one style share a group; staircases of one style even a path, as there may be many.
    number = 0
    for (shape, style), group in groupby(scene.items, lambda item: (type(item), _style(item))):
        items = list(group)
        if shape is Boxes:
            rects = "\n".join(_rects(item) for item in items if isinstance(item, Boxes))
            if palette.look(style, scene.chunks).hatch:
                number += 1
                parts.append(f'<g class="{style}"><g id="hatched-{number}">\n{rects}\n</g></g>')
                parts.append(f'<use href="#hatched-{number}" class="hatch" fill="url(#hatch-{style[0]})"/>')
            else:
                parts.append(f'<g class="{style}">\n{rects}\n</g>')
        elif shape is Steps:
            staircases = "".join(_staircase(item) for item in items if isinstance(item, Steps))
            parts.append(f'<path class="{style}" d="{staircases}"/>')
        elif shape is Line:
            lines = "\n".join(_line(item) for item in items if isinstance(item, Line))
            parts.append(f'<g class="{style}">\n{lines}\n</g>')
        else:
            parts.extend(_words(item) for item in items if isinstance(item, Words))
    return "\n".join([*parts, "</svg>", ""])


def _style(item: Boxes | Steps | Line | Words) -> str:
    return item.font if isinstance(item, Words) else item.style


def _rects(boxes: Boxes) -> str:
    ends = [f"><title>{escape(tip)}</title></rect>" for tip in boxes.tips] or ["/>"] * len(boxes.x)
    if boxes.marks:
        marks = ("".join(f' data-{name}="{number}"' for name, number in mark.items()) for mark in boxes.marks)
        ends = [f"{mark}{end}" for mark, end in zip(marks, ends, strict=True)]
    return "\n".join(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{end}'
        for x, y, width, height, end in zip(
            _rounded(boxes.x), _rounded(boxes.y), _rounded(boxes.width), _rounded(boxes.height), ends, strict=True
        )
    )


def _staircase(steps: Steps) -> str:
    """One closed path; steps of equal height are one."""
    tops = np.round(steps.tops, 1)
    turns = np.flatnonzero(np.append(True, tops[1:] != tops[:-1]))
    edges = _rounded(steps.edges[turns])
    base = _n(steps.base)
    ends = [*edges[1:], round(float(steps.edges[-1]), 2)]
    stairs = "".join(f"V{top:g}H{end:g}" for top, end in zip(tops[turns].tolist(), ends, strict=True))
    return f"M{_n(edges[0])} {base}{stairs}V{base}Z"


def _line(line: Line) -> str:
    d = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in line.points)
    head = f' marker-end="url(#head-{line.style})"' if line.arrow else ""
    return f'<path d="{d}"{head}/>'


def _words(words: Words) -> str:
    attributes = f' fill="{words.colour}"' if words.colour else ""
    if words.size_px is not None:
        attributes += f' font-size="{_n(words.size_px)}"'
    texts = "\n".join(
        f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'
        for x, y, text in zip(_rounded(words.x), _rounded(words.y), words.texts, strict=True)
    )
    # A class would win over the attributes, so numbers in boxes have one that sets the anchor alone.
    name = "number" if words.colour else f"t-{words.font}"
    return f'<g class="{name}"{attributes}>\n{texts}\n</g>'


def _stylesheet(styles: list[str], fonts: list[str], chunks: int, options: Options) -> str:
    light = 1 if options.theme == "dark" else 0
    rules = [
        f"text{{font-family:{_FONT_FAMILY}}}",
        *(f".{name}{{{_look_css(palette.look(name, chunks))}}}" for name in styles),
        ".number{text-anchor:middle}",
        *(f".t-{name}{{{_font_css(palette.FONTS[name])}}}" for name in fonts),
        *_coloured(styles, fonts, chunks, light),
    ]
    if options.theme == "auto":
        rules += ["@media (prefers-color-scheme:dark){", *_coloured(styles, fonts, chunks, 1), "}"]
    if options.hatch:
        rules.append(".hatch{opacity:.55}")
    else:
        rules += [".hatch{display:none;opacity:.55}", "@media print{.hatch{display:inline}}"]
    return "\n".join(rules)


def _look_css(look: palette.Look) -> str:
    css = "" if look.fill else "fill:none;"
    if look.stroke:
        css += f"stroke-width:{_n(look.stroke_px)};"
    if look.dash_px:
        css += f"stroke-dasharray:{_n(look.dash_px[0])} {_n(look.dash_px[1])};"
    return css.rstrip(";")


def _font_css(font: palette.Font) -> str:
    weight = ";font-weight:bold" if font.bold else ""
    return f"font-size:{_n(font.size_px)}px;text-anchor:{font.anchor}{weight}"


def _coloured(styles: list[str], fonts: list[str], chunks: int, theme: int) -> list[str]:
    """The rules that differ between light (0) and dark (1)."""
    rules = [f".paper{{fill:{palette.PAPER[theme]}}}"]
    for name in styles:
        look = palette.look(name, chunks)
        css = [f"fill:{look.fill[theme]}"] if look.fill else []
        css += [f"stroke:{look.stroke[theme]}"] if look.stroke else []
        rules.append(f".{name}{{{';'.join(css)}}}")
        if name in {"activation", "gradient"} and look.stroke:
            rules.append(f"#head-{name} path{{fill:{look.stroke[theme]}}}")
    rules += [f".t-{name}{{fill:{palette.FONTS[name].colour[theme]}}}" for name in fonts]
    return rules


def _definitions(styles: list[str]) -> str:
    hatches = {name[0]: look.hatch for name in styles if (look := palette.look(name)).hatch}
    patterns = [
        f'<pattern id="hatch-{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<g stroke="#000" stroke-width="0.8">{_HATCHES[hatch]}</g></pattern>'
        for kind, hatch in hatches.items()
    ]
    heads = [
        f'<marker id="head-{name}" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="5" markerHeight="5" '
        'orient="auto">'
        '<path d="M0 0L6 3L0 6Z"/></marker>'
        for name in styles
        if name in {"activation", "gradient"}
    ]
    return "".join(patterns + heads)


def _rounded(values: Iterable[float]) -> list[float]:
    rounded: list[float] = np.round(np.asarray(values, np.float64), 2).tolist()
    return rounded


def _n(value: float) -> str:
    return f"{round(float(value), 2):g}"
