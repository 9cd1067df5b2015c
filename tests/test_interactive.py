"""The interactive picture, driven in a headless browser as a reader would."""

from __future__ import annotations

import axe
import pytest
from browsing import Picture
from timelines import timeline

import hpgo
import hpgo.draw


@pytest.fixture
def opened(tab, tmp_path):
    def open_picture(timelines, **options) -> Picture:
        tab.goto(hpgo.draw.save(timelines, tmp_path / "picture.html", **options).as_uri())
        return Picture(tab)

    return open_picture


def test_boxes_stand_where_the_simulation_put_them(opened) -> None:
    one = timeline("1f1b")
    picture = opened(one)
    assert picture.state("modes") == ["boxes"]
    assert picture.state("visible") == len(one.rank)
    colours = {0: "#3b75c4", 1: "#f5a040"}
    for i in range(0, len(one.rank), 5):
        # Left of the middle, where the number stands.
        time_s = one.start_s[i] + 0.2 * (one.end_s[i] - one.start_s[i])
        assert picture.colour(0, int(one.rank[i]), float(time_s)) == colours[int(one.kind[i])]


def test_hovering_tells_what_an_action_and_a_bubble_are(opened) -> None:
    picture = opened(timeline("zb_v", latency_s=0.25, memory=True))
    text = picture.hover(0, 0, 0.5)
    assert "rank 0: F0: forward of micro-batch 0, stage 0, virtual stage 0" in text
    assert "0 s to 1 s (1 s)" in text
    assert "on the critical path" in text
    assert "memory" in text
    assert "rank 3: idle, waits for the pipeline to fill" in picture.hover(0, 3, 0.5)


def test_zooming_and_panning_change_what_is_in_view(opened) -> None:
    picture = opened(timeline("1f1b", ranks=8, micro_batches=32))
    everything = picture.state("visible")
    x, y = picture.at(0, 3, 50.0)
    picture.tab.mouse.move(x, y)
    for _ in range(5):
        picture.tab.mouse.wheel(0, -300)
    picture.settle()
    view = picture.state("view")
    assert view["t1"] - view["t0"] < 12
    assert view["t0"] < 50 < view["t1"]
    assert 0 < picture.state("visible") < everything / 4
    picture.press("ArrowRight")
    assert picture.state("view")["t0"] > view["t0"]
    picture.tab.mouse.down()
    picture.tab.mouse.move(x + 200, y)
    picture.tab.mouse.up()
    picture.settle()
    assert picture.state("view")["t0"] < view["t0"]
    picture.press("0")
    assert picture.state("view")["t0"] == 0
    assert picture.state("visible") == everything


def test_the_axis_has_numbers_and_the_unit_of_what_is_in_view(opened) -> None:
    picture = opened(timeline("1f1b", unit_s=1e-3))
    assert picture.state("axis")["unit"] == "ms"
    assert picture.state("axis")["texts"][:3] == ["0", "5", "10"]
    picture.tab.evaluate("window.hpgo.zoomTo(0.010, 0.0102)")
    picture.settle()
    assert picture.state("axis")["unit"] == "us"
    assert len(set(picture.state("axis")["texts"])) == len(picture.state("axis")["texts"]) >= 4


def test_memory_transfers_critical_path_and_bubbles_can_be_switched(opened) -> None:
    one = timeline("1f1b", latency_s=0.5, memory=True)
    picture = opened(one)
    legend = picture.tab.locator("#legend")
    assert picture.state("curves") == 0
    assert "memory" not in legend.inner_text()
    picture.tab.get_by_role("button", name="Memory").click()
    picture.settle()
    assert picture.state("curves") == 4
    assert "memory cap" in legend.inner_text()
    picture.press("t")
    assert picture.state("arrows") == len(one.transfer_from_rank)
    assert "gradient transfer" in legend.inner_text()
    picture.press("t")
    assert picture.state("show.transfers") == "lanes"
    assert picture.state("arrows") == len(one.transfer_from_rank)
    picture.press("c")
    assert picture.state("critical") == int(one.critical.sum())
    filling = picture.colour(0, 3, 0.5)
    picture.press("b")
    assert picture.colour(0, 3, 0.5) != filling
    assert "waits for the pipeline to fill" not in legend.inner_text()
    picture.press("m")
    assert picture.state("curves") == 0


def test_switches_for_what_a_timeline_lacks_are_off(opened) -> None:
    picture = opened(timeline("gpipe", ranks=1))
    for name in ("Memory", "Transfers"):
        assert picture.tab.get_by_role("button", name=name).is_disabled()
    picture.press("m")
    assert picture.state("show.memory") is False


