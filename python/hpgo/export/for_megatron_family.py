"""Export to frameworks on Megatron Core with a different configuration: Megatron-Bridge, NeMo, verl, ms-swift.

These frameworks choose the model themselves, so the layout checks the number of blocks instead of setting it. Settings
that some recipes turn on are always written, even if they are off: recipes may use context parallelism or overlap
communication that the plan does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python, in_shell, in_yaml
from hpgo.export import precision
from hpgo.export.for_megatron import CLIPPING, settings
from hpgo.export.jobs import ExportJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.export.targets import Place, Target

Value = int | float | str | bool | dict[str, "Value"] | None

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
_GROUP = "microbatch_group_size_per_vp_stage"
_SINGLE = ("context_parallel_size", "expert_model_parallel_size")
"""Degrees that recipes may raise, but that plans from layer profiles do not have."""


def bridge(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return YAML to merge into a recipe's `ConfigContainer`."""
    job = ExportJob.of(given, target, place)
    values = _all_settings(job)
    sections: dict[str, dict[str, Value]] = {
        "train": _part(values, "global_batch_size", "micro_batch_size"),
        "model": _part(
            values,
            *_DEGREES,
            *_single(values),
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            _GROUP,
            *_RECOMPUTATION,
        ),
        "ddp": _part(values, "use_distributed_optimizer", *_OVERLAPS),
        # Megatron-Bridge turns a setting on in both sections if either has it, so both must be off to turn it off.
        "optimizer": _part(values, "use_distributed_optimizer", "overlap_param_gather") | precision.optimizer(job),
    }
    if (kept := precision.widths(job)) is not None:
        sections["mixed_precision"] = _mixed_precision(*kept)
    lines = _comments(job, "optimizer.clip_grad")
    lines.append("comm_overlap: null  # it would replace the settings of ddp")
    for name, section in sections.items():
        lines += [f"{name}:", *(f"  {key}: {_yaml(value)}" for key, value in section.items())]
    return {place.main or "planned.yaml": "\n".join(lines) + "\n"} | job.beside()


