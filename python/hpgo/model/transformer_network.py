"""Operations of a transformer, derived from its shape, for the counts of `hpgo.model.operations`.

The rotation of queries and keys is left out, since fused kernels do it without extra memory traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError
from hpgo.hardware.rates import WIDTHS
from hpgo.model.operations import Network, Operation, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.model.blocks import Latent
    from hpgo.model.transformer import Transformer


DTYPE = "bfloat16"
"""Number format that is assumed for a shape without one."""


class TransformerShape:
    """Builder of a transformer's network for any batch size."""

    batch_size = None
    """Always None: a shape does not fix the batch size."""

    def __init__(self, transformer: Transformer, description: str) -> None:
        """Use `description` as the name in messages."""
        self.name, self.file, self._transformer = transformer.name, description, transformer

    def at(self, batch_size: int, dims: Mapping[str, int], width: float | None) -> Network:
        """Return the operations of a step over `batch_size` sequences, with `width` bytes per value.

        `dims` must give the sequence length as `tokens`. Raises ArgumentError if it does not, or if it has other names.

        >>> from hpgo.model.transformer import Transformer
        >>> tiny = Transformer(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=256, vocab=1000)
        >>> network = TransformerShape(tiny, "tiny").at(1, {"tokens": 8}, 2)
        >>> sum(one.size for one in network.tensors.values() if one.is_weight) == tiny.parameters
        True
        """
        for name in dims:
            if name != "tokens":
                raise ArgumentError(
                    f"`{shorten(name)}` is not a dimension of {self.file}",
                    "set `tokens`, the sequence length, which is the only one",
                    code="unknown_name",
                )
        if "tokens" not in dims:
            usual = self._transformer.longest or 4096
            raise ArgumentError(
                f"the sequence length of {self.file} is not given",
                f"give it as dims={{'tokens': {usual}}}; on the command line `--dim tokens={usual}`",
            )
        tokens, longest = dims["tokens"], self._transformer.positions
        if longest and tokens > longest:
            raise ArgumentError(
                f"{self.file} has positions for {longest:,} tokens, but `tokens` is {tokens:,}",
                f"set `tokens` to at most {longest}",
            )
        if self._transformer.further_tokens:
            raise ArgumentError(
                f"{self.file} has multi-token prediction layers, whose operations can't be estimated",
                "set further_tokens to 0, which is num_nextn_predict_layers in a config.json",
                code="unsupported",
            )
        if self._transformer.blocks:
            raise ArgumentError(
                f"{self.file} has blocks of its own, whose operations can't be estimated one by one",
                "use `hpgo llm estimate`, whose terms cover all kinds of blocks",
                code="unsupported",
            )
        build = _Builder(batch_size, tokens, width or WIDTHS[DTYPE])
        return Network(tuple(build.whole(self._transformer)), build.tensors, build.roots, DTYPE)


