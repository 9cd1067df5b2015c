"""Data of the plan page as one JSON record. The page computes no numbers itself.

Seconds and bytes are plain numbers, to draw lengths. Texts for users are separate values next to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from hpgo._core import at_batch
from hpgo.base.divisors import divisors
from hpgo.base.messages import above, percent, pluralize, printable
from hpgo.base.units import format_bytes, format_bytes_per_s, format_seconds
from hpgo.errors import ArgumentError
from hpgo.model.profile import Profile
from hpgo.page.planned.address import RECOMPUTE_NAMES, changes_of, stages_text
from hpgo.planning import bottleneck
from hpgo.planning.device_times import DeviceTimes
from hpgo.programs.names import PlannedSchedule
from hpgo.show import report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.hardware.cluster import Cluster, Link
    from hpgo.model.profile import Layer
    from hpgo.page.planned.origin import Origin
    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import MemoryModel
    from hpgo.programs.stages import DeviceGroup, Stage

_PROVEN = 5e-7
"""Largest optimality gap that is only floating-point rounding."""
_MAX_LAYERS = 20_000
_MAX_DEVICES = 16_384
_TERMS = ("weights", "gradients", "optimizer", "activations", "buffers")


def facts(plan: Plan, found: Origin | None) -> dict[str, Any]:
    """Return the data of the page for `plan`, which can't be changed without its planning problem `found`.

    Raises ArgumentError for a plan that is too large for the page.
    """
    if larger := too_large(plan):
        raise ArgumentError(larger, "use `hpgo plan` and `hpgo draw`, which have no such limit")
    # Addresses count layers by their index in the profile.
    places = found.places if found else {layer: at for at, layer in enumerate(_ids(plan))}
    return {
        "headline": report.headline(plan),
        "model": printable(plan.profile),
        "cluster": printable(plan.cluster),
        "changes": changes_of(plan, places),
        "controls": _controls(plan, found),
        "figures": _figures(plan),
        "step_s": plan.step_s,
        "step": seconds(plan.step_s),
        "samples_per_s": plan.samples_per_s if plan.step_s else 0.0,
        "fits": plan.fits,
        "layers": _layers(plan, found, places),
        "stages": [_stage(plan, at, places) for at in range(len(plan.stages))],
        "groups": [_group(group) for group in plan.groups],
        "nodes": _nodes(plan, found),
        "rates": _rates(found.cluster) if found else [],
        "links": _links(plan, found),
        "time": _time(plan),
        "proof": _proof(plan),
        "alternatives": _alternatives(plan, places),
        "report": {
            "tables": [
                {"title": title, "columns": columns, "rows": [list(map(str, row)) for row in rows]}
                for title, columns, rows in report.sections(plan)
            ],
            "summary": [[name, printable(fact)] for name, fact in report.summary(plan)],
        },
    }  # fmt: skip


def too_large(plan: Plan) -> str:
    """Return the reason for which `plan` is too large for the page; empty if it is not."""
    layers = sum(len(stage.layers) for stage in plan.stages)
    for count, maximum, what in ((layers, _MAX_LAYERS, "layers"), (plan.cluster_devices, _MAX_DEVICES, "devices")):
        if count > maximum:
            return f"the plan has {count:,} {what}, but the limit of the page is {maximum:,}"
    return ""


def seconds(value_s: float) -> str:
    """Return a time with three digits and its unit."""
    return format_seconds(float(f"{value_s:.3g}"))


def sized(value_bytes: float) -> str:
    """Return a size with three digits and its unit."""
    return format_bytes(float(f"{value_bytes:.3g}"))


def _ids(plan: Plan) -> list[str]:
    """Return the ids of layers in the order of the profile, or of the stages if the profile is unknown."""
    profile = None if plan.assumptions is None else plan.assumptions.profile
    if isinstance(profile, Profile):
        return [layer.id for layer in profile.layers]
    return [layer for stage in plan.stages for layer in stage.layers]


def _controls(plan: Plan, found: Origin | None) -> dict[str, Any]:
    why = ""
    if found is None:
        why = "its file does not contain profile and cluster, so it can't be changed"
    sizes = [size for size in divisors(plan.global_batch_size) if plan.global_batch_size // size <= 2**16]
    return {
        "why_fixed": why,
        "batch": plan.global_batch_size,
        "micro_batch": plan.pipeline_micro_batch_size,
        "micro_batches": sizes,
        "schedule": plan.schedule,
        "schedules": [name for name in get_args(PlannedSchedule) if name != "auto"],
        "recompute": RECOMPUTE_NAMES[plan.recompute],
        "devices": plan.cluster_devices,
    }


def _figures(plan: Plan) -> list[dict[str, str]]:
    """Return the key figures: name, value and note."""
    # The device that lacks most memory is the one to show.
    fullest = max(plan.groups, key=lambda group: group.memory.total_bytes - group.capacity_bytes)
    idle = plan.cluster_devices - plan.devices
    return [
        {"name": "step", "value": seconds(plan.step_s), "note": f"{pluralize(plan.global_batch_size, 'sample')}"},
        {
            "name": "throughput",
            "value": f"{plan.samples_per_s:.4g} /s",
            "note": f"{plan.speed_up:.3g}× one device with enough memory",
        },
        {"name": "bubble", "value": f"{100 * plan.bubble:.1f} %", "note": "of the step, devices do not compute"},
        {
            "name": "fullest device",
            "value": sized(fullest.memory.total_bytes),
            "note": f"of {sized(fullest.capacity_bytes)}" if plan.fits else f"lacks {sized(plan.shortfall_bytes)}",
        },
        {
            "name": "devices",
            "value": str(plan.devices),
            "note": f"of {plan.cluster_devices}, {idle} idle" if idle else "all of the cluster",
        },
    ]


def _layers(plan: Plan, found: Origin | None, places: dict[str, int]) -> dict[str, Any]:
    """Return names, times and memory of all layers, in the order of the profile, on a device of their stages."""
    ids = sorted(places, key=places.__getitem__)
    profile = found.profile if found else None
    if profile is None and plan.assumptions is not None and isinstance(plan.assumptions.profile, Profile):
        profile = plan.assumptions.profile
    if found is None or profile is None or plan.assumptions is None:
        return {"names": [printable(one) for one in ids], "forward_s": [], "backward_s": [], "held_bytes": []}
    memory = plan.assumptions.memory
    counted_profile = profile if plan.assumptions.include_data_loading else profile.without_loading()
    layers = {layer.id: layer for layer in counted_profile.layers}
    devices = [node.device for node in found.cluster.nodes for _ in range(node.count)]
    forward_s, backward_s, held = [0.0] * len(ids), [0.0] * len(ids), [0.0] * len(ids)
    sizes = profile.batch_sizes
    times = DeviceTimes(counted_profile)
    place_of = {layer.id: at for at, layer in enumerate(counted_profile.layers)}
    for stage in plan.stages:
        samples_of = stage.samples_by_replica or [stage.samples_per_replica] * stage.replicas
        distinct = {(devices[device], samples) for device, samples in zip(stage.devices, samples_of, strict=True)}
        kinds = [(*times.on(device), samples) for device, samples in distinct]
        # Of weights and gradients that replicas shard, some layers are whole, so each layer counts a part of the sum.
        weights, gradients = _held_shares(stage, [layers[one] for one in stage.layers], memory)
        shared = stage.replicas if memory.shard_optimizer else 1
        each = gradients + memory.optimizer_per_weight / shared
        for one in stage.layers:
            layer, at = layers[one], places[one]
            forward_s[at], once_s = (
                max(
                    at_batch(sizes, getattr(known.layers[place_of[one]], key), samples) / speed
                    for known, speed, samples in kinds
                )
                for key in ("forward_s", "backward_s")
            )
            backward_s[at] = once_s + (forward_s[at] if stage.recompute else 0.0)
            kept = 0.0 if stage.recompute else _saved_activation_bytes(sizes, layer, stage) * stage.max_in_flight
            held[at] = layer.parameter_bytes * weights + layer.trained_bytes * each + kept
    return {
        "names": [printable(layers[one].name or one) for one in ids],
        "forward_s": forward_s,
        "backward_s": backward_s,
        "held_bytes": held,
    }


def _held_shares(stage: Stage, layers: Sequence[Layer], memory: MemoryModel) -> tuple[float, float]:
    """Return the bytes of weights and of gradients that a device of the stage holds per byte of weights."""
    all_bytes = sum(layer.parameter_bytes for layer in layers)
    trained_bytes = sum(layer.trained_bytes for layer in layers)
    weights, gradients = 1.0, memory.gradients_per_weight
    if stage.zero_stage >= 3 and all_bytes:
        weights = min(weights, stage.memory.weights_bytes / all_bytes)
    if stage.zero_stage >= 2 and trained_bytes:
        gradients = min(gradients, stage.memory.gradients_bytes / trained_bytes)
    return weights, gradients


def _saved_activation_bytes(sizes: Sequence[int], layer: Layer, stage: Stage) -> float:
    return at_batch(
        sizes, layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes, stage.samples_per_replica
    )


def _stage(plan: Plan, at: int, places: dict[str, int]) -> dict[str, Any]:
    stage = plan.stages[at]
    layers = [places[layer] for layer in stage.layers]
    group = next(number for number, group in enumerate(plan.groups) if at in group.stages)
    text = stages_text([(layers, list(stage.devices))])
    facts = [
        ("layers", f"{len(stage.layers)}: {report.layer_range(plan, stage)}"),
        ("devices", f"{report.device_ranges(stage.devices)} ({pluralize(stage.replicas, 'replica')})"),
        ("samples per micro-batch", f"{stage.samples_per_replica} on the fullest replica"),
        ("in flight", pluralize(stage.max_in_flight, "micro-batch")),
        ("forward", seconds(stage.forward_s)),
        ("backward", seconds(stage.backward_s)),
        *([("transfers in each pass", seconds(stage.exposed_transfer_s))] if stage.exposed_transfer_s else []),
        *(
            [("gathers and scatters in each pass", f"{seconds(gathers_s)}, {seconds(scatters_s)}")]
            if (gathers_s := stage.exposed_forward_comm_s) + (scatters_s := stage.exposed_backward_comm_s)
            else []
        ),
        *([("gradient all-reduce", seconds(stage.grad_reduce_s))] if stage.replicas > 1 else []),
        ("free", _free(plan.groups[group])),
    ]
    return {
        "layers": text.partition("@")[0],
        "devices": text.partition("@")[2],
        "group": group,
        "replicas": stage.replicas,
        "share": stage.samples_per_replica,
        "forward_s": stage.forward_s,
        "backward_s": stage.backward_s,
        "said": facts,
    }


def _free(group: DeviceGroup) -> str:
    if group.free_bytes < 0:
        return f"lacks {sized(-group.free_bytes)}"
    return f"{sized(group.free_bytes)} of {sized(group.capacity_bytes)}"


def _group(group: DeviceGroup) -> dict[str, Any]:
    terms = [getattr(group.memory, f"{term}_bytes") for term in _TERMS]
    return {
        "name": report.device_ranges(group.devices),
        "devices": stages_text([([0], list(group.devices))]).partition("@")[2],
        "stages": list(group.stages),
        "terms": [
            {"name": name, "bytes": value, "text": sized(value)} for name, value in zip(_TERMS, terms, strict=True)
        ],
        "total_bytes": group.memory.total_bytes,
        "total": sized(group.memory.total_bytes),
        "capacity_bytes": group.capacity_bytes,
        "capacity": sized(group.capacity_bytes),
        "free": _free(group),
        "fits": group.free_bytes >= 0,
    }


def _nodes(plan: Plan, found: Origin | None) -> list[dict[str, Any]]:
    counts = plan.nodes or (plan.cluster_devices,)
    rows, first = [], 0
    for at, count in enumerate(counts):
        node = found.cluster.nodes[at] if found else None
        rows.append(
            {
                "name": (node.name if node else "") or f"node {at}",
                "first": first,
                "count": count,
                "device": printable(node.device.name) if node else "device",
                "memory": format_bytes(node.device.memory_bytes) if node else "",
            }
        )
        first += count
    return rows


def _rates(cluster: Cluster) -> list[list[str]]:
    return [
        ["within a node", _rate(cluster.intra)],
        *([["between nodes", _rate(cluster.inter)]] if len(cluster.nodes) > 1 else []),
    ]


def _rate(link: Link) -> str:
    """Return the rate of a link, and that of collectives if it differs."""
    said = format_bytes_per_s(link.bytes_per_s)
    if link.collective_bytes_per_s != link.bytes_per_s:
        said += f", {format_bytes_per_s(link.collective_bytes_per_s)} for all-reduces"
    return said


def _links(plan: Plan, found: Origin | None) -> list[dict[str, Any]]:
    """Return the transfers between adjacent stages, and their links."""
    rows = []
    node_of = [at for at, count in enumerate(plan.nodes or (plan.cluster_devices,)) for _ in range(count)]
    for at, (stage, behind) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        if stage.devices == behind.devices:
            continue
        nodes = {node_of[device] for device in (*stage.devices, *behind.devices)}
        crossing = plan.boundary_tensors[at] if plan.boundary_tensors else ()
        size = sum(each.bytes or 0.0 for each in crossing)
        link = None if found is None else found.cluster.inter if len(nodes) > 1 else found.cluster.intra
        rows.append(
            {
                "from": at,
                "to": at + 1,
                "between_nodes": len(nodes) > 1,
                "bytes": sized(size) if size else "",
                "time": seconds(stage.transfer_s),
                "rate": format_bytes_per_s(link.bytes_per_s) if link else "",
                "busy": stage.link_busy_s * plan.micro_batches / plan.step_s if plan.step_s else 0.0,
            }
        )
    return rows


def _time(plan: Plan) -> dict[str, Any]:
    """Return where the time of the step goes, as texts and as shares for each group of devices."""
    step_s = plan.step_s or 1.0
    rows = []
    for group in plan.groups:
        own = [plan.stages[at] for at in group.stages]
        forward_s = sum(stage.occupied_s[0] for stage in own) * plan.micro_batches
        backward_s = sum(stage.occupied_s[1] for stage in own) * plan.micro_batches
        tail_s = max(stage.exposed_grad_reduce_s for stage in own)
        # Rounding can make the parts exceed the step by a tiny amount.
        rest_s = max(0.0, plan.step_s - forward_s - backward_s - tail_s)
        terms = (("forward", forward_s), ("backward", backward_s), ("gradients sync", tail_s), ("waits", rest_s))
        rows.append([{"name": name, "share": part_s / step_s, "text": seconds(part_s)} for name, part_s in terms])
    parts = bottleneck.parts(plan.stages, plan.micro_batches, plan.step_s)
    return {
        "groups": rows,
        "parts": [
            {"what": part.what, "share": part.seconds / step_s, "text": seconds(part.seconds)}
            for part in parts
            if part.seconds >= 0.0005 * step_s
        ],
        "limit": plan.limit,
        "advice": bottleneck.advice(
            plan.stages, plan.micro_batches, plan.step_s, idle=plan.cluster_devices - plan.devices
        ),
    }


def _proof(plan: Plan) -> dict[str, Any]:
    bound_s, gap = plan.lower_bound_s, plan.optimality_gap
    return {
        "bound_s": bound_s,
        "bound": None if bound_s is None else seconds(bound_s),
        "is_optimal": gap is not None and gap <= _PROVEN,
        "gap": None if gap is None else "proven optimal" if gap <= _PROVEN else above(gap),
        "stopped": plan.stop_reason,
        "text": report.proof(plan),
    }


def _alternatives(plan: Plan, places: dict[str, int]) -> list[dict[str, Any]]:
    """Return the alternatives, each with the fields of an address that lead to its plan."""
    rows = []
    for kind, others in (("", plan.alternatives), ("schedule", plan.schedules)):
        for row in others:
            ratio = "" if row.step_s is None or not plan.step_s else f"{100 * (row.step_s / plan.step_s - 1):+.1f} %"
            is_this = row.reason == "is this plan" or (kind == "schedule" and row.name == plan.schedule)
            rows.append(
                {
                    "name": row.name,
                    "kind": kind,
                    "step": "" if row.step_s is None else seconds(row.step_s),
                    "to_this": ratio,
                    "why": printable(row.reason),
                    "is_this": is_this,
                    "shape": "" if row.plan is None else report.shape(row.plan),
                    "changes": None if row.plan is None or is_this else changes_of(row.plan, places),
                }
            )
    return rows


def best_so_far(best_s: float, bound_s: float) -> dict[str, Any]:
    """Return the progress of a search: its best step, its bound, and the gap."""
    gap = best_s / bound_s - 1 if bound_s > 0 and best_s != float("inf") else None
    return {
        "best": None if best_s == float("inf") else seconds(best_s),
        "bound": None if gap is None else seconds(bound_s),
        "gap": None if gap is None else percent(max(0.0, gap)),
        "share": 0.0 if gap is None else min(1.0, bound_s / best_s),
    }
