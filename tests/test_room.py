"""Sizes that are allowed never abort: what needs more memory than is free is refused in words before it is begun."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import hpgo
from hpgo.base import memory_check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its limits")


def limited(words: list[str], gib: float, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a Python does that may take so much memory."""
    maximum = int(gib * 2**30)
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum)),
    )


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ("simulate -s 100 -b 500000", 6),
        ("simulate -s 100 -b 500000 --no-visualization --json", 6),
        ("simulate -s 100 -b 5000 --iterations 100", 2),
        ("simulate -s 16 -b 65536 --no-visualization --json", 2),
        ("simulate -s 16 -b 65536 -o x.json", 2),
        ("simulate -s 16 -b 65536 -o x.npz", 1.5),
        ("schedules show v_half --ranks 64 --micro-batches 200000 --csv", 2),
        ("schedules show 1f1b --ranks 64 --micro-batches 60000 --json", 1.5),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path: Path, words: str, gib: float) -> None:
    done = limited(["-m", "hpgo", *words.split()], gib, tmp_path)
    assert done.returncode == 1, done.stderr[-500:]
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert " of memory, but " in lines[0]
    assert lines[1].startswith("hint: ")
    assert not list(tmp_path.iterdir())


def test_python_gets_an_error_that_it_can_handle_and_goes_on(tmp_path: Path) -> None:
    script = """
import hpgo
schedule = hpgo.schedule("1f1b", ranks=16, micro_batches=65536)
run = hpgo.simulate(schedule)
run.save("small.svg")
for large in (
    lambda: hpgo.schedule("1f1b", ranks=100, micro_batches=500_000),
    lambda: hpgo.simulate(schedule, iterations=60),
    lambda: run.to_json(),
    lambda: run.save("run.timeline.json"),
    lambda: run.save("trace.json"),
):
    try:
        large()
    except hpgo.errors.HpgoError as error:
        assert "of memory, but" in error.message, error.message
        assert error.hint
    else:
        raise AssertionError(large)
assert len(hpgo.schedule("1f1b", ranks=2, micro_batches=2).actions) == 8
"""
    done = limited(["-c", script], 1.75, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["small.svg"]


@pytest.mark.parametrize("name", [family.name for family in hpgo.schedules()])
def test_actions_are_counted_before_they_are_there(name: str) -> None:
    from hpgo.programs.schedule import actions_of

    built = hpgo.schedule(name, ranks=4, micro_batches=16)
    halves = len(built.actions) + int((built.actions[:, 0] == 4).sum())
    counted = actions_of(name, 4, 16, None)
    assert halves <= counted <= 1.5 * halves  # some backwards stay whole where others are split


def test_limits_of_containers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "_CGROUPS", tmp_path)
    own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    folder = tmp_path / own.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("max", "1000000\n"), ("current", "900000\n"), ("stat", "anon 1\ninactive_file 50000\n")):
        (folder / f"memory.{name}").write_text(text)
    assert memory_check.free_bytes() == 150_000
    (folder / "memory.max").write_text("max\n")
    assert memory_check.free_bytes() > 150_000
