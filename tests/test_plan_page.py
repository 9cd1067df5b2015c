"""The plan's page, driven in a headless browser as a reader would: looking, changing, searching, sweeping."""

from __future__ import annotations

import json
import re
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
from axe import found
from browsing import DESK, PATIENCE_MS, Picture, watched
from soak import Served

import hpgo
from hpgo.draw import palette
from hpgo.page.planned.facts import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BERT = {"model": "bert-48", "cluster": "dapple-a", "batch": "64"}
OPTIMUM = BERT | {"stages": "0-31@0-7,32-52@8-15", "micro_batch": "16", "schedule": "eager_1f1b", "recompute": "no"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "bert.plan.json"
    hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64).save(path)
    return path


@pytest.fixture(scope="module")
def served(planned) -> Iterator[Served]:
    server = Served(str(planned), "--time-limit", "60")
    yield server
    assert server.stop() == 130


def at_plan(page, served, items: dict[str, str]):
    """`page` at the plan of an address, with the picture of its step."""
    page.goto(f"http://{served.host}/plan?{urlencode(items)}")
    page.locator("#plan").wait_for(state="visible")
    page.locator("#step svg").wait_for()
    return page


@pytest.fixture
def opened(tab, served):
    return lambda **items: at_plan(tab, served, items)


@pytest.fixture(scope="module")
def _seen(browser, served):
    return at_plan(watched(browser.new_page(**DESK)), served, OPTIMUM)


@pytest.fixture
def seen(_seen):
    """The page of one plan, for tests that only look; nothing is lit when they begin, nor may it be when they end."""
    yield _seen
    _seen.mouse.move(3, 400)
    _seen.keyboard.press("Escape")
    assert _seen.locator(".on").count() == 0
    assert not _seen.problems


def address(tab) -> dict[str, str]:
    return {name: texts[0] for name, texts in parse_qs(urlsplit(tab.url).query).items()}


def moved_to(tab, **items: str) -> None:
    """Waits until the address says that, and all of the page shows it."""
    words = ["".join(re.escape(mark) for mark in urlencode({name: text})) for name, text in items.items()]
    tab.wait_for_url(re.compile("".join(f"(?=.*{each}(&|$))" for each in words)))
    tab.locator("#columns:not([aria-busy=true])").wait_for()


def priced(stages, **options) -> hpgo.Plan:
    asked = {"global_batch_size": 64, "pipeline_micro_batch_size": 16, **options}
    return hpgo.evaluate(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), stages, **asked)


def value(tab, name: str) -> str:
    return (
        tab.locator(".figure", has=tab.locator("dt", has_text=re.compile(f"^{name}$"))).locator(".value").inner_text()
    )


# --- looking


def test_a_plan_shows_its_layers_stages_devices_memory_time_and_words(seen, planned) -> None:
    tab, plan = seen, hpgo.Plan.read(planned)
    assert tab.locator(".layer").count() == 53
    assert tab.locator(".band").all_inner_texts() == ["stage 0: 32 layers × 8", "stage 1: 21 layers × 8"]
    assert tab.locator(".device").all_inner_texts() == ["0"] * 8 + ["1"] * 8
    assert "62.9 MB in 20.1 ms at 3.125 GB/s, between nodes" in tab.locator(".links").inner_text()
    assert tab.locator("#memory .amount").all_inner_texts() == ["6.57 GB of 16 GB", "4.15 GB of 16 GB"]
    assert plan.limit in tab.locator("#time").inner_text()
    assert "eager 1F1B, 4 micro-batches of 16 samples" in tab.locator("#words").inner_text()
    drawn = tab.locator("#step [data-stage]").evaluate_all("all => all.map((one) => one.dataset.batches)")
    assert drawn == ["0 1 2 3"] * 4  # forward and backward in 2 stages
    assert value(tab, "step") == seconds(plan.step_s)


