"""Pictures of timelines: what they show, in every format, read back as their readers would.

Golden files are for people: look at `tests/golden/*` and read their diff. `HPGO_REWRITE_GOLDEN=1 pytest
tests/test_draw.py` writes them anew.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
import zlib
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from timelines import timeline

import hpgo.draw
from hpgo.base.units import format_seconds
from hpgo.draw import density, palette
from hpgo.draw.axis import number_text, ticks
from hpgo.draw.density import Intervals, shares
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes, Steps, scene
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(timelines, ending=".svg", **options) -> str:
    return hpgo.draw.render(timelines, ending, **options).decode()


def tree(timelines, **options) -> ElementTree.Element:
    return ElementTree.fromstring(drawn(timelines, **options))  # fails unless the XML is well-formed


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HPGO_REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} changed: look at it, then set HPGO_REWRITE_GOLDEN=1"


# --- SVG


def test_a_small_picture_is_the_golden_one() -> None:
    check_golden("1f1b.svg", drawn(timeline("1f1b", ranks=3, micro_batches=4)))


def test_a_comparison_with_everything_on_is_the_golden_one() -> None:
    two = [timeline(name, ranks=3, micro_batches=4, latency_s=0.5, memory=True) for name in ("1f1b", "eager_1f1b")]
    check_golden("compared.svg", drawn(two, transfers="arrows", memory=True, critical_path=True, width_px=900))


def test_the_end_of_a_short_step_stands_beside_its_rows_where_its_facts_stand_above_it() -> None:
    counts = (2, 40)
    both = [timeline("1f1b", ranks=2, micro_batches=count) for count in counts]
    words = list(tree(both, labels=["short", "long"]).iter(f"{SVG}text"))

    def height(begin: str) -> float:
        """Of the first text that begins so."""
        return next(float(element.get("y", "nan")) for element in words if (element.text or "").startswith(begin))

    short_px, long_px = (
        height(format_seconds(one.makespan_s)) - height(f"2 ranks · {count} micro-batches")
        for one, count in zip(both, counts, strict=True)
    )
    assert short_px > 14 > long_px  # letters are less high


def test_the_same_timeline_gives_the_same_bytes_in_every_text_format() -> None:
    for ending in (".svg", ".html", ".json", ".txt", ".tex"):
        first, second = (drawn(timeline("zb_h1"), ending) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("transfers", ["none", "arrows", "lanes"])
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_v", "dualpipe_v", "dualpipe"])
def test_svg_is_well_formed_and_has_a_box_for_each_action(name: str, transfers: str) -> None:
    one = timeline(name, ranks=4, micro_batches=8, latency_s=0.1, memory=True)
    root = tree(one, transfers=transfers, memory=True, critical_path=True, hatch=True)
    boxes = 0
    for group in root.findall(f"{SVG}g"):
        for inner in [group, *group.findall(f"{SVG}g")]:
            if re.fullmatch("[FBIW]", group.get("class", "")):
                boxes += len(inner.findall(f"{SVG}rect"))
    fused = int((one.kind == 4).sum())
    legend = len(np.unique(one.kind[one.kind < 4])) if not fused else len(set(one.kind[one.kind < 4].tolist()) | {0, 1})
    legend += 1 if one.stages > one.ranks else 0
    assert boxes == len(one.rank) + fused + legend


@pytest.mark.parametrize(
    ("names", "meaning"),
    [
        (("1f1b",), ""),
        (("zb_v",), "bar on top: later virtual stage of the rank"),
        (("dualpipe",), "bar on top: the other direction"),
        (("zb_v", "dualpipe"), "bar on top: later virtual stage of the rank, or the other direction"),
    ],
)
def test_the_legend_says_what_bars_on_boxes_are(names: tuple[str, ...], meaning: str) -> None:
    timelines = [timeline(name, ranks=4, micro_batches=8) for name in names]
    for ending in (".svg", ".html"):
        picture = drawn(timelines, ending)
        assert meaning in picture
        assert ("bar on top: " in picture) == bool(meaning)


def test_a_plans_picture_says_what_runs_where_in_every_format() -> None:
    best = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    one = best.timeline()
    rows = ["stage 0 (8 × V100-16GB, tokens … encoder-28)", "stage 1 (8 × V100-16GB, encoder-29 … pooler)"]
    heading = f"bert-48 on dapple-a: eager_1f1b, a step of {format_seconds(best.step_s)}"
    shown = texts(tree(one))
    assert {heading, *rows} <= set(shown)
    assert f"bubble {100 * best.bubble:.1f} %" in " ".join(shown), "the figure of the report"
    assert all(name in drawn(one, ".html") for name in (heading, *rows))
    assert heading in drawn(one, ".txt")
    named = {e["args"]["name"] for e in events_of(one) if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == set(rows)
    assert hpgo.Timeline.from_json(one.to_json()).row_names == one.row_names == tuple(rows)


def test_memory_curves_of_a_picture_have_one_scale() -> None:
    order = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    two = [hpgo.simulate(order, memory=hpgo.StageBytes(activation_bytes=size)) for size in (1e9, 4e9)]
    heights = []
    for one in two:
        picture = scene([one, two[1]], DrawOptions(memory=True))
        steps = next(item for item in picture.items if isinstance(item, Steps) and item.style == "memory")
        heights.append(steps.base - float(steps.tops.min()))
    assert heights[0] == pytest.approx(heights[1] / 4)


def test_entries_of_a_legend_stand_in_columns() -> None:
    root = tree(timeline("zb_v", latency_s=0.3, memory=True), memory=True, critical_path=True, width_px=700)
    groups = [group for group in root.findall(f"{SVG}g") if group.get("class") == "t-legend"]
    places = {element.get("x") for group in groups for element in group.iter(f"{SVG}text")}
    assert 1 < len(places) <= 4


def test_boxes_stand_at_their_times_on_the_axis() -> None:
    one = timeline("1f1b", ranks=2, micro_batches=3, unit_s=1e-3)
    root = tree(one)
    numbers = {element.text: float(element.get("x")) for element in root.iter(f"{SVG}text") if element.text}
    assert "time (ms)" in numbers
    px_per_ms = (numbers["10"] - numbers["0"]) / 10
    group = next(group for group in root.findall(f"{SVG}g") if group.get("class") == "F")
    found = [
        ((float(rect.get("x")) - numbers["0"]) / px_per_ms, float(rect.get("width")) / px_per_ms)
        for rect in group.iter(f"{SVG}rect")
    ]
    forward = one.kind == 0
    expected = zip(one.start_s[forward] * 1e3, (one.end_s - one.start_s)[forward] * 1e3, strict=True)
    assert np.allclose(found, list(expected), atol=0.05)


def test_a_linked_picture_has_one_shape_for_each_kind_and_stage_with_the_same_boxes() -> None:
    one = timeline("zb_v", ranks=2, micro_batches=3)
    boxes = sorted(
        tuple(float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
        for group in tree(one).findall(f"{SVG}g")
        if group.get("class") in {"F", "I", "W"}
        for rect in group.iter(f"{SVG}rect")
    )
    found, marks = [], []
    for group in tree(one, linked=True).findall(f"{SVG}g"):
        if group.get("class") in {"F", "I", "W"}:
            for path in group.iter(f"{SVG}path"):
                shapes = re.findall(r"M(.+?) (.+?)h(.+?)v(.+?)h-(.+?)z", path.get("d", ""))
                found += [tuple(map(float, shape[:4])) for shape in shapes]
                assert all(there == back for _, _, there, _, back in shapes)
                if stage := path.get("data-stage"):
                    marks.append((group.get("class"), stage, path.get("data-batches")))
                    assert len(shapes) == 3
    assert sorted(found) == boxes
    assert marks == [(kind, str(stage), "0 1 2") for kind in "FIW" for stage in range(4)]


def test_the_legend_names_what_is_there_and_nothing_else() -> None:
    plain = texts(tree(timeline("1f1b")))
    assert "forward" in plain
    assert "backward" in plain
    assert not {"input gradient", "weight gradient", "activation transfer", "critical path"} & set(plain)
    split = texts(tree(timeline("zb_h1", latency_s=0.1), transfers="arrows", critical_path=True))
    assert {"input gradient", "weight gradient", "activation transfer", "critical path"} <= set(split)
    assert "backward" not in split


def test_no_two_texts_overlap() -> None:
    for picture in (
        [timeline("1f1b", ranks=16, micro_batches=64)],
        [timeline(name, ranks=4, latency_s=0.3, memory=True) for name in ("1f1b", "zb_h1", "gpipe")],
        [timeline("1f1b", ranks=64, micro_batches=128)],
    ):
        boxes = []
        root = tree(picture, memory=True, critical_path=True, transfers="arrows")
        css = root.find(f"{SVG}style").text
        for group in root.findall(f"{SVG}g"):
            for element in group.findall(f"{SVG}text"):
                name = group.get("class")
                rule = re.search(rf"^\.{name}{{font-size:([\d.]+)px;text-anchor:(\w+)", css, re.MULTILINE)
                size, anchor = (float(rule[1]), rule[2]) if rule else (float(group.get("font-size")), "middle")
                width = 0.5 * size * len(element.text)
                x = float(element.get("x")) - {"start": 0, "middle": width / 2, "end": width}[anchor]
                boxes.append(
                    (x, x + width, float(element.get("y")) - 0.7 * size, float(element.get("y")), element.text)
                )
        boxes.sort()
        for i, (_, right, top, bottom, text) in enumerate(boxes):
            for left, _, other_top, other_bottom, other in boxes[i + 1 :]:
                if left >= right:
                    break
                assert not (other_top < bottom and top < other_bottom), f"{text!r} and {other!r} overlap"


def test_many_actions_become_shares_of_time_and_the_picture_says_so() -> None:
    crowded = timeline("1f1b", ranks=16, micro_batches=1024)
    root = tree(crowded)
    assert sum(1 for _ in root.iter()) < 1_000
    assert any("32,768 actions" in text and "shares of time" in text for text in texts(root))
    few = tree(crowded, max_boxes=40_000, width_px=20_000)
    assert sum(1 for _ in few.iter(f"{SVG}rect")) > 32_768


def test_more_ranks_than_rows_share_rows_and_the_picture_says_so() -> None:
    root = tree(timeline("gpipe", ranks=300, micro_batches=2))
    assert any("3 ranks per row" in text for text in texts(root))
    assert "ranks 0–2" in texts(root)


def test_a_rank_above_its_cap_is_named() -> None:
    said = [
        text
        for text in texts(tree(timeline("dualpipe_v", micro_batches=10, memory=True), memory=True))
        if "cap" in text
    ]
    assert "dualpipe_v: 4 ranks above the memory cap, rank 0 by the most: 17 GB of 16 GB." in said


def test_a_cap_far_above_is_told_and_does_not_flatten_the_curve() -> None:
    order = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    roomy = hpgo.simulate(order, memory=hpgo.StageBytes(activation_bytes=1e9), memory_cap_bytes=80e9)
    said = texts(tree(roomy, memory=True))
    assert "1f1b: the memory cap, 80 GB, is far above the memory in use and not drawn." in said
    assert "memory in use (strip height 2 GB)" in said
    assert not any(text.startswith("memory cap") for text in said)


def test_dark_mode_follows_the_reader_unless_a_theme_is_chosen() -> None:
    one = timeline("1f1b")
    assert "prefers-color-scheme:dark" in drawn(one)
    assert "prefers-color-scheme" not in drawn(one, theme="light")
    assert f".paper{{fill:{palette.PAPER[1]}}}" in drawn(one, theme="dark")


def test_patterns_are_faint_but_in_print_or_where_they_are_asked_for() -> None:
    one = timeline("zb_h1")
    faint, strong = (f".hatch{{opacity:{value}}}" for value in (palette.HATCH_OPACITY, palette.PRINT_OPACITY))
    clear = f".number{{stroke-width:{palette.CLEAR_PX:g}px}}"  # of lines that would run through digits
    assert f"{faint}\n@media print{{{strong}{clear}}}" in drawn(one)
    assert strong + clear in drawn(one, hatch=True)
    assert faint not in drawn(one, hatch=True)


def test_names_with_markup_stay_text() -> None:
    name = "</script><b>a & b</b> 50 %_x"
    assert name in "".join(texts(tree(timeline("1f1b"), labels=[name])))
    page = drawn(timeline("1f1b"), ".html", labels=[name])
    assert "<b>" not in page
    assert r"50 \%\_x" in drawn(timeline("1f1b"), ".tex", labels=[name])


# --- colours: CIEDE2000 as Sharma, Wu and Dalal (2005) have it, sight without one kind of cones as Machado and others


_SIGHTS = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: Sequence[float], other: Sequence[float]) -> float:
    """The distance of two colours of CIELAB, in the steps and names of the paper."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean_c**7 / (mean_c**7 + 25**7)))
    c1, c2 = math.hypot((1 + g) * a1, b1), math.hypot((1 + g) * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, (1 + g) * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    turn = 180.0 if turn == -180 and h2 > h1 else turn
    dl, dc, dh = l2 - l1, c2 - c1, 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    l, c = (l1 + l2) / 2, (c1 + c2) / 2  # noqa: E741 -- as the paper has it
    if c1 * c2 == 0:
        h = h1 + h2
    elif abs(h1 - h2) <= 180:
        h = (h1 + h2) / 2
    else:
        h = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    cos = [math.cos(math.radians(k * h + shift)) for k, shift in ((1, -30), (2, 0), (3, 6), (4, -63))]
    t = 1 - 0.17 * cos[0] + 0.24 * cos[1] + 0.32 * cos[2] - 0.20 * cos[3]
    rotation = -math.sin(math.radians(60 * math.exp(-(((h - 275) / 25) ** 2)))) * 2 * math.sqrt(c**7 / (c**7 + 25**7))
    dl /= 1 + 0.015 * (l - 50) ** 2 / math.sqrt(20 + (l - 50) ** 2)
    dc /= 1 + 0.045 * c
    dh /= 1 + 0.015 * c * t
    return math.sqrt(dl**2 + dc**2 + dh**2 + rotation * dc * dh)


@pytest.mark.parametrize(
    ("one", "other", "published"),
    [  # of the table of Sharma, Wu and Dalal: pairs that implementations get wrong
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 3.1571, -77.2803), (50, 0, -82.7485), 2.8615),
        ((50, 2.8361, -74.0200), (50, 0, -82.7485), 3.4412),
        ((50, -1.3802, -84.2814), (50, 0, -82.7485), 1.0000),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, 2.49, -0.001), (50, -2.49, 0.0009), 7.1792),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((50, -0.001, 2.49), (50, 0.0009, -2.49), 4.8045),
        ((50, -0.001, 2.49), (50, 0.0011, -2.49), 4.7461),
        ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((50, 2.5, 0), (58, 24, 15), 19.4535),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
        ((90.8027, -2.0831, 1.4410), (91.1528, -1.6435, 0.0447), 1.4441),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_distances_of_colours_are_the_published_ones(one, other, published: float) -> None:
    assert ciede2000(one, other) == pytest.approx(published, abs=5e-5)
    assert ciede2000(other, one) == pytest.approx(published, abs=5e-5)


