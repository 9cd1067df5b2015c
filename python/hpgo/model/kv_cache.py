"""Memory of the KV cache: keys and values of the tokens that a transformer has read, which inference keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from hpgo.base.checks import check_int, check_is, choice
from hpgo.base.messages import shorten
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError
from hpgo.model.transformer import Transformer

if TYPE_CHECKING:
    from hpgo.model.blocks import Attention, Block

KvType = Literal["float32", "float16", "bfloat16", "float8"]
"""Number formats of keys and values in the cache."""
_WIDTHS: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache(Record):
    """KV cache of a number of sequences with equal numbers of tokens.

    Raises ArgumentError for a block whose cache has another form: recurrences have a state instead, an index of tokens
    has keys of its own, and encoders have no cache.

    >>> from hpgo.model.formats.transformers import transformer_of
    >>> KvCache(transformer=transformer_of("llama-3-8b"), context_length=8192).block_bytes()[0]
    33554432
    """

    transformer: Transformer
    context_length: int
    """Tokens of each sequence: of its prompt and of its answer."""
    sequences: int = 1
    """Number of sequences whose keys and values are kept at a time."""
    dtype: KvType = "bfloat16"

    def __post_init__(self) -> None:
        check_is("the transformer of a KV cache", self.transformer, Transformer, "give a `hpgo.Transformer`")
        object.__setattr__(self, "context_length", check_int("context_length", self.context_length))
        object.__setattr__(self, "sequences", check_int("sequences", self.sequences))
        choice("number format of a KV cache", self.dtype, get_args(KvType))
        for kind in self.transformer.kinds:
            self._check(self.transformer.block(kind))

    def _check(self, block: Block) -> None:
        reason = (
            "has a recurrence, whose state is not a KV cache"
            if block.scans
            else "selects tokens by an index, whose keys are not known"
            if any(one.selected for one in block.attention)
            else "is an encoder, which has no KV cache"
            if any(not one.causal for one in block.attention)
            else ""
        )
        if reason:
            named = f"block `{shorten(block.name)}`" if block.name else "a block"
            raise ArgumentError(
                f"{named} of `{shorten(self.transformer.name)}` {reason}", "plan without a KV cache", code="unsupported"
            )

    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each block, by block, on all GPUs that share it."""
        model = self.transformer
        blocks = [model.block(model.kind(layer)) for layer in range(model.layers)]
        return tuple(sum(map(self._bytes, block.attention)) for block in blocks)

    def _bytes(self, attention: Attention) -> int:
        # Attention keeps the tokens that later queries see: those of its window, or of the current chunk.
        tokens = min(one for one in (self.context_length, attention.window, attention.chunk) if one)
        latent = attention.latent
        # Latent attention keeps the latent vector, and the part of the keys that has positions and no heads.
        width = attention.keys + attention.values if latent is None else latent.kv_rank + latent.rope_dim
        return self.sequences * tokens * width * _WIDTHS[self.dtype]
