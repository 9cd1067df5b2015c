"""Plans exported for Megatron-LM and what builds on it, read by Megatron Core.

The parser of Megatron-LM's arguments is not in its wheel: `megatron_parser_checks` runs that of several releases.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed
import yaml

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked for while modules load
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)  # and while arguments are checked

import megatron.core
from cases import OPTIMIZERS, Case, cases, check_places, outcome, refused_by, tally
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel_state import RankGenerator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from processes import OnCpu, difference, pretended, together
from results import Result, done
from ways import WayCase, files_of, ways
from ways import refused_by as refused_way
from ways import tally as tally_ways

import hpgo

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

SCHEDULES = ("1f1b", "eager_1f1b", "interleaved")
TINY = {"hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True, "perform_initialization": True}
VOCABULARY, LENGTH = 32, 6

# What each form says, in the words of Megatron's configuration


def of_arguments(files: dict[str, str]) -> dict[str, Any]:
    """Megatron-LM's arguments."""
    words = shlex.split(files["arguments.txt"], comments=True)
    told: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else True
            name = word[2:].replace("-", "_").replace("per_virtual_pipeline_stage", "per_vp_stage")
            told[name] = int(value) if isinstance(value, str) and value.isdigit() else value
    return told


def of_bridge(files: dict[str, str]) -> dict[str, Any]:
    """Megatron-Bridge's sections."""
    (text,) = (text for name, text in files.items() if name.endswith(".yaml"))
    sections = yaml.safe_load(text)
    assert sections["optimizer"]["use_distributed_optimizer"] == sections["ddp"]["use_distributed_optimizer"]
    assert sections["optimizer"]["overlap_param_gather"] == sections["ddp"]["overlap_param_gather"]
    assert sections.pop("comm_overlap") is None
    return {key: value for section in sections.values() for key, value in section.items()}


def of_swift(files: dict[str, str]) -> dict[str, Any]:
    """ms-swift's arguments, where no recomputation is a word."""
    (text,) = (text for name, text in files.items() if name.endswith(".yaml"))
    told = yaml.safe_load(text)
    assert {"recompute_granularity", "use_distributed_optimizer"} <= told.keys(), "its own choice is another"
    if told["recompute_granularity"] == "none":
        del told["recompute_granularity"]
    return told


def of_verl(files: dict[str, str]) -> dict[str, Any]:
    """verl's overrides, whose values are in Hydra's quotes."""
    told: dict[str, Any] = {}
    for word in shlex.split(files["overrides.txt"], comments=True):
        key, _, value = word.partition("=")
        told[key.rpartition(".")[2]] = yaml.safe_load(value)
    return told | {"global_batch_size": told["train_batch_size"], "micro_batch_size": told["micro_batch_size_per_gpu"]}


def of_nemo(files: dict[str, str]) -> dict[str, Any]:
    """What the function of a NeMo module sets in a recipe that has all that it may change."""
    (text,) = (text for name, text in files.items() if name.endswith(".py"))
    overlap = SimpleNamespace(__fn_or_cls__=type("MegatronCommOverlapCallback", (), {}))
    strategy = SimpleNamespace(ddp=SimpleNamespace(), pipeline_dtype=torch.bfloat16)
    trainer = SimpleNamespace(strategy=strategy, plugins=SimpleNamespace(), callbacks=[overlap, SimpleNamespace()])
    model = SimpleNamespace(config=SimpleNamespace())
    recipe = SimpleNamespace(
        trainer=trainer, model=model, data=SimpleNamespace(), optim=SimpleNamespace(config=SimpleNamespace())
    )
    modules = {
        "nemo_run": SimpleNamespace(Config=lambda _, **values: SimpleNamespace(**values)),
        **dict.fromkeys(("nemo", "nemo.lightning", "nemo.lightning.pytorch", "nemo.lightning.pytorch.plugins")),
        "nemo.lightning.pytorch.plugins.mixed_precision": SimpleNamespace(MegatronMixedPrecision=None),
    }
    space: dict[str, Any] = {"__name__": "planned"}
    with mock.patch.dict(sys.modules, modules):
        exec(text, space)
    model.config.num_layers = space["BLOCKS"]
    space["planned"](recipe)
    ddp, kept = strategy.ddp, trainer.plugins
    assert (overlap.overlap_grad_reduce, overlap.overlap_param_gather) == (
        ddp.overlap_grad_reduce, ddp.overlap_param_gather,
    )  # fmt: skip
    told = vars(recipe.data) | vars(strategy) | vars(model.config) | vars(ddp) | vars(recipe.optim.config) | vars(kept)
    if vars(kept):
        assert kept.params_dtype == kept.pipeline_dtype == strategy.pipeline_dtype
        assert (kept.precision == "bf16-mixed") == told["bf16"]
    return told


