"""Export to torchtitan: the parallelism part of a job's configuration, and the schedule as a file.

Version 0.2 reads TOML. Version 0.3 is configured in Python and calls its LM head `lm_head`. Both run any schedule from
a file, so eager and zero-bubble schedules run as planned. Modules have the names of torchtitan's Llama:
`tok_embeddings`, `layers.0` and so on, `norm`, and the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_python, in_toml
from hpgo.errors import ArgumentError
from hpgo.export import precision
from hpgo.export.jobs import ExportJob
from hpgo.programs.frameworks import check_computes_in_16_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.export.targets import Place, Target

ORDER = "order.csv"
_RAISE = '        raise ValueError(f"this is planned for a model of {SHAPE}, but this one has {found}")'
_START = (
    "def mine():",
    "    from torchtitan.models.llama3.config_registry import llama3_8b  # or that of your model",
    "",
    "    return planned(llama3_8b())",
)
"""Lines of the user's module for a plan that knows only the number of blocks of the model."""
_WHOLE_SHAPE = """

def shapes_of(model):
    \"\"\"Yield the shape of the model as each of its layers has it.\"\"\"
    for layer in model.layers:
        attention, mlp = layer.attention, layer.feed_forward
        yield {
            "layers": len(model.layers),
            "dim": model.dim,
            "vocab_size": model.vocab_size,
            "n_heads": attention.n_heads,
            "n_kv_heads": attention.n_kv_heads or attention.n_heads,
            "head_dim": attention.head_dim or model.dim // attention.n_heads,
            "ffn": mlp.w1.out_features,
            "qk_norm": attention.qk_norm is not None,
            "biases": any(one.bias for one in (attention.wo, mlp.w1, mlp.w2, mlp.w3)),
            "tied": model.enable_weight_tying,
        }


def norms_of(model):
    \"\"\"Yield all norms of the model.\"\"\"
    yield model.norm
    for layer in model.layers:
        yield from (layer.attention_norm, layer.ffn_norm)
        if layer.attention.qk_norm is not None:
            yield layer.attention.qk_norm
""".splitlines()
"""Functions that read a Llama or a Qwen3 of torchtitan 0.3 (`models/llama3`, `models/qwen3`)."""
CLIPPING = "gradients are clipped at norm 1 unless training.max_norm changes that; the estimate leaves clipping out"


