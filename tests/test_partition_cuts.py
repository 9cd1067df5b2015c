"""`hpgo.partition` of branching models against every plan of all orders, and its claims where not all are searched."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass, replace

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.cli.partition import command
from hpgo.hardware.cluster import Device, Link, Node
from hpgo.planning.chain import profiles
from hpgo.show.chain_figure import svg
from hpgo.show.chain_report import explain, table


def profile_of(seconds: dict[str, float], edges: list[tuple[str, str]], out=None, held=None) -> hpgo.Profile:
    layers = tuple(
        hpgo.Layer(name, name, (time_s,), (0.0,), ((out or {}).get(name, 1.0),), (held or {}).get(name, 0.0))
        for name, time_s in seconds.items()
    )
    return hpgo.Profile("model", (1,), layers, tuple(edges))


def hosts_of(speeds: list[float], memory: list[float] | None = None, rate: float = 1e9) -> hpgo.Cluster:
    nodes = tuple(
        Node(Device(f"d{speed}-{size}", size, speed), 1, f"h{at}")
        for at, (speed, size) in enumerate(zip(speeds, memory or [1e9] * len(speeds), strict=True))
    )
    return hpgo.Cluster("hosts", nodes, Link(rate, rate), Link(rate, rate, 0.0))


@dataclass(frozen=True)
class Twin:
    """Prices every chain of down-sets on every row of hosts, straight from the definitions."""

    profile: hpgo.Profile
    cluster: hpgo.Cluster
    buffers: tuple[int, int] = (2, 2)

    def cuts(self) -> list[frozenset[str]]:
        ids = [layer.id for layer in self.profile.layers]
        every = (frozenset(held) for count in range(len(ids) + 1) for held in itertools.combinations(ids, count))
        return [held for held in every if all(start in held for start, end in self.profile.edges if end in held)]

    def crossing(self, before: frozenset[str]) -> float:
        read = {start for start, end in self.profile.edges if start in before and end not in before}
        return sum(layer.activation_bytes[0] for layer in self.profile.layers if layer.id in read)

    def stage(self, device: Device, first: frozenset[str], end: frozenset[str]) -> float | None:
        """Seconds; None where the stage does not fit."""
        layers = [layer for layer in self.profile.layers if layer.id in end - first]
        waiting = self.buffers[0] if first else 0
        need = sum(layer.parameter_bytes for layer in layers)
        need += self.crossing(first) * (1 + waiting) + self.crossing(end) * (1 + self.buffers[1])
        return sum(layer.forward_s[0] for layer in layers) / device.speed if need < device.memory_bytes else None

    def plans(self):
        """Computing seconds of the stages and transfer seconds of each plan that fits."""
        cuts = self.cuts()
        whole, rate = cuts[-1], self.cluster.inter.bytes_per_s

        def extend(first, left, compute, hops):
            if first == whole:
                yield compute, hops
                return
            for device in left:
                for end in cuts:
                    if first < end and (seconds := self.stage(device, first, end)) is not None:
                        hop = [self.crossing(end) / rate] if end != whole else []
                        yield from extend(end, [one for one in left if one is not device], [*compute, seconds],
                                          [*hops, *hop])  # fmt: skip

        yield from extend(cuts[0], [node.device for node in self.cluster.nodes], [], [])

    def best(self, value) -> float:
        return min((value(*plan) for plan in self.plans()), default=math.inf)


@st.composite
def questions(draw) -> tuple[hpgo.Profile, hpgo.Cluster]:
    """Up to six layers, some without time, in any order of the file; up to three hosts."""
    names = list("abcdef"[: draw(st.integers(1, 6))])
    pairs = list(itertools.combinations(names, 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=7)) if pairs else []
    numbers = st.fixed_dictionaries({name: st.integers(0, 6).map(float) for name in names})
    listed = draw(st.permutations(names))
    times = draw(numbers)
    profile = profile_of({name: times[name] for name in listed}, edges, draw(numbers), draw(numbers))
    count = draw(st.integers(1, 3))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=count, max_size=count))
    memory = draw(st.lists(st.integers(6, 60).map(float), min_size=count, max_size=count))
    return profile, hosts_of(speeds, memory, draw(st.sampled_from([0.5, 2.0, 1e9])))


def assert_layers_are_shared_out(profile: hpgo.Profile, plan: hpgo.ChainPlan) -> None:
    """Each layer is in one stage, no edge leads back, and the numbers count the ids."""
    if not any(stage.layers for stage in plan.stages):
        assert all(len(ends) == len(set(ends)) for ends in zip(*profile.edges, strict=True))  # a chain
        return
    at = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    assert sorted(layer for stage in plan.stages for layer in stage.layers) == sorted(at)
    assert sorted(at) == sorted(layer.id for layer in profile.layers)
    assert all(at[start] <= at[end] for start, end in profile.edges)
    assert [len(stage.layers) for stage in plan.stages] == [stage.last - stage.first + 1 for stage in plan.stages]


def interval(compute, hops) -> float:
    return max(*compute, *hops, 0.0)


def latency(compute, hops) -> float:
    return sum(compute) + sum(hops)


@settings(max_examples=200)
@given(questions(), st.sampled_from(["throughput", "latency", "hosts"]), st.integers(1, 20))
def test_a_plan_is_the_best_of_all_orders_of_the_layers(question, objective, limit):
    twin = Twin(*question)
    if objective == "throughput":
        best, options = twin.best(interval), {}
    elif objective == "latency":
        best, options = twin.best(latency), {}
    else:
        within = [len(compute) for compute, hops in twin.plans() if interval(compute, hops) <= limit]
        best, options = min(within, default=math.inf), {"samples_per_s": 1 / limit}
    if best == math.inf:
        with pytest.raises(hpgo.errors.InfeasibleError) as raised:
            hpgo.partition(*question, objective=objective, **options)
        assert raised.value.hint
        return
    plan = hpgo.partition(*question, objective=objective, **options)
    assert plan.value == pytest.approx(best, rel=1e-9)
    assert plan.optimality_gap == 0
    assert plan.cuts == "all"
    assert plan.searched_cuts_bound is None
    assert_layers_are_shared_out(question[0], plan)


@pytest.fixture
def _one_order(monkeypatch):
    """Searches one order of the layers of every model that has more than one."""
    monkeypatch.setattr(profiles, "_MAX_CUTS", 2)


@pytest.mark.usefixtures("_one_order")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(questions(), st.sampled_from(["throughput", "latency", "hosts"]), st.integers(1, 20))
def test_bounds_of_one_order_hold_for_all_orders(question, objective, limit):
    twin = Twin(*question)
    options = {"samples_per_s": 1 / limit} if objective == "hosts" else {}
    within = [plan for plan in twin.plans() if not options or interval(*plan) <= limit]
    value = {"throughput": interval, "latency": latency, "hosts": lambda compute, hops: len(compute)}[objective]
    best = min((value(*plan) for plan in within), default=math.inf)
    try:
        plan = hpgo.partition(*question, objective=objective, **options)
    except hpgo.errors.InfeasibleError as error:
        assert_no_false_certainty(error, is_possible=best < math.inf)
        return
    assert plan.value >= best * (1 - 1e-9)
    assert plan.lower_bound <= best * (1 + 1e-9)
    assert plan.optimality_gap > 0 or plan.value == pytest.approx(best, rel=1e-7)
    assert ("proven" in table(plan)) == (plan.optimality_gap == 0)
    assert (plan.cuts == "all") == (plan.searched_cuts_bound is None)
    assert_layers_are_shared_out(question[0], plan)


def assert_no_false_certainty(error: hpgo.errors.InfeasibleError, *, is_possible: bool) -> None:
    assert not is_possible or "found" in error.message, error.message


def wide(times: list[float]) -> hpgo.Profile:
    """One layer, as many branches as there are times, and one that reads all of them."""
    seconds = {"start": 1.0, **{f"b{at}": time_s for at, time_s in enumerate(times)}, "join": 1.0}
    names = [f"b{at}" for at in range(len(times))]
    return profile_of(seconds, [*(("start", name) for name in names), *((name, "join") for name in names)])


def halves(times: list[float]) -> float:
    """The shorter part of the best division of the branches; each part has one of the two ends, too."""
    sums = {0.0}
    for time_s in times:
        sums |= {one + time_s for one in sums}
    return min(max(one, sum(times) - one) for one in sums) + 1.0


def test_fourteen_branches_are_divided_as_well_as_they_can_be():
    times = [13.0, 11, 17, 5, 19, 7, 23, 3, 29, 2, 31, 37, 41, 43]  # 16,386 cuts
    plan = hpgo.partition(wide(times), hosts_of([1.0, 1.0]), time_limit_s=120)
    assert plan.interval_s == pytest.approx(halves(times))
    assert plan.optimality_gap == 0
    assert plan.cuts == "all"


@pytest.mark.parametrize("seed", range(3))
def test_more_cuts_than_are_searched_are_told_beside_the_number_in_every_output(seed, tmp_path):
    draw = random.Random(seed)
    times = [float(draw.randint(50, 300)) for _ in range(16)]  # 65,538 cuts
    profile, cluster = wide(times), hosts_of([1.0, 1.0])
    plan = hpgo.partition(profile, cluster)
    best = halves(times)
    assert plan.lower_bound <= best <= plan.value
    assert "cut points" in plan.cuts
    assert plan.searched_cuts_bound == pytest.approx(plan.value)
    assert plan.lower_bound < plan.value
    for text in (table(plan), explain(plan), plan._repr_html_()):
        assert "proven" not in text
        assert plan.cuts in text
    assert plan.cuts in svg(plan)
    assert hpgo.ChainPlan.from_json(plan.to_json()) == plan

    hpgo.write_profile(profile, tmp_path / "profile.yaml")
    (tmp_path / "cluster.yaml").write_text("hpgo_cluster: 1\nnodes: [{devices: 2, memory: 1 GB}]\nintra: 10 GB/s\n")
    asked = ["--profile", str(tmp_path / "profile.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    for option in ([], ["--explain"], ["--json"], ["--yaml"]):
        assert plan.cuts in CliRunner().invoke(command, [*asked, *option], catch_exceptions=False).stdout


def test_a_branching_model_names_the_layers_of_each_stage_in_every_output(tmp_path):
    profile = profile_of(
        {"join": 1.0, "left": 7.0, "right": 6.0, "start": 2.0},
        [("start", "left"), ("start", "right"), ("left", "join"), ("right", "join")],
    )
    plan = hpgo.partition(profile, hosts_of([1.0, 1.0]))
    assert [stage.layers for stage in plan.stages] == [("start", "right"), ("left", "join")]
    assert plan.interval_s == 8.0
    assert [stage.layers for stage in plan.program(batches=2).stages] == [("start", "right"), ("left", "join")]
    assert [list(*row.values()) for row in yaml.safe_load(plan.pipeedge())] == [["layers"], ["layers"]]
    assert yaml.safe_load(plan.pipeedge())[0] == {"h0": {"layers": ["start", "right"]}}
    assert json.loads(plan.to_json())["stages"][1]["layers"] == ["left", "join"]
    for text in (table(plan), explain(plan), svg(plan), plan._repr_html_()):
        assert "start, right" in text
    assert hpgo.ChainPlan.from_json(plan.to_json()) == plan


def test_rules_name_layers_of_a_branching_model_by_id():
    profile = profile_of(
        {"join": 1.0, "left": 7.0, "right": 6.0, "start": 2.0},
        [("start", "left"), ("start", "right"), ("left", "join"), ("right", "join")],
    )
    plan = hpgo.partition(profile, hosts_of([1.0, 1.0]), pins=["h1=left,right"])
    assert {"left", "right"} <= next({*stage.layers} for stage in plan.stages if "h1" in stage.hosts)


def test_rules_about_layers_leave_no_proof_where_layers_without_time_stay_with_a_neighbour():
    profile = profile_of({"a": 4.0, "view": 0.0, "b": 4.0}, [("a", "view"), ("view", "b")])
    plan = hpgo.partition(profile, hosts_of([1.0, 1.0]), exclude=["h0=2"])
    assert "neighbour" in plan.cuts
    assert plan.lower_bound <= 4.0  # `a` on h0, `view` and `b` on h1
    assert hpgo.partition(profile, hosts_of([1.0, 1.0])).cuts == "all"


def test_memory_that_is_short_is_told_before_any_search():
    profile = profile_of({f"l{at}": 1.0 for at in range(300)}, [(f"l{at}", f"l{at + 1}") for at in range(299)],
                         held={f"l{at}": 10.0 for at in range(300)})  # fmt: skip
    cluster = hosts_of([1.0 + at / 100 for at in range(40)], [74.0] * 40)
    with refused(hpgo.errors.InfeasibleError, "infeasible", "0.0", "MiB") as raised:
        hpgo.partition(profile, cluster, time_limit_s=1e-9)
    assert "more host" in raised.value.hint
    heavy = replace(profile, layers=(replace(profile.layers[0], parameter_bytes=80.0), *profile.layers[1:]))
    with refused(hpgo.errors.InfeasibleError, "infeasible", "1"):
        hpgo.partition(heavy, hosts_of([1.0] * 80, [74.0] * 80), time_limit_s=1e-9)
