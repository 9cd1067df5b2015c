"""Report of a plan for machines that differ, as text of at most 80 columns and as a document for JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_seconds
from hpgo.llm.plan import facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.mixed.plan import MixedPipelinePlan, MixedPlanSearch, MixedStages

WIDTH = 80
WAYS = {"pipeline": "one pipeline through several kinds", "apart": "kinds apart, the batch split by speed"}


def lines(found: MixedPlanSearch, width: int = WIDTH, *, title: str = "", arguments: Sequence[str] = ()) -> list[str]:
    """Return the lines of the report. The framework `title` reads the `arguments` for the pipeline."""
    header = (
        f"{printable(found.transformer.name)} on {printable(found.cluster.name)}"
        f" ({pluralize(found.cluster.devices, 'GPU')}), {found.seq_length} tokens per sequence, global batch"
        f" {found.global_batch_size}, {found.precision}"
    )
    steps = sorted(found.steps_s.items(), key=lambda one: one[1])
    rows = [
        (WAYS.get(way, way), format_seconds(step_s), f"{100 * (step_s / found.step_s - 1):+.1f} %")
        for way, step_s in steps
    ]
    report = [
        *textwrap.wrap(header, width),
        "",
        "Ways to train, the fastest first (estimated by one cost model, not measured)",
        *plain(["way", "step time", ""], rows, width),
        "",
        *textwrap.wrap(
            f"The 90 % range of {format_seconds(found.step_s)} is {format_seconds(found.low_s)} to"
            f" {format_seconds(found.high_s)}. No plan on these GPUs takes less than"
            f" {format_seconds(found.work_bound_s)}: that is the work of all layers alone, shared as well as possible.",
            width,
        ),
    ]
    for missing in (kind for kind, one in found.alone if one is None):
        report += textwrap.wrap(f"{printable(missing)} alone has no configuration that fits.", width)
    if found.pipeline is None:
        report += ["No pipeline through several kinds fits in memory."]
    else:
        report += ["", *_pipeline(found.pipeline, width)]
    if found.shares:
        report += ["", *_apart(found, width)]
    if arguments:
        report += ["", f"Arguments of {title} for the pipeline:", *(f"  {line}" for line in arguments)]
    return report


def _pipeline(pipeline: MixedPipelinePlan, width: int) -> list[str]:
    rows, start = [], 0
    for part in pipeline.stages:
        config, stop = part.parallelism, start + len(part.layers)
        rows.append(
            (
                str(start) if stop == start + 1 else f"{start}-{stop - 1}",
                f"{printable(part.kind)} x {part.gpus}",
                *(str(each) for each in (config.tp, config.cp, config.ep, config.dp, config.micro_batch_size)),
                config.recompute,
                _layers(part.layers),
                format_bytes(max(part.peak_bytes)),
                f"{100 * min(part.busy_share):.0f} %",
            )
        )
        start = stop
    proof = (
        "No other pipeline of the search space is faster."
        if pipeline.is_proven
        else f"The search ended early: no pipeline of its space takes less than {format_seconds(pipeline.bound_s)}."
    )
    note = (
        "The embedding is on the first stage and the LM head on the last one."
        f" {pluralize(pipeline.micro_batches, 'micro-batch')} of"
        f" {pluralize(pipeline.samples_per_micro_batch, 'sequence')}, 1F1B. {pipeline.pipelines:,} combinations of"
        f" degrees bounded, {pipeline.simulated:,} splits of the layers simulated. {proof}"
    )
    names = ["stages", "GPUs", "tp", "cp", "ep", "dp", "micro", "recompute", "layers each", "memory", "busy"]
    keep = [at for at in range(len(names)) if names[at] != "ep" or any(row[at] != "1" for row in rows)]
    table = plain([names[at] for at in keep], [[row[at] for at in keep] for row in rows], width)
    return [
        f"One pipeline through several kinds: {format_seconds(pipeline.step_s)}",
        *table,
        *textwrap.wrap(note, width),
    ]


def _layers(counts: Sequence[int]) -> str:
    """Return the layers of stages, with equal neighbors together.

    >>> _layers([5, 6, 6, 6, 5])
    '5 3x6 5'
    """
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return " ".join(f"{length}x{count}" if length > 1 else str(count) for count, length in runs)


def _apart(found: MixedPlanSearch, width: int) -> list[str]:
    report = [f"Kinds apart: {format_seconds(found.apart_s or 0.0)}, with the sum of gradients over the kinds"]
    for share in found.shares:
        text = (
            f"{printable(share.kind)}, {share.estimate.gpus:,} GPUs: {pluralize(share.samples, 'sequence')} in"
            f" {format_seconds(share.estimate.step_s)}, {share.estimate.parallelism.named()}"
        )
        report += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return report


def document(found: MixedPlanSearch, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Return all facts of the answer for JSON."""
    pipeline = found.pipeline
    return {
        "format": "hpgo.mixed_llm_plan",
        "version": 1,
        "made_with": _core.__version__,
        "model": found.transformer.name,
        "cluster": found.cluster.name,
        "kinds": [{"kind": kind, "gpus": part.devices} for (kind, _), part in _parts(found)],
        "global_batch_size": found.global_batch_size,
        "seq_length": found.seq_length,
        "precision": found.precision,
        "best": found.best,
        "step_s": found.step_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "work_bound_s": found.work_bound_s,
        "steps_s": found.steps_s,
        "pipeline": None
        if pipeline is None
        else asdict(pipeline) | {"stages": [_stages(part) for part in pipeline.stages], "arguments": list(arguments)},
        "apart": [
            {"kind": share.kind, "samples": share.samples, "estimate": facts(share.estimate)} for share in found.shares
        ],
        "alone": {kind: None if one is None else facts(one) for kind, one in found.alone},
    }


def _parts(found: MixedPlanSearch) -> Any:
    return zip(found.alone, found.cluster.parts, strict=True)


def _stages(part: MixedStages) -> dict[str, Any]:
    return asdict(part)
