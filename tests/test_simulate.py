"""`hpgo.simulate` against recorded runs of other tools, published figures, and its own words."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused

import hpgo
from hpgo import _core
from hpgo.cli.main import group, run
from hpgo.errors import ArgumentError, ScheduleError
from hpgo.programs.schedule import KINDS
from hpgo.timing.measures import CAUSES
from hpgo.timing.timeline import Timeline


def rows_of(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


FLUSHING = [family.name for family in hpgo.schedules() if family.synchronization == "flush"]


def custom(lines: list[str], rank_of_stage: list[int] | None = None) -> hpgo.Schedule:
    """A schedule from recorded orders; stages lie where they are run."""
    schedule = hpgo.Schedule.from_text("\n".join(lines))
    assert rank_of_stage is None or list(schedule.rank_of_stage) == rank_of_stage
    return schedule


def textbook() -> Timeline:
    return hpgo.simulate(hpgo.schedule("1f1b", ranks=4, micro_batches=8))


# Recorded runs


_TOKEN = re.compile(r"(\d+)([FBIW])(\d+)")


def recorded_schedule(row: dict[str, Any], devices: list[list[list[Any]]]) -> hpgo.Schedule:
    """The recorded order. Two-way rows name parts of the model; the upper half of the micro-batches runs upwards."""
    two_way, ranks, half = row["strategy"] == "dualpipe", row["num_devices"], row["num_batches"] // 2
    actions, starts = [], [0]
    rank_of_stage: dict[int, int] = {}
    for rank, device in enumerate(devices):
        for operation in device:
            halves = []
            for stage, kind, micro_batch in _TOKEN.findall(operation[0]):
                number = int(stage) + (ranks if two_way and int(micro_batch) >= half else 0)
                rank_of_stage[number] = rank
                halves.append((number, KINDS.index(kind), int(micro_batch)))
            (stage, kind, micro_batch), (back_stage, _, back_micro_batch) = halves[0], halves[-1]
            fused = kind if len(halves) == 1 else KINDS.index("F‖B")
            actions.append((fused, stage, micro_batch, back_stage, back_micro_batch))
        starts.append(len(actions))
    stages = row["num_stages"] * (2 if two_way else 1)
    return hpgo.Schedule(
        name=row["strategy"],
        stages_per_pipeline=row["num_stages"],
        micro_batches=((0, half), (half, 2 * half)) if two_way else ((0, row["num_batches"]),),
        rank_of_stage=tuple(rank_of_stage[stage] for stage in range(stages)),
        actions=np.array(actions, np.uint32),
        rank_starts=tuple(starts),
    )


def recorded_times(row: dict[str, Any]) -> dict[str, Any]:
    names = {
        "forward": "forward_s",
        "backward": "backward_s",
        "backward_D": "input_gradient_s",
        "backward_W": "weight_gradient_s",
        "overlapped_forward_backward": "overlapped_s",
    }
    times = {
        names[name]: np.array(given if isinstance(given, float) else [given[str(s)] for s in range(row["num_stages"])])
        for name, given in row["op_times"].items()
    }
    # A fused pair takes what its forward's stage takes for both halves there, the sum of the halves here.
    return {"overlapped_s": times["forward_s"] + times["backward_s"]} | times


def starts_by_rule(
    timeline: Timeline, schedule: hpgo.Schedule, ends: np.ndarray, *, latency_s: float, between_alike_s: float
) -> list[float]:
    """Each action's start as its predecessors' `ends` ask for it: the inputs and the action before on the rank.

    An input from another rank comes `latency_s` after it was made; between two actions of a kind in a row, a rank
    pauses for `between_alike_s`.
    """
    columns = (timeline.stage, timeline.micro_batch, timeline.backward_stage, timeline.backward_micro_batch)
    places = zip(*(column.tolist() for column in columns), strict=True)
    halves = [
        [("F", *place[:2]), ("B", *place[2:])]
        if KINDS[kind] == "F‖B"
        else [(KINDS[kind].replace("I", "B"), *place[:2])]
        for kind, place in zip(timeline.kind, places, strict=True)
    ]
    made_s = {half: end_s for each, end_s in zip(halves, ends, strict=True) for half in each}

    def there_s(letter: str, stage: int, micro_batch: int) -> float:
        place = stage % schedule.stages_per_pipeline
        if letter == "W" or (letter == "F" and place == 0):
            return 0.0
        turns = letter == "B" and place + 1 == schedule.stages_per_pipeline
        source = stage if turns else stage - 1 if letter == "F" else stage + 1
        near = schedule.rank_of_stage[source] == schedule.rank_of_stage[stage]
        return made_s["F" if turns else letter, source, micro_batch] + (0.0 if near else latency_s)

    starts = []
    for at, each in enumerate(halves):
        start_s = max(there_s(*half) for half in each)
        if at and timeline.rank[at] == timeline.rank[at - 1]:
            alike = timeline.kind[at] == timeline.kind[at - 1]
            start_s = max(start_s, ends[at - 1] + (between_alike_s if alike else 0.0))
        starts.append(start_s)
    return starts


@pytest.mark.parametrize("communication", ["link", "latency"])
@pytest.mark.parametrize("name", FLUSHING)
def test_every_action_starts_when_its_inputs_and_its_rank_are_there(name: str, communication: str) -> None:
    given = np.random.default_rng(len(name))
    for ranks, micro_batches, latency_s in ((2, 4, 0.0), (4, 8, 0.3), (4, 16, 2.0)):
        schedule = hpgo.schedule(name, ranks=ranks, micro_batches=micro_batches)
        kinds = ("forward_s", "backward_s", "input_gradient_s", "weight_gradient_s", "overlapped_s")
        times = {kind: given.uniform(0.5, 3.0, schedule.stages_per_pipeline) for kind in kinds}
        timeline = hpgo.simulate(schedule, **times, latency_s=latency_s, communication=communication)
        due_s = starts_by_rule(timeline, schedule, timeline.end_s, latency_s=latency_s, between_alike_s=0.0)
        np.testing.assert_allclose(timeline.start_s, due_s, rtol=0, atol=1e-9)
        letters = dict(zip(KINDS, kinds, strict=True))
        lasting_s = [
            times[letters[KINDS[kind]]][stage % schedule.stages_per_pipeline]
            for kind, stage in zip(timeline.kind, timeline.stage, strict=True)
        ]
        np.testing.assert_allclose(timeline.end_s - timeline.start_s, lasting_s, rtol=0, atol=1e-9)
        assert timeline.makespan_s == max(timeline.end_s)
        measures = timeline.measures
        busy_s = np.bincount(timeline.rank, lasting_s)
        assert measures.busy_s == pytest.approx(busy_s)
        spans_s = [np.ptp([timeline.start_s[at], timeline.end_s[at]]) for at in ranks_of(timeline)]
        assert measures.max_rank_span_s == pytest.approx(max(spans_s))


def ranks_of(timeline: Timeline) -> list[np.ndarray]:
    """For each rank, which of the timeline's actions are its own."""
    return [timeline.rank == rank for rank in range(timeline.ranks)]