# Reading back


def reasons(case: Case) -> list[str]:
    sgd = ["shared state of SGD"] if case.zero_stage and case.optimizer.startswith("sgd") else []
    return refused_by(case, schedules=SCHEDULES, whole_models=True) + sgd


def check_precision(case: Case, told: dict[str, Any]) -> None:
    """Asserts that weights, sums of gradients and the optimizer are those that memory was priced for."""
    if case.bits is None:
        return
    weights, sums = case.bits
    dtype = str(told.get("params_dtype", told.get("torch_dtype", told.get("dtype"))))
    assert bool(told.get("bf16")) == (weights == 16) or "bf16" not in told
    assert "bf16" in told or dtype != "None" or weights == 32  # Megatron-LM's default
    if dtype != "None":
        assert ("bfloat16" in dtype) == (weights == 16)
    if weights == 16:
        narrow = (
            told.get("grad_reduce_in_fp32") is False
            or told.get("main_grads_dtype") == "bf16"
            or bool(told.get("grad_reduce_in_bf16"))
        )
        assert narrow == (sums == 16)
    assert told.get("optimizer", "adam") == case.optimizer.partition("-")[0]
    if told.get("optimizer") == "sgd":
        assert float(told.get("sgd_momentum", 0.9)) == (0.0 if case.optimizer == "sgd" else 0.9)


def reader(target: str, told_by: Callable[[dict[str, str]], dict[str, Any]]) -> Callable[[Case], bool]:
    """A check that a target's files say what the case does, as Megatron Core understands them."""

    def the_same(case: Case) -> bool:
        also = []
        if target == "verl" and case.bits is not None and case.bits[0] == 32:
            also.append("32-bit weights")
        if target == "ms-swift" and case.bits == (16, 16) and not case.shard:
            also.append("16-bit gradients without a shared state")
        files = outcome(case.given, target, reasons(case) + also)
        if files is None:
            return False
        check_places(case, files)
        told = told_by(files)
        assert (told["global_batch_size"], told["micro_batch_size"]) == (case.global_batch_size, case.share)
        precise = target == "ms-swift" and case.bits == (16, 16)  # which needs the distributed optimizer
        assert bool(told.get("use_distributed_optimizer")) == (bool(case.zero_stage) or precise)
        check_precision(case, told)
        if target != "megatron":  # whose defaults these are
            assert (told["context_parallel_size"], told["expert_model_parallel_size"]) == (1, 1)
        compare(case, config_of(case, told))
        return True

    return the_same


