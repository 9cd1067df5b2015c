"""A model that loses rank `RANK_LOST` in phase `PHASE`, in the way that `FAULT` says.

That happens when the rank is there for the `WHEN`-th time, and `DELAY` seconds later if it is a signal that ends it.
The file `moment` then says when it was.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpgo.runtime import Workload

WIDTH = 4
LAYERS = [str(at) for at in range(6)]
PHASES = ("start", "forward", "all-reduce", "save")
_been: Counter[str] = Counter()


def boom() -> None:
    raise ValueError("boom")


WAYS: dict[str, Any] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": boom,
    "sys.exit(0)": lambda: sys.exit(0),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "endless": lambda: time.sleep(1000),
}


def come(phase: str) -> None:
    """The rank comes to a phase."""
    asked = os.environ
    if asked.get("PHASE") != phase or asked.get("RANK") != asked.get("RANK_LOST"):
        return
    _been[phase] += 1
    if _been[phase] == int(asked.get("WHEN", "1")):
        threading.Timer(float(asked["DELAY"]), lose).start() if "DELAY" in asked else lose()


def lose() -> None:
    Path("moment").write_text(str(time.monotonic()))
    WAYS[os.environ["FAULT"]]()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        if not given.is_meta:
            come("forward")
            time.sleep(float(os.environ.get("PACE", "0")))
        return self.linear(given).tanh()


def build() -> Workload:
    come("start")
    all_reduce, to_disk = torch.distributed.all_reduce, os.fsync

    def reduces(*given: Any, **options: Any) -> Any:
        come("all-reduce")
        return all_reduce(*given, **options)

    def syncs(descriptor: int) -> None:
        come("save")
        to_disk(descriptor)

    torch.distributed.all_reduce, os.fsync = reduces, syncs
    rows = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    return Workload([Layer() for _ in LAYERS], *rows, nn.functional.mse_loss)
