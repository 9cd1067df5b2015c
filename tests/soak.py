"""Lets eight clients ask `hpgo serve` for a great deal, and tells how it fared.

    python tests/soak.py [REQUESTS [SEED]]

Of the requests, 95 % are small (up to 2,000 actions), 4 % large (100,000 to 200,000), and 1 % as large as the page
takes, whose client leaves after 0.3 s. Prints one JSON object: statuses, seconds that answers took, seconds until the
work of a client that left had ended, memory of the server and its processes. Linux only, since it reads /proc.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLIENTS = 8
_PATIENCE_S = 120.0
_LEAVES_AFTER_S = 0.3
_SMALL_ONES = ("/picture.svg", "/picture.html", "/export.txt", "/export.json", "/export.tex", "/export.svg")
_LARGE_ONES = ("/", "/picture.svg", "/picture.html", "/export.txt")
_AT_THE_LIMIT = (
    "/?num_stages=1000&num_batches=1000",
    "/picture.svg?num_stages=10000&num_batches=100",
    "/export.html?num_stages=500&num_batches=2000&memory=1&activation_bytes=1GB",
    "/export.json?num_stages=100&num_batches=10000",
)


class Served:
    """A running `hpgo serve`, and what /proc knows about it."""

    def __init__(self, *options: str, python: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *python, "-m", "hpgo", "serve", "--port", "0", "--no-open", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        address = re.search(r"http://\S+/", first)
        assert address, first
        self.host = urlsplit(address[0]).netloc
        self.said: list[str] = []
        """Lines that it printed since."""
        self._listener = threading.Thread(target=self.said.extend, args=(self.process.stderr,), daemon=True)
        self._listener.start()

    def ask(self, path: str, patience_s: float = _PATIENCE_S) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = HTTPConnection(self.host, timeout=patience_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def abandon(self, path: str, after_s: float = _LEAVES_AFTER_S) -> None:
        """Asks for `path`, and leaves without an answer."""
        connection = HTTPConnection(self.host, timeout=_PATIENCE_S)
        connection.request("GET", path)
        time.sleep(after_s)
        connection.close()

    def children(self) -> list[int]:
        """The processes that work for it."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in _read(task).split()]

    def memory_bytes(self) -> int:
        """Memory of the server and its processes."""
        pages = [_read(Path(f"/proc/{pid}/statm")).split() for pid in (self.process.pid, *self.children())]
        return sum(int(each[1]) for each in pages if each) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Processor time of the server and its processes."""
        fields = [_stat(pid) for pid in (self.process.pid, *self.children())]
        return sum(int(each[11]) + int(each[12]) for each in fields if each) / os.sysconf("SC_CLK_TCK")

    def works_on_large_requests(self) -> bool:
        """Whether a process for large requests, told by the niceness it is given, does more than wait."""
        large = [pid for pid in self.children() if not _read(Path(f"/proc/{pid}/cmdline")).endswith("\x000\0")]
        return any(each[0] not in "SZ" for each in map(_stat, large) if each)

    def stop(self, by: signal.Signals = signal.SIGINT) -> int:
        """Ends it by one signal, and returns its exit code."""
        self.process.send_signal(by)
        try:
            code = self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert self.process.stderr is not None
        self._listener.join(timeout=30)
        self.process.stderr.close()
        return code


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended
        return ""


def _stat(pid: int) -> list[str]:
    """What the system counts of a process, its state (`R`, `S`, …) first; empty if there is none."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


