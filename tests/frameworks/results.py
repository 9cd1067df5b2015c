"""What a file of checks has found, handed to whoever started it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

_TO = sys.argv[1:]  # before a framework's parser of arguments is given its own


@dataclass(frozen=True)
class Result:
    """A row of the table in research/framework-tables.md."""

    target: str
    ran: str
    """Of what version."""
    read_back: str
    built: str = ""
    trained: str = ""
    ways: str = ""
    """Of transformers, read back."""


@dataclass(frozen=True)
class Start:
    """A model that was started with a release of a framework, or refused: a part of a row of the table of starts."""

    model: str
    framework: str
    release: str
    plan: str = ""
    """The parallelism configuration in words."""
    ranks: int = 0
    """Number of processes that trained."""
    compared: int = 0
    """Number of values of `config.json` that the framework understood as they are meant."""
    parameters: int = 0
    """Parameters of the built model, which equal hpgo's count."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    refused: str = ""
    """Reason of a refusal before the search, instead of everything else."""


def done(*results: Result | Start) -> None:
    """Writes them where the first argument says."""
    text = json.dumps([asdict(result) for result in results], indent=2)
    if _TO:
        Path(_TO[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