_BOXES = ["F", "B", "I", "W", *(f"idle-{cause}" for cause in palette.CAUSE_NAMES), "sync"]
_OVER_THEM = ["virtual_stage", "memory", "lane-activation", "lane-gradient", "activation", "gradient", "critical"]
_STAGES = [f"stage-{at}" for at in range(len(palette.STAGE_COLOURS))]
_HELD = ["weights", "gradients", "optimizer", "activations", "buffers"]
_SHARES = ["F", "B", "sync", "waits"]
_FRAMES = ["frame-tensor", "frame-context", "frame-expert"]
_CURVES = [f"mark-{at}" for at in range(palette.CURVES)]


def apart(names: list[str], theme: int, sight: str) -> dict[str, float]:
    """For each pair of styles, and each with the paper, how far apart their colours are; none of them twice."""
    colours = {name: (look.fill or look.stroke)[theme] for name in names if (look := palette.look(name))}
    colours["paper"] = palette.PAPER[theme]
    seen = {name: lab(np.array(_SIGHTS[sight]) @ linear(colour)) for name, colour in colours.items()}
    return {
        f"{one}, {other}": ciede2000(seen[one], seen[other])
        for one, other in combinations(seen, 2)
        if {one, other} not in ({"lane-activation", "activation"}, {"lane-gradient", "gradient"})
    }


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", _SIGHTS)
def test_all_colours_that_can_touch_are_apart_in_every_sight(sight: str, theme: int) -> None:
    for names in ([*_BOXES, *_OVER_THEM], _STAGES, _HELD, _SHARES, _CURVES):
        near = {pair: round(distance, 1) for pair, distance in apart(names, theme, sight).items() if distance < 10}
        assert not near


