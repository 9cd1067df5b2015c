"""Experts, latent attention and windows in what a way costs: formulas, laws, searches, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from click.testing import CliRunner
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from test_grid import every_way, fitting, to_choose_from

import hpgo
from hpgo.cli.main import group
from hpgo.export.targets import Place, find
from hpgo.hardware.cluster import Link
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import StageEstimate, estimate_config, model_flop, profile_of
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.layer_time import EMBEDDING, HEAD, end_times, layer_times
from hpgo.llm.memory import expert_parameters, parameters, saved_activation_bytes, stage_memory
from hpgo.llm.parallelism import ParallelismConfig, stage_layers
from hpgo.llm.step_time import LayerCosts, PipelineStages
from hpgo.model.blocks import Latent
from hpgo.model.formats.transformers import of_document
from hpgo.model.transformer import Kind
from hpgo.model.transformer_presets import TRANSFORMERS

MIXTRAL = hpgo.Transformer(
    name="small-mixtral", layers=8, hidden=1024, heads=8, kv_heads=4, head_dim=128, ffn=0, vocab=32000, experts=8,
    experts_per_token=2, expert_ffn=3584,
)  # fmt: skip
DEEPSEEK = hpgo.Transformer(
    name="small-deepseek", layers=13, hidden=1024, heads=16, kv_heads=16, head_dim=96, ffn=4096, vocab=32000,
    latent=Latent(kv_rank=128, rope_dim=32, value_dim=64, q_rank=256), experts=16, experts_per_token=4, expert_ffn=512,
    shared_ffn=512, expert_groups=4, groups_per_token=2, dense_layers=(0, 1),
)  # fmt: skip
IDEAL = replace(
    CONSTANTS, gemm_efficiency=1.0, gemm_tile=1, gemm_overhead_s=0.0, unfused_attention_efficiency=1.0,
    attention_efficiency=1.0, attention_backward_factor=2.0, layer_launch_s=0.0,
    collective_launch_s=0.0, expert_launch_s=0.0, collective_overhead_s=0.0, nvlink_efficiency=1.0,
    nic_efficiency=1.0, all_to_all_nic_efficiency=1.0, grouped_gemm_efficiency=1.0,
    optimizer_bytes=0.0,
)  # fmt: skip
FAST = Gpus(1e12, 1e12, 1e12, 1e12, inf, 80e9, 64, 8, Link(1e18, 1e18), 1e18, 0.0)
"""A trillion operations a second, and all else at once."""
SLOW_LINKS = replace(FAST, inside=Link(1e9, 1e9), adapter_bytes_per_s=1e8)
EXPERTS = Kind(experts=True)


def context(model: hpgo.Transformer, config: ParallelismConfig, gpus: Gpus = FAST, seq: int = 2048) -> LayerContext:
    return LayerContext(model, config, gpus, IDEAL, seq)


# --- Formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
def test_operations_are_those_of_the_parameters_that_a_token_meets(model) -> None:
    """Six for each of a matrix and token, and those of attention, which is told apart from them."""
    only = PipelineStages(context(model, ParallelismConfig()), 1).stages[0]
    in_no_matrix = model.parameters_by_part()["norms"]
    if model.latent is not None:
        in_no_matrix += model.layers * (model.latent.kv_rank + model.latent.q_rank)
    asked = model_flop(model, 2048, 1) - 6 * in_no_matrix * 2048
    assert (only.forward_s + only.backward_s) * 1e12 == pytest.approx(asked)


def test_attention_of_latent_heads_has_queries_and_values_of_other_widths() -> None:
    found = layer_times(context(DEEPSEEK, ParallelismConfig()))[0].forward_s["attention"] * 1e12
    assert found == pytest.approx(2048**2 * 16 * (96 + 64))


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("expert", [2, 4, 8])
def test_rows_go_to_their_experts_and_back_in_both_passes(tensor: int, expert: int) -> None:
    config = ParallelismConfig(tp=tensor, sequence_parallel=tensor > 1, dp=8, ep=expert, micro_batch_size=2)
    times = layer_times(context(MIXTRAL, config, SLOW_LINKS).of(EXPERTS))[0]
    once_s = 2 * 2 * 2048 / tensor * 2 * 1024 * (expert - 1) / expert / 1e9
    assert times.forward_s["ep_all_to_all"] == pytest.approx(2 * once_s)
    assert times.backward_s["ep_all_to_all"] == pytest.approx(2 * once_s)


def test_a_token_goes_to_each_machine_once_and_to_no_more_than_its_groups_are_on() -> None:
    def exchange_s(**changes: object) -> float:
        one = context(
            replace(DEEPSEEK, **changes), ParallelismConfig(dp=64, ep=16), replace(SLOW_LINKS, gpus_per_node=2)
        )
        return layer_times(one.of(EXPERTS))[0].forward_s["ep_all_to_all"]

    nodes, each = 8, 2 * 1024 * 2048
    anywhere = nodes * (1 - (1 - 1 / nodes) ** 4)
    assert exchange_s(expert_groups=1, groups_per_token=1) == pytest.approx(2 * each * anywhere * 7 / 8 / 1e8)
    assert exchange_s() < exchange_s(groups_per_token=4) == exchange_s(expert_groups=1, groups_per_token=1)
    # Of eight groups, one on each machine, both of a token's are met unless its four experts are of one.
    assert exchange_s(expert_groups=8) == pytest.approx(2 * each * (2 - 2 / 2**4) * 7 / 8 / 1e8)


def test_few_rows_fill_tiles_badly() -> None:
    def experts_s(batch: int) -> float:
        one = replace(
            context(DEEPSEEK, ParallelismConfig(micro_batch_size=batch), seq=64),
            constants=replace(IDEAL, gemm_tile=128),
        )
        return layer_times(one.of(EXPERTS))[0].forward_s["experts"]

    # 64 tokens are 16 rows for each expert, of 128 that a tile has.
    assert experts_s(1) == experts_s(8)
    assert experts_s(16) == pytest.approx(2 * experts_s(8))


def test_what_a_layer_keeps_of_routed_rows_is_inputs_and_inner_values_of_each() -> None:
    for tensor in (1, 2):
        one = context(MIXTRAL, ParallelismConfig(tp=tensor, sequence_parallel=tensor > 1))
        rows = 2 * 2048 / tensor
        more = saved_activation_bytes(one.of(EXPERTS), recomputed=False) - saved_activation_bytes(
            replace(one, model=replace(MIXTRAL, ffn=0)), recomputed=False
        )
        beside = 4 * 2048 * 1024 / tensor  # the inputs of the norm and of the router
        assert more == pytest.approx(2 * rows * (1024 + 3 * 3584) + 8 * 2048 / tensor * 8 + beside)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("module", "of_dense", "of_experts"),
    [
        ("core_attn", 0, 0),
        ("layernorm", 2 * 1024, 2 * 2 * 1024),
        ("mla_up_proj", 2 * 16 * (96 + 96 + 64), 2 * 16 * (96 + 96 + 64)),
        ("mlp", 6 * 4096, 0),
        ("moe", 0, 4 * (2 * 1024 + 6 * 512) + 8 * 16 + 6 * 512),
        ("moe_act", 0, 4 * 2 * 512),
        ("shared_experts", 0, 6 * 512),
    ],
)
def test_a_recomputed_module_is_saved_in_one_layer_only(module, of_dense: int, of_experts: int, tensor: int) -> None:
    def saved(kind: Kind, modules: tuple[str, ...]) -> float:
        config = ParallelismConfig(
            tp=tensor, sequence_parallel=tensor > 1, recompute="selective", recompute_modules=modules
        )
        return saved_activation_bytes(context(DEEPSEEK, config).of(kind), recomputed=False)

    for kind, expected in ((Kind(), of_dense), (EXPERTS, of_experts)):
        assert saved(kind, ()) - saved(kind, (module,)) == pytest.approx(2048 / tensor * expected)

    def memory(modules: tuple[str, ...]) -> dict[str, float]:
        config = ParallelismConfig(
            tp=tensor, sequence_parallel=tensor > 1, recompute="selective", recompute_modules=modules
        )
        cluster = hpgo.Cluster.preset("h100:1").first(tensor)
        one = estimate_config(DEEPSEEK, cluster, config, global_batch_size=1, seq_length=2048)
        return dict(one.stages[0].memory_bytes)

    # Eleven layers have experts, two have not. The layer whose backward pass runs has its modules again.
    less = 2 * of_dense + 11 * of_experts - max(of_dense, of_experts)
    before, after = memory(()), memory((module,))
    assert before.pop("activations") - after.pop("activations") == pytest.approx(2048 / tensor * less)
    assert before == after


@pytest.mark.parametrize(("precision", "flash", "freed"), [("bf16", True, 0), ("fp8", True, 2), ("fp8", False, None)])
def test_recomputed_attention_frees_its_result_beside_a_narrow_copy(precision: Any, flash: bool, freed: Any) -> None:
    """Fused attention saves no scores, and in bf16 the GEMM after it saves the same result."""

    def saved(*modules: str) -> float:
        how: Any = {"precision": precision, "flash_attention": flash, "recompute_modules": modules}
        config = ParallelismConfig(tp=2, sequence_parallel=True, recompute="selective" if modules else "none", **how)
        return saved_activation_bytes(context(MIXTRAL, config), recomputed=False)

    less = saved() - saved("core_attn")
    assert less == pytest.approx(2048 * 1024 / 2 * freed if flash else 5 * MIXTRAL.heads * 2048**2 / 2)


def test_a_layer_that_is_recomputed_restores_its_attention_result() -> None:
    def activations(*modules: str) -> float:
        how: Any = {"recompute": "selective", "recompute_modules": modules} if modules else {}
        one = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, precision="fp8", **how)
        return dict(one.stages[0].memory_bytes)["activations"]

    # All of 32 layers free 2 bytes of each token and value, and one layer has them back.
    assert activations() - activations("core_attn") == pytest.approx(31 * 2 * 4096 * 4096)


@pytest.mark.parametrize("module", ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"])
def test_a_recomputed_module_takes_its_time_again_and_less_than_the_whole_layer(module) -> None:
    def times(kind: Kind, **how: Any) -> tuple[float, float]:
        gpus = Gpus.of(hpgo.Cluster.preset("h100:1"), "bf16")
        config = ParallelismConfig(tp=2, sequence_parallel=True, dp=4, ep=4, **how)
        kept, full = layer_times(LayerContext(DEEPSEEK, config, gpus, IDEAL, 2048, kind))
        assert kept.forward_s == full.forward_s
        return kept.total_backward_s, full.total_backward_s

    longer = []
    for kind in (Kind(), EXPERTS):
        none_s, full_s = times(kind)
        some_s, _ = times(kind, recompute="selective", recompute_modules=(module,))
        assert none_s <= some_s < full_s
        longer.append(some_s > none_s)
    only_dense, only_experts = module == "mlp", module in {"moe", "moe_act", "shared_experts"}
    assert longer == [not only_experts, not only_dense]


def test_experts_that_are_recomputed_include_their_parts() -> None:
    def memory(*modules: str) -> float:
        config = ParallelismConfig(recompute="selective", recompute_modules=modules)
        return saved_activation_bytes(context(DEEPSEEK, config).of(EXPERTS), recomputed=False)

    assert memory("moe", "moe_act", "shared_experts") == memory("moe") < memory("moe_act", "shared_experts")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"recompute": "full", "recompute_modules": ("mlp",)}, "recompute is full"),
        ({"recompute": "selective", "recompute_modules": ("mlp", "mlp")}, "each module may be listed once"),
        ({"recompute": "selective", "recompute_modules": ("mlp",), "pp": 2, "vpp": 2, "pp_schedule": "zb_v"}, "split"),
    ],
)
def test_modules_that_nobody_recomputes_are_refused_at_once(how: dict[str, Any], says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match=says):
        ParallelismConfig(**how)


@pytest.mark.parametrize(
    ("module", "needs"), [("mla_up_proj", "latent attention"), ("moe", "experts"), ("moe_act", "experts")]
)
def test_modules_that_a_model_lacks_are_refused(module: str, needs: str) -> None:
    asked = {"global_batch_size": 8, "seq_length": 4096, "recompute": "selective", "recompute_modules": [module]}
    with pytest.raises(hpgo.errors.ArgumentError, match=f"{module} needs {needs}, which `llama-3-8b` does not have"):
        hpgo.estimate_llm("llama-3-8b", "h100:1", **asked)
    assert hpgo.estimate_llm("deepseek-v2-lite", "h100:1", **asked).parallelism.recompute_modules == (module,)


def test_inputs_of_products_in_fewer_bits_are_kept_in_these() -> None:
    kept = [
        saved_activation_bytes(context(MIXTRAL, ParallelismConfig(precision=precision)).of(EXPERTS), recomputed=False)
        for precision in ("bf16", "fp8")
    ]
    # Of routed rows inputs of both products; of all tokens those of attention's, whose result is kept in both.
    assert kept[0] - kept[1] == 2 * 2048 * (1024 + 3584) + 2 * 2048 * 1024 - 2048 * 1024


@pytest.mark.parametrize("window", [256, 1024, 4096, 8192])
def test_a_window_leaves_out_the_pairs_behind_it(window: int) -> None:
    seq = 4096
    one = replace(MIXTRAL, window=window, window_layers=(1, 3))
    times = [layer_times(context(one, ParallelismConfig(), seq=seq).of(one.kind(layer)))[0] for layer in (0, 1)]
    seen = [time.forward_s["attention"] * 1e12 / (4 * 1024) for time in times]
    counted = sum(min(window, at + 0.5) for at in range(seq))
    assert seen[0] == pytest.approx(seq * seq / 2)
    assert seen[1] == pytest.approx(counted, rel=1e-3)


# --- Laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("expert", [1, 4, 8])
@pytest.mark.parametrize(
    ("model", "pipeline", "vpp"),
    [(MIXTRAL, *how) for how in ((1, 1), (2, 1), (5, 1), (4, 2))]
    + [(DEEPSEEK, *how) for how in ((1, 1), (2, 1), (5, 1), (4, 2), (7, 2))],
)
def test_parameters_of_all_gpus_are_the_models(model, tensor: int, expert: int, pipeline: int, vpp: int) -> None:
    config = ParallelismConfig(tp=tensor, sequence_parallel=tensor > 1, ep=expert, dp=8, pp=pipeline, vpp=vpp)
    stages = PipelineStages(context(model, config), pipeline)
    parts = [stages.rank_layers(at, 1) for at in range(config.num_stages)]
    experts = [expert_parameters(stages.context, part) for part in parts]
    others = [parameters(stages.context, part) - held for part, held in zip(parts, experts, strict=True)]
    assert sum(experts) * expert == pytest.approx(model.parameters_by_part()["experts"])
    whole = model.parameters_by_part()["norms"] + model.expert_layers * model.hidden * model.experts
    if (latent := model.latent) is not None:  # both vectors' matrices and norms, and the keys that carry positions
        narrow = (model.hidden + 1) * (latent.q_rank + latent.kv_rank) + model.hidden * latent.rope_dim
        whole += model.layers * narrow
    everywhere = tensor * sum(others) - (tensor - 1) * whole
    assert everywhere + sum(experts) * expert == pytest.approx(model.parameters, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
def test_memory_falls_with_the_degree_of_experts_as_the_formula_says(model, zero: int) -> None:
    def held(expert: int) -> dict[str, float]:
        one = context(model, ParallelismConfig(ep=expert, dp=8, zero_stage=zero))
        return stage_memory(one, PipelineStages(one, 1).rank_layers(0, 1))

    alone, experts = held(1), model.parameters_by_part()["experts"]
    for expert in (2, 4, 8):
        shared = held(expert)
        fewer = experts * (1 - 1 / expert)
        if zero < 3:
            assert alone["weights"] - shared["weights"] == pytest.approx(2 * fewer)
        if zero < 2:
            assert alone["gradients"] - shared["gradients"] == pytest.approx(4 * fewer)
        # What replicas share anyway, each has an eighth of, whoever holds it.
        state = alone["optimizer"] - shared["optimizer"]
        assert state == pytest.approx(0 if zero else 12 * fewer, abs=1)
        assert shared["activations"] == alone["activations"]


def test_the_first_stage_holds_the_dense_layers() -> None:
    one = estimate_config(
        DEEPSEEK,
        hpgo.Cluster.preset("h100").first(8),
        ParallelismConfig(pp=4, ep=2),
        global_batch_size=8,
        seq_length=2048,
    )
    held = [dict(stage.memory_bytes)["weights"] for stage in one.stages]
    words = 2 * DEEPSEEK.vocab * DEEPSEEK.hidden
    # Dense networks are as large as half of the experts here.
    alone = DEEPSEEK.hidden * (DEEPSEEK.experts + 3 * DEEPSEEK.shared_ffn)
    assert held[1] - (held[0] - words) == 2 * 2 * alone
    assert [stage.layers for stage in one.stages] == [((0, 4),), ((4, 8),), ((8, 12),), ((12, 13),)]


ways = st.builds(
    lambda tensor, context, expert, pipeline, vpp, data, size, recomputed, zero: ParallelismConfig(
        tp=tensor, sequence_parallel=tensor > 1, cp=context, ep=expert, pp=pipeline,
        vpp=vpp if pipeline > 1 else 1, dp=data, micro_batch_size=size, recompute=recomputed, zero_stage=zero,
    ),
    st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([1, 2]), st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.sampled_from(["none", "full"]),
    st.integers(0, 3),
)  # fmt: skip


@given(model=st.sampled_from([MIXTRAL, DEEPSEEK]), config=ways, rounds=st.integers(1, 3))
@settings(max_examples=40)
def test_no_step_is_quicker_than_its_bound_and_shares_add_up(model, config: ParallelismConfig, rounds: int) -> None:
    if stage_layers(model.layers, config.num_stages, laid_out=True) is None:
        return
    cluster = hpgo.Cluster.preset(f"h100:{-(-config.world_size // 8)}").first(config.world_size)
    batch = config.dp * config.micro_batch_size * config.pp * rounds
    one = estimate_config(model, cluster, config, global_batch_size=batch, seq_length=2048)
    assert one.parallelism == config
    assert one.bound_s <= one.step_s * (1 + 1e-9)
    assert sum(seconds for _, seconds in one.time_by_term_s) == pytest.approx(one.step_s)
    assert sum(stop - start for stage in one.stages for start, stop in stage.layers) == model.layers
    assert one.has_experts


@given(layers=st.integers(1, 200), stages=st.integers(1, 200))
def test_laid_out_stages_have_all_layers_and_one_at_most_has_none(layers: int, stages: int) -> None:
    counts = stage_layers(layers, stages, laid_out=True)
    even = stage_layers(layers, stages)
    if counts is None:
        assert even is None
    else:
        assert sum(counts) == layers
        assert len(counts) == stages
        assert even in {None, counts}
        assert counts.count(0) <= 1 or even == counts


def test_experts_among_gpus_of_one_machine_are_nearer_than_of_two() -> None:
    many = {"global_batch_size": 32, "seq_length": 4096, "ep": 8}
    near = hpgo.estimate_llm("mixtral-8x7b", hpgo.Cluster.preset("h200:2"), **many)
    apart = hpgo.estimate_llm("mixtral-8x7b", replace_nodes(4), **many)
    assert dict(near.time_by_term_s)["ep_all_to_all"] < dict(apart.time_by_term_s)["ep_all_to_all"]


def replace_nodes(count: int) -> hpgo.Cluster:
    """Sixteen H200, in machines of so many."""
    one = hpgo.Cluster.preset("h200:2")
    return replace(one, nodes=tuple(replace(one.nodes[0], count=count) for _ in range(16 // count)))


def test_layers_on_groups_that_share_experts_are_a_profile() -> None:
    cluster = hpgo.Cluster.preset("h200:2")
    one = hpgo.estimate_llm("mixtral-8x7b", cluster, global_batch_size=64, seq_length=4096, pp=2, ep=8)
    profile = profile_of(one, "mixtral-8x7b", cluster)
    assert profile.gpus_per_device == 8
    assert profile.batch_sizes == (8,)
    model = hpgo.model.transformer_presets.TRANSFORMERS["mixtral-8x7b"]
    experts = model.parameters_by_part()["experts"]
    assert profile.parameter_bytes == pytest.approx(2 * (model.parameters - experts + experts / 8))


# --- Search -----------------------------------------------------------------------------------------------------------

models = st.builds(
    lambda layers, experts, each, dense, latent, window: hpgo.Transformer(
        layers=layers, hidden=1024, heads=4, kv_heads=4, head_dim=96 if latent else 64, ffn=2048, vocab=32000,
        experts=experts, experts_per_token=each, expert_ffn=2048, dense_layers=(0,) if dense else (),
        latent=Latent(kv_rank=128, rope_dim=32, value_dim=64) if latent else None, window=window,
        window_layers=(0,) if window else (),
    ),
    st.integers(2, 7), st.sampled_from([2, 4, 6]), st.integers(1, 2), st.booleans(), st.booleans(),
    st.sampled_from([0, 256]),
)  # fmt: skip


@given(model=models, gpus=st.sampled_from([1, 2, 4]), batch=st.sampled_from([2, 4]), top=st.integers(1, 5))
@settings(max_examples=examples(20))
def test_the_choice_is_that_of_trying_every_way(model, gpus: int, batch: int, top: int) -> None:
    cluster = hpgo.Cluster.preset("h100").first(gpus)
    every = every_way(model, cluster, batch, 1024, graphs=True)
    try:
        found = hpgo.plan_llm(
            model, cluster, global_batch_size=batch, seq_length=1024, top=top, devices=gpus,
            exclude=["recompute=selective"],
        )  # fmt: skip
    except hpgo.errors.ArgumentError:
        assert not every
        return
    assert found.configurations == len(every)
    wanted = to_choose_from(fitting(every, 80e9), fitting(every, 80e9 / 1.06), top)
    assert [one.step_s for one in found.estimates] == pytest.approx([one.step_s for one in wanted])
    assert all(one.fits for one in found.estimates)


def test_deepseek_v3_on_1024_gpus_is_answered() -> None:
    found = hpgo.plan_llm(
        "deepseek-v3", hpgo.Cluster.preset("h100:128"), global_batch_size=8192, seq_length=4096, precision="fp8", top=1
    )
    assert found.best.fits
    assert found.best.parallelism.ep > 1
    assert found.best.gpus == 1024


# --- Megatron-LM ------------------------------------------------------------------------------------------------------


def arguments(model: str, cluster: hpgo.Cluster, **how: object) -> list[str]:
    """What Megatron-LM is told, word by word."""
    one = hpgo.estimate_llm(model, cluster, global_batch_size=512, seq_length=4096, **how)
    saved = hpgo.LlmPlan.of(one, model, cluster)
    assert hpgo.LlmPlan.from_json(saved.to_json()) == saved
    (text,) = find("megatron").write(saved, Place()).values()
    return shlex.split(text, comments=True)


def value(words: list[str], key: str) -> str:
    """What stands behind a key."""
    return words[words.index(f"--{key}") + 1]


def test_megatron_is_told_of_experts_latent_attention_and_stages() -> None:
    words = arguments("deepseek-v3", hpgo.Cluster.preset("b300:32"), ep=32, pp=8, vpp=2)
    told = {
        "num-experts": "256", "moe-router-topk": "8", "moe-ffn-hidden-size": "2048", "moe-router-num-groups": "8",
        "moe-router-group-topk": "4", "moe-shared-expert-intermediate-size": "2048", "moe-layer-freq": "[0]*3+[1]*58",
        "expert-model-parallel-size": "32", "expert-tensor-parallel-size": "1", "q-lora-rank": "1536",
        "kv-lora-rank": "512", "qk-head-dim": "128", "qk-pos-emb-head-dim": "64", "v-head-dim": "128",
        "pipeline-model-parallel-layout": "Et*4|(t*4|)*14tL",
    }  # fmt: skip
    assert {key: value(words, key) for key in told} == told
    assert "--multi-latent-attention" in words
    assert "--group-query-attention" not in words


def test_megatron_is_told_of_experts_beside_plain_attention() -> None:
    words = arguments("mixtral-8x7b", hpgo.Cluster.preset("h200:2"), ep=8, pp=2)
    assert value(words, "num-experts") == "8"
    assert value(words, "ffn-hidden-size") == value(words, "moe-ffn-hidden-size") == "14336"
    assert value(words, "num-query-groups") == "8"
    assert not {"--moe-layer-freq", "--moe-router-num-groups", "--multi-latent-attention", "--window-size"} & set(words)


def test_megatron_is_told_of_windows() -> None:
    words = arguments("mistral-7b", hpgo.Cluster.preset("h100:1"), tp=2)
    assert value(words, "window-size") == "4095,0"
    assert "--window-attn-skip-freq" not in words


@pytest.mark.parametrize(
    ("target", "config", "says"),
    [
        (
            "torchtitan@0.2",
            {"zero_stage": 3, "micro_batch_size": 4},
            "no settings for experts, which `mixtral-8x7b` has",
        ),
        ("torchtitan", {"zero_stage": 3, "tp": 4}, "divides each expert if tp has no ep beside it, but tp is 4"),
        ("deepspeed", {"ep": 8, "zero_stage": 1}, "does not support expert parallelism here, but ep is 8"),
    ],
)
def test_experts_go_to_no_launcher_whose_settings_do_not_say_them(target: str, config, says: str) -> None:
    cluster = hpgo.Cluster.preset("h200:2")
    one = hpgo.estimate_llm("mixtral-8x7b", cluster, global_batch_size=64, seq_length=4096, recompute="full", **config)
    with pytest.raises(hpgo.errors.ArgumentError, match=says):
        find(target).write(hpgo.LlmPlan.of(one, "mixtral-8x7b", cluster), Place())


# --- Commands, and what is refused ------------------------------------------------------------------------------------

ASKED = ["mixtral-8x7b", "-c", "h200:2", "--seq-length", "4096"]


def test_reports_of_experts_say_that_nothing_certifies_them() -> None:
    done = CliRunner().invoke(group, ["llm", "estimate", *ASKED, "-b", "64", "--ep", "8", "--pp", "2"])
    assert done.exit_code == 0, done.output
    assert "ep 8, pp 2, dp 8" in done.stdout
    assert "do not meet their accuracy goal" in " ".join(done.stdout.split())
    assert "EP all-to-all" in done.stdout
    listed = CliRunner().invoke(group, ["llm", "plan", *ASKED, "--global-batch-size", "16", "--top", "2"])
    assert listed.exit_code == 0, listed.output
    assert "do not meet their accuracy goal" in " ".join(listed.stdout.split())
    dense = CliRunner().invoke(
        group, ["llm", "estimate", "llama-3-8b", "-c", "h100:1", "-b", "8", "--seq-length", "4096", "--tp", "2"]
    )
    assert "accuracy goal" not in dense.stdout
    held = json.loads(CliRunner().invoke(group, ["llm", "estimate", *ASKED, "-b", "64", "--ep", "8", "--json"]).stdout)
    assert held["has_experts"] is True
    assert held["parallelism"]["ep"] == 8


@pytest.mark.parametrize(
    ("model", "config", "says", "hint"),
    [
        ("mixtral-8x7b", {"ep": 3}, "ep is 3, but it must divide the 8 experts of", "use `ep=2` or `ep=4`"),
        ("mixtral-8x7b", {"ep": 16}, "ep is 16, but it must divide the 8 experts", "use `ep=8`"),
        ("mixtral-8x7b", {"ep": 8, "devices": 4}, "ep is 8, but it must divide the 4 GPUs", "use `ep=4`"),
        ("mixtral-8x7b", {"ep": 2, "tp": 2, "sequence_parallel": False}, "needs sequence parallelism", "tp 1"),
        ("mixtral-8x7b", {"ep": 0}, "ep is 0", "whole number"),
        ("llama-3-8b", {"ep": 2}, "ep is 2, but `llama-3-8b` has no experts", "ep=1"),
        ("deepseek-v3", {"tp": 3}, "tp is 3, but it must divide the 128", "use `tp=2` or `tp=4`"),
        ("deepseek-v3", {"pp": 16, "vpp": 3}, "pp 16 with vpp 3 does not divide the 61 layers", "use `"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused_with_the_nearest_that_do(model, config, says: str, hint: str) -> None:
    asked = {"global_batch_size": 64, "seq_length": 4096} | config
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        hpgo.estimate_llm(model, hpgo.Cluster.preset("h100"), **asked)
    assert says in caught.value.message
    assert hint in caught.value.message + caught.value.hint


# --- Configurations ---------------------------------------------------------------------------------------------------

COMMON = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    "intermediate_size": 160,
}  # fmt: skip
# Matrices of a layer's attention, of heads 16 wide; of an embedding and a head; and norms.
ATTENTION, WORDS, NORMS = 64 * (64 + 2 * 32) + 64 * 64, 2 * 500 * 64, 9 * 64


@pytest.mark.parametrize(
    ("document", "parameters", "says"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
            4 * (ATTENTION + 4 * 64 + 4 * 3 * 64 * 160) + WORDS + NORMS,
            {"experts": 4, "experts_per_token": 2, "expert_ffn": 160, "ffn": 0, "window": 32},
        ),
        (
            {
                "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2,
            },
            4 * (ATTENTION + 128) + 2 * 3 * 64 * 160 + 2 * (6 * 64 + 6 * 3 * 64 * 48 + 3 * 64 * 80 + 64) + WORDS
            + NORMS,
            {"dense_layers": (0, 2), "shared_ffn": 80, "shared_gate": True},
        ),
        (
            {
                "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                "mlp_only_layers": [1], "head_dim": 16,
            },
            4 * (ATTENTION + 2 * 16) + 3 * 64 * 160 + 3 * (6 * 64 + 6 * 3 * 64 * 48) + WORDS + NORMS,
            {"dense_layers": (1,), "head_norms": True},
        ),
        (
            {
                "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 4,
                "topk_group": 2, "num_nextn_predict_layers": 1,
            },
            4 * (65 * 24 + 24 * 64 + 64 * (20 + 4) + 20 + 20 * 4 * (12 + 8) + 4 * 8 * 64) + 3 * 64 * 160
            + 3 * (8 * 64 + 8 * 3 * 64 * 48 + 3 * 64 * 96) + WORDS + NORMS,
            {"expert_groups": 4, "groups_per_token": 2, "shared_ffn": 96, "latent": Latent(20, 4, 8, 24)},
        ),
        (
            {
                "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                "topk_method": "greedy", "n_shared_experts": 0,
            },
            4 * (64 * 64 + 64 * (20 + 4) + 20 + 20 * 4 * (12 + 8) + 4 * 8 * 64) + 3 * 64 * 160
            + 3 * (8 * 64 + 8 * 3 * 64 * 48) + WORDS + NORMS,
            {"expert_groups": 1, "groups_per_token": 1, "dense_layers": (0,)},
        ),
        (
            {"model_type": "mistral", "sliding_window": 128},
            4 * (ATTENTION + 3 * 64 * 160) + WORDS + NORMS,
            {"window": 128, "window_layers": (0, 1, 2, 3)},
        ),
        (
            {"model_type": "gemma2", "sliding_window": 128, "head_dim": 16},
            4 * (ATTENTION + 3 * 64 * 160) + WORDS // 2 + 17 * 64,
            {"window": 128, "window_layers": (0, 2), "norms_per_layer": 4},
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 16},
            4 * (ATTENTION + 2 * 16 + 3 * 64 * 160) + WORDS // 2 + 17 * 64,
            {"window": 128, "window_layers": (0, 2), "head_norms": True},
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) and "model_type" in value else "",
)  # fmt: skip
def test_configurations_are_read_to_the_last_parameter(document, parameters: int, says) -> None:
    model = of_document(COMMON | document)
    assert model.parameters == parameters
    assert {name: getattr(model, name) for name in says} == says
    one = hpgo.estimate_llm(model, hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=512)
    assert one.has_experts == (model.experts > 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"num_experts_per_tok": 9}, "a token goes to 9"),
        ({"kv_lora_rank": None}, "`kv_lora_rank` must be a whole number from 1"),
        ({"expert_choice": 2}, "`expert_choice` of a model of type `deepseek_v3` is unknown"),
    ],
)
def test_configurations_of_experts_that_make_no_model_are_refused(change, says: str) -> None:
    held = COMMON | {
        "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    } | change  # fmt: skip
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        of_document({key: value for key, value in held.items() if value is not ...})
    assert says in caught.value.message


# --- Layers that predict further tokens -------------------------------------------------------------------------------

FURTHER = replace(DEEPSEEK, further_tokens=1, name="small-further")


def test_deepseek_v3_has_as_many_parameters_as_published_with_and_without_further_tokens() -> None:
    """671 billion, and with a layer for a further token, whose embedding and head are copies there, 685."""
    preset = TRANSFORMERS["deepseek-v3"]
    model = replace(preset, further_tokens=1)
    assert model.parameters == preset.parameters == pytest.approx(671e9, rel=1e-3)
    assert model.parameters + model.further_parameters + 2 * model.vocab * model.hidden == pytest.approx(
        685e9, rel=1e-3
    )


def test_a_config_says_how_many_further_tokens() -> None:
    held = {
        "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "kv_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    }  # fmt: skip
    assert of_document(held).further_tokens == 1, "the default of its class"
    assert of_document(held | {"num_nextn_predict_layers": 0}).further_tokens == 0
    assert of_document(held | {"num_nextn_predict_layers": 2}).further_tokens == 2


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_layer_for_a_further_token_is_the_last_one_with_a_matrix_and_an_embedding_more(tensor: int) -> None:
    one = context(FURTHER, ParallelismConfig(tp=tensor, sequence_parallel=tensor > 1))
    last, further = (layer_times(one.of(kind))[0] for kind in (FURTHER.kind(12), FURTHER.further_kind))
    head, embedding = (end_times(one, terms) for terms in (HEAD, EMBEDDING))
    joining_s = 2 * one.tokens * FURTHER.joining_parameters / tensor / 1e12
    assert further.total_forward_s - last.total_forward_s == pytest.approx(joining_s + embedding.total_forward_s)
    assert further.total_backward_s - last.total_backward_s == pytest.approx(2 * joining_s + embedding.total_backward_s)
    assert further.weight_grad_s - last.weight_grad_s == pytest.approx(joining_s + embedding.weight_grad_s)
    # Its LM head runs after the other one.
    assert LayerCosts.from_context(one).head == head.times(2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [1, 4])
def test_parameters_of_all_gpus_are_those_of_further_tokens_too(pipeline: int, tied: bool) -> None:
    model = replace(FURTHER, tied=tied)
    stages = PipelineStages(context(model, ParallelismConfig(pp=pipeline)), pipeline)
    held = sum(parameters(stages.context, stages.rank_layers(at, 1)) for at in range(pipeline))
    copies = model.vocab * model.hidden if pipeline > 1 else 0  # the last stage has the embedding, too
    assert held == model.parameters + model.further_parameters + copies


def test_further_tokens_are_on_the_last_stage_and_computed_anew_with_all_layers_alone() -> None:
    def last(model: hpgo.Transformer, **how: object) -> StageEstimate:
        on = hpgo.Cluster.preset("h100:1")
        return hpgo.estimate_llm(
            model, on, global_batch_size=16, seq_length=4096, pp=2, first_rank_layers=7, **how
        ).stages[1]

    without, beside = last(DEEPSEEK), last(FURTHER)
    assert beside.layers == without.layers
    assert beside.forward_s > without.forward_s
    assert dict(beside.memory_bytes)["logits"] == 2 * dict(without.memory_bytes)["logits"]
    more = []
    for how in ({}, {"recompute": "full", "recompute_num_layers": 6}, {"recompute": "full"}):
        kept = [dict(last(model, **how).memory_bytes)["activations"] for model in (FURTHER, DEEPSEEK)]
        more.append(kept[0] - kept[1])
    assert more[0] == pytest.approx(more[1])
    assert more[2] < more[0]


def test_megatron_is_told_of_further_tokens_and_others_refuse_them() -> None:
    on = hpgo.Cluster.preset("h100:1")
    one = hpgo.estimate_llm(FURTHER, on, global_batch_size=16, seq_length=4096, pp=2, ep=2, first_rank_layers=8)
    plan = hpgo.LlmPlan.of(one, FURTHER, on)
    assert hpgo.LlmPlan.from_json(plan.to_json()) == plan
    words = shlex.split(hpgo.export.files(plan, "megatron")["arguments.txt"], comments=True)
    assert words[words.index("--mtp-num-layers") + 1] == "1"
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*8|t*5mL"
    ask = {"global_batch_size": 16, "seq_length": 4096}
    for framework in ("torchtitan", "deepspeed"):
        with pytest.raises(hpgo.errors.ArgumentError, match="does not support multi-token prediction, but") as caught:
            hpgo.plan_llm(FURTHER, on, **ask, framework=framework)
        assert "num_nextn_predict_layers" in caught.value.hint
    dense = hpgo.Transformer(
        name="dense", layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocab=32000, further_tokens=1
    )
    alone = hpgo.LlmPlan.of(hpgo.estimate_llm(dense, on.first(1), **ask, zero_stage=0), dense, on.first(1))
    for target in ("torchtitan", "deepspeed"):
        with refused(hpgo.errors.ArgumentError, "unsupported"):
            hpgo.export.files(alone, target)
    learned = replace(dense, positions=4096)  # Megatron-LM's validate_args knows rotary positions and none
    with pytest.raises(
        hpgo.errors.ArgumentError, match="does not support multi-token prediction with learned positions"
    ) as caught:
        hpgo.plan_llm(learned, on, **ask)
    assert "to 0" in caught.value.hint


def test_layers_for_further_tokens_are_in_a_profile_of_groups() -> None:
    on = hpgo.Cluster.preset("h100:1")
    one = hpgo.estimate_llm(FURTHER, on, global_batch_size=16, seq_length=4096, pp=2, first_rank_layers=7)
    profile = profile_of(one, FURTHER, on)
    assert [row.id for row in profile.layers[-3:]] == ["layers.12", "further.0", "head"]
    each = [sum(row.forward_s[0] for row in part) for part in (profile.layers[:8], profile.layers[8:])]
    assert each == pytest.approx([stage.forward_s for stage in one.stages])
