"""What one given way of training a transformer costs: `hpgo.price`."""

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
from hpgo.machine.cluster import Cluster, cluster_of
from hpgo.machine.rates import same_card
from hpgo.model.estimate import ESTIMATED
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.profile import Layer, Profile
from hpgo.planning.laws import checked_price
from hpgo.planning.platform import ERROR_WITH_EXPERTS, USUAL_ERROR, Platform, usual_error
from hpgo.programs.orders import KINDS, Schedule
from hpgo.programs.orders import schedule as build
from hpgo.ways.constants import CONSTANTS, Constants
from hpgo.ways.gpus import Gpus
from hpgo.ways.mechanisms import unmeasured
from hpgo.ways.memory import KEPT, Part, activations, cached_bytes, parameters, stage_memory
from hpgo.ways.site import VALUE, Site, pairs_seen
from hpgo.ways.steps import Stages, kinds_of
from hpgo.ways.way import DegreeError, Passes, Precision, Recompute, Way, check_batch, check_degrees, data_degree

if TYPE_CHECKING:
    import os

    from hpgo.model.transformer import Transformer
    from hpgo.ways.times import Times

_ROUNDING = 1e-12
"""Of a step, what sums in another order may differ by."""


@dataclass(frozen=True, slots=True)
class StagePrice(Record):
    """What the GPUs of one pipeline rank have, each of them the same."""

    layers: tuple[tuple[int, int], ...]
    """First layer and the one behind the last, of each stage that it runs; equal if a stage has none."""
    memory_bytes: tuple[tuple[str, float], ...]
    """Of one GPU, by column."""
    forward_s: float
    """Of one micro-batch, all of its stages."""
    backward_s: float
    cached_bytes: float = 0.0
    """What PyTorch's allocator keeps beside these, and gives back before memory runs out; `nvidia-smi` counts it."""

    @property
    def peak_bytes(self) -> float:
        """All columns together."""
        return sum(size for _, size in self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Price(Record):
    """A way of training a transformer, and what it costs by the terms of docs/cost-terms.md. Nothing is measured.

    >>> import hpgo
    >>> price = hpgo.price("llama-3-8b", "h100:1", global_batch_size=8, seq=4096, tp=2)
    >>> price.way.data, price.fits, max(price.seconds, key=lambda term: term[1])[0]
    (4, True, 'matrices')
    """

    model: str
    cluster: str
    gpus: int
    way: Way
    seq: int
    global_batch_size: int
    step_s: float
    bound_s: float
    """No order of passes takes less."""
    seconds: tuple[tuple[str, float], ...]
    """Of the step on the GPUs with the most to compute, by what it is spent on; they add up to `step_s`."""
    stages: tuple[StagePrice, ...]
    """Of each pipeline rank."""
    capacity_bytes: float
    """Of one GPU."""
    flop: float
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
    unmeasured: tuple[str, ...] = ()
    """What it relies on that no published step on such a device has measured, nor a step of the platform's: what that
    takes stands on terms alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("gpus", "seq", "global_batch_size"):
            whole(f"{field} of a price", getattr(self, field))
        for field in ("step_s", "capacity_bytes", "flop", "peak_flop_per_s"):
            number(f"{field} of a price", getattr(self, field), above=0)
        number("error of a price", self.error)
        if not self.stages:
            raise ArgumentError("a price has no stages", "make it again")

    @property
    def micro_batches(self) -> int:
        """Of a step, on each replica."""
        return self.way.micro_batches(self.global_batch_size)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        return self.global_batch_size * self.seq / self.step_s / self.gpus

    @property
    def utilisation(self) -> float:
        """Share of the GPUs' peak that the model's own operations are (MFU)."""
        return self.flop / self.peak_flop_per_s / self.step_s / self.gpus

    @property
    def fullest(self) -> StagePrice:
        """The rank whose GPUs hold most; of equal ones the first."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def missing_bytes(self) -> float:
        """What the fullest GPU lacks; 0 if it fits."""
        return max(0.0, self.fullest.peak_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether memory suffices."""
        return self.missing_bytes == 0


def price(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    global_batch_size: int,
    seq: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    first_layers: int | None = None,
    last_layers: int | None = None,
    schedule: Passes = "1f1b",
    cp: int = 1,
    ep: int = 1,
    zero: int = 1,
    micro_batch_size: int = 1,
    recompute: Recompute = "none",
    recompute_layers: int | None = None,
    sequence_parallel: bool | None = None,
    precision: Precision = "bf16",
    flash: bool = True,
    fused: bool = True,
    overlap: bool = True,
    fused_loss: bool = True,
    fused_update: bool = True,
    flat_update: bool = False,
    dtensor: bool = False,
    narrow_gradients: bool = False,
    offload_layers: int = 0,
    devices: int | None = None,
    platform: Platform | None = None,
) -> Price:
    """What one given way of training a transformer costs: its step, where it goes, and memory.

    Args:
        transformer: a shape, its name, or a file with one (docs/profiles.md).
        cluster: equal machines of devices whose rates are known; a device is a GPU.
        global_batch_size: sequences of a step.
        seq: tokens of a sequence.
        tp: GPUs that share each matrix.
        pp: stages of the pipeline, in groups of GPUs.
        vpp: stages on each group: interleaving.
        first_layers: layers on the pipeline's first group, which may be fewer or more than on those between.
        last_layers: likewise on its last group.
        schedule: in which order passes run: `1f1b`, interleaved where `vpp` is above 1; or with split backward passes
            `interleaved_zb`, or `zb_v` with `vpp` 2.
        cp: GPUs that share each sequence.
        ep: GPUs of a stage that share the experts of each layer.
        zero: what replicas share: optimizer state from 1, gradients from 2, weights at 3.
        micro_batch_size: sequences that a replica passes through at once.
        recompute: what backward passes compute anew: `none`, attention's scores (`selective`), or layers (`full`).
        recompute_layers: how many layers of each stage, of `full`; None is all.
        sequence_parallel: whether those that share matrices share what lies between, too; None is with `tp` above 1.
        precision: `bf16`, `fp16`, `fp8` or `fp4` of products.
        flash: whether attention is one kernel.
        fused: whether operations on single values are fused.
        overlap: whether sums and gathers run beside passes.
        fused_loss: whether the loss is one kernel, which keeps logits in 16 bits alone.
        fused_update: whether Adam is one kernel.
        flat_update: whether 16-bit gradients are copied into one flat tensor for it, as DeepSpeed does.
        dtensor: whether PyTorch's DTensor and FSDP2 share matrices and what replicas hold, as in torchtitan.
        narrow_gradients: whether gradients add up in 16 bits, where they are not in 16 anyway.
        offload_layers: how many layers' values wait in the host's memory for the backward pass.
        devices: GPUs to use, the first of the cluster; None is all. Degrees of data parallelism follow.
        platform: factors from steps that were measured there (`hpgo.Platform.read`); None is none.

    A way that does not fit memory is priced all the same: see `Price.fits`.

    Raises ArgumentError for degrees that do not divide, with the nearest that do; ClusterError for machines that
    differ, or of unknown rates.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:8")
    >>> one = hpgo.price("llama-3-70b", cluster, global_batch_size=128, seq=8192, tp=8, pp=4, vpp=5)
    >>> one.way.data, one.fits, 0.3 < one.utilisation < 0.6
    (2, True, True)
    """
    model = transformer_of(transformer)
    cluster = cluster_of(cluster)
    global_batch_size, seq = whole("global_batch_size", global_batch_size), whole("seq", seq)
    choice("recomputation", recompute, get_args(Recompute))
    choice("schedule", schedule, get_args(Passes))
    choice("precision", precision, get_args(Precision))
    flags = {"flash": flash, "fused": fused, "overlap": overlap}
    flags |= {"fused_loss": fused_loss, "fused_update": fused_update, "flat_update": flat_update}
    flags |= {"dtensor": dtensor, "narrow_gradients": narrow_gradients}
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

    def way_of(pipeline: int, chunks: int) -> Way:
        return Way(
            tensor=degrees["tp"],
            sequence=degrees["tp"] > 1 if sequence_parallel is None else sequence_parallel,
            context=degrees["cp"],
            expert=degrees["ep"],
            pipeline=pipeline,
            first_layers=None if first_layers is None else whole("first_layers", first_layers),
            last_layers=None if last_layers is None else whole("last_layers", last_layers),
            chunks=chunks,
            schedule=schedule,
            micro_batch_size=degrees["micro_batch_size"],
            recompute=recompute,
            recompute_layers=None if recompute_layers is None else whole("recompute_layers", recompute_layers),
            zero=whole("zero", zero, least=0, most=3),
            precision=precision,
            flash=flash,
            fused=fused,
            overlap=overlap,
            fused_loss=fused_loss,
            fused_update=fused_update,
            flat_update=flat_update,
            dtensor=dtensor,
            narrow_gradients=narrow_gradients,
            offload_layers=whole("offload_layers", offload_layers, least=0),
        )

    try:
        way = way_of(degrees["pp"], degrees["vpp"])
        return price_on(model, cluster, way, platform, global_batch_size=global_batch_size, seq=seq)
    except DegreeError as error:
        from hpgo.planning.remedies import of_price

        try:
            # Two stages on each of several ranks are of every schedule, so degrees can be tried from there.
            base = way_of(max(2, degrees["pp"]), 2)
        except ArgumentError:
            raise error from None
        raise of_price(
            error, model, base, degrees,
            gpus=cluster.devices, most_gpus=most_gpus, global_batch_size=global_batch_size, seq=seq,
        ) from None  # fmt: skip


def price_on(
    model: Transformer, cluster: Cluster, way: Way, platform: Platform | None, *, global_batch_size: int, seq: int
) -> Price:
    """`price_way` on a platform that was measured, or on none; with the error that goes with it."""
    constants = constants_of(cluster, platform)
    found = price_way(model, cluster, way, global_batch_size=global_batch_size, seq=seq, constants=constants)
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


def with_error(price: Price, cluster: Cluster, platform: Platform | None) -> Price:
    """A price with the error of steps on its platform; those of models with experts are foretold no better there."""
    left = unmeasured(price.way, cluster.machines[0].device.name, () if platform is None else platform.mechanisms)
    if platform is None:
        return replace(price, error=usual_error(cluster, has_experts=price.has_experts), unmeasured=left)
    error = max(platform.error, ERROR_WITH_EXPERTS) if price.has_experts else platform.error
    return replace(price, error=error, measured_steps=platform.steps, unmeasured=left)


def price_way(
    model: Transformer,
    cluster: Cluster,
    way: Way,
    *,
    global_batch_size: int,
    seq: int,
    constants: Constants = CONSTANTS,
) -> Price:
    """`price` of a way as a record, whose degree of data parallelism follows from the cluster's GPUs."""
    stages = stages_of(model, cluster, way, global_batch_size=global_batch_size, seq=seq, constants=constants)
    return price_of(stages, cluster.name, simulated_s(stages), global_batch_size=global_batch_size)


def price_of(stages: Stages, cluster: str, step_s: float, *, global_batch_size: int) -> Price:
    """All of a way's price, whose step was simulated."""
    site, pipeline = stages.site, stages.site.way.pipeline
    model, seq = site.model, site.seq
    found = Price(
        model=model.name,
        cluster=cluster,
        gpus=site.gpus.count,
        way=site.way,
        seq=seq,
        global_batch_size=global_batch_size,
        step_s=step_s,
        bound_s=stages.bound_s,
        seconds=_seconds(stages, step_s),
        stages=tuple(
            StagePrice(
                tuple((one.layers.start, one.layers.stop) for one in stages.of_rank(rank)),
                tuple(stage_memory(site, part).items()),
                sum(one.forward_s for one in stages.of_rank(rank)),
                sum(one.backward_s for one in stages.of_rank(rank)),
                cached_bytes(site, part),
            )
            for rank, part in enumerate(_part(stages, rank) for rank in range(pipeline))
        ),
        capacity_bytes=site.gpus.memory_bytes,
        flop=model_flop(model, seq, global_batch_size),
        peak_flop_per_s=site.gpus.peak_flop_per_s,
        has_experts=model.experts > 0,
    )
    return checked_price(found, layers=model.layers, weights_bytes=VALUE * model.parameters)


def stages_of(
    model: Transformer, cluster: Cluster, way: Way, *, global_batch_size: int, seq: int, constants: Constants
) -> Stages:
    """The stages of a way that was looked at. Raises what `price` does."""
    gpus = Gpus.of(cluster, way.precision)
    check_degrees(model, way, seq=seq)
    way = replace(way, data=data_degree(way, gpus.count))
    check_batch(way, global_batch_size)
    return Stages(Site(model, way, gpus, constants, seq), way.micro_batches(global_batch_size))


def fullest_bytes(stages: Stages) -> float:
    """Of the GPU that holds most.

    Of ranks with the same layers the first one holds no less than the others, as it starts no fewer micro-batches,
    but where backward passes are split.
    """
    way = stages.site.way
    firsts: dict[object, int] = {}
    for rank in range(way.pipeline):
        held = tuple(map(stages.held, way.stages_of(rank)))
        firsts.setdefault(rank if way.splits else (held, rank == 0, rank == way.pipeline - 1), rank)
    return max(sum(stage_memory(stages.site, _part(stages, rank)).values()) for rank in firsts.values())


def simulated_s(stages: Stages) -> float:
    """A step of the schedule."""
    way, rows = stages.site.way, stages.stages
    if way.pipeline == 1:
        only = rows[0]
        return stages.micro_batches * (only.forward_s + only.backward_s) + only.sync_s + only.optimizer_s
    from hpgo.timing.simulation import simulate  # loads numpy, which refusing a way does without

    busy_s, latency_s = stages.transfer
    timeline = simulate(
        orders_of(way, stages.micro_batches),
        forward_s=[one.forward_s for one in rows],
        backward_s=[one.backward_s for one in rows],
        input_gradient_s=[one.backward_s - one.weights_s for one in rows] if way.splits else None,
        weight_gradient_s=[one.weights_s for one in rows] if way.splits else None,
        transfer_s=busy_s,
        latency_s=latency_s,
        gradient_sync_s=[one.sync_s for one in rows],
        optimizer_s=[one.optimizer_s for one in rows],
    )
    return timeline.makespan_s


def orders_of(way: Way, micro_batches: int) -> Schedule:
    """What each rank of a pipeline does, one after the other.

    >>> orders_of(Way(pipeline=2, chunks=2, schedule="zb_v"), 1).orders
    [['0F0', '3F0', '3I0', '3W0', '0I0', '0W0'], ['1F0', '2F0', '2I0', '2W0', '1I0', '1W0']]
    """
    if way.schedule == "zb_v":
        return build("zb_v", ranks=way.pipeline, micro_batches=micro_batches)
    if way.chunks == 1:
        return build("1f1b", ranks=way.pipeline, micro_batches=micro_batches)
    return build(
        "interleaved_zb" if way.splits else "interleaved",
        ranks=way.pipeline,
        micro_batches=micro_batches,
        chunks=way.chunks,
    )


def _seconds(stages: Stages, step_s: float) -> tuple[tuple[str, float], ...]:
    """Of the step, on the rank with the most to compute."""
    way, rank = stages.site.way, stages.slowest
    spent: dict[str, float] = {}
    for at in way.stages_of(rank):
        for count, times in stages.parts_of(at):
            for seconds in (times.forward_s, times.backward_s):
                for name, each_s in seconds.items():
                    spent[name] = spent.get(name, 0.0) + count * each_s * stages.micro_batches
    mine = stages.of_rank(rank)
    # A stage that ends before the rank's others updates beside their passes, which is not spent twice.
    left_s = step_s - sum(spent.values())
    for name, needed_s in (
        ("gradients", sum(one.sync_s for one in mine)),
        ("optimizer", sum(one.optimizer_s for one in mine)),
    ):
        spent[name] = min(needed_s, max(0.0, left_s))
        left_s -= spent[name]
    spent["bubble"] = left_s if left_s > _ROUNDING * step_s else 0.0
    return tuple((name, seconds) for name, seconds in spent.items() if seconds)


def in_flight(way: Way, rank: int, micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches each stage of a rank holds when the rank holds most.

    1F1B starts as many as there are ranks from here on. Interleaving starts rounds of `pipeline` micro-batches for each
    stage in turn (Narayanan et al., arXiv 2104.04473, section 2.2). Where backward passes are split, they are counted
    in the orders, up to the gradients of weights.

    >>> in_flight(Way(pipeline=4), 1, 8), in_flight(Way(pipeline=4, chunks=2), 0, 8)
    ((3,), (7, 4))
    """
    if way.splits:
        return max((held for held, _ in _moments(way, rank, micro_batches)), key=sum)
    if way.chunks == 1:
        return (min(way.pipeline - rank, micro_batches),)
    started = min(2 * (way.pipeline - rank - 1) + (way.chunks - 1) * way.pipeline + 1, way.chunks * micro_batches)
    rounds, rest = divmod(started, way.pipeline * way.chunks)
    over = (min(way.pipeline, max(0, rest - stage * way.pipeline)) for stage in range(way.chunks))
    return tuple(rounds * way.pipeline + more for more in over)


Moment = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each stage of a rank, micro-batches in flight, and those of them that wait for their gradients of weights."""


def _moments(way: Way, rank: int, micro_batches: int) -> tuple[Moment, ...]:
    """All moments of a rank that splits backward passes, in their order, each once."""
    # As many micro-batches as make two rounds have as many in flight as any.
    return _counted(way.schedule, way.pipeline, way.chunks, min(micro_batches, 2 * way.pipeline))[rank]


@lru_cache(maxsize=4096)
def _counted(schedule: Passes, pipeline: int, chunks: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    way = Way(pipeline=pipeline, chunks=chunks, schedule=schedule)
    orders = orders_of(way, micro_batches)
    found = []
    for rank, (start, stop) in enumerate(pairwise(orders.rank_starts)):
        held = dict.fromkeys(way.stages_of(rank), 0)
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


def _part(stages: Stages, rank: int) -> Part:
    """All that a rank has, as memory sees it, at the moment when it holds most."""
    way = stages.site.way
    if way.splits and way.recompute == "full":
        parts = (_together(stages, rank, *moment) for moment in _moments(way, rank, stages.micro_batches))
        return max(parts, key=lambda part: activations(stages.site, part))
    held = in_flight(way, rank, stages.micro_batches)
    return _together(stages, rank, held, (0,) * len(held))


def _together(stages: Stages, rank: int, held: tuple[int, ...], waiting: tuple[int, ...]) -> Part:
    """A rank's stages in one, with so many micro-batches in flight through each, and waiting."""
    at = stages.site.way.stages_of(rank)
    return Part.together(list(map(stages.part, at, held, waiting)))


def model_flop(model: Transformer, seq: int, global_batch_size: int) -> float:
    """What a step asks for, forward and backward, as `Price.flop` counts it."""
    products = model.active_parameters - (0 if model.tied else model.vocab * model.hidden)
    products -= model.positions * model.hidden
    if model.further_tokens:  # each has a head of its own
        kind = model.further_kind
        idle = (model.experts - model.experts_per_token) * model.expert_parameters if kind.experts else 0
        products += model.further_parameters + model.further_tokens * (model.vocab * model.hidden - idle)
    widths = model.heads * (model.head_dim + model.value_dim)
    seen = sum(pairs_seen(kind, seq) for kind in kinds_of(model))
    return (6.0 * products + 6 * seq * widths * seen) * global_batch_size * seq


def profile_of(
    price: Price,
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
    >>> one = hpgo.price("llama-3-8b", cluster, global_batch_size=64, seq=8192, tp=2, pp=2)
    >>> profile = profile_of(one, "llama-3-8b", cluster)
    >>> len(profile.layers), profile.gpus_per_device
    (34, 2)
    """
    check_is("price", price, Price, "make one, with `hpgo.price`")
    model = transformer_of(transformer)
    stages = stages_of(
        model, cluster.first(price.gpus), price.way, global_batch_size=price.global_batch_size, seq=price.seq,
        constants=constants,
    )  # fmt: skip
    site, way = stages.site, stages.site.way
    together = lcm(way.group, way.expert)
    sent = VALUE * site.tokens * model.hidden / site.between
    nothing = Part({}, {}, embedding=False, head=False)

    def layer(name: str, times: Times, part: Part, kept: float, output: float) -> Layer:
        return Layer(
            name, name, (times.total_forward_s,), (times.total_backward_s,), (output,),
            parameters(site, part) * VALUE, (kept,),
        )  # fmt: skip

    rows = [layer("embedding", stages.rows.embedding, replace(nothing, embedding=True), 0.0, sent)]
    for at, held in enumerate(stages.ranges):
        anew = stages.recomputed(at)
        for place, kind in enumerate(stages.held(at)):
            again = place < anew
            one = Part({(kind, again): 1}, {}, embedding=False, head=False)
            held_bytes = site.once(KEPT[again], kind)
            named = f"further.{place - len(held)}" if kind.further else f"layers.{held.start + place}"
            rows.append(layer(named, stages.rows.layer[kind, again], one, held_bytes, sent))
    rows.append(layer("head", stages.rows.head, replace(nothing, head=True), sent, 4.0))
    ids = [row.id for row in rows]
    return Profile(
        model.name,
        (way.micro_batch_size * together // way.group,),
        tuple(rows),
        tuple(pairwise(ids)),
        f"{ESTIMATED}{cluster.name} with {way.named()}, not measured",
        gpus_per_device=together,
        dtype="bfloat16" if way.precision != "fp16" else "float16",
    )
