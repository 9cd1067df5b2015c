"""The KV cache: published sizes, laws of its size, and plans against all splits over all rows of hosts."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from effort import examples
from refusals import refused

import hpgo
from hpgo import KvCache, Transformer
from hpgo.cli.main import group
from hpgo.hardware.cluster import Device, Link, Node
from hpgo.model.blocks import Attention, Block, Scan
from hpgo.model.formats.transformers import transformer_of

if TYPE_CHECKING:
    from pathlib import Path

TINY = Transformer(layers=4, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10, window=6, window_layers=(1,))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("deepseek-ai/DeepSeek-V3", 70_272), ("Qwen/Qwen2.5-72B", 327_680), ("meta-llama/Llama-3.1-405B", 516_096)],
)
def test_bytes_of_a_token_are_the_published_ones(name: str, bytes_per_token: int) -> None:
    """arXiv 2505.09343, table 1, in bfloat16: latent attention and grouped keys and values."""
    assert sum(KvCache(transformer=transformer_of(name), context_length=1).block_bytes()) == bytes_per_token


def test_the_size_is_affine_in_sequences_and_in_the_context_outside_of_windows() -> None:
    def sizes(context_length: int, sequences: int) -> tuple[int, ...]:
        return KvCache(transformer=TINY, context_length=context_length, sequences=sequences).block_bytes()

    for context, sequences in itertools.product(range(1, 12), range(1, 4)):
        found = sizes(context, sequences)
        assert found == tuple(sequences * one for one in sizes(context, 1))
        assert found[0] == context * sizes(1, sequences)[0]
        assert found[1] == min(context, 6) * sizes(1, sequences)[1]
    assert sizes(1, 1)[0] == 2 * 1 * 4 * 2  # keys and values, one head of 4, in 2 bytes
    halved = KvCache(transformer=TINY, context_length=8, dtype="float8").block_bytes()
    assert [2 * one for one in halved] == [*sizes(8, 1)]


def profile(chance: random.Random) -> hpgo.Profile:
    ids = ["embedding", *(f"blocks.{at}" for at in range(TINY.layers)), "head"]
    layers = tuple(
        hpgo.Layer(
            layer, layer, forward_s=(chance.randint(1, 9),), backward_s=(0.0,), parameter_bytes=chance.randint(0, 99),
            activation_bytes=(chance.randint(0, 9),),
        )
        for layer in ids
    )  # fmt: skip
    return hpgo.Profile("tiny", (1,), layers, tuple(itertools.pairwise(ids)))


def test_plans_with_a_cache_equal_the_best_of_all_splits() -> None:
    """The twin lists all splits over all rows of hosts, and counts the cache by itself."""
    outcomes = set()
    for seed in range(examples(60)):
        chance = random.Random(seed)
        model = profile(chance)
        hosts = [Device(f"d{at}", chance.choice([150, 300, 600]), speed=chance.randint(1, 3)) for at in range(3)]
        link = Link(1e12, 1e12)
        cluster = hpgo.Cluster("mixed", tuple(Node(one, 1, one.name) for one in hosts), intra=link, inter=link)
        context, sequences = chance.randint(1, 9), chance.randint(1, 3)
        each = [0, *(sequences * 16 * (min(context, 6) if at == 1 else context) for at in range(TINY.layers)), 0]
        best = float("inf")
        for count in range(1, 4):
            for cuts in itertools.combinations(range(1, 6), count - 1):
                parts = list(itertools.pairwise((0, *cuts, 6)))
                for row in itertools.permutations(hosts, count):
                    slowest = 0.0
                    for host, (first, end) in zip(row, parts, strict=True):
                        sent = model.layers[end - 1].activation_bytes[0]
                        received = model.layers[first - 1].activation_bytes[0] if first else 0
                        need = sum(layer.parameter_bytes for layer in model.layers[first:end]) + sum(each[first:end])
                        if host.memory_bytes <= need + received + sent:
                            break
                        seconds = sum(layer.forward_s[0] for layer in model.layers[first:end])
                        slowest = max(slowest, seconds / host.speed)
                    else:
                        best = min(best, slowest)
        cache = KvCache(transformer=TINY, context_length=context, sequences=sequences)
        options: dict = {"kv_cache": cache, "buffers_in": 0, "buffers_out": 0}
        outcomes.add(best < float("inf"))
        if best == float("inf"):
            with pytest.raises(hpgo.errors.InfeasibleError) as caught:
                hpgo.partition(model, cluster, **options)
            assert "KV cache" in caught.value.hint
            continue
        plan = hpgo.partition(model, cluster, **options)
        assert plan.interval_s == pytest.approx(best, rel=1e-9)
        assert plan.optimality_gap == 0
        for stage in plan.stages:
            assert stage.kv_cache_bytes == sum(each[stage.first - 1 : stage.last])
        assert hpgo.ChainPlan.from_json(plan.to_json()) == plan
        # The number of sequences that fit is exact for the split of the plan.
        rooms = [(plan.max_sequences(stage), stage) for stage in plan.stages if stage.kv_cache_bytes]
        for most, stage in rooms:
            more = stage.kv_cache_bytes / sequences
            assert stage.memory_bytes + (most - sequences) * more < stage.host_memory_bytes
            assert stage.memory_bytes + (most - sequences + 1) * more >= stage.host_memory_bytes
        most = int(min(rooms, key=lambda one: one[0])[0])
        fuller = KvCache(transformer=TINY, context_length=context, sequences=most)
        assert hpgo.partition(model, cluster, **options | {"kv_cache": fuller}).kv_sequences == most
    assert outcomes == {True, False}


def test_the_layer_with_the_attention_has_the_cache() -> None:
    names = [f"blocks.{at}.{part}" for at in range(TINY.layers) for part in ("attention", "ffn")]
    layer = {"forward_s": (1.0,), "backward_s": (0.0,), "activation_bytes": (1.0,), "parameter_bytes": 1.0}

    def model(ids: list[str]) -> hpgo.Profile:
        layers = tuple(hpgo.Layer(one, one, **layer) for one in ids)
        return hpgo.Profile("halves", (1,), layers, tuple(itertools.pairwise(ids)))

    pair = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=1, inter_gbit_s=1)
    cache = KvCache(transformer=TINY, context_length=10)
    plan = hpgo.partition(model(names), pair, kv_cache=cache)
    assert [stage.kv_cache_bytes for stage in plan.stages] == [160 + 96, 320]
    others = [one.replace("attention", "first") for one in names]
    with refused(hpgo.errors.ArgumentError, "unsupported", "blocks.0.first"):
        hpgo.partition(model(others), pair, kv_cache=cache)
    whole = hpgo.partition(model(others), pair, framework="vllm", kv_cache=cache)
    assert sum(stage.kv_cache_bytes for stage in whole.stages) == 576
    with refused(hpgo.errors.ArgumentError, "mismatch", "3 blocks", "4"):
        hpgo.partition(model(names[:6]), pair, kv_cache=cache)


@pytest.mark.parametrize(
    "operators",
    [
        {"scans": (Scan(rule="ssd", heads=2, key_dim=4, value_dim=4),)},
        {"attention": (Attention(heads=2, kv_heads=1, head_dim=4, causal=False),)},
        {"attention": (Attention(heads=2, kv_heads=1, head_dim=4, selected=8),)},
    ],
)
def test_blocks_without_a_cache_of_keys_and_values_are_refused(operators: dict) -> None:
    model = Transformer.from_blocks(
        name="other", hidden=8, vocab=10, blocks=[Block(name="a", **operators)], pattern=["a"]
    )
    with refused(hpgo.errors.ArgumentError, "unsupported", "`a`", "`other`"):
        KvCache(transformer=model, context_length=8)


def test_the_command_counts_the_cache_and_names_the_stage_that_limits_it(tmp_path: Path) -> None:
    hpgo.write_profile(profile(random.Random(1)), tmp_path / "tiny.yaml")
    words = ["partition", "--profile", str(tmp_path / "tiny.yaml"), "--cluster", "dapple-c:2"]
    asked = ["--kv-model", "llama-3-8b", "--kv-context", "8192"]
    with refused(hpgo.errors.ArgumentError, "mismatch", "4 blocks", "llama-3-8b", "32"):
        CliRunner().invoke(group, [*words, *asked], catch_exceptions=False)
    (tmp_path / "tiny.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,'
        ' "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 32}'
    )
    own = ["--kv-model", str(tmp_path / "tiny.json"), "--kv-context", "100", "--kv-sequences", "3"]
    result = CliRunner().invoke(group, [*words, *own, "--kv-dtype", "float8", "--json"])
    plan = hpgo.ChainPlan.from_json(result.output)
    assert sum(stage.kv_cache_bytes for stage in plan.stages) == 4 * 100 * 3 * 2 * 2 * 16
    result = CliRunner().invoke(group, [*words, *own])
    assert "3 sequences of 100 tokens; at most" in result.output
    for some in (asked[:2], asked[2:]):
        assert CliRunner().invoke(group, [*words, *some]).exit_code == 2
    assert CliRunner().invoke(group, ["partition", *asked]).exit_code == 2
