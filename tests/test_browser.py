"""The interactive page and `hpgo serve`, driven in a headless browser as a reader would.

Needs Debian's `chromium` and PyPI's `playwright` (extra `browser`); skipped, visibly, where one is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import axe
import pytest
from timelines import timeline

import hpgo
import hpgo.draw
from hpgo.base.units import format_seconds
from hpgo.page.settings import Plans, settings_of, timelines

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'hpgo[browser]'"
)
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
CHROMIUM = os.environ.get("HPGO_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium: apt-get install chromium, or set HPGO_CHROMIUM", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def tab(browser):
    """A fresh page; the test fails if a script fails or anything is fetched that isn't there."""
    page = browser.new_page(viewport={"width": 1280, "height": 760})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.problems = problems
    yield page
    page.close()
    assert not problems


class Picture:
    """An interactive page that is open in a tab."""

    def __init__(self, tab, address: str) -> None:
        self.tab = tab
        tab.goto(address)
        tab.locator("#status", has_text="in view").wait_for(timeout=60_000)
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is painted."""
        self.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def state(self, name: str):
        return self.tab.evaluate(
            f"() => {{ const value = window.hpgo.{name}; return value === undefined ? null : value; }}"
        )

    def press(self, key: str) -> None:
        self.tab.keyboard.press(key)
        self.settle()

    def at(self, number: int, rank: int, time_s: float) -> tuple[float, float]:
        """Where on the screen rank and time of the given timeline are."""
        x, y = self.tab.evaluate("([n, r, t]) => window.hpgo.place(n, r, t)", [number, rank, time_s])
        box = self.tab.locator("#canvas").bounding_box()
        return box["x"] + x, box["y"] + y

    def hover(self, number: int, rank: int, time_s: float) -> str | None:
        self.tab.mouse.move(*self.at(number, rank, time_s))
        self.settle()
        hovered = self.state("hover")
        assert self.tab.locator("#tip").is_visible() == (hovered is not None)
        return hovered and self.tab.locator("#tip").inner_text()

    def colour(self, number: int, rank: int, time_s: float) -> str:
        """Of most pixels around there: beside its fill, a box has the lines of its pattern."""
        x, y = self.tab.evaluate("([n, r, t]) => window.hpgo.place(n, r, t)", [number, rank, time_s])
        around = [self.colour_at(x + dx, y + dy) for dx in range(-3, 4) for dy in range(-3, 4)]
        return max(around, key=around.count)

    def row(self, number: int, rank: int) -> tuple[int, int]:
        """First and last pixel of a rank's boxes."""
        middle = self.tab.evaluate("([n, r]) => window.hpgo.place(n, r, 0)", [number, rank])[1]
        height = self.state("view")["rowPx"]
        return round(middle - height / 2 + 2), round(middle + height / 2 - 2)

    def colour_at(self, x: float, y: float) -> str:
        return self.tab.evaluate(
            "([x, y]) => { const c = document.getElementById('canvas'), s = c.width / c.clientWidth;"
            "const d = c.getContext('2d').getImageData(x * s, y * s, 1, 1).data;"
            "return '#' + [...d].slice(0, 3).map((v) => v.toString(16).padStart(2, '0')).join(''); }",
            [x, y],
        )


@pytest.fixture
def opened(tab, tmp_path):
    def open_picture(timelines, **options) -> Picture:
        return Picture(tab, hpgo.draw.save(timelines, tmp_path / "picture.html", **options).as_uri())

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
    assert "rank 0: F0: forward of micro-batch 0, stage 0, chunk 0" in text
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
    for _ in range(9):
        picture.press("]")
    picture.press("n")
    for _ in range(40):
        picture.press("ArrowDown")
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


