"""Step times in the logs of Megatron-LM, Megatron-Bridge, NeMo, torchtitan and DeepSpeed.

Each kind of line below names the function of the framework that prints it, at the release whose source was read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

from hpgo.base.documents import read_text
from hpgo.base.files import as_path
from hpgo.base.messages import join_words, pluralize, printable
from hpgo.errors import ArgumentError
from hpgo.llm.parallelism import TokenDispatcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

_MAX_BYTES = 1 << 30
_WARM_UP = 0.1
"""Share of the first steps that are dropped: compilation, autotuning and the allocator's growth make them slow."""
_MIN_WARM_UP = 3
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

FORMATS = (
    "`elapsed time per iteration (ms): 1234.5` (Megatron-LM)",
    "`step: 10 … tps: 5,123` (torchtitan)",
    "`iter time (s): 1.234` (DeepSpeed)",
)
"""A line of each framework that hpgo reads, for hints."""


class _Kind(NamedTuple):
    """A kind of line with the time of a step."""

    framework: str
    line: re.Pattern[str]
    unit: Literal["s", "ms", "samples/s", "tokens/s/GPU"]
    """Unit of the line's number."""

    def seconds(self, number: float, samples: float, tokens: float) -> float:
        """Return the seconds of a step from the line's number, the samples of a step and its tokens per GPU."""
        known = {"s": number, "ms": number / 1e3, "samples/s": samples / number, "tokens/s/GPU": tokens / number}
        return known[self.unit]


# Frameworks print the same step on several lines. The first kind that a log contains is read: the most exact one.
_KINDS = (
    # `training_log` in megatron/training/training.py, core_v0.16.0; Megatron-Bridge prints the same line.
    _Kind("megatron", re.compile(rf"elapsed time per iteration \(ms\): {_NUMBER}"), "ms"),
    # `ProgressPrinter` and the progress bar of NeMo 2, which print the metric of its timer.
    _Kind("nemo", re.compile(rf"train_step_timing in s[:=] ?{_NUMBER}"), "s"),
    # `training_log` in megatron/bridge/training/utils/train_utils.py.
    _Kind("megatron-bridge", re.compile(rf"Step Time : {_NUMBER}s"), "s"),
    # `MetricsProcessor.log` in torchtitan/components/metrics.py, 0.2.2 and 0.3: tokens per second and GPU. The metric
    # was named `wps` before. Lines of validation have no `step` of their own, but `validate step`.
    _Kind(
        "torchtitan",
        re.compile(rf"(?<!validate )\bstep: *[0-9]+ .*?\b(?:tps|wps): {_NUMBER}"),
        "tokens/s/GPU",
    ),
    # `PipelineEngine.train_batch` in deepspeed/runtime/pipe/engine.py, 0.19.
    _Kind("deepspeed", re.compile(rf"iter time \(s\): {_NUMBER}"), "s"),
    # `ThroughputTimer.stop` in deepspeed/utils/timer.py, 0.19: samples of the whole step. The running average contains
    # the warm-up, so the current value is read if there is one.
    _Kind(
        "deepspeed",
        re.compile(rf"\bCurrSamplesPerSec={_NUMBER}"),
        "samples/s",
    ),
    _Kind(
        "deepspeed",
        re.compile(rf"\bRunningAvgSamplesPerSec={_NUMBER}"),
        "samples/s",
    ),
)
# `SynchronizedWallClockTimer.log` in deepspeed/utils/timer.py, 0.19, with the timers of `EngineTimers.global_timers`:
# all micro-batches of a step together.
_WALL_CLOCK = re.compile(rf"time \(ms\) \| fwd: {_NUMBER} \| bwd: {_NUMBER}(?: \|.*?)? \| step: {_NUMBER}")
_OF_WALL_CLOCK = _Kind("deepspeed", _WALL_CLOCK, "ms")

