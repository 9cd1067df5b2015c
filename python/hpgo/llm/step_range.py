"""The 90 % range of an estimated step time, by what published steps the estimate was compared with.

The logarithm of measured over estimated time of a published step has a deviation of its platform, which all its steps
share, and one of its own. `make accuracy` estimates both from platforms that no fit used (docs/accuracy.md).
"""

from __future__ import annotations

from math import exp, sqrt
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.stack import Stack

StepKind = Literal["dense", "fsdp", "experts"]
"""Kinds of steps whose errors differ."""
QUANTILE = 1.70
"""Deviations on each side of a 90 % range. It is 1.645 for a normal distribution; errors have heavier tails."""
STEP_SD = {"dense": 0.09, "fsdp": 0.11, "experts": 0.255}
"""Standard deviation of single steps, by kind: logarithms."""
WIDE_FSDP_SD = 0.18
"""The same for FSDP over more than `WIDE_FSDP_RANKS` ranks. One cluster's step grew by 93 % between 64 and 256 GPUs, so
where the topology of the network was not measured, the range has to cover that."""
WIDE_FSDP_RANKS = 128
SEEN_SD, UNSEEN_SD = 0.05, 0.09
"""Standard deviation of platforms: with published steps of the stack on such a device, and without."""
RELATIVE_ERROR = 0.07
"""Mean relative error of the ratio of two step times on one platform. The platform's deviation cancels in it."""


def kind_of(config: ParallelismConfig, cluster: Cluster, *, has_experts: bool) -> StepKind:
    """Return the kind of a configuration's steps.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> from hpgo.hardware.cluster import Cluster
    >>> cluster = Cluster.preset("h100:2")
    >>> [kind_of(ParallelismConfig(dp=16, zero_stage=stage), cluster, has_experts=False) for stage in (1, 3)]
    ['dense', 'fsdp']
    """
    if has_experts:
        return "experts"
    # Inside a node links are fast enough to hide FSDP's messages, so its errors do not differ from other steps'.
    across = config.gathers_weights and config.tp * config.shard_size > cluster.nodes[0].count
    return "fsdp" if across else "dense"


def log_sd(config: ParallelismConfig, cluster: Cluster, stack: Stack, *, has_experts: bool) -> float:
    """Return the standard deviation of the logarithm of measured over estimated step time, without a platform."""
    kind = kind_of(config, cluster, has_experts=has_experts)
    step_sd = WIDE_FSDP_SD if kind == "fsdp" and config.shard_size > WIDE_FSDP_RANKS else STEP_SD[kind]
    return sqrt(step_sd**2 + (SEEN_SD if stack.is_seen_on(cluster) else UNSEEN_SD) ** 2)


def step_range(step_s: float, sd: float, bias: float = 0.0) -> tuple[float, float]:
    """Return the ends of the 90 % range around an estimate.

    `bias` is a known deviation of estimates on such a platform, positive where they are too long. It widens the end on
    the side of the measurements.

    >>> [round(end, 2) for end in step_range(1.0, 0.1)], [round(end, 2) for end in step_range(1.0, 0.1, bias=0.1)]
    ([0.84, 1.19], [0.76, 1.19])
    """
    far = QUANTILE * sd
    return step_s * exp(-far - max(0.0, bias)), step_s * exp(far - min(0.0, bias))
