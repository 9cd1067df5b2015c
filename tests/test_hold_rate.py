"""Numbers travel in as many bits as their links carry at a rate: these fall and rise with a link, and don't swing."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

from test_inference import case, expected, put, ran, shared  # noqa: E402 -- what needs torch, where there is one

from hpgo.runtime import InferencePipeline, Value, Workload  # noqa: E402
from hpgo.runtime.infer.adaptive_bit_width import Widths  # noqa: E402
from hpgo.runtime.packets import HEAD_BYTES, PacketHeader, PacketLayout  # noqa: E402
from hpgo.runtime.quantization import BITS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {0: 32_000} | {bits: 1_000 * bits for bits in BITS}
MIN_BITS = 2


def widths_under(rate_of: Callable[[int, int], float], packets: int, *, begin: int = 0) -> list[int]:
    """The widths of so many packets, one a second, over a link of so many bytes a second at a packet and width."""
    cut = Widths(SIZES, within_s=1.0, width=begin)
    used = []
    for packet in range(packets):
        used.append(cut.width)
        size = SIZES[cut.width]
        cut.after(size, size / rate_of(packet, cut.width))
    return used


def changes(widths: list[int]) -> int:
    return sum(one != other for one, other in pairwise(widths))


@given(st.floats(500, 100_000), st.lists(st.floats(0.92, 1.08), min_size=60, max_size=60), st.sampled_from([0, *BITS]))
def test_on_a_steady_link_the_width_settles_at_what_it_carries(rate: float, noise: list[float], begin: int) -> None:
    used = widths_under(lambda packet, _: rate * noise[packet], 60, begin=begin)
    sizes = [SIZES[bits] for bits in used]
    assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True), "it went both ways"
    assert sizes[-1] <= rate or used[-1] == MIN_BITS, "a packet a second does not pass"
    wider = [size for size in SIZES.values() if size > sizes[-1]]
    if sizes[-1] > SIZES[begin]:  # it rose as far as there is room
        assert not any(size <= 0.75 * 0.92 * rate for size in wider)
    elif sizes[-1] < SIZES[begin]:  # it fell no farther than it had to
        assert not any(size <= 0.9 * 0.92 * rate for size in wider if size <= SIZES[begin])


@given(st.floats(3_000, 20_000), st.floats(45_000, 1e9))
def test_a_link_that_slows_down_is_followed_in_two_packets_and_back_up_in_eight(slow: float, fast: float) -> None:
    used = widths_under(lambda packet, _: slow if 10 <= packet < 40 else fast, 80)
    assert used[:12] == [0] * 12
    assert SIZES[used[12]] <= slow
    assert changes(used[12:40]) == 0
    assert used[40:48] == [used[12]] * 8
    assert used[48:] == [0] * 32


def test_a_link_that_lies_to_narrow_packets_is_tried_ever_more_seldom() -> None:
    def rate(_: int, width: int) -> float:
        return 1e6 if width in {2, 3, 4} else 5_000.0  # short bursts pass at once

    used = widths_under(rate, 4096)
    assert changes(used) <= 2 * (math.log2(4096 / 8) + 2)
    assert changes(used[2048:]) <= 4


def test_one_packet_that_was_held_up_changes_nothing() -> None:
    assert changes(widths_under(lambda packet, _: 100.0 if packet % 9 == 8 else 1e6, 200)) == 0


def test_where_nothing_can_be_narrowed_the_width_stays() -> None:
    cut = Widths(dict.fromkeys(SIZES, 640), within_s=1.0, width=8)
    assert [cut.after(640, 100.0) for _ in range(9)] == [cut.width] * 9


@given(st.integers(1, 5), st.lists(st.integers(1, 4_000), min_size=1, max_size=4))
def test_packets_are_as_much_shorter_as_their_numbers_have_fewer_bits(rows: int, counts: list[int]) -> None:
    values = [
        Value(str(at), by_row=True, has_gradient=False, shape=(count,), dtype=torch.float32)
        for at, count in enumerate(counts)
    ]
    whole = PacketLayout(values, rows)
    for bits in BITS:
        few = whole.at(bits)
        beside = 128 * len(values)  # ends, and what fills up to multiples of 64
        assert few.size_bytes - HEAD_BYTES <= (whole.size_bytes - HEAD_BYTES) * bits / 32 + beside
        assert few.at(0).size_bytes == whole.size_bytes


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from((0, 16)), st.booleans()), min_size=1))
def test_what_a_packet_held_before_does_not_matter(packets: list[tuple[int, bool, int, bool]]) -> None:
    values = [
        Value("a", by_row=True, has_gradient=False, shape=(3,), dtype=torch.float32),
        Value("b", by_row=False, has_gradient=False, shape=(2, 2), dtype=torch.int64),
    ]
    whole = PacketLayout(values, rows=5)
    layouts = {bits: whole.at(bits) for bits in (0, 16)}
    used = whole.empty(torch.device("cpu"))
    for number, (rows, ends, bits, is_squeezed) in enumerate(packets):
        head = PacketHeader(rows, ends, bits)
        tensors = {"a": torch.arange(3.0 * rows).view(rows, 3) + number, "b": torch.full((2, 2), number)}
        layouts[bits].write(used, head, tensors)
        fresh = layouts[bits].empty(torch.device("cpu"))
        layouts[bits].write(fresh, head, tensors)
        assert layouts[bits].head(used) == head
        found, expected = layouts[bits].read(used, rows), layouts[bits].read(fresh, rows)
        assert all(torch.equal(found[name], expected[name]) for name in tensors)
        if is_squeezed:  # a layer may do so
            found["a"].unsqueeze_(0)


# --- Real ranks, over links that are made slow -----------------------------------------------------------------------

WIDE = "mlp:layers=4,width=1024"
FULL_BYTES = 4 * 1024 * 4


def wide(stages: int) -> Any:
    layers = Workload.read(WIDE).layers
    schedule = hpgo.schedule("forward_only", ranks=stages, micro_batches=1)
    cut = [layers[4 * at // stages : 4 * (at + 1) // stages] for at in range(stages)]
    return hpgo.program(
        schedule, [(part, [at]) for at, part in enumerate(cut)], pipeline_micro_batch_size=4, global_batch_size=4
    )


def test_bits_fall_on_a_slow_link_and_rise_on_a_fast_one(tmp_path: Path) -> None:
    within_s, slow, fast = 0.06, 30, 40
    asked = {
        "workload": WIDE, "rows": [4] * (slow + fast), "hold_samples_per_s": 4 / within_s,
        "link": [(slow, FULL_BYTES / (4 * within_s)), (fast, FULL_BYTES * 1000)],
    }  # fmt: skip
    ((outputs, _),) = ran(tmp_path / "ran", 2, [case(wide(2)) | asked])
    assert len(outputs) == slow + fast
    moments, sent = torch.load(tmp_path / "ran/0-0.moments", weights_only=False)
    used = [one["bits"] for one in moments if one["kind"] == "pack"]
    assert len(used) == slow + fast
    assert used[0] == 0
    assert 0 < max(used[12:slow]) <= 6, "32 bit take four times as long as there is, so 8 bit just do not pass"
    assert changes(used[12:slow]) <= 2, "it swings"
    assert used[-1] == 0, "there was room for all bits again"
    assert changes(used) <= 8
    assert sent == ({bits: used.count(bits) for bits in sorted(set(used))},) == ({**sent[0]},)


def test_outputs_are_the_whole_models_where_links_carry_all_bits(tmp_path: Path) -> None:
    cases = [
        case(put("forward_only", 2, model=model), model) | {"hold_samples_per_s": 0.001} for model in ("chain", "late")
    ]
    cases.append(case(put("staggered", 2)) | {"hold_samples_per_s": 0.001})
    for model, (outputs, _) in zip(("chain", "late", "chain"), ran(tmp_path / "ran", 2, cases), strict=True):
        assert all(torch.equal(*pair) for pair in zip(outputs, expected(model), strict=True))


# --- Ranks that hold the data -----------------------------------------------------------------------------------------


def test_outputs_come_back_to_the_rank_with_the_data(tmp_path: Path) -> None:
    asked = [
        (model, stages, data_rank, how)
        for stages, data_rank in ((3, 0), (2, 2), (1, 2), (1, 0))
        for model, how in (("chain", {}), ("shared", {}), ("late", {"in_flight": 1}))
    ]
    cases = [
        case(put("forward_only", stages, model=model, nodes=(3,)), model) | {"data_rank": data_rank, **how}
        for model, stages, data_rank, how in asked
    ]
    for (model, *_), (outputs, facts) in zip(asked, ran(tmp_path / "ran", 3, cases), strict=True):
        assert all(torch.equal(*pair) for pair in zip(outputs, expected(model), strict=True))
        assert len(facts[0]) == len(outputs)


def test_hosts_that_take_turns_hold_rates_and_hand_outputs_back_too(tmp_path: Path) -> None:
    cases = [
        case(shared(1, 2, nodes=(4,))) | {"data_rank": 3, "hold_samples_per_s": 0.001},
        case(shared(2, 2, nodes=(4,))) | {"hold_samples_per_s": 0.001},
        case(shared(2, 1, nodes=(4,))) | {"data_rank": 3, "in_flight": 2},
    ]
    for outputs, _ in ran(tmp_path / "ran", 4, cases):
        assert all(torch.equal(*pair) for pair in zip(outputs, expected("chain"), strict=True))


def test_what_can_not_be_held_is_told() -> None:
    with InferencePipeline(put("forward_only", 1), "runtime_models:chain") as pipeline:
        for how, words in (
            ({"hold_samples_per_s": 0}, "the rate to hold is 0"),
            ({"data_rank": 1}, "data_rank is 1"),
            ({"watch": 3}, "watch is 3"),
        ):
            with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
                pipeline.infer([], **how)
            assert caught.value.hint
