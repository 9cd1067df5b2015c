"""Agents of torchrun on this machine, each of which stands for a machine with one device, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch.distributed import TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = "127.0.0.1"
SOON = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 8}
"""Seconds after which agents of torchrun go on without those that are silent."""
_MARK = "HPGO_TEST_RUN"
RUN = ("plan.json", "--workload", "elastic_models:build", "--data", "elastic_models:data", "--dtype", "float64",
       "--optimizer", "adamw:lr=0.01", "--clip-norm", "0.5")  # fmt: skip


class Nodes:
    """Those of one run; whatever is left of them at the end is killed, and `left` says what it was."""

    def __init__(
        self,
        folder: Path,
        nodes: str,
        *words: str,
        restarts: int = 100,
        waits: dict[str, int] | None = None,
        shared_store: bool = False,
    ) -> None:
        """`nodes` is how many there must be and may be, as torchrun takes it; `words` stand behind `hpgo run`.

        `shared_store` lets ranks that are started again find the store of those before them, as torchrun does unasked.
        """
        self.folder = folder
        self._mark = f"{os.getpid()} {id(self)}"
        self._runs = 0
        # Where the agents meet outlives all of them here; elsewhere it is a machine that must stay.
        self._store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        conf = ",".join(
            f"{name}={value}" for name, value in {"is_host": 0, **(SOON if waits is None else waits)}.items()
        )
        self._command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1",
            "--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HERE}:{self._store.port}",
            "--rdzv-conf", conf, "--local-addr", HERE, "-m", "hpgo", "run", *words,
        ]  # fmt: skip
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        (folder / "tmp").mkdir()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if shared_store else "1",
            "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
            "TMPDIR": str(folder / "tmp"),
            _MARK: self._mark,
        }
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.left: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = self.processes()
        for process in self.left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()

    def start(self, *numbers: int) -> None:
        """Starts machines, or lets them return."""
        command = [*self._command[:3], "--rdzv-id", f"run-{self._runs}", *self._command[3:]]
        for number in numbers:
            with (self.folder / f"node-{number}").open("ab") as said:
                self.agents[number] = subprocess.Popen(
                    command, cwd=self.folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                    start_new_session=True,
                )  # fmt: skip

    def anew(self) -> None:
        """Ends all agents; those that are started from now on meet by themselves, as those of a job begun anew do."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.terminate()
        self.codes()
        self._runs += 1

    def ranks(self, number: int) -> list[int]:
        """The processes that the agent of a machine has started."""
        agent = self.agents[number].pid
        try:
            return [int(one) for one in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        except OSError:
            return []

    def signal(self, number: int, sent: signal.Signals, *, agent: bool = True) -> None:
        """Sends a signal to all of a machine, or to its rank alone."""
        ranks = self.ranks(number)
        if agent:
            self.agents[number].send_signal(sent)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, sent)

    def lose(self, number: int) -> None:
        """All of a machine is gone at once."""
        self.signal(number, signal.SIGKILL)
        self.agents[number].wait()

    def processes(self) -> list[int]:
        """All processes of the run that are there."""
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{_MARK}={self._mark}\0".encode() in (one / "environ").read_bytes():
                    found.append(int(one.name))
        return found

    def steps(self) -> list[dict[str, Any]]:
        """What ranks have written of their steps, in order."""
        path = self.folder / "losses.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, condition: Callable[[list[dict[str, Any]]], bool], patience_s: float = 240) -> None:
        """Until the steps fulfil it. Raises AssertionError if they don't in time, with all that was said."""
        until_s = time.monotonic() + patience_s
        while not condition(self.steps()):
            assert time.monotonic() < until_s, self.said()
            assert any(agent.poll() is None for agent in self.agents.values()), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        """All that was printed, machine by machine."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("node-*")))

    def codes(self, patience_s: float = 240) -> dict[int, int]:
        """Waits for the end of all agents; their exit codes."""
        until_s = time.monotonic() + patience_s
        return {number: agent.wait(max(0.1, until_s - time.monotonic())) for number, agent in self.agents.items()}


def undisturbed(folder: Path, steps: int, *words: str) -> list[float]:
    """The losses of a run of so many steps that nothing happens to, on as many ranks as the plan has."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hpgo", "run", *RUN, "--steps", str(steps), *words, "--json"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads(done.stdout)["losses"]
    return losses
