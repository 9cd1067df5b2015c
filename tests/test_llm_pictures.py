"""Pictures of a transformer's plan on its cluster, and of time against memory, read back as their readers would."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.draw import palette
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes
from hpgo.draw.svg import svg
from hpgo.llm.parallelism import ParallelismConfig
from hpgo.show import llm_figure, pareto_figure
from hpgo.show.llm_figure import place

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"
CLUSTER = hpgo.Cluster.preset("h100:4")
ASKED = {"global_batch_size": 32, "seq_length": 8192}


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("HPGO_REWRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} changed: look at it, then set HPGO_REWRITE_GOLDEN=1"


def drawn(price: hpgo.LlmEstimate, cluster: hpgo.Cluster = CLUSTER) -> str:
    return svg(llm_figure.scene(price, cluster), DrawOptions())


def cells(text: str) -> list[tuple[str, float, float, str]]:
    """Style, place and tip of each GPU."""
    found = []
    for one in ElementTree.fromstring(text).iter(f"{SVG}g"):
        style = one.get("class", "")
        if style.startswith("stage-"):
            for rect in one.findall(f"{SVG}rect"):
                tip = rect.find(f"{SVG}title")
                if tip is not None:
                    found.append((style, float(rect.get("x")), float(rect.get("y")), tip.text or ""))
    return found


def test_a_way_on_its_cluster_is_the_golden_picture() -> None:
    one = hpgo.estimate_llm("llama-3-8b", CLUSTER, tp=2, cp=2, pp=4, **ASKED)
    check_golden("way.svg", drawn(one))


def test_time_against_memory_is_the_golden_picture() -> None:
    front = hpgo.llm_pareto_front("llama-3-8b", hpgo.Cluster.preset("h100:1"), points=6, **ASKED)
    check_golden("front.svg", svg(pareto_figure.scene(front), DrawOptions()))


@pytest.mark.parametrize("name", ["way.svg", "front.svg"])
def test_the_page_shows_the_golden_pictures(name: str) -> None:
    shown = GOLDEN.parent.parent / "docs/pictures" / name
    assert shown.read_text(encoding="utf-8") == (GOLDEN / name).read_text(encoding="utf-8")


def test_groups_are_framed_in_each_machine_that_has_a_part_of_them() -> None:
    where = hpgo.Cluster.preset("h100:4")
    one = hpgo.estimate_llm("qwen3-30b-a3b", where, tp=2, pp=2, ep=16, global_batch_size=32, seq_length=4096)
    scene = llm_figure.scene(one, where)
    counts: dict[str, int] = {}
    for item in scene.items:
        if isinstance(item, Boxes) and len(item.x) > 1:
            counts[item.style] = counts.get(item.style, 0) + len(item.x)
    assert counts["frame-tensor"] == 16
    assert counts["frame-expert"] == 4
    assert counts["same-weights"] == one.parallelism.dp_cp_size
    assert "frame-context" not in counts


@pytest.mark.parametrize(
    ("cluster", "gpus"), [("h100:1", 8), ("h100:4", 32), ("h100:40", 320), ("gb200:4", 288), ("h100:512", 4096)]
)
def test_every_gpu_is_a_cell_of_its_own_in_the_colour_of_its_rank(cluster: str, gpus: int) -> None:
    where = hpgo.Cluster.preset(cluster)
    one = hpgo.estimate_llm("llama-3-8b", where, tp=2, pp=4, global_batch_size=gpus, seq_length=2048)
    found = cells(drawn(one, where))
    assert len(found) == gpus == len({(x, y) for _, x, y, _ in found})
    for style, _, _, tip in found:
        gpu = int(tip.split(":")[0].removeprefix("GPU "))
        assert style == f"stage-{place(one.parallelism, gpu).rank % len(palette.STAGE_COLOURS)}"
    rows: dict[int, set[float]] = {}
    for _, _, y, tip in found:
        gpu = int(tip.split(":")[0].removeprefix("GPU "))
        rows.setdefault(gpu // where.nodes[0].count, set()).add(y)
    assert all(len(ys) == 1 for ys in rows.values()), "a node is one row"


@given(
    tensor=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    data=st.integers(1, 4),
    pipeline=st.integers(1, 4),
)
@settings(max_examples=40)
def test_places_are_all_different_and_groups_have_their_size(tensor, context, data, pipeline) -> None:
    config = ParallelismConfig(tp=tensor, cp=context, dp=data, pp=pipeline)
    places = [place(config, gpu) for gpu in range(config.world_size)]
    assert len({(one.tensor, one.context, one.data, one.rank) for one in places}) == config.world_size
    for gpu, one in enumerate(places):
        same = [other for other in places if (other.tensor, other.rank) == (one.tensor, one.rank)]
        assert len(same) == config.dp_cp_size
        order = [(c, d, r) for r in range(pipeline) for d in range(data) for c in range(context)]
        assert order[gpu // tensor] == (one.context, one.data, one.rank)


def test_colours_of_neighbouring_ranks_differ_and_text_on_them_is_read() -> None:
    assert len(set(palette.STAGE_COLOURS)) == len(palette.STAGE_COLOURS)
    assert {palette.ink_on(colour) for colour in palette.STAGE_COLOURS} == {"#000000"}


def test_no_way_that_is_looked_at_is_quicker_with_less_memory_than_the_front() -> None:
    cluster, asked = hpgo.Cluster.preset("h100:1"), {"global_batch_size": 4, "seq_length": 4096, "devices": 4}
    front = hpgo.llm_pareto_front("llama-3-8b", cluster, points=100, **asked)
    every = hpgo.plan_llm("llama-3-8b", cluster, top=1000, **asked).estimates
    assert len(front) > 2
    for quick, lean in pairwise(front):
        assert quick.step_s < lean.step_s
        assert lean.fullest.peak_bytes <= 0.99 * quick.fullest.peak_bytes
    for one in every:
        ahead = [p for p in front if p.step_s <= one.step_s * (1 + 1e-9)]
        assert min(p.fullest.peak_bytes for p in ahead) * 0.99 <= one.fullest.peak_bytes


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf", ".html"])
def test_each_ending_and_theme_is_written_and_the_same_again(tmp_path, ending: str) -> None:
    if ending in {".png", ".pdf"}:
        pytest.importorskip("matplotlib")
    one = hpgo.estimate_llm("llama-3-8b", CLUSTER, tp=2, pp=4, **ASKED)
    begins = {".svg": b"<svg", ".png": b"\x89PNG", ".pdf": b"%PDF", ".html": b"<!doctype html>"}[ending]
    first, again, dark = (
        hpgo.draw_llm_plan(one, CLUSTER, tmp_path / f"{name}{ending}", theme=theme).read_bytes()
        for name, theme in (("a", "light"), ("b", "light"), ("c", "dark"))
    )
    assert first == again != dark
    assert first.startswith(begins)
    assert hpgo.draw_pareto_front([one], tmp_path / f"front{ending}").read_bytes().startswith(begins)


def test_cells_stand_apart_in_pixels_too_whatever_their_pattern(tmp_path) -> None:
    image = pytest.importorskip("matplotlib.image")
    one = hpgo.estimate_llm("llama-3-8b", CLUSTER, tp=4, pp=8, **ASKED)
    pixels = image.imread(hpgo.draw_llm_plan(one, CLUSTER, tmp_path / "way.png", theme="light"))
    scene = llm_figure.scene(one, CLUSTER)
    scale = pixels.shape[1] / scene.width_px
    stages = [item for item in scene.items if isinstance(item, Boxes) and item.style.startswith("stage-")]
    assert len(stages) >= 8
    for item in stages[:8]:
        edge, within = (round(scale * x) for x in (item.x[1], item.x[1] + item.width[1] / 2))
        rows = slice(round(scale * (item.y[1] + 6)), round(scale * (item.y[1] + item.height[1] - 6)))
        between = pixels[rows, edge - 2 : edge + 3, :3].min(axis=2).max(axis=1)
        inside = pixels[rows, within - 2 : within + 3, :3].min(axis=2).max(axis=1)
        assert between.min() > inside.min(), item.style
        assert between.min() > 0.75, item.style


def test_dark_and_light_follow_the_reader_unless_one_is_asked_for(tmp_path) -> None:
    one = hpgo.estimate_llm("llama-3-8b", CLUSTER, tp=2, pp=4, **ASKED)
    auto, dark = (
        hpgo.draw_llm_plan(one, CLUSTER, tmp_path / f"{theme}.html", theme=theme).read_text(encoding="utf-8")
        for theme in ("auto", "dark")
    )
    assert "prefers-color-scheme:dark" in auto
    assert "prefers-color-scheme" not in dark
    assert palette.PAPER[1] in dark


def test_the_commands_draw(tmp_path) -> None:
    question = ["llama-3-8b", "-c", "h100:1", "-b", "16", "--seq-length", "8192"]
    config, front = tmp_path / "way.svg", tmp_path / "front.html"
    done = CliRunner().invoke(group, ["llm", "plan", *question, "-o", str(config), "--pareto", str(front)])
    assert done.exit_code == 0, done.output
    assert len(cells(config.read_text(encoding="utf-8"))) == 8
    assert "Pareto front of step time and memory" in front.read_text(encoding="utf-8")
    done = CliRunner().invoke(group, ["llm", "estimate", *question, "--tp", "2", "-o", str(tmp_path / "way.png")])
    assert done.exit_code == 0, done.output


def test_what_can_not_be_drawn_is_refused(tmp_path) -> None:
    one = hpgo.estimate_llm("llama-3-8b", CLUSTER, tp=2, pp=4, **ASKED)
    with pytest.raises(hpgo.errors.ArgumentError, match=r"no picture format has the ending `\.bmp`"):
        hpgo.draw_llm_plan(one, CLUSTER, tmp_path / "way.bmp")
    with pytest.raises(hpgo.errors.ArgumentError, match="the estimate is for 32 GPUs, but cluster `h100:1` has 8"):
        hpgo.draw_llm_plan(one, hpgo.Cluster.preset("h100:1"), tmp_path / "way.svg")
    with pytest.raises(hpgo.errors.ArgumentError, match="no estimates to draw"):
        hpgo.draw_pareto_front([], tmp_path / "front.svg")
    with pytest.raises(hpgo.errors.ArgumentError, match="theme is `grey`"):
        hpgo.draw_llm_plan(one, CLUSTER, tmp_path / "way.svg", theme="grey")
