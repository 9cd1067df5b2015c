"""The interface of the original HPGO planner (0.9), as `import HPGO` had it, with its answers.

`py_orchestrate` tries the original's plan families with the original's score, so its published figures come out again.
It is a poor planner: it tries few uneven pipelines, takes its link speeds from the program, and never looks at memory.
`Conductor.plan` asks the planner of this package the same question.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.checks import check_int, check_is, check_list, number
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError, ClusterError
from hpgo.machine.cluster import Cluster
from hpgo.planning.laws import Original, check_original

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan

__all__ = [
    "Columns",
    "Conductor",
    "Devices",
    "Layer",
    "Model",
    "Result",
    "columns",
    "conductor_from_torch_graph_and_seps",
    "devices_from_seps",
    "model_from_torch_graph",
]

Stage = tuple[int, int, int, list[int]]
"""First state, end (exclusive, but the last state itself for the last stage), replicas without `rp`, devices."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one state adds to the state before it, at the global batch size. Seconds and bytes.

    On branching models states are not nested in their order, so a difference may be negative.
    """

    id: int
    name: str | None
    desc: str
    compute_time: float
    """Forward plus backward on one device."""
    activation_size: float
    output_activation_size: float
    """Outputs that cross the cut behind the state: not a difference."""
    parameter_size: float


@dataclass(slots=True)
class Model:
    """A profile scaled to the global batch size. The last three settings may be changed at any time."""

    profile: Profile = field(repr=False)
    profile_batch_size: int
    global_batch_size: int
    layers: list[Layer] = field(repr=False)
    min_micro_batch_size: int = 1
    """Samples in a micro-batch, over all replicas of a stage."""
    optimizer_memory_scaling: float = 1
    """Bytes for weights and optimizer, as a multiple of the weights; read by `columns` only."""
    peak_activation_per_batch: float = 0.0
    """Bytes that one sample keeps for the backward pass; read by `columns` only."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Machines by their cumulative ends: `[8, 16]` is two machines of eight devices.

    Raises ClusterError unless these are whole numbers that ascend from at least 1.
    """

    seps: tuple[int, ...]

    def __post_init__(self) -> None:
        cluster = Cluster.from_seps(self.seps)
        if cluster.devices > 1024:
            raise ClusterError(
                f"seps end at {cluster.devices}", "the compatible planner takes 1024 devices; use `hpgo.plan`"
            )
        object.__setattr__(self, "seps", tuple(accumulate(machine.count for machine in cluster.nodes)))

    @property
    def num_machines(self) -> int:
        """Number of machines."""
        return len(self.seps)

    @property
    def num_gpus(self) -> int:
        """Number of devices."""
        return self.seps[-1]

    def all_reduce_s(self, devices: Sequence[int], size: float) -> float:
        """Seconds to sum `size` bytes among `devices`, at the original's link speeds.

        Raises ArgumentError for a device that `seps` lacks, or a size that is no amount.

        >>> devices_from_seps([8, 16]).all_reduce_s(range(8), 1e9)
        0.0175
        """
        return _core.legacy_all_reduce_s(list(self.seps), _numbers("devices", devices), _bytes(size))

    def split_concat_s(self, senders: Sequence[int], receivers: Sequence[int], size: float) -> float:
        """Seconds until `size` bytes spread over `senders` are spread over `receivers`.

        Raises ArgumentError for a device that `seps` lacks, or a size that is no amount.

        >>> devices_from_seps([8, 16]).split_concat_s([0, 1, 8, 9], [10, 11, 12, 13], 1e9)
        0.5
        """
        ends = _numbers("senders", senders), _numbers("receivers", receivers)
        return _core.legacy_split_concat_s(list(self.seps), *ends, _bytes(size))


@dataclass(frozen=True, slots=True)
class Result:
    """The best plan of one family."""

    speedup: float
    stages: list[Stage]
    rp: int
    """Pipelines side by side; stages' replicas do not count them."""


@dataclass(slots=True)
class Conductor:
    """A model on devices, and what the last `py_orchestrate` found."""

    m: Model
    d: Devices
    res: list[Result] = field(default_factory=list)

    def py_orchestrate(self) -> tuple[float, list[Stage]]:
        """The original's answer: speed-up over one device, and the stages. `res` then holds the best of each family.

        Raises ArgumentError if `m.min_micro_batch_size` is below 1 or above the global batch size.
        """
        check_is("m", self.m, Model, "make one, with `model_from_torch_graph`")
        check_is("d", self.d, Devices, "make them, with `devices_from_seps`")
        smallest = _count("min_micro_batch_size", self.m.min_micro_batch_size)
        plans = _core.legacy_plans(self.m.profile, list(self.d.seps), self.m.global_batch_size, smallest)
        for speedup, stages, _ in plans:
            check_original(self.m.profile.name, Original((speedup,), self.d.num_gpus, len(self.m.layers), stages))
        self.res = [Result(speedup, stages, rp) for speedup, stages, rp in plans]
        best = max(reversed(self.res), key=lambda result: result.speedup)  # of equals the last, as the original
        return best.speedup, best.stages

    def layers(self, stages: Sequence[Stage]) -> list[tuple[str, ...]]:
        """Layer ids of each of `stages`, as `hpgo.evaluate` takes them.

        Inputs and unused outputs, which the states leave out, go with a neighbour.

        Raises ArgumentError for a state that the model lacks.
        """
        hint = "give what `py_orchestrate` returned"
        rows = check_list("stages", stages, hint=hint)
        if not rows or not all(isinstance(row, tuple | list) and len(row) >= 2 for row in rows):
            raise ArgumentError(f"stages are {safe_repr(stages)}", hint)
        ends = _numbers("stages", [row[1] for row in rows])
        found = _core.legacy_stage_layers(self.m.profile, [end - 1 for end in ends[:-1]] + ends[-1:])
        return [tuple(self.m.profile.layers[index].id for index in stage) for stage in found]

    def plan(self, **options: Any) -> Plan:
        """The plan of `hpgo.plan` for this model, these machines and this global batch size.

        The links are the original's. `options` go to `hpgo.plan`; `cluster` replaces the machines.

        Raises what `hpgo.plan` raises.
        """
        from hpgo.planning.planner import plan

        given = options.pop("cluster", None)
        cluster = Cluster.from_seps(self.d.seps) if given is None else given
        return plan(self.m.profile, cluster, global_batch_size=self.m.global_batch_size, **options)


