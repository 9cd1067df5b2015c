"""`hpgo run` trains by a plan here and under launchers, and whatever goes wrong is said once and ends all ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks
from click.testing import CliRunner

import hpgo
from hpgo.base.units import format_seconds
from hpgo.cli.main import group

pytest.importorskip("torch", reason="needs torch: pip install torch")

from ports import free_port
from warm_runs import Runs

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
HOST = socket.gethostname()
ACTION = "the forward pass of micro-batch 1 through stage 1"
LAYERS = [str(at) for at in range(6)]
# The last layer of the last rank does what HOW says, once, in the second step.
MODEL = """
import os, sys, time
import torch
from torch import nn
from hpgo.runtime import Workload

def boom():
    raise ValueError("boom")

HOW = {"raise": boom, "leave": lambda: sys.exit(0), "nan": lambda: None,
       "sleep": lambda: time.sleep(60)}

class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, given):
        self.runs += not given.is_meta and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 0)) - 1
        if self.runs == 6 and "HOW" in os.environ:
            HOW[os.environ["HOW"]]()
            given = given * float("nan")
        return self.linear(given)

def data():
    return [(torch.full((4,), at / 60), torch.full((4,), -at / 60)) for at in range(60)]

def few():
    return data()[:27]

def metrics():
    return {"error": lambda outputs, targets: (outputs - targets).abs().mean(1)}

