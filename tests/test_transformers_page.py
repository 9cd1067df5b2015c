"""The page that plans transformers, driven in a headless browser: searching, changing, exporting, sizing."""

from __future__ import annotations

import io
import json
import re
import zipfile
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from axe import found
from browsing import PATIENCE_MS, playwright, watched
from click.testing import CliRunner
from soak import Served

from hpgo.cli.main import group

if TYPE_CHECKING:
    from collections.abc import Iterator

LLAMA = {"model": "llama-3-8b", "cluster": "h100:2", "batch": "64", "seq_length": "4096"}
OWN = LLAMA | {"framework": "megatron", "gpus": "16", "tp": "2", "pp": "2", "zero_stage": "1"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--time-limit", "60")
    yield server
    assert server.stop() == 130


@pytest.fixture
def opened(tab, served):
    """Open the page at an address, and wait until the configuration and the list are shown."""

    def at(**items: str):
        tab.goto(f"http://{served.host}/transformers?{urlencode(items)}")
        tab.locator("#timeline svg").wait_for()
        tab.locator("#list tbody tr").first.wait_for()
        return tab

    return at


def printed(line: str) -> dict:
    """What a command line prints as JSON."""
    words = line.split()
    assert words[0] == "hpgo"
    done = CliRunner().invoke(group, [*words[1:], "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def asked(served: Served, part: str, items: dict[str, str]) -> tuple[int, bytes]:
    return served.ask(f"/transformers/{part}?{urlencode(items)}")


def searched(served: Served, items: dict[str, str], kind: str = "search") -> list[dict]:
    status, body = asked(served, f"search/{kind}", items)
    assert status == 200
    return [json.loads(line) for line in body.decode().splitlines()]


def value(tab, name: str) -> str:
    return tab.locator(f".figure[data-name='{name}'] .value").inner_text()


def changed(tab, action) -> None:
    """Do something and wait until the page shows the estimate it leads to."""
    with tab.expect_response(re.compile("estimate.json"), timeout=PATIENCE_MS):
        action()
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_start_page_leads_to_all_pages(tab, served) -> None:
    tab.goto(f"http://{served.host}/start")
    assert found(tab) == []
    for title, heading in (("Plan a model from a profile", "/plan"), ("Plan a transformer", "/transformers")):
        tab.get_by_role("link", name=title).click()
        assert urlsplit(tab.url).path == heading
        tab.get_by_role("link", name="hpgo").click()
        assert urlsplit(tab.url).path == "/start"
    tab.get_by_role("link", name="Compare schedules").click()
    assert urlsplit(tab.url).path == "/"


@pytest.mark.parametrize(
    "problem",
    [LLAMA, LLAMA | {"framework": "torchtitan"}, LLAMA | {"cluster": "a100:1", "framework": "deepspeed"}],
    ids=lambda problem: problem.get("framework", "megatron"),
)
def test_search_and_estimates_have_the_numbers_of_the_commands(served, problem) -> None:
    lines = searched(served, problem)
    listed = lines[-1]["found"]
    command = printed(listed["command"])
    assert [row["step_s"] for row in listed["rows"]] == [one["step_s"] for one in command["estimates"]]
    assert listed["fastest"] + 1 == command["fastest"]
    for row, one in zip(listed["rows"], command["estimates"], strict=True):
        status, body = asked(served, "estimate.json", problem | row["items"])
        facts = json.loads(body)
        assert status == 200
        assert facts["estimate"] == one
    assert printed(facts["command"]) == facts["estimate"]


def test_a_part_of_each_node_is_estimated_as_in_the_search(served) -> None:
    problem = {
        "model": "llama-3-8b",
        "cluster": "gb200:2",
        "batch": "256",
        "seq_length": "4096",
        "framework": "torchtitan",
    }
    row = searched(served, problem)[-1]["found"]["rows"][0]
    assert (row["items"]["gpus"], row["items"]["gpus_per_node"]) == ("128", "64")
    facts = json.loads(asked(served, "estimate.json", problem | row["items"])[1])
    assert facts["estimate"]["step_s"] == row["step_s"]
    assert facts["nodes"] == [64, 64]
    assert facts["items"] == row["items"]
    status, body = asked(served, "estimate.json", problem | row["items"] | {"gpus_per_node": "60"})
    assert (status, b"128 GPUs are not 60 of each node" in body) == (400, True)


def test_the_page_shows_the_recommended_configuration(opened) -> None:
    tab = opened(**LLAMA)
    best = printed("hpgo llm plan llama-3-8b -c h100:2 -b 64 --seq-length 4096")["estimates"][0]
    assert value(tab, "MFU") == f"{100 * best['utilization']:.1f} %"
    assert value(tab, "GPUs") == "16"
    assert tab.locator("#list tbody tr").first.get_attribute("class") == "this"
    assert tab.locator(".device").count() == 16
    assert tab.locator("#memory .strip").count() == best["parallelism"]["pp"]
    address = dict(parse_qsl(urlsplit(tab.url).query))
    assert address["gpus"] == "16"
    assert LLAMA.items() <= address.items()


def test_the_list_is_sorted_by_a_column(opened) -> None:
    tab = opened(**OWN)
    tab.get_by_role("button", name="memory").click()
    sizes = [float(text.split()[0]) for text in tab.locator("#list tbody tr td:nth-child(4)").all_inner_texts()]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    tab.reload()
    tab.locator("#list tbody tr").first.wait_for()
    assert tab.locator("th[aria-sort]").inner_text().startswith("memory")


def test_a_change_says_what_it_does_and_goes_back(opened) -> None:
    tab = opened(**OWN)
    before = value(tab, "step time")
    changed(tab, tab.get_by_role("button", name="Raise tp").click)
    tab.locator("#effects", has_text="step time").wait_for()
    assert "tp=4" in tab.url
    assert tab.locator("[data-key=dp-value]").input_value() == "2"
    assert value(tab, "step time") != before
    assert "TP communication" in tab.locator("#effects").inner_text()
    tab.go_back()
    # The page forbids `eval`, which `wait_for_function` needs.
    playwright.expect(tab.locator("[data-key=tp-value]")).to_have_value("2")
    assert value(tab, "step time") == before


def test_going_back_returns_to_the_problem_before(opened) -> None:
    tab = opened(**LLAMA | {"framework": "torchtitan"})
    tab.locator("#nodes").fill("1")
    with tab.expect_response(re.compile("estimate.json"), timeout=PATIENCE_MS):
        tab.locator("#find").click()
    playwright.expect(tab.locator("#headline")).to_contain_text("8 GPUs of h100:1")
    tab.go_back()
    playwright.expect(tab.locator("#headline")).to_contain_text("16 GPUs of h100:2")
    playwright.expect(tab.locator("#nodes")).to_have_value("2")
    playwright.expect(tab.locator("#list tbody tr").first).to_be_visible()
    tab.go_back()
    assert "transformers" not in tab.url


def test_a_configuration_that_does_not_fit_says_why(opened) -> None:
    tab = opened(**OWN)
    assert tab.locator("#job").is_visible()
    changed(tab, lambda: tab.locator("[data-key=micro_batch_size-value]").fill("8") or tab.keyboard.press("Enter"))
    words = tab.locator("#effects .why").inner_text()
    assert words.startswith("Does not fit: pipeline rank 0 needs")
    assert "activations" in words
    assert not tab.locator("#job").is_visible()
    assert tab.locator("#memory .strip.over").count() >= 1


def test_a_refused_setting_is_an_error_with_a_way_out(opened) -> None:
    tab = opened(**OWN)
    changed(tab, lambda: tab.locator("[data-key=tp-value]").fill("16") or tab.keyboard.press("Enter"))
    assert "8 KV heads" in tab.locator("#effects .wrong").inner_text()
    assert found(tab) == []
    tab.problems.clear()  # the browser reports the status 400
    changed(tab, lambda: tab.locator("[data-key=tp-value]").fill("2") or tab.keyboard.press("Enter"))
    assert tab.locator(".wrong").count() == 0


def test_a_gpu_shows_its_groups(opened) -> None:
    tab = opened(**OWN)
    tab.locator("[data-gpu='2']").hover()
    tip = tab.locator("#tip").inner_text()
    assert "GPU 2: pipeline rank 0, layers 0–15" in tip
    assert "GPU 3" in tip
    assert "GPUs 0, 4, 6" in tip
    assert "GPU 10" in tip
    assert tab.locator(".device.in-dp").count() == 4
    assert found(tab) == []
    tab.keyboard.press("Escape")
    assert not tab.locator("#tip").is_visible()


def test_a_change_of_shape_is_saved_for_the_command(opened, served) -> None:
    tab = opened(**OWN)
    tab.get_by_text("Change its shape").click()
    changed(tab, lambda: tab.locator("[data-key=layers-value]").fill("40") or tab.keyboard.press("Enter"))
    assert "layers=40" in tab.url
    assert "llama-3-8b-changed" in tab.locator("#headline").inner_text()
    assert "hpgo llm estimate transformer.json" in (tab.locator("#command").get_attribute("title") or "")
    status, body = served.ask(tab.locator("#shape-file").get_attribute("href"))
    assert (status, json.loads(body)["layers"]) == (200, 40)


def test_the_job_is_a_folder_that_starts(served, tmp_path) -> None:
    status, body = asked(served, "job.zip", OWN)
    assert status == 200
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        archive.extractall(tmp_path)
    plan = json.loads((tmp_path / "job/llm-plan.json").read_text())
    _, facts = asked(served, "estimate.json", OWN)
    assert plan["estimate"]["step_s"] == json.loads(facts)["estimate"]["step_s"]
    assert (tmp_path / "job/job.sh").is_file()
    assert (tmp_path / "job/README.md").is_file()


def test_a_dropped_config_takes_the_place_of_the_model(tab, served, tmp_path) -> None:
    config = tmp_path / "tiny.json"
    shape = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config.write_text(json.dumps(shape | {"num_attention_heads": 16, "vocab_size": 32000}))
    tab.goto(f"http://{served.host}/transformers")
    tab.locator("#file").set_input_files(config)
    playwright.expect(tab.locator("#model")).to_have_value("tiny.json")
    tab.locator("#nodes").fill("1")
    tab.locator("#find").click()
    tab.locator("#timeline svg").wait_for()
    assert tab.locator("#headline").inner_text().startswith("tiny")
    assert "hpgo llm estimate tiny.json -c h100:1" in (tab.locator("#command").get_attribute("title") or "")


def test_a_name_in_an_address_reads_no_file(served, tmp_path) -> None:
    (tmp_path / "c.json").write_text("{}")
    for field in ("model", "cluster"):
        status, body = asked(served, "estimate.json", OWN | {field: str(tmp_path / "c.json")})
        assert status == 400
        assert json.loads(body)["error"]["message"].startswith("there is no ")


def test_a_search_stops(tab, served) -> None:
    big = {"model": "mixtral-8x7b", "cluster": "h100:16", "batch": "512", "seq_length": "4096"}
    tab.goto(f"http://{served.host}/transformers?{urlencode(big)}")
    tab.locator("#halt:enabled").click()
    tab.locator("#ask .wrong", has_text="stopped").wait_for()


def test_a_size_becomes_the_configuration(opened) -> None:
    tab = opened(**LLAMA | {"framework": "torchtitan"})
    tab.locator("#tokens").fill("20B")
    tab.locator("#max_gpus").fill("64")
    tab.locator("#hour_prices").fill("h100=2.5")
    tab.locator("#find-sizes").click()
    row = tab.locator("#size-found tbody tr").first
    row.wait_for()
    gpus = row.locator("td").nth(1).inner_text()
    assert tab.locator("#size-found .point").count() >= 4
    assert found(tab) == []
    changed(tab, row.get_by_role("button").click)
    assert value(tab, "GPUs") == gpus.replace(",", "")


def test_sizes_have_the_numbers_of_the_command(served) -> None:
    problem = LLAMA | {"framework": "torchtitan", "tokens": "20B", "days": "20", "max_gpus": "32"}
    sizes = searched(served, problem, "size")[-1]["found"]
    assert sizes["command"].endswith("--tokens 2e+10 --seq-length 4096 --days 20 --gpus 1..32 --framework torchtitan")
    assert {one["kind"] for one in sizes["points"]} == {"h100", "h200", "b200", "mi300x"}
    assert [[one["kind"], one["gpus"], one["days"]] for one in sizes["points"]] == [
        [one["kind"], one["gpus"], one["days"]] for one in printed(sizes["command"])["points"]
    ]


def test_axe_finds_nothing(opened) -> None:
    assert found(opened(**OWN)) == []


def test_a_telephone_shows_all_without_scrolling_sideways(phone, served) -> None:
    watched(phone).goto(f"http://{served.host}/transformers?{urlencode(OWN)}")
    phone.locator("#timeline svg").wait_for()
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    assert found(phone) == []


def test_print_has_the_configuration_without_controls(opened) -> None:
    tab = opened(**OWN)
    tab.emulate_media(media="print")
    assert not tab.locator("#ask").is_visible()
    assert not tab.locator("#size-card").is_visible()
    assert tab.locator("#figures").is_visible()
    assert tab.locator("#placement").is_visible()
