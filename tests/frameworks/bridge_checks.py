"""LLM plans exported for Megatron-Bridge, whose own classes build and validate the configuration on the CPU.

Megatron-Bridge imports Transformer Engine and Megatron Energon, which are not installed here. A module of that name
stands in for each, and has any class that is asked for. Nothing of them is called: no model is built.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import shlex
import sys
import tempfile
import types
import typing
import warnings
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import typing_extensions
from packaging.version import Version

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
if not hasattr(typing, "override"):  # Python 3.12 has it, for which Megatron-Bridge is written
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
STOOD_IN = ("transformer_engine", "megatron.energon")


class StandIn(types.ModuleType):
    """A module that has a class, or for a name in small letters a module, of any name."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = importlib.import_module(f"{self.__name__}.{name}") if name[0].islower() else type(name, (), {})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that stand in for others."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        stands_in = any(name == one or name.startswith(f"{one}.") for one in STOOD_IN)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stands_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module makes its names when they are asked for."""


# Megatron Core is imported first: it works without Transformer Engine, if there is none.
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.utils
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils

megatron.core.utils._te_version = Version("2.9.0")  # the oldest release that the job folders name
# Kernels of Transformer Engine, without which settings that need them are refused.
for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
    setattr(rope_utils, name, print)
for name in ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute"):
    setattr(moe_utils, f"fused_{name}", print)
sys.meta_path.insert(0, Finder())


def fused_adam(
    *, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: bool
) -> None:
    """Stand in for Transformer Engine's optimizer, of which the arguments are looked up."""


importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam = fused_adam  # type: ignore[attr-defined]
# The package imports the bridges of all models, of which some need packages of their own.
package = types.ModuleType("megatron.bridge")
package.__path__ = [str(Path(at) / "bridge") for at in megatron.__path__]
sys.modules["megatron.bridge"] = package
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.training import config as bridge_config

package.AutoBridge = AutoBridge  # type: ignore[attr-defined]
from megatron.core.transformer.enums import AttnBackend, CudaGraphModule, LayerType
from releases import BRIDGE
from results import Result, done
from ways import GPUS, WayCase, files_of, refused_by, tally, ways

import hpgo
from hpgo import jobs

if TYPE_CHECKING:
    import random


def some_model(chance: random.Random) -> dict[str, Any]:
    """Llamas and Qwens, also with experts."""
    sparse: dict[str, Any] = {}
    head_norms = chance.random() < 0.4
    if head_norms and chance.random() < 0.5:
        sparse = {"experts": 8, "experts_per_token": chance.choice([2, 4]), "expert_ffn": chance.choice([64, 128])}
    return sparse | {
        "hidden": 128, "heads": 8, "kv_heads": chance.choice([4, 8]), "head_dim": chance.choice([16, 32]),
        "ffn": chance.choice([256, 512]), "vocab": chance.choice([1024, 1000]), "gated": True,
        "tied": chance.random() < 0.5, "head_norms": head_norms,
    }  # fmt: skip


