"""How long pictures take: `pytest tests/bench_draw.py --benchmark-only`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from soak import Served

import hpgo
import hpgo.draw

if TYPE_CHECKING:
    from pathlib import Path


def run(ranks: int, micro_batches: int) -> hpgo.Timeline:
    """1F1B with all that a picture may read already computed."""
    order = hpgo.schedule("1f1b", ranks=ranks, micro_batches=micro_batches)
    timeline = hpgo.simulate(order, forward_s=1e-3, backward_s=2e-3, latency_s=1e-4)
    assert timeline.measures.messages == len(timeline.transfer_kind) > 0
    assert len(timeline.slack_s) == len(timeline.rank)
    assert len(timeline.idle_rank) > 0
    return timeline


@pytest.mark.parametrize("ending", [".svg", ".png", ".pdf", ".html", ".json", ".txt", ".tex"])
def test_ten_thousand_actions(benchmark, ending: str, tmp_path: Path) -> None:
    timeline = run(16, 312)
    benchmark.pedantic(hpgo.draw.save, (timeline, tmp_path / f"x{ending}"), rounds=7, warmup_rounds=1)


@pytest.mark.parametrize("ending", [".svg", ".html", ".txt"])
def test_a_million_actions(benchmark, ending: str, tmp_path: Path) -> None:
    timeline = run(256, 1_954)
    benchmark.pedantic(hpgo.draw.save, (timeline, tmp_path / f"x{ending}"), rounds=5, warmup_rounds=1)
    benchmark.extra_info["megabytes"] = (tmp_path / f"x{ending}").stat().st_size / 1e6


def test_a_million_actions_no_two_alike(benchmark, tmp_path: Path) -> None:
    """The worst to pack: every action has a time of its own."""
    random = np.random.default_rng(1)
    timeline = hpgo.simulate(
        hpgo.schedule("1f1b", ranks=256, micro_batches=1_954),
        forward_s=random.uniform(0.9e-3, 1.1e-3, (1_954, 256)),
        backward_s=random.uniform(1.8e-3, 2.2e-3, (1_954, 256)),
        latency_s=1e-4,
    )
    assert len(timeline.slack_s) == len(timeline.rank)
    assert timeline.measures.messages == len(timeline.transfer_kind) > 0
    benchmark.pedantic(hpgo.draw.save, (timeline, tmp_path / "x.html"), rounds=5, warmup_rounds=1)
    benchmark.extra_info["megabytes"] = (tmp_path / "x.html").stat().st_size / 1e6


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_eight_million_actions(benchmark, ending: str, tmp_path: Path) -> None:
    timeline = run(1_024, 4_096)
    benchmark.pedantic(hpgo.draw.save, (timeline, tmp_path / f"x{ending}"), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(64, 1_024), (256, 1_954), (1_024, 4_096)])
def test_opening_in_the_browser(benchmark, browser, ranks: int, micro_batches: int, tmp_path: Path) -> None:
    """From the address to the first picture; the note has the median frame of twenty pans over everything."""
    page = hpgo.draw.save(run(ranks, micro_batches), tmp_path / "x.html").as_uri()
    tab = browser.new_page(viewport={"width": 1280, "height": 760})

    def opened() -> None:
        tab.goto(page)
        tab.locator("#status", has_text="in view").wait_for(timeout=120_000)

    benchmark.pedantic(opened, rounds=3)
    frames = []
    for key in ["+"] + ["ArrowRight", "ArrowLeft"] * 10:
        tab.keyboard.press(key)
        tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        frames.append(tab.evaluate("window.hpgo.frame_ms"))
    benchmark.extra_info["frame_ms"] = sorted(frames)[len(frames) // 2]
    tab.close()


@pytest.mark.parametrize("size", ["num_stages=4&num_batches=8", "num_stages=64&num_batches=1024"])
def test_opening_the_page_of_schedules(benchmark, tab, size: str) -> None:
    """From the address of `hpgo serve` to the picture in its page; the note has what an edit takes to the same."""
    served = Served()
    address = f"http://{served.host}/?{size}&p2p_time="
    latencies = iter(range(1, 1000))
    painted = tab.frame_locator("#picture").locator("#status", has_text="in view")

    def opened() -> None:
        tab.goto(f"{address}{next(latencies) / 1000}")
        painted.wait_for(timeout=120_000)

    benchmark.pedantic(opened, rounds=7, warmup_rounds=1)
    edits = []
    for _ in range(7):
        began_s = time.perf_counter()
        tab.get_by_label("Latency of a message").fill(str(next(latencies) / 1000))
        tab.locator("#words.busy").wait_for()
        tab.locator("#words:not(.busy)").wait_for()
        tab.locator("#view:not(.busy)").wait_for()
        edits.append(time.perf_counter() - began_s)
    benchmark.extra_info["edit_s"] = sorted(edits)[len(edits) // 2]
    served.stop()
