"""Checks of a loss: how it combines samples, and whether a language model gets the input tokens as targets.

The losses of micro-batches add up to that of the whole batch only if the loss is a mean or a sum over samples. The
checks compare pairs of rows together and alone, on random outputs. The model does not run, and torch's generators keep
their states.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError
from hpgo.runtime.models.gpt import next_token_loss
from hpgo.runtime.trees import Tree, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from torch import Tensor

    from hpgo.runtime.stage_module import Value
    from hpgo.runtime.workload import Workload

Kind = Literal["mean", "sum", "weighted", "mixed", "unknown"]
_IGNORED = -100
"""Target value that Hugging Face and `cross_entropy` leave out."""
_MAX_PAIRS = 4
"""Maximum number of pairs of rows to compare. Not tuned: each costs 8 calls of the loss."""
_LARGE = 2**24
"""Number of values in a row of outputs from which on only one pair is compared, in the run's own type.

2**24 values take 128 MiB in float64. Not tuned. At half, fewer losses are checked in float64. At twice, the check takes
twice the memory."""
_NEAR = 1e-5
"""Relative difference of losses that are equal up to rounding, in 32 bits. Not tuned."""
_ROUGH = 1e-2
"""Relative difference of losses that are equal up to rounding, in 16 bits, where bf16 has 8 significant bits. Not
tuned."""
_NOTHING = 1e-3
"""Difference between weights in a mean that has no effect on training. Not tuned."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Result of the check: how a loss combines samples."""

    kind: Kind
    """`mean` and `sum` are over samples, and a `mean` may be weighted by the workload's `weight`. `weighted`: each
    sample counts by something in the targets that `weight` does not state. `mixed`: samples have no loss of their own.
    """
    reason: str = ""
    """Numbers that show the kind, or the reason why it is unknown; empty for `mean` and `sum`."""
    hint: str = ""


class FlatLoss:
    """A loss as a function of the flat tensors that stages pass, which it nests as the user's function expects them.

    `outputs` and `targets` are the structures of both. Without `outputs`, the function gets a tensor, or a tuple.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], outputs: Tree | None, targets: Tree) -> None:
        self.loss, self._outputs, self._targets = loss, outputs, targets

    def __call__(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Return the loss of a batch."""
        given = tuple(outputs) if self._outputs is None else self._outputs.build(outputs)
        return self.loss(plain(given), self._targets.build(targets))

    def of(self, function: Callable[[Any, Any], Any]) -> FlatLoss:
        """Return another function of the same outputs and targets, such as a metric."""
        return FlatLoss(function, self._outputs, self._targets)

    def copied(self) -> FlatLoss:
        """Return the loss with a copy of a module, whose buffers a call may change."""
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        return FlatLoss(loss, self._outputs, self._targets)


