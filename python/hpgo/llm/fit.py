"""Fine-tuning on given GPUs: whether a model fits, with which settings, and the longest sequence and largest batch.

A method trains all weights, or adapters beside frozen weights in 16 or 4 bits. Settings that save memory come on top:
recomputation, a fused loss, 8-bit and paged optimizer state, optimizer state on the CPU, and no 32-bit weights. All
combinations are estimated. Several GPUs shard weights, gradients and optimizer state (ZeRO stage 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_int, check_is, check_list
from hpgo.base.messages import brief, join_words, pluralize, shorten
from hpgo.base.presentation import Reported
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, cluster_of
from hpgo.llm.estimate import LlmEstimate, estimate_llm
from hpgo.llm.parallelism import MAX_ZERO, check_positions
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from hpgo.model.transformer import Transformer

METHODS = ("full", "lora", "qlora")
LORA_RANK = 16
"""Rank of adapters unless one is given: that of MLPerf's fine-tuning benchmark, `llama2_70b_lora`."""
_SETTINGS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "recompute": (("", {}), ("recompute", {"recompute": "full"})),
    "loss": (("", {"fused_cross_entropy": False}), ("fused CE", {})),
    "optimizer": (
        ("", {}),
        ("8-bit Adam", {"optimizer": "adam8bit"}),
        ("paged Adam", {"optimizer": "paged_adam8bit"}),
        ("CPU Adam", {"optimizer_offload_fraction": 1.0}),
    ),
    "weights": (("", {}), ("no fp32", {"main_params_dtype": "none"})),
}
"""Settings that save memory, by what they change. Each has a name, or none for the usual one, and its arguments.

The usual loss has several kernels, as in Hugging Face's models. Paged Adam has 8-bit moments, in pages that leave the
GPU.
"""
_OF_ADAPTERS = ("recompute", "loss")
"""Settings that matter for adapters. Their optimizer state is small already."""
MAX_GPUS = 1024
"""Largest number of GPUs that is tried to make a method fit. Fine-tuning on more is rare. Not tuned."""
_MAX_SEQ_LENGTH = 2**22
_MAX_BATCH = 2**12
_SEQ_STEP = 256
"""Longest sequences are multiples of this. A finer step is below the error of the memory estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning(Record):
    """A way to fine-tune a model on some GPUs, with its estimate and its limits."""

    method: str
    """`full`, or `lora` or `qlora` with the rank: `lora:16`."""
    settings: tuple[str, ...]
    """Names of the settings that save memory."""
    estimate: LlmEstimate
    max_seq_length: int = 0
    """Longest sequence that fits, of those with the same micro-batch; 0 if none does."""
    max_micro_batch_size: int = 0
    """Largest micro-batch that fits, of those with the same sequences; 0 if none does."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """Method and settings in words.

        >>> fit_llm("llama-3-8b", "l40s:1", seq_length=2048).ways[0].name
        'lora:16, fused CE'
        """
        return ", ".join((self.method, *self.settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmFits(Reported, Record):
    """All ways to fine-tune a model on some GPUs: those that fit, the fastest first, then the others by what they lack.

    `print` shows the report of `hpgo llm fit`, and `to_frame` has one row per way.
    """

    ways: tuple[FineTuning, ...]

    def __repr__(self) -> str:
        first = self.ways[0].estimate
        fitting = sum(one.estimate.fits for one in self.ways)
        return brief(
            "LlmFits",
            f"{shorten(first.model, 24)} on {shorten(first.cluster, 24)}: {fitting} of"
            f" {pluralize(len(self.ways), 'way')} fit",
        )

    def rows(self, top: int = 10) -> tuple[FineTuning, ...]:
        """Return the ways to report: at most `top` that fit, and of each method the nearest that does not.

        Left out are ways that another one of the same method beats in step time and in memory. Methods without settings
        stay.

        >>> found = fit_llm("llama-3-8b", "rtx4090:1", methods=["qlora", "full"])
        >>> [one.name for one in found.rows(top=1)]
        ['qlora:16, fused CE', 'full, recompute, fused CE, paged Adam, no fp32', 'full']
        """
        fitting = [one for one in staircase(self.ways) if one.estimate.fits][:top]
        nearest = {one.method: one for one in reversed(self.ways) if not one.estimate.fits}
        others = (one for one in self.ways if not one.estimate.fits)
        return (*fitting, *(one for one in others if one is nearest[one.method] or not one.settings))


def methods_of(words: Iterable[str]) -> list[tuple[str, int]]:
    """Return methods and ranks of words like `lora:16`. Raise ArgumentError for other words.

    >>> methods_of(["full", "lora", "qlora:64"])
    [('full', 0), ('lora', 16), ('qlora', 64)]
    """
    found = []
    hint = f"give a list of {join_words(METHODS, 'or')}, the latter two perhaps with a rank: ['lora:16']"
    for word in check_list("the methods", words, hint=hint):
        check_is("a method", word, str, hint)
        method, colon, rank = word.partition(":")
        is_rank = rank.isascii() and rank.isdecimal() and len(rank) <= 6 and int(rank) > 0
        if method not in METHODS or (bool(colon) and (method == "full" or not is_rank)):
            raise ArgumentError(
                f"unknown method: `{shorten(word)}`", f"use {join_words(METHODS, 'or')}, or a rank: lora:16"
            )
        found.append((method, 0 if method == "full" else int(rank) if colon else LORA_RANK))
    return found


def fit_llm(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    devices: int = 1,
    seq_length: int = 2048,
    micro_batch_size: int = 1,
    methods: Iterable[str] = METHODS,
) -> LlmFits:
    """Find all ways to fine-tune a model on some GPUs, with the longest sequence and the largest micro-batch of each.

    Args:
        transformer: a shape, its name, or a file with one.
        cluster: equal nodes with devices whose rates are known; a device is a GPU.
        devices: number of GPUs to use, the first of the cluster.
        seq_length: tokens per sequence.
        micro_batch_size: sequences per GPU and pass.
        methods: `full`, `lora` or `qlora`, the latter two perhaps with a rank: `lora:64`.

    Raises ArgumentError for unknown methods, and what `hpgo.estimate_llm` raises.

    >>> found = fit_llm("llama-3-8b", "rtx4090:1", methods=["qlora"])
    >>> best = found.ways[0]
    >>> best.estimate.fits, best.max_seq_length >= 2048, best.max_micro_batch_size >= 1
    (True, True, True)
    """
    model, cluster = transformer_of(transformer), cluster_of(cluster)
    cluster = cluster.first(check_int("devices", devices))
    ask = {
        "seq_length": check_int("seq_length", seq_length),
        "micro_batch_size": check_int("micro_batch_size", micro_batch_size),
    }
    check_positions(model, ask["seq_length"])
    found = [
        FineTuning(
            method=name,
            settings=settings,
            estimate=one(**ask),
            max_seq_length=_longest(one, model, ask),
            max_micro_batch_size=_largest_batch(one, ask),
        )
        for name, settings, one in _ways(model, cluster, methods_of(methods))
    ]
    order = sorted(found, key=lambda one: (one.estimate.shortfall_bytes, one.estimate.step_s, len(one.settings)))
    return LlmFits(ways=tuple(order))


def staircase(ways: Iterable[FineTuning]) -> tuple[FineTuning, ...]:
    """Return the ways that no other one of their method beats in step time and in memory, and those without settings.

    The order stays.
    """
    found = list(ways)

    def is_beaten(one: FineTuning) -> bool:
        mine = (one.estimate.step_s, one.estimate.fullest.peak_bytes)
        others = ((other.estimate.step_s, other.estimate.fullest.peak_bytes) for other in found
                  if other.method == one.method)  # fmt: skip
        return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in others)

    return tuple(one for one in found if not one.settings or not is_beaten(one))


def fewest_gpus(
    transformer: Transformer | str | os.PathLike[str],
    cluster: Cluster | str | os.PathLike[str],
    *,
    method: str,
    seq_length: int = 2048,
    micro_batch_size: int = 1,
    most: int = MAX_GPUS,
) -> FineTuning | None:
    """Return the fastest way of a method on the fewest GPUs, of powers of 2 up to `most`; None if it fits on none.

    The nodes are copies of the first node of `cluster`. Raises what `fit_llm` raises.

    >>> one = fewest_gpus("llama-3-70b", "h100:1", method="lora")
    >>> one.estimate.gpus, one.estimate.fits
    (4, True)
    """
    model, cluster = transformer_of(transformer), cluster_of(cluster)
    # With more GPUs each holds a smaller shard, so the first number that fits is the smallest.
    each, gpus = cluster.nodes[0].count, 1
    while gpus <= most:
        nodes = cluster.nodes[:1] * -(-gpus // each)
        part = replace(cluster, nodes=nodes).first(gpus)
        fitting = [
            FineTuning(method=name, settings=settings, estimate=estimate)
            for name, settings, one in _ways(model, part, methods_of([method]))
            if (estimate := one(seq_length=seq_length, micro_batch_size=micro_batch_size)).fits
        ]
        if fitting:
            return min(fitting, key=lambda one: (one.estimate.step_s, len(one.settings)))
        gpus *= 2
    return None


def largest_models(
    cluster: Cluster | str | os.PathLike[str],
    *,
    devices: int = 1,
    seq_length: int = 2048,
    micro_batch_size: int = 1,
    methods: Iterable[str] = METHODS,
) -> tuple[FineTuning, ...]:
    """Return for each method the largest built-in transformer that fits, with the fastest settings that do.

    Arguments and errors are as in `fit_llm`. Methods with which no model fits are left out. Transformers that
    have no positions for `seq_length` are passed over.

    >>> [(one.method, one.estimate.model) for one in largest_models("rtx4090:1", methods=["qlora"])]
    [('qlora:16', 'gpt-neox-20b')]
    """
    cluster = cluster_of(cluster).first(check_int("devices", devices))
    ask = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
    models = sorted(TRANSFORMERS.values(), key=lambda one: -one.parameters)
    found = []
    for method in methods_of(methods):
        for model in models:
            try:
                check_positions(model, seq_length)
            except ArgumentError:
                continue
            fitting = [
                FineTuning(method=name, settings=settings, estimate=estimate)
                for name, settings, one in _ways(model, cluster, [method])
                if (estimate := one(**ask)).fits
            ]
            # Models come in falling numbers of parameters.
            if fitting:
                found.append(min(fitting, key=lambda one: (one.estimate.step_s, len(one.settings))))
                break
    return tuple(found)


def _ways(
    model: Transformer, cluster: Cluster, methods: Iterable[tuple[str, int]]
) -> Iterator[tuple[str, tuple[str, ...], Callable[..., LlmEstimate]]]:
    """Yield method, settings and a function that estimates them, for all combinations of settings."""
    gpus = cluster.devices

    def estimator(arguments: dict[str, Any]) -> Callable[..., LlmEstimate]:
        def estimate(*, seq_length: int, micro_batch_size: int) -> LlmEstimate:
            return estimate_llm(
                model, cluster, seq_length=seq_length, micro_batch_size=micro_batch_size,
                global_batch_size=gpus * micro_batch_size, **arguments,
            )  # fmt: skip

        return estimate

    for method, rank in methods:
        shared: dict[str, Any] = {"zero_stage": MAX_ZERO if gpus > 1 else 0, "lora_rank": rank}
        shared |= {"base_weights_dtype": "nf4"} if method == "qlora" else {}
        varied = (rows for key, rows in _SETTINGS.items() if method == "full" or key in _OF_ADAPTERS)
        for chosen in product(*varied):
            arguments = shared.copy()
            for _, setting in chosen:
                arguments |= setting
            # The CPU's optimizer updates weights in 32 bits. Without these there is nothing for it to hold.
            if arguments.get("optimizer_offload_fraction") and arguments.get("main_params_dtype") == "none":
                continue
            name = f"{method}:{rank}" if rank else method
            yield name, tuple(word for word, _ in chosen if word), estimator(arguments)


def _longest(one: Callable[..., LlmEstimate], model: Transformer, ask: dict[str, int]) -> int:
    """Return the longest sequence that fits. Models with learned positions have a limit besides memory."""

    def estimate(steps: int) -> LlmEstimate:
        return one(**ask | {"seq_length": steps * _SEQ_STEP})

    # A model whose positions have no limit may have any length, trained or not.
    most = _MAX_SEQ_LENGTH // _SEQ_STEP
    try:
        check_positions(model, _MAX_SEQ_LENGTH)
    except ArgumentError:
        most = max(1, model.longest // _SEQ_STEP)
    return _SEQ_STEP * _largest(estimate, most)


def _largest_batch(one: Callable[..., LlmEstimate], ask: dict[str, int]) -> int:
    """Return the largest micro-batch that fits."""
    return _largest(lambda size: one(**ask | {"micro_batch_size": size}), _MAX_BATCH)


def _largest(estimate: Callable[[int], LlmEstimate], most: int) -> int:
    """Return the largest size up to `most` whose estimate fits; 0 if none does. Larger sizes need more memory."""
    low, high = 0, 1
    # Double first: estimates of huge sizes are as fast as others, but most answers are small.
    while high <= most and estimate(high).fits:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if estimate(middle).fits else (low, middle)
    return low
