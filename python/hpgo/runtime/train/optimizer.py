"""Optimizer steps of a rank: for all of its weights, or with ZeRO stage 1 for its shard of the shared weights."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.runtime.progress import HERE
from hpgo.runtime.user_functions import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpgo.runtime.train.gradients import Weight

    MakeOptimizer = Callable[..., torch.optim.Optimizer]
    """Function of a list of parameters, or of such a list and the list of their names, that returns an optimizer."""


_NAMED = ("sgd", "adam", "adamw", "adagrad", "rmsprop")


def optimizer_of(text: str) -> MakeOptimizer:
    """Return a function that creates the optimizer in `text`: `sgd:lr=0.05,momentum=0.9`, with options of torch.optim.

    `module:function` names a function without arguments that returns such a function. Raises ArgumentError for an
    unknown optimizer, or for options that it does not accept.

    >>> optimizer_of("sgd:lr=0.05")([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"]
    0.05
    """
    name, _, rest = text.partition(":")
    if name not in _NAMED and rest.isidentifier():
        return _made_by_user(text)
    known = {one.__name__.lower(): one for one in vars(torch.optim).values() if isinstance(one, type)}
    if name not in _NAMED:
        raise ArgumentError(f"there is no optimizer `{shorten(name)}`", did_you_mean(name, _NAMED), code="unknown_name")
    options = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        word = value.strip().lower()
        try:
            options[key.strip()] = word == "true" if word in {"true", "false"} else float(word)
        except ValueError:
            raise ArgumentError(
                f"option `{shorten(part)}` of `{name}` must be NAME=NUMBER", "write it like `sgd:lr=0.05,momentum=0.9`"
            ) from None

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return known[name](parameters, **options)

    # Create one for a dummy parameter, so that wrong options are reported before the ranks start.
    try:
        make([torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as failure:
        raise ArgumentError(f"`{shorten(text)}`: {failure}", "use the options of torch's optimizer") from failure
    return make


def _made_by_user(text: str) -> MakeOptimizer:
    with torch.random.fork_rng(devices=[]):  # its random numbers must not affect the run
        make = made_by(text, "optimizer", seed=0, wanted="a function of parameters that returns an optimizer")
    if not callable(make):
        raise ArgumentError(
            f"`{shorten(text)}` returns {safe_repr(make)}, which can't be called",
            "return a function of parameters that returns an optimizer: `lambda p: torch.optim.AdamW(p, lr=1e-4)`",
            code="user_code",
        )
    found: MakeOptimizer = make
    return found


def _takes_names(make: MakeOptimizer) -> bool:
    """Return whether a function has two arguments without defaults: parameters, and their names.

    >>> _takes_names(torch.optim.SGD), _takes_names(lambda parameters, names: torch.optim.SGD(parameters))
    (False, True)
    """
    try:
        arguments = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some functions of other languages have no signature
        return False
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return sum(one.kind in positional and one.default is one.empty for one in arguments) == 2


def owners(weights: Sequence[Weight]) -> list[tuple[int, list[Weight]]]:
    """Assign each weight of several ranks to the rank that steps it: the largest first, to the least loaded holder.

    All holders compute the same assignment in the same order. Weights of one entry have the same holders and number
    format, so one broadcast sends them.
    """
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    found: dict[tuple[tuple[int, ...], int, torch.dtype], list[Weight]] = {}
    # The sort is stable, so equal sizes keep the layer order, which all ranks share.
    for weight in sorted(weights, key=lambda one: -one.copies[0].numel()):
        if len(weight.ranks) > 1:
            load = loads.setdefault(weight.ranks, dict.fromkeys(weight.ranks, 0))
            owner = min(weight.ranks, key=lambda rank: load[rank])
            load[owner] += weight.copies[0].numel()
            found.setdefault((weight.ranks, owner, weight.copies[0].dtype), []).append(weight)
    return [(owner, owned) for (_, owner, _), owned in found.items()]


class ShardedOptimizer:
    """Optimizer of the weights that a rank owns, which also receives the weights that other ranks own."""

    def __init__(
        self,
        make: MakeOptimizer,
        weights: Sequence[Weight],
        groups: Mapping[tuple[int, ...], Any],
        *,
        shard: bool,
        names: Callable[[], Mapping[tuple[str, str], tuple[str, ...]]],
    ) -> None:
        """Create the optimizer by `make`. `names` returns the names in the model by those in layers."""
        rank = dist.get_rank()
        self._groups = groups
        self._owned = owners(weights) if shard else []
        elsewhere = {id(weight) for owner, theirs in self._owned if owner != rank for weight in theirs}
        self.stepped = [weight for weight in weights if id(weight) not in elsewhere]
        """Weights that this rank's optimizer steps, in layer order."""
        # Every copy of a weight is a parameter with the same gradient, so all copies stay equal.
        parameters = [copy for weight in self.stepped for copy in weight.copies]
        self.optimizer: torch.optim.Optimizer | None = None
        if parameters:  # an idle rank has none, and optimizers refuse that
            self.optimizer = make(parameters, self._names(names())) if _takes_names(make) else make(parameters)
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise ArgumentError(
                    f"the optimizer is {safe_repr(self.optimizer)}",
                    "give a function of parameters that returns one: `lambda p: torch.optim.AdamW(p, lr=1e-4)`",
                )

    def _names(self, in_model: Mapping[tuple[str, str], tuple[str, ...]]) -> list[str]:
        """Return the name in the model of each parameter. As in torch, a tied weight has the first of its names."""
        held = [weight.name for weight in self.stepped for _ in weight.copies]
        return [(in_model.get(one) or (".".join(one),))[0] for one in held]

    def step(self) -> None:
        """Run one optimizer step. Afterwards, each rank has all of its weights in their new state."""
        HERE.does("the step of the optimizer")
        if self.optimizer is not None:
            self.optimizer.step()
        arriving = []
        # Start all broadcasts before waiting for any, so that they overlap.
        for owner, weights in self._owned:
            flat = torch.cat([weight.copies[0].detach().reshape(-1) for weight in weights])
            wait = dist.broadcast(flat, src=owner, group=self._groups[weights[0].ranks], async_op=True)
            arriving.append((wait, flat, weights))
        for wait, flat, weights in arriving:
            with HERE.waiting(weights[0].ranks):
                wait.wait()
            sizes = [weight.copies[0].numel() for weight in weights]
            for weight, part in zip(weights, flat.split(sizes), strict=True):
                for copy in weight.copies:
                    copy.detach().copy_(part.view(copy.shape))
