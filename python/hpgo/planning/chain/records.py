"""Problem of the chain search: hosts, links and layers as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.model.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Hop:
    """A link between two hosts, with rate and latency."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class HostType:
    """Hosts with equal layer times, memory and links: a host type of the native module."""

    name: str
    hosts: int
    memory_bytes: float
    time_s: list[float]
    may_run: list[bool]


@dataclass(frozen=True, slots=True)
class Chain:
    """The problem in the form that the native module reads."""

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
    """Hosts of one type with equal links, pins and exclusions."""

    device_type: str
    hosts: tuple[str, ...]
    memory_bytes: float
    time_s: list[float]
    port_bytes_per_s: float
    node: str | None = None
    """Node of the hosts, if links within the node differ from those between nodes; None otherwise."""


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """The problem before links, pins and exclusions split the groups of hosts."""

    model: str
    layer_bytes: list[float]
    cut_bytes: list[float]
    numbers: list[int]
    """Number of the model's layers before each position."""
    parts: list[list[int]]
    """Layers of the model, numbered from 1, that each entry of `layer_bytes` combines."""
    groups: list[HostGroup]
    names: frozenset[str]
    """Names of types and hosts that links, pins and exclusions may use, including unused hosts."""
    link: Callable[[HostGroup, HostGroup], Hop]
    bits: int
    """Bits of each value on the links, unless fewer are allowed."""
    loading_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    framework: str = ""
    blocks: list[int] = field(default_factory=list)
    """Number of blocks before each position, if a framework needs whole blocks; otherwise empty."""
    kv_cache: KvCache | None = None
    kv_cache_bytes: list[float] = field(default_factory=list)
    """Bytes of the KV cache of all layers before each position; empty without a cache. `layer_bytes` include it."""
    gpus_per_device: int = 1
    ids: list[str] = field(default_factory=list)
    """Ids of the model's layers by number, if the model branches; otherwise empty."""
    before: list[list[int]] = field(default_factory=list)
    """Layers before each position, numbered from 0, if the model branches; otherwise empty."""
    row: list[int] = field(default_factory=list)
    """Positions along one order of the layers, which are searched first; empty if all positions are in one order."""
    cuts: str = "all"
    """Cuts that the positions cover: `all`, or the reason for which only some."""
    joined: str = ""
    """Reason for which rules about single layers leave out cuts; empty if they do not."""
