"""Modules that selective recomputation repeats: the bytes that a layer then does not save, and the seconds it takes.

Megatron-LM names them in `--recompute-modules` (`recompute_modules` of transformer_config.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.experts import expert_width, routed_rows, saved_by_experts
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.matrices import expanded_s, network_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.llm.experts import PassTime
    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import ParallelismConfig, RecomputedModule


class Module(NamedTuple):
    """A part of a layer that the backward pass may compute again."""

    saved: Callable[[LayerContext, float], float]
    """Function that returns the bytes it saves of one micro-batch, given the bytes of a GEMM input."""
    repeated: Callable[[LayerContext, Mapping[str, PassTime]], dict[str, float]]
    """Function that returns the seconds to compute it again by term key, given the terms of the layer."""


def _norms(context: LayerContext) -> int:
    # Other norms are fused with the GEMM after them, which computes them again in any case.
    return (1 if context.kind.experts else 0) + (1 if context.block.latent is not None else 0)


def _norm_results(context: LayerContext, each: float) -> float:
    return _norms(context) * each * context.tokens * context.model.hidden / context.between


def _norms_s(context: LayerContext, _: Mapping[str, PassTime]) -> dict[str, float]:
    moved = 2 * VALUE * _norms(context) * context.tokens * context.model.hidden / context.between
    return {"elementwise": context.moved_s(moved)}


def _expanded(context: LayerContext, _: float) -> float:
    widths = sum(one.queries + one.keys + one.values for one in context.block.attention if one.latent is not None)
    return VALUE * context.tokens * widths / context.config.tp


def _expand_s(context: LayerContext, _: Mapping[str, PassTime]) -> dict[str, float]:
    held = [(one, one.latent) for one in context.block.attention if one.latent is not None]
    gemms_s = sum(expanded_s(context, one, latent) for one, latent in held)
    return {"linear": gemms_s, "elementwise": context.moved_s(2 * _expanded(context, VALUE))} if held else {}


def _network(context: LayerContext, each: float) -> float:
    block = context.block
    return context.tokens * (VALUE * block.inner + each) * block.ffn / context.config.tp


def _network_s(context: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    if (mlp := context.block.mlp) is None:
        return {}
    moved_s = context.moved_s((4 + 2 * (mlp.inner - 1)) * context.tokens * (mlp.width / context.config.tp))
    # Tensor-parallel GPUs exchange the network's inputs and results again, its part of a layer's communication.
    again_s = passes["tp_comm"].recompute_s / context.block.parts
    return {"linear": network_s(context, mlp), "elementwise": moved_s, "tp_comm": again_s}


def _dense(context: LayerContext, each: float) -> float:
    return 0.0 if context.kind.experts else _network(context, each)


def _dense_s(context: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    return {} if context.kind.experts else _network_s(context, passes)


def _shared(context: LayerContext, each: float) -> float:
    return _network(context, each) if context.kind.experts else 0.0


def _shared_s(context: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    return _network_s(context, passes) if context.kind.experts else {}


def _rows(context: LayerContext, each: float) -> float:
    sparse = context.block.experts
    return 0.0 if sparse is None else each * routed_rows(context, sparse) * expert_width(context, sparse)


def _rows_s(context: LayerContext, _: Mapping[str, PassTime]) -> dict[str, float]:
    if (sparse := context.block.experts) is None:
        return {}
    moved = routed_rows(context, sparse) * 2 * (1 + sparse.inner) * expert_width(context, sparse)
    return {"router": context.moved_s(moved) * context.constants.routed_row_factor}


def _experts(context: LayerContext, each: float) -> float:
    return saved_by_experts(context, each) + _shared(context, each)


def _experts_s(context: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    again_s = {key: passes[key].recompute_s for key in ("experts", "router", "ep_all_to_all")}
    return again_s | _shared_s(context, passes)


def _attention_result(context: LayerContext, _: float) -> float:
    # Fused attention saves its inputs and its result, and no scores. The GEMM after it needs the inputs' width of the
    # result in any case, so only a second copy in 16 bits, beside a narrow GEMM input, can be dropped. The softmax
    # statistics, 4 bytes per token and head, are not counted in either case.
    if not (context.config.flash_attention and context.config.precision in NARROW):
        return 0.0
    return VALUE * context.tokens * context.block.rows / context.config.tp


def _attention_s(_: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    return {"attention": passes["attention"].recompute_s}


MODULES: dict[str, Module] = {
    "core_attn": Module(_attention_result, _attention_s),
    "layernorm": Module(_norm_results, _norms_s),
    "mla_up_proj": Module(_expanded, _expand_s),
    "mlp": Module(_dense, _dense_s),
    "moe": Module(_experts, _experts_s),
    "moe_act": Module(_rows, _rows_s),
    "shared_experts": Module(_shared, _shared_s),
}
"""Modules by their names in Megatron-LM. `mlp` is the network of layers without experts, `layernorm` are norms that no
GEMM is fused with: before experts, and before latent attention. `saved_activation_bytes` counts the scores of
`core_attn`, which fused attention never saves."""
SAVES_NOTHING = (
    "fused attention saves no scores, so recomputing core attention frees no memory, but Megatron-LM still computes it"
    " again"
)
"""Warning for configurations of which `recomputes_in_vain` is True."""


def recomputes_in_vain(config: ParallelismConfig) -> bool:
    """Return whether a configuration recomputes core attention although that saves no memory.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> vain = ParallelismConfig(recompute="selective", recompute_modules=("core_attn", "mlp"))
    >>> from dataclasses import replace
    >>> [recomputes_in_vain(replace(vain, precision=name)) for name in ("bf16", "fp8")]
    [True, False]
    """
    recomputed = config.recompute == "selective" and "core_attn" in (config.recompute_modules or ("core_attn",))
    return recomputed and config.flash_attention and config.precision not in NARROW


_PARTS_OF_EXPERTS = ("moe_act", "shared_experts")


def without_parts(names: tuple[RecomputedModule, ...]) -> tuple[RecomputedModule, ...]:
    """Return modules without those that are parts of another one.

    >>> without_parts(("moe_act", "moe", "layernorm"))
    ('moe', 'layernorm')
    """
    return tuple(name for name in names if not ("moe" in names and name in _PARTS_OF_EXPERTS))


def _selected(context: LayerContext) -> list[Module]:
    return [MODULES[name] for name in without_parts(context.config.recompute_modules)]


def dropped_bytes(context: LayerContext, each: float) -> float:
    """Return the bytes that a layer does not save because its modules are recomputed; a GEMM input has `each` bytes."""
    return sum(module.saved(context, each) for module in _selected(context))


def repeated_s(context: LayerContext, passes: Mapping[str, PassTime]) -> dict[str, float]:
    """Return the seconds by which recomputed modules lengthen the backward pass of a layer, by term key."""
    found: dict[str, float] = {}
    for module in _selected(context):
        for key, seconds in module.repeated(context, passes).items():
            found[key] = found.get(key, 0.0) + seconds
    return found
