"""What a framework runs, and what is fixed and excluded: the search looks at that and nothing else, or says why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grid import every_way, fitting, to_choose_from

import hpgo

H100 = hpgo.Cluster.preset("h100:1")
TINY = hpgo.Transformer(
    name="tiny", layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=2048, vocab=32000
)  # fmt: skip
ASKED: dict[str, Any] = {"global_batch_size": 8, "seq_length": 512}


def runs(framework: str, price: hpgo.LlmEstimate) -> bool:
    """The rules of docs/llm.md, written down a second time."""
    config = price.parallelism
    several, piped = config.dp * config.cp > 1, config.pp > 1
    if config.pp_schedule != "1f1b" and framework != "torchtitan":
        return False
    if framework == "megatron":
        return config.zero_stage in ({0, 1} if several else {0})
    if framework == "torchtitan":
        once = config.zero_stage == 2 and (piped or price.micro_batches == 1)
        return (once or (config.zero_stage == 3 and not piped)) if several else config.zero_stage == 0
    known = {1} if piped else {1, 2, 3}  # nothing is shared with narrow gradients alone
    if config.cp * config.vpp > 1 or (piped and config.tp > 1):
        return False
    return config.zero_stage in (known if several else {0})


def all_that_is_run(framework: str, model: hpgo.Transformer, cluster: hpgo.Cluster) -> list[hpgo.LlmEstimate]:
    """Everything that `hpgo.estimate_llm` accepts and the framework runs; ranks have equally many layers."""
    found: dict[Any, hpgo.LlmEstimate] = {}
    for tp, cp, pp, vpp, size, zero, (schedule, recomputed, graphs) in product(
        [1, 2, 4], [1, 2, 4], [1, 2, 3, 4], range(1, 7), [1, 2, 4, 8], range(4),
        (("1f1b", "none", "none"), ("1f1b", "full", "none"), ("interleaved_zb", "none", "none"),
         ("zb_v", "none", "none"), ("1f1b", "none", "full_iteration"), ("1f1b", "full", "full_iteration")),
    ):  # fmt: skip
        if cluster.devices % (tp * cp * pp):
            continue
        try:
            one = hpgo.estimate_llm(
                model, cluster, **ASKED, framework=framework, tp=tp, cp=cp, pp=pp, vpp=vpp, zero_stage=zero,
                micro_batch_size=size, recompute=recomputed, pp_schedule=schedule, fused_elementwise=schedule == "1f1b",
                overlap_dp_comm=framework == "megatron" or pp == 1,
                dtensor=framework == "torchtitan", cuda_graph_impl=graphs,
            )  # fmt: skip
        except hpgo.errors.ArgumentError:
            continue
        # Without replicas every ZeRO stage is stage 0, so several of them give one configuration.
        if runs(framework, one):
            found[one.parallelism] = one
    return list(found.values())


@pytest.mark.parametrize(("framework", "tied"), [("megatron", False), ("torchtitan", False), ("deepspeed", True)])
def test_the_best_way_of_a_launcher_is_that_of_trying_all_that_it_runs(framework: str, tied: bool) -> None:
    model, cluster = replace(TINY, tied=tied), H100.first(4)
    every = all_that_is_run(framework, model, cluster)
    fit = [one for one in every if one.fits]
    if framework == "megatron":  # which runs uneven ranks, too, and computes some of a stage's layers anew
        even, every_one = every, every_way(model, cluster, ASKED["global_batch_size"], ASKED["seq_length"], graphs=True)
        every, fit = list(every_one.values()), fitting(every_one, 80e9)
        assert {(one.step_s, one.stages) for one in even} <= {(one.step_s, one.stages) for one in every}
    found = hpgo.plan_llm(model, cluster, **ASKED, framework=framework, top=1000, devices=4)
    assert found.configurations == len(every)
    wanted = to_choose_from(fit, fit, 1000)
    assert [one.step_s for one in found.estimates] == pytest.approx([one.step_s for one in wanted])
    assert found.framework.partition("@")[0] == framework
    assert all(runs(framework, one) for one in found.estimates)


FIXED = {"tp": [1, 2, 4], "cp": [1, 2], "pp": [1, 2, 4], "vpp": [1, 2], "dp": [1, 2, 4], "zero_stage": [0, 1],
         "micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]}  # fmt: skip


@cache
def everything() -> dict[tuple, hpgo.LlmEstimate]:
    return every_way(TINY, H100.first(4), ASKED["global_batch_size"], ASKED["seq_length"])


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_what_is_fixed_and_excluded_is_what_the_list_of_everything_has_of_it(data: st.DataObject) -> None:
    name, other = data.draw(st.permutations(sorted(FIXED)))[:2]
    value, left = data.draw(st.sampled_from(FIXED[name])), data.draw(st.sampled_from(FIXED[other]))
    cluster = H100.first(4)
    wanted = [
        one
        for one in fitting(everything(), 80e9)
        if getattr(one.parallelism, name) == value and getattr(one.parallelism, other) != left
    ]
    ask = {**ASKED, "top": 1000, "devices": 4, "fix": {name: value}, "exclude": [f"{other}={left}", "cuda_graph_impl"]}
    try:
        found = hpgo.plan_llm(TINY, cluster, **ask)
    except hpgo.errors.ArgumentError:
        assert not wanted
        return
    wanted = to_choose_from(wanted, wanted, 1000)
    assert [one.step_s for one in found.estimates] == pytest.approx([one.step_s for one in wanted])


@pytest.mark.parametrize(
    ("asked", "says", "hint"),
    [
        ({"framework": "megatorn"}, "there is no framework `megatorn`", "did you mean `megatron`?"),
        (
            {"framework": "foo"},
            "there is no framework `foo`",
            "known: megatron, megatron-bridge, torchtitan, deepspeed",
        ),
        ({"framework": 3}, "there is no framework 3", "known: megatron, megatron-bridge, torchtitan, deepspeed"),
        ({"framework": "torch"}, "LLM plans are not supported for PyTorch", "megatron"),
        ({"framework": "vllm"}, "LLM plans are not supported for vLLM", "megatron"),
        ({"fix": {"tpp": 2}}, "there is no degree `tpp`", "did you mean `tp`?"),
        ({"fix": {"tp": 0}}, "tp is 0", ""),
        ({"fix": {"zero_stage": 4}}, "zero_stage is 4", ""),
        ({"fix": {"recompute": "some"}}, "recompute is `some`", "selective"),
        ({"fix": {"recompute": "selective"}, "framework": "deepspeed"},
        "flash attention, which saves no scores", "use none"),
        ({"fix": {"tp": 3}}, "tp 3 does not divide the 8 GPUs of a node", "fix `tp=2` or `tp=4`"),
        ({"fix": {"tp": 16}}, "tp 16 does not divide the 8 GPUs of a node", "fix `tp=4`"),
        ({"fix": {"tp": 8}}, "tp is 8, but it must divide the 4 KV heads", "fix `tp=4`"),
        ({"fix": {"pp": 5}}, "pp 5 does not divide the 4 layers", "fix `pp=4`"),
        ({"fix": {"cp": 3}}, "cp 3 with tp 1 does not divide sequences of 512", "fix `cp=2` or `cp=4`"),
        ({"fix": {"pp": 3}}, "pp 3 is 3 GPUs, which does not divide 8", "fix `pp=2` or `pp=4`"),
        ({"fix": {"tp": 4, "dp": 4}}, "dp 4 does not divide 2 GPUs", "2"),
        ({"fix": {"micro_batch_size": 3}}, "global_batch_size is 8, but it must be a multiple", "size=2` or `"),
        ({"fix": {"vpp": 2, "pp": 1}}, "vpp 2 needs a pipeline", "fix `pp=2`"),
        ({"fix": {"zero_stage": 2}}, "Megatron-LM does not support zero-stage 2", "1"),
        ({"fix": {"zero_stage": 1}, "framework": "torchtitan"},
        "torchtitan does not support zero-stage 1", "2"),
        ({"fix": {"tp": 2, "pp": 2}, "framework": "deepspeed"}, "DeepSpeed runs no pipeline beside tp", "megatron"),
        ({"fix": {"vpp": 2}, "framework": "deepspeed"}, "DeepSpeed supports one stage per pipeline rank", "megatron"),
        ({"precision": "fp8", "framework": "torchtitan"}, "supports precision bf16 here, not fp8", "megatron"),
        ({"fix": {"tp": 2}, "exclude": ["tp"]}, "tp is fixed to 2, but that value is also excluded",
         "remove tp from `fix` or from `exclude`"),
        ({"exclude": ["micro_batch_size"]}, "micro-batch-size can't be excluded as a whole", "micro-batch-size=1"),
        ({"exclude": "cp"}, "`exclude` is `cp`", "cp"),
        ({"fix": [("tp", 2)]}, "fix is a list", "mapping"),
        ({"exclude": ["tp", "cp", "pp", "dp"], "devices": 8}, "no configuration divides `tiny`", "leave cp or dp open"),
    ],
)  # fmt: skip
def test_what_leaves_nothing_is_refused_with_the_nearest_that_would_do(
    asked: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.plan_llm(TINY, H100, **ASKED, **asked)
    assert says in caught.value.message
    assert caught.value.hint
    assert hint in caught.value.hint


# --- Nothing fits -----------------------------------------------------------------------------------------------------


def shortage(**asked: Any) -> hpgo.errors.InfeasibleError:
    with pytest.raises(
        hpgo.errors.InfeasibleError,
        match=r"no configuration fits in memory: the smallest \(.*\) needs .* per GPU, but a GPU has",
    ) as caught:
        hpgo.plan_llm(**{"global_batch_size": 8, "seq_length": 8192, **asked})
    return caught.value


def test_less_reserved_memory_is_the_first_that_helps() -> None:
    error = shortage(transformer="llama-3-8b", cluster=H100, reserved_bytes=79e9)
    assert error.hint.startswith("reserve at most ")
    assert error.hint.endswith(" GB per GPU")
    left_gb = float(error.hint.split()[3])
    hpgo.plan_llm("llama-3-8b", H100, global_batch_size=8, seq_length=8192, reserved_bytes=(left_gb - 0.01) * 1e9)


def test_then_what_was_fixed_or_excluded() -> None:
    fixed = shortage(transformer="llama-3-8b", cluster=H100, fix={"zero_stage": 0, "tp": 1, "pp": 1, "cp": 1})
    assert fixed.hint == "remove `--fix` of zero-stage: then a configuration fits"
    left = shortage(transformer="llama-3-8b", cluster=H100, exclude=["tp", "pp", "zero_stage"])
    assert left.hint == "remove `--exclude` of tp: then a configuration fits"


def test_then_more_machines_which_are_enough_in_fact() -> None:
    kept = {"exclude": ["optimizer_offload_fraction"]}
    error = shortage(transformer="llama-3-70b", cluster=H100, **kept)
    count = int(error.hint.split()[3])
    assert "use at least" in error.hint
    larger = hpgo.Cluster.preset(f"h100:{count // 8}")
    assert hpgo.plan_llm("llama-3-70b", larger, global_batch_size=8, seq_length=8192, top=1, **kept).best.fits
    smaller = hpgo.Cluster.preset(f"h100:{count // 16}")
    with pytest.raises(hpgo.errors.InfeasibleError):
        hpgo.plan_llm("llama-3-70b", smaller, global_batch_size=8, seq_length=8192, **kept)


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_holds_the_search_to_its_options_and_writes_the_way(run, tmp_path) -> None:
    done = run(
        "llm", "plan", "llama-3-8b", "-c", "h100:1", "--tokens-per-batch", 131072, "--seq-length", 8192,
        "--framework", "torchtitan",
        "--fix", "tp=2,pp=2", "--exclude", "cp", "--reserve-memory", "6GB", "--top", 3, "-o", "llm-plan.json",
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    assert "of all that torchtitan 0.3 runs with tp 2 and pp 2, without cp" in said
    plan = hpgo.LlmPlan.read(tmp_path / "llm-plan.json")
    assert (plan.estimate.global_batch_size, plan.framework) == (16, "torchtitan@0.3")
    assert (plan.estimate.parallelism.tp, plan.estimate.parallelism.pp, plan.estimate.parallelism.cp) == (2, 2, 1)
    assert max(stage.peak_bytes for stage in plan.estimate.stages) <= 74e9


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--tokens-per-batch", "10000"], 1, "use --tokens-per-batch 8192 or 16384"),
        (["--tokens-per-batch", "8192", "-b", "1"], 2, "give one of --global-batch-size and --tokens-per-batch"),
        ([], 2, "Missing option '-b'"),
        (["-b", "8", "--fix", "tp"], 2, "--fix takes NAME=VALUE"),
        (["-b", "8", "--fix", "tp=2", "--fix", "tp=4"], 2, "--fix names tp twice"),
        (["-b", "8", "--framework", "megatorn"], 1, "did you mean `megatron`?"),
        (["-b", "8", "--fix", "tp=3"], 1, "fix `tp=2` or `tp=4`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, words: list[str], code: int, says: str) -> None:
    done = run("llm", "plan", "llama-3-8b", "-c", "h100:1", "--seq-length", 8192, *words, code=code)
    assert says in done.stderr
    assert done.stdout == ""
