"""One rank of `pipeedge-run`: it hears who takes what, holds its layers or the data, and infers."""

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
from hpgo.runtime.clocks import machine_name
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
"""Keys of the store, under which rank 0 says who takes what, and the rank with the data how long texts are."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one of them is asked for."""

    number: int
    asked: ScheduleOptions
    """Rank 0's counts."""
    data: DataOptions
    """That of the rank with the data counts."""
    weights: Path | None
    """A file or folder; None is random ones."""
    monitor: Path
    """The folder for its tables."""
    monitor_mode: str
    """In which they are opened."""
    window: int
    keep: Path | None
    """A file for the outputs, on the rank with the data."""
    options: dict[str, Any]
    """Of `Pipeline`."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What came of it, for the rank with the data."""

    decided: Assignment
    samples: int
    taken_s: float
    """From the first sample to the last answer."""
    right: int | None
    """Answers; None where there are no labels."""
    sent_bits: tuple[dict[int, int], ...]
    flow: Flow


def take_rank(rank: Rank, tell: Callable[[str], None]) -> RankResult | None:
    """Infers as that rank; returns what came of it on the rank with the data.

    `tell` is given what rank 0, or the rank with the data, has to say before. Raises what `decide` and `Pipeline.infer`
    raise, and ArgumentError for ranks that name different models.
    """
    store = meet(rank.options["timeout_s"])
    if rank.number == 0:
        decided = decide(rank.asked)
        store.set(_DECIDED, decided.to_json())
        for line in _in_words(decided):
            tell(line)
    else:
        decided = Assignment.from_json(_told(store, _DECIDED, 0, "the wait for who takes what"))
    if rank.asked.model != decided.model:
        raise ArgumentError(
            f"rank {rank.number} is to run `{rank.asked.model}`, and rank 0 `{decided.model}`",
            "start all with one `-m`",
        )
    model = model_named(decided.model)
    data: Data | None = None
    if rank.number == decided.data_rank:
        HERE.does("the reading of the data")
        data = read_data(rank.data, model)
        store.set(_LENGTH, str(data.length))
        tell(_of_data(data, rank.data))
    length = int(_told(store, _LENGTH, decided.data_rank, "the wait for the data"))
    workload = model.workload(length)
    if rank.weights is not None:
        workload = with_weights(workload, rank.weights)
    program = decided.program(workload.layers)
    with InferencePipeline(program, workload, quantize=decided.bits, **rank.options) as pipeline:
        agree({"kind of weights": "random" if rank.weights is None else "those of a file"})
        return _infer(pipeline, rank, decided, data)


def _told(store: Any, key: str, rank: int, words: str) -> str:
    """What a rank has said under `key`, as soon as it has."""
    HERE.does(words)
    with lost(str(HERE)), HERE.waiting(rank):
        said: bytes = store.get(key)
    return said.decode()


def _infer(pipeline: InferencePipeline, rank: Rank, decided: Assignment, data: Data | None) -> RankResult | None:
    size, right, begin, labels = decided.micro_batch_size, 0, 0, 0
    kept: list[torch.Tensor] = []
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
    """For its tables: one of its own, where several ranks of a machine are given the same."""
    mine = machine_name(), str(rank.monitor.resolve())
    folders: list[Any] = [None] * dist.get_world_size()
    with together("the comparison of their folders"):
        dist.all_gather_object(folders, mine)
    return rank.monitor / f"rank-{rank.number}" if folders.count(mine) > 1 else rank.monitor


def _in_words(decided: Assignment) -> Iterator[str]:
    """Who takes what."""
    yield from decided.remarks
    for at, ((first, last), rank) in enumerate(zip(decided.stages, decided.ranks, strict=True)):
        bits = decided.bits[at] if at < len(decided.bits) else 0
        yield f"stage {at} is rank {rank} with layers {first} to {last}" + (f", and sends {bits} bit" if bits else "")
    if decided.data_rank != decided.ranks[0]:
        yield f"rank {decided.data_rank} holds the data"
    if idle := sorted(set(range(decided.world)) - {*decided.ranks, decided.data_rank}):
        yield f"nothing is left for {pluralize(len(idle), 'rank')}: {', '.join(map(str, idle))}"


def _of_data(data: Data, wanted: DataOptions) -> str:
    """What goes through."""
    if isinstance(data, Noise):
        return f"{pluralize(len(data), 'sample')} of random data: `--dataset-name` takes others"
    return f"{pluralize(len(data), 'sample')} of {wanted.name}, {wanted.split}"
