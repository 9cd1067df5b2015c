"""The table of frameworks and what each of them supports. Planning, exports and error checks all use this table.

A row describes one version of a framework. Frameworks differ in where a model may be cut, which schedules they run, and
how they handle gradients and the optimizer state. `check` rejects a plan that a framework can't run.
`hpgo.plan(framework=…)` searches only plans that it can run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

from hpgo.base.messages import did_you_mean, pluralize, safe_repr, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpgo.programs.blocks import Blocks
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.optimizers import OptimizerName

TrainingFramework = Literal[
    "megatron", "megatron@0.16", "megatron-bridge", "megatron-bridge@0.6", "torchtitan", "torchtitan@0.2",
    "torchtitan@0.3", "deepspeed", "deepspeed@0.19", "torch", "torch@2.15",
]  # fmt: skip
"""Frameworks that `hpgo.plan` plans for. Patch releases of these versions, as in `torchtitan@0.2.2`, are accepted
too."""

ServingFramework = Literal[
    "vllm", "vllm@0.33", "sglang", "sglang@0.5", "llama.cpp", "accelerate", "accelerate@1.15", "tensorrt-llm",
]  # fmt: skip
"""Frameworks that `hpgo.partition` cuts models for."""

Cuts = Literal["anywhere", "blocks"]


@dataclass(frozen=True, slots=True)
class Framework:
    """The features that one version of a framework supports."""

    name: str
    """Name in the options `--framework` and `--to`, for instance `megatron`."""
    version: str
    """Release that was tested, for instance `0.16`. Later patch releases count as the same version."""
    title: str
    """Name of the framework in reports and messages."""
    schedules: Mapping[str, str]
    """Schedules that it runs, with its own name for each. The first is its default."""
    cuts: Cuts
    """Places where stages may end: `anywhere`, or between `blocks`. With `blocks`, the embedding is on the first stage
    and the head on the last."""
    equal_replicas: bool = True
    """Whether all stages need the same number of replicas, and all replicas the same number of samples."""
    shards_optimizer: tuple[bool, ...] = (False, True)
    """Supported placements of the optimizer state: every replica keeps all of it (False), or a shard of it (True, ZeRO
    stage 1)."""
    overlaps: bool = True
    """Whether gradient reduction can overlap the backward passes."""
    recomputes: Literal["stage", "groups", "block", "no"] = "stage"
    """Tensors that recomputation keeps of each micro-batch: the input of the stage, of equal groups of blocks, or of
    each block. `no` means that the framework has no recomputation. `hpgo.programs.recomputation` computes the bytes."""
    recomputes_by_stage: bool = False
    """Whether some stages may recompute their activations while others keep them."""
    tensor_parallel: bool = False
    """Whether a device of the plan may stand for several GPUs that shard each layer."""
    trains: bool = True
    """Whether it runs training plans. Otherwise it runs plans of `hpgo partition`."""
    min_blocks: int = 0
    """Smallest number of blocks in a stage."""
    tied_weights: Literal["any", "ends", "none"] = "none"
    """Tied weights whose gradients it sums over stages: any, embedding and head only (`ends`), or none."""
    optimizers: tuple[OptimizerName, ...] = ()
    """Optimizers that it has settings for. Empty means all."""
    shares_sgd: bool = True
    """Whether replicas may shard the state of SGD."""
    shares_bf16: bool = False
    """Whether replicas always shard the state of an optimizer with 16-bit weights."""
    single_v: bool = False
    """Whether stages on a rank form loops or a single V: it runs `hanayo` with 2 virtual stages per rank only."""
    widens_halves: bool = True
    """Whether gradients may be wider than weights where backward passes are split."""
    bf16_by_fsdp: bool = False
    """Whether it computes in 16 bits on several GPUs only if FSDP shards weights over replicas."""

    @property
    def label(self) -> str:
        """Title and version of the framework, for messages.

        >>> framework("megatron").label
        'Megatron-LM 0.16'
        """
        return f"{self.title} {self.version}" if self.version else self.title

    @property
    def by_file(self) -> bool:
        """Whether it reads the actions of each rank from a file, and so runs every planned order."""
        return _CSV in self.schedules.values()


_CSV = "an order file"
"""Name for schedules that are passed as a file. PyTorch's pipelining runs any order of one chain of stages that ends
with a flush."""
# Schedules without a flush and schedules with two chains are missing, because PyTorch's runtime has neither.
_BY_FILE = MappingProxyType(
    dict.fromkeys(
        (
            "eager_1f1b", "1f1b", "gpipe", "zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential",
            "interleaved", "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb",
            "zb_v", "v_half", "v_min", "dualpipe_v",
        ),
        _CSV,
    )
)  # fmt: skip
_FSDP: tuple[OptimizerName, ...] = ("adam-fp32", "adam-bf16-fp32-gradients")
"""Optimizers of torchtitan: variants of Adam. FSDP sums gradients in fp32."""
_MEGATRON = Framework(
    "megatron",
    "0.16",
    "Megatron-LM",
    schedules=MappingProxyType({"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}),
    cuts="blocks",
    recomputes="groups",
    tensor_parallel=True,
    tied_weights="ends",
    shares_sgd=False,
)

TABLE: tuple[Framework, ...] = (
    _MEGATRON,
    # It trains models of Megatron Core, like Megatron-LM.
    replace(_MEGATRON, name="megatron-bridge", version="0.6", title="Megatron-Bridge"),
    # Beside a pipeline, torchtitan's data parallelism is FSDP, which shards the optimizer state. PyTorch's runtime
    # reduces gradients after the last backward pass of the stage, so nothing overlaps.
    Framework(
        "torchtitan",
        "0.2",
        "torchtitan",
        schedules=_BY_FILE,
        cuts="blocks",
        shards_optimizer=(True,),
        overlaps=False,
        recomputes="block",
        tensor_parallel=True,
        optimizers=_FSDP,
        single_v=True,
        bf16_by_fsdp=True,
    ),
    Framework(
        "torchtitan",
        "0.3",
        "torchtitan",
        schedules=_BY_FILE,
        cuts="blocks",
        overlaps=False,
        recomputes="block",
        tensor_parallel=True,
        optimizers=_FSDP,
        single_v=True,
    ),
    # DeepSpeed's pipeline engine reduces all gradients at once after all backward passes.
    Framework(
        "deepspeed",
        "0.19",
        "DeepSpeed",
        schedules=MappingProxyType({"1f1b": "TrainSchedule"}),
        cuts="anywhere",
        overlaps=False,
        tied_weights="any",
        shares_bf16=True,
    ),
    # PyTorch's `stage_backward_weight` assigns gradients in the data type of the weights.
    Framework(
        "torch", "2.15", "PyTorch", schedules=_BY_FILE, cuts="anywhere", overlaps=False, widens_halves=False,
        recomputes_by_stage=True,
    ),
    *(
        Framework(name, version, title, schedules=MappingProxyType({}), cuts="blocks", trains=False, min_blocks=1)
        for name, version, title in (
            ("vllm", "0.33", "vLLM"), ("sglang", "0.5", "SGLang"), ("llama.cpp", "", "llama.cpp"),
            ("accelerate", "1.15", "accelerate"), ("tensorrt-llm", "", "TensorRT-LLM"),
        )
    ),
)  # fmt: skip
"""All supported frameworks. Older versions come first, because a name without a version selects the last row."""


def framework(name: str) -> Framework:
    """Return the row of the table for `NAME` or `NAME@VERSION`. A name without a version selects the latest one.

    Raises ArgumentError for an unknown framework, or a version that is not supported.

    >>> framework("torchtitan").version, framework("torchtitan@0.2.2").version
    ('0.3', '0.2')
    """
    if not isinstance(name, str):
        raise ArgumentError(f"framework is {safe_repr(name)}, but must be a name", f"choose one of {', '.join(NAMES)}")
    return row_of(TABLE, name, "framework")


class _Versioned(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def title(self) -> str: ...


_Row = TypeVar("_Row", bound=_Versioned)


def row_of(table: Sequence[_Row], name: str, kind: str) -> _Row:
    """Return the row of `table` for `NAME` or `NAME@VERSION`. A name without a version selects the latest one.

    `table` must list older versions first. Raises ArgumentError for an unknown name or a version that is not supported.
    The message calls the rows of the table a `kind`.

    >>> row_of(TABLE, "megatron@0.16.1", "framework").version
    '0.16'
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f"there is no {kind} {safe_repr(name)}",
            did_you_mean("", dict.fromkeys(row.name for row in table)),
            code="unknown_name",
        )
    base, at, version = name.partition("@")
    rows = [row for row in table if row.name == base]
    if not rows:
        raise ArgumentError(
            f"there is no {kind} `{shorten(base)}`",
            did_you_mean(base, dict.fromkeys(row.name for row in table)),
            code="unknown_name",
        )
    if not at:
        return rows[-1]
    for row in rows:
        # Patch releases keep the interfaces that exports use, so 0.16.1 counts as 0.16.
        if row.version and (version == row.version or version.startswith(f"{row.version}.")):
            return row
    known = " or ".join(f"`{base}@{row.version}`" for row in rows if row.version)
    raise ArgumentError(
        f"{rows[-1].title} `{shorten(version)}` is not a supported version",
        f"use {known}" if known else f"leave the version out: `{base}`",
        code="unknown_name",
    )


