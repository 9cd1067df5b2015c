"""An emulated cluster takes the time that was predicted, by what its ranks really waited for."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import warm_ranks
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.timing.breakdown import breakdown

if TYPE_CHECKING:
    from hpgo.programs.ranks import RankAction

pytest.importorskip("torch", reason="needs torch: pip install torch")

ROOT = Path(__file__).parent.parent
RANKS, STEPS, SCALE, HELD_S = 16, 2, 2.0, 1 / 3
FORWARD_S, BACKWARD_S, LATENCY_S = 0.004, 0.007, 0.001
# Name: schedule, devices of each of its ranks, seconds on a link. A link is fuller than a stage in `full`.
PROGRAMS = {
    "held": ("1f1b", [[rank] for rank in range(16)], 0.001),
    "replicas": ("eager_1f1b", [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]], 0.002),
    "full": ("gpipe", [[rank] for rank in range(4)], 0.009),
    "shared": ("interleaved", [[2 * rank, 2 * rank + 1] for rank in range(8)], 0.003),
    "split": ("zb_v", [[rank] for rank in range(8)], 0.001),
    "two-way": ("chimera", [[rank] for rank in range(8)], 0.001),
}
UNEVEN = [[0, 1, 2], [3], [4, 5], [6]]
PROGRAMS |= {
    family.name: (family.name, UNEVEN, 0.001)
    for family in hpgo.schedules()
    if family.trains and hpgo.schedule(family.name, ranks=4, micro_batches=8).synchronization == "flush"
}
EPSILON_S = 1e-6


def program_of(name: str) -> hpgo.Program:
    """Micro-batches of seven, so that replicas have unequal rows."""
    family, groups, transfer_s = PROGRAMS[name]
    schedule = hpgo.schedule(family, ranks=len(groups), micro_batches=8)
    length = schedule.stages_per_pipeline
    stages = [([f"layer-{at % length}"], groups[schedule.rank_of_stage[at]]) for at in range(schedule.stages)]
    costs = hpgo.Costs(
        forward_s=[FORWARD_S + 0.0005 * (at % 3) for at in range(length)], backward_s=BACKWARD_S, transfer_s=transfer_s,
        latency_s=LATENCY_S, gradient_transfer_s=transfer_s / 2, gradient_sync_s=0.005, optimizer_s=0.002,
    )  # fmt: skip
    return hpgo.program(
        schedule, stages, pipeline_micro_batch_size=7, global_batch_size=56, nodes=[8, 8], costs=costs
    )  # fmt: skip


def unfused(program: hpgo.Program) -> hpgo.Program:
    """With F, then B where the schedule has both as one: so they run."""
    return hpgo.Program.from_json(re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1,\2", program.to_json()))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[hpgo.Timeline]]:
    """What was measured of each program, step by step, with other work beside it perhaps."""
    folder = tmp_path_factory.mktemp("emulated")
    for name in PROGRAMS:
        program_of(name).save(folder / f"{name}.program")
    done = warm_ranks.ran("emulated_ranks.py", folder, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [hpgo.Timeline.read(folder / f"{name}-{step}.timeline.json") for step in range(STEPS)]
        for name in PROGRAMS
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_not_shorter_than_predicted(name: str, steps: dict[str, list[hpgo.Timeline]]) -> None:
    predicted = hpgo.simulate(unfused(program_of(name))).makespan_s
    for measured in steps[name]:
        assert measured.makespan_s >= predicted - EPSILON_S  # nobody is woken too early


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_action_begins_and_lasts_as_it_should(name: str, steps: dict[str, list[hpgo.Timeline]]) -> None:
    program, late_s = program_of(name), []
    for measured in steps[name]:
        kinds = [text.lstrip("0123456789")[0] for text in measured.action_texts()]
        at = {
            key: place
            for place, key in enumerate(
                zip(measured.rank.tolist(), kinds, measured.stage.tolist(), measured.micro_batch.tolist(), strict=True)
            )
        }
        assert [key[1:] for rank in range(RANKS) for key in at if key[0] == rank] == [
            (one.kind, one.stage, one.micro_batch) for rank in range(RANKS) for one in program.for_rank(rank).actions
        ]
        usable_s = arrivals(program, PROGRAMS[name][2], measured, at)
        for rank in range(RANKS):
            free_s = 0.0
            for action in program.for_rank(rank).actions:
                place = at[rank, action.kind, action.stage, action.micro_batch]
                begin_s, end_s = float(measured.start_s[place]), float(measured.end_s[place])
                due_s = max(free_s, *usable_s.get(place, [0.0]))
                late_s += [begin_s - due_s, end_s - begin_s - price_of(program, rank, action)]
                free_s = end_s
        for grad_reduce_s in breakdown(measured).grad_reduce_s:
            assert grad_reduce_s is None or grad_reduce_s >= 0.005 - EPSILON_S
    assert min(late_s) >= -EPSILON_S
    assert np.median(late_s) < 0.002  # the machine may be busy


def price_of(program: hpgo.Program, rank: int, action: RankAction) -> float:
    """What a pass should take, on a replica with its rows."""
    stage = program.stages[action.stage]
    rows = [len(one) for one in stage.rows]
    share = rows[stage.devices.index(rank)] / max(rows)
    forward_s = FORWARD_S + 0.0005 * (action.stage % program.schedule.stages_per_pipeline % 3)
    return share * {"F": forward_s, "B": BACKWARD_S}.get(action.kind, BACKWARD_S / 2)


def arrivals(
    program: hpgo.Program, transfer_s: float, measured: hpgo.Timeline, at: dict[tuple[int, str, int, int], int]
) -> dict[int, list[float]]:
    """For each action from when on what it takes could be used, if links to each rank take one message at a time."""
    rank_of = program.schedule.rank_of_stage
    found: dict[int, list[float]] = {}
    for rank in range(RANKS):
        free_s: dict[int, float] = {}
        for action in program.for_rank(rank).actions:
            made_s = float(measured.end_s[at[rank, action.kind, action.stage, action.micro_batch]])
            for message in action.sends:
                arrives_s = made_s
                if rank_of[message.from_stage] != rank_of[message.to_stage]:
                    busy_s = transfer_s if action.kind == "F" else transfer_s / 2
                    free_s[message.peer] = max(made_s, free_s.get(message.peer, 0.0)) + busy_s
                    arrives_s = free_s[message.peer] + LATENCY_S
                taken = next(
                    at[key]
                    for kind in ("F" if action.kind == "F" else "BI")
                    if (key := (message.peer, kind, message.to_stage, action.micro_batch)) in at
                )
                found.setdefault(taken, []).append(arrives_s)
    return found


def test_a_full_link_takes_one_message_after_the_other(steps: dict[str, list[hpgo.Timeline]]) -> None:
    for measured in steps["full"]:
        for stage in range(1, 4):
            made_s, starts_s = (
                times_s[(measured.stage == at) & (measured.kind == 0)]
                for at, times_s in ((stage - 1, measured.end_s), (stage, measured.start_s))
            )
            assert (starts_s >= made_s[0] + 0.009 * np.arange(1, 9) + LATENCY_S - EPSILON_S).all()


def test_a_rank_that_is_held_up_holds_up_the_others(steps: dict[str, list[hpgo.Timeline]]) -> None:
    predicted, held = hpgo.simulate(program_of("held")), steps["held"][1]
    first = np.flatnonzero(predicted.rank == 5)[0]
    rest_s = predicted.makespan_s - float(predicted.start_s[first] + predicted.slack_s[first])
    assert held.makespan_s >= HELD_S / SCALE + rest_s - EPSILON_S
    for rank in range(5, RANKS):
        assert held.start_s[held.rank == rank][0] >= HELD_S / SCALE


def save(folder: Path, name: str) -> str:
    """A small program of two ranks."""
    schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    costs = hpgo.Costs(forward_s=0.03, backward_s=0.05, transfer_s=0.01)
    program = hpgo.program(
        schedule, [(["a"], [0]), (["b"], [1])], pipeline_micro_batch_size=1, global_batch_size=4, costs=costs
    )
    file = folder / name
    dataclasses.replace(program, costs=costs if name == "priced.json" else None).save(file)
    return str(file)


def test_the_command_emulates_and_compares_with_what_was_predicted(tmp_path: Path) -> None:
    file = save(tmp_path, "priced.json")
    words = ["--scale", "1.5", "--steps", "2", "--timeline", "measured.npz"]
    done = warm_ranks.hpgo(tmp_path, "emulate", file, *words)
    assert (done.returncode, done.stderr) == (0, "")
    predicted, measured = hpgo.simulate(hpgo.Program.read(file)), hpgo.Timeline.read(tmp_path / "measured.npz")
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["step 1", "step 2"]
    assert all(line.endswith("× predicted") for line in lines[:2])
    assert lines[3].split() == ["predicted", "measured", "difference"]
    rows = {line.split("  ")[0]: line.split() for line in lines[4:]}
    assert list(rows) == [
        "step time", "stage 0 forward", "stage 0 backward", "stage 0 to 1", "stage 1 forward", "stage 1 backward",
        "bubble",
    ]  # fmt: skip
    assert rows["stage 0 to 1"][4:6] == ["10", "ms"]
    assert measured.makespan_s >= predicted.makespan_s - EPSILON_S

    done = warm_ranks.hpgo(tmp_path, "emulate", file, "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["scale"], document["exit"]) == (1.0, 0)
    assert document["step_s"]["predicted"] == predicted.makespan_s
    assert document["step_s"]["measured"] >= predicted.makespan_s - EPSILON_S


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["priced.json", "--workload", "mlp"], 2, "No such option '--workload'"),
        (["priced.json", "--scale", "ten"], 2, "'ten' is not a valid float"),
        (["priced.json", "--scale", "0"], 1, "scale is 0"),
        (["priced.json", "--scale", "1e-9"], 1, "scale is 1e-09"),
        (["priced.json", "--scale", "nan"], 1, "scale is nan"),
        (["priced.json", "--scale", "1e7"], 1, "scale is 1e+07"),
        (["unpriced.json"], 1, "the program has no times, so there is nothing to emulate"),
    ],
)
def test_what_can_not_be_emulated_is_told_before_anything_starts(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    file = save(tmp_path, words[0])
    result = CliRunner().invoke(group, ["emulate", file, *words[1:]])
    if code == 2:
        assert result.exit_code == 2
        assert said in result.stderr
    else:
        assert isinstance(result.exception, hpgo.errors.HpgoError)
        assert said in str(result.exception)
        assert result.exception.hint


def test_passes_that_are_too_short_are_told(tmp_path: Path) -> None:
    from hpgo.runtime.emulation import check

    program = hpgo.Program.read(save(tmp_path, "priced.json"))
    with refused(hpgo.errors.ArgumentError, "too_large"):
        check(dataclasses.replace(program, costs=hpgo.Costs(forward_s=1e9)), 1.0)
