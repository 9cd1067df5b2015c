"""Measure how close two processes come to their bound, and the overhead of actions and of saving.

    python research/runtime.py [STEPS [ROWS WIDTH]]
    python research/runtime.py pairs [STEPS [ROWS WIDTH]]
    python research/runtime.py saving [TIMES]
    python research/runtime.py inference [TIMES [ROWS WIDTH]]

Run it on an idle machine, with one thread per process. Five kinds of runs take turns, step by step: hpgo with 1F1B,
hpgo with eager 1F1B, `torch.distributed.pipelining` with 1F1B, one process with the same micro-batches (alone), and two
such processes at once (beside). Blocks compute in the first cases, and sleep for the same time in others. If two
processes at once take longer than one, the machine has less than two free cores, and no run reaches the bound. Torch
runs in two separate processes, because hpgo makes its processes keep freed memory, which would also speed up torch.

`pairs` compares only steps of 1F1B with M = 32, of hpgo and of torch, and alternates which of them begins.

`saving` trains a linear layer with Adam on each of four ranks, 1 GB in total, and saves it. It compares a step that
begins with saving with the steps before it, and the time for which a rank stops with a copy of the same size.

`inference` streams 64 micro-batches through two stages. It takes turns with one process that runs them through the
whole model, and with two such processes at once. The models are blocks that compute, blocks that sleep, and ViT-Base
with one image per micro-batch.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hpgo
from hpgo.runtime import InferencePipeline, Pipeline, Workload
from hpgo.runtime.models.vit import vit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkContext
    from multiprocessing.queues import SimpleQueue

BLOCKS, WARM = 10, 3
USUAL = 256, 256
"""Default rows and width of blocks."""


class Block(nn.Module):
    """The MLP of a transformer block.

    It begins with weights, so that the backward pass of the first block covers as much as in the others.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of `given`."""
        return given + self.inner(given)


class _Sleep(torch.autograd.Function):
    """Identity that takes about the time of a block that computes, without using the processor."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Sleep 5 ms and return a copy of `given`."""
        time.sleep(0.005)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Sleep 10 ms and return a copy of `gradient`."""
        time.sleep(0.01)
        return gradient.clone()


class Sleeper(Block):
    """A block that sleeps as long as a block computes, and sends the same bytes, independent of processor speed."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inner = nn.Sequential(nn.LayerNorm(width))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of `given`."""
        made: torch.Tensor = _Sleep.apply(super().forward(given))
        return made


def thin(width: int) -> nn.Module:
    """Return a layer with little arithmetic relative to its messages."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def blocks(kind: Callable[[int], nn.Module], width: int, count: int) -> nn.Sequential:
    """Return a list of equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[kind(width) for _ in range(count)])


def ours(order: str, model: nn.Sequential, example: torch.Tensor, rows: int, micro_batches: int) -> Pipeline:
    """Return a pipeline of two stages."""
    workload = Workload(model, example, example, nn.functional.mse_loss)
    schedule = hpgo.schedule(order, ranks=2, micro_batches=micro_batches)
    half = len(model) // 2
    program = hpgo.program(
        schedule, [(workload.layers[:half], [0]), (workload.layers[half:], [1])],
        pipeline_micro_batch_size=rows, global_batch_size=rows * micro_batches,
    )  # fmt: skip
    return Pipeline(program, workload)


def theirs(rank: int, model: nn.Sequential, micro_batches: int) -> Callable[[torch.Tensor], object]:
    """Return a function that runs a step of torch's 1F1B and, like hpgo, ends with gradients."""
    middle = len(model) // 2
    half = model[:middle] if rank == 0 else model[middle:]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)

    def step(batch: torch.Tensor) -> None:
        half.zero_grad()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=[])

    return step


def alone(model: nn.Sequential, rows: int) -> Callable[[torch.Tensor], object]:
    """Run the same micro-batches in one process."""

    def step(batch: torch.Tensor) -> None:
        model.zero_grad()
        for part in batch.split(rows):
            (nn.functional.mse_loss(model(part), part) * (len(part) / len(batch))).backward()

    return step


