"""Runs a workload's parts one after the other in one process, as the laws about cuts need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpgo.runtime.passes import running

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from hpgo.runtime import StageModule, Workload

torch.set_num_threads(1)


def random_stages(workload: Workload, chance: random.Random, maximum: int = 5) -> list[list[str]]:
    """The layers, cut at random places."""
    layers = list(workload.layers)
    cuts = sorted(chance.sample(range(1, len(layers)), chance.randint(1, min(maximum, len(layers) - 1))))
    return [layers[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]


def step(
    workload: Workload, parts: Sequence[StageModule], shares: Sequence[int], *, number: int = 0, cut_graph: bool = True
) -> tuple[torch.Tensor, dict[tuple[str, str], torch.Tensor]]:
    """The loss of a batch in micro-batches of `shares` rows, and the gradients; tied ones are added up.

    With `cut_graph`, each part's backward pass is called with what it is handed, as between processes.
    """
    begin, losses = 0, []
    for rows in shares:
        chosen = slice(begin, begin + rows)
        held: dict[str, Any] = {f"input:{at}": one[chosen] for at, one in enumerate(workload.example_inputs)}
        passes = []
        with running(step=number, samples=range(begin, begin + rows)):
            for part in parts:
                taken = []
                for value in part.takes:
                    tensor = held[value.name].detach() if cut_graph else held[value.name]
                    if not value.is_input:
                        assert (tensor.shape, tensor.dtype) == (value.shape_of(rows), value.dtype), value
                    taken.append(tensor.requires_grad_() if value.has_gradient and cut_graph else tensor)
                made = part(*taken, rows=rows)
                passes.append((taken, made))
                held |= {value.name: tensor for value, tensor in zip(part.gives, made, strict=True)}
        loss = workload.loss_of(made, tuple(one[chosen] for one in workload.example_targets))
        losses.append(loss.detach())
        gradients: dict[str, torch.Tensor] = {}
        if not cut_graph:
            loss.backward()
        for part, (taken, made) in zip(reversed(parts), reversed(passes), strict=True) if cut_graph else ():
            if part is parts[-1]:
                loss.backward()
            else:
                pairs = [
                    (tensor, gradients[value.name])
                    for value, tensor in zip(part.gives, made, strict=True)
                    if value.has_gradient and tensor.requires_grad and value.name in gradients
                ]
                if pairs:
                    torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
            gradients = {
                value.name: tensor.grad
                for value, tensor in zip(part.takes, taken, strict=True)
                if value.has_gradient and tensor.grad is not None
            }
        begin += rows
    return torch.stack(losses).sum(), summed(workload, parts)


def summed(workload: Workload, parts: Sequence[StageModule]) -> dict[tuple[str, str], torch.Tensor]:
    """Gradients by layer and name, those of a tie added up over the tensors that stand for it."""
    found = {
        (layer, name): tensor
        for part in parts
        for layer, tensors in part.by_layer().items()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.nn.Parameter) and tensor.grad is not None
    }
    gradients = {holder: tensor.grad for holder, tensor in found.items()}
    for holders in workload.tied_weights:
        ones = list({id(found[holder]): found[holder].grad for holder in holders if holder in found}.values())
        gradients |= dict.fromkeys(holders, torch.stack(ones).sum(0))
    return gradients  # type: ignore[return-value]


def check_close(
    found: dict[tuple[str, str], torch.Tensor], wanted: dict[tuple[str, str], torch.Tensor], within: float = 1e-12
) -> None:
    """The largest difference is at most `within` of the tensor's largest and the model's largest gradient together."""
    assert found.keys() == wanted.keys()
    largest = max(float(one.abs().max()) for one in wanted.values())
    for holder, one in wanted.items():
        difference = float((found[holder] - one).abs().max())
        assert difference <= within * (float(one.abs().max()) + largest), (holder, difference)
