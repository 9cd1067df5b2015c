"""What a plan can be exported for: one row a target and version.

A row is all that a new target needs besides the module that writes it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpgo.base.checks import check_is, check_text
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.programs.frameworks import row_of

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Place(Record):
    """Where the main file will lie, which says what the others are called."""

    folder: str = ""
    main: str = ""
    """Name of the main file; empty for its own."""

    def name(self, own: str) -> str:
        """Of a file that lies beside the main one.

        >>> Place().name("order.csv"), Place("jobs", "bert.toml").name("order.csv")
        ('order.csv', 'bert.order.csv')
        """
        check_text("a file's name", own)
        stem, dot, _ = self.main.rpartition(".")
        return f"{stem if dot and stem else self.main}.{own}" if self.main else own

    def path(self, own: str) -> str:
        """The same with its folder.

        >>> Place("jobs", "bert.toml").path("order.csv")
        'jobs/bert.order.csv'
        """
        return f"{self.folder}/{self.name(own)}" if self.folder else self.name(own)


@dataclass(frozen=True, slots=True)
class Target(Record):
    """One version of something that runs plans."""

    name: str
    version: str
    """The release that its files are for; its patches count too. Empty where one form serves all."""
    title: str
    """What people call it."""
    tested: str
    """What the files were tried with."""
    form: str
    """What is written, in a few words."""
    writer: str
    """`module:function`: of what was given, this row and the `Place`, texts by file name, the main file first."""
    framework: str = ""
    """Its row in `hpgo.programs.frameworks`; empty for those that run no training plans."""
    ways: str = ""
    """`module:function` of ways of training a transformer, likewise; empty for those that run none."""

    @property
    def label(self) -> str:
        """Title and version.

        >>> find("torchtitan@0.2.2").label
        'torchtitan 0.2'
        """
        return f"{self.title} {self.version}" if self.version else self.title

    def write(self, plan: object, place: Place) -> dict[str, str]:
        """Texts by file name, the main file first; raises ArgumentError for a plan that the target can't run."""
        check_is("the place", place, Place, "make a `hpgo.export.Place`")
        from hpgo.llm.plan import LlmPlan  # a list of targets does without

        writer = self.ways if isinstance(plan, LlmPlan) else self.writer
        if not writer:
            known = ", ".join(dict.fromkeys(target.name for target in TARGETS if target.ways))
            raise ArgumentError(
                f"LLM plans are not supported for {self.title}", f"use {known}", code="unsupported"
            )
        module, function = writer.split(":")
        write: Callable[[object, Target, Place], dict[str, str]] = getattr(importlib.import_module(module), function)
        return write(plan, self, place)


_CORE = "megatron-core 0.16.1"
_LAYOUT = "megatron-core 0.16.1: the layout; other settings are as in the source of this release"
_FAMILY = "hpgo.export.for_megatron_family"
_SERVING = "hpgo.export.for_serving"

TARGETS: tuple[Target, ...] = (
    Target("torch", "2.15", "torch.distributed.pipelining", "torch 2.15.0", "a Python module and the orders",
           "hpgo.export.for_torch:module", "torch@2.15"),
    Target("torchtitan", "0.2", "torchtitan", "torchtitan 0.2.2", "sections of a job's TOML and the orders",
           "hpgo.export.for_torchtitan:toml", "torchtitan@0.2", "hpgo.export.llm_for_torchtitan:toml"),
    Target("torchtitan", "0.3", "torchtitan", "torchtitan 0.3.0", "a Python module for its settings, and the orders",
           "hpgo.export.for_torchtitan:python", "torchtitan@0.3", "hpgo.export.llm_for_torchtitan:python"),
    Target("megatron", "0.16", "Megatron-LM", _CORE, "arguments of its command line",
           "hpgo.export.for_megatron:arguments", "megatron@0.16", "hpgo.export.llm_for_megatron:arguments"),
    Target("megatron-bridge", "0.6", "Megatron-Bridge", _LAYOUT, "YAML for its ConfigContainer",
           f"{_FAMILY}:bridge", "megatron@0.16"),
    Target("nemo", "2.5", "NeMo", _LAYOUT, "a Python module for its recipes", f"{_FAMILY}:nemo", "megatron@0.16"),
    Target("verl", "0.9", "verl", _LAYOUT, "overrides of its SFT trainer", f"{_FAMILY}:verl", "megatron@0.16"),
    Target("ms-swift", "4.5", "ms-swift", _LAYOUT, "YAML of its Megatron arguments",
           f"{_FAMILY}:swift", "megatron@0.16"),
    Target("deepspeed", "0.19", "DeepSpeed", "deepspeed 0.19.8", "a Python module with a PipelineModule",
           "hpgo.export.for_deepspeed:module", "deepspeed@0.19", "hpgo.export.llm_for_deepspeed:module"),
    Target("vllm", "0.33", "vLLM", "vllm 0.33.0", "a bash script that serves", f"{_SERVING}:vllm"),
    Target("sglang", "0.5", "SGLang", "sglang 0.5.23", "a bash script that serves", f"{_SERVING}:sglang"),
    Target("llama.cpp", "", "llama.cpp", "", "a bash script that serves", f"{_SERVING}:llama_cpp"),
    Target("tensorrt-llm", "", "TensorRT-LLM", "", "a bash script that serves, and YAML for its LLM API",
           f"{_SERVING}:tensorrt_llm"),
    Target("accelerate", "1.15", "accelerate", "accelerate 1.15.0", "a Python module", f"{_SERVING}:accelerate"),
)  # fmt: skip
"""All targets, older versions first."""

TargetName = Literal[
    "torch", "torch@2.15", "torchtitan", "torchtitan@0.2", "torchtitan@0.3", "megatron", "megatron@0.16",
    "megatron-bridge", "megatron-bridge@0.6", "nemo", "nemo@2.5", "verl", "verl@0.9", "ms-swift", "ms-swift@4.5",
    "deepspeed", "deepspeed@0.19", "vllm", "vllm@0.33", "sglang", "sglang@0.5", "llama.cpp", "tensorrt-llm",
    "accelerate", "accelerate@1.15",
]  # fmt: skip
"""For type checkers and editors; patches of these versions, as in `torchtitan@0.2.2`, are taken, too."""
NAMES = tuple(dict.fromkeys(target.name for target in TARGETS))
"""Of all targets, whatever their versions."""


def find(name: TargetName) -> Target:
    """The row for `NAME` or `NAME@VERSION`; the latest version if none is named.

    Raises ArgumentError for a target that is unknown, or a version that nobody has run.

    >>> find("torchtitan").version
    '0.3'
    """
    return row_of(TARGETS, name, "exporter")
