"""Whatever a caller gives to a public name in place of one argument, only errors of hpgo come back.

`CALLS` has a valid call of everything public. What is public is found by looking, so a new name without a call, or a
new argument that its call leaves out, fails. Records that can be made can be used: all that follows from their fields
can be asked for.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from toys import chain

import HPGO
import hpgo
from hpgo import draw, export, launch
from hpgo.draw.options import DrawOptions as PictureOptions
from hpgo.hardware import cluster as machine
from hpgo.hardware.mixed import MixedCluster
from hpgo.llm.estimate import StageEstimate
from hpgo.model.arithmetic import Arithmetic, RopeScaling
from hpgo.model.blocks import Block, Latent
from hpgo.model.transformer import Tower
from hpgo.planning import plans
from hpgo.planning.chain.search import PartitionOptions as ChainOptions
from hpgo.planning.plans import ScheduleChoice
from hpgo.planning.problem import PlanOptions
from hpgo.programs import ranks, stages
from hpgo.programs.stages import BoundaryTensor
from hpgo.timing.simulation import CostOptions

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")  # of old names, and of arrays that hold nothing

# --- Things to give ---------------------------------------------------------------------------------------------------


class Hostile:
    """Raises whatever it is asked."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("no")

    __repr__ = __str__ = __eq__ = __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = _refuse
    __getitem__ = __contains__ = __fspath__ = __lt__ = __le__ = __add__ = __mul__ = __call__ = __array__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Bottomless:
    """A list that never ends."""

    def __iter__(self) -> Any:
        while True:
            yield 1


def breaking() -> Any:
    yield 1
    raise RuntimeError("no")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


DEEP = nested(5_000)
STRANGE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "empty text": lambda: "",
    "text": lambda: "abc",
    "NUL": lambda: "\0",
    "half a character": lambda: "\ud800",
    "steering": lambda: "a\x1b[31m\nb",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"abc",
    "true": lambda: True,
    "false": lambda: False,
    "zero": lambda: 0,
    "negative": lambda: -1,
    "half": lambda: 0.5,
    "huge": lambda: 10**30,
    "beyond floats": lambda: 10**400,
    "beyond text": lambda: 10**10_000,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "smallest": lambda: 5e-324,
    "largest": lambda: 1.7e308,
    "complex": lambda: 1j,
    "fraction": lambda: Fraction(1, 3),
    "numpy integer": lambda: np.int64(3),
    "numpy float": lambda: np.float32("nan"),
    "numpy truth": lambda: np.bool_(True),
    "array": lambda: np.array([1.0, 2.0]),
    "empty array": lambda: np.array([]),
    "array of objects": lambda: np.array([None, object()], dtype=object),
    "array of five dimensions": lambda: np.zeros((1, 1, 1, 1, 1)),
    "no list": list,
    "no tuple": tuple,
    "list of Nones": lambda: [None, None],
    "tuple of texts": lambda: ("a", "b"),
    "tuple of halves": lambda: ("\ud800",),
    "list of numbers": lambda: [1, 2],
    "tuple of negative numbers": lambda: (-1, -2),
    "tuple of huge numbers": lambda: (10**30, 10**400),
    "list of NaN": lambda: [float("nan")] * 2,
    "ragged": lambda: [[1], [1, 2]],
    "deep": lambda: DEEP,
    "deep tuple": lambda: (DEEP,),
    "itself": itself,
    "mapping": lambda: {"a": 1},
    "set": lambda: {1, "a"},
    "generator": lambda: (one for one in (1, 2)),
    "breaking generator": breaking,
    "range": lambda: range(2**40),
    "bottomless": Bottomless,
    "hostile": Hostile,
    "list of the hostile": lambda: [Hostile()],
    "tuple of the hostile": lambda: (Hostile(),),
    "type": lambda: int,
    "function": lambda: breaking,
    "path": lambda: Path("absent/file"),
    "folder": Path,
}

# --- Valid calls ------------------------------------------------------------------------------------------------------

PROFILE = chain([1.0, 2.0, 1.0], 8.0, 4.0)
SHAPE = {"layers": 2, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "vocab": 10}
TRANSFORMER = hpgo.Transformer(**SHAPE)
WITH_TOWER = replace(TRANSFORMER, tower=Tower(hidden=8, blocks=(Block(name="layer"),), pattern=("layer",), merge=4))
GPUS = hpgo.Cluster.preset("h100:1")
PRICE = hpgo.estimate_llm(TRANSFORMER, GPUS, global_batch_size=8, seq_length=64)
WAYS = hpgo.plan_llm(TRANSFORMER, GPUS.first(1), global_batch_size=2, seq_length=64)
KINDS = MixedCluster("two kinds", (GPUS.first(1), hpgo.Cluster.preset("a100:1").first(1)))
MIXED = hpgo.plan_mixed_llm(TRANSFORMER, KINDS, global_batch_size=2, seq_length=64)
LLM_PLAN = hpgo.LlmPlan.of(PRICE, TRANSFORMER, GPUS)
MEASURED = hpgo.MeasuredStep(TRANSFORMER, GPUS, PRICE, PRICE.step_s)
FITTED = hpgo.fit_platform([MEASURED])
RUN_LOG = f"""\
  global_batch_size ............... {PRICE.global_batch_size}
  micro_batch_size ................ {PRICE.parallelism.micro_batch_size}
  seq_length ...................... {PRICE.seq_length}
train_step_timing in s: {PRICE.step_s}
"""
CLUSTER = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=10, inter_gbit_s=10)
PLAN = hpgo.plan(PROFILE, CLUSTER, global_batch_size=4)
CHAIN = hpgo.partition(PROFILE, CLUSTER)
SCHEDULE = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
PROGRAM = PLAN.program()
TIMELINE = hpgo.simulate(SCHEDULE, memory=hpgo.StageBytes(activation_bytes=1e6), memory_cap_bytes=1e9)
JOB = launch.LaunchJob.of(PLAN, "train.py")
TEXT = "n1 -- fc -- forward_compute_time=2, backward_compute_time=4, activation_size=8, parameter_size=1e3\n"
MODEL_FILE = "m: {layers: 2, mem_MB: [1, 1], parameters_in: 4, parameters_out: [4, 4]}"
TYPES_FILE = "t: {bw_Mbps: 9, mem_MB: 99, model_profiles: {m: [{batch_size: 1, dtype: torch.float32, time_s: [1, 2]}]}}"