_FAMILY = {"megatron-bridge": "megatron"}
"""Framework whose lines a framework prints, too."""
_COUNTERS = tuple(re.compile(rf"\b{name}[:=]? *([0-9]{{1,12}})\b") for name in ("global_step", "iteration", "steps?"))
"""Numbers of steps, in the order of preference: NeMo counts iterations of an epoch beside all steps."""
_BATCH = re.compile(r"\bglobal[ _]batch[ _]size: *([0-9]{1,12})\b")
"""The batch on the lines of Megatron-LM's and NeMo's steps. It changes from line to line while the batch ramps up."""
_MIN_RUN_LINES = 5
"""Number of lines of steps from which on a part of a log can be a run. Lines of several ranks get mixed up at times."""
_SAME_STEP = 0.1
"""Largest difference of the median steps of a run and of its continuation from a checkpoint, relative to the first.
Steps of one configuration deviate by a few percent. Not tuned."""

# `_print_args` in megatron/training/arguments.py, core_v0.16.0: `  name ..... value`.
_ARGUMENT = re.compile(r"^(?:[^ ]*:)? *([a-z][a-z0-9_]*) \.{2,} (\S.*?)\s*$")
_COUNTS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "seq_length": "seq_length",
    "world_size": "devices",
    "recompute_num_layers": "recompute_num_layers",
    "microbatch_group_size_per_vp_stage": "micro_batch_group_size",
    "decoder_first_pipeline_num_layers": "first_rank_layers",
    "decoder_last_pipeline_num_layers": "last_rank_layers",
}
"""Argument of `hpgo.estimate_llm` for each argument of Megatron-LM that is a count."""
_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "ffn",
    "num_experts": "experts",
}
"""Field of a transformer for each argument of Megatron-LM that is a size of the model."""
_SWITCHES = {
    "sequence_parallel": "sequence_parallel",
    "grad_reduce_in_bf16": "grad_reduce_in_bf16",
    "overlap_moe_expert_parallel_comm": "overlap_ep_comm",
    "delay_wgrad_compute": "delay_wgrad_compute",
    "overlap_grad_reduce": "overlap_dp_comm",
}
"""Argument of `hpgo.estimate_llm` for each argument of Megatron-LM that is True or False."""
_OTHERS = (
    "recompute_granularity", "recompute_method", "recompute_modules", "use_distributed_optimizer", "use_megatron_fsdp",
    "data_parallel_sharding_strategy", "bf16", "fp16", "fp8", "fp4", "tp_comm_overlap", "expert_tensor_parallel_size",
    "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "fine_grained_activation_offloading", "offload_modules",
    "optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction",
)  # fmt: skip
"""Further arguments of Megatron-LM that are read. Others do not change an estimate, so two runs may differ in them."""
_OPTIMIZERS = {"sgd", "muon", "dist_muon"}
"""Names of optimizers other than Adam in Megatron-LM; `dist_` gives each replica a part of the matrices."""
_READ = frozenset((*_COUNTS, *_SIZES, *_SWITCHES, *_OTHERS))
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stage for each sharding strategy of Megatron-FSDP."""
# `ParallelDims.build_mesh` in torchtitan/distributed/parallel_dims.py, and `Trainer.__init__`: 0.2.2 prints sequences,
# 0.3 prints tokens.
_MESH = re.compile(
    r"Building device mesh with parallelism: pp=(\d{1,9}), dp_replicate=(\d{1,9}), dp_shard=(\d{1,9}), cp=(\d{1,9}),"
    r" tp=(\d{1,9}), ep=(\d{1,9})"
)
_TRAINER = re.compile(
    r"Trainer is initialized with local batch size (\d{1,9}), global batch size (\d{1,9}),"
    r".*? sequence length (\d{1,9}),"
)
_TRAINER_OF_TOKENS = re.compile(
    r"Trainer is initialized with \d+ tokens per DP rank, (\d{1,12}) tokens per train step,"
    r".*? maximum context length (\d{1,9}),"
)
# `apply_ac` in torchtitan/distributed/activation_checkpoint.py. The option of `selective` is `op` by default.
_RECOMPUTED = re.compile(r"Applied (\w+) activation checkpointing to the model")
_CHECKPOINTING = "activation checkpointing"
_BOOLEANS = ("True", "False")
_MAX_DIGITS = 12


class _Step(NamedTuple):
    """A line with the time of a step."""

    value: float
    line: int
    counter: int | None
    """Number of the step; None if the line does not state it."""


@dataclass(frozen=True)
class RunLog:
    """The steps in a log, and the configuration that the framework printed there."""

    name: str
    kind: _Kind
    numbers: tuple[float, ...]
    printed: dict[str, Any] = field(default_factory=dict)
    """Arguments of `hpgo.estimate_llm` that the log states."""
    assumed: dict[str, Any] = field(default_factory=dict)
    """Arguments that the log leaves open, with their usual values in such a run."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the model that the log states, by the fields of `hpgo.model.transformer.Transformer`."""
    tp_comm_overlap: bool | None = None
    """Whether Megatron-LM overlapped TP communication with GEMMs; None if the log does not state it."""

    @property
    def framework(self) -> str:
        """Framework that wrote the log, as software stacks name it."""
        return self.kind.framework

    def seconds(self, *, global_batch_size: int, seq_length: int, gpus: int) -> tuple[float, str]:
        """Return the median time of a step after the warm-up, and how it was found.

        >>> log = parse_log(" elapsed time per iteration (ms): 2000.0 |" * 5, "run.log")
        >>> log.seconds(global_batch_size=8, seq_length=4096, gpus=8)[0]
        2.0
        """
        left = self.numbers[_warm_up(len(self.numbers)) :]
        samples = float(global_batch_size)
        found = sorted(self.kind.seconds(one, samples, samples * seq_length / gpus) for one in left)
        middle = median(found)
        # Half of the range of the middle 80 % of the steps: checkpoints and evaluations between them do not count.
        cut = len(found) // 10
        spread = (found[-1 - cut] - found[cut]) / 2 / middle
        dropped = len(self.numbers) - len(left)
        return middle, (
            f"{printable(self.name)}: median of {pluralize(len(left), 'line')} of {self.framework} after"
            f" {dropped} of warm-up, ± {100 * spread:.1f} %"
        )