def swift(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return YAML of arguments for `megatron sft FILE`. The user adds the arguments of the model and the data."""
    job = ExportJob.of(given, target, place)
    settings_of = _all_settings(job) | precision.swift(job) | precision.optimizer(job)
    settings_of["recompute_granularity"] = settings_of["recompute_granularity"] or "none"
    # The plan's virtual stages follow from the layout.
    keys = [key for key in settings_of if key not in {"num_layers", "virtual_pipeline_model_parallel_size"}]
    # ms-swift passes each value on as text, and the text "null" would not be None. So settings without a value are left
    # out.
    values = {key: settings_of[key] for key in keys if settings_of[key] is not None}
    lines = [*_comments(job, "clip_grad"), *(f"{key}: {_yaml(value)}" for key, value in values.items())]
    return {place.main or "planned.yaml": "\n".join(lines) + "\n"} | job.beside()


def verl(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return overrides of `verl.trainer.sft_trainer`, one per line and quoted for a shell."""
    job = ExportJob.of(given, target, place)
    chosen = _all_settings(job)
    # `++` adds a key or overrides it, while a plain key must exist in verl's configuration.
    overrides: dict[str, Value] = {
        "engine": "megatron",
        "optim": "megatron",
        "data.train_batch_size": chosen["global_batch_size"],
        "data.micro_batch_size_per_gpu": chosen["micro_batch_size"],
        "data.use_dynamic_bsz": False,
        **{
            f"engine.{key}": chosen[key]
            for key in (*_DEGREES, *_single(chosen), "virtual_pipeline_model_parallel_size")
        },
        "engine.use_distributed_optimizer": chosen["use_distributed_optimizer"],
        **{f"++engine.override_ddp_config.{key}": chosen[key] for key in _OVERLAPS},
        **{f"++engine.override_transformer_config.{key}": chosen[key] for key in _RECOMPUTATION},
        **{
            f"++engine.override_transformer_config.{key}": chosen[key]
            for key in ("pipeline_model_parallel_layout", _GROUP)
        },
    }
    if kept := precision.verl(job):
        overrides["engine.dtype"] = kept["dtype"]
        overrides["++engine.override_ddp_config.grad_reduce_in_fp32"] = kept["grad_reduce_in_fp32"]
    comments = _comments(
        job,
        "optim.clip_grad",
        "pass them on: grep -v '^#' FILE | xargs torchrun ... -m verl.trainer.sft_trainer ...",
        "for reinforcement learning use the same keys below actor_rollout_ref.actor.megatron",
    )
    lines = [*comments, *(in_shell(f"{key}={_hydra(value)}") for key, value in overrides.items())]
    return {place.main or "overrides.txt": "\n".join(lines) + "\n"} | job.beside()


def nemo(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a Python module whose function `planned` applies the plan to a recipe."""
    job = ExportJob.of(given, target, place)
    chosen = _all_settings(job)
    values: dict[str, Value] = {
        **{f"recipe.data.{key}": chosen[key] for key in ("global_batch_size", "micro_batch_size")},
        **{
            f"strategy.{key}": chosen[key]
            for key in (
                *_DEGREES,
                *_single(chosen),
                "virtual_pipeline_model_parallel_size",
                "pipeline_model_parallel_layout",
            )
        },
        **{f"recipe.model.config.{key}": chosen[key] for key in (_GROUP, *_RECOMPUTATION)},
        **{f"strategy.ddp.{key}": chosen[key] for key in ("use_distributed_optimizer", *_OVERLAPS)},
        "recipe.optim.config.use_distributed_optimizer": chosen["use_distributed_optimizer"],
        "recipe.optim.config.overlap_param_gather": chosen["overlap_param_gather"],
        **{f"recipe.optim.config.{key}": value for key, value in precision.optimizer(job).items()},
    }
    kept = precision.widths(job)
    plugin, imports = ([], []) if kept is None else (_plugin(*kept), _IMPORTS)
    lines = [
        '"""Settings of a plan for a recipe of NeMo, for instance llm.llama3_8b.pretrain_recipe()."""',
        "",
        *_comments(job, "recipe.optim.config.clip_grad"),
        "",
        *imports,
        f"BLOCKS = {chosen['num_layers']}",
        "",
        "",
        "def planned(recipe):",
        '    """Apply the plan to a recipe and return it."""',
        "    found = recipe.model.config.num_layers",
        "    if found != BLOCKS:",
        '        raise ValueError(f"the plan is for {BLOCKS} blocks, but the model has {found}")',
        "    strategy = recipe.trainer.strategy",
        *(f"    {key} = {in_python(value)}" for key, value in values.items()),
        *plugin,
        "    # This callback would replace the settings of ddp.",
        '    for callback in getattr(recipe.trainer, "callbacks", None) or []:',
        '        if getattr(callback, "__fn_or_cls__", type(callback)).__name__ == "MegatronCommOverlapCallback":',
        *(f"            callback.{key} = {in_python(chosen[key])}" for key in _OVERLAPS),
        "    return recipe",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n"} | job.beside()


def _all_settings(job: ExportJob) -> dict[str, Value]:
    """Return all settings, including those that are off or None, so that they override a recipe's own values."""
    nothing: dict[str, Value] = dict.fromkeys((*_RECOMPUTATION, "pipeline_model_parallel_layout", _GROUP))
    off: dict[str, Value] = dict.fromkeys(("use_distributed_optimizer", *_OVERLAPS), False)
    virtual_stages_per_rank: dict[str, Value] = {
        "virtual_pipeline_model_parallel_size": job.virtual_stages_per_rank if job.virtual_stages_per_rank > 1 else None
    }
    single: dict[str, Value] = dict.fromkeys(_SINGLE, 1)
    if job.gpus_per_device == 1:
        # Recipes may turn it on, but Megatron Core refuses it without tensor parallelism.
        single["sequence_parallel"] = False
    return nothing | off | virtual_stages_per_rank | single | settings(job)


def _single(chosen: Mapping[str, Value]) -> list[str]:
    return [key for key in (*_SINGLE, "sequence_parallel") if key in chosen]


_IMPORTS = (
    "import nemo_run as run",
    "import torch",
    "from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision",
    "",
)


def _plugin(weights: str, gradients: str) -> list[str]:
    """Return lines that replace the recipe's precision plugin, whose types NeMo gives to model and optimizer.

    Source: `MegatronStrategy.connect` and `MegatronMixedPrecision` of NeMo 2.5.3.
    """
    return [
        "    recipe.trainer.plugins = run.Config(",
        "        MegatronMixedPrecision,",
        f"        precision={in_python('bf16-mixed' if weights == 'bfloat16' else '32')},",
        f"        params_dtype=torch.{weights},",
        f"        pipeline_dtype=torch.{weights},",
        f"        grad_reduce_in_fp32={gradients == 'float32'},",
        "    )",
        f"    strategy.pipeline_dtype = torch.{weights}",
        f"    recipe.optim.config.bf16 = {weights == 'bfloat16'}",
        "    recipe.optim.config.fp16 = False",
    ]


def _mixed_precision(weights: str, gradients: str) -> dict[str, Value]:
    """Return a `MixedPrecisionConfig`, which sets the types of the model, of ddp and of the optimizer.

    The whole object is written, because recipes name theirs by a string, which has no fields to override. Source:
    `training/mixed_precision.py` and `training/utils/omegaconf_utils.py` of Megatron-Bridge 0.6.0.
    """
    dtype: dict[str, Value] = {"_target_": f"torch.{weights}", "_call_": False}
    return {
        "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
        "fp32": weights == "float32",
        "bf16": weights == "bfloat16",
        "fp16": False,
        "fp8": None,
        "fp4": None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "grad_reduce_in_fp32": gradients == "float32",
    }


def _comments(job: ExportJob, clip: str, *notes: str) -> list[str]:
    blocks = f"the model must have {sum(job.block_counts)} blocks"
    return [f"# {line}" for line in job.header(blocks, CLIPPING.format(clip), *notes)]


def _part(values: dict[str, Value], *keys: str) -> dict[str, Value]:
    return {key: values[key] for key in keys}


def _yaml(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    return in_yaml(value) if isinstance(value, str) else str(value).lower()


def _hydra(value: Value) -> str:
    """Return a value as Hydra's override grammar needs it: quoted if it has characters with a meaning there."""
    if value is None:
        return "null"
    return f"'{value}'" if isinstance(value, str) and not value.isalnum() else str(value)
