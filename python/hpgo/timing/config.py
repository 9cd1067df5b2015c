"""Settings of a simulation. The command line, its configuration files and the web page all create this record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_int
from hpgo.base.messages import safe_repr
from hpgo.base.units import parse_bytes, parse_seconds
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.programs.names import Communication


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Sizes, costs and memory of a simulation, with the names of options, of keys in files and of URL parameters.

    Seconds and bytes are for one micro-batch on a rank's part of the model. The virtual stages of a rank share them
    evenly, so that schedules are compared at equal work. Each field is one number for all ranks, one per rank, or one
    per stage of a chain. A second chain has the same stages, and so the same numbers.
    """

    num_stages: int | None = None
    """Number of pipeline ranks. None means the number of times that are given, or 4."""
    num_batches: int | None = None
    """Number of micro-batches. None means 8."""
    forward_times: tuple[float, ...] = (1.0,)
    backward_times: tuple[float, ...] = ()
    """Seconds of a backward pass. If empty, the sum of its two parts where both are given, else 2 s."""
    input_gradient_times: tuple[float, ...] = ()
    """Seconds of an input-gradient pass. If empty, half of the backward pass."""
    weight_gradient_times: tuple[float, ...] = ()
    """Seconds of a weight-gradient pass. If empty, half of the backward pass."""
    overlapped_times: tuple[float, ...] = ()
    """Seconds of a fused forward and backward. If empty, the sum of the two."""
    p2p_time: tuple[float, ...] = (0.0,)
    """Latency of a message in seconds: one number, or one per edge between stages."""
    transfer_time: tuple[float, ...] = (0.0,)
    """Seconds that a message occupies its link: one number, or one per edge between stages."""
    gradient_sync_times: tuple[float, ...] = (0.0,)
    """Exposed gradient reduction of a stage in seconds. Virtual stages of a rank do not share it."""
    optimizer_times: tuple[float, ...] = (0.0,)
    virtual_stages_per_rank: int | None = None
    group_size: int | None = None
    activation_limit: int | None = None
    comm: Communication = "link"
    iterations: int = 1
    weight_bytes: tuple[float, ...] = ()
    """Bytes of weights, gradients and optimizer state of a rank."""
    activation_bytes: tuple[float, ...] = ()
    """Bytes that one micro-batch keeps on a rank until its backward pass."""
    memory_cap: tuple[float, ...] = ()
    """Memory limit of a rank in bytes: one number, or one per rank."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the schedule."""
        if self.num_stages is not None:
            return self.num_stages
        timed = max(len(self.forward_times), len(self.backward_times))
        return timed if timed > 1 else 4

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of the schedule."""
        return 8 if self.num_batches is None else self.num_batches

    @property
    def backward(self) -> tuple[float, ...]:
        """Seconds of the backward pass. Empty if only its two parts are given."""
        if self.backward_times or (self.input_gradient_times and self.weight_gradient_times):
            return self.backward_times
        return (2.0,)


class SettingError(ArgumentError):
    """Error of a field of `SimulationConfig`: its value is invalid, or conflicts with other fields."""

    def __init__(self, message: str, hint: str = "", field: str = "", *, code: str = "", **fields: object) -> None:
        super().__init__(message, hint, code=code, **fields)
        self.field = field
        """Name of the field."""


# Kinds of values. Work must take time, delays may be zero, and sizes accept units like GB.
_COUNT, _WORK, _DELAY, _SIZE, _WORD = "count", "work", "delay", "size", "word"
FIELDS = {
    "num_stages": _COUNT,
    "num_batches": _COUNT,
    "forward_times": _WORK,
    "backward_times": _WORK,
    "input_gradient_times": _WORK,
    "weight_gradient_times": _WORK,
    "overlapped_times": _WORK,
    "p2p_time": _DELAY,
    "transfer_time": _DELAY,
    "gradient_sync_times": _DELAY,
    "optimizer_times": _DELAY,
    "virtual_stages_per_rank": _COUNT,
    "group_size": _COUNT,
    "activation_limit": _COUNT,
    "comm": _WORD,
    "iterations": _COUNT,
    "weight_bytes": _SIZE,
    "activation_bytes": _SIZE,
    "memory_cap": _SIZE,
}
"""Kind of value of each field of `SimulationConfig`."""


def from_text(name: str, text: str, called: str) -> Any:
    """Return the value of the field `name` of `SimulationConfig` that `text` means. Errors call the field `called`.

    Commas or blanks separate times. Commas separate sizes.

    >>> from_text("forward_times", "1, 1.5 2 ms", "-f"), from_text("weight_bytes", "8 GB", "--weight-bytes")
    ((1.0, 1.5, 0.002), (8000000000.0,))
    """
    kind = FIELDS[name]
    if kind == _COUNT:
        # Leave longer digit strings as text: Python does not convert thousands of digits, and no count is that large.
        return checked(name, int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text, called)
    if kind == _SIZE:
        return checked(name, [part.strip() for part in text.split(",")], called)
    if kind == _WORD:
        return checked(name, text, called)
    return checked(name, _TIME.findall(text), called)


_NUMBERS = "give seconds, or a unit as in 4ms: one number, or one for each rank"
_TIME = re.compile(r"[^\s,]+(?:[ \t]+(?:s|ms|us|µs|μs|ns)(?![^\s,]))?")
"""Pattern of one time in a list, with its unit."""


def checked(name: str, value: object, called: str) -> Any:
    """Return `value` as stored in the field `name` of `SimulationConfig`. Errors call the field `called`.

    Times of work must be above 0: an action of length 0 can't be drawn and has no share of busy time. Raises
    SettingError for an invalid value.
    """
    try:
        return _checked(FIELDS[name], value, called)
    except ArgumentError as error:
        raise SettingError(error.message, error.hint, name, code=error.code) from None


def _checked(kind: str, value: object, called: str) -> Any:
    if kind == _COUNT:
        return check_int(f"`{called}`", value)
    if kind == _WORD:
        if not isinstance(value, str):
            raise ArgumentError(f"`{called}` is {safe_repr(value)}, but must be text", "put it in quotes")
        return value
    given: list[Any] = value if isinstance(value, list) else [value]
    if kind == _SIZE:
        try:
            return tuple(parse_bytes(part) for part in given)
        except ArgumentError as error:
            raise error.as_kind(ArgumentError, f"`{called}`: {error.message}") from None
    numbers: list[float] = []
    for one in given:
        number = _seconds(one, called) if isinstance(one, str) else one
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ArgumentError(
                f"`{called}` is {safe_repr(value)}, but must be numbers", "give seconds, for instance 1.5"
            )
        if kind == _WORK and not 0 < number < float("inf"):
            raise ArgumentError(f"`{called}` holds {number}, but a time of work is above 0", "give seconds above 0")
        if not 0 <= number < float("inf"):
            raise ArgumentError(f"`{called}` holds {number}, but a delay is 0 or more", "give seconds from 0")
        numbers.append(float(number))
    if not given:
        raise ArgumentError(f"`{called}` is an empty list", _NUMBERS)
    return tuple(numbers)


def _seconds(text: str, called: str) -> float:
    """Return a number of seconds of any sign, or a time with a unit."""
    # Try a plain number first. A negative one then reaches the range check, whose message states the rule.
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_seconds(text)
    except ArgumentError:
        raise ArgumentError(f"`{called}` holds {safe_repr(text)}, which is no number", _NUMBERS) from None
