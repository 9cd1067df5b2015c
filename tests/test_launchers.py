"""What frameworks run, and what counts as a row of blocks."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.export.targets import TARGETS
from hpgo.programs.blocks import Blocks
from hpgo.programs.frameworks import NAMES, TABLE, check, framework, runs_as

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.frameworks import Framework


def profile_of(
    names: Sequence[str], edges: Sequence[tuple[str, str]] | None = None, seconds: dict[str, float] | None = None
) -> hpgo.Profile:
    """A model with these layers, in a row unless edges are given, of a second each unless told."""
    layers = tuple(hpgo.Layer(name, name, ((seconds or {}).get(name, 1.0),), (2.0,), (8.0,), 8.0) for name in names)
    return hpgo.Profile("toy", (1,), layers, tuple(pairwise(names)) if edges is None else tuple(edges))


def test_blocks_are_the_layers_with_consecutive_numbers() -> None:
    found = Blocks.of(profile_of(["embed", "mask", "h.0", "h.1", "h.2", "norm", "head"]))
    assert (found.stem, found.before, found.after) == ("h.", ("embed", "mask"), ("norm", "head"))
    assert found.blocks == (("h.0",), ("h.1",), ("h.2",))


def test_several_layers_make_a_block_if_each_block_has_the_same() -> None:
    names = ["embed", *(f"layers.{at}.{part}" for at in range(3) for part in ("attention", "mlp.w1")), "head"]
    found = Blocks.of(profile_of(names))
    assert found.blocks == tuple((f"layers.{at}.attention", f"layers.{at}.mlp.w1") for at in range(3))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "layers.0", "layers.2"):
        Blocks.of(profile_of([name for name in names if name != "layers.2.attention"]))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["embed", "head"], ("invalid_argument", "toy")),
        (
            ["embed", *(f"dense.{at}" for at in range(3)), *(f"moe.{at}" for at in range(3, 12))],
            ("invalid_argument", "dense.0"),
        ),
        (["stem.0", *(f"h.{at}" for at in range(4))], ("invalid_argument", "stem.0")),
        (
            [*(f"encoder.{at}" for at in range(3)), *(f"decoder.{at}" for at in range(3))],
            ("invalid_argument", "decoder.0"),
        ),
        (["h.0", "h.1", "h.3"], ("invalid_argument", "h.1", "h.3")),
        (["h.0", "pool", "h.1"], ("invalid_argument", "pool")),
    ],
)
def test_a_model_that_is_no_row_of_blocks_is_refused_with_the_layer_in_the_way(
    names: list[str], why: tuple[str, ...]
) -> None:
    with refused(hpgo.errors.ArgumentError, *why):
        Blocks.of(profile_of(names))


@pytest.mark.parametrize("name", ["resnet-50", "vgg-19", "gnmt-16", "amoebanet-36"])
def test_built_in_models_that_are_no_transformers_are_refused(name: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="is not one of the blocks"):
        Blocks.of(hpgo.read_profile(name))


def test_connections_past_a_block_are_refused() -> None:
    names = ["embed", *(f"h.{at}" for at in range(4)), "head"]
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "h.0", "h.2"):
        Blocks.of(profile_of(names, [*pairwise(names), ("h.0", "h.2")]))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "h.1", "head"):
        Blocks.of(profile_of(names, [*pairwise(names), ("h.1", "head")]))
    masked = Blocks.of(profile_of(names, [*pairwise(names), *(("embed", f"h.{at}") for at in range(1, 4))]))
    assert len(masked.blocks) == 4, "what embeds may feed every block: each stage makes masks itself"


def test_two_outputs_of_one_block_are_refused() -> None:
    names = ["h.0.a", "h.0.b", "h.1.a", "h.1.b"]
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "h.0.b", "h.0.a"):
        Blocks.of(profile_of(names, [*pairwise(names), ("h.0.a", "h.1.a")]))


def test_layers_of_real_cost_outside_the_blocks_are_refused() -> None:
    names = ["convolution", *(f"h.{at}" for at in range(4)), "head"]
    assert Blocks.of(profile_of(names, seconds={"convolution": 5.0})).before == ("convolution",)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "convolution", "23"):
        Blocks.of(profile_of(names, seconds={"convolution": 36.0}))


@given(st.integers(0, 2), st.integers(1, 6), st.integers(1, 2), st.integers(0, 2))
def test_cuts_lie_between_blocks_and_each_stage_counts_its_own(
    before: int, blocks: int, parts: int, after: int
) -> None:
    word = "abcdef"
    rows = [[f"h.{at}.{word[part]}" for part in range(parts)] for at in range(blocks)]
    ends = [f"in-{word[at]}" for at in range(before)], [f"out-{word[at]}" for at in range(after)]
    names = [*ends[0], *(layer for row in rows for layer in row), *ends[1]]
    found = Blocks.of(profile_of(names, seconds={name: 0.0 for side in ends for name in side} | {"h.0.a": 9.0}))
    sizes = {len(cut) for cut in found.cuts()}
    for size in range(1, len(names)):
        stages = [names[:size], names[size:]]
        if size in sizes:
            counts = found.counts(stages, "Megatron-LM")
            assert sum(counts) == blocks
            assert counts[0] == max(0, size - before) // parts if size <= before + parts * blocks else blocks
        else:
            with refused(hpgo.errors.ArgumentError, "invalid_argument", "h.…", "0", "Megatron-LM"):
                found.counts(stages, "Megatron-LM")
    assert found.counts([names], "Megatron-LM") == (blocks,)


def test_a_launcher_is_found_by_its_name_and_version() -> None:
    assert set(NAMES) >= {"megatron", "torchtitan", "deepspeed", "torch", "vllm", "sglang"}
    assert framework("torchtitan@0.2").version == framework("torchtitan@0.2.2").version == "0.2"
    assert framework("torchtitan") == framework("torchtitan@0.3")
    for name, why in (
        ("torchtitan@0.1", "torchtitan `0.1` is not a supported version"),
        ("torchtitan@0.20", "not a supported version"),
        ("torchtitan@", "not a supported version"),
        ("vllm@0.9", "not a supported version"),
        ("megatrom", "no framework `megatrom`"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError, match=why) as caught:
            framework(name)
        assert caught.value.hint


def test_each_row_of_the_table_names_schedules_that_there_are() -> None:
    families = {family.name: family for family in hpgo.schedules()}
    for row in TABLE:
        assert set(row.schedules) <= set(families)
        assert all(families[name].synchronization == "flush" and families[name].chains == 1 for name in row.schedules)
        assert bool(row.schedules) == row.trains
        assert framework(f"{row.name}@{row.version}" if row.version else row.name) == row


@given(
    st.sampled_from([row for row in TABLE if row.trains]),
    st.sampled_from(["1f1b", "eager_1f1b", "gpipe", "zb"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 8),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(1, 2),
)
def test_what_a_launcher_does_not_run_is_refused_and_nothing_else(
    row: Framework,
    schedule: str,
    replicas: list[int],
    size: int,
    flags: tuple[bool, bool],
    gpus: int,
) -> None:
    shard, recompute = flags
    runs = (
        (schedule in row.schedules or schedule == "eager_1f1b")
        and (not row.equal_replicas or (len(set(replicas)) == 1 and size % replicas[0] == 0))
        and (not shard or True in row.shards_optimizer or max(replicas) == 1)
        and (gpus == 1 or row.tensor_parallel)
    )
    with (
        nullcontext()
        if runs
        else pytest.raises(hpgo.errors.ArgumentError, match=r"needs|does|has no tensor|can't join|on one GPU")
    ):
        check(
            row,
            schedule=schedule,
            replicas=replicas,
            pipeline_micro_batch_size=size,
            shard_optimizer=shard,
            recompute=[recompute] * len(replicas),
            gpus_per_device=gpus,
        )
    if runs:
        assert runs_as(row, schedule) in row.schedules


def test_exporters_write_for_the_versions_that_are_planned_for() -> None:
    written = {(target.name, target.version) for target in TARGETS}
    assert {(row.name, row.version) for row in TABLE} <= written


def test_launchers_that_serve_train_nothing() -> None:
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        runs_as(framework("vllm"), "1f1b")
