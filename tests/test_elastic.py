"""A run that loses a machine goes on without it, and with it when it is back, as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group

pytest.importorskip("torch", reason="needs torch: pip install torch")

import elastic_models
from elastic_runs import RUN, Nodes, undisturbed
from ports import free_port
from refusals import refused
from test_faults import here
from torch.distributed import TCPStore
from warm_runs import Runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

STEPS = 120


@pytest.mark.slow
def test_a_machine_is_killed_and_returns_and_the_losses_are_those_of_a_run_that_lost_none(tmp_path: Path) -> None:
    elastic_models.plan(4).save(tmp_path / "plan.json")
    with here():
        whole = undisturbed(tmp_path, STEPS)
    pace = tmp_path / "pace"
    pace.write_text("0.02")
    words = (
        *RUN,
        "--elastic",
        "--checkpoint",
        "saved",
        "--every",
        "3",
        "--losses",
        "losses.jsonl",
        "--heartbeat-timeout",
        "4",
    )
    with Nodes(tmp_path, "3:4", *words, "--steps", str(STEPS), restarts=9) as nodes:
        nodes.start(0, 1, 2, 3)
        nodes.wait_for(lambda steps: len(steps) >= 5)
        nodes.lose(1)
        nodes.wait_for(lambda steps: steps[-1]["ranks"] == 3)
        pace.write_text("0.05")  # so that steps are left when it is back
        nodes.start(1)
        nodes.wait_for(lambda steps: steps[-1]["ranks"] == 4)
        pace.write_text("0")
        assert nodes.codes() == dict.fromkeys(range(4), 0), nodes.said()
    assert nodes.left == []
    steps = nodes.steps()
    assert [one["ranks"] for at, one in enumerate(steps) if not at or one["ranks"] != steps[at - 1]["ranks"]] == [
        4,
        3,
        4,
    ]
    assert sorted({one["step"] for one in steps}) == list(range(1, STEPS + 1))
    assert [one["loss"] for one in steps] == pytest.approx([whole[one["step"] - 1] for one in steps], rel=1e-10)
    again = [after["step"] for before, after in itertools.pairwise(steps) if after["step"] <= before["step"]]
    assert len(again) <= 1  # a machine that returns waits for a step to be saved
    said = nodes.said()
    assert said.count("4 ranks: running the plan of plan.json") == 2
    assert re.search(r"^3 ranks: planned again in [\d.]+ m?s, ", said, re.MULTILINE)
    assert re.search("^error: rank . of stages? .*: (no sign of life for 4 s|.* lost)", said, re.MULTILINE)
    newest = tmp_path / f"saved/step-{STEPS}/checkpoint.json"
    assert json.loads(newest.read_text())["steps"] == STEPS
    assert not list((tmp_path / "saved").glob(".*"))


@pytest.mark.slow
def test_ranks_are_started_again_in_a_store_that_is_used_until_no_restart_is_left(tmp_path: Path) -> None:
    elastic_models.plan(2).save(tmp_path / "plan.json")
    (tmp_path / "pace").write_text("0.002")
    words = (*RUN, "--steps", "100000", "--checkpoint", "saved", "--every", "1", "--resume", "--losses", "losses.jsonl")
    with Nodes(tmp_path, "2", *words, "--heartbeat-timeout", "4", restarts=1, shared_store=True) as nodes:
        nodes.start(0, 1)
        for _ in range(2):
            known = len(nodes.steps())
            nodes.wait_for(lambda steps, known=known: len(steps) >= known + 4)  # type: ignore[misc]
            nodes.signal(1, signal.SIGKILL, agent=False)  # after which no step is possible
        assert nodes.codes() == {0: 1, 1: 1}, nodes.said()
    assert nodes.left == []
    said, steps = nodes.said(), nodes.steps()
    assert said.count("no checkpoint in saved yet") == 1
    assert len(re.findall(r"^resumed from step \d+$", said, re.MULTILINE)) == 1, said
    errors = re.findall("^error: rank .*", said, re.MULTILINE)
    assert len(errors) == 2, said
    again = [after["step"] for before, after in itertools.pairwise(steps) if after["step"] <= before["step"]]
    assert len(again) <= 2
    with here():
        whole = undisturbed(tmp_path, steps[-1]["step"])
    assert [one["loss"] for one in steps] == [whole[one["step"] - 1] for one in steps]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("elastic")
    plan = elastic_models.plan(4)
    plan.save(folder / "plan.json")
    plan.program().save(folder / "program.json")
    plan.save(folder / "bare.json", embed=False)
    elastic_models.plan(4, memory="40 MB").save(folder / "tight.json")
    assert isinstance(plan.assumed.profile, hpgo.Profile)
    two = hpgo.Cluster.of(nodes=2, devices_per_node=2, intra_gbit_s=10, inter_gbit_s=10)
    hpgo.plan(plan.assumed.profile, two, global_batch_size=24).save(folder / "pairs.json")
    unlike = hpgo.Cluster.from_seps([2, 3])
    hpgo.plan(plan.assumed.profile, unlike, global_batch_size=24).save(folder / "unlike.json")
    with here():
        made = Runs(folder)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("file", "given", "said"),
    [
        ("program.json", {}, "program.json is not a plan of `hpgo plan`, but elastic runs have to plan again"),
        ("bare.json", {}, "bare.json has no profile and cluster, but elastic runs have to plan again"),
        ("unlike.json", {}, "the nodes of cluster `.*` differ, but it is unknown which of them are left"),
        ("absent.json", {}, "file not found: `absent.json`"),
        ("tight.json", {}, "for 1 rank, no plan fits: .* 32.06 MB short"),
        ("pairs.json", {}, "torchrun has started 1 rank on this node, but nodes of cluster `2x2` have 2 devices"),
        (
            "plan.json",
            {"TORCHELASTIC_USE_AGENT_STORE": "True"},  # and so the launcher's store, which is there
            "torchrun keeps the store of the run on one node, but this node may be lost",
        ),
    ],
)
def test_what_can_not_be_planned_again_is_told_once(file: str, given: dict[str, str], said: str, runs: Runs) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if given else None
    port = str(store.port) if store is not None else free_port()
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **given}
    words = ("--workload", "elastic_models:build", "--elastic", "--checkpoint", "saved", "--every", "1")
    runs.start(file, *words, **place)
    ended = runs.finish()
    assert (ended.code, len(ended.errors), ended.left) == (1, 1, []), ended.err
    assert re.fullmatch(f"error: {said}", ended.errors[0]), ended.err
    assert "hint: " in ended.err


@pytest.mark.parametrize(("started", "is_told"), [("1", False), ("2", True)])
def test_it_is_told_when_no_restart_is_left(started: str, is_told: bool, runs: Runs) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place |= {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": started}
    runs.start("plan.json", *RUN[1:], **place)
    ended = runs.finish()
    assert (ended.code, ended.left) == (1, [])
    assert ended.errors == ["error: the plan is for 4 ranks, but 1 were started"]
    note = f"note: `--max-restarts 2` is reached on {socket.gethostname()}: torchrun restarts no rank there"
    assert (ended.err.splitlines()[-1] == note) is is_told


@pytest.mark.slow
def test_more_ranks_than_devices_are_told_once(tmp_path: Path) -> None:
    elastic_models.plan(2).save(tmp_path / "plan.json")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "hpgo", "run", "plan.json", "--elastic"]
    with here():
        done = subprocess.run(
            [sys.executable, *command, "--workload", "elastic_models:build", "--checkpoint", "saved", "--every", "1"],
            cwd=tmp_path, text=True, capture_output=True, check=False, timeout=240,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: 3 ranks were started, but cluster `2x1` has 2 devices"], done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--elastic",), "`--elastic` needs `--checkpoint FOLDER --every N`"),
        (("--elastic", "--checkpoint", "saved"), "`--elastic` needs `--checkpoint FOLDER --every N`"),
        (("--elastic", "--checkpoint", "saved", "--every", "1"), "`--elastic` needs torchrun"),
    ],
)
def test_options_that_elastic_runs_lack_are_told(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(group, ["run", "plan.json", "--workload", "mlp", *words])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "gpipe", "even_split": True, "overlap": False, "min_samples_per_replica": 4},
        {"memory": hpgo.MemoryModel(0.5, 4.0, shard_optimizer=True, reserved_bytes=1e6)},
        pytest.param({"schedule": "auto"}, marks=pytest.mark.slow),
        {"schedule": "zb_v"},
        {"tolerance": 0.1},
        {"framework": "megatron"},
    ],
)
def test_planning_again_asks_the_question_of_the_plan(options: dict[str, Any]) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    whole = hpgo.plan(profile, cluster, global_batch_size=64, **options)
    stored = hpgo.Plan.from_json(whole.to_json())
    fewer = hpgo.plan(profile, cluster.first(8), global_batch_size=64, recompute="auto", **options)
    again = stored.replan(8)
    assert (again.step_s, again.lower_bound_s) == (fewer.step_s, fewer.lower_bound_s)
    assert (again.stages, again.schedule, again.memory_preference) == (
        fewer.stages,
        fewer.schedule,
        fewer.memory_preference,
    )
    assert again.assumptions == fewer.assumptions
    with refused(hpgo.errors.ClusterError, "invalid_cluster", "16", "17"):
        stored.replan(17)
    with refused(hpgo.errors.ArgumentError, "mismatch"):
        hpgo.Plan.from_json(whole.to_json(embed=False)).replan(8)


def test_losses_are_added_to_a_file(runs: Runs) -> None:
    elastic_models.plan(1).save(runs.folder / "one.json")
    words = ("one.json", *RUN[1:], "--losses", "one.jsonl", "--checkpoint", "one", "--resume")
    for steps in (2, 3):
        runs.start(*words, "--steps", str(steps))
        ended = runs.finish()
        assert (ended.code, ended.err) == (0, "")
    rows = [json.loads(line) for line in (runs.folder / "one.jsonl").read_text().splitlines()]
    assert [row.keys() for row in rows] == [{"step", "loss", "step_s", "ranks", "ended_s"}] * 3
    assert [(row["step"], row["ranks"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    assert rows[0]["ended_s"] < rows[1]["ended_s"]
    runs.start(*words[:-3], "--losses", "absent/losses.jsonl")
    ended = runs.finish()
    assert (ended.code, len(ended.errors)) == (1, 1)
    assert ended.errors[0].startswith("error: can't write `absent/losses.jsonl`: ")
