"""Commands that load torch work in a process of their own, where other tests fork them from one that has loaded it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch", reason="needs torch: pip install torch")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("profile mlp:layers=2,width=8 --time-limit 0s", "profile"),
        ("measure-links --ranks 2 --time-limit 1s", "cluster"),
        ("llm calibrate --node --device cpu --time-limit 0.5s", "record"),
    ],
    ids=["profile", "measure-links", "llm calibrate"],
)
def test_a_command_answers_in_a_process_of_its_own(words: str, key: str, tmp_path: Path) -> None:
    """`hpgo run` is started in this way in tests/test_run.py, and `hpgo infer` at night in tests/test_inference.py."""
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", *words.split(), "--json"], cwd=tmp_path, text=True, capture_output=True,
        timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[key]
