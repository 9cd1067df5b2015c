"""Gradients of a rank's weights: their buckets, the ranks that reduce them, and the time of the reduction.

Gradients of weights with the same holders are adjacent in buckets, so that one all-reduce sums many of them. A weight
that the rank holds twice has one gradient: either a tied weight, or both copies in a schedule with two pipelines. All
ranks reduce the buckets in the same order, each as soon as the last backward passes have left it.

Why gradients equal the gradients of one process: Let wᵢ be the weight of sample i (1 unless the workload sets it) and
ℓᵢ its loss. One process computes L = Σᵢ wᵢ ℓᵢ / Σᵢ wᵢ over the N samples of the global batch, and for a weight θ

    ∂L/∂θ = Σᵢ cᵢ ∂ℓᵢ/∂θ,  cᵢ = wᵢ / Σⱼ wⱼ.

Each sample counts once, with cᵢ. It is in one micro-batch, and there in the rows of one replica of the last stage. That
replica adds cᵢ ℓᵢ to the root of its backward pass. Σⱼ wⱼ is reduced over the ranks before.

Each replica has ∂L/∂x for its rows of its outputs. This holds for the last stage's loss. If it holds behind a stage,
the chain rule gives it before the stage, for the rows that a replica took. Messages are copies, and the gradient of a
value with several readers is the sum of theirs. Rows have one reader at every cut. A tensor without rows has several,
whose parts are added at its source.

A stage's replicas together have ∂L/∂θ. Each adds up Σ cᵢ ∂ℓᵢ/∂θ for its rows over its micro-batches, because layers
treat samples independently. The rows of all replicas, and of both pipeline replicas if there are two, are all samples,
each once. A tied weight is one θ in several layers: its gradient is the sum over all holders.
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
    """Layer id and name of a parameter."""

BUCKET_BYTES = 25 << 20
"""Maximum size of a bucket in bytes, unless a single weight is larger. PyTorch's DDP has the same default."""


@dataclass(slots=True)
class Weight:
    """A parameter that this rank holds, with all its copies."""

    name: Name
    """Name of the weight; for tied weights the first of their names."""
    copies: list[torch.nn.Parameter]
    ranks: tuple[int, ...]
    """Ranks that hold the weight."""
    holders: set[int]
    """Stages of this rank that hold the weight."""
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient: a view into the bucket, which is the `grad` of each copy."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that one all-reduce sums."""

    flat: torch.Tensor
    weights: list[Weight]
    missing: int = 0
    """Number of pairs of weight and stage whose last backward pass of the step is pending."""


