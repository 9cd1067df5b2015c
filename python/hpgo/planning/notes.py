"""What a reader should know about the numbers that a price stands on: measured elsewhere, or far from their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.wording import counted, shorten
from hpgo.machine.rates import same_card
from hpgo.model.builtin import measured_on
from hpgo.model.estimate import is_estimate
from hpgo.planning.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.planning.question import Question
    from hpgo.programs.stages import Stage

FAR = 4
"""A profile is trusted without a word up to so many times its largest batch size."""


def notes(question: Question, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Sentences, each with its way out; none for a profile that was measured where and as it is used."""
    return (
        *_estimated(question),
        *_elsewhere(question, stages),
        *_far_beyond(question, stages),
        *_other_weights(question),
    )


def _estimated(question: Question) -> Iterator[str]:
    """Times that nobody has measured."""
    if is_estimate(question.measured):
        how, _, _ = question.measured.source.partition(", not measured")
        yield (
            f"the times of `{shorten(question.measured.name)}` are {shorten(how, 80)}, not measured: they tell layers"
            " from each other better than they tell the step; measure with `hpgo profile`"
        )


def _elsewhere(question: Question, stages: Sequence[Stage]) -> Iterator[str]:
    """A published profile on other devices, whose speed nobody gave."""
    known = measured_on(question.measured)
    if known is None:
        return
    types = [machine.device for machine in question.cluster.machines for _ in range(machine.count)]
    used = {types[device] for stage in stages for device in stage.devices}
    others = sorted({device.name for device in used if device.speed == 1 and not same_card(known.type, device.name)})
    if others and others != ["device"]:  # what devices of a cluster are called that nobody named
        names = ", ".join(f"`{shorten(name)}`" for name in others)
        yield (
            f"the built-in `{question.measured.name}` was measured on {known.said}, so this is what {names} would take"
            " at that speed: measure yours with `hpgo profile`, or write a cluster file (`hpgo clusters show`) that"
            " gives the devices their `speed`"
        )


def _far_beyond(question: Question, stages: Sequence[Stage]) -> Iterator[str]:
    """Shares of a micro-batch beyond anything that was measured."""
    share, largest = max(stage.share for stage in stages), question.profile.batch_sizes[-1]
    if share > FAR * largest:
        yield (
            f"a device gets {counted(share, 'sample')} at once, and `{shorten(question.profile.name)}` was measured"
            f" with {largest} at most: times beyond are taken in proportion; measure it with as many, or choose a"
            " smaller micro-batch"
        )


def _other_weights(question: Question) -> Iterator[str]:
    """A preset for 16-bit weights, on a published profile, whose weights have 32."""
    name = question.memory.optimizer
    if name is not None and OPTIMIZERS[name].weights != 4 and measured_on(question.measured) is not None:
        yield (
            f"`{name}` counts on weights of {OPTIMIZERS[name].weights} bytes a parameter, and the built-in"
            f" `{question.measured.name}` has 4: memory is overestimated; profile your own"
        )
