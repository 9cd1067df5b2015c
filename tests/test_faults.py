"""Whatever a rank is lost by, all end soon and one message names it; who is asked to end does so well."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

pytest.importorskip("torch", reason="needs torch: pip install torch")

import torch.distributed as dist
from fault_models import LAYERS
from ports import free_port
from test_run import finish, start
from warm_runs import Runs

from hpgo.errors import RunError
from hpgo.runtime import guards, launch, progress, rendezvous
from hpgo.runtime.failure_detection import FailureDetector, FailureReport, Limits, LostRankError
from hpgo.runtime.progress import ALL, HERE, SAVE, ProgressEvent, born, busy_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

HOST = socket.gethostname()
WHO = f"rank 3 of stage 1 on {HOST}"
RUN = ("plan.json", "--workload", "fault_models:build", "--dtype", "float64", "--optimizer", "adamw:lr=0.1")
SOON = ("--timeout", "5", "--heartbeat-timeout", "4")
MAX_S = 10.0
CASES = [
    *itertools.product(("kill -9", "SIGSTOP"), ("start", "forward", "all-reduce", "save")),
    *itertools.product(("exception",), ("start", "forward")),
    *itertools.product(("sys.exit(0)",), ("forward", "all-reduce")),
]


def write_plan(folder: Path) -> None:
    """For three ranks and one."""
    schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    stages = [(LAYERS[:3], [0, 1, 2]), (LAYERS[3:], [3])]
    hpgo.program(schedule, stages, pipeline_micro_batch_size=7, global_batch_size=28).save(folder / "plan.json")


@contextmanager
def here() -> Iterator[None]:
    """Runs find the model in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("faults")
    write_plan(folder)
    with here():
        made = Runs(folder)
        yield made
        made.close()


@pytest.mark.parametrize(("fault", "phase"), CASES)
def test_a_lost_rank_ends_all_and_is_named_once(fault: str, phase: str, runs: Runs, tmp_path: Path) -> None:
    saves = ("--checkpoint", str(tmp_path), "--every", "1") if phase == "save" else ()
    when = {"start": 1, "forward": 20, "all-reduce": 3, "save": 2}[phase]  # the second step, but at the start
    runs.start(*RUN, *SOON, *saves, RANK_LOST="3", FAULT=fault, PHASE=phase, WHEN=str(when))
    ended = runs.finish()
    assert (ended.code, len(ended.errors), ended.left) == (1, 1, []), ended.err
    assert ended.after_s < MAX_S
    did = {
        ("exception", "start"): "the workload `fault_models:build` raises ValueError: boom",
        ("exception", "forward"): f"{WHO}, step 1, the forward pass of micro-batch 2 through stage 1: ValueError: boom",
        ("sys.exit(0)", "forward"): f"{WHO}, step 1, the forward pass of micro-batch 2 through stage 1: left before .*",
        ("sys.exit(0)", "all-reduce"): f"{WHO}, step 2, the sum of losses: left before the run had ended, with .*",
        ("kill -9", phase): f"{WHO}, last seen in .*: ended by SIGKILL",
        ("SIGSTOP", phase): f"{WHO}, last seen in .*: no sign of life for 4 s",
    }[fault, phase]
    assert re.fullmatch(f"error: {did}", ended.errors[0]), ended.errors
    assert "hint: " in ended.err
    assert WHO in ended.err


def test_an_exception_in_a_save_is_told_and_the_run_goes_on(runs: Runs, tmp_path: Path) -> None:
    place = {"RANK_LOST": "3", "FAULT": "exception", "PHASE": "save", "WHEN": "2"}
    runs.start(*RUN, "--steps", "4", "--checkpoint", str(tmp_path), "--every", "1", **place)
    ended = runs.finish()
    assert (ended.code, ended.left) == (0, [])
    failed = "no checkpoint of step 2 was written, and the run goes on: rank 3: ValueError: boom"
    assert ended.err == f"warning: {failed}; the last good one is of step 1\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]


