"""Engine of one rank: it executes the rank's actions one after the other, in the order of its program.

A forward pass keeps what its backward pass needs. A backward pass adds to the `grad` of parameters. `messages`
transfers tensors, and `gradients` reduces gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpgo.runtime.passes import running
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from hpgo.programs.ranks import RankAction, RankProgram, RankStage
    from hpgo.runtime.clocks import Stamps
    from hpgo.runtime.loader import Share
    from hpgo.runtime.messages import Exchange, Messages, PassedTensor
    from hpgo.runtime.stage_module import StageModule
    from hpgo.runtime.workload import Workload

_OUTSIDE = "input:"


@dataclass(slots=True)
class Batch:
    """Data and loss of one step."""

    step: int
    inputs: Share
    targets: Share
    scale: torch.Tensor | float
    """Weight of a sample's weighted loss in the mean over the global batch."""
    loss: torch.Tensor
    """This rank's part of the mean loss, accumulated here."""
    count: int | None = None
    """Number of samples of the global batch that count; None if all do."""


@dataclass(slots=True)
class _Kept:
    """Tensors that a forward pass leaves for its backward pass."""

    values: list[torch.Tensor]
    """Inputs of the stage module."""
    outputs: Sequence[torch.Tensor]
    """Outputs of the stage module, or the loss; empty if the backward pass recomputes them."""
    generators: Any = None
    """States of torch's generators before the forward pass, if it is to be repeated."""


