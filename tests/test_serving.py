"""Plans of inference for engines that serve: each stage gets the blocks that the plan gives it."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo import export
from hpgo.base.documents import parse_yaml
from hpgo.hardware.cluster import Device, Link, Node

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("vllm", "sglang", "llama.cpp", "accelerate", "tensorrt-llm")
HAS_TORCH, HAS_ACCELERATE = (importlib.util.find_spec(name) is not None for name in ("torch", "accelerate"))


def model(blocks: int) -> hpgo.Profile:
    """An embedding, equal blocks and a head."""
    names = ["embed", *(f"layers.{at}" for at in range(blocks)), "head"]
    layers = tuple(hpgo.Layer(name, name, (1.0,), (2.0,), (8.0,), 8.0) for name in names)
    return hpgo.Profile("toy", (1,), layers, tuple(pairwise(names)))


def hosts(speeds: list[float], names: list[str] | None = None) -> hpgo.Cluster:
    """A machine with one device for each speed."""
    nodes = tuple(
        Node(Device(f"d{at}", 16e9, speed), 1, names[at] if names else f"host{at}") for at, speed in enumerate(speeds)
    )
    return hpgo.Cluster("mixed", nodes, Link(1e9, 1e9), Link(1e9, 1e9))


def served(blocks: int, speeds: list[float], engine: str = "vllm") -> hpgo.ChainPlan:
    return hpgo.partition(model(blocks), hosts(speeds), framework=engine)


def main(plan: Any, engine: str) -> str:
    return next(iter(export.files(plan, engine).values()))


def called(text: str, folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """The words of the command that a script ends in, and its environment."""
    tell = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    for name in ("vllm", "python3", "llama-server", "trtllm-serve"):
        (folder / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{tell}' {name} \"$@\"\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    done = subprocess.run(
        ["bash", "-c", text, "serve.sh", *words],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return tuple(json.loads(done.stdout))  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_vllm_and_sglang_get_the_blocks_of_each_stage_and_the_sizes(engine: str, tmp_path: Path) -> None:
    plan = served(24, [1.0, 2.0, 3.0], engine)
    words, environment = called(main(plan, engine), tmp_path, "me/model", "two words")
    counts = [int(count) for count in environment[f"{engine.upper()}_PP_LAYER_PARTITION"].split(",")]
    assert tuple(counts) == plan.blocks
    assert sum(counts) == 24
    assert len(counts) == len(plan.stages) == 3
    start = ["vllm", "serve"] if engine == "vllm" else ["python3", "-m", "sglang.launch_server"]
    sizes = ("--pipeline-parallel-size", "--tensor-parallel-size") if engine == "vllm" else ("--pp-size", "--tp-size")
    assert words == [*start, "me/model", "two words", sizes[0], "3", sizes[1], "1"]
    assert "CUDA_VISIBLE_DEVICES" not in main(plan, engine)


def test_tensorrt_llm_gets_the_blocks_of_each_stage_in_a_file_beside_the_script(tmp_path: Path) -> None:
    plan = served(24, [1.0, 2.0, 3.0], "tensorrt-llm")
    script, config = hpgo.export.save(plan, "tensorrt-llm", tmp_path / "two words.sh")
    words, _ = called(script.read_text(encoding="utf-8"), tmp_path, "me/model")
    assert words == ["trtllm-serve", "me/model", "--pp_size", "3", "--tp_size", "1", "--config", f"./{config.name}"]
    assert parse_yaml(config.read_text(encoding="utf-8"), config.name, hpgo.errors.ArgumentError) == {
        "pp_partition": list(plan.blocks)
    }


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_llama_cpp_lays_each_block_on_the_device_of_its_stage(counts: list[int]) -> None:
    import numpy as np

    plan = replace(served(3, [1.0]), blocks=tuple(counts), stages=served(3, [1.0]).stages * len(counts))
    words = main(plan, "llama.cpp").split("exec ")[1].split()
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--split-mode"] == "layer"
    layers = int(options["--gpu-layers"])
    assert layers == sum(counts) + 1  # the output is one more
    # Its rule: shares are summed up and normalised, and a layer goes to the first device whose sum is larger.
    ends = np.cumsum(np.array(options["--tensor-split"].split(","), dtype=np.float32), dtype=np.float32)
    ends /= ends[-1]
    places = [
        int(np.searchsorted(ends, np.float32(layer) / np.float32(layers), side="right")) for layer in range(layers)
    ]
    wanted = [stage for stage, count in enumerate(counts) for _ in range(count)]
    assert places == [*wanted, len(counts) - 1]


def assigned(text: str) -> dict[str, Any]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def test_accelerate_gets_the_first_block_of_each_process() -> None:
    plan = served(10, [1.0, 2.0, 3.0], "accelerate")
    text = main(plan, "accelerate")
    assert assigned(text) == {"BLOCKS": list(plan.blocks), "DEVICES": [0, 1, 2]}
    names: dict[str, Any] = {}
    exec(compile(text, "planned.py", "exec"), names)
    first, second, _ = plan.blocks
    assert names["split_points"]("h") == [f"h.{first}", f"h.{first + second}"]


@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed: pip install torch")
def test_accelerates_device_map_places_every_weight() -> None:
    from torch import nn

    plan = served(6, [1.0, 2.0], "accelerate")
    names: dict[str, Any] = {}
    exec(compile(main(plan, "accelerate"), "planned.py", "exec"), names)
    inner = nn.Module()
    inner.embed, inner.layers, inner.norm = (
        nn.Embedding(4, 2),
        nn.ModuleList(nn.Linear(2, 2) for _ in range(6)),
        nn.Linear(2, 2),
    )
    whole = nn.Module()
    whole.model, whole.head = inner, nn.Linear(2, 4)
    whole.scale = nn.Parameter(inner.norm.weight.detach().clone())
    places = names["device_map"](whole)
    assert places["model.embed"] == 0
    assert places["model.norm"] == places["head"] == 1
    assert [places[f"model.layers.{at}"] for at in range(6)] == [0] * plan.blocks[0] + [1] * plan.blocks[1]
    assert all(any(f"{name}.".startswith(f"{key}.") for key in places) for name, _ in whole.named_parameters())
    if HAS_ACCELERATE:
        from accelerate.utils import check_device_map

        del whole.scale  # which it takes, with a warning
        check_device_map(whole, {name: device for name, device in places.items() if name != "scale"})
    inner.norm = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"6 blocks, but `model\.norm` has 1"):
        names["device_map"](whole, "model.norm")


@pytest.mark.parametrize("engine", ENGINES)
def test_stages_on_one_machine_are_told_their_gpus_in_order(engine: str, tmp_path: Path) -> None:
    node = Node(Device("fast", 16e9), 3, "box")
    cluster = hpgo.Cluster("box", (node,), Link(1e9, 1e9), Link(1e9, 1e9))
    plan = hpgo.partition(model(9), cluster, framework=engine)
    turned = replace(plan, stages=plan.stages[::-1])
    order = [int(stage.hosts[0].removeprefix("box:")) for stage in turned.stages]
    assert sorted(order) == [0, 1, 2]
    text = main(turned, engine)
    if engine == "accelerate":
        assert assigned(text)["DEVICES"] == order
    else:
        assert called(text, tmp_path)[1]["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, order))


def test_groups_of_gpus_share_layers_or_are_refused(tmp_path: Path) -> None:
    node = Node(Device("group", 64e9), 2, "box")
    cluster = hpgo.Cluster("box", (node,), Link(1e9, 1e9), Link(1e9, 1e9), gpus_per_device=4)
    for engine in ENGINES:
        plan = hpgo.partition(replace(model(8), gpus_per_device=4), cluster, framework=engine)
        assert plan.gpus_per_device == 4
        if engine in {"vllm", "sglang", "tensorrt-llm"}:
            words, environment = called(main(plan, engine), tmp_path)
            sizes = words[-6:-2] if engine == "tensorrt-llm" else words[-4:]
            assert sizes[1::2] == ["2", "4"]
            assert sorted(environment["CUDA_VISIBLE_DEVICES"].split(",")) == list("01234567")
        else:
            with refused(hpgo.errors.ArgumentError, "unsupported", "4", "GPUs"):
                main(plan, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_can_not_do_is_refused_with_the_way_out(engine: str) -> None:
    free = hpgo.partition(model(6), hosts([1.0, 1.0]))
    shared = hpgo.partition(model(2), hosts([1.0] * 4, list("abcd")), max_replicas=4, framework=engine)
    shared = replace(shared, stages=tuple(replace(stage, hosts=("a", "b")) for stage in shared.stages))
    narrow = served(6, [1.0, 1.0], engine)
    narrow = replace(narrow, hops=(narrow.hops[0], replace(narrow.hops[1], bits=8), narrow.hops[2]))
    cases = [
        (free, "has no numbers of blocks"),
        (shared, "2 hosts in turn"),
        (narrow, "quantizes activations"),
        (replace(served(6, [1.0, 1.0], engine), objective="bits"), "quantizes activations"),
        (hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048), "replicas"),
        ("plan.json", "the plan is `plan.json`"),
    ]
    for plan, says in cases:
        with pytest.raises(hpgo.errors.ArgumentError, match=re.escape(says)) as caught:
            main(plan, engine)
        assert caught.value.hint


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_plan_is_served_with_a_note(engine: str) -> None:
    plan = hpgo.evaluate(model(6), hosts([1.0, 1.0]), [(3, [1]), (5, [0])], global_batch_size=4)
    text = main(plan, engine)
    assert "a training plan" in text
    assert "stage 0 on node1: 2 blocks" in text
    assert "stage 1 on node0: 4 blocks" in text


@pytest.mark.parametrize("name", ["x\ntouch pwned", "`touch pwned`", "'''\nimport os", "$(touch pwned)"])
def test_names_are_never_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = hpgo.partition(replace(model(4), name=name), hosts([1.0, 1.0], [name, "other"]), framework="vllm")
    for engine in ENGINES[:3]:
        called(main(plan, engine), tmp_path)
    assert set(assigned(main(plan, "accelerate"))) == {"BLOCKS", "DEVICES"}
    assert not (tmp_path / "pwned").exists()


def test_chain_plans_come_back_from_their_files(tmp_path: Path) -> None:
    for plan in (served(6, [1.0, 2.0]), hpgo.partition(model(6), hosts([1.0, 2.0]), objective="hosts")):
        plan.save(tmp_path / "chain.json")
        assert hpgo.ChainPlan.read(tmp_path / "chain.json") == plan


def test_damaged_files_of_chain_plans_are_told_from_good_ones() -> None:
    good = json.loads(served(6, [1.0, 2.0]).to_json())
    bad = [
        {key: value for key, value in good.items() if key != "stages"},
        good | {"version": 3},
        good | {"format": "hpgo.plan"},
        good | {"stages": 3},
        good | {"stages": [3]},
        good | {"stages": [good["stages"][0] | {"first": "x"}, good["stages"][1]]},
        good | {"stages": [good["stages"][0] | {"hosts": []}, good["stages"][1]]},
        good | {"blocks": [6]},
        good | {"blocks": [6, 0]},
        good | {"interval_s": None},
        good | {"unknown": 1},
        [],
    ]
    for document in bad:
        with pytest.raises(hpgo.errors.ArgumentError, match="the plan"):
            hpgo.ChainPlan.from_json(json.dumps(document))


def test_the_commands_lead_from_a_profile_to_a_script(tmp_path: Path) -> None:
    hpgo.write_profile(model(12), tmp_path / "llm.yaml")
    (tmp_path / "two.yaml").write_text(hosts([1.0, 3.0]).yaml(), encoding="utf-8")

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hpgo", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    for engine in ENGINES:
        told = run("partition", "--profile", "llm.yaml", "--cluster", "two.yaml", "--framework", engine, "--json")
        (tmp_path / "chain.json").write_text(told, encoding="utf-8")
        text = run("export", "chain.json", "--to", engine)
        assert text == main(hpgo.ChainPlan.from_json(told), engine)
        run("export", "chain.json", "--to", engine, "-o", "out")
        # Files beside the script carry its name, so that two exports don't share them.
        assert (tmp_path / "out").read_text(encoding="utf-8") == text.replace('"/llm-api', '"/out.llm-api')
    assert list(itertools.accumulate(json.loads(told)["blocks"]))[-1] == 12
