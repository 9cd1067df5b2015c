"""A layer profile: what each layer of a model costs at one or more batch sizes, and which feeds which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. The tuples have one entry for each of `Profile.batch_sizes`, for that whole batch."""

    id: str
    """Unique in its profile; edges name it."""
    name: str
    """What people call it; need not be unique."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    """Output that crosses a cut behind this layer."""
    parameter_bytes: float
    saved_bytes: tuple[float, ...] | None = None
    """Kept from forward to backward; None means the output."""
    stage: int | None = None
    """Stage that the file assigns (PipeDream's `stage_id`); planning ignores it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A directed acyclic graph of layers, in the order of the file."""

    name: str
    batch_sizes: tuple[int, ...]
    """Samples in a batch, ascending, for each measurement."""
    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]
    """`(from, to)` layer ids."""
    source: str = ""
    """Where the numbers come from."""
