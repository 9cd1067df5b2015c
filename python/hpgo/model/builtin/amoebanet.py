"""AmoebaNet-D with 18 or 36 cells. Each cell reads the outputs of the two cells before it."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING

from hpgo.model.builtin.builder import FLOAT_BYTES, Builder

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

_SOURCE = "AlibabaPAI/DAPPLE (Fan et al., PPoPP 2021)"
_CLASSES = 1001

# Each row is one of three resolutions: image width, channels, then for each cell the forward and backward time of eight
# samples in ms and the MiB of parameters. From the third cell on, four cells repeat.
_RESOLUTIONS = (
    (28, 2048, ((7.78, 19.01, 8), (8.30, 18.76, 11.25)),
     ((8.89, 24.29, 13.75), (8.35, 18.23, 13.75), (8.61, 20.91, 13.75), (8.28, 18.61, 13.75))),
    (14, 4096, ((7.79, 21.57, 43), (7.63, 21.27, 51)),
     ((7.74, 27.51, 55), (7.92, 20.03, 55), (7.75, 22.74, 55), (7.99, 23.29, 55))),
    (7, 8192, ((9.95, 29.02, 172), (13.89, 29.17, 204)),
     ((13.28, 25.40, 220), (13.84, 33.02, 220), (12.81, 28.95, 220), (16.07, 33.11, 220))),
)  # fmt: skip
_REDUCTIONS = ((14, 3072, (9.31, 20.04, 29.75)), (7, 6144, (10.15, 27.38, 119)))


def amoebanet(cells: int, *, batch_size: int) -> Profile:
    """Return AmoebaNet-D with `cells` cells, a third of them at each resolution, for a batch of 8 samples or of 1.

    The published profile with 36 cells has 1/8 of the times and sizes of eight samples.
    """
    build = Builder(batch_size)
    path: list[str] = []  # a cell reads the last two of these

    def add(
        name: str, *feeds: str, width: int, channels: float, cost: tuple[float, float, float], outputs: int = 1
    ) -> str:
        forward, backward, parameter_mib = cost
        return build.add(
            name,
            *feeds,
            ms=(_scaled(forward, batch_size), _scaled(backward, batch_size)),
            activation_bytes=batch_size * outputs * width**2 * channels * FLOAT_BYTES,
            parameter_bytes=parameter_mib * 2**20,
        )

    def cell(name: str, width: int, channels: int, cost: tuple[float, float, float], outputs: int = 2) -> None:
        # A cell has two outputs: its result, and its resized input from the previous cell.
        path.append(add(name, *path[-2:], width=width, channels=channels, cost=cost, outputs=outputs))

    image = build.add("Input", activation_bytes=batch_size * (224**2 * 3 + _CLASSES) * FLOAT_BYTES)
    first_filter_mib = 3 * 3 * 3 * 32 * FLOAT_BYTES / 2**20
    path.append(add("stem", image, width=111, channels=96 + 32, cost=(0.63, 0.54, first_filter_mib)))
    cell("stem-cell-1", 56, 384, (4.90, 12.58, 0.234375))
    cell("stem-cell-2", 28, 768, (4.54, 13.85, 1.265625))
    number = 0
    for resolution, (width, channels, begin, repeat) in enumerate(_RESOLUTIONS):
        if resolution > 0:
            cell(f"reduction-cell-{resolution}", *_REDUCTIONS[resolution - 1])
        for index in range(cells // 3):
            number += 1
            cost = begin[index] if index < len(begin) else repeat[(index - len(begin)) % len(repeat)]
            cell(f"cell-{number}", width, channels, cost, outputs=1 if number > cells - 2 else 2)
    classifier_mib = (8192 + 1) * _CLASSES * FLOAT_BYTES / 2**20
    classifier = add("classifier", path[-1], width=1, channels=_CLASSES, cost=(1.03, 0.79, classifier_mib))
    add("loss", classifier, width=0, channels=0, cost=(0.28, 0.03, 0))
    # Keep a difference of the published files: labels go to the loss in the 18-cell profile. The 36-cell profile sends
    # them to the layer that has the loss's number in the 18-cell one.
    build.feed(image, "loss" if cells == 18 else "cell-21")
    return build.profile(f"amoebanet-{cells}", _SOURCE)


def _scaled(ms: float, batch_size: int) -> float:
    """Scale `ms` from eight samples to `batch_size`, and round to hundredths as published."""
    exact = Decimal(str(ms)) * batch_size / 8
    return float(exact.quantize(Decimal("0.01"), ROUND_HALF_UP))
