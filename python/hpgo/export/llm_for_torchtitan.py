"""Export of plans of transformers to torchtitan: settings of a job, as TOML for 0.2 and as a Python module for 0.3.

torchtitan selects models by name. So the files name the model, or check that it has the shape of the estimate. Replicas
use FSDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.quoting import in_toml
from hpgo.export import titan_backend, titan_sparse
from hpgo.export.for_torchtitan import CLIPPING, ORDER, module, parts_of
from hpgo.export.llm_jobs import LlmExportJob
from hpgo.export.titan_sparse import windows_of
from hpgo.llm.parallelism import MAX_ZERO
from hpgo.llm.titan_shape import needs_backend, titan_package

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.transformer import Transformer

_FLAVOURS: dict[tuple[int, ...], str] = {
    (32, 4096, 32, 8, 14336, 128256): "8B",
    (80, 8192, 64, 8, 28672, 128256): "70B",
    (126, 16384, 128, 8, 53248, 128256): "405B",
}
"""Flavors of torchtitan's `llama3`, by layers, hidden size, heads, KV heads, FFN size and vocabulary."""
_REGISTRY: dict[tuple[int, ...], tuple[str, str, str]] = {
    **{(*shape, 128, False, False): ("llama3", f"llama3_{name.lower()}", name) for shape, name in _FLAVOURS.items()},
    (16, 2048, 32, 8, 8192, 128256, 64, False, True): ("llama3", "llama3_8b", "1B"),
    (28, 3072, 24, 8, 8192, 128256, 128, False, True): ("llama3", "llama3_8b", "3B"),
    (28, 1024, 16, 8, 3072, 151936, 128, True, True): ("qwen3", "qwen3_0_6b", "0.6B"),
    (28, 2048, 16, 8, 6144, 151936, 128, True, True): ("qwen3", "qwen3_1_7b", "1.7B"),
    (40, 5120, 40, 8, 17408, 151936, 128, True, False): ("qwen3", "qwen3_14b", "14B"),
    (64, 5120, 64, 8, 25600, 151936, 128, True, False): ("qwen3", "qwen3_32b", "32B"),
}
"""Package, registry function and flavor in torchtitan 0.3.0, by the key of `_FLAVOURS`, head width, head norms and tied
embeddings."""
_SPARSE: dict[tuple[int, ...], tuple[str, str, str]] = {
    (48, 2048, 32, 4, 128, 768, 151936, True): ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    (94, 4096, 64, 4, 128, 1536, 151936, True): ("qwen3", "qwen3_30b_a3b", "235B-A22B"),
    (27, 2048, 16, 16, 64, 1408, 102400, False): ("deepseek_v3", "deepseek_v3_16b", "16B"),
    (61, 7168, 128, 128, 256, 2048, 129280, False): ("deepseek_v3", "deepseek_v3_671b", "671B"),
    (24, 2880, 64, 8, 32, 2880, 201088, False): ("gpt_oss", "gpt_oss_20b", "20b"),
    (36, 2880, 64, 8, 128, 2880, 201088, False): ("gpt_oss", "gpt_oss_120b", "120b"),
}
"""The same for models with experts, by layers, hidden size, heads, KV heads, experts, their width, vocabulary and head
norms."""
_GPT_OSS_WINDOWS = (128, None)
"""Windows of even and odd layers of torchtitan's GPT-OSS."""
_REPLACED = {
    "405B": ("", "bfloat16, as planned, not its float8"),
    "1B": ("", "its own configuration is for 8B"),
    "3B": ("", "its own configuration is for 8B"),
    "235B-A22B": ("", "its own configuration is for 30B-A3B"),
    "20b": (', attn_backend="flex"', "varlen attention has no context parallelism"),
    "120b": (', attn_backend="flex"', "varlen attention has no context parallelism"),
}
"""Flavors that the registry function does not return as needed: further arguments of the registry, and the reason."""
_ASYNC_TP = "torchtitan-async-tp"
"""Stack whose estimates overlap the communication of tensor parallelism with GEMMs."""


