"""ResNet-50: a chain of sixteen bottleneck blocks.

A cut inside a block also crosses the shortcut, so no stage gains by ending there. Each block is one layer here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import FLOAT_BYTES, Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

# Each row has the inner channels of a group of blocks, and the forward and backward ms of each block, summed over its
# layers.
_GROUPS = (
    (64, ((18.284, 24.659), (12.754, 20.337), (12.641, 22.954))),
    (128, ((16.174, 30.097), (9.029, 11.295), (8.527, 11.275), (8.450, 13.123))),
    (256, ((14.797, 25.273), (8.364, 9.019), (7.313, 9.027), (7.256, 9.023), (7.129, 9.055), (7.313, 10.012))),
    (512, ((12.869, 22.564), (8.831, 8.170), (6.486, 12.764))),
)


def resnet_50() -> Profile:
    """Return ResNet-50 in PipeDream's profile. The batch size of 128 follows from the sizes of its outputs."""
    batch_size = 128
    build = Builder(batch_size)

    def image_bytes(channels: int, width: int) -> int:
        return batch_size * channels * width**2 * FLOAT_BYTES

    last = build.add("Input", ms=(18.962, 0), activation_bytes=image_bytes(3, 224))
    last = build.add(
        "stem",
        last,
        ms=(14.009, 9.198),
        activation_bytes=image_bytes(64, 112),
        parameter_bytes=(7 * 7 * 3 * 64 + _normalise(64)) * FLOAT_BYTES,
    )
    last = build.add("pool", last, ms=(1.204, 2.498), activation_bytes=image_bytes(64, 56))
    inputs, width = 64, 56
    for group, (inner, blocks) in enumerate(_GROUPS, start=1):
        outputs = 4 * inner
        for index, ms in enumerate(blocks, start=1):
            parameters = inputs * inner + 9 * inner**2 + inner * outputs + 2 * _normalise(inner) + _normalise(outputs)
            if index == 1:  # the shortcut changes the number of channels
                parameters += inputs * outputs + _normalise(outputs)
            last = build.add(
                f"block-{group}-{index}",
                last,
                ms=ms,
                activation_bytes=image_bytes(outputs, width),
                parameter_bytes=parameters * FLOAT_BYTES,
            )
            inputs = outputs
        width //= 2
    last = build.add("average-pool", last, ms=(0.636, 0.403), activation_bytes=image_bytes(inputs, 1))
    build.add(
        "linear",
        last,
        ms=(0.422, 0.185),
        activation_bytes=image_bytes(1000, 1),
        parameter_bytes=(inputs + 1) * 1000 * FLOAT_BYTES,
    )
    return build.profile("resnet-50", "msr-fiddle/pipedream (Narayanan et al., SOSP 2019)")


def _normalise(channels: int) -> int:
    """Return the number of parameters of a batch norm."""
    return 2 * channels
