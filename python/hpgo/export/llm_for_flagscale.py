"""Export of pipelines through several kinds of GPUs: to FlagScale, and to Megatron-LM if all stages have equal degrees.

Source of FlagScale's rules: its commit da4935e, `flagscale/train/arguments.py`, `flagscale/train/hetero/` and
`flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.quoting import in_shell
from hpgo.errors import ArgumentError
from hpgo.llm.pipeline_layout import layout_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.mixed.plan import MixedPipelinePlan, MixedPlanSearch


def flagscale_arguments(found: MixedPlanSearch) -> list[str]:
    """Return FlagScale's arguments for the degrees, the layers and the recomputation of a pipeline, one per line.

    The arguments of the model and of the training come on top. FlagScale sorts all ranks by the order of
    `--hetero-device-types`, and its runner adds `--hetero-current-device-type` of each host from its hostfile.

    Raises ArgumentError if the search found no pipeline.
    """
    pipeline = _pipeline(found)
    stages, first = pipeline.stages, pipeline.stages[0].parallelism
    meshes: list[int] = []
    for part in stages:
        config = part.parallelism
        # FlagScale reads five numbers for each mesh: tp, cp, ep, dp and pp. Its help text leaves out ep.
        meshes += [config.tp, config.cp, config.ep, config.dp, config.pp]
    lines = [
        "--enable-hetero",
        _option("hetero-device-types", [part.kind for part in stages]),
        _option("hetero-process-meshes", meshes),
        _option("hetero-pipeline-layer-split", pipeline.layers),
        _option("tensor-model-parallel-size", [first.tp]),
        _option("pipeline-model-parallel-size", [sum(part.parallelism.pp for part in stages)]),
        _option("context-parallel-size", [first.cp]),
        _option("expert-model-parallel-size", [first.ep]) if first.ep > 1 else "",
        # Each mesh processes dp × micro-batch size of the first one, divided by its own dp.
        _option("micro-batch-size", [first.micro_batch_size]),
        _option("global-batch-size", [found.global_batch_size]),
        _option("seq-length", [found.seq_length]),
        "--use-distributed-optimizer",
        "--sequence-parallel" if any(part.parallelism.sequence_parallel for part in stages) else "",
        {"bf16": "--bf16", "fp16": "--fp16"}.get(found.precision, "--bf16 --fp8-format hybrid"),
        *_recomputation(pipeline),
    ]
    return [line for line in lines if line]


def megatron_arguments(found: MixedPlanSearch) -> list[str]:
    """Return Megatron-LM's arguments for the degrees and layers of a pipeline whose stages have equal degrees.

    Nodes must be numbered in the order of the stages, since Megatron-LM does not know kinds of devices.

    Raises ArgumentError if degrees, micro-batch size or recomputation differ, or if the search found no pipeline.
    """
    pipeline = _pipeline(found)
    first = pipeline.stages[0].parallelism
    for part in pipeline.stages:
        config = part.parallelism
        for name in ("tp", "ep", "dp", "micro_batch_size", "recompute"):
            if getattr(config, name) != getattr(first, name):
                raise ArgumentError(
                    f"{name} is {getattr(first, name)} on {pipeline.stages[0].kind} and {getattr(config, name)} on"
                    f" {part.kind}, but Megatron-LM has one for all stages",
                    "plan with `--framework megatron`, or export to FlagScale",
                    code="unsupported",
                )
    lines = [
        _option("tensor-model-parallel-size", [first.tp]),
        "--sequence-parallel" if first.sequence_parallel else "",
        _option("context-parallel-size", [first.cp]),
        _option("expert-model-parallel-size", [first.ep]) if first.ep > 1 else "",
        _option("pipeline-model-parallel-size", [len(pipeline.layers)]),
        _option("pipeline-model-parallel-layout", [layout_text(pipeline.layers, found.transformer.further_tokens)]),
        _option("micro-batch-size", [first.micro_batch_size]),
        _option("global-batch-size", [found.global_batch_size]),
        _option("seq-length", [found.seq_length]),
        "--use-distributed-optimizer",
        {"bf16": "--bf16", "fp16": "--fp16"}.get(found.precision, "--bf16 --fp8-format hybrid"),
    ]
    if first.recompute == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return [line for line in lines if line]


def _recomputation(pipeline: MixedPipelinePlan) -> list[str]:
    """Return the options of recomputation: for all stages, or for each stage if kinds differ."""
    full = [part.parallelism.recompute == "full" for part in pipeline.stages]
    if not any(full):
        return []
    found = ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if all(full):
        return found
    many = pipeline.micro_batches
    for name, values in (("granularity", full), ("method", [0] * len(full)), ("num-layers", [1] * len(full))):
        # A row has a number of stages, then pairs of a number of micro-batches and their value.
        rows = [
            f"[{part.parallelism.pp},{many},{int(value)}]" for part, value in zip(pipeline.stages, values, strict=True)
        ]
        found.append(_option(f"recompute-{name}-per-stage-micro-batch", rows))
    return found


def _option(name: str, values: Sequence[object]) -> str:
    return f"--{name} {' '.join(in_shell(str(value)) for value in values)}"


def _pipeline(found: MixedPlanSearch) -> MixedPipelinePlan:
    if found.pipeline is None:
        raise ArgumentError(
            f"no pipeline through all kinds of `{found.cluster.name}` fits in memory, so there is none to export",
            "use more nodes, or train on one kind",
            code="missing",
        )
    return found.pipeline