def test_a_tap_tells_what_hovering_does_and_fingers_pan_and_zoom(browser, tmp_path) -> None:
    phone = browser.new_context(**PHONE)
    picture = Picture(phone.new_page(), hpgo.draw.save(timeline("1f1b"), tmp_path / "picture.html").as_uri())
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
    touches = phone.new_cdp_session(picture.tab)
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
    phone.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [{"viewport": {"width": 1400, "height": 900}}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_on_the_picture(browser, tmp_path, scheme: str, screen) -> None:
    context = browser.new_context(color_scheme=scheme, **screen)
    drawn = [timeline("1f1b", latency_s=0.25, memory=True), timeline("zb_v", latency_s=0.25, memory=True)]
    picture = Picture(context.new_page(), hpgo.draw.save(drawn, tmp_path / "picture.html", memory=True).as_uri())
    assert axe.found(picture.tab) == []
    picture.press("n")
    picture.press("?")
    assert axe.found(picture.tab) == []
    context.close()


def test_a_print_is_light_and_as_wide_as_its_paper(browser, tmp_path) -> None:
    page = browser.new_page(color_scheme="dark")
    picture = Picture(page, hpgo.draw.save(timeline("1f1b"), tmp_path / "dark.html").as_uri())
    page.evaluate("""() => addEventListener("beforeprint", () => { window.printed = {
        bubble: [...context.getImageData(...place(0, 3, 0.5).map((at) => at * ratio), 1, 20).data].slice(0, 80),
        pixels: canvas.width, below: height - contentPx() - AXIS }; })""")
    assert page.pdf().startswith(b"%PDF")
    assert picture.state("hover") is None
    printed = page.evaluate("printed")
    bubble = [tuple(printed["bubble"][at : at + 3]) for at in range(0, 80, 4)]
    assert (0xCA, 0xCC, 0xCF) in bubble
    assert min(bubble)[0] < 0.4 * 0xCA, "patterns are strong in print"
    assert (printed["pixels"], printed["below"]) == (3 * 720, 0)
    picture.settle()
    assert picture.colour(0, 3, 0.5) == "#383c42"
    page.close()


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


def test_dark_mode_paints_the_canvas_dark(browser, tmp_path) -> None:
    page = browser.new_page(color_scheme="dark")
    picture = Picture(page, hpgo.draw.save(timeline("1f1b"), tmp_path / "dark.html").as_uri())
    assert picture.colour(0, 3, 0.5) == "#383c42"  # a bubble, in its dark shade
    page.close()


def test_a_crowd_shows_shares_of_time_that_are_true_and_boxes_when_zoomed_in(opened) -> None:
    one = timeline("1f1b", ranks=64, micro_batches=512)
    picture = opened(one)
    assert picture.state("modes") == ["shares"]
    assert picture.state("visible") == len(one.rank) == 65_536
    assert "shares of time" in picture.tab.locator("#status").inner_text()
    # Pixels stack up to the shares: a third forward below two thirds backward in the steady state.
    for _ in range(12):
        picture.press("]")
    top, bottom = picture.row(0, 2)
    painted = [picture.colour_at(x, y) for x in range(500, 620, 5) for y in range(top + 2, bottom - 2)]
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


# --- hpgo serve


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`hpgo serve` as its user starts it, on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hpgo", "serve", "--port", "0", "--no-open"], stderr=subprocess.PIPE, text=True
    )
    address = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
    assert address
    yield address[0]
    process.terminate()
    process.wait(timeout=10)
    process.stderr.close()


def fetched(address: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {})) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def settled(tab) -> None:
    """What is shown is busy from the first keystroke on, until the answer to the last is there."""
    tab.locator("#words:not(.busy)").wait_for()
    tab.locator("#view:not(.busy)").wait_for(state="attached")


def shown(tab) -> Picture:
    """The picture in the page."""
    settled(tab)
    tab.frame_locator("#picture").locator("#status", has_text="in view").wait_for(timeout=60_000)
    picture = object.__new__(Picture)
    picture.tab = tab.locator("#picture").element_handle().content_frame()
    return picture


