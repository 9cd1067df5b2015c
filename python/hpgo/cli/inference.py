"""`hpgo run --inference`: one rank's part, and what the last one prints."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import islice, repeat
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.errors import ArgumentError
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.compared import compared, percent
from hpgo.cli.terminal import passing_lines, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.pipeline import Pipeline
    from hpgo.timing.flow import Flow
    from hpgo.timing.timeline import Timeline

_MICRO_BATCHES = 64
_PERCENTS = (50, 95, 99)
_PAUSE_S = 1.0
"""Between two lines that say how far it is."""


def infer(
    plan: Plan | ChainPlan | Program,
    workload: str,
    *,
    data: str | None,
    micro_batches: int | None,
    in_flight: int | None,
    quantize: tuple[int, ...] | None,
    hold_samples_per_s: float | None,
    checkpoint: str | None,
    timeline: str | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """One rank's part; that of the last stage prints. `options` are those of `Pipeline`."""
    from hpgo.runtime import Pipeline

    bits = quantize[0] if quantize is not None and len(quantize) == 1 else quantize
    with Pipeline(plan, workload, inference=True, quantize=bits, **options) as pipeline:
        if checkpoint is not None and not pipeline.resume(checkpoint):
            raise ArgumentError(
                f"there is no checkpoint in {checkpoint}",
                "leave out `--resume`, or name another folder",
                code="not_found",
            )
        talks = pipeline.gives_outputs
        source = _Source(pipeline, data) if talks or pipeline.takes_batches else None
        inputs = () if source is None else islice(source.inputs(), micro_batches or source.micro_batches)
        begin_s = told_s = time.perf_counter()
        right = counted = samples = 0
        with passing_lines() if talks and not as_json else nullcontext() as tell:
            stream = pipeline.infer(inputs, in_flight=in_flight, hold_samples_per_s=hold_samples_per_s)
            for number, outputs in enumerate(stream, start=1):
                if source is not None and data is not None:
                    found = source.compared(number - 1, outputs)
                    right, counted = right + found[0], counted + found[1]
                samples += len(outputs if not isinstance(outputs, tuple) else outputs[0])
                now_s = time.perf_counter()
                if tell is not None and now_s - told_s > _PAUSE_S:
                    told_s = now_s
                    right_so_far = f"  {percent(right / counted)} right" if counted else ""
                    tell(f"micro-batch {number}  {samples / (now_s - begin_s):.4g} samples/s{right_so_far}")
        flow, measured = pipeline.flow(), pipeline.timeline()
    if talks:
        if timeline is not None:
            measured.save(timeline)
        accuracy = right / counted if counted else None
        _conclude(pipeline, flow, measured, accuracy, hold_samples_per_s, in_flight=in_flight, as_json=as_json)


