"""Command `hpgo run`: train under a plan, in processes that it starts or as one rank of a launcher."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.messages import safe_repr
from hpgo.cli import elastic as elastic_runs
from hpgo.cli import steps
from hpgo.cli.command import option, takes
from hpgo.cli.losses import losses_to
from hpgo.cli.processes import ModelOptions, preempted, read_training, run_ranks, warn
from hpgo.cli.ranks import take_part
from hpgo.cli.run_log import RunLog
from hpgo.cli.terminal import passing_lines
from hpgo.cli.values import FILE, FOLDER, optimizer_option, steps_option
from hpgo.errors import ArgumentError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.runtime import Pipeline
    from hpgo.runtime.loader import Share
    from hpgo.runtime.runnable import Runnable

_SECTIONS = {
    "Model and data": "workload weights data drop_last optimizer optimizer_state lr_schedule clip_norm seed dtype"
    " autocast steps after_step",
    "Validation": "validation_data validate_every metrics",
    "Processes": "device backend shared_memory timeout_s heartbeat_timeout_s grace_s elastic",
    "Checkpoints": "checkpoint every keep resume",
    "Output": "timeline log tensorboard losses find_nan as_json",
}


class RunOptions(ModelOptions):
    """Options of `hpgo run`: model, training and checkpoints."""

    optimizer: str = optimizer_option("sgd:lr=0.01")
    drop_last: bool = option(
        "--drop-last/--no-drop-last",
        default=True,
        show_default=True,
        help="Leave out the last samples of an epoch if they don't fill a global batch, or train on them.",
    )
    clip_norm: float | None = option(
        "--clip-norm", type=float, metavar="NORM", help="Scale gradients down to this norm if their norm is larger."
    )
    steps: int = steps_option(20)
    lr_schedule: str = option(
        "--lr-schedule",
        default="constant",
        show_default=True,
        metavar="NAME[:OPTIONS]",
        help="Learning rate over the steps: constant, linear or cosine, such as `cosine:warmup=100,min=0.1`.",
    )
    after_step: str | None = option(
        "--after-step",
        metavar="MODULE:FUNCTION",
        help="Your function that returns a hook, which is called on each rank after each step.",
    )
    validation_data: str | None = option(
        "--validation-data",
        metavar="MODULE:FUNCTION",
        help="Your data set to evaluate the model on, at least after the last step.",
    )
    validate_every: int | None = option(
        "--validate-every", type=click.IntRange(1), metavar="N", help="Also evaluate every N steps."
    )
    metrics: str | None = option(
        "--metrics",
        metavar="MODULE:FUNCTION",
        help="Your function that returns metrics by name, which are evaluated beside the loss.",
    )
    weights: str | None = option(
        "--weights",
        type=FILE,
        metavar="FILE|FOLDER",
        help="Initial weights under the model's names: safetensors, a Hugging Face folder, or a checkpoint.",
    )
    optimizer_state: str | None = option(
        "--optimizer-state",
        type=FOLDER,
        metavar="FOLDER",
        help="Initial optimizer state: a folder of `torch.distributed.checkpoint`, or a checkpoint.",
    )
    backend: str = option(
        "--backend",
        type=click.Choice(["hpgo", "torch"]),
        default="hpgo",
        show_default=True,
        help="Engine that runs the schedule: hpgo, or `torch.distributed.pipelining`.",
    )
    elastic: bool = option(
        "--elastic",
        is_flag=True,
        help="Under torchrun, plan again if nodes fail or return, and resume from the newest checkpoint.",
    )
    checkpoint: str | None = option(
        "--checkpoint",
        type=FOLDER,
        metavar="FOLDER",
        help="Save weights and optimizer state in this folder, at least after the last step.",
    )
    every: int | None = option("--every", type=click.IntRange(1), metavar="N", help="Also save every N steps.")
    keep: int = option(
        "--keep",
        type=click.IntRange(1),
        default=3,
        show_default=True,
        metavar="N",
        help="Number of checkpoints to keep.",
    )
    resume: bool = option("--resume", is_flag=True, help="Continue from the newest checkpoint in FOLDER, if any.")
    log: str | None = option(
        "--log",
        type=FILE,
        metavar="FILE",
        help="Append lines of JSON to this file: steps with rates, validations, and a summary.",
    )
    tensorboard: str | None = option(
        "--tensorboard", type=FOLDER, metavar="FOLDER", help="Write the same values for TensorBoard."
    )
    losses: str | None = option(
        "--losses",
        type=FILE,
        metavar="FILE",
        help="Append one line of JSON per step to this file: number, loss and time.",
    )


@takes(RunOptions, sections=_SECTIONS)
def command(options: RunOptions) -> None:
    """Train a model under PLAN.json, a file of `hpgo plan -o` or `Program.save`.

    The command starts one process per device of the plan on this machine. Under torchrun, or another launcher that sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, it is one rank. --data names a function that returns pairs of inputs
    and targets. Without it, each step trains on the workload's example batch.

    With --elastic, torchrun may start the ranks again with fewer nodes than PLAN.json is for. They then plan again, and
    continue from the newest checkpoint.

    \b
    Examples:
      hpgo run plan.json --workload vgg-19 --steps 20
      hpgo run plan.json --workload my_model:build --data my_model:text
      hpgo run plan.json --workload vgg-19 --lr-schedule cosine:warmup=100
      hpgo run plan.json --workload my:model --validation-data my:held_out
      hpgo run plan.json --workload gpt:layers=4 --dtype float64 --json
      hpgo run plan.json --workload vgg-19 --timeline measured.timeline.json
      hpgo run plan.json --workload gpt:layers=4 --checkpoint saved --resume
      hpgo run plan.json --workload vgg-19 --elastic --checkpoint saved --every 9
    """
    # Both options need a folder, and would otherwise be ignored silently.
    if options.checkpoint is None and (options.every is not None or options.resume):
        raise click.UsageError(f"`{'--resume' if options.resume else '--every'}` needs `--checkpoint FOLDER`")
    if options.data is None and not options.drop_last:
        raise click.UsageError("`--no-drop-last` needs `--data MODULE:FUNCTION`")
    if options.validation_data is None and (options.validate_every is not None or options.metrics is not None):
        given = "--metrics" if options.metrics is not None else "--validate-every"
        raise click.UsageError(f"`{given}` needs `--validation-data MODULE:FUNCTION`")
    folder = options.checkpoint
    if options.elastic:
        limits = options.limits()
        from hpgo.runtime.rendezvous import is_launched

        elastic_runs.check(checkpoint=folder, every=options.every, launched=is_launched())
        with preempted(f"ranks that are started again continue from {folder}"):
            take_part(limits, lambda: _train_again(options))
        return
    run_ranks(
        options,
        lambda runnable: _train(options, runnable, {}),
        read=lambda: read_training(options.plan),
        prepare=lambda runnable: _prepare(options, runnable),
        kept=f"`--resume` continues from {folder}"
        if folder
        else "no checkpoint: use `--checkpoint FOLDER` to save one",
    )


def _prepare(options: RunOptions, runnable: Runnable) -> None:
    """Raise errors that all ranks would raise, and import modules once, before the ranks are forked."""
    from hpgo.runtime.train.learning_rates import schedule_of
    from hpgo.runtime.train.optimizer import optimizer_of

    optimizer_of(options.optimizer)
    schedule_of(options.lr_schedule, options.steps)
    if options.backend == "torch":
        from hpgo.runtime.train.torch_backend import pipelines

        # The engine of PyTorch supports fewer schedules. This call raises the error before ranks start.
        pipelines(runnable.program)


def _train_again(options: RunOptions) -> None:
    """Run one rank of the current number of ranks, under a plan for them."""
    from hpgo.runtime.rendezvous import place
    from hpgo.runtime.runnable import Runnable
    from hpgo.runtime.train.elastic import settle

    settled = settle(options.plan, options.timeout_s)
    if place()[0] == 0 and not options.as_json:
        click.echo(elastic_runs.describe(options.plan, settled))
    # A rank that exits too early counts as a failure of the job.
    with elastic_runs.wait_for_launcher():
        _train(options, Runnable.from_plan(settled.plan), elastic_runs.document(settled))


def _train(options: RunOptions, runnable: Runnable, head: dict[str, Any]) -> None:
    """Run one rank. Rank 0 prints the result, whose JSON starts with `head`."""
    from hpgo.runtime import Pipeline
    from hpgo.runtime.train.learning_rates import schedule_of
    from hpgo.runtime.train.optimizer import optimizer_of

    with Pipeline(
        runnable,
        options.workload,
        optimizer=optimizer_of(options.optimizer),
        lr_schedule=schedule_of(options.lr_schedule, options.steps),
        clip_norm=options.clip_norm,
        weights=options.weights,
        optimizer_state=options.optimizer_state,
        backend=options.backend,  # type: ignore[arg-type]  # one of its choices
        tell=warn,
        **options.of_pipeline(),
    ) as pipeline:
        talks = pipeline.rank == 0
        shows = talks and not options.as_json
        program = pipeline.program
        # Only the rank that prints needs the prediction.
        predicted = steps.predicted_step(program) if talks else None
        if (options.resume or options.elastic) and _resume(options, pipeline, talks=shows):
            if talks and options.as_json:
                nothing = {**head, "steps_before": pipeline.steps, "losses": []}
                steps.conclude(nothing, [], steps.compare(program, predicted, None), as_json=True)
            return
        batches = _batches(options, pipeline)
        evaluate, hook = _validation(options, pipeline), _hook(options)
        validations: list[dict[str, Any]] = []
        losses: list[float] = []
        steps_s: list[float] = []
        done = pipeline.steps
        _save(options, pipeline)  # Saves nothing yet, but fails now if the folder is not writable.
        with (
            passing_lines() if shows else nullcontext() as tell,
            losses_to(options.losses, program.world_size) if talks and options.losses else nullcontext() as add,
            _log(options, pipeline) if talks else nullcontext() as log,
        ):
            for step in range(done + 1, options.steps + 1):
                inputs, targets = next(batches)
                # Reading data is not part of the measured step, as it is not part of the predicted one.
                begin_s = time.perf_counter()
                loss = pipeline.step(inputs, targets)
                steps_s.append(time.perf_counter() - begin_s)
                samples = inputs.count or program.global_batch_size
                losses.append(loss)
                # Training can not recover from NaN weights, so stop instead of spending more time.
                if not math.isfinite(loss):
                    raise RunError(
                        f"the loss of step {step} is {loss}",
                        "use a smaller learning rate or `--clip-norm 1`; `--find-nan` names the layer that computes it",
                    )
                if add is not None:
                    add(step, loss, steps_s[-1])
                if log is not None:
                    rate = None if pipeline.optimizer is None else float(pipeline.optimizer.param_groups[0]["lr"])
                    log.step(step, loss, steps_s[-1], rate, samples / program.global_batch_size)
                if tell is not None:
                    tell(steps.line(step, loss, steps_s[-1], samples, predicted))
                if hook is not None:
                    hook(pipeline, loss)
                _save(options, pipeline)
                # After the save, because SIGTERM ends the run here.
                if evaluate is not None and (step == options.steps or step % (options.validate_every or step + 1) == 0):
                    validations.append({"step": step, **evaluate()})
                    if log is not None:
                        log.validation(validations[-1])
                    if tell is not None:
                        tell(steps.validation_line(validations[-1]))
            measured = pipeline.timeline(pipeline.usual_step())
            if log is not None:
                log.finish(measured.measures.peak_memory_bytes)
    if talks:
        if options.timeline is not None:
            measured.save(options.timeline)
        found = steps.compare(program, predicted, measured)
        head = {**head, "steps_before": done, "losses": losses}
        if evaluate is not None:
            head["validation"] = validations
        steps.conclude(head, steps_s, found, as_json=options.as_json)


def _batches(options: RunOptions, pipeline: Pipeline) -> Iterator[tuple[Share, Share]]:
    """Yield one global batch per step: from the data, epoch after epoch, or always the workload's example batch."""
    if options.data is None:
        return repeat(pipeline.example())
    from hpgo.runtime.rendezvous import agree

    loader = pipeline.loader(options.data, drop_last=options.drop_last)
    # Ranks with different data would wait for each other forever.
    agree({"number of samples": str(loader.dataset_size)})
    return chain.from_iterable(repeat(loader))