def toml(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return the sections `training`, `parallelism` and `activation_checkpoint` of a job's TOML, for 0.2."""
    job = ExportJob.of(given, target, place)
    job.check_recomputation()
    if job.replicas > 1 and job.gpus_per_device > 1 and job.ranks == 1 and not job.program.shard_optimizer:
        raise ArgumentError(
            f"{target.label} can't combine tensor parallelism with replicas that are not sharded",
            "plan with `--shard-optimizer`",
            code="unsupported",
        )
    kept = precision.torchtitan(job)
    check_computes_in_16_bits(
        job.framework, job.optimizer, replicas=job.replicas, gpus=job.ranks * job.gpus_per_device * job.replicas
    )
    lines = [
        *(f"# {line}" for line in job.header(CLIPPING, *_notes(job))),
        "[training]",
        f"global_batch_size = {job.program.global_batch_size}",
        f"local_batch_size = {_local_batch_size(job)}",
        *([] if kept is None else [f'mixed_precision_param = "{kept}"']),
        "",
        "[parallelism]",
        *(f"{key} = {in_toml(value) if isinstance(value, str) else value}" for key, value in _degrees(job).items()),
    ]
    if job.ranks > 1:
        lines += [
            f"pipeline_parallel_schedule = {in_toml(_shape(job))}",
            f"pipeline_parallel_schedule_csv = {in_toml(place.path(ORDER))}",
            f"pipeline_parallel_microbatch_size = {job.samples_per_replica}",
            "module_fqns_per_model_part = [",
            *(f"  [{', '.join(map(in_toml, part))}]," for part in parts_of(job.block_counts, "output")),
            "]",
        ]
    lines += ["", "[activation_checkpoint]", f'mode = "{"full" if job.program.recompute else "none"}"']
    return {place.main or "job.toml": "\n".join(lines) + "\n"} | _beside(job)


def python(given: object, target: Target, place: Place) -> dict[str, str]:
    """Return a module whose function `planned` applies the plan to a `Trainer.Config`, for 0.3."""
    job = ExportJob.of(given, target, place)
    job.check_recomputation()
    settings: dict[str, object] = {
        "training.global_batch_size": job.program.global_batch_size,
        "training.local_batch_size": _local_batch_size(job),
    } | {f"parallelism.{key}": value for key, value in _degrees(job).items()}
    if (kept := precision.torchtitan(job)) is not None:
        settings["training.mixed_precision_param"] = kept
    if job.ranks > 1:
        # torchtitan can't capture CUDA graphs of a pipeline. It refuses to start with both.
        settings["training.disable_cuda_graphs"] = True
        settings["parallelism.pipeline_parallel_schedule"] = _shape(job)
        settings["parallelism.pipeline_parallel_microbatch_size"] = job.samples_per_replica
    shape = {"layers": sum(job.block_counts)}
    parts = parts_of(job.block_counts, "lm_head") if job.ranks > 1 else []
    full = job.program.recompute
    text = module("a plan", job.header(CLIPPING), shape=shape, settings=settings, parts=parts, place=place, full=full)
    return {place.main or "planned.py": text} | _beside(job)


def module(
    what: str,
    comments: Sequence[str],
    *,
    shape: Mapping[str, object],
    settings: Mapping[str, object],
    parts: Sequence[Sequence[str]],
    place: Place,
    full: bool,
    start: Sequence[str] = _START,
    arithmetic: Mapping[str, object] | None = None,
    adapters: Mapping[str, object] | None = None,
    reader: Sequence[str] = _WHOLE_SHAPE,
    constants: Sequence[str] = (),
    changes: Sequence[str] = (),
    imports: Sequence[str] = (),
    read: str = "model",
) -> str:
    """Return a Python module that applies `what` to a model of this `shape`, by the names in `reader`.

    `parts` are the modules of each stage, empty without a pipeline. `full` selects full recomputation. `start` are
    lines of the user's module. `arithmetic` is set in the model: the epsilon of its norms, and fields of RoPE.
    `adapters` are the arguments of torchtitan's `LoRAConverter`. `constants` and `changes` are further lines, of the
    module and of `planned`. `imports` are further imports. `read` is what the shape is read from: the `model`, or the
    whole `config`.
    """
    whole = len(shape) > 1
    changed = dict(arithmetic or {})
    epsilon = changed.pop("eps", None)
    assigned = [f"    {key} = {in_python(value)}" for key, value in settings.items()]
    piped: list[str] = []
    if parts:
        assigned += [
            "    parallelism.pipeline_parallel_schedule_csv = str(ORDER)",
            "    parallelism.module_fqns_per_model_part = [list(part) for part in PARTS]",
        ]
        piped = [
            f"ORDER = Path(__file__).resolve().with_name({in_python(place.name(ORDER))})",
            "PARTS = [",
            *(f"    {in_python(list(part))}," for part in parts),
            "]",
        ]
    lines = [
        f'"""Settings of {what} for torchtitan\'s configuration.',
        "",
        "Put this into a module of yours, for instance my_configs.py, for `--module my_configs --config mine`:",
        "",
        *(f"    {line}" if line else "" for line in start),
        '"""',
        "",
        *(f"# {line}" for line in comments),
        "",
        "from dataclasses import replace",
        *(["from pathlib import Path"] if parts else []),
        "",
        *(["from torchtitan.components.lora import LoRAConverter"] if adapters else []),
        *(["from torchtitan.distributed.activation_checkpoint import FullAC"] if full else []),
        *imports,
        *([""] if full or adapters or imports else []),
        f"SHAPE = {in_python(dict(shape))}",
        *([f"EPSILON = {in_python(epsilon)}"] if epsilon is not None else []),
        *([f"ROPE = {in_python(changed)}"] if changed else []),
        *([f"ADAPTERS = {in_python(dict(adapters))}"] if adapters else []),
        *constants,
        *piped,
        *(reader if whole else []),
        "",
        "",
        "def planned(config):",
        '    """Apply the plan to a configuration and return it."""',
        *(["    model = config.model_spec.model"] if read == "model" else []),
        *(
            [f"    for found in shapes_of({read}):", "        if found != SHAPE:"]
            if whole
            else ['    found = {"layers": len(model.layers)}', "    if found != SHAPE:"]
        ),
        f"{'    ' * whole}{_RAISE}",
        *(["    for norm in norms_of(model):", "        norm.eps = EPSILON"] if epsilon is not None else []),
        *(
            [
                "    for layer in model.layers:",
                "        for name, value in ROPE.items():",
                "            setattr(layer.attention.rope, name, value)",
            ]
            if changed
            else []
        ),
        *changes,
        *(
            ["    config.model_spec.model = LoRAConverter.Config(**ADAPTERS).build().convert(model)"]
            if adapters
            else []
        ),
        "    training, parallelism = config.training, config.parallelism",
        *assigned,
        f"    return replace(config, activation_checkpoint={'FullAC.Config()' if full else 'None'})  # checks it again",
    ]
    return "\n".join(lines) + "\n"


def _beside(job: ExportJob) -> dict[str, str]:
    order = {job.place.name(ORDER): job.program.schedule.to_text()} if job.ranks > 1 else {}
    return order | job.beside()


def _notes(job: ExportJob) -> list[str]:
    blocks = sum(job.block_counts)
    notes = [f"the model must have {blocks} blocks: torchtitan silently leaves out modules that are not named here"]
    if job.ranks > 1:
        notes.append("pipeline_parallel_schedule_csv is relative to the directory in which the job is started")
    return notes


def _local_batch_size(job: ExportJob) -> int:
    """Return the samples of a replica between two gradient reductions: of a step, or of a pass without a pipeline."""
    return job.samples_per_replica * job.program.micro_batches if job.ranks > 1 else job.samples_per_replica


def _degrees(job: ExportJob) -> dict[str, int | str]:
    shared = job.replicas > 1 and (
        job.program.shard_optimizer or (job.ranks > 1 and False not in job.framework.shards_optimizer)
    )
    degrees: dict[str, int | str] = {
        "pipeline_parallel_degree": job.ranks,
        "data_parallel_replicate_degree": 1 if shared else job.replicas,
        "data_parallel_shard_degree": job.replicas if shared else 1,
        "tensor_parallel_degree": job.gpus_per_device,
    }
    if shared:
        # Weights stay gathered from the first forward pass to the last backward pass. So only the optimizer state is
        # sharded, and weights are gathered once per step, as the plan assumes.
        degrees["fsdp_reshard_after_forward"] = "never"
    return degrees


def _shape(job: ExportJob) -> str:
    """Return the PyTorch schedule that places stages on ranks as the plan does. The actions come from the file."""
    # The file has only the actions. torchtitan takes the placement of stages on ranks from the schedule's name.
    ranks, stages = job.ranks, len(job.program.stages)
    placed = job.program.schedule.rank_of_stage
    if placed == tuple(stage % ranks for stage in range(stages)):
        return "1F1B" if job.virtual_stages_per_rank == 1 else "Interleaved1F1B"
    if placed == (*range(ranks), *reversed(range(ranks))):
        return "ZBVZeroBubble"
    raise ArgumentError(
        f"torchtitan places stages on ranks in a loop or a V, but `{job.program.schedule.name}` does neither",
        "plan with another schedule, for instance `--schedule 1f1b`",
    )


def parts_of(counts: Sequence[int], head: str) -> list[list[str]]:
    """Return the names of the modules of each stage.

    >>> parts_of([1, 0], "output")
    [['tok_embeddings', 'layers.0'], ['norm', 'output']]
    """
    parts: list[list[str]] = []
    first = 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts
