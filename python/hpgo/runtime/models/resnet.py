"""ResNet-50 (He et al., 2016): sixteen bottleneck blocks, with the ids of its profile."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.modules import Network

_BLOCKS = (3, 4, 6, 3)


def resnet_50(*, width: int = 64, classes: int = 1000, image: int = 224, batch: int = 8) -> BuiltModel:
    """Return ResNet-50 with `width` channels inside the first blocks, for images of `image` x `image`."""
    network = Network().add("Input", nn.Identity, "input:0", everywhere=True)
    network.add("stem", partial(_stem, width), "Input")
    network.add("pool", partial(nn.MaxPool2d, 3, stride=2, padding=1), "stem")
    inputs, last = width, "pool"
    for group, count in enumerate(_BLOCKS, start=1):
        inner = width * 2 ** (group - 1)
        for number in range(1, count + 1):
            # The pooling before group 1 has halved the images, so that group starts without a stride.
            stride = 2 if number == 1 and group > 1 else 1
            network.add(f"block-{group}-{number}", partial(Bottleneck, inputs, inner, stride), last)
            inputs, last = 4 * inner, f"block-{group}-{number}"
    network.add("average-pool", partial(nn.AdaptiveAvgPool2d, 1), last)
    network.add("linear", lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes)), "average-pool")
    images, labels = seeded(lambda: (torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))))
    return BuiltModel(network, (images,), (labels,), nn.functional.cross_entropy)


def _stem(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class Bottleneck(nn.Module):
    """Residual block: three convolutions through `inner` channels to `4 * inner`."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.main = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        # A convolution on the shortcut adapts shape and channels. All other blocks add their input as it is.
        if inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return images with `4 * inner` channels."""
        return torch.relu(self.main(given) + self.shortcut(given))