@pytest.mark.parametrize("sight", _SIGHTS)
def test_frames_are_apart_from_the_cells_that_they_frame(sight: str) -> None:
    for theme in (0, 1):
        pairs = apart([*_STAGES, *_FRAMES], theme, sight)
        near = {pair: round(distance, 1) for pair, distance in pairs.items() if distance < 10 and "frame" in pair}
        assert not {pair for pair in near if "paper" not in pair}, "frames stand on cells, never on the paper"


def test_in_grey_boxes_that_touch_differ_by_pattern_or_edge() -> None:
    for names in (_BOXES, _STAGES, _HELD, _SHARES):
        marks = {(palette.look(name).hatch, palette.look(name).stroke not in {None, palette.PAPER}) for name in names}
        assert len(marks) == len(names)
    dashes = {palette.look(f"curve-{at}").dash_px for at in range(palette.CURVES)}
    assert len(dashes) == palette.CURVES


def test_a_later_chunk_is_told_by_a_bar_and_not_by_its_colour() -> None:
    one = timeline("interleaved", ranks=2, micro_batches=2)
    picture = scene([one], DrawOptions())
    bars = [item for item in picture.items if isinstance(item, Boxes) and item.style == "virtual_stage"]
    later = int((one.stage >= one.ranks).sum())
    assert sum(len(item.x) for item in bars) == later + 1  # and one in the legend
    assert all(np.all(item.height <= 3) for item in bars)


