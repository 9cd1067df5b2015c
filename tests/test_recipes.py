"""Published ways of training Llama 3 on H100s and B200s, priced: they fit, and the search finds none much quicker."""

from __future__ import annotations

from typing import Any

import pytest

import hpgo

# Megatron-Bridge, docs/performance-summary.md and the recipes that it names.
RECIPES = [
    ("llama-3-70b", "h100:8", "fp8", {"tp": 4, "pp": 8, "vpp": 5, "micro_batch_size": 1}),
    ("llama-3-70b", "h100:8", "bf16", {"tp": 4, "cp": 2, "pp": 4, "vpp": 5, "micro_batch_size": 1}),
    ("llama-3-8b", "b200:1", "fp8", {"micro_batch_size": 2}),
]


@pytest.mark.parametrize(("model", "cluster", "precision", "way"), RECIPES)
def test_a_published_way_fits_and_costs_at_most_3_percent_more_than_the_best(
    model: str, cluster: str, precision: Any, way: dict[str, int]
) -> None:
    gpus, asked = hpgo.Cluster.preset(cluster), {"global_batch_size": 128, "seq_length": 8192, "precision": precision}
    recipe = hpgo.estimate_llm(model, gpus, framework="megatron", **asked, **way)
    found = hpgo.plan_llm(model, gpus, **asked, top=1)
    assert recipe.fits
    assert found.fastest.step_s <= recipe.step_s <= 1.03 * found.fastest.step_s


def test_a_way_that_was_published_is_found_when_its_degrees_are_fixed() -> None:
    model, cluster, precision, way = RECIPES[0]
    found = hpgo.plan_llm(
        model, hpgo.Cluster.preset(cluster), global_batch_size=128, seq_length=8192, precision=precision, fix=way
    )  # fmt: skip
    assert found.fastest.parallelism.dp == 2
    assert found.fastest.parallelism.zero_stage == 1
    assert found.fastest.parallelism.recompute == "none"


def test_only_inputs_of_products_in_fewer_bits_are_kept_in_these() -> None:
    """Weights, gradients and their state are as large in both."""
    model, cluster, _, way = RECIPES[0]
    wide, narrow = (
        dict(
            hpgo.estimate_llm(
                model, hpgo.Cluster.preset(cluster), global_batch_size=128, seq_length=8192, precision=precision, **way
            ).stages[0].memory_bytes
        )
        for precision in ("bf16", "fp8")
    )  # fmt: skip
    assert {name for name in wide if wide[name] != narrow[name]} == {"activations"}
    # Of a token and layer: two inputs of norms, queries, keys, values, attention's result, two of the inner width; and
    # in 8 bits two inputs of products, attention's result once more, what comes out of the gate.
    h, kv, inner = 8192, 1024, 28672
    in_16 = 2 * (2 * h + 2 * h + 2 * kv + 2 * inner)
    assert narrow["activations"] / wide["activations"] == pytest.approx(
        (in_16 + 2 * h + h + inner) / (in_16 + 2 * (2 * h + inner))
    )


def test_what_cannot_fit_is_not_offered() -> None:
    """Without sharing, a parameter's 18 bytes are 145 GB of 80."""
    gpus, asked = hpgo.Cluster.preset("h100:1"), {"global_batch_size": 8, "seq_length": 2048}
    assert not hpgo.estimate_llm("llama-3-8b", gpus, **asked, zero_stage=0).fits
    with pytest.raises(hpgo.errors.InfeasibleError, match="too little"):
        hpgo.plan_llm("llama-3-8b", gpus, **asked, fix={"zero_stage": 0, "tp": 1, "pp": 1, "cp": 1})