PLANNED = {
    "schedule": "1f1b", "pipeline_micro_batch_size": 1,
    "min_samples_per_replica": 1, "recompute": False, "even_split": False, "shares_by_speed": False,
    "overlap_p2p_comm": True,
    "overlap": True, "memory": hpgo.MemoryModel(), "include_data_loading": False,
}  # fmt: skip
CHAINED = {
    "buffers_in": 2, "buffers_out": 2, "objective": "throughput", "samples_per_s": 1e-9, "links": None, "pins": (),
    "exclude": (), "max_replicas": 1, "bits": (), "time_limit_s": 1.0, "progress": None,
}  # fmt: skip
COSTS = {
    "forward_s": 1.0, "backward_s": 2.0, "input_gradient_s": 1.0, "weight_gradient_s": 1.0, "overlapped_s": 3.0,
    "transfer_s": 0.1, "latency_s": [0.1], "gradient_transfer_s": 0.1, "gradient_latency_s": 0.1,
    "gradient_sync_s": [0.1, 0.1], "optimizer_s": 0.1, "memory": hpgo.StageBytes(), "memory_cap_bytes": [1e9, 1e9],
}  # fmt: skip
DRAWN = {field.name: field.default for field in dataclasses.fields(PictureOptions)}
HOSTS = {"hosts": ["a", "b"], "port": 29500}
WITH_OPTIONS = {  # what `**options` stands for
    hpgo.plan: PlanOptions, hpgo.evaluate: PlanOptions, hpgo.exhaustive: PlanOptions, hpgo.partition: ChainOptions,
    hpgo.partition_files: ChainOptions, hpgo.simulate: CostOptions, draw.save: PictureOptions,
    draw.render: PictureOptions, hpgo.Timeline.save: PictureOptions,
}  # fmt: skip


def of_record(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.init}


