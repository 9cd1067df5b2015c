"""`hpgo.partition` against an exhaustive twin that knows hosts one by one, and the laws of each addition."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from toys import chain

import hpgo
from hpgo.model.formats import pipeedge
from hpgo.planning.chain.search import partition, partition_files
from hpgo.show.chain_figure import svg
from hpgo.show.chain_report import explain, table

MEGA = 2**20
FEW = settings(max_examples=examples(150))
MANY = settings(max_examples=examples(700))


@dataclass
class Question:
    """A small instance, as plain numbers, and as the files that say the same."""

    memory_mb: list[int]
    values: list[int]
    """Values at each position, in units of 2^15: 1/8 MB at batch size 1."""
    types: dict[str, dict]
    """`mbps`, `mb`, `time_s`."""
    hosts: dict[str, str]
    """Host to type."""
    links: dict = field(default_factory=dict)
    buffers: tuple[int, int] = (2, 2)

    def write(self, folder: Path) -> list[Path]:
        model = {
            "layers": len(self.memory_mb),
            "mem_MB": self.memory_mb,
            "parameters_in": self.values[0] * 2**15,
            "parameters_out": [count * 2**15 for count in self.values[1:]],
        }
        types = {
            name: {
                "bw_Mbps": kind["mbps"],
                "mem_MB": kind["mb"],
                "model_profiles": {"m": [{"batch_size": 1, "dtype": "torch.float32", "time_s": kind["time_s"]}]},
            }
            for name, kind in self.types.items()
        }
        devices = {name: [host for host, kind in self.hosts.items() if kind == name] for name in self.types}
        files = []
        for name, document in (("models", {"m": model}), ("device_types", types), ("devices", devices)):
            path = folder / f"{name}.yml"
            path.write_text(json.dumps(document))  # JSON is YAML
            files.append(path)
        if self.links:
            (folder / "links.yml").write_text(json.dumps(self.links))
        return files

    def plan(self, **options) -> hpgo.ChainPlan:
        with tempfile.TemporaryDirectory() as folder:
            files = self.write(Path(folder))
            links = Path(folder) / "links.yml" if self.links else None
            return partition_files(
                *files,
                model="m",
                batch_size=1,
                buffers_in=self.buffers[0],
                buffers_out=self.buffers[1],
                links=links,
                **options,
            )

    # From here on: the twin.

    def bytes_at(self, position: int) -> float:
        return self.values[position] * MEGA / 8

    def link(self, one: str, other: str) -> tuple[float, float]:
        rate = min(self.types[self.hosts[one]]["mbps"], self.types[self.hosts[other]]["mbps"]) * MEGA / 8
        latency = self.links.get("latency", 0.0)
        for line in self.links.get("links", []):
            pairs = itertools.permutations(line["between"]) if "between" in line else [(line["from"], line["to"])]
            if any(sender in (one, self.hosts[one]) and to in (other, self.hosts[other]) for sender, to in pairs):
                rate, latency = line.get("bandwidth", rate), line.get("latency", latency)
        return rate, latency

    def hop_s(self, position: int, one: str | None, other: str | None, bits: int = 32) -> float:
        end = self.links.get("input" if one is None else "output") if one is None or other is None else None
        if one is None or other is None:
            host = other if one is None else one
            if end is None or end.get("host") == host:
                return 0.0
            if "host" in end:
                one, other = (end["host"], other) if one is None else (one, end["host"])
                rate, latency = self.link(one, other)
            else:
                rate, latency = end["bandwidth"], end.get("latency", 0.0)
        else:
            rate, latency = self.link(one, other)
        sent = self.bytes_at(position) * bits / 32
        return latency + (0.0 if sent == 0 else math.inf if rate == 0 else sent / rate)

    def fits(self, host: str, first: int, end: int) -> bool:
        received, sent = self.bytes_at(first), self.bytes_at(end)
        waiting = self.buffers[0] if first > 0 else 0
        need = sum(self.memory_mb[first:end]) * MEGA + received * (1 + waiting) + sent * (1 + self.buffers[1])
        return self.types[self.hosts[host]]["mb"] * MEGA > need

    def paths(self, allowed=lambda host, layer: True):
        """Every row of hosts with their slices: `(host, first, end)`."""
        layers = len(self.memory_mb)
        for count in range(1, layers + 1):
            for cuts in itertools.combinations(range(1, layers), count - 1):
                slices = list(itertools.pairwise((0, *cuts, layers)))
                for hosts in itertools.permutations(self.hosts, count):
                    path = [(host, *part) for host, part in zip(hosts, slices, strict=True)]
                    if all(
                        self.fits(*stage) and all(allowed(stage[0], layer) for layer in range(stage[1], stage[2]))
                        for stage in path
                    ):
                        yield path

    def parts(self, path, widths=(32,), limit_s=math.inf):
        """Computing seconds, transfer seconds and lost bits of each part; None if a hop is too slow."""
        compute = [sum(self.types[self.hosts[host]]["time_s"][first:end]) for host, first, end in path]
        ends = [None, *(host for host, _, _ in path), None]
        positions = [0, *(end for _, _, end in path)]
        hops, lost = [], 0
        for position, one, other in zip(positions, ends[:-1], ends[1:], strict=True):
            for bits in widths if one and other else widths[:1]:
                seconds = self.hop_s(position, one, other, bits)
                if seconds <= limit_s:
                    hops.append(seconds)
                    lost += 32 - bits
                    break
            else:
                return None
        return compute, hops, lost

    def best(self, value, *, limit_s=math.inf, widths=(32,), allowed=lambda host, layer: True):
        found = math.inf
        for path in self.paths(allowed):
            parts = self.parts(path, widths, limit_s)
            if parts is not None and max(*parts[0], *parts[1]) <= limit_s:
                found = min(found, value(*parts))
        return found


@st.composite
def questions(draw, *, links: bool = False) -> Question:
    layers = draw(st.integers(1, 5))
    small = st.integers(0, 8)
    types = {
        f"t{index}": {
            "mbps": draw(st.integers(1, 6)),
            "mb": draw(st.integers(3, 40)),
            "time_s": draw(st.lists(small, min_size=layers, max_size=layers)),
        }
        for index in range(draw(st.integers(1, 3)))
    }
    names = draw(st.lists(st.sampled_from(sorted(types)), min_size=1, max_size=4))
    hosts = {f"h{index}": kind for index, kind in enumerate(names)}
    return Question(
        memory_mb=draw(st.lists(small, min_size=layers, max_size=layers)),
        values=draw(st.lists(small, min_size=layers + 1, max_size=layers + 1)),
        types=types,
        hosts=hosts,
        links=draw(link_files(sorted(hosts), sorted(types))) if links else {},
        buffers=(draw(st.integers(0, 2)), draw(st.integers(0, 2))),
    )


@st.composite
def link_files(draw, hosts: list[str], types: list[str]) -> dict:
    name = st.sampled_from([*hosts, *types])
    rate, latency = st.integers(0, 6).map(lambda rate: rate * MEGA / 8), st.integers(0, 5)
    lines = []
    for _ in range(draw(st.integers(0, 3))):
        line = {"between": [draw(name), draw(name)]} if draw(st.booleans()) else {"from": draw(name), "to": draw(name)}
        if draw(st.booleans()):
            line["bandwidth"] = draw(rate)
        if draw(st.booleans()):
            line["latency"] = draw(latency)
        lines.append(line)
    document = {"latency": draw(latency), "links": lines}
    for end in ("input", "output"):
        kind = draw(st.sampled_from(["none", "outside", "host"]))
        if kind == "outside":
            document[end] = {"bandwidth": draw(rate), "latency": draw(latency)}
        if kind == "host":
            document[end] = {"host": draw(st.sampled_from(hosts))}
    return document


def agree(question: Question, best: float, **options) -> None:
    if best == math.inf:
        with pytest.raises(hpgo.errors.InfeasibleError) as raised:
            question.plan(**options)
        assert raised.value.hint
        return
    plan = question.plan(**options)
    assert plan.value == pytest.approx(best, rel=1e-9)
    assert plan.optimality_gap == 0
    for stage in plan.stages:
        for host in stage.hosts:
            assert question.fits(host, stage.first - 1, stage.last)


def interval(compute, hops, lost) -> float:
    return max(*compute, *hops)


@MANY
@given(questions())
def test_throughput_equals_the_exhaustive_twin(question):
    agree(question, question.best(interval))


@MANY
@given(questions(links=True))
def test_pairwise_links_and_ends_equal_the_twin(question):
    agree(question, question.best(interval))


@FEW
@given(questions(links=True), st.integers(1, 30))
def test_latency_equals_the_twin(question, limit):
    best = question.best(lambda compute, hops, lost: sum(compute) + sum(hops), limit_s=limit)
    agree(question, best, objective="latency", samples_per_s=1 / limit)


@FEW
@given(questions(links=True), st.integers(1, 30))
def test_fewest_hosts_equal_the_twin(question, limit):
    best = question.best(lambda compute, hops, lost: len(compute), limit_s=limit)
    agree(question, best, objective="hosts", samples_per_s=1 / limit)


@FEW
@given(questions(links=True), st.integers(1, 20), st.sets(st.sampled_from([16, 8, 4]), min_size=1))
def test_fewest_bits_lost_equal_the_twin(question, limit, widths):
    best = question.best(lambda compute, hops, lost: lost, limit_s=limit, widths=sorted({32, *widths}, reverse=True))
    agree(question, best, objective="bits", samples_per_s=1 / limit, bits=sorted(widths))


@FEW
@given(questions(), st.data())
def test_pins_and_exclusions_equal_the_twin(question, data):
    layers = len(question.memory_mb)
    name = st.sampled_from([*question.hosts, *sorted(set(question.hosts.values()))])
    rule = st.tuples(name, st.integers(1, layers), st.integers(1, layers)).map(
        lambda rule: (rule[0], min(rule[1:]), max(rule[1:]))
    )
    pins, bars = data.draw(st.lists(rule, max_size=1)), data.draw(st.lists(rule, max_size=2))

    def allowed(host: str, layer: int) -> bool:
        names, number = (host, question.hosts[host]), layer + 1
        pinned = all(name in names for name, first, last in pins if first <= number <= last)
        return pinned and not any(name in names for name, first, last in bars if first <= number <= last)

    agree(
        question,
        question.best(interval, allowed=allowed),
        pins=[f"{name}={first}-{last}" for name, first, last in pins],
        exclude=[f"{name}={first}-{last}" for name, first, last in bars],
    )


@FEW
@given(questions(), st.data())
def test_excluding_a_host_is_planning_without_it(question, data):
    host = data.draw(st.sampled_from(sorted(question.hosts)))
    best = question.best(interval, allowed=lambda other, layer: other != host)
    agree(question, best, exclude=[host])


def steady(types: dict[str, list[float]], hosts: dict[str, int], **changes) -> Question:
    """Layers without weight between hosts with fast links."""
    layers = len(next(iter(types.values())))
    return Question(
        **{
            "memory_mb": [0] * layers,
            "values": [0] * (layers + 1),
            "types": {name: {"mbps": 8, "mb": 64, "time_s": time_s} for name, time_s in types.items()},
            "hosts": {f"{kind}-{index}": kind for kind, count in hosts.items() for index in range(count)},
        }
        | changes
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4))
@FEW
def test_hosts_that_share_a_stage_divide_its_interval(times, hosts):
    question = steady({"t": times}, {"t": hosts})
    plan = question.plan(max_replicas=hosts)
    assert plan.interval_s == pytest.approx(sum(times) / hosts)


def test_a_shared_stage_beats_an_indivisible_layer_and_names_its_hosts():
    question = steady({"t": [1.0, 6.0, 1.0]}, {"t": 4})
    assert question.plan().interval_s == 6
    plan = question.plan(max_replicas=3)
    assert plan.interval_s == pytest.approx(7 / 3)  # three hosts take turns at two of the layers
    assert max(len(stage.hosts) for stage in plan.stages) >= 3
    with refused(hpgo.errors.ArgumentError, "unsupported", "3"):
        plan.pipeedge()


def test_fewer_bits_are_chosen_only_where_the_throughput_needs_them():
    question = steady({"a": [1, 9], "b": [9, 1]}, {"a": 1, "b": 1}, values=[0, 8, 0])  # one edge: 1 s at 32 bits
    wide = question.plan(objective="bits", samples_per_s=1.0, bits=[8, 16])
    narrow = question.plan(objective="bits", samples_per_s=1.0, bits=[8, 16]) if wide.value else wide
    assert [hop.bits for hop in narrow.hops] == [32, 32, 32]
    question.types["a"]["mbps"] = 3  # now 8/3 s
    assert [hop.bits for hop in question.plan(objective="bits", samples_per_s=1.0, bits=[8, 16]).hops] == [32, 8, 32]
    with pytest.raises(hpgo.errors.InfeasibleError):
        question.plan(objective="bits", samples_per_s=1.0, bits=[16])


def test_throughput_that_is_out_of_reach_names_the_best():
    question = steady({"t": [3, 3]}, {"t": 2})
    with refused(hpgo.errors.InfeasibleError, "infeasible", "1", "3"):
        question.plan(objective="hosts", samples_per_s=1.0)
    with refused(hpgo.errors.InfeasibleError, "infeasible", "4.000000", "6.000000"):
        steady({"t": [3, 3]}, {"t": 1}).plan(objective="hosts", samples_per_s=0.25)


def test_half_precision_halves_transfers():
    def files(dtype: str, folder: Path) -> hpgo.ChainPlan:
        question = steady({"a": [1, 9], "b": [9, 1]}, {"a": 1, "b": 1}, values=[0, 8, 0])
        paths = question.write(folder)
        paths[1].write_text(paths[1].read_text().replace("torch.float32", dtype))
        return partition_files(*paths, model="m", batch_size=1, dtype=dtype)

    with tempfile.TemporaryDirectory() as folder:
        full, half = files("torch.float32", Path(folder)), files("torch.bfloat16", Path(folder))
    assert half.hops[1].seconds == full.hops[1].seconds / 2
    assert half.hops[1].bits == 16


def test_si_units_make_megabits_smaller_and_say_so():
    question = steady({"a": [1, 9], "b": [9, 1]}, {"a": 1, "b": 1}, values=[0, 8, 0])
    binary, decimal = question.plan(), question.plan(units="si")
    assert decimal.hops[1].seconds == pytest.approx(binary.hops[1].seconds * 2**20 / 1e6)
    assert "MB = 10^6" in table(decimal)
    assert "MB = 2^20" in table(binary)


@pytest.mark.parametrize(("batch_size", "seconds"), [(8, 10), (16, 14), (12, 12), (4, 5), (32, 28)])
def test_times_between_and_beyond_measured_batch_sizes(tmp_path, batch_size, seconds):
    paths = steady({"t": [10]}, {"t": 1}).write(tmp_path)
    rows = [{"batch_size": size, "dtype": "torch.float32", "time_s": [time]} for size, time in ((8, 10), (16, 14))]
    document = json.loads(paths[1].read_text())
    document["t"]["model_profiles"]["m"] = rows
    paths[1].write_text(json.dumps(document))
    assert partition_files(*paths, model="m", batch_size=batch_size, interpolate=True).interval_s == pytest.approx(
        seconds
    )
    if batch_size not in (8, 16):
        with refused(hpgo.errors.ClusterError, "invalid_cluster", "t", "m", "torch.float32") as raised:
            partition_files(*paths, model="m", batch_size=batch_size)
        assert "--interpolate" in raised.value.hint


def mixed_cluster(*, intra: float = 1e9, inter: float = 1e9, counts: tuple[int, ...] = (1, 1, 1)) -> hpgo.Cluster:
    from hpgo.hardware.cluster import Device, Link, Node

    nodes = tuple(
        Node(Device(f"d{index}", 1e9, speed), count, f"m{index}")
        for index, (speed, count) in enumerate(zip((1.0, 2.0, 4.0), counts, strict=True))
    )
    return hpgo.Cluster("mixed", nodes, Link(intra, intra), Link(inter, inter))


def test_profile_spreads_over_a_cluster_of_mixed_devices():
    profile = chain([1.0] * 7, 1.0, 8.0, backward=0.0, batch_size=4)
    plan = partition(profile, mixed_cluster())
    assert plan.interval_s == 1.0  # speeds 1, 2 and 4 take 1, 2 and 4 of the 7 layers
    assert sorted(stage.last - stage.first + 1 for stage in plan.stages) == [1, 2, 4]
    assert plan.batch_size == 4


def test_devices_of_one_machine_use_its_faster_links():
    profile = chain([1.0] * 4, 1e6, 8.0, backward=0.0)
    slow = partition(profile, mixed_cluster(inter=1e5, counts=(4, 1, 1)))
    assert all(":" in stage.hosts[0] for stage in slow.stages) or len(slow.stages) == 1


def test_pipeedge_files_read_as_profile_and_cluster_give_the_same_plan(tmp_path):
    question = steady({"t": [1.0, 2.0, 3.0, 4.0], "u": [2.0, 4.0, 6.0, 8.0]}, {"t": 2, "u": 1}, values=[0, 1, 2, 1, 0])
    paths = question.write(tmp_path)
    profile = pipeedge.read_profile(*paths[:2], model="m", device_type="t")
    cluster = pipeedge.read_cluster(*paths, model="m", device_type="t")
    assert profile.batch_sizes == (1,)
    assert [node.device.speed for node in cluster.nodes] == [1.0, 1.0, 0.5]
    both = partition(profile, cluster, batch_size=1)
    assert both.interval_s == question.plan().interval_s
    assert both.stages == question.plan().stages


def test_layers_that_load_data_take_no_time_unless_that_is_counted():
    profile = hpgo.Profile.chain(
        "toy", batch_size=2, forward_s=[5.0, 1.0, 1.0], backward_s=[0.0] * 3, activation_bytes=[1.0] * 3,
        parameter_bytes=[0.0, 8.0, 8.0], names=["Input", "linear", "linear"],
    )  # fmt: skip
    pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    ahead, counted = partition(profile, pair), partition(profile, pair, include_data_loading=True)
    assert (ahead.interval_s, ahead.loading_s) == (1.0, 5.0)
    assert (counted.interval_s, counted.loading_s) == (5.0, 0.0)
    assert "left out    5 s of loading data" in table(ahead)
    assert "left out" not in table(counted)
    assert partition(profile, pair, batch_size=4).loading_s == 10.0


def large() -> tuple[hpgo.Profile, hpgo.Cluster]:
    from hpgo.hardware.cluster import Device, Link, Node

    layers = 600
    wave = [1.0 + 0.5 * math.sin(index * 1.7) + 0.3 * math.sin(index * index) for index in range(layers)]
    profile = chain(wave, 1e6, 1e6, backward=0.0, name="large")
    nodes = tuple(
        Node(Device(f"d{kind}", 1e9, 1 + 0.37 * kind), 1, f"m{kind}-{index}")
        for kind in range(10) for index in range(12)
    )  # fmt: skip
    return profile, hpgo.Cluster("large", nodes, Link(1e9, 1e9), Link(1e9, 1e9))


def test_deadline_returns_the_best_plan_so_far_with_an_honest_gap():
    plan = partition(*large(), time_limit_s=0.3)
    assert plan.lower_bound <= plan.value
    assert plan.optimality_gap < 0.5
    assert "proven" in table(plan) or "above the best possible" in table(plan)


@pytest.mark.parametrize(
    ("objective", "options", "what"),
    [
        ("throughput", {}, r"; each takes at least (\S+) s between batches"),
        ("latency", {}, r"; each takes at least (\S+) s for a batch"),
        ("hosts", {"samples_per_s": 0.01}, r"; each takes at least (\d+) of the hosts"),
    ],
)
def test_a_deadline_before_any_plan_says_so_with_the_bound(objective, options, what):
    with pytest.raises(
        hpgo.errors.TimeLimitError, match=rf"^1e-09 s passed before there was any plan{what}$"
    ) as raised:
        partition(*large(), objective=objective, time_limit_s=1e-9, **options)
    assert "more time" in raised.value.hint
    bound = float(re.search(what, raised.value.message)[1])
    assert 0 < bound <= partition(*large(), objective=objective, time_limit_s=0.3, **options).value


def test_the_same_question_has_the_same_answer_whatever_the_threads(tmp_path):
    question = steady(
        {"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [2, 7, 1, 8, 2, 8, 1, 8]},
        {"a": 3, "b": 3},
        values=[3, 1, 4, 1, 5, 2, 6, 5, 3],
    )
    paths = question.write(tmp_path)
    script = "import sys, hpgo; print(hpgo.partition_files(*sys.argv[1:], model='m', batch_size=1).to_json())"
    answers = {
        subprocess.run(
            [sys.executable, "-c", script, *map(str, paths)],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True, text=True, check=True,
        ).stdout
        for threads in ("1", "4")
    }  # fmt: skip
    assert len(answers) == 1


def test_report_shows_every_stage_and_what_sets_the_pace():
    plan = steady({"t": [3, 1, 2]}, {"t": 2}, values=[0, 8, 8, 0]).plan()
    for text in (table(plan), explain(plan)):
        assert plan.limit in text or plan.limit.capitalize() in text
        assert "proven optimal" in text
    assert "this is the bottleneck" in explain(plan)
    assert svg(plan) == svg(plan)
    assert svg(plan).count('class="memory"') == len(plan.stages) + 1  # and one in the legend
    facts = json.loads(plan.to_json())
    assert facts["optimality_gap"] == 0
    assert facts["stages"][0]["utilization"] <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pins": ["h9=1"]}, "no host or type `h9`"),
        ({"pins": ["t-0"]}, "names no layers"),
        ({"pins": ["t-0=0-9"]}, "layers 1 to 2"),
        ({"exclude": ["t-0=x"]}, "not a range"),
        ({"bits": [64]}, "bits` is 64, but values have"),
        ({"bits": [8]}, "several bit widths"),
        ({"objective": "bits"}, "needs a throughput"),
        ({"objective": "speed"}, "no objective `speed`"),
        ({"samples_per_s": -1.0}, "throughput to reach is -1"),
        ({"max_replicas": 0}, "max_replicas is 0"),
        ({"time_limit_s": -1.0}, "time_limit_s is -1"),
        ({"units": "mb"}, "unknown units: `mb`"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options, words):
    with pytest.raises(hpgo.errors.ArgumentError, match=words) as raised:
        steady({"t": [1, 1]}, {"t": 2}).plan(**options)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ({"links": [{"between": ["t-0", "nobody"], "latency": 1}]}, ("invalid_cluster", "nobody")),
        ({"links": [{"between": ["t-0"], "latency": 1}]}, ("invalid_cluster", "between", "1")),
        ({"links": [{"from": "t-0", "to": "t-1", "latency": "1 mile"}]}, ("invalid_cluster", "latency", "1 mile")),
        ({"links": [{"from": "t-0", "to": "t-1", "speed": 1}]}, ("unknown_name", "speed")),
        ({"input": {"host": "t-0", "latency": 1}}, ("invalid_cluster", "input", "host")),
    ],
)
def test_mistakes_in_links_are_named(links, words):
    with refused(hpgo.errors.ClusterError, *words):
        steady({"t": [1, 1]}, {"t": 2}, links=links).plan()


def test_infeasible_memory_says_how_much_is_short_and_what_would_do():
    question = steady({"t": [1, 1, 1]}, {"t": 1}, memory_mb=[30, 30, 30])
    with refused(hpgo.errors.InfeasibleError, "infeasible", "26.0", "MiB") as raised:
        question.plan()
    assert "1 more host like `t` would do" in raised.value.hint
    question.hosts["t-1"] = "t"
    assert question.plan().stages


def has_plan(question: Question, allowed=lambda host, layer: True) -> bool:
    every = (question.parts(path) for path in question.paths(allowed))
    return any(parts is not None and max(*parts[0], *parts[1]) < math.inf for parts in every)


@MANY
@given(questions(), st.booleans(), st.data())
def test_what_does_not_fit_is_explained_by_the_constraint_that_is_the_cause(question, has_links, data):
    for kind in question.types.values():
        kind["mb"] = data.draw(st.integers(3, 12))
    if has_links:
        question.links = data.draw(link_files(sorted(question.hosts), sorted(question.types)))
    layers = len(question.memory_mb)
    bars = data.draw(st.lists(st.tuples(st.sampled_from(sorted(question.hosts)), st.integers(1, layers)), max_size=2))

    def allowed(host: str, layer: int) -> bool:
        return (host, layer + 1) not in bars

    try:
        question.plan(exclude=[f"{host}={layer}" for host, layer in bars])
    except hpgo.errors.InfeasibleError as error:
        assert_cause(question, allowed, error)
    else:
        assert has_plan(question, allowed)


def assert_cause(question: Question, allowed, error: hpgo.errors.InfeasibleError) -> None:
    message, hint = error.message, error.hint
    assert not has_plan(question, allowed)
    roomy = replace(question, types={name: kind | {"mb": 10**6} for name, kind in question.types.items()})
    number = re.match(r"layer (\d+) ", message)
    if number is not None and "may not run" in message:
        assert not any(allowed(host, int(number[1]) - 1) for host in question.hosts)
    elif number is not None:
        layer, count = int(number[1]) - 1, len(question.memory_mb)
        stages = [(first, end) for first in range(layer + 1) for end in range(layer + 1, count + 1)]
        may = [host for host in question.hosts if allowed(host, layer)]
        assert not any(question.fits(host, *stage) for host in may for stage in stages)
    elif "short by" in message:
        assert not any(True for _ in question.paths())
    elif "short of memory" in message:
        assert has_plan(roomy, allowed)
    else:
        assert "no way from the first layer to the last" in message
        assert not has_plan(roomy, allowed)
        assert has_plan(roomy) or "links" in message
        assert has_plan(replace(roomy, links={}, types=quick(roomy)), allowed) or "exclusions" in message
    if "no pins and exclusions" in hint:
        assert has_plan(question)
    if "no batches that wait" in hint:
        assert has_plan(replace(question, buffers=(0, 0)), allowed)
    more = re.match(r"(\d+) more hosts? like `(t\d)`.*would do", hint)
    if more is not None and not question.links and all(allowed(host, 0) for host in question.hosts):
        hosts = question.hosts | {f"more{at}": more[2] for at in range(int(more[1]))}
        assert len(hosts) > 6 or has_plan(replace(question, hosts=hosts), allowed)


def quick(question: Question) -> dict[str, dict]:
    return {name: kind | {"mbps": 10**6} for name, kind in question.types.items()}


def test_a_layer_that_fits_with_others_only_is_not_blamed():
    """What the fourth layer puts out is larger than the host; with the fifth it stays inside."""
    types = {"small": [1] * 5, "large": [1] * 5}
    question = steady(types, {"small": 2, "large": 1}, memory_mb=[6, 4, 1, 4, 6], values=[16, 1, 1, 1, 120, 1])
    question.types["small"]["mb"], question.types["large"]["mb"] = 10, 14
    assert any((stage.first, stage.last) == (4, 5) for stage in question.plan().stages)


@pytest.mark.parametrize("end", [{"host": "t-1"}, {"host": "t-0"}, {"bandwidth": 1e6, "latency": 0.05}])
def test_batches_that_wait_are_not_charged_to_the_first_stage(end):
    question = steady({"t": [1]}, {"t": 2}, memory_mb=[2], values=[16, 0], links={"input": end}, buffers=(2, 0))
    question.types["t"]["mb"] = 5  # 2 MB of layer and one batch of 2 MB
    assert question.plan().stages[0].memory_bytes == 4 * MEGA


def test_command_prints_table_json_and_schedule(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from hpgo.cli.partition import command

    steady({"t": [1, 2]}, {"t": 2}).write(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> str:
        result = CliRunner().invoke(command, ["-m", "m", "-b", "1", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "proven optimal" in call()
    assert json.loads(call("--json"))["interval_s"] == 2
    assert yaml.safe_load(call("--yaml", "--svg", "plan.svg")) == [{"t-0": [1, 1]}, {"t-1": [2, 2]}]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_progress_hears_the_best_value_and_the_bound() -> None:
    layers, hosts = 1_500, 100  # no two hosts alike: a second is not enough
    profile = hpgo.Profile.chain(
        "long",
        batch_size=1,
        forward_s=[1.0 + (3 * at % 5) / 7 for at in range(layers)],
        backward_s=[0.0] * layers,
        activation_bytes=[1e3] * layers,
        parameter_bytes=[1e3] * layers,
    )
    alike = hpgo.Cluster.of(nodes=hosts, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    nodes = tuple(
        replace(node, device=replace(node.device, speed=1 + (7 * at % 11) / 10, name=f"host {at}"))
        for at, node in enumerate(alike.nodes)
    )
    heard: list[tuple[float, float]] = []
    plan = hpgo.partition(
        profile,
        replace(alike, nodes=nodes),
        time_limit_s=1,
        progress=lambda best, bound: heard.append((best, bound)),
    )
    assert heard
    for best, bound in heard:
        assert plan.lower_bound <= plan.value <= best * (1 + 1e-9)
        assert bound <= plan.value * (1 + 1e-9)


PAGE = Path(__file__).parent.parent / "docs" / "partition.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def page_folder(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the page shows."""
    for block in blocks("yaml"):
        name, _, text = block.partition("\n")
        (tmp_path / name.removeprefix("# ")).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(command: str, folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("block", [block for block in blocks("console") if "PipeEdge's files" not in block])
def test_page_shows_what_the_command_prints(block, page_folder):
    command, _, printed = block.removeprefix("$ ").partition("\n")
    assert shell(command, page_folder) == printed


@pytest.mark.parametrize("block", [block for block in blocks("console") if "PipeEdge's files" in block])
def test_page_shows_pipeedges_example(block, reference, tmp_path):
    copies = {
        "models": "models",
        "device_types": "device_types",
        "devices_renamed": "devices",
        "devices": "devices_of_readme",
    }
    for source, target in copies.items():
        shutil.copy(reference / "pipeedge" / f"{source}.yml", tmp_path / f"{target}.yml")
    command, _, printed = block.removeprefix("$ ").partition("\n")
    assert shell(command, tmp_path) == printed


def test_python_examples_of_the_page_run(page_folder, capsys):
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    assert "nano-0" in capsys.readouterr().out


def test_picture_of_the_page_shows_the_schedule_that_the_page_prints():
    (printed,) = (block for block in blocks("console") if block.startswith("$ sched-pipeline   "))
    schedule = [stage.popitem() for stage in yaml.safe_load(printed.partition("\n")[2])]
    picture = (PAGE.parent / "images" / "partition.svg").read_text(encoding="utf-8")
    words = [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    hosts = [word for word in words if word.split(" ")[0] in dict(schedule)]
    assert [host.split(" ")[0] for host in hosts] == [host for host, _ in schedule]
    assert picture.count('class="memory"') == len(schedule) + 1  # and one in the legend
    assert any("1.549" in word for word in words)


def test_picture_of_the_page_is_what_the_command_draws(reference, tmp_path):
    files = [reference / "pipeedge" / f"{name}.yml" for name in ("models", "device_types", "devices_renamed")]
    plan = partition_files(*files, model="google/vit-base-patch16-224")
    assert svg(plan) == (PAGE.parent / "images" / "partition.svg").read_text(encoding="utf-8")


def test_a_time_limit_counts_what_a_large_cluster_takes_to_set_up():
    """A thousand machines are a million links."""
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("h100:1000")
    began_s = time.monotonic()
    plan = partition(profile, cluster, time_limit_s=2.0)
    assert plan.stages
    assert time.monotonic() - began_s < 6.0
