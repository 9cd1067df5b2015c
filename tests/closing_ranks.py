"""Two ranks that run plans of measured profiles: `closing_ranks.py FOLDER` runs the cases of FOLDER/cases.json.

It leaves FOLDER/found.json: of each case the losses, the peak of each rank's memory, and the bytes that both ranks
received by TCP in a step behind the first, as their sockets count them. In a network of its own (`unshare -rn`), what
the loopback interface has counted stands beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

import hpgo
from hpgo.runtime import Pipeline

STEPS = 3
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_BYTES_RECEIVED = 128
"""Where Linux's `struct tcp_info` has them."""


def received() -> int:
    """By all TCP sockets of this process."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as one:
                if one.family in {socket.AF_INET, socket.AF_INET6}:
                    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", told, _BYTES_RECEIVED)[0]
        except OSError:  # closed meanwhile, or listens
            continue
    return total


def passed_by() -> int:
    """What the loopback interface has carried."""
    line = next(one for one in Path("/proc/self/net/dev").read_text().splitlines() if one.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


def bring_up() -> None:
    """The loopback interface of a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def run(rank: int, folder: Path) -> None:
    """One rank; without a launcher, nobody watches it by messages of their own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)  # once for all plans
    found = []
    for case in json.loads((folder / "cases.json").read_text()):
        plan = hpgo.Plan.read(folder / case["plan"])
        adam = lambda weights: torch.optim.AdamW(weights, lr=1e-4)  # noqa: E731
        with Pipeline(plan, case["workload"], optimizer=adam, shared_memory=False) as pipeline:  # sockets count
            losses = [pipeline.step(*pipeline.example())]
            peaks = pipeline.timeline().measures.peak_memory_bytes
            dist.barrier()
            counted = torch.tensor([received(), passed_by()], dtype=torch.float64)
            dist.barrier()
            losses += [pipeline.step(*pipeline.example()) for _ in range(STEPS)]
            dist.barrier()
            counted = torch.tensor([received(), passed_by()], dtype=torch.float64) - counted
            dist.all_reduce(counted)
            sockets, interface = (counted / STEPS).tolist()
        found.append({"losses": losses, "peaks": peaks, "sockets": sockets, "interface": interface / 2})
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[2:] == ["alone"]:
        bring_up()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run_ranks(2, run, Path(sys.argv[1]))
