"""Blocks of operators: models in blocks cost what the same models cost in fields, and operators follow their laws."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpgo.cli.llm.options import note_model
from hpgo.errors import ArgumentError, HpgoError
from hpgo.llm.estimate import estimate_llm, model_flop
from hpgo.model.blocks import Attention, Block, Conv, Experts, Linear, Mlp, Scan, Vector
from hpgo.model.formats.transformers import of_document
from hpgo.model.transformer import Tower, Transformer
from hpgo.model.transformer_presets import TRANSFORMERS

MAMBA = Block(
    name="mamba",
    scans=(Scan(rule="ssd", heads=16, key_dim=64, value_dim=64, groups=8, chunk=256),),
    linears=(Linear(inputs=512, outputs=2 * 1024 + 2 * 8 * 64 + 16, split="column"),
             Linear(inputs=1024, outputs=512, split="row")),
    convs=(Conv(channels=1024 + 2 * 8 * 64, width=4, bias=True),),
    vectors=(Vector(size=3 * 16, split=True), Vector(size=1024, split=True)),
    norms=1,
)  # fmt: skip
ATTENTION = Block(name="attention", attention=(Attention(heads=8, kv_heads=8, head_dim=64),), norms=1)
NETWORK = Block(name="mlp", mlp=Mlp(width=2048, gated=False), norms=1)
HYBRID = Transformer.from_blocks(
    name="hybrid", hidden=512, vocab=32_000, blocks=[MAMBA, ATTENTION, NETWORK],
    pattern=["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
)  # fmt: skip


def in_blocks(model: Transformer) -> Transformer:
    """Return the same model with a block for each kind of its layers."""
    names = {kind: f"kind {at}" for at, kind in enumerate(model.kinds)}
    return replace(
        model,
        blocks=tuple(replace(model.block(kind), name=name) for kind, name in names.items()),
        pattern=tuple(names[model.kind(layer)] for layer in range(model.layers)),
    )


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v3", "gpt-3-175b"])
def test_a_model_in_blocks_costs_what_it_costs_in_fields(name: str) -> None:
    model = TRANSFORMERS[name]
    blocks = in_blocks(model)
    assert blocks.parameters == model.parameters
    assert blocks.active_parameters == model.active_parameters
    assert blocks.parameters_by_part() == model.parameters_by_part()
    for way in ({"tp": 8}, {"tp": 2, "pp": 2, "recompute": "full"}, {"flash_attention": False}, {"zero_stage": 3}):
        asked = {"global_batch_size": 64, "seq_length": 2048, **way}
        if blocks.experts and "tp" in way:
            asked["ep"] = 4
        found, wanted = (estimate_llm(one, "h100:8", **asked) for one in (blocks, model))
        assert found.step_s == pytest.approx(wanted.step_s, rel=1e-12)
        assert [one.memory_bytes for one in found.stages] == [one.memory_bytes for one in wanted.stages]


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v3", "gpt-3-175b"])
def test_from_blocks_finds_the_fields(name: str) -> None:
    model = in_blocks(TRANSFORMERS[name])
    kept = {
        key: getattr(model, key)
        for key in ("name", "tied", "positions", "longest", "arithmetic", "further_tokens", "centred_norms")
    }
    again = Transformer.from_blocks(
        hidden=model.hidden, vocab=model.vocab, blocks=model.blocks, pattern=model.pattern, **kept
    )
    assert again == model


def test_a_file_keeps_blocks() -> None:
    tower = Tower(hidden=256, blocks=(replace(ATTENTION, name="a"), replace(NETWORK, name="b")), pattern=("a", "b") * 3)
    model = replace(HYBRID, tower=tower, after=Block(vectors=(Vector(size=32_000),), norms=0))
    assert of_document(json.loads(json.dumps({"hpgo_transformer": 1} | asdict(model)))) == model
    assert model.parameters == HYBRID.parameters + tower.parameters + 32_000


def test_operations_are_six_per_weight_and_those_of_scores_and_scans() -> None:
    tokens = 1024
    weights = HYBRID.parameters - HYBRID.vocab * HYBRID.hidden
    scans = 3 * MAMBA.scans[0].flop_per_token()
    scores = 2 * 2 * 512 * tokens / 2
    assert model_flop(HYBRID, tokens, 1) == pytest.approx(tokens * (6 * weights + 3 * (scans + scores)))


def test_memory_of_all_gpus_is_the_models_and_divides_by_tensor_parallelism() -> None:
    held = {
        tp: dict(estimate_llm(HYBRID, "h100:1", global_batch_size=8, seq_length=1024, tp=tp).stages[0].memory_bytes)
        for tp in (1, 8)
    }
    whole = sum(block.norms for block in (MAMBA, NETWORK) for _ in range(3)) + 2 + 1
    assert held[1]["weights"] == 2 * HYBRID.parameters
    assert held[8]["weights"] == pytest.approx(
        2 * ((HYBRID.parameters - whole * HYBRID.hidden) / 8 + whole * HYBRID.hidden)
    )


@given(st.integers(1, 8192), st.integers(0, 4096), st.integers(0, 4096), st.integers(0, 4096), st.booleans())
def test_attention_sees_at_most_all_pairs_and_no_more_than_without_limits(
    tokens: int, window: int, chunk: int, selected: int, causal: bool
) -> None:
    one = Attention(heads=1, kv_heads=1, head_dim=8, window=window, chunk=chunk, selected=selected, causal=causal)
    free = Attention(heads=1, kv_heads=1, head_dim=8, causal=causal)
    assert 0 < one.seen(tokens) <= free.seen(tokens) <= 1


@given(st.sampled_from(["ssd", "gated_delta", "mamba1", "linear_attention"]), st.integers(1, 64))
def test_a_scan_of_twice_the_heads_takes_at_most_twice_the_operations(rule: str, heads: int) -> None:
    one, two = (Scan(rule=rule, heads=heads * by, key_dim=64, value_dim=64) for by in (1, 2))  # type: ignore[arg-type]
    assert one.flop_per_token() < two.flop_per_token() <= 2 * one.flop_per_token()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Experts(count=8, per_token=9, width=4), "8 experts"),
        (lambda: Experts(count=8, per_token=2, width=0), "width 0"),
        (lambda: Experts(count=8, per_token=2, width=4, groups=3), "3 groups"),
        (lambda: Attention(heads=3, kv_heads=2, head_dim=8), "3 heads"),
        (lambda: Attention(heads=0, kv_heads=1, head_dim=8), "heads of Attention is 0"),
        (lambda: replace(MAMBA.scans[0], chunk=0), "chunk of Scan is 0"),
        (lambda: replace(MAMBA.scans[0], groups=3), "groups 3"),
        (lambda: Conv(channels=8, width=0), "width of Conv is 0"),
        (lambda: replace(HYBRID, layers=7), "pattern names 8"),
        (lambda: replace(HYBRID, pattern=("mamba", "other") * 4), "`other`"),
        (lambda: replace(HYBRID, blocks=(MAMBA, MAMBA)), "same name"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_name(build, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        build()


def test_frameworks_without_the_operators_say_so() -> None:
    with pytest.raises(HpgoError, match="state-space scans"):
        estimate_llm(HYBRID, "h100:1", global_batch_size=8, seq_length=1024, framework="torchtitan")


def test_operators_that_nothing_measured_are_marked_and_noted() -> None:
    gated = replace(ATTENTION, attention=(replace(ATTENTION.attention[0], sinks=True, gate=True),))
    model = replace(HYBRID, blocks=(MAMBA, gated, NETWORK), tower=Tower(hidden=8, blocks=(NETWORK,), pattern=("mlp",)))
    found = estimate_llm(model, "h100:1", global_batch_size=8, seq_length=1024)
    assert set(found.unvalidated_features) >= {"scans", "attention sinks", "gated attention", "vision tower"}
    assert not {"scans", "attention sinks"} & set(
        estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=1024, tp=8).unvalidated_features
    )


def test_notes_say_what_an_estimate_leaves_out(tmp_path, capsys) -> None:
    sinks = replace(ATTENTION, attention=(replace(ATTENTION.attention[0], sinks=True),))
    model = replace(HYBRID, blocks=(MAMBA, sinks, NETWORK), tower=Tower(hidden=8, blocks=(NETWORK,), pattern=("mlp",)))
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"hpgo_transformer": 1} | asdict(model)), encoding="utf-8")
    note_model(str(file), 1024)
    noted = " ".join(capsys.readouterr().err.split())
    assert "--no-flash-attention" in noted
    assert "vision tower of hybrid" in noted