class Turns:
    """Two pairs of processes, hpgo's and torch's, that take turns and sleep while they wait."""

    def __init__(self, fork: ForkContext) -> None:
        self._gate = fork.Barrier(4, timeout=600)
        self._told: SimpleQueue[list[float]] = fork.SimpleQueue()

    def meet(self, number: int, meet: str) -> tuple[int, bool]:
        """Connect the pair of one of four processes. Returns its rank in the pair, and whether the pair is hpgo's."""
        torch.set_num_threads(1)
        rank, is_ours = number % 2, number < 2
        dist.init_process_group("gloo", init_method=f"file://{meet}{number // 2}", rank=rank, world_size=2)
        return rank, is_ours

    def take(self, step: Callable[[], object] | None) -> float:
        """Return the seconds that a step of one pair takes. The other pair passes None and waits."""
        self._gate.wait()
        took_s = 0.0
        if step is not None:
            dist.barrier()
            begin_s = time.perf_counter()
            step()
            took_s = time.perf_counter() - begin_s
        self._gate.wait()
        return took_s

    def tell(self, times_s: list[float]) -> None:
        """Send times from the first process of torch's pair to the first of hpgo's."""
        self._told.put(times_s)

    def told(self) -> list[float]:
        """Receive the times sent by `tell`."""
        return self._told.get()


def together(step: Callable[[torch.Tensor], object], batch: torch.Tensor) -> None:
    """Run a step on both ranks and wait for the slower one."""
    step(batch)
    dist.barrier()


def run(turns: Turns, number: int, meet: str, steps: int, *size: int) -> None:
    """Run one of four processes, of which the first prints. `size` is rows and width of blocks."""
    block_rows, block_width = size or USUAL
    rank, is_ours = turns.meet(number, meet)
    for name, kind, width, count, rows, micro_batches in (
        ("10 blocks, M = 8", Block, block_width, BLOCKS, block_rows, 8),
        ("10 blocks, M = 32", Block, block_width, BLOCKS, block_rows, 32),
        ("10 blocks that sleep, M = 8", Sleeper, block_width, BLOCKS, block_rows, 8),
        ("10 blocks that sleep, M = 32", Sleeper, block_width, BLOCKS, block_rows, 32),
        ("10 thin layers, M = 32", thin, 512, BLOCKS, 256, 32),
        ("4 KiB messages, M = 64", thin, 64, 2, 16, 64),
    ):
        batch = torch.randn(rows * micro_batches, width)
        runs: dict[str, Callable[[], object] | None] = dict.fromkeys(("ours", "eager", "torch", "alone", "beside"))
        pipelines: list[Pipeline] = []
        if is_ours:
            for who, order in (("ours", "1f1b"), ("eager", "eager_1f1b")):
                pipelines.append(ours(order, blocks(kind, width, count), batch[:2], rows, micro_batches))
                runs[who] = partial(pipelines[-1].step, batch, batch)
            whole = alone(blocks(kind, width, count), rows)
            runs["beside"] = partial(together, whole, batch)
            runs["alone"] = partial(whole, batch) if rank == 0 else lambda: None
        else:
            runs["torch"] = partial(theirs(rank, blocks(kind, width, count), micro_batches), batch)
        steady_s: list[float] = []
        times_s: dict[str, list[float]] = {who: [] for who in runs}
        for _ in range(WARM + steps):
            for who, one in runs.items():
                times_s[who].append(turns.take(one))
            for pipeline in pipelines[:1]:
                ends_ns = pipeline.engine.clock_ns[1::2]
                quarter = len(ends_ns) // 4
                steady_s.append((ends_ns[-quarter] - ends_ns[quarter]) / (len(ends_ns) - 2 * quarter) / 1e9)
        for pipeline in pipelines:
            pipeline.close()
        if rank == 0 and not is_ours:
            turns.tell(times_s["torch"])
        if rank == 0 and is_ours:
            times_s["torch"] = turns.told()
            kept = {who: those[WARM:] for who, those in times_s.items()}
            report(name, kept, micro_batches)
            slower = statistics.median(one / other for one, other in zip(kept["torch"], kept["ours"], strict=True))
            action_us = {who: statistics.median(those) / (2 * micro_batches) * 1e6 for who, those in kept.items()}
            middle_us = statistics.median(steady_s[WARM:]) * 1e6
            print(
                f"  torch's step takes {slower:.3f} x ours; an action {action_us['torch']:.1f} us, ours"
                f" {action_us['ours']:.1f} us, {middle_us:.1f} us in the middle of a step"
            )
    dist.destroy_process_group()