def own_loss(outputs: Any, _: Any) -> Any:
    """Return the loss that a model returns: its only result, its `loss`, or the first number of several results.

    >>> float(own_loss({"logits": torch.zeros(2, 3), "loss": torch.tensor(1.5)}, None))
    1.5
    >>> float(own_loss((torch.zeros(2, 3), torch.tensor(1.5)), None))
    1.5
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if hasattr(outputs, "loss") or not isinstance(outputs, tuple | list):
        return getattr(outputs, "loss", None)
    # Without a number, the first result is refused later, with its shape.
    return next((one for one in outputs if isinstance(one, torch.Tensor) and one.dim() == 0), outputs[0])


class _Number(float):
    """A loss with the size in bytes of the type in which it was computed."""

    def __new__(cls, value: float, size: int) -> Self:
        number = super().__new__(cls, value)
        number.size = size
        return number

    size: int


class _IncomparableError(Exception):
    """A loss that is no finite number on random outputs."""


def reduction(
    loss: FlatLoss,
    weight: Callable[[tuple[Tensor, ...]], Tensor] | None,
    outputs: Sequence[Value],
    targets: Sequence[Tensor],
) -> Reduction:
    """Find out how `loss` combines rows of outputs like `outputs` and `targets`.

    `weight` gives the weight of each row.

    >>> from hpgo.runtime.stage_module import Value
    >>> scores = [Value("head", by_row=True, has_gradient=True, shape=(3,), dtype=torch.float32)]
    >>> targets = torch.tensor([0, 1])
    >>> loss = FlatLoss(nn.CrossEntropyLoss(reduction="sum"), None, Tree.of(targets)[0])
    >>> reduction(loss, None, scores, [targets]).kind
    'sum'
    """
    if any(value.dtype.is_floating_point and not (value.by_row or value.shape) for value in outputs):
        return Reduction("unknown", "the model computes it, or a part of it")
    if not any(value.by_row and value.dtype.is_floating_point for value in outputs):
        return Reduction("unknown", "the model's outputs have no row for each sample")
    # A loss module may have buffers, such as running statistics, which the check must not change.
    loss = loss.copied()
    found: list[Reduction] = []
    with _aside(targets[0].device):
        for pair in islice(_pairs(targets), 1 if _is_large(outputs) else _MAX_PAIRS):
            weights = None if weight is None else weight(pair).tolist()
            # A row that does not count shows nothing about a mean.
            if weights is not None and min(weights) <= 0:
                continue
            one = _of_pair(loss, weights, outputs, pair)
            if one is not None:
                found.append(one)
    kinds = {one.kind for one in found}
    if not found:
        return Reduction("unknown", "no two samples of it count")
    # A single pair can look like both, so contradicting pairs mean that the loss depends on which samples are together.
    if {"sum", "mean"} <= kinds:
        return Reduction("mixed", "some pairs of samples are added up, and others averaged")
    # Report the kind that restricts training most: one counterexample outweighs pairs that happen to look like a mean.
    order = ["mixed", "weighted", "sum", "mean", "unknown"]
    return min(found, key=lambda one: order.index(one.kind))


def _of_pair(
    loss: FlatLoss, weights: list[float] | None, outputs: Sequence[Value], pair: tuple[Tensor, ...]
) -> Reduction | None:
    """Compare two rows together and alone; return None if all their losses are 0."""
    shown: list[tuple[_Number, _Number, _Number]] | None = None
    reason = ""
    # Try float64 first, where rounding can't be mistaken for a weight. Losses that need probabilities or 16 bits raise
    # there, so fall back.
    for is_wide, dtype in product((True, False), (None,) if _is_large(outputs) else (torch.float64, None)):
        try:
            shown = [
                _losses(loss, outputs, _made_up(outputs, pair, draw, dtype, is_wide=is_wide), pair) for draw in (0, 1)
            ]
        except _IncomparableError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 -- a loss may raise anything on made-up outputs
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            break
    if shown is None:
        return Reduction("unknown", f"on random outputs it returns {reason}")
    first, second = weights or (1.0, 1.0)

    def holds(expected: Callable[[float, float], float], near: float) -> bool:
        return all(
            abs(both - expected(one, other)) <= near * max(abs(both), abs(one), abs(other))
            for both, one, other in shown
        )

    def mean(one: float, other: float) -> float:
        return (first * one + second * other) / (first + second)

    if all(math.isfinite(value) for losses in shown for value in losses):
        if not any(value for losses in shown for value in losses):
            return None
        near = _NEAR if shown[0][0].size > 2 else _ROUGH
        if holds(mean, near):
            return Reduction("mean")
        if holds(lambda one, other: one + other, near):
            return Reduction("sum")
    shares = [_share(*losses) for losses in shown]
    both, one, other = shown[0]
    numbers = f"two samples give {one:.4g} and {other:.4g} alone, and {both:.4g} together"
    known = [share for share in shares if share is not None]
    if len(known) == len(shares):
        # Rounding errors differ between the two draws, a true weight does not. Accept only weights that differ clearly
        # from the expected one, compared with their difference between draws.
        apart = max(known) - min(known)
        if apart < 5 * _ROUGH and abs(known[0] - first / (first + second)) > 2 * apart + _NOTHING:
            return _weighted(known[0], weights, pair, numbers)
    if holds(mean, _ROUGH):
        return Reduction("mean")
    if holds(lambda one, other: one + other, _ROUGH):
        return Reduction("sum")
    return Reduction("mixed", numbers)


def _share(both: float, one: float, other: float) -> float | None:
    """Return what the first of two rows counts in the mean of both, from 0 to 1; None if `both` is no such mean."""
    if not math.isfinite(one) or not math.isfinite(other):
        # A row whose targets are all ignored has no finite loss alone, and weight 0 in the mean.
        alone, share = (other, 0.0) if math.isfinite(other) else (one, 1.0)
        return share if math.isfinite(alone) and abs(both - alone) <= _NEAR * abs(both) else None
    if abs(one - other) <= _NEAR * max(abs(one), abs(other)):
        return None
    share = (both - other) / (one - other)
    return share if -_NEAR <= share <= 1 + _NEAR else None


def _weighted(share: float, weights: list[float] | None, pair: tuple[Tensor, ...], numbers: str) -> Reduction:
    """Describe a mean in which the first of two rows counts `share`, and the second the rest."""
    counts = f"two samples count {share:.3g} and {1 - share:.3g} in it"
    if weights is not None:
        counts += f", and `weight` gives {weights[0]:.4g} and {weights[1]:.4g}"
    hint = "give the weight of each sample: `Workload(…, weight=lambda targets: …)`, one number for each row"
    for tensor in pair:
        targets = (tensor != _IGNORED).flatten(1).sum(1).tolist() if tensor.dim() > 1 else [0, 0]
        if sum(targets) and abs(targets[0] / sum(targets) - share) < _NOTHING:
            dims = "1" if tensor.dim() == 2 else str(tuple(range(1, tensor.dim())))
            hint = (
                f"give the weight of each sample: `Workload(…, weight=lambda targets: (targets != -100).sum({dims}))`"
            )
    return Reduction("weighted", f"{counts}: {numbers}", hint)


def remarks(
    workload: Workload,
    outputs: Sequence[Value],
    device: torch.device,
    *,
    rows: int,
    batch: int,
    inputs: Sequence[Tensor] = (),
    targets: Sequence[Tensor] = (),
) -> dict[str, str]:
    """Return a sentence for each kind of remark on training with the loss: sum, mixed, unknown or tokens.

    The loss gets `rows` samples at once, of a global batch of `batch`. Inputs and targets default to the example's.
    Raises ArgumentError if training would differ from training on one device, and the workload can be corrected.
    """
    found: dict[str, str] = {}
    inputs, targets = inputs or workload.example_inputs, targets or workload.example_targets
    one = workload.reduction(outputs, device, targets)
    if one.kind == "weighted" and rows < batch:
        raise ArgumentError(
            f"`loss` gets {pluralize(rows, 'sample')} at once, of a global batch of {batch}, but it is not the mean"
            f" over samples: {one.reason}",
            one.hint,
            code="mismatch",
        )
    if one.kind == "sum":
        found["sum"] = (
            "the loss is the sum over samples, not their mean: losses and gradients are sums over the global"
            f" batch of {batch}"
        )
    elif one.kind == "mixed" and rows < batch:
        found["mixed"] = (
            f"the loss depends on which samples it is given together, here {rows} of a global batch of {batch}: other"
            f" micro-batches and numbers of replicas train differently, and so does one device ({one.reason})"
        )
    elif one.kind == "unknown" and rows < batch:
        found["unknown"] = f"whether the loss is a mean over samples is unknown: {one.reason}"
    where = reads_its_targets(
        workload.flat_loss, outputs, [tensor.to(device) for tensor in inputs], [tensor.to(device) for tensor in targets]
    )
    if where:
        message, hint = _SHIFTED[where]
        if workload.loss is next_token_loss:
            raise ArgumentError(message, hint)
        found["tokens"] = f"{message}: {hint}"
    return found


def note(found: Reduction) -> str | None:
    """Return the remark on a loss for a profile, whose batches are not known yet. None for a mean."""
    return {
        "mean": None,
        "sum": "the loss is the sum over samples, not their mean: runs train on the sum over the global batch",
        "weighted": f"the loss is not the mean over samples, and runs in micro-batches refuse it: {found.reason};"
        f" {found.hint}",
        "mixed": "the loss depends on which samples it is given together, so runs train differently with other"
        f" micro-batches and numbers of replicas ({found.reason})",
        "unknown": f"whether the loss is a mean over samples is unknown: {found.reason}",
    }[found.kind]


_SHIFTED = {
    "current": (
        (
            "targets are the tokens at the same place of the input, and the loss doesn't shift them as Hugging Face's"
            " own loss does, so each place learns to repeat the token that it reads"
        ),
        "give the next tokens: inputs `tokens[:-1]` and targets `tokens[1:]`",
    ),
    "twice": (
        (
            "targets are the next tokens already, and the loss shifts them once more, so each place learns the token"
            " after the next"
        ),
        "give the inputs as targets, or a loss that doesn't shift",
    ),
}


def reads_its_targets(
    loss: FlatLoss, outputs: Sequence[Value], inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> Literal["", "current", "twice"]:
    """Find out whether tokens are predicted from themselves (`current`) or from two places before (`twice`).

    Hugging Face's models are given the tokens that they read as labels, and shift them in their own loss. Other losses
    are given the next tokens. Returns an empty text for both, and where nothing is known.
    """
    pairs = [
        (given, wanted)
        for given in inputs
        for wanted in targets
        if given.dim() > 1 and given.shape[1] > 1 and given.shape == wanted.shape and _are_tokens(given, wanted)
    ]
    relations = {(at, *_relation(*pair)) for at, pair in enumerate(pairs)}
    # If inputs match both relations, or none, the data does not show which one is meant.
    is_same, is_next = (any(one[place] for one in relations) for place in (1, 2))
    if is_same == is_next:
        return ""
    at = next(one[0] for one in relations if one[1] or one[2])
    wanted = pairs[at][1][:1]
    # The last position must have a target for its output to count.
    rows = tuple(
        torch.where(one == _IGNORED, one.clamp(min=0).amax(), one) if one is pairs[at][1] else one for one in targets
    )
    ignores_last = _ignores_last(loss.copied(), outputs, tuple(one[: len(wanted)] for one in rows), wanted.shape[1])
    if is_same and ignores_last is False:
        return "current"
    return "twice" if is_next and ignores_last else ""


def _are_tokens(*tensors: Tensor) -> bool:
    return not any(one.is_floating_point() or one.is_complex() or one.dtype == torch.bool for one in tensors)


def _relation(given: Tensor, wanted: Tensor) -> tuple[bool, bool]:
    """Return whether all targets that count are the inputs at their place, and whether at the next place."""
    counts = wanted != _IGNORED
    is_same = bool((given == wanted)[counts].all() and counts.any())
    here = counts[:, :-1]
    is_next = bool((given[:, 1:] == wanted[:, :-1])[here].all() and here.any())
    return is_same and not is_next, is_next and not is_same


def _ignores_last(loss: FlatLoss, outputs: Sequence[Value], targets: tuple[Tensor, ...], length: int) -> bool | None:
    """Return whether outputs at the last place of a text change nothing; None if that can't be computed."""
    with _aside(targets[0].device):
        for dtype in (None,) if _is_large(outputs) else (torch.float64, None):
            values = _made_up(outputs, targets, 0, dtype, is_wide=True)
            changed = list(values)
            for at, (value, one) in enumerate(zip(outputs, values, strict=True)):
                place = next((dim for dim, size in enumerate(value.shape, start=1) if size == length), None)
                if value.by_row and one.is_floating_point() and place is not None:
                    changed[at] = one.clone()
                    changed[at].select(place, length - 1).mul_(-1)
            if all(one is other for one, other in zip(values, changed, strict=True)):
                return None
            try:
                return _call(loss, values, targets) == _call(loss, changed, targets)
            except Exception:  # noqa: BLE001, S112 -- a loss may raise anything on made-up outputs
                continue
    return None


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Keep the states of torch's generators within this context, without gradients, autocast and warnings."""
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


