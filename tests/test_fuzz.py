"""Inputs that coverage leads to, for a few seconds a reader; `make fuzz` looks longer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FUZZ = Path(__file__).parent.parent / "fuzz"
TARGETS = sorted({path.stem for path in FUZZ.glob("*.py")} - {"guided", "mutations", "run"})
SECONDS = 5

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="Atheris looks for inputs; PyPI has it for CPython 3.11 to 3.13 on Linux, x86-64, where `make` installs it",
)


def ended(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A target, run in `folder` with hpgo as it is here."""
    found = os.pathsep.join(path for path in (str(FUZZ), *sys.path) if path)
    environment = os.environ | {"PYTHONPATH": found}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


NEEDS = {
    "tensors": ("torch", "torch"),
    "onnx_files": ("onnx", "onnx"),
    "configurations": ("transformers", "torch transformers"),
}
"""Targets that need a package, and what brings it."""


def marked(target: str) -> Any:
    package, install = NEEDS.get(target, ("hpgo", ""))
    absent = importlib.util.find_spec(package) is None
    return pytest.param(target, marks=pytest.mark.skipif(absent, reason=f"needs {package}: pip install {install}"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [marked(one) for one in TARGETS])
def test_readers_give_a_value_or_an_error_of_hpgo_wherever_coverage_leads(target: str, tmp_path: Path) -> None:
    limits = f"-max_total_time={SECONDS}", "-seed=1"  # the same inputs each time, as far as it comes
    done = ended(FUZZ / f"{target}.py", tmp_path / "corpus", *limits, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "stat::number_of_executed_units" in done.stderr
    assert len(list((tmp_path / "corpus").iterdir())) > len(list((tmp_path / "corpus").glob("seed-*")))


PLANTED = """
import json
import time

from guided import fuzz, reader
from mutations import documents

import hpgo


def read(path):
    try:
        times = json.loads(path.read_text(errors="replace"))["times"]
        assert type(times) is list and times
    except Exception:
        raise hpgo.errors.HpgoError("no times") from None
    FAULT


fuzz(lambda: {"good": b'{"name": "x", "times": [0.5, 2.5]}'}, documents, reader("x.json", read))
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("return times[0] + times[-1]", "TypeError"),
        ("return bytearray(2**31 * (times[-1] < 0))", "MemoryError"),
        (
            "busy_s = time.process_time()\n    while times[-1] < 0 and time.process_time() < busy_s + 2.5: pass",
            "took 2.",
        ),
        ("if times[-1] < 0: raise hpgo.errors.HpgoError('')", "can't be printed"),
    ],
    ids=["a foreign exception", "much memory", "much time", "an error without words"],
)
def test_a_planted_fault_is_found(fault: str, told: str, tmp_path: Path) -> None:
    """Of a kind that no reader may have, where only changes to a tree lead."""
    (tmp_path / "planted.py").write_text(PLANTED.replace("FAULT", fault))
    done = ended("planted.py", "corpus", "-runs=100000", "-seed=1", f"-artifact_prefix={tmp_path}/", folder=tmp_path)
    assert told in done.stdout
    assert done.returncode != 0
    (crash,) = tmp_path.glob("crash-*")
    assert ended("planted.py", crash, folder=tmp_path).returncode != 0