def test_the_keyboard_walks_from_action_to_action(opened) -> None:
    picture = opened(timeline("1f1b"))
    picture.press("n")
    assert "F0" in picture.state("hover")["text"]
    for _ in range(4):
        picture.press("n")
    assert "rank 0: B0" in picture.state("hover")["text"]
    picture.press("p")
    assert "rank 0: F3" in picture.state("hover")["text"]
    picture.press("Escape")
    assert picture.state("hover") is None


def test_from_there_arrows_reach_idle_times_and_other_rows_and_timelines(opened) -> None:
    picture = opened([timeline("1f1b"), timeline("gpipe")])
    walk = {
        "n": "rank 0: F0",
        "ArrowRight": "rank 0: F1",
        "ArrowDown": "rank 1: F0",
        "ArrowLeft": "rank 1: idle, waits for the pipeline to fill",
        "ArrowUp": "rank 0: F0",
    }
    for key, said in walk.items():
        picture.press(key)
        assert picture.state("hover")["text"].startswith(said)
    for _ in range(4):
        picture.press("ArrowDown")
    assert picture.state("hover")["text"].startswith("rank 0: F0")  # of the second timeline
    assert picture.tab.evaluate("hover.t.label") == "gpipe"
    for key in ("ArrowDown",) * 9 + ("ArrowLeft",) * 9:
        picture.press(key)
    assert picture.state("hover")["text"].startswith("rank 3: idle")
    assert picture.tab.get_by_role("status").last.inner_text() == picture.state("hover")["text"]


def test_walking_keeps_rows_that_do_not_fit_in_view(opened) -> None:
    picture = opened(timeline("1f1b", ranks=64, micro_batches=16))
    picture.press(*["]"] * 9, "n", *["ArrowDown"] * 40)
    view, height = picture.state("view"), picture.tab.locator("#canvas").bounding_box()["height"]
    assert picture.state("hover")["rank"] == 40
    assert 64 * view["rowPx"] > height
    assert 0 < picture.tab.evaluate("window.hpgo.place(0, 40, 0)")[1] < height


def test_the_tab_key_reaches_all_there_is_and_escape_closes_what_is_open(opened) -> None:
    picture = opened([timeline("1f1b"), timeline("gpipe")])
    reached = []
    for _ in range(9):
        picture.press("Tab")
        reached.append(picture.tab.evaluate("document.activeElement.id"))
        assert picture.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached == ["fit", "in", "out", "bubbles", "transfers", "critical", "keys", "canvas", "foot"]
    picture.press("?")
    picture.press("n")
    assert picture.tab.locator("#help").is_visible()
    picture.press("Escape")
    assert not picture.tab.locator("#tip").is_visible()
    picture.press("Escape")
    assert not picture.tab.locator("#help").is_visible()
    assert picture.tab.get_by_role("button", name="Keys").get_attribute("aria-expanded") == "false"


def test_a_tap_tells_what_hovering_does_and_fingers_pan_and_zoom(phone, tmp_path) -> None:
    phone.goto(hpgo.draw.save(timeline("1f1b"), tmp_path / "picture.html").as_uri())
    picture = Picture(phone)
    picture.tab.touchscreen.tap(*picture.at(0, 0, 0.5))
    picture.settle()
    assert picture.tab.locator("#tip").inner_text().startswith("rank 0: F0: forward of micro-batch 0")
    picture.tab.touchscreen.tap(*picture.at(0, 3, 0.5))
    picture.settle()
    assert picture.tab.locator("#tip").inner_text().startswith("rank 3: idle")
    picture.tab.touchscreen.tap(200, 600)
    picture.settle()
    assert not picture.tab.locator("#tip").is_visible()
    whole = picture.state("view")["t1"] - picture.state("view")["t0"]
    touches = phone.context.new_cdp_session(phone)
    for kind, apart in (("Start", 20), *(("Move", apart) for apart in range(30, 130, 10)), ("End", None)):
        points = [] if apart is None else [{"x": 200 - apart, "y": 400}, {"x": 200 + apart, "y": 400}]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
    picture.settle()
    view = picture.state("view")
    assert view["t1"] - view["t0"] < whole / 3
    for kind, x in (("Start", 300), *(("Move", x) for x in range(290, 190, -10)), ("End", None)):
        points = [] if x is None else [{"x": x, "y": 400}]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
    picture.settle()
    assert picture.state("view")["t0"] > view["t0"]
    assert picture.state("hover") is None
    touches.detach()


@pytest.mark.parametrize("screen", ["tab", "phone"])
def test_axe_finds_nothing_on_the_picture(request, tmp_path, screen: str) -> None:
    drawn = [timeline("1f1b", latency_s=0.25, memory=True), timeline("zb_v", latency_s=0.25, memory=True)]
    page = request.getfixturevalue(screen)
    page.goto(hpgo.draw.save(drawn, tmp_path / "picture.html", memory=True).as_uri())
    picture = Picture(page)
    assert axe.found(page) == []
    picture.press("n", "?")
    assert axe.found(page) == []


