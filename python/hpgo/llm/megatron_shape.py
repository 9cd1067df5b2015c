"""Shape of a transformer as Megatron-LM's options describe it: one attention, one network, one scan for all layers.

Two scripts build models. `pretrain_gpt.py` builds layers of a mixer and a network: attention, or a gated delta net.
`pretrain_mamba.py` builds a pattern of letters, each of which is one part of a layer: a Mamba 2 scan, attention, a
dense network, or experts.

Source: `gpt_builders.py`, `mamba_builders.py`, `megatron/core/ssm` and `megatron/core/transformer` of Megatron-LM
0.16.1 to 0.19.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from hpgo.base.messages import pluralize
from hpgo.base.validated import Record
from hpgo.model.blocks import Attention, Block, Conv, Experts, Linear, Mlp, Scan, Vector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.model.transformer import Transformer

T = TypeVar("T")

_MAMBA_CONV = 4
"""Width of the convolution of Megatron-LM's Mamba 2 scan, which no option changes (`d_conv` in `mamba_mixer.py`)."""
MAMBA, ATTENTION, MLP, EXPERTS, CUT = "M", "*", "-", "E", "|"
"""Letters of `--hybrid-layer-pattern`."""


class NoShapeError(Exception):
    """A model has a property without an option. The message follows "has no settings for"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShape(Record):
    """The operators that Megatron-LM's options describe, and the layers that have them."""

    attention: Attention | None
    """Attention of all layers that have one, without a window."""
    window: int
    """Number of tokens in the attention window of layers with a window; 0 if none has one."""
    scan: Scan | None
    conv: Conv | None
    """Convolution before the scan."""
    mlp: Mlp | None
    """Network of layers without experts."""
    experts: Experts | None
    shared: Mlp | None
    """Shared experts."""
    shared_gate: bool
    gated: bool
    """Whether networks and experts have a third matrix."""
    bias: bool
    """Whether all matrices have biases, those of experts and of the router included."""
    hybrid: bool
    """Whether `pretrain_mamba.py` builds the model from a pattern of letters."""


def megatron_shape(model: Transformer) -> MegatronShape:
    """Return the shape of a model. Raise NoShapeError for a property that has no option.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> megatron_shape(TRANSFORMERS["llama-3-8b"]).attention.kv_heads
    8
    """
    if model.tower is not None:
        raise NoShapeError("a tower in front of the decoder")
    blocks = list(dict.fromkeys(model.block(kind) for kind in model.kinds))
    for block in blocks:
        _check_mixer(block)
        if block.norms != block.parts:
            raise NoShapeError(f"{pluralize(block.norms, 'norm')} per layer")
    sparse = [block for block in blocks if block.experts is not None]
    dense = [block.mlp for block in blocks if block.experts is None and block.mlp is not None]
    attention = _only("attention", (replace(one, window=0) for block in blocks for one in block.attention))
    experts = _only("experts", (block.experts for block in sparse if block.experts is not None))
    shared = _only("shared experts", (block.mlp for block in sparse if block.mlp is not None))
    mlp = _only("feed-forward networks", dense)
    networks = [one for one in (mlp, experts, shared) if one is not None]
    gated = _only("gates of feed-forward networks", (one.gated for one in networks))
    scan = _only("scans", (one for block in blocks for one in block.scans))
    hybrid = any(block.parts == 1 or any(one.rule == "ssd" for one in block.scans) for block in blocks)
    found = MegatronShape(
        attention=attention,
        window=_only("windows", (one.window for block in blocks for one in block.attention if one.window)) or 0,
        scan=scan,
        conv=_only("convolutions", (one for block in blocks for one in block.convs)),
        mlp=mlp,
        experts=experts,
        shared=shared,
        shared_gate=any(block.shared_gate for block in sparse),
        gated=True if gated is None else gated,
        bias=_bias(attention, mlp, experts, shared),
        hybrid=hybrid,
    )
    _check_rest(found, model, blocks)
    return found


def _only(what: str, values: Iterable[T]) -> T | None:
    """Return the value that all layers have, or None without any."""
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        raise NoShapeError(f"{what} that differ between layers")
    return found[0] if found else None