def test_what_a_lost_rank_did_is_known_to_half_a_second(runs: Runs) -> None:
    place = {"RANK_LOST": "0", "FAULT": "SIGSTOP", "PHASE": "forward", "DELAY": "0.8", "PACE": "0.4"}
    runs.start(*RUN, *SOON, **place)
    did = "last seen in step 0, the forward pass of micro-batch 0 through stage 0"
    assert runs.finish().errors == [f"error: rank 0 of stage 0 on {HOST}, {did}: no sign of life for 4 s"]


def test_a_rank_that_goes_on_for_ever_is_named_by_those_that_wait_for_it(runs: Runs) -> None:
    runs.start(*RUN, "--timeout", "3", RANK_LOST="1", FAULT="endless", PHASE="forward", WHEN="14")
    ended = runs.finish()
    assert (ended.code, ended.left, ended.after_s < MAX_S) == (1, [], True)
    did = "last seen in step 1, the forward pass of micro-batch 0 through stage 0"
    assert ended.errors == [f"error: rank 1 of stage 0 on {HOST}, {did}: the run has stood still for 3 s"]


def losses(runs: Runs, *words: str) -> tuple[int, list[float]]:
    """Steps before, and the losses of the others."""
    runs.start(*RUN, *words, "--steps", "6", "--json")
    ended = runs.finish()
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    return document["steps_before"], document["losses"]


def test_a_killed_run_goes_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    saves = ("--checkpoint", str(tmp_path), "--every", "1", "--resume")
    _, whole = losses(runs)
    runs.start(*RUN, *saves, "--steps", "6", RANK_LOST="3", FAULT="kill -9", PHASE="forward", WHEN="40")
    assert runs.finish().code == 1
    before, rest = losses(runs, *saves)
    assert 1 <= before <= 3
    assert rest == whole[before:]


@pytest.mark.parametrize("ranks", [(), (2,), (0, 1, 2, 3)])
def test_sigterm_ends_a_run_at_a_step_that_is_saved(ranks: tuple[int, ...], runs: Runs, tmp_path: Path) -> None:
    runs.start(*RUN, "--steps", "100000", "--checkpoint", str(tmp_path))
    runs.wait_for("step 2 ")
    runs.signal(signal.SIGTERM, *ranks)
    ended = runs.finish()
    assert (ended.code, ended.left) == (143, []), ended.err
    last = ended.out.splitlines()[-1].split()[1]
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{last}"]
    assert ended.err == f"preempted: `--resume` continues from {tmp_path}\n"