def config_of(case: Case, told: dict[str, Any]) -> TransformerConfig:
    """Megatron Core's configuration, which checks what it is told."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
             "microbatch_group_size_per_vp_stage", "recompute_granularity", "recompute_method",
             "recompute_num_layers")  # fmt: skip
    return TransformerConfig(
        num_layers=told.get("num_layers", case.blocks),
        pipeline_dtype=torch.float32,
        **{name: told[name] for name in names if told.get(name) is not None},
        **TINY,
    )


def compare(case: Case, config: TransformerConfig) -> None:
    """Stages, degrees, recomputation."""
    assert config.num_layers == case.blocks
    assert (config.pipeline_model_parallel_size, config.tensor_model_parallel_size) == (case.ranks, case.gpus)
    if len(case.counts) > case.ranks:
        assert config.microbatch_group_size_per_vp_stage == (case.group or case.ranks)
    assert (config.virtual_pipeline_model_parallel_size or 1) == len(case.counts) // case.ranks
    assert (config.recompute_granularity == "full") == case.recompute
    if case.recompute:
        assert all(count % config.recompute_num_layers == 0 for count in case.counts), "it would run past a stage"
    layout = config.pipeline_model_parallel_layout
    assert (layout is None) == (case.ranks == 1)
    for stage, rank in enumerate(case.rank_of_stage if layout else ()):
        kinds = layout.layout[rank][stage // case.ranks]
        assert kinds.count(LayerType.decoder) == case.counts[stage]
        assert (LayerType.embedding in kinds) == (stage == 0)
        assert (LayerType.loss in kinds) == (stage == len(case.counts) - 1)
    each = RankGenerator(tp=case.gpus, ep=1, dp=case.replicas[0], pp=case.ranks, cp=1, order="tp-cp-ep-dp-pp")
    for kind, fixed in (("dp", (0, 2)), ("tp", (0, 1)), ("pp", (1, 2))):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(case.grid):
            groups.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
        assert sorted(each.get_ranks(kind)) == sorted(groups.values())


def some_model(chance: random.Random) -> dict[str, Any]:
    """Llamas, Qwens and GPT-2s; also with experts, in all layers or but the first, and with a further token."""
    kv_heads = chance.choice([4, 8])
    plain = chance.random() < 0.3
    experts: dict[str, Any] = {"further_tokens": chance.choice([0, 0, 0, 1])}
    if not plain and chance.random() < 0.4:
        grouped = chance.random() < 0.3
        experts |= {
            "experts": 8, "experts_per_token": chance.choice([1, 2]), "expert_ffn": chance.choice([64, 128]),
            "shared_ffn": chance.choice([0, 64]), "dense_layers": chance.choice([(), (0,)]),
            "expert_groups": 4 if grouped else 1, "groups_per_token": 2 if grouped else 1,
        }  # fmt: skip
    return experts | {
        "hidden": 128, "heads": 8, "kv_heads": 8 if plain else kv_heads, "head_dim": chance.choice([16, 32]),
        "ffn": chance.choice([256, 512]), "vocab": 1024, "gated": not plain, "tied": chance.random() < 0.5,
        "centred_norms": plain, "positions": 128 if plain else 0, "ffn_bias": plain,
        "attention_bias": "all" if plain else chance.choice(["none", "qkv"]),
        "head_norms": not plain and chance.random() < 0.3,
    }  # fmt: skip


def same_core(case: WayCase) -> bool:
    """Whether Megatron Core's configuration, which checks what it is told, is what the way means."""
    files = files_of(case, "megatron", refused_way("megatron", case))
    if files is None:
        return False
    told = of_arguments(files)
    names = (
        "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "num_query_groups", "ffn_hidden_size",
        "normalization", "qk_layernorm", "tensor_model_parallel_size", "sequence_parallel", "context_parallel_size",
        "pipeline_model_parallel_size", "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "bf16", "fp16", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_num_groups",
        "moe_router_group_topk", "moe_shared_expert_intermediate_size", "moe_token_dispatcher_type",
        "moe_router_pre_softmax", "expert_model_parallel_size", "expert_tensor_parallel_size", "mtp_num_layers",
    )  # fmt: skip
    if "num_experts" in told:
        told["num_moe_experts"] = told["num_experts"]
        names += ("num_moe_experts",)
    if pattern := told.get("moe_layer_freq"):
        told["moe_layer_freq"] = [
            int(kind) for kind, of in re.findall(r"\[(\d)\]\*(\d+)", pattern) for _ in range(int(of))
        ]
        names += ("moe_layer_freq",)
    # Experts in 8 bits ask which Transformer Engine there is, and there is none.
    with mock.patch("megatron.core.transformer.transformer_config.is_te_min_version", return_value=True):
        config = TransformerConfig(
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            gated_linear_unit="swiglu" in told,
            add_bias_linear="disable_bias_linear" not in told,
            add_qkv_bias="add_qkv_bias" in told,
            fp8=told.get("fp8_format"),
            fp8_recipe=told.get("fp8_recipe", "delayed"),
            use_cpu_initialization=True,
            **{name: told[name] for name in names if name in told},
        )
    compare_way(case, config)
    assert (told["global_batch_size"], told["micro_batch_size"]) == (case.global_batch_size, case.micro_batch_size)
    assert (told["seq_length"], told["vocab_size"]) == (case.seq_length, case.model.vocab)
    assert ("untie_embeddings_and_output_weights" in told) != case.model.tied
    assert ("use_distributed_optimizer" in told) == (case.shared_stage > 0)
    assert ("use_megatron_fsdp" in told) == (case.shared_stage == 3)
    return True


