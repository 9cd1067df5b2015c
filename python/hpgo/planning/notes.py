"""What a reader should know about the numbers that a price stands on: measured elsewhere, or far from their use."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from hpgo.base.messages import percent, pluralize, shorten, times
from hpgo.machine.rates import same_card
from hpgo.model.builtin import measured_on
from hpgo.model.estimate import is_estimate
from hpgo.model.profile import SPLIT_RATIOS
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.model.profile import Profile
    from hpgo.planning.problem import PlanningProblem
    from hpgo.programs.stages import Stage

NOISY = 0.25
"""Mean spread of a profile's times, as a share of the typical time, from which on plans begin with a warning.

Not tuned. On two idle cores `hpgo profile` wrote 0.03 to 0.13 for small models, and 0.13 to 0.22 with `--ranks 2`. At
0.5, plans that are 50 % apart may be in the wrong order without a warning. At 0.12, profiles of two ranks have one.
"""
VARY = "measured times vary"
"""First words of that warning, by which reports find it and print it first."""
FAR = 4
"""A profile is trusted without a word up to so many times its largest batch size."""


def notes(question: PlanningProblem, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Sentences, each with its way out; none for a profile that was measured where and as it is used."""
    return (
        *noise(question.measured),
        *split(question.measured),
        *_estimated(question),
        *_elsewhere(question, stages),
        *_far_beyond(question, stages),
        *_other_weights(question),
    )


def noise(profile: Profile) -> Iterator[str]:
    """Yield a warning that begins with `VARY`, if times of `profile` vary by `NOISY` or more."""
    spread = profile.spread or 0.0
    if spread >= NOISY:
        most = max((layer for layer in profile.layers if layer.spread), key=lambda layer: layer.spread or 0.0)
        yield (
            f"{VARY} between passes by {times(spread)} on average, those of `{shorten(most.id)}` by"
            f" {times(most.spread or 0.0)}: plans whose steps are closer than that are not reliably in order; measure"
            " again while nothing else runs, or for longer"
        )


def split(profile: Profile) -> Iterator[str]:
    """Yield a remark if `Profile.with_consistent_split` changes what the profile says, beyond rounding."""
    wrong = [layer for layer in profile.layers if layer.has_wrong_split]
    if wrong:
        layer, ratio = max(
            ((layer, ratio) for layer in wrong for ratio in layer.split_ratios),
            key=lambda one: abs(log(one[1] or 1e-300)),
        )
        least, most = SPLIT_RATIOS
        yield (
            f"input_gradient_s + weight_gradient_s of {pluralize(len(wrong), 'layer')} is not {percent(least)} to"
            f" {percent(most)} of backward_s (`{shorten(layer.id)}`: {percent(ratio)}): both were rescaled so that"
            " their sum is backward_s; measure all three in the same passes, with `hpgo profile`"
        )


def _estimated(question: PlanningProblem) -> Iterator[str]:
    """Times that nobody has measured."""
    if is_estimate(question.measured):
        how, _, _ = question.measured.source.partition(", not measured")
        yield (
            f"the times of `{shorten(question.measured.name)}` are {shorten(how, 80)}, not measured: they tell layers"
            " from each other better than they tell the step; measure with `hpgo profile`"
        )


def _elsewhere(question: PlanningProblem, stages: Sequence[Stage]) -> Iterator[str]:
    """A published profile on other devices, whose speed nobody gave."""
    known = measured_on(question.measured)
    if known is None:
        return
    types = [machine.device for machine in question.cluster.nodes for _ in range(machine.count)]
    used = {types[device] for stage in stages for device in stage.devices}
    others = sorted({device.name for device in used if device.speed == 1 and not same_card(known.type, device.name)})
    if others and others != ["device"]:  # what devices of a cluster are called that nobody named
        names = ", ".join(f"`{shorten(name)}`" for name in others)
        yield (
            f"the built-in `{question.measured.name}` was measured on {known.said}, so this is what {names} would take"
            " at that speed: measure yours with `hpgo profile`, or write a cluster file (`hpgo clusters show`) that"
            " gives the devices their `speed`"
        )


def _far_beyond(question: PlanningProblem, stages: Sequence[Stage]) -> Iterator[str]:
    """Shares of a micro-batch beyond anything that was measured."""
    share, largest = max(stage.samples_per_replica for stage in stages), question.profile.batch_sizes[-1]
    if share > FAR * largest:
        yield (
            f"a device gets {pluralize(share, 'sample')} at once, and `{shorten(question.profile.name)}` was measured"
            f" with {largest} at most: times beyond are taken in proportion; measure it with as many, or choose a"
            " smaller micro-batch"
        )


def _other_weights(question: PlanningProblem) -> Iterator[str]:
    """A preset for 16-bit weights, on a published profile, whose weights have 32."""
    name = question.memory.optimizer
    if name is not None and OPTIMIZERS[name].weights != 4 and measured_on(question.measured) is not None:
        yield (
            f"`{name}` counts on weights of {OPTIMIZERS[name].weights} bytes a parameter, and the built-in"
            f" `{question.measured.name}` has 4: memory is overestimated; profile your own"
        )
