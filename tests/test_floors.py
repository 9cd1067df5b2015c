"""The floors of docs/architecture.md hold, and importing stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python/hpgo"


def table() -> tuple[dict[str, int], dict[str, int]]:
    rust, python = {}, {}
    for floor, left, right in re.findall(
        r"^\| (\d) \|(.*?)\|(.*?)\|$", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        rust |= dict.fromkeys(re.findall(r"`(\w+)`", left), int(floor))
        python |= dict.fromkeys(re.findall(r"`(\w+)`", right), int(floor))
    return rust, python


def python_imports() -> set[tuple[str, str]]:
    """(who, whom), rooms of the package; lazy imports and those for type checkers count too."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        who = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if who == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hpgo":
                parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                found |= {(who, part) for part in parts}
            elif isinstance(node, ast.Import):
                found |= {(who, alias.name.split(".")[1]) for alias in node.names if alias.name.startswith("hpgo.")}
    return {(who, whom) for who, whom in found if whom not in {who, "_core"}}


def rust_imports() -> set[tuple[str, str]]:
    found = set()
    for file in (ROOT / "src").rglob("*.rs"):
        who = file.relative_to(ROOT / "src").with_suffix("").parts[0]
        if who == "lib":
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.lstrip().startswith("//"):
                continue
            found |= {(who, whom) for whom in re.findall(r"\bcrate::([a-z_]+)", line)}
    return {(who, whom) for who, whom in found if who != whom}


def test_python_modules_import_only_downwards() -> None:
    _, floors = table()
    imports = python_imports()
    assert {name for pair in imports for name in pair} <= set(floors), "name it in docs/architecture.md"
    assert {pair for pair in imports if floors[pair[0]] < floors[pair[1]]} == set()


def test_rust_modules_import_only_downwards() -> None:
    floors, _ = table()
    imports = rust_imports()
    assert {name for pair in imports for name in pair} <= set(floors), "name it in docs/architecture.md"
    assert {pair for pair in imports if floors[pair[0]] < floors[pair[1]]} == set()


def test_only_the_border_knows_python() -> None:
    strangers = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "src").rglob("*.rs")
        if "python" not in file.relative_to(ROOT / "src").parts[0]
        for line in file.read_text(encoding="utf-8").splitlines()
        if "pyo3" in line and "cfg_attr" not in line and "cfg(feature" not in line
    }
    assert strangers == set()


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import hpgo", {"numpy", "networkx", "matplotlib", "rich", "yaml", "click", "torch", "hpgo.planning.planner"}),
        (
            "import hpgo.planning.planner, hpgo.show.report",
            {"numpy", "networkx", "matplotlib", "rich", "yaml", "click", "torch"},
        ),
        (
            (
                "from hpgo.cli.main import group\n"
                "group(['plan', 'bert-48', '-c', 'dapple-a', '-b', '64'], standalone_mode=False)"
            ),
            {"numpy", "networkx", "matplotlib", "rich", "yaml", "torch"},
        ),
    ],
)
def test_what_starts_often_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert heavy & set(done.stderr.split()) == set()


