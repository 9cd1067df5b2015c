"""Software stacks: what the kernels and the communication of a framework's release do better than the cost model's own.

A stack is a file of `hpgo/llm/stacks/`, or a file of the user. It changes only the constants that it names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpgo.base.checks import check_is, number
from hpgo.base.documents import Section, hinted, parse, read_text, record
from hpgo.base.files import as_path
from hpgo.base.messages import join_words, printable, safe_repr, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import key_of
from hpgo.llm.step_range import StepKind
from hpgo.llm.validated_features import family

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.constants import Constants

StackFramework = Literal["megatron", "megatron-core", "megatron-bridge", "nemo", "torchtitan", "deepspeed"]
"""Frameworks that imply a stack."""
_KEY, _VERSION = "hpgo_stack", 1
_MAX_FACTOR = 100.0
"""Largest factor, and the inverse of the smallest, that a stack may have. Kernels differ by less. Not tuned."""
_FOLDER = Path(__file__).with_name("stacks")
FACTORS = {
    "attention": "attention_time_factor",
    "tp_exposed": "tp_exposed_fraction",
    "gather_bucket_parameters": "gather_bucket_parameters",
    "fused_experts": "expert_time_factor",
    "all_to_all": "all_to_all_time_factor",
}
"""Constant that each field of a stack replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBias(Record):
    """A deviation of estimates with a stack on a device, whose cause has no term yet."""

    device: str
    """Chip."""
    kind: StepKind
    """Kind of the steps."""
    log_ratio: float
    """Mean logarithm of estimated over measured time: positive where estimates are too long."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Record):
    """Kernels and communication of a framework's release, relative to the cost model.

    >>> stack = Stack.named("te-hopper")
    >>> stack.attention, stack.tp_exposed, stack.fused_experts
    (0.52, 0.39, 1.0)
    """

    name: str
    title: str
    """Description in reports."""
    frameworks: tuple[str, ...] = ()
    """Frameworks that imply this stack, each perhaps with the only version that does: `torchtitan@0.2`."""
    devices: tuple[str, ...] = ()
    """Chips on which they do; empty means all."""
    attention: float = 1.0
    """Time of fused attention, as a factor."""
    tp_exposed: float = 1.0
    """Share of the communication of sequence parallelism that GEMMs do not hide."""
    gather_bucket_parameters: float = inf
    """Parameters of one all-gather of ZeRO stage 3; infinite where each layer is one message."""
    fused_experts: float = 1.0
    """Time of layers with experts, as a factor."""
    all_to_all: float = 1.0
    """Time of the exposed all-to-all of experts, as a factor."""
    seen: tuple[tuple[str, int], ...] = ()
    """Number of published steps with this stack, by chip. On other devices its factors are an extrapolation."""
    known_biases: tuple[KnownBias, ...] = ()
    """Deviations that ranges cover."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in FACTORS:
            value, what = getattr(self, name), f"{name} of stack `{self.name}`"
            if name == "gather_bucket_parameters":
                if value != inf:
                    number(what, value, above=0)
            elif not 1 / _MAX_FACTOR <= value <= _MAX_FACTOR:
                raise ArgumentError(
                    f"{what} is {value:g}, but must be between {1 / _MAX_FACTOR:g} and {_MAX_FACTOR:g}",
                    "give the time as a factor on the default stack's, such as 0.6",
                )

    @classmethod
    def named(cls, name: str) -> Stack:
        """Return the stack with this name. Raise ArgumentError for unknown names."""
        known = stacks()
        if not isinstance(name, str) or name not in known:
            raise ArgumentError(
                f"stack {safe_repr(name)} is not known",
                f"use {join_words(list(known), 'or')}",
                code="unknown_name",
            )
        return known[name]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Stack:
        """Return the stack in a YAML file. Raise ArgumentError naming file and key."""
        found = as_path(path, ArgumentError)
        file = printable(str(found))
        with hinted(f"give `{_KEY}: {_VERSION}`, a `name`, a `title` and any of {', '.join(FACTORS)}"):
            return cls.from_section(
                Section(parse(read_text(found, ArgumentError), file, ArgumentError), file, ArgumentError)
            )

    @classmethod
    def from_section(cls, top: Section) -> Stack:
        """Return the stack in a mapping that `document` returned, or in a file. Raise the section's errors."""
        top.expect([_KEY, "name", "title", "implied_by", "seen", "known_biases", *FACTORS])
        if top.get(_KEY, None) != _VERSION:
            top.fail(f"`{_KEY}` must be {_VERSION} in the file of a stack", code="wrong_kind_of_file")
        given: dict[str, Any] = {"name": top.text("name"), "title": top.text("title")}
        given |= {name: top.number(name) for name in FACTORS if name in top}
        if "implied_by" in top:
            rule = top.within("implied_by")
            given |= {key: tuple(rule.items(key)) for key in ("frameworks", "devices") if key in rule}
            rule.done()
        if "seen" in top:
            seen = top.within("seen")
            given["seen"] = tuple((chip, seen.whole(chip)) for chip in seen)
            seen.done()
        if "known_biases" in top:
            rows = top.rows("known_biases")
            given["known_biases"] = tuple(record(KnownBias, rows.within(row)) for row in rows)
        top.done()
        return top.build(cls, **given)

    def document(self) -> dict[str, Any]:
        """Return the stack as the mapping of a file, with the fields that differ from the default stack's.

        >>> Stack(name="flash-3", title="FlashAttention-3", attention=0.6).document()
        {'hpgo_stack': 1, 'name': 'flash-3', 'title': 'FlashAttention-3', 'attention': 0.6}
        """
        plain = Stack(name=self.name, title=self.title)
        found: dict[str, Any] = {_KEY: _VERSION, "name": self.name, "title": self.title}
        found |= {name: value for name in FACTORS if (value := getattr(self, name)) != getattr(plain, name)}
        implied = {key: list(names) for key in ("frameworks", "devices") if (names := getattr(self, key))}
        found |= {"implied_by": implied} if implied else {}
        found |= {"seen": dict(self.seen)} if self.seen else {}
        return found | ({"known_biases": [asdict(one) for one in self.known_biases]} if self.known_biases else {})

    @property
    def is_known(self) -> bool:
        """Whether this is a built-in stack."""
        return stacks().get(self.name) == self

    def constants(self, base: Constants) -> Constants:
        """Return `base` with the constants that this stack names.

        >>> from hpgo.llm.constants import CONSTANTS
        >>> Stack.named("default").constants(CONSTANTS) == CONSTANTS
        True
        """
        return replace(base, **{constant: getattr(self, name) for name, constant in FACTORS.items()})

    def bias_on(self, cluster: Cluster, kind: StepKind) -> float:
        """Return the known deviation of estimates on a cluster; 0 if none is known."""
        chip = family(cluster.nodes[0].device.name)
        return sum(one.log_ratio for one in self.known_biases if (one.device, one.kind) == (chip, kind))

    def is_seen_on(self, cluster: Cluster) -> bool:
        """Return whether published steps with this stack ran on the cluster's chip."""
        device = cluster.nodes[0].device
        # Cards of the same chip with PCIe, or with rates that a cluster file states, were never compared.
        is_known = device.rates is None and not (key_of(device.name) or "").endswith(("-pcie", "-nvl"))
        return is_known and bool(dict(self.seen).get(family(device.name)))


