"""What axe-core finds on a page that keeps out those who read it by ear, by keyboard, or without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="axe-playwright-python is not installed: pip install playwright axe-playwright-python",
)
_AXE = sync.Axe()
_OF_COLOURS = ["color-contrast", "link-in-text-block"]


def found(page: Page) -> list[str]:
    """Each rule of axe-core that `page` and its frames break as shown now, with the first elements that break it.

    All rules are asked in light, and in dark those about colours, which alone may differ.
    """
    for frame in page.frames:
        if not frame.evaluate("'axe' in window"):
            frame.evaluate(_AXE.axe_script)
    broken = _asked(page, {})
    page.emulate_media(color_scheme="dark")
    broken += [f"in the dark, {each}" for each in _asked(page, {"runOnly": _OF_COLOURS})]
    page.emulate_media(color_scheme="light")
    return broken


def _asked(page: Page, options: dict[str, object]) -> list[str]:
    violations = page.evaluate(
        "(options) => axe.run(options).then((all) => all.violations)", {"resultTypes": ["violations"], **options}
    )
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes'][:3]]}" for each in violations
    ]
