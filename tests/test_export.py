"""Plans for frameworks: what they accept, what is refused, and that the price is that of what will run."""

from __future__ import annotations

import ast
import csv
import dataclasses
import importlib.util
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo import export

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parent.parent
TRAINING = [f"{target.name}@{target.version}" for target in export.TARGETS if target.framework]
WITH_BLOCKS = [name for name in TRAINING if not name.startswith(("torch@", "deepspeed"))]
FAMILY = [name for name in TRAINING if name.startswith(("megatron", "nemo", "verl", "ms-swift"))]

ANY = hpgo.MemoryModel(1, 2.5)
"""Memory of no optimizer that has a name, which all targets take: the precision is the user's then."""


def model(names: Sequence[str], *, edges: Iterable[tuple[str, str]] | None = None, name: str = "toy") -> hpgo.Profile:
    """Layers of a second forward and two back, in a row unless edges are given."""
    layers = tuple(hpgo.Layer(layer, layer, (1.0,), (2.0,), (8.0,), 8.0, (32.0,)) for layer in names)
    return hpgo.Profile(name, (1,), layers, tuple(itertools.pairwise(names) if edges is None else edges))


def blocks(count: int) -> list[str]:
    return ["embed", *(f"block.{index}" for index in range(count)), "head"]


def priced(
    counts: Sequence[int],
    *,
    replicas: int = 1,
    share: int = 1,
    micro_batches: int = 2,
    profile: hpgo.Profile | None = None,
    memory: str = "16 GB",
    weights: hpgo.MemoryModel | None = None,
    cluster: hpgo.Cluster | None = None,
    **options: Any,
) -> hpgo.Plan:
    """A plan with so many blocks on each stage, the embedding on the first and the head on the last."""
    stages = len(counts)
    sizes = [count + (at == 0) + (at == stages - 1) for at, count in enumerate(counts)]
    cluster = cluster or hpgo.Cluster.of(
        nodes=stages, devices_per_node=replicas, intra_gbit_s=100, inter_gbit_s=1e-7, memory=memory
    )
    return hpgo.evaluate(
        profile or model(blocks(sum(counts))),
        cluster,
        [(size, range(at * replicas, (at + 1) * replicas)) for at, size in enumerate(sizes)],
        global_batch_size=micro_batches * share * replicas,
        pipeline_micro_batch_size=share * replicas,
        memory=weights or ANY,
        **options,
    )


def main(plan: hpgo.Plan | hpgo.Program | hpgo.LlmPlan, target: str) -> str:
    return next(iter(export.files(plan, target).values()))


def assigned(text: str) -> dict[str, Any]:
    """What a Python module assigns: names, and settings such as `training.local_batch_size`, that are literals."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            try:
                found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
            except ValueError:
                continue  # computed
    return found


def arguments(text: str) -> dict[str, str]:
    """Options as Megatron's parser sees them, after a shell has read the file."""
    words = shlex.split(text, comments=True)
    starts = [at for at, word in enumerate(words) if word.startswith("--")] + [len(words)]
    return {words[at].removeprefix("--"): " ".join(words[at + 1 : end]) for at, end in itertools.pairwise(starts)}


def settings_of(plan: hpgo.Plan | hpgo.Program, target: str) -> dict[str, Any]:
    """What a target of Megatron's family is told, by the names of Megatron's configuration."""
    text = main(plan, target)
    if target.startswith("megatron@"):
        told: dict[str, Any] = {key.replace("-", "_"): value or "True" for key, value in arguments(text).items()}
    elif target.startswith("verl"):
        pairs = (word.lstrip("+").split("=", 1) for word in shlex.split(text, comments=True))
        told = {key.rpartition(".")[2]: value.strip("'") for key, value in pairs}
        told["global_batch_size"], told["micro_batch_size"] = told["train_batch_size"], told["micro_batch_size_per_gpu"]
    elif target.startswith("nemo"):
        told = {key.rpartition(".")[2]: value for key, value in assigned(text).items()}
    else:
        loaded = yaml.safe_load(text)
        told = {}
        for key, value in loaded.items():
            told |= value if isinstance(value, dict) else {key: value}
    return {key: str(value) for key, value in told.items() if str(value) not in {"None", "False", "null", "none"}}


@pytest.fixture(scope="module")
def bert() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64, memory=ANY)


@pytest.fixture(scope="module")
def uneven() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)


