"""Plan a transformer on machines that differ: `plan_mixed_llm`, and the records of its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from typing import TYPE_CHECKING, Literal, get_args

from hpgo.base.checks import check_int, choice, number
from hpgo.base.messages import brief, join_words, printable, shorten
from hpgo.base.presentation import Reported
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record
from hpgo.errors import ClusterError, InfeasibleError
from hpgo.hardware.mixed import MixedCluster
from hpgo.llm.constants import CONSTANTS
from hpgo.llm.estimate import LlmEstimate
from hpgo.llm.frameworks import framework_support
from hpgo.llm.gpus import Gpus
from hpgo.llm.mixed.apart import ApartFound, KindsApart
from hpgo.llm.mixed.pipeline import StageTimes
from hpgo.llm.mixed.pipeline_search import PipelineFound, PipelineSearch
from hpgo.llm.mixed.problem import GpuKind, MixedProblem
from hpgo.llm.mixed.work_bound import work_bound_s
from hpgo.llm.parallelism import ParallelismConfig, Precision, check_positions
from hpgo.llm.stack import stack_of
from hpgo.llm.step_range import kind_of, log_sd, step_range
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from hpgo.llm.mixed.pipeline import PlacedPipeline
    from hpgo.llm.stack import Stack
    from hpgo.timing.timeline import Timeline

MixedFramework = Literal["flagscale", "megatron"]
"""Frameworks that run a pipeline through several kinds."""
_KERNELS = "megatron"
"""Framework whose kernels and options are assumed: FlagScale is built on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStages(Record):
    """Adjacent stages of a pipeline on the GPUs of one kind."""

    kind: str
    gpus: int
    parallelism: ParallelismConfig
    """Degrees and micro-batch size of these stages. Its `pp` is their number."""
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    peak_bytes: tuple[float, ...]
    """Bytes of one GPU of each stage."""
    capacity_bytes: float
    """Memory of one GPU."""
    busy_share: tuple[float, ...]
    """Share of the step in which each stage runs forward and backward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPipelinePlan(Record):
    """One pipeline through several kinds of GPUs: all, or some of more than two."""

    stages: tuple[MixedStages, ...]
    """Stages of each kind, in the order of the layers."""
    micro_batches: int
    samples_per_micro_batch: int
    """Sequences of a micro-batch over all replicas of a stage: dp × micro-batch size of each kind."""
    times: StageTimes
    """Seconds of each stage, over the stages of all kinds."""
    step_s: float
    bound_s: float
    """No pipeline of the search space has a shorter step. `step_s` itself if the search was complete."""
    pipelines: int
    """Number of combinations of degrees in the search space."""
    simulated: int
    """Number of splits of the layers that were simulated."""
    is_proven: bool
    """Whether no pipeline of the search space is faster."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of all stages."""
        return tuple(count for part in self.stages for count in part.layers)

    def timeline(self) -> Timeline:
        """Simulate a step again, with the actions of each stage. Its makespan is `step_s`."""
        names = [
            f"stage {at} ({part.gpus // len(part.layers)} × {part.kind})"
            for at, part in enumerate(part for part in self.stages for _ in part.layers)
        ]
        return replace(self.times.timeline(self.micro_batches), row="stage", row_names=tuple(map(printable, names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedShare(Record):
    """Replicas on one kind of GPUs, with their part of the batch."""

    kind: str
    samples: int
    """Sequences of a step."""
    estimate: LlmEstimate
    """Estimate of the kind alone with these sequences, without the sum of gradients over the kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlanSearch(Reported, Record):
    """The ways to train a transformer on a mixed cluster, with the step time of each.

    >>> found = plan_mixed_llm("llama-3-8b", "h100:1+a100:1", global_batch_size=32, seq_length=8192)
    >>> found.work_bound_s <= found.step_s <= min(one.step_s for _, one in found.alone if one is not None)
    True
    """

    transformer: Transformer
    cluster: MixedCluster
    global_batch_size: int
    seq_length: int
    precision: str
    pipeline: MixedPipelinePlan | None
    """Fastest pipeline through several kinds; None if none fits in memory."""
    shares: tuple[MixedShare, ...]
    """Replicas on several kinds, with the batch split by speed; empty if fewer than two kinds have any that fit."""
    apart_s: float | None
    """Step time of these replicas, with the sum of gradients over the kinds."""
    alone: tuple[tuple[str, LlmEstimate | None], ...]
    """Fastest configuration of each kind alone with the whole batch; None if none fits."""
    work_bound_s: float
    """No plan on these GPUs has a shorter step (`hpgo.llm.mixed.work_bound`)."""
    low_s: float
    """Lower end of the 90 % range of `step_s` (docs/accuracy.md)."""
    high_s: float
    """Upper end of the 90 % range of `step_s`."""

    def __repr__(self) -> str:
        return brief(
            "MixedPlanSearch",
            f"{shorten(self.transformer.name, 24)} on {shorten(self.cluster.name, 24)}: {self.best}, step"
            f" {format_seconds(self.step_s)}",
        )

    @property
    def steps_s(self) -> dict[str, float]:
        """Step time of each way that fits: `pipeline`, `apart`, and `KIND alone`."""
        found = {} if self.pipeline is None else {"pipeline": self.pipeline.step_s}
        found |= {} if self.apart_s is None else {"apart": self.apart_s}
        return found | {f"{kind} alone": one.step_s for kind, one in self.alone if one is not None}

    @property
    def best(self) -> str:
        """Name of the fastest way in `steps_s`."""
        return min(self.steps_s, key=self.steps_s.__getitem__)

    @property
    def step_s(self) -> float:
        """Step time of the fastest way."""
        return self.steps_s[self.best]


def mixed_problem(
    transformer: Transformer | str | os.PathLike[str],
    cluster: MixedCluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    precision: Precision = "bf16",
    reserved_bytes: float = 0.0,
    stack: Stack | str | os.PathLike[str] | None = None,
) -> MixedProblem:
    """Check the arguments of `plan_mixed_llm` and return them as one record. Raises what `plan_mixed_llm` raises."""
    model = transformer_of(transformer)
    mixed = cluster if isinstance(cluster, MixedCluster) else MixedCluster.read(cluster)
    # The search of equal nodes has more features, such as interleaving.
    if len(mixed.parts) < 2:
        raise ClusterError(
            f"all nodes of cluster `{shorten(mixed.name)}` are equal", "plan it with `hpgo.plan_llm`", code="mismatch"
        )
    global_batch_size = check_int("global_batch_size", global_batch_size)
    seq_length = check_int("seq_length", seq_length)
    check_positions(model, seq_length)
    choice("precision", precision, get_args(Precision))
    row, _ = framework_support(_KERNELS)
    kinds = []
    for part in mixed.parts:
        found = stack_of(stack, part, f"{row.name}@{row.version}")
        kinds.append(GpuKind(part, Gpus.of(part, precision), found, found.constants(CONSTANTS)))
    reserved_bytes = number("reserved_bytes", reserved_bytes)
    return MixedProblem(model, tuple(kinds), global_batch_size, seq_length, precision, reserved_bytes)


def plan_mixed_llm(
    transformer: Transformer | str | os.PathLike[str],
    cluster: MixedCluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    precision: Precision = "bf16",
    reserved_bytes: float = 0.0,
    stack: Stack | str | os.PathLike[str] | None = None,
    framework: MixedFramework = "flagscale",
) -> MixedPlanSearch:
    """Find the fastest way to train a transformer on machines that differ.

    Three ways are compared with one cost model, the one of `hpgo.estimate_llm`:

    - One 1F1B pipeline through all kinds of GPUs, or through two or more of them. The stages of a kind are adjacent.
      Each kind has its own tp, ep, dp, micro-batch size and recomputation, any number of stages, and any number of
      layers on each of them; cp and the sequences of a micro-batch are the same for all, as FlagScale requires.
      Weights and optimizer state are sharded inside a kind.
    - Kinds apart, all or two or more of them: each trains whole replicas, with the fastest configuration that
      `hpgo.plan_llm` finds for its part of the batch. Each step ends with a sum of the gradients over the kinds.
    - Each kind alone with the whole batch.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: several kinds of nodes: `h100:4+a100:4`, or a file with nodes that differ.
        global_batch_size: sequences per step.
        seq_length: tokens per sequence.
        precision: number format of matrix multiplications.
        reserved_bytes: memory of each GPU to leave free.
        stack: software stack on all kinds; None means the one that Megatron-LM implies on each kind.
        framework: `flagscale`; or `megatron`, for a pipeline with the same degrees, micro-batch size and recomputation
            on all kinds.

    Raises InfeasibleError if nothing fits in memory; ClusterError for equal nodes, for more than four kinds and for
    devices of unknown rates; ArgumentError for wrong arguments.
    """
    problem = mixed_problem(
        transformer, cluster, global_batch_size=global_batch_size, seq_length=seq_length, precision=precision,
        reserved_bytes=reserved_bytes, stack=stack,
    )  # fmt: skip
    mixed = cluster if isinstance(cluster, MixedCluster) else MixedCluster.read(cluster)
    is_uniform = choice("framework", framework, get_args(MixedFramework)) == "megatron"
    apart = KindsApart(problem)
    alone = tuple((one.name, apart.alone(at, problem.global_batch_size)) for at, one in enumerate(problem.kinds))
    pipeline, replicas = PipelineFound(None, inf, 0, 0), apart.best()
    for some in _some_kinds(problem):
        # The best pipeline so far is the step to beat, so the searches of fewer kinds end early.
        found = PipelineSearch(some, is_uniform=is_uniform, best=pipeline.best).run()
        pipeline = PipelineFound(
            found.best,
            min(pipeline.bound_s, found.bound_s),
            pipeline.pipelines + found.pipelines,
            pipeline.simulated + found.simulated,
        )
    if pipeline.best is None and replicas is None and not any(one for _, one in alone):
        raise _nothing_fits(problem, mixed)
    answer = MixedPlanSearch(
        transformer=problem.model,
        cluster=mixed,
        global_batch_size=problem.global_batch_size,
        seq_length=problem.seq_length,
        precision=precision,
        pipeline=None if pipeline.best is None else _pipeline_plan(pipeline, pipeline.best),
        shares=() if replicas is None else _shares(problem, replicas),
        apart_s=None if replicas is None else replicas.step_s,
        alone=alone,
        work_bound_s=work_bound_s(problem),
        low_s=0.0,
        high_s=0.0,
    )
    # The range depends on which way is the fastest, which the record itself knows.
    low_s, high_s = _range(problem, answer)
    return replace(answer, low_s=low_s, high_s=high_s)


def _some_kinds(problem: MixedProblem) -> Iterator[MixedProblem]:
    """Yield the problems with two or more of the kinds, the one with all of them first."""
    for count in range(len(problem.kinds), 1, -1):
        for kinds in combinations(problem.kinds, count):
            yield replace(problem, kinds=kinds)


def _pipeline_plan(found: PipelineFound, placed: PlacedPipeline) -> MixedPipelinePlan:
    pipeline, parts, start = placed.pipeline, [], 0
    many = pipeline.micro_batches
    for block in pipeline.blocks:
        kind, stop = pipeline.problem.kinds[block.setting.kind], start + block.stages
        parts.append(
            MixedStages(
                kind=kind.name,
                gpus=kind.gpus.count,
                parallelism=placed.config(block),
                layers=placed.counts[start:stop],
                peak_bytes=placed.memory_bytes[start:stop],
                capacity_bytes=kind.gpus.memory_bytes,
                busy_share=tuple(
                    many * (one.forward_s + one.backward_s) / placed.step_s for one in placed.stages[start:stop]
                ),
            )
        )
        # The stages of the next kind follow those of this one.
        start = stop
    return MixedPipelinePlan(
        stages=tuple(parts),
        micro_batches=many,
        samples_per_micro_batch=pipeline.samples,
        times=placed.times,
        step_s=placed.step_s,
        bound_s=min(found.bound_s, placed.step_s),
        pipelines=found.pipelines,
        simulated=found.simulated,
        is_proven=found.is_proven,
    )


def _shares(problem: MixedProblem, found: ApartFound) -> tuple[MixedShare, ...]:
    return tuple(
        MixedShare(kind=problem.kinds[one.kind].name, samples=one.samples, estimate=one.estimate)
        for one in found.shares
    )


def _range(problem: MixedProblem, found: MixedPlanSearch) -> tuple[float, float]:
    """Return the 90 % range of the fastest way: the widest of its kinds' ranges."""
    # The slowest kind decides the step, and any of them may be the slowest in truth.
    has_experts = bool(problem.model.experts)
    configs: dict[str, ParallelismConfig] = {}
    if found.best == "pipeline" and found.pipeline is not None:
        configs = {part.kind: part.parallelism for part in found.pipeline.stages}
    elif found.best == "apart":
        configs = {share.kind: share.estimate.parallelism for share in found.shares}
    else:
        configs = {kind: one.parallelism for kind, one in found.alone if one and found.best == f"{kind} alone"}
    ends = []
    for kind in problem.kinds:
        if (config := configs.get(kind.name)) is not None:
            sd = log_sd(config, kind.cluster, kind.stack, has_experts=has_experts)
            bias = kind.stack.bias_on(kind.cluster, kind_of(config, kind.cluster, has_experts=has_experts))
            ends.append(step_range(found.step_s, sd, bias))
    return min(low_s for low_s, _ in ends), max(high_s for _, high_s in ends)


def _nothing_fits(problem: MixedProblem, mixed: MixedCluster) -> InfeasibleError:
    kinds = join_words([f"{one.gpus.count} {one.name}" for one in problem.kinds])
    return InfeasibleError(
        f"no configuration of `{shorten(problem.model.name)}` fits in the memory of `{shorten(mixed.name)}` ({kinds}):"
        " neither one pipeline through all kinds, nor replicas on one of them",
        "use more nodes, or GPUs with more memory" + (", or reserve less" if problem.reserved_bytes else ""),
        code="insufficient_memory",
    )
