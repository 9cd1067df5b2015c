"""What experts add: products of routed rows, bringing rows to them and back, parameters and memory.

A layer has `experts` networks, of which each token goes through `experts_per_token`, and GPUs that share a layer's
experts hold whole ones. Tokens are taken to be spread evenly, over GPUs and over experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from hpgo.ways.site import VALUE

if TYPE_CHECKING:
    from hpgo.ways.site import Site


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch."""

    forward_s: float
    backward_s: float
    """Without what is computed anew."""
    anew_s: float | None = None
    """What it takes to compute the forward anew; None is `forward_s`."""
    weights_s: float = 0.0
    """Of the backward, gradients of weights, which no other stage waits for."""

    @property
    def again_s(self) -> float:
        """What computing it anew takes."""
        return self.forward_s if self.anew_s is None else self.anew_s


def routed_tokens(site: Site) -> float:
    """Tokens of a micro-batch that one GPU sends to experts: those that share matrices have a part each."""
    return site.tokens / site.between


def routed_rows(site: Site) -> float:
    """Of a micro-batch, for the experts of one GPU: a row for each token and expert of its own."""
    return routed_tokens(site) * site.model.experts_per_token


def expert_weights(site: Site) -> float:
    """Parameters of a layer's experts on one GPU."""
    if not site.kind.experts:
        return 0.0
    return site.model.experts / site.way.expert * site.model.expert_parameters


def kept_by_experts(site: Site, each: float) -> float:
    """Bytes that a layer keeps of one micro-batch: inputs of experts, what is between their matrices, and scores.

    Inputs of products are kept in `each` bytes a value.
    """
    if not site.kind.experts:
        return 0.0
    model = site.model
    row = each * (model.hidden + model.expert_ffn) + VALUE * site.inner * model.expert_ffn
    return routed_rows(site) * row + 8 * routed_tokens(site) * model.experts


def experts(site: Site) -> Pass:
    """Products of routed rows with the matrices of their experts, in one kernel for all experts of a GPU."""
    if not site.kind.experts:
        return Pass(0.0, 0.0)
    model, constants = site.model, site.constants
    mine = model.experts / site.way.expert
    each = routed_rows(site) / mine

    def grouped_s(width: float, terms: float) -> float:
        all_s = site.product_s(each, width, terms, count=mine) - constants.kernel_s
        return all_s / constants.grouped + constants.kernel_s

    forward_s = grouped_s(site.inner * model.expert_ffn, model.hidden) + grouped_s(model.hidden, model.expert_ffn)
    return Pass(forward_s, 2 * forward_s, weights_s=forward_s)


def routing(site: Site) -> Pass:
    """Scores of all experts for each token; rows put in the experts' order and back, weighed, and their activations."""
    if not site.kind.experts:
        return Pass(0.0, 0.0)
    model, tokens = site.model, routed_tokens(site)
    product_s = site.product_s(tokens, model.experts, model.hidden, wide=True)
    scores_s = product_s + site.moved_s(20 * tokens * model.experts)
    # A row is read and written on the way there and on the way back, and read once more to be summed with its weight.
    moved = routed_rows(site) * (10 * model.hidden + (2 + 2 * site.inner) * model.expert_ffn)
    moved_s = site.moved_s(moved) * site.constants.routed
    return Pass(scores_s + moved_s, 2 * scores_s + 1.5 * moved_s, weights_s=product_s)


def expert_exchange(site: Site) -> Pass:
    """Rows on their way to experts of other GPUs, and back; in the backward pass gradients, likewise."""
    once_s = 2 * _all_to_all_s(site)
    return Pass(once_s, once_s)


def _all_to_all_s(site: Site) -> float:
    """Seconds in which each GPU sends its rows to those of their experts.

    To another machine a token goes once, and is passed on there inside (DeepSeek-V3, arXiv 2412.19437, 3.2.2): to as
    many machines as its experts are on, which is bounded where it may go to some groups of experts alone.
    """
    way, model, gpus, constants = site.way, site.model, site.gpus, site.constants
    if way.expert == 1 or not site.kind.experts:
        return 0.0
    each = VALUE * model.hidden * routed_tokens(site)
    inside = each * model.experts_per_token * (way.expert - 1) / way.expert
    moved_s = inside / (gpus.inside.collective_bytes_per_s * constants.links)
    latency_s = gpus.inside.latency_s
    machines = -(-way.expert // gpus.machine)
    if machines > 1:
        met = _machines_met(model.expert_groups, model.groups_per_token, model.experts_per_token, machines)
        sent = each * met * (machines - 1) / machines
        moved_s = max(moved_s, sent / (gpus.adapter_bytes_per_s * constants.routed_adapters))
        latency_s += gpus.adapter_latency_s
    return moved_s + latency_s + constants.exchange_s


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
