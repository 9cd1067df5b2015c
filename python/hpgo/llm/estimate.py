"""What one given way of training a transformer costs: `hpgo.estimate_llm`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, get_args

from hpgo.base.checks import check_flag, check_is, choice, number, whole
from hpgo.base.errors import ArgumentError
from hpgo.base.records import Record, check_fields
from hpgo.base.wording import shorten
from hpgo.llm.constants import CONSTANTS, Constants
from hpgo.llm.gpus import Gpus
from hpgo.llm.layer_context import VALUE, LayerContext, pairs_seen
from hpgo.llm.memory import SAVED, PipelineRankLayers, activations, allocator_cached_bytes, parameters, stage_memory
from hpgo.llm.parallelism import (
    DegreeError,
    ParallelismConfig,
    PipelineSchedule,
    Precision,
    Recompute,
    check_batch,
    check_degrees,
    data_degree,
)
from hpgo.llm.platform import ERROR_WITH_EXPERTS, USUAL_ERROR, Platform, usual_error
from hpgo.llm.step_time import PipelineStages, kinds_of
from hpgo.llm.validated_features import unvalidated_features
from hpgo.machine.cluster import Cluster, cluster_of
from hpgo.machine.rates import same_card
from hpgo.model.estimate import ESTIMATED
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.profile import Layer, Profile
from hpgo.planning.laws import checked_price
from hpgo.programs.orders import KINDS, Schedule
from hpgo.programs.orders import schedule as build

if TYPE_CHECKING:
    import os

    from hpgo.llm.layer_time import LayerTime
    from hpgo.model.transformer import Transformer

_ROUNDING = 1e-12
"""Of a step, what sums in another order may differ by."""


@dataclass(frozen=True, slots=True)
class StageEstimate(Record):
    """What the GPUs of one pipeline rank have, each of them the same."""

    layers: tuple[tuple[int, int], ...]
    """First layer and the one behind the last, of each stage that it runs; equal if a stage has none."""
    memory_bytes: tuple[tuple[str, float], ...]
    """Of one GPU, by column."""
    forward_s: float
    """Of one micro-batch, all of its stages."""
    backward_s: float
    allocator_cached_bytes: float = 0.0
    """What PyTorch's allocator keeps beside these, and gives back before memory runs out; `nvidia-smi` counts it."""

    @property
    def peak_bytes(self) -> float:
        """All columns together."""
        return sum(size for _, size in self.memory_bytes)