# --- What is written is what was planned ------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_launcher_gets_the_blocks_the_batch_and_the_grid_of_the_plan(
    counts: list[int], replicas: int, share: int, recompute: bool, shard: bool, overlap: bool
) -> None:
    plan = priced(
        counts,
        replicas=replicas,
        share=share,
        recompute=recompute,
        overlap=overlap,
        weights=dataclasses.replace(ANY, shard_optimizer=shard),
    )
    batch, stages = 2 * share * replicas, len(counts)
    for target in FAMILY:
        told = settings_of(plan, target)
        assert (told["global_batch_size"], told["micro_batch_size"]) == (str(batch), str(share))
        assert told["tensor_model_parallel_size"] == "1"
        assert told["pipeline_model_parallel_size"] == str(stages)
        assert ("pipeline_model_parallel_layout" in told) == (stages > 1)
        if stages > 1:
            layout = hpgo.PipelineLayout.from_text(told["pipeline_model_parallel_layout"])
            assert [stage.count("t") for stage in layout.stages] == counts
            joined = "".join(layout.stages)
            assert (joined[0], joined[-1]) == ("E", "L")
            assert joined.count("E") == joined.count("L") == 1
        assert (told.get("recompute_granularity") == "full") == recompute
        if recompute:
            assert all(count % int(told["recompute_num_layers"]) == 0 for count in counts)
        assert ("use_distributed_optimizer" in told) == (shard and replicas > 1)
        assert ("overlap_grad_reduce" in told) == (overlap and replicas > 1)
        assert ("overlap_param_gather" in told) == (shard and overlap and replicas > 1)
    assert settings_of(plan, "megatron@0.16")["num_layers"] == str(sum(counts))

    job = tomllib.loads(export.torchtitan(plan, "0.2"))
    values = assigned(export.torchtitan(plan, "0.3"))
    for head, training, parallelism in (
        ("output", job["training"], job["parallelism"]),
        ("lm_head", _section(values, "training"), _section(values, "parallelism")),
    ):
        passes = 2 if stages > 1 else 1
        assert (training["global_batch_size"], training["local_batch_size"]) == (batch, passes * share)
        assert parallelism["pipeline_parallel_degree"] == stages
        replicated, split = parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]
        assert replicated * split == replicas
        # 0.2 can't replicate beside a pipeline.
        assert (split > 1) == (replicas > 1 and (shard or (head == "output" and stages > 1)))
        if stages > 1:
            assert parallelism["pipeline_parallel_microbatch_size"] == share
            parts = parallelism.get("module_fqns_per_model_part") or values["PARTS"]
            assert [sum(name.startswith("layers.") for name in part) for part in parts] == counts
            joined_parts = [name for part in parts for name in part]
            names = ["tok_embeddings", *(f"layers.{index}" for index in range(sum(counts))), "norm", head]
            assert joined_parts == names
    assert job["activation_checkpoint"]["mode"] == ("full" if recompute else "none")
    assert ("FullAC.Config()" in export.torchtitan(plan, "0.3")) == recompute
    assert values["SHAPE"] == {"layers": sum(counts)}

    values = assigned(export.deepspeed(plan))
    sizes = [len(stage.layers) for stage in plan.stages]
    assert [end - begin for begin, end in itertools.pairwise(values["PARTS"])] == sizes
    assert values["LAYERS"] == blocks(sum(counts))
    config = values["CONFIG"]
    assert config["train_batch_size"] == batch
    assert config["train_batch_size"] == (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * values["REPLICAS"]
    )
    assert config["zero_optimization"]["stage"] == (1 if shard and replicas > 1 else 0)
    assert values["CHECKPOINT_INTERVAL"] == (max(sizes) if recompute else 0)

    written = export.files(plan, "torch")
    values = assigned(written["planned.py"])
    assert values["LAYERS"] == [list(stage.layers) for stage in plan.stages]
    assert (values["REPLICAS"], values["SAMPLES_PER_REPLICA"], values["MICRO_BATCHES"]) == (replicas, share, 2)
    assert (values["GLOBAL_BATCH_SIZE"], values["RECOMPUTE"]) == (batch, [recompute] * stages)
    assert values["SHARD_OPTIMIZER"] == (shard and replicas > 1)
    assert hpgo.Schedule.from_text(written["order.csv"]) == plan.program().schedule


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}


@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b", "gpipe", "zb_h1", "zb"])
def test_launchers_that_read_orders_get_those_of_the_plan(schedule: str) -> None:
    plan = priced([2, 1, 2], micro_batches=6, schedule=schedule)
    for target in ("torch", "torchtitan@0.2", "torchtitan@0.3"):
        written = export.files(plan, target)
        assert hpgo.Schedule.from_text(written["order.csv"]) == plan.program().schedule
    assert tomllib.loads(export.torchtitan(plan, "0.2"))["parallelism"]["pipeline_parallel_schedule_csv"] == "order.csv"


@pytest.mark.parametrize("target", ["torchtitan@0.2", "torchtitan@0.3"])
def test_torchtitan_sums_up_passes_where_there_is_no_pipeline(target: str) -> None:
    plan = priced([3], replicas=2, share=2, micro_batches=4)
    text = main(plan, target)
    training = tomllib.loads(text)["training"] if "0.2" in target else _section(assigned(text), "training")
    assert training == {"global_batch_size": 16, "local_batch_size": 2}
    assert list(export.files(plan, target)) == ["job.toml" if "0.2" in target else "planned.py"]


def test_programs_with_several_stages_a_rank_are_virtual_stages() -> None:
    built = hpgo.schedule("interleaved", ranks=2, micro_batches=4)
    names = blocks(6)
    stages = [(names[:2], (0, 1)), (names[2:4], (2, 3)), (names[4:6], (0, 1)), (names[6:], (2, 3))]
    program = hpgo.program(built, stages, pipeline_micro_batch_size=4, global_batch_size=16)
    for target in FAMILY:
        told = settings_of(program, target)
        assert told["pipeline_model_parallel_layout"] == "Et|t*2|t*2|tL"
        assert told["pipeline_model_parallel_size"] == "2"
    assert settings_of(program, "verl@0.9")["virtual_pipeline_model_parallel_size"] == "2"
    job = tomllib.loads(export.torchtitan(program, "0.2"))["parallelism"]
    assert (job["pipeline_parallel_schedule"], job["pipeline_parallel_degree"]) == ("Interleaved1F1B", 2)
    assert assigned(main(program, "torch"))["RANK_OF_STAGE"] == [0, 1, 0, 1]
    # Larger groups are told, and orders that Megatron does not run are refused.
    built = hpgo.schedule("interleaved", ranks=2, micro_batches=8, group_size=4)
    groups = hpgo.program(built, stages, pipeline_micro_batch_size=4, global_batch_size=32)
    for target in FAMILY:
        told = settings_of(groups, target)
        name = "virtual_pipeline" if target.startswith("megatron@") else "vp"
        assert told[f"microbatch_group_size_per_{name}_stage"] == "4"
    built = hpgo.Schedule.from_text(
        hpgo.schedule("looped_bfs", ranks=2, micro_batches=4, virtual_stages_per_rank=2).to_text(), name="interleaved"
    )
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        export.megatron(hpgo.program(built, stages, pipeline_micro_batch_size=4, global_batch_size=16))
    v_shape = hpgo.schedule("zb_v", ranks=2, micro_batches=4)
    stages = [(names[:2], (0, 1)), (names[2:4], (2, 3)), (names[4:6], (2, 3)), (names[6:], (0, 1))]
    program = hpgo.program(v_shape, stages, pipeline_micro_batch_size=4, global_batch_size=16)
    assert 'pipeline_parallel_schedule = "ZBVZeroBubble"' in export.torchtitan(program, "0.2")
    with refused(hpgo.errors.ArgumentError, "unsupported", "zb_v"):
        export.megatron(program)


