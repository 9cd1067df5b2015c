"""Published results beside ours: the committed tables are what the planners answer today."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import reproduction
from click.testing import CliRunner

import hpgo
from hpgo.reproduce import answers, tables
from hpgo.reproduce.questions import RIVALS, STRATEGIES, SWEEPS

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "PLANNER_REPRODUCTION.md"


@pytest.mark.slow
def test_the_committed_tables_and_figures_are_current(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    words = ["--check", str(DOCUMENT), "--figures", str(tmp_path)]
    result = CliRunner().invoke(reproduction.command, words, catch_exceptions=False)
    assert result.stderr == f"the tables of {DOCUMENT} are current\n"
    for name in ("batches", "devices"):
        assert f"docs/reproduction/{name}.svg" in text
        assert (ROOT / f"docs/reproduction/{name}.svg").stat().st_size > 0
        assert "<svg" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def duels():
    return answers.duels()


def test_the_committed_table_of_pipedreams_plans_is_current(duels):
    assert tables.pipedream(duels) in DOCUMENT.read_text(encoding="utf-8"), "run `make reproduce`"


def test_the_compatible_planner_finds_dapples_strategies(duels):
    for rival, duel in zip(RIVALS, duels, strict=True):
        replicas, cuts = rival.dapple
        stages = duel.compatible.stages
        assert [len(devices) for *_, devices in stages] == list(replicas)
        assert [end for _, end, *_ in stages[:-1]] == list(cuts)


def test_no_published_or_compatible_plan_beats_the_modern_one():
    bert = next(question for question in STRATEGIES if question.model == "bert-48")
    for config in "ABC":
        row = answers._strategy(bert, config)
        others = [row.published_priced, row.compatible.priced if row.compatible else None]
        assert all(row.modern.step_s <= other.step_s for other in others if other is not None and other.fits)


@pytest.mark.parametrize(
    ("model", "global_batch_size", "no_overlap"),
    [("vgg-16", 2048, 10.566), ("bert-24", 384, 11.376), ("vgg-19", 512, 4.740), ("xlnet-24", 128, 10.419)],
)
def test_the_guides_values_are_among_the_rows(model, global_batch_size, no_overlap):
    sweep = next(sweep for sweep in SWEEPS if sweep.model == model)
    assert global_batch_size in sweep.global_batch_sizes
    point = answers._point(sweep, global_batch_size, 16)
    assert point.columns.no_overlap == pytest.approx(no_overlap, abs=5e-4)
    assert f"| {no_overlap:.3f} |" in tables.batches([point])


@pytest.fixture
def answered(monkeypatch):
    """One table, without asking the planners."""
    monkeypatch.setattr(reproduction, "answered", lambda: None)
    monkeypatch.setattr(reproduction, "TABLES", {"strategies": lambda made: "| new |"})


def filled(*words):
    return CliRunner().invoke(reproduction.command, list(map(str, words)))


def test_a_document_without_a_place_for_a_table_is_refused(tmp_path, answered):
    path = tmp_path / "document.md"
    path.write_text("no markers\n")
    for option in ("--write", "--check"):
        result = filled(option, path)
        assert isinstance(result.exception, hpgo.errors.ArgumentError)
        assert "no place for the table `strategies`" in str(result.exception)
    assert path.read_text() == "no markers\n"


def test_old_tables_fail_the_check_and_are_replaced_by_writing(tmp_path, answered):
    path = tmp_path / "document.md"
    path.write_text("a\n<!-- table: strategies -->\n| old |\n<!-- end -->\nb\n")
    assert isinstance(filled("--check", path).exception, hpgo.errors.ArgumentError)
    assert filled("--write", path).exit_code == 0
    assert path.read_text() == "a\n<!-- table: strategies -->\n| new |\n<!-- end -->\nb\n"
    assert filled("--check", path).exit_code == 0


def test_documents_and_folders_that_cannot_be_used_are_refused_at_once(tmp_path):
    result = filled("--check", tmp_path / "missing.md")
    assert isinstance(result.exception, hpgo.errors.ArgumentError)
    assert "missing.md" in str(result.exception)
    (tmp_path / "file").touch()
    result = filled("--figures", tmp_path / "file/figures")
    assert isinstance(result.exception, hpgo.errors.ArgumentError)
    assert "can't make the folder" in str(result.exception)


@pytest.mark.parametrize("doing", ["strategies", "batch sizes"])
def test_ctrl_c_ends_it_and_prints_no_unfinished_answer(doing):
    command = [sys.executable, "-m", "hpgo", "reproduce"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the other end closes
            while doing.encode() not in said:
                said += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            while piece := os.read(ours, 65536):
                said += piece
        assert process.stdout.read() == b""
    os.close(ours)
    assert (process.returncode, re.sub(rb"\x1b\[[0-9;]*[A-Z]", b"", said.splitlines()[-1])) == (130, b"interrupted")
