"""A headless chromium, for tests and benchmarks of pages; what imports this is skipped, visibly, where there is none.

Needs Debian's `chromium` and PyPI's `playwright` (extra `browser`).
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright axe-playwright-python"
)
_CHROMIUM = os.environ.get("HPGO_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
if _CHROMIUM is None:
    pytest.skip("no chromium: apt-get install chromium, or set HPGO_CHROMIUM", allow_module_level=True)

DESK: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True
}  # fmt: skip
PATIENCE_MS = 60_000
"""After which what was waited for is missing, also on a machine that does much else."""
playwright.expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def launched() -> Iterator[Any]:
    """A chromium. A process has one at a time, and no loop of asyncio beside it."""
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def watched(page):
    """`page`, which writes down in `problems` which scripts fail, and what is fetched that isn't there."""
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(PATIENCE_MS)
    return page


def lent(page) -> Iterator[Any]:
    """For one test the page of many, at no address; the test fails if `page.problems` isn't empty at its end."""
    page.problems.clear()
    yield page
    problems = [*page.problems]
    page.goto("about:blank")  # which ends what it still asks for
    page.mouse.move(0, 0)
    page.emulate_media(color_scheme="light", media="screen")
    assert not problems


class Picture:
    """An interactive picture (`hpgo.draw.save` to HTML) that is open in a tab or in a frame."""

    def __init__(self, tab) -> None:
        self.tab = tab
        tab.locator("#status", has_text="in view").wait_for(timeout=PATIENCE_MS)
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is painted."""
        self.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def state(self, name: str):
        return self.tab.evaluate(
            f"() => {{ const value = window.hpgo.{name}; return value === undefined ? null : value; }}"
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.tab.keyboard.press(key)
        self.settle()

    def place(self, number: int, rank: int, time_s: float) -> tuple[float, float]:
        """Where on the canvas rank and time of the given timeline are."""
        x, y = self.tab.evaluate("([n, r, t]) => window.hpgo.place(n, r, t)", [number, rank, time_s])
        return x, y

    def at(self, number: int, rank: int, time_s: float) -> tuple[float, float]:
        """Where on the screen rank and time of the given timeline are."""
        x, y = self.place(number, rank, time_s)
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
        x, y = self.place(number, rank, time_s)
        around = self.colours([(x + dx, y + dy) for dx in range(-3, 4) for dy in range(-3, 4)])
        return max(around, key=around.count)

    def row(self, number: int, rank: int) -> tuple[int, int]:
        """First and last pixel of a rank's boxes."""
        middle = self.place(number, rank, 0)[1]
        height = self.state("view")["rowPx"]
        return round(middle - height / 2 + 2), round(middle + height / 2 - 2)

    def colours(self, places: list[tuple[float, float]]) -> list[str]:
        """Of the canvas at these places."""
        return self.tab.evaluate(
            "(places) => { const c = document.getElementById('canvas'), s = c.width / c.clientWidth;"
            "const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return places.map(([x, y]) => { const at = 4 * (Math.floor(y * s) * c.width + Math.floor(x * s));"
            "return '#' + [...all.slice(at, at + 3)].map((v) => v.toString(16).padStart(2, '0')).join(''); }); }",
            places,
        )
