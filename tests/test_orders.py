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
