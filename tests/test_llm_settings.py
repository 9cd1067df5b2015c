"""Settings of public recipes: their effect on time and memory, their files, and what frameworks refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
from test_export import assigned, main

import hpgo
from hpgo import export
from hpgo.errors import ArgumentError
from hpgo.llm.comparison import changed, differences, read_changes
from hpgo.llm.parallelism import RecomputedModule
from hpgo.llm.pipeline_layout import layout_text, parse_layout
from hpgo.llm.recompute import MODULES
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from pathlib import Path

H100 = hpgo.Cluster.preset("h100:8")
SMALL = {"global_batch_size": 64, "seq_length": 512}
GRAPHS = ("local", "transformer_engine", "full_iteration")


def estimate(name: str = "llama-3-8b", **asked: Any) -> hpgo.LlmEstimate:
    return hpgo.estimate_llm(name, H100, **{**SMALL, **asked})


def column(one: hpgo.LlmEstimate, key: str) -> float:
    return max(dict(stage.memory_bytes)[key] for stage in one.stages)


def plan_of(tmp_path: Path, name: str = "llama-3-8b", **asked: Any) -> hpgo.LlmPlan:
    """Return a plan that was written and read again."""
    made = hpgo.LlmPlan.of(estimate(name, **asked), name, H100)
    made.save(tmp_path / "llm-plan.json")
    read = hpgo.LlmPlan.read(tmp_path / "llm-plan.json")
    assert read == made
    return read


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 4}, {"pp": 4, "vpp": 2, "tp": 4}])
def test_graphs_replay_launches_and_never_lengthen_a_step(degrees: dict[str, int]) -> None:
    off, attention, layer, step = (
        estimate(**degrees, **asked)
        for asked in (
            {},
            {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
            {"cuda_graph_impl": "local"},
            {"cuda_graph_impl": "full_iteration"},
        )
    )
    assert dict(off.time_by_term_s)["launch_overhead"] > 0
    assert "launch_overhead" not in dict(step.time_by_term_s)
    assert off.step_s > attention.step_s >= layer.step_s >= step.step_s
    assert off.unvalidated_features == ()
    assert step.unvalidated_features == ("CUDA graphs",)


def test_graphs_change_nothing_where_work_hides_all_launches() -> None:
    asked = {"seq_length": 8192, "global_batch_size": 128, "micro_batch_size": 2}
    off, on = (estimate(**asked, cuda_graph_impl=impl) for impl in ("none", "local"))
    assert "launch_overhead" not in dict(off.time_by_term_s)
    assert on.time_by_term_s == off.time_by_term_s


def test_graphs_of_transformer_engine_copy_an_input_for_each_layer_and_micro_batch_in_flight() -> None:
    """Rank 0 of 4 has 8 layers with 4 micro-batches in flight: 32 inputs of 512 × 4,096 values, and two gradients."""
    one = estimate(pp=4, cuda_graph_impl="transformer_engine")
    assert column(one, "cuda_graph_buffers") == (8 * 4 + 2) * 2 * 512 * 4096
    halved = estimate(pp=4, tp=2, cuda_graph_impl="transformer_engine", cuda_graph_modules=["mlp"])
    assert column(halved, "cuda_graph_buffers") == (8 * 4 + 2) * 2 * 512 * 4096 / 2
    for impl in ("none", "local", "full_iteration"):
        assert column(estimate(pp=4, cuda_graph_impl=impl), "cuda_graph_buffers") == 0


def test_the_optimizer_step_can_not_use_the_pools_of_graphs() -> None:
    asked = {"seq_length": 4096, "grad_reduce_in_bf16": True, "devices": 8}
    off, layers, step = (estimate(**asked, cuda_graph_impl=impl) for impl in ("none", "local", "full_iteration"))
    made = 4 * 8_030_261_248 / 8  # gradients in 32 bits, of an eighth of the parameters
    assert column(off, "optimizer_workspace") == 0
    assert column(layers, "optimizer_workspace") == pytest.approx(made - column(layers, "logits"))
    assert column(step, "optimizer_workspace") == pytest.approx(made)
    assert step.stages[0].allocator_cached_bytes == 0


def test_experts_stay_outside_of_graphs() -> None:
    asked: dict[str, Any] = {"ep": 8, "name": "qwen3-30b-a3b"}
    times = [
        estimate(**asked, cuda_graph_impl="transformer_engine", cuda_graph_modules=modules).step_s
        for modules in (["attn"], ["attn", "moe_router"], ["attn", "moe_router", "moe_preprocess"])
    ]
    assert [estimate(**asked).step_s, *times] == sorted([estimate(**asked).step_s, *times], reverse=True)
    assert len(set(times)) == 3
    assert dict(estimate(**asked, cuda_graph_impl="local", cuda_graph_modules=["attn"]).time_by_term_s)[
        "launch_overhead"
    ]


@pytest.mark.parametrize(
    ("name", "asked", "error", "hint"),
    [
        ("llama-3-8b", {"cuda_graph_modules": ["attn"]}, "cuda_graph_impl is none", "transformer_engine"),
        ("llama-3-8b", {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]}, "needs experts", "leave"),
        ("llama-3-8b", {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "attn"]}, "once", "remove"),
        ("llama-3-8b", {"cuda_graph_impl": "local", "recompute": "full"}, "exclude full recomp", "full_iteration"),
        ("llama-3-8b", {"cuda_graph_impl": "local", "cpu_offload_num_layers": 2}, "exclude offloading", "=0"),
        ("llama-3-8b", {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["mlp"]}, "only graphs of", "leave"),
        ("llama-3-8b", {"cuda_graph_impl": "local", "pp": 2, "vpp": 2, "pp_schedule": "zb_v"}, "exclude split", "1f1b"),
        ("mixtral-8x7b", {"cuda_graph_impl": "full_iteration"}, "other numbers of tokens", "moe_router"),
        ("mixtral-8x7b", {"cuda_graph_impl": "local", "cuda_graph_modules": ["mlp"]}, "without experts", "moe_router"),
        ("mixtral-8x7b", {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_preprocess"]}, "needs moe_r", "add"),
        (
            "mixtral-8x7b",
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"], "recompute": "selective",
             "recompute_modules": ["moe"]},
            "exclude recomputation of moe", "local",
        ),
    ],
)  # fmt: skip
def test_graphs_that_megatron_refuses_are_refused(name: str, asked: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(ArgumentError, match=error) as caught:
        estimate(name, **asked)
    assert hint in caught.value.hint


def test_graphs_are_exported_to_megatron(tmp_path: Path) -> None:
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]}
    lines = main(plan_of(tmp_path, "qwen3-30b-a3b", ep=8, devices=16, **graphs), "megatron").splitlines()
    assert {"--cuda-graph-impl transformer_engine", "--cuda-graph-scope attn moe_preprocess moe_router"} <= {*lines}
    lines = main(plan_of(tmp_path, tp=2, cuda_graph_impl="local"), "megatron").splitlines()
    assert "--cuda-graph-impl local" in lines
    assert not any("cuda-graph-scope" in line for line in lines)
    whole = main(plan_of(tmp_path, tp=2, cuda_graph_impl="full_iteration"), "megatron").splitlines()
    wanted = {"--cuda-graph-impl local", "--cuda-graph-scope full_iteration", "--no-check-for-nan-in-loss-and-grad"}
    assert wanted <= {*whole}


def test_torchtitan_captures_the_graphs_of_the_plan_and_no_others(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"zero_stage": 3, "dtensor": True, "devices": 16}
    whole = plan_of(tmp_path, **asked, cuda_graph_impl="full_iteration")
    assert assigned(main(whole, "torchtitan"))["training.disable_cuda_graphs"] is False
    none = main(plan_of(tmp_path, **asked), "torchtitan")
    assert assigned(none)["training.disable_cuda_graphs"] is True
    assert "--fix cuda_graph_impl=full_iteration" in none
    with pytest.raises(ArgumentError, match="supports CUDA graphs none here, not full_iteration"):
        export.files(whole, "torchtitan@0.2")
    piped = {"zero_stage": 2, "pp": 2, "overlap_dp_comm": False, "cuda_graph_impl": "full_iteration"}
    with pytest.raises(ArgumentError, match="does not support CUDA graphs with a pipeline"):
        export.files(plan_of(tmp_path, **asked | piped), "torchtitan")
    with pytest.raises(ArgumentError, match="supports CUDA graphs none here, not local"):
        export.files(plan_of(tmp_path, cuda_graph_impl="local"), "deepspeed")


# --- Optimizer state --------------------------------------------------------------------------------------------------

LLAMA_3_8B = 8_030_261_248


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        # weights, gradients; then, sharded over 8: the copy of the weights and both moments
        ({}, 2 + 4 + (4 + 4 + 4) / 8),
        ({"exp_avg_dtype": "bf16"}, 2 + 4 + (4 + 2 + 4) / 8),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 2 + 4 + (4 + 1 + 2) / 8),
        ({"adam_moments_in_bf16": True, "main_params_dtype": "fp16"}, 2 + 4 + (2 + 2 + 2) / 8),
        ({"adam_moments_in_bf16": True, "grad_reduce_in_bf16": True}, 2 + 2 + (4 + 2 + 2) / 8),
        # bf16_master_weights_and_grads and bf16_optimizer_states of DeepSpeed
        (
            {"adam_moments_in_bf16": True, "grad_reduce_in_bf16": True, "main_params_dtype": "bf16"},
            2 + 2 + (2 + 2 + 2) / 8,
        ),
        # training.dtype of torchtitan: one 16-bit weight, with FSDP a shard beside the gathered weights
        ({"adam_moments_in_bf16": True, "main_params_dtype": "none"}, 2 + 2 + (0 + 2 + 2) / 8),
        (
            {"adam_moments_in_bf16": True, "main_params_dtype": "none", "dtensor": True, "zero_stage": 2},
            2 + (2 + 2 + 2 + 2) / 8,
        ),
    ],
)
def test_bytes_of_a_parameter_are_those_of_its_formats(asked: dict[str, Any], each: float) -> None:
    one = estimate(devices=8, **asked)
    held = sum(column(one, key) for key in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx(each * LLAMA_3_8B)


def test_fsdp_in_bf16_keeps_eight_bytes_of_a_shard() -> None:
    asked: dict[str, Any] = {"devices": 8, "zero_stage": 3, "dtensor": True, "adam_moments_in_bf16": True}
    one = estimate(**asked, main_params_dtype="none")
    words = 2 * 2 * 128_256 * 4096  # two gathered embeddings, which are larger than layers
    held = sum(column(one, key) for key in ("weights", "gradients", "optimizer"))
    assert held == pytest.approx((2 + 2 + 2 + 2) * LLAMA_3_8B / 8 + words)


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        ({}, 0), ({"adam_moments_in_bf16": True}, 0), ({"exp_avg_dtype": "bf16"}, 4),
        ({"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"}, 12),
        ({"exp_avg_dtype": "fp8", "grad_reduce_in_bf16": True}, 8),
        ({"adam_moments_in_bf16": True, "main_params_dtype": "bf16", "grad_reduce_in_bf16": True}, 0),
    ],
)  # fmt: skip
def test_narrow_state_is_widened_in_the_step_of_the_optimizer(asked: dict[str, Any], each: int) -> None:
    one = estimate(devices=8, **asked)
    used = column(one, "optimizer_workspace") + one.stages[0].allocator_cached_bytes
    assert used == pytest.approx(each * LLAMA_3_8B / 8)


def test_narrow_state_shortens_the_step_of_the_optimizer() -> None:
    """Of 30 bytes, moments in bf16 leave 22, with an fp16 copy of the weights 18, all in bf16 16, without a copy 14."""
    moments: dict[str, Any] = {"devices": 8, "adam_moments_in_bf16": True}
    copies: dict[int, dict[str, Any]] = {
        22: {}, 18: {"main_params_dtype": "fp16"}, 14: {"main_params_dtype": "none"},
        16: {"main_params_dtype": "bf16", "grad_reduce_in_bf16": True},
    }  # fmt: skip
    whole_s = dict(estimate(devices=8).time_by_term_s)["optimizer_step"]
    for each, asked in copies.items():
        found_s = dict(estimate(**moments, **asked).time_by_term_s)["optimizer_step"]
        assert found_s == pytest.approx(whole_s * each / 30)


def test_optimizer_state_is_exported_or_refused(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"tp": 2, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"}
    lines = main(plan_of(tmp_path, **asked, grad_reduce_in_bf16=True), "megatron").splitlines()
    assert {
        "--use-precision-aware-optimizer", "--exp-avg-dtype fp8", "--exp-avg-sq-dtype fp16", "--main-params-dtype fp16",
        "--main-grads-dtype bf16",
    } <= {*lines}  # fmt: skip
    asked = {"devices": 8, "adam_moments_in_bf16": True}
    pure = plan_of(tmp_path, **asked, dtensor=True, zero_stage=3, main_params_dtype="none")
    assert assigned(main(pure, "torchtitan"))["training.dtype"] == "bfloat16"
    assert 'dtype = "bfloat16"\n' in main(pure, "torchtitan@0.2")
    narrow = plan_of(tmp_path, **asked, zero_stage=2, main_params_dtype="bf16", grad_reduce_in_bf16=True)
    assert assigned(main(narrow, "deepspeed"))["CONFIG"]["bf16"] == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    for plan, target in ((pure, "deepspeed"), (narrow, "torchtitan"), (plan_of(tmp_path, **asked), "torchtitan")):
        with pytest.raises(ArgumentError, match="stores the optimizer state in 32 bits, or"):
            export.files(plan, target)


def test_formats_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ArgumentError, match="adam_moments_in_bf16 is on, but exp_avg_sq_dtype is fp8"):
        estimate(adam_moments_in_bf16=True, exp_avg_sq_dtype="fp8")
    with pytest.raises(ArgumentError, match="main_params_dtype is none, but precision is fp16"):
        estimate(main_params_dtype="none", precision="fp16")


def test_formats_without_a_published_step_are_marked_and_named() -> None:
    narrow = estimate(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8", main_params_dtype="fp16").parallelism
    assert "moments bf16 and fp8, optimizer weights fp16" in narrow.named()
    assert "moments bf16," in estimate(adam_moments_in_bf16=True).parallelism.named()
    assert estimate(adam_moments_in_bf16=True).unvalidated_features == ()
    assert estimate(exp_avg_dtype="bf16").unvalidated_features == ("other narrow moments",)
    assert estimate(main_params_dtype="fp16").unvalidated_features == ("optimizer weights fp16",)


# --- Recomputation by module ------------------------------------------------------------------------------------------


def test_every_module_of_megatron_is_known_and_exported(tmp_path: Path) -> None:
    """The choices of `recompute_modules` in 0.16 to 0.19, without gated delta nets."""
    modules = ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
    assert list(get_args(RecomputedModule)) == list(MODULES) == modules
    plan = plan_of(tmp_path, "deepseek-v2-lite", ep=8, devices=16, recompute="selective", recompute_modules=modules)
    assert f"--recompute-modules {' '.join(modules)}" in main(plan, "megatron").splitlines()


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_a_search_of_selective_recomputation_tries_modules_alone_and_together(name: str) -> None:
    asked: dict[str, Any] = {"global_batch_size": 32, "seq_length": 4096, "top": 1}
    fix: dict[str, Any] = {"recompute": "selective", "tp": 2, "pp": 2, "vpp": 1, "micro_batch_size": 1, "cp": 1}
    found = hpgo.plan_llm(name, H100.first(16), **asked, fix=fix)
    useful = {
        "llama-3-8b": {"mlp"},
        "qwen3-30b-a3b": {"layernorm", "moe", "moe_act"},
        "deepseek-v2-lite": {"layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"},
    }[name]
    alone = {
        module: hpgo.plan_llm(name, H100.first(16), **asked, fix={**fix, "recompute_modules": (module,)})
        for module in sorted(useful)
    }
    assert found.fastest.step_s <= min(one.fastest.step_s for one in alone.values())
    assert found.configurations >= sum(one.configurations for one in alone.values())
    chosen = found.fastest.parallelism.recompute_modules
    again = hpgo.plan_llm(name, H100.first(16), **asked, fix={**fix, "recompute_modules": chosen})
    assert again.fastest.step_s == found.fastest.step_s


def test_selective_recomputation_leaves_out_modules_around_graphs() -> None:
    asked: dict[str, Any] = {"global_batch_size": 32, "seq_length": 4096, "top": 1000}
    fix = {
        "recompute": "selective", "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn+moe_router",
        "tp": 1, "pp": 1, "micro_batch_size": 1,
    }  # fmt: skip
    found = hpgo.plan_llm("qwen3-30b-a3b", H100.first(16), **asked, fix=fix).estimates
    assert not any("moe" in one.parallelism.recompute_modules for one in found)
    assert any("moe_act" in one.parallelism.recompute_modules for one in found)


# --- Pipeline layouts -------------------------------------------------------------------------------------------------

DEEPSEEK = {
    further: replace(TRANSFORMERS["deepseek-v3"], further_tokens=further, name=f"deepseek-{further}")
    for further in (0, 1)
}


@pytest.mark.parametrize(
    ("text", "counts", "further"),
    [
        # recipes for DeepSeek-V3, and the example of Megatron Core's user guide, which is the second
        ("Et|(tt|)*30mL", (1, *(2,) * 30, 0), (0,) * 31 + (1,)),
        ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0), (0,) * 30 + (1, 0)),
        ("Et*4|(tttt|)*14tmL", (4, *(4,) * 14, 1), (0,) * 15 + (1,)),
        ("Et*2|(tt|)*22t|(tt|)*7mL", (2, *(2,) * 22, 1, *(2,) * 7, 0), (0,) * 31 + (1,)),
        ("Et||t|L", (1, 0, 1, 0), (0,) * 4),
        ("Ett|t|mmL", (2, 1, 0), (0, 0, 2)),
    ],
)
def test_layouts_are_read_as_megatron_reads_them(text: str, counts: tuple[int, ...], further: tuple[int, ...]) -> None:
    assert parse_layout(text) == (counts, further)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("llama-3-8b", {"pp": 4}), ("llama-3-8b", {"pp": 4, "vpp": 2, "tp": 2}), ("llama-3.1-405b", {"pp": 8, "tp": 8}),
     (0, {"pp": 8, "ep": 8}), (1, {"pp": 16, "ep": 4}), (1, {"pp": 8, "vpp": 2, "ep": 8})],
)  # fmt: skip
def test_the_layout_of_a_plan_is_the_plan(name: str | int, asked: dict[str, int]) -> None:
    model = DEEPSEEK[name] if isinstance(name, int) else TRANSFORMERS[name]
    free = hpgo.estimate_llm(model, H100, **SMALL, **asked)
    counts = hpgo.LlmPlan.of(free, model, H100).layer_counts
    laid = hpgo.estimate_llm(
        model, H100, **SMALL, **{**asked, "vpp": 1}, pipeline_layout=layout_text(counts, model.further_tokens)
    )
    assert replace(laid, parallelism=free.parallelism) == free
    assert laid.parallelism.vpp == asked.get("vpp", 1)
    numbers = hpgo.estimate_llm(model, H100, **SMALL, **asked, pipeline_layout=list(counts))
    assert numbers == laid


def test_a_layout_moves_layers_and_memory_between_ranks() -> None:
    even, odd = (estimate(pp=4, pipeline_layout=layout) for layout in ("8,8,8,8", "7,8,10,7"))
    assert [stage.layers for stage in odd.stages] == [((0, 7),), ((7, 15),), ((15, 25),), ((25, 32),)]
    assert estimate(pp=4, pipeline_layout="20,4,4,4").step_s > 1.5 * even.step_s
    for one, other, sign in zip(odd.stages, even.stages, (-1, 0, 1, -1), strict=True):
        weights = dict(one.memory_bytes)["weights"] - dict(other.memory_bytes)["weights"]
        assert (weights > 0) - (weights < 0) == sign


def test_multi_token_prediction_runs_where_the_layout_has_it() -> None:
    """Its layer and a copy of the embedding are there, but the loss is on the last stage (`GPTModel._postprocess`)."""
    model, asked = DEEPSEEK[1], {"pp": 16, "ep": 4, "global_batch_size": 64, "seq_length": 512}
    last, alone = (
        hpgo.estimate_llm(model, H100, **asked, pipeline_layout=layout)
        for layout in ("Et*3|(tt|)*29,|mL", "Et*3|(tt|)*29,m|L")
    )
    assert last.parallelism.vpp == alone.parallelism.vpp == 2
    there, ends = ([dict(one.stages[rank].memory_bytes) for one in (last, alone)] for rank in (14, 15))
    moved = there[1]["weights"] - there[0]["weights"]
    assert moved == pytest.approx(ends[0]["weights"] - ends[1]["weights"])
    # An even rank has 4 layers. The moved one has a matrix of 2h², three more norms and the embedding besides.
    layer = dict(last.stages[13].memory_bytes)["weights"] / 4
    assert moved == pytest.approx(layer + 2 * (7168 * 129_280 + 2 * 7168 * 7168 + 3 * 7168))
    assert [one["logits"] for one in ends] == [2 * 6 * 512 * 129_280] * 2
    assert [one["logits"] for one in there] == [0, 0]
    times = [[one.stages[rank].forward_s for rank in (14, 15)] for one in (last, alone)]
    assert times[1][1] < times[0][1]
    assert sum(times[1]) == pytest.approx(sum(times[0]))


@pytest.mark.parametrize(
    ("asked", "error", "hint"),
    [
        ({"pipeline_layout": "8,8,8,8"}, "pp is 1", "pp 2"),
        ({"pp": 4, "pipeline_layout": "8,8,8"}, "3 stages, but pp 4 x vpp 1 has 4", "divides 3"),
        ({"pp": 4, "vpp": 3, "pipeline_layout": "8,8,8,8"}, "4 stages, but pp 4 x vpp 3", "vpp=1"),
        ({"pp": 4, "pipeline_layout": "8,8,8,9"}, "33 t for its layers, but `llama-3-8b` has 32", "7,8,9,8"),
        ({"pp": 2, "pipeline_layout": "Et*16|t*16mL"}, "1 m for its multi-token", "Et"),
        ({"pp": 2, "pipeline_layout": "t*16|t*16L"}, "must begin with its only E", "Et"),
        ({"pp": 2, "pipeline_layout": "Et*16|xt*16L"}, "`x`, which is no layer", "E, t"),
        ({"pp": 2, "pipeline_layout": "Em|t*32L"}, "all t before m", "Et"),
        ({"pp": 3, "pipeline_layout": "Et*32|m|mL"}, "all m in one stage", "Et"),
        ({"pp": 2, "vpp": 2, "pipeline_layout": "Et*32|m||L"}, "one of the last 2 stages", "Et"),
        ({"pp": 2, "pipeline_layout": "E(t*9999|)*9999L"}, "more than 1000000", "fewer"),
        ({"pp": 2, "pipeline_layout": "E((t*2)*8|)*2L"}, "no bracket in a bracket", "Et"),
        ({"pp": 2, "pipeline_layout": [16, -16]}, "whole numbers", "Et"),
        ({"pp": 2, "pipeline_layout": "16,16", "first_rank_layers": 16}, "first_rank_layers", "leave"),
        ({"pp": 2, "pipeline_layout": "8,8,8,8", "pp_schedule": "zb_v"}, "zb_v", "1f1b"),
    ],
)
def test_layouts_that_megatron_refuses_are_refused(asked: dict[str, Any], error: str, hint: str) -> None:
    with pytest.raises(ArgumentError, match=error) as caught:
        estimate(**asked)
    assert hint in caught.value.hint


def test_layouts_are_exported_as_given(tmp_path: Path) -> None:
    text = "Et*7|t*8|(t)*9,|t*8L"
    plan = plan_of(tmp_path, tp=2, pp=4, pipeline_layout=text)
    assert f"--pipeline-model-parallel-layout '{text}'" in main(plan, "megatron").splitlines()
    assert f"pp 4 (layout {text})" in plan.estimate.parallelism.named()
    asked: dict[str, Any] = {"pp": 4, "overlap_dp_comm": False, "pipeline_layout": "7,8,9,8"}
    counts = [
        sum("layers." in name for name in part)
        for part in assigned(main(plan_of(tmp_path, **asked, zero_stage=2), "torchtitan"))["PARTS"]
    ]
    assert counts == [7, 8, 9, 8]
    assert assigned(main(plan_of(tmp_path, **asked), "deepspeed"))["PARTS"] == [0, 8, 16, 25, 34]
    empty = plan_of(tmp_path, **asked | {"pipeline_layout": "16,8,8,0"})
    assert "'Et*16|t*8|t*8|L'" in main(empty, "megatron")
    with pytest.raises(ArgumentError, match="needs a layer on each stage, not pp 4"):
        export.files(empty, "deepspeed")


def test_another_pipeline_has_no_layout() -> None:
    config = estimate(pp=4, pipeline_layout="7,8,9,8").parallelism
    assert changed(config, {"pp": 2}).pipeline_layout is None
    assert changed(config, {"tp": 2}).pipeline_layout == "Et*7|t*8|t*9|t*8L"
    assert "no layout" in differences(config, replace(config, pipeline_layout=None))


# --- Hybrid sharding --------------------------------------------------------------------------------------------------


def test_groups_of_replicas_hold_larger_shards() -> None:
    whole, hybrid = (estimate(tp=2, dp_replicate=groups) for groups in (1, 8))
    assert column(hybrid, "optimizer") == pytest.approx(8 * column(whole, "optimizer"))
    assert column(hybrid, "weights") == column(whole, "weights")
    assert hybrid.unvalidated_features == ("hybrid sharding",)
    a100 = hpgo.Cluster.preset("a100:8")
    assert hpgo.estimate_llm("llama-3-8b", a100, **SMALL, tp=2, dp_replicate=8).unvalidated_features == ()


def test_groups_of_one_gpu_gather_nothing() -> None:
    asked: dict[str, Any] = {"zero_stage": 3, "dtensor": True}
    assert column(estimate(**asked, dp_replicate=64), "weights") == 4 * LLAMA_3_8B
    assert "param_all_gather" not in dict(estimate(**asked, dp_replicate=64).time_by_term_s)


def test_shards_are_summed_over_groups_while_others_are_reduced_inside_them() -> None:
    asked: dict[str, Any] = {"seq_length": 4096, "dp_replicate": 8}
    beside, after = (dict(estimate(**asked, overlap_dp_comm=on).time_by_term_s)["grad_reduce"] for on in (True, False))
    assert beside < after


def test_groups_are_exported_or_refused(tmp_path: Path) -> None:
    lines = main(plan_of(tmp_path, tp=2, dp_replicate=8), "megatron").splitlines()
    assert {"--use-distributed-optimizer", "--num-distributed-optimizer-instances 8"} <= {*lines}
    assert "num-distributed-optimizer" not in main(plan_of(tmp_path, tp=2), "megatron")
    fsdp = plan_of(tmp_path, zero_stage=3, dtensor=True, tp=2, dp_replicate=4)
    degrees = assigned(main(fsdp, "torchtitan"))
    assert degrees["parallelism.data_parallel_replicate_degree"] == 4
    assert degrees["parallelism.data_parallel_shard_degree"] == 8
    assert "data_parallel_replicate_degree = 4" in main(fsdp, "torchtitan@0.2")
    mics = main(plan_of(tmp_path, zero_stage=3, dp_replicate=8), "deepspeed")
    assert assigned(mics)["CONFIG"]["zero_optimization"]["mics_shard_size"] == 8
    assert "MiCS_Init" in mics
    for asked, target, stages in (
        ({"zero_stage": 1}, "torchtitan", "2 or 3"), ({"zero_stage": 1}, "deepspeed", "3"),
        ({"zero_stage": 3}, "megatron", "1"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"in groups of replicas with ZeRO stage {stages}, but dp_replicate"):
            export.files(plan_of(tmp_path, **asked, dp_replicate=8), target)
    experts = plan_of(tmp_path, "qwen3-30b-a3b", ep=16, dp_replicate=8)
    with pytest.raises(ArgumentError, match="4 replicas of an expert are no 8 equal groups"):
        export.files(experts, "megatron")


@pytest.mark.parametrize(("framework", "stages"), [("megatron", {1}), ("torchtitan", {2, 3}), ("deepspeed", {3})])
def test_a_search_keeps_the_groups_that_are_fixed(framework: Any, stages: set[int]) -> None:
    asked: dict[str, Any] = {**SMALL, "framework": framework, "fix": {"dp_replicate": 4}, "top": 1000}
    found = hpgo.plan_llm("llama-3-8b", H100.first(16), **asked)
    assert {one.parallelism.dp_replicate for one in found.estimates} == {4}
    assert {one.parallelism.zero_stage for one in found.estimates} <= stages
    best = found.estimates[0]
    config = best.parallelism
    again = hpgo.llm.estimate.estimate_on(
        TRANSFORMERS["llama-3-8b"], H100.first(16), config, hpgo.llm.stack.Stack.named(best.stack), None, **SMALL
    )
    assert again == best
    assert export.files(found.plan(), framework)
    with pytest.raises(ArgumentError, match="without that stage"):
        hpgo.plan_llm("llama-3-8b", H100.first(16), **asked | {"exclude": [f"zero_stage={one}" for one in stages]})


# --- Overlap of tensor parallelism ------------------------------------------------------------------------------------


def tp_comm_s(**asked: Any) -> float:
    return dict(estimate(tp=4, seq_length=8192, **asked).time_by_term_s)["tp_comm"]


def test_overlap_hides_the_share_of_the_stack_or_that_of_published_steps() -> None:
    whole_s = tp_comm_s()
    assert tp_comm_s(tp_comm_overlap=False) == whole_s
    assert tp_comm_s(tp_comm_overlap=True) == pytest.approx(0.39 * whole_s)
    assert tp_comm_s(tp_comm_overlap=True, dtensor=True, zero_stage=3) == pytest.approx(
        0.46 * tp_comm_s(dtensor=True, zero_stage=3)
    )
    # The stack overlaps already, so that only turning it off changes the estimate.
    hopper_s = tp_comm_s(stack="te-hopper")
    assert tp_comm_s(stack="te-hopper", tp_comm_overlap=True) == hopper_s == pytest.approx(0.39 * whole_s)
    assert tp_comm_s(stack="te-hopper", tp_comm_overlap=False) == whole_s


def test_overlap_changes_nothing_where_it_can_hide_nothing() -> None:
    single, overlapped = (estimate(tp_comm_overlap=on) for on in (None, True))
    assert overlapped.time_by_term_s == single.time_by_term_s
    assert overlapped.unvalidated_features == ()
    b200 = hpgo.Cluster.preset("b200:8")
    steps = {hpgo.estimate_llm("llama-3-8b", b200, **SMALL, tp=4, tp_comm_overlap=on).step_s for on in (None, True)}
    assert len(steps) == 1
    with pytest.raises(ArgumentError, match="tp_comm_overlap is on, but it needs sequence parallelism"):
        estimate(tp=4, sequence_parallel=False, tp_comm_overlap=True)


def test_overlap_is_validated_on_devices_whose_steps_use_it() -> None:
    assert estimate(tp=4, tp_comm_overlap=True).unvalidated_features == ()
    a100 = hpgo.Cluster.preset("a100:8")
    one = hpgo.estimate_llm("llama-3-8b", a100, **SMALL, tp=4, tp_comm_overlap=True)
    assert one.unvalidated_features == ("TP overlap",)


def test_overlap_is_exported_or_refused(tmp_path: Path) -> None:
    text = main(plan_of(tmp_path, tp=4, tp_comm_overlap=True), "megatron")
    assert "--tp-comm-overlap" in text.splitlines()
    assert "--tp-comm-bootstrap-backend nccl" in text
    off = main(plan_of(tmp_path, tp=4, tp_comm_overlap=False, stack="te-hopper"), "megatron")
    assert "tp-comm-overlap" not in off
    fsdp: dict[str, Any] = {"tp": 4, "zero_stage": 3, "dtensor": True, "tp_comm_overlap": True}
    compiled = plan_of(tmp_path, **fsdp)
    assert assigned(main(compiled, "torchtitan"))["config.compile.enable_async_tensor_parallel"] is True
    assert "enable_async_tensor_parallel = true" in main(compiled, "torchtitan@0.2")
    with pytest.raises(ArgumentError, match="in compiled layers only"):
        export.files(plan_of(tmp_path, **fsdp, fused_elementwise=False), "torchtitan")
    with pytest.raises(ArgumentError, match="has no sequence parallelism"):
        export.files(plan_of(tmp_path, **fsdp), "deepspeed")


# --- Comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "text", "wanted", "words"),
    [
        ({}, "recompute_modules=mlp+core_attn", {"recompute": "selective", "recompute_modules": ("mlp", "core_attn")},
         "recompute selective, recompute_modules mlp+core_attn"),
        ({"recompute": "selective", "recompute_modules": ["mlp"]}, "recompute=none", {"recompute_modules": ()},
         "recompute none"),
        ({"recompute": "full", "recompute_every": 2}, "recompute=full", {"recompute_every": None},
         "recompute every layer"),
        ({"recompute": "full", "recompute_every": 2}, "recompute=none", {"recompute_every": None}, "recompute none"),
        ({}, "cuda_graph_impl=local,cuda_graph_modules=attn", {"cuda_graph_modules": ("attn",)},
         "cuda_graph_impl local, cuda_graph_modules attn"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, "cuda_graph_impl=full_iteration",
         {"cuda_graph_modules": ()}, "cuda_graph_impl full_iteration"),
        ({"tp": 2}, "tp_comm_overlap=yes", {"tp_comm_overlap": True}, "tp_comm_overlap"),
        ({}, "exp_avg_dtype=bf16", {"exp_avg_dtype": "bf16"}, "exp_avg_dtype bf16"),
        ({}, "dp_replicate=8", {"dp_replicate": 8}, "dp_replicate 8"),
    ],
)  # fmt: skip
def test_settings_are_compared_by_their_names(base: Any, text: str, wanted: dict[str, Any], words: str) -> None:
    config = estimate(**base).parallelism
    other = changed(config, read_changes(text))
    assert {name: getattr(other, name) for name in wanted} == wanted
    assert differences(config, other) == words


# --- Settings of a search ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "fix"),
    [
        ("megatron", {"cuda_graph_impl": "transformer_engine"}),
        ("megatron", {"cuda-graph-impl": "local", "cuda_graph_modules": "attn+mlp"}),
        ("megatron", {"grad_reduce_in_bf16": "yes", "exp_avg_dtype": "bf16", "exp-avg-sq-dtype": "fp8"}),
        ("megatron", {"recompute_modules": ["mlp"]}),
        ("megatron", {"tp_comm_overlap": True}),
        ("torchtitan", {"tp_comm_overlap": False}),
        ("torchtitan", {"cuda_graph_impl": "full_iteration"}),
        ("deepspeed", {"grad_reduce_in_bf16": True}),
        ("torchtitan", {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "none"}),
        (
            "deepspeed",
            {
                "exp_avg_dtype": "bf16",
                "exp_avg_sq_dtype": "bf16",
                "main_params_dtype": "bf16",
                "grad_reduce_in_bf16": True,
            },
        ),
    ],
)
def test_a_fixed_setting_is_one_of_all_configurations(framework: Any, fix: dict[str, Any]) -> None:
    found = hpgo.plan_llm("llama-3-8b", H100.first(8), **SMALL, framework=framework, fix=fix, top=5)
    for one in found.estimates:
        for name, value in fix.items():
            wanted = {"yes": True, "attn+mlp": ("attn", "mlp")}.get(str(value), value)
            held = getattr(one.parallelism, name.replace("-", "_"))
            assert held == (tuple(wanted) if isinstance(wanted, list) else wanted)
        config = one.parallelism
        again = hpgo.estimate_llm(
            "llama-3-8b", H100.first(8), **SMALL, framework=framework,
            **{name: getattr(config, name) for name in ("tp", "cp", "pp", "vpp", "zero_stage", "micro_batch_size",
               "recompute", "recompute_modules", "recompute_num_layers", "dtensor", "cuda_graph_impl",
               "cuda_graph_modules", "overlap_dp_comm", "fused_elementwise", "flatten_gradients", "pp_schedule",
               "first_rank_layers", "last_rank_layers", "grad_reduce_in_bf16", "exp_avg_dtype",
               "exp_avg_sq_dtype", "main_params_dtype", "tp_comm_overlap")},
        )  # fmt: skip
        assert again.step_s == one.step_s
        assert again.parallelism == config
    assert found.plan().to_json()
    assert export.files(found.plan(), framework)


@pytest.mark.parametrize(
    ("fix", "error"),
    [
        ({"cuda_graph_impl": "all"}, "cuda_graph_impl is `all`"),
        ({"cuda_graph_modules": "attn+moe"}, "cuda_graph_modules is `attn\\+moe`"),
        ({"grad_reduce_in_bf16": "maybe"}, "grad_reduce_in_bf16 is `maybe`"),
        ({"cuda_graph_impl": "local", "recompute": "full"}, "exclude full recomputation"),
        ({"cuda_graph_modules": "attn"}, "only graphs of layers have modules"),
        (
            {"exp_avg_dtype": "bf16", "zero_stage": 0},
            "with ZeRO and main_params_dtype fp32 or fp16, not .* without ZeRO",
        ),
        ({"main_params_dtype": "none"}, "not exp_avg_dtype fp32, exp_avg_sq_dtype fp32 and main_params_dtype none"),
    ],
)
def test_a_setting_without_configurations_is_named(fix: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        hpgo.plan_llm("llama-3-8b", H100.first(8), **SMALL, fix=fix)


def test_an_excluded_setting_keeps_its_default() -> None:
    free = hpgo.plan_llm("llama-3-8b", H100.first(8), **SMALL)
    assert hpgo.plan_llm("llama-3-8b", H100.first(8), **SMALL, exclude=["cuda_graph_impl"]).best == free.best
    with pytest.raises(ArgumentError, match="fixed to local, but that value is also excluded"):
        hpgo.plan_llm("llama-3-8b", H100, **SMALL, fix={"cuda_graph_impl": "local"}, exclude=["cuda_graph_impl"])