class Ranks:
    """The ranks that hold each parameter, where tied parameters count as one."""

    def __init__(self, program: Program, tied_weights: Sequence[Sequence[Name]]) -> None:
        self._holders = {layer: set(one.ranks) for one in program.sums for layer in one.layers}
        self._tied = {name: tuple(group) for group in tied_weights for name in group}
        self._order = {layer: at for at, layer in enumerate(self._holders)}

    def first(self, name: Name) -> Name:
        """Return the common name of all parameters that are tied to this one."""
        # All ranks must choose the same name, so take the first by layer order and name.
        return min(self._tied.get(name, (name,)), key=lambda one: (self._order[one[0]], one[1]))

    def of(self, name: Name) -> tuple[int, ...]:
        """Return the ranks that hold this parameter or one tied to it."""
        return tuple(sorted(set().union(*(self._holders[layer] for layer, _ in self._tied.get(name, (name,))))))

    def place(self, name: Name) -> tuple[int, str]:
        """Return the sort key of a parameter, which is the same on all ranks."""
        first = self.first(name)
        return self._order[first[0]], first[1]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Groups of several ranks that hold a parameter together, in the same order on all ranks."""
        # Creating a process group is collective, so all ranks create all groups in sorted order.
        found = [tuple(sorted(ranks)) for ranks in self._holders.values()]
        found += [self.of(name) for name in self._tied]
        return sorted({ranks for ranks in found if len(ranks) > 1})


class Gradients:
    """Gradients of one rank.

    `begin` starts a step, `passed` follows each last backward pass, and `finish` reduces the rest. Between these calls,
    backward passes add to the `grad` of parameters in place.
    """

    def __init__(
        self, parts: Mapping[int, StageModule], ranks: Ranks, groups: Mapping[tuple[int, ...], Any], *, overlap: bool
    ) -> None:
        """Lay out the gradients of the modules `parts`. `overlap` allows reductions before the last pass has ended."""
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
        self._finished: set[tuple[int, int]] = set()  # id of weight, and stage, whose last pass has ended
        self._hooks: list[Any] = []

    @property
    def are_summed(self) -> bool:
        """Whether this rank shares any weight with another rank."""
        return any(len(ranks) > 1 for ranks in self._buckets)

    def begin(self) -> None:
        """Set all gradients to zero."""
        self._started = dict.fromkeys(self._buckets, 0)
        self._finished.clear()
        # Zero in place instead of `zero_grad(set_to_none=True)`, because gradients are views into buckets.
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat.zero_()
                bucket.missing = sum(len(weight.holders) for weight in bucket.weights)
        for weight in self.weights:
            for copy in weight.copies:
                if copy.grad is not weight.gradient:  # set to None, for example by `optimizer.zero_grad()`
                    copy.grad = weight.gradient

    def watch(self, stage: int) -> None:
        """Prepare the last backward pass of a stage, so that reductions start as gradients become final."""
        if not self._overlap:
            return
        for weight in self._of_stage[stage]:
            if len(weight.ranks) > 1:
                # The hook runs when autograd has added to `grad`. In the last pass, the gradient is then final.
                for copy in weight.copies:
                    self._hooks.append(copy.register_post_accumulate_grad_hook(self._hook(weight, stage)))

    def _hook(self, weight: Weight, stage: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self._mark_finished(weight, stage)

    def passed(self, stage: int) -> None:
        """Finish the last backward pass of a stage, or its last weight-gradient pass if passes are split."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # Weights without a gradient in this pass have triggered no hook, so mark all weights of the stage.
        if self._overlap:
            for weight in self._of_stage[stage]:
                self._mark_finished(weight, stage)

    def _mark_finished(self, weight: Weight, stage: int) -> None:
        if (id(weight), stage) in self._finished:
            return
        self._finished.add((id(weight), stage))
        # A weight in several stages of this rank is final only after the last pass of each of them.
        bucket = self._bucket_of[id(weight)]
        bucket.missing -= 1
        if not bucket.missing:
            self._start(weight.ranks)

    def _start(self, ranks: tuple[int, ...], *, all_of_them: bool = False) -> None:
        """Start the reductions that are ready, in the order of the buckets.

        All ranks keep this order, since collectives of a group must be called in the same order on all its ranks.
        """
        if len(ranks) == 1:
            return
        buckets = self._buckets[ranks]
        at = self._started[ranks]
        # Stop at the first incomplete bucket, even if later ones are complete, since all ranks must keep one order.
        while at < len(buckets) and (all_of_them or not buckets[at].missing):
            self._sums.append((ranks, dist.all_reduce(buckets[at].flat, group=self._groups[ranks], async_op=True)))
            at += 1
        self._started[ranks] = at

    def finish(self) -> None:
        """Start the remaining reductions, and wait for all."""
        for ranks in self._buckets:
            self._start(ranks, all_of_them=True)
        HERE.sums("the sums of gradients")
        for ranks, one in self._sums:
            with HERE.waiting(ranks):
                one.wait()
        self._sums.clear()

    def square(self) -> torch.Tensor:
        """Return the sum of squares of all gradients that this rank accounts for.

        Each weight counts on the first of its holders only, so that the sum over all ranks counts it once.
        """
        mine = [bucket for ranks, buckets in self._buckets.items() if ranks[0] == self._rank for bucket in buckets]
        # Accumulate in double precision, so that the order of the sums over buckets and ranks hardly matters.
        squares = [torch.linalg.vector_norm(bucket.flat, dtype=torch.float64).square() for bucket in mine]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.flat.mul_(factor)


def _weights(parts: Mapping[int, StageModule], ranks: Ranks) -> list[Weight]:
    """Return the trainable parameters of `parts` in the order of all ranks; tied ones and copies are one weight."""
    found: dict[Name, Weight] = {}
    for stage, part in parts.items():
        for layer, tensors in part.by_layer().items():
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad:
                    continue
                first = ranks.first((layer, name))
                weight = found.setdefault(first, Weight(first, [], ranks.of(first), set()))
                weight.holders.add(stage)
                # Tied parameters may be one tensor or several copies. List each tensor once.
                if all(tensor is not copy for copy in weight.copies):
                    weight.copies.append(tensor)
    return sorted(found.values(), key=lambda weight: ranks.place(weight.name))


def _bucketed(weights: Iterable[Weight]) -> Iterable[list[Weight]]:
    """Yield buckets of weights with equal holders and number format.

    Weights are in reverse layer order, as backward passes complete them, so that the first buckets can be reduced
    early.
    """
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
    """Allocate one tensor for the gradients of all weights, and make each gradient a view into it."""
    first = weights[0].copies[0]
    flat = torch.zeros(sum(weight.copies[0].numel() for weight in weights), dtype=first.dtype, device=first.device)
    begin = 0
    for weight in weights:
        copy = weight.copies[0]
        weight.gradient = flat[begin : begin + copy.numel()].view(copy.shape)
        begin += copy.numel()
    return flat
