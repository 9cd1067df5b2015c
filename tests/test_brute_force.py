"""Plans of small questions, held against every plan that there is, each priced by the twin."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations, pairwise, product
from random import Random
from typing import TYPE_CHECKING

import chance
import pytest
import twin
import twin_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def asked(seed: int) -> chance.Question:
    """Up to five layers on up to six devices."""
    random = Random(seed)
    counts = random.choice(
        [(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1), (2, 2, 2), (3, 3)]
    )
    return chance.question(random, counts, layers=random.randint(2, 3 if sum(counts) > 4 else 5))


def sharded(seed: int) -> chance.Question:
    """Layers of about equal weights, which fill the memory, with gradients or also weights shared by replicas."""
    random = Random(seed)
    asked = chance.question(random, random.choice([(2,), (3,), (4,), (2, 1), (2, 2)]), layers=random.randint(4, 6))
    mean = chance.between(random, 1e6, 1e8)
    layers = tuple(
        replace(
            layer,
            parameter_bytes=random.uniform(0.9, 1.1) * mean,
            frozen_bytes=random.choice([0, 0, 0, 0.5]) * mean,
            saved_bytes=tuple(0.1 * mean * size for size in asked.profile.batch_sizes),
        )
        for layer in asked.profile.layers
    )
    needed = 4 * mean * len(layers) + sum((one.saved_bytes or one.activation_bytes)[-1] for one in layers)
    nodes = tuple(
        replace(node, device=replace(node.device, memory_bytes=random.uniform(0.5, 0.9) * needed))
        for node in asked.cluster.nodes
    )
    return replace(
        asked,
        profile=replace(asked.profile, layers=layers),
        cluster=replace(asked.cluster, nodes=nodes),
        zero_stage=random.choice([2, 3, "auto", "auto"]),
    )


def widely(seed: int) -> chance.Question:
    """Two layers on more machines than the search looks through in every way, if they differ."""
    random = Random(seed)
    return chance.question(random, random.choice([(3, 3, 3, 3), (4, 3, 3, 2), (2, 3, 4, 3)]), layers=2)


def ways_to_cut(
    ids: Sequence[str], edges: Sequence[tuple[str, str]], before: frozenset[str] = frozenset()
) -> Iterator[list[tuple[frozenset[str], tuple[str, ...]]]]:
    """Every row of stages such that no edge leads back: what lies before each, and its layers in the order of `ids`."""
    left = [name for name in ids if name not in before]
    if not left:
        yield []
    for count in range(1, len(left) + 1):
        for first in combinations(left, count):
            behind = before | set(first)
            if all(source in behind for source, target in edges if target in behind):
                yield from ([(before, first), *others] for others in ways_to_cut(ids, edges, behind))


def ways_to_share(devices: int, stages: int) -> Iterator[list[int]]:
    """How many of a machine's devices each stage may take; its devices are alike."""
    if stages == 0:
        yield []
        return
    for taken in range(devices + 1):
        yield from ([taken, *others] for others in ways_to_share(devices - taken, stages - 1))


def ways_to_place(nodes: Sequence[object], counts: Sequence[int], stages: int) -> Iterator[list[tuple[int, ...]]]:
    """The devices of each stage, from any machines; which one of two that are alike doesn't matter."""
    for shares in product(*(list(ways_to_share(devices, stages)) for devices in counts)):
        twice = zip(pairwise(nodes), pairwise(shares), strict=True)
        if any(node == other and share < more for (node, other), (share, more) in twice):
            continue
        free = [iter(range(sum(counts[:number]), sum(counts))) for number in range(len(counts))]
        placed = [
            tuple(next(free[at]) for at, share in enumerate(shares) for _ in range(share[k])) for k in range(stages)
        ]
        if all(placed):
            yield placed