@dataclass(frozen=True, slots=True)
class LlmEstimate(Record):
    """A way of training a transformer, and what it costs by the terms of docs/cost-terms.md. Nothing is measured.

    >>> import hpgo
    >>> price = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2)
    >>> price.parallelism.dp, price.fits, max(price.time_by_term_s, key=lambda term: term[1])[0]
    (4, True, 'matrices')
    """

    model: str
    cluster: str
    gpus: int
    parallelism: ParallelismConfig
    seq_length: int
    global_batch_size: int
    step_s: float
    bound_s: float
    """No order of passes takes less."""
    time_by_term_s: tuple[tuple[str, float], ...]
    """Of the step on the GPUs with the most to compute, by what it is spent on; they add up to `step_s`."""
    stages: tuple[StageEstimate, ...]
    """Of each pipeline rank."""
    capacity_bytes: float
    """Of one GPU."""
    model_flop: float
    """Of the step that the model asks for: 6 for each parameter but the embedding's and each token, and 6·s·q for each
    layer's attention, less where it has a window; nothing that is computed anew, and no scores that are masked."""
    peak_flop_per_s: float
    """Of one GPU, in the precision of the way."""
    has_experts: bool = False
    """Whether layers hold experts: such prices are no certificate until they meet their goal (docs/accuracy.md)."""
    error: float = USUAL_ERROR
    """Mean share by which such steps are off what is measured: the platform's, or published ones' on such a device."""
    measured_steps: int = 0
    """How many steps the platform was measured by; 0 where none was."""
    unvalidated_features: tuple[str, ...] = ()
    """What it relies on that no published step on such a device has measured, nor a step of the platform's: what that
    takes stands on terms alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("gpus", "seq_length", "global_batch_size"):
            whole(f"{field} of a price", getattr(self, field))
        for field in ("step_s", "capacity_bytes", "flop", "peak_flop_per_s"):
            number(f"{field} of a price", getattr(self, field), above=0)
        number("error of a price", self.error)
        if not self.stages:
            raise ArgumentError("a price has no stages", "make it again")

    @property
    def micro_batches(self) -> int:
        """Of a step, on each replica."""
        return self.parallelism.micro_batches(self.global_batch_size)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        return self.global_batch_size * self.seq_length / self.step_s / self.gpus

    @property
    def utilization(self) -> float:
        """Share of the GPUs' peak that the model's own operations are (MFU)."""
        return self.model_flop / self.peak_flop_per_s / self.step_s / self.gpus

    @property
    def fullest(self) -> StageEstimate:
        """The rank whose GPUs hold most; of equal ones the first."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def shortfall_bytes(self) -> float:
        """What the fullest GPU lacks; 0 if it fits."""
        return max(0.0, self.fullest.peak_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether memory suffices."""
        return self.shortfall_bytes == 0


def estimate_llm(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq_length: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    first_rank_layers: int | None = None,
    last_rank_layers: int | None = None,
    pp_schedule: PipelineSchedule = "1f1b",
    cp: int = 1,
    ep: int = 1,
    zero_stage: int = 1,
    micro_batch_size: int = 1,
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    sequence_parallel: bool | None = None,
    precision: Precision = "bf16",
    flash_attention: bool = True,
    fused_elementwise: bool = True,
    overlap_dp_comm: bool = True,
    fused_cross_entropy: bool = True,
    fused_adam: bool = True,
    flatten_gradients: bool = False,
    dtensor: bool = False,
    grad_reduce_in_bf16: bool = False,
    cpu_offload_num_layers: int = 0,
    devices: int | None = None,
    platform: Platform | None = None,
) -> LlmEstimate:
    """What one given way of training a transformer costs: its step, where it goes, and memory.

    Args:
        transformer: a shape, its name, or a file with one (docs/profiles.md).
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        tp: GPUs that share each matrix.
        pp: stages of the pipeline, in groups of GPUs.
        vpp: stages on each group: interleaving.
        first_rank_layers: layers on the pipeline's first group, which may be fewer or more than on those between.
        last_rank_layers: likewise on its last group.
        pp_schedule: in which order passes run: `1f1b`, interleaved where `vpp` is above 1; or with split backward passes
            `interleaved_zb`, or `zb_v` with `vpp` 2.
        cp: GPUs that share each sequence.
        ep: GPUs of a stage that share the experts of each layer.
        zero_stage: what replicas share: optimizer state from 1, gradients from 2, weights at 3.
        micro_batch_size: sequences that a replica passes through at once.
        recompute: what backward passes compute anew: `none`, attention's scores (`selective`), or layers (`full`).
        recompute_num_layers: how many layers of each stage, of `full`; None is all.
        sequence_parallel: whether those that share matrices share what lies between, too; None is with `tp` above 1.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        flash_attention: whether attention is one kernel.
        fused_elementwise: whether operations on single values are fused.
        overlap_dp_comm: whether sums and gathers run beside passes.
        fused_cross_entropy: whether the loss is one kernel, which keeps logits in 16 bits alone.
        fused_adam: whether Adam is one kernel.
        flatten_gradients: whether 16-bit gradients are copied into one flat tensor for it, as DeepSpeed does.
        dtensor: whether PyTorch's DTensor and FSDP2 share matrices and what replicas hold, as in torchtitan.
        grad_reduce_in_bf16: whether gradients add up in 16 bits, where they are not in 16 anyway.
        cpu_offload_num_layers: how many layers' values wait in the host's memory for the backward pass.
        devices: GPUs to use, the first of the cluster; None is all. Degrees of data parallelism follow.
        platform: factors from steps that were measured there (`hpgo.Platform.read`); None is none.

    A way that does not fit memory is priced all the same: see `LlmEstimate.fits`.

    Raises ArgumentError for degrees that do not divide, with the nearest that do; ClusterError for machines that
    differ, or of unknown rates.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:8")
    >>> one = hpgo.estimate_llm("llama-3-70b", cluster, global_batch_size=128, seq_length=8192, tp=8, pp=4, vpp=5)
    >>> one.parallelism.dp, one.fits, 0.3 < one.utilization < 0.6
    (2, True, True)
    """
    model = transformer_of(transformer)
    cluster = cluster_of(cluster)
    global_batch_size, seq_length = whole("global_batch_size", global_batch_size), whole("seq_length", seq_length)
    choice("recomputation", recompute, get_args(Recompute))
    choice("pp_schedule", pp_schedule, get_args(PipelineSchedule))
    choice("precision", precision, get_args(Precision))
    flags = {
        "flash_attention": flash_attention,
        "fused_elementwise": fused_elementwise,
        "overlap_dp_comm": overlap_dp_comm,
    }
    flags |= {
        "fused_cross_entropy": fused_cross_entropy,
        "fused_adam": fused_adam,
        "flatten_gradients": flatten_gradients,
    }
    flags |= {"dtensor": dtensor, "grad_reduce_in_bf16": grad_reduce_in_bf16}
    for name, flag in flags.items():
        check_flag(name, flag)
    if sequence_parallel is not None:
        check_flag("sequence_parallel", sequence_parallel)
    most_gpus = cluster.devices
    if devices is not None:
        cluster = cluster.first(devices)
    degrees = {
        "tp": whole("tp", tp), "cp": whole("cp", cp), "ep": whole("ep", ep), "pp": whole("pp", pp),
        "vpp": whole("vpp", vpp), "micro_batch_size": whole("micro_batch_size", micro_batch_size),
    }  # fmt: skip

    def config_of(pp: int, vpp: int) -> ParallelismConfig:
        return ParallelismConfig(
            tp=degrees["tp"],
            sequence_parallel=degrees["tp"] > 1 if sequence_parallel is None else sequence_parallel,
            cp=degrees["cp"],
            ep=degrees["ep"],
            pp=pp,
            first_rank_layers=None if first_rank_layers is None else whole("first_rank_layers", first_rank_layers),
            last_rank_layers=None if last_rank_layers is None else whole("last_rank_layers", last_rank_layers),
            vpp=vpp,
            pp_schedule=pp_schedule,
            micro_batch_size=degrees["micro_batch_size"],
            recompute=recompute,
            recompute_num_layers=None
            if recompute_num_layers is None
            else whole("recompute_num_layers", recompute_num_layers),
            zero_stage=whole("zero_stage", zero_stage, least=0, most=3),
            precision=precision,
            flash_attention=flash_attention,
            fused_elementwise=fused_elementwise,
            overlap_dp_comm=overlap_dp_comm,
            fused_cross_entropy=fused_cross_entropy,
            fused_adam=fused_adam,
            flatten_gradients=flatten_gradients,
            dtensor=dtensor,
            grad_reduce_in_bf16=grad_reduce_in_bf16,
            cpu_offload_num_layers=whole("cpu_offload_num_layers", cpu_offload_num_layers, least=0),
        )

    try:
        config = config_of(degrees["pp"], degrees["vpp"])
        return estimate_on(model, cluster, config, platform, global_batch_size=global_batch_size, seq_length=seq_length)
    except DegreeError as error:
        from hpgo.llm.suggestions import with_accepted

        try:
            # Two stages on each of several ranks are of every schedule, so degrees can be tried from there.
            base = config_of(max(2, degrees["pp"]), 2)
        except ArgumentError:
            raise error from None
        raise with_accepted(
            error, model, base, degrees,
            gpus=cluster.devices, most_gpus=most_gpus, global_batch_size=global_batch_size, seq_length=seq_length,
        ) from None  # fmt: skip


def estimate_on(
    model: Transformer,
    cluster: Cluster,
    config: ParallelismConfig,
    platform: Platform | None,
    *,
    global_batch_size: int,
    seq_length: int,
) -> LlmEstimate:
    """`estimate_config` on a platform that was measured, or on none; with the error that goes with it."""
    constants = constants_of(cluster, platform)
    found = estimate_config(
        model, cluster, config, global_batch_size=global_batch_size, seq_length=seq_length, constants=constants
    )
    return with_error(found, cluster, platform)


def constants_of(cluster: Cluster, platform: Platform | None) -> Constants:
    """Those of a platform, or the usual ones. Raises ArgumentError for what is none, or one of other devices."""
    check_is("platform", platform, Platform, "read one with `hpgo.Platform.read`", or_none=True)
    if platform is None:
        return CONSTANTS
    if not same_card(found := cluster.machines[0].device.name, platform.device):
        raise ArgumentError(
            f"the platform was measured on `{shorten(platform.device)}`, and cluster `{shorten(cluster.name)}` is of"
            f" `{shorten(found)}`",
            "name a platform of that device, or none",
        )
    return CONSTANTS.slower(*platform.factors)


def with_error(price: LlmEstimate, cluster: Cluster, platform: Platform | None) -> LlmEstimate:
    """A price with the error of steps on its platform; those of models with experts are foretold no better there."""
    left = unvalidated_features(
        price.parallelism, cluster.machines[0].device.name, () if platform is None else platform.mechanisms
    )
    if platform is None:
        return replace(price, error=usual_error(cluster, has_experts=price.has_experts), unvalidated_features=left)
    error = max(platform.error, ERROR_WITH_EXPERTS) if price.has_experts else platform.error
    return replace(price, error=error, measured_steps=platform.steps, unvalidated_features=left)


def estimate_config(
    model: Transformer,
    cluster: Cluster,
    config: ParallelismConfig,
    *,
    global_batch_size: int,
    seq_length: int,
    constants: Constants = CONSTANTS,
) -> LlmEstimate:
    """`price` of a way as a record, whose degree of data parallelism follows from the cluster's GPUs."""
    stages = stages_of(
        model, cluster, config, global_batch_size=global_batch_size, seq_length=seq_length, constants=constants
    )
    return estimate_of(stages, cluster.name, simulated_step_s(stages), global_batch_size=global_batch_size)


def estimate_of(stages: PipelineStages, cluster: str, step_s: float, *, global_batch_size: int) -> LlmEstimate:
    """All of a way's price, whose step was simulated."""
    context, pipeline = stages.context, stages.context.config.pp
    model, seq_length = context.model, context.seq_length
    found = LlmEstimate(
        model=model.name,
        cluster=cluster,
        gpus=context.gpus.count,
        parallelism=context.config,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        step_s=step_s,
        bound_s=stages.bound_s,
        time_by_term_s=_seconds(stages, step_s),
        stages=tuple(
            StageEstimate(
                tuple((one.layers.start, one.layers.stop) for one in stages.of_rank(rank)),
                tuple(stage_memory(context, part).items()),
                sum(one.forward_s for one in stages.of_rank(rank)),
                sum(one.backward_s for one in stages.of_rank(rank)),
                allocator_cached_bytes(context, part),
            )
            for rank, part in enumerate(_part(stages, rank) for rank in range(pipeline))
        ),
        capacity_bytes=context.gpus.memory_bytes,
        model_flop=model_flop(model, seq_length, global_batch_size),
        peak_flop_per_s=context.gpus.peak_flop_per_s,
        has_experts=model.experts > 0,
    )
    return checked_price(found, layers=model.layers, weights_bytes=VALUE * model.parameters)


def stages_of(
    model: Transformer,
    cluster: Cluster,
    config: ParallelismConfig,
    *,
    global_batch_size: int,
    seq_length: int,
    constants: Constants,
) -> PipelineStages:
    """The stages of a way that was looked at. Raises what `price` does."""
    gpus = Gpus.of(cluster, config.precision)
    check_degrees(model, config, seq_length=seq_length)
    config = replace(config, dp=data_degree(config, gpus.count))
    check_batch(config, global_batch_size)
    return PipelineStages(
        LayerContext(model, config, gpus, constants, seq_length), config.micro_batches(global_batch_size)
    )


def max_memory_bytes(stages: PipelineStages) -> float:
    """Of the GPU that holds most.

    Of ranks with the same layers the first one holds no less than the others, as it starts no fewer micro-batches,
    but where backward passes are split.
    """
    config = stages.context.config
    firsts: dict[object, int] = {}
    for rank in range(config.pp):
        held = tuple(map(stages.held, config.stages_of(rank)))
        firsts.setdefault(rank if config.splits_backward else (held, rank == 0, rank == config.pp - 1), rank)
    return max(sum(stage_memory(stages.context, _part(stages, rank)).values()) for rank in firsts.values())


def simulated_step_s(stages: PipelineStages) -> float:
    """A step of the schedule."""
    config, rows = stages.context.config, stages.stages
    if config.pp == 1:
        only = rows[0]
        return stages.micro_batches * (only.forward_s + only.backward_s) + only.sync_s + only.optimizer_s
    from hpgo.timing.simulation import simulate  # loads numpy, which refusing a way does without

    busy_s, latency_s = stages.transfer
    timeline = simulate(
        orders_of(config, stages.micro_batches),
        forward_s=[one.forward_s for one in rows],
        backward_s=[one.backward_s for one in rows],
        input_gradient_s=[one.backward_s - one.weight_grad_s for one in rows] if config.splits_backward else None,
        weight_gradient_s=[one.weight_grad_s for one in rows] if config.splits_backward else None,
        transfer_s=busy_s,
        latency_s=latency_s,
        gradient_sync_s=[one.sync_s for one in rows],
        optimizer_s=[one.optimizer_s for one in rows],
    )
    return timeline.makespan_s


def orders_of(config: ParallelismConfig, micro_batches: int) -> Schedule:
    """What each rank of a pipeline does, one after the other.

    >>> orders_of(ParallelismConfig(pp=2, vpp=2, pp_schedule="zb_v"), 1).orders
    [['0F0', '3F0', '3I0', '3W0', '0I0', '0W0'], ['1F0', '2F0', '2I0', '2W0', '1I0', '1W0']]
    """
    if config.pp_schedule == "zb_v":
        return build("zb_v", ranks=config.pp, micro_batches=micro_batches)
    if config.vpp == 1:
        return build("1f1b", ranks=config.pp, micro_batches=micro_batches)
    return build(
        "interleaved_zb" if config.splits_backward else "interleaved",
        ranks=config.pp,
        micro_batches=micro_batches,
        chunks=config.vpp,
    )


def _seconds(stages: PipelineStages, step_s: float) -> tuple[tuple[str, float], ...]:
    """Of the step, on the rank with the most to compute."""
    config, rank = stages.context.config, stages.slowest
    spent: dict[str, float] = {}
    for at in config.stages_of(rank):
        for count, times in stages.parts_of(at):
            for seconds in (times.forward_s, times.backward_s):
                for name, each_s in seconds.items():
                    spent[name] = spent.get(name, 0.0) + count * each_s * stages.micro_batches
    mine = stages.of_rank(rank)
    # A stage that ends before the rank's others updates beside their passes, which is not spent twice.
    left_s = step_s - sum(spent.values())
    for name, needed_s in (
        ("grad_reduce", sum(one.sync_s for one in mine)),
        ("optimizer_step", sum(one.optimizer_s for one in mine)),
    ):
        spent[name] = min(needed_s, max(0.0, left_s))
        left_s -= spent[name]
    spent["bubble"] = left_s if left_s > _ROUNDING * step_s else 0.0
    return tuple((name, seconds) for name, seconds in spent.items() if seconds)


def in_flight(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches each stage of a rank holds when the rank holds most.

    1F1B starts as many as there are ranks from here on. Interleaving starts rounds of `pipeline` micro-batches for each
    stage in turn (Narayanan et al., arXiv 2104.04473, section 2.2). Where backward passes are split, they are counted
    in the orders, up to the gradients of weights.

    >>> in_flight(ParallelismConfig(pp=4), 1, 8), in_flight(ParallelismConfig(pp=4, vpp=2), 0, 8)
    ((3,), (7, 4))
    """
    if config.splits_backward:
        return max((held for held, _ in _moments(config, rank, micro_batches)), key=sum)
    if config.vpp == 1:
        return (min(config.pp - rank, micro_batches),)
    started = min(2 * (config.pp - rank - 1) + (config.vpp - 1) * config.pp + 1, config.vpp * micro_batches)
    rounds, rest = divmod(started, config.pp * config.vpp)
    over = (min(config.pp, max(0, rest - stage * config.pp)) for stage in range(config.vpp))
    return tuple(rounds * config.pp + more for more in over)


Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each stage of a rank, micro-batches in flight, and those of them that wait for their gradients of weights."""


def _moments(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[Moment, ...]:
    """All moments of a rank that splits backward passes, in their order, each once."""
    # As many micro-batches as make two rounds have as many in flight as any.
    return _counted(config.pp_schedule, config.pp, config.vpp, min(micro_batches, 2 * config.pp))[rank]


@lru_cache(maxsize=4096)
def _counted(
    schedule: PipelineSchedule, pipeline: int, chunks: int, micro_batches: int
) -> tuple[tuple[Moment, ...], ...]:
    config = ParallelismConfig(pp=pipeline, vpp=chunks, pp_schedule=schedule)
    orders = orders_of(config, micro_batches)
    found = []
    for rank, (start, stop) in enumerate(pairwise(orders.rank_starts)):
        held = dict.fromkeys(config.stages_of(rank), 0)
        waiting = dict(held)
        seen: dict[Moment, None] = {(tuple(held.values()), tuple(held.values())): None}
        for kind, stage, *_ in orders.actions[start:stop].tolist():
            held[stage] += KINDS[kind] == "F"
            waiting[stage] += KINDS[kind] == "I"
            seen[tuple(held.values()), tuple(waiting.values())] = None
            if KINDS[kind] == "W":
                held[stage] -= 1
                waiting[stage] -= 1
        found.append(tuple(seen))
    return tuple(found)


def _part(stages: PipelineStages, rank: int) -> PipelineRankLayers:
    """All that a rank has, as memory sees it, at the moment when it holds most."""
    config = stages.context.config
    if config.splits_backward and config.recompute == "full":
        parts = (_together(stages, rank, *moment) for moment in _moments(config, rank, stages.micro_batches))
        return max(parts, key=lambda part: activations(stages.context, part))
    held = in_flight(config, rank, stages.micro_batches)
    return _together(stages, rank, held, (0,) * len(held))


def _together(stages: PipelineStages, rank: int, held: tuple[int, ...], waiting: tuple[int, ...]) -> PipelineRankLayers:
    """A rank's stages in one, with so many micro-batches in flight through each, and waiting."""
    at = stages.context.config.stages_of(rank)
    return PipelineRankLayers.together(list(map(stages.part, at, held, waiting)))


def model_flop(model: Transformer, seq_length: int, global_batch_size: int) -> float:
    """What a step asks for, forward and backward, as `LlmEstimate.flop` counts it."""
    products = model.active_parameters - (0 if model.tied else model.vocab * model.hidden)
    products -= model.positions * model.hidden
    if model.further_tokens:  # each has a head of its own
        kind = model.further_kind
        idle = (model.experts - model.experts_per_token) * model.expert_parameters if kind.experts else 0
        products += model.further_parameters + model.further_tokens * (model.vocab * model.hidden - idle)
    widths = model.heads * (model.head_dim + model.value_dim)
    seen = sum(pairs_seen(kind, seq_length) for kind in kinds_of(model))
    return (6.0 * products + 6 * seq_length * widths * seen) * global_batch_size * seq_length


def profile_of(
    price: LlmEstimate,
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster,
    *,
    constants: Constants = CONSTANTS,
) -> Profile:
    """The layers of a price as a profile, whose device is a group of GPUs that share each layer.

    Sums over replicas and the optimizer are not in it: a planner counts those by itself, in its own way. Where more
    GPUs share a layer's experts than all else of it, these are one device, which takes micro-batches of all of them.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100")
    >>> one = hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=64, seq_length=8192, tp=2, pp=2)
    >>> profile = profile_of(one, "llama-3-8b", cluster)
    >>> len(profile.layers), profile.gpus_per_device
    (34, 2)
    """
    check_is("price", price, LlmEstimate, "make one, with `hpgo.estimate_llm`")
    model = transformer_of(transformer)
    stages = stages_of(
        model, cluster.first(price.gpus), price.parallelism, global_batch_size=price.global_batch_size, seq_length=price.seq_length,
        constants=constants,
    )  # fmt: skip
    context, config = stages.context, stages.context.config
    together = lcm(config.model_parallel_size, config.ep)
    sent = VALUE * context.tokens * model.hidden / context.between
    nothing = PipelineRankLayers({}, {}, embedding=False, head=False)

    def layer(name: str, times: LayerTime, part: PipelineRankLayers, kept: float, output: float) -> Layer:
        return Layer(
            name, name, (times.total_forward_s,), (times.total_backward_s,), (output,),
            parameters(context, part) * VALUE, (kept,),
        )  # fmt: skip

    rows = [layer("embedding", stages.rows.embedding, replace(nothing, embedding=True), 0.0, sent)]
    for at, held in enumerate(stages.ranges):
        recomputed = stages.recomputed(at)
        for place, kind in enumerate(stages.held(at)):
            again = place < recomputed
            one = PipelineRankLayers({(kind, again): 1}, {}, embedding=False, head=False)
            held_bytes = context.once(SAVED[again], kind)
            named = f"further.{place - len(held)}" if kind.further else f"layers.{held.start + place}"
            rows.append(layer(named, stages.rows.layer[kind, again], one, held_bytes, sent))
    rows.append(layer("head", stages.rows.head, replace(nothing, head=True), sent, 4.0))
    ids = [row.id for row in rows]
    return Profile(
        model.name,
        (config.micro_batch_size * together // config.model_parallel_size,),
        tuple(rows),
        tuple(pairwise(ids)),
        f"{ESTIMATED}{cluster.name} with {config.named()}, not measured",
        gpus_per_device=together,
        dtype="bfloat16" if config.precision != "fp16" else "float16",
    )
