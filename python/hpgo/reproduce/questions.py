"""Published planning problems: models, batch sizes, clusters, and the plans that papers report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIGS = {"A": "dapple-a", "B": "dapple-b", "C": "dapple-c"}
"""Built-in cluster for each hardware configuration of DAPPLE."""

SEPS: dict[str, Sequence[int]] = {"A": [8, 16], "B": range(1, 17)}
"""Devices of each configuration for the compatible planner. C differs from B only in links, which it can't model."""


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """A model that DAPPLE plans, with its published plans."""

    model: str
    global_batch_size: int
    plans: tuple[str, str, str]
    """DAPPLE's plans for A, B and C, from memory: replicas and layers of each stage."""


STRATEGIES = (
    PublishedCase("resnet-50", 2048, ("DP", "DP", "DP")),
    PublishedCase("vgg-19", 2048, ("DP", "DP", "15:1 (13:6)")),
    PublishedCase("gnmt-16", 1024, ("8:8 (9:7)", "8:8 (9:7)", "straight")),
    PublishedCase("bert-48", 64, ("8:8 (23:25)", "straight", "straight")),
    PublishedCase("xlnet-36", 128, ("8:8 (18:18)", "8:8 (18:18)", "straight")),
    PublishedCase("amoebanet-36", 128, ("8:8 (24:12)", "11:5 (27:9)", "11:5 (27:9)")),
)


@dataclass(frozen=True, slots=True)
class PublishedPlans:
    """Strategies of DAPPLE and of PipeDream for one model on 2 × 8 devices, as DAPPLE compares them.

    A strategy has the replicas of its stages, and the states before which stages end, in the original numbering.
    """

    model: str
    global_batch_size: int
    dapple: tuple[tuple[int, ...], tuple[int, ...]]
    pipedream: tuple[tuple[int, ...], tuple[int, ...]]


RIVALS = (
    PublishedPlans("vgg-19", 1024, ((14, 2), (16,)), ((8, 6, 1, 1), (11, 17, 19))),
    PublishedPlans(
        "xlnet-36",
        128,
        ((8, 8), (22,)),
        ((1,) * 8 + (2, 1, 1, 1, 1, 2), (6, 8, 11, 14, 17, 20, 23, 26, 29, 31, 33, 35, 37)),
    ),
    PublishedPlans(
        "amoebanet-36",
        128,
        ((8, 8), (30,)),
        ((1,) * 16, (5, 8, 11, 14, 17, 19, 22, 25, 27, 29, 31, 33, 35, 37, 39)),
    ),
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A model over global batch sizes, with the settings of the guide's columns."""

    model: str
    micro_batch_size: int
    """Smallest micro-batch size to try."""
    global_batch_sizes: tuple[int, ...]
    optimizer_memory_scaling: int = 2
    peak_activation_bytes: float | None = None
    """Peak activation memory per sample; None means the outputs of all layers for one sample."""


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


SWEEPS = (
    # The guide gives convolutional networks micro-batches of 32 samples, and 70 MB to each sample.
    Sweep("resnet-50", 32, _doubling(32, 4096), peak_activation_bytes=7e7),
    Sweep("vgg-16", 32, _doubling(32, 4096), peak_activation_bytes=7e7),
    Sweep("vgg-19", 32, _doubling(32, 4096), peak_activation_bytes=7e7),
    Sweep("amoebanet-18", 8, _doubling(8, 1024)),
    Sweep("amoebanet-36", 1, _doubling(4, 512)),
    Sweep("bert-24", 6, tuple(6 * size for size in _doubling(1, 128)), 3),
    Sweep("bert-48", 2, _doubling(2, 256), 3),
    Sweep("xlnet-24", 1, _doubling(4, 512), 3),
    Sweep("xlnet-36", 1, _doubling(4, 512), 3),
    Sweep("gnmt-16", 64, _doubling(64, 4096), 3),
    Sweep("gnmt-32", 64, _doubling(64, 4096), 3),
)

DEVICE_COUNTS = (2, 4, 8, 16, 32, 64)
"""Device counts to plan for, in 8-device nodes with the links of configuration A."""
