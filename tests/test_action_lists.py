"""Orders follow the rules of their sources, equal the recorded ones, and are as short as the best of all."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import hpgo

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def gpipe_by_rule(rank: int, ranks: int, micro_batches: int, virtual_stages_per_rank: int) -> list[str]:
    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)]


def one_f_one_b_by_rule(rank: int, ranks: int, micro_batches: int, virtual_stages_per_rank: int) -> list[str]:
    """A forward for each rank behind this one and one more, then a backward and a forward in turn."""
    warm_up = min(micro_batches, ranks - rank)
    order = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(micro_batches):
        order.append(f"{rank}B{i}")
        order += [f"{rank}F{i + warm_up}"] if i + warm_up < micro_batches else []
    return order


def looped_by_rule(rank: int, ranks: int, micro_batches: int, virtual_stages_per_rank: int) -> list[str]:
    """All forwards of a chunk before the next chunk's, and the same backwards."""
    forwards = [f"{chunk * ranks + rank}F{i}" for chunk in range(virtual_stages_per_rank) for i in range(micro_batches)]
    return [*forwards, *(action.replace("F", "B") for action in reversed(forwards))]


def interleaved_by_rule(rank: int, ranks: int, micro_batches: int, virtual_stages_per_rank: int) -> list[str]:
    """Groups of as many micro-batches as ranks pass chunk after chunk; backwards pass the chunks from the last."""

    def passes(kind: str) -> list[str]:
        order = range(virtual_stages_per_rank) if kind == "F" else reversed(range(virtual_stages_per_rank))
        turns = list(order)
        return [
            f"{chunk * ranks + rank}{kind}{group + i}"
            for group in range(0, micro_batches, ranks)
            for chunk in turns
            for i in range(ranks)
        ]

    forwards, backwards = passes("F"), passes("B")
    warm_up = min(len(forwards), (virtual_stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1))
    steady = itertools.zip_longest(forwards[warm_up:], backwards)
    return forwards[:warm_up] + [action for pair in steady for action in pair if action]


@pytest.mark.parametrize(
    ("name", "rule", "virtual_stages_per_rank"),
    [
        ("gpipe", gpipe_by_rule, [1]),
        ("1f1b", one_f_one_b_by_rule, [1]),
        ("looped_bfs", looped_by_rule, [2, 3]),
        ("interleaved", interleaved_by_rule, [2, 3, 4]),
    ],
)
def test_orders_follow_the_rules_of_their_sources(name: str, rule: Any, virtual_stages_per_rank: list[int]) -> None:
    for ranks, rounds, v in itertools.product(range(1, 7), range(1, 5), virtual_stages_per_rank):
        sizes = (ranks, rounds * ranks, v)
        ours = hpgo.schedule(
            name,
            ranks=ranks,
            micro_batches=rounds * ranks,
            virtual_stages_per_rank=v if len(virtual_stages_per_rank) > 1 else None,
        )
        assert ours.action_lists == [rule(rank, *sizes) for rank in range(ranks)], sizes
        assert list(ours.rank_of_stage) == [stage % ranks for stage in range(v * ranks)], sizes


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_chimera_is_the_same_from_either_end(ranks: int) -> None:
    # Seen from the other end with the halves of the micro-batches exchanged, it is the same schedule.
    ours = hpgo.schedule("chimera", ranks=ranks, micro_batches=ranks)
    half = ranks // 2

    def from_the_other_end(action: str) -> str:
        kind = "F" if "F" in action else "B"
        stage, i = map(int, action.split(kind))
        return f"{(stage + ranks) % (2 * ranks)}{kind}{(i + half) % ranks}"

    def runs_down(action: str) -> bool:
        return int(action.split("F" if "F" in action else "B", maxsplit=1)[0]) < ranks

    for rank, order in enumerate(ours.action_lists):
        mirrored = [from_the_other_end(action) for action in ours.action_lists[ranks - 1 - rank]]
        assert sorted(mirrored) == sorted(order)
        # Each end's own micro-batches run in the mirrored order, too; which of both comes first at a tie is free.
        for down in (True, False):
            kept = [[action for action in each if runs_down(action) is down] for each in (mirrored, order)]
            assert kept[0] == kept[1]


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
            virtual_stages_per_rank = None if row["stages_per_rank"] == 1 else row["stages_per_rank"]
            ours = hpgo.schedule(
                OF_TORCH[torch_name],
                ranks=row["pp_ranks"],
                micro_batches=row["microbatches"],
                virtual_stages_per_rank=virtual_stages_per_rank,
            )
            sizes = (row["pp_ranks"], row["stages_per_rank"], row["microbatches"])
            assert [" ".join(order) for order in ours.action_lists] == row["order"], sizes
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
        for rank, order in enumerate(ours.action_lists):
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


def every_order(stage: int, micro_batches: int, activation_limit: int) -> list[list[str]]:
    """All action lists of a rank within `activation_limit`, each kind in the order of its numbers."""

    def grown(done: tuple[int, int, int]) -> Iterator[list[str]]:
        forwards, inputs, weights = done
        if weights == micro_batches:
            yield []
        limits = (min(micro_batches, weights + activation_limit), forwards, inputs)
        for at, kind in enumerate("FIW"):
            if done[at] < limits[at]:
                after = tuple(count + (at == place) for place, count in enumerate(done))
                yield from ([f"{stage}{kind}{done[at]}", *others] for others in grown(after))

    return list(grown((0, 0, 0)))


