"""Laws: invariants that every result satisfies, and that are checked before it is returned.

There are laws for plans, for estimates of LLMs, for chain plans (`hpgo partition`, inference over a chain of hosts) and
for results of the original HPGO planner (`hpgo.compat`).

This module computes its numbers from the profile and the cluster, independently of the native planner. Only values
between measured batch sizes are interpolated natively; tests/test_batches.py checks those. docs/proofs.md lists the
laws. A law is a function that returns the place where it is broken, or an empty text. Its docstring is the law.

Devices have times of their own in the profile, or a speed relative to the device that it was measured on, which has
speed 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from hpgo._core import at_batch
from hpgo.base.laws import broken, check, is_at_most, is_equal
from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.model.profile import Profile
from hpgo.planning.device_times import DeviceTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpgo.hardware.cluster import Device, Node
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.model.profile import Layer
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plans import Alternative, Plan, ScheduleChoice
    from hpgo.programs.stages import Stage

_LENGTHS = (
    "forward_s", "backward_s", "transfer_s", "transfer_busy_s", "exposed_transfer_s", "grad_reduce_s",
    "exposed_grad_reduce_s", "exposed_forward_comm_s", "exposed_backward_comm_s",
)  # fmt: skip
_SIZES = (
    "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes", "recomputed_bytes",
)  # fmt: skip


# --- Plans ------------------------------------------------------------------------------------------------------------


def checked(plan: Plan) -> Plan:
    """Return `plan` if it and its alternatives satisfy all laws. Raises InternalError otherwise."""
    for name, one in _plans(plan):
        check(f"the {name} of `{shorten(plan.profile)}` on `{shorten(plan.cluster)}`", PLAN_LAWS, one)
    return plan


def check_file(plan: Plan, source: str) -> None:
    """Raise ArgumentError, which names `source`, if the numbers of a file contradict each other.

    A file may be edited and then evaluated again, so its numbers need not follow from its profile and cluster.
    """
    for name, one in _plans(plan):
        check(f"{source}: the {name}", FILE_LAWS, one, error=ArgumentError, hint="make it again with `hpgo plan`")


def bounded(plan: Plan, name: str, bound_s: float | None) -> float | None:
    """Return the smaller of a search's bound and the step of `plan`. Raises InternalError if the bound is larger.

    `name` is the field of `Plan` that gets the bound, for the message. The step of a plan that does not fit may be
    below the bound, because the bound is on plans that fit.
    """
    if bound_s is None:
        return None
    # The comparison has a tolerance for rounding, since bound and step are computed differently. A bound above the
    # step within this tolerance is cut, so that the gap is never negative.
    if plan.fits and not is_at_most(bound_s, plan.step_s):
        broken(f"the plan of `{shorten(plan.profile)}`", bound_is_below_step, f"`{name}`")
    return min(bound_s, plan.step_s)


def _plans(plan: Plan) -> Iterator[tuple[str, _Checked]]:
    sources = _Sources.of(plan)
    yield "plan", _Checked(plan, sources)
    rows: list[Alternative | ScheduleChoice] = [*plan.alternatives, *plan.schedules]
    for row in rows:
        if row.plan is not None and row.plan is not plan:
            # Alternatives usually share profile and cluster with the plan. Their sums are then computed only once.
            own = row.plan.assumptions is plan.assumptions or sources.serves(row.plan)
            yield f"plan `{row.name}`", _Checked(row.plan, sources if own else _Sources.of(row.plan))


@dataclass(frozen=True)
class _Sources:
    """Profile and cluster of a plan; None if its file does not contain them."""

    measured: Profile | None
    profile: Profile | None
    cluster: Cluster | None

    @classmethod
    def of(cls, plan: Plan) -> _Sources:
        assumed = plan.assumptions
        measured = assumed.profile if assumed is not None and isinstance(assumed.profile, Profile) else None
        cluster = assumed.cluster if assumed is not None and isinstance(assumed.cluster, Cluster) else None
        profile = (
            # Data is loaded ahead of the step. So the times of data-loading layers count only on request.
            measured
            if measured is None or assumed is None or assumed.include_data_loading
            else measured.without_loading()
        )
        return cls(measured, profile, cluster)

    def serves(self, plan: Plan) -> bool:
        """Return whether another plan has the same profile and cluster."""
        assumed = plan.assumptions
        return assumed is not None and assumed.profile is self.measured and assumed.cluster is self.cluster

    @cached_property
    def layers(self) -> dict[str, Layer]:
        return {} if self.profile is None else {layer.id: layer for layer in self.profile.layers}

    @cached_property
    def devices(self) -> list[Device]:
        """The devices of the cluster by number; empty if the cluster is unknown."""
        if self.cluster is None:
            return []
        return [node.device for node in self.cluster.nodes for _ in range(node.count)]

    @cached_property
    def times(self) -> DeviceTimes | None:
        """Times of the profile's layers on devices."""
        return None if self.profile is None else DeviceTimes(self.profile)

    def layers_of(self, profile: Profile) -> dict[str, Layer]:
        """Return the layers by id of a profile on one device type."""
        if profile.device not in self._layers_of:
            self._layers_of[profile.device] = {layer.id: layer for layer in profile.layers}
        return self._layers_of[profile.device]

    @cached_property
    def _layers_of(self) -> dict[str, dict[str, Layer]]:
        return {}

    @cached_property
    def speeds(self) -> list[float]:
        """Upper bound for each device on the profile's own time of any layers over their time there."""
        if self.cluster is None or self.times is None:
            return []
        # Nodes usually share a few device records, so identities are compared.
        known = {id(node.device): self._speed(self.times, node.device) for node in _distinct(self.cluster)}
        return [known[id(device)] for device in self.devices]

    @staticmethod
    def _speed(times: DeviceTimes, device: Device) -> float:
        profile, speed = times.on(device)
        if profile is times.profile:
            return speed
        ratios = [
            (own.forward_s[at] + own.backward_s[at]) / both_s if both_s else inf
            for own, layer in zip(times.profile.layers, profile.layers, strict=True)
            for at in range(len(profile.batch_sizes))
            if own.forward_s[at] + own.backward_s[at]
            for both_s in [layer.forward_s[at] + layer.backward_s[at]]
        ]
        return speed * max(ratios, default=1.0)