def test_two_copies_of_a_model_are_refused() -> None:
    built = hpgo.schedule("chimera", ranks=2, micro_batches=4)
    stages = [(["block.0"], [0]), (["block.1"], [1]), (["block.0"], [1]), (["block.1"], [0])]
    program = hpgo.program(built, stages, pipeline_micro_batch_size=4, global_batch_size=16)
    for target in TRAINING:
        with pytest.raises(hpgo.errors.ArgumentError):
            export.files(program, target)


def test_the_shell_hands_each_argument_on_as_it_is(bert: hpgo.Plan, tmp_path: Path) -> None:
    # Files that a bare `*` or `|` would match or make.
    (tmp_path / "Et28t20L").touch()
    (tmp_path / "arguments.txt").write_text(text := main(bert, "verl"), encoding="utf-8")
    script = "grep -v '^#' arguments.txt | xargs printf '%s\\n'"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == shlex.split(text, comments=True)
    assert "pipeline_model_parallel_layout='Et*28|t*20L'" in done.stdout
    (tmp_path / "arguments.txt").write_text(text := export.megatron(bert), encoding="utf-8")
    for script in (
        "grep -v '^#' arguments.txt | xargs printf '%s\\n'",
        'eval "arguments=($(cat arguments.txt))"; printf "%s\\n" "${arguments[@]}"',
    ):
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == shlex.split(text, comments=True)
    assert done.stdout.splitlines()[-1] == "Et*28|t*20L"


# --- What will run is what is priced ----------------------------------------------------------------------------------


def said_step_s(plan: hpgo.Plan, target: str) -> float:
    found = re.search(r"predicted step (\S+) s", main(plan, target))
    assert found
    return float(found[1])


def test_a_header_prices_the_schedule_that_the_launcher_runs() -> None:
    profile, cluster = model(blocks(4)), hpgo.Cluster.of(nodes=4, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=2e-8)
    stages = [(2, [0]), (1, [1]), (1, [2]), (2, [3])]
    options: dict[str, Any] = {"global_batch_size": 16, "pipeline_micro_batch_size": 1, "memory": ANY}
    plan = hpgo.evaluate(profile, cluster, stages, **options)
    plain = hpgo.evaluate(profile, cluster, stages, schedule="1f1b", **options)
    assert plain.step_s > 1.05 * plan.step_s, "the question must tell them apart"
    for target in TRAINING:
        runs = plan if target.startswith("torch") else plain
        assert said_step_s(plan, target) == pytest.approx(runs.step_s, rel=1e-3), target
    assert "not the plan's `eager_1f1b`" in export.megatron(plan)
    assert "the plan itself would take" in export.megatron(plan)
    assert "the plan itself" not in main(plan, "torch")


def test_a_header_prices_gradients_where_the_launcher_sums_them() -> None:
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=4, intra_gbit_s=1e-7, inter_gbit_s=1)
    options = {"replicas": 2, "cluster": cluster, "schedule": "1f1b"}
    early, late = priced([3, 3], **options), priced([3, 3], overlap=False, **options)
    assert late.step_s > 1.05 * early.step_s, "the question must tell them apart"
    for target in TRAINING:
        overlaps = target in FAMILY
        assert said_step_s(early, target) == pytest.approx((early if overlaps else late).step_s, rel=1e-3), target
        assert ("reduces gradients after all backward passes" in main(early, target)) == (not overlaps)
        assert said_step_s(late, target) == pytest.approx(late.step_s, rel=1e-3)
    # Without a pipeline torchtitan sums them in each pass.
    one = priced([3], replicas=2, micro_batches=5, cluster=cluster.first(2))
    (stage,) = one.stages
    for target in ("torchtitan@0.2", "torchtitan@0.3"):
        each_s = stage.forward_s + stage.backward_s + stage.exposed_grad_reduce_s
        assert said_step_s(one, target) == pytest.approx(5 * each_s, rel=1e-3)
        assert "in each of the 5 passes" in main(one, target)