def model_from_torch_graph(filename: str | os.PathLike[str], pbs: int, gbs: int) -> Model:
    """The model in a PipeDream graph file that was profiled with `pbs` samples, scaled to `gbs` samples.

    Raises ProfileError naming file and line; ArgumentError for batch sizes that are not whole numbers of at least 1.
    """
    from hpgo.model.formats import read_profile

    if not isinstance(filename, (str, os.PathLike)):
        raise ArgumentError(f"filename must be a path, got {type(filename).__name__}", "give the path of a profile")
    return model_of(read_profile(filename, batch_size=_count("pbs", pbs)), _count("gbs", gbs))


def model_of(profile: Profile, global_batch_size: int) -> Model:
    """The model of a profile that has one batch size, as the original sees it.

    Raises ArgumentError if the profile has several batch sizes: the original knows one.
    """
    if len(profile.batch_sizes) != 1:
        raise ArgumentError(
            f"profile `{profile.name}` was measured with batch sizes {', '.join(map(str, profile.batch_sizes))}",
            "the compatible planner takes one; use `hpgo.plan`",
            code="mismatch",
        )
    states = _core.legacy_states(profile, global_batch_size)
    layers = []
    before = (0.0, 0.0, 0.0)
    for place, (description, compute_s, activation_bytes, output_bytes, parameter_bytes) in enumerate(states):
        sums = (compute_s, activation_bytes, parameter_bytes)
        compute, activation, parameters = (now - then for now, then in zip(sums, before, strict=True))
        layers.append(Layer(place, None, description, compute, activation, output_bytes, parameters))
        before = sums
    batch_size = profile.batch_sizes[0]
    # As the original: outputs of all layers, for one of the samples profiled.
    peak = before[1] / global_batch_size
    return Model(profile, batch_size, global_batch_size, layers, peak_activation_per_batch=peak)


@dataclass(frozen=True, slots=True)
class Columns:
    """Speed-ups of data parallelism over one device, as the original's guide prints them."""

    no_overlap: float
    """Gradients are summed behind the backward pass."""
    p3: float | None
    """Layers sum their gradients during the backward and the next forward pass (P3); None if weights and optimizer
    leave a device of 16 GB no memory for one sample."""
    overlap: float | None
    """Layers sum their gradients during the backward pass."""


def columns(model: Model, devices: Devices) -> Columns:
    """The guide's columns for data parallelism on all devices.

    Overlap happens in the last of as many accumulation steps as `model.optimizer_memory_scaling` and
    `model.peak_activation_per_batch` ask for.

    Raises ArgumentError for a setting that is not a positive number.
    """
    check_is("model", model, Model, "make one, with `model_from_torch_graph`")
    check_is("devices", devices, Devices, "make them, with `devices_from_seps`")
    scaling, peak = (
        number(setting, getattr(model, setting), above=0, most=1e300, hint="it must be a number above 0")
        for setting in ("optimizer_memory_scaling", "peak_activation_per_batch")
    )
    batch_size = model.global_batch_size
    found = Columns(*_core.legacy_columns(model.profile, list(devices.seps), batch_size, scaling, peak))
    known = [one for one in (found.no_overlap, found.p3, found.overlap) if one is not None]
    check_original(model.profile.name, Original(known, devices.num_gpus))
    return found


def devices_from_seps(seps: Sequence[int]) -> Devices:
    """Machines by their cumulative ends.

    Raises ClusterError unless `seps` are whole numbers that ascend from at least 1.

    >>> devices_from_seps([8, 16]).num_machines
    2
    """
    return Devices(seps)  # type: ignore[arg-type]  # it makes a tuple of them


def conductor_from_torch_graph_and_seps(
    filename: str | os.PathLike[str], pbs: int, gbs: int, seps: Sequence[int]
) -> Conductor:
    """A conductor for the model in `filename` on the machines `seps`.

    Raises what `model_from_torch_graph` and `devices_from_seps` raise.
    """
    return Conductor(model_from_torch_graph(filename, pbs, gbs), devices_from_seps(seps))


def _count(argument: str, value: object) -> int:
    return check_int(argument, value, hint="count samples")


def _bytes(size: float) -> float:
    return number("size", size, most=1e300, hint="give a number of bytes")


def _numbers(argument: str, values: Sequence[int]) -> list[int]:
    found = check_list(argument, values, hint="give a list of numbers from 0")
    return [check_int(f"each of {argument}", value, least=0) for value in found]
