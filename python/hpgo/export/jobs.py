"""A plan as one framework runs it: by its orders, on a grid of ranks, at its price. Writers read nothing else.

Frameworks number ranks stage by stage, with as many replicas of each, and GPUs that stand for one device side by side.
What a framework runs otherwise than the plan has it (1F1B instead of eager 1F1B, gradients summed behind the last
backward pass) is priced that way, and the header says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.base.quoting import in_comment
from hpgo.base.units import format_bytes, format_seconds
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.export.precision import note
from hpgo.model.profile import Profile
from hpgo.planning.plans import Plan
from hpgo.programs.blocks import Blocks
from hpgo.programs.frameworks import check, check_optimizer, framework, runs_as, sums_shared
from hpgo.programs.program import Program
from hpgo.programs.recomputation import activations_bytes, group_of
from hpgo.programs.schedule import schedule as build
from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.export.targets import Place, Target
    from hpgo.programs.frameworks import Framework
    from hpgo.programs.optimizers import OptimizerName
    from hpgo.programs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What one framework runs of a plan or a program."""

    target: Target
    place: Place
    framework: Framework
    program: Program
    """With the orders that the framework runs."""
    plan: Plan | None
    """None for a program that no plan made."""
    replicas: int
    """Of each stage."""
    share: int
    """Samples of a micro-batch on a replica."""
    gpus_per_device: int
    overlap: bool
    """Whether gradients are summed while backward passes still run."""
    step_s: float | None
    """By the framework's orders; None if the program has no costs."""
    notes: tuple[str, ...]
    """What runs otherwise than the plan says."""

    @classmethod
    def of(cls, given: object, target: Target, place: Place) -> ExportJob:
        """Checks a plan or a program for `target`.

        Raises ArgumentError for one that it can't run, InfeasibleError for one that doesn't fit memory.
        """
        if not isinstance(given, Plan | Program):
            raise ArgumentError(f"the plan is {safe_repr(given)}", "make one, with `hpgo.plan` or `hpgo.Plan.read` say")
        plan, program = (given, given.program()) if isinstance(given, Plan) else (None, given)
        row = framework(target.framework)
        gpus = program.gpus_per_device
        if plan is not None:
            _check_memory(plan)
        check(
            row,
            schedule=program.schedule.name,
            replicas=[len(stage.devices) for stage in program.stages],
            micro_batch_size=program.micro_batch_size,
            shard_optimizer=program.shard_optimizer,
            recompute=program.recompute,
            gpus_per_device=gpus,
        )
        _check_chain(program, row)
        replicas = len(program.stages[0].devices)
        runs = replace(program, schedule=_orders(program.schedule, row))
        overlap = replicas > 1 and plan is not None and plan.assumed.overlap
        job = cls(
            target=target,
            place=place,
            framework=row,
            program=runs,
            plan=plan,
            replicas=replicas,
            share=program.micro_batch_size // replicas,
            gpus_per_device=gpus,
            overlap=overlap and (row.overlaps or _sums_each_pass(runs, row)),
            step_s=None,
            notes=(),
        )
        _check_ties(job)
        check_optimizer(
            row,
            job.optimizer,
            # A single replica has nobody to share with, and may be told to.
            shard_optimizer=program.shard_optimizer if replicas > 1 else row.shares_bf16,
            splits_backward=any("W" in action for order in runs.schedule.orders for action in order),
        )
        step_s = _step_s(job)
        return replace(job, step_s=step_s, notes=tuple(_differences(job, program, step_s)))

    @property
    def optimizer(self) -> OptimizerName | None:
        """The optimizer that memory was priced for; None for a program, and for a plan with ratios of its own."""
        return None if self.plan is None else self.plan.assumed.memory.optimizer

    @property
    def ranks(self) -> int:
        """Of the pipeline: each holds `chunks` stages."""
        return self.program.schedule.ranks

    @property
    def chunks(self) -> int:
        """Stages on each rank of the pipeline."""
        return self.program.schedule.stages // self.ranks

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Ids of each stage's layers."""
        return [stage.layers for stage in self.program.stages]

    @property
    def devices(self) -> list[int]:
        """For each replica of each rank of the pipeline its device, in the order of the framework's ranks."""
        of_rank: dict[int, tuple[int, ...]] = {}
        for number, stage in enumerate(self.program.stages):
            rank = self.program.schedule.rank_of_stage[number]
            if of_rank.setdefault(rank, stage.devices) != stage.devices:
                raise ArgumentError(
                    f"stage {number} has other devices than stage {self.program.schedule.rank_of_stage.index(rank)} on"
                    f" rank {rank} of the pipeline, which {self.framework.title} can't run",
                    "give all stages of a rank the same devices, in the same order",
                    code="unsupported",
                )
        return [device for rank in range(self.ranks) for device in of_rank[rank]]

    @property
    def world_size(self) -> int:
        """Processes of the job: one a GPU."""
        return len(self.devices) * self.gpus_per_device

    @property
    def profile(self) -> Profile | None:
        """The plan's, where it was saved with it."""
        profile = self.plan.assumed.profile if self.plan else None
        return profile if isinstance(profile, Profile) else None

    @property
    def blocks(self) -> Blocks:
        """The model as a row of blocks; raises ArgumentError if it is none."""
        if self.plan is not None and self.plan.assumed.blocks is not None:
            return self.plan.assumed.blocks
        if self.profile is not None:
            return Blocks.of(self.profile)
        ids = (layer for layers in self.layers for layer in layers)
        return Blocks.among(ids, name=self.plan.profile if self.plan else self.program.schedule.name)

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks of each stage; raises ArgumentError for stages that end elsewhere than between blocks."""
        return self.blocks.counts(self.layers, self.framework.title)

    def header(self, *notes: str) -> list[str]:
        """Lines for whoever reads the file: what it is, its price, what was tried, what else to know."""
        title = f"{in_comment(self.plan.profile)} on {in_comment(self.plan.cluster)}" if self.plan else "a program"
        if self.step_s is None:
            price = "no costs are known, so no step is predicted"
        else:
            rate = self.program.global_batch_size / self.step_s if self.step_s else float("inf")
            price = f"predicted step {self.step_s:.4g} s, {rate:.4g} samples/s"
        lines = [f"{title}: {price}", f"made by hpgo {_core.__version__} for {self.target.label}"]
        if self.target.tested:
            lines.append(f"tried with {self.target.tested}")
        priced_for = note(self)
        lines += [*self.notes, *([] if priced_for is None else [priced_for]), *notes]
        if self.by_rank:
            lines.append(f"start ranks where {self.place.name('ranks.csv')} says: not in the order of the devices")
        return lines

    @property
    def by_rank(self) -> bool:
        """Whether a rank does not lie on the device of its number, or devices stay idle."""
        return self.devices != list(range(self.program.world_size))

    def beside(self) -> dict[str, str]:
        """Files that any framework needs beside its own: where each rank belongs, if ranks are not in order."""
        return {self.place.name("ranks.csv"): self._ranks()} if self.by_rank else {}

    def _ranks(self) -> str:
        ends, machine_of = 0, []
        for number, count in enumerate(self.program.nodes):
            machine_of += [(number, device - ends) for device in range(ends, ends + count)]
            ends += count
        lines = ["rank,machine,CUDA_VISIBLE_DEVICES"]
        for device in self.devices:
            machine, slot = machine_of[device]
            for gpu in range(self.gpus_per_device):
                lines.append(f"{len(lines) - 1},{machine},{slot * self.gpus_per_device + gpu}")
        return "\n".join(lines) + "\n"

    def check_recomputation(self) -> None:
        """Raises InfeasibleError if recomputing as many blocks at a time as the framework does holds too much."""
        if not self.program.recompute or self.plan is None or self.profile is None:
            return
        group = group_of(self.framework, self.block_counts)
        if group is None:
            return
        blocks, stages = self.blocks, self.plan.stages
        for rank, own in enumerate(self.plan.groups):
            # Each rank runs the framework's orders; one with several stages the plan's.
            peak = self.program.schedule.peak_in_flight[rank] if self.chunks == 1 else None
            held_bytes = sum(
                activations_bytes(self.profile, blocks, stages[at], group, peak or stages[at].max_in_flight)
                for at in own.stages
            )
            shortfall_bytes = held_bytes - own.memory.activations_bytes - own.headroom_bytes
            if shortfall_bytes > 0:
                raise InfeasibleError(
                    f"{self.framework.title} recomputes {pluralize(group, 'block')} at a time, which keeps the input of"
                    f" each: stage {own.stages[0]} lacks {format_bytes(shortfall_bytes)} for that",
                    f"plan for it, with `--framework {self.framework.name}`, or reserve more memory (`--reserve-memory`)",
                    code="insufficient_memory",
                )


def _check_memory(plan: Plan) -> None:
    for group in plan.groups:
        if group.headroom_bytes < 0:
            raise InfeasibleError(
                f"the plan does not fit: stage {group.stages[0]}"
                f"{' and what else its devices run' if plan.chunks > 1 else ''} needs"
                f" {format_bytes(group.memory.total_bytes)} on each device, which has"
                f" {format_bytes(group.capacity_bytes)}",
                "plan again: `hpgo plan` makes plans that fit",
                code="insufficient_memory",
            )


def _check_chain(program: Program, row: Framework) -> None:
    """Raises ArgumentError for two copies of a model, and for devices of one rank that hold different stages."""
    if program.schedule.chain_length != program.schedule.stages:
        raise ArgumentError(
            f"`{program.schedule.name}` runs two copies of the model, which {row.title} can't",
            "choose another schedule",
            code="unsupported",
        )


def _check_ties(job: ExportJob) -> None:
    """Raises ArgumentError for a weight that stages share and the framework doesn't sum."""
    for tie in () if job.plan is None else job.plan.split_tied_weights:
        row = job.framework
        if sums_shared(row, tie.layers, job.blocks if row.ties == "ends" else None):
            continue
        which = " and ".join(f"`{shorten(layer)}`" for layer in tie.layers)
        only = " other than what embeds and what predicts" if row.ties == "ends" else ""
        raise ArgumentError(
            f"{which} share a weight and are on different stages, and {row.title} doesn't sum the gradients of layers"
            f" of several stages{only}",
            f"plan for it, with `--framework {row.name}`, untie them, or run the plan with `hpgo run`",
            code="unsupported",
        )


