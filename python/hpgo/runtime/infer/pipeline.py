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
    """One rank's part of an inference plan: micro-batches stream through its stages.

    Every rank creates one, and all ranks take part in each stream. Layers run in evaluation mode.

    >>> import torch
    >>> import hpgo.runtime
    >>> loss = torch.nn.functional.mse_loss
    >>> toy = hpgo.runtime.Workload([torch.nn.Tanh()], torch.zeros(2, 3), torch.zeros(2, 3), loss)
    >>> built = hpgo.schedule("forward_only", ranks=1, micro_batches=1)
    >>> program = hpgo.program(built, [(toy.layers, [0])], pipeline_micro_batch_size=2, global_batch_size=2)
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
        """Join the other ranks and build the layers of this rank.

        Args:
            plan: a plan of `hpgo.partition`, a program with forward passes only, or a file with either.
            workload: the model and its data, or a name for `Workload.read`.
            quantize: bit width of transferred numbers: one for all cuts or one per cut; 0 sends them unchanged. None:
                the widths of the plan.
            seed: seed of the weights, unless the workload or a checkpoint has them.
            dtype: number format of the weights. None: the workload's.
            autocast: number format of `torch.autocast`, such as `torch.bfloat16`. None: no autocast.
            device: device of the layers. None: the GPU with the rank's local number if its host has one for each rank,
                else the CPU.
            timeout_s: maximum time in seconds without progress while ranks wait. It must exceed the longest operation
                of a single rank.
            find_nan: check all results of layers, and stop at the first layer whose result has NaN or infinity. Slow.
            silence_s: maximum time in seconds without a heartbeat of a rank.
            grace_s: maximum time in seconds that the run continues after SIGTERM.
            shared_memory: pass tensors through shared memory between CPU ranks of one host. False: gloo passes them, as
                it does between hosts.

        Raises ArgumentError if plan and workload don't match or can't run inference. Raises RunError if the ranks don't
        find each other, or if their plans, options or versions differ.
        """
        runnable = Runnable.from_plan(plan)
        check_inference(runnable.program)
        self.bits = bits_behind(runnable.bits, runnable.program.schedule.stages_per_pipeline, quantize)
        """Bit width after each stage but the last; 0 sends numbers unchanged."""
        self.sent_bits: tuple[dict[int, int], ...] = ()
        """Number of the last stream's micro-batches by bit width, for each cut after a stage."""
        self._links: NeighbourGroups | None = None
        self._rows: list[int] = []  # rows of the last stream's micro-batches
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
        length = program.schedule.stages_per_pipeline
        # In the program, each route through the hosts is a chain of stages. All chains share the modules of one model.
        parts = self._stage_modules({stage.stage % length for stage in self.mine.stages}, chains=1)
        self._cuts = layouts(parts, program.pipeline_micro_batch_size, options.dtype, self.bits)
        self._stream_groups = self._neighbour_groups(boundary_tensors(parts, len(parts)))
        held = [stage for stage, hosts in enumerate(hosts_of(routes_of(program))) if self.rank in hosts]
        self.parts = {stage: parts[stage].to(self.device).eval() for stage in held}
        if options.find_nan:
            for part in self.parts.values():
                part.find_nan()
        # This state only serves to load a checkpoint, so it has no gradients, optimizer or random generators.
        self._state = RankState(
            program, self.workload, parts=self.parts, weights=[], stepper=None, seed=None, dtype=self._options.dtype
        )

    def _position_of(self, data_rank: int | None, *, holds: bool) -> PipelinePosition | None:
        """Return the position of this rank in the chain of stages, or None if it has none."""
        program, routes, cuts, before_stages = self.program, routes_of(self.program), self._cuts, 0
        # A rank that only holds the data becomes an additional stage without layers before the first one. What enters
        # it is what enters the first stage, so the first cut counts twice.
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
            rows=program.pipeline_micro_batch_size,
            lock_step=steps_together(program),
            groups=self._link_groups() if holds else self._stream_groups,
            device=self.device,
            autocast=self._options.cast,
        )

    def _link_groups(self) -> NeighbourGroups:
        """Return groups without shared memory, which is not a link: its rate says nothing about a network."""
        if self._links is None:
            self._links = NeighbourGroups(self.device, self._options.limits.patience_s, shared_memory=False)
            self._session.hold(self._links)
        return self._links

    @property
    def takes_batches(self) -> bool:
        """Whether micro-batches enter at this rank: it is the first host of the first stage."""
        return self.rank == source_of(routes_of(self.program))

    @property
    def gives_outputs(self) -> bool:
        """Whether outputs leave at this rank: it is the first host of the last stage."""
        return self.rank == sink_of(routes_of(self.program))

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Load the weights of the newest checkpoint in `folder`, and return whether there is one.

        All ranks must call this. Raises RunError for a checkpoint that doesn't fit the workload, or is damaged.
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
        """Stream micro-batches through all stages, and yield the model's outputs for each, in order, on the last rank.

        Every rank must iterate to the end, but only the last rank gets items. Only the rank of the first stage reads
        `batches`: tensors, or a tuple with one tensor per input, with no more rows than a micro-batch of the plan.
        It takes the next one when a place is free. Memory is bounded: there is one place before and one after each
        stage, and at most `in_flight` micro-batches are in the pipeline.

        With `hold_samples_per_s`, each cut uses the most bits that its link sustains at that rate. It starts with
        `bits`, and `sent_bits` reports the result. With `data_rank`, the rank of the first stage or one without
        a stage, that rank reads `batches` and gets the outputs. `watch` is called on this rank with each `Moment` of
        the stream.

        Raises ArgumentError for micro-batches that the model does not accept, and RunError if a layer raises or a rank
        is lost. Raises Preempted after SIGTERM to any rank, when all micro-batches that have entered have left.
        """
        self._check_whole()
        maximum = room_of(self.program, in_flight)
        if not hasattr(batches, "__iter__") or isinstance(batches, torch.Tensor | str):
            raise ArgumentError(f"the micro-batches are {safe_repr(batches)}", "give a list of tensors, or a generator")
        if hold_samples_per_s is not None:
            hint = "give a number of samples per second above 0"
            hold_samples_per_s = number("the rate to hold", hold_samples_per_s, above=0, hint=hint)
            # With NCCL, waiting for a message returns before its data has arrived, so arrivals could not be timed.
            if self.device.type != "cpu":
                raise ArgumentError(
                    "a rate is to be held on `{self.device.type}`, but links are only measured between CPUs",
                    "set device to `cpu`, or choose the bits with `quantize`",
                )
        if data_rank is not None:
            self._check_data_rank(check_int("data_rank", data_rank, minimum=0, maximum=self.program.world_size - 1))
        if watch is not None and not callable(watch):
            raise ArgumentError(f"watch is {safe_repr(watch)}", "give a function of a Moment, or None")
        return self._infer(batches, maximum, hold_samples_per_s, data_rank, watch)

    def _check_data_rank(self, data_rank: int) -> None:
        """Raise ArgumentError for a rank that holds a stage other than the first."""
        routes = routes_of(self.program)
        for at, hosts in enumerate(hosts_of(routes)):
            if data_rank in hosts and data_rank != source_of(routes):
                raise ArgumentError(
                    f"the data rank is {data_rank}, but this rank holds stage {at}",
                    f"choose rank {source_of(routes)} of the first stage, or a rank without a stage",
                )

    def _infer(
        self,
        batches: Iterable[Any],
        in_flight: int,
        hold_samples_per_s: float | None,
        data_rank: int | None,
        watch: Watch | None,
    ) -> Iterator[torch.Tensor | tuple[torch.Tensor, ...]]:
        # This is reset at the end. If the caller abandons the stream, the pipeline is unusable, since other ranks wait.
        self._failed = True
        # Ranks with different limits would wait for each other, so compare them before anything is sent.
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
            # The source alone knows the rows of all micro-batches, and each sender its widths. Exchange them for `flow`
            # and `sent_bits`.
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
            # A pass has two time stamps. Ranks keep stamps of the last micro-batches only.
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
        """Return when each micro-batch of the last stream entered and left, for the last 10,000 of them.

        All ranks must call this. Raises ArgumentError before the first stream, and RunError if a rank is lost.
        """
        timeline = self._recorder.timeline(self.steps - 1)
        return flow_of(timeline, self._rows, routes=timeline.stages // self.program.schedule.stages_per_pipeline)


def _of_stream(program: Program, micro_batches: int) -> Program:
    """Return a program of `micro_batches` forward passes of each stage, in order."""
    routes, length = routes_of(program), program.schedule.stages_per_pipeline
    if steps_together(program):
        built = schedule("staggered", ranks=length, micro_batches=micro_batches)
    else:
        built = along(routes, micro_batches)
    return program_on(
        built,
        [
            (program.stages[stage].layers, [host])
            for route in routes[: len(built.micro_batches)]
            for stage, host in enumerate(route)
        ],
        pipeline_micro_batch_size=program.pipeline_micro_batch_size,
        global_batch_size=program.pipeline_micro_batch_size * micro_batches,
        nodes=program.nodes,
    )
