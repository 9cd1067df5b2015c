"""How much of a random test runs: a share in every run, and all of it by `make laws`."""

from __future__ import annotations

import os


def examples(maximum: int, share: int = 3) -> int:
    """Return the number of random examples: `maximum` if HPGO_LAWS_EXAMPLES is set, and otherwise one in `share`."""
    return maximum if "HPGO_LAWS_EXAMPLES" in os.environ else maximum // share