class _Builder:
    """Operations in execution order, and tensors by name."""

    def __init__(self, batch_size: int, tokens: int, width: float) -> None:
        self._batch, self._tokens, self._width = batch_size, tokens, width
        self._operations: list[Operation] = []
        self.tensors: dict[str, Tensor] = {}
        self.roots: dict[str, str] = {}

    def whole(self, model: Transformer) -> list[Operation]:
        """Return all operations from the tokens to the loss."""
        rows = (self._batch, self._tokens)
        self.tensors["tokens"] = Tensor(rows, 8)
        table = self._weight("embedding.weight", model.vocab, model.hidden)
        x = self._do("Gather", "embedding", (table, "tokens"), (*rows, model.hidden))
        if model.positions:
            places = self._weight("positions.weight", model.positions, model.hidden)
            x = self._do("Add", "positions", (x, places), (*rows, model.hidden))
        for layer in range(model.layers):
            x = self._feed_forward(model, layer, self._attention(model, layer, x))
        x = self._norm(model, "norm", x)
        if model.tied:
            # The head is the embedding's weight under another name: the common root makes it count once.
            head = "head.weight"
            self.tensors[head], self.roots[head] = self.tensors[table], table
        else:
            head = self._weight("head.weight", model.hidden, model.vocab)
        logits = self._do("MatMul", "head", (x, head), (*rows, model.vocab))
        self._do("SoftmaxCrossEntropyLoss", "loss", (logits, "tokens"), ())
        return self._operations

    def _weight(self, name: str, *shape: int) -> str:
        self.tensors[name] = Tensor(shape, self._width, trained=True, is_weight=True)
        self.roots[name] = name
        return name

    def _do(self, kind: str, name: str, inputs: tuple[str, ...], shape: tuple[int, ...], **attributes: object) -> str:
        """Add an operation with one trained result, and return the result's name."""
        result = f"{name}.out"
        self.tensors[result] = Tensor(shape, self._width, trained=True)
        self._operations.append(Operation(kind, name, inputs, (result,), attributes))
        return result

    def _norm(self, model: Transformer, name: str, x: str, width: int = 0) -> str:
        weights = [self._weight(f"{name}.weight", width or model.hidden)]
        if model.centred_norms:
            weights.append(self._weight(f"{name}.bias", width or model.hidden))
        kind = "LayerNormalization" if model.centred_norms else "RMSNormalization"
        return self._do(kind, name, (x, *weights), self.tensors[x].shape)

    def _linear(self, name: str, x: str, width: int, *, bias: bool = False) -> str:
        *rows, terms = self.tensors[x].shape
        output = self._do("MatMul", name, (x, self._weight(f"{name}.weight", terms, width)), (*rows, width))
        if not bias:
            return output
        return self._do("Add", f"{name}.bias", (output, self._weight(f"{name}.bias", width)), (*rows, width))

    def _heads(self, name: str, x: str, heads: int, dim: int) -> str:
        return self._do("Reshape", f"{name}.heads", (x,), (self._batch, heads, self._tokens, dim))

    def _attention(self, model: Transformer, layer: int, x: str) -> str:
        at = f"layers.{layer}.attention"
        normed = self._norm(model, f"layers.{layer}.attention_norm", x)
        query, key, value = (
            self._plain(model, at, normed) if model.latent is None else self._latent(model, model.latent, at, normed)
        )
        value_dim = self.tensors[value].shape[-1]
        window = model.window if layer in model.window_layers else 0
        mixed = self._do(
            "Attention", at, (query, key, value), (self._batch, model.heads, self._tokens, value_dim),
            is_causal=1, window=window,
        )  # fmt: skip
        flat = self._do("Reshape", f"{at}.flat", (mixed,), (self._batch, self._tokens, model.heads * value_dim))
        given = self._linear(f"{at}.output", flat, model.hidden, bias=model.attention_bias == "all")
        return self._joined(model, f"layers.{layer}.attention", x, given)

    def _joined(self, model: Transformer, name: str, x: str, given: str) -> str:
        """Add the residual connection, after one more norm if layers have four."""
        if model.norms_per_layer == 4:
            given = self._norm(model, f"{name}_end_norm", given)
        return self._do("Add", f"{name}.sum", (x, given), self.tensors[x].shape)

    def _plain(self, model: Transformer, at: str, x: str) -> tuple[str, str, str]:
        bias = model.attention_bias != "none"

        def heads(name: str, count: int, *, normed: bool) -> str:
            output = self._heads(name, self._linear(name, x, count * model.head_dim, bias=bias), count, model.head_dim)
            return self._norm(model, f"{name}_norm", output, model.head_dim) if normed else output

        return (
            heads(f"{at}.query", model.heads, normed=model.head_norms),
            heads(f"{at}.key", model.kv_heads, normed=model.head_norms),
            heads(f"{at}.value", model.kv_heads, normed=False),
        )

    def _latent(self, model: Transformer, latent: Latent, at: str, x: str) -> tuple[str, str, str]:
        source = x
        if latent.q_rank is not None:
            narrow = self._linear(f"{at}.query_down", x, latent.q_rank)
            source = self._norm(model, f"{at}.query_norm", narrow, latent.q_rank)
        query = self._linear(f"{at}.query", source, model.heads * model.head_dim)
        rows = (self._batch, self._tokens)
        down = self._linear(f"{at}.key_down", x, latent.kv_rank + latent.rope_dim)
        narrow = self._do("Slice", f"{at}.latent", (down,), (*rows, latent.kv_rank))
        narrow = self._norm(model, f"{at}.key_norm", narrow, latent.kv_rank)
        plain = model.head_dim - latent.rope_dim
        wide = self._linear(f"{at}.key_value", narrow, model.heads * (plain + latent.value_dim))
        # The keys of all heads end with the same part, which carries the position.
        key = self._do("Concat", f"{at}.key", (wide, down), (*rows, model.heads * model.head_dim))
        value = self._do("Slice", f"{at}.value", (wide,), (*rows, model.heads * latent.value_dim))
        return (
            self._heads(f"{at}.query", query, model.heads, model.head_dim),
            self._heads(f"{at}.key", key, model.heads, model.head_dim),
            self._heads(f"{at}.value", value, model.heads, latent.value_dim),
        )

    def _feed_forward(self, model: Transformer, layer: int, x: str) -> str:
        at = f"layers.{layer}.ffn"
        normed = self._norm(model, f"layers.{layer}.ffn_norm", x)
        if not model.holds_experts(layer):
            return self._joined(model, at, x, self._network(model, at, normed, model.ffn))
        router = self._linear(f"{at}.router", normed, model.experts)
        routed = self._batch * self._tokens * model.experts_per_token
        taken = self._do("Gather", f"{at}.dispatch", (normed, router), (routed, model.hidden))
        given = self._network(model, f"{at}.experts", taken, model.expert_ffn, model.experts)
        given = self._do("ScatterND", f"{at}.combine", (given,), self.tensors[x].shape)
        if model.shared_ffn:
            shared = self._network(model, f"{at}.shared", normed, model.shared_ffn)
            if model.shared_gate:
                gate = self._linear(f"{at}.shared_gate", normed, 1)
                shared = self._do("Mul", f"{at}.shared_weighed", (shared, gate), self.tensors[x].shape)
            given = self._do("Add", f"{at}.both", (given, shared), self.tensors[x].shape)
        return self._joined(model, at, x, given)

    def _network(self, model: Transformer, at: str, x: str, width: int, experts: int = 0) -> str:
        """Add a feed-forward network, or `experts` networks with batched matrices, and return its result."""
        *rows, hidden = self.tensors[x].shape
        many = (experts,) if experts else ()

        def product(name: str, x: str, terms: int, width: int) -> str:
            output = self._do(
                "MatMul", f"{at}.{name}", (x, self._weight(f"{at}.{name}.weight", *many, terms, width)), (*rows, width)
            )
            if not model.ffn_bias:
                return output
            return self._do(
                "Add", f"{at}.{name}.bias", (output, self._weight(f"{at}.{name}.bias", *many, width)), (*rows, width)
            )

        inner = self._do("Gelu", f"{at}.activation", (product("up", x, hidden, width),), (*rows, width))
        if model.gated:
            inner = self._do("Mul", f"{at}.gated", (inner, product("gate", x, hidden, width)), (*rows, width))
        return product("down", inner, width, hidden)