def test_widths_are_times_and_heights_are_memory(seen) -> None:
    profile = hpgo.read_profile("bert-48")
    boxes = seen.locator(".layer").evaluate_all("all => all.map((one) => one.getBoundingClientRect().toJSON())")
    times = [layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers]
    longest = max(times)
    for box, time_s in zip(boxes, times, strict=True):
        if time_s > longest / 10:
            assert box["width"] == pytest.approx(boxes[10]["width"] * time_s / times[10], rel=0.05)
    # Three micro-batches in flight in stage 0, one in stage 1.
    assert boxes[10]["height"] / boxes[40]["height"] == pytest.approx(214.5 / 205.9, rel=0.05)


def test_a_layer_far_taller_than_the_others_is_cut_and_says_so(seen) -> None:
    heights = seen.locator(".layer").evaluate_all("all => all.map((one) => one.clientHeight)")
    assert max(heights) == 131
    assert seen.locator(".layer.gapped").count() == 1
    assert sorted(heights)[len(heights) // 2] > 100
    assert "up to 215 MB a layer; a bar with a gap holds more, up to 522 MB" in seen.locator("#scale").inner_text()


def test_stages_memory_and_shares_of_time_have_the_patterns_of_the_pictures(seen) -> None:
    styles = {"#bands .is-stage-1": "stage-1", ".device.is-stage-1": "stage-1", "#memory .is-gradients": "gradients"}
    for selector, style in (styles | {"#time .is-B": "B", "#time .is-waits": "waits"}).items():
        painted = seen.locator(selector).first.evaluate("one => getComputedStyle(one).background")
        look = palette.look(style)
        assert quote(palette.HATCHES[look.hatch]) in painted
        assert f"rgb({', '.join(str(int(look.fill[0][at : at + 2], 16)) for at in (1, 3, 5))})" in painted


def lit(tab) -> dict[str, list[str]]:
    return {
        "layers": [str(tab.locator(".layer.on").count())],
        "stages": tab.locator(".band.on").evaluate_all("all => all.map((one) => one.dataset.stages)"),
        "devices": tab.locator(".device.on").evaluate_all("all => all.map((one) => one.dataset.device)"),
        "actions": sorted(
            set(tab.locator("#step [data-stage].on").evaluate_all("all => all.map((one) => one.dataset.stage)"))
        ),
    }


SECOND = {"layers": ["21"], "stages": ["1"], "devices": [str(at) for at in range(8, 16)], "actions": ["1"]}


@pytest.mark.parametrize(
    "selector", [".layer >> nth=40", ".band >> nth=1", ".device >> nth=9", "#memory .strip >> nth=1"]
)
def test_pointing_at_a_layer_stage_device_or_bar_lights_it_everywhere(seen, selector) -> None:
    tab = seen
    tab.locator(selector).hover()
    assert lit(tab) == SECOND
    assert tab.locator("#tip").is_visible()
    tab.mouse.move(3, 400)
    assert tab.locator(".on").count() == 0
    tab.locator(selector).focus()
    assert lit(tab) == SECOND
    tab.keyboard.press("Escape")
    assert tab.locator(".on").count() == 0
    assert tab.locator("#tip").is_hidden()


_INKS = """() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data];
  };
  const ground = (one) => {
    const own = rgba(getComputedStyle(one).backgroundColor);
    return own[3] ? own : ground(one.parentElement);
  };
  const picture = document.getElementById("step").shadowRoot, paper = ground(document.getElementById("step"));
  const box = ({ parentElement }) => {
    const kind = parentElement.classList[1].replace("on-", ".");
    const path = picture.querySelector(`${kind} [data-stage="${parentElement.dataset.of}"]`);
    const fill = rgba(getComputedStyle(parentElement).stroke), opacity = Number(getComputedStyle(path).fillOpacity);
    return fill.map((channel, at) => opacity * channel + (1 - opacity) * paper[at]);
  };
  const words = document.querySelectorAll(".band, .device, .chip, #figures dd, #figures dt, #scale, .bar :enabled");
  const numbers = picture.querySelectorAll(".number text");
  return [
    ...[...words].map((one) => [one.classList[0] ?? one.tagName, rgba(getComputedStyle(one).color), ground(one)]),
    ...[...numbers].map((one) => ["number", rgba(getComputedStyle(one).fill), box(one)]),
  ];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_on_pale_boxes_is_read_as_well(seen, scheme: str) -> None:
    def light(channel: int) -> float:
        value = channel / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    def luminance(colour: list[int]) -> float:
        return sum(weight * light(channel) for weight, channel in zip((0.2126, 0.7152, 0.0722), colour, strict=False))

    tab = seen
    tab.emulate_media(color_scheme=scheme)
    tab.locator(".band >> nth=1").hover()
    tab.evaluate("() => Promise.all(document.getAnimations().map((one) => one.finished))")
    inks = tab.evaluate(_INKS)
    assert {"number", "band", "device", "chip"} <= {name for name, _, _ in inks}
    for name, ink, ground in inks:
        dim, bright = sorted(map(luminance, (ink, ground)))
        assert (bright + 0.05) / (dim + 0.05) > 4.5, f"{name}: {ink} on {ground}"


def at_action(tab, stage: int, batch: int) -> tuple[float, float]:
    """Where on the screen the forward pass of a micro-batch is, by the picture itself."""
    x, y = tab.locator(f"#step .F [data-stage='{stage}']").evaluate(
        """(path, batch) => {
          const at = path.dataset.batches.split(" ").indexOf(`${batch}`);
          const box = path.getAttribute("d").split("z")[at];
          const [, x, y, width, height] = box.match(/M(.+) (.+)h(.+)v(.+)h/).map(Number);
          const { x: left, y: top } = new DOMPoint(x + width / 2, y + height / 3).matrixTransform(path.getScreenCTM());
          return [left, top];
        }""",
        batch,
    )
    return x, y


def test_pointing_at_an_action_lights_its_stage_and_its_micro_batch(seen) -> None:
    tab = seen
    tab.mouse.move(*at_action(tab, stage=1, batch=2))
    assert lit(tab) | {"actions": ["1"]} == SECOND
    assert "of micro-batch 2" in tab.locator("#tip").inner_text()
    near = tab.locator("#step .near").evaluate_all("all => all.map((one) => one.dataset.batch)")
    assert near == ["2"] * 4
    assert tab.locator("#step #near ~ .number").count() == 4  # numbers of boxes, of both kinds, stay above what is lit
    tab.locator("#step").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert lit(tab) | {"actions": ["1"]} == SECOND


def test_pointing_at_idle_time_lights_the_row_and_pales_that_of_others(seen) -> None:
    tab = seen
    idle = tab.locator("#step .idle-fill [data-rank='1']").bounding_box()
    tab.mouse.move(idle["x"] + idle["width"] / 2, idle["y"] + idle["height"] / 2)
    assert lit(tab) == SECOND
    opacities = tab.locator("#step :is(.idle-fill, .idle-drain, .idle-dependency) [data-rank]").evaluate_all(
        "all => all.map((one) => [one.dataset.rank, getComputedStyle(one).fillOpacity])"
    )
    assert {(rank, opacity == "1") for rank, opacity in opacities} == {("0", False), ("1", True)}


def test_a_tap_on_a_phone_shows_what_pointing_shows(phone, served) -> None:
    at_plan(phone, served, OPTIMUM)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.locator("#row").bounding_box()["y"] < 844 - 96  # the first screen has the model on it
    assert phone.locator("#step .t-rank text").all_text_contents() == ["stage 0", "stage 1"]
    phone.locator(".device").nth(9).tap()
    assert lit(phone) == SECOND


@pytest.mark.parametrize("items", [{}, OPTIMUM, OPTIMUM | {"stages": "0-1@0,2-52@1"}], ids=["none", "fits", "lacks"])
def test_axe_finds_nothing(tab, served, items) -> None:
    tab.goto(f"http://{served.host}/plan?{urlencode(items)}")
    if not items:
        tab.locator("#empty").wait_for()
        assert found(tab) == []
        return
    tab.locator("#step svg").wait_for()
    tab.locator(".figure.good").wait_for()  # the optimum
    tab.locator(".layer").nth(3).focus()
    assert tab.locator("#tip").is_visible()
    assert found(tab) == []
    tab.keyboard.press("Escape")
    assert found(tab) == []


def test_view_writes_the_page_of_a_plan_as_one_file_to_look_at(tab, planned, tmp_path) -> None:
    from hpgo.page.planned.document import alone

    path = tmp_path / "bert.html"
    path.write_bytes(alone(hpgo.Plan.read(planned)))
    tab.goto(path.as_uri())
    tab.locator(".layer").nth(40).hover()
    assert lit(tab) == SECOND
    assert tab.locator(".cut").count() == 0
    assert tab.locator("#schedule").is_disabled()
    tab.get_by_role("button", name="Zoom and pan").click()
    tab.frame_locator("#timeline iframe").locator("#status", has_text="in view").wait_for()
    assert found(tab) == []


def test_a_plan_that_was_saved_without_its_profile_can_be_looked_at(tab, planned, served) -> None:
    lean = hpgo.Plan.read(planned).to_json(embed=False).encode()
    connection = HTTPConnection(served.host)
    connection.request("POST", "/plans?name=lean.json", lean)
    name = connection.getresponse().read().decode()
    connection.close()
    tab.goto(f"http://{served.host}/plan?plan={name}")
    tab.locator("#step svg").wait_for()
    assert tab.locator(".band").count() == 2
    assert tab.locator("#schedule").is_disabled()
    assert "can't be changed" in tab.locator("#stage-bar").inner_text()


# --- changing


def test_a_cut_is_moved_by_arrow_keys_and_priced_by_the_library(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.get_by_role("slider").focus()
    tab.keyboard.press("ArrowLeft")
    moved_to(tab, stages="0-30@0-7,31-52@8-15")
    assert value(tab, "step") == seconds(priced([(31, range(8)), (22, range(8, 16))]).step_s)
    assert tab.evaluate("document.activeElement.getAttribute('aria-valuenow')") == "31"
    tab.keyboard.press("PageUp")
    moved_to(tab, stages="0-35@0-7,36-52@8-15")


def test_a_cut_is_dragged_and_escape_takes_the_drag_back(opened) -> None:
    tab = opened(**OPTIMUM)
    row, cut = tab.locator("#row").bounding_box(), tab.get_by_role("slider").bounding_box()

    def drag() -> None:
        tab.mouse.move(cut["x"] + cut["width"] / 2, cut["y"] + 30)
        tab.mouse.down()
        tab.mouse.move(row["x"] + row["width"] / 2, cut["y"] + 30, steps=5)
        tab.locator(".band", has_text="stage 1: 25 layers").wait_for()

    drag()
    tab.keyboard.press("Escape")
    tab.locator(".band", has_text="stage 1: 21 layers").wait_for()
    tab.mouse.up()
    assert address(tab) == OPTIMUM
    drag()
    tab.mouse.up()
    moved_to(tab, stages="0-27@0-7,28-52@8-15")


def test_devices_are_given_and_taken_with_mouse_and_keyboard(opened) -> None:
    tab = opened(**OPTIMUM | {"micro_batch": "32"})
    tab.get_by_role("button", name="Choose devices").click()
    tab.locator(".device").nth(0).focus()
    for key in [*["ArrowRight"] * 8, "Enter"]:
        tab.keyboard.press(key)
    moved_to(tab, stages="0-31@0-8,32-52@9-15")
    assert tab.evaluate("document.activeElement.dataset.device") == "8"
    assert tab.locator(".device[aria-pressed=true]").count() == 9
    tab.locator(".device").nth(11).click(modifiers=["Shift"])
    moved_to(tab, stages="0-31@0-11,32-52@12-15")
    tab.locator(".band").nth(1).click()
    tab.locator(".device").nth(3).click()
    moved_to(tab, stages="0-31@0-2+4-11,32-52@3+12-15")
    step = priced([(32, [0, 1, 2, *range(4, 12)]), (21, [3, *range(12, 16)])], pipeline_micro_batch_size=32).step_s
    assert value(tab, "step") == seconds(step)
    tab.locator(".device").nth(0).click()
    moved_to(tab, stages="0-31@1-2+4-11,32-52@0+3+12-15")
    tab.locator(".device").nth(11).click(modifiers=["Shift"])
    tab.get_by_role("alert").filter(has_text="stage 0 would have no device").wait_for()
    tab.keyboard.press("Escape")
    assert tab.locator(".device[aria-pressed]").count() == 0


def test_replicas_and_stages_come_and_go(opened) -> None:
    tab = opened(**OPTIMUM | {"micro_batch": "32"})
    tab.get_by_role("button", name="One replica fewer").click()
    moved_to(tab, stages="0-31@0-6,32-52@8-15")
    assert tab.locator(".device.idle").count() == 1
    assert value(tab, "step") == seconds(
        priced([(32, range(7)), (21, range(8, 16))], pipeline_micro_batch_size=32).step_s
    )
    tab.locator(".band").nth(1).click()
    tab.get_by_role("button", name="One replica more").click()
    moved_to(tab, stages="0-31@0-6,32-52@7-15")
    tab.get_by_role("button", name="Split this stage").click()
    moved_to(tab, stages="0-31@0-6,32-42@7-11,43-52@12-15")
    tab.get_by_role("button", name="Join this stage").click()
    moved_to(tab, stages="0-31@0-6,32-52@7-15")


def test_schedule_micro_batch_and_recomputation_are_priced_and_the_optimum_stands_beside(opened) -> None:
    tab, stages = opened(**OPTIMUM), [(32, range(8)), (21, range(8, 16))]
    tab.locator("#schedule").select_option("gpipe")
    moved_to(tab, schedule="gpipe")
    assert value(tab, "step") == seconds(priced(stages, schedule="gpipe").step_s)
    tab.locator("#micro_batch").select_option("32")
    moved_to(tab, micro_batch="32")
    tab.locator("#recompute").select_option("yes")
    moved_to(tab, recompute="yes")
    mine = priced(stages, schedule="gpipe", pipeline_micro_batch_size=32, recompute=True)
    assert value(tab, "step") == seconds(mine.step_s)
    best = hpgo.plan(
        hpgo.read_profile("bert-48"),
        hpgo.Cluster.preset("dapple-a"),
        global_batch_size=64,
        schedule="gpipe",
        recompute=True,
    )
    tab.locator(".figure", has_text=f"{seconds(best.step_s)}").get_by_role("button", name="Make it the plan").click()
    moved_to(tab, micro_batch=str(best.pipeline_micro_batch_size))
    assert value(tab, "step") == value(tab, "optimum") == seconds(best.step_s)


def test_undo_redo_and_the_address_lead_to_the_same_plans(opened, browser) -> None:
    tab = opened(**OPTIMUM)
    assert tab.locator("#undo").is_disabled()
    tab.get_by_role("slider").focus()
    for count in (31, 30):
        tab.keyboard.press("ArrowLeft")
        moved_to(tab, stages=f"0-{count - 1}@0-7,{count}-52@8-15")
    shown = value(tab, "step")
    tab.keyboard.press("Control+z")
    tab.locator(".band", has_text="stage 0: 31 layers").wait_for()
    tab.locator("#undo").click()
    tab.locator(".band", has_text="stage 0: 32 layers").wait_for()
    assert tab.locator("#undo").is_disabled()
    tab.keyboard.press("Control+Shift+z")
    tab.locator("#redo").click()
    tab.locator(".band", has_text="stage 0: 30 layers").wait_for()
    assert tab.locator("#redo").is_disabled()
    other = browser.new_page()
    other.goto(tab.url)
    other.locator("#figures .value").first.wait_for()
    assert value(other, "step") == shown
    other.close()


def test_what_cannot_be_run_is_said_beside_its_control_and_a_plan_for_it_can_be_found(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.locator("#micro_batch").select_option("4")
    beside = tab.get_by_role("alert").filter(has_text="cannot split a micro-batch of 4 over 8 replicas")
    beside.wait_for()
    assert tab.locator("#micro_batch[aria-invalid]").count() == 1
    assert address(tab) == OPTIMUM
    tab.locator("#schedule").select_option("sequential")
    moved_to(tab, schedule="sequential")
    assert beside.count() == 0
    tab.locator("#micro_batch").select_option("4")
    beside.wait_for()
    tab.problems.clear()  # the browser reports the status 400
    tab.get_by_role("button", name="Find a plan for it").click()
    tab.locator("#figures .note", has_text="; this plan").wait_for()
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    best = hpgo.plan(profile, cluster, global_batch_size=64, schedule="sequential")
    assert value(tab, "step") == seconds(best.step_s)


def test_another_schedule_keeps_the_devices_and_cuts_the_stages_that_it_runs_on_them(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.locator("#schedule").select_option("interleaved")
    moved_to(tab, schedule="interleaved", stages="0-17@0-7,18-27@8-15,28-41@0-7,42-52@8-15")
    rows = [(18, range(8)), (10, range(8, 16)), (14, range(8)), (11, range(8, 16))]
    assert value(tab, "step") == seconds(priced(rows, schedule="interleaved").step_s)
    assert tab.locator(".device").first.inner_text() == "0·2"
    tab.locator("#schedule").select_option("1f1b")
    moved_to(tab, schedule="1f1b", stages="0-31@0-7,32-52@8-15")


def test_an_edit_keeps_what_is_looked_at_closely(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.get_by_role("button", name="Zoom and pan").click()
    tab.frame_locator("#timeline iframe").locator("#status", has_text="in view").wait_for()
    before = tab.locator("#timeline iframe").element_handle()
    before.content_frame().evaluate("window.hpgo.zoomTo(0.1, 0.2)")
    tab.get_by_role("slider").focus()
    tab.keyboard.press("ArrowLeft")
    tab.wait_for_function("one => !one.isConnected", arg=before)
    tab.frame_locator("#timeline iframe").locator("#status", has_text="in view").wait_for()
    after = Picture(tab.locator("#timeline iframe").element_handle().content_frame())
    assert [after.state("view")[name] for name in ("t0", "t1")] == [0.1, 0.2]


def test_what_does_not_fit_is_priced_and_said_where_it_lacks(opened) -> None:
    tab = opened(**OPTIMUM | {"stages": "0-1@0,2-52@1", "schedule": "gpipe"})
    plan = priced([(2, [0]), (51, [1])], schedule="gpipe")
    assert not plan.fits
    lacks = tab.locator("#memory .amount.bad").inner_text()
    assert lacks == f"lacks {hpgo.base.units.format_bytes(float(f'{plan.shortfall_bytes:.3g}'))}"
    assert tab.locator(".figure.bad", has_text="fullest device").count() == 1
    assert "does not fit in memory" in tab.locator("#headline").inner_text()


def test_the_plan_is_saved_as_a_file_that_hpgo_reads(opened, tmp_path) -> None:
    tab = opened(**OPTIMUM)
    tab.get_by_role("slider").focus()
    tab.keyboard.press("ArrowLeft")
    moved_to(tab, stages="0-30@0-7,31-52@8-15")
    with tab.expect_download() as taken:
        tab.get_by_text("Save plan.json").click()
    taken.value.save_as(tmp_path / "plan.json")
    saved = hpgo.Plan.read(tmp_path / "plan.json")
    assert saved.step_s == saved.reevaluate().step_s == priced([(31, range(8)), (22, range(8, 16))]).step_s


def test_an_alternative_is_made_the_plan(opened, planned) -> None:
    tab = opened(plan=_name_of(planned))
    tab.get_by_role("button", name="Make data parallelism the plan").click()
    moved_to(tab, stages="0-52@0-15")
    straight = hpgo.Plan.read(planned).alternative("data parallelism")
    assert value(tab, "step") == seconds(straight.step_s)


def _name_of(plan: Path) -> str:
    import hashlib

    return hashlib.sha256(plan.read_bytes()).hexdigest()[:12]


def test_the_plan_is_taken_to_the_page_that_compares_schedules_and_back(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.get_by_role("button", name="Compare schedules").click()
    tab.wait_for_url(re.compile(r"/\?plan=\w+&schedule=eager_1f1b"))
    assert "837" in tab.locator("#result").inner_text()
    tab.get_by_role("link", name="Plan", exact=True).click()
    tab.locator("#empty").wait_for()


# --- planning


def test_a_question_is_answered_on_the_page(tab, served) -> None:
    tab.goto(f"http://{served.host}/plan")
    tab.locator("#model").select_option("vgg-19")
    tab.locator("#cluster").fill("dapple-c")
    tab.locator("#batch").fill("2048")
    tab.get_by_role("button", name="Find the best plan").click()
    tab.locator("#step svg").wait_for()
    best = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
    assert value(tab, "step") == value(tab, "optimum") == seconds(best.step_s)
    assert address(tab)["stages"] == "0-21@0-14,22-25@15"
    assert tab.locator("#undo").is_disabled()


def test_a_question_without_an_answer_says_so_beside_its_field(tab, served) -> None:
    tab.goto(f"http://{served.host}/plan?{urlencode(BERT | {'cluster': 'dapple-x'})}")
    tab.get_by_role("alert").filter(has_text="there is no cluster `dapple-x`").wait_for()
    assert tab.locator("#cluster[aria-invalid]").count() == 1
    tab.goto(f"http://{served.host}/plan?{urlencode(BERT | {'model': 'nothing'})}")
    tab.get_by_role("alert").filter(has_text="there is no built-in model `nothing`").wait_for()
    tab.problems.clear()  # the browser reports the status 400


def test_a_search_shows_bound_and_gap_and_stops_with_the_best_so_far(tab, served) -> None:
    hard = {"model": "amoebanet-36", "cluster": "dapple-b:128", "batch": "12288", "recompute": "auto"}
    tab.goto(f"http://{served.host}/plan?{urlencode(hard | {'schedule': 'auto'})}")
    tab.locator("#progress p", has_text="best ").wait_for()
    tab.locator("#halt").click()
    tab.locator("#step svg").wait_for()
    assert tab.locator("#progress").is_hidden()
    assert "the search was stopped" in tab.locator("#words").inner_text()


def test_a_profile_and_a_cluster_are_loaded_as_files(tab, served, tmp_path) -> None:
    profile, cluster = tmp_path / "tiny.yaml", tmp_path / "two.yaml"
    profile.write_text(_tiny())
    cluster.write_text(_two())
    tab.goto(f"http://{served.host}/plan")
    tab.get_by_text("Files and memory").click()
    for path, field in ((profile, "model"), (cluster, "cluster")):
        tab.locator("#file").set_input_files(path)
        tab.get_by_role("status").filter(has_text=f"{path.name} is loaded").wait_for(state="attached")
        assert tab.locator(f"#{field}").count() == 1
    tab.locator("#batch").fill("8")
    tab.get_by_role("button", name="Find the best plan").click()
    tab.locator("#step svg").wait_for()
    assert tab.locator(".layer").count() == 2
    assert tab.locator("#headline").inner_text().startswith("tiny on two ")
    broken = tmp_path / "broken.yaml"
    broken.write_text("nothing: here\n")
    tab.locator("#file").set_input_files(broken)
    tab.get_by_role("alert").filter(has_text="broken.yaml is neither").wait_for()
    tab.problems.clear()  # the browser reports the status 400


def _tiny() -> str:
    layers = "".join(
        f"  - {{id: l{at}, forward_s: 0.01, backward_s: 0.02, activation_bytes: 1e6, parameter_bytes: 4e6}}\n"
        for at in range(2)
    )
    return f"hpgo_profile: 1\nname: tiny\nbatch_sizes: [1]\nlayers:\n{layers}"


def _two() -> str:
    return hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10, name="two").yaml()


def test_a_sweep_has_a_plan_behind_each_point(opened) -> None:
    tab = opened(**OPTIMUM)
    tab.get_by_label("Values, with commas").fill("32, 128")
    tab.get_by_role("button", name="Sweep").click()
    tab.locator("#sweep circle").nth(1).wait_for()
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    steps = [seconds(hpgo.plan(profile, cluster, global_batch_size=size).step_s) for size in (32, 128)]
    assert [row.split("\t")[1] for row in tab.locator("#sweep tbody tr").all_inner_texts()] == steps
    tab.locator("#sweep a").nth(1).click()
    moved_to(tab, batch="128")
    assert value(tab, "step") == steps[1]


def test_the_question_of_a_plan_file_can_be_swept_too(opened, planned) -> None:
    tab = opened(plan=_name_of(planned))
    assert address(tab) == {"plan": _name_of(planned)}
    tab.locator("#sweep-over").select_option("devices")
    tab.get_by_label("Values, with commas").fill("4, 8, 99")
    tab.get_by_role("button", name="Sweep").click()
    tab.get_by_text("has 16 devices, not 99").wait_for()
    fewer = hpgo.Plan.read(planned).replan(8)
    tab.get_by_role("button", name="Make the plan for 8 the plan").click()
    moved_to(tab, devices="8")
    assert value(tab, "step") == seconds(fewer.step_s)
    assert tab.locator(".device").count() == 8


# --- what the server refuses


def test_addresses_that_make_no_sense_are_refused_in_words_of_the_library(served) -> None:
    for items, said in (
        ({}, "the address has no model"),
        (BERT | {"stages": "x"}, "stage 0 is `x`"),
        (BERT | {"stages": "0-9999999@0"}, "which is not a range of numbers"),
        (BERT | {"stages": "0-53@0"}, "stage 0 has layer 53"),
        (BERT | {"batch": "-1"}, "`batch` is `-1`"),
        (BERT | {"fields": "1"}, "unknown field `fields`"),
        (BERT | {"cluster": "h100:999999999"}, "nodes is 999999999"),
        ({"plan": "nothing"}, "holds no plan `nothing`"),
    ):
        status, body = served.ask(f"/plan/facts.json?{urlencode(items)}")
        assert status == 400
        assert said in json.loads(body)["error"]["message"], body
    assert served.ask("/plan/secrets.txt")[0] == 404


def test_pages_of_other_sites_get_nothing_and_a_stop_needs_the_name_of_its_search(served) -> None:
    connection = HTTPConnection(served.host)
    for method, path in (
        ("GET", f"/plan/facts.json?{urlencode(OPTIMUM)}"),
        ("POST", "/plan/stop?search=x"),
        ("POST", "/plan/files?kind=profile"),
    ):
        connection.request(method, path, headers={"Origin": "http://evil.example"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 403
    connection.request("POST", "/plan/stop?search=x")
    assert connection.getresponse().status == 404
    connection.close()


def test_a_search_that_nobody_waits_for_is_ended(served) -> None:
    hard = {"model": "amoebanet-36", "cluster": "h100:16", "batch": "4096", "recompute": "auto", "schedule": "auto"}
    served.abandon(f"/plan/search?{urlencode(hard)}", after_s=1.0)
    until_s = time.monotonic() + PATIENCE_MS / 1000
    while served.works_on_large_requests():
        assert time.monotonic() < until_s
        time.sleep(0.05)