@pytest.mark.parametrize("target", ["torch", "torchtitan@0.2", "torchtitan@0.3", "megatron", "deepspeed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_was_planned_for_a_launcher_is_exported_at_the_price_of_the_plan(target: str, recompute: bool) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework=target, recompute=recompute)
    assert said_step_s(plan, target) == pytest.approx(plan.step_s, rel=1e-3)
    assert "the plan itself" not in main(plan, target)


def test_headers_say_what_was_tried_and_that_gradients_are_clipped(bert: hpgo.Plan) -> None:
    for target in export.TARGETS:
        if target.framework:
            text = main(bert, f"{target.name}@{target.version}")
            assert f"for {target.title} {target.version}" in text
            assert f"tested with {target.tested}" in text
            assert "clipped" in text or target.name == "torch"
    assert assigned(export.deepspeed(bert))["CONFIG"]["gradient_clipping"] == 1.0


def test_the_table_of_launchers_of_the_version_before_works_with_a_warning(bert: hpgo.Plan) -> None:
    with pytest.warns(DeprecationWarning, match="use `hpgo.export.TARGETS`"):
        frameworks = export.FRAMEWORKS
    assert frameworks["megatron"](bert) == export.megatron(bert)
    with pytest.raises(AttributeError, match="nothing"):
        _ = export.nothing


# --- What can't run is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TRAINING)
def test_uneven_replication_is_refused_with_the_way_out(target: str, uneven: hpgo.Plan) -> None:
    with refused(hpgo.errors.ArgumentError, "unsupported", "15", "1") as caught:
        export.files(uneven, target)
    assert "for_rank" in caught.value.hint


@pytest.mark.parametrize("target", TRAINING)
def test_a_plan_that_does_not_fit_is_refused(target: str) -> None:
    plan = priced([2, 2], memory="100 B")
    assert not plan.fits
    with refused(hpgo.errors.InfeasibleError, "insufficient_memory", "0"):
        export.files(plan, target)


@pytest.mark.parametrize("target", WITH_BLOCKS)
@pytest.mark.parametrize("name", ["gnmt-16", "resnet-50", "vgg-19", "amoebanet-18"])
def test_a_model_without_a_row_of_blocks_is_refused(target: str, name: str) -> None:
    profile = hpgo.read_profile(name)
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory="900 GB")
    half = len(profile.layers) // 2
    stages = [(half, [0]), (len(profile.layers) - half, [1])]
    plan = hpgo.evaluate(profile, cluster, stages, global_batch_size=512, pipeline_micro_batch_size=128)
    assert plan.fits
    with pytest.raises(hpgo.errors.ArgumentError, match=r"is not one of the blocks|no numbered layers|outside them"):
        export.files(plan, target)


@pytest.mark.parametrize("target", WITH_BLOCKS)
@pytest.mark.parametrize(
    "rows", [[("dense", 0, 3), ("moe", 3, 12)], [("encoder", 0, 4), ("decoder", 0, 4)], [("stem", 0, 1), ("h", 0, 6)]]
)
def test_no_numbered_layer_is_lost(target: str, rows: list[tuple[str, int, int]]) -> None:
    names = ["embed", *(f"{stem}.{at}" for stem, begin, end in rows for at in range(begin, end)), "head"]
    plan = priced([4, len(names) - 6], profile=model(names))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "toy"):
        export.files(plan, target)


@pytest.mark.parametrize("target", WITH_BLOCKS)
def test_no_costly_layer_outside_the_blocks_is_lost(target: str) -> None:
    names = ["stem", "pool", "wide", "block.0", "block.1", "narrow", "average", "head"]
    plan = priced([3, 3], profile=model(names))
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "block.…", "toy", "stem"):
        export.files(plan, target)


def test_several_tensors_that_cross_a_cut_are_listed_for_deepspeed_and_torch() -> None:
    names = blocks(4)
    plan = priced([2, 2], profile=model(names, edges=[*itertools.pairwise(names), ("embed", "head")]))
    for target in ("deepspeed", "torch"):
        assert assigned(main(plan, target))["PASSED_ON"][0] == ["embed", "block.1"]
    assert "several tensors cross a cut" in export.deepspeed(plan)
    assert "several tensors" not in export.deepspeed(priced([2, 2]))


def test_recomputing_block_by_block_must_fit_too() -> None:
    options = {"profile": model(blocks(16)), "micro_batches": 8, "recompute": True, "schedule": "gpipe"}
    roomy = priced([8, 8], **options)
    need = max(stage.memory.total_bytes for stage in roomy.stages)
    tight = priced([8, 8], memory=f"{need + 8} B", **options)
    assert tight.fits
    main(tight, "torch")  # recomputes whole stages, as the plan does
    for target in ("torchtitan@0.2", "torchtitan@0.3"):
        main(roomy, target)
        with refused(hpgo.errors.InfeasibleError, "insufficient_memory", "1"):
            export.files(tight, target)


def on_groups(gpus: int, shard: bool = False, stages: Sequence[int] = (2, 2)) -> hpgo.Plan:
    """A plan whose devices are groups of so many GPUs, two of them a stage."""
    profile = dataclasses.replace(model(blocks(sum(stages))), gpus_per_device=gpus)
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=2, intra_gbit_s=1, inter_gbit_s=1, gpus_per_device=gpus)
    weights = dataclasses.replace(ANY, shard_optimizer=shard)
    return priced(stages, replicas=2, profile=profile, cluster=cluster, weights=weights)


def test_groups_of_gpus_become_the_tensor_parallel_degree_or_are_refused() -> None:
    plan = on_groups(4)
    for target in FAMILY:
        assert settings_of(plan, target)["tensor_model_parallel_size"] == "4"
    for version in ("0.2", "0.3"):
        assert re.search(r"tensor_parallel_degree = 4$", export.torchtitan(plan, version), re.MULTILINE)
    for target in ("deepspeed", "torch"):
        with refused(hpgo.errors.ArgumentError, "unsupported", "4", "GPUs"):
            export.files(plan, target)
    # Without a pipeline, torchtitan 0.2 replicates nothing that tensor parallelism splits.
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        export.torchtitan(on_groups(4, stages=[4]), "0.2")
    assert "data_parallel_shard_degree = 2" in export.torchtitan(on_groups(4, shard=True, stages=[4]), "0.2")