def best_step_s(question: chance.Question) -> float:
    """The shortest step of all plans; infinite if none fits."""
    model, nodes = twin.Model(asdict(question.profile)), twin.Nodes(asdict(question.cluster))
    alike = question.cluster.nodes
    counts = [node.count for node in alike]
    cuts = list(ways_to_cut(question.order(), question.profile.edges))
    sizes = [size for size in range(1, question.global_batch + 1) if question.global_batch % size == 0]
    smallest = question.profile.batch_sizes[0]

    @cache
    def priced(
        assumed: twin.Assumed, behind: int, front: frozenset[str], ids: tuple[str, ...], *devices: tuple[int, ...]
    ) -> twin.Stage:
        return twin.price_stage(model, nodes, assumed, behind, set(front), ids, *devices)

    best = math.inf
    for depth in range(1, min(len(model.layers), sum(counts)) + 1):
        plans = list(product((cut for cut in cuts if len(cut) == depth), ways_to_place(alike, counts, depth)))
        for choices, (cut, placed) in product(map(question.assumed, sizes), plans):
            shares = [divmod(choices[0].micro_batch, len(devices)) for devices in placed]
            if min(shares)[0] < smallest or (question.even_split and any(more for _, more in shares)):
                continue
            count = choices[0].micro_batches
            rows = list(zip(cut, placed, [*placed[1:], ()], [(), *placed[:-1]], strict=True))
            # Each stage may recompute its activations or keep them, if the question allows both.
            for every in product(choices, repeat=depth):
                # Only one of recomputation and the ZeRO stage is left to each stage.
                if question.zero_stage == "auto" and len(set(every)) > 1:
                    continue
                stages = [
                    priced(assumed, depth - number, front, ids, *devices)
                    for number, (assumed, ((front, ids), *devices)) in enumerate(zip(every, rows, strict=True))
                ]
                if max(count * (stage.forward_s + stage.backward_s) for stage in stages) < best:
                    windows = twin_steps.windows(choices[0], stages)
                    best = min(best, *(twin_steps.step_s(count, stages, row) for row in windows), math.inf)
    return best


def falsified(question: chance.Question) -> list[object]:
    """What is wrong with the plan or its bound, with the best step of all plans."""
    best = best_step_s(question)
    plan = question.plan()
    if plan is None:
        return ["nothing is said to fit", best] if best < math.inf else []
    assert (plan.cuts, plan.stop_reason) == ("all", None)
    assert plan.lower_bound_s is not None
    assert plan.optimality_gap is not None
    holds = (
        plan.lower_bound_s * (1 - 1e-9)
        <= best
        <= plan.step_s * (1 + 1e-9)
        <= best * (1 + plan.optimality_gap) * (1 + 2e-9)
    )
    return [] if holds else [plan.lower_bound_s, best, plan.step_s, plan.optimality_gap, plan.placements]


def test_no_plan_of_all_beats_a_bound_or_the_plan_by_more_than_its_gap() -> None:
    wrong = {seed: falsified(asked(seed)) for seed in range(60)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


def test_no_plan_of_all_beats_a_bound_or_the_plan_if_transfers_occupy_devices() -> None:
    asks = {seed: replace(asked(seed), overlap_p2p_comm=False) for seed in range(40)}
    wrong = {seed: falsified(question) for seed, question in asks.items()}
    assert {seed: found for seed, found in wrong.items() if found} == {}


def test_no_plan_of_sharded_weights_beats_a_bound_or_the_plan_by_more_than_its_gap() -> None:
    wrong = {seed: falsified(sharded(seed)) for seed in range(20)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_no_plan_of_sharded_weights_beats_hundreds_of_bounds_or_plans_by_more_than_their_gap() -> None:
    wrong = {seed: falsified(sharded(seed)) for seed in range(20, 400)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


def on_types(seed: int) -> chance.Question:
    """A question of `asked` whose layers have times of their own on some device types."""
    return chance.typed(Random(seed), asked(seed))


def test_no_plan_on_several_device_types_beats_a_bound_or_the_plan_by_more_than_its_gap() -> None:
    wrong = {seed: falsified(on_types(seed)) for seed in range(400, 430)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_no_plan_on_several_device_types_beats_hundreds_of_bounds_or_plans_by_more_than_their_gap() -> None:
    wrong = {seed: falsified(on_types(seed)) for seed in range(430, 830)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_no_plan_of_all_beats_hundreds_of_bounds_or_plans_by_more_than_their_gap() -> None:
    wrong = {seed: falsified(asked(seed)) for seed in range(60, 400)}
    assert {seed: found for seed, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_no_placement_that_was_not_looked_through_beats_a_bound_on_all() -> None:
    wrong = {seed: falsified(widely(seed)) for seed in range(25)}
    assert {seed: found for seed, found in wrong.items() if found} == {}
