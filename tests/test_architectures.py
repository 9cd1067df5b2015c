"""Public architectures train as pipelines like in plain PyTorch, as the table of docs/workloads.md has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

ROOT = Path(__file__).parent.parent
QUICK = ("Llama", "T5", "ResNet")
"""A decoder, an encoder with a decoder, and a network of images with batch normalization."""


def table() -> dict[str, str]:
    """Rows of the page by architecture."""
    page = (ROOT / "docs/workloads.md").read_text(encoding="utf-8")
    text = page.partition("<!-- table: architectures -->\n")[2].partition("<!-- end -->")[0]
    return {found[1]: line for line in text.splitlines()[2:] if (found := re.match(r"\| ([^|]+) \|", line))}


def test_the_page_has_every_architecture() -> None:
    import architectures  # it loads torch

    rows = table()
    assert list(rows) == list(architectures.ARCHITECTURES)
    assert len(rows) >= 30
    assert all(f"`{one.model}`" in rows[name] for name, one in architectures.ARCHITECTURES.items())


def test_quick_rows_are_as_the_page_has_them() -> None:
    # A process of its own, because its ranks are forks, which must come before any backward pass.
    done = subprocess.run(
        [sys.executable, ROOT / "research/architectures.py", *QUICK],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = table()
    assert done.stdout.splitlines() == [rows[name] for name in QUICK]
    assert all(rows[name].count("equal") == 2 for name in QUICK)
