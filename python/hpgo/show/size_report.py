"""Report of the clusters for a training run, as text of at most 80 columns and as a document for JSON."""

from __future__ import annotations

import shlex
import textwrap
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import join_words, pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_count
from hpgo.llm.goodput import HOUR_S
from hpgo.llm.plan import facts
from hpgo.llm.size import PUBLISHED_RUNS
from hpgo.show.llm_report import next_commands

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.prices import Prices
    from hpgo.llm.size import LlmSizes, SizePoint

WIDTH = 80


def lines(sizes: LlmSizes, prices: Prices | None = None, width: int = WIDTH, *, model: str = "") -> list[str]:
    """Return the lines of the report: the clusters, what they are worth to each other, and their configurations.

    `model` is the name or file of the model on the command line. With it, the report ends with the next command.
    """
    asked = (
        f"{printable(sizes.transformer.name)}: {format_count(sizes.tokens)} tokens in sequences of"
        f" {sizes.seq_length:,}, about {format_count(sizes.global_batch_size * sizes.seq_length)} tokens per step,"
        f" {sizes.precision}"
    )
    currency = "" if prices is None else prices.currency
    limited = sizes.days is not None or sizes.budget is not None
    shown = sizes.answers if limited else sizes.front
    found = [*textwrap.wrap(asked, width), ""]
    if shown:
        found += [f"{_title(sizes, currency)} (estimated, not measured)"]
        found += plain(*_table(sizes, shown, currency), width)
    for kind in sizes.kinds:
        if not any(point.kind == kind for point in shown):
            found += textwrap.wrap(_none(sizes, kind), width, subsequent_indent="  ")
    if not shown:
        return [*found, *_incomplete(sizes)]
    found += ["", "Configurations"]
    for point in shown:
        text = f"{point.kind}, {point.gpus:,} GPUs: {point.estimate.parallelism.named()}"
        if point.estimate.gpus < point.gpus:
            text += f"; {point.gpus - point.estimate.gpus:,} GPUs idle"
        found += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    notes = [*_exchange(sizes), *_source(prices), _published(shown), *_failures(sizes, shown), _search(sizes)]
    for note in notes:
        found += ["", *textwrap.wrap(note, width)]
    # No command names a part of each node, so clusters with idle GPUs have no next command.
    whole = [point for point in shown if point.estimate.gpus == point.gpus]
    if model and whole:
        found += next_commands([_plan_command(sizes, whole[0], model)], "Next:")
    return [*found, *_incomplete(sizes)]


def _plan_command(sizes: LlmSizes, point: SizePoint, model: str) -> str:
    """Return the command that plans the configuration of a cluster."""
    batch = str(point.estimate.global_batch_size)
    words = ["hpgo", "llm", "plan", model, "-c", f"{point.kind}:{point.nodes}", "-b", batch]
    words += ["--seq-length", str(sizes.seq_length), "--devices", str(point.gpus)]
    words += [] if sizes.precision == "bf16" else ["--precision", sizes.precision]
    words += [] if sizes.framework == "megatron" else ["--framework", sizes.framework]
    return shlex.join([*words, "--choose", "fastest", "-o", "llm-plan.json"])


def _title(sizes: LlmSizes, currency: str) -> str:
    within = "" if sizes.budget is None else f" for at most {_figure(sizes.budget)} {printable(currency)}"
    if sizes.days is not None:
        return f"Smallest clusters that take at most {_figure(sizes.days)} days{within}"
    if sizes.budget is not None:
        return f"Fastest clusters{within}"
    return f"Clusters that no other one beats in days and in {'cost' if sizes.hour_prices else 'GPU-hours'}"


def _table(sizes: LlmSizes, points: Sequence[SizePoint], currency: str) -> tuple[list[str], list[list[str]]]:
    names = ["kind", "nodes", "GPUs", "days", "90 % range", "GPU-hours"]
    names += [f"cost ({currency})"] if sizes.hour_prices else []
    names += ["MFU", "goodput", "batch"]
    rows = [
        [
            point.kind,
            f"{point.nodes:,}",
            f"{point.gpus:,}",
            _figure(point.days),
            "–".join(_figure(end) for end in point.range_days),
            format_count(float(f"{point.gpu_hours:.3g}")),
            *([format_count(float(f"{sizes.cost(point):.3g}"))] if sizes.hour_prices else []),
            f"{100 * point.estimate.utilization:.0f} %",
            f"{100 * point.goodput:.1f} %",
            f"{point.estimate.global_batch_size:,}",
        ]
        for point in points
    ]
    return names, rows


def _none(sizes: LlmSizes, kind: str) -> str:
    """Return why a kind of node is not among the clusters of the report."""
    points = sizes.of_kind(kind)
    most = dict(sizes.tried)[kind]
    if not points:
        return f"{kind}: none of up to {most:,} GPUs; no configuration fits in memory on those that were tried"
    fastest = min(points, key=lambda point: point.days)
    if sizes.days is None and sizes.budget is None:
        return f"{kind}: each of its clusters is beaten in days and in {'cost' if sizes.hour_prices else 'GPU-hours'}"
    if sizes.budget is not None and (sizes.days is None or fastest.days <= sizes.days):
        least = min((point for point in points if sizes.days is None or point.days <= sizes.days), key=sizes.cost)
        return f"{kind}: none; the cheapest that was tried, {least.gpus:,} GPUs, costs {_figure(sizes.cost(least))}"
    return f"{kind}: none of up to {most:,} GPUs; {fastest.gpus:,} take {_figure(fastest.days)} days"


