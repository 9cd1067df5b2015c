"""Parts of a job folder that differ between frameworks.

`hpgo.jobs.folder` makes a folder of these parts, and `hpgo.jobs.scripts` the scripts that start it. Each framework has
one module with a function `parts(plan, target)`, which `FRAMEWORKS` lists.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from hpgo.base.messages import join_words
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.export.targets import Target
    from hpgo.llm.plan import LlmPlan
    from hpgo.planning.plans import Plan

PlaceholderKind = Literal["text", "file", "folder", "prefix", "path"]
"""What `check.sh` accepts: any text; an existing file, folder, prefix of files, or file or folder."""

PlanKind = Literal["transformers", "layers"]
"""What a plan is about: LLM plans are about transformers, others about the layers of a profile."""

SMOKE_STEPS = 5
"""Steps of the smoke run. The first ones compile kernels and let caches grow, and the last three are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder(Record):
    """A value that only the user knows. `env.sh` sets it as a shell variable of this name."""

    name: str
    """Name of the shell variable, for instance DATA_PATH."""
    meaning: str
    """Description in words that fit into one line of a comment."""
    kind: PlaceholderKind = "text"
    example: str = ""
    """A value that shows the form, for the comment in `env.sh`."""
    default: str = ""
    """Value unless the user sets one; may use variables, as bash expands it."""
    needed: Literal["always", "full", "train", "never"] = "train"
    """Runs for which `check.sh` refuses an empty value: all, all but the reduced one, training only, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(Record):
    """An environment variable that `env.sh` exports to each rank."""

    name: str
    value: str
    """Value, as bash expands it in double quotes."""
    why: str
    """Reason, in words that fit into one line of a comment."""
    active: bool = True
    """Whether it is exported. Otherwise the line is a comment that the user can activate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile(Record):
    """A text file of the folder."""

    name: str
    text: str
    holds: str
    """Description of the content, for the table in README.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts(Record):
    """The parts of a job folder that one framework determines.

    Each rank runs `command` in the folder, with torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, …) and
    the variables of `env.sh`. The words of `arguments` follow, then the words of `data` for training or of `smoke` for
    the smoke run. Words are written in bash: quoted where necessary, with `"$NAME"` for placeholders.
    """

    title: str
    """Framework with its version, for instance `Megatron-LM 0.16`."""
    command: tuple[str, ...]
    """Words of bash that start one rank, without arguments that differ between training and the smoke run."""
    arguments: tuple[str, ...] = ()
    """Names of the files in `files` whose words follow the command in both runs."""
    data: str = ""
    """Content of `data.txt`: words for training, such as data and checkpoints. Comments are allowed."""
    rate_in: str = "data.txt"
    """Name of the file in which the user sets the learning rate."""
    smoke: str = ""
    """Content of `smoke.txt`: words for five steps with synthetic data instead."""
    files: tuple[JobFile, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    environment: tuple[Variable, ...] = ()
    check: tuple[str, ...] = ()
    """Lines of bash that let the framework's own parser read the words in the array `arguments`, without GPUs.

    `check.sh` runs them after it checked the placeholders and read `env.sh`. Variables of the shell: `JOB_RUN` (train,
    smoke or small) and `RANKS` (number of ranks). A command that fails refuses the job, unless its exit code is 3: then
    this machine lacks something, and the command has printed what.
    """
    needs: str = ""
    """Python module without which `check` can't run. On machines without it, `check.sh` leaves the check out."""
    step_line: str = ""
    """Extended regular expression (`grep -E`) of a line with the time of a step in the framework's log."""
    step_rank: int | None = None
    """Rank whose output has these lines, and the loss; None is the last rank."""
    requirements: tuple[str, ...] = ()
    """Lines of `requirements.txt`: packages with the versions that were tested."""
    conversion: str = ""
    """Command that converts a Hugging Face checkpoint to one that the plan can load, or empty."""
    not_reduced: str = ""
    """Sentence with the reason why the framework can't run a reduced model of the plan; empty if it can."""
    notes: tuple[str, ...] = ()
    """Sentences for README.md: what the user has to know before the start."""


FRAMEWORKS: Mapping[str, str] = MappingProxyType(
    {
        "megatron": "hpgo.jobs.megatron:parts",
        "megatron-bridge": "hpgo.jobs.bridge:parts",
        "torchtitan@0.2": "hpgo.jobs.torchtitan_02:parts",
        "torchtitan": "hpgo.jobs.torchtitan:parts",
        "deepspeed": "hpgo.jobs.deepspeed:parts",
        "torch": "hpgo.jobs.pytorch:parts",
    }
)
"""`module:function` that makes the parts, by the name of the framework, or by name and version if versions differ."""
_NAMES = tuple(dict.fromkeys(name.partition("@")[0] for name in FRAMEWORKS))
_LLM_ONLY, _LAYERS_ONLY = ("megatron", "megatron-bridge"), ("torch",)
"""Frameworks whose job folders are for plans of transformers only, and for other plans only."""


def has_parts(plan: object, target: Target) -> bool:
    """Return whether there are job folders for this kind of plan and this framework."""
    kind = _kind_of(plan)
    if kind is None:
        return False
    try:
        check_supported(target, kind)
    except ArgumentError:
        return False
    return True


def _kind_of(plan: object) -> PlanKind | None:
    # Imported late: `hpgo.llm` is large.
    from hpgo.llm.plan import LlmPlan
    from hpgo.planning.plans import Plan

    if isinstance(plan, LlmPlan):
        return "transformers"
    return "layers" if isinstance(plan, Plan) else None


def check_supported(target: Target, kind: PlanKind) -> None:
    """Raise ArgumentError for a framework without job folders for plans of this kind.

    >>> from hpgo.export.targets import find
    >>> check_supported(find("torch"), "layers")
    >>> check_supported(find("torch"), "transformers")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: job folders for plans of transformers are not supported for torch.distributed.pipelining
    """
    if target.name not in _NAMES:
        raise ArgumentError(
            f"job folders are not supported for {target.title}",
            f"use {join_words(_NAMES, 'or')}, or name a file for `-o`",
            code="unsupported",
        )
    if target.name in (_LAYERS_ONLY if kind == "transformers" else _LLM_ONLY):
        raise ArgumentError(
            f"job folders for plans of {kind} are not supported for {target.title}",
            f"write the files without scripts: `hpgo export PLAN.json --to {target.name} -o FILE`",
            code="unsupported",
        )


def parts_of(plan: LlmPlan | Plan, target: Target) -> JobParts:
    """Return the parts of a job folder for `plan`.

    Raises ArgumentError for a framework without job folders of such plans, and the errors of an export.
    """
    kind = _kind_of(plan)
    assert kind is not None  # noqa: S101 -- the types of `plan` are the two kinds
    check_supported(target, kind)
    # Imported late, because each module needs its own exporter only.
    found = FRAMEWORKS.get(f"{target.name}@{target.version}") or FRAMEWORKS[target.name]
    module, function = found.split(":")
    make: Callable[[LlmPlan | Plan, Target], JobParts] = getattr(importlib.import_module(module), function)
    return make(plan, target)