@pytest.mark.parametrize("name", [name for name in FLUSHING if name != "forward_only"])
def test_activations_in_flight_are_counted_along_the_orders(name: str) -> None:
    schedule = hpgo.schedule(name, ranks=4, micro_batches=8)
    measures = hpgo.simulate(schedule).measures
    for freed_by, counted in (
        ("BW", measures.peak_in_flight),
        ("BI", measures.peak_in_flight_freed_at_input_gradient),
    ):
        for order, maximum in zip(schedule.action_lists, counted, strict=True):
            held = peak = 0
            for action in order:
                for _, kind, _ in _TOKEN.findall(action):
                    held += kind == "F"
                    peak = max(peak, held)
                    held -= kind in freed_by
            assert maximum == peak
            assert held == 0


@pytest.mark.parametrize(
    ("name", "makespan"),
    [
        ("sequential", lambda p, m, f, b: p * m * (f + b)),
        ("gpipe", lambda p, m, f, b: (m + p - 1) * (f + b)),
        ("1f1b", lambda p, m, f, b: (m + p - 1) * (f + b)),
        ("eager_1f1b", lambda p, m, f, b: (m + p - 1) * (f + b)),
        ("interleaved", lambda p, m, f, b: (2 * m + p - 1) * (f + b)),
    ],
)
def test_textbook_schedules_take_their_closed_form(name: str, makespan: Any) -> None:
    for ranks in (1, 2, 3, 6):
        for micro_batches in (ranks, 4 * ranks):
            schedule = hpgo.schedule(name, ranks=ranks, micro_batches=micro_batches)
            for forward_s, backward_s in ((1.0, 2.0), (0.3, 0.3), (2.0, 0.5)):
                timeline = hpgo.simulate(schedule, forward_s=forward_s, backward_s=backward_s)
                assert timeline.makespan_s == pytest.approx(makespan(ranks, micro_batches, forward_s, backward_s))