def of_hugging_face(model: hpgo.Transformer, folder: Path) -> str:
    """Write the model's configuration as Hugging Face has it into the folder, and return its path."""
    kind, name = ("qwen3", "Qwen3ForCausalLM") if model.head_norms else ("llama", "LlamaForCausalLM")
    sparse: dict[str, Any] = {}
    if model.experts:
        kind, name = "qwen3_moe", "Qwen3MoeForCausalLM"
        sparse = {
            "num_experts": model.experts, "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn, "norm_topk_prob": True,
        }  # fmt: skip
    values = {
        "model_type": kind, "architectures": [name], "num_hidden_layers": model.layers, "hidden_size": model.hidden,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
        "intermediate_size": model.ffn, "vocab_size": model.vocab, "tie_word_embeddings": model.tied,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", **sparse,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


def validated(case: WayCase) -> bool:
    """Whether Megatron-Bridge's configuration, which checks and completes itself, is what the plan means."""
    files = files_of(case, "megatron-bridge", refused_by("megatron-bridge", case))
    if files is None:
        return False
    space: dict[str, Any] = {"__name__": "planned"}
    exec(files["planned.py"], space)
    os.environ |= {"WORLD_SIZE": str(case.dp * case.tp * case.cp * case.pp), "RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        model = of_hugging_face(case.model, Path(folder))
        for data in (None, folder):
            config = space["recipe"](model, data=data, pretrained=folder)
            bridge_config.runtime_config_update(config)
            compare(case, config)
    scripted(case)
    return True


def scripted(case: WayCase) -> None:
    """Assert that the script of a job folder passes its words on to the configuration, and that this is valid."""
    files = jobs.files(case.plan, to="megatron-bridge", on="torchrun")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("planned.py", "train.py"):
            (Path(folder) / name).write_text(files[name], encoding="utf-8")
        values = {"HF_MODEL": of_hugging_face(case.model, Path(folder)), "TOKENIZER": folder, "PRETRAINED": folder,
                  "DATA_PATH": folder, "SAVE": f"{folder}/a 'b, {{c}}=\\"}  # fmt: skip
        for name in ("data.txt", "smoke.txt"):
            words = [Template(word).substitute(values) for word in shlex.split(files[name], comments=True)]
            space: dict[str, Any] = {"__name__": "train"}
            with (
                mock.patch.object(sys, "argv", ["train.py", *words]),
                mock.patch.object(sys, "path", [folder, *sys.path]),
            ):
                sys.modules.pop("planned", None)
                exec(files["train.py"], space)
                config = space["config_of"](space["options"]())
            space["check"](config)
            compare(case, config)
            is_smoke = name == "smoke.txt"
            assert config.checkpoint.save == (None if is_smoke else values["SAVE"])
            assert (config.train.train_iters == 5) == is_smoke == (config.dataset.__class__.__name__[:4] == "Mock")


def compare(case: WayCase, config: Any) -> None:
    """Assert that degrees, stages, batch, recomputation, precision, optimizer and adapters are those of the plan."""
    model, planned = config.model, case.plan.estimate.parallelism
    assert (model.tensor_model_parallel_size, model.context_parallel_size) == (case.tp, case.cp)
    assert (model.pipeline_model_parallel_size, config.data_parallel_size) == (case.pp, case.dp)
    assert (model.virtual_pipeline_model_parallel_size or 1) == case.vpp
    assert model.expert_model_parallel_size == case.ep
    assert bool(model.sequence_parallel) == case.sequence_parallel
    layout = model.pipeline_model_parallel_layout
    assert (layout is None) == (case.pp == 1)
    for stage, count in enumerate(case.counts if layout else ()):
        kinds = layout.layout[stage % case.pp][stage // case.pp]
        assert kinds.count(LayerType.decoder) == count
        assert (LayerType.embedding in kinds) == (stage == 0)
        assert (LayerType.loss in kinds) == (stage == len(case.counts) - 1)
    batch = (config.train.global_batch_size, config.train.micro_batch_size, config.dataset.seq_length, model.seq_length)
    assert batch == (case.global_batch_size, case.micro_batch_size, case.seq_length, case.seq_length)
    assert model.recompute_granularity == (None if case.recompute == "none" else case.recompute)
    if case.recompute == "full":
        how = ("uniform", 1) if case.recomputed_layers is None else ("block", case.recomputed_layers)
        assert (model.recompute_method, model.recompute_num_layers) == how
    half = case.precision == "fp16"
    assert (model.bf16, model.fp16, config.optimizer.bf16) == (not half, half, not half)
    assert model.params_dtype == (torch.float16 if half else torch.bfloat16)
    assert model.fp8 == ("hybrid" if case.precision == "fp8" else None)
    assert config.ddp.use_distributed_optimizer == config.optimizer.use_distributed_optimizer == (case.shared_stage > 0)
    assert config.ddp.grad_reduce_in_fp32 == (not half)
    assert (config.peft is not None) == (planned.lora_rank > 0)
    if config.peft is not None:
        assert (config.peft.dim, tuple(config.peft.target_modules)) == (planned.lora_rank, planned.lora_targets)


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cuda_graph_impl": "full_iteration"}, {"model.cuda_graph_impl": "full_iteration", "rng.te_rng_tracker": True}),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
     {"model.cuda_graph_modules": [CudaGraphModule.attn], "model.use_te_rng_tracker": True}),
    ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"},
     {"optimizer.exp_avg_dtype": torch.bfloat16, "optimizer.exp_avg_sq_dtype": torch.uint8,
      "optimizer.main_params_dtype": torch.float16}),
    ({"optimizer_offload_fraction": 0.5},
     {"optimizer.optimizer_cpu_offload": True, "optimizer.optimizer_offload_fraction": 0.5}),
    ({"optimizer": "sgd", "zero_stage": 0}, {"optimizer.optimizer": "sgd"}),
    ({"grad_reduce_in_bf16": True}, {"ddp.grad_reduce_in_fp32": False}),
    ({"cpu_offload_num_layers": 2}, {"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 2}),
    ({"offload_modules": ["core_attn"]}, {"model.offload_modules": ["core_attn"]}),
    ({"recompute": "selective", "recompute_modules": ["mlp"]}, {"model.recompute_modules": ["mlp"]}),
    ({"tp": 2, "tp_comm_overlap": True}, {"model.tp_comm_overlap": True}),
    ({"flash_attention": False, "recompute": "full"}, {"model.attention_backend": AttnBackend.unfused}),
    ({"dp_replicate": 2}, {"ddp.num_distributed_optimizer_instances": 2}),
    ({"fused_elementwise": False}, {"model.apply_rope_fusion": False, "model.masked_softmax_fusion": False}),
    ({"packed_length": 32, "cp": 2, "lora_rank": 8}, {"dataset.enable_offline_packing": True}),
    ({"packed_length": 32, "cuda_graph_impl": "full_iteration"}, {"dataset.enable_offline_packing": True}),
    ({"cp": 2, "lora_rank": 8}, {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False}),
]  # fmt: skip
"""Settings that are not among the random plans, and the fields that they become."""
EXPERT_SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ep": 4, "tp": 2, "etp": 2}, {"model.expert_tensor_parallel_size": 2}),
    ({"ep": 4, "moe_token_dispatcher": "deepep"},
     {"model.moe_token_dispatcher_type": "flex", "model.moe_flex_dispatcher_backend": "deepep"}),
    ({"ep": 4, "overlap_ep_comm": True}, {"model.overlap_moe_expert_parallel_comm": True}),
    ({"ep": 4, "pp": 2, "vpp": 2, "overlap_ep_comm": True, "delay_wgrad_compute": True},
     {"model.delay_wgrad_compute": True}),
]  # fmt: skip


def further_settings() -> None:
    """Assert that each of the settings is valid for Megatron-Bridge, and becomes the fields that it means."""
    shape: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 8, "head_dim": 16, "ffn": 512,
                             "vocab": 1024, "gated": True}  # fmt: skip
    dense = hpgo.Transformer(name="dense", **shape)
    sparse = hpgo.Transformer(name="sparse", experts=8, experts_per_token=2, expert_ffn=64, head_norms=True, **shape)
    for model, settings in ((dense, SETTINGS), (sparse, EXPERT_SETTINGS)):
        for given, wanted in settings:
            asked = {"zero_stage": 1, "global_batch_size": 16, "seq_length": 128} | given
            cluster = GPUS.first(8)
            plan = hpgo.LlmPlan.of(hpgo.estimate_llm(model, cluster, **asked), model, cluster)
            space: dict[str, Any] = {"__name__": "planned"}
            exec(hpgo.export.files(plan, "megatron-bridge")["planned.py"], space)
            os.environ |= {"WORLD_SIZE": "8", "RANK": "0"}
            variables = {"CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1"}
            for name in variables & os.environ.keys():
                del os.environ[name]
            with tempfile.TemporaryDirectory() as folder:
                config = space["recipe"](of_hugging_face(model, Path(folder)), data=folder, pretrained=folder)
                bridge_config.runtime_config_update(config)
            for path, value in wanted.items():
                section, _, name = path.partition(".")
                found = getattr(getattr(config, section), name)
                assert found == value, f"{given}: {path} is {found}, not {value}"


if __name__ == "__main__":
    further_settings()
    cases = ways(200, some_model, often=(0, 1), adapters=0.5)
    ran = f"the ConfigContainer of Megatron-Bridge {BRIDGE.removeprefix('v')}"
    done(Result("megatron-bridge", ran, "", ways=tally(cases, validated)))
