"""Search for chain plans, for a profile and a cluster or for PipeEdge's files."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack, get_args

from hpgo import _core
from hpgo.base.checks import check_flag, check_int, check_is, check_list, check_progress, check_text, choice, number
from hpgo.base.files import as_path
from hpgo.base.messages import did_you_mean, safe_repr
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError, ClusterError, InfeasibleError, TimeLimitError
from hpgo.hardware.cluster import cluster_of
from hpgo.model.formats import pipeedge, profile_of
from hpgo.model.kv_cache import KvCache
from hpgo.planning.chain.files import task_of_files
from hpgo.planning.chain.plans import ChainHop, ChainPlan, ChainStage, Objective
from hpgo.planning.chain.profiles import task_of_profile
from hpgo.planning.chain.records import Chain, ChainProblem, HostGroup, HostType
from hpgo.planning.chain.rules import Rules
from hpgo.planning.laws import checked_chain
from hpgo.planning.problem import check_gpus
from hpgo.programs.frameworks import framework as find_framework

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from hpgo.hardware.cluster import Cluster
    from hpgo.model.formats.pipeedge import Units, ValueType
    from hpgo.model.profile import Profile
    from hpgo.programs.frameworks import ServingFramework

    Path = str | os.PathLike[str]


class PartitionOptions(TypedDict, total=False):
    """Arguments that `partition` and `partition_files` share. `partition` documents them."""

    buffers_in: int
    buffers_out: int
    objective: Objective
    samples_per_s: float | None
    links: Path | None
    pins: Sequence[str]
    exclude: Sequence[str]
    max_replicas: int
    bits: Sequence[int]
    time_limit_s: float | None
    progress: Callable[[float, float], object] | None


def partition_files(
    models: Path,
    device_types: Path,
    devices: Path,
    *,
    model: str,
    batch_size: int = 8,
    interpolate: bool = False,
    units: Units = "pipeedge",
    ignore_unknown_types: bool = False,
    dtype: ValueType = "torch.float32",
    **options: Unpack[PartitionOptions],
) -> ChainPlan:
    """Return the best partition of `model` over the hosts in PipeEdge's three files (docs/partition.md).

    `interpolate` allows batch sizes that were not measured. `units` is the size of `MB` and `Mbps` in the files: 2²⁰
    ("pipeedge") or 10⁶ ("si"). `ignore_unknown_types` skips hosts whose type has no layer times. Other options are
    as in `hpgo.partition`.

    Raises ProfileError, ClusterError or ArgumentError for invalid input, and InfeasibleError, with the reason, if no
    partition meets the constraints.
    """
    size = check_int("batch_size", batch_size)
    for name, flag in (("interpolate", interpolate), ("ignore_unknown_types", ignore_unknown_types)):
        check_flag(name, flag)
    task = task_of_files(
        models,
        device_types,
        devices,
        name=check_text("the name of a model", model),
        batch_size=size,
        dtype=dtype,
        interpolate=interpolate,
        units=units,
        ignore_unknown_types=ignore_unknown_types,
    )
    return _solved(task, size, units, **options)


def partition(
    profile: Profile | Path,
    cluster: Cluster | Path,
    *,
    framework: ServingFramework | None = None,
    batch_size: int | None = None,
    include_data_loading: bool = False,
    dtype: ValueType = "torch.float32",
    kv_cache: KvCache | None = None,
    **options: Unpack[PartitionOptions],
) -> ChainPlan:
    """Return the best partition of a model over devices of different speed (see docs/partition.md).

    Args:
        profile: the model, of which forward times are used: a `hpgo.Profile`, or the name of a built-in model or file.
        cluster: nodes with one or several types of devices: a `hpgo.Cluster`, or the name of a built-in one or file.
        framework: `vllm`, `sglang`, `llama.cpp`, `tensorrt-llm` or `accelerate`: cut between the model's blocks only,
            and give each stage at least one block.
        batch_size: samples per batch; None is the profile's largest batch size.
        include_data_loading: include the time of layers that load data (`Profile.loading`); otherwise data loaders work
            ahead, as for `hpgo.plan`.
        dtype: data type of the values that stages send, which sets their size.
        kv_cache: cache of keys and values that each stage keeps for its blocks, besides weights and buffers.
        **options: other options, with their defaults:
            buffers_in=2, buffers_out=2: batches buffered before and behind each stage.
            objective="throughput": the shortest interval between batches; or "latency", the shortest time of one batch;
                "hosts", the fewest hosts that reach `samples_per_s`; "bits", the fewest bits removed from sent values.
            samples_per_s=None: minimum throughput of the plan, for any objective.
            links=None: a file with links between pairs of hosts.
            pins=(): rules like `mb-0=1-12`: place these layers on this host, or on hosts of this type.
            exclude=(): rules like `mb-3` or `mb-3=1-4,9`: do not use this host or type, or not for these layers.
            max_replicas=1: maximum number of hosts of one type that share a stage.
            bits=(): further bits per value that links may use, besides the width of `dtype`.
            time_limit_s=10.0: time limit in seconds, after which the best plan so far is returned; None is no limit.
            progress=None: called about ten times per second with the best value so far (infinite before the first plan)
                and the bound.

    Raises ArgumentError, ProfileError or ClusterError for invalid input. Raises InfeasibleError, with the reason, if no
    plan meets the constraints, and TimeLimitError, with a lower bound for any plan, if the time limit passed before
    there was one.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.of(nodes=4, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=100)
    >>> [(stage.first, stage.last) for stage in hpgo.partition("bert-48", cluster).stages]
    [(1, 16), (17, 28), (29, 40), (41, 53)]
    """
    profile, cluster = profile_of(profile), cluster_of(cluster)
    check_flag("include_data_loading", include_data_loading)
    check_gpus(profile, cluster)
    size = check_int("batch_size", profile.batch_sizes[-1] if batch_size is None else batch_size)
    row = None if framework is None else find_framework(framework)
    check_is("kv_cache", kv_cache, KvCache, "give a `hpgo.KvCache`", or_none=True)
    task = task_of_profile(
        profile,
        cluster,
        size,
        dtype,
        include_data_loading=include_data_loading,
        framework=row,
        kv_cache=kv_cache,
    )
    try:
        return _solved(task, size, "si", **options)  # Files of profiles and clusters use SI units.
    except InfeasibleError as error:
        if kv_cache is None:
            raise
        part = f"the KV cache takes {format_bytes(task.kv_cache_bytes[-1])}, less with fewer sequences or tokens"
        raise error.as_kind(InfeasibleError, hint=f"{error.hint}; {part}" if error.hint else part) from None


def _solved(
    task: ChainProblem,
    batch_size: int,
    units: Units,
    *,
    buffers_in: int = 2,
    buffers_out: int = 2,
    objective: Objective = "throughput",
    samples_per_s: float | None = None,
    links: Path | None = None,
    pins: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_replicas: int = 1,
    bits: Sequence[int] = (),
    time_limit_s: float | None = 10.0,
    progress: Callable[[float, float], object] | None = None,
    **unknown: object,
) -> ChainPlan:
    for name in unknown:
        raise TypeError(
            f"there is no argument {safe_repr(name)}: {did_you_mean(name, PartitionOptions.__annotations__)}"
        )
    choice("objective", objective, get_args(Objective))
    check_progress(progress)
    pins, exclude = _rules("pins", pins), _rules("exclude", exclude)
    buffers_in = check_int("buffers_in", buffers_in, minimum=0)
    buffers_out = check_int("buffers_out", buffers_out, minimum=0)
    max_replicas = check_int("max_replicas", max_replicas)
    if samples_per_s is not None:
        hint = "give a positive number of samples/s"
        samples_per_s = number("the throughput to reach", samples_per_s, above=0, hint=hint)
    if time_limit_s is not None:
        time_limit_s = number("time_limit_s", time_limit_s, above=0, hint="give a positive number of seconds")
    began_s = time.monotonic()
    if not task.layer_bytes:
        unused = tuple(host for group in task.groups for host in group.hosts)
        return ChainPlan(task.model, batch_size, objective, (), (), 0.0, 0.0, 0.0, 0.0, units, unused)
    between = None if links is None else (str(as_path(links, ClusterError)), pipeedge.read_links(links))
    rules = Rules(task, pins, exclude, between)
    # Layers without time are merged with a neighbor, so rules about single layers may leave out cuts.
    cuts = task.joined if task.cuts == "all" and rules.about_layers and task.joined else task.cuts
    chain = Chain(
        layer_bytes=task.layer_bytes,
        names=[", ".join(task.ids[number - 1] for number in part) for part in task.parts] if task.ids else [],
        inside=task.before if task.row else [],
        row=task.row,
        is_restricted=cuts != "all",
        cut_bytes=task.cut_bytes,
        buffers_in=buffers_in,
        buffers_out=buffers_out,
        types=[
            HostType(group.device_type, len(group.hosts), group.memory_bytes, group.time_s, may_run)
            for group, may_run in zip(rules.groups, rules.may_run, strict=True)
        ],
        links=rules.all_links(),
        input=rules.end(rules.links.input, inward=True),
        output=rules.end(rules.links.output, inward=False),
        max_replicas=max_replicas,
        bits=_widths(task.bits, bits),
    )
    # The search limits intervals, which are the inverse of the throughput.
    max_s = None if samples_per_s is None else batch_size / samples_per_s
    # The time limit includes the preparation above.
    left_s = None if time_limit_s is None else max(1e-9, time_limit_s - (time.monotonic() - began_s))
    try:
        found = _core.partition_chain(chain, objective, max_s, left_s, progress)
    except TimeLimitError as error:  # Its message has the remaining time, not the limit of the caller.
        passed = error.message.replace("the time was up", f"{time_limit_s:g} s passed", 1)
        raise error.as_kind(TimeLimitError, passed) from None
    except InfeasibleError as error:
        if max_s is None:
            raise
        asked = f"{samples_per_s:g} samples/s are a batch of {batch_size} every {max_s:.6g} s"
        raise error.as_kind(InfeasibleError, hint=f"{error.hint}; {asked}") from None
    # The search itself decides whether all nested cuts are too many. The bound must then mention it.
    if not found["has_all_positions"]:
        cuts = (
            f"the graph has {len(task.before)} cut points; the plan uses the {len(task.row)} of one order of its layers"
        )
    plan = _plan(found, task, rules.groups, batch_size=batch_size, objective=objective, units=units)
    if cuts != "all":
        plan = replace(plan, cuts=cuts, searched_cuts_bound=found["searched_bound"])
    return checked_chain(plan, [_weights_bytes(task, row) for row in found["stages"]])


def _weights_bytes(task: ChainProblem, row: _core.ChainStageRecord) -> float:
    """Return the bytes of a stage's weights."""
    if task.row:
        return sum(task.layer_bytes[number] for number in _between(task.before, row["first"], row["end"]))
    return sum(task.layer_bytes[row["first"] : row["end"]])


