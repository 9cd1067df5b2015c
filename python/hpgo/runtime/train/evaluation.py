"""Evaluation of a model between training steps: its loss and metrics on data that it is not trained on.

Evaluation runs the forward passes of the plan in the order of its schedule, without gradients. A program without its
backward passes has no new waits, so it can't deadlock where the schedule doesn't.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hpgo.base.messages import safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.programs.schedule import KINDS
from hpgo.runtime.dynamic_shapes import ShapedEngines
from hpgo.runtime.engine import Batch, Engine, StageRun
from hpgo.runtime.loader import Samples, Share, length_of
from hpgo.runtime.messages import Messages
from hpgo.runtime.passes import running
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpgo.programs.program import Program
    from hpgo.runtime.clocks import Stamps
    from hpgo.runtime.messages import Exchange, PassedTensor
    from hpgo.runtime.session import NeighbourGroups
    from hpgo.runtime.stage_module import StageModule, Value
    from hpgo.runtime.workload import Workload

    Metric = Callable[[Any, Any], Any]
    """Function of outputs and targets of some samples. It returns a number for each, or two: a sum and a count."""

LOSS = "loss"
_FUSED = KINDS.index("F‖B")


def forward_program(program: Program) -> Program:
    """Return the program of the forward passes alone, in the order of the schedule.

    >>> import hpgo
    >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
    >>> two = hpgo.program(schedule, [(["a"], [0]), (["b"], [1])], pipeline_micro_batch_size=1, global_batch_size=2)
    >>> forward_program(two).schedule.action_lists
    [['0F0', '0F1'], ['1F0', '1F1']]
    """
    import numpy as np

    schedule = program.schedule
    lists = []
    for begin, end in zip(schedule.rank_starts, schedule.rank_starts[1:], strict=False):
        rows = schedule.actions[begin:end]
        rows = rows[np.isin(rows[:, 0], (KINDS.index("F"), _FUSED))].copy()
        # A fused pair runs as a forward and a backward pass here, too.
        rows[:, 0] = KINDS.index("F")
        rows[:, 3:] = rows[:, 1:3]
        lists.append(rows)
    ends = np.cumsum([0, *map(len, lists)]).tolist()
    forward = replace(
        schedule, name="forward_only", actions=np.concatenate(lists), rank_starts=tuple(ends), weight_versions=()
    )
    stages = tuple(replace(stage, recompute=False) for stage in program.stages)
    return replace(program, schedule=forward, stages=stages, costs=None)


class EvaluationRun(StageRun):
    """One stage of a rank in evaluation. The last stage adds up losses and metrics."""

    outputs: Sequence[Value] = ()
    """Values that the model returns for the current batch."""

    def begin(self, metrics: Mapping[str, Metric], sums: torch.Tensor) -> None:
        """Begin an evaluation. `sums` has a row for the loss and each metric: its sum, and the sum of its weights."""
        self._metrics, self._sums = metrics, sums

    def forward(
        self, micro_batch: int, batch: Batch, exchange: Exchange, received: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the stage forward without gradients. Return the tensors to send to later stages."""
        values = self.values(micro_batch, batch, exchange.takes.crossing, received)
        begin = micro_batch * self._size + self._start
        end = begin + self._rows
        with torch.no_grad(), running(step=batch.step, samples=range(begin, end)), self._autocast():
            outputs: Sequence[torch.Tensor] = self.part(*values, rows=self._rows)
            if self.stage.is_last:
                # The last batch of the data may be filled with repeated samples, which don't count.
                counted = end if batch.count is None else batch.count
                count = min(self._rows, counted - begin)
                if count > 0:
                    self._add(outputs, batch.targets.rows(begin, begin + count), count)
                return []
        return [
            outputs[crossing.given].detach().to(crossing.value.dtype)
            for crossing in map(self._behind.__getitem__, exchange.gives.crossing)
        ]

    def _add(self, outputs: Sequence[torch.Tensor], targets: tuple[torch.Tensor, ...], count: int) -> None:
        own = tuple(
            tensor[:count] if value.by_row else tensor for tensor, value in zip(outputs, self.outputs, strict=True)
        )
        self._sums[0, 0] += self._workload.loss_of(own, targets).detach()
        self._sums[0, 1] += self._workload.weight_of(targets).sum()
        for at, (name, metric) in enumerate(self._metrics.items(), start=1):
            sums, counts = _counted(name, self._workload.flat_loss.of(metric)(own, targets), count)
            self._sums[at, 0] += sums
            self._sums[at, 1] += counts


