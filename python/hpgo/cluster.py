"""Clusters: machines of devices and the links between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A device type."""

    name: str
    memory_bytes: float
    speed: float = 1.0
    """Compute speed relative to the device that the profile was measured on: times divide by it."""


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link; rates are bytes per second in one direction."""

    bytes_per_s: float
    """Point-to-point rate of one port."""
    collective_bytes_per_s: float
    """Rate that a ring all-reduce reaches on one port."""
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine: `count` devices of one type."""

    device: Device
    count: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and their links. Devices are numbered machine by machine from 0."""

    name: str
    machines: tuple[Machine, ...]
    intra: Link
    """Between the devices of one machine: each device has one port."""
    inter: Link
    """Between machines: each machine has one port."""
    source: str = ""
    """Where the numbers come from."""
