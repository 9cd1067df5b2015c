"""Compare search time, step and bound of the planner with another version of it.

    python research/before.py PYTHON 2x8     # or 8x8, 128x8, 2048x8: all built-in models on clusters of that size
    python research/before.py PYTHON 2048x8 --limit-s 60
    python research/before.py PYTHON 2x8 --schedule auto

PYTHON is the interpreter of an environment in which the other version is installed. Both answer on one thread in
processes that live on, in turns. What counts is the processor time of the shortest of three calls, or of one if that
takes ten seconds. With a limit an answer that takes longer is cut: where it is the other version's, the ratio is at
least as good as it looks. Bounds are those over compact placements where the other version searches no others; a plan
that is shorter than the other's bound lies outside of what that one searched, and its step counts in place of the
bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import hpgo
from hpgo.model.builtin import MODELS

SIZES = {
    "2x8": (("dapple-a", "dapple-b", "dapple-c", "a100", "h100"), (32, 64, 256)),
    "8x8": (("dapple-a:8", "a100:8", "h100:8", "8"), (32, 128)),
    "128x8": (("dapple-a:128", "a100:128", "h100:128", "128"), (1_024,)),
    "2048x8": (("dapple-a:2048", "h100:2048", "2048"), (16_384,)),
}
"""Clusters, by number of machines behind slow links, and global batch sizes in batches of the profile."""
CALLS, LONG_S = 3, 10


def answer() -> None:
    """Plan each problem on stdin with this version, and print processor time, step and bound."""
    for line in sys.stdin:
        model, name, batch, limit_s, schedule = json.loads(line)
        profile = hpgo.read_profile(model)
        if name.isdigit():
            cluster = hpgo.Cluster.of(
                nodes=int(name), devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="40 GB"
            )
        else:
            cluster = hpgo.Cluster.preset(name)
        begin_s = time.process_time()
        try:
            plan = hpgo.plan(profile, cluster, global_batch_size=batch, time_limit_s=limit_s, schedule=schedule)
        except hpgo.errors.HpgoError:  # none fits, or none was found within the limit
            found = None, None
        else:
            found = plan.step_s, getattr(plan, "node_aligned_bound_s", None) or plan.lower_bound_s
        print(json.dumps([time.process_time() - begin_s, *found]), flush=True)


class Version:
    """One that answers in a process of its own."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process = subprocess.Popen(  # noqa: S603 -- whoever calls this names it
            [python, __file__, "answer"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"RAYON_NUM_THREADS": "1"},
        )  # fmt: skip
        self.times_s: list[float] = []
        self.step_s: float | None = None
        self.bound_s: float | None = None

    def ask(self, question: list[Any]) -> None:
        """Plan the problem once more in the other interpreter."""
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            took_s, self.step_s, self.bound_s = json.loads(self._process.stdout.readline())  # type: ignore[union-attr]
        except (OSError, ValueError) as failure:  # it has ended, or says something else
            sys.exit(f"`{self._python}` does not answer {question} as a Python with hpgo does: {failure}")
        self.times_s.append(took_s)


def span(ratios: list[float]) -> str:
    """Return the smallest and the largest value as text.

    >>> span([0.5, 2.0]), span([])
    ('0.5000 to 2.0000', 'none')
    """
    return f"{min(ratios):.4f} to {max(ratios):.4f}" if ratios else "none"


def compare(other: str, size: str, limit_s: float | None, schedule: str) -> None:
    """Asks both, and prints a row for each question and the medians."""
    now, before = Version(sys.executable), Version(other)
    clusters, batches = SIZES[size]
    ratios, steps, bounds = [], [], []
    for cluster in clusters:
        for model in MODELS:
            for count in batches:
                batch = count * hpgo.read_profile(model).batch_sizes[0]
                now.times_s, before.times_s = [], []
                while len(now.times_s) < CALLS and sum(now.times_s + before.times_s) < LONG_S:
                    for one in (now, before):
                        one.ask([model, cluster, batch, limit_s, schedule])
                now_s, before_s = min(now.times_s), min(before.times_s)
                ratios.append(now_s / before_s)
                said = "no plan"
                if now.step_s and before.step_s:
                    steps.append(now.step_s / before.step_s)
                    said = f"step {now.step_s:.6g} s, {steps[-1]:.4f} of that before"
                    if now.bound_s and before.bound_s:
                        bounds.append(now.bound_s / min(before.bound_s, now.step_s))
                        said += f"; bound {now.bound_s:.6g} s, {bounds[-1]:.4f} of that before"
                print(
                    f"{model} on {cluster}, {batch}: {now_s:.3f} s, {ratios[-1]:.3f} of {before_s:.3f} s; {said}",
                    flush=True,
                )
    print(
        f"{len(ratios)} questions: {statistics.median(ratios):.3f} of the time ({span(ratios)});"
        f" {len(steps)} steps, {span(steps)} of those before, {sum(one > 1.0001 for one in steps)} longer;"
        f" {len(bounds)} bounds, {span(bounds)} of those before, {sum(one < 0.9999 for one in bounds)} lower"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["answer"]:
        with suppress(KeyboardInterrupt, BrokenPipeError):
            answer()
    else:
        asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        asked.add_argument("python")
        asked.add_argument("size", choices=SIZES)
        asked.add_argument("--limit-s", type=float)
        asked.add_argument("--schedule", default="eager_1f1b")
        given = asked.parse_args()
        try:
            compare(given.python, given.size, given.limit_s, given.schedule)
        except KeyboardInterrupt:
            sys.exit(130)
        except OSError as failure:
            sys.exit(f"`{given.python}` does not start: {failure}")