def exchange_rates(sizes: LlmSizes) -> dict[str, float]:
    """Return how many GPU-hours of the first kind with an answer do the work of one GPU-hour of each other kind."""
    # Within a budget, clusters differ in size. Their GPU-hours say nothing about the same run in the same time.
    if sizes.days is None:
        return {}
    answers = {kind: point for kind in sizes.kinds if (point := sizes.answer(kind)) is not None}
    if not answers:
        return {}
    first, *others = answers
    return {kind: answers[first].gpu_hours / answers[kind].gpu_hours for kind in others}


def _source(prices: Prices | None) -> list[str]:
    if prices is None:
        return []
    return [f"Prices of {printable(prices.as_of)}: {printable(prices.source)}."]


def _exchange(sizes: LlmSizes) -> list[str]:
    rates = exchange_rates(sizes)
    if not rates:
        return []
    first = next(kind for kind in sizes.kinds if sizes.answer(kind) is not None)
    words = [f"one of {kind} is worth {rate:.2f}" for kind, rate in rates.items()]
    return [f"In GPU-hours of {first}, {join_words(words)}. Pay more for one only if it costs less than that."]


def _published(points: Sequence[SizePoint]) -> str:
    count, low, middle, high = PUBLISHED_RUNS
    # Ranges of single steps know nothing of restarts by hand, evaluation, slow nodes and smaller batches at the start.
    text = (
        f"Of {count} published runs, half took {low:.2f} to {high:.2f} times the GPU-hours that this command predicts,"
        f" {middle:.2f} at the median: the 90 % range is of the step time alone."
    )
    factor = points[0].allowance
    return f"{text} --allowance {middle:.2f} counts that in." if factor == 1 else f"{text} Counted in: {factor:g}."


def _failures(sizes: LlmSizes, points: Sequence[SizePoint]) -> list[str]:
    point, held = points[0], sizes.failures
    mtbf = f"one in {_figure(point.mtbf_s / HOUR_S)} h on {point.estimate.gpus:,} GPUs"
    text = (
        f"Failures: {mtbf} (one in {held.mtbf_gpu_hours:,.0f} GPU-hours), {held.restart_s:g} s for a restart and"
        f" {held.save_s:g} s for a checkpoint, which is best saved every {point.save_interval_s / 60:.0f} min of"
        f" training. This loses {100 * (1 - point.goodput):.1f} % of the time."
    )
    return [text]


def _search(sizes: LlmSizes) -> str:
    return (
        f"{pluralize(sizes.searches, 'search')} for the fastest configuration that {sizes.framework} runs. Numbers of"
        " nodes with at most 5 significant binary digits were tried."
    )


def _incomplete(sizes: LlmSizes) -> list[str]:
    return [] if sizes.is_complete else ["", "The search was interrupted, so smaller or better clusters may exist."]


def _figure(value: float) -> str:
    """Return three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def document(sizes: LlmSizes, prices: Prices | None = None) -> dict[str, Any]:
    """Return the result as a document for JSON."""
    return {
        "format": "hpgo.llm_sizes",
        "version": 1,
        "model": sizes.transformer.name,
        "tokens": sizes.tokens,
        "seq_length": sizes.seq_length,
        "global_batch_size": sizes.global_batch_size,
        "precision": sizes.precision,
        "framework": sizes.framework,
        "max_days": sizes.days,
        "budget": sizes.budget,
        "prices": None if prices is None else {key: getattr(prices, key) for key in ("as_of", "source", "currency")},
        "gpu_hour_prices": dict(sizes.hour_prices),
        "max_gpus": dict(sizes.tried),
        "failures": {
            "mtbf_gpu_hours": sizes.failures.mtbf_gpu_hours,
            "restart_s": sizes.failures.restart_s,
            "save_s": sizes.failures.save_s,
        },
        "complete": sizes.is_complete,
        "searches": sizes.searches,
        "gpu_hours_of_first_kind": exchange_rates(sizes),
        "answers": [_key(point) for point in sizes.answers],
        "front": [_key(point) for point in sizes.front],
        "points": [
            _point(point) | {"cost": sizes.cost(point) if sizes.hour_prices else None} for point in sizes.points
        ],
    }


def _key(point: SizePoint) -> dict[str, Any]:
    return {"kind": point.kind, "nodes": point.nodes}


def _point(point: SizePoint) -> dict[str, Any]:
    low_days, high_days = point.range_days
    return {
        "kind": point.kind,
        "nodes": point.nodes,
        "gpus": point.gpus,
        "used_gpus": point.estimate.gpus,
        "global_batch_size": point.estimate.global_batch_size,
        "steps": point.steps,
        "step_s": point.estimate.step_s,
        "utilization": point.estimate.utilization,
        "goodput": point.goodput,
        "save_interval_s": point.save_interval_s,
        "mtbf_s": point.mtbf_s,
        "allowance": point.allowance,
        "days": point.days,
        "low_days": low_days,
        "high_days": high_days,
        "gpu_hours": point.gpu_hours,
        "unvalidated_features": list(point.estimate.unvalidated_features),
        "parallelism": facts(point.estimate)["parallelism"],
    }
