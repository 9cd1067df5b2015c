"""Asks for chain plans: of a profile and a cluster, or of PipeEdge's files."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack, get_args

from hpgo import _core
from hpgo.base.checks import check_flag, check_int, check_list, check_progress, check_text, choice, number
from hpgo.base.files import as_path
from hpgo.base.messages import did_you_mean, safe_repr
from hpgo.errors import ArgumentError, ClusterError, InfeasibleError, TimeLimitError
from hpgo.machine.cluster import cluster_of
from hpgo.model.formats import pipeedge, profile_of
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

    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats.pipeedge import Units, ValueType
    from hpgo.model.profile import Profile
    from hpgo.programs.frameworks import ServingFramework

    Path = str | os.PathLike[str]


class PartitionOptions(TypedDict, total=False):
    """The arguments of `partition` and `partition_files` that ask for the same of both."""

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
    """The best way to spread `model` over the hosts that PipeEdge's three files describe (docs/partition.md).

    `interpolate` allows batch sizes that were not measured. `units` says what `MB` and `Mbps` count: 2²⁰, as PipeEdge
    does, or 10⁶ ("si"). `ignore_unknown_types` skips hosts of types without a profile. Other options are those of
    `hpgo.partition`.

    Raises ProfileError, ClusterError and ArgumentError for input that makes no sense; InfeasibleError, which says what
    is short.
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
    **options: Unpack[PartitionOptions],
) -> ChainPlan:
    """The best way to spread a model over a row of uneven devices (docs/partition.md explains everything).

    Args:
        profile: the model, whose forward times count: a `hpgo.Profile`, or the name of a built-in one or of a file.
        cluster: machines of one or several types of device: a `hpgo.Cluster`, or the name of a known one or of a file.
        framework: `vllm`, `sglang`, `llama.cpp`, `tensorrt-llm` or `accelerate`: cut between the model's blocks only,
            and give each stage one at least.
        batch_size: samples in a batch, the profile's largest unless given.
        include_data_loading: count the time of layers that load data (`Profile.loading`); else a loader is taken to work
            ahead, as for `hpgo.plan`.
        dtype: the data type of values on the edges, which says how wide they are.
        **options: the rest, with what holds if it is left out:
            buffers_in=2, buffers_out=2: batches that wait to be worked on, and to be sent.
            objective="throughput": the shortest interval between batches; or "latency", the shortest time of one batch;
                "hosts", as few as reach `samples_per_s`; "bits", as few taken from the values on the edges.
            samples_per_s=None: the throughput that every plan must reach, whatever the objective.
            links=None: a file of pairwise links.
            pins=(): rules like `mb-0=1-12`: these layers run on this host, or on hosts of this type.
            exclude=(): rules like `mb-3` or `mb-3=1-4,9`: not this host or type, or not for these layers.
            max_replicas=1: hosts of a type that may share a stage, at most.
            bits=(): widths that edges may use beside that of `dtype`.
            time_limit_s=10.0: then the best plan so far is taken; None is never.
            progress=None: called about ten times a second with the best value so far, infinite before there is one, and
                the bound.

    Raises ArgumentError, ProfileError and ClusterError for input that makes no sense; InfeasibleError, which says what
    is short; TimeLimitError, which says what any plan takes at least, if the time limit came before there was one.

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
    task = task_of_profile(profile, cluster, size, dtype, include_data_loading=include_data_loading, framework=row)
    return _solved(task, size, "si", **options)  # profiles and clusters are written in SI units


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
    buffers_in = check_int("buffers_in", buffers_in, least=0)
    buffers_out = check_int("buffers_out", buffers_out, least=0)
    max_replicas = check_int("max_replicas", max_replicas)
    if samples_per_s is not None:
        hint = "it is a number of samples a second above 0"
        samples_per_s = number("the throughput to reach", samples_per_s, above=0, hint=hint)
    if time_limit_s is not None:
        time_limit_s = number("time_limit_s", time_limit_s, above=0, hint="give a positive number of seconds")
    began_s = time.monotonic()
    if not task.layer_bytes:
        unused = tuple(host for group in task.groups for host in group.hosts)
        return ChainPlan(task.model, batch_size, objective, (), (), 0.0, 0.0, 0.0, 0.0, units, unused)
    between = None if links is None else (str(as_path(links, ClusterError)), pipeedge.read_links(links))
    rules = Rules(task, pins, exclude, between)
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
    max_s = None if samples_per_s is None else batch_size / samples_per_s
    # Whoever waits counts the time it took to get here, too.
    left_s = None if time_limit_s is None else max(1e-9, time_limit_s - (time.monotonic() - began_s))
    try:
        found = _core.partition_chain(chain, objective, max_s, left_s, progress)
    except TimeLimitError as error:  # the search had what was left of the time
        passed = error.message.replace("the time was up", f"{time_limit_s:g} s passed", 1)
        raise error.as_kind(TimeLimitError, passed) from None
    except InfeasibleError as error:
        if max_s is None:
            raise
        asked = f"{samples_per_s:g} samples/s are a batch of {batch_size} every {max_s:.6g} s"
        raise error.as_kind(InfeasibleError, hint=f"{error.hint}; {asked}") from None
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
    )


def _between(before: list[list[int]], first: int, end: int) -> list[int]:
    """The layers of a stage between two positions; none where only their numbers are known."""
    inside = set(before[first]) if before else set()
    return [number for number in before[end] if number not in inside] if before else []


def _rules(name: str, given: object) -> list[str]:
    """`given` as a list of texts."""
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
                f"{width} bits are more than the {full} that values have", "fewer bits save transfers", code="too_large"
            )
    return sorted({full, *widths}, reverse=True)
