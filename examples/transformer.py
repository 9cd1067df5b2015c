"""The profile of a transformer from its shapes, where none was measured: `python examples/transformer.py model.yaml`.

The shapes below are those of a model of 70 billion weights. Times are operations over the rate that a device reaches,
sizes are values in 16 bits; what a block keeps for its backward pass is counted after Korthikanti et al., 2022, without
scores of attention, which fast kernels compute again. Measured times are better: see docs/profiles.md.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import hpgo

BLOCKS, HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, WORDS = 80, 8192, 28672, 64, 8, 128_256
SEQUENCE = 4096  # tokens of a sample
OPERATIONS_PER_S = 400e12  # what one device reaches, not what its data sheet says
BYTES = 2  # of a value


def layer(name: str, weights: float, operations: float, output: float, saved_bytes: float) -> hpgo.Layer:
    """One layer, for a batch of one sample: `operations` of a forward pass, which the backward pass has twice."""
    forward_s = operations / OPERATIONS_PER_S
    return hpgo.Layer(
        name, name, (forward_s,), (2 * forward_s,), (BYTES * output,), BYTES * weights, saved_bytes=(saved_bytes,)
    )


def transformer() -> hpgo.Profile:
    """What embeds, a row of equal blocks, and what predicts."""
    values = SEQUENCE * HIDDEN
    attention = 2 * HIDDEN * HIDDEN * (1 + KEY_HEADS / HEADS)
    weights = attention + 3 * HIDDEN * FEED_FORWARD
    operations = 2 * SEQUENCE * weights + 2 * SEQUENCE * values  # half of the scores are masked
    words = WORDS * HIDDEN
    layers = (
        layer("embedding", words, 0, values, BYTES * SEQUENCE),
        *(layer(f"layers.{block}", weights, operations, values, 34 * values) for block in range(BLOCKS)),
        layer("head", words, 2 * SEQUENCE * words, 1, 4 * SEQUENCE * WORDS),
    )
    edges = tuple(pairwise(each.id for each in layers))
    return hpgo.Profile("llama-70b", (1,), layers, edges, source="examples/transformer.py")


if __name__ == "__main__":
    hpgo.write_profile(transformer(), sys.argv[1])
