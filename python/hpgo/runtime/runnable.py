"""What can be run: programs of plans, and the reasons why some can't be."""

from __future__ import annotations

import os

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shown
from hpgo.planning.plans import Plan
from hpgo.planning.reading import read_any
from hpgo.programs.orders import schedules
from hpgo.programs.program import Program


def program_of(plan: object) -> tuple[Program, bool]:
    """The program of a plan, and whether sums of gradients may overlap with its backward passes."""
    if isinstance(plan, str | os.PathLike):
        plan = read_any(plan)
    if isinstance(plan, Program):
        return plan, True
    if isinstance(plan, Plan):
        return plan.program(), plan.assumptions is None or plan.assumptions.overlap
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
        raise ArgumentError(f"`{orders.name}` has forward passes alone, so it can't train", "choose one that trains")


def check_program(program: Program) -> None:
    """Raises ArgumentError for what can't be run, with the reason."""
    check_orders(program)
    if program.gpus_per_device > 1:
        raise ArgumentError(
            f"each device of the plan is {program.gpus_per_device} GPUs that share its layers",
            "runs put a layer on one GPU: plan with gpus_per_device of 1",
        )
