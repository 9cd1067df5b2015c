"""A scene as SVG. Text stays text, equal scenes give equal bytes, and colors follow the reader's dark mode."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from hpgo.draw import palette
from hpgo.draw.scene import Boxes, Line, Scene, Steps, Words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.draw.options import DrawOptions

_FONT_FAMILY = "'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def svg(scene: Scene, options: DrawOptions) -> str:
    """Return the picture as one SVG document."""
    styles = list(dict.fromkeys(item.style for item in scene.items if not isinstance(item, Words)))
    fonts = list(dict.fromkeys(item.font for item in scene.items if isinstance(item, Words)))
    grounds = list(dict.fromkeys(item.on for item in scene.items if isinstance(item, Words) and item.on))
    width, height = _n(scene.width_px), _n(scene.height_px)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        ' role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(scene.title)}</title>',
        f'<desc id="desc">{escape(scene.description)}</desc>',
        f"<style>\n{_stylesheet(styles, fonts, grounds, options)}\n</style>",
        f"<defs>{_definitions(styles)}</defs>",
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    # Adjacent items of one style share a group, and staircases of one style share a path. This keeps files with many
    # items small.
    for (shape, style), group in groupby(scene.items, lambda item: (type(item), _style(item))):
        items = list(group)
        if shape is Boxes:
            drawn = _shape if options.linked else _rects
            boxes = "\n".join(drawn(item) for item in items if isinstance(item, Boxes))
            parts.append(f'<g class="{style}">\n{boxes}\n</g>')
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
    return "\n".join(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{end}'
        for (x, y, width, height), end in zip(_corners(boxes), ends, strict=True)
    )


def _shape(boxes: Boxes) -> str:
    """Return one path for all boxes. A browser lays out and highlights it as fast as a single box."""
    d = "".join(f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z" for x, y, width, height in _corners(boxes))
    return f'<path d="{d}"{_mark(boxes)}/>'


def _mark(item: Boxes | Words) -> str:
    return "".join(f' data-{name}="{text}"' for name, text in item.mark.items())


def _corners(boxes: Boxes) -> Iterator[tuple[float, float, float, float]]:
    """Iterate over left, top, width and height of the boxes."""
    return zip(*map(_rounded, (boxes.x, boxes.y, boxes.width, boxes.height)), strict=True)


def _staircase(steps: Steps) -> str:
    """Return one closed path. Consecutive steps of equal height become one."""
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
    size = "" if words.size_px is None else f' font-size="{_n(words.size_px)}"'
    texts = "\n".join(
        f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'
        for x, y, text in zip(_rounded(words.x), _rounded(words.y), words.texts, strict=True)
    )
    # The font size of a class would override the attribute, so numbers in boxes have a class without a size.
    name = f"number on-{words.on}" if words.on else f"t-{words.font}"
    return f'<g class="{name}"{size}{_mark(words)}>\n{texts}\n</g>'


def _stylesheet(styles: list[str], fonts: list[str], grounds: list[str], options: DrawOptions) -> str:
    light = 1 if options.theme == "dark" else 0
    rules = [
        f"text{{font-family:{_FONT_FAMILY}}}",
        *(f".{name}{{{_look_css(name, palette.look(name))}}}" for name in styles),
        *([".number{text-anchor:middle;paint-order:stroke;stroke-linejoin:round;stroke-width:0}"] if grounds else []),
        *(f".t-{name}{{{_font_css(palette.FONTS[name])}}}" for name in fonts),
        *_coloured(styles, fonts, grounds, light),
    ]
    if options.theme == "auto":
        rules += ["@media (prefers-color-scheme:dark){", *_coloured(styles, fonts, grounds, 1), "}"]
    # An outline in the box's color keeps strong pattern lines away from numbers.
    clear = f".number{{stroke-width:{palette.CLEAR_PX:g}px}}" if grounds else ""
    strong = f".hatch{{opacity:{palette.PRINT_OPACITY:g}}}{clear}"
    rules += (
        [strong] if options.hatch else [f".hatch{{opacity:{palette.HATCH_OPACITY:g}}}", f"@media print{{{strong}}}"]
    )
    return "\n".join(rules)


def _look_css(name: str, look: palette.Look) -> str:
    css = "" if look.fill else "fill:none;"
    if look.hatch:
        css += f"fill:url(#hatch-{name});"
    if look.stroke:
        css += f"stroke-width:{_n(look.stroke_px)};"
    if look.dash_px:
        css += f"stroke-dasharray:{' '.join(map(_n, look.dash_px))};"
    return css.rstrip(";")


def _font_css(font: palette.Font) -> str:
    weight = ";font-weight:bold" if font.bold else ""
    return f"font-size:{_n(font.size_px)}px;text-anchor:{font.anchor}{weight}"


def _coloured(styles: list[str], fonts: list[str], grounds: list[str], theme: int) -> list[str]:
    """Return the CSS rules that differ between light (0) and dark (1) mode."""
    rules = [f".paper{{fill:{palette.PAPER[theme]}}}"]
    for name in styles:
        look = palette.look(name)
        css = [f"fill:{look.fill[theme]}"] if look.fill and not look.hatch else []
        css += [f"stroke:{look.stroke[theme]}"] if look.stroke else []
        if css:
            rules.append(f".{name}{{{';'.join(css)}}}")
        if look.fill and look.hatch:
            fill = look.fill[theme]
            rules.append(f".{name}-fill{{fill:{fill}}}.{name}-lines{{stroke:{palette.ink_on(fill)}}}")
        if name in {"activation", "gradient"} and look.stroke:
            rules.append(f"#head-{name} path{{fill:{look.stroke[theme]}}}")
    rules += [f".t-{name}{{fill:{palette.FONTS[name].colour[theme]}}}" for name in fonts]
    for name in grounds:
        ground = palette.look(name).fill
        if ground:
            rules.append(f".on-{name}{{fill:{palette.ink_on(ground[theme])};stroke:{ground[theme]}}}")
    return rules


def _definitions(styles: list[str]) -> str:
    side, line = _n(palette.HATCH_PX), _n(palette.HATCH_LINE_PX)
    patterns = [
        f'<pattern id="hatch-{name}" width="{side}" height="{side}" patternUnits="userSpaceOnUse">'
        f'<rect class="{name}-fill" width="{side}" height="{side}"/><path class="hatch {name}-lines" fill="none" '
        f'stroke-width="{line}" d="{palette.HATCHES[hatch]}"/></pattern>'
        for name in styles
        if (hatch := palette.look(name).hatch)
    ]
    heads = [
        f'<marker id="head-{name}" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="5" markerHeight="5" '
        'orient="auto">'
        '<path d="M0 0L6 3L0 6Z"/></marker>'
        for name in styles
        if name in {"activation", "gradient"}
    ]
    # SVG markers don't inherit the color of their line, so each style needs its own arrow head.
    return "".join(patterns + heads)


def _rounded(values: Iterable[float]) -> list[float]:
    # Two decimals of a pixel are invisible, and keep files small and equal on all machines.
    rounded: list[float] = np.round(np.asarray(values, np.float64), 2).tolist()
    return rounded


def _n(value: float) -> str:
    return f"{round(float(value), 2):g}"
