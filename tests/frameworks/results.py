"""What a file of checks has found, handed to whoever started it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
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


def done(*results: Result) -> None:
    """Writes them where the first argument says."""
    text = json.dumps([asdict(result) for result in results], indent=2)
    if _TO:
        Path(_TO[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
