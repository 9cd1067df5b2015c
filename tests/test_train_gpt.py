"""The small GPT of examples/ trains under an uneven plan as on one device, by the commands of its page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install 'hpgo[torch]'")

import hpgo.runtime  # noqa: E402 -- it needs torch

ROOT = Path(__file__).parent.parent
TRAINING = ("--workload", "train_gpt:model", "--data", "train_gpt:text", "--optimizer", "adamw:lr=2e-3")
STEPS = 25
COMMANDS = {"python": "", "hpgo": "-m hpgo", "torchrun": "-m torch.distributed.run"}


def environment(folder: Path) -> dict[str, str]:
    """In which the commands of the page are those of this Python."""
    paths = (str(ROOT / "examples"), os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the page have run, with fewer steps."""
    path = tmp_path_factory.mktemp("train")
    (path / "examples").symlink_to(ROOT / "examples")
    (path / "bin").mkdir()
    for name, words in COMMANDS.items():
        (path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (path / "bin" / name).chmod(0o755)
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    for long, short in (
        ("2,6 --ranks 4", "2,6 --time-limit 1s"),
        ("links --ranks 4", "links --ranks 4 --time-limit 2s"),
        ("--steps 400", "--steps 3"),
        ("uneven.json 100", "uneven.json 20"),
        ("export PYTHONPATH=examples\n", ""),
    ):
        assert script.count(long) == 1
        script = script.replace(long, short)
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=path, env=environment(path), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path / "out.txt").write_text(done.stdout)
    return path


def losses(folder: Path, plan: str, *words: str) -> list[float]:
    """Of the steps that the run has done."""
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", "run", plan, *TRAINING, "--dtype", "float64", "--json", *words],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout)["losses"])


def test_the_commands_of_the_page_train_save_draw_and_run_under_torchrun(folder: Path) -> None:
    plan = hpgo.Plan.read(folder / "uneven.json")
    assert [len(stage.devices) for stage in plan.stages] == [3, 1]
    said = (folder / "out.txt").read_text()
    assert re.search(r"^step 3  loss \d", said, re.MULTILINE)
    assert re.search(r"^step 20: loss [12345]\.\d+$", said, re.MULTILINE)
    assert (folder / "saved/step-3/checkpoint.json").is_file()
    assert hpgo.Timeline.read(folder / "measured.timeline.json").ranks == 4
    assert "measured" in (folder / "both.svg").read_text()


def test_losses_fall_under_an_uneven_plan_as_they_do_in_a_loop_of_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt

    uneven = losses(folder, "uneven.json", "--steps", str(STEPS))
    assert uneven == pytest.approx(losses(folder, "one.json", "--steps", str(STEPS)), rel=1e-10)
    assert uneven[0] > 5
    assert max(uneven[-5:]) < 3.5
    torch.manual_seed(0)
    model = torch.nn.Sequential(*train_gpt.layers().values()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = train_gpt.text()
    batches = iter(hpgo.runtime.Loader(data, global_batch_size=24, samples=[range(24)], seed=0))
    for expected in uneven[:6]:
        inputs, targets = (share.rows(0, 24)[0] for share in next(batches))
        loss = train_gpt.loss(model(inputs), targets)
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_stopped_run_goes_on_under_the_other_plan_where_the_text_stood(folder: Path) -> None:
    saves = ("--checkpoint", "other", "--resume")
    whole = losses(folder, "one.json", "--steps", "5")
    assert losses(folder, "uneven.json", "--steps", "3", *saves) == pytest.approx(whole[:3], rel=1e-10)
    assert losses(folder, "one.json", "--steps", "5", *saves) == pytest.approx(whole[3:], rel=1e-10)