def compare_way(case: WayCase, config: TransformerConfig) -> None:
    """The model's shape, degrees, stages, recomputation and precision."""
    model = case.model
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (model.layers, model.hidden, model.ffn)
    # A model whose layers are all dense is told no experts.
    experts = model.experts if any(model.holds_experts(at) for at in range(model.layers)) else 0
    assert (config.num_moe_experts or 0, config.mtp_num_layers or 0) == (experts, model.further_tokens)
    if experts:
        assert (config.moe_ffn_hidden_size, config.moe_router_topk) == (model.expert_ffn, model.experts_per_token)
        assert (config.moe_shared_expert_intermediate_size or 0) == model.shared_ffn
        assert (config.moe_router_num_groups or 1, config.moe_router_group_topk or 1) == (
            model.expert_groups, model.groups_per_token,
        )  # fmt: skip
        assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (case.ep, 1)
        freq, every = config.moe_layer_freq, range(model.layers)
        assert [bool(freq[at]) if isinstance(freq, list) else True for at in every] == [
            at not in model.dense_layers for at in every
        ]
    heads = (config.num_attention_heads, config.num_query_groups, config.kv_channels)
    assert heads == (model.heads, model.kv_heads, model.head_dim)
    assert config.gated_linear_unit == model.gated
    assert config.normalization == ("LayerNorm" if model.centred_norms else "RMSNorm")
    assert config.qk_layernorm == model.head_norms
    assert config.add_bias_linear == model.ffn_bias
    assert (config.add_qkv_bias or config.add_bias_linear) == (model.attention_bias != "none")
    assert config.tensor_model_parallel_size == case.tp
    assert bool(config.sequence_parallel) == case.sequence_parallel
    assert (config.context_parallel_size, config.pipeline_model_parallel_size) == (case.cp, case.pp)
    assert (config.virtual_pipeline_model_parallel_size or 1) == case.vpp
    layout = config.pipeline_model_parallel_layout
    assert (layout is None) == (case.pp == 1)
    for stage, count in enumerate(case.counts if layout else ()):
        kinds = layout.layout[stage % case.pp][stage // case.pp]
        assert kinds.count(LayerType.decoder) == count
        assert (LayerType.embedding in kinds) == (stage == 0)
        assert (LayerType.loss in kinds) == (stage == len(case.counts) - 1)
        assert kinds.count(LayerType.mtp) == (model.further_tokens if stage == len(case.counts) - 1 else 0)
    assert config.recompute_granularity == (None if case.recompute == "none" else case.recompute)
    if case.recompute == "full":
        how = ("uniform", 1) if case.recomputed_layers is None else ("block", case.recomputed_layers)
        assert (config.recompute_method, config.recompute_num_layers) == how
    assert (config.bf16, config.fp16) == (case.precision != "fp16", case.precision == "fp16")
    assert config.fp8 == ("hybrid" if case.precision == "fp8" else None)


# Building and training


def some(number: int, maximum: int) -> Iterator[Case]:
    """Cases with a pipeline that Megatron runs on at most so many processes."""
    fitting = (
        case
        for case in cases(400, SCHEDULES, seed=3)
        if not reasons(case) and case.ranks > 1 and len(case.grid) <= maximum
    )
    for _ in range(number):
        yield next(fitting)


def chunks(config: TransformerConfig) -> list[GPTModel]:
    """The model of this rank, one for each of its stages."""
    virtual = config.virtual_pipeline_model_parallel_size
    return [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk,
        )
        for chunk in (range(virtual) if virtual else [None])
    ]


@contextlib.contextmanager
def grid(config: TransformerConfig) -> Iterator[None]:
    """Megatron's process groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def built() -> str:
    """Five plans: the blocks of each rank's real model."""
    ranks = 0
    for case in some(5, maximum=16):
        config = config_of(case, of_arguments(hpgo.export.files(case.given, "megatron")))
        for rank, (_, replica, gpu) in enumerate(case.grid):
            with pretended(rank, len(case.grid)), grid(config):
                assert parallel_state.get_data_parallel_rank() == replica
                assert parallel_state.get_tensor_model_parallel_rank() == gpu
                for stage, model in zip(case.held(rank), chunks(config), strict=True):
                    assert [layer.layer_number - 1 for layer in model.decoder.layers] == case.parts[stage]
                    assert hasattr(model, "embedding") == (stage == 0)
                    assert hasattr(model, "output_layer") == (stage == len(case.counts) - 1)
            ranks += 1
    return f"5 plans, {ranks} ranks"