def test_a_print_is_light_and_as_wide_as_its_paper(tab, tmp_path) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.goto(hpgo.draw.save(timeline("1f1b"), tmp_path / "dark.html").as_uri())
    picture = Picture(tab)
    tab.evaluate("""() => addEventListener("beforeprint", () => { window.printed = {
        bubble: [...context.getImageData(...place(0, 3, 0.5).map((at) => at * ratio), 1, 20).data].slice(0, 80),
        pixels: canvas.width, below: height - contentPx() - AXIS }; })""")
    assert tab.pdf().startswith(b"%PDF")
    assert picture.state("hover") is None
    printed = tab.evaluate("printed")
    bubble = [tuple(printed["bubble"][at : at + 3]) for at in range(0, 80, 4)]
    assert (0xCA, 0xCC, 0xCF) in bubble
    assert min(bubble)[0] < 0.4 * 0xCA, "patterns are strong in print"
    assert (printed["pixels"], printed["below"]) == (3 * 720, 0)
    picture.settle()
    assert picture.colour(0, 3, 0.5) == "#383c42"  # a bubble, in its dark shade


def test_several_timelines_share_the_axis_and_have_a_table(opened) -> None:
    planned, measured = timeline("1f1b"), timeline("1f1b", latency_s=0.5)
    picture = opened([planned, measured], labels=["planned", "measured"])
    assert picture.state("modes") == ["boxes", "boxes"]
    table = picture.tab.locator("#table").inner_text()
    assert "planned" in table
    assert f"{100 * (measured.makespan_s / planned.makespan_s - 1):+.1f} %" in table
    assert "F0" in picture.hover(1, 0, 0.5)


def test_fused_actions_are_split_in_the_box(opened) -> None:
    one = timeline("dualpipe_v", micro_batches=10)
    picture = opened(one)
    fused = int((one.kind == 4).nonzero()[0][0])
    text = picture.hover(0, int(one.rank[fused]), float((one.start_s[fused] + one.end_s[fused]) / 2))
    assert f"F{one.micro_batch[fused]} on stage" in text
    assert f"with B{one.backward_micro_batch[fused]} on stage" in text


def test_dark_mode_paints_the_canvas_dark(opened, tab) -> None:
    tab.emulate_media(color_scheme="dark")
    picture = opened(timeline("1f1b"))
    assert picture.colour(0, 3, 0.5) == "#383c42"  # a bubble, in its dark shade


def test_a_crowd_shows_shares_of_time_that_are_true_and_boxes_when_zoomed_in(opened) -> None:
    one = timeline("1f1b", ranks=64, micro_batches=512)
    picture = opened(one)
    assert picture.state("modes") == ["shares"]
    assert picture.state("visible") == len(one.rank) == 65_536
    assert "shares of time" in picture.tab.locator("#status").inner_text()
    # Pixels stack up to the shares: a third forward below two thirds backward in the steady state.
    picture.press(*["]"] * 12)
    top, bottom = picture.row(0, 2)
    painted = picture.colours([(x, y) for x in range(500, 620, 5) for y in range(top + 2, bottom - 2)])
    blue = sum(int(colour[5:], 16) > int(colour[1:3], 16) for colour in painted)  # more than red: forwards
    assert blue / len(painted) == pytest.approx(1 / 3, abs=0.05)
    assert {"#3b75c4", "#f5a040"} <= set(painted)
    picture.press("0")
    assert picture.hover(0, 30, 900.2).startswith("rank 30: ")
    picture.tab.evaluate("window.hpgo.zoomTo(800, 830)")
    picture.settle()
    assert picture.state("modes") == ["boxes"]
    middle = (one.rank == 30) & (one.start_s <= 815) & (one.end_s > 815.1)
    index = int(middle.nonzero()[0][0])
    letter = "FB"[one.kind[index]]
    assert f"{letter}{one.micro_batch[index]}:" in picture.hover(0, 30, 815.05)


@pytest.mark.slow
def test_eight_million_actions_open_and_pan(opened) -> None:
    one = hpgo.simulate(hpgo.schedule("1f1b", ranks=1024, micro_batches=4096), forward_s=1.0, backward_s=2.0)
    picture = opened(one)
    assert picture.state("visible") == len(one.rank) == 8_388_608
    frames = []
    for _ in range(10):
        picture.press("ArrowRight")
        frames.append(picture.state("frame_ms"))
    picture.tab.evaluate("window.hpgo.zoomTo(6000, 6020)")
    picture.settle()
    assert "rank" in (picture.hover(0, 500, 6010.0) or "rank")
    assert sorted(frames)[5] < 1_000  # freezing would be seconds; the benchmark page has the figures
