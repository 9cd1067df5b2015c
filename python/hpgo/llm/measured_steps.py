"""Measured steps: files of them, and each with the estimate of the same step."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is, check_list, number
from hpgo.base.documents import Section, hinted, parse, read_text
from hpgo.base.files import as_path
from hpgo.base.messages import join_words, printable, safe_repr, shorten
from hpgo.base.units import parse_seconds
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, HpgoError
from hpgo.hardware.cluster import Cluster
from hpgo.hardware.presets import PRESETS
from hpgo.llm.estimate import COUNTS, FLAGS, LlmEstimate, estimate_llm, estimate_on
from hpgo.llm.plan import LlmPlan
from hpgo.llm.refused_settings import check_setting
from hpgo.llm.run_logs import read_log
from hpgo.llm.stack import Stack, check_custom_stack, stack_of, stacks
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer
from hpgo.model.transformer_presets import is_transformer

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from os import PathLike

    from hpgo.llm.run_logs import RunLog

JOB_PLAN, JOB_LOG = "llm-plan.json", "smoke.log"
"""Names of the plan and of the smoke run's log in a job folder."""
_PRINTED = ("tp", "cp", "ep", "pp", "micro_batch_size")
"""Degrees that logs state, and that must be the plan's."""
_MAX_RATIO = 10.0
"""Largest ratio of measured to predicted step time, or of predicted to measured, that can be a platform. A larger one
means that the step was described wrongly. Not tuned."""
_VERSION_KEY, _VERSION = "hpgo_steps", 1
_FLAGS = ("sequence_parallel", "tp_comm_overlap", *FLAGS)
_COUNTS = (*COUNTS, "devices")
_FROM_NONE = ("zero_stage", "cpu_offload_num_layers", "lora_rank")
_AMOUNTS = ("optimizer_offload_fraction",)
_WORDS = (
    "pp_schedule", "recompute", "precision", "cuda_graph_impl", "exp_avg_dtype", "exp_avg_sq_dtype",
    "main_params_dtype", "pipeline_layout", "cross_entropy_fusion_impl", "moe_token_dispatcher",
    "base_weights_dtype", "optimizer",
)  # fmt: skip
_LISTS = ("recompute_modules", "cuda_graph_modules", "offload_modules", "lora_target_modules")
_WITHOUT_TP_OVERLAP = {"te-hopper": "te-hopper-no-tp-overlap"}
"""Stack of runs whose log states that TP communication is not overlapped, by the stack that it replaces."""
_KEYS = " ".join(
    ("model", "cluster", "seconds", "log", "stack", "global_batch_size", "seq_length", "adapter_gbit_s", *_FLAGS,
     *_COUNTS, *_FROM_NONE, *_AMOUNTS, *_WORDS, *_LISTS)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredStep(Record):
    """A measured step time and the estimate of the same step."""

    model: Transformer
    cluster: Cluster
    predicted: LlmEstimate
    """Estimate without the factors of a platform."""
    measured_s: float
    """Measured step time in seconds."""
    source: str = ""
    """The log that `measured_s` was read from, with the number of its steps and their spread; empty if none."""
    custom_stack: Stack | None = None
    """The stack of `predicted` if it is a file of the user; None for a built-in stack."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_custom_stack(self.predicted.stack, self.custom_stack)
        number("a measured step", self.measured_s, above=0, hint="give its seconds")
        ratio = self.measured_s / self.predicted.step_s
        if not 1 / _MAX_RATIO < ratio < _MAX_RATIO:
            raise ArgumentError(
                f"a measured step is {self.measured_s:.4g} s, but that is {ratio:.3g} times the estimate of"
                f" {self.predicted.step_s:.4g} s for {self.predicted.parallelism.named()}",
                "check its unit, its batch and its degrees",
            )

    @property
    def stack(self) -> str:
        """Name of the software stack of `predicted`."""
        return self.predicted.stack

    @property
    def software_stack(self) -> Stack:
        """The software stack of `predicted`."""
        return self.custom_stack or Stack.named(self.stack)

    @classmethod
    def of(
        cls,
        transformer: Transformer | str | PathLike[str],
        cluster: Cluster,
        predicted: LlmEstimate,
        measured_s: float,
        *,
        stack: Stack | str | PathLike[str] | None = None,
    ) -> MeasuredStep:
        """Return the step of an estimate that took `measured_s`.

        `stack` is the stack of the estimate, which is needed if it is a file. Raises ArgumentError for another stack,
        and if the estimate and the measurement differ more than tenfold.

        >>> import hpgo
        >>> cluster = hpgo.Cluster.preset("h100:1")
        >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=32, seq_length=8192, tp=2)
        >>> MeasuredStep.of("llama-3-8b", cluster, one, measured_s=4.41).measured_s
        4.41
        """
        check_is("the estimate", predicted, LlmEstimate, "make one with `hpgo.estimate_llm`")
        check_is("the cluster", cluster, Cluster, "give the cluster of the estimate")
        found = None if stack is None else stack_of(stack, cluster)
        return cls(
            transformer_of(transformer), cluster.first(predicted.gpus), predicted, measured_s,
            custom_stack=None if found is None or found.is_known else found,
        )  # fmt: skip

    @classmethod
    def from_log(
        cls,
        path: str | PathLike[str],
        transformer: Transformer | str | PathLike[str],
        cluster: Cluster,
        *,
        stack: Stack | str | PathLike[str] | None = None,
        **given: Any,
    ) -> MeasuredStep:
        """Return the step of a run, from its log.

        The time is the median after the first steps. The configuration is what Megatron-LM or torchtitan print there,
        completed by `given`, arguments of `hpgo.estimate_llm`. Without `stack`, the framework implies it.

        Raises ArgumentError for files without times or with two runs, for a model, `given` or a stack that contradict
        the log, and if the batch, the sequence length or the micro-batch size is neither given nor printed.
        """
        check_is("the cluster", cluster, Cluster, "read or make one, such as `hpgo.Cluster.preset('h100:1')`")
        model, log = transformer_of(transformer), read_log(path)
        stated = {name: value for name, value in given.items() if value is not None}
        _check_against(log, model, stated)
        given = log.assumed | log.printed | stated
        for name in ("global_batch_size", "seq_length", "micro_batch_size"):
            if name not in given:
                raise ArgumentError(f"{printable(log.name)} does not state {name}", f"give {name}", code="missing")
        known = _stack_of_run(log, stack, cluster, tp=given.get("tp", 1))
        predicted = estimate_llm(model, cluster, stack=known, **given)
        seconds, how = log.seconds(
            global_batch_size=predicted.global_batch_size, seq_length=predicted.seq_length, gpus=predicted.gpus
        )
        how += f"; {predicted.parallelism.named()}, batch {predicted.global_batch_size} × {predicted.seq_length}"
        return replace(cls.of(model, cluster, predicted, seconds, stack=known), source=how)

    @classmethod
    def from_job(cls, folder: str | PathLike[str]) -> MeasuredStep:
        """Return the step of the smoke run of a job folder, from its plan and its log.

        Raises ArgumentError for a folder without these files, and for a log of another configuration than the plan's.
        """
        path = as_path(folder, ArgumentError)
        # First, since it refuses paths that can't exist.
        plan = LlmPlan.read(path / JOB_PLAN)
        if not (path / JOB_LOG).is_file():
            raise ArgumentError(
                f"the folder `{printable(str(path))}` has no {JOB_LOG}",
                "run its smoke run first: `bash smoke.sh`",
                code="not_found",
            )
        log, planned = read_log(path / JOB_LOG), plan.estimate
        batch = {"global_batch_size": planned.global_batch_size, "seq_length": planned.seq_length}
        expected = {name: getattr(planned.parallelism, name) for name in _PRINTED} | batch
        for name, value in expected.items():
            if log.printed.get(name, value) != value:
                raise ArgumentError(
                    f"{printable(log.name)} ran with {name} {log.printed[name]}, but the plan has {value}",
                    "run the smoke run of this plan again: `bash smoke.sh`",
                    code="mismatch",
                )
        implied = stack_of(None, plan.cluster, log.framework).name
        chosen = None if planned.stack == implied else planned.stack
        stack = _stack_of_run(log, chosen, plan.cluster, tp=planned.parallelism.tp)
        # The estimate of the plan may contain the factors of a platform already, so it is made again without one.
        predicted = estimate_on(plan.transformer, plan.cluster, planned.parallelism, stack, None, **batch)
        seconds, how = log.seconds(**batch, gpus=predicted.gpus)
        return replace(cls.of(plan.transformer, plan.cluster, predicted, seconds, stack=stack), source=how)


def _check_against(log: RunLog, model: Transformer, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a log states another size of the model, or another value of an argument than `given`."""
    for name, size in log.sizes.items():
        # Megatron-LM states a width of dense layers for models with experts, too, where it has no effect.
        if size != (known := getattr(model, name)) and not (name == "ffn" and model.experts):
            raise ArgumentError(
                f"{printable(log.name)} states {size} for {name} of the model, but `{shorten(model.name)}` has {known}",
                "give the model of the run",
                code="mismatch",
            )
    for name in (name for name in given if name in log.printed):
        here, there = log.printed[name], given[name]
        if name == "recompute_modules":
            here, there = sorted(here), sorted(check_list(name, there))
        if here != there:
            raise ArgumentError(
                f"{printable(log.name)} states {name} {_written(here)}, but {name} is given as {_written(there)}",
                f"leave {name} out, or give the log of that run",
                code="mismatch",
            )


