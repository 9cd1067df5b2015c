"""Time terms of a layer, of the LM head and of the embedding, for one micro-batch.

A term is a function of a `LayerContext` and a row of `LAYER`, `HEAD` or `EMBEDDING`, which gives it a key and a label.
Estimates, bounds, reports and JSON take all terms from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import hypot
from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.activation_offload import KEY, exposed_s, offloaded_bytes
from hpgo.llm.adapters import adapter_weights, adapters, base_weight_bytes, expanded_s
from hpgo.llm.cuda_graphs import launched_s
from hpgo.llm.experts import (
    NOTHING,
    PassTime,
    ep_all_to_all,
    expert_weights,
    experts,
    gemm_pass,
    overlapped_exchange,
    router,
)
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.matrices import linear
from hpgo.llm.parallelism import MAX_ZERO
from hpgo.llm.recompute import repeated_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.llm.amounts import Amount
    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.blocks import Attention


_OVERLAPPED = {False: 0.39, True: 0.46}
"""Exposed share of the communication of sequence parallelism if GEMMs overlap it: of Transformer Engine's Userbuffers,
and of torch.compile's pieces where DTensor shards matrices. They are the shares of the stacks `te-hopper` and
`torchtitan-async-tp`, fitted to published steps on H100."""

_NONE: Mapping[str, PassTime] = {}


_SCAN_RATE = 0.5
"""Rate of scans as a share of the rate of fused attention. Not measured."""


class Term(NamedTuple):
    """A row of a table of terms."""

    label: str
    """Name of the term in reports."""
    time: Callable[[LayerContext], PassTime]
    """Function that computes the term."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer by term key: of its forward pass, and of its backward pass with recomputation."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    weight_grad_s: float = 0.0
    """Part of the backward pass that computes gradients of weights."""

    def times(self, count: int) -> LayerTime:
        """Return the times of `count` equal layers.

        >>> LayerTime({"linear": 1.0}, {"linear": 2.0}).times(2).total_s
        6.0
        """
        if count == 1:
            return self
        forward_s, backward_s = (
            {key: count * each_s for key, each_s in held.items()} for held in (self.forward_s, self.backward_s)
        )
        return LayerTime(forward_s, backward_s, count * self.weight_grad_s)

    @cached_property
    def total_forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(self.forward_s.values())

    @cached_property
    def total_backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(self.backward_s.values())

    @property
    def total_s(self) -> float:
        """Seconds of both passes."""
        return self.total_forward_s + self.total_backward_s


class StagePasses(NamedTuple):
    """Seconds of one micro-batch in several layers: of one stage, or arrays over many stages."""

    forward_s: Amount
    backward_s: Amount
    weight_grad_s: Amount
    """Part of the backward that computes gradients of weights."""

    @classmethod
    def from_layers(cls, layers: Iterable[tuple[Amount, LayerTime]]) -> StagePasses:
        """Return the sum over layers, given as counts and times."""
        parts = [(count, time.total_forward_s, time.total_backward_s, time.weight_grad_s) for count, time in layers]
        return cls(*(sum((part[0] * part[at] for part in parts), 0.0) for at in (1, 2, 3)))

    @property
    def input_grad_s(self) -> Amount:
        """Part of the backward that computes gradients of inputs."""
        return self.backward_s - self.weight_grad_s


def attention(context: LayerContext) -> PassTime:
    """Return the time of scores and of the weighted sum: 4·b·s²·q/(c·t) operations, fewer where a kernel skips some."""
    return PassTime.total(_attention(context, one) for one in context.block.attention)


def _attention(context: LayerContext, one: Attention) -> PassTime:
    config, constants = context.config, context.constants
    pairs = config.micro_batch_size * context.seq_length * context.seq_length / config.cp
    flop = 2 * pairs * (one.queries + one.mixed) / config.tp
    # Fused kernels skip blocks of masked scores. Unfused GEMMs compute all scores and mask them afterwards.
    if config.flash_attention:
        # Documents that are packed into a sequence do not attend to each other.
        attended = context.attended_tokens
        flop *= one.seen(attended) * (attended / context.seq_length)
        rate = context.gpus.attention_flop_per_s * constants.attention_efficiency / constants.attention_time_factor
        rate *= context.gpus.attention_share(attended / config.cp)
        forward_s = flop / rate + _ring_steps(context) * constants.gemm_overhead_s
        return PassTime(forward_s, constants.attention_backward_factor * forward_s)
    aligned = 1.0 if one.head_dim % 8 == 0 else constants.misaligned_head_factor
    rate = context.gpus.wide_flop_per_s * constants.unfused_attention_efficiency * aligned
    gemms_s = flop / rate + 2 * _ring_steps(context) * constants.gemm_overhead_s
    # Forward, of each score: written by the GEMM, read and written by the softmax, and by dropout with its mask, then
    # read. Backward: the gradients of all these, and the result of the softmax once more.
    scores = pairs * one.heads / config.tp
    return PassTime(gemms_s + context.moved_s(13 * scores), 2 * gemms_s + context.moved_s(17 * scores))


