"""A plan as one framework runs it: its schedule, its grid of ranks and its step time. All writers read this.

Frameworks number ranks stage by stage, with the same number of replicas per stage; GPUs of one device are adjacent. If
a framework runs a plan differently (1F1B instead of eager 1F1B, gradients reduced after the last backward pass), the
step is simulated as the framework runs it, and the header of the file states the difference.
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
    """A plan or a program that was checked for one framework."""

    target: Target
    place: Place
    framework: Framework
    program: Program
    """The program with the schedule that the framework runs."""
    plan: Plan | None
    """The plan of the program; None for a program without a plan."""
    replicas: int
    """Number of replicas of each stage."""
    samples_per_replica: int
    """Samples of a micro-batch on a replica."""
    gpus_per_device: int
    overlap: bool
    """Whether gradients are reduced while backward passes still run."""
    step_s: float | None
    """Step time as the framework runs the plan; None if the program has no costs."""
    notes: tuple[str, ...]
    """Differences between the plan and what the framework runs."""

    @classmethod
    def of(cls, given: object, target: Target, place: Place) -> ExportJob:
        """Return the job of a plan or a program for `target`.

        Raises ArgumentError for a plan that the target can't run, InfeasibleError for one that does not fit in memory.
        """
        if not isinstance(given, Plan | Program):
            raise ArgumentError(f"the plan is {safe_repr(given)}", "make one with `hpgo.plan` or `hpgo.Plan.read`")
        plan, program = (given, given.program()) if isinstance(given, Plan) else (None, given)
        row = framework(target.framework)
        gpus = program.gpus_per_device
        if plan is not None:
            _check_memory(plan)
        check(
            row,
            schedule=program.schedule.name,
            replicas=[len(stage.devices) for stage in program.stages],
            pipeline_micro_batch_size=program.pipeline_micro_batch_size,
            shard_optimizer=program.shard_optimizer,
            recompute=[stage.recompute for stage in program.stages],
            gpus_per_device=gpus,
            zero_stage=program.zero_stage,
        )
        _check_chain(program, row)
        _check_samples(program, row)
        replicas = len(program.stages[0].devices)
        runs = replace(program, schedule=_schedule_of(program.schedule, row))
        overlap = replicas > 1 and plan is not None and plan.assumed.overlap
        job = cls(
            target=target,
            place=place,
            framework=row,
            program=runs,
            plan=plan,
            replicas=replicas,
            samples_per_replica=program.pipeline_micro_batch_size // replicas,
            gpus_per_device=gpus,
            overlap=overlap and (row.overlaps or _sums_each_pass(runs, row)),
            step_s=None,
            notes=(),
        )
        _check_tied_weights(job)
        check_optimizer(
            row,
            job.optimizer,
            # A single replica has nothing to shard, so frameworks that always shard 16-bit state are satisfied, too.
            shard_optimizer=program.shard_optimizer if replicas > 1 else row.shares_bf16,
            splits_backward=any("W" in action for order in runs.schedule.action_lists for action in order),
        )
        step_s = _step_s(job)
        return replace(job, step_s=step_s, notes=tuple(_differences(job, program, step_s)))

    @property
    def optimizer(self) -> OptimizerName | None:
        """Optimizer of the memory estimate; None for a program, and for a plan with custom ratios."""
        return None if self.plan is None else self.plan.assumed.memory.optimizer

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks. Each holds `virtual_stages_per_rank` stages."""
        return self.program.schedule.ranks

    @property
    def virtual_stages_per_rank(self) -> int:
        """Number of virtual stages per pipeline rank."""
        return self.program.schedule.stages // self.ranks

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Ids of the layers of each stage."""
        return [stage.layers for stage in self.program.stages]

    @property
    def devices(self) -> list[int]:
        """Device of each replica of each pipeline rank, in the order of the framework's ranks.

        Raises ArgumentError if the stages of one pipeline rank are on different devices.
        """
        of_rank: dict[int, tuple[int, ...]] = {}
        for number, stage in enumerate(self.program.stages):
            rank = self.program.schedule.rank_of_stage[number]
            if of_rank.setdefault(rank, stage.devices) != stage.devices:
                raise ArgumentError(
                    f"stages {self.program.schedule.rank_of_stage.index(rank)} and {number} of pipeline rank {rank} are"
                    f" on different devices, which {self.framework.title} can't run",
                    "give all stages of a rank the same devices, in the same order",
                    code="unsupported",
                )
        return [device for rank in range(self.ranks) for device in of_rank[rank]]

    @property
    def world_size(self) -> int:
        """Number of processes of the job: one per GPU."""
        return len(self.devices) * self.gpus_per_device

    @property
    def profile(self) -> Profile | None:
        """Layer profile of the plan; None if it was not saved with the plan."""
        profile = self.plan.assumed.profile if self.plan else None
        return profile if isinstance(profile, Profile) else None

    @property
    def blocks(self) -> Blocks:
        """The model as a row of blocks; raises ArgumentError if it is not one."""
        # Without a profile, blocks can only be recognized by the names of the layers.
        if self.plan is not None and self.plan.assumed.blocks is not None:
            return self.plan.assumed.blocks
        if self.profile is not None:
            return Blocks.of(self.profile)
        ids = (layer for layers in self.layers for layer in layers)
        return Blocks.among(ids, name=self.plan.profile if self.plan else self.program.schedule.name)

    @property
    def block_counts(self) -> tuple[int, ...]:
        """Number of blocks of each stage; raises ArgumentError if a cut is inside a block."""
        return self.blocks.counts(self.layers, self.framework.title)

    def header(self, *notes: str) -> list[str]:
        """Return comments for the reader of the file: the plan, its step time, tested versions and notes."""
        title = f"{in_comment(self.plan.profile)} on {in_comment(self.plan.cluster)}" if self.plan else "a program"
        if self.step_s is None:
            speed = "no costs are known, so no step time is predicted"
        else:
            rate = self.program.global_batch_size / self.step_s if self.step_s else float("inf")
            speed = f"predicted step {self.step_s:.4g} s, {rate:.4g} samples/s"
        lines = [f"{title}: {speed}", f"made by hpgo {_core.__version__} for {self.target.label}"]
        if self.target.tested:
            lines.append(f"tested with {self.target.tested}")
        memory = note(self)
        lines += [*self.notes, *([] if memory is None else [memory]), *notes]
        if self.by_rank:
            lines.append(f"start the ranks on the GPUs of {self.place.name('ranks.csv')}, not in the order of devices")
        return lines

    @property
    def by_rank(self) -> bool:
        """Whether a rank is not on the device of its number, or devices stay idle."""
        return self.devices != list(range(self.program.world_size))

    def beside(self) -> dict[str, str]:
        """Return files that every framework needs: a map of ranks to GPUs, if ranks are not in the order of devices."""
        return {self.place.name("ranks.csv"): self._ranks()} if self.by_rank else {}

    def _ranks(self) -> str:
        ends, node_of = 0, []
        for number, count in enumerate(self.program.nodes):
            node_of += [(number, device - ends) for device in range(ends, ends + count)]
            ends += count
        lines = ["rank,node,CUDA_VISIBLE_DEVICES"]
        for device in self.devices:
            node, slot = node_of[device]
            for gpu in range(self.gpus_per_device):
                lines.append(f"{len(lines) - 1},{node},{slot * self.gpus_per_device + gpu}")
        return "\n".join(lines) + "\n"

    def check_recomputation(self) -> None:
        """Raise InfeasibleError if the groups of blocks that the framework recomputes need too much memory."""
        if not self.program.recompute or self.plan is None or self.profile is None:
            return
        group = group_of(self.framework, self.block_counts)
        if group is None:
            return
        blocks, stages = self.blocks, self.plan.stages
        for rank, own in enumerate(self.plan.groups):
            # With one stage per rank, the framework's schedule may have more micro-batches in flight than the plan's.
            # With several, both are the same.
            peak = self.program.schedule.peak_in_flight[rank] if self.virtual_stages_per_rank == 1 else None
            held_bytes = sum(
                activations_bytes(self.profile, blocks, stages[at], group, peak or stages[at].max_in_flight)
                for at in own.stages
            )
            shortfall_bytes = held_bytes - own.memory.activations_bytes - own.free_bytes
            if shortfall_bytes > 0:
                raise InfeasibleError(
                    f"{self.framework.title} recomputes {pluralize(group, 'block')} at a time, which keeps the input of"
                    f" each: stage {own.stages[0]} lacks {format_bytes(shortfall_bytes)} for that",
                    f"plan with `--framework {self.framework.name}`, or reserve more memory (`--reserve-memory`)",
                    code="insufficient_memory",
                )


def _check_memory(plan: Plan) -> None:
    for group in plan.groups:
        if group.free_bytes < 0:
            raise InfeasibleError(
                f"the plan does not fit: stage {group.stages[0]}"
                f"{' and what else its devices run' if plan.virtual_stages_per_rank > 1 else ''} needs"
                f" {format_bytes(group.memory.total_bytes)} per device, but a device has"
                f" {format_bytes(group.capacity_bytes)}",
                "make a plan that fits with `hpgo plan`",
                code="insufficient_memory",
            )


def _check_samples(program: Program, row: Framework) -> None:
    """Raise ArgumentError if replicas of a stage get samples by their speed."""
    for number, stage in enumerate(program.stages):
        counts = [len(rows) for rows in stage.rows]
        if max(counts) - min(counts) > 1:
            raise ArgumentError(
                f"{row.title} gives replicas the same number of samples, but stage {number} gives its replicas"
                f" {min(counts)} to {max(counts)} of each micro-batch",
                "plan without `shares_by_speed`, or run the plan with `hpgo run`",
                code="unsupported",
            )


def _check_chain(program: Program, row: Framework) -> None:
    """Raise ArgumentError for schedules with two copies of the model, such as bidirectional pipelines."""
    if program.schedule.stages_per_pipeline != program.schedule.stages:
        raise ArgumentError(
            f"`{program.schedule.name}` runs two copies of the model, which {row.title} can't",
            "plan with another schedule, for instance `--schedule 1f1b`",
            code="unsupported",
        )


def _check_tied_weights(job: ExportJob) -> None:
    """Raise ArgumentError for a tied weight on several stages whose gradients the framework does not reduce."""
    for tie in () if job.plan is None else job.plan.split_tied_weights:
        row = job.framework
        if sums_shared(row, tie.layers, job.blocks if row.tied_weights == "ends" else None):
            continue
        which = " and ".join(f"`{shorten(layer)}`" for layer in tie.layers)
        only = " other than the embedding and the LM head" if row.tied_weights == "ends" else ""
        raise ArgumentError(
            f"{which} share a weight and are on different stages, but {row.title} does not reduce the gradients of"
            f" layers on several stages{only}",
            f"plan with `--framework {row.name}`, untie the layers, or run the plan with `hpgo run`",
            code="unsupported",
        )


def _schedule_of(planned: Schedule, row: Framework) -> Schedule:
    """Return the schedule that the framework runs: the plan's if the framework reads it from a file, else its own."""
    name = runs_as(row, planned.name)
    ranks, micro_batches = planned.ranks, planned.total_micro_batches
    if row.by_file:
        return planned
    if planned.stages == ranks:
        return build(name, ranks=ranks, micro_batches=micro_batches)
    virtual_stages_per_rank, group = planned.stages // ranks, group_size(planned)
    own = None
    # Megatron-LM refuses smaller groups. `build` checks all other conditions.
    if group >= ranks:
        own = build(
            name,
            ranks=ranks,
            micro_batches=micro_batches,
            virtual_stages_per_rank=virtual_stages_per_rank,
            group_size=group,
        )
    if own != planned:
        raise ArgumentError(
            f"{row.title} runs {row.schedules[name]}, but the plan's action lists differ from that schedule",
            f"build the schedule with `hpgo.schedule('{name}', …)` for at least {ranks} micro-batches",
            code="unsupported",
        )
    return planned


