"""`hpgo plan` and `hpgo evaluate` as people type them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from natives import replace_method
from refusals import refused

import hpgo

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = [sys.executable, "-m", "hpgo"]
ONE_PAIR = {"nodes": 2, "devices_per_node": 1, "intra_gbit_s": 100, "inter_gbit_s": 25}
BERT = ["plan", "bert-48", "--cluster", "dapple-a", "--global-batch-size", "64"]


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def test_plan_prints_the_report_of_the_plan_that_the_function_returns() -> None:
    done = run(*BERT)
    plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{plan}\n\nNext: save the plan with -o plan.json")


def test_json_on_stdout_and_in_the_file_is_the_same_plan(tmp_path: Path) -> None:
    done = run(*BERT, "--json", "-o", str(tmp_path / "plan.json"))
    assert done.returncode == 0
    assert hpgo.Plan.from_json(done.stdout) == hpgo.Plan.read(tmp_path / "plan.json")


def test_options_reach_the_planner() -> None:
    words = [
        "--schedule",
        "gpipe",
        "--pipeline-micro-batch-size",
        "32",
        "--recompute",
        "yes",
        "--max-stages",
        "1",
        "--json",
    ]
    plan = hpgo.Plan.from_json(run(*BERT, *words, "--optimizer-per-weight", "0", "--reserve-memory", "1GB").stdout)
    assert (plan.schedule, plan.pipeline_micro_batch_size, plan.recompute, len(plan.stages)) == ("gpipe", 32, True, 1)
    assert plan.stages[0].memory.optimizer_bytes == 0
    assert plan.stages[0].capacity_bytes == 15e9


def test_equal_shares_reach_the_planner() -> None:
    done = run("plan", "bert-48", "-c", "dapple-a", "-b", "64", "--devices", "3", "--json", "--even-split")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(
        stage["samples_per_replica"] * len(stage["devices"]) in {8, 16, 32, 64, 4, 2}
        for stage in json.loads(done.stdout)["stages"]
    )


def test_a_sweep_has_a_line_for_each_batch_size_and_device_count() -> None:
    done = run("plan", "vgg-19", "-c", "dapple-c", "-b", "256,512", "--devices", "8,16")
    assert done.returncode == 0
    title, table = done.stdout.split("\n\n")
    assert title.startswith("vgg-19 on dapple-c; ")
    *_, head, first, second, third, fourth = table.splitlines()
    assert head.split()[:2] == ["batch", "devices"]
    rows = [row.split()[:2] for row in (first, second, third, fourth)]
    assert rows == [["256", "8"], ["512", "8"], ["256", "16"], ["512", "16"]]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_a_sweep_does_not_vary_stands_in_its_title() -> None:
    batches = run("plan", "vgg-19", "-c", "dapple-c", "-b", "256,512").stdout.splitlines()
    devices = run("plan", "vgg-19", "-c", "dapple-c", "-b", "256", "--devices", "1,2").stdout.splitlines()
    heads = [next(line for line in lines if "bubble" in line) for lines in (batches, devices)]
    assert [head.split()[0] for head in heads] == ["batch", "devices"]
    assert "global batch 256" in devices[0]
    assert max(map(len, batches + devices)) <= 80


def test_a_sweep_draws_and_writes_and_skips_what_does_not_fit(tmp_path: Path) -> None:
    figure, output = tmp_path / "sweep.svg", tmp_path / "sweep.json"
    done = run(
        "plan", "bert-48", "-c", "dapple-a", "-b", "1,64,128", "--plot", str(figure), "-o", str(output), "--markdown"
    )
    assert done.returncode == 0
    assert done.stdout.startswith("## bert-48 on dapple-a; stages as layers × devices\n\n| batch |")
    assert "note: batch 1 on dapple-a" in done.stderr
    document = json.loads(output.read_text(encoding="utf-8"))
    assert [plan["global_batch_size"] for plan in document["plans"]] == [64, 128]
    assert [failure["global_batch_size"] for failure in document["failures"]] == [1]
    assert "<svg" in figure.read_text(encoding="utf-8")


def test_evaluate_reports_the_plan_that_was_asked_for() -> None:
    words = ["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "26@0-3+8-11,27@4-7+12-15", "--json"]
    plan = hpgo.Plan.from_json(run(*words).stdout)
    assert [(len(s.layers), s.devices) for s in plan.stages] == [
        (26, (0, 1, 2, 3, 8, 9, 10, 11)),
        (27, (4, 5, 6, 7, 12, 13, 14, 15)),
    ]
    assert plan.lower_bound_s is None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["plan", "bert48", "-c", "dapple-a", "-b", "64"], 1, "did you mean `bert-48`"),
        (["plan", "bert-48", "-c", "daple-a", "-b", "64"], 1, "did you mean `dapple-a`"),
        (["plan", ".", "-c", "dapple-a", "-b", "64"], 1, "can't read"),
        (["plan", "bert-48", "-c", ".", "-b", "64"], 1, "unknown cluster: `.`"),
        (["plan", sys.executable, "-c", "dapple-a", "-b", "64"], 1, "not UTF-8 text"),
        (["plan", "bert-48", "-c", "dapple-a", "-b", "0"], 2, "is not an integer from 1"),
        (["plan", "bert-48", "-c", "dapple-a", "-b", "64,"], 2, "is not an integer from 1"),
        (["plan", "bert-48", "-c", "dapple-a", "-b", "9" * 40], 2, "is not an integer from 1"),
        (
            ["plan", "bert-48", "-c", "dapple-a", "-b", "999999999", "--pipeline-micro-batch-size", "3"],
            1,
            "at most 65536",
        ),
        (["plan", "bert-48", "-c", "dapple-a", "-b", "1"], 1, "--min-samples-per-replica 1"),
        (["plan", "bert-48", "-c", "dapple-a"], 2, "Missing option"),
        (["plan", "bert-48", "-c", "dapple-a", "-b", "4294967296"], 2, "from 1 to 999,999,999"),
        (["plan", "/dev/zero", "-c", "dapple-a", "-b", "64"], 1, "/dev/zero has more than 64 MiB"),
        ([*BERT, "--pipeline-micro-batch-size", "7"], 1, "--pipeline-micro-batch-size is 7, but it must divide"),
        ([*BERT, "--pipeline-micro-batch-size", "-1"], 1, "--pipeline-micro-batch-size is -1"),
        ([*BERT, "--time-limit", "soon"], 2, "`soon` is no time"),
        ([*BERT, "--time-limit", "0s"], 1, "--time-limit is 0"),
        ([*BERT, "--reserve-memory", "1 gallon"], 2, "is no size"),
        ([*BERT, "--reserve-memory", "20GB"], 1, "--reserve-memory is 20 GB, but `V100-16GB` has 16 GB"),
        ([*BERT, "--devices", "17"], 1, "has 16 devices, not 17"),
        ([*BERT, "--optimizer-per-weight", "nan"], 1, "--optimizer-per-weight is nan"),
        ([*BERT, "--max-stages", "0"], 1, "--max-stages is 0"),
        ([*BERT, "--plot", "x.svg"], 2, "several batch sizes"),
        ([*BERT, "--json", "--markdown"], 2, "choose one"),
        ([*BERT, "--frobnicate"], 2, "No such option"),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "26"], 2, "write layers@devices"),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", ""], 2, "write layers@devices"),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "53@7-0"], 2, "from low to high"),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "53@0-99"], 1, ""),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "26@0-7,27@7-14"], 1, ""),
        (["evaluate", "bert-48", "-c", "dapple-a", "-b", "64", "--stages", "20@0-7,20@8-15"], 1, ""),
    ],
)
def test_mistakes_end_with_an_error_a_way_out_and_the_right_code(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert "error: " in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_looking_for_what_would_help_a_large_cluster_may_take_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed_s: list[float] = []

    def noted(native: Callable[[object, float], object], question: object, time_limit_s: float) -> object:
        allowed_s.append(time_limit_s)
        return native(question, time_limit_s)

    def uncertain(*_: object) -> None:
        raise hpgo.errors.InfeasibleError("no plan was found that fits", "")

    # An explanation of what provably fits nowhere has a fixed effort instead of a time.
    replace_method(monkeypatch, "plan", uncertain)
    for name in ("closest", "fits"):
        replace_method(monkeypatch, name, noted)
    cluster = hpgo.Cluster.of(nodes=512, devices_per_node=8, intra_gbit_s=200, inter_gbit_s=25, memory="200 MB")
    with refused(hpgo.errors.InfeasibleError, "infeasible", "device", "1", "31") as caught:
        hpgo.plan(hpgo.read_profile("xlnet-36"), cluster, global_batch_size=4096)
    assert caught.value.hint
    assert allowed_s
    assert sum(allowed_s) <= 12


@pytest.mark.parametrize("busy", ["shortage", "closest", "fits"])
def test_ctrl_c_ends_the_search_for_what_would_help(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def uncertain(*_: object) -> None:
        raise hpgo.errors.InfeasibleError("no plan was found that fits", "")

    replace_method(monkeypatch, busy, interrupted)
    if busy != "shortage":  # which explains what is certain
        replace_method(monkeypatch, "plan", uncertain)
    with pytest.raises(KeyboardInterrupt):
        hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.of(memory="1 GB", **ONE_PAIR), global_batch_size=64)


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 0, ""), ("> /dev/full", 1, "error: can't write the output"), ("| head -1 > /dev/null", 0, "")],
)
def test_an_output_that_takes_nothing_is_no_traceback(redirection: str, code: int, message: str) -> None:
    done = subprocess.run(
        f"{' '.join([*COMMAND, *BERT])} {redirection}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [(["models"], 0), (["plan", "nope", "-c", "dapple-a", "-b", "1"], 1), (["plan", "nope"], 2), (["--help"], 0)],
)
@pytest.mark.parametrize("ends", ["stdout", "stderr"])
def test_a_reader_that_has_gone_changes_no_exit_code(words: list[str], code: int, ends: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # nobody reads from now on
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | {ends: theirs}
    assert subprocess.run([*COMMAND, *words], **streams, timeout=60, check=False).returncode == code
    os.close(theirs)


def test_errors_that_find_no_room_keep_their_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run([*COMMAND, "plan", "nope"], stderr=full, timeout=60, check=False).returncode == 2


def test_a_mistyped_command_is_named_with_the_nearest() -> None:
    done = run("plna")
    assert done.returncode == 2
    assert "did you mean `plan`?" in done.stderr


def test_no_command_shows_the_help() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "Simulate and draw:" in done.stdout


def test_a_long_search_shows_its_best_step_on_a_terminal_and_ctrl_c_takes_it(tmp_path: Path) -> None:
    # Many seconds of search, but a first plan at once.
    words = ["plan", "amoebanet-36", "-c", "dapple-a:8", "-b", "128", "-o", str(tmp_path / "plan.json")]
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # the other end closes
            while b"best" not in drawn:
                drawn += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            while piece := os.read(ours, 65536):
                drawn += piece
        output = process.communicate(timeout=120)[0]
    os.close(ours)
    shown = drawn.decode()
    remark = r"batch 128: best [0-9.]+ m?s, bound [0-9.]+ m?s(, gap (less than )?[0-9.]+ %)?; Ctrl-C takes it"
    assert re.search(remark, re.sub(r"\x1b\[[0-9;]*m", "", shown))
    assert "Traceback" not in shown
    assert process.returncode == 0
    assert output.startswith("amoebanet-36 on dapple-a:8 (64 devices), global batch 128\n\nStep time ")
    assert "note: interrupted after" in shown or hpgo.Plan.read(tmp_path / "plan.json").finished


def test_a_deadline_is_kept_and_named() -> None:
    done = run("plan", "gnmt-32", "-c", "dapple-c", "-b", "5040", "--time-limit", "2s")
    if done.returncode == 1:  # a busy machine
        assert "2 s passed before there was any plan" in done.stderr
    else:
        assert done.returncode == 0
        assert "proven optimal" in done.stdout or "time limit reached" in done.stderr


def test_a_deadline_before_any_plan_is_an_error_and_no_interrupt() -> None:
    done = run("plan", "gnmt-32", "-c", "dapple-c", "-b", "5040", "--time-limit", "1 us")
    assert done.returncode in {0, 1}
    assert done.stdout or "passed before there was any plan" in done.stderr


def test_help_teaches_by_examples() -> None:
    for name in ("plan", "evaluate"):
        done = run(name, "--help")
        assert done.returncode == 0
        assert f"hpgo {name} bert-48 --cluster dapple-a" in done.stdout