def test_the_page_draws_as_fields_change_and_the_address_carries_them(tab, browser, server) -> None:
    tab.goto(server)
    assert "33 s" in tab.locator("table").inner_text()
    tab.get_by_label("Micro-batches").fill("12")
    tab.wait_for_url("**num_batches=12**")
    tab.get_by_label("zb_h1").check()
    tab.wait_for_url("**zb_h1**")
    settled(tab)
    assert "num_batches=12" in tab.url
    table = tab.locator("table").inner_text()
    assert "45 s" in table
    assert "zb_h1" in table
    again = browser.new_page()
    again.goto(tab.url)
    assert again.locator("table").inner_text() == table
    assert again.get_by_label("Micro-batches").input_value() == "12"
    assert again.get_by_label("zb_h1").is_checked()
    assert shown(again).state("visible") == 2 * 12 * 4 * 2 + 12 * 4
    again.close()
    tab.go_back()
    playwright.expect(tab.get_by_label("zb_h1")).not_to_be_checked()
    tab.go_back()
    playwright.expect(tab.get_by_label("Micro-batches")).to_have_value("8")


def test_a_wrong_value_is_answered_in_the_page(tab, server) -> None:
    tab.goto(server)
    tab.get_by_label("Forward", exact=True).fill("1, 2")
    settled(tab)
    alert = tab.get_by_role("alert").inner_text()
    assert "`Forward` has 2 numbers, but `1f1b` has 4 ranks" in alert
    assert "give 1 or 4" in alert
    tab.get_by_label("Forward", exact=True).fill("1, 2, 1, 1")
    settled(tab)
    assert shown(tab).state("visible") == 64
    assert not tab.locator("[aria-invalid]").count()
    tab.problems.clear()  # the browser reports the status 400


def test_the_page_works_without_scripts(browser, server) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(server)
    page.get_by_label("Ranks").fill("2")
    page.get_by_role("button", name="Draw").click()
    assert "num_stages=2" in page.url
    assert "27 s" in page.locator("table").inner_text()
    assert page.evaluate("document.querySelector('noscript img').naturalWidth") == 1200
    assert not page.locator("iframe").is_visible()
    page.close()


@pytest.mark.parametrize(
    ("query", "label", "said"),
    [
        ("num_stages=0", "Ranks", "`Ranks` is 0"),
        ("num_batches=1.5", "Micro-batches", "`Micro-batches` is `1.5`"),
        ("forward_times=1,2&num_stages=4", "Forward", "`Forward` has 2 numbers"),
        ("p2p_time=1,2", "Latency of a message", "`Latency of a message` has 2 numbers, but `1f1b` has 3 edges"),
        ("memory_cap=1,2", "Memory cap", "`Memory cap` has 2 numbers"),
        ("weight_bytes=much", "Weights and state", "`Weights and state`: `much` is no size"),
        ("schedule=interleaved&chunks=1", "Chunks a rank", "leave `Chunks a rank` out"),
        ("schedule=dualpipe&num_stages=3", "dualpipe", "it needs p even"),
        ("schedule=", "gpipe", "no schedule is chosen; choose one, or several to compare them"),
        ("plan=0123", "Plan", "this server holds no plan `0123`; load the plan's file again"),
        ("comm=stram", "Communication", "`Communication` is `stram`; did you mean `stream`"),
        ("transfers=lane", "Transfers", "`Transfers` is `lane`; did you mean `lanes`"),
    ],
)
def test_what_is_wrong_stands_beside_its_field_under_its_label(tab, server, query: str, label: str, said: str) -> None:
    tab.goto(f"{server}?{query}")
    field = tab.get_by_label(label, exact=True)
    assert field.get_attribute("aria-invalid") == "true"
    note = tab.locator(f"#{field.get_attribute('aria-describedby')}")
    assert said in note.inner_text()
    assert note.is_visible()
    wrong = tab.locator("[aria-invalid]").evaluate_all("all => all.map((field) => field.name)")
    assert len(set(wrong)) == 1
    tab.get_by_role("alert").get_by_role("link").click()
    focused = tab.evaluate("document.activeElement.id")
    assert focused == (field.get_attribute("name") if wrong[0] != "schedule" else "schedule")
    assert tab.url.endswith(query)
    tab.problems.clear()  # the browser reports the status 400


