"""One pipeline through several kinds of GPUs: time and memory of its stages, and its simulated step.

Stages of one kind are adjacent and have the same degrees. Each kind has its own tensor-parallel, expert-parallel and
data-parallel degree, and its own micro-batch size, but all stages process the same sequences in a micro-batch of the
pipeline: dp × micro-batch size is the same. This is what FlagScale's `--hetero-process-meshes` runs.

All times and bytes come from `PipelineStages` and `stage_memory`, as for one kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.validated import Record
from hpgo.llm.estimate import schedule_of
from hpgo.llm.memory import PipelineRankLayers, stage_memory
from hpgo.llm.parallelism import ParallelismConfig, changed
from hpgo.llm.pipeline_layout import layout_text
from hpgo.llm.step_time import PipelineStages, transfer
from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from hpgo.llm.mixed.problem import MixedProblem, Setting
    from hpgo.llm.step_time import LlmStage
    from hpgo.timing.timeline import Timeline

    Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Adjacent stages on all GPUs of one kind."""

    setting: Setting
    stages: int

    def memory_bytes(
        self, problem: MixedProblem, behind: int, micro_batches: int, *, start: int = 0, embedding: bool, head: bool
    ) -> Array:
        """Return the bytes of a GPU by stage and number of layers of the stage, from layer `start` on.

        `behind` is the number of stages behind the block. `embedding` and `head` state whether the block's first stage
        holds the embedding, and its last stage the LM head.
        """
        stages = np.arange(self.stages)[:, None]
        first = np.where((stages == 0) & embedding, 1.0, 0.0)
        last = np.where((stages == self.stages - 1) & head, 1.0, 0.0)
        counts = problem.layers_before[start:] - problem.layers_before[start]
        again = self.setting.config.recompute == "full"
        in_flight = np.minimum(self.stages - stages + behind, micro_batches).astype(float)
        layers = {
            (kind, again): counts[None, :, place] + last * problem.further[place]
            for place, kind in enumerate(problem.different)
        }
        flying = {key: in_flight * count for key, count in layers.items()}
        rank = PipelineRankLayers(layers, flying, embedding=first, head=last, embedded_in_flight=in_flight * first)
        # Only the number of ranks above 1 matters: whether two of them may hold a tied embedding.
        context = problem.context(self.setting, pp=2)
        found = np.zeros((self.stages, len(counts)))
        for amount in stage_memory(context, rank).values():
            found = found + amount
        return found