def test_a_profile_of_groups_needs_a_cluster_of_the_same(tmp_path: Path) -> None:
    profile, cluster = on_groups(4).assumed.profile, on_groups(4).assumed.cluster
    assert isinstance(profile, hpgo.Profile)
    assert isinstance(cluster, hpgo.Cluster)
    hpgo.write_profile(profile, tmp_path / "profile.yaml")
    (tmp_path / "cluster.yaml").write_text(cluster.yaml(), encoding="utf-8")
    assert hpgo.read_profile(tmp_path / "profile.yaml").gpus_per_device == 4
    assert hpgo.Cluster.read(tmp_path / "cluster.yaml") == cluster
    single = dataclasses.replace(profile, gpus_per_device=1)
    for call in (hpgo.plan, hpgo.exhaustive):
        with refused(hpgo.errors.ArgumentError, "mismatch", "2x2", "1", "GPU", "4", "GPUs"):
            call(single, cluster, global_batch_size=4)
    with refused(hpgo.errors.ArgumentError, "mismatch"):
        hpgo.partition(single, cluster)
    with refused(hpgo.errors.ArgumentError, "unsupported", "4", "GPUs"):
        hpgo.write_profile(profile, tmp_path / "profile.txt")
    for wrong in (0, 2.5, None, 10**9):
        with refused(hpgo.errors.ProfileError, "invalid_profile", "gpus_per_device"):
            dataclasses.replace(profile, gpus_per_device=wrong)
        with refused(hpgo.errors.ClusterError, "invalid_cluster", "gpus_per_device"):
            dataclasses.replace(cluster, gpus_per_device=wrong)


def test_a_plan_that_does_not_say_what_it_assumed_is_refused() -> None:
    plan = dataclasses.replace(priced([2, 2], replicas=2), assumptions=None)
    for target in TRAINING:
        with refused(hpgo.errors.ArgumentError, "missing") as caught:
            export.files(plan, target)
        assert "make it again" in caught.value.hint


def test_groups_of_gpus_are_told_to_people_and_processes() -> None:
    plan = on_groups(4)
    assert " on 4 devices of 4 GPUs," in " ".join(str(plan).split())
    program = plan.program()
    assert hpgo.Program.from_json(program.to_json()).gpus_per_device == program.for_rank(0).gpus_per_device == 4
    assert settings_of(program, "megatron@0.16")["tensor_model_parallel_size"] == "4"


def test_plans_keep_what_exports_need_in_their_files() -> None:
    for plan in (on_groups(4, shard=True), priced([2, 2], replicas=2, overlap=False, recompute=True)):
        for embed in (True, False):
            read = hpgo.Plan.from_json(plan.to_json(embed=embed))
            for target in WITH_BLOCKS:
                assert export.files(read, target) == export.files(plan, target)


@pytest.mark.parametrize("target", ["megatron@0.1", "torchtitan@0.4", "torchtitan@", "torch@1", "deepspeed@x\ny"])
def test_versions_that_nobody_tried_are_refused(target: str, bert: hpgo.Plan) -> None:
    with refused(hpgo.errors.ArgumentError, "unknown_name") as caught:
        export.files(bert, target)
    assert "use `" in caught.value.hint


def test_an_unknown_target_is_told_from_a_near_one(bert: hpgo.Plan) -> None:
    with refused(hpgo.errors.ArgumentError, "unknown_name", "megatorn") as caught:
        export.files(bert, "megatorn")
    assert "megatron" in caught.value.hint


def test_a_schedule_that_a_launcher_lacks_is_refused() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule="gpipe", max_stages=2)
    for target in ("deepspeed", *FAMILY):
        with refused(hpgo.errors.ArgumentError, "unsupported", "gpipe"):
            export.files(plan, target)


# --- Where each rank belongs ------------------------------------------------------------------------------------------


def test_ranks_off_the_order_of_devices_are_told_where_to_start() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.evaluate(profile, cluster, [(26, (0, 8)), (27, (1, 9))], global_batch_size=64, memory=ANY)
    for target in TRAINING:
        written = export.files(plan, target)
        rows = list(csv.DictReader(io.StringIO(written["ranks.csv"])))
        assert [(row["rank"], row["node"], row["CUDA_VISIBLE_DEVICES"]) for row in rows] == [
            ("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"),
        ]  # fmt: skip
        assert "ranks.csv" in main(plan, target)


def test_each_gpu_of_a_group_is_a_rank() -> None:
    plan = on_groups(2)
    assumed = plan.assumed
    assert isinstance(assumed.profile, hpgo.Profile)
    assert isinstance(assumed.cluster, hpgo.Cluster)
    stages = [(3, (2, 3)), (3, (0, 1))]
    swapped = hpgo.evaluate(assumed.profile, assumed.cluster, stages, global_batch_size=4, pipeline_micro_batch_size=2)
    rows = list(csv.reader(io.StringIO(export.files(swapped, "megatron")["ranks.csv"])))[1:]
    assert [tuple(map(int, row)) for row in rows] == [
        (0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 0, 0), (5, 0, 1), (6, 0, 2), (7, 0, 3),
    ]  # fmt: skip
    assert "ranks.csv" not in export.files(plan, "megatron")


def test_no_file_of_ranks_is_written_where_they_are_in_order(bert: hpgo.Plan) -> None:
    for target in TRAINING:
        assert "ranks.csv" not in export.files(bert, target)


# --- Names are data ---------------------------------------------------------------------------------------------------

NASTY = [
    "x\nimport os; os._exit(3)",
    "x\r\n[training]\r\nlocal_batch_size = 1",
    "'''\nraise SystemExit(3)\n'''",
    '"""; raise SystemExit(3); """',
    "$(exit 3)`exit 3`'; exit 3; '",
    "-*- coding: utf-7 -*-",
    "\x1b]0;title\x07\x00\x85\u2028\u202e",
    "order.csv",
    "--num-layers 1",
]


# A number would make a layer of that name a part of a block.
UNNUMBERED = st.text(min_size=1, max_size=20).filter(lambda text: not any(map(str.isdecimal, text)))


