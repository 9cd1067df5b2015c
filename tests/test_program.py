"""Programs say what runs: the right rows, messages and sums, so that any process that obeys them trains rightly."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import warm_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.programs.stages import BoundaryTensor

ROOT = Path(__file__).parent.parent
LAYERS = [f"layer{number}" for number in range(12)]
SCHEDULES = ("1f1b", "eager_1f1b", "gpipe", "zb_h1", "zb", "interleaved")


def put(name: str, groups: list[list[int]], share: int = 0, world: int | None = None) -> hpgo.Program:
    """Twelve layers on groups of devices; each group runs as many stages as the schedule has chunks."""
    virtual_stages_per_rank = 2 if name == "interleaved" else 1
    depth = len(groups)
    schedule = hpgo.schedule(
        name,
        ranks=depth,
        micro_batches=2 * depth,
        virtual_stages_per_rank=virtual_stages_per_rank if virtual_stages_per_rank > 1 else None,
    )
    size = share or max(map(len, groups))
    ends = [len(LAYERS) * stage // schedule.stages for stage in range(schedule.stages + 1)]
    stages = [
        (LAYERS[ends[stage] : ends[stage + 1]], groups[schedule.rank_of_stage[stage]])
        for stage in range(schedule.stages)
    ]
    return hpgo.program(
        schedule,
        stages,
        pipeline_micro_batch_size=size,
        global_batch_size=size * 2 * depth,
        nodes=None if world is None else (world,),
    )


# --- One process's gradients ------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "3:1": {"groups": [[0, 1, 2], [3]], "share": 3},
    "3:1, uneven rows": {"groups": [[0, 1, 2], [3]], "share": 7},
    "2:1:1": {"groups": [[0, 1], [2], [3]]},
    "an idle rank": {"groups": [[0, 1], [3]], "world": 4},
    "swapped devices": {"groups": [[3, 1], [0, 2]], "share": 5},
}


@pytest.mark.parametrize(
    ("world", "cases"),
    [(4, CASES), (16, {"7:6:3": {"groups": [[*range(7)], [*range(7, 13)], [13, 14, 15]], "share": 11}})],
)
def test_the_example_engine_gives_one_processs_gradients(world: int, cases: dict[str, Any], tmp_path: Path) -> None:
    """Float64, every schedule: the largest difference is 1e-12 of the largest gradient."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    paths = []
    for at, arguments in enumerate(cases.values()):
        for name in SCHEDULES:
            paths.append(tmp_path / f"{at}-{name}.json")
            put(name, **arguments).save(paths[-1])
    done = warm_ranks.ran("engine_ranks.py", world, tmp_path, *paths, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for path in paths:
        program = hpgo.Program.read(path)
        expected, expected_loss = one_process(torch, program.global_batch_size)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        found: Counter[str] = Counter()
        loss = 0.0
        for rank in range(world):
            part, gradients = torch.load(f"{path}.{rank}.pt", weights_only=True)
            loss += float(part)
            for name, gradient in gradients.items():
                found[name] += 1
                assert float((gradient - expected[name]).abs().max()) <= 1e-12 * largest, (path.name, rank, name)
        assert set(found) == set(expected), path.name
        assert loss == pytest.approx(expected_loss, rel=1e-12)


def one_process(torch: Any, size: int) -> tuple[dict[str, Any], float]:
    """Gradients and loss of the whole batch at once, with layers and data of the example."""
    ranks = _module("engine_ranks", ROOT / "tests/engine_ranks.py")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layers = torch.nn.ModuleDict({name: ranks.engine.make_layer(name) for name in LAYERS})
    finally:
        torch.set_default_dtype(default)
    value, targets = ranks.batch(size)
    for name in LAYERS:
        value = layers[name](value)
    loss = ((value - targets) ** 2).mean(1).sum() / size
    loss.backward()
    return {name: parameter.grad for name, parameter in layers.named_parameters()}, float(loss.detach())


def _module(name: str, path: Path) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# --- Laws of messages -------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> hpgo.Program:
    name = draw(st.sampled_from([*SCHEDULES, "zb_v", "hanayo", "dualpipe", "chimera", "forward_only"]))
    depth = draw(st.integers(1, 4))
    if name in {"zb_v", "hanayo", "dualpipe", "chimera"}:
        depth += depth % 2
    micro_batches = depth * draw(st.integers(2, 3)) * (2 if name in {"dualpipe", "chimera"} else 1)
    schedule = hpgo.schedule(name, ranks=depth, micro_batches=micro_batches)
    replicas = draw(st.lists(st.integers(1, 4), min_size=depth, max_size=depth))
    devices = draw(st.permutations(range(sum(replicas) + draw(st.integers(0, 2)))))
    groups = [devices[sum(replicas[:at]) : sum(replicas[: at + 1])] for at in range(depth)]
    size = max(replicas) + draw(st.integers(0, 5))
    length = schedule.stages_per_pipeline
    layers = [[f"{stage}.{at}" for at in range(draw(st.integers(1, 3)))] for stage in range(length)]
    return hpgo.program(
        schedule,
        [(layers[stage % length], groups[schedule.rank_of_stage[stage]]) for stage in range(schedule.stages)],
        pipeline_micro_batch_size=size,
        global_batch_size=size * schedule.total_micro_batches,
        nodes=(len(devices),),
    )


@settings(max_examples=60)
@given(programs())
def test_every_message_has_one_sender_and_one_receiver_and_rows_arrive_once(program: hpgo.Program) -> None:
    ranks = [program.for_rank(rank) for rank in range(program.world_size)]
    sent: Counter[tuple[object, ...]] = Counter()
    received: Counter[tuple[object, ...]] = Counter()
    for mine in ranks:
        for action in mine.actions:
            (stage,) = (stage for stage in mine.stages if stage.stage == action.stage)
            for ways, tally, ends in (
                (action.sends, sent, (mine.rank, None)),
                (action.receives, received, (None, mine.rank)),
            ):
                for message in ways:
                    sender, receiver = (message.peer if end is None else end for end in ends)
                    tally[sender, receiver, message.rows, message.from_stage, message.to_stage, action.micro_batch] += 1
            if action.receives:
                rows = [row for message in action.receives for row in message.rows]
                assert rows == list(stage.rows), "senders in the order of their rows, each row once"
            assert bool(action.receives) == (
                (action.kind == "F" and not stage.is_first) or (action.kind in "BI" and not stage.is_last)
            )
    assert sent == received
    assert max(sent.values(), default=1) == 1


@settings(max_examples=60)
@given(programs())
def test_every_rank_runs_its_schedule_ranks_actions_in_order(program: hpgo.Program) -> None:
    for rank in range(program.world_size):
        mine = program.for_rank(rank)
        if mine.is_idle:
            continue
        row = program.schedule.rank_of_stage[mine.stages[0].stage]
        halves = [
            text
            for entry in program.schedule.action_lists[row]
            for text in entry.removesuffix("OVERLAP_F_B").strip("()").split(";")
        ]
        assert [f"{action.stage}{action.kind}{action.micro_batch}" for action in mine.actions] == halves


@settings(max_examples=60)
@given(programs())
def test_gradient_sums_reach_every_copy_of_every_layer(program: hpgo.Program) -> None:
    holders: dict[str, set[int]] = {}
    for rank in range(program.world_size):
        mine = program.for_rank(rank)
        for layer in (layer for stage in mine.stages for layer in stage.layers):
            holders.setdefault(layer, set()).add(rank)
        assert {layer for one in mine.sums for layer in one.layers} == {
            layer for stage in mine.stages for layer in stage.layers
        }
        assert {one.ranks for one in mine.sums if len(one.ranks) > 1} <= set(mine.groups)
    assert {layer: set(one.ranks) for one in program.sums for layer in one.layers} == holders


@settings(max_examples=60)
@given(programs())
def test_programs_survive_json_and_pickling(program: hpgo.Program) -> None:
    text = program.to_json()
    jsonschema.validate(json.loads(text), json.loads((ROOT / "docs/program.schema.json").read_text()))
    again = hpgo.Program.from_json(text)
    assert again == program
    assert again.schedule.synchronization == program.schedule.synchronization
    assert pickle.loads(pickle.dumps(program)) == program
    assert [again.for_rank(rank) for rank in range(again.world_size)] == [
        program.for_rank(rank) for rank in range(program.world_size)
    ]


def test_a_plan_a_chain_plan_and_a_schedule_make_programs() -> None:
    plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-b"), global_batch_size=64)
    runs = plan.program()
    assert hpgo.simulate(runs).makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    assert hpgo.Program.from_json(runs.to_json()) == runs
    assert hpgo.simulate(runs).row == "stage"
    chain = hpgo.partition(hpgo.read_profile("vgg-16"), hpgo.Cluster.preset("dapple-b"), batch_size=32)
    passes = chain.program(batches=64)
    timeline = hpgo.simulate(passes)
    assert timeline.makespan_s == pytest.approx(chain.latency_s + 63 * chain.interval_s, rel=0.05)
    assert {action.kind for action in passes.for_rank(0).actions} == {"F"}


def test_hosts_that_share_a_stage_take_turns_and_keep_up_the_planned_interval() -> None:
    profile = hpgo.Profile.chain(
        "toy", batch_size=4, forward_s=[1, 6, 1], backward_s=[0] * 3, activation_bytes=[10**8] * 3,
        parameter_bytes=[4] * 3,
    )  # fmt: skip
    cluster = hpgo.Cluster.of(nodes=5, devices_per_node=1, intra_gbit_s=10, inter_gbit_s=10)
    chain = hpgo.partition(profile, cluster, batch_size=4, max_replicas=3)
    assert max(len(stage.hosts) for stage in chain.stages) > 1
    passes = chain.program(batches=60)
    assert hpgo.Program.from_json(passes.to_json()) == passes
    assert hpgo.simulate(passes).makespan_s == pytest.approx(chain.latency_s + 59 * chain.interval_s, rel=0.05)
    taken = [action.micro_batch for rank in range(passes.world_size) for action in passes.for_rank(rank).actions]
    assert sorted(taken) == sorted([*range(60)] * len(chain.stages))
    held = [{layer for stage in passes.for_rank(rank).stages for layer in stage.layers} for rank in range(5)]
    for stage in chain.stages:
        layers = {str(layer) for layer in range(stage.first, stage.last + 1)}
        assert held.count(layers) == len(stage.hosts)
    assert len(chain.program(batches=1).stages) == len(chain.stages)


def test_what_crosses_a_cut_is_what_later_stages_read() -> None:
    profile = hpgo.read_profile("bert-48")
    plan = hpgo.plan(profile, hpgo.Cluster.preset("dapple-b"), global_batch_size=64)
    place = {layer: number for number, stage in enumerate(plan.stages) for layer in stage.layers}
    for cut, boundary_tensors in enumerate(plan.boundary_tensors):
        expected = {start for start, end in profile.edges if place[start] <= cut < place[end]}
        assert {one.layer for one in boundary_tensors} == expected
    middle = plan.for_rank(plan.stages[1].devices[0])
    assert "attention-mask" in middle.actions[0].receives[0].layers, "read by all stages, so passed on by each"


# --- What is refused --------------------------------------------------------------------------------------------------

PAIR = hpgo.schedule("1f1b", ranks=2, micro_batches=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": [(["a"], [0])]}, "runs 2 stages, but layers and devices are given for 1"),
        ({"stages": [(["a"], [0, 1, 2]), (["b"], [3])]}, "a micro-batch has 2 samples, but there are 3 replicas"),
        ({"stages": [(["a"], [0]), (["b"], [0])]}, "device 0 holds stage 1, which rank 1"),
        ({"stages": [(["a"], [0]), (["a"], [1])]}, "layer `a` is in two stages"),
        ({"stages": [(["a"], [0, 0]), (["b"], [1])]}, "names a device twice"),
        ({"stages": [([], [0]), (["b"], [1])]}, "stage 0 has no layers"),
        ({"stages": [(["a"], []), (["b"], [1])]}, "stage 0 has no devices"),
        ({"stages": [("a", [0]), (["b"], [1])]}, "the layers of stage 0 are `a`"),
        ({"stages": [(["a"], [-1]), (["b"], [1])]}, "names device -1"),
        ({"stages": 3}, "stages are 3"),
        ({"stages": [3, 4]}, "stage 0 is 3"),
        ({"schedule": "1f1b"}, "the schedule is `1f1b`"),
        ({"global_batch_size": 5}, "2 micro-batches of 2 are 4 samples, but global_batch_size is 5"),
        ({"pipeline_micro_batch_size": 0}, "pipeline_micro_batch_size is 0"),
        ({"nodes": (1,)}, "stage 1 is on device 1, but the nodes have 1 devices"),
        ({"boundary_tensors": [[BoundaryTensor("b")]]}, "stage 0 can't send the output of `b`"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "schedule": PAIR, "stages": [(["a"], [0]), (["b"], [1])], "pipeline_micro_batch_size": 2, "global_batch_size": 4
    }  # fmt: skip
    with pytest.raises(hpgo.errors.ArgumentError, match=words.replace("(", r"\(")):
        hpgo.program(**given | changes)


def test_damaged_programs_are_refused_with_their_name(tmp_path: Path) -> None:
    program = hpgo.program(PAIR, [(["a"], [0]), (["b"], [1])], pipeline_micro_batch_size=2, global_batch_size=4)
    good = json.loads(program.to_json())
    for change in (
        {"version": 9},
        {"pipeline_micro_batch_size": 3},
        {"nodes": []},
        {"stages": []},
        {"stages": [good["stages"][0] | {"rows": [[0, 1]]}, good["stages"][1]]},
        {"stages": [good["stages"][0] | {"rows": [[0]]}, good["stages"][1]]},
        {"schedule": good["schedule"] | {"action_lists": ["0F0"]}},
        {"schedule": good["schedule"] | {"stages_per_pipeline": 1}},
        {"schedule": good["schedule"] | {"synchronization": "trot"}},
        {"costs": {"forward_s": 1}},
        {"strange": 1},
    ):
        path = tmp_path / "program.json"
        path.write_text(json.dumps(good | change))
        with pytest.raises(hpgo.errors.HpgoError) as caught:
            hpgo.Program.read(path)
        assert caught.value.hint, change


def test_costs_given_beside_a_plan_replace_its_own() -> None:
    plan = hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)
    free = hpgo.simulate(plan, transfer_s=0.0, latency_s=0.0)
    assert free.makespan_s < plan.step_s
    assert (
        hpgo.simulate(plan, costs=replace(plan.program().costs or hpgo.Costs(), transfer_s=0.0)).makespan_s
        < plan.step_s
    )
