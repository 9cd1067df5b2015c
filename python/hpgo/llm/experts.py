"""What experts add: products of routed rows, bringing rows to them and back, parameters and memory.

A layer has `experts` networks, of which each token goes through `experts_per_token`, and GPUs that share a layer's
experts hold whole ones. Tokens are taken to be spread evenly, over GPUs and over experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from hpgo.llm.layer_context import VALUE

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext


@dataclass(frozen=True, slots=True)
class PassTime:
    """PassTimes of one micro-batch."""

    forward_s: float
    backward_s: float
    """Without what is computed anew."""
    recompute_s: float | None = None
    """What it takes to compute the forward anew; None is `forward_s`."""
    weight_grad_s: float = 0.0
    """Of the backward, gradients of weights, which no other stage waits for."""

    @property
    def recompute_s(self) -> float:
        """What computing it anew takes."""
        return self.forward_s if self.recompute_s is None else self.recompute_s


def routed_tokens(context: LayerContext) -> float:
    """Tokens of a micro-batch that one GPU sends to experts: those that share matrices have a part each."""
    return context.tokens / context.between


def routed_rows(context: LayerContext) -> float:
    """Of a micro-batch, for the experts of one GPU: a row for each token and expert of its own."""
    return routed_tokens(context) * context.model.experts_per_token


def expert_weights(context: LayerContext) -> float:
    """Parameters of a layer's experts on one GPU."""
    if not context.kind.experts:
        return 0.0
    return context.model.experts / context.config.ep * context.model.expert_parameters


def kept_by_experts(context: LayerContext, each: float) -> float:
    """Bytes that a layer keeps of one micro-batch: inputs of experts, what is between their matrices, and scores.

    Inputs of products are kept in `each` bytes a value.
    """
    if not context.kind.experts:
        return 0.0
    model = context.model
    row = each * (model.hidden + model.expert_ffn) + VALUE * context.inner * model.expert_ffn
    return routed_rows(context) * row + 8 * routed_tokens(context) * model.experts


def experts(context: LayerContext) -> PassTime:
    """Products of routed rows with the matrices of their experts, in one kernel for all experts of a GPU."""
    if not context.kind.experts:
        return PassTime(0.0, 0.0)
    model, constants = context.model, context.constants
    mine = model.experts / context.config.ep
    each = routed_rows(context) / mine

    def grouped_s(width: float, terms: float) -> float:
        all_s = context.product_s(each, width, terms, count=mine) - constants.gemm_overhead_s
        return all_s / constants.grouped_gemm_efficiency + constants.gemm_overhead_s

    forward_s = grouped_s(context.inner * model.expert_ffn, model.hidden) + grouped_s(model.hidden, model.expert_ffn)
    return PassTime(forward_s, 2 * forward_s, weight_grad_s=forward_s)


def router(context: LayerContext) -> PassTime:
    """Scores of all experts for each token; rows put in the experts' order and back, weighed, and their activations."""
    if not context.kind.experts:
        return PassTime(0.0, 0.0)
    model, tokens = context.model, routed_tokens(context)
    product_s = context.product_s(tokens, model.experts, model.hidden, wide=True)
    scores_s = product_s + context.moved_s(20 * tokens * model.experts)
    # A row is read and written on the way there and on the way back, and read once more to be summed with its weight.
    moved = routed_rows(context) * (10 * model.hidden + (2 + 2 * context.inner) * model.expert_ffn)
    moved_s = context.moved_s(moved) * context.constants.routed_row_factor
    return PassTime(scores_s + moved_s, 2 * scores_s + 1.5 * moved_s, weight_grad_s=product_s)


def ep_all_to_all(context: LayerContext) -> PassTime:
    """LayerCosts on their way to experts of other GPUs, and back; in the backward pass gradients, likewise."""
    once_s = 2 * _all_to_all_s(context)
    return PassTime(once_s, once_s)


def _all_to_all_s(context: LayerContext) -> float:
    """PassTimes in which each GPU sends its rows to those of their experts.

    To another machine a token goes once, and is passed on there inside (DeepSeek-V3, arXiv 2412.19437, 3.2.2): to as
    many machines as its experts are on, which is bounded where it may go to some groups of experts alone.
    """
    config, model, gpus, constants = context.config, context.model, context.gpus, context.constants
    if config.ep == 1 or not context.kind.experts:
        return 0.0
    each = VALUE * model.hidden * routed_tokens(context)
    inside = each * model.experts_per_token * (config.ep - 1) / config.ep
    moved_s = inside / (gpus.inside.collective_bytes_per_s * constants.nvlink_efficiency)
    latency_s = gpus.inside.latency_s
    machines = -(-config.ep // gpus.machine)
    if machines > 1:
        met = _machines_met(model.expert_groups, model.groups_per_token, model.experts_per_token, machines)
        sent = each * met * (machines - 1) / machines
        moved_s = max(moved_s, sent / (gpus.adapter_bytes_per_s * constants.all_to_all_nic_efficiency))
        latency_s += gpus.adapter_latency_s
    return moved_s + latency_s + constants.collective_overhead_s


def _machines_met(groups: int, groups_per_token: int, experts_per_token: int, machines: int) -> float:
    """On how many machines the experts of a token are, where chance picks its groups, and its experts of these.

    >>> [round(_machines_met(*how), 2) for how in ((1, 1, 8, 8), (8, 4, 8, 8), (8, 4, 8, 4))]
    [5.25, 3.6, 2.91]
    """
    if groups % machines:
        # A group is on several machines, or begins in the midst of one.
        reach = max(1.0, machines * groups_per_token / groups)
        return reach * (1 - (1 - 1 / reach) ** experts_per_token)
    here = groups // machines
    missed = 0.0  # how likely it is that a machine has none of them
    for chosen in range(min(here, groups_per_token) + 1):
        likely = comb(here, chosen) * comb(groups - here, groups_per_token - chosen) / comb(groups, groups_per_token)
        missed += likely * (1 - chosen / groups_per_token) ** experts_per_token
    return machines * (1 - missed)