def _orders(planned: Schedule, row: Framework) -> Schedule:
    """What the framework runs: the plan's orders if it takes them from a file, else its own."""
    name = runs_as(row, planned.name)
    ranks, micro_batches = planned.ranks, planned.total_micro_batches
    if row.by_file:
        return planned
    if planned.stages == ranks:
        return build(name, ranks=ranks, micro_batches=micro_batches)
    chunks, group = planned.stages // ranks, group_size(planned)
    own = None
    if group >= ranks:  # what it asks for; the family asks for the rest
        own = build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks, group_size=group)
    if own != planned:
        raise ArgumentError(
            f"{row.title} runs {row.schedules[name]}, but the orders are others, though they are called that",
            f"build them with `hpgo.schedule('{name}', …)` for {ranks} micro-batches or more",
            code="unsupported",
        )
    return planned


def group_size(interleaved: Schedule) -> int:
    """How many micro-batches pass through a stage of an interleaved schedule before the rank's next stage has its turn.

    >>> import hpgo
    >>> group_size(hpgo.schedule("interleaved", ranks=2, micro_batches=8, chunks=2, group_size=4))
    4
    """
    first = (action.rstrip("0123456789") for action in interleaved.orders[0])
    return sum(1 for _ in takewhile(lambda action: action == "0F", first))