@pytest.mark.parametrize("communication", ["link", "latency"])
def test_every_start_equals_that_of_the_recorded_runs(reference: Path, communication: str) -> None:
    compared = 0
    for row in rows_of(reference / "schedules/victarry.jsonl"):
        devices = row["ops [stage kind microbatch,start,end] per device"]
        schedule = recorded_schedule(row, devices)
        timeline = hpgo.simulate(
            schedule,
            **recorded_times(row),
            latency_s=row["p2p_latency"],
            communication=communication,
        )
        starts, ends = np.array([operation[1:] for device in devices for operation in device]).T
        # With a latency that tool also keeps it between two actions of a kind in a row on one device, as if the send
        # of the first blocked the second. Nothing has to, so these starts differ; both tools keep their rule exactly,
        # and every other start and the makespan are the same.
        for ours, starts_s, ends_s in ((True, timeline.start_s, timeline.end_s), (False, starts, ends)):
            pause_s = 0.0 if ours else row["p2p_latency"]
            due_s = starts_by_rule(timeline, schedule, ends_s, latency_s=row["p2p_latency"], between_alike_s=pause_s)
            np.testing.assert_allclose(starts_s, due_s, rtol=0, atol=1e-9)
        alike = (np.diff(timeline.kind, prepend=9) == 0) & (np.diff(timeline.rank, prepend=-1) == 0)
        same = ~alike | (row["p2p_latency"] == 0)
        np.testing.assert_allclose(timeline.start_s[same], starts[same], rtol=0, atol=1e-9)
        np.testing.assert_allclose(timeline.end_s - timeline.start_s, ends - starts, rtol=0, atol=1e-9)
        assert timeline.makespan_s == pytest.approx(row["makespan"], abs=1e-9)
        assert timeline.measures.busy_s == pytest.approx(row["device_busy_time"])
        compared += 1
    assert compared > 200


@pytest.mark.parametrize("file", ["torch_orders.jsonl", "torch_orders_executed.jsonl"])
def test_recorded_orders_take_the_recorded_time_and_hold_as_many_activations(reference: Path, file: str) -> None:
    compared = 0
    for row in rows_of(reference / "schedules" / file):
        if not row["order_complete"]:
            continue
        timeline = hpgo.simulate(hpgo.Schedule.from_text("\n".join(row["order"])))
        makespan_s = row.get("refsim_makespan_F1_B2_I1_W1_lat0", row.get("refsim_makespan_F1_B2_lat0"))
        measures = timeline.measures
        assert timeline.makespan_s == pytest.approx(makespan_s, abs=1e-6)
        assert 1 - max(measures.busy_s) / timeline.makespan_s == pytest.approx(row["refsim_bubble_fraction"], abs=1e-6)
        freed_at_w = row.get("peak_inflight_freed_at_W", row.get("peak_inflight"))
        freed_at_i = row.get("peak_inflight_freed_at_I", row.get("peak_inflight"))
        assert list(measures.peak_in_flight) == freed_at_w
        assert list(measures.peak_in_flight_freed_at_input_gradient) == freed_at_i
        compared += 1
    assert compared > 90


def test_zero_bubble_orders_take_the_recorded_time(reference: Path) -> None:
    compared = 0
    for row in rows_of(reference / "schedules/zb.jsonl")[::7]:
        if not row["order_complete"]:
            continue
        timeline = hpgo.simulate(
            hpgo.Schedule.from_text("\n".join(row["order"])),
            forward_s=row["cost_F"],
            input_gradient_s=row["cost_B(input grad)"],
            weight_gradient_s=row["cost_W"],
            latency_s=row["cost_comm_p2p"],
            communication="latency",
        )
        span = (
            "refsim_max_rank_span (last end - first start; the ZB papers cost when optimizer step is not synchronised)"
        )
        assert timeline.makespan_s == pytest.approx(row["refsim_makespan"], abs=1e-4)
        assert timeline.measures.max_rank_span_s == pytest.approx(row[span], abs=1e-4)
        assert max(timeline.measures.busy_s) == pytest.approx(row["refsim_busiest_rank_work"], abs=1e-4)
        compared += 1
    assert compared > 90