def test_a_mistake_keeps_the_last_picture_faintly_and_what_is_no_number_is_one(tab, server) -> None:
    tab.goto(server)
    shown(tab)
    ranks = tab.get_by_label("Ranks", exact=True)
    ranks.focus()
    tab.keyboard.press("e")  # which has no value to the browser
    tab.get_by_role("alert", name="").wait_for()
    assert ranks.get_attribute("aria-invalid") == "true"
    assert tab.evaluate("getComputedStyle(view).opacity") == "0.35"
    assert tab.locator("#picture").is_visible()
    tab.keyboard.press("Backspace")
    settled(tab)
    assert tab.get_by_role("alert").count() == 0
    assert tab.evaluate("getComputedStyle(view).opacity") == "1"
    tab.problems.clear()  # the browser reports the status 400


def test_fields_that_a_plan_replaces_show_its_numbers_and_come_back(tab, server, tmp_path) -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=1024)
    plan.save(tmp_path / "vgg19.plan.json")
    tab.goto(server + "?num_batches=12&comm=latency")
    tab.get_by_label("Load a plan").set_input_files(tmp_path / "vgg19.plan.json")
    tab.locator("table", has_text=format_seconds(plan.step_s)).wait_for()
    expected = {
        "Ranks": str(len(plan.stages)),
        "Micro-batches": str(plan.micro_batches),
        "Forward": ", ".join(f"{stage.forward_s:.4g}" for stage in plan.stages),
        "Memory cap": "16 GB",
        "Group size": "",
    }
    for label, value in expected.items():
        field = tab.get_by_label(label, exact=True)
        assert (field.input_value(), field.is_disabled()) == (value, True)
    for label in ("Fused F and B", "Steps", "Communication", "gpipe"):
        assert tab.get_by_label(label, exact=True).is_enabled()
    assert f"the plan's own, {plan.schedule}" in tab.locator("#schedule-note").inner_text()
    assert "num_batches" not in tab.url
    tab.get_by_label("gpipe", exact=True).check()
    tab.locator("th", has_text="gpipe").wait_for()
    assert "plan=" in tab.url
    tab.get_by_label("Plan", exact=True).select_option("none")
    tab.locator("#num_batches:enabled").wait_for()
    assert tab.get_by_label("Micro-batches").input_value() == "8"
    tab.go_back()
    playwright.expect(tab.get_by_label("Ranks")).to_have_value(str(len(plan.stages)))


def test_going_back_undoes_one_change_and_not_one_letter(tab, server) -> None:
    tab.goto(server)
    field = tab.get_by_label("Micro-batches")
    for text in ("1", "12", "120"):
        field.fill(text)
        tab.wait_for_url(f"**num_batches={text}&**")
    tab.get_by_label("gpipe", exact=True).check()
    tab.wait_for_url("**schedule=gpipe**")
    settled(tab)
    assert tab.title() == "gpipe against 1f1b – hpgo"
    tab.go_back()
    playwright.expect(tab.get_by_label("gpipe", exact=True)).not_to_be_checked()
    playwright.expect(field).to_have_value("120")
    tab.go_back()
    playwright.expect(field).to_have_value("8")
    settled(tab)
    assert tab.title() == "1f1b – hpgo"


