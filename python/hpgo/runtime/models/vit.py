"""ViT (Dosovitskiy et al., 2021): an encoder whose tokens are the patches of an image."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from hpgo.errors import ArgumentError
from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.models.transformer import DEVIATION, NORM_EPS, Block, add_quarters, begin, check_heads
from hpgo.runtime.modules import Network


def vit(
    *, layers: int = 12, hidden: int = 768, heads: int = 12, image: int = 224, patch: int = 16, classes: int = 1000,
    dropout: float = 0.0, norm_eps: float = NORM_EPS, distilled: bool = False, quarters: bool = False, batch: int = 8,
) -> BuiltModel:  # fmt: skip
    """Return ViT with `layers` blocks, which classifies images of `image` x `image` in squares of `patch`.

    With `distilled`, there is a distillation token beside the class token (DeiT, Touvron et al., 2021). With
    `quarters`, each block becomes four layers, and the first and last one include patches and head.
    """
    check_heads(hidden, heads)
    if image % patch:
        raise ArgumentError(
            f"image is {image}, but it must be a multiple of patch, {patch}",
            f"set image to {patch * max(1, image // patch)}",
        )
    patches = partial(Patches, image, patch, hidden, dropout, wholes=2 if distilled else 1)
    block = partial(Block, hidden, heads, layers, dropout, norm_first=True, norm_eps=norm_eps)
    head, names = partial(Head, hidden, classes, norm_eps), [f"block-{number}" for number in range(1, layers + 1)]
    network = Network()
    if quarters:
        add_quarters(network, names, block, before=patches, behind=head)
    else:
        network.add("patches", patches, "input:0")
        for last, name in pairwise(["patches", *names]):
            network.add(name, block, last)
        network.add("head", head, names[-1])
    images, labels = seeded(lambda: (torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))))
    return BuiltModel(network, (images,), (labels,), nn.functional.cross_entropy)


class Patches(nn.Module):
    """Embedding of images `(rows, 3, image, image)`: the class tokens, then one vector per patch."""

    def __init__(self, image: int, patch: int, hidden: int, dropout: float, *, wholes: int = 1) -> None:
        super().__init__()
        # A convolution whose stride is its size is a linear layer on each patch.
        self.convolve = nn.Conv2d(3, hidden, patch, stride=patch)
        self.whole = nn.Parameter(torch.zeros(wholes, hidden))
        self.positions = nn.Parameter(DEVIATION * torch.randn((image // patch) ** 2 + wholes, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return vectors of the shape `(rows, wholes + patches, hidden)`."""
        patches = self.convolve(images).flatten(2).transpose(1, 2)
        whole = self.whole.expand(len(images), -1, -1)
        output: torch.Tensor = self.dropout(torch.cat([whole, patches], dim=1) + self.positions)
        return output


class Head(nn.Module):
    """A norm, then logits over the classes, from the class token."""

    def __init__(self, hidden: int, classes: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, eps=norm_eps)
        self.linear = begin(nn.Linear(hidden, classes))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape `(rows, classes)`."""
        # Only the class token is classified. The published head of the distillation token is not loaded.
        scores: torch.Tensor = self.linear(self.norm(given[:, 0]))
        return scores
