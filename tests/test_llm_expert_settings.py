"""Settings of recipes for experts, groups of micro-batches, offloaded modules and Megatron-FSDP."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, get_args

import pytest
from test_export import main

import hpgo
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import RATES
from hpgo.llm.canonical import canonical
from hpgo.llm.comparison import changed, differences, neighbours, read_changes
from hpgo.llm.estimate import in_flight, schedule_of
from hpgo.llm.experts import NOTHING, PassTime, overlapped_exchange
from hpgo.llm.parallelism import OffloadedModule, ParallelismConfig, TokenDispatcher
from hpgo.llm.run_logs import read_log
from hpgo.llm.search_space import shown
from hpgo.model.transformer_presets import TRANSFORMERS
from hpgo.show.llm_report import lines

if TYPE_CHECKING:
    from pathlib import Path

H100 = hpgo.Cluster.preset("h100:4")
MIXTRAL, QWEN = "mixtral-8x7b", "qwen3-30b-a3b"
ASKED: dict[str, Any] = {"global_batch_size": 128, "seq_length": 4096}
OFFLOADED = get_args(OffloadedModule)


def estimate(name: str = QWEN, **asked: Any) -> hpgo.LlmEstimate:
    return hpgo.estimate_llm(name, H100, **{**ASKED, **asked})


def term(one: hpgo.LlmEstimate, key: str) -> float:
    return dict(one.time_by_term_s).get(key, 0.0)


def column(one: hpgo.LlmEstimate, key: str) -> float:
    return max(dict(stage.memory_bytes)[key] for stage in one.stages)


def plan_of(tmp_path: Path, name: str = QWEN, **asked: Any) -> hpgo.LlmPlan:
    """Return a plan that was written and read again."""
    made = hpgo.LlmPlan.of(estimate(name, **asked), name, H100)
    made.save(tmp_path / "llm-plan.json")
    read = hpgo.LlmPlan.read(tmp_path / "llm-plan.json")
    assert read == made
    return read


# --- Dispatchers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [8, 16, 32])
def test_a_dispatcher_that_sends_a_token_fewer_times_takes_less_time(ep: int) -> None:
    default, deepep, hybridep, alltoall, allgather = (
        term(estimate(ep=ep, moe_token_dispatcher=name), "ep_all_to_all")
        for name in (None, "deepep", "hybridep", "alltoall", "allgather")
    )
    assert deepep == hybridep <= default <= alltoall
    # Between nodes, NICs decide, and the default sends as much there as DeepEP.
    assert (deepep == default) == (ep > 8)
    assert (default == alltoall) == (ep == 8)
    # All tokens of 8 GPUs are fewer bytes than the 8 copies that each token of Qwen3 has.
    assert ep > 8 or allgather < alltoall * 1.2


def test_a_dispatcher_changes_the_exchange_only() -> None:
    plain = estimate(ep=16)
    for name in get_args(TokenDispatcher):
        one = estimate(ep=16, moe_token_dispatcher=name)
        assert one.stages[0].memory_bytes == plain.stages[0].memory_bytes
        # Longer passes hide more of the gradient reduction.
        other, same = (
            {key: s for key, s in each.time_by_term_s if key not in {"ep_all_to_all", "grad_reduce"}}
            for each in (one, plain)
        )
        assert other == pytest.approx(same)


@pytest.mark.parametrize(
    ("kind", "ep", "lines"),
    [
        (None, 8, ["--moe-token-dispatcher-type alltoall"]),
        ("alltoall", 16, ["--moe-token-dispatcher-type alltoall"]),
        ("allgather", 8, ["--moe-token-dispatcher-type allgather"]),
        ("deepep", 8, ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"]),
        ("hybridep", 16, ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep"]),
    ],
)
def test_a_dispatcher_is_exported(tmp_path: Path, kind: str | None, ep: int, lines: list[str]) -> None:
    text = main(plan_of(tmp_path, ep=ep, moe_token_dispatcher=kind), "megatron").splitlines()
    assert [line for line in text if line.startswith(("--moe-token", "--moe-flex"))] == lines


# --- Hidden exchange --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [{"ep": 8}, {"ep": 16, "pp": 2, "vpp": 4}, {"ep": 32}])
def test_passes_of_another_micro_batch_hide_most_of_the_exchange(degrees: dict[str, int]) -> None:
    plain, hidden, delayed = (
        estimate(**degrees, **asked)
        for asked in ({}, {"overlap_ep_comm": True}, {"overlap_ep_comm": True, "delay_wgrad_compute": True})
    )
    # Hidden transfers take 20 of 132 multiprocessors from the passes.
    assert (
        20 / 132 * term(plain, "ep_all_to_all") * 0.999 <= term(hidden, "ep_all_to_all") < term(plain, "ep_all_to_all")
    )
    assert term(delayed, "ep_all_to_all") <= term(hidden, "ep_all_to_all")
    assert delayed.step_s <= hidden.step_s < plain.step_s
    assert column(hidden, "activations") == column(plain, "activations")


def test_delayed_gradients_of_weights_hide_a_long_exchange() -> None:
    """The exchange of the backward pass starts when gradients of inputs are known, and not only after all of them."""
    passes = {key: PassTime(1.0, 2.0) for key in ("linear", "attention", "elementwise", "router")}
    passes |= dict.fromkeys(("adapters", "scans", "quantize"), NOTHING)
    passes |= {"experts": PassTime(1.0, 2.0, weight_grad_s=1.0), "ep_all_to_all": PassTime(3.0, 3.0)}

    def exposed_s(*, delayed: bool) -> float:
        config = ParallelismConfig(ep=8, dp=8, overlap_ep_comm=True, delay_wgrad_compute=delayed)
        context: Any = type("Context", (), {"config": config, "gpus": type("Gpus", (), {"processors": 1e9})})
        return overlapped_exchange(context, passes).forward_s * 2

    # One dispatch takes 1.5 s. The second one can start after 2 s of experts, or after 1.5 s, the end of the first.
    assert exposed_s(delayed=False) == pytest.approx(0.5)
    assert exposed_s(delayed=True) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"delay_wgrad_compute": True}, "overlap_ep_comm is off"),
        ({"overlap_ep_comm": True, "recompute": "full"}, "excludes full recomputation"),
        ({"overlap_ep_comm": True, "moe_token_dispatcher": "allgather"}, "excludes dispatcher allgather"),
        ({"overlap_ep_comm": True, "recompute": "selective", "recompute_modules": ["moe"]}, "recomputation of moe"),
        ({"overlap_ep_comm": True, "pp": 2, "vpp": 2, "pp_schedule": "zb_v"}, "split backward passes"),
        (
            {"overlap_ep_comm": True, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "mlp"]},
            "graphs around the exchange",
        ),
        ({"overlap_ep_comm": True, "pp": 2, "framework": "megatron"}, "only with virtual stages"),
        ({"overlap_ep_comm": True, "ep": 1, "framework": "megatron"}, "only with expert parallelism"),
    ],
)
def test_what_excludes_a_hidden_exchange_is_named(asked: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        estimate(**{"ep": 8, **asked})


# --- Expert tensor parallelism ----------------------------------------------------------------------------------------


def test_expert_tensor_parallelism_divides_experts_and_gathers_their_rows() -> None:
    whole, halves = estimate(MIXTRAL, tp=2, ep=4), estimate(MIXTRAL, tp=2, ep=4, etp=2)
    model = TRANSFORMERS[MIXTRAL]
    experts = model.layers * 2 * 3 * model.hidden * model.expert_ffn
    assert column(whole, "weights") - column(halves, "weights") == pytest.approx(2 * experts / 2)
    # ZeRO shards each expert over half as many replicas, so the sum over all GPUs stays the same.
    assert column(halves, "optimizer") == pytest.approx(column(whole, "optimizer"))
    assert term(halves, "ep_all_to_all") > term(whole, "ep_all_to_all")
    # Both GPUs save the gathered inputs of each other's rows.
    assert column(halves, "activations") > column(whole, "activations")
    assert halves.parallelism.expert_dp_size == whole.parallelism.expert_dp_size / 2


@pytest.mark.parametrize("name", [MIXTRAL, QWEN])
@pytest.mark.parametrize(("ep", "etp", "factor"), [(1, 2, 2), (1, 8, 2), (1, 8, 8), (2, 4, 2), (4, 4, 2), (2, 8, 2)])
@pytest.mark.parametrize(
    "asked",
    [{}, {"tp": 2, "zero_stage": 1}, {"pp": 2, "vpp": 2, "overlap_ep_comm": True, "zero_stage": 1}, {"tp": 2, "cp": 2}],
)
def test_whole_experts_on_as_many_gpus_are_no_slower_and_no_larger(
    name: str, ep: int, etp: int, factor: int, asked: dict[str, Any]
) -> None:
    """The search leaves out experts that are divided by a factor by which ep could be higher."""
    if ep == 1 and asked.get("overlap_ep_comm"):
        asked = {**asked, "overlap_ep_comm": False}
    one, other = (estimate(name, **asked, ep=ep * by, etp=etp // by) for by in (1, factor))
    assert other.step_s <= one.step_s * (1 + 1e-9)
    assert other.fullest.peak_bytes <= one.fullest.peak_bytes * (1 + 1e-9)


def test_the_search_divides_experts_where_each_gpu_of_a_group_has_one() -> None:
    fix: dict[str, Any] = {"tp": 2, "cp": 2, "pp": 4, "micro_batch_size": 1, "recompute": "none"}
    asked = {"global_batch_size": 128, "seq_length": 8192, "top": 1, "fix": fix}
    found = hpgo.plan_llm("mixtral-8x22b", "h100:8", **asked)
    whole = hpgo.plan_llm("mixtral-8x22b", "h100:8", **asked, exclude=["etp"])
    config = found.fastest.parallelism
    assert (config.ep, config.etp) == (8, 2)
    assert found.fastest.step_s < whole.fastest.step_s
    assert whole.fastest.parallelism.etp == 1
    assert found.configurations > whole.configurations


@pytest.mark.parametrize(
    ("name", "asked", "error"),
    [
        ("llama-3-8b", {"etp": 2}, "has no experts"),
        ("llama-3-8b", {"moe_token_dispatcher": "deepep"}, "moe_token_dispatcher is deepep, but `llama-3-8b` has no"),
        ("llama-3-8b", {"overlap_ep_comm": True}, "overlap_ep_comm is on, but `llama-3-8b` has no experts"),
        (MIXTRAL, {"etp": 3, "devices": 24, "global_batch_size": 24}, "must divide the FFN size of experts 14336"),
        (MIXTRAL, {"ep": 8, "etp": 8}, "ep 8 x etp must divide the 32 GPUs of a stage"),
        (MIXTRAL, {"etp": 2, "ep": 4, "framework": "torchtitan@0.2"}, "no settings for experts"),
        (MIXTRAL, {"etp": 2, "ep": 4, "framework": "torchtitan"}, "does not divide single experts here, but etp is 2"),
        (MIXTRAL, {"ep": 4, "lora_rank": 8, "framework": "torchtitan"}, "adapts no matrices of experts here"),
        (MIXTRAL, {"etp": 2, "framework": "deepspeed"}, "does not divide single experts here, but etp is 2"),
        (MIXTRAL, {"moe_token_dispatcher": "deepep", "framework": "deepspeed"}, "no choice of dispatchers"),
        (MIXTRAL, {"offload_modules": ["moe_act"], "framework": "deepspeed"}, "offload_modules is moe_act"),
    ],
)
def test_what_excludes_expert_tensor_parallelism_is_named(name: str, asked: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        estimate(name, **asked)


# --- Groups of micro-batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "vpp", "group", "micro_batches"), [(2, 2, 3, 6), (4, 2, 4, 8), (4, 3, 6, 12), (2, 4, 8, 16)]
)
def test_a_group_holds_as_many_micro_batches_as_its_schedule(pp: int, vpp: int, group: int, micro_batches: int) -> None:
    config = ParallelismConfig(pp=pp, vpp=vpp, micro_batch_group_size=group)
    built = schedule_of(config, micro_batches)
    for rank, actions in enumerate(built.action_lists):
        held, most = 0, 0
        for action in actions:
            held += 1 if "F" in action else -1
            most = max(most, held)
        assert sum(in_flight(config, rank, micro_batches)) == most


def test_larger_groups_hold_more_and_never_take_longer_than_their_pipeline() -> None:
    asked = {"pp": 4, "vpp": 4, "ep": 4}
    plain, same, larger = (estimate(**asked, micro_batch_group_size=size) for size in (None, 4, 8))
    assert same.step_s == plain.step_s
    assert same.stages == plain.stages
    assert column(larger, "activations") > column(plain, "activations")
    assert canonical(same.parallelism, TRANSFORMERS[QWEN]) == canonical(plain.parallelism, TRANSFORMERS[QWEN])


def test_groups_allow_micro_batches_that_are_no_multiple_of_the_pipeline() -> None:
    asked = {"pp": 4, "vpp": 4, "ep": 4, "global_batch_size": 80}
    with pytest.raises(ArgumentError, match="a multiple of pp 4"):
        estimate(**asked)
    assert estimate(**asked, micro_batch_group_size=5).micro_batches == 10
    with pytest.raises(ArgumentError, match="micro_batch_group_size is 8, but of 10 micro-batches"):
        estimate(**asked, micro_batch_group_size=8)
    with pytest.raises(ArgumentError, match="no framework has groups with interleaved_zb"):
        estimate(pp=4, vpp=2, pp_schedule="interleaved_zb", micro_batch_group_size=4)
    with pytest.raises(ArgumentError, match="groups of pp micro-batches, but micro_batch_group_size is 5"):
        estimate("llama-3-8b", pp=4, vpp=2, micro_batch_group_size=5, global_batch_size=80, framework="torchtitan")


@pytest.mark.parametrize(("pp", "vpp", "group"), [(2, 2, None), (4, 2, None), (4, 3, 6), (8, 4, None), (3, 5, 4)])
@pytest.mark.parametrize("rounds", [1, 2])
def test_stages_of_one_round_reduce_their_gradients_one_after_the_other(
    pp: int, vpp: int, group: int | None, rounds: int
) -> None:
    """A stage has whole gradients from its first backward pass to its last one."""
    config = ParallelismConfig(pp=pp, vpp=vpp, micro_batch_group_size=group, zero_stage=2)
    micro_batches = rounds * (group or pp)
    most = 0
    for actions in schedule_of(config, micro_batches).action_lists:
        left: dict[str, int] = {}
        for stage in (action.split("B")[0] for action in actions if "B" in action):
            left[stage] = left.get(stage, micro_batches) - 1
            most = max(most, sum(count > 0 for count in left.values()) + (left[stage] == 0))
    assert (most == 1) is config.reduces_by_stage(micro_batches) is (rounds == 1)


def test_whole_gradients_of_one_round_are_those_of_one_stage_with_zero_2() -> None:
    asked = {"global_batch_size": 16, "seq_length": 4096, "tp": 8, "pp": 4, "vpp": 4, "recompute": "full"}
    alone = asked | {"global_batch_size": 4, "devices": 32}
    whole, one = (estimate("llama-3-70b", **alone, zero_stage=stage) for stage in (1, 2))
    assert column(one, "gradients") == column(whole, "gradients"), "without replicas nothing is sharded"
    whole, one = (hpgo.estimate_llm("llama-3-70b", "h100:8", **asked | {"zero_stage": stage}) for stage in (1, 2))
    assert (one.micro_batches, one.parallelism.dp, one.step_s) == (8, 2, whole.step_s)
    assert column(one, "gradients") == column(whole, "gradients"), "two rounds"
    asked["global_batch_size"] = 8
    whole, one = (hpgo.estimate_llm("llama-3-70b", "h100:8", **asked | {"zero_stage": stage}) for stage in (1, 2))
    # The largest stage of the first rank has the embedding. Two replicas share the gradients of the other three.
    words, layers = 4 * 128256 * 8192 / 8, column(whole, "gradients") - 4 * 128256 * 8192 / 8
    assert column(one, "gradients") == pytest.approx(layers / 4 + words + 3 / 4 * layers / 2, rel=1e-3)


def test_the_search_takes_the_smallest_group_where_the_pipeline_leaves_a_rest() -> None:
    asked = {"global_batch_size": 20, "seq_length": 8192, "top": 1, "exclude": ["cuda_graph_impl"]}
    fix: dict[str, Any] = {"tp": 4, "pp": 8, "dp": 1, "micro_batch_size": 1, "recompute": "full"}
    found = hpgo.plan_llm("llama-3-70b", H100, **asked, fix=fix | {"vpp": 5}).fastest
    assert found.parallelism.micro_batch_group_size == 10
    for size in (11, 12, 20):
        other = hpgo.plan_llm("llama-3-70b", H100, **asked, fix=fix | {"vpp": 5, "micro_batch_group_size": size})
        assert found.step_s <= other.fastest.step_s
        assert found.fullest.peak_bytes < other.fastest.fullest.peak_bytes
    whole = hpgo.plan_llm("llama-3-70b", H100, **asked | {"global_batch_size": 24}, fix=fix | {"vpp": 5})
    assert whole.fastest.parallelism.micro_batch_group_size is None
    asked["exclude"] = ["cuda_graph_impl", "micro_batch_group_size"]
    assert hpgo.plan_llm("llama-3-70b", H100, **asked, fix=fix).fastest.parallelism.vpp == 1


# --- Offloaded modules ------------------------------------------------------------------------------------------------


def test_offloaded_modules_leave_the_gpu_and_return_over_the_link_to_the_cpu() -> None:
    plain = estimate(pp=4, ep=8)
    for count in range(1, len(OFFLOADED) + 1):
        modules = [name for name in OFFLOADED[:count] if name != "attn_proj" or count > 3]
        one = estimate(pp=4, ep=8, offload_modules=modules)
        assert column(one, "activations") < column(plain, "activations")
        assert one.step_s >= plain.step_s
        assert one.step_s == pytest.approx(plain.step_s) or term(one, "cpu_offload") > 0
        plain_terms, terms = (dict(each.time_by_term_s) for each in (plain, one))
        assert all(terms[key] == pytest.approx(plain_terms[key]) for key in ("linear", "experts", "attention"))


def test_offloaded_activations_are_in_cpu_memory_and_two_layers_of_them_on_the_gpu_too() -> None:
    """Both memories together hold what the GPU held alone, and the copies of the two layers that stay."""
    plain, one = estimate(pp=4, ep=8), estimate(pp=4, ep=8, offload_modules=["core_attn", "moe_act"])
    for before, after in zip(plain.stages, one.stages, strict=True):
        left = dict(before.memory_bytes)["activations"] - dict(after.memory_bytes)["activations"]
        (layers,) = after.layers
        each = (after.cpu_activation_bytes - left) / 2
        in_flight = after.cpu_activation_bytes / each / (layers[1] - layers[0])
        assert before.cpu_activation_bytes == 0 < left < after.cpu_activation_bytes
        assert in_flight == pytest.approx(round(in_flight))
        assert in_flight >= 1
    assert "per GPU, for offloaded activations" in "\n".join(lines(one))
    assert "CPU memory" not in "\n".join(lines(plain))


@pytest.mark.parametrize("layers", [1, 2, 3, 20])
def test_offloaded_layers_are_in_cpu_memory(layers: int) -> None:
    plain, one = (estimate("llama-3-8b", cpu_offload_num_layers=count) for count in (0, layers))
    each = column(plain, "activations") / 32
    assert one.fullest.cpu_activation_bytes == pytest.approx(layers * each)
    assert column(plain, "activations") - column(one, "activations") == pytest.approx(max(0, layers - 2) * each)


def test_a_faster_link_to_the_cpu_exposes_less() -> None:
    slow, fast = (
        hpgo.estimate_llm(QWEN, name, **ASKED, devices=32, ep=8, offload_modules=["expert_fc1", "moe_act"])
        for name in ("h100:4", "gb200:1")
    )
    assert RATES["gb200"].host_bytes_per_s > 5 * RATES["h100"].host_bytes_per_s
    assert term(slow, "cpu_offload") / slow.step_s > 0.05 > term(fast, "cpu_offload") / fast.step_s


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", [QWEN, "deepseek-v2-lite", "llama-3-8b"])
def test_all_modules_offload_no_more_than_a_layer_saves(name: str, precision: Any) -> None:
    """Of a layer, at least the scores of its router, and the network of a dense one, stay on the GPU."""
    is_dense = not TRANSFORMERS[name].experts
    modules = [one for one in OFFLOADED if not (is_dense and one in {"expert_fc1", "moe_act"})]
    asked: dict[str, Any] = {"precision": precision, "micro_batch_size": 2}
    for recompute in ([], ["layernorm"], ["core_attn"]):
        kind = {"recompute": "selective", "recompute_modules": recompute} if recompute else {}
        plain, one = estimate(name, **asked, **kind), estimate(name, **asked, **kind, offload_modules=modules)
        assert 0 < column(one, "activations") < column(plain, "activations")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"offload_modules": ["attn_proj"]}, "add core_attn|core_attn also needs"),
        ({"offload_modules": ["moe_act", "moe_act"]}, "listed once"),
        ({"offload_modules": ["all"]}, "offloaded module"),
        ({"offload_modules": ["moe_act"], "recompute": "full"}, "excludes full recomputation"),
        (
            {"offload_modules": ["moe_act"], "recompute": "selective", "recompute_modules": ["moe"]},
            "recomputation of moe",
        ),
        ({"offload_modules": ["core_attn"], "cpu_offload_num_layers": 4}, "offloading of whole layers"),
        (
            {"offload_modules": ["mlp_norm"], "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
            "begin or end at norms",
        ),
        ({"offload_modules": ["core_attn"], "pp": 2, "vpp": 2, "pp_schedule": "zb_v"}, "split backward passes"),
    ],
)
def test_what_excludes_offloading_is_named(asked: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        estimate(**asked)


def test_offloading_of_experts_needs_experts() -> None:
    with pytest.raises(ArgumentError, match="offload_modules is expert_fc1, but expert_fc1 needs experts"):
        estimate("llama-3-8b", offload_modules=["expert_fc1"])


# --- Megatron-FSDP ----------------------------------------------------------------------------------------------------


def test_megatron_fsdp_is_estimated_and_searched_if_it_is_fixed(tmp_path: Path) -> None:
    asked = {"framework": "megatron", "tp": 2, "ep": 8, "zero_stage": 3}
    one = estimate(**asked)
    assert column(one, "weights") < column(estimate(**asked | {"zero_stage": 1}), "weights")
    with pytest.raises(ArgumentError, match="supports ZeRO stage 0 or 1, not 3"):
        estimate(**asked, pp=2)
    fixed = hpgo.plan_llm(QWEN, H100.first(8), **ASKED, fix={"zero_stage": 3, "ep": 8})
    assert {each.parallelism.zero_stage for each in fixed.estimates} == {3}
    free = hpgo.plan_llm(QWEN, H100.first(8), **ASKED, fix={"ep": 8})
    assert 3 not in {each.parallelism.zero_stage for each in free.estimates}
    text = main(plan_of(tmp_path, tp=2, ep=8, zero_stage=3), "megatron")
    for line in (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--ckpt-format fsdp_dtensor",
    ):
        assert line in text.splitlines()


# --- All layers -------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "etp": 1, "moe_token_dispatcher": None, "overlap_ep_comm": False, "delay_wgrad_compute": False,
    "micro_batch_group_size": None, "offload_modules": (),
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3-8b", QWEN, "deepseek-v2-lite"])
def test_settings_at_their_defaults_change_nothing(name: str) -> None:
    for degrees in ({"tp": 2}, {"pp": 2}, {"ep": 8}):
        if (name, next(iter(degrees))) in {("llama-3-8b", "ep"), ("deepseek-v2-lite", "pp")}:
            continue  # no experts, and 27 layers
        assert estimate(name, **degrees) == estimate(name, **degrees, **DEFAULTS)


def test_settings_survive_plan_files_and_exports(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, MIXTRAL, tp=2, ep=4, etp=2, pp=2, vpp=2, moe_token_dispatcher="deepep", overlap_ep_comm=True,
        delay_wgrad_compute=True, micro_batch_group_size=4, offload_modules=["core_attn", "moe_act"],
    )  # fmt: skip
    text = main(plan, "megatron").splitlines()
    for line in (
        "--expert-tensor-parallel-size 2", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
        "--microbatch-group-size-per-virtual-pipeline-stage 4", "--fine-grained-activation-offloading",
        "--offload-modules core_attn moe_act",
    ):  # fmt: skip
        assert line in text
    # Recipes on H100 have published steps with the other two.
    assert {"etp", "micro-batch groups", "offloading of modules"} == set(plan.estimate.unvalidated_features)
    named = plan.estimate.parallelism.named()
    for words in (
        "etp 2",
        "dispatcher deepep",
        "EP overlap with delayed",
        "groups of 4",
        "offload core_attn and moe_act",
    ):
        assert words in named


def test_settings_can_be_fixed_in_a_search() -> None:
    fix: dict[str, Any] = {
        "overlap_ep_comm": "yes", "moe_token_dispatcher": "deepep", "offload_modules": "moe_act", "etp": 2, "tp": 2,
    }  # fmt: skip
    found = hpgo.plan_llm(MIXTRAL, H100, **ASKED, fix=fix, top=3)
    for one in found.estimates:
        config = one.parallelism
        assert (config.overlap_ep_comm, config.moe_token_dispatcher, config.etp) == (True, "deepep", 2)
        assert config.offload_modules == ("moe_act",)
        assert config.ep > 1
        assert config.pp == 1 or config.vpp > 1
    best = found.fastest
    again = hpgo.estimate_llm(
        MIXTRAL, H100.first(best.gpus), **ASKED, framework="megatron", tp=2, etp=2, overlap_ep_comm=True,
        moe_token_dispatcher="deepep", offload_modules=["moe_act"],
        **{name: getattr(best.parallelism, name) for name in (
            "ep", "cp", "pp", "vpp", "zero_stage", "micro_batch_size", "first_rank_layers", "last_rank_layers")},
    )  # fmt: skip
    assert again.step_s == best.step_s


@pytest.mark.parametrize(
    "fix",
    [
        {"offload_modules": "expert_fc1+moe_act+core_attn"},
        {"overlap_ep_comm": "yes", "moe_token_dispatcher": "alltoall"},
        {"etp": 2},
        {"micro_batch_group_size": 6},
    ],
)
def test_no_configuration_with_a_setting_is_faster_than_the_search_finds(fix: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"global_batch_size": 24, "seq_length": 2048}
    cluster = hpgo.Cluster.preset("h100:1")
    found = hpgo.plan_llm(QWEN, cluster, **asked, fix=fix | {"tp": 2}, devices=8)
    given = {name: value.split("+") if name == "offload_modules" else value for name, value in fix.items()}
    given |= {"overlap_ep_comm": True} if "overlap_ep_comm" in fix else {}
    tried = 0
    for ep, pp, vpp, size in product((1, 2, 4), (1, 2, 4), (1, 2, 3), (1, 2, 3)):
        try:
            one = hpgo.estimate_llm(
                QWEN,
                cluster,
                **asked,
                framework="megatron",
                tp=2,
                ep=ep,
                pp=pp,
                vpp=vpp,
                micro_batch_size=size,
                **given,
            )
        except ArgumentError:
            continue
        tried += 1
        assert not one.fits or one.step_s >= found.fastest.step_s * (1 - 1e-9)
    assert tried > 5


def test_explanations_try_the_hidden_exchange_beside_a_plan() -> None:
    config = estimate(ep=8).parallelism
    assert {"overlap_ep_comm": True} in [*neighbours(config)]
    assert not any("overlap_ep_comm" in each for each in neighbours(ParallelismConfig(dp=8)))
    # The command that the report suggests is one that it reads.
    assert read_changes(f"overlap_ep_comm={shown(True)}") == {"overlap_ep_comm": True}


def test_differences_name_settings_that_are_left_out() -> None:
    config = ParallelismConfig(pp=2, vpp=2, dp=8, ep=8, moe_token_dispatcher="deepep", micro_batch_group_size=4)
    plain = ParallelismConfig(pp=2, vpp=2, dp=8, ep=8)
    assert differences(config, plain) == "default dispatcher, groups of pp micro-batches"
    assert differences(plain, config) == "moe_token_dispatcher deepep, micro_batch_group_size 4"


def test_changes_of_settings_adjust_what_depends_on_them() -> None:
    config = ParallelismConfig(
        pp=2, vpp=2, dp=8, ep=8, overlap_ep_comm=True, delay_wgrad_compute=True, micro_batch_group_size=4
    )
    assert not changed(config, read_changes("overlap_ep_comm=no")).delay_wgrad_compute
    assert changed(config, read_changes("pp=1")).micro_batch_group_size is None
    assert read_changes("moe_token_dispatcher=none,offload_modules=core_attn+moe_act,etp=2") == {
        "moe_token_dispatcher": None, "offload_modules": ("core_attn", "moe_act"), "etp": 2,
    }  # fmt: skip


def test_settings_are_read_from_a_log(tmp_path: Path) -> None:
    lines = {
        "num_experts": 8, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
        "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True, "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep", "microbatch_group_size_per_vp_stage": 6,
        "fine_grained_activation_offloading": True, "offload_modules": "['core_attn', 'moe_act']",
    }  # fmt: skip
    steps = [f" iteration {at}/ 100 | elapsed time per iteration (ms): 1000.0 |" for at in range(1, 20)]
    log = tmp_path / "run.log"
    log.write_text("\n".join([*(f"  {key} ..... {value}" for key, value in lines.items()), *steps]), encoding="utf-8")
    printed = read_log(log).printed
    wanted = {
        "etp": 1, "overlap_ep_comm": True, "delay_wgrad_compute": True, "moe_token_dispatcher": "deepep",
        "micro_batch_group_size": 6, "offload_modules": ("core_attn", "moe_act"),
    }  # fmt: skip
    assert {key: printed[key] for key in wanted} == wanted
