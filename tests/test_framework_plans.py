"""Plans for a framework: whatever the search gives for one, its export writes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from refusals import refused
from test_export import assigned, blocks, model

import hpgo
from hpgo import export
from hpgo.errors import HpgoError
from hpgo.model.transformer_presets import TRANSFORMERS

FRAMEWORKS: tuple[Any, ...] = ("megatron", "torchtitan@0.2", "torchtitan@0.3", "deepspeed", "torch")
OPTIMIZERS: tuple[Any, ...] = ("adam-fp32", "adam-bf16", "adam-bf16-fp32-gradients", "sgd", "sgd-momentum")
SCHEDULES = ("auto", "1f1b", "eager_1f1b", "gpipe", "interleaved", "zb_h1", "zb", "zb_v", "hanayo", "looped_bfs")


def some_profile(chance: random.Random, gpus: int) -> hpgo.Profile:
    """Blocks in a row, mostly; sometimes in two layers each, with a skip connection, a shared weight or no numbers."""
    before, after = chance.choice([["embed"], ["tokens", "positions"]]), chance.choice([["head"], ["norm", "head"]])
    names = [f"layers.{at}" for at in range(chance.randint(2, 8))]
    if chance.random() < 0.05:
        names[0] = "dense.0"
    if chance.random() < 0.05:
        names = [f"layer{chr(97 + at)}" for at in range(len(names))]
    elif chance.random() < 0.25:
        names = [f"{name}.{part}" for name in names for part in ("attention", "mlp")]
    ids = [*before, *names, *after]
    costly = 100 if chance.random() < 0.03 else 0.05
    layers = tuple(
        hpgo.Layer(name, name, (1e-3 * size,), (2e-3 * size,), (1e6,), 4e6, (2e6,))
        for name in ids
        for size in (chance.uniform(0.5, 1) * (1 if name in names else costly),)
    )
    edges = [*itertools.pairwise(ids), *([(ids[0], ids[-1])] if chance.random() < 0.05 else [])]
    ties = (hpgo.TiedWeight((before[0], after[-1]), 1e6),) if chance.random() < 0.2 else ()
    return hpgo.Profile("toy", (1,), layers, tuple(edges), gpus_per_device=gpus, tied_weights=ties)


def some_options(chance: random.Random) -> dict[str, Any]:
    memory = hpgo.MemoryModel.preset(chance.choice(OPTIMIZERS), shard_optimizer=chance.random() < 0.5)
    parts = (
        (0.6, "memory", memory),
        (0.3, "recompute", chance.choice([True, "auto"])),
        (0.3, "overlap", False),
        (0.3, "pipeline_micro_batch_size", chance.choice([1, 2])),
        (0.6, "schedule", chance.choice(SCHEDULES)),
        (0.2, "max_stages", chance.choice([1, 2])),
    )
    chosen = {name: value for share, name, value in parts if chance.random() < share}
    return {"global_batch_size": chance.choice([4, 6, 8, 12]), **chosen}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_planned_for_a_framework_is_exported_for_it(framework: Any) -> None:
    chance, planned = random.Random(framework), 0
    for _ in range(80):
        gpus = 2 if chance.random() < 0.1 else 1
        links: dict[str, Any] = {"intra_gbit_s": 100, "inter_gbit_s": 10, "gpus_per_device": gpus}
        nodes, devices = chance.choice([(1, 1), (1, 2), (1, 4), (2, 2), (1, 3)])
        memory = chance.choice(["100 MB", "300 MB", "16 GB"])
        cluster = hpgo.Cluster.of(nodes=nodes, devices_per_node=devices, memory=memory, **links)
        try:
            plan = hpgo.plan(some_profile(chance, gpus), cluster, framework=framework, **some_options(chance))
        except HpgoError:
            continue
        assert export.files(plan, framework)
        planned += 1
    assert planned > 15


@pytest.mark.parametrize("framework", FRAMEWORKS[:-1])
def test_what_is_planned_for_a_transformer_is_exported_too(framework: Any) -> None:
    chance, planned = random.Random(framework), 0
    for _ in range(50):
        name = chance.choice(["llama-3-8b", "llama-3-8b", "mixtral-8x7b", "gpt-2", *TRANSFORMERS])
        whole = TRANSFORMERS[name]
        layers = chance.choice([4, 6, 8])
        ends = {
            end: tuple(at for at in getattr(whole, end) if at < layers) for end in ("dense_layers", "window_layers")
        }
        small: dict[str, Any] = {"ffn": min(whole.ffn, 1024), "expert_ffn": min(whole.expert_ffn, 64), **ends}
        one = replace(whole, layers=layers, vocab=2048, tied=chance.random() < 0.4, **small)
        fix = {
            key: value
            for key, value in (("pp", chance.choice([1, 2])), ("tp", 2), ("zero_stage", chance.choice([0, 1, 2, 3])))
            if chance.random() < 0.25
        }
        cluster = hpgo.Cluster.preset("h100:1")
        try:
            found = hpgo.plan_llm(
                one, cluster, devices=chance.choice([1, 2, 4, 8]), framework=framework, fix=fix, seq_length=512,
                global_batch_size=chance.choice([4, 8, 12]), precision=chance.choice(["bf16", "bf16", "fp16", "fp8"]),
            )  # fmt: skip
        except HpgoError:
            continue
        for price in found.estimates:
            assert export.files(hpgo.LlmPlan.of(price, one, cluster), framework), price.parallelism.named()
        planned += 1
    assert planned > 3


def cluster_of(devices: int, memory: str = "16 GB") -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=1, devices_per_node=devices, intra_gbit_s=100, memory=memory)


def test_hanayo_makes_one_v_for_torchtitan() -> None:
    options: dict[str, Any] = {"global_batch_size": 6, "schedule": "hanayo"}
    profile = model(blocks(8))
    plan = hpgo.plan(profile, cluster_of(2), framework="torchtitan", **options)
    assert plan.virtual_stages_per_rank == 2
    assert export.files(plan, "torchtitan")
    assert hpgo.plan(profile, cluster_of(2), framework="torch", **options).step_s <= plan.step_s


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_megatron_interleaves_on_no_more_ranks_than_there_are_micro_batches(micro_batches: int) -> None:
    asked: dict[str, Any] = {"framework": "megatron", "schedule": "interleaved", "pipeline_micro_batch_size": 2}
    profile = model(blocks(8))
    if micro_batches == 1:
        with refused(hpgo.errors.InfeasibleError, "infeasible", "interleaved"):
            hpgo.plan(profile, cluster_of(4), global_batch_size=2, **asked)
        return
    plan = hpgo.plan(profile, cluster_of(4), global_batch_size=2 * micro_batches, **asked)
    assert len(plan.groups) <= plan.micro_batches == micro_batches
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_s
    assert "--pipeline-model-parallel-layout" in export.megatron(plan)


def test_virtual_stages_have_room_for_what_a_framework_keeps_where_it_recomputes() -> None:
    chance, written = random.Random(5), 0
    for _ in range(60):
        profile = model([*(f"layers.{at}.{part}" for at in range(8) for part in ("attention", "mlp")), "norm", "head"])
        layers = tuple(
            replace(one, activation_bytes=(chance.choice([2e6, 2e7]),), saved_bytes=(1e6,)) for one in profile.layers
        )
        memory = f"{chance.randint(10, 400)} MB"
        try:
            plan = hpgo.plan(
                replace(profile, layers=layers), cluster_of(2, memory), framework="torchtitan", schedule="interleaved",
                recompute=True, global_batch_size=4,
            )  # fmt: skip
        except hpgo.errors.InfeasibleError:
            continue
        assert export.files(plan, "torchtitan")
        written += 1
    assert written > 5


def test_only_frameworks_that_recompute_by_stage_get_stages_that_differ() -> None:
    # The last layers save most, so with little memory only some stages recompute their activations.
    layers = tuple(
        replace(one, parameter_bytes=0.0, activation_bytes=(1e6,), saved_bytes=(saved,))
        for one, saved in zip(model(blocks(8)).layers, [1e6] * 6 + [6e8] * 4, strict=True)
    )
    profile, asked = replace(model(blocks(8)), layers=layers), {"global_batch_size": 8, "recompute": "auto"}
    cluster = cluster_of(2, "1300 MB")
    free = hpgo.plan(profile, cluster, pipeline_micro_batch_size=1, **asked)
    assert free.recompute == "auto"
    for framework in ("torch", "deepspeed", "megatron", "torchtitan"):
        plan = hpgo.plan(profile, cluster, pipeline_micro_batch_size=1, framework=framework, **asked)
        assert (plan.recompute == "auto") == (framework == "torch")
        assert export.files(plan, framework)
    flags = [stage.recompute for stage in free.stages]
    assert assigned(export.files(free, "torch")["planned.py"])["RECOMPUTE"] == flags
    with refused(hpgo.errors.ArgumentError, "unsupported", "DeepSpeed", f"{sum(flags)} stage"):
        export.files(free, "deepspeed")
