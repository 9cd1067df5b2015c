"""The interface of the original HPGO planner (0.9) after `import HPGO`, with the same results.

`py_orchestrate` searches the original's plan families with the original's score, and so reproduces its published
numbers. It is a poor planner: it tries few uneven pipelines, takes link speeds from the program, and ignores memory.
`Conductor.plan` solves the same problem with the planner of this package.
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
from hpgo.hardware.cluster import Cluster
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
    """The difference of one state to the state before it, at the global batch size, in seconds and bytes.

    In branching models, consecutive states are not nested, so a difference may be negative.
    """

    id: int
    name: str | None
    desc: str
    compute_time: float
    """Forward plus backward time on one device."""
    activation_size: float
    output_activation_size: float
    """Bytes of outputs that cross the cut after the state. This is not a difference."""
    parameter_size: float


@dataclass(slots=True)
class Model:
    """A profile scaled to the global batch size. The last three fields may be changed at any time."""

    profile: Profile = field(repr=False)
    profile_batch_size: int
    global_batch_size: int
    layers: list[Layer] = field(repr=False)
    min_micro_batch_size: int = 1
    """Samples in a micro-batch over all replicas of a stage."""
    optimizer_memory_scaling: float = 1
    """Bytes of weights and optimizer states as a multiple of the weights. Only `columns` reads it."""
    peak_activation_per_batch: float = 0.0
    """Bytes that one sample saves for the backward pass. Only `columns` reads it."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Nodes by their cumulative ends: `[8, 16]` is two nodes of eight devices.

    Raises ClusterError unless these are whole numbers that ascend from at least 1.
    """

    seps: tuple[int, ...]

    def __post_init__(self) -> None:
        # `Cluster` checks the ends. Rebuilding them normalizes all iterables to a tuple of ints.
        cluster = Cluster.from_seps(self.seps)
        if cluster.devices > 1024:
            raise ClusterError(f"seps end at {cluster.devices}", "use at most 1024 devices, or use `hpgo.plan`")
        object.__setattr__(self, "seps", tuple(accumulate(machine.count for machine in cluster.nodes)))

    @property
    def num_machines(self) -> int:
        """Number of nodes in the cluster."""
        return len(self.seps)

    @property
    def num_gpus(self) -> int:
        """Number of devices in the cluster."""
        return self.seps[-1]

    def all_reduce_s(self, devices: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes among `devices`, at the original's link speeds.

        Raises ArgumentError for a device beyond `seps`, or an invalid size.

        >>> devices_from_seps([8, 16]).all_reduce_s(range(8), 1e9)
        0.0175
        """
        return _core.legacy_all_reduce_s(list(self.seps), _numbers("devices", devices), _bytes(size))

    def split_concat_s(self, senders: Sequence[int], receivers: Sequence[int], size: float) -> float:
        """Return the seconds to move `size` bytes, split over `senders`, to `receivers`, which split them in turn.

        Raises ArgumentError for a device beyond `seps`, or an invalid size.

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
    """Number of parallel pipelines. The replicas of stages do not include them."""


@dataclass(slots=True)
class Conductor:
    """A model on devices, with the results of the last `py_orchestrate`."""

    m: Model
    d: Devices
    res: list[Result] = field(default_factory=list)

    def py_orchestrate(self) -> tuple[float, list[Stage]]:
        """Return the original's speed-up over one device and its stages. `res` then holds the best plan of each family.

        Raises ArgumentError if `m.min_micro_batch_size` is below 1 or above the global batch size.
        """
        check_is("m", self.m, Model, "create one with `model_from_torch_graph`")
        check_is("d", self.d, Devices, "create them with `devices_from_seps`")
        smallest = _count("min_micro_batch_size", self.m.min_micro_batch_size)
        plans = _core.legacy_plans(self.m.profile, list(self.d.seps), self.m.global_batch_size, smallest)
        for speedup, stages, _ in plans:
            check_original(self.m.profile.name, Original((speedup,), self.d.num_gpus, len(self.m.layers), stages))
        self.res = [Result(speedup, stages, rp) for speedup, stages, rp in plans]
        best = max(
            reversed(self.res), key=lambda result: result.speedup
        )  # the original prefers the last of equal plans
        return best.speedup, best.stages

    def layers(self, stages: Sequence[Stage]) -> list[tuple[str, ...]]:
        """Return the layer ids of each of `stages`, as `hpgo.evaluate` accepts them.

        Inputs and unused outputs, which the states leave out, join a neighbor.

        Raises ArgumentError for a state that the model does not have.
        """
        hint = "give what `py_orchestrate` returned"
        rows = check_list("stages", stages, hint=hint)
        if not rows or not all(isinstance(row, tuple | list) and len(row) >= 2 for row in rows):
            raise ArgumentError(f"stages are {safe_repr(stages)}", hint)
        ends = _numbers("stages", [row[1] for row in rows])
        # Ends of stages are exclusive, except for the last one. Convert them to last states.
        found = _core.legacy_stage_layers(self.m.profile, [end - 1 for end in ends[:-1]] + ends[-1:])
        return [tuple(self.m.profile.layers[index].id for index in stage) for stage in found]

    def plan(self, **options: Any) -> Plan:
        """Return the plan of `hpgo.plan` for this model, cluster and global batch size.

        Links have the original's speeds. `options` are passed to `hpgo.plan`; `cluster` replaces the nodes.

        Raises the errors of `hpgo.plan`.
        """
        from hpgo.planning.planner import plan

        given = options.pop("cluster", None)
        cluster = Cluster.from_seps(self.d.seps) if given is None else given
        return plan(self.m.profile, cluster, global_batch_size=self.m.global_batch_size, **options)


def model_from_torch_graph(filename: str | os.PathLike[str], pbs: int, gbs: int) -> Model:
    """Read a PipeDream graph file that was profiled with `pbs` samples, and scale it to `gbs` samples.

    Raises ProfileError naming file and line. Raises ArgumentError for batch sizes that are not whole numbers of at
    least 1.
    """
    from hpgo.model.formats import read_profile

    if not isinstance(filename, (str, os.PathLike)):
        raise ArgumentError(f"filename must be a path, got {type(filename).__name__}", "give the path of a profile")
    return model_of(read_profile(filename, batch_size=_count("pbs", pbs)), _count("gbs", gbs))


def model_of(profile: Profile, global_batch_size: int) -> Model:
    """Return the original's model of a profile with a single batch size.

    Raises ArgumentError if the profile has several batch sizes, which the original does not support.
    """
    if len(profile.batch_sizes) != 1:
        raise ArgumentError(
            f"profile `{profile.name}` was measured with batch sizes {', '.join(map(str, profile.batch_sizes))}",
            "give a profile with one batch size, or use `hpgo.plan`",
            code="mismatch",
        )
    states = _core.legacy_states(profile, global_batch_size)
    layers = []
    # States have cumulative sums, so a layer is the difference to the state before.
    before = (0.0, 0.0, 0.0)
    for place, (description, compute_s, activation_bytes, output_bytes, parameter_bytes) in enumerate(states):
        sums = (compute_s, activation_bytes, parameter_bytes)
        compute, activation, parameters = (now - then for now, then in zip(sums, before, strict=True))
        layers.append(Layer(place, None, description, compute, activation, output_bytes, parameters))
        before = sums
    batch_size = profile.batch_sizes[0]
    # The original defines it as the outputs of all layers for one of the profiled samples.
    peak = before[1] / global_batch_size
    return Model(profile, batch_size, global_batch_size, layers, peak_activation_per_batch=peak)


@dataclass(frozen=True, slots=True)
class Columns:
    """Speed-ups of data parallelism over one device, as in the tables of the original's guide."""

    no_overlap: float
    """Gradients are reduced after the backward pass."""
    p3: float | None
    """Layers reduce their gradients during the backward and the next forward pass (P3).

    None if weights and optimizer leave a device of 16 GB no memory for one sample.
    """
    overlap: float | None
    """Layers reduce their gradients during the backward pass."""


