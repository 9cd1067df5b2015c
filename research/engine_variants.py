"""The four variants in which the Pipeline Execution Engine trains VGG-19, as programs, and a plan of hpgo.

All four split a batch of 64 images over four workers, and differ in cuts, micro-batches and order. `train`
runs them and the plan of `searched` in the same way, so that their times can be compared.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo.base.checks import check_int, choice
from hpgo.base.memory_check import free_bytes
from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.model.formats import read_profile, write_profile
from hpgo.planning.planner import plan
from hpgo.programs.program import program
from hpgo.programs.schedule import Schedule, schedule
from hpgo.runtime.launch import run_here
from hpgo.runtime.links import measure_links
from hpgo.runtime.profiling import measure
from hpgo.runtime.progress import stages_of
from hpgo.runtime.runnable import Runnable
from hpgo.runtime.train.optimizer import optimizer_of
from hpgo.runtime.train.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.workload import Workload

WORKERS = 4
LAYERS = 44
"""Number of layers of VGG-19, with one operation per layer."""
WORKLOAD = "vgg-19:flat,squared,image=128,batch=64"
"""Workload that the engine trains."""
_LINKS_S = 5.0
"""Approximate time in seconds for measuring the links."""
_SIZES = (1, 4, 16)
"""Batch sizes that the search measures, up to the global batch size."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the variants of the engine."""

    name: str
    cuts: tuple[int, ...]
    """Number of layers before each cut."""
    micro_batches: int


VARIANTS = (
    Variant("sequential", (5, 10, 15), 1),
    Variant("async", (12, 23, 34), 64),
    Variant("staggered", (10, 19, 28), 16),
    Variant("staggered-8", (5, 11, 16, 22, 27, 33, 38), 16),
)
"""The variants with the cuts and micro-batches of the engine."""


def program_of_variant(name: str, layers: Sequence[str], batch_size: int) -> Program:
    """Return the program of a variant: `sequential`, `async`, `staggered` or `staggered-8`.

    `layers` are the layers of VGG-19, an operation each; a batch has `batch_size` samples. Raises ArgumentError for
    other layers, and for a batch that does not fall into the variant's micro-batches.

    >>> layers = [str(at) for at in range(44)]
    >>> eight = program_of_variant("staggered-8", layers, 64)
    >>> eight.for_rank(1).stages[1].layers
    ('27', '28', '29', '30', '31', '32')
    >>> program_of_variant("sequential", layers, 64).pipeline_micro_batch_size
    64
    """
    known = {one.name: one for one in VARIANTS}
    variant = known[choice("variant", name, tuple(known))]
    if len(layers) != LAYERS:
        raise ArgumentError(
            f"the variants cut VGG-19 into {LAYERS} layers, and the workload has {len(layers)}",
            f"name it with an operation a layer: `{WORKLOAD}`, or smaller, with `width=8,image=32`",
        )
    batch_size = check_int("batch_size", batch_size)
    if batch_size % variant.micro_batches:
        raise ArgumentError(
            f"a batch of {batch_size} can't be {pluralize(variant.micro_batches, 'equal micro-batch')}",
            f"give one of {variant.micro_batches}, or of a multiple of it: `batch=64`",
        )
    stages = [tuple(layers[begin:end]) for begin, end in pairwise((0, *variant.cuts, len(layers)))]
    return program(
        _schedule_of(variant, len(stages)),
        [(ids, [stage % WORKERS]) for stage, ids in enumerate(stages)],
        pipeline_micro_batch_size=batch_size // variant.micro_batches,
        global_batch_size=batch_size,
    )


def _schedule_of(variant: Variant, stages: int) -> Schedule:
    if variant.name == "sequential":
        return schedule("sequential", ranks=WORKERS, micro_batches=variant.micro_batches)
    if variant.name == "async":
        return schedule("gpipe", ranks=WORKERS, micro_batches=variant.micro_batches)
    return staggered(stages, WORKERS, variant.micro_batches)