def scans(context: LayerContext) -> PassTime:
    """Return the time of state-space scans and of linear attention.

    Their kernels are assumed to reach half the rate of fused attention, since their products are smaller; no published
    step has measured it.
    """
    block = context.block
    if not block.scans:
        return NOTHING
    constants, tokens, tp = context.constants, context.tokens, context.config.tp
    flop = tokens * sum(one.flop_per_token() for one in block.scans) / tp
    rate = context.gpus.attention_flop_per_s * constants.attention_efficiency * _SCAN_RATE
    # Kernels exchange the state of each chunk through memory, in 32 bits: written once, and read once.
    states = sum(one.heads * one.key_dim * one.value_dim / one.chunk for one in block.scans) / tp
    forward_s = flop / rate + context.moved_s(8 * tokens * states) + len(block.scans) * constants.gemm_overhead_s
    return PassTime(forward_s, constants.attention_backward_factor * forward_s)


def elementwise(context: LayerContext) -> PassTime:
    """Return the time of norms, residual additions, activations and dropout, which memory bandwidth limits."""
    # `outside` are the norms, dropout and residual additions between the GEMM pairs, which only sequence parallelism
    # divides. `inside` are activations and position embeddings between GEMMs, which tensor parallelism divides.
    tokens, block = context.tokens, context.block
    outside = 10 * block.parts * tokens * context.model.hidden / context.between
    inside = (4 + 2 * (block.inner - 1)) * tokens * block.ffn + 4 * tokens * (block.columns + block.channels)
    moved = outside + inside / context.config.tp + 8 * tokens * block.narrow / context.between
    factor = 1.0 if context.config.fused_elementwise else context.constants.unfused_elementwise_factor
    forward_s = context.moved_s(moved * factor)
    return PassTime(forward_s, 1.5 * forward_s)


def quantize(context: LayerContext) -> PassTime:
    """Return the time of casts to 8 or 4 bits: each value is read in 16 bits, and written by rows and by columns.

    Weights in 4 bits are expanded to 16 in each pass.
    """
    each, tp, tokens = NARROW.get(context.config.precision), context.config.tp, context.tokens
    if each is None:
        weights_s = expanded_s(context, base_weights(context) - expert_weights(context))
        return PassTime(weights_s, weights_s)
    block, h, moved = context.block, context.block.parts * context.model.hidden, VALUE + 2 * each
    inputs = h / context.between + (block.rows + block.ffn) / tp
    # The backward pass casts gradients of GEMM results.
    outputs = h + (block.columns + block.inner * block.ffn) / tp
    return PassTime(context.moved_s(moved * tokens * inputs), context.moved_s(moved * tokens * outputs))


def tp_comm(context: LayerContext) -> PassTime:
    """Return the time of an all-reduce of 2·T·h bytes for each part of a layer, or of its halves.

    A layer of attention and a network takes two all-reduces in each pass, or their halves with sequence parallelism.
    """
    moved, ring = VALUE * context.tokens * context.model.hidden, context.tensor_ring
    # Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather at different places. These
    # can't use NCCL's trees, so the time is that of two ring passes.
    halves = context.config.sequence_parallel
    if halves:
        # Stacks that cut both GEMM and transfer into pieces compute one piece while another is transferred.
        once_s = 2 * _exposed_fraction(context) * context.all_gather_s(ring, moved)
    else:
        once_s = context.all_reduce_s(ring, moved)
    each_s = context.block.parts * context.constants.tp_time_factor * once_s
    return PassTime(each_s, each_s)


def _exposed_fraction(context: LayerContext) -> float:
    """Return the share of the communication of sequence parallelism that GEMMs do not hide."""
    known, overlaps = context.constants.tp_exposed_fraction, context.config.tp_comm_overlap
    if overlaps is None or (overlaps and not context.gpus.hides_tp):
        return known
    return min(known, _OVERLAPPED[context.config.dtensor]) if overlaps else 1.0


