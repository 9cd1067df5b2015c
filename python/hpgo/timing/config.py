"""What a run is asked to be: the one record that the command line, its configuration files and the page fill in."""

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
    """Sizes, costs and memory of a run, under the names of the options, of the keys in files and of the address.

    Seconds and bytes are those of one micro-batch on a rank's part of the model, which its chunks share evenly, so that
    schedules are compared at equal work. Each is one number for all ranks, one for each, or one for each stage of a
    chain; a second chain has the same stages, and so the same numbers.
    """

    num_stages: int | None = None
    """Ranks; as many as times are given, or 4, if left out."""
    num_batches: int | None = None
    """Micro-batches; 8 if left out."""
    forward_times: tuple[float, ...] = (1.0,)
    backward_times: tuple[float, ...] = ()
    """If left out, the sum of its halves where both are given, else 2 s."""
    input_gradient_times: tuple[float, ...] = ()
    """Half of the backward if left out."""
    weight_gradient_times: tuple[float, ...] = ()
    """Half of the backward if left out."""
    overlapped_times: tuple[float, ...] = ()
    """A forward and a backward run as one; their sum if left out."""
    p2p_time: tuple[float, ...] = (0.0,)
    """Latency of a message: one number, or one for each edge between stages."""
    transfer_time: tuple[float, ...] = (0.0,)
    """How long a message occupies its link, likewise."""
    gradient_sync_times: tuple[float, ...] = (0.0,)
    """Of a stage, whatever its share of the rank's part."""
    optimizer_times: tuple[float, ...] = (0.0,)
    chunks: int | None = None
    group_size: int | None = None
    cap: int | None = None
    comm: Communication = "link"
    iterations: int = 1
    weight_bytes: tuple[float, ...] = ()
    """Weights, gradients and optimizer state of a rank."""
    activation_bytes: tuple[float, ...] = ()
    """What one micro-batch keeps on a rank until its backward."""
    memory_cap: tuple[float, ...] = ()
    """What a rank may hold: one number, or one for each."""

    @property
    def ranks(self) -> int:
        """How many ranks a schedule is built for."""
        if self.num_stages is not None:
            return self.num_stages
        timed = max(len(self.forward_times), len(self.backward_times))
        return timed if timed > 1 else 4

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a schedule is built for."""
        return 8 if self.num_batches is None else self.num_batches

    @property
    def backward(self) -> tuple[float, ...]:
        """Times of the backward; empty where only its halves are known."""
        if self.backward_times or (self.input_gradient_times and self.weight_gradient_times):
            return self.backward_times
        return (2.0,)


class SettingError(ArgumentError):
    """A field of a `SimulationConfig` has a value that is none of its own, or that does not go with the others."""

    def __init__(self, message: str, hint: str = "", field: str = "", *, code: str = "", **fields: object) -> None:
        super().__init__(message, hint, code=code, **fields)
        self.field = field
        """Its name."""


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
    "chunks": _COUNT,
    "group_size": _COUNT,
    "cap": _COUNT,
    "comm": _WORD,
    "iterations": _COUNT,
    "weight_bytes": _SIZE,
    "activation_bytes": _SIZE,
    "memory_cap": _SIZE,
}
"""The fields of `SimulationConfig`, and what kind of value each takes."""


def from_text(name: str, text: str, called: str) -> Any:
    """What `text` gives the field `name` of a `SimulationConfig`; the user calls the field `called`.

    Times stand behind commas or blanks, sizes behind commas.

    >>> from_text("forward_times", "1, 1.5 2 ms", "-f"), from_text("weight_bytes", "8 GB", "--weight-bytes")
    ((1.0, 1.5, 0.002), (8000000000.0,))
    """
    kind = FIELDS[name]
    if kind == _COUNT:
        return checked(name, int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else text, called)
    if kind == _SIZE:
        return checked(name, [part.strip() for part in text.split(",")], called)
    if kind == _WORD:
        return checked(name, text, called)
    return checked(name, _TIME.findall(text), called)


_NUMBERS = "give seconds, or a unit as in 4ms: one number, or one for each rank"
_TIME = re.compile(r"[^\s,]+(?:[ \t]+(?:s|ms|us|µs|μs|ns)(?![^\s,]))?")
"""One of several times, with its unit."""


def checked(name: str, value: object, called: str) -> Any:
    """Return `value` as the field `name` of `SimulationConfig` keeps it; errors call the field `called`.

    Times of work are above zero, for an action without a length has no place in a picture or a share of busy time.
    Raises SettingError for what is none of the field's values.
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
            raise ArgumentError(f"`{called}` must be text, got {safe_repr(value)}", "quote it")
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
            raise ArgumentError(f"`{called}` must be numbers, got {safe_repr(value)}", "give seconds")
        if kind == _WORK and not 0 < number < float("inf"):
            raise ArgumentError(f"`{called}` holds {number}", "times of work are numbers of seconds above zero")
        if not 0 <= number < float("inf"):
            raise ArgumentError(f"`{called}` holds {number}", "give numbers of seconds, zero or more")
        numbers.append(float(number))
    if not given:
        raise ArgumentError(f"`{called}` is an empty list", _NUMBERS)
    return tuple(numbers)


def _seconds(text: str, called: str) -> float:
    """A number of seconds, whatever its sign, or a time with a unit."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_seconds(text)
    except ArgumentError:
        raise ArgumentError(f"`{called}` holds {safe_repr(text)}, which is no number", _NUMBERS) from None
