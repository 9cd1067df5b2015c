"""`Pipeline`: one rank's part of a plan, trained step by step."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from hpgo.base.checks import check_int, choice, number
from hpgo.base.files import as_path
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError, RunError
from hpgo.runtime.checkpoint import RankState
from hpgo.runtime.engine import Batch, Engine, StageRun
from hpgo.runtime.loader import Loader, Share, as_share, repeated
from hpgo.runtime.losses import remarks
from hpgo.runtime.memory import Peak
from hpgo.runtime.messages import Messages, boundary_tensors
from hpgo.runtime.progress import HERE
from hpgo.runtime.rank_pipeline import RankOptions, RankPipeline, naming_rank
from hpgo.runtime.rendezvous import translate_errors
from hpgo.runtime.runnable import Runnable, check_program
from hpgo.runtime.session import Groups
from hpgo.runtime.train.gradients import Gradients, Ranks
from hpgo.runtime.train.optimizer import ShardedOptimizer
from hpgo.runtime.train.saver import Saver
from hpgo.runtime.user_functions import made_by

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.train.gradients import Weight
    from hpgo.runtime.train.torch_backend import TorchEngine
    from hpgo.runtime.workload import Workload

Backend = Literal["hpgo", "torch"]
"""What passes tensors on."""
_MOST_COMPARED = 8
"""Samples of the first batch by which the loss is looked at. Not tuned."""
_TINY = 1e-6  # as torch has it, so that a gradient of nothing is not divided by


class Pipeline(RankPipeline):
    """One rank's part of a plan: its stages, its messages, its sums. Every rank makes one, and all step together.

    >>> import torch
    >>> import hpgo.runtime
    >>> layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> toy = hpgo.runtime.Workload(layers, torch.zeros(2, 3), torch.zeros(2, 1), torch.nn.functional.mse_loss)
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
        plan: Plan | Program | Runnable | str | os.PathLike[str],
        workload: Workload | str,
        *,
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
        runnable = Runnable.from_plan(plan)
        check_program(runnable.program)
        self._backend = choice("back-end", backend, get_args(Backend))
        self._pipelines: Sequence[tuple[int, ...]] = []
        if self._backend == "torch":
            from hpgo.runtime.train import torch_backend  # seconds that others need not wait

            self._pipelines = torch_backend.pipelines(runnable.program)
        if clip_norm is not None and not number("clip_norm", clip_norm) > 0:
            raise ArgumentError(f"clip_norm is {clip_norm}", "give a norm above 0, or None")
        if optimizer is not None and not callable(optimizer):
            raise ArgumentError(
                f"optimizer is {safe_repr(optimizer)}",
                "give a function that makes one of a list of parameters, or None",
            )
        _check_tell(tell)
        self._tell, self._told, self._is_unknown = tell, set[str](), False
        self._optimizer_of, self._clip_norm, self._seed = optimizer, clip_norm, seed
        self._has_stepped = False
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._place: dict[str, int] | None = None  # of the data, for the loader that is made next
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
        return "training"

    def _facts(self) -> dict[str, str]:
        return {
            "backend": self._backend,
            "clip_norm": str(self._clip_norm),
            "optimizer": "some" if self._optimizer_of is not None else "none",
        }

    def _build(self, runnable: Runnable) -> None:
        program, mine, workload = self.program, self.mine, self.workload
        find_nan = self._options.find_nan
        parts = self._stage_modules({stage.stage for stage in mine.stages})
        cuts = boundary_tensors(parts, program.schedule.chain_length)
        ranks = Ranks(program, workload.ties)
        joining = [number for number, part in enumerate(parts) if part.joins]
        groups = Groups(program, ranks.groups, joining, pipelines=self._pipelines)
        self._session.hold(groups)
        self.parts = {stage.stage: parts[stage.stage].to(self.device) for stage in mine.stages}
        self._reads_inputs = any(value.is_input for part in self.parts.values() for value in part.takes)
        self._reads_targets = any(stage.is_last for stage in mine.stages)
        self._outputs = workload.outputs(self._options.dtype) if self._reads_targets else []
        self._look_at_loss(stacklevel=5)
        for stage, part in self.parts.items():
            if stage in groups.replicas:
                part.join(groups.replicas[stage])
            if find_nan:
                part.find_nan()
        # Sums that have begun would bring what other replicas have made.
        self._gradients = Gradients(self.parts, ranks, groups.sums, overlap=runnable.overlap and not find_nan)
        self._stepper = None
        if self._optimizer_of is not None:
            with translate_errors(
                "the optimizer can't be made", "give a function that makes one of a list of parameters"
            ):
                self._stepper = ShardedOptimizer(
                    self._optimizer_of, self.weights, groups.sums, shard=program.shard_optimizer
                )
        runs = {
            stage.stage: StageRun(
                stage,
                self.parts[stage.stage],
                workload,
                (cuts[stage.stage - 1] if not stage.is_first else (), cuts[stage.stage]),
                micro_batch_size=program.micro_batch_size,
                recompute=program.recompute,
                autocast=self._options.cast,
            )
            for stage in mine.stages
        }
        self._state = RankState(
            program, workload, parts=self.parts, weights=self.weights, stepper=self._stepper, seed=self._options.seed
        )
        self.engine: Engine | TorchEngine
        if self._backend == "torch":
            from hpgo.runtime.train.torch_backend import TorchEngine

            with translate_errors(
                "torch's pipelining can't be set up", "leave out `backend`: the engine of hpgo runs the plan"
            ):
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
            messages = Messages(program, mine.rank, cuts, self._neighbour_groups(cuts), self.device)
            self.engine = Engine(mine, runs, messages, self._gradients, self._stamps)
        self._peak = Peak(self.device)

    @property
    def weights(self) -> list[Weight]:
        """The weights that this rank holds and trains, in the order of the layers."""
        return self._gradients.weights

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of this rank; None if there is none, or nothing for it to step."""
        return None if self._stepper is None else self._stepper.optimizer

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
        if isinstance(dataset, str):
            with torch.random.fork_rng(devices=[]):  # what it draws is no part of the run
                dataset = made_by(
                    dataset, "data", seed=self._options.seed, wanted="a data set: pairs of inputs and targets"
                )
        self._loader = Loader(
            dataset,
            global_batch_size=self.program.global_batch_size,
            samples=self.samples,
            seed=self._options.seed if seed is None else seed,
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
        with naming_rank("it is what a layer or the loss raised"):
            if not self._has_stepped:
                self._look_at_loss(batch, stacklevel=3)
                self._has_stepped = True
            loss = self._step(batch)
        self._failed = False
        HERE.step = None
        HERE.does(f"the time after step {self.steps}")
        self.steps += 1
        return loss

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
        check_int("every", every, least=1)
        _check_tell(tell)
        if self._saver is None or self._saver.folder != as_path(folder, RunError):
            self._finish_saving()
            self._saver = Saver(folder, self.steps, keep=keep, tell=tell)
        self._saver.news()
        if self.steps and (self.steps % every == 0 or self.preempted):
            place = self._place if self._loader is None else self._loader.state_dict()
            self._saver.save(self.steps, place, self._state)

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Goes on from the newest checkpoint in `folder`; returns whether there is one. All ranks must ask.

        The plan may be another one than that of the run that saved it. The loader, this run's or the one it makes next,
        goes on where the data stood; learning rates and the like are those of this run. Raises RunError for a
        checkpoint that doesn't fit the workload, the optimizer, the seed or the global batch, or is damaged.
        """
        found = self._load(folder)
        if found is None:
            return False
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
            super().close()


def _check_tell(tell: object) -> None:
    if tell is not None and not callable(tell):
        raise ArgumentError(f"tell is {safe_repr(tell)}", "give a function of a sentence, or None")


def _chosen(share: Share, samples: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Rows of these samples."""
    rows = [share.rows(at, at + 1) for at in samples] if share.tensors else []
    return tuple(torch.cat(tensors) for tensors in zip(*rows, strict=True))


def _ranges(numbers: list[int]) -> list[range]:
    """Sorted whole numbers as ranges."""
    found: list[range] = []
    for one in numbers:
        if found and found[-1].stop == one:
            found[-1] = range(found[-1].start, one + 1)
        else:
            found.append(range(one, one + 1))
    return found