NAMES = tuple(dict.fromkeys(row.name for row in TABLE))
"""Names of all frameworks, without versions."""


def runs_as(framework: Framework, schedule: str) -> ScheduleName:
    """Return the schedule that `framework` runs for a plan with `schedule`: the same one, or 1F1B for eager 1F1B.

    Raises ArgumentError if the framework runs neither.

    >>> runs_as(framework("megatron"), "eager_1f1b"), runs_as(framework("torch"), "eager_1f1b")
    ('1f1b', 'eager_1f1b')
    """
    if schedule in framework.schedules:
        return cast("ScheduleName", schedule)
    # Eager 1F1B differs from 1F1B only in its warm-up, so the plan stays valid and loses only the overlap of transfers.
    if schedule == "eager_1f1b" and "1f1b" in framework.schedules:
        return "1f1b"
    if not framework.trains:
        raise ArgumentError(
            f"{framework.title} does not train models", "make a plan with `hpgo partition`", code="unsupported"
        )
    raise ArgumentError(
        f"{framework.title} does not run `{schedule}`",
        f"plan with `--framework {framework.name}`, or `--schedule {next(iter(framework.schedules))}`",
        code="unsupported",
    )


def sums_shared(framework: Framework, layers: Collection[str], blocks: Blocks | None) -> bool:
    """Whether `framework` sums the gradients of a weight that `layers` on several stages share.

    >>> from hpgo.programs.blocks import Blocks
    >>> model = Blocks("layers.", ("embedding",), (("layers.0",), ("layers.1",)), ("head",))
    >>> [sums_shared(framework("megatron"), pair, model) for pair in (["embedding", "head"], ["layers.0", "head"])]
    [True, False]
    """
    # `ends`: the framework has a process group of first and last stage for embedding and head, but none for other
    # layers.
    if framework.tied_weights != "ends" or blocks is None:
        return framework.tied_weights == "any"
    return {*blocks.before, *blocks.after}.issuperset(layers)