def test_lists_of_sends_and_receives_equal_those_of_torch(reference: Path) -> None:
    for row in rows_of(reference / "schedules/torch_comms.jsonl"):
        kept = [
            [token for token in line.split() if "SHARD" not in token and "REDUCE" not in token]
            for line in row["actions"]
        ]
        schedule = hpgo.Schedule.from_text("\n".join(row["actions"]))
        lists = _core.communication_lists(schedule, row["defer_pp_recv"])
        assert lists == kept


# What a user does


def test_a_timeline_survives_files_and_pickles(tmp_path: Path) -> None:
    schedule = hpgo.schedule("dualpipe_v", ranks=2, micro_batches=4)
    memory = hpgo.StageBytes(weights_bytes=1e9, activation_bytes=[1e8, 2e8, 3e8, 4e8], output_bytes=1e6)
    timeline = hpgo.simulate(schedule, latency_s=0.1, iterations=2, memory=memory, memory_cap_bytes=4e9)
    copies = [pickle.loads(pickle.dumps(timeline))]
    copies += [Timeline.read(timeline.save(tmp_path / f"run{ending}")) for ending in (".npz", ".timeline.json")]
    for copy in copies:
        assert copy.to_json() == timeline.to_json()
        assert copy.measures == timeline.measures
        assert copy.kind.dtype == timeline.kind.dtype


def test_the_document_has_what_other_tools_read() -> None:
    document = json.loads(textbook().to_json())
    assert document["schedule"] == "1f1b"
    assert (document["ranks"], document["virtual_stages_per_rank"], document["micro_batches"]) == (4, 1, 8)
    assert document["makespan_s"] == 33
    assert document["idle_over_busy"] == pytest.approx(0.375)
    assert document["peak_in_flight"] == [4, 3, 2, 1]
    assert document["actions"][3][:2] == [
        {"action": "3F0", "start_s": 3.0, "end_s": 4.0},
        {"action": "3B0", "start_s": 4.0, "end_s": 6.0},
    ]


def test_rows_are_sorted_by_rank_and_start_and_idle_fills_the_rest() -> None:
    timeline = textbook()
    assert (np.lexsort((timeline.start_s, timeline.rank)) == np.arange(64)).all()
    idle_s = np.bincount(timeline.idle_rank, timeline.idle_end_s - timeline.idle_start_s)
    assert idle_s + np.array(timeline.measures.busy_s) == pytest.approx([33] * 4)
    assert {CAUSES[cause] for cause in timeline.idle_cause} == {"fill", "drain", "dependency"}


def test_iterations_follow_each_other_on_each_rank_and_count_micro_batches_on() -> None:
    schedule = hpgo.schedule("1f1b_overlap", ranks=3, micro_batches=7)
    timeline = hpgo.simulate(schedule, iterations=2)
    again = np.array([0, 0, 7, 0, 7])
    rows = [schedule.actions[schedule.rank_starts[rank] : schedule.rank_starts[rank + 1]] for rank in range(3)]
    expected = np.concatenate([part for order in rows for part in (order, order + again)])
    columns = (timeline.kind, timeline.stage, timeline.micro_batch, timeline.backward_stage)
    assert (np.stack([*columns, timeline.backward_micro_batch], axis=1) == expected).all()
    assert timeline.rank.tolist() == [rank for rank in range(3) for _ in range(2 * len(rows[rank]))]
    assert (np.lexsort((timeline.start_s, timeline.rank)) == np.arange(len(expected))).all()


