"""What axe-core finds on a page that keeps out those who read it by ear, by keyboard, or without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="axe-playwright-python is not installed: pip install 'hpgo[browser]'",
)


def found(page: Page) -> list[str]:
    """Each rule of axe-core that `page` and its frames break as shown now, with the first elements that break it."""
    axe = sync.Axe()
    for frame in page.frames[1:]:
        frame.evaluate(axe.axe_script)  # it asks itself there
    answer = axe.run(page).response
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes'][:3]]}"
        for each in answer["violations"]
    ]
