"""Alternative back-end: torch's pipelining transfers tensors in hpgo's schedule; everything else is the engine's.

`torch.distributed.pipelining` runs one pipeline of stages, each on one rank. Replicas are parallel pipelines. Their
gradients are reduced by hpgo.
"""

from __future__ import annotations

import logging
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError
from hpgo.runtime.engine import Actions
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpgo.programs.program import Program
    from hpgo.programs.ranks import RankProgram
    from hpgo.runtime.clocks import Stamps
    from hpgo.runtime.engine import Batch, StageRun
    from hpgo.runtime.messages import PassedTensor
    from hpgo.runtime.stage_module import Value
    from hpgo.runtime.train.gradients import Gradients

# torch logs its whole schedule with each error. `Pipeline` reports the error itself.
logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

_HINT = "leave out `backend` to use hpgo's engine"


def pipelines(program: Program) -> list[tuple[int, ...]]:
    """Return the ranks of each replica's pipeline in ascending order, as process groups have them.

    Raises ArgumentError with the reason for a program that torch's pipelining can't run.
    """
    name, stages = program.schedule.name, program.stages
    if len(program.schedule.micro_batches) > 1:
        raise ArgumentError(
            f"`{name}` has two copies of the model, but torch's pipelining runs only one",
            f"{_HINT}, or choose another schedule",
            code="unsupported",
        )
    for number, stage in enumerate(stages):
        if len(stage.devices) != len(stages[0].devices):
            raise ArgumentError(
                f"stage {number} has {pluralize(len(stage.devices), 'replica')} but stage 0 has"
                f" {len(stages[0].devices)}, and torch's pipelining sends whole tensors from one rank to one",
                f"{_HINT}, or plan with the same number of devices for each stage",
                code="unsupported",
            )
        if stage.rows != stages[0].rows:
            raise ArgumentError(
                f"replicas of stage {number} split a micro-batch differently from replicas of stage 0, but"
                " torch's pipelining sends whole tensors from one rank to one",
                f"{_HINT}, or plan with `hpgo plan --even-split`",
                code="unsupported",
            )
    # A rank of the schedule may hold several stages. torch expects them on one device in each replica.
    holders: dict[tuple[int, int], int] = {}
    for number, stage in enumerate(stages):
        for replica, device in enumerate(stage.devices):
            held = holders.setdefault((program.schedule.rank_of_stage[number], replica), device)
            if held != device:
                raise ArgumentError(
                    f"replica {replica} of stage {number} is on device {device}, but another stage of its rank in"
                    f" `{name}` is on device {held}",
                    f"{_HINT}, or list the devices of these stages in the same order",
                )
    replicas = range(len(stages[0].devices))
    return [tuple(sorted({stage.devices[replica] for stage in stages})) for replica in replicas]


class TorchEngine(Actions):
    """Engine that runs one rank's actions with torch's `_PipelineScheduleRuntime`."""

    def __init__(
        self,
        program: Program,
        mine: RankProgram,
        runs: Mapping[int, StageRun],
        *,
        cuts: Sequence[Sequence[PassedTensor]],
        groups: Mapping[tuple[int, ...], Any],
        gradients: Gradients,
        stamps: Stamps,
        device: torch.device,
    ) -> None:
        """Set up the runtime. `groups` are the process groups of `pipelines`."""
        super().__init__(mine, gradients, stamps)
        self._places = {(one.kind, one.stage, one.micro_batch): at for at, one in enumerate(mine.actions)}
        peers = [tuple(sorted({one.peer for one in action.receives} - {mine.rank})) for action in mine.actions]
        self._awaits = [*(of or None for of in peers), None]
        """Ranks from which each action receives; None after the last action."""
        self._taken: list[Any] = []
        self._modules = [
            _Module(run, () if run.stage.is_first else cuts[number - 1], cuts[number]) for number, run in runs.items()
        ]
        self._schedule = None
        if runs:
            ranks = next(ranks for ranks in groups if mine.rank in ranks)
            stages = [
                _TorchStage(one, len(program.stages), device=device, group=groups[ranks], act=self._act)
                for one in self._modules
            ]
            self._schedule = _Schedule(stages, n_microbatches=program.micro_batches, loss_fn=_is_given)
            # A CSV file is the form in which the runtime reads schedules.
            with tempfile.TemporaryDirectory() as folder:
                schedule = Path(folder) / "schedule.csv"
                schedule.write_text("\n".join(_row(program.for_rank(rank)) for rank in ranks) + "\n", encoding="utf-8")
                self._schedule._load_csv(str(schedule))

    def close(self) -> None:
        """Drop torch's schedule, and so its references to process groups. No step can follow."""
        self._schedule = None

    def step(self, batch: Batch) -> None:
        """Run all actions. Afterwards, this rank's gradients are complete, but reductions may still run."""
        self.at = -1
        HERE.acts(self)
        self._gradients.begin()
        self._taken = [None] * (2 * len(self.actions))
        for one in self._modules:
            one.batch = batch
        if self._schedule is not None:
            HERE.waits = self._awaits[0]
            try:
                self._schedule.step(return_outputs=False)
            except _Raised as raised:
                raise raised.failure from None
        self.clock_ns = self._stamps.in_ns(self._taken)

    def _act(self, kind: str, stage: int, micro_batch: int, compute: Callable[[], Any]) -> Any:
        """Run one action at the time that torch has chosen, with time stamps and gradient hooks."""
        HERE.waits = None
        at = self.at = self._places[kind, stage, micro_batch]
        is_last = self._last[stage] == at
        try:
            if is_last and kind == "B":
                self._gradients.watch(stage)
            self._taken[2 * at] = self._stamps.take()
            output = compute()
            self._taken[2 * at + 1] = self._stamps.take()
            if is_last:
                self._gradients.passed(stage)
        except Exception as failure:
            # torch wraps exceptions of layers in a RuntimeError. Report the original one.
            cause = failure.__cause__ if type(failure) is RuntimeError else None
            raise _Raised(cause if isinstance(cause, Exception) else failure) from failure
        # torch does not report for whom it waits, so assume the senders of the next action.
        HERE.waits = self._awaits[at + 1]
        return output