def test_thin_boxes_are_not_washed_out_by_what_parts_them() -> None:
    crowded = timeline("1f1b", ranks=2, micro_batches=200)
    px_per_s = 1100 / crowded.makespan_s
    for item in scene([crowded], DrawOptions()).items:
        if isinstance(item, Boxes) and item.style in "FB" and len(item.x) > 1:
            seconds = {"F": 1.0, "B": 2.0}[item.style]
            assert (item.width > 0.85 * seconds * px_per_s).all()
            assert palette.look(item.style).stroke is None


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    dim, bright = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_words_have_contrast_to_what_they_stand_on(theme: int) -> None:
    for on in [*palette.KIND_COLOURS, *(f"stage-{at}" for at in range(len(palette.STAGE_COLOURS)))]:
        fill = palette.look(on).fill
        assert fill is not None
        assert contrast(palette.ink("tick", on, theme), fill[theme]) > 4.5
    for font in palette.FONTS:
        assert contrast(palette.ink(font, "", theme), palette.PAPER[theme]) > 4.5


# --- numbers


@given(st.floats(1e-9, 1e9), st.integers(2, 30))
def test_ticks_are_round_few_and_inside(span: float, at_most: int) -> None:
    positions = ticks(span, at_most)
    assert 1 <= len(positions) <= at_most
    assert positions[0] == 0
    assert positions[-1] <= span * (1 + 1e-9)
    if len(positions) > 1:
        assert number_text(positions[1]).strip("0.,")[:1] in "125"


