"""Inference: outputs are the whole model's bit for bit, in order, with few micro-batches under way."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm_ranks
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.programs.host_rotation import along, routes_through
from hpgo.timing.flow import Flow, predicted_flow, room_of

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import inference_ranks  # noqa: E402
import runtime_models  # noqa: E402
import warm_runs  # noqa: E402 -- what needs torch, where there is one
from refusals import refused  # noqa: E402

from hpgo.runtime import InferencePipeline, Pipeline, Workload  # noqa: E402
from hpgo.runtime.quantization import BITS, ENDS_BYTES, pack, packed_bytes, unpack  # noqa: E402
from hpgo.runtime.runnable import Runnable, bits_behind  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
HOST = socket.gethostname()
MODELS = ("chain", "skips", "tied", "shared", "dropping", "normed", "late")
ROWS = [4, 4, 4, 4, 1, 4, 4, 3]


def put(name: str, stages: int, *, model: str = "chain", order: tuple[int, ...] | None = None, **how: Any) -> Any:
    """A model's layers in equal stages, each on one rank, the first where `order` says."""
    layers = Workload.read(f"runtime_models:{model}").layers
    cut = [layers[len(layers) * at // stages : len(layers) * (at + 1) // stages] for at in range(stages)]
    schedule = hpgo.schedule(name, ranks=stages, micro_batches=1)
    on = order or tuple(range(stages))
    return hpgo.program(
        schedule,
        [(part, [on[at]]) for at, part in enumerate(cut)],
        pipeline_micro_batch_size=4,
        global_batch_size=4,
        **how,
    )


def shared(*hosts: int, model: str = "chain", **how: Any) -> Any:
    """A model's layers in equal stages, each on so many hosts that take turns."""
    whole = put("forward_only", len(hosts), model=model)
    routes = routes_through(hosts, 10**6)
    return hpgo.program(
        along(routes, len(routes)),
        [(stage.layers, [host]) for route in routes for stage, host in zip(whole.stages, route, strict=True)],
        pipeline_micro_batch_size=4, global_batch_size=4 * len(routes), **how,
    )  # fmt: skip


def ran(folder: Path, world: int, cases: list[dict[str, Any]]) -> list[tuple[list[Any], Any]]:
    """What the last rank of each case was given, and its flow's facts."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    done = warm_ranks.ran("inference_ranks.py", world, folder, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{number}.pt", weights_only=False) for number in range(len(cases))]


def case(program: Any, model: str = "chain", **how: Any) -> dict[str, Any]:
    return {
        "program": json.loads(program.to_json()), "workload": f"runtime_models:{model}", "rows": ROWS, **how,
    }  # fmt: skip


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(model: str, rows: list[int] = ROWS) -> list[Any]:
    """What the whole model makes of each micro-batch, in this process."""
    workload = Workload.read(f"runtime_models:{model}")
    if model == "late":  # by the module itself
        torch.manual_seed(0)
        whole: Any = runtime_models.Late().eval()
    else:
        (part,) = workload.parts([workload.layers])
        part.eval()

        def whole(one: Any) -> Any:
            return part(one, rows=len(one))[0]

    with torch.no_grad():
        return [whole(one) for one in inference_ranks.batches(workload, rows)]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4])
def test_outputs_are_those_of_the_whole_model_bit_for_bit_and_in_order(
    world: int, tmp_path: Path, one_thread: None
) -> None:
    cases = [case(put("forward_only", world, model=model), model) for model in MODELS]
    schedules = ["staggered", "sequential"]
    cases += [case(put(name, world, model="skips", order=(3, 0, 2, 1)[-world:] if world == 4 else None), "skips")
              for name in schedules]  # fmt: skip
    models = [*MODELS, "skips", "skips"]
    for model, (outputs, facts) in zip(models, ran(tmp_path / "ran", world, cases), strict=True):
        wanted = expected(model)
        assert len(outputs) == len(wanted)
        assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True)), model
        samples, _, _, texts, (are_kept, train) = facts
        assert list(samples) == ROWS
        assert not any(are_kept), "autograd has kept something"
        assert not any(train)
        assert sorted(texts) == sorted(f"{stage}F{at}" for stage in range(world) for at in range(len(ROWS)))


@pytest.mark.parametrize(("world", "hosts"), [
    (2, [(2,)]),
    (4, [(1, 3), (2, 2), (3, 1), (4,), (1, 2, 1)]),
])  # fmt: skip
def test_hosts_that_take_turns_give_the_whole_model_s_outputs_bit_for_bit_and_in_order(
    world: int, hosts: list[tuple[int, ...]], tmp_path: Path, one_thread: None
) -> None:
    asked: list[tuple[tuple[int, ...], str, list[int], int | None]] = []
    asked += [(one, "skips", ROWS, None) for one in hosts]
    asked += [(one, "tied", ROWS, in_flight) for one in hosts[:2] for in_flight in (1, 2)]
    asked += [(one, "chain", ROWS[:few], None) for one in hosts[:2] for few in (0, 1, 2)]
    cases = [
        case(shared(*one, model=model), model) | {"rows": rows, "in_flight": in_flight}
        for one, model, rows, in_flight in asked
    ]
    for (one, model, rows, in_flight), (outputs, facts) in zip(asked, ran(tmp_path / "ran", world, cases), strict=True):
        wanted = expected(model, rows)
        assert len(outputs) == len(wanted)
        assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True)), (one, model, in_flight)
        if rows:
            flow = Flow(*facts[:3])
            assert list(flow.samples) == rows
            assert len(facts[3]) == len(one) * len(rows)
            assert flow.max_in_flight <= room_of(shared(*one), in_flight)


def test_plans_of_branching_models_give_the_whole_model_s_outputs_bit_for_bit(tmp_path: Path, one_thread: None) -> None:
    layers = ("stem", "left", "left_end", "right", "right_end", "gate", "head")
    edges = [("stem", "left"), ("left", "left_end"), ("stem", "right"), ("right", "right_end"), ("stem", "gate"),
             ("left_end", "gate"), ("right_end", "gate"), ("gate", "head")]  # fmt: skip
    pair = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=100)

    def planned(first: set[str]) -> hpgo.ChainPlan:
        took_s = [1 / len(first) if layer in first else 1 / (len(layers) - len(first)) for layer in layers]
        known = tuple(
            hpgo.Layer(layer, layer, (one_s,), (0.0,), (64.0,), 64.0)
            for layer, one_s in zip(layers, took_s, strict=True)
        )
        plan = hpgo.partition(hpgo.Profile("branches", (4,), known, tuple(edges)), pair)
        assert set(plan.stages[0].layers) == first
        return plan

    firsts = [{"stem", "left"}, {"stem", "right", "right_end"}, {"stem", "left", "right", "right_end"}]
    cases = [case(planned(first).program(batches=1), "branches") for first in firsts]
    wanted = expected("branches")
    for outputs, _ in ran(tmp_path / "ran", 2, cases):
        assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))


def test_a_slow_stage_is_twice_as_fast_on_two_hosts_that_take_turns(tmp_path: Path) -> None:
    cases = [
        case(program, "slow_end") | {"rows": [4] * 24} for program in (put("forward_only", 3, model="slow_end"),
        shared(1, 1, 2, model="slow_end"))
    ]  # fmt: skip
    cases[0]["program"]["nodes"] = [4]  # one is idle
    alone, two = (Flow(*facts[:3]).samples_per_s for _, facts in ran(tmp_path / "ran", 4, cases))
    assert two > 1.4 * alone, "the last stage sleeps for 10 ms, so the two don't share a core"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 20), st.data())
def test_predicted_flows_of_hosts_that_take_turns_keep_to_what_they_can_do(
    hosts: list[int], micro_batches: int, data: st.DataObject
) -> None:
    times = [data.draw(st.sampled_from([1.0, 2.0, 3.0])) for _ in hosts]
    program = shared(*hosts, costs=hpgo.Costs(forward_s=tuple(times), transfer_s=tuple([0.25] * (len(hosts) - 1))))
    flow = predicted_flow(program, [4] * micro_batches)
    assert flow is not None
    alone_s = sum(times) + 0.25 * (len(hosts) - 1)
    assert flow.leave_s[0] == alone_s
    assert all(leave_s - enter_s >= alone_s for enter_s, leave_s in zip(flow.enter_s, flow.leave_s, strict=True))
    slowest_s = max(time_s / count for time_s, count in zip(times, hosts, strict=True))
    rounds = -(-micro_batches // max(hosts)) - 1
    assert flow.leave_s[-1] >= alone_s + rounds * slowest_s - 1e-9
    (few,) = [predicted_flow(program, [4] * micro_batches, in_flight=1)]
    assert few is not None
    assert max(few.leave_s) == micro_batches * alone_s


def test_chains_whose_hosts_do_not_take_turns_are_refused() -> None:
    layers = Workload.read("runtime_models:chain").layers
    for routes in ([(0, 1), (1, 0)], [(0, 1), (0, 1), (0, 2)]):
        program = hpgo.program(
            hpgo.Schedule.from_text(ORDERS[len(routes)], name="forward_only"),
            [(part, [host]) for route in routes for part, host in zip((layers[:4], layers[4:]), route, strict=True)],
            pipeline_micro_batch_size=4, global_batch_size=4 * len(routes),
        )  # fmt: skip
        with pytest.raises(hpgo.errors.ArgumentError, match="don't take turns") as caught:
            InferencePipeline(program, "runtime_models:chain")
        assert caught.value.hint


ORDERS = {2: "0F0,3F1\n1F0,2F1", 3: "0F0,2F1,4F2\n1F0,3F1\n5F2"}


def test_a_slow_stage_stalls_the_source_and_no_more_are_under_way_than_there_is_room_for(tmp_path: Path) -> None:
    rows = [4] * 24
    asked = [("forward_only", None, 10), ("forward_only", 3, 3), ("staggered", None, 4), ("sequential", None, 1)]
    cases = [
        case(put(name, 4, model="slow_end"), "slow_end") | {"rows": rows, "in_flight": in_flight}
        for name, in_flight, _ in asked
    ]
    for (name, in_flight, room), (outputs, facts) in zip(asked, ran(tmp_path / "ran", 4, cases), strict=True):
        flow = Flow(*facts[:3])
        assert len(outputs) == len(rows)
        assert room == room_of(put(name, 4, model="slow_end"), in_flight)
        assert flow.max_in_flight <= room
        if name == "forward_only":  # the source is fast: it fills all the room there is, and then waits
            assert flow.max_in_flight == room
            waits_s = [later - earlier for earlier, later in pairwise(flow.enter_s[room:])]
            assert sorted(waits_s)[len(waits_s) // 2] > 0.005, "the last stage takes 10 ms for each"


def test_what_passes_is_counted_as_it_says() -> None:
    flow = Flow(samples=(2, 2, 1), enter_s=(0.0, 1.0, 4.0), leave_s=(3.0, 4.0, 5.0))
    assert flow.samples_per_s == 1.0
    assert [flow.latency_s(share) for share in (1, 34, 67, 100)] == [1.0, 3.0, 3.0, 3.0]
    assert flow.max_in_flight == 2  # one leaves as the last one enters


@given(st.data())
def test_predicted_flows_end_with_the_simulator_and_keep_their_room(data: st.DataObject) -> None:
    stages, micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    times = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0])
    costs = hpgo.Costs(
        forward_s=tuple(data.draw(times) for _ in range(stages)),
        transfer_s=tuple(data.draw(st.sampled_from([0.0, 0.25, 0.5, 3.0])) for _ in range(stages - 1)),
    )
    schedule = hpgo.schedule("forward_only", ranks=stages, micro_batches=micro_batches)
    program = hpgo.program(
        schedule, [([str(at)], [at]) for at in range(stages)], pipeline_micro_batch_size=1,
        global_batch_size=micro_batches, costs=costs,
    )  # fmt: skip
    flow = predicted_flow(program, [1] * micro_batches)
    assert flow is not None
    # Times that don't change lose nothing by waiting for room: the slowest stage or link sets the pace all the same.
    assert flow.leave_s[-1] == hpgo.simulate(program).makespan_s
    assert flow.max_in_flight <= room_of(program)
    few = data.draw(st.integers(1, 4))
    slower = predicted_flow(program, [1] * micro_batches, in_flight=few)
    assert slower is not None
    assert slower.max_in_flight <= few
    assert slower.leave_s[-1] >= flow.leave_s[-1]
    alone = predicted_flow(program, [1] * micro_batches, in_flight=1)
    assert alone is not None
    assert alone.leave_s[-1] == micro_batches * flow.leave_s[0]


# --- Few bits ---------------------------------------------------------------------------------------------------------


def by_hand(numbers: list[float], low: float, step: float, bits: int) -> bytes:
    """Numbers as they are packed: each its nearest step, the first in the lowest bits."""
    whole = 0
    for at, one in enumerate(numbers):
        whole |= min(max(round((one - low) / step), 0), 2**bits - 1) << (bits * at)
    return whole.to_bytes(bits * -(-len(numbers) // 8), "little")


@pytest.mark.parametrize("bits", BITS)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 70), spread=st.sampled_from([1e-20, 1e-3, 1.0, 1e6]))
def test_numbers_in_few_bits_are_off_by_half_a_step_between_their_ends(
    bits: int, seed: int, count: int, spread: float
) -> None:
    made = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=made) ** 3 * spread + 0.5 * spread
    room = torch.zeros(packed_bytes(count, bits), dtype=torch.uint8)
    assert len(room) - ENDS_BYTES == bits * -(-count // 8)
    pack(numbers, bits, room)
    low, step = room[:ENDS_BYTES].view(torch.float64).tolist()
    assert bytes(room[ENDS_BYTES:].tolist()) == by_hand(numbers.tolist(), low, step, bits)
    high = low + step * (2**bits - 1)
    found = unpack(room, bits, (count,), torch.float64)
    minimum, maximum = min(numbers.tolist()), max(numbers.tolist())
    assert minimum - abs(minimum) * 1e-12 <= low
    if maximum > minimum:
        assert high <= maximum + (abs(maximum) + abs(minimum)) * 1e-12
    for one, other in zip(numbers.tolist(), found.tolist(), strict=True):
        beyond = max(0.0, low - one, one - high)
        assert abs(one - other) <= beyond + step / 2 * (1 + 1e-9) + 1e-12 * max(abs(low), abs(high))


def test_a_constant_travels_as_it_is() -> None:
    for bits in BITS:
        room = torch.zeros(packed_bytes(9, bits), dtype=torch.uint8)
        pack(torch.full((3, 3), -0.7), bits, room)
        assert torch.equal(unpack(room, bits, (3, 3), torch.float32), torch.full((3, 3), -0.7))


def test_stages_receive_what_the_bits_of_their_cut_leave(tmp_path: Path, one_thread: None) -> None:
    ((outputs, _),) = ran(tmp_path / "ran", 2, [case(put("forward_only", 2)) | {"quantize": [4]}])
    workload = Workload.read("runtime_models:chain")
    first, second = (part.eval() for part in workload.parts([workload.layers[:4], workload.layers[4:]]))
    for one, output in zip(inference_ranks.batches(workload, ROWS), outputs, strict=True):
        with torch.no_grad():
            (between,) = first(one, rows=len(one))
            room = torch.zeros(packed_bytes(between.numel(), 4), dtype=torch.uint8)
            pack(between, 4, room)
            wanted = second(unpack(room, 4, tuple(between.shape), between.dtype), rows=len(one))[0]
        assert torch.equal(output, wanted)
        assert not torch.equal(output, second(between, rows=len(one))[0])


def test_bits_are_those_asked_for_or_those_of_the_plan() -> None:
    profile = hpgo.Profile.chain(
        "toy", batch_size=8, forward_s=[1e-3] * 4, backward_s=[0] * 4, activation_bytes=[10**6] * 4,
        parameter_bytes=[4] * 4,
    )  # fmt: skip
    slow = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
    plan = hpgo.partition(profile, slow, batch_size=8, bits=(8,), objective="bits", samples_per_s=2500)
    assert len(plan.stages) == 2
    assert bits_behind([8], 2, None) == Runnable.from_plan(plan).bits == (8,)
    assert bits_behind([8], 2, 0) == (0,)
    assert bits_behind([8], 3, (4, 0)) == (4, 0)
    assert bits_behind(None, 1, 8) == ()
    for asked, words in (
        (7, "can't be sent in 7 bits"),
        ((8, 8), "bits are given for 2 cuts, but 2 stages have 1"),
        (-1, "the number of bits is -1"),
        ("8", "the number of bits is `8`"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
            bits_behind([8], 2, asked)
        assert caught.value.hint


# --- One process ------------------------------------------------------------------------------------------------------


def one() -> Any:
    return put("forward_only", 1)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (3, ("invalid_argument", "1", "3")),
        (torch.zeros(4, 5), ("invalid_argument", "4", "5", "6")),
        (torch.zeros(0, 6), ("invalid_argument", "0", "6")),
        (torch.tensor(3.0), ("invalid_argument", "0", "1", "6")),
        (torch.zeros(5, 6), ("invalid_argument", "5", "4")),
        (torch.zeros(4, 6, dtype=torch.int64), ("invalid_argument", "torch.int64", "torch.float32")),
        ((torch.zeros(4, 6), torch.zeros(4, 6)), ("invalid_argument", "2", "1")),
    ],
)
def test_micro_batches_that_the_model_cannot_take_are_refused(batch: Any, words: tuple[str, ...]) -> None:
    with (
        refused(hpgo.errors.ArgumentError, *words) as caught,
        InferencePipeline(one(), "runtime_models:chain") as pipeline,
    ):
        list(pipeline.infer([torch.zeros(4, 6), batch]))
    assert caught.value.message.startswith(f"rank 0 of stage 0 on {HOST}, the wait for micro-batch 1: ")
    assert caught.value.hint


def test_what_an_iterator_or_a_layer_raises_is_told_with_its_micro_batch() -> None:
    def source() -> Iterator[Any]:
        yield torch.zeros(4, 6)
        raise KeyError("gone")

    with InferencePipeline(one(), "runtime_models:chain") as pipeline:
        with pytest.raises(hpgo.errors.HpgoError, match="the wait for micro-batch 1: KeyError: 'gone'"):
            list(pipeline.infer(source()))
        with refused(hpgo.errors.HpgoError, "wrong_state"):
            pipeline.infer([])


def test_plans_and_options_that_do_not_infer_are_refused() -> None:
    def of(name: str, **how: Any) -> Any:
        return put(name, 1, **how)

    halves = [(Workload.read("runtime_models:chain").layers, [0, 1])]
    schedule = hpgo.schedule("forward_only", ranks=1, micro_batches=1)
    shared = hpgo.program(schedule, halves, pipeline_micro_batch_size=4, global_batch_size=4)
    for change, words in (
        ({"plan": of("1f1b")}, "`1f1b` has backward passes, so it trains"),
        ({"plan": shared}, "stage 0 has 2 replicas"),
        ({"plan": of("forward_only", gpus_per_device=2)}, "is 2 GPUs"),
        ({"workload": "mlp:layers=3,width=4"}, "layer 1 is `0`, but the workload has no such layer"),
    ):
        with pytest.raises(hpgo.errors.HpgoError, match=words) as caught:
            InferencePipeline(**{"plan": one(), "workload": "runtime_models:chain"} | change)
        assert caught.value.hint
    with InferencePipeline(one(), "runtime_models:chain") as pipeline:
        with pytest.raises(hpgo.errors.ArgumentError, match="no step is"):
            pipeline.flow()
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "3"):
            pipeline.infer(3)
        assert list(pipeline.infer([])) == []
    with pytest.raises(hpgo.errors.ArgumentError, match="only forward passes"):
        Pipeline(one(), "runtime_models:chain")


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (HERE.parent / "docs/inference.md").read_text("utf-8"), re.DOTALL)
    exec(compile(block, "docs/inference.md", "exec"), {})
    assert " samples/s, " in capsys.readouterr().out


def test_plans_of_partition_count_layers_as_the_workload_does(tmp_path: Path, one_thread: None) -> None:
    def plan(layers: int) -> hpgo.ChainPlan:
        profile = hpgo.Profile.chain(
            "toy", batch_size=4, forward_s=[1e-3] * layers, backward_s=[0] * layers, activation_bytes=[96] * layers,
            parameter_bytes=[4] * layers,
        )  # fmt: skip
        alone = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        return hpgo.partition(profile, alone, batch_size=4)

    plan(8).save(tmp_path / "chain.json")
    workload = Workload.read("runtime_models:chain")
    for planned in (plan(8), tmp_path / "chain.json"):
        with InferencePipeline(planned, workload) as pipeline:
            outputs = list(pipeline.infer(inference_ranks.batches(workload, ROWS)))
        assert all(torch.equal(*pair) for pair in zip(outputs, expected("chain"), strict=True))
    with pytest.raises(hpgo.errors.ArgumentError, match="the plan is for 7 layers, but the workload has 8: `0` to `7`"):
        InferencePipeline(plan(7), workload)


def test_weights_come_from_checkpoints_of_runs_that_trained(tmp_path: Path, one_thread: None) -> None:
    workload, batch = Workload.read("runtime_models:chain"), torch.randn(4, 6)
    training = put("1f1b", 1)
    with Pipeline(training, workload, seed=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)) as pipeline:
        pipeline.step(batch, batch)
        pipeline.checkpoint(tmp_path / "saved")
        trained = pipeline.parts[0]
    with InferencePipeline(one(), workload) as pipeline:
        (before,) = pipeline.infer([batch])
        assert pipeline.resume(tmp_path / "saved")
        (after,) = pipeline.infer([batch])
    with torch.no_grad():
        assert torch.equal(after, trained.eval()(batch, rows=4)[0])
    assert not torch.equal(before, after)


# --- The command ------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from hpgo.runtime import Workload

def data():
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=made), at % 3) for at in range(30)]

def build():
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(5)]
    return Workload([*layers, nn.Linear(6, 3)], torch.zeros(2, 6), torch.zeros(2).long(), nn.functional.cross_entropy)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm_runs.Runs]:
    folder = tmp_path_factory.mktemp("inference")
    (folder / "mine.py").write_text(MODEL)
    profile = hpgo.Profile.chain(
        "toy", batch_size=4, forward_s=[1e-3] * 6, backward_s=[0] * 6, activation_bytes=[96] * 6,
        parameter_bytes=[4] * 6,
    )  # fmt: skip
    for name, nodes in (("two", 2), ("three", 3)):
        cluster = hpgo.Cluster.of(nodes=nodes, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        hpgo.partition(profile, cluster, batch_size=4).save(folder / f"{name}.json")
    hard = replace(profile, layers=tuple(
        replace(layer, forward_s=(9e-3,)) if at == 4 else layer for at, layer in enumerate(profile.layers)
    ))  # fmt: skip
    hpgo.partition(hard, cluster, batch_size=4, max_replicas=2).save(folder / "shared.json")
    before = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{before}")
        patch.setenv("OMP_NUM_THREADS", "1")
        made = warm_runs.Runs(folder, "infer")
        yield made
        made.close()


def accuracy_of_the_whole(folder: Path) -> float:
    """Of the model of `mine`, in this process, on all of its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        workload = Workload.read("mine:build", seed=2)
    (whole,) = workload.parts([workload.layers], seed=2)
    data = sys.modules["mine"].data()
    with torch.no_grad():
        found = whole.eval()(torch.stack([inputs for inputs, _ in data]), rows=30)[0].argmax(1).tolist()
    return sum(at == target for at, (_, target) in zip(found, data, strict=True)) / 30


def test_the_command_infers_by_a_plan_of_partition(runs: warm_runs.Runs) -> None:
    words = ("two.json", "--workload", "mine:build", "--data", "mine:data", "--seed", "2", "-q", "16")
    runs.start(*words, "--json", "--timeline", "measured.npz")
    ended = runs.finish()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    document = json.loads(ended.out)
    assert (document["micro_batches"], document["samples"], document["exit"]) == (8, 30, 0)
    assert document["samples_per_s"]["predicted"] == pytest.approx(30 / (9 * 3e-3), rel=0.01)
    assert document["latency_s"]["p50"]["predicted"] == pytest.approx(6e-3, rel=0.02)
    latencies = [document["latency_s"][name]["measured"] for name in ("p50", "p95", "p99")]
    assert 0 < latencies[0] <= latencies[1] <= latencies[2]
    assert 1 <= document["max_in_flight"] <= 4
    assert [stage["layers"] for stage in document["stages"]] == [["0", "1", "2"], ["3", "4", "5"]]
    assert all(stage["forward_s"]["measured"] > 0 for stage in document["stages"])
    assert [stage["bits"] for stage in document["stages"]] == [16, None]
    assert [stage["sent_bits"] for stage in document["stages"]] == [{"16": 8}, {}]
    assert document["hold_samples_per_s"] is None
    assert document["stages"][0]["transfer_s"]["measured"] > 0
    assert hpgo.Timeline.read(runs.folder / "measured.npz").micro_batches == 8
    assert document["accuracy"] == accuracy_of_the_whole(runs.folder)


def test_the_command_infers_on_hosts_that_take_turns(runs: warm_runs.Runs) -> None:
    plan = hpgo.ChainPlan.read(runs.folder / "shared.json")
    assert sorted(len(stage.hosts) for stage in plan.stages) == [1, 2]
    runs.start("shared.json", "--workload", "mine:build", "--data", "mine:data", "--seed", "2", "--json")
    ended = runs.finish()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    document = json.loads(ended.out)
    assert (document["micro_batches"], document["samples"], document["exit"]) == (8, 30, 0)
    assert [stage["devices"] for stage in document["stages"]] in ([[0], [1, 2]], [[0, 1], [2]])
    assert document["samples_per_s"]["predicted"] > 0
    assert document["accuracy"] == accuracy_of_the_whole(runs.folder)


def test_the_command_holds_a_rate_and_says_accuracy_beside_it(runs: warm_runs.Runs) -> None:
    runs.start("two.json", "--workload", "mine:build", "--data", "mine:data", "--hold-rate", "0.5")
    ended = runs.finish()
    assert (ended.code, ended.left, ended.errors) == (0, [], [])
    rows = [line for line in ended.out.splitlines() if line.startswith(("throughput", "rate to hold", "accuracy"))]
    assert [line.split()[0] for line in rows] == ["throughput", "rate", "accuracy"]
    assert "0.5 samples/s" in rows[1]
    assert re.search(r"^accuracy +[0-9.]+ %$", rows[2])


ENDLESS = ("--workload", "fault_models:build", "--micro-batches", "100000")
FAULTS = (*ENDLESS, "--heartbeat-timeout", "2s")


@pytest.mark.parametrize("fault", ["kill -9", "SIGSTOP", "exception", "sys.exit(0)"])
def test_a_lost_rank_is_named_once_and_all_end(fault: str, runs: warm_runs.Runs) -> None:
    runs.start("three.json", *FAULTS, PHASE="forward", RANK_LOST="1", FAULT=fault, WHEN="21", PACE="0.002")
    ended = runs.finish()
    assert ended.code == 1
    assert ended.left == []
    assert ended.after_s < 10
    assert len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith(f"error: rank 1 of stage 1 on {HOST}, ")
    if fault in {"exception", "sys.exit(0)"}:
        assert "the forward pass of micro-batch 10 through stage 1: " in ended.errors[0]


@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_a_host_that_takes_turns_and_is_lost_ends_all(rank: str, runs: warm_runs.Runs) -> None:
    runs.start("shared.json", *FAULTS, PHASE="forward", RANK_LOST=rank, FAULT="kill -9", WHEN="21", PACE="0.002")
    ended = runs.finish()
    assert (ended.code, ended.left, len(ended.errors)) == (1, [], 1), ended.err
    assert re.match(rf"error: rank {rank} of stage [01] on ", ended.errors[0])


def test_sigterm_lets_out_what_has_entered_where_hosts_take_turns(runs: warm_runs.Runs) -> None:
    for rank in (0, 2):
        runs.start("shared.json", *FAULTS, PACE="0.005")
        runs.wait_for("micro-batch ")
        runs.signal(signal.SIGTERM, rank)
        ended = runs.finish()
        assert (ended.code, ended.left, ended.errors) == (143, [], [])


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "preempted: "), (signal.SIGINT, 130, "int")]
)
def test_signals_end_a_stream(number: int, code: int, word: str, runs: warm_runs.Runs) -> None:
    runs.start("three.json", *FAULTS, PACE="0.005")
    runs.wait_for("micro-batch ")
    runs.signal(number)
    ended = runs.finish()
    assert (ended.code, ended.left, ended.errors) == (code, [], [])
    assert ended.err.strip().startswith(word)
    assert ended.after_s < 5