def toml(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """Return the sections of a job's TOML, for 0.2."""
    job = LlmExportJob.of(plan, target, place)
    config, estimate = job.config, job.plan.estimate
    flavour = _FLAVOURS.get(_shape(job.model))
    lines = [
        *(f"# {line}" for line in job.header(CLIPPING, *_notes(job))),
        *(["[model]", 'name = "llama3"', f'flavor = "{flavour}"', ""] if flavour else []),
        "[training]",
        f"seq_len = {estimate.seq_length}",
        f"global_batch_size = {estimate.global_batch_size}",
        f"local_batch_size = {_local_batch_size(job)}",
        'mixed_precision_param = "bfloat16"',
        *(['dtype = "bfloat16"'] if config.has_narrow_state else []),
        *(["enable_cpu_offload = true"] if config.offload_params else []),
        "",
        "[parallelism]",
        *(f"{key} = {in_toml(value) if isinstance(value, str) else value}" for key, value in _degrees(job).items()),
    ]
    if config.pp > 1:
        lines += [
            f'pipeline_parallel_schedule = "{_schedule(job)}"',
            f"pipeline_parallel_schedule_csv = {in_toml(place.path(ORDER))}",
            f"pipeline_parallel_microbatch_size = {config.micro_batch_size}",
            "module_fqns_per_model_part = [",
            *(f"  [{', '.join(map(in_toml, part))}]," for part in parts_of(job.counts, "output")),
            "]",
        ]
    lines += ["enable_async_tensor_parallel = true"] if _overlaps_tp(job) else []
    # Compile exactly the parts that the estimate assumes to be fused.
    compiled = _compiled(config)
    lines += ["", "[compile]", f"enable = {str(bool(compiled)).lower()}"]
    lines += [f"components = [{in_toml(compiled[0])}]"] if len(compiled) == 1 else []
    lines += ["", "[activation_checkpoint]", f'mode = "{config.recompute}"']
    return {place.main or "job.toml": "\n".join(lines) + "\n"} | _beside(job)


def python(plan: LlmPlan, target: Target, place: Place) -> dict[str, str]:
    """Return a module whose function `planned` applies the plan to a `Trainer.Config`, for 0.3."""
    job = LlmExportJob.of(plan, target, place)
    config, estimate = job.config, job.plan.estimate
    settings: dict[str, object] = {
        "training.seq_len": estimate.seq_length,
        "training.global_batch_size": estimate.global_batch_size,
        "training.local_batch_size": _local_batch_size(job),
        "training.mixed_precision_param": "bfloat16",
    } | {f"parallelism.{key}": value for key, value in _degrees(job).items()}
    settings["parallelism.enable_sequence_parallel"] = config.sequence_parallel or config.tp == 1
    if config.has_narrow_state:
        settings["training.dtype"] = "bfloat16"
    if config.offload_params:
        settings["training.enable_cpu_offload"] = True
    # torchtitan captures CUDA graphs unless told otherwise, and refuses to start with both them and a pipeline.
    settings["training.disable_cuda_graphs"] = config.cuda_graph_impl == "none"
    if config.pp > 1:
        settings["parallelism.pipeline_parallel_schedule"] = _schedule(job)
        settings["parallelism.pipeline_parallel_microbatch_size"] = config.micro_batch_size
    compiled = _compiled(config)
    settings["config.compile.enable"] = bool(compiled)
    if len(compiled) == 1:
        settings["config.compile.components"] = compiled
    if _overlaps_tp(job):
        settings["config.compile.enable_async_tensor_parallel"] = True
    model = job.model
    sparse, stated = titan_sparse.is_sparse(model), job.stated.settings
    by_backend = needs_backend(model)
    shape: dict[str, object] = titan_backend.shape_of(model) if by_backend else (
        titan_sparse.shape_of(model, stated)
    ) if sparse else {
        "layers": model.layers, "dim": model.hidden, "vocab_size": model.vocab, "n_heads": model.heads,
        "n_kv_heads": model.kv_heads, "head_dim": model.head_dim, "ffn": model.ffn, "qk_norm": model.head_norms,
        "biases": False, "tied": model.tied,
    }  # fmt: skip
    parts = parts_of(job.counts, "lm_head") if config.pp > 1 else []
    further: dict[str, Any] = {"arithmetic": titan_sparse.of_rope(stated)}
    if by_backend:
        further, parts = titan_backend.texts(), titan_backend.parts_of(parts)
    elif sparse:
        further |= titan_sparse.texts(model, stated)
    graphs = (
        ["torchtitan's CUDA graphs are off, as estimated: plan with `--fix cuda_graph_impl=full_iteration` to use them"]
        if config.cuda_graph_impl == "none" and config.pp == 1 and not (by_backend or model.experts)
        else []
    )
    comments = job.header(CLIPPING, *_split(job), *graphs, *_unstated(job), *_training(config))
    text = module(
        "a plan",
        comments,
        shape=shape,
        settings=settings,
        parts=parts,
        place=place,
        full=config.recompute == "full",
        start=_start(job),
        adapters=_adapters(config),
        **further,
    )
    return {place.main or "planned.py": text} | _beside(job)


_LINEARS = {
    "linear_qkv": ("wq", "wkv", "wqkv"),
    "linear_proj": ("wo",),
    "linear_fc1": ("w1", "w3"),
    "linear_fc2": ("w2",),
}
"""Names of GEMMs in torchtitan 0.3 (`models/common/attention.py`, `feed_forward.py`). Queries, keys and values are one
or two settings, by model."""


def _adapters(config: ParallelismConfig) -> dict[str, object]:
    """Return the arguments of `LoRAConverter.Config`, with its default `alpha`, twice the rank; empty without any."""
    if not config.lora_rank:
        return {}
    named = [name for target in config.lora_targets for name in _LINEARS[target]]
    return {"rank": config.lora_rank, "alpha": 2.0 * config.lora_rank, "target_modules": named}


def _training(config: ParallelismConfig) -> list[str]:
    """Return notes on adapters and on packed documents."""
    notes = ["ADAPTERS has torchtitan's default alpha, twice the rank"] if config.lora_rank else []
    if config.packed_length is not None:
        notes.append(
            f"estimated with packed documents of {config.packed_length} tokens: torchtitan keeps documents apart, with"
            " flex or varlen attention"
        )
    return notes


def _shape(model: Transformer) -> tuple[int, ...]:
    return model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab


def registered(model: Transformer) -> tuple[str, str, str] | None:
    """Return package, registry function and flavor of torchtitan 0.3.0 for a model; None if it has none of this shape.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> registered(TRANSFORMERS["llama-3-70b"])
    ('llama3', 'llama3_70b', '70B')
    """
    if titan_sparse.is_sparse(model):
        held = model.layers, model.hidden, model.heads, model.kv_heads, model.experts, model.expert_ffn, model.vocab
        own = not model.blocks or windows_of(model) == list(_GPT_OSS_WINDOWS) * (model.layers // 2)
        return _SPARSE.get((*held, model.head_norms)) if own else None
    return _REGISTRY.get((*_shape(model), model.head_dim, model.head_norms, model.tied))


def replaced(flavor: str) -> str:
    """Return the line that sets the model of a flavor; empty if the registry function returns the model as needed.

    >>> replaced("8B"), replaced("235B-A22B")
    ('', '    config.model_spec = model_registry("235B-A22B")  # its own configuration is for 30B-A3B')
    """
    if flavor not in _REPLACED:
        return ""
    arguments, why = _REPLACED[flavor]
    return f'    config.model_spec = model_registry("{flavor}"{arguments})  # {why}'


def _start(job: LlmExportJob) -> list[str]:
    """Return lines of the user's module that start from torchtitan's own configuration of the model, if it has one."""
    model = job.model
    if needs_backend(model):
        return titan_backend.START
    if (found := registered(model)) is None:
        kind = titan_package(model, sparse=True)
        return [
            "def mine():",
            f"    config = ...  # no model of torchtitan.models.{kind} has this SHAPE: make a Trainer.Config for it",
            "    return planned(config)",
        ]
    package, function, flavour = found
    lines = [f"from torchtitan.models.{package}.config_registry import {function}"]
    model_line = replaced(flavour)
    if model_line:
        lines.insert(0, f"from torchtitan.models.{package} import model_registry")
    lines += ["", "def mine():", f"    config = {function}()", *([model_line] if model_line else [])]
    return [*lines, "    return planned(config)"]


def _unstated(job: LlmExportJob) -> list[str]:
    """Return notes on values that neither the model nor a setting fixes."""
    weights = "torchtitan's model sets the initial weights"
    notes = [weights]
    if job.model.experts and job.model.arithmetic is not None and job.model.arithmetic.router_aux_loss:
        loss = job.model.arithmetic.router_aux_loss
        notes.append(f"torchtitan adds no auxiliary loss of the router, whose coefficient in the model is {loss:g}")
    if job.model.arithmetic is None:
        return ["the model does not state RoPE and the epsilon of norms: your configuration's values stay", weights]
    return notes


def _beside(job: LlmExportJob) -> dict[str, str]:
    return {job.place.name(ORDER): job.schedule.to_text()} if job.config.pp > 1 else {}


def _notes(job: LlmExportJob) -> list[str]:
    layers, dim, heads, keys, ffn, words = _shape(job.model)
    shape = (
        f"the model must have {layers} layers, hidden size {dim}, {heads} heads, {keys} KV heads, FFN size {ffn} and a"
        f" vocabulary of {words}"
    )
    stated = ", ".join(f"{name} {value}" for name, value in job.stated.settings.items())
    arithmetic = [f"the model must have {stated}, which has no setting: compare your flavor"] if stated else []
    notes = [shape, *arithmetic, *_split(job), *_unstated(job)]
    if job.config.pp > 1:
        notes.append("pipeline_parallel_schedule_csv is relative to the directory in which the job is started")
    return notes


def _compiled(config: ParallelismConfig) -> list[str]:
    """Return the components that torchtitan compiles: the model, the loss, or both."""
    return [
        name for name, fused in (("model", config.fused_elementwise), ("loss", config.fused_cross_entropy)) if fused
    ]


def _overlaps_tp(job: LlmExportJob) -> bool:
    """Return whether torch.compile overlaps the communication of tensor parallelism, as the plan or its stack does."""
    config = job.config
    if config.tp_comm_overlap is not None:
        return config.tp > 1 and config.tp_comm_overlap
    compiled = config.sequence_parallel and config.fused_elementwise
    return job.plan.estimate.stack == _ASYNC_TP and config.tp > 1 and compiled


def _split(job: LlmExportJob) -> list[str]:
    """Return notes on what is not compiled, and on what torch.compile therefore does not overlap."""
    config, notes = job.config, []
    if config.splits_backward:
        notes.append("layers are not compiled: backward passes of compiled ones can't be split")
    if job.plan.estimate.stack == _ASYNC_TP and config.tp > 1 and not _overlaps_tp(job):
        notes.append(
            "asynchronous tensor parallelism needs compiled layers and sequence parallelism: the estimate overlaps the"
            " communication of tensor parallelism with GEMMs, but this job does not"
        )
    return notes


def _local_batch_size(job: LlmExportJob) -> int:
    """Return the sequences of a replica between two gradient reductions: of a step, or of a pass without a pipeline."""
    config = job.config
    return config.micro_batch_size * (job.plan.estimate.micro_batches if config.pp > 1 else 1)


def _degrees(job: LlmExportJob) -> dict[str, int | str]:
    config = job.config
    degrees: dict[str, int | str] = {
        "pipeline_parallel_degree": config.pp,
        "data_parallel_replicate_degree": config.dp_replicate,
        "data_parallel_shard_degree": config.dp // config.dp_replicate,
        "context_parallel_degree": config.cp,
        "tensor_parallel_degree": config.tp,
    }
    if config.ep > 1:
        degrees["expert_parallel_degree"] = config.ep
    # "always" gathers weights in each pass (ZeRO stage 3), "never" once per step (stage 2).
    if config.dp_cp_size > 1:
        degrees["fsdp_reshard_after_forward"] = "always" if config.zero_stage == MAX_ZERO else "never"
    return degrees


def _schedule(job: LlmExportJob) -> str:
    """Return the PyTorch schedule that places stages on ranks as the plan does. The actions come from the file."""
    if job.config.splits_backward:
        return {"interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble"}[job.config.pp_schedule]
    return "1F1B" if job.config.vpp == 1 else "Interleaved1F1B"