def _written(value: object) -> str:
    return join_words([str(one) for one in value], "and") if isinstance(value, list) else safe_repr(value)


def _stack_of_run(log: RunLog, stack: Stack | str | PathLike[str] | None, cluster: Cluster, *, tp: int) -> Stack:
    """Return the stack of a run: the one that is given, or what its framework implies with its TP communication."""
    found = stack_of(stack, cluster, log.framework)
    other = _WITHOUT_TP_OVERLAP.get(found.name)
    # Megatron-LM overlaps TP communication only with an option, which the stack assumes.
    if log.tp_comm_overlap is not False or tp == 1 or other is None:
        return found
    if stack is None:
        return Stack.named(other)
    raise ArgumentError(
        f"{printable(log.name)} states tp_comm_overlap False, but GEMMs hide TP communication with stack"
        f" `{found.name}`",
        f"use stack `{other}`, or leave it out",
        code="mismatch",
    )


def read_steps(path: str | PathLike[str]) -> tuple[MeasuredStep, ...]:
    """Return the steps in a file: YAML or JSON with a list `steps`, or CSV with a row for each step.

    Keys, or columns, are `model`, `cluster`, `seconds` or the file of a `log`, `stack`, and the arguments of
    `hpgo.estimate_llm`; docs/llm.md has an example. Paths are relative to the file's folder. Raises ArgumentError that
    names file, row and key.
    """
    path = as_path(path, ArgumentError)
    file = printable(str(path))
    with hinted("each step has `model`, `cluster`, `seconds` and the arguments of `hpgo.estimate_llm`"):
        text = read_text(path, ArgumentError)
        rows = _of_csv(text, file) if file.lower().endswith(".csv") else _of_document(text, file)
        if not rows:
            raise ArgumentError(f"{file} has no steps", "give one at least")
        return tuple(_step(row, Path(path).parent) for row in rows)