def test_the_address_is_copied_and_exports_are_named_for_what_they_hold(browser, server) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(server + "?schedule=1f1b&schedule=zb_h1")
    page.get_by_role("button", name="Copy address").click()
    page.get_by_role("status").filter(has_text="Address copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    with page.expect_download() as download:
        page.get_by_role("link", name="Perfetto trace").click()
    assert download.value.suggested_filename == "1f1b-against-zb_h1.json"
    context.close()


def test_on_a_phone_the_picture_is_on_the_first_screen_and_settings_open_and_close(browser, server) -> None:
    phone = browser.new_context(**PHONE)
    page = phone.new_page()
    page.goto(server)
    picture = shown(page)
    box = page.locator("#picture").bounding_box()
    assert 0 < box["y"] < box["y"] + box["height"] < 844
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    x, y = picture.tab.evaluate("window.hpgo.place(0, 0, 0.5)")
    canvas = page.frame_locator("#picture").locator("#canvas").bounding_box()
    page.touchscreen.tap(canvas["x"] + x, canvas["y"] + y)
    page.frame_locator("#picture").locator("#tip", has_text="F0: forward of micro-batch 0").wait_for()
    assert not page.get_by_label("Ranks").is_visible()
    page.get_by_text("Settings", exact=True).tap()
    page.get_by_label("Ranks").fill("3")
    page.keyboard.press("Escape")
    assert not page.get_by_label("Ranks").is_visible()
    assert page.evaluate("document.activeElement.textContent") == "Settings"
    page.wait_for_url("**num_stages=3**")
    settled(page)
    assert "3 ranks" in page.locator("#said").inner_text()
    phone.close()


def test_the_keyboard_alone_goes_from_the_fields_into_the_picture(tab, server) -> None:
    tab.goto(server)
    shown(tab)
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # past the fields
    reached = ""
    for _ in range(12):
        tab.keyboard.press("Tab")
        reached = tab.evaluate("document.activeElement.id")
        if reached == "picture" and shown(tab).tab.evaluate("document.activeElement.id") == "canvas":
            break
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none" or reached == "picture"
    assert reached == "picture"
    tab.keyboard.press("n")
    picture = shown(tab)
    assert picture.tab.locator("#tip").inner_text().startswith("rank 0: F0")
    tab.keyboard.press("Escape")
    assert not picture.tab.locator("#tip").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [{"viewport": {"width": 1400, "height": 900}}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_on_the_page(browser, server, scheme: str, screen) -> None:
    context = browser.new_context(color_scheme=scheme, **screen)
    page = context.new_page()
    for query in ("", "?schedule=1f1b&schedule=zb_v&p2p_time=0.25", "?forward_times=1,2&num_stages=4", "?schedule="):
        page.goto(server + query)
        if "forward" not in query and query != "?schedule=":
            shown(page)
        assert axe.found(page) == []
        for summary in page.locator("summary:visible").all():
            summary.click()
        assert axe.found(page) == []
    context.close()


def test_the_page_prints_its_table_and_a_light_picture(browser, server) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(server)
    picture = shown(page)
    picture.tab.evaluate("""() => addEventListener("beforeprint", () => { window.printed = {
        bubble: [...context.getImageData(...place(0, 3, 0.5).map((at) => at * ratio), 1, 20).data].slice(0, 80),
        pixels: canvas.width }; })""")
    page.pdf()
    printed = picture.tab.evaluate("printed")
    assert (0xCA, 0xCC, 0xCF) in {tuple(printed["bubble"][at : at + 3]) for at in range(0, 80, 4)}
    assert printed["pixels"] == 3 * 720
    page.emulate_media(media="print")
    assert page.locator("table").is_visible()
    assert page.locator("#picture").is_visible()
    assert not page.get_by_label("Ranks").is_visible()
    assert not page.get_by_role("link", name="SVG").is_visible()
    page.close()


def test_a_plan_is_loaded_in_the_page_and_drawn(tab, server, tmp_path) -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=1024)
    plan.save(tmp_path / "vgg19.plan.json")
    tab.goto(server)
    tab.get_by_label("Load a plan").set_input_files(tmp_path / "vgg19.plan.json")
    tab.locator("table", has_text=format_seconds(plan.step_s)).wait_for()
    assert "plan=" in tab.url
    assert tab.locator("select[name=plan] option:checked").inner_text() == "vgg19.plan.json"
    tab.reload()
    assert format_seconds(plan.step_s) in tab.locator("table").inner_text()
    (tmp_path / "no.json").write_text("{}")
    tab.get_by_label("Load a plan").set_input_files(tmp_path / "no.json")
    assert "`no.json` is not a plan" in tab.get_by_role("alert").inner_text()
    tab.problems.clear()  # the browser reports the status 400


def test_a_plan_from_the_command_line_can_be_chosen(tmp_path) -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=1024)
    plans = Plans()
    name = plans.add(plan.to_json().encode(), "mine.json")
    drawn = timelines(settings_of([("plan", name), ("schedule", "1f1b"), ("schedule", "gpipe")]), plans)
    assert [one.schedule for one in drawn] == ["1f1b", "gpipe"]