def _distinct(cluster: Cluster) -> Iterable[Node]:
    """Return one node for each device record of a cluster."""
    return {id(node.device): node for node in cluster.nodes}.values()


@dataclass(frozen=True)
class _Checked:
    """A plan, and the values that its laws compute from profile and cluster."""

    plan: Plan
    sources: _Sources

    @cached_property
    def whole_model(self) -> bool:
        """Whether each layer of the profile is on exactly one stage."""
        named = [layer for stage in self.plan.stages for layer in stage.layers]
        known = self.sources.layers
        return len(named) == len(known) and known.keys() == set(named)

    @cached_property
    def sums(self) -> list[tuple[list[float], list[float], float]]:
        """Forward and backward times of each stage at each measured batch size, and its bytes of weights."""
        known, profile = self.sources.layers, self.sources.profile
        found = []
        for stage in self.plan.stages if profile is not None and self.whole_model else ():
            layers = [known[layer] for layer in stage.layers]
            # The condition of the loop implies it, but type checkers cannot see that.
            assert profile is not None  # noqa: S101
            sizes = range(len(profile.batch_sizes))
            found.append(
                (
                    [sum(layer.forward_s[at] for layer in layers) for at in sizes],
                    [sum(layer.backward_s[at] for layer in layers) for at in sizes],
                    sum(layer.parameter_bytes for layer in layers),
                )
            )
        return found

    def times_on(self, at: int) -> tuple[float, float] | None:
        """Return the forward and backward seconds of a stage on its slowest device, without recomputation.

        None if the cluster does not have its devices.
        """
        stage, devices, times = self.plan.stages[at], self.sources.devices, self.sources.times
        assert times is not None  # noqa: S101
        if max(stage.devices) >= len(devices):
            return None
        passes_s = []
        samples_of = stage.samples_by_replica or [stage.samples_per_replica] * stage.replicas
        records = zip(stage.devices, samples_of, strict=True)
        for device, samples in {(id(devices[one]), count): (devices[one], count) for one, count in records}.values():
            profile, speed = times.on(device)
            if profile is times.profile:
                forward_s, backward_s = self.seconds(at, samples)
            else:
                forward_s, backward_s = self._typed_s(profile, stage, samples)
            passes_s.append((forward_s / speed, backward_s / speed))
        # The slowest kind of device may be another one for each pass.
        return max(forward_s for forward_s, _ in passes_s), max(backward_s for _, backward_s in passes_s)

    def _typed_s(self, profile: Profile, stage: Stage, samples: int) -> tuple[float, float]:
        """Return the forward and backward seconds of a stage for `samples` samples with the times of `profile`."""
        sizes, layers = profile.batch_sizes, self.sources.layers_of(profile)
        own = [layers[layer] for layer in stage.layers]
        forward_s = [sum(layer.forward_s[at] for layer in own) for at in range(len(sizes))]
        backward_s = [sum(layer.backward_s[at] for layer in own) for at in range(len(sizes))]
        return at_batch(sizes, forward_s, samples), at_batch(sizes, backward_s, samples)

    def seconds(self, stage: int, samples: int) -> tuple[float, float]:
        """Return the forward and backward seconds of a stage for `samples` samples on a device of speed 1."""
        assert self.sources.profile is not None  # noqa: S101
        sizes = self.sources.profile.batch_sizes
        forward_s, backward_s, _ = self.sums[stage]
        return at_batch(sizes, forward_s, samples), at_batch(sizes, backward_s, samples)


