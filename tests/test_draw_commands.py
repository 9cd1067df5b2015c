"""`hpgo draw`, `hpgo view` and `hpgo serve` as a shell sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from timelines import timeline

import hpgo


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpgo", *args], check=False, capture_output=True, text=True, cwd=cwd, timeout=60
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with two timelines and a plan."""
    timeline("1f1b", memory=True).save(tmp_path / "planned.timeline.json")
    timeline("1f1b", latency_s=0.5, memory=True).save(tmp_path / "measured.npz")
    cluster = hpgo.Cluster.preset("dapple-c")
    hpgo.plan(hpgo.read_profile("vgg-19"), cluster, global_batch_size=1024).save(tmp_path / "vgg19.plan.json")
    return tmp_path


def test_draw_writes_one_picture_of_planned_and_measured_in_several_formats(files: Path) -> None:
    done = run(
        "draw", "planned.timeline.json", "measured.npz", "--label", "planned", "--label", "measured",
        "-o", "both.svg", "-o", "both.txt", "--memory", "--transfers", "arrows", cwd=files,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "wrote both.svg" in done.stderr
    assert "planned against measured" in (files / "both.svg").read_text()
    assert "measured" in (files / "both.txt").read_text()


def test_a_plan_is_drawn_as_it_was_planned_or_on_another_schedule(files: Path) -> None:
    assert run("draw", "vgg19.plan.json", "-o", "plan.txt", cwd=files).returncode == 0
    planned = hpgo.Plan.read(files / "vgg19.plan.json")
    assert f"\n{planned.schedule}: {len(planned.stages)} stage" in (files / "plan.txt").read_text()
    assert run("draw", "vgg19.plan.json", "--schedule", "gpipe", "-o", "plan.txt", cwd=files).returncode == 0
    assert "\ngpipe: " in (files / "plan.txt").read_text()


def test_view_prints_the_path_of_the_page(files: Path) -> None:
    done = run("view", "planned.timeline.json", "--no-open", "-o", "run.html", cwd=files)
    assert (done.returncode, done.stdout) == (0, "run.html\n")
    assert (files / "run.html").read_text().startswith("<!doctype html>")
    done = run("view", "vgg19.plan.json", "--no-open", cwd=files)
    page = Path(done.stdout.strip())
    assert page.name == "vgg19.plan.html"
    assert page.is_file()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("draw",), 2, "Missing argument"),
        (("draw", "planned.timeline.json"), 2, "Missing option '-o'"),
        (("draw", "nowhere.json", "-o", "x.svg"), 1, "error: file not found: `nowhere.json`"),
        (("draw", "broken.json", "-o", "x.svg"), 1, "error: `broken.json` is neither a plan nor a timeline"),
        (("draw", "broken.npz", "-o", "x.svg"), 1, "error: `broken.npz` holds no timeline"),
        (("draw", ".", "-o", "x.svg"), 1, "error: can't read `.`"),
        (("draw", "planned.timeline.json", "-o", "x.gif"), 1, "error: unknown output format: `x.gif`"),
        (("draw", "planned.timeline.json", "-o", "no/x.svg"), 1, "error: can't write `no/x.svg`"),
        (("draw", "planned.timeline.json", "-o", "x.svg", "--width", "1"), 2, "Invalid value for '--width'"),
        (("draw", "vgg19.plan.json", "--schedule", "1f2b", "-o", "x.svg"), 1, "did you mean `1f1b`"),
        (("view", "planned.timeline.json", "-o", "x.svg", "--no-open"), 1, "use a name that ends in .html"),
        (("serve", "nowhere.json", "--no-open"), 1, "error: file not found: `nowhere.json`"),
        (("serve", "broken.json", "--no-open"), 1, "error: `broken.json` is not a plan"),
        (("serve", "--port", "70000"), 2, "Invalid value for '--port'"),
        (("serve", "--host", "256.0.0.1", "--port", "0", "--no-open"), 1, "error: can't listen on 256.0.0.1"),
    ],
)
def test_mistakes_are_told_without_a_traceback(files: Path, args: tuple[str, ...], code: int, said: str) -> None:
    (files / "broken.json").write_text('{"a": 1}')
    (files / "broken.npz").write_bytes(b"not a timeline")
    done = run(*args, cwd=files)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["draw", "view", "serve"])
def test_help_teaches_with_examples(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert f"hpgo {command} " in done.stdout
