"""Ranks of one machine pass tensors on in shared memory: in order, whole, however many, and until one is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import warm_ranks

pytest.importorskip("torch", reason="needs torch: pip install torch")

ROOT = Path(__file__).parent.parent


def ran(case: str, folder: Path) -> list[Any]:
    """What the two ranks of a case have found."""
    done = warm_ranks.ran("neighbour_ranks.py", case, folder, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_tensors_of_any_kind_arrive_as_they_were_sent(tmp_path: Path) -> None:
    for found in ran("kinds", tmp_path):
        assert found["equal"] == 60
        assert found["near"] == [1 - found["rank"]]


def test_memory_is_used_again_once_it_was_copied_out(tmp_path: Path) -> None:
    one, other = ran("memory", tmp_path)
    # A thousand messages of 64 KiB went each way, one after the other: a place for what is sent while another is read.
    assert one["bytes"] <= 2 * 2**16
    assert other["bytes"] <= 2 * 2**16


def test_no_number_of_messages_holds_up_who_sends_them(tmp_path: Path) -> None:
    # A pipe says where some thousands lie. One rank sends more than that before the other one takes any.
    sender, receiver = ran("many", tmp_path)
    assert sender["filled"]
    assert receiver["taken"] == list(range(20_000))


def test_what_comes_in_another_order_than_it_is_waited_for_is_kept(tmp_path: Path) -> None:
    _, found = ran("order", tmp_path)
    assert found["waited"] == [2, 0, 1]
    assert found["got"] == [0.0, 1.0, 2.0]


def test_a_send_is_done_once_the_other_has_a_place_for_it(tmp_path: Path) -> None:
    found, _ = ran("places", tmp_path)
    assert found["before"] < found["posted"] < found["after"]


def test_a_rank_that_is_gone_ends_the_wait_for_it(tmp_path: Path) -> None:
    found, _ = ran("gone", tmp_path)
    assert "rank 1 of this node is gone" in found["receiving"]
    assert "rank 1 of this node is gone" in found["sending"]


def test_ranks_that_share_no_memory_use_the_group(tmp_path: Path) -> None:
    for found in ran("apart", tmp_path):
        assert found["near"] == []
        assert found["equal"] == 60
