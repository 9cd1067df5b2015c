"""Suggestions of degrees for a refused configuration or search. Each suggestion was tried and is accepted.

A degree that satisfies one rule may still break another. A hint that considers one rule alone would lead from one error
to the next.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hpgo.base.divisors import divisors
from hpgo.base.messages import join_words
from hpgo.errors import ArgumentError
from hpgo.llm.frameworks import frameworks_for
from hpgo.llm.parallelism import (
    DEGREES,
    MAX_ZERO,
    DegreeError,
    ParallelismConfig,
    check_batch,
    check_degrees,
    data_degree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from hpgo.llm.frameworks import FrameworkSupport
    from hpgo.llm.search_space import SearchSpace
    from hpgo.model.transformer import Transformer

_MAX_GPU_COUNTS = 1024
"""Maximum number of GPU counts to try. Not tuned."""
_KEPT = {"tp", "cp", "ep", "pp", "dp", "sequence_parallel", "flatten_gradients", "whole_embedding", "dtensor"}
"""Fields that stay as they are if a setting is left out: degrees, and what the framework itself decides."""
_NEAR = 8
"""Number of values of each of two degrees that are tried together. Doubling it takes four times as long. Not tuned."""


def with_accepted(
    error: DegreeError,
    model: Transformer,
    config: ParallelismConfig,
    asked: Mapping[str, int],
    *,
    gpus: int,
    max_gpus: int,
    global_batch_size: int,
    seq_length: int,
    kept: Container[str] = (),
) -> ArgumentError:
    """Return `error` with a hint whose arguments `hpgo.estimate_llm` accepts in place of the refused ones.

    `asked` has the refused degrees by the keys of `DEGREES`; `config` has all other fields. `gpus` of the cluster's
    `max_gpus` GPUs are used. Names in `kept` can't be changed by the user, so the hint leaves them alone.
    """
    now = {**asked, "devices": gpus, "global_batch_size": global_batch_size}
    group = config.micro_batch_group_size

    def accepts(changes: Mapping[str, int]) -> bool:
        degrees = {**now, **changes}
        fields: dict[str, int | bool] = {name: degrees[name] for name in DEGREES}
        fields |= {name: value for name, value in changes.items() if hasattr(config, name)}
        if degrees["tp"] == 1 or ("tp" in changes and asked["tp"] == 1):
            # The default of `hpgo.estimate_llm`, which the user gets by changing tp alone.
            fields["sequence_parallel"] = degrees["tp"] > 1
        try:
            tried = replace(config, **fields)  # type: ignore[arg-type]  # all are whole numbers
            check_degrees(model, tried, seq_length=seq_length)
            data = data_degree(tried, degrees["devices"])
            check_batch(replace(tried, dp=data), degrees["global_batch_size"])
        except ArgumentError:
            return False
        return True

    # Only divisors can be accepted for most degrees, which keeps the number of trials small.
    each = asked["tp"] * asked["cp"] * asked["pp"]
    degrees = sorted({*divisors(gpus), *divisors(max_gpus)})
    values: dict[str, Iterable[int]] = {
        "tp": degrees,
        "cp": degrees,
        "ep": divisors(model.experts or 1),
        "pp": degrees,
        "vpp": range(1, model.layers + 3),
        "micro_batch_size": divisors(global_batch_size),
        "devices": sorted(
            {each * at for at in range(1, min(max_gpus // each, _MAX_GPU_COUNTS) + 1)}
            | {1 << power for power in range(max_gpus.bit_length())}
        ),
        "global_batch_size": _multiples(global_batch_size, max(1, gpus // each) * asked["micro_batch_size"]),
    }
    if group is not None:
        now["micro_batch_group_size"] = group
        values["micro_batch_group_size"] = range(asked["pp"], min(global_batch_size, _MAX_GPU_COUNTS) + 1)
    values = {name: each for name, each in values.items() if name not in kept}

    def fitting(name: str) -> list[int]:
        return [value for value in values[name] if value != now[name] and accepts({name: value})]

    # From the smallest change to the largest: the degrees that the error blames, other single degrees, pairs, and at
    # last a combination of several.
    blamed = [name for name in error.degrees if name in values]
    found = [_nearest(name, now[name], fits) for name in blamed if (fits := fitting(name))]
    if "pp" in error.degrees and "first_rank_layers" not in kept and (ends := _ends(model, config, accepts)):
        found.append(f"change the layers of the end ranks: {' '.join(ends)}")
    if not found:
        others = (name for name in values if name not in blamed)
        found = [_nearest(name, now[name], fits) for name in others if (fits := fitting(name))][:2]
    if not found:
        found = _pairs(blamed, values, now, accepts) or _several(values, now, accepts)
    return error.as_kind(ArgumentError, hint=", or ".join(found))


def with_open(
    error: DegreeError,
    space: SearchSpace,
    *,
    model: Transformer,
    gpus: int,
    global_batch_size: int,
    has_ways: Callable[[SearchSpace], bool],
) -> ArgumentError:
    """Return `error` with a hint to fix another value, or to leave names open, in the same search.

    `has_ways` tells whether a search space has any configuration.
    """
    values: dict[str, Iterable[int]] = {
        **dict.fromkeys(("tp", "cp", "pp", "dp"), divisors(gpus)),
        "ep": divisors(model.experts or 1),
        "vpp": range(1, model.layers + 3),
        "zero_stage": range(MAX_ZERO + 1),
        "micro_batch_size": divisors(global_batch_size),
    }
    found: list[str] = []
    for name in error.degrees:
        if name in space.fixed and name in values:
            now = space.degree(name)
            fits = [
                value for value in values[name]
                if value != now and has_ways(replace(space, fixed={**space.fixed, name: value}))
            ]  # fmt: skip
            if fits:
                found.append(_nearest(name.replace("_", "-"), now, fits, verb="fix"))
    if not found:
        names = [name for name in dict.fromkeys((*space.fixed, *space.excluded)) if has_ways(space.without(name))]
        found = [f"leave {join_words([name.replace('_', '-') for name in names], 'or')} open"] if names else []
    if not found and (names := _blocking(space, has_ways)):
        found = [f"leave {join_words([name.replace('_', '-') for name in names])} open"]
    return error.as_kind(ArgumentError, hint=", or ".join(found))


def _blocking(space: SearchSpace, has_ways: Callable[[SearchSpace], bool]) -> list[str]:
    """Return a minimal set of names to leave open together, so that a configuration exists; empty if there is none."""
    names, left = list(dict.fromkeys((*space.fixed, *space.excluded))), space
    for name in names:
        left = left.without(name)
    if not has_ways(left):
        return []
    # Start with everything open and restore each restriction that leaves a configuration. The rest is in conflict.
    for name in names:
        fixed = {key: space.fixed[key] for key in (name,) if key in space.fixed}
        excluded = {key: space.excluded[key] for key in (name,) if key in space.excluded}
        tried = replace(left, fixed={**left.fixed, **fixed}, excluded={**left.excluded, **excluded})
        left = tried if has_ways(tried) else left
    return [name for name in names if name not in left.fixed and name not in left.excluded]


def _nearest(name: str, now: int, fitting: list[int], *, verb: str = "use") -> str:
    """Return a hint with the nearest of `fitting` below and above `now` as arguments."""
    around = [*[one for one in fitting if one < now][-1:], *[one for one in fitting if one > now][:1]]
    return f"{verb} {join_words([f'`{name}={value}`' for value in around], 'or')}"


def _ends(model: Transformer, config: ParallelismConfig, accepts: Callable[[Mapping[str, int]], bool]) -> list[str]:
    """Return arguments with the most even layers of the end ranks for which a pipeline's layers divide."""
    pipeline, vpp, found = config.pp, config.vpp, []
    for each in range(vpp, model.layers, vpp):
        ends = model.layers - each * (pipeline - 2)
        # Equal ends are the most even. If they are not whole, one virtual stage more on the first rank comes next.
        half = -(-ends // (2 * vpp)) * vpp
        for first in (half, half + vpp):
            last = ends - first
            given = {"first_rank_layers": first, "last_rank_layers": last}
            if pipeline == 2 or last == each:
                del given["last_rank_layers"]
            elif first == each:
                del given["first_rank_layers"]
            if min(first, last) >= vpp and accepts(given):
                arguments = [f"`{name}={count}`" for name, count in given.items()]
                found.append((max(each if pipeline > 2 else 0, first, last), len(arguments), arguments))
    return min(found)[-1] if found else []


def _pairs(
    blamed: list[str],
    values: Mapping[str, Iterable[int]],
    now: Mapping[str, int],
    accepts: Callable[[Mapping[str, int]], bool],
) -> list[str]:
    """Return a hint with two degrees that are accepted together, if no single one is."""
    known = {name: _near(each, now[name]) for name, each in values.items()}
    for one in blamed or ["pp"]:
        for other in (name for name in known if name != one):
            pairs = product(known[one], known[other])
            fits = [pair for pair in pairs if accepts(dict(zip((one, other), pair, strict=True)))]
            if fits:
                a, b = min(fits, key=lambda pair: (abs(pair[0] - now[one]), abs(pair[1] - now[other])))
                return [f"use `{one}={a}` and `{other}={b}`"]
    return []


def way_out(
    why: str, rules: FrameworkSupport, config: ParallelismConfig, model: Transformer, *,
    global_batch_size: int, seq_length: int,
) -> str:  # fmt: skip
    """Return a hint for a configuration that a framework does not run: a setting to leave out, or another framework.

    Each part of the hint was tried. Degrees that change the number of GPUs are kept, and settings that the reason `why`
    names come first.
    """
    found, plain = [], ParallelismConfig()
    for name, value in sorted(vars(plain).items(), key=lambda one: one[0] not in why):
        if name in _KEPT or getattr(config, name) == value:
            continue
        with suppress(ArgumentError):
            changed = rules.as_run(replace(config, **{name: value}))
            check_batch(changed, global_batch_size)
            count = changed.micro_batches(global_batch_size)
            if rules.broken(changed, micro_batches=count, model=model) is None:
                found.append(f"leave {name} out")
                break
    others = frameworks_for(model, config, zero_stage=None, seq_length=seq_length)
    return ", or ".join([*found, *([f"use {others}"] if others else [])])


def _several(
    values: Mapping[str, Iterable[int]], now: Mapping[str, int], accepts: Callable[[Mapping[str, int]], bool]
) -> list[str]:
    """Return a hint with several degrees that are accepted together, if no two are.

    The search starts with degrees of 1, or the pipeline that a schedule needs, and with a batch and GPUs that fit them.
    Then it moves one degree after the other as near to the asked value as the earlier ones allow.
    """
    gpus, batch = now["devices"], now["global_batch_size"]
    one = dict.fromkeys(DEGREES, 1)
    starts = [one, one | {"pp": 2}, one | {"pp": 2, "vpp": 2}]
    sizes = [{"devices": gpus, "global_batch_size": batch}]
    if "global_batch_size" in values:
        sizes += [{"devices": gpus, "global_batch_size": size} for size in _near(_multiples(batch, gpus), batch)]
    sizes += [{"devices": count, "global_batch_size": batch} for count in _near(values.get("devices", ()), gpus)]
    for size, start in product(sizes, starts):
        if not accepts(chosen := start | size):
            continue
        for name in ("tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "global_batch_size", "devices"):
            for value in (now[name], *_near(values.get(name, ()), now[name])):
                if abs(value - now[name]) < abs(chosen[name] - now[name]) and accepts({**chosen, name: value}):
                    chosen = {**chosen, name: value}
                    break
        changed = [f"`{name}={value}`" for name, value in chosen.items() if value != now[name]]
        return [f"use {join_words(changed)}"]
    return []


def _near(values: Iterable[int], now: int) -> list[int]:
    return sorted(values, key=lambda value: abs(value - now))[:_NEAR]


def _multiples(number: int, of: int) -> list[int]:
    """Return the multiples of `of` next to `number`, at most two, without 0."""
    return [at * of for at in (number // of, number // of + 1) if at]
