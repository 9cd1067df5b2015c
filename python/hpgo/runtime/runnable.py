"""Plans that can be run: their programs, and checks with the reasons why some can't be run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

from hpgo.base.checks import check_int
from hpgo.base.messages import pluralize, safe_repr
from hpgo.errors import ArgumentError
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.plan_files import read_any
from hpgo.planning.plans import Plan
from hpgo.programs.host_rotation import are_regular, routes_of
from hpgo.programs.program import Program
from hpgo.programs.schedule import KINDS, schedules
from hpgo.programs.stages import BoundaryTensor
from hpgo.runtime.quantization import BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE_BITS = 32
"""Planned bit width from which on numbers are sent unquantized."""
_HALVED = "sequential"
"""Schedule that trains, but whose forward passes alone can infer."""


_MAX_ROUTES = 10_000
"""Maximum number of routes of batches over hosts. Each is a pipeline replica, with its own actions on every host.

Not tuned.
"""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A plan as ranks run it. Creating its program takes time, so a rank does it once and passes this on."""

    program: Program
    """The program. If `names_layers` is False, its layers are numbers until `with_layers` names them."""
    overlap: bool = True
    """Whether gradient reductions may overlap with backward passes."""
    bits: tuple[int, ...] | None = None
    """Planned bit width of values behind each stage but the last; None if the plan has none."""
    names_layers: bool = True

    @classmethod
    def from_plan(cls, plan: object) -> Runnable:
        """Return what ranks run of a plan, a program, or the file of one. A `Runnable` is returned unchanged.

        Raises ArgumentError for anything else, and for a plan that can't be run.
        """
        if isinstance(plan, Runnable):
            return plan
        if isinstance(plan, str | os.PathLike):
            plan = read_any(plan)
        if isinstance(plan, Program):
            return cls(plan)
        if isinstance(plan, Plan):
            return cls(plan.program(), overlap=plan.assumptions is None or plan.assumptions.overlap)
        if isinstance(plan, ChainPlan):
            # With hosts in rotation, the assignment repeats after the least common multiple of the numbers of hosts.
            routes = lcm(*(len(stage.hosts) for stage in plan.stages))
            if routes > _MAX_ROUTES:
                raise ArgumentError(
                    f"hosts take turns at stages, so that batches take {routes:,} routes before one repeats, but the"
                    f" limit is {_MAX_ROUTES:,}",
                    "give the stages numbers of hosts that divide each other",
                )
            return cls(
                plan.program(batches=routes),
                bits=tuple(hop.bits for hop in plan.hops[1:-1]),
                names_layers=bool(plan.stages[0].layers),
            )
        raise ArgumentError(
            f"the plan is {safe_repr(plan)}, but must be a Plan, a Program, or a file",
            "give what `hpgo.plan` returned, or the file of a plan",
        )


def check_trainable(program: Program) -> None:
    """Raise ArgumentError for a schedule that can't be run for training, with the reason."""
    schedule = program.schedule
    family = next((one for one in schedules() if one.name == schedule.name), None)
    if schedule.synchronization != "flush":
        raise ArgumentError(
            f"`{schedule.name}` has the synchronization `{schedule.synchronization}`, but runs train with a flush after"
            " each step",
            "choose a schedule with the synchronization `flush`: `hpgo schedules` lists them",
            code="unsupported",
        )
    # A user's own schedule belongs to no family.
    if family is not None and not family.trains:
        raise ArgumentError(
            f"`{schedule.name}` has only forward passes, so it can't train",
            "choose a schedule that trains, or infer with `hpgo infer` or `InferencePipeline(…)`",
        )


def check_program(program: Program) -> None:
    """Raise ArgumentError for a program that can't be trained, with the reason."""
    check_trainable(program)
    if program.zero_stage >= 2:
        raise ArgumentError(
            f"the plan has ZeRO stage {program.zero_stage}, but runs shard at most the optimizer state",
            "plan again with zero_stage=1 (`--zero-stage 1`)",
            code="unsupported",
        )
    _check_devices(program)


