"""Step times in the logs of Megatron-LM, Megatron-Bridge, NeMo, torchtitan and DeepSpeed.

Each kind of line below names the function of the framework that prints it, at the release whose source was read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpgo.base.documents import read_text
from hpgo.base.files import as_path
from hpgo.base.messages import join_words, pluralize, printable
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
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
    "decoder_first_pipeline_num_layers": "first_rank_layers",
    "decoder_last_pipeline_num_layers": "last_rank_layers",
}
"""Argument of `hpgo.estimate_llm` for each argument of Megatron-LM that is a count."""
_METHOD = "recompute_method"
# `ParallelDims.build_mesh` in torchtitan/distributed/parallel_dims.py, and `Trainer.__init__`: 0.2.2 prints sequences,
# 0.3 prints tokens.
_MESH = re.compile(
    r"Building device mesh with parallelism: pp=(\d+), dp_replicate=(\d+), dp_shard=(\d+), cp=(\d+), tp=(\d+), ep=(\d+)"
)
_TRAINER = re.compile(
    r"Trainer is initialized with local batch size (\d+), global batch size (\d+),.*? sequence length (\d+),"
)
_TRAINER_OF_TOKENS = re.compile(
    r"Trainer is initialized with \d+ tokens per DP rank, (\d+) tokens per train step,.*? maximum context length (\d+),"
)
# `apply_ac` in torchtitan/distributed/activation_checkpoint.py. The option of `selective` is `op` by default.
_RECOMPUTED = re.compile(r"Applied (\w+) activation checkpointing to the model")


@dataclass(frozen=True)
class RunLog:
    """The steps in a log, and the configuration that the framework printed there."""

    name: str
    kind: _Kind
    numbers: tuple[float, ...]
    printed: dict[str, Any] = field(default_factory=dict)
    """Arguments of `hpgo.estimate_llm` that the log states."""

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

    Raises ArgumentError if no line has a step time.
    """
    numbers: dict[int, list[float]] = {}
    wall_clock: list[float] = []
    printed: dict[str, Any] = {}
    for line in _COLOURS.sub("", text).splitlines():
        for place, kind in enumerate(_KINDS):
            # A progress bar rewrites its line, so one line may have many steps.
            numbers.setdefault(place, []).extend(filter(None, map(_number, kind.line.findall(line))))
        if (parts := _WALL_CLOCK.search(line)) is not None:
            wall_clock.append(sum(map(_number, parts.groups())))
        _read_printed(line, printed)
    found = next(((kind, numbers[place]) for place, kind in enumerate(_KINDS) if numbers.get(place)), None)
    if found is None and wall_clock:
        found = _Kind("deepspeed", _WALL_CLOCK, "ms"), wall_clock
    if found is None:
        raise ArgumentError(
            f"{printable(name)} has no line with the time of a step",
            f"give a log with lines such as {join_words(FORMATS, 'or')}",
            code="wrong_kind_of_file",
        )
    # With the method `uniform`, Megatron-LM's number is the size of a group, and all layers are recomputed.
    if printed.pop(_METHOD, None) != "block":
        printed.pop("recompute_num_layers", None)
    return RunLog(name, found[0], tuple(found[1]), printed)


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


def _read_printed(line: str, printed: dict[str, Any]) -> None:
    """Add what a line states of the configuration."""
    if (argument := _ARGUMENT.match(line)) is not None:
        _read_argument(argument[1], argument[2], printed)
    elif (mesh := _MESH.search(line)) is not None:
        pp, replicas, shards, cp, tp, ep = map(int, mesh.groups())
        printed |= {
            "pp": pp,
            "cp": cp,
            "tp": tp,
            "ep": ep,
            "dtensor": True,
            "devices": pp * replicas * shards * cp * tp,
        }
        printed["zero_stage"] = 3 if shards > 1 else 0
        printed |= {"dp_replicate": replicas} if shards > 1 < replicas else {}
    elif (recomputed := _RECOMPUTED.search(line)) is not None:
        printed["recompute"] = "full" if "full" in recomputed[1].lower() else "selective_op"
    elif (trainer := _TRAINER.search(line)) is not None:
        printed |= dict(
            zip(("micro_batch_size", "global_batch_size", "seq_length"), map(int, trainer.groups()), strict=True)
        )
    elif (trainer := _TRAINER_OF_TOKENS.search(line)) is not None:
        tokens, seq_length = map(int, trainer.groups())
        printed |= {"seq_length": seq_length}
        printed |= {"global_batch_size": tokens // seq_length} if seq_length and tokens % seq_length == 0 else {}


def _read_argument(name: str, value: str, printed: dict[str, Any]) -> None:
    """Add an argument of Megatron-LM."""
    if name in _COUNTS:
        if value.isdecimal() and int(value) > 0:
            printed[_COUNTS[name]] = int(value)
    elif name == "sequence_parallel" and value in {"True", "False"}:
        printed["sequence_parallel"] = value == "True"
    elif name == "use_distributed_optimizer" and value in {"True", "False"}:
        printed["zero_stage"] = 1 if value == "True" else 0
    elif name == "recompute_granularity":
        printed["recompute"] = value if value in {"full", "selective"} else "none"
    elif name == _METHOD:
        printed[_METHOD] = value
    elif name in {"fp16", "bf16"} and value == "True":
        printed.setdefault("precision", name)
    elif name == "fp8" and value not in {"None", "False"}:
        printed["precision"] = "fp8"