def read_log(path: str | PathLike[str]) -> RunLog:
    """Return the steps in a log. Raise ArgumentError if it has no line with a step time."""
    path = as_path(path, ArgumentError)
    return parse_log(read_text(path, ArgumentError, maximum=_MAX_BYTES), str(path))


def parse_log(text: str, name: str) -> RunLog:
    """Return the steps in the text of a log. Lines that cannot be read are passed over.

    Raises ArgumentError if no line has a step time, and for a log of two runs: with two values of a setting, with one
    framework after the other, or with two step times.
    """
    steps: dict[_Kind, list[_Step]] = {}
    printed: dict[str, dict[str, int]] = {}
    for number, whole in enumerate(_COLOURS.sub("", text).split("\n"), start=1):
        # A progress bar rewrites its line, so one line of the file may have many steps.
        for line in whole.splitlines():
            for kind in _KINDS:
                for value in filter(None, map(_number, kind.line.findall(line))):
                    steps.setdefault(kind, []).append(_Step(value, number, _counter(line)))
            if (parts := _WALL_CLOCK.search(line)) is not None:
                steps.setdefault(_OF_WALL_CLOCK, []).append(_Step(sum(map(_number, parts.groups())), number, None))
            for setting, stated in _stated(line):
                printed.setdefault(setting, {}).setdefault(stated, number)
    found = next((kind for kind in (*_KINDS, _OF_WALL_CLOCK) if kind in steps), None)
    if found is None:
        raise ArgumentError(
            f"{printable(name)} has no line with the time of a step",
            f"give a log with lines such as {join_words(FORMATS, 'or')}",
            code="wrong_kind_of_file",
        )
    _check_one_run(steps, found, printed, name)
    settings = {setting: next(iter(values)) for setting, values in printed.items()}
    overlap = settings.get("tp_comm_overlap")
    sizes = {size: count for name, size in _SIZES.items() if (count := _count(settings.get(name, "")))}
    return RunLog(
        name,
        found,
        tuple(step.value for step in steps[found]),
        _arguments(settings),
        _assumed(settings),
        sizes | ({"experts": 0} if settings.get("num_experts") == "None" else {}),
        overlap == "True" if overlap in {"True", "False"} else None,
    )


