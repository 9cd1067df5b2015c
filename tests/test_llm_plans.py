"""Chosen ways as files: they hold all of a price, name what is wrong with them, and no reader takes them for plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent.parent / "docs/llm-plan.schema.json").read_text(encoding="utf-8"))
)
H100 = hpgo.Cluster.preset("h100:8")


@pytest.fixture(scope="module")
def plan() -> hpgo.LlmPlan:
    one = hpgo.estimate_llm("llama-3-70b", H100, global_batch_size=128, seq_length=8192, tp=8, pp=4, vpp=5)
    return hpgo.LlmPlan.of(one, "llama-3-70b", H100)


@given(
    tp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2, 4]), vpp=st.integers(1, 2),
    zero_stage=st.integers(0, 3), gpus=st.sampled_from([32, 64]), recompute=st.sampled_from(["none", "selective",
    "full"]),
    precision=st.sampled_from(["bf16", "fp16", "fp8"]), last=st.sampled_from([None, 2]),
)  # fmt: skip
@settings(max_examples=40)
def test_a_file_reads_back_as_the_same_way_at_the_same_price(
    gpus: int, vpp: int, pp: int, last: int | None, **asked: Any
) -> None:
    asked["last_rank_layers"] = last if pp > 1 else None
    one = hpgo.estimate_llm(
        "llama-3-8b",
        H100,
        global_batch_size=64,
        seq_length=4096,
        devices=gpus,
        pp=pp,
        vpp=vpp if pp > 1 else 1,
        **asked,
    )
    saved = hpgo.LlmPlan.of(one, "llama-3-8b", H100)
    text = saved.to_json()
    assert hpgo.LlmPlan.from_json(text) == saved
    assert hpgo.LlmPlan.from_json(text).estimate.fits == one.fits
    SCHEMA.validate(json.loads(text))


@pytest.mark.parametrize("name", ["gpt-2", "gemma-2-9b", "mistral-7b", "qwen2.5-72b", "qwen3-8b"])
def test_whatever_a_transformer_is_like_comes_back(name: str) -> None:
    cluster = hpgo.Cluster.preset("h100:1").first(4)
    one = hpgo.estimate_llm(name, cluster, global_batch_size=4, seq_length=1024)
    saved = hpgo.LlmPlan.of(one, name, cluster, framework="deepspeed")
    assert hpgo.LlmPlan.from_json(saved.to_json()) == saved


def test_what_was_saved_gives_the_same_price_when_it_is_asked_again(plan: hpgo.LlmPlan) -> None:
    again = hpgo.LlmPlan.from_json(plan.to_json())
    config, price = again.estimate.parallelism, again.estimate
    assert price == hpgo.estimate_llm(
        again.transformer, again.cluster, global_batch_size=price.global_batch_size, seq_length=price.seq_length,
        tp=config.tp,
        pp=config.pp, vpp=config.vpp, cp=config.cp, zero_stage=config.zero_stage,
        micro_batch_size=config.micro_batch_size,
    )  # fmt: skip


def test_the_cluster_is_what_the_way_uses() -> None:
    one = hpgo.estimate_llm("llama-3-8b", H100, global_batch_size=64, seq_length=4096, tp=2, devices=16)
    saved = hpgo.LlmPlan.of(one, "llama-3-8b", H100)
    assert saved.cluster.devices == 16
    assert saved.cluster == H100.first(16)


def altered(plan: hpgo.LlmPlan, *path: str, to: object = None, drop: bool = False) -> str:
    """The file with one value changed, or one key left out."""
    document = json.loads(plan.to_json())
    where = document
    for key in path[:-1]:
        where = where[int(key)] if isinstance(where, list) else where[key]
    if drop:
        del where[path[-1]]
    else:
        where[path[-1]] = to
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "to", "says"),
    [
        (("version",), 2, "is of version 2, not 1"),
        (("format",), "hpgo.plan", "is not a plan of a transformer"),
        (("colour",), "red", "`colour` is unknown"),
        (("estimate", "colour"), "red", "estimate: `colour` is unknown"),
        (("estimate", "parallelism", "tensors"), 2, "estimate, parallelism: `tensors` is unknown"),
        (("estimate", "parallelism", "tp"), "8", "estimate, parallelism: `tp` must be a whole number"),
        (("estimate", "parallelism", "tp"), 4, "the degrees need 32 GPUs"),
        (("estimate", "parallelism", "precision"), "int8", "precision of a ParallelismConfig is `int8`"),
        (("estimate", "parallelism", "pp"), 0, "pp is 0"),
        (("estimate", "step_s"), "fast", "`step_s` must be a number"),
        (("estimate", "step_s"), 0, "step_s"),
        (("estimate", "time_by_term_s", "linear"), -1, "linear"),
        (("estimate", "stages"), [], "no stages"),
        (("estimate", "model"), "gpt-2", "the estimate is for `gpt-2`"),
        (("transformer", "layers"), 81, "must hold each of 81 layers exactly once"),
        (("estimate", "stages", "0", "layers"), [[0, 2**31]], "must hold each of 80 layers exactly once"),
        (("transformer", "heads"), 65, "65 heads"),
        (("transformer", "depth"), 8, "transformer: `depth` is unknown"),
        (("cluster", "nodes"), [], "cluster"),
        (("framework",), "megatorn", "did you mean `megatron`"),
        (("framework",), "vllm", "LLM plans are not supported for vLLM"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(plan: hpgo.LlmPlan, path: tuple[str, ...], to: object, says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.LlmPlan.from_json(altered(plan, *path, to=to), source="plan.json")
    assert says in caught.value.message + caught.value.hint
    assert caught.value.hint


@pytest.mark.parametrize("key", ["framework", "estimate", "transformer", "cluster", "made_with"])
def test_a_key_that_is_missing_is_named(plan: hpgo.LlmPlan, key: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=rf"plan\.json: `{key}` is missing"):
        hpgo.LlmPlan.from_json(altered(plan, key, drop=True), source="plan.json")


def test_parts_that_contradict_each_other_are_refused(plan: hpgo.LlmPlan) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="the degrees need 64 GPUs"):
        replace(plan, cluster=H100.first(32))
    with pytest.raises(hpgo.errors.ArgumentError, match="the estimate is for `llama-3-70b`"):
        hpgo.LlmPlan.of(plan.estimate, "llama-3-8b", H100)


# --- Readers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(plan: hpgo.LlmPlan, tmp_path: Path) -> Path:
    path = tmp_path / "llm-plan.json"
    plan.save(path)
    return path


def test_readers_of_plans_say_what_such_a_file_is(saved: Path) -> None:
    with refused(hpgo.errors.ArgumentError, "wrong_kind_of_file") as caught:
        hpgo.Plan.read(saved)
    assert "hpgo export" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["simulate", "--plan", "llm-plan.json"], 1),
        (["draw", "llm-plan.json", "-o", "way.svg"], 1),
        (["view", "llm-plan.json"], 1),
        (["launch", "llm-plan.json", "--on", "local", "--script", "train.py"], 1),
    ],
)
def test_commands_that_need_a_plan_say_what_they_were_given(run, saved: Path, words: list[str], code: int) -> None:
    assert saved.name == "llm-plan.json"
    assert re.search("llm-plan.json`? is an LLM plan", run(*words, code=code).stderr)


def test_a_plan_is_no_way(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64).save(path)
    with pytest.raises(hpgo.errors.ArgumentError, match=r"plan\.json: is not a plan of a transformer"):
        hpgo.LlmPlan.read(path)
