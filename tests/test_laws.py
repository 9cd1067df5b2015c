"""What a plan must obey whatever the question is: what tells it the same changes nothing, and more is never worse."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from random import Random
from typing import TYPE_CHECKING

import chance
import pytest
import twin
import twin_steps
from chance import Question

if TYPE_CHECKING:
    from collections.abc import Callable

    import hpgo
    from hpgo.hardware.cluster import Link

REL = 1 + 1e-9
"""Steps and bounds are sums of floats, in another order for another question."""


def asked(random: Random) -> Question:
    """Up to nine layers on up to three machines of up to four devices."""
    counts = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
    return chance.question(random, counts, layers=random.randint(2, 9))


def layers(question: Question, seconds: float = 1.0, size: float = 1.0) -> Question:
    """The question with all layers' seconds and bytes so many times as large."""

    def times(column: tuple[float, ...], factor: float) -> tuple[float, ...]:
        return tuple(value * factor for value in column)

    scaled = [
        replace(
            layer,
            forward_s=times(layer.forward_s, seconds),
            backward_s=times(layer.backward_s, seconds),
            activation_bytes=times(layer.activation_bytes, size),
            saved_bytes=None if layer.saved_bytes is None else times(layer.saved_bytes, size),
            parameter_bytes=layer.parameter_bytes * size,
        )
        for layer in question.profile.layers
    ]
    return replace(question, profile=replace(question.profile, layers=tuple(scaled)))


def links(question: Question, rate: float, latency: float = 1.0) -> Question:
    """The question with rates and latencies of all links so many times as large."""

    def scaled(link: Link) -> Link:
        return replace(
            link,
            bytes_per_s=link.bytes_per_s * rate,
            collective_bytes_per_s=link.collective_bytes_per_s * rate,
            latency_s=link.latency_s * latency,
        )

    cluster = question.cluster
    return replace(question, cluster=replace(cluster, intra=scaled(cluster.intra), inter=scaled(cluster.inter)))


def devices(question: Question, memory: float = 1.0, speed: float = 1.0) -> Question:
    """The question with memory and speed of all devices so many times as large."""
    nodes = [
        replace(
            node,
            device=replace(
                node.device, memory_bytes=node.device.memory_bytes * memory, speed=node.device.speed * speed
            ),
        )
        for node in question.cluster.nodes
    ]
    return replace(question, cluster=replace(question.cluster, nodes=tuple(nodes)))


def renamed(random: Random, question: Question) -> Question:
    """Layers by other names; those of loaders stay, since a loader is known by it."""
    profile = question.profile
    numbers = random.sample(range(len(profile.layers)), len(profile.layers))
    ids = {layer.id: f"x{number}" for layer, number in zip(profile.layers, numbers, strict=True)}
    renamed = tuple(replace(layer, id=ids[layer.id]) for layer in profile.layers)
    return replace(
        question, profile=replace(profile, layers=renamed, edges=tuple((ids[a], ids[b]) for a, b in profile.edges))
    )


def relisted(random: Random, question: Question) -> Question:
    """Lines of layers and edges in another order."""
    profile = question.profile
    lines = tuple(random.sample(profile.layers, len(profile.layers)))
    return replace(
        question, profile=replace(profile, layers=lines, edges=tuple(random.sample(profile.edges, len(profile.edges))))
    )


def permuted(random: Random, question: Question) -> Question:
    """Machines in another order."""
    nodes = question.cluster.nodes
    return replace(question, cluster=replace(question.cluster, nodes=tuple(random.sample(nodes, len(nodes)))))


def one_device_more(random: Random, question: Question) -> Question:
    nodes = list(question.cluster.nodes)
    chosen = random.randrange(len(nodes))
    nodes[chosen] = replace(nodes[chosen], count=nodes[chosen].count + 1)
    return replace(question, cluster=replace(question.cluster, nodes=tuple(nodes)))


def one_node_more(random: Random, question: Question) -> Question:
    nodes = question.cluster.nodes
    return replace(question, cluster=replace(question.cluster, nodes=(*nodes, random.choice(nodes))))