def _counter(line: str) -> int | None:
    """Return the number of the step that a line states; None if it states none."""
    found = next((found for counter in _COUNTERS if (found := counter.search(line)) is not None), None)
    return None if found is None else int(found[1])


def _check_one_run(
    steps: Mapping[_Kind, Sequence[_Step]], kind: _Kind, printed: Mapping[str, Mapping[str, int]], name: str
) -> None:
    """Raise ArgumentError if a log has the steps of two runs."""

    def refuse(what: str, line: int) -> NoReturn:
        raise ArgumentError(
            f"{printable(name)} has steps of two runs or settings: {what}",
            f"give each a separate log: the second one begins at line {line} or before it",
            code="mismatch",
        )

    for setting, lines in printed.items():
        if len(lines) > 1:
            (one, first), (other, second), *_ = lines.items()
            refuse(f"{setting} is {printable(one)} in line {first}, but {printable(other)} in line {second}", second)
    lines_of: dict[str, list[int]] = {}
    for form, held in steps.items():
        lines_of.setdefault(_FAMILY.get(form.framework, form.framework), []).extend(step.line for step in held)
    ranges = sorted((min(lines), max(lines), framework) for framework, lines in lines_of.items())
    for (first, last, before), (start, _, after) in pairwise(ranges):
        # Megatron-DeepSpeed prints the lines of both frameworks for each step, so their ranges overlap.
        if last < start:
            refuse(f"lines {first} to {last} are of {before}, but those from line {start} on are of {after}", start)
    runs: list[list[_Step]] = [[]]
    for step in steps[kind]:
        if runs[-1] and step.counter is not None and step.counter < (runs[-1][-1].counter or 0):
            runs.append([])
        runs[-1].append(step)
    medians = [
        (median(step.value for step in run[_warm_up(len(run)) :]), run[0]) for run in runs if len(run) >= _MIN_RUN_LINES
    ]
    for (earlier, _), (later, step) in pairwise(medians):
        if abs(later / earlier - 1) > _SAME_STEP:
            refuse(
                f"line {step.line} is step {step.counter} again, and the median of the lines from there on is"
                f" {later:g}, not {earlier:g}",
                step.line,
            )


