"""Compare the estimates of `hpgo.estimate_llm` with published steps and memory.

    python research/accuracy.py            # fit the constants again, leaving out one platform at a time; minutes
    python research/accuracy.py --experts  # fit only the constants of experts
    python research/accuracy.py --page     # write the pages with the fits that research/accuracy.json keeps
    python research/accuracy.py --check    # exit with 1 if the pages are not what `--page` writes

The conclusions are written to docs/accuracy.md, every point to research/accuracy-tables.md. The measurements are in
`llm/measured.jsonl` in the folder that HPGO_REFERENCE names. They are read in place.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import ranges

from hpgo.errors import HpgoError
from hpgo.hardware.cluster import Cluster
from hpgo.hardware.rates import REPORTED_BYTES, key_of
from hpgo.llm.constants import CONSTANTS, Constants
from hpgo.llm.estimate import LlmEstimate, StageEstimate, estimate_config, estimate_llm, stages_of
from hpgo.llm.layer_context import VALUE
from hpgo.llm.parallelism import CrossEntropyImpl, ParallelismConfig, RecomputedModule, StateDtype
from hpgo.llm.stack import Stack, stack_of
from hpgo.llm.step_range import RELATIVE_ERROR, StepKind, kind_of, log_sd
from hpgo.llm.step_time import PipelineStages
from hpgo.llm.validated_features import family, features_of
from hpgo.model.blocks import Latent
from hpgo.model.transformer import Transformer
from hpgo.model.transformer_presets import TRANSFORMERS
from hpgo.show import llm_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


ROOT = Path(__file__).parent.parent
PAGE, TABLES, FITS = ROOT / "docs/accuracy.md", ROOT / "research/accuracy-tables.md", ROOT / "research/accuracy.json"
MEASURED = Path(os.environ.get("HPGO_REFERENCE", ROOT / "../shared/reference")) / "llm/measured.jsonl"

PLATFORMS = {
    "megatron-a100": "Megatron-LM on A100 (SC21, Korthikanti, MT-NLG)",
    "vtrain-multi": "vTrain's 64 to 512 A100",
    "vtrain-single": "vTrain's single nodes of A100",
    "bloom-a100": "BLOOM on A100 (Megatron-DeepSpeed)",
    "mpt-a100": "MPT on A100 (llm-foundry, FSDP)",
    "mpt-h100": "MPT on H100 (llm-foundry, FSDP)",
    "internevo-a100": "InternLM on A100 (InternEvo)",
    "torchtitan": "Llama on H100 (torchtitan)",
    "bridge-dense": "Llama on H100, B200, GB200 and GB300 (Megatron-Bridge)",
    "zero3-a100-2021": "ZeRO-3 on A100 (DeepSpeed of 2021)",
    "bridge-moe": "Models with experts on H100, B200, B300, GB200 and GB300 (Megatron-Bridge)",
}
SOURCES = {
    "megatron-a100": "arXiv 2104.04473, tables 1 and 2; arXiv 2205.05198, table 5; arXiv 2201.11990; Megatron-LM",
    "vtrain-multi": "vTrain (MICRO 2024), data/ground_truth_multi.csv",
    "vtrain-single": "vTrain (MICRO 2024), data/ground_truth_single.csv",
    "bloom-a100": "BigScience's chronicles of tr11-176B-ml",
    "mpt-a100": "llm-foundry, scripts/train/benchmarking/README.md",
    "mpt-h100": "llm-foundry, scripts/train/benchmarking/README.md",
    "internevo-a100": "InternEvo, doc/en/train_performance.md",
    "torchtitan": "torchtitan, benchmarks/*.md",
    "bridge-dense": "Megatron-Bridge, docs/performance-summary.md and its archive; no recomputation is assumed where"
    " they state none",
    "zero3-a100-2021": "arXiv 2104.04473, table 2",
    "bridge-moe": "Megatron-Bridge, docs/performance-summary.md and its archive; recomputed modules are from its"
    " recipes",
}
UNFITTED = {"zero3-a100-2021"}
"""Outdated software stacks. Their steps are listed, but are part of no fit and no mean."""
EXPERTS = "bridge-moe"
"""Platform of models with experts. The constants of experts are fitted to it, after all other constants."""
_CLUSTERS = {"a100-80": "a100", "h100-96-500w": "h100-96", "v100-32": "v100"}
_PRECISIONS = {"fp8?": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
_RECOMPUTE: dict[str | None, Any] = {
    "none": "none", "full": "full", "selective": "selective", "core_attn": "selective", "selective-op": "selective_op",
    None: "none",
}  # fmt: skip
_WINDOWS = {"gpt-oss-120b": {"window": 128, "window_layers": tuple(range(0, 36, 2))}}
"""Sliding windows of models that are no presets. Source: OpenAI's model card (arXiv 2508.10925)."""
_NO_OVERLAP = ("Megatron-LM", "Megatron-DeepSpeed", "DeepSpeed")
_OF_SETS = {"internevo-mem": "InternEvo"}
_IMPLYING = {"Megatron-Bridge": "megatron-bridge", "torchtitan": "torchtitan", "DeepSpeed ZeRO-3": "deepspeed"}
"""Framework that implies the stack of a measurement, by the start of its name in the data. Others ran the default."""
_BRIDGE, _FUSED_FROM = re.compile(r"Megatron-Bridge (\d+)\.(\d+)"), (26, 6)
"""Release of Megatron-Bridge, and the first one whose recipes fuse the operations of experts."""
_UNFUSED = ("llm-foundry",)
_UNFUSED_LOSS = ("Megatron-LM", "Megatron-DeepSpeed", "DeepSpeed", "torchtitan")
"""Frameworks without a fused loss in the measured releases. llm-foundry and InternEvo use flash-attention's loss,
Megatron-Bridge uses Transformer Engine's (scripts/performance/utils/overrides.py)."""
_NARROW_GRADIENTS = ("Megatron-Bridge", "InternEvo")
"""Frameworks that accumulate gradients in 16 bits. Megatron-Bridge has `grad_reduce_in_fp32 = False` for all models in
scripts/performance/configs. InternEvo's hybrid_zero_optim.py converts gradients to 32 bits for the optimizer step."""
_FLAT_UPDATE = ("bloom-a100", "internevo-a100", "internevo-mem")
"""Sets of steps with flattened gradients. Source: deepspeed/runtime/zero/stage_1_and_2.py and fp16/fused_optimizer.py;
InternEvo's hybrid_zero_optim.py. Such copies would not have fit into memory in vTrain's runs, so these used Megatron's
own optimizer."""
_UNFUSED_UPDATE = ("InternEvo",)
"""Frameworks without fused Adam. InternEvo's report has one flat tensor, updated by PyTorch 1.13, which lacks it."""
_BLOCKING = ("bloom-a100",)
"""Sets with CUDA_LAUNCH_BLOCKING=1. BLOOM's steps hung on that many GPUs without it (chronicles-prequel.md, line 440).
"""
_LOCAL_BATCH = re.compile(r"local batch (\d+);")
_RELEASE = re.compile(r"\(NeMo ([^)]+)\)")
_WIDE_FROM = 899
"""Line of BLOOM's chronicle from which on gradients of 16-bit steps accumulate in 32 bits: "from now on"."""
_OFFLOADED = {
    ("llama3.1-70b", "gb300", "bf16"): 30, ("llama3.1-70b", "gb300", "fp8"): 20, ("llama3.1-70b", "gb200", "bf16"): 20,
    ("llama3.1-70b", "gb200", "fp8"): 40, ("llama3.1-70b", "b200", "fp8"): 5, ("llama3.1-405b", "gb300", "bf16"): 40,
    ("llama3.1-405b", "gb300", "fp8"): 10, ("llama3.1-405b", "gb200", "fp8"): 92,
}  # fmt: skip
"""`cpu_offloading_num_layers` of Megatron-Bridge's recipes with FSDP, scripts/performance/configs/llama."""
_MODULES: dict[tuple[str, str], tuple[RecomputedModule, ...]] = {
    ("gpt-oss-120b", "h100"): ("layernorm", "moe_act"), ("gpt-oss-120b", "b200"): ("layernorm", "moe_act"),
    ("gpt-oss-120b", "gb200"): ("layernorm", "moe_act"), ("deepseek-v3", "h100"): ("mla_up_proj", "mlp"),
    ("deepseek-v3", "b200"): ("mla_up_proj",), ("deepseek-v3", "b300"): ("mla_up_proj",),
    ("deepseek-v3", "gb200"): ("mla_up_proj",), ("deepseek-v3", "gb300"): ("mla_up_proj",),
}  # fmt: skip
"""`recompute_modules` of Megatron-Bridge's recipes: scripts/performance/configs, */*workload_base_configs.py of 0.3.1.
"""
_NARROW_MOMENTS = ("deepseek-v3",)
"""Models whose recipes in Megatron-Bridge have `exp_avg_dtype = torch.bfloat16`: recipes/deepseek/deepseek_v3.py."""