class _Source:
    """Micro-batches of a data set, in its order, or of the workload's example."""

    def __init__(self, pipeline: Pipeline, data: str | None) -> None:
        import torch

        self._size = pipeline.program.micro_batch_size
        self._pipeline = pipeline
        self._data: Any = None
        said = pipeline.program.micro_batches
        # A plan of hosts says no number: its program has one for each route.
        self.micro_batches = said if said > len(pipeline.program.schedule.micro_batches) else _MICRO_BATCHES
        if data is not None:
            from hpgo.runtime.loader import length_of
            from hpgo.runtime.named import made_by

            with torch.random.fork_rng(devices=[]):  # what it draws is no part of the run
                self._data = made_by(data, "data", seed=0, wanted="a data set: pairs of inputs and targets")
            self.micro_batches = math.ceil(length_of(self._data) / self._size)

    def inputs(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Of one micro-batch after the other."""
        if self._data is None:
            from hpgo.runtime.loader import repeated

            return repeat(repeated(self._pipeline.workload.example_inputs, [range(self._size)]).tensors)
        return (self._pair(number)[0] for number in range(self.micro_batches))

    def compared(self, number: int, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[int, int]:
        """How many answers of a micro-batch are right, and how many there are; none where targets are no classes."""
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        target = self._pair(number)[1][0].to(first.device)
        if target.is_floating_point() or target.shape != first.shape[:-1]:
            return 0, 0
        return int((first.argmax(-1) == target).sum()), target.numel()

    def _pair(self, number: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        from hpgo.runtime.loader import collated

        begin = number * self._size
        return collated([self._data[at] for at in range(begin, min(begin + self._size, len(self._data)))])


def _conclude(
    pipeline: Pipeline,
    flow: Flow,
    measured: Timeline,
    accuracy: float | None,
    hold_samples_per_s: float | None,
    *,
    in_flight: int | None,
    as_json: bool,
) -> None:
    """Prints what was measured beside what was predicted."""
    from hpgo.programs.turns import hosts_of, routes_of
    from hpgo.timing.breakdown import breakdown
    from hpgo.timing.flow import predicted_flow
    from hpgo.timing.simulation import simulate

    program = pipeline.program
    foreseen = predicted_flow(program, flow.samples, in_flight=in_flight)
    ran = breakdown(measured)
    passes = {"predicted": None if program.costs is None else breakdown(simulate(program)), "measured": ran}

    def both(of: Callable[[Flow], float]) -> dict[str, Any]:
        return {"predicted": None if foreseen is None else of(foreseen), "measured": of(flow)}

    rate = both(attrgetter("samples_per_s"))
    latencies = {f"p{share}": both(methodcaller("latency_s", share)) for share in _PERCENTS}
    length = program.schedule.chain_length
    hosts = hosts_of(routes_of(program))

    def of_stage(which: str, name: str, number: int) -> float | None:
        """On all routes; those of hosts that are slower count."""
        step = passes[which]
        values = () if step is None else getattr(step, name)[number::length]
        return max((value for value in values if value is not None), default=None)

    bits, sent = (*pipeline.bits, 0), (*pipeline.sent_bits, {})
    stages: list[dict[str, Any]] = [
        {"stage": number, "layers": list(stage.layers), "devices": list(hosts[number]), "bits": bits[number] or None}
        | {"sent_bits": {str(width): sent[number][width] for width in sorted(sent[number])}}
        | {name: {which: of_stage(which, name, number) for which in passes} for name in ("forward_s", "transfer_s")}
        for number, stage in enumerate(program.stages[:length])
    ]
    if as_json:
        facts = {
            "format": "hpgo.inference", "version": 1, "micro_batches": len(flow.samples), "samples": sum(flow.samples),
            "samples_per_s": rate, "hold_samples_per_s": hold_samples_per_s, "accuracy": accuracy,
            "latency_s": latencies, "most_in_flight": flow.most_in_flight, "stages": stages,
            "peak_memory_bytes": ran.peak_memory_bytes, "exit": 0,
        }  # fmt: skip
        click.echo(json_text(facts))
        return
    held = None if hold_samples_per_s is None else flow.samples_per_s
    rows: list[tuple[str, Callable[[float], str], dict[str, Any]]] = [
        ("throughput", _rate, rate),
        ("rate to hold", _rate, {"predicted": hold_samples_per_s, "measured": held}),
        ("accuracy", percent, {"predicted": None, "measured": accuracy}),
    ]
    rows += [(f"latency {name}", format_seconds, values) for name, values in latencies.items()]
    for stage in stages:
        number = stage["stage"]
        rows += [
            (f"stage {number} forward", format_seconds, stage["forward_s"]),
            (f"stage {number} to {number + 1}" + _width(sent[number]), format_seconds, stage["transfer_s"]),
        ]
    rows += [
        ("most in flight", _count, both(attrgetter("most_in_flight"))),
        ("peak memory", format_bytes, {"predicted": None, "measured": ran.peak_memory_bytes}),
    ]
    table(
        ("", "predicted", "measured", "difference"),
        [
            (name, *compared(shown, values))
            for name, shown, values in rows
            if any(value is not None for value in values.values())
        ],
    )


def _width(sent: dict[int, int]) -> str:
    """In how many bits micro-batches have crossed a cut."""
    from hpgo.runtime.runnable import WHOLE_BITS

    used = {width or WHOLE_BITS: count for width, count in sent.items()}
    if len(used) < 2:
        return "".join(f", {width} bit" for width in used if width < WHOLE_BITS)
    most = max(used, key=lambda width: used[width])
    return f", {min(used)} to {max(used)} bit, mostly {most}"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.4g} samples/s"


def _count(number: float) -> str:
    return f"{number:g}"
