"""Shape of a transformer, as its configuration states it, without any measurement.

Transformers are decoders that predict the next token. Each layer has attention and a feed-forward network. Heads may
share keys and values, or compute them from a latent vector. The feed-forward network is dense or has experts. All
tokens have the width `hidden` between layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpgo.base.checks import check_int, check_is
from hpgo.base.divisors import divisors
from hpgo.base.messages import pluralize
from hpgo.base.validated import check_fields
from hpgo.errors import ArgumentError
from hpgo.model.arithmetic import Arithmetic  # noqa: TC001 -- `check_fields` reads the annotation

if TYPE_CHECKING:
    import os

MAX_LAYERS = 10_000
"""Maximum number of layers of a transformer. Each layer becomes a row of numbers."""
AttentionBias = Literal["none", "qkv", "all"]


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


class Kind(NamedTuple):
    """Properties in which layers of one transformer differ."""

    experts: bool = False
    """Whether the layer has experts instead of a dense feed-forward network."""
    window: int = 0
    """Number of tokens in the attention window; 0 means the whole sequence."""
    further: bool = False
    """Whether this is a multi-token prediction layer, which follows all others and predicts a token after the next."""


PLAIN = Kind()
"""A dense layer with attention over the whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of equal layers, except that only some may have experts, and only some a sliding window.

    Raises ArgumentError for inconsistent shapes: heads that can't be grouped evenly by their keys and values, experts
    without a width, or more experts per token than experts.

    >>> tiny = Transformer(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=1000)
    >>> tiny.parameters, tiny.parameters == sum(tiny.parameters_by_part().values())
    (251200, True)
    """

    name: str = "transformer"
    layers: int
    hidden: int
    """Width of a token between layers."""
    heads: int
    kv_heads: int
    """Number of heads with separate keys and values; `heads / kv_heads` query heads share one."""
    head_dim: int
    """Width of a head's queries and keys."""
    ffn: int
    """Inner width of a dense feed-forward network; 0 if all layers have experts."""
    gated: bool = True
    """Whether the feed-forward network has a third matrix whose output multiplies that of the first.

    See Shazeer, arXiv 2002.05202.
    """
    vocab: int
    tied: bool = False
    """Whether the LM head shares the embedding's matrix."""
    experts: int = 0
    """Number of experts in each layer that has experts; 0 if none has."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    """Inner width of one expert."""
    shared_ffn: int = 0
    """Inner width of the shared experts, which process every token, all together."""
    shared_gate: bool = False
    """Whether a gate computed from each token scales the output of the shared experts."""
    expert_groups: int = 1
    """Number of equal groups of experts. A token goes to the experts of `groups_per_token` groups.

    See DeepSeek-V2, 2.2.2.
    """
    groups_per_token: int = 1
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers without experts, counted from 0, in a model with experts."""
    latent: Latent | None = None
    attention_bias: AttentionBias = "none"
    """Matrices of attention that have biases: none, the matrices of queries, keys and values, or also the output's."""
    ffn_bias: bool = False
    """Whether the matrices of feed-forward networks have biases."""
    centred_norms: bool = False
    """Whether norms subtract the mean and have biases (LayerNorm), or only scale (RMSNorm)."""
    norms_per_layer: int = 2
    head_norms: bool = False
    """Whether queries and keys of each head are normalized, with weights that the heads share."""
    positions: int = 0
    """Number of learned position embeddings; 0 if positions rotate queries and keys."""
    window: int = 0
    """Number of tokens in the attention window of layers with a window."""
    window_layers: tuple[int, ...] = ()
    """Indices of the layers with a window, counted from 0. All others attend to the whole sequence."""
    further_tokens: int = 0
    """Number of multi-token prediction layers, each of which predicts one token beyond the next.

    Each has the kind of the last layer. Its input is the result of the layer before and the embedding of the token
    before (DeepSeek-V3, arXiv 2412.19437, 2.2). `parameters` leave them out, as published counts do.
    """
    longest: int = 0
    """Maximum sequence length in tokens of the model; 0 if it is not stated."""
    arithmetic: Arithmetic | None = None
    """Values that change results, but not costs. None: they are not stated."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
            if not getattr(self, field):
                raise ArgumentError(f"transformer `{self.name}`: {field} is 0", "give a whole number from 1")
        check_int(f"transformer `{self.name}`: layers", self.layers, maximum=MAX_LAYERS)
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"transformer `{self.name}` has {pluralize(self.heads, 'head')}, which can't be divided evenly among"
                f" {pluralize(self.kv_heads, 'head')} of keys and values",
                f"set `kv_heads` to {max(d for d in divisors(self.heads) if d <= self.kv_heads)}",
            )
        for field in ("dense_layers", "window_layers"):
            if (maximum := max(getattr(self, field), default=0)) >= self.layers:
                raise ArgumentError(
                    f"transformer `{self.name}` has {pluralize(self.layers, 'layer')}, but {field} names {maximum}",
                    f"name layers from 0 to {self.layers - 1}",
                )
        if self.experts and not (self.expert_ffn and 0 < self.experts_per_token <= self.experts):
            raise ArgumentError(
                f"transformer `{self.name}` has {pluralize(self.experts, 'expert')} of width {self.expert_ffn}, but a"
                f" token goes to {self.experts_per_token} of them",
                f"set `experts_per_token` to a whole number from 1 to {self.experts}"
                if self.expert_ffn
                else f"set `expert_ffn`, the width of each, such as {self.hidden}",
            )
        grouped = 0 < self.groups_per_token <= self.expert_groups and self.experts % self.expert_groups == 0
        if self.experts and not grouped:
            raise ArgumentError(
                f"transformer `{self.name}` has {pluralize(self.experts, 'expert')} in {self.expert_groups} groups, but"
                f" a token goes to {self.groups_per_token} of them",
                f"set `expert_groups` to {min(divisors(self.experts), key=lambda d: abs(d - self.expert_groups))}"
                if self.experts % self.expert_groups
                else f"set `groups_per_token` to a whole number from 1 to {self.expert_groups}",
            )
        described = self.experts_per_token or self.expert_ffn or self.shared_ffn or self.dense_layers
        if not self.experts and (described or self.expert_groups != 1):
            raise ArgumentError(
                f"transformer `{self.name}` has no experts, but sizes of experts are given", "set `experts`"
            )
        if not self.ffn and len(self.dense_layers if self.experts else range(self.layers)):
            raise ArgumentError(
                f"transformer `{self.name}` has layers without experts, but `ffn` is 0",
                f"set `ffn`, such as {4 * self.hidden}",
            )
        rotated = self.head_dim if self.latent is None else self.latent.rope_dim
        if self.arithmetic is not None and self.arithmetic.rope_theta is not None and rotated % 2:
            raise ArgumentError(
                f"transformer `{self.name}` rotates heads of width {rotated}, but RoPE turns pairs of dimensions",
                f"set `head_dim` to an even number, such as {rotated + 1}"
                if self.latent is None
                else f"set `rope_dim` to an even number, such as {rotated + 1}",
            )
        if self.positions and self.arithmetic is not None and self.arithmetic.rope_theta is not None:
            raise ArgumentError(
                f"transformer `{self.name}` has learned positions and a rope_theta", "leave one of them out"
            )

    def holds_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts. Raise ArgumentError if there is no such layer."""
        layer = check_int(f"the layer of transformer `{self.name}`", layer, minimum=0, maximum=self.layers - 1)
        return bool(self.experts) and layer not in self.dense_layers

    def kind(self, layer: int) -> Kind:
        """Return the kind of a layer, counted from 0. Raise ArgumentError if there is no such layer.

        See `further_kind` for multi-token prediction layers.

        >>> Transformer(
        ...     layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10, window=4, window_layers=(1,)
        ... ).kind(1)
        Kind(experts=False, window=4, further=False)
        """
        return Kind(self.holds_experts(layer), self.window if layer in self.window_layers else 0)

    @property
    def further_kind(self) -> Kind:
        """Kind of the multi-token prediction layers."""
        return self.kind(self.layers - 1)._replace(further=True)

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Transformer:
        """Read a Hugging Face `config.json`, a folder with one, or a file with hpgo's own keys.

        Raises ProfileError naming the file and the key that is missing, wrong or unknown (docs/profiles.md).
        """
        from hpgo.model.formats.transformers import read_transformer

        return read_transformer(source)

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - len(set(self.dense_layers)) if self.experts else 0

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over a token."""
        return self.hidden * (2 if self.centred_norms else 1)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, without the norm before it."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if (latent := self.latent) is None:
            matrices = h * (q + 2 * kv) + q * h
            biases = {"none": 0, "qkv": q + 2 * kv, "all": q + 2 * kv + h}[self.attention_bias]
            return matrices + biases + (2 * self.head_dim if self.head_norms else 0)
        plain = self.head_dim - latent.rope_dim
        queries = (
            h * q if latent.q_rank is None else (h + 1 + q) * latent.q_rank
        )  # the 1 is the norm of the latent vector
        keys_and_values = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        keys_and_values += latent.kv_rank * self.heads * (plain + latent.value_dim)
        return queries + keys_and_values + self.heads * latent.value_dim * h

    @property
    def latent_parameters(self) -> int:
        """Parameters of one layer that compute latent vectors of a token. They belong to no head."""
        if (latent := self.latent) is None:
            return 0
        queries = 0 if latent.q_rank is None else (self.hidden + 1) * latent.q_rank
        return queries + self.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def ffn_parameters(self, width: int) -> int:
        """Return the parameters of a feed-forward network. Raise ArgumentError if its inner width is negative."""
        width = check_int("the width", width, minimum=0)
        biases = width * (2 if self.gated else 1) + self.hidden if self.ffn_bias else 0
        return (3 if self.gated else 2) * self.hidden * width + biases

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of one layer, counted from 0. Raise ArgumentError if there is no such layer."""
        return self.kind_parameters(self.kind(layer))

    def kind_parameters(self, kind: Kind) -> int:
        """Return the parameters of one layer of a kind. Raise ArgumentError if `kind` is not a Kind."""
        check_is("the kind of a layer", kind, Kind, "take it from `kind`")
        common = self.attention_parameters + self.norms_per_layer * self.norm_parameters
        common += self.joining_parameters + 3 * self.norm_parameters if kind.further else 0
        if not kind.experts:
            return common + self.ffn_parameters(self.ffn)
        return common + self.router_parameters + self._shared_parameters + self.experts * self.expert_parameters

    @property
    def joining_parameters(self) -> int:
        """Parameters of the matrix that joins embedding and previous result in a multi-token prediction layer.

        Beside the matrix, such a layer has three more norms: of both inputs and of its result.
        """
        return 2 * self.hidden * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.ffn_parameters(self.expert_ffn)

    @property
    def _shared_parameters(self) -> int:
        return (self.ffn_parameters(self.shared_ffn) if self.shared_ffn else 0) + self.hidden * self.shared_gate

    @property
    def router_parameters(self) -> int:
        """Parameters of the router in one layer."""
        return self.hidden * self.experts

    def parameters_by_part(self) -> dict[str, int]:
        """Return the parameters of the whole model by part.

        >>> tiny = Transformer(
        ...     layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=0, vocab=10, experts=4, experts_per_token=1,
        ...     expert_ffn=16)
        >>> tiny.parameters_by_part()["experts"]
        3072
        """
        dense = self.layers - self.expert_layers
        return {
            "embedding": (self.vocab + self.positions) * self.hidden,
            "attention": self.layers * self.attention_parameters,
            "feed-forward": dense * self.ffn_parameters(self.ffn) + self.expert_layers * self._shared_parameters,
            "router": self.expert_layers * self.router_parameters,
            "experts": self.expert_layers * self.experts * self.expert_parameters,
            "norms": (self.layers * self.norms_per_layer + 1) * self.norm_parameters,
            "head": 0 if self.tied else self.vocab * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """Number of parameters, each counted once, without `further_parameters`."""
        return sum(self.parameters_by_part().values())

    @property
    def further_parameters(self) -> int:
        """Parameters of all multi-token prediction layers, which share embedding and LM head with the model.

        >>> from dataclasses import replace
        >>> from hpgo.model.transformer_presets import TRANSFORMERS
        >>> round(replace(TRANSFORMERS["deepseek-v3"], further_tokens=1).further_parameters / 1e9, 1)
        11.6
        """
        return self.further_tokens * self.kind_parameters(self.further_kind)

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token: of the experts in a layer, only the chosen ones count."""
        idle = self.expert_layers * (self.experts - self.experts_per_token) * self.expert_parameters
        return self.parameters - idle