def numbers_are_lengths(one: _Checked) -> str:
    """Times and sizes of a plan are finite and not negative."""
    plan = one.plan
    for name in ("step_s", "one_device_step_s", "loading_s", "lower_bound_s", "node_aligned_bound_s"):
        value = getattr(plan, name)
        if value is not None and not 0 <= value < inf:
            return f"`{name}`"
    for at, stage in enumerate(plan.stages):
        for name in _LENGTHS:
            if not 0 <= getattr(stage, name) < inf:
                return f"`{name}` of stage {at}"
        for name in _SIZES:
            if not 0 <= getattr(stage.memory, name) < inf:
                return f"`{name}` of stage {at}"
    return ""


def step_covers_work(one: _Checked) -> str:
    """A step takes at least as long as any device is occupied: by all forward and backward passes of its stages."""
    plan = one.plan
    for group in plan.groups:
        stages = [plan.stages[at] for at in group.stages]
        work_s = plan.micro_batches * sum(sum(stage.occupied_s) for stage in stages)
        if not is_at_most(work_s, plan.step_s):
            return f"the devices of stage {group.stages[0]}"
    return ""


def bubble_is_a_share(one: _Checked) -> str:
    """The bubble, the share of device time without computation, is between 0 and 1."""
    return "" if is_at_most(0, one.plan.bubble, 1) and is_at_most(one.plan.bubble, 1) else "`bubble`"


def bound_is_below_step(one: _Checked) -> str:
    """A lower bound is at most the step of the plan, if it fits, and of each alternative that fits."""
    plan = one.plan
    bounds_s = {"lower_bound_s": plan.lower_bound_s, "node_aligned_bound_s": plan.node_aligned_bound_s}
    if plan.restriction is not None:
        bounds_s["unrestricted_lower_bound_s"] = plan.restriction.unrestricted_lower_bound_s
    for name, bound_s in bounds_s.items():
        if bound_s is not None and plan.fits and not is_at_most(bound_s, plan.step_s):
            return f"`{name}`"
    for row in plan.alternatives:
        if row.step_s is not None and not is_at_most(plan.lower_bound_s or 0.0, row.step_s):
            return f"`lower_bound_s` and `{row.name}`"
    return ""


