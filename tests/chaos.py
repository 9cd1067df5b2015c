"""Machines of a run that are killed, stopped and started again at random for half an hour: `make chaos`.

Eight agents of torchrun, each with one process, stand for machines, of which four at least are always there. Afterwards
every loss that was written must be that of a run that nothing happened to, to ten digits; of processes, nothing may be
left, and of checkpoints only whole ones, from which one more run must go on. Prints a table; `--write FILE` puts it
between the marks in that file. Exits with 1 where something of that is not so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import elastic_models
from elastic_runs import RUN, Nodes, undisturbed

from hpgo.base.messages import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable

NODES, MIN_NODES = 8, 4
PACE_S = 0.02
WAITS = {"last_call_timeout": 4, "keep_alive_interval": 1, "keep_alive_max_attempt": 8}
LIMITS = ("--timeout", "60", "--heartbeat-timeout", "5")
PAUSE_S, AWAY_S = (5.0, 40.0), (5.0, 40.0)
"""Shortest and longest: between two faults, and until a machine returns."""
PATIENCE_S = 300.0
RUNNING_S = 1.0
"""A step that runs as something is lost may still end; none does so much later."""


@dataclass
class Chaos:
    """What is done to the machines, and when."""

    cluster: Nodes
    chance: random.Random
    faults: list[tuple[str, float]] = field(default_factory=list)
    """What was done, and when."""
    returns: int = 0
    anew: int = 0
    """How often torchrun gave up, so that all agents were started again."""
    back: dict[int, tuple[float, Callable[[], None]]] = field(default_factory=dict)
    """For machines that are away, when and how they return."""

    def do(self) -> None:
        """One thing to one machine that is there."""
        there = [one for one in range(NODES) if one not in self.back]
        one = self.chance.choice(there)
        kinds = ["rank killed", "rank stopped"]
        if len(there) > MIN_NODES:
            kinds += ["node killed", "node stopped"] * 2
        kind = self.chance.choice(kinds)
        self.faults.append((kind, time.time()))
        if kind == "rank killed":
            self.cluster.signal(one, signal.SIGKILL, agent=False)
        elif kind == "rank stopped":  # the others end it
            self.cluster.signal(one, signal.SIGSTOP, agent=False)
        elif kind == "node killed":
            self.cluster.lose(one)
            self._returns(one, lambda: self.cluster.start(one))
        else:
            self.cluster.signal(one, signal.SIGSTOP)
            self._returns(one, lambda: self.cluster.signal(one, signal.SIGCONT))

    def _returns(self, one: int, how: Callable[[], None]) -> None:
        self.back[one] = time.monotonic() + self.chance.uniform(*AWAY_S), how

    def let_return(self, *, all_of_them: bool = False) -> None:
        """Brings back those whose time has come, or all."""
        for one, (at_s, how) in list(self.back.items()):
            if all_of_them or time.monotonic() >= at_s:
                del self.back[one]
                how()
                self.returns += 1

    def keep_up(self) -> None:
        """Does what a queue would if an agent has given up: starts the job anew, on all machines."""
        if any(self.cluster.agents[one].poll() is not None for one in range(NODES) if one not in self.back):
            self.let_return(all_of_them=True)
            self.cluster.anew()
            self.cluster.start(*range(NODES))
            self.anew += 1


def disturb(cluster: Nodes, minutes: float, seed: int) -> Chaos:
    """So many minutes of it, after which all machines are back."""
    chaos = Chaos(cluster, random.Random(seed))
    cluster.start(*range(NODES))
    cluster.wait_for(lambda steps: len(steps) > 3)
    until_s = time.monotonic() + 60 * minutes
    while time.monotonic() < until_s:
        next_s = time.monotonic() + chaos.chance.uniform(*PAUSE_S)
        while time.monotonic() < next_s:
            chaos.let_return()
            chaos.keep_up()
            time.sleep(0.05)
        chaos.do()
    chaos.let_return(all_of_them=True)
    seen, until_s = len(cluster.steps()), time.monotonic() + PATIENCE_S
    while [one["ranks"] for one in cluster.steps()[seen:][-3:]] != [NODES] * 3:
        if time.monotonic() > until_s:
            raise SystemExit(f"not all machines have come back:\n{cluster.said()}")
        chaos.keep_up()
        time.sleep(0.05)
    cluster.anew()
    return chaos


def wrong(cluster: Nodes, folder: Path) -> list[str]:
    """What is not as if nothing had happened."""
    (folder / "pace").unlink()
    found = [f"process {one} was left" for one in cluster.left]
    found += [f"{path.name} was left" for path in (folder / "saved").iterdir() if not path.name.startswith("step-")]
    steps = cluster.steps()
    last = max(one["step"] for one in steps)
    whole = undisturbed(folder, last + 3)
    after = undisturbed(folder, last + 3, "--checkpoint", "saved", "--resume")
    written = [(one["step"], one["loss"]) for one in steps]
    written += zip(range(last + 3, 0, -1), reversed(after), strict=False)
    for step, loss in written:
        if abs(loss - whole[step - 1]) > 1e-10 * abs(whole[step - 1]):
            found.append(f"the loss of step {step} is {loss}, and was {whole[step - 1]} where nothing happened")
    return found


def table(chaos: Chaos, steps: list[dict[str, float]]) -> list[str]:
    """How often what was done, and how long the run then stood still."""
    rows = ["| | times | to the next step: median | worst |", "|---|---:|---:|---:|"]
    ends_s = [one["ended_s"] for one in steps]
    for kind in ("node killed", "node stopped", "rank killed", "rank stopped"):
        still_s = [
            next(end_s for end_s in ends_s if end_s > at_s + RUNNING_S) - at_s
            for what, at_s in chaos.faults
            if what == kind
        ]
        if still_s:
            rows.append(f"| {kind} | {len(still_s)} | {statistics.median(still_s):.1f} s | {max(still_s):.1f} s |")
    return rows


def main() -> int:
    """Disturbs, compares, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a page with `<!-- chaos -->` around its table")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        elastic_models.plan(NODES).save(folder / "plan.json")
        (folder / "pace").write_text(str(PACE_S))
        words = (*RUN, "--elastic", "--checkpoint", "saved", "--every", "5", "--losses", "losses.jsonl", *LIMITS)
        nodes = f"{MIN_NODES}:{NODES}"
        with Nodes(folder, nodes, *words, "--steps", "1000000", restarts=100000, waits=WAITS) as cluster:
            chaos = disturb(cluster, asked.minutes, asked.seed)
        strange = wrong(cluster, folder)
        steps = cluster.steps()
    rows = table(chaos, steps)
    done, last = len(steps), max(one["step"] for one in steps)
    starts = sum(1 for before, after in itertools.pairwise(steps) if after["ranks"] != before["ranks"])
    rows.append(
        f"\n{asked.minutes:g} minutes with seed {asked.seed}: {len(chaos.faults)} faults and {chaos.returns} returns in"
        f" {last} steps, of which {done - last} were done twice; the number of ranks changed {starts} times."
        f" torchrun gave up, and was started again, {pluralize(chaos.anew, 'time')}."
        f" {os.cpu_count()} cores, with a load of {load:.1f} when it began."
    )
    sys.stdout.write("\n".join(rows) + "\n")
    sys.stderr.write("".join(f"{one}\n" for one in strange))
    if asked.write is not None and not strange:
        before, mark, rest = asked.write.read_text(encoding="utf-8").partition("<!-- chaos -->\n")
        _, end, after = rest.partition("<!-- chaos end -->")
        asked.write.write_text(before + mark + "\n".join(rows) + "\n" + end + after, encoding="utf-8")
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
