"""docs/tutorial.md takes a model of one's own to a run: its blocks run, and any plan trains that model alike."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_readme import refresh

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import hpgo.runtime  # noqa: E402 -- it needs torch

ROOT = Path(__file__).parent.parent
TRAINING = ("--workload", "my_gpt:model", "--data", "my_gpt:text", "--optimizer", "adamw:lr=2e-3")
STEPS = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks of the page have run, and the page with what they printed."""
    path = tmp_path_factory.mktemp("tutorial")
    (path / "page.md").write_text(refresh.refreshed(refresh.MEASURED, path), encoding="utf-8")
    return path


def losses(folder: Path, plan: str, *words: str) -> list[float]:
    """Of the steps that the run has done."""
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", "run", plan, *TRAINING, "--dtype", "float64", "--json", *words],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout)["losses"])


@pytest.mark.slow
def test_commands_print_what_the_page_shows_but_for_figures(folder: Path) -> None:
    """Run the page's commands, two minutes. `make docs` renews the page; read the diff.

    In every run, tests/test_pages.py parses the commands, and the tests of each command run it.
    """
    shown, printed = (page.read_text(encoding="utf-8") for page in (refresh.MEASURED, folder / "page.md"))
    assert refresh.alike(shown, printed), printed


def test_a_page_that_shows_other_words_is_out_of_date() -> None:
    shown = "$ hpgo run\nstep 1  loss 5.6  120 ms\n"
    assert refresh.alike(shown, shown.replace("120 ms", "1.3 s").replace("5.6", "4.25"))
    assert not refresh.alike(shown, shown.replace("loss", "cost"))
    varying = "toy on a: a step takes 1 s\nMeasured times vary between passes by 41 %,\nor for longer\n\nproof"
    assert refresh.alike("toy on a: a step takes 2 s\n\nproof", varying)


@pytest.mark.slow
def test_what_the_page_speaks_of_is_there(folder: Path) -> None:
    plan = hpgo.Plan.read(folder / "plan.json")
    assert [len(stage.devices) for stage in plan.stages] == [1, 1]
    assert [len(stage.devices) for stage in hpgo.Plan.read(folder / "uneven.json").stages] == [3, 1]
    assert hpgo.Timeline.read(folder / "measured.timeline.json").ranks == 2
    assert "measured" in (folder / "both.svg").read_text(encoding="utf-8")
    assert "<svg" in (folder / "plan.svg").read_text(encoding="utf-8")
    assert (folder / "saved/step-40/checkpoint.json").is_file()
    assert hpgo.read_profile(folder / "corrected.yaml").batch_sizes == (2, 4)


def test_the_first_example_of_the_readme_is_the_page_in_short() -> None:
    readme, page = (file.read_text(encoding="utf-8") for file in (ROOT / "README.md", refresh.MEASURED))
    (block,) = re.findall(r"```sh\n(hpgo profile my_gpt:model.*?)```", readme, re.DOTALL)
    shown = {" ".join(command.split()) for command, _ in refresh._COMMAND.findall(page.replace("\\\n", ""))}
    for line in block.splitlines():
        assert any(command.startswith(line) for command in shown), line


def my_gpt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the page writes into `folder`."""
    (block,) = re.findall(r"```python\n(# my_gpt\.py\n.*?)```", refresh.MEASURED.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "my_gpt.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module("my_gpt")


def losses_in_a_loop(module: Any, steps: int) -> list[float]:
    """Losses of the module's model in a loop of torch that knows nothing of plans."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        module.Embedding(),
        *(module.Block() for _ in range(module.BLOCKS)),
        torch.nn.LayerNorm(module.HIDDEN),
        torch.nn.Linear(module.HIDDEN, module.LETTERS),
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = iter(hpgo.runtime.Loader(module.text(), global_batch_size=24, samples=[range(24)], seed=0))
    found = []
    for _ in range(steps):
        inputs, targets = (share.rows(0, 24)[0] for share in next(batches))
        loss = module.loss(model(inputs), targets)
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def test_the_page_s_model_trains_as_it_does_in_a_loop_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = my_gpt(tmp_path, monkeypatch)
    workload = module.model()
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
    program = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=6, global_batch_size=24)
    with hpgo.runtime.Pipeline(
        program, "my_gpt:model", optimizer=lambda weights: torch.optim.AdamW(weights, lr=2e-3), dtype=torch.float64
    ) as pipeline:
        data = iter(pipeline.loader(module.text()))
        found = [pipeline.step(*next(data)) for _ in range(4)]
    assert found == pytest.approx(losses_in_a_loop(module, 4), rel=1e-9)
    assert found[-1] < found[0] - 0.5


@pytest.mark.slow
def test_losses_fall_under_an_uneven_plan_as_they_do_in_a_loop_of_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every run, the test above holds one device to the loop, and tests/test_run.py uneven plans to one device."""
    uneven = losses(folder, "uneven.json", "--steps", str(STEPS))
    assert uneven == pytest.approx(losses(folder, "one.json", "--steps", str(STEPS)), rel=1e-10)
    assert uneven[0] > 5
    assert max(uneven[-5:]) < 3.5
    assert losses_in_a_loop(my_gpt(folder, monkeypatch), 6) == pytest.approx(uneven[:6], rel=1e-9)


@pytest.mark.slow
def test_a_stopped_run_goes_on_under_the_other_plan_where_the_text_stood(folder: Path) -> None:
    """In every run, tests/test_run.py resumes runs under another plan, also amid their data."""
    saves = ("--checkpoint", "other", "--resume")
    whole = losses(folder, "one.json", "--steps", "5")
    assert losses(folder, "uneven.json", "--steps", "3", *saves) == pytest.approx(whole[:3], rel=1e-10)
    assert losses(folder, "one.json", "--steps", "5", *saves) == pytest.approx(whole[3:], rel=1e-10)
