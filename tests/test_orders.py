"""Orders equal the recorded ones, and text goes out and in again."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

if TYPE_CHECKING:
    from pathlib import Path

OF_TORCH = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "LoopedBFS": "looped_bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}


@cache
def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torch_name", OF_TORCH)
def test_orders_equal_those_of_torch(reference: Path, torch_name: str) -> None:
    compared = 0
    for file in ("torch_orders.jsonl", "torch_orders_executed.jsonl"):
        for row in rows(reference / "schedules" / file):
            if row["schedule"] != torch_name or not row["order_complete"]:
                continue
            chunks = None if row["stages_per_rank"] == 1 else row["stages_per_rank"]
            ours = hpgo.schedule(
                OF_TORCH[torch_name], ranks=row["pp_ranks"], micro_batches=row["microbatches"], chunks=chunks
            )
            sizes = (row["pp_ranks"], row["stages_per_rank"], row["microbatches"])
            assert [" ".join(order) for order in ours.orders] == row["order"], sizes
            assert list(ours.rank_of_stage) == row["stage_to_rank"], sizes
            compared += 1
    assert compared > 30


def test_chimera_equals_its_slot_tables(reference: Path) -> None:
    compared = 0
    for row in rows(reference / "schedules/chimera.jsonl"):
        ranks, micro_batches = row["num_stages"], row["microbatches"]
        tokens = [[token for token in rank if token and not token.endswith("@s")] for rank in row["steps_per_rank"]]
        if any(len(rank) != 2 * micro_batches for rank in tokens):
            continue  # cut off where it was recorded
        ours = hpgo.schedule("chimera", ranks=ranks, micro_batches=micro_batches)
        for rank, order in enumerate(ours.orders):
            assert tokens[rank] == [token_of(action, rank, ranks, micro_batches) for action in order]
        compared += 1
    assert compared >= 5


def token_of(action: str, rank: int, ranks: int, micro_batches: int) -> str:
    """`2@down@f`: direction, kind, and the unit of `ranks` micro-batches, counted for each direction in turn."""
    kind = "F" if "F" in action else "B"
    stage, micro_batch = map(int, action.split(kind))
    up = stage >= ranks
    assert stage == (2 * ranks - 1 - rank if up else rank)
    unit = (micro_batch - up * micro_batches // 2) // (ranks // 2)
    return f"{2 * unit + up}@{'up' if up else 'down'}@{kind.lower()}"


def zb_rows(reference: Path) -> list[tuple[hpgo.Schedule, hpgo.Durations, dict[str, Any]]]:
    """Ours at the durations and the cap of each recorded heuristic."""
    found = []
    for row in rows(reference / "schedules/zb.jsonl"):
        if not row["scheduler"].startswith("zb heuristic"):
            continue
        ranks = row["pp_ranks"]
        lists = [row[key] for key in ("cost_F", "cost_B(input grad)", "cost_W")]
        forward_s, input_s, weight_s = (tuple(x) if isinstance(x, list) else (x,) * ranks for x in lists)
        durations = hpgo.Durations(forward_s, input_s, weight_s, transfer_s=row["cost_comm_p2p"])
        cap = int(row["max_mem_per_rank"])
        ours = hpgo.schedule("zb", ranks=ranks, micro_batches=row["microbatches"], cap=cap, durations=durations)
        assert max(ours.peak_in_flight) <= cap
        found.append((ours, durations, row))
    return found


def test_zb_is_never_longer_than_the_recorded_heuristics(reference: Path) -> None:
    worse = [
        (row["pp_ranks"], row["microbatches"], row["scheduler"], row["cost_F"], row["refsim_makespan"], makespan)
        for ours, durations, row in zb_rows(reference)
        if (makespan := makespan_and_span_s(ours, durations)[0]) > row["refsim_makespan"] + 1e-6
    ]
    assert worse == []


def test_zb_meets_the_proven_optima(reference: Path) -> None:
    for row in rows(reference / "schedules/zb_ilp.jsonl"):
        ranks = row["p"]
        *costs, transfer_s = row["cost_F_B_W_comm"]
        durations = hpgo.Durations(*((float(cost),) * ranks for cost in costs), transfer_s=transfer_s)
        ours = hpgo.schedule("zb", ranks=ranks, micro_batches=row["m"], cap=row["max_mem"], durations=durations)
        assert max(ours.peak_in_flight) <= row["max_mem"]
        span_s = makespan_and_span_s(ours, durations)[1]
        assert span_s == pytest.approx(row["ilp_objective_(max rank span)"]), (row["p"], row["m"])


def makespan_and_span_s(schedule: hpgo.Schedule, durations: hpgo.Durations) -> tuple[float, float]:
    """By definition, an action at a time: a second opinion beside the native simulator."""
    seconds = dict(
        zip("FIW", (durations.forward_s, durations.input_gradient_s, durations.weight_gradient_s), strict=True)
    )
    end_s: dict[tuple[str, int, int], float] = {}
    waiting = [
        [(a[len(a.split(k)[0])], *map(int, a.split(k))) for a in o for k in "FIW" if k in a] for o in schedule.orders
    ]
    position, free_s, first_s = [0] * schedule.ranks, [0.0] * schedule.ranks, [-1.0] * schedule.ranks
    last = schedule.chain_length - 1
    while any(position[rank] < len(waiting[rank]) for rank in range(schedule.ranks)):
        for rank, order in enumerate(waiting):
            while position[rank] < len(order):
                kind, stage, i = order[position[rank]]
                source = (kind, stage - 1, i) if kind == "F" and stage else ("I", stage + 1, i)
                if kind == "W" or (kind == "F" and stage == 0) or (kind == "I" and stage == last):
                    ready_s = 0.0
                elif source in end_s:
                    stays = schedule.rank_of_stage[source[1]] == rank
                    ready_s = end_s[source] + (0.0 if stays else durations.transfer_s)
                else:
                    break
                start_s = max(free_s[rank], ready_s)
                first_s[rank] = start_s if first_s[rank] < 0 else first_s[rank]
                free_s[rank] = end_s[kind, stage, i] = start_s + seconds[kind][stage]
                position[rank] += 1
    return max(free_s), max(end - start for start, end in zip(first_s, free_s, strict=True))


@pytest.mark.parametrize("name", ["V-half", "V-min"])
def test_v_shapes_are_as_short_as_recorded_at_the_same_memory(reference: Path, name: str) -> None:
    for row in rows(reference / "schedules/zb.jsonl"):
        if row["scheduler"] != name:
            continue
        ranks = row["pp_ranks"]
        ours = hpgo.schedule(name.lower().replace("-", "_"), ranks=ranks, micro_batches=row["microbatches"])
        assert max(ours.peak_in_flight) <= max(row["peak_inflight_freed_at_W"])
        one_s = (1.0,) * 2 * ranks
        makespan_s = makespan_and_span_s(ours, hpgo.Durations(one_s, one_s, one_s))[0]
        assert makespan_s <= row["refsim_makespan"]


def test_zb_v_fitted_to_durations_is_as_short_as_recorded(reference: Path) -> None:
    relative = []
    for row in rows(reference / "schedules/zb.jsonl"):
        if row["scheduler"] != "ZBV":
            continue
        ranks = row["pp_ranks"]
        costs = ((row[key],) * 2 * ranks for key in ("cost_F", "cost_B(input grad)", "cost_W"))
        durations = hpgo.Durations(*costs, transfer_s=row["cost_comm_p2p"])
        ours = hpgo.schedule("zb_v", ranks=ranks, micro_batches=row["microbatches"], durations=durations)
        assert max(ours.peak_in_flight) <= row["max_mem_per_rank"]
        relative.append(makespan_and_span_s(ours, durations)[0] / row["refsim_makespan"])
    assert len(relative) > 150
    assert sum(x > 1 + 1e-9 for x in relative) <= 2
    assert max(relative) < 1.006