def test_transfers_leave_when_computed_and_arrive_after_their_time() -> None:
    timeline = hpgo.simulate(
        hpgo.schedule("1f1b", ranks=3, micro_batches=4), transfer_s=0.2, latency_s=[0.05, 0.1], gradient_transfer_s=0.3
    )
    assert len(timeline.transfer_stage) == timeline.measures.messages == 2 * 2 * 4
    gradients = timeline.transfer_kind == 1
    assert (timeline.transfer_to_rank.astype(int) - timeline.transfer_from_rank == np.where(gradients, -1, 1)).all()
    edge = timeline.transfer_stage - timeline.transfer_kind
    expected_s = np.where(gradients, 0.3, 0.2) + np.array([0.05, 0.1])[edge]
    assert timeline.transfer_end_s - timeline.transfer_start_s == pytest.approx(expected_s)
    assert set(np.round(timeline.transfer_start_s, 6)) <= set(np.round(timeline.end_s, 6))


def test_gradient_synchronisation_and_optimizer_follow_the_last_backward() -> None:
    schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
    timeline = hpgo.simulate(schedule, gradient_sync_s=[1.0, 5.0], optimizer_s=0.5)
    assert timeline.sync_start_s.tolist() == [9.0, 7.0]
    assert timeline.sync_end_s.tolist() == [10.0, 12.0]
    assert timeline.makespan_s == 12.5


def test_peak_memory_counts_what_stages_keep_and_what_is_in_flight() -> None:
    memory = hpgo.StageBytes(weights_bytes=10, gradients_bytes=20, optimizer_bytes=30, activation_bytes=[1, 2, 3, 4])
    timeline = hpgo.simulate(hpgo.schedule("1f1b", ranks=4, micro_batches=8), memory=memory, memory_cap_bytes=100)
    assert timeline.measures.peak_memory_bytes == (64, 66, 66, 64)
    assert timeline.memory_cap_bytes == (100,) * 4
    assert timeline.memory is not None
    assert textbook().memory is None


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("1f1b", (13, 12, 11, 10)),
        ("pipedream", (4 * 5 + 4 + 4, 3 * 5 + 4 + 3, 2 * 5 + 4 + 2, 5 + 4 + 1)),
        ("pipedream_2bw", (18, 17, 16, 15)),
        ("pipemare", (13, 12, 11, 10)),
        ("chimera", (2 * 9 + 3, 2 * 9 + 4, 2 * 9 + 4, 2 * 9 + 3)),
    ],
)
def test_memory_counts_every_version_and_copy_of_the_weights(name: str, kept: tuple[int, ...]) -> None:
    """One version of a stage's weights is 5 bytes, its gradients 4, an activation 1."""
    memory = hpgo.StageBytes(weights_bytes=5, gradients_bytes=4, activation_bytes=1)
    timeline = hpgo.simulate(hpgo.schedule(name, ranks=4, micro_batches=8), memory=memory)
    assert timeline.measures.peak_memory_bytes == kept


def test_asynchronous_iterations_run_on_without_a_flush() -> None:
    asynchronous, flushed = (hpgo.schedule(name, ranks=4, micro_batches=8) for name in ("pipedream", "1f1b"))
    assert (asynchronous.synchronization, asynchronous.weight_versions) == ("asynchronous", (4, 3, 2, 1))
    one, several = (hpgo.simulate(asynchronous, iterations=iterations) for iterations in (1, 10))
    assert (several.iterations, several.micro_batches) == (10, 8)
    assert several.makespan_s == one.makespan_s + 9 * 8 * 3
    inside = (several.idle_start_s > 12) & (several.idle_end_s < several.makespan_s - 12)
    assert not inside.any()
    assert hpgo.simulate(flushed, iterations=10).makespan_s == 10 * one.makespan_s
    by_micro_batch = np.ones((8, 4))
    assert hpgo.simulate(asynchronous, forward_s=by_micro_batch, iterations=10).makespan_s == several.makespan_s


def test_times_may_differ_by_micro_batch() -> None:
    schedule = hpgo.schedule("forward_only", ranks=2, micro_batches=3)
    times = np.array([[1.0, 1.0], [1.0, 5.0], [1.0, 1.0]])
    assert hpgo.simulate(schedule, forward_s=times).makespan_s == 8.0