def _pairs(targets: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield pairs of rows that are half a batch apart. A single row is paired with itself."""
    rows = len(targets[0])
    half = (rows + 1) // 2
    step = max(1, half // _MAX_PAIRS)
    for at in range(0, half, step):
        index = torch.tensor([at, (at + half) % rows], device=targets[0].device)
        yield tuple(one[index] for one in targets)


def _is_large(outputs: Sequence[Value]) -> bool:
    return sum(math.prod(value.shape) for value in outputs) >= _LARGE


def _made_up(
    outputs: Sequence[Value], targets: Sequence[Tensor], draw: int, dtype: torch.dtype | None, *, is_wide: bool
) -> list[Tensor]:
    """Draw random outputs for the rows of `targets`; the second row's are larger, so that losses of rows differ.

    `is_wide` ones are normal numbers, others lie between 0 and 1, as probabilities do.
    """
    device, rows = targets[0].device, len(targets[0])
    generator = torch.Generator(device).manual_seed(draw)
    values = []
    for value in outputs:
        shape = value.shape_of(rows)
        if not value.dtype.is_floating_point:
            values.append(torch.zeros(shape, dtype=value.dtype, device=device))
            continue
        kind = dtype or value.dtype
        if is_wide:
            # If both rows had about the same loss, a weighted mean would look like a mean. So the second row is larger.
            one = torch.randn(shape, generator=generator, dtype=kind, device=device)
            if value.by_row and rows > 1:
                one[1] *= 4
        else:
            one = 0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=kind, device=device)
            if value.by_row and rows > 1:
                one[1] *= one[1]
        values.append(one)
    return values


def _losses(
    loss: FlatLoss, outputs: Sequence[Value], values: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[_Number, _Number, _Number]:
    """Return the loss of two rows together, and of each alone. Raises _IncomparableError."""
    both = _call(loss, values, targets)
    if not math.isfinite(both):
        raise _IncomparableError(str(both))
    # A loss that draws random numbers differs between equal calls, so comparing rows would show nothing.
    if _call(loss, values, targets) != both:
        raise _IncomparableError("another number each time")
    one, other = (
        _call(
            loss,
            [tensor[at : at + 1] if value.by_row else tensor for value, tensor in zip(outputs, values, strict=True)],
            [tensor[at : at + 1] for tensor in targets],
        )
        for at in (0, 1)
    )
    return both, one, other


def _call(loss: FlatLoss, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> _Number:
    kind = next(one.dtype for one in outputs if one.is_floating_point())
    # Like `Workload.loss_of`, cast floating targets to the type of the outputs.
    cast = [one.to(kind) if one.is_floating_point() else one for one in targets]
    result = loss(outputs, cast)
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise _IncomparableError("no single number")
    return _Number(float(result), result.dtype.itemsize)