def _check_mixer(block: Block) -> None:
    """Raise NoShapeError for an attention or scan of a kind that Megatron-LM lacks."""
    for one in block.attention:
        odd = (
            (one.chunk, "attention in chunks of tokens"),
            (one.selected, "an index that selects tokens"),
            (not one.causal, "attention to later tokens"),
            (one.latent is None and one.value_dim != one.head_dim, "values of another width than keys"),
            (one.latent is not None and (one.gate or one.sinks), "a gate or sinks in latent attention"),
        )
        for is_odd, what in odd:
            if is_odd:
                raise NoShapeError(what)
    for scan in block.scans:
        if scan.rule not in {"ssd", "gated_delta"}:
            raise NoShapeError({"mamba1": "scans of Mamba 1"}.get(scan.rule, "linear attention"))
    if len(block.attention) + len(block.scans) > 1:
        raise NoShapeError("several mixers side by side in a layer")
    if block.convs and not block.scans:
        raise NoShapeError("convolutions without a scan")


def _bias(attention: Attention | None, mlp: Mlp | None, experts: Experts | None, shared: Mlp | None) -> bool:
    """Return whether all matrices have biases, because only one option turns all of them off."""
    found = {
        "in attention": None if attention is None or attention.latent is not None else attention.bias == "all",
        "in feed-forward networks": None if mlp is None else mlp.bias,
        "in experts": None if experts is None else experts.bias,
        "in routers": None if experts is None else experts.router_bias,
    }
    stated = {where: one for where, one in found.items() if one is not None}
    if len(set(stated.values())) > 1:
        raise NoShapeError(f"biases only {' and '.join(where for where, one in stated.items() if one)}")
    if (shared is not None and shared.bias) or (experts is not None and experts.bias and shared is not None):
        raise NoShapeError("biases of shared experts")
    has = any(stated.values())
    if has and attention is not None and attention.latent is not None:
        raise NoShapeError("biases beside latent attention")
    return has


def _check_rest(shape: MegatronShape, model: Transformer, blocks: list[Block]) -> None:
    """Raise NoShapeError for what the shape leaves out, such as further matrices and vectors of a layer."""
    attention, scan = shape.attention, shape.scan
    if shape.hybrid and scan is not None and scan.rule != "ssd":
        raise NoShapeError("layers of a gated delta net or of a feed-forward network alone")
    if shape.hybrid and attention is not None and (attention.latent or attention.head_norms or attention.gate):
        raise NoShapeError("norms, gates or latent vectors of attention in a pattern of layers with scans")
    if scan is not None and scan.rule == "ssd" and (shape.conv is None or not shape.conv.bias):
        raise NoShapeError("scans of Mamba 2 whose convolution has no biases")
    for block in blocks:
        wanted = _matrices(shape, model, block)
        held = _sorted(block.linears), _sorted(block.convs), _vectors(block.vectors)
        if held == wanted:
            continue
        if any(one.bias for one in block.linears):
            raise NoShapeError("biases of the matrices around scans")
        if held[2] != wanted[2] and not block.scans:
            raise NoShapeError("norms over the queries and keys of all heads, or further weights in a layer")
        raise NoShapeError("scans with other matrices, convolutions or norms" if block.scans else "further matrices")
    ends = [end for end in (model.before, model.after) if end is not None]
    if any(end.parameters(model.hidden, norm=model.norm_parameters) for end in ends):
        raise NoShapeError("operators beside the embedding or the LM head")
    if not model.embeds:
        raise NoShapeError("patches in place of words")
    if model.final_norms != 1:
        raise NoShapeError(f"{model.final_norms} norms after the last layer")