def test_the_interactive_picture_is_in_the_page_and_in_a_tab_of_its_own(tab, server) -> None:
    tab.goto(server + "?schedule=1f1b&schedule=gpipe&p2p_time=0.5")
    assert shown(tab).state("modes") == ["boxes", "boxes"]
    with tab.expect_popup() as popup:
        tab.get_by_role("link", name="tab of its own").click()
    picture = Picture(popup.value, popup.value.url)
    assert picture.state("modes") == ["boxes", "boxes"]
    picture.tab.close()


@pytest.mark.parametrize("ending", list(hpgo.draw.ENDINGS))
def test_every_format_is_exported(server, ending: str) -> None:
    status, body = fetched(f"{server}export{ending}?schedule=zb_h1&num_stages=2&num_batches=3")
    assert status == 200
    starts = {
        ".png": b"\x89PNG",
        ".pdf": b"%PDF",
        ".svg": b"<svg",
        ".html": b"<!doctype html>",
        ".json": b'{"displayTimeUnit',
    }
    assert body.startswith(starts.get(ending, b""))
    assert len(body) > 500


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("num_stages=0", "whole number from 1 on"),
        ("num_stages=", None),
        ("num_batches=1e9", "whole number from 1 on"),
        ("num_stages=1000&num_batches=1000000", "about 2,000,000,000 actions"),
        ("forward_times=-1", "numbers of seconds above zero"),
        ("forward_times=0", "numbers of seconds above zero"),
        ("forward_times=nan", "numbers of seconds above zero"),
        ("p2p_time=-1", "numbers of seconds, zero or more"),
        ("forward_times=,", "give seconds, or a unit as in 4ms: one number"),
        ("p2p_time=fast", "`Latency of a message` holds `fast`"),
        ("comm=stram", "did you mean `stream`"),
        ("schedule=1f1f", "did you mean `1f1b`"),
        ("schedule=dualpipe&num_stages=3", "it needs p even"),
        ("colour=red", "unknown field `colour`"),
        ("plan=0123", "holds no plan `0123`"),
        ("weight_bytes=much", "`much` is no size"),
        ("num_stages=<script>alert(1)</script>", "&lt;script&gt;"),
    ],
)
def test_bad_parameters_get_a_readable_answer(server, query: str, said: str | None) -> None:
    status, body = fetched(f"{server}?{query.replace('<', '%3C').replace('>', '%3E')}")
    assert status == (400 if said else 200)
    assert (said or "33 s") in body.decode()
    assert b"Traceback" not in body
    assert b"<script>alert" not in body


def test_other_hosts_and_paths_are_refused(server) -> None:
    assert fetched(server, {"Host": "evil.example"})[0] == 400
    assert fetched(server + "../../etc/passwd")[0] == 404
    assert fetched(server + "export.bmp")[0] == 404


def test_an_empty_host_is_refused() -> None:
    from click.testing import CliRunner

    from hpgo.cli.serve import command

    failed = CliRunner().invoke(command, ["--host", " ", "--no-open"])
    assert isinstance(failed.exception, hpgo.HpgoError)
    assert "`--host` is empty" in failed.exception.message


def test_without_its_extra_the_command_says_in_one_line_how_to_install_it() -> None:
    script = "import sys; sys.modules['starlette'] = None; from hpgo.cli.entry import hpgo; hpgo()"
    run = subprocess.run([sys.executable, "-c", script, "serve"], check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "error: the page needs starlette and uvicorn, which are not installed",
        "hint: pip install 'hpgo[serve]'",
    ]


def test_a_port_in_use_is_an_error_with_a_way_out(server) -> None:
    port = server.rstrip("/").rpartition(":")[2]
    run = subprocess.run(
        [sys.executable, "-m", "hpgo", "serve", "--port", port, "--no-open"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert f"error: can't listen on 127.0.0.1 port {port}" in run.stderr
    assert "hint: choose another with `--port`" in run.stderr