def _sums_each_pass(program: Program, row: Framework) -> bool:
    """Whether gradients are summed in each backward pass: torchtitan does so where no pipeline asks it to wait."""
    return row.name == "torchtitan" and program.schedule.ranks == 1 and len(program.stages[0].devices) > 1


def _step_s(job: ExportJob) -> float | None:
    """The step by the framework's orders, with gradients summed when it sums them."""
    program, plan = job.program, job.plan
    if program.costs is None:
        return None
    if plan is None:
        return simulate(program).makespan_s
    if _sums_each_pass(program, job.framework):
        (stage,) = plan.stages
        return plan.micro_batches * (stage.forward_s + stage.backward_s + stage.exposed_grad_reduce_s)
    late = plan.assumed.overlap and not job.framework.overlaps
    if program.schedule == plan.orders() and not late:
        return plan.step_s
    tails_s = [stage.grad_reduce_s if late else stage.exposed_grad_reduce_s for stage in plan.stages]
    return simulate(program, gradient_sync_s=tails_s).makespan_s


def _differences(job: ExportJob, planned: Program, step_s: float | None) -> Iterator[str]:
    """What runs otherwise than the plan says, in words."""
    title, row = job.framework.title, job.framework
    if planned.schedule != job.program.schedule:
        name = row.schedules[runs_as(row, planned.schedule.name)]
        yield f"{title} runs {name}, not the plan's `{in_comment(planned.schedule.name)}`"
    if (
        row.shares_bf16
        and job.replicas > 1
        and not planned.shard_optimizer
        and (job.optimizer or "").startswith("adam-bf16")
    ):
        yield f"{title} shares the optimizer's state between replicas with 16-bit weights, and the plan does not"
    if _sums_each_pass(job.program, row):
        if job.program.micro_batches > 1:
            yield f"{title} sums gradients in each of the {job.program.micro_batches} passes, not only in the last"
    elif job.plan and job.replicas > 1 and job.plan.assumed.overlap and not row.overlaps:
        yield f"{title} sums gradients when all backward passes have ended, not while they run"
    if job.replicas > 1 and not planned.shard_optimizer and row.shards_optimizer == (True,) and job.ranks > 1:
        yield f"{title} shares the optimizer's state between replicas, which the plan does not: less memory is needed"
    if job.plan and step_s is not None and abs(step_s - job.plan.step_s) > 1e-9 * job.plan.step_s:
        yield f"the plan itself would take {format_seconds(job.plan.step_s)} a step"
