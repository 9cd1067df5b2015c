"""Statistics of measured passes: typical times, their error, and how the times of layers add up to the model's."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING

from hpgo.model.profile import SPLIT_RATIOS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from hpgo.runtime import split_backward
    from hpgo.runtime.modules import NetworkLayer


MIN_PASSES = 5
"""Minimum number of passes of a layer, besides one to warm up."""
_DISTURBED = 2.0
"""Ratio to a layer's fastest pass from which on a pass was disturbed and does not count.

Other processes only add time, up to hundreds of ms to a layer of 1 ms, and may do so in more than half of the passes:
then the median alone is wrong. Not tuned. At 4, passes count that waited for a core 3 times as long as they ran. At
1.3, passes are lost that a processor at a lower clock rate ran.
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of equal layers."""

    forward_s: float
    backward_s: float
    input_gradient_s: float | None
    """Time of the input-gradient pass, as split backward passes run it; None for inference."""
    weight_gradient_s: float | None
    """Time of the weight-gradient pass; None for inference."""
    spread: float
    """Width of the middle half of all passes, disturbed ones included, relative to the typical time. It counts forward
    and backward together."""
    parameter_bytes: int
    frozen_bytes: int
    """Bytes within `parameter_bytes` of parameters that do not require gradients."""
    saved_bytes: int
    """Bytes kept until the backward pass, besides what the layer reads and returns."""
    reads: Sequence[bool]
    """Whether the backward pass needs each value that the layer reads."""
    returns: Sequence[tuple[int, int, int, bool]]
    """Description of each value that the layer returns: its bytes, the bytes of its memory, the owner of that memory,
    and whether the backward pass needs it. The owner is the number of a value that the layer reads, or a number below
    0, one for each memory of its own."""


@dataclass(frozen=True, slots=True)
class WholeModelTiming:
    """Times of all layers run as one graph."""

    whole_s: float
    sum_s: float
    """Sum of the times of the layers alone."""
    forward_s: float
    """Forward part of `whole_s`."""
    forwards_s: float
    """Forward part of `sum_s`."""
    furthest: tuple[str, float, float]
    """The layer whose forward pass contributes most to the difference between `sum_s` and `whole_s`: its id, its time
    in the model, and its time alone."""
    scale: float
    """Factor applied to the layers' times, so that they add up to the model's; 1 where passes disagree on it."""
    saved_activation_bytes: tuple[int, int] | None
    """Bytes that tensors hold after the forward pass besides weights: without the model's inputs and outputs, and with
    them. None for inference."""
    peak_bytes: int | None
    """Peak bytes of tensors in the forward and backward pass, besides weights. None for inference."""


@dataclass(slots=True)
class MeasuredLayer:
    """A layer while it is being measured."""

    node: NetworkLayer
    module: nn.Module
    split: nn.Module
    """A module with the same weights, whose backward pass leaves weight gradients to `queue`."""
    queue: split_backward.Queue
    key: str
    """Equivalence key: equal for layers that compute the same on tensors of the same shapes."""
    batches: int = 1
    """Number of batches that the passes take in turn."""
    saved_bytes: int = 0
    reads: tuple[bool, ...] = ()
    returns: tuple[tuple[int, int, int, bool], ...] = ()
    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    """Forward and backward time of each pass alone."""
    in_whole_ns: list[int] = field(default_factory=list)
    """Forward time of each pass within the whole model."""
    halves_ns: list[tuple[int, int]] = field(default_factory=list)
    """Input-gradient and weight-gradient time of each split backward pass."""
    loss_ns: list[int] = field(default_factory=list)
    """Forward times of the loss, which `spans_ns` includes and `in_whole_ns` does not; empty if there is none."""

    @property
    def loss_forward_ns(self) -> float:
        """Typical forward time of the loss, if the layer ends the model; else 0."""
        return typical(self.loss_ns[1:]) if self.loss_ns[1:] else 0.0

    @property
    def forward_ns(self) -> float:
        """Typical time of a forward pass. If few ran alone, those within the whole model count as well."""
        alone = [forward_ns for forward_ns, _ in self.spans_ns[1:]]
        within = [forward_ns + self.loss_forward_ns for forward_ns in self.in_whole_ns[1:]]
        return _mean_over_batches(alone, self.batches, within)

    @property
    def backward_ns(self) -> float:
        """Typical time of a backward pass. If few ran whole, split ones count as well."""
        whole = [backward_ns for _, backward_ns in self.spans_ns[1:]]
        return _mean_over_batches(whole, self.batches, list(map(sum, self.halves_ns[1:])))

    @property
    def spread(self) -> float:
        """Width of the middle half of all passes, disturbed ones too, as a share of the typical time."""
        low, _, high = quantiles((sum(span) for span in self.spans_ns[1:]), n=4)
        typical_ns = self.forward_ns + self.backward_ns
        return (high - low) / typical_ns if typical_ns else 0.0


def timing_of_whole(
    segment: Sequence[MeasuredLayer],
    wholes_ns: Sequence[int],
    scale: float,
    saved_activation_bytes: tuple[int, int] | None,
    peak_bytes: int | None,
) -> WholeModelTiming:
    """Return the timing of the whole model. The first of all passes warmed up and does not count."""
    forward_s = {
        one.node.id: (
            _mean_over_batches(one.in_whole_ns[1:], one.batches) / 1e9,
            (one.forward_ns - one.loss_forward_ns) / 1e9,
        )
        for one in segment
    }
    backward_s = sum(one.backward_ns for one in segment) / 1e9
    whole_s = _mean_over_batches(wholes_ns[1:], segment[0].batches) / 1e9
    sum_s = sum(one.forward_ns for one in segment) / 1e9 + backward_s
    sign = 1 if sum_s > whole_s else -1
    return WholeModelTiming(
        whole_s=whole_s,
        sum_s=sum_s,
        forward_s=sum(within for within, _ in forward_s.values()),
        forwards_s=sum(alone for _, alone in forward_s.values()),
        furthest=max(((layer, *both) for layer, both in forward_s.items()), key=lambda one: sign * (one[2] - one[1])),
        scale=scale,
        saved_activation_bytes=saved_activation_bytes,
        peak_bytes=peak_bytes,
    )


def median_error(segment: Sequence[MeasuredLayer]) -> float:
    """Return half of the uncertainty of the segment's median time, relative to that time.

    It is the notch of a box plot (McGill, Tukey, Larsen 1978).
    """
    # Add up the layers of each sweep first: a disturbance hits neighbors together, so errors of layers are not
    # independent.
    totals = [sum(map(sum, spans)) for spans in zip(*(one.spans_ns[1:] for one in segment), strict=True)]
    return 1.57 * _spread(totals) / sqrt(len(totals))


def scale_to_whole(segment: Sequence[MeasuredLayer], wholes_ns: Sequence[int]) -> float:
    """Return the factor by which the layers' times add up to the model's, compared pass by pass.

    A disturbance slows down both passes that run one after the other, so their ratio is steady. Returns 1 unless three
    of four pairs agree on which takes longer.
    """
    # Replace disturbed passes instead of dropping them, so that pass n of each layer stays paired with pass n of the
    # model.
    batches = segment[0].batches
    each = (_steady([sum(span) for span in one.spans_ns[1:]], batches) for one in segment)
    layers_ns = map(sum, zip(*each, strict=True))
    return _agreed([whole / layers for whole, layers in zip(_steady(wholes_ns[1:], batches), layers_ns, strict=False)])


def _agreed(ratios: Sequence[float]) -> float:
    """Return the median of `ratios`, or 1 if they are few or if fewer than three of four are on one side of 1."""
    if len(ratios) < MIN_PASSES:
        return 1.0
    low, middle, high = quantiles(ratios, n=4)
    return middle if low > 1 or high < 1 else 1.0


def _spread(values: Sequence[float]) -> float:
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle if middle else 0.0


def typical(values: Sequence[float]) -> float:
    """Return the median of the values that are at most `_DISTURBED` times the least one.

    >>> typical([1.0, 1.1, 1.2]), typical([1.0, 1.1, 190.0, 200.0, 210.0])
    (1.1, 1.05)
    """
    # The minimum is never disturbed, so a limit relative to it works even if most passes are.
    return median(value for value in values if value <= _DISTURBED * min(values))


def _mean_over_batches(passes: Sequence[float], batches: int, others: Sequence[float] = ()) -> float:
    """Return the mean over batches of the typical pass of a batch. Where passes are few, `others` count, too.

    Passes take batches in turn. What a step takes on all data is the mean over batches, but within a batch, slow passes
    were disturbed.
    """
    of_batch = [list(passes[at::batches]) for at in range(batches)]
    if len(passes) < MIN_PASSES:
        of_batch = [[*of, *others[at::batches]] for at, of in enumerate(of_batch)]
    return fmean(typical(of) for of in of_batch if of)


def _steady(values: Sequence[float], batches: int) -> list[float]:
    """Return `values` with disturbed passes replaced by the typical one of their batch. Passes take batches in turn."""
    steady = list(values)
    for at in range(min(batches, len(values))):
        of_batch = values[at::batches]
        steady[at::batches] = [one if one <= _DISTURBED * min(of_batch) else typical(of_batch) for one in of_batch]
    return steady


def split_ratios(alike: Sequence[MeasuredLayer]) -> tuple[float, float]:
    """Return how long the split backward pass takes as a share of the whole one, and the share of its first half.

    Both come from pairs of passes of the same sweep, because a machine's speed changes between sweeps. The first is 1
    where there are fewer than `MIN_PASSES` pairs, or fewer than three of four agree that splitting takes longer.
    """
    pairs = [
        (sum(split), split[0], whole)
        for one in alike
        for split, (_, whole) in zip(one.halves_ns[1:], one.spans_ns[1:], strict=False)
        if sum(split) and whole
    ]
    if not pairs:
        return 1.0, 0.5
    # Profiles accept no ratio above this limit, and a split pass can't take less than a whole one, which does the same
    # work.
    ratio = min(_agreed([split / whole for split, _, whole in pairs]), SPLIT_RATIOS[1])
    return max(1.0, ratio), median(first / split for split, first, _ in pairs)