def check_optimizer(
    framework: Framework, optimizer: OptimizerName | None, *, shard_optimizer: bool, splits_backward: bool
) -> None:
    """Raise ArgumentError if `framework` can't use the optimizer for which the plan counts memory.

    `shard_optimizer` is whether replicas shard the optimizer state, where there are several. `splits_backward` is
    whether the backward is split into input-gradient and weight-gradient passes. An `optimizer` of None has no preset.
    """
    # Without a preset, the plan only has numbers of bytes, which no framework can check.
    if optimizer is None:
        return
    sgd, planned = optimizer.startswith("sgd"), f"but the plan assumes {optimizer}"
    if framework.optimizers and optimizer not in framework.optimizers:
        reason = "has no SGD" if sgd else "sums gradients in fp32"
        raise ArgumentError(
            f"{framework.title} {reason}, {planned}",
            f"plan with `--optimizer {' or '.join(framework.optimizers)}`",
            code="unsupported",
        )
    if sgd and shard_optimizer and not framework.shares_sgd:
        raise ArgumentError(
            f"{framework.title} shards the optimizer state of Adam only, {planned}",
            "plan without `--shard-optimizer`, or with `--optimizer adam-bf16-fp32-gradients`",
            code="unsupported",
        )
    if optimizer == "adam-bf16-fp32-gradients" and splits_backward and not framework.widens_halves:
        raise ArgumentError(
            f"{framework.title} sums gradients in the data type of the weights where backward passes are split,"
            f" {planned}",
            "plan with `--optimizer adam-bf16`, or with a schedule that does not split them, as `--schedule 1f1b`",
            code="unsupported",
        )
    if optimizer == "adam-bf16-fp32-gradients" and not shard_optimizer and framework.shares_bf16:
        raise ArgumentError(
            f"{framework.title} sums gradients of 16-bit weights in 32 bits only if replicas shard the optimizer state,"
            f" {planned}",
            "plan with `--shard-optimizer`, or with `--optimizer adam-bf16`",
            code="unsupported",
        )