class StageRun:
    """One stage of a rank, with the micro-batches that are between their forward and their backward pass."""

    def __init__(
        self,
        stage: RankStage,
        part: StageModule,
        workload: Workload,
        cuts: tuple[Sequence[PassedTensor], Sequence[PassedTensor]],
        *,
        pipeline_micro_batch_size: int,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Prepare the stage. `cuts` are the tensors that cross the cut before it, and the cut behind it."""
        self.stage, self.part, self._workload = stage, part, workload
        self._before, self._behind = cuts
        self._size, self._start, self._rows = pipeline_micro_batch_size, stage.rows.start, len(stage.rows)
        self._autocast = autocast
        self._inputs = [
            (at, int(value.name.removeprefix(_OUTSIDE)))
            for at, value in enumerate(part.takes)
            if value.name.startswith(_OUTSIDE)
        ]
        self._kept: dict[int, _Kept] = {}

    def forward(
        self, micro_batch: int, batch: Batch, exchange: Exchange, received: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the stage forward. Return the tensors to send to later stages."""
        values = self.values(micro_batch, batch, exchange.takes.crossing, received)
        if self.stage.recompute:
            # Layers that draw from torch's own generators must draw the same numbers in the recomputation, so keep the
            # states.
            kept = _Kept(values, (), _generators(batch.loss.device))
            with torch.no_grad():
                outputs = self.run(values, micro_batch, batch, again=False)
        else:
            outputs = self.run(values, micro_batch, batch, again=False)
            kept = _Kept(values, outputs)
        self._kept[micro_batch] = kept
        if self.stage.is_last:
            batch.loss += outputs[0].detach()
        # The receiver has allocated the agreed dtype, but autocast may have changed it.
        return [
            outputs[crossing.given].detach().to(crossing.value.dtype)
            for crossing in map(self._behind.__getitem__, exchange.gives.crossing)
        ]

    def backward(
        self, kind: str, micro_batch: int, batch: Batch, exchange: Exchange, received: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Run the stage backward, or only its input-gradient pass. Return the gradients to send to earlier stages."""
        kept = self._kept.pop(micro_batch)
        outputs = kept.outputs
        if kept.generators is not None:
            # Later forward passes must not see the generators go back, so the recomputation uses a copy of the state.
            with torch.random.fork_rng(_devices(batch.loss.device)):
                _restore(kept.generators, batch.loss.device)
                outputs = self.run(kept.values, micro_batch, batch, again=True)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if self.stage.is_last:
            roots.append(outputs[0])
            gradients.append(None)
        else:
            for at, gradient in zip(exchange.takes.crossing, received, strict=True):
                root = outputs[self._behind[at].given]
                if gradient is not None and root.requires_grad:
                    roots.append(root)
                    gradients.append(gradient.to(root.dtype))
        with self.part.queueing(micro_batch) if kind == "I" else nullcontext():
            # A stage without weights and without inputs that need gradients has no graph to run backward.
            if roots and roots[0].requires_grad:
                torch.autograd.backward(roots, gradients)
        self.look_at_gradients()
        return [
            _gradient(kept.values[crossing.taken])
            for crossing in map(self._before.__getitem__, exchange.gives.crossing)
        ]

    def finish_weights(self, micro_batch: int) -> None:
        """Compute the weight gradients that an input-gradient pass has deferred."""
        self.part.run_weight_gradients(micro_batch)
        self.look_at_gradients()

    def look_at_gradients(self) -> None:
        """Check that weight gradients are finite after a backward pass, if the run looks for NaN."""
        if self.part.finder is not None:
            self.part.finder.gradients(self.part.by_layer())

    def values(
        self, micro_batch: int, batch: Batch, crossing: Iterable[int], received: Iterable[torch.Tensor]
    ) -> list[Any]:
        """Return the inputs of the stage module: received tensors and inputs of the batch.

        `crossing` has, for each received tensor, its number among the tensors that cross the cut.
        """
        values: list[Any] = [None] * len(self.part.takes)
        for at, tensor in zip(crossing, received, strict=True):
            one = self._before[at]
            # Received tensors are leaves, so that autograd leaves their gradients in `grad`, to be sent back.
            values[one.taken] = tensor.requires_grad_() if one.value.has_gradient else tensor
        if self._inputs:
            begin = micro_batch * self._size + self._start
            rows = batch.inputs.rows(begin, begin + self._rows)
            for at, number in self._inputs:
                values[at] = rows[number]
        return values

    def run(
        self, values: Sequence[torch.Tensor], micro_batch: int, batch: Batch, *, again: bool
    ) -> Sequence[torch.Tensor]:
        """Return the outputs of the stage module, or the loss for the last stage. `again` marks a recomputation."""
        begin = micro_batch * self._size + self._start
        end = begin + self._rows
        with running(step=batch.step, samples=range(begin, end), again=again), self._autocast():
            outputs: Sequence[torch.Tensor] = self.part(*values, rows=self._rows)
            if self.stage.is_last:
                own, targets = outputs, batch.targets.rows(begin, end)
                if batch.count is not None and batch.count < end:
                    # Samples that only fill up the last batch of the data do not count.
                    rows = max(0, batch.count - begin)
                    own, targets = [one[:rows] for one in outputs], tuple(one[:rows] for one in targets)
                loss = self._workload.loss_of(own, targets) * batch.scale
                if self.part.finder is not None:
                    self.part.finder.loss(loss, outputs)
                return (loss,)
        return outputs


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a received tensor; zeros if nothing in the stage depends on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _generators(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of torch's generators, for layers that draw from them."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


class Runs(Protocol):
    """Interface of a stage for the engine. `StageRun` computes; the emulation sleeps."""

    stage: RankStage

    def forward(
        self, micro_batch: int, batch: Any, exchange: Exchange, received: Sequence[torch.Tensor], /
    ) -> list[torch.Tensor]:
        """Run the stage forward. Return the tensors to send."""

    def backward(
        self, kind: str, micro_batch: int, batch: Any, exchange: Exchange, received: Sequence[torch.Tensor | None], /
    ) -> list[torch.Tensor]:
        """Run the stage backward. Return the gradients to send."""

    def finish_weights(self, micro_batch: int) -> None:
        """Compute the weight gradients that an input-gradient pass has deferred."""


class Sums(Protocol):
    """Interface of gradient reductions for the engine, which reports its progress. `Gradients` reduces them."""

    def begin(self) -> None:
        """Begin a step, before its first action."""

    def watch(self, stage: int) -> None:
        """Handle the start of the last backward pass of a stage."""

    def passed(self, stage: int) -> None:
        """Handle the end of the last backward pass of a stage."""


class Actions:
    """Actions of a rank in a step, and the progress through them."""

    def __init__(self, mine: RankProgram, gradients: Sums, stamps: Stamps) -> None:
        self.actions = mine.actions
        self.at = -1
        """Index of the action that runs or ran last; -1 before the first."""
        self.clock_ns: list[int] = []
        """Start and end of each action of the last step, in turn, by `time.perf_counter_ns`."""
        self._gradients, self._stamps = gradients, stamps
        self._last = {action.stage: at for at, action in enumerate(mine.actions) if action.kind != "F"}

    @property
    def last_action(self) -> RankAction | None:
        """The action that runs or ran last; None before the first."""
        return self.actions[self.at] if self.at >= 0 else None


class Engine(Actions):
    """Runner of one rank's actions, step by step."""

    def __init__(
        self,
        mine: RankProgram,
        stages: Mapping[int, Runs],
        messages: Messages,
        gradients: Sums,
        stamps: Stamps,
    ) -> None:
        super().__init__(mine, gradients, stamps)
        self._messages = messages
        # Look everything up once. In the step loop, each lookup would delay all actions behind it.
        self._plan = [
            (at, one.kind, stages[one.stage], one.micro_batch, exchange, self._last.get(one.stage) == at)
            for at, (one, exchange) in enumerate(zip(mine.actions, messages.exchanges, strict=True))
        ]

    def step(self, batch: Any) -> None:
        """Run all actions on `batch`.

        Afterwards this rank's gradients are complete; reductions over ranks may still run.
        """
        messages, gradients = self._messages, self._gradients
        taken: list[Any] = []
        stamp = self._stamps.take
        self.at = -1
        HERE.acts(self)
        gradients.begin()
        messages.begin()
        for at, kind, stage, micro_batch, exchange, is_last in self._plan:
            self.at = at
            received = messages.take(at)
            taken.append(stamp())
            if kind == "F":
                given = stage.forward(micro_batch, batch, exchange, received)
            elif kind == "W":
                given = []
                stage.finish_weights(micro_batch)
            else:
                # Reduction may overlap with a whole backward pass only. With split passes, weight gradients come after
                # it, in W.
                if is_last and kind == "B":
                    gradients.watch(stage.stage.stage)
                given = stage.backward(kind, micro_batch, batch, exchange, received)
            taken.append(stamp())
            if given:
                messages.give(at, given)
            if is_last:
                gradients.passed(stage.stage.stage)
        # Settle all sends of the step, because `begin` counts them from 0 again.
        messages.finish()
        # Convert the stamps after the step: on a GPU this waits for all its work.
        self.clock_ns = self._stamps.in_ns(taken)
