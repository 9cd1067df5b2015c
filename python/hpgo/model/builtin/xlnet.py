"""XLNet: a chain of equal layers that all read three side inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

_SOURCE = "AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021)"
_MB = 1e6


def xlnet(layers: int) -> Profile:
    """Return XLNet with `layers` two-stream layers. Times and (rounded) megabytes of one sample are as published."""
    build = Builder(batch_size=1)
    inputs = build.add("Input", ms=(17, 0), activation_bytes=4000)
    tokens = build.add("token-embedding", inputs, ms=(0.007, 0), activation_bytes=2 * _MB, parameter_bytes=131 * _MB)
    positions = build.add("position-dropout", inputs, tokens, ms=(0.023, 0), activation_bytes=4 * _MB)
    segments = build.add("segment-one-hot", inputs, ms=(0.017, 0), activation_bytes=2 * _MB)
    mask = build.add("attention-mask", inputs, activation_bytes=1 * _MB)
    last = build.add("embedding-dropout", tokens, ms=(0.023, 0), activation_bytes=2 * _MB)
    for index in range(1, layers + 1):
        last = build.add(
            f"layer-{index}",
            last,
            positions,
            segments,
            mask,
            ms=(3.4, 4.9),
            activation_bytes=2 * _MB,
            parameter_bytes=52 * _MB,
        )
    build.add("loss", last, ms=(0.46, 1.38), activation_bytes=2000)
    return build.profile(f"xlnet-{layers}", _SOURCE)