def _ring_steps(context: LayerContext) -> int:
    """Return the number of attention kernels of a pass: with context parallelism one for each block of keys and values.

    In layers with a window, Transformer Engine gathers all keys and values first, and computes the sequence's two
    chunks of a GPU one after the other.
    """
    if context.config.cp == 1:
        return 1
    return 2 if context.kind.window else context.config.cp


def cp_comm(context: LayerContext) -> PassTime:
    """Return the time in which keys and values travel around a context-parallel group, less what attention hides."""
    config = context.config
    if config.cp == 1:
        return NOTHING
    held = VALUE * context.tokens * (context.block.keys + context.block.values) / config.tp
    if held == 0:
        return NOTHING
    if context.kind.window:
        # In layers with a window, Transformer Engine gathers all keys and values before attention starts, so attention
        # cannot hide it. The backward pass gathers them again, and reduces their gradients.
        ring_s = context.all_gather_s(context.context_ring, held * config.cp)
        return PassTime(ring_s, 2 * ring_s)
    hiding, hidden = attention(context), context.constants.comm_overlap_fraction

    def exposed_s(moved: float, step_s: float) -> float:
        # A block of keys and values is sent while the block before it is computed.
        return max(0.0, _message_s(context, moved) - hidden * step_s / config.cp)

    # The backward pass sends each block's gradients after it: only keys and values first, both, only gradients last.
    ends_s, between_s = (exposed_s(count * held, hiding.backward_s) for count in (1, 2))
    forward_s = (config.cp - 1) * exposed_s(held, hiding.forward_s)
    return PassTime(forward_s, 2 * ends_s + (config.cp - 2) * between_s)


def _message_s(context: LayerContext, moved: float) -> float:
    """Return the seconds of one step of a context-parallel ring, in which each GPU sends `moved` bytes to the next."""
    gpus, constants = context.gpus, context.constants
    rate, latency_s = gpus.inside.bytes_per_s * constants.nvlink_efficiency, gpus.inside.latency_s
    if context.context_ring.across:
        # All GPUs wait for the slowest message. Between nodes it has only the NIC of the GPU that sends it.
        rate = min(rate, gpus.adapter_bytes_per_s * constants.nic_efficiency)
        latency_s = gpus.adapter_latency_s
    return moved / rate + latency_s + constants.collective_overhead_s


def param_all_gather(context: LayerContext) -> PassTime:
    """Return the exposed time of ZeRO stage 3 for a layer: to gather its weights and to reduce its gradients."""
    config = context.config
    if not config.gathers_weights:
        return NOTHING
    gather_s = reduce_s = 0.0
    alone, trained_alone = expert_weights(context), trained_experts(context)
    others, trained = layer_weights(context) - alone, trained_weights(context) - trained_alone
    for shards, groups, gathered, each, count in (
        (context.shard_ring, context.group_ring, others, base_weight_bytes(config), trained),
        (context.expert_shard_ring, context.expert_group_ring, alone, VALUE, trained_alone),
    ):
        if gathered:
            gather_s += context.shard_gather_s(shards, gathered, each)
        if count:
            inside_s = context.shard_gather_s(shards, count, context.gradient_bytes)
            # With hybrid sharding, each group has reduced its own samples only. An all-reduce sums the shards over the
            # groups, while the next layer is reduced inside them (`foreach_reduce` of PyTorch's FSDP2). For messages of
            # this size NCCL's rings are as fast as its trees.
            over_s = 2 * context.shard_gather_s(groups, count / shards.ranks, context.gradient_bytes)
            reduce_s += max(inside_s, over_s) if config.overlap_dp_comm else inside_s + over_s
    gather_s *= context.constants.gather_time_factor
    reduce_s *= context.constants.gather_time_factor
    passes = [term(context) for term in (linear, adapters, attention, scans, elementwise, quantize, experts, router)]
    forward_s, backward_s = sum(one.forward_s for one in passes), sum(one.backward_s for one in passes)
    again_s = sum(one.recompute_s for one in passes)
    # The backward pass gathers the weights again, and reduces the gradients. A recomputed forward pass hides more.
    exposed_s, kept_s, full_s = (
        _exposed_s(moved_s, pass_s) if config.overlap_dp_comm else moved_s
        for moved_s, pass_s in (
            (gather_s, forward_s), (gather_s + reduce_s, backward_s), (gather_s + reduce_s, backward_s + again_s),
        )
    )  # fmt: skip
    return PassTime(exposed_s, kept_s, full_s - kept_s)