SAME: dict[str, Callable[[Random, Question, float], Question]] = {
    "renamed": lambda random, question, _: renamed(random, question),
    "relisted": lambda random, question, _: relisted(random, question),
    "nodes permuted": lambda random, question, _: permuted(random, question),
    "bytes and rates": lambda _, question, factor: devices(links(layers(question, size=factor), factor), memory=factor),
    "seconds and speeds": lambda _, question, factor: devices(layers(question, seconds=factor), speed=factor),
}
MORE: dict[str, Callable[[Random, Question], Question]] = {
    "memory": lambda random, question: devices(question, memory=random.choice([1.01, 1.5, 4.0])),
    "bandwidth": lambda random, question: links(question, random.choice([1.01, 2.0, 10.0])),
    "promptness": lambda random, question: links(question, 1.0, latency=random.choice([0.9, 0.1, 0.0])),
    "speed": lambda random, question: devices(question, speed=random.choice([1.01, 1.5, 4.0])),
    "a device": one_device_more,
    "a node": one_node_more,
}


def contradicted(name: str, before: hpgo.Plan | None, after: hpgo.Plan | None, factor: float = 1.0) -> list[object]:
    """Why both can't be true, if every plan of `before` is one that `after` may have, in so many times the seconds."""
    if before is None:
        return []
    if after is None:
        return [(name, "nothing fits any more", before.step_s)]
    assert after.lower_bound_s is not None
    if after.lower_bound_s > before.step_s * factor * REL:
        return [(name, before.step_s * factor, after.step_s, after.optimality_gap)]
    return []


def mispriced(question: Question, plan: hpgo.Plan | None) -> list[object]:
    """What the twin says of the plan's step, and `evaluate` of its stages, if that is something else."""
    if plan is None:
        return []
    assumed = question.assumed(plan.pipeline_micro_batch_size)[0]
    stages = [(stage.layers, stage.devices) for stage in plan.stages]
    either = [
        twin.price(asdict(question.profile), asdict(question.cluster), replace(assumed, recompute=again), stages)
        for again in (False, True)
    ]
    priced = [either[stage.recompute][at] for at, stage in enumerate(plan.stages)]
    step_s = twin_steps.step_s(assumed.micro_batches, priced, [stage.max_in_flight for stage in plan.stages])
    given_s = question.evaluate(stages, plan.pipeline_micro_batch_size, recompute=plan.recompute).step_s
    wrong: list[object] = [("twin", plan.step_s, step_s)] * (not math.isclose(plan.step_s, step_s, rel_tol=1e-9))
    return wrong + [("evaluate", plan.step_s, given_s)] * (
        not plan.lower_bound_s <= given_s * REL <= plan.step_s * REL**2
    )


def broken(seed: int) -> list[object]:
    """The laws that this question breaks, with the steps."""
    random = Random(seed)
    question = asked(random)
    plan = question.plan()
    wrong = mispriced(question, plan)
    name = random.choice([*SAME])
    factor = random.choice([2.0, 0.25, 3.7, 1e-3])
    same = SAME[name](random, question, factor).plan()
    wrong += contradicted(name, plan, same) + contradicted(name, same, plan)
    if plan is not None and same is not None:
        wrong += [(name, plan.step_s, same.step_s)] * (not math.isclose(plan.step_s, same.step_s, rel_tol=1e-9))
    slower = links(layers(question, seconds=factor), 1 / factor, latency=factor).plan()
    wrong += contradicted("slower", plan, slower, factor) + contradicted("slower", slower, plan, 1 / factor)
    name = random.choice([*MORE])
    return wrong + contradicted(name, plan, MORE[name](random, question).plan())


def test_nothing_changes_with_names_or_units_and_more_is_never_worse_than_the_gap() -> None:
    wrong = {seed: broken(seed) for seed in range(100)}
    assert {seed: laws for seed, laws in wrong.items() if laws} == {}


@pytest.mark.slow
def test_nothing_changes_with_names_or_units_and_more_is_never_worse_in_a_thousand_questions() -> None:
    wrong = {seed: broken(seed) for seed in range(100, 1_000)}
    assert {seed: laws for seed, laws in wrong.items() if laws} == {}