@st.composite
def busy_ranks(draw):
    ranks = draw(st.integers(1, 4))
    rank, start, end, weight = [], [], [], []
    for r in range(ranks):
        now = 0.0
        for _ in range(draw(st.integers(0, 6))):
            begin = now + draw(st.floats(0, 3))
            now = begin + draw(st.floats(0, 3))
            rank.append(r)
            start.append(begin)
            end.append(now)
            weight.append(draw(st.sampled_from([0.0, 0.5, 1.0])))
    return ranks, Intervals(np.array(rank, int), np.array(start), np.array(end)), np.array(weight)


@settings(max_examples=60)
@given(busy_ranks(), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 2, 2**20]))
def test_shares_are_what_adding_up_overlaps_gives(busy, columns: int, per_row: int, at_once: int) -> None:
    ranks, intervals, weight = busy
    edges = np.linspace(0, float(intervals.end_s.max(initial=0)) + 0.5, columns + 1)
    with patch.object(density, "_AT_ONCE", at_once):
        found = shares(intervals, weight.__getitem__, edges, ranks, per_row)
    expected = np.zeros_like(found)
    for rank, start, end, part in zip(intervals.rank, intervals.start_s, intervals.end_s, weight, strict=True):
        for i in range(columns):
            overlap = max(0.0, min(end, edges[i + 1]) - max(start, edges[i]))
            row = rank // per_row
            in_row = min(per_row, ranks - row * per_row)
            expected[row, i] += part * overlap / (edges[i + 1] - edges[i]) / in_row
    assert np.allclose(found, expected, atol=1e-9)