def _row(mine: RankProgram) -> str:
    """Return a rank's schedule in torch's notation, without overlapping pairs, which torch runs one by one."""
    return ",".join(f"{one.stage}{one.kind}{one.micro_batch}" for one in mine.actions)


_LOSS_TYPE = torch.float64
"""Type of losses: PyTorch 2.11 refuses outputs of another type than was announced before the model computes them."""


class _Raised(BaseException):
    """Carrier of an action's exception through torch.

    torch catches any Exception, logs it, and then waits for sends that no rank receives. A BaseException passes.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(failure)
        self.failure = failure


class _Module(nn.Module):
    """A stage as a module for torch, which maps the tensors of the cut before it to the next cut, or to the loss."""

    def __init__(self, run: StageRun, before: Sequence[PassedTensor], behind: Sequence[PassedTensor]) -> None:
        super().__init__()
        self.run, self.before, self.behind = run, before, behind
        self.part = run.part
        self.batch: Batch
        self.micro_batch = 0
        self.losses: dict[int, torch.Tensor] = {}

    def forward(self, *received: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the forward pass of the micro-batch that was set before."""
        run, batch, micro_batch = self.run, self.batch, self.micro_batch
        # With recomputation, `checkpoint` calls the function twice. Layers must know about the second call: batch norms
        # must not update their running statistics again.
        times = count()

        def once(*values: torch.Tensor) -> Sequence[torch.Tensor]:
            return run.run(values, micro_batch, batch, again=next(times) > 0)

        values = run.values(micro_batch, batch, range(len(received)), received)
        # The non-reentrant variant supports inputs without gradients.
        outputs = checkpoint(once, *values, use_reentrant=False) if run.stage.recompute else once(*values)
        if run.stage.is_last:
            batch.loss += outputs[0].detach()
            self.losses[micro_batch] = loss = outputs[0].to(_LOSS_TYPE)
            return loss
        return tuple(_to_send(outputs[crossing.given], crossing.value) for crossing in self.behind)


def _to_send(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Return a contiguous tensor in the number format of the cut, which autocast may have changed."""
    output = (tensor if value.has_gradient else tensor.detach()).to(value.dtype)
    return output.contiguous()


def _example(value: Value, rows: int) -> torch.Tensor:
    """Return a tensor without memory that has shape, number format and gradient flag of a transferred value."""
    example = torch.empty(value.shape_of(rows), dtype=value.dtype, device="meta")
    return example.requires_grad_(value.has_gradient)


class _TorchStage(PipelineStage):
    """torch's stage, with hooks around each action and hpgo's split of backward passes."""

    def __init__(
        self, module: _Module, stages: int, *, device: torch.device, group: Any, act: Callable[..., Any]
    ) -> None:
        stage = module.run.stage
        crossing = [[one.value for one in cut] for cut in (module.before, module.behind)]
        takes, gives = (tuple(_example(value, len(stage.rows)) for value in values) for values in crossing)
        if stage.is_last:
            gives = (torch.empty((), dtype=_LOSS_TYPE, device="meta"),)
        super().__init__(module, stage.stage, stages, device, input_args=takes, output_args=gives, group=group)
        self._hpgo_act = partial(act, stage=stage.stage)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """Run a forward pass."""
        self.submod.micro_batch = fwd_chunk_id
        compute = partial(super().forward_one_chunk, fwd_chunk_id, *args, **how)
        return self._hpgo_act("F", micro_batch=fwd_chunk_id, compute=compute)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **how: Any) -> Any:
        """Run a backward pass, or its input-gradient pass, which queues the weight gradients of a whole pass."""
        whole = partial(super().backward_one_chunk, bwd_chunk_id, *args, full_backward=True, **how)

        def compute() -> None:
            whole()
            self.submod.run.look_at_gradients()

        if full_backward:
            return self._hpgo_act("B", micro_batch=bwd_chunk_id, compute=compute)
        # Run a whole pass in which hpgo's modules queue the weight gradients, so both back-ends split passes alike.
        with self.submod.part.queueing(bwd_chunk_id):
            return self._hpgo_act("I", micro_batch=bwd_chunk_id, compute=compute)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        """Run the weight-gradient pass, which computes the queued gradients."""
        compute = partial(self.submod.run.finish_weights, bwd_chunk_id)
        self._hpgo_act("W", micro_batch=bwd_chunk_id, compute=compute)


class _Schedule(_PipelineScheduleRuntime):
    """torch's runtime, with losses that the last stage's module has already computed."""

    def __init__(self, *args: Any, **how: Any) -> None:
        # The loss is already scaled by the weight of each sample, so torch must not scale gradients.
        super().__init__(*args, scale_grads=False, **how)

    def _maybe_compute_loss(self, *_: Any, **__: Any) -> None:
        """Compute nothing, since the module has computed the loss."""

    def _maybe_get_loss(self, stage: _TorchStage, mb_index: int) -> torch.Tensor | None:
        return stage.submod.losses.pop(mb_index) if stage.is_last else None


def _is_given(*_: Any) -> None:
    """Mark the schedule as having a loss, so that torch runs backward passes."""
