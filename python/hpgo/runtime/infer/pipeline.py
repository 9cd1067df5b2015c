"""`InferencePipeline`: one rank's part of a plan, through which micro-batches stream."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.checks import check_int, number
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError
from hpgo.programs.host_rotation import along, hosts_of, routes_of
from hpgo.programs.program import program as program_on
from hpgo.programs.schedule import schedule
from hpgo.runtime.checkpoint import RankState
from hpgo.runtime.infer.stream import PipelinePosition, Stream, sink_of, source_of
from hpgo.runtime.messages import boundary_tensors
from hpgo.runtime.packets import layouts
from hpgo.runtime.preemption import Preempted
from hpgo.runtime.progress import HERE
from hpgo.runtime.rank_pipeline import RankOptions, RankPipeline, naming_rank
from hpgo.runtime.rendezvous import agree
from hpgo.runtime.runnable import Runnable, bits_behind, check_inference
from hpgo.runtime.session import NeighbourGroups
from hpgo.timing.flow import Flow, flow_of, room_of, steps_together

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.stream_events import Watch
    from hpgo.runtime.workload import Workload


class InferencePipeline(RankPipeline):
    """One rank's part of a plan that infers: micro-batches stream through its stages.

    Every rank makes one, and all pass through the same streams. Layers run as those of models that don't train.

    >>> import torch
    >>> import hpgo.runtime
    >>> loss = torch.nn.functional.mse_loss
    >>> toy = hpgo.runtime.Workload([torch.nn.Tanh()], torch.zeros(2, 3), torch.zeros(2, 3), loss)
    >>> orders = hpgo.schedule("forward_only", ranks=1, micro_batches=1)
    >>> program = hpgo.program(orders, [(toy.layers, [0])], micro_batch_size=2, global_batch_size=2)
    >>> with InferencePipeline(program, toy) as pipeline:
    ...     [output.shape for output in pipeline.infer([torch.ones(2, 3), torch.ones(1, 3)])]
    [torch.Size([2, 3]), torch.Size([1, 3])]
    """

    def __init__(
        self,
        plan: Plan | ChainPlan | Program | Runnable | str | os.PathLike[str],
        workload: Workload | str,
        *,
        quantize: int | Sequence[int] | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        find_nan: bool = False,
        silence_s: float = 5.0,
        grace_s: float = 30.0,
        shared_memory: bool = True,
    ) -> None:
        """Join the other ranks, and make the layers of this one.

        Args:
            plan: a plan of `hpgo.partition`, or a program of forward passes alone, or the file of one.
            workload: what is run, or its name as `Workload.read` takes it.
            quantize: in how many bits numbers travel: one number, or one for each cut between two stages; 0 leaves them
                as they are, None is what a plan of `hpgo.partition` says.
            seed: of the weights, unless the workload or a checkpoint has them.
            dtype: of the weights; None is the workload's own.
            autocast: the dtype that `torch.autocast` computes in: `torch.bfloat16`; None is without.
            device: None is the GPU of the rank's local number if its machine has one for each rank, else the CPU.
            timeout_s: for how long the run may stand still while ranks wait: longer than anything that one does alone.
            find_nan: look at all that layers make, and end with the first layer that makes what is no number. Slow.
            silence_s: for how long a rank may give no sign of life.
            grace_s: how long the run goes on, at most, when SIGTERM has asked it to end.
            shared_memory: pass tensors on in memory that the ranks of a machine share, where they compute on CPUs;
                False has gloo carry them, as it does between machines.

        Raises ArgumentError for a plan and a workload that don't go together or can't infer, and RunError if the ranks
        don't find each other, or differ in plan, options or versions.
        """
        runnable = Runnable.from_plan(plan)
        check_inference(runnable.program)
        self.bits = bits_behind(runnable.bits, runnable.program.schedule.chain_length, quantize)
        """In which numbers travel behind each stage but the last; 0 as they are."""
        self.sent_bits: tuple[dict[int, int], ...] = ()
        """For each cut behind a stage, how many of the last stream's micro-batches crossed it in how many bits."""
        self._rows: list[int] = []  # of the last stream's micro-batches
        options = RankOptions.from_arguments(
            seed=seed,
            dtype=dtype,
            autocast=autocast,
            device=device,
            timeout_s=timeout_s,
            silence_s=silence_s,
            grace_s=grace_s,
            find_nan=find_nan,
            shared_memory=shared_memory,
        )
        super().__init__(runnable, workload, options)

    def _kind(self) -> str:
        return f"inference in bits {self.bits}"

    def _build(self, runnable: Runnable) -> None:
        del runnable
        program, options = self.program, self._options
        length = program.schedule.chain_length
        parts = self._stage_modules({stage.stage % length for stage in self.mine.stages}, chains=1)
        self._cuts = layouts(parts, program.micro_batch_size, options.dtype, self.bits)
        self._stream_groups = self._neighbour_groups(boundary_tensors(parts, len(parts)))
        held = [stage for stage, hosts in enumerate(hosts_of(routes_of(program))) if self.rank in hosts]
        self.parts = {stage: parts[stage].to(self.device).eval() for stage in held}
        if options.find_nan:
            for part in self.parts.values():
                part.find_nan()
        self._state = RankState(program, self.workload, parts=self.parts, weights=[], stepper=None, seed=None)

    def _position_of(self, data_rank: int | None, *, holds: bool) -> PipelinePosition | None:
        """Where this rank stands in the row of stages; None if it does not."""
        program, routes, cuts, before_stages = self.program, routes_of(self.program), self._cuts, 0
        if data_rank is not None and data_rank != source_of(routes):
            routes, cuts, before_stages = [(data_rank, *route) for route in routes], [cuts[0], *cuts], 1
        stage = next((at for at, hosts in enumerate(hosts_of(routes)) if self.rank in hosts), None)
        if stage is None:
            return None
        return PipelinePosition(
            routes=routes,
            rank=self.rank,
            stage=stage,
            before_stages=before_stages,
            part=self.parts.get(stage - before_stages),
            cuts=cuts,
            is_returned=data_rank is not None,
            inputs=self.workload.example_inputs,
            casts=self._options.dtype is not None,
            rows=program.micro_batch_size,
            lock_step=steps_together(program),
            groups=self._link_groups() if holds else self._stream_groups,
            device=self.device,
            autocast=self._options.cast,
        )

    def _link_groups(self) -> NeighbourGroups:
        """Return groups without shared memory: it is no link, so there would be nothing to hold a rate on."""
        return NeighbourGroups(self.device, self._options.limits.patience_s, shared_memory=False)

    @property
    def takes_batches(self) -> bool:
        """Whether micro-batches enter at this rank: it holds the first stage, or its first share."""
        return self.rank == source_of(routes_of(self.program))

    @property
    def gives_outputs(self) -> bool:
        """Whether outputs leave from this rank: it holds the last stage, or its first share."""
        return self.rank == sink_of(routes_of(self.program))

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Load the weights of the newest checkpoint in `folder`; return whether there is one. All ranks must ask.

        Raises RunError for a checkpoint that doesn't fit the workload, or is damaged.
        """
        return self._load(folder) is not None

    def infer(
        self,
        batches: Iterable[Any] = (),
        *,
        in_flight: int | None = None,
        hold_samples_per_s: float | None = None,
        data_rank: int | None = None,
        watch: Watch | None = None,
    ) -> Iterator[torch.Tensor | tuple[torch.Tensor, ...]]:
        """Passes micro-batches through all stages; gives what the model returns for each, in order, on the last rank.

        Every rank must go through what it gives, which is nothing but on the last one, until it ends. Only the rank of
        the first stage looks at `batches`: tensors, or a tuple of one for each input, with as many rows as the plan's
        micro-batches, or fewer. It takes the next when there is room: there is a place in front of each stage and one
        behind it, and at most `in_flight` have entered and not left. Layers run as those of models that don't train.

        With `hold_samples_per_s`, numbers cross each cut in as many bits as its link carries at that rate; they begin
        with `bits`, and `sent_bits` says what became of them. With `data_rank`, which is the rank of the
        first stage or one without a stage, that rank looks at `batches`, and is given the outputs. `watch` is called on
        this rank with each `Moment` of the stream.

        Raises ArgumentError for micro-batches that the model can't take, RunError if a layer raises, or another rank is
        lost, and Preempted, when all that has entered has left, if SIGTERM has asked a rank to end.
        """
        self._check_whole()
        most = room_of(self.program, in_flight)
        if not hasattr(batches, "__iter__") or isinstance(batches, torch.Tensor | str):
            raise ArgumentError(f"the micro-batches are {safe_repr(batches)}", "give a list of tensors, or a generator")
        if hold_samples_per_s is not None:
            hint = "it is a number of samples a second above 0"
            hold_samples_per_s = number("the rate to hold", hold_samples_per_s, above=0, hint=hint)
            if self.device.type != "cpu":
                raise ArgumentError(
                    "a rate is to be held on GPUs, whose links nobody measures while they compute",
                    "run on `cpu`, or choose the bits with `quantize`",
                )
        if data_rank is not None:
            self._check_data_rank(check_int("data_rank", data_rank, least=0, most=self.program.world_size - 1))
        if watch is not None and not callable(watch):
            raise ArgumentError(f"watch is {safe_repr(watch)}", "give a function of a Moment, or None")
        return self._infer(batches, most, hold_samples_per_s, data_rank, watch)

    def _check_data_rank(self, data_rank: int) -> None:
        """Raises ArgumentError for a rank that is in the middle of the row."""
        routes = routes_of(self.program)
        for at, hosts in enumerate(hosts_of(routes)):
            if data_rank in hosts and data_rank != source_of(routes):
                raise ArgumentError(
                    f"rank {data_rank} holds stage {at}, and the data shall be there",
                    f"leave the data to rank {source_of(routes)} of the first stage, or to one without a stage",
                )

    def _infer(
        self,
        batches: Iterable[Any],
        in_flight: int,
        hold_samples_per_s: float | None,
        data_rank: int | None,
        watch: Watch | None,
    ) -> Iterator[torch.Tensor | tuple[torch.Tensor, ...]]:
        self._failed = True
        agree(
            {
                "in_flight": str(in_flight),
                "rate to hold": str(hold_samples_per_s),
                "rank with the data": str(data_rank),
            }
        )
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        position = self._position_of(data_rank, holds=hold_samples_per_s is not None)
        stream = (
            None
            if position is None
            else Stream(position, self._stamps, in_flight, hold_samples_per_s=hold_samples_per_s, watch=watch)
        )
        with naming_rank("it is what a layer raised"):
            if stream is not None:
                for outputs in stream.run(iter(batches)):
                    yield outputs[0] if len(outputs) == 1 else outputs
            mine = None if stream is None else (stream.rows, stream.is_cut_short, stream.sent_bits)
            everyone: list[Any] = [mine] * dist.get_world_size()
            with HERE.meets("the end of the stream"):
                dist.all_gather_object(everyone, mine)
        routes = routes_of(self.program)
        self._rows = everyone[source_of(routes) if data_rank is None else data_rank][0]
        self.preempted = any(one[1] for one in everyone if one is not None)
        sent: list[Counter[int]] = [sum((everyone[host][2] for host in hosts), Counter()) for hosts in hosts_of(routes)]
        self.sent_bits = tuple(dict(one) for one in sent[:-1])
        self._failed = False
        HERE.does(f"the time after stream {self.steps}")
        if self._rows:
            ran = _of_stream(self.program, len(self._rows))
            count = 2 * len(ran.for_rank(self.rank).actions)
            passes = stream.clock_ns[-count:] if stream is not None and count else []
            clock_ns = passes or self._stamps.in_ns([self._stamps.take()])
            ends_ns = [clock_ns[0], clock_ns[-1], clock_ns[-1]]
            peak_bytes = torch.cuda.max_memory_allocated(self.device) if gpu else None
            self._recorder.add(self.steps, [*passes, *ends_ns], peak_bytes, ran)
        self.steps += 1
        if self.preempted:
            raise Preempted

    def flow(self) -> Flow:
        """When each of the last stream's micro-batches entered and left, the last 10,000 of them. Every rank must ask.

        Raises ArgumentError before the first stream, RunError if another rank is lost.
        """
        timeline = self._recorder.timeline(self.steps - 1)
        return flow_of(timeline, self._rows, routes=timeline.stages // self.program.schedule.chain_length)


def _of_stream(program: Program, micro_batches: int) -> Program:
    """So many forward passes of each stage, in order."""
    routes, length = routes_of(program), program.schedule.chain_length
    if steps_together(program):
        orders = schedule("staggered", ranks=length, micro_batches=micro_batches)
    else:
        orders = along(routes, micro_batches)
    return program_on(
        orders,
        [
            (program.stages[stage].layers, [host])
            for route in routes[: len(orders.micro_batches)]
            for stage, host in enumerate(route)
        ],
        micro_batch_size=program.micro_batch_size,
        global_batch_size=program.micro_batch_size * micro_batches,
        nodes=program.nodes,
    )