class Turns:
    """Large requests at any time, but for the moments in which one that is abandoned is watched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._large = 0
        self._watched = False

    @contextmanager
    def large(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._watched)
            self._large += 1
        try:
            yield
        finally:
            with self._changed:
                self._large -= 1
                self._changed.notify_all()

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._watched)
            self._watched = True
            self._changed.wait_for(lambda: not self._large)
        try:
            yield
        finally:
            with self._changed:
                self._watched = False
                self._changed.notify_all()


def soak(served: Served, requests: int, seed: int) -> dict[str, Any]:
    """Sends `requests` requests from eight clients at once, and says what was seen."""
    for path in ("/", *(f"{path}?num_stages=100&num_batches=1000" for path in _LARGE_ONES)):
        served.ask(path)
    turns, lock = Turns(), threading.Lock()
    statuses: Counter[str] = Counter()
    page_s: list[float] = []
    large_s: list[float] = []
    ended_s: list[float] = []
    peak_bytes = first_bytes = _settled_bytes(served)
    left = iter(range(requests))
    over = threading.Event()

    def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        while True:
            with lock:
                if next(left, None) is None:
                    return
            kind = chance.choices(("small", "large", "abandoned"), (95, 4, 1))[0]
            if kind == "abandoned":
                with turns.watched():
                    served.abandon(chance.choice(_AT_THE_LIMIT))
                    ended_s.append(_until_idle_s(served))
                with lock:
                    statuses[kind] += 1
                continue
            path = _small(chance) if kind == "small" else _large(chance)
            began_s = time.perf_counter()
            if kind == "large":
                with turns.large():
                    status, _ = served.ask(path)
            else:
                status, _ = served.ask(path)
            took_s = time.perf_counter() - began_s
            with lock:
                statuses[f"{kind} {status}"] += 1
                if kind == "large":
                    large_s.append(took_s)
                elif path.startswith("/?") or path == "/":
                    page_s.append(took_s)

    def watch() -> None:
        nonlocal peak_bytes
        while not over.wait(0.25):
            peak_bytes = max(peak_bytes, served.memory_bytes())

    began_s = time.perf_counter()
    clients = [threading.Thread(target=client, args=(number,)) for number in range(_CLIENTS)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    took_s = time.perf_counter() - began_s
    over.set()
    watcher.join()
    return {
        "requests": requests,
        "seconds": round(took_s, 1),
        "statuses": dict(sorted(statuses.items())),
        "page_s": _shares(page_s),
        "large_s": _shares(large_s),
        "ended_s": _shares(ended_s),
        "memory_mb": {
            "first": first_bytes // 10**6,
            "last": _settled_bytes(served) // 10**6,
            "peak": peak_bytes // 10**6,
        },
    }


def _small(chance: random.Random) -> str:
    if chance.random() < 0.2:
        return "/"
    path = "/" if chance.random() < 0.4 else chance.choice(_SMALL_ONES)
    asked = {
        "schedule": chance.choice(("1f1b", "gpipe", "zb_h1", "eager_1f1b", "zb_v")),
        "num_stages": 2 * chance.randint(1, 8),
        "num_batches": 16 * chance.randint(1, 4),
        "p2p_time": round(chance.random(), 3),
    }
    return f"{path}?{urlencode(asked)}"


def _large(chance: random.Random) -> str:
    asked = {
        "schedule": chance.choice(("1f1b", "gpipe", "zb_h1")),
        "num_stages": 10 * chance.randint(5, 10),
        "num_batches": 1000,
        "p2p_time": round(chance.random(), 3),
    }
    return f"{chance.choice(_LARGE_ONES)}?{urlencode(asked)}"


def _until_idle_s(served: Served) -> float:
    """Seconds until nobody works on large requests any more, which must be none's but the one that was left."""
    began_s = time.perf_counter()
    idle_since_s = None
    while idle_since_s is None or time.perf_counter() - idle_since_s < 0.1:
        if served.works_on_large_requests():
            idle_since_s = None
        elif idle_since_s is None:
            idle_since_s = time.perf_counter()
        time.sleep(0.01)
    return idle_since_s - began_s


def _settled_bytes(served: Served) -> int:
    """Memory once nothing is being worked on."""
    _until_idle_s(served)
    time.sleep(1)
    return served.memory_bytes()


def _shares(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(seconds) or [0.0]
    at = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) for name, share in at.items()}


def main() -> None:
    """Soaks a server of its own."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    served = Served()
    try:
        seen = soak(served, requests, seed)
    finally:
        children = served.children()
        code = served.stop()
    seen |= {"exit_code": code, "children_left": [pid for pid in children if Path(f"/proc/{pid}").exists()]}
    json.dump(seen, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
