"""Terms that experts add: their GEMMs, the router, the all-to-all, and their memory.

A layer has several networks, of which each token uses some. GPUs of an expert-parallel group hold whole experts, unless
expert tensor parallelism divides their matrices. Tokens are assumed to be spread evenly over GPUs and experts, which
routers are trained for.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.layer_context import VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.blocks import Experts


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

    @classmethod
    def total(cls, passes: Iterable[PassTime]) -> PassTime:
        """Return the sum of passes that are repeated as they are.

        >>> PassTime.total([PassTime(1.0, 2.0), PassTime(1.0, 3.0)]).backward_s
        5.0
        """
        found = NOTHING
        for one in passes:
            found = cls(
                found.forward_s + one.forward_s, found.backward_s + one.backward_s,
                weight_grad_s=found.weight_grad_s + one.weight_grad_s,
            )  # fmt: skip
        return found


NOTHING = PassTime(0.0, 0.0)
_GATHERING, _ONCE_PER_GPU = {"allgather"}, {"deepep", "hybridep"}
"""Dispatchers that send all tokens to all GPUs, and those that send a token once to each GPU with experts of it."""
_EXCHANGE_PROCESSORS = 20
"""Streaming multiprocessors that the exchange of tokens takes from passes beside it: DeepEP's in Megatron-LM, without
`--moe-deepep-num-sms`."""


def gemm_pass(context: LayerContext, forward_s: float) -> PassTime:
    """Return the time of GEMMs with weights, given their forward pass.

    The backward pass has two GEMMs for each: for the input's gradient, and for the weight's unless it is frozen.
    """
    if context.config.lora_rank:
        return PassTime(forward_s, forward_s)
    return PassTime(forward_s, 2 * forward_s, weight_grad_s=forward_s)


def routed_tokens(context: LayerContext) -> float:
    """Return the tokens of a micro-batch that one GPU sends to experts: tensor parallelism divides them."""
    return context.tokens / context.between


def routed_rows(context: LayerContext, sparse: Experts) -> float:
    """Return the rows that one GPU's experts compute: one for each token and each of its experts.

    GPUs that divide an expert's matrices compute the rows of all of them.
    """
    return routed_tokens(context) * sparse.per_token * context.config.etp


def expert_width(context: LayerContext, sparse: Experts) -> float:
    """Return the inner width of an expert on one GPU."""
    return sparse.width / context.config.etp


def expert_weights(context: LayerContext) -> float:
    """Return the parameters of a layer's experts on one GPU."""
    if (sparse := context.block.experts) is None:
        return 0.0
    config = context.config
    return sparse.count / config.ep * sparse.each_parameters(context.model.hidden) / config.etp


def saved_by_experts(context: LayerContext, each: float) -> float:
    """Return the bytes that a layer saves of one micro-batch: expert inputs, inner values and router scores.

    `each` is the number of bytes of a GEMM input.
    """
    if (sparse := context.block.experts) is None:
        return 0.0
    # A row saves the inputs of both GEMMs, and the results of the first one for the activation's backward pass. The
    # router adds 8 bytes per token and expert: scores and probabilities in fp32. Only gradients of weights need inputs.
    width = expert_width(context, sparse)
    inputs = width * context.saves_input("linear_fc2") + token_width(context, sparse) * context.saves_input(
        "linear_fc1"
    )
    row = each * inputs + VALUE * sparse.inner * width
    return routed_rows(context, sparse) * row + 8 * routed_tokens(context) * sparse.count


def token_width(context: LayerContext, sparse: Experts) -> int:
    """Return the width of the vectors that experts read and write."""
    return sparse.hidden or context.model.hidden


def experts(context: LayerContext) -> PassTime:
    """Return the time of the experts' GEMMs. One kernel computes all experts of a GPU."""
    if (sparse := context.block.experts) is None:
        return NOTHING
    constants, h, width = context.constants, token_width(context, sparse), expert_width(context, sparse)
    mine = sparse.count / context.config.ep
    each = routed_rows(context, sparse) / mine

    # `grouped_gemm_efficiency` scales the rate only. The launch overhead is that of any kernel, so it is excluded.
    def grouped_s(columns: float, terms: float) -> float:
        all_s = context.gemm_s(each, columns, terms, count=mine) - constants.gemm_overhead_s
        return all_s / constants.grouped_gemm_efficiency + constants.gemm_overhead_s

    forward_s = grouped_s(sparse.inner * width, h) + grouped_s(h, width)
    return gemm_pass(context, forward_s)


def router(context: LayerContext) -> PassTime:
    """Return the time of router scores, of the permutation of rows to expert order and back, and of activations."""
    if (sparse := context.block.experts) is None:
        return NOTHING
    tokens = routed_tokens(context)
    # Frameworks do not run the router's GEMM in FP8 or FP4, since a small error would change the chosen experts.
    gemm_s = context.gemm_s(tokens, sparse.count, context.model.hidden, wide=True)
    scores_s = gemm_s + context.moved_s(20 * tokens * sparse.count)
    # Each permutation reads and writes a row. The weighted sum reads it once more.
    inside = (2 + 2 * sparse.inner) * expert_width(context, sparse)
    moved = routed_rows(context, sparse) * (10 * token_width(context, sparse) + inside)
    moved_s = context.moved_s(moved) * context.constants.routed_row_factor
    weight_grad_s = 0.0 if context.config.lora_rank else gemm_s
    backward_s = 2 * scores_s + 1.5 * moved_s - (gemm_s - weight_grad_s)
    return PassTime(scores_s + moved_s, backward_s, weight_grad_s=weight_grad_s)