def compared_steps_are_their_plans(one: _Checked) -> str:
    """The step in a comparison is that of the compared plan, and none is below the step of `auto`'s choice.

    `schedule="auto"` compares all schedules. Those for which no plan fits have no step.
    """
    plan = one.plan
    rows: list[Alternative | ScheduleChoice] = [*plan.alternatives, *plan.schedules]
    for row in rows:
        if row.step_s is not None and row.plan is not None and row.plan.step_s != row.step_s:
            return f"`{row.name}`"
    for row in plan.schedules:
        if row.step_s is not None and not is_at_most(plan.step_s, row.step_s):
            return f"`{row.name}`"
    return ""


def shares_make_the_micro_batch(one: _Checked) -> str:
    """Replicas of a stage share each micro-batch: the largest share is the micro-batch over replicas, rounded up.

    Shares by speed are whole numbers from the smallest allowed one on that add up to the micro-batch.
    """
    plan, assumed = one.plan, one.plan.assumptions
    for at, stage in enumerate(plan.stages):
        if samples := stage.samples_by_replica:
            least = 1 if assumed is None else assumed.min_samples_per_replica
            is_whole = len(samples) == stage.replicas and sum(samples) == plan.pipeline_micro_batch_size
            allowed = assumed is None or assumed.shares_by_speed
            if not (allowed and is_whole and min(samples) >= least and max(samples) == stage.samples_per_replica):
                return f"stage {at}"
            continue
        # Shares differ by at most one sample, so the largest is the quotient rounded up.
        minimum, rest = divmod(plan.pipeline_micro_batch_size, stage.replicas)
        uneven = rest and assumed is not None and assumed.even_split
        small = assumed is not None and minimum < assumed.min_samples_per_replica
        if stage.samples_per_replica != minimum + (rest > 0) or uneven or small:
            return f"stage {at}"
    return ""


def stages_hold_the_model(one: _Checked) -> str:
    """Stages hold each layer of the profile once, in an order in which the layers can run."""
    if one.sources.profile is None:
        return ""
    if not one.whole_model:
        return "the layers of the stages"
    place = {layer: at for at, layer in enumerate(layer for stage in one.plan.stages for layer in stage.layers)}
    # An edge from a later to an earlier layer would need a result that does not exist yet.
    back = next((end for start, end in one.sources.profile.edges if place[start] >= place[end]), None)
    return "" if back is None else f"layer `{shorten(back)}`"


def stage_times_are_their_layers(one: _Checked) -> str:
    """A stage takes what its layers take for the largest share of a micro-batch on its slowest device."""
    plan = one.plan
    if not one.sums or not one.sources.speeds:
        return ""
    stages_s = [one.times_on(at) for at in range(len(plan.stages))]
    # The native planner subtracts prefix sums over all layers. So rounding is relative to their whole sum, which is
    # largest on the slowest device.
    slowest = min(one.sources.speeds)
    whole_s = [sum(one.seconds(at, plan.pipeline_micro_batch_size)) / slowest for at in range(len(plan.stages))]
    of = max(sum(whole_s), sum(sum(stage_s) for stage_s in stages_s if stage_s is not None))
    for at, (stage, stage_s) in enumerate(zip(plan.stages, stages_s, strict=True)):
        if stage_s is None:
            return f"the devices of stage {at}"
        forward_s, backward_s = stage_s
        repeated_s = forward_s if stage.recompute else 0.0
        if not (is_equal(stage.forward_s, forward_s, of) and is_equal(stage.backward_s, backward_s + repeated_s, of)):
            return f"stage {at}"
    return ""


def speed_up_is_possible(one: _Checked) -> str:
    """The speed-up is at most the sum of the device speeds, or more by what smaller shares save in the profile.

    The replicas of a stage may together take less time than one device takes for the whole micro-batch, if the profile
    has less time per sample for smaller batches. The limit grows by this ratio. A device with times of its own has the
    speed of the layer that gains most.
    """
    plan = one.plan
    if not one.sums or not one.sources.speeds or not plan.step_s:
        return ""
    stages = range(len(plan.stages))
    one_device_s = sum(sum(one.seconds(at, plan.pipeline_micro_batch_size)) for at in stages)
    # The speed-up is relative to this time, so check it first.
    if not is_equal(plan.one_device_step_s, plan.micro_batches * one_device_s):
        return "`one_device_step_s`"
    shared_s = sum(
        count * sum(one.seconds(at, samples))
        for at, stage in enumerate(plan.stages)
        for samples, count in (Counter(stage.samples_by_replica) or {stage.samples_per_replica: stage.replicas}).items()
    )
    speeds = sum(one.sources.speeds[device] for group in plan.groups for device in group.devices)
    cheaper = one_device_s / shared_s if shared_s else inf
    return "" if is_at_most(plan.speed_up, speeds * max(1.0, cheaper)) else "`speed_up`"