@pytest.mark.parametrize("phase", ["start", "forward"])
def test_a_grace_ends_what_comes_to_no_boundary(phase: str, runs: Runs, tmp_path: Path) -> None:
    pace = {"PACE": "100"} if phase == "forward" else {}
    place = {"RANK_LOST": "0", "FAULT": "SIGTERM", "PHASE": phase, **pace}
    runs.start(*RUN, "--grace", "4s", "--checkpoint", str(tmp_path), **place)
    ended = runs.finish()
    assert (ended.code, ended.left, ended.errors) == (143, [], []), ended.err
    assert ended.after_s < 5
    why = "" if phase == "start" else ", but no step ended within 4 s"
    assert re.fullmatch(f"preempted: rank 0 of stage 0 on {HOST}, .*: asked to end by SIGTERM{why}\n", ended.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", ["start", "forward", "save"])
def test_ctrl_c_ends_a_run_in_every_phase(phase: str, runs: Runs, tmp_path: Path) -> None:
    place = {"RANK_LOST": "3", "FAULT": "endless", "PHASE": phase}
    runs.start(*RUN, "--checkpoint", str(tmp_path), "--every", "1", **place)
    until_s = time.monotonic() + 60
    while not (runs.folder / "moment").exists():
        time.sleep(0.01)
        assert time.monotonic() < until_s
    runs.signal(signal.SIGINT)
    ended = runs.finish()
    assert (ended.code, ended.err.strip(), ended.left) == (130, "interrupted", [])
    assert ended.after_s < 3


@pytest.mark.slow
def test_torchrun_hears_of_a_rank_that_is_stopped(runs: Runs) -> None:
    """In every run, ranks are stopped without torchrun above, and one leaves under torchrun in tests/test_run.py."""
    place = {"RANK_LOST": "3", "FAULT": "SIGSTOP", "PHASE": "forward", "WHEN": "20"}
    code, _, err = finish(start(runs.folder, *RUN, *SOON, launcher=4, **place))
    after_s = time.monotonic() - float((runs.folder / "moment").read_text())
    assert (code, after_s < MAX_S) == (1, True), err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.fullmatch(f"error: {WHO}, last seen in .*: no sign of life for 4 s", errors[0])


SCRIPT = """
    import os, signal, sys, time
    import torch
    import hpgo
    from hpgo.runtime import Pipeline, Workload

    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    workload = Workload(layers, torch.zeros(2, 4), torch.zeros(2, 4), torch.nn.functional.mse_loss)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    schedule = hpgo.schedule("1f1b", ranks=ranks, micro_batches=2)
    stages = [(["0", "1"], [0]), (["2", "3"], [1])] if ranks == 2 else [(["0", "1", "2", "3"], [0])]
    program = hpgo.program(schedule, stages, pipeline_micro_batch_size=2, global_batch_size=4)
    with Pipeline(program, workload, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), silence_s=4) as pipeline:
        while pipeline.steps < 10:
            pipeline.step(*pipeline.example())
            pipeline.checkpoint(sys.argv[1], every=1000)
            if pipeline.steps == 4 and pipeline.rank == 0:
                os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def scripts(folder: Path, number: str, ranks: int) -> list[tuple[int, str]]:
    """Exit codes and stderr of the ranks of a script; rank 0 sends itself a signal."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if ranks > 1 else {}
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", "saved", number], cwd=folder, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **place, **({"RANK": str(rank)} if place else {})},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[1] for process in started]
    return [(process.returncode, err) for process, err in zip(started, said, strict=True)]


def test_scripts_end_with_143_where_they_saved(tmp_path: Path) -> None:
    assert scripts(tmp_path, "SIGTERM", 1) == [(143, "")]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step-5"]


def test_the_others_name_rank_0_even_if_what_they_share_goes_with_it(tmp_path: Path) -> None:
    (first, _), (second, said) = scripts(tmp_path, "SIGKILL", 2)
    assert (first, second) == (-signal.SIGKILL, 1)
    assert f"LostRankError: rank 0 of stage 0 on {HOST}, last seen in " in said.splitlines()[-1]


def reports(*given: dict[str, object]) -> dict[int, bytes]:
    """What ranks write that do and wait for something."""
    usual = {"stages": (0,), "host": "box", "node": "", "pid": 1, "born": "", "does": "its work", "place": (0, 0)}
    usual |= {"waits": None, "save": None, "running": (), "is_lost": False, "has_left": False}
    made = [ProgressEvent(**{**usual, "rank": rank, **one}) for rank, one in enumerate(given)]  # type: ignore[arg-type]
    return {one.rank: one.written(0) for one in made}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (({"waits": 1}, {"waits": 2}, {}), 2),
        (({"waits": ALL, "place": (3, 2)}, {"waits": ALL, "place": (3, 2)}, {"place": (3, 1)}), 2),
        (({"waits": ALL, "place": (3, 2)}, {"waits": 2, "place": (3, 0)}, {"place": (3, 0)}), 2),
        (({"waits": (0, 1), "place": (1, 1)}, {"waits": 2}, {"waits": 3}, {}), 3),
        (({"waits": SAVE, "save": (4, True)}, {"save": (4, False)}, {"waits": SAVE, "save": (4, True)}), 1),
        (({"waits": SAVE, "save": (4, True)}, {"waits": 0, "save": (4, True)}, {}), 2),
        (({}, {}, {}), None),
    ],
)
def test_the_rank_to_blame_is_the_one_that_waits_for_nobody(
    given: tuple[dict[str, object], ...], found: int | None
) -> None:
    judge = FailureDetector(len(given), Limits(timeout_s=5, silence_s=5), 0.0)
    for beat in range(16):
        now_s = beat / 2
        judge.read({rank: b"%d " % beat + raw.partition(b" ")[2] for rank, raw in reports(*given).items()}, now_s)
        verdict = judge.verdict()
        assert (verdict is not None) == (found is not None and now_s > 5)
    assert verdict is None or verdict.message.startswith(f"rank {found} of stage 0 on box, last seen in its work: ")


