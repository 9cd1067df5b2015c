"""Without numpy, what doesn't need it works, and what does says so: an ImportError in Python, a line in a terminal."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ABSENT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
ASKED = """
import hpgo
profile, cluster = hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c")
plan = hpgo.plan(profile, cluster, global_batch_size=2048)
assert hpgo.Plan.from_json(plan.to_json()).reevaluate().step_s == plan.step_s
assert str(plan) and hpgo.schedules() and hpgo.partition(profile, cluster)
for needs_arrays in (
    lambda: hpgo.schedule("1f1b", ranks=2, micro_batches=4),
    lambda: hpgo.Schedule.from_text("0F0 0B0"),
    lambda: hpgo.simulate(plan),
    lambda: plan.program(),
    lambda: plan.for_rank(0),
    lambda: hpgo.export.files(plan, "torch"),
):
    try:
        needs_arrays()
    except ImportError as error:
        assert error.name == "numpy"
    else:
        raise AssertionError(needs_arrays)
"""


def run(script: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ABSENT + script, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def test_python_gets_an_import_error_where_arrays_are_needed(tmp_path: Path) -> None:
    done = run(ASKED, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan vgg-19 -c dapple-c -b 2048 -o plan.json", 0),
        ("models", 0),
        ("clusters", 0),
        ("schedules", 0),
        ("plan vgg-19 -c dapple-c -b 2048 --schedule auto", 0),
        ("schedules show 1f1b --csv", 1),
        ("simulate -s 2 -b 4", 1),
    ],
)
def test_commands_work_or_name_what_is_missing(tmp_path: Path, words: str, code: int) -> None:
    done = run("from hpgo.cli.entry import hpgo\nhpgo()", *words.split(), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        assert (
            done.stderr
            == "error: `numpy` can't be imported: No module named 'numpy'\nhint: install it: pip install numpy\n"
        )