def _exposed_s(moved_s: float, pass_s: float) -> float:
    """Return the exposed seconds of transfers of `moved_s` that run beside a pass of `pass_s`."""
    # Neither is hidden completely even where the other takes longer: layers differ, ranks wait for each other, and
    # transfers take memory bandwidth and multiprocessors from GEMMs. Other powers than 2 fit published steps equally.
    return hypot(pass_s, moved_s) - pass_s


def grad_accumulation(context: LayerContext) -> PassTime:
    """Return the time to add a micro-batch's 16-bit gradient to the accumulated one, after each backward pass."""
    # With ZeRO stage 3 each pass reduces its gradients, and the reduce-scatter adds them up.
    if context.config.zero_stage == MAX_ZERO:
        return NOTHING
    each = 3 * VALUE if context.accumulates_in_16_bits else context.constants.accumulation_bytes
    added_s = context.moved_s(each * trained_weights(context)) * context.constants.accumulation_time_factor
    return PassTime(0.0, added_s, 0.0, weight_grad_s=added_s)


def lm_head(context: LayerContext) -> PassTime:
    """Return the time of the GEMM with the vocabulary, and of the loss over all words."""
    words = context.model.vocab / context.config.tp
    gemm_s = context.gemm_s(context.tokens, words, context.model.hidden, wide=True)
    # Fused: the GEMM writes a logit, the loss reads and writes it once, both backward GEMMs read its gradient. Else
    # forward: written in 16 bits, read and written in 32, read three times; backward: read and written in 32 and 16.
    forward, backward = (6, 4) if context.config.fused_cross_entropy else (22, 14)
    forward_s, backward_s = (context.moved_s(each * (context.tokens * words)) for each in (forward, backward))
    gemms = gemm_pass(context, gemm_s)
    return PassTime(gemm_s + forward_s, gemms.backward_s + backward_s, weight_grad_s=gemms.weight_grad_s)


def embedding(context: LayerContext) -> PassTime:
    """Return the time to read and write one row for each token."""
    moved = VALUE * context.tokens * context.model.hidden
    # A frozen embedding has no gradient, and nothing before it needs one.
    forward_s, backward_s = context.moved_s(2 * moved), context.moved_s((0 if context.config.lora_rank else 4) * moved)
    if context.embedding_rows < context.model.embedding_rows:
        forward_s += context.all_gather_s(context.tensor_ring, moved)
    return PassTime(forward_s, backward_s, weight_grad_s=backward_s)


def tower(context: LayerContext) -> PassTime:
    """Return the time of the encoder in front of the decoder, for all images of a micro-batch.

    Its layers have the terms of decoder layers, with patches as tokens. A frozen tower has a forward pass only.
    """
    inner = context.tower
    if inner is None:
        return NOTHING
    ends_s = _tower_ends_s(context, inner)
    passes = [PassTime(ends_s, 2 * ends_s, weight_grad_s=ends_s)]
    for kind, count in inner.model.kinds.items():
        one = inner.of(kind)
        terms = PassTime.total(term(one) for term in (linear, attention, elementwise, quantize))
        # The CPU launches a layer of a tower like a layer of the decoder.
        launch_s, factor = launched_s(one), one.constants.backward_launch_factor
        hidden = one.constants.launch_overlap_fraction
        forward_s = terms.forward_s + launch_s - hidden * min(launch_s, terms.forward_s)
        backward_s = terms.backward_s + factor * launch_s - hidden * min(factor * launch_s, terms.backward_s)
        passes.append(PassTime(count * forward_s, count * backward_s, weight_grad_s=count * terms.weight_grad_s))
    found = PassTime.total(passes)
    gather_s, reduce_s, added_s = _tower_weights_s(context)
    if context.trains_tower:
        gathered_s = _exposed_s(gather_s, found.forward_s) if context.config.overlap_dp_comm else gather_s
        moved_s = gather_s + reduce_s
        reduced_s = _exposed_s(moved_s, found.backward_s) if context.config.overlap_dp_comm else moved_s
        return PassTime(
            found.forward_s + gathered_s, found.backward_s + reduced_s + added_s,
            weight_grad_s=found.weight_grad_s + added_s,
        )  # fmt: skip
    gathered_s = _exposed_s(gather_s, found.forward_s) if context.config.overlap_dp_comm else gather_s
    return PassTime(found.forward_s + gathered_s, 0.0, 0.0)


