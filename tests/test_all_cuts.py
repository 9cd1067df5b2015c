"""A proof is about all cuts of the question, also where the search knows only some of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group
from hpgo.show import report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess

OPTIONS = {"global_batch_size": 64, "pipeline_micro_batch_size": 1}


def wide(seed: int) -> hpgo.Profile:
    """A source, 16 layers side by side of unlike lengths, and a sink: more than 10,000 cuts."""
    chance = Random(seed)
    names = ["source", *(f"side{number}" for number in range(16)), "sink"]
    lengths_s = [0.001, *(chance.choice([1.0, 1.1, 1.7, 2.3, 3.1]) for _ in names[1:-1]), 0.001]
    layers = tuple(
        hpgo.Layer(name, "Linear", (length_s,), (2 * length_s,), (1e3,), 1e3)
        for name, length_s in zip(names, lengths_s, strict=True)
    )
    edges = [edge for name in names[1:-1] for edge in (("source", name), (name, "sink"))]
    return hpgo.Profile("wide", (1,), layers, tuple(edges))


def fast_links(devices: int, memory: str = "64 GB") -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=1, devices_per_node=devices, intra_gbit_s=10_000, memory=memory)


def other_cuts(profile: hpgo.Profile, chance: Random) -> hpgo.Plan:
    """The best of many ways to put the layers of `wide` on two devices."""
    sides = list(profile.layers[1:-1])
    whole_s = sum(layer.forward_s[0] for layer in sides)
    best: tuple[float, list[str]] = (float("inf"), [])
    for _ in range(3_000):
        chance.shuffle(sides)
        sums = [sum(layer.forward_s[0] for layer in sides[:count]) for count in range(len(sides) + 1)]
        longest, count = min((max(front, whole_s - front), count) for count, front in enumerate(sums))
        best = min(best, (longest, sorted(layer.id for layer in sides[:count])))
    front = ["source", *best[1]]
    stages = [(front, [0]), ([layer.id for layer in profile.layers if layer.id not in front], [1])]
    return hpgo.evaluate(profile, fast_links(2), stages, **OPTIONS)


def test_no_plan_with_other_cuts_beats_the_bound_of_a_search_of_some_cuts() -> None:
    beaten = 0
    for seed in range(6):
        profile = wide(seed)
        found = hpgo.plan(profile, fast_links(2), **OPTIONS)
        other = other_cuts(profile, Random(seed))
        assert "one order" in found.cuts
        assert found.lower_bound_s is not None
        assert found.searched_cuts_bound_s is not None
        assert found.lower_bound_s <= min(other.step_s, found.searched_cuts_bound_s)
        assert found.optimality_gap == pytest.approx(found.step_s / found.lower_bound_s - 1)
        beaten += other.step_s < found.searched_cuts_bound_s
    assert beaten, "no question tells the two bounds apart"


def test_every_output_of_such_a_plan_says_what_its_bound_is_about(
    run: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    profile = wide(0)
    hpgo.write_profile(profile, tmp_path / "wide.yaml")
    (tmp_path / "two.yaml").write_text(
        "hpgo_cluster: 1\nname: two\nnodes: [{devices: 2, memory: 64 GB}]\n"
        "intra: {bandwidth: 1e12}\ninter: {bandwidth: 1e12}\n"
    )
    words = ["plan", "wide.yaml", "-c", "two.yaml", "--pipeline-micro-batch-size", "1"]
    text = " ".join(run(*words, "-b", "64").stdout.split())
    assert "regardless of its cuts" in text
    assert "with the searched cuts" in text
    assert "cuts of one order of the layers" in text
    assert "optimal" not in text
    facts = json.loads(run(*words, "-b", "64", "--json").stdout)
    assert facts["lower_bound_s"] < facts["searched_cuts_bound_s"] <= facts["step_s"]
    assert "one order" in facts["cuts"]
    table = run(*words, "-b", "64,128").stdout
    assert "gaps are over all cuts" in " ".join(table.split())
    plan = hpgo.Plan.from_json(json.dumps(facts))
    assert plan.searched_cuts_bound_s == facts["searched_cuts_bound_s"]
    assert "optimal" not in plan._repr_html_()


def test_a_plan_of_some_cuts_is_optimal_only_where_the_bound_on_all_cuts_says_so() -> None:
    plan = hpgo.plan(wide(1), fast_links(2), **OPTIONS)
    assert "optimal" not in report.proof(plan)
    assert "shorter" in report.proof(replace(plan, searched_cuts_bound_s=plan.step_s))
    assert report.proof(replace(plan, lower_bound_s=plan.step_s)).startswith("proven optimal")


def test_older_files_of_such_plans_claim_their_bound_for_the_searched_cuts_only() -> None:
    facts = json.loads(hpgo.plan(wide(1), fast_links(2), **OPTIONS).to_json())
    del facts["searched_cuts_bound_s"]
    facts["lower_bound_s"] = facts["step_s"]
    read = hpgo.Plan.from_json(json.dumps(facts))
    assert (read.lower_bound_s, read.optimality_gap, read.searched_cuts_bound_s) == (None, None, facts["step_s"])
    assert "optimal" not in report.proof(read)


def test_a_long_chain_of_which_some_cuts_are_searched_says_so() -> None:
    layers = 2_500
    profile = hpgo.Profile.chain(
        "long", batch_size=1, forward_s=[1e-3] * layers, backward_s=[2e-3] * layers,
        activation_bytes=[1e3] * layers, parameter_bytes=[1e3] * layers,
    )  # fmt: skip
    plan = hpgo.plan(profile, fast_links(2), **OPTIONS)
    assert plan.cuts != "all"
    assert plan.searched_cuts_bound_s is not None
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.searched_cuts_bound_s
    assert "some cuts" in report.search_space(plan)


def test_a_search_of_some_cuts_says_only_that_no_plan_was_found() -> None:
    """Each layer fits a device, all fit all devices, and no row of two stages in one order does."""
    names = ["source", *(f"side{number}" for number in range(16)), "sink"]
    weights = [1.0, *([1e9] * 8 + [2e9] * 8), 1.0]
    layers = tuple(
        hpgo.Layer(name, "Linear", (1.0,), (2.0,), (1.0,), size) for name, size in zip(names, weights, strict=True)
    )
    edges = [edge for name in names[1:-1] for edge in (("source", name), (name, "sink"))]
    profile = hpgo.Profile("wide", (1,), layers, tuple(edges))
    nodes = [{"devices": 1, "memory": memory, "type": f"type{memory:g}"} for memory in (4 * 8.5e9, 4 * 15.9e9)]
    link = {"bandwidth": 1e10, "latency": 0.0}
    document = {"hpgo_cluster": 1, "name": "two", "nodes": nodes, "intra": link, "inter": link}
    cluster = hpgo.Cluster.from_document(document, file="two")
    with pytest.raises(hpgo.errors.InfeasibleError) as caught:
        hpgo.plan(profile, cluster, **OPTIONS)
    assert caught.value.message.startswith("no plan was found that fits, and none takes less than ")
    assert "closest plan found" in caught.value.message


def test_the_bound_of_one_schedule_is_never_shown_while_all_are_compared() -> None:
    bounds = []
    hpgo.plan(
        "bert-48", "dapple-a", global_batch_size=64, schedule="auto", progress=lambda _, bound_s: bounds.append(bound_s)
    )
    assert set(bounds) == {0.0}


def test_a_stopped_comparison_names_the_schedule_of_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hpgo.plan("vgg-19", "dapple-c", global_batch_size=512, schedule="auto")
    assert whole.optimality_gap is not None
    monkeypatch.setattr("hpgo.planning.planner.plan", lambda *_, **__: replace(whole, stop_reason="time_limit"))
    shown = CliRunner().invoke(group, ["plan", "vgg-19", "-c", "dapple-c", "-b", "512", "--schedule", "auto"])
    assert f" for `{whole.schedule}`" in shown.stderr.splitlines()[0]


def test_published_gnmt_has_no_bound_that_another_plan_beats(reference: Path) -> None:
    profile = hpgo.read_profile(reference / "dnn-partitioning/gnmt_inference.json", batch_size=1)
    plan = hpgo.plan(profile, fast_links(6), global_batch_size=1_000, pipeline_micro_batch_size=1)
    assert plan.cuts != "all"
    assert plan.optimality_gap is not None
    assert 0.01 < plan.optimality_gap < 0.2
    assert "optimal" not in str(plan)


def rows_of_stages(profile: hpgo.Profile, chance: Random, count: int) -> list[list[str]]:
    """Layers in `count` stages, in a random order that respects the edges."""
    waiting, order = {layer.id for layer in profile.layers}, []
    while waiting:
        free = sorted(name for name in waiting if not any(b == name and a in waiting for a, b in profile.edges))
        order.append(chance.choice(free))
        waiting.remove(order[-1])
    cuts = [0, *sorted(chance.sample(range(1, len(order)), count - 1)), len(order)]
    return [order[begin:end] for begin, end in pairwise(cuts)]


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
def test_no_random_plan_beats_the_bound_under_any_schedule_that_has_one(schedule: str) -> None:
    profile, chance = wide(3), Random(3)
    found = hpgo.plan(profile, fast_links(4), global_batch_size=8, schedule=schedule)
    assert found.lower_bound_s is not None
    for _ in range(30):
        stages = rows_of_stages(profile, chance, chance.randint(1, 4))
        other = hpgo.evaluate(
            profile, fast_links(4), [(layers, [at]) for at, layers in enumerate(stages)],
            global_batch_size=8, schedule=schedule,
        )  # fmt: skip
        assert other.step_s >= found.lower_bound_s * (1 - 1e-9)


@pytest.mark.parametrize("sides", [3, 16])
def test_a_launcher_that_cuts_anywhere_but_in_tied_weights_has_a_bound_over_all_such_cuts(sides: int) -> None:
    profile = wide(1)
    kept = {"source", "sink", *(f"side{number}" for number in range(sides))}
    profile = replace(
        profile,
        layers=tuple(layer for layer in profile.layers if layer.id in kept),
        edges=tuple(edge for edge in profile.edges if kept.issuperset(edge)),
        tied_weights=(hpgo.TiedWeight(("source", "side0"), 500.0),),
    )
    plan = hpgo.plan(profile, fast_links(2), framework="torch", **OPTIONS)
    front = set(plan.stages[0].layers)
    assert len(plan.stages) == 2
    assert {"source", "side0"} <= front
    assert (plan.cuts == "all") == (plan.searched_cuts_bound_s is None) == (sides == 3)
    assert ("optimal" in report.proof(plan)) == (sides == 3)