def test_who_was_stopped_itself_blames_nobody() -> None:
    judge = FailureDetector(2, Limits(), 0.0)
    judge.read(reports({}, {}), 0.5)
    judge.read(reports({}, {}), 100.0)
    assert judge.verdict() is None
    for at_s in (101.0, 102.0, 103.0, 104.0, 105.0):
        judge.read({0: b"%d " % at_s + reports({}, {})[0].partition(b" ")[2]}, at_s)
    verdict = judge.verdict()
    assert verdict is not None
    assert verdict.message == "rank 1 of stage 0 on box, last seen in its work: no sign of life for 5 s"


def test_a_rank_that_computes_without_heartbeats_is_not_lost_and_a_stopped_one_is() -> None:
    """A process that never writes stands for a rank in which a call holds Python's lock."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        mine = HERE.report()
        where = {"node": mine.node, "pid": busy.pid, "born": born(busy.pid)}
        near, far = (FailureDetector(3, Limits(silence_s=2), 0.0) for _ in range(2))

        def beats(begin: int, end: int) -> list[str]:
            """Messages of both detectors. Ranks 0 and 2 write, and rank 2 is on another node."""
            for at in range(begin, end):
                ticks, until_s = busy_ticks(busy.pid, born(busy.pid)), time.monotonic() + 20
                while not is_stopped and busy_ticks(busy.pid, born(busy.pid)) == ticks and time.monotonic() < until_s:
                    time.sleep(0.01)
                values = reports({"running": near.running}, where, {"node": "elsewhere"})
                raw = {
                    rank: b"%d " % at + values[rank].partition(b" ")[2] for rank in ((0, 1, 2) if at == 0 else (0, 2))
                }
                for one, node in ((near, mine.node), (far, "elsewhere")):
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(progress, "_identity", lambda _, node=node: (node, mine.born))
                        one.read(raw, at / 2)
            return [verdict.message for one in (near, far) if (verdict := one.verdict()) is not None]

        is_stopped = False
        assert beats(0, 40) == []
        assert (near.running, far.running) == ((1,), ())
        busy.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED)
        is_stopped = True
        assert beats(40, 43) == []
        messages = beats(43, 50)
        assert len(messages) == 2
        assert set(messages) == {"rank 1 of stage 0 on box, last seen in its work: no sign of life for 2 s"}
    finally:
        busy.kill()
        busy.wait()


def test_a_port_of_another_run_is_named_with_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    monkeypatch.setattr(sys, "argv", ["/usr/lib/hpgo/__main__.py"])
    monkeypatch.setattr(rendezvous, "_met", [])
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=f"port {store.port} belongs to a run of another program"):
        rendezvous.meet(20.0)
    names = rendezvous.AddressNames("`--addr`", "`--port`")
    for rank in (0, 1):
        rendezvous._take_place(store, rank, 2, names)
    owner = f"another run, `hpgo` with 2 ranks, whose rank 0 is process {os.getpid()} on {HOST}"
    with pytest.raises(RunError) as caught:
        rendezvous.meet(20.0, names)
    assert caught.value.message == f"port {store.port} belongs to {owner}"
    assert caught.value.hint.startswith("set `--port` to another port")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for rank, size, why in ((1, 2, "its rank 1 is process "), (2, 3, "this rank is one of 3")):
        with pytest.raises(RunError) as caught:
            rendezvous._take_place(store, rank, size, names)
        assert caught.value.message.startswith(f"port {store.port} belongs to {owner}: {why}")


def test_a_host_without_an_address_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.0)
    for host in ("no-such-host.invalid", "x" * 64 + ".invalid"):
        with pytest.raises(RunError, match=f"the host of rank 0 is `{host}`, which has no address: ") as caught:
            rendezvous.check_host(host, "MASTER_ADDR")
        assert caught.value.hint.startswith("set MASTER_ADDR to ")
    rendezvous.check_host("127.0.0.1", "MASTER_ADDR")


class Queue(list[Any]):
    """The errors that ranks have reported, as `launch` reads them."""

    def empty(self) -> bool:
        return not self

    def get(self) -> Any:
        return self.pop(0)


def test_the_headline_is_the_first_reason_and_not_what_followed_from_it() -> None:
    first = FailureReport("rank 2 on box, last seen in its work: ended by SIGKILL", "read its output above")
    followed = RunError("not all ranks reached the sum of losses: RuntimeError: connection closed")
    with pytest.raises(RunError, match="ended by SIGKILL"):
        launch._raise_first(Queue([followed, LostRankError(first.message)]), first, [])
    own = hpgo.errors.ArgumentError("the loss is a list", "return a number")
    with pytest.raises(hpgo.errors.ArgumentError, match="the loss is a list"):
        launch._raise_first(Queue([followed, own]), FailureReport(own.message, own.hint), [])
    with pytest.raises(RunError, match="not all ranks reached"):
        launch._raise_first(Queue([LostRankError("another"), followed]), None, [])


def test_of_lost_ranks_the_first_is_named() -> None:
    ranks: list[Any] = [SimpleNamespace(exitcode=None) for _ in range(4)]
    overseer = launch._Overseer(ranks, [(rank,) for rank in range(4)], None, Limits())
    for ended in ({1: 1, 2: -signal.SIGKILL}, {0: -signal.SIGSEGV}, {3: 0}):
        for rank, code in ended.items():
            ranks[rank].exitcode = code
        overseer._note_ended()
    assert overseer._ended_ranks == [2, 1, 0, 3]
    found = overseer._ended([(rank, ranks[rank].exitcode) for rank in overseer._ended_ranks])
    assert found is not None
    assert found.message == f"rank 2 of stage 2 on {HOST}: ended by SIGKILL"


def test_where_an_error_happened_reads_as_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    here = progress.Progress()
    here.begin(1, (0,))
    monkeypatch.setattr(guards, "HERE", here)
    monkeypatch.setattr(guards, "_here", [None])
    error = RunError("not all ranks reached the end", rendezvous.LOST)
    error.__cause__ = RuntimeError("gloo")
    who = f"rank 1 of stage 0 on {HOST}"
    for words, step, where in (
        ("the end", None, f"at the end, on {who}"),
        ("the sum of losses", 3, f"in step 3, the sum of losses, on {who}"),
    ):
        here.does(words)
        here.step = step
        assert guards.named(error).hint == f"another rank was lost, or took too long; it happened {where}"


@pytest.mark.parametrize(
    ("limits", "silent", "still"),
    [
        (Limits(5.0, 2.0), "`silence_s`", "`timeout_s`"),
        (Limits(5.0, 2.0, 30.0, "--timeout", "--heartbeat-timeout"), "`--heartbeat-timeout`", "`--timeout`"),
        (Limits(5.0, 2.0, timeout_name="--timeout", silence_name=""), None, "`--timeout`"),
    ],
)
def test_hints_name_what_the_user_can_set(limits: Limits, silent: str | None, still: str) -> None:
    lost, stalled = (FailureDetector(2, limits, 0.0) for _ in range(2))
    for beat in range(1, 13):
        written = {rank: b"%d " % beat + raw.partition(b" ")[2] for rank, raw in reports({"waits": 1}, {}).items()}
        lost.read({0: written[0]} if beat > 1 else written, beat / 2)
        stalled.read(written, beat / 2)
    found = [one.verdict() for one in (lost, stalled)]
    assert [one is not None and "no sign of life" in one.message for one in found] == [True, False]
    hints = [re.findall("`(.*?)`", one.hint) for one in found if one is not None]
    assert hints == [[silent.strip("`")] if silent else [], [still.strip("`")]]