def devices_hold_their_weights(one: _Checked) -> str:
    """A device holds at least its shard of its layers' weights, and at most the activations of its micro-batches."""
    plan = one.plan
    if one.sums:
        of = sum(held for _, _, held in one.sums)
        for at, (stage, (_, _, held)) in enumerate(zip(plan.stages, one.sums, strict=True)):
            shards = stage.replicas if stage.zero_stage == 3 else 1
            if not is_at_most(held / shards, stage.memory.weights_bytes, of):
                return f"stage {at}"
    for at, stage in enumerate(plan.stages):
        micro_batch = stage.saved_activation_bytes + stage.memory.recomputed_bytes
        if not is_at_most(stage.memory.activations_bytes, stage.max_in_flight * micro_batch, stage.memory.total_bytes):
            return f"the activations of stage {at}"
    return ""


PLAN_LAWS = (
    numbers_are_lengths, stages_hold_the_model, shares_make_the_micro_batch, stage_times_are_their_layers,
    step_covers_work, bubble_is_a_share, speed_up_is_possible, bound_is_below_step, compared_steps_are_their_plans,
    devices_hold_their_weights,
)  # fmt: skip
"""Laws of plans. The first broken one is reported, so a cause is listed before its effects."""
FILE_LAWS = (
    numbers_are_lengths, stages_hold_the_model, shares_make_the_micro_batch, step_covers_work, bubble_is_a_share,
    bound_is_below_step,
)  # fmt: skip
"""Laws of plans in files, which hold for edited files, too."""


# --- Estimates of transformers ----------------------------------------------------------------------------------------


def checked_estimate(estimate: LlmEstimate, *, layers: int, weights_bytes: float) -> LlmEstimate:
    """Return `estimate` if it satisfies all laws for a model of this size. Raises InternalError otherwise."""
    what = f"the estimate of `{shorten(estimate.model)}` on `{shorten(estimate.cluster)}`"
    check(what, ESTIMATE_LAWS, estimate)
    # This law needs values that the estimate does not contain, so it is not in `ESTIMATE_LAWS`.
    if place := ranks_hold_the_model(estimate, layers, weights_bytes):
        broken(what, ranks_hold_the_model, place)
    return estimate


def estimate_numbers_are_lengths(estimate: LlmEstimate) -> str:
    """Times and sizes of an estimate are finite and not negative."""
    named = [("step_s", estimate.step_s), ("bound_s", estimate.bound_s), *estimate.time_by_term_s]
    named += [(name, size) for rank in estimate.stages for name, size in rank.memory_bytes]
    named += [("forward_s", rank.forward_s) for rank in estimate.stages]
    named += [("backward_s", rank.backward_s) for rank in estimate.stages]
    return next((f"`{name}`" for name, value in named if not 0 <= value < inf), "")


def degrees_make_the_gpus(estimate: LlmEstimate) -> str:
    """All degrees multiplied are the number of GPUs, and micro-batches of all replicas make the global batch."""
    config = estimate.parallelism
    if config.tp * config.cp * config.pp * config.dp != estimate.gpus or len(estimate.stages) != config.pp:
        return "the degrees"
    return (
        ""
        if estimate.micro_batches * config.micro_batch_size * config.dp == estimate.global_batch_size
        else "the batch"
    )


def terms_make_the_step(estimate: LlmEstimate) -> str:
    """The terms of a step are its parts: their sum is the step time."""
    return (
        "" if is_equal(sum(seconds for _, seconds in estimate.time_by_term_s), estimate.step_s) else "`time_by_term_s`"
    )


