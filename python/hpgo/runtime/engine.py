"""Executes the actions of one rank, one after the other, as its program says.

A forward pass keeps what its backward pass needs; a backward pass adds to the `grad` of parameters. What travels is the
business of `messages`, what is summed that of `gradients`.
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
    """What a step works on."""

    step: int
    inputs: Share
    targets: Share
    scale: torch.Tensor | float
    """What the weighted loss of a sample counts in the mean over the global batch."""
    loss: torch.Tensor
    """This rank's part of the mean loss, added up here."""


@dataclass(slots=True)
class _Kept:
    """What a forward pass leaves for its backward pass."""

    values: list[torch.Tensor]
    """What the part took."""
    outputs: Sequence[torch.Tensor]
    """What it gave, or the loss; empty if the backward pass computes it anew."""
    generators: Any = None
    """States of torch's own before the forward pass, if it is to be repeated."""


class StageRun:
    """One stage that a rank holds, with the micro-batches that are between their forward and their backward pass."""

    def __init__(
        self,
        stage: RankStage,
        part: StageModule,
        workload: Workload,
        cuts: tuple[Sequence[PassedTensor], Sequence[PassedTensor]],
        *,
        micro_batch_size: int,
        recompute: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """`cuts` are what crosses before the stage, and behind it."""
        self.stage, self.part, self._workload = stage, part, workload
        self._before, self._behind = cuts
        self._size, self._start, self._rows = micro_batch_size, stage.rows.start, len(stage.rows)
        self.recompute, self._autocast = recompute, autocast
        self._inputs = [
            (at, int(value.name.removeprefix(_OUTSIDE)))
            for at, value in enumerate(part.takes)
            if value.name.startswith(_OUTSIDE)
        ]
        self._kept: dict[int, _Kept] = {}

    def forward(
        self, micro_batch: int, batch: Batch, exchange: Exchange, received: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs the part forward; returns what travels on."""
        values = self.values(micro_batch, batch, exchange.takes.crossing, received)
        if self.recompute:
            kept = _Kept(values, (), _generators(batch.loss.device))
            with torch.no_grad():
                outputs = self.run(values, micro_batch, batch, again=False)
        else:
            outputs = self.run(values, micro_batch, batch, again=False)
            kept = _Kept(values, outputs)
        self._kept[micro_batch] = kept
        if self.stage.is_last:
            batch.loss += outputs[0].detach()
        # In the dtype that was agreed on, which autocast may have left.
        return [
            outputs[crossing.given].detach().to(crossing.value.dtype)
            for crossing in map(self._behind.__getitem__, exchange.gives.crossing)
        ]

    def backward(
        self, kind: str, micro_batch: int, batch: Batch, exchange: Exchange, received: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Runs the part backward, or its half for inputs; returns the gradients that travel back."""
        kept = self._kept.pop(micro_batch)
        outputs = kept.outputs
        if kept.generators is not None:
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
            if roots and roots[0].requires_grad:
                torch.autograd.backward(roots, gradients)
        self.look_at_gradients()
        return [
            _gradient(kept.values[crossing.taken])
            for crossing in map(self._before.__getitem__, exchange.gives.crossing)
        ]

    def finish_weights(self, micro_batch: int) -> None:
        """Computes the gradients of weights that the half for inputs has left."""
        self.part.run_weight_gradients(micro_batch)
        self.look_at_gradients()

    def look_at_gradients(self) -> None:
        """After a backward pass: those of weights must be numbers, if somebody asks."""
        if self.part.finder is not None:
            self.part.finder.gradients(self.part.by_layer())

    def values(
        self, micro_batch: int, batch: Batch, crossing: Iterable[int], received: Iterable[torch.Tensor]
    ) -> list[Any]:
        """What the part takes: tensors that were received, numbered as they cross the cut, and inputs of the batch."""
        values: list[Any] = [None] * len(self.part.takes)
        for at, tensor in zip(crossing, received, strict=True):
            one = self._before[at]
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
        """What the part gives, or of the last stage the loss; `again` if it computes it anew."""
        begin = micro_batch * self._size + self._start
        end = begin + self._rows
        with running(step=batch.step, samples=range(begin, end), again=again), self._autocast():
            outputs: Sequence[torch.Tensor] = self.part(*values, rows=self._rows)
            if self.stage.is_last:
                loss = self._workload.loss_of(outputs, batch.targets.rows(begin, end)) * batch.scale
                if self.part.finder is not None:
                    self.part.finder.loss(loss, outputs)
                return (loss,)
        return outputs


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Of what a stage received; nothing in it counted if autograd has left none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _generators(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states that random numbers of torch come from, for layers that draw by themselves."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(states: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


class Runs(Protocol):
    """What the engine has a stage do; a `StageRun` computes."""

    stage: RankStage

    def forward(
        self, micro_batch: int, batch: Any, exchange: Exchange, received: Sequence[torch.Tensor], /
    ) -> list[torch.Tensor]:
        """Returns what travels on."""

    def backward(
        self, kind: str, micro_batch: int, batch: Any, exchange: Exchange, received: Sequence[torch.Tensor | None], /
    ) -> list[torch.Tensor]:
        """Returns what travels back."""

    def finish_weights(self, micro_batch: int) -> None:
        """What a backward pass that is only for inputs has left."""


class Sums(Protocol):
    """What the engine tells of how far gradients are; `Gradients` sums them."""

    def begin(self) -> None:
        """A step begins."""

    def watch(self, stage: int) -> None:
        """The last backward pass of a stage begins."""

    def passed(self, stage: int) -> None:
        """It has ended."""


class Actions:
    """What a rank does in a step, and how far it is."""

    def __init__(self, mine: RankProgram, gradients: Sums, stamps: Stamps) -> None:
        self.actions = mine.actions
        self.at = -1
        """The action that runs, or ran last; -1 before the first."""
        self.clock_ns: list[int] = []
        """Start and end of each action of the last step, one after the other, by `time.perf_counter_ns`."""
        self._gradients, self._stamps = gradients, stamps
        self._last = {action.stage: at for at, action in enumerate(mine.actions) if action.kind != "F"}

    @property
    def last_action(self) -> RankAction | None:
        """The action that runs, or ran last."""
        return self.actions[self.at] if self.at >= 0 else None


class Engine(Actions):
    """Runs one rank's actions, step by step."""

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
        self._plan = [
            (at, one.kind, stages[one.stage], one.micro_batch, exchange, self._last.get(one.stage) == at)
            for at, (one, exchange) in enumerate(zip(mine.actions, messages.exchanges, strict=True))
        ]

    def step(self, batch: Any) -> None:
        """Runs all actions; afterwards the gradients of this rank are complete, and sums over others may still run.

        `batch` is what its stages work on.
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
                made = stage.forward(micro_batch, batch, exchange, received)
            elif kind == "W":
                made = []
                stage.finish_weights(micro_batch)
            else:
                if is_last and kind == "B":
                    gradients.watch(stage.stage.stage)
                made = stage.backward(kind, micro_batch, batch, exchange, received)
            taken.append(stamp())
            if made:
                messages.give(at, made)
            if is_last:
                gradients.passed(stage.stage.stage)
        messages.finish()
        self.clock_ns = self._stamps.in_ns(taken)