@settings(max_examples=25)
@given(st.sampled_from(NASTY) | UNNUMBERED, st.text(max_size=20), st.text(max_size=20))
@example(NASTY[0], NASTY[1], NASTY[2])
@example(NASTY[3], NASTY[4], NASTY[5])
@example(NASTY[6], NASTY[7], NASTY[8])
def test_names_of_profiles_clusters_and_layers_are_never_code(layer: str, profile_name: str, cluster_name: str) -> None:
    embed = f"{layer}!"  # no block
    names = [embed, *(f"block.{index}" for index in range(4)), f"{layer}?"]
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1, name=cluster_name)
    plain = priced([2, 2], cluster=hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1))
    plan = priced([2, 2], profile=model(names, name=profile_name), cluster=cluster)
    for target in TRAINING:
        for name, text in export.files(plan, target).items():
            assert all(letter.isprintable() or letter == "\n" for letter in text), (target, name)
            text.encode()
            usual = export.files(plain, target)[name]
            if name.endswith(".py"):
                own, other = ast.parse(text), ast.parse(usual)
                assert list(map(type, own.body)) == list(map(type, other.body))
                found = assigned(text)
                assert {key: found[key] for key in found if key not in {"LAYERS", "PASSED_ON"}} == {
                    key: value for key, value in assigned(usual).items() if key not in {"LAYERS", "PASSED_ON"}
                }
                if "LAYERS" in found:
                    listed = [row if isinstance(row, list) else [row] for row in found["LAYERS"]]
                    assert [one for row in listed for one in row] == names
            elif name.endswith(".toml"):
                assert tomllib.loads(text) == tomllib.loads(usual)
            elif name.endswith(".yaml"):
                assert yaml.safe_load(text) == yaml.safe_load(usual)
            elif name.endswith(".txt"):
                assert shlex.split(text, comments=True) == shlex.split(usual, comments=True)
                subprocess.run(["bash", "-n"], input=text.encode(), timeout=60, check=True)
                read = 'eval "words=($(cat))"; printf "%s\\n" "${words[@]}"'
                done = subprocess.run(["bash", "-c", read], input=text.encode(), capture_output=True, check=True)
                assert done.stdout.decode().splitlines() == shlex.split(text, comments=True)
            else:
                assert text == usual


# --- PyTorch runs it --------------------------------------------------------------------------------------------------


