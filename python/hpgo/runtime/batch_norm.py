"""Batch normalisation over all replicas of a stage, so that a micro-batch is normalised as on one device.

Replicas exchange count, mean and sum of squares of their rows, which may differ in number. A pass that is repeated for
recomputation leaves the running statistics as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hpgo.runtime.passes import is_again
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class JoinedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What `install` makes of a batch normalisation; `group` are the replicas, None where each is by itself."""

    group: Any

    def forward(self, given: Tensor) -> Tensor:
        """As before, in training over the rows of all replicas."""
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                given, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if self.group is None or dist.get_world_size(self.group) == 1:
            made, mean, variance = _alone(given, self.weight, self.bias, self.eps)
            count = given.numel() // given.shape[1]
        else:
            made, mean, variance, counted = _Joined.apply(given, self.weight, self.bias, self.eps, self.group)
            count = int(counted)
        if self.training and self.running_mean is not None and not is_again():
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                share: Any = self.momentum
                if share is None:  # each batch counts as much as any before it
                    share = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_((variance * count / max(count - 1, 1)).to(self.running_var.dtype), share)
        return made

    def _check_input_dim(self, given: Tensor) -> None:
        """Any number of dimensions will do."""


def install(module: nn.Module) -> None:
    """Makes batch normalisations in `module` ready for replicas; each is by itself until it is given a group."""
    for found in module.modules():
        if type(found) in _KINDS:
            found.__class__, found.group = JoinedBatchNorm, None


def joinable(module: nn.Module) -> Iterator[JoinedBatchNorm]:
    """All batch normalisations in `module` that `install` has made ready."""
    return (one for one in module.modules() if isinstance(one, JoinedBatchNorm))


def _alone(given: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's own operation makes, with mean and variance."""
    made = functional.batch_norm(given, None, None, weight, bias, training=True, eps=eps)
    with torch.no_grad():
        variance, mean = torch.var_mean(given, dim=_others(given), correction=0)
    return made, mean, variance


def _others(given: Tensor) -> list[int]:
    """All dimensions but that of channels."""
    return [0, *range(2, given.dim())]


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """Numbers of channels, to be multiplied with `like`."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- as autograd calls it
        ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = given.to(torch.promote_types(given.dtype, torch.float32))
        own = torch.var_mean(exact, dim=_others(exact), correction=0)
        count = exact.new_tensor([exact.numel() // exact.shape[1]])
        packed = torch.cat([count, own[1], own[0] * count])
        found = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        with HERE.waiting(tuple(dist.get_process_group_ranks(group))):
            dist.all_gather(found, packed, group=group)
        parts = torch.stack(found)
        channels = exact.shape[1]
        counts, means, squares = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(0) / total
        scale = (variance + eps).rsqrt()
        normal = (exact - _wide(mean, exact)) * _wide(scale, exact)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.group, ctx.dtype = group, given.dtype
        made = normal if weight is None else normal * _wide(weight.to(normal.dtype), normal)
        made = made if bias is None else made + _wide(bias.to(normal.dtype), normal)
        ctx.mark_non_differentiable(mean, variance, total)
        return made.to(given.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight, total = ctx.saved_tensors
        gradient = gradient.to(normal.dtype)
        for_bias = gradient.sum(_others(gradient))
        for_weight = (gradient * normal).sum(_others(gradient))
        sums = torch.stack([for_bias, for_weight])
        with HERE.waiting(tuple(dist.get_process_group_ranks(ctx.group))):
            dist.all_reduce(sums, group=ctx.group)
        inner = gradient - _wide(sums[0] / total, gradient) - normal * _wide(sums[1] / total, gradient)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        inputs = (inner * _wide(factor, gradient)).to(ctx.dtype)
        if weight is None:
            return inputs, None, None, None, None
        return inputs, for_weight.to(weight.dtype), for_bias.to(weight.dtype), None, None
