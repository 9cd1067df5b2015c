"""BERT-Large with 24 or 48 layers: a chain of equal layers that all read the attention mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import FLOAT_BYTES, Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

_SOURCE = "AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021)"
_HIDDEN = 1024
_VOCABULARY, _POSITIONS, _SEGMENTS = 30_522, 512, 2
_OUTPUT_BYTES = 528 * _HIDDEN * FLOAT_BYTES
"""Output size of one sample in bytes."""
_MASK_BYTES = 6 * 384 * 384 * FLOAT_BYTES
"""Mask size in bytes at both batch sizes: the published 48-layer profile kept the value of six samples."""


def bert(layers: int, *, batch_size: int, layer_ms: tuple[float, float]) -> Profile:
    """Return BERT with `layers` encoder layers. `layer_ms` are the ms of a layer's forward and backward pass."""
    build = Builder(batch_size)
    output_bytes = batch_size * _OUTPUT_BYTES
    tokens = build.add("tokens", ms=(0.01, 0), activation_bytes=6 * 384 * FLOAT_BYTES)
    mask = build.add("attention-mask", tokens, ms=(0.011, 0), activation_bytes=_MASK_BYTES)
    embedding = build.add(
        "embedding",
        tokens,
        ms=(0.056, 0),
        activation_bytes=output_bytes,
        parameter_bytes=(_VOCABULARY + _POSITIONS + _SEGMENTS + 2) * _HIDDEN * FLOAT_BYTES,
    )
    last = build.add("reshape", embedding, activation_bytes=output_bytes)
    for index in range(1, layers + 1):
        last = build.add(
            f"encoder-{index}",
            last,
            mask,
            ms=layer_ms,
            activation_bytes=output_bytes,
            # Attention has 4 h² parameters, the feed-forward network 8 h²; biases and the two norms have 13 h.
            parameter_bytes=(12 * _HIDDEN**2 + 13 * _HIDDEN) * FLOAT_BYTES,
        )
    build.add("pooler", last, parameter_bytes=(_HIDDEN**2 + _HIDDEN) * FLOAT_BYTES)
    return build.profile(f"bert-{layers}", _SOURCE)
