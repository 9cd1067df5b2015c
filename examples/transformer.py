"""Write a profile of a transformer from its shapes, without a measurement: `python examples/transformer.py model.yaml`.

The shapes below belong to a model with 70 billion weights. A time is a number of operations over the rate that a device
reaches. Values have 16 bits. The saved activations of a block are counted as in Korthikanti et al., 2022, without
attention scores, which fused kernels recompute. Measured times are more accurate: see docs/profiles.md.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import hpgo

BLOCKS, HIDDEN, FEED_FORWARD, HEADS, KEY_HEADS, WORDS = 80, 8192, 28672, 64, 8, 128_256
SEQUENCE = 4096  # tokens of a sample
OPERATIONS_PER_S = 400e12  # rate that one device reaches, not the peak of its datasheet
BYTES = 2  # of a value


def layer(name: str, weights: float, operations: float, output: float, saved_bytes: float) -> hpgo.Layer:
    """Return a layer with times for a batch of one sample. The backward pass takes twice the `operations`."""
    forward_s = operations / OPERATIONS_PER_S
    return hpgo.Layer(
        name, name, (forward_s,), (2 * forward_s,), (BYTES * output,), BYTES * weights, saved_bytes=(saved_bytes,)
    )


def transformer() -> hpgo.Profile:
    """Return the profile of the model: an embedding, a chain of equal blocks and a head."""
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