def _log(options: RunOptions, pipeline: Pipeline) -> RunLog:
    """Open the log of rank 0."""
    work = None
    if options.log is not None or options.tensorboard is not None:
        from hpgo.runtime.train.work import step_work

        kinds = options.of_pipeline()
        work = step_work(
            pipeline.workload,
            samples=pipeline.program.global_batch_size,
            ranks=pipeline.program.world_size,
            device=pipeline.device,
            dtype=kinds["dtype"],
            autocast=kinds["autocast"],
        )
    ranks, done = pipeline.program.world_size, pipeline.steps
    return RunLog(options.log, options.tensorboard, work=work, ranks=ranks, done=done)


def _validation(options: RunOptions, pipeline: Pipeline) -> Callable[[], dict[str, float]] | None:
    """Return a function that evaluates the model on the validation data, or None without such data."""
    if options.validation_data is None:
        return None
    import torch

    from hpgo.runtime.train.evaluation import check_metrics
    from hpgo.runtime.user_functions import made_by

    # Create both once. The random numbers of the user's functions must not affect the run.
    with torch.random.fork_rng(devices=[]):
        metrics = None
        if options.metrics is not None:
            metrics = made_by(options.metrics, "metrics", seed=options.seed, wanted="functions by name")
        data = made_by(options.validation_data, "validation data", seed=options.seed, wanted="a data set")
    check_metrics(metrics)
    return lambda: pipeline.evaluate(data, metrics=metrics)


