"""Laws of physics that every answer keeps, computed here anew; and that the product's own check finds false answers.

HPGO_LAWS_EXAMPLES sets how many random questions each law is tried on; `make laws` tries ten thousand.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import chance
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from natives import replace_method
from refusals import refused
from toys import chain

import hpgo
from hpgo import _core, compat
from hpgo.cli.main import group
from hpgo.llm import estimate
from hpgo.llm.comparison import changed, compare, neighbours
from hpgo.llm.stack import Stack
from hpgo.planning.planner import evaluate
from hpgo.show import comparison_report, run_report
from hpgo.timing import laws as run_laws
from hpgo.timing.breakdown import breakdown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

EXAMPLES = int(os.environ.get("HPGO_LAWS_EXAMPLES", "100"))
QUESTIONS = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 100)
SEEDS = st.integers(0, 2**48)
ONE_STAGE = ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential")
SEVERAL = (
    "interleaved", "interleaved_overlap", "looped_bfs", "hanayo", "interleaved_zb", "zb_v", "v_half", "v_min",
    "dualpipe_v",
)  # fmt: skip
NEGATIVE = re.compile(r"(?:^|[\s(])-(?:[\d.e+-]+ (?:s|ms|us|ns)\b|0(?:\.0+)? %)")
"""A negative time, or minus nothing, in text."""
LESS = 1 - 1e-9
answered: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _summary(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if capture is not None and "HPGO_LAWS_EXAMPLES" in os.environ:
        with capture.global_and_fixture_disabled():
            sys.stdout.write("\n")
            for kind, count in sorted(answered.items()):
                sys.stdout.write(
                    f"{kind}: {count:,} answers of {EXAMPLES:,} questions checked; failures are listed below\n"
                )


# --- Laws, computed from what was asked -------------------------------------------------------------------------------


def at(sizes: tuple[int, ...], values: tuple[float, ...], samples: int) -> float:
    """A measure for so many samples: on a line between two that were measured, in proportion beyond."""
    if samples <= sizes[0]:
        return values[0] * samples / sizes[0]
    if samples >= sizes[-1]:
        return values[-1] * samples / sizes[-1]
    above = next(index for index, size in enumerate(sizes) if size >= samples)
    part = (samples - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return values[above - 1] + part * (values[above] - values[above - 1])


def seconds(profile: hpgo.Profile, layers: Iterable[str], samples: int) -> tuple[float, float]:
    known = {layer.id: layer for layer in profile.without_loading().layers}
    rows = [known[layer] for layer in layers]
    sizes = profile.batch_sizes
    return tuple(sum(at(sizes, getattr(row, name), samples) for row in rows) for name in ("forward_s", "backward_s"))


def lawful(profile: hpgo.Profile, cluster: hpgo.Cluster, plan: hpgo.Plan) -> None:
    """Raises AssertionError unless the plan keeps the laws, given the profile and the cluster that it was made for."""
    speeds = [node.device.speed for node in cluster.nodes for _ in range(node.count)]
    weights = {layer.id: layer.parameter_bytes for layer in profile.layers}
    count = plan.global_batch_size // plan.pipeline_micro_batch_size
    assert count * plan.pipeline_micro_batch_size == plan.global_batch_size
    listed = [layer for stage in plan.stages for layer in stage.layers]
    assert sorted(listed) == sorted(weights)
    place = {layer: number for number, layer in enumerate(listed)}
    assert all(place[start] < place[end] for start, end in profile.edges)
    whole_s = sum(seconds(profile, listed, plan.pipeline_micro_batch_size))
    busy_s = dict.fromkeys(range(len(speeds)), 0.0)
    held = dict.fromkeys(range(len(speeds)), 0.0)
    done_s = 0.0  # what all shares take on the reference device
    for number, stage in enumerate(plan.stages):
        share = math.ceil(plan.pipeline_micro_batch_size / len(stage.devices))
        assert stage.samples_per_replica == share
        forward_s, backward_s = seconds(profile, stage.layers, share)
        slowest = min(speeds[device] for device in stage.devices)
        again_s = forward_s if stage.recompute else 0.0
        near = {"rel": 1e-9, "abs": 1e-9 * whole_s / min(speeds)}
        assert stage.forward_s == pytest.approx(forward_s / slowest, **near), number
        assert stage.backward_s == pytest.approx((backward_s + again_s) / slowest, **near), number
        for name in (
            "forward_s",
            "backward_s",
            "transfer_s",
            "transfer_busy_s",
            "grad_reduce_s",
            "exposed_grad_reduce_s",
        ):
            assert 0 <= getattr(stage, name) < math.inf
        memory = stage.memory
        columns = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
        assert min(getattr(memory, name) for name in columns) >= 0
        assert memory.total_bytes == pytest.approx(sum(getattr(memory, name) for name in columns))
        done_s += len(stage.devices) * (forward_s + backward_s)
        for device in stage.devices:
            busy_s[device] += count * (forward_s + backward_s + again_s) / slowest
            held[device] += sum(weights[layer] for layer in stage.layers)
    assert plan.step_s >= max(busy_s.values()) * LESS
    assert 0 <= plan.bubble <= 1
    assert plan.one_device_step_s == pytest.approx(count * whole_s)
    used = {device for stage in plan.stages for device in stage.devices}
    if plan.step_s:
        cheaper = max(1.0, whole_s / done_s) if done_s else 1.0
        assert plan.speed_up * LESS <= sum(speeds[device] for device in used) * cheaper
    for found in plan.groups:
        assert found.memory.total_bytes >= held[found.devices[0]] * LESS
    assert (plan.lower_bound_s or 0.0) * LESS <= plan.step_s or not plan.fits
    rows = plan.program().stages
    assert all(sum(map(len, one.rows)) == plan.pipeline_micro_batch_size for one in rows)
    assert not NEGATIVE.search(str(plan))
    for row in (*plan.alternatives, *plan.schedules):
        if row.plan is not None:
            lawful(profile, cluster, row.plan)
        if row.step_s is not None and plan.schedules:
            assert plan.step_s * LESS <= row.step_s


def lists_what_it_prices(plan: hpgo.Plan) -> None:
    """The layers of a plan stand in one order, whoever makes or reads it."""
    again = hpgo.Plan.from_json(plan.to_json())
    order = [stage.layers for stage in plan.stages]
    assert [stage.layers for stage in again.stages] == order
    assert [stage.layers for stage in again.program().stages] == order
    priced = plan.reevaluate()
    assert [stage.layers for stage in priced.stages] == order
    assert priced.step_s == plan.step_s
    document = json.loads(plan.to_json())
    for stage in document["stages"]:
        stage["layers"].reverse()
    assert [stage.layers for stage in hpgo.Plan.from_json(json.dumps(document)).stages] == order
    alone = evaluate(
        plan.assumed.profile, plan.assumed.cluster, [([layer for row in order for layer in row], [0])],
        global_batch_size=plan.global_batch_size, pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
        min_samples_per_replica=1,
    )  # fmt: skip
    place = {layer: number for number, layer in enumerate(alone.stages[0].layers)}
    assert all(sorted(row, key=place.__getitem__) == list(row) for row in order)


def split(random: Random, profile: hpgo.Profile) -> hpgo.Profile:
    """Tells the two passes of each backward pass, which take together as long as it or longer."""
    part, cost = random.uniform(0, 1), random.choice([0.0, 0.0, 0.2])
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                input_gradient_s=tuple(part * one_s for one_s in layer.backward_s),
                weight_gradient_s=tuple((1 - part + cost) * one_s for one_s in layer.backward_s),
            )
            for layer in profile.layers
        ),
    )


# --- Random questions -------------------------------------------------------------------------------------------------


def question(random: Random, layers: tuple[int, int] = (2, 7)) -> chance.Question:
    counts = [random.randint(1, 3) for _ in range(random.randint(1, 2))]
    asked = chance.question(random, counts, layers=random.randint(*layers))
    return replace(asked, profile=split(random, asked.profile)) if random.random() < 0.5 else asked


@QUESTIONS
@given(SEEDS)
@example(193)  # broke a law once
def test_plans_of_every_schedule_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    asked = replace(question(random), schedule=random.choice(ONE_STAGE + SEVERAL))
    try:
        plan = asked.plan()
    except hpgo.errors.ArgumentError:  # no micro-batch can be shared so
        return
    if plan is not None:
        lawful(asked.profile, asked.cluster, plan)
        lists_what_it_prices(plan)
        answered["plan"] += 1


@QUESTIONS
@given(SEEDS)
def test_plans_of_the_best_schedule_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    asked = replace(question(random, (2, 4)), schedule="auto")
    try:
        plan = asked.plan()
    except hpgo.errors.ArgumentError:
        return
    if plan is not None:
        lawful(asked.profile, asked.cluster, plan)
        answered["plan, auto"] += 1


@QUESTIONS
@given(SEEDS)
@example(12053)  # broke a law once
def test_prices_of_given_stages_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    case = chance.case(random, counts=(2, 9), batch_sizes=[(1,), (1, 2, 4), (2, 8)], halves=0.0)
    profile = split(random, case.profile) if random.random() < 0.5 else case.profile
    name, stages = random.choice(ONE_STAGE), case.stages
    if random.random() < 0.5 and len(profile.layers) >= 2 * len(stages):
        ids = [layer for layers, _ in stages for layer in layers]
        parts = chance.parts(random, ids, 2 * len(stages))
        devices = [devices for _, devices in stages]
        name = random.choice(SEVERAL)
        turn = devices[::-1] if name in {"zb_v", "v_half", "v_min", "dualpipe_v", "hanayo"} else devices
        stages = list(zip(parts, [*devices, *turn], strict=True))
    minimum = case.minimum(1)
    try:
        plan = evaluate(
            profile, case.cluster, stages, global_batch_size=minimum * random.randint(1, 5),
            pipeline_micro_batch_size=minimum,
            min_samples_per_replica=1, schedule=name, recompute=random.random() < 0.3, overlap=random.random() < 0.5,
        )  # fmt: skip
    except (hpgo.errors.ArgumentError, hpgo.errors.ScheduleError):  # shapes that a schedule doesn't run
        return
    lawful(profile, case.cluster, plan)
    lists_what_it_prices(plan)
    answered["evaluate"] += 1


@QUESTIONS
@given(SEEDS)
@example(113743722)  # broke a law once
def test_chain_plans_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    branching = random.random() < 0.5
    profile = chance.profile(random, batch_sizes=(1, 4), count=random.randint(1, 8), branching=branching, free=0.2)
    cluster = chance.cluster(random)
    size = random.randint(1, 6)
    objective = random.choice(["throughput", "latency", "hosts"])
    try:
        plan = hpgo.partition(
            profile, cluster, batch_size=size, objective=objective, max_replicas=random.choice([1, 2]),
            samples_per_s=1e-3 if objective == "hosts" else None,
        )  # fmt: skip
    except hpgo.errors.InfeasibleError:
        return
    speed = {node.device.name: node.device.speed for node in cluster.nodes}
    forward_s, _ = seconds(profile, [layer.id for layer in profile.layers], size)
    computed_s = sum(stage.compute_s * speed[stage.device_type] for stage in plan.stages)
    assert computed_s == pytest.approx(forward_s, rel=1e-9, abs=1e-12)
    hosts = [host for stage in plan.stages for host in stage.hosts]
    assert len(set(hosts)) == len(hosts) <= cluster.devices
    for stage in plan.stages:
        assert stage.interval_s * len(stage.hosts) == pytest.approx(stage.compute_s)
        assert 0 <= plan.utilization(stage) <= 1 + 1e-9
        assert 0 <= stage.memory_bytes <= stage.host_memory_bytes
    parts = [*plan.stages, *plan.hops]
    assert plan.interval_s == pytest.approx(max(part.interval_s for part in parts))
    passed_s = sum(stage.compute_s for stage in plan.stages) + sum(hop.seconds for hop in plan.hops)
    assert plan.latency_s == pytest.approx(passed_s)
    assert plan.lower_bound * LESS <= plan.value
    speeds = sum(node.device.speed * node.count for node in cluster.nodes)
    assert plan.interval_s * speeds >= forward_s * LESS
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    assert sum(stage.memory_bytes for stage in plan.stages) + 0.1 >= LESS * weights  # in whole 1/1024 of a byte
    assert [stage.first for stage in plan.stages] == [1, *(stage.last + 1 for stage in plan.stages[:-1])]
    assert plan.stages[-1].last == len(profile.layers)
    answered["partition"] += 1


def model(random: Random) -> hpgo.Transformer:
    layers, heads = random.choice([2, 4, 6, 8, 12]), random.choice([4, 8])
    experts = random.choice([0, 0, 4, 8])
    return hpgo.Transformer(
        layers=layers, hidden=heads * 64, heads=heads, kv_heads=random.choice([heads, heads // 2]), head_dim=64,
        ffn=random.choice([1024, 3072]), vocab=random.choice([1000, 32000]), tied=random.random() < 0.5,
        experts=experts, experts_per_token=min(experts, 2), expert_ffn=512 if experts else 0,
        window=256 if random.random() < 0.3 else 0, window_layers=tuple(range(layers)),
    )  # fmt: skip


def degrees(random: Random) -> dict[str, Any]:
    vpp = random.choice([1, 1, 2, 3])
    return {
        "tp": random.choice([1, 2, 4]), "pp": random.choice([1, 2, 4]), "vpp": vpp, "cp": random.choice([1, 1, 2]),
        "ep": random.choice([1, 1, 2, 4]), "zero_stage": random.choice([0, 1, 2, 3]),
        "micro_batch_size": random.choice([1, 2]), "recompute": random.choice(["none", "selective", "full"]),
        "pp_schedule": random.choice(["1f1b", "1f1b", "zb_v" if vpp == 2 else "interleaved_zb"]),
        "overlap_dp_comm": random.random() < 0.5,
    }  # fmt: skip


def lawful_price(shape: hpgo.Transformer, price: hpgo.LlmEstimate) -> None:
    config = price.parallelism
    assert config.tp * config.cp * config.pp * config.dp == price.gpus
    assert price.micro_batches * config.micro_batch_size * config.dp == price.global_batch_size
    assert min(term for _, term in price.time_by_term_s) >= 0
    assert math.fsum(term for _, term in price.time_by_term_s) == pytest.approx(price.step_s, rel=1e-9)
    assert price.bound_s * LESS <= price.step_s
    for rank in price.stages:
        assert price.step_s >= price.micro_batches * (rank.forward_s + rank.backward_s) * LESS
        assert rank.peak_bytes == pytest.approx(sum(size for _, size in rank.memory_bytes))
        assert min(size for _, size in rank.memory_bytes) >= 0
    assert 0 < price.utilization <= 1
    held = sum(rank.peak_bytes for rank in price.stages) * price.gpus / config.pp
    assert held >= 2 * shape.parameters * LESS
    layers = sorted(layer for rank in price.stages for start, end in rank.layers for layer in range(start, end))
    assert layers == list(range(shape.layers))
    assert not NEGATIVE.search("\n".join(price_lines(price)))


def price_lines(price: hpgo.LlmEstimate) -> list[str]:
    from hpgo.show.llm_report import lines

    return lines(price)


@QUESTIONS
@given(SEEDS)
def test_prices_of_transformers_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    shape = model(random)
    cluster = hpgo.Cluster.preset(random.choice(["h100:1", "h100:2", "a100:2"]))
    ask = {"global_batch_size": random.choice([8, 16, 32, 64]), "seq_length": random.choice([512, 4096])}
    prices = []
    for _ in range(30):
        try:
            prices.append(hpgo.estimate_llm(shape, cluster, **ask, **degrees(random)))
        except hpgo.errors.ArgumentError:  # degrees that do not divide
            continue
        lawful_price(shape, prices[-1])
        if len(prices) == 2:
            break
    for price in prices[:1]:  # what `hpgo llm explain` prints of a configuration beside another and itself
        others = [price, *prices[1:]]
        for changes in list(neighbours(price.parallelism))[:3]:
            try:
                way = changed(price.parallelism, changes)
                others.append(estimate.estimate_on(shape, cluster, way, Stack.named("default"), None, **ask))
            except hpgo.errors.ArgumentError:
                continue
        for other in others:
            found = compare(price, other)
            assert sum(there - here for _, here, there in found.time_by_term_s) == pytest.approx(
                found.longer_s, abs=1e-9 * price.step_s
            )
            for line in comparison_report.lines(found):
                # A difference that a reader sees is not rounding: less than 1e-9 of a second, of steps of milliseconds.
                assert not re.search(r"e-\d\d ns", line), line
    answered["price"] += len(prices)


@QUESTIONS
@given(SEEDS)
def test_simulated_runs_keep_the_laws(seed: int) -> None:
    random = Random(seed)
    family = random.choice(hpgo.schedules())
    try:
        schedule = hpgo.schedule(
            family.name, ranks=random.choice([1, 2, 3, 4, 6]), micro_batches=random.choice([1, 2, 4, 6, 8, 12])
        )
    except (hpgo.errors.ArgumentError, hpgo.errors.ScheduleError):
        return

    def each(low: float, high: float) -> list[float]:
        return [
            random.choice([0.0, random.uniform(low, high), random.uniform(low, high)])
            for _ in range(schedule.stages_per_pipeline)
        ]

    forward_s, inputs_s, weights_s = each(0.01, 1), each(0.01, 1), each(0.01, 1)
    backward_s = [one_s + other_s for one_s, other_s in zip(inputs_s, weights_s, strict=True)]
    steps = random.choice([1, 1, 2])
    timeline = hpgo.simulate(
        schedule, forward_s=forward_s, backward_s=backward_s, input_gradient_s=inputs_s, weight_gradient_s=weights_s,
        transfer_s=random.choice([0.0, 0.1]), latency_s=random.choice([0.0, 0.05]),
        gradient_sync_s=random.choice([0.0, 0.3]), optimizer_s=random.choice([0.0, 0.1]), iterations=steps,
        communication=random.choice(["link", "latency"]),
        memory=hpgo.StageBytes(weights_bytes=7.0, activation_bytes=2.0),
    )  # fmt: skip
    stage_of = [stage % schedule.stages_per_pipeline for stage in range(schedule.stages)]
    work_s = [0.0] * schedule.ranks
    for rank, actions in enumerate(schedule.action_lists):
        for action in actions:
            for stage, kind in re.findall(r"(\d+)([FBIW])\d+", action):
                column = {"F": forward_s, "B": backward_s, "I": inputs_s, "W": weights_s}[kind]
                work_s[rank] += steps * column[stage_of[int(stage)]]
    found = timeline.measures
    near = {"rel": 1e-9, "abs": 1e-9 * timeline.makespan_s}
    assert found.busy_s == pytest.approx(tuple(work_s), **near)
    assert timeline.makespan_s >= max(work_s) * LESS
    total_s = schedule.ranks * timeline.makespan_s
    for share in (found.idle_over_total, found.idle_over_busiest):
        assert 0 <= share <= 1
    assert sum(work_s) + sum(found.idle_by_cause_s) == pytest.approx(total_s, **near)
    assert (timeline.start_s >= 0).all()
    assert (timeline.end_s >= timeline.start_s).all()
    assert all(peak >= 7.0 for peak in found.peak_memory_bytes or ())
    text = [" ".join(row) for _, rows in (run_report.measures(timeline), run_report.ranks(timeline)) for row in rows]
    assert not any(NEGATIVE.search(line) for line in text)
    assert hpgo.Timeline.from_json(timeline.to_json()).measures == found
    answered["simulate"] += 1


@QUESTIONS
@given(SEEDS)
def test_both_columns_of_the_report_of_a_run_keep_the_laws(seed: int) -> None:
    """`hpgo run` sets a predicted breakdown beside a measured one; one process emulates its device here."""
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    random = Random(seed)
    took_s = [random.uniform(1e-5, 1e-4) for _ in range(random.randint(1, 3))]
    one = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=10)
    plan = evaluate(
        chain(took_s, [1e3] * len(took_s), [1e3] * len(took_s)), one, [(len(took_s), [0])], global_batch_size=3
    )
    with hpgo.runtime.Emulation(plan) as emulation:
        step_s = emulation.step()
        measured = emulation.timeline(emulation.usual_step())
    work_s = plan.micro_batches * sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    assert step_s >= work_s * LESS
    for timeline in (plan.timeline(), measured):
        step = breakdown(timeline)
        assert step.step_s >= work_s * LESS
        assert 0 <= step.bubble <= 1
        passes_s = [one_s for column in (step.forward_s, step.backward_s) for one_s in column if one_s is not None]
        assert min(passes_s) >= 0
        assert sum(passes_s) * plan.micro_batches <= step.step_s * (1 + 1e-9)
        found = timeline.measures
        assert max(found.busy_s) <= found.makespan_s * (1 + 1e-9)
        assert all(0 <= share <= 1 for share in (found.idle_over_total, found.idle_over_busiest))
    assert breakdown(plan.timeline()).bubble == pytest.approx(plan.bubble, abs=1e-9)
    answered["run report"] += 1


# --- The product's own check ------------------------------------------------------------------------------------------


def changed_record(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    def false(own: Callable[..., Any], *given: Any) -> Any:
        found = own(*given)
        change(found[0] if isinstance(found, tuple) else found)
        return found

    return false


def stage_of(**changes: float) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        price = record["stages"][0]["cost"]
        for name, factor in changes.items():
            where = price["memory"] if name.endswith("bytes") and name in price["memory"] else price
            where[name] = type(where[name])(where[name] * factor)

    return change


TOY = chain([1.0, 2.0, 1.0, 2.0], [1e6] * 4, [1e8] * 4)
PAIR = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory="64 GB")
STAGES = [(2, [0]), (2, [1])]
FALSE_RECORDS = {
    "step_covers_work": lambda record: record.update(step_s=record["step_s"] / 3),
    "stage_times_are_their_layers": stage_of(forward_s=0.5),
    "devices_hold_their_weights": stage_of(weights_bytes=0.5),
    "shares_make_the_micro_batch": stage_of(samples_per_replica=2),
    "numbers_are_lengths": stage_of(exposed_grad_reduce_s=-1, transfer_s=-1),
    "stages_hold_the_model": lambda record: record["stages"][0]["layers"].reverse(),
}


@pytest.mark.parametrize("law", FALSE_RECORDS)
def test_a_false_price_of_given_stages_is_an_internal_error_that_names_the_law(
    monkeypatch: pytest.MonkeyPatch, law: str
) -> None:
    assert evaluate(TOY, PAIR, STAGES, global_batch_size=4).step_s > 0
    replace_method(monkeypatch, "evaluate", changed_record(FALSE_RECORDS[law]))
    with refused(hpgo.errors.InternalError, "broken_law", law=law):
        evaluate(TOY, PAIR, STAGES, global_batch_size=4)


def test_a_false_step_or_bound_of_the_search_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def false_bound(own: Callable[..., Any], *given: Any) -> Any:
        found, facts = own(*given)
        return found, facts | {"lower_bound_s": found["step_s"] * 1.01}

    with monkeypatch.context() as patch:
        replace_method(patch, "plan", false_bound)
        with refused(hpgo.errors.InternalError, "broken_law", law="bound_is_below_step"):
            hpgo.plan(TOY, PAIR, global_batch_size=4)
    replace_method(monkeypatch, "plan", changed_record(FALSE_RECORDS["step_covers_work"]))
    with pytest.raises(hpgo.errors.InternalError):
        hpgo.plan(TOY, PAIR, global_batch_size=4)


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved", "auto"])
def test_a_false_step_or_bound_of_any_other_schedule_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    def false_bounds(own: Callable[..., Any], *given: Any) -> Any:
        tried, stopped = own(*given)
        for each in tried:
            if each["plan"] is not None:
                each["search"]["lower_bound_s"] = each["plan"]["step_s"] * 1.01
        return tried, stopped

    def false_steps(own: Callable[..., Any], *given: Any) -> Any:
        tried, stopped = own(*given)
        for each in tried:
            if each["plan"] is not None:
                FALSE_RECORDS["step_covers_work"](each["plan"])
        return tried, stopped

    with monkeypatch.context() as patch:
        replace_method(patch, "search", false_bounds)
        with refused(hpgo.errors.InternalError, "broken_law", law="bound_is_below_step"):
            hpgo.plan(TOY, PAIR, global_batch_size=4, schedule=schedule)
    replace_method(monkeypatch, "search", false_steps)
    with pytest.raises(hpgo.errors.InternalError):
        hpgo.plan(TOY, PAIR, global_batch_size=4, schedule=schedule)


def test_the_command_line_names_the_law_and_prints_no_false_number(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    hpgo.write_profile(TOY, tmp_path / "toy.yaml")
    replace_method(monkeypatch, "plan", changed_record(lambda record: record.update(step_s=0.12345)))
    shown = CliRunner().invoke(group, ["plan", str(tmp_path / "toy.yaml"), "--cluster", "dapple-b", "-b", "4"])
    assert isinstance(shown.exception, hpgo.errors.InternalError)
    assert "0.1234" not in f"{shown.output}{shown.exception}"
    assert "123.4" not in f"{shown.output}{shown.exception}"
    assert "report it" in shown.exception.hint


def test_a_false_price_of_a_transformer_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def price() -> hpgo.LlmEstimate:
        return hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=2, pp=2)

    step_s = price().step_s
    for factor, law in (
        (0.3, "estimate_covers_work"),
        (-1, "estimate_numbers_are_lengths|step_s of an estimate|step_s"),
    ):
        monkeypatch.setattr(estimate, "simulated_step_s", lambda _, factor=factor: factor * step_s)
        with pytest.raises(hpgo.errors.HpgoError, match=law):
            price()
    monkeypatch.undo()
    monkeypatch.setattr(estimate, "_seconds", lambda stages, rank, step_s: (("linear", step_s / 2),))
    with pytest.raises(hpgo.errors.InternalError, match="terms_make_the_step"):
        price()
    monkeypatch.undo()
    monkeypatch.setattr(estimate, "stage_memory", lambda context, held: {"weights": 1e6})
    with pytest.raises(hpgo.errors.InternalError, match="ranks_hold_the_model"):
        price()
    monkeypatch.undo()
    monkeypatch.setattr(estimate, "model_flop", lambda *_: 1e20)
    with pytest.raises(hpgo.errors.InternalError, match="utilization_is_a_share"):
        price()


CHAIN_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "value_is_above_bound": lambda found: found.update(lower_bound=found["value"] * 2),
    "interval_is_the_longest": lambda found: found.update(interval_s=found["interval_s"] / 2),
    "latency_is_the_sum": lambda found: found.update(latency_s=found["latency_s"] / 2),
    "hosts_hold_their_weights": lambda found: found["stages"][0].update(memory_bytes=1.0),
    "hosts_hold_their_stages": lambda found: found["stages"][0].update(memory_bytes=1e15),
    "chain_numbers_are_lengths": lambda found: found["hops"][0].update(seconds=-1.0),
    "stages_follow_each_other": lambda found: found["stages"][0].update(first=1),
}


@pytest.mark.parametrize("law", CHAIN_FAULTS)
def test_a_false_chain_plan_is_an_internal_error(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    assert hpgo.partition(TOY, PAIR).interval_s > 0
    false = partial(changed_record(CHAIN_FAULTS[law]), _core.partition_chain)
    monkeypatch.setattr(_core, "partition_chain", false)
    with refused(hpgo.errors.InternalError, "broken_law", law=law):
        hpgo.partition(TOY, PAIR)


def test_a_false_run_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    timeline = hpgo.simulate(schedule)
    own = _core.simulate

    class Short:
        """A simulation that claims to end early."""

        def __init__(self, *given: Any) -> None:
            self.own = own(*given)
            self.makespan_s = self.own.makespan_s / 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

    monkeypatch.setattr(_core, "simulate", Short)
    with refused(hpgo.errors.InternalError, "broken_law", "makespan_covers_work"):
        hpgo.simulate(schedule)
    found = timeline.measures
    for law, changes in {
        "measures_are_lengths": {"busy_s": (-1.0, 12.0)},
        "ranks_are_busy_within_the_run": {"busy_s": (99.0, 12.0)},
        "idle_time_is_a_share": {"idle_over_total": -0.2},
        "causes_make_the_idle_time": {"idle_by_cause_s": (9.0,) * 5},
    }.items():
        with pytest.raises(hpgo.errors.InternalError, match=law):
            run_laws.checked("1f1b", replace(found, **changes))


def test_pairs_and_times_of_single_micro_batches_count_as_work_of_a_rank() -> None:
    schedule = hpgo.schedule("dualpipe_v", ranks=2, micro_batches=4)
    forward_s = [[0.1 * (1 + row + column) for column in range(4)] for row in range(4)]
    apart = hpgo.simulate(schedule, forward_s=forward_s)
    together = hpgo.simulate(schedule, forward_s=forward_s, overlapped_s=0.5)
    assert apart.measures.idle_over_total >= 0
    assert together.measures.idle_over_total >= 0


@pytest.mark.parametrize(
    ("speed_up", "stages", "law"),
    [
        (16.5, [(0, 3, 1, list(range(16)))], "original_speed_up_is_possible"),
        (-0.1, [(0, 3, 1, list(range(16)))], "original_speed_up_is_possible"),
        (2.5, [(0, 1, 1, [0]), (1, 3, 1, [1])], "original_speed_up_is_possible"),
        (1.5, [(0, 1, 1, [0]), (1, 3, 1, [0])], "original_stages_follow_each_other"),
        (1.5, [(0, 1, 1, [0]), (1, 3, 1, [16])], "original_stages_follow_each_other"),
        (1.5, [(0, 1, 1, [0]), (0, 3, 1, [1])], "original_stages_follow_each_other"),
        (1.5, [(0, 1, 1, [0]), (1, 2, 1, [1])], "original_stages_follow_each_other"),
    ],
)
def test_a_false_answer_of_the_original_planner_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, speed_up: float, stages: list[Any], law: str
) -> None:
    conductor = compat.Conductor(compat.model_of(TOY, 8), compat.devices_from_seps([8, 16]))
    assert len(conductor.m.layers) == 4
    assert conductor.py_orchestrate()[0] > 0
    monkeypatch.setattr(_core, "legacy_plans", lambda *_: [(speed_up, stages, 1)])
    with refused(hpgo.errors.InternalError, "broken_law", law=law):
        conductor.py_orchestrate()


def test_false_columns_of_the_original_guide_are_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = compat.Conductor(compat.model_of(TOY, 8), compat.devices_from_seps([2]))
    assert compat.columns(conductor.m, conductor.d).no_overlap <= 2
    monkeypatch.setattr(_core, "legacy_columns", lambda *_: (1.5, None, 2.5))
    with refused(hpgo.errors.InternalError, "broken_law", "original_speed_up_is_possible"):
        compat.columns(conductor.m, conductor.d)


FILE_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "step_covers_work": lambda document: document.update(step_s=document["step_s"] / 3),
    "bound_is_below_step": lambda document: document.update(lower_bound_s=document["step_s"] * 2),
    "shares_make_the_micro_batch": lambda document: document["stages"][0].update(samples_per_replica=7),
    "stages_hold_the_model": lambda document: document["stages"][0]["layers"].pop(),
}


@pytest.mark.parametrize("law", FILE_FAULTS)
def test_a_plan_file_with_impossible_numbers_is_the_users_to_mend(law: str) -> None:
    document = json.loads(hpgo.plan(TOY, PAIR, global_batch_size=4).to_json())
    hpgo.Plan.from_json(json.dumps(document))
    FILE_FAULTS[law](document)
    with refused(hpgo.errors.ArgumentError, "broken_law", law=law) as raised:
        hpgo.Plan.from_json(json.dumps(document), source="plan.json")
    assert raised.value.hint


def test_files_of_chain_plans_and_of_runs_with_impossible_numbers_are_refused() -> None:
    document = json.loads(hpgo.partition(TOY, PAIR).to_json())
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "x", "ChainPlan"):
        hpgo.ChainPlan.from_json(json.dumps(document | {"objective": "x"}))
    document["lower_bound"] = 1e9
    with refused(hpgo.errors.ArgumentError, "broken_law", "value_is_above_bound"):
        hpgo.ChainPlan.from_json(json.dumps(document))
    run = json.loads(hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4)).to_json())
    run["measures" if "measures" in run else "idle_over_total"] = (
        run["measures"] | {"idle_over_total": 1.5} if "measures" in run else 1.5
    )
    with refused(hpgo.errors.ArgumentError, "broken_law", "idle_time_is_a_share"):
        hpgo.Timeline.from_json(json.dumps(run))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "interleaved_zb", "auto"])
def test_passes_that_do_not_add_up_make_no_lawless_plan(schedule: str) -> None:
    layers = tuple(replace(layer, input_gradient_s=(0.01,), weight_gradient_s=(0.01,)) for layer in TOY.layers)
    profile = replace(TOY, layers=layers)
    try:
        plan = hpgo.plan(profile, PAIR, global_batch_size=4, schedule=schedule)
    except hpgo.errors.HpgoError:
        return
    lawful(profile, PAIR, plan)


def test_layers_are_listed_in_the_order_that_is_priced_under_every_schedule() -> None:
    names = ("s", "a", "b", "t", "u", "v")
    took_s, weights = (1e-3, 1e-3, 0.4, 1e-3, 1e-3, 1e-3), (0, 1e8, 0, 0, 0, 0)
    layers = [
        hpgo.Layer(name, name, (one_s / 2,), (one_s,), (1e3,), size)
        for name, one_s, size in zip(names, took_s, weights, strict=True)
    ]
    edges = (("s", "a"), ("s", "b"), ("a", "t"), ("b", "t"), ("t", "u"), ("u", "v"))
    profile = hpgo.Profile("diamond", (1,), tuple(layers), edges)
    trio = hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=8)
    listed = set()
    for first in (["s", "a", "b"], ["s", "b", "a"]):
        several = [(first, [0, 1]), (["t"], [2]), (["u"], [0, 1]), (["v"], [2])]
        for schedule, stages in (("interleaved", several), ("1f1b", [(first, [0, 1]), (["t", "u", "v"], [2])])):
            plan = evaluate(profile, trio, stages, global_batch_size=4, pipeline_micro_batch_size=2, schedule=schedule)
            lists_what_it_prices(plan)
            listed.add((plan.stages[0].layers, plan.stages[0].exposed_grad_reduce_s))
            assert plan.for_rank(0).stages[0].layers == plan.stages[0].layers
    assert listed == {(("s", "b", "a"), 0.0)} or len(listed) == 1


def test_the_page_on_proofs_lists_every_law() -> None:
    from pathlib import Path

    from hpgo.planning import laws as plan_laws

    page = (Path(__file__).parent.parent / "docs/proofs.md").read_text(encoding="utf-8")
    known = (*plan_laws.PLAN_LAWS, *plan_laws.ESTIMATE_LAWS, *plan_laws.CHAIN_LAWS)
    known += (*plan_laws.ORIGINAL_LAWS, *run_laws.RUN_LAWS)
    alone = (plan_laws.ranks_hold_the_model, plan_laws.hosts_hold_their_weights)
    alone += (run_laws.makespan_covers_work, run_laws.causes_make_the_idle_time)
    assert [law.__name__ for law in (*known, *alone) if f"`{law.__name__}`" not in page] == []


def test_layers_without_time_at_the_size_of_a_share_allow_any_speed_up() -> None:
    layers = (
        hpgo.Layer("a", "a", (0.0, 0.0), (0.0, 1.0), (1.0, 1.0), 1.0),
        hpgo.Layer("b", "b", (0.0, 0.0), (1.0, 0.0), (1.0, 1.0), 1.0),
    )
    profile = hpgo.Profile("uneven", (2, 3), layers, (("a", "b"),))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=100, memory="1 GB")
    plan = hpgo.plan(profile, cluster, global_batch_size=4)
    assert plan.speed_up > plan.devices