@dataclass(frozen=True)
class MixedPipeline:
    """A pipeline through several kinds, with the number of its stages but without the layers of each."""

    problem: MixedProblem
    blocks: tuple[Block, ...]
    """The kinds in the order of the stages."""

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Setting of each stage."""
        return tuple(block.setting for block in self.blocks for _ in range(block.stages))

    @cached_property
    def num_stages(self) -> int:
        """Number of stages of all kinds."""
        return sum(block.stages for block in self.blocks)

    @cached_property
    def samples(self) -> int:
        """Sequences of a micro-batch of the pipeline, over all replicas of a stage."""
        # The product is the same for all kinds, so that of the first one stands for all.
        config = self.blocks[0].setting.config
        return config.dp * config.micro_batch_size

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.problem.global_batch_size // self.samples

    @cached_property
    def edges(self) -> tuple[tuple[float, float], ...]:
        """Seconds that activations occupy the link from each stage to the next, and the additional latency.

        Between two kinds, both ends send and receive over the network, and the slower one decides.
        """
        found = []
        for one, other in zip(self.settings, self.settings[1:], strict=False):
            if one.kind == other.kind:
                found.append(transfer(self.problem.context(one), dp=one.config.dp))
            else:
                # GPUs that are a whole cluster apart are never on the same node.
                far = [transfer(self.problem.context(end), dp=self._far(end)) for end in (one, other)]
                found.append((max(busy_s for busy_s, _ in far), max(latency_s for _, latency_s in far)))
        return tuple(found)

    def _far(self, setting: Setting) -> int:
        return self.problem.kinds[setting.kind].gpus.count

    def passes_s(self, stage: int) -> Array:
        """Return the seconds of a micro-batch in the layers before each layer, as a stage has them: cumulative sums.

        The layers from `start` to `stop` take the difference of the two entries, without the embedding and the LM head.
        """
        key = self.settings[stage]
        if key not in self._passes:
            self._passes[key] = self.problem.layers_before @ self.problem.layer_s(key)
        return self._passes[key]

    @cached_property
    def _passes(self) -> dict[Setting, Array]:
        return {}

    def end_s(self, stage: int) -> float:
        """Return the seconds of a micro-batch in the embedding and the LM head, as far as a stage has them."""
        embedding_s, head_s = self._ends_s
        return embedding_s * (stage == 0) + head_s * (stage == self.num_stages - 1)

    @cached_property
    def _ends_s(self) -> tuple[float, float]:
        first, last = self.blocks[0].setting, self.blocks[-1].setting
        return self.problem.ends_s(first)[0], self.problem.ends_s(last)[1]

    def max_layers(self, stage: int, start: int) -> int:
        """Return the largest number of layers from `start` on that fit in the memory of a stage's GPUs.

        It is -1 if not even a stage without layers fits.
        """
        # With equal layers, the memory does not depend on which layers a stage has.
        start_key = 0 if self.problem.is_uniform else start
        if start_key not in self._max_layers:
            found: list[int] = []
            for at, block in enumerate(self.blocks):
                used_bytes = block.memory_bytes(
                    self.problem, self.num_stages - len(found) - block.stages, self.micro_batches, start=start_key,
                    embedding=at == 0, head=at == len(self.blocks) - 1,
                )  # fmt: skip
                # More layers never need less memory.
                fits = used_bytes <= self.problem.limit_bytes(block.setting.kind)
                found += [int(count) - 1 for count in fits.sum(axis=1)]
            self._max_layers[start_key] = found
        return min(self._max_layers[start_key][stage], len(self.problem.layer_kinds) - start)

    @cached_property
    def _max_layers(self) -> dict[int, list[int]]:
        return {}

    def with_layers(self, counts: Sequence[int]) -> PlacedPipeline:
        """Return the pipeline with the number of layers of each stage."""
        return PlacedPipeline(self, tuple(counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes(Record):
    """Seconds of each stage of a pipeline, which its simulation needs. All tuples but two have an entry per stage."""

    forward_s: tuple[float, ...]
    """Forward pass of a micro-batch."""
    backward_s: tuple[float, ...]
    """Backward pass of a micro-batch."""
    transfer_s: tuple[float, ...]
    """Seconds that activations of a micro-batch occupy the link to the next stage. The last stage has no entry."""
    latency_s: tuple[float, ...]
    """Latency of that link. The last stage has no entry."""
    grad_reduce_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    def timeline(self, micro_batches: int) -> Timeline:
        """Simulate a step of 1F1B."""
        return simulate(
            schedule_of(ParallelismConfig(pp=len(self.forward_s)), micro_batches),
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            transfer_s=self.transfer_s,
            latency_s=self.latency_s,
            gradient_sync_s=self.grad_reduce_s,
            optimizer_s=self.optimizer_s,
        )


@dataclass(frozen=True)
class PlacedPipeline:
    """A pipeline through several kinds with the layers of each stage."""

    pipeline: MixedPipeline
    counts: tuple[int, ...]
    """Number of layers of each stage."""

    @cached_property
    def _parts(self) -> dict[Setting, PipelineStages]:
        """All stages as if they were on one kind, for each setting. Each stage is read from its own kind."""
        pipeline, model = self.pipeline, self.pipeline.problem.model
        # The layout alone states the layers of all stages, so `PipelineStages` needs no other description of them.
        layout = layout_text(self.counts, model.further_tokens)
        found = {}
        for setting in dict.fromkeys(pipeline.settings):
            context = pipeline.problem.context(setting, pp=pipeline.num_stages, pipeline_layout=layout)
            costs = pipeline.problem.costs(setting)
            found[setting] = PipelineStages(context, pipeline.micro_batches, costs)
        return found

    @cached_property
    def stages(self) -> tuple[LlmStage, ...]:
        """Times of each stage."""
        return tuple(self._parts[setting].stages[at] for at, setting in enumerate(self.pipeline.settings))

    @cached_property
    def times(self) -> StageTimes:
        """Times of each stage and of the links between them."""
        rows, edges = self.stages, self.pipeline.edges
        return StageTimes(
            forward_s=tuple(one.forward_s for one in rows),
            backward_s=tuple(one.backward_s for one in rows),
            transfer_s=tuple(busy_s for busy_s, _ in edges),
            latency_s=tuple(latency_s for _, latency_s in edges),
            grad_reduce_s=tuple(one.grad_reduce_s for one in rows),
            optimizer_s=tuple(one.optimizer_s for one in rows),
        )

    @cached_property
    def step_s(self) -> float:
        """Simulated step time of 1F1B."""
        return self.times.timeline(self.pipeline.micro_batches).makespan_s

    @cached_property
    def memory_bytes(self) -> tuple[float, ...]:
        """Bytes of one GPU of each stage."""
        pipeline, found = self.pipeline, []
        for at, setting in enumerate(pipeline.settings):
            stages, in_flight = self._parts[setting], min(pipeline.num_stages - at, pipeline.micro_batches)
            held = stages.rank_layers(at, in_flight)
            found.append(sum(stage_memory(stages.context, held).values()))
        return tuple(found)

    @property
    def fits(self) -> bool:
        """Whether the GPUs of every stage have enough memory."""
        problem = self.pipeline.problem
        rows = zip(self.memory_bytes, self.pipeline.settings, strict=True)
        return all(used <= problem.limit_bytes(setting.kind) for used, setting in rows)

    def config(self, block: Block) -> ParallelismConfig:
        """Return the configuration of a kind's stages. Its `pp` is the number of these stages."""
        return changed(block.setting.config, pp=block.stages)