def test_no_module_hides_a_public_function() -> None:
    """Importing `hpgo.plan` as a module would put it where the function `hpgo.plan` is."""
    script = (
        "import contextlib, importlib, inspect, pathlib, pkgutil, hpgo\n"
        "for found in pkgutil.walk_packages(hpgo.__path__, 'hpgo.'):\n"
        "    if not found.name.startswith(('hpgo.__main__', 'hpgo.runtime')):\n"
        "        importlib.import_module(found.name)\n"
        "assert not [name for name in hpgo.__all__ if inspect.ismodule(getattr(hpgo, name)) and name not in"
        " hpgo._MODULES]\n"
        "profile, cluster = hpgo.read_profile('vgg-19'), hpgo.Cluster.of(nodes=1, devices_per_node=2,"
        " intra_gbit_s=100, inter_gbit_s=10, memory='16 GB')\n"
        "plan = hpgo.plan(profile, cluster, global_batch_size=64)\n"
        "given = [(stage.layers, stage.devices) for stage in plan.stages]\n"
        "hpgo.calibrate(plan, plan.timeline())\n"
        "hpgo.evaluate(profile, cluster, given, global_batch_size=64)\n"
        "toy = hpgo.Profile.chain('toy', batch_size=1, forward_s=[1, 2], backward_s=[2, 4],"
        " activation_bytes=[1, 1], parameter_bytes=[1, 1])\n"
        "hpgo.exhaustive(toy, cluster, global_batch_size=2)\n"
        "hpgo.merge_profiles({'T4': toy, 'A100': toy})\n"
        "hpgo.write_profile(toy, 'toy.yaml')\n"
        "assert hpgo.read_profile('toy.yaml') == toy\n"
        "hpgo.schedules()\n"
        "hpgo.simulate(hpgo.schedule('1f1b', ranks=2, micro_batches=4))\n"
        "schedule = hpgo.schedule('1f1b', ranks=2, micro_batches=2)\n"
        "hpgo.program(schedule, [(['a'], [0]), (['b'], [1])], pipeline_micro_batch_size=1, global_batch_size=2)\n"
        "hpgo.plan_llm('llama-3-8b', hpgo.Cluster.preset('h100:1'), global_batch_size=8, seq_length=4096, devices=2)\n"
        "gpus = hpgo.Cluster.preset('h100')\n"
        "front = hpgo.llm_pareto_front('llama-3-8b', gpus, global_batch_size=8, seq_length=4096, points=2)\n"
        "hpgo.compare(front[0], front[0])\n"
        "hpgo.draw_pareto_front(front, 'front.svg')\n"
        "hpgo.draw_llm_plan(front[0], gpus, 'way.svg')\n"
        "small = {'global_batch_size': 8, 'seq_length': 1024}\n"
        "hpgo.draw_mixed_plan(hpgo.plan_mixed_llm('llama-3.2-1b', 'h100:1+a100:1', **small), 'mixed.svg')\n"
        "print(hpgo.size_llm('llama-3-8b', tokens=1e9, days=9, on=['h100'], gpus=(8, 16)))\n"
        "print(hpgo.fit_llm('llama-3-8b', 'h100', methods=['lora']))\n"
        "step = hpgo.MeasuredStep.of('llama-3-8b', gpus, front[0], front[0].step_s)\n"
        "hpgo.fit_platform([step])\n"
        "hpgo.estimate_llm('llama-3-8b', hpgo.Cluster.preset('h100'), global_batch_size=16, seq_length=4096)\n"
        "with contextlib.suppress(hpgo.errors.HpgoError):\n"  # there is no such file, and perhaps not the package
        "    hpgo.estimate('absent.onnx', device='a100')\n"
        "called = {'plan', 'evaluate', 'calibrate', 'plan_llm', 'compare', 'draw_pareto_front', 'draw_llm_plan',"
        " 'plan_mixed_llm', 'draw_mixed_plan', 'size_llm', 'fit_llm',"
        " 'fit_platform', 'llm_pareto_front',"
        " 'exhaustive', 'estimate', 'read_profile', 'write_profile', 'merge_profiles',"
        " 'schedules', 'schedule', 'simulate', 'partition', 'partition_files', 'estimate_llm', 'program'}\n"
        "functions = {name for name in hpgo.__all__ if inspect.isfunction(getattr(hpgo, name))}\n"
        "assert functions == called, functions ^ called\n"
        "write = lambda name, text: pathlib.Path(name).write_text(text)\n"
        "write('models.yml', 'm: {layers: 2, mem_MB: [1, 1], parameters_in: 4, parameters_out: [4, 4]}')\n"
        "write('types.yml', 't: {bw_Mbps: 100, mem_MB: 100, model_profiles: {m: [{batch_size: 1, dtype:"
        " torch.float32, time_s: [1, 2]}]}}')\n"
        "write('devices.yml', 't: [a, b]')\n"
        "hpgo.partition_files('models.yml', 'types.yml', 'devices.yml', model='m', batch_size=1)\n"
        "hpgo.partition(toy, cluster)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", script], timeout=60, check=True, cwd=folder)
