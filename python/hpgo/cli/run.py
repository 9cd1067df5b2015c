"""`hpgo run`: trains or infers by a plan, on processes that it starts or as one rank of a launcher's."""

from __future__ import annotations

import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.errors import ArgumentError, RunError
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli import elastic as elastic_runs
from hpgo.cli.command import Command
from hpgo.cli.compared import compared, percent
from hpgo.cli.losses import losses_to
from hpgo.cli.questions import SECONDS
from hpgo.cli.ranks import take_part
from hpgo.cli.terminal import clear_line, passing_lines, say, table
from hpgo.cli.values import FILE, FOLDER, PLAN, TIMELINE_OUT, WORKLOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.loader import Share
    from hpgo.runtime.pipeline import Pipeline
    from hpgo.runtime.watch import Limits
    from hpgo.timing.timeline import Timeline

_DTYPES = ("float32", "float64", "bfloat16")
_STEPS, _EMULATED_STEPS = 20, 3
_OF_EMULATIONS = {"plan", "emulate", "scale", "steps", "timeout_s", "silence_s", "grace_s", "timeline", "as_json"}
"""Options that need no model."""
_OF_INFERENCE = {
    "plan", "workload", "data", "inference", "micro_batches", "in_flight", "quantize", "hold_rate", "seed", "dtype",
    "autocast", "device", "timeout_s", "silence_s", "grace_s", "find_nan", "shared_memory", "timeline", "checkpoint",
    "resume",
    "as_json",
}  # fmt: skip
"""Options that need no training."""
_SILENCE_S, _EMULATED_SILENCE_S = 5.0, 30.0
"""Of a rank that is lost; emulated ones are many more than there are cores, and wait for their turn."""
_WAKING_S = 0.02
"""Passes that are shorter are measured too long, since sleepers wake late."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What is asked for."""

    file: str
    workload: str | None
    data: str | None
    scale: float | None
    """How many times as long everything takes in an emulation; None trains."""
    steps: int
    optimizer: str
    dtype: str | None
    as_json: bool
    timeline: str | None
    losses: str | None
    checkpoint: str | None
    every: int | None
    keep: int
    resume: bool
    inference: bool
    quantize: tuple[int, ...] | None
    hold_rate: float | None
    micro_batches: int | None
    in_flight: int | None
    options: dict[str, Any]
    """Of `Pipeline`."""


_SECTIONS = {
    "Model and data": "workload data optimizer clip_norm seed dtype autocast steps",
    "Inference": "inference micro_batches in_flight quantize hold_rate",
    "Without a model": "emulate scale",
    "Processes": "device backend shared_memory timeout_s silence_s grace_s elastic",
    "Checkpoints": "checkpoint every keep resume",
    "What is written": "timeline losses find_nan as_json",
}