# --- text and TikZ


def test_the_text_picture_is_the_golden_one() -> None:
    two = [timeline(name, ranks=3, micro_batches=4) for name in ("1f1b", "gpipe")]
    check_golden("compared.txt", drawn(two, ".txt", columns=80))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (4, 8), (16, 200), (100, 3)])
def test_text_is_ascii_and_keeps_its_width(ranks: int, micro_batches: int) -> None:
    text = drawn(timeline("1f1b", ranks=ranks, micro_batches=micro_batches), ".txt", columns=100)
    assert text.isascii()
    rows = [line for line in text.splitlines() if line.endswith("|")]
    assert len(rows) == min(ranks, 50)
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) <= 100


def test_tikz_closes_what_it_opens() -> None:
    text = drawn([timeline("zb_h1", latency_s=0.2), timeline("1f1b")], ".tex", transfers="arrows", critical_path=True)
    unescaped = re.sub(r"\\[{}]", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert text.count(r"\begin{tikzpicture}") == text.count(r"\end{tikzpicture}") == 1
    used = set(re.findall(r"(?:fill|draw)=(hpgo-[\w-]+)", text))
    assert used == set(re.findall(r"\\definecolor{(hpgo-[\w-]+)}", text)) & used
    assert text.isascii()


# --- traces


def events_of(timelines, **options):
    return json.loads(drawn(timelines, ".json", **options))["traceEvents"]


def test_a_trace_has_a_process_a_rank_with_named_lanes() -> None:
    events = events_of(timeline("1f1b", ranks=3, latency_s=0.5))
    named = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == {(rank, f"rank {rank}") for rank in range(3)}
    lanes = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(1, "compute"), (1, "send"), (1, "receive")} <= lanes
    for event in events:
        assert {"ph", "pid"} <= set(event)
        if event["ph"] in "XsfC":
            assert event["ts"] >= 0


def test_slices_of_a_lane_never_overlap() -> None:
    # Free links and a long latency: many transfers of a rank are under way at once.
    events = events_of(timeline("gpipe", ranks=3, latency_s=7.5))
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(lanes) > 9
    for slices in lanes.values():
        slices.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(slices))


