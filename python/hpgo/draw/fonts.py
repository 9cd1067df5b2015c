"""Text widths in DejaVu Sans, the widest of the fonts that readers may have, so that texts never overlap.

PNG and PDF use this font. Browsers use Helvetica or Arial if installed, which are slightly narrower.
"""

from __future__ import annotations

from unicodedata import east_asian_width

# Advance widths of the characters from the space to `~`, in 0.1 % of the font size. A table avoids loading matplotlib.
_PLAIN = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636, 636,
    636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863,
    748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635,
    615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636,
    337, 636, 838,
)  # fmt: skip
_BOLD = (
    348, 456, 521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415, 380, 365, 696, 696, 696, 696, 696, 696, 696,
    696, 696, 696, 400, 400, 838, 838, 838, 580, 1000, 774, 762, 734, 830, 683, 683, 821, 837, 372, 372, 775, 637, 995,
    837, 850, 733, 850, 770, 720, 682, 812, 774, 1103, 771, 724, 725, 457, 365, 457, 838, 500, 500, 675, 716, 593, 716,
    678, 435, 716, 712, 343, 343, 665, 343, 1042, 712, 687, 716, 716, 493, 595, 478, 712, 652, 924, 645, 652, 582, 712,
    365, 712, 838,
)  # fmt: skip
_OTHERS = {"·": 380, "–": 500, "…": 1000, "×": 838}
_USUAL, _WIDE = 720, 1050
"""Assumed widths of other letters, in 0.1 % of the font size: of alphabets, and of scripts with square characters."""
DIGIT_EM = 0.636


def text_px(text: str, size_px: float, *, bold: bool = False) -> float:
    """Return the width of `text` in pixels.

    >>> round(text_px("rank 12", 11), 1), round(text_px("rank 12", 11, bold=True), 1)
    (42.1, 47.1)
    """
    table = _BOLD if bold else _PLAIN
    width = 0
    for letter in text:
        at = ord(letter) - 32
        if 0 <= at < len(table):
            width += table[at]
        else:
            width += _OTHERS.get(letter) or (_WIDE if east_asian_width(letter) in "WF" else _USUAL)
    return width * size_px / 1000


def fitted(text: str, size_px: float, room_px: float, *, bold: bool = False) -> str:
    """Return `text` shortened to at most `room_px` pixels.

    Parts in parentheses are dropped first, from the end. A text that is still too long is cut and ends in `…`.

    >>> [fitted("stage 0 (8 × V100, encoder 0–28)", 11, room_px) for room_px in (120, 60, 30)]
    ['stage 0 (8 × V100)', 'stage 0', 'sta…']
    """
    while text_px(text, size_px, bold=bold) > room_px and text.endswith(")"):
        name, _, details = text[:-1].partition(" (")
        details, _, _ = details.rpartition(", ")
        text = f"{name} ({details})" if details else name
    if text_px(text, size_px, bold=bold) <= room_px:
        return text
    while text and text_px(f"{text}…", size_px, bold=bold) > room_px:
        text = text[:-1]
    return f"{text.rstrip()}…"