def _tower_ends_s(context: LayerContext, inner: LayerContext) -> float:
    """Return the seconds of the GEMMs before and after the layers of a tower."""
    tower = context.model.tower
    if tower is None or tower.ends is None:
        return 0.0
    found = 0.0
    for place, one in enumerate(tower.ends.linears):
        # The first matrix embeds each patch. The others project merged patches, of which there are fewer.
        if one.times and one.inputs and one.outputs:
            rows = inner.tokens / (1 if place == 0 else tower.merge)
            found += one.times * inner.gemm_s(rows, one.outputs, one.inputs)
    return found


def _tower_weights_s(context: LayerContext) -> tuple[float, float, float]:
    """Return the seconds to gather a tower's weights, to reduce its gradients, and to add these up in memory."""
    config, weights = context.config, 0 if context.model.tower is None else context.model.tower.parameters
    if config.gathers_weights:
        gather_s = context.shard_gather_s(context.shard_ring, weights, VALUE) * context.constants.gather_time_factor
        inside_s = context.shard_gather_s(context.shard_ring, weights, context.gradient_bytes)
        over_s = 2 * context.shard_gather_s(
            context.group_ring, weights / context.shard_ring.ranks, context.gradient_bytes
        )
        reduce_s = max(inside_s, over_s) if config.overlap_dp_comm else inside_s + over_s
        return gather_s, reduce_s * context.constants.gather_time_factor, 0.0
    if config.zero_stage == MAX_ZERO:
        return 0.0, 0.0, 0.0
    each = 3 * VALUE if context.accumulates_in_16_bits else context.constants.accumulation_bytes
    return 0.0, 0.0, context.moved_s(each * weights) * context.constants.accumulation_time_factor


def mtp(context: LayerContext) -> PassTime:
    """Return the time that a layer for multi-token prediction adds: to embed the token, and to join the embedding.

    Its LM head is on the last stage, with that of the next token.

    Source: Megatron-LM's `multi_token_prediction.py`, DeepSeek-V3 (arXiv 2412.19437).
    """
    if not context.kind.further:
        return NOTHING
    tokens, h = context.tokens, context.model.hidden
    gemm_s = context.gemm_s(tokens, h / context.config.tp, 2 * h)
    # Three norms read and write each value, and so does the concatenation of two of them.
    moved_s = context.moved_s((12 + 8) * tokens * h / context.between)
    comm_s = 2 * context.all_gather_s(context.tensor_ring, VALUE * tokens * h)
    joined_s = gemm_s + moved_s + comm_s
    token, gemms = embedding(context), gemm_pass(context, gemm_s)
    return PassTime(
        joined_s + token.forward_s,
        gemms.backward_s + 1.5 * moved_s + comm_s + token.backward_s,
        joined_s,
        weight_grad_s=gemms.weight_grad_s + token.weight_grad_s,
    )


def layer_weights(context: LayerContext) -> float:
    """Return the parameters of a layer on one GPU, with its adapters."""
    return base_weights(context) + adapter_weights(context)


def trained_weights(context: LayerContext) -> float:
    """Return the parameters of a layer on one GPU that are trained: all, or those of adapters."""
    return adapter_weights(context) if context.config.lora_rank else base_weights(context)


def trained_experts(context: LayerContext) -> float:
    """Return the parameters of a layer's experts on one GPU that are trained; adapters count as other weights."""
    return 0.0 if context.config.lora_rank else expert_weights(context)


def base_weights(context: LayerContext) -> float:
    """Return a layer's parameters on one GPU: matrices divided by tp, whole norms, and the GPU's experts."""
    model, block = context.model, context.block
    # Norms, the compression of latent attention and the router are replicated over tensor-parallel GPUs.
    whole = block.whole_parameters(model.hidden, norm=model.norm_parameters)
    whole += 3 * model.norm_parameters if context.kind.further else 0
    all_experts = 0 if block.experts is None else block.experts.count * block.experts.each_parameters(model.hidden)
    divided = model.kind_parameters(context.kind) - whole - all_experts
    return divided / context.config.tp + whole + expert_weights(context)


