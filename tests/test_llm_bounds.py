"""What a search for ways knows of all ways of a family at once is never above what each of them takes and holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.llm.bounds import NONE, Candidate
from hpgo.llm.config_groups import ConfigGroup, fewest_anew
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import in_flight, max_memory_bytes, simulated_step_s
from hpgo.llm.frameworks import MEGATRON, TORCHTITAN
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.parallelism import ParallelismConfig
from hpgo.llm.search_space import SearchSpace
from hpgo.llm.step_time import PipelineStages

models = st.builds(
    lambda layers, experts, tied, seen, further: hpgo.Transformer(
        layers=layers, hidden=1024, heads=8, kv_heads=4, head_dim=64, ffn=3072, vocab=32000, tied=tied,
        experts=experts, experts_per_token=min(experts, 2), expert_ffn=512 if experts else 0,
        dense_layers=(0,) if experts and layers > 1 else (), window=512 if seen else 0,
        window_layers=tuple(range(0, layers, 2)) if seen else (), further_tokens=further,
    ),
    st.integers(2, 9), st.sampled_from([0, 0, 4]), st.booleans(), st.booleans(), st.sampled_from([0, 0, 1, 2]),
)  # fmt: skip


def grid(model: hpgo.Transformer, gpus: int, batch: int, rules=MEGATRON) -> list[ConfigGroup]:
    on = Gpus.of(hpgo.Cluster.preset("h100").first(gpus), "bf16")
    return list(
        config_groups(LayerContext(model, ParallelismConfig(), on, CONSTANTS, 1024), batch, SearchSpace.of(rules, "it"))
    )


def partly(family: ConfigGroup, one: Candidate, layers: int) -> PipelineStages:
    none = family.stages(one._replace(recomputed=NONE))
    config = replace(none.context.config, recompute="full", recompute_num_layers=layers)
    return PipelineStages(replace(none.context, config=config), none.micro_batches)


@given(model=models, gpus=st.sampled_from([2, 3, 4, 8]), batch=st.sampled_from([1, 4, 12]), megatron=st.booleans())
@settings(max_examples=8)
def test_no_way_takes_or_holds_less_than_its_family_knows(model, gpus: int, batch: int, megatron: bool) -> None:
    for family in grid(model, gpus, batch, MEGATRON if megatron else TORCHTITAN):
        held = {(one.cut, one.zero, one.recomputed): least for least, one in family.leanest()}
        bounds = {(one.cut, one.zero, one.recomputed): one.bound_s for one in family.candidates(1e18)}
        assert set(held) == set(bounds)
        assert len(held) == len(family.cuts.found) * len(family.zeros) * len(family.recomputed)
        for (cut, zero, recomputed), bound_s in bounds.items():
            stages = family.stages(Candidate(0.0, cut, zero, recomputed))
            assert family.bound_s <= family.least_s <= bound_s < stages.passes_s <= stages.bound_s
            assert bound_s == pytest.approx(stages.passes_s, rel=1e-6)
            assert held[cut, zero, recomputed] <= max_memory_bytes(stages)
            kinds = 1 if recomputed == NONE else len(set(stages.rows.kinds))
            # Where layers differ, the largest of those that are computed anew may be on another rank.
            assert kinds > 1 or held[cut, zero, recomputed] == pytest.approx(max_memory_bytes(stages), rel=1e-6)


@given(model=models, gpus=st.sampled_from([2, 4]), batch=st.sampled_from([2, 8]), share=st.floats(0.0, 1.0))
@settings(max_examples=8)
def test_what_computes_some_layers_anew_computes_no_fewer_and_takes_no_less_than_its_family_knows(
    model, gpus: int, batch: int, share: float
) -> None:
    for family in grid(model, gpus, batch):
        each = [least for least, _ in family.leanest()]
        room_bytes = min(each) + share * (max(each) - min(each))
        room_bytes *= 1 + 1e-8  # bounds lie a little below, and of those that are as large nothing is asked here
        candidates = family.candidates(room_bytes)
        known = {(one.cut, one.zero): one for one in candidates if one.recomputed > 0}
        # Those that fit but for rounding are found when they are looked at.
        nearly = {(one.cut, one.zero) for one in candidates if one.recomputed == NONE}
        for cut, zero in product(range(len(family.cuts.found)), range(len(family.zeros))):
            one = Candidate(0.0, cut, zero, NONE)
            if max_memory_bytes(family.stages(one)) <= room_bytes or (cut, zero) in nearly:
                assert (cut, zero) not in known
                continue
            fitting = (
                layers
                for layers in range(1, family.cuts.found[cut].most)
                if max_memory_bytes(partly(family, one, layers)) <= room_bytes
            )
            fewest = next(fitting, None)
            if fewest is not None:
                found = known[cut, zero]
                assert found.recomputed <= fewest
                assert found.bound_s <= partly(family, one, fewest).passes_s
                few = fewest_anew(family.stages(one), room_bytes, found.recomputed)
                assert few is not None
                assert few.context.config.recompute_num_layers == fewest
                assert found.bound_s <= simulated_step_s(few)
            elif (cut, zero) in known:
                assert fewest_anew(family.stages(one), room_bytes, known[cut, zero].recomputed) is None


@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3), (8, 2), (5, 7)])
def test_no_more_is_ever_in_flight_than_of_two_rounds(pipeline: int, chunks: int) -> None:
    config = ParallelismConfig(pp=pipeline, vpp=chunks)
    for rank, more in product(range(pipeline), (0, 1, pipeline, 100)):
        assert in_flight(config, rank, 2 * pipeline + more) == in_flight(config, rank, 2 * pipeline)
