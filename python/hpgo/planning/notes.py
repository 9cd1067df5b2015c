"""Notes on the numbers behind a plan: times measured on other devices, or far from the batch sizes in use."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from hpgo.base.messages import percent, pluralize, shorten, times
from hpgo.hardware.rates import same_card
from hpgo.model.builtin import measured_on
from hpgo.model.estimate import is_estimate
from hpgo.model.profile import SPLIT_RATIOS
from hpgo.planning.device_times import type_of
from hpgo.programs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpgo.hardware.cluster import Device
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
"""Multiple of the largest measured batch size up to which a profile is used without a note. Not tuned."""


def notes(question: PlanningProblem, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return notes, each with a remedy; none if the profile was measured on the same devices and batch sizes."""
    return (
        *noise(question.measured),
        *split(question.measured),
        *_estimated(question),
        *_elsewhere(question, stages),
        *_untimed(question, stages),
        *_far_beyond(question, stages),
        *_other_weights(question),
    )


def noise(profile: Profile) -> Iterator[str]:
    """Yield a warning that begins with `VARY`, if times of `profile` vary by `NOISY` or more."""
    spread = profile.spread or 0.0
    if spread >= NOISY:
        worst = max((layer for layer in profile.layers if layer.spread), key=lambda layer: layer.spread or 0.0)
        yield (
            f"{VARY} between passes by {times(spread)} on average, and times of `{shorten(worst.id)}`"
            f" by {times(worst.spread or 0.0)}: plans whose steps are closer than that are not reliably in order;"
            " measure again while nothing else runs, or for longer"
        )


def split(profile: Profile) -> Iterator[str]:
    """Yield a note if `Profile.with_consistent_split` changes times of the profile by more than rounding."""
    wrong = [layer for layer in profile.layers if layer.has_wrong_split]
    if wrong:
        layer, ratio = max(
            ((layer, ratio) for layer in wrong for ratio in layer.split_ratios),
            key=lambda one: abs(log(one[1] or 1e-300)),  # The logarithm treats 0.5 and 2 alike.
        )
        minimum, maximum = SPLIT_RATIOS
        yield (
            f"input_gradient_s + weight_gradient_s of {pluralize(len(wrong), 'layer')} is not {percent(minimum)} to"
            f" {percent(maximum)} of backward_s (`{shorten(layer.id)}`: {percent(ratio)}): both were rescaled so that"
            " their sum is backward_s; measure all three in the same passes, with `hpgo profile`"
        )


def _estimated(question: PlanningProblem) -> Iterator[str]:
    """Yield a note if the times are estimates."""
    if is_estimate(question.measured):
        # The source of an estimate is a sentence that ends in ", not measured", which would be repeated here.
        how, _, _ = question.measured.source.partition(", not measured")
        yield (
            f"the times of `{shorten(question.measured.name)}` are {shorten(how, 80)}, not measured: the ratios between"
            " layers are more accurate than the step time; measure with `hpgo profile`"
        )


def _elsewhere(question: PlanningProblem, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a note if a built-in profile is used for other devices without their `speed`."""
    known = measured_on(question.measured)
    if known is None:
        return
    # Devices are numbered node by node, so this list maps a number to its type.
    types = [node.device for node in question.cluster.nodes for _ in range(node.count)]
    used = {types[device] for stage in stages for device in stage.devices}
    # A cluster that sets `speed` has accounted for the difference, so only devices of speed 1 are suspicious.
    others = sorted({device.name for device in used if device.speed == 1 and not same_card(known.type, device.name)})
    if others and others != ["device"]:  # `device` is the default name, so it does not identify the type.
        names = ", ".join(f"`{shorten(name)}`" for name in others)
        yield (
            f"the built-in `{question.measured.name}` was measured on {known.said}, and {names} are assumed to have the"
            " same speed: measure yours with `hpgo profile`, or set the `speed` of the devices in a cluster file"
            " (`hpgo clusters show`)"
        )


def untimed(profile: Profile, used: Iterable[Device]) -> Iterator[str]:
    """Yield a note if `profile` has times on some of the device types in use, but not on others.

    The times of a type that are the profile's own need no note.
    """
    if not profile.device_types:
        return
    speeds = {device.name: device.speed for device in used}
    known = {device.name: type_of(profile, device) for device in used}
    if not any(known.values()):
        return
    others = sorted(name for name, found in known.items() if found is None and not same_card(profile.device, name))
    if others:
        names = ", ".join(f"`{shorten(name)}` (speed {speeds[name]:g})" for name in others)
        yield (
            f"`{shorten(profile.name)}` has no times on {names}: its own times are divided by the speed; measure them"
            " there with `hpgo profile`"
        )
    if unused := sorted(name for name, found in known.items() if found is not None and speeds[name] != 1):
        names = ", ".join(f"`{shorten(name)}`" for name in unused)
        yield f"the `speed` of {names} is not used, since `{shorten(profile.name)}` has times on it"


def _untimed(question: PlanningProblem, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield the note of `untimed` for the devices of the stages."""
    if question.measured.device_types:
        types = [node.device for node in question.cluster.nodes for _ in range(node.count)]
        yield from untimed(question.measured, {types[device] for stage in stages for device in stage.devices})


def _far_beyond(question: PlanningProblem, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a note if a replica gets far more samples than were measured."""
    # The largest share counts, because it sets the time of a stage.
    share, largest = max(stage.samples_per_replica for stage in stages), question.profile.batch_sizes[-1]
    if share > FAR * largest:
        yield (
            f"a device gets {pluralize(share, 'sample')} at once, but `{shorten(question.profile.name)}` was measured"
            f" with at most {largest}: longer times are extrapolated in proportion; measure with {share} samples, or"
            " use a smaller micro-batch"
        )


def _other_weights(question: PlanningProblem) -> Iterator[str]:
    """Yield a note if the optimizer has 16-bit weights, but the built-in profile has 32-bit weights."""
    name = question.memory.optimizer
    if name is not None and OPTIMIZERS[name].weights != 4 and measured_on(question.measured) is not None:
        yield (
            f"`{name}` has weights of {OPTIMIZERS[name].weights} bytes per parameter, but the built-in"
            f" `{question.measured.name}` has 4: memory is overestimated; use a profile of your own model"
        )