LAYER: dict[str, Term] = {
    "linear": Term("linear layers", linear),
    "adapters": Term("adapters (LoRA)", adapters),
    "attention": Term("attention", attention),
    "scans": Term("state-space scans, linear attention", scans),
    "elementwise": Term("elementwise operations", elementwise),
    "quantize": Term("FP8/FP4 casts", quantize),
    "experts": Term("expert MLPs", experts),
    "router": Term("router and permutation", router),
    "ep_all_to_all": Term("EP all-to-all (dispatch, combine)", ep_all_to_all),
    "tp_comm": Term("TP communication", tp_comm),
    "cp_comm": Term("CP communication", cp_comm),
    "param_all_gather": Term("parameter all-gather", param_all_gather),
    "grad_accumulation": Term("gradient accumulation", grad_accumulation),
    "mtp": Term("multi-token prediction", mtp),
}
HEAD: dict[str, Term] = {"lm_head": Term("LM head and loss", lm_head)}
EMBEDDING: dict[str, Term] = {
    "embedding": Term("embedding", embedding),
    "tower": Term("tower of images or sounds", tower),
}
LAUNCH = "launch_overhead"
"""Key of the seconds by which the CPU's kernel launches of a layer take longer than its GPU's work."""
BY_EP = frozenset(("experts", "ep_all_to_all", "param_all_gather", "grad_accumulation"))
"""Keys of the terms of layers with experts that depend on expert parallelism."""
BY_ETP = BY_EP | {"router", "adapters"}
"""Keys of the terms of layers with experts that depend on expert tensor parallelism."""


def layer_passes(context: LayerContext, known: Mapping[str, PassTime] = _NONE) -> dict[str, PassTime]:
    """Return all terms of a layer. Terms in `known` are taken from there."""
    return {key: known[key] if key in known else term.time(context) for key, term in LAYER.items()}


def layer_times(context: LayerContext, passes: Mapping[str, PassTime] | None = None) -> tuple[LayerTime, LayerTime]:
    """Return the times of a layer without full recomputation and with it. Both may recompute attention scores.

    `passes` are the terms of `layer_passes`, if they are known.
    """
    config, constants = context.config, context.constants
    passes = layer_passes(context) if passes is None else passes
    if context.kind.experts and constants.expert_time_factor != 1.0:
        passes = {key: one.scaled(constants.expert_time_factor) for key, one in passes.items()}
    if config.overlap_ep_comm and context.kind.experts:
        passes = {**passes, "ep_all_to_all": overlapped_exchange(context, passes)}
    launch_s = launched_s(context)

    def with_launches(seconds: dict[str, float], factor: float) -> dict[str, float]:
        # The CPU runs ahead of the GPU, so launches cost time only where they take longer than the work they start.
        hidden_s = constants.launch_overlap_fraction * min(factor * launch_s, sum(seconds.values()))
        return {**seconds, LAUNCH: factor * launch_s - hidden_s}

    forward_s = with_launches({key: one.forward_s for key, one in passes.items()}, 1.0)
    kept_s = {key: one.backward_s for key, one in passes.items()}
    full_s = {key: one.backward_s + one.recompute_s for key, one in passes.items()}
    for key, again_s in repeated_s(context, passes).items():
        kept_s[key] += again_s
    if config.recompute == "selective" and not (config.flash_attention or config.recompute_modules):
        # Flash attention saves no scores. Its backward pass always recomputes them, which its factor includes.
        kept_s["attention"] += passes["attention"].recompute_s
    if config.recompute == "selective_op":
        # torchtitan saves the results of attention and of every second GEMM, and computes all others again.
        for key, share in (
            ("elementwise", 1.0), ("quantize", 1.0), ("linear", 0.5), ("adapters", 0.5), ("experts", 0.5),
            ("router", 1.0),
        ):  # fmt: skip
            kept_s[key] += share * passes[key].recompute_s
    weight_grad_s = sum(one.weight_grad_s for one in passes.values())
    if config.offload_modules:
        moved = offloaded_bytes(context)
        for seconds in (forward_s, kept_s, full_s):
            seconds[KEY] = exposed_s(context, moved, sum(seconds.values()))
    # Full recomputation also launches the forward pass again, hence 1 more.
    factor = constants.backward_launch_factor
    return (
        LayerTime(forward_s, with_launches(kept_s, factor), weight_grad_s),
        LayerTime(forward_s, with_launches(full_s, factor + 1.0), weight_grad_s),
    )


def end_times(context: LayerContext, terms: Mapping[str, Term]) -> LayerTime:
    """Return the times of the LM head or the embedding, which are never recomputed."""
    passes = {key: term.time(context) for key, term in terms.items()}
    return LayerTime(
        {key: one.forward_s for key, one in passes.items()},
        {key: one.backward_s for key, one in passes.items()},
        sum(one.weight_grad_s for one in passes.values()),
    )
