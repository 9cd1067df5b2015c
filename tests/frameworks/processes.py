"""Several processes that talk over gloo, and one process that takes itself for one of many."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def together(count: int, run: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `run(*arguments)` returns in each of `count` processes of a group, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that what the caller imported need not be imported again.
        torch.multiprocessing.start_processes(_one, (count, folder, run, arguments), nprocs=count, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _one(rank: int, count: int, folder: str, run: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    try:
        torch.save(run(*arguments), Path(folder) / f"{rank}.pt")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def pretended(rank: int, count: int) -> Iterator[None]:
    """This process as one of `count`, on the fake backend, which moves no data."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    hook = sys.excepthook  # a process group puts its rank in front of each line, once for every group that there was
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = hook


def apart(rank: int, count: int, run: Callable[..., None], *arguments: object) -> None:
    """`run(*arguments)` in a process of its own that takes itself for one of `count`."""
    torch.multiprocessing.start_processes(_pretend, (rank, count, run, arguments), nprocs=1, start_method="fork")


def _pretend(_: int, rank: int, count: int, run: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    with pretended(rank, count):
        run(*arguments)


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that a framework asks for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def difference(found: dict[Any, torch.Tensor], wanted: dict[Any, torch.Tensor]) -> float:
    """The largest difference of two sets of gradients, as a share of the largest gradient."""
    assert found.keys() == wanted.keys(), f"{sorted(map(str, found.keys() ^ wanted.keys()))} are in one set only"
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert largest > 0
    return max(float((found[name] - gradient).abs().max()) for name, gradient in wanted.items()) / largest
