"""Blocks of a transformer: each is a list of operators, from which costs and parameter counts follow.

A model repeats a few kinds of blocks in a pattern. The operators state sizes over all GPUs; how tensor parallelism
divides an operator belongs to its kind, and for a `Linear` to its `split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hpgo.base.divisors import divisors
from hpgo.base.messages import pluralize
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError

AttentionBias = Literal["none", "qkv", "all"]
Split = Literal["column", "row", "whole"]
"""Division of a matrix by tensor parallelism: by its outputs, by its inputs, or a copy on each GPU."""
ScanRule = Literal["ssd", "gated_delta", "mamba1", "linear_attention"]


def _check_sizes(operator: object, *names: str) -> None:
    for name in names:
        if getattr(operator, name) == 0:
            raise ArgumentError(f"{name} of {type(operator).__name__} is 0", "give a whole number from 1")


def _check_shared(heads: int, groups: int, what: str, field: str) -> None:
    if heads % groups:
        raise ArgumentError(
            f"{what} has {pluralize(heads, 'head')}, which can't be divided evenly among {field} {groups}",
            f"set `{field}` to {max(d for d in divisors(heads) if d <= groups)}",
        )


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values come from one narrow vector per token.

    See DeepSeek-V2, arXiv 2405.04434, 2.1. Queries and keys of a head have the width `Transformer.head_dim`. Their last
    `rope_dim` dimensions carry the position. This part of the keys is shared by all heads and is computed directly from
    the layer's input.

    >>> Latent(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536).kv_rank
    512
    """

    kv_rank: int
    """Width of the latent vector of keys and values."""
    rope_dim: int
    value_dim: int
    """Width of a head's values."""
    q_rank: int | None = None
    """Width of the latent vector of queries. None: queries are computed from the layer's input."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Record):
    """Softmax attention with the matrices of queries, keys, values and of the output.

    >>> Attention(heads=4, kv_heads=2, head_dim=16).parameters(64)
    12288
    """

    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head's queries and keys."""
    window: int = 0
    """Number of tokens that a query sees, itself included; 0 means all tokens before it."""
    chunk: int = 0
    """Length of the chunks of tokens inside which queries see the tokens before them; 0 means no chunks."""
    selected: int = 0
    """Number of tokens that an index selects for each query; 0 means no index."""
    causal: bool = True
    """Whether queries see only tokens before them."""
    sinks: bool = False
    """Whether each head has a learned logit that no token belongs to, which fused kernels rarely support."""
    bias: AttentionBias = "none"
    """Matrices that have biases: none, the matrices of queries, keys and values, or also the output's."""
    head_norms: bool = False
    """Whether queries and keys of each head are normalized, with weights that the heads share."""
    gate: bool = False
    """Whether a gate, as wide as the queries, multiplies the result before the output's matrix."""
    latent: Latent | None = None
    value: int = 0
    """Width of a head's values without latent attention; 0 means `head_dim`."""
    projected: bool = True
    """Whether the operator has the matrices of queries, keys, values and output; otherwise `linears` state them."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sizes(self, "heads", "kv_heads", "head_dim")
        _check_shared(self.heads, self.kv_heads, "attention", "kv_heads")

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return (self.value or self.head_dim) if self.latent is None else self.latent.value_dim

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.kv_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Width of the result over all heads."""
        return self.heads * self.value_dim

    @property
    def gates(self) -> int:
        """Width of the gate of the result; 0 without one."""
        return self.mixed if self.gate else 0

    @property
    def narrow(self) -> int:
        """Width of the latent vectors; 0 without latent attention."""
        return 0 if self.latent is None else (self.latent.q_rank or 0) + self.latent.kv_rank + self.latent.rope_dim

    def seen(self, seq_length: int) -> float:
        """Return the share of all pairs of tokens whose scores are needed: none that is masked.

        >>> [Attention(heads=1, kv_heads=1, head_dim=8, window=w).seen(4096) for w in (0, 4096, 1024)]
        [0.5, 0.5, 0.21875]
        """
        # A band of this relative width below the diagonal: its parallelogram, minus the triangle cut off at the start.
        tokens = min(each for each in (self.window, self.selected, seq_length) if each)
        share = tokens / seq_length
        if self.chunk and self.chunk < seq_length:
            share = min(share, self.chunk / seq_length)
            return share / 2 if self.causal else share
        if not self.causal:
            return min(1.0, 2 * share) if self.window else 1.0
        return share * (1 - share / 2)

    def whole_parameters(self, hidden: int) -> int:
        """Return the parameters that belong to no head, so that each tensor-parallel GPU holds all of them."""
        if (latent := self.latent) is None:
            return 0
        queries = 0 if latent.q_rank is None else (hidden + 1) * latent.q_rank
        return queries + hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank

    def parameters(self, hidden: int) -> int:
        """Return all parameters, without the norm before the operator."""
        more = self.heads if self.sinks else 0
        if not self.projected:
            return more + (2 * self.head_dim if self.head_norms else 0)
        more += hidden * self.gates
        if (latent := self.latent) is None:
            projected = self.queries + self.keys + self.values
            biases = {"none": 0, "qkv": projected + self.gates, "all": projected + self.gates + hidden}[self.bias]
            return hidden * (projected + self.mixed) + biases + more + (2 * self.head_dim if self.head_norms else 0)
        expanded = self.queries * (hidden if latent.q_rank is None else latent.q_rank)
        expanded += latent.kv_rank * self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        return self.whole_parameters(hidden) + expanded + self.mixed * hidden + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Record):
    """A recurrence over the tokens, without the matrices around it: state space or linear attention.

    Training computes it in chunks of tokens, as products of matrices.

    >>> Scan(rule="ssd", heads=8, key_dim=128, value_dim=64, chunk=256).flop_per_token()
    589824
    """

    rule: ScanRule
    heads: int
    """Number of heads of values; of channels for `mamba1`."""
    key_dim: int
    """Width of a head's keys, which is the state size of Mamba."""
    value_dim: int
    """Width of a head's values; 1 for `mamba1`."""
    groups: int = 1
    """Number of heads of keys, each shared by `heads / groups` heads of values."""
    chunk: int = 64
    """Tokens of a chunk."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sizes(self, "heads", "key_dim", "value_dim", "groups", "chunk")
        _check_shared(self.heads, self.groups, "a scan", "groups")

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value_dim

    def flop_per_token(self) -> int:
        """Return the operations of a forward pass per token.

        Source: arXiv 2405.21060, section 6 (`ssd`); the chunkwise form of arXiv 2412.06464 (`gated_delta`), whose
        products with the keys `linear_attention` leaves out; a multiplication and addition per state for `mamba1`.
        """
        k, v, c = self.key_dim, self.value_dim, self.chunk
        if self.rule == "ssd":
            return 2 * c * k * self.groups + self.heads * (2 * c * v + 4 * k * v)
        if self.rule == "gated_delta":
            return self.heads * (2 * c * (3 * k + 2 * v) + 6 * k * v)
        if self.rule == "linear_attention":
            return self.heads * (2 * c * (k + v) + 4 * k * v)
        return 9 * k * self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Record):
    """A matrix that multiplies each token.

    >>> Linear(inputs=8, outputs=4, split="column", bias=True).parameters
    36
    """

    inputs: int
    outputs: int
    split: Split = "whole"
    bias: bool = False
    times: int = 1
    """Number of equal matrices."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.times * (self.inputs * self.outputs + self.outputs * self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv(Record):
    """A causal convolution of each channel over the last `width` tokens; tensor parallelism divides the channels."""

    channels: int
    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sizes(self, "channels", "width")

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.channels * (self.width + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Record):
    """Further parameters that multiply or shift values, such as a norm's weights or the decay of a scan."""

    size: int
    split: bool = False
    """Whether tensor parallelism divides them, like matrices of heads; otherwise each GPU holds all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Record):
    """A feed-forward network that all tokens use: two matrices, or three if it is gated.

    >>> Mlp(width=16).parameters(8), Mlp(width=16, gated=False, bias=True).parameters(8)
    (384, 280)
    """

    width: int
    """Inner width."""
    gated: bool = True
    bias: bool = False

    @property
    def inner(self) -> int:
        """Number of matrices into the inner width."""
        return 2 if self.gated else 1

    def parameters(self, hidden: int) -> int:
        """Return all parameters."""
        biases = self.width * self.inner + hidden if self.bias else 0
        return (self.inner + 1) * hidden * self.width + biases


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Record):
    """Feed-forward networks of which a router chooses some for each token.

    >>> Experts(count=8, per_token=2, width=16).active_parameters(8)
    832
    """

    count: int
    per_token: int
    """Number of experts that a token uses."""
    width: int
    """Inner width of one expert."""
    gated: bool = True
    bias: bool = False
    groups: int = 1
    """Number of equal groups of experts. A token goes to the experts of `groups_per_token` groups."""
    groups_per_token: int = 1
    hidden: int = 0
    """Width of the vectors that experts read and write; 0 means the width of a token."""
    router_bias: bool = False
    """Whether the router has a trained bias for each expert."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.width and 0 < self.per_token <= self.count):
            raise ArgumentError(
                f"{pluralize(self.count, 'expert')} of width {self.width}, of which a token uses {self.per_token}, are"
                " no experts",
                f"use 1 to {self.count} per token" if self.width else "give the width of each",
            )
        if self.count % self.groups or not 0 < self.groups_per_token <= self.groups:
            raise ArgumentError(
                f"{self.count} experts in {self.groups} groups, of which a token uses {self.groups_per_token}, can't be"
                " grouped evenly",
                f"use {min(divisors(self.count), key=lambda d: abs(d - self.groups))} groups",
            )

    @property
    def inner(self) -> int:
        """Number of matrices into the inner width."""
        return 2 if self.gated else 1

    def each_parameters(self, hidden: int) -> int:
        """Return the parameters of one expert."""
        return Mlp(width=self.width, gated=self.gated, bias=self.bias).parameters(self.hidden or hidden)

    def router_parameters(self, hidden: int) -> int:
        """Return the parameters of the router."""
        return (hidden + self.router_bias) * self.count

    def parameters(self, hidden: int) -> int:
        """Return all parameters, with the router."""
        return self.router_parameters(hidden) + self.count * self.each_parameters(hidden)

    def active_parameters(self, hidden: int) -> int:
        """Return the parameters that one token uses, with the router."""
        return self.router_parameters(hidden) + self.per_token * self.each_parameters(hidden)