def pair(turns: Turns, number: int, meet: str, steps: int, *size: int) -> None:
    """Run one of four processes, of which the first prints. `size` is rows and width of blocks."""
    rows, width = size or USUAL
    rank, is_ours = turns.meet(number, meet)
    batch, model = torch.randn(rows * 32, width), blocks(Block, width, BLOCKS)
    pipeline = ours("1f1b", model, batch[:2], rows, 32) if is_ours else None
    step = partial(pipeline.step, batch, batch) if pipeline else partial(theirs(rank, model, 32), batch)
    slower: list[float] = []
    for at in range(1 + steps):
        for ours_now in (at % 2 == 0, at % 2 != 0):
            took_s = turns.take(step if ours_now == is_ours else None)
            if ours_now == is_ours:
                mine_s = took_s
        if rank == 0 and not is_ours:
            turns.tell([mine_s])
        if rank == 0 and is_ours:
            (its_s,) = turns.told()
            slower.append(its_s / mine_s)
            if at:
                print(f"ours {mine_s:.3f} s  torch {its_s:.3f} s  {slower[-1]:.3f} x ours", flush=True)
    if pipeline:
        pipeline.close()
    dist.destroy_process_group()
    if slower:
        print(f"median of {steps}: torch's step takes {statistics.median(slower[1:]):.3f} x ours")


def report(name: str, times_s: dict[str, list[float]], micro_batches: int) -> None:
    """Print medians of times and ratios, and the minimum of each, because other load only adds time."""
    bound = 2 * micro_batches / (micro_batches + 1)
    print(name)
    for who, those in times_s.items():
        faster = statistics.median(one / other for one, other in zip(times_s["alone"], those, strict=True))
        minimum = min(times_s["alone"]) / min(those)
        print(
            f"  {who:6} {statistics.median(those) * 1e3:9.2f} ms  {faster:5.3f} x alone  {100 * faster / bound:5.1f} %"
            f" of the bound   shortest {min(those) * 1e3:9.2f} ms  {minimum:5.3f} x  {100 * minimum / bound:5.1f} %"
        )


RANKS, BYTES = 4, 1e9  # bytes of weights and Adam state, over all ranks
ROWS, MICRO_BATCHES = 160, 16


def save(rank: int, meet: str, times: int) -> None:
    """Run one of four ranks that train and save. Rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    width = round((BYTES / RANKS / 12) ** 0.5)  # three numbers of four bytes a weight
    example = torch.zeros(2, width)
    workload = Workload([nn.Linear(width, width) for _ in range(RANKS)], example, example, nn.functional.mse_loss)
    schedule = hpgo.schedule("1f1b", ranks=RANKS, micro_batches=MICRO_BATCHES)
    program = hpgo.program(
        schedule, [([layer], [at]) for at, layer in enumerate(workload.layers)],
        pipeline_micro_batch_size=ROWS, global_batch_size=ROWS * MICRO_BATCHES,
    )  # fmt: skip
    pipeline = Pipeline(program, workload, optimizer=lambda weights: torch.optim.Adam(weights, lr=1e-6))
    batch = torch.randn(ROWS * MICRO_BATCHES, width)
    folder = Path(meet).parent / "saved"

    def timed(work: Callable[[], object]) -> float:
        """Return the seconds until all ranks have done the work."""
        dist.barrier()
        begin_s = time.perf_counter()
        kept = work()
        dist.barrier()
        del kept
        return time.perf_counter() - begin_s

    def held() -> list[torch.Tensor]:
        state = pipeline.optimizer.state if pipeline.optimizer else {}
        return [*(weight.copies[0] for weight in pipeline.weights), *(
            value for values in state.values() for value in values.values()
        )]  # fmt: skip

    def step() -> None:
        pipeline.step(batch, batch)

    pipeline.checkpoint(folder, keep=1)  # nothing yet, but it looks at the folder
    step()
    for _ in range(times):
        plain_s = [timed(step) for _ in range(2)]
        copy_s = timed(lambda: [tensor.detach().clone() for tensor in held()])
        stall_s = timed(lambda: pipeline.checkpoint(folder, keep=1))
        saving_s = stall_s + timed(step)
        begin_s = time.perf_counter()
        while not (folder / f"step-{pipeline.steps - 1}").is_dir():
            time.sleep(0.01)
        rest_s = time.perf_counter() - begin_s
        if rank == 0:
            step_s = statistics.mean(plain_s)
            print(
                f"a step takes {step_s:.2f} s, one that saves {saving_s:.2f} s, {100 * (saving_s / step_s - 1):+.1f} %;"
                f" it stands still for {stall_s * 1e3:.0f} ms, {stall_s / copy_s:.2f} x a copy; all is saved"
                f" {rest_s:.2f} s behind it"
            )
    pipeline.close()
    dist.destroy_process_group()


STREAM = 64


def infer(rank: int, meet: str, times: int, rows: int = 256, width: int = 256) -> None:
    """Run one of two ranks that stream micro-batches. Rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    batches = torch.randn(STREAM * rows, width).split(rows)
    for name, kind in (("blocks", Block), ("blocks that sleep", Sleeper)):
        stream(rank, name, lambda kind=kind: blocks(kind, width, BLOCKS), batches, times)  # type: ignore[misc]
    stream(rank, "ViT-Base", vit_base, torch.randn(STREAM, 3, 224, 224).split(1), times)
    dist.destroy_process_group()