_START: dict[str, Any] = {
    "gemm_efficiency": 0.9, "tail_wave_loss": 0.5, "gemm_overhead_s": 5e-6, "attention_efficiency": 0.85,
    "unfused_attention_efficiency": 0.5, "misaligned_head_factor": 0.4, "hbm_efficiency": 0.8,
    "unfused_elementwise_factor": 1.5, "nvlink_efficiency": 0.75, "nic_efficiency": 0.75,
    "collective_overhead_s": 2e-5, "layer_launch_s": 1e-3,
    "collective_launch_s": 5e-5, "backward_launch_factor": 1.3, "comm_overlap_fraction": 0.7,
}  # fmt: skip
"""Start values of the fit: plausible guesses."""
_START_EXPERTS: dict[str, Any] = {"grouped_gemm_efficiency": 0.8, "routed_row_factor": 1.5, "expert_launch_s": 1e-3}
_OF_TORCH = "GiB"
"""Prefix of sizes that PyTorch's allocator reports, as torchtitan prints them: without CUDA's context and NCCL."""
_PASSING = {"framework_overhead", "logits", "optimizer_workspace", "grad_reduce_buffer"}
_GOAL, _GOAL_KNOWN = 0.2, 0.12
"""Goals of the mean error for models with experts: left out of the fit, and with one step known."""
_PRIOR = 0.03
"""Weight of the squared logarithms of fitted over guessed constants, beside the mean error. Not tuned."""
FITTED, FITTED_EXPERTS = tuple(_START), tuple(_START_EXPERTS)
_LIMITS = {
    "gemm_efficiency": (0.6, 1.0), "tail_wave_loss": (0.0, 1.0), "attention_efficiency": (0.5, 1.2),
    "unfused_attention_efficiency": (0.2, 1.0),
    "misaligned_head_factor": (0.25, 1.0), "hbm_efficiency": (0.6, 0.92), "unfused_elementwise_factor": (1.0, 4.0),
    "nvlink_efficiency": (0.6, 0.85),
    "nic_efficiency": (0.4, 0.95), "layer_launch_s": (5e-4, 1.2e-3), "collective_launch_s": (1e-5, 6e-5),
    "backward_launch_factor": (1.0, 2.0), "comm_overlap_fraction": (0.3, 1.0), "grouped_gemm_efficiency": (0.3, 1.0),
    "routed_row_factor": (1.0, 4.0),
}  # fmt: skip
"""Plausible ranges of constants, which keep a fit from using one constant to correct another. For instance, copies
reach at most 92 % of the memory's rate and rings at most 85 % of NVLink's."""
_OF_A_RECIPE = {
    "tensor": "tp", "sequence": "sequence_parallel", "context": "cp", "pipeline": "pp", "data": "dp", "chunks": "vpp",
    "micro_batch_size": "micro_batch_size", "recompute": "recompute", "recompute_layers": "recompute_num_layers",
    "zero": "zero_stage", "precision": "precision", "flash": "flash_attention", "fused": "fused_elementwise",
    "overlap": "overlap_dp_comm",
}  # fmt: skip
"""Fields by the words of a recipe's hash. These words must not change: they decide which half is fitted."""
_MAX_OF_A_PLATFORM = 16
"""Maximum number of points of a platform in a fit, so that no platform takes most of the time. Errors count all points.
"""


@dataclass(frozen=True)
class Point:
    """A published step time or memory size, with the configuration of the measurement."""

    id: str
    platform: str
    model: Transformer
    cluster: Cluster
    config: ParallelismConfig
    seq: int
    batch: int
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    is_too_large: bool
    """Whether the configuration is published as too large for its GPUs."""
    blocks: bool
    """Whether the CPU waited for each kernel, with CUDA_LAUNCH_BLOCKING=1."""
    edition: str
    """Release and number format of the measurement. Estimates distinguish releases by their stack only."""
    stack: Stack
    """Software stack that the framework implies on the device."""

    @property
    def modules(self) -> tuple[RecomputedModule, ...]:
        """Modules that the backward pass recomputes."""
        return self.config.recompute_modules

    @property
    def recipe(self) -> str:
        """Key of the recipe, which is equal for all releases of one recipe."""
        # The hash of this text splits the points into halves. Its words are frozen, regardless of renamed fields.
        # Reports do not state recomputed modules, so they are not part of the key.
        stated = replace(self.config, recompute="none", recompute_modules=()) if self.modules else self.config
        words = [f"{word}={getattr(stated, field)!r}" for word, field in _OF_A_RECIPE.items()]
        words += [f"expert={self.config.ep}"] if self.config.ep > 1 else []
        config = f"Way({', '.join(words)})"
        return f"{self.platform} {self.model.name} {config} {self.cluster.name} {self.seq} {self.batch}"

    @property
    def is_fitted(self) -> bool:
        """Whether the point is in the half that constants are fitted to. The recipe alone decides that."""
        # By recipe and not by point: a release in one half would reveal the other releases of its recipe.
        return sha256(self.recipe.encode()).digest()[0] % 2 == 0 and self.platform not in UNFITTED

    @property
    def kind(self) -> StepKind:
        """Kind of the step, which decides the width of its range."""
        return kind_of(self.config, self.cluster, has_experts=bool(self.model.experts))

    def log_sd(self, stack: Stack) -> float:
        """Return the standard deviation of the step's range with a stack."""
        return log_sd(self.config, self.cluster, stack, has_experts=bool(self.model.experts))

    def stages(self, constants: Constants) -> PipelineStages:
        """Return the stages of the configuration, with their terms."""
        return stages_of(
            self.model,
            self.cluster,
            self.config,
            global_batch_size=self.batch,
            seq_length=self.seq,
            constants=self.under(constants),
        )

    def under(self, constants: Constants) -> Constants:
        """Return the constants under the conditions of the measurement."""
        constants = self.stack.constants(constants)
        return replace(constants, launch_overlap_fraction=0.0) if self.blocks else constants

    def estimate(self, constants: Constants) -> LlmEstimate:
        """Return the estimate of `hpgo.estimate_llm`."""
        return estimate_config(
            self.model,
            self.cluster,
            self.config,
            global_batch_size=self.batch,
            seq_length=self.seq,
            constants=self.under(constants),
        )


