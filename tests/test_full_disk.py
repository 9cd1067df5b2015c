"""A disk that is full is an error in words, for every command and format, and leaves nothing half-written."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from toys import chain

import hpgo
from hpgo.cli.main import group

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="its device that is always full")

PLAN = ["plan", "vgg-19", "-c", "dapple-c", "-b", "2048"]
WRITERS = {
    **{f"simulate {name}": (["simulate", "-s", "2", "-b", "4", "-o"], name)
       for name in ("x.svg", "x.png", "x.pdf", "x.html", "x.json", "x.txt", "x.tex", "x.npz", "x.timeline.json")},
    "plan": ([*PLAN, "-o"], "x.json"),
    "plot of a sweep": ([*PLAN[:-1], "2048,4096", "--plot"], "x.pdf"),
    "evaluate": (["evaluate", "plan.json", "-o"], "x.json"),
    "export": (["export", "plan.json", "--to", "torch", "-o"], "x.py"),
    "launch": (["launch", "plan.json", "--on", "slurm", "--script", "a.py", "-o"], "x.sh"),
    "partition": (["partition", "--profile", "vgg-19", "--cluster", "dapple-c", "--svg"], "x.svg"),
    "draw": (["draw", "plan.json", "-o"], "x.pdf"),
    "view": (["view", "plan.json", "--no-open", "-o"], "x.html"),
}  # fmt: skip
SMALL_BYTES = 64


def small_files() -> None:
    """No file may grow beyond a few bytes; Python ignores the signal and gets an error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, SMALL_BYTES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan that every writer takes."""
    made = tmp_path_factory.mktemp("full")
    profile = chain([1.0, 2.0, 1.0], 8.0, 4.0)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=10, inter_gbit_s=10)
    hpgo.plan(profile, cluster, global_batch_size=4).save(made / "plan.json")
    return made


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_device_is_told_and_leaves_nothing_half_written(
    folder: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, name = WRITERS[writer]
    monkeypatch.chdir(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(FULL)
    before = set(folder.iterdir())
    done = CliRunner().invoke(group, [*words, name])
    assert isinstance(done.exception, hpgo.errors.HpgoError), done.output
    assert str(done.exception).startswith(f"can't write `{name}`: ")
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_and_leaves_nothing_half_written(folder: Path, writer: str) -> None:
    words, name = WRITERS[writer]
    (folder / name).unlink(missing_ok=True)
    before = set(folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-B", "-m", "hpgo", *words, name],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False, preexec_fn=small_files,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"error: can't write `{name}`: " in done.stderr
    assert "Traceback" not in done.stderr
    assert set(folder.iterdir()) == before


def test_what_was_there_stays_when_the_disk_is_full(folder: Path) -> None:
    path = folder / "old.pdf"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-B", "-m", "hpgo", "simulate", "-s", "2", "-b", "4", "-o", path.name],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=small_files,
    )  # fmt: skip
    assert done.returncode == 1
    assert path.read_text() == "old"
    path.unlink()