def _of_document(text: str, file: str) -> list[Section]:
    held = parse(text, file, ArgumentError)
    hint = f"begin a file of steps with `{_VERSION_KEY}: {_VERSION}`"
    top = Section(held, file, ArgumentError, keys=f"{_VERSION_KEY} steps", source=hint)
    version = top.get(_VERSION_KEY)
    top.source = ""
    if version != _VERSION:
        top.fail(f"`{_VERSION_KEY}` must be {_VERSION}")
    rows = [
        Section(row, f"{file}, step {place}", ArgumentError, keys=_KEYS)
        for place, row in enumerate(top.items("steps"), start=1)
    ]
    top.done()
    return rows


def _of_csv(text: str, file: str) -> list[Section]:
    """Return a section for each row of a CSV file. Empty cells count as missing; values are read as in YAML."""
    from hpgo.base.documents import parse_yaml

    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as failure:
        raise ArgumentError(f"{file}: not valid CSV: {failure}", "quotes must match", code="damaged_file") from None
    names = [name.strip() for name in rows[0]]
    if len(set(names)) < len(names):
        raise ArgumentError(f"{file}: a column appears twice", "keep one of them", code="duplicate")
    found = []
    for line, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"{file}, line {line}"
        if len(row) != len(names):
            raise ArgumentError(
                f"{where} has {len(row)} cells, but the first line has {len(names)}", "give each cell a column"
            )
        # Names of models and clusters may look like numbers or dates in YAML, so they stay text.
        cells = {name: cell.strip() for name, cell in zip(names, row, strict=True) if cell.strip()}
        held = {
            name: cell if name in {"model", "cluster"} else parse_yaml(cell, where, ArgumentError)
            for name, cell in cells.items()
        }
        found.append(Section(held, where, ArgumentError, keys=_KEYS))
    return found