def test_pytorch_runs_the_module_to_the_gradients_of_one_process(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    names = blocks(4)
    skipping = model(names, edges=[*itertools.pairwise(names), ("embed", "head")])
    there, back = [(0, 1), (2, 3)] * 2, [(0, 1), (2, 3), (2, 3), (0, 1)]
    layers = [names[:2], names[2:3], names[3:4], names[4:]]

    def put(schedule: str, devices: Sequence[tuple[int, int]], **options: Any) -> hpgo.Program:
        built = hpgo.schedule(schedule, ranks=2, micro_batches=4)
        stages = list(zip(layers, devices, strict=True))
        return hpgo.program(built, stages, pipeline_micro_batch_size=6, global_batch_size=24, **options)

    jobs: dict[str, hpgo.Plan | hpgo.Program] = {
        "skip": priced(
            [2, 2],
            replicas=2,
            micro_batches=5,
            profile=skipping,
            weights=dataclasses.replace(ANY, shard_optimizer=True),
        ),
        "zb": priced([2, 2], replicas=2, share=2, micro_batches=4, schedule="zb"),
        "one stage": priced([4], replicas=4, micro_batches=3, recompute=True),
        "four stages": priced([1, 1, 1, 1], micro_batches=6, schedule="gpipe", recompute=True),
        "loop": put("interleaved", there, shard_optimizer=True),
        "V": put("zb_v", back),
    }
    for name, job in jobs.items():
        export.save(job, "torch", f"{tmp_path / name}/")
    command = [sys.executable, str(ROOT / "tests/planned_ranks.py"), "4", *(str(tmp_path / name) for name in jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ranks = _ranks()
    for name, job in jobs.items():
        whole = ranks.Stage(names, ["input"], [], skip=name == "skip")
        inputs, targets = ranks.batch(job.global_batch_size)
        optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
        loss = ranks.summed(whole(inputs), targets) / job.global_batch_size
        loss.backward()
        wanted = {key: parameter.grad.clone() for key, parameter in ranks.named(whole)}
        optimizer.step()
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        seen = set()
        for rank in range(4):
            _, gradients, parameters = torch.load(tmp_path / name / f"{rank}.pt", weights_only=True)
            seen |= set(gradients)
            for key, gradient in gradients.items():
                assert float((gradient - wanted[key]).abs().max()) <= 1e-12 * largest, (name, key)
                expected = dict(ranks.named(whole))[key].detach()
                assert torch.allclose(parameters[key], expected, rtol=0, atol=1e-9), (name, key)
        assert seen == set(wanted)


def _ranks() -> Any:
    found = importlib.util.spec_from_file_location("planned_ranks", ROOT / "tests/planned_ranks.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# --- The command ------------------------------------------------------------------------------------------------------


def hpgo_export(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpgo", "export", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def test_the_command_writes_what_the_function_returns(bert: hpgo.Plan, tmp_path: Path) -> None:
    bert.save(tmp_path / "plan.json")
    for target in ("megatron", "torchtitan@0.2"):
        done = hpgo_export("plan.json", "--to", target, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, main(bert, target))
        assert ("the framework also needs order.csv" in done.stderr) == (target != "megatron")
        assert hpgo_export("plan.json", "--to", target, "-o", "main.txt", cwd=tmp_path).returncode == 0
        written = export.files(bert, target, path="main.txt")
        assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in written} == written
    done = hpgo_export("plan.json", "--to", "torch", "-o", "jobs/bert/", cwd=tmp_path)
    assert "files to jobs/bert/; README.md shows how to start the job" in done.stderr
    assert {path.name for path in (tmp_path / "jobs/bert").iterdir()} >= {"README.md", *export.files(bert, "torch")}


def test_a_main_file_of_another_name_finds_what_lies_beside_it(bert: hpgo.Plan) -> None:
    written = export.files(bert, "torchtitan@0.2", path="jobs/bert.toml")
    assert list(written) == ["bert.toml", "bert.order.csv"]
    job = tomllib.loads(written["bert.toml"])["parallelism"]
    assert job["pipeline_parallel_schedule_csv"] == "jobs/bert.order.csv"
    assert "with_name('mine.order.csv')" in export.files(bert, "torch", path="mine.py")["mine.py"]


def test_the_command_exports_programs_and_refuses_what_can_not_run(tmp_path: Path, uneven: hpgo.Plan) -> None:
    built = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    names = blocks(2)
    program = hpgo.program(
        built, [(names[:2], [0]), (names[2:], [1])], pipeline_micro_batch_size=1, global_batch_size=4
    )
    program.save(tmp_path / "program.json")
    done = hpgo_export("program.json", "--to", "megatron", cwd=tmp_path)
    assert "no costs are known" in done.stdout
    assert arguments(done.stdout)["num-layers"] == "2"
    uneven.save(tmp_path / "plan.json")
    done = hpgo_export("plan.json", "--to", "megatron", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: " in done.stderr
    assert hpgo_export("plan.json", "--to", "nobody", cwd=tmp_path).returncode == 2
    shown = " ".join(hpgo_export("--help", cwd=tmp_path).stdout.split())
    assert all(f"{target.name}@{target.version}" in shown for target in export.TARGETS if target.version)


def test_one_process_a_rank_reads_its_part_and_all_parts_meet(uneven: hpgo.Plan, tmp_path: Path) -> None:
    uneven.save(tmp_path / "plan.json")
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples/rank.py"), str(tmp_path / "plan.json")],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "16"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(16)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 16
    sent = {
        (rank, int(other), int(begin), int(end))
        for rank, text in enumerate(said)
        for begin, end, other in re.findall(r"sends samples (\d+) to (\d+), rank (\d+)", text)
    }
    received = {
        (int(other), rank, int(begin), int(end))
        for rank, text in enumerate(said)
        for begin, end, other in re.findall(r"receives samples (\d+) to (\d+), rank (\d+)", text)
    }
    assert sent == received
    rows = sorted(row for _, _, begin, end in sent for row in range(begin, end + 1))
    assert rows == list(range(uneven.pipeline_micro_batch_size))


def test_the_example_tells_idle_ranks_and_what_it_lacks(tmp_path: Path) -> None:
    cluster = hpgo.Cluster.preset("dapple-c")
    plan = hpgo.evaluate(hpgo.read_profile("vgg-19"), cluster, [(13, [0]), (13, [2])], global_batch_size=64)
    plan.save(tmp_path / "plan.json")

    def said(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "examples/rank.py"), *words],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert said("plan.json", RANK="1", WORLD_SIZE="3").stdout == "rank 1: idle\n"
    assert said("plan.json", RANK="2", WORLD_SIZE="3").stdout.startswith("rank 2: stage 1,")
    assert said("plan.json", RANK="0", WORLD_SIZE="2").stderr == "the plan needs 3 ranks, not 2\n"
    assert said("none.json", RANK="0", WORLD_SIZE="3").stderr.startswith("error: file not found: `none.json`")
    assert "RANK" in said("plan.json").stderr


OPTIMIZERS = ["adam-fp32", "adam-bf16", "adam-bf16-fp32-gradients", "sgd", "sgd-momentum"]


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("target", TRAINING)
def test_the_precision_that_was_priced_is_a_setting_or_a_refusal(target: str, optimizer: Any, shard: bool) -> None:
    narrow, sums, sgd = "bf16" in optimizer, optimizer.endswith("bf16"), optimizer.startswith("sgd")
    plan = priced([2, 2], replicas=2, weights=hpgo.MemoryModel.preset(optimizer, shard_optimizer=shard))
    name = target.partition("@")[0]
    refused = {
        "torchtitan": "has no SGD" if sgd else "sums gradients in fp32" if sums else "",
        "verl": "" if narrow else "keeps weights in 16 bits",
        "ms-swift": "only with a sharded optimizer state" if sums and not shard else "",
        "deepspeed": "32 bits only if replicas shard" if narrow and not sums and not shard else "",
    }.get(name, "")
    if target in FAMILY and sgd and shard:
        refused = "shards the optimizer state of Adam only"
    if refused:
        with pytest.raises(hpgo.errors.ArgumentError, match=refused) as caught:
            export.files(plan, target)
        assert "plan with" in caught.value.hint
        return
    text = main(plan, target)
    assert f"memory is estimated for {optimizer}: " in text
    if name == "torch":
        told = assigned(text)
        assert told["OPTIMIZER"] == optimizer
        assert (told["WEIGHTS"], told["GRADIENTS"]) == (
            "bfloat16" if narrow else "float32", "bfloat16" if sums else "float32",
        )  # fmt: skip
    elif name == "torchtitan":
        (word,) = [line for line in text.splitlines() if "mixed_precision_param" in line]
        assert ("bfloat16" in word) == narrow
    elif name == "deepspeed":
        config = assigned(text)["CONFIG"]
        assert config.get("bf16", {}).get("enabled", False) == narrow
        types = {"adam-bf16": "bf16", "adam-bf16-fp32-gradients": "fp32"}
        assert config.get("data_types", {}).get("grad_accum_dtype") == types.get(optimizer)
        assert config["zero_optimization"]["stage"] == int(shard)
        assert config.get("zero_allow_untested_optimizer", False) == sgd
    else:
        told = settings_of(plan, target)
        assert ("bf16" in told or told.get("dtype") == "bfloat16") == narrow
        assert ("fp16" in told, told.get("optimizer", "adam")) == (False, optimizer.partition("-")[0])
        assert float(told.get("sgd_momentum", 0.9)) == (0.0 if optimizer == "sgd" else 0.9)
        widened = {"accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32"} & set(told)
        assert name == "ms-swift" or not narrow or bool(widened or "grad_reduce_in_fp32=True" in text) != sums
        assert ("main_grads_dtype" in told) == (name == "ms-swift" and sums)


@pytest.mark.parametrize("target", [name for name in FAMILY if not name.startswith("megatron@")])
def test_degrees_that_a_recipe_may_raise_are_those_of_the_plan(target: str) -> None:
    told = settings_of(priced([2, 2], replicas=2), target)
    assert told["context_parallel_size"] == told["expert_model_parallel_size"] == "1"
    assert "sequence_parallel" not in told
    assert re.search(r"sequence_parallel\W+(false|False)", main(priced([2, 2]), target))
    assert "sequence_parallel" not in main(on_groups(2), target)


def test_deepspeed_is_told_to_share_with_nobody_where_its_optimizer_asks_for_that() -> None:
    weights = hpgo.MemoryModel.preset("adam-bf16-fp32-gradients")
    assert assigned(export.deepspeed(priced([2, 2], weights=weights)))["CONFIG"]["zero_optimization"] == {"stage": 1}
    text = export.deepspeed(priced([2, 2], replicas=2, weights=hpgo.MemoryModel.preset("adam-bf16")))
    assert "# DeepSpeed shards the optimizer state of 16-bit weights over replicas, but the plan does not" in text


def test_pytorch_widens_no_gradients_of_split_backward_passes() -> None:
    weights = hpgo.MemoryModel.preset("adam-bf16-fp32-gradients")
    split = priced([2, 2], micro_batches=4, schedule="zb_h1", weights=weights)
    with refused(hpgo.errors.ArgumentError, "unsupported"):
        export.files(split, "torch")
    assert export.files(priced([2, 2], micro_batches=4, schedule="zb_h1"), "torch")


def loaded(plan: hpgo.Plan, folder: Path) -> Any:
    """The module that is exported for PyTorch."""
    export.save(plan, "torch", f"{folder}/")
    found = importlib.util.spec_from_file_location("planned", folder / "planned.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_mean_loss_and_a_summed_one_give_pytorch_the_mean_over_the_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    for share in (1, 4):
        module = loaded(priced([2, 2], share=share, micro_batches=3), tmp_path)
        output, target = torch.rand(2, share, 5, generator=torch.Generator().manual_seed(share))
        mean = (output - target).square().sum(dim=1).mean()
        for loss in (
            lambda one, other: (one - other).square().sum(dim=1).mean(),
            lambda one, other: (one - other).square().sum(),
        ):
            part = module.ShareOfMean(loss)
            with torch.no_grad():
                part(output * float("nan"), target)  # shows nothing
                assert [float(part(output, target)) for _ in range(3)] == pytest.approx([float(mean) / 3] * 3)
    words, classes = torch.rand(4, 7), torch.tensor([1, -100, 2, -100])
    odd = module.ShareOfMean(torch.nn.functional.cross_entropy)
    with pytest.raises(ValueError, match="must be the mean or the sum of their single losses"):
        odd(torch.stack([words] * 3, dim=2), torch.stack([classes, classes.flip(0), classes], dim=1).clamp(-100, 2))


def test_pytorch_refuses_weights_and_optimizers_that_were_not_priced(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

    class Copying(torch.optim.Adam):
        """Stands for an optimizer that keeps 32-bit copies."""

    def made(optimizer: Any, dtype: Any, kind: Any, **options: Any) -> Any:
        weights = hpgo.MemoryModel.preset(optimizer)
        module = loaded(priced([2, 2], weights=weights), tmp_path)
        layer = torch.nn.Linear(2, 2, dtype=dtype)
        return module.planned_optimizer({0: layer}, kind, None, lr=0.1, **options), layer

    made("adam-fp32", torch.float32, torch.optim.AdamW)
    made("sgd", torch.float32, torch.optim.SGD)
    made("sgd-momentum", torch.float32, torch.optim.SGD, momentum=0.9)
    _, layer = made("adam-bf16-fp32-gradients", torch.bfloat16, Copying)
    for _ in range(2):
        layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    for optimizer, dtype, kind, options, says in (
        ("adam-fp32", torch.bfloat16, torch.optim.Adam, {}, "weights in float32, but some are in torch.bfloat16"),
        ("adam-bf16", torch.float32, Copying, {}, "weights in bfloat16"),
        ("adam-bf16", torch.bfloat16, torch.optim.Adam, {}, "a copy of the weights in float32, and Adam does not"),
        ("adam-fp32", torch.float32, torch.optim.SGD, {}, "planned for adam-fp32, not for SGD"),
        ("sgd", torch.float32, torch.optim.SGD, {"momentum": 0.9}, "SGD without a momentum"),
    ):
        with pytest.raises(ValueError, match=says):
            made(optimizer, dtype, kind, **options)


def test_sgd_whose_state_replicas_share_is_refused_by_megatron() -> None:
    plan = priced([2, 2], replicas=2, weights=hpgo.MemoryModel.preset("sgd-momentum", shard_optimizer=True))
    with refused(hpgo.errors.ArgumentError, "unsupported", "Adam"):
        export.files(plan, "megatron")


def test_memory_of_no_known_optimizer_is_said() -> None:
    plan = priced([2, 2], weights=hpgo.MemoryModel(gradients_per_weight=0.5, optimizer_per_weight=3))
    assert "gradients of 0.5 and optimizer state of 3 times the weights" in main(plan, "megatron")
