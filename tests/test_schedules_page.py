"""`hpgo serve`'s page of schedules, driven in a headless browser as a reader would."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request

import axe
import pytest
from browsing import Picture, playwright
from soak import Served

import hpgo
import hpgo.draw
from hpgo.base.units import format_seconds
from hpgo.page.settings import Plans, settings_of, timelines


@pytest.fixture(scope="module")
def server():
    """Where `hpgo serve` listens, on a free port."""
    served = Served("--time-limit", "300")
    yield f"http://{served.host}/"
    assert served.stop() == 130


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
    return Picture(tab.locator("#picture").element_handle().content_frame())


def test_the_page_draws_as_fields_change_and_the_address_carries_them(tab, browser, server) -> None:
    tab.goto(server)
    assert "33 s" in tab.locator("#words table").inner_text()
    tab.get_by_label("Micro-batches").fill("12")
    tab.wait_for_url("**num_batches=12**")
    tab.get_by_label("zb_h1").check()
    tab.wait_for_url("**zb_h1**")
    settled(tab)
    assert "num_batches=12" in tab.url
    table = tab.locator("#words table").inner_text()
    assert "45 s" in table
    assert "zb_h1" in table
    again = browser.new_page()
    again.goto(tab.url)
    assert again.locator("#words table").inner_text() == table
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
    page.wait_for_url("**num_stages=2**")  # and for what it loads
    assert "27 s" in page.locator("#words table").inner_text()
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
        (
            "schedule=interleaved&virtual_stages_per_rank=1",
            "Virtual stages per rank",
            "leave `Virtual stages per rank` out",
        ),
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


def test_an_edit_keeps_what_is_looked_at_closely_and_what_was_switched(tab, server) -> None:
    tab.goto(server + "?p2p_time=0.5")
    picture = shown(tab)
    picture.tab.evaluate("window.hpgo.zoomTo(3, 8)")
    picture.tab.locator("#bubbles").click()
    tab.get_by_label("Micro-batches").fill("12")
    tab.wait_for_url("**num_batches=12**")
    changed = shown(tab)
    assert changed.state("visible") > 0
    assert changed.tab.evaluate("document.title") != ""
    assert [changed.state("view")[name] for name in ("t0", "t1")] == [3, 8]
    assert changed.state("show")["bubbles"] is False
    changed.tab.evaluate("window.hpgo.zoomTo(0, 1e9)")
    tab.get_by_label("Micro-batches").fill("4")
    tab.wait_for_url("**num_batches=4**")
    assert shown(tab).state("view")["t0"] == 0


def test_the_address_is_copied_and_exports_are_named_for_what_they_hold(tab, server) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.goto(server + "?schedule=1f1b&schedule=zb_h1")
    tab.get_by_role("button", name="Copy address").click()
    tab.get_by_role("status").filter(has_text="Address copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == tab.url
    with tab.expect_download() as download:
        tab.get_by_role("link", name="Perfetto trace").click()
    assert download.value.suggested_filename == "1f1b-against-zb_h1.json"


def test_on_a_phone_the_picture_is_on_the_first_screen_and_settings_open_and_close(phone, server) -> None:
    phone.goto(server)
    picture = shown(phone)
    box = phone.locator("#picture").bounding_box()
    assert 0 < box["y"] < box["y"] + box["height"] < 844
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    x, y = picture.place(0, 0, 0.5)
    canvas = phone.frame_locator("#picture").locator("#canvas").bounding_box()
    phone.touchscreen.tap(canvas["x"] + x, canvas["y"] + y)
    phone.frame_locator("#picture").locator("#tip", has_text="F0: forward of micro-batch 0").wait_for()
    assert not phone.get_by_label("Ranks").is_visible()
    phone.get_by_text("Settings", exact=True).tap()
    phone.get_by_label("Ranks").fill("3")
    phone.keyboard.press("Escape")
    assert not phone.get_by_label("Ranks").is_visible()
    assert phone.evaluate("document.activeElement.textContent") == "Settings"
    phone.wait_for_url("**num_stages=3**")
    settled(phone)
    assert "3 ranks" in phone.locator("#said").inner_text()


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


def test_a_tall_window_has_the_figures_of_each_rank_below_the_picture(browser, server) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 2000})
    page.goto(f"{server}?schedule=1f1b&schedule=zb_h1&activation_bytes=1GB")
    picture = shown(page)
    # All rows have their largest height, and what is below them begins at once.
    assert picture.state("view")["rowPx"] > 75
    view, ranks = (page.locator(name).bounding_box() for name in ("#view", "#ranks"))
    assert view["y"] + view["height"] < ranks["y"] < ranks["y"] + ranks["height"] < 2000
    for number, name in enumerate(("1f1b", "zb_h1")):
        measures = hpgo.simulate(hpgo.schedule(name, ranks=4, micro_batches=8)).measures
        table = page.locator("#ranks table").nth(number)
        assert table.locator("caption").inner_text() == name
        busy = table.locator("tr td:nth-child(2)").all_inner_texts()
        assert busy == [format_seconds(busy_s) for busy_s in measures.busy_s]
    assert "peak memory" in page.locator("#ranks").inner_text()
    assert axe.found(page) == []
    page.goto(f"{server}?num_stages=65&num_batches=65")
    shown(page)
    assert not page.locator("#ranks").count()
    page.close()


@pytest.mark.parametrize("screen", ["tab", "phone"])
def test_axe_finds_nothing_on_the_page(request, server, screen: str) -> None:
    page = request.getfixturevalue(screen)
    page.goto(server)
    shown(page)
    assert axe.found(page) == []
    for query in ("", "?schedule=1f1b&schedule=zb_v&p2p_time=0.25", "?forward_times=1,2&num_stages=4", "?schedule="):
        page.goto(server + query)
        if "forward" not in query and query != "?schedule=":
            shown(page)
        for summary in page.locator("summary:visible").all():
            summary.click()
        assert axe.found(page) == []
    page.problems.clear()  # the browser reports the status 400


def test_the_page_prints_its_table_and_a_light_picture(tab, server) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.goto(server)
    picture = shown(tab)
    picture.tab.evaluate("""() => addEventListener("beforeprint", () => { window.printed = {
        bubble: [...context.getImageData(...place(0, 3, 0.5).map((at) => at * ratio), 1, 20).data].slice(0, 80),
        pixels: canvas.width }; })""")
    tab.pdf()
    printed = picture.tab.evaluate("printed")
    assert (0xCA, 0xCC, 0xCF) in {tuple(printed["bubble"][at : at + 3]) for at in range(0, 80, 4)}
    assert printed["pixels"] == 3 * 720
    tab.emulate_media(media="print")
    assert tab.locator("#words table").is_visible()
    assert tab.locator("#picture").is_visible()
    assert not tab.get_by_label("Ranks").is_visible()
    assert not tab.get_by_role("link", name="SVG").is_visible()


def test_a_plan_is_loaded_in_the_page_and_drawn(tab, server, tmp_path) -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=1024)
    plan.save(tmp_path / "vgg19.plan.json")
    tab.goto(server)
    tab.get_by_label("Load a plan").set_input_files(tmp_path / "vgg19.plan.json")
    tab.locator("table", has_text=format_seconds(plan.step_s)).wait_for()
    assert "plan=" in tab.url
    assert tab.locator("select[name=plan] option:checked").inner_text() == "vgg19.plan.json"
    tab.reload()
    assert format_seconds(plan.step_s) in tab.locator("#words table").inner_text()
    tab.get_by_role("link", name="plan's page").click()
    tab.locator("#headline", has_text="vgg-19 on dapple-c").wait_for()
    tab.go_back()
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
    picture = Picture(popup.value)
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
        ("forward_times=-1", "give seconds above 0"),
        ("forward_times=0", "give seconds above 0"),
        ("forward_times=nan", "give seconds above 0"),
        ("p2p_time=-1", "give seconds from 0"),
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
    assert isinstance(failed.exception, hpgo.errors.HpgoError)
    assert "`--host` is empty" in failed.exception.message


def test_without_its_extra_the_command_says_in_one_line_how_to_install_it() -> None:
    script = "import sys; sys.modules['starlette'] = None; from hpgo.cli.entry import hpgo; hpgo()"
    run = subprocess.run([sys.executable, "-c", script, "serve"], check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "error: `hpgo serve` needs the packages starlette and uvicorn, which are not installed",
        "hint: install them: `pip install starlette uvicorn`",
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
    assert "hint: use another port with `--port`" in run.stderr
