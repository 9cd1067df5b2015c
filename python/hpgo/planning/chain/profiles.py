"""Chain problem for a profile and a cluster of mixed devices."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hpgo._core import at_batch
from hpgo.base.messages import pluralize, shorten
from hpgo.errors import ArgumentError
from hpgo.model.formats import pipeedge
from hpgo.model.states import cut_points, given_cuts
from hpgo.planning.chain.records import ChainProblem, Hop, HostGroup
from hpgo.planning.device_times import DeviceTimes
from hpgo.planning.notes import noise, untimed
from hpgo.programs.blocks import Blocks

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster, Device
    from hpgo.model.kv_cache import KvCache
    from hpgo.model.profile import Profile
    from hpgo.programs.frameworks import Framework


_ATTENTION = re.compile(r"attention|attn")
"""Part of the id of a layer that has the attention of its block."""
_MAX_CUTS = 20_000
"""Largest number of cuts of a model for which all orders of its layers are searched.

With more than 10,000 cuts, the search also takes one order if more than 60 million pairs of cuts are nested, because a
pair takes 4 bytes. 16,386 cuts of 14 branches take 1 s on two devices. Twice the cuts can have four times the pairs,
and take four times the time and memory.
"""


def task_of_profile(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    dtype: str,
    *,
    include_data_loading: bool,
    framework: Framework | None,
    kv_cache: KvCache | None = None,
) -> ChainProblem:
    """Return the chain problem of a profile and a cluster. Loading takes no time unless `include_data_loading` is set.

    Raises ArgumentError for a framework that trains, or that can't split the model, and for a KV cache of another model
    or of blocks that may be cut.
    """
    loading = () if include_data_loading else profile.loading
    loading_s = max((at_batch(profile.batch_sizes, layer.forward_s, batch_size) for layer in loading), default=0.0)
    # The search does not know tied weights. A host with both layers is assumed to hold the weight twice.
    profile = profile.without_tied_weights()
    if loading:
        profile = profile.without_loading()
    kv_bytes = {} if kv_cache is None else _kv_bytes(profile, kv_cache, framework)
    if kv_bytes:
        # Each stage keeps the cache of its layers as long as their weights, so the search counts both alike.
        layers_with_cache = [
            replace(layer, parameter_bytes=layer.parameter_bytes + kv_bytes.get(layer.id, 0))
            for layer in profile.layers
        ]
        profile = replace(profile, layers=tuple(layers_with_cache))
    blocks: list[int] = []
    if framework is None:
        # Branching models can have exponentially many cuts, so the search for them is limited.
        found = cut_points(profile, bound=_MAX_CUTS)
    elif framework.trains:
        raise ArgumentError(
            f"{framework.title} is a framework for training, but `hpgo partition` plans inference",
            f"`hpgo plan --framework {framework.name}` plans training",
            code="unknown_name",
        )
    else:
        model = Blocks.of(profile)
        found = given_cuts(profile, model.cuts(min_blocks=framework.min_blocks))
        blocks = list(range(len(model.blocks) + 1))
    states = found.states
    number = {layer: place for place, layer in enumerate(states[-1].layers)}
    before = [sorted(number[layer] for layer in state.layers) for state in states]
    row = _row(profile, before, number)

    def total(state: int, measure: str) -> float:
        return at_batch(profile.batch_sizes, getattr(states[state], measure), batch_size)

    if row:
        layers = [profile.layers[layer] for layer in states[-1].layers]
        time_s = [at_batch(profile.batch_sizes, layer.forward_s, batch_size) for layer in layers]
        layer_bytes = [layer.parameter_bytes for layer in layers]
        parts = [[place + 1] for place in range(len(layers))]
    else:
        forward_s = [total(index, "forward_s") for index in range(len(states))]
        # Interpolated prefix sums can decrease by rounding, but times must not be negative.
        time_s = [max(0.0, later - earlier) for earlier, later in pairwise(forward_s)]
        layer_bytes = [later.parameter_bytes - earlier.parameter_bytes for earlier, later in pairwise(states)]
        parts = [[place + 1 for place in sorted(set(later).difference(earlier))] for earlier, later in pairwise(before)]
    # A chain has one edge fewer than layers, and no two edges start or end at the same layer.
    branches = len(profile.edges) != len(profile.layers) - 1 or any(
        len(ends) > len(set(ends)) for ends in zip(*profile.edges, strict=True)
    )
    free = any(not any((*layer.forward_s, *layer.backward_s, layer.parameter_bytes)) for layer in profile.layers)
    # Devices are equal if they have the same type and the same links to all others.
    alike: dict[tuple[Device, int | None], list[str]] = {}
    # If links within a node are like those between nodes, hosts of all nodes are interchangeable.
    inner = cluster.intra != cluster.inter
    for index, node in enumerate(cluster.nodes):
        # Hosts need names in reports and rules, also if the cluster file has none.
        name = node.name or f"node{index}"
        hosts = [f"{name}:{device}" for device in range(node.count)] if node.count > 1 else [name]
        alike.setdefault((node.device, index if inner and node.count > 1 else None), []).extend(hosts)
    times = DeviceTimes(profile)

    def times_on(device: Device) -> list[float]:
        on_type, speed = times.on(device)
        if on_type is profile:
            return [seconds / speed for seconds in time_s]
        layers = (on_type.layers[layer] for layer in states[-1].layers)
        forward_s = [at_batch(on_type.batch_sizes, layer.forward_s, batch_size) for layer in layers]
        return [sum(forward_s[place - 1] for place in part) for part in parts]

    groups = [
        HostGroup(
            device_type=device.name,
            hosts=tuple(hosts),
            memory_bytes=device.memory_bytes,
            time_s=times_on(device),
            port_bytes_per_s=cluster.inter.bytes_per_s,
            node=None if index is None else str(index),
        )
        for (device, index), hosts in alike.items()
    ]

    def link(one: HostGroup, other: HostGroup) -> Hop:
        inside = one.node is not None and one.node == other.node
        kind = cluster.intra if inside else cluster.inter
        return Hop(kind.bytes_per_s, kind.latency_s)

    return ChainProblem(
        model=profile.name,
        layer_bytes=layer_bytes,
        cut_bytes=[total(index, "boundary_bytes") for index in range(len(states))],
        numbers=[len(state.layers) for state in states],
        parts=parts,
        groups=groups,
        names=frozenset(name for group in groups for name in (group.device_type, *group.hosts)),
        link=link,
        bits=8 * pipeedge.bytes_of(dtype),
        loading_s=loading_s,
        remarks=[*noise(profile), *untimed(profile, {device for device, _ in alike})],
        framework="" if framework is None else framework.name,
        blocks=blocks,
        kv_cache=kv_cache,
        kv_cache_bytes=[sum(kv_bytes.get(profile.layers[at].id, 0) for at in state.layers) for state in states]
        if kv_bytes
        else [],
        gpus_per_device=cluster.gpus_per_device,
        ids=[profile.layers[layer].id for layer in states[-1].layers] if branches else [],
        before=before if branches else [],
        row=row,
        cuts=found.one_order or "all",
        joined="layers without time stay with a neighbour, regardless of pins and exclusions" if free else "",
    )


def _kv_bytes(profile: Profile, kv_cache: KvCache, framework: Framework | None) -> dict[str, int]:
    """Return the bytes of the KV cache by layer."""
    if profile.gpus_per_device > 1:
        raise ArgumentError(
            f"profile `{shorten(profile.name)}` is of groups of {profile.gpus_per_device} GPUs, whose shares of a KV"
            " cache are not known",
            "give a profile of single GPUs",
            code="unsupported",
        )
    # The share of compute time that blocks must have for a framework does not matter here.
    model = Blocks.among([layer.id for layer in profile.layers], profile.edges, name=profile.name)
    blocks, sizes_bytes = model.blocks, kv_cache.block_bytes()
    if len(blocks) != len(sizes_bytes):
        raise ArgumentError(
            f"profile `{shorten(profile.name)}` has {pluralize(len(blocks), 'block')}, but"
            f" `{shorten(kv_cache.transformer.name)}` has {len(sizes_bytes)}",
            "give the transformer of the profile",
            code="mismatch",
        )
    found: dict[str, int] = {}
    for block, size_bytes in zip(blocks, sizes_bytes, strict=True):
        # Within a block, attention has the cache. A framework does not cut there, so it does not matter.
        attention = block if len(block) == 1 else [layer for layer in block if _ATTENTION.search(layer)]
        if framework is None and len(attention) != 1:
            raise ArgumentError(
                f"the block of layer `{shorten(block[0])}` has {len(block)} layers, and it is not known which of them"
                " have the KV cache",
                "add `--framework vllm`, which cuts between blocks, or give a profile with one layer for each block",
                code="unsupported",
            )
        found[attention[0] if attention else block[0]] = size_bytes
    return found


def _row(profile: Profile, before: list[list[int]], number: dict[int, int]) -> list[int]:
    """Return the cuts along one good order of the layers; empty if all cuts are in one order."""
    if all(set(one) < set(other) for one, other in pairwise(before)):
        return []
    place = {tuple(layers): position for position, layers in enumerate(before)}
    # With a bound of two cuts, the search for cuts falls back to one good order of the layers.
    order = cut_points(profile, bound=2).states
    return [place[tuple(sorted(number[layer] for layer in state.layers))] for state in order]