def estimate_covers_work(estimate: LlmEstimate) -> str:
    """A step takes at least as long as any rank computes, and at least its bound."""
    for at, rank in enumerate(estimate.stages):
        if not is_at_most(estimate.micro_batches * (rank.forward_s + rank.backward_s), estimate.step_s):
            return f"rank {at}"
    return "" if is_at_most(estimate.bound_s, estimate.step_s) else "`bound_s`"


def utilization_is_a_share(estimate: LlmEstimate) -> str:
    """Model FLOPs utilization (MFU) is between 0 and 1: GPUs do not exceed their peak rate."""
    return "" if is_at_most(0, estimate.utilization, 1) and is_at_most(estimate.utilization, 1) else "`utilization`"


def ranks_hold_the_model(estimate: LlmEstimate, layers: int, weights_bytes: float) -> str:
    """Ranks hold each layer once, and all GPUs together each weight at least once."""
    parts = sorted(part for rank in estimate.stages for part in rank.layers if part[0] != part[1])
    if [*(begin for begin, _ in parts), layers] != [0, *(end for _, end in parts)]:
        return "the layers of the ranks"
    held = sum(dict(rank.memory_bytes)["weights"] for rank in estimate.stages) * (estimate.gpus / len(estimate.stages))
    return "" if is_at_most(weights_bytes, held) else "the weights of the ranks"


ESTIMATE_LAWS = (
    estimate_numbers_are_lengths, degrees_make_the_gpus, estimate_covers_work, terms_make_the_step,
    utilization_is_a_share,
)  # fmt: skip


# --- Chain plans ------------------------------------------------------------------------------------------------------


def checked_chain(plan: ChainPlan, weights_bytes: Sequence[float]) -> ChainPlan:
    """Return a chain plan if it satisfies all laws for these weights per stage. Raises InternalError otherwise."""
    what = f"the chain plan of `{shorten(plan.model)}`"
    check(what, CHAIN_LAWS, plan)
    if place := hosts_hold_their_weights(plan, weights_bytes):
        broken(what, hosts_hold_their_weights, place)
    return plan


def check_chain_file(plan: ChainPlan, source: str) -> None:
    """Raise ArgumentError, which names `source`, if the chain plan of a file breaks a law."""
    hint = "make it again: `hpgo partition … --json`"
    check(f"{source}: the chain plan", CHAIN_LAWS, plan, error=ArgumentError, hint=hint)


def chain_numbers_are_lengths(plan: ChainPlan) -> str:
    """Times and sizes of a chain plan are finite and not negative."""
    named = [(name, getattr(plan, name)) for name in ("interval_s", "latency_s", "value", "lower_bound", "loading_s")]
    named += [(f"{name} of stage {at}", getattr(stage, name)) for at, stage in enumerate(plan.stages, 1)
              for name in ("compute_s", "interval_s", "memory_bytes", "kv_cache_bytes")]  # fmt: skip
    named += [(f"{name} of hop {at}", getattr(hop, name)) for at, hop in enumerate(plan.hops)
              for name in ("bytes", "seconds", "interval_s")]  # fmt: skip
    return next((f"`{name}`" for name, value in named if not 0 <= value < inf), "")


def stages_follow_each_other(plan: ChainPlan) -> str:
    """Stages hold the layers one after the other from the first on, each host at most one stage."""
    for at, (stage, behind) in enumerate(pairwise(plan.stages), 2):
        if behind.first != stage.last + 1:
            return f"stage {at}"
    if plan.stages and plan.stages[0].first != 1:
        return "stage 1"
    # A host with two stages would count its memory and its ports twice.
    hosts = [host for stage in plan.stages for host in stage.hosts]
    return "" if len({*hosts, *plan.unused}) == len(hosts) + len(plan.unused) else "the hosts"