def test_a_plan_runs_as_it_was_priced() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    for schedule in ("1f1b", "eager_1f1b", "gpipe"):
        plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule=schedule)
        timeline = hpgo.simulate(plan)
        assert timeline.makespan_s == pytest.approx(plan.step_s, rel=1e-12)
        peaks = [stage.memory.total_bytes for stage in plan.stages]
        assert timeline.measures.peak_memory_bytes == pytest.approx(peaks)
    assert hpgo.simulate(plan, schedule="zb_h1").schedule == "zb_h1"
    with refused(ArgumentError, "invalid_argument", "zb_v", "4", "2"):
        hpgo.simulate(plan, schedule="zb_v")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forward_s": [1.0, 2.0]}, "`forward_s` has 2 numbers, but there are 4 stages"),
        ({"backward_s": -1}, "`backward_s` holds -1"),
        ({"backward_s": float("nan")}, "`backward_s` holds nan"),
        ({"overlapped_s": float("nan")}, "`overlapped_s` holds nan"),
        ({"forward_s": "fast"}, "`forward_s` is 'fast', but must be numbers"),
        ({"forward_s": [[1.0], [2.0, 3.0]]}, "`forward_s` is a ragged list, but must be numbers"),
        ({"forward_s": np.ones((3, 4))}, r"shape \(3, 4\), but there are 8 micro-batches and 4 stages"),
        ({"transfer_s": [0.1] * 4}, "`transfer_s` has 4 numbers, but there are 3 edges"),
        ({"communication": "lnk"}, "no communication mode `lnk`"),
        ({"communication": ["link"]}, "no communication mode"),
        ({"memory": {"weights_bytes": 1}}, "memory is a dict"),
        ({"iterations": 0}, "`iterations` is 0"),
        ({"iterations": 10**9}, "64,000,000,000 actions, but at most"),
        ({"memory": hpgo.StageBytes(weights_bytes=[1, 2])}, "`weights_bytes` has 2 numbers"),
        ({"memory_cap_bytes": [1.0] * 3}, "there are 4 ranks"),
        ({"schedule": "1f1b"}, "but the first argument is a schedule"),
    ],
)
def test_numbers_that_do_not_fit_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hpgo.simulate(hpgo.schedule("1f1b", ranks=4, micro_batches=8), **changed)


@pytest.mark.parametrize("given", [None, "1f1b", [1]])
def test_what_is_neither_schedule_nor_plan_is_refused(given: Any) -> None:
    with refused(ArgumentError, "unsupported"):
        hpgo.simulate(given)


def test_micro_batches_are_numbered_from_0_without_a_gap() -> None:
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=1)
    for first in (5, 2**32 - 2):
        actions = schedule.actions + np.array([0, 0, first, 0, first], np.uint32)
        shifted = dataclasses.replace(schedule, micro_batches=((first, first + 1),), actions=actions)
        with pytest.raises(ScheduleError, match="number"):
            hpgo.simulate(shifted)


@pytest.mark.parametrize("name", ["a\0b.npz", "a\0b.svg", "a\0b.timeline.json"])
def test_a_nul_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(hpgo.errors.HpgoError, match=r"picture format|can.t write"):
        textbook().save(name)


def test_an_order_that_can_not_run_is_explained() -> None:
    schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
    actions = schedule.actions.copy()
    actions[[0, 2]] = actions[[2, 0]]
    broken = dataclasses.replace(schedule, actions=actions)
    for copy in (broken, pickle.loads(pickle.dumps(broken))):
        with refused(ScheduleError, "invalid_schedule", "0B0"):
            hpgo.simulate(copy)


def test_blocking_messages_that_never_meet_are_explained() -> None:
    schedule = hpgo.Schedule.from_text("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 \n1F0 1F1 1F2 1F3")
    with refused(ScheduleError, "invalid_schedule", "0", "0SEND_F2", "1"):
        hpgo.simulate(schedule, communication="rendezvous")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b"PK\x03\x04", "é".encode("latin-1")])
@pytest.mark.parametrize("ending", [".npz", ".timeline.json"])
def test_files_that_hold_no_timeline_are_named(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"broken{ending}"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="broken"):
        Timeline.read(path)
    with pytest.raises(ArgumentError, match="absent"):
        Timeline.read(tmp_path / f"absent{ending}")


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs/simulation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/simulation.md", "exec"), {})
    assert (tmp_path / "1f1b.svg").exists()
    configuration = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[0]
    (tmp_path / "config.yaml").write_text(configuration)
    with pytest.raises(SystemExit) as stopped:
        run(group, ["simulate", "--config", "config.yaml", "--json", "--no-visualization"], prog_name="hpgo")
    assert stopped.value.code == 0
