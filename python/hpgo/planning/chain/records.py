"""What the search is asked: hosts, links and layers as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Hop:
    """A link between two hosts."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class HostType:
    """Hosts that are alike: what the native module calls a host type."""

    name: str
    hosts: int
    memory_bytes: float
    time_s: list[float]
    may_run: list[bool]


@dataclass(frozen=True, slots=True)
class Chain:
    """The question as the native module reads it."""

    layer_bytes: list[float]
    names: list[str]
    inside: list[list[int]]
    row: list[int]
    is_restricted: bool
    cut_bytes: list[float]
    buffers_in: int
    buffers_out: int
    types: list[HostType]
    links: list[list[Hop]]
    input: list[Hop]
    output: list[Hop]
    max_replicas: int
    bits: list[int]


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts of one type that nothing tells apart."""

    device_type: str
    hosts: tuple[str, ...]
    memory_bytes: float
    time_s: list[float]
    port_bytes_per_s: float
    machine: str | None = None
    """Inside a machine of several devices, links differ from those between machines."""


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """The question before groups are told apart by links, pins and exclusions."""

    model: str
    layer_bytes: list[float]
    cut_bytes: list[float]
    numbers: list[int]
    """Layers of the model before each position."""
    parts: list[list[int]]
    """The numbers, from 1, of the model's layers that each entry of `layer_bytes` stands for."""
    groups: list[HostGroup]
    names: frozenset[str]
    """Types and hosts that links, pins and exclusions may name, used or not."""
    link: Callable[[HostGroup, HostGroup], Hop]
    bits: int
    """Of each value, unless narrower ones are allowed."""
    loading_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    framework: str = ""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the model before each position, if a framework counts them."""
    gpus_per_device: int = 1
    ids: list[str] = field(default_factory=list)
    """Ids of the model's layers by number, if it branches."""
    before: list[list[int]] = field(default_factory=list)
    """Numbers of the layers before each position, from 0, if the model branches."""
    row: list[int] = field(default_factory=list)
    """Positions in a row, where plans are looked for first; empty if all are."""
    cuts: str = "all"
    """Which cuts the positions are: all, or why they are not."""
    joined: str = ""
    """Why a rule about single layers leaves out cuts; empty if it does not."""
