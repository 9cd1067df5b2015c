"""`hpgo.choose_way` gives what pricing every way would give, and `hpgo plan MODEL --seq` shows it."""

from __future__ import annotations

import json
from itertools import product

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group

models = st.builds(
    lambda layers, kv, shared, wide: hpgo.Transformer(
        layers=layers, hidden=1024, heads=kv * shared, kv_heads=kv, head_dim=64, ffn=1024 * wide, vocab=32000
    ),
    st.integers(1, 12), st.sampled_from([1, 2, 4, 6]), st.integers(1, 3), st.integers(1, 40),
)  # fmt: skip


def every_way(model, cluster: hpgo.Cluster, batch: int, seq: int) -> list[hpgo.Price]:
    """Everything that `hpgo.price` accepts, asked one by one."""
    found = []
    gpus = cluster.devices
    for tp, cp, pp, vpp, size, zero, anew in product(
        range(1, gpus + 1), [1, 2, 4, 8], range(1, gpus + 1), range(1, model.layers + 3), range(1, batch + 1), (0, 1),
        ("none", "full"),
    ):  # fmt: skip
        if tp * cp * pp > gpus or (gpus == tp * pp and zero) or tp > cluster.machines[0].count:
            continue
        try:
            found.append(
                hpgo.price(
                    model, cluster, global_batch_size=batch, seq=seq, tp=tp, cp=cp, pp=pp, vpp=vpp, zero=zero,
                    micro_batch_size=size, recompute=anew,
                )
            )  # fmt: skip
        except hpgo.ArgumentError:
            continue
    return found


@given(model=models, gpus=st.sampled_from([1, 2, 4, 6, 8, 12]), batch=st.sampled_from([1, 4, 6]), top=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_the_choice_is_that_of_trying_every_way(model, gpus: int, batch: int, top: int) -> None:
    cluster = hpgo.Cluster.preset("h100").first(gpus)
    every = every_way(model, cluster, batch, 1024)
    fitting = sorted(one.step_s for one in every if one.fits)
    try:
        found = hpgo.choose_way(model, cluster, global_batch_size=batch, seq=1024, top=top)
    except hpgo.InfeasibleError:
        assert every
        assert not fitting
        return
    except hpgo.ArgumentError:
        assert not every
        return
    assert found.ways == len(every)
    assert [one.step_s for one in found.prices] == pytest.approx(fitting[:top])
    assert all(one.fits for one in found.prices)
    # To the last figure, though families share what their ways have in common.
    assert all(one in every for one in found.prices)
    assert found.simulated <= found.bounded <= found.ways


def test_memory_that_is_left_alone_is_left_alone() -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    for reserve in (0.0, 30e9):
        found = hpgo.choose_way("llama-3-8b", cluster, global_batch_size=32, seq=4096, headroom_bytes=reserve)
        assert all(stage.peak_bytes <= 80e9 - reserve for one in found.prices for stage in one.stages)


def test_nothing_that_fits_says_what_is_short() -> None:
    with pytest.raises(hpgo.InfeasibleError, match=r"no way fits: the leanest, tp 8 with sp, .* needs .* which has 80"):
        hpgo.choose_way("llama-3.1-405b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192)


def test_a_number_of_gpus_that_nothing_divides_is_refused() -> None:
    with pytest.raises(hpgo.ArgumentError, match="no way parts `llama-3-8b` and a global batch of 8 among 7 GPUs"):
        hpgo.choose_way("llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq=8192, devices=7)


PLAN = ["plan", "llama-3-8b", "--cluster", "h100:1", "--global-batch-size", "16", "--seq", "8192"]


def test_the_command_lists_the_quickest_ways() -> None:
    done = CliRunner().invoke(group, [*PLAN, "--top", "3"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "llama-3-8b on h100:1, 8 GPUs"
    assert any(line.split()[:1] == ["3"] for line in lines)
    assert not any(line.split()[:1] == ["4"] for line in lines[-12:])
    assert "ways were bounded" in done.stdout


def test_json_has_the_ways_in_order() -> None:
    done = CliRunner().invoke(group, [*PLAN, "--json", "--devices", "4"])
    found = json.loads(done.stdout)
    steps = [one["step_s"] for one in found["prices"]]
    assert steps == sorted(steps)
    assert {one["gpus"] for one in found["prices"]} == {4}
    assert found["ways"] >= found["simulated"] >= len(steps)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--schedule", "zb"], "leave out --schedule"),
        (["--max-stages", "2"], "leave out --max-stages"),
        (["-b", "8,16"], "give one batch size"),
    ],
)
def test_options_of_profiles_are_refused_beside_a_transformer(words: list[str], says: str) -> None:
    done = CliRunner().invoke(group, [*PLAN, *words])
    assert done.exit_code == 2
    assert says in done.output


def test_options_of_transformers_are_refused_beside_a_profile() -> None:
    done = CliRunner().invoke(group, ["plan", "vgg-19", "-c", "h100", "-b", "64", "--precision", "fp8"])
    assert done.exit_code == 2
    assert "--precision is for transformers" in done.output