def trained() -> str:
    """A plan of either schedule, each rank a process, against one process."""
    worst = 0.0
    for name in ("1f1b", "interleaved"):
        case = next(
            case
            for case in some(80, maximum=6)
            if case.replicas[0] > 1 and case.gpus == 1 and case.schedule == name and not case.recompute
        )
        told = of_arguments(hpgo.export.files(case.given, "megatron"))
        found = together(case.ranks * case.replicas[0], _train, case, told)
        (wanted,) = together(1, _train_alone, case)
        every = {key: gradient for rank in found for key, gradient in rank.items()}
        worst = max(worst, difference(every, wanted))
    assert worst <= 1e-6, worst  # the rest is in float64, but Megatron's loss in float32
    return f"2 trained, off by {worst:.0e}"


def _train(case: Case, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    return _step(config_of(case, told), case.share, case.replicas[0], case.micro_batches, told)


def _train_alone(case: Case) -> dict[str, torch.Tensor]:
    config = TransformerConfig(num_layers=case.blocks, pipeline_dtype=torch.float32, **TINY)
    return _step(config, case.global_batch_size, 1, 1, {})


def _step(
    config: TransformerConfig, share: int, replicas: int, micro_batches: int, told: dict[str, Any]
) -> dict[str, torch.Tensor]:
    # Megatron asks for the current GPU where it makes buffers, and for its random state before a dropout of nothing.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    config.params_dtype = config.pipeline_dtype = torch.float64
    config.attention_dropout = config.hidden_dropout = 0.0
    config.masked_softmax_fusion = config.bias_dropout_fusion = config.gradient_accumulation_fusion = False
    # As Megatron-LM's own command line has it.
    config.overlap_p2p_comm = config.virtual_pipeline_model_parallel_size is not None
    config.batch_p2p_comm = not config.overlap_p2p_comm
    with OnCpu(), grid(config):
        models = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=False,
                    overlap_grad_reduce=bool(told.get("overlap_grad_reduce")),
                    use_distributed_optimizer=False,
                ),
                model.to(torch.float64),
            )
            for model in chunks(config)
        ]
        for model in models:
            for name, parameter in model.named_parameters():
                torch.manual_seed(sum(_global(model, name).encode()))
                parameter.data = torch.randn_like(parameter) / 8
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
        torch.manual_seed(5)
        tokens = torch.randint(0, VOCABULARY, (share * replicas * micro_batches, LENGTH + 1))
        replica = parallel_state.get_data_parallel_rank()
        mine = tokens.view(micro_batches, replicas, share, LENGTH + 1)[:, replica]

        def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches)
            positions = torch.arange(LENGTH).expand(share, LENGTH)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
            output = model(batch[:, :-1], positions, mask, labels=batch[:, 1:])
            return output, lambda losses: (losses.mean(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(mine) for _ in models],
            model=models,
            num_microbatches=micro_batches,
            seq_length=LENGTH,
            micro_batch_size=share,
        )
        return {
            _global(model, name): parameter.main_grad.clone()
            for model in models
            for name, parameter in model.named_parameters()
        }


def _global(model: Any, name: str) -> str:
    """A parameter's name in the whole model."""
    parts = name.removeprefix("module.").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.module.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


FORMS = {
    "megatron": of_arguments,
    "megatron-bridge": of_bridge,
    "nemo": of_nemo,
    "verl": of_verl,
    "ms-swift": of_swift,
}

if __name__ == "__main__":
    core = f"megatron-core {megatron.core.__version__}"
    rows = [
        Result(
            target,
            core,
            tally(
                cases(200, SCHEDULES, optimizers=OPTIMIZERS[1:3] if target == "verl" else OPTIMIZERS),
                reader(target, told_by),
            ),
        )
        for target, told_by in FORMS.items()
    ]
    same_ways = tally_ways(ways(200, some_model, often=(0, 1)), same_core)
    rows[0] = replace(rows[0], built=built(), trained=trained(), ways=same_ways)
    done(*rows)