@pytest.mark.parametrize(("ranks", "micro_batches", "cases"), [(2, 2, 30), (2, 3, 10), (3, 2, 15)])
def test_no_order_of_all_is_shorter_than_zb(ranks: int, micro_batches: int, cases: int) -> None:
    given = random.Random(ranks * 10 + micro_batches)
    for _ in range(cases):
        times = [tuple(float(given.randint(1, 6)) for _ in range(ranks)) for _ in "FIW"]
        durations = hpgo.Durations(*times, transfer_s=float(given.randint(0, 2)))
        activation_limit = given.randint(1, 4)
        ours = hpgo.schedule(
            "zb", ranks=ranks, micro_batches=micro_batches, activation_limit=activation_limit, durations=durations
        )
        assert max(ours.peak_in_flight) <= activation_limit
        texts = itertools.product(*(every_order(stage, micro_batches, activation_limit) for stage in range(ranks)))
        chain = {"ranks": ranks, "stages_per_pipeline": ranks, "rank_of_stage": range(ranks)}
        best_s = min(
            makespan_and_span_s(SimpleNamespace(action_lists=action_lists, **chain), durations)[0]
            for action_lists in texts
        )
        assert makespan_and_span_s(ours, durations)[0] == pytest.approx(best_s), (times, activation_limit)


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
        activation_limit = int(row["max_mem_per_rank"])
        ours = hpgo.schedule(
            "zb", ranks=ranks, micro_batches=row["microbatches"], activation_limit=activation_limit, durations=durations
        )
        assert max(ours.peak_in_flight) <= activation_limit
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
        ours = hpgo.schedule(
            "zb", ranks=ranks, micro_batches=row["m"], activation_limit=row["max_mem"], durations=durations
        )
        assert max(ours.peak_in_flight) <= row["max_mem"]
        span_s = makespan_and_span_s(ours, durations)[1]
        assert span_s == pytest.approx(row["ilp_objective_(max rank span)"]), (row["p"], row["m"])


def makespan_and_span_s(schedule: hpgo.Schedule | SimpleNamespace, durations: hpgo.Durations) -> tuple[float, float]:
    """By definition, an action at a time: a second opinion beside the native simulator."""
    seconds = dict(
        zip("FIW", (durations.forward_s, durations.input_gradient_s, durations.weight_gradient_s), strict=True)
    )
    end_s: dict[tuple[str, int, int], float] = {}
    waiting = [
        [(a[len(a.split(k)[0])], *map(int, a.split(k))) for a in o for k in "FIW" if k in a]
        for o in schedule.action_lists
    ]
    position, free_s, first_s = [0] * schedule.ranks, [0.0] * schedule.ranks, [-1.0] * schedule.ranks
    last = schedule.stages_per_pipeline - 1
    while any(position[rank] < len(waiting[rank]) for rank in range(schedule.ranks)):
        done = sum(position)
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
        if sum(position) == done:
            return math.inf, math.inf  # the orders wait for each other
    return max(free_s), max(end - start for start, end in zip(first_s, free_s, strict=True))


@pytest.mark.parametrize(
    ("name", "bubble", "held"),
    [
        # Shares of 1F1B's bubble, and of the activations that it holds, of Qi et al. (2024), table 1; memory comes in
        # whole micro-batches of both chunks.
        ("v_half", 1 / 2, lambda ranks: 2 * (ranks // 2 + 1)),
        ("v_min", 2 / 3, lambda ranks: 2 * ((ranks + 4) // 3)),
        ("zb_v", 1 / 6, lambda ranks: 2 * ranks),
    ],
)
def test_v_shapes_keep_the_papers_shares_of_bubble_and_memory(name: str, bubble: float, held: Any) -> None:
    for ranks, rounds in itertools.product([2, 3, 4, 5, 6, 8, 12], [2, 5]):
        ours = hpgo.schedule(name, ranks=ranks, micro_batches=rounds * ranks)
        assert max(ours.peak_in_flight) <= held(ranks)
        one_s = (1.0,) * 2 * ranks
        makespan_s = makespan_and_span_s(ours, hpgo.Durations(one_s, one_s, one_s))[0]
        busy_s, of_1f1b_s = 6.0 * rounds * ranks, 6.0 * (ranks - 1)  # two chunks: a stage of 1F1B is both
        assert makespan_s - busy_s <= bubble * of_1f1b_s + 1e-9, ranks


def test_zb_v_fitted_to_durations_is_no_longer_and_never_under_the_fill() -> None:
    given = random.Random(5)
    shorter = 0
    for _ in range(60):
        ranks, micro_batches = given.randint(2, 5), given.randint(2, 14)
        forward_s, input_s, weight_s = (float(given.randint(1, 9)) for _ in "FIW")
        durations = hpgo.Durations(*((each,) * 2 * ranks for each in (forward_s, input_s, weight_s)))
        sizes = {"ranks": ranks, "micro_batches": micro_batches}
        fitted = hpgo.schedule("zb_v", **sizes, durations=durations)
        fitted_s = makespan_and_span_s(fitted, durations)[0]
        plain_s = makespan_and_span_s(hpgo.schedule("zb_v", **sizes), durations)[0]
        busy_s = 2 * micro_batches * (forward_s + input_s + weight_s)
        assert max(fitted.peak_in_flight) <= 2 * ranks
        assert busy_s + (ranks - 1) * forward_s <= fitted_s <= plain_s
        shorter += fitted_s < plain_s
    assert shorter > 20


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
