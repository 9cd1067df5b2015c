"""What a file of checks has found, handed to whoever started it."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from small_models import SmallModel

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


def start_each(models: Iterable[SmallModel], start: Callable[[SmallModel, Path], Start]) -> None:
    """Starts the models that the command line names after the file for results, or all, and writes what was found."""
    # Collections in the forks would otherwise go through all that was imported, and copy its pages.
    gc.collect()
    gc.freeze()
    wanted, rows = set(_TO[1:]), []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            if not wanted or model.name in wanted:
                began_s = time.monotonic()
                rows.append(start(model, Path(folder)))
                print(f"{model.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
    done(*rows)