def check_computes_in_16_bits(
    framework: Framework, optimizer: OptimizerName | None, *, replicas: int, gpus: int
) -> None:
    """Raise ArgumentError if `framework` computes in 32 bits where the plan, of `gpus` in all, assumes 16."""
    if framework.bf16_by_fsdp and (optimizer or "").startswith("adam-bf16") and replicas == 1 and gpus > 1:
        raise ArgumentError(
            f"{framework.label} computes in fp32 with tp or pp unless FSDP shards weights over replicas, but the plan"
            f" has one replica and {optimizer}",
            f"plan with `--optimizer adam-fp32`, or use a newer release of {framework.title}",
            code="unsupported",
        )


def check(
    framework: Framework,
    *,
    schedule: str,
    replicas: Sequence[int],
    pipeline_micro_batch_size: int,
    shard_optimizer: bool,
    recompute: Sequence[bool],
    gpus_per_device: int = 1,
    zero_stage: int = 0,
) -> None:
    """Raise ArgumentError for a training plan that `framework` does not run. The hint states what to change.

    `replicas` and `recompute` have one entry for each stage. `Blocks.counts` checks where stages end. Two differences
    are accepted: a framework may reduce gradients later than the plan assumes, and may shard an optimizer state that
    the plan does not shard. Such a plan runs, but its step time and memory differ from the plan's numbers.
    """
    title, again = framework.title, f"plan for it, with `--framework {framework.name}`"
    runs_as(framework, schedule)
    if framework.equal_replicas and len(set(replicas)) > 1:
        raise ArgumentError(
            f"{title} needs the same number of replicas in each stage, but the plan has"
            f" {', '.join(map(str, replicas))}",
            f"{again}; or run it rank by rank with `Plan.for_rank`",
            code="unsupported",
        )
    # All stages have the same number of replicas here, so the first one stands for all.
    if framework.equal_replicas and pipeline_micro_batch_size % replicas[0]:
        raise ArgumentError(
            f"{title} needs the same number of samples on each replica, but {replicas[0]} replicas split"
            f" {pipeline_micro_batch_size}",
            f"{again}, or with `--even-split`",
            code="unsupported",
        )
    # With a single replica, there is nothing to shard.
    if max(replicas) > 1 and shard_optimizer and True not in framework.shards_optimizer:
        raise ArgumentError(
            f"{title} does not shard the optimizer state over replicas, but the plan does",
            f"{again}, or without `--shard-optimizer`",
            code="unsupported",
        )
    if max(replicas) > 1 and zero_stage >= 2:
        raise ArgumentError(
            f"the plan has ZeRO stage {zero_stage}, but plans from a profile for {title} shard at most the optimizer"
            " state",
            f"{again}, or with `--zero-stage 1`",
            code="unsupported",
        )
    if any(recompute) and framework.recomputes == "no":
        raise ArgumentError(
            f"{title} does not recompute activations", f"{again}, or without `--recompute`", code="unsupported"
        )
    if any(recompute) and not all(recompute) and not framework.recomputes_by_stage:
        raise ArgumentError(
            f"{title} recomputes the activations of all stages or of none, but the plan has"
            f" {pluralize(sum(recompute), 'stage')} of {len(recompute)} that recompute them",
            f"{again}, or with `--recompute yes`",
            code="unsupported",
        )
    if gpus_per_device > 1 and not framework.tensor_parallel:
        raise ArgumentError(
            f"a device of the plan is {gpus_per_device} GPUs, but {title} has no tensor parallelism with pipelines",
            "plan with a profile and a cluster of single GPUs",
            code="unsupported",
        )