def interval_is_the_longest(plan: ChainPlan) -> str:
    """The interval is the longest of all stages and hops, and that of a stage is its computation over its hosts.

    The interval is the time between two batches that leave a full pipeline. The hosts of a stage take turns with whole
    batches. A hop is a transfer between stages, into the first one or out of the last one.
    """
    for at, stage in enumerate(plan.stages, 1):
        if not is_equal(stage.interval_s * len(stage.hosts), stage.compute_s):
            return f"stage {at}"
    intervals_s = [stage.interval_s for stage in plan.stages] + [hop.interval_s for hop in plan.hops]
    max_s = max(intervals_s, default=0.0)
    return "" if is_equal(plan.interval_s, max_s) else "`interval_s`"


def latency_is_the_sum(plan: ChainPlan) -> str:
    """The latency is the sum of all stages and hops."""
    sum_s = sum(stage.compute_s for stage in plan.stages) + sum(hop.seconds for hop in plan.hops)
    return "" if is_equal(plan.latency_s, sum_s) else "`latency_s`"


def value_is_above_bound(plan: ChainPlan) -> str:
    """The value is the one that the objective minimizes, and at least the lower bound."""
    hosts = sum(len(stage.hosts) for stage in plan.stages)
    named = {"throughput": plan.interval_s, "latency": plan.latency_s, "hosts": hosts}.get(plan.objective, plan.value)
    if not is_equal(plan.value, named):
        return "`value`"
    return "" if is_at_most(plan.lower_bound, plan.value) else "`lower_bound`"


def hosts_hold_their_stages(plan: ChainPlan) -> str:
    """The memory of a host is at least the layers and buffers of its stage."""
    return next(
        (
            f"stage {at}"
            for at, one in enumerate(plan.stages, 1)
            if not is_at_most(one.memory_bytes, one.host_memory_bytes)
        ),
        "",
    )


def hosts_hold_their_weights(plan: ChainPlan, weights_bytes: Sequence[float]) -> str:
    """A host holds at least the weights of its stage's layers."""
    for at, (stage, held) in enumerate(zip(plan.stages, weights_bytes, strict=True), 1):
        rounded = (stage.last - stage.first + 1) / 1024  # The search rounds each layer to 1/1024 byte.
        if not is_at_most(held, stage.memory_bytes + rounded):
            return f"stage {at}"
    return ""


CHAIN_LAWS = (
    chain_numbers_are_lengths, stages_follow_each_other, interval_is_the_longest, latency_is_the_sum,
    value_is_above_bound, hosts_hold_their_stages,
)  # fmt: skip


# --- Answers of the original planner ----------------------------------------------------------------------------------


class Original(NamedTuple):
    """A result of the original HPGO planner (`hpgo.compat`): its speed-ups, and its stages if it has any.

    States are the cuts of the model in one line (PipeDream's *antichain states*). A stage is its first state, its end,
    its number of replicas and its devices. The end is exclusive, except for the last stage.
    """

    speed_ups: Sequence[float]
    devices: int
    states: int = 0
    stages: Sequence[tuple[int, int, int, Sequence[int]]] = ()


def check_original(model: str, answer: Original) -> None:
    """Raise InternalError if a result of the original planner breaks a law."""
    check(f"the compatible plan of `{shorten(model)}`", ORIGINAL_LAWS, answer)


def original_speed_up_is_possible(answer: Original) -> str:
    """A speed-up of the original planner is at most the number of devices, which it takes to be equally fast."""
    used = sum(len(devices) for *_, devices in answer.stages) or answer.devices
    # Not a number fails both comparisons, so it is caught, too.
    wrong = (one for one in answer.speed_ups if not (0 <= one < inf and is_at_most(one, used)))
    return "" if next(wrong, None) is None else "`speedup`"


def original_stages_follow_each_other(answer: Original) -> str:
    """Each state of the original planner is on one stage, in order, and each device has at most one stage."""
    first, last, used = 0, answer.states - 1, set[int]()
    for at, (start, end, _, devices) in enumerate(answer.stages):
        is_last = at == len(answer.stages) - 1
        if start != first or not start <= end <= last or (is_last and end != last):
            return f"stage {at}"
        if not devices or not used.isdisjoint(devices) or not all(0 <= one < answer.devices for one in devices):
            return f"the devices of stage {at}"
        first = end
        used.update(devices)
    return ""


ORIGINAL_LAWS = (original_speed_up_is_possible, original_stages_follow_each_other)