@dataclass(frozen=True, kw_only=True)
class Block(Record):
    """One kind of block: operators whose results are added to the tokens, and the norms before them.

    >>> block = Block(attention=(Attention(heads=4, kv_heads=2, head_dim=16),), mlp=Mlp(width=256), norms=2)
    >>> block.parameters(64, norm=64)
    61568
    """

    name: str = ""
    """Word for the block in patterns and reports."""
    attention: tuple[Attention, ...] = ()
    scans: tuple[Scan, ...] = ()
    linears: tuple[Linear, ...] = ()
    """Matrices that no other operator has, such as those around a scan."""
    convs: tuple[Conv, ...] = ()
    vectors: tuple[Vector, ...] = ()
    mlp: Mlp | None = None
    """The network of all tokens: a dense one, or the shared experts, all together."""
    shared_gate: bool = False
    """Whether a gate computed from each token scales the result of the shared experts."""
    experts: Experts | None = None
    norms: int = 2
    """Number of norms over a token."""

    @cached_property
    def parts(self) -> int:
        """Number of parts with a residual addition each: a mixer of tokens, and a feed-forward network."""
        mixes = bool(self.attention or self.scans or self.convs)
        return (mixes + (self.mlp is not None or self.experts is not None)) or 1

    @cached_property
    def queries(self) -> int:
        """Width of all queries of attention."""
        return sum(one.queries for one in self.attention)

    @cached_property
    def keys(self) -> int:
        """Width of all keys of attention."""
        return sum(one.keys for one in self.attention)

    @cached_property
    def values(self) -> int:
        """Width of all values of attention."""
        return sum(one.values for one in self.attention)

    @cached_property
    def columns(self) -> int:
        """Width of the results of all matrices divided by their outputs, but for matrices of the network."""
        held = [one for one in self.attention if one.projected]
        projected = sum(one.queries + one.keys + one.values + one.gates for one in held)
        return projected + sum(one.times * one.outputs for one in self.linears if one.split == "column")

    @cached_property
    def rows(self) -> int:
        """Width of the inputs of all matrices divided by their inputs, but for matrices of the network."""
        mixed = sum(one.mixed for one in self.attention if one.projected)
        return mixed + sum(one.times * one.inputs for one in self.linears if one.split == "row")

    @cached_property
    def narrow(self) -> int:
        """Width of the results of matrices that each tensor-parallel GPU holds whole, such as latent vectors."""
        latent = sum(one.narrow for one in self.attention)
        return latent + sum(one.times * one.outputs for one in self.linears if one.split == "whole")

    @cached_property
    def channels(self) -> int:
        """Number of channels of convolutions."""
        return sum(one.channels for one in self.convs)

    @cached_property
    def latent(self) -> Latent | None:
        """Latent attention of the block, if it has one."""
        return next((one.latent for one in self.attention if one.latent is not None), None)

    @cached_property
    def window(self) -> int:
        """Number of tokens that each query sees at most; 0 if some query sees all tokens before it."""
        limits = [one.window or one.chunk for one in self.attention]
        return max(limits) if limits and all(limits) else 0

    @cached_property
    def ffn(self) -> int:
        """Inner width of the network that all tokens use; 0 if there is none."""
        return 0 if self.mlp is None else self.mlp.width

    @cached_property
    def inner(self) -> int:
        """Number of matrices into the inner width of the block's networks."""
        network = self.mlp or self.experts
        return 1 if network is None else network.inner

    @cached_property
    def tensor_sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes that the tensor-parallel degree must divide, by what they count."""
        return {
            "attention heads": tuple(one.heads for one in self.attention),
            "KV heads": tuple(one.kv_heads for one in self.attention),
            "heads of scans": tuple(one.heads for one in self.scans),
            "groups of scans": tuple(one.groups for one in self.scans if one.groups > 1),
            "FFN size": () if self.mlp is None or self.experts is not None else (self.mlp.width,),
            "FFN size of shared experts": () if self.mlp is None or self.experts is None else (self.mlp.width,),
        }

    def seen_flop_per_token(self, seq_length: int) -> float:
        """Return the operations of attention scores and of scans in a forward pass per token."""
        scores = sum(2 * (one.queries + one.mixed) * one.seen(seq_length) * seq_length for one in self.attention)
        return scores + sum(one.flop_per_token() for one in self.scans)

    def mixer_parameters(self, hidden: int) -> int:
        """Return the parameters of attention, scans and what surrounds them, without norms over a token."""
        found = sum(one.parameters(hidden) for one in self.attention) + sum(one.size for one in self.vectors)
        found += sum(one.parameters for one in self.linears)
        return found + sum(one.parameters for one in self.convs)

    def network_parameters(self, hidden: int) -> int:
        """Return the parameters of the network that all tokens use."""
        return (0 if self.mlp is None else self.mlp.parameters(hidden)) + hidden * self.shared_gate

    def whole_parameters(self, hidden: int, *, norm: int) -> int:
        """Return the parameters that each tensor-parallel GPU holds, without experts; a norm has `norm`."""
        found = self.norms * norm + sum(one.whole_parameters(hidden) for one in self.attention)
        found += sum(one.size for one in self.vectors if not one.split)
        found += sum(one.parameters for one in self.linears if one.split == "whole")
        return found + (0 if self.experts is None else self.experts.router_parameters(hidden))

    def parameters(self, hidden: int, *, norm: int) -> int:
        """Return all parameters; a norm over a token has `norm`."""
        experts = 0 if self.experts is None else self.experts.parameters(hidden)
        return self.mixer_parameters(hidden) + self.network_parameters(hidden) + self.norms * norm + experts

    def idle_parameters(self, hidden: int) -> int:
        """Return the parameters that one token does not use."""
        if self.experts is None:
            return 0
        return (self.experts.count - self.experts.per_token) * self.experts.each_parameters(hidden)
