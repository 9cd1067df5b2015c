"""Terms that experts add: their GEMMs, the router, the all-to-all, and their memory.

A layer has `experts` networks, of which each token uses `experts_per_token`. GPUs of an expert-parallel group hold
whole experts. Tokens are assumed to be spread evenly over GPUs and experts, which routers are trained for.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.layer_context import VALUE

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext


class PassTime(NamedTuple):
    """Seconds that a term adds to the passes of one micro-batch."""

    forward_s: float
    backward_s: float
    """Seconds of the backward pass without recomputation."""
    recomputed_s: float | None = None
    """Seconds to repeat the forward pass. None means `forward_s`."""
    weight_grad_s: float = 0.0
    """Part of `backward_s` that computes gradients of weights, for which no other stage waits."""

    @property
    def recompute_s(self) -> float:
        """Seconds to repeat the forward pass."""
        return self.forward_s if self.recomputed_s is None else self.recomputed_s

    def scaled(self, factor: float) -> PassTime:
        """Return the term with all its times multiplied by `factor`."""
        return PassTime(
            factor * self.forward_s, factor * self.backward_s, factor * self.recompute_s, factor * self.weight_grad_s
        )


NOTHING = PassTime(0.0, 0.0)


def routed_tokens(context: LayerContext) -> float:
    """Return the tokens of a micro-batch that one GPU sends to experts: tensor parallelism divides them."""
    return context.tokens / context.between


def routed_rows(context: LayerContext) -> float:
    """Return the rows that one GPU's experts compute: one for each token and each of its experts."""
    return routed_tokens(context) * context.model.experts_per_token


def expert_weights(context: LayerContext) -> float:
    """Return the parameters of a layer's experts on one GPU."""
    if not context.kind.experts:
        return 0.0
    return context.model.experts / context.config.ep * context.model.expert_parameters


def saved_by_experts(context: LayerContext, each: float) -> float:
    """Return the bytes that a layer saves of one micro-batch: expert inputs, inner values and router scores.

    `each` is the number of bytes of a GEMM input.
    """
    if not context.kind.experts:
        return 0.0
    model = context.model
    # A row saves the inputs of both GEMMs, and the results of the first one for the activation's backward pass. The
    # router adds 8 bytes per token and expert: scores and probabilities in fp32.
    row = each * (model.hidden + model.expert_ffn) + VALUE * context.inner * model.expert_ffn
    return routed_rows(context) * row + 8 * routed_tokens(context) * model.experts


def experts(context: LayerContext) -> PassTime:
    """Return the time of the experts' GEMMs. One kernel computes all experts of a GPU."""
    if not context.kind.experts:
        return NOTHING
    model, constants = context.model, context.constants
    mine = model.experts / context.config.ep
    each = routed_rows(context) / mine

    # `grouped_gemm_efficiency` scales the rate only. The launch overhead is that of any kernel, so it is excluded.
    def grouped_s(width: float, terms: float) -> float:
        all_s = context.gemm_s(each, width, terms, count=mine) - constants.gemm_overhead_s
        return all_s / constants.grouped_gemm_efficiency + constants.gemm_overhead_s

    forward_s = grouped_s(context.inner * model.expert_ffn, model.hidden) + grouped_s(model.hidden, model.expert_ffn)
    return PassTime(forward_s, 2 * forward_s, weight_grad_s=forward_s)


def router(context: LayerContext) -> PassTime:
    """Return the time of router scores, of the permutation of rows to expert order and back, and of activations."""
    if not context.kind.experts:
        return NOTHING
    model, tokens = context.model, routed_tokens(context)
    # Frameworks do not run the router's GEMM in FP8 or FP4, since a small error would change the chosen experts.
    gemm_s = context.gemm_s(tokens, model.experts, model.hidden, wide=True)
    scores_s = gemm_s + context.moved_s(20 * tokens * model.experts)
    # Each permutation reads and writes a row. The weighted sum reads it once more.
    moved = routed_rows(context) * (10 * model.hidden + (2 + 2 * context.inner) * model.expert_ffn)
    moved_s = context.moved_s(moved) * context.constants.routed_row_factor
    return PassTime(scores_s + moved_s, 2 * scores_s + 1.5 * moved_s, weight_grad_s=gemm_s)


def ep_all_to_all(context: LayerContext) -> PassTime:
    """Return the time of dispatch and combine. The backward pass sends the same bytes of gradients."""
    once_s = 2 * context.constants.all_to_all_time_factor * _all_to_all_s(context)
    return PassTime(once_s, once_s)


def _all_to_all_s(context: LayerContext) -> float:
    """Return the seconds in which each GPU sends its rows to the GPUs of their experts.

    A token is sent to another node once, and is forwarded inside that node (DeepSeek-V3, arXiv 2412.19437, 3.2.2). So
    the bytes between nodes follow from the number of nodes that hold experts of the token.
    """
    config, model, gpus, constants = context.config, context.model, context.gpus, context.constants
    if config.ep == 1 or not context.kind.experts:
        return 0.0
    each = VALUE * model.hidden * routed_tokens(context)
    inside = each * model.experts_per_token * (config.ep - 1) / config.ep
    moved_s = inside / (gpus.inside.collective_bytes_per_s * constants.nvlink_efficiency)
    latency_s = gpus.inside.latency_s
    nodes = -(-config.ep // gpus.gpus_per_node)
    if nodes > 1:
        # Both legs of a token's route run at the same time for different tokens, so the slower one decides.
        met = _nodes_met(model.expert_groups, model.groups_per_token, model.experts_per_token, nodes)
        sent = each * met * (nodes - 1) / nodes
        moved_s = max(moved_s, sent / (gpus.adapter_bytes_per_s * constants.all_to_all_nic_efficiency))
        latency_s += gpus.adapter_latency_s
    return moved_s + latency_s + constants.collective_overhead_s


def _nodes_met(groups: int, groups_per_token: int, experts_per_token: int, nodes: int) -> float:
    """Return the expected number of nodes that hold experts of a token, if its groups and experts are random.

    >>> [round(_nodes_met(*case), 2) for case in ((1, 1, 8, 8), (8, 4, 8, 8), (8, 4, 8, 4))]
    [5.25, 3.6, 2.91]
    """
    if groups % nodes:
        # A group spans several nodes or starts in the middle of one, so whole groups cannot be counted. Treat the
        # token's groups as a number of nodes of which each expert picks one at random.
        reach = max(1.0, nodes * groups_per_token / groups)
        return reach * (1 - (1 - 1 / reach) ** experts_per_token)
    here = groups // nodes
    # Add up the probability that a node holds none of the token's experts, over the number of its groups that the token
    # chose: a hypergeometric distribution, since groups are drawn without replacement.
    missed = 0.0
    for chosen in range(min(here, groups_per_token) + 1):
        likely = comb(here, chosen) * comb(groups - here, groups_per_token - chosen) / comb(groups, groups_per_token)
        missed += likely * (1 - chosen / groups_per_token) ** experts_per_token
    return nodes * (1 - missed)