def _hook(options: RunOptions) -> Callable[[Pipeline, float], object] | None:
    """Return the user's hook of a pipeline and a loss, or None."""
    if options.after_step is None:
        return None
    import torch

    from hpgo.runtime.user_functions import made_by

    with torch.random.fork_rng(devices=[]):
        hook = made_by(options.after_step, "hook", seed=options.seed, wanted="a function of pipeline and loss")
    if not callable(hook):
        raise ArgumentError(
            f"`{options.after_step}` returns {safe_repr(hook)}, which can't be called",
            "return a function of the pipeline and the loss",
            code="user_code",
        )
    found: Callable[[Pipeline, float], object] = hook
    return found


def _resume(options: RunOptions, pipeline: Pipeline, *, talks: bool) -> bool:
    """Resume from the newest checkpoint, if there is one, and return whether it is that of the last step."""
    found = pipeline.resume(options.checkpoint or "")
    is_done = pipeline.steps >= options.steps
    if talks and is_done:
        click.echo(
            f"{options.checkpoint} has step {pipeline.steps}, and `--steps` is {options.steps}: the run is complete."
            " `--steps` includes the steps before the checkpoint"
        )
    elif talks:
        click.echo(f"resumed from step {pipeline.steps}" if found else f"no checkpoint in {options.checkpoint} yet")
    return is_done


def _save(options: RunOptions, pipeline: Pipeline) -> None:
    if options.checkpoint is not None:
        # The last step is always saved. Without --every, it is the only one.
        every = 1 if pipeline.steps == options.steps else options.every or options.steps
        pipeline.checkpoint(options.checkpoint, every=every, keep=options.keep, tell=warn)
