"""How much of a random test runs: a share in every run, and all of it by `make laws`."""

from __future__ import annotations

import os


def examples(most: int, share: int = 3) -> int:
    """Return the number of random examples: `most` if HPGO_LAWS_EXAMPLES is set, and otherwise one in `share`."""
    return most if "HPGO_LAWS_EXAMPLES" in os.environ else most // share