@click.command(cls=Command, sections=_SECTIONS)
@click.argument("plan", type=PLAN, metavar="PLAN.json")
@click.option(
    "--workload", type=WORKLOAD, metavar="NAME|MODULE:FUNCTION", help="The model: `gpt:layers=4`, or one of yours."
)
@click.option("--data", metavar="MODULE:FUNCTION", help="A data set of yours; the workload's example if left out.")
@click.option("--emulate", is_flag=True, help="Without a model: processes sleep for what the plan says.")
@click.option("--scale", type=float, metavar="X", help="Emulate everything X times as slowly.")
@click.option("--inference", is_flag=True, help="Forward alone: micro-batches stream through.")
@click.option("--micro-batches", type=click.IntRange(1), metavar="N", help="Infer so many; 64, or all data.")
@click.option("--in-flight", type=click.IntRange(1), metavar="N", help="At most N have entered and not left.")
@click.option(
    "-q", "--quantize", metavar="BITS[,BITS…]", help="Infer with so many bits a number behind each stage; 0: all."
)
@click.option("--hold-rate", type=float, metavar="X", help="Infer with as many bits as links carry at X samples/s.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="How many; 20, or 3 with `--emulate`.")
@click.option(
    "--optimizer", default="sgd:lr=0.01", show_default=True, metavar="NAME[:OPTIONS]", help="`adamw:lr=1e-4`, say."
)
@click.option("--clip-norm", type=float, metavar="NORM", help="Scale gradients down to it where theirs is larger.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of first weights.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the weights; the workload's own if left out.")
@click.option("--autocast", type=click.Choice(["bfloat16"]), help="What to compute in, whatever the weights are.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="GPUs where each rank has one, if left out.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, default="600s", show_default=True, metavar="TIME",
    help="End a run that stands still for so long.",
)  # fmt: skip
@click.option(
    "--silence", "silence_s", type=SECONDS, metavar="TIME",
    help="End a run with a rank that is silent for so long; 5 s, or 30 s with `--emulate`.",
)  # fmt: skip
@click.option(
    "--grace", "grace_s", type=SECONDS, default="30s", show_default=True, metavar="TIME",
    help="End at most so long after SIGTERM.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["hpgo", "torch"]), default="hpgo", show_default=True,
    help="What passes tensors on: hpgo, or `torch.distributed.pipelining`.",
)  # fmt: skip
@click.option(
    "--shared-memory/--no-shared-memory",
    default=True,
    show_default=True,
    help="How ranks of a machine pass tensors on; else by gloo.",
)
@click.option("--find-nan", is_flag=True, help="Slowly: tell the layer that makes the first number which is none.")
@click.option(
    "--timeline",
    type=TIMELINE_OUT,
    metavar="FILE",
    help="Keep what was measured: .timeline.json or .npz, for `hpgo draw`.",
)
@click.option(
    "--losses", type=FILE, metavar="FILE", help="Add a line of JSON for each step: its number, loss and time."
)
@click.option("--checkpoint", type=FOLDER, metavar="FOLDER", help="Save there what was learnt, at least at the end.")
@click.option("--every", type=click.IntRange(1), metavar="N", help="Save after every so many steps, too.")
@click.option(
    "--keep", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="How many checkpoints stay."
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in FOLDER, if there is one.")
@click.option("--elastic", is_flag=True, help="Under torchrun: plan again for the machines that are left, and resume.")
@click.option("--json", "as_json", is_flag=True, help="Losses and times as one object, for machines.")
def command(
    *,
    plan: str,
    workload: str | None,
    data: str | None,
    emulate: bool,
    scale: float | None,
    steps: int | None,
    optimizer: str,
    dtype: str | None,
    autocast: str | None,
    timeout_s: float,
    silence_s: float | None,
    grace_s: float,
    timeline: str | None,
    losses: str | None,
    as_json: bool,
    checkpoint: str | None,
    every: int | None,
    keep: int,
    resume: bool,
    elastic: bool,
    inference: bool,
    quantize: str | None,
    hold_rate: float | None,
    micro_batches: int | None,
    in_flight: int | None,
    **options: Any,
) -> None:
    """Train the layers of PLAN.json, from `hpgo plan -o` or `Program.save`.

    Alone it starts a process for each device of the plan here, and ends them all. Under torchrun, or whatever sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it is one rank. Data is the workload's example,
    repeated, unless `--data` names a function that returns pairs of inputs and targets.

    With `--emulate` nothing is trained: as many processes, on this machine, send each other real messages in the real
    order, and sleep for as long as the plan says that passes, transfers and sums take.

    With `--inference`, PLAN.json is one of `hpgo partition --json`, or a program of forward passes alone.

    With `--elastic`, torchrun may start the ranks again with fewer machines than PLAN.json is for: they plan again, and
    go on from the newest checkpoint.

    \b
    Examples:
      hpgo run plan.json --workload vgg-19 --steps 20
      hpgo run plan.json --workload my_model:build --data my_model:text
      hpgo run plan.json --workload gpt:layers=4 --dtype float64 --json
      hpgo run plan.json --workload vgg-19 --timeline measured.timeline.json
      hpgo run plan.json --workload gpt:layers=4 --checkpoint saved --resume
      hpgo run plan.json --workload vgg-19 --elastic --checkpoint saved --every 9
      hpgo run plan.json --emulate --scale 10
      hpgo run chain.json --inference --workload vit --data my_model:images
    """
    _check_emulation(emulate=emulate, scale=scale, workload=workload)
    _check_inference(inference=inference, checkpoint=checkpoint, resume=resume)
    if checkpoint is None and (every is not None or resume):
        raise click.UsageError(f"`{'--resume' if resume else '--every'}` needs `--checkpoint FOLDER`")
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.meeting import is_launched
    from hpgo.runtime.watch import Limits

    if elastic:
        elastic_runs.check(checkpoint=checkpoint, every=every, launched=is_launched())
    if silence_s is None:
        silence_s = _EMULATED_SILENCE_S if emulate else _SILENCE_S
    limits = Limits(timeout_s, silence_s, grace_s)
    options |= {"autocast": autocast, "timeout_s": timeout_s, "silence_s": silence_s, "grace_s": grace_s}
    steps = steps or (_EMULATED_STEPS if emulate else _STEPS)
    scale = (1.0 if scale is None else scale) if emulate else None
    run = _Run(
        plan,
        workload,
        data,
        scale,
        steps,
        optimizer,
        dtype,
        as_json,
        timeline,
        losses,
        checkpoint,
        every,
        keep,
        resume or elastic,
        inference,
        _bits(quantize),
        hold_rate,
        micro_batches,
        in_flight,
        options,
    )
    if timeline is not None and not Path(timeline).parent.is_dir():
        raise ArgumentError(
            f"there is no folder `{Path(timeline).parent}` to write `{timeline}` in",
            "name a file in a folder that exists",
            code="not_found",
        )
    from hpgo.runtime.notice import Preempted

    try:
        if elastic:
            take_part(limits, lambda: _train_again(run))
        elif is_launched():
            take_part(limits, lambda: _work(run, _read(run)))
        else:
            _start(run, limits)
    except Preempted as end:
        saved = f"`--resume` goes on from {checkpoint}" if checkpoint else "nothing is saved without `--checkpoint`"
        if elastic:
            saved = f"whoever is started again goes on from {checkpoint}"
        elif inference:
            saved = "all micro-batches that had entered have left"
        if os.environ.get("RANK", "0") == "0":
            say("preempted", end.why or saved)
        raise


def _start(run: _Run, limits: Limits) -> None:
    """Starts all ranks here."""
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.optimizer import optimizer_of
    from hpgo.runtime.progress import stages_of

    read = _read(run)
    if run.inference:
        from hpgo.runtime.runnable import check_inference

        check_inference(_program(read))
    optimizer_of(run.optimizer)  # wrong ones are told before anything starts
    if run.scale is not None:
        _foresee(read, run.scale)
    if run.options["backend"] == "torch":
        from hpgo.runtime.torch_backend import pipelines  # loaded once, before there are processes

        pipelines(_program(read))
    program = _program(read)
    try:
        run_here(program.world_size, lambda: _work(run, read), limits, partial(stages_of, program))
    except BaseException:
        if not run.as_json:
            clear_line()  # that rank 0 may have left
        raise


def _check_emulation(*, emulate: bool, scale: float | None, workload: str | None) -> None:
    """Raises UsageError for options that don't go together."""
    if not emulate:
        if scale is not None:
            raise click.UsageError("`--scale` needs `--emulate`")
        if workload is None:
            raise click.UsageError("Missing option '--workload': the model to train; `--emulate` needs none")
        return
    for name, option in _given():
        if name not in _OF_EMULATIONS:
            raise click.UsageError(f"`--emulate` trains no model: leave out `{option}`")


def _bits(text: str | None) -> tuple[int, ...] | None:
    """The numbers that `--quantize` names. Raises UsageError."""
    words = [] if text is None else text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise click.UsageError(f"`--quantize {text}` are no numbers: give `8`, or `8,0,4` with one for each cut")
    return tuple(map(int, words)) if words else None


def _given() -> list[tuple[str, str]]:
    """Names of the options that stand in the command, and how they stand there."""
    context = click.get_current_context()
    on_line = click.core.ParameterSource.COMMANDLINE
    named = [(option.name or "", option.opts[-1]) for option in context.command.params]
    return [(name, option) for name, option in named if context.get_parameter_source(name) is on_line]


def _check_inference(*, inference: bool, checkpoint: str | None, resume: bool) -> None:
    """Raises UsageError for options that don't go together."""
    for name, option in _given():
        if inference and name not in _OF_INFERENCE:
            raise click.UsageError(f"`--inference` trains no model: leave out `{option}`")
        if not inference and name in {"micro_batches", "in_flight", "quantize", "hold_rate"}:
            raise click.UsageError(f"`{option}` needs `--inference`")
    if inference and checkpoint is not None and not resume:
        raise click.UsageError(
            "`--inference` saves nothing: `--checkpoint FOLDER --resume` takes its weights from there"
        )


def _foresee(plan: Plan | ChainPlan | Program, scale: float) -> None:
    """Warns of an emulation that sleeps too shortly. Raises ArgumentError for what can't be emulated."""
    import numpy as np

    from hpgo.runtime.emulation import check
    from hpgo.timing.simulation import simulate

    program = _program(plan)
    check(program, scale)
    step = simulate(program)
    pass_s = float(np.median(step.end_s - step.start_s))
    if 0 < pass_s * scale < _WAKING_S:
        _warn(
            f"passes of {format_seconds(pass_s * scale)} are measured too long, since sleepers wake late;"
            f" `--scale {math.ceil(_WAKING_S / pass_s)}` helps"
        )


def _read(run: _Run) -> Plan | ChainPlan | Program:
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.planning.reading import read_any

    plan = read_any(run.file)
    if isinstance(plan, ChainPlan) and not run.inference:
        raise ArgumentError(
            f"{run.file} is a plan of inference, which has nothing to train",
            "`--inference` runs it; to train, give one of `hpgo plan`",
        )
    return plan


def _program(plan: Plan | ChainPlan | Program) -> Program:
    from hpgo.runtime.runnable import program_of

    return program_of(plan)[0]


def _work(run: _Run, plan: Plan | ChainPlan | Program) -> None:
    """One rank's part."""
    from hpgo.planning.chain.plans import ChainPlan

    if isinstance(plan, ChainPlan) or run.inference:
        _infer(run, plan)
    elif run.scale is not None:
        _emulate(run, plan, run.scale)
    else:
        _train(run, plan)


def _options(run: _Run) -> dict[str, Any]:
    """Those of `Pipeline`, with types as torch has them."""
    import torch

    types = {"dtype": run.dtype, "autocast": run.options["autocast"]}
    return run.options | {name: kind and getattr(torch, kind) for name, kind in types.items()}


def _infer(run: _Run, plan: Plan | ChainPlan | Program) -> None:
    """One rank's part; the last stage's prints."""
    from hpgo.cli.inference import infer

    infer(
        plan,
        run.workload or "",
        data=run.data,
        micro_batches=run.micro_batches,
        in_flight=run.in_flight,
        quantize=run.quantize,
        hold_samples_per_s=run.hold_rate,
        checkpoint=run.checkpoint,
        timeline=run.timeline,
        as_json=run.as_json,
        options=_options(run),
    )


def _train_again(run: _Run) -> None:
    """One rank's part, of as many as there are now."""
    from hpgo.runtime.elastic import settle
    from hpgo.runtime.meeting import place

    settled = settle(run.file, run.options["timeout_s"])
    if place()[0] == 0 and not run.as_json:
        click.echo(elastic_runs.told(run.file, settled))
    with elastic_runs.asked_by_its_own():
        _train(run, settled.plan, elastic_runs.document(settled))


def _train(run: _Run, plan: Plan | Program, said: dict[str, Any] | None = None) -> None:
    """One rank's part; rank 0 prints, and begins JSON with what was `said` before."""
    from hpgo.runtime import Pipeline
    from hpgo.runtime.optimizer import optimizer_of

    options = _options(run)
    with Pipeline(plan, run.workload or "", optimizer=optimizer_of(run.optimizer), tell=_warn, **options) as pipeline:
        talks = pipeline.rank == 0
        program = pipeline.program
        predicted = _predicted(program) if talks else None
        if run.resume and _resume(run, pipeline, talks=talks and not run.as_json):
            if talks and run.as_json:
                nothing = {**(said or {}), "steps_before": pipeline.steps, "losses": []}
                _conclude(run, nothing, [], _beside(program, predicted, None))
            return
        batches = _batches(run, pipeline)
        losses: list[float] = []
        steps_s: list[float] = []
        done = pipeline.steps
        _save(run, pipeline)  # nothing yet, but a folder that can't be written to is told now
        with (
            passing_lines() if talks and not run.as_json else nullcontext() as tell,
            losses_to(run.losses, program.world_size) if talks and run.losses else nullcontext() as add,
        ):
            for step in range(done + 1, run.steps + 1):
                inputs, targets = next(batches)
                begin_s = time.perf_counter()
                loss = pipeline.step(inputs, targets)
                steps_s.append(time.perf_counter() - begin_s)
                losses.append(loss)
                if not math.isfinite(loss):
                    raise RunError(
                        f"the loss of step {step} is {loss}",
                        "try a smaller learning rate or `--clip-norm`; `--find-nan` tells the layer it comes from",
                    )
                if add is not None:
                    add(step, loss, steps_s[-1])
                if tell is not None:
                    tell(_line(step, loss, steps_s[-1], plan.global_batch_size, predicted))
                _save(run, pipeline)
        measured = pipeline.timeline(pipeline.usual_step())
    if talks:
        if run.timeline is not None:
            measured.save(run.timeline)
        done_here = {**(said or {}), "steps_before": done, "losses": losses}
        _conclude(run, done_here, steps_s, _beside(program, predicted, measured))


def _emulate(run: _Run, plan: Plan | Program, scale: float) -> None:
    """One rank's part of what only sleeps; rank 0 prints."""
    from hpgo.runtime import Emulation

    steps_s: list[float] = []
    with Emulation(plan, scale=scale, timeout_s=run.options["timeout_s"]) as emulation:
        talks = emulation.rank == 0
        predicted = _predicted(emulation.program) if talks else None
        with passing_lines() if talks and not run.as_json else nullcontext() as tell:
            for step in range(1, run.steps + 1):
                steps_s.append(emulation.step())
                if tell is not None:
                    tell(_line(step, None, steps_s[-1], plan.global_batch_size, predicted))
        measured = emulation.timeline(emulation.usual_step())
    if talks:
        if run.timeline is not None:
            measured.save(run.timeline)
        _conclude(run, {"scale": scale}, steps_s, _beside(emulation.program, predicted, measured))


def _batches(run: _Run, pipeline: Pipeline) -> Iterator[tuple[Share, Share]]:
    """A global batch a step: of the data, epoch after epoch, or the workload's example again and again."""
    if run.data is None:
        return repeat(pipeline.example())
    from hpgo.runtime.meeting import agree

    loader = pipeline.loader(run.data)
    agree({"number of samples": str(len(loader) * pipeline.program.global_batch_size + loader.dropped)})
    return chain.from_iterable(repeat(loader))


def _resume(run: _Run, pipeline: Pipeline, *, talks: bool) -> bool:
    """Goes on from what was saved, if anything was; returns whether all steps have been done."""
    found = pipeline.resume(run.checkpoint or "")
    is_done = pipeline.steps >= run.steps
    if talks and is_done:
        click.echo(
            f"{run.checkpoint} has step {pipeline.steps}, and {run.steps} were asked for: nothing is left to do;"
            " `--steps` counts those that were done before"
        )
    elif talks:
        click.echo(f"goes on from step {pipeline.steps}" if found else f"no checkpoint in {run.checkpoint} yet")
    return is_done


def _save(run: _Run, pipeline: Pipeline) -> None:
    if run.checkpoint is not None:
        every = 1 if pipeline.steps == run.steps else run.every or run.steps
        pipeline.checkpoint(run.checkpoint, every=every, keep=run.keep, tell=_warn)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _predicted(program: Program) -> Timeline | None:
    """Return the step as it should be; None if the program does not say what things take."""
    from hpgo.timing.simulation import simulate

    return None if program.costs is None else simulate(program)


def _line(step: int, loss: float | None, step_s: float, samples: int, predicted: Timeline | None) -> str:
    learnt = "" if loss is None else f"  loss {loss:.6g}"
    ratio = "" if predicted is None else f"  {step_s / predicted.makespan_s:.3g} × predicted"
    return f"step {step}{learnt}  {format_seconds(step_s)}  {samples / step_s:.4g} samples/s{ratio}"


def _beside(program: Program, predicted: Timeline | None, measured: Timeline | None) -> dict[str, Any]:
    """What was predicted beside what was measured, as JSON has it."""
    from hpgo.timing.breakdown import breakdown

    timelines = {"predicted": predicted, "measured": measured}
    of = {which: None if one is None else breakdown(one) for which, one in timelines.items()}

    def both(name: str, stage: int | None = None) -> dict[str, Any]:
        values = {which: one and getattr(one, name) for which, one in of.items()}
        return values if stage is None else {which: value and value[stage] for which, value in values.items()}

    stages = [
        {"stage": number, "layers": list(stage.layers), "devices": list(stage.devices)}
        | {name: both(name, number) for name in ("forward_s", "backward_s", "transfer_s", "sync_s", "memory_bytes")}
        for number, stage in enumerate(program.stages)
    ]
    whole = {name: both(name) for name in ("step_s", "bubble", "peak_memory_bytes")}
    return {"step_s": whole.pop("step_s"), "stages": stages} | whole


def _conclude(run: _Run, head: dict[str, Any], steps_s: list[float], beside: dict[str, Any]) -> None:
    """Prints what was measured; `head` is what JSON begins with."""
    if run.as_json:
        if steps_s:
            beside["step_s"]["measured"] = median_low(steps_s[1:] or steps_s)  # the first one warms up
        click.echo(json_text({"format": "hpgo.run", "version": 1} | head | beside | {"exit": 0}))
        return
    rows: list[tuple[str, Callable[[float], str], dict[str, Any]]] = [("step", format_seconds, beside["step_s"])]
    for stage in beside["stages"]:
        number = stage["stage"]
        rows += [
            (f"stage {number} forward", format_seconds, stage["forward_s"]),
            (f"stage {number} backward", format_seconds, stage["backward_s"]),
            (f"stage {number} to {number + 1}", format_seconds, stage["transfer_s"]),
            (f"stage {number} synchronisation", format_seconds, stage["sync_s"]),
            (f"stage {number} memory", format_bytes, stage["memory_bytes"]),
        ]
    rows += [("bubble", percent, beside["bubble"]), ("peak memory", format_bytes, beside["peak_memory_bytes"])]
    click.echo()
    table(
        ("", "predicted", "measured", "difference"),
        [(name, *compared(shown, values)) for name, shown, values in rows if any(values.values())],
    )
