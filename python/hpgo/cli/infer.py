"""Command `hpgo infer`: stream batches through the stages of a plan, and compare throughput and latency with it."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import islice, repeat
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.command import option, takes
from hpgo.cli.compared import compared, percent
from hpgo.cli.processes import ModelOptions, run_ranks
from hpgo.cli.terminal import passing_lines, table
from hpgo.cli.values import FOLDER
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hpgo.runtime import InferencePipeline
    from hpgo.runtime.runnable import Runnable
    from hpgo.timing.flow import Flow
    from hpgo.timing.timeline import Timeline

_MICRO_BATCHES = 64
_PERCENTS = (50, 95, 99)
_PAUSE_S = 1.0
"""Time between two progress lines."""


_SECTIONS = {
    "Model and data": "workload data seed dtype autocast checkpoint",
    "Stream": "micro_batches in_flight quantize hold_rate",
    "Processes": "device shared_memory timeout_s heartbeat_timeout_s grace_s",
    "Output": "timeline find_nan as_json",
}


class _Bits(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Bits for all cuts or for each cut, such as `8` or `8,0,4`."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers in the order given."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.strip().isdecimal() for word in words):
            self.fail(f"`{value}` is not a list of integers; write `8`, or `8,0,4` with one for each cut", param, ctx)
        return tuple(map(int, words))


class InferOptions(ModelOptions):
    """Options of `hpgo infer`: model and stream."""

    checkpoint: str | None = option(
        "--checkpoint", type=FOLDER, metavar="FOLDER", help="Load the weights of the newest checkpoint in FOLDER."
    )
    micro_batches: int | None = option(
        "--micro-batches",
        type=click.IntRange(1),
        metavar="N",
        help="Number of micro-batches to stream.  [default: 64, or all data]",
    )
    in_flight: int | None = option(
        "--in-flight",
        type=click.IntRange(1),
        metavar="N",
        help="Maximum number of micro-batches in the pipeline at once.",
    )
    quantize: tuple[int, ...] | None = option(
        "-q",
        "--quantize",
        type=_Bits(),
        metavar="BITS[,BITS…]",
        help="Bits per value of the output of each stage; 0 disables quantization.",
    )
    hold_rate: float | None = option(
        "--hold-rate", type=float, metavar="X", help="Adapt the bits at run time so that links carry X samples/s."
    )


@takes(InferOptions, sections=_SECTIONS)
def command(options: InferOptions) -> None:
    """Stream batches through a model whose layers PLAN.json splits over hosts or devices.

    PLAN.json is a file of `hpgo partition --json`, or a program with forward passes only. The weights come from
    --checkpoint, or from the workload. A table compares throughput and latency with the plan.

    The command starts one process per host of the plan on this machine. Under torchrun, or another launcher that sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it is one rank.

    \b
    Examples:
      hpgo infer chain.json --workload vit
      hpgo infer chain.json --workload vit --data my_model:images
      hpgo infer chain.json --workload vit --quantize 8,0,4
      hpgo infer chain.json --workload my_model:build --checkpoint saved
    """
    run_ranks(
        options,
        lambda runnable: _infer(options, runnable),
        read=lambda: _read(options.plan),
        prepare=_prepare,
        kept="all micro-batches that had entered the pipeline have left it",
    )


def _read(file: str) -> Runnable:
    from hpgo.runtime.runnable import Runnable

    return Runnable.from_plan(file)


def _prepare(runnable: Runnable) -> None:
    from hpgo.runtime.runnable import check_inference

    check_inference(runnable.program)


def _infer(options: InferOptions, runnable: Runnable) -> None:
    """Run one rank. The rank of the last stage prints the result."""
    from hpgo.runtime import InferencePipeline

    data, bits = options.data, options.quantize
    with InferencePipeline(
        runnable,
        options.workload,
        quantize=bits[0] if bits is not None and len(bits) == 1 else bits,
        **options.of_pipeline(),
    ) as pipeline:
        if options.checkpoint is not None and not pipeline.resume(options.checkpoint):
            raise ArgumentError(
                f"no checkpoint found in `{options.checkpoint}`",
                "use another folder, or leave out `--checkpoint`",
                code="not_found",
            )
        talks = pipeline.gives_outputs
        # Ranks in the middle of the pipeline need no data.
        source = _Source(pipeline, data) if talks or pipeline.takes_batches else None
        inputs = () if source is None else islice(source.inputs(), options.micro_batches or source.micro_batches)
        begin_s = printed_s = time.perf_counter()
        right = counted = samples = 0
        with passing_lines() if talks and not options.as_json else nullcontext() as tell:
            stream = pipeline.infer(inputs, in_flight=options.in_flight, hold_samples_per_s=options.hold_rate)
            for number, outputs in enumerate(stream, start=1):
                # Only data of the user has targets to compare with.
                if source is not None and data is not None:
                    found = source.compared(number - 1, outputs)
                    right, counted = right + found[0], counted + found[1]
                samples += len(outputs if not isinstance(outputs, tuple) else outputs[0])
                now_s = time.perf_counter()
                if tell is not None and now_s - printed_s > _PAUSE_S:
                    printed_s = now_s
                    right_so_far = f"  accuracy {percent(right / counted)}" if counted else ""
                    tell(f"micro-batch {number}  {samples / (now_s - begin_s):.4g} samples/s{right_so_far}")
        flow, measured = pipeline.flow(), pipeline.timeline()
    if talks:
        if options.timeline is not None:
            measured.save(options.timeline)
        _conclude(options, pipeline, flow, measured, right / counted if counted else None)


class _Source:
    """Micro-batches of a data set in its order, or copies of the workload's example."""

    def __init__(self, pipeline: InferencePipeline, data: str | None) -> None:
        import torch

        self._size = pipeline.program.pipeline_micro_batch_size
        self._pipeline = pipeline
        self._data: Any = None
        planned = pipeline.program.micro_batches
        # A plan of `hpgo partition` sets no number of micro-batches. Its program has one for each route.
        self.micro_batches = planned if planned > len(pipeline.program.schedule.micro_batches) else _MICRO_BATCHES
        if data is not None:
            from hpgo.runtime.loader import Samples, length_of
            from hpgo.runtime.user_functions import made_by

            with torch.random.fork_rng(devices=[]):  # Random numbers of the data set must not change the run.
                made = made_by(data, "data", seed=0, wanted="a data set: pairs of inputs and targets")
            self.micro_batches = math.ceil(length_of(made) / self._size)
            self._data = Samples(made)

    def inputs(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the input tensors of one micro-batch after the other."""
        if self._data is None:
            from hpgo.runtime.loader import repeated

            return repeat(repeated(self._pipeline.workload.example_inputs, [range(self._size)]).tensors)
        return (self._pair(number)[0] for number in range(self.micro_batches))

    def compared(self, number: int, outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[int, int]:
        """Return the numbers of correct and of all predictions of a micro-batch; 0 and 0 if targets are not classes."""
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        target = self._pair(number)[1][0].to(first.device)
        # Regression targets and other shapes have no notion of a correct prediction.
        if target.is_floating_point() or target.shape != first.shape[:-1]:
            return 0, 0
        return int((first.argmax(-1) == target).sum()), target.numel()

    def _pair(self, number: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        begin = number * self._size
        end = min(begin + self._size, len(self._data))
        return self._pipeline.workload.collated([self._data[at] for at in range(begin, end)])


def _conclude(
    options: InferOptions, pipeline: InferencePipeline, flow: Flow, measured: Timeline, accuracy: float | None
) -> None:
    """Print predicted and measured values."""
    from hpgo.programs.host_rotation import hosts_of, routes_of
    from hpgo.timing.breakdown import breakdown
    from hpgo.timing.flow import predicted_flow
    from hpgo.timing.simulation import simulate

    program = pipeline.program
    foreseen = predicted_flow(program, flow.samples, in_flight=options.in_flight)
    ran = breakdown(measured)
    # A program without times has no prediction to compare with.
    passes = {"predicted": None if program.costs is None else breakdown(simulate(program)), "measured": ran}

    def both(of: Callable[[Flow], float]) -> dict[str, Any]:
        return {"predicted": None if foreseen is None else of(foreseen), "measured": of(flow)}

    rate = both(attrgetter("samples_per_s"))
    latencies = {f"p{share}": both(methodcaller("latency_s", share)) for share in _PERCENTS}
    length = program.schedule.stages_per_pipeline
    hosts = hosts_of(routes_of(program))

    def of_stage(which: str, name: str, number: int) -> float | None:
        """Return the longest time of a stage over all routes: its slowest host counts."""
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
    if options.as_json:
        facts = {
            "format": "hpgo.inference", "version": 1, "micro_batches": len(flow.samples), "samples": sum(flow.samples),
            "samples_per_s": rate, "hold_samples_per_s": options.hold_rate, "accuracy": accuracy,
            "latency_s": latencies, "max_in_flight": flow.max_in_flight, "stages": stages,
            "peak_memory_bytes": ran.peak_memory_bytes, "exit": 0,
        }  # fmt: skip
        click.echo(json_text(facts))
        return
    held = None if options.hold_rate is None else flow.samples_per_s
    rows: list[tuple[str, Callable[[float], str], dict[str, Any]]] = [
        ("throughput", _rate, rate),
        ("rate to hold", _rate, {"predicted": options.hold_rate, "measured": held}),
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
        ("max in flight", _count, both(attrgetter("max_in_flight"))),
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
    """Return the bits per value of the micro-batches that crossed a cut, as the end of a label."""
    from hpgo.runtime.runnable import WHOLE_BITS

    used = {width or WHOLE_BITS: count for width, count in sent.items()}
    if len(used) < 2:
        return "".join(f", {width} bit" for width in used if width < WHOLE_BITS)
    maximum = max(used, key=lambda width: used[width])
    return f", {min(used)} to {max(used)} bit, mostly {maximum}"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.4g} samples/s"


def _count(number: float) -> str:
    return f"{number:g}"