def read() -> tuple[list[Point], Counter[str]]:
    """Return all points that can be estimated, and the reasons against the others with their counts."""
    points, left = [], Counter[str]()
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        why = _why_not(row)
        if why is None:
            try:
                point = _point(row)
                point.stages(CONSTANTS)
                points.append(point)
                continue
            except HpgoError as error:
                why = error.message
        left[why] += 1
    return points, left


def _why_not(row: dict[str, Any]) -> str | None:
    if row["status"] != "ok" and row["set"] != "memory-model":
        return "it did not run"
    if (row["step_s"] or row["derived_step_s"] or row["mem_gb"]) is None:
        return "neither a step nor memory is published"
    if not all(row[key] for key in ("gbs", "mbs", "hw")) or not all(row["model"][key] for key in ("layers", "hidden")):
        return "batch, layers or device are not published"
    if row["model"].get("experts") and not row["model"].get("moe_ffn"):
        return "sizes of its experts are not published"
    if row["recompute"] not in _RECOMPUTE:
        return "its kind of recomputation has no term"
    if row["tp"] * row["cp"] * row["pp"] * row["dp"] != row["gpus"]:
        return "the published degrees don't multiply to the GPUs"
    return None


def _point(row: dict[str, Any]) -> Point:
    held = row["model"]
    micro_batch_size, vpp = row["mbs"], row["vpp"] or 1
    # Some reports give the batch per replica instead of the micro-batch, in the note of the row.
    if (local := _LOCAL_BATCH.match(row["note"] or "")) and "micro-batch size" in row["note"]:
        # torchtitan's default has one micro-batch per pipeline rank, and two virtual stages per rank if it interleaves.
        micro_batch_size, vpp = max(1, int(local[1]) // row["pp"]), 2 if row["vpp"] is None else vpp
    sizes = {key: held[key] for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    model = Transformer(
        name=held["name"], **sizes, gated=held["gated"], tied=held["tied"], centred_norms=not held["gated"],
        **_experts(held),
    )  # fmt: skip
    modules = _modules(row)
    config = ParallelismConfig(
        tp=row["tp"], sequence_parallel=bool(row["sp"]) and row["tp"] > 1, cp=row["cp"], ep=row["ep"],
        pp=row["pp"], vpp=vpp, dp=row["dp"], micro_batch_size=micro_batch_size,
        recompute="selective" if modules else _RECOMPUTE[row["recompute"]], recompute_modules=modules,
        exp_avg_dtype=_moments(row), exp_avg_sq_dtype=_moments(row), zero_stage=row["zero"],
        tp_comm_overlap=bool(row["tp"] > 1 and row["sp"] and (row.get("tp_overlap") or row.get("async_tp"))) or None,
        dp_replicate=row["dp"] // (row.get("zero_group") or row["dp"]) if row["zero"] else 1,
        precision=_PRECISIONS.get(row["precision"], row["precision"]), flash_attention=bool(row["flash"]),
        fused_elementwise=not _framework(row).startswith(_UNFUSED),
        overlap_dp_comm=not _framework(row).startswith(_NO_OVERLAP),
        fused_cross_entropy=not _framework(row).startswith(_UNFUSED_LOSS),
        cross_entropy_fusion_impl=_fused_loss(row),
        fused_adam=not _framework(row).startswith(_UNFUSED_UPDATE),
        flatten_gradients=row["set"] in _FLAT_UPDATE,
        dtensor=_framework(row) == "torchtitan",
        grad_reduce_in_bf16=_adds_up_in_16_bits(row), cpu_offload_num_layers=_offloaded(row),
    )  # fmt: skip
    name = _CLUSTERS.get(row["hw"], row["hw"])
    node = Cluster.preset(f"{name}:1").devices
    cluster = Cluster.preset(f"{name}:{-(-row['gpus'] // node)}", adapter_gbit_s=row["nic_gbit_gpu"])
    return Point(
        row["id"], row["set"], model, cluster.first(row["gpus"]), config, held["seq"], row["gbs"],
        row["step_s"] or row["derived_step_s"], row["mem_gb"] and row["mem_gb"] * 1e9, row["mem_kind"] or "",
        row["status"].startswith(("OOM", "over")), row["set"] in _BLOCKING, _edition(row), _stack(row, cluster),
    )  # fmt: skip


def _fused_loss(row: dict[str, Any]) -> CrossEntropyImpl:
    """Return the implementation of the fused loss. Megatron-Bridge has Transformer Engine's, before 2.18."""
    return "te" if _framework(row).startswith("Megatron-Bridge") else "compiled"


def _edition(row: dict[str, Any]) -> str:
    release = _RELEASE.search(row["ref"])
    return f"{release[1] if release else ''} {row['precision']}"


def _stack(row: dict[str, Any], cluster: Cluster) -> Stack:
    framework = _framework(row)
    if framework == "torchtitan" and "async" in row["id"]:
        return Stack.named("torchtitan-async-tp")
    name = next((name for start, name in _IMPLYING.items() if framework.startswith(start)), None)
    implied = stack_of(None, cluster, name)
    release = _BRIDGE.match(framework)
    if release and row["model"].get("experts") and (int(release[1]), int(release[2])) >= _FUSED_FROM:
        return Stack.named("bridge-26.06") if implied.name == "default" else implied
    return implied


def _framework(row: dict[str, Any]) -> str:
    return row["framework"] or _OF_SETS.get(row["set"], "Megatron-LM")


def _adds_up_in_16_bits(row: dict[str, Any]) -> bool:
    framework = _framework(row)
    if framework.startswith("Megatron-DeepSpeed") and row["set"] == "bloom-a100":
        line = row["ref"].rpartition("line ")[2]
        return not line.isdecimal() or int(line) < _WIDE_FROM
    return framework.startswith(_NARROW_GRADIENTS)


def _is_of_bridge(row: dict[str, Any]) -> bool:
    return _framework(row).startswith("Megatron-Bridge")


def _moments(row: dict[str, Any]) -> StateDtype:
    return "bf16" if _is_of_bridge(row) and row["model"]["name"] in _NARROW_MOMENTS else "fp32"


def _modules(row: dict[str, Any]) -> tuple[RecomputedModule, ...]:
    # Reports of other frameworks state recomputation.
    if row["recompute"] is not None or not _is_of_bridge(row):
        return ()
    return _MODULES.get((row["model"]["name"], row["hw"]), ())


def _offloaded(row: dict[str, Any]) -> int:
    # Reports do not state offloading. Only the recipes with FSDP use it.
    if row["zero"] != 3 or not _is_of_bridge(row):
        return 0
    return _OFFLOADED.get((row["model"]["name"], row["hw"], _PRECISIONS.get(row["precision"], row["precision"])), 0)


def _experts(held: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for experts and latent attention. Values that a row leaves out are taken from a preset."""
    if not held.get("experts"):
        return {}
    known, mla = TRANSFORMERS.get(held["name"]), held.get("mla")
    return {
        "experts": held["experts"],
        "experts_per_token": held["topk"],
        "expert_ffn": held["moe_ffn"],
        "shared_ffn": held["shared_ffn"],
        "expert_groups": known.expert_groups if known else 1,
        "groups_per_token": known.groups_per_token if known else 1,
        "dense_layers": tuple(range(held["dense_layers"])),
        "latent": mla and Latent(kv_rank=mla["kv"], rope_dim=mla["rope"], value_dim=mla["v"], q_rank=mla["q"]),
        **_WINDOWS.get(held["name"], {}),
    }


# --- Fits -------------------------------------------------------------------------------------------------------------


def fit(points: Iterable[Point], start: Constants | None = None, names: Sequence[str] = FITTED) -> Constants:
    """Return the constants that minimize the mean, over platforms, of mean |log(predicted / measured)|.

    A weak prior keeps them near the guesses of `_START`.
    Coordinate descent with shrinking steps, from `_START` or from `start`. It is deterministic. Predicted steps are
    `PipelineStages.bound_s`, which takes 1 % of a simulation's time and is close to it. Large platforms take part with
    a sample of their points, the platform with experts with all of them.
    """
    # Each platform counts the same. Otherwise vTrain's 1,020 steps would decide every constant.
    by_platform: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_platform[point.platform].append(point)
    sample = [
        [
            (point, point.stages(CONSTANTS), point.step_s or math.nan)
            for point in sorted(held, key=lambda point: sha256(point.id.encode()).digest())[
                : None if platform == EXPERTS else _MAX_OF_A_PLATFORM
            ]
        ]
        for platform, held in by_platform.items()
    ]

    def loss(constants: Constants) -> float:
        means = []
        for held in sample:
            errors = [
                abs(
                    math.log(
                        PipelineStages(replace(one.context, constants=at.under(constants)), one.micro_batches).bound_s
                        / step_s
                    )
                )
                for at, one, step_s in held
            ]
            means.append(sum(errors) / len(errors))
        # A constant that the remaining platforms hardly determine must not correct the terms of others.
        guesses = _START | _START_EXPERTS
        far = sum(math.log(getattr(constants, name) / guesses[name]) ** 2 for name in names)
        return sum(means) / len(means) + _PRIOR * far

    # Compare logarithms, so that a step predicted at half and at twice its time count the same.
    best = start or replace(CONSTANTS, **_START)
    minimum = loss(best)
    for step in (0.2, 0.1, 0.05) if start is None else (0.1, 0.05):
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (1 + step, 1 / (1 + step)):
                    low, high = _LIMITS.get(name, (0.0, math.inf))
                    # Three digits: more are not significant, and rounded values are the ones written to the code.
                    value = float(f"{min(high, max(low, getattr(best, name) * factor)):.3g}")
                    tried = replace(best, **{name: value})  # type: ignore[arg-type]  # all that are fitted are floats
                    found = loss(tried)
                    if found < minimum - 1e-4:
                        best, minimum, improved = tried, found, True
    return best


def fits(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Return the constants of the code, and those fitted to one half of the points without each platform in turn."""
    half = [point for point in points if point.step_s and point.is_fitted and point.platform != EXPERTS]
    # The constants are from the fit before FSDP's terms and the stacks were added. A fit of all of them again moves
    # them by less than the fits without a platform differ, and predicts left-out platforms worse.
    found = {"half": CONSTANTS}
    for platform in PLATFORMS:
        if platform not in UNFITTED and platform != EXPERTS:
            found[platform] = fit([point for point in half if point.platform != platform], found["half"])
            print(f"without {platform}: done", file=sys.stderr)
    kept = {name: {key: getattr(one, key) for key in FITTED} for name, one in found.items()}
    return kept | fits_of_experts(points, found["half"])


def fits_of_experts(points: Sequence[Point], rest: Constants) -> dict[str, dict[str, float]]:
    """Return the constants of experts, with all others fixed: of one half, and of that half without each model."""
    half = [point for point in points if point.step_s and point.is_fitted and point.platform == EXPERTS]
    start = replace(rest, **_START_EXPERTS)
    found = {EXPERTS: fit(half, start, FITTED_EXPERTS)}
    for model in dict.fromkeys(point.model.name for point in points if point.platform == EXPERTS):
        others = [point for point in half if point.model.name != model]
        found[_without(model)] = fit(others, start, FITTED_EXPERTS)
    return {name: {key: getattr(one, key) for key in FITTED_EXPERTS} for name, one in found.items()}


def _without(model: str) -> str:
    """Return the key of the fit without a model."""
    return f"{EXPERTS} without {model}"


# --- The pages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Errors of predicted steps or sizes."""

    ratios: tuple[float, ...]
    """Predicted over measured values."""

    @property
    def mean(self) -> float:
        """Mean relative error."""
        return sum(abs(ratio - 1) for ratio in self.ratios) / len(self.ratios)

    @property
    def worst(self) -> float:
        """Largest relative error."""
        return max(abs(ratio - 1) for ratio in self.ratios)


def pages(points: Sequence[Point], left: Counter[str], kept: dict[str, dict[str, float]]) -> dict[Path, str]:
    """Return the texts of docs/accuracy.md, with the conclusions, and of research/accuracy-tables.md."""
    chosen = _of(kept["half"] | kept[EXPERTS])
    estimates = {point.id: point.estimate(chosen) for point in points}
    steps = [point for point in points if point.step_s]
    ratio = {point.id: estimates[point.id].step_s / point.step_s for point in steps if point.step_s}
    apart = _left_out(steps, kept)
    platforms, orders = _platforms(steps, ratio, apart), _orders(steps, estimates)
    experts = [point for point in steps if point.platform == EXPERTS]
    conclusions = [
        *_head(),
        *ranges.reliance_section(_counted(steps, ratio)),
        *_goals(platforms, orders, _memory_ratios(points, estimates)),
        *ranges.range_section(_every_left_out(steps, apart, kept), PLATFORMS, *_spreads(apart)),
        *_with_experts(experts, ratio, kept, _trust(apart)),
        *_mechanisms(steps),
        *_METHOD,
    ]
    tables = [
        *_TABLES_HEAD,
        *_constants(kept),
        *_summary(platforms, apart),
        *_in_order(orders),
        *_that_ran(points, estimates),
        *_memory(points, estimates),
        *_left(left),
        *_points(steps, estimates, ratio),
        "",
    ]
    return {PAGE: "\n".join(conclusions), TABLES: "\n".join(tables)}


def _head() -> list[str]:
    """Return the first screen of the page: what the errors are, where they are printed, and how to reduce them."""
    one = estimate_llm("llama-3-8b", "h100:1", global_batch_size=32, seq_length=8192, tp=2, framework="megatron")
    lines = llm_report.lines(one)
    begin = next(at for at, line in enumerate(lines) if line.startswith("Step time"))
    shown = lines[begin : begin + 5]
    return [
        "# Accuracy of LLM estimates",
        "",
        "Every report of `hpgo llm` states a range for its step time, and the software stack that it assumes:",
        "",
        "```text",
        "$ hpgo llm estimate llama-3-8b -c h100:1 -b 32 --seq-length 8192 --tp 2 --framework megatron",
        *shown,
        "```",
        "",
        (
            "The ranges come from this comparison with about 1,500 published steps. If two step times of one list"
            f" differ by less than {100 * RELATIVE_ERROR:.0f} %, do not rely on their order. If you can measure three"
            " steps on your cluster, run [`hpgo llm calibrate`](llm.md#fit-the-cost-model-to-your-cluster): it replaces"
            " the range by that of your platform. For models with experts, measure a step before you decide."
        ),
        "",
        (
            "`make accuracy` writes this page. [accuracy-tables.md](../research/accuracy-tables.md) has every step and"
            " memory size, errors by platform, the order of configurations, and the fitted constants."
            " [cost-terms.md](cost-terms.md) explains the terms. No number"
            " is corrected by platform."
        ),
        "",
    ]


_METHOD = (
    "## Method",
    "",
    (
        "*Predicted* values are from `hpgo.estimate_llm`, *measured* values are published. The hash of a recipe's"
        " degrees decides which half it belongs to, with all its releases. Constants are fitted to one half, in which"
        " each platform counts the same. *Not fitted* is the other half."
    ),
    "",
    (
        "*Left out* is a platform with constants that were fitted without it: the error to expect on a platform like"
        " yours. *One step known* then corrects the other steps by half of one measured step's deviation. It is the"
        " mean over all points but that one, and over all choices of that one."
    ),
    "",
    (
        "The people who chose the terms had seen these steps. So steps that no constant was fitted to are not a blind"
        " test either. [Frozen predictions](../research/frozen-predictions.md) of 52 other published steps are: their"
        " mean error was 15.9 %, and 40 were in range."
    ),
    "",
)
_TABLES_HEAD = (
    "# Tables of the accuracy of LLM estimates",
    "",
    "`make accuracy` writes this file. [docs/accuracy.md](../docs/accuracy.md) has the conclusions and the method.",
    "",
)


def _of(fitted: dict[str, Any]) -> Constants:
    return replace(CONSTANTS, **fitted)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclass(frozen=True)
class Row:
    """Errors of one platform. Outdated stacks have only some of them."""

    every: Errors
    """Errors of all steps."""
    other: Errors | None
    """Errors of the half that is not fitted."""
    alone: Errors | None
    """Errors with constants that were fitted without the platform."""
    known: float | None
    """Mean error of a platform left out, with one step known."""


def _platforms(
    steps: Sequence[Point], ratio: dict[str, float], apart: dict[str, list[tuple[Point, float]]]
) -> dict[str, Row]:
    rows = {}
    for platform in PLATFORMS:
        held = [point for point in steps if point.platform == platform]
        # The platform with experts has its own constants and its own table.
        if platform == EXPERTS:
            continue
        other = tuple(ratio[point.id] for point in held if not point.is_fitted)
        alone = tuple(one for _, one in apart.get(platform, ()))
        trust = _trust({name: one for name, one in apart.items() if name != platform})
        rows[platform] = Row(
            Errors(tuple(ratio[point.id] for point in held)),
            Errors(other) if other else None,
            Errors(alone) if alone else None,
            _one_known(alone, trust) if alone else None,
        )
    return rows


def _means(platforms: dict[str, Row]) -> tuple[float, float, float, float]:
    """Return means over platforms: of all steps, of the half not fitted, left out, and with one step known."""
    part = [row for row in platforms.values() if row.alone is not None]
    return (
        sum(row.every.mean for row in part) / len(part),
        sum(row.other.mean for row in part if row.other is not None) / len(part),
        sum(row.alone.mean for row in part if row.alone is not None) / len(part),
        sum(row.known or 0.0 for row in part) / len(part),
    )


_ONE_KNOWN = (
    "Largest on vTrain's single nodes: small models on 1 to 8 GPUs, whose ratios scatter most. GEMM times measured by"
    " size would help."
)
_LEFT_OUT = (
    "Without vTrain's single nodes, hardly any step determines the efficiency of unfused attention, which the fit then"
    " moves to correct other terms. The mean without that platform is below 10 %."
)
_MEGATRON = (
    "Most steps of 175B are predicted too long, MT-NLG's on 2,240 and 2,800 GPUs too short. Their fused kernels are not"
    " published."
)
_VTRAIN = "Three configurations with tp 4 and 8 took 1.3 to 1.9 times the predicted time, unlike their neighbors."
_REGRET = "In one comparison of three: tp 4 with two stages is chosen, but tp 8 without a pipeline was faster."
_BLOOM = "Four of the five are 6 to 7 % apart."
_INTERNLM = (
    "Nine of the twelve include a step whose optimizer state is sharded over 128 to 1,024 GPUs. It took up to 1.6 times"
    " as long as the same configuration with shards in groups of 8 or 4. No term covers that."
)
_MEMORY = (
    "A run of BLOOM with micro-batches of 2, which needed more than the same run with 4. Three others are 11 to 12 %"
    " too low: two of BLOOM, and torchtitan's 405B on 262,144 tokens, which needed 8 GB more than on half of them with"
    " the same number per GPU. The reason would need published allocator data."
)


def _goals(platforms: dict[str, Row], orders: dict[str, Order], memory: Errors) -> list[str]:
    """Return the table of goals, the most clearly missed first, with the known reasons."""
    mean, _, alone, known = _means(platforms)
    megatron, vtrain = (platforms[name].every for name in ("megatron-a100", "vtrain-multi"))
    rows = (
        ("mean error of platforms", mean, 0.10, ""),
        ("mean error of a platform left out", alone, 0.10, _LEFT_OUT),
        ("mean error of a platform left out, one step known", known, 0.08, _ONE_KNOWN),
        ("Megatron-LM on A100, mean error", megatron.mean, 0.05, _MEGATRON),
        ("Megatron-LM on A100, worst error", megatron.worst, 0.15, ""),
        ("vTrain's 64 to 512 A100, mean error", vtrain.mean, 0.10, _VTRAIN),
        ("vTrain's 64 to 512 A100, worst regret", orders["vtrain-multi"].worst_regret, 0.03, _REGRET),
        ("vTrain's 64 to 512 A100, pairs in the wrong order", 1 - orders["vtrain-multi"].right_share, 0.10, ""),
        ("BLOOM's pairs in the wrong order", 1 - orders["bloom-a100"].right_share, 0.10, _BLOOM),
        ("InternLM's pairs in the wrong order", 1 - orders["internevo-a100"].right_share, 0.10, _INTERNLM),
        ("memory, mean error", memory.mean, 0.06, ""),
        ("memory, largest underestimate", 1 - min(memory.ratios), 0.10, _MEMORY),
    )
    # Worst first: by the ratio of the value to its goal.
    ordered = sorted(rows, key=lambda row: -row[1] / row[2])
    return [
        "## Goals, worst first",
        "",
        "The goals for models with experts are [below](#models-with-experts).",
        "",
        "| | now | goal | | known reasons |",
        "|---|---|---|---|---|",
        *(
            f"| {what} | {_percent(now)} | {100 * goal:.0f} % | {'met' if now <= goal else 'missed'} | {why} |"
            for what, now, goal, why in ordered
        ),
        "",
    ]


def _summary(platforms: dict[str, Row], apart: dict[str, list[tuple[Point, float]]]) -> list[str]:
    lines = [
        "## By platform",
        "",
        "Platforms are sorted by the error that you can expect on a platform like them: *left out* of the fit.",
        "",
        (
            "| platform | steps | mean error | worst | predicted over measured, median | not fitted, mean"
            " | left out, mean | one step known, mean |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for platform, row in sorted(platforms.items(), key=lambda one: -(one[1].alone or one[1].every).mean):
        cells = [
            PLATFORMS[platform],
            str(len(row.every.ratios)),
            _percent(row.every.mean),
            _percent(row.every.worst),
            f"{_median(row.every.ratios):.2f}",
            _percent(row.other.mean) if row.other else "–",
            _percent((row.alone or row.every).mean),
            "–" if row.known is None else _percent(row.known),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    mean, other, alone, known = map(_percent, _means(platforms))
    lines.append(f"| **mean of platforms that take part** | | {mean} | | | {other} | {alone} | {known} |")
    between, within = _spreads(apart)
    lines += [
        "",
        (
            f"The logarithms of predicted over measured left-out steps have a standard deviation of {within:.2f} around"
            f" the mean of their platform, and these means one of {between:.2f} around 0. So of a single step's"
            " deviation, about half belongs to the platform. `hpgo llm calibrate` fits terms to several steps"
            " ([llm.md](../docs/llm.md#what-a-few-steps-tell)). ZeRO-3 of 2021 is an outdated stack: it is part of"
            " no fit and no mean."
        ),
    ]
    return [*lines, ""]


def _with_experts(
    held: Sequence[Point], ratio: dict[str, float], kept: dict[str, dict[str, float]], trust: float
) -> list[str]:
    """Return the table of errors by model with experts, and the goal."""
    lines = [
        "## Models with experts",
        "",
        (
            f"{PLATFORMS[EXPERTS]} are no part of the tables above. Their three constants are fitted to one half of"
            " these steps. *Left out* is a model with constants that were fitted without it. *Of its release* corrects"
            " it by one step of the same release, as you would with your own measurement."
        ),
        "",
        (
            "No estimate distinguishes releases of one recipe, but their measured steps differ: the slowest is longer"
            " than the fastest by the last column. *By releases alone* is the error that would remain with one step"
            " known if each recipe had the mean of its releases as its estimate."
        ),
        "",
        (
            "| model | steps | mean error | worst | predicted over measured, median | not fitted, mean"
            " | left out, mean | one step known, mean | of its release | by releases alone | longer, at most |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found: dict[str, list[float]] = defaultdict(list)
    known: dict[str, list[float]] = defaultdict(list)
    # Sort by the steps' own order, not by error: the row `all` must be last, and means are taken on the way.
    for model in dict.fromkeys(point.model.name for point in held):
        mine = [point for point in held if point.model.name == model]
        without = _of(kept["half"] | kept[_without(model)])
        apart = {point.id: point.estimate(without).step_s / (point.step_s or math.nan) for point in mine}
        every = [ratio[point.id] for point in mine]
        other = [ratio[point.id] for point in mine if not point.is_fitted]
        recipes: dict[str, list[float]] = defaultdict(list)
        releases: dict[str, list[float]] = defaultdict(list)
        for point in mine:
            recipes[point.recipe].append(point.step_s or math.nan)
            releases[point.id.split("-")[1]].append(apart[point.id])
        alone = [geometric_mean(recipes[point.recipe]) / (point.step_s or math.nan) for point in mine]
        several = [ratios for ratios in releases.values() if len(ratios) > 1]
        within = sum(len(ratios) * _one_known(ratios, trust) for ratios in several) / sum(map(len, several))
        floor = _one_known(alone, trust)
        for name, value in (("all", _one_known([*apart.values()], trust)), ("release", within), ("floor", floor)):
            known[name].append(value)
        row = [
            f"`{model}`", str(len(mine)), _percent(Errors(tuple(every)).mean), _percent(Errors(tuple(every)).worst),
            f"{_median(every):.2f}", _percent(Errors(tuple(other)).mean), _percent(Errors(tuple(apart.values())).mean),
            *(_percent(values[-1]) for values in known.values()),
            _percent(max(max(each) / min(each) for each in recipes.values()) - 1),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
        for name, values in (("every", every), ("other", other), ("apart", apart.values())):
            found[name] += values
    mean = {name: Errors(tuple(values)).mean for name, values in found.items()}
    once = {name: sum(values) / len(values) for name, values in known.items()}
    lines.append(
        f"| **all** | {len(held)} | {_percent(mean['every'])} | {_percent(Errors(tuple(found['every'])).worst)} |"
        f" {_median(found['every']):.2f} | {_percent(mean['other'])} | {_percent(mean['apart'])} |"
        f" {' | '.join(map(_percent, once.values()))} | |"
    )
    met = mean["apart"] <= _GOAL and once["all"] <= _GOAL_KNOWN
    goal = f"The goal is {100 * _GOAL:.0f} % of models left out, and {100 * _GOAL_KNOWN:.0f} % with one step known."
    verdict = "It is met." if met else "It is missed, so ranges of such models are wide."
    return [*lines, "", f"{goal} {verdict}", ""]


def _left_out(steps: Sequence[Point], kept: dict[str, dict[str, float]]) -> dict[str, list[tuple[Point, float]]]:
    """Return predicted over measured steps of each platform, with constants that were fitted without it."""
    found: dict[str, list[tuple[Point, float]]] = {}
    for platform in PLATFORMS:
        if platform not in UNFITTED and platform != EXPERTS:
            without = _of(kept[platform])
            found[platform] = [
                (point, point.estimate(without).step_s / (point.step_s or math.nan))
                for point in steps
                if point.platform == platform
            ]
    return found


def _counted(steps: Sequence[Point], ratio: dict[str, float]) -> list[tuple[Point, float]]:
    """Return the steps without outdated stacks, with predicted over measured times."""
    return [(point, ratio[point.id]) for point in steps if point.platform not in UNFITTED]


def _every_left_out(
    steps: Sequence[Point], apart: dict[str, list[tuple[Point, float]]], kept: dict[str, dict[str, float]]
) -> dict[str, list[tuple[Point, float]]]:
    """Return `apart` together with each model with experts, with constants that were fitted without it."""
    found = dict(apart)
    for model in dict.fromkeys(point.model.name for point in steps if point.platform == EXPERTS):
        without = _of(kept["half"] | kept[_without(model)])
        found[model] = [
            (point, point.estimate(without).step_s / (point.step_s or math.nan))
            for point in steps
            if point.platform == EXPERTS and point.model.name == model
        ]
    return found


def _spreads(apart: dict[str, list[tuple[Point, float]]]) -> tuple[float, float]:
    """Return standard deviations of logarithms: of platforms' means around 0, and of steps around these means.

    Each platform counts the same.
    """
    within, between = [], []
    for held in apart.values():
        logs = [math.log(one) for _, one in held]
        mean = sum(logs) / len(logs)
        spread = sum((one - mean) ** 2 for one in logs) / (len(logs) - 1)
        within.append(spread)
        # The mean of a few steps scatters by itself. Subtract that variance, which belongs to the steps.
        between.append(mean**2 - spread / len(logs))
    return math.sqrt(max(0.0, sum(between) / len(between))), math.sqrt(sum(within) / len(within))


def _trust(apart: dict[str, list[tuple[Point, float]]]) -> float:
    """Return the share of a step's squared logarithm that belongs to its platform."""
    between, within = _spreads(apart)
    return between**2 / (between**2 + within**2)


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _one_known(ratios: Sequence[float], trust: float) -> float:
    """Return the mean error if one ratio is known and corrects all others by its power `trust`, over all choices."""
    # The number of pairs grows with the square. 200 points are enough for a mean.
    if len(ratios) > 200:
        ratios = ratios[:: len(ratios) // 200]
    errors = [
        abs(one / known**trust - 1) for at, known in enumerate(ratios) for to, one in enumerate(ratios) if to != at
    ]
    return float(sum(errors) / len(errors))


@dataclass(frozen=True)
class Order:
    """Reliability of the order of a platform's estimates."""

    pairs: int
    right_share: float
    regrets: tuple[float, ...]
    """Regret of each comparison: of one model on the same number of GPUs with one batch."""

    @property
    def worst_regret(self) -> float:
        """Largest regret of all comparisons."""
        return max(self.regrets)


def _orders(steps: Sequence[Point], estimates: dict[str, LlmEstimate]) -> dict[str, Order]:
    """Return the order of each platform with pairs of configurations whose measured steps are at least 5 % apart."""
    found = {}
    for platform in PLATFORMS:
        questions: dict[tuple[object, ...], list[Point]] = defaultdict(list)
        for point in steps:
            if point.platform == platform:
                asked = (
                    point.model,
                    point.config.world_size,
                    point.batch,
                    point.seq,
                    point.edition,
                    point.cluster.name,
                )
                questions[asked].append(point)
        apart = right = 0
        regrets = []
        for held in (held for held in questions.values() if len({point.config for point in held}) > 1):
            for one, two in combinations(held, 2):
                if one.config == two.config:
                    continue
                measured = (one.step_s or 0.0) / (two.step_s or math.nan)
                # Closer measurements may be in the wrong order themselves.
                if not 1 / 1.05 < measured < 1.05:
                    apart += 1
                    right += (estimates[one.id].step_s < estimates[two.id].step_s) == (measured < 1)
            picked = min(held, key=lambda point: estimates[point.id].step_s)
            regrets.append((picked.step_s or math.nan) / min(point.step_s or math.nan for point in held) - 1)
        if apart:
            found[platform] = Order(apart, right / apart, tuple(regrets))
    return found


def _in_order(orders: dict[str, Order]) -> list[str]:
    lines = [
        "## Order of two configurations",
        "",
        (
            "Pairs are two configurations of one model on the same number of GPUs, with one batch, release and number"
            " format, whose measured steps differ by at least 5 %. *Regret* is the measured time of the configuration"
            " that is predicted to be the fastest, relative to the fastest."
        ),
        "",
        "| platform | pairs | in the right order | comparisons | regret, mean | regret, worst |",
        "|---|---|---|---|---|---|",
    ]
    for platform, one in sorted(orders.items(), key=lambda row: row[1].right_share):
        lines.append(
            f"| {PLATFORMS[platform]} | {one.pairs} | {_percent(one.right_share)} | {len(one.regrets)} |"
            f" {_percent(sum(one.regrets) / len(one.regrets))} | {_percent(one.worst_regret)} |"
        )
    return [*lines, ""]


def measured(steps: Iterable[Point]) -> dict[str, Counter[str]]:
    """Return the number of steps with each feature by device. Outdated stacks do not count."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for point in steps:
        if point.platform not in UNFITTED:
            found[family(point.cluster.nodes[0].device.name)].update(features_of(point.config))
    return found


def _mechanisms(steps: Sequence[Point]) -> list[str]:
    counts = sorted(measured(steps).items())
    names = list(dict.fromkeys(name for point in steps for name in features_of(point.config)))
    lines = [
        "## Validated features",
        "",
        (
            "The table has the number of measured steps with each feature, by device. Reports mark configurations with"
            " other features, and plans prefer configurations without them within the error"
            " ([llm.md](llm.md#unvalidated-features))."
        ),
        "",
        f"| | {' | '.join(device for device, _ in counts)} |",
        "|---|" + "---|" * len(counts),
    ]
    rows = [(name, [held[name] for _, held in counts]) for name in sorted(names)]
    lines += [f"| {name} | {' | '.join(str(one or '–') for one in row)} |" for name, row in rows if any(row)]
    return [*lines, ""]


def _constants(kept: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "## Constants",
        "",
        (
            f"{len(FITTED)} constants are fitted, the same for all platforms, and {len(FITTED_EXPERTS)} for experts."
            " The ranges are over the fits without one platform, or without one model with experts. Rates are from"
            " `hpgo.hardware.rates`. [cost-terms.md](../docs/cost-terms.md#constants) explains each constant."
        ),
        "",
        "| constant | fitted | without one platform, or one model |",
        "|---|---|---|",
    ]
    chosen = kept["half"] | kept[EXPERTS]
    for name in (*FITTED, *FITTED_EXPERTS):
        others = [one[name] for fit, one in kept.items() if fit not in {"half", EXPERTS} and name in one]
        lines.append(f"| `{name}` | {chosen[name]:g} | {min(others):g} to {max(others):g} |")
    return [*lines, ""]


def _memory(points: Sequence[Point], estimates: dict[str, LlmEstimate]) -> list[str]:
    lines = [
        "## Memory",
        "",
        (
            "Memory of the fullest GPU. No constant was fitted to it; the framework overhead is a flat 3 GB. Predicted"
            " values for `nvidia-smi` include `allocator_cached_bytes`. Values for the count of PyTorch's allocator"
            " exclude the framework overhead. Values for papers that count tensors only also exclude the temporary"
            " memory of the loss and the optimizer step. Pipelines of torchtitan's release returned all logits of a"
            " step without using them. Only this table counts these."
        ),
        "",
        "| point | kind of measurement | measured | predicted | ratio |",
        "|---|---|---|---|---|",
    ]
    return [*lines, *(row for _, row in _memory_rows(points, estimates)), "", _memory_range(points, estimates), ""]


def _memory_rows(points: Sequence[Point], estimates: dict[str, LlmEstimate]) -> list[tuple[float, str]]:
    """Return the ratio and the table row of each published memory size."""
    found = _memory_ratios(points, estimates).ratios
    rows = []
    for point, ratio in zip((point for point in points if point.memory_bytes), found, strict=True):
        size = point.memory_bytes or math.nan
        cells = (point.id, point.memory_kind, f"{size / 1e9:.1f} GB", f"{ratio * size / 1e9:.1f} GB", f"{ratio:.2f}")
        rows.append((ratio, f"| {' | '.join(cells)} |"))
    return rows


def _memory_range(points: Sequence[Point], estimates: dict[str, LlmEstimate]) -> str:
    found = _memory_ratios(points, estimates)
    low, high = min(found.ratios) - 1, max(found.ratios) - 1
    return (
        f"{len(found.ratios)} points: mean error {_percent(found.mean)}, from {100 * low:.0f} % to +{100 * high:.0f} %."
    )


def _memory_ratios(points: Sequence[Point], estimates: dict[str, LlmEstimate]) -> Errors:
    """Return predicted over measured bytes of the fullest GPU."""
    return Errors(
        tuple(
            max(_as_measured(point, stage) for stage in estimates[point.id].stages) / point.memory_bytes
            for point in points
            if point.memory_bytes
        )
    )


def _as_measured(point: Point, stage: StageEstimate) -> float:
    """Return the bytes that the kind of measurement of a point would show for a stage."""
    if point.platform == "memory-model":
        return sum(size for name, size in stage.memory_bytes if name not in _PASSING)
    outside = dict(stage.memory_bytes)["framework_overhead"] if point.memory_kind.startswith(_OF_TORCH) else 0.0
    besides = _returned(point) if stage.layers[-1][1] == point.model.layers else 0.0
    return stage.peak_bytes + stage.allocator_cached_bytes + besides - outside


def _returned(point: Point) -> float:
    """Return the bytes of all logits of a step, and of their concatenation, which torchtitan's pipelines returned.

    torchtitan did so until #1922, *Update PP to release memory earlier*, of October 2025: `output_chunks` and
    `_merge_outputs` of PyTorch's pipelining/schedules.py. The loss's memory is free by then, but in smaller pieces.
    """
    if point.platform != "torchtitan" or point.config.pp == 1:
        return 0.0
    tokens = point.batch // point.config.dp * point.seq // point.config.cp
    return 2 * VALUE * tokens * point.model.vocab / point.config.tp


def _that_ran(points: Sequence[Point], estimates: dict[str, LlmEstimate]) -> list[str]:
    """Return the share of measured configurations that are predicted to fit, and those published as too large."""
    lines = [
        "## Configurations that ran",
        "",
        (
            "All of these ran, so all should be predicted to fit. If a release does not state the number format of"
            " gradient accumulation or the number of offloaded layers, its recipes do."
        ),
        "",
        "| platform | ran | predicted to fit | |",
        "|---|---|---|---|",
    ]
    for platform, title in PLATFORMS.items():
        ran = [estimates[point.id] for point in points if point.platform == platform and point.step_s]
        lines.append(f"| {title} | {len(ran)} | {sum(one.fits for one in ran)} | {_percent(_fitting(ran))} |")
    every = [point for point in points if point.step_s]
    lines.append(f"| **all** | {len(every)} | | {_percent(_fitting([estimates[point.id] for point in every]))} |")
    short = [
        f"`{point.id}` lacks {one.shortfall_bytes / 1e9:.1f} GB of {one.capacity_bytes / 1e9:.0f}"
        + _reported(point, one)
        for point in every
        if not (one := estimates[point.id]).fits
    ]
    large = [point for point in points if point.is_too_large]
    refused = sum(not estimates[point.id].fits for point in large)
    lines += ["", f"Predicted not to fit: {'; '.join(short)}."] if short else []
    too_large = f"Of {len(large)} configurations published as too large, {refused} are predicted not to fit."
    return [*lines, "", too_large, ""]


def _reported(point: Point, estimate: LlmEstimate) -> str:
    """Return the memory that PyTorch reports of the card, if the configuration fits into that; else an empty string."""
    reported_bytes = REPORTED_BYTES.get(key_of(point.cluster.nodes[0].device.name) or "", 0.0)
    return f" (the card reports {reported_bytes / 1e9:.1f})" if estimate.fullest.peak_bytes <= reported_bytes else ""


def _fitting(estimates: Sequence[LlmEstimate]) -> float:
    return sum(one.fits for one in estimates) / len(estimates)


def _left(left: Counter[str]) -> list[str]:
    lines = ["## Points without an estimate", "", "| points | reason |", "|---|---|"]
    return [*lines, *(f"| {count} | {why} |" for why, count in left.most_common()), ""]


def _points(steps: Sequence[Point], estimates: dict[str, LlmEstimate], ratio: dict[str, float]) -> list[str]:
    lines = ["## Every step", "", "*Fitted* points are in the half that constants were fitted to.", ""]
    for platform, title in PLATFORMS.items():
        lines += [
            f"### {title}",
            "",
            f"From {SOURCES[platform]}.",
            "",
            "| point | configuration | GPUs | measured | predicted | ratio | |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {point.id} | {point.config.named()} | {point.config.world_size} | {point.step_s:.4g} s |"
            f" {estimates[point.id].step_s:.4g} s | {ratio[point.id]:.2f} | {'fitted' if point.is_fitted else ''} |"
            for point in steps
            if point.platform == platform
        ]
        lines.append("")
    return lines[:-1]


def main(words: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    points, left = read()
    if not words or "--experts" in words:
        kept = json.loads(FITS.read_text(encoding="utf-8")) if words else fits(points)
        kept |= fits_of_experts(points, _of(kept["half"])) if words else {}
        FITS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(FITS.read_text(encoding="utf-8"))
    texts = pages(points, left, kept)
    if "--check" in words:
        return int(any(text != path.read_text(encoding="utf-8") for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    steps = [point for point in points if point.step_s]
    ratio = {point.id: point.estimate(CONSTANTS).step_s / (point.step_s or math.nan) for point in steps}
    left_out = _every_left_out(steps, _left_out(steps, kept), kept)
    wrong = ranges.complaints(_counted(steps, ratio), left_out)
    print("".join(f"{one}\n" for one in wrong), file=sys.stderr, end="")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
