"""Simulated annealing over `hpgo.evaluate`, which finds plans to compare with the planner's without using its code.

A plan has cuts through one order of the layers, a list of devices for each stage, a micro-batch size, and a flag for
recomputation. Annealing starts from balanced pipelines of several depths, on adjacent devices or with devices dealt out
over machines. A move changes a cut, a device, the number of stages, or the micro-batch size. Plans that lack memory get
a longer step instead of an infinite one, so that annealing can pass through them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise, product
from random import Random
from typing import TYPE_CHECKING

import hpgo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from questions import Question

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WARM, COLD = 0.03, 0.0005
"""First and last temperature: relative increase of the step that is accepted with probability 1/e."""


@dataclass(frozen=True, slots=True)
class State:
    """A plan in the form that annealing changes."""

    ends: tuple[int, ...]
    """End of each stage in the order of layers."""
    devices: tuple[tuple[int, ...], ...]
    pipeline_micro_batch_size: int
    recompute: bool


class Annealing:
    """Annealing of one question. Evaluates states and keeps the best one that fits."""

    def __init__(self, question: Question, seed: int = 0) -> None:
        self.question, self.dice = question, Random(seed)  # noqa: S311
        profile, cluster = question.profile, question.cluster
        before: dict[str, list[str]] = {layer.id: [] for layer in profile.layers}
        for start, end in profile.edges:
            before[end].append(start)
        self.order = list(TopologicalSorter(before).static_order())
        by_id = {layer.id: layer for layer in profile.layers}
        times = [by_id[layer].forward_s[0] + by_id[layer].backward_s[0] for layer in self.order]
        self.spent_s = list(accumulate(times))
        batch = question.options["global_batch_size"]
        # More than 1024 micro-batches take long to evaluate, and are rarely better.
        self.sizes = [
            size for size in range(profile.batch_sizes[0], batch + 1) if batch % size == 0 and batch // size <= 1024
        ]
        kinds = [node.device for node in cluster.nodes for _ in range(node.count)]
        self.memory_bytes = [device.memory_bytes for device in kinds]
        self.speed = [device.speed for device in kinds]
        self.nodes: list[list[int]] = []
        for node in cluster.nodes:
            first = sum(map(len, self.nodes))
            self.nodes.append(list(range(first, first + node.count)))
        self.best: hpgo.Plan | None = None
        self.evaluated = 0

    def penalized_step_s(self, state: State) -> float:
        """Return the step, increased by three times the lacking share of memory; infinite for an invalid plan."""
        self.evaluated += 1
        stages = [
            (self.order[start:end], devices)
            for (start, end), devices in zip(pairwise((0, *state.ends)), state.devices, strict=True)
        ]
        options = dict(self.question.options) | {
            "pipeline_micro_batch_size": state.pipeline_micro_batch_size,
            "recompute": state.recompute,
        }
        try:
            plan = hpgo.evaluate(self.question.profile, self.question.cluster, stages, **options)
        except hpgo.errors.ArgumentError:  # A replica would get less than the smallest profiled batch.
            return math.inf
        lacking = sum(
            max(0.0, -stage.free_bytes) / min(self.memory_bytes[device] for device in stage.devices)
            for stage in plan.stages
        )
        if plan.fits and (self.best is None or plan.step_s < self.best.step_s):
            self.best = plan
        return plan.step_s * (1 + 3 * lacking)

    def starts(self) -> Iterator[State]:
        """Yield balanced pipelines of all depths, orders of devices and micro-batch sizes."""
        given = tuple(device for node in self.nodes for device in node)
        turns = range(max(map(len, self.nodes)))
        dealt = tuple(node[turn] for turn in turns for node in self.nodes if turn < len(node))
        fast = tuple(sorted(given, key=lambda device: -self.speed[device]))
        # Adjacent devices keep a stage on fast links, dealt ones spread it, and the third order has fast ones first.
        recomputes = (False, True) if self.question.options.get("recompute") else (False,)
        for line in dict.fromkeys((given, dealt, fast)):
            for depth in DEPTHS:
                if depth > min(len(line), len(self.order)):
                    continue
                places = [len(line) * stage // depth for stage in range(depth + 1)]
                devices = tuple(line[start:end] for start, end in pairwise(places))
                shares = list(accumulate(sum(self.speed[device] for device in stage) for stage in devices))
                ends = [bisect_left(self.spent_s, self.spent_s[-1] * share / shares[-1]) + 1 for share in shares[:-1]]
                for stage in range(depth - 1):  # every stage keeps a layer
                    minimum = ends[stage - 1] + 1 if stage else 1
                    ends[stage] = min(max(ends[stage], minimum), len(self.order) - (depth - 1 - stage))
                for size, recompute in product(self.sizes, recomputes):
                    yield State((*ends, len(self.order)), devices, size, recompute)

    def moved(self, state: State) -> State | None:
        """Return a random neighbor of `state`, or None if the move drawn is not possible."""
        # Cuts and devices are the fine steps. The other moves change the whole plan, so they are drawn less often.
        seldom: tuple[Callable[[State], State | None], ...] = (self.split, self.merge, self.size)
        return self.dice.choice((*(self.cut,) * 4, *(self.device,) * 3, *(self.swap,) * 2, *seldom))(state)

    def cut(self, state: State) -> State | None:
        """Move a cut by a few layers."""
        if len(state.ends) == 1:
            return None
        at = self.dice.randrange(len(state.ends) - 1)
        low, high = (0, *state.ends)[at] + 1, state.ends[at + 1] - 1
        by = self.dice.choice((-1, 1)) * math.ceil(self.dice.expovariate(0.5))
        end = min(max(state.ends[at] + by, low), high)
        return replace(state, ends=(*state.ends[:at], end, *state.ends[at + 1 :]))

    def device(self, state: State) -> State | None:
        """Move up to one machine's number of devices between two stages, or between a stage and the idle devices."""
        used = {device for stage in state.devices for device in stage}
        groups = [list(stage) for stage in state.devices]
        groups.append([device for node in self.nodes for device in node if device not in used])
        giver, taker = self.dice.sample(range(len(groups)), 2)
        many = self.dice.choice((1, 1, 2, 4, len(self.nodes[0])))
        if len(groups[giver]) - many < (giver < len(state.devices)):
            return None
        at = self.dice.choice((0, len(groups[giver]) - many, self.dice.randrange(len(groups[giver]) - many + 1)))
        groups[taker] += groups[giver][at : at + many]
        del groups[giver][at : at + many]
        return replace(state, devices=tuple(tuple(group) for group in groups[:-1]))

    def swap(self, state: State) -> State | None:
        """Exchange one device, or all devices, of two stages."""
        if len(state.devices) == 1:
            return None
        groups = [list(stage) for stage in state.devices]
        one, other = self.dice.sample(range(len(groups)), 2)
        if self.dice.random() < 0.5:
            groups[one], groups[other] = groups[other], groups[one]
        else:
            here, there = self.dice.randrange(len(groups[one])), self.dice.randrange(len(groups[other]))
            groups[one][here], groups[other][there] = groups[other][there], groups[one][here]
        return replace(state, devices=tuple(map(tuple, groups)))

    def split(self, state: State) -> State | None:
        """Split a stage and its devices into two stages."""
        at = self.dice.randrange(len(state.ends))
        start, end, devices = (0, *state.ends)[at], state.ends[at], state.devices[at]
        if end - start < 2 or len(devices) < 2:
            return None
        middle, part = self.dice.randrange(start + 1, end), self.dice.randrange(1, len(devices))
        groups = (*state.devices[:at], devices[:part], devices[part:], *state.devices[at + 1 :])
        return replace(state, ends=(*state.ends[:at], middle, *state.ends[at:]), devices=groups)

    def merge(self, state: State) -> State | None:
        """Merge two adjacent stages into one."""
        if len(state.ends) == 1:
            return None
        at = self.dice.randrange(len(state.ends) - 1)
        devices = (*state.devices[:at], state.devices[at] + state.devices[at + 1], *state.devices[at + 2 :])
        return replace(state, ends=(*state.ends[:at], *state.ends[at + 1 :]), devices=devices)

    def size(self, state: State) -> State | None:
        """Take the next larger or smaller micro-batch size, or toggle recomputation if the question allows it."""
        if self.question.options.get("recompute") and self.dice.random() < 0.3:
            return replace(state, recompute=not state.recompute)
        at = self.sizes.index(state.pipeline_micro_batch_size) + self.dice.choice((-1, 1))
        return replace(state, pipeline_micro_batch_size=self.sizes[at]) if 0 <= at < len(self.sizes) else None

    def run(self, seconds: float) -> None:
        """Spend 25 % of the processor time on starts, in random order, and the rest on walks from the best three."""
        begun_s = time.process_time()
        starts = list(self.starts())
        self.dice.shuffle(starts)
        tried: list[tuple[float, State]] = []
        for state in starts:
            tried.append((self.penalized_step_s(state), state))
            if time.process_time() - begun_s > seconds / 4:
                break
        tried.sort(key=lambda pair: pair[0])
        left_s = (seconds - (time.process_time() - begun_s)) / 3
        for step_s, state in tried[:3]:
            self.walk(step_s, state, left_s)

    def walk(self, step_s: float, state: State, seconds: float) -> None:
        """Anneal from one state for `seconds` of processor time, at a temperature that falls from `WARM` to `COLD`."""
        begun_s = time.process_time()
        while (share := (time.process_time() - begun_s) / seconds) < 1 and math.isfinite(step_s):
            next_state = self.moved(state)
            if next_state is None:
                continue
            next_s = self.penalized_step_s(next_state)
            # A geometric schedule, relative to the step, suits steps of milliseconds and of minutes alike.
            heat = step_s * WARM * (COLD / WARM) ** share
            if next_s <= step_s or self.dice.random() < math.exp((step_s - next_s) / heat):
                step_s, state = next_s, next_state
