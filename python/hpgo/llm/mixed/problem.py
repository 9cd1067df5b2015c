"""The problem of a mixed cluster: kinds of GPUs with their constants, the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.divisors import divisors
from hpgo.errors import ArgumentError
from hpgo.llm.layer_context import LayerContext
from hpgo.llm.memory import PipelineRankLayers, stage_memory
from hpgo.llm.parallelism import ParallelismConfig, changed, check_degrees
from hpgo.llm.step_time import LayerCosts, kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.constants import Constants
    from hpgo.llm.gpus import Gpus
    from hpgo.llm.parallelism import Precision
    from hpgo.llm.stack import Stack
    from hpgo.model.transformer import Kind, Transformer

    Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one kind, with the constants of the cost model on them."""

    cluster: Cluster
    gpus: Gpus
    stack: Stack
    constants: Constants

    @property
    def name(self) -> str:
        """Name of the kind, without the number of nodes."""
        return self.cluster.name.partition(":")[0]


@dataclass(frozen=True, eq=False)
class Setting:
    """Degrees of one stage on one kind of GPUs, without the number of stages.

    Settings are compared by identity: comparing all fields of configurations would take most of a search.
    """

    kind: int
    """Place of the kind in `MixedProblem.kinds`."""
    config: ParallelismConfig
    """Degrees, micro-batch size and recomputation. Its `pp` is 1."""