def _step(row: Section, folder: Path) -> MeasuredStep:
    for name in row:
        row.build(check_setting, str(name))
    given: dict[str, Any] = {
        name: row.whole(name, minimum=1) for name in ("global_batch_size", "seq_length", *_COUNTS) if name in row
    }
    given |= {name: row.whole(name) for name in _FROM_NONE if name in row}
    given |= {name: row.amount(name) for name in _AMOUNTS if name in row}
    given |= {name: row.flag(name) for name in _FLAGS if name in row}
    given |= {name: row.text(name) for name in _WORDS if name in row}
    given |= {name: row.items(name) for name in _LISTS if name in row}
    model: str | Path = row.text("model")
    model = model if is_transformer(str(model)) else _source(str(model), folder, ())
    name = row.text("cluster")
    rate = row.number("adapter_gbit_s") if "adapter_gbit_s" in row else None
    stack = _source(row.text("stack"), folder, stacks()) if "stack" in row else None
    log = row.text("log") if "log" in row else None
    if log is None:
        # Only a log can state them, so they are required here, with the usual error.
        for needed in ("global_batch_size", "seq_length"):
            row.get(needed)
    elif "seconds" in row:
        row.fail("`seconds` and `log` are both given", "keep one of them")
    seconds: Any = None if log is not None else row.get("seconds")
    row.done()
    try:
        known = _source(name, folder, PRESETS)
        cluster = Cluster.read(known) if rate is None else Cluster.preset(name, adapter_gbit_s=rate)
        if log is not None:
            return MeasuredStep.from_log(folder / log, model, cluster, stack=stack, **given)
        predicted = estimate_llm(model, cluster, stack=stack, **given)
        return MeasuredStep.of(model, cluster, predicted, parse_seconds(seconds), stack=stack)
    except HpgoError as error:
        row.reraise(error)


def _source(text: str, folder: Path, names: Container[str]) -> str | Path:
    """Return a built-in name, such as `h100:2`, as it is, and a file relative to the folder of its table."""
    path = folder / text
    # A text that is no path is more likely a mistyped name, for which errors list the nearest names.
    is_path = path.suffix in {".yaml", ".yml", ".json"} or "/" in text or path.is_file()
    return path if is_path and text.partition(":")[0] not in names else text
