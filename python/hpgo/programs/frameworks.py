"""Frameworks, and what each of them runs: the one table that planning, exports and refusals go by.

A row holds for one version of a framework. Where frameworks differ, they differ in what may be cut, which orders of
forwards and backwards they know, and what they do with gradients and the optimizer's state. `check` refuses a plan that
a framework can't run, `hpgo.plan(framework=…)` searches among those that it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast

from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpgo.programs.blocks import Blocks
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.optimizers import OptimizerName

TrainingFramework = Literal[
    "megatron", "megatron@0.16", "torchtitan", "torchtitan@0.2", "torchtitan@0.3", "deepspeed", "deepspeed@0.19",
    "torch", "torch@2.15",
]  # fmt: skip
"""Frameworks that `hpgo.plan` plans for. Patches of these versions, as in `torchtitan@0.2.2`, are accepted, too."""

ServingFramework = Literal[
    "vllm", "vllm@0.33", "sglang", "sglang@0.5", "llama.cpp", "accelerate", "accelerate@1.15", "tensorrt-llm",
]  # fmt: skip
"""Frameworks that `hpgo.partition` cuts for."""

Cuts = Literal["anywhere", "blocks"]


@dataclass(frozen=True, slots=True)
class Framework:
    """What one version of a framework runs."""

    name: str
    """What `--framework` and `--to` call it: `megatron`."""
    version: str
    """The release that this was tried with; later patches of it count too: `0.16`."""
    title: str
    """What people call it."""
    schedules: Mapping[str, str]
    """Schedules that it runs, with the name that it has for each; the first is its own choice."""
    cuts: Cuts
    """Where stages may end: `anywhere`, or between `blocks`, with what embeds on the first stage and what predicts on
    the last."""
    equal_replicas: bool = True
    """Whether each stage must have as many replicas, and whether each replica must get as many samples."""
    shards_optimizer: tuple[bool, ...] = (False, True)
    """Whether replicas keep the whole optimizer state (False), a share of it (True, ZeRO stage 1), or either."""
    overlaps: bool = True
    """Whether it can sum gradients while backward passes still run."""
    recomputes: Literal["stage", "groups", "block", "no"] = "stage"
    """What recomputation keeps of each micro-batch: the input of the stage, of equal groups of blocks, of each block,
    or it has none. `hpgo.programs.recomputation` counts it."""
    tensor_parallel: bool = False
    """Whether a device of the plan may stand for several GPUs that share each layer."""
    trains: bool = True
    """Whether it runs training plans; else those of `hpgo partition`."""
    min_blocks: int = 0
    """Of each stage."""
    ties: Literal["any", "ends", "none"] = "none"
    """Weights that stages may share, whose gradients it sums: any, or what embeds and what predicts, or none."""
    optimizers: tuple[OptimizerName, ...] = ()
    """Optimizers that it has settings for; all if empty."""
    shares_sgd: bool = True
    """Whether replicas may share the state of SGD."""
    shares_bf16: bool = False
    """Whether replicas share the state of an optimizer of 16-bit weights in any case."""
    single_v: bool = False
    """Whether stages make at most one V on the ranks, where they do not make loops: two stages a rank in `hanayo`."""
    widens_halves: bool = True
    """Whether gradients may be wider than weights where backward passes are split."""

    @property
    def label(self) -> str:
        """Title and version.

        >>> framework("megatron").label
        'Megatron-LM 0.16'
        """
        return f"{self.title} {self.version}" if self.version else self.title

    @property
    def by_file(self) -> bool:
        """Whether it takes orders of forwards and backwards from a file, and so runs them as planned."""
        return _CSV in self.schedules.values()


_CSV = "an order file"
"""PyTorch's pipelining runs any order of one chain of stages that ends with a flush, given as a file."""
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
"""torchtitan's optimizers are Adam's, and FSDP sums gradients in fp32."""

