"""Targets of exports: one row per framework and version.

A new target needs one row here and the module that writes its files.
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
    """Path of the main file, from which the names of the other files follow."""

    folder: str = ""
    main: str = ""
    """Name of the main file; empty for the default name."""

    def name(self, own: str) -> str:
        """Return the name of a file beside the main one, given its default name.

        >>> Place().name("order.csv"), Place("jobs", "bert.toml").name("order.csv")
        ('order.csv', 'bert.order.csv')
        """
        check_text("a file's name", own)
        stem, dot, _ = self.main.rpartition(".")
        return f"{stem if dot and stem else self.main}.{own}" if self.main else own

    def path(self, own: str) -> str:
        """Return the path of a file beside the main one, given its default name.

        >>> Place("jobs", "bert.toml").path("order.csv")
        'jobs/bert.order.csv'
        """
        return f"{self.folder}/{self.name(own)}" if self.folder else self.name(own)


@dataclass(frozen=True, slots=True)
class Target(Record):
    """One version of a framework or an engine that runs plans."""

    name: str
    version: str
    """Release for which the files are written, patch releases included; empty if one form serves all releases."""
    title: str
    """Name of the target in messages."""
    tested: str
    """Release with which the files were tested; empty if they were not."""
    form: str
    """Short description of the files."""
    writer: str
    """`module:function` that returns texts by file name, the main file first, for a plan, this row and a `Place`."""
    framework: str = ""
    """Name of the row in `hpgo.programs.frameworks`; empty for engines that run no training plans."""
    ways: str = ""
    """`module:function` for plans of transformers (`LlmPlan`), like `writer`; empty if they are not supported."""

    @property
    def label(self) -> str:
        """Title of the target with its version.

        >>> find("torchtitan@0.2.2").label
        'torchtitan 0.2'
        """
        return f"{self.title} {self.version}" if self.version else self.title

    def write(self, plan: object, place: Place) -> dict[str, str]:
        """Return texts by file name, the main file first. Raise ArgumentError for a plan that the target can't run."""
        check_is("the place", place, Place, "make a `hpgo.export.Place`")
        # Imported late, like the writers: `hpgo export --help` lists the targets and needs neither.
        from hpgo.llm.plan import LlmPlan

        writer = self.ways if isinstance(plan, LlmPlan) else self.writer
        if not writer:
            known = ", ".join(dict.fromkeys(target.name for target in TARGETS if target.ways))
            raise ArgumentError(f"LLM plans are not supported for {self.title}", f"use {known}", code="unsupported")
        module, function = writer.split(":")
        write: Callable[[object, Target, Place], dict[str, str]] = getattr(importlib.import_module(module), function)
        return write(plan, self, place)


_CORE = "megatron-core 0.16.1"
_LAYOUT = "megatron-core 0.16.1: the layout; other settings are as in the source of this release"
_FAMILY = "hpgo.export.for_megatron_family"
_SERVING = "hpgo.export.for_serving"

TARGETS: tuple[Target, ...] = (
    Target("torch", "2.15", "torch.distributed.pipelining", "torch 2.15.0", "a Python module and the schedule",
           "hpgo.export.for_torch:module", "torch@2.15"),
    Target("torchtitan", "0.2", "torchtitan", "torchtitan 0.2.2", "sections of a job's TOML and the schedule",
           "hpgo.export.for_torchtitan:toml", "torchtitan@0.2", "hpgo.export.llm_for_torchtitan:toml"),
    Target("torchtitan", "0.3", "torchtitan", "torchtitan 0.3.0", "a Python module for its settings, and the schedule",
           "hpgo.export.for_torchtitan:python", "torchtitan@0.3", "hpgo.export.llm_for_torchtitan:python"),
    Target("megatron", "0.16", "Megatron-LM", _CORE, "arguments of its command line",
           "hpgo.export.for_megatron:arguments", "megatron@0.16", "hpgo.export.llm_for_megatron:arguments"),
    Target("megatron-bridge", "0.6", "Megatron-Bridge", _LAYOUT,
           "YAML for its ConfigContainer; a Python recipe for LLM plans",
           f"{_FAMILY}:bridge", "megatron-bridge@0.6", "hpgo.export.llm_for_bridge:recipe"),
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
"""Rows of all targets, older versions first: `find` takes the last version of a name."""

TargetName = Literal[
    "torch", "torch@2.15", "torchtitan", "torchtitan@0.2", "torchtitan@0.3", "megatron", "megatron@0.16",
    "megatron-bridge", "megatron-bridge@0.6", "nemo", "nemo@2.5", "verl", "verl@0.9", "ms-swift", "ms-swift@4.5",
    "deepspeed", "deepspeed@0.19", "vllm", "vllm@0.33", "sglang", "sglang@0.5", "llama.cpp", "tensorrt-llm",
    "accelerate", "accelerate@1.15",
]  # fmt: skip
"""Names for type checkers and editors. Patch releases of these versions, like `torchtitan@0.2.2`, are accepted, too."""
NAMES = tuple(dict.fromkeys(target.name for target in TARGETS))
"""Names of all targets, without versions."""


def find(name: TargetName) -> Target:
    """Return the row of `NAME` or `NAME@VERSION`, with the latest version by default.

    Raises ArgumentError for an unknown target or version.

    >>> find("torchtitan").version
    '0.3'
    """
    return row_of(TARGETS, name, "exporter")