def vit_base() -> nn.Sequential:
    """Return PipeEdge's ViT-Base at its published size: 86 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[node.make() for node in vit().network.nodes.values()])


def stream(
    rank: int, name: str, make: Callable[[], nn.Sequential], batches: Sequence[torch.Tensor], times: int
) -> None:
    """Stream micro-batches through a model that is cut in the middle, and report latency and throughput."""
    whole = make().eval()
    workload = Workload(make(), batches[0], batches[0], nn.functional.mse_loss)
    half, schedule = len(workload.layers) // 2, hpgo.schedule("forward_only", ranks=2, micro_batches=STREAM)
    program = hpgo.program(
        schedule, [(workload.layers[:half], [0]), (workload.layers[half:], [1])],
        pipeline_micro_batch_size=len(batches[0]), global_batch_size=len(batches[0]) * STREAM,
    )  # fmt: skip
    pipeline = InferencePipeline(program, workload)

    def one() -> list[torch.Tensor]:
        with torch.no_grad():
            return [whole(batch) for batch in batches]

    runs: dict[str, Callable[[], list[torch.Tensor]]] = {
        "ours": lambda: list(pipeline.infer(batches)), "alone": one, "beside": one,
    }  # fmt: skip
    times_s: dict[str, list[float]] = {who: [] for who in runs}
    made: dict[str, list[torch.Tensor]] = {}
    for _ in range(1 + times):
        for who, work in runs.items():
            dist.barrier()
            begin_s = time.perf_counter()
            if who != "alone" or rank == 0:
                made[who] = work()
            dist.barrier()
            times_s[who].append(time.perf_counter() - begin_s)
    flow = pipeline.flow()
    if rank == 1 and not all(torch.equal(*pair) for pair in zip(made["ours"], made["beside"], strict=True)):
        sys.exit("outputs differ from the outputs of the whole model")
    if rank == 0:
        report(f"{STREAM} micro-batches through {name}", {who: those[1:] for who, those in times_s.items()}, STREAM)
        shares = "  ".join(f"p{share} {flow.latency_s(share) * 1e3:.1f} ms" for share in (50, 95, 99))
        print(f"latency {shares}  {flow.samples_per_s:.0f} samples/s  at most {flow.max_in_flight} in flight")
    pipeline.close()


MODES: dict[str, tuple[Callable[..., None], int]] = {
    "pairs": (pair, 4), "saving": (save, RANKS), "inference": (infer, 2),
}  # fmt: skip

if __name__ == "__main__":
    words = sys.argv[1:]
    work, count = MODES[words.pop(0)] if words and words[0] in MODES else (run, 4)
    fork = multiprocessing.get_context("fork")  # torch is loaded once; nothing has run yet
    asked = [int(word) for word in words]
    if work in (run, pair):
        work, asked = partial(work, Turns(fork)), asked or [20]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=work, args=(rank, str(Path(folder) / "meet"), *(asked or [5]))) for rank in range(count)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))