def _warm_up(count: int) -> int:
    """Return the number of first steps to drop: a tenth and at least three, but always fewer than half.

    >>> [_warm_up(count) for count in (1, 2, 5, 8, 100)]
    [0, 0, 2, 3, 10]
    """
    return min(max(_MIN_WARM_UP, int(_WARM_UP * count)), (count - 1) // 2)


def _number(text: str) -> float:
    """Return a positive number with commas between its thousands; 0 if it is none."""
    try:
        found = float(text.replace(",", ""))
    except ValueError:
        return 0.0
    return found if 0 < found < float("inf") else 0.0


def _count(text: str) -> int:
    """Return a number that a setting has as text; 0 if it is none, such as `None`, or longer than any count."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0


def _stated(line: str) -> Iterator[tuple[str, str]]:
    """Yield the settings that a line states, each with its value as text."""
    if (argument := _ARGUMENT.match(line)) is not None and argument[1] in _READ:
        yield argument[1], argument[2]
    elif (batch := _BATCH.search(line)) is not None:
        yield "global_batch_size", batch[1]
    elif (mesh := _MESH.search(line)) is not None:
        yield from zip(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), mesh.groups(), strict=True)
    elif (recomputed := _RECOMPUTED.search(line)) is not None:
        yield _CHECKPOINTING, "full" if "full" in recomputed[1].lower() else "selective"
    elif (trainer := _TRAINER.search(line)) is not None:
        yield from zip(("micro_batch_size", "global_batch_size", "seq_length"), trainer.groups(), strict=True)
    elif (trainer := _TRAINER_OF_TOKENS.search(line)) is not None:
        tokens, seq_length = map(int, trainer.groups())
        yield "seq_length", str(seq_length)
        if seq_length and tokens % seq_length == 0:
            yield "global_batch_size", str(tokens // seq_length)


def _arguments(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `hpgo.estimate_llm` that settings of Megatron-LM or torchtitan state."""
    found: dict[str, Any] = {
        argument: count for name, argument in _COUNTS.items() if (count := _count(settings.get(name, "")))
    }
    found |= {name: settings[key] == "True" for key, name in _SWITCHES.items() if settings.get(key) in _BOOLEANS}
    if settings.get("use_megatron_fsdp") == "True" and settings.get("data_parallel_sharding_strategy") in _SHARDING:
        found["zero_stage"] = _SHARDING[settings["data_parallel_sharding_strategy"]]
    elif settings.get("use_distributed_optimizer") in _BOOLEANS:
        found["zero_stage"] = 1 if settings["use_distributed_optimizer"] == "True" else 0
    if (granularity := settings.get("recompute_granularity")) is not None:
        found["recompute"] = granularity if granularity in {"full", "selective"} else "none"
    # With the method `uniform`, Megatron-LM's number is the size of a group, and all layers are recomputed.
    if settings.get("recompute_method") != "block":
        found.pop("recompute_num_layers", None)
    # Megatron-LM versions with modules recompute core attention by default, even fused attention.
    if found.get("recompute") == "selective" and (modules := settings.get("recompute_modules")) is not None:
        found["recompute_modules"] = ("core_attn",) if modules == "None" else tuple(re.findall(r"\w+", modules))
    found |= _of_experts(settings)
    if settings.get("fine_grained_activation_offloading") == "True":
        found["offload_modules"] = tuple(re.findall(r"\w+", settings.get("offload_modules", "")))
    if (optimizer := settings.get("optimizer")) in _OPTIMIZERS:
        found["optimizer"] = optimizer.removeprefix("dist_")
        found |= {"zero_stage": 1} if optimizer.startswith("dist_") else {}
    if settings.get("optimizer_cpu_offload") == "True":
        # Megatron-LM's default is all of the state.
        found["optimizer_offload_fraction"] = min(1.0, _number(settings.get("optimizer_offload_fraction", "")) or 1.0)
    narrow = next((name for name in ("fp4", "fp8") if settings.get(name, "None") not in {"None", "False"}), None)
    wide = next((name for name in ("bf16", "fp16") if settings.get(name) == "True"), None)
    found |= {"precision": precision} if (precision := narrow or wide) else {}
    if "dp_shard" in settings:
        degrees = {name: int(settings[name]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        replicas, shards = degrees.pop("dp_replicate"), degrees.pop("dp_shard")
        found |= degrees
        found |= {"dtensor": True, "devices": degrees["pp"] * replicas * shards * degrees["cp"] * degrees["tp"]}
        found |= {"dp_replicate": replicas} if shards > 1 < replicas else {}
        # A pipeline divides the local batch further.
        if degrees["pp"] > 1:
            found.pop("micro_batch_size", None)
    if settings.get(_CHECKPOINTING) == "full":
        found["recompute"] = "full"
    return found


def _of_experts(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments on experts. Megatron-LM prints its defaults of them for models without experts, too."""
    if not _count(settings.get("num_experts", "")):
        return {}
    found: dict[str, Any] = {}
    if divided := _count(settings.get("expert_tensor_parallel_size", "")):
        found["etp"] = divided
    kind = settings.get("moe_token_dispatcher_type")
    kind = settings.get("moe_flex_dispatcher_backend") if kind == "flex" else kind
    if kind in get_args(TokenDispatcher) and (_count(settings.get("expert_model_parallel_size", "")) or 1) > 1:
        found["moe_token_dispatcher"] = kind
    return found


def _assumed(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the usual values of what torchtitan's log leaves open."""
    found: dict[str, Any] = {}
    if "dp_shard" in settings:
        found["zero_stage"] = 3 if int(settings["dp_shard"]) > 1 else 0
        if batch := _count(settings.get("micro_batch_size", "")):
            found["micro_batch_size"] = batch
    # The option `selective` recomputes operations by default, or every n-th layer.
    if settings.get(_CHECKPOINTING) == "selective":
        found["recompute"] = "selective_op"
    return found
