"""The bounds of a search are the terms of single configurations: never above an estimate, and mostly equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.llm.bounds import ALL, NONE, Candidate
from hpgo.llm.config_families import config_grids, config_groups, min_state_bytes
from hpgo.llm.config_groups import ConfigGroup, min_recomputed
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import _rank_layers, in_flight, max_memory_bytes, simulated_step_s
from hpgo.llm.frameworks import DEEPSPEED, MEGATRON, TORCHTITAN
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.memory import COLUMNS, stage_memory
from hpgo.llm.parallelism import ParallelismConfig
from hpgo.llm.search_space import SearchSpace
from hpgo.llm.step_time import LayerCosts, PipelineStages

models = st.builds(
    lambda layers, experts, tied, seen, further: hpgo.Transformer(
        layers=layers, hidden=1024, heads=8, kv_heads=4, head_dim=64, ffn=3072, vocab=32000, tied=tied,
        experts=experts, experts_per_token=min(experts, 2), expert_ffn=512 if experts else 0,
        dense_layers=(0,) if experts and layers > 1 else (), window=512 if seen else 0,
        window_layers=tuple(range(0, layers, 2)) if seen else (), further_tokens=further,
    ),
    st.integers(2, 9), st.sampled_from([0, 0, 4]), st.booleans(), st.booleans(), st.sampled_from([0, 0, 1, 2]),
)  # fmt: skip


def groups_of(
    model: hpgo.Transformer, gpus: int, batch: int, rules=MEGATRON, config: ParallelismConfig | None = None
) -> list[ConfigGroup]:
    on = Gpus.of(hpgo.Cluster.preset("h100").first(gpus), "bf16")
    context = LayerContext(model, config or ParallelismConfig(), on, CONSTANTS, 1024)
    return list(config_groups(context, batch, SearchSpace.of(rules, "it")))


def partly(group: ConfigGroup, one: Candidate, layers: int) -> PipelineStages:
    none = group.stages(one._replace(recomputed=NONE))
    config = replace(none.context.config, recompute="full", recompute_num_layers=layers)
    return PipelineStages(replace(none.context, config=config), none.micro_batches)


@given(model=models, gpus=st.sampled_from([2, 3, 4, 8]), batch=st.sampled_from([1, 4, 12]), megatron=st.booleans())
@settings(max_examples=8)
def test_no_configuration_takes_or_holds_less_than_its_group_knows(
    model, gpus: int, batch: int, megatron: bool
) -> None:
    for group in groups_of(model, gpus, batch, MEGATRON if megatron else TORCHTITAN):
        held = {(one.split, one.zero, one.recomputed): minimum for minimum, one in group.leanest()}
        bounds = {(one.split, one.zero, one.recomputed): one.bound_s for one in group.candidates(1e18)}
        assert set(held) == set(bounds)
        assert len(held) == len(group.splits.found) * len(group.zero_stages) * len(group.recomputed)
        for (split, zero, recomputed), bound_s in bounds.items():
            stages = group.stages(Candidate(0.0, split, zero, recomputed))
            assert group.bound_s <= group.min_s <= bound_s < stages.passes_s <= stages.bound_s
            assert bound_s == pytest.approx(stages.passes_s, rel=1e-6)
            assert held[split, zero, recomputed] <= max_memory_bytes(stages)
            assert held[split, zero, recomputed] == pytest.approx(max_memory_bytes(stages), rel=1e-6)


@given(
    model=models, gpus=st.sampled_from([2, 4, 8]), batch=st.sampled_from([4, 12]),
    rules=st.sampled_from([MEGATRON, TORCHTITAN, DEEPSPEED]), fused=st.booleans(), narrow=st.booleans(),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=12)
def test_arrays_of_configurations_have_the_amounts_of_each(model, gpus, batch, rules, fused, narrow, data) -> None:
    """Every column of memory and the bound on the step, on arrays of all splits and ranks and one by one."""
    config = ParallelismConfig(
        fused_adam=fused,
        grad_reduce_in_bf16=narrow,
        flatten_gradients=rules.flatten_gradients,
        dtensor=rules.dtensor,
        whole_embedding=rules.tp_alone,
    )
    groups = groups_of(model, gpus, batch, rules, config)
    assume(groups)
    group = data.draw(st.sampled_from(groups))
    zero = data.draw(st.sampled_from(range(len(group.zero_stages))))
    again = data.draw(st.sampled_from(group.recomputed))
    held = group.splits.rank_layers(group.micro_batches, recomputed=again)
    any_split = group.stages(Candidate(0.0, 0, zero, ALL if again else NONE)).context
    arrays = stage_memory(any_split, held)
    steps_s = {one.split: one.bound_s for one in group.candidates(1e18) if (one.recomputed == ALL) == again}
    assert list(arrays) == list(COLUMNS)
    for split in range(len(group.splits.found)):
        stages = group.stages(Candidate(0.0, split, zero, ALL if again else NONE))
        assert steps_s[split] == pytest.approx(stages.passes_s, rel=1e-8)
        for rank in range(group.pp):
            for key, size in stage_memory(stages.context, _rank_layers(stages, rank)).items():
                array = arrays[key]
                found = array if isinstance(array, float | int) else array[split, rank]
                assert found == pytest.approx(size, rel=1e-12, abs=1e-3), key
                assert size >= 0


@given(model=models, gpus=st.sampled_from([2, 4]), batch=st.sampled_from([2, 8]), share=st.floats(0.0, 1.0))
@settings(max_examples=8)
def test_partial_recomputation_needs_no_fewer_layers_and_no_less_time_than_its_group_knows(
    model, gpus: int, batch: int, share: float
) -> None:
    for group in groups_of(model, gpus, batch):
        if not group.some:
            continue  # CUDA graphs of layers exclude recomputation
        each = [minimum for minimum, _ in group.leanest()]
        limit_bytes = min(each) + share * (max(each) - min(each))
        limit_bytes *= 1 + 1e-8  # bounds are a little lower, and equal sizes are not tested here
        candidates = group.candidates(limit_bytes)
        known = {(one.split, one.zero): one for one in candidates if one.recomputed > 0}
        # Configurations that fit but for rounding are found when they are estimated.
        nearly = {(one.split, one.zero) for one in candidates if one.recomputed == NONE}
        for split, zero in product(range(len(group.splits.found)), range(len(group.zero_stages))):
            one = Candidate(0.0, split, zero, NONE)
            if max_memory_bytes(group.stages(one)) <= limit_bytes or (split, zero) in nearly:
                assert (split, zero) not in known
                continue
            fitting = (
                layers
                for layers in range(1, group.splits.found[split].maximum)
                if max_memory_bytes(partly(group, one, layers)) <= limit_bytes
            )
            fewest = next(fitting, None)
            if fewest is not None:
                found = known[split, zero]
                assert found.recomputed <= fewest
                assert found.bound_s <= partly(group, one, fewest).passes_s
                few = min_recomputed(group.stages(one), limit_bytes, found.recomputed)
                assert few is not None
                assert few.context.config.recompute_num_layers == fewest
                assert found.bound_s <= simulated_step_s(few)
            elif (split, zero) in known:
                assert min_recomputed(group.stages(one), limit_bytes, known[split, zero].recomputed) is None


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3), (8, 2), (5, 7)])
def test_two_rounds_of_micro_batches_have_as_many_in_flight_as_any(pp: int, vpp: int) -> None:
    config = ParallelismConfig(pp=pp, vpp=vpp)
    for rank, more in product(range(pp), (0, 1, pp, 100)):
        assert in_flight(config, rank, 2 * pp + more) == in_flight(config, rank, 2 * pp)


@given(
    model=models, gpus=st.sampled_from([4, 8]), batch=st.sampled_from([2, 8]), data=st.data(),
    rules=st.sampled_from([MEGATRON, TORCHTITAN, DEEPSPEED]),
)  # fmt: skip
@settings(max_examples=15)
def test_shared_terms_are_those_of_each_group_alone_and_families_bound_their_groups(
    model, gpus: int, batch: int, rules, data
) -> None:
    on = Gpus.of(hpgo.Cluster.preset("h100:2").first(gpus), "bf16")
    config = ParallelismConfig(
        flatten_gradients=rules.flatten_gradients, dtensor=rules.dtensor, whole_embedding=rules.tp_alone
    )
    context = LayerContext(model, config, on, CONSTANTS, 1024)
    grids = config_grids(context, batch, SearchSpace.of(rules, "it"))
    for grid in grids:
        groups = list(grid.groups())
        assert sum(group.count for group in groups) == grid.count
        assert [group.order for group in groups] == sorted(group.order for group in groups)
        opened: dict[tuple[int, ...], float] = {}
        waiting = list(grid.families())
        while waiting:
            family = waiting.pop()
            for one in family.open():
                if isinstance(one, ConfigGroup):
                    opened[one.order] = family.bound_s
                else:
                    waiting.append(one)
        assert set(opened) <= {group.order for group in groups}
        if grid.plain is None:
            assert len(opened) == len(groups)
        for group in groups:
            assert opened.get(group.order, 0.0) <= group.bound_s
        if groups:
            group = data.draw(st.sampled_from(groups))
            alone = LayerCosts(group.costs.context)
            assert group.costs.layer == alone.layer
            assert group.costs.least_s == pytest.approx(alone.least_s)
            least_bytes = min(minimum for minimum, _ in group.leanest())
            assert group.leanest_bytes == least_bytes
            assert group.min_bytes <= least_bytes
            assert min_state_bytes(context, grid.space) <= gpus * group.min_bytes