def _counted(name: str, found: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the weight of a metric's result for `count` samples. Raise ArgumentError if it is none."""
    numbers = found if isinstance(found, tuple) else (found, torch.ones(count))
    if len(numbers) != 2 or not all(isinstance(one, torch.Tensor) and one.shape == (count,) for one in numbers):
        shown = tuple(found.shape) if isinstance(found, torch.Tensor) else safe_repr(found)
        raise ArgumentError(
            f"the metric `{shorten(name)}` returned {shown} for {count} samples",
            "return a tensor with a number for each sample, or a tuple of two: sums and counts",
            code="user_code",
        )
    sums, counts = (one.to(torch.float64).sum() for one in numbers)
    return sums, counts


class _NoSums:
    """Gradient reductions of passes without gradients."""

    def begin(self) -> None:
        """Begin a step."""

    def watch(self, stage: int) -> None:
        """Do nothing: there is no backward pass."""

    def passed(self, stage: int) -> None:
        """Do nothing: there is no backward pass."""


class Evaluation:
    """Evaluation on one rank. All ranks create one and evaluate together."""

    def __init__(
        self,
        program: Program,
        workload: Workload,
        *,
        rank: int,
        parts: Mapping[int, StageModule],
        cuts: Sequence[Sequence[PassedTensor]],
        groups: NeighbourGroups,
        dtype: torch.dtype | None,
        autocast: Callable[[], Any],
        stamps: Stamps,
        device: torch.device,
    ) -> None:
        """Prepare the forward passes. `cuts` are the tensors behind each stage, which `groups` transport."""
        forward = forward_program(program)
        mine = forward.for_rank(rank)
        self._workload, self._device, self._parts = workload, device, parts
        self._runs = {
            stage.stage: EvaluationRun(
                stage,
                parts[stage.stage],
                workload,
                (cuts[stage.stage - 1] if not stage.is_first else (), cuts[stage.stage]),
                pipeline_micro_batch_size=program.pipeline_micro_batch_size,
                autocast=autocast,
            )
            for stage in mine.stages
        }

        def make(cuts: Sequence[Sequence[PassedTensor]]) -> Engine:
            return Engine(mine, self._runs, Messages(forward, rank, cuts, groups, device), _NoSums(), stamps)

        self._engines = ShapedEngines(workload, dtype, parts=parts, cuts=cuts, make=make, device=device)

    def run(
        self,
        batches: Iterator[tuple[Share, Share]],
        metrics: Mapping[str, Metric],
        *,
        inputs_on: torch.device | None,
        targets_on: torch.device | None,
    ) -> dict[str, float]:
        """Return the loss and the metrics over all `batches`, equal on all ranks.

        Inputs and targets are moved to the devices, unless they are None.
        """
        # In double precision, as the sums of losses in training, so that results don't depend on the plan.
        sums = torch.zeros(1 + len(metrics), 2, dtype=torch.float64, device=self._device)
        # Sums stay on the device until the end, since reading a number from a GPU waits for all its work.
        for one in self._runs.values():
            one.begin(metrics, sums)
        for part in self._parts.values():
            part.eval()
        try:
            for at, (inputs, targets) in enumerate(batches):
                fitted = self._engines.fit(inputs)
                for one in self._runs.values():
                    one.outputs = fitted.outputs
                fitted.engine.step(
                    Batch(
                        step=at,
                        inputs=inputs if inputs_on is None else inputs.to(inputs_on),
                        targets=targets if targets_on is None else targets.to(targets_on),
                        scale=1.0,
                        loss=torch.zeros((), device=self._device),
                        count=inputs.count,
                    )
                )
        finally:
            for part in self._parts.values():
                part.train()
        with HERE.meets("the sum of losses"):
            dist.all_reduce(sums)
        found = {}
        for name, (total, weight) in zip((LOSS, *metrics), sums.tolist(), strict=True):
            if name == LOSS and self._workload.adds_up:
                found[name] = total
            elif not weight:
                raise ArgumentError(
                    f"no sample of the validation data has a weight in `{shorten(name)}`",
                    "give at least one a weight above 0",
                )
            else:
                found[name] = total / weight
        return found


def check_metrics(metrics: object) -> dict[str, Metric]:
    """Return the metrics by name. Raise ArgumentError for anything but functions with names."""
    found = {} if metrics is None else metrics
    if not isinstance(found, dict) or not all(isinstance(name, str) and callable(one) for name, one in found.items()):
        raise ArgumentError(
            f"the metrics are {safe_repr(metrics)}",
            'give functions by name: `{"accuracy": accuracy}`',
            code="user_code",
        )
    if LOSS in found:
        raise ArgumentError(f"a metric is called `{LOSS}`, as the loss is", "give it another name", code="duplicate")
    return dict(found)


def whole_data(
    dataset: Any,
    *,
    global_batch_size: int,
    samples: Sequence[range],
    workers: int,
    collate: Callable[[Sequence[Any]], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]],
) -> Iterator[tuple[Share, Share]]:
    """Yield each sample of a data set once, in its order, as global batches.

    The last batch is filled up by its last sample. `samples` are the numbers in a batch that this rank reads, and
    `collate` makes flat inputs and targets of several samples.
    """
    length = length_of(dataset)
    if not length:
        raise ArgumentError("the validation data has no sample", "give it at least one")
    mine = [at for part in samples for at in part]
    begins = range(0, length, global_batch_size)
    counts = [min(global_batch_size, length - begin) for begin in begins]
    indices = [[min(begin + at, length - 1) for at in mine] for begin in begins]
    batches: Any = (
        DataLoader(Samples(dataset), batch_sampler=indices, num_workers=workers, collate_fn=collate)
        if mine
        else [((), ())] * len(counts)
    )
    for (inputs, targets), count in zip(batches, counts, strict=True):
        yield Share(inputs, samples, count=count), Share(targets, samples, count=count)