def test_a_flow_arrow_leads_from_each_send_to_its_receive() -> None:
    one = timeline("1f1b", ranks=3, micro_batches=4, latency_s=0.5)
    events = events_of(one)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(one.transfer_from_rank) == 16
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert ends[number]["pid"] != start["pid"]
        assert ends[number]["ts"] - start["ts"] == pytest.approx(0.5e6)
        assert ends[number]["bp"] == "e"
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X" and e["cat"] == "send"}
    assert all((e["pid"], e["tid"], e["ts"]) in slices for e in starts.values())


_FIELDS = {"X": {"name", "cat", "ts", "dur", "tid"}, "M": {"name", "args"}, "C": {"name", "ts", "args"}}
_FIELDS |= {"s": {"name", "cat", "id", "ts", "tid"}, "f": {"name", "cat", "id", "ts", "tid", "bp"}}


@pytest.mark.parametrize("name", ["gpipe", "zb_v", "dualpipe_v"])
def test_a_trace_keeps_the_rules_of_the_format_in_whole_nanoseconds_too(name: str) -> None:
    """Perfetto cuts times off at nanoseconds, in some versions reads no exponents, and drops slices that overlap."""
    one = timeline(name, ranks=4, micro_batches=16, unit_s=0.7e-3 / 3, latency_s=1e-4, memory=True)
    text = drawn([one, timeline("1f1b", ranks=2)], ".json")
    assert not re.search(r'"(ts|dur)":[^,}]*e', text)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    threads: dict[int, set[str]] = {}
    for event in json.loads(text)["traceEvents"]:
        assert _FIELDS[event["ph"]] | {"pid"} <= set(event)
        if event["ph"] == "X":
            start, length = int(event["ts"] * 1000), int(event["dur"] * 1000)
            lanes.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
        elif event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values())
        elif event["ph"] == "M" and "tid" in event:
            threads.setdefault(event["tid"], set()).add(event["args"]["name"])
        elif event["ph"] in "sf":  # an arrow is tied to the slice of its lane that is under way
            starts, ends = zip(*lanes[event["pid"], event["tid"]], strict=True)
            at = int(event["ts"] * 1000)
            assert any(start <= at <= end + 1 for start, end in zip(starts, ends, strict=True))
    assert all(len(names) == 1 for names in threads.values())
    for slices in lanes.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(slices))


def test_memory_is_a_counter() -> None:
    one = timeline("1f1b", ranks=2, memory=True)
    counted = [e["args"]["bytes"] for e in events_of(one) if e["ph"] == "C" and e["pid"] == 0]
    assert counted == one.memory[0][1].tolist()


# --- HTML


def columns_of(page: str) -> dict[str, np.ndarray]:
    found = re.findall(r'<script type="text/plain" id="(\S+)">([^<]*)</script>', page)
    columns = {}
    for name, packed in found:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), "u1").reshape(4, -1)
        folded = np.ascontiguousarray(planes.T).view("<u4")[:, 0].astype("i8")
        columns[name] = np.cumsum((folded >> 1) ^ -(folded & 1)) % 2**32
    return columns


def test_the_page_holds_every_action_to_nine_digits() -> None:
    one = timeline("dualpipe_v", ranks=4, micro_batches=10, latency_s=0.1)
    page = drawn(one, ".html")
    meta = json.loads(re.search(r'id="meta">(.*?)</script>', page)[1])["timelines"][0]
    columns = {name.removeprefix("c0-"): values for name, values in columns_of(page).items()}
    assert np.array_equal(np.repeat(np.arange(4), np.diff(columns["bounds"])), one.rank)
    assert np.array_equal(columns["kind"] & 7, one.kind)
    assert np.array_equal(columns["kind"] >= 8, one.critical)
    tick_s = meta["tick_s"]
    assert tick_s < one.makespan_s * 1e-8
    assert np.allclose(columns["start"] * tick_s, one.start_s, atol=tick_s)
    assert np.allclose((columns["start"] + columns["duration"]) * tick_s, one.end_s, atol=2 * tick_s)
    fused = one.kind == 4
    assert fused.any()
    assert np.array_equal(columns["backward_micro_batch"][fused], one.backward_micro_batch[fused])


