"""Orders of schedules, one line a rank, as `Schedule.save` and PyTorch write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guided import fuzz, reader
from mutations import words

import hpgo

if TYPE_CHECKING:
    from pathlib import Path


def seeds() -> dict[str, bytes]:
    """A small schedule of each family, some of them with bubbles or transfers."""
    texts: dict[str, str] = {}
    for family in hpgo.schedules():
        made = hpgo.schedule(family.name, ranks=2, micro_batches=4)
        texts[family.name] = made.to_text(in_steps=family.chains == 2)
        if family.trains and family.chains == 1:
            texts[f"{family.name}-transfers"] = "\n".join(",".join(line) for line in made.with_transfers())
    return {name: text.encode() for name, text in texts.items()}


def _read(path: Path) -> None:
    made = hpgo.Schedule.read(path)
    made.to_text(in_steps=True)
    made.with_transfers()


if __name__ == "__main__":
    fuzz(seeds, words, reader("schedule.csv", _read))
