"""Sections of docs/accuracy.md on the ranges of step times, and the checks of these ranges. Used by accuracy.py."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import TYPE_CHECKING

from hpgo.llm.stack import stacks
from hpgo.llm.step_range import RELATIVE_ERROR, step_range
from hpgo.llm.validated_features import family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accuracy import Point

Ratios = list[tuple["Point", float]]
"""Points with their predicted over measured times."""
COVERAGE = (0.85, 0.95)
"""Share of left-out steps that 90 % ranges must hold."""
MIN_STEPS, MAX_BIAS = 4, 0.10
"""Steps from which on a device and a stack must not have a larger bias, unless the stack lists it."""
_LISTED_WITHIN = 0.05
"""Largest difference of a bias from the one that its stack lists. Not tuned."""


@dataclass(frozen=True)
class Reliance:
    """Errors of the steps of one stack, device and kind, and the range that `hpgo llm` prints for them."""

    logs: tuple[float, ...]
    """Logarithms of predicted over measured times."""
    sds: tuple[float, ...]
    """Standard deviation that the range of each step has."""
    known_bias: float

    @property
    def bias(self) -> float:
        """Mean logarithm."""
        return fmean(self.logs)

    @property
    def error(self) -> float:
        """Mean relative error."""
        return fmean(abs(math.exp(log) - 1) for log in self.logs)

    @property
    def covered(self) -> float:
        """Share of the measurements that lie in their ranges."""
        held = (step_range(1.0, sd, self.known_bias) for sd in self.sds)
        return fmean(low <= math.exp(-log) <= high for log, (low, high) in zip(self.logs, held, strict=True))


def reliances(steps: Ratios) -> dict[tuple[str, str, str], Reliance]:
    """Return the errors by stack, device and kind of step, the largest mean error first."""
    groups: dict[tuple[str, str, str], Ratios] = defaultdict(list)
    for point, ratio in steps:
        groups[point.stack.name, family(point.cluster.nodes[0].device.name), point.kind].append((point, ratio))
    found = {}
    for key, held in groups.items():
        first = held[0][0]
        found[key] = Reliance(
            tuple(math.log(ratio) for _, ratio in held),
            tuple(point.log_sd(point.stack) for point, _ in held),
            first.stack.bias_on(first.cluster, first.kind),
        )
    return dict(sorted(found.items(), key=lambda row: -row[1].error))


def coverage(left_out: Mapping[str, Ratios]) -> dict[str, tuple[float, float]]:
    """Return, of each left-out group, the share of steps in their ranges and the median factor of these ranges.

    A left-out group counts as unseen, and has no known bias.
    """
    found = {}
    for name, held in left_out.items():
        highs = [step_range(1.0, point.log_sd(replace(point.stack, seen=())))[1] for point, _ in held]
        inside = [1 / high <= ratio <= high for high, (_, ratio) in zip(highs, held, strict=True)]
        found[name] = fmean(inside), median(highs)
    return found


def complaints(steps: Ratios, left_out: Mapping[str, Ratios]) -> list[str]:
    """Return what is wrong with the printed ranges: their mean coverage, and biases that no stack lists."""
    low, high = COVERAGE
    share = fmean(share for share, _ in coverage(left_out).values())
    found = []
    if not low <= share <= high:
        found.append(
            f"ranges hold {100 * share:.1f} % of left-out steps, but must hold {100 * low:g} to {100 * high:g} %"
        )
    for key, one in reliances(steps).items():
        listed = one.known_bias and abs(one.bias - one.known_bias) <= _LISTED_WITHIN
        if len(one.logs) >= MIN_STEPS and abs(one.bias) > math.log(1 + MAX_BIAS) and not listed:
            found.append(
                f"{' on '.join(key[:2])}, {key[2]}: estimates of {len(one.logs)} steps have a bias of {one.bias:+.3f},"
                f" but the stack lists {one.known_bias:+.2f}"
            )
    return found


def relative_error(steps: Ratios) -> float:
    """Return the mean relative error of the ratio of two step times on one platform, over platforms with such pairs."""
    asked: dict[tuple[object, ...], Ratios] = defaultdict(list)
    for point, ratio in steps:
        same = (point.platform, point.model, point.config.world_size, point.batch, point.seq, point.edition)
        asked[*same, point.cluster.name].append((point, ratio))
    errors: dict[str, list[float]] = defaultdict(list)
    for held in asked.values():
        for (one, here), (two, there) in combinations(held, 2):
            if one.config != two.config:
                errors[one.platform].append(abs(math.log(here / there)))
    return fmean(fmean(held) for held in errors.values() if len(held) >= MIN_STEPS)


def reliance_section(steps: Ratios) -> list[str]:
    """Return the table that a reader looks up first: errors and ranges by stack, device and kind."""
    lines = [
        "## What you may rely on",
        "",
        (
            "Find your software stack and GPU. Reports print the range: 90 % of such steps should lie between these"
            " multiples of the estimate. *In range* is the share of published steps for which that is true. A"
            " combination without a row was never compared, so its range is wider. Worst first."
        ),
        "",
        "| stack | GPU | kind | steps | mean error | bias | range | in range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, one in reliances(steps).items():
        low, high = step_range(1.0, median(one.sds), one.known_bias)
        lines.append(
            f"| {' | '.join(key)} | {len(one.logs)} | {100 * one.error:.1f} % |"
            f" {100 * (math.exp(one.bias) - 1):+.0f} % | {low:.2f} to {high:.2f} | {100 * one.covered:.0f} % |"
        )
    lines += ["", "### Known biases", "", "Ranges are widened by these, on the side of the measurements.", ""]
    for stack in stacks().values():
        for one in stack.known_biases:
            off = f"{100 * (math.exp(one.log_ratio) - 1):+.0f} %"
            lines.append(f"- Stack `{stack.name}` on {one.device}, {one.kind}: estimates are {off} off. {one.reason}")
    return [*lines, ""]


def range_section(left_out: Mapping[str, Ratios], names: Mapping[str, str], between: float, within: float) -> list[str]:
    """Return the section on the parts of ranges by moments, and the coverage of left-out groups.

    `between` and `within` are the standard deviations of dense platforms' means and of steps around these.
    """
    found = coverage(left_out)
    dense = [row for name, held in left_out.items() if name in names for row in held]
    lines = [
        "## Ranges",
        "",
        (
            "A range is `step × exp(± 1.70 √(τ² + σ²))`. σ belongs to single steps: 0.09 for dense models, 0.11 for"
            " FSDP across nodes, 0.18 over more than 128 ranks, 0.255 with experts. τ belongs to stack and device: 0.05"
            f" if published steps have it, 0.09 otherwise. By moments of left-out platforms, σ is {within:.2f} and τ"
            f" {between:.2f}. Two step times of one list are called equally fast within {100 * RELATIVE_ERROR:.0f} %:"
            f" the ratio of two estimates on one platform is off by {100 * relative_error(dense):.1f} % on average."
        ),
        "",
        (
            "The table has platforms, and models with experts, that were left out of the fit. Here they count as unseen"
            f" and without known biases. Their ranges hold {100 * fmean(share for share, _ in found.values()):.1f} % of"
            " the steps on average; `make accuracy` fails outside of 85 to 95 %."
        ),
        "",
        "| left out | in range | median range |",
        "|---|---|---|",
    ]
    for name, (share, high) in sorted(found.items(), key=lambda row: row[1][0]):
        lines.append(f"| {names.get(name, f'`{name}`')} | {100 * share:.0f} % | ×/÷ {high:.2f} |")
    return [*lines, ""]
