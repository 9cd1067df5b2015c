"""How near two processes come to their bound, and what an action costs beside its computing.

    python benches/runtime.py [STEPS]

On a machine that does nothing else, with one thread a process. Ours, `torch.distributed.pipelining` with the same
order, and one process that runs the same micro-batches take turns, step by step.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hpgo
from hpgo.runtime import Pipeline, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS, WARM = 10, 3


def blocks(width: int, count: int) -> nn.Sequential:
    """Equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)])


def ours(width: int, count: int, rows: int, micro_batches: int) -> tuple[Pipeline, Callable[[torch.Tensor], object]]:
    """A step of `Pipeline`."""
    example = torch.zeros(2, width)
    workload = Workload(blocks(width, count), example, example, nn.functional.mse_loss)
    orders = hpgo.schedule("1f1b", ranks=2, micro_batches=micro_batches)
    half = count // 2
    program = hpgo.program(
        orders, [(workload.layers[:half], [0]), (workload.layers[half:], [1])],
        micro_batch_size=rows, global_batch_size=rows * micro_batches,
    )  # fmt: skip
    pipeline = Pipeline(program, workload)
    return pipeline, lambda batch: pipeline.step(batch, batch)


def theirs(rank: int, width: int, count: int, micro_batches: int) -> Callable[[torch.Tensor], object]:
    """A step of torch's 1F1B, which ends with gradients as ours does."""
    model = blocks(width, count)
    half = model[: count // 2] if rank == 0 else model[count // 2 :]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(batch: torch.Tensor) -> None:
        half.zero_grad()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])

    return step


def alone(width: int, count: int, rows: int) -> Callable[[torch.Tensor], object]:
    """The same micro-batches in one process."""
    model = blocks(width, count)

    def step(batch: torch.Tensor) -> None:
        model.zero_grad()
        for part in batch.split(rows):
            (nn.functional.mse_loss(model(part), part) * (len(part) / len(batch))).backward()

    return step


def run(rank: int, meet: str, steps: int) -> None:
    """Both ranks; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    for name, width, count, rows, micro_batches in (
        ("10 blocks, M = 8", 512, BLOCKS, 256, 8),
        ("10 blocks, M = 32", 512, BLOCKS, 256, 32),
        ("4 KiB messages, M = 64", 64, 2, 16, 64),
    ):
        pipeline, step = ours(width, count, rows, micro_batches)
        batch = torch.randn(rows * micro_batches, width)
        runs = {"ours": step, "torch": theirs(rank, width, count, micro_batches), "alone": alone(width, count, rows)}
        times_s: dict[str, list[float]] = {who: [] for who in runs}
        for _ in range(WARM + steps):
            for who, one in runs.items():
                dist.barrier()
                begin_s = time.perf_counter()
                if who != "alone" or rank == 0:
                    one(batch)
                times_s[who].append(time.perf_counter() - begin_s)
        pipeline.close()
        if rank == 0:
            report(name, {who: those[WARM:] for who, those in times_s.items()}, micro_batches)
    dist.destroy_process_group()


def report(name: str, times_s: dict[str, list[float]], micro_batches: int) -> None:
    """Medians of steps, and of ratios of steps that followed each other."""
    bound = 2 * micro_batches / (micro_batches + 1)
    print(name)
    for who, those in times_s.items():
        faster = statistics.median(one / other for one, other in zip(times_s["alone"], those, strict=True))
        action_us = statistics.median(those) / (2 * micro_batches) * 1e6
        print(
            f"  {who:6} {statistics.median(those) * 1e3:9.2f} ms a step  {action_us:8.1f} us an action"
            f"  {faster:5.2f} x alone  {100 * faster / bound:5.1f} % of the bound"
        )
    ratio = statistics.median(one / other for one, other in zip(times_s["torch"], times_s["ours"], strict=True))
    print(f"  torch's step takes {ratio:.2f} x ours")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")  # torch is loaded once; nothing has run yet
        asked = int(sys.argv[1]) if len(sys.argv) > 1 else 20
        ranks = [fork.Process(target=run, args=(rank, str(Path(folder) / "meet"), asked)) for rank in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))
