"""Trains a small GPT, letter by letter, on the pages in docs/: a model and its data for `hpgo profile` and `hpgo run`.

    cd examples
    hpgo profile train_gpt:model -o gpt.yaml
    hpgo plan gpt.yaml --cluster here.yaml --global-batch-size 24 -o plan.json
    hpgo run plan.json --workload train_gpt:model --data train_gpt:text --optimizer adamw:lr=2e-3
    torchrun --nproc-per-node 4 train_gpt.py plan.json

docs/train.md goes through it, and tells what comes of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hpgo
import hpgo.runtime

BLOCKS, HIDDEN, HEADS, LENGTH, LETTERS = 4, 64, 4, 64, 256


class Embedding(nn.Module):
    """Letters and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, HIDDEN)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """`(samples, letters)` to vectors of each."""
        return self.letters(letters) + self.places


class Block(nn.Module):
    """Attention to the letters before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.project = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Vectors to vectors."""
        heads = self.attention(self.before(given)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(*heads, is_causal=True)
        given = given + self.project(read.transpose(1, 2).flatten(2))
        return given + self.narrow(functional.gelu(self.wide(self.between(given))))


def loss(logits: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
    """The mean over samples, all of which have as many letters."""
    return functional.cross_entropy(logits.flatten(0, 1), letters.flatten())


def layers() -> dict[str, nn.Module]:
    """The model: modules that feed each other in order, by the ids that profiles and plans know them by."""
    blocks = {f"block-{number}": Block() for number in range(1, BLOCKS + 1)}
    head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, LETTERS))
    return {"embedding": Embedding(), **blocks, "head": head}


def model() -> hpgo.runtime.Workload:
    """The layers, an example of what they take and give, and the loss."""
    example = torch.zeros(2, LENGTH, dtype=torch.int64)
    return hpgo.runtime.Workload(layers(), example, example, loss)


class Text:
    """Pieces of a text as pairs: letters, and for each the one that follows."""

    def __init__(self, text: bytes) -> None:
        self.letters = torch.tensor(list(text))

    def __len__(self) -> int:
        return (len(self.letters) - 1) // LENGTH

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.letters[at * LENGTH : (at + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


def text() -> Text:
    """The pages of docs/."""
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    return Text(b"".join(page.read_bytes() for page in pages))


def train(plan: str, steps: int) -> None:
    """One rank's part; all of it where the plan has one device."""
    with hpgo.runtime.Pipeline(
        plan, "train_gpt:model", optimizer=lambda weights: torch.optim.AdamW(weights, lr=2e-3)
    ) as pipeline:
        pages = text()
        while pipeline.steps < steps:
            for inputs, targets in pipeline.loader(pages):
                now = pipeline.step(inputs, targets)
                if pipeline.rank == 0 and pipeline.steps % 20 == 0:
                    print(f"step {pipeline.steps}: loss {now:.4f}")
                if pipeline.steps == steps:
                    break


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
