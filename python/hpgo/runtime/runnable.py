"""What can be run: programs of plans, and the reasons why some can't be."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shown
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.plans import Plan
from hpgo.planning.reading import read_any
from hpgo.programs.orders import KINDS, schedules
from hpgo.programs.program import Program
from hpgo.programs.stages import Crossing

if TYPE_CHECKING:
    from collections.abc import Sequence

_HALVED = "sequential"
"""Trains; its forward passes alone infer."""


def program_of(plan: object) -> tuple[Program, bool]:
    """The program of a plan, and whether sums of gradients may overlap with its backward passes.

    Layers of a plan of `hpgo partition` are numbers, until `with_layers` names them.
    """
    if isinstance(plan, str | os.PathLike):
        plan = read_any(plan)
    if isinstance(plan, Program):
        return plan, True
    if isinstance(plan, Plan):
        return plan.program(), plan.assumptions is None or plan.assumptions.overlap
    if isinstance(plan, ChainPlan):
        return plan.program(batches=1), True
    raise ArgumentError(f"the plan is {shown(plan)}", "give a Plan, a Program, or the file of a plan")


def check_orders(program: Program) -> None:
    """Raises ArgumentError for orders that can't be run, with the reason."""
    orders = program.schedule
    family = next((one for one in schedules() if one.name == orders.name), None)
    if orders.pace != "flush":
        raise ArgumentError(
            f"`{orders.name}` is of pace `{orders.pace}`, and runs train with a flush after each step",
            "choose a schedule whose pace is `flush`: `hpgo schedules` says it",
        )
    if family is not None and not family.trains:
        raise ArgumentError(
            f"`{orders.name}` has forward passes alone, so it can't train",
            "choose one that trains, or infer: `hpgo run --inference`, `Pipeline(…, inference=True)`",
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
    if orders.stages != orders.ranks:
        raise ArgumentError(
            f"`{orders.name}` runs {orders.stages} stages on {orders.ranks} ranks", "give each rank one stage to infer"
        )
    for number, stage in enumerate(program.stages):
        if len(stage.devices) > 1:
            raise ArgumentError(
                f"stage {number} has {len(stage.devices)} replicas, which would share each micro-batch",
                "give each stage one device to infer",
            )
    _check_devices(program)


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
            crossings=tuple(Crossing(layers[int(one.layer) - 1], one.bytes) for one in stage.crossings),
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