@dataclass(frozen=True)
class MixedProblem:
    """A transformer, a batch, and the kinds of GPUs that train it together."""

    model: Transformer
    kinds: tuple[GpuKind, ...]
    global_batch_size: int
    seq_length: int
    precision: Precision = "bf16"
    reserved_bytes: float = 0.0

    @cached_property
    def layer_kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer, without the layers for multi-token prediction."""
        return kinds_of(self.model)[: self.model.layers]

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all layers are of one kind."""
        return len(set(self.layer_kinds)) == 1

    @cached_property
    def different(self) -> tuple[Kind, ...]:
        """Kinds of layers, in the order of their first layers, also of those for multi-token prediction."""
        return tuple(dict.fromkeys(kinds_of(self.model)))

    @cached_property
    def layers_before(self) -> Array:
        """Number of layers of each kind before each layer: shape (layers + 1, kinds)."""
        found = np.zeros((len(self.layer_kinds) + 1, len(self.different)))
        rows = [[kind == one for one in self.different] for kind in self.layer_kinds]
        found[1:] = np.cumsum(np.array(rows, dtype=float), axis=0)
        return found

    @cached_property
    def further(self) -> Array:
        """Number of layers for multi-token prediction, by kind. They are on the last stage."""
        return np.array([float(self.model.further_tokens * one.further) for one in self.different])

    def limit_bytes(self, kind: int) -> float:
        """Return the memory of a GPU of a kind that plans may use."""
        return self.kinds[kind].gpus.memory_bytes - self.reserved_bytes

    def context(self, setting: Setting, **values: object) -> LayerContext:
        """Return the inputs of all terms of a setting, with some fields of its configuration changed."""
        kind = self.kinds[setting.kind]
        config = changed(setting.config, **values) if values else setting.config
        return LayerContext(self.model, config, kind.gpus, kind.constants, self.seq_length, self.model.kind(0))

    def costs(self, setting: Setting) -> LayerCosts:
        """Return the times of layers of a setting. All settings of one shape share them."""
        key = setting.kind, setting.config.shape
        if key not in self._costs:
            self._costs[key] = LayerCosts.from_context(self.context(setting))
        return self._costs[key]

    @cached_property
    def _costs(self) -> dict[tuple[int, ParallelismConfig], LayerCosts]:
        return {}

    def layer_s(self, setting: Setting) -> Array:
        """Return the forward and backward seconds of a micro-batch in a layer of each kind of `different`."""
        if setting not in self._layers_s:
            costs, again = self.costs(setting), setting.config.recompute == "full"
            self._layers_s[setting] = np.array([costs.layer[one, again].total_s for one in self.different])
        return self._layers_s[setting]

    @cached_property
    def _layers_s(self) -> dict[Setting, Array]:
        return {}

    def ends_s(self, setting: Setting) -> tuple[float, float]:
        """Return the seconds of a micro-batch in the embedding, and in the LM head with multi-token prediction."""
        costs = self.costs(setting)
        return costs.embedding.total_s, costs.head.total_s + float(self.further @ self.layer_s(setting))

    def settings(self, kind: int, cp: int, samples: int) -> Iterator[Setting]:
        """Yield the settings of a kind that process `samples` sequences in each micro-batch of the pipeline.

        Tensor parallelism stays inside a node, and a stage has at least one layer that fits in memory.
        """
        gpus = self.kinds[kind].gpus
        # All GPUs of a kind are used, so dp divides what tp and cp leave, and the rest is the number of stages.
        for tp in divisors(gpus.gpus_per_node):
            groups, rest = divmod(gpus.count, tp * cp)
            for dp in divisors(groups) if not rest else ():
                for ep in divisors(self.model.experts) if self.model.experts else (1,):
                    is_whole = samples % dp == 0 and tp * cp * dp % ep == 0
                    if is_whole and self.divides(tp, cp, ep):
                        yield from self._recomputed(kind, self.config(tp, cp, ep, dp, samples // dp))

    def config(self, tp: int, cp: int, ep: int, dp: int, micro_batch_size: int) -> ParallelismConfig:
        """Return a configuration with some degrees, without recomputation."""
        # ZeRO stage 1 shards the optimizer state over replicas, as FlagScale's `use_distributed_optimizer` does.
        return ParallelismConfig(
            tp=tp, sequence_parallel=tp > 1, cp=cp, ep=ep, dp=dp, micro_batch_size=micro_batch_size,
            zero_stage=int(max(dp * cp, tp * cp * dp // ep if ep > 1 else 1) > 1), precision=self.precision,
        )  # fmt: skip

    def _recomputed(self, kind: int, config: ParallelismConfig) -> Iterator[Setting]:
        for recompute in ("none", "full"):
            setting = Setting(kind, changed(config, recompute=recompute))
            if self.fits_alone(setting):
                yield setting

    def fits_alone(self, setting: Setting, **values: object) -> bool:
        """Return whether some layer fits in memory, with some fields of the configuration changed.

        The layer has one micro-batch in flight, and its optimizer state is sharded over all GPUs of the kind.
        """
        config = changed(setting.config, **values)
        return self._least_bytes(Setting(setting.kind, config)) <= self.limit_bytes(setting.kind)

    def _least_bytes(self, setting: Setting) -> float:
        """Return a lower bound on the memory of a stage: that of one layer and one micro-batch in flight."""
        # The optimizer state depends on the replicas, but the activations of a micro-batch do not. All combinations of
        # one size share the bound with the most replicas that the kind has.
        config = changed(setting.config, dp=1, zero_stage=0)
        key = setting.kind, config
        if key not in self._least:
            sharded = changed(config, dp=self.kinds[setting.kind].gpus.count, zero_stage=1)
            context = self.context(Setting(setting.kind, sharded))
            again = config.recompute == "full"
            ranks = [
                PipelineRankLayers({(one, again): 1}, {(one, again): 1}, embedding=False, head=False)
                for one in dict.fromkeys(self.layer_kinds)
            ]
            self._least[key] = min(sum(stage_memory(context, held).values()) for held in ranks)
        return self._least[key]

    @cached_property
    def _least(self) -> dict[tuple[int, ParallelismConfig], float]:
        return {}

    def divides(self, tp: int, cp: int, ep: int) -> bool:
        """Return whether degrees divide the model and the sequences."""
        # The same few degrees are asked for with every micro-batch size.
        if (tp, cp, ep) not in self._divided:
            config = ParallelismConfig(tp=tp, sequence_parallel=tp > 1, cp=cp, ep=ep, dp=ep)
            try:
                check_degrees(self.model, config, seq_length=self.seq_length)
            except ArgumentError:
                self._divided[tp, cp, ep] = False
            else:
                self._divided[tp, cp, ep] = True
        return self._divided[tp, cp, ep]

    @cached_property
    def _divided(self) -> dict[tuple[int, int, int], bool]:
        return {}
