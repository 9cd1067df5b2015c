"""Plans for machines that differ: against every plan of small problems, and against plans for equal machines."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sailor
from click.testing import CliRunner
from refusals import refused

from hpgo.base.divisors import divisors
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.main import group
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes, Words
from hpgo.draw.svg import svg
from hpgo.errors import ArgumentError, ClusterError, InfeasibleError
from hpgo.export.llm_for_flagscale import flagscale_arguments, megatron_arguments
from hpgo.hardware.cluster import Cluster, Link, Node
from hpgo.hardware.mixed import MixedCluster
from hpgo.llm.estimate import estimate_llm
from hpgo.llm.mixed.apart import KindsApart, KindShare
from hpgo.llm.mixed.pipeline import Block, MixedPipeline, PlacedPipeline
from hpgo.llm.mixed.pipeline_search import PipelineSearch, Suffix
from hpgo.llm.mixed.plan import MixedPlanSearch, mixed_problem, plan_mixed_llm
from hpgo.llm.mixed.work_bound import divided_s, work_bound_s
from hpgo.llm.search import plan_llm
from hpgo.model.transformer import Transformer
from hpgo.show import mixed_figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.llm.mixed.problem import MixedProblem

ROUNDING = 1e-9


def part(card: str, gpus: int, memory_bytes: float, *, nic: float = 50e9) -> Cluster:
    """Return one node with some GPUs of a known card and of any memory."""
    known = Cluster.preset(f"{card}:1")
    device = replace(known.nodes[0].device, memory_bytes=memory_bytes)
    return replace(known, name=card, nodes=(Node(device, gpus),), inter=Link(nic, nic * gpus, 9.6e-6))


def model(rng: random.Random, layers: int) -> Transformer:
    hidden, heads = rng.choice([1024, 2048, 4096]), rng.choice([4, 8])
    return Transformer(
        name="toy", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=rng.choice([1000, 32000, 128000]), tied=rng.random() < 0.4,
    )  # fmt: skip


def problem(seed: int) -> MixedProblem:
    rng = random.Random(seed)
    fast = part("h100", rng.choice([2, 4]), rng.choice([4e9, 6e9, 10e9, 80e9]))
    slow = part("a100", 2, rng.choice([4e9, 8e9, 80e9]), nic=rng.choice([1e9, 25e9]))
    # Four GPUs have many more combinations of degrees, so their models are smaller.
    toy = model(rng, rng.randint(4, 8 if fast.devices == 2 else 5))
    return mixed_problem(
        toy, MixedCluster("toy", (fast, slow)), global_batch_size=rng.choice([2, 4, 6]), seq_length=512
    )


def combinations_of(one: MixedProblem) -> Iterator[MixedPipeline]:
    """Yield every pipeline of the search space, written once more without the search's code."""
    for cp, samples in product((1, 2, 4), divisors(one.global_batch_size)):
        for order in permutations(range(len(one.kinds))):
            for settings in product(*(list(one.settings(kind, cp, samples)) for kind in order)):
                blocks = []
                for setting in settings:
                    config = setting.config
                    assert config.dp * config.micro_batch_size == samples
                    gpus = one.kinds[setting.kind].gpus.count
                    blocks.append(Block(setting, gpus // (config.tp * config.cp * config.dp)))
                if not one.model.tied or settings[0].config.tp == settings[-1].config.tp:
                    yield MixedPipeline(one, tuple(blocks))


def placements(one: MixedPipeline) -> Iterator[PlacedPipeline]:
    layers = one.problem.model.layers
    for cuts in combinations(range(1, layers), one.num_stages - 1):
        yield one.with_layers([stop - start for start, stop in pairwise((0, *cuts, layers))])


@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_the_fastest_of_all_pipelines(seed: int) -> None:
    one = problem(seed)
    found = PipelineSearch(one).run()
    fastest_s, bound_s = inf, work_bound_s(one)
    for placed in (placed for pipeline in combinations_of(one) for placed in placements(pipeline)):
        assert placed.step_s >= bound_s
        if placed.step_s < fastest_s and placed.fits:
            fastest_s = placed.step_s
    if found.best is None:
        assert fastest_s == inf
    else:
        assert found.best.step_s == pytest.approx(fastest_s, rel=ROUNDING)
        assert found.best.fits
        assert found.is_proven


def test_some_problems_have_a_pipeline_and_some_have_none() -> None:
    """The test above would prove little if memory never mattered or always did."""
    found = [PipelineSearch(problem(seed)).run().best for seed in range(10)]
    assert 0 < sum(one is None for one in found) < len(found)


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_is_above_a_step(seed: int) -> None:
    one, rng = problem(seed), random.Random(seed)
    every = [pipeline for pipeline in combinations_of(one) if pipeline.num_stages <= one.model.layers]
    for pipeline in rng.sample(every, min(40, len(every))):
        suffix, placed = Suffix(pipeline), rng.choice([*placements(pipeline)])
        start, before_s = 0, 0.0
        for stage, count in enumerate(placed.counts):
            assert suffix.bound_s(stage, start, before_s) <= placed.step_s * (1 + ROUNDING)
            passes_s = pipeline.passes_s(stage)
            before_s += float(passes_s[start + count] - passes_s[start]) + pipeline.end_s(stage)
            before_s += 2 * sum(pipeline.edges[stage]) if stage < len(pipeline.edges) else 0.0
            start += count


@pytest.mark.parametrize("seed", range(4))
def test_memory_by_arrays_is_that_of_each_stage(seed: int) -> None:
    one, rng = problem(seed), random.Random(seed)
    every = [pipeline for pipeline in combinations_of(one) if pipeline.num_stages <= one.model.layers]
    for pipeline in rng.sample(every, min(30, len(every))):
        for placed in [*placements(pipeline)][:8]:
            starts = np.cumsum([0, *placed.counts])
            within = [
                count <= pipeline.max_layers(stage, int(starts[stage])) for stage, count in enumerate(placed.counts)
            ]
            assert all(within) == placed.fits


def halves(name: str, **asked: Any) -> MixedProblem:
    """Return a problem whose two kinds are the halves of a cluster of equal nodes."""
    whole = Cluster.preset(name)
    half = replace(whole, nodes=whole.nodes[: len(whole.nodes) // 2])
    return mixed_problem("llama-3-8b", MixedCluster(name, (half, half)), seq_length=8192, **asked)


def test_a_pipeline_through_two_equal_halves_is_a_pipeline_on_the_whole() -> None:
    one = halves("h100:4", global_batch_size=64)
    setting = next(
        setting
        for setting in one.settings(0, 1, 4)
        if (setting.config.tp, setting.config.dp, setting.config.recompute) == (4, 2, "none")
    )
    other = replace(setting, kind=1)
    placed = MixedPipeline(one, (Block(setting, 2), Block(other, 2))).with_layers([7, 8, 9, 8])
    whole = estimate_llm(
        "llama-3-8b", "h100:4", global_batch_size=64, seq_length=8192, tp=4, pp=4, micro_batch_size=2,
        pipeline_layout=[7, 8, 9, 8], framework="megatron",
    )  # fmt: skip
    assert placed.step_s == pytest.approx(whole.step_s, rel=ROUNDING)
    assert placed.memory_bytes == pytest.approx([stage.peak_bytes for stage in whole.stages], rel=ROUNDING)


def test_two_equal_halves_take_nearly_as_long_as_the_whole() -> None:
    one = halves("h100:4", global_batch_size=64)
    whole = plan_llm("llama-3-8b", "h100:4", global_batch_size=64, seq_length=8192).fastest
    plain = plan_llm(
        "llama-3-8b", "h100:4", global_batch_size=64, seq_length=8192, exclude=["cuda_graph_impl", "vpp"], fix={"pp": 2}
    ).fastest
    found, apart = PipelineSearch(one).run(), KindsApart(one).best()
    assert found.best is not None
    assert apart is not None
    # The search of equal GPUs recomputes some layers of each stage, which needs a memory that nothing lacks here.
    assert found.best.step_s <= plain.step_s * (1 + ROUNDING)
    assert whole.step_s * 0.98 <= min(found.best.step_s, apart.step_s) <= whole.step_s * 1.03


def test_replicas_on_two_equal_halves_are_two_groups_of_hybrid_sharding() -> None:
    one = halves("h100:4", global_batch_size=64)
    half = KindsApart(one).alone(0, 32)
    assert half is not None
    config = half.parallelism
    shares = [KindShare(kind, 32, half) for kind in (0, 1)]
    whole = estimate_llm(
        "llama-3-8b", "h100:4", global_batch_size=64, seq_length=8192, tp=config.tp, cp=config.cp, pp=config.pp,
        micro_batch_size=config.micro_batch_size, dp_replicate=2, zero_stage=1, framework="megatron",
        cuda_graph_impl=config.cuda_graph_impl, recompute=config.recompute,
    )  # fmt: skip
    assert KindsApart(one).step_s(shares) == pytest.approx(whole.step_s, rel=ROUNDING)


@pytest.mark.parametrize("seed", range(4))
def test_small_batches_are_split_as_well_as_possible(seed: int) -> None:
    one = problem(seed)
    apart, count = KindsApart(one), one.global_batch_size
    every = []
    for first in range(1, count):
        parts = [apart.alone(0, first), apart.alone(1, count - first)]
        if parts[0] is not None and parts[1] is not None:
            shares = [KindShare(0, first, parts[0]), KindShare(1, count - first, parts[1])]
            every.append(apart.step_s(shares))
    found = apart.best()
    assert (found is None) == (not every)
    if found is not None:
        assert found.step_s == min(every)


@pytest.mark.parametrize("kinds", [2, 3, 4])
def test_work_is_divided_as_the_linear_program_says(kinds: int) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="needs scipy: pip install scipy")
    rng = np.random.default_rng(kinds)
    for _ in range(20):
        items = int(rng.integers(1, 5))
        work, gpus = rng.uniform(0.1, 10, (items, kinds)), rng.integers(1, 9, kinds)
        # Variables: the share of each item on each kind, then the time.
        on_kind = np.zeros((kinds, items * kinds + 1))
        of_item = np.zeros((items, items * kinds + 1))
        for item, kind in product(range(items), range(kinds)):
            on_kind[kind, item * kinds + kind] = work[item, kind]
            of_item[item, item * kinds + kind] = 1
        on_kind[:, -1] = -gpus
        cost = np.zeros(items * kinds + 1)
        cost[-1] = 1
        solved = optimize.linprog(cost, on_kind, np.zeros(kinds), of_item, np.ones(items))
        assert divided_s(work.tolist(), gpus.tolist()) == pytest.approx(solved.fun, rel=1e-7)


ASKED: dict[str, Any] = {"global_batch_size": 64, "seq_length": 8192}


@pytest.fixture(scope="module")
def mixed() -> MixedPlanSearch:
    return plan_mixed_llm("llama-3-8b", "h100:2+a100:2", **ASKED)


def test_no_way_beats_the_bound_and_both_kinds_beat_one(mixed: MixedPlanSearch) -> None:
    assert mixed.work_bound_s <= min(mixed.steps_s.values())
    assert {"pipeline", "apart", "h100 alone", "a100 alone"} == {*mixed.steps_s}
    assert mixed.best in {"pipeline", "apart"}
    assert mixed.low_s < mixed.step_s < mixed.high_s


def test_the_bound_holds_for_equal_machines() -> None:
    """With equal kinds, it is the work of a step on all GPUs, which the search of equal GPUs can't beat either."""
    for batch in (16, 64):
        bound_s = work_bound_s(halves("h100:2", global_batch_size=batch))
        step_s = plan_llm("llama-3-8b", "h100:2", global_batch_size=batch, seq_length=8192).fastest.step_s
        assert 0.7 * step_s < bound_s <= step_s


def test_experts_are_planned_too() -> None:
    one = mixed_problem("mixtral-8x7b", "h100:1+a100:1", global_batch_size=16, seq_length=4096)
    found = PipelineSearch(one).run()
    assert found.best is not None
    assert found.is_proven
    assert sum(found.best.counts) == 32
    assert work_bound_s(one) < found.best.step_s


def test_layers_that_differ_are_placed_by_their_own_times() -> None:
    """DeepSeek-V2-Lite has a dense first layer. No bound may exceed the simulated step of any of its pipelines."""
    one = mixed_problem("deepseek-v2-lite", "h100:1+a100:1", global_batch_size=16, seq_length=4096)
    found = PipelineSearch(one).run(max_opened=3000)
    assert not one.is_uniform
    assert found.best is not None
    assert found.bound_s <= found.best.step_s
    assert found.best.fits


def options(lines: list[str]) -> dict[str, list[str]]:
    words = [line.removeprefix("--").split() for line in lines]
    return {name: values for name, *values in words}


def check_flagscale(found: MixedPlanSearch) -> None:
    """Check the arguments as FlagScale does: `FSTrainArguments.pre_validate_args` of its commit da4935e."""
    assert found.pipeline is not None
    given = options(flagscale_arguments(found))
    meshes = [int(one) for one in given["hetero-process-meshes"]]
    assert len(meshes) % 5 == 0
    tp, cp, _, dp, pp = (meshes[at::5] for at in range(5))
    samples = dp[0] * int(given["micro-batch-size"][0])
    assert all(samples % one == 0 for one in dp)
    assert found.global_batch_size % samples == 0
    assert len(set(cp)) == 1
    assert int(given["pipeline-model-parallel-size"][0]) == sum(pp)
    if found.transformer.tied:
        assert tp[0] == tp[-1]
    layers = [int(one) for one in given["hetero-pipeline-layer-split"]]
    assert sum(layers) == found.transformer.layers
    assert len(layers) == sum(pp)
    assert len(given["hetero-device-types"]) == len(tp)
    gpus = [one * two * three * four for one, two, three, four in zip(tp, cp, dp, pp, strict=True)]
    assert gpus == [part.gpus for part in found.pipeline.stages]
    for name in ("granularity", "method", "num-layers"):
        rows = [json.loads(row.strip("'")) for row in given.get(f"recompute-{name}-per-stage-micro-batch", [])]
        assert not rows or sum(row[0] for row in rows) == sum(pp)
        assert all(row[1] == found.global_batch_size // samples for row in rows)


def test_flagscale_takes_the_arguments(mixed: MixedPlanSearch) -> None:
    check_flagscale(mixed)
    assert mixed.pipeline is not None
    first, second = mixed.pipeline.stages
    again = replace(first, parallelism=replace(first.parallelism, recompute="full"))
    check_flagscale(replace(mixed, pipeline=replace(mixed.pipeline, stages=(again, second))))


def test_megatron_needs_equal_degrees(mixed: MixedPlanSearch) -> None:
    found = plan_mixed_llm("llama-3-8b", "h100:2+a100:2", **ASKED, framework="megatron")
    assert found.pipeline is not None
    assert mixed.pipeline is not None
    assert found.pipeline.step_s >= mixed.pipeline.step_s
    shapes = {replace(part.parallelism, pp=1) for part in found.pipeline.stages}
    assert len(shapes) == 1
    given = options(megatron_arguments(found))
    assert given["tensor-model-parallel-size"] == [str(next(iter(shapes)).tp)]
    first, second = found.pipeline.stages
    uneven = replace(first, parallelism=replace(first.parallelism, tp=first.parallelism.tp * 2))
    with refused(ArgumentError, "unsupported", "tp"):
        megatron_arguments(replace(found, pipeline=replace(found.pipeline, stages=(uneven, second))))


def test_kinds_of_a_file_and_of_names(tmp_path: Path) -> None:
    file = tmp_path / "a+b.yaml"
    file.write_text(
        "hpgo_cluster: 1\nnodes:\n"
        "  - {count: 2, devices: 8, type: H100-80GB, memory: 80 GB}\n"
        "  - {count: 3, devices: 4, type: A100-80GB, memory: 80 GB}\n"
        "  - {count: 1, devices: 8, type: A100-80GB, memory: 80 GB}\n"
        "intra: 300 GB/s\ninter: {bandwidth: 25 GB/s, collective: 200 GB/s}\n"
    )
    found = MixedCluster.read(file)
    assert [(one.name, one.devices) for one in found.parts] == [
        ("H100-80GB:2", 16), ("A100-80GB x 4:3", 12), ("A100-80GB x 8:1", 8),
    ]  # fmt: skip
    assert MixedCluster.read(str(file)).parts == found.parts
    assert [len(one.nodes) for one in MixedCluster.read(f"h100:1+h100:2+{Cluster.preset('a100:1').name}").parts] == [
        3,
        1,
    ]
    assert MixedCluster.read("h100:2").parts == (Cluster.preset("h100:2"),)
    with refused(ClusterError, "invalid_cluster", 5, 4):
        MixedCluster.read("h100:1+a100:1+h200:1+b200:1+l40s:1")
    assert MixedCluster.read("h100:2 + a100:1").parts == MixedCluster.read("h100:2+a100:1").parts
    with refused(ClusterError, "invalid_cluster", "h100+"):
        MixedCluster.read("h100+")
    with refused(ClusterError, "duplicate", "h100"):
        MixedCluster("twice", (part("h100", 2, 80e9), part("h100", 4, 80e9)))


def test_a_kind_that_does_not_help_is_left_out() -> None:
    toy = model(random.Random(1), 4)
    kinds = part("h100", 2, 80e9), part("a100", 2, 80e9)
    # No layer fits on the third kind.
    more = *kinds, part("l40s", 1, 3.1e9)
    two, three = (
        plan_mixed_llm(toy, MixedCluster("toy", some), global_batch_size=6, seq_length=512) for some in (kinds, more)
    )
    assert three.steps_s == two.steps_s
    assert three.pipeline is not None
    assert [one.kind for one in three.pipeline.stages] == [one.kind for one in two.pipeline.stages]
    assert three.work_bound_s == two.work_bound_s


def test_three_kinds_are_as_fast_as_two_of_them() -> None:
    toy = model(random.Random(2), 5)
    every = part("h100", 2, 80e9), part("a100", 2, 80e9), part("l40s", 1, 40e9)
    asked = {"global_batch_size": 4, "seq_length": 512}
    whole = plan_mixed_llm(toy, MixedCluster("toy", every), **asked)
    for some in combinations(every, 2):
        found = plan_mixed_llm(toy, MixedCluster("toy", some), **asked)
        for way in ("pipeline", "apart"):
            assert whole.steps_s[way] <= found.steps_s[way]


def test_sailors_plans_use_its_gpus() -> None:
    for _, _, counts, replicas in sailor.SAILOR:
        assert sum(counts) == sailor.LAYERS
        assert len(counts) == len(replicas)
        assert len({sum(count for _, count in row) for row in replicas}) == 1
        for kind in sailor.KINDS:
            used = sum(tp * count for row in replicas for (name, tp), count in row if name == kind)
            assert used <= sailor.GPUS


def test_sailors_steps_are_passes_and_updates() -> None:
    assert sailor.step_s([(1.0, 2.0, 0.5)], 4) == 12.5
    # Three micro-batches on two equal stages: 3 · 3 s, one more forward and backward, and the update.
    assert sailor.step_s([(1.0, 2.0, 0.5), (1.0, 2.0, 0.5)], 3) == pytest.approx(12.5)


def test_what_is_refused() -> None:
    with refused(ClusterError, "mismatch", "h100:2"):
        plan_mixed_llm("llama-3-8b", "h100:2", **ASKED)
    with refused(InfeasibleError, "insufficient_memory", "llama-3-70b", "8 h100", "8 a100"):
        plan_mixed_llm("llama-3-70b", "h100:1+a100:1", **ASKED, reserved_bytes=70e9)


def drawn(found: MixedPlanSearch) -> str:
    return svg(mixed_figure.scene(found), DrawOptions())


def test_the_page_shows_the_picture(mixed: MixedPlanSearch) -> None:
    shown = Path(__file__).parent.parent / "docs/pictures/mixed.svg"
    if os.environ.get("HPGO_REWRITE_GOLDEN"):
        shown.write_text(drawn(mixed), encoding="utf-8")
    assert drawn(mixed) == shown.read_text(encoding="utf-8"), "look at it, then set HPGO_REWRITE_GOLDEN=1"


def test_the_picture_has_the_step_and_the_memory_of_each_stage(mixed: MixedPlanSearch) -> None:
    assert mixed.pipeline is not None
    scene = mixed_figure.scene(mixed)
    texts = [text for item in scene.items if isinstance(item, Words) for text in item.texts]
    for step_s in mixed.steps_s.values():
        assert format_seconds(step_s) in texts
    for part in mixed.pipeline.stages:
        for used in part.peak_bytes:
            assert f"{format_bytes(used)} of {format_bytes(part.capacity_bytes)}" in texts
    # Bars of memory lie on the bars of the memory that there is, in proportion.
    free = [item for item in scene.items if isinstance(item, Boxes) and item.style == "free"]
    whole = {(float(item.x[0]), float(item.y[0])): float(item.width[0]) for item in free}
    used = [
        float(item.width[0]) / whole[key]
        for item in scene.items
        if isinstance(item, Boxes) and item.style.startswith("stage-")
        and (key := (float(item.x[0]), float(item.y[0]))) in whole
    ]  # fmt: skip
    shares = [used / part.capacity_bytes for part in mixed.pipeline.stages for used in part.peak_bytes]
    shares += [share.estimate.fullest.peak_bytes / share.estimate.capacity_bytes for share in mixed.shares]
    assert used == pytest.approx(shares)
    assert max(float((item.y + item.height).max()) for item in scene.items if isinstance(item, Boxes)) < scene.height_px


def test_the_timeline_of_a_pipeline_is_its_step(mixed: MixedPlanSearch) -> None:
    assert mixed.pipeline is not None
    timeline = mixed.pipeline.timeline()
    assert timeline.makespan_s == mixed.pipeline.step_s
    assert timeline.row_names == ("stage 0 (16 × a100)", "stage 1 (16 × h100)")
    busy = [share for part in mixed.pipeline.stages for share in part.busy_share]
    for stage, share in enumerate(busy):
        spent = (timeline.end_s - timeline.start_s)[timeline.rank == stage].sum() / timeline.makespan_s
        assert spent == pytest.approx(share)


def test_answers_without_a_pipeline_or_replicas_are_drawn(mixed: MixedPlanSearch) -> None:
    alone = replace(mixed, pipeline=None, shares=(), apart_s=None)
    assert "one pipeline" not in drawn(alone)
    assert "h100 alone" in drawn(alone)


def test_the_command_prints_and_writes_all_ways(mixed: MixedPlanSearch, tmp_path: Path) -> None:
    words = ["llm", "plan", "llama-3-8b", "-c", "h100:2+a100:2", "-b", "64", "--seq-length", "8192"]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    assert all(line in done.output for line in flagscale_arguments(mixed))
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    done = CliRunner().invoke(group, [*words, "--json", "-o", str(plan), "-o", str(picture)])
    facts = json.loads(done.stdout)
    assert plan.read_text(encoding="utf-8") == done.stdout
    assert picture.read_text(encoding="utf-8") == drawn(mixed)
    # Commands that read plans name what the file is.
    for command in (["export", str(plan), "--to", "megatron", "-o", "job/"], ["llm", "explain", str(plan)]):
        failure = CliRunner().invoke(group, command).exception
        assert "a plan of a transformer for nodes that differ" in str(failure)
    assert facts["steps_s"] == mixed.steps_s
    assert facts["pipeline"]["arguments"] == flagscale_arguments(mixed)
    assert facts["kinds"] == [{"kind": "h100", "gpus": 16}, {"kind": "a100", "gpus": 16}]
    for extra in (["--fix", "tp=4"], ["--devices", "8"], ["-o", "job/"], ["--framework", "torchtitan"]):
        done = CliRunner().invoke(group, [*words, *extra])
        assert done.exit_code == 1, extra
        assert "Traceback" not in done.output