def test_sigterm_to_one_rank_lets_out_what_has_entered_and_ends_all(runs: warm_runs.Runs) -> None:
    runs.start("three.json", *FAULTS, PACE="0.005")
    runs.wait_for("micro-batch ")
    runs.signal(signal.SIGTERM, 1)
    ended = runs.finish()
    assert (ended.code, ended.left, ended.errors) == (143, [], [])
    assert ended.after_s < 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "two.json"], "is an inference plan, which can't be trained"),
        (["infer", "trains.json"], "`1f1b` has backward passes, so it trains"),
        (["infer", "two.json", "--checkpoint", "absent"], "no checkpoint found in `absent`"),
    ],
)
def test_plans_of_the_other_kind_are_told(words: list[str], said: str, runs: warm_runs.Runs) -> None:
    put("1f1b", 1).save(runs.folder / "trains.json")
    command, *others = words
    runs.start(*others, "--workload", "mine:build", command=command)
    ended = runs.finish()
    assert ended.code == 1
    assert said in ended.errors[0]
    assert "hint: " in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["infer", "--workload", "mlp", "--steps", "3"], "No such option '--steps'"),
        (["infer", "--workload", "mlp", "-q", "8,x"], "`8,x` is not a list of integers"),
        (["infer"], "Missing option '--workload'"),
        (["run", "--workload", "mlp", "--micro-batches", "3"], "No such option '--micro-batches'"),
        (["run", "--workload", "mlp", "--inference"], "No such option '--inference'"),
    ],
)
def test_options_of_another_command_are_told(words: list[str], said: str) -> None:
    command, *others = words
    result = CliRunner().invoke(group, [command, "any.json", *others])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "a script"])
def test_a_rank_that_raises_ends_all_under_a_launcher(launcher: str, runs: warm_runs.Runs) -> None:
    """In every run, the ranks get what torchrun tells them, and tests/test_run.py has torchrun itself."""
    how = {"PHASE": "forward", "RANK_LOST": "1", "FAULT": "exception", "WHEN": "9"}
    how["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hpgo", "infer", "two.json", *ENDLESS]
        ended = [
            subprocess.run(
                [sys.executable, *words], cwd=runs.folder, capture_output=True, text=True, timeout=120, check=False,
                env={**os.environ, **how},
            )
        ]  # fmt: skip
    else:
        ended = warm_ranks.together(2, runs.folder, "hpgo", "infer", "two.json", *ENDLESS, **how)
    assert {one.returncode for one in ended} == {1}
    errors = [line for one in ended for line in one.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: rank 1 of stage 1 on {HOST}, the forward pass of micro-batch 2 through stage 1: ValueError: boom"
    ]