TABLE: tuple[Framework, ...] = (
    Framework(
        "megatron",
        "0.16",
        "Megatron-LM",
        schedules=MappingProxyType({"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}),
        cuts="blocks",
        recomputes="groups",
        tensor_parallel=True,
        ties="ends",
        shares_sgd=False,
    ),
    # Its data parallelism beside a pipeline is FSDP, which shares the optimizer's state. PyTorch's runtime sums
    # gradients behind the last backward pass of the stage.
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
    # Gradients are summed in one go once all backward passes are done.
    Framework(
        "deepspeed",
        "0.19",
        "DeepSpeed",
        schedules=MappingProxyType({"1f1b": "TrainSchedule"}),
        cuts="anywhere",
        overlaps=False,
        ties="any",
        shares_bf16=True,
    ),
    # `stage_backward_weight` assigns gradients of the type of the weights.
    Framework(
        "torch", "2.15", "PyTorch", schedules=_BY_FILE, cuts="anywhere", overlaps=False, widens_halves=False,
    ),
    *(
        Framework(name, version, title, schedules=MappingProxyType({}), cuts="blocks", trains=False, min_blocks=1)
        for name, version, title in (
            ("vllm", "0.33", "vLLM"), ("sglang", "0.5", "SGLang"), ("llama.cpp", "", "llama.cpp"),
            ("accelerate", "1.15", "accelerate"), ("tensorrt-llm", "", "TensorRT-LLM"),
        )
    ),
)  # fmt: skip
"""What each framework runs, older versions first."""


def framework(name: str) -> Framework:
    """The row of the table for `NAME` or `NAME@VERSION`; the latest version if none is named.

    Raises ArgumentError for a framework that is unknown, or a version that nobody tried.

    >>> framework("torchtitan").version, framework("torchtitan@0.2.2").version
    ('0.3', '0.2')
    """
    if not isinstance(name, str):
        raise ArgumentError(f"the framework is {safe_repr(name)}", f"name one of {', '.join(NAMES)}")
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
    """The row of `table`, older versions first, for `NAME` or `NAME@VERSION`; the latest version if none is named.

    Raises ArgumentError, which calls what the table lists a `kind`, for an unknown name, or a version nobody tried.

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
        if row.version and (version == row.version or version.startswith(f"{row.version}.")):
            return row
    known = ", ".join(f"{base}@{row.version}" for row in rows if row.version)
    raise ArgumentError(
        f"nobody has tried {rows[-1].title} `{shorten(version)}`",
        f"known: {known}" if known else f"leave the version out: `{base}`",
        code="unknown_name",
    )


NAMES = tuple(dict.fromkeys(row.name for row in TABLE))
"""Of all frameworks, whatever their versions."""


def runs_as(framework: Framework, schedule: str) -> ScheduleName:
    """The schedule that `framework` runs for a plan with `schedule`: the same, or 1F1B for eager 1F1B.

    Raises ArgumentError if it runs nothing near.

    >>> runs_as(framework("megatron"), "eager_1f1b"), runs_as(framework("torch"), "eager_1f1b")
    ('1f1b', 'eager_1f1b')
    """
    if schedule in framework.schedules:
        return cast("ScheduleName", schedule)
    if schedule == "eager_1f1b" and "1f1b" in framework.schedules:
        return "1f1b"
    if not framework.trains:
        raise ArgumentError(
            f"{framework.title} trains nothing", "give it a plan of `hpgo partition`", code="unsupported"
        )
    raise ArgumentError(
        f"{framework.title} does not run `{schedule}`",
        f"plan with `--framework {framework.name}`, or `--schedule {next(iter(framework.schedules))}`",
        code="unsupported",
    )


def sums_shared(framework: Framework, layers: Collection[str], blocks: Blocks | None) -> bool:
    """Whether `framework` sums the gradients of a weight that these layers share where they are on several stages.

    >>> from hpgo.programs.blocks import Blocks
    >>> model = Blocks("layers.", ("embedding",), (("layers.0",), ("layers.1",)), ("head",))
    >>> [sums_shared(framework("megatron"), pair, model) for pair in (["embedding", "head"], ["layers.0", "head"])]
    [True, False]
    """
    if framework.ties != "ends" or blocks is None:
        return framework.ties == "any"
    return {*blocks.before, *blocks.after}.issuperset(layers)


def check_optimizer(
    framework: Framework, optimizer: OptimizerName | None, *, shard_optimizer: bool, splits_backward: bool
) -> None:
    """Raise ArgumentError, with the way out, if `framework` has no settings for what memory is priced with.

    `shard_optimizer` is whether replicas share the optimizer's state, where there are several; `splits_backward` is
    whether gradients of inputs and of weights are passes of their own. An `optimizer` of None is one without a preset.
    """
    if optimizer is None:
        return
    sgd, priced = optimizer.startswith("sgd"), f"and the plan is priced for {optimizer}"
    if framework.optimizers and optimizer not in framework.optimizers:
        why = "has no SGD" if sgd else "sums gradients in fp32"
        raise ArgumentError(
            f"{framework.title} {why}, {priced}",
            f"plan with `--optimizer {' or '.join(framework.optimizers)}`",
            code="unsupported",
        )
    if sgd and shard_optimizer and not framework.shares_sgd:
        raise ArgumentError(
            f"{framework.title} shares the state of Adam alone between replicas, {priced}",
            "plan without `--shard-optimizer`, or with `--optimizer adam-bf16-fp32-gradients`",
            code="unsupported",
        )
    if optimizer == "adam-bf16-fp32-gradients" and splits_backward and not framework.widens_halves:
        raise ArgumentError(
            f"{framework.title} sums gradients in the type of the weights where backward passes are split, {priced}",
            "plan with `--optimizer adam-bf16`, or with a schedule that does not split them, `--schedule 1f1b` say",
            code="unsupported",
        )
    if optimizer == "adam-bf16-fp32-gradients" and not shard_optimizer and framework.shares_bf16:
        raise ArgumentError(
            f"{framework.title} sums gradients of 16-bit weights in 32 bits only where replicas share the optimizer's"
            f" state, {priced}",
            "plan with `--shard-optimizer`, or with `--optimizer adam-bf16`",
            code="unsupported",
        )


def check(
    framework: Framework,
    *,
    schedule: str,
    replicas: Sequence[int],
    micro_batch_size: int,
    shard_optimizer: bool,
    recompute: bool,
    gpus_per_device: int = 1,
) -> None:
    """Raises ArgumentError, with the way out, for a training plan of this kind that `framework` does not run.

    `replicas` has one entry for each stage. Where stages may end is for `Blocks.counts` to say. A plan whose gradients
    are summed earlier than `framework` does, or whose optimizer state it shares although the plan doesn't, runs, but
    its step and memory are not what the plan says.
    """
    title, again = framework.title, f"plan for it, with `--framework {framework.name}`"
    runs_as(framework, schedule)
    if framework.equal_replicas and len(set(replicas)) > 1:
        raise ArgumentError(
            f"{title} needs as many replicas of each stage, but the plan has {', '.join(map(str, replicas))}",
            f"{again}; or run it rank by rank with `Plan.for_rank`",
            code="unsupported",
        )
    if framework.equal_replicas and micro_batch_size % replicas[0]:
        raise ArgumentError(
            f"{title} needs equal shares, but {replicas[0]} replicas split {micro_batch_size} samples",
            f"{again}, or with `--even-split`",
            code="unsupported",
        )
    if max(replicas) > 1 and shard_optimizer and True not in framework.shards_optimizer:
        raise ArgumentError(
            f"{title} does not share the optimizer's state between replicas, but the plan does",
            f"{again}, or without `--shard-optimizer`",
            code="unsupported",
        )
    if recompute and framework.recomputes == "no":
        raise ArgumentError(
            f"{title} does not recompute activations", f"{again}, or without `--recompute`", code="unsupported"
        )
    if gpus_per_device > 1 and not framework.tensor_parallel:
        raise ArgumentError(
            f"a device of the plan is {gpus_per_device} GPUs, which {title} can't join",
            "plan with a profile and a cluster of single GPUs",
            code="unsupported",
        )