def _plan(
    found: _core.ChainRecord,
    task: ChainProblem,
    groups: list[HostGroup],
    *,
    batch_size: int,
    objective: Objective,
    units: str,
) -> ChainPlan:
    # Hosts of a group are interchangeable, so they are assigned in the order of the file.
    free = [list(group.hosts) for group in groups]
    stages = []
    for row in found["stages"]:
        group, count = groups[row["host_type"]], row["replicas"]
        hosts, free[row["host_type"]] = free[row["host_type"]][:count], free[row["host_type"]][count:]
        stages.append(
            ChainStage(
                hosts=tuple(hosts),
                device_type=group.device_type,
                first=task.numbers[row["first"]] + 1,
                last=task.numbers[row["end"]],
                layers=tuple(task.ids[number] for number in _between(task.before, row["first"], row["end"])),
                compute_s=row["compute_s"],
                interval_s=row["interval_s"],
                memory_bytes=row["memory_bytes"],
                host_memory_bytes=group.memory_bytes,
                kv_cache_bytes=task.kv_cache_bytes[row["end"]] - task.kv_cache_bytes[row["first"]]
                if task.kv_cache_bytes
                else 0.0,
            )
        )
    return ChainPlan(
        model=task.model,
        batch_size=batch_size,
        objective=objective,
        stages=tuple(stages),
        hops=tuple(ChainHop(**row) for row in found["hops"]),
        interval_s=found["interval_s"],
        latency_s=found["latency_s"],
        value=found["value"],
        lower_bound=found["lower_bound"],
        units=units,
        unused=tuple(host for hosts in free for host in hosts),
        loading_s=task.loading_s,
        remarks=tuple(task.remarks),
        framework=task.framework,
        blocks=tuple(task.blocks[row["end"]] - task.blocks[row["first"]] for row in found["stages"] if task.blocks),
        gpus_per_device=task.gpus_per_device,
        kv_context_length=0 if task.kv_cache is None else task.kv_cache.context_length,
        kv_sequences=0 if task.kv_cache is None else task.kv_cache.sequences,
    )


def _between(before: list[list[int]], first: int, end: int) -> list[int]:
    """Return the layers of a stage between two positions; empty for a chain, whose layers are only numbered."""
    inside = set(before[first]) if before else set()
    return [number for number in before[end] if number not in inside] if before else []


def _rules(name: str, given: object) -> list[str]:
    """Return `given` as a list of rules. Raises ArgumentError for other values."""
    hint = "give a list of rules, like `mb-0=1-12`"
    rules = check_list(f"`{name}`", given, hint=hint)
    for rule in rules:
        if not isinstance(rule, str):
            raise ArgumentError(f"one of `{name}` is {safe_repr(rule)}", hint)
    return rules


def _widths(full: int, allowed: Sequence[int]) -> list[int]:
    widths = [check_int("bits", width) for width in check_list("`bits`", allowed)]
    for width in widths:
        if width > full:
            raise ArgumentError(
                f"`bits` is {width}, but values have {full} bits", f"use fewer than {full} bits", code="too_large"
            )
    return sorted({full, *widths}, reverse=True)