def ep_all_to_all(context: LayerContext) -> PassTime:
    """Return the time of dispatch and combine. The backward pass sends the same bytes of gradients."""
    if context.config.expert_model_parallel_size == 1 or (sparse := context.block.experts) is None:
        return NOTHING
    moved_s = _exchange_s(context, sparse) + _expert_gather_s(context, sparse)
    once_s = 2 * context.constants.all_to_all_time_factor * moved_s
    return PassTime(once_s, once_s)


def overlapped_exchange(context: LayerContext, passes: Mapping[str, PassTime]) -> PassTime:
    """Return the exposed time of dispatch and combine beside passes of another micro-batch, given a layer's terms.

    Megatron-LM runs the forward pass of one micro-batch with the backward pass of another one, layer by layer
    (`TransformerLayerSchedulePlan.run` in `megatron/core/models/common/model_chunk_schedule_plan.py`)::

        exchange   combine'     | dispatch, dispatch'                    | combine
        compute    attention    | experts', their weight grads', experts | attention'

    where a prime marks the backward pass. The few passes of the warm-up and the drain hide nothing, which is left out.
    """
    one_s, mlp = passes["ep_all_to_all"].forward_s / 2, passes["experts"]
    alone = [passes[key] for key in ("linear", "adapters", "attention", "scans", "elementwise", "quantize", "router")]
    exposed_s = max(0.0, one_s - sum(term.forward_s for term in alone))
    exposed_s += max(0.0, one_s - sum(term.backward_s for term in alone))
    # The dispatch of the backward pass needs the gradients of the experts' inputs, but not those of their weights if
    # these are delayed. The experts of the forward pass need its dispatch.
    needed_s = mlp.backward_s - (mlp.weight_grad_s if context.config.delay_wgrad_compute else 0.0)
    sent_s = max(needed_s, one_s) + one_s
    computed_s = max(mlp.backward_s, one_s) + mlp.forward_s
    exposed_s += max(sent_s, computed_s) - mlp.backward_s - mlp.forward_s
    # What is hidden still takes multiprocessors from the passes.
    exposed_s += (4 * one_s - exposed_s) * min(1.0, _EXCHANGE_PROCESSORS / context.gpus.processors)
    return PassTime(exposed_s / 2, exposed_s / 2)


def _expert_gather_s(context: LayerContext, sparse: Experts) -> float:
    """Return the seconds in which GPUs that divide an expert gather their rows, or add up and scatter its results.

    Source: `MoEAlltoAllTokenDispatcher.dispatch_postprocess` in Megatron-LM's `token_dispatcher.py`.
    """
    config = context.config
    if config.etp == 1 or config.moe_token_dispatcher in _GATHERING:
        return 0.0
    ring = context.gpus.ring(config.etp, 1)
    return float(context.all_gather_s(ring, VALUE * token_width(context, sparse) * routed_rows(context, sparse)))


def _exchange_s(context: LayerContext, sparse: Experts) -> float:
    """Return the seconds in which each GPU sends its rows to the GPUs of their experts.

    By default, a token is sent to another node once, and is forwarded to each of its experts inside that node
    (DeepSeek-V3, arXiv 2412.19437, 3.2.2). So the bytes between nodes follow from the number of nodes that hold experts
    of the token. DeepEP and HybridEP also send it once to each GPU of a node that holds several of its experts
    (`is_token_in_rank` in `deep_ep/buffer.py`). `alltoall` sends it once to each expert, wherever it is. `allgather`
    sends all tokens to all GPUs.
    """
    config, gpus, constants = context.config, context.gpus, context.constants
    dispatcher, spread = config.moe_token_dispatcher, config.expert_model_parallel_size
    each = VALUE * token_width(context, sparse) * routed_tokens(context)
    if dispatcher in _GATHERING:
        return float(context.all_gather_s(gpus.ring(spread, 1), each * spread))
    if config.ep == 1:
        return 0.0
    copies = float(sparse.per_token)
    if dispatcher in _ONCE_PER_GPU:
        copies = _nodes_met(sparse.groups, sparse.groups_per_token, sparse.per_token, config.ep)
    nodes = -(-spread // gpus.gpus_per_node)
    inside = each * copies * (config.ep - 1) / config.ep
    if dispatcher == "alltoall" and nodes > 1:
        inside = each * copies * (1 / nodes - 1 / config.ep)
    moved_s = inside / (gpus.inside.collective_bytes_per_s * constants.nvlink_efficiency)
    latency_s = gpus.inside.latency_s
    if nodes > 1:
        # Both legs of a token's route run at the same time for different tokens, so the slower one decides.
        met = copies
        if dispatcher != "alltoall":
            met = _nodes_met(sparse.groups, sparse.groups_per_token, sparse.per_token, nodes)
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
