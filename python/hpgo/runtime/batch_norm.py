"""Batch normalization over all replicas of a stage, so that a micro-batch is normalized as on one device.

Replicas exchange the count, mean and sum of squared deviations of their rows. The number of rows may differ between
replicas. A pass that is repeated for recomputation does not update the running statistics again.
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
    """A batch normalization after `install`. `group` has the replicas; None means that it normalizes alone."""

    group: Any

    def forward(self, given: Tensor) -> Tensor:
        """Normalize like torch's layer, but compute training statistics over the rows of all replicas."""
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                given, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if self.group is None or dist.get_world_size(self.group) == 1:
            output, mean, variance = _alone(given, self.weight, self.bias, self.eps)
            count = given.numel() // given.shape[1]
        else:
            output, mean, variance, counted = _Joined.apply(given, self.weight, self.bias, self.eps, self.group)
            count = int(counted)
        # A recomputed pass sees the same rows once more. Counting them twice would make the statistics depend on
        # whether the plan recomputes.
        if self.training and self.running_mean is not None and not is_again():
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum: Any = self.momentum
                if momentum is None:  # torch's cumulative average: each batch so far has the same weight
                    momentum = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                # Like torch, keep the unbiased variance in the running statistics, and normalize with the biased one.
                self.running_var.lerp_((variance * count / max(count - 1, 1)).to(self.running_var.dtype), momentum)
        return output

    def _check_input_dim(self, given: Tensor) -> None:
        """Accept any number of dimensions."""


def install(module: nn.Module) -> None:
    """Make the batch normalizations in `module` joinable. Each normalizes alone until it gets a group."""
    for found in module.modules():
        if type(found) in _KINDS:
            # Changing the class keeps the parameters, buffers and hooks of the module, and all references to it.
            found.__class__, found.group = JoinedBatchNorm, None


def joinable(module: nn.Module) -> Iterator[JoinedBatchNorm]:
    """Return the batch normalizations in `module` that `install` has replaced."""
    return (one for one in module.modules() if isinstance(one, JoinedBatchNorm))


def _alone(given: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of torch's own operation, and the mean and the biased variance of each channel."""
    output = functional.batch_norm(given, None, None, weight, bias, training=True, eps=eps)
    with torch.no_grad():
        variance, mean = torch.var_mean(given, dim=_others(given), correction=0)
    return output, mean, variance


def _others(given: Tensor) -> list[int]:
    """Return all dimensions except the channel dimension 1."""
    return [0, *range(2, given.dim())]


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """Reshape a tensor with one number per channel, so that it broadcasts against `like`."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- as autograd calls it
        ctx: Any, given: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Sums over many rows lose too many digits in 16 bits. Compute at least in 32 bits, and convert the result back.
        exact = given.to(torch.promote_types(given.dtype, torch.float32))
        own = torch.var_mean(exact, dim=_others(exact), correction=0)
        count = exact.new_tensor([exact.numel() // exact.shape[1]])
        # One all-gather of (count, mean, squared deviations) needs a single round. Reducing means first and deviations
        # after them would need two.
        packed = torch.cat([count, own[1], own[0] * count])
        found = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        with HERE.waiting(tuple(dist.get_process_group_ranks(group))):
            dist.all_gather(found, packed, group=group)
        parts = torch.stack(found)
        channels = exact.shape[1]
        counts, means, squared_deviations = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        # Chan's formula for merging variances. It is stable where E[x²] - E[x]² cancels.
        variance = (squared_deviations + counts * (means - mean) ** 2).sum(0) / total
        scale = (variance + eps).rsqrt()
        normal = (exact - _wide(mean, exact)) * _wide(scale, exact)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.group, ctx.dtype = group, given.dtype
        output = normal if weight is None else normal * _wide(weight.to(normal.dtype), normal)
        output = output if bias is None else output + _wide(bias.to(normal.dtype), normal)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(given.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight, total = ctx.saved_tensors
        gradient = gradient.to(normal.dtype)
        # The gradients of weight and bias stay local sums: the gradient reduction of the stage adds them up over
        # replicas later. Only the input gradient needs the sums over all rows now.
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