@cache
def stacks() -> Mapping[str, Stack]:
    """Return all known stacks by name, the default first."""
    found = [Stack.read(path) for path in sorted(_FOLDER.glob("*.yaml"))]
    return {stack.name: stack for stack in sorted(found, key=lambda stack: stack.name != "default")}


def stack_of(stack: Stack | str | os.PathLike[str] | None, cluster: Cluster, framework: str | None = None) -> Stack:
    """Return a stack by its name or file; None means the one that `framework` implies on the cluster's device.

    Without a framework that is the default. Raises ArgumentError for unknown names and damaged files.

    >>> from hpgo.hardware.cluster import Cluster
    >>> [stack_of(None, Cluster.preset(name), "megatron").name for name in ("h100:1", "b200:1")]
    ['te-hopper', 'default']
    >>> [stack_of(None, Cluster.preset("h100:1"), f"torchtitan@{version}").name for version in ("0.2", "0.3")]
    ['torchtitan-cudnn', 'torchtitan']
    """
    if isinstance(stack, Stack):
        return stack
    if stack is None:
        return _implied(cluster, framework)
    check_is("stack", stack, str | Path, "give the name of a stack, or the path of a file")
    if isinstance(stack, str) and not stack.endswith((".yaml", ".yml")):
        return Stack.named(stack)
    found = Stack.read(stack)
    # Plan files name their stack, so a file must not redefine a known one.
    if found.name in stacks() and not found.is_known:
        raise ArgumentError(
            f"{printable(str(stack))}: `{found.name}` is the name of a known stack", "give your stack another name"
        )
    return found


def check_custom_stack(name: str, custom: Stack | None) -> None:
    """Check that `name` is a built-in stack, or that of `custom`. Raises ArgumentError."""
    if custom is None:
        Stack.named(name)
    elif custom.name != name:
        raise ArgumentError(
            f"the stack is `{shorten(custom.name)}`, but the estimate assumes `{shorten(name)}`",
            "give the stack of the estimate",
            code="mismatch",
        )


def _implied(cluster: Cluster, framework: str | None) -> Stack:
    if framework is None:
        return Stack.named("default")
    name, chip = framework.partition("@")[0], family(cluster.nodes[0].device.name)
    known = {one.partition("@")[0] for stack in stacks().values() for one in stack.frameworks}
    if name not in known:
        raise ArgumentError(
            f"framework `{shorten(name)}` implies no stack",
            f"use {join_words(sorted(known), 'or')}, or name a stack with `--stack`",
            code="unknown_name",
        )
    on_chip = [one for one in stacks().values() if not one.devices or chip in one.devices]
    # The stack of a version takes precedence over that of all versions.
    fitting = (one for wanted in (framework, name) for one in on_chip if wanted in one.frameworks)
    return next(fitting, Stack.named("default"))
