"""One rank of `pipeedge-run`: it receives the assignment, loads its layers or the data, and runs inference."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hpgo.base.files import writing
from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError, RunError
from hpgo.runtime.clocks import node_name
from hpgo.runtime.infer.pipeline import InferencePipeline
from hpgo.runtime.pipeedge.data import Noise, read_data
from hpgo.runtime.pipeedge.models import model_named
from hpgo.runtime.pipeedge.monitor import Monitor
from hpgo.runtime.pipeedge.schedule import Assignment, ScheduleOptions, decide
from hpgo.runtime.pipeedge.weights import with_weights
from hpgo.runtime.progress import HERE
from hpgo.runtime.rendezvous import agree, lost, meet, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpgo.runtime.pipeedge.data import Data, DataOptions
    from hpgo.timing.flow import Flow

_DECIDED, _LENGTH = "pipeedge/decided", "pipeedge/length"
"""Keys of the store: the assignment by rank 0, and the length of texts by the data rank."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Options of one rank."""

    number: int
    asked: ScheduleOptions
    """Options of the schedule, which have an effect on rank 0 only, except for the model."""
    data: DataOptions
    """Options of the data, which have an effect on the data rank only."""
    weights: Path | None
    """File or folder of the weights. None: random weights."""
    monitor: Path
    """Folder for the monitoring tables."""
    monitor_mode: str
    """Mode for opening the tables: `w`, `x` or `a`."""
    window: int
    keep: Path | None
    """File for the outputs, on the data rank."""
    options: dict[str, Any]
    """Keyword arguments of `InferencePipeline`."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of a run, on the data rank."""

    decided: Assignment
    samples: int
    taken_s: float
    """Seconds from the first sample to the last answer."""
    right: int | None
    """Number of correct answers; None without labels."""
    sent_bits: tuple[dict[int, int], ...]
    flow: Flow


def take_rank(rank: Rank, tell: Callable[[str], None]) -> RankResult | None:
    """Run inference as one rank; return the result on the data rank, and None on others.

    `tell` gets lines from rank 0 and from the data rank before the run. Raises the errors of `decide` and
    `InferencePipeline.infer`, and ArgumentError if ranks name different models.
    """
    store = meet(rank.options["timeout_s"])
    # Only rank 0 needs PipeEdge's files. All others receive its decision through the store.
    if rank.number == 0:
        decided = decide(rank.asked)
        store.set(_DECIDED, decided.to_json())
        for line in _in_words(decided):
            tell(line)
    else:
        decided = Assignment.from_json(_read_store(store, _DECIDED, 0, "the wait for who takes what"))
    if rank.asked.model != decided.model:
        raise ArgumentError(
            f"the model of rank {rank.number} is `{rank.asked.model}`, but that of rank 0 is `{decided.model}`",
            "start all ranks with the same `-m`",
        )
    model = model_named(decided.model)
    data: Data | None = None
    if rank.number == decided.data_rank:
        HERE.does("the reading of the data")
        data = read_data(rank.data, model)
        store.set(_LENGTH, str(data.length))
        tell(_of_data(data, rank.data))
    # The example of the workload needs the length of the longest text, which only the data rank knows.
    length = int(_read_store(store, _LENGTH, decided.data_rank, "the wait for the data"))
    workload = model.workload(length)
    if rank.weights is not None:
        workload = with_weights(workload, rank.weights)
    program = decided.program(workload.layers)
    with InferencePipeline(program, workload, quantize=decided.bits, **rank.options) as pipeline:
        # Random and published weights must not be mixed in one model.
        agree({"kind of weights": "random weights" if rank.weights is None else "weights of a file"})
        return _infer(pipeline, rank, decided, data)


def _read_store(store: Any, key: str, rank: int, words: str) -> str:
    """Return the value that a rank has stored under `key`, once it is there."""
    HERE.does(words)
    with lost(str(HERE)), HERE.waiting(rank):
        value: bytes = store.get(key)
    return value.decode()


def _infer(pipeline: InferencePipeline, rank: Rank, decided: Assignment, data: Data | None) -> RankResult | None:
    size, right, begin, labels = decided.micro_batch_size, 0, 0, 0
    kept: list[torch.Tensor] = []
    # A rank without a stage has no layers, which the range (1, 0) expresses.
    first, last = dict(zip(decided.ranks, decided.stages, strict=True)).get(rank.number, (1, 0))
    monitor = Monitor(_folder(rank), rank.window, last + 1 - first, mode=rank.monitor_mode)
    begin_s = time.perf_counter()
    stream = pipeline.infer(
        () if data is None else (data.rows(at, at + size) for at in range(0, len(data), size)),
        hold_samples_per_s=decided.hold_samples_per_s,
        data_rank=decided.data_rank,
        watch=monitor,
    )
    for answers in stream:
        if rank.keep is not None:
            kept.append(answers)
        found = None if data is None else data.right(begin, answers)
        if found is not None:
            right, labels = right + found[0], labels + found[1]
            monitor.right(found[0])
        begin += len(answers)
    taken_s = time.perf_counter() - begin_s
    monitor.close()
    flow = pipeline.flow()
    if data is None:
        return None
    if rank.keep is not None:
        with writing(rank.keep, RunError) as file:
            np.save(file, torch.cat(kept).cpu().float().numpy())
    return RankResult(decided, begin, taken_s, right if labels else None, pipeline.sent_bits, flow)


def _folder(rank: Rank) -> Path:
    """Return the folder of the rank's tables: a subfolder if several ranks of a host have the same folder."""
    mine = node_name(), str(rank.monitor.resolve())
    # Paths alone can't be compared between hosts, so compare them with the host's name.
    folders: list[Any] = [None] * dist.get_world_size()
    with together("the comparison of their folders"):
        dist.all_gather_object(folders, mine)
    return rank.monitor / f"rank-{rank.number}" if folders.count(mine) > 1 else rank.monitor


def _in_words(decided: Assignment) -> Iterator[str]:
    """Yield a description of the assignment."""
    yield from decided.remarks
    for at, ((first, last), rank) in enumerate(zip(decided.stages, decided.ranks, strict=True)):
        bits = decided.bits[at] if at < len(decided.bits) else 0
        yield f"stage {at} is rank {rank} with layers {first} to {last}" + (f", and sends {bits} bit" if bits else "")
    if decided.data_rank != decided.ranks[0]:
        yield f"rank {decided.data_rank} holds the data"
    if idle := sorted(set(range(decided.world)) - {*decided.ranks, decided.data_rank}):
        yield f"nothing is left for {pluralize(len(idle), 'rank')}: {', '.join(map(str, idle))}"


def _of_data(data: Data, wanted: DataOptions) -> str:
    """Return a description of the data."""
    if isinstance(data, Noise):
        return f"{pluralize(len(data), 'sample')} of random data: `--dataset-name` selects a data set"
    return f"{pluralize(len(data), 'sample')} of {wanted.name}, {wanted.split}"
