"""What ranks recorded becomes a timeline: that of the run, whatever their clocks show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import warm_ranks

import hpgo
from hpgo.programs.schedule import KINDS
from hpgo.runtime.measured import Record, timeline_of
from hpgo.timing.breakdown import breakdown

ROOT = Path(__file__).parent.parent
LAYERS = [str(at) for at in range(8)]


def simulated(name: str, groups: list[list[int]], transfer_s: float) -> tuple[hpgo.Program, hpgo.Timeline]:
    """A program whose stages take 1 to 1.3 s forward, and its run."""
    schedule = hpgo.schedule(name, ranks=len(groups), micro_batches=6)
    length = schedule.stages_per_pipeline
    stages = [
        (LAYERS[8 * (at % length) // length : 8 * (at % length + 1) // length], groups[schedule.rank_of_stage[at]])
        for at in range(schedule.stages)
    ]
    program = hpgo.program(schedule, stages, pipeline_micro_batch_size=3, global_batch_size=18)
    forward_s = [1 + 0.1 * at for at in range(length)]
    costs = {"forward_s": forward_s, "transfer_s": transfer_s}
    return program, hpgo.simulate(program, **costs)


def recorded(program: hpgo.Program, timeline: hpgo.Timeline) -> list[Record]:
    """What each rank would have recorded of this run, by a clock that is elsewhere."""
    records = []
    rank_of = program.schedule.rank_of_stage
    for rank in range(program.world_size):
        mine = program.for_rank(rank)
        row = rank_of[mine.stages[0].stage]
        times = {
            (KINDS[kind], stage, micro_batch): (start_s, end_s)
            for at, kind, stage, micro_batch, start_s, end_s in zip(
                timeline.rank, timeline.kind, timeline.stage, timeline.micro_batch, timeline.start_s, timeline.end_s,
                strict=True,
            )
            if at == row
        }  # fmt: skip
        actions_s = np.array([times[action.kind, action.stage, action.micro_batch] for action in mine.actions])
        last_s = actions_s[-1, 1]
        begin_ns, last_ns, end_ns = 1e12 + 1e9 * np.array([0.0, last_s, timeline.makespan_s])
        records.append(Record(1e12 + 1e9 * actions_s, begin_ns, last_ns, end_ns, 7 + rank))
    return records


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved", "chimera"])
@pytest.mark.parametrize("transfer_s", [0.0, 0.25])
def test_records_of_a_simulated_run_give_that_run(name: str, transfer_s: float) -> None:
    program, expected = simulated(name, [[0], [1]], transfer_s)
    found = timeline_of(program, recorded(program, expected))
    assert found.action_texts() == expected.action_texts()
    assert found.start_s == pytest.approx(expected.start_s, abs=1e-6)
    for measure in ("makespan_s", "max_rank_span_s", "busy_s", "idle_over_total", "idle_over_busy", "idle_by_cause_s"):
        assert getattr(found.measures, measure) == pytest.approx(getattr(expected.measures, measure), abs=1e-5), measure
    for measure in ("messages", "peak_in_flight", "peak_in_flight_freed_at_input_gradient"):
        assert getattr(found.measures, measure) == getattr(expected.measures, measure), measure
    if not transfer_s:  # else the simulator also knows when those messages came that nobody waited for
        assert found.slack_s == pytest.approx(expected.slack_s, abs=1e-5)
    assert (found.slack_s >= expected.slack_s - 1e-5).all()
    parts, wanted = breakdown(found), breakdown(expected)
    for part in ("step_s", "forward_s", "backward_s", "transfer_s", "bubble"):
        assert getattr(parts, part) == pytest.approx(getattr(wanted, part), abs=1e-5), part
    assert parts.peak_memory_bytes == 8
    again = hpgo.Timeline.from_json(found.to_json())
    assert again.measures == found.measures


def test_replicas_have_rows_of_their_own_and_the_slowest_counts(tmp_path: Path) -> None:
    program, expected = simulated("1f1b", [[0, 1, 2], [3]], 0.25)
    records = recorded(program, expected)
    late = records[1].actions_ns.copy()
    late[-1, 1] += 6e9  # the last backward pass of rank 1
    records[1] = Record(late, 1e12, late[-1, 1] + 1e9, late[-1, 1] + 3e9, None)
    found = timeline_of(program, records)
    assert found.ranks == 4
    parts, wanted = breakdown(found), breakdown(expected)
    assert parts.backward_s[0] == pytest.approx((wanted.backward_s[0] or 0) + 1)  # six micro-batches
    assert parts.grad_reduce_s == (pytest.approx(1), None)
    assert parts.step_s == pytest.approx(expected.start_s[found.stage[: len(expected.start_s)] == 0].max() + 2 + 6 + 3)
    assert parts.bubble == pytest.approx(1 - sum(found.measures.busy_s) / (4 * parts.step_s))
    assert parts.peak_memory_bytes is None
    events = json.loads(found.save(tmp_path / "run.json").read_text())["traceEvents"]
    drawn = [(event["pid"], event["ts"], event["dur"]) for event in events if event.get("cat") == "sync"]
    begin_us = 1e6 * found.sync_start_s[0]
    assert drawn == [(rank, begin_us, pytest.approx(1e6)) for rank in (0, 1, 2)], "on each of the stage's replicas"
    last = np.flatnonzero(found.rank == 1)[-1]
    assert found.critical[last]
    assert not found.critical[np.flatnonzero(found.rank == 0)[-1]]


def test_clocks_that_are_elsewhere_and_drift_are_aligned(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    done = warm_ranks.ran("clock_ranks.py", tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong_ns = [[float(word) for word in (tmp_path / f"{rank}").read_text().split()] for rank in range(4)]
    assert wrong_ns[0] == [0.0, 0.0, 0.0]
    for before, between, after in wrong_ns:
        assert max(abs(before), abs(between), abs(after)) <= 200_000