def optimizer():
    def make(parameters, names):
        assert [name.rpartition(".")[2] for name in names] == ["bias", "weight"] * (len(parameters) // 2)
        return torch.optim.SGD(parameters, lr=0.01)
    return make

def hook():
    seen = []
    def after(pipeline, loss):
        seen.append(loss)
        if pipeline.rank == 0 and pipeline.steps == 3:
            print(f"the hook saw {len(seen)} losses, the last is {loss:.6g}")
    return after

def build():
    layers = [nn.Linear(4, 4) for _ in range(5)]
    return Workload([*layers, Last()], torch.randn(3, 4), torch.randn(3, 4), nn.functional.mse_loss)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs and a model to run."""
    path = tmp_path_factory.mktemp("run")
    (path / "mine.py").write_text(MODEL)
    for name, groups in {"one": [[0]], "two": [[0], [1]], "three-one": [[0, 1, 2], [3]]}.items():
        schedule = hpgo.schedule("1f1b", ranks=len(groups), micro_batches=4)
        cut = [LAYERS] if len(groups) == 1 else [LAYERS[:3], LAYERS[3:]]
        stages = list(zip(cut, groups, strict=True))
        hpgo.program(schedule, stages, pipeline_micro_batch_size=7, global_batch_size=28).save(path / f"{name}.json")
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    """Starts `hpgo run` where nothing depends on how Python was started."""
    made = Runs(folder)
    yield made
    made.close()


def ended(runs: Runs, *words: str, **variables: str) -> tuple[int, str, str]:
    """Exit code of a run and what it printed; nothing of its session may be left."""
    runs.start(*words, **variables)
    end = runs.finish()
    assert not end.left
    return end.code, end.out, end.err


def start(folder: Path, *words: str, launcher: int = 0, **variables: str) -> subprocess.Popen[str]:
    """Starts `hpgo run`, or under torchrun with so many ranks, in a session of its own."""
    before = ["-m", "torch.distributed.run", "--nproc-per-node", str(launcher)] if launcher else []
    return subprocess.Popen(
        [sys.executable, *before, "-m", "hpgo", "run", *words], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what it printed; nothing of its session may be left."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("a process was left")
    return process.returncode, out, err


WORKLOAD = ("--workload", "mine:build")


def test_plans_of_one_workload_give_the_same_losses_here_and_under_torchrun(folder: Path, runs: Runs) -> None:
    found: list[Any] = []
    for file, launcher in (("one", 0), ("three-one", 0), ("two", 2)):
        words = (f"{file}.json", *WORKLOAD, "--steps", "3", "--dtype", "float64", "--json", "--clip-norm", "0.5")
        words += ("--optimizer", "adamw:lr=0.1")
        code, out, err = finish(start(folder, *words, launcher=launcher)) if launcher else ended(runs, *words)
        assert code == 0, err
        found.append(json.loads(out))
    for document in found:
        assert document["losses"] == pytest.approx(found[0]["losses"], rel=1e-10)
        assert document["exit"] == 0
        assert document["step_s"]["predicted"] is None
        assert document["step_s"]["measured"] > 0
    assert found[0]["losses"][2] < found[0]["losses"][0]
    assert [stage["devices"] for stage in found[1]["stages"]] == [[0, 1, 2], [3]]
    assert all(stage["backward_s"]["measured"] > 0 for stage in found[1]["stages"])
    assert [stage["transfer_s"]["measured"] is None for stage in found[1]["stages"]] == [False, True]
    assert [stage["grad_reduce_s"]["measured"] is None for stage in found[1]["stages"]] == [False, True]
    assert all(0 < document["bubble"]["measured"] < 1 for document in found)


def test_a_measured_timeline_stands_beside_the_predicted_one(folder: Path, runs: Runs) -> None:
    costs = hpgo.Costs(forward_s=(0.002, 0.004), transfer_s=0.001, gradient_sync_s=(0.003, 0.0))
    program = dataclasses.replace(hpgo.Program.read(folder / "three-one.json"), costs=costs)
    program.save(folder / "priced.json")
    words = ("priced.json", *WORKLOAD, "--steps", "3", "--timeline", "measured.timeline.json")
    code, out, err = ended(runs, *words)
    assert code == 0, err
    measured, predicted = hpgo.Timeline.read(folder / "measured.timeline.json"), hpgo.simulate(program)
    texts = measured.action_texts()
    for rank in range(4):
        ran = [text for text, at in zip(texts, measured.rank, strict=True) if at == rank]
        assert ran == [f"{one.stage}{one.kind}{one.micro_batch}" for one in program.for_rank(rank).actions]
    # Nothing starts before what it takes was made: processes of a machine have one clock.
    at = {place: number for number, place in enumerate(zip(measured.rank.tolist(), texts, strict=True))}
    sent = list(zip(
        measured.transfer_from_rank, measured.transfer_to_rank, measured.transfer_kind, measured.transfer_micro_batch,
        measured.transfer_start_s, measured.transfer_end_s, strict=True,
    ))  # fmt: skip
    assert len(sent) == measured.measures.messages == 2 * 3 * 4  # both ways, of three replicas, four micro-batches
    for sender, taker, is_gradient, micro_batch, start_s, end_s in sent:
        ends = ("1B{}", "0B{}") if is_gradient else ("0F{}", "1F{}")
        made, takes = (at[rank, text.format(micro_batch)] for rank, text in zip((sender, taker), ends, strict=True))
        assert measured.end_s[made] == start_s <= end_s <= measured.start_s[takes]
    rows = [line.split("  ")[0] for line in out.split("difference")[1].splitlines()[1:]]
    assert rows == [
        "step time", "stage 0 forward", "stage 0 backward", "stage 0 to 1", "stage 0 gradient reduction",
        "stage 0 memory", "stage 1 forward", "stage 1 backward", "stage 1 memory", "bubble", "peak memory",
    ]  # fmt: skip
    step = next(line.split() for line in out.splitlines() if line.startswith("step time"))
    assert (" ".join(step[2:4])) == format_seconds(predicted.makespan_s)
    assert (" ".join(step[4:6])) == format_seconds(measured.makespan_s)
    picture = hpgo.draw.save([predicted, measured], folder / "both.svg", labels=["predicted", "measured"]).read_text()
    assert "predicted" in picture
    assert "measured" in picture


@pytest.mark.parametrize(
    ("how", "launcher", "said"),
    [
        ("nan", 0, "the loss of step 2 is nan"),
        (
            "nan --find-nan",
            0,
            (
                f"rank 3 of stage 1 on {HOST}, step 1, {ACTION}: 28 of 28 numbers that layer `5` makes are nan or"
                " infinite"
            ),
        ),
        ("raise", 0, f"rank 3 of stage 1 on {HOST}, step 1, {ACTION}: ValueError: boom"),
        ("leave", 2, f"rank 1 of stage 1 on {HOST}, step 1, {ACTION}: left before the run had ended, with exit code 0"),
    ],
)
def test_what_goes_wrong_in_one_rank_is_said_once_and_ends_all(
    how: str, launcher: int, said: str, folder: Path, runs: Runs
) -> None:
    how, *options = how.split()
    words = ("two.json" if launcher else "three-one.json", *WORKLOAD, *options)
    under = partial(start, folder, launcher=launcher)
    code, _, err = finish(under(*words, HOW=how)) if launcher else ended(runs, *words, HOW=how)
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {said}"]


def test_torchs_pipelining_measures_and_tells_as_the_engine_does(folder: Path, runs: Runs) -> None:
    schedule = hpgo.schedule("zb_h1", ranks=2, micro_batches=4)
    program = hpgo.program(
        schedule, [(LAYERS[:3], [0, 1]), (LAYERS[3:], [2, 3])], pipeline_micro_batch_size=7, global_batch_size=28
    )
    program.save(folder / "even.json")
    words = ("even.json", *WORKLOAD, "--steps", "3", "--dtype", "float64", "--json", "--timeline", "torch.npz")
    losses = []
    for backend in ("hpgo", "torch"):
        code, out, err = ended(runs, *words, "--backend", backend)
        assert (code, err) == (0, "")
        losses.append(json.loads(out)["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    measured = hpgo.Timeline.read(folder / "torch.npz")
    for rank in range(4):
        ran = [text for text, at in zip(measured.action_texts(), measured.rank, strict=True) if at == rank]
        assert ran == [f"{one.stage}{one.kind}{one.micro_batch}" for one in program.for_rank(rank).actions]
        assert (measured.start_s[measured.rank == rank][1:] >= measured.end_s[measured.rank == rank][:-1]).all()
    code, _, err = ended(runs, "even.json", *WORKLOAD, "--backend", "torch", "--timeout", "8", HOW="sleep")
    assert code == 1
    assert err.startswith("error: rank 3 of stage 1 on ")
    assert "the forward pass of micro-batch 1 through stage 1: the run has stood still for 8 s" in err
    code, _, err = ended(runs, "even.json", *WORKLOAD, "--backend", "torch", HOW="raise")
    assert code == 1
    assert err.splitlines()[0] == f"error: rank 3 of stage 1 on {HOST}, step 1, {ACTION}: ValueError: boom"
    assert len(err.splitlines()) == 2, err


def test_too_few_ranks_are_told_once(folder: Path) -> None:
    ranks = warm_ranks.together(2, folder, "hpgo", "run", "three-one.json", *WORKLOAD)
    assert [rank.returncode for rank in ranks] == [1, 1]
    errors = [line for rank in ranks for line in rank.stderr.splitlines()]
    assert [line for line in errors if line.startswith(("error: ", "hint: "))] == [
        "error: the plan is for 4 ranks, but 2 were started",
        "hint: start 4 ranks, one for each device of its cluster, idle ones included",
    ]


def test_a_rank_with_another_plan_is_told_once(folder: Path) -> None:
    other = hpgo.Program.read(folder / "two.json").to_json().replace('"recompute": false', '"recompute": true')
    (folder / "other.json").write_text(other)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        warm_ranks.start("hpgo", folder, "run", f"{name}.json", *WORKLOAD, RANK=str(rank), **place)
        for rank, name in enumerate(("two", "other"))
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    errors = [line for err in said for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: rank 1 has another plan than rank 0: ")


def test_a_port_in_use_is_told(runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        code, _, err = ended(runs, "one.json", *WORKLOAD, **place)
    assert code == 1
    assert err.startswith(f"error: the ranks don't meet at 127.0.0.1:{place['MASTER_PORT']}: ")
    assert "hint: check that the port is free" in err


@pytest.mark.parametrize("whom", ["the command", "all"])
def test_ctrl_c_ends_all_ranks_at_once(whom: str, folder: Path) -> None:
    process = start(folder, "three-one.json", *WORKLOAD, "--steps", "1000000", HOW="sleep")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1 ")
    (os.kill if whom == "the command" else os.killpg)(process.pid, signal.SIGINT)
    begin_s = time.monotonic()
    code, _, err = finish(process)
    assert (code, err.strip()) == (130, "interrupted")
    assert time.monotonic() - begin_s < 10


def test_a_run_goes_on_when_the_reader_of_its_output_has_left(folder: Path) -> None:
    process = start(folder, "two.json", *WORKLOAD, "--steps", "20", "--losses", "unread.jsonl")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (0, "")
    assert len((folder / "unread.jsonl").read_text().splitlines()) == 20


def test_ranks_end_with_the_command_that_started_them(folder: Path) -> None:
    process = start(folder, "two.json", *WORKLOAD, "--steps", "1000000")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    for _ in range(100):
        time.sleep(0.1)
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
    finish(process)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one.json", "--optimizer", "sdg"], "there is no optimizer `sdg`"),
        (["one.json", "--optimizer", "sgd:lr"], "option `lr` of `sgd` must be NAME=NUMBER"),
        (["one.json", "--optimizer", "sgd:speed=1"], "unexpected keyword argument 'speed'"),
        (["one.json", "--optimizer", "absent_module:make"], "the optimizer `absent_module:make`"),
        (["none.json"], "file not found"),
        (["three-one.json", "--backend", "torch"], "stage 1 has 1 replica but stage 0 has 3"),
        (["one.json", "--timeline", "absent/run.npz"], "folder not found: `absent`"),
        (["one.json", "--timeline", "run.png"], "unknown output format: `run.png`"),
        (["chain.json"], "is an inference plan"),
    ],
)
def test_wrong_words_are_told_before_anything_starts(words: list[str], said: str, folder: Path) -> None:
    profile = hpgo.read_profile("vgg-16")
    hpgo.partition(profile, hpgo.Cluster.preset("dapple-b"), batch_size=32).save(folder / "chain.json")
    result = CliRunner().invoke(group, ["run", str(folder / words[0]), *words[1:], *WORKLOAD])
    assert isinstance(result.exception, hpgo.errors.HpgoError)
    assert said in str(result.exception)
    assert result.exception.hint


def test_a_saved_run_goes_on_under_another_plan(folder: Path, runs: Runs) -> None:
    def losses(file: str, steps: int, *words: str) -> tuple[int, list[float]]:
        given = (f"{file}.json", *WORKLOAD, "--steps", str(steps), "--dtype", "float64", "--optimizer", "adamw:lr=0.1")
        code, out, err = ended(runs, *given, "--json", *words)
        assert (code, err) == (0, "")
        document = json.loads(out)
        return document["steps_before"], document["losses"]

    saves = ("--checkpoint", "saved", "--resume")
    _, whole = losses("two", 6)
    assert losses("two", 3, *saves, "--every", "1", "--keep", "2") == (0, whole[:3])
    assert sorted(path.name for path in (folder / "saved").iterdir()) == ["step-2", "step-3"]
    assert losses("three-one", 5, *saves) == (3, pytest.approx(whole[3:5], rel=1e-10))


def test_a_run_goes_through_its_data_epoch_after_epoch_and_goes_on_where_it_stood(folder: Path, runs: Runs) -> None:
    def losses(file: str, *words: str) -> list[float]:
        given = (*WORKLOAD, "--data", "mine:data", "--dtype", "float64", "--optimizer", "sgd:lr=0", "--json")
        code, out, err = ended(runs, f"{file}.json", *given, *words)
        assert (code, err) == (0, "")
        return list(json.loads(out)["losses"])

    whole = losses("one", "--steps", "5")
    assert len(set(whole)) == 5  # weights stay, so each step had other samples: an epoch has two batches of 28 of 60
    saves = ("--checkpoint", "epochs", "--resume")
    assert losses("three-one", "--steps", "3", *saves) == pytest.approx(whole[:3], rel=1e-10)
    assert losses("one", "--steps", "5", *saves) == pytest.approx(whole[3:], rel=1e-10)
    # The third step of an epoch has the last 4 samples, and weights stay. So the mean loss is that of all 60 samples.
    words = ("--no-drop-last", "--validation-data", "mine:data", "--steps", "3", "--data", "mine:data", "--json")
    code, out, err = ended(runs, "three-one.json", *WORKLOAD, *words, "--dtype", "float64", "--optimizer", "sgd:lr=0")
    assert code == 0, err
    found = json.loads(out)
    assert found["losses"][:2] == pytest.approx(whole[:2], rel=1e-10)
    mean = sum(count * loss for count, loss in zip((28, 28, 4), found["losses"], strict=True)) / 60
    assert mean == pytest.approx(found["validation"][0]["loss"], rel=1e-10)
    result = CliRunner().invoke(group, ["run", "one.json", *WORKLOAD, "--no-drop-last"])
    assert (result.exit_code, "needs `--data" in result.stderr) == (2, True)


def test_data_that_is_none_is_told_once(runs: Runs) -> None:
    for data, said in (
        ("mine:absent", "the data `mine:absent`: module 'mine' has no attribute 'absent'"),
        ("mine:few", "the data set has 27 samples, but a global batch takes 28"),
    ):
        code, _, err = ended(runs, "two.json", *WORKLOAD, "--data", data)
        assert code == 1
        assert [line for line in err.splitlines() if line.startswith("error: ")] == [f"error: {said}"]


COUNTED = """
import os, pathlib, hpgo
from hpgo.cli.main import group

make = hpgo.Plan.program

def counted(plan, *args, **how):
    with open("made", "a") as file:  # ranks are other processes
        file.write(f"{os.getpid()}\\n")
    return make(plan, *args, **how)

hpgo.Plan.program = counted
pathlib.Path("parent").write_text(str(os.getpid()))
group()
"""


@pytest.mark.parametrize(
    "words", [["run", "--workload", "mlp:layers=2,width=8"], ["emulate"]], ids=lambda words: words[0]
)
def test_the_program_of_a_plan_is_made_once_for_all_ranks(words: list[str], tmp_path: Path) -> None:
    profile = hpgo.Profile.chain(
        "mlp", batch_size=4, forward_s=[0.02] * 2, backward_s=[0.02] * 2, activation_bytes=[8] * 2,
        parameter_bytes=[8] * 2,
    )  # fmt: skip
    layers = [dataclasses.replace(layer, id=f"linear-{number}") for number, layer in enumerate(profile.layers, start=1)]
    profile = dataclasses.replace(profile, layers=tuple(layers), edges=(("linear-1", "linear-2"),))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, inter_gbit_s=100)
    hpgo.plan(profile, cluster, global_batch_size=8, max_stages=2).save(tmp_path / "plan.json")
    command, *others = words
    # In a process of its own: ranks cannot be forked from one in which a test before this made autograd start threads.
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, command, "plan.json", *others, "--steps", "1", "--json"], cwd=tmp_path,
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "made").read_text(encoding="ascii").split()
    assert made == [(tmp_path / "parent").read_text(encoding="ascii")]


def test_what_a_resumed_run_lacks_is_told(runs: Runs) -> None:
    saves = ("--checkpoint", "told", "--resume")
    for words, code, said in (
        ((*saves, "--steps", "2"), 0, "no checkpoint in told yet\nstep 1 "),
        ((*saves, "--steps", "3"), 0, "resumed from step 2\nstep 3 "),
        ((*saves, "--steps", "3"), 0, "told has step 3, and `--steps` is 3: the run is complete"),
        ((*saves, "--steps", "2"), 0, "told has step 3, and `--steps` is 2: the run is complete"),
        ((*saves, "--steps", "3", "--json"), 0, '"steps_before": 3'),
        (("--checkpoint", "told", "--steps", "5"), 1, "error: `told` holds step 3 of another run, but this run has"),
    ):
        code_there, out, err = ended(runs, "one.json", *WORKLOAD, *words)
        assert code_there == code, err
        assert said in (out if code == 0 else err)
    for words, said in ((["--every", "2"], "`--every` needs"), (["--resume"], "`--resume` needs")):
        result = CliRunner().invoke(group, ["run", "one.json", *WORKLOAD, *words])
        assert result.exit_code == 2
        assert f"{said} `--checkpoint FOLDER`" in result.stderr


def test_a_run_validates_and_calls_the_users_hook(runs: Runs) -> None:
    words = ("--data", "mine:data", "--validation-data", "mine:few", "--metrics", "mine:metrics")
    words += ("--optimizer", "mine:optimizer")
    schedule = ("--lr-schedule", "linear:warmup=1,min=0.5", "--steps", "3")
    found = []
    for plan in ("two.json", "three-one.json"):
        code, out, err = ended(runs, plan, *WORKLOAD, *words, *schedule, "--validate-every", "2", "--json")
        assert code == 0, err
        found.append(json.loads(out))
    one, other = found
    assert [row["step"] for row in one["validation"]] == [2, 3]
    for row, same in zip(one["validation"], other["validation"], strict=True):
        assert row == pytest.approx(same, rel=1e-10)
    assert one["validation"][0]["error"] != one["validation"][1]["error"]
    code, out, err = ended(runs, "two.json", *WORKLOAD, *words, *schedule, "--after-step", "mine:hook")
    assert code == 0, err
    assert f"the hook saw 3 losses, the last is {one['losses'][-1]:.6g}" in out
    last = one["validation"][-1]
    assert f"validation after step 3  loss {last['loss']:.6g}  error {last['error']:.6g}" in out
    assert out.count("validation after") == 1
    code, _, err = ended(runs, "two.json", *WORKLOAD, *words, *schedule, "--after-step", "mine:data")
    assert code == 1
    assert "`mine:data` returns" in err
    for option in (["--metrics", "mine:metrics"], ["--validate-every", "2"]):
        result = CliRunner().invoke(group, ["run", "one.json", *WORKLOAD, *option])
        assert result.exit_code == 2
        assert f"`{option[0]}` needs `--validation-data" in result.stderr
