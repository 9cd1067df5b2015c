"""Preference among equally fast configurations: the simplest of those that surely fit comes first.

Estimates of two configurations on one cluster differ by `RELATIVE_ERROR` for no real reason. A difference below it does
not justify a setting that the user has to understand, debug and keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.messages import join_words
from hpgo.llm.platform import MEMORY_ERROR

if TYPE_CHECKING:
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.parallelism import ParallelismConfig


class Complexity(NamedTuple):
    """What a configuration uses beyond data parallelism, compared field by field: less is simpler."""

    dimensions: int
    """Parallel dimensions beside data parallelism: tp, cp, ep, etp and pp. Each adds process groups, and a place in
    every checkpoint and in every message about a fault. Data parallelism is not counted, since it follows from the
    GPUs."""
    split_backward: bool
    """Whether the schedule splits backward passes, which few kernels and frameworks support."""
    vpp: int
    """Virtual stages per rank. Each has its own checkpoint and more messages than one stage."""
    uneven: bool
    """Whether the end ranks or stages have other numbers of layers, which are found again for each model."""
    recompute: bool
    """Whether activations are recomputed, an option that also has to be tuned."""
    cuda_graphs: bool
    """Whether CUDA graphs replay launches. They exclude other options, and what they capture is hard to debug."""
    hidden_exchange: bool
    """Whether passes of two micro-batches run beside each other to hide the exchange of experts."""
    hybrid: bool
    """Whether groups of replicas each hold all shards, which adds process groups."""
    sharding: int
    """ZeRO stages above 1. Stage 1 shards the optimizer alone and changes no pass, so it counts like stage 0."""


def complexity(config: ParallelismConfig) -> Complexity:
    """Return the complexity of a configuration.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> simple, exotic = ParallelismConfig(tp=8, pp=2), ParallelismConfig(tp=8, pp=2, vpp=10)
    >>> complexity(simple) < complexity(exotic), complexity(simple).dimensions
    (True, 2)
    """
    return Complexity(
        sum(degree > 1 for degree in (config.tp, config.cp, config.ep, config.etp, config.pp)),
        config.splits_backward,
        config.vpp,
        config.ends != (None, None) or config.pipeline_layout is not None,
        config.recompute != "none",
        config.cuda_graph_impl != "none",
        config.overlap_ep_comm,
        config.dp_replicate > 1,
        max(0, config.zero_stage - 1),
    )


def is_tight(estimate: LlmEstimate) -> bool:
    """Return whether an estimate leaves less memory free than the error of the estimate."""
    return estimate.fullest.peak_bytes > sure_bytes(estimate.capacity_bytes)


def sure_bytes(capacity_bytes: float) -> float:
    """Return the estimated memory up to which a configuration fits even if the estimate is too low by its error."""
    return capacity_bytes / (1 + MEMORY_ERROR)


def preference(estimate: LlmEstimate) -> tuple[object, ...]:
    """Return the key by which equally fast configurations are sorted, the preferred one first.

    Enough free memory comes first, since a step that runs out of memory takes for ever. Then come few unvalidated
    features, whose terms may be too optimistic, and then simplicity.
    """
    config = estimate.parallelism
    return is_tight(estimate), len(estimate.unvalidated_features), complexity(config), estimate.step_s


def simpler_by(simple: ParallelismConfig, other: ParallelismConfig) -> str:
    """Return in which respects `simple` is simpler, to follow a verb like "saves"; empty if it is not.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> simpler_by(ParallelismConfig(tp=8, pp=2), ParallelismConfig(tp=8, pp=4, vpp=10, cp=2))
    'cp and virtual stages'
    """
    here, there = complexity(simple), complexity(other)
    saved = [
        name
        for name in ("tp", "cp", "ep", "etp", "pp")
        if getattr(simple, name) == 1 < getattr(other, name)
    ]  # fmt: skip
    saved += ["split backward passes"] if here.split_backward < there.split_backward else []
    saved += [] if here.vpp >= there.vpp else ["virtual stages" if here.vpp == 1 else "more virtual stages"]
    saved += ["uneven stages" if other.pipeline_layout else "uneven end ranks"] if here.uneven < there.uneven else []
    saved += ["recomputation"] if here.recompute < there.recompute else []
    saved += ["CUDA graphs"] if here.cuda_graphs < there.cuda_graphs else []
    saved += ["hidden expert exchange"] if here.hidden_exchange < there.hidden_exchange else []
    saved += ["hybrid sharding"] if here.hybrid < there.hybrid else []
    saved += [f"ZeRO stage {other.zero_stage}"] if here.sharding < there.sharding else []
    return join_words(saved) if saved else ""
