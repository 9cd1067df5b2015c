"""Shape of a transformer, as its configuration states it, without any measurement.

Transformers are decoders that predict the next token. Each layer has attention and a feed-forward network. Heads may
share keys and values, or compute them from a latent vector. The feed-forward network is dense or has experts. All
tokens have the width `hidden` between layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hpgo.base.checks import check_flag, check_int, check_is, check_list
from hpgo.base.divisors import divisors
from hpgo.base.messages import join_words, pluralize, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.model.arithmetic import Arithmetic  # noqa: TC001 -- `check_fields` reads the annotation
from hpgo.model.blocks import Attention, AttentionBias, Block, Experts, Latent, Mlp

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

MAX_LAYERS = 10_000
"""Maximum number of layers of a transformer. Each layer becomes a row of numbers."""


class Kind(NamedTuple):
    """Properties in which layers of one transformer differ."""

    experts: bool = False
    """Whether the layer has experts instead of a dense feed-forward network."""
    window: int = 0
    """Number of tokens in the attention window; 0 means the whole sequence."""
    further: bool = False
    """Whether this is a multi-token prediction layer, which follows all others and predicts a token after the next."""
    name: str = ""
    """Name of the block in `Transformer.blocks`; empty if the model has none."""


PLAIN = Kind()
"""A dense layer with attention over the whole sequence."""


@dataclass(frozen=True, kw_only=True)
class Tower(Record):
    """An encoder of images or sounds, whose results take the place of tokens of the decoder.

    >>> layer = Block(name="layer", attention=(Attention(heads=2, kv_heads=2, head_dim=4),), mlp=Mlp(width=16))
    >>> Tower(hidden=8, blocks=(layer,), pattern=("layer",) * 2).parameters
    1312
    """

    name: str = "vision"
    hidden: int
    """Width of a patch between layers."""
    blocks: tuple[Block, ...]
    pattern: tuple[str, ...]
    """Name of the block of each layer."""
    centred_norms: bool = False
    """Whether norms subtract the mean and have biases."""
    ends: Block | None = None
    """Operators before and after the layers. The first matrix embeds patches. All others act on merged patches, such as
    the projection to the decoder."""
    patches: int = 0
    """Patches of one image, or positions of one clip of sound, among which attention computes pairs; 0 if the
    configuration states no size of images."""
    merge: int = 1
    """Patches that become one token of the decoder."""
    images: int = 0
    """Images, or clips of sound, of one sequence. The tokens of a sequence include the images'."""
    frozen: bool = False
    """Whether the tower is not trained. It then has a forward pass only, and so has its projection."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_pattern(f"tower `{self.name}`", self.blocks, self.pattern)
        if not self.merge:
            raise ArgumentError(f"tower `{self.name}`: merge is 0", "give a whole number from 1")
        if self.images and not self.patches:
            raise ArgumentError(
                f"tower `{self.name}` has {pluralize(self.images, 'image')} in a sequence, but its configuration states"
                " no size of images",
                "set the patches of an image, such as 1024",
            )

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        norm = self.hidden * (2 if self.centred_norms else 1)
        each = {block.name: block.parameters(self.hidden, norm=norm) for block in self.blocks}
        ends = 0 if self.ends is None else self.ends.parameters(self.hidden, norm=norm)
        return ends + sum(each[name] for name in self.pattern)

    @property
    def image_tokens(self) -> int:
        """Number of tokens of a sequence that images take."""
        return self.images * -(-self.patches // self.merge)

    @cached_property
    def encoder(self) -> Transformer:
        """Layers of the tower as a transformer, whose sequences are images and whose tokens are patches."""
        return Transformer.from_blocks(
            name=self.name, hidden=self.hidden, vocab=1, blocks=self.blocks, pattern=self.pattern,
            centred_norms=self.centred_norms,
        )  # fmt: skip

    @property
    def flop_per_image(self) -> float:
        """Operations of a forward pass over one image, counted as for the decoder: 2 for each weight and patch.

        0 if the configuration states no size of images.

        >>> attention = Attention(heads=2, kv_heads=2, head_dim=4, causal=False)
        >>> layer = Block(name="layer", attention=(attention,), mlp=Mlp(width=16))
        >>> Tower(hidden=8, blocks=(layer,), pattern=("layer",), patches=4).flop_per_image
        5760.0
        """
        if not self.patches:
            return 0.0
        norm = self.hidden * (2 if self.centred_norms else 1)
        each = {
            block.name: 2 * block.parameters(self.hidden, norm=norm) + block.seen_flop_per_token(self.patches)
            for block in self.blocks
        }
        first, *others = self.ends.linears if self.ends is not None and self.ends.linears else (None,)
        outside = 0.0 if first is None else 2.0 * first.parameters
        outside += sum(2 * one.parameters for one in others if one is not None) / self.merge
        return float(self.patches * (outside + sum(each[name] for name in self.pattern)))


def check_pattern(what: str, blocks: Sequence[Block], pattern: Sequence[str]) -> None:
    """Raise ArgumentError unless a pattern names blocks, each of which has another name.

    >>> check_pattern("the model", [Block(name="a")], ["a", "b"])
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: the pattern of the model names `b`, which is no block
    """
    for block in blocks:
        check_is(f"a block of {what}", block, Block, "build it with `Block`")
    if not pattern:
        raise ArgumentError(f"the pattern of {what} is empty", "name the block of each layer")
    for name in pattern:
        check_is(f"a name in the pattern of {what}", name, str, "give the `name` of a block")
    names = [block.name for block in blocks]
    if len(set(names)) < len(names):
        raise ArgumentError(f"two blocks of {what} have the same name", "give each another `name`")
    for name in pattern:
        if name not in names:
            raise ArgumentError(
                f"the pattern of {what} names `{shorten(name)}`, which is no block",
                f"use {join_words(names, 'or')}" if names else "give `blocks`",
                code="unknown_name",
            )


@dataclass(frozen=True, kw_only=True)
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
    embeds: bool = True
    """Whether tokens are looked up in a matrix with a row for each word. False for patches of images, which `before`
    embeds. The head then has a row for each label."""
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
    blocks: tuple[Block, ...] = ()
    """Kinds of blocks of a model that the fields above can't describe; see `from_blocks`."""
    pattern: tuple[str, ...] = ()
    """Name of the block of each layer, if `blocks` are given."""
    before: Block | None = None
    """Further operators beside the embedding, such as its norm or its projection."""
    after: Block | None = None
    """Further operators beside the LM head, such as its bias."""
    final_norms: int = 1
    """Number of norms between the last layer and the LM head."""
    tower: Tower | None = None
    """Encoder of images or sounds in front of the decoder, which `parameters` count."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab"):
            if not getattr(self, field):
                raise ArgumentError(f"transformer `{self.name}`: {field} is 0", "give a whole number from 1")
        if self.tied and not self.embeds:
            raise ArgumentError(
                f"transformer `{self.name}` has no embedding that its LM head could share", "set `tied` to False"
            )
        check_int(f"transformer `{self.name}`: layers", self.layers, maximum=MAX_LAYERS)
        if self.blocks or self.pattern:
            check_pattern(f"transformer `{self.name}`", self.blocks, self.pattern)
            if len(self.pattern) != self.layers:
                raise ArgumentError(
                    f"transformer `{self.name}` has {pluralize(self.layers, 'layer')}, but its pattern names"
                    f" {len(self.pattern)}",
                    f"set `layers` to {len(self.pattern)}",
                )
        else:
            self._check_layers()

    def _check_layers(self) -> None:
        """Raise ArgumentError unless the fields describe layers, in a model without `blocks`."""
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
        if self.blocks:
            return self._named[self.pattern[layer]].experts is not None
        return bool(self.experts) and layer not in self.dense_layers

    def kind(self, layer: int) -> Kind:
        """Return the kind of a layer, counted from 0. Raise ArgumentError if there is no such layer.

        See `further_kind` for multi-token prediction layers.

        >>> Transformer(
        ...     layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10, window=4, window_layers=(1,)
        ... ).kind(1)
        Kind(experts=False, window=4, further=False, name='')
        """
        experts = self.holds_experts(layer)
        if self.blocks:
            return Kind(experts, self._named[self.pattern[layer]].window, name=self.pattern[layer])
        return Kind(experts, self.window if layer in self.window_layers else 0)

    @property
    def further_kind(self) -> Kind:
        """Kind of the multi-token prediction layers."""
        return self.kind(self.layers - 1)._replace(further=True)

    def block(self, kind: Kind) -> Block:
        """Return the operators of a layer of a kind. Raise ArgumentError if `kind` is not a Kind.

        >>> tiny = Transformer(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=1000)
        >>> tiny.block(tiny.kind(0)).mlp
        Mlp(width=256, gated=True, bias=False)
        """
        try:
            return self._blocks[kind]
        except (KeyError, TypeError):
            check_is("the kind of a layer", kind, Kind, "take it from `kind`")
        found = self._blocks[kind] = self._named[kind.name] if self.blocks else self._decoder_block(kind)
        return found

    @cached_property
    def _blocks(self) -> dict[Kind, Block]:
        return {}

    @cached_property
    def _named(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    def _decoder_block(self, kind: Kind) -> Block:
        attention = Attention(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, window=kind.window,
            bias=self.attention_bias, head_norms=self.head_norms, latent=self.latent,
        )  # fmt: skip
        width = self.shared_ffn if kind.experts else self.ffn
        experts = Experts(
            count=self.experts, per_token=self.experts_per_token, width=self.expert_ffn, gated=self.gated,
            bias=self.ffn_bias, groups=self.expert_groups, groups_per_token=self.groups_per_token,
        ) if kind.experts else None  # fmt: skip
        return Block(
            attention=(attention,),
            mlp=Mlp(width=width, gated=self.gated, bias=self.ffn_bias) if width else None,
            shared_gate=self.shared_gate and kind.experts,
            experts=experts,
            norms=self.norms_per_layer,
        )

    @classmethod
    def from_blocks(
        cls, *, hidden: int, vocab: int, blocks: Sequence[Block], pattern: Sequence[str], **more: Any
    ) -> Transformer:
        """Return a transformer of any blocks; `more` are further fields, such as `tied`.

        Fields of a single kind of layer, such as `heads`, describe the first operator of its kind.

        >>> from hpgo.model.blocks import Scan, Linear
        >>> scan = Block(name="scan", scans=(Scan(rule="ssd", heads=8, key_dim=16, value_dim=8),), linears=(
        ...     Linear(inputs=32, outputs=160, split="column"), Linear(inputs=64, outputs=32, split="row")), norms=1)
        >>> Transformer.from_blocks(hidden=32, vocab=100, blocks=[scan], pattern=["scan"] * 3).parameters
        28032
        """
        blocks = tuple(check_list("blocks", blocks, maximum=MAX_LAYERS))
        pattern = tuple(check_list("pattern", pattern, maximum=MAX_LAYERS))
        check_pattern("the transformer", blocks, pattern)
        named = {block.name: block for block in blocks}
        held = [named[name] for name in dict.fromkeys(pattern)]
        attention = next((one for block in held for one in block.attention), None)
        network = next((one for block in held for one in (block.experts, block.mlp) if one), None)
        dense = next((block.mlp for block in held if block.mlp and not block.experts), None)
        sparse = next((block for block in held if block.experts), None)
        fields: dict[str, Any] = {
            "heads": attention.heads if attention else 1,
            "kv_heads": attention.kv_heads if attention else 1,
            "head_dim": attention.head_dim if attention else 1,
            "latent": attention.latent if attention else None,
            "attention_bias": attention.bias if attention else "none",
            "head_norms": attention.head_norms if attention else False,
            "ffn": dense.width if dense else 0,
            "gated": network.gated if network else True,
            "ffn_bias": network.bias if network else False,
            "norms_per_layer": held[0].norms,
        }
        windows = {block.name: block.window for block in held if block.window}
        if windows:
            fields |= {
                "window": max(windows.values()),
                "window_layers": tuple(at for at, name in enumerate(pattern) if name in windows),
            }
        if sparse is not None and sparse.experts is not None:
            one = sparse.experts
            fields |= {
                "experts": one.count,
                "experts_per_token": one.per_token,
                "expert_ffn": one.width,
                "shared_ffn": sparse.ffn,
                "shared_gate": sparse.shared_gate,
                "expert_groups": one.groups,
                "groups_per_token": one.groups_per_token,
                "dense_layers": tuple(at for at, name in enumerate(pattern) if named[name].experts is None),
            }
        return cls(
            **{"layers": len(pattern), "hidden": hidden, "vocab": vocab, "blocks": blocks, "pattern": pattern,
               **fields, **more}
        )  # fmt: skip

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Transformer:
        """Read a Hugging Face `config.json`, a folder with one, or a file with hpgo's own keys.

        Raises ProfileError naming the file and the key that is missing, wrong or unknown (docs/profiles.md).
        """
        from hpgo.model.formats.transformers import read_transformer

        return read_transformer(source)

    def with_images(self, per_sample: int, *, patches: int | None = None, frozen: bool = False) -> Transformer:
        """Return the transformer with images in each sequence, for estimates of training.

        Args:
            per_sample: images of one sequence, whose tokens include theirs.
            patches: patches of one image before neighbors are merged; None means as many as the configuration states.
            frozen: whether the tower and its projection are not trained.

        Raises ArgumentError for a model without a tower, and for images of a size that is not known.

        >>> layer = Block(name="layer", attention=(Attention(heads=2, kv_heads=2, head_dim=4),), mlp=Mlp(width=16))
        >>> tiny = Transformer(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10,
        ...     tower=Tower(hidden=8, blocks=(layer,), pattern=("layer",), merge=4))
        >>> tiny.with_images(2, patches=16).tower.image_tokens
        8
        """
        check_int("the images of a sequence", per_sample, minimum=0)
        check_flag("frozen", frozen)
        if self.tower is None:
            raise ArgumentError(
                f"transformer `{shorten(self.name)}` has no tower, so sequences have no images",
                "leave out images, patches and freezing, or give the configuration of the whole model",
                code="unsupported",
            )
        size = self.tower.patches if patches is None else check_int("the patches of an image", patches)
        return replace(self, tower=replace(self.tower, images=per_sample, patches=size, frozen=frozen))

    @cached_property
    def kinds(self) -> Mapping[Kind, int]:
        """Number of layers of each kind, without those for multi-token prediction."""
        return Counter(map(self.kind, range(self.layers)))

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(count for kind, count in self.kinds.items() if kind.experts)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over a token."""
        return self.hidden * (2 if self.centred_norms else 1)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of one layer, counted from 0. Raise ArgumentError if there is no such layer."""
        return self.kind_parameters(self.kind(layer))

    def kind_parameters(self, kind: Kind) -> int:
        """Return the parameters of one layer of a kind. Raise ArgumentError if `kind` is not a Kind."""
        found = self.block(kind).parameters(self.hidden, norm=self.norm_parameters)
        return found + (self.joining_parameters + 3 * self.norm_parameters if kind.further else 0)

    @property
    def joining_parameters(self) -> int:
        """Parameters of the matrix that joins embedding and previous result in a multi-token prediction layer.

        Beside the matrix, such a layer has three more norms: of both inputs and of its result.
        """
        return 2 * self.hidden * self.hidden

    @property
    def embedding_rows(self) -> int:
        """Rows of the matrix in which tokens are looked up; 0 if there is none."""
        return self.vocab if self.embeds else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer, without a tower: of tokens and positions, and of what follows them."""
        return (self.embedding_rows + self.positions) * self.hidden + self._end_parameters(self.before)

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer: of the norms and of the LM head, unless the embedding has these."""
        words = 0 if self.tied else self.vocab * self.hidden
        return words + self.final_norms * self.norm_parameters + self._end_parameters(self.after)

    def _end_parameters(self, block: Block | None) -> int:
        return 0 if block is None else block.parameters(self.hidden, norm=self.norm_parameters)

    def parameters_by_part(self) -> dict[str, int]:
        """Return the parameters of the whole model by part.

        >>> tiny = Transformer(
        ...     layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=0, vocab=10, experts=4, experts_per_token=1,
        ...     expert_ffn=16)
        >>> tiny.parameters_by_part()["experts"]
        3072
        """
        h, held = self.hidden, [(self.block(kind), count) for kind, count in self.kinds.items()]
        sparse = [(block.experts, count) for block, count in held if block.experts is not None]
        mixers = "attention" if all(block.attention or not block.scans for block, _ in held) else "attention and scans"
        found = {
            "tower": 0 if self.tower is None else self.tower.parameters,
            "embedding": self.embedding_parameters,
            mixers: sum(count * block.mixer_parameters(h) for block, count in held),
            "feed-forward": sum(count * block.network_parameters(h) for block, count in held),
            "router": sum(count * one.router_parameters(h) for one, count in sparse),
            "experts": sum(count * one.count * one.each_parameters(h) for one, count in sparse),
            "norms": (sum(count * block.norms for block, count in held) + self.final_norms) * self.norm_parameters,
            "head": self.head_parameters - self.final_norms * self.norm_parameters,
        }
        return found if found["tower"] else {name: count for name, count in found.items() if name != "tower"}

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
        idle = sum(count * self.block(kind).idle_parameters(self.hidden) for kind, count in self.kinds.items())
        return self.parameters - idle
