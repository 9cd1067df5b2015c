"""What is built on Megatron Core and configured otherwise: Megatron-Bridge, NeMo, verl, ms-swift.

They name the model themselves, so the number of its blocks is checked by the layout, not set. What they turn on of
their own accord is set either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python, in_shell, in_yaml
from hpgo.export.for_megatron import CLIPPING, settings
from hpgo.export.jobs import Job

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target

Value = int | str | bool | None

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
_GROUP = "microbatch_group_size_per_vp_stage"


def bridge(given: object, target: Target, place: Place) -> dict[str, str]:
    """YAML to merge into a recipe's `ConfigContainer`."""
    job = Job.of(given, target, place)
    told = _told(job)
    sections: dict[str, dict[str, Value]] = {
        "train": _part(told, "global_batch_size", "micro_batch_size"),
        "model": _part(
            told,
            *_DEGREES,
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            _GROUP,
            *_RECOMPUTATION,
        ),
        "ddp": _part(told, "use_distributed_optimizer", *_OVERLAPS),
        "optimizer": _part(told, "use_distributed_optimizer"),
    }
    lines = _comments(job, "optimizer.clip_grad")
    for name, values in sections.items():
        lines += [f"{name}:", *(f"  {key}: {_yaml(value)}" for key, value in values.items())]
    return {place.main or "planned.yaml": "\n".join(lines) + "\n"} | job.beside()


def swift(given: object, target: Target, place: Place) -> dict[str, str]:
    """YAML of arguments: `megatron sft FILE`, with those of the model and the data beside them."""
    job = Job.of(given, target, place)
    told = _told(job)
    told["recompute_granularity"] = told["recompute_granularity"] or "none"
    keys = ("global_batch_size", "micro_batch_size", *_DEGREES, "pipeline_model_parallel_layout", _GROUP,
            *_RECOMPUTATION, "use_distributed_optimizer", *_OVERLAPS)  # fmt: skip
    # It passes each on as text, so what is to be left alone must not be there.
    values = {key: told[key] for key in keys if told[key] is not None}
    lines = [*_comments(job, "clip_grad"), *(f"{key}: {_yaml(value)}" for key, value in values.items())]
    return {place.main or "planned.yaml": "\n".join(lines) + "\n"} | job.beside()


def verl(given: object, target: Target, place: Place) -> dict[str, str]:
    """Overrides of `verl.trainer.sft_trainer`, one a line, each quoted for a shell."""
    job = Job.of(given, target, place)
    told = _told(job)
    overrides: dict[str, Value] = {
        "engine": "megatron",
        "optim": "megatron",
        "data.train_batch_size": told["global_batch_size"],
        "data.micro_batch_size_per_gpu": told["micro_batch_size"],
        "data.use_dynamic_bsz": False,
        **{f"engine.{key}": told[key] for key in (*_DEGREES, "virtual_pipeline_model_parallel_size")},
        "engine.use_distributed_optimizer": told["use_distributed_optimizer"],
        **{f"++engine.override_ddp_config.{key}": told[key] for key in _OVERLAPS},
        **{f"++engine.override_transformer_config.{key}": told[key] for key in _RECOMPUTATION},
        **{
            f"++engine.override_transformer_config.{key}": told[key]
            for key in ("pipeline_model_parallel_layout", _GROUP)
        },
    }
    comments = _comments(
        job,
        "optim.clip_grad",
        "pass them on: grep -v '^#' FILE | xargs torchrun ... -m verl.trainer.sft_trainer ...",
        "for reinforcement learning the same keys stand below actor_rollout_ref.actor.megatron",
    )
    lines = [*comments, *(in_shell(f"{key}={_hydra(value)}") for key, value in overrides.items())]
    return {place.main or "overrides.txt": "\n".join(lines) + "\n"} | job.beside()


def nemo(given: object, target: Target, place: Place) -> dict[str, str]:
    """A Python module whose function `planned` sets what the plan decides in a recipe."""
    job = Job.of(given, target, place)
    told = _told(job)
    values: dict[str, Value] = {
        **{f"recipe.data.{key}": told[key] for key in ("global_batch_size", "micro_batch_size")},
        **{
            f"strategy.{key}": told[key]
            for key in (*_DEGREES, "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")
        },
        **{f"recipe.model.config.{key}": told[key] for key in (_GROUP, *_RECOMPUTATION)},
        **{f"strategy.ddp.{key}": told[key] for key in ("use_distributed_optimizer", *_OVERLAPS)},
        "recipe.optim.config.use_distributed_optimizer": told["use_distributed_optimizer"],
    }
    lines = [
        '"""What a plan decides in a recipe of NeMo, llm.llama3_8b.pretrain_recipe() say."""',
        "",
        *_comments(job, "recipe.optim.config.clip_grad"),
        "",
        f"BLOCKS = {told['num_layers']}",
        "",
        "",
        "def planned(recipe):",
        '    """The recipe, parallelised as planned."""',
        "    found = recipe.model.config.num_layers",
        "    if found != BLOCKS:",
        '        raise ValueError(f"the plan is for {BLOCKS} blocks, but the model has {found}")',
        "    strategy = recipe.trainer.strategy",
        *(f"    {key} = {in_python(value)}" for key, value in values.items()),
        "    return recipe",
    ]
    return {place.main or "planned.py": "\n".join(lines) + "\n"} | job.beside()


def _told(job: Job) -> dict[str, Value]:
    """All settings, those that are off or nothing too."""
    nothing: dict[str, Value] = dict.fromkeys((*_RECOMPUTATION, "pipeline_model_parallel_layout", _GROUP))
    off: dict[str, Value] = dict.fromkeys(("use_distributed_optimizer", *_OVERLAPS), False)
    chunks: dict[str, Value] = {"virtual_pipeline_model_parallel_size": job.chunks if job.chunks > 1 else None}
    return nothing | off | chunks | settings(job)


def _comments(job: Job, clip: str, *notes: str) -> list[str]:
    blocks = f"the model must have {sum(job.block_counts)} blocks"
    return [f"# {line}" for line in job.header(blocks, CLIPPING.format(clip), *notes)]


def _part(told: dict[str, Value], *keys: str) -> dict[str, Value]:
    return {key: told[key] for key in keys}


def _yaml(value: Value) -> str:
    if value is None:
        return "null"
    return in_yaml(value) if isinstance(value, str) else str(value).lower()


def _hydra(value: Value) -> str:
    """Hydra's own quotes, where letters have a meaning in its grammar."""
    if value is None:
        return "null"
    return f"'{value}'" if isinstance(value, str) and not value.isalnum() else str(value)