def test_the_page_asks_nothing_of_the_network() -> None:
    page = drawn(timeline("1f1b"), ".html")
    assert not re.search(r"""(?:src|href)=|https?://|@import|url\(""", page)


# --- PNG, PDF, and what may go wrong


@pytest.mark.parametrize(("ending", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_png_and_pdf_are_written_and_repeatable(ending: str, magic: bytes, tmp_path: Path) -> None:
    picture = [timeline("zb_h1", latency_s=0.2, memory=True), timeline("1f1b", memory=True)]
    options = {"transfers": "arrows", "memory": True, "critical_path": True, "hatch": True}
    first, second = (hpgo.draw.save(picture, tmp_path / f"{i}{ending}", **options).read_bytes() for i in range(2))
    assert first.startswith(magic)
    assert first == second


def test_matplotlib_loads_for_png_and_pdf_only(tmp_path: Path) -> None:
    script = f"""
import sys, pathlib, hpgo.draw
from timelines import timeline
for ending in (".svg", ".html", ".json", ".txt", ".tex"):
    hpgo.draw.save(timeline(), pathlib.Path({str(tmp_path)!r}) / ("x" + ending))
assert "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(GOLDEN.parent)})


def test_without_matplotlib_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refused(HpgoError, "missing_package") as caught:
        hpgo.draw.save(timeline("1f1b"), tmp_path / "x.png")
    assert "pip install matplotlib" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("x.bmp", {}, ("unknown_name", ".bmp")),
        ("x", {}, ("unknown_name", "x")),
        ("x.svg", {"tansfers": "arrows"}, ("unknown_name", "tansfers")),
        ("x.svg", {"transfers": "all"}, ("invalid_argument", "all")),
        ("x.svg", {"labels": ["a", "b"]}, ("invalid_argument", "2", "1")),
        ("x.svg", {"width_px": 10}, ("invalid_argument", "width_px", "10")),
        ("x.svg", {"width_px": 10**9}, ("invalid_argument", "20", "000", "10")),
        ("nowhere/x.svg", {}, ("not_writable", "No")),
    ],
)
def test_mistakes_are_named(path: str, options: dict[str, object], said: tuple[str, ...], tmp_path: Path) -> None:
    with refused(HpgoError, *said) as caught:
        hpgo.draw.save(timeline("1f1b"), tmp_path / path, **options)
    assert caught.value.hint


@pytest.mark.parametrize("transfers", ["arrows", "lanes"])
@pytest.mark.parametrize("unit_s", [0.0, 1e-12, 1e12])
@pytest.mark.parametrize("name", ["1f1b", "sequential", "forward_only", "pipedream"])
def test_odd_timelines_are_drawn_too(name: str, unit_s: float, transfers: str) -> None:
    one = timeline(name, ranks=1 if name == "sequential" else 3, unit_s=unit_s, memory=True)
    for ending in (".svg", ".html", ".json", ".txt", ".tex"):
        assert hpgo.draw.render([one, timeline("gpipe")], ending, transfers=transfers, memory=True, critical_path=True)
        assert hpgo.draw.render(one, ending, transfers=transfers, memory=True, critical_path=True)


def test_nothing_to_draw_is_an_error() -> None:
    with refused(ArgumentError, "missing"):
        hpgo.draw.render([], ".svg")


def test_the_page_about_pictures_shows_what_its_example_draws(tmp_path: Path) -> None:
    docs = GOLDEN.parents[1] / "docs"
    example = re.search(r"```python\n(.*?)```", (docs / "pictures.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    # In a process of its own: the example must import all that it uses.
    subprocess.run([sys.executable, "-c", example], check=True, cwd=tmp_path)
    check_golden("../../docs/pictures/schedules.svg", (tmp_path / "schedules.svg").read_text(encoding="utf-8"))
    assert (tmp_path / "1f1b.html").is_file()
