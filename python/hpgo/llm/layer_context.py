"""What all terms are told: a model, a way to share it, GPUs, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpgo.llm.parallelism import MOST_ZERO
from hpgo.model.transformer import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.llm.constants import Constants
    from hpgo.llm.gpus import Gpus, Ring
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.model.transformer import Kind, Transformer

VALUE = 2
"""Bytes of a value between layers, and of a weight that is computed with."""
NARROW = {"fp8": 1.0, "fp4": 0.5}
"""Bytes of an input of a product that is computed in fewer bits: it is kept as it went in (Transformer Engine)."""


def pairs_seen(kind: Kind, seq_length: int) -> float:
    """Share of all pairs of a sequence's tokens that attention looks at, none of them masked.

    >>> from hpgo.model.transformer import Kind
    >>> [pairs_seen(Kind(window=tokens), 4096) for tokens in (0, 4096, 1024)]
    [0.5, 0.5, 0.21875]
    """
    share = min(1.0, kind.window / seq_length) if kind.window else 1.0
    return share * (1 - share / 2)


@dataclass(frozen=True)
class LayerContext:
    """Where a micro-batch passes. Sizes are those of one GPU."""

    model: Transformer
    config: ParallelismConfig
    gpus: Gpus
    constants: Constants
    seq_length: int
    """Tokens of a sequence."""
    kind: Kind = PLAIN
    """Of the layer that it passes."""

    def of(self, kind: Kind) -> LayerContext:
        """The same in a layer of another kind."""
        # Asked for very often, and four times as quick as `replace`.
        return (
            self
            if kind == self.kind
            else LayerContext(self.model, self.config, self.gpus, self.constants, self.seq_length, kind)
        )

    def once(self, what: Callable[[LayerContext], float], kind: Kind) -> float:
        """`what` of a layer of a kind, computed when it is first asked for."""
        if (what, kind) not in self._known:
            self._known[what, kind] = what(self.of(kind))
        return self._known[what, kind]

    @cached_property
    def _known(self) -> dict[tuple[Callable[[LayerContext], float], Kind], float]:
        return {}

    @property
    def holds_words_twice(self) -> bool:
        """Whether the embedding is held by two ranks, which sum its gradient: it is the head, or predicts further."""
        return (
            (self.model.tied or self.model.further_tokens > 0) and self.config.pp > 1 and not self.config.is_v_schedule
        )

    @property
    def tokens(self) -> int:
        """Of a micro-batch, those that a GPU's matrices meet."""
        return self.config.micro_batch_size * self.seq_length // self.config.cp

    @property
    def queries(self) -> int:
        """Width of all queries of a layer, over all GPUs."""
        return self.model.heads * self.model.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys of a layer, over all GPUs."""
        return self.model.kv_heads * self.model.head_dim

    @property
    def values(self) -> int:
        """Width of all values of a layer, over all GPUs."""
        return self.model.kv_heads * self.model.value_dim

    @property
    def mixed(self) -> int:
        """Width of what attention gives, over all heads and GPUs."""
        return self.model.heads * self.model.value_dim

    @property
    def narrow(self) -> int:
        """Width of the vectors that queries, keys and values are made from, where these are latent."""
        latent = self.model.latent
        return 0 if latent is None else (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim

    @property
    def ffn(self) -> int:
        """Inner width of the feed-forward network that all tokens of a layer go through; 0 if there is none."""
        return self.model.shared_ffn if self.kind.experts else self.model.ffn

    @property
    def between(self) -> int:
        """GPUs that share what lies between matrices."""
        return self.config.tp if self.config.sequence_parallel else 1

    @property
    def inner(self) -> int:
        """Matrices into the inner width of a feed-forward network."""
        return 2 if self.model.gated else 1

    @property
    def tensor_ring(self) -> Ring:
        """Those that share a matrix."""
        return self.gpus.ring(self.config.tp, 1)

    @property
    def context_ring(self) -> Ring:
        """Those that share a sequence."""
        return self.gpus.ring(self.config.cp, self.config.tp)

    @property
    def data_ring(self) -> Ring:
        """Those that sum a gradient: parts of a sequence, too, which lie beside each other."""
        return self.gpus.ring(self.config.dp_cp_size, self.config.tp)

    @property
    def expert_ring(self) -> Ring:
        """Those that sum the gradient of the same experts."""
        return self.gpus.ring(self.config.expert_dp_size, self.config.ep)

    @property
    def gradient_bytes(self) -> int:
        """Of one value in what is summed: 32 bits, but for float16, which is scaled instead, or where asked for 16."""
        return 2 if self.reduces_in_16_bits or self.config.zero_stage == MOST_ZERO else 4

    @property
    def reduces_in_16_bits(self) -> bool:
        """Whether gradients add up in 16 bits."""
        return self.config.grad_reduce_in_bf16 or self.config.precision == "fp16"

    def product_s(self, rows: float, width: float, terms: float, *, wide: bool = False, count: float = 1) -> float:
        """PassTimes of a product whose result is `rows` times `width`, each a sum of so many terms; or of `count` in one.

        Its processors compute whole tiles, a wave of as many as there are processors at a time, and the last wave may
        leave some of them idle.
        """
        constants, short, long = self.constants, self.constants.gemm_tile, 2 * self.constants.gemm_tile
        rate = (self.gpus.wide_flop_per_s if wide else self.gpus.products_flop_per_s) * constants.gemm_efficiency
        tiles = count * min(-(-rows // short) * -(-width // long), -(-rows // long) * -(-width // short))
        tiles += constants.tail_wave_loss * (-(-tiles // self.gpus.processors) * self.gpus.processors - tiles)
        return 2 * tiles * short * long * terms / rate + constants.gemm_overhead_s

    def moved_s(self, moved_bytes: float) -> float:
        """PassTimes of reading and writing so many bytes of memory."""
        return moved_bytes / (self.gpus.memory_bytes_per_s * self.constants.hbm_efficiency)

    def sum_s(self, ring: Ring, whole_bytes: float) -> float:
        """PassTimes in which each GPU of a ring gets the sum of all `whole_bytes`: a scatter of sums, and a gather.

        Between two machines it goes by trees, in which each of them sends everything but once (Sanders et al., 2009).
        """
        around_s = 2 * self.gather_s(ring, whole_bytes)
        if ring.machines != 2:
            return around_s
        share = 2 * (ring.ranks - 1) / ring.ranks
        moved_s = whole_bytes / (ring.bytes_per_s * self.constants.nic_efficiency)
        inside_s = share * whole_bytes / (self.gpus.inside.collective_bytes_per_s * self.constants.nvlink_efficiency)
        return around_s - share * moved_s + max(moved_s, min(inside_s, share * moved_s))

    def gather_s(self, ring: Ring, whole_bytes: float) -> float:
        """PassTimes in which each GPU of a ring gets all of `whole_bytes`, or the sum of its part of them.

        Each passes on `(n - 1) / n` of the bytes (Patarasuk and Yuan, 2009).
        """
        if ring.ranks == 1:
            return 0.0
        share = self.constants.nic_efficiency if ring.across else self.constants.nvlink_efficiency
        moved = (ring.ranks - 1) / ring.ranks * whole_bytes / (ring.bytes_per_s * share)
        return moved + ring.latency_s + self.constants.collective_overhead_s