def check_inference(program: Program) -> None:
    """Raise ArgumentError for a program that can't infer, with the reason."""
    schedule = program.schedule
    # Forward passes of `sequential` are a complete inference schedule, so it is the exception.
    if schedule.name != _HALVED and any(KINDS[kind] != "F" for kind in set(schedule.actions[:, 0].tolist())):
        raise ArgumentError(
            f"`{schedule.name}` has backward passes, so it trains",
            "plan inference with `hpgo partition`, or choose `forward_only`, `staggered` or `sequential`",
        )
    # A stream runs one stage per process. Virtual stages would need several streams in one process.
    if len(schedule.micro_batches) == 1 and schedule.stages != schedule.ranks:
        raise ArgumentError(
            f"`{schedule.name}` runs {schedule.stages} stages on {schedule.ranks} ranks, but inference needs one"
            " stage per rank",
            "give each rank one stage",
        )
    for number, stage in enumerate(program.stages):
        if len(stage.devices) > 1:
            raise ArgumentError(
                f"stage {number} has {len(stage.devices)} replicas, but inference does not split micro-batches",
                "give each stage one device, or plan hosts that take turns with `hpgo partition --max-replicas`",
            )
    routes = routes_of(program)
    if not are_regular(routes) or (len(routes) > 1 and schedule.synchronization != "flush"):
        raise ArgumentError(
            f"the hosts of the {len(routes)} chains of `{schedule.name}` don't take turns",
            "give each stage separate hosts that take turns, as `hpgo partition --max-replicas` does",
        )
    _check_devices(program)


def bits_behind(planned: Sequence[int] | None, stages: int, asked: object) -> tuple[int, ...]:
    """Return the bit width of values behind each stage but the last; 0 for unquantized values.

    `asked` is one width for all cuts, one for each, or None, which takes the `planned` ones. Raises ArgumentError for
    widths that do not exist.
    """
    hint = f"give 0 for unquantized values, or one of {', '.join(map(str, BITS))}"
    if asked is None:
        found = [0 if bits >= WHOLE_BITS else bits for bits in planned or [0] * (stages - 1)]
        hint = f"plan with `hpgo partition --bits` of {', '.join(map(str, BITS))}, or set `quantize`"
    elif isinstance(asked, tuple | list):
        found = [check_int("a number of bits", one, minimum=0, hint=hint) for one in asked]
    else:
        found = [check_int("the number of bits", asked, minimum=0, hint=hint)] * (stages - 1)
    if len(found) != stages - 1:
        raise ArgumentError(
            f"bits are given for {pluralize(len(found), 'cut')}, but {pluralize(stages, 'stage')} have {stages - 1}",
            "give one number for all cuts, or one for each",
        )
    if wrong := [bits for bits in found if bits and bits not in BITS]:
        raise ArgumentError(f"values can't be sent in {wrong[0]} bits", hint)
    return tuple(found)


def with_layers(program: Program, layers: Sequence[str]) -> Program:
    """Return the program of a plan of `hpgo partition`, with its layer numbers replaced by ids.

    Raises ArgumentError if the number of layers differs.
    """
    # Plans of `hpgo partition` count layers from 1, so the last number is their count.
    planned = int(program.stages[-1].layers[-1])
    if planned != len(layers):
        raise ArgumentError(
            f"the plan is for {planned} layers, but the workload has {len(layers)}: `{layers[0]}` to `{layers[-1]}`",
            "plan with a profile of this workload, or name the workload that the plan was made for",
        )
    stages = tuple(
        replace(
            stage,
            layers=tuple(layers[int(layer) - 1] for layer in stage.layers),
            boundary_tensors=tuple(
                BoundaryTensor(layers[int(one.layer) - 1], one.bytes) for one in stage.boundary_tensors
            ),
        )
        for stage in program.stages
    )
    return replace(program, stages=stages)


def _check_devices(program: Program) -> None:
    if program.gpus_per_device > 1:
        raise ArgumentError(
            f"each device of the plan is {program.gpus_per_device} GPUs that share its layers, but runs put a layer on"
            " one GPU",
            "plan with gpus_per_device of 1",
        )
