"""VGG-16 and VGG-19: five groups of convolutions, each with a pooling layer at its end, then linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import FLOAT_BYTES, Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

_CHANNELS = (64, 128, 256, 512, 512)
_LINEAR = (4096, 4096, 1000)


def vgg_16() -> Profile:
    """Return VGG-16 in PipeDream's profile. The batch size of 128 follows from the sizes of its outputs."""
    batch_size = 128
    build = Builder(batch_size)
    # Forward and backward ms of each group's convolutions and their activations, then of its pooling.
    groups = (
        ((22.307, 24.613), (4.446, 5.553), (46.201, 113.330), (4.455, 5.311), (3.795, 5.579)),
        ((15.155, 39.648), (2.359, 2.738), (22.062, 53.379), (2.513, 2.620), (2.211, 2.788)),
        ((10.814, 18.335), (1.377, 1.380), (17.458, 27.023), (1.640, 1.463), (14.245, 33.888), (1.549, 1.321),
         (1.169, 1.513)),
        ((9.249, 14.574), (1.026, 0.696), (15.359, 21.900), (0.848, 0.679), (11.775, 28.670), (0.881, 0.642),
         (0.802, 0.781)),
        ((5.608, 7.381), (0.784, 0.266), (4.070, 7.396), (0.463, 0.190), (4.042, 8.648), (0.455, 0.175),
         (0.553, 0.234)),
    )  # fmt: skip
    linear: tuple[tuple[tuple[float, float], ...], ...] = (
        ((2.475, 4.575), (0.377, 0.030)),
        ((0.709, 0.734), (0.277, 0.032)),
        ((0.393, 0.548),),
    )
    width, inputs = 224, 3
    last = build.add("Input", ms=(17.972, 0), activation_bytes=batch_size * inputs * width**2 * FLOAT_BYTES)
    for group, (channels, times) in enumerate(zip(_CHANNELS, groups, strict=True), start=1):
        output_bytes = batch_size * channels * width**2 * FLOAT_BYTES
        for index, (convolve_ms, activate_ms) in enumerate(zip(times[:-1:2], times[1::2], strict=True), start=1):
            name = f"conv-{group}-{index}"
            last = build.add(
                name,
                last,
                ms=convolve_ms,
                activation_bytes=output_bytes,
                parameter_bytes=(9 * inputs + 1) * channels * FLOAT_BYTES,
            )
            last = build.add(f"{name}-relu", last, ms=activate_ms, activation_bytes=output_bytes)
            inputs = channels
        width //= 2
        last = build.add(f"pool-{group}", last, ms=times[-1], activation_bytes=output_bytes / 4)
    size = build.add("batch-size", last, activation_bytes=4)
    inputs *= width**2
    last = build.add("flatten", last, size, activation_bytes=batch_size * inputs * FLOAT_BYTES)
    for index, (features, (multiply_ms, *activations_ms)) in enumerate(zip(_LINEAR, linear, strict=True), start=1):
        output_bytes = batch_size * features * FLOAT_BYTES
        last = build.add(
            f"linear-{index}",
            last,
            ms=multiply_ms,
            activation_bytes=output_bytes,
            parameter_bytes=(inputs + 1) * features * FLOAT_BYTES,
        )
        for activation_ms in activations_ms:  # the last linear layer has none
            last = build.add(f"linear-{index}-relu", last, ms=activation_ms, activation_bytes=output_bytes)
            last = build.add(f"linear-{index}-dropout", last, activation_bytes=output_bytes)
        inputs = features
    return build.profile("vgg-16", "msr-fiddle/pipedream (Narayanan et al., SOSP 2019)")


def vgg_19() -> Profile:
    """Return VGG-19 in DAPPLE's profile at batch size 32. A backward pass takes twice the time of its forward pass."""
    batch_size = 32
    build = Builder(batch_size)
    # Forward ms of each group's convolutions, then of its pooling; megabytes of one sample's output.
    groups = (
        ((3.4, 7.2, 0.65), 12),
        ((3.4, 5.0, 0.3), 6),
        ((2.3, 3.55, 3.55, 3.55, 0.165), 3),
        ((1.71, 2.9, 2.88, 2.86, 0.1), 1.5),
        ((0.965, 0.965, 0.96, 0.965, 0.03), 0.375),
    )
    inputs = 3
    last = build.add("Input", ms=(3.4, 0), activation_bytes=19e6)
    for group, (channels, (times, output_mb)) in enumerate(zip(_CHANNELS, groups, strict=True), start=1):
        *convolutions_ms, pool_ms = times
        for index, ms in enumerate(convolutions_ms, start=1):
            last = build.add(
                f"conv-{group}-{index}",
                last,
                ms=(ms, 2 * ms),
                activation_bytes=batch_size * output_mb * 1e6,
                parameter_bytes=_as_published((9 * inputs + 1) * channels),
            )
            inputs = channels
        last = build.add(
            f"pool-{group}", last, ms=(pool_ms, 2 * pool_ms), activation_bytes=batch_size * output_mb * 1e6 / 4
        )
    inputs *= 7 * 7
    for index, (features, ms, output_bytes) in enumerate(
        zip(_LINEAR, (0.45, 0.1, 0.05), (500_000, 500_000, 128_000), strict=True), start=1
    ):
        last = build.add(
            f"linear-{index}",
            last,
            ms=(ms, 2 * ms),
            activation_bytes=output_bytes,
            parameter_bytes=_as_published((inputs + 1) * features),
        )
        inputs = features
    build.add("loss", last, ms=(0.01, 0.2), activation_bytes=2e6)
    return build.profile("vgg-19", "AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021)")


def _as_published(parameters: int) -> int:
    """Return the bytes of `parameters` as published, which are the mebibytes times a million."""
    return parameters * FLOAT_BYTES * 10**6 // 2**20