def _matrices(
    shape: MegatronShape, model: Transformer, block: Block
) -> tuple[tuple[Linear, ...], tuple[Conv, ...], tuple[int, int]]:
    """Return the matrices, convolutions and vectors that Megatron-LM builds around the operators of a block."""
    hidden, experts = model.hidden, block.experts
    linears: list[Linear] = []
    if experts is not None and experts.hidden:
        # `--moe-latent-size`: a matrix before the experts and one after them.
        linears += [Linear(inputs=hidden, outputs=experts.hidden), Linear(inputs=experts.hidden, outputs=hidden)]
    if not block.scans:
        return _sorted(linears), (), (0, 0)
    scan = block.scans[0]
    keys, values = scan.groups * scan.key_dim, scan.values
    rows = Linear(inputs=values, outputs=hidden, split="row")
    if scan.rule == "ssd":
        # Queries, keys, values, the gate and the step of each head; decay, skip and bias of the step; the last norm.
        columns = [Linear(inputs=hidden, outputs=2 * values + 2 * keys + scan.heads, split="column")]
        conv = Conv(channels=values + 2 * keys, width=_MAMBA_CONV, bias=True)
        return _sorted([*linears, *columns, rows]), (conv,), (3 * scan.heads + values, 0)
    columns = [
        Linear(inputs=hidden, outputs=2 * keys + 2 * values, split="column"),
        Linear(inputs=hidden, outputs=2 * scan.heads, split="column"),
    ]
    width = shape.conv.width if shape.conv is not None else 0
    conv = Conv(channels=2 * keys + values, width=width)
    return _sorted([*linears, *columns, rows]), (conv,), (2 * scan.heads, scan.value_dim)


def _sorted(rows: Iterable[T]) -> tuple[T, ...]:
    # Matrices without outputs are those of an option that a configuration does not use.
    return tuple(sorted((row for row in rows if getattr(row, "outputs", 1)), key=repr))


def _vectors(rows: Iterable[Vector]) -> tuple[int, int]:
    """Return the sizes of vectors: of those that tensor parallelism divides, and of the others."""
    rows = list(rows)
    return sum(row.size for row in rows if row.split), sum(row.size for row in rows if not row.split)


def letters(model: Transformer, counts: Iterable[int]) -> str:
    """Return `--hybrid-layer-pattern`: a letter for each part of each layer, with `|` between stages.

    `counts` are the layers of each stage.

    >>> from hpgo.model.transformer_presets import TRANSFORMERS
    >>> letters(TRANSFORMERS["mixtral-8x7b"], [1, 2])
    '*E|*E*E'
    """
    stages, at = [], 0
    for count in counts:
        stages.append("".join(_letters(model.block(model.kind(layer))) for layer in range(at, at + count)))
        at += count
    return CUT.join(stages)


def _letters(block: Block) -> str:
    mixer = MAMBA if block.scans else ATTENTION if block.attention else ""
    network = EXPERTS if block.experts is not None else MLP if block.mlp is not None else ""
    return mixer + network


def broken_degrees(model: Transformer, config: ParallelismConfig) -> str | None:
    """Return the reason why Megatron-LM can't divide the model's attention or scans; None if it can."""
    tp, cp = config.tp, config.cp
    for block in model.blocks:
        for one in block.attention:
            # Transformer Engine supports sinks with `a2a` alone, which divides heads among the ranks.
            if one.sinks and cp > 1 and (one.kv_heads % (tp * cp) or one.heads % (tp * cp)):
                return (
                    f"needs a number of KV heads that tp × cp divides for attention sinks with context parallelism, but"
                    f" {one.kv_heads} KV heads are no multiple of {tp} × {cp}"
                )
        for scan in block.scans:
            if scan.heads % (tp * cp):
                return (
                    f"needs a number of scan heads that tp × cp divides, but {scan.heads} heads are no multiple of"
                    f" {tp} × {cp}"
                )
            if why := _broken_groups(scan, tp, cp):
                return why
    return None


def _broken_groups(scan: Scan, tp: int, cp: int) -> str | None:
    if scan.groups % tp:
        return f"needs a number of scan groups that tp divides, but {scan.groups} groups are no multiple of {tp}"
    each = scan.groups // tp
    # The groups of Mamba 2 are copied if there are fewer than ranks; those of the gated delta net are not.
    if each % cp and (scan.rule != "ssd" or cp % each):
        return (
            f"needs a number of scan groups that tp × cp divides, but {scan.groups} groups are no multiple of"
            f" {tp} × {cp}"
        )
    return None
