"""`Pipeline`: one rank's part of a plan, trained step by step, or inferring."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from hpgo.base.checks import check_flag, check_is, choice, number, whole
from hpgo.base.errors import ArgumentError, HpgoError, RunError
from hpgo.base.files import as_path
from hpgo.base.wording import shown
from hpgo.planning.chain.plans import ChainPlan
from hpgo.planning.reading import read_any
from hpgo.programs.orders import KINDS, schedule
from hpgo.programs.program import program as program_on
from hpgo.programs.turns import along, hosts_of, routes_of
from hpgo.runtime import guards
from hpgo.runtime.checkpoint import Holdings, Saver, latest, load
from hpgo.runtime.clocks import Clock, Stamps
from hpgo.runtime.devices import check_types, device_of_rank
from hpgo.runtime.engine import Batch, Engine, StageRun
from hpgo.runtime.gradients import Gradients, Ranks
from hpgo.runtime.heap import keep_freed
from hpgo.runtime.loader import Loader, Share, as_share, repeated
from hpgo.runtime.losses import remarks
from hpgo.runtime.meeting import (
    LOST,
    Groups,
    Seat,
    Ways,
    agree,
    check_place,
    first_line,
    is_of_others,
    told,
)
from hpgo.runtime.memory import Peak
from hpgo.runtime.messages import Messages, crossings
from hpgo.runtime.named import made_by
from hpgo.runtime.notice import Preempted
from hpgo.runtime.optimizer import Stepper
from hpgo.runtime.packets import layouts
from hpgo.runtime.passes import MOST_SEED
from hpgo.runtime.progress import HERE
from hpgo.runtime.recorder import Recorder
from hpgo.runtime.runnable import bits_behind, check_inference, check_program, program_of, with_layers
from hpgo.runtime.stream import Post, Stream, sink_of, source_of
from hpgo.runtime.watch import Limits, LostRankError
from hpgo.runtime.workload import Workload
from hpgo.timing.flow import Flow, flow_of, room_of, steps_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Self

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.gradients import Weight
    from hpgo.runtime.messages import Crossing
    from hpgo.runtime.moments import Watch
    from hpgo.runtime.parts import Part
    from hpgo.runtime.torch_backend import TorchEngine
    from hpgo.timing.timeline import Timeline

Backend = Literal["hpgo", "torch"]
"""What passes tensors on."""
_MOST_COMPARED = 8
"""Samples of the first batch by which the loss is looked at. Not tuned."""
_TINY = 1e-6  # as torch has it, so that a gradient of nothing is not divided by


class Pipeline:
    """One rank's part of a plan: its stages, its messages, its sums. Every rank makes one, and all step together.

    >>> import torch
    >>> import hpgo
    >>> layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> toy = Workload(layers, torch.zeros(2, 3), torch.zeros(2, 1), torch.nn.functional.mse_loss)
    >>> orders = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
    >>> program = hpgo.program(orders, [(toy.layers, [0])], micro_batch_size=2, global_batch_size=8)
    >>> with Pipeline(program, toy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as pipeline:
    ...     data = [(torch.full((3,), at / 8), torch.ones(1)) for at in range(16)]
    ...     losses = [pipeline.step(*batch) for _ in range(5) for batch in pipeline.loader(data)]
    >>> losses[-1] < losses[0]
    True
    """

    def __init__(
        self,
        plan: Plan | ChainPlan | Program | str | os.PathLike[str],
        workload: Workload | str,
        *,
        inference: bool = False,
        quantize: int | Sequence[int] | None = None,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        backend: Backend = "hpgo",
        find_nan: bool = False,
        silence_s: float = 5.0,
        grace_s: float = 30.0,
        shared_memory: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Joins the other ranks, and makes the layers of this one.

        Args:
            plan: a plan or a program, or the file of one.
            workload: what is run, or its name as `Workload.read` takes it.
            inference: `infer` instead of `step`, by a plan of `hpgo.partition` or of forward passes alone.
            quantize: in how many bits numbers travel in inference: one number, or one for each cut between two stages;
                0 leaves them as they are, None is what a plan of `hpgo.partition` says.
            optimizer: makes one of a list of parameters; None leaves weights as they are.
            clip_norm: gradients are scaled down to this norm, taken over all layers, where it is larger.
            seed: of first weights, of dropout, and of the order of a data set.
            dtype: of the weights; None is the workload's own.
            autocast: the dtype that `torch.autocast` computes in: `torch.bfloat16`; None is without.
            device: None is the GPU of the rank's local number if its machine has one for each rank, else the CPU.
            timeout_s: for how long the run may stand still while ranks wait: longer than anything that one does alone.
            backend: what passes tensors on: `hpgo`, or `torch` for `torch.distributed.pipelining`.
            find_nan: look at all that layers make, and end with the first layer that makes what is no number. Slow.
            silence_s: for how long a rank may give no sign of life.
            grace_s: how long the run goes on, at most, when SIGTERM has asked it to end.
            shared_memory: pass tensors on in memory that the ranks of a machine share, where they compute on CPUs;
                False has gloo carry them, as it does between machines.
            tell: takes a sentence for each remark about the loss, on the first rank that computes it; None makes it a
                RuntimeWarning.

        Raises ArgumentError for a plan and a workload that don't go together or can't be run, and RunError if the ranks
        don't find each other, or differ in plan, options or versions.
        """
        check_flag("inference", inference)
        plan = read_any(plan) if isinstance(plan, str | os.PathLike) else plan
        self.program, overlap = program_of(plan)
        (check_inference if inference else check_program)(self.program)
        if quantize is not None and not inference:
            raise ArgumentError(
                "`quantize` is for inference, and this trains", "leave it out, or set `inference`", code="conflict"
            )
        self.bits = bits_behind(plan, self.program.schedule.chain_length, quantize) if inference else ()
        """In which numbers travel behind each stage but the last, in inference; 0 as they are."""
        self._backend = choice("back-end", backend, get_args(Backend))
        if inference and (optimizer is not None or clip_norm is not None or self._backend == "torch"):
            raise ArgumentError(
                "`optimizer`, `clip_norm` and the back-end `torch` are for training, and `inference` is set",
                "leave them out",
                code="conflict",
            )
        pipelines = []
        if self._backend == "torch":
            from hpgo.runtime import torch_backend  # seconds that others need not wait

            pipelines = torch_backend.pipelines(self.program)
        self.device = device_of_rank(device)
        if self.device.type == "cpu":
            keep_freed()
        seed = whole("seed", seed, least=0, most=MOST_SEED)
        if clip_norm is not None and not number("clip_norm", clip_norm) > 0:
            raise ArgumentError(f"clip_norm is {clip_norm}", "give a norm above 0, or None")
        if optimizer is not None and not callable(optimizer):
            raise ArgumentError(
                f"optimizer is {shown(optimizer)}", "give a function that makes one of a list of parameters, or None"
            )
        _check_tell(tell)
        self._tell, self._told, self._is_unknown = tell, set[str](), False
        limits = Limits(timeout_s, silence_s, grace_s)
        check_types(dtype, autocast)
        check_flag("find_nan", find_nan)
        check_flag("shared_memory", shared_memory)
        self._find_nan, self._infers = find_nan, inference
        self._shares_memory, self._patience_s = shared_memory, limits.patience_s
        self._rows: list[int] = []  # of the last stream's micro-batches
        self.sent_bits: tuple[dict[int, int], ...] = ()
        """For each cut behind a stage, how many of the last stream's micro-batches crossed it in how many bits."""
        self._optimizer_of, self._clip_norm, self._seed = optimizer, clip_norm, seed
        self._failed = self._has_stepped = False
        self.preempted = False
        """Whether SIGTERM has asked a rank to end, the same on all ranks: then this is the last step."""
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._place: dict[str, int] | None = None  # of the data, for the loader that is made next
        check_place(self.program)
        self._seat = Seat(limits)
        try:
            self._seat.join(self.program, self.device)
            self.mine = self.program.for_rank(dist.get_rank())
            self.workload = Workload.read(workload, seed=seed) if isinstance(workload, str) else workload
            check_is("workload", self.workload, Workload, "give a Workload, or a name such as `gpt:layers=2`")
            if isinstance(plan, ChainPlan) and not plan.stages[0].layers:
                self.workload = self.workload.counting(int(self.program.stages[-1].layers[-1]))
                self.program = with_layers(self.program, self.workload.layers)
                self.mine = self.program.for_rank(self.rank)
            chain = self.program.stages[: self.program.schedule.chain_length]
            self.workload = self.workload.holding([layer for stage in chain for layer in stage.layers])
            self._build(seed, dtype, autocast, pipelines, overlap=overlap)
        except BaseException as error:
            self._fail(error)
            self.close()
            raise

    def _build(
        self,
        seed: int,
        dtype: torch.dtype | None,
        autocast: torch.dtype | None,
        pipelines: Sequence[tuple[int, ...]],
        *,
        overlap: bool,
    ) -> None:
        program, mine, workload = self.program, self.mine, self.workload
        agree(
            {
                "plan": hashlib.sha256(program.to_json().encode()).hexdigest()[:12],
                "workload": hashlib.sha256(repr((workload.layers, workload.ties)).encode()).hexdigest()[:12],
                "kind of device": self.device.type,
                "seed": str(seed),
                "backend": self._backend,
                "find_nan": str(self._find_nan),
                "use of shared memory": str(self._shares_memory),
                "dtype": f"{dtype}, autocast {autocast}",
                "clip_norm": str(self._clip_norm),
                "optimizer": "some" if self._optimizer_of is not None else "none",
                "way to run": f"inference in bits {self.bits}" if self._infers else "training",
            }
        )
        length = program.schedule.chain_length
        held = {stage.stage % length if self._infers else stage.stage for stage in mine.stages}
        parts = _parts(program, workload, held, dtype, seed, chains=1 if self._infers else None)
        cast: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if autocast is None else partial(torch.autocast, self.device.type, dtype=autocast)
        )
        self._stamps = Stamps(self.device)
        if self._infers:
            self._build_inference(parts, dtype, cast)
        else:
            self._build_training(parts, dtype, cast, pipelines, seed, overlap=overlap)
        self._recorder, self._peak = Recorder(program, Clock(self.device)), Peak(self.device)
        self.steps = 0
        """Steps that have been done, or streams that have passed."""
        self._notice = guards.notice()
        if self._notice is not None:
            self._notice.has_steps = True
        HERE.does("the time before the first step")

    def _build_training(
        self,
        parts: list[Part],
        dtype: torch.dtype | None,
        cast: Callable[[], AbstractContextManager[Any]],
        pipelines: Sequence[tuple[int, ...]],
        seed: int,
        *,
        overlap: bool,
    ) -> None:
        program, mine, workload = self.program, self.mine, self.workload
        cuts = crossings(parts, program.schedule.chain_length)
        ranks = Ranks(program, workload.ties)
        joining = [number for number, part in enumerate(parts) if part.joins]
        groups = Groups(program, ranks.groups, joining, pipelines=pipelines)
        self._seat.hold(groups)
        self.parts: dict[int, Part] = {stage.stage: parts[stage.stage].to(self.device) for stage in mine.stages}
        """The layers that this rank holds, by stage."""
        self._reads_inputs = any(value.is_input for part in self.parts.values() for value in part.takes)
        self._reads_targets = any(stage.is_last for stage in mine.stages)
        self._outputs = workload.outputs(dtype) if self._reads_targets else []
        self._look_at_loss(stacklevel=5)
        for stage, part in self.parts.items():
            if stage in groups.replicas:
                part.join(groups.replicas[stage])
            if self._find_nan:
                part.find_nan()
        # Sums that have begun would bring what other replicas have made.
        self._gradients = Gradients(self.parts, ranks, groups.sums, overlap=overlap and not self._find_nan)
        self._stepper = None
        if self._optimizer_of is not None:
            with told("the optimizer can't be made", "give a function that makes one of a list of parameters"):
                self._stepper = Stepper(self._optimizer_of, self.weights, groups.sums, shard=program.shard_optimizer)
        runs = {
            stage.stage: StageRun(
                stage,
                self.parts[stage.stage],
                workload,
                (cuts[stage.stage - 1] if not stage.is_first else (), cuts[stage.stage]),
                micro_batch_size=program.micro_batch_size,
                recompute=program.recompute,
                autocast=cast,
            )
            for stage in mine.stages
        }
        self._holdings = Holdings(
            program, workload, parts=self.parts, weights=self.weights, stepper=self._stepper, seed=seed
        )
        self.engine: Engine | TorchEngine
        if self._backend == "torch":
            from hpgo.runtime.torch_backend import TorchEngine

            with told("torch's pipelining can't be set up", "leave out `backend`: the engine of hpgo runs the plan"):
                self.engine = TorchEngine(
                    program,
                    mine,
                    runs,
                    cuts=cuts,
                    groups=groups.pipelines,
                    gradients=self._gradients,
                    stamps=self._stamps,
                    device=self.device,
                )
        else:
            messages = Messages(program, mine.rank, cuts, self._ways(cuts), self.device)
            self.engine = Engine(mine, runs, messages, self._gradients, self._stamps)

    def _build_inference(
        self, parts: list[Part], dtype: torch.dtype | None, cast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        program, routes = self.program, routes_of(self.program)
        self._cuts = layouts(parts, program.micro_batch_size, dtype, self.bits)
        self._stream_ways = self._ways(crossings(parts, len(parts)))
        held = [stage for stage, hosts in enumerate(hosts_of(routes)) if self.rank in hosts]
        self.parts = {stage: parts[stage].to(self.device).eval() for stage in held}
        if self._find_nan:
            for part in self.parts.values():
                part.find_nan()
        self._holdings = Holdings(program, self.workload, parts=self.parts, weights=[], stepper=None, seed=None)
        self._casts, self._autocast = dtype is not None, cast

    def _post_of(self, data_rank: int | None, *, holds: bool) -> Post | None:
        """Where this rank stands in the row of stages; None if it does not."""
        program, routes, cuts, before_stages = self.program, routes_of(self.program), self._cuts, 0
        if data_rank is not None and data_rank != source_of(routes):
            routes, cuts, before_stages = [(data_rank, *route) for route in routes], [cuts[0], *cuts], 1
        stage = next((at for at, hosts in enumerate(hosts_of(routes)) if self.rank in hosts), None)
        if stage is None:
            return None
        return Post(
            routes=routes,
            rank=self.rank,
            stage=stage,
            before_stages=before_stages,
            part=self.parts.get(stage - before_stages),
            cuts=cuts,
            is_returned=data_rank is not None,
            inputs=self.workload.example_inputs,
            casts=self._casts,
            rows=program.micro_batch_size,
            lock_step=steps_together(program),
            # Between ranks that share memory there is no link, and so nothing to hold a rate on.
            ways=Ways(self.device, self._patience_s, shared_memory=False) if holds else self._stream_ways,
            device=self.device,
            autocast=self._autocast,
        )

    def _ways(self, cuts: Sequence[Sequence[Crossing]]) -> Ways:
        """What carries what crosses `cuts`."""
        ways = Ways(self.device, self._patience_s, shared_memory=self._shares_memory and any(cuts))
        self._seat.hold(ways)
        return ways

    @property
    def takes_batches(self) -> bool:
        """Whether micro-batches that are inferred enter at this rank: it holds the first stage, or its first share."""
        return self._infers and self.rank == source_of(routes_of(self.program))

    @property
    def gives_outputs(self) -> bool:
        """Whether outputs of what is inferred leave from this rank: it holds the last stage, or its first share."""
        return self._infers and self.rank == sink_of(routes_of(self.program))

    @property
    def weights(self) -> list[Weight]:
        """The weights that this rank holds and trains, in the order of the layers."""
        return [] if self._infers else self._gradients.weights

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of this rank; None if there is none, or nothing for it to step."""
        return None if self._infers or self._stepper is None else self._stepper.optimizer

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.mine.rank

    @property
    def samples(self) -> list[range]:
        """The numbers, in a global batch, of the samples that this rank reads: inputs or targets, or none."""
        size = self.program.micro_batch_size
        found: set[int] = set()
        for stage in self.mine.stages:
            if not stage.is_last and not any(value.is_input for value in self.parts[stage.stage].takes):
                continue
            begin, end = self.program.schedule.micro_batches[stage.chain]
            for micro_batch in range(begin, end):
                found.update(row + micro_batch * size for row in stage.rows)
        return _ranges(sorted(found))

    def loader(self, dataset: Any, *, shuffle: bool = True, seed: int | None = None, workers: int = 0) -> Loader:
        """Goes through `dataset`, with `len(dataset)` and pairs `dataset[i]` of inputs and targets, a batch a step.

        `module:function` is the data set that this function returns. `workers` processes read ahead. Raises
        ArgumentError for a data set smaller than a global batch.
        """
        self._check_way(infers=False)
        if isinstance(dataset, str):
            with torch.random.fork_rng(devices=[]):  # what it draws is no part of the run
                dataset = made_by(dataset, "data", seed=self._seed, wanted="a data set: pairs of inputs and targets")
        self._loader = Loader(
            dataset,
            global_batch_size=self.program.global_batch_size,
            samples=self.samples,
            seed=self._seed if seed is None else seed,
            shuffle=shuffle,
            workers=workers,
        )
        if self._place is not None:
            self._loader.load_state_dict(self._place)
            self._place = None
        return self._loader

    def example(self) -> tuple[Share, Share]:
        """A global batch of the workload's example, repeated until it is full."""
        samples = self.samples
        return repeated(self.workload.example_inputs, samples), repeated(self.workload.example_targets, samples)

    def step(self, inputs: Any, targets: Any) -> float:
        """Trains on one global batch; returns its mean loss, the same on every rank; the sum if the loss is a sum.

        `inputs` and `targets` are what `loader` gives, or tensors, or tuples of them, with the whole global batch.
        Raises RunError if a layer raises, or another rank is lost, and Preempted, which ends the process with exit code
        143, if the step before was the last because of SIGTERM.
        """
        self._check_way(infers=False)
        self._check_whole()
        size = self.program.global_batch_size
        batch = Batch(
            step=self.steps,
            inputs=as_share("inputs", inputs, size, self.device if self._reads_inputs else None),
            targets=as_share("targets", targets, size, self.device if self._reads_targets else None),
            scale=1.0,
            loss=torch.zeros((), dtype=torch.float64, device=self.device),
        )
        self._failed = True
        HERE.step = self.steps
        with _named("it is what a layer or the loss raised"):
            if not self._has_stepped:
                self._look_at_loss(batch, stacklevel=3)
                self._has_stepped = True
            loss = self._step(batch)
        self._failed = False
        HERE.step = None
        HERE.does(f"the time after step {self.steps}")
        self.steps += 1
        return loss

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
        with those of the Pipeline, and `sent_bits` says what became of them. With `data_rank`, which is the rank of the
        first stage or one without a stage, that rank looks at `batches`, and is given the outputs. `watch` is called on
        this rank with each `Moment` of the stream.

        Raises ArgumentError for micro-batches that the model can't take, RunError if a layer raises, or another rank is
        lost, and Preempted, when all that has entered has left, if SIGTERM has asked a rank to end.

        >>> import torch
        >>> import hpgo
        >>> from hpgo.runtime import Workload
        >>> toy = Workload([torch.nn.Tanh()], torch.zeros(2, 3), torch.zeros(2, 3), torch.nn.functional.mse_loss)
        >>> orders = hpgo.schedule("forward_only", ranks=1, micro_batches=1)
        >>> program = hpgo.program(orders, [(toy.layers, [0])], micro_batch_size=2, global_batch_size=2)
        >>> with Pipeline(program, toy, inference=True) as pipeline:
        ...     [output.shape for output in pipeline.infer([torch.ones(2, 3), torch.ones(1, 3)])]
        [torch.Size([2, 3]), torch.Size([1, 3])]
        """
        self._check_way(infers=True)
        self._check_whole()
        most = room_of(self.program, in_flight)
        if not hasattr(batches, "__iter__") or isinstance(batches, torch.Tensor | str):
            raise ArgumentError(f"the micro-batches are {shown(batches)}", "give a list of tensors, or a generator")
        if hold_samples_per_s is not None:
            hint = "it is a number of samples a second above 0"
            hold_samples_per_s = number("the rate to hold", hold_samples_per_s, above=0, hint=hint)
            if self.device.type != "cpu":
                raise ArgumentError(
                    "a rate is to be held on GPUs, whose links nobody measures while they compute",
                    "run on `cpu`, or choose the bits with `quantize`",
                )
        if data_rank is not None:
            self._check_data_rank(whole("data_rank", data_rank, least=0, most=self.program.world_size - 1))
        if watch is not None and not callable(watch):
            raise ArgumentError(f"watch is {shown(watch)}", "give a function of a Moment, or None")
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
        post = self._post_of(data_rank, holds=hold_samples_per_s is not None)
        stream = (
            None
            if post is None
            else Stream(post, self._stamps, in_flight, hold_samples_per_s=hold_samples_per_s, watch=watch)
        )
        with _named("it is what a layer raised"):
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
        self._check_way(infers=True)
        timeline = self._recorder.timeline(self.steps - 1)
        return flow_of(timeline, self._rows, routes=timeline.stages // self.program.schedule.chain_length)

    def _check_way(self, *, infers: bool) -> None:
        """Raises ArgumentError for what this pipeline was not made for."""
        if infers and not self._infers:
            raise ArgumentError(
                "this Pipeline was made to train", "make it with `inference=True` to infer", code="wrong_state"
            )
        if self._infers and not infers:
            raise ArgumentError(
                "this Pipeline was made to infer", "make it without `inference` to train", code="wrong_state"
            )

    def _check_whole(self) -> None:
        """Raises what ends a run that was asked to end, or has failed."""
        if self.preempted:
            raise Preempted
        if self._failed:
            raise RunError(
                "a step of this run has failed, and left it half done", "make the Pipeline anew", code="mismatch"
            )

    def checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int = 3,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Saves what was learnt in `folder`, after each `every` steps and the last one before SIGTERM ends the run.

        All ranks must ask, after each step.
        The next steps run while it is written. The last `keep` checkpoints stay. A save that fails, on a full disk say,
        leaves them as they are and the run goes on: rank 0 hands `tell` one sentence at a later call or when the run is
        left, or makes it a RuntimeWarning. Before the first step it looks at the folder, and saves nothing. Raises
        RunError for a folder that can't be made, or that holds later steps, of another run.
        """
        self._check_way(infers=False)
        whole("every", every, least=1)
        _check_tell(tell)
        if self._saver is None or self._saver.folder != as_path(folder, RunError):
            self._finish_saving()
            self._saver = Saver(folder, self.steps, keep=keep, tell=tell)
        self._saver.news()
        if self.steps and (self.steps % every == 0 or self.preempted):
            place = self._place if self._loader is None else self._loader.state_dict()
            self._saver.save(self.steps, place, self._holdings)

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Goes on from the newest checkpoint in `folder`; returns whether there is one. All ranks must ask.

        The plan may be another one than that of the run that saved it. The loader, this run's or the one it makes next,
        goes on where the data stood; learning rates and the like are those of this run. Raises RunError for a
        checkpoint that doesn't fit the workload, the optimizer, the seed or the global batch, or is damaged.
        """
        found = latest(folder)
        if found is None:
            return False
        load(found, self._holdings)
        self.steps = found.steps
        self._place = found.facts["loader"]
        if self._loader is not None and self._place is not None:
            self._loader.load_state_dict(self._place)
            self._place = None
        return True

    def _finish_saving(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.finish()
            saver.close()

    def timeline(self, step: int | None = None) -> Timeline:
        """The last step as the ranks ran it, or one of the last 100, counted from 0. Every rank must ask, and gets all.

        Rows are ranks. All times are by the clock of rank 0, to which this adds what other machines' clocks are ahead.
        Raises ArgumentError for a step that is not known, RunError if another rank is lost.
        """
        return self._recorder.timeline(self.steps - 1 if step is None else step)

    def usual_step(self) -> int:
        """The step of median length, by rank 0, of the last 100 without the first of them. Every rank must ask.

        Raises ArgumentError before the first step, RunError if another rank is lost.
        """
        return self._recorder.usual_step()

    def _step(self, batch: Batch) -> float:
        stamp = self._stamps.take
        with self._peak.step(lambda: self._held(batch), self._optimizer_state):
            begin = stamp()
            batch.scale = self._scale(batch.targets)
            self.engine.step(batch)
            self._gradients.finish()
            summed = stamp()
            sums = torch.zeros(3, dtype=torch.float64, device=self.device)
            sums[0] = batch.loss
            if self._clip_norm is not None:
                sums[1] = self._gradients.square()
            sums[2] = self._notice is not None and self._notice.is_given
            with HERE.meets("the sum of losses"):
                dist.all_reduce(sums)
                loss, square, notices = sums.tolist()
            self.preempted = notices > 0
            if self._clip_norm is not None:
                factor = self._clip_norm / (math.sqrt(square) + _TINY)
                if factor < 1:
                    self._gradients.scale(factor)
            self._peak.passes_end()
            if self._stepper is not None:
                self._stepper.step()
            ends_ns = self._stamps.in_ns([begin, summed, stamp()])
        self._recorder.add(self.steps, [*self.engine.clock_ns, *ends_ns], self._peak.bytes)
        return float(loss)

    def _look_at_loss(self, batch: Batch | None = None, *, stacklevel: int) -> None:
        """Tell what to know about the loss before the first step, by the example or by samples of the first batch.

        Raises ArgumentError for a loss that would not train as on one device.
        """
        size = self.program.micro_batch_size
        for stage in self.mine.stages:
            if not stage.is_last:
                continue
            first, last = self.program.schedule.micro_batches[stage.chain]
            samples = [row + at * size for at in range(first, last) for row in stage.rows]
            samples = samples[:: math.ceil(len(samples) / _MOST_COMPARED)]
            found = remarks(
                self.workload,
                self._outputs,
                self.device,
                rows=len(stage.rows),
                batch=self.program.global_batch_size,
                inputs=_chosen(batch.inputs, samples) if batch else (),
                targets=_chosen(batch.targets, samples) if batch else (),
            )
            if stage.chain == 0 and stage.rows.start == 0:
                if batch is None:
                    # The first batch may show what the example doesn't.
                    self._is_unknown = found.pop("unknown", None) is not None
                elif not self._is_unknown:
                    found.pop("unknown", None)
                for kind in [one for one in found if one not in self._told]:
                    if self._tell is not None:
                        self._tell(found[kind])
                    else:
                        warnings.warn(found[kind], RuntimeWarning, stacklevel=stacklevel)
                self._told |= found.keys()

    def _held(self, batch: Batch) -> Iterator[torch.Tensor]:
        """What is there before a step and after it."""
        for part in self.parts.values():
            yield from part.parameters()
            yield from part.buffers()
        yield from (weight.gradient for weight in self.weights)
        yield from self._optimizer_state()
        yield from batch.inputs.tensors if self._reads_inputs else ()
        yield from batch.targets.tensors if self._reads_targets else ()

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        states = () if self.optimizer is None else self.optimizer.state.values()
        return (one for state in states for one in state.values() if isinstance(one, torch.Tensor))

    def _scale(self, targets: Share) -> torch.Tensor | float:
        """What a sample's weighted loss counts in the mean, or in the sum."""
        if self.workload.adds_up:
            return 1.0
        if self.workload.weight is None:
            return self.mine.loss_weight
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.program.micro_batch_size
        for stage in self.mine.stages:
            if stage.is_last:
                for micro_batch in range(*self.program.schedule.micro_batches[stage.chain]):
                    begin = micro_batch * size + stage.rows.start
                    total += self.workload.weight_of(targets.rows(begin, begin + len(stage.rows))).sum()
        with HERE.meets("the sum of the samples' weights"):
            dist.all_reduce(total)
        if not total:
            raise ArgumentError("no sample of the global batch has a weight", "give at least one a weight above 0")
        return 1 / float(total)

    def close(self) -> None:
        """Leaves the other ranks, when all is saved that is to be; what was trained stays in `weights`."""
        try:
            if not self._failed:
                self._finish_saving()
        finally:
            self._seat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is not None and not isinstance(value, Preempted):
            self._fail(value)
        self.close()

    def _fail(self, error: BaseException) -> None:
        """The others hear of it, may be gone, and can't help to save any more."""
        self._failed = True
        guards.charge(error)
        if self._seat.guards and not isinstance(error, SystemExit):
            guards.is_first_to_tell()  # as Python does, when it ends by the error


@contextmanager
def _named(hint: str) -> Iterator[None]:
    """Errors say which rank they come from and what it did; `hint` says where those come from that aren't hpgo's."""
    try:
        yield
    except HpgoError as failure:
        raise failure.reworded(f"{HERE}: {failure.message}") from failure
    except Exception as failure:
        said = f"{HERE}: {type(failure).__name__}: {first_line(failure)}"
        if is_of_others(failure):
            raise guards.lost() or LostRankError(said, LOST) from failure
        raise RunError(said, hint) from failure


def _check_tell(tell: object) -> None:
    if tell is not None and not callable(tell):
        raise ArgumentError(f"tell is {shown(tell)}", "give a function of a sentence, or None")


def _chosen(share: Share, samples: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Rows of these samples."""
    rows = [share.rows(at, at + 1) for at in samples] if share.tensors else []
    return tuple(torch.cat(tensors) for tensors in zip(*rows, strict=True))


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
        machines=program.machines,
    )


def _parts(
    program: Program,
    workload: Workload,
    mine: set[int],
    dtype: torch.dtype | None,
    seed: int,
    *,
    chains: int | None = None,
) -> list[Part]:
    """The parts of all stages of so many chains, or of all; those that are not mine take no memory."""
    length = program.schedule.chain_length
    splits = any(KINDS[kind] == "W" for kind in set(program.schedule.actions[:, 0].tolist()))
    found: list[Part] = []
    for begin in range(0, length * chains if chains else len(program.stages), length):
        layers = [stage.layers for stage in program.stages[begin : begin + length]]
        only = {stage - begin for stage in mine if begin <= stage < begin + length}
        found += workload.parts(layers, dtype=dtype, seed=seed, only=only, split_backward=splits)
    return found


def _ranges(numbers: list[int]) -> list[range]:
    """Sorted whole numbers as ranges."""
    found: list[range] = []
    for one in numbers:
        if found and found[-1].stop == one:
            found[-1] = range(found[-1].start, one + 1)
        else:
            found.append(range(one, one + 1))
    return found