def group_size(interleaved: Schedule) -> int:
    """Return the micro-batches that an interleaved schedule runs on one virtual stage before it switches to the next.

    >>> import hpgo
    >>> group_size(hpgo.schedule("interleaved", ranks=2, micro_batches=8, virtual_stages_per_rank=2, group_size=4))
    4
    """
    first = (action.rstrip("0123456789") for action in interleaved.action_lists[0])
    return sum(1 for _ in takewhile(lambda action: action == "0F", first))


def _sums_each_pass(program: Program, row: Framework) -> bool:
    """Return whether gradients are reduced in each backward pass, as in torchtitan without a pipeline."""
    return row.name == "torchtitan" and program.schedule.ranks == 1 and len(program.stages[0].devices) > 1


def _step_s(job: ExportJob) -> float | None:
    """Return the step time with the framework's schedule and its time of gradient reduction."""
    program, plan = job.program, job.plan
    if program.costs is None:
        return None
    if plan is None:
        return simulate(program).makespan_s
    if _sums_each_pass(program, job.framework):
        (stage,) = plan.stages
        return plan.micro_batches * (stage.forward_s + stage.backward_s + stage.exposed_grad_reduce_s)
    # The framework runs the plan as it is: keep the plan's number, to the last digit, instead of simulating again.
    late = plan.assumed.overlap and not job.framework.overlaps
    if program.schedule == plan.to_schedule() and not late:
        return plan.step_s
    tails_s = [stage.grad_reduce_s if late else stage.exposed_grad_reduce_s for stage in plan.stages]
    return simulate(program, gradient_sync_s=tails_s).makespan_s


def _differences(job: ExportJob, planned: Program, step_s: float | None) -> Iterator[str]:
    """Yield a sentence for each difference between the plan and what the framework runs."""
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
        yield f"{title} shards the optimizer state of 16-bit weights over replicas, but the plan does not"
    if _sums_each_pass(job.program, row):
        if job.program.micro_batches > 1:
            yield f"{title} reduces gradients in each of the {job.program.micro_batches} passes, not only in the last"
    elif job.plan and job.replicas > 1 and job.plan.assumed.overlap and not row.overlaps:
        yield f"{title} reduces gradients after all backward passes, not while they run"
    if job.replicas > 1 and not planned.shard_optimizer and row.shards_optimizer == (True,) and job.ranks > 1:
        yield f"{title} shards the optimizer state over replicas, but the plan does not: less memory is needed"
    if job.plan and step_s is not None and abs(step_s - job.plan.step_s) > 1e-9 * job.plan.step_s:
        yield f"the plan itself would take {format_seconds(job.plan.step_s)} per step"
