"""Gradients of a rank's weights: where they gather, over whom they are summed, and when.

The gradients of weights that the same ranks hold lie behind each other in buckets, so that a sum is one operation. A
weight that the rank holds twice, as a tied one or as the other copy of a schedule with two, gathers in one
place. Buckets are summed in one order on all ranks, as soon as the last backward passes have left them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpgo.programs.program import Program
    from hpgo.runtime.stage_module import StageModule

    Name = tuple[str, str]
    """Layer id and name of the parameter."""

BUCKET_BYTES = 25 << 20
"""Of gradients that are summed as one, at most, unless one weight has more."""


@dataclass(slots=True)
class Weight:
    """A parameter that this rank holds, however often."""

    name: Name
    """Of tied ones the first."""
    copies: list[torch.nn.Parameter]
    ranks: tuple[int, ...]
    """That hold it."""
    holders: set[int]
    """Stages of this rank that hold it."""
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """A view into its bucket, and the `grad` of each copy."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed as one."""

    flat: torch.Tensor
    weights: list[Weight]
    missing: int = 0
    """Weights, once for each stage that holds it, whose last backward pass of the step is yet to come."""


class Ranks:
    """Which ranks hold each layer's parameters, tied ones together with those they are tied to."""

    def __init__(self, program: Program, ties: Sequence[Sequence[Name]]) -> None:
        self._holders = {layer: set(one.ranks) for one in program.sums for layer in one.layers}
        self._tied = {name: tuple(group) for group in ties for name in group}
        self._order = {layer: at for at, layer in enumerate(self._holders)}

    def first(self, name: Name) -> Name:
        """The name that all parameters go by that are tied to this one."""
        return min(self._tied.get(name, (name,)), key=lambda one: (self._order[one[0]], one[1]))

    def of(self, name: Name) -> tuple[int, ...]:
        """The ranks that hold this parameter or one that is tied to it."""
        return tuple(sorted(set().union(*(self._holders[layer] for layer, _ in self._tied.get(name, (name,))))))

    def place(self, name: Name) -> tuple[int, str]:
        """By which parameters are sorted, the same on all ranks."""
        first = self.first(name)
        return self._order[first[0]], first[1]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Those of several ranks that hold something together, the same on all ranks."""
        found = [tuple(sorted(ranks)) for ranks in self._holders.values()]
        found += [self.of(name) for name in self._tied]
        return sorted({ranks for ranks in found if len(ranks) > 1})


class Gradients:
    """Those of one rank. `begin` starts a step, `passed` follows each last backward pass, `finish` sums the rest.

    Between these, backward passes add to the `grad` of parameters in place.
    """

    def __init__(
        self, parts: Mapping[int, StageModule], ranks: Ranks, groups: Mapping[tuple[int, ...], Any], *, overlap: bool
    ) -> None:
        """`parts` are this rank's by stage; `overlap` says whether sums may start before the last pass has ended."""
        self._groups, self._overlap = groups, overlap
        self.weights = _weights(parts, ranks)
        self._of_stage = {stage: [weight for weight in self.weights if stage in weight.holders] for stage in parts}
        self._bucket_of: dict[int, _Bucket] = {}
        self._buckets: dict[tuple[int, ...], list[_Bucket]] = {}
        for weights in _bucketed(self.weights):
            bucket = _Bucket(_lay_out(weights), weights)
            self._buckets.setdefault(weights[0].ranks, []).append(bucket)
            self._bucket_of |= {id(weight): bucket for weight in weights}
        self._rank = dist.get_rank()
        self._started: dict[tuple[int, ...], int] = {}
        self._sums: list[tuple[tuple[int, ...], Any]] = []
        self._left: set[tuple[int, int]] = set()  # weights, by id and stage, whose last pass has ended
        self._hooks: list[Any] = []

    @property
    def are_summed(self) -> bool:
        """Whether this rank shares any weight with another."""
        return any(len(ranks) > 1 for ranks in self._buckets)

    def begin(self) -> None:
        """Sets all gradients to zero."""
        self._started = dict.fromkeys(self._buckets, 0)
        self._left.clear()
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat.zero_()
                bucket.missing = sum(len(weight.holders) for weight in bucket.weights)
        for weight in self.weights:
            for copy in weight.copies:
                if copy.grad is not weight.gradient:  # somebody has set it to None, as optimizers do if asked
                    copy.grad = weight.gradient

    def watch(self, stage: int) -> None:
        """Before the last backward pass of a stage: sums start as it leaves the weights."""
        if not self._overlap:
            return
        for weight in self._of_stage[stage]:
            if len(weight.ranks) > 1:
                for copy in weight.copies:
                    self._hooks.append(copy.register_post_accumulate_grad_hook(self._hook(weight, stage)))

    def _hook(self, weight: Weight, stage: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self._leave(weight, stage)

    def passed(self, stage: int) -> None:
        """After the last backward pass of a stage, the one for its weights if that is a half of its own."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._overlap:
            for weight in self._of_stage[stage]:
                self._leave(weight, stage)

    def _leave(self, weight: Weight, stage: int) -> None:
        if (id(weight), stage) in self._left:
            return
        self._left.add((id(weight), stage))
        bucket = self._bucket_of[id(weight)]
        bucket.missing -= 1
        if not bucket.missing:
            self._start(weight.ranks)

    def _start(self, ranks: tuple[int, ...], *, all_of_them: bool = False) -> None:
        """Starts the sums that are ready, in the order of the buckets, which all ranks keep."""
        if len(ranks) == 1:
            return
        buckets = self._buckets[ranks]
        at = self._started[ranks]
        while at < len(buckets) and (all_of_them or not buckets[at].missing):
            self._sums.append((ranks, dist.all_reduce(buckets[at].flat, group=self._groups[ranks], async_op=True)))
            at += 1
        self._started[ranks] = at

    def finish(self) -> None:
        """Starts the sums that are left, and waits for all."""
        for ranks in self._buckets:
            self._start(ranks, all_of_them=True)
        HERE.sums("the sums of gradients")
        for ranks, one in self._sums:
            with HERE.waiting(ranks):
                one.wait()
        self._sums.clear()

    def square(self) -> torch.Tensor:
        """The sum of squares of all gradients that this rank answers for: over all ranks each weight counts once."""
        mine = [bucket for ranks, buckets in self._buckets.items() if ranks[0] == self._rank for bucket in buckets]
        squares = [torch.linalg.vector_norm(bucket.flat, dtype=torch.float64).square() for bucket in mine]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat.mul_(factor)


def _weights(parts: Mapping[int, StageModule], ranks: Ranks) -> list[Weight]:
    """The parameters of `parts` that are trained, those that are one weight together, in the order of all ranks."""
    found: dict[Name, Weight] = {}
    for stage, part in parts.items():
        for layer, tensors in part.by_layer().items():
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad:
                    continue
                first = ranks.first((layer, name))
                weight = found.setdefault(first, Weight(first, [], ranks.of(first), set()))
                weight.holders.add(stage)
                if all(tensor is not copy for copy in weight.copies):
                    weight.copies.append(tensor)
    return sorted(found.values(), key=lambda weight: ranks.place(weight.name))


def _bucketed(weights: Iterable[Weight]) -> Iterable[list[Weight]]:
    """Weights of the same ranks and kind, from the last layers to the first, as backward passes leave them."""
    kinds: dict[tuple[tuple[int, ...], torch.dtype], list[list[Weight]]] = {}
    filled: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    for weight in reversed(list(weights)):
        kind = weight.ranks, weight.copies[0].dtype
        size_bytes = weight.copies[0].numel() * weight.copies[0].element_size()
        buckets = kinds.setdefault(kind, [])
        if not buckets or filled[kind] + size_bytes > BUCKET_BYTES:
            buckets.append([])
            filled[kind] = 0
        buckets[-1].append(weight)
        filled[kind] += size_bytes
    return [bucket for buckets in kinds.values() for bucket in buckets]


def _lay_out(weights: list[Weight]) -> torch.Tensor:
    """One tensor for the gradients of all of them."""
    first = weights[0].copies[0]
    flat = torch.zeros(sum(weight.copies[0].numel() for weight in weights), dtype=first.dtype, device=first.device)
    begin = 0
    for weight in weights:
        copy = weight.copies[0]
        weight.gradient = flat[begin : begin + copy.numel()].view(copy.shape)
        begin += copy.numel()
    return flat