def staggered(stages: int, workers: int, micro_batches: int) -> Schedule:
    """Forward passes in waves, then backward passes: in step t, stage s works on micro-batch t - s, if there is one.

    Worker s mod `workers` has stage s. It runs its stages of a step one after the other.

    >>> staggered(4, 2, 2).action_lists[0]
    ['0F0', '0F1', '2F0', '2F1', '2B0', '2B1', '0B0', '0B1']
    """
    lines: list[list[str]] = [[] for _ in range(min(workers, stages))]
    for letter in "FB":
        for step in range(micro_batches + stages - 1):
            for place in range(stages):
                stage = place if letter == "F" else stages - 1 - place
                if 0 <= step - place < micro_batches:
                    lines[stage % workers].append(f"{stage}{letter}{step - place}")
    return Schedule.from_text("\n".join(map(",".join, lines)), name="waves")


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of training a program for some steps."""

    losses: tuple[float, ...]
    """Loss of each step, before its weight update."""
    steps_s: tuple[float, ...]
    moved: float
    """Norm of the change of the weights over all steps, relative to the norm of the weights."""

    @property
    def step_s(self) -> float:
        """Median step in seconds, without the first one, which warms up."""
        later = sorted(self.steps_s[1:] or self.steps_s)
        return later[(len(later) - 1) // 2]


def train(
    what: Plan | Program,
    workload: Workload,
    *,
    steps: int,
    optimizer: str = "sgd:lr=0.05",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    limits: Limits | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Trained:
    """Train on the workload's example with one new process per device on this machine.

    `tell` is called by rank 0, in its process, after each step. Raises what a rank raises.
    """
    runnable = Runnable.from_plan(what)
    made = runnable.program
    steps = check_int("steps", steps)
    make = optimizer_of(optimizer)  # reports invalid ones before anything starts
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trained.json"

        def work() -> None:
            trained = _train(runnable, workload, steps, tell, optimizer=make, seed=seed, dtype=dtype)
            if _rank() == 0:
                file.write_text(json.dumps(asdict(trained)), encoding="ascii")

        run_here(made.world_size, work, limits, partial(stages_of, made))
        found = json.loads(file.read_text(encoding="ascii"))
    return Trained(tuple(found["losses"]), tuple(found["steps_s"]), found["moved"])


def _rank() -> int:
    """Return the rank that `run_here` has given to this process."""
    return int(os.environ["RANK"])


def _train(runnable: Runnable, workload: Workload, steps: int, tell: Callable[[str], None], **options: Any) -> Trained:
    """Train on one rank and return the losses, times and weight change."""
    losses: list[float] = []
    steps_s: list[float] = []
    with Pipeline(runnable, workload, **options) as pipeline:
        before = [weight.copies[0].detach().clone() for weight in pipeline.weights]
        batch = pipeline.example()
        for number in range(1, steps + 1):
            begin_s = time.perf_counter()
            losses.append(pipeline.step(*batch))
            steps_s.append(time.perf_counter() - begin_s)
            if pipeline.rank == 0:
                tell(f"step {number}  loss {losses[-1]:.6g}  {steps_s[-1]:.4g} s")
        squares = torch.zeros(2, dtype=torch.float64)
        for weight, first in zip(pipeline.weights, before, strict=True):
            added = (weight.copies[0].detach() - first).double().square().sum()
            squares += torch.stack([added, first.double().square().sum()]) / len(weight.ranks)
        dist.all_reduce(squares)
    return Trained(tuple(losses), tuple(steps_s), math.sqrt(float(squares[0] / squares[1])))


def searched(
    workload: str,
    batch_size: int,
    *,
    workers: int | None = None,
    seconds: float = 20.0,
    dtype: torch.dtype | None = None,
    limits: Limits | None = None,
) -> Plan:
    """Return the plan with the shortest step for the layer times and links measured on this machine.

    Args:
        workload: its name, as `Workload.read` takes it; layers are as it has them.
        batch_size: samples in a step.
        workers: processes, at most; None is the engine's four, or as many as there are cores.
        seconds: for measuring each batch size.
        dtype: of the weights.
        limits: of the processes that measure.

    Raises RunError where a layer can't run.
    """
    cores = os.cpu_count() or 1
    count = min(WORKERS, cores) if workers is None else check_int("workers", workers)
    sizes = [size for size in _SIZES if size <= batch_size]
    with tempfile.TemporaryDirectory() as folder:
        profile, links = Path(folder) / "profile.json", Path(folder) / "links.yaml"

        def measure_layers() -> None:
            found = measure(workload, batch_sizes=sizes, ranks=count, seconds=seconds, dtype=dtype)
            write_profile(found.profile, profile)

        def measure_machine() -> None:
            found = measure_links(seconds=_LINKS_S)
            if _rank() == 0:
                links.write_text(found.cluster.yaml(), encoding="utf-8")

        # Measure in separate processes, because a process whose torch has started threads can't be forked safely.
        run_here(1, measure_layers, limits)
        if count > 1:
            run_here(count, measure_machine, limits)
            cluster = Cluster.read(links)
        else:
            cluster = Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, memory=free_bytes())
        return plan(read_profile(profile), cluster, global_batch_size=batch_size, schedule="auto")
