"""The inputs of every term: a model, a configuration, GPUs, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpgo.llm.amounts import maximum, minimum
from hpgo.llm.parallelism import MAX_ZERO, ParallelismConfig
from hpgo.model.transformer import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.llm.amounts import Amount
    from hpgo.llm.constants import Constants
    from hpgo.llm.gpus import Gpus, Ring
    from hpgo.llm.parallelism import LoraModule
    from hpgo.model.blocks import Block
    from hpgo.model.transformer import Kind, Transformer

VALUE = 2
"""Bytes of an activation in 16 bits, and of a weight as GEMMs read it."""
NARROW = {"fp8": 1.0, "fp4": 0.5}
"""Bytes of a GEMM input in a narrow format. Transformer Engine saves the input for the backward pass in that format."""


def wave_tiles(rows: float, width: float, count: float, constants: Constants, processors: int) -> float:
    """Return the tiles of `count` GEMMs with `rows` × `width` results each, and those that idle processors cost.

    Of both orientations of a tile, GEMMs use the one that needs fewer.

    >>> from hpgo.llm.constants import CONSTANTS
    >>> wave_tiles(512, 512, 1, CONSTANTS, processors=4), wave_tiles(512, 500, 1, CONSTANTS, processors=1)
    (8.0, 8.0)
    """
    short, long = constants.gemm_tile, 2 * constants.gemm_tile
    tiles = count * min(-(-rows // short) * -(-width // long), -(-rows // long) * -(-width // short))
    return tiles + constants.tail_wave_loss * (-(-tiles // processors) * processors - tiles)


@dataclass(frozen=True)
class LayerContext:
    """Inputs of all terms. Sizes are per GPU unless stated otherwise."""

    model: Transformer
    config: ParallelismConfig
    gpus: Gpus
    constants: Constants
    seq_length: int
    kind: Kind = PLAIN
    """Kind of the layer that a term is evaluated for."""

    def of(self, kind: Kind) -> LayerContext:
        """Return the context of a layer of another kind."""
        return self if kind == self.kind else self._with(self.config, self.gpus, kind)

    def of_config(self, config: ParallelismConfig, gpus: Gpus | None = None) -> LayerContext:
        """Return the context of another configuration, and perhaps of other GPUs."""
        return self._with(config, gpus or self.gpus, self.kind)

    def _with(self, config: ParallelismConfig, gpus: Gpus, kind: Kind) -> LayerContext:
        # The search calls this thousands of times, and the constructor of a frozen class is three times slower.
        found = object.__new__(LayerContext)
        vars(found).update(
            model=self.model, config=config, gpus=gpus, constants=self.constants, seq_length=self.seq_length, kind=kind
        )
        return found

    def once(self, term: Callable[[LayerContext], float], kind: Kind) -> float:
        """Return `term` of a layer of a kind. Each context computes it only once."""
        if (term, kind) not in self._known:
            self._known[term, kind] = term(self.of(kind))
        return self._known[term, kind]

    def once_for_rank(self, term: Callable[[LayerContext, Any], Amount], held: object) -> Amount:
        """Return `term` of `held`, the layers of a GPU. Each context computes it only once for the same object."""
        # Columns of memory need the same sums. Amounts may be arrays, so objects are told apart by identity, and kept
        # to keep their identity.
        key = term, id(held)
        if key not in self._of_ranks:
            self._of_ranks[key] = held, term(self, held)
        return self._of_ranks[key][1]

    @cached_property
    def _of_ranks(self) -> dict[tuple[object, int], tuple[object, Amount]]:
        return {}

    @cached_property
    def _known(self) -> dict[tuple[Callable[[LayerContext], float], Kind], float]:
        return {}

    @cached_property
    def tower(self) -> LayerContext | None:
        """Inputs of the terms of a tower's layers, whose sequences are images; None without images.

        Frameworks do not divide a tower by default: each GPU of a tensor-parallel or context-parallel group encodes
        all images of its micro-batches, and recomputes nothing.
        """
        tower, config = self.model.tower, self.config
        if tower is None or not tower.images:
            return None
        alone = ParallelismConfig(
            micro_batch_size=config.micro_batch_size * tower.images,
            precision=config.precision,
            flash_attention=config.flash_attention,
            fused_elementwise=config.fused_elementwise,
        )
        return LayerContext(tower.encoder, alone, self.gpus, self.constants, tower.patches)

    @property
    def trains_tower(self) -> bool:
        """Whether the model has a tower that is trained. With adapters, nothing outside the layers is."""
        return self.model.tower is not None and not (self.model.tower.frozen or self.config.lora_rank)

    @property
    def holds_embedding_twice(self) -> bool:
        """Whether two pipeline ranks hold the embedding: it is also the LM head, or a layer for MTP reads it."""
        # In a V schedule the first rank also has the last stage, so a single copy serves both uses.
        shared = self.model.tied or self.model.further_tokens > 0
        return shared and self.config.pp > 1 and not self.config.is_v_schedule

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU, before sequence parallelism divides them."""
        return self.config.micro_batch_size * self.seq_length // self.config.cp

    @property
    def block(self) -> Block:
        """Operators of the layer that a term is evaluated for."""
        return self.model.block(self.kind)

    @property
    def between(self) -> int:
        """GPUs that divide norms, dropout and residual additions by tokens (sequence parallelism)."""
        return self.config.tp if self.config.sequence_parallel else 1

    @property
    def embedding_rows(self) -> float:
        """Rows of the embedding on each tensor-parallel GPU.

        All of them if `whole_embedding` is on, unless they are also the rows of the LM head.
        """
        whole = self.config.whole_embedding and not self.model.tied
        return self.model.embedding_rows / (1 if whole else self.config.tp)

    @property
    def tensor_ring(self) -> Ring:
        """GPUs of one tensor-parallel group."""
        return self.gpus.ring(self.config.tp, 1)

    @property
    def context_ring(self) -> Ring:
        """GPUs of one context-parallel group."""
        return self.gpus.ring(self.config.cp, self.config.tp)

    @property
    def data_ring(self) -> Ring:
        """GPUs that reduce the same gradient: data parallelism and context parallelism together."""
        return self.gpus.ring(self.config.dp_cp_size, self.config.tp)

    @property
    def expert_ring(self) -> Ring:
        """GPUs that reduce the gradient of the same experts."""
        return self.gpus.ring(self.config.expert_dp_size, self.config.expert_model_parallel_size)

    @property
    def shard_ring(self) -> Ring:
        """GPUs that hold the shards of one copy of a weight."""
        return self.gpus.ring(self.config.shard_size, self.config.tp)

    @property
    def group_ring(self) -> Ring:
        """GPUs that hold the same shard of a weight, one in each group of hybrid sharding."""
        return self.gpus.ring(self.config.dp_replicate, self.config.tp * self.config.shard_size)

    @property
    def expert_shard_ring(self) -> Ring:
        """GPUs that hold the shards of one copy of an expert."""
        return self.gpus.ring(self.config.expert_shard_size, self.config.expert_model_parallel_size)

    @property
    def expert_group_ring(self) -> Ring:
        """GPUs that hold the same shard of an expert, one in each group of hybrid sharding."""
        size = self.config.expert_shard_size
        return self.gpus.ring(self.config.expert_dp_size // size, self.config.expert_model_parallel_size * size)

    @property
    def attended_tokens(self) -> int:
        """Tokens among which attention computes pairs: those of a sequence, or of a document that is packed into it."""
        return self.config.packed_length or self.seq_length

    def saves_input(self, module: LoraModule) -> bool:
        """Return whether the backward pass needs a GEMM's input: for the gradient of a weight, or of an adapter."""
        return not self.config.lora_rank or module in self.config.lora_targets

    @property
    def gradient_bytes(self) -> int:
        """Bytes per value of gradient reduction: 4, or 2 where gradients are in 16 bits.

        They are in fp16, with `grad_reduce_in_bf16`, and with ZeRO stage 3 unless DTensor shards the replicas.
        """
        # torchtitan reduces in fp32 (`mixed_precision_reduce`), DeepSpeed and llm-foundry in the training format.
        narrow = self.config.zero_stage == MAX_ZERO and not self.config.dtensor
        return 2 if self.reduces_in_16_bits or narrow else 4

    @property
    def reduces_in_16_bits(self) -> bool:
        """Whether gradients are accumulated in 16 bits."""
        return self.config.grad_reduce_in_bf16 or self.config.precision == "fp16"

    @property
    def accumulates_in_16_bits(self) -> bool:
        """Whether gradients are stored in 16 bits: if they are reduced so, or if the optimizer updates bf16 weights.

        torchtitan's FSDP reduces in fp32 even then, and stores the result in the format of the weights.
        """
        return self.reduces_in_16_bits or self.config.main_params_dtype == "none"

    def gemm_s(self, rows: float, width: float, terms: float, *, wide: bool = False, count: float = 1) -> float:
        """Return the seconds of `count` equal GEMMs in one kernel, each with `rows` × `width` results of `terms` terms.

        The GPU computes whole tiles, one on each streaming multiprocessor at a time. In the last wave of tiles some
        multiprocessors may be idle. `wide` selects 16 bits regardless of the configuration's precision.
        """
        constants, short = self.constants, self.constants.gemm_tile
        rate = (self.gpus.wide_flop_per_s if wide else self.gpus.products_flop_per_s) * constants.gemm_efficiency
        tiles = wave_tiles(rows, width, count, constants, self.gpus.processors)
        return 2 * tiles * short * 2 * short * terms / rate + constants.gemm_overhead_s

    def moved_s(self, moved_bytes: Amount) -> Amount:
        """Return the seconds in which the GPU reads and writes `moved_bytes` of its memory in total."""
        return moved_bytes / (self.gpus.memory_bytes_per_s * self.constants.hbm_efficiency)

    def all_reduce_s(self, ring: Ring, whole_bytes: Amount) -> Amount:
        """Return the seconds of an all-reduce of `whole_bytes`: a reduce-scatter and an all-gather.

        Between two nodes NCCL uses trees, in which each node sends all bytes only once (Sanders et al., 2009).
        """
        around_s = 2 * self.all_gather_s(ring, whole_bytes)
        if ring.nodes != 2:
            return around_s
        # Replace the ring's transfer time, but keep its latencies. The tree's bytes between the nodes and the bytes
        # inside each node flow at the same time, so the slower of the two decides. It never takes longer than a ring,
        # which NCCL would choose in that case.
        share = 2 * (ring.ranks - 1) / ring.ranks
        moved_s = whole_bytes / (ring.bytes_per_s * self.constants.nic_efficiency)
        inside_s = share * whole_bytes / (self.gpus.inside.collective_bytes_per_s * self.constants.nvlink_efficiency)
        return around_s - share * moved_s + maximum(moved_s, minimum(inside_s, share * moved_s))

    def shard_gather_s(self, ring: Ring, parameters: float, each: float) -> float:
        """Return the seconds to gather a layer's weights from shards, or to reduce its gradients into shards.

        `each` is the number of bytes per parameter. NCCL has no trees for these collectives, so the latency grows with
        the number of ranks.
        """
        if ring.ranks == 1:
            return 0.0
        constants = self.constants
        share = constants.gather_nic_efficiency if ring.across else constants.nvlink_efficiency
        moved_s = (ring.ranks - 1) / ring.ranks * parameters * each / (ring.bytes_per_s * share)
        messages = max(1.0, parameters / constants.gather_bucket_parameters)
        return moved_s + messages * (ring.ring_latency_s + constants.collective_overhead_s)

    def all_gather_s(self, ring: Ring, whole_bytes: Amount) -> Amount:
        """Return the seconds of an all-gather to `whole_bytes`, or of a reduce-scatter from them.

        Each GPU sends `(n - 1) / n` of the bytes (Patarasuk and Yuan, 2009).
        """
        if ring.ranks == 1:
            return 0.0
        share = self.constants.nic_efficiency if ring.across else self.constants.nvlink_efficiency
        moved_s = (ring.ranks - 1) / ring.ranks * whole_bytes / (ring.bytes_per_s * share)
        return moved_s + ring.latency_s + self.constants.collective_overhead_s
