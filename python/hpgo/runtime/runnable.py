"""What can be run: programs of plans, and the reasons why some can't be."""

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
"""From so many on, numbers of a plan travel as they are."""
_HALVED = "sequential"
"""Trains; its forward passes alone infer."""


_MOST_WAYS = 10_000
"""Each is a chain of stages, with orders of its own on every host that it meets."""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A plan as ranks run it. Making its program takes time, so a rank makes it once and hands this on."""

    program: Program
    """Its layers are numbers if `names_layers` is False, until `with_layers` names them."""
    overlap: bool = True
    """Whether gradient reductions may overlap with backward passes."""
    bits: tuple[int, ...] | None = None
    """Planned width of numbers behind each stage but the last; None if the plan has none."""
    names_layers: bool = True

    @classmethod
    def from_plan(cls, plan: object) -> Runnable:
        """Return what ranks run of a plan, a program, or the file of one; a `Runnable` as it is.

        Raises ArgumentError for what is no plan, and for one that can't be run.
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
            ways = lcm(*(len(stage.hosts) for stage in plan.stages))
            if ways > _MOST_WAYS:
                raise ArgumentError(
                    f"hosts take turns at stages so that batches go {ways:,} ways before one comes again, and up to"
                    f" {_MOST_WAYS:,} are run",
                    "give stages numbers of hosts that divide each other",
                )
            return cls(
                plan.program(batches=ways),
                bits=tuple(hop.bits for hop in plan.hops[1:-1]),
                names_layers=bool(plan.stages[0].layers),
            )
        raise ArgumentError(f"the plan is {safe_repr(plan)}", "give a Plan, a Program, or the file of a plan")


def check_orders(program: Program) -> None:
    """Raises ArgumentError for orders that can't be run, with the reason."""
    orders = program.schedule
    family = next((one for one in schedules() if one.name == orders.name), None)
    if orders.pace != "flush":
        raise ArgumentError(
            f"`{orders.name}` is of pace `{orders.pace}`, and runs train with a flush after each step",
            "choose a schedule whose pace is `flush`: `hpgo schedules` says it",
            code="unsupported",
        )
    if family is not None and not family.trains:
        raise ArgumentError(
            f"`{orders.name}` has forward passes alone, so it can't train",
            "choose one that trains, or infer: `hpgo infer`, `InferencePipeline(…)`",
        )


def check_program(program: Program) -> None:
    """Raises ArgumentError for what can't be run, with the reason."""
    check_orders(program)
    _check_devices(program)


def check_inference(program: Program) -> None:
    """Raises ArgumentError for what can't infer, with the reason."""
    orders = program.schedule
    if orders.name != _HALVED and any(KINDS[kind] != "F" for kind in set(orders.actions[:, 0].tolist())):
        raise ArgumentError(
            f"`{orders.name}` has backward passes, so it trains",
            "plan inference with `hpgo partition`, or choose `forward_only`, `staggered` or `sequential`",
        )
    if len(orders.micro_batches) == 1 and orders.stages != orders.ranks:
        raise ArgumentError(
            f"`{orders.name}` runs {orders.stages} stages on {orders.ranks} ranks", "give each rank one stage to infer"
        )
    for number, stage in enumerate(program.stages):
        if len(stage.devices) > 1:
            raise ArgumentError(
                f"stage {number} has {len(stage.devices)} replicas, which would share each micro-batch",
                "give each stage one device to infer; hosts of a plan of `hpgo partition` take turns",
            )
    routes = routes_of(program)
    if not are_regular(routes) or (len(routes) > 1 and orders.pace != "flush"):
        raise ArgumentError(
            f"the hosts of the {len(routes)} chains of `{orders.name}` don't take turns",
            "give each stage hosts of its own, one after the other, as `hpgo partition --max-replicas` does",
        )
    _check_devices(program)


def bits_behind(planned: Sequence[int] | None, stages: int, asked: object) -> tuple[int, ...]:
    """In how many bits numbers travel behind each of so many stages but the last; 0 as they are.

    `asked` is one number for all, one for each, or None, which takes the `planned` ones. Raises
    ArgumentError for widths that there aren't.
    """
    hint = f"give 0, which leaves numbers as they are, or one of {', '.join(map(str, BITS))}"
    if asked is None:
        found = [0 if bits >= WHOLE_BITS else bits for bits in planned or [0] * (stages - 1)]
        hint = f"plan with `--bits` of {', '.join(map(str, BITS))}, or say `quantize`"
    elif isinstance(asked, tuple | list):
        found = [check_int("a number of bits", one, least=0, hint=hint) for one in asked]
    else:
        found = [check_int("the number of bits", asked, least=0, hint=hint)] * (stages - 1)
    if len(found) != stages - 1:
        raise ArgumentError(
            f"bits are given for {pluralize(len(found), 'cut')}, and {pluralize(stages, 'stage')} have {stages - 1}",
            "give one number for all cuts, or one for each",
        )
    if wrong := [bits for bits in found if bits and bits not in BITS]:
        raise ArgumentError(f"numbers can't travel in {wrong[0]} bits", hint)
    return tuple(found)


def with_layers(program: Program, layers: Sequence[str]) -> Program:
    """The program of a plan of `hpgo partition`, with the layers that its numbers mean.

    Raises ArgumentError if there are more of them, or fewer.
    """
    planned = int(program.stages[-1].layers[-1])
    if planned != len(layers):
        raise ArgumentError(
            f"the plan is for {planned} layers, and the workload has {len(layers)}: `{layers[0]}` to `{layers[-1]}`",
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
            f"each device of the plan is {program.gpus_per_device} GPUs that share its layers",
            "runs put a layer on one GPU: plan with gpus_per_device of 1",
        )
