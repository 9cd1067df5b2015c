"""Two ranks that pass tensors on: `neighbour_ranks.py CASE FOLDER`; each leaves what it found in FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from hpgo.runtime import shared_memory
from hpgo.runtime.shared_memory import Neighbours

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
_SHAPES = ((), (0,), (1,), (3, 5), (1000, 77))


def tensors() -> list[torch.Tensor]:
    """The same on both ranks, twice: the second time where the first ones lay."""
    made = torch.Generator().manual_seed(0)
    return [
        (100 * torch.rand(shape, generator=made)).to(dtype) for _ in range(2) for dtype in _DTYPES for shape in _SHAPES
    ]


def kinds(ways: Neighbours, peer: int) -> dict[str, Any]:
    """Each of them goes over and back, while its gradient is asked for or not."""
    equal = 0
    for at, tensor in enumerate(tensors()):
        given = tensor.clone().requires_grad_(at % 2 == 0 and tensor.is_floating_point())
        into = torch.empty_like(tensor)
        coming = ways.recv([into], peer, 0)
        ways.send([given], peer, 0).wait()
        coming.wait()
        equal += torch.equal(into, tensor)
    return {"equal": equal, "near": list(ways._of)}


def memory(ways: Neighbours, peer: int) -> dict[str, Any]:
    """A thousand messages each way, in turn."""
    sent, into = torch.zeros(2**14), torch.zeros(2**14)
    for _ in range(1000):
        coming = ways.recv([into], peer, 0)
        if peer == 0:
            coming.wait()
        ways.send([sent], peer, 0)
        coming.wait()
    return {"bytes": os.fstat(ways._of[peer]._out.file).st_size}


def many(ways: Neighbours, peer: int) -> dict[str, Any]:
    """Rank 0 sends all before rank 1 takes any."""
    numbers = torch.arange(20_000)
    if peer == 1:
        for number in numbers:
            ways.send([number], peer, 0)
        dist.barrier()
        return {"filled": ways._of[peer]._backlog is not None}
    dist.barrier()
    into = torch.full_like(numbers, -1)
    waits = [ways.recv([one], peer, 0) for one in into]
    waits[-1].wait()
    return {"taken": into.tolist()}


def order(ways: Neighbours, peer: int) -> dict[str, Any]:
    """Rank 1 waits for the last one first."""
    if peer == 1:
        for number in range(3):
            ways.send([torch.tensor(float(number))], peer, 0)
        return {}
    into = [torch.zeros(()) for _ in range(3)]
    waits = [ways.recv([one], peer, 0) for one in into]
    waited = [2, 0, 1]
    for at in waited:
        waits[at].wait()
    return {"waited": waited, "got": [one.item() for one in into]}


def places(ways: Neighbours, peer: int) -> dict[str, Any]:
    """Rank 1 makes room late, and does not take what comes until rank 0 has gone on."""
    tensor, clock = torch.zeros(4), torch.zeros((), dtype=torch.int64)
    if peer == 1:
        before = time.monotonic_ns()
        ways.send([tensor], peer, 0).wait()
        after = time.monotonic_ns()
        dist.barrier()
        coming = ways.recv([clock], peer, 0)
        coming.wait()
        return {"before": before, "posted": clock.item(), "after": after}
    time.sleep(0.3)
    clock.fill_(time.monotonic_ns())
    coming = ways.recv([tensor], peer, 0)
    dist.barrier()
    coming.wait()
    ways.send([clock], peer, 0).wait()
    return {}


def gone(ways: Neighbours, peer: int) -> dict[str, Any]:
    """Rank 1 leaves without a word."""
    if peer == 0:
        ways.close()
        return {}
    found = {}
    try:
        ways.recv([torch.zeros(1)], peer, 0).wait()
    except dist.DistError as failure:
        found["receiving"] = str(failure)
    try:
        ways.send([torch.zeros(1)], peer, 0)
    except dist.DistError as failure:
        found["sending"] = str(failure)
    return found


CASES = {"kinds": kinds, "memory": memory, "many": many, "order": order, "places": places, "gone": gone, "apart": kinds}


def run(rank: int, case: str, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if case == "apart":
        shared_memory._where = lambda: ""  # as on a system without such memory
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ways = Neighbours(dist.group.WORLD, 60.0)
    found = CASES[case](ways, 1 - rank)
    dist.barrier()
    ways.close()
    (folder / f"{rank}.json").write_text(json.dumps({"rank": rank, **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(2, run, sys.argv[1], Path(sys.argv[2]))
