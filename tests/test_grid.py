"""`hpgo.plan_llm` gives what pricing every way would give, and `hpgo llm plan MODEL --seq-length` shows it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd, inf
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.llm.canonical import canonical
from hpgo.llm.config_groups import mesh_of
from hpgo.llm.fewer_gpus import part_of
from hpgo.llm.pipeline_layout import layout_text
from hpgo.llm.simplicity import preference

if TYPE_CHECKING:
    from collections.abc import Iterator

models = st.builds(
    lambda layers, kv, shared, wide, experts, further: hpgo.Transformer(
        layers=layers, hidden=1024, heads=kv * shared, kv_heads=kv, head_dim=64, ffn=1024 * wide, vocab=32000,
        experts=experts, experts_per_token=min(experts, 2), expert_ffn=512 * wide if experts else 0,
        dense_layers=(0,) if experts and layers > 1 else (), further_tokens=further,
    ),
    st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(1, 40), st.sampled_from([0, 0, 4]),
    st.sampled_from([0, 0, 1]),
)  # fmt: skip


def ends_of(layers: int, pp: int, vpp: int) -> Iterator[tuple[int | None, int | None]]:
    """Layers to ask for on the first and the last rank: none in particular, and all that are fewer than between."""
    yield None, None
    if pp == 2:
        yield from ((first, None) for first in range(vpp, layers, vpp) if first != layers - first)
    for first, each, last in product(range(vpp, layers + 1, vpp), repeat=3) if pp > 2 else ():
        if first + each * (pp - 2) + last == layers and max(first, last) <= each and min(first, last) < each:
            yield None if first == each else first, None if last == each else last


def layouts_of(model, pp: int, vpp: int) -> Iterator[str]:
    """Layouts to ask for if the model predicts further tokens, as docs/llm.md says.

    They are on the last stage or the one before, behind which no layer is. The first stage has at most two layers fewer
    than the even share or one more, that stage at most six fewer, and those between differ by one, the later ones more.
    """
    if not model.further_tokens or pp == 1 or not 2 < pp * vpp <= model.layers + 2:
        return
    for at in (pp * vpp - 1, pp * vpp - 2) if pp > 2 else (pp * vpp - 1,):
        even = -(-model.layers // (at + 1))
        for counts in product(range(even + 2), repeat=at + 1):
            first, middle, last = counts[0], counts[1:at], counts[at]
            rising = list(middle) == sorted(middle) and (not middle or middle[-1] - middle[0] < 2)
            if sum(counts) == model.layers and first >= even - 2 and even - 6 <= last <= even and rising:
                yield layout_text((*counts, *(0,) * (pp * vpp - 1 - at)), model.further_tokens, at)


def divided_experts(model, ep: int, node: int) -> list[int]:
    """The etp to ask for: what divides a node and an expert, unless a higher ep could do a part of it."""
    if not model.experts:
        return [1]
    etps = [etp for etp in range(1, node + 1) if node % etp == 0 == model.expert_ffn % etp]
    return [etp for etp in etps if not any(etp % by == 0 == model.experts % (ep * by) for by in range(2, etp + 1))]


def group_of(pp: int, vpp: int, micro_batches: int) -> int | None:
    """The group of micro-batches to ask for: the smallest with at least pp in each group, if pp leaves a rest."""
    if vpp == 1 or micro_batches % pp == 0 or micro_batches < pp:
        return None
    return next(size for size in range(pp, micro_batches + 1) if micro_batches % size in {0, *range(pp, size)})


def every_way(
    model, cluster: hpgo.Cluster, batch: int, seq: int, fix: dict[str, object] | None = None, *, graphs: bool = False
) -> dict[tuple, hpgo.LlmEstimate]:
    """Everything that `hpgo.estimate_llm` accepts, by degrees, layers of each stage, and what is recomputed.

    All have the settings in `fix`. Megatron-LM packs single sequences, and moves state to the CPU with ZeRO only.
    `graphs` adds the CUDA graphs that the search tries, and the hidden exchange of experts, which Megatron-LM runs with
    expert parallelism and without single stages per rank.
    """
    fix = fix or {}
    found: dict[tuple, hpgo.LlmEstimate] = {}
    gpus = cluster.devices
    graphed: list[dict[str, object]] = [{}]
    if graphs and model.experts:
        modules = ["attn", *(["mlp"] if model.dense_layers else []), "moe_router", "moe_preprocess"]
        graphed.append({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": sorted(modules)})
        graphed.append({"overlap_ep_comm": True})
    elif graphs:
        graphed += [{"cuda_graph_impl": impl} for impl in ("local", "full_iteration")]
    node = cluster.nodes[0].count
    experts = [(ep, etp) for ep in range(1, max(1, model.experts) + 1) for etp in divided_experts(model, ep, node)]
    for tp, cp, (ep, etp), pp, vpp, size, zero in product(
        range(1, gpus + 1), [1, 2, 4, 8], experts, range(1, gpus + 1), range(1, model.layers + 3), range(1, batch + 1),
        (0, 1),
    ):  # fmt: skip
        if tp * cp * pp > gpus or gpus % (tp * cp * pp) or (pp == 1 < vpp) or tp > node:
            continue
        replicas = gpus // tp // pp
        if zero and replicas == 1 and not (model.experts and tp > ep * etp):
            continue  # nobody has the same as another
        if ("packed_length" in fix and size > 1) or (
            "optimizer_offload_fraction" in fix and not zero and gpus > tp * pp
        ):
            continue
        degrees = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "vpp": vpp, "micro_batch_size": size, "zero_stage": zero}
        degrees |= {"etp": etp, "micro_batch_group_size": group_of(pp, vpp, batch // (replicas // cp or 1) // size)}
        # The stack is the one that `hpgo.plan_llm` takes for Megatron-LM on an H100.
        given = {"global_batch_size": batch, "seq_length": seq, "stack": "te-hopper", **degrees, **fix}
        splits: list[dict[str, object]] = [
            {"first_rank_layers": first, "last_rank_layers": last} for first, last in ends_of(model.layers, pp, vpp)
        ]
        splits += [{"pipeline_layout": layout} for layout in layouts_of(model, pp, vpp)]
        for split, setting in product(splits, graphed):
            hides = "overlap_ep_comm" in setting
            if hides and (ep == 1 or (pp > 1 and vpp == 1)):
                continue
            ask = partial(hpgo.estimate_llm, model, cluster, **given, **setting, **split)
            try:
                one = ask()
            except hpgo.errors.ArgumentError:
                continue
            cut = tuple(tuple(stop - start for start, stop in stage.layers) for stage in one.stages)
            cut = (*cut, one.parallelism.further_stage)
            impl = setting.get("cuda_graph_impl", "none")
            asked = (*degrees.values(), impl, hides)
            if (asked, cut, "none", None) in found:
                continue  # it is that with the embedding and the head as one layer each, say
            found[asked, cut, "none", None] = one
            if hides or impl in {"local", "transformer_engine"}:
                continue  # both exclude full recomputation
            recomputed = partial(ask, recompute="full")
            found[asked, cut, "full", None] = recomputed()
            for count in range(1, max(map(max, cut[:-1]))):
                found[asked, cut, "full", count] = recomputed(recompute_num_layers=count)
    return found


def fitting(every: dict[tuple, hpgo.LlmEstimate], room_bytes: float) -> list[hpgo.LlmEstimate]:
    """Those that fit, with no more computed anew than they must, or all."""
    fit = {key: one for key, one in every.items() if max(stage.peak_bytes for stage in one.stages) <= room_bytes}
    found = []
    for (degrees, cut, _, count), one in fit.items():
        fewer = [("none", None), *(("full", less) for less in range(1, count))] if count is not None else []
        if not any((degrees, cut, *less) in fit for less in fewer):
            found.append(one)
    return found


def to_choose_from(fit: list[hpgo.LlmEstimate], sure: list[hpgo.LlmEstimate], top: int) -> list[hpgo.LlmEstimate]:
    """The list: of each of the quickest meshes the preferred one, which fits for `sure` if one does, and the best two.

    All of this is what docs/llm.md says, written down a second time.
    """
    fastest = min(fit, key=lambda one: one.step_s)
    max_s = fastest.step_s * 1.07

    def preferred(most_s: float, mesh: object = None) -> hpgo.LlmEstimate:
        for pool in (sure, fit):
            some = [one for one in pool if one.step_s <= most_s and mesh in {None, mesh_of(one.parallelism)}]
            if some:
                return min(some, key=preference)
        raise AssertionError("the mesh has a configuration")

    meshes: dict[object, float] = {}
    for one in sorted(fit, key=lambda one: one.step_s):
        meshes.setdefault(mesh_of(one.parallelism), one.step_s)
    rows = [preferred(max_s), fastest]
    rows += [preferred(max_s if s <= max_s else s * 1.07, mesh) for mesh, s in list(meshes.items())[:top]]
    rows = [one for at, one in enumerate(rows) if one not in rows[:at]]
    return sorted((one for one in rows if one.step_s <= max_s), key=preference) + sorted(
        (one for one in rows if one.step_s > max_s), key=lambda one: one.step_s
    )


@given(
    model=models,
    gpus=st.sampled_from([1, 2, 3, 4, 6]),
    batch=st.sampled_from([1, 2, 4]),
    top=st.integers(1, 8),
    share=st.floats(0.1, 1.0),
    fix=st.sampled_from([{}, {}, {"packed_length": 100}, {"optimizer_offload_fraction": 1.0}, {"optimizer": "sgd"}]),
    graphs=st.booleans(),
)
@settings(max_examples=examples(25))
def test_the_choice_is_that_of_trying_every_way(
    model, gpus: int, batch: int, top: int, share: float, fix: dict[str, object], graphs: bool
) -> None:
    cluster = hpgo.Cluster.preset("h100").first(gpus)
    asked = {"global_batch_size": batch, "seq_length": 1024, "top": top, "fix": fix}
    # Modules to recompute have a test of their own.
    asked |= {"exclude": ["recompute=selective", *([] if graphs else ["cuda_graph_impl", "overlap_ep_comm"])]}
    every = every_way(model, cluster, batch, 1024, fix, graphs=graphs)
    if not every:
        with pytest.raises(hpgo.errors.ArgumentError, match="no configuration divides"):
            hpgo.plan_llm(model, cluster, devices=gpus, **asked)
        return
    # Some of them fit, or all, or none.
    peaks = sorted(max(stage.peak_bytes for stage in one.stages) for one in every.values())
    room_bytes = peaks[0] * 0.999 + share**2 * (peaks[-1] - peaks[0])
    asked |= {"reserved_bytes": 80e9 - room_bytes}
    room_bytes = 80e9 - asked["reserved_bytes"]
    fit = fitting(every, room_bytes)
    # Where nothing fits, the smallest share of the optimizer's state is in CPU memory with which something surely does.
    shares = (0.25, 0.5, 0.75, 1.0) if not (fit or {"optimizer", "optimizer_offload_fraction"} & set(fix)) else ()
    moved = [
        every_way(model, cluster, batch, 1024, fix | {"optimizer_offload_fraction": share}, graphs=graphs)
        for share in shares
    ]
    for within_bytes, one in product((min(room_bytes, 80e9 / 1.06), room_bytes), moved):
        if not fit and fitting(one, within_bytes):
            every, fit = one, fitting(one, room_bytes)
    if not fit:
        with pytest.raises(hpgo.errors.InfeasibleError, match="no configuration fits in memory: the smallest"):
            hpgo.plan_llm(model, cluster, devices=gpus, **asked)
        return
    found = hpgo.plan_llm(model, cluster, devices=gpus, **asked)
    assert found.configurations == len(every)
    wanted = to_choose_from(fit, fitting(every, min(room_bytes, 80e9 / 1.06)), top)
    # To the last figure, though families share what their ways have in common.
    assert [one.step_s for one in found.estimates] == [one.step_s for one in wanted]
    assert found.fastest.step_s == min(one.step_s for one in fit)
    assert (found.best, len(found.alike)) == (found.estimates[0], sum(one in found.alike for one in found.estimates))
    stages = {(one.step_s, one.stages) for one in every.values()}
    assert {(one.step_s, one.stages) for one in found.estimates} <= stages
    plain = {canonical(one.parallelism, model) for one in found.estimates}
    assert len(plain) == len(found.estimates), "no two rows run the same"


@given(
    model=models.filter(lambda model: model.layers < 3 and not model.experts),
    shape=st.sampled_from([(1, 3), (1, 4), (2, 2), (3, 1)]),
    batch=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=examples(9))
def test_fewer_gpus_are_used_where_no_more_of_them_are_quicker(model, shape: tuple[int, int], batch: int) -> None:
    nodes, each = shape
    cluster = hpgo.Cluster.of(nodes=nodes, devices_per_node=each, intra_gbit_s=3600, inter_gbit_s=400 * each)
    node = replace(cluster.nodes[0], device=hpgo.Cluster.preset("h100").nodes[0].device)
    cluster = replace(cluster, nodes=(node,) * nodes)
    quickest: dict[int, float] = {}
    for count, gpus in product(range(1, nodes + 1), range(1, each + 1)):
        divided = batch * gcd(model.heads, model.kv_heads, model.ffn) * 64
        if gpus < each and divided % gpus:
            continue
        fit = fitting(every_way(model, part_of(cluster, count, gpus), batch, 1024), 80e9)
        steps = [one.step_s for one in fit] + [quickest.get(count * gpus, inf)]
        quickest[count * gpus] = min(steps)
    least_s = min(quickest.values())
    if least_s == inf:
        return
    used = max(count for count, step_s in quickest.items() if step_s == least_s)
    asked = {"global_batch_size": batch, "seq_length": 1024, "top": 1, "exclude": ["cuda_graph_impl"]}
    found = hpgo.plan_llm(model, cluster, **asked)
    assert (found.fastest.step_s, found.cluster.devices, found.available) == (least_s, used, nodes * each)
    assert all(one.gpus == used for one in found.estimates)
    if used == nodes * each:
        assert found.on_all is None
    elif quickest[nodes * each] < inf:
        assert found.on_all.step_s == quickest[nodes * each]
        assert found.on_all.gpus == nodes * each


def test_gpus_that_slow_a_step_down_stay_idle() -> None:
    big = hpgo.Transformer(layers=40, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256)
    # Tensor parallelism inside each node would save the gathers between nodes.
    ask = {"global_batch_size": 8, "seq_length": 4096, "framework": "deepspeed", "top": 1, "exclude": ["tp"]}
    found = hpgo.plan_llm(big, "h200:2", **ask)
    on_8, on_16 = (hpgo.plan_llm(big, "h200:2", devices=count, **ask).fastest for count in (8, 16))
    assert on_16.step_s > 1.3 * on_8.step_s
    assert (found.fastest, found.on_all) == (on_8, on_16)
    assert (found.cluster.devices, found.available, found.plan().cluster.devices) == (8, 16, 8)
    assert hpgo.plan_llm(big, "h200:2", devices=16, **ask).any_count is False


def test_64_gpus_of_a_rack_of_72_are_used_and_each_keeps_its_nic() -> None:
    ask = {"global_batch_size": 256, "seq_length": 8192, "top": 1}
    found = hpgo.plan_llm("llama-3-8b", "gb200:1", **ask, framework="torchtitan")
    assert (found.cluster.devices, found.on_all) == (64, None), "no configuration divides among 72"
    two = hpgo.plan_llm("llama-3-8b", "gb200:2", **ask)
    assert [node.count for node in two.cluster.nodes] == [64, 64]
    whole = hpgo.Cluster.preset("gb200:2")
    assert two.cluster.inter.collective_bytes_per_s / 64 == whole.inter.collective_bytes_per_s / 72


def test_cuda_graphs_are_chosen_where_launches_take_longest_and_the_list_says_what_they_save() -> None:
    small = hpgo.Transformer(layers=8, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=32000)
    ask = {"global_batch_size": 8, "seq_length": 1024, "devices": 1}
    found = hpgo.plan_llm(small, "h100:1", **ask)
    assert found.best.parallelism.cuda_graph_impl != "none"
    assert "CUDA graphs" in found.best.unvalidated_features
    off = hpgo.plan_llm(small, "h100:1", **ask, exclude=["cuda_graph_impl"])
    assert off.fastest.step_s > 1.07 * found.fastest.step_s
    assert off.plain_s == tuple(one.step_s for one in off.estimates)
    same = replace(found.best.parallelism, cuda_graph_impl="none")
    assert found.plain_s[0] == next(one.step_s for one in off.estimates if one.parallelism == same)
    words = ["llm", "plan", "gpt-2-xl", "-c", "h100:1", "-b", "8", "--seq-length", "256", "--top", "2"]
    report = " ".join(CliRunner().invoke(group, words).stdout.split())
    assert "CUDA graphs save" in report
    assert "of the step time of number 1" in report


@pytest.mark.parametrize(
    ("name", "cluster", "batch"), [("qwen3-30b-a3b", "h100:1", 64), ("mixtral-8x22b", "h100:8", 128)]
)
def test_modules_of_layers_with_experts_are_recomputed_where_that_is_faster(
    name: str, cluster: str, batch: int
) -> None:
    asked = {"global_batch_size": batch, "seq_length": 8192, "top": 1, "exclude": ["cuda_graph_impl"]}
    found = hpgo.plan_llm(name, cluster, **asked)
    whole = hpgo.plan_llm(name, cluster, **asked | {"exclude": ["cuda_graph_impl", "recompute=selective"]})
    every = hpgo.plan_llm(name, cluster, **asked, fix={"recompute": "selective"})
    assert found.configurations > whole.configurations
    # Of all sets of modules, the search tries the three that save the most memory for their time.
    best_s = min(whole.fastest.step_s, every.fastest.step_s)
    assert best_s <= found.fastest.step_s <= whole.fastest.step_s
    assert found.fastest.step_s <= 1.002 * best_s


@pytest.mark.parametrize(("layers", "pp", "vpp", "vocab"), [(7, 4, 1, 128_000), (6, 3, 2, 64_000)])
def test_no_layout_is_much_faster_than_those_that_are_tried(layers: int, pp: int, vpp: int, vocab: int) -> None:
    """All layouts of the layers and of multi-token prediction, of which the search tries a few."""
    model = hpgo.Transformer(
        layers=layers, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=vocab, experts=8,
        experts_per_token=2, expert_ffn=2048, dense_layers=(0,), further_tokens=1,
    )  # fmt: skip
    cluster = hpgo.Cluster.preset("h100").first(pp)
    sizes = {"global_batch_size": 12, "seq_length": 4096}
    fix = {"tp": 1, "cp": 1, "ep": 1, "pp": pp, "vpp": vpp, "micro_batch_size": 1, "recompute": "none"}
    found = hpgo.plan_llm(model, cluster, devices=pp, fix=fix, exclude=["cuda_graph_impl"], **sizes)
    steps_s = []
    for counts in product(range(layers + 1), repeat=pp * vpp):
        places = [at for at in range(pp * vpp) if sum(counts) == layers and not any(counts[at + 1 :])]
        for layout in (layout_text(counts, 1, at) for at in places):
            with contextlib.suppress(hpgo.errors.ArgumentError):
                given = {"pp": pp, "vpp": vpp, "micro_batch_size": 1, "zero_stage": 0, "stack": "te-hopper"}
                steps_s.append(hpgo.estimate_llm(model, cluster, pipeline_layout=layout, **sizes, **given).step_s)
    assert min(steps_s) <= found.fastest.step_s <= 1.003 * min(steps_s)
    even = hpgo.estimate_llm(model, cluster, **sizes, **given)
    assert found.fastest.step_s < 0.95 * even.step_s


def test_hybrid_sharding_is_tried_where_each_pass_gathers_weights() -> None:
    ask = {"global_batch_size": 256, "seq_length": 4096, "framework": "torchtitan", "devices": 256, "top": 3}
    fixed = {"zero_stage": 3, "tp": 1, "cp": 1, "pp": 1, "micro_batch_size": 1}
    found = hpgo.plan_llm("llama-3-8b", "h100:32", **ask, fix=fixed)
    steps = {
        groups: hpgo.plan_llm("llama-3-8b", "h100:32", **ask, fix={**fixed, "dp_replicate": groups}).fastest.step_s
        for groups in (1, 2, 4, 8, 16, 32)
    }
    assert found.fastest.step_s == min(steps.values()) < steps[1]
    assert found.configurations == 2 * 2 * len(steps)  # with and without recomputation and CUDA graphs
    excluded = hpgo.plan_llm("llama-3-8b", "h100:32", **ask, fix=fixed, exclude=["dp_replicate"])
    assert excluded.fastest.step_s == steps[1]


def test_memory_that_is_left_alone_is_left_alone() -> None:
    cluster = hpgo.Cluster.preset("h100:1")
    for reserve in (0.0, 30e9):
        found = hpgo.plan_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=4096, reserved_bytes=reserve)
        assert all(stage.peak_bytes <= 80e9 - reserve for one in found.estimates for stage in one.stages)


def test_nothing_that_fits_says_what_is_short() -> None:
    with pytest.raises(
        hpgo.errors.InfeasibleError,
        match=r"no configuration fits in memory: the smallest \(tp 8 .* needs .* a GPU has 80",
    ):
        hpgo.plan_llm("llama-3.1-405b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=8192)


def test_a_number_of_gpus_that_nothing_divides_is_refused() -> None:
    with pytest.raises(
        hpgo.errors.ArgumentError, match="no configuration divides `llama-3-8b` and a global batch of 8 among 37 GPUs"
    ):
        hpgo.plan_llm("llama-3-8b", hpgo.Cluster.preset("h100:8"), global_batch_size=8, seq_length=8192, devices=37)


PLAN = ["llm", "plan", "llama-3-8b", "--cluster", "h100:1", "--global-batch-size", "16", "--seq-length", "8192"]


def test_the_command_lists_the_quickest_ways() -> None:
    done = CliRunner().invoke(group, [*PLAN, "--top", "3"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("llama-3-8b on h100:1 (8 GPUs)")
    assert any(line.split()[:1] == ["3"] for line in lines)
    assert not any(line.split()[:1] == ["4"] for line in lines[-12:])
    assert "configurations bounded" in done.stdout


def test_json_has_the_ways_in_order() -> None:
    done = CliRunner().invoke(group, [*PLAN, "--json", "--devices", "4"])
    found = json.loads(done.stdout)
    steps = [one["step_s"] for one in found["estimates"]]
    alike = found["alike"]
    assert steps[alike:] == sorted(steps[alike:])
    assert max(steps[:alike]) <= 1.07 * min(steps) < min([*steps[alike:], inf])
    assert steps[found["fastest"] - 1] == min(steps)
    assert (found["best"], found["gpus"], found["available_gpus"]) == (1, 4, 4)
    assert {one["gpus"] for one in found["estimates"]} == {4}
    assert found["configurations"] >= found["simulated"] >= len(steps)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PLAN, "--max-stages", "2"], "No such option '--max-stages'"),
        ([*PLAN, "-b", "8,16"], "'8,16' is not a valid integer"),
        (["plan", "vgg-19", "-c", "h100", "-b", "64", "--precision", "fp8"], "No such option '--precision'"),
    ],
)
def test_options_of_profiles_and_of_transformers_are_apart(words: list[str], says: str) -> None:
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 2
    assert says in done.output