def record(kept: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """How to make a record, and of what."""
    return type(kept), of_record(kept)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Valid calls by the name of what they call."""
    of = hpgo.errors.HpgoError("no", "try again")
    model = HPGO.model_from_torch_graph("toy.txt", 1, 4)
    devices = HPGO.devices_from_seps([1, 2])
    conductor = HPGO.Conductor(model, devices)
    found = conductor.py_orchestrate()[1]
    files = {"models": "models.yml", "device_types": "types.yml", "devices": "devices.yml"}
    columns = {name: [1.0, 2.0] for name in ("forward_s", "backward_s", "activation_bytes", "parameter_bytes")}
    errors = {
        name: (getattr(hpgo.errors, name), {"message": of.message, "hint": of.hint, "code": "failed"})
        for name in hpgo.errors.__all__
        if name.endswith("Error")
    }
    records = [
        hpgo.calibrate(PLAN, PLAN.timeline()),
        hpgo.TiedWeight(("a", "b"), 8.0), TRANSFORMER, Latent(kv_rank=8, rope_dim=4, value_dim=8),
        Arithmetic(activation="silu", norm_epsilon=1e-5), RopeScaling(rope_type="linear", factor=2.0),
        PROFILE, PROFILE.layers[0], CLUSTER, CLUSTER.nodes[0], CLUSTER.nodes[0].device, CLUSTER.intra, PLAN,
        PLAN.stages[0], PLAN.stages[0].memory, PLAN.assumed, PLAN.alternatives[0], BoundaryTensor("a", 8.0), CHAIN,
        CHAIN.stages[0], CHAIN.hops[0], SCHEDULE, PROGRAM, PROGRAM.stages[0], PROGRAM.for_rank(0), TIMELINE,
        TIMELINE.measures, hpgo.MemoryModel(), hpgo.PipelineLayout(("Et", "tL")),
        hpgo.Durations((1.0,), (1.0,), (1.0,)),
        hpgo.StageBytes(), JOB, JOB.nodes[0], export.TARGETS[0], export.Place("a", "b"), plans.Digest("0"),
        plans.MemoryPreference(0.1, 1.0, 1.0), plans.Restriction("a", "1", "A", "", 1.0, 1.0, 1),
        PRICE, PRICE.parallelism, PRICE.stages[0], WAYS, LLM_PLAN, MEASURED, FITTED, FITTED.platform,
        hpgo.compare(PRICE, PRICE),
        ScheduleChoice("zb", 1.0, 1.0, 0.0, 2, 1, 1, True, "", None),
    ]  # fmt: skip
    compat = [model, model.layers[0], devices, conductor, conductor.res[0], HPGO.columns(
        dataclasses.replace(model, optimizer_memory_scaling=1.0, peak_activation_per_batch=1.0), devices
    )]  # fmt: skip
    return (
        errors
        | {type(kept).__name__: record(kept) for kept in records}
        | {f"HPGO.{type(kept).__name__}": record(kept) for kept in compat}
        | {
            "Costs": (hpgo.Costs, COSTS),
            "plan": (
                hpgo.plan,
                {"profile": PROFILE, "cluster": CLUSTER, "global_batch_size": 4, "framework": "torch", "max_stages": 2,
                 "tolerance": 0.1, "time_limit_s": 5.0, "progress": None, **PLANNED},
            ),
            "evaluate": (
                hpgo.evaluate,
                {"profile": PROFILE, "cluster": CLUSTER, "stages": [(2, [0]), (["layer2"], [1])],
                 "global_batch_size": 4, **PLANNED},
            ),
            "calibrate": (
                hpgo.calibrate,
                {"plan": PLAN, "timeline": PLAN.timeline(), "profile": PROFILE, "cluster": CLUSTER},
            ),
            "exhaustive": (
                hpgo.exhaustive, {"profile": PROFILE, "cluster": CLUSTER, "global_batch_size": 4, **PLANNED},
            ),
            "KvCache": (hpgo.KvCache, {"transformer": TRANSFORMER, "context_length": 64, "sequences": 2,
                                       "dtype": "bfloat16"}),
            "KvCache.block_bytes": (hpgo.KvCache(transformer=TRANSFORMER, context_length=64).block_bytes, {}),
            "partition": (
                hpgo.partition,
                {"profile": PROFILE, "cluster": CLUSTER, "framework": None, "batch_size": 1,
                 "include_data_loading": False, "dtype": "torch.float32", "kv_cache": None, **CHAINED},
            ),
            "partition_files": (
                hpgo.partition_files,
                {**files, "model": "m", "batch_size": 1, "interpolate": False, "units": "si",
                 "ignore_unknown_types": False, "dtype": "torch.float32", **CHAINED},
            ),
            "estimate_llm": (
                hpgo.estimate_llm,
                {"transformer": TRANSFORMER, "cluster": GPUS, "global_batch_size": 8, "seq_length": 64, "tp": 1,
                "pp": 2,
                 "vpp": 1, "first_rank_layers": 1, "last_rank_layers": None, "cp": 1, "ep": 1, "zero_stage": 1,
                 "micro_batch_size": 1, "dp_replicate": 1, "recompute_every": None,
                 "framework": None, "stack": "default", "pp_schedule": "1f1b",
                 "recompute": "full", "recompute_num_layers": 1, "recompute_modules": (),
                 "sequence_parallel": False, "precision": "bf16",
                 "flash_attention": True, "fused_elementwise": True, "overlap_dp_comm": True,
                 "fused_cross_entropy": True, "cross_entropy_fusion_impl": None, "fused_adam": True,
                 "flatten_gradients": False, "dtensor": False, "grad_reduce_in_bf16": False,
                 "adam_moments_in_bf16": False,
                 "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32", "main_params_dtype": "fp32",
                 "pipeline_layout": None, "tp_comm_overlap": None,
                 "cpu_offload_num_layers": 0,
                 "cuda_graph_impl": "none", "cuda_graph_modules": (),
                 "etp": 1, "moe_token_dispatcher": None, "overlap_ep_comm": False, "delay_wgrad_compute": False,
                 "micro_batch_group_size": None, "offload_modules": (),
                 "lora_rank": 0, "lora_target_modules": (), "base_weights_dtype": "bf16", "optimizer": "adam",
                 "optimizer_offload_fraction": 0.5, "offload_params": False, "packed_length": 32, "devices": 8,
                 "platform": FITTED.platform},
            ),
            "compare": (hpgo.compare, {"chosen": PRICE, "other": PRICE}),
            "draw_llm_plan": (
                hpgo.draw_llm_plan, {"estimate": PRICE, "cluster": GPUS, "path": "way.svg", "theme": "dark"},
            ),
            "draw_pareto_front": (hpgo.draw_pareto_front, {"estimates": [PRICE], "path": "front.svg", "theme": "auto"}),
            "MeasuredStep.of": (
                hpgo.MeasuredStep.of,
                {
                    "transformer": TRANSFORMER, "cluster": GPUS, "predicted": PRICE, "measured_s": PRICE.step_s,
                    "stack": "default",
                },
            ),
            "MeasuredStep.from_log": (
                hpgo.MeasuredStep.from_log,
                {"path": "run.log", "transformer": TRANSFORMER, "cluster": GPUS, "stack": "default"},
            ),
            "MeasuredStep.from_job": (hpgo.MeasuredStep.from_job, {"folder": "job"}),
            "fit_platform": (hpgo.fit_platform, {"steps": [MEASURED]}),
            "Platform.on": (FITTED.platform.on, {"cluster": CLUSTER}),
            "Platform.constants_on": (FITTED.platform.constants_on, {"cluster": CLUSTER, "model": "a"}),
            "Platform.factors": (FITTED.platform.factors, {"model": "a"}),
            "Platform.read": (hpgo.Platform.read, {"path": "platform.yaml"}),
            "Platform.save": (FITTED.platform.save, {"path": "platform.yaml"}),
            "Platform.yaml": (FITTED.platform.yaml, {}),
            "llm_pareto_front": (
                hpgo.llm_pareto_front,
                {"transformer": TRANSFORMER, "cluster": GPUS, "global_batch_size": 2, "seq_length": 64,
                "precision": "bf16",
                 "devices": 1, "framework": "megatron", "fix": {"tp": 1}, "exclude": ["cp"], "reserved_bytes": 1e9,
                 "stack": "default", "platform": FITTED.platform, "points": 2},
            ),
            "plan_llm": (
                hpgo.plan_llm,
                {"transformer": TRANSFORMER, "cluster": GPUS, "global_batch_size": 2, "seq_length": 64,
                "precision": "bf16",
                 "devices": 1, "framework": "megatron", "fix": {"tp": 1}, "exclude": ["cp"], "reserved_bytes": 1e9,
                 "stack": "default", "platform": FITTED.platform,
                 "top": 2, "progress": lambda share, text: None},
            ),
            "plan_mixed_llm": (
                hpgo.plan_mixed_llm,
                {"transformer": TRANSFORMER, "cluster": KINDS, "global_batch_size": 2, "seq_length": 64,
                 "precision": "bf16", "reserved_bytes": 1e9, "stack": None, "framework": "megatron"},
            ),
            "draw_mixed_plan": (hpgo.draw_mixed_plan, {"found": MIXED, "path": "mixed.svg", "theme": "auto"}),
            "size_llm": (
                hpgo.size_llm,
                {"transformer": TRANSFORMER, "tokens": 1e6, "days": 1.0, "budget": None,
                 "hour_prices": {"h100": 2.0}, "on": ["h100"], "quota": {"h100": 8}, "gpus": (8, 8), "seq_length": 64,
                 "global_batch_size": 8, "is_exact_batch": True, "precision": "bf16", "framework": "megatron",
                 "fix": {"tp": 1}, "exclude": ["cp"], "failures": None, "allowance": 1.0,
                 "progress": lambda share, text: None},
            ),
            "fit_llm": (
                hpgo.fit_llm,
                {"transformer": TRANSFORMER, "cluster": GPUS, "devices": 1, "seq_length": 64, "micro_batch_size": 1,
                 "methods": ["lora"]},
            ),
            "LlmPlanSearch.plan": (WAYS.plan, {"place": 1}),
            "LlmPlan.of": (
                hpgo.LlmPlan.of,
                {"estimate": PRICE, "transformer": TRANSFORMER, "cluster": GPUS, "framework": "megatron"},
            ),
            "LlmPlan.to_json": (LLM_PLAN.to_json, {}),
            "LlmPlan.from_json": (hpgo.LlmPlan.from_json, {"text": LLM_PLAN.to_json(), "source": "here"}),
            "LlmPlan.save": (LLM_PLAN.save, {"path": "llm-plan.json"}),
            "LlmPlan.read": (hpgo.LlmPlan.read, {"path": "llm-plan.json"}),
            "ParallelismConfig.micro_batches": (PRICE.parallelism.micro_batches, {"global_batch_size": 8}),
            "ParallelismConfig.named": (PRICE.parallelism.named, {}),
            "ParallelismConfig.named_pipeline": (PRICE.parallelism.named_pipeline, {}),
            "ParallelismConfig.reduces_by_stage": (PRICE.parallelism.reduces_by_stage, {"micro_batches": 4}),
            "ParallelismConfig.stage_counts": (PRICE.parallelism.stage_counts, {"model": TRANSFORMER}),
            "ParallelismConfig.stages_of": (PRICE.parallelism.stages_of, {"rank": 0}),
            "program": (
                hpgo.program,
                {"schedule": SCHEDULE, "stages": [(["a"], [0]), (["b"], [1])], "pipeline_micro_batch_size": 1,
                 "global_batch_size": 4, "nodes": [2], "boundary_tensors": [[BoundaryTensor("a")]], "recompute": False,
                 "shard_optimizer": False, "gpus_per_device": 1, "costs": hpgo.Costs(),
                 "samples_by_replica": [[1], [1]], "zero_stage": 1},
            ),
            "estimate": (
                hpgo.estimate,
                {"source": "toy.onnx", "device": "a100", "dtype": "float16", "batch_sizes": (1, 2), "by": "op",
                 "dims": {"length": 4}, "efficiency": 1},
            ),
            "read_profile": (
                hpgo.read_profile,
                {"source": "toy.txt", "batch_size": 1, "gpus_per_device": 1, "layer_counts": None,
                 "boundary_bytes": None},
            ),
            "write_profile": (hpgo.write_profile, {"profile": PROFILE, "path": "out.txt", "batch_size": 1}),
            "schedule": (
                hpgo.schedule,
                {"name": "1f1b", "ranks": 2, "micro_batches": 4, "virtual_stages_per_rank": None, "group_size": None,
                 "activation_limit": 2, "max_in_flight": [2, 1], "durations": None},
            ),
            "schedules": (hpgo.schedules, {}),
            "simulate": (
                hpgo.simulate,
                {"what": SCHEDULE, "schedule": None, "communication": "link", "iterations": 2, "costs": hpgo.Costs(),
                 **COSTS},
            ),
            "Cluster.of": (
                hpgo.Cluster.of,
                {"nodes": 2, "devices_per_node": 1, "intra_gbit_s": 10, "inter_gbit_s": 10, "memory": "16 GB",
                 "latency": "5 us", "name": "pair", "gpus_per_device": 1},
            ),
            "Cluster.from_seps": (hpgo.Cluster.from_seps, {"seps": [1, 2], "memory": "16 GB"}),
            "Cluster.preset": (hpgo.Cluster.preset, {"name": "dapple-a", "adapter_gbit_s": 10}),
            "Cluster.read": (hpgo.Cluster.read, {"source": "cluster.yaml"}),
            "Cluster.first": (CLUSTER.first, {"devices": 1}),
            "Cluster.document": (CLUSTER.document, {}),
            "Cluster.from_document": (hpgo.Cluster.from_document, {"document": CLUSTER.document(), "file": "x"}),
            "Cluster.yaml": (CLUSTER.yaml, {}),
            "Profile.chain": (
                hpgo.Profile.chain,
                {"name": "toy", "batch_size": 1, **columns, "names": ["a", "b"], "source": "here"},
            ),
            "Transformer.read": (hpgo.Transformer.read, {"source": "shape.yaml"}),
            "Transformer.holds_experts": (TRANSFORMER.holds_experts, {"layer": 1}),
            "Transformer.kind": (TRANSFORMER.kind, {"layer": 1}),
            "Transformer.kind_parameters": (TRANSFORMER.kind_parameters, {"kind": TRANSFORMER.kind(1)}),
            "Transformer.block": (TRANSFORMER.block, {"kind": TRANSFORMER.kind(1)}),
            "Transformer.from_blocks": (
                hpgo.Transformer.from_blocks,
                {"hidden": 8, "vocab": 16, "blocks": [Block(name="plain")], "pattern": ["plain"]},
            ),
            "Transformer.with_images": (
                WITH_TOWER.with_images, {"per_sample": 2, "patches": 16, "frozen": True},
            ),
            "Transformer.layer_parameters": (TRANSFORMER.layer_parameters, {"layer": 1}),
            "Transformer.parameters_by_part": (TRANSFORMER.parameters_by_part, {}),
            "Layer.with_consistent_split": (PROFILE.layers[0].with_consistent_split, {}),
            "TypeTimes": (
                hpgo.TypeTimes,
                {"type": "T4", "forward_s": (1.0,), "backward_s": (2.0,), "input_gradient_s": (1.0,),
                 "weight_gradient_s": (1.0,)},
            ),
            "Profile.on": (hpgo.merge_profiles({"T4": PROFILE, "A100": PROFILE}).on, {"device_type": "A100"}),
            "merge_profiles": (hpgo.merge_profiles, {"profiles": {"T4": PROFILE, "A100": PROFILE}}),
            "Profile.with_consistent_split": (PROFILE.with_consistent_split, {}),
            "Profile.without_loading": (PROFILE.without_loading, {}),
            "Profile.without_tied_weights": (PROFILE.without_tied_weights, {}),
            "Profile.networkx": (PROFILE.networkx, {}),
            "MemoryModel.preset": (
                hpgo.MemoryModel.preset,
                {"name": "adam-bf16", "shard_optimizer": False, "reserved_bytes": 0.0, "zero_stage": 0},
            ),
            "Costs.of_stages": (hpgo.Costs.of_stages, {"stages": PLAN.stages}),
            "PipelineLayout.from_text": (hpgo.PipelineLayout.from_text, {"text": "Et|(tt|)*2tL"}),
            "PipelineLayout.virtual_stages_per_rank": (
                hpgo.PipelineLayout(("Et", "tL")).virtual_stages_per_rank, {"ranks": 1},
            ),
            "PipelineLayout.schedule": (
                hpgo.PipelineLayout(("E", "t", "t", "L")).schedule, {"ranks": 2, "micro_batches": 4, "group_size": 2},
            ),
            "Restriction.costs": (plans.Restriction("a", "1", "A", "", 1.0, 1.0, 1).costs, {"step_s": 1.0}),
            "Plan.to_schedule": (PLAN.to_schedule, {"schedule": "gpipe"}),
            "Plan.program": (PLAN.program, {"schedule": "gpipe"}),
            "Plan.timeline": (PLAN.timeline, {}),
            "Plan.for_rank": (PLAN.for_rank, {"rank": 0}),
            "Plan.reevaluate": (PLAN.reevaluate, {"profile": PROFILE, "cluster": CLUSTER}),
            "Plan.replan": (PLAN.replan, {"devices": 2}),
            "Plan.alternative": (PLAN.alternative, {"name": "data parallelism"}),
            "Plan.to_json": (PLAN.to_json, {"embed": True}),
            "Plan.from_json": (hpgo.Plan.from_json, {"text": PLAN.to_json(), "source": "x"}),
            "Plan.save": (PLAN.save, {"path": "out.json", "embed": True}),
            "Plan.read": (hpgo.Plan.read, {"path": "plan.json"}),
            "HpgoError.as_kind": (of.as_kind, {"kind": hpgo.errors.ProfileError, "message": "none", "hint": "try"}),
            "HpgoError.reworded": (of.reworded, {"message": "none", "hint": "try"}),
            "ChainPlan.utilization": (CHAIN.utilization, {"stage": CHAIN.stages[0]}),
            "ChainPlan.slack_s": (CHAIN.slack_s, {"part": CHAIN.hops[0]}),
            "ChainPlan.max_sequences": (CHAIN.max_sequences, {"stage": CHAIN.stages[0]}),
            "ChainPlan.pipeedge": (CHAIN.pipeedge, {}),
            "ChainPlan.program": (CHAIN.program, {"batches": 2}),
            "ChainPlan.to_json": (CHAIN.to_json, {}),
            "ChainPlan.from_json": (hpgo.ChainPlan.from_json, {"text": CHAIN.to_json(), "source": "x"}),
            "ChainPlan.save": (CHAIN.save, {"path": "out.json"}),
            "ChainPlan.read": (hpgo.ChainPlan.read, {"path": "chain.json"}),
            "Program.for_rank": (PROGRAM.for_rank, {"rank": 0}),
            "Program.to_json": (PROGRAM.to_json, {}),
            "Program.from_json": (hpgo.Program.from_json, {"text": PROGRAM.to_json(), "source": "x"}),
            "Program.save": (PROGRAM.save, {"path": "out.json"}),
            "Program.read": (hpgo.Program.read, {"path": "program.json"}),
            "Schedule.with_transfers": (SCHEDULE.with_transfers, {"deferred_receives": False}),
            "Schedule.without_flush": (
                hpgo.schedule("pipedream", ranks=2, micro_batches=4).without_flush, {"iterations": 2},
            ),
            "Schedule.from_text": (hpgo.Schedule.from_text, {"text": SCHEDULE.to_text(), "name": "mine"}),
            "Schedule.read": (hpgo.Schedule.read, {"path": "schedule.csv"}),
            "Schedule.to_text": (SCHEDULE.to_text, {"in_steps": False}),
            "Schedule.save": (SCHEDULE.save, {"path": "out.csv", "in_steps": False}),
            "Timeline.action_texts": (TIMELINE.action_texts, {}),
            "Timeline.to_json": (TIMELINE.to_json, {}),
            "Timeline.from_json": (hpgo.Timeline.from_json, {"text": TIMELINE.to_json(), "source": "x"}),
            "Timeline.save": (TIMELINE.save, {"path": "out.svg", **DRAWN}),
            "Timeline.read": (hpgo.Timeline.read, {"path": "timeline.npz"}),
            "draw.save": (draw.save, {"timelines": [TIMELINE], "path": "out.html", **DRAWN}),
            "draw.render": (draw.render, {"timelines": TIMELINE, "ending": ".txt", **DRAWN}),
            "export.files": (export.files, {"plan": PLAN, "target": "torch", "path": "job/"}),
            "export.save": (export.save, {"plan": PLAN, "target": "torch", "path": "out.py"}),
            "export.find": (export.find, {"name": "torch"}),
            "export.megatron": (export.megatron, {"plan": blocks_plan()}),
            "export.torchtitan": (export.torchtitan, {"plan": blocks_plan(), "version": "0.3"}),
            "export.deepspeed": (export.deepspeed, {"plan": blocks_plan()}),
            "Place.name": (export.Place("a", "b").name, {"own": "x.csv"}),
            "Place.path": (export.Place("a", "b").path, {"own": "x.csv"}),
            "Target.write": (export.find("torch").write, {"plan": PLAN, "place": export.Place()}),
            "launch.text": (launch.text, {"job": JOB, "target": "local", "options": {}}),
            "launch.save": (launch.save, {"job": JOB, "target": "local", "path": "out.sh", "options": {}}),
            "launch.local": (launch.local, {"job": JOB, "port": 29500}),
            "launch.ssh_hosts": (launch.ssh_hosts, {"job": JOB, **HOSTS}),
            "launch.torchrun": (launch.torchrun, {"job": JOB, **HOSTS, "setup": ["umask 77"]}),
            "launch.slurm": (
                launch.slurm,
                {"job": JOB, "port": 29500, "resource": "gpu", "sbatch": ["partition=a"], "srun": ["mpi=none"],
                 "setup": ["umask 77"]},
            ),
            "launch.kubeflow": (
                launch.kubeflow, {"job": JOB, "image": "me/train", "runtime": "torch", "resource": "gpu"},
            ),
            "launch.pytorchjob": (
                launch.pytorchjob,
                {"job": JOB, "image": "me/train", "resource": "gpu", "rdma": {"rdma/ib": 1}, "folder": "/job",
                 "volumes": {"/job": {"emptyDir": {}}}},
            ),
            "launch.ray": (launch.ray, {"job": JOB, "resource": "GPU"}),
            "LaunchJob.of": (
                launch.LaunchJob.of,
                {"plan": PLAN, "script": "train.py", "arguments": ["-v"], "cluster": CLUSTER, "python": "python3",
                 "name": "mine", "environment": {"A": "1"}},
            ),
            "LaunchJob.need_equal": (JOB.need_equal, {"target": "it"}),
            "LaunchJob.hosts": (JOB.hosts, {"given": ["a", "b"]}),
            "LaunchJob.header": (JOB.header, {"more": "x"}),
            "HPGO.model_from_torch_graph": (HPGO.model_from_torch_graph, {"filename": "toy.txt", "pbs": 1, "gbs": 4}),
            "HPGO.devices_from_seps": (HPGO.devices_from_seps, {"seps": [1, 2]}),
            "HPGO.conductor_from_torch_graph_and_seps": (
                HPGO.conductor_from_torch_graph_and_seps, {"filename": "toy.txt", "pbs": 1, "gbs": 4, "seps": [1, 2]},
            ),
            "HPGO.columns": (HPGO.columns, {"model": model, "devices": devices}),
            "HPGO.Devices.all_reduce_s": (devices.all_reduce_s, {"devices": [0, 1], "size": 1e9}),
            "HPGO.Devices.split_concat_s": (
                devices.split_concat_s, {"senders": [0], "receivers": [1], "size": 1e9},
            ),
            "HPGO.Conductor.py_orchestrate": (conductor.py_orchestrate, {}),
            "HPGO.Conductor.layers": (conductor.layers, {"stages": found}),
            "HPGO.Conductor.plan": (conductor.plan, {"cluster": CLUSTER, **PLANNED}),
        }
    )  # fmt: skip


def blocks_plan() -> hpgo.Plan:
    """A plan that every framework takes."""
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)


def save_network(path: str) -> None:
    """A product, of as many rows as one likes."""
    from onnx import TensorProto, helper, save

    data = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 2])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [1.0] * 6)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [data], [result], [weight])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The valid calls, in a folder with what they read."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("calls")
        patch.chdir(folder)
        (folder / "job").mkdir()
        for name, text in {
            "toy.txt": TEXT, "models.yml": MODEL_FILE, "types.yml": TYPES_FILE, "devices.yml": "t: [a, b]",
            "shape.yaml": json.dumps({"hpgo_transformer": 1, **SHAPE}),
            "cluster.yaml": CLUSTER.yaml(), "llm-plan.json": LLM_PLAN.to_json(),
            "platform.yaml": FITTED.platform.yaml(),
            "run.log": RUN_LOG, "job/llm-plan.json": LLM_PLAN.to_json(), "job/smoke.log": RUN_LOG,
            "plan.json": PLAN.to_json(), "chain.json": CHAIN.to_json(),
            "program.json": PROGRAM.to_json(), "schedule.csv": SCHEDULE.to_text(),
        }.items():  # fmt: skip
            (folder / name).write_text(text, encoding="utf-8")
        with suppress(ImportError):  # its valid call, too, is told then that the package is missing
            save_network("toy.onnx")
        TIMELINE.save("timeline.npz")
        TIMELINE.save("run.timeline.json")
        yield calls()


# --- What is public ---------------------------------------------------------------------------------------------------

RECORDS = {
    machine.Device, machine.Link, machine.Node, stages.Memory, ranks.ProgramStage, plans.Assumptions,
    plans.Alternative, plans.Digest, plans.MemoryPreference, plans.Restriction, StageEstimate,
    *map(type, (CHAIN.stages[0], CHAIN.hops[0], PROGRAM.for_rank(0), TIMELINE.measures, PLAN.stages[0], FITTED, WAYS)),
    type(PRICE.parallelism), type(hpgo.compare(PRICE, PRICE)), type(hpgo.calibrate(PLAN, PLAN.timeline())), Latent,
    Arithmetic, RopeScaling, BoundaryTensor, ScheduleChoice,
}  # fmt: skip
"""Public by what the pages build, or by what fields of public records hold."""


def public() -> dict[str, Any]:
    """Everything that can be called, by the name that `calls` has for it."""
    found: dict[str, Any] = {}

    def add(prefix: str, name: str, value: Any) -> None:
        if not inspect.isclass(value):
            if callable(value):
                found[prefix + name] = value
            return
        found[f"HPGO.{name}" if prefix == "HPGO." else name] = value
        for key, kept in vars(value).items():
            if not key.startswith("_") and (inspect.isfunction(kept) or isinstance(kept, classmethod | staticmethod)):
                found[f"{'HPGO.' if prefix == 'HPGO.' else ''}{name}.{key}"] = getattr(value, key)

    for prefix, module in (("", hpgo), ("", hpgo.errors), ("draw.", draw), ("export.", export), ("launch.", launch)):
        for name in module.__all__:
            add(prefix, name, getattr(module, name))
    for name in hpgo.compat.__all__:
        add("HPGO.", name, getattr(HPGO, name))
    for kept in RECORDS:
        add("", kept.__name__, kept)
    return found


def arguments(function: Any) -> set[str]:
    """Names of what it takes, those that `**options` stand for included."""
    names: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(name)
        elif function in WITH_OPTIONS:
            names |= set(WITH_OPTIONS[function].__annotations__)
    return names


def test_there_is_a_valid_call_of_everything_public_with_all_its_arguments(valid: Any) -> None:
    known = public()
    assert set(valid) == set(known)
    for name, (_, given) in valid.items():
        assert arguments(known[name]) <= set(given), name


LATER = {
    hpgo.Durations,
    hpgo.Costs,
    hpgo.StageBytes,
    hpgo.MemoryModel,
    *(getattr(HPGO, name) for name in hpgo.compat.__all__),
}
"""Records that are looked at when they are used, and may hold anything until then."""


def called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The call, and all that can be asked of a record that it makes."""
    words = dict(given)
    more = words.pop("options", {}) if function in {launch.text, launch.save} else {}
    rows = [words.pop("more")] if "more" in words else []
    if not (isinstance(more, dict) and all(isinstance(key, str) for key in more)):
        return None  # Python itself refuses it
    made = function(*rows, **words, **more)
    if inspect.isclass(function) and not issubclass(function, BaseException) and function not in LATER:
        for name, kept in vars(function).items():
            if isinstance(kept, property):
                getattr(made, name)
        assert isinstance(str(made), str)
        assert repr(made)
        if hasattr(made, "to_json"):
            type(made).from_json(made.to_json())
    return made


def test_the_valid_calls_are_valid(valid: Any) -> None:
    for name, (function, given) in valid.items():
        try:
            called(function, given)
        except Exception as error:
            raise AssertionError(name) from error


CALLED_BY_USERS = {"make", "loss", "weight", "optimizer", "tell", "progress", "watch"}
"""Functions of the caller's; what they raise is theirs."""

STEMS = sorted({name.rpartition(".")[0] or name for name in public()})


@pytest.mark.parametrize("stem", STEMS)
def test_only_errors_of_hpgo_come_back(valid: Any, stem: str) -> None:
    """One argument after the other is replaced by one strange thing after the other."""
    foreign = []
    for name, (function, given) in valid.items():
        if (name.rpartition(".")[0] or name) != stem:
            continue
        for argument in given:
            for words, strange in STRANGE.items():
                replaced = strange()
                if argument in CALLED_BY_USERS and callable(replaced):
                    continue
                try:
                    called(function, given | {argument: replaced})
                except hpgo.errors.HpgoError as error:
                    if isinstance(error, hpgo.errors.InternalError):
                        foreign.append(f"{name}({argument}={words}): {error.message}")
                    if not (error.message and error.message.isprintable() and error.hint.isprintable()):
                        foreign.append(f"{name}({argument}={words}): what it says can't be printed")
                except Exception as error:  # noqa: BLE001 -- what must not come
                    foreign.append(f"{name}({argument}={words}): {type(error).__name__}: {str(error)[:100]}")
    assert not foreign, "\n".join(foreign)


# --- The runtime ------------------------------------------------------------------------------------------------------


def runtime_calls(torch: Any, close: ExitStack) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Valid calls of what `hpgo.runtime` has, which needs torch; `close` ends what they share."""
    from hpgo import runtime

    zeros, mse = torch.zeros(2, 2), torch.nn.functional.mse_loss
    data = [(torch.zeros(2), torch.zeros(2))] * 4
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    workload = runtime.Workload(model, zeros, zeros, mse)
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=2)
    stages = [(workload.layers, [0])]
    program = hpgo.program(schedule, stages, pipeline_micro_batch_size=1, global_batch_size=2)
    priced = dataclasses.replace(program, costs=hpgo.Costs(forward_s=1e-4, backward_s=1e-4))
    (part,) = workload.parts([workload.layers])
    value = runtime.Value("a", by_row=True, has_gradient=True, shape=(2,), dtype=torch.float32)

    def network() -> Any:
        return runtime.Network().add("a", lambda: torch.nn.Linear(2, 2), "input:0")

    def loader(**options: Any) -> Any:
        return runtime.Loader(**{"dataset": data, "global_batch_size": 2, "samples": [range(2)]} | options)

    def step(**given: Any) -> None:
        with runtime.Pipeline(program, workload) as fresh:
            fresh.step(**given)

    ran = close.enter_context(runtime.Pipeline(program, workload))
    ran.step(zeros, zeros)
    forward = hpgo.program(
        hpgo.schedule("forward_only", ranks=1, micro_batches=1),
        stages,
        pipeline_micro_batch_size=2,
        global_batch_size=2,
    )

    def infer(**given: Any) -> None:
        with runtime.InferencePipeline(forward, workload) as fresh:
            list(fresh.infer(**given))

    held = "held.safetensors"

    def opened(**given: Any) -> None:
        with runtime.WeightFiles(**given):
            pass

    runtime.write_weights(held, {"a": zeros})
    stepped = {"state": {"a": {"step": zeros}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    runtime.write_dcp("held-dcp", {"a": zeros}, optimizer_state=stepped)
    rank_options = {
        "seed": 0, "dtype": None, "autocast": None, "device": "cpu", "timeout_s": 9.0, "silence_s": 5.0,
        "grace_s": 30.0, "find_nan": False, "shared_memory": True,
    }  # fmt: skip
    return {
        "WeightFiles": (opened, {"path": held}),
        "read_weights": (runtime.read_weights, {"path": held}),
        "read_optimizer_state": (runtime.read_optimizer_state, {"path": "held-dcp"}),
        "write_dcp": (runtime.write_dcp, {"folder": "dcp", "weights": {"a": zeros}, "optimizer_state": stepped}),
        "write_weights": (runtime.write_weights,
                          {"path": "written.safetensors", "weights": {"a": zeros}, "config": None,
                           "max_shard_bytes": 1 << 20}),
        "Emulation": (lambda **given: runtime.Emulation(**given).close(),
                      {"plan": priced, "scale": 1.0, "timeout_s": 9.0}),
        "Flow": (runtime.Flow, {"samples": (1,), "enter_s": (0.0,), "leave_s": (1.0,)}),
        "Flow.latency_s": (runtime.Flow((1,), (0.0,), (1.0,)).latency_s, {"percent": 95}),
        "Loader": (loader, {"dataset": data, "global_batch_size": 2, "samples": [range(2)], "seed": 0, "shuffle": True,
                            "workers": 0}),
        "Loader.load_state_dict": (loader().load_state_dict, {"state": loader().state_dict()}),
        "Network.add": (lambda layer, make, feed, everywhere: network().add(layer, make, feed, everywhere=everywhere),
                        {"layer": "b", "make": torch.nn.Tanh, "feed": "a", "everywhere": False}),
        "Network.chain": (runtime.Network.chain, {"modules": model}),
        "Network.end": (lambda output: network().end(output), {"output": "a"}),
        "Network.maker": (network().maker, {"value": "a"}),
        "Network.tie": (lambda holder: network().tie(holder), {"holder": ("a", "weight")}),
        "StageModule.layer": (part.layer, {"name": "0"}),
        "Pipeline": (lambda **given: runtime.Pipeline(**given).close(),
                     {"plan": program, "workload": workload, "optimizer": None, "clip_norm": None, "backend": "hpgo",
                      **rank_options}),
        "Pipeline.checkpoint": (ran.checkpoint, {"folder": "saved", "every": 9, "keep": 3, "tell": None}),
        "InferencePipeline": (lambda **given: runtime.InferencePipeline(**given).close(),
                              {"plan": forward, "workload": workload, "quantize": None, **rank_options}),
        "InferencePipeline.infer": (infer, {"batches": [zeros], "in_flight": 1, "hold_samples_per_s": 5.0,
                                            "data_rank": 0, "watch": None}),
        "Pipeline.loader": (ran.loader, {"dataset": data, "shuffle": True, "seed": 0, "workers": 0}),
        "Pipeline.resume": (ran.resume, {"folder": "none"}),
        "Pipeline.step": (step, {"inputs": zeros, "targets": zeros}),
        "Pipeline.timeline": (ran.timeline, {"step": 0}),
        "Share": (runtime.Share, {"tensors": (zeros,), "samples": [range(2)]}),
        "Value.shape_of": (value.shape_of, {"rows": 2}),
        "Workload": (runtime.Workload, {"model": model, "example_inputs": zeros, "example_targets": zeros, "loss": mse,
                                        "weight": None, "name": ""}),
        "Workload.by": (workload.by, {"grain": "block"}),
        "Workload.loss_of": (workload.loss_of, {"outputs": zeros, "targets": zeros}),
        "Workload.parts": (workload.parts, {"stages": [workload.layers], "dtype": None, "seed": 0, "only": None,
                                            "split_backward": False}),
        "Workload.read": (runtime.Workload.read, {"text": "mlp:layers=1,width=2", "seed": 0, "on_meta": False}),
        "Workload.weight_of": (workload.weight_of, {"targets": zeros}),
        "measure": (runtime.measure, {"workload": workload, "batch_sizes": (1,), "by": "block", "dtype": None,
                                      "autocast": None, "device": "cpu", "ranks": 1, "seconds": 0.0,
                                      "memory_bytes": None, "keep": None, "progress": None}),
    }  # fmt: skip


def test_only_errors_of_hpgo_come_back_from_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    foreign = []
    with ExitStack() as close:
        close.callback(torch.set_num_threads, threads)
        calls = runtime_calls(torch, close)
        others = {"Measurement", "profile", "Links", "Preempted"}  # what others give, and `measure` but for one thing
        others |= {"measure_links", "measure_node"}  # a single rank has no links; a node takes minutes
        assert {name.partition(".")[0] for name in calls} | others == {*hpgo.runtime.__all__}
        for name, (function, given) in calls.items():
            function(**given)
            with pytest.raises(TypeError):
                function(**given, beside=1)
            for argument in given:
                for words, strange in STRANGE.items():
                    replaced = strange()
                    if argument in CALLED_BY_USERS and callable(replaced):
                        continue
                    try:
                        function(**given | {argument: replaced})
                    except hpgo.errors.HpgoError as error:
                        if isinstance(error, hpgo.errors.InternalError):
                            foreign.append(f"{name}({argument}={words}): {error.message}")
                        if not (error.message and error.message.isprintable() and error.hint.isprintable()):
                            foreign.append(f"{name}({argument}={words}): what it says can't be printed")
                    except Exception as error:  # noqa: BLE001 -- what must not come
                        foreign.append(f"{name}({argument}={words}): {type(error).__name__}: {str(error)[:100]}")
    assert not foreign, "\n".join(foreign)