def columns(model: Model, devices: Devices) -> Columns:
    """Return the guide's columns for data parallelism on all devices.

    Reductions overlap with the last gradient accumulation step. The number of steps follows from
    `model.optimizer_memory_scaling` and `model.peak_activation_per_batch`.

    Raises ArgumentError for a setting that is not a positive number.
    """
    check_is("model", model, Model, "create one with `model_from_torch_graph`")
    check_is("devices", devices, Devices, "create them with `devices_from_seps`")
    scaling, peak = (
        number(setting, getattr(model, setting), above=0, maximum=1e300, hint="it must be a number above 0")
        for setting in ("optimizer_memory_scaling", "peak_activation_per_batch")
    )
    batch_size = model.global_batch_size
    found = Columns(*_core.legacy_columns(model.profile, list(devices.seps), batch_size, scaling, peak))
    known = [one for one in (found.no_overlap, found.p3, found.overlap) if one is not None]
    check_original(model.profile.name, Original(known, devices.num_gpus))
    return found


def devices_from_seps(seps: Sequence[int]) -> Devices:
    """Return nodes from their cumulative ends.

    Raises ClusterError unless `seps` are whole numbers that ascend from at least 1.

    >>> devices_from_seps([8, 16]).num_machines
    2
    """
    return Devices(seps)  # type: ignore[arg-type]  # converted to a tuple


def conductor_from_torch_graph_and_seps(
    filename: str | os.PathLike[str], pbs: int, gbs: int, seps: Sequence[int]
) -> Conductor:
    """Return a conductor for the model in `filename` on the nodes `seps`.

    Raises the errors of `model_from_torch_graph` and `devices_from_seps`.
    """
    return Conductor(model_from_torch_graph(filename, pbs, gbs), devices_from_seps(seps))


def _count(argument: str, value: object) -> int:
    return check_int(argument, value, hint="count samples")


def _bytes(size: float) -> float:
    return number("size", size, maximum=1e300, hint="give a number of bytes")


def _numbers(argument: str, values: Sequence[int]) -> list[int]:
    found = check_list(argument, values, hint="give a list of numbers from 0")
    return [check_int(f"each of {argument}", value, minimum=0) for value in found]
