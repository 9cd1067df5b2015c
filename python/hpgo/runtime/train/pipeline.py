"""`Pipeline`: one rank's part of a plan, trained step by step."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from hpgo.base.checks import check_flag, check_int, choice, number
from hpgo.base.files import as_path
from hpgo.base.messages import safe_repr
from hpgo.errors import ArgumentError, RunError
from hpgo.runtime.checkpoint import RankState
from hpgo.runtime.dynamic_shapes import ShapedEngines
from hpgo.runtime.engine import Batch, Engine, StageRun
from hpgo.runtime.loader import Loader, Share, as_share, length_of, repeated
from hpgo.runtime.losses import remarks
from hpgo.runtime.memory import Peak
from hpgo.runtime.messages import Messages, boundary_tensors
from hpgo.runtime.optimizer_files import OptimizerFiles
from hpgo.runtime.progress import HERE
from hpgo.runtime.rank_pipeline import RankOptions, RankPipeline, naming_rank
from hpgo.runtime.rendezvous import translate_errors
from hpgo.runtime.runnable import Runnable, check_program
from hpgo.runtime.session import Groups
from hpgo.runtime.train.evaluation import Evaluation, check_metrics, whole_data
from hpgo.runtime.train.gradients import Gradients, Ranks
from hpgo.runtime.train.learning_rates import LearningRates
from hpgo.runtime.train.optimizer import ShardedOptimizer
from hpgo.runtime.train.saver import Saver
from hpgo.runtime.user_functions import made_by
from hpgo.runtime.weight_files import load_weights
from hpgo.runtime.workload import Workload

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.messages import PassedTensor
    from hpgo.runtime.session import NeighbourGroups
    from hpgo.runtime.stage_module import StageModule, Value
    from hpgo.runtime.train.evaluation import Metric
    from hpgo.runtime.train.gradients import Weight
    from hpgo.runtime.train.optimizer import MakeOptimizer
    from hpgo.runtime.train.torch_backend import TorchEngine

Backend = Literal["hpgo", "torch"]
"""Implementation that transfers tensors."""
_MAX_COMPARED = 8
"""Maximum number of samples of the first batch that are used to check the loss. Not tuned."""
_TINY = 1e-6  # added to the norm as in torch, to avoid a division by 0


class Pipeline(RankPipeline):
    """One rank's part of a plan: its stages, messages and gradient reductions. All ranks create one and step together.

    >>> import torch
    >>> import hpgo.runtime
    >>> layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> toy = hpgo.runtime.Workload(layers, torch.zeros(2, 3), torch.zeros(2, 1), torch.nn.functional.mse_loss)
    >>> schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=4)
    >>> program = hpgo.program(schedule, [(toy.layers, [0])], pipeline_micro_batch_size=2, global_batch_size=8)
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
        optimizer: MakeOptimizer | None = None,
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
        weights: str | os.PathLike[str] | None = None,
        optimizer_state: str | os.PathLike[str] | None = None,
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        """Join the other ranks and build the layers of this rank.

        Args:
            plan: a plan or a program, or a file with either.
            workload: the model and its data, or a name for `Workload.read`.
            optimizer: function that creates an optimizer for a list of parameters. With two arguments, it also gets
                the list of their names in the model. None: weights are not updated.
            clip_norm: maximum norm of the gradients of all layers together. Larger gradients are scaled down to it.
            seed: seed of initial weights, dropout and the order of the data set.
            dtype: number format of the weights. None: the workload's.
            autocast: number format of `torch.autocast`, such as `torch.bfloat16`. None: no autocast.
            device: device of the layers. None: the GPU with the rank's local number if its host has one for each rank,
                else the CPU.
            timeout_s: maximum time in seconds without progress while ranks wait. It must exceed the longest operation
                of a single rank.
            backend: implementation that transfers tensors: `hpgo`, or `torch` for `torch.distributed.pipelining`.
            find_nan: check all results of layers, and stop at the first layer whose result has NaN or infinity. Slow.
            silence_s: maximum time in seconds without a heartbeat of a rank.
            grace_s: maximum time in seconds that the run continues after SIGTERM.
            shared_memory: pass tensors through shared memory between CPU ranks of one host. False: gloo passes them, as
                it does between hosts.
            weights: file or folder with the initial weights under the model's names, see `WeightFiles`. None: the
                workload's.
            optimizer_state: folder with the initial state of the optimizer under the model's names, see
                `read_optimizer_state`. `optimizer` determines learning rates and other options. None: no state.
            lr_schedule: function of a step, counted from 0, that returns the factor of the optimizer's learning rates
                in that step. It is called on all ranks. None: the rates stay unless you change them.
            tell: function that gets a sentence for each remark about the loss, on the first rank that computes the
                loss. None: remarks are RuntimeWarnings.

        Raises ArgumentError if plan and workload don't match or can't be run. Raises RunError if the ranks don't find
        each other, or if their plans, options or versions differ.
        """
        runnable = Runnable.from_plan(plan)
        check_program(runnable.program)
        self._backend = choice("back-end", backend, get_args(Backend))
        self._pipelines: Sequence[tuple[int, ...]] = []
        if self._backend == "torch":
            if isinstance(workload, Workload) and workload.dynamic_shapes:
                raise ArgumentError(
                    "torch's pipelining sends tensors of one shape, but the workload has `dynamic_shapes`",
                    "leave out `backend` to use hpgo's engine",
                    code="unsupported",
                )
            from hpgo.runtime.train import torch_backend  # takes seconds to import

            self._pipelines = torch_backend.pipelines(runnable.program)
        if clip_norm is not None and not number("clip_norm", clip_norm) > 0:
            raise ArgumentError(f"clip_norm is {clip_norm}", "give a norm above 0, or None")
        if optimizer is not None and not callable(optimizer):
            raise ArgumentError(
                f"optimizer is {safe_repr(optimizer)}",
                "give a function that makes one of a list of parameters, or None",
            )
        if lr_schedule is not None and not callable(lr_schedule):
            raise ArgumentError(
                f"lr_schedule is {safe_repr(lr_schedule)}", "give a function of the step, or None", code="user_code"
            )
        _check_tell(tell)
        self._tell, self._reported, self._is_unknown = tell, set[str](), False
        self._optimizer_of, self._clip_norm, self._seed = optimizer, clip_norm, seed
        self._begin_with = None if weights is None else as_path(weights, ArgumentError)
        self._optimizer_state_from = None if optimizer_state is None else as_path(optimizer_state, ArgumentError)
        if optimizer is None and optimizer_state is not None:
            raise ArgumentError("there is no optimizer for `optimizer_state`", "give `optimizer`, too")
        self._factor = lr_schedule
        self._groups: NeighbourGroups | None = None
        self.parts: dict[int, StageModule] = {}
        self._torch_engine: TorchEngine | None = None
        self._evaluation: Evaluation | None = None
        self._has_stepped = False
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._data_position: dict[str, int] | None = None  # position in the data, for the next loader
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
            "initial weights": str(self._begin_with),
            "initial optimizer state": str(self._optimizer_state_from),
            "optimizer": "some" if self._optimizer_of is not None else "none",
        }

    def _build(self, runnable: Runnable) -> None:
        program, mine, workload = self.program, self.mine, self.workload
        find_nan = self._options.find_nan
        parts = self._stage_modules({stage.stage for stage in mine.stages})
        self._has_batch_norm = any(part.joins for part in parts)
        cuts = boundary_tensors(parts, program.schedule.stages_per_pipeline)
        # Creating process groups is collective: every rank creates all of them, also groups that it is not in.
        ranks = Ranks(program, workload.tied_weights)
        joining = [number for number, part in enumerate(parts) if part.joins]
        groups = Groups(program, ranks.groups, joining, pipelines=self._pipelines)
        self._session.hold(groups)
        self.parts = {stage.stage: parts[stage.stage].to(self.device) for stage in mine.stages}
        self._reads_inputs = any(value.is_input for part in self.parts.values() for value in part.takes)
        self._reads_targets = any(stage.is_last for stage in mine.stages)
        self._outputs: Sequence[Value] = workload.outputs(self._options.dtype)
        self._check_loss(stacklevel=5)
        for stage, part in self.parts.items():
            if stage in groups.replicas:
                part.join(groups.replicas[stage])
            if find_nan:
                part.find_nan()
        # With `find_nan`, gradients must be reduced after all checks, or NaN of another replica would arrive before it
        # is found.
        self._gradients = Gradients(self.parts, ranks, groups.sums, overlap=runnable.overlap and not find_nan)
        self._stepper = None
        if self._optimizer_of is not None:
            with translate_errors(
                "the optimizer can't be made", "give a function that makes one of a list of parameters"
            ):
                self._stepper = ShardedOptimizer(
                    self._optimizer_of,
                    self.weights,
                    groups.sums,
                    shard=program.shard_optimizer,
                    names=lambda: workload.weight_names(self._options.dtype).of,
                )
        self._rates = None if self._factor is None else LearningRates(self.optimizer, self._factor)
        self._cuts = cuts
        runs = {
            stage.stage: StageRun(
                stage,
                self.parts[stage.stage],
                workload,
                (cuts[stage.stage - 1] if not stage.is_first else (), cuts[stage.stage]),
                pipeline_micro_batch_size=program.pipeline_micro_batch_size,
                autocast=self._options.cast,
            )
            for stage in mine.stages
        }
        # Checkpoints save and load through this state, so it refers to live tensors instead of copies.
        self._state = RankState(
            program,
            workload,
            parts=self.parts,
            weights=self.weights,
            stepper=self._stepper,
            seed=self._options.seed,
            dtype=self._options.dtype,
        )
        if self._begin_with is not None:
            self._state.others |= load_weights(self._begin_with, self.parts, self._state.names)
        if self._optimizer_state_from is not None:
            with OptimizerFiles(self._optimizer_state_from) as files:
                self._state.load_optimizer(files)
        self.engine: Engine | TorchEngine
        self._engines: ShapedEngines | None = None
        if self._backend == "torch":
            from hpgo.runtime.train.torch_backend import TorchEngine

            with translate_errors(
                "torch's pipelining can't be set up", "leave out `backend`: the engine of hpgo runs the plan"
            ):
                self.engine = self._torch_engine = TorchEngine(
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
            groups_of_peers = self._groups = self._neighbour_groups(cuts)

            def make(cuts: Sequence[Sequence[PassedTensor]]) -> Engine:
                messages = Messages(program, mine.rank, cuts, groups_of_peers, self.device)
                return Engine(mine, runs, messages, self._gradients, self._stamps)

            self._engines = ShapedEngines(
                workload, self._options.dtype, parts=self.parts, cuts=cuts, make=make, device=self.device
            )
            self.engine = self._engines.first.engine
        self._peak = Peak(self.device)

    @property
    def weights(self) -> list[Weight]:
        """Weights that this rank holds and trains, in layer order."""
        return self._gradients.weights

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer of this rank; None if there is none, or if no weight is left for it to step."""
        return None if self._stepper is None else self._stepper.optimizer

    @property
    def samples(self) -> list[range]:
        """Indices in a global batch of the samples whose inputs or targets this rank reads, as ranges."""
        size = self.program.pipeline_micro_batch_size
        found: set[int] = set()
        for stage in self.mine.stages:
            # Only stages with inputs or with the loss need data. Other ranks read nothing.
            if not stage.is_last and not any(value.is_input for value in self.parts[stage.stage].takes):
                continue
            begin, end = self.program.schedule.micro_batches[stage.chain]
            for micro_batch in range(begin, end):
                found.update(row + micro_batch * size for row in stage.rows)
        return _ranges(sorted(found))

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        workers: int = 0,
        drop_last: bool = True,
    ) -> Loader:
        """Return a loader that yields one global batch per step, of which it reads this rank's samples.

        `dataset` has `len(dataset)` and pairs `dataset[i]` of inputs and targets, or inputs alone if the workload has
        no targets. `module:function` is a function that returns one. `workers` processes read ahead. With
        `drop_last=False`, an epoch ends with the samples that don't fill a batch, and that step has their mean loss.

        Raises ArgumentError for a data set smaller than a global batch, unless `drop_last` is False, and for
        `drop_last=False` if the result for a sample depends on the others: batch normalization, or a model that returns
        its own loss.
        """
        check_flag("drop_last", drop_last)
        if not drop_last:
            self._check_last_batch()
        if isinstance(dataset, str):
            with torch.random.fork_rng(devices=[]):  # its random numbers must not affect the run
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
            drop_last=drop_last,
            collate=self.workload.collated,
        )
        if self._data_position is not None:
            self._loader.load_state_dict(self._data_position)
            self._data_position = None
        return self._loader

    def _check_last_batch(self) -> None:
        """Raise ArgumentError if a batch can't be filled up by samples that do not count."""
        hint = "leave out `drop_last=False`, so that each epoch ends with a whole batch"
        if self._has_batch_norm:
            raise ArgumentError(
                "the last batch of a data set is filled up by its last sample, which batch normalization would count",
                hint,
                code="unsupported",
            )
        for value in self.workload.outputs(self._options.dtype):
            if not value.by_row:
                raise ArgumentError(
                    "the last batch of a data set is filled up by its last sample, which would count in "
                    f"`{value.name}`: the model returns it for all samples together",
                    f"{hint}, or let the model return its scores and give the loss as a function",
                    code="unsupported",
                )

    def example(self) -> tuple[Share, Share]:
        """Return a global batch of inputs and targets that repeats the workload's example."""
        samples = self.samples
        return repeated(self.workload.example_inputs, samples), repeated(self.workload.example_targets, samples)

    def step(self, inputs: Any, targets: Any = None) -> float:
        """Train on one global batch, and return its mean loss (or the sum if the loss is a sum), equal on all ranks.

        `inputs` and `targets` are a batch of `loader`, or the whole global batch in the containers of the workload's
        example. `targets` are None if the workload has none.
        Raises RunError if a layer raises, or another rank is lost. Raises Preempted, which ends the process with exit
        code 143, if the step before was the last one because of SIGTERM.
        """
        self._check_whole()
        size, work = self.program.global_batch_size, self.workload
        if targets is None and not work.has_targets:
            targets = inputs
        batch = Batch(
            step=self.steps,
            inputs=as_share("inputs", inputs, work.inputs, size, self.device if self._reads_inputs else None),
            targets=as_share("targets", targets, work.targets, size, self.device if self._reads_targets else None),
            scale=1.0,
            loss=torch.zeros((), dtype=torch.float64, device=self.device),
        )
        batch.count = batch.inputs.count
        # An exception leaves this set. The pipeline is then unusable, since other ranks may wait in the middle of a
        # step.
        self._failed = True
        HERE.step = self.steps
        with naming_rank("it is what a layer or the loss raised"):
            if self._rates is not None:
                self._rates.set(self.steps)
            if self._engines is not None:
                fitted = self._engines.fit(batch.inputs)
                self.engine, self._outputs = fitted.engine, fitted.outputs
            # Check the loss only now: the first batch can have properties that the workload's example lacks.
            if not self._has_stepped:
                self._check_loss(batch, stacklevel=3)
                self._has_stepped = True
            loss = self._step(batch)
        self._failed = False
        HERE.step = None
        HERE.does(f"the time after step {self.steps}")
        self.steps += 1
        return loss

    def evaluate(self, dataset: Any, *, metrics: dict[str, Metric] | None = None, workers: int = 0) -> dict[str, float]:
        """Return the loss and the metrics of a data set, with all layers in evaluation mode. All ranks must call this.

        It runs each sample of `dataset` once, in its order, and changes neither weights nor statistics of layers. The
        results are equal on all ranks.

        Args:
            dataset: a data set as for `loader`, of any length from 1, or the name `module:function` of a function that
                returns one.
            metrics: functions by name. Each gets the model's outputs and the targets of some samples, and returns a
                tensor with a number for each sample, whose mean is the result. It may also return a tuple of two such
                tensors, sums and counts, whose totals are divided.
            workers: number of processes that read ahead.

        Raises ArgumentError for a data set or a metric that is none. Raises RunError if a layer or a metric raises, or
        another rank is lost.
        """
        self._check_whole()
        functions = check_metrics(metrics)
        if isinstance(dataset, str):
            with torch.random.fork_rng(devices=[]):  # its random numbers must not affect the run
                dataset = made_by(
                    dataset,
                    "validation data",
                    seed=self._options.seed,
                    wanted="a data set: pairs of inputs and targets",
                )
        if self._evaluation is None:
            # All ranks evaluate together, so that this is the time to create the groups that torch's pipelining lacks.
            self._groups = self._groups or self._neighbour_groups(self._cuts)
            self._evaluation = Evaluation(
                self.program,
                self.workload,
                rank=self.rank,
                parts=self.parts,
                cuts=self._cuts,
                groups=self._groups,
                dtype=self._options.dtype,
                autocast=self._options.cast,
                stamps=self._stamps,
                device=self.device,
            )
        rest = length_of(dataset) % self.program.global_batch_size
        together = [one.name for one in self.workload.outputs(self._options.dtype) if not one.by_row]
        if rest and together:
            raise ArgumentError(
                f"the model returns `{together[0]}` for all samples together, so the last {rest} samples of the"
                f" validation data don't make a batch of {self.program.global_batch_size}",
                f"give a multiple of {self.program.global_batch_size} samples, or let the model return its scores and"
                " give the loss as a function",
                code="unsupported",
            )
        batches = whole_data(
            dataset,
            global_batch_size=self.program.global_batch_size,
            samples=self.samples,
            workers=check_int("workers", workers, minimum=0),
            collate=self.workload.collated,
        )
        # Like in a step, other ranks may wait in the middle of an evaluation that has failed.
        self._failed = True
        HERE.step = self.steps
        with naming_rank("it is what a layer, the loss or a metric raised"):
            found = self._evaluation.run(
                batches,
                functions,
                inputs_on=self.device if self._reads_inputs else None,
                targets_on=self.device if self._reads_targets else None,
            )
        self._failed = False
        HERE.step = None
        HERE.does(f"the time after an evaluation before step {self.steps}")
        return found

    def checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int = 3,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Save a checkpoint in `folder` after every `every` steps, and after the last step before SIGTERM ends the run.

        All ranks must call this after each step. Writing overlaps with the next steps. The last `keep` checkpoints are
        kept. If a save fails, for instance because the disk is full, older checkpoints stay and the run continues. Rank
        0 then passes a sentence to `tell`, or issues a RuntimeWarning, at a later call or when the run is left. Before
        the first step, this only checks the folder. Raises RunError for a folder that can't be created, or that holds
        later steps of another run.
        """
        check_int("every", every, minimum=1)
        _check_tell(tell)
        if self._saver is None or self._saver.folder != as_path(folder, RunError):
            self._finish_saving()
            self._saver = Saver(folder, self.steps, keep=keep, tell=tell)
        self._saver.news()
        # `preempted` is equal on all ranks, so all of them take part in the save.
        if self.steps and (self.steps % every == 0 or self.preempted):
            place = self._data_position if self._loader is None else self._loader.state_dict()
            self._saver.save(self.steps, place, self._state)

    def resume(self, folder: str | os.PathLike[str]) -> bool:
        """Load the newest checkpoint in `folder`, and return whether there is one. All ranks must call this.

        The plan may differ from the plan of the saved run. The current loader, or else the next one, continues at the
        saved position in the data. This run keeps its own learning rates and other optimizer options. Raises RunError
        for a checkpoint that doesn't fit the workload, the optimizer, the seed or the global batch, or is damaged.
        """
        found = self._load(folder)
        if found is None:
            return False
        self.steps = found.steps
        self._data_position = found.facts["loader"]
        if self._loader is not None and self._data_position is not None:
            self._loader.load_state_dict(self._data_position)
            self._data_position = None
        return True

    def _finish_saving(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.finish()
            saver.close()

    def _step(self, batch: Batch) -> float:
        stamp = self._stamps.take
        with self._peak.step(lambda: self._persistent_tensors(batch), self._optimizer_state):
            begin = stamp()
            batch.scale = self._scale(batch.targets)
            self.engine.step(batch)
            # Loss, norm and preemption share one all-reduce, because the latency of small collectives adds up.
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
            # The flag is summed over all ranks. So all ranks learn of a SIGTERM at the end of the same step.
            self.preempted = notices > 0
            if self._clip_norm is not None:
                # Clip as `torch.nn.utils.clip_grad_norm_` does, but with the norm over all ranks.
                factor = self._clip_norm / (math.sqrt(square) + _TINY)
                if factor < 1:
                    self._gradients.scale(factor)
            self._peak.passes_end()
            if self._stepper is not None:
                self._stepper.step()
            ends_ns = self._stamps.in_ns([begin, summed, stamp()])
        self._recorder.add(self.steps, [*self.engine.clock_ns, *ends_ns], self._peak.bytes)
        return float(loss)

    def _check_loss(self, batch: Batch | None = None, *, stacklevel: int) -> None:
        """Report remarks about the loss before the first step, based on the example or on samples of the first batch.

        Raises ArgumentError for a loss that would train differently than on one device.
        """
        size = self.program.pipeline_micro_batch_size
        for stage in self.mine.stages:
            if not stage.is_last:
                continue
            first, last = self.program.schedule.micro_batches[stage.chain]
            samples = [row + at * size for at in range(first, last) for row in stage.rows]
            if batch is not None and batch.count is not None:
                samples = [at for at in samples if at < batch.count]
            samples = samples[:: max(1, math.ceil(len(samples) / _MAX_COMPARED))]
            found = remarks(
                self.workload,
                self._outputs,
                self.device,
                rows=len(stage.rows),
                batch=self.program.global_batch_size,
                inputs=_select_rows(batch.inputs, samples) if batch else (),
                targets=_select_rows(batch.targets, samples) if batch else (),
            )
            # Only the first rank with the loss reports, so that each remark appears once.
            if stage.chain == 0 and stage.rows.start == 0:
                if batch is None:
                    # Keep this remark for the first batch, which may resolve it.
                    self._is_unknown = found.pop("unknown", None) is not None
                elif not self._is_unknown:
                    found.pop("unknown", None)
                for kind in [one for one in found if one not in self._reported]:
                    if self._tell is not None:
                        self._tell(found[kind])
                    else:
                        warnings.warn(found[kind], RuntimeWarning, stacklevel=stacklevel)
                self._reported |= found.keys()

    def _persistent_tensors(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Yield the tensors that exist before and after a step."""
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
        """Return the factor of a sample's weighted loss in the mean or in the sum."""
        if self.workload.adds_up:
            return 1.0
        count = self.program.global_batch_size if targets.count is None else targets.count
        if self.workload.weight is None:
            return 1 / count
        # The mean is over the global batch, so weights of all samples must be summed before the first backward pass.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.program.pipeline_micro_batch_size
        for stage in self.mine.stages:
            if stage.is_last:
                for micro_batch in range(*self.program.schedule.micro_batches[stage.chain]):
                    begin = micro_batch * size + stage.rows.start
                    end = min(begin + len(stage.rows), count)
                    if begin < end:
                        total += self.workload.weight_of(targets.rows(begin, end)).sum()
        with HERE.meets("the sum of the samples' weights"):
            dist.all_reduce(total)
        if not total:
            raise ArgumentError("no sample of the global batch has a weight", "give at least one a weight above 0")
        return 1 / float(total)

    def close(self) -> None:
        """Wait for a pending save and leave the other ranks. Trained weights stay in `weights`."""
        try:
            if not self._failed:
                self._finish_saving()
        finally:
            # Layers must not keep process groups, whose threads end with their last reference.
            for part in self.parts.values():
                part.join(None)
            if self._torch_engine is not None:
                self._torch_engine.close()
            super().close()


def _check_tell(tell: object) -> None:
    if tell is not None and not callable(tell):
        raise ArgumentError(f"tell is {safe_repr(tell)}", "give a function of a sentence, or None")


def _select_rows(share: Share, samples: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the rows of these samples, for each tensor."""
    rows = [share.rows(at, at + 1) for at in samples] if share.tensors else []
    return tuple(torch.cat(tensors) for tensors in zip(*rows, strict=True))


def _ranges(numbers: list[int]) -> list[range]:
    """Return sorted whole numbers as ranges."""
    found: list[range] = []
    for one in numbers:
        if found and found[-1].stop == one:
            found[-1] = range(found[-1].start, one + 1)
        else:
            found.append(range(one, one + 1))
    return found
