"""Which other degrees a refused question about a transformer may have: only what was tried, and is accepted.

A degree that divides its own number may still be refused by another rule, so a hint that knows one rule only leads from
one refusal to the next.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.base.errors import ArgumentError
from hpgo.base.wording import in_a_row
from hpgo.ways.way import MOST_ZERO, DegreeError, check_batch, check_degrees, data_degree, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.model.transformer import Transformer
    from hpgo.ways.space import Space
    from hpgo.ways.way import Way

_FIELDS = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "vpp": "chunks",
    "micro_batch_size": "micro_batch_size",
}  # fmt: skip
"""Arguments of `hpgo.price`, and the fields of `Way` that they become."""
_MOST = 1024  # numbers of GPUs that are tried. Not tuned.
_NEAR = 8  # values of each of two degrees that are tried together. Twice as many take four times as long. Not tuned.


def of_price(
    error: DegreeError, model: Transformer, way: Way, *, gpus: int, most_gpus: int, global_batch_size: int, seq: int
) -> ArgumentError:
    """Return `error` with a hint whose arguments `hpgo.price` accepts in place of the refused ones.

    `gpus` are used of `most_gpus` that the cluster has.
    """

    def accepts(changes: Mapping[str, int]) -> bool:
        fields = {_FIELDS.get(name, name): value for name, value in changes.items()}
        count, batch = fields.pop("devices", gpus), fields.pop("global_batch_size", global_batch_size)
        if "tp" in changes and (way.tensor == 1 or changes["tp"] == 1):
            fields["sequence"] = changes["tp"] > 1  # as `hpgo.price` has it if nothing is said
        try:
            tried = replace(way, **fields)  # type: ignore[arg-type]  # all are whole numbers
            check_degrees(model, tried, seq=seq)
            check_batch(replace(tried, data=data_degree(tried, count)), batch)
        except ArgumentError:
            return False
        return True

    each = way.group * way.pipeline
    degrees = sorted({*divisors(gpus), *divisors(most_gpus)})
    values: dict[str, Iterable[int]] = {
        "tp": degrees,
        "cp": degrees,
        "ep": divisors(model.experts or 1),
        "pp": degrees,
        "vpp": range(1, model.layers + 3),
        "micro_batch_size": divisors(global_batch_size),
        "devices": sorted(
            {each * at for at in range(1, min(most_gpus // each, _MOST) + 1)}
            | {1 << power for power in range(most_gpus.bit_length())}
        ),
        "global_batch_size": _multiples(global_batch_size, max(1, gpus // each) * way.micro_batch_size),
    }
    now = {name: getattr(way, field) for name, field in _FIELDS.items()}
    now |= {"devices": gpus, "global_batch_size": global_batch_size}

    def fitting(name: str) -> list[int]:
        return [value for value in values[name] if value != now[name] and accepts({name: value})]

    blamed = [name for name in error.degrees if name in values]
    found: list[str] = []
    for name in blamed:
        if fits := fitting(name):
            found.append(_nearest(name, now[name], fits, first=not found))
    if "pp" in error.degrees and (ends := _ends(model, way, accepts)):
        found.append(f"give the ends another number of layers: {' '.join(ends)}")
    if not found:
        others = (name for name in values if name not in blamed)
        found = [_nearest(name, now[name], fits) for name in others if (fits := fitting(name))][:2]
    if not found:
        found = _pairs(blamed, values, now, accepts)
    return ArgumentError(error.message, ", or ".join(found))


def of_space(
    error: DegreeError,
    space: Space,
    *,
    model: Transformer,
    gpus: int,
    global_batch_size: int,
    has_ways: Callable[[Space], bool],
) -> ArgumentError:
    """Return `error` with a hint of what may be fixed instead, or left open, in the same search."""
    values: dict[str, Iterable[int]] = {
        **dict.fromkeys(("tp", "cp", "pp", "dp"), divisors(gpus)),
        "ep": divisors(model.experts or 1),
        "vpp": range(1, model.layers + 3),
        "zero": range(MOST_ZERO + 1),
        "micro_batch_size": divisors(global_batch_size),
    }
    found: list[str] = []
    for name in error.degrees:
        if name in space.fixed and name in values:
            now = int(space.fixed[name])
            fits = [
                value for value in values[name]
                if value != now and has_ways(replace(space, fixed={**space.fixed, name: value}))
            ]  # fmt: skip
            if fits:
                found.append(_nearest(name.replace("_", "-"), now, fits, verb="fix", first=not found))
    if not found:
        names = [name for name in dict.fromkeys((*space.fixed, *space.excluded)) if has_ways(space.without(name))]
        found = [f"leave {in_a_row([name.replace('_', '-') for name in names], 'or')} open"] if names else []
    return ArgumentError(error.message, ", or ".join(found) or error.hint)


def _nearest(name: str, now: int, fitting: list[int], *, verb: str = "use", first: bool = False) -> str:
    """The nearest of `fitting` below and above as arguments."""
    around = [*[one for one in fitting if one < now][-1:], *[one for one in fitting if one > now][:1]]
    said = in_a_row([f"`{name}={value}`" for value in around], "or")
    return f"{nearest(now, fitting)}: {verb} {said}" if first else f"{verb} {said}"


def _ends(model: Transformer, way: Way, accepts: Callable[[Mapping[str, int]], bool]) -> list[str]:
    """Layers of the first and the last rank with which the layers of a pipeline divide, the most even ones."""
    pipeline, chunks, found = way.pipeline, way.chunks, []
    for each in range(chunks, model.layers, chunks):
        ends = model.layers - each * (pipeline - 2)
        half = -(-ends // (2 * chunks)) * chunks
        for first in (half, half + chunks):
            last = ends - first
            given = {"first_layers": first, "last_layers": last}
            if pipeline == 2 or last == each:
                del given["last_layers"]
            elif first == each:
                del given["first_layers"]
            if min(first, last) >= chunks and accepts(given):
                said = [f"`{name}={count}`" for name, count in given.items()]
                found.append((max(each if pipeline > 2 else 0, first, last), len(said), said))
    return min(found)[-1] if found else []


def _pairs(
    blamed: list[str],
    values: Mapping[str, Iterable[int]],
    now: Mapping[str, int],
    accepts: Callable[[Mapping[str, int]], bool],
) -> list[str]:
    """Two degrees that are accepted together, where no single one is."""
    known = {name: _near(each, now[name]) for name, each in values.items()}
    for one in blamed or ["pp"]:
        for other in (name for name in known if name != one):
            pairs = product(known[one], known[other])
            fits = [pair for pair in pairs if accepts(dict(zip((one, other), pair, strict=True)))]
            if fits:
                a, b = min(fits, key=lambda pair: (abs(pair[0] - now[one]), abs(pair[1] - now[other])))
                return [f"use `{one}={a}` and `{other}={b}`"]
    return []


def _near(values: Iterable[int], now: int) -> list[int]:
    return sorted(values, key=lambda value: abs(value - now))[:_NEAR]


def _multiples(number: int, of: int) -> list[int]:
    """Those next to `number`."""
    return [at * of for at in (number // of, number // of + 1) if at]
